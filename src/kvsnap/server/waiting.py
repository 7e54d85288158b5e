"""Whose turn it is: one engine, one thread that drives it, and the requests that wait for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kvsnap.server.refusals import RefusalError, soon

__all__ = ["Line"]

T = TypeVar("T")


class Line:
    """Runs work one at a time in a thread of its own. Tenants take turns; within a tenant first come is first served.

    Everything but the work itself happens in the event loop. `limit` is how many requests of a tenant may wait.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._busy = False
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvsnap-engine")

    @property
    def n_waiting(self) -> int:
        """Requests that wait now."""
        return sum(map(len, self._waiting.values()))

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """Wait for a turn, then run `work` in the thread and return what it returns.

        Cancelled while it waits, the place is given up; later the work goes on, and nobody hears of its result.
        Raise `RefusalError` where too many wait already, or the server stops.
        """
        await self._turn(tenant)
        running = asyncio.get_running_loop().run_in_executor(self._thread, work)
        running.add_done_callback(self._ended)
        return await asyncio.shield(running)

    async def aside(self, work: Callable[[], T]) -> T:
        """Run work in the thread as soon as it is free, before those that wait."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _turn(self, tenant: str) -> None:
        if self._closed:
            raise _stopping()
        if not self._busy:
            self._busy = True
            return
        places = self._waiting.setdefault(tenant, deque())
        if len(places) >= self._limit:
            raise soon(429, f"too many requests wait for the model already: {len(places)}", code="too_many_waiting")
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        places.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place in places:
                places.remove(place)
            elif not place.cancelled() and place.exception() is None:
                self._next()  # it was given the turn just now
            raise

    def _next(self) -> None:
        while self._waiting:
            tenant = next(iter(self._waiting))
            places = self._waiting.pop(tenant)
            place = places.popleft() if places else None
            if places:
                self._waiting[tenant] = places  # behind the others
            if place is not None and not place.done():
                place.set_result(None)
                return
        self._busy = False

    def _ended(self, running: asyncio.Future[Any]) -> None:
        if not running.cancelled():
            running.exception()  # seen, also where nobody waits for it any more: the log must not show its text
        self._next()

    def first(self, work: Callable[[], T]) -> T:
        """Run work in the thread before there is an event loop, and wait for it."""
        return self._thread.submit(work).result()

    def stop(self) -> None:
        """Refuse all that wait, and all that come. What runs goes on."""
        self._closed = True
        for places in self._waiting.values():
            for place in places:
                if not place.done():
                    place.set_exception(_stopping())
        self._waiting.clear()

    def finish(self, work: Callable[[], T]) -> T:
        """Run a last piece of work behind what runs, wait for it, and end the thread."""
        try:
            return self._thread.submit(work).result()
        finally:
            self._thread.shutdown()


def _stopping() -> RefusalError:
    return soon(503, "the server is being stopped", code="stopping")

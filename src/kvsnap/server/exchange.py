"""One request and its answer: what the thread of the engine says, what the client does, and the time that is left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from kvsnap.conversation import Turn
from kvsnap.server.asking import Asked
from kvsnap.server.refusals import RefusalError, soon
from kvsnap.server.rooms import Placed, Room
from kvsnap.server.waiting import Line

__all__ = ["Begun", "Ended", "Exchange", "Gone", "Said"]

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class Begun:
    """The prompt is evaluated, and the answer comes: it goes into this session."""

    session: str


@dataclass(frozen=True, slots=True)
class Said:
    """More text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The answer is there and stored."""

    turn: Turn
    placed: Placed


@dataclass(frozen=True, slots=True)
class Gone:
    """The client has left."""


@dataclass(frozen=True, slots=True)
class Failed:
    """No answer, or no more of it."""

    error: BaseException


Event = Begun | Said | Ended | Gone | Failed


class Exchange:
    """Runs one request in the thread of the engine and hands out what happens, in the event loop.

    The thread never waits for the client: what it says lies in a queue, which the limit on tokens bounds. Ended early,
    the answer stops at its next token, and the turn is stored as cut off. `late` is done when the time is over.
    """

    def __init__(self, asked: Asked, name: str | None) -> None:
        self._asked, self._name = asked, name
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._stopped = threading.Event()
        self._why: RefusalError | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._timers: list[asyncio.TimerHandle] = []
        self.session: str | None = name
        self.late: asyncio.Future[None] = self._loop.create_future()

    # -- in the event loop -----------------------------------------------------------------------------------------

    def start(self, line: Line, tenant: str, room: Room, receive: Receive, seconds: float) -> None:
        """Get in line, watch the client, and start the clock."""
        running = asyncio.ensure_future(line.run(tenant, lambda: self._work(room)))
        running.add_done_callback(self._done)
        self._tasks = [running, asyncio.ensure_future(self._watch(receive))]
        self._timers.append(self._loop.call_later(seconds, self._time_over))

    async def next(self) -> Event:
        """Return the next thing that happens."""
        return await self._events.get()

    def close(self) -> None:
        """End it, whatever it is at: what waits gives up its place, what runs ends at its next token."""
        self._stopped.set()
        for task in self._tasks:
            task.cancel()
        for timer in self._timers:
            timer.cancel()

    def stop_in(self, seconds: float, patience: float) -> None:
        """End the answer in so many seconds because the server stops, and soon after give up a client that hangs."""
        self._timers.append(self._loop.call_later(seconds, self._server_stops))
        self._timers.append(self._loop.call_later(seconds + patience, self._give_up))

    def _server_stops(self) -> None:
        self._why = self._why or soon(503, "the server is being stopped; what was generated is stored",
                                      code="stopping", session=self.session)  # fmt: skip
        self._stopped.set()

    def _time_over(self) -> None:
        self._why = self._why or RefusalError(504, "the time for one request is over; what was generated is stored",
                                         code="timeout", session=self.session)  # fmt: skip
        self._stopped.set()
        self._events.put_nowait(Failed(self._why))
        self._give_up()

    def _give_up(self) -> None:
        if not self.late.done():
            self.late.set_result(None)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._stopped.set()
        self._events.put_nowait(Gone())

    def _done(self, running: asyncio.Task[Ended | None]) -> None:
        # The end is told when the turn in line is given up: who asks again at once must not meet his own request.
        if running.cancelled():
            return
        error = running.exception()
        if error is not None:
            self._events.put_nowait(Failed(error))
        elif (ended := running.result()) is not None:
            self._tell(ended)

    def _tell(self, event: Event) -> None:
        if isinstance(event, Begun):
            self.session = event.session
        if isinstance(event, Ended) and event.turn.stop == "interrupted" and self._why is not None:
            event = Failed(self._why)
        self._events.put_nowait(event)

    # -- in the thread of the engine ---------------------------------------------------------------------------------

    def _work(self, room: Room) -> Ended | None:
        if self._stopped.is_set():
            return None
        room.save_live()
        placed = room.place(self._asked, self._name)
        conversation = placed.conversation
        try:
            conversation.sampler = self._asked.sampler
            asked = self._asked
            with conversation.stream(asked.messages, max_tokens=asked.max_tokens, stop=asked.stop) as stream:
                self._say(Begun(placed.name))
                # The first token is always taken: a turn that is left before it would not be stored.
                for token in stream:
                    if token.text:
                        self._say(Said(token.text))
                    if self._stopped.is_set():
                        break
            turn = stream.turn
        finally:
            room.leave(placed)
        return Ended(turn, placed)

    def _say(self, event: Event) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._tell, event)

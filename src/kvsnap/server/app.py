"""The endpoints. docs/server.md lists them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, ExitStack, suppress
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from kvsnap.errors import InputError, KvsnapError
from kvsnap.protocols import Engine
from kvsnap.server.answering import Answer
from kvsnap.server.asking import Asked, integer_of, object_of, parse
from kvsnap.server.exchange import Begun, Ended, Exchange, Failed, Gone, Said
from kvsnap.server.gate import sent
from kvsnap.server.refusals import RefusalError, plain, refused
from kvsnap.server.rooms import Room
from kvsnap.server.settings import Settings
from kvsnap.server.tenants import Tenant
from kvsnap.server.waiting import Line

__all__ = ["SESSION", "Service", "application"]

SESSION = "X-Kvsnap-Session"
_PATIENCE = 2.0
"""Seconds in which a client may take what is left of an answer when the server stops."""

T = TypeVar("T")


class Service:
    """One engine, the rooms of its tenants, and the line of requests. Made and closed outside of the event loop."""

    def __init__(self, engine: Engine, settings: Settings, tenants: tuple[Tenant, ...], created: int) -> None:
        self.engine, self.settings, self.created = engine, settings, created
        self.line = Line(settings.limits.waiting)
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="kvsnap-library")
        self._going: set[Exchange] = set()
        self.on_signal: Callable[[], None] = self.end
        with ExitStack() as undo:
            self._rooms = {}
            for tenant in tenants:
                self._rooms[tenant] = Room(engine, settings, tenant)
                undo.callback(self._rooms[tenant].close)
            undo.pop_all()

    def room(self, request: Request) -> Room:
        """Return the room of whoever asks."""
        return self._rooms[request.scope["kvsnap.tenant"]]

    # -- answers -------------------------------------------------------------------------------------------------------

    async def exchange(self, request: Request, asked: Asked) -> Any:
        """Answer one request: return a response, or what streams it. Raise what kept it from being answered."""
        going = Exchange(asked, _session_of(request))
        self._going.add(going)
        streams = False
        try:
            tenant = request.scope["kvsnap.tenant"]
            going.start(self.line, tenant.name, self.room(request), request.receive, self.settings.limits.request_s)
            answer = Answer(self.settings.model, asked.usage)
            while True:
                event = await going.next()
                if isinstance(event, Begun) and asked.stream:
                    streams = True
                    return _Streamed(going, answer, event.session, lambda: self._going.discard(going))
                if isinstance(event, Ended):
                    headers = {SESSION: quote(event.placed.name)}
                    return JSONResponse(answer.whole(event.turn, event.placed), headers=headers)
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Gone):
                    return _Nothing()
        finally:
            if not streams:
                self._going.discard(going)
                going.close()

    # -- sessions ------------------------------------------------------------------------------------------------------

    async def read(self, work: Callable[[], T]) -> T:
        """Run what needs no engine, beside what is generated."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    async def change(self, request: Request, work: Callable[[], T]) -> T:
        """Run what changes a session when its turn comes. Raise `RefusalError` where that takes too long."""
        running = self.line.run(request.scope["kvsnap.tenant"].name, work)
        try:
            return await asyncio.wait_for(running, self.settings.limits.request_s)
        except asyncio.TimeoutError:
            raise RefusalError(504, "the time for one request is over", code="timeout") from None

    # -- its life ------------------------------------------------------------------------------------------------------

    async def tidy(self) -> None:
        """Close what is not used, again and again, until cancelled."""
        idle = self.settings.limits.idle_s
        while True:
            await asyncio.sleep(max(0.05, min(idle / 4, 30.0)))
            with suppress(KvsnapError):  # what could not be stored was told to its client
                await self.line.aside(lambda: self._close_idle(idle))

    def _close_idle(self, seconds: float) -> None:
        for room in self._rooms.values():
            room.close_idle(seconds)

    def end(self, *, now: bool = False) -> None:
        """Take no more requests, and end what goes on: after the time of grace, or now."""
        self.line.stop()
        for going in self._going:
            going.stop_in(0.0 if now else self.settings.grace_s, _PATIENCE)

    def close(self) -> None:
        """Wait for what runs, store and close everything. Raise `StorageError` where something could not be stored."""

        def work() -> None:
            with ExitStack() as closing:
                for room in self._rooms.values():
                    closing.callback(room.close)

        self._readers.shutdown()
        self.line.finish(work)


class _Nothing:
    """The client has left: nothing is sent."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None: ...


class _Streamed:
    """A response that sends the events of an exchange as they come, and ends the exchange whatever happens."""

    def __init__(self, going: Exchange, answer: Answer, session: str, ended: Callable[[], None]) -> None:
        self._going, self._answer, self._session, self._ended = going, answer, session, ended

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send it. A client that does not read holds nothing but its connection, until its time is over."""
        del scope, receive
        sending = asyncio.ensure_future(self._sent(send))
        try:
            await asyncio.wait({sending, self._going.late}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():  # what is ready may still be sent: the client is told why
                await asyncio.wait({sending}, timeout=_PATIENCE)
            if sending.done():
                await sending
        finally:
            self._ended()
            self._going.close()
            sending.cancel()

    async def _sent(self, send: Any) -> None:
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store",
                   SESSION.lower(): quote(self._session)}  # fmt: skip
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        await _more(send, self._answer.first())
        while True:
            event = await self._going.next()
            if isinstance(event, Said):
                await _more(send, self._answer.piece(event.text))
            elif isinstance(event, Ended):
                for data in self._answer.last(event.turn, event.placed):
                    await _more(send, data)
                break
            elif isinstance(event, Failed):
                if not isinstance(event.error, KvsnapError):
                    raise event.error
                await _more(send, self._answer.failed(event.error))
                break
            elif isinstance(event, Gone):
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _more(send: Any, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


def _session_of(request: Request) -> str | None:
    name = request.headers.get(SESSION)
    return None if name is None else unquote(name, errors="strict")


async def _body(request: Request, settings: Settings) -> bytes:
    """Return the body. Raise `RefusalError` when it is too large, or does not come in time."""
    limits = settings.limits
    told = request.headers.get("content-length", "0")
    if told.isascii() and told.isdecimal() and int(told[:19]) > limits.body_bytes:
        raise _too_large(limits.body_bytes)

    async def whole() -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > limits.body_bytes:
                raise _too_large(limits.body_bytes)
            parts.append(part)
        return b"".join(parts)

    try:
        return await asyncio.wait_for(whole(), limits.request_s)
    except asyncio.TimeoutError:
        raise RefusalError(408, "the body of the request did not come in time", code="timeout",
                      headers={"Connection": "close"}) from None  # fmt: skip


def _too_large(most: int) -> RefusalError:
    return RefusalError(413, "the body is too large", code="body_too_large", expected=f"at most {most} bytes",
                   headers={"Connection": "close"})  # fmt: skip


class _Endpoints:
    """What each address does."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """Return all addresses."""
        one = "/v1/sessions/{name}"
        return [
            Route("/health", self.health), Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/sessions", self.sessions), Route(one, self.session), Route(f"{one}/history", self.history),
            Route(one, self.delete, methods=["DELETE"]), Route(f"{one}/fork", self.fork, methods=["POST"]),
            Route(f"{one}/rewind", self.rewind, methods=["POST"]), Route(f"{one}/save", self.save, methods=["POST"]),
            Route(f"{one}/reset", self.reset, methods=["POST"]),
        ]  # fmt: skip

    async def health(self, request: Request) -> Any:
        del request
        return JSONResponse({"status": "ok"})

    def _model(self) -> dict[str, Any]:
        service = self._service
        return {
            "id": service.settings.model, "object": "model", "created": service.created, "owned_by": "kvsnap",
            "context_length": service.engine.context_limit,
        }  # fmt: skip

    async def models(self, request: Request) -> Any:
        del request
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Any:
        if request.path_params["name"] != self._service.settings.model:
            raise RefusalError(404, "no such model here", code="model_not_found", expected=self._service.settings.model)
        return JSONResponse(self._model())

    async def chat(self, request: Request) -> Any:
        raw = await _body(request, self._service.settings)
        return await self._service.exchange(request, parse(raw, self._service.settings))

    async def sessions(self, request: Request) -> Any:
        found = await self._service.read(self._service.room(request).listed)
        return JSONResponse({"object": "list", "data": found})

    async def session(self, request: Request) -> Any:
        return await self._read(request, Room.told)

    async def history(self, request: Request) -> Any:
        return await self._read(request, Room.history)

    async def fork(self, request: Request) -> Any:
        body = await self._options(request, "name", "n_tokens", "commit")
        new = body.get("name")
        if new is not None and not isinstance(new, str):
            raise RefusalError(400, "name is not a text", param="name", code="invalid_value")
        n_tokens, commit = integer_of(body, "n_tokens"), integer_of(body, "commit")
        return await self._read(request, lambda room, name: room.forked(name, new, n_tokens, commit))

    async def rewind(self, request: Request) -> Any:
        body = await self._options(request, "turns", "commit")
        turns, commit = integer_of(body, "turns"), integer_of(body, "commit")
        return await self._changed(request, lambda room, name: room.rewound(name, turns, commit))

    async def save(self, request: Request) -> Any:
        return await self._changed(request, Room.saved)

    async def reset(self, request: Request) -> Any:
        return await self._changed(request, Room.emptied)

    async def delete(self, request: Request) -> Any:
        return await self._changed(request, Room.removed)

    async def _options(self, request: Request, *known: str) -> Mapping[str, Any]:
        body = object_of(await _body(request, self._service.settings))
        unknown = next((name for name in body if name not in known), None)
        if unknown is not None:
            raise RefusalError(
                400, "unknown option", param=unknown[:80], code="invalid_value", expected=", ".join(known)
            )
        return body

    async def _read(self, request: Request, work: Callable[[Room, str], Any]) -> Any:
        room, name = self._service.room(request), request.path_params["name"]
        return JSONResponse(await self._service.read(lambda: work(room, name)))

    async def _changed(self, request: Request, work: Callable[[Room, str], Any]) -> Any:
        room, name = self._service.room(request), request.path_params["name"]
        return JSONResponse(await self._service.change(request, lambda: work(room, name)))


async def _told(request: Request, error: Exception) -> Any:
    del request
    if isinstance(error, KvsnapError):
        return sent(refused(error))
    if isinstance(error, UnicodeError):
        return sent(refused(InputError(f"{SESSION} is not percent-encoded UTF-8")))
    status, words = 500, "an error of the server; it is in its log"
    if isinstance(error, HTTPException):
        status, words = error.status_code, str(error.detail)
    return sent(plain(status, words, {404: "not_found", 405: "method_not_allowed"}.get(status, "internal")))


Lifespan = Callable[[Any], AbstractAsyncContextManager[None]]


def application(service: Service, lifespan: Lifespan) -> Any:
    """Return the ASGI application of a service."""
    return Starlette(
        routes=_Endpoints(service).routes(), lifespan=lifespan,
        exception_handlers={
            KvsnapError: _told, HTTPException: _told, UnicodeError: _told, Exception: _told,
        },
    )  # fmt: skip

"""Listening, signals, the log, and an end that loses nothing."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any

import uvicorn

from kvsnap.errors import InputError, StorageError
from kvsnap.protocols import Engine
from kvsnap.server.app import Service, application
from kvsnap.server.gate import Gate, is_loopback
from kvsnap.server.settings import Settings
from kvsnap.server.tenants import Tenant, Tokens

__all__ = ["bound", "serve"]

_PATIENCE = 10
"""Seconds after the time of grace in which open connections may end by themselves."""


def bound(host: str, port: int, *, has_tokens: bool) -> socket.socket:
    """Return a socket that is bound, and does not listen yet. Port 0 takes a free one.

    Raise `InputError` for an address that others can reach when no token is asked for, `StorageError` where the address
    cannot be taken.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, proto, _, address = found[0]
        if not has_tokens and not is_loopback(str(address[0])):
            raise InputError(
                "without a token only this machine may ask: give one (--token-file), or listen on 127.0.0.1", found=host
            )
        made = socket.socket(family, kind, proto)
    except OSError as error:
        raise StorageError(f"no such address to listen on: {error.strerror}", errno=error.errno) from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        raise StorageError(f"cannot listen on {host} port {port}: {error.strerror}", errno=error.errno) from error
    return made


def serve(
    engine: Engine,
    settings: Settings,
    where: socket.socket,
    *,
    library: str,
    tokens: Tokens | None = None,
    ready: Callable[[str], None],
) -> None:
    """Answer requests until SIGTERM or SIGINT. Return when everything is stored and closed.

    Without `tokens` everyone who reaches `where` uses the library in the directory `library`. `ready` is called with
    the address once requests are taken. A second signal does not wait for the time of grace. Raise `InputError` for a
    model without a chat template, what opening a library raises, and `StorageError` where something could not be stored
    in the end.
    """
    everyone = None if tokens is not None else Tenant("", library)
    tenants = tokens.tenants if tokens is not None else (Tenant("", library),)
    service = Service(engine, settings, tenants, int(time.time()))
    try:
        service.line.first(lambda: _check(engine))
        log = _logging()
        gate = Gate(application(service, _lifespan(service, where, ready)), tokens, everyone)
        config = uvicorn.Config(
            gate, http="h11", ws="none", lifespan="on", log_config=None, access_log=False, server_header=False,
            timeout_graceful_shutdown=int(settings.grace_s) + _PATIENCE, h11_max_incomplete_event_size=1 << 16,
        )  # fmt: skip
        server = uvicorn.Server(config)
        service.on_signal = lambda: _stop(service, server)
        asyncio.run(server.serve(sockets=[where]))
        log.info("stopped")
    finally:
        service.close()


def _check(engine: Engine) -> None:
    """Raise now what every request would raise: a model without a chat template, weights that have no digest."""
    engine.render([{"role": "user", "content": "."}])
    engine.identity()


def _stop(service: Service, server: Any) -> None:
    service.end(now=server.should_exit)
    server.should_exit = True


def _lifespan(service: Service, where: socket.socket, ready: Callable[[str], None]) -> Callable[[Any], Any]:
    @asynccontextmanager
    async def lives(_: Any) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(NotImplementedError, RuntimeError):  # Windows; not the main thread
                loop.add_signal_handler(number, service.on_signal)
        tidying = asyncio.ensure_future(service.tidy())
        where.listen(128)
        ready(_url(where))
        try:
            yield
        finally:
            tidying.cancel()

    return lives


def _url(where: socket.socket) -> str:
    host, port = where.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Plain(logging.Formatter):
    """Lines of a log without what an exception says: it may quote a client."""

    def formatException(  # noqa: N802 # the name of the standard library
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        kind, _, trace = ei
        return "".join(traceback.format_tb(trace)) + (kind.__name__ if kind is not None else "")


def _logging() -> logging.Logger:
    told = logging.StreamHandler()
    told.setFormatter(_Plain("%(asctime)s %(levelname)s %(message)s"))
    for name, level in (
        ("kvsnap.server", logging.INFO),
        ("uvicorn.error", logging.WARNING),
        ("asyncio", logging.ERROR),
    ):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [told], False
        logger.setLevel(level)
    return logging.getLogger("kvsnap.server")

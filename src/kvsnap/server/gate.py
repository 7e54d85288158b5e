"""The first thing a request meets: who asks, from where, and a line in the log, without a text of a client."""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Mapping, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse

from kvsnap.server.refusals import Refused, plain
from kvsnap.server.tenants import Tenant, Tokens

__all__ = ["Gate", "is_loopback", "sent"]

_log = logging.getLogger("kvsnap.server")
_OPEN = ("/health",)


def is_loopback(host: str) -> bool:
    """Tell whether an address, or a name, means this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]").split("%", 1)[0]).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def sent(refused: Refused) -> Any:
    """Return a refusal as a response."""
    return JSONResponse(dict(refused.body), refused.status, headers=dict(refused.headers))


class Gate:
    """Lets requests through to `app` that hold a token, and puts their tenant into the scope.

    Without tokens there is one tenant, and what a page in a browser sends is refused: it names another host, or an
    origin that is not this machine.
    """

    def __init__(self, app: Any, tokens: Tokens | None, everyone: Tenant | None) -> None:
        self._app, self._tokens, self._everyone = app, tokens, everyone

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.monotonic(), 0

        async def seen(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            refused, tenant = self._checked(HTTPConnection(scope))
            if refused is not None:
                await sent(refused)(scope, receive, seen)
            else:
                scope["kvsnap.tenant"] = tenant
                await self._app(scope, receive, seen)
        finally:
            what = getattr(scope.get("endpoint"), "__name__", "-")  # not the path, which may hold anything
            who = scope["kvsnap.tenant"].name or "-" if scope.get("kvsnap.tenant") else "-"
            took = (time.monotonic() - started) * 1000
            _log.info("%s %s %s %d %.0f ms", who, scope["method"], what, status, took)

    def _checked(self, asking: Any) -> tuple[Refused | None, Tenant | None]:
        if asking.url.path in _OPEN:
            return None, None
        if self._tokens is not None:
            tenant = self._tokens.tenant_of(asking.headers.get("authorization", ""))
            if tenant is None:
                return plain(401, "a token is needed, and none of those known was given", "invalid_api_key",
                             {"WWW-Authenticate": "Bearer"}), None  # fmt: skip
            return None, tenant
        return self._stranger(asking.headers), self._everyone

    def _stranger(self, headers: Mapping[str, str]) -> Refused | None:
        origin = headers.get("origin")
        host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        if not is_loopback(host) or (origin is not None and not is_loopback(urlsplit(origin).hostname or "")):
            return plain(403, "only programs of this machine are answered without a token", "forbidden")
        return None

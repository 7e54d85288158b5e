"""Errors as a client sees them: a status, headers, and the JSON object that the clients of this interface know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvsnap.errors import (
    BusyError,
    CompatibilityError,
    ConflictError,
    ContextError,
    InputError,
    KvsnapError,
    MissingError,
    StorageError,
    UnsupportedError,
)

__all__ = ["RefusalError", "Refused", "plain", "refused", "soon"]

_SOON = {"Retry-After": "1"}


class RefusalError(InputError):
    """A request that is refused. `status` is that of HTTP, `param` the member of the body, `code` for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        session: str | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(message, **facts)
        self.status, self.param, self.code, self.session = status, param, code, session
        self.headers = dict(headers or {})


def soon(status: int, message: str, *, code: str, session: str | None = None) -> RefusalError:
    """Return a refusal that a client may try again in a moment."""
    return RefusalError(status, message, code=code, headers=_SOON, session=session)


@dataclass(frozen=True, slots=True)
class Refused:
    """What is sent in place of an answer."""

    status: int
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


_STATUS: tuple[tuple[type[KvsnapError], int, str | None], ...] = (
    (ContextError, 400, "context_length_exceeded"),
    (MissingError, 404, "not_found"),
    (CompatibilityError, 409, None),
    (BusyError, 409, None),
    (ConflictError, 409, None),
    (UnsupportedError, 400, None),
    (InputError, 400, None),
    (StorageError, 507, None),
)
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def refused(error: KvsnapError) -> Refused:
    """Return what a client is told of an error. Paths of this machine stay here."""
    if isinstance(error, RefusalError):
        body = _body(error.status, _told(error), error.param, error.code or error.kind, error.session)
        return Refused(error.status, body, error.headers)
    status, code = next((s for kind, *s in _STATUS if isinstance(error, kind)), [500, None])
    headers = _SOON if isinstance(error, BusyError) else {}
    return Refused(int(status or 500), _body(int(status or 500), _told(error), None, str(code or error.kind)), headers)


def plain(status: int, message: str, code: str, headers: Mapping[str, str] | None = None) -> Refused:
    """Return a refusal that no error of ours stands for."""
    return Refused(status, _body(status, message, None, code), headers or {})


def _body(status: int, message: str, param: str | None, code: str, session: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    found: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    if session is not None:
        found["kvsnap"] = {"session": session}
    return found


def _told(error: KvsnapError) -> str:
    known = (("expected", error.expected), ("found", error.found))
    facts = ", ".join(f"{word} {value}" for word, value in known if value is not None)
    message = error.message
    if isinstance(error, CompatibilityError) and error.report is not None and error.report.refusals:
        # Its own message says what a caller in Python can do, which a client cannot.
        bad = error.report.refusals
        more = f"; and {len(bad) - 4} more" if len(bad) > 4 else ""
        message = (
            f"this session is of another model than the one served: {'; '.join(map(str, bad[:4]))}{more}. Name another "
            "session; a server started with --fresh starts it anew"
        )
    return message + (f"; {facts}" if facts else "")

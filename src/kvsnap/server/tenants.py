"""Who may ask: tokens, and the tenant that each belongs to."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvsnap.errors import FormatError, InputError, MissingError, StorageError

__all__ = ["ENVIRONMENT", "Tenant", "Tokens", "read_token", "read_tokens", "token_of"]

ENVIRONMENT = "KVSNAP_SERVER_TOKEN"
_TENANT = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_TOKEN = re.compile(r"[!-~]{16,4096}")
_LARGEST = 1 << 20


@dataclass(frozen=True, slots=True)
class Tenant:
    """One client or group of clients with sessions of its own: a name, and the directory of its library."""

    name: str
    library: str


class Tokens:
    """The tokens that are taken. Compared as digests, all of them each time, so that the time tells nothing."""

    def __init__(self, tokens: Sequence[tuple[str, Tenant]]) -> None:
        self._known = [(_digest(token_of(token)), tenant) for token, tenant in tokens]
        if len({digest for digest, _ in self._known}) < len(self._known):
            raise InputError("a token stands twice; each belongs to one tenant")

    @classmethod
    def of(cls, token: str, library: str) -> Tokens:
        """Return one token, whose holders share a library."""
        return cls([(token, Tenant("", library))])

    @property
    def tenants(self) -> tuple[Tenant, ...]:
        """All tenants, each once."""
        return tuple(dict.fromkeys(tenant for _, tenant in self._known))

    def tenant_of(self, header: str) -> Tenant | None:
        """Return whose token an `Authorization` header holds; None where it holds none of them."""
        scheme, _, token = header.partition(" ")
        given, found = _digest(token.strip()), None
        for digest, tenant in self._known:
            if hmac.compare_digest(digest, given):
                found = tenant
        return found if scheme.lower() == "bearer" else None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def token_of(text: str) -> str:
    """Return a token without white space around it. Raise `InputError` for what is none, without showing it."""
    token = text.strip()
    if not _TOKEN.fullmatch(token):
        raise InputError("not a token", expected="16 to 4096 printable ASCII characters without blanks")
    return token


def read_token(path: str | os.PathLike[str]) -> str:
    """Return the token that a file holds. Raise `MissingError`, `StorageError`, `FormatError`, `InputError`."""
    return token_of(_text(path))


def read_tokens(path: str | os.PathLike[str], directory: str) -> Tokens:
    """Return the tokens of a file with a line `TENANT TOKEN` for each; `#` starts a comment.

    The library of a tenant is the directory of its name in `directory`. Raise as `read_token`.
    """
    found = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        words = [] if line.lstrip().startswith("#") else line.split()
        if not words:
            continue
        if len(words) != 2 or not _TENANT.fullmatch(words[0]):
            raise FormatError(
                f"line {number} is none of a tokens file", path=path,
                expected="TENANT TOKEN, the tenant of a-z, 0-9, _ and -",
            )  # fmt: skip
        found.append((words[1], Tenant(words[0], os.path.join(directory, words[0]))))
    if not found:
        raise FormatError("no token stands in this file", path=path)
    return Tokens(found)


def _text(path: str | os.PathLike[str]) -> str:
    try:
        with open(path, "rb") as file:
            raw = file.read(_LARGEST + 1)
    except FileNotFoundError:
        raise MissingError("no such file of tokens", path=path) from None
    except OSError as error:
        raise StorageError(f"cannot be read: {error.strerror}", errno=error.errno, path=path) from error
    if len(raw) > _LARGEST or not raw.isascii():
        raise FormatError("not a file of tokens", path=path, expected=f"ASCII text of at most {_LARGEST} bytes")
    return raw.decode("ascii")

"""The parent of a fork: the BASE record, and finding the file that it means. Spec section 19."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from kvsnap.errors import DamagedError, FormatError, MissingError, UnsupportedError
from kvsnap.files import absolute
from kvsnap.formats.native.tables import Entry

__all__ = [
    "BASE_SIZE",
    "MAX_DEPTH",
    "Base",
    "check_parent",
    "check_parent_id",
    "kept_stretches",
    "missing_parent",
    "parent_path",
    "parse_base",
    "session_file_name",
]

F = TypeVar("F")
Stretch: TypeAlias = tuple[F, tuple[Entry, ...]]

MAX_DEPTH = 64
_BASE = struct.Struct("<16sQQ16sQQQ16sI36s")
BASE_SIZE = _BASE.size
_MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Base:
    """Where the history of a fork starts, and how much of it is kept.

    `parent` is the file id of the other file, `commit`, `offset` and `digest` are those of its COMMIT. The first
    `kept` entries of its live list stay, with `n_tokens` and `n_rows` in all; `history` is their digest.
    """

    parent: bytes
    commit: int
    offset: int
    digest: bytes
    kept: int
    n_tokens: int
    n_rows: int
    history: bytes
    depth: int

    def pack(self) -> bytes:
        """Return the payload of the BASE record."""
        return _BASE.pack(
            self.parent, self.commit, self.offset, self.digest, self.kept, self.n_tokens, self.n_rows, self.history,
            self.depth, bytes(36),
        )  # fmt: skip

    @property
    def origin(self) -> tuple[bytes, int, int, bytes, int]:
        """What every BASE of one file agrees in."""
        return self.parent, self.commit, self.offset, self.digest, self.depth


def parse_base(raw: bytes, path: str | None, offset: int) -> Base:
    """Parse the payload of a BASE record. Raise `FormatError`."""
    if len(raw) != BASE_SIZE:
        raise FormatError("BASE has the wrong length", path=path, offset=offset, expected=BASE_SIZE, found=len(raw))
    *fields, reserved = _BASE.unpack(raw)
    base = Base(*fields)
    if any(reserved) or not 1 <= base.depth <= MAX_DEPTH or base.commit < 1 or base.offset % 64:
        raise FormatError(
            "a field of BASE is out of range", path=path, offset=offset, expected=f"a depth of 1 to {MAX_DEPTH}",
            found=base.depth,
        )  # fmt: skip
    nothing = not (base.n_tokens or base.n_rows or any(base.history))
    if max(base.n_tokens, base.n_rows, base.kept) > _MAX_COUNT or not (base.kept or nothing):
        raise FormatError("the counts of BASE contradict each other", path=path, offset=offset)
    return base


def session_file_name(file_id: bytes) -> str:
    """Return the name under which a file that may become a parent lies in its directory."""
    return f"{file_id.hex()}.kvsnap"


def parent_path(path: str | None, base: Base) -> str:
    """Return the path of the parent of the fork at `path`. Raise `UnsupportedError` for a fork that is not a file."""
    if path is None:
        raise UnsupportedError(
            "a fork cannot be read from bytes alone: its history starts in another file", found=base.parent.hex()
        )
    return os.path.join(os.path.dirname(absolute(path)), session_file_name(base.parent))


def missing_parent(path: str | None, place: str, error: MissingError) -> MissingError:
    """Return the error for a fork whose parent is gone."""
    name = os.path.basename(place)
    made = MissingError(
        f"this session is a fork, and the file that its history starts in is not beside it: {name}",
        path=path,
        expected=place,
    )
    made.__cause__ = error
    return made


def check_parent_id(path: str | None, base: Base, *, own: bytes, found: bytes) -> None:
    """Raise unless the file found has the id of the parent: `DamagedError`; `FormatError` for a file of itself."""
    if base.parent == own:
        raise FormatError("a fork names itself as its parent", path=path, found=own.hex())
    if found != base.parent:
        raise _wrong_parent(path, base, f"file id {found.hex()}")


def check_parent(path: str | None, base: Base, *, commit: int, depth: int) -> None:
    """Raise `DamagedError` unless the commit of this number and depth is the one that the fork starts from."""
    for what, found, expected in (("commit", commit, base.commit), ("depth", depth, base.depth - 1)):
        if found != expected:
            raise _wrong_parent(path, base, f"{what} {found}, not {expected}")


def kept_stretches(base: Base, stretches: Iterable[Stretch[F]], path: str | None) -> list[Stretch[F]]:
    """Return what a fork keeps of the live list of its parent, file by file; an entry may be cut at the end.

    Raise `DamagedError` when the parent has less, or another history.
    """
    kept: list[Stretch[F]] = []
    left = base.kept
    for file, entries in stretches:
        if entries[:left]:
            kept.append((file, entries[:left]))
        left -= len(entries[:left])
    tokens = sum(e.n_tokens for _, entries in kept for e in entries)
    rows = sum(e.n_rows for _, entries in kept for e in entries)
    if left:
        raise _wrong_parent(path, base, f"{base.kept} entries are kept, {base.kept - left} are there")
    if not kept:
        return kept
    file, entries = kept[-1]
    last, less_tokens, less_rows = entries[-1], tokens - base.n_tokens, rows - base.n_rows
    if not (0 <= less_tokens <= last.n_tokens and 0 <= less_rows <= last.n_rows):
        raise _wrong_parent(path, base, f"{tokens} tokens and {rows} rows, not {base.n_tokens} and {base.n_rows}")
    if less_tokens or less_rows:
        # The digest of a cut entry follows from ids that are read, and compared with it, together with the span.
        last = replace(
            last, n_tokens=last.n_tokens - less_tokens, n_rows=last.n_rows - less_rows, state=0, digest=base.history
        )
        kept[-1] = (file, (*entries[:-1], last))
    if last.digest != base.history:
        raise _wrong_parent(path, base, "the digest of the history that is kept differs")
    return kept


def _wrong_parent(path: str | None, base: Base, what: str) -> DamagedError:
    return DamagedError(
        f"{session_file_name(base.parent)} is not the one this fork was made from: {what}",
        path=path,
        expected=base.parent.hex(),
    )

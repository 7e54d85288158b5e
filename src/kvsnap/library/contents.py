"""What a library wants to know of one session file, from its index and tables. No tensor is read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import xxhash

from kvsnap.errors import KeyNeededError, KvsnapError, MissingError, VersionError
from kvsnap.files import Reader
from kvsnap.formats import native
from kvsnap.formats.native import NativeFile
from kvsnap.identity import Identity
from kvsnap.reach import needs_state
from kvsnap.tensors import OF_NO_LAYER, TensorSpec

__all__ = [
    "DAMAGED",
    "FOREIGN",
    "NEWER",
    "OK",
    "ORPHANED",
    "UNKNOWN",
    "UNREADABLE",
    "Facts",
    "is_rewindable",
    "pack_identity",
    "read_facts",
]

OK = "ok"
DAMAGED = "damaged"
ORPHANED = "no parent"
"""A fork whose parent is gone."""
NEWER = "newer"
"""Written by a newer release."""
FOREIGN = "foreign"
"""Not a session of ours, or under a name that is not its file id."""
UNREADABLE = "unreadable"
"""The system refuses to read it."""
_FORKED, _MAJOR = 2, 1
_MOST = 2**63 - 1  # in a catalogue; no session comes this far
UNKNOWN = "unknown"
"""In the place of a parent: what may be a fork cannot be read, so that it is not known what it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What one file holds. `state` is one of the words above; the rest is 0 or empty where the file cannot be read.

    `turns` is int64 `[turns, 2]`: ids and rows at the end of each entry of the live list that can be reached.
    `rewindable` tells whether every layer can be cut between the ends of turns. `parent` is the file id of the parent
    of a fork, else empty. `dropped` counts the bytes behind the last published commit; the catalogue does not keep it.
    """

    state: str = OK
    reason: str = ""
    n_tokens: int = 0
    n_rows: int = 0
    n_pending: int = 0
    n_commits: int = 0
    complete: bool = True
    created_ns: int = 0
    identity: str = "{}"
    parent: str = ""
    rewindable: bool = True
    dropped: int = 0
    turns: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    tokens: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def identity_digest(self) -> bytes:
        """XXH3-128 of the identity as JSON."""
        return xxhash.xxh3_128_digest(self.identity.encode())


def pack_identity(identity: Identity) -> str:
    """Return an identity as JSON text, always the same for the same identity."""
    return json.dumps(identity.to_dict(), sort_keys=True, separators=(",", ":"))


def read_facts(path: str, file_id: str, before: Facts | None = None) -> Facts | None:
    """Read what a file holds; None when it is gone. Whatever is wrong with the file is told by its state, not raised.

    Where it cannot be read the parent known `before` is kept, so that the files it needs are not taken for unneeded.
    """
    try:
        return _read(path, file_id)
    except KeyNeededError:
        return Facts(state=FOREIGN, reason="an encrypted snapshot, where a session is expected")
    except VersionError as error:
        state, reason = NEWER, error.message
    except MissingError as error:
        if not os.path.lexists(path):
            return None
        state, reason = ORPHANED, error.message
    except OSError as error:
        if not os.path.lexists(path):
            return None
        state, reason = UNREADABLE, str(error)
    except KvsnapError as error:
        state, reason = DAMAGED, str(error)
    known = before or Facts()
    parent = known.parent or (UNKNOWN if state != ORPHANED and _may_be_fork(path, state) else "")
    return replace(known, state=state, reason=reason, parent=parent)


def _may_be_fork(path: str, state: str) -> bool:
    """Tell whether a file that cannot be read may be a fork: it has the feature bit of one. Spec sections 2 and 19.

    Where not even that can be read, or a higher major version may say it otherwise, it may be one.
    """
    try:
        with Reader(path, follow_symlinks=False) as reader:
            if reader.size < 24:
                return False
            head = reader.read_at(0, 24)
    except KvsnapError:
        return state == UNREADABLE
    return bool(head[16] & _FORKED) or (state == NEWER and int.from_bytes(head[8:10], "little") != _MAJOR)


def _read(path: str, file_id: str) -> Facts:
    with Reader(path, follow_symlinks=False) as reader:
        head = reader.read_at(0, min(reader.size, 8))
    if not native.sniff(head):
        return Facts(state=FOREIGN, reason="it does not start as a .kvsnap file does")
    with closing(NativeFile.open(path, mapped=False)) as file:
        if file.header.file_id.hex() != file_id:
            return Facts(state=FOREIGN, reason=f"its file id is another: {file.header.file_id.hex()}")
        if file.sealed:
            return Facts(state=FOREIGN, reason="a sealed snapshot, where a session is expected")
        return facts_of(file)


def facts_of(file: NativeFile) -> Facts:
    """Return what an open file holds. Raise as reading its tables does."""
    commit = file.commit
    ids: list[npt.NDArray[np.int32]] = []
    turns: list[tuple[int, int]] = []
    tokens = rows = 0
    stateful = needs_state(file.geometry.tensors)
    for span in file.spans():
        ids.append(span.table.tokens[: span.entry.n_tokens])
        tokens, rows = tokens + span.entry.n_tokens, rows + span.entry.n_rows
        if span.entry.state or not stateful:
            turns.append((tokens, rows))
    return Facts(
        n_tokens=commit.n_tokens, n_rows=commit.n_rows, n_pending=commit.n_pending, n_commits=min(commit.number, _MOST),
        complete=commit.complete, created_ns=file.header.created_ns, identity=pack_identity(file.identity),
        parent=file.base.parent.hex() if file.base else "", rewindable=is_rewindable(file.geometry.tensors),
        turns=np.array(turns, np.int64).reshape(-1, 2),
        tokens=np.concatenate(ids).astype(np.int32) if ids else np.zeros(0, np.int32), dropped=file.end.dropped,
    )  # fmt: skip


def is_rewindable(specs: Iterable[TensorSpec]) -> bool:
    """Tell whether a history can be cut anywhere: no window, no groups of positions, nothing that is replaced.

    Where it cannot, more than the ends of turns may be reached all the same; a search counts on these only.
    """
    return all(
        spec.role in OF_NO_LAYER or spec.growth == "static" or (spec.growth == "grow" and spec.tokens_per_row == 1)
        for spec in specs
    )

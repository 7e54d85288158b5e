"""Making a fork: a new session whose history starts in another file of the same directory. Spec section 19."""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from kvsnap.errors import InputError, MissingError, UnsupportedError
from kvsnap.files import absolute, sync_file, write_whole
from kvsnap.formats.native.base import MAX_DEPTH, Base, session_file_name
from kvsnap.formats.native.cut import Cut
from kvsnap.formats.native.live import check_whole, cut_live, ends_of
from kvsnap.formats.native.read import NativeFile
from kvsnap.formats.native.tables import Commit, Operation
from kvsnap.formats.native.turns import walk
from kvsnap.formats.native.write import MemorySink, RecordWriter, new_header
from kvsnap.records import FORKED, HEADER_SIZE, SESSION, Kind

__all__ = ["ForkReport", "at_commit", "cut_at", "fork_file"]


@dataclass(frozen=True, slots=True)
class ForkReport:
    """What a fork wrote: where, bytes written, the file that its history starts in, and the counts at its start."""

    path: str
    file_id: str
    parent: str
    nbytes: int
    n_tokens: int
    n_rows: int
    depth: int

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def at_commit(file: NativeFile, number: int) -> NativeFile:
    """Return the same file open at an earlier commit, sharing what it reads from. Raise `MissingError`."""
    if number == file.commit.number:
        return file
    commit, digest = file.commit, file.end.footer.digest
    for commit, offset in walk(file.commit, file.end.footer.commit_offset, file.header, file.reader):
        if commit.number == number:
            return NativeFile(file.reader, mapped=file.mapped, at=(offset, digest))
        digest = commit.previous_digest
    raise MissingError(
        "the session has no such commit", path=file.path, expected=f"1 to {file.commit.number}", found=number
    )


def cut_at(file: NativeFile, n_tokens: int | None, *, nearest: bool = False) -> Cut | None:
    """Return what the first `n_tokens` tokens of an open file keep; None for everything.

    With `nearest` it is the nearest length at or below that can be reached. Raise `InputError` outside the history,
    `UnsupportedError` where it cannot be cut.
    """
    if n_tokens is None or n_tokens == file.commit.n_tokens:
        return None
    if not 0 <= n_tokens <= file.commit.n_tokens:
        raise InputError(
            "the history has no such length", path=file.path, expected=f"0 to {file.commit.n_tokens}", found=n_tokens
        )
    ends = ends_of(file)
    return cut_live(file, ends.below(n_tokens) if nearest else n_tokens, ends)


def fork_file(
    path: str, *, n_tokens: int | None = None, commit: int | None = None, nearest: bool = False
) -> ForkReport:
    """Make a fork of the session at `path` in the same directory, and return what was written.

    Less than 1 KB is written, whatever the size of the session. The fork starts at the last commit of the session, or
    at an earlier one (`commit`), and keeps all tokens of it, or the first `n_tokens` (with `nearest`: or as
    many below as can be reached). What it needs of the session has to stay: see `kvsnap.library`. Raise `InputError`,
    `MissingError` (no such commit), `StorageError`, and `UnsupportedError` for more than 64 forks in a row, a length
    that cannot be reached, or a sealed snapshot.
    """
    name = absolute(path)
    with closing(NativeFile.open(name, mapped=False)) as last:
        if last.sealed or last.header.use != SESSION:
            raise UnsupportedError("a sealed snapshot has no history to fork: append it to a session", path=name)
        found = last.header.file_id
        if os.path.basename(name) != session_file_name(found):
            raise InputError(
                "only a file under the name of its id can have forks", path=name, expected=session_file_name(found)
            )
        with closing(last if commit is None else at_commit(last, commit)) as file:
            cut = cut_at(file, n_tokens, nearest=nearest)
            if cut is None:
                check_whole(file)
            sync_file(name)  # a fork must not outlive the turn that it starts from
            return _write(name, *_origin(file, cut))


def _origin(file: NativeFile, cut: Cut | None) -> tuple[Base, Commit]:
    """Return the BASE of a fork, and the counts it starts with."""
    commit = file.commit
    counts = Commit(
        number=1, operation=Operation.FORK, complete=commit.complete, n_tokens=commit.n_tokens, n_rows=commit.n_rows,
        n_pending=commit.n_pending, token_offset=commit.token_offset, digest=commit.digest,
    )  # fmt: skip
    live = file.live if cut is None else cut.live
    if cut is not None:
        counts = replace(
            counts, complete=True, n_tokens=cut.n_tokens, n_rows=cut.n_rows, n_pending=cut.n_pending,
            token_offset=cut.token_offset, digest=cut.digest,
        )  # fmt: skip
    base = Base(
        file.header.file_id, commit.number, file.end.footer.commit_offset, file.end.footer.digest, len(live),
        counts.n_tokens, counts.n_rows, counts.digest, 1 + (file.base.depth if file.base else 0),
    )  # fmt: skip
    own = any(where is file for where, _ in live) or commit.identity or commit.layout or commit.note
    if file.base is not None and not own:
        # Nothing of this fork is used: start where it starts, so that forks of forks do not grow into a chain.
        origin = file.base
        base = replace(origin, kept=base.kept, n_tokens=base.n_tokens, n_rows=base.n_rows, history=base.history)
    if base.depth > MAX_DEPTH:
        raise UnsupportedError(
            f"a chain of more than {MAX_DEPTH} forks: compact the session first", path=file.path, found=base.depth
        )
    return base, counts


def _write(parent: str, base: Base, counts: Commit) -> ForkReport:
    sink, header = MemorySink(), replace(new_header(SESSION), required=FORKED)
    sink.write_at([header.pack()], 0)
    writer = RecordWriter(sink, header, offset=HEADER_SIZE, sequence=0, commit=1)
    place = writer.plain(Kind.BASE, base.pack())
    writer.commit(replace(counts, base=place, time_ns=time.time_ns()))
    target = os.path.join(os.path.dirname(parent), session_file_name(header.file_id))
    nbytes = write_whole(target, sink.data, new=True)
    return ForkReport(
        target, header.file_id.hex(), base.parent.hex(), nbytes, counts.n_tokens, counts.n_rows, base.depth
    )

"""The write side of a session file: who may write, where it ends, and how a commit is published. Spec section 13."""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType

from kvsnap.errors import ConflictError, DamagedError, InputError, StorageError
from kvsnap.files import Appender
from kvsnap.formats.native import schema
from kvsnap.formats.native.base import Base
from kvsnap.formats.native.read import NativeFile
from kvsnap.formats.native.tables import Commit, Entry, Operation, pack_index
from kvsnap.formats.native.write import MemorySink, RecordWriter, new_header
from kvsnap.identity import Identity
from kvsnap.records import FOOTER_SIZE, HEADER_SIZE, SESSION, Footer, Kind, find_end, read_record_header

__all__ = ["Journal", "Published", "empty_file", "published"]


@dataclass(frozen=True, slots=True)
class Published:
    """What is known of the file at its published end. Replaced as a whole by each commit.

    `entries` are those of this file; a fork has `base`, and before them those that it keeps of its parent.
    """

    commit: Commit
    footer: Footer
    entries: tuple[Entry, ...]
    base: Base | None
    geometry: schema.Geometry
    identity: Identity

    @property
    def is_empty(self) -> bool:
        """True when there is no history, neither here nor of a parent."""
        return not self.entries and not (self.base and self.base.kept)

    def restarted(self) -> Published:
        """Return what the next turn goes on from: without turns that hold no id and no row, where all are such.

        They say nothing of the model and the shapes of the history that begins behind them.
        """
        if self.is_empty or self.commit.n_tokens or self.commit.n_rows:
            return self
        nothing = bytes(16)
        base = replace(self.base, kept=0, history=nothing) if self.base else None
        return replace(self, entries=(), base=base, commit=replace(self.commit, digest=nothing))


def published(file: NativeFile) -> Published:
    """Return what is known of an open file."""
    return Published(file.commit, file.end.footer, file.entries, file.base, file.geometry, file.identity)


class _Sized:
    """An appender as a `ReadAt` of known length."""

    def __init__(self, appender: Appender, size: int) -> None:
        self.path: str | None = appender.path
        self.size = size
        self.read_at = appender.read_at


class _Writing:
    """What `Journal.writing` returns. No generator: one that an interrupt left over would cut back later on."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def __enter__(self) -> RecordWriter:
        return self._journal.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.end(failed=kind is not None)


class Journal:
    """A session file open for writing, or for reading only when `appender` is None."""

    def __init__(self, path: str, appender: Appender | None, file: NativeFile) -> None:
        self.path = path
        self.appender = appender
        self.header = file.header
        self.now = published(file)
        self.dropped = file.end.dropped
        self.lost = file.end.notes  # published commits behind the end that cannot be read
        self._process = os.getpid()
        self._torn = False  # something may stand behind our end that we did not cut off
        self._shared = False  # somebody else writes here: what stands behind our end is not ours to cut off

    def _writable(self) -> Appender:
        if self.appender is None:
            raise InputError("the session was opened for reading only", path=self.path)
        if not self.is_ours:  # a fork shares the lock, so the lock does not keep the two apart
            raise ConflictError(
                "the session was opened by another process, before a fork: open it here", path=self.path
            )
        return self.appender

    def check_writable(self) -> None:
        """Raise `InputError` (opened for reading only), `PoisonedError` or `ConflictError` (forked)."""
        self._writable().size()

    def writing(self) -> _Writing:
        """Return a context manager: a writer at the published end, and the file cut back to that end after any error.

        No room, a source that turns out to be damaged, an interrupt: the session stays usable.

        Raise `ConflictError` when the file is not the one that was opened any more.
        """
        return _Writing(self)

    def begin(self) -> RecordWriter:
        """Return a writer at the published end, where what a change left that went wrong is cut off first."""
        writer = self._writer(self._writable())
        self._torn = True
        return writer

    def end(self, *, failed: bool) -> None:
        """End what `begin` began: cut the file back to the published end if it failed."""
        if not failed:
            self._torn = False
        elif self.appender is not None and self.is_ours:  # what was forked meanwhile and ends must not cut anything
            self._cut_back(self.appender)

    def _cut_back(self, appender: Appender) -> None:
        if not appender.poisoned and not self._shared:
            with suppress(StorageError, InputError):  # the error that brought us here is the one to tell
                appender.truncate(self.now.footer.file_length)
                appender.sync()  # else a later crash could mix what is cut off here with what is written there next
                self._torn = False

    def check_unchanged(self) -> None:
        """Raise `ConflictError` when the file is not the one that was opened any more, and as `check_writable`."""
        self._checked_end(self._writable())

    def check_nothing_lost(self) -> None:
        """Raise `DamagedError` while bytes of a published commit that cannot be read stand behind the end.

        A turn written now would take their place. Going back on purpose (truncate, reset, rewind) gives them up.
        """
        if self.dropped and self.lost:
            raise DamagedError(
                f"{self.lost[0]}, and what is written now would take the place of what is left of it: repair the file "
                f"first (kvsnap repair), or give that up by a rewind to commit {self.now.commit.number}",
                path=self.path,
            )  # fmt: skip

    def _checked_end(self, appender: Appender) -> int:
        now, size, end = self.now, appender.size(), self.now.footer.file_length
        if self._torn and size > end and find_end(_Sized(appender, size), self.header).footer == now.footer:
            self.dropped = size - end  # what a change left that went wrong, and was interrupted once more
        place = end - FOOTER_SIZE
        intact = size >= end and appender.read_at(place, FOOTER_SIZE) == now.footer.pack(self.header.salt, place)
        if not appender.is_named:
            raise ConflictError(
                "the file changed since it was opened: it was removed, or another one has its name", path=self.path
            )
        if not intact or size != end + self.dropped:
            same = size == end + self.dropped
            raise ConflictError(
                "the file changed since it was opened", path=self.path,
                expected=f"commit {now.commit.number} at its end" if same else f"{end + self.dropped} bytes",
                found="another end" if same else f"{size} bytes",
            )  # fmt: skip
        return end

    def _writer(self, appender: Appender) -> RecordWriter:
        end, now = self._checked_end(appender), self.now
        if self.dropped:
            appender.truncate(end)
            appender.sync()  # as `_cut_back` does
        self.dropped, self.lost, self._torn = 0, (), False
        last = read_record_header(_Sized(appender, end), self.header, now.footer.commit_offset, kind=Kind.COMMIT)
        return RecordWriter(appender, self.header, offset=end, sequence=last.sequence + 1, commit=now.commit.number + 1)

    def publish(
        self,
        writer: RecordWriter,
        commit: Commit,
        entries: tuple[Entry, ...],
        *,
        kept: int,
        base: Base | None = None,
        geometry: schema.Geometry | None = None,
        identity: Identity | None = None,
    ) -> int:
        """Sync what was written, then write and sync the commit; return all bytes written since the last one.

        `entries` are those of this file; the first `kept` are those of the last commit. Offsets of what did not change
        come with `commit`; base, geometry and identity are those of now where none is given.
        """
        now = self.now
        place = now.commit.base
        if base is not None and base != now.base:
            place = writer.plain(Kind.BASE, base.pack())
        base = base or now.base
        index, index_kept = now.commit.index, min(kept, now.commit.index_kept)
        if len(entries) - index_kept > max(32, math.isqrt(2 * len(entries))):
            index, index_kept = writer.plain(Kind.INDEX, pack_index(entries)), len(entries)
        elif not index_kept:
            index = 0
        commit = replace(
            commit, number=writer.number, previous=now.footer.commit_offset, previous_digest=now.footer.digest,
            index=index, index_kept=index_kept, time_ns=time.time_ns(), tail=entries[index_kept:], base=place,
            digest=entries[-1].digest if entries else base.history if base else bytes(16),
        )  # fmt: skip
        appender = self._writable()
        appender.sync()
        if appender.size() != writer.offset or not appender.is_named:  # only where the file system has no locks
            self._shared = True
            raise ConflictError(
                "another writer was here at the same time", path=self.path, expected=f"{writer.offset} bytes",
                found=f"{appender.size()} bytes",
            )  # fmt: skip
        footer = writer.commit(commit)
        # One assignment, so that an interrupt finds the old state or the new one. Before the sync: readers see the
        # commit from here on, and may fork it, so that it is not taken back any more.
        self.now = Published(commit, footer, entries, base, geometry or now.geometry, identity or now.identity)
        appender.sync()
        return footer.file_length - now.footer.file_length

    @property
    def is_named(self) -> bool:
        """True for a file open for writing that has its name."""
        return self.appender is not None and not self.appender.closed and self.appender.is_named

    @property
    def is_ours(self) -> bool:
        """False in a process that was forked from the one that opened it."""
        return os.getpid() == self._process

    def close(self) -> None:
        """Close the file and give up the lock."""
        if self.appender is not None:
            self.appender.close()


def empty_file() -> bytes:
    """Return the bytes of a session without a history: a header and one commit."""
    sink, header = MemorySink(), new_header(SESSION)
    sink.write_at([header.pack()], 0)
    writer = RecordWriter(sink, header, offset=HEADER_SIZE, sequence=0, commit=1)
    writer.commit(Commit(number=1, operation=Operation.RESET, time_ns=time.time_ns()))
    return bytes(sink.data)

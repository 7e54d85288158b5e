"""A session: one conversation that grows on disk, commit by commit. Spec sections 10 to 14.

A turn is published by one commit. Killed at any instant, the file opens at the last published turn.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvsnap import codecs
from kvsnap.errors import (
    CompatibilityError,
    ConflictError,
    DamagedError,
    FormatError,
    InputError,
    StorageError,
)
from kvsnap.files import Appender, Reader, write_whole
from kvsnap.formats.native import schema
from kvsnap.formats.native.live import cut_entries
from kvsnap.formats.native.read import NativeFile
from kvsnap.formats.native.tables import (
    Commit,
    Entry,
    Operation,
    Part,
    Table,
    canonical_json,
    history_digest,
    pack_index,
    parse_commit,
)
from kvsnap.formats.native.write import (
    MemorySink,
    RecordWriter,
    SaveReport,
    check_counts,
    new_header,
    report_of,
    span_table,
    state_tensors,
)
from kvsnap.identity import Identity, compare
from kvsnap.layout import Snapshot
from kvsnap.protocols import Progress
from kvsnap.records import (
    HEADER_SIZE,
    RECORD_SIZE,
    SESSION,
    Footer,
    Kind,
    commit_digest,
    read_record,
    read_record_header,
)

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Session", "Turn"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One commit of a session: what it did, whether the turn was complete, and the counts after it."""

    commit: int
    operation: str
    complete: bool
    n_tokens: int
    n_rows: int
    time_ns: int
    offset: int

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class _State:
    """What is known of the file at its published end. Replaced as a whole by each commit."""

    commit: Commit
    footer: Footer
    entries: tuple[Entry, ...]
    geometry: schema.Geometry
    identity: Identity


class Session:
    """A session file. Open it with `Session.open`; use it as a context manager.

    Open for writing, it holds the exclusive lock of the file until it is closed; readers are not disturbed. After
    a failed sync every further write raises `PoisonedError` until the session is opened again.
    """

    def __init__(self, path: str, appender: Appender | None, file: NativeFile) -> None:
        self.path = path
        self._appender = appender
        self._header = file.header
        self._now = _State(file.commit, file.end.footer, file.entries, file.geometry, file.identity)
        self._tokens: tuple[int, ...] | None = None
        self._text: str | None = None
        self.dropped = file.end.dropped
        """Bytes behind the last published commit that are not part of the history (a torn tail)."""
        self.notes = file.end.notes
        """What was wrong behind the last published commit, one sentence each."""

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, create: bool = True, readonly: bool = False) -> Session:
        """Open a session; with `create` an empty one is made when there is no file.

        Raise `BusyError` when another process writes it, `MissingError`, `FormatError`, `VersionError`, `DamagedError`,
        and `InputError` for a sealed snapshot.
        """
        name = os.fspath(path)
        if readonly:
            return cls(name, None, NativeFile(Reader(name), mapped=False))
        if create and not os.path.lexists(name):
            with suppress(InputError):  # another process made it just now
                write_whole(name, _empty_file(), new=True)
        appender = Appender.open(name)
        try:
            file = NativeFile(Reader(name), mapped=False)
            if file.sealed:
                raise InputError(
                    "a sealed snapshot cannot be appended to; open a new session and append the loaded snapshot",
                    path=name,
                )
            session = cls(name, appender, file)
            file.close()
        except BaseException:
            appender.close()
            raise
        return session

    # -- what is there ------------------------------------------------------------------------------------

    @property
    def n_tokens(self) -> int:
        """Ids in the history."""
        return self._now.commit.n_tokens

    @property
    def n_rows(self) -> int:
        """Positions evaluated."""
        return self._now.commit.n_rows

    @property
    def n_pending(self) -> int:
        """Ids at the end that are not evaluated."""
        return self._now.commit.n_pending

    @property
    def n_commits(self) -> int:
        """Number of the last commit."""
        return self._now.commit.number

    @property
    def complete(self) -> bool:
        """False when the last turn was cut off."""
        return self._now.commit.complete

    @property
    def nbytes(self) -> int:
        """Length of the file up to the last published commit."""
        return self._now.footer.file_length

    @property
    def identity(self) -> Identity:
        """What the session was made with; all unknown while it is empty."""
        return self._now.identity

    @property
    def tokens(self) -> tuple[int, ...]:
        """All ids of the history. The first use reads the tables of the spans, not the tensors."""
        return self._history()[0]

    def load(self) -> Snapshot:
        """Return the state at the last commit; tensors are read, and checked, when they are first used."""
        file = NativeFile(Reader(self.path), mapped=False)
        if self._appender is not None and file.end.footer != self._now.footer:
            raise ConflictError("the file changed since it was opened", path=self.path)
        return file.snapshot()

    @property
    def history(self) -> tuple[Turn, ...]:
        """Every commit, oldest first. Raise `DamagedError` when the chain of commits is broken."""
        return tuple(reversed(tuple(self._walk())))

    def _walk(self) -> Iterator[Turn]:
        reader = Reader(self.path)
        commit, offset = self._now.commit, self._now.footer.commit_offset
        while True:
            yield Turn(
                commit.number,
                commit.operation_name,
                commit.complete,
                commit.n_tokens,
                commit.n_rows,
                commit.time_ns,
                offset,
            )
            if not commit.previous:
                return
            if commit.previous >= offset:
                raise FormatError("a COMMIT points forward", path=self.path, offset=offset, found=commit.previous)
            offset = commit.previous
            record, payload = read_record(reader, self._header, offset, kind=Kind.COMMIT)
            if commit_digest(record.pack(self._header.salt, offset), payload) != commit.previous_digest:
                raise DamagedError("broken history: this COMMIT is not the one meant", path=self.path, offset=offset)
            commit = parse_commit(payload, self.path, offset + RECORD_SIZE)

    def _history(self) -> tuple[tuple[int, ...], str | None]:
        if self._tokens is None:
            snapshot = self.load()
            self._tokens, self._text = snapshot.tokens, snapshot.text
        return self._tokens, self._text

    # -- changing it --------------------------------------------------------------------------------------

    def append(
        self, snapshot: Snapshot, *, complete: bool = True, codec: str | None = None, progress: Progress | None = None
    ) -> SaveReport:
        """Publish what `snapshot` has beyond the session as one turn; only the new rows are written.

        `snapshot` may be partial (`capture(start=session.n_rows)`). `complete=False` marks a turn that was cut off.
        Raise `InputError` when it does not continue the session (other tokens, or behind it: truncate first),
        `CompatibilityError` when it is of another model. On any error the session is as before.
        """
        check_counts(snapshot)
        codec_name = codecs.codec_of_name(codec or "exact").name
        now = self._now
        self._check_continues(snapshot)
        geometry = self._merged_geometry(snapshot)
        writer = self._writer()
        start, tokens = now.commit.n_rows, now.commit.n_tokens
        try:
            identity = now.commit.identity
            if not identity or snapshot.identity != now.identity:
                identity = writer.plain(Kind.IDENTITY, canonical_json(snapshot.identity.to_dict()))
            layout = now.commit.layout
            if not layout or geometry != now.geometry:
                layout = writer.plain(Kind.LAYOUT, schema.pack_layout(geometry))
            table = span_table(snapshot, row_start=start, token_start=tokens, text=self._new_text(snapshot))
            rows = [
                t.rows(max(t.start, start // t.spec.tokens_per_row), t.start + t.n_rows)
                for t in snapshot.tensors()
                if t.spec.grows
            ] + [t for t in snapshot.tensors() if t.spec.growth == "static" and not now.entries]
            span, check, parts = writer.parts(Kind.SPAN, table, rows, codec_name, progress)
            state_table = Table(row_start=snapshot.n_rows, meta=schema.pack_sampler(snapshot.sampler))
            state, _, state_parts = writer.parts(Kind.STATE, state_table, state_tensors(snapshot), "exact")
            note = now.commit.note
            if snapshot.metadata:
                note = writer.plain(Kind.NOTE, schema.pack_note(snapshot.metadata))
            previous = now.entries[-1].digest if now.entries else bytes(16)
            digest = history_digest(previous, table.tokens, table.n_rows)
            entry = Entry(span, len(table.tokens), start, table.n_rows, state, check, digest)
            commit = Commit(
                number=writer.number, operation=Operation.APPEND, complete=complete, n_tokens=len(snapshot.tokens),
                n_rows=snapshot.n_rows, n_pending=snapshot.n_pending, token_offset=snapshot.token_offset,
                identity=identity, layout=layout, state=state, note=note,
            )  # fmt: skip
            written = self._publish(writer, commit, (*now.entries, entry), kept=len(now.entries))
        except StorageError:
            self._undo()
            raise
        self._now = replace(self._now, geometry=geometry, identity=snapshot.identity)
        self._tokens, self._text = snapshot.tokens, snapshot.text
        return self._report(snapshot, [*parts, *state_parts], written)

    def _report(self, snapshot: Snapshot, parts: Sequence[Part], written: int) -> SaveReport:
        return report_of(
            snapshot, parts, nbytes=written, path=self.path, commit=self.n_commits, file_id=self._header.file_id
        )

    def truncate(self, n_tokens: int) -> int:
        """Go back to the first `n_tokens` tokens, as a commit of its own; return the number of tokens left.

        Logits, sampler and random state come back when the cut is where a turn ended. Nothing is deleted from the
        file. Raise `InputError` outside 0..n_tokens, `UnsupportedError` naming the nearest reachable turn when a layer
        cannot be rewound.
        """
        now = self._now
        if not 0 <= n_tokens <= now.commit.n_tokens:
            raise InputError(
                "cannot truncate to this length", path=self.path, expected=f"0 to {now.commit.n_tokens}", found=n_tokens
            )
        if n_tokens == now.commit.n_tokens:
            return n_tokens
        if n_tokens == 0:
            self.reset()
            return 0
        unstored = now.commit.n_rows + now.commit.n_pending - now.commit.n_tokens
        file = NativeFile(Reader(self.path), mapped=False)
        entries, offset = cut_entries(file, now.entries, n_tokens, n_tokens + unstored)
        n_rows = sum(e.n_rows for e in entries)
        commit = replace(
            now.commit, operation=Operation.TRUNCATE, complete=True, n_tokens=n_tokens, n_rows=n_rows,
            n_pending=n_tokens + unstored - n_rows, token_offset=offset, state=entries[-1].state,
        )  # fmt: skip
        self._rewrite(commit, entries)
        return n_tokens

    def reset(self) -> None:
        """Go back to an empty history, as a commit of its own. The identity stays."""
        commit = replace(
            self._now.commit, operation=Operation.RESET, complete=True, n_tokens=0, n_rows=0, n_pending=0,
            token_offset=0, state=0,
        )  # fmt: skip
        self._rewrite(commit, ())

    def _rewrite(self, commit: Commit, entries: tuple[Entry, ...]) -> None:
        writer = self._writer()
        same = sum(1 for a, b in zip(self._now.entries, entries, strict=False) if a == b)
        try:
            self._publish(writer, replace(commit, number=writer.number), entries, kept=same)
        except StorageError:
            self._undo()
            raise
        self._tokens = self._text = None

    def close(self) -> None:
        """Close the file and give up the lock."""
        if self._appender is not None:
            self._appender.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside -------------------------------------------------------------------------------------------

    def _check_continues(self, snapshot: Snapshot) -> None:
        commit = self._now.commit
        if snapshot.row_start > commit.n_rows:
            raise InputError(
                "rows are missing between the session and the capture", path=self.path,
                expected=f"rows from {commit.n_rows} or before", found=snapshot.row_start,
            )  # fmt: skip
        if len(snapshot.tokens) < commit.n_tokens or snapshot.n_rows < commit.n_rows:
            raise InputError(
                "the snapshot is behind the session: truncate the session first", path=self.path,
                expected=f"{commit.n_tokens} tokens, {commit.n_rows} rows, or more",
                found=f"{len(snapshot.tokens)} tokens, {snapshot.n_rows} rows",
            )  # fmt: skip
        if commit.n_tokens and snapshot.tokens[: commit.n_tokens] != self.tokens:
            pairs = zip(self.tokens, snapshot.tokens, strict=False)
            first = next(i for i, (a, b) in enumerate(pairs) if a != b)
            raise InputError(
                f"the snapshot does not continue the session: token {first} differs", path=self.path,
                expected=self.tokens[first], found=snapshot.tokens[first],
            )  # fmt: skip
        if commit.identity:
            report = compare(self._now.identity, snapshot.identity)
            differing = [f for f in report.fields if f.verdict == "differ" and f.level == "fatal"]
            if differing:
                text = "; ".join(str(f) for f in differing[:4])
                raise CompatibilityError(f"the snapshot is of another model: {text}", path=self.path, report=report)

    def _merged_geometry(self, snapshot: Snapshot) -> schema.Geometry:
        new, old = schema.geometry_of(snapshot), self._now.geometry
        if not self._now.commit.layout:
            return new
        known = {spec.id: spec for spec in old.tensors}
        difference = schema.same_tensors(
            [s for s in old.tensors if s.role != "logits"], [s for s in new.tensors if s.role != "logits"]
        )
        if self._now.entries and (difference or old.layers != new.layers):
            raise CompatibilityError(
                f"the cache of the snapshot is shaped otherwise: {difference or 'other layers'}", path=self.path
            )
        if not self._now.entries:
            return new
        return replace(old, tensors=tuple({**known, **{s.id: s for s in new.tensors}}.values()))

    def _new_text(self, snapshot: Snapshot) -> str | None:
        if snapshot.text is None:
            return None
        before = "" if not self.n_tokens else self._history()[1]
        return snapshot.text[len(before) :] if before is not None and snapshot.text.startswith(before) else None

    def _writer(self) -> RecordWriter:
        if self._appender is None:
            raise InputError("the session was opened for reading only", path=self.path)
        now, size = self._now, self._appender.size()
        end = now.footer.file_length
        intact = size >= end and self._appender.read_at(end - 64, 64) == now.footer.pack(self._header.salt, end - 64)
        if not intact or size != end + self.dropped or not self._appender.is_named:
            raise ConflictError(
                "the file changed since it was opened", path=self.path, expected=f"{end} bytes", found=f"{size} bytes"
            )
        if self.dropped:
            self._appender.truncate(end)
            self.dropped = 0
        last = read_record_header(_Sized(self._appender, end), self._header, now.footer.commit_offset, kind=Kind.COMMIT)
        return RecordWriter(
            self._appender, self._header, offset=end, sequence=last.sequence + 1, commit=now.commit.number + 1
        )

    def _publish(self, writer: RecordWriter, commit: Commit, entries: tuple[Entry, ...], *, kept: int) -> int:
        """Sync what was written, then write and sync the commit; return the bytes written.

        The first `kept` entries are those of the last commit.
        """
        now = self._now
        index, index_kept = now.commit.index, min(kept, now.commit.index_kept)
        if len(entries) - index_kept > max(32, math.isqrt(2 * len(entries))):
            index, index_kept = writer.plain(Kind.INDEX, pack_index(entries)), len(entries)
        elif not index_kept:
            index = 0
        commit = replace(
            commit, previous=now.footer.commit_offset, previous_digest=now.footer.digest, index=index,
            index_kept=index_kept, time_ns=time.time_ns(), tail=entries[index_kept:],
            digest=entries[-1].digest if entries else bytes(16),
        )  # fmt: skip
        appender = self._appender
        if appender is None:
            raise InputError("the session was opened for reading only", path=self.path)
        appender.sync()
        footer = writer.commit(commit)
        appender.sync()
        self._now = replace(now, commit=commit, footer=footer, entries=entries)
        return footer.file_length - now.footer.file_length

    def _undo(self) -> None:
        """Cut back to the published end after a failed write, so that the session stays usable."""
        if self._appender is not None and not self._appender.poisoned:
            self._appender.truncate(self._now.footer.file_length)


class _Sized:
    """An appender as a `ReadAt` of known length."""

    def __init__(self, appender: Appender, size: int) -> None:
        self.path: str | None = appender.path
        self.size = size
        self.read_at = appender.read_at


def _empty_file() -> bytes:
    sink, header = MemorySink(), new_header(SESSION)
    sink.write_at([header.pack()], 0)
    writer = RecordWriter(sink, header, offset=HEADER_SIZE, sequence=0, commit=1)
    writer.commit(Commit(number=1, operation=Operation.RESET, time_ns=time.time_ns()))
    return bytes(sink.data)

"""Writing the turns of a history again, into a new file: what compacting, copying a fork out and repairing do.

Parts are copied as they are stored, each checked against its checksum on the way; nothing is decoded and encoded again.
Of a turn that was cut, only what is kept of it goes into the new file. Spec sections 7, 10 and 11.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from kvsnap.errors import DamagedError, FormatError, InputError
from kvsnap.formats.native import schema
from kvsnap.formats.native.cut import Cut
from kvsnap.formats.native.live import position_after
from kvsnap.formats.native.read import NativeFile, Span, spans_of
from kvsnap.formats.native.said import pack_said, parse_said
from kvsnap.formats.native.sources import PartSource, Sizes
from kvsnap.formats.native.tables import (
    Commit,
    Entry,
    Operation,
    Part,
    Table,
    canonical_json,
    history_digest,
    pack_index,
    parse_table,
)
from kvsnap.formats.native.told import piece_of
from kvsnap.formats.native.turns import walk
from kvsnap.formats.native.write import EncodedPart, RecordWriter, Sink, new_header
from kvsnap.identity import Identity
from kvsnap.layout import cut_positions, cut_runs
from kvsnap.protocols import Progress
from kvsnap.reach import needs_state
from kvsnap.records import (
    HEADER_SIZE,
    RECORD_SIZE,
    SESSION,
    SNAPSHOT,
    FileHeader,
    Footer,
    Kind,
    read_record,
    read_record_header,
)
from kvsnap.tensors import OF_NO_LAYER, numpy_dtype

__all__ = ["History", "Piece", "history_of", "with_states", "write_history"]

_STEP = 1 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """One turn to be written again: where it is, how much of it is kept, and the commit at its end.

    Of `commit` the counts, the position that comes next, the flag complete and the time are used. `metadata` is what
    its NOTE said; None leaves the one before in force.
    """

    file: NativeFile
    entry: Entry
    commit: Commit
    metadata: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class History:
    """What goes into a new file: the turns in order, and what describes them.

    `end` is the commit whose counts and flag hold at the end, `pieces` may be empty. `pending` is a table without rows
    and parts: ids that follow the last piece and are not evaluated.
    """

    pieces: tuple[Piece, ...]
    end: Commit
    geometry: schema.Geometry
    identity: Identity
    metadata: dict[str, str]
    notes: tuple[str, ...] = ()
    pending: Table | None = None


def history_of(file: NativeFile, cut: Cut | None = None) -> History:
    """Return the live history of an open file, or the part of it that `cut` keeps.

    A chain of commits that is broken costs only what is said of turns (time, complete or cut off), and `notes` tell.
    """
    commit = file.commit
    live = file.live if cut is None else cut.live
    end = commit
    if cut is not None and cut.n_tokens != commit.n_tokens:
        end = replace(
            commit, n_tokens=cut.n_tokens, n_rows=cut.n_rows, n_pending=cut.n_pending, token_offset=cut.token_offset,
            complete=True, operation=Operation.TRUNCATE,
        )  # fmt: skip
    known: dict[NativeFile, dict[int, Commit]] = {}
    notes: list[str] = []
    for where, _ in live:
        if where not in known:
            known[where] = _commits(where, notes)
    pieces: list[Piece] = []
    said: dict[tuple[NativeFile, int], dict[str, str] | None] = {}
    tokens = rows = 0
    unstored = commit.n_rows + commit.n_pending - commit.n_tokens
    for where, entry in live:
        tokens, rows = tokens + entry.n_tokens, rows + entry.n_rows
        number = read_record_header(where.reader, where.header, entry.span, kind=Kind.SPAN).commit
        made = known[where].get(number)
        if made is None or (made.n_tokens, made.n_rows) != (tokens, rows):
            pending = min(tokens, max(0, tokens + unstored - rows))
            made = Commit(
                number=1, n_tokens=tokens, n_rows=rows, n_pending=pending,
                token_offset=position_after(live, len(pieces) + 1, end.token_offset),
                complete=made is None, time_ns=(made or commit).time_ns, operation=Operation.TRUNCATE,
            )  # fmt: skip
        if (where, made.note) not in said:  # commits repeat the NOTE of those before them
            said[where, made.note] = _metadata(where, made, notes)
        pieces.append(Piece(where, entry, made, said[where, made.note]))
    return History(tuple(pieces), end, file.geometry, file.identity, dict(file.metadata), tuple(dict.fromkeys(notes)))


def with_states(history: History, states: int | None) -> History:
    """Return a history that keeps the states of its last `states` turns only, at least one; None keeps all.

    A state that names the position that comes next stays where a cut can reach it: nothing else knows that.
    """
    if states is None:
        return history
    if states < 1:
        raise InputError("the state of the last turn is always kept", expected="1 or more", found=states)
    needed = needs_state(history.geometry.tensors)
    first = len(history.pieces) - states
    pieces = [
        piece if i >= first or not (needed or _next_is_usual(piece)) else _stateless(piece)
        for i, piece in enumerate(history.pieces)
    ]
    return replace(history, pieces=tuple(pieces))


def _stateless(piece: Piece) -> Piece:
    return replace(piece, entry=replace(piece.entry, state=0))


def _next_is_usual(piece: Piece) -> bool:
    if not piece.entry.state:
        return True
    table, place, _ = piece.file.table_at(piece.entry.state, Kind.STATE)
    return schema.parse_token_offset(table.meta, piece.file.path, place) is None


def _commits(file: NativeFile, notes: list[str]) -> dict[int, Commit]:
    found: dict[int, Commit] = {}
    try:
        for commit, _ in walk(file.commit, file.end.footer.commit_offset, file.header, file.reader):
            found[commit.number] = replace(commit, tail=())  # the tails of all would be more than the history
    except (DamagedError, FormatError) as error:
        notes.append(f"what is known of turns before commit {min(found, default=0)} is lost: {error}")
    return found


def _metadata(file: NativeFile, commit: Commit, notes: list[str]) -> dict[str, str] | None:
    if not commit.note:
        return None
    try:
        _, payload = read_record(file.reader, file.header, commit.note, kind=Kind.NOTE)
        return schema.parse_note(payload, file.path, commit.note + RECORD_SIZE)
    except (DamagedError, FormatError) as error:
        notes.append(f"the metadata of a turn is lost: {error}")
        return None


def write_history(
    history: History, sink: Sink, *, use: int = SESSION, progress: Progress | None = None
) -> tuple[FileHeader, Footer]:
    """Write a whole file into an empty sink: each piece as a turn of its own; of a snapshot one sealed commit.

    Raise `DamagedError` or `FormatError` naming tensor, rows and place when a part that is needed is damaged.
    """
    if use == SNAPSHOT and len(history.pieces) + (history.pending is not None) != 1:
        raise ValueError("a snapshot has one span")
    header = new_header(use)
    sink.write_at([header.pack()], 0)
    return header, _Replay(history, sink, header, progress).write(use)


class _Replay:
    """One run of `write_history`."""

    def __init__(self, history: History, sink: Sink, header: FileHeader, progress: Progress | None) -> None:
        self.history, self.header, self.progress = history, header, progress
        self.writer = RecordWriter(sink, header, offset=HEADER_SIZE, sequence=0, commit=1)
        specs = history.geometry.tensors
        self.sizes = {Kind.SPAN: Sizes(specs, replaced=False), Kind.STATE: Sizes(specs, replaced=True)}
        self.entries: list[Entry] = []
        self.total = self.done = 0
        self.last = Commit(number=0)
        self.footer = Footer(0, 0, 0, bytes(16))
        self.index = (0, 0)
        self.metadata: dict[str, str] = {}

    def write(self, use: int) -> Footer:
        """Write identity, layout, every piece, and the last commit."""
        history, writer = self.history, self.writer
        if progress := self.progress:
            self.total = sum(self._size(piece) for piece in history.pieces)
            progress(0, self.total)
        described = Commit(number=1)
        if history.geometry.tensors or history.pieces or history.pending:
            described = replace(
                described, identity=writer.plain(Kind.IDENTITY, canonical_json(history.identity.to_dict())),
                layout=writer.plain(Kind.LAYOUT, schema.pack_layout(history.geometry)),
            )  # fmt: skip
        self.last = described
        spans = spans_of((piece.file, piece.entry) for piece in history.pieces)
        for i, (piece, span) in enumerate(zip(history.pieces, spans, strict=True)):
            last = i == len(history.pieces) - 1 and history.pending is None
            commit = replace(history.end, time_ns=piece.commit.time_ns) if last else piece.commit
            self._turn(span, commit, history.metadata if last else piece.metadata, sealed=use == SNAPSHOT)
        if history.pending is not None:
            self._pending(history.pending, sealed=use == SNAPSHOT)
        elif not history.pieces:
            self._note(history.metadata)
            self._commit(replace(history.end, operation=Operation.RESET), state=0, sealed=False)
        if progress is not None:
            progress(self.total, self.total)
        return self.footer

    def _size(self, piece: Piece) -> int:
        return read_record_header(piece.file.reader, piece.file.header, piece.entry.span, kind=Kind.SPAN).length

    def _note(self, metadata: dict[str, str] | None) -> None:
        if metadata is not None and metadata != self.metadata:
            self.last = replace(self.last, note=self.writer.plain(Kind.NOTE, schema.pack_note(metadata)))
            self.metadata = metadata

    def _turn(self, found: Span, commit: Commit, metadata: dict[str, str] | None, *, sealed: bool) -> None:
        entry, table, file = found.entry, found.table, found.file
        if entry.n_tokens == len(table.tokens) and entry.n_rows == table.n_rows:
            span, check = self._copy(file, entry.span, Kind.SPAN)
        else:
            span, check = self._cut(found)
        state = self._copy(file, entry.state, Kind.STATE)[0] if entry.state else 0
        self.entries.append(replace(entry, span=span, check=check, state=state))
        self._note(metadata)
        self._commit(replace(commit, operation=Operation.APPEND), state=state, sealed=sealed)

    def _pending(self, table: Table, *, sealed: bool) -> None:
        span, check, _ = self.writer.encoded(Kind.SPAN, table, 0, (), 0)
        state = self._state_behind(table.row_start)
        digest = history_digest(self.entries[-1].digest if self.entries else bytes(16), table.tokens, 0)
        self.entries.append(Entry(span, len(table.tokens), table.row_start, 0, state, check, digest))
        self._note(self.history.metadata)
        self._commit(replace(self.history.end, operation=Operation.APPEND), state=state, sealed=sealed)

    def _state_behind(self, n_rows: int) -> int:
        """Write what the last piece leaves to ids behind it that are not evaluated, and return where; 0 for nothing.

        That is what its layers have that is replaced, and which position comes next. Not the sampler: it drew ids that
        are not the last ones here.
        """
        piece = self.history.pieces[-1] if self.history.pieces else None
        if piece is None or not piece.entry.state:
            return 0
        table, payload, _ = piece.file.table_at(piece.entry.state, Kind.STATE)
        named = schema.parse_token_offset(table.meta, piece.file.path, payload)
        if named is None and not needs_state(self.history.geometry.tensors):
            return 0
        sizes = self.sizes[Kind.STATE]
        sources = [PartSource(piece.file.reader, sizes, part, payload, mapped=False) for part in table.parts]
        kept = [source for source in sources if source.spec.role not in OF_NO_LAYER]
        meta = schema.pack_sampler(None, **({} if named is None else {"token_offset": named}))
        parts = (EncodedPart(source.part, (np.frombuffer(source.stored(), np.uint8),)) for source in kept)
        return self.writer.encoded(Kind.STATE, Table(row_start=n_rows, meta=meta), len(kept), parts, 0)[0]

    def _commit(self, commit: Commit, *, state: int, sealed: bool) -> None:
        writer, entries = self.writer, self.entries
        index, kept = self.index
        if len(entries) - kept > max(32, math.isqrt(2 * len(entries))):
            index, kept = self.index = writer.plain(Kind.INDEX, pack_index(entries)), len(entries)
        made = replace(
            self.last, number=writer.number, previous=self.footer.commit_offset, previous_digest=self.footer.digest,
            operation=commit.operation, complete=commit.complete, sealed=sealed, n_tokens=commit.n_tokens,
            n_rows=commit.n_rows, n_pending=commit.n_pending, token_offset=commit.token_offset, state=state,
            index=index, index_kept=kept, time_ns=commit.time_ns, tail=tuple(entries[kept:]),
            digest=entries[-1].digest if entries else bytes(16),
        )  # fmt: skip
        self.footer = writer.commit(made)
        self.last = made
        writer.number += 1

    # -- records ------------------------------------------------------------------------------------------

    def _copy(self, file: NativeFile, offset: int, kind: int) -> tuple[int, int]:
        """Copy a record as it is, each part checked."""
        record, raw = read_record(file.reader, file.header, offset, kind=kind)
        payload = offset + RECORD_SIZE
        table = parse_table(raw, record.length, file.path, payload)
        sources = [PartSource(file.reader, self.sizes[kind], part, payload, mapped=False) for part in table.parts]
        if kind == Kind.SPAN:  # what no reader takes is not copied, whatever its checksum
            parse_said(table.meta, file.path, payload)
        else:
            schema.parse_sampler(table.meta, file.path, payload)
        pieces = (pair for source in sources for pair in self._bytes_of(source, counted=kind == Kind.SPAN))
        return self.writer.copied(kind, record.length, raw, pieces)

    def _bytes_of(self, source: PartSource, *, counted: bool) -> Iterator[tuple[int, bytes]]:
        digest, part = xxhash.xxh3_64(), source.part
        if not source.is_plain:  # what does not decode is not copied, whatever its checksum
            source.read_into(np.empty(source.shape, dtype=numpy_dtype(source.spec.dtype)))
        for at in range(0, part.stored, _STEP):
            data = source.file.read_at(source.offset + at, min(_STEP, part.stored - at))
            digest.update(data)
            padding = bytes(-part.stored % 64) if at + len(data) == part.stored else b""
            yield part.offset + at, data + padding if padding else data
            if counted and self.progress is not None:
                self.done += len(data)
                self.progress(min(self.done, self.total), self.total)
        if digest.intdigest() != part.checksum:
            raise source.damage()

    def _cut(self, found: Span) -> tuple[int, int]:
        """Write the first tokens and rows of a span, so that nothing of what was cut off stays in the new file."""
        entry, file, table, payload = found.entry, found.file, found.table, found.payload
        short = Table(
            row_start=table.row_start, n_rows=entry.n_rows, token_start=table.token_start,
            tokens=table.tokens[: entry.n_tokens], runs=cut_runs(table.runs, entry.n_tokens),
            positions=cut_positions(table.positions, entry.n_rows), meta=pack_said(replace(piece_of(found), text=None)),
        )  # fmt: skip
        sources = [PartSource(file.reader, self.sizes[Kind.SPAN], part, payload, mapped=False) for part in table.parts]
        kept = [_kept_rows(source.part, source.spec.tokens_per_row, entry) for source in sources]
        stop = entry.row_start + entry.n_rows
        pairs = [
            (source, n)
            for source, n in zip(sources, kept, strict=True)
            if not source.spec.grows or source.part.row_start <= stop // source.spec.tokens_per_row
        ]
        encodings = (_first_rows(source, n) for source, n in pairs)
        span, check, _ = self.writer.encoded(Kind.SPAN, short, len(pairs), encodings, 0)
        return span, check


def _kept_rows(part: Part, per_row: int, entry: Entry) -> int:
    return min(part.n_rows, max(0, (entry.row_start + entry.n_rows) // per_row - part.row_start))


def _first_rows(source: PartSource, n_rows: int) -> EncodedPart:
    part, spec = source.part, source.spec
    stored = source.stored()
    if not spec.grows or n_rows == part.n_rows:
        return EncodedPart(part, (np.frombuffer(stored, np.uint8),))
    data = source.codec.cut(spec, stored, part.n_rows, n_rows)
    made = replace(
        part,
        n_rows=n_rows,
        stored=data.nbytes,
        checksum=xxhash.xxh3_64_intdigest(data.data),
        decoded=spec.nbytes(n_rows),
    )
    return EncodedPart(made, (data,))

"""Writing records, and whole sealed snapshots. Spec sections 7, 11 and 13."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import xxhash

from kvsnap import codecs
from kvsnap.errors import InputError
from kvsnap.formats.foreign import foreign_losses
from kvsnap.formats.native import schema
from kvsnap.formats.native.said import Added, Piece, pack_messages, pack_said
from kvsnap.formats.native.sealed import BodyWriter, Lock, Seal, new_seal, seal_table
from kvsnap.formats.native.tables import (
    MAX_COUNT,
    MAX_POSITION,
    Commit,
    Entry,
    Part,
    Table,
    canonical_json,
    history_digest,
)
from kvsnap.layout import CUT_OFF, Snapshot, Tensor
from kvsnap.protocols import Encoded, Loss, Progress
from kvsnap.records import (
    CRITICAL,
    ENCRYPTED,
    FOOTER_SIZE,
    HEADER_SIZE,
    RECORD_SIZE,
    SNAPSHOT,
    FileHeader,
    Footer,
    Kind,
    RecordHeader,
    align64,
    commit_digest,
    record_end,
)

__all__ = ["MemorySink", "RecordWriter", "SaveReport", "Sink", "new_header", "write_snapshot"]

_OVERLAP_FROM = 4 << 20


class Sink(Protocol):
    """Positional writes. Ranges are written once, in any order; gaps between them are written too, later or earlier."""

    def write_at(self, buffers: Sequence[Any], offset: int) -> int:
        """Write all buffers one behind the other at `offset`; return the number of bytes. Raises `StorageError`."""


class MemorySink:
    """A sink in memory, for `dumps`."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write_at(self, buffers: Sequence[Any], offset: int) -> int:
        """Write into the buffer, growing it with zeros."""
        total = 0
        for buffer in buffers:
            view = memoryview(buffer).cast("B") if memoryview(buffer).nbytes else memoryview(b"")
            end = offset + total + view.nbytes
            if end > len(self.data):
                self.data.extend(bytes(end - len(self.data)))
            self.data[offset + total : end] = view
            total += view.nbytes
        return total


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save or an append wrote.

    `nbytes` counts all bytes written, `tensor_bytes` the decoded size of the tensors in it; `exact` tells whether every
    part decodes to the same bits, else `bound` is the largest absolute error any part admits. `inexact` names the
    tensors that are not exact. `losses` is what the format has no place for: of a snapshot that came from a foreign
    file also what only that format knows. `requantised` names the codes that are others than at the turn before: rows
    that were quantised by then were quantised again, together with those behind them.
    """

    path: str | None
    format: str
    nbytes: int
    tensor_bytes: int
    n_tokens: int
    n_rows: int
    exact: bool
    bound: float
    inexact: tuple[str, ...] = ()
    commit: int = 1
    file_id: str = ""
    losses: tuple[Loss, ...] = ()
    requantised: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        data: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        data.update(inexact=list(self.inexact), requantised=list(self.requantised))
        data["losses"] = [loss.to_dict() for loss in self.losses]
        data["bound"] = self.bound if self.bound != float("inf") else None
        return data


def new_header(use: int, *, required: int = 0) -> FileHeader:
    """Return a header with a new file id and salt; `required` are features that a reader has to know."""
    salt = int.from_bytes(os.urandom(8), "little")
    return FileHeader(use, os.urandom(16), salt, time.time_ns(), required=required)


@dataclass(slots=True)
class EncodedPart:
    """A part whose offset is not known yet, and its stored bytes."""

    part: Part
    buffers: tuple[Any, ...]


def _encode(tensor: Tensor, wanted: str) -> EncodedPart:
    spec = tensor.spec
    codec = codecs.codec_for(wanted, spec)
    encoded: Encoded = codec.encode(spec, tensor.values())
    digest = xxhash.xxh3_64()
    for buffer in encoded.buffers:
        digest.update(_bytes_of(buffer))
    # What an earlier lossy save did to the values stays on record when they are saved again.
    bound = tensor.bound + (0.0 if encoded.exact else encoded.bound)
    part = Part(
        tensor=spec.id,
        codec=codec.id,
        exact=bound == 0,
        row_start=tensor.start if spec.grows else 0,
        n_rows=tensor.n_rows,
        offset=0,
        stored=encoded.nbytes,
        checksum=digest.intdigest(),
        decoded=tensor.nbytes,
        bound=bound,
    )
    return EncodedPart(part, encoded.buffers)


def _bytes_of(buffer: Any) -> Any:
    if isinstance(buffer, np.ndarray):
        return buffer.reshape(-1).view(np.uint8)
    return buffer


def _ahead(work: Sequence[Callable[[], EncodedPart]], overlap: bool) -> Iterator[EncodedPart]:
    """Yield the results in order; with `overlap` the next one is made in a thread while the caller writes this one."""
    if not overlap or len(work) < 2:
        for make in work:
            yield make()
        return
    with ThreadPoolExecutor(1, thread_name_prefix="kvsnap-encode") as pool:
        coming: Future[EncodedPart] = pool.submit(work[0])
        for make in work[1:]:
            ready, coming = coming.result(), pool.submit(make)
            yield ready
        yield coming.result()


class RecordWriter:
    """Writes records one behind the other into a sink, from `offset` on; publishes nothing until `commit`."""

    def __init__(
        self, sink: Sink, header: FileHeader, *, offset: int, sequence: int, commit: int, seal: Seal | None = None
    ) -> None:
        self.sink = sink
        self.header = header
        self.offset = offset
        self.sequence = sequence
        self.number = commit
        self.seal = seal

    def _header(self, kind: int, length: int, table: bytes) -> bytes:
        flags = CRITICAL if kind == Kind.KEY else 0
        checksum = xxhash.xxh3_64_intdigest(table)
        record = RecordHeader(kind, self.sequence, length, self.number, len(table), checksum, flags)
        return record.pack(self.header.salt, self.offset)

    def _sealed(self, kind: int, table: bytes, body: int = 0) -> bytes:
        """Return a table as it is stored; `body` is the stored length of what follows it."""
        if self.seal is None or kind == Kind.KEY:
            return table
        return seal_table(self.seal, kind, self.sequence, self.number, self.offset, table, body)

    def plain(self, kind: int, payload: bytes) -> int:
        """Write a record whose payload is one table; return its offset."""
        place, payload = self.offset, self._sealed(kind, payload)
        head = self._header(kind, len(payload), payload)
        self.sink.write_at([head, payload, bytes(-len(payload) % 64)], place)
        self.offset = align64(place + RECORD_SIZE + len(payload))
        self.sequence += 1
        return place

    def copied(self, kind: int, length: int, table: bytes, payload: Iterable[tuple[int, Any]]) -> tuple[int, int]:
        """Write a record whose payload is there already: its table, and what follows as pairs of place and bytes.

        Places count from the start of the payload. Return the offset of the record and its header checksum.
        """
        place = self.offset
        head = self._header(kind, length, table)
        for at, data in payload:
            self.sink.write_at([data], place + RECORD_SIZE + at)
        self.sink.write_at([head, table], place)
        end = place + RECORD_SIZE + length
        if end % 64:
            self.sink.write_at([bytes(-end % 64)], end)
        self.offset = align64(end)
        self.sequence += 1
        return place, int.from_bytes(head[56:64], "little")

    def parts(
        self, kind: int, table: Table, tensors: Sequence[Tensor], codec: str, progress: Progress | None = None
    ) -> tuple[int, int, tuple[Part, ...]]:
        """Write a SPAN or STATE with these tensors; return its offset, header checksum and parts.

        The parts go first and the table last: nothing points at the record before the commit, and so the bytes of a
        tensor are needed only once.
        """
        total = sum(t.nbytes for t in tensors)
        work = [partial(_encode, tensor, codec) for tensor in tensors]
        return self.encoded(kind, table, len(work), _ahead(work, total >= _OVERLAP_FROM), total, progress)

    def encoded(
        self,
        kind: int,
        table: Table,
        n_parts: int,
        encodings: Iterable[EncodedPart],
        total: int,
        progress: Progress | None = None,
    ) -> tuple[int, int, tuple[Part, ...]]:
        """Write a SPAN or STATE with `n_parts` parts that are encoded already; as `parts`."""
        place = self.offset
        length = Table.length(len(table.tokens), len(table.runs), len(table.positions), len(table.meta), n_parts)
        parts: list[Part] = []
        at, done = length, 0
        sealed = self.seal and BodyWriter(self.seal, self.sink, kind, self.sequence, self.number, place, length)
        for encoded in encodings:
            part = replace(encoded.part, offset=at)
            padding = [] if sealed else [bytes(-part.stored % 64)]
            buffers = [*(_bytes_of(b) for b in encoded.buffers), *padding]
            (sealed or self.sink).write_at(buffers, place + RECORD_SIZE + at)
            parts.append(part)
            at = align64(at + part.stored)
            done += part.decoded
            if progress is not None:
                progress(done, total)
        end = parts[-1].offset + parts[-1].stored if parts else length
        raw = replace(table, parts=tuple(parts)).pack()
        if sealed:
            body = sealed.finish()
            raw = self._sealed(kind, raw, body)
            end = len(raw) + body
        head = self._header(kind, end, raw)
        self.sink.write_at([head, raw], place)
        self.offset = align64(place + RECORD_SIZE + end)
        self.sequence += 1
        return place, int.from_bytes(head[56:64], "little"), tuple(parts)

    def commit(self, commit: Commit) -> Footer:
        """Write COMMIT and footer in one write; return the footer."""
        place, payload = self.offset, self._sealed(Kind.COMMIT, commit.pack())
        head = self._header(Kind.COMMIT, len(payload), payload)
        at = align64(place + RECORD_SIZE + len(payload))
        footer = Footer(place, commit.number, at + FOOTER_SIZE, commit_digest(head, payload))
        padding = bytes(at - place - RECORD_SIZE - len(payload))
        self.sink.write_at([head, payload, padding, footer.pack(self.header.salt, at)], place)
        self.offset = at + FOOTER_SIZE
        self.sequence += 1
        return footer


def span_table(snapshot: Snapshot, *, row_start: int, token_start: int, piece: Piece) -> Table:
    """Return the table of a SPAN that holds what the snapshot has from this row and this token on."""
    return Table(
        row_start=row_start,
        n_rows=snapshot.n_rows - row_start,
        token_start=token_start,
        tokens=np.asarray(snapshot.tokens[token_start:], dtype=np.int32),
        runs=_later(snapshot.runs, token_start),
        positions=_later_positions(snapshot, row_start),
        meta=pack_said(piece),
    )


def _all_said(snapshot: Snapshot) -> Piece:
    messages = None if snapshot.messages is None else Added(pack_messages(snapshot.messages))
    return Piece(None if snapshot.text is None else (None, snapshot.text), messages)


def _later(runs: Sequence[Any], skip: int) -> tuple[Any, ...]:
    out = []
    for run in runs:
        cut = min(skip, run.count)
        skip -= cut
        if run.count > cut:
            out.append(replace(run, count=run.count - cut))
    return tuple(out)


def _later_positions(snapshot: Snapshot, skip: int) -> tuple[Any, ...]:
    out = []
    for run in snapshot.positions:
        cut = min(skip, run.count)
        skip -= cut
        if run.count > cut:
            out.append(replace(run, start=run.start + cut, count=run.count - cut))
    return tuple(out)


def state_tensors(snapshot: Snapshot) -> list[Tensor]:
    """Return the tensors that are replaced at each commit: recurrent states, logits, the draft."""
    return [*(t for t in snapshot.tensors() if t.spec.growth == "replaced"), *snapshot.loose()]


def check_counts(snapshot: Snapshot, known: int = 0) -> None:
    """Raise `InputError` unless tokens, runs, rows and positions of a snapshot agree and fit into the file.

    The caller compares the first `known` ids with those in the file, so they are not looked at here.
    """
    rules: Iterable[tuple[str, int, int]] = (
        ("token runs", sum(r.count for r in snapshot.runs), len(snapshot.tokens)),
        ("position runs", sum(r.count for r in snapshot.positions), snapshot.n_rows),
        *(
            (f"{t.name} rows", t.start + t.n_rows, snapshot.n_rows // t.spec.tokens_per_row)
            for t in snapshot.tensors()
            if t.spec.grows
        ),
    )
    for what, found, expected in rules:
        if found != expected:
            raise InputError(f"snapshot: {what} do not fit", expected=expected, found=found)
    for t in snapshot.tensors():
        if t.spec.growth == "grow" and t.start > snapshot.row_start // t.spec.tokens_per_row:
            first = snapshot.row_start // t.spec.tokens_per_row
            raise InputError(f"snapshot: the first rows of {t.name} are missing", expected=first, found=t.start)
    _check_range("token ids", snapshot.tokens[known:], 0, MAX_COUNT)
    _check_range("run lengths", [r.count for r in snapshot.runs], 0, MAX_COUNT)
    _check_range("position run lengths", [r.count for r in snapshot.positions], 0, MAX_COUNT)
    _check_range("positions", [r.start for r in snapshot.positions], -MAX_POSITION, MAX_POSITION)
    _check_range("token_offset", [snapshot.token_offset], -MAX_POSITION, MAX_POSITION)
    _check_range("n_pending", [snapshot.n_pending], 0, MAX_COUNT)
    if snapshot.n_pending > len(snapshot.tokens) or snapshot.n_rows + snapshot.n_pending < len(snapshot.tokens):
        raise InputError(
            "snapshot: tokens, rows and pending contradict each other",
            found=f"{len(snapshot.tokens)} tokens, {snapshot.n_rows} rows, {snapshot.n_pending} pending",
        )


def _check_range(what: str, values: Sequence[int], low: int, high: int) -> None:
    if values and not low <= min(values) <= max(values) <= high:
        found = min(values) if min(values) < low else max(values)
        raise InputError(f"snapshot: {what} out of range", expected=f"{low} to {high}", found=found)


def write_snapshot(
    snapshot: Snapshot,
    sink: Sink,
    *,
    codec: str | None = None,
    path: str | None = None,
    progress: Progress | None = None,
    lock: Lock | None = None,
) -> SaveReport:
    """Write a whole sealed file into an empty sink; with `lock` it is encrypted.

    Raise `InputError` for a partial capture, counts that contradict each other, or an unknown codec.
    """
    if snapshot.row_start:
        raise InputError(
            "a partial capture cannot be saved alone: append it to a session", found=f"rows from {snapshot.row_start}"
        )
    check_counts(snapshot)
    chosen = codecs.codec_of_name(codec or "exact").name
    header = new_header(SNAPSHOT, required=ENCRYPTED if lock else 0)
    writer = RecordWriter(sink, header, offset=HEADER_SIZE, sequence=0, commit=1)
    sink.write_at([header.pack()], 0)
    if lock is not None:
        writer.seal, about = new_seal(header, lock)
        writer.plain(Kind.KEY, about)
    identity = writer.plain(Kind.IDENTITY, canonical_json(snapshot.identity.to_dict()))
    layout = writer.plain(Kind.LAYOUT, schema.pack_layout(schema.geometry_of(snapshot)))
    rows = [t for t in snapshot.tensors() if t.spec.growth != "replaced"]
    table = span_table(snapshot, row_start=0, token_start=0, piece=_all_said(snapshot))
    span, check, parts = writer.parts(Kind.SPAN, table, rows, chosen, progress)
    state_table = Table(row_start=snapshot.n_rows, meta=schema.pack_state(snapshot))
    state, _, state_parts = writer.parts(Kind.STATE, state_table, state_tensors(snapshot), "exact")
    note = writer.plain(Kind.NOTE, schema.pack_note(snapshot.metadata)) if snapshot.metadata else 0
    digest = history_digest(bytes(16), table.tokens, snapshot.n_rows)
    entry = Entry(span, len(snapshot.tokens), 0, snapshot.n_rows, state, check, digest)
    footer = writer.commit(
        Commit(
            number=1, sealed=True, complete=snapshot.metadata.get("stop") not in CUT_OFF,
            n_tokens=len(snapshot.tokens), n_rows=snapshot.n_rows, n_pending=snapshot.n_pending,
            token_offset=snapshot.token_offset, identity=identity, layout=layout, state=state, note=note,
            time_ns=time.time_ns(), digest=digest, tail=(entry,),
        )
    )  # fmt: skip
    return report_of(
        snapshot, [*parts, *state_parts], nbytes=footer.file_length, path=path, commit=1, file_id=header.file_id
    )


def report_of(
    snapshot: Snapshot, parts: Sequence[Part], *, nbytes: int, path: str | None, commit: int, file_id: bytes
) -> SaveReport:
    """Summarise what was written."""
    names = {t.spec.id: t.name for t in snapshot.tensors()}
    inexact = tuple(names.get(p.tensor, "logits") for p in parts if not p.exact)
    return SaveReport(
        path=path,
        format="native",
        nbytes=nbytes,
        tensor_bytes=sum(p.decoded for p in parts),
        n_tokens=len(snapshot.tokens),
        n_rows=snapshot.n_rows,
        exact=not inexact,
        bound=max((p.bound for p in parts), default=0.0),
        inexact=inexact,
        commit=commit,
        file_id=file_id.hex(),
        losses=foreign_losses(snapshot, "native"),
    )


__all__ += ["check_counts", "record_end", "report_of", "span_table", "state_tensors"]

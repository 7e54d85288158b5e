"""Reading `.kvsnap` files: opening, the live list, and tensors that are read when they are used. Spec section 12."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from kvsnap.errors import DamagedError, FormatError
from kvsnap.files import Reader
from kvsnap.formats.native import schema
from kvsnap.formats.native.columns import Columns, JoinedSource
from kvsnap.formats.native.sources import PartSource, Sizes
from kvsnap.formats.native.tables import (
    Commit,
    Entry,
    ReadTable,
    history_digest,
    parse_commit,
    parse_index,
    parse_json,
    parse_table,
)
from kvsnap.formats.native.vault import open_vault
from kvsnap.identity import Identity
from kvsnap.layout import Snapshot, Tensor, cut_positions, cut_runs, join_positions, join_runs
from kvsnap.records import (
    HEADER_SIZE,
    MAX_LENGTH,
    RECORD_SIZE,
    SNAPSHOT,
    End,
    FileHeader,
    Kind,
    ReadAt,
    find_end,
    read_header,
    read_record,
)
from kvsnap.tensors import Source, numpy_dtype

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from kvsnap.layout import PositionRun, Run, SamplerState
    from kvsnap.tensors import TensorSpec

__all__ = ["BytesReader", "NativeFile", "Span"]

MAX_JSON = 64 << 20
_TRIES = 8


class FileReader(ReadAt, Protocol):
    """A `ReadAt` that can also fill arrays and be mapped."""

    def read_into(self, offset: int, buffer: WriteableBuffer) -> int:
        """Fill the buffer from `offset` on."""

    def map(self) -> memoryview:
        """The whole file, read-only."""


class BytesReader:
    """A file in memory, for `loads`."""

    path: str | None = None

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = memoryview(data).toreadonly().cast("B")
        self.size = len(self._data)

    def read_at(self, offset: int, length: int) -> bytes:
        """Return these bytes, or raise `DamagedError`."""
        if offset + length > self.size:
            raise DamagedError("the data is cut off", offset=offset, expected=length, found=max(0, self.size - offset))
        return bytes(self._data[offset : offset + length])

    def read_into(self, offset: int, buffer: WriteableBuffer) -> int:
        """Fill the buffer."""
        view = memoryview(buffer).cast("B")
        view[:] = self.read_at(offset, view.nbytes)
        return view.nbytes

    def map(self) -> memoryview:
        """Return the data itself."""
        return self._data


@dataclass(frozen=True, slots=True)
class Span:
    """A SPAN as it is used by the live list: the entry, its table, and where its payload starts."""

    entry: Entry
    table: ReadTable
    payload: int


class NativeFile:
    """One open `.kvsnap` file at one commit. Reading takes no lock; a writer that appends does not disturb it."""

    def __init__(self, reader: FileReader, *, mapped: bool = True, key: bytes | None = None) -> None:
        self.reader = reader
        self.header: FileHeader = read_header(reader)
        self.vault = open_vault(reader, self.header, key)
        self.content: FileReader = reader if self.vault is None else self.vault
        """Where the parts are read from, at the offsets that their tables give."""
        self.end: End = find_end(reader, self.header)
        place = self.end.footer.commit_offset
        payload = self.end.payload if self.vault is None else self.table_of(place, kind=Kind.COMMIT)[0]
        self.commit: Commit = parse_commit(payload, self.path, place + RECORD_SIZE)
        # A journal may be cut by a later writer, which a mapping would not survive.
        self.mapped = mapped and self.sealed and self.vault is None
        if self.commit.number != self.end.footer.commit:
            raise FormatError(
                "COMMIT and its footer disagree", path=self.path, offset=self.end.footer.commit_offset,
                expected=self.end.footer.commit, found=self.commit.number,
            )  # fmt: skip

    @staticmethod
    def open(path: str | os.PathLike[str], *, mapped: bool = True, key: bytes | None = None) -> NativeFile:
        """Open a file. Raise `MissingError`, `FormatError`, `VersionError`, `DamagedError` or `KeyNeededError`.

        Where a writer cuts off the end that was being looked at (a torn tail, a turn that failed), it is opened again.
        """
        for _ in range(_TRIES):
            reader = Reader(path)
            try:
                return NativeFile(reader, mapped=mapped, key=key)
            except DamagedError:
                if os.stat(path).st_size == reader.size:
                    raise
        return NativeFile(Reader(path), mapped=mapped, key=key)

    @property
    def path(self) -> str | None:
        """Name for messages."""
        return self.reader.path

    @property
    def sealed(self) -> bool:
        """True when nothing may be appended."""
        return self.header.use == SNAPSHOT or self.commit.sealed

    def close(self) -> None:
        """Close the file now; tensors that were not read yet can then no longer be read."""
        if isinstance(self.reader, Reader):
            self.reader.close()

    def table_of(self, offset: int, *, kind: int | None = None, limit: int = MAX_LENGTH) -> tuple[bytes, int, int]:
        """Read the table of a record; return it, the length of the payload, and the record's header checksum.

        Of an encrypted file table and length are the plain ones. Raise `DamagedError`, `FormatError`, `TamperedError`.
        """
        record, raw = read_record(self.reader, self.header, offset, kind=kind, limit=limit)
        check = int.from_bytes(record.pack(self.header.salt, offset)[56:], "little")
        return *((raw, record.length) if self.vault is None else self.vault.table(offset, record, raw)), check

    def _payload(self, offset: int, kind: int) -> tuple[bytes, int]:
        return self.table_of(offset, kind=kind, limit=MAX_JSON)[0], offset + RECORD_SIZE

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The live list. Raise `DamagedError` or `FormatError` when INDEX cannot be read or does not add up."""
        commit = self.commit
        kept: tuple[Entry, ...] = ()
        if commit.index:
            payload, _, _ = self.table_of(commit.index, kind=Kind.INDEX)
            kept = parse_index(payload, self.path, commit.index + RECORD_SIZE)
            if commit.index_kept > len(kept):
                raise FormatError(
                    "COMMIT keeps more of INDEX than there is",
                    path=self.path,
                    offset=commit.index,
                    expected=commit.index_kept,
                    found=len(kept),
                )
            kept = kept[: commit.index_kept]
        live = kept + commit.tail
        n_tokens, n_rows = sum(e.n_tokens for e in live), 0
        for entry in live:
            if entry.row_start != n_rows:
                raise FormatError(
                    "the live list has a gap", path=self.path, offset=self.end.footer.commit_offset,
                    expected=n_rows, found=entry.row_start,
                )  # fmt: skip
            n_rows += entry.n_rows
        digest = live[-1].digest if live else bytes(16)
        if (n_tokens, n_rows, digest) != (commit.n_tokens, commit.n_rows, commit.digest):
            raise FormatError(
                "the live list does not add up to its COMMIT", path=self.path, offset=self.end.footer.commit_offset,
                expected=f"{commit.n_tokens} tokens, {commit.n_rows} rows", found=f"{n_tokens} tokens, {n_rows} rows",
            )  # fmt: skip
        return live

    @cached_property
    def geometry(self) -> schema.Geometry:
        """What LAYOUT says; empty when there is none."""
        if not self.commit.layout:
            return schema.Geometry("", (), ())
        return schema.parse_layout(*self._json(self.commit.layout, Kind.LAYOUT))

    def _json(self, offset: int, kind: int) -> tuple[bytes, str | None, int]:
        payload, place = self._payload(offset, kind)
        return payload, self.path, place

    @cached_property
    def identity(self) -> Identity:
        """What IDENTITY says; empty (all unknown) when there is none."""
        if not self.commit.identity:
            return Identity()
        payload, path, place = self._json(self.commit.identity, Kind.IDENTITY)
        try:
            return Identity.from_dict(parse_json(payload, path, place))
        except FormatError as error:
            error.path, error.offset = path, place
            raise

    @cached_property
    def metadata(self) -> dict[str, str]:
        """The user's metadata."""
        if not self.commit.note:
            return {}
        return schema.parse_note(*self._json(self.commit.note, Kind.NOTE))

    def table_at(self, offset: int, kind: int) -> tuple[ReadTable, int, int]:
        """Read the table of a SPAN or STATE; return it, the offset of its payload, and the record's header checksum."""
        raw, length, check = self.table_of(offset, kind=kind)
        place = offset + RECORD_SIZE
        return parse_table(raw, length, self.path, place), place, check

    def spans(self) -> Iterator[Span]:
        """Yield the spans of the live list in order, each checked against its entry and the digest of the history."""
        digest, n_tokens, free = bytes(16), 0, HEADER_SIZE
        for entry in self.entries:
            if entry.span < free:
                raise FormatError(
                    "spans are out of order or overlap", path=self.path, offset=entry.span, expected=f"{free} or above"
                )
            table, payload, check = self.table_at(entry.span, Kind.SPAN)
            free = payload + table.payload_length
            fits = check == entry.check and table.row_start == entry.row_start and table.token_start == n_tokens
            if not fits or entry.n_rows > table.n_rows or entry.n_tokens > len(table.tokens):
                raise FormatError("a SPAN is not the one that the live list means", path=self.path, offset=entry.span)
            digest = history_digest(digest, table.tokens[: entry.n_tokens], entry.n_rows)
            if digest != entry.digest:
                raise DamagedError("the history digest of a SPAN does not fit", path=self.path, offset=entry.span)
            n_tokens += entry.n_tokens
            yield Span(entry, table, payload)

    def state(self) -> tuple[dict[int, Tensor], SamplerState | None]:
        """Read STATE: its tensors by id (not their bytes), and the sampler."""
        if not self.commit.state:
            return {}, None
        table, payload, _ = self.table_at(self.commit.state, Kind.STATE)
        if len(table.tokens) or table.n_rows or table.row_start != self.commit.n_rows:
            raise FormatError(
                "STATE is not that of the last row", path=self.path, offset=self.commit.state,
                expected=f"row {self.commit.n_rows}, no tokens or rows of its own",
                found=f"row {table.row_start}, {len(table.tokens)} tokens, {table.n_rows} rows",
            )  # fmt: skip
        sizes, tensors = Sizes(self.geometry.tensors, replaced=True), {}
        for part in table.parts:
            source = PartSource(self.content, sizes, part, payload, mapped=self.mapped)
            tensors[part.tensor] = Tensor(source.spec, source, n_rows=part.n_rows, bound=part.bound)
        return tensors, schema.parse_sampler(table.meta, self.path, payload)

    def snapshot(self) -> Snapshot:
        """Return everything as a snapshot. Tensor bytes are read, and checked, when they are first used."""
        columns = Columns(self.content, Sizes(self.geometry.tensors, replaced=False), mapped=self.mapped)
        ids: list[npt.NDArray[np.int32]] = []
        text: str | None = ""
        runs: tuple[Run, ...] = ()
        positions: tuple[PositionRun, ...] = ()
        for span in self.spans():
            entry, table = span.entry, span.table
            ids.append(table.tokens[: entry.n_tokens])
            whole = entry.n_tokens == len(table.tokens)
            text = _joined_text(text, schema.parse_text(table.meta, self.path, span.payload) if whole else None)
            runs = join_runs(runs, cut_runs(table.runs, entry.n_tokens))
            positions = join_positions(positions, cut_positions(table.positions, entry.n_rows))
            columns.add(entry, table, span.payload)
        specs = {spec.id: spec for spec in self.geometry.tensors}
        tensors = {number: self._tensor(specs[number], columns) for number in columns.tensors}
        replaced, sampler = self.state()
        absent = [spec for spec in self.geometry.tensors if spec.grows and spec.id not in tensors]
        tensors |= {spec.id: self._empty(spec) for spec in absent}
        logits = next((t for t in replaced.values() if t.role == "logits"), None)
        every = np.concatenate(ids) if ids else np.zeros(0, np.int32)
        return Snapshot(
            architecture=self.geometry.architecture,
            layers=self.geometry.build(tensors | replaced),
            tokens=tuple(every.tolist()),
            runs=runs,
            n_rows=self.commit.n_rows,
            n_pending=self.commit.n_pending,
            token_offset=self.commit.token_offset,
            positions=positions,
            logits=logits,
            sampler=sampler,
            identity=self.identity,
            text=text if len(columns) else None,
            metadata=self.metadata,
            source={
                "format": "native",
                "path": self.path,
                "commit": self.commit.number,
                "complete": self.commit.complete,
            },
        )

    def _empty(self, spec: TensorSpec) -> Tensor:
        expected = self.commit.n_rows // spec.tokens_per_row
        if spec.growth == "grow" and expected:
            raise FormatError(
                f"{spec.name}: rows are missing", path=self.path, offset=self.end.footer.commit_offset,
                expected=f"0 to {expected}", found="no part",
            )  # fmt: skip
        return Tensor(spec, np.zeros(spec.shape, dtype=numpy_dtype(spec.dtype)))

    def _tensor(self, spec: TensorSpec, columns: Columns) -> Tensor:
        if not spec.grows:
            last = columns.last(spec.id).source
            return Tensor(spec, last, n_rows=last.part.n_rows, bound=last.part.bound)
        column = columns.column(spec)
        start = int(column.starts[0])
        stop = start + int(column.kept.sum())
        expected = self.commit.n_rows // spec.tokens_per_row
        if spec.growth == "grow" and (start, stop) != (0, expected):
            raise FormatError(
                f"{spec.name}: rows are missing", path=self.path,
                offset=columns.slice(int(column.spans[0]), spec.id).source.offset,
                expected=f"0 to {expected}", found=f"{start} to {stop}",
            )  # fmt: skip
        source: Source = JoinedSource(spec, columns, column)
        if len(column.spans) == 1 and column.whole:
            source = columns.slice(int(column.spans[0]), spec.id).source
        return Tensor(spec, source, start=start, n_rows=stop - start, bound=column.bound)


def _joined_text(before: str | None, piece: tuple[int | None, str] | None) -> str | None:
    """Return the text up to and including a span; None where a part of it is not known."""
    if piece is None:
        return None
    after, text = piece
    if after == 0:
        return text
    return None if before is None else before[:after] + text

"""Records of a `.coli_kv` file in blocks: where each row lies in one, reading columns of rows, packing new records.

docs/formats/colikv.md section 3.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvsnap.errors import ConflictError, DamagedError
from kvsnap.formats.colikv.header import HEADER_SIZE, Header
from kvsnap.formats.colikv.rows import Encoding, decode, encode, fp8_bound
from kvsnap.tensors import Source

__all__ = ["BytesSource", "Column", "Columns", "LazyRows", "columns_of", "pack_records", "read_columns", "read_tokens"]

_BLOCK = 4 << 20
_SPARSE_FROM = 16 << 10  # from this record size on, one column is read row by row
_TOKEN = np.dtype("<i4")

Rows = npt.NDArray[np.float32]


class ByteSource(Protocol):
    """Bytes at positions: an open file, or memory."""

    def read_into(self, offset: int, buffer: Any) -> int:
        """Fill the writable contiguous buffer; `DamagedError` where the bytes end before."""


class BytesSource:
    """A `ByteSource` over bytes in memory."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = memoryview(data).cast("B")

    def read_into(self, offset: int, buffer: Any) -> int:
        """Fill `buffer` from `offset` on."""
        whole = memoryview(buffer)
        view = whole.cast("B") if whole.nbytes else memoryview(bytearray())
        found = len(self._data) - offset
        if found < len(view):
            raise DamagedError("the bytes end early", offset=offset, expected=f"{len(view)} bytes", found=found)
        view[:] = self._data[offset : offset + len(view)]
        return len(view)


@dataclass(frozen=True, slots=True)
class Column:
    """One row's place in a record: `number` is the layer, for an index row its place among the index rows."""

    role: str
    number: int
    offset: int
    width: int
    encoding: Encoding

    @property
    def size(self) -> int:
        return self.encoding.row_size(self.width)


Columns = tuple[Column, ...]


def columns_of(header: Header) -> Columns:
    """Return the rows of one record in the order of the file."""
    g, out, at = header.geometry, [], 4
    for layer in range(g.n_layers):
        for role, width in (("latent", g.kv_lora), ("rope", g.qk_rope)):
            out.append(Column(role, layer, at, width, header.encoding))
            at += header.encoding.row_size(width)
    for place in range(g.index_rows):
        out.append(Column("index", place, at, g.index_width, Encoding("float32")))
        at += 4 * g.index_width
    return tuple(out)


# -- reading ------------------------------------------------------------------------------------------------


def _blocks(
    source: ByteSource, header: Header, n_records: int, columns: Sequence[Column]
) -> Iterator[tuple[int, npt.NDArray[np.uint8], int]]:
    """Yield (first record, bytes `[n, ...]`, offset of those bytes in the record) over the first `n_records`."""
    size = header.record_size
    first, last = columns[0].offset, max(c.offset + c.size for c in columns)
    sparse = size >= _SPARSE_FROM and last - first <= size // 4
    wanted = last - first if sparse else size
    step = max(1, _BLOCK // max(1, wanted))
    for at in range(0, n_records, step):
        count = min(step, n_records - at)
        raw = np.empty((count, wanted), np.uint8)
        if sparse:
            for i in range(count):
                source.read_into(header.offset(at + i) + first, raw[i])
        else:
            source.read_into(header.offset(at), raw)
        yield at, raw, first if sparse else 0


def _part(raw: npt.NDArray[np.uint8], at: int, column: Column) -> tuple[npt.NDArray[np.uint8], Rows]:
    """Split one column into its codes and its scales or radii (none for float32)."""
    begin = column.offset - at
    middle = begin + column.encoding.code_size(column.width)
    codes = raw[:, begin:middle]
    if column.encoding.name == "float32":
        return codes, np.zeros(0, np.float32)
    return codes, np.ascontiguousarray(raw[:, middle : middle + 4]).view("<f4").reshape(len(raw))


def read_columns(
    source: ByteSource,
    header: Header,
    n_records: int,
    pairs: Sequence[tuple[Column, Rows]],
    progress: Callable[[int], None] | None = None,
) -> None:
    """Fill each array `[n_records, width]` with the decoded rows of its column; `progress` is told decoded bytes."""
    if not pairs:
        return
    ordered = sorted(pairs, key=lambda pair: pair[0].offset)
    for at, raw, skipped in _blocks(source, header, n_records, [column for column, _ in ordered]):
        for column, out in ordered:
            codes, numbers = _part(raw, skipped, column)
            rows = out[at : at + len(raw)]
            if column.encoding.name == "float32":
                begin = column.offset - skipped
                rows[...] = raw[:, begin : begin + 4 * column.width].view("<f4") if column.width else rows
            else:
                rows[...] = decode(column.encoding, codes, numbers, column.width)
            if progress is not None:
                progress(rows.nbytes)


def read_bounds(source: ByteSource, header: Header, n_records: int, columns: Columns) -> list[float]:
    """Return the error bound of each column: 0 for float32, a true one for fp8, infinity for the packed ones."""
    bounds = [0.0 if c.encoding.name == "float32" else float("inf") for c in columns]
    if header.encoding.name != "fp8":
        return bounds
    chosen = [i for i, c in enumerate(columns) if c.encoding.name == "fp8"]
    bounds = [0.0] * len(columns)
    for _, raw, skipped in _blocks(source, header, n_records, [columns[i] for i in chosen]):
        for i in chosen:
            bounds[i] = max(bounds[i], fp8_bound(*_part(raw, skipped, columns[i])))
    return bounds


def read_tokens(source: ByteSource, header: Header, n_records: int) -> npt.NDArray[np.int32]:
    """Return the token ids of the first `n_records` records, as stored: they may be outside the vocabulary."""
    token = Column("token", 0, 0, 1, Encoding("float32"))
    out = np.empty(n_records, np.int32)
    for at, raw, _ in _blocks(source, header, n_records, [token]):
        out[at : at + len(raw)] = np.ascontiguousarray(raw[:, :4]).view(_TOKEN).reshape(len(raw))
    return out


class Unchanged:
    """Watches that a file is still the one that was opened, and was not written to since.

    The header is looked at too: two writes within one tick of the clock have the same time.
    """

    def __init__(self, path: str, source: ByteSource, head: bytes) -> None:
        self.path = path
        self._source, self._head = source, head
        self._seen = self._look()

    def _look(self) -> tuple[int, ...]:
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return ()
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def check(self) -> None:
        """Raise `ConflictError` unless nothing happened to the file."""
        head = bytearray(len(self._head))
        self._source.read_into(0, head)
        if self._look() != self._seen or head != self._head:
            raise ConflictError("the file changed after it was loaded: its rows are other ones now", path=self.path)


class LazyRows:
    """The rows of one column, read when they are needed. `batch` reads several columns in one pass."""

    def __init__(self, column: Column, batch: Records) -> None:
        self.column = column
        self.batch = batch

    @property
    def stored_as(self) -> tuple[str, int]:
        """The encoding of the rows, and the bytes that they take."""
        return self.column.encoding.name, self.batch.n_records * self.column.size

    def array(self) -> Rows:
        """Read and decode the rows into a new array."""
        out = np.empty((self.batch.n_records, self.column.width), np.float32)
        self.read_into(out)
        out.flags.writeable = False
        return out

    def read_into(self, out: Rows) -> None:
        """Fill `out` with the decoded rows."""
        self.batch.read_many([(self, out)])


class Records:
    """The usable records of one file, as the batch of its `LazyRows`. May be used by several threads at once."""

    def __init__(self, source: ByteSource, header: Header, n_records: int, unchanged: Unchanged | None) -> None:
        self.n_records = n_records
        self.header = header
        self._source, self._unchanged = source, unchanged

    def read_many(self, pairs: Sequence[tuple[Source, Any]], progress: Callable[[int], None] | None = None) -> None:
        """Fill each array in one pass over the records. `ConflictError` when the file changed since it was opened."""
        columns = [(source.column, out) for source, out in pairs if isinstance(source, LazyRows)]
        if self._unchanged is not None:
            self._unchanged.check()
        read_columns(self._source, self.header, self.n_records, columns, progress)
        if self._unchanged is not None:
            self._unchanged.check()

    def raw(self) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
        """Yield (first record, whole records `[n, record_size]`) as they are stored."""
        if self._unchanged is not None:
            self._unchanged.check()
        step = step_of(self.header)
        for at in range(0, self.n_records, step):
            block = np.empty((min(step, self.n_records - at), self.header.record_size), np.uint8)
            self._source.read_into(self.header.offset(at), block)
            yield at, block
        if self._unchanged is not None:
            self._unchanged.check()


# -- packing ------------------------------------------------------------------------------------------------


def step_of(header: Header) -> int:
    """Return how many records make one block when writing."""
    return max(1, _BLOCK // header.record_size)


def pack_records(columns: Columns, rows: Sequence[Rows], tokens: npt.NDArray[np.int32] | None) -> npt.NDArray[np.uint8]:
    """Return the bytes `[n, size]` of neighbouring columns, one array `[n, width]` each, behind the token ids.

    With the tokens and all columns of a record these are whole records.
    """
    first = columns[0].offset if tokens is None else 0
    last = columns[-1].offset + columns[-1].size
    raw = np.empty((len(rows[0]), last - first), np.uint8)
    if tokens is not None:
        raw[:, :4] = np.ascontiguousarray(tokens, _TOKEN).view(np.uint8).reshape(-1, 4)
    for column, values in zip(columns, rows, strict=True):
        codes, numbers = encode(column.encoding, values)
        begin = column.offset - first
        middle = begin + codes.shape[1]
        raw[:, begin:middle] = codes
        if column.encoding.name != "float32":
            raw[:, middle : middle + 4] = np.ascontiguousarray(numbers, "<f4").view(np.uint8).reshape(-1, 4)
    return raw


__all__ += ["HEADER_SIZE", "ByteSource", "Records", "Unchanged", "read_bounds", "step_of"]

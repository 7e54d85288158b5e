"""Binary tables of a `.kvsnap` file: SPAN and STATE tables, parts, live entries, COMMIT. Spec sections 7, 10 and 11."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvsnap.errors import FormatError, InputError
from kvsnap.layout import PositionRun, Run
from kvsnap.records import align64

__all__ = [
    "Commit",
    "Entry",
    "Operation",
    "Part",
    "ReadTable",
    "Table",
    "history_digest",
    "parse_commit",
    "parse_index",
    "parse_table",
]

_TABLE = struct.Struct("<QQQQIIII16s")
_COMMIT = struct.Struct("<QQ16sHHIQQQqQQQQQQQq16s40s")
_INDEX = struct.Struct("<Q56s")
_PART = struct.Struct("<IHHQQQQQQd")
_ENTRY = struct.Struct("<QQQQQQ16s")
ENTRY_SIZE = 64
RUN_KINDS = ("prompt", "generated")
MAX_COUNT = 2**31 - 1
MAX_POSITION = 2**62
MAX_JSON = 64 << 20


class Operation:
    """What a commit did, section 11. Numbers on disk: append-only."""

    APPEND, TRUNCATE, RESET, FORK, SEAL, REWIND = 1, 2, 3, 4, 5, 6


OPERATION_NAMES = {value: name.lower() for name, value in vars(Operation).items() if name.isupper()}


@dataclass(frozen=True, slots=True)
class Part:
    """One stored piece of one tensor. `offset` counts from the start of the payload of its record."""

    tensor: int
    codec: int
    exact: bool
    row_start: int
    n_rows: int
    offset: int
    stored: int
    checksum: int
    decoded: int
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Everything of a SPAN or STATE record but the bytes of its parts."""

    row_start: int = 0
    n_rows: int = 0
    token_start: int = 0
    tokens: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    runs: tuple[Run, ...] = ()
    positions: tuple[PositionRun, ...] = ()
    meta: bytes = b""
    parts: tuple[Part, ...] = ()

    @staticmethod
    def length(n_tokens: int, n_runs: int, n_positions: int, meta: int, n_parts: int) -> int:
        """Length of a table with these counts; the first part starts there."""
        ids = (4 * n_tokens + 7) & ~7
        return align64(_TABLE.size + ids + 16 * (n_runs + n_positions) + meta) + 64 * n_parts

    def pack(self) -> bytes:
        """Return the table as it stands in the file."""
        ids = np.ascontiguousarray(self.tokens, dtype="<i4").tobytes()
        out = bytearray(
            _TABLE.pack(
                self.row_start, self.n_rows, self.token_start, len(self.tokens), len(self.runs), len(self.positions),
                len(self.parts), len(self.meta), bytes(16),
            )
        )  # fmt: skip
        out += ids + bytes(-len(ids) % 8)
        for run in self.runs:
            out += struct.pack("<QQ", RUN_KINDS.index(run.kind), run.count)
        for position in self.positions:
            out += struct.pack("<qQ", position.start, position.count)
        out += self.meta
        out += bytes(-len(out) % 64)
        for p in self.parts:
            out += _PART.pack(
                p.tensor, p.codec, int(p.exact), p.row_start, p.n_rows, p.offset, p.stored, p.checksum, p.decoded,
                p.bound,
            )  # fmt: skip
        return bytes(out)


def _refuse(what: str, path: str | None, offset: int, **facts: Any) -> FormatError:
    return FormatError(what, path=path, offset=offset, **facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTable:
    """A table as it was read. Its parts are looked at when they are asked for: most spans of a session are alike.

    `part_words` is the list of parts as uint64 `[parts, 8]`; `signature` is the same bytes without row numbers and
    checksums, equal for spans that are laid out alike.
    """

    row_start: int
    n_rows: int
    token_start: int
    tokens: npt.NDArray[np.int32]
    runs: tuple[Run, ...]
    positions: tuple[PositionRun, ...]
    meta: bytes
    part_words: npt.NDArray[np.uint64]
    payload_length: int
    length_of_table: int
    path: str | None
    offset: int

    @property
    def signature(self) -> bytes:
        """The parts without row numbers and checksums, and what else decides whether they are placed rightly."""
        words = self.part_words.copy()
        words[:, 1] = 0
        words[:, 5] = 0
        return bytes(words.tobytes()) + struct.pack("<Q", self.payload_length)

    @property
    def part_ranges(self) -> npt.NDArray[np.int64]:
        """Tensor, codec, first row and number of rows of each part, int64 `[4, parts]`, not checked."""
        tensors, codecs = self.part_words[:, 0] & 0xFFFFFFFF, self.part_words[:, 0] >> 32 & 0xFFFF
        return np.stack([tensors, codecs, self.part_words[:, 1], self.part_words[:, 2]]).astype(np.int64)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts, checked. Raise `FormatError` for parts that overlap, leave the record, or contradict it."""
        return _parse_parts(
            self.part_words.tobytes(), self.length_of_table, self.payload_length, self.path, self.offset
        )


def parse_table(raw: bytes, payload_length: int, path: str | None, offset: int) -> ReadTable:
    """Parse and check a table that already fits its checksum. `offset` is that of the payload, for messages.

    Raise `FormatError` for counts that do not fit, nonzero padding or reserved bytes, runs that do not sum up. The
    parts are checked when they are asked for.
    """
    if len(raw) < _TABLE.size:
        raise _refuse("a table is shorter than its head", path, offset, expected=_TABLE.size, found=len(raw))
    row_start, n_rows, token_start, n_tokens, n_runs, n_positions, n_parts, meta, reserved = _TABLE.unpack_from(raw)
    if Table.length(n_tokens, n_runs, n_positions, meta, n_parts) != len(raw):
        raise _refuse("the counts of a table do not add up to its length", path, offset + 32, found=f"{len(raw)} bytes")
    if any(reserved) or max(row_start, n_rows, token_start, n_tokens) > MAX_COUNT:
        raise _refuse("a count of a table is out of range, or a reserved field is set", path, offset)
    at = _TABLE.size
    tokens = np.frombuffer(raw, "<i4", n_tokens, at)
    at = (at + 4 * n_tokens + 7) & ~7
    if n_tokens and int(tokens.min()) < 0:
        raise _refuse("a token id is negative", path, offset + _TABLE.size)
    run_rows = [struct.unpack_from("<QQ", raw, at + 16 * i) for i in range(n_runs)]
    at += 16 * n_runs
    position_rows = [struct.unpack_from("<qQ", raw, at + 16 * i) for i in range(n_positions)]
    at += 16 * n_positions
    if any(kind >= len(RUN_KINDS) or count < 1 for kind, count in run_rows) or sum(c for _, c in run_rows) != n_tokens:
        raise _refuse("token runs do not sum up to the tokens", path, offset, expected=n_tokens)
    if any(not -MAX_POSITION <= start <= MAX_POSITION for start, _ in position_rows):
        raise _refuse("a position is out of range", path, offset, expected="-2^62 to 2^62")
    if any(count < 1 for _, count in position_rows) or sum(c for _, c in position_rows) != n_rows:
        raise _refuse("position runs do not sum up to the rows", path, offset, expected=n_rows)
    parts_at = align64(at + meta)
    padding = raw[_TABLE.size + 4 * n_tokens : (_TABLE.size + 4 * n_tokens + 7) & ~7] + raw[at + meta : parts_at]
    if any(padding):
        raise _refuse("padding of a table is not zero", path, offset)
    return ReadTable(
        row_start=row_start,
        n_rows=n_rows,
        token_start=token_start,
        tokens=tokens,
        runs=tuple(Run(RUN_KINDS[kind], count) for kind, count in run_rows),  # type: ignore[arg-type] # checked above
        positions=tuple(PositionRun(start, count) for start, count in position_rows),
        meta=raw[at : at + meta],
        part_words=np.frombuffer(raw, "<u8", 8 * n_parts, parts_at).reshape(n_parts, 8),
        payload_length=payload_length,
        length_of_table=len(raw),
        path=path,
        offset=offset,
    )


def _parse_parts(rows: bytes, table: int, payload: int, path: str | None, offset: int) -> tuple[Part, ...]:
    parts = []
    expected, at = table, table - len(rows)
    for i, row in enumerate(_PART.iter_unpack(rows)):
        tensor, codec, flags, row_start, n_rows, start, stored, checksum, decoded, bound = row
        if start != expected or start + stored > payload:
            raise _refuse("a part lies at the wrong place", path, offset + at + 64 * i, expected=expected, found=start)
        if flags > 1 or not (bound > 0 if flags == 0 else bound == 0) or max(row_start, n_rows) > MAX_COUNT:
            raise _refuse("a field of a part is out of range", path, offset + at + 64 * i)
        parts.append(Part(tensor, codec, bool(flags), row_start, n_rows, start, stored, checksum, decoded, bound))
        expected = align64(start + stored)
    last = parts[-1].offset + parts[-1].stored if parts else table
    if last != payload:
        raise _refuse("bytes follow the last part of a record", path, offset, expected=expected, found=payload)
    if len({p.tensor for p in parts}) != len(parts):
        raise _refuse("a tensor has two parts in one record", path, offset)
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class Entry:
    """One element of the live list, section 10."""

    span: int
    n_tokens: int
    row_start: int
    n_rows: int
    state: int
    check: int
    digest: bytes


def history_digest(previous: bytes, tokens: npt.NDArray[np.int32], n_rows: int) -> bytes:
    """Digest of the history up to an entry that keeps these ids and so many rows."""
    ids = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    return xxhash.xxh3_128_digest(previous + ids + struct.pack("<Q", n_rows))


def pack_entries(entries: Sequence[Entry]) -> bytes:
    """Return entries as they stand in an INDEX or a COMMIT."""
    return b"".join(_ENTRY.pack(e.span, e.n_tokens, e.row_start, e.n_rows, e.state, e.check, e.digest) for e in entries)


def _parse_entries(raw: bytes, at: int, count: int) -> tuple[Entry, ...]:
    return tuple(Entry(*row) for row in _ENTRY.iter_unpack(raw[at : at + ENTRY_SIZE * count]))


def pack_index(entries: Sequence[Entry]) -> bytes:
    """Return the payload of an INDEX record."""
    return _INDEX.pack(len(entries), bytes(56)) + pack_entries(entries)


def parse_index(raw: bytes, path: str | None, offset: int) -> tuple[Entry, ...]:
    """Parse the payload of an INDEX record."""
    if len(raw) < _INDEX.size:
        raise _refuse("INDEX is shorter than its head", path, offset, expected=_INDEX.size, found=len(raw))
    count, reserved = _INDEX.unpack_from(raw)
    if count * ENTRY_SIZE != len(raw) - _INDEX.size or any(reserved):
        raise _refuse("the count of INDEX does not fit its length", path, offset, found=count)
    return _parse_entries(raw, _INDEX.size, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Section 11. Offsets are those of records; 0 means none."""

    number: int
    previous: int = 0
    previous_digest: bytes = bytes(16)
    operation: int = Operation.APPEND
    complete: bool = True
    sealed: bool = False
    n_tokens: int = 0
    n_rows: int = 0
    n_pending: int = 0
    token_offset: int = 0
    identity: int = 0
    layout: int = 0
    state: int = 0
    note: int = 0
    index: int = 0
    index_kept: int = 0
    base: int = 0
    time_ns: int = 0
    digest: bytes = bytes(16)
    tail: tuple[Entry, ...] = ()

    def pack(self) -> bytes:
        """Return the payload of the COMMIT record."""
        return _COMMIT.pack(
            self.number, self.previous, self.previous_digest, self.operation,
            int(self.complete) | int(self.sealed) << 1, len(self.tail), self.n_tokens, self.n_rows, self.n_pending,
            self.token_offset, self.identity, self.layout, self.state, self.note, self.index, self.index_kept,
            self.base, self.time_ns, self.digest, bytes(40),
        ) + pack_entries(self.tail)  # fmt: skip

    @property
    def operation_name(self) -> str:
        """Word for the operation."""
        return OPERATION_NAMES.get(self.operation, f"operation {self.operation}")


def parse_commit(raw: bytes, path: str | None, offset: int) -> Commit:
    """Parse the payload of a COMMIT that already fits its checksum. Raise `FormatError` for impossible fields."""
    if len(raw) < _COMMIT.size:
        raise _refuse("COMMIT is shorter than its head", path, offset, expected=_COMMIT.size, found=len(raw))
    (
        number, previous, previous_digest, operation, flags, n_tail, n_tokens, n_rows, n_pending, token_offset,
        identity, layout, state, note, index, index_kept, base, time_ns, digest, reserved,
    ) = _COMMIT.unpack_from(raw)  # fmt: skip
    if n_tail * ENTRY_SIZE != len(raw) - _COMMIT.size:
        raise _refuse("the count of tail entries does not fit the length of COMMIT", path, offset + 36, found=n_tail)
    if any(reserved) or flags > 3 or number < 1 or operation not in OPERATION_NAMES:
        raise _refuse("a field of COMMIT has a value that version 1 does not know", path, offset)
    if (
        max(n_tokens, n_rows, n_pending) > MAX_COUNT
        or n_pending > n_tokens
        or n_rows + n_pending < n_tokens
        or (index_kept and not index)
        or not -MAX_POSITION <= token_offset <= MAX_POSITION
    ):
        raise _refuse(
            "the counts of COMMIT contradict each other",
            path,
            offset,
            found=f"{n_tokens} tokens, {n_rows} rows, {n_pending} pending",
        )
    return Commit(
        number=number, previous=previous, previous_digest=previous_digest, operation=operation,
        complete=bool(flags & 1),
        sealed=bool(flags & 2), n_tokens=n_tokens, n_rows=n_rows, n_pending=n_pending, token_offset=token_offset,
        identity=identity, layout=layout, state=state, note=note, index=index, index_kept=index_kept, base=base,
        time_ns=time_ns, digest=digest, tail=_parse_entries(raw, _COMMIT.size, n_tail),
    )  # fmt: skip


def canonical_json(data: Any) -> bytes:
    """Return compact UTF-8 JSON with sorted members.

    Raise `InputError` for what is not JSON: text with half of a surrogate pair, NaN, objects of other types.
    """
    try:
        return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise InputError("this cannot be written as JSON", found=str(error)) from error


def parse_json(raw: bytes, path: str | None, offset: int) -> dict[str, Any]:
    """Parse a JSON payload: one object, UTF-8, no NaN or Infinity, no member twice."""

    def constant(word: str) -> Any:
        raise ValueError(f"{word} is not allowed")

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a member stands twice in one object")
        return found

    try:
        data = json.loads(raw.decode(), parse_constant=constant, object_pairs_hook=members)
        if b"\\ud" in raw or b"\\uD" in raw:
            json.dumps(data, ensure_ascii=False).encode()  # half of a surrogate pair is not text: it cannot be encoded
    except (ValueError, RecursionError) as error:
        raise _refuse(
            "a JSON payload cannot be parsed", path, offset, found=str(error) or type(error).__name__
        ) from error
    if not isinstance(data, dict):
        raise _refuse("a JSON payload is not an object", path, offset, found=type(data).__name__)
    return data

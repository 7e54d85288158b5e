"""The parts of many spans as columns: what equal spans share is kept, and checked against LAYOUT, once.

A session of 10,000 turns has 600,000 parts; an object for each would make opening it slow. Spans with one *signature*
differ only in row numbers and checksums, so those are kept as arrays, and the parts themselves are made when they are
needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvsnap.errors import FormatError
from kvsnap.formats.native.sources import Bytes, PartSource, Sizes, Slice
from kvsnap.formats.native.tables import Entry, Part, ReadTable
from kvsnap.tensors import Source, TensorSpec, numpy_dtype

__all__ = ["Columns", "JoinedSource"]

_SMALL = 256 * 1024
_SCRATCH = 4 << 20
Array = npt.NDArray[Any]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Kind:
    """What spans of one signature share: their parts, and where each tensor stands among them."""

    parts: tuple[Part, ...]
    places: dict[int, int]


@dataclass(slots=True)
class _Column:
    """The parts of one tensor, in the order of the spans."""

    spans: Counts
    starts: Counts
    kept: Counts
    stored: Counts
    whole: bool
    bound: float


class Columns:
    """The parts of all spans of one live list. Filled with `add`, then asked for tensors with `column` and `slice`."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._files: list[tuple[Bytes, bool]] = []  # of each span, and whether it may be mapped
        self._kinds: list[_Kind] = []
        self._kind_of: list[int] = []
        self._known: dict[tuple[bytes, int], int] = {}
        self._payloads: list[int] = []
        self._starts: list[npt.NDArray[np.uint64]] = []
        self._checks: list[npt.NDArray[np.uint64]] = []
        self._ranges: list[tuple[int, int, int]] = []  # rows of the table: first, behind the last, behind the last kept

    def __len__(self) -> int:
        return len(self._payloads)

    def add(self, entry: Entry, table: ReadTable, payload: int, file: Bytes, *, mapped: bool) -> None:
        """Take in one span. The first one of each signature is checked against LAYOUT; raise as `PartSource` does."""
        key = (table.signature, table.length_of_table)
        place = self._known.get(key)
        if place is None:
            parts = table.parts
            for part in parts:
                PartSource(file, self._sizes, part, payload, mapped=False)
            place = self._known[key] = len(self._kinds)
            self._kinds.append(_Kind(parts, {part.tensor: i for i, part in enumerate(parts)}))
        self._kind_of.append(place)
        self._files.append((file, mapped))
        self._payloads.append(payload)
        self._starts.append(table.part_words[:, 1])
        self._checks.append(table.part_words[:, 5])
        end = table.row_start + table.n_rows
        self._ranges.append((table.row_start, end, entry.row_start + entry.n_rows))

    @property
    def tensors(self) -> list[int]:
        """Ids of the tensors that have parts, in the order of their first one."""
        return list(dict.fromkeys(number for kind in self._kinds for number in kind.places))

    def slice(self, span: int, tensor: int) -> Slice:
        """Return the live rows of a tensor in one span."""
        kind = self._kinds[self._kind_of[span]]
        place = kind.places[tensor]
        part = replace(
            kind.parts[place], row_start=int(self._starts[span][place]), checksum=int(self._checks[span][place])
        )
        file, mapped = self._files[span]
        source = PartSource(file, self._sizes, part, self._payloads[span], mapped=mapped)
        if not source.spec.grows:
            return Slice(source, part.n_rows)
        kept = self._ranges[span][2] // source.spec.tokens_per_row - part.row_start
        return Slice(source, min(part.n_rows, max(0, kept)))

    def last(self, tensor: int) -> Slice:
        """Return a tensor that does not grow: its latest part."""
        places = range(len(self) - 1, -1, -1)
        return self.slice(next(i for i in places if tensor in self._kinds[self._kind_of[i]].places), tensor)

    def column(self, spec: TensorSpec) -> _Column:
        """Return the parts of a tensor that grows, checked: inside their spans, without a gap (but in a window).

        Raise `FormatError`.
        """
        number, per_row = spec.id, spec.tokens_per_row
        has = np.array([number in kind.places for kind in self._kinds])
        kinds = np.array(self._kind_of)
        spans = np.flatnonzero(has[kinds])
        places = [kind.places.get(number, 0) for kind in self._kinds]
        starts = np.array([self._starts[i][places[k]] for i, k in zip(spans, kinds[spans], strict=True)], np.uint64)
        parts = [kind.parts[place] if kind.parts else None for kind, place in zip(self._kinds, places, strict=True)]
        rows = np.array([part.n_rows if part else 0 for part in parts], np.int64)[kinds[spans]]
        stored = np.array([part.stored if part else 0 for part in parts], np.int64)[kinds[spans]]
        first, last, live = (np.array(self._ranges, np.int64)[spans] // per_row).T
        begin = np.minimum(starts, np.uint64(2**62)).astype(np.int64)
        outside = np.flatnonzero((begin < first) | (begin + rows > last))
        if len(outside):
            bad = int(outside[0])
            source = self.slice(int(spans[bad]), number).source
            raise FormatError(
                f"{source.what} lie outside the rows of their span", path=source.file.path, offset=source.offset,
                expected=f"within [{first[bad]}, {last[bad]})",
            )  # fmt: skip
        kept = np.clip(live - begin, 0, rows)
        gaps = np.flatnonzero(begin[1:] != begin[:-1] + kept[:-1]) + 1
        if len(gaps) and spec.growth != "window":
            source = self.slice(int(spans[gaps[0]]), number).source
            expected = int(begin[gaps[0] - 1] + kept[gaps[0] - 1])
            raise FormatError(
                f"{spec.name}: rows are missing between two spans", path=source.file.path, offset=source.offset,
                expected=expected, found=int(begin[gaps[0]]),
            )  # fmt: skip
        # Rows that had left a window before they were saved: what lies before them is of no use any more.
        since = int(gaps[-1]) if len(gaps) else 0
        used = {int(k) for k in np.unique(kinds[spans[since:]][kept[since:] > 0])}
        bound = max((part.bound for k, part in enumerate(parts) if part is not None and k in used), default=0.0)
        whole = bool((kept[since:] == rows[since:]).all())
        return _Column(spans[since:], begin[since:], kept[since:], stored[since:], whole, bound)

    def read_many(self, pairs: Sequence[tuple[Source, Array]], progress: Callable[[int], None] | None = None) -> None:
        """Fill each array from its source: one read per span, one copy per tensor and group of like spans.

        The sources are `JoinedSource`s of these columns. Every byte is checked.
        """
        joined = [(source, out) for source, out in pairs if isinstance(source, JoinedSource)]
        together = [(s, out) for s, out in joined if len(s.column.spans) == len(self) and s.is_small]
        _Groups(self, [_Target(out, source.spec) for source, out in together]).read(progress)
        alone = {id(out) for _, out in together}
        for source, out in joined:
            if id(out) not in alone:
                source.read_into(out)
                if progress is not None:
                    progress(out.nbytes)


class JoinedSource:
    """The rows of one tensor that grows, from the spans of a session, one behind the other."""

    __slots__ = ("batch", "column", "spec")

    def __init__(self, spec: TensorSpec, columns: Columns, column: _Column) -> None:
        self.spec, self.batch, self.column = spec, columns, column

    @property
    def n_rows(self) -> int:
        """Rows in all."""
        return int(self.column.kept.sum())

    @property
    def is_small(self) -> bool:
        """True when reading span by span costs more than the bytes."""
        return int(self.column.stored.sum()) <= _SMALL * len(self.column.spans)

    def since(self, row: int) -> tuple[JoinedSource, int, int]:
        """Return the spans from the one that holds `row` on, the first row of those, and how many they hold."""
        return self.between(row, 1 << 62)

    def between(self, start: int, stop: int) -> tuple[JoinedSource, int, int]:
        """Return the spans that hold rows of `[start, stop)`, the first row of those, and how many they hold."""
        c = self.column
        ends = c.starts + c.kept
        first = min(int(np.searchsorted(ends, start, side="right")), len(ends) - 1)
        last = max(first + 1, int(np.searchsorted(c.starts, stop, side="left")))
        here = slice(first, last)
        column = _Column(c.spans[here], c.starts[here], c.kept[here], c.stored[here], c.whole, c.bound)
        return JoinedSource(self.spec, self.batch, column), int(column.starts[0]), int(column.kept.sum())

    def array(self) -> Array:
        """Return the values in memory of their own, read-only."""
        out = np.empty(self.spec.shape_with(self.n_rows), dtype=numpy_dtype(self.spec.dtype))
        self.read_into(out)
        out.flags.writeable = False
        return out

    def read_into(self, out: Array) -> None:
        """Fill `out`, part by part, each checked."""
        at = 0
        for span in self.column.spans:
            piece = self.batch.slice(int(span), self.spec.id)
            piece.read_into(out, at)
            at += piece.n_rows


class _Groups:
    """One pass over all spans that fills several targets."""

    def __init__(self, columns: Columns, targets: list[_Target]) -> None:
        self._columns = columns
        self._targets = targets

    def read(self, progress: Callable[[int], None] | None) -> None:
        """Read all spans, like ones in groups."""
        columns, targets, place = self._columns, self._targets, 0
        scratch = np.empty(
            _SCRATCH if targets else 0, dtype=np.uint8
        )  # one for all: fresh memory is paged in each time
        while targets and place < len(columns):
            kind = columns._kinds[columns._kind_of[place]]
            parts = [kind.parts[kind.places[target.spec.id]] for target in targets]
            low = min(part.offset for part in parts)
            length = max(part.offset + part.stored for part in parts) - low
            stop = place + 1
            if length and length <= _SCRATCH and self._is_plain(place, parts):
                most = min(len(columns), place + _SCRATCH // length)
                while stop < most and columns._kind_of[stop] == columns._kind_of[place] and self._is_whole(stop):
                    stop += 1
                self._read_group(place, scratch[: length * (stop - place)].reshape(-1, length), parts, low)
            else:
                for target in targets:
                    target.put_one(columns.slice(place, target.spec.id))
            if progress is not None:
                progress(sum(part.decoded for part in parts) * (stop - place))
            place = stop

    def _is_whole(self, span: int) -> bool:
        _, end, kept = self._columns._ranges[span]
        return kept == end

    def _is_plain(self, span: int, parts: Sequence[Part]) -> bool:
        return self._is_whole(span) and all(part.codec == 1 for part in parts)

    def _read_group(self, first: int, scratch: npt.NDArray[np.uint8], parts: Sequence[Part], low: int) -> None:
        columns = self._columns
        kind = columns._kinds[columns._kind_of[first]]
        bounds = [(part.offset - low, part.offset - low + part.stored) for part in parts]
        places = [kind.places[part.tensor] for part in parts]
        for span, row in enumerate(scratch, first):
            view = row.data
            columns._files[span][0].read_into(columns._payloads[span] + low, view)
            checks = columns._checks[span][places].tolist()
            for (begin, end), check, part in zip(bounds, checks, parts, strict=True):
                if xxhash.xxh3_64_intdigest(view[begin:end]) != check:
                    raise columns.slice(span, part.tensor).source.damage()
        for (begin, end), part, target in zip(bounds, parts, self._targets, strict=True):
            target.put(scratch[:, begin:end], part.n_rows)


class _Target:
    """Where the rows of one tensor go, with everything that is the same for each group computed once."""

    __slots__ = ("_after", "_all", "_axis", "_before", "_out", "_turn", "at", "spec")

    def __init__(self, out: Array, spec: TensorSpec) -> None:
        axis = self._axis = spec.row_axis
        self.spec, self._out, self.at = spec, out, 0
        self._all = (slice(None),) * axis
        self._before, self._after = out.shape[:axis], out.shape[axis + 1 :]
        # [group, ..., row, ...] to [..., group, row, ...]
        self._turn = (*range(1, axis + 1), 0, *range(axis + 1, out.ndim + 1))

    def put_one(self, piece: Slice) -> None:
        """Fill the next rows from one part."""
        piece.read_into(self._out, self.at)
        self.at += piece.n_rows

    def put(self, values: Array, n_rows: int) -> None:
        """Fill the next rows from equal parts `[group, bytes]`, checked before."""
        groups = len(values)
        stop = self.at + groups * n_rows
        place = (*self._all, slice(self.at, stop))
        # Splitting one axis is a view; the bytes are looked at in the dtype of the target.
        split = self._out[place].reshape((*self._before, groups, n_rows, *self._after))
        part = values.view(self._out.dtype).reshape((groups, *self._before, n_rows, *self._after))
        split[...] = part.transpose(self._turn)
        self.at = stop

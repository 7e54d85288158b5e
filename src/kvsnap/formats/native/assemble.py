"""Putting the spans of a live list together as one snapshot, whose tensors are read when they are used."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvsnap.errors import FormatError
from kvsnap.formats.native.columns import Columns, JoinedSource
from kvsnap.formats.native.cut import Cut
from kvsnap.formats.native.read import NativeFile, Span
from kvsnap.formats.native.said import Said, parse_said, unpack_messages
from kvsnap.formats.native.sources import Sizes
from kvsnap.layout import (
    PositionRun,
    Run,
    SamplerState,
    Snapshot,
    Tensor,
    cut_positions,
    cut_runs,
    join_positions,
    join_runs,
)
from kvsnap.records import Kind
from kvsnap.tensors import OF_NO_LAYER, Source, TensorSpec, numpy_dtype

__all__ = ["bound_of", "snapshot_of"]


def snapshot_of(file: NativeFile, cut: Cut | None = None) -> Snapshot:
    """Return everything, or what a cut keeps, as a snapshot. Tensor bytes are read, and checked, when they are used."""
    counts = file.commit if cut is None else cut
    columns = Columns(Sizes(file.geometry.tensors, replaced=False))
    ids: list[npt.NDArray[np.int32]] = []
    said = Said()
    runs: tuple[Run, ...] = ()
    positions: tuple[PositionRun, ...] = ()
    for span in file.spans(None if cut is None else cut.live):
        entry, table = span.entry, span.table
        ids.append(table.tokens[: entry.n_tokens])
        piece = parse_said(table.meta, span.file.path, span.payload)
        said = said.add(piece if entry.n_tokens == len(table.tokens) else piece.cut())
        runs = join_runs(runs, cut_runs(table.runs, entry.n_tokens))
        positions = join_positions(positions, cut_positions(table.positions, entry.n_rows))
        columns.add(entry, table, span.payload, span.file.content, mapped=span.file.mapped)
    specs = {spec.id: spec for spec in file.geometry.tensors}
    tensors = {number: _tensor(file, specs[number], columns, counts.n_rows) for number in columns.tensors}
    replaced, sampler = file.state() if cut is None else _state_after(file, cut)
    absent = [spec for spec in file.geometry.tensors if spec.grows and spec.id not in tensors]
    tensors |= {spec.id: _empty(file, spec, counts.n_rows) for spec in absent}
    loose = {t.role: t for t in replaced.values() if t.role in OF_NO_LAYER}
    every = np.concatenate(ids) if ids else np.zeros(0, np.int32)
    return Snapshot(
        architecture=file.geometry.architecture,
        layers=file.geometry.build(tensors | replaced),
        tokens=tuple(every.tolist()),
        runs=runs,
        n_rows=counts.n_rows,
        n_pending=counts.n_pending,
        token_offset=counts.token_offset,
        positions=positions,
        logits=loose.get("logits"),
        draft=loose.get("draft"),
        sampler=sampler,
        identity=file.identity,
        text=said.text if len(columns) else None,
        messages=unpack_messages(said.messages) if said.known else None,
        metadata=file.metadata,
        source={
            "format": "native",
            "path": file.path,
            "commit": file.commit.number,
            "complete": file.commit.complete or cut is not None,
        },
        shard=file.shard(),
    )


def _state_after(file: NativeFile, cut: Cut) -> tuple[dict[int, Tensor], SamplerState | None]:
    return file.state_at(cut.live[-1][0], cut.state, cut.n_rows) if cut.state else ({}, None)


def bound_of(file: NativeFile, spans: Iterable[Span]) -> float:
    """Return the largest error that storing may have put into a value of these spans of a file, from their tables.

    They are its live list, which may be cut. 0: everything is what the engine held. Raise as `snapshot_of`.
    """
    columns, last = Columns(Sizes(file.geometry.tensors, replaced=False)), None
    for span in spans:
        columns.add(span.entry, span.table, span.payload, span.file.content, mapped=False)
        last = span
    specs = {spec.id: spec for spec in file.geometry.tensors}
    bounds = [
        columns.column(specs[n]).bound if specs[n].grows else columns.last(n).source.part.bound for n in columns.tensors
    ]
    if last is not None and last.entry.state:
        table, _, _ = last.file.table_at(last.entry.state, Kind.STATE)
        bounds += [part.bound for part in table.parts]
    return max(bounds, default=0.0)


def _empty(file: NativeFile, spec: TensorSpec, n_rows: int) -> Tensor:
    expected = n_rows // spec.tokens_per_row
    if spec.growth == "grow" and expected:
        raise FormatError(
            f"{spec.name}: rows are missing", path=file.path, offset=file.end.footer.commit_offset,
            expected=f"0 to {expected}", found="no part",
        )  # fmt: skip
    return _nothing(spec, expected)


def _nothing(spec: TensorSpec, start: int) -> Tensor:
    return Tensor(spec, np.zeros(spec.shape, dtype=numpy_dtype(spec.dtype)), start=start)


def _tensor(file: NativeFile, spec: TensorSpec, columns: Columns, n_rows: int) -> Tensor:
    if not spec.grows:
        last = columns.last(spec.id).source
        return Tensor(spec, last, n_rows=last.part.n_rows, bound=last.part.bound)
    column = columns.column(spec)
    start = int(column.starts[0])
    stop = start + int(column.kept.sum())
    expected = n_rows // spec.tokens_per_row
    if spec.growth == "grow" and (start, stop) != (0, expected):
        raise FormatError(
            f"{spec.name}: rows are missing", path=file.path,
            offset=columns.slice(int(column.spans[0]), spec.id).source.offset,
            expected=f"0 to {expected}", found=f"{start} to {stop}",
        )  # fmt: skip
    if stop != expected:  # a window of which nothing is held behind a gap at the end
        return _nothing(spec, expected)
    source: Source = JoinedSource(spec, columns, column)
    if len(column.spans) == 1 and column.whole:
        source = columns.slice(int(column.spans[0]), spec.id).source
    return Tensor(spec, source, start=start, n_rows=stop - start, bound=column.bound)

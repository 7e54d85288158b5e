"""How far back a live cache can be cut, and the cut itself."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

from kvsnap.engines._tf_capture import live_dtype
from kvsnap.engines._tf_layers import cut, layer_at, tensors_of
from kvsnap.engines._tf_model import Model
from kvsnap.engines._tf_state import Line, straightened
from kvsnap.errors import InputError
from kvsnap.layout import cut_positions, cut_runs
from kvsnap.reach import Ends, Stop
from kvsnap.tensors import TensorSpec

__all__ = ["Cut", "check_length", "cut_line", "ends_of"]


class Cut:
    """A cut of a cache that was decided on: it goes on where it was interrupted."""

    def __init__(self, cache: Any, n_rows: int) -> None:
        self._cache, self._n_rows = cache, n_rows

    def put_back(self) -> None:
        """Make the cut; may be called again."""
        cut(self._cache, self._n_rows)


def check_length(n_tokens: Any, line: Line) -> int:
    """Return a length that a sequence may be cut to; raise `InputError` for what is not one."""
    expected = f"0 to {len(line.tokens)}"
    try:
        length = operator.index(n_tokens)
    except TypeError as error:
        raise InputError("cannot rewind to this length", expected=expected, found=n_tokens) from error
    if not 0 <= length <= len(line.tokens):
        raise InputError("cannot rewind to this length", expected=expected, found=length)
    return length


def ends_of(model: Model, cache: Any, line: Line) -> Ends:
    """Return the lengths that a sequence, the only one in `cache`, can be cut to."""
    specs: list[TensorSpec] = []
    held: dict[int, int] = {}
    if line.n_rows and all(geometry.is_known for geometry in model.geometry):
        for index, geometry in enumerate(model.geometry):
            made = geometry.specs(index, len(specs), live_dtype(cache) or "float32")
            live = tensors_of(layer_at(cache, index), index, geometry)
            for spec, (_, tensor) in zip(made, live, strict=False):
                held[spec.id] = line.n_rows // spec.tokens_per_row
                if spec.growth == "window":
                    held[spec.id] = int(tensor.shape[1 + spec.row_axis])
            specs += made

    def rows(_: int, spec: TensorSpec) -> tuple[int, int]:
        stop = line.n_rows // spec.tokens_per_row
        return stop - held.get(spec.id, 0), stop

    stop = Stop(len(line.tokens), line.n_rows, state=True)
    return Ends(specs, (stop,), rows, unstored=line.taken - len(line.tokens), rows_alone=True)


def cut_line(line: Line, n_tokens: int, ends: Ends) -> Line:
    """Return the first `n_tokens` ids of a sequence, which can be reached; logits stay where no row goes."""
    n_rows = ends.rows_at(n_tokens)
    n_pending = n_tokens + ends.unstored - n_rows
    if n_rows == line.n_rows:
        return replace(
            line, tokens=line.tokens[:n_tokens], runs=cut_runs(line.runs, n_tokens), n_pending=n_pending,
            again=line.again and n_pending > 0,
        )  # fmt: skip
    first, stop = line.together
    return Line(
        line.tokens[:n_tokens], cut_runs(line.runs, n_tokens), n_rows, n_pending,
        positions=straightened(cut_positions(line.positions, n_rows)), inexact_rows=min(line.inexact_rows, n_rows),
        bound=line.bound, labels=line.labels, together=(first, min(stop, n_rows)) if first < n_rows else (0, 0),
    )  # fmt: skip

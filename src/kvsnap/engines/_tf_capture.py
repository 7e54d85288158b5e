"""From the cache of a transformers model to the layers of a snapshot: copies, in memory of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.engines._tf_layers import copy_rows, dtype_of, kind_of, layer_at, layers_of, tensors_of
from kvsnap.engines._tf_model import Model
from kvsnap.engines._tf_padding import check_state
from kvsnap.engines._tf_parts import Part
from kvsnap.engines._tf_state import Line
from kvsnap.errors import InputError, UnsupportedError
from kvsnap.tensors import Layer, Tensor, TensorSpec, dtype_name, numpy_dtype

__all__ = ["check_unpadded", "live_dtype", "logits_tensor", "read_layers", "refuse_gap", "sizes_of"]


def read_layers(model: Model, cache: Any, line: Line, row: int, start: int, dtype: str) -> tuple[Layer, ...]:
    """Copy the rows of one sequence from its row `start` on out of every layer; `row` is its place in the batch.

    States are copied whole. Before the first pass a layer whose sizes only that tells makes the answer ().
    Raise `UnsupportedError` where padding is in the way of an exact copy.
    """
    if not all(geometry.is_known for geometry in model.geometry):
        return ()
    refuse_gap(line)
    layers: list[Layer] = []
    for index, geometry in enumerate(model.geometry):
        layer = layer_at(cache, index)
        specs = geometry.specs(index, sum(len(made.tensors) for made in layers), dtype)
        live, total = tensors_of(layer, index, geometry), kind_of(layer, index).rows(layer) or 0
        # A layer that holds nothing yet has no tensors to copy, and its geometry is known all the same.
        copies = [
            _copy(model, tensor, row, part, line, start, total, f"layer {index}: {part.role}")
            for part, (_, tensor) in zip(geometry.parts, live, strict=False)
        ] or [(0 if spec.grows else None, _no_rows(spec)) for spec in specs]
        tensors = tuple(
            Tensor(spec, array, start=first or 0, bound=_bound(line, spec, first or 0))
            for spec, (first, array) in zip(specs, copies, strict=True)
        )
        layers.append(
            Layer(
                index=index, kind=geometry.kind, tensors=tensors, num_query_heads=geometry.query_heads,
                shares=geometry.shares, quantisation=geometry.quantisation,
            )
        )  # fmt: skip
    return tuple(layers)


class _SizesOnly:
    """In the place of values that nobody has copied."""

    def array(self) -> npt.NDArray[Any]:
        raise InputError("only the sizes of this tensor are known: capture the engine to read its values")

    def read_into(self, out: npt.NDArray[Any]) -> None:  # noqa: ARG002 # the signature of a source
        self.array()


def sizes_of(model: Model, cache: Any, dtype: str) -> tuple[Layer, ...]:
    """Return every layer with the sizes of its tensors as they are in the cache; () where only a pass tells them."""
    if not all(geometry.is_known for geometry in model.geometry):
        return ()
    layers: list[Layer] = []
    for index, geometry in enumerate(model.geometry):
        layer = layer_at(cache, index)
        specs = geometry.specs(index, sum(len(made.tensors) for made in layers), dtype)
        shapes = [tuple(tensor.shape[1:]) for _, tensor in tensors_of(layer, index, geometry)]
        held = shapes or [spec.shape_with(0) for spec in specs]
        total = kind_of(layer, index).rows(layer) or 0
        tensors = []
        for spec, shape in zip(specs, held, strict=True):
            n_rows = int(shape[spec.row_axis]) if spec.row_axis >= 0 else 1
            start = max(0, total - n_rows) if spec.growth == "window" else 0
            tensors.append(Tensor(spec, _SizesOnly(), start=start, n_rows=n_rows))
        layers.append(
            Layer(
                index=index, kind=geometry.kind, tensors=tuple(tensors), num_query_heads=geometry.query_heads,
                shares=geometry.shares, quantisation=geometry.quantisation,
            )
        )  # fmt: skip
    return tuple(layers)


def _bound(line: Line, spec: TensorSpec, first: int) -> float:
    """Return how far values of a tensor may be off that holds rows of a snapshot that was not exact."""
    return line.bound if spec.grows and first * spec.tokens_per_row < line.inexact_rows else 0.0


def _copy(
    model: Model, tensor: Any, row: int, part: Part, line: Line, start: int, total: int, what: str
) -> tuple[int | None, npt.NDArray[Any]]:
    """Return the first row and the rows of a part of one sequence, or None and a state.

    `total` counts the columns that the layer has seen, those that left a window included.
    """
    if part.growth == "static":
        return 0, copy_rows(tensor, row, slice(None), -1)
    columns = range(line.n_rows) if line.select is None else line.select
    check_unpadded(part, columns, total, what)
    if part.growth == "replaced" and part.row_axis >= 0 and tensor.shape[1 + part.row_axis] and len(columns) != total:
        raise UnsupportedError(
            f"{what} has padding in it, which cannot be taken out again", expected=len(columns), found=total
        )
    if part.row_axis < 0 or part.growth == "replaced":
        if part.row_axis < 0 or tensor.shape[1 + part.row_axis]:
            check_state(model, line, part, what, int(tensor.shape[0]))
        return None, copy_rows(tensor, row, slice(None), -1)
    if part.tokens_per_row != 1:
        check_state(model, line, part, what, int(tensor.shape[0]))
        first = start // part.tokens_per_row
        return first, copy_rows(tensor, row, slice(first, None), part.row_axis)
    # The columns that the tensor holds are the last ones of those that the whole batch has taken.
    held = int(tensor.shape[1 + part.row_axis])
    hidden = max(total - held, 0)
    kept = [place for place, column in enumerate(columns) if column >= hidden]
    needed = part.needed(len(columns))
    if len(kept) < needed:
        raise UnsupportedError(
            f"{what} holds fewer rows of this sequence than it needs: padding took their place in the window",
            expected=needed, found=len(kept),
        )  # fmt: skip
    first = max(start, len(columns) - len(kept))
    wanted = [columns[place] - hidden for place in range(first, len(columns))]
    straight = not wanted or wanted[-1] - wanted[0] + 1 == len(wanted)
    picked = slice(wanted[0], wanted[-1] + 1) if wanted and straight else wanted
    return first, copy_rows(tensor, row, picked if wanted else slice(0, 0), part.row_axis)


def check_unpadded(part: Part, columns: Sequence[int], total: int, what: str) -> None:
    """Refuse padding in a part that takes positions together in groups; `columns` are those of one sequence.

    Padding before its first token, or between two, has moved the groups; behind its last token it is in the last rows.
    """
    if not part.group:
        return
    behind = part.growth == "replaced" or part.tokens_per_row != 1
    if any(place != column for place, column in enumerate(columns)) or (behind and len(columns) != total):
        raise UnsupportedError(
            f"{what} takes {part.group} positions together, and there is padding among them: it cannot be taken out",
            expected=f"{total} positions without padding", found=len(columns),
        )  # fmt: skip


def refuse_gap(line: Line) -> None:
    """Refuse a sequence with rows behind padding: `generate` counts their positions as if nothing were before it."""
    if line.gap is not None:
        raise UnsupportedError(
            f"the sequence goes on at column {line.gap} behind padding, at positions that are not known",
            expected="position_ids, or padding on the left", found="padding between ids",
        )  # fmt: skip


def live_dtype(cache: Any) -> str:
    """Return the name of the dtype of the rows in a cache, or "" while it holds none."""
    for index, layer in enumerate(layers_of(cache)):
        live = kind_of(layer, index).read(layer)
        if live and live[0][0] in ("k", "conv", "residual"):
            return dtype_of(live[0][1].dtype, "the cache")
    return ""


def logits_tensor(logits: npt.NDArray[Any], layers: Sequence[Layer]) -> Tensor:
    """Return a copy of logits `[vocab]` as the tensor behind those of the layers."""
    spec = TensorSpec(
        id=sum(len(layer.tensors) for layer in layers), name="logits", layer=-1, role="logits",
        dtype=dtype_name(logits.dtype), axes=("vocab",), shape=logits.shape, growth="replaced", rope="none",
    )  # fmt: skip
    return Tensor(spec, logits.copy())


def _no_rows(spec: TensorSpec) -> npt.NDArray[Any]:
    return np.zeros(spec.shape_with(0), dtype=numpy_dtype(spec.dtype))

"""From the cache of a transformers model to the layers of a snapshot: copies, in memory of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.engines._tf_layers import copy_rows, dtype_of, kind_of, layer_at, tensors_of
from kvsnap.engines._tf_model import Model
from kvsnap.engines._tf_state import Line
from kvsnap.tensors import Layer, Tensor, TensorSpec, dtype_name, numpy_dtype

__all__ = ["live_dtype", "logits_tensor", "read_layers"]


def read_layers(model: Model, cache: Any, line: Line, row: int, start: int, dtype: str) -> tuple[Layer, ...]:
    """Copy the rows of one sequence from its row `start` on out of every layer; `row` is its place in the batch."""
    rows = slice(start, line.n_rows) if line.select is None else line.select[start:]
    layers: list[Layer] = []
    for index, geometry in enumerate(model.geometry):
        layer = layer_at(cache, index)
        specs = geometry.specs(index, sum(len(made.tensors) for made in layers), dtype)
        live = tensors_of(layer, index, geometry)
        # A layer that holds nothing yet has no tensors to copy, and its geometry is known all the same.
        arrays = [copy_rows(t, row, rows) for t in live] or [_no_rows(spec) for spec in specs]
        tensors = tuple(Tensor(spec, array, start=start) for spec, array in zip(specs, arrays, strict=True))
        layers.append(Layer(index=index, kind=geometry.kind, tensors=tensors, num_query_heads=geometry.query_heads))
    return tuple(layers)


def live_dtype(cache: Any) -> str:
    """Return the name of the dtype of the rows in a cache, or "" while it holds none."""
    found = kind_of(cache.layers[0], 0).read(cache.layers[0]) if cache.layers else ()
    return dtype_of(found[0].dtype, "the cache") if found else ""


def logits_tensor(logits: npt.NDArray[Any], layers: Sequence[Layer]) -> Tensor:
    """Return a copy of logits `[vocab]` as the tensor behind those of the layers."""
    spec = TensorSpec(
        id=sum(len(layer.tensors) for layer in layers), name="logits", layer=-1, role="logits",
        dtype=dtype_name(logits.dtype), axes=("vocab",), shape=logits.shape, growth="replaced", rope="none",
    )  # fmt: skip
    return Tensor(spec, logits.copy())


def _no_rows(spec: TensorSpec) -> npt.NDArray[Any]:
    return np.empty(spec.shape_with(0), dtype=numpy_dtype(spec.dtype))

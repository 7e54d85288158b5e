"""The layers of a transformers cache: which classes are known, what each holds, how it is copied out and built again.

`KINDS` is the table. A class that is not in it is refused by name: a subclass may keep more than its parent, and a copy
that leaves something out is worse than none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.errors import UnsupportedError
from kvsnap.tensors import Pairing, RopeState, TensorSpec, numpy_dtype

__all__ = [
    "KINDS",
    "Geometry",
    "LayerKind",
    "copy_rows",
    "cut",
    "dtype_of",
    "kind_of",
    "layer_at",
    "numpy_view",
    "rows_of",
]

_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Geometry:
    """What one layer of a model stores: key/value heads, width of a row, query heads, and what was done to its keys."""

    heads: int
    width: int
    query_heads: int
    rope: RopeState
    pairing: Pairing


@dataclass(frozen=True, slots=True)
class LayerKind:
    """How one class of cache layer is handled. Tensors are `[batch, ...]`, in the order of the specs.

    `specs(layer number, first id, geometry, dtype name)`; `read(layer)` returns the live tensors, or () while it holds
    nothing; `write(layer, tensors)` makes them the content of an empty layer without a copy; `rows(layer)` counts;
    `cut(layer, rows)` drops the rows behind, allocates nothing, and may be called twice.
    """

    kind: str
    specs: Callable[[int, int, Geometry, str], tuple[TensorSpec, ...]]
    read: Callable[[Any], tuple[Any, ...]]
    write: Callable[[Any, Sequence[Any]], None]
    rows: Callable[[Any], int]
    cut: Callable[[Any, int], None]


def kind_of(layer: Any, index: int) -> LayerKind:
    """Return how a cache layer is handled; raise `UnsupportedError` naming the class where it is not known."""
    cls = type(layer)
    if cls.__module__ == "transformers.cache_utils" and cls.__name__ in KINDS:
        return KINDS[cls.__name__]
    raise UnsupportedError(
        f"layer {index} is a {cls.__name__}, which is not supported yet",
        expected=" or ".join(KINDS), found=cls.__name__,
    )  # fmt: skip


def layer_at(cache: Any, index: int) -> Any:
    """Return one layer of a cache; a cache that makes its layers as they come makes those up to `index`."""
    while len(cache.layers) <= index:
        cache.layers.append(cache.layer_class_to_replicate())
    return cache.layers[index]


def rows_of(cache: Any) -> list[int]:
    """Return the number of rows in each layer of a cache."""
    return [kind_of(layer, index).rows(layer) for index, layer in enumerate(cache.layers)]


def cut(cache: Any, n_rows: int) -> None:
    """Drop the rows behind `n_rows` in every layer. Views only: it must work when memory is full."""
    for index, layer in enumerate(cache.layers):
        kind_of(layer, index).cut(layer, n_rows)


def dtype_of(dtype: Any, what: str) -> str:
    """Return our name of a torch dtype; raise `UnsupportedError` for one that caches are not kept in."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise UnsupportedError(f"{what} is kept as {name}", expected=" or ".join(_DTYPES), found=name)
    return name


def numpy_view(tensor: Any) -> npt.NDArray[Any]:
    """Return a numpy array over the memory of a torch tensor on the CPU. numpy has no bfloat16, hence the detour."""
    import torch

    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.view(torch.int16).numpy().view(numpy_dtype("bfloat16")))
    return np.asarray(tensor.numpy())


def copy_rows(tensor: Any, row: int, rows: Sequence[int] | slice) -> npt.NDArray[Any]:
    """Copy some rows of one sequence of `[batch, heads, rows, width]` into memory of its own `[heads, rows, width]`."""
    import torch

    picked = rows if isinstance(rows, slice) else torch.as_tensor(rows, dtype=torch.long, device=tensor.device)
    found = tensor.detach()[row][:, picked]
    own = torch.empty(found.shape, dtype=found.dtype, device="cpu")
    own.copy_(found)
    return numpy_view(own)


# -- full attention: keys and values [batch, heads, rows, width] ---------------------------------------------------


def _attention_specs(layer: int, first: int, geometry: Geometry, dtype: str) -> tuple[TensorSpec, ...]:
    def spec(role: str, offset: int, rope: RopeState, pairing: Pairing) -> TensorSpec:
        return TensorSpec(
            id=first + offset, name=f"layers.{layer}.{role}", layer=layer, role=role, dtype=dtype,
            axes=("head", "row", "dim"), shape=(geometry.heads, 0, geometry.width), growth="grow", row_axis=1,
            rope=rope, pairing=pairing,
        )  # fmt: skip

    return spec("k", 0, geometry.rope, geometry.pairing), spec("v", 1, "none", "")


def _attention_read(layer: Any) -> tuple[Any, ...]:
    return (layer.keys, layer.values) if _attention_rows(layer) else ()


def _attention_write(layer: Any, tensors: Sequence[Any]) -> None:
    keys, values = tensors
    # Releases before 5.0 initialise from the keys alone.
    wanted = len(inspect.signature(layer.lazy_initialization).parameters)
    layer.lazy_initialization(*(keys, values)[:wanted])
    layer.keys, layer.values = keys, values


def _attention_rows(layer: Any) -> int:
    if not layer.is_initialized or layer.keys is None or layer.keys.numel() == 0:
        return 0
    return int(layer.keys.shape[-2])


def _attention_cut(layer: Any, n_rows: int) -> None:
    if not layer.is_initialized:
        return
    if n_rows == 0:
        layer.keys = layer.values = None
        layer.is_initialized = False
        return
    # An interrupted update may have lengthened the keys and not yet the values.
    if layer.keys.ndim == 4 and layer.keys.shape[-2] > n_rows:
        layer.keys = layer.keys[..., :n_rows, :]
    if layer.values.ndim == 4 and layer.values.shape[-2] > n_rows:
        layer.values = layer.values[..., :n_rows, :]


KINDS: dict[str, LayerKind] = {
    "DynamicLayer": LayerKind(
        "attention", _attention_specs, _attention_read, _attention_write, _attention_rows, _attention_cut
    )
}
"""How each class of `transformers.cache_utils` is handled, by its name."""

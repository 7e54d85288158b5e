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
    "Part",
    "check_layer",
    "copy_rows",
    "cut",
    "dtype_of",
    "kind_of",
    "layer_at",
    "numpy_view",
    "rows_of",
    "tensors_of",
]

_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a layer: its role, heads (0: no axis for them), width of a row, and what was done to its rows."""

    role: str
    heads: int
    width: int
    rope: RopeState = "none"
    pairing: Pairing = ""

    def shape(self, n_rows: int) -> tuple[int, ...]:
        return (self.heads, n_rows, self.width) if self.heads else (n_rows, self.width)


@dataclass(frozen=True, slots=True)
class Geometry:
    """What one layer of a model keeps, and in which order; `kind` is that of `Layer`, `attention` or `latent`."""

    kind: str
    query_heads: int
    parts: tuple[Part, ...]

    def specs(self, layer: int, first: int, dtype: str) -> tuple[TensorSpec, ...]:
        """Return the specs of layer number `layer`, with ids from `first` on."""
        return tuple(
            TensorSpec(
                id=first + place, name=f"layers.{layer}.{part.role}", layer=layer, role=part.role, dtype=dtype,
                axes=("head", "row", "dim") if part.heads else ("row", "dim"), shape=part.shape(0), growth="grow",
                row_axis=1 if part.heads else 0, rope=part.rope, pairing=part.pairing,
            )
            for place, part in enumerate(self.parts)
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerKind:
    """How one class of cache layer is handled.

    `read(layer)` returns the live tensors, `[batch, heads, rows, width]` or `[batch, rows, width]`, in the order of the
    parts, or () while it holds nothing; `write(layer, tensors)` makes such tensors the content of an empty layer
    without a copy; `rows(layer)` counts; `cut(layer, rows)` drops the rows behind, allocates nothing, and may be called
    twice.
    """

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


def tensors_of(layer: Any, index: int, geometry: Geometry) -> tuple[Any, ...]:
    """Return the live tensors of a layer as its parts describe them, `[batch, *shape]`; () while it holds nothing."""
    tensors = kind_of(layer, index).read(layer)
    if len(tensors) != len(geometry.parts):
        return tensors
    # transformers gives the rows of latent attention an axis of one head.
    return tuple(
        t[:, 0] if not part.heads and t.ndim == 4 and t.shape[1] == 1 else t
        for part, t in zip(geometry.parts, tensors, strict=True)
    )


def check_layer(layer: Any, index: int, geometry: Geometry, n_rows: int) -> None:
    """Raise `UnsupportedError` unless a layer holds `n_rows` rows of just what the settings of its model say."""
    tensors = tensors_of(layer, index, geometry)
    if not n_rows and not tensors:
        return
    if len(tensors) != len(geometry.parts):
        raise UnsupportedError(
            f"layer {index} does not keep what its settings say",
            expected=", ".join(part.role for part in geometry.parts), found=f"{len(tensors)} tensors",
        )  # fmt: skip
    for part, tensor in zip(geometry.parts, tensors, strict=True):
        expected, found = list(part.shape(n_rows)), list(tensor.shape[1:])
        if expected != found:
            raise UnsupportedError(
                f"layer {index} does not keep {part.role} as its settings say", expected=expected, found=found
            )
        if tensor.dtype != tensors[0].dtype:
            raise UnsupportedError(
                f"layer {index} keeps {part.role} in another dtype than {geometry.parts[0].role}",
                expected=tensors[0].dtype, found=tensor.dtype,
            )  # fmt: skip


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
    """Copy some rows of one sequence of `[batch, ..., rows, width]` into memory of its own `[..., rows, width]`."""
    import torch

    picked = rows if isinstance(rows, slice) else torch.as_tensor(rows, dtype=torch.long, device=tensor.device)
    found = tensor.detach()[row][..., picked, :]
    own = torch.empty(found.shape, dtype=found.dtype, device="cpu")
    own.copy_(found)
    return numpy_view(own)


# -- keys and values, of full attention or of latent attention (its latent and rope rows) -------------------------


def _attention_read(layer: Any) -> tuple[Any, ...]:
    return (layer.keys, layer.values) if _attention_rows(layer) else ()


def _attention_write(layer: Any, tensors: Sequence[Any]) -> None:
    keys, values = (t if t.ndim == 4 else t.unsqueeze(1) for t in tensors)
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


# -- the same and the rows of an index [batch, rows, width], which some layers of a model have --------------------


def _indexed_read(layer: Any) -> tuple[Any, ...]:
    if getattr(layer, "indexer_position_ids", None) is not None:
        raise UnsupportedError("index rows with positions of their own are not supported yet")
    index = (layer.indexer_keys,) if layer.is_indexer_initialized else ()
    return (*_attention_read(layer), *index) if _attention_rows(layer) else ()


def _indexed_write(layer: Any, tensors: Sequence[Any]) -> None:
    _attention_write(layer, tensors[:2])
    for index in tensors[2:]:
        layer.lazy_initialization_indexer(index)
        layer.indexer_keys = index


def _indexed_cut(layer: Any, n_rows: int) -> None:
    _attention_cut(layer, n_rows)
    if n_rows == 0:
        layer.indexer_keys = None
        layer.is_indexer_initialized = False
    elif layer.is_indexer_initialized and layer.indexer_keys.ndim == 3 and layer.indexer_keys.shape[1] > n_rows:
        layer.indexer_keys = layer.indexer_keys[:, :n_rows]


KINDS: dict[str, LayerKind] = {
    "DynamicLayer": LayerKind(_attention_read, _attention_write, _attention_rows, _attention_cut),
    "DynamicIndexedLayer": LayerKind(_indexed_read, _indexed_write, _attention_rows, _indexed_cut),
}
"""How each class of `transformers.cache_utils` is handled, by its name."""

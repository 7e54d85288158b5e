"""The layers of a transformers cache: which classes are known, what each holds, how it is copied out and built again.

`KINDS` is the table. A class that is not in it is refused by name: a subclass may keep more than its parent, and a copy
that leaves something out is worse than none.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvsnap.engines import _tf_quantised as quantised
from kvsnap.engines._tf_compressed import COMPRESSED, with_index
from kvsnap.engines._tf_kinds import LayerKind, Live
from kvsnap.engines._tf_parts import Geometry, Part, state
from kvsnap.engines._tf_states import COPIED as STATES_COPIED
from kvsnap.engines._tf_states import KEPT as STATES_KEPT
from kvsnap.engines._tf_states import linear_read, linear_write
from kvsnap.engines._tf_static import STATIC, STATIC_INDEXED, STATIC_WINDOW, copy_into
from kvsnap.engines._tf_views import CrossLayer, MixedLayer, crossed, drop_layers, layer_at, layers_of, mixed
from kvsnap.errors import UnsupportedError
from kvsnap.tensors import numpy_dtype

__all__ = [
    "KINDS",
    "LayerKind",
    "Undo",
    "check_layer",
    "copy_rows",
    "cut",
    "dtype_of",
    "kind_of",
    "layer_at",
    "layers_of",
    "learned",
    "marks_of",
    "numpy_view",
    "rows_of",
    "tensors_of",
]

_DTYPES = ("float32", "float16", "bfloat16")


def kind_of(layer: Any, index: int) -> LayerKind:
    """Return how a cache layer is handled; raise `UnsupportedError` naming the class where it is not known."""
    cls = type(layer)
    if cls is CrossLayer:
        return crossed(kind_of(layer.own, index), _dynamic_only(layer.cross, index))
    if cls is MixedLayer:
        return mixed(_dynamic_only(layer.own, index))
    kind = KINDS.get(cls.__name__)
    if kind is not None and cls.__module__ == kind.module:
        return kind
    raise UnsupportedError(
        f"layer {index} is a {cls.__name__}, which is not supported yet",
        expected=" or ".join(KINDS), found=cls.__name__,
    )  # fmt: skip


def _dynamic_only(layer: Any, index: int) -> LayerKind:
    kind = kind_of(layer, index)
    if kind is not _DYNAMIC:
        raise UnsupportedError(
            f"layer {index} keeps a {type(layer).__name__} where only a DynamicLayer is supported",
            expected="DynamicLayer", found=type(layer).__name__,
        )  # fmt: skip
    return kind


def rows_of(cache: Any) -> list[int | None]:
    """Return the number of positions that each layer of a cache has seen; None where a layer does not count them."""
    return [kind_of(layer, index).rows(layer) for index, layer in enumerate(layers_of(cache))]


def marks_of(cache: Any) -> tuple[object, ...]:
    """Return what is different after a cache was changed: the rows of each layer, and the versions of what it holds."""
    return tuple(_mark(layer, kind_of(layer, index)) for index, layer in enumerate(layers_of(cache)))


def _mark(layer: Any, kind: LayerKind) -> object:
    rows = kind.rows(layer)
    # Codes may wait for a pass to be read; memory for all rows has one version for those that are nobody's, too.
    if kind.quantisation(layer) or "cumulative_length" in kind.copied:
        return rows
    fixed = () if kind.fixed is None else kind.fixed(layer)
    return rows, _versions((*(tensor for _, tensor in kind.read(layer)), *fixed))


def _versions(tensors: Iterable[Any]) -> tuple[object, ...]:
    return tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors)


def cut(cache: Any, n_rows: int) -> None:
    """Drop the positions behind `n_rows` in every layer, which each of them must be able to."""
    for index, layer in enumerate(layers_of(cache)):
        kind_of(layer, index).cut(layer, n_rows)


class Undo:
    """What puts the layers of a cache back as they are now, whatever a pass does to them.

    Layers that only grow are cut, so that nothing is held twice; of others what they refer to is kept, and a copy of
    what a pass writes over, which is put back into the same memory. `put_back` may be called again when it was
    interrupted, and allocates nothing.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._kept: list[tuple[Any, LayerKind, int, dict[str, Any]]] = []
        for index, layer in enumerate(layers_of(cache)):
            kind = kind_of(layer, index)
            names = [name for name in kind.kept if hasattr(layer, name)]
            kept = {name: _kept(getattr(layer, name), name in kind.copied) for name in names}
            self._kept.append((layer, kind, kind.rows(layer) or 0, kept))

    def put_back(self) -> None:
        """Put every layer back, and take away layers that came since."""
        drop_layers(self._cache, len(self._kept))
        for layer, kind, n_rows, kept in self._kept:
            if kind.drop is not None:
                kind.drop(layer, n_rows)
            for name, value in kept.items():
                setattr(layer, name, _restored(value))


class _Content(NamedTuple):
    tensor: Any
    copy: Any


def _kept(value: Any, copied: bool) -> Any:
    if isinstance(value, dict):
        return {key: _kept(inner, copied) for key, inner in value.items()}
    return _Content(value, value.clone()) if copied and hasattr(value, "clone") else value


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _restored(inner) for key, inner in value.items()}
    if not isinstance(value, _Content):
        return value
    if value.tensor.is_inference():  # nothing may write to it out here
        return value.copy
    copy_into(value.tensor, value.copy)
    return value.tensor


# -- tensors against their description -----------------------------------------------------------------------------


def tensors_of(layer: Any, index: int, geometry: Geometry) -> Live:
    """Return the live tensors of a layer with the roles and axes that its geometry tells; () while it holds nothing."""
    import torch

    kind = kind_of(layer, index)
    live, named = kind.read(layer), []
    for place, (role, tensor) in enumerate(live):
        part = geometry.parts[place] if place < len(geometry.parts) else None
        # transformers gives the rows of latent attention an axis of one head.
        bare = part is not None and "head" not in part.axes and tensor.ndim == 4 and tensor.shape[1] == 1
        found = tensor[:, 0] if bare else tensor
        if part is not None and part.held and part.dtype and not found.numel():
            found = found.to(getattr(torch, part.dtype))  # of what is not there yet a layer knows no dtype
        if kind.spare and part is not None and part.growth == "window":
            first = int(found.shape[1 + part.row_axis]) - part.needed(kind.rows(layer) or 0)
            found = found[(slice(None),) * (1 + part.row_axis) + (slice(max(0, first), None),)]
        named.append((role if part is None else part.role, found))
    return tuple(named)


def check_layer(layer: Any, index: int, geometry: Geometry, n_rows: int) -> None:
    """Raise `UnsupportedError` unless a layer holds just what its geometry says for `n_rows` positions."""
    how = kind_of(layer, index).quantisation(layer)
    if how != geometry.quantisation:
        raise UnsupportedError(
            f"layer {index} of the cache is quantised otherwise",
            expected=geometry.quantisation or "none", found=how or "none",
        )  # fmt: skip
    live = tensors_of(layer, index, geometry)
    if not n_rows and not live:
        return
    parts = geometry.parts
    if len(live) < len(parts) or (len(live) > len(parts) and not geometry.open):
        raise UnsupportedError(
            f"layer {index} does not keep what its settings say",
            expected=", ".join(part.role for part in parts), found=f"{len(live)} tensors",
        )  # fmt: skip
    if not live and geometry.kind != "none":
        raise UnsupportedError(
            f"layer {index} ({type(layer).__name__}) holds nothing after {n_rows} positions: its state is not in it"
        )
    for part, (_, tensor) in zip(parts, live, strict=False):
        _check_tensor(index, part, tensor, n_rows)
        wanted = part.dtype or str(live[0][1].dtype).removeprefix("torch.")
        if part.row_axis >= 0 and str(tensor.dtype).removeprefix("torch.") != wanted:
            raise UnsupportedError(
                f"layer {index} keeps {part.role} in another dtype than its settings say",
                expected=wanted, found=str(tensor.dtype).removeprefix("torch."),
            )  # fmt: skip


def _check_tensor(index: int, part: Part, tensor: Any, n_rows: int) -> None:
    found = tuple(tensor.shape[1:])
    held = found[part.row_axis] if part.row_axis >= 0 and len(found) > part.row_axis else 0
    needed = part.needed(n_rows)
    # A window that records what it passes by holds more rows than it needs.
    fits = (held > 0 if part.growth == "static" else held == needed) or (
        part.growth == "window" and needed < held <= n_rows
    )
    counted = part.row_axis >= 0 and (part.growth != "replaced" or part.held)
    if not part.fits(found) or (counted and not fits):
        raise UnsupportedError(
            f"layer {index} does not keep {part.role} as its settings say",
            expected=["any" if size is None else size for size in part.shape(needed)], found=list(found),
        )  # fmt: skip


def learned(layer: Any, index: int, geometry: Geometry) -> Geometry:
    """Return the geometry with what the live tensors of a layer tell beyond it; raise as `check_layer` does not."""
    if geometry.is_known:
        return geometry
    live = tensors_of(layer, index, geometry)
    if not live and geometry.kind != "none":
        return geometry
    parts = [
        part.learned(tensor.shape[1:], part.dtype or dtype_of(tensor.dtype, f"layer {index} {role}"))
        for part, (role, tensor) in zip(geometry.parts, live, strict=False)
    ]
    parts += [
        state(role, tensor.shape[1:], dtype_of(tensor.dtype, f"layer {index} {role}"))
        for role, tensor in live[len(parts) :]
    ]
    return replace(geometry, parts=tuple(parts), open=False)


def dtype_of(dtype: Any, what: str) -> str:
    """Return our name of a torch dtype; raise `UnsupportedError` for one that caches are not kept in."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise UnsupportedError(f"{what} is kept as {name}", expected=" or ".join(_DTYPES), found=name)
    return name


def numpy_view(tensor: Any) -> npt.NDArray[Any]:
    """Return a numpy array over the memory of a torch tensor on the CPU. What numpy does not have takes a detour."""
    import torch

    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.view(torch.int16).numpy().view(numpy_dtype("bfloat16")))
    if tensor.dtype == torch.float8_e4m3fn:
        return np.asarray(tensor.view(torch.uint8).numpy().view(numpy_dtype("float8_e4m3fn")))
    return np.asarray(tensor.numpy())


def copy_rows(tensor: Any, row: int, rows: Sequence[int] | slice, axis: int) -> npt.NDArray[Any]:
    """Copy one sequence of `[batch, ...]` into memory of its own; of the axis `axis` (-1: none) some rows only."""
    import torch

    found = tensor.detach()[row]
    if axis >= 0:
        picked = rows if isinstance(rows, slice) else torch.as_tensor(rows, dtype=torch.long, device=tensor.device)
        found = found[(slice(None),) * axis + (picked,)]
    own = torch.empty(found.shape, dtype=found.dtype, device="cpu")
    own.copy_(found)
    return numpy_view(own)


# -- keys and values, of full attention or of latent attention (its latent and rope rows) -------------------------


def _attention_read(layer: Any) -> Live:
    return (("k", layer.keys), ("v", layer.values)) if _attention_rows(layer) else ()


def _attention_write(layer: Any, live: Live, n_rows: int) -> None:
    if not n_rows:
        return
    keys, values = (t if t.ndim == 4 else t.unsqueeze(1) for _, t in live)
    # Releases before 5.0 initialise from the keys alone.
    wanted = len(inspect.signature(layer.lazy_initialization).parameters)
    layer.lazy_initialization(*(keys, values)[: 1 if wanted == 1 else 2])
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


def _indexed_read(layer: Any) -> Live:
    if getattr(layer, "indexer_position_ids", None) is not None:
        raise UnsupportedError("index rows with positions of their own are not supported yet")
    index = (("index", layer.indexer_keys),) if layer.is_indexer_initialized else ()
    return (*_attention_read(layer), *index) if _attention_rows(layer) else ()


def _indexed_write(layer: Any, live: Live, n_rows: int) -> None:
    _attention_write(layer, live[:2], n_rows)
    for _, index in live[2:]:
        layer.lazy_initialization_indexer(index)
        layer.indexer_keys = index


def _indexed_cut(layer: Any, n_rows: int) -> None:
    _attention_cut(layer, n_rows)
    if n_rows == 0:
        layer.indexer_keys = None
        layer.is_indexer_initialized = False
    elif layer.is_indexer_initialized and layer.indexer_keys.ndim == 3 and layer.indexer_keys.shape[1] > n_rows:
        layer.indexer_keys = layer.indexer_keys[:, :n_rows]


# -- keys and values of the last rows ------------------------------------------------------------------------------


def _window_rows(layer: Any) -> int:
    return int(layer.cumulative_length)


def _window_read(layer: Any) -> Live:
    return (("k", layer.keys), ("v", layer.values)) if layer.cumulative_length else ()


def _window_write(layer: Any, live: Live, n_rows: int) -> None:
    _attention_write(layer, live, n_rows)
    layer.cumulative_length = n_rows


def _window_cut(layer: Any, n_rows: int) -> None:
    seen = int(layer.cumulative_length)
    if n_rows >= seen:
        return
    first = seen - int(layer.keys.shape[-2])
    if n_rows and first > max(0, n_rows - layer.sliding_window + 1):
        raise UnsupportedError(
            f"a window of {layer.sliding_window} does not hold the rows before position {n_rows} any more",
            expected=f"0 or {first + layer.sliding_window - 1} to {seen}", found=n_rows,
        )  # fmt: skip
    # One step, for an interrupt between two would leave rows that do not fit their count.
    kept = (layer.keys[..., : n_rows - first, :], layer.values[..., : n_rows - first, :]) if n_rows else (None, None)
    vars(layer).update(keys=kept[0], values=kept[1], cumulative_length=n_rows, is_initialized=n_rows > 0)


# -- states that every pass makes anew, alone or beside keys and values; layers that keep nothing -----------------


def _no_rows(_: Any) -> int | None:
    return None


def _linear_write(layer: Any, live: Live, _: int) -> None:
    linear_write(layer, live)


def _states_cut(layer: Any, n_rows: int) -> None:
    if kind_of(layer, 0).rows(layer) == n_rows:
        return
    raise UnsupportedError(f"a {type(layer).__name__} cannot go back to {n_rows} positions: its states are made anew")


def _beside(kind: LayerKind) -> LayerKind:
    """Return how a layer of keys and values is handled that has states beside them."""

    def read(layer: Any) -> Live:
        return (*kind.read(layer), *linear_read(layer))

    def write(layer: Any, live: Live, n_rows: int) -> None:
        kind.write(layer, live[:2], n_rows)
        linear_write(layer, live[2:])

    kept = (*kind.kept, *STATES_KEPT)
    copied = (*kind.copied, *STATES_COPIED)
    return LayerKind(read, write, kind.rows, _states_cut, kind.drop, kept, copied, spare=kind.spare)


_DYNAMIC = LayerKind(_attention_read, _attention_write, _attention_rows, _attention_cut, _attention_cut)
_WINDOW = LayerKind(
    _window_read, _window_write, _window_rows, _window_cut,
    kept=("keys", "values", "cumulative_length", "is_initialized"),
)  # fmt: skip
_QUANTISED = LayerKind(
    quantised.read, quantised.write, quantised.rows, quantised.cut, kept=quantised.KEPT,
    quantisation=lambda layer: quantised.settings_of(layer).text,
)  # fmt: skip

KINDS: dict[str, LayerKind] = {
    "DynamicLayer": _DYNAMIC,
    "DynamicIndexedLayer": LayerKind(_indexed_read, _indexed_write, _attention_rows, _indexed_cut, _indexed_cut),
    "DynamicSlidingWindowLayer": _WINDOW,
    "LinearAttentionLayer": LayerKind(
        linear_read, _linear_write, _no_rows, _states_cut, kept=STATES_KEPT, copied=STATES_COPIED
    ),
    "LinearAttentionAndFullAttentionLayer": _beside(_DYNAMIC),
    "LinearAttentionAndSlidingWindowAttentionLayer": _beside(_WINDOW),
    "QuantoQuantizedLayer": _QUANTISED,
    "HQQQuantizedLayer": _QUANTISED,
    "Fp8QuantizedLayer": _QUANTISED,
    "StaticLayer": STATIC,
    "StaticIndexedLayer": STATIC_INDEXED,
    "StaticSlidingWindowLayer": STATIC_WINDOW,
    "LinearAttentionAndStaticFullAttentionLayer": _beside(STATIC),
    "LinearAttentionAndStaticSlidingWindowAttentionLayer": _beside(STATIC_WINDOW),
    "DummyLayer": LayerKind(lambda _: (), lambda *_: None, _no_rows, lambda *_: None),
    "MiniMaxM3VLSparseCacheLayer": with_index(_DYNAMIC),
    **COMPRESSED,
}
"""How each class of cache layer is handled, by its name."""

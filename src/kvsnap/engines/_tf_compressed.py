"""Layers that keep one row for a group of positions (DeepSeek-V4), and layers whose index picks blocks (MiniMax-M3).

A compressed layer keeps a window of keys, which are the values as well, and makes one row of every `m` positions. What
came since the last whole group waits in buffers; some layers also keep the last whole group, which the next row needs,
and a second set of all of it for their index. How many rows of each there are follows from the number of positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from kvsnap.engines._tf_kinds import LayerKind, Live
from kvsnap.engines._tf_parts import Geometry, Part, heads
from kvsnap.errors import CompatibilityError, UnsupportedError
from kvsnap.tensors import Pairing, RopeState

__all__ = ["COMPRESSED", "compressed_geometry", "index_of_blocks", "shared_attentions", "with_index"]

_V4 = "transformers.models.deepseek_v4.modeling_deepseek_v4"
_ROWS = {"compressor": "compressed", "indexer": "index"}
"""The names that a layer has for its sets of rows, and the role of the rows of each."""
_WAITING = ("buffer_kv", "buffer_gate")
_LAST = ("overlap_kv", "overlap_gate")


# -- what they keep ------------------------------------------------------------------------------------------------


def shared_attentions(module: Any) -> dict[int, Any]:
    """Return the modules of attention whose keys are the values as well, by the number of their cache layer."""
    parts = (part for part in module.modules() if hasattr(part, "compressor") and hasattr(part, "kv_proj"))
    return {int(part.layer_idx): part for part in parts if isinstance(getattr(part, "layer_idx", None), int)}


def compressed_geometry(
    attention: Any, layer: Any, index: int, query_heads: int, rope: tuple[RopeState, Pairing]
) -> Geometry:
    """Return what a layer of a model keeps whose keys are the values as well; `rope` is how they are rotated.

    Raise `UnsupportedError` where the module and the cache layer `layer` do not belong together.
    """
    window, width = int(layer.sliding_window), int(attention.head_dim)
    if window < 2:
        raise UnsupportedError(f"layer {index} has a window of {window}, which holds nothing", expected="2 or more")
    count = int(attention.kv_proj.out_features) // width
    pair = (heads("k", count, width, *rope, window), heads("v", count, width, *rope, window))
    compressor = attention.compressor
    if compressor is None:
        return Geometry("attention", query_heads, pair)
    sets = {"compressor": compressor}
    if getattr(compressor, "indexer", None) is not None:
        sets["indexer"] = compressor.indexer
    found = tuple(getattr(layer, "compressed_kv", ()))
    if found != tuple(sets):
        raise UnsupportedError(
            f"layer {index}: the cache has no place for what the {type(compressor).__name__} keeps",
            expected=", ".join(sets), found=", ".join(found) or type(layer).__name__,
        )  # fmt: skip
    parts = list(pair)
    for name, one in sets.items():
        turned: tuple[RopeState, Pairing] = rope if name == "compressor" else ("unknown", "")
        width, group = int(one.head_dim), int(one.compress_rate)
        parts.append(
            Part(
                _ROWS[name], ("row", "dim"), (0, width), tokens_per_row=group, group=group,
                rope=turned[0], pairing=turned[1],
            )
        )  # fmt: skip
    for one in sets.values():
        widths = (int(projection.out_features) for projection in (one.kv_proj, one.gate_proj))
        parts += [_replaced("buffer", width, int(one.compress_rate), "rest") for width in widths]
    if hasattr(layer, _LAST[0]):
        for one in sets.values():
            dtypes = ("", _gate_dtype(one))
            parts += [_replaced("overlap", int(one.head_dim), int(one.compress_rate), "last", d) for d in dtypes]
    return Geometry("hybrid", query_heads, tuple(parts))


def _replaced(role: str, width: int, group: int, held: Literal["rest", "last"], dtype: str = "") -> Part:
    """Return rows `[row, dim]` of the positions behind the last whole group, or of those in it."""
    return Part(role, ("row", "dim"), (0, width), "replaced", dtype=dtype, group=group, held=held)


def _gate_dtype(compressor: Any) -> str:
    """Return the dtype of the gates of a whole group, to which a bias was added: "" for that of the cache."""
    import torch

    own, bias = compressor.gate_proj.weight.dtype, compressor.position_bias.dtype
    found = torch.promote_types(own, bias)
    return "" if found == own else str(found).removeprefix("torch.")


# -- how they are read and built -----------------------------------------------------------------------------------


def _rows(layer: Any) -> int:
    return int(layer.cumulative_length)


def _read(layer: Any) -> Live:
    return tuple(_tensors(layer)) if layer.cumulative_length else ()


def _tensors(layer: Any) -> Iterator[tuple[str, Any]]:
    yield "k", layer.keys
    yield "v", layer.values
    for name, made in layer.compressed_kv.items():
        count = layer.entry_count[name]
        if made is None or count != made.shape[1]:
            raise UnsupportedError(
                f"a {type(layer).__name__} does not hold the {_ROWS[name]} rows that it counts",
                expected=count, found=None if made is None else int(made.shape[1]),
            )  # fmt: skip
        yield _ROWS[name], made
    for name in layer.compressed_kv:
        for attribute in _WAITING:
            yield "buffer", getattr(layer, attribute)[name]
    if hasattr(layer, _LAST[0]):
        for name, made in layer.compressed_kv.items():
            for attribute in _LAST:
                last = getattr(layer, attribute)[name]
                # Before the first whole group there is none.
                yield "overlap", made[:, :0] if last is None else last


def _write(layer: Any, live: Live, n_rows: int) -> None:
    if not n_rows:
        return
    import torch

    by_role: dict[str, Iterator[Any]] = {}
    for role in dict(live):
        by_role[role] = iter([tensor for other, tensor in live if other == role])
    keys, values = next(by_role["k"]), next(by_role["v"])
    # The layer has one tensor for both, and reads the keys only.
    if not torch.equal(_bits(keys), _bits(values)):
        raise CompatibilityError(f"a {type(layer).__name__} has one tensor for keys and values, and these differ")
    layer.lazy_initialization(keys, keys)
    layer.keys = layer.values = keys
    layer.cumulative_length = n_rows
    for name in layer.compressed_kv:
        made = next(by_role[_ROWS[name]])
        layer.compressed_kv[name], layer.entry_count[name] = made, int(made.shape[1])
    for name in layer.compressed_kv:
        for attribute in _WAITING:
            getattr(layer, attribute)[name] = next(by_role["buffer"])
    if hasattr(layer, _LAST[0]):
        for name in layer.compressed_kv:
            for attribute in _LAST:
                last = next(by_role["overlap"])
                getattr(layer, attribute)[name] = last if last.shape[1] else None


def _bits(tensor: Any) -> Any:
    import torch

    return tensor.contiguous().view(torch.uint8)


def _cut(layer: Any, n_rows: int) -> None:
    seen = _rows(layer)
    if n_rows != seen:
        raise UnsupportedError(
            f"a {type(layer).__name__} cannot go back to {n_rows} positions: what its rows were made of is gone",
            expected=seen, found=n_rows,
        )  # fmt: skip


_KEPT = ("keys", "values", "cumulative_length", "is_initialized", *_WAITING, "compressed_kv", "entry_count")


COMPRESSED: dict[str, LayerKind] = {
    "DeepseekV4HCACache": LayerKind(_read, _write, _rows, _cut, kept=_KEPT, module=_V4),
    "DeepseekV4CSACache": LayerKind(_read, _write, _rows, _cut, kept=(*_KEPT, *_LAST), module=_V4),
}
"""How the layers of DeepSeek-V4 are handled. A pass makes every tensor of theirs anew, and changes none in place."""


# -- keys and values, and an index whose rows are picked in blocks ------------------------------------------------


def index_of_blocks(indexer: Any) -> Part:
    """Return the rows of an index that picks whole blocks of positions."""
    return Part(
        "index", ("row", "dim"), (0, int(indexer.head_dim)), rope="unknown", group=int(indexer.block_size)
    )  # fmt: skip


def with_index(kind: LayerKind) -> LayerKind:
    """Return how a layer of keys and values is handled that has index rows `[batch, 1, rows, width]` beside them."""

    def read(layer: Any) -> Live:
        live = kind.read(layer)
        return (*live, ("index", layer.idx_keys)) if live and layer.idx_keys is not None else live

    def write(layer: Any, live: Live, n_rows: int) -> None:
        kind.write(layer, live[:2], n_rows)
        for _, index in live[2:]:
            layer.idx_keys = index if index.ndim == 4 else index.unsqueeze(1)

    def cut(layer: Any, n_rows: int) -> None:
        kind.cut(layer, n_rows)
        if n_rows == 0:
            layer.idx_keys = None
        elif layer.idx_keys is not None and layer.idx_keys.shape[-2] > n_rows:
            layer.idx_keys = layer.idx_keys[..., :n_rows, :]

    return LayerKind(
        read, write, kind.rows, cut, cut, module="transformers.models.minimax_m3_vl.modeling_minimax_m3_vl"
    )

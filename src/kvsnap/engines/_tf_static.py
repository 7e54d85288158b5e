"""The layers of a static cache: memory for all rows from the start, of which the first ones are in use.

What is behind the rows in use is nobody's: it is never read. The memory stays where it is, for what is compiled for
it: everything is written into it.
"""

from __future__ import annotations

from typing import Any

from kvsnap.engines._tf_kinds import LayerKind, Live
from kvsnap.errors import UnsupportedError

__all__ = ["STATIC", "STATIC_INDEXED", "STATIC_WINDOW", "copy_into"]


def copy_into(target: Any, source: Any) -> None:
    """Copy a tensor into the memory of another one, also where the caller records gradients or infers."""
    import torch

    with torch.inference_mode(False), torch.no_grad():
        target.copy_(source)


def _fill(counter: Any, count: int) -> None:
    import torch

    with torch.inference_mode(False), torch.no_grad():
        counter.fill_(count)


def _room_for(layer: Any, live: Live) -> tuple[Any, Any]:
    """Return keys and values `[batch, head, row, dim]`; give the layer the memory that it wants for such."""
    import torch

    keys, values = (t if t.ndim == 4 else t.unsqueeze(1) for _, t in live)
    if not layer.is_initialized:
        with torch.inference_mode(False):
            layer.lazy_initialization(keys, values)
    return keys, values


# -- all rows ------------------------------------------------------------------------------------------------------


def _rows(layer: Any) -> int:
    count: Any = getattr(layer, "cumulative_length", None)
    if not hasattr(count, "fill_"):
        raise UnsupportedError("a StaticLayer of this release of transformers does not count its rows",
                               expected="5.12 or later")  # fmt: skip
    return int(count) if layer.is_initialized else 0


def _read(layer: Any) -> Live:
    n_rows = _rows(layer)
    return (("k", layer.keys[:, :, :n_rows]), ("v", layer.values[:, :, :n_rows])) if n_rows else ()


def _write(layer: Any, live: Live, n_rows: int) -> None:
    if n_rows:
        keys, values = _room_for(layer, live)
        copy_into(layer.keys[:, :, :n_rows], keys)
        copy_into(layer.values[:, :, :n_rows], values)
        _fill(layer.cumulative_length, n_rows)


def _cut(layer: Any, n_rows: int) -> None:
    if n_rows < _rows(layer):
        _fill(layer.cumulative_length, n_rows)


STATIC = LayerKind(
    _read, _write, _rows, _cut, kept=("keys", "values", "cumulative_length", "is_initialized"),
    copied=("cumulative_length",),
)  # fmt: skip


# -- the same and the rows of an index -----------------------------------------------------------------------------


def _indexed_read(layer: Any) -> Live:
    if getattr(layer, "indexer_position_ids", None) is not None:
        raise UnsupportedError("index rows with positions of their own are not supported yet")
    n_rows, live = _rows(layer), _read(layer)
    if not live or not layer.is_indexer_initialized:
        return live
    return (*live, ("index", layer.indexer_keys[:, : min(n_rows, int(layer.indexer_cumulative_length))]))


def _indexed_write(layer: Any, live: Live, n_rows: int) -> None:
    import torch

    _write(layer, live[:2], n_rows)
    for _, index in live[2:]:
        if not layer.is_indexer_initialized:
            with torch.inference_mode(False):
                layer.lazy_initialization_indexer(index)
        copy_into(layer.indexer_keys[:, :n_rows], index)
        _fill(layer.indexer_cumulative_length, n_rows)


def _indexed_cut(layer: Any, n_rows: int) -> None:
    if layer.is_indexer_initialized and n_rows < int(layer.indexer_cumulative_length):
        _fill(layer.indexer_cumulative_length, n_rows)
    _cut(layer, n_rows)


STATIC_INDEXED = LayerKind(
    _indexed_read, _indexed_write, _rows, _indexed_cut,
    kept=(*STATIC.kept, "indexer_keys", "indexer_cumulative_length", "is_indexer_initialized"),
    copied=("cumulative_length", "indexer_cumulative_length"),
)  # fmt: skip


# -- the rows of a window, oldest first; once it is full every pass moves them -------------------------------------


def _window_rows(layer: Any) -> int:
    return int(layer.cumulative_length_int) if layer.is_initialized else 0


def _window_read(layer: Any) -> Live:
    held = min(_window_rows(layer), layer.max_cache_len)
    return (("k", layer.keys[:, :, :held]), ("v", layer.values[:, :, :held])) if held else ()


def _window_write(layer: Any, live: Live, n_rows: int) -> None:
    if not n_rows:
        return
    keys, values = _room_for(layer, live)
    stop = min(n_rows, layer.max_cache_len)
    given = min(int(keys.shape[2]), stop)
    for target, rows in ((layer.keys, keys), (layer.values, values)):
        copy_into(target[:, :, stop - given : stop], rows[:, :, rows.shape[2] - given :])
    _fill(layer.cumulative_length, stop)
    layer.cumulative_length_int = n_rows


def _window_cut(layer: Any, n_rows: int) -> None:
    seen = _window_rows(layer)
    if n_rows >= seen:
        return
    if n_rows and seen >= layer.max_cache_len:
        raise UnsupportedError(
            f"a static window of {layer.max_cache_len} that was full once cannot go back",
            expected=f"0 or {seen}", found=n_rows,
        )  # fmt: skip
    _fill(layer.cumulative_length, n_rows)
    layer.cumulative_length_int = n_rows


STATIC_WINDOW = LayerKind(
    _window_read, _window_write, _window_rows, _window_cut, kept=(*STATIC.kept, "cumulative_length_int"),
    copied=("keys", "values", "cumulative_length"), spare=True,
)  # fmt: skip

"""Taking over a cache that the user's own call made: which rows belong to which sequence, and which are padding."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.engines._tf_caches import CACHES, refuse_offloading
from kvsnap.engines._tf_capture import check_unpadded, refuse_gap
from kvsnap.engines._tf_layers import kind_of, layer_at, layers_of, numpy_view, rows_of, tensors_of
from kvsnap.engines._tf_model import Model
from kvsnap.engines._tf_padding import check_state
from kvsnap.engines._tf_state import Line, check_ids, check_room, straightened
from kvsnap.errors import InputError, UnsupportedError
from kvsnap.layout import PositionRun, Run, join_positions, join_runs

__all__ = ["first_generated", "lines_in", "only_rows"]

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def lines_in(
    cache: Any, tokens: Any, model: Model, *, mask: Any, logits: Any, prompt: int | None, ends: frozenset[int],
    positions: Any = None, evaluated: int | None = None,
) -> tuple[Line, ...]:  # fmt: skip
    """Return the sequences in a cache, one for each row of the batch, without the rows of padding.

    `tokens` `[batch, ids]`, `mask` `[batch, <= ids]` (1 keeps; what it does not reach is kept), `logits`
    `[batch, vocab]` of the last row in the cache, `prompt` the number of columns that are prompt, `positions`
    `[batch, evaluated columns]` or more, `evaluated` the number of columns in the cache, where it does not count them.
    """
    n_rows, batch = _check_cache(cache, model, evaluated)
    ids = np.atleast_2d(_array(tokens, "tokens"))
    if ids.ndim != 2 or ids.shape[0] != batch or ids.shape[1] < n_rows:
        raise InputError(
            "the tokens do not fit the cache", expected=f"[{batch}, at least {n_rows}]", found=list(ids.shape)
        )
    if mask is None and batch > 1:
        raise UnsupportedError(
            f"a batch of {batch} sequences without attention_mask: padding cannot be told from text", found=None,
            expected="the mask that was given to generate",
        )  # fmt: skip
    keep, known = _mask(mask, ids.shape)
    columns = known if prompt is None else prompt
    scores = None if logits is None else np.atleast_2d(_scores(logits))
    if scores is not None and scores.shape != (batch, model.vocab_size):
        raise InputError("the logits do not fit", expected=[batch, model.vocab_size], found=list(scores.shape))
    places = None if positions is None else np.atleast_2d(_array(positions, "positions"))
    if places is not None and (places.shape[0] != batch or places.shape[1] < n_rows):
        raise InputError("the positions do not fit", expected=f"[{batch}, at least {n_rows}]", found=list(places.shape))
    lines = []
    for row in range(batch):
        if batch > 1 and columns < ids.shape[1]:
            keep[row] &= _before_filling(ids[row], columns, ends)
        line = _line(ids[row], keep[row], n_rows, columns)
        line = replace(line, gap=_gap(line)) if places is None else _placed(line, places[row], keep[row])
        if batch == 1:
            refuse_gap(line)
        check_ids(line.tokens, model.vocab_size, 0)
        check_room(0, max(line.taken, line.next_position + line.n_pending), model.context_limit)
        # The logits belong to the last row; where that is padding, they say nothing about this sequence.
        fits = scores is not None and n_rows > 0 and bool(keep[row][n_rows - 1])
        own = scores[row] if fits and scores is not None else None
        lines.append(_with_logits(line, own) if _goes_back(line, model) else replace(line, logits=own))
    return tuple(lines)


def _placed(line: Line, places: Ids, keep: Mask) -> Line:
    """Return a sequence with the positions of its rows, and of the first id that has none, where it is given."""
    found = places[keep[: len(places)]].tolist()
    runs = join_positions((), [PositionRun(int(p), 1) for p in found[: line.n_rows]])
    behind = runs[-1].start + runs[-1].count if runs else line.n_rows
    following = int(found[line.n_rows]) if len(found) > line.n_rows else behind
    return replace(line, positions=straightened(runs), offset=None if following == behind else following)


def first_generated(line: Line) -> int:
    """Return the first row of a generated id, or the number of rows."""
    first = line.runs[0].count if line.runs and line.runs[0].kind == "prompt" else 0
    return min(first, line.n_rows)


def only_rows(cache: Any, line: Line, model: Model) -> Any:
    """Return a cache with the rows of the only sequence in it: the same object where nothing is padding."""
    if line.select is None:
        return cache
    if model.encodes:
        raise UnsupportedError("padding among the ids of a decoder is not supported: leave it out")
    fresh, columns = model.fresh_cache(), line.select
    for index, layer in enumerate(layers_of(cache)):
        kind, geometry = kind_of(layer, index), model.geometry[index]
        target, total = layer_at(fresh, index), kind.rows(layer) or 0
        live = []
        for part, (role, tensor) in zip(geometry.parts, tensors_of(layer, index, geometry), strict=False):
            what = f"layer {index}: {part.name or role}"
            check_unpadded(part, columns, total, what)
            if part.growth == "replaced" and part.row_axis >= 0 and tensor.shape[1 + part.row_axis]:
                raise UnsupportedError(f"{what} has padding in it, which cannot be taken out again")
            if part.row_axis < 0 or part.growth == "replaced" or part.tokens_per_row != 1:
                if part.row_axis < 0 or part.growth != "replaced" or tensor.shape[1 + part.row_axis]:
                    check_state(model, line, part, what, 1)
                live.append((role, tensor))
                continue
            hidden = total - int(tensor.shape[1 + part.row_axis])
            kept = [column - hidden for column in columns if column >= hidden]
            if len(kept) < part.needed(len(columns)):
                raise UnsupportedError(f"layer {index}: padding took the place of rows in the window")
            live.append((role, tensor.index_select(1 + part.row_axis, _index(kept, tensor))))
        kind.write(target, tuple(live), len(columns))
    return fresh


def _index(columns: list[int], like: Any) -> Any:
    import torch

    return torch.as_tensor(columns, dtype=torch.long, device=like.device)


def _check_cache(cache: Any, model: Model, evaluated: int | None) -> tuple[int, int]:
    """Return rows and batch size of a cache whose layers are all known and agree."""
    classes, found = model.cache.classes, type(cache).__name__
    if found not in classes:
        other = next((name for name, kind in CACHES.items() if found in kind.classes), None)
        advice = "" if other is None else f"; connect(model, cache={other!r}) takes it"
        raise UnsupportedError(
            f"a {found} is not supported by this engine{advice}", expected=" or ".join(classes), found=found
        )
    refuse_offloading(cache)
    rows, n_layers = rows_of(cache), len(model.geometry)
    counted = {count for count in rows if count is not None}
    if len(counted) > 1 or (rows and len(rows) != n_layers):
        raise InputError("the layers of the cache do not belong to this model, or hold unequal numbers of rows",
                         expected=f"{n_layers} layers of equal length", found=rows)  # fmt: skip
    tensors = [t for i, layer in enumerate(layers_of(cache)) for _, t in kind_of(layer, i).read(layer)]
    if evaluated is None and not counted and tensors:
        raise InputError(
            "this cache does not count what was evaluated", expected="evaluated=: the number of columns", found=None
        )
    if evaluated is not None and counted - {evaluated}:
        raise InputError("the cache holds another number of columns", expected=evaluated, found=min(counted))
    n_rows = evaluated if evaluated is not None else min(counted, default=0)
    if rows:
        model.check(cache, n_rows)
    if model.encodes and tensors and int(tensors[0].shape[0]) != 1:
        raise UnsupportedError(
            "a batch of an encoder-decoder is not supported: each of its sequences has an input of its own",
            expected="one sequence", found=int(tensors[0].shape[0]),
        )  # fmt: skip
    return n_rows, (int(tensors[0].shape[0]) if tensors else 1)


def _array(values: Any, what: str) -> Ids:
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    try:
        found = np.asarray(values)
    except ValueError as error:
        raise InputError(f"{what} must be a rectangle of integers; pad the shorter ones and give a mask") from error
    if found.dtype.kind not in "iub":
        raise InputError(f"{what} must be integers", expected="integers", found=found.dtype)
    return found.astype(np.int64)


def _scores(logits: Any) -> npt.NDArray[Any]:
    return np.array(numpy_view(logits.detach().cpu().contiguous()) if hasattr(logits, "detach") else logits)


def _mask(mask: Any, shape: tuple[int, ...]) -> tuple[Mask, int]:
    """Return which ids are kept and how many columns the mask reached."""
    keep = np.ones(shape, dtype=np.bool_)
    if mask is None:
        return keep, shape[1]
    found = np.atleast_2d(_array(mask, "the attention mask"))
    if found.ndim != 2 or found.shape[0] != shape[0] or found.shape[1] > shape[1]:
        raise InputError(
            "the attention mask does not fit the tokens",
            expected=f"[{shape[0]}, at most {shape[1]}]", found=list(found.shape),
        )  # fmt: skip
    keep[:, : found.shape[1]] = found != 0
    return keep, found.shape[1]


def _before_filling(ids: Ids, columns: int, ends: frozenset[int]) -> Mask:
    """Return which ids come before the filling that `generate` puts behind the end of a sequence that is done early."""
    keep = np.ones(len(ids), dtype=np.bool_)
    found = [i for i in range(columns, len(ids)) if int(ids[i]) in ends]
    if found and len(set(ids[found[0] + 1 :].tolist())) <= 1:
        keep[found[0] + 1 :] = False
    return keep


def _line(ids: Ids, keep: Mask, n_rows: int, columns: int) -> Line:
    tokens = tuple(ids[keep].tolist())
    select = np.flatnonzero(keep[:n_rows])
    prompt = int(keep[:columns].sum())
    runs = join_runs((), (Run("prompt", prompt), Run("generated", len(tokens) - prompt)))
    own = None if len(select) == n_rows else tuple(select.tolist())
    return Line(tokens, runs, len(select), len(tokens) - len(select), None, own, columns=n_rows)


def _gap(line: Line) -> int | None:
    """Return the first column of a sequence behind padding that has ids before it, None where there is none."""
    return next((b for a, b in pairwise(line.select or ()) if b != a + 1), None)


def _goes_back(line: Line, model: Model) -> bool:
    """Tell whether the last row of a sequence can be given up: no state took it up, no window lost one for it."""
    parts = [part for geometry in model.geometry for part in geometry.parts]
    return not any(p.growth == "replaced" or (p.growth == "window" and line.n_rows >= p.window) for p in parts)


def _with_logits(line: Line, logits: npt.NDArray[Any] | None) -> Line:
    if logits is None and line.n_rows and not line.n_pending:
        return line.without_last_row()
    return replace(line, logits=logits)

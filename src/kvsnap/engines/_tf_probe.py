"""What is kept of the attention of some passes, and the snapshot that is made of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.attention import AttentionSnapshot, Floats, LayerAttention, Wanted, absent
from kvsnap.engines._tf_attention import Call, Place, places_of
from kvsnap.engines._tf_geometry import shared_by
from kvsnap.engines._tf_model import Model
from kvsnap.engines._tf_parts import Geometry
from kvsnap.engines._tf_state import Line
from kvsnap.errors import InputError, UnsupportedError

__all__ = ["Recorder"]

_WEIGHED = ("eager", "sdpa")
"""Implementations whose masks are known, so that weights can be computed from them."""
_NOT_KEPT = "it was not asked for"


@dataclass(frozen=True, slots=True)
class _Heard:
    """What is kept of one call: keys from the row `first` on, queries and weights of the last rows of the pass.

    Weights are over the keys from the row `seen` on.
    """

    first: int
    keys: Floats
    values: Floats | None
    queries: Floats
    weights: Floats | None
    seen: int
    scaling: float


@dataclass(slots=True)
class _Pass:
    """One pass over the rows `[start, stop)`: what was heard, by layer and whether it is cross-attention."""

    start: int
    stop: int
    heard: dict[tuple[bool, int], _Heard] = field(default_factory=dict)


class Recorder:
    """Keeps what is wanted of the passes of one sequence.

    A pass counts when the engine has published what it made. A rewind drops the rows behind it; another cache, or other
    ids, begin anew.
    """

    def __init__(self, model: Model, wanted: Wanted) -> None:
        self.places = places_of(model)
        self._model, self._wanted = model, wanted
        self._count = max(len(model.geometry), *(place.index + 1 for place in self.places))
        if wanted.layers is not None and not 0 <= wanted.layers[0] <= wanted.layers[-1] < self._count:
            raise InputError("no such layer", expected=f"0 to {self._count - 1}", found=list(wanted.layers))
        used = {place.implementation for place in self.places}
        if wanted.weights and not used <= {*_WEIGHED}:
            raise UnsupportedError(
                "weights cannot be computed of this implementation of attention",
                expected=" or ".join(_WEIGHED), found=", ".join(sorted(used)),
            )  # fmt: skip
        if not any(wanted.has(place.index) for place in self.places):
            raise UnsupportedError(f"none of the layers {list(wanted.layers or ())} has attention")
        self._passes: list[_Pass] = []
        self._line = Line()
        self._pending: tuple[list[_Pass], Line] = ([], Line())
        self._cache: Callable[[], Any] = lambda: None

    # -- passes ------------------------------------------------------------------------------------------------------

    def begin(self, cache: Any, live_cache: Any, live: Line, line: Line) -> None:
        """Get ready for passes that evaluate what is pending in `line`; `live` is what the engine holds."""
        self.settle(live_cache, live)
        if self._cache() is not cache or not _goes_on(self._line, line):
            self._passes = []
            self._line = Line()
        self._cache = weakref.ref(cache)
        self._pending = ([], line)

    def done(self, line: Line) -> None:
        """The passes since `begin` are made; `line` is the sequence as it is then."""
        self._pending = (self._pending[0], line)

    def settle(self, live_cache: Any, live: Line) -> None:
        """Take up the passes that were published, and drop the others, and rows that were cut since."""
        passes, line = self._pending
        self._pending = ([], Line())
        if passes and self._cache() is live_cache and _goes_on(live, line, at_least=True):
            self._take(passes, line)
        if self._cache() is live_cache and live.n_rows < self._line.n_rows:
            self._passes = [_cut(p, live.n_rows) for p in self._passes if p.start < live.n_rows]
            self._line = live

    def take(self) -> None:
        """Take up the passes although nothing of them is going to be published."""
        self._take(*self._pending)
        self._pending = ([], Line())

    def drop(self) -> None:
        """Forget the passes since `begin`."""
        self._pending = ([], Line())

    def _take(self, passes: list[_Pass], line: Line) -> None:
        self._passes += passes
        self._line = line
        if self._wanted.last is None:
            return
        first = line.n_rows - self._wanted.last
        for at in reversed(range(len(self._passes))):  # those before one without queries were trimmed already
            if not any(h.queries.shape[1] for h in self._passes[at].heard.values()):
                break
            self._passes[at] = _trimmed(self._passes[at], first)

    def start(self, first: int, count: int) -> None:
        """Begin a pass over `count` rows from `first` on."""
        self._pending[0].append(_Pass(first, first + count))

    def finish(self) -> None:
        """Check that every layer was heard in the pass. Raise `UnsupportedError` naming one that was not."""
        heard = self._pending[0][-1].heard
        for place in self.places:
            if self._wanted.has(place.index) and (place.cross, place.index) not in heard:
                raise UnsupportedError(
                    f"{self._model.config.model_type}: layer {place.index} computed its attention without the function "
                    "that is listened to"
                )

    # -- calls -------------------------------------------------------------------------------------------------------

    def hear(self, call: Call) -> None:
        """Copy out what is wanted of a call. Raise `UnsupportedError` where its rows are not those of the pass."""
        place = call.place
        # Without a pass that was begun, a second interrupt has left the ear open: the call is not the engine's.
        if not self._pending[0] or not self._wanted.has(place.index):
            return
        now = self._pending[0][-1]
        what = f"{self._model.config.model_type}: layer {place.index}"
        key = (place.cross, place.index)
        if key in now.heard:
            raise UnsupportedError(f"{what} computes attention twice in a pass")
        ids, (batch, _, queries, _) = now.stop - now.start, call.query.shape
        # A layer that keeps no rows may leave out queries whose logits nobody asked for: the first ones.
        fewer = self._geometry(place.index).kind == "none" and queries < ids
        if batch != 1 or (queries != ids and not fewer):
            raise UnsupportedError(
                f"{what} does not attend with one query for each id", expected=[1, ids], found=[batch, queries]
            )
        if call.query.shape[1] % call.key.shape[1]:
            raise UnsupportedError(f"{what} has {call.query.shape[1]} query heads on {call.key.shape[1]} key heads")
        now.heard[key] = self._kept(call, now)

    def _kept(self, call: Call, now: _Pass) -> _Heard:
        keys = int(call.key.shape[2])
        # Memory that was allocated for more rows has those to come at its end; a window holds the last ones.
        stop = keys if call.place.cross else min(keys, now.stop)
        seen = 0 if call.place.cross else now.stop - stop
        known = self._passes or self._pending[0][:-1]
        first = max(seen, now.start if known else 0)
        if call.place.cross and known:
            first = stop  # what the encoder gave stays the same
        rows = slice(first - seen, stop)
        last = int(call.query.shape[2])
        last = last if self._wanted.last is None else min(last, self._wanted.last)
        weights = None
        if self._wanted.weights:
            weights = _numpy(_weights(call, last)[0, :, -last:, :stop])
        scaling = call.options.get("scaling")
        return _Heard(
            first,
            _numpy(call.key[0, :, rows]),
            _numpy(call.value[0, :, rows]) if self._wanted.values else None,
            _numpy(call.query[0, :, -last:]),
            weights,
            seen,
            float(call.query.shape[-1] ** -0.5 if scaling is None else scaling),
        )

    # -- the snapshot ------------------------------------------------------------------------------------------------

    def snapshot(self) -> AttentionSnapshot:
        """Return all that is kept. Raise `InputError` where nothing is."""
        if not self._passes:
            raise InputError("nothing was evaluated while the attention was looked at")
        line = self._line
        positions = [np.arange(run.start, run.start + run.count) for run in line.position_runs]
        evaluated = line.tokens[: len(line.tokens) - line.n_pending]
        places = {(place.cross, place.index): place for place in self.places}
        layers = [self._layer(places, False, index) for index in range(self._count)]
        crossed = range(self._count) if self._model.encodes else ()
        return AttentionSnapshot(
            architecture=str(self._model.config.model_type),
            tokens=evaluated,
            positions=np.concatenate(positions).astype(np.int64),
            layers=tuple(layers),
            cross=tuple(self._layer(places, True, index) for index in crossed),
        )

    def _geometry(self, index: int) -> Geometry:
        # Before 5.15 the last layers of a model that shares rows have no layer of cache at all.
        known = self._model.geometry
        return known[index] if index < len(known) else Geometry("none", 0, shares=shared_by(self._model.module, index))

    def _layer(self, places: dict[tuple[bool, int], Place], cross: bool, index: int) -> LayerAttention:
        geometry = self._geometry(index)
        shares = geometry.shares
        if (cross, index) not in places:
            kept = "a recurrent state" if geometry.kind == "recurrent" else "no keys"
            return absent(index, "none", f"it has no attention: it keeps {kept}")
        latent = any(part.role == "latent" for part in geometry.parts)
        kind = "cross" if cross else "latent" if latent else "attention"
        if not self._wanted.has(index):
            return absent(index, kind, _NOT_KEPT, shares)
        heard = [p.heard[cross, index] for p in self._passes]
        rows = [np.arange(p.stop - h.queries.shape[1], p.stop) for p, h in zip(self._passes, heard, strict=True)]
        keys = np.concatenate([h.keys for h in heard], axis=1)
        values = [h.values for h in heard if h.values is not None]
        # A layer without rows of its own looks as far as the one whose rows it uses.
        owner = geometry if shares is None else self._model.geometry[shares]
        windows = [part.window for part in owner.parts if part.role == "k"]
        if not owner.parts:
            windows = [getattr(places[cross, index].module, "sliding_window", None) or 0]
        return LayerAttention(
            index=index, kind=kind, keys=keys, queries=np.concatenate([h.queries for h in heard], axis=1),
            values=np.concatenate(values, axis=1) if values else None,
            weights=_assembled(heard, keys.shape[1]) if self._wanted.weights else None,
            query_rows=np.concatenate(rows).astype(np.int64),
            first_row=heard[0].first, scaling=heard[-1].scaling, window=0 if cross else max(windows, default=0),
            shares=shares,
        )  # fmt: skip


def _goes_on(before: Line, after: Line, *, at_least: bool = False) -> bool:
    """Tell whether `after` has the rows of `before` and perhaps more; with `at_least` whether `before` has hers."""
    shorter, longer = (after, before) if at_least else (before, after)
    ids = [line.tokens[: len(line.tokens) - line.n_pending] for line in (shorter, longer)]
    unknown = [line.n_rows - len(found) for line, found in zip((shorter, longer), ids, strict=True)]
    return unknown[0] == unknown[1] and ids[1][: len(ids[0])] == ids[0] and (at_least or before.n_rows == after.n_rows)


def _cut(made: _Pass, stop: int) -> _Pass:
    """Return a pass without the rows from `stop` on."""
    gone = max(0, made.stop - stop)
    if not gone:
        return made
    heard = {}
    for (cross, index), h in made.heard.items():
        left = max(0, h.queries.shape[1] - gone)
        rows = h.keys.shape[1] if cross else stop - h.first
        heard[cross, index] = replace(
            h, keys=h.keys[:, :rows], queries=h.queries[:, :left],
            values=None if h.values is None else h.values[:, :rows],
            weights=None if h.weights is None else h.weights[:, :left, : None if cross else stop - h.seen],
        )  # fmt: skip
    return _Pass(made.start, made.stop - gone, heard)


def _trimmed(made: _Pass, first: int) -> _Pass:
    """Return a pass without the queries of rows before `first`, in memory of its own."""
    wanted = max(0, made.stop - first)
    heard = {}
    for key, h in made.heard.items():
        gone = max(0, h.queries.shape[1] - wanted)
        heard[key] = h
        if gone:
            weights = None if h.weights is None else h.weights[:, gone:].copy()
            heard[key] = replace(h, queries=h.queries[:, gone:].copy(), weights=weights)
    return _Pass(made.start, made.stop, heard)


def _assembled(heard: list[_Heard], rows: int) -> Floats:
    """Return the weights of several passes in one array, 0 where a pass did not see a key."""
    found = [(h.seen, h.weights) for h in heard if h.weights is not None]
    queries = sum(weights.shape[1] for _, weights in found)
    out: Floats = np.zeros((found[0][1].shape[0], queries, rows), dtype=np.float32)
    at = 0
    for seen, weights in found:
        column = max(0, seen - heard[0].first)
        hidden = max(0, heard[0].first - seen)
        out[:, at : at + weights.shape[1], column : column + weights.shape[2] - hidden] = weights[..., hidden:]
        at += weights.shape[1]
    return out


def _numpy(tensor: Any) -> npt.NDArray[np.float32]:
    import torch

    own = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
    own.copy_(tensor.detach())
    return np.asarray(own.numpy())


# -- weights -------------------------------------------------------------------------------------------------------


def _weights(call: Call, last: int) -> Any:
    """Return the weights `[1, query heads, n, keys]` of the last queries, n is `last` or all.

    What the function returned, where it did. Otherwise they are computed by the function that the model itself would
    use with `eager`, over the same queries and keys: sinks and biases are its own business.
    """
    returned = call.returned[1] if isinstance(call.returned, tuple) else None
    if returned is not None:
        return returned
    eager, family = call.place.eager, type(call.place.module).__name__
    if eager is None:
        raise UnsupportedError(f"{family} has no eager attention, so its weights cannot be computed")
    # sdpa knows no soft cap: releases that take it all the same leave it out, and so did this call.
    dropped = ("is_causal", "softcap") if call.place.implementation == "sdpa" else ("is_causal",)
    mask, options = _additive(call), {k: v for k, v in call.options.items() if k not in dropped}
    query = call.query
    # A bias with a value for each query is not cut: what its axes mean is the model's business.
    if not any(getattr(option, "ndim", 0) > 2 for option in options.values()):
        query = query[:, :, -last:]
        mask = mask if mask is None or mask.shape[2] == 1 else mask[:, :, -last:]
    found = eager(call.place.module, query, call.key, call.value, mask, **options)[1]
    if found is None or found.ndim != 4:
        raise UnsupportedError(f"{family} does not return its weights with eager attention")
    return found


def _additive(call: Call) -> Any:
    """Return the mask of a call as what is added to `q . k`, or None where every query looks at every key."""
    import torch

    queries, keys = call.query.shape[2], call.key.shape[2]
    mask = None if call.mask is None else call.mask[..., :keys]
    if mask is None:
        # The rule of the sdpa implementation: without a mask it is causal from the first key on.
        causal = call.options.get("is_causal")
        causal = getattr(call.place.module, "is_causal", True) if causal is None else causal
        if not causal or queries == 1:
            return None
        mask = torch.ones(queries, keys, dtype=torch.bool, device=call.query.device).tril()[None, None]
    if mask.dtype != torch.bool:
        return mask
    least = torch.finfo(call.query.dtype).min
    return torch.zeros(mask.shape, dtype=call.query.dtype, device=mask.device).masked_fill(~mask, least)

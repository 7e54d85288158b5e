"""Choosing the next token, the same on every engine, device and platform that computes the same logits.

Order: repetition penalty, temperature, top-k, top-p, min-p, then one uniform number. Arithmetic is float64 over float32
logits. Random numbers come from Philox4x64 with the seed as key and the count of numbers drawn so far as counter, so
the whole random state is two integers (docs/spec/file.md section 9).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.errors import FormatError, InputError
from kvsnap.layout import RandomState, Sampler, SamplerState

__all__ = ["choose", "start", "uniform"]

Logits = npt.NDArray[np.float64]


def start(settings: Sampler | None = None) -> SamplerState:
    """Return a sampler at its first draw. Without a seed one is taken from the operating system and recorded."""
    settings = settings or Sampler()
    seed = secrets.randbits(64) if settings.seed is None else settings.seed
    return SamplerState(settings, RandomState(seed))


def uniform(state: RandomState) -> tuple[float, RandomState]:
    """Return the next uniform number in [0, 1) with 53 bits, and the state behind it."""
    if state.algorithm != "philox4x64":
        raise FormatError("unknown random number algorithm", expected="philox4x64", found=state.algorithm)
    raw = np.random.Philox(key=state.seed, counter=state.draws).random_raw()
    return (int(raw) >> 11) * 2.0**-53, replace(state, draws=state.draws + 1)


def choose(logits: npt.NDArray[Any], history: Sequence[int], state: SamplerState) -> tuple[int, float, SamplerState]:
    """Choose one token from `logits` (`[vocab]`, any float dtype) given the ids so far.

    Return (id, natural log-probability under the untouched logits, next state). Greedy takes the first of equal maxima
    and draws no number. Raise `InputError` when a logit is NaN or none is finite, or when a penalty meets an id
    outside the vocabulary.
    """
    scores = np.asarray(logits, dtype=np.float32).astype(np.float64)
    best = float(scores.max()) if scores.size else float("nan")
    if scores.ndim != 1 or not np.isfinite(best):
        raise InputError(
            "logits must be one row with a finite maximum",
            expected="[vocab], finite",
            found=f"{scores.shape}, max {best}",
        )
    log_total = best + float(np.log(np.exp(scores - best).sum()))
    settings = state.settings
    adjusted = _penalised(scores, history, settings.repetition_penalty)
    random = state.random
    if settings.greedy:
        token = int(np.argmax(adjusted))
    else:
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the maximum to minus infinity
            scaled = (adjusted - adjusted.max()) / settings.temperature
        ids, weights = _candidates(scaled, settings)
        number, random = uniform(random)
        cumulated = np.cumsum(weights)
        token = int(ids[min(int(np.searchsorted(cumulated, number * cumulated[-1], side="right")), len(ids) - 1)])
    return token, float(scores[token]) - log_total, SamplerState(settings, random)


def _penalised(scores: Logits, history: Sequence[int], penalty: float) -> Logits:
    if penalty == 1.0 or not history:
        return scores
    seen = np.unique(np.asarray(history, dtype=np.int64))
    if seen[0] < 0 or seen[-1] >= len(scores):
        raise InputError(
            "the history holds ids outside the vocabulary", expected=f"0 to {len(scores) - 1}", found=int(seen[-1])
        )
    out: Logits = scores.copy()
    values = out[seen]
    out[seen] = np.where(values > 0, values / penalty, values * penalty)
    return out


def _candidates(scores: Logits, settings: Sampler) -> tuple[npt.NDArray[np.int64], Logits]:
    """Return candidate ids in ascending order and their unnormalised weights."""
    ids = np.arange(len(scores), dtype=np.int64)
    if 0 < settings.top_k < len(scores):
        # Ties with the k-th best are all kept, so that the result does not depend on a partition's order.
        ids = ids[scores >= np.partition(scores, -settings.top_k)[-settings.top_k]]
    weights = np.exp(scores[ids] - scores[ids].max())
    if settings.top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        kept = order[before < settings.top_p * weights.sum()]
        kept.sort()
        ids, weights = ids[kept], weights[kept]
    if settings.min_p > 0.0:
        kept = np.flatnonzero(weights >= settings.min_p * weights.max())
        ids, weights = ids[kept], weights[kept]
    return ids, weights

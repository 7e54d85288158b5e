"""How far two predictions of the same places are apart: float64 over float32 logits, a block of places at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["TOP", "Divergence", "Prediction", "apart", "joined", "predicted"]

Logits = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

TOP = 5
"""The most probable ids whose overlap is counted."""
_BLOCK_VALUES = 1 << 20
"""Values that a block has at most, unless one row has more: 8 MiB as float64, of which about six are held at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prediction:
    """What logits say of the next id, for each of n places.

    `chosen` int64 `[n]` is the most probable id (the first of equal ones), `nll` float64 `[n]` the negative natural
    log-probability of the id that came next. Where logits are no numbers (NaN, plus infinity, or minus infinity
    throughout) they are -1 and NaN.
    """

    chosen: Ids
    nll: Doubles


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Divergence:
    """How far the predictions of `other` are from those of a reference, for each of n places.

    `kl` float64 `[n]`: KL(reference || other) in nats; `agrees` bool `[n]`: the same most probable id; `overlap`
    float64 `[n]`: the part of the `TOP` most probable ids of the reference that are among those of the other;
    `logit_error` float64 `[n]`: the largest difference of a logit that is finite in both. Where the logits of either
    are no numbers `kl`, `overlap` and `logit_error` are NaN, and `agrees` is False.
    """

    kl: Doubles
    agrees: npt.NDArray[np.bool_]
    overlap: Doubles
    logit_error: Doubles
    other: Prediction


def predicted(logits: Logits, targets: Ids) -> Prediction:
    """Return what logits float32 `[n, vocab]` say, given the ids that came next, int64 `[n]`."""
    chosen, nll = np.full(len(logits), -1, dtype=np.int64), np.full(len(logits), np.nan)
    for part in _blocks(logits):
        _predict(logits[part], _log_softmax(logits[part]), targets[part], chosen[part], nll[part])
    return Prediction(chosen=chosen, nll=nll)


def apart(reference: Logits, other: Logits, targets: Ids) -> Divergence:
    """Compare logits float32 `[n, vocab]` of the same places, given the ids that came next, int64 `[n]`.

    Kullback and Leibler (1951), in nats. Rounding that would make it negative is cut to 0, so that equal logits give
    exactly 0.
    """
    n = len(reference)
    kl, overlap, error = np.full(n, np.nan), np.full(n, np.nan), np.full(n, np.nan)
    agrees = np.zeros(n, dtype=np.bool_)
    chosen, nll = np.full(n, -1, dtype=np.int64), np.full(n, np.nan)
    for part in _blocks(reference):
        mine, theirs = reference[part], other[part]
        p, q = _log_softmax(mine), _log_softmax(theirs)
        _predict(theirs, q, targets[part], chosen[part], nll[part])
        good = ~np.isnan(p[:, 0]) & ~np.isnan(q[:, 0])
        kl[part] = np.where(good, _kl(p, q), np.nan)
        agrees[part] = good & (mine.argmax(axis=1) == theirs.argmax(axis=1))
        overlap[part] = np.where(good, _overlap(mine, theirs), np.nan)
        error[part] = np.where(good, _largest(mine, theirs), np.nan)
    return Divergence(
        kl=kl, agrees=agrees, overlap=overlap, logit_error=error, other=Prediction(chosen=chosen, nll=nll)
    )


def joined(parts: Sequence[Divergence]) -> Divergence:
    """Return what was compared in parts, one behind the other, as one."""
    other = Prediction(
        chosen=np.concatenate([p.other.chosen for p in parts]), nll=np.concatenate([p.other.nll for p in parts])
    )
    return Divergence(
        kl=np.concatenate([p.kl for p in parts]), agrees=np.concatenate([p.agrees for p in parts]),
        overlap=np.concatenate([p.overlap for p in parts]),
        logit_error=np.concatenate([p.logit_error for p in parts]), other=other,
    )  # fmt: skip


def _blocks(logits: Logits) -> Iterator[slice]:
    step = max(1, _BLOCK_VALUES // max(1, logits.shape[1]))
    for first in range(0, len(logits), step):
        yield slice(first, first + step)


def _log_softmax(logits: Logits) -> Doubles:
    """Return natural log-probabilities float64; a row that is no distribution is NaN throughout."""
    best = logits.max(axis=1).astype(np.float64)  # NaN where there is one
    good = np.isfinite(best)
    out: Doubles = logits.astype(np.float64)
    out -= np.where(good, best, 0.0)[:, None]
    out[~good] = np.nan
    out -= np.log(np.exp(out).sum(axis=1))[:, None]
    return out


def _predict(logits: Logits, log_p: Doubles, targets: Ids, chosen: Ids, nll: Doubles) -> None:
    good = ~np.isnan(log_p[:, 0])
    chosen[...] = np.where(good, logits.argmax(axis=1), -1)
    nll[...] = -log_p[np.arange(len(log_p)), targets]


def _kl(p: Doubles, q: Doubles) -> Doubles:
    with np.errstate(invalid="ignore"):
        ratio = p - q  # NaN where both are impossible
        weight = np.exp(p)
        np.multiply(weight, ratio, out=ratio, where=weight > 0)
    ratio[weight == 0] = 0
    found: Doubles = np.maximum(ratio.sum(axis=1), 0.0)
    return found


def _overlap(mine: Logits, theirs: Logits) -> Doubles:
    top = min(TOP, mine.shape[1])
    first, second = _top(mine, top), _top(theirs, top)
    same = (first[:, :, None] == second[:, None, :]).any(axis=2)
    return np.asarray(same.sum(axis=1) / top, dtype=np.float64)


def _top(logits: Logits, top: int) -> Ids:
    return np.asarray(np.argpartition(-logits, top - 1, axis=1)[:, :top], dtype=np.int64)


def _largest(mine: Logits, theirs: Logits) -> Doubles:
    both = np.isfinite(mine) & np.isfinite(theirs)
    difference = np.zeros(mine.shape, dtype=np.float64)
    np.subtract(mine, theirs, out=difference, where=both, dtype=np.float64)
    return np.asarray(np.abs(difference).max(axis=1), dtype=np.float64)

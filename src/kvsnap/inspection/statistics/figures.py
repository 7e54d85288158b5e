"""From sums to figures: heads, channels, distributions, and layers out of their heads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.inspection.statistics.answers import Channels, Distribution, HeadStatistics, LayerStatistics
from kvsnap.inspection.statistics.measuring import HeadMoments, Measured

__all__ = [
    "DEAD_SHARE",
    "LOW_RATIO",
    "OUTLIER_RATIO",
    "channels_of",
    "distribution_of",
    "heads_of",
    "layer_of",
    "low_ratios",
]

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

OUTLIER_RATIO = 4.0
"""A channel is an outlier from so many times the median root mean square of its head on."""
LOW_RATIO = 0.25
"""A row is short up to this part of the median norm."""
DEAD_SHARE = 1e-6
"""A head is dead where less than this part of its energy varies from row to row."""
_NOTHING = 1e-24
"""Part of the energy that rounding may leave where nothing varies."""
_BINS = 64
_REACH = 6.0
_PER_STD = 8
_ENTROPY_REACH = 64 * _PER_STD


def heads_of(measured: Measured, *, of_rows: bool) -> list[HeadStatistics]:
    """Return the figures of each head. Without `of_rows` (a state) those of principal components and rows are None."""
    values = [_spectrum(m) if of_rows else {} for m in measured.heads]
    return [_head(measured, head, values[head], of_rows=of_rows) for head in range(len(measured.heads))]


def _head(measured: Measured, head: int, spectrum: dict[str, Any], *, of_rows: bool) -> HeadStatistics:
    found, moments, norms = measured.found, measured.heads[head], measured.norms[head]
    known = HeadStatistics(
        layer=found.layer, role=found.role, head=found.first_head + head, n_rows=moments.n, dim=found.dim, mean=None,
        std=None, min=None, max=None, mean_norm=None, min_norm=None, min_norm_row=None, max_norm=None,
        max_norm_row=None, n_nan=moments.n_nan, n_infinite=moments.n_infinite, n_left_out=moments.n_left_out,
    )  # fmt: skip
    if not moments.n or not found.dim:
        return known
    mean, std = _mean_std(moments)
    least, most = int(np.nanargmin(norms)), int(np.nanargmax(norms))
    finite = norms[np.isfinite(norms)]
    rms = np.sqrt(_mean_squares(moments))
    middle = float(np.median(rms))
    ratios = rms / middle if middle > 0 else np.zeros(len(rms))
    return replace(
        known, mean=mean, std=std, min=float(moments.low.min()), max=float(moments.high.max()),
        mean_norm=float(finite.mean(dtype=np.float64)), min_norm=float(norms[least]), max_norm=float(norms[most]),
        min_norm_row=int(measured.rows[least]) if of_rows else None,
        max_norm_row=int(measured.rows[most]) if of_rows else None,
        outliers=tuple(int(c) for c in np.flatnonzero(ratios >= OUTLIER_RATIO)) if of_rows else (),
        outlier_ratio=float(ratios.max()) if middle > 0 and of_rows else None,
        n_low_rows=int((finite <= LOW_RATIO * np.median(finite)).sum()) if of_rows and finite.any() else 0,
        **_entropies(measured.spread[head], mean, std), **spectrum,
    )  # fmt: skip


def _mean_std(moments: HeadMoments) -> tuple[float, float]:
    mean = float(moments.mean.mean())
    apart = moments.mean - mean
    return mean, float(np.sqrt(_variances(moments).mean() + (apart * apart).mean()))


def _variances(moments: HeadMoments) -> Doubles:
    diagonal = np.diagonal(moments.scatter) if moments.scatter.ndim == 2 else moments.scatter
    return np.asarray(diagonal / max(1, moments.n))


def _mean_squares(moments: HeadMoments) -> Doubles:
    return np.asarray(_variances(moments) + moments.mean * moments.mean)


def _spectrum(moments: HeadMoments) -> dict[str, Any]:
    """Return what the covariance and the mean row say."""
    energy, varying = float(_mean_squares(moments).sum()), float(_variances(moments).sum())
    if moments.n < 2:
        return {}
    told: dict[str, Any] = {
        "mean_share": 1 - varying / energy if energy > 0 else None, "dead": varying <= DEAD_SHARE * energy,
    }  # fmt: skip
    if moments.scatter.ndim != 2 or varying <= _NOTHING * energy:
        return told
    values = np.linalg.eigvalsh(moments.scatter)[::-1]
    # What rounding leaves of a direction without any variance counts as none.
    values = np.where(values > values[0] * len(values) * np.finfo(np.float64).eps, values, 0.0)
    held = np.cumsum(values) / values.sum()
    for name, share in (("rank_90", 0.9), ("rank_99", 0.99), ("rank_999", 0.999)):
        told[name] = int(np.argmax(held >= share - 1e-12)) + 1
    parts = np.sqrt(values) / np.sqrt(values).sum()
    parts = parts[parts > 0]
    told["effective_rank"] = float(np.exp(-(parts * np.log(parts)).sum()))
    told["participation_ratio"] = float(values.sum() ** 2 / (values * values).sum())
    return told


def _entropies(spread: Floats, mean: float, std: float) -> dict[str, Any]:
    values = spread[np.isfinite(spread).all(axis=1)].reshape(-1)
    if not values.size:
        return {}
    exponents = np.bincount((np.ascontiguousarray(values).view(np.uint32) >> 23) & 255, minlength=256)
    told = {"entropy": 0.0, "exponent_entropy": _bits(exponents)}
    if std > 0:
        cells = np.floor((values.astype(np.float64) - mean) * (_PER_STD / std))
        cells = np.clip(cells, -_ENTROPY_REACH, _ENTROPY_REACH - 1).astype(np.int64) + _ENTROPY_REACH
        told["entropy"] = _bits(np.bincount(cells))
    return told


def _bits(counts: npt.NDArray[np.int64]) -> float:
    shares = counts[counts > 0] / counts.sum()
    return abs(float(-(shares * np.log2(shares)).sum()))


def channels_of(measured: Measured) -> Channels:
    """Return the figures by channel of the heads that were measured."""
    shape = (len(measured.heads), measured.found.dim)
    rms, peak, mean = (np.full(shape, np.nan, np.float32) for _ in range(3))
    for head, moments in enumerate(measured.heads):
        if moments.n:
            rms[head] = np.sqrt(_mean_squares(moments))
            peak[head] = np.maximum(-moments.low, moments.high)
            mean[head] = moments.mean
    found = measured.found
    return Channels(layer=found.layer, role=found.role, first_head=found.first_head, rms=rms, peak=peak, mean=mean)


def distribution_of(parts: Sequence[Measured], layer: LayerStatistics) -> Distribution | None:
    """Return how the values of a layer lie; None without any."""
    if layer.mean is None or layer.std is None or layer.min is None or layer.max is None:
        return None
    pieces = [p.spread[np.isfinite(p.spread).all(axis=2)].reshape(-1) for p in parts]
    values = np.concatenate(pieces).astype(np.float64)
    low = max(layer.min, layer.mean - _REACH * layer.std)
    high = min(layer.max, layer.mean + _REACH * layer.std)
    if high <= low:  # one value
        room = max(0.5, 1e-6 * abs(low))
        low, high = low - room, high + room
    # One bin more at each side for what lies beyond; a value that is the last edge belongs to the last bin.
    places = np.floor((values - low) * (_BINS / (high - low)))
    places[values == high] = _BINS - 1
    counts = np.bincount(np.clip(places, -1, _BINS).astype(np.int64) + 1, minlength=_BINS + 2)
    return Distribution(
        layer=layer.layer, role=layer.role, edges=np.linspace(low, high, _BINS + 1),
        counts=counts[1:-1].astype(np.int64), below=int(counts[0]), above=int(counts[-1]), n_values=len(values),
    )  # fmt: skip


def low_ratios(parts: Sequence[Measured]) -> Doubles | None:
    """Return the norm of each row against the median norm of its head, as the median over the heads, float64 `[rows]`.

    NaN for a row that was left out in all heads. Heads of zeros do not count; None without another. All parts have the
    same rows.
    """
    norms = np.concatenate([p.norms for p in parts])
    norms = norms[np.isfinite(norms).any(axis=1)]
    if not norms.size:
        return None
    if np.isfinite(norms).all():  # the same, and much faster
        middle = np.median(norms, axis=1, keepdims=True)
        ratios = (norms / np.where(middle > 0, middle, 1))[middle[:, 0] > 0]
        return np.asarray(np.median(ratios, axis=0)) if len(ratios) else None
    middle = np.nanmedian(norms, axis=1)
    ratios = norms[middle > 0] / middle[middle > 0, None]
    if not len(ratios):
        return None
    told = np.full(ratios.shape[1], np.nan)
    somewhere = np.isfinite(ratios).any(axis=0)
    told[somewhere] = np.nanmedian(ratios[:, somewhere], axis=0)
    return told


def layer_of(
    parts: Sequence[Measured], heads: Sequence[HeadStatistics], kind: str, *, of_rows: bool
) -> LayerStatistics:
    """Return the figures of one role of one layer from those of its heads."""
    first = parts[0].found
    usable = [(m, p.found.dim) for p in parts for m in p.heads if m.n and p.found.dim]
    weights = np.array([m.n * dim for m, dim in usable], np.float64)
    told: dict[str, float | None] = {"mean": None, "std": None, "min": None, "max": None, "mean_norm": None}
    if usable:
        means, stds = np.array([_mean_std(m) for m, _ in usable]).T
        mean = float(np.average(means, weights=weights))
        variance = np.average(stds**2 + (means - mean) ** 2, weights=weights)
        n_rows = np.array([h.n_rows for h in heads if h.mean_norm is not None], np.float64)
        lengths = np.array([h.mean_norm for h in heads if h.mean_norm is not None], np.float64)
        told = {
            "mean": mean, "std": float(np.sqrt(variance)), "min": min(float(m.low.min()) for m, _ in usable),
            "max": max(float(m.high.max()) for m, _ in usable),
            "mean_norm": float(np.average(lengths, weights=n_rows)),
        }  # fmt: skip
    averaged = ("entropy", "exponent_entropy", "mean_share", "rank_90", "rank_99", "rank_999", "effective_rank",
                "participation_ratio")  # fmt: skip
    return LayerStatistics(
        layer=first.layer, kind=kind, role=first.role, dtype=first.dtype, n_heads=len(heads),
        dim=max(p.found.dim for p in parts), n_rows=len(parts[0].rows), n_held=first.n_rows,
        first_row=first.first_row * first.tokens_per_row if first.grows else 0, tokens_per_row=first.tokens_per_row,
        is_state=not of_rows, nbytes=sum(p.found.nbytes for p in parts), bound=max(p.found.bound for p in parts),
        n_outliers=sum(len(h.outliers) for h in heads), n_dead=sum(h.dead for h in heads),
        outlier_ratio=max((h.outlier_ratio for h in heads if h.outlier_ratio is not None), default=None),
        n_nan=sum(h.n_nan for h in heads), n_infinite=sum(h.n_infinite for h in heads),
        n_left_out=sum(h.n_left_out for h in heads), **told,
        **{name: _average(getattr(h, name) for h in heads) for name in averaged},
    )  # fmt: skip


def _average(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(np.mean(known)) if known else None

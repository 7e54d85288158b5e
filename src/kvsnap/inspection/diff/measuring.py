"""The figures of two tensors that are compared: bits, errors and cosines, by head and by row, block by block.

Bits are compared as they are held, in the wider dtype where the two differ; all else is computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.inspection.diff.answers import HeadDifference, LayerDifference

__all__ = ["ByRow", "Figures", "root_mean_square"]

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

_BLOCK_VALUES = 1 << 16
"""Values of each side in one block: what is computed of them stays in the cache of a core."""


@dataclass(slots=True)
class ByRow:
    """Sums over heads for each row of one layer: squares of d, of a and of b, the largest |d|, cosines, and heads."""

    first: int
    d2: Floats
    a2: Floats
    largest: Floats
    cosine: Floats
    heads: npt.NDArray[np.int64]

    @staticmethod
    def empty(first: int, n_rows: int) -> ByRow:
        """Return sums of nothing."""
        d2, a2, largest, cosine = (np.zeros(n_rows) for _ in range(4))
        return ByRow(first, d2, a2, largest, cosine, np.zeros(n_rows, np.int64))


@dataclass(slots=True)
class _Head:
    """What is known so far of one head. `odd` values are not finite; `out` pairs are left out of the errors."""

    n_rows: int = 0
    n_values: int = 0
    bound: float = 0.0
    n_different: int = 0
    d2: float = 0.0
    a2: float = 0.0
    b2: float = 0.0
    worst_row: float = 0.0
    cosines: float = 0.0
    least_cosine: float = 1.0
    largest: float = 0.0
    absolute: float = 0.0
    row: int | None = None
    first: int | None = None
    odd_a: int = 0
    odd_b: int = 0
    odd: int = 0
    out: int = 0


class Figures:
    """The figures of the heads of one role of one layer. Rows are counted as the tensor counts them."""

    __slots__ = ("_heads",)

    def __init__(self, n_heads: int) -> None:
        self._heads = [_Head() for _ in range(n_heads)]

    def __bool__(self) -> bool:
        """Tell whether any rows were compared."""
        return any(head.n_rows for head in self._heads)

    def add(self, head: int, a: Array, b: Array, first_row: int, bound: float, rows: ByRow) -> None:
        """Add rows of the heads from `head` on: `[heads, rows, dim]` of both, which begin at row `first_row`."""
        heads, n_rows, dim = a.shape
        wide: Any = None if a.dtype == b.dtype else np.float64 if np.float64 in (a.dtype, b.dtype) else np.float32
        own = self._heads[head : head + heads]
        for one in own:
            one.n_rows += n_rows
            one.n_values += n_rows * dim
            one.bound = max(one.bound, bound)
        step = max(1, _BLOCK_VALUES // max(1, heads * dim))
        for start in range(0, n_rows, step):
            left, right = (values[:, start : start + step] for values in (a, b))
            if wide is not None:
                left, right = np.asarray(left, wide), np.asarray(right, wide)
            _block(own, left, right, first_row + start, rows)

    def heads(self, layer: int, role: str, tokens_per_row: int) -> list[HeadDifference]:
        """Return the figures of each head."""
        return [
            HeadDifference(
                layer=layer, role=role, head=h, row=_times(one.row, tokens_per_row), n_nonfinite_differ=one.odd,
                **_shared([one], tokens_per_row),
            )
            for h, one in enumerate(self._heads)
            if one.n_rows
        ]  # fmt: skip

    def layer(self, tokens_per_row: int, **known: Any) -> LayerDifference:
        """Return the figures of all heads together; `known` are layer, role, kind, dtype, shapes and similarity."""
        heads = [h for h, one in enumerate(self._heads) if one.n_rows]
        worst = max(heads, key=lambda h: self._heads[h].largest)
        row = self._heads[worst].row
        told = _shared([self._heads[h] for h in heads], tokens_per_row)
        told["n_rows"] = max(self._heads[h].n_rows for h in heads)
        return LayerDifference(head=None if row is None else worst, row=_times(row, tokens_per_row), **told, **known)


def _shared(heads: Sequence[_Head], tokens_per_row: int) -> dict[str, Any]:
    """Return the figures that heads and layers have alike, over some heads."""
    n_rows, n_values = sum(one.n_rows for one in heads), sum(one.n_values for one in heads)
    d2, a2, b2 = sum(one.d2 for one in heads), sum(one.a2 for one in heads), sum(one.b2 for one in heads)
    n_taken = n_values - sum(one.out for one in heads)
    bound = max(one.bound for one in heads)
    told = bound > 0 and math.isfinite(bound)
    return {
        "n_rows": n_rows,
        "n_values": n_values,
        "n_different": sum(one.n_different for one in heads),
        "relative_error": 0.0 if not d2 else math.sqrt(d2) / math.sqrt(a2) if a2 else math.inf,
        "max_row_error": max(one.worst_row for one in heads),
        "cosine_mean": sum(one.cosines for one in heads) / n_rows,
        "cosine_min": min(one.least_cosine for one in heads),
        "max_abs": max(one.largest for one in heads),
        "mean_abs": sum(one.absolute for one in heads) / max(1, n_taken),
        "rms_a": math.sqrt(a2 / n_taken) if n_taken else 0.0,
        "rms_b": math.sqrt(b2 / n_taken) if n_taken else 0.0,
        "first_row": _times(min((one.first for one in heads if one.first is not None), default=None), tokens_per_row),
        "nonfinite_a": sum(one.odd_a for one in heads),
        "nonfinite_b": sum(one.odd_b for one in heads),
        "bound": bound,
        "within_bound": all(one.largest <= one.bound and not one.odd for one in heads) if told else None,
    }


def _block(heads: Sequence[_Head], a: Array, b: Array, first_row: int, rows: ByRow) -> None:
    """Add one block of rows `[heads, rows, dim]` of one dtype."""
    bits = np.dtype(f"u{a.dtype.itemsize}")
    other = a.view(bits) != b.view(bits)
    differs = bool(other.any())
    with np.errstate(invalid="ignore", over="ignore"):
        left = a.astype(np.float64)
        right = b.astype(np.float64) if differs else left
        d = left - right
    if not np.isfinite(d).all():
        _leave_out(heads, left, right, d)
    a2 = np.einsum("hrd,hrd->hr", left, left)
    b2 = np.einsum("hrd,hrd->hr", right, right) if differs else a2
    place = slice(first_row - rows.first, first_row - rows.first + a.shape[1])
    rows.a2[place] += a2.sum(axis=0)
    rows.heads[place] += len(heads)
    cosine = np.ones(a2.shape)
    if differs:
        d2 = np.einsum("hrd,hrd->hr", d, d)
        with np.errstate(invalid="ignore", divide="ignore"):
            # By each root apart: a product of two squares may be too small or too large for a float64.
            cosine = np.einsum("hrd,hrd->hr", left, right) / np.sqrt(a2) / np.sqrt(b2)
        cosine = np.where(d2 == 0, 1.0, np.where((a2 == 0) | (b2 == 0), 0.0, np.clip(cosine, -1.0, 1.0)))
        np.abs(d, out=d)
        largest = d.max(axis=2, initial=0.0)
        _errors(heads, other, d, largest, np.where(d2 == 0, 0.0, _ratio(d2, a2)), first_row)
        for one, squares in zip(heads, d2.sum(axis=1).tolist(), strict=True):
            one.d2 += squares
        rows.d2[place] += d2.sum(axis=0)
        rows.largest[place] = np.maximum(rows.largest[place], largest.max(axis=0, initial=0.0))
    rows.cosine[place] += cosine.sum(axis=0)
    figures = a2.sum(axis=1), b2.sum(axis=1), cosine.sum(axis=1), cosine.min(axis=1, initial=1.0)
    for one, own, others, cosines, least in zip(heads, *(f.tolist() for f in figures), strict=True):
        one.a2 += own
        one.b2 += others
        one.cosines += cosines
        one.least_cosine = min(one.least_cosine, least)


def _ratio(d2: Floats, a2: Floats) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.sqrt(d2) / np.sqrt(a2))


def _errors(heads: Sequence[_Head], other: Array, d: Floats, largest: Floats, ratio: Floats, first_row: int) -> None:
    """Add a block in which bits differ: `d` are absolute values, `largest` and `ratio` those of each row."""
    counts, totals = np.count_nonzero(other, axis=(1, 2)), d.sum(axis=(1, 2)).tolist()
    places, worst = np.argmax(largest, axis=1).tolist(), ratio.max(axis=1, initial=0.0).tolist()
    for i, one in enumerate(heads):
        if not counts[i]:
            continue
        one.n_different += int(counts[i])
        if one.first is None:
            one.first = first_row + int(np.argmax(other[i].any(axis=1)))
        one.absolute += totals[i]
        one.worst_row = max(one.worst_row, worst[i])
        most = float(largest[i, places[i]])
        if most > one.largest:
            one.largest, one.row = most, first_row + places[i]


def _leave_out(heads: Sequence[_Head], left: Floats, right: Floats, d: Floats) -> None:
    """Count values that are not finite, and let those pairs be two zeros. `left` and `right` may be one array."""
    bad_a, bad_b = ~np.isfinite(left), ~np.isfinite(right)
    bad = bad_a | bad_b
    same = (np.isnan(left) & np.isnan(right)) | (left == right)
    for i, one in enumerate(heads):
        one.odd_a += int(bad_a[i].sum())
        one.odd_b += int(bad_b[i].sum())
        one.odd += int((bad[i] & ~same[i]).sum())
        one.out += int(bad[i].sum())
    for values in (left, right, d):
        values[bad] = 0.0


def root_mean_square(values: Array) -> tuple[float, int]:
    """Return the root mean square of the finite values of `[heads, rows, dim]`, and how many are not finite."""
    total, odd = 0.0, 0
    step = max(1, _BLOCK_VALUES // max(1, values.shape[0] * values.shape[2]))
    for start in range(0, values.shape[1], step):
        block = values[:, start : start + step].astype(np.float64)
        bad = ~np.isfinite(block)
        odd += int(bad.sum())
        block[bad] = 0.0
        total += float(np.vdot(block, block))
    n_taken = values.size - odd
    return math.sqrt(total / n_taken) if n_taken else 0.0, odd


def _times(row: int | None, tokens_per_row: int) -> int | None:
    return None if row is None else row * tokens_per_row

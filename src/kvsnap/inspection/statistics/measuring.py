"""One pass over the rows of one role of one layer: moments, norms, and the rows that later figures are taken of.

Sums are float64. Blocks are put together as in Chan, Golub and LeVeque 1983: each has its own mean, so that a mean far
from 0, or one that moves along the sequence, costs no digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from kvsnap.inspection.values import HeadRows

__all__ = [
    "DIM_LIMIT",
    "RUN_ROWS",
    "HeadMoments",
    "Measured",
    "Spans",
    "has_products",
    "measure",
    "numbers_of",
    "spans_for",
]

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
Spans = tuple[tuple[int, int], ...]

DIM_LIMIT = 1024
"""Widest row that principal components are told of: their matrix has the square of it in float64."""
PRODUCT_BYTES = 1 << 28
"""Most memory that the matrices of all heads of a tensor may take; beyond, no principal components are told."""
RUN_ROWS = 128
"""Rows in one run of a sample."""
_SPREAD_VALUES = 1 << 17
"""Values that distribution and entropies are taken of, of one role of one layer."""
_STEP_VALUES = 1 << 17
_BLOCK_BYTES = 16 << 20


def spans_for(n_rows: int, sample: int | None) -> Spans:
    """Return the rows to look at: all, or at most `sample` of them in runs at equal distances, both ends included.

    The same numbers give the same rows.
    """
    if sample is None or sample >= n_rows:
        return ((0, n_rows),) if n_rows else ()
    if sample < 2:
        return ((0, 1),)
    n_runs = max(2, sample // RUN_ROWS)
    length = sample // n_runs
    return tuple((at, at + length) for at in ((n_rows - length) * i // (n_runs - 1) for i in range(n_runs)))


def has_products(found: HeadRows) -> bool:
    """Tell whether the matrices that principal components need are small enough."""
    return found.dim <= DIM_LIMIT and 8 * found.n_heads * found.dim**2 <= PRODUCT_BYTES


def numbers_of(found: HeadRows, spans: Spans) -> Numbers:
    """Return the row of the sequence that each row of the spans begins with, int64."""
    if not spans:
        return np.zeros(0, np.int64)
    places = np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in spans])
    return (places + found.first_row) * found.tokens_per_row if found.grows else places


@dataclass(slots=True)
class HeadMoments:
    """What is summed up of one head. `scatter` is the sum of products of deviations from the mean.

    It is `[dim, dim]`, or only its diagonal `[dim]` where a row is wider than `DIM_LIMIT`. `n` counts the rows without
    NaN and infinite values; all sums are over these.
    """

    mean: Doubles
    scatter: Doubles
    low: Doubles
    high: Doubles
    n: int = 0
    n_nan: int = 0
    n_infinite: int = 0
    n_left_out: int = 0
    digest: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)

    @classmethod
    def empty(cls, dim: int, *, products: bool) -> HeadMoments:
        """Return the moments of no rows."""
        shape = (dim, dim) if products else (dim,)
        return cls(np.zeros(dim), np.zeros(shape), np.full(dim, np.inf), np.full(dim, -np.inf))

    def add(self, rows: Floats, scratch: Doubles) -> Doubles:
        """Take in rows `[n, dim]` and return their norms, NaN for a row that is left out. `scratch` is overwritten."""
        self.digest.update(np.ascontiguousarray(rows).data)
        with np.errstate(invalid="ignore"):
            low, high = rows.min(axis=0), rows.max(axis=0)
        if np.isfinite(low).all() and np.isfinite(high).all():
            return self._add_finite(rows, low, high, scratch)
        finite = np.isfinite(rows)
        whole = finite.all(axis=1)
        nan = int(np.isnan(rows).sum())
        self.n_nan += nan
        self.n_infinite += int(finite.size - finite.sum()) - nan
        self.n_left_out += int(len(rows) - whole.sum())
        norms = np.full(len(rows), np.nan)
        if whole.any():
            kept = rows[whole]
            norms[whole] = self._add_finite(kept, kept.min(axis=0), kept.max(axis=0), scratch)
        return norms

    def _add_finite(self, rows: Floats, low: Floats, high: Floats, scratch: Doubles) -> Doubles:
        n = len(rows)
        np.minimum(self.low, low, out=self.low)
        np.maximum(self.high, high, out=self.high)
        wide = scratch[:n]
        wide[...] = rows
        norms: Doubles = np.sqrt(np.einsum("nd,nd->n", wide, wide))
        mean = np.ones(n) @ wide / n
        wide -= mean
        scatter = wide.T @ wide if self.scatter.ndim == 2 else np.einsum("nd,nd->d", wide, wide)
        step, both = mean - self.mean, self.n + n
        apart = np.outer(step, step) if self.scatter.ndim == 2 else step * step
        self.scatter += scatter + apart * (self.n * n / both)
        self.mean += step * (n / both)
        self.n = both
        return norms


@dataclass(slots=True)
class Measured:
    """What one pass over a `HeadRows` gives.

    `rows` are the rows of the sequence that were looked at, `norms` float64 `[heads, rows]`: that of
    float32 values may be beyond float32. `spread` is float32
    `[heads, some rows, dim]`, rows at equal distances; `picked` those that were asked for.
    """

    found: HeadRows
    heads: list[HeadMoments]
    rows: Numbers
    norms: Doubles
    spread: Floats
    picked: Floats


def measure(
    found: HeadRows, spans: Spans, picks: Numbers, *, products: bool, advance: Callable[[int], None]
) -> Measured:
    """Pass over these rows once. `picks` are rows of the sequence to be kept, in order, all of them looked at.

    `advance` is told how many rows are done. At most one tensor, or of a session what of it holds the rows, is in
    memory, with one block of 16 MiB. Raise `DamagedError` as the tensor does.
    """
    rows = numbers_of(found, spans)
    products = products and has_products(found)
    heads = [HeadMoments.empty(found.dim, products=products) for _ in range(found.n_heads)]
    norms = np.empty((found.n_heads, len(rows)))
    stride = max(1, -(-len(rows) * found.n_heads * found.dim // _SPREAD_VALUES))
    wanted = np.searchsorted(rows, picks)
    spread, picked = [], []
    step = max(1, _STEP_VALUES // max(1, found.dim))
    block_bytes = min(_BLOCK_BYTES, 4 * step * found.n_heads * found.dim)
    scratch = np.empty((min(step, max(1, len(rows))), found.dim))
    for at, block in _placed(found, spans, block_bytes):
        stop = at + block.shape[1]
        for head, moments in enumerate(heads):
            norms[head, at:stop] = moments.add(block[head], scratch)
        spread.append(block[:, -at % stride :: stride].copy())
        here = wanted[(wanted >= at) & (wanted < stop)] - at
        if len(here):
            picked.append(block[:, here])
        advance(stop)
    nothing: Floats = np.zeros((found.n_heads, 0, found.dim), np.float32)
    return Measured(
        found, heads, rows, norms, np.concatenate([nothing, *spread], axis=1),
        np.concatenate([nothing, *picked], axis=1),
    )  # fmt: skip


def _placed(found: HeadRows, spans: Sequence[tuple[int, int]], block_bytes: int) -> Iterator[tuple[int, Floats]]:
    """Yield blocks with the number of rows that were looked at before."""
    at = 0
    for _, block in found.blocks_of(spans, block_bytes):
        yield at, block
        at += block.shape[1]

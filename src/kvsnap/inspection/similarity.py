"""Linear CKA: how alike two sets of vectors of the same rows are, whatever the axes they are told in."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

__all__ = ["LEAST_ROWS", "centred", "cka_between", "gram"]

Floats = npt.NDArray[np.float64]

LEAST_ROWS = 4
"""Rows that the estimator without bias needs."""


def gram(values: npt.NDArray[np.float32]) -> Floats:
    """Return the products of each row with each, float64 `[rows, rows]`, of float32 `[heads, rows, dim]`.

    Heads are taken together; those of further tensors are added. Values that are no finite numbers count as 0.
    """
    with np.errstate(invalid="ignore"):  # a signalling NaN
        wide = np.asarray(values, np.float64)
    rows = wide.transpose(1, 0, 2).reshape(values.shape[1], -1)
    rows = np.where(np.isfinite(rows), rows, 0.0)
    rows -= rows.mean(axis=0, keepdims=True)  # centred columns: the products keep their precision
    return np.asarray(rows @ rows.T)


def centred(products: Floats, *, biased: bool) -> Floats:
    """Return products that are centred so that HSIC is their inner product, as unit vectors of length rows^2.

    Without bias the diagonal is 0 and centring follows Song et al. 2012 ("Feature Selection via Dependence
    Maximization"); with it the mean of each row and column is taken off (Gretton et al. 2005). NaN where nothing is
    left: all rows alike.
    """
    n = len(products)
    if biased:
        row = products.mean(axis=0)
        made = products - row[None] - row[:, None] + row.mean()
    else:
        made = products.copy()
        np.fill_diagonal(made, 0.0)
        row = made.sum(axis=0) / (n - 2)
        made = made - row[None] - row[:, None] + row.sum() / (n - 1)
        np.fill_diagonal(made, 0.0)
    length = float(np.sqrt(np.vdot(made, made)))
    # What rounding leaves of rows that are all alike is no direction.
    if length <= 1e-12 * n * max(1e-300, float(np.abs(products).max(initial=0.0))):
        return np.full(n * n, np.nan)
    return np.asarray(made.reshape(-1) / length)


def cka_between(a: Mapping[int, Floats], b: Mapping[int, Floats], *, biased: bool) -> Floats:
    """Return linear CKA of each of `a` with each of `b` (products of rows by layer), float64 `[len(a), len(b)]`."""
    left = np.stack([centred(products, biased=biased) for products in a.values()])
    right = np.stack([centred(products, biased=biased) for products in b.values()])
    return np.asarray(left @ right.T)

"""Along the sequence: norms by row and layer, rows that may be sinks, and which layers are alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.inspection.similarity import LEAST_ROWS, centred, gram
from kvsnap.inspection.statistics.answers import RowNorms, Similarity, Sink, token_of
from kvsnap.inspection.statistics.figures import LOW_RATIO, low_ratios
from kvsnap.inspection.statistics.measuring import Measured, Numbers, numbers_of, spans_for
from kvsnap.inspection.values import HeadRows

__all__ = ["LONGEST", "Alike", "Norms", "Sinks", "picks_of"]

COLUMNS = 1024
"""Most columns of a matrix of norms by layer and row."""
LONGEST = 1 << 24
"""Rows of a sequence beyond which norms are not told by row."""
COMMON_ROWS = 256
"""Most rows that the similarity of layers is told from: products of each with each are kept, for every layer."""
_SINKS = 32
_LEAST_FOR_SINKS = 8


class Norms:
    """Gathers the norms of one role, layer by layer: sums by column, and by row over all layers."""

    def __init__(self, role: str, n_rows: int) -> None:
        self.role, self.n_rows = role, n_rows
        columns = max(1, min(COLUMNS, n_rows))
        self._edges = np.arange(columns + 1, dtype=np.int64) * n_rows // columns
        self._sums = np.zeros(n_rows)
        self._counts = np.zeros(n_rows, np.int64)
        self._lines: dict[int, list[npt.NDArray[np.float64]]] = {}

    def add(self, measured: Measured) -> None:
        """Take in the heads that were measured."""
        per_row = measured.found.tokens_per_row if measured.found.grows else 1
        finite = np.isfinite(measured.norms)
        sums = np.where(finite, measured.norms, 0).sum(axis=0, dtype=np.float64)
        counts = finite.sum(axis=0)
        rows = (measured.rows[:, None] + np.arange(per_row)).reshape(-1)
        inside = rows < self.n_rows
        rows, sums, counts = rows[inside], np.repeat(sums, per_row)[inside], np.repeat(counts, per_row)[inside]
        self._sums[rows] += sums
        self._counts[rows] += counts
        places = np.searchsorted(self._edges, rows, side="right") - 1
        n_columns = len(self._edges) - 1
        line = self._lines.setdefault(measured.found.layer, [np.zeros(n_columns), np.zeros(n_columns)])
        line[0] += np.bincount(places, weights=sums, minlength=n_columns)
        line[1] += np.bincount(places, weights=counts, minlength=n_columns)

    def told(self) -> RowNorms:
        """Return what was gathered."""
        lines = np.array([_means(sums, counts) for sums, counts in self._lines.values()])
        with np.errstate(over="ignore"):  # norms beyond float32 are told as infinite
            return RowNorms(
                role=self.role, layers=tuple(self._lines), edges=self._edges, by_layer=lines.astype(np.float32),
                by_row=_means(self._sums, self._counts).astype(np.float32),
            )  # fmt: skip


def _means(sums: npt.NDArray[np.float64], counts: npt.NDArray[np.number[Any]]) -> npt.NDArray[np.float64]:
    return np.asarray(np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0))


class Sinks:
    """Gathers rows that may be attention sinks: those whose values are short in many layers."""

    def __init__(self) -> None:
        self.n_layers = 0
        self._found: dict[int, list[tuple[int, float, float | None]]] = {}

    def add(self, layer: int, parts: Mapping[str, Sequence[Measured]]) -> None:
        """Look at one layer: at its values, and at its keys where they are apart.

        Heads that hold other rows than each other have no common ones to look at.
        """
        values = parts.get("v") or parts.get("latent") or ()
        if not _of_rows(values, values) or len(values[0].rows) < _LEAST_FOR_SINKS:
            return
        ratios = low_ratios(values)
        if ratios is None:
            return
        self.n_layers += 1
        keys = parts.get("k")
        of_keys = low_ratios(keys) if keys and _of_rows(keys, values) else None
        low = np.flatnonzero(ratios <= LOW_RATIO)
        for place in low[np.argsort(ratios[low], kind="stable")][:_SINKS].tolist():
            of_key = None if of_keys is None else float(of_keys[place])
            self._found.setdefault(int(values[0].rows[place]), []).append((layer, float(ratios[place]), of_key))

    def told(self, tokens: Sequence[int], n_rows: int) -> tuple[Sink, ...]:
        """Return the rows that are short in an eighth of the layers or more, those of most layers first.

        `tokens` are those of the last of `n_rows` rows.
        """
        least = max(1, self.n_layers // 8)
        made = []
        for row, seen in self._found.items():
            if len(seen) >= least:
                of_keys = [k for _, _, k in seen if k is not None]
                made.append(Sink(
                    row=row, token=token_of(tokens, n_rows, row), n_layers=len(seen),
                    layers=tuple(layer for layer, _, _ in seen), value_ratio=float(np.mean([v for _, v, _ in seen])),
                    key_ratio=float(np.mean(of_keys)) if of_keys else None,
                ))  # fmt: skip
        return tuple(sorted(made, key=lambda s: (-s.n_layers, s.row))[:_SINKS])


def _of_rows(parts: Sequence[Measured], others: Sequence[Measured]) -> bool:
    """Tell whether all of these are of the rows that the first of the others is of."""
    return bool(parts) and all(np.array_equal(one.rows, others[0].rows) for one in parts)


def picks_of(found: Sequence[HeadRows], sample: int | None) -> Numbers:
    """Return the rows by which layers of one role are compared: at most `COMMON_ROWS` of those that all look at.

    They are at equal distances. Empty where there are too few, or only one layer.
    """
    nothing = np.zeros(0, np.int64)
    if len({f.layer for f in found}) < 2 or len({f.tokens_per_row for f in found}) > 1:
        return nothing
    common: Numbers | None = None
    for key in dict.fromkeys((f.first_row, f.n_rows) for f in found):
        one = next(f for f in found if (f.first_row, f.n_rows) == key)
        rows = numbers_of(one, spans_for(one.n_rows, sample))
        common = rows if common is None else np.intersect1d(common, rows, assume_unique=True)
    if common is None or len(common) < LEAST_ROWS:
        return nothing
    if len(common) <= COMMON_ROWS:
        return common
    return np.asarray(common[np.arange(COMMON_ROWS) * (len(common) - 1) // (COMMON_ROWS - 1)])


class Alike:
    """Gathers what the similarity of the layers of one role needs: a unit vector for each, of float32."""

    def __init__(self, role: str, n_rows: int) -> None:
        self.role, self.n_rows = role, n_rows
        self._lines: dict[int, npt.NDArray[np.float32]] = {}

    def add(self, parts: Sequence[Measured]) -> None:
        """Take in a layer, all its heads."""
        if self.n_rows:
            rows = [p.picked.transpose(1, 0, 2).reshape(self.n_rows, -1) for p in parts]
            products = gram(np.concatenate(rows, axis=1)[None])
            self._lines[parts[0].found.layer] = centred(products, biased=False).astype(np.float32)

    def told(self) -> Similarity | None:
        """Return how alike the layers are; None where they could not be compared."""
        if not self._lines:
            return None
        lines = list(self._lines.values())
        values = np.array([[float(np.dot(a, b)) for b in lines] for a in lines], np.float32)
        return Similarity(role=self.role, layers=tuple(self._lines), n_rows=self.n_rows, values=values)

"""Two caches compared: `diff`. Every byte that is compared was read and checked; one tensor of each side at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.errors import InputError
from kvsnap.inspection import similarity
from kvsnap.inspection.diff import besides
from kvsnap.inspection.diff.alignment import align
from kvsnap.inspection.diff.answers import (
    Diff,
    HeadDifference,
    LayerDifference,
    PositionDifference,
    Similarity,
)
from kvsnap.inspection.diff.measuring import ByRow, Figures, root_mean_square
from kvsnap.inspection.diff.pairing import LeftOut, Pair, Piece, plan
from kvsnap.inspection.diff.sides import growth_of, opened, verdict_of
from kvsnap.inspection.values import HeadRows
from kvsnap.layout import Snapshot
from kvsnap.protocols import Progress
from kvsnap.results import numbers

__all__ = ["diff"]

Floats = npt.NDArray[np.float64]
Path = str | os.PathLike[str]

_COLUMNS = 256
"""Columns of the layer x place matrices, at most."""
_SAMPLE = 256
"""Rows that similarity is computed from, at most."""


def diff(
    a: Snapshot | Path,
    b: Snapshot | Path,
    *,
    layers: Sequence[int] | None = None,
    all_rows: bool = False,
    similar: bool | None = None,
    detokenize: Callable[[Sequence[int]], str] | None = None,
    key_a: bytes | None = None,
    key_b: bytes | None = None,
    commit_a: int | None = None,
    commit_b: int | None = None,
    progress: Progress | None = None,
) -> Diff:
    """Compare two caches: of one model (encodings, runs, formats, turns of a session) or of two variants of one.

    `a` and `b` are files of any format or snapshots; a session is taken at its last commit, or at `commit_a`,
    `commit_b`. Rows are compared by their place, as far as both have the same input: the same ids and positions from
    the first on. With `all_rows` those behind are compared as well; their inputs are not the same. `layers` keeps these
    layers only, and the verdict is of them. `similar` computes linear CKA between all layers; None: where the models
    are not the same. `detokenize` turns ids into the text around the first that differs. `progress` is told (done,
    total) bytes.

    Raise `InputError` for a layer that neither side has, or a shard that is compared with anything but the same shard
    of another cache; what `load` raises, and `DamagedError` for bytes that are not as they were written.
    """
    left, side_a = opened(a, key_a, commit_a)
    right, side_b = opened(b, key_b, commit_b)
    _check(left, right, layers)
    aligned = align(left, right, (detokenize, detokenize))
    fields = besides.fields_of(left, right)
    known = besides.same_model(fields)
    pairs, out, other_shape = plan(left, right, aligned, layers, all_rows=all_rows)
    wanted = similar if similar is not None else known is False or other_shape
    longest = max(left.n_rows, right.n_rows)
    work = _Work(left, right, pairs, out, longest if all_rows else aligned.n_rows, wanted=wanted, progress=progress)
    for pair in pairs:
        work.compare(pair)
    heads, by_layer, places, alike = work.answers()
    if aligned.n_rows < longest and not all_rows:
        what = f"rows {aligned.n_rows:,} to {longest - 1:,}"
        one = aligned.n_rows in (left.n_rows, right.n_rows)
        out.say(what, "one side ends before them" if one else "their inputs differ")
    same_input = left.n_rows == right.n_rows == aligned.n_rows
    verdict, says = verdict_of(
        aligned, by_layer, heads, other := tuple(besides.others_of(left, right, aligned.n_rows, layers)), fields,
        out.all(), other_shape=other_shape, all_rows=all_rows, only=layers,
    )  # fmt: skip
    growth, lengths, rules = growth_of(left, right, layers)
    return Diff(
        a=side_a, b=side_b, verdict=verdict, says=says, same_model=False if other_shape else known, all_rows=all_rows,
        tokens=aligned, identity=fields, layers=by_layer, heads=heads, positions=places, similarity=alike,
        growth=growth, lengths=lengths, rules=rules, others=other, not_compared=out.all(),
        logits=besides.logits_of(left, right) if same_input else None,
    )  # fmt: skip


def _check(a: Snapshot, b: Snapshot, layers: Sequence[int] | None) -> None:
    shards = a.shard, b.shard
    ranks = [None if shard is None else (shard.index, shard.count) for shard in shards]
    if ranks[0] != ranks[1]:
        raise InputError(
            "a shard holds some of the heads: compare it with the same shard of another cache, or join the shards",
            expected=str(shards[0] or "a whole cache"), found=str(shards[1] or "a whole cache"),
        )  # fmt: skip
    known = {layer.index for side in (a, b) for layer in side.layers}
    for layer in layers or ():
        if layer not in known:
            raise InputError("neither side has this layer", expected=numbers(known), found=layer)


@dataclass(slots=True)
class _Place:
    """Sums by row over the layers of one role, and by span of rows of each layer."""

    first: int
    edges: npt.NDArray[np.int64]
    d2: Floats
    a2: Floats
    cosine: Floats
    heads: npt.NDArray[np.int64]
    layers: list[int] = field(default_factory=list)
    spans: list[tuple[Floats, Floats, Floats]] = field(default_factory=list)

    @staticmethod
    def over(pairs: Iterable[Pair]) -> _Place:
        """Return sums of nothing over the rows of these."""
        first, stop = min(p.start for p in pairs), max(p.stop for p in pairs)
        n = stop - first
        edges = np.unique(np.linspace(first, stop, min(n, _COLUMNS) + 1).round().astype(np.int64))
        return _Place(first, edges, np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n, np.int64))

    def add(self, layer: int, rows: ByRow) -> None:
        """Add the rows of one layer."""
        place = slice(rows.first - self.first, rows.first - self.first + len(rows.d2))
        for name in ("d2", "a2", "cosine", "heads"):
            getattr(self, name)[place] += getattr(rows, name)
        at = np.clip(self.edges - rows.first, 0, len(rows.d2))
        d2, a2, cosine = (_by_span(np.add, values, at) for values in (rows.d2, rows.a2, rows.cosine))
        heads = _by_span(np.add, rows.heads.astype(np.float64), at)
        largest = _by_span(np.maximum, rows.largest, at)
        self.layers.append(layer)
        self.spans.append((
            np.where(heads > 0, _ratios(d2, a2), np.nan), _shares(cosine, heads), np.where(heads > 0, largest, np.nan)
        ))  # fmt: skip

    def answer(self, role: str, tokens_per_row: int) -> PositionDifference:
        """Return the curves and the matrices."""
        held = np.flatnonzero(self.heads)
        errors, cosines, largest = (np.stack([span[i] for span in self.spans]) for i in range(3))
        return PositionDifference(
            role=role, tokens_per_row=tokens_per_row, rows=(held + self.first) * tokens_per_row,
            relative_error=_ratios(self.d2, self.a2)[held], cosine=_shares(self.cosine, self.heads)[held],
            layers=tuple(self.layers), edges=self.edges * tokens_per_row, layer_relative_error=errors,
            layer_cosine=cosines, layer_max_abs=largest,
        )  # fmt: skip


def _by_span(how: np.ufunc, values: Floats, at: npt.NDArray[np.int64]) -> Floats:
    """Return sums, or what else is asked for, over the spans between these places; 0 for empty ones."""
    made, filled = np.zeros(len(at) - 1), at[:-1] < at[1:]
    if filled.any():
        made[filled] = how.reduceat(values, at[:-1][filled])
    return made


def _ratios(d2: Floats, a2: Floats) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(d2 == 0, 0.0, np.sqrt(d2) / np.sqrt(a2)))


def _shares(total: Floats, count: npt.NDArray[Any]) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(count > 0, total / count, np.nan))


class _Work:
    """One comparison while it is made."""

    def __init__(
        self, a: Snapshot, b: Snapshot, pairs: Sequence[Pair], out: LeftOut, n_rows: int, *, wanted: bool,
        progress: Progress | None,
    ) -> None:  # fmt: skip
        self._kinds = [{layer.index: layer.kind for layer in side.layers} for side in (a, b)]
        self._progress, self._done = progress, 0
        self._total = max(1, sum(rows.nbytes for pair in pairs for rows in (*pair.a, *pair.b)))
        self._last: dict[str, tuple[HeadRows, npt.NDArray[Any]]] = {}
        self._heads: list[HeadDifference] = []
        self._layers: list[LayerDifference] = []
        groups: dict[tuple[str, int], list[Pair]] = {}
        for pair in pairs:
            groups.setdefault((pair.role, pair.tokens_per_row), []).append(pair)
        self._places = {
            key: _Place.over(own)
            for key, found in groups.items()
            if (own := [p for p in found if p.grows and p.pieces])
        }
        self._samples = _samples(pairs, n_rows, out) if wanted else {}
        self._grams: dict[tuple[str, int], tuple[dict[int, Floats], dict[int, Floats]]] = {
            key: ({}, {}) for key in self._samples
        }

    def compare(self, pair: Pair) -> None:
        """Compare one role of one layer."""
        key = pair.role, pair.tokens_per_row
        known: dict[str, Any] = {
            "layer": pair.layer, "role": pair.role, "kind": _both(*(k.get(pair.layer, "") for k in self._kinds)),
            "dtype": _both(*(found[0].dtype if found else "" for found in (pair.a, pair.b))),
            "heads_a": sum(r.n_heads for r in pair.a), "heads_b": sum(r.n_heads for r in pair.b),
            "dim_a": max((r.dim for r in pair.a), default=0), "dim_b": max((r.dim for r in pair.b), default=0),
            "cka": None,
        }  # fmt: skip
        if pair.pieces:
            rows = ByRow.empty(pair.start, pair.stop - pair.start)
            figures = Figures(known["heads_a"])
            for piece in pair.pieces:
                left, right = self._of_piece("a", piece.a, piece), self._of_piece("b", piece.b, piece)
                figures.add(piece.head, left, right, piece.start, piece.a.bound + piece.b.bound, rows)
                del left, right  # not while the next ones are read
            self._heads += figures.heads(pair.layer, pair.role, pair.tokens_per_row)
            self._layers.append(figures.layer(pair.tokens_per_row, **known))
            if pair.grows:
                self._places[key].add(pair.layer, rows)
        elif pair.start < pair.stop:
            self._layers.append(self._sizes(pair, known))
        self._add_grams(pair)
        self._pass([*pair.a, *pair.b])

    def _read(self, name: str, rows: HeadRows) -> npt.NDArray[Any]:
        """Return the values of a tensor, kept until another one of that side is wanted."""
        if name not in self._last or self._last[name][0] is not rows:
            self._last.pop(name, None)  # not two at a time
            self._last[name] = rows, rows.values()
        return self._last[name][1]

    def _of_piece(self, name: str, held: HeadRows, piece: Piece) -> npt.NDArray[Any]:
        first, start = piece.head - held.first_head, piece.start - held.first_row
        return self._read(name, held)[first : first + piece.n_heads, start : start + piece.stop - piece.start]

    def _pass(self, rows: Iterable[HeadRows]) -> None:
        self._done += sum(r.nbytes for r in rows)
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)

    def _sizes(self, pair: Pair, known: dict[str, Any]) -> LayerDifference:
        """Return what can be told of two shapes: how large values are."""
        found = []
        for name, side in (("a", pair.a), ("b", pair.b)):
            squares, n, odd = 0.0, 0, 0
            for held in side:
                start, stop = (min(max(0, at - held.first_row), held.n_rows) for at in (pair.start, pair.stop))
                one, few = root_mean_square(self._read(name, held)[:, start:stop])
                taken = held.n_heads * (stop - start) * held.dim - few
                squares, n, odd = squares + one * one * taken, n + taken, odd + few
            found.append((math.sqrt(squares / n) if n else 0.0, odd))
        return LayerDifference(
            n_rows=pair.stop - pair.start, n_values=0, n_different=None, relative_error=None, max_row_error=None,
            cosine_mean=None, cosine_min=None, max_abs=None, mean_abs=None, rms_a=found[0][0], rms_b=found[1][0],
            head=None, row=None, first_row=None, nonfinite_a=found[0][1], nonfinite_b=found[1][1], bound=0.0,
            within_bound=None, **known,
        )  # fmt: skip

    def _add_grams(self, pair: Pair) -> None:
        for place, side in enumerate((pair.a, pair.b)):
            for held in side:
                key = held.role, held.tokens_per_row
                if key in self._samples and held.grows:
                    values = self._read("ab"[place], held)[:, self._samples[key] - held.first_row]
                    products = similarity.gram(np.asarray(values, np.float32))
                    made = self._grams[key][place]
                    made[pair.layer] = made[pair.layer] + products if pair.layer in made else products

    # -- answers -----------------------------------------------------------------------------------------------------

    def answers(
        self,
    ) -> tuple[
        tuple[HeadDifference, ...], tuple[LayerDifference, ...], tuple[PositionDifference, ...], tuple[Similarity, ...]
    ]:
        """Return heads, layers, places and similarity."""
        alike = []
        for key, (left, right) in self._grams.items():
            if left and right:
                alike.append(Similarity(
                    role=key[0], n_rows=len(self._samples[key]), layers_a=tuple(left), layers_b=tuple(right),
                    cka=similarity.cka_between(left, right, biased=False),
                    biased=similarity.cka_between(left, right, biased=True),
                ))  # fmt: skip
        places = tuple(place.answer(*key) for key, place in self._places.items())
        return tuple(self._heads), tuple(_with_cka(x, alike) for x in self._layers), places, tuple(alike)


def _with_cka(layer: LayerDifference, alike: Sequence[Similarity]) -> LayerDifference:
    for one in alike:
        if one.role == layer.role and layer.layer in one.layers_a and layer.layer in one.layers_b:
            value = float(one.cka[one.layers_a.index(layer.layer), one.layers_b.index(layer.layer)])
            return layer if math.isnan(value) else replace(layer, cka=value)
    return layer


def _samples(pairs: Sequence[Pair], n_rows: int, out: LeftOut) -> dict[tuple[str, int], npt.NDArray[np.int64]]:
    """Return by role and tokens per row the rows that similarity is computed from, spread evenly.

    They are of the first `n_rows` of the sequence, and held by all layers of that role on both sides.
    """
    found: dict[tuple[str, int], tuple[list[HeadRows], list[HeadRows]]] = {}
    for pair in pairs:
        for place, side in enumerate((pair.a, pair.b)):
            for held in side:
                if held.grows:
                    found.setdefault((held.role, held.tokens_per_row), ([], []))[place].append(held)
    made = {}
    for (role, per_row), (left, right) in found.items():
        if not left or not right:
            continue
        start = max(held.first_row for held in (*left, *right))
        stop = min(n_rows // per_row, *(held.first_row + held.n_rows for held in (*left, *right)))
        n = stop - start
        if n < similarity.LEAST_ROWS:
            why = f"fewer than {similarity.LEAST_ROWS} rows of the same input are held by all layers"
            out.say(f"similarity of {role}", why)
        else:
            made[role, per_row] = np.unique(np.linspace(start, stop - 1, min(n, _SAMPLE)).round().astype(np.int64))
    return made


def _both(a: str, b: str) -> str:
    return a if a == b or not b else b if not a else f"{a} / {b}"

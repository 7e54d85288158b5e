"""What stands out, in words, and what has to be known about the figures."""

from __future__ import annotations

from collections.abc import Sequence

from kvsnap.inspection.statistics.answers import HeadStatistics, LayerStatistics, Similarity, Sink
from kvsnap.inspection.statistics.figures import OUTLIER_RATIO
from kvsnap.inspection.statistics.measuring import RUN_ROWS
from kvsnap.layout import Snapshot
from kvsnap.results import numbers

__all__ = [
    "findings_of",
    "notes_of",
]

_SHOWN = 5


def _listed(items: Sequence[str], what: str) -> str:
    more = len(items) - _SHOWN
    return "; ".join(items[:_SHOWN]) + (f"; and {more:,} more {what}" if more > 0 else "")


def _name(head: HeadStatistics) -> str:
    return f"layer {head.layer} {head.role} head {head.head}"


def findings_of(
    layers: Sequence[LayerStatistics], heads: Sequence[HeadStatistics], sinks: Sequence[Sink],
    similarity: Sequence[Similarity], *, ids: bool = True,
) -> tuple[str, ...]:  # fmt: skip
    """Return what stands out in these figures, the gravest first; without `ids` no id of a token is told."""
    told = [*_not_finite(layers), *_dead(heads), *_twins(heads), *_outliers(heads), *_sinks(sinks, ids=ids)]
    return (*told, *_ranks(heads), *_alike(similarity))


def _not_finite(layers: Sequence[LayerStatistics]) -> list[str]:
    bad = [
        f"layer {r.layer} {r.role}: {r.n_nan:,} NaN, {r.n_infinite:,} infinite, {r.n_left_out:,} rows of heads left out"
        for r in layers
        if r.n_nan or r.n_infinite
    ]
    return [f"values that are no numbers: {_listed(bad, 'layers')}"] if bad else []


def _dead(heads: Sequence[HeadStatistics]) -> list[str]:
    dead = [f"{_name(h)} ({'zeros' if h.max_norm == 0 else 'all rows alike'})" for h in heads if h.dead]
    return [f"dead heads: {_listed(dead, 'heads')}"] if dead else []


def _twins(heads: Sequence[HeadStatistics]) -> list[str]:
    twins = [f"{_name(h)} is layer {h.twin[0]} head {h.twin[1]}" for h in heads if h.twin is not None]
    return [f"heads with the rows of another, bit by bit: {_listed(twins, 'heads')}"] if twins else []


def _outliers(heads: Sequence[HeadStatistics]) -> list[str]:
    told = []
    for role in dict.fromkeys(h.role for h in heads):
        some = [h for h in heads if h.role == role and h.outliers]
        some.sort(key=lambda h: -(h.outlier_ratio or 0))
        if some:
            n = sum(len(h.outliers) for h in some)
            items = [
                f"layer {h.layer} head {h.head} channel{'s' if len(h.outliers) > 1 else ''} {numbers(h.outliers)} "
                f"(up to {h.outlier_ratio:.1f} x)"
                for h in some
            ]
            told.append(
                f"{role} has {n:,} outlier channel{'s' if n > 1 else ''} (root mean square {OUTLIER_RATIO:g} x the "
                f"median of the head, or more): {_listed(items, 'heads')}"
            )
    return told


def _sinks(sinks: Sequence[Sink], *, ids: bool) -> list[str]:
    if not sinks:
        return []
    most = max(s.n_layers for s in sinks)
    rows = numbers(s.row for s in sinks)
    tokens = ", ".join(dict.fromkeys(str(s.token) for s in sinks if s.token is not None)) if ids else ""
    where = f"row{'s' if len(sinks) > 1 else ''} {rows}{f' (token {tokens})' if tokens else ''}"
    return [f"short values at {where}, in up to {most} layers: may be attention sinks (kvsnap attention tells)"]


def _ranks(heads: Sequence[HeadStatistics]) -> list[str]:
    told = []
    for role in dict.fromkeys(h.role for h in heads):
        some = [h for h in heads if h.role == role and h.rank_99 is not None and not h.dead]
        if some:
            least = min(some, key=lambda h: ((h.rank_99 or 0) / h.dim, h.layer, h.head))
            middle = sorted(h.rank_99 or 0 for h in some)[len(some) // 2]
            told.append(
                f"99 % of what varies in {role} is held by {middle} of {least.dim} components in the median head, by "
                f"{least.rank_99} in layer {least.layer} head {least.head}"
            )
    return told


def _alike(similarity: Sequence[Similarity]) -> list[str]:
    told = []
    for s in similarity:
        pairs = [
            (float(s.values[i, j]), s.layers[i], s.layers[j])
            for i in range(len(s.layers))
            for j in range(i)
            if s.values[i, j] == s.values[i, j]
        ]
        if pairs:
            value, b, a = max(pairs)
            told.append(f"the {role_of(s)} of layers {a} and {b} are most alike (CKA {value:.2f})")
    return told


def role_of(similarity: Similarity) -> str:
    """Return a role as it reads in a sentence."""
    return {"k": "keys", "v": "values"}.get(similarity.role, f"{similarity.role} rows")


def notes_of(
    snapshot: Snapshot, layers: Sequence[LayerStatistics], sample: int | None, asked: frozenset[int] | None
) -> tuple[str, ...]:
    """Return what has to be known about figures of these layers."""
    notes = []
    sampled = [r for r in layers if r.n_rows < r.n_held]
    if sampled:
        most = max(sampled, key=lambda r: r.n_held)
        notes.append(
            f"figures are of a sample: {most.n_rows:,} of {most.n_held:,} rows, in runs of up to {RUN_ROWS} rows at "
            "equal distances, both ends included"
        )
    elif sample is not None:
        notes.append("no layer has more rows than the sample: all were looked at")
    bound = max((r.bound for r in layers), default=0.0)
    if bound > 0:
        off = f"off by up to {bound:.3g}" if bound < float("inf") else "an approximation without a bound on its errors"
        notes.append(f"figures are of the values as stored, which are {off}")
    chosen = [layer for layer in snapshot.layers if asked is None or layer.index in asked]
    for shared in dict.fromkeys(layer.shares for layer in chosen if layer.shares is not None):
        users = numbers(layer.index for layer in chosen if layer.shares == shared)
        notes.append(f"layers {users} use the keys and values of layer {shared} and have no figures of their own")
    codes = [layer.index for layer in chosen if layer.quantisation]
    if codes:
        notes.append(f"layers {numbers(codes)} keep codes; figures are of the keys and values that they stand for")
    told = {r.layer for r in layers}
    empty = [layer.index for layer in chosen if layer.index not in told and layer.shares is None]
    if empty:
        notes.append(f"layers {numbers(empty)} hold no vectors")
    few = sorted({r.role for r in layers if not r.is_state and 1 < r.n_rows <= r.dim})
    if few:
        notes.append(f"{', '.join(few)}: fewer rows than channels, so ranks are limited by the rows")
    return tuple(notes)

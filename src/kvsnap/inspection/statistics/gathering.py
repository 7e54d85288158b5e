"""The pass over a cache: layer by layer, each tensor once."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from kvsnap import formats
from kvsnap.errors import InputError
from kvsnap.inspection.statistics.along import LONGEST, Alike, Norms, Sinks, picks_of
from kvsnap.inspection.statistics.answers import (
    Channels,
    Distribution,
    HeadStatistics,
    LayerStatistics,
    Similarity,
    Statistics,
)
from kvsnap.inspection.statistics.figures import channels_of, distribution_of, heads_of, layer_of
from kvsnap.inspection.statistics.findings import findings_of, notes_of
from kvsnap.inspection.statistics.measuring import Measured, Numbers, has_products, measure, spans_for
from kvsnap.inspection.summary import load_as
from kvsnap.inspection.values import HeadRows, head_rows
from kvsnap.layout import Snapshot
from kvsnap.protocols import Progress

__all__ = ["statistics"]


def statistics(
    source: Snapshot | str | os.PathLike[str],
    *,
    layers: Sequence[int] | None = None,
    roles: Sequence[str] | None = None,
    sample: int | None = None,
    key: bytes | None = None,
    progress: Progress | None = None,
) -> Statistics:
    """Return the statistics of a cache: norms, outlier channels, entropy, rank, similarity, candidates for sinks.

    `layers` and `roles` (`k`, `v`, `latent`, `recurrent`, ...) leave out the others; what is left out is not read.
    `sample` looks at so many rows of each tensor: runs at equal distances, both ends included. Of a session only the
    spans that hold them are read; a tensor in one piece is read, and checked, as a whole all the same.

    One tensor is in memory at a time, with blocks of some MiB. `progress` is called with (done, total) bytes. Raise
    `InputError` for a layer or role that is not there, and as `load` does (`DamagedError` also on the way).
    """
    if sample is not None and _number(sample) < 1:
        raise InputError("a sample has one row or more", expected="1 or more", found=sample)
    snapshot, path = _opened(source, key)
    chosen = _chosen(snapshot, layers)
    every = [f for f in head_rows(snapshot) if (chosen is None or f.layer in chosen) and f.nbytes]
    wanted = [f for f in every if roles is None or f.role in roles]
    known = tuple(dict.fromkeys(f.role for f in every))
    unknown = [role for role in roles or () if role not in known]
    if unknown:
        raise InputError("no such role here", expected=", ".join(known) or "none", found=", ".join(unknown))
    passed = _Pass(snapshot, wanted, sample, progress)
    for _, of_layer in groupby(wanted, key=lambda f: f.layer):
        passed.layer(list(of_layer))
    return passed.told(path, chosen)


def _opened(source: Snapshot | str | os.PathLike[str], key: bytes | None) -> tuple[Snapshot, str | None]:
    if isinstance(source, Snapshot):
        path = source.source.get("path")
        return source, None if path is None else str(path)
    return load_as(formats.format_of(source), source, key), os.fspath(source)


def _number(value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type] # what is no number is told below
    except TypeError as error:
        raise InputError("a whole number is needed", found=value) from error


def _chosen(snapshot: Snapshot, layers: Sequence[int] | None) -> frozenset[int] | None:
    if layers is None:
        return None
    for layer in layers:
        if not 0 <= _number(layer) < snapshot.num_layers:
            raise InputError("no such layer", expected=f"0 to {snapshot.num_layers - 1}", found=layer)
    return frozenset(layers)


def _of_rows(found: HeadRows) -> bool:
    """Tell whether there is a row for each token, of this sequence or of the encoder's; else it is a state."""
    return found.grows or found.role.startswith("cross_")


class _Pass:
    """What is gathered on the way."""

    def __init__(
        self, snapshot: Snapshot, wanted: Sequence[HeadRows], sample: int | None, progress: Progress | None
    ) -> None:
        self._snapshot, self._sample, self._progress = snapshot, sample, progress
        self._total, self._done = max(1, sum(f.nbytes for f in wanted)), 0
        self._layers: list[LayerStatistics] = []
        self._heads: list[HeadStatistics] = []
        self._channels: list[Channels] = []
        self._distributions: list[Distribution] = []
        self._sinks = Sinks()
        self._norms: dict[str, Norms] = {}
        self._alike: dict[str, Alike] = {}
        self._picks: dict[str, Numbers] = {}
        self._left_out: list[str] = []
        self._seen: dict[tuple[object, ...], tuple[int, int]] = {}
        for role in dict.fromkeys(f.role for f in wanted if _of_rows(f)):
            mine = [f for f in wanted if f.role == role]
            n_rows = max(snapshot.n_rows if f.grows else f.n_rows for f in mine)
            if n_rows <= LONGEST:
                self._norms[role] = Norms(role, n_rows)
            self._picks[role] = picks_of(mine, sample)
            self._alike[role] = Alike(role, len(self._picks[role]))

    def layer(self, found: Sequence[HeadRows]) -> None:
        """Pass over what one layer holds."""
        kind = self._snapshot.layers[found[0].layer].kind
        parts: dict[str, list[Measured]] = {}
        for one in found:
            parts.setdefault(one.role, []).append(self._measured(one))
        for role, measured in parts.items():
            of_rows = _of_rows(measured[0].found)
            heads = [h for m in measured for h in self._twins(m, heads_of(m, of_rows=of_rows), of_rows=of_rows)]
            layer = layer_of(measured, heads, kind, of_rows=of_rows)
            self._heads += heads
            self._layers.append(layer)
            distribution = distribution_of(measured, layer)
            if distribution is not None:
                self._distributions.append(distribution)
            if of_rows:
                self._channels += [channels_of(m) for m in measured]
                for one_part in measured if role in self._norms else ():
                    self._norms[role].add(one_part)
                self._alike[role].add(measured)
        self._sinks.add(found[0].layer, {r: m for r, m in parts.items() if m[0].found.grows})

    def _measured(self, found: HeadRows) -> Measured:
        spans = spans_for(found.n_rows, self._sample if _of_rows(found) else None)
        n_rows = max(1, sum(stop - start for start, stop in spans))

        def advance(rows: int) -> None:
            if self._progress is not None:
                self._progress(self._done + found.nbytes * rows // n_rows, self._total)

        if _of_rows(found) and not has_products(found):
            self._left_out.append(f"{found.name}: rows too wide, or too many heads, for principal components")
        picks = self._picks.get(found.role, np.zeros(0, np.int64))
        measured = measure(found, spans, picks, products=_of_rows(found), advance=advance)
        self._done += found.nbytes
        return measured

    def _twins(self, measured: Measured, heads: list[HeadStatistics], *, of_rows: bool) -> list[HeadStatistics]:
        found, made = measured.found, []
        for head, moments in zip(heads, measured.heads, strict=True):
            key = (found.role, found.dim, found.first_row, len(measured.rows), moments.digest.digest())
            first = self._seen.setdefault(key, (head.layer, head.head)) if of_rows and moments.n > 1 else None
            other = None if first == (head.layer, head.head) or head.dead else first
            made.append(replace(head, twin=other) if other is not None else head)
        return made

    def told(self, path: str | None, chosen: frozenset[int] | None) -> Statistics:
        """Return all of it."""
        snapshot = self._snapshot
        similarity: list[Similarity] = [s for s in (a.told() for a in self._alike.values()) if s is not None]
        tokens = snapshot.tokens[: len(snapshot.tokens) - snapshot.n_pending]
        sinks = self._sinks.told(tokens, snapshot.n_rows)
        return Statistics(
            path=path, architecture=snapshot.architecture, num_layers=snapshot.num_layers,
            n_tokens=len(snapshot.tokens),
            tokens=tokens, n_rows=snapshot.n_rows, sample=self._sample, layers=tuple(self._layers),
            heads=tuple(self._heads), distributions=tuple(self._distributions),
            norms=tuple(n.told() for n in self._norms.values()), channels=tuple(self._channels),
            similarity=tuple(similarity), sinks=sinks,
            findings=findings_of(self._layers, self._heads, sinks, similarity),
            notes=(*notes_of(snapshot, self._layers, self._sample, chosen), *self._left_out),
        )  # fmt: skip

"""What can be drawn, as plain data: each picture knows its numbers, and says them as a table too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.results import Table, float_text

__all__ = [
    "Bars",
    "HeatMap",
    "Histogram",
    "Histograms",
    "Line",
    "Lines",
    "Node",
    "Picture",
    "Strip",
    "Timeline",
    "Tree",
    "TurnBar",
    "number",
]

Floats = npt.NDArray[Any]

TABLE_COLUMNS = 24
"""Columns of a table of a wide heat map; neighbours are put together by their mean."""


def number(value: float) -> str:
    """Return a value as pictures and their readers are told it: four significant digits, none where there is none."""
    if np.isnan(value):
        return "no value"
    if np.isinf(value):
        return "infinite" if value > 0 else "minus infinite"
    return f"{value:,.0f}" if value == round(value) and abs(value) < 1e15 else float_text(value)


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars: name to (value, text beside it). `colours` are numbers 1 to 3, one for each bar.

    On a logarithmic axis a value of 0, or one far below the first band, has a text and no bar. `bands` are (end, word):
    what values up to there are called, the first band from the left edge on; the last one may end at infinity. No value
    can be beyond `most` (100 %), so that the axis is labelled up to there.
    """

    title: str
    axis: str
    values: Mapping[str, tuple[float, str]]
    colours: Sequence[int]
    logarithmic: bool = False
    bands: tuple[tuple[float, str], ...] = ()
    most: float = float("inf")

    def table(self) -> Table:
        """Return name, value and text of each bar."""
        return Table(self.title, ("what", self.axis, "text"), tuple((n, v, t) for n, (v, t) in self.values.items()))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeatMap:
    """A matrix `[rows, columns]` as colours; NaN is a cell without a value, which is hatched.

    `rows` and `columns` name the cells (`layer 3`, `position 128 to 131` are made of `y`, `x` and these). `scale` says
    what the values are, with the unit. `diverging` is for differences: white at 0, as far to both sides. `starts` are
    the numbers that an axis of bins is labelled with, where `columns` are ranges; `ticks` are columns and their labels,
    in the place of every so-manieth.
    """

    title: str
    x: str
    y: str
    scale: str
    values: Floats
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()
    ticks: tuple[tuple[int, str], ...] = ()
    logarithmic: bool = False
    diverging: bool = False

    def row_names(self) -> tuple[str, ...]:
        """Return the name of each row; numbers from 0 where none were given."""
        return self.rows or tuple(map(str, range(self.values.shape[0])))

    def column_names(self) -> tuple[str, ...]:
        """Return the name of each column; numbers from 0 where none were given."""
        return self.columns or tuple(map(str, range(self.values.shape[1])))

    def table(self) -> Table:
        """Return the matrix; where it is wider than `TABLE_COLUMNS`, means of neighbouring columns."""
        values, names = self.values, self.column_names()
        step = -(-len(names) // TABLE_COLUMNS)
        title = self.title
        if step > 1:
            values, names = _means(values, step), tuple(
                f"{names[at].split(' ')[0]} to {names[min(at + step, len(names)) - 1].split(' ')[-1]}"
                for at in range(0, len(names), step)
            )  # fmt: skip
            title = f"{self.title} (means of {step} neighbouring columns)"
        rows = tuple((name, *_cells(row)) for name, row in zip(self.row_names(), values, strict=True))
        return Table(title, (self.y, *(f"{self.x} {name}" for name in names)), rows)


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """One line of a picture: its name, and numbers `[points]`. `marked` shows each point."""

    name: str
    x: Floats
    y: Floats
    marked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lines:
    """Lines over one axis, at most six; values that are no numbers leave a gap."""

    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    logarithmic_x: bool = False
    logarithmic_y: bool = False

    def table(self) -> Table:
        """Return one row for each point of each line, thinned out to some 200 rows for each."""
        rows = []
        for line in self.lines:
            step = max(1, -(-len(line.x) // 200))
            points = zip(line.x[::step], line.y[::step], strict=True)
            rows += [(line.name, _cell(float(x)), _cell(float(y))) for x, y in points]
        return Table(self.title, ("line", self.x, self.y), tuple(rows))


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """Counts `[bins]` between `edges` `[bins + 1]`; `name` tells several in one panel apart."""

    name: str
    edges: Floats
    counts: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Histograms:
    """Small multiples: a panel for each name, with histograms of at most three kinds in it."""

    title: str
    x: str
    panels: tuple[tuple[str, tuple[Histogram, ...]], ...]

    def table(self) -> Table:
        """Return for each histogram its range, its number of values, and the bin that holds most."""
        rows: list[tuple[str | int | float | None, ...]] = []
        for panel, histograms in self.panels:
            for h in histograms:
                if not len(h.counts):
                    continue
                top = int(np.argmax(h.counts))
                rows.append((panel, h.name, float(h.edges[0]), float(h.edges[-1]), int(h.counts.sum()),
                             float(h.edges[top]), float(h.edges[top + 1]), int(h.counts[top])))  # fmt: skip
        names = ("panel", "of", "from", "to", "values", "fullest bin from", "fullest bin to", "values in it")
        return Table(self.title, names, tuple(rows))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strip:
    """Tokens in reading order, coloured by a value each. `first` is the number of the first one.

    `tokens` are what is written into the cells; they come from a file and may be anything.
    """

    title: str
    scale: str
    tokens: tuple[str, ...]
    values: Floats
    first: int = 0
    logarithmic: bool = False

    def table(self) -> Table:
        """Return each token with its value."""
        pairs = zip(self.tokens, self.values, strict=True)
        rows = tuple((self.first + i, token, _cell(value)) for i, (token, value) in enumerate(pairs))
        return Table(self.title, ("position", "token", self.scale), rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of a tree: its name, how deep it stands, a size that its bar shows, and a text."""

    name: str
    depth: int
    value: float
    text: str
    faded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A forest, depth first: indented names and a bar each."""

    title: str
    axis: str
    nodes: tuple[Node, ...]

    def table(self) -> Table:
        """Return a row for each node."""
        rows = tuple((node.name, node.depth, node.value, node.text) for node in self.nodes)
        return Table(self.title, ("name", "depth", self.axis, "text"), rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnBar:
    """One commit: the tokens before and after it, what it did, and whether its answer is complete."""

    name: str
    before: int
    after: int
    what: str
    text: str
    complete: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Turns from top to bottom: what each added to the history, or took away."""

    title: str
    turns: tuple[TurnBar, ...]

    def table(self) -> Table:
        """Return a row for each turn."""
        rows = tuple((t.name, t.what, t.before, t.after, t.after - t.before, t.complete, t.text) for t in self.turns)
        names = ("commit", "what", "tokens before", "tokens after", "change", "complete", "text")
        return Table(self.title, names, rows)


Picture = Bars | HeatMap | Lines | Histograms | Strip | Tree | Timeline


def _cell(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _cells(row: Floats) -> tuple[float | None, ...]:
    return tuple(_cell(float(v)) for v in row)


def _means(values: Floats, step: int) -> Floats:
    """Return means of `step` neighbouring columns each; cells without a value do not count."""
    known = np.isfinite(values)
    starts = np.arange(0, values.shape[1], step)
    sums = np.add.reduceat(np.where(known, values, 0.0).astype(np.float64), starts, axis=1)
    counts = np.add.reduceat(known.astype(np.int64), starts, axis=1)
    means: Floats = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
    return means

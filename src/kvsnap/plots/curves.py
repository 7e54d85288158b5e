"""Draws lines over an axis, and small multiples of histograms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from kvsnap.plots.colours import LINES
from kvsnap.plots.hover import Hover, Mark, Marks, box_of, points_of
from kvsnap.plots.pictures import Floats, Histograms, Lines, number
from kvsnap.plots.sheet import Sheet

__all__ = ["draw_histograms", "draw_lines", "height_of_histograms"]

_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 2)))
"""A line is told by its dashes too, not by its colour alone."""
_POINTS = 400
"""Points of a line that can be pointed at."""


def panels_across(n: int) -> int:
    """Return how many panels stand beside each other."""
    return min(6, max(1, n))


def height_of_histograms(picture: Histograms) -> float:
    """Return the height in inches."""
    n = len(picture.panels)
    return 1.0 + 1.05 * max(1, -(-n // panels_across(n)))


def frame(axes: Any, sheet: Sheet) -> None:
    """Leave the lower and the left edge, and a faint grid."""
    axes.grid(color=sheet.faint, linewidth=0.7, zorder=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.minorticks_off()


def draw_lines(picture: Lines, sheet: Sheet) -> Callable[[], Hover]:
    """Draw at most six lines with a legend."""
    axes = sheet.axes(left=0.95)
    kept = []
    for place, line in enumerate(picture.lines[: len(LINES)]):
        x, y = np.asarray(line.x, dtype=np.float64), np.asarray(line.y, dtype=np.float64)
        shown = np.isfinite(x)
        shown &= (x > 0) | (not picture.logarithmic_x)
        good = np.isfinite(y) & ((y > 0) | (not picture.logarithmic_y))
        x, y = x[shown], np.where(good, y, np.nan)[shown]
        axes.plot(
            x, y, color=sheet.colours[LINES[place]], linestyle=_DASHES[place], linewidth=1.8, label=line.name, zorder=3,
            marker="o" if line.marked else "", markersize=4.5,
        )  # fmt: skip
        there = np.isfinite(y)
        kept.append((line.name, x[there], y[there]))
    some = any(len(y) for _, _, y in kept)  # an axis of powers needs a value
    if picture.logarithmic_x and some:
        axes.set_xscale("log")
    if picture.logarithmic_y and some:
        axes.set_yscale("log")
        _show_decades(axes, [y for _, _, y in kept if len(y)])
    elif some and min(float(y.min()) for _, _, y in kept if len(y)) >= 0:
        axes.set_ylim(bottom=0)
    _plain_numbers(axes, picture)
    axes.set_xlabel(picture.x)
    axes.set_ylabel(picture.y)
    frame(axes, sheet)
    if len(picture.lines) > 1:
        legend = axes.legend(frameon=False, labelcolor=sheet.ink, loc="best", handlelength=2.6)
        for text in legend.get_texts():
            text.set_parse_math(False)

    def hover() -> Hover:
        rows = []
        for name, x, y in kept:
            step = max(1, -(-len(x) // _POINTS))
            places = points_of(sheet.figure, axes, x[::step], y[::step]) if len(x) else []
            lead = f"{name}, " if len(kept) > 1 else ""
            rows.append(tuple(
                Mark((left, top, 0.0, 0.0), f"{lead}{picture.x} {number(float(a))}: {number(float(b))} {picture.y}")
                for (left, top), a, b in zip(places, x[::step], y[::step], strict=True)
            ))  # fmt: skip
        return Marks(tuple(rows))

    return hover


def _plain_numbers(axes: Any, picture: Lines) -> None:
    from matplotlib.ticker import FuncFormatter  # noqa: PLC0415 # an extra

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    if not picture.logarithmic_x and all(np.all(line.x == np.round(line.x)) for line in picture.lines):
        axes.xaxis.get_major_locator().set_params(integer=True)


def _show_decades(axes: Any, lines: list[Floats]) -> None:
    """Widen a logarithmic axis to whole decades where it would show fewer than two: they alone have labels."""
    if not lines:
        return
    low, high = (math.log10(f(f(y) for y in lines)) for f in (min, max))
    if math.floor(high) - math.ceil(low) < 1:
        bottom = math.floor(low)
        axes.set_ylim(10.0**bottom, 10.0 ** max(math.ceil(high), bottom + 1))


def _tick(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"


def draw_histograms(picture: Histograms, sheet: Sheet) -> Callable[[], Hover]:
    """Draw a panel for each name, histograms as outlines over each other, each to its own height."""
    across = panels_across(len(picture.panels))
    down = max(1, -(-len(picture.panels) // across))
    figure, height = sheet.figure, sheet.height
    grid = figure.subplots(down, across, squeeze=False)
    top = 1 - (sheet.top + 0.55) / height
    figure.subplots_adjust(left=0.02, right=0.98, bottom=0.62 / height, top=top, wspace=0.12, hspace=0.95)
    drawn = []
    for place, (title, histograms) in enumerate(picture.panels):
        axes = grid[place // across][place % across]
        for number_, h in enumerate(histograms[:3]):
            top = float(np.max(h.counts)) if len(h.counts) else 0.0
            if top <= 0:
                continue
            axes.stairs(
                np.asarray(h.counts) / top, np.asarray(h.edges, dtype=np.float64), color=sheet.colours[LINES[number_]],
                linestyle=_DASHES[number_], linewidth=1.2, label=h.name,
            )  # fmt: skip
            drawn.append((axes, title, h, top))
        axes.set_title(title, fontsize=8.5, color=sheet.ink, pad=3, parse_math=False)
        axes.set_yticks([])
        axes.set_ylim(0, 1.08)
        axes.tick_params(axis="x", labelsize=7, colors=sheet.ink, length=2)
        axes.xaxis.set_major_locator(_few())
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(sheet.faint)
    for axes in grid.flat[len(picture.panels) :]:
        axes.set_axis_off()
    if picture.panels:
        handles, names = grid[0][0].get_legend_handles_labels()
        if len(names) > 1:
            figure.legend(handles, names, loc="upper right", bbox_to_anchor=(0.985, 1 - sheet.top / height),
                          ncols=len(names), frameon=False, labelcolor=sheet.ink)  # fmt: skip
    figure.text(0.5, 0.12 / height, picture.x, ha="center", color=sheet.ink, parse_math=False)

    def hover() -> Hover:
        rows = []
        for axes, title, h, top in drawn:
            marks = []
            for low, high, n in zip(h.edges[:-1], h.edges[1:], h.counts, strict=True):
                if not n:
                    continue
                box = box_of(figure, axes, float(low), float(n) / top, float(high), 0.0)
                span = f"{number(float(low))} to {number(float(high))}"
                marks.append(Mark(box, f"{title} {h.name}, {span}: {number(float(n))} values"))
            rows.append(tuple(marks))
        return Marks(tuple(rows))

    return hover


def _few() -> Any:
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415 # an extra

    return MaxNLocator(3)

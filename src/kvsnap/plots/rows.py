"""Draws what stands in rows: bars, trees of forks, and timelines of turns."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kvsnap.plots.colours import BAD, BARS
from kvsnap.plots.hover import Hover, Mark, Marks, box_of
from kvsnap.plots.pictures import Bars, Timeline, Tree, number
from kvsnap.plots.sheet import WIDTH, Sheet, width_of

__all__ = ["draw_bars", "draw_timeline", "draw_tree", "height_of_rows"]

_LONGEST = 44
"""Characters of a name beside a bar; a longer one is cut in the middle."""


def height_of_rows(n: int) -> float:
    """Return the height in inches of so many rows."""
    return 0.9 + (0.42 if n <= 8 else 0.27) * max(1, n)


def _shown(name: str) -> str:
    half = _LONGEST // 2
    return name if len(name) <= _LONGEST else f"{name[: half - 1]}…{name[-half:]}"


def _open(axes: Any, n: int, sheet: Sheet, axis: str) -> None:
    axes.set_xlabel(axis)
    axes.set_ylim(max(n, 1) - 0.4, -0.6)
    axes.grid(axis="x", color=sheet.faint, linewidth=0.8, zorder=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.minorticks_off()


def _left(names: list[str]) -> float:
    return 0.2 + max((width_of(_shown(name)) for name in names), default=0.0)


def _names(axes: Any, names: list[str]) -> None:
    axes.set_yticks(range(len(names)), [_shown(name) for name in names])
    for label in axes.get_yticklabels():
        label.set_parse_math(False)  # a name may hold signs of formulas


def _beside(axes: Any, text: str, x: float, y: int, sheet: Sheet) -> None:
    axes.annotate(
        text, (x, y), xytext=(6, 0), textcoords="offset points", va="center", color=sheet.ink, parse_math=False
    )


def draw_bars(picture: Bars, sheet: Sheet) -> Callable[[], Hover]:
    """Draw horizontal bars with a text beside each."""
    names = list(picture.values)
    left = _left(names)
    axes = sheet.axes(left=left, top=0.48 if picture.bands else 0.1)
    room = WIDTH - left - 0.2
    fill = [sheet.colours[BARS[n - 1]] for n in picture.colours]
    ends = [value for value, _ in picture.values.values()]
    if picture.logarithmic:
        low, high = _decades(picture)
        ends = [min(max(value, low), high) if not math.isnan(value) else low for value in ends]
        texts = (text for _, text in picture.values.values())
        powers = [(math.log10(end / low), text) for end, text in zip(ends, texts, strict=True)]
        axes.set_xscale("log")
        axes.set_xlim(low, low * 10 ** max(sheet.room_for(powers, room), math.log10(high / low) + 0.5))
    else:
        axes.set_xlim(0, sheet.room_for(picture.values.values(), room))
    start = axes.get_xlim()[0]
    axes.barh(range(len(names)), [end - start for end in ends], left=start, color=fill, height=0.62, zorder=2)
    _names(axes, names)
    for place, (end, (_, text)) in enumerate(zip(ends, picture.values.values(), strict=True)):
        _beside(axes, text, end, place, sheet)
    _open(axes, len(names), sheet, picture.axis)
    if not math.isinf(picture.most):
        axes.set_xticks([tick for tick in axes.get_xticks() if tick <= picture.most])
    _bands(axes, picture, sheet)

    def hover() -> Hover:
        return Marks(tuple(
            (Mark(box_of(sheet.figure, axes, start, i - 0.31, end, i + 0.31), f"{name}: {text}"),)
            for i, (end, (name, (_, text))) in enumerate(zip(ends, picture.values.items(), strict=True))
        ))  # fmt: skip

    return hover


def _decades(picture: Bars) -> tuple[float, float]:
    """Return the ends of a logarithmic axis with all values and bands, but for values far below the first band."""
    known = [value for value, _ in picture.values.values() if 0 < value < math.inf]
    known += [end for end, _ in picture.bands if 0 < end < math.inf]
    low, high = (min(known), max(known)) if known else (1.0, 1.0)
    if picture.bands:
        low = max(low, picture.bands[0][0] / 300)
    return 10.0 ** math.floor(math.log10(low) - 0.5), high


def _bands(axes: Any, picture: Bars, sheet: Sheet) -> None:
    """Draw where a band ends and the next begins, and their words above."""
    low, high = axes.get_xlim()
    start = low
    for place, (end, word) in enumerate(picture.bands):
        stop = min(end, high)
        if stop <= start:
            continue
        if end < high:
            axes.axvline(end, color=sheet.colours[BARS[2]], linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        middle = math.sqrt(start * stop) if picture.logarithmic else (start + stop) / 2
        above = 4 + 10 * (place % 2)  # in two lines: words of narrow bands would touch
        axes.annotate(word, (middle, 1), xycoords=("data", "axes fraction"), xytext=(0, above),
                      textcoords="offset points",
                      ha="center", va="bottom", fontsize=7.5, color=sheet.ink, parse_math=False)  # fmt: skip
        start = stop


def draw_tree(picture: Tree, sheet: Sheet) -> Callable[[], Hover]:
    """Draw the names of a forest with lines between them on the left, and their bars on the right."""
    deepest = max((node.depth for node in picture.nodes), default=0)
    indent = min(0.35, 1.6 / max(1, deepest))
    wide = min(4.2, 0.3 + max((node.depth * indent + width_of(_shown(node.name)) for node in picture.nodes), default=1))
    names = sheet.axes(left=0.1, width=wide)
    axes = sheet.axes(left=wide + 0.2)
    last: dict[int, int] = {}
    for place, node in enumerate(picture.nodes):
        last[node.depth] = place
        if node.depth and node.depth - 1 in last:
            above = last[node.depth - 1]
            names.plot(
                [node.depth - 0.72, node.depth - 0.72, node.depth - 0.16], [above + 0.32, place, place],
                color=sheet.colours[BARS[2]], linewidth=1.2, solid_capstyle="round",
            )  # fmt: skip
        names.text(
            node.depth - 0.08, place, _shown(node.name), va="center", color=sheet.ink, parse_math=False,
            alpha=0.75 if node.faded else 1,
        )  # fmt: skip
        axes.barh(place, node.value, color=sheet.colours[BARS[2 if node.faded else 0]], height=0.55, zorder=2)
        _beside(axes, node.text, node.value, place, sheet)
    names.set_xlim(-0.2, wide / indent - 0.2)
    names.set_ylim(max(len(picture.nodes), 1) - 0.4, -0.6)
    names.set_axis_off()
    axes.set_yticks([])
    axes.set_xlim(0, sheet.room_for(((n.value, n.text) for n in picture.nodes), WIDTH - wide - 0.4))
    _open(axes, len(picture.nodes), sheet, picture.axis)

    def hover() -> Hover:
        rows = []
        for i, node in enumerate(picture.nodes):
            box = box_of(sheet.figure, axes, 0.0, i - 0.31, node.value, i + 0.31)
            rows.append((Mark(box, f"{node.name}: {node.text}"),))
        return Marks(tuple(rows))

    return hover


def draw_timeline(picture: Timeline, sheet: Sheet) -> Callable[[], Hover]:
    """Draw each turn as a bar from the tokens before it to the tokens after it."""
    names = [f"{t.name} {t.what}" for t in picture.turns]
    left = _left(names)
    axes = sheet.axes(left=left)
    for place, turn in enumerate(picture.turns):
        width = turn.after - turn.before
        colour = sheet.colours[BARS[0 if turn.complete else 1]]
        if width < 0:
            axes.barh(place, width, left=turn.before, height=0.56, zorder=2, facecolor="none", linewidth=1.1,
                      edgecolor=sheet.colours[BAD], hatch="////")  # fmt: skip
        else:
            axes.barh(place, width, left=turn.before, height=0.56, zorder=2, color=colour)
        if not width:
            axes.plot([turn.after], [place], marker="D", markersize=5, color=colour, zorder=3, clip_on=False)
        _beside(axes, turn.text, max(turn.before, turn.after), place, sheet)
        if place + 1 < len(picture.turns):
            axes.plot([turn.after, turn.after], [place + 0.28, place + 0.72], color=sheet.colours[BARS[2]], linewidth=1)
    _names(axes, names)
    ends = ((float(max(t.before, t.after)), t.text) for t in picture.turns)
    axes.set_xlim(0, sheet.room_for(ends, WIDTH - left - 0.2))
    _open(axes, len(picture.turns), sheet, "tokens of the history")
    axes.xaxis.get_major_locator().set_params(integer=True)

    def hover() -> Hover:
        return Marks(tuple(
            (Mark(box_of(sheet.figure, axes, t.before, i - 0.31, t.after, i + 0.31),
                  f"commit {t.name}, {t.what}: {number(t.before)} to {number(t.after)} tokens; {t.text}"),)
            for i, t in enumerate(picture.turns)
        ))  # fmt: skip

    return hover

"""Draws plain data with matplotlib (the extra `plots`): bars and heat maps as PNG or as SVG for a page.

An SVG made here takes its colours from the page: text and axes are `currentColor`, bars are the CSS variables
`--bar-1` to `--bar-3`, so that one picture is readable in light and dark.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Bars", "HeatMap", "Picture", "png", "svg"]

# Colours that stand for those of the page until the SVG is written; no colour map contains them by chance.
_INK, _FAINT = "#010203", "#040506"
_BARS = ("#070809", "#0a0b0c", "#0d0e0f")
_VARIABLES = {
    _INK: "currentColor",
    _FAINT: "var(--faint)",
    **{colour: f"var(--bar-{n})" for n, colour in enumerate(_BARS, 1)},
}
_ON_WHITE = {_INK: "#1c2330", _FAINT: "#d5dae3", _BARS[0]: "#2166ac", _BARS[1]: "#d9822b", _BARS[2]: "#8793a6"}


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars: name to (value, text beside it). `colours` are numbers 1 to 3, one for each bar."""

    title: str
    axis: str
    values: Mapping[str, tuple[float, str]]
    colours: Sequence[int]
    logarithmic: bool = False


@dataclass(frozen=True, slots=True)
class HeatMap:
    """A matrix as colours; `across` is the range that the columns stand for."""

    title: str
    x: str
    y: str
    scale: str
    values: npt.NDArray[np.float64]
    across: tuple[float, float]


Picture = Bars | HeatMap


def _bars(picture: Bars, colours: Mapping[str, str], figure: Any) -> None:
    axes = figure.add_subplot()
    names = list(picture.values)
    values = [value for value, _ in picture.values.values()]
    fill = [colours[_BARS[number - 1]] for number in picture.colours]
    axes.barh(range(len(names)), values, color=fill, height=0.62, zorder=2)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    if picture.logarithmic:
        axes.set_xscale("log")
        axes.set_xlim(min(values) / 3, max(values) * 12)
    else:
        axes.set_xlim(0, max(values) * 1.28)
    for place, (value, text) in enumerate(picture.values.values()):
        axes.annotate(text, (value, place), xytext=(6, 0), textcoords="offset points", va="center", color=colours[_INK])
    axes.set_xlabel(picture.axis)
    axes.grid(axis="x", color=colours[_FAINT], linewidth=0.8, zorder=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.minorticks_off()
    _ink(axes, picture.title, colours)


def _heat(picture: HeatMap, colours: Mapping[str, str], figure: Any) -> None:
    axes = figure.add_subplot()
    layers = len(picture.values)
    image = axes.imshow(
        picture.values, aspect="auto", interpolation="nearest", cmap="viridis",
        extent=(*picture.across, layers - 0.5, -0.5),
    )  # fmt: skip
    axes.set_xlabel(picture.x)
    axes.set_ylabel(picture.y)
    axes.yaxis.get_major_locator().set_params(integer=True)
    bar = figure.colorbar(image, ax=axes, pad=0.015, aspect=28)
    bar.outline.set_visible(False)
    bar.set_label(picture.scale, color=colours[_INK])
    bar.ax.tick_params(colors=colours[_INK])
    for spine in axes.spines.values():
        spine.set_visible(False)
    _ink(axes, picture.title, colours)


def _ink(axes: Any, title: str, colours: Mapping[str, str]) -> None:
    ink = colours[_INK]
    axes.set_title(title, loc="left", color=ink, fontweight="bold", fontsize=11, pad=10)
    axes.tick_params(colors=ink)
    axes.xaxis.label.set_color(ink)
    axes.yaxis.label.set_color(ink)
    for spine in axes.spines.values():
        spine.set_color(colours[_FAINT])


def _draw(picture: Picture, colours: Mapping[str, str], write: Callable[[Any], None]) -> None:
    import matplotlib as mpl  # noqa: PLC0415 # an extra
    from matplotlib.figure import Figure  # noqa: PLC0415 # and not pyplot: no window, no state of the process

    height = 4.2
    if isinstance(picture, Bars):
        height = 0.9 + (0.42 if len(picture.values) <= 8 else 0.27) * len(picture.values)
    settings = {"svg.fonttype": "none", "svg.hashsalt": "kvsnap", "font.family": "sans-serif", "font.size": 10}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(8, height), layout="constrained")
        if isinstance(picture, Bars):
            _bars(picture, colours, figure)
        else:
            _heat(picture, colours, figure)
        write(figure)


def png(picture: Picture) -> bytes:
    """Return a PNG on white."""
    memory = io.BytesIO()
    _draw(picture, _ON_WHITE, lambda figure: figure.savefig(memory, format="png", dpi=150, facecolor="white"))
    return memory.getvalue()


def svg(picture: Picture) -> str:
    """Return an `<svg>` element without background that takes its colours and its font from the page."""
    memory = io.BytesIO()
    same = {colour: colour for colour in _VARIABLES}
    _draw(picture, same, lambda figure: figure.savefig(memory, format="svg", transparent=True, metadata={"Date": None}))
    text = memory.getvalue().decode()
    text = text[text.index("<svg") :]
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    # matplotlib leaves black out, as it is SVG's own default: the dark page needs it said.
    text = re.sub(r"font: ([^;\"]*?)'?sans-serif'?[^;\"]*", r"font: \1inherit", text)
    text = re.sub(r"<svg ", '<svg role="img" fill="currentColor" ', text, count=1)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(
        r'(<svg [^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg [^>]*?) height="[^"]*"', r"\1", text, count=1), count=1
    )

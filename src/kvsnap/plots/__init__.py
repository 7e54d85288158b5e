"""Draws plain data with matplotlib (the extra `plots`): as PNG or SVG on white, or as SVG for a page.

An SVG for a page takes its colours from it (text and axes are `currentColor`, bars and lines are CSS variables such as
`--bar-1` and `--line-1`), so that one picture is readable in light and dark. Everything written into a picture is
plain text: nothing in it is read as markup or as a formula.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvsnap.collecting import uncollected
from kvsnap.errors import ExtraMissingError
from kvsnap.plots.colours import FAINT, INK, ON_WHITE, SAME
from kvsnap.plots.curves import draw_histograms, draw_lines, height_of_histograms
from kvsnap.plots.hover import Grid, Hover, Mark, Marks
from kvsnap.plots.markup import for_page
from kvsnap.plots.matrices import draw_heat, draw_strip, height_of_heat, height_of_strip
from kvsnap.plots.pictures import (
    Bars,
    HeatMap,
    Histogram,
    Histograms,
    Line,
    Lines,
    Node,
    Picture,
    Strip,
    Timeline,
    Tree,
    TurnBar,
)
from kvsnap.plots.rows import draw_bars, draw_timeline, draw_tree, height_of_rows
from kvsnap.plots.sheet import WIDTH, Sheet

__all__ = [
    "Bars",
    "Drawn",
    "Grid",
    "HeatMap",
    "Histogram",
    "Histograms",
    "Hover",
    "Line",
    "Lines",
    "Mark",
    "Marks",
    "Node",
    "Picture",
    "Strip",
    "Timeline",
    "Tree",
    "TurnBar",
    "check_matplotlib",
    "drawn",
    "png",
    "svg_file",
]

_TITLE = 0.4
"""Inches of a title above a picture in a file of its own."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A picture for a page: its `<svg>` element, and where its values stand in it."""

    svg: str
    hover: Hover


def check_matplotlib() -> None:
    """Raise `ExtraMissingError` without matplotlib (the extra `plots`)."""
    try:
        import matplotlib as mpl  # noqa: PLC0415 # an extra
    except ImportError as error:
        raise ExtraMissingError("matplotlib is not installed: pip install 'kvsnap[plots]'") from error
    del mpl


def _height(picture: Picture) -> float:
    if isinstance(picture, HeatMap):
        return height_of_heat(picture)
    if isinstance(picture, Strip):
        return height_of_strip(picture)
    if isinstance(picture, Histograms):
        return height_of_histograms(picture)
    if isinstance(picture, Lines):
        return 3.5
    if isinstance(picture, Bars):
        return height_of_rows(len(picture.values)) + (0.38 if picture.bands else 0.0)
    return height_of_rows(len(_rows_of(picture)))


def _rows_of(picture: Tree | Timeline) -> tuple[Any, ...]:
    return picture.nodes if isinstance(picture, Tree) else picture.turns


_DRAWERS: Mapping[type, Callable[[Any, Sheet], Callable[[], Hover]]] = {
    Bars: draw_bars,
    HeatMap: draw_heat,
    Lines: draw_lines,
    Histograms: draw_histograms,
    Strip: draw_strip,
    Tree: draw_tree,
    Timeline: draw_timeline,
}


def _draw(picture: Picture, colours: Mapping[str, str], write: Callable[[Any], None], *, titled: bool) -> Hover:
    check_matplotlib()
    import matplotlib as mpl  # noqa: PLC0415 # an extra
    from matplotlib.figure import Figure  # noqa: PLC0415 # and not pyplot: no window, no state of the process

    settings = {
        "svg.fonttype": "none", "svg.hashsalt": "kvsnap", "font.family": "sans-serif", "font.size": 9.5,
        "hatch.linewidth": 0.7, "image.composite_image": False, "axes.unicode_minus": True,
    }  # fmt: skip
    with mpl.rc_context(settings), uncollected(), warnings.catch_warnings():
        # Of a name in a script that matplotlib's own font lacks: an SVG is set in a font of its reader.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        top = _TITLE if titled else 0.0
        figure = Figure(figsize=(WIDTH, _height(picture) + top))
        hover = _DRAWERS[type(picture)](picture, Sheet(figure, colours, top))
        for axes in figure.axes:
            _ink(axes, colours)
        if titled:
            figure.text(0.011, 1 - 0.12 / figure.get_figheight(), picture.title, va="top", color=colours[INK],
                        fontweight="bold", fontsize=11.5, parse_math=False)  # fmt: skip
        write(figure)
        return hover()


def _ink(axes: Any, colours: Mapping[str, str]) -> None:
    ink = colours[INK]
    axes.tick_params(colors=ink, which="both")
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(ink)
        axis.label.set_parse_math(False)
        axis.get_offset_text().set_color(ink)
    for spine in axes.spines.values():
        spine.set_color(colours[FAINT])


def png(picture: Picture) -> bytes:
    """Return a PNG on white."""
    memory = io.BytesIO()
    _draw(picture, ON_WHITE, lambda f: f.savefig(memory, format="png", dpi=150, facecolor="white"), titled=True)
    return memory.getvalue()


def svg_file(picture: Picture) -> bytes:
    """Return an SVG file on white."""
    memory = io.BytesIO()
    _draw(
        picture, ON_WHITE,
        lambda f: f.savefig(memory, format="svg", facecolor="white", metadata={"Date": None}), titled=True,
    )  # fmt: skip
    return memory.getvalue()


def drawn(picture: Picture, prefix: str = "") -> Drawn:
    """Return a picture for a page, without its title; ids in it begin with `prefix`."""
    memory = io.BytesIO()
    hover = _draw(
        picture, SAME,
        lambda f: f.savefig(memory, format="svg", transparent=True, metadata={"Date": None}), titled=False,
    )  # fmt: skip
    return Drawn(for_page(memory.getvalue().decode(), prefix), hover)

"""Draws heat maps and token strips."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from kvsnap.plots.hover import Grid, Hover, Mark, Marks, box_in, box_of
from kvsnap.plots.pictures import Floats, HeatMap, Strip, number
from kvsnap.plots.sheet import WIDTH, Sheet, width_of

__all__ = ["SEQUENTIAL", "draw_heat", "draw_strip", "height_of_heat", "height_of_strip", "norm_of"]

SEQUENTIAL, DIVERGING = "viridis", "RdBu_r"
"""Maps of colours whose lightness orders the values, so that they are read without telling colours apart."""

_ACROSS = 16
"""Tokens in a line of a strip."""
_TICKS = 14
_CELL = 7 * width_of("x")
"""What a token in a cell may take at most, in the size of tick labels: in its own, smaller one it fits."""
_FEW = 4
"""Numbers beside a logarithmic scale, at the least."""
_SCALE_ROOM = 1.1
"""Inches for the scale of colours and its label."""


def height_of_heat(picture: HeatMap) -> float:
    """Return the height in inches: rows stay tall enough to be pointed at, pictures small enough to be seen whole."""
    rows = int(picture.values.shape[0])
    return 1.15 + min(5.6, max(0.55, rows * (0.3 if rows <= 4 else 0.19)))


def height_of_strip(picture: Strip) -> float:
    """Return the height in inches."""
    return 0.35 + 0.3 * max(1, -(-len(picture.tokens) // _ACROSS))


def norm_of(values: Floats, *, logarithmic: bool, diverging: bool) -> Any:
    """Return how matplotlib turns values into places on a map of colours; those that are no numbers do not count."""
    from matplotlib.colors import LogNorm, Normalize  # noqa: PLC0415 # an extra

    known = values[np.isfinite(values)]
    if logarithmic:
        known = known[known > 0]
        if len(known):
            low, high = float(known.min()), float(known.max())
            return LogNorm(low if low < high else low / 2, high if low < high else high * 2, clip=True)
    if not len(known):
        return Normalize(0.0, 1.0)
    low, high = float(known.min()), float(known.max())
    if diverging:
        reach = max(abs(low), abs(high)) or 1.0
        return Normalize(-reach, reach)
    return Normalize(low, high if high > low else low + (abs(low) or 1.0))


def _ticks(axis: Any, names: tuple[str, ...], starts: tuple[int, ...]) -> None:
    step = max(1, -(-len(names) // _TICKS))
    for nice in (1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 50, 64, 100, 128, 256, 512, 1024):
        if nice >= step:
            step = nice
            break
    places = list(range(0, len(names), step))
    shown = [f"{starts[i]:,}" for i in places] if starts else [names[i] for i in places]
    axis.set_ticks(places, [_cut(text) for text in shown])


def _cut(text: str) -> str:
    return text if len(text) <= 18 else f"{text[:17]}…"


def _map_of(name: str) -> Any:
    import matplotlib as mpl  # noqa: PLC0415 # an extra

    return mpl.colormaps[name].with_extremes(bad=(0, 0, 0, 0))


def draw_heat(picture: HeatMap, sheet: Sheet) -> Callable[[], Hover]:
    """Draw a matrix with its scale of colours."""
    names = picture.row_names()
    left = 0.5 + max((width_of(_cut(name)) for name in names), default=0.1)
    square = None
    if picture.x == picture.y:
        square = sheet.height - sheet.top - 0.66
    axes = sheet.axes(left=left, right=_SCALE_ROOM, width=square)
    values = np.asarray(picture.values, dtype=np.float64)
    if not values.size:
        axes.text(0.5, 0.5, "nothing to show", ha="center", va="center", transform=axes.transAxes, color=sheet.ink)
        axes.set_axis_off()
        return lambda: Marks(())
    missing = ~np.isfinite(values)
    if missing.any():
        axes.patch.set(facecolor="none", edgecolor=sheet.faint, hatch="////", linewidth=0)
    image = axes.imshow(
        np.ma.masked_array(values, missing), aspect="auto", interpolation="none",
        cmap=_map_of(DIVERGING if picture.diverging else SEQUENTIAL),
        norm=norm_of(values, logarithmic=picture.logarithmic, diverging=picture.diverging),
    )  # fmt: skip
    axes.set_xlabel(picture.x)
    axes.set_ylabel(picture.y)
    _ticks(axes.yaxis, names, ())
    if picture.ticks:
        axes.set_xticks([column for column, _ in picture.ticks], [label for _, label in picture.ticks])
    else:
        _ticks(axes.xaxis, picture.column_names(), picture.starts)
    scale_of(sheet, axes, image, picture.scale)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return lambda: Grid(box_in(sheet.figure, axes), picture)


def scale_of(sheet: Sheet, axes: Any, image: Any, text: str) -> None:
    """Add the scale of colours at the right."""
    from matplotlib.colors import LogNorm  # noqa: PLC0415 # an extra

    place = axes.get_position()
    beside = sheet.figure.add_axes((place.x1 + 0.1 / WIDTH, place.y0, 0.16 / WIDTH, place.height))
    bar = sheet.figure.colorbar(image, cax=beside)
    if isinstance(image.norm, LogNorm):
        ticks = _log_ticks(float(bar.vmin), float(bar.vmax))
        bar.set_ticks(ticks, labels=[f"{tick:.3g}" for tick in ticks])
        bar.minorticks_off()
    bar.outline.set_visible(False)
    room = place.height * sheet.height + 0.2  # beside a low picture a long label would be cut
    bar.set_label(text, color=sheet.ink, fontsize=9.5 * min(1.0, room / width_of(text)) if text else None)
    bar.ax.tick_params(colors=sheet.ink, which="both")


def _log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers between the ends of a logarithmic scale: powers of ten, and others where these are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 6, 8)):
        ticks = [float(f"{step}e{decade}") for decade in decades for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= _FEW:
            break
    return ticks if len(ticks) > 1 else [low, high]


def draw_strip(picture: Strip, sheet: Sheet) -> Callable[[], Hover]:
    """Draw tokens as cells in lines, coloured by their values."""
    from matplotlib.cm import ScalarMappable  # noqa: PLC0415 # an extra
    from matplotlib.patches import Rectangle  # noqa: PLC0415 # the same

    axes = sheet.axes(left=0.75, right=_SCALE_ROOM, bottom=0.15)
    values = np.asarray(picture.values, dtype=np.float64)
    norm = norm_of(values, logarithmic=picture.logarithmic, diverging=False)
    scale = ScalarMappable(norm, _map_of(SEQUENTIAL))
    n_lines = max(1, -(-len(picture.tokens) // _ACROSS))
    for place, (token, value) in enumerate(zip(picture.tokens, values, strict=True)):
        line, column = divmod(place, _ACROSS)
        known = bool(np.isfinite(value))
        red, green, blue, _ = scale.to_rgba(value) if known else (1.0, 1.0, 1.0, 0.0)
        axes.add_patch(
            Rectangle(
                (column + 0.03, line + 0.08), 0.94, 0.84, linewidth=0 if known else 0.8,
                edgecolor=sheet.faint, facecolor=(red, green, blue) if known else "none",
                hatch=None if known else "////", clip_on=False,
            )
        )  # fmt: skip
        dark = known and 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 < 0.18
        # Not quite black: that is left out of an SVG as its default, and a page's default is the colour of its text.
        ink = ("#ffffff" if dark else "#000001") if known else sheet.ink
        axes.text(column + 0.5, line + 0.52, _short(token), ha="center", va="center", fontsize=6.5, color=ink,
                         parse_math=False)  # fmt: skip
    axes.set_xlim(0, _ACROSS)
    axes.set_ylim(n_lines, 0)
    axes.set_yticks([n + 0.5 for n in range(n_lines)], [f"{picture.first + n * _ACROSS:,}" for n in range(n_lines)])
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    scale_of(sheet, axes, scale, picture.scale)

    def hover() -> Hover:
        marks = [
            Mark(
                box_of(sheet.figure, axes, i % _ACROSS, i // _ACROSS, i % _ACROSS + 1, i // _ACROSS + 1),
                f"position {picture.first + i:,}, {token}: {number(float(values[i]))}",
            )
            for i, token in enumerate(picture.tokens)
        ]  # fmt: skip
        return Marks(tuple(tuple(marks[at : at + _ACROSS]) for at in range(0, len(marks), _ACROSS)))

    return hover


def _short(token: str) -> str:
    """Return a token without the blanks around it, cut to the width of a cell."""
    kept = token = token.strip(" ") or token
    while width_of(kept if kept == token else f"{kept}…") > _CELL and len(kept) > 1:
        kept = kept[:-1]
    return kept if kept == token else f"{kept}…"

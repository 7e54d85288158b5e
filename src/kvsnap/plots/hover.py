"""Where the values of a drawn picture stand, so that a page can tell them under a pointer or a cursor.

Places are in the units of the picture's `viewBox`: 1/72 inch, from the upper left corner.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsnap.plots.pictures import Floats, HeatMap

__all__ = ["Box", "Grid", "Hover", "Mark", "Marks", "box_of", "rounded"]

Box = tuple[float, float, float, float]
"""Left, top, width, height."""

_DIGITS = 4


@dataclass(frozen=True, slots=True)
class Mark:
    """One thing that can be pointed at, and what is said of it. A point has no width and no height."""

    box: Box
    text: str


@dataclass(frozen=True, slots=True)
class Marks:
    """Rows of marks: arrow keys go along a row and from row to row. In data, texts of a row begin with its `lead`."""

    rows: tuple[tuple[Mark, ...], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {"kind": "marks", "rows": [_row(row) for row in self.rows if row]}


def _row(row: tuple[Mark, ...]) -> dict[str, Any]:
    first, last = min(mark.text for mark in row), max(mark.text for mark in row)
    n = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    lead = first[:n]
    return {"lead": lead, "marks": [[*mark.box, mark.text[len(lead) :]] for mark in row]}


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The cells of a heat map, all of one size, in `box`."""

    box: Box
    picture: HeatMap

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data; values with four significant digits, None for those that are none."""
        picture = self.picture
        return {
            "kind": "grid",
            "box": list(self.box),
            "x": picture.x,
            "y": picture.y,
            "scale": picture.scale,
            "rows": list(picture.row_names()),
            "columns": list(picture.column_names()),
            "values": [rounded(float(v)) for v in picture.values.ravel()],
        }


Hover = Marks | Grid


def rounded(value: float) -> float | int | str | None:
    """Return a value with four significant digits; None for NaN, text for an infinite one."""
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "infinite" if value > 0 else "minus infinite"
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short == int(short) and abs(short) < 2**53 else short


def box_of(figure: Any, axes: Any, left: float, top: float, right: float, bottom: float) -> Box:
    """Return where a box in the coordinates of `axes` stands in the picture, once it is laid out."""
    ends = axes.transData.transform(np.array([(left, top), (right, bottom)], dtype=np.float64))
    return _flipped(figure, ends)


def box_in(figure: Any, axes: Any) -> Box:
    """Return where the axes themselves stand."""
    return _flipped(figure, axes.transAxes.transform(np.array([(0.0, 1.0), (1.0, 0.0)])))


def points_of(figure: Any, axes: Any, x: Floats, y: Floats) -> list[tuple[float, float]]:
    """Return where points stand in the picture."""
    ends = axes.transData.transform(np.column_stack([x, y]).astype(np.float64)) * (72 / figure.dpi)
    height = figure.get_figheight() * 72
    return [(round(float(a), 1), round(float(height - b), 1)) for a, b in ends]


def _flipped(figure: Any, ends: Any) -> Box:
    (x0, y0), (x1, y1) = ends * (72 / figure.dpi)
    height = figure.get_figheight() * 72
    top, bottom = height - max(y0, y1), height - min(y0, y1)
    left, right = min(x0, x1), max(x0, x1)
    return (round(float(left), 1), round(float(top), 1), round(float(right - left), 1), round(float(bottom - top), 1))

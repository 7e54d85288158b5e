"""The sheet that a picture is drawn on, with margins told in inches.

Margins are worked out from the lengths of texts, not measured: in a page the text is set in the reader's font anyway,
all pictures of a kind begin at the same place, and drawing takes half the time.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvsnap.plots.colours import FAINT, INK

__all__ = ["WIDTH", "Sheet", "width_of"]

WIDTH = 9.2
"""Inches of every picture."""
_CHARACTER = 0.078
"""Inches that a character of 9.5 points takes on average."""


def width_of(text: str) -> float:
    """Return about how many inches a text takes in the size of tick labels."""
    return _CHARACTER * sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


@dataclass(frozen=True, slots=True)
class Sheet:
    """A figure of matplotlib, its colours, and the inches at its top that a title takes."""

    figure: Any
    colours: Mapping[str, str]
    top: float

    @property
    def height(self) -> float:
        return float(self.figure.get_figheight())

    @property
    def ink(self) -> str:
        return self.colours[INK]

    @property
    def faint(self) -> str:
        return self.colours[FAINT]

    def axes(
        self, *, left: float, right: float = 0.2, bottom: float = 0.56, top: float = 0.1, width: float | None = None,
        **more: Any,
    ) -> Any:  # fmt: skip
        """Return axes with these margins; with `width` it is that, and the margin at the right what is left."""
        wide = WIDTH - left - right if width is None else width
        high = self.height - self.top - bottom - top
        return self.figure.add_axes((left / WIDTH, bottom / self.height, wide / WIDTH, high / self.height), **more)

    def room_for(self, bars: Iterable[tuple[float, str]], inches: float) -> float:
        """Return where an axis from 0 of so many inches has to end for each bar and the text beside it to fit."""
        most = 0.0
        for value, text in bars:
            beside = min(width_of(text) + 0.15, 0.8 * inches)
            most = max(most, value * inches / (inches - beside), value * 1.04)
        return most or 1.0

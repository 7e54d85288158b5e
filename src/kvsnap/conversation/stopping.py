"""Texts that end an answer: found across tokens, and held back while they may still come."""

from __future__ import annotations

__all__ = ["Shown"]


class Shown:
    """The text of an answer up to a stop text. `text` is all of it, `met` tells whether a stop text was met."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.text = ""
        self.met = False
        self._stops = stops
        self._shown = 0

    def add(self, piece: str) -> str:
        """Take a piece of text and return what can be shown now: nothing that may be the start of a stop text."""
        behind = max(0, len(self.text) - max((len(stop) for stop in self._stops), default=0))
        self.text += piece
        places = [place for place in (self.text.find(stop, behind) for stop in self._stops) if place >= 0]
        if places:
            self.text, self.met = self.text[: min(places)], True
            return self._show(len(self.text))
        return self._show(len(self.text) - self._held())

    def rest(self) -> str:
        """Return what was held back: no more text comes."""
        return self._show(len(self.text))

    def _show(self, end: int) -> str:
        shown = self.text[self._shown : max(end, self._shown)]
        self._shown = max(end, self._shown)
        return shown

    def _held(self) -> int:
        """Return how many characters at the end are the start of a stop text."""
        return max(
            (n for stop in self._stops for n in range(1, min(len(stop), len(self.text) + 1))
             if self.text.endswith(stop[:n])),
            default=0,
        )  # fmt: skip

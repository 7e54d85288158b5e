"""How a cache grows, for a page: bytes by length, by kind of layer, and what a session took on disk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvsnap.inspection.growth.answers import Growth
from kvsnap.plots import Line, Lines
from kvsnap.plots.colours import LINES
from kvsnap.plots.pictures import Floats
from kvsnap.reports.escaping import visible
from kvsnap.reports.page import Block, Card, Claims, Figure, Listing, Text
from kvsnap.reports.words import size
from kvsnap.results import Table

__all__ = ["cards_of_growth", "compared_growth"]

_MOST_LINES = len(LINES)


def _lengths(longest: int) -> Floats:
    return np.unique(np.geomspace(1, max(131072, 2 * longest), 80).astype(np.int64))


def cards_of_growth(growth: Growth) -> list[Card]:
    """Return the cards of one source."""
    longest = max([p.n_tokens for p in growth.points] + [t.n_tokens for t in growth.history] + [1])
    lengths = _lengths(longest)
    points = [growth.at(int(n)) for n in lengths]
    total = np.array([p.cache_bytes for p in points]) / 1e6
    lines = [Line("live cache", lengths, total)]
    kept = np.array([p.kept_bytes for p in points]) / 1e6
    if np.any(kept != total):
        lines.append(Line("all rows kept", lengths, kept))
    codecs = tuple(points[-1].stored)
    lines += [
        Line(f"stored as {codec}", lengths, np.array([p.stored[codec] for p in points]) / 1e6) for codec in codecs
    ]
    kinds = growth.kinds
    if len(kinds) > 1:
        lines += [Line(kind, lengths, np.array([p.by_kind.get(kind, 0) for p in points]) / 1e6) for kind in kinds]
    picture = Lines(title="Size by length", x="tokens", y="MB", lines=tuple(lines[:_MOST_LINES]), logarithmic_x=True,
                    logarithmic_y=True)  # fmt: skip
    blocks: list[Block] = [Figure("growth", picture, _slope(growth, longest))]
    blocks += _left_out([line.name for line in lines[_MOST_LINES:]])
    rows = tuple(
        (p.n_tokens, p.cache_bytes, p.kept_bytes, p.bytes_per_token, *p.stored.values()) for p in growth.points
    )
    if rows:
        stored = (f"bytes stored as {codec}" for codec in codecs)
        names = ("tokens", "cache_bytes", "bytes with all rows kept", "bytes_per_token", *stored)
        blocks.append(Listing(Table("At these lengths", names, rows)))
    if growth.checked:
        blocks.append(Claims(tuple(
            (f"{c.against}: {c.predicted:,} bytes expected, {c.actual:,} there, over {c.layers} layers", c.ok)
            for c in growth.checked
        )))  # fmt: skip
    blocks += [Text(visible(note), quiet=True) for note in growth.notes]
    made = [Card("Growth", tuple(blocks))]
    history = _history(growth)
    return [*made, history] if history is not None else made


def _slope(growth: Growth, longest: int) -> str:
    at = growth.at(longest)
    return f"At {longest:,} tokens: {size(at.cache_bytes)}, and {size(at.bytes_per_token)} for the next one."


def _history(growth: Growth) -> Card | None:
    turns = growth.history
    if len(turns) < 2:
        return None
    commits = np.array([t.commit for t in turns])
    tokens = np.array([t.n_tokens for t in turns])
    lines = (Line("file", commits, np.array([t.file_bytes for t in turns]) / 1e6, marked=len(turns) <= 40),)
    text = f"The file after each commit; {tokens[-1]:,} tokens are live at the last one. What is given up stays until "
    picture = Lines(title="The file over its commits", x="commit", y="MB", lines=lines)
    return Card("On disk", (Figure("on-disk", picture, text + "the session is compacted."),))


def compared_growth(growths: Sequence[tuple[str, Growth]]) -> Card | None:
    """Return several sources side by side in one picture."""
    if len(growths) < 2:
        return None
    longest = max((p.n_tokens for _, g in growths for p in g.points), default=1)
    lengths = _lengths(max([longest, *(t.n_tokens for _, g in growths for t in g.history)]))
    lines = tuple(
        Line(visible(name), lengths, np.array([g.nbytes(int(n)) for n in lengths]) / 1e6)
        for name, g in growths[:_MOST_LINES]
    )  # fmt: skip
    picture = Lines(title="Size of the live cache by length", x="tokens", y="MB", lines=lines, logarithmic_x=True,
                    logarithmic_y=True)  # fmt: skip
    left = _left_out([visible(name) for name, _ in growths[_MOST_LINES:]])
    return Card("Growth side by side", (Figure("growth-compared", picture), *left))


def _left_out(names: Sequence[str]) -> list[Text]:
    return [Text(f"Not drawn, as there are more lines than can be told apart: {', '.join(names)}.")] if names else []

"""Pages about what one inspection answered: diff, statistics, growth, quality."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvsnap.errors import InputError
from kvsnap.inspection.diff.answers import Diff
from kvsnap.inspection.growth.answers import Growth
from kvsnap.inspection.quality.answers import Quality
from kvsnap.inspection.statistics import Statistics
from kvsnap.reports.comparing import cards_of_diff
from kvsnap.reports.escaping import visible
from kvsnap.reports.growing import cards_of_growth, compared_growth
from kvsnap.reports.judging import cards_of_quality
from kvsnap.reports.measures import cards_of
from kvsnap.reports.page import Card, Group, Note, Page
from kvsnap.reports.words import shortest_names

__all__ = ["Answer", "page_of_answer", "text_note"]

Answer = Diff | Statistics | Quality | Growth | Sequence[Growth]

_WITH_TEXT = (
    "This page holds text or token ids of the conversation: whoever has it can read that. Made with --no-text (in "
    "Python text=False) it holds neither."
)
_WITHOUT = (
    "Text and token ids were left out. Norms and other figures are of the same tokens still, and are no secret from "
    "somebody who has the model."
)


def text_note(*, with_text: bool) -> Note:
    """Return what a page says at its top of the text in it."""
    return Note(_WITH_TEXT if with_text else _WITHOUT)


def page_of_answer(found: Answer, lead: str, *, title: str | None, with_text: bool) -> Page:
    """Return the page of an answer; several growths stand side by side. Raise `InputError` for an empty sequence."""
    if isinstance(found, Diff):
        sides = [side.path or name for side, name in ((found.a, "a"), (found.b, "b"))]
        a, b = shortest_names(sides) if sides[0] != sides[1] else ("a", "b")
        head, cards = f"{a} and {b}", cards_of_diff(found, (a, b), with_text=with_text)
    elif isinstance(found, Statistics):
        head = f"Statistics of {os.path.basename(found.path or found.architecture)}"
        cards = cards_of(found, None, with_text=with_text)
    elif isinstance(found, Quality):
        head = f"Quality against {os.path.basename(found.reference)}"
        cards = cards_of_quality(found, with_text=with_text)
    else:
        head, cards = _of_growths([found] if isinstance(found, Growth) else list(found))
    notes = (text_note(with_text=with_text),) if isinstance(found, Diff | Statistics | Quality) else ()
    return Page(title or visible(head), lead, (Group("What was found", tuple(cards)),), notes=notes)


def _of_growths(several: Sequence[Growth]) -> tuple[str, list[Card]]:
    if not several:
        raise InputError("a report needs something to tell of")
    names = [one.source or one.architecture for one in several]
    side = compared_growth(list(zip(names, several, strict=True)))
    cards = [] if side is None else [side]
    for name, one in zip(names, several, strict=True):
        own = cards_of_growth(one)
        cards += own if len(several) == 1 else [Card(f"{visible(name)}: {c.title.lower()}", c.blocks) for c in own]
    return "Growth of " + (names[0] if len(several) == 1 else f"{len(several)} caches"), cards

"""A page as data, and its HTML: one file that asks no network, and is whole without scripts.

A `Page` has groups (one for each file, say), a group has cards, a card has blocks. Style and script are in the page,
and its policy allows nothing else.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import resources

from kvsnap.plots import Picture, drawn
from kvsnap.reports.escaping import data, escaped, slug
from kvsnap.results import Table, text_of

__all__ = [
    "Block",
    "Card",
    "Claims",
    "Facts",
    "Figure",
    "Group",
    "Listing",
    "Note",
    "Page",
    "Quote",
    "Text",
    "Tiles",
    "figures_of",
    "html_of",
]

_ROWS = 400
"""Rows of a table in the page; the rest is counted."""


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    text: str
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class Note:
    """A paragraph that must not be missed."""

    text: str
    bad: bool = False


@dataclass(frozen=True, slots=True)
class Quote:
    """Text from a file, line breaks kept."""

    text: str
    label: str


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and what is known of each."""

    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Tiles:
    """A few figures at a glance: the figure and what it is."""

    tiles: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Claims:
    """Sentences; each with whether it holds, None where that is not the question."""

    claims: tuple[tuple[str, bool | None], ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """A table. A folded one is opened by the reader."""

    table: Table
    folded: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Figure:
    """A picture with its name (of a file, too) and what is to be seen in it. Its numbers follow as a table."""

    name: str
    picture: Picture
    text: str = ""


Block = Text | Note | Quote | Facts | Tiles | Claims | Listing | Figure


@dataclass(frozen=True, slots=True, eq=False)
class Card:
    """A part with a heading."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Cards that belong together, under a heading that the navigation leads to."""

    title: str
    cards: tuple[Card, ...]
    lead: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Page:
    """A whole page. `notes` are said at its top."""

    title: str
    lead: str
    groups: tuple[Group, ...]
    notes: tuple[Note, ...] = field(default=())


def figures_of(page: Page) -> Iterator[Figure]:
    """Yield the figures of a page, from top to bottom."""
    for group in page.groups:
        for card in group.cards:
            yield from (block for block in card.blocks if isinstance(block, Figure))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return (resources.files("kvsnap.reports") / name).read_text(encoding="utf-8")


def html_of(page: Page, progress: Callable[[int, int], None] | None = None) -> str:
    """Return the page. Raise `ExtraMissingError` without matplotlib where there is something to draw.

    `progress` is called with (done, total) figures.
    """
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    count = _Count(sum(1 for _ in figures_of(page)), progress)
    ids = _ids([group.title for group in page.groups])
    targets = [(name, group.title) for name, group in zip(ids, page.groups, strict=True)]
    if len(targets) == 1:  # then to its cards
        targets = [(f"{ids[0]}-{n}", card.title) for n, card in enumerate(page.groups[0].cards, 1)]
    links = "".join(f'<li><a href="#{name}">{escaped(title)}</a></li>' for name, title in targets)
    navigation = f'<nav aria-label="Parts of this page"><ul>{links}</ul></nav>' if len(targets) > 1 else ""
    body = "".join(_group(group, name, count) for name, group in zip(ids, page.groups, strict=True))
    notes = "".join(_block(note, "", count) for note in page.notes)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f'<link rel="icon" href="data:,"><title>{escaped(page.title)}</title><style>{style}</style></head><body>'
        '<a class="skip" href="#main">Skip to the content</a>'
        f'<header><h1>{escaped(page.title)}</h1><button class="theme" type="button" hidden>Dark page</button>'
        f'<p class="quiet">{escaped(page.lead)}</p>{navigation}</header>'
        f'<main id="main" tabindex="-1">{notes}{body}<div id="live" class="hidden" aria-live="polite"></div>'
        '<div id="keys" class="hidden">Arrow keys go from value to value, Home and End to the ends of a row, Escape '
        "leaves the picture. The table below holds the same numbers.</div></main>"
        f"<script>{script}</script></body></html>\n"
    )


class _Count:
    """Numbers the figures as they are drawn, so that no two have one id, and tells of the progress."""

    def __init__(self, total: int, progress: Callable[[int, int], None] | None) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def next(self) -> int:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)
        return self.done


def _ids(titles: list[str]) -> list[str]:
    return [f"{slug(title)}-{n}" for n, title in enumerate(titles, 1)]


def _group(group: Group, name: str, count: _Count) -> str:
    lead = f'<p class="quiet">{escaped(group.lead)}</p>' if group.lead else ""
    cards = "".join(
        f'<div class="card"><h3 id="{name}-{n}">{escaped(card.title)}</h3>'
        f"{''.join(_block(block, card.title, count) for block in card.blocks)}</div>"
        for n, card in enumerate(group.cards, 1)
    )
    head = f'<h2 id="{name}-0">{escaped(group.title)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-0">{head}{lead}{cards}</section>'


def _block(block: Block, title: str, count: _Count) -> str:
    if isinstance(block, Figure):
        return _figure(block, title, count)
    if isinstance(block, Text):
        return f"<p{' class=quiet' if block.quiet else ''}>{escaped(block.text)}</p>"
    if isinstance(block, Note):
        return f'<p class="note{" bad" if block.bad else ""}">{escaped(block.text)}</p>'
    if isinstance(block, Quote):
        return (
            f'<pre dir="auto" tabindex="0" role="group" aria-label="{escaped(block.label)}">'
            f"{escaped(block.text, lines=True)}</pre>"
        )
    if isinstance(block, Facts):
        return f"<dl>{''.join(f'<dt>{escaped(n)}</dt><dd>{escaped(v)}</dd>' for n, v in block.facts)}</dl>"
    if isinstance(block, Tiles):
        tiles = "".join(f'<div class="tile"><b>{escaped(b)}</b><span>{escaped(t)}</span></div>' for b, t in block.tiles)
        return f'<div class="tiles">{tiles}</div>'
    if isinstance(block, Claims):
        kinds = {True: ' class="good"', False: ' class="bad"', None: ""}
        return f'<ul class="plain">{"".join(f"<li{kinds[h]}>{escaped(t)}</li>" for t, h in block.claims)}</ul>'
    if block.folded:
        return f"<details><summary>{escaped(block.table.title)}</summary>{_table(block.table, caption=False)}</details>"
    return f'<div class="open">{_table(block.table, caption=block.table.title != title)}</div>'


def _figure(figure: Figure, title: str, count: _Count) -> str:
    number = count.next()
    name = f"figure-{number}"
    made = drawn(figure.picture, f"f{number}-")
    own = figure.picture.title
    head = f"<b>{escaped(own)}</b>" if own != title else f'<span class="hidden">{escaped(own)}</span>'
    text = f' <span class="quiet">{escaped(figure.text)}</span>' if figure.text else ""
    return (
        f'<figure role="group" aria-labelledby="{name}-title" data-name="{slug(figure.name)}">'
        f'<figcaption><span id="{name}-title">{head}</span>{text}</figcaption>'
        f'<div class="plot" id="{name}" role="img" aria-labelledby="{name}-title">{made.svg}</div>'
        f'<script type="application/json" id="{name}-data">{data(made.hover.to_dict())}</script>'
        f"<details><summary>The numbers as a table<span class=hidden>: {escaped(own)}</span></summary>"
        f"{_table(figure.picture.table(), caption=False)}</details></figure>"
    )


def _table(table: Table, *, caption: bool) -> str:
    kinds = [
        ' class="n"' if table.rows and all(row[i] is None or _is_number(row[i]) for row in table.rows) else ""
        for i in range(len(table.columns))
    ]
    head = "".join(
        f'<th scope="col"{kind}>{escaped(c.replace("_", " "))}</th>'
        for c, kind in zip(table.columns, kinds, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(f"<td{k}>{escaped(_cell(v))}</td>" for v, k in zip(row, kinds, strict=True)) + "</tr>"
        for row in table.rows[:_ROWS]
    )
    more = len(table.rows) - _ROWS
    rest = f'<p class="quiet">{more:,} more rows</p>' if more > 0 else ""
    title = f"<caption>{escaped(table.title)}</caption>" if caption and table.title else ""
    return (
        f'<div class="table" tabindex="0" role="group" aria-label="{escaped(table.title)}"><table>{title}'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{rest}"
    )


def _cell(value: str | float | bool | None) -> str:
    """Return a cell for people; a float that is a whole number as one."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return text_of(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

"""A library for a page: its forks as a tree, what each session takes, how old it is, and what could go."""

from __future__ import annotations

import time
from collections.abc import Iterator

from kvsnap.library import Branch, Entry, Library
from kvsnap.plots import Bars, Node, Tree
from kvsnap.reports.escaping import visible
from kvsnap.reports.page import Block, Card, Figure, Group, Listing, Note, Page, Text, Tiles
from kvsnap.reports.words import count, size, when
from kvsnap.results import Table

__all__ = ["page_of_library"]

_MOST = 80
"""Rows that are drawn in one picture."""
_DAY_NS = 86_400 * 10**9
_AGES = ((1, "today"), (7, "this week"), (30, "this month"), (365, "this year"))


def page_of_library(library: Library, title: str) -> Page:
    """Return the page of a library that is open; reads no tensor and changes nothing."""
    entries, roots, limit = library.list(), library.tree(), library.max_bytes
    spare = library.collect(dry_run=True)
    total = library.nbytes
    cards = [_overview(entries, total, limit), *_forest(roots), *_sizes(entries)]
    cards += [card for card in (_ages(entries), _could_go(entries, spare.nbytes, len(spare.removed))) if card]
    return Page(
        title, f"{library.path}, {count(len(entries), 'session')}, {size(total)}", (Group("The library", tuple(cards)),)
    )


def _overview(entries: tuple[Entry, ...], total: int, limit: int | None) -> Card:
    bad = [e for e in entries if e.state != "ok"]
    tiles = (
        (f"{len(entries):,}", "names"),
        (size(total), "in all files"),
        ("none" if limit is None else size(limit), "limit"),
        (f"{sum(1 for e in entries if e.parent):,}", "forks"),
        (f"{sum(1 for e in entries if e.pinned):,}", "pinned"),
    )
    blocks: list[Block] = [Tiles(tiles)]
    blocks += [Note(visible(f"{e.name}: {e.state}. {e.reason}"), bad=True) for e in bad[:20]]
    rows = tuple(
        (visible(e.name), e.n_tokens, e.n_commits, e.own_bytes, e.nbytes, when(e.last_use_ns), e.pinned,
         visible(", ".join(e.parent_names)), visible(e.identity), e.state) for e in entries
    )  # fmt: skip
    columns = ("name", "tokens", "commits", "own_bytes", "bytes_with_parents", "used", "pinned", "fork_of", "made_with",
               "state")  # fmt: skip
    blocks.append(Listing(Table("Every session", columns, rows), folded=True))
    return Card("What is there", tuple(blocks))


def _nodes(roots: tuple[Branch, ...]) -> Iterator[Node]:
    left = [(0, branch) for branch in reversed(roots)]
    while left:
        depth, branch = left.pop()
        names = ", ".join(branch.names)
        told = f"{size(branch.own_bytes)}, {count(branch.n_tokens, 'token')}"
        if branch.state != "ok":
            told += f", {branch.state}"
        yield Node(
            name=visible(names) if names else "(no name)", depth=depth, value=branch.own_bytes / 1e6,
            text=visible(told), faded=not names,
        )  # fmt: skip
        left += [(depth + 1, fork) for fork in reversed(branch.forks)]


def _forest(roots: tuple[Branch, ...]) -> list[Card]:
    nodes = list(_nodes(roots))
    if not nodes:
        return []
    text = (
        "A fork stands below the session that its history starts in; a bar is what its own file takes. Grey: a file "
        "that no name means, kept because forks need it."
    )
    blocks: list[Block] = [Figure("forks", Tree(title="Forks", axis="MB of its own", nodes=tuple(nodes[:_MOST])), text)]
    if len(nodes) > _MOST:
        blocks.append(Text(f"{len(nodes) - _MOST:,} more files are not drawn.", quiet=True))
    return [Card("Forks", tuple(blocks))]


def _sizes(entries: tuple[Entry, ...]) -> list[Card]:
    largest = sorted((e for e in entries if e.nbytes), key=lambda e: -e.nbytes)[:25]
    if not largest:
        return []
    bars = {
        visible(e.name): (
            e.nbytes / 1e6, size(e.nbytes) + (f", {size(e.own_bytes)} of its own" if e.own_bytes != e.nbytes else "")
        ) for e in largest
    }  # fmt: skip
    picture = Bars("The largest sessions", "MB with all that it needs", bars, (1,) * len(bars))
    return [Card("The largest sessions", (Figure("largest", picture),))]


def _ages(entries: tuple[Entry, ...]) -> Card | None:
    if not entries:
        return None
    now = time.time_ns()
    sums: dict[str, tuple[int, int]] = {name: (0, 0) for _, name in _AGES} | {"longer ago": (0, 0)}
    for e in entries:
        days = max(0, now - e.last_use_ns) / _DAY_NS
        name = next((name for limit, name in _AGES if days < limit), "longer ago")
        n, nbytes = sums[name]
        sums[name] = (n + 1, nbytes + e.own_bytes)
    bars = {name: (nbytes / 1e6, f"{count(n, 'session')}, {size(nbytes)}") for name, (n, nbytes) in sums.items()}
    picture = Bars("When sessions were used last", "MB of their own", bars, (1,) * len(bars))
    return Card("When sessions were used last", (Figure("ages", picture),))


def _could_go(entries: tuple[Entry, ...], spare: int, files: int) -> Card | None:
    oldest = sorted((e for e in entries if not e.pinned and e.own_bytes), key=lambda e: e.last_use_ns)[:25]
    blocks: list[Block] = []
    if files:
        blocks.append(Text(f"kvsnap collect would free {size(spare)}: {count(files, 'file')} that no name reaches."))
    else:
        blocks.append(Text("Every file is reached by a name: kvsnap collect would free nothing."))
    if oldest:
        total, rows = 0, []
        for e in oldest:
            total += e.own_bytes
            rows.append((visible(e.name), when(e.last_use_ns), e.own_bytes, total))
        blocks += [
            Text("Not pinned, the longest unused first. A file that a fork needs stays when its name goes."),
            Listing(
                Table("What kvsnap prune looks at first", ("name", "used", "own_bytes", "bytes_so_far"), tuple(rows))
            ),
        ]
    return Card("What could go", tuple(blocks))

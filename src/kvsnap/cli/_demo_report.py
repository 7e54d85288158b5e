"""The page that the demo leaves: `report.html`, self-contained, and its pictures as PNG."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

import kvsnap
from kvsnap.cli._demo_parts import Run, Step
from kvsnap.cli._output import seconds, size
from kvsnap.files import write_whole
from kvsnap.reports.page import Card, Claims, Figure, Group, Listing, Page, Text, Tiles, html_of
from kvsnap.results import Table

__all__ = ["write_report"]


def _pictures(steps: Sequence[Step], norms: Any) -> dict[int, dict[str, Any]]:
    """Return the pictures of each step, by name."""
    from kvsnap.plots import Bars, HeatMap

    went, small, grown = steps[1].facts, steps[3].facts, steps[4].facts
    known, hashed, again = went["restore_first_s"], went["restore_hashed_first_s"], went["prefill_first_s"]
    times = {
        "restore, weights hashed too": (hashed, seconds(hashed)),
        "restore, identity known": (known, seconds(known)),
        "read again": (again, seconds(again)),
    }
    sizes = {
        "exact": (small["exact_bytes"] / 1e6, size(small["exact_bytes"])),
        "q8": (small["q8_bytes"] / 1e6, f"{size(small['q8_bytes'])}, {small['ratio']:.2f} times smaller"),
    }
    appends = {"first commit": (grown["first_bytes"] / 1e6, size(grown["first_bytes"]))}
    for number, turn in enumerate(grown["turns"], 1):
        appends[f"turn {number}"] = (turn["written"] / 1e6, f"{size(turn['written'])} for {turn['tokens']} tokens")
    moved = {f"step {n}": (value, f"{value:.1e}") for n, value in enumerate(small["kl"], 1)}
    n_positions = steps[0].facts["prompt_tokens"] + steps[0].facts["generated_tokens"] // 2
    starts = tuple(int(part[0]) for part in np.array_split(np.arange(n_positions), norms.shape[1]))
    return {
        2: {"first-token": Bars("Time to the first token", "seconds (logarithmic)", times, (1, 1, 2), True)},
        4: {
            "sizes": Bars("Size of the file", "MB", sizes, (1, 2)),
            "q8-moved": Bars("How far q8 moved the next-token distribution", "KL, nats", moved,
                             (1,) * len(moved)),
        },
        5: {"appends": Bars("Bytes written by each commit", "MB", appends, (2, *(1,) * len(grown["turns"])))},
        1: {"key-norms": HeatMap(
            title="What is in the file: length of the keys", x="position", y="layer", scale="mean over heads",
            values=norms, columns=tuple(map(str, starts)), starts=starts,
        )},
    }  # fmt: skip


def _plain(line: str) -> str:
    return re.sub(r"\[/?bold\]", "", line).replace("\\[", "[")


def _card(step: Step, figures: Sequence[Figure]) -> Card:
    claims = tuple(
        (c.text if c.holds or not c.found else f"{c.text} (found: {c.found})", bool(c.holds)) for c in step.claims
    )
    lines = tuple(Text(_plain(line)) for line in step.lines)
    return Card(f"{step.number}. {step.title}", (*lines, *figures, Claims(claims)))


def _page(run: Run, steps: Sequence[Step], figures: dict[int, list[Figure]], taken: float) -> Page:
    went, small, grown = steps[1].facts, steps[3].facts, steps[4].facts
    held, total = sum(c.holds for s in steps for c in s.claims), sum(len(s.claims) for s in steps)
    tiles = Tiles((
        (f"{went['speedup']:,.0f} ×", "faster to the first token than reading again, weights hashed too"),
        (f"{went['speedup_known']:,.0f} ×", "faster where the model’s identity is known"),
        (f"{went['first_forwards']}", "forward passes for the first token"),
        (f"{small['ratio']:.2f} ×", "smaller as q8"),
        (size(max(t["written"] for t in grown["turns"])), f"at most for a turn, on {size(grown['first_bytes'])}"),
        (f"{held} of {total}", "claims checked and held"),
    ))  # fmt: skip
    cards = tuple(_card(step, figures.get(step.number, [])) for step in steps)
    files = Table("", ("what", "where"), tuple(run.files.items()))
    return Page(
        "A model’s memory, saved and taken up again",
        f"{run.model_name}, {len(run.prompt):,} tokens of text, {seconds(taken)}, kvsnap {kvsnap.__version__}. Every "
        "claim on this page was checked by the program that wrote it.",
        (
            Group("At a glance", (Card("What was measured", (tiles,)),)),
            Group("Step by step", cards),
            Group("Files", (Card("Where everything lies", (Listing(files),)),)),
        ),
    )


def _has_matplotlib() -> bool:
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        return False
    return True


def write_report(run: Run, steps: Sequence[Step], norms: Any, taken: float) -> dict[str, str]:
    """Write the page and its pictures (without matplotlib: the page alone); return name to path."""
    made: dict[str, str] = {}
    figures: dict[int, list[Figure]] = {}
    if _has_matplotlib():
        from kvsnap.plots import png

        for number, pictures in _pictures(steps, norms).items():
            for name, picture in pictures.items():
                figures.setdefault(number, []).append(Figure(name, picture))
                made[name] = run.path(f"{name}.png")
                write_whole(made[name], png(picture))
    made["report"] = run.path("report.html")
    write_whole(made["report"], html_of(_page(run, steps, figures, taken)).encode())
    return made

"""The page that the demo leaves: `report.html`, self-contained, and its pictures as PNG."""

from __future__ import annotations

import html
import importlib
import re
from collections.abc import Sequence
from typing import Any

import kvsnap
from kvsnap.cli._demo_parts import Run, Step
from kvsnap.cli._output import seconds, size
from kvsnap.files import write_whole

__all__ = ["write_report"]

_STYLE = """
:root { color-scheme: light dark; --paper: #fbfbf9; --card: #ffffff; --ink: #1c2330; --quiet: #5b6576; --line: #e3e6ec;
  --faint: #d9dde5; --good: #18794e; --bad: #c02a2a; --bar-1: #2166ac; --bar-2: #d9822b; --bar-3: #9aa5b5; }
@media (prefers-color-scheme: dark) { :root { --paper: #12151b; --card: #1a1f28; --ink: #e4e8ef; --quiet: #9aa5b5;
  --line: #2a313d; --faint: #38414f; --good: #5cc98f; --bad: #ff7b72; --bar-1: #6aaee6; --bar-2: #f0a757;
  --bar-3: #6d788a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 56rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem; } h2 { font-size: 1.15rem; margin: 0 0 .5rem; }
p { margin: .35rem 0; } .quiet { color: var(--quiet); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.4rem, 1fr)); gap: .8rem; margin: 1.6rem 0; }
.tile, section { background: var(--card); border: 1px solid var(--line); border-radius: .7rem; }
.tile { padding: .9rem 1.1rem; } .tile b { display: block; font-size: 1.5rem; line-height: 1.25; }
.tile span { color: var(--quiet); font-size: .88rem; }
section { padding: 1.1rem 1.3rem; margin: 1rem 0; }
section svg { display: block; width: 100%; height: auto; margin: .8rem 0; }
ul { list-style: none; padding: 0; margin: .8rem 0 0; } li { padding: .1rem 0 .1rem 1.6rem; position: relative; }
li::before { content: "✓"; position: absolute; left: .2rem; color: var(--good); font-weight: 700; }
li.bad::before { content: "✗"; color: var(--bad); } li.bad { color: var(--bad); }
table { border-collapse: collapse; font-size: .93rem; } td { padding: .15rem 1rem .15rem 0; }
td:first-child { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: .9em;
  overflow-wrap: anywhere; }
"""


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
    positions = (0.0, float(steps[0].facts["prompt_tokens"] + steps[0].facts["generated_tokens"] // 2))
    return {
        2: {"first-token": Bars("Time to the first token", "seconds (logarithmic)", times, (1, 1, 2), True)},
        4: {
            "sizes": Bars("Size of the file", "MB", sizes, (1, 2)),
            "q8-moved": Bars("How far q8 moved the next-token distribution", "KL, nats", moved,
                             (1,) * len(moved)),
        },
        5: {"appends": Bars("Bytes written by each commit", "MB", appends, (2, *(1,) * len(grown["turns"])))},
        1: {"key-norms": HeatMap("What is in the file: length of the keys", "position", "layer", "mean over heads",
                                 norms, positions)},
    }  # fmt: skip


def _plain(line: str) -> str:
    return html.escape(re.sub(r"\[/?bold\]", "", line).replace("\\[", "["))


def _section(step: Step, drawn: Sequence[str]) -> str:
    lines = "".join(f"<p>{_plain(line)}</p>" for line in step.lines)
    claims = "".join(
        f"<li{'' if c.holds else ' class=bad'}>{html.escape(c.text)}"
        f"{'' if c.holds or not c.found else html.escape(f' (found: {c.found})')}</li>"
        for c in step.claims
    )
    return (
        f"<section><h2>{step.number}. {html.escape(step.title)}</h2>{lines}{''.join(drawn)}<ul>{claims}</ul></section>"
    )


def _page(run: Run, steps: Sequence[Step], drawn: dict[int, list[str]], taken: float) -> str:
    went, small, grown = steps[1].facts, steps[3].facts, steps[4].facts
    held, total = sum(c.holds for s in steps for c in s.claims), sum(len(s.claims) for s in steps)
    tiles = (
        (f"{went['speedup']:,.0f} ×", "faster to the first token than reading again, weights hashed too"),
        (f"{went['speedup_known']:,.0f} ×", "faster where the model’s identity is known"),
        (f"{went['first_forwards']}", "forward passes for the first token"),
        (f"{small['ratio']:.2f} ×", "smaller as q8"),
        (size(max(t["written"] for t in grown["turns"])), f"at most for a turn, on {size(grown['first_bytes'])}"),
        (f"{held} of {total}", "claims checked and held"),
    )
    cards = "".join(f'<div class="tile"><b>{b}</b><span>{html.escape(t)}</span></div>' for b, t in tiles)
    sections = "".join(_section(s, drawn.get(s.number, [])) for s in steps)
    rows = "".join(
        f"<tr><td>{html.escape(n)}</td><td><code>{html.escape(p)}</code></td></tr>" for n, p in run.files.items()
    )
    name = html.escape(run.model_name)
    about = f"{name}, {len(run.prompt):,} tokens of text, {seconds(taken)}, kvsnap {kvsnap.__version__}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>kvsnap demo</title><style>{_STYLE}</style></head><body><main>"
        f"<h1>A model’s memory, saved and taken up again</h1>"
        f"<p class=quiet>{about}. Every claim on this page was checked "
        f"by the program that wrote it.</p><div class=tiles>{cards}</div>{sections}"
        f"<section><h2>{len(steps) + 1}. Where everything lies</h2><table>{rows}</table></section>"
        "</main></body></html>\n"
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
    drawn: dict[int, list[str]] = {}
    if _has_matplotlib():
        from kvsnap.plots import png, svg

        for number, pictures in _pictures(steps, norms).items():
            for name, picture in pictures.items():
                drawn.setdefault(number, []).append(svg(picture))
                made[name] = run.path(f"{name}.png")
                write_whole(made[name], png(picture))
    made["report"] = run.path("report.html")
    write_whole(made["report"], _page(run, steps, drawn, taken).encode())
    return made

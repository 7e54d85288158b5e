"""The table of families in `docs/families.md`: from results to entries, to the document."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from family_runs import AFTER, FEW, POINTS, Case, Result, fault_in

__all__ = ["DATA", "DOCUMENT", "entries", "read", "render", "write"]

DATA = Path(__file__).parent / "data" / "families.json"
DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "families.md"

Entries = dict[str, dict[str, Any]]

_HEAD = """\
# Families of models

Which models of transformers are saved and resumed, and what is kept of each. This page is made by
`scripts/families.py` from what `tests/test_families.py` finds, with a tiny random model of every family that holds
every kind of layer it has.

**Exact** means: saved to a file at {points} (in bfloat16, and with another attention
than the first that is named, at {few}), and after each turn of a session;
resumed in a new process; there the next {after} tokens have the same ids, and every bit of all their logits is the same
as in the run that was never interrupted. The forward passes are counted: one for each token, none for what was saved.
So it is for a turn evaluated behind what was restored. Damaged values (a row zeroed, rows shifted, a window that starts
one row off, a state zeroed) are noticed by the same comparison.

Layer classes are those of transformers' caches. A class that is not known is refused by its name, and so is a subclass
of one that is.
"""


def entries(results: Mapping[Case, Result]) -> Entries:
    """Return what is said of each family: what it is refused for, or what is kept and where it is exact."""
    found: Entries = {}
    for case, result in results.items():
        if result.refused:
            found[case.family] = {"refused": " ".join(result.refused.split())}
            continue
        entry = found.setdefault(
            case.family, {"classes": list(result.classes), "kept": list(result.kept), "exact": {}}
        )  # fmt: skip
        if not fault_in(case, result):
            entry["exact"].setdefault(case.dtype, []).append(case.attention)
    return found


def read() -> dict[str, Entries]:
    """Return the entries by release."""
    return dict(json.loads(DATA.read_text())) if DATA.exists() else {}


def write(table: Mapping[str, Entries]) -> None:
    """Write the entries and the document made of them."""
    ordered = {release: table[release] for release in sorted(table, key=_order, reverse=True)}
    DATA.write_text(json.dumps(ordered, indent=1) + "\n")
    DOCUMENT.write_text(render(ordered))


def _order(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".")[:3] if part.isdigit())


def render(table: Mapping[str, Entries]) -> str:
    """Return the document."""
    points = ", ".join(map(str, sorted({p.prompt + p.steps for p in POINTS.values()})))
    few = " and ".join(str(POINTS[name].prompt + POINTS[name].steps) for name in FEW)
    names = list(dict.fromkeys(name for found in table.values() for name in found))
    lines = [_HEAD.format(points=f"{points} tokens", few=few, after=AFTER)]
    lines += [
        f"Run with transformers {', '.join(table)}. A family that is not in all of them is not in all releases.",
        "",
        "| family | layers | kept | exact in | transformers |",
        "|---|---|---|---|---|",
    ]
    refused = []
    for name in names:
        by_release = {release: found[name] for release, found in table.items() if name in found}
        groups: dict[str, list[str]] = {}
        for release, entry in by_release.items():
            groups.setdefault(json.dumps(entry), []).append(release)
        for text, releases in groups.items():
            entry = json.loads(text)
            if "refused" in entry:
                refused.append(f"| {name} | {entry['refused'].replace('|', ' ')} | {', '.join(releases)} |")
                continue
            exact = "; ".join(f"{dtype} ({', '.join(kinds)})" for dtype, kinds in entry["exact"].items()) or "**no**"
            lines.append(
                f"| {name} | {', '.join(entry['classes'])} | {'; '.join(entry['kept'])} | {exact} "
                f"| {', '.join(releases)} |"
            )
    lines += ["", "## Refused", "", "| family | the reason given | transformers |", "|---|---|---|", *refused, ""]
    return "\n".join(lines)

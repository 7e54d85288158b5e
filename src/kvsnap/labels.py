"""What stays true of a history: that it was edited, that a difference was accepted, how its rows were evaluated.

A label is a line of text in the metadata of a snapshot. An engine carries those of the rows that it holds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from kvsnap.identity import Compatibility
from kvsnap.layout import Snapshot

__all__ = [
    "ACCEPTED",
    "EDITED",
    "LABELS",
    "TOGETHER",
    "accepted_label",
    "inexact_because",
    "labels_of",
    "together_label",
    "together_of",
]

EDITED, ACCEPTED, TOGETHER = "edited", "accepted", "speculated"
LABELS = (EDITED, ACCEPTED, TOGETHER)
_MOST = 500


def labels_of(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the labels among the metadata of a snapshot that hold for all of its rows."""
    return {name: metadata[name] for name in (EDITED, ACCEPTED) if name in metadata}


def accepted_label(snapshot: Snapshot, report: Compatibility) -> Snapshot:
    """Return a snapshot that says which differences from the model it is restored into were accepted."""
    taken = [str(f) for f in report.fields if f.level == "fatal" and f.verdict == "differ"]
    if not taken:
        return snapshot
    before = snapshot.metadata.get(ACCEPTED)
    told = "; ".join(([before] if before else []) + taken)
    return replace(snapshot, metadata={**snapshot.metadata, ACCEPTED: told[:_MOST]})


def together_label(rows: tuple[int, int]) -> dict[str, str]:
    """Return the label of rows from the first up to the last, some evaluated with proposals; none where none were."""
    first, stop = rows
    return {TOGETHER: f"rows {first} to {stop - 1}"} if first < stop else {}


def together_of(metadata: Mapping[str, str], n_rows: int) -> tuple[int, int]:
    """Return the rows that the label names, (0, 0) without one, and all of `n_rows` where it cannot be read."""
    if TOGETHER not in metadata:
        return 0, 0
    found = re.fullmatch(r"rows (\d{1,18}) to (\d{1,18})", metadata[TOGETHER])
    first, stop = (int(found[1]), min(int(found[2]) + 1, n_rows)) if found else (0, n_rows)
    return (first, stop) if first < stop else (0, 0)


def inexact_because(snapshot: Snapshot) -> str:
    """Return why a run cannot go on from a snapshot bit for bit, whatever the model; empty if nothing is in the way."""
    if ACCEPTED in snapshot.metadata:
        return f"rows of it are of something else, which was accepted: {snapshot.metadata[ACCEPTED]}"
    if snapshot.bound == math.inf:
        told = snapshot.metadata.get(EDITED)
        if told is None:
            return "values may be off by an unknown amount"
        return f"the history was edited ({told}): the rows behind were computed while that was there"
    if snapshot.bound:
        return f"the file is not exact: values may be off by up to {snapshot.bound:.3g}"
    if TOGETHER in snapshot.metadata:
        return (
            f"some of {snapshot.metadata[TOGETHER]} were evaluated together with proposals: they come back as they "
            "were, and their last bits can differ from those of single steps"
        )
    if snapshot.n_pending > 1:
        return (
            f"{snapshot.n_pending} tokens are not evaluated yet: they are evaluated together, which can differ in the "
            "last bits from the way they were first"
        )
    if snapshot.tokens and not snapshot.n_pending and snapshot.logits is None:
        return "no logits are stored, so the last row is evaluated again"
    return ""

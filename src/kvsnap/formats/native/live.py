"""Cutting the live list of a session back to fewer tokens. Spec sections 10 and 11."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from kvsnap.errors import UnsupportedError
from kvsnap.formats.native.read import NativeFile
from kvsnap.formats.native.tables import Entry, history_digest
from kvsnap.layout import cut_positions
from kvsnap.records import Kind

__all__ = ["cut_entries"]


def cut_entries(
    file: NativeFile, live: Sequence[Entry], n_tokens: int, most_rows: int
) -> tuple[tuple[Entry, ...], int]:
    """Return the live list of the first `n_tokens` tokens and `most_rows` rows, and the position evaluated next.

    At the end of a turn the turn comes back whole, with its state; an entry that is cut loses its state. Reads the
    tables of one or two records. Raise `UnsupportedError` naming the
    nearest reachable length when a layer has a state that cannot be rewound there.
    """
    ends = list(accumulate(e.n_tokens for e in live))
    # Where turns ended, the last of them is what comes back, whole: also one that added nothing but a state.
    count = bisect_right(ends, n_tokens)
    entries = list(live[:count])
    if (ends[count - 1] if count else 0) < n_tokens:
        _refuse_unless_rewindable(file, live, n_tokens)
        cut = live[count]
        tokens = n_tokens - (ends[count - 1] if count else 0)
        rows = max(0, min(cut.n_rows, most_rows - cut.row_start))
        table, _, _ = file.table_at(cut.span, Kind.SPAN)
        previous = entries[-1].digest if entries else bytes(16)
        digest = history_digest(previous, table.tokens[:tokens], rows)
        entries.append(replace(cut, n_tokens=tokens, n_rows=rows, state=0, digest=digest))
    elif entries and entries[-1].state:
        file.table_at(entries[-1].state, Kind.STATE)  # an old state that is damaged must not become the current one
    return tuple(entries), _position_after(file, entries)


def _position_after(file: NativeFile, entries: Sequence[Entry]) -> int:
    for entry in reversed(entries):
        table, _, _ = file.table_at(entry.span, Kind.SPAN)
        kept = cut_positions(table.positions, entry.n_rows)
        if kept:
            return kept[-1].start + kept[-1].count
    return 0


def _refuse_unless_rewindable(file: NativeFile, live: Sequence[Entry], n_tokens: int) -> None:
    for spec in file.geometry.tensors:
        if spec.role == "logits" or spec.growth in ("grow", "static"):
            continue
        nearest = max((end for end in accumulate(e.n_tokens for e in live) if end <= n_tokens), default=0)
        raise UnsupportedError(
            f"layer {spec.layer}: {spec.name} ({spec.growth}) cannot be rewound into a turn; "
            f"the nearest reachable length is {nearest}",
            path=file.path,
            found=n_tokens,
        )

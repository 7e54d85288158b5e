"""Cutting the live list of a session back to fewer tokens. Spec sections 10 and 11."""

from __future__ import annotations

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

    An entry that is cut loses its state. Reads the tables of one or two spans. Raise `UnsupportedError` naming the
    nearest reachable length when a layer has a state that cannot be rewound there.
    """
    entries: list[Entry] = []
    token = 0
    for entry in live:
        tokens = max(0, min(entry.n_tokens, n_tokens - token))
        rows = max(0, min(entry.n_rows, most_rows - entry.row_start))
        if not tokens and not rows:
            break
        entries.append(replace(entry, n_tokens=tokens, n_rows=rows))
        token += entry.n_tokens
    if not entries:
        return (), 0
    last = entries[-1]
    if last != live[len(entries) - 1]:
        _refuse_unless_rewindable(file, live, n_tokens)
        table, _, _ = file.table_at(last.span, Kind.SPAN)
        previous = entries[-2].digest if len(entries) > 1 else bytes(16)
        digest = history_digest(previous, table.tokens[: last.n_tokens], last.n_rows)
        entries[-1] = replace(last, state=0, digest=digest)
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

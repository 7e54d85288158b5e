"""Cutting the live list of a session back to fewer tokens. Spec sections 10, 11 and 19."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from kvsnap.errors import UnsupportedError
from kvsnap.formats.native.base import Base
from kvsnap.formats.native.read import NativeFile
from kvsnap.formats.native.schema import parse_token_offset
from kvsnap.formats.native.tables import Entry, history_digest
from kvsnap.layout import cut_positions
from kvsnap.records import Kind
from kvsnap.tensors import TensorSpec

__all__ = ["Cut", "Live", "cut_live", "position_after", "turn_ends"]

Live = tuple[NativeFile, Entry]
"""An entry of the live list, with the file that its offsets mean."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The first entries of a live list, and the counts at their end. `state` is an offset in the file of the last."""

    live: tuple[Live, ...]
    n_tokens: int
    n_rows: int
    n_pending: int
    token_offset: int

    @property
    def state(self) -> int:
        """Offset of the STATE at the end, in the file of the last entry; 0 for none."""
        return self.live[-1][1].state if self.live else 0

    @property
    def digest(self) -> bytes:
        """History digest."""
        return self.live[-1][1].digest if self.live else bytes(16)

    def within(self, file: NativeFile) -> tuple[Entry, ...]:
        """Return the entries that lie in `file`: the last ones."""
        return tuple(entry for where, entry in self.live if where is file)

    def base(self, base: Base, file: NativeFile) -> Base:
        """Return what a fork, open as `file`, keeps of its parent when no more than this stays."""
        entries = [entry for where, entry in self.live if where is not file]
        return replace(
            base, kept=len(entries), n_tokens=sum(e.n_tokens for e in entries), n_rows=sum(e.n_rows for e in entries),
            history=entries[-1].digest if entries else bytes(16),
        )  # fmt: skip


def turn_ends(live: Sequence[Live]) -> list[int]:
    """Return the number of tokens behind each entry."""
    return list(accumulate(entry.n_tokens for _, entry in live))


def cut_live(file: NativeFile, n_tokens: int) -> Cut:
    """Return the live list of the first `n_tokens` tokens, as far as rows of them were kept.

    At the end of a turn the turn comes back whole, with its state; an entry that is cut loses its state. Reads the
    tables of one or two records. Raise `UnsupportedError` naming the nearest reachable length when a layer has a state
    that cannot be rewound there.
    """
    live, unstored = file.live, file.commit.n_rows + file.commit.n_pending - file.commit.n_tokens
    if not n_tokens:
        return Cut((), 0, 0, 0, 0)
    ends = turn_ends(live)
    # Where turns ended, the last of them is what comes back, whole: also one that added nothing but a state.
    count = bisect_right(ends, n_tokens)
    kept, before = list(live[:count]), ends[count - 1] if count else 0
    if before < n_tokens:
        _refuse_unless_rewindable(file, ends, n_tokens)
        where, cut = live[count]
        rows = max(0, min(cut.n_rows, n_tokens + unstored - cut.row_start))
        table, _, _ = where.table_at(cut.span, Kind.SPAN)
        previous = kept[-1][1].digest if kept else bytes(16)
        digest = history_digest(previous, table.tokens[: n_tokens - before], rows)
        kept.append((where, replace(cut, n_tokens=n_tokens - before, n_rows=rows, state=0, digest=digest)))
    n_rows = sum(entry.n_rows for _, entry in kept)
    if kept and kept[-1][1].state:
        where, entry = kept[-1]
        file.state_at(where, entry.state, n_rows)  # an old state that is damaged must not become the current one
    return Cut(tuple(kept), n_tokens, n_rows, n_tokens + unstored - n_rows, position_after(kept))


def position_after(live: Sequence[Live], count: int | None = None) -> int:
    """Return the position that comes next behind the first `count` entries (None: all), as they say themselves.

    Reads the STATE of the last one, and tables until there is a row. Raise as `NativeFile.table_at`.
    """
    count = len(live) if count is None else count
    if count and live[count - 1][1].state:
        file, entry = live[count - 1]
        table, place, _ = file.table_at(entry.state, Kind.STATE)
        named = parse_token_offset(table.meta, file.path, place)
        if named is not None:
            return named
    for i in range(count - 1, -1, -1):
        file, entry = live[i]
        table, _, _ = file.table_at(entry.span, Kind.SPAN)
        kept = cut_positions(table.positions, entry.n_rows)
        if kept:
            return kept[-1].start + kept[-1].count
    return 0


def needs_turn_ends(spec: TensorSpec) -> bool:
    """Tell whether a history with such a tensor can only be cut where a turn ended."""
    return spec.role != "logits" and spec.growth not in ("grow", "static")


def _refuse_unless_rewindable(file: NativeFile, ends: Sequence[int], n_tokens: int) -> None:
    for spec in file.geometry.tensors:
        if needs_turn_ends(spec):
            nearest = max((end for end in ends if end <= n_tokens), default=0)
            raise UnsupportedError(
                f"layer {spec.layer}: {spec.name} ({spec.growth}) cannot be rewound into a turn; "
                f"the nearest reachable length is {nearest}",
                path=file.path,
                found=n_tokens,
            )

"""Cutting the live list of a session back to fewer tokens. Spec sections 10, 11 and 19."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from kvsnap.errors import DamagedError, FormatError, UnsupportedError
from kvsnap.formats.native.assemble import bound_of
from kvsnap.formats.native.cut import NOTHING, Cut, Live
from kvsnap.formats.native.journal import Published
from kvsnap.formats.native.read import NativeFile, spans_of
from kvsnap.formats.native.schema import parse_token_offset
from kvsnap.formats.native.tables import history_digest
from kvsnap.layout import cut_positions
from kvsnap.reach import Ends, Reach, Stop, needs_state
from kvsnap.records import Kind
from kvsnap.tensors import TensorSpec

__all__ = ["check_whole", "cut_back", "cut_live", "ends_of", "position_after", "reach_of"]


def cut_back(now: Published, cut: Cut, file: NativeFile | None) -> Published:
    """Return what is published at the end of an open file (not needed where nothing is kept), cut back."""
    entries = () if file is None else cut.within(file)
    base = now.base
    if base is not None and not entries:
        base = cut.base(base, file)
    commit = replace(
        now.commit, n_tokens=cut.n_tokens, n_rows=cut.n_rows, n_pending=cut.n_pending, token_offset=cut.token_offset,
        state=cut.state if entries else 0, digest=cut.digest,
    )  # fmt: skip
    return replace(now, commit=commit, entries=entries, base=base)


def ends_of(file: NativeFile) -> Ends:
    """Return the lengths that the live list of an open file can be cut to. Tables are read as they are needed."""
    live, commit = file.live, file.commit
    tokens, rows = accumulate(e.n_tokens for _, e in live), accumulate(e.n_rows for _, e in live)
    stops = [Stop(n, r, bool(e.state)) for n, r, (_, e) in zip(tokens, rows, live, strict=True)]
    known: dict[int, dict[int, tuple[int, int]]] = {}

    def held(i: int, spec: TensorSpec) -> tuple[int, int]:
        where, entry = live[i]
        if i not in known:
            table, _, _ = where.table_at(entry.span, Kind.SPAN)
            known[i] = {part.tensor: (part.row_start, part.row_start + part.n_rows) for part in table.parts}
        stop = (entry.row_start + entry.n_rows) // spec.tokens_per_row
        first, last = known[i].get(spec.id, (stop, stop))
        return min(first, stop), min(last, stop)

    return Ends(file.geometry.tensors, stops, held, unstored=commit.n_rows + commit.n_pending - commit.n_tokens)


def cut_live(file: NativeFile, n_tokens: int, ends: Ends | None = None) -> Cut:
    """Return the live list of the first `n_tokens` tokens, as far as rows of them were kept.

    At the end of a turn the turn comes back whole, with its state; an entry that is cut loses its state. Reads the
    tables of one or two records, and of those that hold the rows of a window. Raise `UnsupportedError` naming the
    nearest reachable lengths when a layer cannot be rewound there.
    """
    live, ends = file.live, ends or ends_of(file)
    if not n_tokens:
        return NOTHING
    ends.check(n_tokens, file.path)
    # Where turns ended, the last of them is what comes back, whole: also one that added nothing but a state.
    end = ends.end_of(n_tokens)
    if end is not None:
        kept = list(live[: end + 1])
        token_offset = position_after(live, end + 1, file.commit.token_offset)
    else:
        count = bisect_right(ends.tokens, n_tokens)
        kept, before = list(live[:count]), ends.tokens[count - 1] if count else 0
        where, cut = live[count]
        rows = max(0, min(cut.n_rows, n_tokens + ends.unstored - cut.row_start))
        table, _, _ = where.table_at(cut.span, Kind.SPAN)
        previous = kept[-1][1].digest if kept else bytes(16)
        digest = history_digest(previous, table.tokens[: n_tokens - before], rows)
        kept.append((where, replace(cut, n_tokens=n_tokens - before, n_rows=rows, state=0, digest=digest)))
        if rows == cut.n_rows:  # only ids that are not evaluated go: what comes next stays as it is
            token_offset = _position_at_end(live, count, file.commit.token_offset)
        else:
            token_offset = position_after(kept)
    n_rows = sum(entry.n_rows for _, entry in kept)
    if kept and kept[-1][1].state:
        where, entry = kept[-1]
        file.state_at(where, entry.state, n_rows)  # an old state that is damaged must not become the current one
    return Cut(tuple(kept), n_tokens, n_rows, n_tokens + ends.unstored - n_rows, token_offset)


def reach_of(file: NativeFile, n_tokens: int) -> Reach:
    """Return what a cut of an open file to `n_tokens` tokens, which is within it, would keep. Reads tables only."""
    ends = ends_of(file)

    def exact(nearest: int) -> bool:
        live = file.live if nearest == file.commit.n_tokens else cut_live(file, nearest, ends).live
        return bound_of(file, spans_of(live)) == 0

    return ends.reach(n_tokens, exact)


def check_whole(file: NativeFile) -> None:
    """Raise `UnsupportedError` where the state at the end of an open file was left out when it was compacted."""
    if needs_state(file.geometry.tensors) and file.commit.n_rows and not file.state_place()[1]:
        below = ends_of(file).below(file.commit.n_tokens - 1)
        raise UnsupportedError(
            f"the state at the end of commit {file.commit.number} is not stored any more, and a layer needs it; the "
            f"nearest reachable length is {below}",
            path=file.path, found=file.commit.n_tokens,
        )  # fmt: skip


def _position_at_end(live: Sequence[Live], i: int, at_end: int) -> int:
    """Return the position that comes next behind entry `i`, from what follows where its STATE cannot be read."""
    try:
        return position_after(live, i + 1, at_end)
    except (DamagedError, FormatError):
        where, entry = live[i]
        return position_after([*live[:i], (where, replace(entry, state=0)), *live[i + 1 :]], i + 1, at_end)


def position_after(live: Sequence[Live], count: int | None = None, at_end: int | None = None) -> int:
    """Return the position that comes next behind the first `count` entries (None: all), as they say themselves.

    Where the last of them has no STATE, it is that of the row behind them, or `at_end` where no row is. Reads that
    STATE, and tables until there is a row. Raise as `NativeFile.table_at`.
    """
    count = len(live) if count is None else count
    if count and live[count - 1][1].state:
        file, entry = live[count - 1]
        table, place, _ = file.table_at(entry.state, Kind.STATE)
        named = parse_token_offset(table.meta, file.path, place)
        if named is not None:
            return named
    elif count and at_end is not None:
        for i in range(count, len(live)):
            file, entry = live[i]
            if entry.n_rows:
                table, _, _ = file.table_at(entry.span, Kind.SPAN)
                return table.positions[0].start
        return at_end
    for i in range(count - 1, -1, -1):
        file, entry = live[i]
        table, _, _ = file.table_at(entry.span, Kind.SPAN)
        kept = cut_positions(table.positions, entry.n_rows)
        if kept:
            return kept[-1].start + kept[-1].count
    return 0

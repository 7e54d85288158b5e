"""Which rows of which heads of two caches are compared, planned before any value is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvsnap.inspection.diff.answers import Alignment, NotCompared
from kvsnap.inspection.values import HeadRows, head_rows
from kvsnap.layout import Snapshot
from kvsnap.results import numbers

__all__ = ["LeftOut", "Pair", "Piece", "plan"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Heads that one tensor of each side holds, from head `head` of the layer on, and the rows `[start, stop)`."""

    a: HeadRows
    b: HeadRows
    head: int
    n_heads: int
    start: int
    stop: int


@dataclass(slots=True)
class Pair:
    """One role of one layer on both sides, and the rows `[start, stop)` that are compared, by what the tensor counts.

    `pieces` tie the heads together where both sides have the same; else only sizes and similarity can be told.
    """

    layer: int
    role: str
    a: list[HeadRows]
    b: list[HeadRows]
    same_shape: bool = False
    start: int = 0
    stop: int = 0
    pieces: list[Piece] = field(default_factory=list)

    @property
    def tokens_per_row(self) -> int:
        """Rows of the sequence that a row stands for; 1 for rows that are none of the sequence."""
        first = (self.a or self.b)[0]
        return first.tokens_per_row if first.grows else 1

    @property
    def grows(self) -> bool:
        """Tell whether its rows are rows of the sequence."""
        return (self.a or self.b)[0].grows


class LeftOut:
    """What is not compared, gathered by reason."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, list[int]]] = {}
        self._said: list[NotCompared] = []

    def add(self, why: str, layer: int, role: str) -> None:
        """Say why one role of a layer, or some of its rows, is not compared."""
        self._found.setdefault(why, {}).setdefault(role, []).append(layer)

    def say(self, what: str, why: str) -> None:
        """Say why something else is not compared."""
        self._said.append(NotCompared(what, why))

    def all(self) -> tuple[NotCompared, ...]:
        """Return it, layers of one reason together."""
        made = list(self._said)
        for why, roles in self._found.items():
            together: dict[tuple[int, ...], list[str]] = {}
            for role, layers in roles.items():
                together.setdefault(tuple(layers), []).append(role)
            for where, names in together.items():
                word = "layer" if len(where) == 1 else "layers"
                made.append(NotCompared(f"{', '.join(names)} of {word} {numbers(where)}", why))
        return tuple(made)


def plan(
    a: Snapshot, b: Snapshot, aligned: Alignment, layers: Sequence[int] | None, *, all_rows: bool
) -> tuple[list[Pair], LeftOut, bool]:
    """Return what is compared, what is not, and whether shapes differ. Reads no tensor, unless a layer holds codes."""
    sides = [_by_role(snapshot, layers) for snapshot in (a, b)]
    pairs, out, other_shape = [], LeftOut(), len(a.layers) != len(b.layers)
    order = {layer: i for i, layer in enumerate(dict.fromkeys(x.index for s in (a, b) for x in s.layers))}
    for layer, role in sorted({**sides[0], **sides[1]}, key=lambda key: order[key[0]]):
        pair = Pair(layer, role, sides[0].get((layer, role), []), sides[1].get((layer, role), []))
        if not pair.a or not pair.b:
            out.add(f"held by {'a' if pair.a else 'b'} only", layer, role)
            other_shape = True
            pairs.append(pair)
            continue
        # Without rows a width is not told.
        empty = not all(any(rows.n_rows for rows in found) for found in (pair.a, pair.b))
        pair.same_shape = empty or _widths(pair.a) == _widths(pair.b)
        if not pair.same_shape:
            other_shape = True
            out.add(f"of another shape: {_shape_text(pair.a)} in a, {_shape_text(pair.b)} in b", layer, role)
        _add_pieces(pair, _limit(pair, a, b, aligned, out, all_rows=all_rows), out)
        pairs.append(pair)
    return pairs, out, other_shape


def _by_role(snapshot: Snapshot, layers: Sequence[int] | None) -> dict[tuple[int, str], list[HeadRows]]:
    found: dict[tuple[int, str], list[HeadRows]] = {}
    for rows in head_rows(snapshot):
        if layers is None or rows.layer in layers:
            found.setdefault((rows.layer, rows.role), []).append(rows)
    return found


def _widths(found: Sequence[HeadRows]) -> list[int]:
    """Return the width of each head."""
    return [rows.dim for rows in found for _ in range(rows.n_heads)]


def _shape_text(found: Sequence[HeadRows]) -> str:
    widths = dict.fromkeys(_widths(found))
    return f"{sum(rows.n_heads for rows in found)} heads of {' and '.join(map(str, widths))}"


def _limit(pair: Pair, a: Snapshot, b: Snapshot, aligned: Alignment, out: LeftOut, *, all_rows: bool) -> int:
    """Return before which row of their own the tensors are compared; 0: not at all, and `out` says why."""
    left, right = pair.a[0], pair.b[0]
    if (left.grows, left.tokens_per_row) != (right.grows, right.tokens_per_row):
        out.add("rows of one side stand for other positions than those of the other", pair.layer, pair.role)
        return 0
    counts = left.n_rows, right.n_rows
    if not left.grows and counts[0] != counts[1]:
        out.add(f"of another length: {counts[0]:,} rows in a, {counts[1]:,} in b", pair.layer, pair.role)
        return 0
    most = max(r.first_row + r.n_rows for r in (*pair.a, *pair.b))
    if all_rows:
        return most
    if left.grows:
        return aligned.n_rows // left.tokens_per_row
    if pair.role.startswith("cross_"):
        if a.encoder_input == b.encoder_input:
            return most
        out.add("of another input of the encoder", pair.layer, pair.role)
        return 0
    if a.n_rows == b.n_rows == aligned.n_rows:
        return most
    places = f"{a.n_rows:,} and {b.n_rows:,} rows" if a.n_rows != b.n_rows else "other inputs"
    out.add(f"a state, which is behind {places}", pair.layer, pair.role)
    return 0


def _add_pieces(pair: Pair, limit: int, out: LeftOut) -> None:
    """Tie heads of both sides together, with the rows that both hold before `limit`."""
    alone: dict[str, None] = {}
    found: list[tuple[int, int]] = []
    for left in pair.a:
        for right in pair.b:
            head = max(left.first_head, right.first_head)
            n_heads = min(left.first_head + left.n_heads, right.first_head + right.n_heads) - head
            if pair.same_shape and n_heads <= 0:
                continue
            spans = [(r.first_row, min(limit, r.first_row + r.n_rows)) for r in (left, right)]
            start, stop = max(s for s, _ in spans), min(e for _, e in spans)
            alone.update(dict.fromkeys(_alone(spans, pair)))
            if start < stop:
                found.append((start, stop))
                if pair.same_shape:
                    pair.pieces.append(Piece(left, right, head, n_heads, start, stop))
    if found:
        pair.start, pair.stop = min(s for s, _ in found), max(e for _, e in found)
    for why in alone:
        out.add(why, pair.layer, pair.role)


def _alone(spans: list[tuple[int, int]], pair: Pair) -> list[str]:
    """Tell of rows that one side holds only, both before the first that is not compared at all."""
    made: list[str] = []
    times = pair.tokens_per_row
    for name, own, other in (("a", spans[0], spans[1]), ("b", spans[1], spans[0])):
        for first, last in ((own[0], min(own[1], other[0])), (max(own[0], other[1]), own[1])):
            if first < last:
                made.append(f"rows {first * times:,} to {last * times - 1:,} are held by {name} only")
    return made

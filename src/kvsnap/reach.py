"""How far back a history can be cut: which lengths can be reached, and which layers limit it. No I/O.

A tensor that grows is cut anywhere, one with a row for several positions where a group of them ends, a window where
the rows before the cut are held, and what is replaced goes back to where it is stored. docs/spec/file.md, section 11.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvsnap.errors import UnsupportedError
from kvsnap.tensors import OF_NO_LAYER, TensorSpec

__all__ = ["Ends", "Reach", "Stop", "needs_state"]

Held = Callable[[int, TensorSpec], tuple[int, int]]
"""Rows of a window tensor that a piece of the history holds, first and behind the last, for the number of the piece."""


@dataclass(frozen=True, slots=True)
class Reach:
    """What a cut to `asked` tokens would keep.

    `n_tokens` is the nearest length at or below `asked` that can be reached, 0 always can; `above` the next one beyond
    `asked` (None where `asked` is reached). `n_rows` positions stay evaluated then, and these are `reused`;
    `recomputed` tokens between `n_tokens` and `asked` would have to be evaluated again. `limits` says why, one sentence
    for each kind of layer that cannot be cut there. `exact`: what is kept holds the bits that the engine held.
    """

    asked: int
    n_tokens: int
    n_rows: int
    reused: int
    recomputed: int
    limits: tuple[str, ...]
    exact: bool
    above: int | None = None

    @property
    def reached(self) -> bool:
        """True when a cut to `asked` tokens is possible."""
        return self.n_tokens == self.asked

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {**{name: getattr(self, name) for name in self.__dataclass_fields__}, "limits": list(self.limits)}


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a piece of a history ends: its tokens and rows, from the start on, and whether its STATE is there."""

    n_tokens: int
    n_rows: int
    state: bool


def needs_state(specs: Iterable[TensorSpec]) -> bool:
    """Tell whether a history with these tensors can only be cut where what is replaced was stored."""
    return any(spec.growth == "replaced" and spec.role not in OF_NO_LAYER for spec in specs)


class Ends:
    """The lengths that a history can be cut to, found piece by piece, from the asked one on.

    `stops` are the ends of its pieces (turns; a snapshot is one), the last one of the whole; `held` says which rows of
    a window each of them holds, and is asked only for what is needed. `unstored` counts evaluated positions without
    ids. Before `first_row` no rows are held (a partial capture). With `rows_alone` what is replaced stays good as long
    as all rows stay, though ids behind them go; the file has no STATE for an entry that is cut.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        stops: Sequence[Stop],
        held: Held,
        *,
        unstored: int = 0,
        first_row: int = 0,
        rows_alone: bool = False,
    ) -> None:
        self.stops, self.held, self.unstored, self.first_row = stops, held, unstored, first_row
        self.tokens = [stop.n_tokens for stop in stops]
        self.stateful = needs_state(specs)
        self.fixed = self.stateful and not rows_alone
        self.replaced = [s for s in specs if s.growth == "replaced" and s.role not in OF_NO_LAYER]
        self.windows = [s for s in specs if s.growth == "window"]
        self.grouped = [s for s in specs if s.grows and s.tokens_per_row > 1]
        self.step = math.lcm(*(s.tokens_per_row for s in self.grouped))
        self._runs: dict[int, dict[int, int]] = {}

    @property
    def total(self) -> int:
        """Tokens of the whole history."""
        return self.tokens[-1] if self.tokens else 0

    def rows_at(self, n_tokens: int) -> int:
        """Return how many rows a cut to `n_tokens` tokens keeps."""
        if not n_tokens:
            return 0
        end = self.end_of(n_tokens)
        if end is not None:
            return self.stops[end].n_rows
        i = bisect_right(self.tokens, n_tokens)
        return min(self.stops[min(i, len(self.stops) - 1)].n_rows, n_tokens + self.unstored)

    def end_of(self, n_tokens: int) -> int | None:
        """Return the number of the last piece that ends at `n_tokens` and comes back whole; None where there is none.

        A layer that needs a state has none where nothing was evaluated yet.
        """
        i = bisect_right(self.tokens, n_tokens) - 1
        while i >= 0 and self.tokens[i] == n_tokens:
            if self.stops[i].state or not self.stateful or not self.stops[i].n_rows:
                return i
            i -= 1
        return None

    def can(self, n_tokens: int) -> bool:
        """Tell whether the history can be cut to `n_tokens` tokens, which is within it."""
        if not n_tokens or self.end_of(n_tokens) is not None:
            return True
        i = bisect_right(self.tokens, n_tokens)
        return i < len(self.tokens) and self._inside(i, n_tokens, n_tokens, last=True) is not None

    def below(self, n_tokens: int) -> int:
        """Return the greatest length up to `n_tokens` that can be reached."""
        high = n_tokens
        for i in range(min(bisect_right(self.tokens, n_tokens), len(self.tokens) - 1), -1, -1):
            stop = self.tokens[i]
            if stop <= high and self.end_of(stop) is not None:
                return stop
            found = self._inside(i, self._start(i) + 1, min(high, stop - 1), last=True)
            if found is not None:
                return found
            high = self._start(i)
        return 0

    def above(self, n_tokens: int) -> int | None:
        """Return the least length above `n_tokens` that can be reached; None at the end."""
        for i in range(bisect_right(self.tokens, n_tokens), len(self.tokens)):
            stop = self.tokens[i]
            found = self._inside(i, max(n_tokens, self._start(i)) + 1, stop - 1, last=False)
            if found is not None:
                return found
            if self.end_of(stop) is not None:
                return stop
        return None

    def _start(self, i: int) -> int:
        return self.tokens[i - 1] if i else 0

    def _inside(self, i: int, low: int, high: int, *, last: bool) -> int | None:
        """Return the last (or first) length from `low` to `high`, inside of piece `i`, that can be reached."""
        if low > high or self.fixed:
            return None
        # Where all rows of the piece stay, all tensors are as they were at its end.
        rows, whole = self.stops[i].n_rows, max(low, self.stops[i].n_rows - self.unstored)
        if last and high >= whole:
            return high
        found = None
        if not self.stateful:
            least = max(low + self.unstored, self.first_row, *(self._least(i, spec) for spec in self.windows), 0)
            most = min(high + self.unstored, rows - 1)
            place = most // self.step * self.step if last else -(-least // self.step) * self.step
            if least <= place <= most:
                found = place - self.unstored
        return whole if found is None and not last and high >= whole else found

    def _least(self, i: int, spec: TensorSpec) -> int:
        """Return the least number of rows inside of piece `i` at which a window is whole."""
        if spec.window == 1:
            return 0
        start = self._run(i, spec) * spec.tokens_per_row
        if not start:
            return 0
        return start + spec.window - 1 if spec.window else self.stops[i].n_rows

    def _run(self, i: int, spec: TensorSpec) -> int:
        """Return the first row of the run without a gap that piece `i` ends with, or one that is far enough back."""
        per_row, known = spec.tokens_per_row, self._runs.setdefault(spec.id, {})
        enough = self._rows_before(i) + 1 - spec.window if spec.window else 0
        passed: list[int] = []
        k, start = i, self.stops[i].n_rows // per_row
        while k not in known:
            first, stop = self.held(k, spec)
            if stop != start:  # nothing is held at the end of this piece
                break
            passed.append(k)
            start = first
            before = self._rows_before(k) // per_row
            if not k or first > before:
                break
            if start * per_row <= enough:
                return start
            k -= 1
        else:
            start = known[k]
        known.update(dict.fromkeys(passed or [i], start))
        return start

    def _rows_before(self, i: int) -> int:
        return self.stops[i - 1].n_rows if i else 0

    # -- in words -------------------------------------------------------------------------------------------

    def reach(self, n_tokens: int, exact: Callable[[int], bool]) -> Reach:
        """Return what a cut to `n_tokens` tokens, which is within the history, would keep.

        `exact` tells of a length that can be reached whether all that stays is exact.
        """
        limits: tuple[str, ...] = ()
        nearest, above = n_tokens, None
        if not self.can(n_tokens):
            nearest, above = self.below(n_tokens), self.above(n_tokens)
            limits = tuple(self.limits(n_tokens))
        n_rows = self.rows_at(nearest)
        return Reach(n_tokens, nearest, n_rows, n_rows, n_tokens - nearest, limits, exact(nearest), above)

    def check(self, n_tokens: int, path: str | None = None) -> None:
        """Raise `UnsupportedError` unless `n_tokens` can be reached, naming the nearest lengths that can."""
        if self.can(n_tokens):
            return
        below, above = self.below(n_tokens), self.above(n_tokens)
        why = "; ".join(self.limits(n_tokens))
        behind = "" if above is None else f", and above it {above}"
        raise UnsupportedError(f"{why}; the nearest reachable length is {below}{behind}", path=path, found=n_tokens)

    def limits(self, n_tokens: int) -> list[str]:
        """Return one sentence for each kind of layer that cannot be cut to `n_tokens` tokens."""
        i = min(bisect_right(self.tokens, n_tokens), len(self.tokens) - 1)
        rows, found = self.rows_at(n_tokens), []
        if rows < self.first_row:
            found.append(f"a partial capture holds rows from {self.first_row} on")
        if self.replaced:
            at = self._stored_at(n_tokens)
            found.append(f"{_name(self.replaced[0])} (replaced) is stored at {_listed(at)} tokens")
        told: set[int] = set()
        for spec in self.windows:
            if spec.window not in told and rows < self._least(i, spec):
                told.add(spec.window)
                first = max(0, rows - (spec.window - 1)) if spec.window else 0
                of = f"window of {spec.window}" if spec.window else "window"
                found.append(f"{_name(spec)} ({of}) does not hold all of rows {first} to {rows - 1} any more")
        if rows % self.step and rows != self.stops[i].n_rows:
            spec = next(s for s in self.grouped if rows % s.tokens_per_row)
            found.append(
                f"{_name(spec)} (one row for {spec.tokens_per_row} positions) can be cut behind whole groups only"
            )
        return found

    def _stored_at(self, n_tokens: int) -> list[int]:
        """Return the last length up to `n_tokens` where a state is stored, and the first one beyond."""
        i = bisect_right(self.tokens, n_tokens)
        down = next((stop.n_tokens for stop in reversed(self.stops[:i]) if stop.state and stop.n_tokens), None)
        up = next((stop.n_tokens for stop in self.stops[i:] if stop.state), None)
        return [n for n in (down, up) if n is not None]


def _name(spec: TensorSpec) -> str:
    return f"layer {spec.layer}: {spec.name}"


def _listed(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers)) or "no"

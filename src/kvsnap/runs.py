"""Runs: stretches of tokens of one kind, and of positions that go up by one. Users import them from `layout`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["PositionRun", "Run", "RunKind", "common_length", "cut_positions", "cut_runs", "join_positions", "join_runs"]

RunKind = Literal["prompt", "generated"]


@dataclass(frozen=True, slots=True)
class Run:
    """`count` consecutive tokens of one kind."""

    kind: RunKind
    count: int


@dataclass(frozen=True, slots=True)
class PositionRun:
    """`count` consecutive rows whose positions are `start`, `start + 1`, ..."""

    start: int
    count: int


def common_length(a: Sequence[object], b: Sequence[object]) -> int:
    """Return how many items, as ids, are the same from the first on."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def cut_runs(runs: Sequence[Run], n_tokens: int) -> tuple[Run, ...]:
    """Return the runs of the first `n_tokens` tokens."""
    kept, left = [], n_tokens
    for run in runs:
        if left <= 0:
            break
        kept.append(Run(run.kind, min(run.count, left)))
        left -= run.count
    return tuple(kept)


def cut_positions(runs: Sequence[PositionRun], n_rows: int) -> tuple[PositionRun, ...]:
    """Return the position runs of the first `n_rows` rows."""
    kept, left = [], n_rows
    for run in runs:
        if left <= 0:
            break
        kept.append(PositionRun(run.start, min(run.count, left)))
        left -= run.count
    return tuple(kept)


def join_runs(runs: Sequence[Run], more: Sequence[Run]) -> tuple[Run, ...]:
    """Append runs, merging neighbours of one kind."""
    out = list(runs)
    for run in more:
        if run.count == 0:
            continue
        if out and out[-1].kind == run.kind:
            out[-1] = Run(run.kind, out[-1].count + run.count)
        else:
            out.append(run)
    return tuple(out)


def join_positions(runs: Sequence[PositionRun], more: Sequence[PositionRun]) -> tuple[PositionRun, ...]:
    """Append position runs, merging those that go on without a jump."""
    out = list(runs)
    for run in more:
        if run.count == 0:
            continue
        if out and out[-1].start + out[-1].count == run.start:
            out[-1] = PositionRun(out[-1].start, out[-1].count + run.count)
        else:
            out.append(run)
    return tuple(out)

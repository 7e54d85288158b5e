"""The live state of a transformers engine as immutable values, so that one assignment publishes a change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.engines._tf_stamp import Stamp
from kvsnap.errors import ContextError, InputError
from kvsnap.layout import (
    EncoderInput,
    PositionRun,
    Run,
    RunKind,
    SamplerState,
    cut_positions,
    join_positions,
    join_runs,
)

__all__ = ["Line", "Live", "check_ids", "check_positions", "check_room", "straightened"]


@dataclass(frozen=True, slots=True)
class Line:
    """One sequence: its ids, of which the last `n_pending` are not evaluated, and the logits behind the last row.

    `positions` are those of the rows, () for 0, 1, ...; `offset` is the one that is evaluated next, None for the one
    behind them. `select` are the columns of the cache that belong to it, in order; None: the first `n_rows`. `tokens`
    may be fewer than `n_rows + n_pending` where a foreign file kept the last ids only. `again` is True when the first
    pending id had been evaluated before: it takes a pass of its own, as a step does, so that what follows it is split
    as it was. `columns` counts those of the cache that were evaluated, in a batch: a state has taken up all of them.
    The first `inexact_rows` rows came from a snapshot that was not exact: its `bound`, and its `labels`, stay
    true of them.
    `gap` is the first column behind padding that has ids before it, where no positions were given. Among the rows from
    the first to the last number of `together` are some that were evaluated with proposals in one pass.
    """

    tokens: tuple[int, ...] = ()
    runs: tuple[Run, ...] = ()
    n_rows: int = 0
    n_pending: int = 0
    logits: npt.NDArray[Any] | None = None
    select: tuple[int, ...] | None = None
    again: bool = False
    positions: tuple[PositionRun, ...] = ()
    offset: int | None = None
    columns: int | None = None
    inexact_rows: int = 0
    bound: float = 0.0
    labels: tuple[tuple[str, str], ...] = ()
    gap: int | None = None
    together: tuple[int, int] = (0, 0)

    @property
    def taken(self) -> int:
        """Positions taken, evaluated or not."""
        return self.n_rows + self.n_pending

    @property
    def next_position(self) -> int:
        """The position that is evaluated next."""
        if self.offset is not None:
            return self.offset
        return self.positions[-1].start + self.positions[-1].count if self.positions else self.n_rows

    @property
    def position_runs(self) -> tuple[PositionRun, ...]:
        """The positions of the rows."""
        return self.positions or ((PositionRun(0, self.n_rows),) if self.n_rows else ())

    @property
    def pending(self) -> tuple[int, ...]:
        return self.tokens[len(self.tokens) - self.n_pending :]

    def extended(self, ids: Sequence[int], kind: RunKind) -> Line:
        """Return the sequence with ids added as pending."""
        return replace(
            self,
            tokens=(*self.tokens, *ids),
            runs=join_runs(self.runs, (Run(kind, len(ids)),)),
            n_pending=self.n_pending + len(ids),
        )

    def evaluated(self, logits: npt.NDArray[Any], positions: Sequence[int] | None = None) -> Line:
        """Return the sequence with nothing pending; `positions` are those that were evaluated, None: the next ones."""
        if positions is None and not self.positions and self.offset is None:
            return replace(self, n_rows=self.taken, n_pending=0, logits=logits, again=False)
        new = tuple(PositionRun(p, 1) for p in positions or self.pending_positions)
        runs = join_positions(self.position_runs, new)
        return replace(
            self, n_rows=self.taken, n_pending=0, logits=logits, again=False, positions=straightened(runs), offset=None
        )

    @property
    def pending_positions(self) -> tuple[int, ...]:
        """The positions that what is pending will be evaluated at."""
        return tuple(range(self.next_position, self.next_position + self.n_pending))

    def without_last_row(self) -> Line:
        """Return the sequence with its last evaluated id pending again."""
        runs = cut_positions(self.positions, self.n_rows - 1)
        last = self.positions[-1].start + self.positions[-1].count - 1 if self.positions else None
        return replace(
            self, n_rows=self.n_rows - 1, n_pending=self.n_pending + 1, logits=None, again=True,
            select=None if self.select is None else self.select[:-1], positions=straightened(runs), offset=last,
        )  # fmt: skip


def straightened(runs: Sequence[PositionRun]) -> tuple[PositionRun, ...]:
    """Return position runs, () for those that count from 0 without a jump."""
    return () if len(runs) == 1 and runs[0].start == 0 else tuple(runs)


@dataclass(frozen=True, slots=True)
class Live:
    """A cache, the sequences in it (one for each row of the batch), the sampler, and what the cache looked like.

    `encoded` names the input of an encoder-decoder; None: nothing is encoded. `stamp` is that of the model that made
    the rows, None where it was changed while it did, or where there are none.
    """

    cache: Any
    lines: tuple[Line, ...]
    sampler: SamplerState
    marks: tuple[object, ...]
    encoded: EncoderInput | None = None
    stamp: Stamp | None = None


def check_ids(ids: Sequence[int], vocab_size: int, first: int) -> tuple[int, ...]:
    """Return ids as integers; raise `InputError` naming a wrong one, its position (from `first`) and the vocabulary."""
    given: object = ids
    if isinstance(given, str):
        raise InputError(
            "the engine is given token ids; of a text engine.tokenize makes them, of chat messages engine.render",
            expected="integers", found="a text",
        )  # fmt: skip
    try:
        values = np.asarray(ids if len(ids) else np.empty(0, dtype=np.int64))
    except (TypeError, ValueError) as error:
        raise InputError("ids must be a flat list of integers", expected="integers", found=type(ids)) from error
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise InputError(
            "ids must be a flat list of integers", expected="integers", found=f"{values.dtype}{list(values.shape)}"
        )
    wrong = np.flatnonzero((values < 0) | (values >= vocab_size))
    if len(wrong):
        index = int(wrong[0])
        raise InputError(
            f"token id {int(values[index])} at position {first + index} is outside the vocabulary of {vocab_size} ids",
            expected=f"0 to {vocab_size - 1}", found=int(values[index]),
        )  # fmt: skip
    return tuple(values.tolist())


def check_room(taken: int, more: int, limit: int | None, holder: str = "the context of this model") -> None:
    """Raise `ContextError` naming both numbers where `more` positions do not fit behind `taken`."""
    if limit is not None and taken + more > limit:
        raise ContextError(
            f"the sequence would take {taken + more} positions, {holder} holds {limit}: give it fewer, or go back "
            "first (rewind, truncate)",
            expected=f"at most {limit}", found=taken + more,
        )  # fmt: skip


def check_positions(positions: Sequence[int] | None, count: int, limit: int | None) -> tuple[int, ...] | None:
    """Return positions given for `count` ids; raise `InputError` unless each is a whole number from 0 on."""
    if positions is None:
        return None
    values = np.asarray(positions)
    given = tuple(values.tolist()) if values.ndim == 1 and values.dtype.kind in "iu" else ()
    if len(given) != count or min(given, default=0) < 0:
        raise InputError("positions must be one whole number from 0 on for each id", expected=count, found=given[:8])
    if given and limit is not None and max(given) >= limit:
        raise ContextError(
            f"position {max(given)} is outside the context of this model, {limit}",
            expected=f"below {limit}", found=max(given),
        )  # fmt: skip
    return given

"""The live state of a transformers engine as immutable values, so that one assignment publishes a change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.errors import ContextError, InputError
from kvsnap.layout import Run, RunKind, SamplerState, join_runs

__all__ = ["Line", "Live", "check_ids", "check_room"]


@dataclass(frozen=True, slots=True)
class Line:
    """One sequence: its ids, of which the last `n_pending` are not evaluated, and the logits behind the last row.

    `select` are the rows of the cache that belong to it, in order; None: the first `n_rows`. `tokens` may be fewer than
    `n_rows + n_pending` where a foreign file kept the last ids only. `again` is True when the first pending id had been
    evaluated before: it takes a pass of its own, as a step does, so that what follows it is split as it was.
    """

    tokens: tuple[int, ...] = ()
    runs: tuple[Run, ...] = ()
    n_rows: int = 0
    n_pending: int = 0
    logits: npt.NDArray[Any] | None = None
    select: tuple[int, ...] | None = None
    again: bool = False

    @property
    def positions(self) -> int:
        """Positions taken, evaluated or not."""
        return self.n_rows + self.n_pending

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

    def evaluated(self, logits: npt.NDArray[Any]) -> Line:
        """Return the sequence with nothing pending."""
        return replace(self, n_rows=self.positions, n_pending=0, logits=logits, again=False)

    def without_last_row(self) -> Line:
        """Return the sequence with its last evaluated id pending again."""
        return replace(
            self, n_rows=self.n_rows - 1, n_pending=self.n_pending + 1, logits=None, again=True,
            select=None if self.select is None else self.select[:-1],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Live:
    """A cache, the sequences in it (one for each row of the batch), and the sampler."""

    cache: Any
    lines: tuple[Line, ...]
    sampler: SamplerState


def check_ids(ids: Sequence[int], vocab_size: int, first: int) -> tuple[int, ...]:
    """Return ids as integers; raise `InputError` naming a wrong one, its position (from `first`) and the vocabulary."""
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


def check_room(taken: int, more: int, limit: int | None) -> None:
    """Raise `ContextError` naming both numbers where `more` positions do not fit behind `taken`."""
    if limit is not None and taken + more > limit:
        raise ContextError(
            f"the sequence would take {taken + more} positions, the context of this model holds {limit}",
            expected=f"at most {limit}", found=taken + more,
        )  # fmt: skip

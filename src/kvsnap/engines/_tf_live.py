"""The live state of a transformers engine: what it holds, how it changes as a whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy.typing as npt

from kvsnap.engines._tf_layers import Undo, marks_of, rows_of
from kvsnap.engines._tf_model import Model
from kvsnap.engines._tf_rewind import Cut
from kvsnap.engines._tf_stamp import Stamp, stamp_of
from kvsnap.engines._tf_state import Line, Live, check_room
from kvsnap.errors import InputError, UnsupportedError
from kvsnap.layout import EncoderInput, SamplerState
from kvsnap.protocols import Progress
from kvsnap.sampling import start

__all__ = ["Aside", "LiveState", "live_of"]


def live_of(
    cache: Any, lines: tuple[Line, ...], sampler: SamplerState, encoded: EncoderInput | None, stamp: Stamp | None
) -> Live:
    """Return a state as it is now."""
    return Live(cache, lines, sampler, marks_of(cache), encoded, stamp)


class Aside:
    """A live state that was taken out of its engine, and can be taken up again once."""

    __slots__ = ("live", "owner")

    def __init__(self, owner: LiveState, live: Live) -> None:
        self.owner = owner
        self.live: Live | None = live


class LiveState:
    """A model, the cache that it fills, the sequences in it and the sampler."""

    def __init__(self, model: Model, prefill_step: int) -> None:
        self.forwards = 0
        self.evaluated = 0
        self._model = model
        self._step = prefill_step
        self._live = live_of(model.fresh_cache(), (Line(),), start(), None, None)
        self._undo: tuple[Live, Undo | Cut] | None = None

    @property
    def sampler(self) -> SamplerState:
        return self._live.sampler

    @sampler.setter
    def sampler(self, state: SamplerState) -> None:
        self._mend()
        self._live = replace(self._live, sampler=state)

    @property
    def tokens(self) -> tuple[int, ...]:
        return self._line().tokens

    @property
    def n_rows(self) -> int:
        return self._line().n_rows

    @property
    def n_pending(self) -> int:
        return self._line().n_pending

    @property
    def rows(self) -> int:
        """Sequences in the live cache; more than one after a batch was adopted or a snapshot went into several rows."""
        return len(self._live.lines)

    @property
    def context_limit(self) -> int | None:
        limits = (self._model.context_limit, self._model.room(self._live.cache))
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def cache(self) -> Any:
        """The live cache object, for the user's own `generate`; what that call adds is handed back with `adopt`."""
        self._mend()
        return self._live.cache

    def set_aside(self) -> Aside:
        """Take the live state out, sampler and all, and leave an empty one; nothing is copied, no weight is read."""
        live = self._current()
        self._live = live_of(self._model.fresh_cache(), (Line(),), live.sampler, None, None)
        return Aside(self, live)

    def take_up(self, aside: Aside) -> None:
        """Make a state live again that `set_aside` took out, in place of the one that is; nothing is copied.

        Each state is taken up once, so that no two share memory. Raise `InputError` for one of another engine, or one
        that was taken up already.
        """
        if aside.owner is not self or aside.live is None:
            raise InputError("this state was taken up already, or is one of another engine", expected="one of its own")
        self._live, aside.live = aside.live, None

    def _line(self) -> Line:
        lines = self._live.lines
        if len(lines) > 1:
            raise UnsupportedError(
                f"this engine holds a batch of {len(lines)} sequences; capture(row=...) one and install it to go on"
            )
        return lines[0]

    def _mend(self) -> None:
        # What a pass left behind that failed or was interrupted, this clean-up itself included. A change is published
        # by one assignment to `_live`; until then the state is the one that the change began with.
        if self._undo is not None and self._undo[0] is self._live:
            self._undo[1].put_back()
            self._live = replace(self._live, marks=marks_of(self._live.cache))
        self._undo = None

    def _current(self) -> Live:
        """Return the live state, checked to be what this engine left."""
        self._mend()
        live = self._live
        if live.marks != marks_of(live.cache):
            wanted, found = live.lines[0].n_rows, max((n for n in rows_of(live.cache) if n is not None), default=0)
            raise InputError(
                "the live cache was changed outside the engine; hand it back with adopt()",
                expected=f"{wanted} rows", found=f"{found} rows" if found != wanted else "other rows",
            )  # fmt: skip
        return live

    @contextmanager
    def _change(self) -> Iterator[tuple[Live, Line]]:
        """Yield the state for a change in place; what is not published with `_publish` is put back as it was."""
        line = self._line()
        with self._change_rows() as live:
            yield live, line

    @contextmanager
    def _change_rows(self) -> Iterator[Live]:
        """Yield the state of a batch as `_change` does that of one sequence."""
        live = self._current()
        self._undo = (live, Undo(live.cache))
        try:
            yield live
        finally:
            self._mend()

    def _publish(self, line: Line, sampler: SamplerState) -> None:
        self._publish_rows((line,), sampler)

    def _publish_rows(self, lines: tuple[Line, ...], sampler: SamplerState) -> None:
        live, module = self._live, self._model.module
        stamp = live.stamp
        if not (live.lines[0].n_rows or live.encoded):
            stamp = stamp_of(module)
        elif stamp is not None and not stamp.holds(module):
            stamp = None  # rows of two models, and no identity is that of both
        self._live = live_of(live.cache, lines, sampler, live.encoded, stamp)

    def _evaluate(
        self, cache: Any, line: Line, progress: Progress | None = None, positions: Sequence[int] | None = None
    ) -> Line:
        ids, total = line.pending, line.n_pending
        if positions is not None:
            positions = (*line.pending_positions[: total - len(positions)], *positions)
        elif line.positions or line.offset is not None:
            positions = line.pending_positions
        logits = line.logits
        for first, stop in self._split(line, total):
            part = ids[first:stop]
            places = None if positions is None else positions[first : first + len(part)]
            logits = self._forward(cache, part, line.n_rows + first, places)
            self.forwards += 1
            self.evaluated += len(part)
            if progress is not None:
                progress(first + len(part), total)
        return line if logits is None or not total else line.evaluated(logits, positions)

    def _forward(
        self, cache: Any, ids: Sequence[int], n_rows: int, positions: Sequence[int] | None
    ) -> npt.NDArray[Any]:
        """Make one pass over ids behind the `n_rows` of `cache`; return the logits of the last."""
        return self._model.evaluate(cache, ids, n_rows, positions)

    def _split(self, line: Line, total: int) -> list[tuple[int, int]]:
        """Return the first and the last id of each pass that is made of `total` pending ones."""
        step = self._step
        cuts = [0, 1] if line.again and total else [0]
        if self._model.cache.alone or self._model.starts_over:
            cuts += range(cuts[-1] + (1 if line.n_rows or line.again else step), total)
        else:
            cuts += range(cuts[-1] + step, total, step)
        return [pair for pair in pairwise((*cuts, total)) if pair[0] < pair[1]]

    def _check_room(self, line: Line, more: int, *, placed: bool = False) -> None:
        """Raise `ContextError` where `more` ids do not fit; with `placed` their positions were checked already."""
        behind = max(line.taken, line.next_position + line.n_pending)
        check_room(behind, 0 if placed else more, self._model.context_limit)
        check_room(line.taken, more, self._model.room(self._live.cache), "the static cache")

"""Evaluating a given text: the logits behind each of its ids, a few ids in each pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvsnap.engines._tf_live import live_of
from kvsnap.engines._tf_state import Line, check_ids
from kvsnap.engines._tf_verify import Verifying
from kvsnap.errors import ConflictError, InputError, UnsupportedError

__all__ = ["Scoring"]

_BLOCK_BYTES = 32 << 20
"""Bytes of float32 logits that a pass makes at most, unless one row has more."""
_MOST = 256


class Scoring(Verifying):
    """A live state that evaluates a given text."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Put the live sequence aside, and take it up again at the end, whatever is done inside."""
        live, observers = self._current(), self._recorders
        try:
            self._recorders = ()  # who looks on sees the live sequence only
            self._live = live_of(self._model.fresh_cache(), (Line(),), live.sampler, None, None)
            yield
        finally:
            self._mend()
            self._live, self._recorders = live, observers

    def score(self, ids: Sequence[int]) -> Iterator[npt.NDArray[np.float32]]:
        """Evaluate what is pending and then `ids`; yield the logits behind each, float32 `[n, vocab]`, in blocks."""
        line = self._line()
        checked = check_ids(ids, self.vocab_size, line.taken)
        if not checked:
            raise InputError("nothing to score: no ids were given")
        self._check_room(line, len(checked))
        return self._scored(checked, self._live.lines)

    def _scored(self, ids: tuple[int, ...], lines: tuple[Line, ...]) -> Iterator[npt.NDArray[np.float32]]:
        self._check_same(lines)
        if lines[0].n_pending:
            self.settle()
            lines = self._live.lines
        step = self._at_once()
        for first in range(0, len(ids), step):
            self._check_same(lines)
            part = ids[first : first + step]
            with self._change() as (live, line):
                full = line.extended(part, "prompt")
                places = full.pending_positions if line.positions or line.offset is not None else None
                found = self._model.evaluate(live.cache, part, line.n_rows, places, len(part))
                rows = found.reshape(len(part), -1)
                self.forwards += 1
                self.evaluated += len(part)
                self._publish(full.evaluated(rows[-1].copy(), places), live.sampler)
            lines = self._live.lines
            yield rows.astype(np.float32)

    def _check_same(self, lines: tuple[Line, ...]) -> None:
        if self._live.lines is not lines:
            raise ConflictError("the sequence was changed while a text was scored: score the rest of it anew")

    def _at_once(self) -> int:
        """Return how many ids share a pass: one where a pass of several is not what steps make."""
        try:
            self.check_verify()
        except UnsupportedError:
            return 1
        return max(1, min(_MOST, _BLOCK_BYTES // (4 * self.vocab_size)))

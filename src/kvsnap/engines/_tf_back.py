"""Going back in a live sequence: how far it can be cut in memory, and cutting it."""

from __future__ import annotations

from dataclasses import replace

from kvsnap.engines._tf_live import live_of
from kvsnap.engines._tf_observed import Observed
from kvsnap.engines._tf_rewind import Cut, check_length, cut_line, ends_of
from kvsnap.engines._tf_state import Line
from kvsnap.errors import InputError, UnsupportedError
from kvsnap.protocols import Installed
from kvsnap.reach import Reach

__all__ = ["Rewindable"]


class Rewindable(Observed):
    """A live state that can be cut."""

    def reach(self, n_tokens: int) -> Reach:
        """Return what `rewind` to `n_tokens` tokens would keep, or to the nearest length below that can be reached.

        Reads no row. Raise `InputError` outside 0..len(tokens).
        """
        live, line = self._current(), self._line()
        return ends_of(self._model, live.cache, line).reach(check_length(n_tokens, line), lambda _: True)

    def rewind(self, n_tokens: int) -> Installed:
        """Cut the live sequence to its first `n_tokens` tokens, in memory; sampler and random state stay.

        Rows that stay are not touched. Logits stay where no row goes; without them `prefill` goes on, and `step` and
        `settle` evaluate the last row again. Raise `InputError` outside 0..len(tokens), `UnsupportedError` that says
        which layers cannot be cut there, and names the nearest lengths below and above that can be reached.
        """
        live, line = self._current(), self._line()
        n_tokens = check_length(n_tokens, line)
        if not n_tokens:
            self._live = live_of(self._model.emptied(live.cache), (Line(),), live.sampler, live.encoded, live.stamp)
            return Installed(0, 0)
        ends = ends_of(self._model, live.cache, line)
        ends.check(n_tokens)
        shorter = cut_line(line, n_tokens, ends)
        self._cut(shorter)
        gone = shorter.logits is None and not shorter.n_pending
        notes = ("the logits went with the rows: without new ids the last row is evaluated again",) if gone else ()
        return Installed(shorter.n_rows, 0, notes)

    def _cut(self, line: Line) -> None:
        # The decision is published before the layers are cut: an interrupted cut is gone on with, not undone.
        live = self._current()
        cutting = replace(live, lines=(line,))
        if line.n_rows == live.lines[0].n_rows:  # nothing but ids that were not evaluated
            self._live = cutting
            return
        self._undo = (cutting, Cut(cutting.cache, line.n_rows))
        self._live = cutting
        self._mend()

    def settle(self) -> None:
        """As `Engine.settle`."""
        self._need_logits()
        with self._change() as (live, line):
            self._publish(self._evaluate(live.cache, line), live.sampler)

    def _need_logits(self) -> None:
        """See to it that there are logits, or something pending whose evaluation makes some."""
        live, line = self._current(), self._line()
        if line.n_pending or not line.n_rows or line.logits is not None:
            return
        if not line.tokens:
            raise InputError("there are neither logits nor the last token, so there is nothing to go on from")
        ends = ends_of(self._model, live.cache, line)
        shorter = line.without_last_row()
        if ends.rows_at(len(line.tokens) - 1) != shorter.n_rows or not ends.can(len(line.tokens) - 1):
            why = "; ".join(ends.limits(len(line.tokens) - 1))
            raise UnsupportedError(
                f"there are no logits, and the last row cannot be evaluated again: {why}; prefill ids to go on"
            )
        self._cut(shorter)

"""Checking proposed ids: one pass over several of them, of which those that the model chooses too keep their rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.engines import _tf_text
from kvsnap.engines._tf_identity import tokenizer_digest
from kvsnap.engines._tf_input import Encoding
from kvsnap.engines._tf_layers import Undo, kind_of, marks_of
from kvsnap.engines._tf_rewind import Cut, ends_of
from kvsnap.engines._tf_state import Line, Live, check_ids
from kvsnap.engines._tf_views import layers_of
from kvsnap.errors import InputError, UnsupportedError
from kvsnap.protocols import Token
from kvsnap.sampling import choose

__all__ = ["Verifying"]


@dataclass(slots=True)
class _Round:
    """A pass over proposals that the live cache is ahead by.

    `base` is the sequence with what was known before, evaluated where the cache can be cut (`undo` is None), else as it
    was; `logits` `[proposals + 1, vocab]` are those behind it and behind each proposal. `seen` are the states that
    the cache is ahead of, the last one the newest, `first` and `n_rows` the rows before the pass and those it holds.
    """

    base: Line
    ids: tuple[int, ...]
    places: tuple[int, ...] | None
    logits: npt.NDArray[Any]
    first: int
    n_rows: int
    undo: Undo | None
    taken: int = 0
    over: bool = False
    seen: list[Live] = field(default_factory=list)

    def shows(self, live: Live) -> bool:
        return any(live is one for one in self.seen)

    def known(self) -> Line:
        """Return the sequence with the proposals taken so far, the last of them evaluated where its row can stay."""
        taken = self.ids[: self.taken]
        line = self.base.extended(taken, "generated")
        if self.undo is None or (self.taken == len(self.ids) and not self.over):
            places = None if self.places is None else self.places[: line.n_pending]
            if line.n_pending:
                line = line.evaluated(self.logits[self.taken], places)
            return self.labelled(replace(line, logits=self.logits[self.taken]))
        return line

    def labelled(self, line: Line) -> Line:
        """Return a sequence that says which of its rows may have been evaluated with proposals."""
        if line.n_rows == self.first or self.n_rows - self.first < 2:
            return line
        first, stop = line.together
        return replace(line, together=(min(first, self.first) if stop else self.first, line.n_rows))

    def put_back(self, cache: Any, line: Line) -> None:
        """Leave in the cache what belongs to a sequence; may be called again."""
        if line.n_rows == self.n_rows:
            return
        if self.undo is None:
            Cut(cache, line.n_rows).put_back()
        else:
            self.undo.put_back()


class Verifying(Encoding):
    """A live state that checks proposals."""

    _ends: frozenset[int]
    _round: _Round | None = None

    def verify(self, ids: Sequence[int]) -> None:
        """Evaluate what is pending and then `ids` in one pass, as proposals for what comes next; `take` chooses.

        Nothing shows yet, but that what was pending is evaluated. Where a layer cannot be cut, what is pending is
        evaluated apart when there is more of it than of proposals. All or nothing. Raise `InputError` for ids outside
        the vocabulary or an empty sequence, `ContextError` where the proposals and one id more do not fit,
        `UnsupportedError` where `check_verify` does.
        """
        line = self._line()
        checked = check_ids(ids, self.vocab_size, line.taken)
        if not line.taken:
            raise InputError("nothing to go on from: the sequence is empty; prefill a prompt first")
        self.check_verify()
        self._check_room(line, len(checked) + 1)
        self._need_logits()
        line = self._line()
        if line.again or line.n_pending > max(len(checked), 1) + 1:
            self.settle()
        live, line = self._current(), self._line()
        undo = Undo(live.cache)
        self._undo, begun = (live, undo), None
        try:
            begun = self._looked_ahead(live, line, checked, undo)
        finally:
            if begun is None:
                self._mend()
        # From here on a clean-up goes back to what is shown.
        begun.seen.append(live)
        self._round, self._undo = begun, None
        self._publish(begun.labelled(begun.base), live.sampler)
        begun.seen.append(self._live)

    def take(self) -> Token | None:
        """Choose one token, as `step` does, from what the last `verify` evaluated; None when there is no more of it.

        Where the token is the proposal at that place its row stays, and the next one may be taken. Any other call that
        looks at the state or changes it ends this: what is not taken by then is dropped.
        """
        around, live = self._round, self._live
        if around is None or around.over or not around.shows(live):
            return None
        known = around.known()
        chosen, logprob, sampler = choose(around.logits[around.taken], known.tokens, live.sampler)
        end = chosen in self._ends
        text = "" if end else _tf_text.piece(self.tokenizer, known.tokens, chosen)
        shown = replace(live, lines=(known.extended((chosen,), "generated"),), sampler=sampler)
        around.seen.append(shown)
        self._live = shown
        around.over = around.taken == len(around.ids) or chosen != around.ids[around.taken]
        around.taken += 1
        return Token(chosen, text, logprob, end)

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Put back, at the end, whatever is evaluated inside: rows, ids, logits, sampler. The counts of passes stay."""
        live = self._current()
        undo = Undo(live.cache)
        try:
            yield
        finally:
            self._mend()
            if self._live.cache is live.cache:
                self._undo, self._live = (live, undo), live
                self._mend()

    def check_verify(self) -> None:
        """Raise `UnsupportedError` naming what keeps this model from evaluating several proposals in one pass."""
        self._line()
        if self._model.cache.alone or self._model.starts_over:
            raise UnsupportedError(
                f"{self._model.config.model_type} evaluates one id at a time here, so that nothing is gained by "
                "proposals", expected="a model that goes on from its state in a pass of several ids",
            )  # fmt: skip
        limits = (getattr(part, "time_step_limit", None) for part in self._model.module.modules())
        limited = [list(limit) for limit in limits if limit is not None and tuple(limit) != (0.0, math.inf)]
        if limited:
            raise UnsupportedError(
                f"{self._model.config.model_type} limits its time steps in a pass of several ids and not in one of a "
                "single id, so that proposals would change what is generated",
                expected=[0.0, math.inf], found=limited[0],
            )  # fmt: skip
        for index, layer in enumerate(layers_of(self._live.cache)):
            if kind_of(layer, index).quantisation(layer):
                raise UnsupportedError(
                    f"layer {index} is quantised: which of its rows become codes depends on how many ids are "
                    "evaluated together, so that proposals would change what is generated"
                )
            if any(part.role == "index" for part in self._model.geometry[index].parts):
                raise UnsupportedError(
                    f"layer {index} picks rows by an index: which ones it takes of equal scores depends on how many "
                    "ids are evaluated together, so that proposals would change what is generated"
                )

    def _looked_ahead(self, live: Live, line: Line, ids: tuple[int, ...], undo: Undo) -> _Round:
        full = line.extended(ids, "generated")
        places = full.pending_positions if line.positions or line.offset is not None else None
        keep = len(ids) + (1 if line.n_pending else 0)
        logits = np.empty((0, self.vocab_size))
        if keep:
            found = self._model.evaluate(live.cache, full.pending, line.n_rows, places, keep)
            self.forwards += 1
            self.evaluated += full.n_pending
            logits = found.reshape(keep, -1)
        if not line.n_pending:
            before = line.logits
            if before is None:
                raise InputError("there are no logits to choose from")
            logits = np.concatenate((before[None].astype(logits.dtype), logits)) if keep else before[None]
        n_rows = full.taken
        if self._cuts(live, line, full):
            settled = line.evaluated(logits[0], None if places is None else places[: line.n_pending])
            known, behind = settled if line.n_pending else line, None if places is None else places[line.n_pending :]
            return _Round(known, ids, behind, logits, line.n_rows, n_rows, None)
        return _Round(line, ids, places, logits, line.n_rows, n_rows, undo)

    def _cuts(self, live: Live, line: Line, full: Line) -> bool:
        """Tell whether the cache, which is ahead, can be cut behind each of the proposals."""
        ends = ends_of(self._model, live.cache, replace(full, n_rows=full.taken, n_pending=0))
        return all(ends.can(n) for n in range(len(line.tokens), len(full.tokens)))

    def _mend(self) -> None:
        super()._mend()
        around = self._round
        if around is not None and around.shows(self._live):
            around.put_back(self._live.cache, self._live.lines[0])
            self._live = replace(self._live, marks=marks_of(self._live.cache))
        self._round = None

    def tokenizer_digest(self) -> str:
        """Return the digest of the tokenizer, as in the identity; "" without one."""
        return "" if self.tokenizer is None else tokenizer_digest(self.tokenizer)

"""A live state whose attention can be looked at while it evaluates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy.typing as npt

from kvsnap.attention import AttentionSnapshot, Wanted
from kvsnap.engines._tf_attention import Call, listening
from kvsnap.engines._tf_live import LiveState
from kvsnap.engines._tf_model import Model
from kvsnap.engines._tf_probe import Recorder
from kvsnap.engines._tf_state import Line, check_ids, check_room
from kvsnap.errors import InputError
from kvsnap.protocols import Progress

__all__ = ["Observed", "Observer"]


class Observer:
    """What is seen of the passes of an engine; `snapshot` may be asked for while it goes on, and afterwards."""

    def __init__(self, state: Observed, recorder: Recorder) -> None:
        self._state: Observed | None = state
        self._recorder = recorder

    def snapshot(self) -> AttentionSnapshot:
        """Return what was seen so far. Raise `InputError` where nothing was evaluated."""
        self.settle()
        return self._recorder.snapshot()

    def settle(self) -> None:
        """Take up what was published since, and drop what was undone."""
        if self._state is not None:
            self._state.settle_recorder(self._recorder)

    def close(self) -> None:
        """See no more."""
        self.settle()
        self._state = None


class Observed(LiveState):
    """A live state that tells of its attention."""

    def __init__(self, model: Model, prefill_step: int) -> None:
        super().__init__(model, prefill_step)
        self._recorders: tuple[Recorder, ...] = ()

    @contextmanager
    def observe(self, wanted: Wanted) -> Iterator[Observer]:
        """Record the attention of every pass made inside; several may be open, each sees all.

        What the engine gives is what it gives without. Raise `UnsupportedError` naming a model whose attention is not
        computed where it can be heard.
        """
        recorder = Recorder(self._model, wanted)
        observer = Observer(self, recorder)
        try:
            self._recorders = (*self._recorders, recorder)
            yield observer
        finally:
            self._recorders = tuple(other for other in self._recorders if other is not recorder)
            observer.close()

    def attend(self, ids: Sequence[int], wanted: Wanted, *, behind: bool = False) -> AttentionSnapshot:
        """Evaluate ids from an empty sequence, or `behind` what is held, and return their attention.

        The live sequence is afterwards as before; the passes are counted. Raise as `prefill` and `observe` do.
        """
        recorder = Recorder(self._model, wanted)
        line = self._line() if behind else Line()
        checked = check_ids(ids, self.vocab_size, line.taken)
        if not checked and not line.n_pending:
            raise InputError("nothing to evaluate: the prompt is empty")
        if behind:
            self._check_room(line, len(checked))
            with self._change() as (live, line):
                return self._recorded(recorder, live.cache, line.extended(checked, "prompt"))
        self._mend()
        check_room(0, len(checked), self._model.context_limit)
        cache = self._model.emptied(self._live.cache)
        check_room(0, len(checked), self._model.room(cache), "the static cache")
        return self._recorded(recorder, cache, line.extended(checked, "prompt"))

    def _recorded(self, recorder: Recorder, cache: Any, line: Line) -> AttentionSnapshot:
        others = self._recorders
        try:
            self._recorders = (recorder,)  # passes that leave nothing behind are not for those who look on
            self._evaluate(cache, line)
        finally:
            self._recorders = others
        recorder.take()
        return recorder.snapshot()

    def settle_recorder(self, recorder: Recorder) -> None:
        """Tell a recorder what is held now; of a batch it is told nothing."""
        lines = self._live.lines
        if len(lines) == 1:
            recorder.settle(self._live.cache, lines[0])

    def _evaluate(
        self, cache: Any, line: Line, progress: Progress | None = None, positions: Sequence[int] | None = None
    ) -> Line:
        if not self._recorders or not line.n_pending:
            return super()._evaluate(cache, line, progress, positions)
        for recorder in self._recorders:
            recorder.begin(cache, self._live.cache, self._live.lines[0], line)
        done = False
        try:
            evaluated = super()._evaluate(cache, line, progress, positions)
            done = True
        finally:
            for recorder in self._recorders:
                if not done:
                    recorder.drop()
        for recorder in self._recorders:
            recorder.done(evaluated)
        return evaluated

    def _forward(
        self, cache: Any, ids: Sequence[int], n_rows: int, positions: Sequence[int] | None
    ) -> npt.NDArray[Any]:
        recorders = self._recorders
        if not recorders:
            return super()._forward(cache, ids, n_rows, positions)
        for recorder in recorders:
            recorder.start(n_rows, len(ids))

        def hear(call: Call) -> None:
            for recorder in recorders:
                recorder.hear(call)

        with listening(recorders[0].places, hear):
            logits = super()._forward(cache, ids, n_rows, positions)
        for recorder in recorders:
            recorder.finish()
        return logits

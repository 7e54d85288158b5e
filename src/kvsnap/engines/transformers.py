"""The engine for Hugging Face transformers: full and latent attention, on any device, in float32, float16 or bfloat16.

Works with transformers 4.57 and 5.0 to 5.24. Nothing here imports torch or transformers before a model is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kvsnap.editing import Rope
from kvsnap.engines import _tf_text
from kvsnap.engines._tf_adopt import lines_in, only_rows
from kvsnap.engines._tf_capture import live_dtype, logits_tensor, read_layers
from kvsnap.engines._tf_identity import identity_of, weights_stamp
from kvsnap.engines._tf_install import build_cache, check_snapshot, line_of
from kvsnap.engines._tf_layers import cut, dtype_of, rows_of
from kvsnap.engines._tf_model import Model, recognises
from kvsnap.engines._tf_rope import rope_of
from kvsnap.engines._tf_state import Line, Live, check_ids, check_room
from kvsnap.errors import ConflictError, InputError, UnsupportedError
from kvsnap.identity import Identity
from kvsnap.layout import PositionRun, SamplerState, Snapshot
from kvsnap.protocols import Installed, Progress, Token
from kvsnap.sampling import choose, start

__all__ = ["TransformersEngine", "recognises"]


class TransformersEngine:
    """One transformers model and the live state of one sequence; see `kvsnap.protocols.Engine` for each method.

    `prefill_step` is the most ids evaluated in one pass, `workers` the threads that read and digest. Raise
    `UnsupportedError` naming what in the model is not supported. The model stays the user's: nothing in it is changed.
    """

    name: str = "transformers"

    def __init__(self, model: Any, tokenizer: Any = None, *, prefill_step: int = 4096, workers: int = 2) -> None:
        if not recognises(model):
            raise InputError("not a transformers model", expected="a PreTrainedModel", found=type(model).__name__)
        if prefill_step < 1 or workers < 1:
            raise InputError("prefill_step and workers must be 1 or above", found=(prefill_step, workers))
        self.model = model
        self.tokenizer = tokenizer
        self.forwards = 0
        self.evaluated = 0
        self._model = Model.of(model)
        self._step = prefill_step
        self._workers = workers
        self._ends = _tf_text.end_ids(self._model.module, self._model.config)
        self._live = Live(self._model.fresh_cache(), (Line(),), start())
        self._unfinished = False
        self._stamp: object = None

    # -- the state ---------------------------------------------------------------------------------------------------

    @property
    def sampler(self) -> SamplerState:
        return self._live.sampler

    @sampler.setter
    def sampler(self, state: SamplerState) -> None:
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
    def context_limit(self) -> int | None:
        return self._model.context_limit

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def cache(self) -> Any:
        """The live cache object, for the user's own `generate`; what that call adds is handed back with `adopt`."""
        self._mend()
        return self._live.cache

    def _line(self) -> Line:
        lines = self._live.lines
        if len(lines) > 1:
            raise UnsupportedError(
                f"this engine holds a batch of {len(lines)} sequences; capture(row=...) one and install it to go on"
            )
        return lines[0]

    def _mend(self) -> None:
        # What a pass left behind that failed or was interrupted, this clean-up itself included.
        if self._unfinished and len(self._live.lines) == 1:
            cut(self._live.cache, self._live.lines[0].n_rows)
        self._unfinished = False

    def _current(self) -> Live:
        """Return the live state, checked to be what this engine left."""
        self._mend()
        live = self._live
        if len(live.lines) == 1 and any(rows != live.lines[0].n_rows for rows in rows_of(live.cache)):
            raise InputError(
                "the live cache was changed outside the engine; hand it back with adopt()",
                expected=f"{live.lines[0].n_rows} rows", found=f"{max(rows_of(live.cache))} rows",
            )  # fmt: skip
        return live

    @contextmanager
    def _change(self) -> Iterator[tuple[Live, Line]]:
        """Yield the state for a change in place; whatever is not published by assigning `_live` is cut off again."""
        live, line = self._current(), self._line()
        self._unfinished = True
        try:
            yield live, line
        finally:
            self._mend()

    def _evaluate(self, cache: Any, line: Line, progress: Progress | None = None) -> Line:
        ids, total = line.pending, line.n_pending
        logits = line.logits
        alone = int(line.again)
        for first in (*range(alone), *range(alone, total, self._step)):
            part = ids[first : first + (self._step if first or not alone else 1)]
            logits = self._model.evaluate(cache, part)
            self.forwards += 1
            self.evaluated += len(part)
            if progress is not None:
                progress(first + len(part), total)
        return line if logits is None or not total else line.evaluated(logits)

    # -- evaluating --------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        self._live = replace(self._live, cache=self._model.fresh_cache(), lines=(Line(),))

    def prefill(self, ids: Sequence[int]) -> None:
        line = self._line()
        checked = check_ids(ids, self.vocab_size, line.positions)
        if not checked and not line.positions:
            raise InputError("nothing to evaluate: the prompt is empty and so is the sequence")
        check_room(line.positions, len(checked), self.context_limit)
        with self._change() as (live, line):
            self._stamp = self._stamp if line.n_rows else weights_stamp(self.model)
            done = self._evaluate(live.cache, line.extended(checked, "prompt"))
            self._live = replace(live, lines=(done,))

    def settle(self) -> None:
        with self._change() as (live, line):
            self._live = replace(live, lines=(self._evaluate(live.cache, line),))

    def step(self) -> Token:
        with self._change() as (live, line):
            if not line.positions:
                raise InputError("nothing to go on from: the sequence is empty; prefill a prompt first")
            check_room(line.positions, 1, self.context_limit)
            ready = self._evaluate(live.cache, line)
            if ready.logits is None:
                raise InputError("there are no logits to choose from")
            chosen, logprob, sampler = choose(ready.logits, ready.tokens, live.sampler)
            end = chosen in self._ends
            text = "" if end else _tf_text.piece(self.tokenizer, ready.tokens, chosen)
            self._live = Live(live.cache, (ready.extended((chosen,), "generated"),), sampler)
        return Token(chosen, text, logprob, end)

    def warm(self, ids: Sequence[int], progress: Progress | None = None) -> None:
        checked = check_ids(ids, self.vocab_size, 0)
        if not checked:
            raise InputError("nothing to evaluate: no ids were given")
        check_room(0, len(checked), self.context_limit)
        cache, stamp = self._model.fresh_cache(), weights_stamp(self.model)
        line = self._evaluate(cache, Line().extended(checked, "prompt"), progress)
        self._live, self._stamp = Live(cache, (line,), self._live.sampler), stamp

    # -- out and in --------------------------------------------------------------------------------------------------

    def capture(self, *, start: int = 0, row: int = 0) -> Snapshot:
        live = self._current()
        if not 0 <= row < len(live.lines):
            raise InputError("no such sequence in the batch", expected=f"0 to {len(live.lines) - 1}", found=row)
        line = live.lines[row]
        if not 0 <= start <= line.n_rows:
            raise InputError("no such row to start from", expected=f"0 to {line.n_rows}", found=start)
        if line.n_rows and self._stamp != weights_stamp(self.model):
            raise ConflictError("the weights were changed or moved after rows were evaluated; reset() and start over")
        layers = read_layers(self._model, live.cache, line, row, start, self._cache_dtype())
        return Snapshot(
            architecture=str(self._model.config.model_type),
            layers=layers,
            tokens=line.tokens,
            runs=line.runs,
            n_rows=line.n_rows,
            row_start=start,
            n_pending=line.n_pending,
            token_offset=line.n_rows,
            positions=(PositionRun(0, line.n_rows),) if line.n_rows else (),
            logits=None if line.logits is None else logits_tensor(line.logits, layers),
            sampler=live.sampler,
            identity=self.identity(),
            text=None if self.tokenizer is None else self.detokenize(line.tokens),
        )

    def _cache_dtype(self) -> str:
        """Name of the dtype of the live rows, or of those to come."""
        return live_dtype(self._live.cache) or dtype_of(self._model.dtype(), "the cache")

    def install(
        self, snapshot: Snapshot, progress: Progress | None = None, *, cast: bool = False, workers: int | None = None
    ) -> Installed:
        """Put a snapshot in place of the live sequence, atomically; the contract is that of `Engine.install`.

        `cast=True` takes rows of another dtype and converts them; `workers` overrides the number of reading threads.
        """
        wanted = self._model.dtype()
        dtype = dtype_of(wanted, "the cache")
        check_snapshot(snapshot, self._model, dtype, cast=cast)
        line = line_of(snapshot)
        cache = build_cache(snapshot, self._model, wanted, line.n_rows, workers or self._workers, progress)
        self._live = Live(cache, (line,), snapshot.sampler or self._live.sampler)
        self._stamp = weights_stamp(self.model)
        given_up = snapshot.n_rows - line.n_rows
        notes = ["no logits are stored, so the last row is evaluated again"] if given_up else []
        others = sorted({t.spec.dtype for t in snapshot.tensors() if t.spec.dtype != dtype})
        if others and line.n_rows:
            notes.append(f"rows were converted from {', '.join(others)} to {dtype}")
        return Installed(line.n_rows, given_up, tuple(notes))

    def adopt(
        self, cache: Any, tokens: Any, *, attention_mask: Any = None, logits: Any = None, prompt: int | None = None
    ) -> None:
        """Take over a cache that `model.generate(..., return_dict_in_generate=True)` or a forward pass made.

        `tokens` are all ids `[batch, ids]` (`.sequences`), `attention_mask` `[batch, <= ids]` tells the padding (1
        keeps; ids behind it count), `logits` `[batch, vocab]` those of the last row, `prompt` how many columns are
        prompt (by default as many as the mask has). Rows of padding are never captured; the others must have been
        evaluated at positions counted without the padding, as `generate` does. The cache object becomes the live one
        and grows in place.

        Raise `UnsupportedError` for another class of cache or layer, or for a batch without a mask, and `InputError`
        where the numbers do not fit. A batch can be captured row by row; only a single sequence can be continued.
        """
        lines = lines_in(
            cache, tokens, self._model, mask=attention_mask, logits=logits, prompt=prompt, ends=self._ends
        )  # fmt: skip
        if len(lines) == 1:
            cache = only_rows(cache, lines[0], self._model)
            lines = (replace(lines[0], select=None),)
            cut(cache, lines[0].n_rows)
        self._live, self._stamp = Live(cache, lines, self._live.sampler), weights_stamp(self.model)

    def rope(self) -> tuple[Rope | None, ...]:
        """Return how each layer rotates its keys (None: not). `UnsupportedError` where that is not fixed or known."""
        return rope_of(self._model)

    # -- identity and text -------------------------------------------------------------------------------------------

    def identity(self, progress: Progress | None = None) -> Identity:
        return identity_of(
            self._model, self.tokenizer, cache_dtype=self._cache_dtype(), workers=self._workers, progress=progress,
            prefill_step=self._step,
        )  # fmt: skip

    def tokenize(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        return _tf_text.tokenize(self.tokenizer, text, special=special)

    def detokenize(self, ids: Sequence[int]) -> str:
        return _tf_text.detokenize(self.tokenizer, ids)

    def render(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        return _tf_text.render(self.tokenizer, messages)

"""The engine for Hugging Face transformers, on any device, in float32, float16 or bfloat16.

Works with transformers 4.57 and 5.0 to 5.24. Nothing here imports torch or transformers before a model is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvsnap.editing import Rope
from kvsnap.engines import _tf_text
from kvsnap.engines._tf_adopt import first_generated, lines_in, only_rows
from kvsnap.engines._tf_batch import Batched
from kvsnap.engines._tf_caches import cache_fact
from kvsnap.engines._tf_capture import live_dtype, logits_tensor, read_layers, sizes_of
from kvsnap.engines._tf_encoder import with_input, without_input
from kvsnap.engines._tf_identity import cache_quantisation_of, identity_of
from kvsnap.engines._tf_install import build_cache, check_snapshot
from kvsnap.engines._tf_known import Known
from kvsnap.engines._tf_layers import cut, dtype_of, rows_of
from kvsnap.engines._tf_live import live_of
from kvsnap.engines._tf_model import Model, recognises
from kvsnap.engines._tf_rope import rope_of
from kvsnap.engines._tf_score import Scoring
from kvsnap.engines._tf_stamp import stamp_of
from kvsnap.engines._tf_state import Line, check_ids, check_positions, check_room
from kvsnap.engines._tf_views import layers_of
from kvsnap.errors import ConflictError, InputError, UnsupportedError
from kvsnap.identity import Identity
from kvsnap.labels import together_label
from kvsnap.layout import Layer, Snapshot
from kvsnap.protocols import Installed, Progress, Token
from kvsnap.sampling import choose

__all__ = ["TransformersEngine", "recognises"]


class TransformersEngine(Batched, Scoring):
    """One transformers model and the live state of one sequence; see `kvsnap.protocols.Engine` for each method.

    `prefill_step` is the most ids evaluated in one pass, `workers` the threads that read and digest, `cache` the kind
    of cache that is filled, with options of its own (docs/engines.md). With `digest="changed"` weights are not read
    again where torch counts no change: for a program that does not change them past torch. Raise `UnsupportedError`
    naming what in the model is not supported. The model stays the user's: nothing in it is changed.
    """

    name: str = "transformers"

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        prefill_step: int = 4096,
        workers: int = 2,
        cache: str = "dynamic",
        cache_options: Mapping[str, Any] | None = None,
        digest: str = "always",
    ) -> None:
        if not recognises(model):
            raise InputError("not a transformers model", expected="a PreTrainedModel", found=type(model).__name__)
        if prefill_step < 1 or workers < 1:
            raise InputError("prefill_step and workers must be 1 or above", found=(prefill_step, workers))
        super().__init__(Model.of(model, cache, cache_options), prefill_step)
        self.model = model
        self.tokenizer = tokenizer
        self._workers = workers
        self._known = Known.of(digest)
        self._ends = _tf_text.end_ids(self._model.module, self._model.config)

    # -- evaluating --------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        self._mend()
        live = self._live
        self._live = live_of(self._model.emptied(live.cache), (Line(),), live.sampler, live.encoded, live.stamp)

    def prefill(self, ids: Sequence[int], *, positions: Sequence[int] | None = None) -> None:
        """As `Engine.prefill`; `positions` are those of `ids`, where they are not simply the next ones."""
        line = self._line()
        checked = check_ids(ids, self.vocab_size, line.taken)
        places = check_positions(positions, len(checked), self.context_limit)
        if not checked and not line.taken:
            raise InputError("nothing to evaluate: the prompt is empty and so is the sequence")
        self._check_room(line, len(checked), placed=places is not None)
        if not checked:
            self._need_logits()
        with self._change() as (live, line):
            self._publish(self._evaluate(live.cache, line.extended(checked, "prompt"), None, places), live.sampler)

    def step(self) -> Token:
        self._need_logits()
        with self._change() as (live, line):
            if not line.taken:
                raise InputError("nothing to go on from: the sequence is empty; prefill a prompt first")
            self._check_room(line, 1)
            ready = self._evaluate(live.cache, line)
            if ready.logits is None:
                raise InputError("there are no logits to choose from")
            chosen, logprob, sampler = choose(ready.logits, ready.tokens, live.sampler)
            end = chosen in self._ends
            text = "" if end else _tf_text.piece(self.tokenizer, ready.tokens, chosen)
            self._publish(ready.extended((chosen,), "generated"), sampler)
        return Token(chosen, text, logprob, end)

    def warm(self, ids: Sequence[int], progress: Progress | None = None) -> None:
        checked = check_ids(ids, self.vocab_size, 0)
        if not checked:
            raise InputError("nothing to evaluate: no ids were given")
        check_room(0, len(checked), self._model.context_limit)
        self._mend()
        live, stamp = self._live, stamp_of(self._model.module)
        cache, encoded = self._model.emptied(live.cache), live.encoded
        if encoded is not None and live.stamp != stamp:
            raise ConflictError("the weights were changed or moved after the input was encoded; encode it again")
        check_room(0, len(checked), self._model.room(cache), "the static cache")
        line = self._evaluate(cache, Line().extended(checked, "prompt"), progress)
        self._live = live_of(cache, (line,), live.sampler, encoded, stamp)

    # -- out and in --------------------------------------------------------------------------------------------------

    def capture(self, *, start: int = 0, row: int = 0, progress: Progress | None = None) -> Snapshot:
        live = self._current()
        if not 0 <= row < len(live.lines):
            raise InputError("no such sequence in the batch", expected=f"0 to {len(live.lines) - 1}", found=row)
        line = live.lines[row]
        if not 0 <= start <= line.n_rows:
            raise InputError("no such row to start from", expected=f"0 to {line.n_rows}", found=start)
        if (line.n_rows or live.encoded) and live.stamp != stamp_of(self._model.module):
            raise ConflictError(
                "the weights were changed or moved, or adapters were switched, after rows were evaluated; reset() and "
                "start over"
            )
        layers = read_layers(self._model, live.cache, line, row, start, self._cache_dtype())
        if self._model.encodes:
            layers = with_input(layers, live.encoded)
        return Snapshot(
            architecture=str(self._model.config.model_type),
            layers=layers,
            tokens=line.tokens,
            runs=line.runs,
            n_rows=line.n_rows,
            row_start=start,
            n_pending=line.n_pending,
            token_offset=line.next_position,
            positions=line.position_runs,
            logits=None if line.logits is None else logits_tensor(line.logits, layers),
            sampler=live.sampler,
            identity=self.identity(progress),
            text=None if self.tokenizer is None else self.detokenize(line.tokens),
            metadata={
                **(dict(line.labels) if start < line.inexact_rows else {}),
                **(together_label(line.together) if start < line.together[1] else {}),
            },
        )

    def layout(self) -> tuple[Layer, ...]:
        self._line()
        return sizes_of(self._model, self._current().cache, self._cache_dtype())

    def configuration(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._model.module.config.to_dict()
        return found

    def _cache_dtype(self) -> str:
        """Name of the dtype of the live rows, or of those to come."""
        return live_dtype(self._live.cache) or dtype_of(self._model.dtype(), "the cache")

    def install(
        self,
        snapshot: Snapshot,
        progress: Progress | None = None,
        *,
        cast: bool = False,
        workers: int | None = None,
        rows: int = 1,
        prefix: bool = False,
    ) -> Installed:
        """Put a snapshot in place of the live sequence, atomically; the contract is that of `Engine.install`.

        `cast=True` takes rows of another dtype and converts them; `workers` overrides the number of reading threads.
        `rows` makes a batch of so many equal sequences, each in memory of its own, for the user's own `generate`. With
        `prefix` ids are going to follow, so that the last row is not given up where there are no logits.
        """
        if rows < 1:
            raise InputError("a batch has one row or more", expected="1 or more", found=rows)
        wanted = self._model.dtype()
        dtype = dtype_of(wanted, "the cache")
        if rows > 1 and self._model.encodes:
            raise UnsupportedError("a batch of an encoder-decoder is not supported", expected="1 row", found=rows)
        layers, encoded = without_input(snapshot.layers) if self._model.encodes else (snapshot.layers, None)
        snapshot = replace(snapshot, layers=layers)
        line = check_snapshot(snapshot, self._model, dtype, cast=cast, prefix=prefix)
        cache = build_cache(snapshot, self._model, wanted, line.n_rows, workers or self._workers, progress, rows)
        if line.n_rows:
            self._model.check(cache, line.n_rows)  # what a pass would have told
        sampler = snapshot.sampler or self._live.sampler
        self._live = live_of(cache, (line,) * rows, sampler, encoded, stamp_of(self._model.module))
        given_up = snapshot.n_rows - line.n_rows
        notes = ["no logits are stored, so the last row is evaluated again"] if given_up else []
        kept = [t.spec for t in snapshot.tensors() if t.spec.grows and t.role != "code"]
        others = sorted({spec.dtype for spec in kept} - {dtype})
        if others and line.n_rows:
            notes.append(f"rows were converted from {', '.join(others)} to {dtype}")
        return Installed(line.n_rows, given_up, tuple(notes))

    def adopt(
        self,
        cache: Any,
        tokens: Any,
        *,
        attention_mask: Any = None,
        logits: Any = None,
        prompt: int | None = None,
        position_ids: Any = None,
        evaluated: int | None = None,
        encoded: Mapping[str, Any] | None = None,
        together: bool = False,
    ) -> None:
        """Take over a cache that `model.generate(..., return_dict_in_generate=True)` or a forward pass made.

        `tokens` are all ids `[batch, ids]` (`.sequences`), `attention_mask` `[batch, <= ids]` tells the padding (1
        keeps; ids behind it count), `logits` `[batch, vocab]` those of the last row, `prompt` how many columns are
        prompt (by default as many as the mask has). `position_ids` `[batch, evaluated ids]` are their positions, by
        default counted without the padding, as `generate` does. `evaluated` tells how many columns the cache has
        seen, for one that only has states and does not count. `encoded` is what the encoder was given, by keyword;
        without it a snapshot does not tell. `together` says that generated ids were checked several at a time, by
        assisted generation, so that their last bits can differ from those of single steps. Rows of padding are never
        captured. The cache object becomes the live one and grows in place.

        Raise `UnsupportedError` for another class of cache or layer, or for a batch without a mask, and `InputError`
        where the numbers do not fit. A batch can be captured row by row; only a single sequence can be continued.
        """
        given = self._adopted(cache, encoded)
        lines = lines_in(
            cache, tokens, self._model, mask=attention_mask, logits=logits, prompt=prompt, ends=self._ends,
            positions=position_ids, evaluated=evaluated,
        )  # fmt: skip
        if len(lines) == 1:
            cache = only_rows(cache, lines[0], self._model)
            lines = (replace(lines[0], select=None, columns=None),)
            if any(held is not None and held > lines[0].n_rows for held in rows_of(cache)):
                cut(cache, lines[0].n_rows)
        if together:
            lines = tuple(replace(line, together=(first_generated(line), line.n_rows)) for line in lines)
        self._live = live_of(cache, lines, self._live.sampler, given, stamp_of(self._model.module))

    def rope(self) -> tuple[Rope | None, ...]:
        """Return how each layer rotates its keys (None: not). `UnsupportedError` where that is not fixed or known."""
        return rope_of(self._model)

    # -- identity and text -------------------------------------------------------------------------------------------

    def identity(self, progress: Progress | None = None) -> Identity:
        return identity_of(
            self._model, self.tokenizer, cache_dtype=self._cache_dtype(), workers=self._workers, progress=progress,
            prefill_step=self._step, cache=cache_fact(self._live.cache),
            cache_quantisation=cache_quantisation_of(layers_of(self._live.cache)), known=self._known,
        )  # fmt: skip

"""What a live state is given: text, and the input of an encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvsnap.engines import _tf_text
from kvsnap.engines._tf_back import Rewindable
from kvsnap.engines._tf_encoder import crossed_length, encoder_input
from kvsnap.engines._tf_live import live_of
from kvsnap.engines._tf_stamp import stamp_of
from kvsnap.engines._tf_state import Line
from kvsnap.errors import UnsupportedError
from kvsnap.layout import EncoderInput

__all__ = ["Encoding"]


class Encoding(Rewindable):
    """A live state with a tokenizer, of a model that may have an encoder."""

    model: Any
    tokenizer: Any

    def encode(self, text: Any = None, /, **inputs: Any) -> None:
        """Encode the input of an encoder-decoder, and forget the sequence; `prefill` and `step` are of decoder ids.

        `text` is text or ids. `inputs` are what the encoder of the model takes: `input_ids` `[ids]` or `[1, ids]`,
        `input_features` `[1, mels, frames]`, of any float dtype. Two passes are counted: the encoder's, and one of
        the decoder for one id, which takes what it needs of the other's output. `reset` keeps what is encoded.

        All or nothing. Raise `UnsupportedError` for a model without an encoder or an attention mask with padding in
        it, `InputError` for what is no single input.
        """
        given, tensors = self._input(text, inputs)
        self._mend()
        cache, stamp = self._model.encode(tensors), stamp_of(self._model.module)
        self.forwards += 2
        self.evaluated += 1
        self._live = live_of(cache, (Line(),), self._live.sampler, given, stamp)

    def holds(self, text: Any = None, /, **inputs: Any) -> bool:
        """Tell whether this is the input that is encoded; arguments and errors as those of `encode`. No pass is made.

        False also where it is not known what a cache that was taken over was made of.
        """
        given, _ = self._input(text, inputs)
        return self.encoded == given

    @property
    def encoded(self) -> EncoderInput | None:
        """The name of the input that is encoded, None where there is none."""
        return self._live.encoded

    def _input(self, text: Any, inputs: Mapping[str, Any]) -> tuple[EncoderInput, dict[str, Any]]:
        if not self._model.encodes:
            raise UnsupportedError(f"{self._model.config.model_type} has no encoder: prefill takes its prompt")
        if isinstance(text, str):
            text = self.tokenize(text)
        return encoder_input(inputs if text is None else {**inputs, "input_ids": text}, self._model.module)

    def _adopted(self, cache: Any, encoded: Mapping[str, Any] | None) -> EncoderInput | None:
        if encoded is not None:
            return self._input(None, encoded)[0]
        return EncoderInput() if self._model.encodes and crossed_length(cache) else None

    def tokenize(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        return _tf_text.tokenize(self.tokenizer, text, special=special)

    def detokenize(self, ids: Sequence[int]) -> str:
        return _tf_text.detokenize(self.tokenizer, ids)

    def render(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True, **options: Any) -> tuple[int, ...]:
        return _tf_text.render(self.tokenizer, messages, answer=answer, options=options)

"""Text and ids with a transformers tokenizer, the same for every release that is supported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvsnap.errors import ExtraMissingError, InputError

__all__ = ["detokenize", "end_ids", "piece", "render", "tokenize"]

# Ids before a new one that are decoded with it: enough for a character spread over several, and for the space in front.
_CONTEXT = 16


def tokenize(tokenizer: Any, text: str, *, special: bool) -> tuple[int, ...]:
    """Return the ids of a text."""
    return tuple(int(i) for i in _present(tokenizer).encode(text, add_special_tokens=special))


def detokenize(tokenizer: Any, ids: Sequence[int], *, special: bool = True) -> str:
    """Return the text of ids, with special tokens unless `special` is False."""
    decode = _present(tokenizer).decode
    return str(decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False))


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    answer: bool,
    options: Mapping[str, Any],
) -> tuple[int, ...]:
    """Return the ids of a conversation under the chat template, with `answer` ready for an answer."""
    if not getattr(_present(tokenizer), "chat_template", None):
        raise InputError("the tokenizer has no chat template; give text or ids instead of messages")
    try:
        import jinja2
    except ImportError as error:
        raise ExtraMissingError("chat templates need jinja2: pip install jinja2") from error
    try:
        found = tokenizer.apply_chat_template(
            [dict(m) for m in messages], add_generation_prompt=answer, tokenize=True, **options
        )
    except (
        jinja2.TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise InputError(f"the chat template does not take these messages: {error}") from error
    # Releases from 5.0 answer with a dictionary unless told otherwise; some answer with a batch of one.
    ids = found["input_ids"] if hasattr(found, "keys") else found
    if len(ids) and not isinstance(ids[0], int):
        ids = ids[0]
    return tuple(int(i) for i in ids)


def piece(tokenizer: Any, before: Sequence[int], new: int) -> str:
    """Return the text that one more id adds behind `before`: decoded in its context, special tokens left out.

    It is empty while a character is incomplete, and depends on the ids alone, so that a resumed run goes on in the
    middle of a character.
    """
    if tokenizer is None:
        return ""
    context = list(before[-_CONTEXT:])
    old = detokenize(tokenizer, context, special=False).rstrip("\ufffd") if context else ""
    return detokenize(tokenizer, [*context, new], special=False).rstrip("\ufffd")[len(old) :]


def end_ids(module: Any, config: Any) -> frozenset[int]:
    """Return the ids that end a text, as `generate` knows them."""
    for settings in (getattr(module, "generation_config", None), config):
        found = getattr(settings, "eos_token_id", None)
        if found is not None:
            return frozenset(int(i) for i in (found if isinstance(found, (list, tuple)) else [found]))
    return frozenset()


def _present(tokenizer: Any) -> Any:
    if tokenizer is None:
        raise InputError(
            "this engine has no tokenizer and takes token ids only; connect(model, tokenizer) gives it one"
        )
    return tokenizer

"""A tokenizer with a chat template, for tests of conversations: letters, and pairs of letters.

A model with random weights writes the same text in other tokens than the tokenizer would, which is what happens at the
seam of an answer. Ids 2 and 3 start and end a message, 1 starts a text. Every id has a text that says it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jinja2
import pytest
import torch
import transformers

import kvsnap
from family_models import build
from kvsnap.errors import UnsupportedError
from tiny_models import tiny_llama

__all__ = ["BEGIN", "END", "PLAIN", "START", "THINKING", "ChatTokenizer", "chat_engine"]

BEGIN, START, END = 1, 2, 3
PLAIN = (
    "{{ '\x01' }}{% for m in messages %}{{ '\x02' + m['role'] + ':' + m['content'] + '\x03' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\x02assistant:' }}{% endif %}"
)
THINKING = (
    "{{ '\x01' }}{% for m in messages %}{{ '\x02' + m['role'] + ':' }}"
    "{% if m['role'] == 'assistant' and '</think>' in m['content'] and not keep %}"
    "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}{{ '\x03' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\x02assistant:' }}{% endif %}"
)
LETTERS = "".join(chr(i) if i < 127 else chr(0x4E00 + i) for i in range(256))
PAIRS = ("th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "ti", "es", "or", "te", "of", "ed")


class ChatTokenizer:
    """256 letters, and 16 pairs from id 256 on, taken from the left. The template is rendered by jinja2."""

    vocab_size = 256 + len(PAIRS)
    eos_token_id: int | None = END
    bos_token_id: int | None = BEGIN

    def __init__(self, template: str | None = PLAIN) -> None:
        self.chat_template = template

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids, place = [BEGIN] if add_special_tokens else [], 0
        while place < len(text):
            pair = text[place : place + 2]
            ids.append(256 + PAIRS.index(pair) if pair in PAIRS else LETTERS.index(text[place]))
            place += 2 if pair in PAIRS else 1
        return ids

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False, **_: Any) -> str:
        listed = [ids] if isinstance(ids, int) else list(ids)
        if skip_special_tokens:
            listed = [i for i in listed if i not in (BEGIN, START, END)]
        return "".join(LETTERS[i] if i < 256 else PAIRS[i - 256] for i in listed)

    def get_vocab(self) -> dict[str, int]:
        return {**{LETTERS[i]: i for i in range(256)}, **{pair: 256 + i for i, pair in enumerate(PAIRS)}}

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool, tokenize: bool = True, **options: Any
    ) -> Any:
        assert self.chat_template is not None
        settings = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)  # noqa: S701 # no HTML
        settings.globals["raise_exception"] = _refused
        options.setdefault("keep", False)
        text = settings.from_string(self.chat_template).render(
            messages=messages, add_generation_prompt=add_generation_prompt, **options
        )
        return self.encode(text) if tokenize else text


def _refused(text: str) -> None:
    raise jinja2.TemplateError(text)


def chat_engine(kind: str = "llama", template: str | None = PLAIN, **changes: Any) -> Any:
    """An engine with a tiny model of a kind that writes no token that starts or ends a message, and this tokenizer."""
    changes.setdefault("vocab_size", ChatTokenizer.vocab_size)
    model = tiny_llama(**changes) if kind == "llama" else build(kind, **changes)
    with torch.no_grad():
        model.get_output_embeddings().weight[: END + 1] = 0.0
    try:
        return kvsnap.connect(model, ChatTokenizer(template))
    except UnsupportedError as error:
        if kind in ("llama", "gemma3", "mistral"):
            raise
        pytest.skip(f"transformers {transformers.__version__}: {error}")

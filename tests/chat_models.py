"""A tokenizer with a chat template, for tests of conversations: bytes, and pairs of bytes that a text is written in.

A model with random weights writes the same text in other tokens than the tokenizer would, which is what happens at the
seam of an answer. Ids 2 and 3 start and end a message, 1 starts a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jinja2

__all__ = ["BEGIN", "END", "PLAIN", "START", "THINKING", "ChatTokenizer"]

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
PAIRS = ("th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "ti", "es", "or", "te", "of", "ed")


class ChatTokenizer:
    """256 bytes, and 16 pairs of letters from id 256 on, taken from the left. The template is rendered by jinja2."""

    vocab_size = 256 + len(PAIRS)
    eos_token_id: int | None = END
    bos_token_id: int | None = BEGIN

    def __init__(self, template: str | None = PLAIN) -> None:
        self.chat_template = template

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids, place = [BEGIN] if add_special_tokens else [], 0
        raw = text.encode()
        while place < len(raw):
            pair = raw[place : place + 2].decode("latin-1")
            ids.append(256 + PAIRS.index(pair) if pair in PAIRS else raw[place])
            place += 2 if pair in PAIRS else 1
        return ids

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False, **_: Any) -> str:
        listed = [ids] if isinstance(ids, int) else list(ids)
        if skip_special_tokens:
            listed = [i for i in listed if i not in (BEGIN, START, END)]
        return b"".join(bytes([i]) if i < 256 else PAIRS[i - 256].encode() for i in listed).decode("utf-8", "replace")

    def get_vocab(self) -> dict[str, int]:
        return {**{f"<{i:02x}>": i for i in range(256)}, **{pair: 256 + i for i, pair in enumerate(PAIRS)}}

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

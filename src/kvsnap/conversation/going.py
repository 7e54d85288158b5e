"""A turn that goes on: what was counted, and the tokens of the answer so far."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvsnap.conversation.aligning import Why
from kvsnap.conversation.stopping import Shown
from kvsnap.conversation.turns import Message, Stop, Turn
from kvsnap.protocols import Engine, Token

__all__ = ["Going"]


@dataclass(slots=True)
class Going:
    """A turn that goes on: its prompt is evaluated, its answer is generated. `ids` are those of the prompt.

    `before` is the answer that is gone on with, if any. `choosing` is set while a token is chosen.
    """

    messages: tuple[Message, ...]
    before: Mapping[str, Any] | None
    ids: tuple[int, ...]
    reused: int
    recomputed: int
    new: int
    why: Why | None
    notes: tuple[str, ...]
    started: float
    evaluated: int
    forwards: int
    stops: tuple[str, ...] = ()
    max_tokens: int | None = None
    full: bool = False
    choosing: bool = False
    written: int = 0
    first_s: float = 0.0
    tokens: list[Token] = field(default_factory=list)
    turn: Turn | None = None

    @property
    def known(self) -> tuple[int, ...]:
        """All ids that are known of: what else an engine holds, nobody was given."""
        return (*self.ids, *(token.id for token in self.tokens))

    def stop(self, shown: Shown) -> Stop:
        """Return why it ended, as its tokens tell: an interrupt can come between any two steps."""
        if shown.met:
            return "stop"
        if self.tokens and self.tokens[-1].end:
            return "end"
        if len(self.tokens) == self.max_tokens:
            return "length"
        return "context" if self.full else "interrupted"

    def said(self, text: str) -> tuple[Message, ...]:
        """Return the messages with what was answered so far."""
        if self.before is not None:
            return (*self.messages, {**self.before, "content": str(self.before.get("content") or "") + text})
        return (*self.messages, {"role": "assistant", "content": text}) if self.tokens else self.messages

    def ended(self, shown: Shown, engine: Engine) -> Turn:
        """Return the turn as it is now."""
        messages = self.said(shown.text)
        return Turn(
            text=shown.text, tokens=tuple(t.id for t in self.tokens), logprobs=tuple(t.logprob for t in self.tokens),
            message=messages[-1] if messages[-1]["role"] == "assistant" else None, prompt_tokens=len(self.ids),
            reused=self.reused, recomputed=self.recomputed, new=self.new,
            evaluated=engine.evaluated - self.evaluated, forwards=engine.forwards - self.forwards,
            written=self.written, first_token_s=self.first_s, total_s=time.perf_counter() - self.started,
            stop=self.stop(shown), why=self.why, notes=self.notes,
        )  # fmt: skip

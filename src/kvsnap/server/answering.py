"""Answers in the shapes of the interface: a completion, its pieces as events, and the counts."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvsnap.conversation import Turn
from kvsnap.errors import KvsnapError
from kvsnap.server.refusals import refused
from kvsnap.server.rooms import Counts, Placed

__all__ = ["LAST", "Answer", "event"]

LAST = b"data: [DONE]\n\n"
_FINISH = {"end": "stop", "stop": "stop", "length": "length", "context": "length", "interrupted": "length"}


def event(data: Mapping[str, Any]) -> bytes:
    """Return an event of a stream. JSON in ASCII has no line break of any kind."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, whole or in pieces. `model` is the name that clients know, `usage` whether a stream tells counts."""

    model: str
    usage: bool
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, turn: Turn, placed: Placed) -> dict[str, Any]:
        """Return a completion."""
        choice = {
            "index": 0, "message": {"role": "assistant", "content": turn.text, "refusal": None}, "logprobs": None,
            "finish_reason": _FINISH[turn.stop],
        }  # fmt: skip
        return {
            **self._head("chat.completion"), "choices": [choice], "usage": _usage(turn, placed),
            "kvsnap": _told(turn, placed),
        }  # fmt: skip

    def first(self) -> bytes:
        """Return the event that starts an answer."""
        return self._piece({"role": "assistant", "content": ""})

    def piece(self, text: str) -> bytes:
        """Return an event with more text."""
        return self._piece({"content": text})

    def last(self, turn: Turn, placed: Placed) -> list[bytes]:
        """Return the events that end an answer."""
        told = {"kvsnap": _told(turn, placed)}
        events = [self._piece({}, _FINISH[turn.stop], told)]
        if self.usage:
            events.append(event({**self._head("chat.completion.chunk"), "choices": [],
                                 "usage": _usage(turn, placed), **told}))  # fmt: skip
        return [*events, LAST]

    def failed(self, error: KvsnapError) -> bytes:
        """Return the event that ends an answer with an error."""
        return event(refused(error).body)

    def _piece(
        self, delta: Mapping[str, Any], finish: str | None = None, more: Mapping[str, Any] | None = None
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        nothing = {"usage": None} if self.usage else {}
        return event({**self._head("chat.completion.chunk"), "choices": [choice], **nothing, **(more or {})})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def _usage(turn: Turn, placed: Placed) -> dict[str, Any]:
    counts = Counts.of(turn, placed)
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": len(turn.tokens),
        "total_tokens": turn.prompt_tokens + len(turn.tokens),
        "prompt_tokens_details": {"cached_tokens": counts.reused},
    }


def _told(turn: Turn, placed: Placed) -> dict[str, Any]:
    counts = Counts.of(turn, placed)
    return {
        "session": placed.name, "how": placed.how, "reused": counts.reused, "recomputed": counts.recomputed,
        "new": counts.new, "written": turn.written, "stop": turn.stop, "complete": turn.complete,
        "why": None if counts.why is None else counts.why.to_dict(), "first_token_s": turn.first_token_s,
        "total_s": turn.total_s,
    }  # fmt: skip

"""What a server is told when it starts: the model it names, its defaults, and its limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvsnap.errors import InputError
from kvsnap.layout import Sampler

__all__ = ["Limits", "Settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one client may ask for. Times are seconds; raise `InputError` for a limit below what can work.

    `body_bytes` of a request and `messages` in it; `prompt_tokens` of the conversation (None: what the context holds),
    `max_tokens` of an answer, which is also what a request gets that names no number. `request_s` bounds a request from
    its first byte to its last, `waiting` the requests of one tenant that wait for the engine. `open_sessions` of a
    tenant stay open at most, and none longer than `idle_s` without a request.
    """

    body_bytes: int = 4 << 20
    messages: int = 1000
    prompt_tokens: int | None = None
    max_tokens: int = 4096
    request_s: float = 600.0
    waiting: int = 32
    open_sessions: int = 8
    idle_s: float = 300.0

    def __post_init__(self) -> None:
        rules: tuple[tuple[str, float | None, float], ...] = (
            ("body_bytes", self.body_bytes, 1), ("messages", self.messages, 1),
            ("prompt_tokens", self.prompt_tokens, 1), ("max_tokens", self.max_tokens, 1),
            ("request_s", self.request_s, 0.001), ("waiting", self.waiting, 0),
            ("open_sessions", self.open_sessions, 1), ("idle_s", self.idle_s, 0),
        )  # fmt: skip
        for name, value, least in rules:
            if value is not None and not value >= least:
                raise InputError(f"limit {name} is too small", expected=f"{least} or more", found=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a server answers.

    `model` is the name that clients see. `sampler` holds where a request says nothing else. `fresh` starts a session of
    another model anew in place of refusing it; `every` publishes an answer after so many tokens each time. A saved
    beginning of fewer than `min_reuse` tokens is not worth a fork. `grace_s` seconds are given to the answer that is
    being generated when the server is told to stop. `metadata` goes into new sessions.
    """

    model: str
    sampler: Sampler = field(default_factory=Sampler)
    fresh: bool = False
    every: int | None = None
    min_reuse: int = 32
    codec: str | None = None
    grace_s: float = 10.0
    metadata: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.min_reuse < 1 or not self.grace_s >= 0:
            raise InputError(
                "not a setting of a server", expected="min_reuse 1 or more, grace 0 or more seconds",
                found=(self.min_reuse, self.grace_s),
            )  # fmt: skip

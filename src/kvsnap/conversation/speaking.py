"""One turn: the prompt evaluated behind what agrees, the answer generated, and all of it stored."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

from kvsnap.conversation.aligning import Aligned, Why, align, cause_of, limited
from kvsnap.conversation.holding import Holding
from kvsnap.conversation.rendering import following, rendered
from kvsnap.conversation.stopping import Shown
from kvsnap.conversation.turns import Message, Stop, Stream, Turn
from kvsnap.errors import ContextError, InputError
from kvsnap.layout import UNFINISHED
from kvsnap.protocols import Token

__all__ = ["Drift", "Speaking"]

Drift = Literal["recompute", "keep"]


@dataclass(slots=True)
class _Going:
    """A turn that goes on: its prompt is evaluated, its answer is generated."""

    messages: tuple[Message, ...]
    answer: str
    prompt_tokens: int
    reused: int
    recomputed: int
    new: int
    why: Why | None
    notes: tuple[str, ...]
    started: float
    evaluated: int
    forwards: int
    stop: Stop = "interrupted"
    written: int = 0
    first_s: float = 0.0
    tokens: list[Token] = field(default_factory=list)
    turn: Turn | None = None

    def said(self, text: str) -> tuple[Message, ...]:
        """Return the messages with what was answered so far."""
        if not self.tokens and not self.answer:
            return self.messages
        return (*self.messages, {"role": "assistant", "content": self.answer + text})


class Speaking:
    """How a conversation takes turns."""

    def __init__(self, holding: Holding, template: Mapping[str, Any], drift: Drift, every: int | None) -> None:
        self.last: Turn | None = None
        self._holding = holding
        self._template = template
        self._drift = drift
        self._every = every

    # -- the prompt ----------------------------------------------------------------------------------------------------

    def begin(self, messages: tuple[Message, ...], max_tokens: int | None, stops: tuple[str, ...]) -> Stream:
        """Evaluate the prompt of these messages and return the tokens of the answer."""
        started = time.perf_counter()
        self._check(max_tokens)
        saved = self._holding.engine.tokens
        aligned = self._aligned(messages, saved)
        self._check_room(len(aligned.ids))
        why = cause_of(
            saved, aligned, self._holding.messages, messages, self._holding.engine.detokenize,
            other_template=self._holding.other_template,
        )  # fmt: skip
        going = self._evaluated(aligned, messages, why, started)
        return self._stream(going, max_tokens, stops)

    def begin_on(self, max_tokens: int | None, stops: tuple[str, ...]) -> Stream:
        """Return the tokens of an answer that goes on."""
        started = time.perf_counter()
        self._check(max_tokens)
        engine, messages = self._holding.engine, self._holding.messages or ()
        self._check_room(len(engine.tokens))
        answer = ""
        if messages[-1]["role"] == "assistant":
            messages, answer = messages[:-1], str(messages[-1].get("content") or "")
        aligned = Aligned(engine.tokens, len(engine.tokens), 0)
        going = self._evaluated(aligned, messages, None, started)
        going.answer = answer
        return self._stream(going, max_tokens, stops)

    @staticmethod
    def _check(max_tokens: int | None) -> None:
        if max_tokens is not None and max_tokens < 1:
            raise InputError("max_tokens is too small", expected="1 or more", found=max_tokens)

    def _check_room(self, n_tokens: int) -> None:
        engine, reserve = self._holding.engine, self._holding.draft_reserve
        limit = engine.context_limit
        if limit is not None and n_tokens + 1 + reserve > limit:
            kept_free = f" and {reserve} kept free for a draft" if reserve else ""
            raise ContextError(
                f"the context is full: the conversation takes {n_tokens} positions with this turn, and the answer at "
                f"least one{kept_free}; the model holds {limit}. Go back (rewind), leave out messages, or start anew",
                expected=f"at most {limit - 1 - reserve}", found=n_tokens,
            )  # fmt: skip

    def _aligned(self, messages: tuple[Message, ...], saved: tuple[int, ...]) -> Aligned:
        holding = self._holding
        engine, preface = holding.engine, holding.preface
        kept = self._kept_history(messages, saved) if self._drift == "keep" else None
        if kept is not None:
            return kept
        ids = rendered(engine, messages, self._template, behind=preface > 0)
        found = align(saved[preface:], ids, engine.detokenize)
        return Aligned((*saved[:preface], *found.ids), preface + found.kept, found.seams)

    def end_of(self, messages: tuple[Message, ...]) -> int:
        """Return how many of the live ids say these messages, which begin the conversation."""
        engine, preface = self._holding.engine, self._holding.preface
        ids = rendered(engine, messages, self._template, behind=preface > 0, answer=False)
        return preface + align(engine.tokens[preface:], ids, engine.detokenize).kept

    def _kept_history(self, messages: tuple[Message, ...], saved: tuple[int, ...]) -> Aligned | None:
        """Return the whole history with what follows its last answer; None where messages of it changed."""
        before = self._holding.messages
        if not before or messages[: len(before)] != before or before[-1]["role"] != "assistant":
            return None
        if len(messages) == len(before):
            return None
        ids = following(self._holding.engine, messages, self._template, saved, len(before) - 1)
        return Aligned((*saved, *ids), len(saved), 0)

    def _evaluated(self, aligned: Aligned, messages: tuple[Message, ...], why: Why | None, started: float) -> _Going:
        holding, engine = self._holding, self._holding.engine
        if holding.session is not None:
            holding.session.check_open_to_turns()
        rows, evaluated, forwards = engine.n_rows, engine.evaluated, engine.forwards
        asked, total = aligned.kept, len(aligned.ids)
        holding.changing()
        kept, reach = holding.cut(asked, following=total > asked)
        why = limited(why, asked, reach, kept)
        rest = aligned.ids[kept:]
        if rest:
            engine.prefill(rest)
        else:
            engine.settle()
        done = engine.evaluated - evaluated
        reused = max(0, total - done)
        recomputed = max(0, min(rows, total) - reused)
        if recomputed and why is None:
            why = Why(
                reused, "", "", "logits", "the logits behind the last token are not kept, so it is evaluated again"
            )
        holding.messages, holding.complete = messages, False
        holding.keep()
        going = _Going(
            messages, "", total, reused, recomputed, done - recomputed, why if recomputed else None,
            _notes(aligned), started, evaluated, forwards,
        )  # fmt: skip
        if self._every is not None and rest:
            going.written += holding.store(messages, complete=False, stop=UNFINISHED)
        return going

    # -- the answer ----------------------------------------------------------------------------------------------------

    def _stream(self, going: _Going, max_tokens: int | None, stops: tuple[str, ...]) -> Stream:
        return Stream(self._tokens(going, max_tokens, Shown(stops)), lambda: going.turn)

    def _tokens(self, going: _Going, max_tokens: int | None, shown: Shown) -> Generator[Token, None, None]:
        holding, engine = self._holding, self._holding.engine
        limit, reserve = engine.context_limit, holding.draft_reserve
        try:
            for number in count(1):
                if limit is not None and len(engine.tokens) + 1 + reserve > limit:
                    going.stop = "context"
                    break
                token = engine.step()
                if not going.tokens:
                    going.first_s = time.perf_counter() - going.started
                going.tokens.append(token)
                text = shown.add(token.text)
                stop: Stop | None = "stop" if shown.met else "end" if token.end else None
                if stop is None and number == max_tokens:
                    stop = "length"
                if stop is not None:
                    text += shown.rest()
                    going.stop = stop
                elif self._every is not None and number % self._every == 0:
                    going.written += holding.store(going.said(shown.text), complete=False, stop=UNFINISHED)
                yield replace(token, text=text)
                if stop is not None:
                    break
        except ContextError:
            going.stop = "context"
        finally:
            self._finish(going, shown)

    def _finish(self, going: _Going, shown: Shown) -> None:
        holding, engine = self._holding, self._holding.engine
        messages = going.said(shown.text)
        complete = going.stop in ("end", "stop")
        total = going.prompt_tokens
        going.turn = self.last = Turn(
            text=shown.text, tokens=tuple(t.id for t in going.tokens), logprobs=tuple(t.logprob for t in going.tokens),
            message=messages[-1] if messages[-1]["role"] == "assistant" else None, prompt_tokens=total,
            reused=going.reused, recomputed=going.recomputed, new=going.new,
            evaluated=engine.evaluated - going.evaluated, forwards=engine.forwards - going.forwards,
            written=going.written, first_token_s=going.first_s, total_s=time.perf_counter() - going.started,
            stop=going.stop, why=going.why, notes=going.notes,
        )  # fmt: skip
        written = going.written + holding.store(messages, complete=complete, stop=going.stop)
        going.turn = self.last = replace(going.turn, written=written, total_s=time.perf_counter() - going.started)


def _notes(aligned: Aligned) -> tuple[str, ...]:
    if not aligned.seams:
        return ()
    said = "in other tokens than the template: what the model wrote is kept"
    return (f"{aligned.seams} saved tokens say the same text {said}",)

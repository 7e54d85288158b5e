"""One turn: the prompt evaluated behind what agrees, the answer generated, and all of it stored."""

from __future__ import annotations

import inspect
import time
import weakref
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any, Literal, cast

from kvsnap.conversation.aligning import Agreed, Aligned, Why, align, cause_of, limited
from kvsnap.conversation.going import Going
from kvsnap.conversation.holding import Holding
from kvsnap.conversation.rendering import following, rendered
from kvsnap.conversation.stopping import Shown
from kvsnap.conversation.turns import Message, Stream, Turn
from kvsnap.errors import ConflictError, ContextError, InputError, KvsnapError
from kvsnap.layout import UNFINISHED
from kvsnap.protocols import Token

__all__ = ["Drift", "Speaking"]

Drift = Literal["recompute", "keep"]


class Speaking:
    """How a conversation takes turns."""

    def __init__(self, holding: Holding, template: Mapping[str, Any], drift: Drift, every: int | None) -> None:
        self.last: Turn | None = None
        self._holding = holding
        self._template = template
        self._drift = drift
        self._every = every
        self._agreed = Agreed()
        self._going: Going | None = None
        self._tokens: weakref.ref[Generator[Token | None, None, None]] | None = None

    def end(self) -> None:
        """End the turn that goes on, if there is one: its stream was left, and not closed.

        Raise `ConflictError` where it is this turn that asks for it.
        """
        tokens = None if self._tokens is None else self._tokens()
        if tokens is not None and inspect.getgeneratorstate(tokens) == inspect.GEN_RUNNING:
            raise ConflictError("a turn of this conversation is going on, and what it called cannot change it")
        if tokens is not None:
            tokens.close()
        if self._going is not None:
            self._finish(self._going)

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
        return self._stream(self._evaluated(aligned, messages, why, started), max_tokens, stops)

    def begin_on(self, max_tokens: int | None, stops: tuple[str, ...]) -> Stream:
        """Return the tokens of an answer that goes on."""
        started = time.perf_counter()
        self._check(max_tokens)
        engine, messages = self._holding.engine, self._holding.messages or ()
        self._check_room(len(engine.tokens))
        before = messages[-1] if messages[-1]["role"] == "assistant" else None
        if before is not None and not isinstance(before.get("content") or "", str):
            raise InputError("the answer is not text, so that nothing can be added to it", found=repr(before)[:80])
        aligned = Aligned(engine.tokens, len(engine.tokens), 0)
        going = self._evaluated(aligned, messages if before is None else messages[:-1], None, started, before)
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
        found = align(saved[preface:], ids, engine.detokenize, self._agreed)
        self._agreed = Agreed(ids, found.ids, found.kept - found.seams if found.seams else None)
        return Aligned((*saved[:preface], *found.ids), preface + found.kept, found.seams)

    def go_back_to(self, messages: tuple[Message, ...]) -> None:
        """Go back to where these messages, which begin the conversation, were said: no turn ended there."""
        engine, preface = self._holding.engine, self._holding.preface
        ids = rendered(engine, messages, self._template, behind=preface > 0, answer=False)
        found = align(engine.tokens[preface:], ids, engine.detokenize)
        self._holding.go_back_inside((*engine.tokens[:preface], *found.ids), preface + found.kept, messages)

    def _kept_history(self, messages: tuple[Message, ...], saved: tuple[int, ...]) -> Aligned | None:
        """Return the whole history with what follows its last answer; None where messages of it changed."""
        before = self._holding.messages
        if not before or messages[: len(before)] != before or before[-1]["role"] != "assistant":
            return None
        if len(messages) == len(before):
            return None
        ids = following(self._holding.engine, messages, self._template, saved, len(before) - 1)
        return Aligned((*saved, *ids), len(saved), 0)

    def _evaluated(
        self, aligned: Aligned, messages: tuple[Message, ...], why: Why | None, started: float,
        before: Message | None = None,
    ) -> Going:  # fmt: skip
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
        if recomputed:
            holding.recomputed(reused)
        if recomputed and why is None:
            why = Why(
                reused, "", "", "logits", "the logits behind the last token are not kept, so it is evaluated again"
            )
        holding.messages, holding.complete = (messages if before is None else (*messages, before)), False
        holding.keep()
        going = Going(
            messages, before, engine.tokens, reused, recomputed, done - recomputed, why if recomputed else None,
            _notes(aligned), started, evaluated, forwards,
        )  # fmt: skip
        if self._every is not None and rest:
            going.written += holding.store(holding.messages, complete=False, stop=UNFINISHED)
        return going

    # -- the answer ----------------------------------------------------------------------------------------------------

    def _stream(self, going: Going, max_tokens: int | None, stops: tuple[str, ...]) -> Stream:
        going.max_tokens, going.stops = max_tokens, stops
        tokens = self._generated(going)
        self._going, self._tokens = going, weakref.ref(tokens)
        next(tokens)  # a generator that was never started would not run its end
        return Stream(cast("Generator[Token, None, None]", tokens), lambda: going.turn)

    def _generated(self, going: Going) -> Generator[Token | None, None, None]:
        """Yield None first, then the tokens of the answer."""
        holding, shown = self._holding, Shown(going.stops)
        try:
            yield None
            while True:
                token = self._chosen(going)
                if token is None:
                    break
                text = shown.add(token.text)
                ended = going.stop(shown) != "interrupted"
                if ended:
                    text += shown.rest()
                elif self._every is not None and len(going.tokens) % self._every == 0:
                    going.written += holding.store(going.said(shown.text), complete=False, stop=UNFINISHED)
                yield replace(token, text=text)
                if ended:
                    break
        finally:
            self._finish(going)

    def _chosen(self, going: Going) -> Token | None:
        """Return the next token; None where the context is full."""
        holding, engine = self._holding, self._holding.engine
        if not holding.is_held:
            raise ConflictError("the engine or the session was used for something else while the answer was generated")
        limit = engine.context_limit
        if limit is not None and len(engine.tokens) + 1 + holding.draft_reserve > limit:
            going.full = True
            return None
        going.choosing = True
        try:
            token = engine.step()
        except ContextError:
            going.full, going.choosing = True, False
            return None
        if not going.tokens:
            going.first_s = time.perf_counter() - going.started
        going.tokens.append(token)
        holding.mark()
        going.choosing = False
        return token

    def _finish(self, going: Going) -> None:
        """End a turn and store it; may be called again, as after an interrupt in it."""
        if self._going is not going:
            return
        holding, shown = self._holding, Shown(going.stops)
        for token in going.tokens:
            shown.add(token.text)
        going.turn = self.last = going.ended(shown, holding.engine)
        messages = going.said(shown.text)
        if not self._settled(going):
            holding.leave(going.known, messages)
            self._going = None
            return
        try:
            written = holding.store(messages, complete=going.turn.complete, stop=going.turn.stop)
        except KvsnapError:
            self._going = None  # it is there, and not stored: `Holding.unsaved`
            raise
        total_s = time.perf_counter() - going.started
        going.turn = self.last = replace(going.turn, written=going.written + written, total_s=total_s)
        self._going = None

    def _settled(self, going: Going) -> bool:
        """Tell whether the engine holds this turn, and nothing that was not handed out."""
        holding, engine = self._holding, self._holding.engine
        if not going.choosing:
            return holding.is_held
        # An interrupted step made a pass, and may have chosen a token, which is chosen again then.
        known, live = going.known, engine.tokens
        if live[: len(known)] != known or len(live) > len(known) + 1:
            return False
        if len(live) > len(known):
            engine.rewind(len(known))
            engine.sampler = holding.sampler
        holding.mark()
        going.choosing = False
        return True


def _notes(aligned: Aligned) -> tuple[str, ...]:
    if not aligned.seams:
        return ()
    said = "in other tokens than the template: what the model wrote is kept"
    return (f"{aligned.seams} saved tokens say the same text {said}",)

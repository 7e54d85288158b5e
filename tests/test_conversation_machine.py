"""A conversation that is closed, opened, disturbed and interrupted, against one in memory that never is."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvsnap.conversation import Conversation, Turn
from kvsnap.errors import ContextError, InputError, StorageError, UnsupportedError
from kvsnap.inspection import verify
from kvsnap.layout import Sampler
from kvsnap.sampling import start
from kvsnap.session import Session

pytest.importorskip("torch")

from chat_models import chat_engine

pytestmark = pytest.mark.engine

TEXTS = st.sampled_from(["hello", "and then", "the other one", "then there", "x"])
SAMPLERS = st.sampled_from([Sampler(), Sampler(temperature=0.9, top_k=40, seed=11), Sampler(temperature=1.5, seed=3)])
SIZES = st.integers(1, 6)


def next_logits(engine: Any) -> bytes:
    engine.settle()
    return np.asarray(engine.capture(start=engine.n_rows).logits.values()).tobytes()


def rows(snapshot: Any) -> list[bytes]:
    return [np.ascontiguousarray(t.values()).tobytes() for layer in snapshot.layers for t in layer.tensors]


class Machine(RuleBasedStateMachine):
    """`kept` has a session and is disturbed; `whole` is in memory, and is given the same things to do.

    What only a session can do (go back where a layer cannot be cut in memory, bring random numbers back) sets `alike`
    to False: from there on the two are not compared with each other, only `kept` with what it tells of itself.
    """

    kind = "llama"

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "s.kvsnap"
        self.session = Session.open(self.path)
        self.engine, self.other = chat_engine(self.kind), chat_engine(self.kind)
        self.kept, self.whole = Conversation(self.engine, self.session), Conversation(self.other)
        self.alike, self.forks = True, 0

    def teardown(self) -> None:
        self.session.close()
        self.directory.cleanup()

    # -- both ----------------------------------------------------------------------------------------------------------

    def both(self, act: Callable[[Conversation], Turn]) -> None:
        """Let both take a turn, and compare."""
        before = self.engine.evaluated
        self.kept._hold()  # what a take-up evaluates is no part of the turn
        again, before = self.engine.evaluated - before, self.engine.evaluated
        turn = self.refused(lambda: act(self.kept))
        if turn is not None:
            self.check(turn, self.engine.evaluated - before)
        if again:
            self.alike = False
        if self.alike:
            other = self.refused(lambda: act(self.whole))
            assert (turn is None) == (other is None)
            if turn is not None and other is not None and turn.reused == other.reused:
                assert (turn.tokens, turn.logprobs, turn.stop) == (other.tokens, other.logprobs, other.stop)
                assert (turn.recomputed, turn.new) == (other.recomputed, other.new)
                assert (turn.why and turn.why.cause) == (other.why and other.why.cause)
            elif turn is not None and other is not None:
                self.alike = False  # a session reaches back to other places than memory does

    def refused(self, act: Callable[[], Turn]) -> Turn | None:
        """Return a turn; None where the context is full, or it is said that nothing can be gone on with."""
        tokens, messages = self.engine.tokens, self.kept.messages
        try:
            return act()
        except (ContextError, InputError):
            assert (self.engine.tokens, self.kept.messages) == (tokens, messages)
            return None

    def check(self, turn: Turn, evaluated: int) -> None:
        assert turn.reused + turn.recomputed + turn.new == turn.prompt_tokens
        assert min(turn.reused, turn.recomputed, turn.new) >= 0
        assert turn.evaluated == evaluated == turn.recomputed + turn.new + max(0, len(turn.tokens) - 1)
        assert (turn.why is not None) == bool(turn.recomputed)

    @rule(text=TEXTS, size=SIZES)
    def say(self, text: str, size: int) -> None:
        self.both(lambda c: c.say(text, max_tokens=size))

    @rule(size=SIZES)
    def go_on(self, size: int) -> None:
        self.both(lambda c: c.go_on(max_tokens=size))

    @precondition(lambda self: self.kept.messages)
    @rule(draw=st.data(), text=TEXTS, size=SIZES)
    def edit(self, draw: Any, text: str, size: int) -> None:
        messages = [dict(m) for m in self.kept.messages or ()]
        place = draw.draw(st.integers(0, len(messages) - 1))
        messages[place]["content"] = text
        if draw.draw(st.booleans()):
            messages = messages[: place + 1]
        if messages[-1]["role"] == "assistant":
            messages.append({"role": "user", "content": text})
        self.both(lambda c: c.say(messages, max_tokens=size))

    @rule(text=TEXTS, size=SIZES, taken=st.integers(0, 6))
    def left_early(self, text: str, size: int, taken: int) -> None:
        def stream(c: Conversation) -> Turn:
            with c.stream(text, max_tokens=size) as made:
                list(itertools.islice(made, taken))
            return made.turn

        self.both(stream)

    @precondition(lambda self: self.kept.messages)
    @rule(turns=st.integers(1, 2))
    def rewind(self, turns: int) -> None:
        try:
            left = self.kept.rewind(turns)
        except InputError:
            return
        assert left == self.kept.n_tokens
        try:
            other = self.whole.rewind(turns) if self.alike else left
        except UnsupportedError:
            self.alike = False
        else:
            assert other == left
            self.alike = self.alike and self.kept.sampler == self.whole.sampler == Sampler()

    @rule()
    def reset(self) -> None:
        self.kept.reset()
        self.whole.reset()
        self.kept.sampler = self.whole.sampler = Sampler()
        self.alike = True

    @rule(sampler=SAMPLERS)
    def sampler(self, sampler: Sampler) -> None:
        self.kept.sampler = self.whole.sampler = sampler

    # -- disturbances --------------------------------------------------------------------------------------------------

    @rule()
    def reopen(self) -> None:
        if self.kept.unsaved:
            self.kept.save()
        complete, sampler = self.kept.complete, self.kept._holding.sampler
        self.session.close()
        self.session, self.engine = Session.open(self.path), chat_engine(self.kind)
        self.kept = Conversation(self.engine, self.session)
        assert self.kept.complete == complete
        if self.kept._holding.sampler != sampler:  # the settings were changed, and no turn was stored since
            self.kept._holding.sampler = self.engine.sampler = sampler

    @rule()
    def fork(self) -> None:
        """Go on with the fork."""
        self.forks += 1
        path = self.path.with_name(f"{self.forks}.kvsnap")
        self.kept.fork(path)
        self.path, before = path, self.session
        complete, sampler = self.kept.complete, self.kept._holding.sampler
        self.session = Session.open(path)
        before.close()
        self.kept = Conversation(self.engine, self.session)
        assert self.kept.complete == complete
        self.kept._holding.sampler = self.engine.sampler = sampler

    @rule(ids=st.lists(st.integers(4, 250), min_size=1, max_size=5))
    def used_by_others(self, ids: list[int]) -> None:
        if not self.kept.unsaved:
            self.engine.reset()
            self.engine.prefill(ids)
            self.engine.sampler = start(Sampler(temperature=0.3, seed=99))

    @rule(text=TEXTS, size=SIZES)
    def full_disk(self, text: str, size: int) -> None:
        self.failing(lambda: self.kept.say(text, max_tokens=size), self.session, "append", StorageError("full"))
        if self.alike and self.kept.last is not None and self.kept.unsaved:
            self.whole.say(text, max_tokens=size)

    @rule()
    def interrupted_prompt(self) -> None:
        """In the middle of a change that gives up all that was said."""
        self.kept._hold()
        messages, last, unsaved = self.kept.messages, self.kept.last, self.kept.unsaved
        said = [{"role": "user", "content": "?"}]
        self.failing(lambda: self.kept.say(said), self.engine, "prefill", KeyboardInterrupt())
        self.kept._hold()
        assert (self.kept.messages, self.kept.last) == (messages, last)
        self.alike = self.alike and not unsaved

    @rule(text=TEXTS, size=SIZES, at=st.integers(0, 3))
    def interrupted_step(self, text: str, size: int, at: int) -> None:
        """Behind the choice of a token; then both go on with the answer."""
        step, count = self.engine.step, itertools.count()

        def late() -> Any:
            token = step()
            if next(count) == at:
                raise KeyboardInterrupt
            return token

        self.engine.step = late
        turns = []
        try:
            self.kept.say(text, max_tokens=size)
        except KeyboardInterrupt:
            assert self.kept.last is not None
            turns.append(self.kept.last)
            assert len(turns[0].tokens) == at
        except (ContextError, InputError):
            return
        finally:
            self.engine.step = step
        if turns and at < size:
            self.kept.go_on(max_tokens=size - at)
        if self.alike:
            self.refused(lambda: self.whole.say(text, max_tokens=size))

    def failing(self, act: Callable[[], object], owner: Any, name: str, error: BaseException) -> None:
        def fail(*_: Any, **__: Any) -> Any:
            raise error

        setattr(owner, name, fail)
        try:
            act()
        except (type(error), ContextError, InputError):
            pass
        finally:
            delattr(owner, name)

    # -- what always holds ---------------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        kept = self.kept
        if kept._holding.is_held and not kept.unsaved:
            assert self.session.tokens == self.engine.tokens
            assert (self.session.messages or ()) == (kept.messages or ())
        if kept._holding.is_held and kept.messages:
            # What starts and ends a message is no text of it: a model that writes one cannot be rendered so.
            marks = {1: None, 2: None, 3: None}
            said = self.engine.render(kept.messages, answer=kept.messages[-1]["role"] == "user")
            texts = [self.engine.detokenize(ids).translate(marks) for ids in (said, self.engine.tokens)]
            assert texts[0] == texts[1]
        if self.alike:
            assert (kept.messages or ()) == (self.whole.messages or ())
            if kept._holding.is_held:
                assert self.engine.tokens == self.other.tokens
                assert kept.complete == self.whole.complete

    @rule()
    def looked_at(self) -> None:
        assert verify(self.path).ok
        if self.kind == "llama" and self.kept._holding.is_held and self.engine.tokens and not self.kept.unsaved:
            assert rows(self.session.load()) == rows(self.engine.capture())
        if self.alike and self.kept._holding.is_held and self.engine.tokens and not self.kept.unsaved:
            with Session.open(self.path, readonly=True) as session:
                fresh = chat_engine(self.kind)
                Conversation(fresh, session)
                whole = chat_engine(self.kind)
                whole.install(self.other.capture())
                assert next_logits(fresh) == next_logits(whole)


def machine(kind: str) -> type[Machine]:
    """Return the test case of one kind of layers."""
    made = type(f"Machine_{kind}", (Machine,), {"kind": kind})
    made.TestCase.settings = settings(
        max_examples=12,
        stateful_step_count=14,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate),
        report_multiple_bugs=False,
    )
    return made


TestLlama = machine("llama").TestCase
TestStates = machine("lfm2").TestCase
TestWindows = machine("gemma3").TestCase

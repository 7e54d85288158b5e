"""Conversations that are left, interrupted and disturbed: what is told is what is there, and nothing is lost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsnap
from kvsnap.conversation import Conversation
from kvsnap.errors import ConflictError, DamagedError, InputError, StorageError
from kvsnap.layout import Sampler
from kvsnap.session import Session

pytest.importorskip("torch")

from chat_models import PLAIN, chat_engine

pytestmark = pytest.mark.engine

WARM = Sampler(temperature=0.9, top_k=40, seed=11)
HELLO = {"role": "user", "content": "hello"}


@pytest.fixture
def engine() -> Any:
    return chat_engine()


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session.open(tmp_path / "chat.kvsnap") as made:
        yield made


def contents(conversation: Conversation) -> list[str]:
    return [str(m["content"]) for m in conversation.messages or ()]


def agree(conversation: Conversation) -> None:
    """What is told, what is live and what is stored are one history, and its text is that of its messages."""
    session, engine = conversation.session, conversation.engine
    assert session is not None
    assert conversation.unsaved == 0
    assert session.tokens == engine.tokens
    assert session.messages == conversation.messages
    said = engine.render(conversation.messages, answer=conversation.messages[-1]["role"] == "user")
    assert engine.detokenize(said).removesuffix("\x03").startswith(engine.detokenize(engine.tokens).rstrip("\x03"))


# -- streams that are left ---------------------------------------------------------------------------------------------


def test_a_stream_of_which_no_token_was_taken_is_a_turn_all_the_same(engine: Any, session: Session) -> None:
    conversation = Conversation(engine, session)
    with conversation.stream("hello", max_tokens=5) as stream:
        pass
    assert (stream.turn.stop, stream.turn.tokens) == ("interrupted", ())
    assert conversation.last is stream.turn
    agree(conversation)
    assert not session.complete
    assert conversation.go_on(max_tokens=5).tokens == Conversation(chat_engine()).say("hello", max_tokens=5).tokens


def test_a_stream_that_nobody_holds_any_more_is_stored(engine: Any, session: Session) -> None:
    conversation = Conversation(engine, session)
    for token in conversation.stream("hello", max_tokens=5):
        if token.id >= 0:
            break
    agree(conversation)
    conversation.stream_on(max_tokens=5)
    agree(conversation)
    assert not conversation.complete


@pytest.mark.parametrize(
    "then",
    [
        lambda c: c.go_on(max_tokens=3),
        lambda c: c.say([HELLO, {"role": "assistant", "content": "x"}, HELLO], max_tokens=3),
        lambda c: c.rewind(),
        lambda c: c.reset(),
        lambda c: c.save(),
    ],
)
def test_what_comes_next_ends_a_turn_that_still_goes_on(
    engine: Any, session: Session, then: Callable[[Conversation], object]
) -> None:
    conversation = Conversation(engine, session, sampler=WARM)
    other = Conversation(chat_engine(), sampler=WARM)
    stream = conversation.stream("hello", max_tokens=9)
    taken = list(itertools.islice(stream, 4))
    other.say("hello", max_tokens=4)
    then(conversation)
    then(other)
    assert stream.turn.stop == "interrupted"
    assert stream.turn.tokens == tuple(t.id for t in taken)
    assert list(stream) == []
    stream.close()
    assert conversation.messages == other.messages
    assert engine.tokens == other.engine.tokens
    assert session.tokens == engine.tokens
    assert (session.messages or ()) == conversation.messages


def test_a_turn_cannot_be_changed_by_what_it_calls(engine: Any, session: Session) -> None:
    conversation, step = Conversation(engine, session), engine.step

    def disturbed() -> Any:  # as by a signal handler
        for change in (lambda: conversation.say("more"), conversation.reset, conversation.rewind, conversation.save):
            with pytest.raises(ConflictError, match="going on"):
                change()
        return step()

    engine.step = disturbed
    assert len(conversation.say("hello", max_tokens=3).tokens) == 3
    agree(conversation)


def test_a_turn_that_begins_another_one_with_its_token_ends_there(engine: Any, session: Session) -> None:
    conversation = Conversation(engine, session)
    turn = conversation.say("hello", max_tokens=3, on_token=lambda _: conversation.save())
    assert (turn.stop, len(turn.tokens)) == ("interrupted", 1)
    agree(conversation)


def test_an_engine_taken_away_in_the_middle_of_an_answer_is_told(tmp_path: Path, engine: Any) -> None:
    with Session.open(tmp_path / "a") as a, Session.open(tmp_path / "b") as b:
        one, two = Conversation(engine, a, sampler=WARM), Conversation(engine, b)
        one.say("hello", max_tokens=4)
        stream = one.stream("more", max_tokens=9)
        taken = tuple(t.id for t in itertools.islice(stream, 3))
        two.say("other", max_tokens=3)
        with pytest.raises(ConflictError, match="used for something else"):
            next(stream)
        assert (stream.turn.tokens, stream.turn.stop) == (taken, "interrupted")
        agree(two)
        # What was answered so far is not lost, though it was not stored: it is evaluated again.
        later = one.go_on(max_tokens=6)
        assert any("were evaluated again" in note for note in one.notes)
        agree(one)
        whole = Conversation(chat_engine(), sampler=WARM)
        whole.say("hello", max_tokens=4)
        assert taken + later.tokens == whole.say("more", max_tokens=9).tokens


# -- sessions that are changed by others -------------------------------------------------------------------------------


def test_a_session_that_was_gone_back_in_is_what_counts(engine: Any, session: Session) -> None:
    conversation = Conversation(engine, session, sampler=WARM)
    conversation.say("one", max_tokens=4)
    commit = session.n_commits
    second = conversation.say("two", max_tokens=4)
    session.rewind(commit)
    assert conversation.say("two", max_tokens=4).tokens == second.tokens  # the random numbers of that moment
    assert contents(conversation)[::2] == ["one", "two"]
    agree(conversation)
    session.reset()
    conversation.say("new", max_tokens=4)
    assert contents(conversation)[::2] == ["new"]
    agree(conversation)


def test_a_session_changed_while_an_answer_is_generated_is_told(engine: Any, session: Session) -> None:
    conversation = Conversation(engine, session)
    conversation.say("one", max_tokens=4)
    with conversation.stream("two", max_tokens=4) as stream:
        next(stream)
        session.truncate(3)
        with pytest.raises(ConflictError, match="session"):
            next(stream)
    conversation.reset()
    conversation.say("new", max_tokens=4)
    agree(conversation)


def test_a_damaged_session_of_another_model_is_not_started_anew(tmp_path: Path, engine: Any) -> None:
    path = tmp_path / "s.kvsnap"
    with Session.open(path) as session:
        conversation = Conversation(engine, session)
        conversation.say("one", max_tokens=3)
        conversation.say("two", max_tokens=3)
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 1  # in the last commit
    path.write_bytes(raw)
    other = chat_engine(seed=1)
    with Session.open(path) as session, pytest.raises(DamagedError, match="published but cannot be read"):
        Conversation(other, session, on_mismatch="fresh")
    assert (other.tokens, path.read_bytes()) == ((), bytes(raw))


# -- answers that were cut off -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [True, False])
def test_gone_back_to_an_answer_that_is_whole_it_is_so_still(tmp_path: Path, stored: bool) -> None:
    engine = chat_engine(eos_token_id=list(range(128)))
    with Session.open(tmp_path / "s.kvsnap") as session:
        conversation = Conversation(engine, session if stored else None)
        assert conversation.say("hello").stop == "end"
        with conversation.stream("more") as stream:
            pass
        assert not stream.turn.complete
        conversation.rewind()
        assert conversation.complete
        assert not stored or Conversation(chat_engine(eos_token_id=list(range(128))), session).complete


@pytest.mark.parametrize("stored", [True, False])
def test_gone_back_to_an_answer_that_was_cut_off_it_is_so_still(engine: Any, session: Session, stored: bool) -> None:
    conversation = Conversation(engine, session if stored else None)
    first = conversation.say("one", max_tokens=4)
    conversation.say("two", max_tokens=4)
    conversation.rewind()
    assert not conversation.complete
    if stored:
        conversation = Conversation(chat_engine(), session)
        assert not conversation.complete
    more = conversation.go_on(max_tokens=4)
    assert first.tokens + more.tokens == Conversation(chat_engine()).say("one", max_tokens=8).tokens


def test_an_answer_keeps_what_its_message_had(engine: Any, session: Session) -> None:
    said = {"role": "assistant", "content": "abc", "name": "bot"}
    engine.prefill((*engine.render([HELLO]), *engine.tokenize("abc", special=False)))
    session.append(replace(kvsnap.capture(engine), messages=(HELLO, said)), complete=False)
    conversation = Conversation(engine, session)
    turn = conversation.go_on(max_tokens=3)
    assert turn.message == {**said, "content": "abc" + turn.text}
    listed = {"role": "assistant", "content": [{"type": "text", "text": "abc"}]}
    session.append(replace(kvsnap.capture(engine), messages=(HELLO, listed)), complete=False)
    with pytest.raises(InputError, match="not text"):
        conversation.go_on(max_tokens=3)


# -- interrupts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "lfm2", "gemma3"])
@pytest.mark.parametrize("at", [0, 3])
def test_a_token_that_was_chosen_and_never_handed_out_is_chosen_again(session: Session, kind: str, at: int) -> None:
    engine = chat_engine(kind)
    step, count = engine.step, itertools.count()

    def late() -> Any:
        token = step()
        if next(count) == at:
            raise KeyboardInterrupt
        return token

    engine.step = late
    conversation = Conversation(engine, session, sampler=WARM)
    with pytest.raises(KeyboardInterrupt):
        conversation.say("hello", max_tokens=9)
    assert conversation.last is not None
    assert len(conversation.last.tokens) == at
    agree(conversation)
    whole = Conversation(chat_engine(kind), sampler=WARM).say("hello", max_tokens=9)
    again = Conversation(chat_engine(kind), session).go_on(max_tokens=9 - at)
    assert conversation.last.tokens + again.tokens == whole.tokens
    assert conversation.last.logprobs + again.logprobs == whole.logprobs


def test_in_memory_a_change_that_was_interrupted_is_undone(engine: Any) -> None:
    conversation = Conversation(engine)
    first = conversation.say("hello", max_tokens=5)
    messages, tokens, prefill = conversation.messages, engine.tokens, engine.prefill

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    engine.prefill = interrupted
    with pytest.raises(KeyboardInterrupt):
        conversation.say([{"role": "user", "content": "help"}])
    engine.prefill = prefill
    assert conversation.messages == messages
    turn = conversation.go_on(max_tokens=3)
    assert engine.tokens[: len(tokens)] == tokens
    assert first.tokens + turn.tokens == Conversation(chat_engine()).say("hello", max_tokens=8).tokens


def test_what_could_not_be_stored_outlives_an_interrupt(
    engine: Any, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = Conversation(engine, session)
    conversation.say("one", max_tokens=5)

    def full(*_: Any, **__: Any) -> Any:
        raise StorageError("no space left", errno=28)

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(session, "append", full)
        with pytest.raises(StorageError):
            conversation.say("two", max_tokens=5)
        patch.setattr(engine, "prefill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            conversation.say("three", max_tokens=5)
    assert conversation.save() > 0
    assert contents(conversation)[::2] == ["one", "two"]
    agree(conversation)


# -- going back inside of a turn ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "lfm2", "qwen3_next", "gemma3"])
@pytest.mark.parametrize("drift", ["recompute", "keep"])
def test_gone_back_inside_of_a_turn_all_that_was_said_before_is_there(session: Session, kind: str, drift: Any) -> None:
    conversation = Conversation(chat_engine(kind), session, drift=drift)
    said = [HELLO, {"role": "assistant", "content": "a"}, HELLO, {"role": "assistant", "content": "b"}, HELLO]
    conversation.say(said, max_tokens=4)
    conversation.rewind()
    assert list(conversation.messages or ()) == said[:4]
    agree(conversation)
    conversation.say("more", max_tokens=4)
    text = conversation.engine.detokenize(conversation.engine.tokens)
    wanted = conversation.engine.detokenize(conversation.engine.render([*said[:4], {**HELLO, "content": "more"}]))
    assert text.startswith(wanted)


# -- messages and templates --------------------------------------------------------------------------------------------


def nested(levels: int) -> Any:
    made: Any = 1
    for _ in range(levels):
        made = [made]
    return made


@pytest.mark.parametrize(
    "message",
    [{**HELLO, "deep": nested(100)}, {**HELLO, "n": 10**400}, {**HELLO, 3: 4}, {**HELLO, "s": {1}}],
)
def test_what_a_session_would_not_take_is_refused_before_anything_happens(
    engine: Any, session: Session, message: Any
) -> None:
    conversation = Conversation(engine, session)
    with pytest.raises(InputError, match="message 0"):
        conversation.say([message])
    assert (engine.forwards, engine.tokens, conversation.messages) == (0, (), ())


def test_nothing_of_a_message_is_shared_with_the_caller(engine: Any, session: Session) -> None:
    conversation = Conversation(engine, session)
    mine: dict[str, Any] = {**HELLO, "parts": [1, (2, 3)]}
    conversation.say([mine], max_tokens=3)
    mine["parts"].append(4)
    assert (conversation.messages or ())[0] == {**HELLO, "parts": [1, [2, 3]]}
    agree(conversation)


@pytest.mark.parametrize(
    "template",
    [
        "{{ '' }}",
        "{{ 1 // 0 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ '%d' % 'x' }}",
        "{{ messages[7].content }}",
    ],
)
def test_a_template_that_fails_or_gives_nothing_takes_nothing_away(
    session: Session, engine: Any, template: str
) -> None:
    conversation = Conversation(engine, session)
    conversation.say("one", max_tokens=4)
    tokens, history = engine.tokens, session.history
    engine.tokenizer.chat_template = template
    with pytest.raises(InputError, match="template"):
        conversation.say("two")
    engine.tokenizer.chat_template = PLAIN
    assert (engine.tokens, session.history) == (tokens, history)
    assert conversation.say("two", max_tokens=4).recomputed == 0


def test_ids_that_the_model_does_not_have_take_nothing_away(engine: Any, session: Session) -> None:
    conversation = Conversation(engine, session)
    conversation.say("one", max_tokens=4)
    tokens, render = engine.tokens, engine.render
    engine.render = lambda *a, **k: (*render(*a, **k), 9999)
    with pytest.raises(InputError, match="9999"):
        conversation.say("two")
    assert engine.tokens == tokens


def test_a_message_can_speak_of_the_mark_that_is_looked_for() -> None:
    conversation = Conversation(chat_engine(), drift="keep")
    conversation.say("one", max_tokens=4)
    conversation.say("what is kvsnap-mark-of-an-answer now", max_tokens=4)
    text = conversation.engine.detokenize(conversation.engine.tokens)
    assert "\x02user:what is kvsnap-mark-of-an-answer now\x03" in text


# -- exactness ---------------------------------------------------------------------------------------------------------


def rows(snapshot: Any) -> list[bytes]:
    return [np.ascontiguousarray(t.values()).tobytes() for layer in snapshot.layers for t in layer.tensors]


def test_a_row_that_was_evaluated_again_is_stored_again(engine: Any, session: Session) -> None:
    conversation = Conversation(engine, session)
    conversation.say("a longer text to read", max_tokens=4)
    before = rows(engine.capture().truncate(len(conversation.messages or ())))
    turn = conversation.say((conversation.messages or ())[:1], max_tokens=4)
    assert (turn.recomputed, turn.why and turn.why.cause) == (1, "edited")
    assert rows(session.load()) == rows(engine.capture())
    assert rows(session.load()) != before
    later = conversation.say("on", max_tokens=4)
    with Session.open(session.path, readonly=True) as read:
        assert rows(read.load()) == rows(engine.capture())
    assert later.recomputed == 0


# -- labels and settings -----------------------------------------------------------------------------------------------


def test_the_metadata_of_a_user_cannot_move_where_the_messages_begin(engine: Any, session: Session) -> None:
    Conversation(engine, session, metadata={"preface": "7", "stop": "x"}).say("one", max_tokens=4)
    assert Conversation(chat_engine(), session).preface == 0


def test_a_difference_that_was_accepted_is_told_in_every_turn_that_follows(tmp_path: Path) -> None:
    with Session.open(tmp_path / "a") as a, Session.open(tmp_path / "b") as b:
        Conversation(chat_engine(), a).say("one", max_tokens=4)
        other = chat_engine(seed=1)
        kvsnap.restore(a.load(), other, accept=["weights"])
        conversation = Conversation(other, b)
        assert conversation.preface == 0 or conversation.preface == len(a.tokens)
        for text in ("two", "three"):
            conversation.say(text, max_tokens=4)
            loaded = b.load()
            assert ("accepted" in loaded.metadata) == (conversation.preface > 0)


def test_the_sampler_of_a_conversation_is_its_own(tmp_path: Path, engine: Any) -> None:
    with Session.open(tmp_path / "a") as a, Session.open(tmp_path / "b") as b:
        one = Conversation(engine, a, sampler=WARM)
        two = Conversation(engine, b, sampler=Sampler(seed=3))
        two.say("hello", max_tokens=3)
        assert one.sampler == WARM
        one.sampler = Sampler(temperature=0.5, seed=7)
        assert engine.sampler.settings == two.sampler == Sampler(seed=3)
        one.say("hello", max_tokens=3)
        assert engine.sampler.settings == one.sampler == Sampler(temperature=0.5, seed=7)

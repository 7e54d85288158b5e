"""Conversations on tiny models: what stays warm, what is evaluated again and why, and what is stored."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsnap
from kvsnap.conversation import Conversation, Turn
from kvsnap.errors import (
    BusyError,
    CompatibilityError,
    ContextError,
    DamagedError,
    InputError,
    StorageError,
    UnsupportedError,
)
from kvsnap.layout import Sampler
from kvsnap.library import Library
from kvsnap.session import Session

pytest.importorskip("torch")

from chat_models import END, PLAIN, THINKING, chat_engine
from tiny_models import tiny_llama

pytestmark = pytest.mark.engine

WARM = Sampler(temperature=0.9, top_k=40, seed=11)


@pytest.fixture
def engine() -> Any:
    return chat_engine()


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session.open(tmp_path / "chat.kvsnap") as made:
        yield made


def roles(conversation: Conversation) -> str:
    return "".join(m["role"][0] for m in conversation.messages or ())


def counted(turn: Turn) -> tuple[int, int, int]:
    assert turn.reused + turn.recomputed + turn.new == turn.prompt_tokens
    # One position for each token of the answer but the last, which nobody has evaluated yet.
    assert turn.evaluated == turn.recomputed + turn.new + max(0, len(turn.tokens) - 1)
    return turn.reused, turn.recomputed, turn.new


def next_logits(engine: Any) -> bytes:
    engine.settle()
    return np.asarray(engine.capture(start=engine.n_rows).logits.values()).tobytes()


# -- what stays warm ---------------------------------------------------------------------------------------------------


def test_a_turn_evaluates_what_is_new_only(engine: Any) -> None:
    conversation = Conversation(engine)
    first = conversation.say("hello", max_tokens=6)
    assert counted(first) == (0, 0, len(engine.render([{"role": "user", "content": "hello"}])))
    rows = engine.n_rows
    second = conversation.say("and then", max_tokens=6)
    reused, recomputed, new = counted(second)
    assert (reused, recomputed) == (rows, 0)
    # The last token of the answer, the end of the message, and the next one.
    assert new == 1 + len(engine.tokenize("\x03\x02user:and then\x03\x02assistant:", special=False))
    assert second.why is None
    assert roles(conversation) == "uaua"
    assert conversation.messages is not None
    assert [m["content"] for m in conversation.messages] == ["hello", first.text, "and then", second.text]


@pytest.mark.parametrize("settings", [Sampler(), WARM])
def test_a_conversation_taken_up_again_goes_on_bit_for_bit(tmp_path: Path, settings: Sampler) -> None:
    whole = Conversation(chat_engine(), sampler=settings)
    said = ["hello there", "the other one", "and on"]
    turns = [whole.say(text, max_tokens=9) for text in said]
    path = tmp_path / "chat.kvsnap"
    for number, text in enumerate(said):
        engine = chat_engine()
        with Session.open(path) as session:
            conversation = Conversation(engine, session, sampler=settings if not number else None)
            turn = conversation.say(text, max_tokens=9)
            assert turn.tokens == turns[number].tokens
            assert turn.logprobs == turns[number].logprobs
            if number:
                assert conversation.restored is not None
                assert conversation.restored.exact
                assert counted(turn)[1] == 0
                assert turn.reused == conversation.restored.reused
    assert next_logits(engine) == next_logits(whole.engine)
    assert conversation.messages == whole.messages


def test_without_the_random_numbers_it_goes_on_otherwise(tmp_path: Path) -> None:
    """The negative control: the same as above with the random state left out."""
    whole = Conversation(chat_engine(), sampler=WARM)
    whole.say("hello there", max_tokens=9)
    with Session.open(tmp_path / "chat.kvsnap") as session:
        Conversation(chat_engine(), session, sampler=WARM).say("hello there", max_tokens=9)
        again = Conversation(chat_engine(), session)
        again.sampler = WARM
        turn = again.say("the other one", max_tokens=9)
    assert turn.tokens != whole.say("the other one", max_tokens=9).tokens


def test_settings_change_and_the_random_numbers_go_on(engine: Any) -> None:
    conversation = Conversation(engine, sampler=WARM)
    conversation.say("hello", max_tokens=5)
    drawn = engine.sampler.random.draws
    assert drawn > 0
    conversation.change_sampler(temperature=0.5, top_k=0)
    assert (engine.sampler.random.draws, conversation.sampler) == (drawn, Sampler(temperature=0.5, seed=11))
    conversation.change_sampler(seed=3)
    assert (engine.sampler.random.draws, engine.sampler.random.seed) == (0, 3)
    with pytest.raises(InputError):
        conversation.change_sampler(temperature=-1.0)
    assert conversation.sampler == Sampler(temperature=0.5, seed=3)


def test_an_answer_in_other_tokens_than_the_tokenizer_would_write_stays(engine: Any, session: Session) -> None:
    said = {"role": "user", "content": "hello"}
    wrote = tuple(i for letter in "then there" for i in engine.tokenize(letter, special=False))
    assert wrote != engine.tokenize("then there", special=False)
    engine.warm((*engine.render([said]), *wrote))
    session.append(replace(kvsnap.capture(engine), messages=(said, {"role": "assistant", "content": "then there"})))
    turn = Conversation(engine, session).say("and", max_tokens=4)
    assert counted(turn)[1] == 0
    assert any("saved tokens say the same text in other tokens" in note for note in turn.notes)
    assert wrote == engine.tokens[len(engine.render([said])) :][: len(wrote)]


def test_what_the_engine_holds_is_a_text_that_comes_first(engine: Any) -> None:
    engine.prefill(engine.tokenize("A long report."))
    conversation = Conversation(engine)
    rows = engine.n_rows
    turn = conversation.say("sum up", max_tokens=4)
    assert (turn.reused, turn.recomputed) == (rows, 0)
    assert conversation.preface == rows
    text = engine.detokenize(engine.tokens)
    assert text.startswith("\x01A long report.\x02user:sum up\x03\x02assistant:")
    assert text.count("\x01") == 1


def test_a_text_in_a_session_comes_first_also_later(engine: Any, tmp_path: Path) -> None:
    with Session.open(tmp_path / "s.kvsnap") as session:
        engine.prefill(engine.tokenize("A long report."))
        session.append(kvsnap.capture(engine))
        rows = engine.n_rows
        Conversation(engine, session).say("sum up", max_tokens=4)
        later = Conversation(chat_engine(), session)
        assert later.preface == rows
        shared = len(engine.tokenize("\x02user:", special=False))
        assert later.say("more", max_tokens=4).recomputed == 0
        assert later.say([{"role": "user", "content": "another"}], max_tokens=4).reused == rows + shared


# -- what is evaluated again, and why ----------------------------------------------------------------------------------


def test_an_edited_history_is_kept_up_to_the_edit(engine: Any, session: Session) -> None:
    conversation = Conversation(engine, session)
    conversation.say("hello", max_tokens=5)
    conversation.say("and then", max_tokens=5)
    messages = [dict(m) for m in conversation.messages or ()]
    messages[2]["content"] = "and than"
    before = engine.n_rows
    turn = conversation.say(messages[:3], max_tokens=5)
    reused, recomputed, _ = counted(turn)
    assert turn.why is not None
    assert turn.why.cause == "edited"
    assert "message 2 (user)" in turn.why.detail
    assert turn.why.token == reused
    assert "and the" in turn.why.saved
    assert "and tha" in turn.why.given
    assert recomputed == min(before, turn.prompt_tokens) - reused
    fresh = chat_engine()
    fresh.prefill(engine.tokens[:reused])
    fresh.prefill(engine.tokens[reused : turn.prompt_tokens])
    assert np.allclose(fresh.capture().head(2, 1).k, engine.capture().head(2, 1).k[: fresh.n_rows], atol=1e-4)
    reopened = session.load()
    assert reopened.tokens == engine.tokens
    assert reopened.messages == conversation.messages


def test_a_shorter_list_goes_back(engine: Any) -> None:
    conversation = Conversation(engine)
    conversation.say("hello", max_tokens=5)
    conversation.say("and then", max_tokens=5)
    turn = conversation.say((conversation.messages or ())[:1], max_tokens=5)
    assert turn.why is not None
    assert turn.why.cause == "edited"
    assert "4 messages were saved, 1 are given" in turn.why.detail
    assert counted(turn)[1:] == (1, 0)  # the last one, for its logits


def test_the_same_question_again_gives_the_same_answer(engine: Any) -> None:
    conversation = Conversation(engine)
    first = conversation.say("hello", max_tokens=8)
    again = conversation.say((conversation.messages or ())[:1], max_tokens=8)
    assert again.tokens == first.tokens


def test_another_template_is_told(tmp_path: Path) -> None:
    with Session.open(tmp_path / "s.kvsnap") as session:
        Conversation(chat_engine(), session).say("hello", max_tokens=5)
        other = chat_engine(template=PLAIN.replace("+ ':' +", "+ '=' +"))
        turn = Conversation(other, session).say("more", max_tokens=5)
    assert turn.why is not None
    assert turn.why.cause == "template"
    assert "another one than that of the saved" in turn.why.detail
    assert (turn.why.saved[-8:-4], turn.why.given[-8:-4]) != ("", "")
    assert turn.reused == 1 + len(other.tokenize("\x02user", special=False))


def test_a_date_in_the_template_is_told() -> None:
    dated = "{{ '\x02system:' + date + '\x03' }}" + PLAIN
    engine = chat_engine(template=dated)
    conversation = Conversation(engine, template={"date": "monday"})
    conversation.say("hello", max_tokens=5)
    later = Conversation(chat_engine(template=dated), template={"date": "tuesday"})
    later.engine.install(kvsnap.capture(engine))
    assert conversation.say("more", max_tokens=5).recomputed == 0
    conversation._speaking._template["date"] = "tuesday"
    turn = conversation.say("more", max_tokens=5)
    assert turn.why is not None
    assert turn.why.cause == "template"
    assert "monday" in turn.why.saved
    assert "tuesday" in turn.why.given


def test_thoughts_that_the_template_leaves_out_are_told_and_can_be_kept(tmp_path: Path) -> None:
    def thought(drift: Any, path: str) -> Turn:
        engine = chat_engine(template=THINKING)
        with Session.open(tmp_path / path) as session:
            Conversation(engine, session).say("hello", max_tokens=4)
            # An answer that a model wrote: what it thought, and what it said.
            wrote = engine.tokenize("<think>well, let me see</think>Good day.", special=False)
            ids = (*engine.render([{"role": "user", "content": "hello"}]), *wrote, END)
            messages = [{"role": "user", "content": "hello"}]
            messages.append({"role": "assistant", "content": engine.detokenize(wrote)})
            engine.warm(ids)
            session.reset()
            session.append(replace(kvsnap.capture(engine), messages=tuple(messages)))
            conversation = Conversation(chat_engine(template=THINKING), session, drift=drift)
            assert conversation.preface == 0
            return conversation.say("and", max_tokens=4)

    turn = thought("recompute", "a")
    assert turn.why is not None
    assert turn.why.cause == "thinking"
    assert turn.recomputed > 0
    kept = thought("keep", "b")
    assert (kept.why, kept.recomputed) == (None, 0)
    assert kept.reused > turn.reused


def test_keeping_the_history_gives_the_same_as_following_a_template_that_changes_nothing(engine: Any) -> None:
    a, b = Conversation(engine), Conversation(chat_engine(), drift="keep")
    for text in ("hello", "more of it", "and on"):
        assert a.say(text, max_tokens=7).tokens == b.say(text, max_tokens=7).tokens
    assert a.engine.tokens == b.engine.tokens
    assert next_logits(a.engine) == next_logits(b.engine)


# -- every kind of layer -----------------------------------------------------------------------------------------------

KINDS = (
    "llama", "mistral", "gemma3", "gpt_oss", "deepseek_v3", "deepseek_v32", "deepseek_v4", "qwen3_next", "falcon_h1",
    "lfm2", "mamba2",
)  # fmt: skip


@pytest.mark.newest
@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_is_right_whatever_the_layers(kind: str, tmp_path: Path) -> None:
    """What is reported is what was counted; what comes out is what the nearest place that can be reached gives."""
    try:
        engine = chat_engine(kind)
    except (ValueError, KeyError, UnsupportedError):
        pytest.skip(f"this release of transformers does not have {kind}")
    with Session.open(tmp_path / "s.kvsnap") as session:
        conversation = Conversation(engine, session)
        for text in ("the first thing to say", "another thing to say", "a third one"):
            conversation.say(text, max_tokens=6)
        messages = [dict(m) for m in conversation.messages or ()]
        messages[2]["content"] = "another thing to ask"
        evaluated = engine.evaluated
        turn = conversation.say(messages[:3], max_tokens=6)
        assert engine.evaluated - evaluated == turn.evaluated
        reused, recomputed, _ = counted(turn)
        assert recomputed > 0
        assert turn.why is not None
        assert turn.why.cause == "edited"
        assert reused <= turn.why.token
        if reused < turn.why.token:
            assert "cannot be cut there" in turn.why.detail
        # The same passes: the turns that reach as far, cut there, and the rest in one.
        reference = chat_engine(kind)
        same = Conversation(reference)
        for text in ("the first thing to say", "another thing to say"):
            if reused > reference.n_rows:
                same.say(text, max_tokens=6)
        reference.rewind(reused)
        reference.prefill(engine.tokens[reused : turn.prompt_tokens])
        answer = [reference.step() for _ in range(6)]
        assert [t.id for t in answer] == list(turn.tokens)
        assert tuple(t.logprob for t in answer) == turn.logprobs
        session.fork(tmp_path / "t.kvsnap")
        uninterrupted = conversation.say("on", max_tokens=6)
    again = chat_engine(kind)
    with Session.open(tmp_path / "t.kvsnap") as session:
        taken_up = Conversation(again, session)
        assert taken_up.messages == (conversation.messages or ())[:4]
        later = taken_up.say("on", max_tokens=6)
    assert (later.tokens, later.logprobs) == (uninterrupted.tokens, uninterrupted.logprobs)
    assert (later.recomputed, later.reused) == (0, uninterrupted.reused)
    assert next_logits(again) == next_logits(engine)


# -- answers that are cut off ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [Sampler(), WARM])
@pytest.mark.parametrize("cut", [1, 5, 11])
def test_an_answer_that_was_cut_off_is_gone_on_with_bit_for_bit(tmp_path: Path, settings: Sampler, cut: int) -> None:
    whole = Conversation(chat_engine(), sampler=settings)
    wanted = whole.say("hello", max_tokens=12)
    with Session.open(tmp_path / "s.kvsnap") as session:
        first = Conversation(chat_engine(), session, sampler=settings).say("hello", max_tokens=cut)
        assert first.stop == "length"
        assert not first.complete
        assert not session.complete
    with Session.open(tmp_path / "s.kvsnap") as session:
        again = Conversation(chat_engine(), session)
        assert not again.complete
        turn = again.go_on(max_tokens=12 - cut)
        assert first.tokens + turn.tokens == wanted.tokens
        assert first.logprobs + turn.logprobs == wanted.logprobs
        assert counted(turn)[:2] == (turn.prompt_tokens - 1, 0)
        assert again.messages == whole.messages
        assert turn.message == {"role": "assistant", "content": first.text + turn.text}
        assert next_logits(again.engine) == next_logits(whole.engine)


def test_an_answer_that_is_complete_is_not_gone_on_with() -> None:
    engine = chat_engine(eos_token_id=list(range(128)))
    conversation = Conversation(engine)
    turn = conversation.say("hello", max_tokens=200)
    assert turn.stop == "end"
    assert conversation.complete
    with pytest.raises(InputError, match="no answer to go on with"):
        conversation.go_on()
    with pytest.raises(InputError, match="no answer to go on with"):
        Conversation(chat_engine()).go_on()


def test_a_turn_left_early_is_stored_as_cut_off(engine: Any, session: Session) -> None:
    conversation = Conversation(engine, session)
    with conversation.stream("hello", max_tokens=50) as stream:
        with pytest.raises(InputError, match="has not ended"):
            _ = stream.turn
        taken = list(itertools.islice(stream, 4))
    assert stream.turn is conversation.last
    assert stream.turn.stop == "interrupted"
    assert stream.turn.tokens == tuple(t.id for t in taken)
    assert session.tokens == engine.tokens
    assert (session.complete, conversation.complete) == (False, False)
    assert session.load().metadata["stop"] == "interrupted"
    assert conversation.go_on(max_tokens=3).stop == "length"
    assert roles(conversation) == "ua"


@pytest.mark.parametrize("at", [0, 1, 4])
def test_ctrl_c_while_it_answers_keeps_what_is_there(session: Session, at: int) -> None:
    engine = chat_engine()
    step, count = engine.step, itertools.count()

    def interrupted() -> Any:
        if next(count) == at:
            raise KeyboardInterrupt
        return step()

    engine.step = interrupted
    conversation = Conversation(engine, session)
    with pytest.raises(KeyboardInterrupt):
        conversation.say("hello", max_tokens=20)
    turn = conversation.last
    assert turn is not None
    assert (turn.stop, len(turn.tokens)) == ("interrupted", at)
    assert turn.message == (None if not at else {"role": "assistant", "content": turn.text})
    again = Conversation(chat_engine(), session)
    assert not again.complete
    whole = Conversation(chat_engine()).say("hello", max_tokens=20)
    assert turn.tokens + again.go_on(max_tokens=20 - at).tokens == whole.tokens
    if not at:
        assert roles(again) == "ua"


def test_ctrl_c_while_the_prompt_is_read_changes_nothing(session: Session) -> None:
    engine = chat_engine()
    conversation = Conversation(engine, session)
    conversation.say("hello", max_tokens=5)
    history, messages = session.history, conversation.messages
    prefill = engine.prefill

    def interrupted(ids: Any) -> None:
        raise KeyboardInterrupt

    engine.prefill = interrupted
    with pytest.raises(KeyboardInterrupt):
        conversation.say("more", max_tokens=5)
    engine.prefill = prefill
    assert session.history == history
    turn = conversation.say("more", max_tokens=5)
    whole = Conversation(chat_engine())
    whole.say("hello", max_tokens=5)
    assert turn.tokens == whole.say("more", max_tokens=5).tokens
    assert (conversation.messages or ())[:2] == messages


def test_a_message_without_an_answer_is_gone_on_with_or_dropped(session: Session) -> None:
    engine = chat_engine()
    step = engine.step

    def interrupted() -> Any:
        raise KeyboardInterrupt

    conversation = Conversation(engine, session)
    conversation.say("hello", max_tokens=5)
    tokens = session.tokens
    engine.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        conversation.say("more", max_tokens=5)
    engine.step = step
    assert roles(conversation) == "uau"
    with pytest.raises(InputError, match="no answer yet"):
        conversation.say("again")
    assert conversation.rewind() == len(tokens)
    assert session.tokens == tokens
    assert roles(conversation) == "ua"
    assert not conversation.complete  # that answer was cut off too


def test_a_stop_text_ends_an_answer_which_is_whole_then(engine: Any) -> None:
    conversation = Conversation(engine)
    whole = conversation.say("hello", max_tokens=30)
    conversation.reset()
    place = len(whole.text) // 2
    told = whole.text[place : place + 2]
    turn = conversation.say("hello", max_tokens=30, stop=told)
    assert (turn.stop, turn.complete) == ("stop", True)
    assert turn.text == whole.text[: whole.text.index(told)]
    assert conversation.messages is not None
    assert conversation.messages[-1]["content"] == turn.text
    for wrong in ("", ["a", ""], [3]):
        if wrong == "":
            continue
        with pytest.raises(InputError, match="stop text"):
            conversation.say("x", stop=wrong)  # type: ignore[arg-type]


# -- going back --------------------------------------------------------------------------------------------------------


def test_going_back_by_turns(engine: Any, session: Session) -> None:
    conversation = Conversation(engine, session, sampler=WARM)
    lengths, answers = [], []
    for text in ("one", "two", "three"):
        lengths.append(conversation.n_tokens)
        answers.append(conversation.say(text, max_tokens=6).tokens)
    assert conversation.rewind(2) == lengths[1]
    assert roles(conversation) == "ua"
    assert session.n_tokens == lengths[1]
    assert conversation.say("two", max_tokens=6).tokens == answers[1]  # the random numbers of that moment came back
    assert conversation.rewind(0) == conversation.n_tokens
    for wrong in (3, -1):
        with pytest.raises(InputError, match="not so many turns"):
            conversation.rewind(wrong)
    assert conversation.rewind(2) == 0
    assert conversation.messages == ()
    assert session.n_tokens == 0


def test_going_back_behind_an_edit_keeps_the_turns_before_it(engine: Any, session: Session) -> None:
    conversation = Conversation(engine, session)
    conversation.say("one", max_tokens=5)
    conversation.say("two", max_tokens=5)
    messages = list(conversation.messages or ())
    conversation.say(
        [{"role": "user", "content": "uno"}, *messages[1:], {"role": "user", "content": "x"}], max_tokens=5
    )
    assert roles(conversation) == "uauaua"
    left = conversation.rewind(1)
    assert left > 0
    assert roles(conversation) == "uaua"
    assert session.messages == conversation.messages
    turn = conversation.say("x", max_tokens=5)
    assert turn.recomputed <= 1 + turn.prompt_tokens // 2
    assert roles(conversation) == "uauaua"


def test_a_reset_can_be_undone(engine: Any, session: Session) -> None:
    conversation = Conversation(engine, session)
    conversation.say("one", max_tokens=5)
    tokens, commit = session.tokens, session.n_commits
    conversation.reset()
    assert (conversation.messages, conversation.n_tokens, engine.tokens) == ((), 0, ())
    assert conversation.say("other", max_tokens=3).reused == 0
    session.rewind(commit)
    assert session.tokens == tokens
    assert Conversation(engine, session).messages == (session.load().messages or ())


def test_a_fork_parts_from_the_conversation(engine: Any, tmp_path: Path) -> None:
    with Library(tmp_path / "library") as library, library.open("a") as session:
        conversation = Conversation(engine, session)
        conversation.say("one", max_tokens=5)
        conversation.fork("b")
        conversation.say("two", max_tokens=5)
        with library.open("b") as other:
            forked = Conversation(chat_engine(), other)
            assert roles(forked) == "ua"
            assert forked.say("three", max_tokens=5).recomputed == 0
            assert [m["content"] for m in forked.messages or ()][::2] == ["one", "three"]
        assert [m["content"] for m in conversation.messages or ()][::2] == ["one", "two"]
        assert conversation.say("four", max_tokens=5).recomputed == 0


# -- one engine, several conversations ---------------------------------------------------------------------------------


def test_conversations_take_turns_on_one_engine(engine: Any, tmp_path: Path) -> None:
    alone = [Conversation(chat_engine(), sampler=WARM) for _ in range(2)]
    with Session.open(tmp_path / "a") as a, Session.open(tmp_path / "b") as b:
        both = [Conversation(engine, a, sampler=WARM), Conversation(engine, b, sampler=WARM)]
        for round_ in range(3):
            for number, conversation in enumerate(both):
                text = f"{number} says {round_}"
                turn = conversation.say(text, max_tokens=5)
                assert turn.tokens == alone[number].say(text, max_tokens=5).tokens
                assert turn.recomputed == 0


def test_without_a_session_it_cannot_take_up_again(engine: Any) -> None:
    conversation = Conversation(engine)
    conversation.say("one", max_tokens=3)
    engine.reset()
    engine.prefill((5, 6, 7))
    with pytest.raises(InputError, match="used for something else"):
        conversation.say("two")


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_a_session_of_another_model_is_refused_or_left(tmp_path: Path) -> None:
    with Session.open(tmp_path / "s.kvsnap") as session:
        Conversation(chat_engine(), session).say("hello", max_tokens=5)
        history, commit = session.history, session.n_commits
        other = chat_engine(seed=1)
        with pytest.raises(CompatibilityError, match="weights"):
            Conversation(other, session)
        assert session.history == history
        assert other.tokens == ()
        conversation = Conversation(other, session, on_mismatch="fresh")
        assert any("started anew" in note and f"commit {commit}" in note for note in conversation.notes)
        assert conversation.say("hi", max_tokens=5).reused == 0
        session.rewind(commit)
        assert Conversation(chat_engine(), session).say("more", max_tokens=5).recomputed == 0


def test_no_difference_can_be_accepted_that_a_session_could_not_store(tmp_path: Path) -> None:
    with Session.open(tmp_path / "s.kvsnap") as session:
        Conversation(chat_engine(), session).say("hello", max_tokens=5)
        history, other = session.history, chat_engine(seed=1)
        with pytest.raises(CompatibilityError, match="one model only"):
            Conversation(other, session, accept=["weights"])
        assert session.history == history
        assert not other.tokens
        fresh = Conversation(other, session, accept=["weights"], on_mismatch="fresh")
        assert fresh.say("hello", max_tokens=5).reused == 0


def test_a_full_context_names_both_numbers_and_loses_nothing(tmp_path: Path) -> None:
    engine = chat_engine(max_position_embeddings=64)
    with Session.open(tmp_path / "s.kvsnap") as session:
        conversation = Conversation(engine, session)
        conversation.say("hello", max_tokens=10)
        tokens, history = engine.tokens, session.history
        with pytest.raises(ContextError, match="the model holds 64") as caught:
            conversation.say("x" * 60)
        assert "rewind" in str(caught.value)
        assert caught.value.found == len(
            engine.render([*(conversation.messages or ()), {"role": "user", "content": "x" * 60}])
        )
        assert (engine.tokens, session.history) == (tokens, history)
        turn = conversation.say("on")
        assert turn.stop == "context"
        assert len(engine.tokens) == 64
        assert not conversation.complete
        with pytest.raises(ContextError, match="64"):
            conversation.go_on()
        with pytest.raises(ContextError):
            conversation.say("on")
        conversation.rewind()
        assert conversation.say("on", max_tokens=3).stop == "length"


def test_the_reserve_of_a_draft_stays_free() -> None:
    engine = chat_engine(max_position_embeddings=64)
    conversation = Conversation(engine, draft_reserve=8)
    turn = conversation.say("hello")
    assert (turn.stop, len(engine.tokens)) == ("context", 56)
    with pytest.raises(ContextError, match="8 kept free for a draft"):
        conversation.go_on()


@pytest.mark.parametrize(
    ("template", "said", "told"),
    [
        (None, "hello", "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "hello", "roles must alternate"),
        ("{{ messages[0]['colour'] }}", "hello", "colour"),
        ("{% if %}", "hello", "template"),
    ],
)
def test_a_template_that_is_missing_or_refuses_is_told(template: str | None, said: str, told: str) -> None:
    engine = chat_engine(template=template)
    conversation = Conversation(engine)
    with pytest.raises(InputError, match=told):
        conversation.say(said)
    assert engine.tokens == ()
    assert conversation.messages == ()


def test_an_engine_without_a_tokenizer_is_told() -> None:
    engine = kvsnap.connect(tiny_llama())
    with pytest.raises(InputError, match="no tokenizer"):
        Conversation(engine).say("hello")


@pytest.mark.parametrize("options", [{"on_mismatch": "ignore"}, {"drift": "x"}, {"every": 0}])
def test_options_that_are_none_are_refused(engine: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Conversation(engine, **options)


def test_two_conversations_on_one_session_are_refused(engine: Any, tmp_path: Path) -> None:
    with Session.open(tmp_path / "s.kvsnap"), pytest.raises(BusyError):
        Session.open(tmp_path / "s.kvsnap")
    with Session.open(tmp_path / "s.kvsnap", readonly=True) as session:
        conversation = Conversation(engine, session)
        with pytest.raises(InputError, match="reading only"):
            conversation.say("hello")
        assert engine.tokens == ()


def test_a_session_cut_inside_of_a_turn_takes_messages_but_no_further_text(engine: Any, session: Session) -> None:
    conversation = Conversation(engine, session)
    conversation.say("hello", max_tokens=8)
    messages = conversation.messages or ()
    session.truncate(session.n_tokens - 3)
    again = Conversation(chat_engine(), session)
    assert again.messages is None
    with pytest.raises(InputError, match="cut inside of a turn"):
        again.say("more")
    turn = again.say([*messages, {"role": "user", "content": "more"}], max_tokens=4)
    assert turn.recomputed == 0
    assert turn.reused == session.n_tokens - 3 - turn.new - 4 + 3 or turn.reused > 0
    assert roles(again) == "uaua"
    assert session.load().messages == again.messages


def test_an_empty_message_is_refused(engine: Any) -> None:
    with pytest.raises(InputError, match="empty"):
        Conversation(engine).say("")
    with pytest.raises(InputError, match="max_tokens"):
        Conversation(engine).say("x", max_tokens=0)


# -- storing -----------------------------------------------------------------------------------------------------------


def test_a_turn_that_could_not_be_stored_is_stored_later(
    engine: Any, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = Conversation(engine, session)
    conversation.say("one", max_tokens=5)
    append, history = session.append, session.history

    def full(*_: Any, **__: Any) -> Any:
        raise StorageError("no space left", errno=28)

    monkeypatch.setattr(session, "append", full)
    with pytest.raises(StorageError):
        conversation.say("two", max_tokens=5)
    turn = conversation.last
    assert turn is not None
    assert (len(turn.tokens), turn.written) == (5, 0)
    assert session.history == history
    assert conversation.unsaved == len(engine.tokens) - session.n_tokens > 0
    with pytest.raises(StorageError):
        conversation.save()
    monkeypatch.setattr(session, "append", append)
    assert conversation.save() > 0
    assert (conversation.unsaved, conversation.save()) == (0, 0)
    assert session.tokens == engine.tokens
    assert session.load().messages == conversation.messages


def test_what_is_new_is_written_and_nothing_else(engine: Any, session: Session) -> None:
    conversation = Conversation(engine, session)
    written = [conversation.say("a further turn " * 3, max_tokens=4).written for _ in range(6)]
    assert max(written[2:]) < min(written[2:]) * 1.3
    assert sum(written) <= session.nbytes


def test_a_long_answer_is_published_as_it_goes(engine: Any, session: Session) -> None:
    conversation = Conversation(engine, session, every=4)
    with conversation.stream("hello", max_tokens=11) as stream:
        assert session.n_tokens == len(engine.tokens)  # the prompt
        assert session.messages == ({"role": "user", "content": "hello"},)
        assert session.load().metadata["stop"] == "unfinished"
        seen = [(len(engine.tokens) - session.n_tokens, session.complete) for _ in stream]
    assert session.load().metadata["stop"] == "length"
    assert [behind for behind, _ in seen] == [1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]
    assert not any(complete for _, complete in seen)
    assert session.tokens == engine.tokens
    assert session.messages == conversation.messages
    assert conversation.last is not None
    whole = Conversation(chat_engine()).say("hello", max_tokens=11)
    assert conversation.last.tokens == whole.tokens
    assert conversation.rewind() == 0


def test_metadata_and_codec_go_into_the_session(engine: Any, session: Session) -> None:
    Conversation(engine, session, metadata={"model": "tiny"}).say("one", max_tokens=3)
    Conversation(engine, session).say("two", max_tokens=3)
    assert session.load().metadata == {"model": "tiny", "stop": "length"}


def test_a_damaged_session_is_told_and_not_taken_for_a_new_one(engine: Any, tmp_path: Path) -> None:
    path = tmp_path / "s.kvsnap"
    with Session.open(path) as session:
        Conversation(engine, session).say("hello", max_tokens=5)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    fresh = chat_engine()
    with Session.open(path) as session, pytest.raises(DamagedError):
        Conversation(fresh, session, on_mismatch="fresh")
    assert fresh.tokens == ()
    assert path.read_bytes() == raw


def test_what_stands_behind_the_last_turn_is_told(engine: Any, tmp_path: Path) -> None:
    path = tmp_path / "s.kvsnap"
    with Session.open(path) as session:
        Conversation(engine, session).say("hello", max_tokens=5)
        tokens = session.tokens
        assert Conversation(engine, session).notes == ()
    with path.open("ab") as file:
        file.write(b"half a turn")
    with Session.open(path) as session:
        conversation = Conversation(engine, session)
        assert session.tokens == tokens
        assert conversation.notes[0].startswith("11 bytes behind the last turn are not part of the history")
        conversation.say("more", max_tokens=3)
        assert len(conversation.notes) == 1  # of this conversation it stays true
    with Session.open(path) as session:
        assert Conversation(engine, session).notes == ()

"""How far a rendered conversation agrees with what is saved, the likely cause where not, and stop texts. No model."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsnap.conversation.aligning import Agreed, align, cause_of
from kvsnap.conversation.rendering import checked, starts_of
from kvsnap.conversation.stopping import Shown
from kvsnap.errors import InputError

# Ids are texts of one to three letters: the same text in many ways.
WORDS = ["".join(w) for n in (1, 2, 3) for w in itertools.product("ab", repeat=n)] + ["é", "<s>", "</s>"]


def text_of(ids: list[int] | tuple[int, ...]) -> str:
    return "".join(WORDS[i] for i in ids)


def ids_of(*words: str) -> tuple[int, ...]:
    return tuple(WORDS.index(w) for w in words)


# -- how far they agree ------------------------------------------------------------------------------------------------


def test_all_of_a_history_stays_where_more_follows() -> None:
    found = align((1, 2, 3), (1, 2, 3, 4, 5), text_of)
    assert (found.ids, found.kept, found.seams) == ((1, 2, 3, 4, 5), 3, 0)


def test_of_a_shorter_list_the_beginning_stays() -> None:
    assert align((1, 2, 3), (1, 2), text_of).kept == 2
    assert align((1, 2, 3), (), text_of).ids == ()


def test_the_same_text_in_other_tokens_stays_as_it_was_written() -> None:
    saved, rendered = ids_of("a", "b", "</s>"), ids_of("ab", "</s>", "a")
    found = align(saved, rendered, text_of)
    assert (found.ids, found.kept, found.seams) == (ids_of("a", "b", "</s>", "a"), 3, 3)


def test_tokens_stay_up_to_the_last_place_where_a_token_ends_in_both() -> None:
    saved, rendered = ids_of("a", "ab", "b", "bbb"), ids_of("aa", "bb", "a")
    found = align(saved, rendered, text_of)
    assert text_of(found.ids) == text_of(rendered)
    assert found.ids == ids_of("a", "ab", "b", "a")
    assert found.kept == 3


def test_a_token_that_crosses_the_end_of_what_agrees_does_not_stay() -> None:
    found = align(ids_of("a", "aab"), ids_of("aa", "b"), text_of)
    assert (found.kept, found.ids) == (0, ids_of("aa", "b"))


def test_other_text_parts_them_at_the_first_token_that_differs() -> None:
    found = align(ids_of("a", "b", "a"), ids_of("a", "a", "a"), text_of)
    assert (found.kept, found.seams) == (1, 0)


@given(st.lists(st.integers(0, len(WORDS) - 1), max_size=40), st.lists(st.integers(0, len(WORDS) - 1), max_size=40))
def test_what_is_gone_on_with_says_what_was_given_and_keeps_what_it_says(saved: list[int], rendered: list[int]) -> None:
    found = align(saved, rendered, text_of)
    assert text_of(found.ids) == text_of(rendered)
    assert found.ids[: found.kept] == tuple(saved[: found.kept])
    common = len(list(itertools.takewhile(lambda p: p[0] == p[1], zip(saved, rendered, strict=False))))
    assert found.kept >= common


def test_long_histories_of_the_same_text_stay_whole_whatever_their_tokens() -> None:
    draw = random.Random(7)
    saved = [draw.randrange(14) for _ in range(800)]
    letters = text_of(saved)
    rendered = []
    while letters:
        size = min(draw.choice((1, 2, 3)), len(letters))
        rendered.append(WORDS.index(letters[:size]))
        letters = letters[size:]
    found = align(saved, [*rendered, WORDS.index("</s>")], text_of)
    assert found.kept == len(saved)
    assert found.ids == (*saved, WORDS.index("</s>"))


@given(
    st.lists(st.integers(0, len(WORDS) - 1), max_size=20),
    st.lists(st.integers(0, len(WORDS) - 1), max_size=20),
    st.lists(st.integers(0, len(WORDS) - 1), max_size=20),
    st.randoms(),
)
def test_what_was_agreed_before_is_not_compared_again_and_says_the_same(
    saved: list[int], before: list[int], more: list[int], draw: random.Random
) -> None:
    first = align(saved, before, text_of)
    agreed = Agreed(tuple(before), first.ids, first.kept - first.seams if first.seams else None)
    wrote = [draw.randrange(len(WORDS)) for _ in range(4)]
    live, given_now = (*first.ids, *wrote), [*before, *wrote[:2], *more]
    seen: list[int] = []

    def looked_at(ids: list[int] | tuple[int, ...]) -> str:
        seen.append(len(ids))
        return text_of(ids)

    found = align(live, given_now, looked_at, agreed)
    assert text_of(found.ids) == text_of(given_now)
    assert found.ids[: found.kept] == live[: found.kept]
    assert found.kept >= len(first.ids)
    assert max(seen, default=0) <= len(more) + 4  # nothing of what was agreed is decoded
    other = align(live, [*before[:-1], *more] if before else more, text_of, agreed)
    assert text_of(other.ids) == text_of([*before[:-1], *more] if before else more)


def test_what_was_agreed_counts_its_seams_on() -> None:
    first = align(ids_of("a", "b", "</s>"), ids_of("ab", "</s>", "a"), text_of)
    agreed = Agreed(ids_of("ab", "</s>", "a"), first.ids, first.kept - first.seams)
    found = align((*first.ids, *ids_of("b")), ids_of("ab", "</s>", "a", "b", "a"), text_of, agreed)
    assert (found.kept, found.seams) == (5, 5)


# -- the likely cause --------------------------------------------------------------------------------------------------

HELLO = {"role": "user", "content": "ab"}
ANSWER = {"role": "assistant", "content": "ba"}


def cause(saved: tuple[int, ...], rendered: tuple[int, ...], before: object, now: object, **told: bool) -> str:
    found = cause_of(saved, align(saved, rendered, text_of), before, now, text_of, **told)  # type: ignore[arg-type]
    return "" if found is None else found.cause


def test_where_all_stays_there_is_no_cause() -> None:
    assert cause((1, 2), (1, 2, 3), [HELLO], [HELLO, ANSWER]) == ""


def test_another_message_is_named() -> None:
    saved, rendered = ids_of("a", "b", "a"), ids_of("a", "a", "a")
    found = cause_of(saved, align(saved, rendered, text_of), [HELLO, ANSWER], [ANSWER, ANSWER], text_of)
    assert found is not None
    assert found.cause == "edited"
    assert "message 0 (user)" in found.detail
    assert (found.token, found.saved, found.given) == (1, "aba", "aaa")
    assert str(found).startswith("the history was edited: message 0 (user) is another one (from token 1 on: 'aba' was")


def test_fewer_messages_are_told() -> None:
    assert cause(ids_of("a", "b"), ids_of("a"), [HELLO, ANSWER], [HELLO]) == "edited"


def test_the_same_messages_in_another_form_are_the_template() -> None:
    saved, rendered = ids_of("a", "b", "a"), ids_of("a", "a", "a")
    assert cause(saved, rendered, [HELLO], [HELLO, ANSWER]) == "template"
    assert cause(saved, rendered, [HELLO], [HELLO, ANSWER], other_template=True) == "template"
    assert cause(saved, rendered, None, [HELLO]) == "edited"


def test_the_same_text_with_no_common_end_of_a_token_is_the_tokenisation() -> None:
    assert cause(ids_of("a", "aab"), ids_of("aa", "abb"), [HELLO], [HELLO]) == "tokenisation"
    assert cause(ids_of("a", "aab"), ids_of("aa", "ab", "b"), [HELLO], [HELLO]) == ""


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        ("<think>", "</think>"),
        ("[THINK]", "[/THINK]"),
        ("<|channel|>analysis", "<|end|>"),
        ("<reasoning>", "</reasoning>"),
    ],
)
def test_a_thought_that_the_template_leaves_out_is_told(opening: str, closing: str) -> None:
    def text(ids: tuple[int, ...] | list[int]) -> str:
        return "".join(chr(i) for i in ids)

    def given(words: str) -> tuple[int, ...]:
        return tuple(ord(c) for c in words)

    saved = given(f"user:hi/bot:{opening}let me see{closing}hello/")
    for rendered in ("user:hi/bot:hello/user:so/bot:", f"user:hi/bot:{opening}\n\n{closing}hello/user:so/bot:"):
        aligned = align(saved, given(rendered), text)
        found = cause_of(saved, aligned, [HELLO, ANSWER], [HELLO, ANSWER, HELLO], text)
        assert found is not None
        assert found.cause == "thinking"
    aligned = align(saved, given(f"user:hi/bot:{opening}let me see{closing}hullo/"), text)
    found = cause_of(saved, aligned, [HELLO, ANSWER], [HELLO, ANSWER], text)
    assert found is not None
    assert found.cause == "template"


# -- messages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "needs a message"),
        ({"role": "user"}, "a list of messages"),
        (["hello"], "message 0 is none"),
        ([{"content": "hello"}], "message 0 is none"),
        ([HELLO, {"role": 3, "content": "x"}], "message 1 is none"),
        ([{"role": "user", "content": b"x"}], "cannot be written as JSON"),
        ([{"role": "user", "content": "\ud800"}], "cannot be written as JSON"),
        ([{"role": "user", "content": float("nan")}], "cannot be written as JSON"),
        (7, "a list of messages"),
    ],
)
def test_what_is_no_message_is_refused(messages: object, told: str) -> None:
    with pytest.raises(InputError, match=told):
        checked(messages)  # type: ignore[arg-type]


def test_messages_are_copied() -> None:
    mine = {"role": "user", "content": "a"}
    kept = checked([mine])
    mine["content"] = "b"
    assert kept == ({"role": "user", "content": "a"},)


@pytest.mark.parametrize(
    ("roles", "starts"),
    [
        ("", []), ("u", [0]), ("ua", [0]), ("uaua", [0, 2]), ("sua", [0]), ("suaua", [0, 3]), ("uua", [0]),
        ("uatatau", [0, 6]), ("aua", [0, 1]),
    ],
)  # fmt: skip
def test_a_turn_starts_with_a_user_who_speaks_after_an_answer(roles: str, starts: list[int]) -> None:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    assert starts_of([{"role": names[r]} for r in roles]) == starts


# -- stop texts --------------------------------------------------------------------------------------------------------


def test_a_stop_text_across_tokens_ends_the_answer_before_it() -> None:
    shown = Shown(("\nUser:",))
    pieces = [shown.add(p) for p in ("Hello", "\nUs", "e", "less\n", "Us", "er: x")]
    assert pieces == ["Hello", "", "", "\nUseless", "", ""]
    assert (shown.met, shown.text, shown.rest()) == (True, "Hello\nUseless", "")


def test_what_was_held_back_comes_at_the_end() -> None:
    shown = Shown(("END",))
    assert [shown.add("a"), shown.add("EN")] == ["a", ""]
    assert (shown.rest(), shown.met, shown.text) == ("EN", False, "aEN")


@given(st.text("ab|", max_size=30), st.lists(st.text("ab|", min_size=1, max_size=4), max_size=3), st.randoms())
def test_what_is_shown_is_the_text_before_the_first_stop_text(text: str, stops: list[str], draw: random.Random) -> None:
    shown, out, rest = Shown(tuple(stops)), "", text
    while rest and not shown.met:
        size = draw.randint(1, 3)
        out += shown.add(rest[:size])
        rest = rest[size:]
        assert shown.text.startswith(out)
    out += shown.rest()
    places = [text.find(stop) for stop in stops if stop in text]
    assert shown.met == bool(places)
    assert out == shown.text
    if not places:
        assert out == text
    else:
        # Which of several comes first is told by the text so far, piece by piece.
        assert text.startswith(out)
        assert not any(stop in out for stop in stops)

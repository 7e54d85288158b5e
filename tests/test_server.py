"""Answers of a server: those of the model, with what was said before kept, in the shapes that clients know."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("torch")

import kvsnap
from kvsnap.conversation import Conversation
from served import CONTEXT, Served, chat_model, serving, user

pytestmark = pytest.mark.engine
OPTIONS = ("--min-reuse", "16")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(model, tmp_path_factory.mktemp("served") / "library", *OPTIONS) as served:
        yield served


def engine_of(model: Path) -> Any:
    from kvsnap.engines.models import load_model

    loaded = load_model(str(model))
    return kvsnap.connect(loaded.model, loaded.tokenizer)


def answered(model: Path, messages: list[dict[str, Any]], max_tokens: int) -> str:
    return Conversation(engine_of(model)).say(messages, max_tokens=max_tokens).text


def test_the_official_client_gets_the_answer_of_the_model(server: Served, model: Path) -> None:
    client = server.openai()
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").context_length == CONTEXT
    got = client.chat.completions.create(model="tiny", messages=user("What is new?"), max_tokens=12)
    assert got.choices[0].message.content == answered(model, user("What is new?"), 12)
    assert got.choices[0].message.content != answered(model, user("What is old?"), 12)
    assert got.choices[0].finish_reason == "length"
    assert (got.usage.completion_tokens, got.usage.prompt_tokens_details.cached_tokens) == (12, 0)
    assert got.kvsnap["session"] in server.names()


def test_a_stream_says_the_same_and_ends_with_the_counts(server: Served) -> None:
    client = server.openai()
    whole = client.chat.completions.create(model="tiny", messages=user("Stream this."), max_tokens=10)
    asked = {"model": "tiny", "messages": user("Stream this."), "max_tokens": 10, "stream": True}
    parts = list(client.chat.completions.create(**asked, stream_options={"include_usage": True}))
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == whole.choices[0].message.content
    assert [p.choices[0].finish_reason for p in parts if p.choices][-1] == "length"
    assert parts[-1].choices == []
    assert parts[-1].usage.completion_tokens == 10
    assert parts[-1].kvsnap["session"] == parts[-2].kvsnap["session"] != whole.kvsnap["session"]
    plain = list(client.chat.completions.create(**asked))
    assert all(p.usage is None and p.choices for p in plain)
    assert plain[-1].kvsnap["stop"] == "length"


def test_the_stream_of_events_ends_as_clients_expect(server: Served) -> None:
    got = server.post({"messages": user("Raw events."), "max_tokens": 2, "stream": True})
    assert got.headers["content-type"].startswith("text/event-stream")
    assert got.text.endswith("data: [DONE]\n\n")
    assert got.headers["x-kvsnap-session"] in server.names()
    events = [json.loads(line[6:]) for line in got.text.split("\n\n") if line.startswith("data: {")]
    assert {e["object"] for e in events} == {"chat.completion.chunk"}
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_a_named_session_goes_on_and_evaluates_nothing_again(server: Served, model: Path) -> None:
    said = user("First, a question.")
    first = server.say(said, "named", max_tokens=8)
    alone = Conversation(engine_of(model))
    assert first["choices"][0]["message"]["content"] == alone.say(said, max_tokens=8).text
    said = [*said, first["choices"][0]["message"], *user("And another one.")]
    then = server.say(said, "named", max_tokens=8)
    told = then["kvsnap"]
    assert (told["session"], told["how"]) == ("named", "named")
    assert told["reused"] == then["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert told["reused"] + told["recomputed"] + told["new"] == then["usage"]["prompt_tokens"]
    again = alone.say([{k: m[k] for k in ("role", "content")} for m in said], max_tokens=8)
    assert then["choices"][0]["message"]["content"] == again.text
    assert told["reused"] == again.reused
    assert server.session("named")["n_tokens"] == alone.n_tokens
    # The same history, with no session behind it, has to be evaluated.
    assert server.say(said, "named-2", max_tokens=8)["kvsnap"]["reused"] == 0


def test_an_edited_history_says_why_it_was_evaluated_again(server: Served) -> None:
    server.say(user("The weather is fine today, is it not?"), "edited")
    told = server.say(user("The weather is awful today, is it not?"), "edited")["kvsnap"]
    assert told["recomputed"] > 0
    assert told["why"]["cause"] == "edited"
    assert "message 0" in told["why"]["detail"]


def test_without_a_name_the_longest_beginning_is_gone_on_with(server: Served) -> None:
    said = user("A conversation that is found again by how it begins.")
    first = server.say(said)
    assert first["kvsnap"]["how"] == "new"
    name = first["kvsnap"]["session"]
    said = [*said, first["choices"][0]["message"], *user("Go on.")]
    then = server.say(said)["kvsnap"]
    assert (then["how"], then["session"]) == ("continued", name)
    assert then["reused"] > 30
    # Another one that asks the same goes its own way: what was answered meanwhile is not its to replace.
    again = server.say(said)["kvsnap"]
    assert again["how"] == "forked"
    assert len(server.http.get(f"/v1/sessions/{name}/history").json()["messages"]) == 4


def test_a_beginning_that_is_shared_is_forked_and_changes_nobody(server: Served) -> None:
    system = [{"role": "system", "content": "You are asked by many, and always told the same at first."}]
    first = server.say([*system, *user("one")])["kvsnap"]["session"]
    before = server.http.get(f"/v1/sessions/{first}/history").json()
    other = server.say([*system, *user("two")])["kvsnap"]
    assert (other["how"], other["recomputed"], other["why"]) == ("forked", 0, None)
    assert other["session"] != first
    assert other["reused"] > 60
    assert server.http.get(f"/v1/sessions/{first}/history").json() == before
    # Neither goes on with the other's, from here on.
    said = server.http.get(f"/v1/sessions/{other['session']}/history").json()["messages"]
    assert [m["content"] for m in said[:2]] == [system[0]["content"], "two"]
    again = server.say([*said, *user("more")])["kvsnap"]
    assert (again["how"], again["session"]) == ("continued", other["session"])
    assert server.session(other["session"])["parents"] == [first]


def test_a_beginning_that_is_too_short_is_not_forked(server: Served) -> None:
    server.say(user("zq"))
    assert server.say(user("zw"))["kvsnap"]["how"] == "new"


def test_settings_hold_for_one_request(server: Served) -> None:
    def text(**settings: Any) -> str:
        return str(
            server.say(user("Be random."), "random", max_tokens=16, **settings)["choices"][0]["message"]["content"]
        )

    greedy = text()
    one = text(temperature=1.5, seed=1)
    assert one == text(temperature=1.5, seed=1)
    assert one != text(temperature=1.5, seed=2)
    assert text() == greedy != one
    assert text(temperature=1.5, seed=1, top_p=0.000001) == greedy
    assert text(temperature=1.5, seed=-1) == text(temperature=1.5, seed=2**64 - 1)


def test_a_stop_text_ends_the_answer_and_is_not_shown(server: Served) -> None:
    text = server.say(user("Stop somewhere."), "stops", max_tokens=30)["choices"][0]["message"]["content"]
    place = next(i for i in range(3, len(text)) if text.find(text[i : i + 2]) == i)
    got = server.say(user("Stop somewhere."), "stops", max_tokens=30, stop=[text[place : place + 2]])
    assert got["choices"][0]["message"]["content"] == text[:place]
    assert got["choices"][0]["finish_reason"] == "stop"
    assert got["kvsnap"]["complete"] is True


def test_roles_and_parts_of_text_are_taken(server: Served) -> None:
    whole = server.say([{"role": "system", "content": "Be brief."}, *user("one two")], "parts-1")
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    said = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": parts},
    ]
    assert server.say(said, "parts-2")["choices"][0] == whole["choices"][0]
    assert server.say(said, "parts-2", user="me", metadata={"a": "b"}, store=True, seed=None)


def test_tools_go_to_a_template_that_takes_them(server: Served) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    without = server.say(user("Look."), "tools")["usage"]["prompt_tokens"]
    assert server.say(user("Look."), "tools", tools=tools, tool_choice="none")["usage"]["prompt_tokens"] == without
    assert server.say(user("Look."), "tools", tools=tools)["usage"]["prompt_tokens"] > without + 40
    called = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    said = [*user("Look."), {"role": "assistant", "content": None, "tool_calls": called},
            {"role": "tool", "tool_call_id": "1", "content": "nothing there"}]  # fmt: skip
    assert server.say(said, "tools", tools=tools)["kvsnap"]["reused"] > 40


def test_many_clients_at_once_get_what_each_gets_alone(server: Served, model: Path) -> None:
    texts = [f"Client {number} says hello." for number in range(6)]
    got: dict[str, str] = {}

    def ask(text: str) -> None:
        client = server.openai(session=f"of-{text[7]}")
        parts = client.chat.completions.create(model="tiny", messages=user(text), max_tokens=20, stream=True)
        got[text] = "".join(p.choices[0].delta.content or "" for p in parts)

    threads = [threading.Thread(target=ask, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert got == {text: answered(model, user(text), 20) for text in texts}
    assert len(set(got.values())) == len(texts)


# -- sessions --------------------------------------------------------------------------------------------------------


def test_sessions_are_listed_forked_rewound_reset_and_removed(server: Served) -> None:
    http = server.http
    first = server.say(user("One."), "managed")
    said = [*user("One."), first["choices"][0]["message"], *user("Two.")]
    server.say(said, "managed")
    one = server.session("managed")
    assert one["open"] is True
    assert one in http.get("/v1/sessions").json()["data"]
    told = http.get("/v1/sessions/managed/history").json()
    assert [m["content"] for m in told["messages"]][::2] == ["One.", "Two."]
    commits = [c["commit"] for c in told["commits"]]
    assert commits == sorted(commits)
    made = http.post("/v1/sessions/managed/fork", json={"name": "copy"}).json()
    assert (made["id"], made["n_tokens"], made["parents"]) == ("copy", one["n_tokens"], ["managed"])
    assert http.post("/v1/sessions/managed/fork").json()["id"].startswith("chat-")
    back = http.post("/v1/sessions/managed/rewind", json={"turns": 1}).json()
    assert back["n_tokens"] == first["usage"]["total_tokens"]
    assert http.post("/v1/sessions/managed/rewind", json={"commit": commits[-1]}).json()["n_tokens"] == one["n_tokens"]
    assert server.say(said, "managed")["kvsnap"]["reused"] > 20  # goes on after both
    assert http.post("/v1/sessions/managed/save").json()["written"] == 0
    assert http.post("/v1/sessions/managed/reset").json()["n_tokens"] == 0
    assert server.session("copy")["n_tokens"] == one["n_tokens"]
    assert http.delete("/v1/sessions/managed").json() == {
        "object": "kvsnap.session.deleted", "id": "managed", "deleted": True,
    }  # fmt: skip
    assert "managed" not in server.names()
    assert server.say(said, "copy")["kvsnap"]["reused"] > 20  # a fork outlives what it was made from


@pytest.mark.parametrize("address", ["gone", "gone/history", "gone/fork", "gone/rewind", "gone/save", "gone/reset"])
def test_an_unknown_session_is_404(server: Served, address: str) -> None:
    reads = address in ("gone", "gone/history")
    body = {"turns": 1} if address.endswith("rewind") else {}
    got = (
        server.http.get(f"/v1/sessions/{address}") if reads else server.http.post(f"/v1/sessions/{address}", json=body)
    )
    assert (got.status_code, got.json()["error"]["code"]) == (404, "not_found")
    assert server.http.delete("/v1/sessions/gone").status_code == 404
    assert "gone" not in server.names()


def test_options_of_sessions_are_checked(server: Served) -> None:
    server.say(user("x"), "checked")
    for action, body in (
        ("rewind", {}), ("rewind", {"turns": 1, "commit": 1}), ("rewind", {"turns": 99}), ("rewind", {"turns": "1"}),
        ("rewind", {"turn": 1}), ("fork", {"name": 1}), ("fork", {"name": "../x"}), ("fork", {"name": "checked"}),
        ("fork", {"n_tokens": 10**9}),
    ):  # fmt: skip
        got = server.http.post(f"/v1/sessions/checked/{action}", json=body)
        assert (got.status_code, got.json()["error"]["type"]) == (400, "invalid_request_error"), (action, body)
    assert server.http.post("/v1/sessions/checked/rewind", json={"commit": 99}).status_code == 404


def test_a_name_may_hold_any_letters_percent_encoded(server: Served) -> None:
    got = server.post({"messages": user("x"), "max_tokens": 1}, "na%C3%AFve%20one")
    assert got.headers["x-kvsnap-session"] == "na%C3%AFve%20one"
    assert got.json()["kvsnap"]["session"] == "na\u00efve one"
    assert server.http.get("/v1/sessions/na%C3%AFve%20one").json()["id"] == "na\u00efve one"
    for bad in ("a%2Fb", "..", "%FF", "@x", "a%00b"):
        got = server.post({"messages": user("x"), "max_tokens": 1}, bad)
        assert (got.status_code, got.json()["error"]["type"]) == (400, "invalid_request_error"), bad

"""Which session a request goes on with, in the process of the test: other models, texts that are no chat, failures."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("torch")

import torch

import kvsnap
from chat_models import BEGIN, END, START, chat_engine
from kvsnap import Sampler
from kvsnap.errors import CompatibilityError, InputError, StorageError
from kvsnap.library import Library
from kvsnap.sampling import start
from kvsnap.server import Limits, Settings
from kvsnap.server.app import Service, application
from kvsnap.server.asking import Asked
from kvsnap.server.exchange import Ended, Exchange
from kvsnap.server.gate import Gate
from kvsnap.server.refusals import RefusalError, refused
from kvsnap.server.rooms import Counts, Placed, Room
from kvsnap.server.tenants import Tenant
from served import TEMPLATE, chat_model, user

pytestmark = pytest.mark.engine
SETTINGS = Settings(model="tiny", min_reuse=8, limits=Limits(open_sessions=2))


def engine_of(directory: Path, **made: Any) -> Any:
    from kvsnap.engines.models import load_model

    loaded = load_model(str(chat_model(directory, **made)))
    return kvsnap.connect(loaded.model, loaded.tokenizer)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return engine_of(tmp_path_factory.mktemp("model") / "tiny")


def room_of(engine: Any, path: Path, **settings: Any) -> Room:
    given = {name: getattr(SETTINGS, name) for name in SETTINGS.__dataclass_fields__}
    return Room(engine, Settings(**{**given, **settings}), Tenant("", str(path / "library")))


def asked(messages: list[dict[str, Any]], **template: Any) -> Asked:
    return Asked(
        messages=tuple(messages), max_tokens=4, stop=(), sampler=kvsnap.Sampler(), template=template, stream=False,
        usage=False,
    )  # fmt: skip


def said(room: Room, messages: list[dict[str, Any]], name: str | None = None) -> tuple[Placed, Any]:
    placed = room.place(asked(messages), name)
    turn = placed.conversation.say(messages, max_tokens=4)
    room.leave(placed)
    return placed, turn


def names(path: Path) -> list[str]:
    with Library(path / "library", readonly=True) as library:
        return [entry.name for entry in library.list()]


def test_a_session_of_another_model_is_refused_or_started_anew(engine: Any, tmp_path: Path) -> None:
    room = room_of(engine, tmp_path)
    _, turn = said(room, user("Whose is this?"), "theirs")
    room.close()
    other = engine_of(tmp_path / "tiny", seed=1)
    room = room_of(other, tmp_path)
    with pytest.raises(CompatibilityError) as error:
        room.place(asked(user("Whose is this?")), "theirs")
    assert refused(error.value).status == 409
    told = refused(error.value).body["error"]["message"]
    assert told.count("weights differ") == 4  # each difference once
    assert "; and " in told
    assert "--fresh" in told
    assert "accept=" not in told  # which a client cannot do
    assert room.place(asked(user("Whose is this?")), None).how == "new"  # what another model holds is no beginning
    room.close()
    room = room_of(other, tmp_path, fresh=True)
    _, anew = said(room, user("Whose is this?"), "theirs")
    assert anew.reused == 0
    commits = room.history("theirs")["commits"]
    assert turn.prompt_tokens + 4 in [commit["n_tokens"] for commit in commits]  # and can be gone back to
    room.close()


def test_a_text_that_is_no_chat_is_left_alone(engine: Any, tmp_path: Path) -> None:
    raw = "\x02user:A text that begins as a chat does, and is none."
    with Library(tmp_path / "library") as library, library.open("raw") as session:
        engine.reset()
        engine.prefill(engine.tokenize(raw, special=False))
        session.append(engine.capture())
    room = room_of(engine, tmp_path)
    assert room.place(asked(user("A text that begins as a chat does, and more.")), None).how == "new"
    room.close()


def test_tools_that_a_template_does_not_take_are_refused(tmp_path: Path) -> None:
    room = room_of(engine_of(tmp_path / "tiny", template=TEMPLATE.split("{% endif %}", 1)[1]), tmp_path)
    with pytest.raises(RefusalError) as error:
        room.place(asked(user("Look."), tools=[{"type": "function"}]), None)
    assert error.value.param == "tools"
    assert room.listed() == []
    room.close()


def test_what_a_fork_leaves_behind_is_not_counted_as_its_own(engine: Any, tmp_path: Path) -> None:
    room = room_of(engine, tmp_path)
    said(room, user("A question that both ask: what is the first of all numbers, and why so?"))
    placed, turn = said(room, user("A question that both ask: what is the last of all numbers, and why so?"))
    counts = Counts.of(turn, placed)
    assert placed.how == "forked"
    assert turn.recomputed > 20  # as the file sees it
    assert (counts.recomputed, counts.why) == (0, None)
    assert counts.reused + counts.new == turn.prompt_tokens
    room.close()


def in_other_tokens() -> tuple[Any, int]:
    """An engine that writes letters which its tokenizer would write as pairs, and a seed with which it does so."""
    engine = chat_engine()
    with torch.no_grad():
        engine.model.get_output_embeddings().weight[[ord(letter) for letter in "thein ra"]] *= 40
    for seed in range(30):
        engine.reset()
        engine.prefill(engine.render(user(QUESTION)))
        engine.sampler = start(Sampler(temperature=20.0, seed=seed))
        tokens = [engine.step() for _ in range(24)]
        ids = tuple(token.id for token in tokens)
        again = engine.tokenize("".join(token.text for token in tokens), special=False)
        if again[:12] != ids[:12] and not set(ids) & {BEGIN, START, END}:
            return engine, seed
    raise AssertionError("no answer in other tokens")


QUESTION = "the long story that both begin with, and more of it"


def test_an_answer_in_other_tokens_hides_nothing_that_agrees_longer(tmp_path: Path) -> None:
    """Two sessions agree equally long in ids, up to the answer that both begin with; one has the whole history."""
    engine, seed = in_other_tokens()
    room = room_of(engine, tmp_path)

    def answered(messages: list[dict[str, Any]]) -> tuple[Placed, Any, list[dict[str, Any]]]:
        placed = room.place(asked(messages), None)
        placed.conversation.sampler = Sampler(temperature=20.0, seed=seed)
        turn = placed.conversation.say(messages, max_tokens=24)
        room.leave(placed)
        return placed, turn, [*messages, dict(turn.message)]

    first, _, begun = answered(user(QUESTION))
    second, _, long = answered([*begun, *user("more")])
    other, _, _ = answered([*begun, *user("another thing")])
    assert (first.how, second.how, other.how) == ("new", "continued", "forked")
    evaluated = engine.evaluated
    placed, turn, _ = answered([*long, *user("and more")])
    assert (placed.how, placed.name) == ("continued", first.name)
    assert turn.recomputed == 0
    assert engine.evaluated - evaluated == turn.new + 23  # of the answer all but the last one
    assert turn.new < 40 < turn.reused
    room.close()


def test_a_conversation_that_goes_on_is_continued_however_short_it_is(engine: Any, tmp_path: Path) -> None:
    room = room_of(engine, tmp_path, min_reuse=10_000)
    first, turn = said(room, user("Short."))
    begun = [*user("Short."), dict(turn.message)]
    placed, turn = said(room, [*begun, *user("And on.")])
    assert (placed.how, placed.name, turn.recomputed) == ("continued", first.name, 0)
    assert said(room, user("Short, and otherwise."))[0].how == "new"
    room.close()


def test_a_session_that_was_made_for_a_request_goes_with_it_when_that_fails(engine: Any, tmp_path: Path) -> None:
    room = room_of(engine, tmp_path)
    said(room, user("A beginning that stays where it is."), "first")
    for name, text in ((None, "Another one."), (None, "A beginning that stays, and goes on."), ("named", "x")):
        placed = room.place(asked(user(text)), name)
        assert placed.made
        room.leave(placed)
    placed = room.place(asked(user("A beginning that stays where it is.")), "first")
    room.leave(placed)  # was there before: it stays
    assert names(tmp_path) == ["first"]
    room.close()


def test_a_turn_that_could_not_be_stored_is_stored_when_that_is_possible(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvsnap.library import LibrarySession

    def full(*_: Any, **__: Any) -> Any:
        raise StorageError("no space", path="/somewhere")

    room = room_of(engine, tmp_path)
    placed = room.place(asked(user("Keep this.")), "kept")
    with monkeypatch.context() as patched:
        patched.setattr(LibrarySession, "append", full)
        with pytest.raises(StorageError) as error:
            placed.conversation.say(user("Keep this."), max_tokens=4)
        room.leave(placed)
        assert refused(error.value).status == 507
        room.save_live()  # still no space: the next request is not the one to hear of it
        assert room.told("kept")["n_tokens"] == 0
    written = room.saved("kept")
    assert written["written"] > 0
    assert written["n_tokens"] > 10
    room.close()


def posted(engine: Any, path: Path, messages: list[dict[str, Any]], *, stream: bool = False) -> Any:
    """Ask an application in this process, as a server runs it."""
    import httpx

    service = Service(engine, SETTINGS, (tenant_of(path),), 0)

    @asynccontextmanager
    async def lives(_: Any) -> Any:
        yield

    async def main() -> Any:
        gate = Gate(application(service, lives), None, tenant_of(path))
        way = httpx.ASGITransport(gate, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=way, base_url="http://localhost") as client:
            body = {"messages": messages, "max_tokens": 4, "stream": stream}
            return await client.post("/v1/chat/completions", json=body)

    try:
        return asyncio.run(asyncio.wait_for(main(), 60))
    finally:
        service.close()


def tenant_of(path: Path) -> Tenant:
    return Tenant("", str(path / "library"))


def test_a_bug_is_500_and_what_it_says_stays_here(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a secret of the client")

    assert posted(engine, tmp_path, user("x")).status_code == 200
    with monkeypatch.context() as patched:
        patched.setattr(Room, "place", broken)
        got = posted(engine, tmp_path, user("x"))
    assert (got.status_code, got.json()["error"]["code"]) == (500, "internal")
    assert "secret" not in got.text


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_cannot_be_stored_is_507_and_is_not_called_done(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    from kvsnap.library import LibrarySession

    def full(*_: Any, **__: Any) -> Any:
        raise StorageError("no space", path="/somewhere")

    whole = LibrarySession.append
    with monkeypatch.context() as patched:
        patched.setattr(LibrarySession, "append", full)
        # The disk has room again when the session is closed.
        patched.setattr(Room, "close", lambda room, close=Room.close: (patched.setattr(LibrarySession, "append", whole),
                                                                      close(room)))  # fmt: skip
        got = posted(engine, tmp_path, user("Keep this, please."), stream=stream)
    assert got.status_code == (200 if stream else 507)
    assert '"code":"storage"' in got.text
    assert "[DONE]" not in got.text
    assert "/somewhere" not in got.text
    with Library(tmp_path / "library", readonly=True) as library:
        assert library.list()[0].n_tokens > 20  # and was stored then


def test_the_end_of_an_answer_is_told_when_the_line_is_free(engine: Any, tmp_path: Path) -> None:
    import httpx

    settings = replace(SETTINGS, limits=replace(SETTINGS.limits, waiting=0))
    service = Service(engine, settings, (tenant_of(tmp_path),), 0)
    told, busy = Exchange._tell, []

    def seen(going: Exchange, event: Any) -> None:
        if isinstance(event, Ended):
            busy.append(service.line._busy)
        told(going, event)

    @asynccontextmanager
    async def lives(_: Any) -> Any:
        yield

    async def main() -> list[int]:
        way = httpx.ASGITransport(Gate(application(service, lives), None, tenant_of(tmp_path)))
        async with httpx.AsyncClient(transport=way, base_url="http://localhost") as client:
            body = {"messages": user("Again and again."), "max_tokens": 1}
            return [(await client.post("/v1/chat/completions", json=body)).status_code for _ in range(5)]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Exchange, "_tell", seen)
        assert asyncio.run(asyncio.wait_for(main(), 60)) == [200] * 5
    service.close()
    assert busy == [False] * 5


def test_a_model_without_a_template_is_refused_before_anyone_asks(tmp_path: Path) -> None:
    from kvsnap.server import bound, serve

    engine = engine_of(tmp_path / "tiny")
    engine.tokenizer.chat_template = None
    with bound("127.0.0.1", 0, has_tokens=False) as where, pytest.raises(InputError, match="template"):
        serve(engine, SETTINGS, where, library=str(tmp_path / "library"), ready=lambda _: None)


def test_open_sessions_are_few_and_closed_when_idle(engine: Any, tmp_path: Path) -> None:
    room = room_of(engine, tmp_path)
    for name in "abc":
        said(room, user(f"I am {name}, and I stay for a while."), name)
    assert [room.told(name)["open"] for name in "abc"] == [False, True, True]
    room.close_idle(3600)
    assert room.told("c")["open"]
    room.close_idle(0)
    assert not any(one["open"] for one in room.listed())
    assert said(room, user("I am a, and I stay for a while."), "a")[1].reused > 20
    room.close()

"""A server that is left, killed, stopped, crowded and lied to: nothing is lost, and the next client is answered."""

from __future__ import annotations

import asyncio
import json
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("torch")

from kvsnap.library import Library
from kvsnap.server.answering import Answer
from kvsnap.server.app import _Streamed
from served import CONTEXT, Served, chat_model, serving, user

pytestmark = [pytest.mark.engine, pytest.mark.newest]
LONG = CONTEXT - 200
"""Tokens of an answer that goes on for seconds."""
WORD = "xylophone"
"""Stands in every prompt, and never in a log."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(model, tmp_path_factory.mktemp("served") / "library") as served:
        yield served


@pytest.fixture(scope="module")
def narrow(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    limits = ("--max-body", "5000", "--max-prompt", "300", "--open-sessions", "2", "--waiting", "0")
    with serving(model, tmp_path_factory.mktemp("narrow") / "library", *limits) as served:
        yield served


@pytest.fixture(scope="module")
def hasty(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(model, tmp_path_factory.mktemp("hasty") / "library", "--timeout", "0.4", "--idle", "0.2") as served:
        yield served


def ask(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": user(f"{text} {WORD}"), "max_tokens": LONG, "stream": True, **more}


class Long:
    """A stream of an answer that goes on, read up to its first text."""

    def __init__(self, served: Served, text: str, session: str, **more: Any) -> None:
        self._asked = served.http.stream(
            "POST", "/v1/chat/completions", json=ask(text, **more), headers={"X-Kvsnap-Session": session}
        )
        self.response = self._asked.__enter__()
        self.lines = self.response.iter_lines()
        self.events: list[dict[str, Any]] = []
        while not (self.events and self.events[-1]["choices"][0]["delta"].get("content")):
            self.take()

    def take(self) -> None:
        line = next(self.lines)
        if line.startswith("data: {"):
            self.events.append(json.loads(line[6:]))

    def rest(self) -> list[dict[str, Any]]:
        for line in self.lines:
            if line.startswith("data: {"):
                self.events.append(json.loads(line[6:]))
        return self.events

    def text(self) -> str:
        return "".join(e["choices"][0]["delta"].get("content", "") for e in self.events if e.get("choices"))

    def close(self) -> None:
        self._asked.__exit__(None, None, None)


# -- clients ---------------------------------------------------------------------------------------------------------


def test_a_client_that_leaves_ends_its_answer_which_is_stored_as_cut_off(server: Served) -> None:
    stream = Long(server, "Tell me all.", "left")
    stream.close()
    after = server.say(user("Next, please."), "next", max_tokens=3)
    assert after["usage"]["completion_tokens"] == 3
    left = server.settled("left")
    assert left["complete"] is False
    assert left["n_tokens"] < LONG
    messages = server.http.get("/v1/sessions/left/history").json()["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"]
    assert messages[1]["content"].startswith(stream.text())


def test_a_client_that_leaves_an_answer_that_is_no_stream_ends_it_too(server: Served) -> None:
    raw = json.dumps({**ask("Tell me all."), "stream": False}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n"
    with closing(socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))) as client:
        client.sendall(f"{head}X-Kvsnap-Session: left-whole\r\n\r\n".encode() + raw)
        while "left-whole" not in server.names():  # its turn has come
            pass
    left = server.settled("left-whole")
    assert 0 < left["n_tokens"] < LONG
    assert left["complete"] is False


def test_a_client_that_does_not_read_holds_up_nobody(server: Served) -> None:
    raw = json.dumps(ask("Tell me all.", max_tokens=400)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n"
    with closing(socket.socket()) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        client.sendall(f"{head}X-Kvsnap-Session: deaf\r\n\r\n".encode() + raw)
        while "deaf" not in server.names():
            pass
        assert server.say(user("And me?"), "other", max_tokens=2)["usage"]["completion_tokens"] == 2
        deaf = server.session("deaf")  # all of it was generated, though nothing was read
        assert deaf["n_tokens"] >= 400
        assert len(server.http.get("/v1/sessions/deaf/history").json()["messages"]) == 2


def test_a_client_that_takes_nothing_is_given_up_when_the_time_is_over() -> None:
    class Going:
        def __init__(self) -> None:
            self.late = asyncio.get_running_loop().create_future()
            self.closed = False

        async def next(self) -> None:
            await asyncio.sleep(3600)

        def close(self) -> None:
            self.closed = True

    async def scenario() -> None:
        going, hangs, ended = Going(), asyncio.Event(), []

        async def send(message: Any) -> None:
            hangs.set()
            await asyncio.sleep(3600)

        streamed = _Streamed(going, Answer("m", False), "s", lambda: ended.append(1))  # type: ignore[arg-type]
        running = asyncio.ensure_future(streamed(None, None, send))
        await hangs.wait()
        assert not running.done()
        going.late.set_result(None)
        await running
        assert going.closed
        assert ended == [1]

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_what_is_too_large_too_many_or_no_json_is_refused(narrow: Served) -> None:
    def refusal(body: Any, session: str | None = None) -> tuple[int, str]:
        got = narrow.post(body, session)
        return got.status_code, got.json()["error"]["code"]

    assert refusal(b"{") == (400, "invalid_json")
    assert refusal(b"\xff" * 100) == (400, "invalid_json")
    assert refusal({"messages": user("x" * 5000)}) == (413, "body_too_large")
    parts = iter([b"{" + b" " * 3000, b" " * 3000])
    got = narrow.http.post("/v1/chat/completions", content=parts)  # of no length that is told
    assert (got.status_code, got.json()["error"]["code"]) == (413, "body_too_large")
    assert refusal({"messages": user("x" * 400)}) == (400, "prompt_too_long")
    assert refusal({"messages": user("x"), "max_tokens": 4097}) == (400, "invalid_value")
    assert refusal({"messages": user("x"), "n": 2}) == (400, "unsupported_parameter")
    assert refusal({"messages": user("x")}, "a\tb") == (400, "input")
    assert narrow.http.get("/v2").json()["error"]["code"] == "not_found"
    assert narrow.http.put("/v1/models").json()["error"]["code"] == "method_not_allowed"
    assert narrow.http.get("/health").json() == {"status": "ok"}
    assert narrow.names() == []
    assert len(narrow.say(user("x"))["choices"]) == 1


def test_a_full_context_names_both_numbers_and_leaves_nothing_behind(server: Served) -> None:
    names = server.names()
    for session in (None, "too-long"):
        got = server.post({"messages": user("x" * CONTEXT)}, session)
        error = got.json()["error"]
        assert (got.status_code, error["code"]) == (400, "context_length_exceeded")
        assert str(CONTEXT) in error["message"]
        assert str(CONTEXT + 18) in error["message"]
    assert server.names() == names
    nearly = server.say(user("x" * (CONTEXT - 30)), "nearly", max_tokens=50)
    assert nearly["choices"][0]["finish_reason"] == "length"
    assert nearly["kvsnap"]["stop"] == "context"


def test_a_request_that_takes_too_long_is_ended_and_stored(hasty: Served) -> None:
    n_tokens = 0
    while not n_tokens:  # on a busy machine the time may be over before the first token
        got = hasty.post({**ask("Tell me all."), "stream": False}, "slow")
        assert (got.status_code, got.json()["error"]["code"]) == (504, "timeout")
        assert got.json()["kvsnap"] == {"session": "slow"}
        n_tokens = hasty.http.get("/v1/sessions/slow").json().get("n_tokens", 0)
    streamed = hasty.post(ask("Tell me all."), "slow-stream")
    assert streamed.status_code in (200, 504)  # before the first text of it, or behind
    assert '"code":"timeout"' in streamed.text
    with closing(socket.create_connection(("127.0.0.1", int(hasty.url.rsplit(":", 1)[1])))) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
        client.settimeout(60)
        assert b" 408 " in client.recv(4096)
    found = hasty.session("slow")
    assert (found["complete"], found["n_tokens"] < LONG) == (False, True)


def test_too_many_that_wait_are_told_to_come_back(narrow: Served) -> None:
    stream = Long(narrow, "Tell me all.", "first")
    got = narrow.post({"messages": user("Me too.")}, "second")
    assert (got.status_code, got.json()["error"]["type"]) == (429, "rate_limit_error")
    assert got.headers["retry-after"] == "1"
    stream.close()
    while narrow.post({"messages": user("Me too."), "max_tokens": 1}, "second").status_code == 429:
        pass


def test_a_session_that_another_process_writes_is_busy_or_forked(server: Served) -> None:
    said = user("A session that is open in two places.")
    first = server.say(said, "shared")
    with Library(server.library) as library:
        with library.open("elsewhere"):
            got = server.post({"messages": user("x")}, "elsewhere")
            assert (got.status_code, got.json()["error"]["code"]) == (409, "busy")
            assert got.headers["retry-after"] == "1"
        library.fork("shared", "held")
        server.http.delete("/v1/sessions/shared")
        with library.open("held"):
            told = server.say([*said, first["choices"][0]["message"], *user("more")])["kvsnap"]
            assert told["how"] == "forked"
            assert told["reused"] > 40


def test_a_session_without_requests_is_closed(hasty: Served) -> None:
    asked = {"messages": user("And then nothing more."), "max_tokens": 1}
    while hasty.post(asked, "idle").status_code == 504:
        pass
    while hasty.session("idle")["open"]:
        pass
    with Library(hasty.library) as library, library.open("idle", create=False) as session:
        assert session.n_tokens > 20


def test_no_more_sessions_are_open_than_may_be(narrow: Served) -> None:
    for name in "abc":
        narrow.say(user(f"I am {name}."), name)
    assert [narrow.session(name)["open"] for name in "abc"] == [False, True, True]


# -- ends ------------------------------------------------------------------------------------------------------------


def test_a_killed_server_loses_at_most_the_turn_being_written(model: Path, tmp_path: Path) -> None:
    said = user("Remember this.")
    with serving(model, tmp_path / "library") as served:
        first = served.say(said, "kept")
        said = [*said, first["choices"][0]["message"]]
        stream = Long(served, "Tell me all.", "lost")
        assert served.end(signal.SIGKILL) == -signal.SIGKILL
        stream.close()
    with serving(model, tmp_path / "library", "--every", "8") as served:
        assert served.session("lost")["n_tokens"] == 0
        assert served.session("kept")["n_tokens"] == first["usage"]["total_tokens"]
        then = served.say([*said, *user("What was it?")], "kept")
        assert then["kvsnap"]["reused"] >= first["usage"]["total_tokens"] - 1
        stream = Long(served, "Tell me all.", "going")  # of this one at most 8 tokens are lost
        while len(stream.text()) < 40:
            stream.take()
        served.end(signal.SIGKILL)
        text = stream.text()
        stream.close()
    with serving(model, tmp_path / "library") as served:
        kept = served.session("going")
        assert kept["complete"] is False
        messages = served.http.get("/v1/sessions/going/history").json()["messages"]
        assert len(messages[1]["content"]) >= len(text) - 8
        assert served.say([*messages, *user("Go on.")], "going")["kvsnap"]["reused"] >= kept["n_tokens"] - 1


def test_a_server_that_is_stopped_stores_what_is_there(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path / "library", "--grace", "0", "--waiting", "1") as served:
        stream = Long(served, "Tell me all.", "stopped")
        behind: queue.Queue[int] = queue.Queue()
        asked = {"messages": user("x")}
        waiting = [threading.Thread(target=lambda: behind.put(served.post(asked, "b").status_code)) for _ in range(2)]
        for thread in waiting:
            thread.start()
        assert behind.get(timeout=60) == 429  # so the other one is in line
        served.process.send_signal(signal.SIGTERM)
        last = stream.rest()[-1]
        assert last["error"]["code"] == "stopping"
        assert last["kvsnap"] == {"session": "stopped"}
        assert behind.get(timeout=60) == 503
        for thread in waiting:
            thread.join(60)
        stream.close()
        assert served.process.wait(60) == 0
        assert WORD not in served.log.read_text(encoding="utf-8")
    with Library(tmp_path / "library") as library, library.open("stopped", create=False) as session:
        assert session.complete is False
        assert session.messages is not None
        assert session.messages[1]["content"].startswith(stream.text())
        assert library.check(deep=True).ok


def test_an_answer_may_end_in_the_time_of_grace(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path / "library", "--grace", "60") as served:
        stream = Long(served, "Tell me some.", "graceful", max_tokens=600)
        served.process.send_signal(signal.SIGTERM)
        last = stream.rest()[-1]
        assert last["choices"][0]["finish_reason"] == "length"
        stream.close()
        assert served.process.wait(60) == 0
    with Library(tmp_path / "library") as library:
        assert library.list()[0].n_tokens > 600


def test_a_second_signal_does_not_wait_for_grace(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path / "library", "--grace", "3600") as served:
        stream = Long(served, "Tell me all.", "twice")
        served.process.send_signal(signal.SIGINT)
        while served.http_is_open():
            pass
        served.process.send_signal(signal.SIGINT)
        assert stream.rest()[-1]["error"]["code"] == "stopping"
        stream.close()
        assert served.process.wait(60) == 0


# -- who asks --------------------------------------------------------------------------------------------------------


def test_tenants_share_nothing(model: Path, tmp_path: Path) -> None:
    anna, bert = "anna-" * 5, "bert-" * 5
    tokens = tmp_path / "tokens"
    tokens.write_text(f"anna {anna}\nbert {bert}\n", encoding="ascii")
    tokens.chmod(0o600)
    said = user("The same long beginning for both of them, word for word.")
    with serving(model, tmp_path / "library", "--tokens-file", str(tokens), "--min-reuse", "4") as served:

        def told(token: str, session: str | None = None) -> dict[str, Any]:
            client = served.openai(token, session)
            return dict(client.chat.completions.create(model="tiny", messages=said, max_tokens=4).kvsnap)

        def names(token: str) -> list[str]:
            got = served.http.get("/v1/sessions", headers={"Authorization": f"Bearer {token}"})
            return [one["id"] for one in got.json()["data"]]

        assert told(anna)["how"] == "new"
        assert told(anna, "mine")["reused"] == 0
        assert told(bert, "mine")["reused"] == 0
        assert told(bert)["how"] == "forked"  # of his own
        assert told(bert)["reused"] > 0
        assert set(names(anna)) & set(names(bert)) == {"mine"}
        anna_before = names(anna)
        assert served.http.delete("/v1/sessions/mine", headers={"Authorization": f"Bearer {bert}"}).status_code == 200
        assert names(anna) == anna_before
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {anna}"}):
            got = served.http.get("/v1/models", headers=headers)
            assert (got.status_code, got.json()["error"]["type"]) == (401, "authentication_error")
        assert served.http.get("/health").status_code == 200
    assert sorted(p.name for p in (tmp_path / "library").iterdir()) == ["anna", "bert"]


def test_a_token_of_the_environment_is_asked_for(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path / "library", KVSNAP_SERVER_TOKEN="t" * 20) as served:
        assert served.http.get("/v1/models").status_code == 401
        assert [m.id for m in served.openai("t" * 20).models.list()] == ["tiny"]


def test_a_server_for_others_without_a_token_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvsnap", "serve", "--host", "0.0.0.0", "--library", str(tmp_path)],  # noqa: S104  # noqa: S104
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--token-file" in done.stderr


def test_no_text_of_a_client_is_in_the_log(server: Served) -> None:
    server.say(user(f"A {WORD}."), "logged")
    server.post({"messages": [{"role": WORD, "content": WORD}]}, WORD)
    server.post({"messages": user(WORD), "stop": WORD, "n": 2})
    server.http.get(f"/v1/sessions/{WORD}?{WORD}")
    server.http.get(f"/{WORD}", headers={"User-Agent": WORD})
    log = server.log.read_text(encoding="utf-8")
    assert WORD not in log
    assert "- POST chat 200 " in log
    assert "- POST chat 400 " in log
    assert "- GET session 404 " in log

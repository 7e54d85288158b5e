"""What a request may say: each member is checked, what is not done is refused by name, tokens, and whose turn it is."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from kvsnap.errors import BusyError, CompatibilityError, FormatError, InputError, MissingError, StorageError
from kvsnap.layout import Sampler
from kvsnap.server import Limits, Settings, Tokens, read_token, read_tokens
from kvsnap.server.asking import parse
from kvsnap.server.gate import Gate, is_loopback
from kvsnap.server.refusals import RefusalError, refused
from kvsnap.server.running import bound
from kvsnap.server.tenants import Tenant
from kvsnap.server.waiting import Line

SETTINGS = Settings(model="tiny", sampler=Sampler(temperature=0.5), limits=Limits(max_tokens=100, messages=3))
SAID = [{"role": "user", "content": "x"}]


def body(**members: Any) -> bytes:
    return json.dumps({"messages": SAID, **members}).encode()


def test_what_is_not_said_is_the_default_and_what_does_no_harm_is_left() -> None:
    asked = parse(body(user="me", store=False, metadata={}, n=1, logit_bias={}, modalities=["text"]), SETTINGS)
    assert (asked.max_tokens, asked.stop, asked.stream, asked.usage) == (100, (), False, False)
    assert asked.sampler == Sampler(temperature=0.5)
    assert parse(body(temperature=0, seed=-1, top_k=3), SETTINGS).sampler == Sampler(seed=2**64 - 1, top_k=3)
    assert parse(body(max_tokens=3, max_completion_tokens=5), SETTINGS).max_tokens == 5
    assert parse(body(stop="a"), SETTINGS).stop == ("a",)
    assert parse(body(stream=True, stream_options={"include_usage": True}), SETTINGS).usage is True


@pytest.mark.parametrize(
    ("members", "param", "code"),
    [
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"n": True}, "n", "unsupported_parameter"),
        ({"logit_bias": {"1": 2}}, "logit_bias", "unsupported_parameter"),
        ({"logprobs": True}, "logprobs", "unsupported_parameter"),
        ({"presence_penalty": 0.5}, "presence_penalty", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"functions": [{}]}, "functions", "unsupported_parameter"),
        ({"audio": {"voice": "x"}}, "audio", "unsupported_parameter"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "unsupported_parameter"),
        ({"tool_choice": "required", "tools": [{}]}, "tool_choice", "unsupported_parameter"),
        ({"tools": "x"}, "tools", "invalid_value"),
        ({"model": "gpt"}, "model", "model_not_found"),
        ({"model": 1}, "model", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 101}, "max_tokens", "invalid_value"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens", "invalid_value"),
        ({"max_tokens": True}, "max_tokens", "invalid_value"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"temperature": True}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"seed": 1.5}, "seed", "invalid_value"),
        ({"seed": 2**70}, "seed", "invalid_value"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stop": [1]}, "stop", "invalid_value"),
        ({"stop": ["x"] * 17}, "stop", "invalid_value"),
        ({"stream": 1}, "stream", "invalid_value"),
        ({"stream_options": 1}, "stream_options", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "x"}, "messages", "invalid_value"),
        ({"messages": SAID * 4}, "messages", "invalid_value"),
        ({"messages": ["x"]}, "messages[0]", "invalid_value"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": [], "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content", "invalid_value"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]", "unsupported_parameter"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]", "unsupported_parameter",
        ),
        ({"messages": [{"role": "assistant", "content": "", "refusal": "no"}]}, "messages[0].refusal",
         "unsupported_parameter"),
    ],
)  # fmt: skip
def test_each_wrong_member_is_named(members: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(RefusalError) as error:
        parse(body(**members), SETTINGS)
    told = refused(error.value)
    assert told.status == (404 if code == "model_not_found" else 400)
    assert told.body["error"]["type"] == "invalid_request_error"
    assert (told.body["error"]["param"], told.body["error"]["code"]) == (param, code)


@pytest.mark.parametrize(
    "raw",
    [
        b"{", b"[]", b"1", b"\xff\xfe", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"a": NaN}',
        b"[" * 100_000, b'{"a":' * 50 + b"1" + b"}" * 50, b'{"a": ' + b"9" * 5000 + b"}", b"\x00",
    ],
    ids=range(10),
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_400(raw: bytes) -> None:
    with pytest.raises(RefusalError) as error:
        parse(raw, SETTINGS)
    assert (error.value.status, error.value.code) == (400, "invalid_json")


def test_errors_have_a_status_and_tell_no_path_of_the_server() -> None:
    for error, status in (
        (InputError("x", path="/home/me"), 400), (MissingError("x", path="/home/me"), 404),
        (BusyError("x", path="/home/me"), 409), (CompatibilityError("x", path="/home/me"), 409),
        (StorageError("x", path="/home/me"), 507), (FormatError("x", path="/home/me"), 500),
    ):  # fmt: skip
        told = refused(error)
        assert told.status == status
        assert set(told.body["error"]) == {"message", "type", "param", "code"}
        assert "/home" not in json.dumps(told.body)
    assert refused(BusyError("x")).headers["Retry-After"] == "1"


def test_limits_and_settings_are_checked() -> None:
    for wrong in (
        {"body_bytes": 0},
        {"max_tokens": 0},
        {"waiting": -1},
        {"request_s": 0.0},
        {"request_s": float("nan")},
    ):
        with pytest.raises(InputError):
            Limits(**wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError):
        Settings(model="x", min_reuse=0)


# -- tokens ----------------------------------------------------------------------------------------------------------


def test_a_token_means_its_tenant_and_nothing_else_does(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# who is who\nanna {'a' * 20}\n\nbert {'b' * 20}\nanna {'c' * 20}\n", encoding="ascii")
    tokens = read_tokens(file, str(tmp_path / "all"))
    anna, bert = Tenant("anna", str(tmp_path / "all" / "anna")), Tenant("bert", str(tmp_path / "all" / "bert"))
    assert tokens.tenants == (anna, bert)
    for letter, tenant in (("a", anna), ("b", bert), ("c", anna)):
        assert tokens.tenant_of(f"Bearer {letter * 20}") == tenant
        assert tokens.tenant_of(f"bearer  {letter * 20} ") == tenant
    for wrong in (
        "",
        "Bearer",
        f"Bearer {'a' * 19}",
        f"Bearer {'a' * 21}",
        f"Basic {'a' * 20}",
        "a" * 20,
        "Bearer \udcff",
    ):
        assert tokens.tenant_of(wrong) is None


@pytest.mark.parametrize("text", ["", "# none\n", "anna\n", "anna a b\n", "../x " + "a" * 20, "anna short\n",
                                  "anna " + "a" * 20 + "\nbert " + "a" * 20, "anna \u00e4" + "a" * 20])  # fmt: skip
def test_a_file_of_tokens_that_is_wrong_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(text, encoding="utf-8")
    with pytest.raises((FormatError, InputError)) as error:
        read_tokens(file, "x")
    assert "a" * 20 not in str(error.value)


def test_a_file_with_one_token_is_read(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"  {'t' * 30}\n", encoding="ascii")
    assert Tokens.of(read_token(file), "lib").tenant_of(f"Bearer {'t' * 30}") == Tenant("", "lib")
    with pytest.raises(MissingError):
        read_token(tmp_path / "gone")
    file.write_text("short", encoding="ascii")
    with pytest.raises(InputError):
        read_token(file)


# -- the gate --------------------------------------------------------------------------------------------------------


def status_of(gate: Gate, **headers: str) -> int:
    found = []

    async def send(message: Any) -> None:
        found.append(message.get("status"))

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": raw, "scheme": "http",
             "query_string": b"", "server": ("127.0.0.1", 1)}  # fmt: skip
    asyncio.run(gate(scope, None, send))
    return int(next(s for s in found if s))


async def fine(scope: Any, receive: Any, send: Any) -> None:
    assert scope["kvsnap.tenant"] == Tenant("", "lib")
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def test_a_page_in_a_browser_is_not_answered_without_a_token() -> None:
    gate = Gate(fine, None, Tenant("", "lib"))
    assert status_of(gate, host="127.0.0.1:8765") == 200
    assert status_of(gate, host="localhost", origin="http://localhost:3000") == 200
    assert status_of(gate, host="[::1]:80") == 200
    assert status_of(gate, host="evil.example") == 403
    assert status_of(gate, host="localhost", origin="https://evil.example") == 403
    assert status_of(gate, host="localhost", origin="null") == 403
    assert status_of(gate) == 403
    with_token = Gate(fine, Tokens.of("t" * 20, "lib"), None)
    assert status_of(with_token, host="model.example", authorization=f"Bearer {'t' * 20}") == 200
    assert status_of(with_token, host="localhost") == 401


def test_an_address_for_others_needs_a_token() -> None:
    for host in ("0.0.0.0", "::"):  # noqa: S104 # that is what is refused
        with pytest.raises((InputError, StorageError)) as error:
            bound(host, 0, has_tokens=False)
        assert isinstance(error.value, InputError) or host == "::"  # where there is no IPv6
    with bound("0.0.0.0", 0, has_tokens=True) as taken:  # noqa: S104
        assert taken.getsockname()[1]
    with bound("localhost", 0, has_tokens=False) as taken:
        taken.listen()
        with pytest.raises(StorageError):
            bound("127.0.0.1", taken.getsockname()[1], has_tokens=False)
    with pytest.raises(StorageError):
        bound("no-such-host.invalid", 0, has_tokens=True)
    assert is_loopback("127.8.9.1")
    assert not is_loopback("localhost.evil.example")


# -- the line --------------------------------------------------------------------------------------------------------


def run_line(scenario: Any, limit: int = 10) -> Any:
    """Run a scenario with a line whose thread is held by a first piece of work until `go` is set."""

    async def main() -> Any:
        line, held, go = Line(limit), threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            assert go.wait(30)

        first = asyncio.ensure_future(line.run("first", hold))
        await asyncio.get_running_loop().run_in_executor(None, held.wait, 30)
        try:
            return await scenario(line, go)
        finally:
            go.set()
            await first
            line.finish(lambda: None)

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_tenants_take_turns_and_within_one_the_first_comes_first() -> None:
    async def scenario(line: Line, go: threading.Event) -> list[str]:
        done: list[str] = []
        asked = [("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("b", "b2")]
        waiting = []
        for tenant, name in asked:
            waiting.append(asyncio.ensure_future(line.run(tenant, lambda name=name: done.append(name))))
            await asyncio.sleep(0)
        assert line.n_waiting == 6
        go.set()
        await asyncio.gather(*waiting)
        return done

    assert run_line(scenario) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_place_can_be_given_up_and_one_tenant_cannot_take_all() -> None:
    async def scenario(line: Line, go: threading.Event) -> None:
        done: list[str] = []
        leaving = [asyncio.ensure_future(line.run("a", lambda: done.append("left"))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(RefusalError) as error:
            await line.run("a", lambda: done.append("too many"))
        assert (error.value.status, error.value.headers["Retry-After"]) == (429, "1")
        other = asyncio.ensure_future(line.run("b", lambda: done.append("b")))
        await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        staying = asyncio.ensure_future(line.run("a", lambda: done.append("a")))
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(other, staying)
        assert sorted(done) == ["a", "b"]

    run_line(scenario, limit=2)


def test_work_that_is_left_or_fails_holds_up_nobody() -> None:
    async def scenario(line: Line, go: threading.Event) -> None:
        started, end = threading.Event(), threading.Event()

        def work() -> None:
            started.set()
            assert end.wait(30)
            raise ZeroDivisionError

        left = asyncio.ensure_future(line.run("a", work))
        go.set()
        await asyncio.get_running_loop().run_in_executor(None, started.wait, 30)
        left.cancel()
        behind = asyncio.ensure_future(line.run("a", lambda: "behind"))
        await asyncio.sleep(0)
        assert not behind.done()
        end.set()
        assert await behind == "behind"
        with pytest.raises(ZeroDivisionError):
            await line.run("a", lambda: 1 / 0)
        assert await line.run("a", lambda: "after") == "after"

    run_line(scenario)


def test_a_line_that_stops_refuses_those_who_wait() -> None:
    async def scenario(line: Line, go: threading.Event) -> None:
        waiting = asyncio.ensure_future(line.run("a", lambda: "never"))
        await asyncio.sleep(0)
        line.stop()
        for task in (waiting, line.run("a", lambda: "never")):
            with pytest.raises(RefusalError) as error:
                await task
            assert (error.value.status, error.value.code) == (503, "stopping")

    run_line(scenario)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("temperatur", "temperature"), ("max_token", "max_tokens"), ("top-p", "top_p"), ("message", "messages"),
     ("logit_bais", "logit_bias"), ("Stream", "stream")],
)  # fmt: skip
def test_a_member_that_is_misspelt_is_refused_and_the_right_one_named(name: str, meant: str) -> None:
    with pytest.raises(RefusalError, match=f"{meant} is meant") as caught:
        parse(body(**{name: 1}), SETTINGS)
    assert caught.value.param == name


def test_members_of_other_programs_change_nothing() -> None:
    others = (
        "typical_p",
        "min_tokens",
        "n_predict",
        "mirostat",
        "user",
        "metadata",
        "top_a",
        "ignore_eos",
        "prediction",
    )
    assert parse(body(**dict.fromkeys(others, 1)), SETTINGS) == parse(body(), SETTINGS)

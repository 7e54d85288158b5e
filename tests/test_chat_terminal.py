"""The command `chat` in a real terminal (tmux), and killed in the middle of an answer."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvsnap

pytest.importorskip("torch")
pytest.importorskip("prompt_toolkit")
from chat_directory import save_chat

pytestmark = pytest.mark.engine
in_terminal = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
PATIENCE = 120.0
"""Seconds after which a screen that does not come is a failure; no test measures a time."""


class Screen:
    """A terminal of 80 columns and 24 lines, in a tmux server of its own."""

    def __init__(self, socket: str, environment: dict[str, str], *args: object) -> None:
        self._socket = socket
        command = " ".join(f"'{a}'" for a in (sys.executable, "-m", "kvsnap", "chat", *map(str, args)))
        variables = " ".join(f"{name}='{value}'" for name, value in environment.items())
        self._tmux("-f", os.devnull, "new-session", "-d", "-x", "80", "-y", "24", f"env {variables} {command}; "
                   "echo left with $?; exec sleep 600")  # fmt: skip

    def _tmux(self, *args: str) -> str:
        done = subprocess.run(
            ["tmux", "-L", self._socket, "-u", *args], capture_output=True, text=True, check=True, encoding="utf-8"
        )
        return done.stdout

    def text(self, *, escapes: bool = False) -> str:
        return self._tmux("capture-pane", "-p", *(["-e"] if escapes else []))

    def type(self, text: str, *keys: str) -> None:
        """Type a text as it is, then keys by their names."""
        if text:
            self._tmux("send-keys", "-l", text)
        if keys:
            self._tmux("send-keys", *keys)

    def paste(self, text: str) -> None:
        self._tmux("set-buffer", text)
        self._tmux("paste-buffer", "-p")

    def resize(self, columns: int, lines: int) -> None:
        self._tmux("resize-window", "-x", str(columns), "-y", str(lines))

    def until(self, wanted: str | Callable[[str], object]) -> str:
        """Wait for a pattern on the screen, and return the screen."""

        def found(text: str) -> object:
            return re.search(wanted, text) if isinstance(wanted, str) else wanted(text)

        deadline = time.monotonic() + PATIENCE
        while not found(self.text()):
            assert time.monotonic() < deadline, f"{wanted!r} is not on the screen:\n{self.text()}"
            time.sleep(0.1)
        return self.text()

    def hang_up(self) -> None:
        self._tmux("kill-session")

    def close(self) -> None:
        subprocess.run(["tmux", "-L", self._socket, "kill-server"], capture_output=True, check=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("models")
    return {"ends": save_chat(made / "ends"), "endless": save_chat(made / "endless", ends=False, context=8192)}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {
        "PYTHONPATH": str(Path(kvsnap.__file__).parent.parent), "KVSNAP_LIBRARY": str(tmp_path / "library"),
        "XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1",
    }  # fmt: skip


@pytest.fixture
def screen(tmp_path: Path, environment: dict[str, str]) -> Iterator[Callable[..., Screen]]:
    opened: list[Screen] = []

    def start(*args: object, **variables: str) -> Screen:
        made = Screen(f"kvsnap-{os.getpid()}-{len(opened)}-{tmp_path.name}", {**environment, **variables}, *args)
        opened.append(made)
        return made

    yield start
    for made in opened:
        made.close()


def messages(tmp_path: Path, name: str = "chat") -> list[tuple[str, str]]:
    with kvsnap.Library(tmp_path / "library", readonly=True) as library:
        session = library.open(name, readonly=True)
        with session:
            return [(str(m["role"]), str(m["content"])) for m in session.messages or ()]


@in_terminal
def test_messages_of_several_lines_pasted_and_wide_ones_arrive_whole(
    screen: Callable[..., Screen], models: dict[str, Path], tmp_path: Path
) -> None:
    shown = screen("--model", models["ends"])
    shown.until("a new conversation")
    shown.until("\u203a")
    said = []
    for typed in (
        lambda: shown.type("W\u00f6rld \U0001f680 \u4e00\u4e01", "Enter"),
        lambda: (shown.type("one", "Escape", "Enter"), shown.type("two", "Enter")),
        lambda: (shown.type("three\\", "Enter"), shown.type("four", "Enter")),
        lambda: (shown.paste("five\nsix\n:seven"), shown.type("", "Enter")),
        lambda: shown.type("::help", "Enter"),
    ):
        before = len(said)
        typed()
        shown.until(lambda text, before=before: text.count("\u203a") > 1 and len(messages(tmp_path)) == 2 * before + 2)
        said = [text for role, text in messages(tmp_path) if role == "user"]
    assert said == ["W\u00f6rld \U0001f680 \u4e00\u4e01", "one\ntwo", "three\nfour", "five\nsix\n:seven", ":help"]
    bar = shown.until(r"@chat \u00b7 ends \u00b7 \d+/2,048 tokens \u00b7 reused \d+, recomputed 0")
    shown.resize(30, 20)
    shown.until(r"@chat \u00b7 ends *\n|@chat \u00b7 ends \u00b7 \d+/2,048 *\n?")
    shown.resize(100, 30)
    shown.until("wrote")
    assert "\u203a" in bar
    shown.type("never said", "C-c")
    shown.type("", "C-d")
    shown.until("left with 0")
    assert len(messages(tmp_path)) == 10
    typed_file = tmp_path / "state" / "kvsnap" / "chat-history"
    assert stat.S_IMODE(typed_file.stat().st_mode) == 0o600
    assert "five" in typed_file.read_text(encoding="utf-8")


@in_terminal
def test_an_answer_is_stopped_gone_on_with_and_dropped(
    screen: Callable[..., Screen], models: dict[str, Path], tmp_path: Path
) -> None:
    shown = screen("--model", models["endless"], "--max-tokens", 8000, "--no-history")
    shown.until("\u203a")
    shown.type("go on for ever", "Enter")
    shown.until(lambda text: len(text.strip()) > 300)
    shown.type("", "C-c")
    shown.until("cut off: it was interrupted")
    first = messages(tmp_path)
    assert first[0] == ("user", "go on for ever")
    shown.type(":continue", "Enter")
    shown.until(lambda _: len(messages(tmp_path)[1][1]) > len(first[1][1]))
    shown.type("", "C-c")
    shown.until(lambda text: text.count("cut off: it was interrupted") == 2)
    second = messages(tmp_path)
    assert second[1][1].startswith(first[1][1])
    shown.type("", "C-d")
    shown.until("left with 0")
    assert not (tmp_path / "state").exists()

    again = screen(NO_COLOR="1")  # the model is the one that the session names
    text = again.until("this answer was cut off: :continue goes on")
    assert "\u203a go on for ever" in text
    assert re.search(r"tokens are warm, restored in", text)
    assert "\x1b[" not in again.text(escapes=True)
    again.type(":drp", "Enter")
    again.until("did you mean :drop")
    again.type(":drop", "Enter")
    again.until(r"nothing is left\n+\u203a go on for ever")  # there to be said in another way
    again.type(" again", "C-d")  # a line that is not empty is not left
    again.type("", "C-c")
    again.type("", "C-d")
    again.until("left with 0")
    assert messages(tmp_path) == []


@in_terminal
def test_what_is_typed_while_it_answers_comes_next_and_commands_are_completed(
    screen: Callable[..., Screen], models: dict[str, Path], tmp_path: Path
) -> None:
    shown = screen("--model", models["endless"], "--max-tokens", 60)
    coloured = shown.until("\u203a") and shown.text(escapes=True)
    assert "\x1b[" in coloured
    shown.type("first", "Enter")
    shown.type(":history", "Enter")
    shown.type("second")
    shown.until(r"\u203a second")
    assert ":rewind 1   user      first" in shown.text()
    assert len(messages(tmp_path)) == 2
    shown.type("", "C-c")
    shown.type(":se")
    shown.until(r":sessions")
    shown.type("t temp")
    shown.until("temperature=")
    shown.type("", "Tab")
    shown.until(r"\u203a :set temperature=")
    shown.type("0.5", "Enter")
    shown.until("temperature=0.5; max_tokens=60")
    shown.type("", "Up", "Up", "Up", "Enter")  # the message before the two commands
    shown.until(lambda _: len(messages(tmp_path)) == 4)
    assert messages(tmp_path)[2] == ("user", "first")
    shown.type("", "C-c")
    shown.type(":rewind", "Enter")
    shown.until(r"back by 1 turn; 1 message of yours")
    shown.type("", "C-c")
    shown.type("third", "Enter")
    shown.until(lambda _: len(messages(tmp_path)) == 4)


@in_terminal
def test_a_terminal_that_is_closed_loses_no_token(
    screen: Callable[..., Screen], models: dict[str, Path], tmp_path: Path
) -> None:
    shown = screen("--model", models["endless"], "--max-tokens", 8000, "--every", 0)
    shown.until("\u203a")
    shown.type("go on", "Enter")
    seen = shown.until(lambda text: len(text.strip()) > 300)
    shown.hang_up()
    deadline = time.monotonic() + PATIENCE
    while len(messages(tmp_path)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    kept = messages(tmp_path)[1][1].replace("\n", "")
    assert seen.split("go on", 1)[1].replace("\n", "").strip()[:100] == kept[: len(kept)].strip()[:100]


def started(environment: dict[str, str], *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvsnap", "chat", *map(str, args)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, encoding="utf-8", env={**os.environ, **environment},
    )  # fmt: skip


def turns(environment: dict[str, str], text: str, *args: object) -> list[Any]:
    process = started(environment, "--json", *args)
    out, _ = process.communicate(text)
    assert process.returncode == 0
    return [json.loads(line) for line in out.splitlines()]


def test_killed_at_any_moment_it_goes_on_with_at_most_every_tokens_less(
    models: dict[str, Path], environment: dict[str, str], tmp_path: Path
) -> None:
    every, total = 8, 240
    whole = turns(environment, "tell me\n", "whole", "--model", models["endless"], "--max-tokens", total)[0]
    text = whole["text"]
    seen_most = 0
    for number, n_seen in enumerate((1, 20, 55)):
        name = f"killed{number}"
        process = started(environment, name, "--model", models["endless"], "--max-tokens", total, "--every", every)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("tell me\n")
        process.stdin.flush()
        seen = process.stdout.read(n_seen)
        process.send_signal(signal.SIGKILL)
        seen += process.stdout.read()
        process.wait()
        assert text.startswith(seen)
        seen_most = max(seen_most, len(seen))
        with kvsnap.Library(tmp_path / "library") as library, library.open(name, create=False) as session:
            assert not session.complete
            kept = session.messages or ()
            assert kept[0]["content"] == "tell me"
            answered = str(kept[1]["content"]) if len(kept) > 1 else ""
            assert text.startswith(answered)
            assert len(answered) > len(seen) - every - 1  # a character is a token here
        rest = turns(environment, ":continue\n", name, "--max-tokens", total - len(answered))[1]
        assert answered + rest["text"] == text
        assert rest["recomputed"] == 0
        assert rest["logprobs"] == whole["logprobs"][-len(rest["logprobs"]) :]
    assert seen_most < len(text)  # else nothing was killed in the middle

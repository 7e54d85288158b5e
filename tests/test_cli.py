"""The command line on files, without torch: what it prints, its JSON, its exit codes, and that nothing else changes."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

import kvsnap
from kvsnap import cli
from kvsnap.cli import _output, root, run
from kvsnap.cli._model import choose_model, idle_settings, parse_sampler, sampler_state
from kvsnap.errors import InputError
from kvsnap.layout import Sampler
from kvsnap.session import Session
from synthetic import SAMPLER, snapshot

TOKENS = (11, 12, 13, 14, 15, 16)


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)  # fails when anything else stands on stdout


Call = Callable[..., Done]


@pytest.fixture
def kv(capsys: pytest.CaptureFixture[str]) -> Call:
    def call(*args: object) -> Done:
        capsys.readouterr()
        code = run([str(a) for a in args])
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    path = tmp_path / "sealed.kvsnap"
    kvsnap.save(
        snapshot(TOKENS, layers=2, n_prompt=4, sampler=SAMPLER, text="a [small]\nexample", metadata={"title": "t"}),
        path,
    )
    return path


@pytest.fixture
def session(tmp_path: Path) -> Path:
    path = tmp_path / "session.kvsnap"
    with Session.open(path) as opened:
        opened.append(snapshot(TOKENS[:4], text="four"))
        opened.append(snapshot(TOKENS, n_prompt=4, text="four six"), complete=False)
    return path


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# -- the program -----------------------------------------------------------------------------------------------------


def test_every_command_explains_itself_with_examples(kv: Call) -> None:
    assert kv("--help").code == 0
    assert set(root.commands) == {
        "generate", "resume", "info", "cat", "head", "log", "check", "verify", "truncate", "reset", "sweep", "demo",
        "convert", "fork", "compact", "rewind", "ls", "find", "rm", "rename", "pin", "unpin", "prune", "collect",
        "doctor", "repair", "keygen", "split", "join", "edit", "serve", "attention", "quality", "chat", "growth",
        "diff", "stats", "report",
    }  # fmt: skip
    for name, command in root.commands.items():
        shown = kv(name, "--help")
        assert shown.code == 0
        assert "Examples:" in shown.out
        assert f"kvsnap {name}" in shown.out.split("Examples:")[1]
        assert "--json" in shown.out
        assert all(p.help for p in command.params if isinstance(p, click.Option))


def test_the_page_of_the_docs_names_every_command_and_option() -> None:
    page = (Path(__file__).parent.parent / "docs" / "cli.md").read_text(encoding="utf-8")
    for name, command in root.commands.items():
        section = page.split(f"## `{name}`", 1)
        assert len(section) == 2, name
        text = section[1].split("\n## ", 1)[0]
        for option in command.params:
            if isinstance(option, click.Option) and option.name not in ("as_json", "help"):
                shared = {"model", "dtype", "attention", "accept", "max_tokens", "codec", "library"}
                shared |= {"key_file", "key_command", "encrypt", "cipher", "key_label", "adapter", *Sampler.__slots__}
                where = page if option.name in shared else text
                assert f"`{option.opts[-1]}" in where or f"{option.opts[0]}" in where, (name, option.opts)


def test_the_library_loads_no_command_line_and_the_command_line_no_torch() -> None:
    code = "import sys, kvsnap; print([m for m in ('click', 'rich', 'torch') if m in sys.modules]); import kvsnap.cli; "
    code += "print([m for m in ('rich', 'torch', 'transformers', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "[]"]


def test_python_dash_m_runs_it(sealed: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvsnap", "info", str(sealed), "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["n_tokens"] == 6


def test_wrong_usage_is_2(kv: Call) -> None:
    for args in (("no-such-command",), ("info",), ("info", "a", "--no-such"), ("head", "f", "x", "1")):
        done = kv(*args)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith("kvsnap: ")
        assert done.err.count("\n") == 1
    error = kv("info", "--json").data["error"]
    assert (error["kind"], error["exit_code"]) == ("usage", 2)
    assert set(error) == {*kv("info", "gone", "--json").data["error"]}  # the same fields as any other error
    assert "--save" in kv("generate", "x", "--sav", "y").err  # did you mean


@pytest.mark.usefixtures("no_model")
def test_warnings_of_idle_settings_are_told_once_and_only_then() -> None:
    assert idle_settings({"top_p": 0.5, "seed": 1}, Sampler(top_p=0.5, seed=1)) == [
        "--top-p, --seed do nothing without --temperature: the most probable token is always taken"
    ]
    assert idle_settings({"top_p": 0.5}, Sampler(temperature=1, top_p=0.5)) == []
    assert idle_settings({"temperature": 0.0, "seed": 1}, Sampler(seed=1)) == []
    assert idle_settings({"repetition_penalty": 1.5}, Sampler(repetition_penalty=1.5)) == []


def test_a_bug_is_1_and_asks_for_a_report(kv: Call, sealed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: str, **_: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(kvsnap, "inspect", broken)
    done = kv("info", sealed)
    assert done.code == 1
    assert "report" in done.err
    assert "ZeroDivisionError: oh" in done.err
    assert "Traceback" not in done.err
    assert kv("info", sealed, "--json").data["error"]["kind"] == "bug"
    assert "path" in kv("info", sealed, "--json").data["error"]
    monkeypatch.setenv("KVSNAP_DEBUG", "1")
    assert "Traceback" in kv("info", sealed).err


def test_an_interrupt_while_the_command_is_loaded_is_130_too() -> None:
    program = """
import runpy, sys
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "kvsnap.cli._report":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
runpy.run_module("kvsnap", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "kvsnap: interrupted\n")


def test_an_interrupt_is_130(kv: Call, sealed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: str, **_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(kvsnap, "inspect", interrupted)
    done = kv("info", sealed)
    assert (done.code, done.err) == (130, "kvsnap: interrupted\n")
    error = kv("info", sealed, "--json").data["error"]
    assert (error["kind"], error["exit_code"], error["path"]) == ("interrupted", 130, None)


def test_an_interrupt_that_a_library_swallows_is_130_too(
    kv: Call, sealed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swallowed(path: str, **_: object) -> None:
        if sent:
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        raise ValueError("of a library in C")

    monkeypatch.setattr(kvsnap, "inspect", swallowed)
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for sent in (False, True):
            monkeypatch.setattr("sys.argv", ["kvsnap", "info", str(sealed)])
            with pytest.raises(SystemExit) as ended:
                cli.main()
            assert ended.value.code == (130 if sent else 1)
        sent = False
        assert kv("info", sealed).code == 130  # so soon behind it
        cli._interrupt.at -= 3
        assert kv("info", sealed).code == 1
    finally:
        signal.signal(signal.SIGINT, before)
        cli._interrupt.at = -math.inf


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGPIPE")
def test_a_broken_pipe_is_quiet(tmp_path: Path) -> None:
    path = tmp_path / "long.kvsnap"
    kvsnap.save(snapshot(TOKENS, text="long " * 400_000), path)
    child = subprocess.Popen(
        [sys.executable, "-m", "kvsnap", "cat", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait() == 141


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, patience: float) -> str:
    monkeypatch.setattr(_output, "_PATIENCE", patience)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream)
    with _output.progress("working") as report:
        for done in range(5):
            report(done, 5)
    return stream.getvalue()


def test_a_bar_is_drawn_on_a_terminal_when_work_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "working" in drawn(monkeypatch, Terminal(), 0.0)
    assert drawn(monkeypatch, Terminal(), 60.0) == ""
    assert drawn(monkeypatch, io.StringIO(), 0.0) == ""


def test_a_sign_of_life_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_output, "_PATIENCE", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with _output.waiting("thinking"):
            time.sleep(0.3)
        assert ("thinking" in stream.getvalue()) is shown


def narrow(monkeypatch: pytest.MonkeyPatch, columns: int, *rows: tuple[str, ...]) -> list[str]:
    stream = Terminal()
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", stream)
    made = _output.table("field", "verdict", "decides", "saved", "found")
    for row in rows:
        made.add_row(*row)
    _output.show_table(made)
    return stream.getvalue().split("\n")


@pytest.mark.parametrize("columns", [30, 40, 60, 80])
def test_a_narrow_terminal_breaks_no_word(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    row = ("runtime.matmul_precision", "[bold]differ[/bold]", "exactness", "nothing was recorded", "highest of all")
    shown = narrow(monkeypatch, columns, row, row)
    assert all(len(line.rstrip()) <= columns for line in shown)
    for word in ("runtime.matmul_precision", "differ", "exactness", "nothing", "recorded", "highest"):
        assert sum(word in line for line in shown) >= 2, (word, shown)


def wide(monkeypatch: pytest.MonkeyPatch, columns: int, spare: tuple[str, ...]) -> tuple[str, str]:
    """Draw six columns of 16 characters, the names of which are in one word; return stdout and stderr."""
    streams = Terminal(), Terminal()
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    made = _output.table(*(f"c{n}" for n in range(6)), right=("c0",))
    for row in range(3):
        made.add_row(*(f"{'x' * 14}{row}{n}" for n in range(6)))
    _output.show_table(made, spare=spare, more="--all")
    return streams[0].getvalue(), streams[1].getvalue()


def test_a_narrow_terminal_does_without_spare_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, told = wide(monkeypatch, 80, ("c4", "c1", "c2"))
    assert max(map(len, shown.splitlines())) <= 80
    assert all("02" in line for line in shown.splitlines() if "00" in line)  # c2 was not needed
    assert "c4" not in shown
    assert "x04" not in shown
    assert "x05" in shown
    assert told == "too narrow for c4, c1: --all has all\n"


def test_a_wide_terminal_leaves_no_column_out(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, told = wide(monkeypatch, 120, ("c4", "c1", "c2"))
    assert "x04" in shown
    assert "x01" in shown
    assert told == ""


def test_a_narrow_terminal_breaks_no_size(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stdout", stream)
    made = _output.table("a file", "per token", "on disk", "text", right=("per token", "on disk"))
    made.add_row("story", "153.6 kB", "12.5 GB", "some words")
    _output.show_table(made)
    lines = stream.getvalue().splitlines()
    assert max(map(len, map(str.rstrip, lines))) <= 40
    assert any("153.6 kB" in line and "12.5 GB" in line for line in lines)
    assert not any("per token" in line for line in lines)  # names may be broken between words
    assert not any("some words" in line for line in lines)


def test_a_column_of_sentences_keeps_room_while_others_can_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def lines(columns: int) -> list[str]:
        stream = Terminal()
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", Terminal())
        made = _output.table("name", "begins", "where", "what")
        for n in range(3):
            made.add_row(f"chat{n}", "What is the capital of France? Answer in one sentence.", "w" * 24, "v" * 20)
        _output.show_table(made, spare=("where", "what"), roomy={"begins": 30})
        return [line for line in stream.getvalue().splitlines() if line.strip()]

    monkeypatch.setenv("TERM", "dumb")
    shown = lines(80)
    assert len(shown) == 2 + 3 * 2  # two lines each, and not six beside a column that nobody has room for
    assert any("v" * 20 in line for line in shown)
    assert not any("www" in line for line in shown)
    assert len(lines(30)) > 2 + 3 * 2  # nothing is left to spare: then it is wrapped as any other


def test_a_table_in_a_pipe_has_a_line_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    made = _output.table("name", "begins", "made with", "note")
    words = "What is the capital of France? Answer in one sentence. " * 4
    for n in range(3):
        made.add_row(f"a-session-{n}", words, "torch 2.13.0 " * 6, "last turn cut off")
    _output.show_table(made, spare=("made with",))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 + 3
    assert all(f"a-session-{n}" in line and words.strip() in line for n, line in enumerate(lines[2:]))


def test_rows_one_under_the_other_say_what_their_number_is(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, told = wide(monkeypatch, 40, ("c1",))
    assert shown.startswith(f"c0: {'x' * 14}00\n  c1: {'x' * 14}01\n")
    assert told == ""


def test_what_is_told_is_wrapped_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "the same tokens\nall values within the stored bound of each other"
    monkeypatch.setenv("COLUMNS", "30")
    for stream, lines in ((Terminal(), 3), (io.StringIO(), 2)):
        monkeypatch.setattr(sys, "stdout", stream)
        _output.tell(text)
        assert stream.getvalue().count("\n") == lines
        assert stream.getvalue().split() == text.split()


def test_remarks_are_wrapped_between_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stderr", stream)
    _output.remark("exact: ids and logits go on as if never interrupted by anything")
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 40
    assert "interrupted" in " ".join(lines)
    assert len(lines) == 2


# -- files that are not what they should be --------------------------------------------------------------------------


def newer(path: Path) -> None:
    """Raise the major version in the header, with its checksum put right: what a newer release would write."""
    import xxhash

    raw = bytearray(path.read_bytes())
    raw[8:10] = (2).to_bytes(2, "little")
    spot = next(
        n for n in range(16, 128)
        if path.read_bytes()[n : n + 8] == xxhash.xxh3_64_intdigest(path.read_bytes()[:n]).to_bytes(8, "little")
    )  # fmt: skip
    raw[spot : spot + 8] = xxhash.xxh3_64_intdigest(bytes(raw[:spot])).to_bytes(8, "little")
    path.write_bytes(raw)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-700])


def not_ours(path: Path) -> None:
    path.write_bytes(b"some other file, long enough to have a header" * 20)


COMMANDS = ("info", "cat", "verify", "log", "check", "resume", "sweep", "quality", "truncate", "head", "repair")
MORE = {
    "repair": ["-o", "new.kvsnap"],
    "truncate": ["2", "-o", "new.kvsnap"],
    "head": ["0", "0"],
    "sweep": ["--sampler", "greedy"],
    "quality": ["--codec", "q8"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("spoil", "code", "kind"),
    [(newer, 5, "version"), (cut_off, 6, "damaged"), (not_ours, 4, "format"), (Path.unlink, 3, "missing")],
)
def test_a_bad_file_is_told_by_its_exit_code(
    kv: Call, sealed: Path, command: str, spoil: Callable[[Path], None], code: int, kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(sealed.parent)
    spoil(sealed)
    before = digest(sealed) if sealed.exists() else ""
    done = kv(command, sealed, *MORE.get(command, []))
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("kvsnap: ")
    assert "sealed.kvsnap" in done.err
    data = kv(command, sealed, *MORE.get(command, []), "--json").data
    assert (data["files"][0] if command == "verify" else data)["error"]["kind"] == kind
    assert (digest(sealed) if sealed.exists() else "") == before
    assert not Path("new.kvsnap").exists()


def test_without_torch_one_line_says_what_to_install(
    kv: Call, tmp_path: Path, sealed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "torch", None)
    for args in (
        ("generate", "hello"),
        ("resume", sealed),
        ("check", sealed),
        ("sweep", sealed, "--sampler", "greedy"),
    ):
        done = kv(*args, "--model", model)
        assert (done.code, done.out) == (11, "")
        assert "pip install 'kvsnap[transformers]'" in done.err
        assert done.err.count("\n") == 1


# -- where a result would go is checked before the work --------------------------------------------------------------


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("a model was loaded before the arguments were checked")

    for module in ("_run", "_model"):
        monkeypatch.setattr(f"kvsnap.cli.{module}.open_engine", loaded)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["generate", ""], 2, "the prompt is empty"),
        (["generate"], 2, "give a prompt: a text, --prompt-file or --prompt-ids"),
        (["generate", "x", "--prompt-file", "y"], 2, "not both"),
        (["generate", "--prompt-file", "gone.txt"], 3, "no such prompt file"),
        (["generate", "x", "--max-tokens", "0"], 2, "expected 1 or more, found 0"),
        (["generate", "x", "--temperature", "-1"], 2, "temperature is out of range"),
        (["generate", "x", "--top-p", "0"], 2, "top_p is out of range"),
        (["generate", "x", "--save", "gone/x.kvsnap"], 3, "gone: no such directory"),
        (["generate", "x", "--save", "."], 2, "directory"),
        (["generate", "x", "--save", "session.kvsnap"], 2, "a session is not replaced"),
        (["generate", "x", "--session", "gone/x.kvsnap"], 3, "gone: no such directory"),
        (["generate", "x", "--session", "sealed.kvsnap"], 2, "a sealed snapshot takes no further turn"),
        (["resume", "sealed.kvsnap", "--append"], 2, "a sealed snapshot takes no further turn"),
        (["resume", "sealed.kvsnap", "--save", "gone/x.kvsnap"], 3, "gone: no such directory"),
        (["resume", "sealed.kvsnap", "--save", "session.kvsnap"], 2, "a session is not replaced"),
        (["resume", "sealed.kvsnap", "--max-tokens", "0"], 2, "expected 1 or more, found 0"),
        (["resume", "sealed.kvsnap", "--prompt", ""], 2, "the prompt is empty"),
        (["resume", "sealed.kvsnap", "--chat"], 2, "--chat needs"),
        (["resume", "empty.kvsnap"], 2, "holds no tokens"),
        (["generate", "x", "--save", ""], 2, "--save needs a file name"),
        (["generate", "x", "--session", ""], 2, "--session needs a file name"),
        (["generate", "x", "--save", "n" * 300], 14, "cannot be written"),
        (["generate", "x", "--save", "link"], 2, "a link or a device"),
        (["generate", "x", "--save", "sealed.kvsnap"], 2, "--overwrite"),
        (["generate", "x", "--save", "session.kvsnap", "--overwrite"], 2, "a session is not replaced"),
        (["generate", "x", "--save", "a", "--session", "./a"], 2, "names of their own"),
        (["generate", "--prompt-ids", "1 x"], 2, "numbers"),
        (["generate", "--prompt-ids", ""], 2, "numbers"),
        (["generate", "x", "--prompt-ids", "1"], 2, "not both"),
        (["generate", "--prompt-ids", "1", "--chat"], 2, "as they are"),
        (["resume", "sealed.kvsnap", "--save", "sealed.kvsnap"], 2, "--overwrite"),
        (["resume", "sealed.kvsnap", "--save", ""], 2, "--save needs a file name"),
        (["truncate", "sealed.kvsnap", "2", "-o", "sealed.kvsnap"], 2, "--overwrite"),
        (["truncate", "session.kvsnap", "-1"], 2, "expected 0 or more, found -1"),
        (["truncate", "session.kvsnap", "--", "-1"], 2, "expected 0 or more, found -1"),
        (["convert", "session.kvsnap", "sealed.kvsnap"], 2, "--overwrite"),
        (["convert", "sealed.kvsnap", "session.kvsnap", "--overwrite"], 2, "a session is not replaced"),
        (["demo", "--tokens", "0"], 2, "--tokens is too small"),
        (["demo", "--output", ""], 2, "needs the name of a directory"),
        (["sweep", "sealed.kvsnap"], 2, "--sampler"),
        (["sweep", "sealed.kvsnap", "--sampler", "heat=1"], 2, "found heat=1"),
        (["sweep", "sealed.kvsnap", "--sampler", "seed=x"], 2, "seed is no number"),
        (["sweep", "sealed.kvsnap", "--sampler", "greedy", "--max-tokens", "0"], 2, "1 or more, found 0"),
        (["head", "sealed.kvsnap", "0", "0", "-o", "x.txt"], 2, ".npy, .npz, .csv, .parquet"),
        (["head", "sealed.kvsnap", "0", "0", "-o", "gone/x.npy"], 3, "gone: no such directory"),
        (["head", "sealed.kvsnap", "9", "0"], 2, "no such layer; expected 0 to 1, found 9"),
        (["head", "sealed.kvsnap", "0", "2"], 2, "expected 0 to 1, found 2"),
        (["truncate", "sealed.kvsnap", "2"], 2, "-o NEW"),
        (["truncate", "session.kvsnap", "7"], 2, "expected 0 to 6, found 7"),
        (["truncate", "sealed.kvsnap", "2", "-o", "session.kvsnap"], 2, "a session is not replaced"),
        (["truncate", "sealed.kvsnap", "2", "-o", "gone/x"], 3, "gone: no such directory"),
        (["reset", "sealed.kvsnap"], 2, "a sealed snapshot is never changed"),
        (["cat", "sealed.kvsnap", "--prompt-only"], 2, "--model"),
        (["demo", "--half", "1"], 2, "--half is too small"),
        (["demo", "--output", "sealed.kvsnap"], 2, "a directory is needed"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_before_the_work(
    kv: Call, sealed: Path, session: Path, args: list[str], code: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sealed.parent)
    kvsnap.save(kvsnap.Snapshot(), "empty.kvsnap")
    Path("link").symlink_to("empty.kvsnap")
    before = {p.name: digest(p) for p in sealed.parent.iterdir()}
    done = kv(*args)
    assert (done.code, done.out) == (code, "")
    assert says in done.err
    assert done.err.count("\n") == 1
    if "cat" not in args:  # which gives no text then, and the ids
        args = [*args[: args.index("--")], "--json", *args[args.index("--") :]] if "--" in args else [*args, "--json"]
        assert kv(*args).data["error"]["exit_code"] == code
    assert {p.name: digest(p) for p in sealed.parent.iterdir()} == before


# -- info, cat, head -------------------------------------------------------------------------------------------------


def test_info_tells_what_is_there(kv: Call, sealed: Path, session: Path) -> None:
    shown = kv("info", sealed)
    assert shown.code == 0
    for text in ("synthetic", "6 (4 prompt, 2 generated)", "exact", "temperature 0.75", "seed 7, 3 numbers drawn",
                 "2 digests", "no forward pass", "sealed"):  # fmt: skip
        assert text in shown.out
    data = kv("info", sealed, "--json").data
    assert (data["n_tokens"], data["n_prompt"], data["num_heads"], data["use"]) == (6, 4, 2, "snapshot")
    assert data == json.loads(json.dumps(kvsnap.inspect(sealed).to_dict()))
    assert "last turn cut off" in kv("info", session).out


def test_info_names_the_loss_of_q8(kv: Call, sealed: Path) -> None:
    small = sealed.with_name("small.kvsnap")
    report = kvsnap.save(kvsnap.load(sealed), small, codec="q8")
    assert f"not exact: values off by up to {report.bound:.3g}" in kv("info", small).out


def test_cat_prints_text_or_tokens(kv: Call, sealed: Path) -> None:
    assert kv("cat", sealed).out == "a [small]\nexample\n"
    assert kv("cat", sealed, "--tokens").out == "prompt: 11 12 13 14\ngenerated: 15 16\n"
    assert kv("cat", sealed, "--tokens", "--generated-only").out == "generated: 15 16\n"
    data = kv("cat", sealed, "--json").data
    assert data["text"] == "a [small]\nexample"
    assert data["runs"] == [{"kind": "prompt", "tokens": [11, 12, 13, 14]}, {"kind": "generated", "tokens": [15, 16]}]
    assert kv("cat", sealed, "--prompt-only", "--json").data["n_tokens"] == 4
    assert kv("cat", sealed, "--prompt-only", "--generated-only").code == 2


def test_head_shows_and_exports_the_same_values_as_the_library(kv: Call, sealed: Path, tmp_path: Path) -> None:
    head = kvsnap.load(sealed).head(1, 1)
    assert head is not None
    data = kv("head", sealed, 1, 1, "--json").data
    assert data["shape"] == [6, 4]
    assert data["positions"] == [0, 5]
    assert data["k"]["max"] == pytest.approx(float(head.k.max()))
    assert all(" " not in name for name in data["k"])
    assert data["v"]["mean_norm"] == pytest.approx(float(np.linalg.norm(head.v, axis=1).mean()))
    assert data["k"] != kv("head", sealed, 0, 1, "--json").data["k"]
    assert "6 rows of 4" in kv("head", sealed, 1, 1).out
    kv("head", sealed, 1, 1, "-o", tmp_path / "x.npy")
    assert np.array_equal(np.load(tmp_path / "x.k.npy"), head.k)
    assert np.array_equal(np.load(tmp_path / "x.v.npy"), head.v)
    assert kv("head", sealed, 1, 1, "-o", tmp_path / "x.npz", "--json").data["written"] == [str(tmp_path / "x.npz")]
    with np.load(tmp_path / "x.npz") as held:
        assert np.array_equal(held["k"], head.k)
        assert held["positions"].tolist() == [0, 1, 2, 3, 4, 5]


# -- verify ----------------------------------------------------------------------------------------------------------


def test_verify_says_whole_or_names_what_is_lost(kv: Call, sealed: Path, session: Path) -> None:
    done = kv("verify", sealed, session)
    assert done.code == 0
    assert done.out.count(": whole, ") == 2
    k = kvsnap.load(sealed).head(0, 0)
    assert k is not None
    raw = bytearray(sealed.read_bytes())
    place = raw.index(k.k[2].tobytes())
    raw[place] ^= 1
    sealed.write_bytes(raw)
    done = kv("verify", sealed, session)
    assert done.code == 6
    assert "DAMAGED" in done.out
    assert "layer0.k" in done.out
    assert "tokens [0, 6)" in done.out
    data = kv("verify", sealed, session, "--json").data
    assert (data["ok"], [f["ok"] for f in data["files"]]) == (False, [False, True])
    assert data["files"][0]["damages"][0]["tensor"] == "layer0.k"


def test_repair_says_what_it_kept_and_what_is_lost(kv: Call, session: Path, tmp_path: Path) -> None:
    before, new = session.read_bytes(), tmp_path / "new.kvsnap"
    done = kv("repair", session, "-o", new)
    assert done.code == 0
    assert "complete" in done.out
    assert "NOT" not in done.out
    done = kv("repair", session, "-o", new)
    assert done.code == 2
    assert "writes a new one" in done.err
    raw = bytearray(before)
    with Session.open(session, readonly=True) as opened:
        turns, n_tokens = opened.history, opened.n_tokens
    raw[turns[-1].offset + 70] ^= 1  # the last COMMIT
    session.write_bytes(raw)
    done = kv("repair", session, "-o", tmp_path / "less.kvsnap")
    assert done.code == 1
    assert "NOT COMPLETE" in done.out
    assert "lost: " in done.out
    assert session.read_bytes() == raw
    data = kv("repair", session, "-o", tmp_path / "again.kvsnap", "--json").data
    assert data["complete"] is False
    assert data["n_tokens"] == turns[-2].n_tokens < n_tokens
    assert data["lost"][0]["live"] is True


def test_repair_keeps_ids_when_asked(kv: Call, sealed: Path, tmp_path: Path) -> None:
    snapshot = kvsnap.load(sealed)
    k = snapshot.head(0, 0)
    assert k is not None
    raw = bytearray(sealed.read_bytes())
    raw[raw.index(k.k[2].tobytes())] ^= 1
    del snapshot, k
    sealed.unlink()
    sealed.write_bytes(raw)
    done = kv("repair", sealed, "-o", tmp_path / "new.kvsnap")
    assert done.code == 6
    assert "--tokens" in done.err
    done = kv("repair", sealed, "-o", tmp_path / "new.kvsnap", "--tokens")
    assert done.code == 1
    assert "not evaluated" in done.out
    assert kvsnap.load(tmp_path / "new.kvsnap").tokens == kvsnap.load(sealed).tokens


def test_verify_goes_on_after_a_file_that_it_cannot_open(kv: Call, sealed: Path) -> None:
    done = kv("verify", sealed.with_name("gone"), sealed)
    assert done.code == 3
    assert "gone" in done.err
    assert "whole" in done.out


# -- sessions --------------------------------------------------------------------------------------------------------


def test_log_lists_turns_and_marks_the_one_cut_off(kv: Call, session: Path) -> None:
    turns = kv("log", session, "--json").data["turns"]
    assert [(t["operation"], t["complete"], t["n_tokens"]) for t in turns] == [
        ("reset", True, 0), ("append", True, 4), ("append", False, 6),
    ]  # fmt: skip
    assert kv("log", session).out.count("cut off") == 1


def test_log_calls_the_empty_beginning_created_and_a_reset_a_reset(kv: Call, session: Path) -> None:
    with Session.open(session) as opened:
        opened.reset()
    lines = [line.split() for line in kv("log", session).out.splitlines() if line.strip()[:1].isdigit()]
    assert [(line[0], line[3], "complete" in line) for line in lines] == [
        ("1", "created", False), ("2", "append", True), ("3", "append", False), ("4", "reset", True),
    ]  # fmt: skip
    assert "-6" in lines[-1]


def test_log_tells_why_a_turn_stopped(kv: Call, tmp_path: Path) -> None:
    path = tmp_path / "s.kvsnap"
    with Session.open(path) as opened:
        opened.append(snapshot(TOKENS[:4], metadata={"stop": "end"}))
        opened.append(snapshot(TOKENS, n_prompt=4, metadata={"stop": "context"}), complete=False)
        opened.truncate(4)
    turns = kv("log", path, "--json").data["turns"]
    assert [t["stop"] for t in turns] == [None, "end", "context", None]
    shown = kv("log", path).out
    assert shown.count("the context is full") == 1
    assert shown.count("the model ended it") == 1


def test_a_damaged_note_hides_no_turn(kv: Call, tmp_path: Path) -> None:
    path = tmp_path / "s.kvsnap"
    with Session.open(path) as opened:
        opened.append(snapshot(TOKENS[:4], metadata={"stop": "length"}), complete=False)
        opened.append(snapshot(TOKENS, n_prompt=4, metadata={"stop": "end"}))
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'"stop":"length"', b'"stop":"lenght"'))
    assert path.read_bytes() != raw
    assert [t["stop"] for t in kv("log", path, "--json").data["turns"]] == [None, None, "end"]


def test_rewind_undoes_a_truncate_and_a_reset(kv: Call, session: Path) -> None:
    commits = kv("log", session, "--json").data["turns"]
    kv("truncate", session, 4)
    kv("reset", session)
    assert "0 -> 6 tokens" in kv("rewind", session, commits[-1]["commit"]).out
    assert kvsnap.load(session).tokens == TOKENS
    data = kv("rewind", session, commits[-1]["commit"] + 1, "--json").data
    assert (data["n_tokens_before"], data["n_tokens"]) == (6, 4)
    assert [t["operation"] for t in kv("log", session, "--json").data["turns"]][-2:] == ["rewind", "rewind"]
    before = digest(session)
    refused = kv("rewind", session, 99)
    assert refused.code == 3
    assert "no such commit" in refused.err
    assert digest(session) == before


def test_fork_writes_a_session_that_goes_its_own_way(kv: Call, session: Path) -> None:
    kv("truncate", session, 4)
    before, new = digest(session), session.with_name("new.kvsnap")
    assert "4 tokens in" in kv("fork", session, new).out
    data = kv("fork", session, session.with_name("early.kvsnap"), "--commit", 3, "--at", 5, "--json").data
    assert data["n_tokens"] == 5
    assert kvsnap.load(session.with_name("early.kvsnap")).tokens == TOKENS[:5]
    kv("reset", new)
    assert digest(session) == before
    for refused, code in ((kv("fork", session, new), 2), (kv("fork", session, "x.kvsnap", "--at", 99), 2)):
        assert refused.code == code
    assert "there is a file of this name" in kv("fork", session, new).err


def test_compact_drops_what_was_cut_off(kv: Call, session: Path) -> None:
    kv("truncate", session, 4)
    before = kvsnap.inspect(session)
    data = kv("compact", session, "--json").data
    assert data["nbytes"] < data["nbytes_before"] == before.file_bytes
    assert kvsnap.load(session).tokens == TOKENS[:4]
    assert kvsnap.inspect(session).file_id == data["file_id"] != before.file_id
    assert "->" in kv("compact", session).out


def test_truncate_and_reset_are_turns_of_their_own(kv: Call, session: Path) -> None:
    data = kv("truncate", session, 4, "--json").data
    assert (data["n_tokens_before"], data["n_tokens"]) == (6, 4)
    assert data["written"] > 0
    assert kvsnap.load(session).tokens == TOKENS[:4]
    assert "4 -> 0 tokens" in kv("reset", session).out
    assert kvsnap.load(session).tokens == ()
    assert [t["operation"] for t in kv("log", session, "--json").data["turns"]][-2:] == ["truncate", "reset"]


def test_truncate_writes_the_start_of_a_sealed_file_as_a_new_one(kv: Call, sealed: Path) -> None:
    before = digest(sealed)
    new = sealed.with_name("new.kvsnap")
    assert kv("truncate", sealed, 3, "-o", new).code == 0
    assert kvsnap.load(new).tokens == TOKENS[:3]
    assert digest(sealed) == before
    assert kv("truncate", sealed, 2, "-o", new, "--overwrite").code == 0
    assert kvsnap.load(new).tokens == TOKENS[:2]


def test_a_session_in_use_is_busy(kv: Call, session: Path) -> None:
    with Session.open(session):
        done = kv("truncate", session, 4)
    assert done.code == 9
    assert kvsnap.load(session).tokens == TOKENS


# -- the model ---------------------------------------------------------------------------------------------------------


def test_the_model_is_the_given_one_or_that_of_the_file_where_it_is_still_there(tmp_path: Path) -> None:
    here = str(tmp_path)
    for given, recorded, name, why in (
        ("x", here, "x", "given"),
        (None, here, here, "recorded"),
        (None, "smollm2", "smollm2", "recorded"),
        (None, f"{here}/gone", "smollm2", "default"),
        (None, "owner/name", "smollm2", "default"),  # a file of someone else's makes nothing ask the hub
        (None, "", "smollm2", "default"),
    ):
        chosen = choose_model(given, {"model": recorded} if recorded else {})
        assert (chosen.name, chosen.why) == (name, why)
    assert choose_model(str(tmp_path / ".." / tmp_path.name), {}).recorded == here
    assert choose_model("owner/name", {}).recorded == "owner/name"
    assert "the default" in str(choose_model(None, {}))


# -- sampler settings ------------------------------------------------------------------------------------------------


def test_sampler_settings_are_read_from_text() -> None:
    assert parse_sampler("temperature=0.7, top-p=0.9,seed=1") == Sampler(temperature=0.7, top_p=0.9, seed=1)
    assert parse_sampler("greedy") == Sampler()
    with pytest.raises(InputError, match="one of repetition_penalty, temperature"):
        parse_sampler("warmth=1")


def test_changed_settings_keep_the_saved_random_numbers_unless_a_seed_is_given() -> None:
    assert sampler_state(SAMPLER, {}) is None
    changed = sampler_state(SAMPLER, {"temperature": 1.5})
    assert changed is not None
    assert changed.random == SAMPLER.random
    assert (changed.settings.temperature, changed.settings.top_k) == (1.5, SAMPLER.settings.top_k)
    fresh = sampler_state(SAMPLER, {"seed": 3})
    assert fresh is not None
    assert (fresh.random.seed, fresh.random.draws) == (3, 0)


def test_a_terminal_without_the_characters_gets_marks_instead(sealed: Path) -> None:
    path = sealed.with_name("signs.kvsnap")
    kvsnap.save(snapshot(TOKENS, text="naïve 漢字"), path)
    done = subprocess.run(
        [sys.executable, "-m", "kvsnap", "cat", str(path)],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "na?ve ??\n"


def test_an_error_of_the_system_is_not_taken_for_lost_output(
    kv: Call, sealed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", "somewhere")

    monkeypatch.setattr("kvsnap.inspect", denied)
    done = kv("info", str(sealed))
    assert done.code == 1
    assert "a bug" in done.err
    assert "somewhere" in done.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device here")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_full_disk_behind_stdout_is_told(sealed: Path, options: list[str]) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvsnap", "info", str(sealed), *options],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 14
    assert "Traceback" not in done.stderr


def test_a_turn_that_could_not_be_saved_is_refused_before_a_model_is_loaded(kv: Call, session: Path) -> None:
    raw = bytearray(session.read_bytes())
    raw[-200] ^= 1  # the last COMMIT
    session.write_bytes(raw)
    for command in (["generate", "x", "--session", session], ["resume", session, "--append"]):
        done = kv(*command, "--model", "no-such-model")
        assert done.code == 6
        assert "was published" in done.err
    assert session.read_bytes() == bytes(raw)

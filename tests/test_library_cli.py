"""The library on the command line, without torch: @NAME in the place of files, and the commands of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

import kvsnap
from kvsnap.cli import root, run
from kvsnap.library import Library
from synthetic import SAMPLER, snapshot

TOKENS = (11, 12, 13, 14, 15, 16)


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


Call = Callable[..., Done]


@pytest.fixture
def kv(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.setenv("KVSNAP_LIBRARY", str(tmp_path / "library"))
    monkeypatch.chdir(tmp_path)

    def call(*args: object) -> Done:
        capsys.readouterr()
        code = run([str(a) for a in args])
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture
def library(tmp_path: Path) -> Path:
    with Library(tmp_path / "library") as made, made.open("chat") as session:
        session.append(snapshot(TOKENS[:4], text="four", sampler=SAMPLER))
        session.append(snapshot(TOKENS, n_prompt=4, text="four six"), complete=False)
    return tmp_path / "library"


def test_every_reading_command_takes_a_name(kv: Call, library: Path) -> None:
    path = kv("info", "@chat", "--json").data["path"]
    assert Path(path).parent == library / "sessions"
    assert kv("cat", "@chat").out == "four six\n"
    assert kv("head", "@chat", 0, 0, "--json").data["shape"] == [6, 4]
    assert kv("verify", "@chat", path, "--json").data["ok"]
    assert [t["n_tokens"] for t in kv("log", "@chat", "--json").data["turns"]] == [0, 4, 6]
    assert kv("convert", "@chat", "out.safetensors", "--format", "safetensors").code == 0
    assert kvsnap.load("out.safetensors").num_layers == 1


def test_writing_commands_go_through_the_library(kv: Call, library: Path, tmp_path: Path) -> None:
    assert kv("truncate", "@chat", 4, "--json").data["path"] == kv("info", "@chat", "--json").data["path"]
    assert kv("reset", "@chat").out.startswith("@chat: 4 -> 0 tokens")
    assert kv("rewind", "@chat", 3).code == 0
    assert kv("compact", "@chat").out.startswith("@chat: ")
    assert kv("truncate", "@chat", 2, "-o", "two.kvsnap").code == 0
    assert kvsnap.inspect("two.kvsnap").n_tokens == 2
    (entry,) = kv("ls", "--json").data["sessions"]
    assert (entry["name"], entry["n_tokens"]) == ("chat", 6)
    with Library(library) as opened, opened.open("chat"):
        done = kv("truncate", "@chat", 2)
        assert (done.code, "busy" in done.err or "open for writing" in done.err) == (9, True)
    size = entry["own_bytes"]
    assert kv("prune", "--max-bytes", 2 * size, "--remember").code == 0
    for name in "abc":
        assert kv("fork", "two.kvsnap", f"@{name}").code == 0
    assert kv("ls", "--json").data["nbytes"] <= 2 * size  # the stored limit holds for what the commands write


def test_forks_in_the_library_copy_nothing(kv: Call, library: Path) -> None:
    made = kv("fork", "@chat", "@idea", "--at", 5, "--json").data
    assert (made["n_tokens"], made["parent_names"]) == (5, ["chat"])
    assert made["own_bytes"] < 2000
    assert kv("fork", "@chat", "@early", "--commit", 2).out.startswith("@early: 4 tokens")
    assert kv("fork", "@chat", "copy.kvsnap").code == 0
    assert kv("fork", "copy.kvsnap", "@copy", "--json").data["n_tokens"] == 6
    assert kv("fork", "copy.kvsnap", "@other", "--at", 3).code == 2
    assert kv("fork", "@chat", "@idea").code == 2
    tree = kv("log", "--tree").out.splitlines()
    assert [line.split("  ")[0].strip() for line in tree] == ["chat", "|-- early", "`-- idea", "copy"]
    assert kv("log", "--tree", "@copy").out.splitlines() == tree[-1:]
    names = [branch["names"] for branch in kv("log", "--tree", "--json").data["tree"]]
    assert names == [["chat"], ["copy"]]
    assert kv("log", "--tree", "copy.kvsnap").code == 2
    assert kv("log").code == 2


def test_names_are_listed_removed_renamed_and_pinned(kv: Call, library: Path) -> None:
    kv("fork", "@chat", "@idea")
    assert kv("pin", "@chat", "idea").out.splitlines() == ["chat: pinned", "idea: pinned"]
    shown = kv("ls")
    assert shown.code == 0
    assert "fork of chat" in shown.out
    assert "2 sessions" in shown.err
    assert kv("rename", "idea", "@plan", "--json").data == {"name": "plan", "was": "idea"}
    assert kv("unpin", "plan", "--json").data == {"names": ["plan"], "pinned": False}
    assert kv("rm", "plan", "plam").code == 3  # a name that is mistyped removes none
    assert "2 sessions" in kv("ls").err
    assert "still needed" in kv("rm", "chat").out
    done = kv("rm", "@plan", "--json").data
    assert done["removed"] == ["plan"]
    assert len(done["files"]) == 2
    assert kv("ls", "--json").data["sessions"] == []
    assert kv("rm", "plan").code == 3
    assert kv("rename", "a/b", "c").code == 2


def test_the_longest_common_history_is_found(kv: Call, library: Path, tmp_path: Path) -> None:
    Path("ids.txt").write_text("11, 12\n13 99 5\n")
    found = kv("find", "--tokens-from", "ids.txt", "--json").data
    assert (found["n_tokens"], found["found"]["name"], found["found"]["n_tokens"]) == (5, "chat", 3)
    assert kv("find", "--tokens-from", "@chat").out.startswith("chat: 6 of 6 tokens agree, 6 rows")
    kvsnap.save(snapshot((*TOKENS[:5], 7)), "other.kvsnap")
    told = kv("find", "--tokens-from", "other.kvsnap").err
    assert told == "to go on from there: kvsnap fork @chat @NEW --at 5\n"
    assert kv(*told.replace("NEW", "new").split()[6:]).code == 0
    assert kv("rm", "new").code == 0
    assert "not both" in kv("find", "--tokens-from", "@chat", "--prompt", "words").err
    assert kv("find", "--tokens-from", "other.kvsnap", "--json").data["found"]["n_tokens"] == 5
    Path("none.txt").write_text("1 2 3")
    for as_json in ((), ("--json",)):
        assert kv("find", "--tokens-from", "none.txt", *as_json).code == 3
    for bad, code in (("words and so on", 4), ("", 4), ("99999999999", 2), ("9" * 5000, 2), ("0" * 5000 + "1", 3)):
        Path("bad.txt").write_text(bad)
        assert kv("find", "--tokens-from", "bad.txt").code == code
    assert kv("find", "--tokens-from", "gone.txt").code == 3


def test_an_encrypted_file_may_be_what_a_library_is_compared_with(kv: Call, library: Path) -> None:
    pytest.importorskip("cryptography")
    key = bytes(range(32))
    Path("key").write_bytes(key)
    Path("key").chmod(0o600)
    kvsnap.save(snapshot((*TOKENS[:5], 7)), "closed.kvsnap", key=key)
    for command in (("find", "--tokens-from"), ("prune", "--max-bytes", "1GB", "--like")):
        assert kv(*command, "closed.kvsnap").code == 16
        assert kv(*command, "closed.kvsnap", "--key-file", "key").code == 0
        assert kv(*command, "@chat", "--key-file", "key").code == 2  # a key that is named is demanded
    assert kv("find", "--tokens-from", "closed.kvsnap", "--key-file", "key", "--json").data["found"]["n_tokens"] == 5
    Path("ids.txt").write_text("11 12")
    assert kv("find", "--tokens-from", "ids.txt", "--key-file", "key").code == 2


def test_what_keeps_files_from_being_removed_is_told(kv: Call, library: Path) -> None:
    assert kv("fork", "@chat", "@idea").code == 0
    (library / "names" / "idea").write_bytes(b"")
    assert kv("collect", "--json").data["held_by"] == ["names/idea"]
    for command in (("collect",), ("prune", "--max-bytes", "0", "--dry-run")):
        assert "names/idea cannot be read" in kv(*command).err
    assert kv("rm", "idea").out == "idea: removed, its file stays (still needed, or damaged)\n"
    assert len(kv("collect", "--json").data["removed"]) == 1


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("0", 0), ("1000", 1000), ("20GB", 20 * 10**9), ("1.5 GiB", 3 * 2**29), ("500mb", 500 * 10**6), ("2k", 2000),
     ("9007199254740993", 9007199254740993)],
)  # fmt: skip
def test_sizes_are_read_exactly(kv: Call, library: Path, text: str, n_bytes: int) -> None:
    assert kv("prune", "--max-bytes", text, "--dry-run", "--json").data["max_bytes"] == n_bytes


@pytest.mark.parametrize("text", ["-1", "GB", "1e9", "1 XB", "", "1.GB", "9" * 30])
def test_what_is_no_size_is_refused(kv: Call, library: Path, text: str) -> None:
    assert kv("prune", f"--max-bytes={text}", "--dry-run").code == 2


def test_a_prune_says_what_goes_and_a_dry_run_changes_nothing(kv: Call, library: Path) -> None:
    done = kv("prune", "--max-bytes", 0, "--dry-run")
    assert done.out.splitlines()[0].startswith("chat: would be removed")
    assert kv("prune").code == 2
    assert kv("prune", "--remember").code == 2
    assert kv("prune", "--max-bytes", "1GB", "--remember", "--like", "@chat").code == 0
    assert kv("ls", "--json").data["max_bytes"] == 10**9
    report = kv("prune", "--max-bytes", 0, "--json").data
    assert [e["names"] for e in report["evicted"]] == [["chat"]]
    assert kv("collect", "--json").data["removed"] == []


def test_the_doctor_tells_and_fails(kv: Call, library: Path) -> None:
    assert kv("doctor").out.strip().endswith("no limit")
    assert kv("doctor", "--json").data["ok"]
    (library / "names" / "chat").unlink()
    done = kv("doctor")
    assert done.code == 1
    assert "no name reaches" in done.out
    assert kv("collect", "--dry-run").out.splitlines()[-1].startswith("1 file")
    assert kv("collect").code == 0
    assert kv("doctor").code == 0


def test_the_directory_of_the_library_may_be_named_in_both_places(kv: Call, tmp_path: Path) -> None:
    with Library(tmp_path / "other") as made, made.open("x") as session:
        session.append(snapshot((1, 2)))
    for args in (("--library", "other", "info", "@x"), ("info", "@x", "--library", "other"),
                 ("info", "--library", "other", "@x")):  # fmt: skip
        assert kv(*args, "--json").data["n_tokens"] == 2
    assert kv("info", "@x").code == 3
    assert kv("ls", "--library", "").code == 2


def test_a_library_that_is_not_there_is_not_made_by_looking(kv: Call, tmp_path: Path) -> None:
    for args in (("ls",), ("doctor",), ("rm", "a"), ("info", "@a"), ("prune", "--max-bytes", 1), ("pin", "a"),
                 ("collect",), ("log", "--tree"), ("rename", "a", "b")):  # fmt: skip
        done = kv(*args, "--json")
        assert (done.code, done.data["error"]["kind"]) == (3, "missing")
    assert os.listdir(tmp_path) == []


def test_names_are_refused_where_a_file_is_written_and_files_may_begin_with_at(kv: Call, library: Path) -> None:
    kvsnap.save(snapshot((1, 2)), "@chat")
    assert kv("info", "./@chat", "--json").data["n_tokens"] == 2
    assert kv("info", "@chat", "--json").data["n_tokens"] == 6
    for args in (("convert", "./@chat", "@x"), ("truncate", "@chat", 2, "-o", "@x"), ("head", "@chat", 0, 0, "-o",
                 "@x.npz"), ("generate", "hi", "--save", "@x")):  # fmt: skip
        done = kv(*args)
        assert (done.code, "./@x" in done.err) == (2, True)
    for bad in ("@", "@a/b", "@../x", "@CON", "@@chat"):
        assert kv("info", bad).code == 2


def test_looking_is_no_use_and_nothing_is_evicted_by_it(kv: Call, library: Path) -> None:
    with Library(library) as made:
        made.open("second").close()
    (library / "kvsnap-library").write_text('{"kvsnap_library": 1, "max_bytes": 10}')
    uses = [e["last_use_ns"] for e in kv("ls", "--json").data["sessions"]]
    for args in (
        ("info", "@chat"),
        ("cat", "@chat"),
        ("verify", "@chat"),
        ("doctor",),
        ("find", "--tokens-from", "@chat"),
    ):
        kv(*args)
    assert [e["last_use_ns"] for e in kv("ls", "--json").data["sessions"]] == uses
    assert kv("ls", "--json").data["overrun"] > 0


def test_every_command_with_a_file_says_which_library(kv: Call) -> None:
    for name, command in root.commands.items():
        if name not in ("demo", "keygen"):
            assert any(p.name == "library" for p in command.params), name


def test_the_overview_has_every_command_in_a_section_with_a_whole_sentence(kv: Call) -> None:
    told = kv("--help").out
    assert "..." not in told.partition("Options:")[2]
    assert "\nMore:\n" not in told
    for name in root.commands:
        assert told.count(f"\n  {name} ") == 1, name
    root.add_command(click.Command("later", help="Do something else."))
    try:
        assert "\nMore:\n  later " in kv("--help").out
    finally:
        del root.commands["later"]

"""`kvsnap report`: what it writes, prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from synthetic import snapshot

pytest.importorskip("matplotlib")

import kvsnap
from kvsnap.cli import run


def ask(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = run(["report", *args])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVSNAP_LIBRARY", str(tmp_path / "lib"))


def test_a_page_and_its_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    kvsnap.save(snapshot(range(1, 9), layers=2), "s.kvsnap")
    code, out, _ = ask(capsys, "s.kvsnap", "-o", "r.html", "--figures", "pictures", "--json", "--no-text")
    told: dict[str, Any] = json.loads(out)
    assert code == 0
    assert told["nbytes"] == Path("r.html").stat().st_size
    assert {Path(f["path"]).name for f in told["figures"]} == {p.name for p in Path("pictures").iterdir()}
    code, _, err = ask(capsys, "s.kvsnap", "-o", "r.html")
    assert code == 2
    assert "--overwrite" in err or "overwrite" in err


def test_a_session_of_the_library_is_called_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    with kvsnap.Library("lib") as library, library.open("rivers") as session:
        session.append(snapshot(range(1, 9)))
    code, out, _ = ask(capsys, "@rivers", "-o", "r.html")
    assert code == 0
    assert "r.html: " in out
    assert "<h1>Report of @rivers</h1>" in Path("r.html").read_text(encoding="utf-8")
    code, out, _ = ask(capsys, "-o", "lib.html", "--json")
    assert code == 0
    assert [f["name"] for f in json.loads(out)["figures"]] == ["forks", "largest", "ages"]
    assert ask(capsys, "-o", "lib.html", "--no-text", "--overwrite")[0] == 2


def test_damage_ends_with_exit_code_1_and_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    kvsnap.save(snapshot(range(1, 40), heads=4, dim=16), "s.kvsnap")
    raw = bytearray(Path("s.kvsnap").read_bytes())
    values = kvsnap.load("s.kvsnap").layers[0].tensor("k").array.tobytes()
    raw[raw.index(values[:64])] ^= 4
    Path("s.kvsnap").write_bytes(raw)
    code, _, err = ask(capsys, "s.kvsnap", "-o", "r.html")
    assert code == 1
    assert "could not be read: s.kvsnap" in err
    assert Path("r.html").exists()


def test_without_matplotlib_one_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kvsnap.save(snapshot(range(1, 9)), "s.kvsnap")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    code, _, err = ask(capsys, "s.kvsnap", "-o", "r.html")
    assert code == 11
    assert "kvsnap[plots]" in err
    assert not Path("r.html").exists()


def test_a_session_is_never_replaced_by_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    from kvsnap.session import Session

    with Session.open("chat.kvsnap") as session:
        session.append(snapshot(range(1, 9)))
    before = Path("chat.kvsnap").read_bytes()
    assert ask(capsys, "chat.kvsnap", "-o", "chat.kvsnap", "--overwrite")[0] == 2
    assert run(["stats", "chat.kvsnap", "-o", "chat.kvsnap", "--overwrite"]) == 2
    assert Path("chat.kvsnap").read_bytes() == before


@pytest.mark.parametrize("command", ["diff s.kvsnap t.kvsnap", "stats s.kvsnap", "growth s.kvsnap t.kvsnap"])
def test_answers_of_other_commands_are_drawn(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    kvsnap.save(snapshot(range(1, 20), layers=2), "s.kvsnap")
    kvsnap.save(snapshot(range(1, 20), layers=2), "t.kvsnap", codec="q8")
    code = run([*command.split(), "-o", "r.html", "--json"])
    printed = capsys.readouterr()
    json.loads(printed.out)
    assert code == (1 if command.startswith("diff") else 0)
    assert "r.html: " in printed.err
    assert Path("r.html").read_text(encoding="utf-8").count("<figure") > 1
    assert run([*command.split(), "-o", "r.html"]) == 2

"""`kvsnap report`: what it writes, prints and refuses."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from report_pages import draw_only, page_of
from synthetic import snapshot

pytest.importorskip("matplotlib")

import kvsnap
from kvsnap.cli import run
from kvsnap.reports.escaping import visible


def ask(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = run(["report", *args])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVSNAP_LIBRARY", str(tmp_path / "lib"))
    draw_only(monkeypatch, "Size")


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


def test_nor_by_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    Path("drawn").mkdir()
    kvsnap.save(snapshot(range(1, 9)), "s.kvsnap")
    assert ask(capsys, "s.kvsnap", "--figures", "drawn", "-o", "page.html")[0] == 0
    place = next(Path("drawn").glob("*.png"))
    kvsnap.save(snapshot(range(1, 5)), place)
    before = place.read_bytes()
    code, _, err = ask(capsys, "s.kvsnap", "--figures", "drawn", "-o", "page.html", "--overwrite")
    assert (code, place.read_bytes()) == (2, before)
    assert "this is a cache file" in err


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


@pytest.mark.parametrize("command", ["diff s.kvsnap t.kvsnap", "growth s.kvsnap t.kvsnap"])
def test_pictures_of_answers_with_no_page(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    kvsnap.save(snapshot(range(1, 20), layers=2), "s.kvsnap")
    kvsnap.save(snapshot(range(1, 20), layers=2), "t.kvsnap", codec="q8")
    run([*command.split(), "--figures", "pictures", "--figure-format", "svg", "--json"])
    printed = capsys.readouterr()
    json.loads(printed.out)
    written = list(Path("pictures").iterdir())
    assert f"{len(written)} pictures, each in pictures" in printed.err
    assert len(written) > 2
    assert all(p.read_bytes().startswith(b"<?xml") for p in written)
    assert not Path("r.html").exists()
    assert run([*command.split(), "--figures", "s.kvsnap"]) == 2


def test_ids_are_left_out_of_what_diff_and_stats_draw(capsys: pytest.CaptureFixture[str]) -> None:
    kvsnap.save(snapshot([91234, 91235, 91236]), "s.kvsnap")
    kvsnap.save(snapshot([91234, 91235, 95555]), "t.kvsnap")
    for options, there in (((), True), (("--no-text", "--overwrite"), False)):
        run(["diff", "s.kvsnap", "t.kvsnap", "-o", "r.html", *options])
        assert ("95555" in page_of().said()) == there
    assert "95555 in b" in capsys.readouterr().out  # the page alone is without
    assert run(["growth", "s.kvsnap", "-o", "r.html", "--no-text"]) == 2


# -- the tokenizer of the model that a file names ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The directory of a tiny model with a tokenizer, its engine, and what that holds."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from kvsnap.engines.models import load_model
    from tiny_models import PROMPT, save_tiny

    where = save_tiny(tmp_path_factory.mktemp("models") / "model")
    loaded = load_model(str(where))
    engine = kvsnap.connect(loaded.model, loaded.tokenizer)
    engine.prefill(engine.tokenize(PROMPT))
    return where, engine, kvsnap.capture(engine)


@pytest.fixture
def named(model: Any, tmp_path: Path) -> Any:
    """A file of the model in it, the directory, and the engine."""
    directory, engine, taken = model
    where = Path(shutil.copytree(directory, tmp_path / "model"))
    kvsnap.save(replace(taken, metadata={"model": str(where)}), "s.kvsnap")
    return where, engine


def tokens() -> list[str]:
    rows = page_of().figure("tokens-k-0")["rows"]
    return [(row["lead"] + mark[4]).split(", ", 1)[1].rsplit(": ", 1)[0] for row in rows for mark in row["marks"]]


@pytest.mark.newest
@pytest.mark.engine
def test_tokens_are_shown_as_the_model_of_the_file_writes_them(
    named: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_only(monkeypatch, "Tokens")
    where, engine = named
    ids = kvsnap.load("s.kvsnap").tokens
    assert ask(capsys, "s.kvsnap", "-o", "r.html")[0] == 0
    shown = tokens()
    assert shown == [visible(engine.detokenize([i])) or str(i) for i in ids]
    assert shown != list(map(str, ids))
    # A file that transformers reads as it is needs neither it nor torch.
    text = engine.tokenizer.backend_tokenizer.to_str()
    (where / "tokenizer.json").write_text(text, encoding="utf-8")
    with monkeypatch.context() as without:
        without.setattr("kvsnap.cli._model.open_tokenizer", lambda name: pytest.fail("needed"))
        assert ask(capsys, "s.kvsnap", "-o", "r.html", "--overwrite")[0] == 0
    assert tokens() == shown
    assert ask(capsys, "s.kvsnap", "-o", "r.html", "--overwrite", "--model", str(where))[0] == 0
    assert tokens() == shown
    table = json.loads((where / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = table["model"]["vocab"]
    first, second, *_ = vocabulary
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (where / "tokenizer.json").write_text(json.dumps(table), encoding="utf-8")
    code, _, err = ask(capsys, "s.kvsnap", "-o", "r.html", "--overwrite")
    assert code == 0
    assert "has another tokenizer now: token ids are shown" in err
    assert tokens() == list(map(str, ids))
    for text in ("{", "[]", '{"model": 3}'):
        (where / "tokenizer.json").write_text(text, encoding="utf-8")
        assert ask(capsys, "s.kvsnap", "-o", "r.html", "--overwrite")[0] == 0
        assert tokens() == list(map(str, ids))


@pytest.mark.engine
@pytest.mark.parametrize("name", ["gpt2", "org/model", "model", "", "/no/such/model"])
def test_only_local_models_that_a_file_names_by_their_path_are_asked(
    name: str, named: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`model` is there, relative to where the command runs: but a file from elsewhere does not mean that."""
    draw_only(monkeypatch, "Tokens")
    taken = kvsnap.load("s.kvsnap")
    kvsnap.save(replace(taken, metadata={"model": name}), "t.kvsnap")
    assert ask(capsys, "t.kvsnap", "-o", "r.html")[0] == 0
    assert tokens() == list(map(str, taken.tokens))

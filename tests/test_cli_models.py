"""`kvsnap generate --session` with another model than that of the session: refused, or started anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvsnap.cli import run
from kvsnap.session import Session

pytest.importorskip("torch")
from tiny_models import save_tiny

pytestmark = pytest.mark.engine

Call = Callable[..., tuple[int, Any, str]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two directories: a model, and one with other weights."""
    directory = tmp_path_factory.mktemp("models")
    return str(save_tiny(directory / "first")), str(save_tiny(directory / "other", seed=1))


@pytest.fixture
def kv(capsys: pytest.CaptureFixture[str]) -> Call:
    def call(*args: str) -> tuple[int, Any, str]:
        capsys.readouterr()
        code = run([*args, "--json"])
        told = capsys.readouterr()
        return code, json.loads(told.out), told.err

    return call


def begun(kv: Call, model: str, path: str) -> None:
    assert (
        kv("generate", "A beginning of some length.", "--model", model, "--session", path, "--max-tokens", "4")[0] == 0
    )


def test_another_model_is_refused_and_the_refusal_names_what_can_be_done(
    kv: Call, models: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, other = models
    path = str(tmp_path / "s.kvsnap")
    begun(kv, first, path)
    before = Path(path).read_bytes()
    capsys.readouterr()
    assert run(["generate", "more", "--model", other, "--session", path]) == 7
    told = capsys.readouterr().err
    assert "weights differ" in told
    assert "--accept" not in told  # no session takes turns of two models
    assert "--fresh" in told
    assert Path(path).read_bytes() == before


def test_fresh_starts_the_session_anew_and_it_can_be_had_back(
    kv: Call, models: tuple[str, str], tmp_path: Path
) -> None:
    first, other = models
    path = str(tmp_path / "s.kvsnap")
    begun(kv, first, path)
    with Session.open(path, readonly=True) as session:
        tokens, commit = session.tokens, session.n_commits
    more = ("generate", "more", "--session", path, "--max-tokens", "4")
    code, alone, _ = kv("generate", "more", "--model", other, "--max-tokens", "4")
    assert code == 0
    code, anew, _ = kv(*more, "--model", other, "--fresh")
    assert (code, anew["restored"], anew["tokens"]) == (0, None, alone["tokens"])
    assert any(f"commit {commit}" in warning for warning in anew["warnings"])
    code, on, _ = kv(*more, "--model", other, "--fresh")  # now it is its own: nothing is thrown away
    assert (code, on["restored"]["recomputed"], on["warnings"]) == (0, 0, [])
    with Session.open(path) as session:
        session.rewind(commit)
        assert session.tokens == tokens


def test_what_a_session_cannot_take_is_refused_before_an_answer_is_generated(
    kv: Call, models: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A session is of one model: an answer of another one, accepted by name, would be lost when it is stored."""
    first, other = models
    path = str(tmp_path / "s.kvsnap")
    begun(kv, first, path)
    before = Path(path).read_bytes()
    accepted = ("--model", other, "--max-tokens", "4", "--accept", "weights")
    for command in (["generate", "more", "--session", path], ["resume", path, "--append"]):
        capsys.readouterr()
        assert run([*command, *accepted]) == 7
        told = capsys.readouterr()
        assert told.out == ""
        assert "one model only" in told.err
        assert Path(path).read_bytes() == before
    code, apart, _ = kv("resume", path, *accepted, "--save", str(tmp_path / "apart.kvsnap"))
    assert (code, apart["restored"]["exact"]) == (0, False)


def test_an_emptied_session_is_still_of_its_model_which_is_said_before_an_answer_is_generated(
    kv: Call, models: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, other = models
    path = str(tmp_path / "s.kvsnap")
    begun(kv, first, path)
    assert run(["reset", path]) == 0
    before = Path(path).read_bytes()
    for command in (["generate", "more", "--session", path], ["resume", path, "--append", "--prompt", "more"]):
        capsys.readouterr()
        assert run([*command, "--model", other, "--max-tokens", "4"]) == 7
        told = capsys.readouterr()
        assert told.out == ""
        assert "weights differ" in told.err
        assert Path(path).read_bytes() == before
    more = ("generate", "more", "--session", path, "--max-tokens", "4")
    code, anew, _ = kv(*more, "--model", other, "--fresh")
    assert (code, anew["restored"], len(anew["warnings"])) == (0, None, 1)
    assert run(["reset", path]) == 0
    code, on, _ = kv(*more, "--model", other, "--fresh")
    assert (code, on["tokens"], on["warnings"]) == (0, anew["tokens"], [])


@pytest.mark.parametrize("option", [("--fresh",), ("--accept", "weights")])
def test_without_a_session_there_is_nothing_to_accept(
    models: tuple[str, str], option: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "x", "--model", models[0], *option]) == 2
    assert "--session" in capsys.readouterr().err

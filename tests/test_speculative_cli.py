"""--draft on the command line: the text is that of the model, the report counts, the draft's state is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvsnap  # noqa: E402 - after the extras are known to be there
from test_cli import Done, kv  # noqa: E402, F401 - a fixture
from tiny_models import PROMPT, save_tiny  # noqa: E402

pytestmark = [pytest.mark.engine]

Call = Callable[..., Done]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    where = tmp_path_factory.mktemp("models")
    return Path(save_tiny(where / "model", seed=3)), Path(save_tiny(where / "draft", "qwen3", seed=4))


@pytest.mark.parametrize("how", ["model", "lookup"])
def test_a_draft_changes_no_token_and_its_state_is_kept(
    kv: Call,  # noqa: F811
    models: tuple[Path, Path],
    tmp_path: Path,
    how: str,
) -> None:
    model, draft = models[0], "lookup" if how == "lookup" else models[1]
    common = ("--model", model, "--temperature", 0.7, "--seed", 5, "--max-tokens", 20, "--json")
    plain = kv("generate", PROMPT, *common)
    done = kv("generate", PROMPT, *common, "--draft", draft, "--n-draft", 3, "--save", tmp_path / "a.kvsnap")
    assert done.code == plain.code == 0
    assert done.data["tokens"] == plain.data["tokens"]
    told = done.data["speculated"]
    assert told["tokens"] == 20
    assert told["passes"] <= 20
    assert "speculated" not in plain.data
    assert (kvsnap.inspect(tmp_path / "a.kvsnap").draft_bytes > 0) == (how == "model")
    again = kv("resume", tmp_path / "a.kvsnap", "--draft", draft, "--max-tokens", 6, "--json")
    assert again.code == 0
    drafted = again.data["restored"]["drafted"]
    assert drafted is None if how == "lookup" else drafted > len(PROMPT)
    alone = kv("resume", tmp_path / "a.kvsnap", "--max-tokens", 6, "--json")
    assert again.data["tokens"] == alone.data["tokens"]
    text = kv("resume", tmp_path / "a.kvsnap", "--draft", draft, "--max-tokens", 6)
    assert ("accepted (" in text.err) == (again.data["speculated"]["proposed"] > 0)
    assert ("the draft proposed nothing: " in text.err) == (again.data["speculated"]["proposed"] == 0)
    assert "passes for 6 tokens" in text.err


def test_a_session_keeps_it_turn_by_turn_and_a_draft_that_is_not_there_is_an_error(
    kv: Call,  # noqa: F811
    models: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    model, draft = models
    session = tmp_path / "s.kvsnap"
    for turn in ("One.", "Two."):
        options = ("--model", model, "--draft", draft, "--session", session, "--max-tokens", 5, "--json")
        done = kv("generate", turn, *options)
        assert done.code == 0
    assert done.data["restored"]["drafted"] > 0
    assert kvsnap.draft_of(kvsnap.load(session)) is not None
    missing = kv("resume", session, "--draft", tmp_path / "gone", "--json")
    assert missing.code != 0
    assert json.loads(missing.out)["error"]["kind"]

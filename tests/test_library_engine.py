"""Sessions of a library with a model: generate into @NAME, go on, fork, and find what can be reused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import kvsnap
from kvsnap.cli import run
from kvsnap.cli._model import open_engine
from kvsnap.library import Library
from tiny_models import save_tiny

pytestmark = pytest.mark.engine


def test_a_conversation_in_a_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSNAP_LIBRARY", str(tmp_path / "library"))
    model = str(save_tiny(tmp_path / "model"))

    def kv(*args: object) -> Any:
        capsys.readouterr()
        code = run([*map(str, args), "--json"])
        out = capsys.readouterr().out
        assert code == 0, out
        return json.loads(out)

    first = kv("generate", "Hello there", "--session", "@chat", "--model", model, "--max-tokens", 4)
    assert first["append"]["file_bytes"] == kv("ls")["sessions"][0]["own_bytes"]
    kv("generate", " and more", "--session", "@chat", "--max-tokens", 4)
    kv("fork", "@chat", "@idea", "--at", first["total_tokens"])
    alone = kv("resume", "@chat", "--max-tokens", 6)
    kv("resume", "@idea", "--prompt", "!", "--append", "--max-tokens", 3)
    appended = kv("resume", "@chat", "--append", "--max-tokens", 6)
    assert appended["tokens"] == alone["tokens"]  # the fork changed nothing of what it starts in
    with Library(tmp_path / "library") as library:
        with library.open("idea", readonly=True) as session:
            snapshot = session.load()
        engine = open_engine(model, None, None)
        identity = kvsnap.capture(engine).identity
        found = library.find((*snapshot.tokens, 1, 2), identity)
        assert found is not None
        assert (found.name, found.n_tokens) == ("idea", len(snapshot.tokens))
        kvsnap.restore(snapshot, engine)
        assert library.check().ok

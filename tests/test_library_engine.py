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
from tiny_models import save_tiny, tiny_llama

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


SAMPLERS = [
    kvsnap.Sampler(),
    kvsnap.Sampler(temperature=0.8, seed=1),
    kvsnap.Sampler(temperature=1.2, top_k=20, seed=2),
    kvsnap.Sampler(temperature=0.9, top_p=0.8, repetition_penalty=1.3, seed=3),
    kvsnap.Sampler(temperature=1.0, min_p=0.1, seed=4),
]


def said(engine: Any, count: int, prompt: Any = (), sampler: Any = None) -> tuple[list[tuple[int, float]], bytes]:
    """Ids and log-probabilities, and the logits at the end, bit by bit."""
    tokens = [(t.id, t.logprob) for t in kvsnap.generate(engine, list(prompt), max_tokens=count, sampler=sampler)]
    logits = kvsnap.capture(engine).logits
    assert logits is not None
    return tokens, logits.array.tobytes()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_forks_of_one_context_go_on_as_if_nothing_had_been_saved(tmp_path: Path, dtype: str) -> None:
    """Each under its own sampler, rewound, compacted, encrypted or repaired: ids and logits of a run never saved."""
    pytest.importorskip("cryptography")
    context, again = [(7 * i * i + 3 * i) % 256 for i in range(200)], [7, 8, 9]

    def engine() -> Any:
        return kvsnap.connect(tiny_llama(dtype=dtype))

    def reference(number: int, last: int = 0) -> Any:
        one = engine()
        turns = [said(one, 3, context), said(one, 8, (), SAMPLERS[number]), said(one, 5, again)]
        return [*turns, said(one, last)] if last else turns

    def resumed(snapshot: kvsnap.Snapshot, count: int, prompt: Any = (), sampler: Any = None) -> tuple[Any, Any]:
        one = engine()
        restored = kvsnap.restore(snapshot, one)
        assert (restored.exact, restored.recomputed, one.forwards) == (True, 0, 0)
        found = said(one, count, prompt, sampler)
        # The pending token or the new ones in one pass, then one for each token but the last: nothing of the prefix.
        assert one.forwards <= count
        return one, found

    wanted = [reference(number) for number in range(len(SAMPLERS))]
    assert len({str(turns[1]) for turns in wanted}) == len(SAMPLERS), "the control: each sampler says something else"
    with Library(tmp_path / "library") as library:
        first = engine()
        with library.open("base") as session:
            assert said(first, 3, context) == wanted[0][0]
            session.append(kvsnap.capture(first))
        for number, sampler in enumerate(SAMPLERS):
            assert library.fork("base", f"{number}").own_bytes < 4096
            with library.open(f"{number}") as session:
                one, found = resumed(session.load(), 8, (), sampler)
                assert found == wanted[number][1]
                session.append(kvsnap.capture(one, start=session.n_rows))
                assert said(one, 5, again) == wanted[number][2]
                session.append(kvsnap.capture(one, start=session.n_rows))
        with library.open("1") as session:
            session.truncate(session.history[1].n_tokens)
            one, found = resumed(session.load(), 5, again)
            assert found == wanted[1][2]
        library.compact("2")
        with library.open("2", readonly=True) as session:
            assert resumed(session.load(), 6)[1] == reference(2, 6)[3]
        with library.open("3", readonly=True) as session:
            kvsnap.save(session.load(), tmp_path / "closed", key=bytes(32))
        assert resumed(kvsnap.load(tmp_path / "closed", key=bytes(32)), 6)[1] == reference(3, 6)[3]
        path = Path(library.session_path("4"))
        with library.open("4", readonly=True) as session:
            last = session.load().layers[1].tensors[0].array[0, -1:].tobytes()
        raw = bytearray(path.read_bytes())
        raw[raw.index(last)] ^= 1
        path.write_bytes(raw)
        assert not kvsnap.repair(path, tmp_path / "mended").complete
        library.add(tmp_path / "mended", "mended")
        with library.open("mended", readonly=True) as session:
            assert resumed(session.load(), 5, again)[1] == wanted[4][2]
        library.remove("base")
        with library.open("0", readonly=True) as session:
            assert resumed(session.load(), 6)[1] == reference(0, 6)[3]

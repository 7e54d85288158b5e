"""A generation that is published as it goes: what a kill costs, and that it goes on bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")


import kvsnap
from journal_writer import SAMPLER, generated, make_engine
from kvsnap.cli import run
from kvsnap.errors import ContextError, InputError, StorageError
from test_engine_static import make
from tiny_models import CONTEXT, PROMPT, ByteTokenizer, save_tiny, tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]

WRITER = Path(__file__).parent / "journal_writer.py"
EVERY, COUNT = 8, 60


def uninterrupted() -> tuple[list[int], bytes]:
    """Ids and the last logits of the run that nobody stops and nothing saves."""
    engine = make_engine()
    ids = [t.id for t in kvsnap.generate(engine, PROMPT, max_tokens=COUNT, sampler=SAMPLER)]
    engine.settle()
    return ids, logits(kvsnap.capture(engine))


def logits(snapshot: kvsnap.Snapshot) -> bytes:
    assert snapshot.logits is not None
    return snapshot.logits.array.tobytes()


def killed_after(n_tokens: int, path: Path, *more: str) -> list[int]:
    """Run the writer, and kill it with SIGKILL once it was handed so many tokens; the ids that it was handed."""
    command = [sys.executable, str(WRITER), str(path), str(EVERY), str(COUNT), *more]
    handed: list[int] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if not line.startswith("evaluated"):
                handed.append(int(line))
            if len(handed) >= n_tokens:
                child.send_signal(signal.SIGKILL)
                break
        handed += [int(line) for line in child.stdout if line.strip().isdigit() and line.endswith("\n")]
    return handed


@pytest.mark.newest
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no kill -9 here")
def test_a_killed_run_loses_less_than_every_tokens_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "run.kvsnap"
    wanted, last = uninterrupted()
    before = 0
    for n_tokens in (13, 1, 22):
        handed = killed_after(n_tokens, path)
        with kvsnap.Session.open(path, readonly=True) as session:
            held = generated(session)
            assert held > before + len(handed) - EVERY, "more is lost than a kill may cost"
            assert not session.complete
            assert session.load().generated == tuple(wanted[:held])
            assert session.load().metadata["stop"] == "unfinished"
        assert handed == wanted[before : before + len(handed)]
        before = held
    done = subprocess.run(
        [sys.executable, str(WRITER), str(path), str(EVERY), str(COUNT)], capture_output=True, text=True, check=True
    )
    first, *ids, end = done.stdout.splitlines()
    assert (first, end) == ("evaluated 0", f"evaluated {len(ids)}"), "the history was evaluated again"
    with kvsnap.Session.open(path, readonly=True) as session:
        found = session.load()
        assert found.metadata["stop"] == "length"
        assert not session.complete
    assert list(found.generated) == wanted
    assert logits(found) == last
    assert kvsnap.verify(path).ok


@pytest.mark.newest
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no kill -9 here")
def test_without_the_random_state_another_text_would_come(tmp_path: Path) -> None:
    path = tmp_path / "run.kvsnap"
    killed_after(20, path)
    subprocess.run([sys.executable, str(WRITER), str(path), str(EVERY), str(COUNT), "lose"], check=True,
                   capture_output=True)  # fmt: skip
    with kvsnap.Session.open(path, readonly=True) as session:
        assert session.n_tokens == len(PROMPT) + COUNT
        assert list(session.load().generated) != uninterrupted()[0]


def run_of(engine: Any, count: int) -> Iterator[kvsnap.Token]:
    return kvsnap.generate(engine, PROMPT, max_tokens=count, sampler=SAMPLER)


def test_the_prompt_is_published_first_and_then_so_many_tokens_at_a_time(tmp_path: Path) -> None:
    engine = make_engine()
    with kvsnap.Session.open(tmp_path / "run.kvsnap") as session:
        empty = session.nbytes
        tokens = kvsnap.journal(engine, session, run_of(engine, 7), every=3, metadata={"title": "a run"})
        seen = [generated(session)]
        assert session.n_rows == len(PROMPT)
        seen += [generated(session) for _ in tokens]
        assert seen == [0, 0, 0, 3, 3, 3, 6, 6]
        assert [t.n_tokens - len(PROMPT) for t in session.history[1:]] == [0, 3, 6, 7]
        assert not any(t.complete for t in session.history[1:])
        assert session.load().metadata == {"title": "a run", "stop": "length"}
        assert (tokens.stop, tokens.n_commits) == ("length", 4)
        assert tokens.nbytes == session.nbytes - empty
        with pytest.raises(StopIteration):
            next(tokens)
        assert tokens.n_commits == 4


def test_a_turn_that_the_model_ended_is_complete(tmp_path: Path) -> None:
    ids = [t.id for t in run_of(make_engine(), 12)]
    end = next(i for i in ids[3:] if i not in ids[:3])
    model = tiny_llama(eos_token_id=end)
    engine = kvsnap.connect(model, ByteTokenizer())
    with kvsnap.Session.open(tmp_path / "run.kvsnap") as session:
        with kvsnap.journal(engine, session, run_of(engine, 40), every=2) as tokens:
            assert [t.id for t in tokens] == ids[: ids.index(end) + 1]
        assert tokens.stop == "end"
        assert session.complete
        assert session.load().metadata["stop"] == "end"


def test_a_run_that_is_left_publishes_the_rest_as_cut_off(tmp_path: Path) -> None:
    engine = make_engine()
    with kvsnap.Session.open(tmp_path / "run.kvsnap") as session:
        with pytest.raises(KeyboardInterrupt), kvsnap.journal(engine, session, run_of(engine, 40), every=16) as tokens:
            for number, _ in enumerate(tokens):
                if number == 4:
                    assert generated(session) == 0
                    raise KeyboardInterrupt
        assert generated(session) == 5
        assert not session.complete
        assert session.load().metadata["stop"] == "interrupted"
        ids = list(session.load().generated)
        # and it goes on, in the same session, as one run
        ids += [t.id for t in kvsnap.journal(engine, session, kvsnap.generate(engine, max_tokens=9), every=4)]
        assert ids == [t.id for t in run_of(make_engine(), 14)]
        assert list(session.load().generated) == ids


def test_a_full_context_is_published_and_raised(tmp_path: Path) -> None:
    engine = make_engine()
    engine.prefill([1] * (CONTEXT - 6))
    with kvsnap.Session.open(tmp_path / "run.kvsnap") as session:
        tokens = kvsnap.journal(engine, session, kvsnap.generate(engine, max_tokens=50), every=64)
        with pytest.raises(ContextError):
            list(tokens)
        assert session.n_tokens == CONTEXT == len(engine.tokens)
        assert (tokens.stop, session.load().metadata["stop"]) == ("context", "context")


def test_a_session_with_another_history_is_refused_before_anything_is_generated(tmp_path: Path) -> None:
    engine, other = make_engine(), make_engine()
    other.prefill([1, 2, 3])
    with kvsnap.Session.open(tmp_path / "run.kvsnap") as session:
        session.append(kvsnap.capture(other))
        before = session.n_commits
        engine.prefill([1, 2, 4, 5])
        stream = kvsnap.generate(engine, max_tokens=5)
        with pytest.raises(InputError, match="restore it first"):
            kvsnap.journal(engine, session, stream)
        with pytest.raises(InputError, match="1 or more, found 0"):
            kvsnap.journal(other, session, stream, every=0)
        assert session.n_commits == before
        assert engine.forwards == 1
        # the right engine has nothing new to publish
        assert kvsnap.journal(other, session, iter(())).n_commits == 0


def test_without_room_the_run_stops_and_what_was_published_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    with kvsnap.Session.open(tmp_path / "run.kvsnap") as session:
        tokens = kvsnap.journal(engine, session, run_of(engine, 40), every=4)
        ids = [next(tokens).id for _ in range(6)]

        def full(*_: Any, **__: Any) -> None:
            raise StorageError("no space left", path=session.path)

        with monkeypatch.context() as patched:
            patched.setattr(type(session), "append", full)
            with pytest.raises(StorageError):
                list(tokens)
        assert generated(session) == 4
        ids += [t.id for t in kvsnap.generate(engine, max_tokens=4)]  # the engine lost nothing
        session.append(kvsnap.capture(engine, start=session.n_rows))
        wanted = [t.id for t in run_of(make_engine(), len(session.load().generated))]
        assert list(session.load().generated) == wanted
        assert os.path.exists(session.path)


@pytest.mark.newest
@pytest.mark.parametrize("kind", ["window", "window and full", "recurrent", "hybrid", "index"])
def test_windows_and_states_come_back_from_any_commit_of_a_journal(kind: str, tmp_path: Path) -> None:
    prompt = list(PROMPT.encode())
    with kvsnap.Session.open(tmp_path / "run.kvsnap") as session:
        engine = make(kind, "dynamic")
        tokens = kvsnap.generate(engine, prompt, max_tokens=17, sampler=SAMPLER)
        ids = [t.id for t in kvsnap.journal(engine, session, tokens, every=5)]
        engine.settle()
        wanted = logits(kvsnap.capture(engine))
        ends = [turn.n_tokens for turn in session.history[1:-1]]
        assert [end - len(prompt) for end in ends] == [0, 5, 10, 15]
        for end in ends:
            other = make(kind, "dynamic")
            kvsnap.restore(session.load(end), other)
            left = 17 - (end - len(prompt))
            assert [t.id for t in kvsnap.generate(other, max_tokens=left)] == ids[17 - left :]
            other.settle()
            assert logits(kvsnap.capture(other)) == wanted
        engine = make(kind, "dynamic")
        kvsnap.restore(session.load(ends[1]), engine, sampler=SAMPLER)  # not the random state of then
        assert [t.id for t in kvsnap.generate(engine, max_tokens=12)] != ids[5:]


# -- the command line --------------------------------------------------------------------------------------------------


def test_generate_and_resume_publish_on_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, path = str(save_tiny(tmp_path / "model")), str(tmp_path / "run.kvsnap")
    sampled = ("--temperature", "1", "--seed", "5")

    def kv(*args: str) -> Any:
        capsys.readouterr()
        code = run([*args, "--json"])
        out = capsys.readouterr().out
        assert code == 0, out
        return json.loads(out)

    alone = kv("generate", PROMPT, "--model", model, "--max-tokens", "30", *sampled)
    first = kv("generate", PROMPT, "--model", model, "--max-tokens", "20", *sampled, "--session", path, "--every", "8",
               "--save", str(tmp_path / "end.kvsnap"))  # fmt: skip
    assert (first["append"]["commits"], first["append"]["n_tokens"]) == (4, first["total_tokens"])
    assert kvsnap.load(tmp_path / "end.kvsnap").tokens == kvsnap.load(path).tokens
    second = kv("resume", path, "--append", "--every", "4", "--max-tokens", "10")
    assert first["tokens"] + second["tokens"] == alone["tokens"]
    assert second["append"]["commits"] == 3
    with kvsnap.Session.open(path, readonly=True) as session:
        assert [t.n_tokens - len(PROMPT) for t in session.history[1:]] == [0, 8, 16, 20, 24, 28, 30]
        assert session.load().metadata == {"model": model, "stop": "length"}
    capsys.readouterr()
    assert run(["generate", "Hello", "--model", model, "--session", str(tmp_path / "b.kvsnap"), "--every", "2",
                "--max-tokens", "3"]) == 0  # fmt: skip
    assert "in 3 commits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["generate", "Hello", "--every", "8"], "needs --session"),
        (["generate", "Hello", "--every", "8", "--save", "x.kvsnap"], "written once"),
        (["generate", "Hello", "--every", "0", "--session", "x.kvsnap"], "1 or more, found 0"),
    ],
)
def test_a_file_that_cannot_grow_is_refused_before_a_model_is_loaded(
    args: list[str], why: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([*args, "--model", "nowhere"]) == 2
    assert why in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_that_does_not_fit_leaves_no_session(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, path = str(save_tiny(tmp_path / "model")), tmp_path / "run.kvsnap"
    assert run(["generate", "x" * (CONTEXT + 1), "--model", model, "--session", str(path), "--every", "8"]) == 8
    assert not path.exists()
    capsys.readouterr()

"""Starting a session with a prompt: the best saved beginning is found, forked and left as it is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")


import kvsnap
from kvsnap.cli import run
from kvsnap.errors import ContextError, InputError, StorageError
from kvsnap.library import Library
from test_engine_static import make
from tiny_models import CONTEXT, ByteTokenizer, save_tiny, tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.newest, pytest.mark.usefixtures("one_thread")]

IDS = [(7 * i * i + 3 * i + 5) % 251 for i in range(60)]
KINDS = ("full", "window", "recurrent", "hybrid")


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    with Library(tmp_path / "library") as opened:
        yield opened


def store(library: Library, name: str, engine: Any, *turns: Sequence[int], settle: bool = True) -> None:
    """A session of these turns, each evaluated and published as one."""
    engine.reset()
    with library.open(name) as session:
        for turn in turns:
            engine.prefill(turn)
            if not settle:
                engine.step()
            session.append(kvsnap.capture(engine, start=session.n_rows, settle=settle))


def digests(library: Library) -> dict[str, str]:
    return {
        f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in Path(library.path).rglob("*") if path.parent.name in ("sessions", "names")
    }  # fmt: skip


def started(library: Library, name: str, engine: Any, ids: Any) -> tuple[kvsnap.Started, bytes]:
    """Start, check that nothing that was there has changed, and return the logits behind the prompt."""
    before, evaluated = digests(library), engine.evaluated
    done = kvsnap.start(library, name, engine, ids)
    with done.session as session:
        after = digests(library)
        assert {key: after[key] for key in before} == before, "a session that was only read has changed"
        assert engine.tokens == session.tokens == tuple(ids)
        assert session.load().tokens == engine.tokens
        assert (session.n_rows, session.complete) == (engine.n_rows, False) or done.restored.recomputed == 0
        assert engine.evaluated - evaluated == done.restored.recomputed == len(ids) - done.restored.reused
        logits = session.load().logits
        assert logits is not None
        return done, logits.array.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_is_evaluated_behind_the_best_beginning(kind: str, library: Library) -> None:
    engine = make(kind, "dynamic")
    store(library, "long", engine, IDS[:12], IDS[12:20], IDS[20:26])
    store(library, "other end", engine, IDS[:20], [9, 9, 9, 9, 9, 9, 9, 9])
    store(library, "short", engine, IDS[:12])  # used last
    done, logits = started(library, "new", engine, IDS[:30])
    assert (done.source, done.restored.reused, done.restored.recomputed) == ("long", 26, 4)
    assert done.restored.exact
    plain = make(kind, "dynamic")  # the same passes without a file
    for part in (IDS[:12], IDS[12:20], IDS[20:26], IDS[26:30]):
        plain.prefill(part)
    found = kvsnap.capture(plain).logits
    assert found is not None
    assert found.array.tobytes() == logits
    assert [t.id for t in kvsnap.generate(engine, max_tokens=5)] == [t.id for t in kvsnap.generate(plain, max_tokens=5)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_leaves_a_turn_inside_of_it_goes_back_as_far_as_the_layers_need(
    kind: str, library: Library
) -> None:
    engine = make(kind, "dynamic")
    store(library, "talk", engine, IDS[:12], IDS[12:30])
    asked = [*IDS[:17], 3, 3, 3]
    done, _ = started(library, "new", engine, asked)
    stateful = kind in ("recurrent", "hybrid")
    wanted = 12 if stateful else 17
    if kind == "window":
        with library.open("talk", readonly=True) as session:
            wanted = session.reach(17).n_tokens
    assert (done.source, done.restored.reused) == ("talk", wanted)
    assert done.restored.exact == (wanted == 12), "inside of a turn the last bits can differ"


def test_a_short_session_that_was_used_last_never_hides_a_longer_one(library: Library) -> None:
    engine = make("hybrid", "dynamic")
    # Most of it agrees, but a state is at the end of its turns only: 6 of 25 ids are of use.
    store(library, "agrees longest", engine, IDS[:6], IDS[6:40])
    store(library, "of most use", engine, IDS[:10], IDS[10:16])
    store(library, "short", engine, IDS[:8])
    done, _ = started(library, "new", engine, [*IDS[:25], 1])
    assert (done.source, done.restored.reused) == ("of most use", 16)


def test_equal_beginnings_pending_ids_and_a_full_hit(library: Library) -> None:
    engine = make("full", "dynamic")
    store(library, "one", engine, IDS[:10])
    store(library, "two", engine, IDS[:10], settle=False)
    with library.open("two", readonly=True) as session:
        pending = session.tokens
        assert session.n_pending == 1
    done, logits = started(library, "a", engine, IDS[:10])  # a full hit of "one"; of "two" the logits went on
    assert (done.restored.reused, done.restored.recomputed) == (10, 0)
    plain = make("full", "dynamic")
    plain.prefill(IDS[:10])
    wanted = kvsnap.capture(plain).logits
    assert wanted is not None
    assert logits == wanted.array.tobytes()
    done, _ = started(library, "b", engine, [*pending, 4, 5])
    assert (done.restored.reused, done.restored.recomputed) == (10, 3)
    again, _ = started(library, "c", engine, [*pending, 4, 5])
    assert (again.source, again.restored.reused) == ("b", 13)


def test_only_sessions_of_this_model_count(library: Library) -> None:
    ours, theirs = kvsnap.connect(tiny_llama(0)), kvsnap.connect(tiny_llama(1))
    store(library, "ours", ours, IDS[:6])
    store(library, "theirs", theirs, IDS[:20])
    done, _ = started(library, "new", ours, IDS[:25])
    assert (done.source, done.restored.reused) == ("ours", 6)
    done, _ = started(library, "newer", theirs, IDS[:25])
    assert (done.source, done.restored.reused) == ("theirs", 20)


def test_where_nothing_agrees_all_is_evaluated_and_said(library: Library) -> None:
    engine = kvsnap.connect(tiny_llama(), ByteTokenizer())
    store(library, "other", engine, [1, 2, 3])
    done, _ = started(library, "new", engine, [2, 3, 4])
    assert (done.source, done.restored.reused, done.restored.recomputed) == ("", 0, 3)
    assert "no session begins like this" in done.restored.notes[0]
    done = kvsnap.start(library, "text", engine, "Hello")
    done.session.close()
    assert done.session.tokens == tuple(b"Hello")


def test_what_goes_wrong_leaves_no_session_and_changes_none(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = kvsnap.connect(tiny_llama())
    store(library, "talk", engine, IDS[:10])
    before = digests(library)
    for name, ids, error in (
        ("talk", IDS[:12], InputError), ("new", [], InputError), ("new", [*IDS[:10], 256], InputError),
        ("new", [*IDS[:10], *[1] * CONTEXT], ContextError), ("a/b", IDS, InputError),
    ):  # fmt: skip
        with pytest.raises(error):
            kvsnap.start(library, name, engine, ids)
        assert digests(library) == before
        assert [entry.name for entry in library.list()] == ["talk"]

    def full(*_: Any, **__: Any) -> None:
        raise StorageError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(kvsnap.library.LibrarySession, "append", full)
        with pytest.raises(StorageError):
            kvsnap.start(library, "new", engine, IDS[:12])
    assert digests(library) == before


def test_a_session_that_shrank_between_look_and_fork_is_looked_for_again(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = kvsnap.connect(tiny_llama())
    store(library, "talk", engine, IDS[:10], IDS[10:20])
    find, looks = Library.find, []

    def overtaken(self: Library, *args: Any) -> Any:
        found = find(self, *args)
        looks.append(found)
        if len(looks) == 1:
            with self.open("talk") as session:
                session.truncate(10)
        return found

    monkeypatch.setattr(Library, "find", overtaken)
    done = kvsnap.start(library, "new", engine, IDS[:25])
    done.session.close()
    assert (done.source, done.restored.reused, len(looks)) == ("talk", 10, 2)


# -- the command line --------------------------------------------------------------------------------------------------


def test_find_takes_a_prompt_and_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSNAP_LIBRARY", str(tmp_path / "library"))
    ours, theirs = str(save_tiny(tmp_path / "ours")), str(save_tiny(tmp_path / "theirs", seed=1))

    def kv(*args: str) -> tuple[int, Any]:
        capsys.readouterr()
        code = run([*args, "--json"])
        return code, json.loads(capsys.readouterr().out)

    text = "A long context, read once."
    for name, model in (("@mine", ours), ("@yours", theirs)):
        assert kv("generate", text, "--session", name, "--model", model, "--max-tokens", "2")[0] == 0
    (tmp_path / "prompt.txt").write_text(f"{text[:-1]}?")
    for asked in (("--prompt", f"{text[:-1]}?"), ("--prompt-file", str(tmp_path / "prompt.txt")),
                  ("--prompt-ids", " ".join(map(str, text[:-1].encode())))):  # fmt: skip
        for name, model in (("mine", ours), ("yours", theirs)):
            code, data = kv("find", *asked, "--model", model)
            assert (code, data["found"]["name"], data["found"]["n_rows"]) == (0, name, len(text) - 1)
    assert kv("find", "--prompt", "Other", "--model", ours) == (
        3, {"path": str(tmp_path / "library"), "n_tokens": 5, "found": None},
    )  # fmt: skip
    assert run(["find", "--prompt", text, "--model", ours]) == 0
    assert capsys.readouterr().out.startswith(f"mine: {len(text)} of {len(text)} tokens agree")
    for wrong in ((), ("--prompt", "a", "--tokens-from", "@mine"), ("--prompt", "a", "--prompt-ids", "1")):
        assert run(["find", *wrong, "--model", "nowhere"]) == 2

"""The state of a draft in the file of the model: comes back as it was, or the draft starts empty and says why."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvsnap  # noqa: E402 - after the extras are known to be there
from kvsnap.drafts import restore_draft  # noqa: E402
from kvsnap.engines.transformers import TransformersEngine  # noqa: E402
from kvsnap.errors import DamagedError, FormatError, InputError  # noqa: E402
from latent_runs import bits  # noqa: E402
from spec_file import SpecReader  # noqa: E402
from test_engine_static import make  # noqa: E402
from tiny_models import tiny_llama, tiny_qwen3  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.newest, pytest.mark.usefixtures("one_thread")]

IDS = [(11 * i * i + 5) % 251 for i in range(12)]
KEY = bytes(range(32))


def pair(kind: str = "full") -> tuple[TransformersEngine, TransformersEngine]:
    return make(kind, "dynamic"), TransformersEngine(tiny_qwen3())


def begun(kind: str = "full", n: int = 9) -> tuple[TransformersEngine, TransformersEngine]:
    engine, draft = pair(kind)
    for _ in kvsnap.speculate(engine, draft, IDS, max_tokens=n):
        pass
    return engine, draft


def test_both_go_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    engine, draft = begun()
    path = tmp_path / "a.kvsnap"
    kvsnap.capture(engine, draft=draft).save(path)
    snapshot = kvsnap.load(path)
    kept = kvsnap.draft_of(snapshot)
    assert kept is not None
    assert kept.tokens == draft.tokens == engine.tokens[: len(draft.tokens)]
    assert kept.n_rows < snapshot.n_rows  # it is behind the model by what it has not seen yet
    assert bits(kept) == bits(draft.capture())
    other, other_draft = pair()
    done = kvsnap.restore(snapshot, other, draft=other_draft)
    assert done.drafted == len(draft.tokens)
    assert not any("starts empty" in note for note in done.notes)
    assert bits(other_draft.capture()) == bits(draft.capture())
    evaluated = draft.evaluated, other_draft.evaluated
    runs = [kvsnap.speculate(engine, draft, max_tokens=12), kvsnap.speculate(other, other_draft, max_tokens=12)]
    first, second = ([(token.id, token.logprob) for token in run] for run in runs)
    assert first == second
    assert runs[0].done == runs[1].done
    assert draft.evaluated - evaluated[0] == other_draft.evaluated - evaluated[1]  # the history was not read again
    assert bits(engine.capture()) == bits(other.capture())
    assert bits(draft.capture()) == bits(other_draft.capture())


@pytest.mark.parametrize("kind", ["full", "recurrent"])
def test_a_session_keeps_the_draft_of_each_turn(tmp_path: Path, kind: str) -> None:
    engine, draft = pair(kind)
    ends, drafts = [], []
    with kvsnap.Session.open(tmp_path / "s.kvsnap") as session:
        for turn in ([1, 2, 3, 4], [5, 6], [7, 8, 9]):
            for _ in kvsnap.speculate(engine, draft, turn, max_tokens=5):
                pass
            # The second turn says nothing of a draft.
            with_draft = draft if len(ends) != 1 else None
            session.append(kvsnap.capture(engine, start=session.n_rows, draft=with_draft))
            ends.append(len(engine.tokens))
            drafts.append(draft.capture())
        assert bits(kvsnap.draft_of(session.load())) == bits(drafts[2])
        assert session.load(ends[1]).draft is None
        assert bits(kvsnap.draft_of(session.load(ends[0]))) == bits(drafts[0])
        if kind == "full":
            assert session.reach(ends[0] - 1).reached  # a draft takes no length away
            assert session.load(ends[0] - 1).draft is None
        session.compact()
        assert bits(kvsnap.draft_of(session.load())) == bits(drafts[2])
        session.truncate(ends[0])
        assert bits(kvsnap.draft_of(session.load())) == bits(drafts[0])
    assert kvsnap.verify(tmp_path / "s.kvsnap").ok
    whole = SpecReader((tmp_path / "s.kvsnap").read_bytes()).content()
    assert bytes(whole["tensors"]["draft"]) == kvsnap.load(tmp_path / "s.kvsnap").draft.array.tobytes()


def test_an_encrypted_file_hides_the_draft_too(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    engine, draft = begun()
    snapshot = kvsnap.capture(engine, draft=draft)
    kvsnap.save(snapshot, tmp_path / "a.kvsnap", key=KEY)
    raw = (tmp_path / "a.kvsnap").read_bytes()
    assert snapshot.draft.array.tobytes()[:8] in raw  # the magic of the file itself
    assert raw.count(snapshot.draft.array.tobytes()[:8]) == 1
    assert bits(kvsnap.draft_of(kvsnap.load(tmp_path / "a.kvsnap", key=KEY))) == bits(draft.capture())


def damaged(path: Path) -> kvsnap.Snapshot:
    snapshot, raw = kvsnap.load(path), bytearray(path.read_bytes())
    inner = snapshot.draft.array.tobytes()
    raw[raw.index(inner) + len(inner) // 2] ^= 1
    del snapshot
    path.write_bytes(raw)
    return kvsnap.load(path)


def another_history(path: Path) -> kvsnap.Snapshot:
    snapshot = kvsnap.load(path)
    other = TransformersEngine(tiny_qwen3())
    other.prefill([9, 9])
    made = kvsnap.with_draft(dataclasses.replace(snapshot, tokens=(9, 9, *snapshot.tokens[2:])), other.capture())
    return dataclasses.replace(snapshot, draft=made.draft)


def no_file(path: Path) -> kvsnap.Snapshot:
    snapshot = kvsnap.load(path)
    spec = snapshot.draft.spec
    return dataclasses.replace(snapshot, draft=kvsnap.Tensor(spec, np.frombuffer(b"not a file", np.uint8)))


def none(path: Path) -> kvsnap.Snapshot:
    return kvsnap.with_draft(kvsnap.load(path), None)


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (damaged, "starts empty: .*damaged|starts empty: .*checksum"),
        (another_history, "starts empty: the draft is of another history"),
        (no_file, "starts empty"),
        (none, "no state of a draft is stored"),
    ],
)
def test_what_cannot_be_used_of_it_is_said_and_the_tokens_are_right(change: Any, note: str, tmp_path: Path) -> None:
    engine, draft = begun()
    path = tmp_path / "a.kvsnap"
    kvsnap.capture(engine, draft=draft).save(path)
    wanted = [token.id for token in kvsnap.generate(engine, max_tokens=12)]
    snapshot = change(path)
    other, other_draft = pair()
    other_draft.prefill([5, 5, 5])
    done = kvsnap.restore(snapshot, other, draft=other_draft)
    assert done.drafted == 0
    assert any(re.search(note, found) for found in done.notes)
    assert other_draft.tokens == ()
    assert [token.id for token in kvsnap.speculate(other, other_draft, max_tokens=12)] == wanted


def test_the_state_of_another_draft_is_not_taken() -> None:
    engine, draft = begun()
    snapshot = kvsnap.capture(engine, draft=draft)
    wanted = [token.id for token in kvsnap.generate(engine, max_tokens=12)]
    for model in (tiny_qwen3(seed=99), tiny_llama(seed=5)):
        other, other_draft = make("full", "dynamic"), TransformersEngine(model)
        done = kvsnap.restore(snapshot, other, draft=other_draft)
        assert (done.drafted, other_draft.tokens) == (0, ())
        assert any(note.startswith("the draft starts empty: ") and "weights" in note for note in done.notes)
        assert [token.id for token in kvsnap.speculate(other, other_draft, max_tokens=12)] == wanted


def test_a_failed_restore_leaves_the_draft_as_it_is(tmp_path: Path) -> None:
    engine, draft = begun()
    snapshot = kvsnap.capture(engine, draft=draft)
    other, other_draft = TransformersEngine(tiny_llama(seed=77)), TransformersEngine(tiny_qwen3())
    other_draft.prefill([5, 5, 5])
    with pytest.raises(kvsnap.KvsnapError):
        kvsnap.restore(snapshot, other, draft=other_draft)
    assert other_draft.tokens == (5, 5, 5)


def test_damage_is_found_when_the_draft_is_read_and_nowhere_before(tmp_path: Path) -> None:
    engine, draft = begun()
    path = tmp_path / "a.kvsnap"
    kvsnap.capture(engine, draft=draft).save(path)
    snapshot = damaged(path)
    assert bits(snapshot) == bits(engine.capture())
    with pytest.raises(DamagedError):
        kvsnap.draft_of(snapshot)
    assert not kvsnap.verify(path).ok


def test_what_is_no_draft_of_this_history_is_refused() -> None:
    engine, draft = begun()
    snapshot = kvsnap.capture(engine, draft=draft)
    with pytest.raises(InputError, match="captured whole"):
        kvsnap.with_draft(snapshot, draft.capture(start=2))
    other = TransformersEngine(tiny_qwen3())
    other.prefill([1, 2])
    with pytest.raises(InputError, match="another history"):
        kvsnap.with_draft(snapshot, other.capture())
    with pytest.raises(FormatError, match="another history"):
        kvsnap.draft_of(dataclasses.replace(snapshot, tokens=(1, *snapshot.tokens[1:])))
    # A capture keeps what is of the same ids: here nothing, and here what is before the cut.
    assert kvsnap.capture(engine, draft=other).draft is None
    engine.rewind(len(IDS) + 2)
    kept = kvsnap.draft_of(kvsnap.capture(engine, draft=draft))
    assert kept.tokens == engine.tokens
    assert kept.n_rows == len(IDS) + 2


def test_a_cut_an_edit_and_other_formats_leave_the_draft_behind(tmp_path: Path) -> None:
    engine, draft = begun()
    snapshot = kvsnap.capture(engine, draft=draft)
    assert snapshot.truncate(len(IDS)).draft is None
    assert snapshot.truncate(len(snapshot.tokens)).draft is not None
    assert kvsnap.remove(snapshot, [(2, 4)], engine=engine).draft is None
    assert all(part.draft is None for part in kvsnap.split(snapshot, 2))
    for name in ("safetensors", "mlxkv"):
        path = tmp_path / f"a.{name}"
        report = kvsnap.save(snapshot, path, format=name)
        assert "draft" in {loss.what for loss in report.losses}
        assert kvsnap.load(path).draft is None
    assert kvsnap.inspect(tmp_path / "a.mlxkv").draft_bytes == 0
    snapshot.save(tmp_path / "a.kvsnap")
    assert kvsnap.inspect(tmp_path / "a.kvsnap").draft_bytes == snapshot.draft.nbytes


def test_a_file_of_colibri_restores_no_draft() -> None:
    snapshot = kvsnap.load(Path(__file__).parent / "data" / "colikv" / "v1_mtp_model.coli_kv")
    assert snapshot.draft is None
    draft = TransformersEngine(tiny_qwen3())
    draft.prefill([1, 2, 3])
    assert restore_draft(snapshot, draft) == (0, ("no state of a draft is stored: the draft starts empty",))
    assert draft.tokens == ()

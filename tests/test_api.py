"""The public functions on a live engine: what they do, what they refuse, and that a refusal changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvsnap
from kvsnap.errors import CompatibilityError, ContextError, DamagedError, InputError
from synthetic import snapshot as synthetic

torch = pytest.importorskip("torch")
from tiny_models import PROMPT as TEXT  # noqa: E402 # needs torch
from tiny_models import tiny_llama  # noqa: E402 # needs torch

PROMPT = list(TEXT.encode())

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def engine() -> Any:
    return kvsnap.connect(tiny_llama())


def ids(engine: Any, count: int, **options: Any) -> list[int]:
    return [token.id for token in kvsnap.generate(engine, max_tokens=count, **options)]


@pytest.fixture
def saved(engine: Any, tmp_path: Path) -> Path:
    list(kvsnap.generate(engine, PROMPT, max_tokens=6))
    path = tmp_path / "a.kvsnap"
    kvsnap.capture(engine, settle=True).save(path)
    return path


def test_restore_goes_on_and_says_so(engine: Any, saved: Path) -> None:
    expected = ids(engine, 8)
    other = kvsnap.connect(tiny_llama())
    done = kvsnap.restore(kvsnap.load(saved), other)
    assert done.exact
    assert (done.reused, done.recomputed, done.notes) == (len(PROMPT) + 6, 0, ())
    before = other.forwards
    first = next(kvsnap.generate(other, max_tokens=1))
    assert other.forwards == before
    assert [first.id, *ids(other, 7)] == expected


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"])
def test_one_changed_weight_is_refused_by_name_and_changes_nothing(saved: Path, name: str) -> None:
    model = tiny_llama()
    other = kvsnap.connect(model)
    list(kvsnap.generate(other, PROMPT[:5], max_tokens=3))
    reference = kvsnap.connect(tiny_llama())
    list(kvsnap.generate(reference, PROMPT[:5], max_tokens=3))
    with torch.no_grad():
        dict(model.named_parameters())[name].data[0, 0] += 1e-3  # .data: torch counts no new version
    with pytest.raises(CompatibilityError, match=f"weights differ: layer {name.split('.')[2]} {name.split('.')[4]}"):
        kvsnap.restore(kvsnap.load(saved), other)
    with torch.no_grad():
        dict(model.named_parameters())[name].data[0, 0] -= 1e-3
    assert ids(other, 8) == ids(reference, 8)


def test_accepting_is_by_name_and_never_exact(saved: Path) -> None:
    model = tiny_llama(seed=1)
    other = kvsnap.connect(model)
    report = kvsnap.check(kvsnap.load(saved), other)
    assert not report.ok
    assert report.to_accept == ("weights",)
    with pytest.raises(InputError, match="no field"):
        kvsnap.check(kvsnap.load(saved), other, accept=["weight"])
    done = kvsnap.restore(kvsnap.load(saved), other, accept=report.to_accept)
    assert not done.exact
    assert any("weights differ" in note for note in done.notes)


def test_a_damaged_file_changes_nothing(engine: Any, saved: Path) -> None:
    raw = bytearray(saved.read_bytes())
    snapshot = kvsnap.load(saved)
    last = snapshot.layers[-1].tensors[-1]
    place = raw.find(last.array.tobytes()[:64])
    raw[place] ^= 1
    saved.write_bytes(raw)
    other = kvsnap.connect(tiny_llama())
    list(kvsnap.generate(other, PROMPT[:4], max_tokens=2))
    reference = kvsnap.connect(tiny_llama())
    list(kvsnap.generate(reference, PROMPT[:4], max_tokens=2))
    with pytest.raises(DamagedError, match=last.name):
        kvsnap.restore(kvsnap.load(saved), other)
    assert ids(other, 6) == ids(reference, 6)


def test_sampler_given_to_restore_replaces_the_saved_one(saved: Path) -> None:
    snapshot = kvsnap.load(saved)
    runs = []
    for seed in (1, 1, 2):
        other = kvsnap.connect(tiny_llama())
        kvsnap.restore(snapshot, other, sampler=kvsnap.Sampler(temperature=1.5, seed=seed))
        runs.append(ids(other, 12))
    assert runs[0] == runs[1] != runs[2]


def test_sweep_equals_each_alone_without_evaluating_again(saved: Path) -> None:
    snapshot = kvsnap.load(saved)
    samplers = [kvsnap.Sampler(), *(kvsnap.Sampler(temperature=1.2, top_k=20, seed=s) for s in (3, 4))]
    engine = kvsnap.connect(tiny_llama())
    swept = kvsnap.sweep(snapshot, engine, samplers, max_tokens=9)
    assert [run.forwards for run in swept] == [8, 8, 8]
    assert len({run.tokens for run in swept}) == 3
    for settings, run in zip(samplers, swept, strict=True):
        alone = kvsnap.connect(tiny_llama())
        kvsnap.restore(snapshot, alone)
        assert tuple(ids(alone, 9, sampler=settings)) == run.tokens
        assert run.stop == "length"
    assert engine.tokens == snapshot.tokens
    with pytest.raises(InputError):
        kvsnap.sweep(snapshot, engine, [])


def test_a_full_context_ends_a_sweep_and_stops_generate(saved: Path) -> None:
    model = tiny_llama(max_position_embeddings=len(PROMPT) + 10)
    engine = kvsnap.connect(model)
    list(kvsnap.generate(engine, PROMPT, max_tokens=6))
    snapshot = kvsnap.capture(engine, settle=True)
    (run,) = kvsnap.sweep(snapshot, engine, [kvsnap.Sampler()], max_tokens=50)
    assert (run.stop, len(run.tokens)) == ("context", 4)
    got = []
    with pytest.raises(ContextError) as caught:
        for token in kvsnap.generate(engine, max_tokens=50):
            got.append(token.id)  # noqa: PERF401 # what came before the error
    assert tuple(got) == run.tokens
    assert str(len(PROMPT) + 10) in str(caught.value)


def test_too_long_a_snapshot_names_both_numbers(saved: Path) -> None:
    snapshot = kvsnap.load(saved)
    engine = kvsnap.connect(tiny_llama())
    limit = engine.context_limit
    with pytest.raises(ContextError, match=str(limit)):
        kvsnap.restore(snapshot, engine, draft_reserve=limit)
    assert engine.tokens == ()


def test_warm_from_tokens_is_never_exact(engine: Any) -> None:
    list(kvsnap.generate(engine, PROMPT, max_tokens=6))
    other = kvsnap.connect(tiny_llama())
    done = kvsnap.warm_from_tokens(other, engine.tokens)
    assert (done.exact, done.reused, done.recomputed) == (False, 0, len(engine.tokens))
    assert other.tokens == engine.tokens
    for bad in ([], [10**6], [-1]):
        with pytest.raises(InputError):
            kvsnap.warm_from_tokens(other, bad)
    assert other.tokens == engine.tokens


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("", 4), ([], 4), (PROMPT, 0), (PROMPT, -1), ([{"role": "user"}], 4), ([10**7], 4), ([1.5], 4)],
)
def test_bad_prompts(engine: Any, prompt: Any, count: int) -> None:
    with pytest.raises(InputError):
        kvsnap.generate(engine, prompt, max_tokens=count)
    assert (engine.tokens, engine.forwards) == ((), 0)


def test_restore_says_what_it_takes(engine: Any, saved: Path) -> None:
    for wrong in (str(saved), saved, saved.read_bytes(), None):
        with pytest.raises(InputError, match="load"):
            kvsnap.restore(wrong, engine)  # type: ignore[arg-type]
    with pytest.raises(kvsnap.KvsnapError, match="no engine"):
        kvsnap.connect(object())


def test_a_session_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s.kvsnap"
    with kvsnap.Session.open(path) as session:
        session.append(synthetic(range(5)))
    other = tmp_path / "o.kvsnap"
    synthetic(range(3)).save(other)
    before = path.read_bytes()
    with pytest.raises(InputError, match="session"):
        kvsnap.load(other).save(path)
    with pytest.raises(InputError, match="session"):
        kvsnap.convert(other, path)
    assert path.read_bytes() == before
    synthetic(range(4)).save(other)
    assert kvsnap.load(other).tokens == (0, 1, 2, 3)


def test_a_sampler_of_the_wrong_type_is_refused_before_anything_changes(engine: Any, saved: Path) -> None:
    snapshot = kvsnap.load(saved)
    other = kvsnap.connect(tiny_llama())
    list(kvsnap.generate(other, PROMPT[:4], max_tokens=2))
    before = other.tokens
    with pytest.raises(InputError, match="sampler"):
        kvsnap.restore(snapshot, other, sampler=snapshot.sampler)  # type: ignore[arg-type]
    assert other.tokens == before


def test_weights_changed_under_live_rows_are_not_captured() -> None:
    model = tiny_llama()
    engine = kvsnap.connect(model)
    list(kvsnap.generate(engine, PROMPT, max_tokens=2))
    kvsnap.capture(engine)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.add_(1e-2)
    with pytest.raises(kvsnap.KvsnapError, match="weights were changed"):
        kvsnap.capture(engine)
    engine.reset()
    list(kvsnap.generate(engine, PROMPT, max_tokens=2))
    kvsnap.capture(engine)


def test_what_changes_bits_is_not_called_exact(saved: Path) -> None:
    snapshot = kvsnap.load(saved)
    assert kvsnap.restore(snapshot, kvsnap.connect(tiny_llama())).exact
    from kvsnap.engines.transformers import TransformersEngine

    assert not kvsnap.restore(snapshot, TransformersEngine(tiny_llama(), prefill_step=8)).exact
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not kvsnap.restore(snapshot, kvsnap.connect(tiny_llama())).exact
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        done = kvsnap.restore(snapshot, kvsnap.connect(tiny_llama()))
    assert not done.exact
    assert any("sdp" in note for note in done.notes)


def test_who_knows_the_weights_of_a_foreign_file_may_say_so(engine: Any, tmp_path: Path) -> None:
    list(kvsnap.generate(engine, PROMPT, max_tokens=6))
    path = tmp_path / "a.kv"
    captured = kvsnap.capture(engine, settle=True)
    captured.save(path, format="mlxkv")
    expected = ids(engine, 8)
    other = kvsnap.connect(tiny_llama())
    foreign = kvsnap.load(path)
    with pytest.raises(CompatibilityError, match="weights: unknown"):
        kvsnap.restore(foreign, other)
    assert not kvsnap.restore(foreign, other, accept=["weights"]).exact
    declared = replace(foreign, identity=captured.identity)
    assert kvsnap.restore(declared, other).exact
    assert ids(other, 8) == expected
    changed = kvsnap.connect(tiny_llama(seed=1))
    with pytest.raises(CompatibilityError, match="weights differ"):
        kvsnap.restore(declared, changed)

"""Scoring a given text beside the live sequence, on layers of every kind: the logits, and what is left behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import kvsnap  # noqa: E402 - after the extras are known to be there
from compressed_models import compressed_model  # noqa: E402
from encdec_models import encdec_model, input_of  # noqa: E402
from kvsnap.engines.transformers import TransformersEngine  # noqa: E402
from kvsnap.errors import ConflictError, ContextError, InputError  # noqa: E402
from latent_models import KNOWN, latent_model  # noqa: E402
from test_engine_layers import MODELS  # noqa: E402
from test_engine_layers import make as layered  # noqa: E402
from test_engine_quantised import make as quantised  # noqa: E402
from tiny_models import tiny_llama  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.newest, pytest.mark.usefixtures("one_thread")]

IDS = [(7 * i * i + 3 * i + 5) % 251 for i in range(30)]
TEXT = [(5 * i * i + 11 * i + 2) % 251 for i in range(17)]
KINDS = (*MODELS, "latent", "index", "compressed", "blocks", "encoder-decoder", "static", "quantised")


def make(kind: str) -> TransformersEngine:
    if kind in MODELS:
        return layered(kind)
    if kind in ("latent", "index"):
        name = {"latent": "deepseek_v3", "index": "deepseek_v32"}[kind]
        if name not in KNOWN:
            pytest.skip(f"this release has no {name}")
        return TransformersEngine(latent_model(name))
    if kind in ("compressed", "blocks"):
        return TransformersEngine(compressed_model({"compressed": "v4", "blocks": "m3"}[kind]))
    if kind == "quantised":
        return quantised("fp8")
    if kind == "static":
        return TransformersEngine(tiny_llama(), cache="static", cache_options={"max_cache_len": 96})
    engine = TransformersEngine(encdec_model("t5"))
    engine.encode(**input_of("t5"))
    return engine


def begun(kind: str) -> TransformersEngine:
    engine = make(kind)
    engine.prefill(IDS)
    engine.step()
    return engine


def ids_of(engine: Any, count: int) -> list[int]:
    return [engine.step().id for _ in range(count)]


def raw(snapshot: kvsnap.Snapshot) -> list[bytes]:
    return [np.ascontiguousarray(t.array).tobytes() for t in [*snapshot.tensors(), *snapshot.loose()]]


@pytest.mark.parametrize("kind", KINDS)
def test_itself_is_identical_q8_is_near_and_the_live_sequence_stays(kind: str) -> None:
    engine, control = begun(kind), begun(kind)
    snapshot, before = engine.capture(), raw(engine.capture())
    found = kvsnap.quality(snapshot, snapshot, engine, codec="q8", continuation=TEXT)
    same, q8 = found.others
    assert (same.verdict, same.kl_max, same.n, same.n_bad) == ("identical", 0, len(TEXT), 0)
    assert q8.kl_mean is not None
    assert (q8.n_bad, q8.kl_mean == 0) == (0, q8.bound == 0)
    assert q8.kl_mean < 1
    assert raw(engine.capture()) == before
    assert ids_of(engine, 6) == ids_of(control, 6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_those_of_evaluating_ids_one_by_one(kind: str) -> None:
    engine, control = begun(kind), begun(kind)
    found = np.concatenate(list(engine.score(TEXT)))
    assert (found.dtype, found.shape) == (np.float32, (len(TEXT), engine.vocab_size))
    assert (engine.tokens[-len(TEXT) :], engine.n_pending) == (tuple(TEXT), 0)
    control.settle()
    logits = control.capture().logits
    for place, token in enumerate(TEXT):
        assert logits is not None
        assert (
            np.abs(found[place] - logits.array).max() > 0.02 * np.abs(logits.array).max()
        )  # those of the place before
        control.prefill([token])
        logits = control.capture().logits
        assert logits is not None
        assert np.abs(found[place] - logits.array).max() < 2e-3 * np.abs(logits.array).max()
    assert ids_of(engine, 4) == ids_of(control, 4)


def test_blocks_are_in_order_and_one_that_is_left_early_stands_behind_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, whole = begun("full"), begun("full")
    monkeypatch.setattr("kvsnap.engines._tf_score._BLOCK_BYTES", 4 * 256 * 5)
    blocks = [block.copy() for block in engine.score(TEXT)]
    assert [len(block) for block in blocks] == [5, 5, 5, 2]
    for block in whole.score(TEXT):
        assert np.array_equal(block, blocks[0])
        block[:] = 0  # it is the caller's own
        break
    assert whole.tokens[31:] == tuple(TEXT[:5])
    rest = list(whole.score(TEXT[5:]))
    assert [len(block) for block in rest] == [5, 5, 2]
    assert np.array_equal(np.concatenate(rest), np.concatenate(blocks[1:]))


def test_a_change_between_two_blocks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, control = begun("full"), begun("full")
    monkeypatch.setattr("kvsnap.engines._tf_score._BLOCK_BYTES", 4 * 256 * 5)
    with engine.aside():
        engine.prefill(IDS[:4])
        blocks, others = engine.score(TEXT), engine.score(TEXT)
        next(blocks)
    for one in (blocks, others):
        with pytest.raises(ConflictError, match="changed while a text was scored"):
            next(one)  # the sequence that waited is not the one that was scored
    assert ids_of(engine, 4) == ids_of(control, 4)


def test_what_cannot_be_scored_is_refused_before_anything_is_evaluated() -> None:
    engine = begun("full")
    before, forwards = raw(engine.capture()), engine.forwards
    for ids, error in (([], InputError), ([1, 256], InputError), ([1] * 500, ContextError)):
        with pytest.raises(error):
            engine.score(ids)
    assert (engine.forwards, engine.n_pending) == (forwards, 1)
    assert raw(engine.capture()) == before


def test_whatever_fails_aside_the_live_sequence_comes_back() -> None:
    engine, control = begun("hybrid"), begun("hybrid")
    other, sampler = kvsnap.capture(begun("hybrid")), engine.sampler
    for error in (ZeroDivisionError, KeyboardInterrupt):
        with pytest.raises(error), engine.aside():
            assert engine.tokens == ()
            engine.install(other)
            engine.sampler = kvsnap.layout.SamplerState(kvsnap.Sampler(temperature=1), kvsnap.layout.RandomState(5))
            engine.step()
            raise error
    assert engine.sampler == sampler
    assert ids_of(engine, 8) == ids_of(control, 8)


def test_a_pass_that_fails_aside_is_undone_with_it() -> None:
    engine, control = begun("window and full"), begun("window and full")
    snapshot = engine.capture()
    layers = next(p for p in engine.model.modules() if type(p).__name__ == "ModuleList" and len(p) == 3)
    hook = layers[2].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kvsnap.quality(snapshot, (), engine, codec="q8", continuation=TEXT)
    hook.remove()
    assert ids_of(engine, 8) == ids_of(control, 8)


def test_a_batch_stays_a_batch() -> None:
    engine = begun("full")
    snapshot = engine.capture()
    engine.install(snapshot, rows=2)
    kvsnap.quality(snapshot, (), engine, codec="q8", continuation=TEXT)
    assert engine.rows == 2
    assert engine.capture(row=1).tokens == snapshot.tokens


def test_who_looks_on_sees_the_live_sequence_only() -> None:
    engine = make("full")
    with kvsnap.probe(engine) as seen:
        engine.prefill(IDS)
        kvsnap.quality(kvsnap.capture(engine), (), engine, codec="q8", n_tokens=5)
        engine.prefill(TEXT)
    found = seen.snapshot()
    assert found.tokens == (*IDS, *TEXT)
    assert found.queries(0, 0).shape[0] == len(IDS) + len(TEXT)

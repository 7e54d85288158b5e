"""Rewinding the live cache: the truth table of each kind of layer, and the numbers against counted positions."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvsnap  # noqa: E402 - after the extras are known to be there
from kvsnap.engines import _tf_layers  # noqa: E402
from kvsnap.engines.transformers import TransformersEngine  # noqa: E402
from kvsnap.errors import InputError, UnsupportedError  # noqa: E402
from kvsnap.reach import Reach  # noqa: E402
from latent_runs import bits, ids_of  # noqa: E402
from test_engine_static import KINDS, make  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.newest]

PROMPT = [(11 * i * i + 5) % 251 for i in range(5)]
FULL = ("full", "index")
STATES = ("recurrent", "hybrid")


def begun(kind: str, cache: str, n_tokens: int) -> TransformersEngine:
    """An engine whose rows behind the prompt were evaluated one by one, so that every cut is also a split."""
    engine = make(kind, cache)
    engine.prefill(PROMPT[: min(len(PROMPT), n_tokens)])
    while len(engine.tokens) < n_tokens:
        engine.step()
    engine.settle()
    return engine


def reached(kind: str, asked: int, total: int) -> int:
    """The nearest length at or below `asked` that a live cache of `total` rows goes back to, by kind of layer."""
    if asked == total:
        return total
    if kind in STATES:
        return 0
    if kind in FULL:
        return asked
    # A window of 8 keeps the last 7 rows: it goes back only while it has lost none.
    return asked if total < 8 else 0


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("total", [6, 7, 8, 9, 12])
def test_the_truth_table(kind: str, cache: str, total: int) -> None:
    source = begun(kind, cache, total)
    snapshot, tokens = source.capture(), source.tokens
    for asked in range(total + 1):
        engine = make(kind, cache)
        engine.install(snapshot)
        nearest = reached(kind, asked, total)
        reach = engine.reach(asked)
        assert (reach.asked, reach.n_tokens, reach.reused, reach.recomputed) == (
            asked, nearest, nearest, asked - nearest,
        )  # fmt: skip
        assert bool(reach.limits) == (nearest != asked)
        if nearest != asked:
            before = bits(engine.capture())
            with pytest.raises(UnsupportedError, match=rf"nearest reachable length is {nearest}\b"):
                engine.rewind(asked)
            assert (engine.tokens, bits(engine.capture())) == (tokens, before)
        done = engine.rewind(nearest)
        assert (done.reused, done.recomputed, engine.tokens) == (nearest, 0, tokens[:nearest])
        if nearest < len(PROMPT) or not tokens[nearest:]:
            continue  # another split of the prompt, or nothing to evaluate
        kept = bits(engine.capture())
        # What is evaluated again is what was told, and what comes out is what this split gives.
        passes, evaluated = engine.forwards, engine.evaluated
        engine.prefill(tokens[nearest:])
        assert (engine.forwards - passes, engine.evaluated - evaluated) == (1, total - nearest)
        control = begun(kind, cache, nearest)
        assert control.tokens == tokens[:nearest]
        assert bits(control.capture()) == kept
        control.prefill(tokens[nearest:])
        assert bits(engine.capture()) == bits(control.capture())
        assert logits(engine) == logits(control)
        assert ids_of(engine, 3) == ids_of(control, 3)


def logits(engine: TransformersEngine) -> bytes:
    found = engine.capture().logits
    assert found is not None
    return found.array.tobytes()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["full", "window", "window and full", "index"])
def test_step_behind_a_cut_evaluates_the_last_row_again(kind: str, cache: str) -> None:
    engine, control = begun(kind, cache, 7), begun(kind, cache, 6)
    done = engine.rewind(6)
    assert done.reused == 6
    assert "last row is evaluated again" in done.notes[0]
    assert engine.capture().logits is None
    evaluated = engine.evaluated
    assert engine.step().id == control.step().id
    assert engine.evaluated - evaluated == 1
    engine.settle()
    control.settle()
    assert logits(engine) == logits(control)
    assert bits(engine.capture()) == bits(control.capture())


@pytest.mark.parametrize("kind", ["full", "window", "recurrent"])
def test_a_pending_id_is_cut_away_without_a_row(kind: str) -> None:
    engine, control = begun(kind, "dynamic", 12), begun(kind, "dynamic", 12)
    first = engine.step().id
    assert (engine.n_rows, engine.n_pending) == (12, 1)
    assert engine.rewind(12).notes == ()  # the logits are still those of the last row
    assert (engine.n_rows, engine.n_pending) == (12, 0)
    evaluated = engine.evaluated
    assert engine.step().id == first
    assert engine.evaluated == evaluated
    control.step()
    assert ids_of(engine, 5) == ids_of(control, 5)


@pytest.mark.parametrize("length", [-1, -3, -5, 4, 10, None, 1.5, "2"])
def test_b01_a_length_that_is_none_is_an_error(length: Any) -> None:
    engine = make("full", "dynamic")
    engine.prefill([5, 17, 42])
    before = bits(engine.capture())
    for ask in (engine.reach, engine.rewind):
        with pytest.raises(InputError, match=r"rewind to this length.*0 to 3"):
            ask(length)
    assert (engine.tokens, bits(engine.capture())) == ((5, 17, 42), before)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_b01_nothing_stale_is_left_live_or_in_a_file(cache: str, tmp_path: Any) -> None:
    for length in range(4):
        engine, fresh = make("full", cache), make("full", cache)
        engine.prefill([5, 17, 42])
        with kvsnap.Session.open(tmp_path / f"{length}.kvsnap") as session:
            session.append(engine.capture())
            engine.rewind(length)
            session.truncate(length)
            for wrong in (-1, -3, -5, 4, 10):
                with pytest.raises(InputError, match="truncate to this length"):
                    session.truncate(wrong)
            on_disk = session.load()
        live = engine.capture()
        kvsnap.save(live, tmp_path / "live.kvsnap")
        for one in (live, on_disk, kvsnap.load(tmp_path / "live.kvsnap")):
            assert (one.tokens, one.n_rows, one.n_pending) == ((5, 17, 42)[:length], length, 0)
            assert {t.n_rows for t in one.tensors()} == {length}
            assert length == 0 or bits(one) == bits(live)
        fresh.prefill([5, 17, 42, 7][:length] or [7])
        if length:
            fresh.prefill([7])
        engine.prefill([7])
        assert engine.n_rows == fresh.n_rows == length + 1
        assert {t.n_rows for t in engine.capture().tensors()} == {length + 1}
        assert engine.step().id == fresh.step().id


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_cut_is_gone_on_with(kind: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, control = begun(kind, cache, 7), begun(kind, cache, 6)
    if kind in STATES:
        pytest.skip("goes back nowhere")
    cut, calls = _tf_layers.kind_of, []

    def interrupted(layer: Any, index: int) -> Any:
        if index == 1 and calls:
            calls.clear()
            raise KeyboardInterrupt
        return cut(layer, index)

    def cutting(cache: Any, n_rows: int) -> None:
        calls.append(1)
        monkeypatch.setattr(_tf_layers, "kind_of", interrupted)
        try:
            _tf_layers.cut(cache, n_rows)
        finally:
            monkeypatch.undo()

    monkeypatch.setattr("kvsnap.engines._tf_rewind.cut", cutting)
    with pytest.raises(KeyboardInterrupt):
        engine.rewind(6)
    assert engine.tokens == control.tokens
    assert bits(engine.capture()) == bits(control.capture())
    engine.prefill([1, 2])
    control.prefill([1, 2])
    assert bits(engine.capture()) == bits(control.capture())


RECORDS = pytest.mark.skipif(
    not hasattr(transformers.DynamicCache, "activate_past_recording"),
    reason=f"transformers {transformers.__version__} does not record what a window passes by",
)


@RECORDS
def test_a_window_that_is_cut_twice_is_cut_once() -> None:
    layer = transformers.DynamicCache(config=make("window", "dynamic").model.config).layers[0]
    layer.activate_past_recording()
    rows = torch.arange(20.0).reshape(1, 1, 20, 1)
    layer.update(rows, rows)
    kind = _tf_layers.kind_of(layer, 0)
    for _ in range(2):
        kind.cut(layer, 15)
        assert layer.keys.flatten().tolist() == list(range(15))
        assert layer.cumulative_length == 15


@RECORDS
def test_a_window_that_records_what_it_passes_by_goes_back_within_it() -> None:
    engine, control = make("window", "dynamic"), make("window", "dynamic")
    engine.cache.activate_past_recording()
    for one in (engine, control):
        one.prefill(PROMPT)
    ids_of(engine, 10)
    engine.settle()
    tokens = engine.tokens
    assert engine.reach(9) == Reach(9, 9, 9, 9, 0, (), True)
    engine.rewind(9)
    ids_of(control, 4)
    control.settle()
    assert control.tokens == tokens[:9]
    for one in (engine, control):
        one.prefill([1, 2, 3])
    assert logits(engine) == logits(control)


def test_rewind_to_nothing_is_a_fresh_engine_with_the_sampler_it_had() -> None:
    engine = make("recurrent", "dynamic")
    engine.sampler = kvsnap.sampling.start(kvsnap.Sampler(temperature=1.0, seed=3))
    engine.prefill(PROMPT)
    engine.step()
    sampler = engine.sampler
    done = engine.rewind(0)
    assert (done.reused, done.recomputed, engine.tokens, engine.n_rows) == (0, 0, (), 0)
    assert engine.sampler == sampler
    fresh = make("recurrent", "dynamic")
    for one in (engine, fresh):
        one.prefill([1, 2, 3])
    assert logits(engine) == logits(fresh)

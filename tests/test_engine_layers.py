"""Layers of every kind in a live engine: a failed pass leaves nothing behind, and positions may jump."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvsnap  # noqa: E402 - after the extras are known to be there
from kvsnap.engines import _tf_layers  # noqa: E402
from kvsnap.engines.transformers import TransformersEngine  # noqa: E402
from kvsnap.errors import InputError, UnsupportedError  # noqa: E402
from kvsnap.layout import PositionRun  # noqa: E402
from latent_runs import bits, ids_of  # noqa: E402
from tiny_models import tiny_llama, tiny_model  # noqa: E402

pytestmark = pytest.mark.engine

WINDOW = 8
_QWEN = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", {}),
    "window": ("mistral", {"sliding_window": WINDOW}),
    "window and full": ("gemma2", {"sliding_window": WINDOW, "attention": "eager"}),
    "recurrent": ("qwen3_next", _QWEN),
    "hybrid": (
        "falcon_h1",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1},
    ),
}
IDS = [5, 17, 42, 99, 3, 4, 5, 6, 7, 8, 9, 10]


def make(kind: str) -> TransformersEngine:
    family, changes = MODELS[kind]
    try:
        return TransformersEngine(tiny_model(family, 3, **changes))
    except (UnsupportedError, ValueError, KeyError) as error:
        pytest.skip(f"transformers {transformers.__version__}: {error}")


def begun(kind: str, steps: int = 3) -> TransformersEngine:
    engine = make(kind)
    engine.prefill(IDS)
    ids_of(engine, steps)
    return engine


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", MODELS)
def test_a_failed_pass_leaves_layers_of_every_kind_as_they_were(kind: str, error: type[BaseException]) -> None:
    engine, control = begun(kind), begun(kind)
    before = bits(engine.capture())
    layers = next(p for p in engine.model.modules() if type(p).__name__ == "ModuleList" and len(p) == 3)
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        raise error("on purpose")

    for change in (engine.step, lambda: engine.prefill([1, 2, 3])):
        hook = layers[2].register_forward_hook(fail)  # the cache of every layer is changed by then
        with pytest.raises(error, match="on purpose"):
            change()
        hook.remove()
        assert bits(engine.capture()) == before
    assert len(calls) == 2
    assert ids_of(engine, 12) == ids_of(control, 12)
    assert bits(engine.capture()) == bits(control.capture())


@pytest.mark.parametrize("kind", MODELS)
def test_a_pass_that_is_not_undone_would_be_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = begun(kind)
    before = bits(engine.capture())
    layers = next(p for p in engine.model.modules() if type(p).__name__ == "ModuleList" and len(p) == 3)
    monkeypatch.setattr("kvsnap.engines._tf_live.Undo.put_back", lambda _: None)
    hook = layers[2].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    hook.remove()
    control = begun(kind)
    with suppress(InputError, UnsupportedError):  # noticed even earlier
        assert bits(engine.capture()) != before or ids_of(engine, 12) != ids_of(control, 12)


@pytest.mark.parametrize("kind", MODELS)
def test_a_cache_that_was_changed_outside_is_noticed(kind: str) -> None:
    engine = begun(kind)
    engine.capture()
    name = engine._model.cache_keyword
    with torch.no_grad():
        engine.model(torch.tensor([[1]]), **{name: engine.cache}, use_cache=True)
    with pytest.raises(InputError, match="changed outside the engine"):
        engine.step()


def test_rows_that_were_replaced_by_as_many_others_are_noticed() -> None:
    engine = TransformersEngine(tiny_llama(3))
    engine.prefill([5, 17, 42, 99])
    engine.capture()
    cache, name = engine.cache, engine._model.cache_keyword
    _tf_layers.cut(cache, 2)
    with torch.no_grad():
        engine.model(torch.tensor([[1, 2]]), **{name: cache}, use_cache=True)
    for work in (engine.step, engine.capture, lambda: engine.rewind(3)):
        with pytest.raises(InputError, match=r"changed outside the engine.*expected 4 rows, found other rows"):
            work()
    engine.adopt(cache, [[5, 17, 1, 2]])
    control = TransformersEngine(engine.model)
    control.prefill([5, 17])
    control.prefill([1, 2])
    assert ids_of(engine, 5) == ids_of(control, 5)


@pytest.mark.parametrize("work", ["install", "adopt"])
def test_an_interrupt_before_the_end_leaves_a_fresh_engine_as_it_was(
    work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TransformersEngine(tiny_llama(3))
    engine.prefill([5, 17, 42, 99])
    snapshot, cache = engine.capture(), engine.cache
    fresh = TransformersEngine(engine.model)

    def interrupted(_: Any) -> Any:
        raise KeyboardInterrupt

    def run() -> None:
        fresh.install(snapshot) if work == "install" else fresh.adopt(cache, [[5, 17, 42, 99]])

    with monkeypatch.context() as patch:
        patch.setattr("kvsnap.engines.transformers.stamp_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run()
    assert (fresh.tokens, fresh.n_rows, fresh.capture().n_rows) == ((), 0, 0)
    run()
    assert fresh.capture().tokens == (5, 17, 42, 99)


@pytest.mark.parametrize("kind", MODELS)
def test_one_checkpoint_gives_five_equal_runs_and_stays_as_it_is(kind: str) -> None:
    engine = begun(kind)
    snapshot = engine.capture()
    before = bits(snapshot)
    expected = ids_of(engine, 10)
    others = [make(kind) for _ in range(2)]
    for one in (engine, *others, engine, *others):
        one.install(snapshot)
        assert ids_of(one, 10) == expected
    assert bits(snapshot) == before


def test_b27_positions_that_jump_come_back_from_a_file(tmp_path: Any) -> None:
    model = tiny_llama(3)
    engine = TransformersEngine(model)
    engine.prefill([5, 17, 42, 99, 3])
    engine.prefill([4, 5, 6, 7, 8, 9], positions=range(40, 46))
    snapshot = engine.capture()
    assert snapshot.positions == (PositionRun(0, 5), PositionRun(40, 6))
    assert snapshot.token_offset == 46
    engine.step()
    engine.settle()
    expected = engine.capture().logits
    assert expected is not None

    # What the model itself computes at these positions, without the engine.
    with torch.no_grad():
        ids = torch.tensor([list(engine.tokens)])
        places = torch.tensor([[*range(5), *range(40, 46), 46]])
        own = model(ids, position_ids=places).logits[0, -1]
        straight = model(ids).logits[0, -1]
    assert torch.allclose(own, torch.tensor(expected.array), atol=1e-4)
    assert not torch.allclose(straight, own, atol=1e-2)

    kvsnap.save(snapshot, tmp_path / "jump.kvsnap")
    with kvsnap.Session.open(tmp_path / "session.kvsnap") as session:
        session.append(snapshot)
        found = [kvsnap.load(tmp_path / "jump.kvsnap"), session.load()]
    for loaded in found:
        assert (loaded.positions, loaded.token_offset) == (snapshot.positions, 46)
        other = TransformersEngine(model)
        assert kvsnap.restore(loaded, other).exact
        other.step()
        other.settle()
        logits = other.capture().logits
        assert logits is not None
        assert logits.array.tobytes() == expected.array.tobytes()
        assert other.capture().token_offset == 47


def test_positions_are_one_whole_number_for_each_id_within_the_context() -> None:
    engine = TransformersEngine(tiny_llama(3))
    for positions, message in (
        ([0, 1], "one whole number"),
        ([0, 1, -2], "one whole number"),
        ([0.5] * 3, "one whole"),
    ):
        with pytest.raises(InputError, match=message):
            engine.prefill([1, 2, 3], positions=positions)  # type: ignore[arg-type] # on purpose
    with pytest.raises(kvsnap.KvsnapError, match="position 512 is outside the context"):
        engine.prefill([1, 2, 3], positions=[0, 1, 512])
    assert engine.tokens == ()


@pytest.mark.parametrize("family", ["cohere2", "exaone4"])
def test_a_layer_whose_keys_are_not_rotated_says_so(family: str) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    model = tiny_model(family, 0, layer_types=kinds, sliding_window=WINDOW, pad_token_id=0)
    with torch.no_grad():  # one token alone has the same keys at every position where they are not rotated
        keys = []
        for place in (0, 3):
            engine = TransformersEngine(model)
            engine.prefill([5], positions=[place])
            keys.append([layer.tensors[0].array for layer in engine.capture().layers])
    rotated = [bool((a != b).any()) for a, b in zip(*keys, strict=True)]
    assert rotated == [True, False, True]
    assert [layer.tensors[0].spec.rope for layer in engine.capture().layers] == ["after", "none", "after"]


def test_a_difference_that_was_accepted_is_not_forgotten(tmp_path: Any) -> None:
    engine, other = TransformersEngine(tiny_llama(3)), TransformersEngine(tiny_llama(4))
    engine.prefill(IDS)
    engine.step()
    first = kvsnap.restore(engine.capture(), other, accept=("weights",))
    assert not first.exact
    ids_of(other, 4)
    with kvsnap.Session.open(tmp_path / "s.kvsnap") as session:
        session.append(other.capture())
        ids_of(other, 2)
        session.append(other.capture(start=session.n_rows))
        loaded = session.load()
    for snapshot in (loaded, other.capture()):
        again = kvsnap.restore(snapshot, TransformersEngine(tiny_llama(4)))
        assert not again.exact
        assert "which was accepted: weights differ: " in again.notes[0]

    other.reset()  # rows of its own are of nothing else
    other.prefill(IDS)
    other.step()
    assert kvsnap.restore(other.capture(), TransformersEngine(tiny_llama(4))).exact

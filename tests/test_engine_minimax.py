"""MiniMax: states in a list beside keys and values, exact in new memory; families whose state is out of reach."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvsnap  # noqa: E402 - after the extras are known to be there
from kvsnap.engines.transformers import TransformersEngine  # noqa: E402
from kvsnap.errors import UnsupportedError  # noqa: E402
from kvsnap.layout import Snapshot, Tensor  # noqa: E402
from latent_runs import bits, ids_of, roles  # noqa: E402
from tiny_models import tiny_model  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.newest]

LINEAR_FIRST = ["linear_attention", "full_attention", "linear_attention"]
FULL_FIRST = ["full_attention", "linear_attention", "full_attention"]
IDS = [5, 17, 42, 99, 3, 4, 5, 6, 7, 8, 9, 10]


def make(types: list[str], dtype: str = "float32") -> TransformersEngine:
    return TransformersEngine(
        tiny_model(
            "minimax", 3, dtype, layer_types=types, num_local_experts=4, num_experts_per_tok=2, block_size=8,
            intermediate_size=32,
        )
    )  # fmt: skip


def begun(types: list[str], length: int = 12, dtype: str = "float32") -> TransformersEngine:
    engine = make(types, dtype)
    engine.prefill((IDS * 4)[:length])
    ids_of(engine, 3)
    return engine


def run(engine: TransformersEngine, count: int = 10) -> tuple[list[int], bytes]:
    ids, rows = [], []
    for _ in range(count):
        engine.settle()
        logits = engine._live.lines[0].logits
        assert logits is not None
        rows.append(logits.tobytes())
        ids.append(engine.step().id)
    return ids, b"".join(rows)


@pytest.mark.parametrize("types", [LINEAR_FIRST, FULL_FIRST], ids=["linear first", "full first"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [1, 8, 40])
def test_a_state_comes_back_exactly(types: list[str], dtype: str, length: int, tmp_path: Path) -> None:
    engine = begun(types, length, dtype)
    snapshot = engine.capture()
    wanted = {"linear_attention": ("recurrent",), "full_attention": ("k", "v")}
    assert roles(snapshot) == [wanted[kind] for kind in types]
    kvsnap.save(snapshot, tmp_path / "a.kvsnap")
    expected = run(engine)
    assert len(set(expected[0])) >= 5
    other = make(types, dtype)
    other.install(kvsnap.load(tmp_path / "a.kvsnap"))
    assert run(other) == expected
    assert bits(other.capture()) == bits(engine.capture())


@pytest.mark.parametrize("types", [LINEAR_FIRST, FULL_FIRST], ids=["linear first", "full first"])
def test_turns_are_what_the_model_computes_without_a_cache(types: list[str], tmp_path: Path) -> None:
    engine = make(types)
    with kvsnap.Session.open(tmp_path / "s.kvsnap") as session:
        for turn in (IDS[:5], IDS[5:9], IDS[9:]):
            engine.prefill(turn)
            ids_of(engine, 2)
            session.append(engine.capture(start=session.n_rows))
        engine.settle()
        assert engine._live.lines[0].logits is not None
        with torch.no_grad():
            whole = engine.model(torch.tensor([list(engine.tokens)])).logits[0, -1]
        assert np.allclose(engine._live.lines[0].logits, whole.numpy(), atol=1e-3)
        other = make(types)
        other.install(session.load())
        assert run(other) == run(engine)
        with pytest.raises(UnsupportedError, match="the nearest reachable length is 0, and above it 7"):
            session.truncate(3)


@pytest.mark.parametrize("types", [LINEAR_FIRST, FULL_FIRST], ids=["linear first", "full first"])
def test_a_failed_pass_leaves_nothing_behind_also_the_first(types: list[str]) -> None:
    engine, control = begun(types), begun(types)
    before = bits(engine.capture())
    fresh = make(types)
    for one, change in (
        (engine, engine.step),
        (engine, lambda: engine.prefill([1, 2])),
        (fresh, lambda: fresh.prefill(IDS)),
    ):
        hook = one.model.model.layers[2].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            change()
        hook.remove()
    assert bits(engine.capture()) == before
    assert run(engine) == run(control)
    assert (fresh.n_rows, len(fresh.cache)) == (0, 0)
    fresh.prefill(IDS)
    ids_of(fresh, 3)
    assert bits(fresh.capture()) == before


def zeroed(snapshot: Snapshot, role: str) -> Snapshot:
    layers = []
    for layer in snapshot.layers:
        tensors = tuple(Tensor(t.spec, np.zeros_like(t.array)) if t.role == role else t for t in layer.tensors)
        layers.append(replace(layer, tensors=tensors))
    return replace(snapshot, layers=tuple(layers))


@pytest.mark.parametrize("role", ["recurrent", "k", "v"])
def test_what_is_lost_is_seen(role: str) -> None:
    engine = begun(LINEAR_FIRST)
    snapshot = engine.capture()
    expected = run(engine)
    engine.install(zeroed(snapshot, "none of them"))
    assert run(engine) == expected
    engine.install(zeroed(snapshot, role))
    assert run(engine)[1] != expected[1]


def test_a_cache_of_generate_is_taken_over() -> None:
    engine = make(LINEAR_FIRST)
    out = engine.model.generate(
        torch.tensor([IDS]), max_new_tokens=8, do_sample=False, return_dict_in_generate=True, pad_token_id=0
    )
    cache = getattr(out, "cache", None)
    engine.adopt(out.past_key_values if cache is None else cache, out.sequences, prompt=len(IDS))
    own = make(LINEAR_FIRST)
    own.prefill(IDS)
    ids_of(own, 8)
    assert engine.tokens == own.tokens
    assert bits(engine.capture()) == bits(own.capture())
    assert run(engine) == run(own)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "xlnet": ({"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 32}, "mems"),
    "reformer": (
        {
            "is_decoder": True, "attn_layers": ["local", "local"], "axial_pos_shape": [4, 4], "hidden_size": 32,
            "axial_pos_embds_dim": [16, 16], "num_attention_heads": 2, "attention_head_size": 8,
            "feed_forward_size": 32,
        },
        "ReformerDynamicCache",
    ),
    "xlstm": ({"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2}, "xLSTMCache"),
}  # fmt: skip


@pytest.mark.parametrize("family", REFUSED)
def test_families_whose_state_is_out_of_reach_are_refused_by_name(family: str) -> None:
    settings, message = REFUSED[family]
    try:
        config = transformers.AutoConfig.for_model(family, vocab_size=64, **settings)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    except (ValueError, KeyError, ImportError) as error:
        pytest.skip(f"transformers {transformers.__version__}: {error}")
    with pytest.raises(UnsupportedError, match=message) as refused:
        TransformersEngine(model)
    assert family in str(refused.value).lower()

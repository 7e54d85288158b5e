"""Edits of the middle on live models: the keys that are kept against those that a model makes anew.

The keys and values of layer 0 depend on their own token only, so there a rotated row must be what recomputing gives.
Measured over 400 tokens and the ways of scaling below: in bfloat16 and float16 at most two units in the last place of
the largest value, in float32 at most 6e-6 of it (the model makes its own angles in float32).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsnap
from kvsnap.cli import run
from kvsnap.editing import EDITED, Rope
from kvsnap.errors import CompatibilityError, UnsupportedError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.engine, pytest.mark.newest, pytest.mark.usefixtures("one_thread")]

from latent_models import KNOWN, keeps_latent, latent_model  # noqa: E402
from tiny_models import save_tiny, tiny_llama, tiny_model, tiny_qwen3  # noqa: E402

TEXT, SPANS, KEPT = list(b"abcdefghj"), [(2, 4), (6, 7)], list(b"abefhj")
LONG = np.random.default_rng(0).integers(0, 256, 400).tolist()
STEP = {"float32": 2e-5, "bfloat16": 2**-6, "float16": 2**-9}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 10000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 128}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONGROPE = {"rope_type": "longrope", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128,
            "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}  # fmt: skip
new_rope = pytest.mark.skipif(
    not hasattr(tiny_llama().config, "rope_parameters"), reason="before transformers 5 rope_scaling says it"
)


def captured(model: Any, ids: list[int]) -> tuple[Any, kvsnap.Snapshot]:
    engine: Any = kvsnap.connect(model)
    engine.prefill(ids)
    return engine, kvsnap.capture(engine)


def distance(found: kvsnap.Snapshot, again: kvsnap.Snapshot, role: str = "k", layer: int = 0) -> float:
    """The largest difference of two tensors, as a part of the power of two at or below the largest value."""
    a, b = (s.layers[layer].tensor(role) for s in (found, again))
    assert a is not None
    assert b is not None
    x, y = a.array.astype(np.float64), b.array.astype(np.float64)
    return float(np.abs(x - y).max() / 2.0 ** math.floor(math.log2(np.abs(y).max())))


MODELS = {
    "llama": {}, "qwen3": {}, "cohere": {"pad_token_id": 0}, "phi3": {"pad_token_id": 0}, "olmo2": {},
    "yarn": {"rope_parameters": YARN}, "llama3": {"rope_parameters": LLAMA3}, "linear": {"rope_parameters": LINEAR},
}  # fmt: skip


@new_rope
@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize("name", MODELS)
def test_rotated_keys_are_those_that_the_model_makes_anew(name: str, dtype: str) -> None:
    kind = "llama" if name in ("yarn", "llama3", "linear") else name
    model = tiny_model(kind, 0, dtype, num_hidden_layers=1, **MODELS[name])
    for ids, spans in ((TEXT, SPANS), (LONG, [(10, 100), (200, 201)])):
        kept = [t for i, t in enumerate(ids) if not any(start <= i < stop for start, stop in spans)]
        engine, made = captured(model, ids)
        _, again = captured(model, kept)
        found = kvsnap.remove(made, spans, engine=engine)
        assert found.tokens == tuple(kept)
        assert distance(found, again) <= STEP[dtype]
        assert found.layers[0].tensors[1].array.tobytes() == again.layers[0].tensors[1].array.tobytes()
        rope = engine.rope()[0]
        assert distance(kvsnap.remove(made, spans, rope=Rope(-rope.inv_freq, rope.pairing)), again) > 0.1
        assert distance(kvsnap.remove(made, spans, rope=Rope(rope.inv_freq * 0, rope.pairing)), again) > 0.1
        other: Any = "half" if rope.pairing == "interleaved" else "interleaved"
        tensor = made.layers[0].tensors[0]
        wrong = Rope(rope.inv_freq, other).rotated(tensor.array, np.full(tensor.n_rows, -3))
        right = rope.rotated(tensor.array, np.full(tensor.n_rows, -3))
        assert np.abs(wrong.astype(np.float64) - right.astype(np.float64)).max() > 0.1


@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize(
    "family", [f for f in KNOWN if f in ("deepseek_v2", "deepseek_v3", "minicpm3", "longcat_flash")]
)
def test_the_rope_row_of_a_latent_layer_is_rotated_and_its_latent_row_kept(family: str, dtype: str) -> None:
    model = latent_model(family, dtype)
    if not keeps_latent(model):
        pytest.skip("this release keeps expanded keys, of which it is not known which part is rotated")
    engine, made = captured(model, TEXT)
    _, again = captured(model, KEPT)
    found = kvsnap.remove(made, SPANS, engine=engine)
    assert distance(found, again, "rope") <= STEP[dtype]
    assert distance(made.truncate(6), again, "rope") > 0.1  # the control
    assert found.layers[0].tensors[0].array.tobytes() == again.layers[0].tensors[0].array.tobytes()


@pytest.mark.parametrize("family", [f for f in KNOWN if f in ("deepseek_v32", "glm_moe_dsa")])
def test_an_index_is_refused_by_name(family: str) -> None:
    engine, made = captured(latent_model(family), TEXT)
    with pytest.raises(UnsupportedError, match=r"layer 0: layers.0.index: rows of the kind index cannot be removed"):
        kvsnap.remove(made, SPANS, engine=engine)


@new_rope
@pytest.mark.parametrize("rope", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_length_are_refused(rope: dict[str, Any]) -> None:
    engine, made = captured(tiny_llama(rope_parameters=rope), TEXT)
    with pytest.raises(UnsupportedError, match=f"the rope scaling {rope['rope_type']} has other frequencies"):
        kvsnap.remove(made, SPANS, engine=engine)
    assert kvsnap.remove(made, SPANS, positions="keep").n_rows == 6


@new_rope
@pytest.mark.parametrize("kind", ["smollm3"])
def test_layers_without_rotation_are_not_rotated(kind: str) -> None:
    engine, made = captured(tiny_model(kind, 0, no_rope_layers=[1, 0, 1], pad_token_id=0), TEXT)
    assert [rope is None for rope in engine.rope()] == [False, True, False]
    found = kvsnap.remove(made, SPANS, engine=engine)
    kept = [0, 1, 4, 5, 7, 8]
    before, after = made.layers[1].tensors[0].array, found.layers[1].tensors[0].array
    assert after.tobytes() == before[:, kept].tobytes()


@new_rope
def test_a_layer_that_rotates_otherwise_is_found_by_running_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_qwen3()
    engine: Any = kvsnap.connect(model)
    assert len(engine.rope()) == 3
    attention = model.model.layers[1].self_attn
    inside = attention.forward

    def unrotated(*args: Any, position_embeddings: Any, **kwargs: Any) -> Any:
        cos, sin = position_embeddings
        return inside(*args, position_embeddings=(torch.ones_like(cos), torch.zeros_like(sin)), **kwargs)

    monkeypatch.setattr(attention, "forward", unrotated)
    with pytest.raises(UnsupportedError, match=r"layer 1: layers.1.k is not rotated as Qwen3ForCausalLM seems to"):
        engine.rope()


@new_rope
def test_a_module_whose_angles_are_not_those_of_its_frequencies_is_refused() -> None:
    model = tiny_llama()
    engine: Any = kvsnap.connect(model)
    inside = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, places: inside(x, places * 2)
    with pytest.raises(UnsupportedError, match="makes other angles than its frequencies say"):
        engine.rope()


@new_rope
def test_asking_for_the_rope_changes_nothing_live() -> None:
    engine, made = captured(tiny_llama(), TEXT)
    before = (engine.forwards, engine.evaluated, engine.tokens)
    engine.rope()
    assert (engine.forwards, engine.evaluated, engine.tokens) == before
    assert [t.array.tobytes() for t in kvsnap.capture(engine).tensors()] == [t.array.tobytes() for t in made.tensors()]


@new_rope
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_edited_snapshot_goes_on_and_is_never_called_exact(dtype: str, tmp_path: Path) -> None:
    model = tiny_llama(dtype=dtype)
    engine, _ = captured(model, LONG[:60])
    engine.step()
    made = kvsnap.capture(engine)
    found = kvsnap.remove(made, [(20, 30)], engine=engine)
    kvsnap.save(found, tmp_path / "edited.kvsnap")
    fresh: Any = kvsnap.connect(tiny_llama(dtype=dtype))
    before = fresh.evaluated
    done = kvsnap.restore(kvsnap.load(tmp_path / "edited.kvsnap"), fresh)
    assert (done.exact, done.reused, done.recomputed) == (False, 50, 0)
    assert "the history was edited (tokens 20:30 of 61 were removed): the rows behind" in done.notes[0]
    said = [t.id for t in kvsnap.generate(fresh, max_tokens=8)]
    assert len(said) == 8
    assert fresh.evaluated - before == 8  # nothing of the history is evaluated again
    assert kvsnap.capture(fresh).positions == (kvsnap.layout.PositionRun(0, 58),)
    _, again = captured(model, [*LONG[:20], *LONG[30:60]])
    assert distance(found, again) <= STEP[dtype]  # layer 0
    assert distance(found, again, layer=2) > STEP[dtype]  # above it the rows saw what is gone: an approximation
    exact = kvsnap.restore(made, fresh)
    assert exact.exact  # the control


@pytest.mark.parametrize("lossy", ["edited", "q8"])
def test_what_an_engine_was_given_stays_an_approximation_when_it_is_captured_again(lossy: str, tmp_path: Path) -> None:
    engine, made = captured(tiny_llama(), LONG[:60])
    given = kvsnap.remove(made, [(20, 30)], engine=engine) if lossy == "edited" else made
    kvsnap.save(given, tmp_path / "given.kvsnap", codec="q8" if lossy == "q8" else None)
    given = kvsnap.load(tmp_path / "given.kvsnap")
    assert given.bound
    kvsnap.restore(given, engine)
    engine.step()
    for _ in range(2):
        again = kvsnap.capture(engine)
        assert {t.bound for t in again.tensors()} == {given.bound}
        assert again.metadata == given.metadata
        done = kvsnap.restore(again, engine)
        assert not done.exact
        engine.step()
    later = kvsnap.capture(engine, start=again.n_rows)  # what the engine has made since is what it held
    assert later.bound == 0
    assert later.metadata == {}
    engine.reset()
    engine.prefill(LONG[:9])
    assert kvsnap.capture(engine).bound == 0
    assert kvsnap.capture(engine).metadata == {}


@new_rope
def test_kept_positions_go_on_behind_the_gap(tmp_path: Path) -> None:
    model = tiny_llama()
    engine, _ = captured(model, LONG[:60])
    engine.step()
    made = kvsnap.capture(engine)
    kvsnap.save(kvsnap.remove(made, [(20, 30)], positions="keep"), tmp_path / "a.kvsnap")
    done = kvsnap.restore(kvsnap.load(tmp_path / "a.kvsnap"), engine)
    assert (done.exact, done.reused) == (False, 50)
    assert len(list(kvsnap.generate(engine, max_tokens=4))) == 4
    assert [(run.start, run.count) for run in kvsnap.capture(engine).positions] == [(0, 20), (30, 34)]


def test_another_model_is_refused() -> None:
    _, made = captured(tiny_llama(), TEXT)
    other = kvsnap.connect(tiny_llama(seed=1))
    with pytest.raises(CompatibilityError, match="weights differ"):
        kvsnap.remove(made, SPANS, engine=other)
    assert kvsnap.remove(made, [(6, 9)], engine=other).tokens == tuple(TEXT[:6])  # a cut asks no model
    assert kvsnap.remove(made, SPANS, engine=other, accept=("weights",)).n_rows == 6


def test_a_history_too_long_for_the_context_may_be_edited() -> None:
    _, made = captured(tiny_llama(), LONG[:40])
    small = kvsnap.connect(tiny_llama(max_position_embeddings=30))
    accept = ("config.max_position_embeddings",)
    assert kvsnap.remove(made, [(5, 25)], engine=small, accept=accept).n_rows == 20


def test_edit_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny(tmp_path / "model")
    file, out = tmp_path / "a.kvsnap", tmp_path / "b.kvsnap"

    def call(*args: object) -> Any:
        code = run([str(a) for a in args])
        found = capsys.readouterr()
        assert code == 0, found
        return json.loads(found.out)

    call("generate", "abcdefghj", "--model", model, "--max-tokens", 3, "--save", file, "--json")
    data = call("edit", file, "--remove", "2:4", "--remove", "6:7", "-o", out, "--json")  # FILE names the model
    assert (data["n_tokens"], data["exact"], data["token_offset"]) == (9, False, 9)
    loaded = kvsnap.load(out)
    assert bytes(loaded.tokens[:6]) == b"abefhj"
    assert loaded.text is not None
    assert loaded.text.startswith("abefhj")
    assert EDITED in loaded.metadata
    data = call("resume", out, "--max-tokens", 4, "--json")
    assert data["restored"]["exact"] is False
    assert "the history was edited" in " ".join(data["restored"]["notes"])
    code = run(["edit", str(file), "--remove", "2:4", "-o", str(tmp_path / "c"), "--model", str(save_tiny(
        tmp_path / "other", seed=1)), "--json"])  # fmt: skip
    assert code == 7
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "wrong-model"
    assert not (tmp_path / "c").exists()

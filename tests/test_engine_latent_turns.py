"""Latent attention and its index: all or nothing, turn by turn, out of a padded batch, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvsnap.engines.transformers import TransformersEngine  # noqa: E402 - after the extras are known to be there
from kvsnap.errors import CompatibilityError, DamagedError, UnsupportedError  # noqa: E402
from kvsnap.formats import native  # noqa: E402
from kvsnap.layout import Layer, Run, Snapshot, Tensor  # noqa: E402
from kvsnap.session import Session  # noqa: E402
from latent_models import INDEXED, KNOWN, latent_model  # noqa: E402
from latent_runs import DTYPES, IDS, begin, bits, given, ids_of, make, needs_latent, state  # noqa: E402
from test_engine_exactness import Run as Course  # noqa: E402
from test_engine_exactness import go_on  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]


# -- all or nothing --------------------------------------------------------------------------------------------------


def failing_at(layer: Any, name: str) -> Callable[[], None]:
    original = getattr(layer, name)

    def fail(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    setattr(layer, name, fail)
    return lambda: setattr(layer, name, original)


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("place", ["update", "update_indexer"])
@pytest.mark.parametrize("family", given("deepseek_v3", "deepseek_v32"))
def test_a_pass_that_is_interrupted_leaves_no_row_in_any_layer(family: str, place: str, started: bool) -> None:
    engine = begin(family) if started else make(family)
    layers = engine.cache.layers
    if place == "update_indexer" and family not in INDEXED:
        pytest.skip("this family has no index")
    if not layers:
        pytest.skip("this release makes its layers as they come")
    before, reference = state(engine), begin(family) if started else make(family)
    restore = failing_at(layers[1], place)
    with pytest.raises(KeyboardInterrupt):
        engine.prefill(IDS[:5])
    restore()
    assert state(engine) == before
    for each in (engine, reference):
        each.prefill(IDS[:5])
    assert ids_of(engine, 8) == ids_of(reference, 8)
    assert state(engine) == state(reference)


@pytest.mark.parametrize("family", given("deepseek_v2", "deepseek_v32"))
def test_a_damaged_file_changes_nothing(family: str, tmp_path: Path) -> None:
    engine = begin(family)
    path = tmp_path / "one.kvsnap"
    snapshot = engine.capture()
    native.save(snapshot, path, sync=False)
    last = list(snapshot.tensors())[-1].array.tobytes()
    raw = path.read_bytes()
    at = raw.index(last[-64:])
    path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    ids_of(engine, 3)
    before = state(engine)
    with pytest.raises(DamagedError):
        engine.install(native.load(path))
    assert state(engine) == before


@pytest.mark.parametrize("family", given("deepseek_v3", "glm_moe_dsa"))
def test_rows_of_another_dtype_are_converted_only_where_that_is_accepted(family: str) -> None:
    snapshot = begin(family).capture()
    engine = make(family, "bfloat16")
    with pytest.raises(CompatibilityError, match=r"layer 0 \w+: dtype differs; expected bfloat16, found float32"):
        engine.install(snapshot)
    assert engine.n_rows == 0
    installed = engine.install(snapshot, cast=True)
    assert "converted from float32 to bfloat16" in installed.notes[-1]
    for mine, given_ in zip(engine.capture().tensors(), snapshot.tensors(), strict=True):
        assert mine.array.tobytes() == given_.array.astype(mine.array.dtype).tobytes()
    ids_of(engine, 2)


# -- turns, batches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", given("deepseek_v2", "deepseek_v32", "glm_moe_dsa-shared"))
def test_turns_are_appended_and_rewound(family: str, dtype: str, tmp_path: Path) -> None:
    engine = make(family, dtype)
    turns: list[tuple[Snapshot, Course]] = []
    with Session.open(tmp_path / "chat.kvsnap") as session:
        for turn in range(3):
            engine.prefill(IDS[turn : turn + 9])
            ids_of(engine, 6)
            engine.settle()
            session.append(engine.capture(start=session.n_rows))
            whole = engine.capture()
            turns.append((whole, go_on(engine, 8)))
            engine.install(whole)
        for whole, course in reversed(turns):
            session.truncate(len(whole.tokens))
            loaded = session.load()
            assert bits(loaded) == bits(whole)
            assert loaded.tokens == whole.tokens
            fresh = make(family, dtype)
            fresh.install(loaded)
            found = go_on(fresh, 8)
            assert found.ids == course.ids
            assert np.array_equal(found.logits, course.logits)


def every_row_picked(family: str) -> dict[str, int]:
    """Settings under which the index has room for every row.

    Scores are often exactly 0, and which of equals is picked depends on where they stand: behind padding, another one.
    """
    return {"index_topk": 256} if family in INDEXED else {}


def padded_batch(family: str, prompts: list[list[int]], **changes: int) -> tuple[TransformersEngine, Any, Any]:
    """An engine that adopted the cache of a left-padded batch after 6 tokens, that cache, and the mask."""
    width = max(len(p) for p in prompts)
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    model = latent_model(family, **changes)
    model.generation_config.pad_token_id = 0
    out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=6, return_dict_in_generate=True)
    cache = out["cache" if "cache" in out else "past_key_values"]
    engine = TransformersEngine(model)
    engine.adopt(cache, out.sequences, attention_mask=mask)
    return engine, cache, mask


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("family", given("deepseek_v2", "deepseek_v32", "glm_moe_dsa-shared"))
def test_a_row_of_a_padded_batch_is_captured_without_its_padding(family: str, row: int) -> None:
    batch, cache, mask = padded_batch(family, [IDS[:7], IDS[3:15]])
    kept = [at for at, used in enumerate([*mask[row].tolist(), 1, 1, 1, 1, 1]) if used]
    for layer, live in zip(batch.capture(row=row).layers, cache.layers, strict=True):
        found = [t.array.tobytes() for t in layer.tensors]
        live_tensors = [t for t in (live.keys, live.values, getattr(live, "indexer_keys", None)) if t is not None]
        assert found == [t[row][..., kept, :].contiguous().numpy().tobytes() for t in live_tensors]


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("family", given("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa-shared"))
def test_a_row_of_a_padded_batch_goes_on_alone(family: str, row: int) -> None:
    changes = every_row_picked(family)
    batch, _, _ = padded_batch(family, [IDS[:7], IDS[3:15]], **changes)
    prompt = (IDS[:7], IDS[3:15])[row]
    snapshot = batch.capture(row=row)
    assert snapshot.runs == (Run("prompt", len(prompt)), Run("generated", 6))
    assert (snapshot.n_rows, snapshot.n_pending) == (len(prompt) + 5, 1)
    alone = make(family, **changes)
    alone.prefill(prompt)
    ids_of(alone, 6)
    assert snapshot.tokens == alone.tokens
    for mine, reference in zip(snapshot.tensors(), alone.capture().tensors(), strict=True):
        np.testing.assert_allclose(mine.array, reference.array, atol=1e-3)
    engine = make(family, **changes)
    engine.install(snapshot)
    assert ids_of(engine, 8) == ids_of(alone, 8)
    tail = batch.capture(row=row, start=2)
    assert [t.array.tobytes() for t in tail.tensors()] == [
        t.rows(2, snapshot.n_rows).array.tobytes() for t in snapshot.tensors()
    ]


@pytest.mark.parametrize("family", given("deepseek_v2", "deepseek_v32"))
def test_padding_in_a_batch_of_one_is_left_out_of_every_tensor(family: str) -> None:
    changes = every_row_picked(family)
    engine, cache, _ = padded_batch(family, [IDS[:9]], **changes)
    assert cache is engine.cache, "nothing is padding here"
    ids, mask = torch.tensor([[0, 0, 0, *IDS[:9]]]), torch.tensor([[0, 0, 0] + [1] * 9])
    out = engine.model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=6, return_dict_in_generate=True
    )
    engine.adopt(out["cache" if "cache" in out else "past_key_values"], out.sequences, attention_mask=mask)
    alone = make(family, **changes)
    alone.prefill(IDS[:9])
    ids_of(alone, 6)
    assert engine.n_rows == 14
    assert {t.n_rows for t in engine.capture().tensors()} == {14}
    assert ids_of(engine, 8) == ids_of(alone, 8)


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", given("deepseek_v32"))
def test_a_cache_whose_index_is_shorter_is_refused(family: str) -> None:
    engine = begin(family)
    before = state(engine)
    cache, tokens = engine.cache, [list(engine.tokens)]
    whole = cache.layers[1].indexer_keys
    cache.layers[1].indexer_keys = whole[:, :-2]
    with pytest.raises(UnsupportedError, match="layer 1 does not keep index as its settings say"):
        TransformersEngine(engine.model).adopt(cache, tokens)
    cache.layers[1].indexer_keys = None
    cache.layers[1].is_indexer_initialized = False
    with pytest.raises(UnsupportedError, match=r"layer 1 does not keep what its settings say.*index, found 2 tensors"):
        TransformersEngine(engine.model).adopt(cache, tokens)
    cache.layers[1].indexer_keys, cache.layers[1].is_indexer_initialized = whole, True
    assert state(engine) == before


def as_heads(layer: Layer) -> Layer:
    """A latent layer told as one head of keys and values."""

    def told(tensor: Tensor, role: str) -> Tensor:
        spec = replace(tensor.spec, role=role, axes=("head", "row", "dim"), shape=(1, *tensor.spec.shape), row_axis=1)
        return Tensor(spec, tensor.array[None])

    tensors = tuple(told(t, role) for t, role in zip(layer.tensors, ("k", "v"), strict=True))
    return replace(layer, kind="attention", tensors=tensors)


@pytest.mark.parametrize("family", given("deepseek_v3"))
def test_other_kinds_of_layers_and_other_pairings_are_refused(family: str) -> None:
    needs_latent(family)
    snapshot, engine = begin(family).capture(), make(family)
    heads = replace(snapshot, layers=tuple(as_heads(layer) for layer in snapshot.layers))
    with pytest.raises(
        CompatibilityError, match="layer 0 is of another kind; expected latent with latent, rope, found"
    ):
        engine.install(heads)
    with pytest.raises(CompatibilityError, match="layer 0 rope: rope differs; expected after half, found after inter"):
        engine.install(begin("deepseek_v2").capture())
    if "deepseek_v32" in KNOWN:
        with pytest.raises(
            CompatibilityError, match=r"layer 0 is of another kind; .*found latent with latent, rope, i"
        ):
            engine.install(begin("deepseek_v32").capture())
        with pytest.raises(CompatibilityError, match="expected latent with latent, rope, index"):
            make("deepseek_v32").install(snapshot)
    assert engine.n_rows == 0


@pytest.mark.parametrize("family", given("deepseek_v3"))
def test_a_release_that_keeps_something_else_is_found_out_at_the_first_pass(family: str) -> None:
    engine = make(family)
    other = begin("deepseek_v2", kv_lora_rank=16, v_head_dim=20)
    engine._model = replace(engine._model, geometry=other._model.geometry)
    with pytest.raises(UnsupportedError, match=r"layer 0 does not keep (latent|v) as its settings say"):
        engine.prefill(IDS)
    assert (engine.n_rows, engine.tokens) == (0, ())

"""Latent attention and its index: captured as the model keeps it, and gone on from as if never interrupted.

As a script, `test_engine_latent.py DIRECTORY` is the new process: it resumes every snapshot in the directory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
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
from latent_models import FAMILIES, INDEX, INDEXED, KNOWN, LATENT, LAYERS, ROPE, keeps_latent, latent_model  # noqa: E402
from test_engine_exactness import BEFORE, POINTS, go_on, judge, one_thread  # noqa: E402
from test_engine_exactness import Run as Course  # noqa: E402
from tiny_models import PROMPT  # noqa: E402

pytestmark = pytest.mark.engine

IDS = list(PROMPT.encode())
DTYPES = ("float32", "bfloat16")
ROOT = Path(__file__).resolve().parent.parent


def given(*names: str) -> list[Any]:
    """Parameters: the families by name, those that the installed release does not have marked to be skipped."""
    reason = f"transformers {transformers.__version__} does not have it"
    return [pytest.param(name, marks=pytest.mark.skipif(name not in KNOWN, reason=reason)) for name in names]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def make(family: str, dtype: str = "float32", **changes: Any) -> TransformersEngine:
    """A fresh engine whose model counts the calls of its forward as `passes`."""
    model = latent_model(family, dtype, **changes)
    forward, model.passes = model.forward, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        model.passes += 1
        return forward(*args, **kwargs)

    model.forward = counted
    return TransformersEngine(model)


def begin(family: str, dtype: str = "float32", **changes: Any) -> TransformersEngine:
    engine = make(family, dtype, **changes)
    engine.prefill(IDS)
    for _ in range(BEFORE):
        engine.step()
    return engine


def ids_of(engine: TransformersEngine, count: int) -> list[int]:
    return [engine.step().id for _ in range(count)]


def bits(snapshot: Snapshot) -> list[tuple[str, bytes]]:
    return [(tensor.name, tensor.array.tobytes()) for tensor in snapshot.tensors()]


def roles(snapshot: Snapshot) -> list[tuple[str, ...]]:
    return [tuple(t.role for t in layer.tensors) for layer in snapshot.layers]


def needs_latent(family: str) -> None:
    if not keeps_latent(latent_model(family)):
        pytest.skip(f"transformers {transformers.__version__} keeps keys and values of {family}, not the latent row")


# -- a new process ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Course, Course]]:
    """Every case: the uninterrupted run, and the one that a single new process resumed from the file."""
    directory = tmp_path_factory.mktemp("latent")
    expected: dict[str, Course] = {}
    cases = [(family, dtype) for family in KNOWN for dtype in DTYPES]
    with one_thread():
        for family, dtype in cases:
            engine = begin(family, dtype)
            native.save(engine.capture(), directory / f"{family}-{dtype}-pending.kvsnap", sync=False)
            engine.settle()
            native.save(engine.capture(), directory / f"{family}-{dtype}-settled.kvsnap", sync=False)
            expected[f"{family}-{dtype}"] = go_on(engine)
    (directory / "cases.json").write_text(json.dumps(cases))
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, __file__, str(directory)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    with np.load(directory / "found.npz") as found:
        return {
            f"{name}-{point}": (run, Course(*(found[f"{name}-{point}.{part}"] for part in Course._fields)))
            for name, run in expected.items()
            for point in POINTS
        }


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", given(*FAMILIES))
def test_a_new_process_goes_on_as_if_never_interrupted(
    resumed: dict[str, tuple[Course, Course]], family: str, dtype: str, point: str
) -> None:
    judge(*resumed[f"{family}-{dtype}-{point}"], point)


# -- what is captured ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", given(*FAMILIES))
def test_a_capture_holds_just_what_the_cache_holds(family: str, dtype: str) -> None:
    engine = begin(family, dtype)
    snapshot = engine.capture()
    latent = keeps_latent(engine.model)
    assert len(snapshot.layers) == len(engine.cache.layers)
    for layer, live in zip(snapshot.layers, engine.cache.layers, strict=True):
        kept = [live.keys[0], live.values[0]]
        if latent:
            kept = [t[0] for t in kept]
            assert [t.shape for t in kept] == [(snapshot.n_rows, LATENT), (snapshot.n_rows, ROPE)]
        index = getattr(live, "indexer_keys", None)
        kept += [] if index is None else [index[0]]
        assert layer.kind == ("latent" if latent else "attention")
        assert layer.num_query_heads == engine.model.config.num_attention_heads
        for tensor, expected in zip(layer.tensors, kept, strict=True):
            assert tensor.spec.dtype == dtype
            assert tensor.shape == tuple(expected.shape)
            assert tensor.array.tobytes() == expected.contiguous().view(torch.uint8).numpy().tobytes()
    pair = ("latent", "rope") if latent else ("k", "v")
    owners = {"glm_moe_dsa-shared": (0, 2)}.get(family, tuple(range(LAYERS)) if family in INDEXED else ())
    assert roles(snapshot) == [(*pair, "index") if i in owners else pair for i in range(len(snapshot.layers))]


@pytest.mark.parametrize("family", given("deepseek_v2", "deepseek_v3", "minicpm3", "deepseek_v32"))
def test_a_latent_layer_describes_itself(family: str) -> None:
    needs_latent(family)
    engine = begin(family)
    snapshot = engine.capture()
    latent, rope, *index = snapshot.layers[1].tensors
    assert (latent.spec.axes, latent.spec.shape, latent.spec.row_axis, latent.spec.rope) == (
        ("row", "dim"), (0, LATENT), 0, "none",
    )  # fmt: skip
    assert (rope.spec.axes, rope.spec.shape, rope.spec.rope) == (("row", "dim"), (0, ROPE), "after")
    assert [(t.spec.axes, t.spec.shape) for t in index] == [(("row", "dim"), (0, INDEX))] * len(index)
    assert (snapshot.num_heads, snapshot.head_dim) == (1, LATENT)
    head = snapshot.head(1, 0)
    assert head is not None
    assert np.array_equal(head.k, latent.array)
    assert np.array_equal(head.v, rope.array)
    assert head.positions.tolist() == list(range(snapshot.n_rows))
    assert snapshot.head(1, 1) is None
    # An engine that has seen nothing describes the same.
    assert [t.spec for t in make(family).capture().tensors()] == [t.spec for t in snapshot.tensors()]


@pytest.mark.parametrize("family", given("deepseek_v2", "deepseek_v3", "minicpm3", "deepseek_v32", "glm_moe_dsa"))
def test_the_pairing_is_how_the_rows_are_turned(family: str) -> None:
    # One token again and again: in the first layer its row is the same before the rotation, so that a pair keeps its
    # length at every position, and what is no pair does not.
    needs_latent(family)
    engine = make(family)
    engine.prefill([7] * 12)
    rope = engine.capture().layers[0].tensors[1]
    half = np.hypot(rope.array[:, : ROPE // 2], rope.array[:, ROPE // 2 :])
    neighbours = np.hypot(rope.array[:, 0::2], rope.array[:, 1::2])
    right, wrong = (half, neighbours) if rope.spec.pairing == "half" else (neighbours, half)
    np.testing.assert_allclose(right, np.broadcast_to(right[:1], right.shape), rtol=1e-4)
    assert not np.allclose(wrong, wrong[:1], rtol=1e-2)
    assert rope.spec.pairing == ("interleaved" if family == "deepseek_v2" else "half")


@pytest.mark.parametrize("family", given("deepseek_v3", "deepseek_v32", "glm_moe_dsa-shared"))
def test_a_capture_from_a_row_on_is_the_end_of_the_whole_one(family: str) -> None:
    engine = begin(family)
    whole, part = engine.capture(), engine.capture(start=9)
    assert part.row_start == 9
    for tensor, all_rows in zip(part.tensors(), whole.tensors(), strict=True):
        assert (tensor.start, tensor.n_rows) == (9, whole.n_rows - 9)
        assert tensor.array.tobytes() == all_rows.rows(9, whole.n_rows).array.tobytes()


# -- negative controls: each of these must be noticed by the comparison above ---------------------------------------


def with_row_zeroed(snapshot: Snapshot, role: str, row: int) -> Snapshot:
    """The snapshot with one row of that role zeroed, in the first layer only."""

    def zeroed(tensor: Tensor) -> Tensor:
        array = np.array(tensor.array)
        array[..., row, :] = 0
        return Tensor(tensor.spec, array)

    first = snapshot.layers[0]
    changed = replace(first, tensors=tuple(zeroed(t) if t.role == role else t for t in first.tensors))
    return replace(snapshot, layers=(changed, *snapshot.layers[1:]))


def index_matters(family: str, **changes: Any) -> bool:
    """Tell whether zeroing an index row changes the logits that follow."""
    snapshot, runs = begin(family, **changes).capture(), []
    zeroed = [with_row_zeroed(snapshot, "index", row) for row in (20, 12, 28, 36)]
    for each in (snapshot, *zeroed):
        fresh = make(family, **changes)
        fresh.install(each)
        runs.append(go_on(fresh).logits)
    return not all(np.array_equal(run, runs[0]) for run in runs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", given(*FAMILIES))
def test_a_wrong_row_does_not_pass_as_exact(family: str, dtype: str) -> None:
    engine = begin(family, dtype)
    snapshot = engine.capture()
    expected = go_on(engine)
    assert roles(snapshot)[0][2:] == (("index",) if family in INDEXED else ())

    def passes(role: str, row: int) -> bool:
        fresh = make(family, dtype)
        fresh.install(with_row_zeroed(snapshot, role, row))
        return np.array_equal(go_on(fresh).logits, expected.logits)

    assert passes("", 20)
    for role in roles(snapshot)[0]:
        # With an index, a row that is never picked does not matter.
        rows = (20, 12, 28, 36) if family in INDEXED else (20,)
        assert not all(passes(role, row) for row in rows), role


@pytest.mark.parametrize("family", given(*INDEXED))
def test_an_index_row_matters_because_few_rows_are_picked(family: str) -> None:
    # With room for every row the index decides nothing, so that the control above is about the choice.
    assert index_matters(family)
    assert not index_matters(family, index_topk=256)


# -- all or nothing --------------------------------------------------------------------------------------------------


def state(engine: TransformersEngine) -> tuple[Any, ...]:
    return engine.tokens, engine.n_rows, engine.n_pending, bits(engine.capture())


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


def test_a_latent_layer_beside_one_of_a_kind_that_is_not_supported_is_refused_by_name() -> None:
    if "kimi_linear" not in transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES:
        pytest.skip(f"transformers {transformers.__version__} does not have kimi_linear")
    with pytest.raises(UnsupportedError, match="layer 0 is a LinearAttentionLayer, which is not supported yet"):
        make("kimi_linear")


def resume_all(directory: Path) -> None:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for family, dtype in json.loads((directory / "cases.json").read_text()):
        engine = make(family, dtype)
        for point in POINTS:
            name = f"{family}-{dtype}-{point}"
            engine.install(native.load(directory / f"{name}.kvsnap"))
            results |= {f"{name}.{part}": value for part, value in go_on(engine)._asdict().items()}
    np.savez(directory / "found.npz", **results)


if __name__ == "__main__":
    resume_all(Path(sys.argv[1]))

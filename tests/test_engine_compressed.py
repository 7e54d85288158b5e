"""Layers that make one row of a group of positions: whole in a snapshot, resumed bit for bit, refused where not exact.

As a script, `test_engine_compressed.py DIRECTORY` is the new process that resumes every snapshot in the directory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvsnap  # noqa: E402 - after the extras are known to be there
from compressed_models import BLOCK, GROUP, LONG_GROUP, TYPES, compressed_model  # noqa: E402
from kvsnap.engines._tf_layers import cut, numpy_view  # noqa: E402
from kvsnap.engines.transformers import TransformersEngine  # noqa: E402
from kvsnap.errors import CompatibilityError, InputError, KvsnapError, UnsupportedError  # noqa: E402
from kvsnap.formats import native  # noqa: E402
from kvsnap.layout import Layer, Snapshot, Tensor  # noqa: E402
from kvsnap.session import Session  # noqa: E402
from latent_runs import bits, ids_of  # noqa: E402
from test_engine_exactness import ROOT, Run, go_on, one_thread  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.newest, pytest.mark.usefixtures("one_thread")]

DTYPES = ("float32", "bfloat16")
# Around the groups of 4 and 6, their common multiple, the window of 8, and beyond.
LENGTHS = (1, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 19, 24, 25)
CASES = [("v4", dtype, n) for dtype in DTYPES for n in LENGTHS] + [
    ("m3", dtype, n) for dtype in DTYPES for n in (1, BLOCK - 1, BLOCK, 2 * BLOCK + 1, 25)
]
AFTER = 10


@lru_cache
def model_of(kind: str, dtype: str) -> Any:
    """A model, built once, that counts the calls of its forward as `passes`."""
    model = compressed_model(kind, dtype)
    forward, model.passes = model.forward, 0

    @wraps(forward)  # generate looks at its parameters
    def counted(*args: Any, **kwargs: Any) -> Any:
        model.passes += 1
        return forward(*args, **kwargs)

    model.forward = counted
    return model


def make(kind: str = "v4", dtype: str = "float32") -> TransformersEngine:
    return TransformersEngine(model_of(kind, dtype))


def prompt(count: int) -> list[int]:
    return [(place * 53 + 29) % 256 for place in range(count)]


def begun(count: int, kind: str = "v4", dtype: str = "float32") -> TransformersEngine:
    """An engine with `count` evaluated positions."""
    engine = make(kind, dtype)
    engine.prefill(prompt(count))
    return engine


def state(engine: TransformersEngine) -> tuple[Any, ...]:
    return engine.tokens, engine.n_rows, engine.n_pending, bits(engine.capture())


# -- all that is there ---------------------------------------------------------------------------------------------


def held(layer: Any) -> dict[str, Any]:
    """Every tensor that a live layer refers to, in attributes and in dictionaries, by a name of its own."""
    found = {}
    for name, value in vars(layer).items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        found |= {f"{name}.{key}".strip("."): t for key, t in inner if torch.is_tensor(t)}
    del found["_sliding_window_tensor"]  # a setting
    return found


NAMES = {
    "keys": "k", "values": "v", "compressed_kv.compressor": "compressed", "compressed_kv.indexer": "index",
    "buffer_kv.compressor": "buffer", "buffer_gate.compressor": "buffer.1", "buffer_kv.indexer": "buffer.2",
    "buffer_gate.indexer": "buffer.3", "overlap_kv.compressor": "overlap", "overlap_gate.compressor": "overlap.1",
    "overlap_kv.indexer": "overlap.2", "overlap_gate.indexer": "overlap.3",
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, GROUP - 1, GROUP, LONG_GROUP, 9, 25])
def test_a_snapshot_holds_every_tensor_of_the_live_layer(count: int, dtype: str) -> None:
    engine = begun(count, dtype=dtype)
    snapshot = engine.capture()
    for index, (layer, stored) in enumerate(zip(engine.cache.layers, snapshot.layers, strict=True)):
        live, kept = held(layer), {t.name.removeprefix(f"layers.{index}."): t for t in stored.tensors}
        assert {NAMES[name] for name in live} <= kept.keys()
        for name, tensor in live.items():
            assert kept[NAMES[name]].array.tobytes() == numpy_view(tensor[0].contiguous()).tobytes(), name
        # What is in the snapshot alone is what the layer does not have yet: nothing.
        assert all(not t.nbytes for name, t in kept.items() if name not in {NAMES[n] for n in live})
        for name, number in getattr(layer, "entry_count", {}).items():
            assert number == kept[{"compressor": "compressed", "indexer": "index"}[name]].n_rows
            assert number == count // layer.compress_rate
    assert [layer.kind for layer in snapshot.layers] == ["attention", "hybrid", "hybrid", "hybrid"]


def test_later_steps_do_not_change_a_snapshot() -> None:
    engine = begun(9)
    snapshot = engine.capture()
    before = bits(snapshot)
    ids_of(engine, 9)
    assert bits(snapshot) == before


# -- in a new process ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Run, Run]]:
    directory = tmp_path_factory.mktemp("compressed")
    expected: dict[str, Run] = {}
    with one_thread():
        for kind, dtype, count in CASES:
            engine = begun(count, kind, dtype)
            name = f"{kind}-{dtype}-{count}"
            native.save(engine.capture(), directory / f"{name}-settled.kvsnap", sync=False)
            expected[f"{name}-settled"] = go_on(engine, AFTER)
            native.save(engine.capture(), directory / f"{name}-pending.kvsnap", sync=False)
            expected[f"{name}-pending"] = go_on(engine, AFTER)
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, __file__, str(directory)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    with np.load(directory / "found.npz") as found:
        return {name: (run, Run(*(found[f"{name}.{part}"] for part in Run._fields))) for name, run in expected.items()}


@pytest.mark.parametrize("point", ["settled", "pending"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_new_process_goes_on_as_if_never_interrupted(
    resumed: dict[str, tuple[Run, Run]], case: tuple[str, str, int], point: str
) -> None:
    expected, found = resumed["-".join([*map(str, case), point])]
    assert list(found.ids) == expected.ids
    assert np.array_equal(found.logits, expected.logits)
    assert found.forwards == (AFTER if point == "pending" else AFTER - 1)
    assert len(set(expected.ids)) >= 4, "the continuation must vary, or the same ids prove nothing"


def resume_all(directory: Path) -> None:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for path in sorted(directory.glob("*.kvsnap")):
        kind, dtype = path.stem.split("-")[:2]
        engine = make(kind, dtype)
        engine.install(native.load(path))
        results |= {f"{path.stem}.{part}": value for part, value in go_on(engine, AFTER)._asdict().items()}
    np.savez(directory / "found.npz", **results)


# -- negative controls: each must be refused, or change what follows -----------------------------------------------


def changed(snapshot: Snapshot, name: str, change: Callable[[Any], Any]) -> Snapshot:
    """The snapshot with one tensor changed."""

    def of(layer: Layer) -> Layer:
        tensors = tuple(
            Tensor(t.spec, change(np.array(t.array)), start=t.start) if t.name == name else t for t in layer.tensors
        )
        return replace(layer, tensors=tensors)

    assert name in [t.name for t in snapshot.tensors()]
    return replace(snapshot, layers=tuple(of(layer) for layer in snapshot.layers))


def zeroed(row: int) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        array[row] = 0
        return array

    return change


def raised(gates: Any) -> Any:
    gates[0] += 30  # softmax then takes this position alone
    return gates


def other(snapshot: Snapshot) -> dict[str, Snapshot]:
    """Snapshots that are wrong in one thing each, of the same sizes."""
    one = {f"{name} zeroed": changed(snapshot, f"layers.{name}", zeroed(-1)) for name in (
        "1.compressed", "2.compressed", "3.index", "1.buffer", "2.buffer", "1.overlap",
    )}  # fmt: skip
    gates = {
        f"{name} raised": changed(snapshot, f"layers.{name}", raised)
        for name in ("1.buffer.1", "1.buffer.3", "2.buffer.1", "1.overlap.1", "1.overlap.3")
    }
    # Those of the index only count where it then picks other rows.
    turned = {f"{name} turned": changed(snapshot, f"layers.{name}", lambda a: a * -20) for name in (
        "1.buffer.2", "1.overlap.2",
    )}  # fmt: skip
    return one | gates | turned


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_wrong_in_one_row_does_not_pass_as_exact(dtype: str) -> None:
    engine = begun(15, dtype=dtype)  # three positions wait in each buffer
    snapshot = engine.capture()
    expected = go_on(engine, 20)  # an index row counts when the rows that it is compared with are there

    def again(given: Snapshot) -> Run:
        fresh = make(dtype=dtype)
        fresh.install(given)
        return go_on(fresh, 20)

    assert np.array_equal(again(snapshot).logits, expected.logits)
    for what, given in other(snapshot).items():
        assert not np.array_equal(again(given).logits, expected.logits), what


def short(snapshot: Snapshot, name: str) -> Snapshot:
    return changed(snapshot, name, lambda array: array[:-1])


def emptied(snapshot: Snapshot, name: str) -> Snapshot:
    return changed(snapshot, name, lambda array: array[:0])


def longer(snapshot: Snapshot, name: str) -> Snapshot:
    return changed(snapshot, name, lambda array: np.concatenate([array, array[-1:]]))


@pytest.mark.parametrize("change", [short, emptied, longer])
@pytest.mark.parametrize("part", ["compressed", "index", "buffer", "buffer.1", "buffer.3", "overlap", "overlap.3"])
def test_rows_that_are_not_there_or_too_many_are_refused(part: str, change: Any) -> None:
    snapshot = begun(15).capture()
    engine = begun(9)
    before = state(engine)
    with pytest.raises(CompatibilityError, match=rf"layer 1 {part.partition('.')[0]}: shape differs"):
        engine.install(change(snapshot, f"layers.1.{part}"))
    assert state(engine) == before


def test_a_snapshot_without_a_tensor_is_refused() -> None:
    snapshot = begun(15).capture()
    for role in ("compressed", "index", "buffer", "overlap"):
        layers = list(snapshot.layers)
        kept = [t for t in layers[1].tensors if t.role != role]
        layers[1] = replace(layers[1], tensors=tuple(kept))
        with pytest.raises(CompatibilityError, match="layer 1 is of another kind"):
            make().install(replace(snapshot, layers=tuple(layers)))


def test_keys_and_values_are_one_tensor() -> None:
    engine = begun(9)
    assert engine.cache.layers[1].values is engine.cache.layers[1].keys
    engine.install(engine.capture())
    assert engine.cache.layers[1].values is engine.cache.layers[1].keys
    before = state(engine)
    wrong = changed(engine.capture(), "layers.1.v", lambda array: array + 1)
    with pytest.raises(CompatibilityError, match="one tensor for keys and values, and these differ"):
        engine.install(wrong)
    assert state(engine) == before


def test_groups_of_another_size_are_refused() -> None:
    rates = {TYPES[1]: GROUP, TYPES[2]: LONG_GROUP + 1}
    engine = TransformersEngine(compressed_model("v4", compress_rates=rates))
    for count in (3, 15):  # also where neither has a row yet
        with pytest.raises(CompatibilityError, match=r"layer 2 compressed: (shape|positions for each row) differs"):
            engine.install(begun(count).capture())


@pytest.mark.parametrize("step", [1, -1])
def test_a_live_layer_that_counts_wrong_is_refused(step: int) -> None:
    engine = begun(15)
    for name in ("compressor", "indexer"):
        engine.cache.layers[1].entry_count[name] += step
        with pytest.raises(UnsupportedError, match=r"does not hold the (compressed|index) rows that it counts"):
            engine.capture()
        engine.cache.layers[1].entry_count[name] -= step
    engine.capture()


def test_rows_of_another_dtype_are_converted_and_gates_stay_as_they_are() -> None:
    snapshot = begun(15).capture()
    engine = make(dtype="bfloat16")
    with pytest.raises(CompatibilityError, match="dtype differs; expected bfloat16, found float32"):
        engine.install(snapshot)
    engine.install(snapshot, cast=True)
    found = {t.name: t for t in engine.capture().tensors()}
    # In transformers 5.24 the bias that is added to a gate stays float32, before it was of the model's dtype.
    bias = engine.model.model.layers[1].self_attn.compressor.position_bias.dtype
    assert found["layers.1.overlap.1"].spec.dtype == str(bias).removeprefix("torch.")
    assert found["layers.1.compressed"].spec.dtype == "bfloat16"
    for tensor in snapshot.tensors():
        mine = found[tensor.name].array
        assert mine.tobytes() == tensor.array.astype(mine.dtype).tobytes()
    ids_of(engine, 6)


# -- all or nothing ------------------------------------------------------------------------------------------------

PLACES = {
    "v4": ["update", "store_compression_weights", "update_compressor_states", "update_overlap_state"],
    "m3": ["update", "update_index"],
}


@pytest.mark.parametrize("begin", [0, 3, 11, 15])
@pytest.mark.parametrize(("kind", "place"), [(kind, place) for kind, places in PLACES.items() for place in places])
def test_a_pass_that_is_interrupted_leaves_every_layer_as_it_was(kind: str, place: str, begin: int) -> None:
    engine, control = (begun(begin, kind) if begin else make(kind) for _ in range(2))
    # 0 calls before the interrupt, and 1: the second set of rows of the layer.
    for passed in (0, 1) if place not in ("update", "update_index") else (0,):
        before, layer = state(engine), engine.cache.layers[-1]  # those before it are done
        original, calls = getattr(layer, place), []

        def fail(*args: Any, _original: Any = original, _calls: Any = calls, _passed: int = passed, **more: Any) -> Any:
            _calls.append(1)
            if len(_calls) > _passed:
                raise KeyboardInterrupt
            return _original(*args, **more)

        setattr(layer, place, fail)
        with pytest.raises(KeyboardInterrupt):
            engine.prefill(prompt(9))
        delattr(layer, place)
        assert len(calls) == passed + 1
        assert state(engine) == before
    for each in (engine, control):
        each.prefill(prompt(9))
    assert ids_of(engine, 8) == ids_of(control, 8)
    assert state(engine) == state(control)


def test_a_pass_that_is_not_undone_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for left_out in ("buffer_kv", "compressed_kv", "entry_count", "overlap_kv", "cumulative_length"):
        engine = begun(11)
        before, layer = state(engine), engine.cache.layers[3]
        kinds = kvsnap.engines._tf_layers.KINDS
        kind = kinds["DeepseekV4CSACache"]
        kept = tuple(name for name in kind.kept if name != left_out)
        with monkeypatch.context() as patch:
            patch.setitem(kinds, "DeepseekV4CSACache", replace(kind, kept=kept))
            hook = engine.model.lm_head.register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises((ZeroDivisionError, UnsupportedError)):  # what is left of it may not even add up
                engine.prefill(prompt(5))
            hook.remove()
            with suppress(KvsnapError):  # noticed even earlier
                assert state(engine) != before, left_out
        assert layer.cumulative_length >= 11


@pytest.mark.parametrize("kind", ["v4", "m3"])
def test_a_cache_that_was_changed_outside_is_noticed(kind: str) -> None:
    engine = begun(9, kind)
    with torch.no_grad():
        engine.model(torch.tensor([[1]]), **{engine._model.cache_keyword: engine.cache}, use_cache=True)
    with pytest.raises(InputError, match="changed outside the engine"):
        engine.step()


# -- turns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_turn_holds_what_is_new_and_comes_back(dtype: str, tmp_path: Path) -> None:
    engine = make(dtype=dtype)
    turns: list[tuple[Snapshot, Run]] = []
    with Session.open(tmp_path / "chat.kvsnap") as session:
        # To 3 (nothing whole), 4, 11 (in a group), 12 (whole groups everywhere), 13, 25.
        for count in (3, 1, 7, 1, 1, 12):
            start = engine.n_rows
            engine.prefill(prompt(count))
            part, whole = engine.capture(start=session.n_rows), engine.capture()
            report = session.append(part)
            stored = 0
            for tensor in whole.tensors():
                spec, per_row = tensor.spec, tensor.spec.tokens_per_row
                n = engine.n_rows // per_row - max(start // per_row, tensor.start) if spec.grows else tensor.n_rows
                stored += spec.nbytes(n)
            assert whole.logits is not None
            assert report.tensor_bytes == stored + whole.logits.nbytes
            turns.append((whole, go_on(engine, 5)))
            engine.install(whole)
        assert len(turns) == 6
    for whole, course in reversed(turns):
        with Session.open(tmp_path / "chat.kvsnap") as session:
            session.truncate(len(whole.tokens))
            loaded = session.load()
        assert {name: raw for name, raw in bits(loaded) if not name.endswith((".k", ".v"))} == {
            name: raw for name, raw in bits(whole) if not name.endswith((".k", ".v"))
        }
        fresh = make(dtype=dtype)
        fresh.install(loaded)
        assert bits(fresh.capture()) == bits(whole)  # of a window the session may hold more rows
        found = go_on(fresh, 5)
        assert found.ids == course.ids
        assert np.array_equal(found.logits, course.logits)


def test_copies_of_a_session_and_other_formats_hold_the_same(tmp_path: Path) -> None:
    engine = make()
    with Session.open(tmp_path / "chat.kvsnap") as session:
        for count in (3, 9, 1):  # nothing whole, whole groups everywhere, one position waits
            engine.prefill(prompt(count))
            session.append(engine.capture(start=session.n_rows))
        session.fork(tmp_path / "fork.kvsnap", n_tokens=12)
        session.fork(tmp_path / "compact.kvsnap")
    with Session.open(tmp_path / "compact.kvsnap") as session:
        session.compact()
    whole = engine.capture()
    kvsnap.convert(tmp_path / "chat.kvsnap", tmp_path / "chat.safetensors")
    for name in ("chat.kvsnap", "compact.kvsnap", "chat.safetensors"):
        kvsnap.verify(tmp_path / name)
        engine.install(kvsnap.load(tmp_path / name))
        assert bits(engine.capture()) == bits(whole)
    engine.install(kvsnap.load(tmp_path / "fork.kvsnap"))
    forked = engine.capture()
    engine.prefill(prompt(1))
    assert bits(engine.capture()) == bits(whole)
    assert forked.n_rows == 12
    assert all(not tensor.n_rows for tensor in forked.tensors() if tensor.role == "buffer")


def test_an_engine_that_evaluated_nothing_can_be_captured_too() -> None:
    snapshot = make().capture()
    assert all(not tensor.n_rows for tensor in snapshot.tensors())
    engine = begun(9)
    engine.install(snapshot)
    engine.prefill(prompt(9))
    assert bits(engine.capture()) == bits(begun(9).capture())


def test_a_cut_inside_of_a_turn_is_refused_by_name(tmp_path: Path) -> None:
    engine = begun(24)  # whole groups everywhere, and 12 as well
    whole = engine.capture()
    for n in (23, 20, 12, 8):
        with pytest.raises(UnsupportedError, match=r"layers\.\d\.\w+.* cannot be rewound|\(replaced\)"):
            whole.truncate(n)
        with pytest.raises(UnsupportedError, match=r"DeepseekV4CSACache cannot go back to|does not hold the rows"):
            cut(engine.cache, n)
    cut(engine.cache, 24)  # nothing to do
    with Session.open(tmp_path / "chat.kvsnap") as session:
        session.append(whole)
        engine.prefill(prompt(8))
        session.append(engine.capture(start=24))
        for n in (31, 28, 12):
            with pytest.raises(UnsupportedError, match=f"nearest reachable length is {24 if n > 24 else 0}"):
                session.truncate(n)
        session.truncate(24)
        assert bits(session.load()) == bits(whole)


def test_a_layer_that_was_cropped_is_never_taken_over() -> None:
    # transformers calls these layers croppable, and crops the window alone.
    keyword = make()._model.cache_keyword
    for count in (2, 6, 7):
        for removed in range(1, count):
            engine = make()
            cache = transformers.DynamicCache(config=engine.model.config)
            with torch.no_grad():
                engine.model(torch.tensor([prompt(count)]), **{keyword: cache}, use_cache=True)
            engine.adopt(cache, prompt(count + 1))  # as it is
            cache.crop(count - removed if transformers.__version__ < "5.20" else -removed)
            assert cache.layers[1].cumulative_length == count - removed
            with pytest.raises(UnsupportedError, match="layer 1 does not keep"):
                engine.adopt(cache, prompt(count - removed + 1))


# -- generate, batches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["v4", "m3"])
def test_generate_goes_on_from_an_installed_cache_and_hands_it_back(kind: str) -> None:
    engine = begun(9, kind)
    snapshot, expected = engine.capture(), ids_of(engine, 8)
    engine.install(snapshot)
    chosen = engine.step().id
    ids = torch.tensor([engine.tokens])
    out = engine.model.generate(
        ids, **{engine._model.cache_keyword: engine.cache}, do_sample=False, max_new_tokens=7,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert [chosen, *out.sequences[0, ids.shape[1] :].tolist()] == expected
    engine.adopt(engine.cache, out.sequences, prompt=9)
    control = make(kind)
    control.install(snapshot)
    ids_of(control, 8)
    assert state(engine)[:3] == state(control)[:3]
    assert ids_of(engine, 4) == ids_of(control, 4)


def batch(kind: str, prompts: list[list[int]], side: str) -> tuple[TransformersEngine, Any, Any, Any]:
    width = max(map(len, prompts))
    rows, masks = [], []
    for one in prompts:
        filling = [0] * (width - len(one))
        rows.append(filling + one if side == "left" else one + filling)
        masks.append([0] * len(filling) + [1] * len(one) if side == "left" else [1] * len(one) + [0] * len(filling))
    engine = make(kind)
    ids, mask = torch.tensor(rows), torch.tensor(masks)
    cache = transformers.DynamicCache(config=engine.model.config)
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        out = engine.model(
            ids, attention_mask=mask, position_ids=positions, **{engine._model.cache_keyword: cache}, use_cache=True
        )
    return engine, cache, ids, {"attention_mask": mask, "logits": out.logits[:, -1]}


@pytest.mark.parametrize("kind", ["v4", "m3"])
def test_rows_of_a_batch_without_padding_go_on_alone(kind: str) -> None:
    prompts = [prompt(9), prompt(20)[11:], prompt(30)[21:]]
    engine, cache, ids, given = batch(kind, prompts, "left")
    engine.adopt(cache, ids, **given)
    for row, one in enumerate(prompts):
        alone, taken = make(kind), engine.capture(row=row)
        alone.prefill(one)
        for mine, its in zip(taken.tensors(), alone.capture().tensors(), strict=True):
            assert np.allclose(mine.array, its.array, atol=1e-4), mine.name
        expected = ids_of(alone, 8)
        alone.install(taken)
        assert ids_of(alone, 8) == expected


@pytest.mark.parametrize(("kind", "side"), [("v4", "left"), ("v4", "right"), ("m3", "left")])
def test_padding_inside_of_groups_is_refused(kind: str, side: str) -> None:
    engine, cache, ids, given = batch(kind, [prompt(9), prompt(5), prompt(7)], side)
    engine.adopt(cache, ids, **given)
    engine.capture(row=0)  # has none
    for row in (1, 2):
        with pytest.raises(UnsupportedError, match="padding"):
            engine.capture(row=row)
    engine, cache, ids, given = batch(kind, [prompt(5) + [0] * 4], side)
    given["attention_mask"][0, slice(0, 4) if side == "left" else slice(5, 9)] = 0
    with pytest.raises(UnsupportedError, match="padding"):
        engine.adopt(cache, ids, **given)


# -- what is refused -----------------------------------------------------------------------------------------------


def test_layers_of_models_that_are_no_plain_language_models_are_refused_by_name() -> None:
    layers = pytest.importorskip("transformers.models.unlimited_ocr.modeling_unlimited_ocr")
    layer = layers.UnlimitedOcrDynamicReferenceSlidingWindowLayer(sliding_window=8)
    from kvsnap.engines._tf_layers import kind_of

    with pytest.raises(UnsupportedError, match="UnlimitedOcrDynamicReferenceSlidingWindowLayer, which is not supp"):
        kind_of(layer, 0)


def test_a_class_of_the_same_name_from_elsewhere_is_refused() -> None:
    from kvsnap.engines._tf_layers import kind_of

    engine = begun(9)
    found = type(engine.cache.layers[1])
    kind_of(engine.cache.layers[1], 1)
    # `_layer_type`: or the class would register itself, and every model made later in this process would get it.
    fake = type(found.__name__, (found,), {"__module__": "elsewhere", "_layer_type": None})
    assert type(begun(9).cache.layers[1]) is found
    with pytest.raises(UnsupportedError, match="layer 1 is a DeepseekV4CSACache, which is not supported"):
        kind_of(fake(engine.model.config), 1)


if __name__ == "__main__":
    resume_all(Path(sys.argv[1]))

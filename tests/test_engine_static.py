"""Static caches: only rows in use are captured, every length comes back bit for bit, the memory stays where it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvsnap  # noqa: E402 - after the extras are known to be there
from kvsnap import inspection  # noqa: E402
from kvsnap.engines.transformers import TransformersEngine  # noqa: E402
from kvsnap.errors import ContextError, InputError, UnsupportedError  # noqa: E402
from latent_models import KNOWN, TOP_K, latent_model  # noqa: E402
from latent_runs import bits, ids_of  # noqa: E402
from test_engine_layers import MODELS  # noqa: E402
from tiny_models import tiny_llama, tiny_model  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.newest]

ROOM, WINDOW = 96, 8
LENGTHS = (1, 7, 8, 9, 40)
KINDS = (*MODELS, "index")
IDS = [(7 * i * i + 3 * i + 5) % 251 for i in range(60)]
_models: dict[tuple[str, str], Any] = {}


def model_of(kind: str, dtype: str = "float32") -> Any:
    if (kind, dtype) not in _models:
        torch.manual_seed(3)  # what the weights of some layers start as is not drawn by tiny_model
        if kind == "index":
            if "deepseek_v32" not in KNOWN:
                pytest.skip(f"transformers {transformers.__version__} has no deepseek_v32")
            _models[kind, dtype] = latent_model("deepseek_v32", dtype)
        else:
            family, changes = MODELS[kind]
            try:
                _models[kind, dtype] = tiny_model(family, 3, dtype, **changes)
            except (ValueError, KeyError) as error:
                pytest.skip(f"transformers {transformers.__version__}: {error}")
    return _models[kind, dtype]


def make(kind: str, cache: str = "static", room: int = ROOM, dtype: str = "float32") -> TransformersEngine:
    options = {"max_cache_len": room} if cache == "static" else None
    try:
        return TransformersEngine(model_of(kind, dtype), cache=cache, cache_options=options)
    except UnsupportedError as error:
        pytest.skip(f"transformers {transformers.__version__}: {error}")


def logits_of(engine: TransformersEngine) -> bytes:
    engine.settle()
    logits = engine.capture().logits
    assert logits is not None
    return logits.array.tobytes()


def run(engine: TransformersEngine, count: int = 4) -> list[tuple[int, bytes]]:
    return [(engine.step().id, logits_of(engine)) for _ in range(count)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_length_comes_back_bit_for_bit_through_a_file(kind: str, dtype: str, tmp_path: Any) -> None:
    varied = set()
    for length in LENGTHS:
        engine = make(kind, dtype=dtype)
        engine.prefill(IDS[:length])
        ids_of(engine, 2)
        path = tmp_path / f"{length}.kvsnap"
        kvsnap.save(engine.capture(), path)
        other = make(kind, dtype=dtype)
        assert kvsnap.restore(kvsnap.load(path), other).exact
        before = other.forwards
        expected, found = run(engine), run(other)
        assert found == expected
        assert other.forwards - before == len(found) + 1  # the pending one, and one for each token
        varied |= {token for token, _ in expected}
        assert bits(other.capture()) == bits(engine.capture())
    assert len(varied) > 4


def test_a_new_process_goes_on_bit_for_bit_and_evaluates_nothing_again(tmp_path: Path) -> None:
    expected = {}
    for kind in KINDS:
        try:
            engine = make(kind)
        except pytest.skip.Exception:
            continue
        for length in (5, 8, 20):
            engine.reset()
            engine.prefill(IDS[:length])
            ids_of(engine, 2)
            path = tmp_path / f"{kind}-{length}.kvsnap"
            kvsnap.save(engine.capture(), path)
            expected[str(path)] = [kind, [[token, found.hex()] for token, found in run(engine)]]
    jobs = json.dumps({path: kind for path, (kind, _) in expected.items()})
    script = [sys.executable, __file__, jobs, str(torch.get_num_threads())]
    done = subprocess.run(script, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == expected
    assert len(expected) >= 6


def _go_on(jobs: dict[str, str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for path, kind in jobs.items():
        engine = make(kind)
        assert kvsnap.restore(kvsnap.load(path), engine).exact
        out[path] = [kind, [[token, found.hex()] for token, found in run(engine)]]
        assert engine.forwards == engine.evaluated == len(out[path][1]) + 1
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_lost_or_moved_would_be_seen(kind: str) -> None:
    engine = make(kind)
    engine.prefill(IDS[:12])
    snapshot = engine.capture()
    expected = run(engine)
    for tensor in snapshot.tensors():
        if not tensor.spec.grows or not tensor.n_rows or tensor.role == "index":
            continue
        other = make(kind)
        tensor.array[...] = (old := tensor.array.copy())
        tensor.array[(slice(None),) * tensor.spec.row_axis + (-1,)] = 0
        other.install(snapshot)
        assert run(other) != expected, tensor.name
        tensor.array[...] = old


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_are_those_that_a_dynamic_cache_keeps_and_go_from_one_to_the_other(kind: str) -> None:
    for length in LENGTHS:
        static, dynamic = make(kind), make(kind, "dynamic")
        for engine in (static, dynamic):
            engine.prefill(IDS[:length])
        for a, b in zip(static.capture().tensors(), dynamic.capture().tensors(), strict=True):
            assert (a.name, a.start, a.n_rows, a.shape) == (b.name, b.start, b.n_rows, b.shape)
            if kind != "index" or length <= TOP_K:  # of equal scores, which one is picked depends on where it stands
                assert torch.allclose(torch.tensor(a.array), torch.tensor(b.array), atol=1e-4)
        for source, target in ((static, make(kind, "dynamic")), (dynamic, make(kind))):
            snapshot = source.capture()
            done = kvsnap.restore(snapshot, target)
            assert not done.exact
            seen = WINDOW if kind == "window" else ROOM
            assert any("cache" in note and f"static[{seen}]" in note for note in done.notes)
            assert bits(target.capture()) == bits(snapshot)
            if kind != "index":
                assert ids_of(target, 4) == ids_of(source, 4)


def test_another_length_of_the_cache_is_not_exact() -> None:
    engine = make("full")
    engine.prefill(IDS[:5])
    assert not kvsnap.restore(engine.capture(), make("full", room=ROOM + 1)).exact
    assert kvsnap.restore(engine.capture(), make("full")).exact


@pytest.mark.parametrize("length", [1, 7, 8, 9, 10, 20, 21])
def test_a_window_is_copied_as_the_live_memory_has_it(length: int) -> None:
    engine = make("window")
    for part in (IDS[: length // 2], IDS[length // 2 : length]):
        if part:
            engine.prefill(part)
    layer, keys = engine.cache.layers[0], engine.capture().layers[0].tensor("k")
    assert keys is not None
    held = min(length, WINDOW - 1)
    assert (keys.start, keys.n_rows) == (length - held, held)
    stop = min(length, WINDOW)
    assert torch.equal(torch.tensor(keys.array), layer.keys[0, :, stop - held : stop])
    other = make("window")
    other.install(engine.capture())
    assert torch.equal(other.cache.layers[0].keys[0, :, stop - held : stop], layer.keys[0, :, stop - held : stop])
    assert int(other.cache.layers[0].cumulative_length_int) == length


# -- what is not in use ------------------------------------------------------------------------------------------------


def poison(engine: TransformersEngine) -> None:
    """Write NaN into every row that is not in use."""
    for layer in engine.cache.layers:
        used = int(layer.cumulative_length)
        for tensor in (layer.keys, layer.values):
            tensor[:, :, used:] = float("nan")
        if getattr(layer, "indexer_keys", None) is not None:
            layer.indexer_keys[:, used:] = float("nan")


@pytest.mark.parametrize("kind", ["full", "index"])
def test_b34_rows_that_are_not_in_use_are_never_written(kind: str, tmp_path: Any) -> None:
    engine = make(kind, room=64)
    engine.prefill(IDS[:5])
    before = bits(engine.capture())
    poison(engine)
    snapshot = engine.capture()
    assert bits(snapshot) == before
    assert {t.n_rows for t in snapshot.tensors()} == {5}
    kvsnap.save(snapshot, tmp_path / "five.kvsnap")
    assert inspection.non_finite(kvsnap.load(tmp_path / "five.kvsnap")) == ()
    other = make(kind, room=64)
    other.install(kvsnap.load(tmp_path / "five.kvsnap"))
    clean = make(kind, room=64)
    clean.prefill(IDS[:5])
    assert run(other) == run(clean)


def test_b38_a_file_is_as_long_as_what_is_in_use(tmp_path: Any) -> None:
    model = tiny_llama(3, max_position_embeddings=4096)
    engine = TransformersEngine(model, cache="static", cache_options={"max_cache_len": 4096})
    engine.prefill(IDS[:10])
    snapshot = engine.capture()
    rows = 10 * 3 * 2 * 2 * 16 * 4
    assert sum(t.nbytes for t in snapshot.tensors()) == rows
    dynamic = TransformersEngine(model)
    dynamic.prefill(IDS[:10])
    sizes = []
    for name, one in (("static", snapshot), ("dynamic", dynamic.capture())):
        kvsnap.save(one, tmp_path / name)
        sizes.append(os.path.getsize(tmp_path / name))
    assert abs(sizes[0] - sizes[1]) < 0.05 * rows


def test_stale_rows_behind_a_cut_are_not_captured() -> None:
    engine = make("full")
    engine.prefill(IDS[:9])
    engine.rewind(4)
    snapshot = engine.capture()
    assert (snapshot.n_rows, {t.n_rows for t in snapshot.tensors()}) == (4, {4})


# -- memory -----------------------------------------------------------------------------------------------------------


def each(states: Any) -> list[Any]:
    """The states of a layer, which some releases number."""
    return [t for t in (states.values() if isinstance(states, dict) else [states]) if t is not None]


def addresses(engine: TransformersEngine) -> list[int]:
    found = []
    for layer in engine.cache.layers:
        for name in ("keys", "values", "indexer_keys", "cumulative_length", "indexer_cumulative_length"):
            found += [t.data_ptr() for t in (getattr(layer, name, None),) if torch.is_tensor(t)]
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            found += [t.data_ptr() for t in each(states)]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_of_an_installed_cache_is_marked_and_stays_where_it_is(kind: str) -> None:
    engine = make(kind)
    engine.prefill(IDS[:12])
    other = make(kind)
    other.install(engine.capture())
    for layer in other.cache.layers:
        tensors = [getattr(layer, name) for name in ("keys", "values") if torch.is_tensor(getattr(layer, name, None))]
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            tensors += each(states)
        assert all(getattr(t, "_dynamo_static_input_type", None) for t in tensors)
    before = addresses(other)
    ids_of(other, 12)
    assert addresses(other) == before
    hook = failing(other)
    with pytest.raises(ZeroDivisionError):
        other.step()
    hook.remove()
    ids_of(other, 1)
    assert addresses(other) == before


def failing(engine: TransformersEngine) -> Any:
    layers = next(p for p in engine.model.modules() if type(p).__name__ == "ModuleList" and len(p) == 3)
    return layers[2].register_forward_hook(lambda *_: 1 / 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [0, 4, 8, 12])
def test_a_failed_pass_leaves_a_static_cache_as_it_was(kind: str, length: int) -> None:
    engine, control = make(kind), make(kind)
    for one in (engine, control):
        if length:
            one.prefill(IDS[:length])
            ids_of(one, 1)
    before, counted = bits(engine.capture()), [int(x.get_seq_length()) for x in counting(engine)]
    hook = failing(engine)
    for change in (lambda: engine.prefill(IDS[:3]), lambda: engine.prefill(IDS[:20])):
        with pytest.raises(ZeroDivisionError):
            change()
        assert bits(engine.capture()) == before
        assert [int(x.get_seq_length()) for x in counting(engine)] == counted
    hook.remove()
    for one in (engine, control):
        one.prefill(IDS[:2])
    assert run(engine) == run(control)


def counting(engine: TransformersEngine) -> list[Any]:
    return [layer for layer in engine.cache.layers if hasattr(layer, "max_cache_len")]


def test_a_window_that_is_not_put_back_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, control = make("window"), make("window")
    for one in (engine, control):
        one.prefill(IDS[:12])
    monkeypatch.setattr("kvsnap.engines._tf_layers.copy_into", lambda *_: None)
    hook = failing(engine)
    with pytest.raises(ZeroDivisionError):
        engine.prefill([1])
    hook.remove()
    assert bits(engine.capture()) != bits(control.capture())


# -- room and refusals ------------------------------------------------------------------------------------------------


def test_what_is_longer_than_the_cache_is_refused_with_both_numbers_before_anything() -> None:
    long = make("full", "dynamic")
    long.prefill(IDS[:20])
    engine = make("full", room=16)
    engine.prefill(IDS[:4])
    before = bits(engine.capture())
    for change in (
        lambda: engine.install(long.capture()),
        lambda: kvsnap.restore(long.capture(), engine),
        lambda: engine.prefill(IDS[:13]),
        lambda: engine.warm(IDS[:17]),
    ):
        with pytest.raises(ContextError, match=r"\b(20|17)\b.*\b16\b"):
            change()
        assert bits(engine.capture()) == before
    assert engine.context_limit == 16
    engine.prefill(IDS[:12])
    with pytest.raises(ContextError, match=r"17 positions, the static cache holds 16"):
        engine.step()
    assert engine.n_rows == 16


def test_a_cache_of_windows_alone_goes_on_beyond_its_length() -> None:
    engine = make("window", room=16)
    engine.prefill(IDS[:20])
    assert engine.n_rows == 20
    short = make("window", room=6)  # shorter than the window
    with pytest.raises(ContextError, match=r"7 positions, the static cache holds 6"):
        short.prefill(IDS[:7])


@pytest.mark.parametrize("length", [None, 0, -3, 2.5, "64", True])
def test_a_static_cache_needs_its_length(length: Any) -> None:
    options = {} if length is None else {"max_cache_len": length}
    with pytest.raises(InputError, match="max_cache_len"):
        TransformersEngine(model_of("full"), cache="static", cache_options=options)


def test_offloaded_caches_are_refused_by_name() -> None:
    engine = make("full", "dynamic")
    cache = transformers.DynamicCache(config=engine.model.config)
    cache.offloading = True  # to make one takes a device that rows are moved away from
    with pytest.raises(UnsupportedError, match="offloaded"):
        engine.adopt(cache, [[1]])


# -- caches of the user's own -----------------------------------------------------------------------------------------


def generated(kind: str, count: int, **options: Any) -> Any:
    ids = torch.tensor([IDS[:11]])
    try:
        return model_of(kind).generate(
            ids, max_new_tokens=count, do_sample=False, return_dict_in_generate=True, disable_compile=True, **options
        )
    except KeyError as error:
        pytest.skip(f"transformers {transformers.__version__} has no mask for it in a static cache: {error}")


def taken_over(kind: str, engine: TransformersEngine, out: Any) -> Any:
    cache = out[engine._model.cache_keyword]
    assert type(cache).__name__ == "StaticCache"
    counts = any(hasattr(layer, "max_cache_len") for layer in cache.layers)
    engine.adopt(cache, out.sequences, prompt=11, **({} if counts else {"evaluated": 16}))
    assert engine.cache is cache
    snapshot = engine.capture()
    assert (snapshot.n_rows, snapshot.n_pending) == (16, 1)
    return snapshot


@pytest.mark.parametrize("kind", KINDS)
def test_a_static_cache_of_generate_is_adopted_and_goes_on(kind: str) -> None:
    engine, other = make(kind), make(kind)
    cache = transformers.StaticCache(config=engine.model.config, max_cache_len=ROOM)
    snapshot = taken_over(kind, engine, generated(kind, 6, **{engine._model.cache_keyword: cache}))
    assert kvsnap.restore(snapshot, other).exact
    assert run(other) == run(engine)
    # One that generate makes is as long as it needs to be, so that the bits are others.
    snapshot = taken_over(kind, engine, out := generated(kind, 6, cache_implementation="static"))
    kvsnap.restore(snapshot, other)
    if kind != "index":
        longer = generated(kind, 12, cache_implementation="static").sequences
        assert ids_of(other, 6) == longer[0, 17:].tolist()
    with pytest.raises(UnsupportedError, match=r"cache='static'\) takes it"):
        make(kind, "dynamic").adopt(out[engine._model.cache_keyword], out.sequences)


def test_a_cache_that_was_initialised_early_is_empty() -> None:
    engine = make("full")
    cache = transformers.StaticCache(config=engine.model.config, max_cache_len=32)
    cache.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))
    engine.adopt(cache, torch.zeros((1, 0), dtype=torch.long))
    assert (engine.n_rows, engine.tokens) == (0, ())
    pointers = addresses(engine)
    engine.prefill(IDS[:5])
    assert addresses(engine) == pointers
    fresh = make("full", room=32)
    fresh.prefill(IDS[:5])
    assert bits(engine.capture()) == bits(fresh.capture())


def test_a_session_grows_with_a_static_cache(tmp_path: Any) -> None:
    for kind in ("full", "window", "recurrent"):
        engine = make(kind)
        with kvsnap.Session.open(tmp_path / f"{kind}.kvsnap") as session:
            for part in (IDS[:6], IDS[6:20]):
                engine.prefill(part)
                ids_of(engine, 2)
                session.append(engine.capture(start=session.n_rows))
            other = make(kind)
            assert kvsnap.restore(session.load(), other).exact
        assert run(other) == run(engine)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    print(json.dumps(_go_on(json.loads(sys.argv[1]))))

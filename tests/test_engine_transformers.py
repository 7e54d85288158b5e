"""The engine for transformers against its protocol: counted forwards, atomic changes, refusals by name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvsnap import sampling  # noqa: E402 - after the extras are known to be there
from kvsnap.engines.transformers import TransformersEngine, recognises  # noqa: E402
from kvsnap.errors import (  # noqa: E402
    CompatibilityError,
    ContextError,
    DamagedError,
    InputError,
    KvsnapError,
    UnsupportedError,
)
from kvsnap.layout import PositionRun, Run, Sampler, Snapshot, Tensor  # noqa: E402
from kvsnap.protocols import Engine  # noqa: E402
from tiny_models import CONTEXT, PROMPT, ByteTokenizer, tiny_llama, tiny_model, tiny_qwen3  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]

IDS = list(PROMPT.encode())


def make(**options: Any) -> TransformersEngine:
    engine = TransformersEngine(tiny_llama(), ByteTokenizer(), **options)
    engine.sampler = sampling.start(Sampler(seed=0))
    return engine


def warmed(steps: int = 4, **options: Any) -> TransformersEngine:
    engine = make(**options)
    engine.prefill(IDS)
    for _ in range(steps):
        engine.step()
    return engine


def count_forwards(engine: TransformersEngine) -> list[int]:
    """Wrap the model's forward; the list grows by the number of ids of each pass."""
    passes: list[int] = []
    forward = engine.model.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        passes.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    engine.model.forward = counted
    return passes


def state(engine: TransformersEngine) -> tuple[Any, ...]:
    """Everything that an operation may change, comparable with ==."""
    snapshot = engine.capture()
    arrays = [t.array.tobytes() for t in snapshot.tensors()]
    logits = None if snapshot.logits is None else snapshot.logits.array.tobytes()
    return (
        snapshot.tokens, snapshot.runs, snapshot.n_rows, snapshot.n_pending, snapshot.positions, snapshot.sampler,
        arrays, logits,
    )  # fmt: skip


def ids_of(engine: TransformersEngine, count: int) -> list[int]:
    return [engine.step().id for _ in range(count)]


def cache_of(output: Any) -> Any:
    return output.cache if getattr(output, "cache", None) is not None else output.past_key_values


def keyword(engine: TransformersEngine) -> str:
    return engine._model.cache_keyword


def test_recognising_imports_nothing() -> None:
    assert recognises(tiny_llama())
    assert not recognises(object())
    with pytest.raises(InputError, match="not a transformers model"):
        TransformersEngine(object())
    code = (
        "import sys; from kvsnap.engines.transformers import recognises; assert not recognises(3);"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    path = str(Path(__file__).resolve().parent.parent / "src")
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=True)


# -- evaluating ------------------------------------------------------------------------------------------------------


def test_it_is_an_engine_and_counts_its_forwards() -> None:
    engine = make(prefill_step=10)
    assert isinstance(engine, Engine)
    passes = count_forwards(engine)
    engine.prefill(IDS)
    assert passes == [10, 10, len(IDS) - 20]
    engine.step()
    assert len(passes) == 3, "logits were there"
    engine.settle()
    engine.settle()
    assert passes[3:] == [1]
    engine.step()
    engine.prefill([1, 2])
    assert passes[4:] == [3], "what was pending goes first, in the same pass"
    assert (engine.forwards, engine.evaluated) == (len(passes), sum(passes))
    assert (engine.n_rows, engine.n_pending, len(engine.tokens)) == (sum(passes), 0, sum(passes))
    assert engine.capture().runs == (Run("prompt", len(IDS)), Run("generated", 2), Run("prompt", 2))
    engine.prefill([])
    assert engine.forwards == 5


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_greedy_is_what_generate_does_bit_for_bit(kind: str, dtype: str, attention: str) -> None:
    model = tiny_model(kind, 0, dtype, attention)
    want = model.generate(
        torch.tensor([IDS]), do_sample=False, max_new_tokens=24, return_dict_in_generate=True, output_logits=True
    )
    engine = TransformersEngine(model)
    engine.prefill(IDS)
    for scores in want.logits:
        engine.settle()
        logits = engine.capture(start=engine.n_rows).logits
        assert logits is not None
        assert logits.spec.dtype == dtype
        assert np.array_equal(logits.array.astype(np.float32), scores[0].float().numpy())
        engine.step()
    assert list(engine.tokens) == want.sequences[0].tolist()


def test_the_split_of_a_prefill_depends_on_the_length_only() -> None:
    a, b = make(prefill_step=8), make(prefill_step=8)
    a.prefill(IDS)
    b.warm(IDS)
    assert state(a) == state(b)
    assert (a.forwards, b.forwards) == (4, 4)


def test_log_probabilities_and_end_ids() -> None:
    model = tiny_llama()
    engine = TransformersEngine(model, ByteTokenizer())
    engine.prefill(IDS)
    logits = engine.capture().logits
    assert logits is not None
    token = engine.step()
    scores = torch.tensor(logits.array).log_softmax(-1)
    assert token.id == int(scores.argmax())
    assert token.logprob == pytest.approx(float(scores.max()), abs=1e-5)
    assert not token.end
    model.generation_config.eos_token_id = [token.id, 3]
    ended = TransformersEngine(model, ByteTokenizer())
    ended.prefill(IDS)
    assert ended.step() == replace(token, end=True, text="")


# -- all or nothing --------------------------------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[[TransformersEngine], object]] = {
    "prefill": lambda e: e.prefill(list(range(1, 21))),
    "settle": lambda e: e.settle(),
    "step": lambda e: e.step(),
    "warm": lambda e: e.warm(list(range(1, 21))),
}


PLACES = ("between layers", "between keys and values", "second pass")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("operation", "place"),
    [
        (o, p) for o in OPERATIONS for p in PLACES if p != "second pass" or o in ("prefill", "warm")
    ],  # others make one pass
)
def test_a_pass_that_fails_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, operation: str, error: type[BaseException], place: str
) -> None:
    engine, control = warmed(prefill_step=8), warmed(prefill_step=8)
    before, rows, passes = state(engine), engine.n_rows, 0

    def fail(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if passes > (1 if place == "second pass" else 0):
            raise error("on purpose")

    def half(layer: Any, keys: Any, values: Any, *_: Any, **__: Any) -> None:
        nonlocal passes
        passes += 1
        if not layer.is_initialized:
            layer.lazy_initialization(*(keys, values)[: len(signature(layer.lazy_initialization).parameters)])
        layer.keys = torch.cat([layer.keys, keys], dim=-2)
        raise error("on purpose")

    with monkeypatch.context() as patch:
        if place == "between keys and values":
            patch.setattr("transformers.cache_utils.DynamicLayer.update", half)
        hook = engine.model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(error, match="on purpose"):
            OPERATIONS[operation](engine)
        hook.remove()
    assert passes == (2 if place == "second pass" else 1)
    assert state(engine) == before
    assert engine.n_rows == rows
    assert ids_of(engine, 12) == ids_of(control, 12)
    assert state(engine) == state(control)


def test_an_interrupted_clean_up_is_finished_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = warmed(3)
    before = state(engine)
    hook = engine.model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("kvsnap.engines._tf_live.Undo.put_back", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    hook.remove()
    assert state(engine) == before
    assert ids_of(engine, 6) == ids_of(warmed(3), 6)


def test_a_failed_first_prefill_leaves_a_fresh_engine() -> None:
    engine = make()
    hook = engine.model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.prefill(IDS)
    hook.remove()
    assert (engine.tokens, engine.n_rows, engine.n_pending) == ((), 0, 0)
    engine.prefill(IDS)
    assert ids_of(engine, 5) == ids_of(warmed(0), 5)


def test_a_step_that_cannot_choose_leaves_the_token_pending() -> None:
    engine = warmed(3)
    before, draws = state(engine), engine.sampler
    hook = engine.model.lm_head.register_forward_hook(lambda _m, _i, out: out * float("nan"))
    with pytest.raises(InputError, match="finite"):
        engine.step()
    hook.remove()
    assert state(engine) == before
    assert engine.sampler == draws
    assert engine.n_pending == 1


def test_wrong_ids_and_empty_prompts_name_what_is_wrong() -> None:
    engine = warmed(2)
    before, passes = state(engine), count_forwards(engine)
    where = engine.n_rows + engine.n_pending
    with pytest.raises(InputError, match=rf"id 256 at position {where + 2} is outside the vocabulary of 256"):
        engine.prefill([1, 2, 256])
    with pytest.raises(InputError, match="id -1 at position 1 is outside the vocabulary of 256"):
        engine.warm([1, -1])
    for wrong in ([], [[1, 2]], [1.5], ["a"], [True], [2**70]):
        with pytest.raises(InputError):
            engine.warm(wrong)  # type: ignore[arg-type]
    assert passes == []
    assert state(engine) == before
    engine.reset()
    for operation in (lambda: engine.prefill([]), engine.step):
        with pytest.raises(InputError, match="empty"):
            operation()
    engine.settle()
    assert engine.forwards == 2, "only those of the beginning"


def test_a_full_context_is_refused_before_anything_is_evaluated() -> None:
    engine = make()
    passes = count_forwards(engine)
    assert engine.context_limit == CONTEXT
    for operation in (engine.prefill, engine.warm):
        with pytest.raises(ContextError, match=rf"{CONTEXT + 1} positions.*holds {CONTEXT}"):
            operation([1] * (CONTEXT + 1))
    assert passes == []
    engine.prefill([1] * (CONTEXT - 1))
    engine.step()
    before = state(engine)
    with pytest.raises(ContextError, match=rf"{CONTEXT + 1} positions.*holds {CONTEXT}"):
        engine.step()
    with pytest.raises(ContextError):
        engine.prefill([1])
    assert state(engine) == before
    engine.settle()
    assert engine.n_rows == CONTEXT


def test_a_model_in_training_mode_is_refused() -> None:
    engine = make()
    engine.model.train()
    with pytest.raises(InputError, match=r"model\.eval"):
        engine.prefill(IDS)


# -- out and in ------------------------------------------------------------------------------------------------------


def test_a_snapshot_describes_itself() -> None:
    engine = warmed(4)
    snapshot = engine.capture()
    assert (snapshot.architecture, snapshot.num_layers, snapshot.num_heads, snapshot.num_query_heads) == (
        "llama",
        3,
        2,
        4,
    )
    assert (snapshot.head_dim, snapshot.n_rows, snapshot.n_pending, snapshot.token_offset) == (16, 31, 1, 31)
    assert [t.name for t in snapshot.tensors()] == [f"layers.{i}.{r}" for i in range(3) for r in "kv"]
    assert [t.spec.id for t in snapshot.tensors()] == list(range(6))
    k, v = snapshot.layers[2].tensors
    assert (k.spec.axes, k.spec.shape, k.spec.row_axis, k.spec.growth) == (
        ("head", "row", "dim"),
        (2, 0, 16),
        1,
        "grow",
    )
    assert (k.role, k.spec.rope, k.spec.pairing, v.role, v.spec.rope) == ("k", "after", "half", "v", "none")
    assert snapshot.layers[0].kind == "attention"
    assert snapshot.logits is not None
    assert (snapshot.logits.name, snapshot.logits.role, snapshot.logits.spec.layer) == ("logits", "logits", -1)
    assert snapshot.text == ByteTokenizer().decode(snapshot.tokens)
    live = engine.cache.layers[2]
    assert np.array_equal(k.array, live.keys[0].numpy())
    assert np.array_equal(v.array, live.values[0].numpy())
    head = snapshot.head(2, 1)
    assert head is not None
    assert np.array_equal(head.k, live.keys[0, 1].numpy())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_no_dtype_is_cast_on_the_way(dtype: str) -> None:
    engine = TransformersEngine(tiny_qwen3(dtype=dtype))
    engine.prefill(IDS)
    snapshot = engine.capture()
    assert {t.spec.dtype for t in snapshot.tensors()} == {dtype} == {snapshot.identity.cache_dtype}
    live = [t for layer in engine.cache.layers for t in (layer.keys, layer.values)]
    for tensor, mine in zip(snapshot.tensors(), live, strict=True):
        width = torch.int32 if dtype == "float32" else torch.int16
        bits = mine[0].view(width).numpy()
        assert np.array_equal(tensor.array.view(bits.dtype), bits)
    other = TransformersEngine(tiny_qwen3(dtype=dtype))
    other.install(snapshot)
    assert other.cache.layers[0].keys.dtype == getattr(torch, dtype)
    assert state(other) == state(engine)


def spoil(engine: TransformersEngine) -> None:
    """Overwrite the live rows where they lie: whoever shares the memory sees it."""
    for layer in engine.cache.layers:
        layer.keys.zero_()
        layer.values.zero_()


def test_a_capture_is_a_copy_and_serves_twice() -> None:
    engine, other = warmed(3), make()
    snapshot, control = engine.capture(), warmed(3)
    kept = [t.array.copy() for t in snapshot.tensors()]
    spoil(engine)
    other.install(snapshot)
    first = ids_of(other, 10)
    other.install(snapshot)
    spoil(other)
    other.install(snapshot)
    assert first == ids_of(other, 10) == ids_of(control, 10)
    for before, tensor in zip(kept, snapshot.tensors(), strict=True):
        assert np.array_equal(before, tensor.array)
        assert tensor.array.flags.c_contiguous
        assert tensor.array.flags.writeable
    # The logits as well.
    engine.install(snapshot)
    taken = engine.capture().logits
    assert taken is not None
    bits = taken.array.copy()
    logits = engine._live.lines[0].logits
    assert logits is not None
    logits[:] = 0
    assert np.array_equal(taken.array, bits)
    assert snapshot.logits is not None
    assert np.array_equal(snapshot.logits.array, bits)


def test_a_capture_from_a_row_on_holds_the_rest() -> None:
    engine = warmed(3)
    whole, part = engine.capture(), engine.capture(start=20)
    assert (part.row_start, part.n_rows, part.tokens) == (20, whole.n_rows, whole.tokens)
    for full, tail in zip(whole.tensors(), part.tensors(), strict=True):
        assert tail.start == 20
        assert np.array_equal(tail.array, full.array[:, 20:])
    assert engine.capture(start=engine.n_rows).layers[0].tensors[0].n_rows == 0
    before = state(engine)
    with pytest.raises(InputError, match="partial"):
        engine.install(part)
    for start in (-1, engine.n_rows + 1):
        with pytest.raises(InputError, match="no such row"):
            engine.capture(start=start)
    with pytest.raises(InputError, match="no such sequence"):
        engine.capture(row=1)
    assert state(engine) == before


def test_an_empty_snapshot_is_a_fresh_state() -> None:
    empty = make().capture()
    assert (empty.n_rows, empty.tokens, empty.num_layers, empty.num_heads, empty.head_dim) == (0, (), 3, 2, 16)
    for snapshot in (empty, Snapshot()):
        engine = warmed()
        done = engine.install(snapshot)
        assert (done.reused, done.recomputed) == (0, 0)
        assert (engine.tokens, engine.n_rows, engine.n_pending) == ((), 0, 0)
        engine.prefill(IDS)
        assert ids_of(engine, 5) == ids_of(warmed(0), 5)


def test_without_logits_the_last_row_is_evaluated_again() -> None:
    engine = warmed(3)
    engine.settle()
    snapshot = replace(engine.capture(), logits=None)
    expected = ids_of(engine, 8)
    other = make()
    done = other.install(snapshot)
    assert (done.reused, done.recomputed, len(done.notes)) == (snapshot.n_rows - 1, 1, 1)
    assert (other.n_rows, other.n_pending, other.forwards) == (snapshot.n_rows - 1, 1, 0)
    assert ids_of(other, 8) == expected
    # With something pending the logits are not needed.
    pending = replace(warmed(3).capture(), logits=None)
    assert make().install(pending).recomputed == 0


def test_a_file_that_kept_the_last_ids_only_can_be_continued() -> None:
    engine = warmed(3)
    snapshot = engine.capture()
    short = replace(snapshot, tokens=snapshot.tokens[-4:], runs=(Run("generated", 4),))
    other = make()
    other.install(short)
    assert (other.n_rows, len(other.tokens)) == (engine.n_rows, 4)
    assert ids_of(other, 8) == ids_of(engine, 8)
    settled = replace(short, tokens=(), runs=(), n_pending=0, logits=None)
    with pytest.raises(InputError, match="neither logits nor the last token"):
        other.install(settled)


def test_settings_and_random_state_are_restored_and_can_be_replaced() -> None:
    engine = make()
    engine.sampler = sampling.start(Sampler(temperature=1.5, seed=11))
    engine.prefill(IDS)
    ids_of(engine, 5)
    snapshot = engine.capture()
    assert snapshot.sampler is not None
    assert snapshot.sampler.random.draws == 5
    expected = ids_of(engine, 12)
    other = make()
    other.install(snapshot)
    assert ids_of(other, 12) == expected
    other.install(replace(snapshot, sampler=None))
    assert other.sampler.random.draws == 17, "without one in the snapshot the engine keeps its own"
    other.install(snapshot)
    other.sampler = sampling.start(Sampler(temperature=1.5, seed=12))
    assert ids_of(other, 12) != expected


def changed(snapshot: Snapshot, layer: int, which: str, **spec: Any) -> Snapshot:
    """The snapshot with one tensor described, and shaped, differently."""

    def change(tensor: Tensor) -> Tensor:
        if tensor.role != which:
            return tensor
        new = replace(tensor.spec, **spec)
        return Tensor(new, np.zeros(new.shape_with(tensor.n_rows), dtype=new.dtype))

    layers = list(snapshot.layers)
    layers[layer] = replace(layers[layer], tensors=tuple(change(t) for t in layers[layer].tensors))
    return replace(snapshot, layers=tuple(layers))


MISFITS: dict[str, tuple[Callable[[Snapshot], Snapshot], type[KvsnapError], str]] = {
    "layer count": (lambda s: replace(s, layers=s.layers[:2]), CompatibilityError, r"layers; expected 3, found 2"),
    "shape": (lambda s: changed(s, 1, "k", shape=(4, 0, 16)), CompatibilityError, r"layer 1 k: shape.*\[2, .*\[4, "),
    "axes": (lambda s: changed(s, 2, "v", axes=("row", "head", "dim")), CompatibilityError, r"layer 2 v: axes"),
    "dtype": (lambda s: changed(s, 2, "v", dtype="float16"), CompatibilityError, r"layer 2 v.*float32, found float16"),
    "role": (lambda s: changed(s, 0, "k", role="latent"), CompatibilityError, r"layer 0 is of another kind.*latent"),
    "rope": (lambda s: changed(s, 1, "k", pairing="interleaved"), CompatibilityError, r"layer 1 k: rope.*interleaved"),
    "rows": (lambda s: replace(s, n_rows=s.n_rows - 1, token_offset=s.token_offset - 1, n_pending=2, positions=()),
             CompatibilityError, r"layer 0 k: shape"),
    "vocabulary": (lambda s: replace(s, tokens=(*s.tokens[:-1], 256)), InputError, r"id 256 at position \d+ .* 256"),
    "logits": (lambda s: replace(s, logits=Tensor(replace(s.logits.spec, shape=(99,)), np.zeros(99, np.float32))),  # type: ignore[union-attr]
               CompatibilityError, r"logits.*\[256\], found \[99\]"),
    "positions": (lambda s: replace(s, positions=(PositionRun(0, 3),)), InputError, r"positions.* do not fit its rows"),
    "negative": (lambda s: replace(s, token_offset=-3), InputError, r"positions below 0"),
    "context": (lambda s: replace(s, token_offset=s.token_offset + 4096), ContextError, r"takes? \d+ positions"),
    "counts": (lambda s: replace(s, n_pending=99), InputError, r"contradict"),
}  # fmt: skip


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_snapshot_that_does_not_fit_is_refused_and_nothing_changes(misfit: str) -> None:
    change, error, message = MISFITS[misfit]
    engine = warmed(2)
    before = state(engine)
    with pytest.raises(error, match=message):
        engine.install(change(warmed(5).capture()))
    assert state(engine) == before


def test_a_snapshot_longer_than_the_context_names_both_numbers() -> None:
    snapshot = warmed(4).capture()
    small = TransformersEngine(tiny_llama(max_position_embeddings=16))
    with pytest.raises(ContextError, match=r"32 positions.*holds 16"):
        small.install(snapshot)


def test_rows_of_another_dtype_need_cast() -> None:
    bfloat = TransformersEngine(tiny_llama(dtype="bfloat16"))
    bfloat.prefill(IDS)
    snapshot = bfloat.capture()
    engine = make()
    with pytest.raises(CompatibilityError, match=r"layer 0 k: dtype differs; expected float32, found bfloat16"):
        engine.install(snapshot)
    done = engine.install(snapshot, cast=True)
    assert any("bfloat16" in note for note in done.notes)
    for tensor, layer in zip(snapshot.layers, engine.cache.layers, strict=True):
        assert layer.keys.dtype == torch.float32
        assert np.array_equal(tensor.tensors[0].array.astype(np.float32), layer.keys[0].numpy())
    engine.step()


class Broken:
    """A source whose bytes turn out damaged when they are read."""

    def array(self) -> np.ndarray[Any, Any]:
        raise DamagedError("layer 1 k, rows 0 to 31")

    def read_into(self, out: np.ndarray[Any, Any]) -> None:
        out[:] = 7
        raise DamagedError("layer 1 k, rows 0 to 31")


@pytest.mark.parametrize("workers", [1, 3])
def test_a_damaged_tensor_leaves_the_live_state_alone(workers: int) -> None:
    snapshot = warmed(4).capture()
    layers = list(snapshot.layers)
    k, v = layers[1].tensors
    layers[1] = replace(layers[1], tensors=(Tensor(k.spec, Broken(), n_rows=k.n_rows), v))
    engine = warmed(2)
    before, cache = state(engine), engine.cache
    with pytest.raises(DamagedError):
        engine.install(replace(snapshot, layers=tuple(layers)), workers=workers)
    assert engine.cache is cache
    assert state(engine) == before
    seen: list[tuple[int, int]] = []
    engine.install(snapshot, lambda done, total: seen.append((done, total)), workers=workers)
    total = sum(layer.nbytes for layer in snapshot.layers)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


# -- caches of the user's own ----------------------------------------------------------------------------------------


def test_the_cache_of_a_generate_call_can_be_adopted() -> None:
    model = tiny_qwen3()
    short = model.generate(torch.tensor([IDS]), do_sample=False, max_new_tokens=10, return_dict_in_generate=True)
    whole = model.generate(torch.tensor([IDS]), do_sample=False, max_new_tokens=30)[0].tolist()
    engine = TransformersEngine(model)
    engine.adopt(cache_of(short), short.sequences, prompt=len(IDS))
    assert (engine.n_rows, engine.n_pending) == (len(IDS) + 9, 1)
    assert engine.capture().runs == (Run("prompt", len(IDS)), Run("generated", 10))
    ids_of(engine, 20)
    assert list(engine.tokens) == whole


def test_the_cache_of_a_forward_pass_can_be_adopted_with_and_without_logits() -> None:
    model = tiny_llama()
    for with_logits in (True, False):
        with torch.no_grad():
            out = model(torch.tensor([IDS]))
        engine = TransformersEngine(model)
        engine.adopt(cache_of(out), [IDS], logits=out.logits[:, -1] if with_logits else None)
        assert engine.n_pending == (0 if with_logits else 1)
        assert ids_of(engine, 8) == ids_of(warmed(0), 8)


def test_a_restored_cache_works_in_the_users_own_generate() -> None:
    engine = warmed(5)
    snapshot, expected = engine.capture(), ids_of(engine, 12)
    engine.install(snapshot)
    ids = torch.tensor([engine.tokens])
    out = engine.model.generate(
        ids, **{keyword(engine): engine.cache}, do_sample=False, max_new_tokens=12, return_dict_in_generate=True
    )
    assert out.sequences[0, ids.shape[1] :].tolist() == expected
    with pytest.raises(InputError, match=r"changed outside the engine; hand it back with adopt"):
        engine.step()
    engine.adopt(engine.cache, out.sequences)
    assert ids_of(engine, 4) == ids_of(after(snapshot, 12), 4)
    engine.reset()
    assert engine.n_rows == 0


def after(snapshot: Snapshot, steps: int) -> TransformersEngine:
    engine = make()
    engine.install(snapshot)
    ids_of(engine, steps)
    return engine


PROMPTS = [list(b"abc"), list(b"defghij"), list(b"klmno")]


def padded(side: str) -> tuple[Any, Any]:
    width = max(len(p) for p in PROMPTS)
    fill = [[0] * (width - len(p)) for p in PROMPTS]
    rows = [f + p if side == "left" else p + f for f, p in zip(fill, PROMPTS, strict=True)]
    marks = [[0] * len(f) + [1] * len(p) if side == "left" else [1] * len(p) + [0] * len(f)
             for f, p in zip(fill, PROMPTS, strict=True)]  # fmt: skip
    return torch.tensor(rows), torch.tensor(marks)


def alone(prompt: list[int], steps: int) -> list[int]:
    engine = make()
    engine.prefill(prompt)
    return ids_of(engine, steps)


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_row_of_a_left_padded_batch_goes_on_alone(row: int) -> None:
    model = tiny_llama()
    model.generation_config.pad_token_id = 0
    ids, mask = padded("left")
    out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=6, return_dict_in_generate=True)
    batch = TransformersEngine(model)
    batch.adopt(cache_of(out), out.sequences, attention_mask=mask)
    snapshot = batch.capture(row=row)
    prompt = PROMPTS[row]
    assert snapshot.runs == (Run("prompt", len(prompt)), Run("generated", 6))
    assert (snapshot.n_rows, snapshot.n_pending, snapshot.logits) == (len(prompt) + 5, 1, None)
    unbatched = make()
    unbatched.prefill(prompt)
    ids_of(unbatched, 6)
    assert snapshot.tokens == unbatched.tokens
    for mine, reference in zip(snapshot.tensors(), unbatched.capture().tensors(), strict=True):
        np.testing.assert_allclose(mine.array, reference.array, atol=2e-4)
    engine = make()
    engine.install(snapshot)
    assert ids_of(engine, 12) == alone(prompt, 18)[6:]
    tail = batch.capture(row=row, start=2)
    assert np.array_equal(tail.layers[0].tensors[0].array, snapshot.layers[0].tensors[0].array[:, 2:])


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_row_of_a_right_padded_batch_goes_on_alone(row: int) -> None:
    model = tiny_llama()
    ids, mask = padded("right")
    with torch.no_grad():
        out = model(ids, attention_mask=mask)
    batch = TransformersEngine(model)
    batch.adopt(cache_of(out), ids, attention_mask=mask, logits=out.logits[:, -1])
    snapshot = batch.capture(row=row)
    full = len(PROMPTS[row]) == ids.shape[1]
    assert snapshot.tokens == tuple(PROMPTS[row])
    assert (snapshot.logits is not None) == full, "the logits of a padded column belong to no text"
    engine = make()
    engine.install(snapshot)
    assert ids_of(engine, 12) == alone(PROMPTS[row], 12)


def test_padding_in_a_batch_of_one_is_left_out_too() -> None:
    model = tiny_llama()
    ids, mask = padded("left")
    out = model.generate(
        ids[:1], attention_mask=mask[:1], do_sample=False, max_new_tokens=6, return_dict_in_generate=True
    )
    engine = TransformersEngine(model)
    engine.adopt(cache_of(out), out.sequences, attention_mask=mask[:1])
    assert engine.n_rows == len(PROMPTS[0]) + 5
    assert ids_of(engine, 12) == alone(PROMPTS[0], 18)[6:]


def test_the_filling_behind_a_sequence_that_ended_early_is_left_out() -> None:
    reference = alone(PROMPTS[0], 6)
    model = tiny_llama()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = end = reference[2]
    ids, mask = padded("left")
    out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=6, return_dict_in_generate=True)
    count = reference.index(end) + 1
    assert out.sequences[0, ids.shape[1] :].tolist() == reference[:count] + [0] * (6 - count)
    batch = TransformersEngine(model)
    batch.adopt(cache_of(out), out.sequences, attention_mask=mask)
    snapshot = batch.capture(row=0)
    assert snapshot.tokens == tuple(PROMPTS[0] + reference[:count])
    engine = make()
    engine.install(snapshot)
    assert ids_of(engine, 3) == alone(PROMPTS[0], count + 3)[count:]


def test_a_batch_is_captured_row_by_row_and_not_continued() -> None:
    model = tiny_llama()
    ids, mask = padded("left")
    with torch.no_grad():
        out = model(ids, attention_mask=mask)
    engine = TransformersEngine(model)
    before = state(engine)
    with pytest.raises(UnsupportedError, match=r"batch of 3 sequences without attention_mask"):
        engine.adopt(cache_of(out), ids)
    for wrong in ({"tokens": ids[:2]}, {"tokens": ids[:, :3]}, {"attention_mask": mask[:2]}, {"tokens": [[1], [1, 2]]}):
        given = {"tokens": ids, "attention_mask": mask, **wrong}
        with pytest.raises(InputError):
            engine.adopt(cache_of(out), **given)
    assert state(engine) == before
    engine.adopt(cache_of(out), ids, attention_mask=mask)
    for operation in (engine.step, engine.settle, lambda: engine.prefill([1]), lambda: engine.tokens):
        with pytest.raises(UnsupportedError, match="batch of 3"):
            operation()
    with pytest.raises(InputError, match="no such sequence"):
        engine.capture(row=3)
    engine.warm(IDS)
    assert ids_of(engine, 4) == ids_of(warmed(0), 4)


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("rwkv", {"attention": "eager"}, "rwkv keeps its state in a list of its own"),
        ("recurrent_gemma", {"attention": "eager"}, "recurrent_gemma keeps its recurrent states in its own modules"),
    ],
)
def test_a_family_that_is_not_supported_is_refused_by_name(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        TransformersEngine(tiny_model(kind, 0, **changes))


def test_another_cache_class_is_refused_by_name() -> None:
    from transformers import DynamicCache, StaticCache
    from transformers.cache_utils import DynamicLayer

    class Cunning(DynamicLayer):  # type: ignore[misc]
        pass

    engine = make()
    static = StaticCache(config=engine.model.config, max_cache_len=32)
    with pytest.raises(UnsupportedError, match="a StaticCache is not supported by this engine"):
        engine.adopt(static, [IDS])
    cache = DynamicCache(config=engine.model.config)
    cache.layers[1] = Cunning()
    with pytest.raises(UnsupportedError, match="layer 1 is a Cunning, which is not supported"):
        engine.adopt(cache, [IDS])


def test_a_model_without_a_head_is_refused() -> None:
    for name in ("AutoModel", "AutoModelForSequenceClassification"):
        model = getattr(transformers, name).from_config(tiny_llama().config)
        with pytest.raises(UnsupportedError, match="no language model head"):
            TransformersEngine(model)


def test_a_model_whose_layers_are_not_as_its_settings_say_is_refused_and_nothing_is_kept() -> None:
    engine = make()
    wrong = [
        replace(g, parts=tuple(replace(part, sizes=(4, 0, 16)) for part in g.parts)) for g in engine._model.geometry
    ]
    engine._model = replace(engine._model, geometry=tuple(wrong))
    with pytest.raises(
        UnsupportedError, match=r"layer 0 does not keep k as its settings say; expected \[4, .*found \[2, "
    ):
        engine.prefill(IDS)
    assert (engine.n_rows, engine.tokens) == (0, ())


def test_a_subclass_of_a_family_is_rotated_as_the_family_is() -> None:
    class Mine(transformers.LlamaForCausalLM):  # type: ignore[misc]
        pass

    snapshot = TransformersEngine(Mine(tiny_llama().config).eval()).capture()
    assert snapshot.layers[0].tensors[0].spec.pairing == "half"


def test_interleaved_keys_are_told_from_the_function_that_turns_them() -> None:
    snapshot = TransformersEngine(tiny_model("cohere", 0)).capture()
    assert (snapshot.layers[0].tensors[0].spec.rope, snapshot.layers[0].tensors[0].spec.pairing) == (
        "after",
        "interleaved",
    )

"""Quantised caches: codes, scales and residual rows come back as they were, and do what those of the live object do.

As a script, `test_engine_quantised.py DIRECTORY` is a new process that resumes every snapshot in the directory.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvsnap  # noqa: E402 - after the extras are known to be there
from kvsnap.engines import _tf_quantised  # noqa: E402
from kvsnap.engines.transformers import TransformersEngine  # noqa: E402
from kvsnap.errors import CompatibilityError, ExtraMissingError, InputError, UnsupportedError  # noqa: E402
from kvsnap.layout import Snapshot, Tensor  # noqa: E402
from latent_runs import bits, ids_of  # noqa: E402
from spec_file import SpecReader  # noqa: E402
from tiny_models import tiny_llama, tiny_model  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.newest, pytest.mark.usefixtures("one_thread")]

ROOT = Path(__file__).resolve().parent.parent
RESIDUAL, GROUP = 4, 8
_OF_HQQ = {"backend": "hqq", "q_group_size": GROUP, "residual_length": RESIDUAL}
_OF_QUANTO = {**_OF_HQQ, "backend": "quanto"}
OPTIONS: dict[str, dict[str, Any]] = {
    "fp8": {"backend": "fp8"},
    "hqq 4 bits": {**_OF_HQQ, "nbits": 4, "axis_key": 1, "axis_value": 1},
    "hqq 8 bits": {**_OF_HQQ, "nbits": 8, "axis_key": 0, "axis_value": 1},
    "hqq 3 bits": {**_OF_HQQ, "nbits": 3, "axis_key": 0, "axis_value": 0},
    "hqq 2 bits": {**_OF_HQQ, "nbits": 2, "axis_key": 1, "axis_value": 0},
    "hqq 1 bit": {**_OF_HQQ, "nbits": 1, "axis_key": 0, "axis_value": 0},
    "quanto 4 bits": {**_OF_QUANTO, "nbits": 4, "axis_key": 0, "axis_value": 0},
    # Along the last axis quanto only takes groups that divide heads times rows.
    "quanto 2 bits": {**_OF_QUANTO, "nbits": 2, "axis_key": -1, "axis_value": 0, "q_group_size": 2},
}
GROUPED = [name for name in OPTIONS if name != "fp8"]
LENGTHS = (3, 4, 5, 9, 13)
DTYPES = ("float32", "bfloat16")
PROMPT = [5, 17, 42, 99, 3, 4, 5, 6, 7, 8, 9, 10, 11]


def make(name: str, dtype: str = "float32", seed: int = 3, **changes: Any) -> TransformersEngine:
    try:
        return TransformersEngine(tiny_llama(seed, dtype, **changes), cache="quantised", cache_options=OPTIONS[name])
    except (ExtraMissingError, UnsupportedError) as error:
        pytest.skip(str(error))


def grown(name: str, n: int, dtype: str = "float32") -> TransformersEngine:
    """An engine of `n` rows: three in its first pass, the others one by one, so that some are not codes yet."""
    engine = make(name, dtype)
    engine.prefill(PROMPT[:3])
    for token in PROMPT[3:n]:
        engine.prefill([token])
    assert engine.n_rows == n
    return engine


def raw(tensor: Any) -> tuple[Any, ...]:
    plain = tensor.detach().contiguous()
    return str(plain.dtype), tuple(plain.shape), plain.flatten().view(torch.uint8).numpy().tobytes()


def codes(held: Any) -> Any:
    """Everything of the codes of one tensor, as the library that made them keeps it."""
    if hasattr(held, "__tensor_flatten__"):
        names, about = held.__tensor_flatten__()
        return {**about, **{name: codes(getattr(held, name)) for name in names}, "class": type(held).__name__}
    if isinstance(held, torch.Tensor):
        return raw(held)
    if isinstance(held, dict):
        return {name: codes(value) for name, value in held.items()}
    return tuple(codes(value) for value in held) if type(held) is tuple else held


def content(cache: Any) -> list[Any]:
    """All that the layers of a cache hold, bit by bit, and all they are set up with."""
    found = []
    for layer in cache.layers:
        about = {n: v for n, v in vars(layer).items() if n not in ("optimizer", "_quantized_keys", "_quantized_values")}
        shown = {n: codes(v) if isinstance(v, torch.Tensor) else v for n, v in about.items()}
        found.append((shown, codes(layer._quantized_keys), codes(layer._quantized_values)))
    return found


def twin(cache: Any) -> Any:
    """A cache with layers of its own. What they refer to is shared: no layer of codes writes over anything.

    Not `copy.deepcopy`, which the tensors of quanto refuse.
    """
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    return other


def passed(model: Any, cache: Any, ids: list[list[int]]) -> bytes:
    with torch.no_grad():
        logits = model(torch.tensor(ids), past_key_values=cache, use_cache=True).logits
    return raw(logits)[2]


def through_a_file(snapshot: Snapshot) -> Snapshot:
    return kvsnap.loads(kvsnap.dumps(snapshot))


def restored(engine: TransformersEngine, name: str, dtype: str = "float32") -> TransformersEngine:
    other = make(name, dtype)
    assert kvsnap.restore(through_a_file(engine.capture()), other).exact
    return other


# -- B20 -----------------------------------------------------------------------------------------------------------


def _one_more(cache: Any, model: Any) -> Any:
    return passed(model, cache, [[7]])


def _five_more(cache: Any, model: Any) -> Any:
    return [passed(model, cache, [[token]]) for token in (7, 8, 9, 10, 11)]


def _many_at_once(cache: Any, model: Any) -> Any:
    return passed(model, cache, [[7, 8, 9, 10, 11, 12]]), passed(model, cache, [[1]])


def _reordered(cache: Any, model: Any) -> Any:
    cache.reorder_cache(torch.tensor([0]))
    return passed(model, cache, [[7]])


def _widened(cache: Any, model: Any) -> Any:
    cache.reorder_cache(torch.tensor([0, 0, 0]))
    return passed(model, cache, [[7], [8], [9]])


def _repeated(cache: Any, model: Any) -> Any:
    cache.batch_repeat_interleave(2)
    return passed(model, cache, [[7], [8]])


def _selected(cache: Any, model: Any) -> Any:
    cache.batch_select_indices(torch.tensor([0]))
    return passed(model, cache, [[7]])


def _cropped(cache: Any, model: Any) -> Any:
    cache.crop(-1)
    return passed(model, cache, [[7]])


def _forked(cache: Any, model: Any) -> Any:
    children = [copy.deepcopy(cache) for _ in range(2)]
    first = [passed(model, child, [[7 + place]]) for place, child in enumerate(children)]
    return first, [content(child) for child in children], passed(model, cache, [[9]])


def _emptied(cache: Any, model: Any) -> Any:
    cache.reset()
    return passed(model, cache, [[7, 8, 9]])


CHANGES: list[Callable[[Any, Any], Any]] = [
    _one_more, _five_more, _many_at_once, _reordered, _widened, _repeated, _selected, _cropped, _forked, _emptied,
]  # fmt: skip


def outcome(change: Callable[[Any, Any], Any], cache: Any, model: Any) -> Any:
    """What a change gives and leaves behind, or the error that the class itself raises."""
    try:
        given = change(cache, model)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        given = type(error), str(error)
    return given, content(cache)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name", OPTIONS)
def test_b20_what_was_restored_does_what_the_live_object_does(name: str, n: int) -> None:
    engine = grown(name, n)
    other = restored(engine, name)
    assert content(other.cache) == content(engine.cache)
    assert bits(other.capture()) == bits(engine.capture())
    for change in CHANGES:
        live, ours = twin(engine.cache), twin(other.cache)
        assert outcome(change, ours, other.model) == outcome(change, live, engine.model), change.__name__
    assert content(other.cache) == content(engine.cache)


@pytest.mark.parametrize("name", ["hqq 4 bits", "quanto 4 bits"])
def test_b20_the_comparison_would_see_one_code(name: str) -> None:
    engine = grown(name, 9)
    other = restored(engine, name)
    cache = other.cache
    held = cache.layers[1]._quantized_keys
    stored = held[0] if isinstance(held, tuple) else held._data._data
    stored[0, 0] ^= 1
    assert content(cache) != content(engine.cache)
    assert outcome(_one_more, cache, engine.model)[0] != outcome(_one_more, engine.cache, engine.model)[0]


@pytest.mark.parametrize("name", OPTIONS)
def test_b20_the_options_of_a_caller_serve_two_models_and_stay_as_they_are(name: str) -> None:
    make(name)
    options = dict(OPTIONS[name])
    models = [tiny_llama(3), tiny_llama(3, num_hidden_layers=5)]
    engines = [TransformersEngine(model, cache="quantised", cache_options=options) for model in models]
    for engine, count in zip(engines, (3, 5), strict=True):
        engine.prefill(PROMPT)
        assert engine.capture().num_layers == count
    assert options == OPTIONS[name]
    # Nor does a later change of the caller's reach an engine that is there.
    options.clear()
    engines[0].reset()
    engines[0].prefill(PROMPT)


# -- B21 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [6, 10, 72])
@pytest.mark.parametrize("name", ["fp8", "hqq 4 bits", "quanto 4 bits"])
def test_b21_only_real_columns_are_stored(name: str, width: int) -> None:
    def engine() -> TransformersEngine:
        return make(name, head_dim=width, num_key_value_heads=4)

    one = engine()
    # hqq packs halves of the groups together, so it needs an even number of them; four rows are, for every width.
    one.prefill(PROMPT[:4])
    one.prefill(PROMPT[4:6])
    snapshot = through_a_file(one.capture())
    assert (snapshot.head_dim, snapshot.num_heads, snapshot.seq_len) == (width, 4, 6)
    layer = snapshot.layers[0]
    n_codes = 6 if name == "fp8" else 4
    for tensor in layer.tensors:
        if tensor.role == "residual":
            assert tensor.shape == (4, 6 - n_codes, width)
        if tensor.role == "code":
            assert tensor.nbytes * (1 if name == "fp8" else 2) == 4 * n_codes * width
    two = engine()
    two.install(snapshot)
    assert content(two.cache) == content(one.cache)
    # Some numbers of rows hqq cannot pack, and says so to both of them.
    assert outcome(_many_at_once, twin(two.cache), two.model) == outcome(_many_at_once, twin(one.cache), one.model)
    assert outcome(_one_more, two.cache, two.model) == outcome(_one_more, one.cache, one.model)


def test_b21_groups_that_the_library_cannot_do_are_its_own_error_and_change_nothing() -> None:
    engine = make("hqq 4 bits", head_dim=6)
    with pytest.raises(AssertionError, match="group_size should be divisble"):
        engine.prefill(PROMPT[:3])  # 2 heads of 6 for 3 tokens are 36 values
    assert engine.n_rows == 0
    engine.prefill(PROMPT[:4])
    assert engine.capture().n_rows == 4


def test_b21_codes_that_hqq_itself_loses_are_refused() -> None:
    engine = make("hqq 1 bit")
    options = {**OPTIONS["hqq 1 bit"], "axis_value": 1}
    engine = TransformersEngine(engine.model, cache="quantised", cache_options=options)
    with pytest.raises(UnsupportedError, match="in another shape than is known here"):
        engine.prefill(PROMPT[:3])  # 12 groups, of which it packs 8
    assert engine.n_rows == 0
    engine.prefill(PROMPT[:4])


# -- going on in a new process -------------------------------------------------------------------------------------

AFTER = 8
CASES = [(name, dtype, n) for name in OPTIONS for dtype in DTYPES for n in (3, 6, 7, 9)]


def case_name(case: tuple[str, str, int]) -> str:
    return "-".join(map(str, case)).replace(" ", "_")


def go_on(engine: TransformersEngine) -> dict[str, Any]:
    ids, logits, before = [], [], engine.forwards
    for _ in range(AFTER):
        engine.settle()
        kept = engine._live.lines[0].logits
        assert kept is not None
        logits.append(kept.view(np.uint8))
        ids.append(engine.step().id)
    return {"ids": np.array(ids), "logits": np.stack(logits), "forwards": np.array(engine.forwards - before)}


def available(name: str) -> bool:
    try:
        make(name)
    except pytest.skip.Exception:
        return False
    return True


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    directory, expected = tmp_path_factory.mktemp("quantised"), {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for case in CASES:
        if available(case[0]):
            engine = grown(case[0], case[2], case[1])
            kvsnap.save(engine.capture(), directory / f"{case_name(case)}.kvsnap")
            expected[case_name(case)] = go_on(engine)
    torch.set_num_threads(threads)
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, __file__, str(directory)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    with np.load(directory / "found.npz") as found:
        return {
            case: (run, {part: found[f"{case}.{part}"] for part in run}) for case, run in expected.items()
        }  # fmt: skip


def resume_all(directory: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for case in CASES:
        path = directory / f"{case_name(case)}.kvsnap"
        if path.exists():
            engine = make(case[0], case[1])
            assert kvsnap.restore(kvsnap.load(path), engine).exact
            found |= {f"{case_name(case)}.{part}": value for part, value in go_on(engine).items()}
    np.savez(directory / "found.npz", **found)


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_a_new_process_goes_on_bit_for_bit(resumed: dict[str, Any], case: tuple[str, str, int]) -> None:
    if case_name(case) not in resumed:
        pytest.skip(f"{case[0]}: not available here")
    expected, found = resumed[case_name(case)]
    assert found["ids"].tolist() == expected["ids"].tolist()
    assert np.array_equal(found["logits"], expected["logits"])
    assert found["forwards"] == expected["forwards"] == AFTER - 1
    assert len(set(expected["ids"].tolist())) > 1


# -- what must be noticed ------------------------------------------------------------------------------------------


def changed(snapshot: Snapshot, role: str, change: Callable[[Any], Any], place: int = 0) -> Snapshot:
    """The snapshot with one tensor of its second layer changed: of the keys, or of the values with `place` 1."""
    layer, seen, tensors = snapshot.layers[1], -1, []
    for t in layer.tensors:
        seen += t.role == role
        here = t.role == role and seen == place
        tensors.append(Tensor(t.spec, change(np.array(t.array)), start=t.start) if here else t)
    layers = list(snapshot.layers)
    layers[1] = replace(layer, tensors=tuple(tensors))
    return replace(snapshot, layers=tuple(layers))


def one_code(values: Any) -> Any:
    # The last byte of the first code: with 3 bits the first one holds padding.
    values.reshape(-1).view(np.uint8)[values.itemsize - 1] ^= 1
    return values


def one_scale(values: Any) -> Any:
    values.reshape(-1)[0] *= 2
    return values


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(("role", "change"), [("code", one_code), ("scale", one_scale), ("zero", one_scale)])
@pytest.mark.parametrize("name", OPTIONS)
def test_one_code_or_scale_that_is_wrong_does_not_pass_as_exact(
    name: str, role: str, change: Callable[[Any], Any], place: int
) -> None:
    if name == "fp8" and role == "zero":
        pytest.skip("fp8 has no zero")
    engine = grown(name, 6)
    snapshot = engine.capture()
    wrong = changed(snapshot, role, change, place)
    assert bits(wrong) != bits(snapshot)
    other, control = make(name), make(name)
    other.install(wrong)
    control.install(snapshot)
    found, same, expected = (_one_more(e.cache, e.model) for e in (other, control, engine))
    assert found != expected
    assert same == expected


@pytest.mark.parametrize("name", GROUPED)
def test_missing_residual_rows_and_wrong_counts_are_refused(name: str) -> None:
    snapshot, other = grown(name, 6).capture(), make(name)
    cases = [
        (changed(snapshot, "residual", lambda v: v[:, :0]), "k_code for 6 rows|code for 6 rows"),
        (changed(snapshot, "residual", lambda v: v[:, :0], 1), "code for 6 rows"),
        (changed(snapshot, "scale", lambda v: v[:1] if v.shape[0] > 1 else v[:, :1]), "scale for"),
        (
            replace(
                snapshot, n_rows=7, tokens=(*snapshot.tokens, 1), runs=(), token_offset=7,
                positions=(replace(snapshot.positions[0], count=7),),
            ),
            "code for",
        ),
    ]  # fmt: skip
    for wrong, message in cases:
        with pytest.raises(CompatibilityError, match=message) as raised:
            other.install(wrong)
        assert raised.value.expected != raised.value.found
        assert other.n_rows == 0
    other.install(snapshot)


def test_a_live_layer_that_counts_wrongly_is_refused() -> None:
    for name in ("fp8", "hqq 4 bits"):
        engine = grown(name, 6)
        for layer in engine._live.cache.layers:
            layer.cumulative_length += 1
        engine._live = replace(engine._live, marks=tuple(7 for _ in engine._live.marks))  # as if it had noticed nothing
        with pytest.raises(UnsupportedError, match="does not hold as many rows as it counts"):
            engine.capture()


def other_settings() -> list[tuple[str, dict[str, Any]]]:
    base = OPTIONS["hqq 4 bits"]
    return [
        ("bits", {**base, "nbits": 8}),
        ("axis", {**base, "axis_value": 0}),
        ("group", {**base, "q_group_size": 16}),
        ("residual", {**base, "residual_length": 5}),
        ("quanto", OPTIONS["quanto 4 bits"]),
        ("fp8", OPTIONS["fp8"]),
    ]


@pytest.mark.parametrize(("what", "options"), other_settings(), ids=[what for what, _ in other_settings()])
def test_another_quantisation_is_refused_with_both(what: str, options: dict[str, Any]) -> None:
    snapshot = grown("hqq 4 bits", 6).capture()
    try:
        other = TransformersEngine(tiny_llama(3), cache="quantised", cache_options=options)
    except (ExtraMissingError, UnsupportedError) as error:
        pytest.skip(str(error))
    with pytest.raises(CompatibilityError, match="quantised otherwise") as raised:
        other.install(snapshot)
    assert raised.value.found == snapshot.layers[0].quantisation
    assert raised.value.expected == other._model.geometry[0].quantisation
    # Told by name before a tensor is looked at; to accept it does not make codes fit.
    with pytest.raises(CompatibilityError, match=r"cache_quantisation\."):
        kvsnap.restore(snapshot, other)
    with pytest.raises(CompatibilityError, match="quantised otherwise"):
        kvsnap.restore(snapshot, other, accept=("cache_quantisation",))
    assert other.n_rows == 0
    with pytest.raises(UnsupportedError, match="quantised otherwise"):
        other.adopt(grown("hqq 4 bits", 6).cache, PROMPT[:6])


@pytest.mark.parametrize("name", OPTIONS)
def test_plain_rows_and_codes_do_not_pass_for_each_other(name: str) -> None:
    coded, plain = grown(name, 6), TransformersEngine(tiny_llama(3))
    plain.prefill(PROMPT[:6])
    with pytest.raises(CompatibilityError, match="quantised otherwise") as raised:
        TransformersEngine(tiny_llama(3)).install(coded.capture())
    assert raised.value.expected == "none"
    with pytest.raises(CompatibilityError, match="quantised otherwise") as raised:
        make(name).install(plain.capture())
    assert raised.value.found == "none"
    with pytest.raises(UnsupportedError, match="not supported by this engine"):
        TransformersEngine(tiny_llama(3)).adopt(coded.cache, PROMPT[:6])
    # Codes made of float32 rows mean nothing among bfloat16 rows, and are never converted.
    with pytest.raises(CompatibilityError, match="dtype differs"):
        make(name, "bfloat16").install(coded.capture(), cast=True)


# -- the live engine -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("n", [5, 6])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_failed_pass_leaves_the_layers_as_they_were(name: str, n: int, error: type[BaseException]) -> None:
    engine, control = grown(name, n), grown(name, n)
    assert engine.step() == control.step()  # one id waits to be evaluated: with it, six rows grow to new codes

    def fail(*_: Any) -> None:
        raise error("on purpose")

    layers = next(p for p in engine.model.modules() if type(p).__name__ == "ModuleList" and len(p) == 3)
    for change in (engine.step, lambda: engine.prefill([1, 2, 3])):
        hook = layers[2].register_forward_hook(fail)  # the cache of every layer is changed by then
        with pytest.raises(error, match="on purpose"):
            change()
        hook.remove()
        assert content(engine.cache) == content(control.cache)
    assert ids_of(engine, 6) == ids_of(control, 6)


def test_a_first_pass_that_fails_leaves_nothing() -> None:
    engine, control = make("hqq 4 bits"), make("hqq 4 bits")
    hook = engine.model.lm_head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.prefill(PROMPT)
    hook.remove()
    assert engine.n_rows == 0
    engine.prefill(PROMPT)
    control.prefill(PROMPT)
    assert content(engine.cache) == content(control.cache)


@pytest.mark.parametrize("name", OPTIONS)
def test_one_checkpoint_gives_five_equal_runs_and_stays_as_it_is(name: str) -> None:
    engine = grown(name, 6)
    snapshot = engine.capture()
    before = bits(snapshot)
    expected = ids_of(engine, 7)
    others = [make(name) for _ in range(2)]
    for one in (engine, *others, engine, *others):
        one.install(snapshot)
        assert ids_of(one, 7) == expected
    assert bits(snapshot) == before


@pytest.mark.parametrize("name", OPTIONS)
def test_a_cache_that_was_changed_outside_is_noticed(name: str) -> None:
    engine = grown(name, 6)
    passed(engine.model, engine.cache, [[1]])
    with pytest.raises(InputError, match="changed outside the engine"):
        engine.step()


@pytest.mark.parametrize("name", OPTIONS)
def test_what_generate_made_is_taken_over(name: str) -> None:
    engine = make(name)
    config = dict(OPTIONS[name])
    made = engine.model.generate(
        torch.tensor([PROMPT[:6]]), max_new_tokens=5, do_sample=False, return_dict_in_generate=True,
        cache_implementation="quantized", cache_config=config,
    )  # fmt: skip
    engine.adopt(made.past_key_values, made.sequences)
    assert (engine.n_rows, engine.n_pending) == (10, 1)
    other = restored(engine, name)
    assert ids_of(other, 6) == ids_of(engine, 6)
    assert content(other.cache) == content(engine.cache)


@pytest.mark.parametrize("name", [*GROUPED, "fp8"])
def test_no_row_is_given_up_where_rows_are_codes(name: str) -> None:
    # Codes are made of many rows together: without logits there is no way to evaluate the last one again.
    engine, control = grown(name, 5), grown(name, 5)
    before, logits = content(engine.cache), torch.tensor(engine._live.lines[0].logits)
    engine.adopt(engine.cache, PROMPT[:5])
    assert (engine.n_rows, engine.n_pending) == (5, 0)
    with pytest.raises(UnsupportedError, match="the last row cannot be evaluated again"):
        engine.step()
    assert content(engine.cache) == before
    engine.prefill(PROMPT[5:7])
    control.prefill(PROMPT[5:7])
    assert ids_of(engine, 6) == ids_of(control, 6)
    assert content(engine.cache) == content(control.cache)

    engine, control = grown(name, 5), grown(name, 5)
    engine.adopt(engine.cache, PROMPT[:5], logits=logits)
    assert ids_of(engine, 6) == ids_of(control, 6)


@pytest.mark.parametrize("name", GROUPED)
def test_a_batch_that_was_quantised_together_is_refused(name: str) -> None:
    engine = make(name)
    cache = engine._model.fresh_cache()
    passed(engine.model, cache, [PROMPT[:6], PROMPT[1:7]])
    with pytest.raises(UnsupportedError, match="2 sequences of a batch together"):
        engine.adopt(cache, [PROMPT[:6], PROMPT[1:7]], attention_mask=np.ones((2, 6), dtype=np.int64))
    # One sequence with padding before it.
    cache = engine._model.fresh_cache()
    with torch.no_grad():
        mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
        engine.model(torch.tensor([[0, 0, *PROMPT[:4]]]), attention_mask=mask, past_key_values=cache)
        engine.model(torch.tensor([[7]]), attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1, 1]]), past_key_values=cache)
    with pytest.raises(UnsupportedError, match="has padding in it"):
        engine.adopt(cache, [[0, 0, *PROMPT[:4], 7, 8]], attention_mask=mask)


def test_rows_of_a_padded_batch_of_fp8_codes_are_told_apart() -> None:
    engine = make("fp8")
    given, mask = [[0, 0, *PROMPT[:4]], PROMPT[:6]], [[0, 0, 1, 1, 1, 1], [1] * 6]
    cache = engine._model.fresh_cache()
    with torch.no_grad():
        places = torch.tensor([[0, 0, 0, 1, 2, 3], list(range(6))])
        engine.model(
            torch.tensor(given), attention_mask=torch.tensor(mask), position_ids=places, past_key_values=cache
        )  # fmt: skip
    engine.adopt(cache, [[*row, 7] for row in given], attention_mask=mask)
    held = cache.layers[0]._quantized_keys[0].view(torch.uint8).numpy()
    for row, first in ((0, 2), (1, 0)):
        snapshot = engine.capture(row=row)
        stored = next(t for t in snapshot.layers[0].tensors if t.name.endswith("k_code")).array.view(np.uint8)
        assert np.array_equal(stored, held[row, :, first:])
        other = make("fp8")
        other.install(through_a_file(snapshot))
        assert (other.n_rows, other.n_pending) == (6 - first, 1)
        other.step()


def test_codes_that_wait_to_be_reordered_are_refused() -> None:
    engine = grown("hqq 4 bits", 6)
    if not hasattr(engine.cache.layers[0], "_pending_beam_idx"):
        pytest.skip(f"transformers {transformers.__version__} reorders the residual rows only")
    before = bits(engine.capture())
    engine.cache.reorder_cache(torch.tensor([0]))  # the same order
    assert bits(engine.capture()) == before
    engine.cache.reorder_cache(torch.tensor([0, 0]))
    with pytest.raises(UnsupportedError, match="_pending_beam_idx"):
        engine.capture()


def test_what_a_library_says_beyond_what_is_known_is_refused() -> None:
    engine = grown("hqq 4 bits", 6)
    meta = engine.cache.layers[1]._quantized_values[1]
    for name, value in (("quant_scale", True), ("view_as_float", True), ("axis", 0), ("nbits", 8)):
        kept = meta.get(name)
        meta[name] = value
        with pytest.raises(UnsupportedError, match="is not known here"):
            engine.capture()
        if kept is None:
            del meta[name]
        else:
            meta[name] = kept
    engine.capture()


@pytest.mark.parametrize("dtype", [*DTYPES, "float16"])
@pytest.mark.parametrize("n", [3, 6, 9])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_head_is_what_the_layer_itself_computes(name: str, n: int, dtype: str) -> None:
    engine = grown(name, n, dtype)
    snapshot = through_a_file(engine.capture())
    for index, layer in enumerate(engine.cache.layers):
        for place in range(2):
            keys = layer._dequantize((layer._quantized_keys, layer._quantized_values)[place])
            kept = (layer.keys, layer.values)[place]
            full = torch.cat([keys, kept], dim=-2) if kept.ndim == 4 else keys
            for head in range(2):
                found = snapshot.head(index, head)
                assert found is not None
                assert np.array_equal((found.k, found.v)[place], full[0, head].float().numpy())
                assert found.positions.tolist() == list(range(n))
    assert snapshot.head(0, 2) is None


def test_options_and_models_that_do_not_fit_are_refused_by_name() -> None:
    model = tiny_llama(3)
    with pytest.raises(InputError, match="needs its backend"):
        TransformersEngine(model, cache="quantised")
    with pytest.raises(InputError, match="no such option"):
        TransformersEngine(model, cache="quantised", cache_options={"backend": "hqq", "bits": 4})
    for backend in ("hqq", "fp8"):
        try:
            TransformersEngine(model, cache="quantised", cache_options={"backend": backend})
        except (ExtraMissingError, UnsupportedError):
            continue
        wrong = {"backend": backend, "nbits": 5}
        with pytest.raises(InputError, match="transformers refuses these options"):
            TransformersEngine(model, cache="quantised", cache_options=wrong)
    for family, changes in (("mistral", {"sliding_window": 8}), ("gemma2", {"sliding_window": 8})):
        windows = tiny_model(family, 3, attention="eager", **changes)
        with pytest.raises(UnsupportedError, match="layers that a quantised cache is not made for"):
            TransformersEngine(windows, cache="quantised", cache_options=OPTIONS["hqq 4 bits"])


# -- sessions ------------------------------------------------------------------------------------------------------


def turns(name: str, path: Path) -> tuple[TransformersEngine, list[Any], list[tuple[str, ...]]]:
    """A session of turns of 3, 2, 2 and 1 rows; what the cache held after each, and what each append said."""
    engine, held, said = make(name), [], []
    with kvsnap.Session.open(path) as session:
        for first, last in ((0, 3), (3, 5), (5, 7), (7, 8)):
            for token in [PROMPT[:3]] if not first else [[t] for t in PROMPT[first:last]]:
                engine.prefill(token)
            said.append(session.append(engine.capture(start=session.n_rows)).requantised)
            held.append((content(engine.cache), ids_of_a_copy(engine, name)))
    return engine, held, said


def ids_of_a_copy(engine: TransformersEngine, name: str) -> list[int]:
    other = make(name)
    other.install(engine.capture())
    return ids_of(other, 5)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_turn_of_a_session_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    _, held, _ = turns(name, tmp_path / "a.kvsnap")
    ends = (3, 5, 7, 8)
    with kvsnap.Session.open(tmp_path / "a.kvsnap") as session:
        commits = [turn.commit for turn in session.history if turn.operation == "append"]
        for number, end, (expected, ids) in reversed(list(zip(commits, ends, held, strict=True))):
            if end < 8:
                session.truncate(end)
            forked = tmp_path / f"{end}.kvsnap"
            session.fork(forked, commit=number)
            for loaded in (session.load(), kvsnap.load(forked)):
                other = make(name)
                assert kvsnap.restore(loaded, other).exact
                assert content(other.cache) == expected
                assert ids_of(other, 5) == ids
        session.rewind(commits[-1])
        other = make(name)
        other.install(session.load())
        assert content(other.cache) == held[-1][0]
        assert (session.reach(6).n_tokens, session.reach(6).above) == (5, 7)
        with pytest.raises(UnsupportedError, match="the nearest reachable length is 5, and above it 7"):
            session.truncate(6)
    with kvsnap.Session.open(tmp_path / "a.kvsnap") as session:
        session.compact()
        assert session.load().n_rows == 8
    assert kvsnap.verify(tmp_path / "a.kvsnap").ok


@pytest.mark.parametrize("name", OPTIONS)
def test_codes_that_were_made_anew_are_told(name: str, tmp_path: Path) -> None:
    engine, held, said = turns(name, tmp_path / "a.kvsnap")
    snapshot = engine.capture()
    every = tuple(t.name for t in snapshot.tensors() if t.role == "code")
    for before, after, told in zip([None, *held], held, said, strict=False):
        if name == "fp8":
            assert told == ()  # codes are only added
            continue
        # What the live objects say, for each layer, of keys and of values.
        remade = before is not None and [c[1:] for c in before[0]] != [c[1:] for c in after[0]]
        assert told == (every if remade else ())
    assert any(said) == (name != "fp8")
    assert said[:2] == [(), ()]


def test_a_turn_that_is_quantised_otherwise_is_refused(tmp_path: Path) -> None:
    turns("hqq 4 bits", tmp_path / "a.kvsnap")
    other = TransformersEngine(
        tiny_llama(3), cache="quantised", cache_options={**OPTIONS["hqq 4 bits"], "residual_length": 64}
    )
    other.prefill(PROMPT[:9])
    with kvsnap.Session.open(tmp_path / "a.kvsnap") as session:
        with pytest.raises(CompatibilityError, match=r"cache_quantisation\.residual") as raised:
            session.append(other.capture())
        assert "64" in str(raised.value)
        nameless = replace(other.capture(), identity=kvsnap.Snapshot().identity)
        with pytest.raises(CompatibilityError, match="quantised otherwise") as raised:
            session.append(nameless)
        assert '"residual":4' in str(raised.value.expected)
        assert '"residual":64' in str(raised.value.found)
        assert session.n_rows == 8


def test_the_file_says_how_its_codes_are_to_be_read(tmp_path: Path) -> None:
    engine = grown("hqq 3 bits", 6)
    kvsnap.save(engine.capture(), tmp_path / "a.kvsnap")
    layout = SpecReader((tmp_path / "a.kvsnap").read_bytes()).content()["layout"]
    layer = layout["layers"][1]
    assert layer["quantisation"] == (
        '{"axis_key":0,"axis_value":0,"bits":3,"group":8,"kind":"hqq","residual":4}'
    )  # fmt: skip
    tensors = {t["id"]: t for t in layout["tensors"]}
    found = [tuple(tensors[number][member] for member in ("name", "role", "dtype")) for number in layer["tensors"]]
    assert found == [
        (f"layers.1.{which}_{role}", role, "int32" if role == "code" else "float32")
        for role in ("residual", "code", "scale", "zero")
        for which in "kv"
    ]
    assert all(tensors[number]["growth"] == "replaced" for number in layer["tensors"])


def test_nothing_is_computed_from_codes_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = grown("hqq 4 bits", 6)
    other = make("hqq 4 bits")

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("codes are stored, not what they stand for")

    for layers in (engine.cache.layers, other.cache.layers):
        for layer in layers:
            monkeypatch.setattr(type(layer), "_dequantize", never)
            monkeypatch.setattr(type(layer), "_quantize", never)
    other.install(through_a_file(engine.capture()))
    assert _tf_quantised.rows(other.cache.layers[0]) == 6


if __name__ == "__main__":
    resume_all(Path(sys.argv[1]))


def test_one_snapshot_into_several_rows_where_rows_have_codes_of_their_own() -> None:
    engine = grown("fp8", 9)
    engine.step()
    snapshot = engine.capture()
    expected = ids_of(engine, 6)
    engine.install(snapshot, rows=3)
    assert engine.rows == 3
    for row in range(3):
        assert bits(engine.capture(row=row)) == bits(snapshot)
    # A pass of the user's own over all three, then one of them alone.
    ids = torch.tensor([snapshot.tokens] * 3)
    out = engine.model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=engine.cache, do_sample=False, max_new_tokens=4,
        return_dict_in_generate=True, pad_token_id=0,
    )  # fmt: skip
    assert out.sequences[:, ids.shape[1] :].tolist() == [expected[:4]] * 3
    engine.adopt(engine.cache, out.sequences, attention_mask=torch.ones_like(ids))
    one = engine.capture(row=1)
    engine.install(one)
    assert ids_of(engine, 2) == expected[4:]


@pytest.mark.parametrize("name", GROUPED)
def test_one_snapshot_into_several_rows_is_refused_where_codes_are_made_together(name: str) -> None:
    engine = grown(name, 9)
    snapshot, before = engine.capture(), content(engine.cache)
    with pytest.raises(UnsupportedError, match="quantises the rows of a batch together"):
        engine.install(snapshot, rows=3)
    assert (content(engine.cache), engine.rows) == (before, 1)

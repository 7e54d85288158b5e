"""Every family of models: what a new process resumes is the run that was never interrupted, or it is refused by name.

The models are tiny and random (`family_models`); what is compared is every id and every bit of every row of logits.
`docs/families.md` is made of what is found here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from inspect import signature
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import cache_utils  # noqa: E402 - after the extras are known to be there

import family_table  # noqa: E402
from family_models import FAMILIES, WINDOW, attentions, known  # noqa: E402
from family_runs import (  # noqa: E402
    AFTER,
    LATER_RUNS,
    Case,
    Course,
    Point,
    Result,
    begun_engine,
    cases_of,
    fault_in,
    go_on,
    points_of,
    run_all,
    start,
)  # fmt: skip
from kvsnap.engines.transformers import TransformersEngine  # noqa: E402
from kvsnap.errors import KvsnapError, UnsupportedError  # noqa: E402
from kvsnap.layout import Snapshot, Tensor  # noqa: E402
from tiny_models import tiny_llama  # noqa: E402

# The first test of a dtype makes the results of all families, which takes minutes on a busy machine.
pytestmark = [pytest.mark.engine, pytest.mark.newest, pytest.mark.timeout(1800), pytest.mark.usefixtures("one_thread")]

DTYPES = ("float32", "bfloat16")
REFUSED = {
    "rwkv": "rwkv",
    "recurrent_gemma": "recurrent_gemma",
}
"""The families that no release is supported for, and a word of the reason given."""

OLD = tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 13)
"""Releases before keep the states of some families in caches of their own; the table tells which, and why."""
INEXACT = {("ctrl", "bfloat16"): "weights differ: transformer.pos_encoding"}
"""What cannot be resumed exactly, and a word of what is said. CTRL casts a table of its own in its first pass."""


def given() -> list[Any]:
    """Parameters: the families, those that the installed release does not have marked to be skipped."""
    reason = f"transformers {transformers.__version__} does not have it"
    return [
        pytest.param(name, marks=pytest.mark.skipif(not known(family), reason=reason))
        for name, family in FAMILIES.items()
    ]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[Case, Result]]:
    """Return the results of every case of a dtype; the first call makes them."""
    made: dict[str, dict[Case, Result]] = {}

    def of(dtype: str) -> dict[Case, Result]:
        if dtype not in made:
            made[dtype] = run_all(cases_of(FAMILIES, dtype), tmp_path_factory.mktemp(dtype))
        return made[dtype]

    return of


# -- a new process ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", given())
def test_a_new_process_goes_on_as_if_never_interrupted(
    results: Callable[[str], dict[Case, Result]], family: str, dtype: str
) -> None:
    for attention in attentions(family):
        case = Case(family, attention, dtype)
        result = results(dtype)[case]
        if family in REFUSED:
            assert REFUSED[family] in result.refused
        elif result.refused and OLD:
            pass  # the table has the reason, which is compared below
        else:
            assert not result.refused
            fault = fault_in(case, result)
            assert INEXACT[family, dtype] in fault if (family, dtype) in INEXACT else not fault


def test_a_run_that_is_not_exact_is_found_out() -> None:
    case = Case("llama", attentions("llama")[0], "float32")
    engine = begun_engine(case)
    names = (*points_of(case), *LATER_RUNS)
    start(engine, Point(9, 3))
    good = go_on(engine)

    def fault(whole: Course, found: Course) -> str:
        stored = [name for name in names if name in ("one row", "40 settled", "a turn later")]
        pairs = {
            name: (whole, found._replace(passes=found.passes[1:]) if name in stored else found) for name in names
        }  # fmt: skip
        return fault_in(case, Result("", "", pairs, (), ()))

    assert fault(good, good) == ""
    assert "went on as" in fault(good, good._replace(ids=[*good.ids[:-1], good.ids[-1] ^ 1]))
    for place in range(AFTER):
        other = good.logits.copy()
        other[place, 37] ^= 1
        assert f"from token {place} on" in fault(good, good._replace(logits=other))
    assert "passes" in fault(good, good._replace(passes=[9, *good.passes[1:]]))
    assert "passes" in fault(good, good._replace(passes=[*good.passes, 1]))
    same = good._replace(ids=[good.ids[0]] * AFTER)
    assert "hardly vary" in fault(same, same)
    assert "expected runs" in fault_in(case, Result("", "", {}, (), ()))


def with_states() -> list[Any]:
    """Parameters: the families with states beside rows or instead of them.

    Without bamba, which evaluates a prompt in pieces otherwise than whole, and both otherwise than token by token.
    """
    names = {
        "qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear", "mamba", "mamba2", "falcon_h1", "jamba",
        "granitemoehybrid", "lfm2", "nemotron_h", "lfm2_moe", "zamba", "zamba2", "qwen3_5_moe", "falcon_mamba",
    }  # fmt: skip
    return [p for p in given() if p.values[0] in names]


@pytest.mark.parametrize("family", with_states())
def test_ids_evaluated_behind_a_state_are_evaluated_behind_it(family: str) -> None:
    """Some models start from nothing in a pass of several ids, whatever their cache holds."""
    case = Case(family, attentions(family)[0], "float32")
    try:
        engine = begun_engine(case)
        start(engine, Point(20, 0))
    except UnsupportedError as error:
        pytest.skip(str(error))
    whole = engine.capture().logits
    found = {}
    for first in (8, 3):
        engine.reset()
        start(engine, Point(first, 0))
        start(engine, Point(20 - first, 0), first)
        found[first] = engine.capture().logits
    engine.reset()
    start(engine, Point(12, 0), 8)
    alone = engine.capture().logits
    assert whole is not None
    assert alone is not None
    for logits in found.values():
        assert logits is not None
        # Some families evaluate a prompt and a token by different rules: so far they may differ, and no further.
        off = np.abs(logits.array - whole.array).max()
        assert off < 0.2 * np.abs(alone.array - whole.array).max()


# -- negative controls: each of these must be noticed by the comparison above ---------------------------------------


def with_tensor(snapshot: Snapshot, name: str, change: Callable[[Tensor], Tensor]) -> Snapshot:
    layers = [
        replace(layer, tensors=tuple(change(t) if t.name == name else t for t in layer.tensors))
        for layer in snapshot.layers
    ]
    return replace(snapshot, layers=tuple(layers))


def row_zeroed(tensor: Tensor, row: int) -> Tensor:
    array = np.array(tensor.array)
    array[(slice(None),) * tensor.spec.row_axis + (row,)] = 0
    return Tensor(tensor.spec, array, start=tensor.start)


def all_zeroed(tensor: Tensor) -> Tensor:
    return Tensor(tensor.spec, np.zeros_like(tensor.array), start=tensor.start)


def rows_shifted(tensor: Tensor) -> Tensor:
    array = np.ascontiguousarray(np.roll(tensor.array, 1, axis=tensor.spec.row_axis))
    return Tensor(tensor.spec, array, start=tensor.start)


def start_off(tensor: Tensor, by: int) -> Tensor:
    return Tensor(tensor.spec, np.array(tensor.array), start=tensor.start + by)


def damages_of(tensor: Tensor) -> dict[str, list[Callable[[Tensor], Tensor]]]:
    """Return what can be wrong with a tensor: for each, ways to do it, of which one at least has to be noticed.

    A row need not matter: one that an index never picks, one that chunked attention has done with, one whose weight is
    rounded to nothing.
    """
    if not tensor.spec.grows:
        return {"zeroed": [all_zeroed]}
    count = tensor.n_rows
    rows = range(count - 1, -1, -1)
    damages = {
        "a row zeroed": [lambda t, row=row: row_zeroed(t, row) for row in rows],
        "rows shifted": [rows_shifted],
    }
    if tensor.role == "compressed":
        del damages["rows shifted"]  # key and value in one, rotated already: their order does not matter
    if tensor.spec.growth == "window":
        damages["first row off by one"] = [lambda t: start_off(t, 1)]
        damages["first row off by minus one"] = [lambda t: start_off(t, -1)]
    return damages


def goes_on_the_same(engine: TransformersEngine, snapshot: Snapshot, expected: Course) -> bool:
    """Tell whether a run goes on from a snapshot as expected; a refusal is a difference."""
    try:
        engine.install(snapshot)
        return np.array_equal(go_on(engine, len(expected.ids)).logits, expected.logits)
    except (KvsnapError, AssertionError):  # refused, or no numbers any more
        return False


UNREAD = {("deepseek_v4", "v")}
"""What no pass reads: values that are the keys once more. (And the name of what was encoded, of encoder-decoders.)"""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", given())
def test_a_wrong_value_does_not_pass_as_exact(family: str, dtype: str) -> None:
    if family in REFUSED:
        pytest.skip("refused")
    engine = begun_engine(Case(family, attentions(family)[0], dtype))
    start(engine, Point(40, 3))
    snapshot = engine.capture()
    expected = go_on(engine, 6)
    assert goes_on_the_same(engine, snapshot, expected)
    seen = set()
    for layer in snapshot.layers:
        for tensor in layer.tensors:
            if tensor.name.startswith("encoder.") or (family, tensor.role) in UNREAD:
                continue
            kind = (layer.kind, tensor.role, tensor.spec.growth)
            if kind in seen:
                continue
            seen.add(kind)
            for what, ways in damages_of(tensor).items():
                damaged = [with_tensor(snapshot, tensor.name, way) for way in ways]
                assert not all(goes_on_the_same(engine, d, expected) for d in damaged), f"{tensor.name}: {what}"
    assert seen


WINDOWED = ("mistral", "gemma3", "llama4", "gpt_oss")


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("family", [p for p in given() if p.values[0] in WINDOWED])
def test_a_wrong_count_in_a_window_layer_does_not_pass(family: str, by: int) -> None:
    engine = begun_engine(Case(family, attentions(family)[0], "float32"))
    start(engine, Point(40, 3))
    expected = go_on(engine, 6)
    engine.reset()
    start(engine, Point(40, 3))
    layer = next(layer for layer in engine.cache.layers if hasattr(layer, "cumulative_length"))
    layer.cumulative_length += by
    with suppress(KvsnapError):  # refused is as good
        assert not np.array_equal(go_on(engine, 6).logits, expected.logits)


# -- what is not known is refused ------------------------------------------------------------------------------------


class Mine(cache_utils.DynamicLayer):
    """A user's own layer: what it may keep beside keys and values nobody knows."""


class MineInAWindow(cache_utils.DynamicSlidingWindowLayer):
    """The same, of a class that is handled."""


class DynamicLayer(cache_utils.DynamicLayer):
    """Of the name of a class that is handled, and another."""


UNKNOWN = {
    "Mine": Mine,
    "MineInAWindow": lambda: MineInAWindow(sliding_window=WINDOW),
    "DynamicLayer": DynamicLayer,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_layer_class_of_the_users_own_is_refused_by_name(name: str) -> None:
    model = tiny_llama()
    engine = TransformersEngine(model)
    cache, ids = transformers.DynamicCache(config=model.config), torch.arange(6)[None]
    while len(cache.layers) < 2:  # before 5.0 layers come as they are needed
        cache.layers.append(cache_utils.DynamicLayer())
    cache.layers[1] = UNKNOWN[name]()
    keyword = "cache" if "cache" in signature(type(model).forward).parameters else "past_key_values"
    with torch.no_grad():
        model(input_ids=ids, use_cache=True, **{keyword: cache})
    with pytest.raises(UnsupportedError, match=rf"layer 1 .*{name}"):
        engine.adopt(cache, ids)
    assert engine.n_rows == 0
    cache.layers[1] = cache.layers[0]  # the control: without that layer it is taken
    engine.adopt(cache, ids)
    assert engine.n_rows == 5


@pytest.mark.skipif(
    not hasattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING"), reason="this release has no layer types to add to"
)
@pytest.mark.parametrize("name", UNKNOWN)
def test_a_model_with_a_layer_type_of_its_own_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, "of_mine", lambda **_: UNKNOWN[name]())
    model = tiny_llama()
    TransformersEngine(model)
    model.config.layer_types = ["full_attention", "of_mine", "full_attention"]
    with pytest.raises(UnsupportedError, match=rf"layer 1 .*({name}|of_mine)"):
        TransformersEngine(model)


# -- the table -------------------------------------------------------------------------------------------------------


def test_the_table_says_what_was_found(results: Callable[[str], dict[Case, Result]]) -> None:
    table = family_table.read()
    release = transformers.__version__
    if release not in table:
        pytest.skip(f"the table has no transformers {release}: {', '.join(table)}")
    found = family_table.entries({case: result for dtype in DTYPES for case, result in results(dtype).items()})
    for family, entry in found.items():
        assert table[release].get(family) == entry, f"{family}: run scripts/families.py"
    assert set(table[release]) == set(found)


def test_the_document_is_made_of_the_table() -> None:
    assert family_table.DOCUMENT.read_text() == family_table.render(family_table.read()), "run scripts/families.py"

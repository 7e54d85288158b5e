"""Failures that people met elsewhere where a cache met another model; each test is named after its case.

A cache of other weights, another adapter or another rotation fits in shape and answers wrongly, and so do the rows of a
window in another order. Each test saves to a file, restores from it, and has a control: without the check the answer
would be another one.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvsnap  # noqa: E402 - after the extras are known to be there
from kvsnap.engines._tf_identity import cache_quantisation_of  # noqa: E402
from kvsnap.engines.models import load_model  # noqa: E402
from kvsnap.engines.transformers import TransformersEngine  # noqa: E402
from kvsnap.errors import CompatibilityError, KvsnapError, UnsupportedError  # noqa: E402
from kvsnap.identity import Identity  # noqa: E402
from kvsnap.layout import Snapshot, Tensor  # noqa: E402
from tiny_models import PROMPT, ByteTokenizer, save_tiny, tiny_llama, tiny_model  # noqa: E402

pytestmark = pytest.mark.engine


def go_on(engine: Any, count: int = 12) -> list[int]:
    return [engine.step().id for _ in range(count)]


def saved_from(engine: Any, path: Path) -> list[int]:
    """Save what an engine holds after a prompt and 5 tokens; return the 12 that follow."""
    list(kvsnap.generate(engine, PROMPT, max_tokens=5))
    kvsnap.save(kvsnap.capture(engine), path)
    return go_on(engine)


WINDOW = 8
B2_LAYERS = {"window": ["sliding_attention"] * 3, "mixed": ["sliding_attention", "full_attention", "sliding_attention"]}


def windowed(layers: str) -> TransformersEngine:
    kinds = {"layer_types": B2_LAYERS[layers], "sliding_window": WINDOW, "use_sliding_window": True}
    return TransformersEngine(tiny_model("qwen2", 0, max_window_layers=0, **kinds))


def steps(engine: TransformersEngine, count: int) -> list[tuple[int, bytes]]:
    """The ids that follow, each with all bits of the logits behind it."""
    found = []
    for _ in range(count):
        chosen = engine.step().id
        engine.settle()
        logits = engine.capture().logits
        assert logits is not None
        found.append((chosen, logits.array.tobytes()))
    return found


def changed(snapshot: Snapshot, change: Any) -> Snapshot:
    """A snapshot with other rows in its windows."""
    return replace(
        snapshot,
        layers=tuple(
            replace(x, tensors=tuple(change(t) if t.spec.growth == "window" else t for t in x.tensors))
            for x in snapshot.layers
        ),
    )


@pytest.mark.parametrize("length", [5, 8, 9, 20, 40])
@pytest.mark.parametrize("layers", B2_LAYERS)
def test_b02_a_prompt_longer_than_the_window_goes_on_as_it_was(layers: str, length: int, tmp_path: Path) -> None:
    prompt, engine = [(7 * i + 3) % 250 for i in range(length)], windowed(layers)
    engine.prefill(prompt)
    kvsnap.save(kvsnap.capture(engine), tmp_path / "a.kvsnap")
    with kvsnap.Session.open(tmp_path / "s.kvsnap") as session:
        session.append(kvsnap.capture(engine))
    never_saved = windowed(layers)
    never_saved.prefill(prompt)
    expected = steps(never_saved, 16)
    assert len({token for token, _ in expected}) > 4
    snapshot = kvsnap.load(tmp_path / "a.kvsnap")
    held = [(t.start, t.n_rows) for t in snapshot.tensors() if t.spec.growth == "window"]
    assert set(held) == {(max(0, length - WINDOW + 1), min(length, WINDOW - 1))}
    with kvsnap.Session.open(tmp_path / "s.kvsnap") as session:
        sources = [snapshot, session.load()]
    for source in sources:
        again = windowed(layers)
        done = kvsnap.restore(source, again)
        assert (done.exact, done.recomputed) == (True, 0)
        assert steps(again, 16) == expected
        assert again.evaluated == 16
    # Controls: the rows as a ring turned by one would hold them, and one row less than the window needs.
    turned = changed(snapshot, lambda t: Tensor(t.spec, np.roll(t.array, 1, axis=1), start=t.start))
    again.install(turned)
    assert steps(again, 16) != expected
    fewer = changed(snapshot, lambda t: Tensor(t.spec, t.array[:, 1:].copy(), start=t.start + 1))
    with pytest.raises(UnsupportedError, match="rows that the window of 8 needs are missing"):
        again.install(fewer)


def test_b15_weights_that_differ_under_the_same_name_and_path_are_refused_by_the_name_of_the_tensor(
    tmp_path: Path,
) -> None:
    place, file = save_tiny(tmp_path / "model"), tmp_path / "a.kvsnap"

    def opened() -> TransformersEngine:
        loaded = load_model(place)
        return TransformersEngine(loaded.model, loaded.tokenizer)

    expected = saved_from(opened(), file)
    original = shutil.copytree(place, tmp_path / "original")
    changed = load_model(place).model
    with torch.no_grad():
        changed.model.layers[0].self_attn.q_proj.weight[0, 0] += 1e-3
    changed.save_pretrained(place)
    other = opened()
    with pytest.raises(CompatibilityError, match="weights differ: layer 0 q_proj, saved float32") as caught:
        kvsnap.restore(kvsnap.load(file), other)
    report = caught.value.report
    assert report is not None
    assert [f.name for f in report.fields if f.verdict == "differ"] == ["weights: layer 0 q_proj"]
    assert other.tokens == (), "nothing was installed"
    # Control: with the difference taken on the cache is used, and it is not called exact.
    assert not kvsnap.restore(kvsnap.load(file), other, accept=["weights.layer 0 q_proj"]).exact
    shutil.copytree(original, place, dirs_exist_ok=True)
    again = opened()
    assert kvsnap.restore(kvsnap.load(file), again).exact
    assert go_on(again) == expected


def _head(m: Any) -> None:
    m.lm_head.weight = torch.nn.Parameter(m.lm_head.weight + 1e-3)


def _swap(m: Any) -> None:
    a, b = (layer.self_attn.k_proj for layer in m.model.layers[:2])
    a.weight, b.weight = b.weight, a.weight


def _in_place(tensor: Any) -> None:
    tensor.data.view(-1)[5] += 1e-3


B15_CHANGES: dict[str, tuple[Any, list[str]]] = {
    "a bias": (lambda m: _in_place(m.model.layers[1].self_attn.q_proj.bias),
               ["weights: layer 1 self_attn.q_proj.bias"]),
    "a norm": (lambda m: _in_place(m.model.layers[2].input_layernorm.weight), ["weights: layer 2 input_layernorm"]),
    "a buffer": (lambda m: _in_place(m.model.rotary_emb.inv_freq), ["weights: rotary_emb.inv_freq"]),
    "the embedding": (lambda m: _in_place(m.model.embed_tokens.weight), ["weights: embed_tokens"]),
    "a new parameter": (_head, ["weights: lm_head"]),
    "two layers swapped": (_swap, ["weights: layer 0 k_proj", "weights: layer 1 k_proj"]),
    "one bit": (lambda m: m.model.norm.weight.data.view(torch.int32)[3].bitwise_xor_(1), ["weights: norm"]),
    "negative zero": (lambda m: m.model.layers[0].self_attn.q_proj.bias.data.neg_(),
                      ["weights: layer 0 self_attn.q_proj.bias"]),
}  # fmt: skip


@pytest.mark.parametrize("change", [None, *B15_CHANGES])
def test_b15_whatever_is_changed_between_capture_and_restore_is_named(change: str | None, tmp_path: Path) -> None:
    model = tiny_llama(attention_bias=True)
    engine = TransformersEngine(model, ByteTokenizer())
    expected = saved_from(engine, tmp_path / "a.kvsnap")
    snapshot = kvsnap.load(tmp_path / "a.kvsnap")
    if change is None:
        assert kvsnap.restore(snapshot, engine).exact
        assert go_on(engine) == expected
        return
    apply, names = B15_CHANGES[change]
    apply(model)
    with pytest.raises(CompatibilityError, match="weights differ: ") as caught:
        kvsnap.restore(snapshot, engine)
    assert [f.name for f in caught.value.report.refusals] == names  # type: ignore[union-attr]


def test_b15_one_weight_tied_to_another_or_of_another_dtype(tmp_path: Path) -> None:
    model = tiny_llama(tie_word_embeddings=True)
    saved_from(TransformersEngine(model, ByteTokenizer()), tmp_path / "a.kvsnap")
    snapshot = kvsnap.load(tmp_path / "a.kvsnap")
    assert kvsnap.restore(snapshot, TransformersEngine(model, ByteTokenizer())).exact
    untied = tiny_llama(tie_word_embeddings=True)
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach().clone() + 1e-3)
    with pytest.raises(CompatibilityError, match=r"weights differ: lm_head, saved absent, found float32"):
        kvsnap.restore(snapshot, TransformersEngine(untied, ByteTokenizer()))
    mixed = tiny_llama(tie_word_embeddings=True)
    mixed.model.norm.to(torch.float64)
    with pytest.raises(CompatibilityError, match=r"weights differ: norm, saved float32\[64\] .* found float64\[64\]"):
        kvsnap.restore(snapshot, TransformersEngine(mixed, ByteTokenizer()))


class _Quantised:
    """A layer that keeps int8 codes of rows rotated by a matrix drawn from a seed, set up as the library's own are."""

    def __init__(self, seed: int, bits: int = 4, group: int = 8, residual: int = 4) -> None:
        self.nbits, self.q_group_size, self.residual_length = bits, group, residual
        self.axis_key = self.axis_value = 0
        self.seed = seed
        self.rotation = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)))[0]
        self.keys = self.values = torch.empty(0)
        self._quantized_keys: Any = None

    def _quantize(self, rows: Any) -> Any:
        return torch.round((rows @ self.rotation) * 16).to(torch.int8)

    def _dequantize(self, codes: Any) -> Any:
        return (codes / 16) @ self.rotation.T


class _Engine(TransformersEngine):
    """An engine whose cache is set up with a rotation."""

    layer: Any = None

    def identity(self, progress: Any = None) -> Identity:
        return replace(super().identity(progress), cache_quantisation=cache_quantisation_of([self.layer] * 3))


def test_b17_a_cache_of_another_rotation_is_refused_by_name(tmp_path: Path) -> None:
    def engine(layer: Any) -> _Engine:
        made = _Engine(tiny_llama(), ByteTokenizer())
        made.layer = layer
        return made

    expected = saved_from(engine(_Quantised(1)), tmp_path / "a.kvsnap")
    snapshot = kvsnap.load(tmp_path / "a.kvsnap")
    again = engine(_Quantised(1))
    assert kvsnap.restore(snapshot, again).exact
    assert go_on(again) == expected
    with pytest.raises(CompatibilityError, match=r"cache_quantisation\.rotation differ") as caught:
        kvsnap.restore(snapshot, engine(_Quantised(2)))
    assert "cache_quantisation.seed differ: saved 1, found 2" in str(caught.value)
    for layer, name in (
        (_Quantised(1, bits=2), "cache_quantisation.bits"),
        (_Quantised(1, group=16), "cache_quantisation.group"),
        (_Quantised(1, residual=8), "cache_quantisation.residual"),
        (object(), "cache_quantisation"),
    ):
        report = kvsnap.check(snapshot, engine(layer))
        assert [f.name for f in report.refusals] == [name]
        assert kvsnap.check(snapshot, engine(layer), accept=[name]).ok
    # Control: the codes of one rotation read with another are other rows, of the same shape and dtype.
    rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    codes = _Quantised(1)._quantize(rows)
    assert float((_Quantised(1)._dequantize(codes) - rows).abs().max()) < 0.2
    assert float((_Quantised(2)._dequantize(codes) - rows).abs().max()) > 1


def test_b17_a_live_quantised_cache_that_is_rotated_is_refused_by_one_that_is_not(tmp_path: Path) -> None:
    options: dict[str, Any] = {"cache": "quantised", "cache_options": {"backend": "fp8"}}
    try:
        engine, plain = (TransformersEngine(tiny_llama(), ByteTokenizer(), **options) for _ in range(2))
    except KvsnapError as error:
        pytest.skip(str(error))
    expected = saved_from(engine, tmp_path / "a.kvsnap")
    assert kvsnap.restore(kvsnap.load(tmp_path / "a.kvsnap"), plain).exact, "the control"
    assert go_on(plain) == expected
    for layer in engine.cache.layers:
        layer.rotation = torch.eye(16)
    kvsnap.save(kvsnap.capture(engine), tmp_path / "b.kvsnap")
    with pytest.raises(CompatibilityError, match=r"cache_quantisation\.rotation differ: saved \S+ found absent"):
        kvsnap.restore(kvsnap.load(tmp_path / "b.kvsnap"), plain)


def test_b17_what_the_layers_of_a_real_quantised_cache_say() -> None:
    cache_utils = pytest.importorskip("transformers.cache_utils")
    base = getattr(cache_utils, "QuantizedLayer", None)
    if base is None:
        pytest.skip("this transformers has no quantised layers")

    class Plain(base):  # type: ignore[misc]
        def _quantize(self, tensor: Any, axis: int) -> Any:
            return tensor

        def _dequantize(self, q_tensor: Any) -> Any:
            return q_tensor

    layers = [Plain(nbits=4, q_group_size=8, residual_length=4) for _ in range(2)]
    text = cache_quantisation_of(layers)
    assert text == '{"axis_key":0,"axis_value":0,"bits":4,"group":8,"kind":"Plain","residual":4}'
    for length in (1, 2, 6):  # what a layer holds is not how it is set up
        layers[0].update(torch.zeros(1, 2, length, 8), torch.zeros(1, 2, length, 8))
        assert cache_quantisation_of(layers) == text
    assert cache_quantisation_of(transformers.DynamicCache().layers) == "none"
    mixed = cache_quantisation_of([layers[0], Plain(nbits=2, q_group_size=8, residual_length=4)])
    assert '"layers"' in mixed


def test_b18_another_adapter_none_another_scale_or_its_file_rewritten_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    place = save_tiny(tmp_path / "model")

    def written(name: str, seed: int) -> Path:
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
        model = peft.get_peft_model(tiny_llama(), config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight, value in model.named_parameters():
                if "lora_" in weight:
                    value.copy_(torch.randn(value.shape, generator=generator) * 0.2)
        model.save_pretrained(tmp_path / name)
        return tmp_path / name

    def opened(adapter: Path | None) -> TransformersEngine:
        loaded = load_model(place, adapter=adapter)
        return TransformersEngine(loaded.model, loaded.tokenizer)

    a, b = written("a", 1), written("b", 2)
    expected = saved_from(opened(a), tmp_path / "a.kvsnap")
    snapshot = kvsnap.load(tmp_path / "a.kvsnap")
    unchanged = opened(a)
    assert kvsnap.restore(snapshot, unchanged).exact
    assert go_on(unchanged) == expected
    half = opened(a)
    for part in half.model.modules():
        if hasattr(part, "set_scale"):
            part.set_scale("default", 0.5)
    cases = [
        (opened(b), r"adapters differ: saved default \w+ x2, found default \w+ x2"),
        (opened(None), r"adapters differ: saved default \w+ x2, found none"),
        (half, r"adapters differ: saved default (\w+) x2, found default \1 x1"),
    ]
    shutil.copytree(b, a, dirs_exist_ok=True)  # the file is another one, at the same path
    cases.append((opened(a), r"adapters differ: saved default \w+ x2, found default \w+ x2"))
    for engine, words in cases:
        with pytest.raises(CompatibilityError, match=words):
            kvsnap.restore(snapshot, engine)
        # Control: taken on, the same cache goes on otherwise.
        assert not kvsnap.restore(snapshot, engine, accept=["adapters"]).exact
        assert go_on(engine) != expected

"""What a model computes with beside plain parameters: tensor classes, packed weights, attributes. Seen, or refused."""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvsnap  # noqa: E402 - after the extras are known to be there
from kvsnap.engines.transformers import TransformersEngine  # noqa: E402
from kvsnap.errors import CompatibilityError, UnsupportedError  # noqa: E402
from kvsnap.identity import Identity, compare  # noqa: E402
from tiny_models import ByteTokenizer, save_tiny, tiny_llama, tiny_qwen3  # noqa: E402

pytestmark = pytest.mark.engine


def identity(model: Any) -> Identity:
    return TransformersEngine(model).identity()


def differing(saved: Identity, found: Identity) -> list[str]:
    return [f.name for f in compare(saved, found).fields if f.verdict == "differ"]


# -- tensor classes ----------------------------------------------------------------------------------------------------


class Codes(torch.Tensor):  # type: ignore[misc]
    """A matrix kept as int8 codes with a scale for each row, as libraries that quantise on load make them."""

    @staticmethod
    def __new__(cls, codes: Any, scale: Any, group: int) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: Any, scale: Any, group: int) -> None:
        self.codes, self.scale, self.group = codes, scale, group

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["codes", "scale"], {"group": self.group, "dtype": torch.int8, "device": self.codes.device}

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].group)
        plain = [a.codes.float() * a.scale if isinstance(a, cls) else a for a in args]
        return func(*plain, **(kwargs or {}))


def quantised(group: int = 8) -> Any:
    model = tiny_llama()
    layer = model.model.layers[1].self_attn.q_proj
    scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
    codes = torch.round(layer.weight.detach() / scale).to(torch.int8)
    layer.weight = torch.nn.Parameter(Codes(codes, scale, group), requires_grad=False)
    return model


def test_a_tensor_class_is_taken_apart() -> None:
    saved = identity(quantised())
    assert saved == identity(quantised())
    assert saved.quantisation == '{"kinds":["Codes"]}'
    assert differing(saved, identity(tiny_llama())) == ["quantisation", "weights: layer 1 q_proj"]
    weight = next(w for w in saved.weights if w.name == "model.layers.1.self_attn.q_proj.weight")
    assert (weight.dtype, weight.shape) == ("float32", (64, 64))
    changes: list[Callable[[Any], None]] = [
        lambda w: w.codes.view(-1)[5].add_(1),
        lambda w: w.scale[3].add_(1e-6),
        lambda w: setattr(w, "group", 16),
    ]
    for change in changes:
        model = quantised()
        change(model.model.layers[1].self_attn.q_proj.weight)
        assert differing(saved, identity(model)) == ["weights: layer 1 q_proj"]


def test_settings_of_a_tensor_class_that_cannot_be_read_are_refused() -> None:
    class Opaque:
        __slots__ = ()

    model = quantised()
    model.model.layers[1].self_attn.q_proj.weight.group = Opaque()
    with pytest.raises(
        UnsupportedError, match=r"layers\.1\.self_attn\.q_proj\.weight has settings of the class Opaque"
    ):
        identity(model)


@pytest.mark.parametrize("kind", ["sparse", "mkldnn", "quantised by torch"])
def test_weights_whose_bytes_cannot_be_read_are_refused_by_name(kind: str) -> None:
    model = tiny_llama()
    weight = model.model.layers[0].mlp.up_proj.weight.detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = {
            "sparse": weight.to_sparse,
            "mkldnn": weight.to_mkldnn,
            "quantised by torch": lambda: torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8),
        }[kind]()
        del model.model.layers[0].mlp.up_proj.weight
        model.model.layers[0].mlp.up_proj.register_buffer("weight", made)
        with pytest.raises(UnsupportedError, match=r"weight model\.layers\.0\.mlp\.up_proj\.weight is a Tensor.*bytes"):
            identity(model)


class Int8Params(torch.nn.Parameter):  # type: ignore[misc]
    """Named as the class of bitsandbytes, which moves its scales elsewhere in the first pass."""


def test_weights_that_are_laid_out_anew_by_the_first_pass_are_refused_by_name() -> None:
    model = tiny_llama()
    model.model.norm.weight = Int8Params(model.model.norm.weight.detach(), requires_grad=False)
    with pytest.raises(UnsupportedError, match=r"model\.norm\.weight is of bitsandbytes"):
        identity(model)


class Scaled(torch.nn.Parameter):  # type: ignore[misc]
    """A parameter with its scales in an attribute."""


def test_what_a_parameter_carries_as_attributes_counts() -> None:
    def made(scale: float, bits: int) -> Any:
        model = tiny_llama()
        weight = Scaled(model.model.norm.weight.detach(), requires_grad=False)
        weight.state = SimpleNamespace(absmax=torch.full((4,), scale), bits=bits, name="nf4")
        model.model.norm.weight = weight
        return identity(model)

    assert made(1.0, 4) == made(1.0, 4)
    assert differing(made(1.0, 4), made(1.5, 4)) == ["weights: norm"]
    assert differing(made(1.0, 4), made(1.0, 8)) == ["weights: norm"]


# -- what is neither parameter nor buffer ------------------------------------------------------------------------------


def attach(name: str, value: Any) -> Any:
    model = tiny_llama()
    setattr(model.model.layers[1].mlp, name, value)
    return model


class Scale:
    def __init__(self, scale: Any) -> None:
        self.scale = scale

    def __call__(self, x: Any) -> Any:
        return x * self.scale


def scaling(scale: Any) -> Callable[[Any], Any]:
    return lambda x: x * scale


HELD: dict[str, Callable[[float], Any]] = {
    "a tensor": lambda x: torch.full((2,), x),
    "in a list": lambda x: [torch.zeros(2), torch.full((2,), x)],
    "in a table": lambda x: {"scale": torch.full((2,), x), "group": 8},
    "beside it in a table": lambda x: {"scale": torch.zeros(2), "group": x},
    "in an object": lambda x: SimpleNamespace(inner=SimpleNamespace(scale=torch.full((2,), x))),
    "far down in lists": lambda x: [[[[[[[torch.full((2,), x)]]]]]]],
    "in a queue": lambda x: deque([torch.full((2,), x)]),
    "in what can be called": lambda x: Scale(torch.full((2,), x)),
    "in a method": lambda x: Scale(torch.full((2,), x)).__call__,
    "in a partial call": lambda x: functools.partial(torch.mul, torch.full((2,), x)),
    "in a function": lambda x: scaling(torch.full((2,), x)),
    "an array": lambda x: np.full((2,), x),
    "in an array of objects": lambda x: np.array([None, torch.full((2,), x)], dtype=object),
    "in modules in a list": lambda x: [torch.nn.Linear(1, 1), _filled(x)],
}


def _filled(x: float) -> Any:
    layer = torch.nn.Linear(2, 2)
    with torch.no_grad():
        for value in layer.parameters():
            value.fill_(x)
    return layer


@pytest.mark.parametrize("kind", HELD)
def test_tensors_kept_as_attributes_count(kind: str) -> None:
    torch.manual_seed(0)
    saved = identity(attach("own", HELD[kind](1.0)))
    torch.manual_seed(0)
    assert identity(attach("own", HELD[kind](1.0))) == saved
    torch.manual_seed(0)
    names = differing(saved, identity(attach("own", HELD[kind](2.0))))
    assert names
    assert all(n.startswith("weights: layer 1 ") and "own" in n for n in names)


@pytest.mark.parametrize("kind", ["in a set", "without end"])
def test_tensors_that_cannot_be_told_apart_by_a_name_are_refused(kind: str) -> None:
    held: Any = torch.zeros(2)
    if kind == "in a set":
        held = {held}
    for _ in range(100 if kind == "without end" else 0):
        held = [held]
    with pytest.raises(UnsupportedError, match=r"layers\.1\.mlp\.own.* (in no order|deeper than anybody looks)"):
        identity(attach("own", held))


@pytest.mark.parametrize("what", ["a weight", "a layer", "a buffer"])
def test_what_shares_a_weight_with_which_counts(what: str) -> None:
    """The same numbers under the same first names, and another model."""

    def made(source: int) -> Any:
        model = tiny_llama(num_hidden_layers=3)
        layers = model.model.layers
        if what == "a weight":
            layers[2].mlp.up_proj.weight = layers[source].mlp.up_proj.weight
        elif what == "a layer":
            layers[2].mlp = layers[source].mlp
        else:
            for i in range(2):
                layers[i].mlp.register_buffer("own", torch.full((2,), float(i)))
            layers[2].mlp.register_buffer("own", layers[source].mlp.own)
        return model

    names = differing(identity(made(0)), identity(made(1)))
    assert names
    assert all(n.startswith("weights: layer 2 ") for n in names)
    assert identity(made(0)) == identity(made(0))


def test_a_head_that_shares_the_embedding_goes_without_a_name() -> None:
    names = [w.name for w in identity(tiny_qwen3()).weights]
    assert "lm_head.weight" not in names
    model = tiny_qwen3()
    model.model.layers[0].mlp.embedding = model.model.embed_tokens.weight
    assert "model.layers.0.mlp.embedding" in [w.name for w in identity(model).weights]


def test_an_attribute_that_is_a_parameter_elsewhere_is_listed_once() -> None:
    model = tiny_llama()
    model.model.layers[1].mlp.kept = [model.model.norm.weight, model.model.norm]
    assert identity(model) == identity(tiny_llama())


def test_packed_weights_are_refused_by_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = torch.ao.quantization.quantize_dynamic(tiny_llama(), {torch.nn.Linear}, dtype=torch.qint8)
        except (RuntimeError, AttributeError, NotImplementedError):
            pytest.skip("this torch quantises nothing dynamically")
    hidden = [n for n, _ in model.named_parameters() if n.endswith("proj.weight")]
    assert not hidden, "the control: parameters and buffers do not tell of the matrices"
    with pytest.raises(UnsupportedError, match=r"layers\.0\.self_attn\.q_proj.* packed weights"):
        identity(model)


def test_parts_compiled_to_torchscript_are_refused_by_name() -> None:
    model = tiny_llama()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.model.layers[0].mlp.act_fn = torch.jit.script(torch.nn.ReLU())
    with pytest.raises(UnsupportedError, match=r"module model\.layers\.0\.mlp\.act_fn is compiled to TorchScript"):
        identity(model)


def test_parametrised_weights_count_by_what_they_are_made_of() -> None:
    class Twice(torch.nn.Module):  # type: ignore[misc]
        def forward(self, weight: Any) -> Any:
            return weight * 2

    model = tiny_llama()
    torch.nn.utils.parametrize.register_parametrization(model.model.layers[0].self_attn.q_proj, "weight", Twice())
    saved = identity(model)
    assert "weights: layer 0 q_proj" in differing(identity(tiny_llama()), saved)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.parametrizations.weight.original[0, 0] += 1e-3
    assert differing(saved, identity(model)) == ["weights: layer 0 q_proj.parametrizations.weight.original"]


# -- models that a library quantised on load ---------------------------------------------------------------------------


def _torchao(group: int) -> Any:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    granularity = pytest.importorskip("torchao.quantization.granularity")
    config = quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=granularity.PerGroup(group))
    return transformers.TorchAoConfig(config)


def _quanto(bits: int) -> Any:
    pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    return transformers.QuantoConfig(weights=f"int{bits}")


LIBRARIES: dict[str, tuple[Callable[[int], Any], int, int, str]] = {
    "torchao, groups": (_torchao, 32, 64, "group_size"),
    "quanto, bits": (_quanto, 8, 4, "quantisation.weights"),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_model_quantised_on_load_is_identified_as_loaded(library: str, tmp_path: Path) -> None:
    make, one, other, word = LIBRARIES[library]
    make(one)
    place = save_tiny(tmp_path / "model", hidden_size=128, head_dim=32, dtype="bfloat16")

    def engine(setting: int) -> TransformersEngine:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            place, quantization_config=make(setting), dtype=torch.bfloat16, device_map="cpu"
        )
        return TransformersEngine(model.eval(), ByteTokenizer())

    first = engine(one)
    before = first.identity()
    list(kvsnap.generate(first, "a prompt", max_tokens=4))
    assert differing(before, first.identity()) == [], "a pass leaves the weights as they are"
    kvsnap.save(kvsnap.capture(first), tmp_path / "a.kvsnap")
    expected = [first.step().id for _ in range(8)]
    again = engine(one)
    assert kvsnap.restore(kvsnap.load(tmp_path / "a.kvsnap"), again).exact
    assert [again.step().id for _ in range(8)] == expected
    with pytest.raises(
        CompatibilityError, match=rf"quantisation\.\S*{word.removeprefix('quantisation.')} differ"
    ) as caught:
        kvsnap.restore(kvsnap.load(tmp_path / "a.kvsnap"), engine(other))
    assert any(f.name.startswith("weights: layer 0") for f in caught.value.report.refusals)  # type: ignore[union-attr]

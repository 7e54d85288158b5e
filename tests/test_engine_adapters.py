"""Adapters that PEFT put into a model: what differs is refused, what is equal accepted, other kinds named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="PEFT is not installed")

import kvsnap  # noqa: E402 - after the extras are known to be there
from kvsnap.engines._tf_adapters import Adapters  # noqa: E402
from kvsnap.engines._tf_identity import _digests  # noqa: E402
from kvsnap.engines._tf_weights import named_tensors  # noqa: E402
from kvsnap.engines.transformers import TransformersEngine  # noqa: E402
from kvsnap.errors import CompatibilityError, ConflictError, UnsupportedError  # noqa: E402
from kvsnap.identity import Identity, compare  # noqa: E402
from tiny_models import ByteTokenizer, tiny_llama, tiny_qwen3  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.newest]

ROOT = Path(__file__).resolve().parent.parent


def lora(**changes: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **changes})


KINDS: dict[str, Callable[[], Any]] = {
    "lora": lora,
    "rslora": lambda: lora(use_rslora=True),
    "dora": lambda: lora(use_dora=True),
    "lora on embeddings": lambda: lora(target_modules=["embed_tokens", "q_proj"]),
    "lora on parameters": lambda: lora(target_modules=[], target_parameters=["mlp.up_proj.weight"]),
    "lora with bias": lambda: lora(lora_bias=True, target_modules=["gate_proj"]),
    "modules_to_save": lambda: lora(modules_to_save=["lm_head"]),
    "trained tokens beside lora": lambda: lora(trainable_token_indices=[3, 5]),
    "trained tokens": lambda: peft.TrainableTokensConfig(token_indices=[3, 5], target_modules=["embed_tokens"]),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=["q_proj"]),
    "lokr": lambda: peft.LoKrConfig(r=4, target_modules=["q_proj"]),
    "norms": lambda: peft.LNTuningConfig(target_modules=["norm", "input_layernorm"]),
}
_OWN = ("lora_", "ia3_l", "hada_", "lokr_", "modules_to_save", "trainable_tokens_delta", "ln_tuning_layers")


def draw(model: Any, seed: int, name: str = "default") -> Any:
    """Fill an adapter with random numbers (fresh ones change nothing: their second matrix is zero)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight, value in model.named_parameters():
            if any(own in weight for own in _OWN) and name in weight.split("."):
                value.copy_(torch.randn(value.shape, generator=generator) * 0.2)
    return model.eval()


def adapted(config: Any = None, seed: int = 1, **names: Any) -> Any:
    return draw(
        peft.get_peft_model(tiny_llama(), config or lora(), **names), seed, names.get("adapter_name", "default")
    )


def identity(model: Any) -> Identity:
    return TransformersEngine(model).identity()


def differing(saved: Identity, found: Identity) -> list[str]:
    return [f.name for f in compare(saved, found).fields if f.verdict == "differ"]


def first_logits(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.arange(3, 20)[None]).logits


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_digested_apart_from_the_weights(kind: str) -> None:
    plain, model = identity(tiny_llama()), adapted(KINDS[kind]())
    saved = identity(model)
    assert saved.adapters is not None
    assert len(saved.adapters) == 1
    assert not torch.equal(first_logits(model), first_logits(tiny_llama())), "the control: the adapter does something"
    assert differing(plain, saved) == ["adapters"]
    assert differing(saved, identity(adapted(KINDS[kind]()))) == [], "the same adapter again"
    assert differing(saved, identity(adapted(KINDS[kind](), seed=2))) == ["adapters"]
    with model.disable_adapter():
        assert identity(model) == plain, "wrapped and disabled is the model itself, under its own names"
    assert identity(model) == saved


@pytest.mark.parametrize("kind", KINDS)
def test_each_tensor_of_an_adapter_counts(kind: str) -> None:
    model = adapted(KINDS[kind]())
    saved = identity(model)
    for name, value in model.named_parameters():
        if "default" not in name.split("."):
            continue
        with torch.no_grad():
            value.view(-1)[0] += 1e-3
        assert differing(saved, identity(model)) == ["adapters"], name
        with torch.no_grad():
            value.view(-1)[0] -= 1e-3


def test_settings_that_leave_no_trace_in_tensors_count() -> None:
    # The same bytes, applied to other rows of the embedding.
    def tokens(indices: list[int]) -> Any:
        config = peft.TrainableTokensConfig(token_indices=indices, target_modules=["embed_tokens"])
        model = tiny_llama()
        with torch.no_grad():  # otherwise the rows that were there before, which are kept, would tell
            model.model.embed_tokens.weight[6] = model.model.embed_tokens.weight[5]
        return identity(draw(peft.get_peft_model(model, config), 1))

    assert differing(tokens([3, 5]), tokens([3, 6])) == ["adapters"]
    model = adapted(lora(modules_to_save=["norm"]))
    saved = identity(model)
    # The scale of one layer exchanged with that of another: the set of scales stays what it was.
    layers = model.base_model.model.model.layers
    layers[0].self_attn.q_proj.scaling["default"] = 1.0
    one = identity(model)
    layers[0].self_attn.q_proj.scaling["default"], layers[1].self_attn.q_proj.scaling["default"] = 2.0, 1.0
    other = identity(model)
    assert saved.adapters and one.adapters and other.adapters  # noqa: PT018 - what follows reads them
    assert one.adapters[0].scale == other.adapters[0].scale == "1,2"
    assert differing(one, other) == ["adapters"]


SCALES: dict[str, Callable[[Any], None]] = {
    "set_scale": lambda m: [p.set_scale("default", 0.5) for p in m.modules() if hasattr(p, "set_scale")],
    "scale_layer": lambda m: [p.scale_layer(0.5) for p in m.modules() if hasattr(p, "scale_layer")],
    "by hand, hardly": lambda m: m.base_model.model.model.layers[0].self_attn.q_proj.scaling.update(default=2.0000001),
}  # type: ignore[dict-item]


@pytest.mark.parametrize("how", SCALES)
def test_a_scale_that_is_changed_live_counts(how: str) -> None:
    model = adapted()
    engine = TransformersEngine(model)
    saved = engine.identity()
    SCALES[how](model)
    assert differing(saved, engine.identity()) == ["adapters"]
    found = engine.identity().adapters
    assert found is not None
    assert found[0].digest == saved.adapters[0].digest or "," in found[0].scale  # type: ignore[index]


def two(first: str, second: str, seeds: dict[str, int], active: list[str]) -> Any:
    model = adapted(lora(), seeds[first], adapter_name=first)
    model.add_adapter(second, lora(target_modules=["q_proj", "o_proj"]))
    draw(model, seeds[second], second)
    model.base_model.set_adapter(active)
    return model.eval()


def test_two_adapters_at_once_and_their_order() -> None:
    seeds = {"a": 1, "b": 2}
    both, turned = two("a", "b", seeds, ["a", "b"]), two("a", "b", seeds, ["b", "a"])
    saved = identity(both)
    assert [a.name for a in saved.adapters or ()] == ["a", "b"]
    assert differing(saved, identity(two("a", "b", seeds, ["a", "b"]))) == []
    # Sums of floats depend on their order, so the other order is another adapter set.
    assert [a.name for a in identity(turned).adapters or ()] == ["b", "a"]
    assert differing(saved, identity(turned)) == ["adapters"]
    assert not torch.equal(first_logits(both), first_logits(turned))
    assert differing(saved, identity(two("a", "b", seeds, ["a"]))) == ["adapters"]
    # The order in one layer only.
    both.base_model.model.model.layers[2].self_attn.q_proj._active_adapter = ["b", "a"]
    assert [a.name for a in identity(both).adapters or ()] == ["a", "b"]
    assert differing(saved, identity(both)) == ["adapters"]


def test_one_that_is_loaded_and_idle_does_not_count() -> None:
    alone = adapted(lora(), 1, adapter_name="a")
    with_idle = two("a", "b", {"a": 1, "b": 2}, ["a"])
    assert torch.equal(first_logits(alone), first_logits(with_idle))
    assert identity(alone) == identity(with_idle)


def test_the_name_of_an_adapter_decides_nothing_and_is_told() -> None:
    one, other = identity(adapted(adapter_name="mine")), identity(adapted(adapter_name="yours"))
    assert one != other
    report = compare(one, other)
    assert report.ok
    assert report.exact
    assert "mine" in next(f.saved for f in report.fields if f.name == "adapters")


def test_a_merged_adapter_is_refused_by_the_weights_it_changed() -> None:
    plain = identity(tiny_llama())
    model = adapted()
    unmerged = identity(model)
    model.merge_adapter()
    merged = identity(model)
    assert merged.adapters == ()
    names = differing(plain, merged)
    assert names[:2] == ["weights: layer 0 q_proj", "weights: layer 0 v_proj"]
    assert all(n.endswith(("q_proj", "v_proj")) for n in names)
    assert "adapters" in differing(unmerged, merged)
    assert "weights: layer 0 q_proj" in differing(unmerged, merged)
    assert identity(adapted().merge_and_unload()) == merged, "the same numbers, whichever way they were merged"
    model.base_model.disable_adapter_layers()
    with pytest.raises(UnsupportedError, match="merged into its weights and disabled"):
        identity(model)


def test_weights_below_an_adapter_keep_their_names_and_are_looked_at() -> None:
    model = adapted()
    saved = identity(model)
    assert not [w.name for w in saved.weights if "base_layer" in w.name or "lora" in w.name]
    with torch.no_grad():
        model.base_model.model.model.layers[1].self_attn.v_proj.base_layer.weight[0, 0] += 1e-3
    assert differing(saved, identity(model)) == ["weights: layer 1 v_proj"]


def test_tied_weights_keep_their_names() -> None:
    plain = identity(tiny_qwen3())
    for config in (lora(target_modules=["embed_tokens"]), lora(modules_to_save=["lm_head"])):
        model = draw(peft.get_peft_model(tiny_qwen3(), config), 1)
        assert differing(plain, identity(model)) == ["adapters"]
        with model.disable_adapter():
            assert identity(model) == plain


class Gated(torch.nn.Module):  # type: ignore[misc]
    """Two matrices of one shape as parameters of one module, as experts have them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = (torch.nn.Parameter(torch.full((2, 4, 4), x)) for x in (0.5, 0.25))

    def forward(self, x: Any) -> Any:
        return torch.sigmoid(x @ self.gate[0]) * (x @ self.up[1])


def on_parameters(*names: str) -> Any:
    model = torch.nn.Sequential(Gated()).eval()
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=[f"0.{name}" for name in names])
    return draw(peft.get_peft_model(model, config), 1)


def digests(model: Any) -> Any:
    return _digests(dict(named_tensors(model)), Adapters.of(model), 1, None, None)


def test_the_parameter_that_an_adapter_is_for_counts() -> None:
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    up, gate = on_parameters("up"), on_parameters("gate")
    assert not torch.equal(up(x), gate(x)), "the control: the same numbers in another place"
    assert digests(up)[0] == digests(gate)[0]
    assert digests(up)[1] != digests(gate)[1]
    assert digests(up) == digests(on_parameters("up"))
    both = on_parameters("up", "gate")
    before, saved = both(x), digests(both)
    for kind in ("lora_A", "lora_B"):
        one, two = (value for name, value in both.named_parameters() if kind in name)
        one.data, two.data = two.data, one.data
    assert not torch.equal(both(x), before), "the control: two adapters that changed places"
    assert digests(both)[1] != saved[1]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "prompt tuning": (lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "learned rows"),
    "prefix tuning": (lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "learned rows"),
    "vera": (lambda: peft.VeraConfig(r=4, target_modules=["q_proj"]), "kind vera"),
    "oft": (lambda: peft.OFTConfig(r=0, oft_block_size=8, target_modules=["q_proj"]), "kind oft"),
    "alora": (lambda: lora(alora_invocation_tokens=[1, 2]), "variant of LoRA"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_kinds_are_refused_by_name(kind: str) -> None:
    build, words = REFUSED[kind]
    try:
        config = build()
    except TypeError:
        pytest.skip(f"this PEFT has no {kind}")
    with pytest.raises(UnsupportedError, match=words) as caught:
        identity(peft.get_peft_model(tiny_llama(), config).eval())
    assert "'default'" in str(caught.value)


def test_an_adapter_that_transformers_loaded_itself(tmp_path: Path) -> None:
    wrapped = adapted()
    wrapped.save_pretrained(tmp_path)
    model = tiny_llama()
    model.load_adapter(str(tmp_path))
    assert identity(model.eval()) == identity(wrapped)
    for part in model.modules():
        if isinstance(part, peft.tuners.tuners_utils.BaseTunerLayer):
            part.enable_adapters(False)
    assert identity(model) == identity(tiny_llama())


def test_an_adapter_has_one_digest_in_every_process(tmp_path: Path) -> None:
    wrapped = adapted(lora(modules_to_save=["lm_head"], trainable_token_indices=[3, 5]))
    wrapped.save_pretrained(tmp_path)
    code = (
        "import json, sys, peft; from tiny_models import tiny_llama\n"
        "from kvsnap.engines.transformers import TransformersEngine\n"
        "model = peft.PeftModel.from_pretrained(tiny_llama(), sys.argv[1]).eval()\n"
        "print(json.dumps(TransformersEngine(model).identity().to_dict()))"
    )
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Identity.from_dict(json.loads(done.stdout.splitlines()[-1])).adapters == identity(wrapped).adapters


def test_a_restore_with_the_adapter_goes_on_exactly_and_accept_names_it() -> None:
    engine = TransformersEngine(adapted(), ByteTokenizer())
    list(kvsnap.generate(engine, "a prompt", max_tokens=5))
    snapshot = kvsnap.capture(engine)
    expected = [engine.step().id for _ in range(8)]
    again = TransformersEngine(adapted(), ByteTokenizer())
    assert kvsnap.restore(snapshot, again).exact
    assert [again.step().id for _ in range(8)] == expected
    other = TransformersEngine(tiny_llama(), ByteTokenizer())
    with pytest.raises(CompatibilityError, match=r"adapters differ: saved default \w+ x2, found none"):
        kvsnap.restore(snapshot, other)
    back = kvsnap.restore(snapshot, other, accept=["adapters"])
    assert not back.exact
    assert [other.step().id for _ in range(8)] != expected, "the control: the adapter decides the answer"


def _scaled(model: Any, scale: float) -> None:
    for part in model.modules():
        if hasattr(part, "set_scale"):
            part.set_scale("default", scale)


SWITCHES: dict[str, Callable[[Any], Any]] = {
    "another": lambda m: m.set_adapter("other"),
    "two": lambda m: m.base_model.set_adapter(["default", "other"]),
    "none": lambda m: m.base_model.disable_adapter_layers(),
    "another scale": lambda m: _scaled(m, 0.5),
    "merged": lambda m: m.merge_adapter(),
    "a buffer": lambda m: m.get_base_model().model.rotary_emb.inv_freq.mul_(1.01),
}


def two_adapters() -> Any:
    model = adapted()
    model.add_adapter("other", lora())
    return draw(model, 2, "other")


@pytest.mark.parametrize("switch", SWITCHES)
def test_b18_rows_of_one_adapter_are_never_captured_as_those_of_another(switch: str) -> None:
    model = two_adapters()
    engine = TransformersEngine(model, ByteTokenizer())
    list(kvsnap.generate(engine, "a prompt", max_tokens=5))
    kvsnap.capture(engine)
    SWITCHES[switch](model)
    with pytest.raises(ConflictError, match="adapters were switched"):
        kvsnap.capture(engine)
    engine.reset()
    list(kvsnap.generate(engine, "a prompt", max_tokens=5))
    snapshot = kvsnap.capture(engine)
    assert snapshot.identity != identity(two_adapters()), "the control: it is another model"


@pytest.mark.parametrize("change", [lambda e: e.step(), lambda e: e.prefill([1, 2]), lambda e: e.settle()])
def test_b18_rows_made_while_an_adapter_was_off_are_not_captured_when_it_is_on_again(change: Any) -> None:
    model = two_adapters()
    engine = TransformersEngine(model, ByteTokenizer())
    list(kvsnap.generate(engine, "a prompt", max_tokens=5))
    with model.disable_adapter():
        pass
    kvsnap.capture(engine)  # nothing was evaluated meanwhile
    with model.disable_adapter():
        change(engine)
    engine.step()
    with pytest.raises(ConflictError, match="adapters were switched"):
        kvsnap.capture(engine)
    engine.rewind(0)
    engine.prefill([1, 2])
    assert kvsnap.capture(engine).identity == TransformersEngine(model, ByteTokenizer()).identity()

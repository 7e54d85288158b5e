"""What identifies a transformers model, and the text side of its engine: tokenizers, streaming, chat templates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvsnap.engines import _tf_text as text_side  # noqa: E402 - after the extras are known to be there
from kvsnap.engines.transformers import TransformersEngine  # noqa: E402
from kvsnap.errors import InputError, UnsupportedError  # noqa: E402
from kvsnap.identity import Identity, compare  # noqa: E402
from tiny_models import PROMPT, ByteTokenizer, save_tiny, tiny_llama, tiny_qwen3  # noqa: E402

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parent.parent


def differing(saved: Identity, found: Identity) -> list[str]:
    return [f.name for f in compare(saved, found).fields if f.verdict == "differ"]


# -- weights and settings --------------------------------------------------------------------------------------------


def test_every_weight_is_digested_as_loaded() -> None:
    model = tiny_qwen3(dtype="bfloat16")
    identity = TransformersEngine(model).identity()
    names = [w.name for w in identity.weights]
    assert names == sorted(set(names))
    expected = {n for n, _ in model.named_parameters()} | {"model.rotary_emb.inv_freq"}
    assert set(names) == expected
    assert "lm_head.weight" not in names, "tied to the embedding, which is listed"
    weight = model.model.layers[1].self_attn.q_proj.weight
    found = next(w for w in identity.weights if w.name == "model.layers.1.self_attn.q_proj.weight")
    assert (found.dtype, found.shape) == ("bfloat16", tuple(weight.shape))
    assert found.digest == xxhash.xxh3_128_hexdigest(weight.detach().view(torch.int16).numpy().tobytes())
    frequencies = next(w for w in identity.weights if w.name.endswith("inv_freq"))
    assert frequencies.digest == xxhash.xxh3_128_hexdigest(model.model.rotary_emb.inv_freq.numpy().tobytes())


def test_a_weight_that_is_not_contiguous_has_the_digest_of_its_values() -> None:
    a, b = tiny_llama(), tiny_llama()
    weight = b.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.t().contiguous().t()
    assert not weight.is_contiguous()
    assert TransformersEngine(a).identity() == TransformersEngine(b).identity()


def bump(tensor: Any) -> None:
    with torch.no_grad():
        tensor.view(-1)[3] += 1e-3


CHANGES: dict[str, tuple[Callable[[Any], None], list[str]]] = {
    "nothing": (lambda m: None, []),
    "one weight": (lambda m: bump(m.model.layers[0].self_attn.q_proj.weight), ["weights: layer 0 q_proj"]),
    "a norm": (lambda m: bump(m.model.norm.weight), ["weights: norm"]),
    "a buffer": (lambda m: bump(m.model.rotary_emb.inv_freq), ["weights: rotary_emb.inv_freq"]),
    "a setting": (lambda m: setattr(m.config, "rms_norm_eps", 1e-3), ["config.rms_norm_eps"]),
    "noise": (lambda m: setattr(m.config, "eos_token_id", 5), []),
    "the kernel": (lambda m: m.set_attn_implementation("eager"), ["runtime.attention"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_named_and_read_anew_each_time(change: str) -> None:
    apply, expected = CHANGES[change]
    model = tiny_llama()
    engine = TransformersEngine(model)
    before = engine.identity()
    apply(model)
    assert differing(before, engine.identity()) == expected
    assert differing(before, engine.capture().identity) == expected


def test_dtype_rope_and_windows_tell_models_apart() -> None:
    plain = TransformersEngine(tiny_llama()).identity()
    half = TransformersEngine(tiny_llama(dtype="bfloat16")).identity()
    assert "dtype" in differing(plain, half)
    assert half.cache_dtype == "bfloat16"
    assert plain.quantisation == "none"
    assert plain.adapters == ()
    assert plain.engine == "transformers"
    names = dict(plain.config)
    for kept in ("hidden_act", "rms_norm_eps", "num_key_value_heads", "head_dim", "max_position_embeddings"):
        assert kept in names
    assert any("rope_theta" in name for name in names)
    for noise in ("transformers_version", "dtype", "torch_dtype", "use_cache", "eos_token_id", "architectures"):
        assert noise not in names
    runtime = dict(plain.runtime)
    assert json.loads(runtime["transformers"]) == transformers.__version__
    assert json.loads(runtime["attention"]) == "sdpa"
    assert json.loads(runtime["device"]) == "cpu"
    assert json.loads(runtime["threads"]) == torch.get_num_threads()


def test_stretched_frequencies_do_not_change_the_identity() -> None:
    # "dynamic" recomputes its frequencies when the text outgrows the trained length; a fresh model has not done so yet.
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    name = "rope_parameters" if hasattr(tiny_llama().config, "rope_parameters") else "rope_scaling"
    model = tiny_llama(max_position_embeddings=32, **{name: rope})
    engine = TransformersEngine(model)
    before = engine.identity()
    with torch.no_grad():
        model(torch.ones(1, 60, dtype=torch.long))
    assert differing(before, engine.identity()) == []


def test_progress_counts_bytes() -> None:
    seen: list[tuple[int, int]] = []
    identity = TransformersEngine(tiny_llama()).identity(lambda done, total: seen.append((done, total)))
    size = {"float32": 4}
    total = sum(size[w.dtype] * int(np.prod(w.shape)) for w in identity.weights)
    assert seen[-1] == (total, total)
    assert len(seen) == len(identity.weights)


def test_weights_that_are_not_in_memory_are_refused_by_name() -> None:
    model = tiny_llama()
    engine = TransformersEngine(model)
    model.model.norm.to("meta")
    with pytest.raises(UnsupportedError, match=r"model\.norm\.weight is not in memory"):
        engine.identity()


class Lora(torch.nn.Module):  # type: ignore[misc]
    """A linear layer with an adapter, named as PEFT names its parts."""

    def __init__(self, base: Any, scale: float) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = torch.nn.ModuleDict({"mine": torch.nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = torch.nn.ModuleDict({"mine": torch.nn.Linear(2, base.out_features, bias=False)})
        with torch.no_grad():
            self.lora_A["mine"].weight.fill_(0.25)
            self.lora_B["mine"].weight.fill_(0.5)
        self.scaling = {"mine": scale}
        self.active_adapters = ["mine"]
        self.disable_adapters = False

    def forward(self, x: Any) -> Any:
        return self.base_layer(x) + self.scaling["mine"] * self.lora_B["mine"](self.lora_A["mine"](x))


def adapted(scale: float = 2.0) -> Any:
    model = tiny_llama()
    attention = model.model.layers[1].self_attn
    attention.q_proj = Lora(attention.q_proj, scale)
    return model


def test_an_adapter_is_digested_with_its_scale_and_apart_from_the_weights() -> None:
    plain, model = TransformersEngine(tiny_llama()).identity(), adapted()
    engine = TransformersEngine(model)
    identity = engine.identity()
    assert identity.adapters is not None
    assert [(a.name, a.scale) for a in identity.adapters] == [("mine", "2")]
    assert differing(plain, identity) == ["adapters"]
    assert differing(identity, TransformersEngine(adapted(3.0)).identity()) == ["adapters"]
    bump(model.model.layers[1].self_attn.q_proj.lora_B["mine"].weight)
    assert differing(identity, engine.identity()) == ["adapters"]
    model.model.layers[1].self_attn.q_proj.disable_adapters = True
    assert differing(plain, engine.identity()) == []


# -- tokenizers ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def fast(directory: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(directory)


def test_the_tokenizer_has_one_digest_in_every_process(directory: Path) -> None:
    tokenizer = fast(directory)
    engine = TransformersEngine(tiny_llama(), tokenizer)
    before = engine.identity()
    assert len(before.tokenizer) == 32
    code = (
        "import sys; from tiny_models import tiny_llama; from kvsnap.engines.transformers import TransformersEngine\n"
        "from transformers import AutoTokenizer\n"
        "engine = TransformersEngine(tiny_llama(), AutoTokenizer.from_pretrained(sys.argv[1]))\n"
        "print(engine.identity().tokenizer)"
    )
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", code, str(directory)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split()[-1] == before.tokenizer
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.convert_ids_to_tokens(0)
    after_pad = engine.identity().tokenizer
    tokenizer(["a", "abc"], padding=True, truncation=True, max_length=2)
    assert engine.identity().tokenizer == after_pad, "settings of the last call are not the tokenizer"
    tokenizer.add_tokens(["<new>"])
    assert engine.identity().tokenizer != after_pad
    slow = TransformersEngine(tiny_llama(), ByteTokenizer()).identity()
    assert slow.tokenizer
    assert slow.tokenizer == TransformersEngine(tiny_llama(), ByteTokenizer()).identity().tokenizer
    assert differing(before, slow) == ["tokenizer"]


def test_the_chat_template_is_kept_as_advice(directory: Path) -> None:
    tokenizer = fast(directory)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}bot:"
    engine = TransformersEngine(tiny_llama(), tokenizer)
    before = engine.identity()
    ids = engine.render([{"role": "user", "content": "hello"}])
    assert engine.detokenize(ids).endswith("user: hello\nbot:")
    assert all(type(i) is int for i in ids)
    tokenizer.chat_template = "{{ raise_exception('only users may speak') }}"
    with pytest.raises(InputError, match="only users may speak"):
        engine.render([{"role": "user", "content": "hello"}])
    assert differing(before, engine.identity()) == ["chat_template"]
    assert compare(before, engine.identity()).ok
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        engine.render([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize("shape", [lambda ids: ids, lambda ids: [ids], lambda ids: {"input_ids": [ids]}])
def test_every_answer_of_a_chat_template_is_understood(shape: Callable[[list[int]], Any]) -> None:
    class Templated(ByteTokenizer):
        chat_template = "is there"

        def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> Any:
            assert options == {"add_generation_prompt": True, "tokenize": True}
            return shape(list(messages[0]["content"].encode()))

    engine = TransformersEngine(tiny_llama(), Templated())
    assert engine.render([{"role": "user", "content": "abc"}]) == (97, 98, 99)


def test_without_a_tokenizer_ids_are_all_there_is() -> None:
    engine = TransformersEngine(tiny_llama())
    for call in (
        lambda: engine.tokenize("a"),
        lambda: engine.detokenize([1]),
        lambda: engine.render([{"role": "user", "content": "a"}]),
    ):
        with pytest.raises(InputError, match="no tokenizer"):
            call()
    engine.prefill([1, 2, 3])
    assert engine.step().text == ""
    assert engine.capture().text is None
    assert engine.identity().tokenizer == ""


def streamed(tokenizer: Any, prompt: list[int], ids: list[int]) -> list[str]:
    return [text_side.piece(tokenizer, [*prompt, *ids[:i]], ids[i]) for i in range(len(ids))]


def test_a_character_of_several_tokens_comes_with_its_last() -> None:
    ids = list("aé漢🙂z".encode())
    pieces = streamed(ByteTokenizer(), list(PROMPT.encode()), ids)
    assert pieces == ["a", "", "é", "", "", "漢", "", "", "", "🙂", "z"]
    # A byte that begins no character becomes visible with what follows it, and nothing is lost.
    assert "".join(streamed(ByteTokenizer(), [], [97, 0xF0, 98, 99])) == "a\ufffdbc"


def test_pieces_join_to_the_text_of_the_ids_for_real_tokenizers(directory: Path) -> None:
    tokenizer = fast(directory)
    text = "Two words, naïve façade 漢字 🙂\n\n  indented"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(streamed(tokenizer, [], ids)) == text_side.detokenize(tokenizer, ids) == text
    prompt = tokenizer.encode("Before", add_special_tokens=False)
    assert "".join(streamed(tokenizer, prompt, ids)) == text


def test_a_tokenizer_that_strips_a_leading_space_keeps_the_words_apart() -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words = ["<unk>", "</s>", "▁the", "▁cat", "▁sat", "s"]
    rust = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))  # noqa: S106 - a word
    rust.pre_tokenizer, rust.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    rust.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="</s>")  # noqa: S106 - a word
    assert tokenizer.decode([3]) == "cat", "the space in front is stripped when a token stands alone"
    assert streamed(tokenizer, [2], [3, 5, 4]) == [" cat", "s", " sat"]
    assert streamed(tokenizer, [], [2, 3]) == ["the", " cat"]
    assert streamed(tokenizer, [2], [3, 1]) == [" cat", ""], "special tokens have no text"
    assert text_side.detokenize(tokenizer, [2, 3, 1]).endswith("</s>")


def test_offloaded_weights_are_read_where_they_are_kept() -> None:
    accelerate = pytest.importorskip("accelerate")
    plain = TransformersEngine(tiny_llama())
    engine = TransformersEngine(accelerate.cpu_offload(tiny_llama(), execution_device=torch.device("cpu")))
    assert engine.model.model.layers[0].mlp.up_proj.weight.device.type == "meta"
    assert engine.identity() == plain.identity()
    for each in (plain, engine):
        each.prefill([1, 2, 3, 4])
    engine.install(engine.capture())
    assert engine.cache.layers[0].keys.device.type == "cpu"
    assert [engine.step().id for _ in range(6)] == [plain.step().id for _ in range(6)]

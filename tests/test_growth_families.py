"""The growth of every family, told from its configuration alone, against what a model of it really keeps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES  # noqa: E402

import kvsnap  # noqa: E402 - after the extras are known to be there
from compressed_models import MODELS, compressed_model  # noqa: E402
from encdec_models import FAMILIES as WITH_ENCODER  # noqa: E402
from encdec_models import encdec_model, input_of  # noqa: E402
from family_models import FAMILIES, build, known  # noqa: E402
from kvsnap.cli import run  # noqa: E402
from kvsnap.engines._tf_shapes import shapes_of  # noqa: E402
from kvsnap.engines.models import load_model  # noqa: E402
from kvsnap.errors import InputError, UnsupportedError  # noqa: E402
from kvsnap.inspection.growth.configuration import configured  # noqa: E402
from kvsnap.inspection.growth.families import STATES, known_families  # noqa: E402
from kvsnap.inspection.growth.growing import compared  # noqa: E402
from latent_models import FAMILIES as LATENT  # noqa: E402
from latent_models import latent_model  # noqa: E402
from tiny_models import save_tiny  # noqa: E402

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24),
        reason="the rules are those of transformers 5.24",
    ),
]

STOPS = (1, 5, 7, 8, 9, 12, 30)
"""Positions evaluated, with windows and groups of eight: short of a window, at it, beyond, whole groups and none."""
REFUSED = ("recurrent_gemma", "rwkv")
SPEECH = ("whisper", "speech_to_text")


def settings_of(model: Any, *, short: bool = False) -> dict[str, Any]:
    """The configuration as it is written to a file; `short`: without what is as the family has it anyway."""
    return dict(json.loads(model.config.to_json_string(use_diff=short)))


def checks_of(model: Any, engine: Any, dtype: str) -> Iterator[kvsnap.inspection.Checked]:
    """What the configuration says at each stop, compared with the live layers; at the last with a capture too."""
    settings = [settings_of(model, short=short) for short in (False, True)]
    found = [configured(one, dtype, 12) for one in settings]
    for stop in STOPS:
        engine.prefill([3 + i % 200 for i in range(engine.n_rows, stop)])
        held = engine.layout()
        rows = next((t.n_rows for layer in held for t in layer.tensors if t.role == "cross_k"), 12)
        if rows != 12:
            found = [configured(one, dtype, rows) for one in settings]
        for one in found:
            yield compared(f"{stop} rows", one.layers, held, stop)
    snapshot = engine.capture()
    yield compared("capture", found[0].layers, snapshot.layers, stop)
    names = {t.name for t in snapshot.tensors() if t.role == "other"}
    assert sum(layer.nbytes(stop) for layer in found[0].layers) == sum(
        t.nbytes for t in snapshot.tensors() if t.name not in names
    )


def engine_for(model: Any, family: str) -> Any:
    engine = kvsnap.connect(model)
    if getattr(model.config, "is_encoder_decoder", False):
        given = {"input_features": torch.randn(1, 80, 32)} if family == "whisper" else input_of(family)
        engine.encode(**given)
    return engine


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in REFUSED])
def test_a_configuration_tells_what_its_model_keeps(family: str) -> None:
    if not known(FAMILIES[family]):
        pytest.skip("a family of another release")
    model = build(family)
    for check in checks_of(model, engine_for(model, family), "float32"):
        assert check.ok, (check.against, check.faults[:3])
        assert check.off == 0
        assert check.predicted == check.actual


@pytest.mark.parametrize("family", [*STATES, "deepseek_v4", "gemma3", "deepseek_v32"])
def test_in_half_precision_states_keep_their_own_dtype(family: str) -> None:
    name = family.removesuffix("_text")
    if not known(FAMILIES[name]):
        pytest.skip("a family of another release")
    model = build(name, "bfloat16")
    for check in checks_of(model, kvsnap.connect(model), "bfloat16"):
        assert check.ok, (check.against, check.faults[:3])


VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"head_dim": None, "num_key_value_heads": None}),
    ("llama", {"head_dim": 24, "num_key_value_heads": 1}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2, "layer_types": None}),
    ("qwen3_moe", {"use_sliding_window": False, "sliding_window": 6}),
    ("mixtral", {"sliding_window": 6}),
    ("mistral", {"sliding_window": None}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {"multi_query": False}),
    ("gemma2", {"layer_types": None}),
    ("gemma3", {"layer_types": None, "num_hidden_layers": 7}),
    ("gemma4", {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0}),
    ("gemma3n", {"num_kv_shared_layers": 0}),
    ("llama4", {"attention_chunk_size": None}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 6, "layer_types": None}),
    ("deepseek_v3", {"kv_lora_rank": 40, "qk_rope_head_dim": 4, "head_dim": 4}),
    ("deepseek_v32", {"index_head_dim": 24}),
    ("deepseek_v4", {"index_head_dim": 24, "head_dim": 32}),
    ("deepseek_v4", {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 6}}),
    ("qwen3_next", {"linear_key_head_dim": 24, "linear_value_head_dim": 8, "layer_types": None}),
    ("qwen3_5", {"linear_num_key_heads": 1, "linear_conv_kernel_dim": 3}),
    ("kimi_linear", {"linear_head_dim": 8, "linear_num_heads": 2}),
    ("mamba", {"state_size": 12, "conv_kernel": 3}),
    ("mamba2", {"n_groups": 2, "state_size": 12}),
    ("bamba", {"mamba_n_groups": 2, "mamba_d_state": 12, "mamba_d_conv": 3}),
    ("falcon_h1", {"mamba_d_ssm": 128, "mamba_d_head": 32}),
    ("jamba", {"mamba_expand": 3, "mamba_d_state": 12}),
    ("zamba2", {"mamba_d_state": 12, "mamba_ngroups": 2}),
    ("lfm2", {"conv_L_cache": 4, "layer_types": None, "full_attn_idxs": [1]}),
    ("minimax", {"layer_types": None}),
    ("nemotron_h", {"hybrid_override_pattern": "M*-M", "mamba_head_dim": 24}),
    ("mimo_v2_flash", {"v_head_dim": 8, "layer_types": None}),
    ("modernbert-decoder", {"local_attention": 12, "layer_types": None}),
    ("cohere2", {"layer_types": None, "sliding_window_pattern": 2}),
)


@pytest.mark.parametrize(("family", "changes"), VARIANTS, ids=[f"{f}-{'-'.join(c)}" for f, c in VARIANTS])
def test_each_setting_counts(family: str, changes: dict[str, Any]) -> None:
    if not known(FAMILIES[family]):
        pytest.skip("a family of another release")
    model = build(family, **changes)
    for check in checks_of(model, kvsnap.connect(model), "float32"):
        assert check.ok, (check.against, check.faults[:3])


@pytest.mark.parametrize("family", LATENT)
def test_latent_layers(family: str) -> None:
    if family.split("-", maxsplit=1)[0] not in CONFIG_MAPPING_NAMES:
        pytest.skip("a family of another release")
    model = latent_model(family)
    for check in checks_of(model, kvsnap.connect(model), "float32"):
        assert check.ok, (check.against, check.faults[:3])


@pytest.mark.parametrize("kind", MODELS)
def test_compressed_layers_and_blocks(kind: str) -> None:
    model = compressed_model(kind)
    for check in checks_of(model, kvsnap.connect(model), "float32"):
        assert check.ok, (check.against, check.faults[:3])


@pytest.mark.parametrize("family", WITH_ENCODER)
def test_decoders_with_an_encoder(family: str) -> None:
    if family not in CONFIG_MAPPING_NAMES:
        pytest.skip("a family of another release")
    model = encdec_model(family)
    engine = kvsnap.connect(model)
    engine.encode(**input_of(family))
    for check in checks_of(model, engine, "float32"):
        assert check.ok, (check.against, check.faults[:3])


@pytest.mark.parametrize("family", REFUSED)
def test_what_no_engine_captures_is_refused_by_name(family: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{family} keeps"):
        kvsnap.growth(settings_of(build(family)))


def test_each_family_has_defaults_once() -> None:
    assert len(set(known_families())) == len(known_families())


@pytest.mark.parametrize("family", known_families())
def test_what_a_configuration_leaves_out_is_as_the_family_has_it(family: str) -> None:
    if family not in CONFIG_MAPPING_NAMES:
        pytest.skip("a family of another release")
    whole = json.loads(CONFIG_MAPPING[family]().to_json_string(use_diff=False))
    bare = configured({"model_type": family}, "bfloat16", 9)
    told = configured(whole, "bfloat16", 9)
    assert bare.layers == told.layers
    assert bare.context_limit == told.context_limit


@pytest.mark.parametrize(
    ("family", "name", "other"),
    [
        ("llama", "num_key_value_heads", 4), ("llama", "num_hidden_layers", 3), ("gemma3", "sliding_window", 9),
        ("deepseek_v3", "qk_rope_head_dim", 16), ("deepseek_v32", "index_head_dim", 8), ("mamba", "state_size", 4),
        ("qwen3_next", "linear_num_value_heads", 2), ("lfm2", "conv_L_cache", 4), ("gemma4", "num_kv_shared_layers", 0),
        ("nemotron_h", "mamba_num_heads", 4),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_noticed(family: str, name: str, other: int) -> None:
    """The negative control: the same comparison, with one setting changed."""
    model = build(family)
    engine = kvsnap.connect(model)
    engine.prefill(list(range(3, 33)))
    config = settings_of(model)
    assert kvsnap.growth(config, dtype="float32", check=engine).checked[0].ok
    assert config[name] != other
    found = kvsnap.growth({**config, name: other}, dtype="float32", check=engine).checked[0]
    assert not found.ok
    assert found.faults[0].startswith(("layer ", "expected "))


def test_a_wrong_dtype_is_noticed() -> None:
    model = build("llama", "bfloat16")
    engine = kvsnap.connect(model)
    engine.prefill([3, 4, 5])
    found = kvsnap.growth(settings_of(model), dtype="float32", check=engine).checked[0]
    assert not found.ok
    assert found.off == -found.actual  # twice as many bytes were expected


def test_a_family_that_is_not_known_is_assumed_or_refused() -> None:
    config = settings_of(build("llama"))
    assumed = kvsnap.growth({**config, "model_type": "somellm"})
    assert assumed.notes[0].startswith("somellm is not a family that is known")
    assert assumed.layers == kvsnap.growth(config).layers
    with pytest.raises(UnsupportedError, match=r"somellm is not known.*kv_lora_rank"):
        kvsnap.growth({**config, "model_type": "somellm", "kv_lora_rank": 8})
    of_weights = {"quantization_config": {"bits": 4}, "compression_config": {"format": "int"}}
    assert kvsnap.growth({**config, **of_weights, "model_type": "somellm"}).layers == assumed.layers
    with pytest.raises(InputError, match="names no family"):
        kvsnap.growth({"hidden_size": 8})


# -- live models, and models without weights --------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next", "deepseek_v3", "deepseek_v4", "bamba"])
def test_a_live_model_and_its_file_are_as_told(family: str, tmp_path: Path) -> None:
    engine = kvsnap.connect(build(family))
    before = kvsnap.growth(engine)
    engine.prefill(list(range(3, 30)))
    for _ in range(4):
        engine.step()
    engine.settle()
    made = kvsnap.growth(engine)
    assert [check.against for check in made.checked] == ["its own tensors", "the settings of its model"]
    assert all(check.ok and not check.off for check in made.checked)
    assert before.layers == made.layers or {layer.kind for layer in before.layers} == {
        layer.kind for layer in made.layers
    }
    snapshot = engine.capture()
    assert made.at(engine.n_rows).cache_bytes == sum(tensor.nbytes for tensor in snapshot.tensors())
    snapshot.save(tmp_path / "x.kvsnap")
    told = kvsnap.growth(tmp_path / "x.kvsnap")
    assert [check.ok for check in told.checked] == [True, True]
    assert told.at(1000) == made.at(1000)


def test_reading_the_sizes_of_a_live_model_reads_no_row() -> None:
    engine = kvsnap.connect(build("llama"))
    engine.prefill([3, 4, 5])
    tensor = engine.layout()[0].tensors[0]
    assert tensor.shape == (2, 3, 16)
    with pytest.raises(InputError, match="only the sizes"):
        _ = tensor.array


@pytest.mark.parametrize("kind", ["quanto", "fp8"])
def test_a_quantised_cache_is_told_by_its_codes(kind: str) -> None:
    options: dict[str, Any] = {"backend": kind}
    if kind == "quanto":
        pytest.importorskip("optimum.quanto")
        options |= {"nbits": 4, "q_group_size": 16, "residual_length": 8}
    model = build("llama")
    engine = kvsnap.connect(model, cache="quantised", cache_options=options)
    engine.prefill(list(range(3, 43)))
    for _ in range(5):
        made = kvsnap.growth(engine)
        assert made.checked[0].ok, made.checked[0].faults[:3]
        engine.step()
        engine.settle()
    assert made.kinds == ("codes",)
    assert made.at(1000).cache_bytes < 1000 * kvsnap.growth(settings_of(model)).at(0).bytes_per_token / 3


REAL = ("gpt-oss-20b", "Mistral-7B-v0.1")


@pytest.mark.parametrize("name", REAL)
def test_a_real_model_at_full_size_without_its_weights(name: str) -> None:
    path = Path(__file__).parent / "data" / "configs" / f"{name}.json"
    made = kvsnap.growth(path, check=True)
    (check,) = made.checked
    assert check.ok, check.faults[:3]
    assert (check.against, check.layers) == ("a model without weights", len(made.layers))
    window = max((t.spec.window for layer in made.layers for t in layer.tensors), default=0)
    assert check.n_tokens > window
    config = json.loads(path.read_text())
    wrong = {**config, "num_key_value_heads": 4}
    layers, count = shapes_of(config, "bfloat16", 1)
    assert not compared("another", kvsnap.growth(wrong).layers, layers, count).ok


def test_what_cannot_be_run_without_weights_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="biogpt cannot be run without its weights"):
        kvsnap.growth(settings_of(build("biogpt")), check=True)
    with pytest.raises(UnsupportedError, match="t5 has an encoder"):
        kvsnap.growth(settings_of(build("t5")), check=True)
    with pytest.raises(InputError, match="only a configuration"):
        kvsnap.growth(kvsnap.connect(build("llama")), check=True)


def test_the_command_compares_a_live_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = save_tiny(tmp_path)
    assert run(["growth", "--model", str(directory), str(directory), "--at", "1000"]) == 0
    out = capsys.readouterr().out
    assert "checked against its own tensors: 3 layers at 40 positions" in out
    assert "checked against the settings of its model: 3 layers at 40 positions" in out


@pytest.mark.smollm2
def test_smollm2() -> None:
    loaded = load_model("smollm2", dtype="float32")
    engine = kvsnap.connect(loaded.model, loaded.tokenizer)
    engine.prefill(engine.tokenize("How large does this get?"))
    made = kvsnap.growth(engine)
    assert made.at(0).bytes_per_token == 46_080
    assert all(check.ok for check in made.checked)
    assert made.at(engine.n_rows).cache_bytes == engine.capture().nbytes - engine.vocab_size * 4

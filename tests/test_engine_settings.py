"""Settings that decide what a cache means, changed one at a time on models of the same weights: refused by name."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvsnap.engines import _tf_identity  # noqa: E402 - after the extras are known to be there
from kvsnap.engines.transformers import TransformersEngine  # noqa: E402
from kvsnap.errors import CompatibilityError  # noqa: E402
from kvsnap.identity import Identity, compare  # noqa: E402
from tiny_models import tiny_llama, tiny_model, tiny_qwen3  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.newest]

NEW = hasattr(transformers.LlamaConfig(), "rope_parameters")
"""Rope is one table of settings since transformers 5.0."""
needs_new = pytest.mark.skipif(not NEW, reason="written as rope_scaling before transformers 5.0")
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
          "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
          "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 8}  # fmt: skip


def identity(model: Any) -> Identity:
    return TransformersEngine(model).identity()


def differing(saved: Identity, found: Identity) -> list[str]:
    return [f.name for f in compare(saved, found).fields if f.verdict == "differ" and f.level == "fatal"]


def rope(kind: str, **more: Any) -> dict[str, Any]:
    table = {"rope_theta": 10000.0, "rope_type": kind, **more}
    return {"rope_parameters": table} if NEW else {"rope_theta": table.pop("rope_theta"), "rope_scaling": table}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 128, "factor": 4.0}
ROPES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "theta": (rope("default"), rope("default", rope_theta=20000.0), "rope_theta"),
    "type": (rope("linear", factor=2.0), rope("dynamic", factor=2.0), "rope_type"),
    "linear added": (rope("default"), rope("linear", factor=2.0), "rope_type"),
    "linear factor": (rope("linear", factor=2.0), rope("linear", factor=4.0), "factor"),
    "dynamic factor": (rope("dynamic", factor=2.0), rope("dynamic", factor=4.0), "factor"),
    "yarn factor": (rope("yarn", **YARN), rope("yarn", **YARN | {"factor": 2.0}), "factor"),
    "yarn attention factor": (rope("yarn", **YARN), rope("yarn", **YARN, attention_factor=1.5), "attention_factor"),
    "yarn beta_fast": (rope("yarn", **YARN, beta_fast=32.0), rope("yarn", **YARN, beta_fast=16.0), "beta_fast"),
    "yarn beta_slow": (rope("yarn", **YARN, beta_slow=1.0), rope("yarn", **YARN, beta_slow=2.0), "beta_slow"),
    "yarn length": (rope("yarn", **YARN), rope("yarn", **YARN | {"original_max_position_embeddings": 64}),
                    "original_max_position_embeddings"),
    "llama3 factor": (rope("llama3", **LLAMA3), rope("llama3", **LLAMA3 | {"factor": 4.0}), "factor"),
    "llama3 low": (rope("llama3", **LLAMA3), rope("llama3", **LLAMA3 | {"low_freq_factor": 2.0}), "low_freq_factor"),
    "llama3 high": (rope("llama3", **LLAMA3), rope("llama3", **LLAMA3 | {"high_freq_factor": 8.0}), "high_freq_factor"),
    "llama3 length": (rope("llama3", **LLAMA3), rope("llama3", **LLAMA3 | {"original_max_position_embeddings": 32}),
                      "original_max_position_embeddings"),
    "longrope short": (rope("longrope", **LONG), rope("longrope", **LONG | {"short_factor": [1.5] * 8}),
                       "short_factor"),
    "longrope long": (rope("longrope", **LONG), rope("longrope", **LONG | {"long_factor": [3.0] * 8}), "long_factor"),
    "longrope factor": (rope("longrope", **LONG), rope("longrope", **LONG | {"factor": 2.0}), "factor"),
}  # fmt: skip


@pytest.mark.parametrize("case", ROPES)
def test_each_setting_of_rope_is_refused_by_name(case: str) -> None:
    before, after, name = ROPES[case]
    saved, found = identity(tiny_llama(**before)), identity(tiny_llama(**after))
    assert saved == identity(tiny_llama(**before)), "the same settings are the same identity"
    report = compare(saved, found)
    refused = [f.name for f in report.refusals]
    assert f"config.rope_parameters.{name}" in refused
    assert all(n.startswith(("config.rope_parameters.", "weights: rotary_emb")) for n in refused)
    assert compare(saved, found, accept=("config.rope_parameters", "weights.rotary_emb")).ok
    only = compare(saved, found, accept=(f"config.rope_parameters.{name}",))
    assert f"config.rope_parameters.{name}" not in [f.name for f in only.refusals]
    assert only.ok == (refused == [f"config.rope_parameters.{name}"])
    with pytest.raises(CompatibilityError, match=rf"config\.rope_parameters\.{name} differ"):
        report.raise_if_refused()


def test_no_digest_of_a_weight_sees_a_factor_of_dynamic_rope() -> None:
    # The control of the test above: the setting is all that tells these two apart.
    before, after, _ = ROPES["dynamic factor"]
    saved, found = identity(tiny_llama(**before)), identity(tiny_llama(**after))
    assert saved.weights == found.weights


def test_a_table_of_rope_settings_in_the_place_of_null_is_refused() -> None:
    saved = Identity(config=(("rope_scaling", "null"), ("width", "4")))
    found = Identity(config=(("rope_scaling.factor", "2.0"), ("rope_scaling.rope_type", '"dynamic"'), ("width", "4")))
    for a, b in ((saved, found), (found, saved)):
        assert differing(a, b) == ["config.rope_scaling.factor", "config.rope_scaling.rope_type"]
    assert differing(saved, Identity(config=(("width", "4"),))) == []


# builder, settings of both, the other value, name
PLAIN: dict[str, tuple[Any, dict[str, Any], dict[str, Any], list[str]]] = {
    "query heads": (tiny_llama, {}, {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32},
                    ["num_attention_heads", "head_dim"]),
    "key heads": (tiny_llama, {}, {"num_key_value_heads": 4}, ["num_key_value_heads"]),
    "eps": (tiny_llama, {}, {"rms_norm_eps": 1e-5}, ["rms_norm_eps"]),
    "activation": (tiny_llama, {}, {"hidden_act": "gelu"}, ["hidden_act"]),
    "attention bias": (tiny_llama, {}, {"attention_bias": True}, ["attention_bias"]),
    "tied": (tiny_llama, {}, {"tie_word_embeddings": True}, ["tie_word_embeddings"]),
    "context": (tiny_llama, {}, {"max_position_embeddings": 256}, ["max_position_embeddings"]),
    "qwen3 eps": (tiny_qwen3, {}, {"rms_norm_eps": 1e-5}, ["rms_norm_eps"]),
}  # fmt: skip


@pytest.mark.parametrize("case", PLAIN)
def test_each_setting_of_a_plain_model_is_refused_by_name(case: str) -> None:
    build, both, other, names = PLAIN[case]
    saved, found = identity(build(**both)), identity(build(**both, **other))
    refused = differing(saved, found)
    for name in names:
        assert f"config.{name}" in refused
    assert all(n.removeprefix("config.") in names or n.startswith("weights:") for n in refused)
    assert differing(saved, identity(build(**both))) == []


TABLES: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "mistral": {"sliding_window": 8},
    "llama4_text": {"attention_chunk_size": 8, "intermediate_size_mlp": 128, "num_local_experts": 4},
    "deepseek_v2": LATENT, "deepseek_v3": LATENT,
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
DEEP: list[tuple[str, dict[str, Any], str]] = [
    ("gemma2", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
    ("gemma2", {"final_logit_softcapping": 10.0}, "final_logit_softcapping"),
    ("gemma2", {"query_pre_attn_scalar": 32}, "query_pre_attn_scalar"),
    ("gemma2", {"sliding_window": 16}, "sliding_window"),
    ("gemma2", {"layer_types": ["full_attention"] * 3}, "layer_types"),
    ("gemma3_text", {"sliding_window": 16}, "sliding_window"),
    ("mistral", {"sliding_window": 16}, "sliding_window"),
    ("mistral", {"sliding_window": None}, "sliding_window"),
    ("llama4_text", {"attention_chunk_size": 16}, "attention_chunk_size"),
    ("llama4_text", {"attn_temperature_tuning": False}, "attn_temperature_tuning"),
    ("llama4_text", {"use_qk_norm": False}, "use_qk_norm"),
    ("llama4_text", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers"),
    ("deepseek_v2", {"routed_scaling_factor": 2.0}, "routed_scaling_factor"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
    ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob"),
    ("deepseek_v3", {"num_experts_per_tok": 1}, "num_experts_per_tok"),
    ("phimoe", {"router_jitter_noise": 0.2}, "router_jitter_noise"),
]


def settings_of(kind: str, **changes: Any) -> Identity:
    """The settings part of an identity; the families here are not all supported by the engine yet."""
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4 if kind.startswith("deepseek") else 2, max_position_embeddings=256,
        **{"head_dim": 16} | TABLES[kind] | changes,
    )  # fmt: skip
    runtime = (("transformers", transformers.__version__),)
    return Identity(engine="transformers", config=_tf_identity.settings_of(config)[0], runtime=runtime)


@pytest.mark.parametrize(
    ("kind", "change", "name"), DEEP, ids=[f"{k} {n} {next(iter(c.values()))}" for k, c, n in DEEP]
)
def test_each_setting_of_other_families_is_refused_by_name(kind: str, change: dict[str, Any], name: str) -> None:
    if kind not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    saved, found = settings_of(kind), settings_of(kind, **change)
    assert any(n == f"config.{name}" or n.startswith(f"config.{name}.") for n in differing(saved, found))
    assert differing(saved, settings_of(kind)) == []


@needs_new
@pytest.mark.parametrize("layer", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize("setting", [("rope_theta", 5000.0), ("rope_type", "linear"), ("partial_rotary_factor", 0.5)])
def test_each_setting_of_rope_by_layer_type_is_refused_by_name(layer: str, setting: tuple[str, Any]) -> None:
    for kind in ("gemma3_text", "gemma4_text"):
        if kind not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
            continue
        name, value = setting
        table = {k: {"rope_type": "default", "rope_theta": 10000.0} for k in ("full_attention", "sliding_attention")}
        saved = Identity(config=_rope_settings(kind, table), engine="transformers", runtime=(("transformers", "5"),))
        table[layer] = table[layer] | {name: value} | ({"factor": 2.0} if name == "rope_type" else {})
        found = Identity(config=_rope_settings(kind, table), engine="transformers", runtime=(("transformers", "5"),))
        assert f"config.rope_parameters.{layer}.{name}" in differing(saved, found)


def _rope_settings(kind: str, table: dict[str, Any]) -> Any:
    config = transformers.AutoConfig.for_model(kind, num_hidden_layers=2, head_dim=16)
    config.rope_parameters = {key: dict(value) for key, value in table.items()}
    return _tf_identity.settings_of(config)[0]


def test_a_router_jitter_that_decides_without_training_is_told_apart() -> None:
    # The setting is noise for other families, which use it only in training. Here the same weights answer otherwise.
    if "phimoe" not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        pytest.skip("this transformers has no phimoe")
    ids = torch.arange(3, 40)[None]
    found = []
    for jitter in (0.01, 2.0):
        model = tiny_model("phimoe", 0, num_local_experts=4, router_jitter_noise=jitter)
        with torch.no_grad():
            found.append(model(ids).logits)
    assert not torch.equal(*found)


NOISE: list[dict[str, Any]] = [
    {"use_cache": False}, {"attention_dropout": 0.5}, {"initializer_range": 0.5}, {"eos_token_id": 7},
    {"pad_token_id": 3}, {"bos_token_id": 9}, {"_name_or_path": "elsewhere"}, {"architectures": ["Other"]},
    {"output_hidden_states": True}, {"id2label": {0: "a", 1: "b"}}, {"temperature": 0.5}, {"top_k": 3},
    {"hidden_dropout_prob": 0.5}, {"z_loss_coefficient": 1.0}, {"num_logits_to_keep": 1},
]  # fmt: skip


@pytest.mark.parametrize("noise", NOISE, ids=[next(iter(n)) for n in NOISE])
def test_settings_that_decide_nothing_are_not_looked_at(noise: dict[str, Any]) -> None:
    model = tiny_llama()
    engine = TransformersEngine(model)
    before = engine.identity()
    for name, value in noise.items():
        setattr(model.config, name, value)
    report = compare(before, engine.identity())
    assert report.ok
    assert report.exact


def test_a_choice_of_kernels_is_not_refused_and_not_called_exact() -> None:
    model = tiny_llama()
    engine = TransformersEngine(model)
    before = engine.identity()
    model.config.use_mamba_kernels = True
    report = compare(before, engine.identity())
    assert report.ok
    assert not report.exact
    assert [f.name for f in report.fields if f.verdict == "differ"] == ["runtime.kernels"]


def test_what_one_side_lacks_is_refused_under_one_version_of_the_engine_only() -> None:
    def made(version: str, *more: tuple[str, str]) -> Identity:
        return Identity(engine="transformers", config=(("a", "1"), *more), runtime=(("transformers", version),))

    saved, extra = made("5.24"), ("attention_factor", "1.5")
    for a, b in ((saved, made("5.24", extra)), (made("5.24", extra), saved)):
        report = compare(a, b)
        assert [str(f) for f in report.refusals if f.name.startswith("config")] == [
            "config.attention_factor differ: saved absent, found 1.5" if a is saved
            else "config.attention_factor differ: saved 1.5, found absent"
        ]  # fmt: skip
    assert differing(saved, made("5.25", extra)) == [], "another release may have added a default"
    assert differing(saved, made("5.24", ("attention_factor", "null"))) == [], "null is what absent means"


def test_long_lists_are_shown_where_they_part() -> None:
    lists = [str(["full_attention"] * 30), str(["full_attention"] * 29 + ["sliding_attention"])]
    saved, found = (Identity(config=(("layer_types", text),)) for text in lists)
    check = next(f for f in compare(saved, found).fields if f.verdict == "differ")
    assert check.saved != check.found
    assert "sliding" in check.found

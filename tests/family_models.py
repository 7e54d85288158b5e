"""A tiny random model of every family of decoders: what `tiny_models` is for llama, for all of them.

Each holds every kind of layer that its family has, with windows and groups of eight positions, so that forty tokens
are far beyond them. `FAMILIES` is the list; `build` makes one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from tiny_models import CONTEXT, SPREAD

__all__ = ["FAMILIES", "WINDOW", "Family", "attentions", "build", "known"]

WINDOW = 8
"""Positions that a window, a group of compressed positions or a block of chunked attention spans."""

_COMMON: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": CONTEXT, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
_GROUPS = ("num_key_value_heads", "head_dim")
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {
    "n_routed_experts": 4, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "num_shared_experts": 1, "num_dense_layers": 1,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "head_dim": 8, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "num_hidden_layers": 3,
}  # fmt: skip
_INDEX = {**_LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 6}
_WINDOWED = {"sliding_window": WINDOW}
_ALTERNATE = {**_WINDOWED, "layer_types": ["sliding_attention", "full_attention"] * 2}
_GATED = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
_MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": WINDOW,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One family: the name transformers gives to its text model, what its configuration has beside the common fields.

    `drops` are common fields that its configuration does not take; `auto` makes the model.
    """

    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    kind: str = ""
    drops: tuple[str, ...] = ()
    auto: str = "AutoModelForCausalLM"
    spread: float = SPREAD
    seed: int = 3


_LIST = (
    Family("llama"),
    Family("qwen3"),
    Family("mistral", _WINDOWED),
    Family("gemma2", _ALTERNATE),
    Family("gemma3", _ALTERNATE, kind="gemma3_text", seed=4),
    Family(
        "gemma4",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 256,
            "global_head_dim": 32,
        },
        kind="gemma4_text",
    ),
    Family("gpt_oss", {**_EXPERTS, **_ALTERNATE}),
    Family("llama4", {**_EXPERTS, "intermediate_size_mlp": 128, "attention_chunk_size": WINDOW}, kind="llama4_text"),
    Family("deepseek_v2", {**_LATENT, "topk_method": "greedy"}),
    Family("deepseek_v3", _LATENT),
    Family("deepseek_v32", _INDEX),
    Family("glm_moe_dsa", _INDEX),
    Family(
        "deepseek_v4",
        {
            "num_key_value_heads": 1,
            "q_lora_rank": 24,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "o_groups": 2,
            "o_lora_rank": 16,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 4,
            "sliding_window": WINDOW,
            "num_nextn_predict_layers": 0,
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": WINDOW},
            "layer_types": [
                "sliding_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            ],
        },
    ),
    Family("qwen3_next", {**_EXPERTS, **_GATED, "shared_expert_intermediate_size": 32}),
    Family("qwen3_5", _GATED, kind="qwen3_5_text"),
    Family("olmo_hybrid", _GATED),
    Family(
        "kimi_linear",
        {
            **_LATENT,
            "num_local_experts": 4,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    Family("mamba", {"state_size": 8}),
    Family("mamba2", {"num_heads": 8, "state_size": 8, "n_groups": 1, "expand": 2, "chunk_size": WINDOW}),
    Family("falcon_h1", {**_MAMBA2, "mamba_d_ssm": 64, "mamba_n_heads": 4}),
    Family("bamba", {**_MAMBA2, "attn_layer_indices": [1]}),
    Family(
        "jamba",
        {
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "num_experts": 2,
            "use_mamba_kernels": False,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
        },
    ),
    Family(
        "granitemoehybrid",
        {
            **_MAMBA2,
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "shared_intermediate_size": 32,
        },
    ),
    Family("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    Family(
        "nemotron_h",
        {
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": WINDOW,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    Family(
        "minimax",
        {
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "block_size": WINDOW,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    Family(
        "t5",
        {
            "vocab_size": 256,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 3,
            "num_heads": 4,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
        },
        drops=tuple(_COMMON),
        auto="AutoModelForSeq2SeqLM",
        seed=8,
    ),
    Family(
        "whisper",
        {
            "vocab_size": 256,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_source_positions": 16,
            "max_target_positions": CONTEXT,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        drops=tuple(_COMMON),
        auto="AutoModelForSpeechSeq2Seq",
        seed=4,
    ),
    Family("minimax_m2", {"num_local_experts": 2, "num_experts_per_tok": 1, "rotary_dim": 8}),
    Family(
        "mimo_v2_flash",
        {**_ALTERNATE, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "v_head_dim": 12},
    ),
    Family("minicpm3", _LATENT),
    Family(
        "longcat_flash",
        {
            **_LATENT,
            "num_layers": 2,
            "num_hidden_layers": 4,
            "ffn_hidden_size": 64,
            "expert_ffn_hidden_size": 32,
            "moe_topk": 2,
            "zero_expert_num": 1,
        },
    ),
    Family("recurrent_gemma", {"lru_width": 64, "attention_window_size": WINDOW, "num_hidden_layers": 3}),
    Family("rwkv", {"attention_hidden_size": 64, "num_hidden_layers": 2}),
    # -- others that are used much
    *(
        Family(name)
        for name in (
            "apertus",
            "arcee",
            "bitnet",
            "cohere",
            "diffllama",
            "doge",
            "ernie4_5",
            "gemma",
            "glm",
            "glm4",
            "granite",
            "helium",
            "hunyuan_v1_dense",
            "ministral3",
            "nanochat",
            "nemotron",
            "olmo",
            "phi",
            "phi3",
            "qwen2",
            "seed_oss",
            "smollm3",
            "stablelm",
            "starcoder2",
        )
    ),
    *(Family(name, drops=_GROUPS, spread=0.5) for name in ("biogpt", "falcon", "gpt2", "gpt_bigcode", "mpt", "opt")),
    Family("ctrl", drops=_GROUPS),
    Family("bloom", drops=_GROUPS, spread=0.2, seed=14),
    Family("olmo2", spread=0.2, seed=10),
    Family("gpt_neox", drops=_GROUPS, spread=0.5, seed=4),
    Family("persimmon", drops=_GROUPS, spread=0.5, seed=5),
    Family("xglm", drops=_GROUPS, seed=5),
    *(
        Family(name, _EXPERTS, seed=4 if name in ("flex_olmo", "hunyuan_v1_moe", "qwen3_moe") else 3)
        for name in (
            "flex_olmo",
            "granitemoe",
            "hunyuan_v1_moe",
            "jetmoe",
            "mixtral",
            "olmoe",
            "phimoe",
            "qwen2_moe",
            "qwen3_moe",
        )
    ),
    *(Family(name, _ROUTED) for name in ("dots1", "glm4_moe", "solar_open")),
    *(Family(name, _ALTERNATE) for name in ("cohere2", "exaone4", "ministral", "olmo3", "vaultgemma")),
    *(Family(name, {**_ALTERNATE, **_ROUTED}) for name in ("afmoe", "exaone_moe")),
    Family(
        "ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_intermediate_size": 32}
    ),
    Family("codegen", {"rotary_dim": 8}, drops=_GROUPS, seed=5),
    Family("gptj", {"rotary_dim": 8}, drops=_GROUPS),
    Family(
        "gpt_neo",
        {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
        drops=_GROUPS,
    ),
    Family(
        "gemma3n",
        {
            **_ALTERNATE,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 256,
            "laurel_rank": 16,
        },
        kind="gemma3n_text",
    ),
    Family(
        "modernbert-decoder",
        {
            "local_attention": 2 * WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
    Family("lfm2_moe", {**_EXPERTS, "layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1}),
    Family("zamba", {"use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1}),
    Family(
        "zamba2",
        {
            "layers_block_type": ["mamba", "hybrid"] * 2,
            "n_mamba_heads": 4,
            "mamba_d_state": 8,
            "chunk_size": WINDOW,
            "mamba_ngroups": 1,
            "use_mamba_kernels": False,
        },
    ),
    Family("qwen3_5_moe", {**_EXPERTS, **_GATED, "shared_expert_intermediate_size": 32}, kind="qwen3_5_moe_text"),
    Family("glm4_moe_lite", _LATENT),
    Family("falcon_mamba", {"state_size": 8}),
    Family(
        "dbrx",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 3,
            "max_seq_len": CONTEXT,
            "vocab_size": 256,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
            "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 64},
        },
        drops=tuple(_COMMON),
        seed=6,
    ),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _LIST}
"""Every family by name."""


def known(family: Family) -> bool:
    """Tell whether the installed release has the family."""
    return (family.kind or family.name) in CONFIG_MAPPING_NAMES


# What a random weight would ruin: decay rates and time steps (they must stay where states neither vanish nor
# overflow), norms, and what balances experts.
_KEPT = re.compile(r"A_log|dt_bias|norm|\bD\b|\.D$|e_score_correction_bias|time_|sinks")


def build(name: str, dtype: str = "float32", attention: str = "", seed: int | None = None, **changes: Any) -> Any:
    """Return a tiny model of a family, in eval mode. The same seed gives the same weights, in every process."""
    family = FAMILIES[name]
    seed = family.seed if seed is None else seed
    fields = {k: v for k, v in _COMMON.items() if k not in family.drops}
    config = transformers.AutoConfig.for_model(family.kind or name, **{**fields, **family.fields, **changes})
    options = {"attn_implementation": attention} if attention else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, family.auto).from_config(config, dtype=getattr(torch, dtype), **options)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for label, weight in model.named_parameters():
            if weight.dim() > 1 and not _KEPT.search(label):
                weight.copy_(torch.randn(weight.shape, generator=draw, dtype=torch.float32) * family.spread)
    return model.eval()


def attentions(name: str) -> tuple[str, ...]:
    """Return the implementations of attention that the installed release has for a family, the default first."""
    family = FAMILIES[name]
    config = CONFIG_MAPPING[family.kind or name]
    model = getattr(transformers, family.auto)._model_mapping.get(config, None)
    return ("sdpa", "eager") if getattr(model, "_supports_sdpa", False) else ("eager",)

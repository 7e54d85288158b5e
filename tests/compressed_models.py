"""Tiny models with compressed rows and with an index of blocks: DeepSeek-V4 and MiniMax-M3."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tiny_models import tiny_model

__all__ = ["BLOCK", "GROUP", "LONG_GROUP", "MODELS", "TYPES", "WINDOW", "compressed_model"]

WINDOW, GROUP, LONG_GROUP, BLOCK = 8, 4, 6, 4
TYPES = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "compressed_sparse_attention",
)
_V4: dict[str, Any] = {
    "num_hidden_layers": 4, "num_key_value_heads": 1, "layer_types": list(TYPES), "sliding_window": WINDOW,
    "compress_rates": {"compressed_sparse_attention": GROUP, "heavily_compressed_attention": LONG_GROUP},
    "q_lora_rank": 24, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_routed_experts": 4, "o_groups": 2,
    "o_lora_rank": 16, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 3, "hc_mult": 2, "hc_sinkhorn_iters": 3,
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "partial_rotary_factor": 0.5, "attention": "eager",
}  # fmt: skip
_M3: dict[str, Any] = {
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], "dense_intermediate_size": 64,
    "shared_intermediate_size": 32, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
    "rotary_dim": 8, "index_n_heads": 2, "index_head_dim": 8, "index_block_size": BLOCK, "index_topk_blocks": 2,
    "index_local_blocks": 1, "mlp_layer_types": ["dense", "sparse", "sparse"],
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {"v4": ("deepseek_v4", _V4), "m3": ("minimax_m3_vl_text", _M3)}


def compressed_model(kind: str, dtype: str = "float32", seed: int = 3, **changes: Any) -> Any:
    """A tiny model in eval mode, under whose weights greedy decoding varies; skips where the release has none."""
    family, fields = MODELS[kind]
    if family not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"transformers {transformers.__version__} does not have {family}")
    return tiny_model(family, seed, dtype, **{**fields, **changes})

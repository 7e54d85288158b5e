"""Tiny models with latent attention, some with an index: what `tiny_models` is for full attention.

Releases of transformers before 5.24 know fewer of the families, and keep the keys and values of every head instead of
the latent row that they come from; what a release keeps is looked up here by running it, not by asking the engine.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tiny_models import tiny_model

__all__ = [
    "FAMILIES",
    "INDEX",
    "INDEXED",
    "KNOWN",
    "LATENT",
    "LAYERS",
    "ROPE",
    "keeps_latent",
    "latent_model",
    "rows_kept",
]

LAYERS, TOP_K = 3, 6
LATENT, ROPE, NOPE, VALUE, HEADS, INDEX = 32, 8, 16, 12, 4, 16

_BASE: dict[str, Any] = {
    "num_key_value_heads": HEADS, "head_dim": ROPE, "kv_lora_rank": LATENT, "q_lora_rank": 24,
    "qk_rope_head_dim": ROPE, "qk_nope_head_dim": NOPE, "v_head_dim": VALUE, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1,
}  # fmt: skip
_INDEX = {"index_n_heads": 2, "index_head_dim": INDEX, "index_topk": TOP_K}
_LONGCAT = {
    "num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32, "moe_topk": 2,
    "zero_expert_num": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"topk_method": "greedy"},
    "deepseek_v3": {},
    "minicpm3": {},
    "longcat_flash": _LONGCAT,
    "deepseek_v32": _INDEX,
    "glm_moe_dsa": _INDEX,
    "glm_moe_dsa-shared": {**_INDEX, "indexer_types": ["full", "shared", "full"]},
}
"""Family (of transformers), a dash and a variant of it: what its configuration has beside the common fields."""

INDEXED = ("deepseek_v32", "glm_moe_dsa", "glm_moe_dsa-shared")
KNOWN = tuple(name for name in FAMILIES if name.split("-", maxsplit=1)[0] in CONFIG_MAPPING_NAMES)
"""The families that the installed release has."""


def latent_model(name: str, dtype: str = "float32", attention: str = "sdpa", seed: int = 3, **changes: Any) -> Any:
    """A tiny model of the family, in eval mode, with random weights under which greedy decoding varies."""
    kind = name.split("-", maxsplit=1)[0]
    return tiny_model(kind, seed, dtype, attention, **{**_BASE, **FAMILIES.get(name, {}), **changes})


def rows_kept(model: Any, count: int = 5) -> list[dict[str, tuple[int, ...]]]:
    """Shapes of the tensors in each layer of the cache after `count` tokens, as the model itself leaves them."""
    cache = transformers.DynamicCache(config=model.config)
    keyword = "cache" if "cache" in signature(type(model).forward).parameters else "past_key_values"
    with torch.no_grad():
        model(input_ids=torch.arange(count)[None], use_cache=True, **{keyword: cache})
    return [{n: tuple(t.shape) for n, t in vars(layer).items() if torch.is_tensor(t)} for layer in cache.layers]


def keeps_latent(model: Any) -> bool:
    """Tell whether this release keeps latent rows for the model."""
    return rows_kept(model)[0]["keys"] == (1, 1, 5, LATENT)

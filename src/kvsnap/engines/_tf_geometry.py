"""What the layers of a transformers model keep, found before the first row is there: from modules and settings.

Rows that then turn out otherwise are refused by `check_layer`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from kvsnap.engines._tf_layers import Geometry, Part
from kvsnap.errors import UnsupportedError
from kvsnap.tensors import Pairing, RopeState

__all__ = ["INDEXED", "attentions_of", "geometry_of"]

INDEXED = ("indexed_attention", "deepseek_sparse_attention")
"""The names that releases of transformers give to layers whose attention looks at the best rows of an index."""

_HALF, _INTERLEAVED = [-2.0, -3.0, 0.0, 1.0], [-1.0, 0.0, -3.0, 2.0]


def geometry_of(module: Any, config: Any, layers: Sequence[Any]) -> tuple[Geometry, ...]:
    """Return what each layer keeps; `layers` are those of an empty cache (before 5.0: none).

    Raise `UnsupportedError` naming a layer whose attention is not known.
    """
    if getattr(config, "kv_lora_rank", None) is None:
        return _plain(module, config)
    found = attentions_of(module)
    count = len(layers) or len(found)
    return tuple(_latent(found.get(index), index, config, layers) for index in range(count))


def attentions_of(module: Any) -> dict[int, Any]:
    """Return the modules of latent attention by the number of the cache layer that each writes to."""
    parts = (part for part in module.modules() if hasattr(part, "kv_b_proj"))
    return {int(part.layer_idx): part for part in parts if hasattr(part, "layer_idx")}


# -- keys and values for each head ---------------------------------------------------------------------------------


def _plain(module: Any, config: Any) -> tuple[Geometry, ...]:
    query_heads = int(config.num_attention_heads)
    heads = int(getattr(config, "num_key_value_heads", None) or query_heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // query_heads)
    rope, pairing = _rope(module, config)

    def geometry(state: RopeState, pairs: Pairing) -> Geometry:
        return Geometry("attention", query_heads, (Part("k", heads, width, state, pairs), Part("v", heads, width)))

    # SmolLM3 and others leave the rotation out of some layers.
    rotated = getattr(config, "no_rope_layers", None) or [1] * config.num_hidden_layers
    return tuple(geometry(rope, pairing) if used else geometry("none", "") for used in rotated)


def _rope(module: Any, config: Any) -> tuple[RopeState, Pairing]:
    """Tell how keys are rotated. Asks the function that the model uses: no setting says it for every family."""
    import torch

    settings = getattr(config, "rope_parameters", None) or {}
    if not settings and getattr(config, "rope_theta", None) is None:
        return "unknown", ""
    partial = settings.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    families = (sys.modules.get(cls.__module__) for cls in type(module).__mro__)
    rotate = next((f for family in families if (f := getattr(family, "rotate_half", None)) is not None), None)
    if rotate is None or partial != 1.0:
        return "unknown", ""
    found = rotate(torch.arange(4.0)).tolist()
    if found == _HALF:
        return "after", "half"
    return ("after", "interleaved") if found == _INTERLEAVED else ("unknown", "")


# -- latent attention ----------------------------------------------------------------------------------------------


def _latent(attention: Any, index: int, config: Any, layers: Sequence[Any]) -> Geometry:
    if attention is None:
        raise UnsupportedError(
            f"layer {index}: {config.model_type} has latent attention (kv_lora_rank {config.kv_lora_rank}), and this "
            "layer has none that is known"
        )
    query_heads, rotated = _size(attention, index, "num_heads"), _size(attention, index, "qk_rope_head_dim")
    parts: tuple[Part, ...]
    # The releases that keep the latent row expand it after they have read it back; those before keep what it becomes.
    if hasattr(attention, "expand_kv"):
        rope, pairing = _latent_rope(attention) if rotated else ("none", "")
        parts = (Part("latent", 0, _size(attention, index, "kv_lora_rank")), Part("rope", 0, rotated, rope, pairing))
    else:
        # Only the end of such a key is rotated.
        width, of_value = _size(attention, index, "qk_nope_head_dim") + rotated, _size(attention, index, "v_head_dim")
        parts = (Part("k", query_heads, width, "unknown"), Part("v", query_heads, of_value))
    kind = "latent" if parts[0].role == "latent" else "attention"
    indexer = getattr(attention, "indexer", None)
    if indexer is not None:
        if not layers or not hasattr(layers[index], "update_indexer"):
            found = type(layers[index]).__name__ if layers else "no layers"
            raise UnsupportedError(
                f"layer {index} has an index and no place for its rows", expected="DynamicIndexedLayer", found=found
            )
        parts = (*parts, Part("index", 0, _size(indexer, index, "head_dim"), "unknown"))
    return Geometry(kind, query_heads, parts)


def _size(part: Any, index: int, name: str) -> int:
    found = getattr(part, name, None)
    if found is None:
        raise UnsupportedError(f"layer {index}: its {type(part).__name__} does not tell its {name}")
    return int(found)


def _latent_rope(attention: Any) -> tuple[RopeState, Pairing]:
    """Tell which values of a stored rope row belong together, by rotating one pair with the function that is used.

    Some functions take neighbours and store their results half a row apart, so that its name does not say it.
    """
    import torch

    rotate = _rotation(attention)
    if rotate is None:
        return "unknown", ""
    # Whatever the user's defaults are: the function is asked, not the model.
    plain = {"dtype": torch.float32, "device": "cpu"}
    row = torch.arange(1, 5, **plain).reshape(1, 1, 1, 4)
    angles = torch.tensor([[[0, 0]], [[1, 0]]], **plain)
    rotated = []
    for angle in angles:
        if "freqs_cis" in inspect.signature(rotate).parameters:
            turns: tuple[Any, ...] = (torch.polar(torch.ones(1, 1, 2, **plain), angle[None]),)
        else:
            turns = tuple(turn(torch.cat((angle, angle), dim=-1))[None] for turn in (torch.cos, torch.sin))
        rotated.append(rotate(row, row, *turns)[1].flatten())
    moved = torch.nonzero(rotated[0] != rotated[1]).flatten().tolist()
    if moved == [0, 2]:
        return "after", "half"
    return ("after", "interleaved") if moved == [0, 1] else ("unknown", "")


def _rotation(attention: Any) -> Callable[..., Any] | None:
    """Return the function that the attention of a model rotates its rope rows with, or None where it is not known."""
    forward = inspect.unwrap(type(attention).forward)
    used = forward.__code__.co_names
    names = ["apply_rotary_pos_emb_interleave", "apply_rotary_emb", "apply_rotary_pos_emb"]
    if "rope_interleave" in used and not getattr(attention.config, "rope_interleave", False):
        names.remove("apply_rotary_pos_emb_interleave")
    name = next((name for name in names if name in used), None)
    return None if name is None else forward.__globals__.get(name)

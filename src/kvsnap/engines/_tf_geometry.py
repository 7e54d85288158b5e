"""What the layers of a transformers model keep, found before the first row is there: from modules and settings.

Rows that then turn out otherwise are refused by `check_layer`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvsnap.engines import _tf_quantised as quantised
from kvsnap.engines._tf_compressed import compressed_geometry, index_of_blocks, shared_attentions
from kvsnap.engines._tf_encoder import cross_parts
from kvsnap.engines._tf_parts import Geometry, Part, heads, rows
from kvsnap.errors import UnsupportedError
from kvsnap.tensors import Pairing, RopeState

__all__ = ["attentions_of", "geometry_of", "shared_by"]

_WINDOWS_ONLY = ("cohere2", "dory", "exaone4", "exaone_moe", "flint", "kolibri1")
"""Families, by the beginning of their names, that rotate the keys of their windows, and of no layer beside those."""

_HALF, _INTERLEAVED = [-2.0, -3.0, 0.0, 1.0], [-1.0, 0.0, -3.0, 2.0]


def geometry_of(module: Any, config: Any, layers: Sequence[Any]) -> tuple[Geometry, ...]:
    """Return what each layer keeps; `layers` are those of an empty cache (before 5.0: none).

    Raise `UnsupportedError` naming a layer whose attention is not known.
    """
    latent = attentions_of(module) if getattr(config, "kv_lora_rank", None) is not None else {}
    plain, shared = _plain_attentions(module), shared_attentions(module)
    if getattr(module.config, "is_encoder_decoder", False):
        return _of_decoder(module, config, layers, plain)
    types = getattr(config, "layer_types", None) or ()
    count = len(layers) or len(latent) or int(config.num_hidden_layers)
    found = []
    for index in range(count):
        layer = layers[index] if layers else None
        if type(layer).__name__ == "DummyLayer":
            found.append(Geometry("none", 0, shares=shared_by(module, index)))
        elif type(layer).__name__ == "LinearAttentionLayer" or (
            layer is None and index < len(types) and types[index] == "linear_attention"
        ):
            found.append(Geometry("recurrent", 0, open=True))
        elif index in shared and layer is not None:
            query_heads, rope = int(config.num_attention_heads), _rope(module, config, index)
            found.append(compressed_geometry(shared[index], layer, index, query_heads, rope))
        elif getattr(config, "kv_lora_rank", None) is not None:
            if quantised.is_quantised(layer):
                raise UnsupportedError(f"layer {index} has latent attention, which is not supported as codes")
            if getattr(layer, "is_sliding", False):
                raise UnsupportedError(f"layer {index} has latent attention in a window, which is not supported yet")
            found.append(_latent(latent.get(index), index, config, layers))
        else:
            found.append(_plain(module, config, index, layer, plain.get(index)))
    return tuple(found)


def _of_decoder(module: Any, config: Any, layers: Sequence[Any], plain: Mapping[int, Any]) -> tuple[Geometry, ...]:
    # Settings of a decoder alone say it plainly; those of both have names of their own for its layers.
    whole = config if getattr(module.config, "decoder", None) is not None else module.config
    names = ("num_decoder_layers", "decoder_layers", "num_hidden_layers")
    count = next(int(found) for name in names if (found := getattr(whole, name, None)) is not None)
    own = [layers[index].own if index < len(layers) else None for index in range(count)]
    return tuple(cross_parts(_plain(module, config, i, layer, plain.get(i))) for i, layer in enumerate(own))


def attentions_of(module: Any) -> dict[int, Any]:
    """Return the modules of latent attention by the number of the cache layer that each writes to."""
    parts = (part for part in module.modules() if hasattr(part, "kv_b_proj"))
    return {int(part.layer_idx): part for part in parts if hasattr(part, "layer_idx")}


def _plain_attentions(module: Any) -> dict[int, Any]:
    parts = [part for part in module.modules() if hasattr(part, "k_proj") and hasattr(part, "head_dim")]
    # An attention comes before the index inside of it, which may look alike.
    return {int(part.layer_idx): part for part in parts[::-1] if isinstance(getattr(part, "layer_idx", None), int)}


def shared_by(module: Any, index: int) -> int | None:
    """Return the layer whose rows a layer without any of its own uses, where the model tells."""
    for part in module.modules():
        if getattr(part, "layer_idx", None) == index and getattr(part, "is_kv_shared_layer", False):
            found = getattr(part, "kv_shared_layer_index", None)
            return found if isinstance(found, int) else None
    return None


# -- keys and values for each head ---------------------------------------------------------------------------------


def _plain(module: Any, config: Any, index: int, layer: Any, attention: Any) -> Geometry:
    query_heads = int(config.num_attention_heads)
    rope, pairing = _rope(module, config, index)
    # SmolLM3 and others leave the rotation out of some layers.
    rotated = getattr(config, "no_rope_layers", None)
    if rotated and not rotated[index]:
        rope, pairing = "none", ""
    window = int(getattr(layer, "sliding_window", 0) or 0)
    mixed_in = any(kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or ())
    if mixed_in and not window and str(config.model_type).startswith(_WINDOWS_ONLY):
        rope, pairing = "none", ""
    if window == 1:
        raise UnsupportedError(f"layer {index} has a window of 1, which holds nothing", expected="2 or more", found=1)
    count, width, of_value = _sizes(config, attention)
    if quantised.is_quantised(layer):
        coded = quantised.parts_of(layer, count, (width, of_value), rope, pairing)
        return Geometry("attention", query_heads, coded, quantisation=quantised.settings_of(layer).text)
    parts: tuple[Part, ...] = (
        heads("k", count, width, rope, pairing, window),
        heads("v", count, of_value, window=window),
    )
    if hasattr(layer, "idx_keys"):
        parts = (*parts, index_of_blocks(attention.indexer))
    mixed = "LinearAttention" in type(layer).__name__
    return Geometry("hybrid" if mixed else "attention", query_heads, parts, open=mixed)


def _sizes(config: Any, attention: Any) -> tuple[int | None, int | None, int | None]:
    """Return heads, width of a key and width of a value; None for what only a pass of the model will tell."""
    projected = getattr(getattr(attention, "k_proj", None), "out_features", None)
    if projected is not None:
        width = int(attention.head_dim)
        count, rest = divmod(int(projected), width)
        values = getattr(getattr(attention, "v_proj", None), "out_features", None)
        of_value = width if values is None else int(values) // max(1, count)
        return (None, None, None) if rest or not count else (count, width, of_value)
    given = getattr(config, "num_key_value_heads", None)
    if given is None or not isinstance(given, int):
        return None, None, None
    width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return given, width, width


def _rope(module: Any, config: Any, index: int) -> tuple[RopeState, Pairing]:
    """Tell how keys are rotated. Asks the function that the model uses: no setting says it for every family."""
    import torch

    settings = getattr(config, "rope_parameters", None) or {}
    if not settings and getattr(config, "rope_theta", None) is None:
        return "unknown", ""
    kinds = getattr(config, "layer_types", None) or ()
    own = settings.get(kinds[index]) if index < len(kinds) else None  # some have settings for each type of layer
    settings = own if isinstance(own, Mapping) else settings
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
        parts = (rows("latent", _size(attention, index, "kv_lora_rank")), rows("rope", rotated, rope, pairing))
    else:
        # Only the end of such a key is rotated.
        width, of_value = _size(attention, index, "qk_nope_head_dim") + rotated, _size(attention, index, "v_head_dim")
        parts = (heads("k", query_heads, width, "unknown"), heads("v", query_heads, of_value))
    kind = "latent" if parts[0].role == "latent" else "attention"
    indexer = getattr(attention, "indexer", None)
    if indexer is not None:
        if not layers or not hasattr(layers[index], "update_indexer"):
            found = type(layers[index]).__name__ if layers else "no layers"
            raise UnsupportedError(
                f"layer {index} has an index and no place for its rows", expected="DynamicIndexedLayer", found=found
            )
        parts = (*parts, rows("index", _size(indexer, index, "head_dim"), "unknown"))
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

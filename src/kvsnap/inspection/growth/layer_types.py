"""The type of each layer of a model: as a configuration lists it, or by the rule of the family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvsnap.errors import InputError, UnsupportedError
from kvsnap.inspection.growth.families import COMPUTED, EVERY, PATTERNED, STATES
from kvsnap.inspection.growth.settings import Settings, checked_count

__all__ = ["layer_types"]

_TYPES = {
    "full_attention": "full", "attention": "full", "sliding_attention": "sliding", "chunked_attention": "chunked",
    "indexed_attention": "indexed", "deepseek_sparse_attention": "indexed", "linear_attention": "linear",
    "mamba": "linear", "conv": "linear", "hybrid": "hybrid", "moe": "none", "mlp": "none",
    "compressed_sparse_attention": "csa", "heavily_compressed_attention": "hca", "minimax_m3_sparse": "blocks",
}  # fmt: skip
"""Names of types in configurations, and ours."""
_RATIOS = {0: "sliding", 4: "csa", 128: "hca"}


def layer_types(settings: Settings) -> tuple[str, ...]:
    """Return the type of each layer: `full`, `sliding`, `chunked`, `indexed`, `linear`, `hybrid`, `none`, `csa` ...

    Raise `UnsupportedError` for a type that is not known, `InputError` where there is not one for each layer.
    """
    family = settings.family
    listed = None if family in COMPUTED else settings.listed("layer_types") or settings.listed("layers_block_type")
    if family == "nemotron_h" and not listed:
        pattern = str(settings.get("hybrid_override_pattern") or "ME*-")
        checked_count(len(pattern))
        return tuple(_known(PATTERNED.get(letter), letter, i) for i, letter in enumerate(pattern))
    if listed:
        found = tuple(_known(_TYPES.get(str(t)), t, i) for i, t in enumerate(listed))
        if family == "nemotron_h":
            checked_count(len(found))
            return found
        count = settings.layers
        if len(found) != count and not (family == "deepseek_v4" and len(found) > count):
            raise InputError("layer_types does not fit the number of layers", expected=count, found=len(found))
        found = found[:count]
    else:
        found = _unlisted(settings, settings.layers)
    return (*found[:-1], "full") if family.startswith("gemma4") else found


def _known(ours: str | None, theirs: object, index: int) -> str:
    if ours is None:
        raise UnsupportedError(
            f"layer {index} is of a type that is not known", expected=", ".join(_TYPES), found=str(theirs)[:60]
        )
    return ours


def _unlisted(settings: Settings, count: int) -> tuple[str, ...]:
    family = settings.family
    if family in _RULES:
        return tuple(_RULES[family](settings, i, count) for i in range(count))
    if family in EVERY:
        name, every, most, other = EVERY[family]
        given = settings.get(name) if name else None
        if isinstance(given, str) and given:  # one letter for each layer of a period; the last layer is always full
            last = count - 1
            return tuple("full" if i == last or given[i % len(given)] == "G" else "sliding" for i in range(count))
        every = every if given is None else settings.number(name)
        if other == "full" and most == "sliding" and settings.window is None:
            return ("full",) * count
        return tuple(most if not every or (i + 1) % every else other for i in range(count))
    if family in STATES:
        return ("linear",) * count
    if settings.window:
        return ("sliding",) * count
    if settings.maybe("attention_chunk_size"):
        return ("chunked",) * count
    return ("full",) * count


def _late_windows(settings: Settings, i: int, _: int) -> str:
    return "sliding" if settings.window and i >= settings.number("max_window_layers") else "full"


def _rotated(settings: Settings, i: int) -> bool:
    """Tell whether a layer rotates its keys, in families where some do not."""
    given = settings.get("no_rope_layers")
    if isinstance(given, Sequence) and given:
        return bool(given[i]) if i < len(given) else True
    return (i + 1) % settings.number("no_rope_layer_interval", 4) != 0


def _chunked(settings: Settings, i: int, _: int) -> str:
    return "chunked" if settings.maybe("attention_chunk_size") and _rotated(settings, i) else "full"


def _smollm3(settings: Settings, i: int, _: int) -> str:
    return "sliding" if settings.window and not _rotated(settings, i) else "full"


def _period(settings: Settings, i: int, _: int) -> str:
    at = settings.number("attn_layer_offset")
    return "full" if i % max(1, settings.number("attn_layer_period")) == at else "linear"


def _zamba(settings: Settings, i: int, _: int) -> str:
    if i < 3:
        return "hybrid" if i == 2 else "linear"
    return "hybrid" if _period(settings, i - 3, 0) == "full" else "linear"


def _zamba2(_: Settings, i: int, __: int) -> str:
    return "hybrid" if i in (6, 12, 18, 24, 30, 36, 42, 47, 51) else "linear"


def _named(name: str, inside: str, outside: str) -> Callable[[Settings, int, int], str]:
    def rule(settings: Settings, i: int, _: int) -> str:
        return inside if i in (settings.numbers(name) or ()) else outside

    return rule


def _lfm2(settings: Settings, i: int, _: int) -> str:
    given = settings.numbers("full_attn_idxs")
    return "full" if given is None or i in given else "linear"


def _olmo_hybrid(_: Settings, i: int, count: int) -> str:
    return "full" if i % 4 == 3 or (count < 4 and i == count - 1) else "linear"


def _kimi(settings: Settings, i: int, _: int) -> str:
    own = settings.inner("linear_attn_config")
    if own.has("full_attn_layers") and own.has("kda_layers"):
        return "full" if i + 1 in (own.numbers("full_attn_layers") or ()) else "linear"  # counted from 1 there
    return "full" if i and i % 4 == 0 else "linear"


def _deepseek_v4(settings: Settings, i: int, _: int) -> str:
    given = settings.get("compress_ratios")
    if isinstance(given, Sequence) and i < len(given):
        return _known(_RATIOS.get(given[i]) if isinstance(given[i], int) else None, given[i], i)
    return "hca" if i < 2 or i % 2 == 0 else "csa"


def _minimax_m3(settings: Settings, i: int, _: int) -> str:
    own = settings.get("sparse_attention_config")
    given = own.get("sparse_attention_freq") if isinstance(own, Mapping) else None
    return "blocks" if isinstance(given, Sequence) and i < len(given) and given[i] else "full"


_RULES: Mapping[str, Callable[[Settings, int, int], str]] = {
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "dots1", "qwen2_vl_text", "qwen2_5_vl_text"), _late_windows),
    "llama4_text": _chunked,
    "smollm3": _smollm3,
    "jamba": _period,
    "zamba": _zamba,
    "zamba2": _zamba2,
    "bamba": _named("attn_layer_indices", "full", "linear"),
    "lfm2": _lfm2,
    "lfm2_moe": lambda *_: "full",
    "olmo_hybrid": _olmo_hybrid,
    "kimi_linear": _kimi,
    "falcon_h1": lambda *_: "hybrid",
    "deepseek_v32": lambda *_: "indexed",
    "glm_moe_dsa": lambda *_: "indexed",
    "deepseek_v4": _deepseek_v4,
    "minimax_m3_vl_text": _minimax_m3,
    "mimo_v2_flash": lambda _, i, __: "full" if i == 0 or (i + 1) % 6 == 0 else "sliding",
    "modernbert-decoder": lambda s, i, _: "sliding" if i % s.number("global_attn_every_n_layers", 3) else "full",
}
"""Families with a rule of their own for the type of a layer: settings, its number, the number of all."""

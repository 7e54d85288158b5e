"""What each layer of a model keeps, from its settings alone: rules by the type of a layer and the family of the model.

The shapes are those of transformers 5.24 on a CPU, which the captures of the tests are made with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvsnap.errors import InputError, UnsupportedError
from kvsnap.inspection.growth.answers import LayerGrowth, TensorGrowth, kind_of, what_of
from kvsnap.inspection.growth.families import DECODERS, STATES
from kvsnap.inspection.growth.layer_types import layer_types
from kvsnap.inspection.growth.settings import Settings
from kvsnap.tensors import Growth, TensorSpec

__all__ = ["NOT_UNDERSTOOD", "layers_kept"]

NOT_UNDERSTOOD = (
    "kv_lora_rank", "ssm", "mamba", "linear_", "conv_kernel", "state_size", "recurrent", "lru", "rwkv", "index_",
    "compress", "cross_attention", "retention", "hyena", "delta", "kda", "lightning", "sparse_attention",
    "kv_shared", "block_configs", "is_encoder_decoder", "hybrid", "rnn", "attn_layer", "layers_block_type",
)  # fmt: skip
"""Parts of names of settings that say that a family keeps more than keys and values."""


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor before it has a number: role, axes, sizes (0 at `row`), and how it grows."""

    role: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    growth: Growth = "grow"
    window: int = 0
    tokens_per_row: int = 1
    group: int = 0
    held: Literal["", "rest", "last", "codes"] = ""


def layers_kept(settings: Settings, dtype: str, encoder_rows: int | None) -> tuple[LayerGrowth, ...]:
    """Return what each layer keeps. Raise `UnsupportedError` and `InputError` naming what is not understood."""
    types = layer_types(settings)
    shared = min(settings.number("num_kv_shared_layers", 0), len(types))
    first_shared = len(types) - shared
    last_of = {kind: i for i, kind in enumerate(types[:first_shared])}
    layers: list[LayerGrowth] = []
    count = 0
    for index, kind in enumerate(types):
        shares = None
        if index >= first_shared:
            shares = last_of.get(kind)
            if shares is None and first_shared:
                raise InputError(f"layer {index} shares rows, and no layer of its type has any", found=kind)
        made = () if index >= first_shared or kind == "none" else _layer(settings.of_layer(index), kind, index, dtype)
        tensors = tuple(_numbered(one, index, count + place, encoder_rows) for place, one in enumerate(made))
        count += len(tensors)
        layers.append(
            LayerGrowth(
                index=index, kind=_kind(made, settings.family), what=what_of(tensors, shares), tensors=tensors,
                shares=shares,
            )
        )  # fmt: skip
    return tuple(layers)


def _numbered(made: _Made, layer: int, number: int, encoder_rows: int | None) -> TensorGrowth:
    spec = TensorSpec(
        id=number, name=f"layers.{layer}.{made.role}", layer=layer, role=made.role, dtype=made.dtype, axes=made.axes,
        shape=made.shape, growth=made.growth, row_axis=made.axes.index("row") if "row" in made.axes else -1,
        tokens_per_row=made.tokens_per_row, window=made.window,
    )  # fmt: skip
    fixed = (encoder_rows or 0) if made.growth == "static" else 1
    return TensorGrowth(kind=kind_of(spec), spec=spec, group=made.group, held=made.held, fixed_rows=fixed)


def _kind(made: Sequence[_Made], family: str) -> str:
    roles = {one.role for one in made}
    if not roles:
        return "none"
    if family in DECODERS:
        return "cross"
    if "latent" in roles:
        return "latent"
    if "k" in roles:
        return "hybrid" if roles & {"conv", "recurrent", "compressed"} else "attention"
    return "recurrent"


def _layer(s: Settings, kind: str, index: int, dtype: str) -> tuple[_Made, ...]:
    if kind in ("csa", "hca"):
        return tuple(_compressed(s, kind, dtype))
    if kind == "linear":
        return _states(s, dtype)
    if kind == "indexed" or (kind in ("full", "sliding") and s.maybe("kv_lora_rank")):
        if kind == "sliding":
            raise UnsupportedError(f"layer {index} has latent attention in a window, which is not supported yet")
        rows = (_rows("latent", s.number("kv_lora_rank"), dtype), _rows("rope", s.number("qk_rope_head_dim"), dtype))
        indexed = kind == "indexed" and _has_index(s, index)
        return (*rows, _rows("index", s.number("index_head_dim"), dtype)) if indexed else rows
    window = s.window if kind == "sliding" else s.maybe("attention_chunk_size") if kind == "chunked" else 0
    if window is None or (kind in ("sliding", "chunked") and window < 2):
        raise InputError(f"layer {index} has a window that holds nothing", expected="2 or more", found=window)
    parts = _attention(s, kind, dtype, window)
    if kind == "blocks":
        width = s.inner("sparse_attention_config").maybe("sparse_index_dim")
        return (*parts, _rows("index", width or s.number("index_head_dim"), dtype))
    if kind == "hybrid":
        return (*parts, *_states(s, dtype))
    if s.family in DECODERS:
        return (*parts, *(_Made(f"cross_{p.role}", p.axes, p.shape, dtype, "static") for p in parts))
    return parts


def _rows(role: str, width: int, dtype: str) -> _Made:
    return _Made(role, ("row", "dim"), (0, width), dtype)


def _has_index(s: Settings, index: int) -> bool:
    if s.family != "glm_moe_dsa":
        return True
    given = s.get("indexer_types") or s.get("index_topk_pattern")
    if isinstance(given, Sequence) and given:
        return str(given[index]).upper().startswith("F") if index < len(given) else True
    every, offset = max(1, s.number("index_topk_freq", 1)), s.number("index_skip_topk_offset", 2)
    return max(index - offset + 1, 0) % every == 0


def _attention(s: Settings, kind: str, dtype: str, window: int) -> tuple[_Made, _Made]:
    heads, width = _kv_heads(s, kind), _head_dim(s, kind)
    if not heads or not width:
        raise InputError(
            "keys and values need a head and a width of it", expected="1 or more", found=f"{heads} heads of {width}"
        )
    of_value = s.number("v_head_dim") if s.family == "mimo_v2_flash" else width
    growth: Growth = "window" if window else "grow"
    axes = ("head", "row", "dim")
    return (
        _Made("k", axes, (heads, 0, width), dtype, growth, window),
        _Made("v", axes, (heads, 0, of_value), dtype, growth, window),
    )


_ONE_FOR_EACH = frozenset({"modernbert-decoder"})
"""Families that have a key head for each query head, whatever `num_key_value_heads` says."""


def _kv_heads(s: Settings, kind: str) -> int:
    queries = s.maybe("heads")
    if s.family == "deepseek_v4":
        return 1
    if s.family == "falcon":
        if s.get("new_decoder_architecture"):
            return s.number("heads")  # each query head gets a copy before the cache
        return 1 if s.get("multi_query") else s.number("kv_heads", queries)
    if s.family == "gpt_bigcode":
        return 1 if s.get("multi_query") in (None, True) else s.number("heads")
    if s.family == "dbrx":
        return s.inner("attn_config").number("kv_n_heads", 1)
    if s.family in _ONE_FOR_EACH or (s.family in DECODERS and s.family != "t5_gemma_module"):
        return s.number("heads")
    of_all = s.maybe("num_global_key_value_heads")
    if s.family.startswith("gemma4") and kind == "full" and s.get("attention_k_eq_v") and of_all:
        return of_all
    found = s.number("kv_heads", queries)
    return 2 * found if s.family == "mimo_v2_flash" and kind == "sliding" else found


def _head_dim(s: Settings, kind: str) -> int:
    if s.family.startswith("gemma4") and kind == "full" and not s.has("per_layer_config"):
        return s.number("global_head_dim", 512)
    found = s.maybe("head_dim")
    if found:
        return found
    hidden, queries = s.number("hidden"), s.number("heads")
    if not queries:
        raise InputError("a model without query heads has no attention", found=0)
    return hidden * (2 if s.family in ("zamba", "zamba2") else 1) // queries


def _compressed(s: Settings, kind: str, dtype: str) -> Iterator[_Made]:
    yield from _attention(s, "sliding", dtype, s.window or 0)
    long, name = kind == "hca", "compress_rate_hca" if kind == "hca" else "compress_rate_csa"
    full_name = "heavily_compressed_attention" if long else "compressed_sparse_attention"
    group = s.maybe(name) or s.inner("compress_rates").maybe(full_name) or (128 if long else 4)
    sets = [("compressed", s.number("head_dim"))]
    if not long:
        sets.append(("index", s.number("index_head_dim")))
    for role, width in sets:
        yield _Made(role, ("row", "dim"), (0, width), dtype, tokens_per_row=group, group=group)
    # What waits for its row: values and gates. Where two groups overlap, there are two of each.
    for _, width in sets:
        for _ in range(2):
            shape = (0, width if long else 2 * width)
            yield _Made("buffer", ("row", "dim"), shape, dtype, "replaced", group=group, held="rest")
    if not long:
        for _, width in sets:
            for own_dtype in (dtype, "float32"):
                yield _Made("overlap", ("row", "dim"), (0, width), own_dtype, "replaced", group=group, held="last")


# -- states --------------------------------------------------------------------------------------------------------


def _states(s: Settings, dtype: str) -> tuple[_Made, ...]:
    how = STATES.get(s.family)
    if how is None:
        raise UnsupportedError(f"{s.family} has layers with states, and what they keep is not known")
    return _SHAPES[how](s, dtype)


def _conv(channels: int, taps: int, dtype: str) -> _Made:
    return _Made("conv", ("channel", "tap"), (channels, taps), dtype, "replaced")


def _recurrent(*shape: int, dtype: str = "float32") -> _Made:
    axes = ("channel", "tap") if len(shape) == 2 else ("head", "key", "value")
    return _Made("recurrent", axes, shape, dtype, "replaced")


def _delta(s: Settings, dtype: str) -> tuple[_Made, ...]:
    of_keys = s.number("linear_num_key_heads", s.maybe("heads"))
    of_values = s.number("linear_num_value_heads", s.maybe("heads"))
    key = s.number("linear_key_head_dim", int(0.75 * s.number("hidden") / max(1, of_keys)))
    value = s.number("linear_value_head_dim", 2 * key)
    channels = 2 * of_keys * key + of_values * value
    return _conv(channels, s.number("linear_conv_kernel_dim"), dtype), _recurrent(of_values, key, value)


def _kda(s: Settings, dtype: str) -> tuple[_Made, ...]:
    own = s.inner("linear_attn_config")
    heads, width = own.number("num_heads", s.number("linear_num_heads")), s.number("linear_head_dim")
    width = own.maybe("head_dim") or width
    taps = own.number("short_conv_kernel_size", s.number("linear_conv_kernel_dim"))
    return _conv(3 * heads * width, taps, dtype), _recurrent(heads, width, width)


def _mamba(s: Settings, dtype: str) -> tuple[_Made, ...]:
    given = None if s.family == "jamba" else s.maybe("intermediate_size")  # there it is that of something else
    inner = given or _times(s, ("expand", "mamba_expand"))
    return _conv(inner, _first(s, "conv_kernel", "mamba_d_conv"), dtype), _recurrent(
        inner, _first(s, "state_size", "mamba_d_state")
    )


def _mamba_heads(s: Settings, dtype: str) -> tuple[_Made, ...]:
    inner, heads = _times(s, ("mamba_expand",)), s.number("n_mamba_heads")
    return _conv(inner, s.number("mamba_d_conv"), dtype), _recurrent(
        heads, inner // max(1, heads), s.number("mamba_d_state")
    )


def _mamba2(s: Settings, dtype: str) -> tuple[_Made, ...]:
    heads = _first(s, "mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads")
    state, groups = _first(s, "ssm_state_size", "mamba_d_state", "state_size"), _groups(s)
    if s.family == "nemotron_h":
        inner = heads * s.number("mamba_head_dim")
    else:
        inner = s.maybe("mamba_d_ssm") or _times(s, ("mamba_expand", "expand"))
    width = inner // max(1, heads)
    taps = _first(s, "conv_kernel", "mamba_d_conv")
    return _conv(inner + 2 * groups * state, taps, dtype), _recurrent(heads, width, state)


def _groups(s: Settings) -> int:
    return _first(s, "mamba_n_groups", "mamba_ngroups", "n_groups")


def _lightning(s: Settings, dtype: str) -> tuple[_Made, ...]:
    heads, width = s.number("heads"), _head_dim(s, "full")
    return (_recurrent(heads, width, width, dtype=dtype),)


def _short(s: Settings, dtype: str) -> tuple[_Made, ...]:
    return (_conv(s.number("hidden"), s.number("conv_L_cache"), dtype),)


def _first(s: Settings, *names: str) -> int:
    return next((found for name in names if (found := s.maybe(name)) is not None), None) or s.number(names[0])


def _times(s: Settings, names: Sequence[str]) -> int:
    """Return the inner width: the hidden size times a factor, which may be a fraction."""
    factor: Any = next((found for name in names if (found := s.get(name)) is not None), 2)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < 1024:
        raise InputError(f"{names[0]} is no factor", expected="above 0", found=str(factor)[:60])
    return int(factor * s.number("hidden"))


_SHAPES: Mapping[str, Callable[[Settings, str], tuple[_Made, ...]]] = {
    "delta": _delta, "kda": _kda, "mamba": _mamba, "mamba2": _mamba2, "mamba_heads": _mamba_heads,
    "lightning": _lightning, "conv": _short,
}  # fmt: skip

"""The layers of a cache by kind, and what a kind is in words. From descriptions of tensors alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from kvsnap.inspection.described import LayerGroup, LayerSummary, PartSize
from kvsnap.tensors import Layer, TensorSpec

__all__ = ["Shape", "groups_of", "layer_summaries", "quantisation_words", "shapes_of"]

_STATES = ("conv", "recurrent", "buffer", "overlap", "cross_k", "cross_v", "other")
_NAMED = {"index": "index rows", "compressed": "compressed rows", "draft_k": "draft keys", "draft_v": "draft values"}


@dataclass(frozen=True, slots=True)
class Shape:
    """One layer as a file describes it."""

    index: int
    kind: str
    num_query_heads: int
    shares: int | None
    quantisation: str
    specs: tuple[TensorSpec, ...]


def shapes_of(layers: Iterable[Layer]) -> list[Shape]:
    """Return the layers of a snapshot as a file would describe them."""
    return [
        Shape(x.index, x.kind, x.num_query_heads, x.shares, x.quantisation, tuple(t.spec for t in x.tensors))
        for x in layers
    ]


def _heads(spec: TensorSpec) -> int:
    return spec.shape[spec.axes.index("head")] if "head" in spec.axes else 1


def _summary(shape: Shape) -> LayerSummary:
    by_role: dict[str, list[TensorSpec]] = {}
    for spec in shape.specs:
        by_role.setdefault(spec.role, []).append(spec)
    as_is = by_role.get("residual", []) if shape.quantisation else []  # keys, then values
    first = [by_role.get("k", []), by_role.get("latent", []), as_is[:1]]
    keys = next((specs for specs in first if specs), [])
    values = by_role.get("v", as_is[1:2])
    rope = by_role.get("rope", [])
    main = keys[0] if keys else None
    return LayerSummary(
        index=shape.index, kind=shape.kind, num_heads=sum(map(_heads, keys)), num_query_heads=shape.num_query_heads,
        head_dim=main.shape[-1] if main else 0, dtype=main.dtype if main else "",
        bytes_per_token=sum(s.nbytes(1) / s.tokens_per_row for s in shape.specs if s.grows),
        value_dim=values[0].shape[-1] if values else 0, rope_dim=rope[0].shape[-1] if rope else 0,
        window=main.window if main and main.growth == "window" else 0,
        tokens_per_row=max((s.tokens_per_row for s in shape.specs if s.grows), default=1), roles=tuple(by_role),
        shares=shape.shares, quantisation=shape.quantisation,
    )  # fmt: skip


def layer_summaries(
    shapes: Sequence[Shape], parts: Sequence[PartSize], state_bytes: Counter[int]
) -> tuple[LayerSummary, ...]:
    """Return each layer with the sizes of its parts; `state_bytes` counts, by layer, what does not grow."""
    stored: Counter[int] = Counter()
    decoded: Counter[int] = Counter()
    for part in parts:
        stored[part.layer] += part.stored
        decoded[part.layer] += part.decoded
    return tuple(
        replace(
            _summary(shape), state_bytes=state_bytes[shape.index], stored=stored[shape.index],
            decoded=decoded[shape.index],
        )
        for shape in shapes
    )  # fmt: skip


_ALIKE = tuple(
    f.name for f in fields(LayerSummary) if f.name not in ("index", "shares", "state_bytes", "stored", "decoded")
)


def groups_of(layers: Iterable[LayerSummary]) -> tuple[LayerGroup, ...]:
    """Return the layers by kind, in the order in which each kind comes first."""
    alike: dict[tuple[object, ...], list[LayerSummary]] = {}
    for layer in layers:
        alike.setdefault((*(getattr(layer, name) for name in _ALIKE), layer.shares is None), []).append(layer)
    return tuple(_group(same) for same in alike.values())


def _group(same: Sequence[LayerSummary]) -> LayerGroup:
    one = same[0]
    return LayerGroup(
        kind=one.kind, layers=tuple(x.index for x in same), text=_words(same), num_heads=one.num_heads,
        num_query_heads=one.num_query_heads, head_dim=one.head_dim, value_dim=one.value_dim, rope_dim=one.rope_dim,
        dtype=one.dtype, window=one.window, tokens_per_row=one.tokens_per_row, roles=one.roles,
        shares=one.shares is not None, quantisation=one.quantisation,
        bytes_per_token=sum(x.bytes_per_token for x in same), state_bytes=sum(x.state_bytes for x in same),
        stored=sum(x.stored for x in same), decoded=sum(x.decoded for x in same),
    )  # fmt: skip


def _words(same: Sequence[LayerSummary]) -> str:
    one = same[0]
    n = f"{len(same):,} "
    layers = "layer" if len(same) == 1 else "layers"
    if one.shares is not None:
        return f"{n}{layers} without a cache of their own: they use that of another layer"
    if not one.roles:
        return f"{n}{layers} without a cache"
    name = "sliding" if one.window else one.kind
    window = f" (window {one.window:,})" if one.window else ""
    told = [_rows_words(one)] if one.head_dim else []
    told += [f"one row for {one.tokens_per_row} tokens"] if one.tokens_per_row > 1 else []
    told += [_NAMED[role] for role in one.roles if role in _NAMED]
    states = [role for role in one.roles if role in _STATES]
    if states:
        cross = [role for role in states if role.startswith("cross")]
        rest = [role for role in states if role not in cross and (role != "other" or not (cross or one.head_dim))]
        told += ["keys and values of an encoder"] if cross else []
        told += [f"{', '.join(rest)} states{_of_bytes(same)}"] if rest else []
        told += ["others kept as they are"] if "other" in states and not cross and one.head_dim else []
    told += [one.dtype] if one.dtype else []
    told += [quantisation_words(one.quantisation)] if one.quantisation else []
    return f"{n}{name} {layers}{window}: {', '.join(told)}" if told else f"{n}{name} {layers}{window}"


def _of_bytes(same: Sequence[LayerSummary]) -> str:
    sizes = {one.state_bytes for one in same}
    return f" of {sizes.pop():,} bytes" if len(sizes) == 1 and 0 not in sizes else ""


def _rows_words(one: LayerSummary) -> str:
    if "latent" in one.roles and "k" not in one.roles:
        return f"latent rows of {one.head_dim:,}" + (f" and rope rows of {one.rope_dim:,}" if one.rope_dim else "")
    apart = f", values of {one.value_dim:,}" if one.value_dim not in (0, one.head_dim) else ""
    asked = f" ({one.num_query_heads:,} query heads)" if one.num_query_heads > one.num_heads else ""
    return f"{one.num_heads:,} {'head' if one.num_heads == 1 else 'heads'} of {one.head_dim:,}{apart}{asked}"


def quantisation_words(text: str) -> str:
    """Return in words how a cache is quantised; a text that is not known here as it stands."""
    try:
        data = json.loads(text)
        kind, bits = data["kind"], int(data["bits"])
        group, residual = int(data.get("group", 0)), int(data.get("residual", 0))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return text
    told = [f"kept as codes of {bits} {'bit' if bits == 1 else 'bits'} ({kind})"]
    told += [f"a scale for {group} values"] if group else ["a scale for each tensor"] if kind == "fp8" else []
    told += [f"up to {residual} rows as they are"] if residual else []
    return ", ".join(told)

"""The JSON payloads of a `.kvsnap` file as data: LAYOUT, NOTE and the sampler of a STATE. Spec sections 6, 8 and 9."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from kvsnap.errors import FormatError, InputError, UnsupportedError
from kvsnap.formats.native.members import Members
from kvsnap.formats.native.tables import canonical_json, parse_json
from kvsnap.layout import RandomState, Sampler, SamplerState, Snapshot
from kvsnap.tensors import (
    DTYPES,
    LAYER_KINDS,
    OF_NO_LAYER,
    ROLES,
    Growth,
    Layer,
    Pairing,
    RopeState,
    Shard,
    Tensor,
    TensorSpec,
    numpy_dtype,
)

__all__ = [
    "Geometry",
    "LayerShape",
    "geometry_of",
    "pack_layout",
    "pack_sampler",
    "pack_state",
    "parse_layout",
    "parse_note",
    "parse_proof",
    "parse_sampler",
    "parse_token_offset",
]

MAX_TENSORS, MAX_AXES, MAX_LAYERS, MAX_ROW_BYTES = 65_536, 8, 65_536, 2**40
MAX_SHARDS = 65_536
_DIGEST = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class LayerShape:
    """A layer without its values: what LAYOUT says of it."""

    kind: str
    num_query_heads: int
    shares: int | None
    tensors: tuple[int, ...]
    quantisation: str = ""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What LAYOUT says: architecture, tensors (logits and draft too), layers, and of which whole it is a part."""

    architecture: str
    tensors: tuple[TensorSpec, ...]
    layers: tuple[LayerShape, ...]
    shard: Shard | None = None

    def build(self, tensors: Mapping[int, Tensor]) -> tuple[Layer, ...]:
        """Return the layers, with the values given by tensor id. A tensor without values is left out."""
        return tuple(
            Layer(
                index=i,
                kind=shape.kind,
                num_query_heads=shape.num_query_heads,
                shares=shape.shares,
                quantisation=shape.quantisation,
                tensors=tuple(tensors[t] for t in shape.tensors if t in tensors),
            )
            for i, shape in enumerate(self.layers)
        )


def geometry_of(snapshot: Snapshot) -> Geometry:
    """Return the geometry of a snapshot. Raise `InputError` for ids used twice or layers out of order."""
    tensors = [t.spec for t in [*snapshot.tensors(), *snapshot.loose()]]
    if len({t.id for t in tensors}) != len(tensors):
        raise InputError("two tensors of a snapshot have one id")
    layers = []
    for place, layer in enumerate(snapshot.layers):
        if layer.index != place:
            raise InputError("layers of a snapshot are out of order", expected=place, found=layer.index)
        if layer.kind not in LAYER_KINDS:
            raise InputError(
                f"layer {place} is of an unknown kind", expected=f"one of {' '.join(LAYER_KINDS)}", found=layer.kind
            )
        ids = tuple(t.spec.id for t in layer.tensors)
        layers.append(LayerShape(layer.kind, layer.num_query_heads, layer.shares, ids, layer.quantisation))
    shard = None if snapshot.shard is None else snapshot.shard.unproven()
    return Geometry(snapshot.architecture, tuple(tensors), tuple(layers), shard)


def pack_layout(geometry: Geometry) -> bytes:
    """Return the payload of a LAYOUT record. Raise `UnsupportedError` for what no reader would take."""
    names, shard = TensorSpec.__dataclass_fields__, geometry.shard
    lists: dict[str, Any] = {
        "tensors": [{name: getattr(spec, name) for name in names} for spec in geometry.tensors],
        "layers": [
            {
                "index": i,
                "kind": layer.kind,
                "num_query_heads": layer.num_query_heads,
                "shares": layer.shares,
                "tensors": list(layer.tensors),
                **({"quantisation": layer.quantisation} if layer.quantisation else {}),
            }
            for i, layer in enumerate(geometry.layers)
        ],
    }
    if shard is not None:  # a reader that does not know of shards finds no tensors, and refuses
        heads = [list(pair) for pair in shard.heads]
        lists = {"shard": {"index": shard.index, "count": shard.count, "heads": heads, **lists}}
    payload = canonical_json({"architecture": geometry.architecture, **lists})
    try:
        parse_layout(payload, None, 0)  # numbers of a foreign file may be beyond the limits of ours
    except FormatError as error:
        raise UnsupportedError(error.message, expected=error.expected, found=error.found) from error
    return payload


def _spec(data: Any, path: str | None, offset: int) -> TensorSpec:
    r = Members(data, "LAYOUT tensor", path, offset)
    shape = tuple(r.check_integer("shape", size, 0, 2**40) for size in r.items("shape", MAX_AXES))
    axes = tuple(r.items("axes", MAX_AXES))
    if not all(isinstance(axis, str) for axis in axes):
        r.refuse("axes", "a list of text", axes)
    spec = TensorSpec(
        id=r.integer("id", 0, 2**32 - 1),
        name=r.text("name"),
        layer=r.integer("layer", -1, MAX_LAYERS),
        role=r.word("role", ROLES),
        dtype=r.word("dtype", tuple(DTYPES)),
        axes=axes,
        shape=shape,
        growth=r.word("growth", get_args(Growth)),  # type: ignore[arg-type] # one of the choices
        row_axis=r.integer("row_axis", -1, len(shape) - 1),
        tokens_per_row=r.integer("tokens_per_row", 1, 2**20),
        window=r.integer("window", 0, 2**40),
        rope=r.word("rope", get_args(RopeState)),  # type: ignore[arg-type] # one of the choices
        pairing=r.word("pairing", get_args(Pairing)),  # type: ignore[arg-type] # one of the choices
    )
    row_bytes = numpy_dtype(spec.dtype).itemsize
    for size in shape:
        row_bytes *= max(size, 1)
    if row_bytes > MAX_ROW_BYTES:
        r.refuse("shape", f"rows of at most {MAX_ROW_BYTES} bytes", list(shape))
    if len(axes) != len(shape):
        r.refuse("axes", f"{len(shape)} names", len(axes))
    if spec.role in OF_NO_LAYER and spec.growth != "replaced":
        r.refuse("growth", f"replaced, as {spec.role} is", spec.growth)
    if (spec.row_axis >= 0 and shape[spec.row_axis] != 0) or (spec.grows and spec.row_axis < 0):
        r.refuse("row_axis", "an axis of length 0, needed by a tensor that grows", spec.row_axis)
    return spec


def parse_layout(raw: bytes, path: str | None, offset: int) -> Geometry:
    """Parse the payload of a LAYOUT record. Raise `FormatError` naming the member, `VersionError` an unknown word."""
    outer = r = Members(parse_json(raw, path, offset), "LAYOUT", path, offset)
    if "shard" in r.data:
        if "tensors" in r.data or "layers" in r.data:
            r.refuse("shard", "tensors and layers inside it only", "some beside it")
        r = Members(r.data["shard"], "LAYOUT shard", path, offset)
    tensors = tuple(_spec(item, path, offset) for item in r.items("tensors", MAX_TENSORS))
    known = {spec.id for spec in tensors}
    if len(known) != len(tensors):
        r.refuse("tensors", "one id each", "an id used twice")
    layers = []
    items = r.items("layers", MAX_LAYERS)
    for place, item in enumerate(items):
        row = Members(item, f"LAYOUT layer {place}", path, offset)
        row.integer("index", place, place)
        shares = row.data.get("shares")
        if shares is not None:
            row.check_integer("shares", shares, 0, len(items) - 1)
            if not isinstance(items[shares], dict) or items[shares].get("shares") is not None:
                row.refuse("shares", "a layer with tensors of its own", shares)
        ids = tuple(row.check_integer("tensors", t, 0, 2**32 - 1) for t in row.items("tensors", MAX_TENSORS))
        if not known.issuperset(ids):
            row.refuse("tensors", "ids of tensors in this LAYOUT", sorted(set(ids) - known)[:4])
        quantised = row.text("quantisation") if "quantisation" in row.data else ""
        layers.append(
            LayerShape(row.word("kind", LAYER_KINDS), row.integer("num_query_heads", 0, 2**20), shares, ids, quantised)
        )
    shard = None if r is outer else _shard(r, tensors)
    return Geometry(outer.text("architecture"), tensors, tuple(layers), shard)


def _shard(r: Members, tensors: Sequence[TensorSpec]) -> Shard:
    count = r.integer("count", 2, MAX_SHARDS)
    heads = tuple(r.pair("heads", item, 2**32 - 1, 2**40) for item in r.items("heads", MAX_TENSORS))
    shard = Shard(index=r.integer("index", 0, count - 1), count=count, heads=heads)
    whole = dict(heads)
    if len(whole) != len(heads) or not whole.keys() <= {spec.id for spec in tensors}:
        r.refuse("heads", "ids of tensors in this LAYOUT, one each", [number for number, _ in heads])
    for spec in tensors:
        n_heads = whole.get(spec.id)
        if ("head" in spec.axes) != (n_heads is not None):
            r.refuse("heads", "exactly the tensors with heads", f"tensor {spec.id} with axes {' '.join(spec.axes)}")
        if n_heads is None:
            continue
        first, stop = shard.span(n_heads) if shard.divides(n_heads) else (0, -1)
        if spec.axes.count("head") != 1 or spec.shape[spec.axes.index("head")] != stop - first:
            found = f"{spec.shape[spec.axes.index('head')]} of {n_heads} for tensor {spec.id}"
            r.refuse("heads", f"the heads of one of {count} ranks", found)
    return shard


def pack_sampler(state: SamplerState | None, **more: Any) -> bytes:
    """Return the meta of a STATE record, with more members."""
    data: dict[str, Any] = {"sampler": None, "random": None, **more}
    if state is not None:
        data["sampler"] = {name: getattr(state.settings, name) for name in Sampler.__dataclass_fields__}
        data["random"] = {name: getattr(state.random, name) for name in RandomState.__dataclass_fields__}
    return canonical_json(data)


def pack_state(snapshot: Snapshot) -> bytes:
    """Return the meta of the STATE of a snapshot.

    That is the sampler, the next position where it is not the usual one, and of a shard what proves its place.
    """
    more: dict[str, Any] = {}
    last = snapshot.positions[-1] if snapshot.positions else None
    if snapshot.token_offset != (last.start + last.count if last else 0):
        more["token_offset"] = snapshot.token_offset
    if snapshot.shard is not None and snapshot.shard.parts:
        more["shard"] = {"parts": list(snapshot.shard.parts), "starts": [list(pair) for pair in snapshot.shard.starts]}
    return pack_sampler(snapshot.sampler, **more)


def parse_proof(raw: bytes, shard: Shard | None, path: str | None, offset: int) -> Shard | None:
    """Return a shard with what the meta of a STATE record proves of it. Raise `FormatError` naming the member."""
    data = parse_json(raw, path, offset) if raw else {}
    if shard is None or data.get("shard") is None:
        return shard
    r = Members(data["shard"], "STATE shard", path, offset)
    parts = tuple(r.items("parts", shard.count))
    if len(parts) != shard.count or not all(isinstance(p, str) and _DIGEST.fullmatch(p) for p in parts):
        r.refuse("parts", f"{shard.count} digests of 32 hex digits", parts)
    starts = tuple(r.pair("starts", item, 2**32 - 1, 2**40) for item in r.items("starts", MAX_TENSORS))
    return replace(shard, parts=parts, starts=starts)


def parse_token_offset(raw: bytes, path: str | None, offset: int) -> int | None:
    """Return the position that the meta of a STATE record names, or None for the one behind the last row."""
    data = parse_json(raw, path, offset) if raw else {}
    if "token_offset" not in data:
        return None
    return Members(data, "STATE", path, offset).integer("token_offset", -(2**62), 2**62)


def parse_sampler(raw: bytes, path: str | None, offset: int) -> SamplerState | None:
    """Parse the meta of a STATE record. Raise `FormatError` naming the member."""
    data = parse_json(raw, path, offset) if raw else {}
    if data.get("sampler") is None or data.get("random") is None:
        return None
    s = Members(data["sampler"], "STATE sampler", path, offset)
    n = Members(data["random"], "STATE random", path, offset)
    random = RandomState(n.integer("seed", 0, 2**64 - 1), n.integer("draws", 0, 2**63), n.text("algorithm"))
    seed = None if s.data.get("seed") is None else s.integer("seed", 0, 2**64 - 1)
    try:
        settings = Sampler(
            repetition_penalty=s.number("repetition_penalty"),
            temperature=s.number("temperature"),
            top_k=s.integer("top_k", 0, 2**31),
            top_p=s.number("top_p"),
            min_p=s.number("min_p"),
            seed=seed,
        )
    except InputError as error:
        s.refuse("settings", str(error.expected), error.found)
    return SamplerState(settings, random)


def pack_note(metadata: Mapping[str, str]) -> bytes:
    """Return the payload of a NOTE record. Raise `InputError` for anything but text."""
    entries: Mapping[Any, Any] = metadata  # what callers hand over is not always what the types say
    for name, value in entries.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InputError("metadata must be text under text", expected="str: str", found=f"{name!r}: {value!r}"[:80])
    return canonical_json({"metadata": dict(metadata)})


def parse_note(raw: bytes, path: str | None, offset: int) -> dict[str, str]:
    """Parse the payload of a NOTE record: the user's metadata."""
    r = Members(parse_json(raw, path, offset), "NOTE", path, offset)
    metadata = r.data.get("metadata")
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        r.refuse("metadata", "an object of text", metadata)
    return metadata


def same_tensors(a: Sequence[TensorSpec], b: Sequence[TensorSpec]) -> str | None:
    """Return what differs between two lists of tensors, in words, or None."""
    left, right = {s.id: s for s in a}, {s.id: s for s in b}
    for number in sorted(left.keys() | right.keys()):
        if left.get(number) != right.get(number):
            return f"tensor {number}: {left.get(number)} against {right.get(number)}"
    return None

"""Tensor-parallel shards: a snapshot divided by heads into one part for each rank, and put together again.

Which part a shard is stands in `Snapshot.shard`, with the digests of all parts of the very snapshot that was split.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import xxhash

from kvsnap.errors import DamagedError, InputError, UnsupportedError
from kvsnap.layout import PositionRun, Snapshot, join_positions, join_runs
from kvsnap.tensors import Array, Layer, Shard, Tensor, TensorSpec

__all__ = ["join", "split"]

MOST = 65_536
_BY_GROUPS = ("k", "v", "cross_k", "cross_v", "draft_k", "draft_v")
Digests = dict[tuple[int, int, int], bytes]


# -- dividing ------------------------------------------------------------------------------------------------------


def split(snapshot: Snapshot, n: int) -> tuple[Snapshot, ...]:
    """Divide a snapshot into `n` shards, one for each tensor-parallel rank; shard `i` is that of rank `i`.

    Every tensor with an axis `head` is divided along it into `n` groups of neighbours, as views. With fewer heads than
    ranks each head goes to `n / heads` neighbouring ranks. Tensors without such an axis (latent, rope and index rows;
    states and convolutions without heads), logits, ids, sampler and identity are the same in every shard.
    `num_query_heads` is divided. Every value is read once, for the digests that tie the shards together.

    Raise `InputError` for `n` below 2, a partial capture or a shard, and `UnsupportedError` naming the layer and both
    numbers where heads cannot be shared out evenly.
    """
    if not 2 <= n <= MOST:
        raise InputError("a snapshot is split into 2 shards or more", expected=f"2 to {MOST}", found=n)
    if snapshot.shard is not None:
        raise InputError("only a whole snapshot is split: join its shards first", found=snapshot.shard)
    if snapshot.row_start:
        raise InputError("a partial capture cannot be split", found=f"rows from {snapshot.row_start}")
    if any(not 0 <= token < 2**31 for token in snapshot.tokens):
        raise InputError("token ids out of range", expected="0 to 2**31 - 1")
    heads = tuple(pair for layer in snapshot.layers for pair in _heads_of(layer, n))
    starts = tuple((t.spec.id, t.start) for t in snapshot.tensors() if t.spec.growth == "window")
    # Not what a foreign format keeps to write the same file again: the whole would be in it.
    source = {name: value for name, value in snapshot.source.items() if name not in ("loaded", "path")}
    shards = [Shard(index=i, count=n, heads=heads) for i in range(n)]
    made = [
        replace(snapshot, layers=tuple(_layer_of(x, s) for x in snapshot.layers), shard=s, source=source, draft=None)
        for s in shards
    ]
    known: Digests = {}
    parts = tuple(_digest(part, known) for part in made)
    return tuple(replace(m, shard=replace(s, parts=parts, starts=starts)) for m, s in zip(made, shards, strict=True))


def _heads_of(layer: Layer, n: int) -> Iterator[tuple[int, int]]:
    """Yield id and number of heads of each tensor of a layer that is divided."""
    if layer.quantisation:  # what belongs to one head cannot be told from the codes
        raise UnsupportedError(f"layer {layer.index}: its keys and values are codes, which cannot be split by heads")
    if layer.num_query_heads % n:
        raise UnsupportedError(
            f"layer {layer.index}: {layer.num_query_heads} query heads cannot be shared out to {n} ranks evenly"
        )
    roles = [t.role for t in layer.tensors if "head" in t.spec.axes]
    ragged = next((role for role in _BY_GROUPS if roles.count(role) > 1), None)
    if ragged is not None:
        raise UnsupportedError(
            f"layer {layer.index}: the heads of {ragged} stand in {roles.count(ragged)} tensors: cannot be split"
        )
    for spec in (t.spec for t in layer.tensors if "head" in t.spec.axes):
        axis = spec.axes.index("head")
        heads = spec.shape[axis]
        if axis == spec.row_axis or spec.axes.count("head") != 1:
            raise UnsupportedError(f"layer {layer.index}: {spec.name} has no single axis of heads to split along")
        if not Shard(index=0, count=n).divides(heads):
            raise UnsupportedError(
                f"layer {layer.index}: the {heads} heads of {spec.name} cannot be shared out to {n} ranks evenly",
                expected=f"{heads} a multiple of {n}, or {n} a multiple of {heads}",
            )
        yield spec.id, heads


def _layer_of(layer: Layer, shard: Shard) -> Layer:
    heads = dict(shard.heads)
    tensors = tuple(_tensor_of(t, shard.span(heads[t.spec.id])) if t.spec.id in heads else t for t in layer.tensors)
    return replace(layer, tensors=tensors, num_query_heads=layer.num_query_heads // shard.count, by_head=())


def _tensor_of(tensor: Tensor, span: tuple[int, int]) -> Tensor:
    axis = tensor.spec.axes.index("head")
    index = (*(slice(None),) * axis, slice(*span))
    return Tensor(_with_heads(tensor.spec, span[1] - span[0]), tensor.array[index], start=tensor.start,
                  bound=tensor.bound)  # fmt: skip


def _with_heads(spec: TensorSpec, heads: int) -> TensorSpec:
    return replace(
        spec, shape=tuple(heads if name == "head" else n for name, n in zip(spec.axes, spec.shape, strict=True))
    )


# -- what ties shards together -------------------------------------------------------------------------------------


def _bytes_of(values: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _digest(snapshot: Snapshot, known: Digests) -> str:
    """Return the digest of one shard (docs/spec/file.md section 9), which needs every value of it.

    `known` keeps the digests of the values that several shards have in common.
    """
    shard = snapshot.shard
    assert shard is not None  # noqa: S101 # the callers see to it
    heads = dict(shard.heads)
    counts = (len(snapshot.tokens), snapshot.n_rows, snapshot.n_pending)
    positions = join_positions((), snapshot.positions or (PositionRun(0, snapshot.n_rows),))
    made = xxhash.xxh3_128(struct.pack("<5Qq", shard.index, shard.count, *counts, snapshot.token_offset))
    made.update(np.asarray(snapshot.tokens, dtype="<i4").tobytes())
    made.update(b"".join(struct.pack("<qQ", run.start, run.count) for run in positions))
    tensors = [*snapshot.tensors(), *([snapshot.logits] if snapshot.logits else [])]
    for t in sorted(tensors, key=lambda t: t.spec.id):
        key = (t.spec.id, *(shard.span(heads[t.spec.id]) if t.spec.id in heads else (-1, -1)))
        if key not in known:
            known[key] = xxhash.xxh3_128_digest(_bytes_of(t.values()).data)
        made.update(t.spec.dtype.encode() + b"\0")
        made.update(struct.pack(f"<{3 + len(t.shape)}Q", t.spec.id, t.start, len(t.shape), *t.shape) + known[key])
    return str(made.hexdigest())


# -- putting together ----------------------------------------------------------------------------------------------


def join(shards: Sequence[Snapshot]) -> Snapshot:
    """Put all shards of one snapshot together again; `join(split(s, n))` is `s`, bit for bit.

    Shard `i` must stand at position `i`. Every value is read, what the shards have in common is compared byte by byte,
    and each shard with its digest. Metadata on which the shards disagree is left out.

    Raise `InputError` naming the position for shards that are swapped, missing, there twice, of another count, of
    another snapshot or of another length of it, or were cut since; `DamagedError` for values that are not what was
    split.
    """
    places = _places(shards)
    first = shards[0]
    for position, (snapshot, shard) in enumerate(zip(shards, places, strict=True)):
        _check_same(position, first, snapshot)
        if not shard.parts:
            raise InputError(
                f"position {position}: {shard} was cut or added to since it was split, so nothing proves what it is a "
                "part of; join first, then cut"
            )
        if (shard.parts, shard.starts) != (places[0].parts, places[0].starts):
            raise InputError(
                f"position {position}: {shard} is a shard of another snapshot than that at position 0",
                expected=places[0].parts[0], found=shard.parts[0],
            )  # fmt: skip
    wholes = [_within(snapshot, shard) for snapshot, shard in zip(shards, places, strict=True)]
    _check_copies(wholes, places)
    for position, (snapshot, shard) in enumerate(zip(wholes, places, strict=True)):
        found = _digest(snapshot, {})
        if found != shard.parts[position]:
            lossy = f"; its values may be off by up to {snapshot.bound:.3g}" if snapshot.bound else ""
            raise DamagedError(
                f"position {position}: {shard} is not what was split{lossy}",
                path=snapshot.source.get("path"), expected=shard.parts[position], found=found,
            )  # fmt: skip
    common = [set(s.metadata.items()) for s in shards]
    metadata = {k: v for k, v in first.metadata.items() if all((k, v) in items for items in common)}
    layers = tuple(_joined([s.layers[i] for s in wholes], places[0]) for i in range(len(first.layers)))
    return replace(wholes[0], layers=layers, shard=None, source={}, metadata=metadata)


def _places(shards: Sequence[Snapshot]) -> list[Shard]:
    """Return which shard stands at each position; refuse any but all of one count, each once and in order."""
    if not shards:
        raise InputError("no shards were given to join")
    found: list[Shard] = []
    for position, snapshot in enumerate(shards):
        shard = getattr(snapshot, "shard", None)
        if shard is None:
            raise InputError(f"position {position} is no shard", expected="one that split made", found=snapshot)
        if found and shard.count != found[0].count:
            raise InputError(
                f"position {position} is a shard of another count", expected=f"one of {found[0].count}", found=shard
            )
        found.append(shard)
    indices = [shard.index for shard in found]
    for position, index in enumerate(indices):
        if indices.index(index) != position:
            raise InputError(
                f"{found[position]} is there twice", found=f"positions {indices.index(index)} and {position}"
            )
    missing = sorted(set(range(found[0].count)) - set(indices))
    if missing:
        raise InputError(
            f"shard {', '.join(map(str, missing[:8]))} of {found[0].count} is missing",
            expected=f"{found[0].count} shards", found=len(found),
        )  # fmt: skip
    for position, shard in enumerate(found):
        if shard.index != position:
            raise InputError(
                f"position {position} holds another shard", expected=f"shard {position} of {shard.count}", found=shard
            )
    return found


def _check_same(position: int, first: Snapshot, other: Snapshot) -> None:
    """Raise `InputError` where a shard cannot be of the same snapshot as the first one."""

    def facts(s: Snapshot) -> Mapping[str, object]:
        assert s.shard is not None  # noqa: S101 # _places has seen to it
        state = [*s.tensors(), *([s.logits] if s.logits else [])]
        return {
            "architecture": s.architecture,
            "number of layers": len(s.layers),
            "kinds of layers": [(x.kind, x.num_query_heads, x.shares, len(x.tensors)) for x in s.layers],
            "number of tokens": len(s.tokens),
            "number of rows": s.n_rows,
            "number of pending tokens": s.n_pending,
            "next position": s.token_offset,
            "positions": join_positions((), s.positions),
            "runs": join_runs((), s.runs),
            "division of heads": s.shard.heads,
            **{f"dtype of {t.name}": t.spec.dtype for t in state},
            **{f"shape of {t.name}": t.shape for t in state if t.spec.growth != "window"},
            **{f"description of {t.name}": t.spec for t in state},
            "sampler": s.sampler,
            "identity": s.identity,
            "text": s.text,
            "messages": s.messages,
        }

    left, right = facts(first), facts(other)
    for name in dict.fromkeys([*left, *right]):
        if left.get(name) != right.get(name):
            raise InputError(
                f"position {position}: {name} differs from that at position 0",
                expected=_shown(left.get(name)), found=_shown(right.get(name)),
            )  # fmt: skip
    for place, (a, b) in enumerate(zip(first.tokens, other.tokens, strict=True)):
        if a != b:
            raise InputError(f"position {position}: token {place} differs from position 0", expected=a, found=b)


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _within(snapshot: Snapshot, shard: Shard) -> Snapshot:
    """Leave out the window rows that a session holds beyond those that were split."""
    starts = dict(shard.starts)

    def cut(t: Tensor) -> Tensor:
        start = starts.get(t.spec.id, t.start)
        return t.rows(start, t.start + t.n_rows) if start > t.start else t

    return replace(
        snapshot, layers=tuple(replace(x, tensors=tuple(map(cut, x.tensors)), by_head=()) for x in snapshot.layers)
    )


def _check_copies(shards: Sequence[Snapshot], places: Sequence[Shard]) -> None:
    """Compare byte by byte what several shards hold. Raise `DamagedError` naming the tensor and both positions."""
    heads = dict(places[0].heads)
    tensors = [[*s.tensors(), *([s.logits] if s.logits else [])] for s in shards]
    for same in zip(*tensors, strict=True):
        of = heads.get(same[0].spec.id)
        spans = [shard.span(of) if of is not None else None for shard in places]
        for position in range(1, len(shards)):
            source = spans.index(spans[position])
            if source != position and not np.array_equal(
                _bytes_of(same[position].values()), _bytes_of(same[source].values())
            ):
                raise DamagedError(
                    f"position {position}: {same[0].name} is not what position {source} has, and both should be equal",
                    path=shards[position].source.get("path"),
                )


def _joined(layers: Sequence[Layer], shard: Shard) -> Layer:
    heads, tensors = dict(shard.heads), []
    for same in zip(*(layer.tensors for layer in layers), strict=True):
        tensor = same[0]
        if tensor.spec.id in heads:
            tensor = _whole(same, shard, heads[tensor.spec.id])
        tensors.append(tensor)
    return replace(layers[0], tensors=tuple(tensors), num_query_heads=layers[0].num_query_heads * shard.count)


def _whole(parts: Sequence[Tensor], shard: Shard, heads: int) -> Tensor:
    spec = parts[0].spec
    spans = [replace(shard, index=i).span(heads) for i in range(shard.count)]
    values = [p.array for i, p in enumerate(parts) if spans.index(spans[i]) == i]
    made = np.concatenate(values, axis=spec.axes.index("head"))
    return Tensor(_with_heads(spec, heads), made, start=parts[0].start, bound=max(p.bound for p in parts))

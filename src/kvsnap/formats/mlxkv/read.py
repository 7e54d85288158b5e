"""From a parsed file to a snapshot."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.formats.mlxkv.model import ENCODINGS, MODES, Q8_NATIVE, File, LayerEntry, StoredTensor, TensorData
from kvsnap.formats.mlxkv.shapes import HeadShape, head_shapes
from kvsnap.formats.mlxkv.tokens import history
from kvsnap.formats.mlxkv.values import bound_of, decode, decode_groups, native_groups, values_of, widened
from kvsnap.identity import Identity
from kvsnap.layout import PositionRun, Snapshot
from kvsnap.tensors import Growth, Layer, Tensor, TensorSpec, numpy_dtype

__all__ = ["Loaded", "resolve", "slab_differences", "to_snapshot"]

Array = npt.NDArray[Any]

_SCALE = 4  # bytes of the scale that each tensor of q8 codes has
MAX_NUMBER = 4096
"""Layers with a larger number are kept in the file, but get no place in the snapshot."""


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A snapshot as it was made from a file, so that a later save can tell that nothing has changed since."""

    file: File
    layers: tuple[Layer, ...]
    fields: tuple[Any, ...]
    logits: Tensor | None

    @staticmethod
    def fields_of(snapshot: Snapshot) -> tuple[Any, ...]:
        """Return what a file is made of, besides the layers."""
        s = snapshot
        return (s.architecture, s.tokens, s.runs, s.n_rows, s.row_start, s.n_pending, s.token_offset, s.positions)

    def is_still(self, snapshot: Snapshot) -> bool:
        """True when the snapshot holds what was loaded."""
        same = snapshot.layers is self.layers and snapshot.logits is self.logits
        return same and self.fields_of(snapshot) == self.fields


class _Heads:
    """The source of one tensor made of the tensors of some heads, `[head, row, dim]`."""

    __slots__ = ("dtype", "heads", "shape")

    def __init__(self, heads: Sequence[TensorData], shape: tuple[int, ...], dtype: str) -> None:
        self.heads, self.shape, self.dtype = heads, shape, numpy_dtype(dtype)

    @property
    def stored_as(self) -> tuple[str, int]:
        """How the values are stored, and the bytes that they take, the scales of codes among them."""
        stored = [head for head in self.heads if isinstance(head, StoredTensor)]
        names = {ENCODINGS[head.selector] for head in stored if head.n}
        name = names.pop() if len(names) == 1 else "mixed" if names else "float32"
        return name, sum(head.data.length + (_SCALE if ENCODINGS[head.selector] == "q8" else 0) for head in stored)

    def array(self) -> Array:
        """Return the values, read-only."""
        out = np.empty(self.shape, dtype=self.dtype)
        self.read_into(out)
        out.flags.writeable = False
        return out

    def read_into(self, out: Array) -> None:
        """Fill `out`."""
        for place, head in enumerate(self.heads):
            target = out[place]
            flat = target.reshape(-1) if target.flags.c_contiguous else np.empty(target.size, dtype=out.dtype)
            decode(head, flat)
            if not target.flags.c_contiguous:
                np.copyto(target, flat.reshape(target.shape))


class _Whole(_Heads):
    """The source of a tensor from one stored tensor that holds all heads."""

    __slots__ = ()

    def read_into(self, out: Array) -> None:
        """Fill `out`."""
        flat = out.reshape(-1) if out.flags.c_contiguous else np.empty(out.size, dtype=out.dtype)
        decode(self.heads[0], flat)
        if not out.flags.c_contiguous:
            np.copyto(out, flat.reshape(out.shape))


class _Groups(_Heads):
    """The source of a tensor from a `q8-native` slab."""

    __slots__ = ()

    def read_into(self, out: Array) -> None:
        """Fill `out`."""
        slab = self.heads[0]
        assert isinstance(slab, StoredTensor)  # noqa: S101 - _slab_source makes no other
        heads, seq, dim = self.shape
        decode_groups(slab, (heads, seq, dim), out)


class _Logits:
    """The source of the logits, float32 `[vocab]`."""

    __slots__ = ("stored",)

    def __init__(self, stored: StoredTensor) -> None:
        self.stored = stored

    @property
    def stored_as(self) -> tuple[str, int]:
        """How the values are stored, and the bytes that they take."""
        return "float32", self.stored.data.length

    def array(self) -> Array:
        """Return the values, read-only."""
        values = values_of(self.stored)
        values.flags.writeable = False
        return values

    def read_into(self, out: Array) -> None:
        """Fill `out`."""
        np.copyto(out.view(np.uint32), self.array().view(np.uint32))


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor to be, before it is known how many rows there are in all."""

    role: str
    name: str
    dtype: str
    shape: tuple[int, int, int]
    source: _Heads
    bound: float
    max_size: int


def resolve(file: File) -> tuple[int | None, ...]:
    """Return which entry answers for each layer number, 0 to the last one that has a place."""
    first: dict[int, int] = {}
    for place, entry in enumerate(file.layers):
        first.setdefault(entry.layer, place)
    numbers = [number for number in first if 0 <= number < MAX_NUMBER]
    n_layers = max(len(file.layers), max(numbers, default=-1) + 1)
    found: list[int | None] = []
    for number in range(n_layers):
        entry_there = file.layers[number] if number < len(file.layers) else None
        if entry_there is not None and entry_there.layer == number:
            found.append(number)
        elif number in first:
            found.append(first[number])
        else:
            found.append(number if entry_there is not None and entry_there.layer == 0 else None)
    return tuple(found)


def slab_parts(entry: LayerEntry, layer: int) -> list[_Part]:
    """Return k and v from the slabs of an entry, or nothing where they do not fit their shape."""
    parts = []
    for role, slab, shape in (("k", entry.key_slab, entry.key_shape), ("v", entry.value_slab, entry.value_shape)):
        if not isinstance(slab, StoredTensor) or not slab.n or len(shape) != 4 or shape[0] != 1 or min(shape) < 0:
            return []
        dims = (shape[1], shape[2], shape[3])
        if slab.dtype == Q8_NATIVE:
            if native_groups(slab, shape) is None:
                return []
            # The engine's own cache: these values are what it held.
            source: _Heads = _Groups([slab], dims, "float32")
            parts.append(_Part(role, f"layers.{layer}.{role}", "float32", dims, source, 0.0, entry.max_size))
            continue
        if math.prod(dims) != slab.n:
            return []
        source = _Whole([slab], dims, slab.dtype)
        parts.append(_Part(role, f"layers.{layer}.{role}", slab.dtype, dims, source, bound_of(slab), entry.max_size))
    return parts


def head_parts(entry: LayerEntry, layer: int, shapes: Sequence[HeadShape], suffix: str = "") -> list[_Part]:
    """Return k and v from the heads of an entry: one tensor for neighbours of one shape and dtype."""
    parts = []
    for role in ("k", "v"):
        rows = [
            (h.key, s.key_rows, s.key_dim) if role == "k" else (h.value, s.value_rows, s.value_dim)
            for h, s in zip(entry.heads, shapes, strict=True)
        ]
        groups = list(_alike(rows))
        for first, last in groups:
            stored = [row[0] for row in rows[first:last]]
            dims = (last - first, rows[first][1], rows[first][2])
            name = f"layers.{layer}.{role}{suffix}" + (f".{first}" if len(groups) > 1 else "")
            source = _Heads(stored, dims, stored[0].dtype)
            bound = max(bound_of(t) for t in stored)
            parts.append(_Part(role, name, stored[0].dtype, dims, source, bound, entry.max_size))
    return parts


def _alike(rows: Sequence[tuple[TensorData, int, int]]) -> Iterator[tuple[int, int]]:
    first = 0
    for at in range(1, len(rows) + 1):
        if at == len(rows) or (rows[at][0].dtype, *rows[at][1:]) != (rows[first][0].dtype, *rows[first][1:]):
            yield first, at
            first = at


@dataclass(slots=True)
class _Builder:
    """Gathers the parts of all layers, then makes tensors of them."""

    file: File
    notes: list[str]
    next_id: int = 0

    def parts(self, number: int, place: int) -> tuple[list[_Part], list[_Part]]:
        """Return the tensors of a layer, and the heads that stand beside a slab."""
        entry = self.file.layers[place]
        name = f"layer {number}"
        shapes = head_shapes(self.file, entry)
        if any(not s.sure for s in shapes):
            self.notes.append(f"{name}: nothing tells the shape of its heads; read as one row each")
        slabs = slab_parts(entry, number)
        if entry.has_slab and not slabs:
            self.notes.append(f"{name}: its slabs do not fit their shape and are only kept in the file")
        selectors = {t.selector for t in (entry.key_slab, entry.value_slab) if t is not None and t.n}
        if entry.has_slab and not selectors <= {2}:
            self.notes.append(f"{name}: a slab that is not native; the original reader drops its values")
        if not slabs:
            return head_parts(entry, number, shapes), []
        if not entry.heads:
            return slabs, []
        if selectors != {2}:
            # The original sees no values in these slabs, so its engines go on from the heads.
            return head_parts(entry, number, shapes) + [
                replace(p, role="other", name=f"{p.name}.slab") for p in slabs
            ], []
        self.notes.append(f"{name}: slab and heads; the slab is restored, `head` answers from the heads")
        return slabs, head_parts(entry, number, shapes, ".heads")

    def tensors(self, number: int, parts: Sequence[_Part], n_rows: int) -> tuple[Tensor, ...]:
        made = []
        for part in parts:
            n_heads, rows, dim = part.shape
            start = n_rows - rows
            # A static tensor is what the snapshot only keeps: its rows are not those of the sequence.
            growth: Growth = "grow" if start == 0 and not part.max_size else "window"
            static = part.role == "other"
            spec = TensorSpec(
                id=self.next_id, name=part.name, layer=number, role=part.role, dtype=part.dtype,
                axes=("head", "row", "dim"), shape=part.shape if static else (n_heads, 0, dim),
                growth="static" if static else growth, row_axis=-1 if static else 1,
                window=0 if static else part.max_size,
            )  # fmt: skip
            self.next_id += 1
            kept = 1 if static else rows
            made.append(Tensor(spec, part.source, start=0 if static else start, n_rows=kept, bound=part.bound))
        return tuple(made)


def to_snapshot(file: File, path: str | None = None) -> Snapshot:
    """Return the snapshot of a file; tensors are read when they are first used. `source` keeps all the file says."""
    told = history(file)
    notes = [told.note] if told.note else []
    builder = _Builder(file, notes)
    places = resolve(file)
    owner: dict[int, int] = {}
    parts: dict[int, tuple[list[_Part], list[_Part]]] = {}
    for number, place in enumerate(places):
        if place is not None and owner.setdefault(place, number) == number:
            parts[number] = builder.parts(number, place)
    held = [p.shape[1] for ours, beside in parts.values() for p in [*ours, *beside] if p.role != "other"]
    n_rows = max([file.offset, *held])
    layers = []
    for number, place in enumerate(places):
        ours, beside = parts.get(number, ([], []))
        tensors = builder.tensors(number, ours, n_rows)
        by_head = builder.tensors(number, beside, n_rows)
        kind = "attention" if any(t.role == "k" for t in tensors) else "none"
        shares = None if place is None or owner[place] == number else owner[place]
        heads = file.num_query_heads if kind == "attention" else 0
        layers.append(
            Layer(index=number, kind=kind, tensors=tensors, num_query_heads=heads, shares=shares, by_head=by_head)
        )
    notes += _notes(file, layers, set(owner), held)
    positions = (PositionRun(file.offset - n_rows, n_rows),) if n_rows else ()
    architecture = file.architecture.decode("utf-8", "backslashreplace")
    logits = _logits(file, builder.next_id)
    snapshot = Snapshot(
        architecture=architecture, layers=tuple(layers), tokens=told.tokens, runs=told.runs, n_rows=n_rows,
        n_pending=max(0, len(told.tokens) - n_rows), token_offset=file.offset, positions=positions, logits=logits,
        identity=_identity(architecture, file, layers),
    )  # fmt: skip
    loaded = Loaded(file, snapshot.layers, Loaded.fields_of(snapshot), logits)
    return replace(snapshot, source=_source(file, path, places, notes, loaded))


def _logits(file: File, number: int) -> Tensor | None:
    if not isinstance(file.logits, StoredTensor) or not file.logits.n:
        return None
    spec = TensorSpec(
        id=number, name="logits", layer=-1, role="logits", dtype="float32", axes=("vocab",), shape=(file.logits.n,),
        growth="replaced", rope="none",
    )  # fmt: skip
    return Tensor(spec, _Logits(file.logits), n_rows=1)


def _identity(architecture: str, file: File, layers: Sequence[Layer]) -> Identity:
    """Return what the file tells of the model; head counts only where all layers agree on them.

    Not the head width: settings often leave it open, and the shapes of the tensors are compared at a restore anyway.
    """
    attention = [layer for layer in layers if layer.kind == "attention"]
    config: list[tuple[str, str]] = []
    for name, values in (
        ("num_key_value_heads", {layer.num_heads for layer in attention}),
        ("num_attention_heads", {file.num_query_heads} if attention and file.num_query_heads else set()),
        ("num_hidden_layers", {len(layers)} if len(layers) == file.num_layers and layers else set()),
    ):
        config += [(name, str(value)) for value in values if len(values) == 1]
    return Identity(architecture=architecture, config=tuple(sorted(config)))


def _notes(file: File, layers: Sequence[Layer], used: set[int], held: Sequence[int]) -> list[str]:
    """Return where header and tensors differ, and what else is unusual, one sentence each."""
    notes = []
    most_heads = max((layer.num_heads for layer in layers), default=0)
    first = next((layer for layer in layers if layer.num_heads), None)
    widths = {layer.head_dim for layer in layers if layer.num_heads}
    shapes = (
        ("layers", file.num_layers, {len(file.layers), len(layers)}),
        ("heads", file.num_heads, {most_heads, 0 if first is None else first.num_heads}),
        ("head width", file.head_dim, {max(widths, default=0), 0 if first is None else first.head_dim}),
        ("sequence length", file.seq_len, {max(held, default=0)}),
    )
    for name, said, there in shapes:
        if held and said not in there:
            notes.append(f"header says {name} {said}, the tensors say {max(there)}")
    if file.token_offset == 0 and file.tokens:
        notes.append("token offset 0 is stored; it stands for the number of tokens")
    if file.logits is not None and file.logits.n != math.prod(file.logit_shape) and (file.logits.n or file.logit_shape):
        notes.append(f"logit shape {list(file.logit_shape)} does not fit the {file.logits.n} logits")
    if file.trailing is not None:
        notes.append(f"{file.trailing.length} bytes behind the end")
    for place, entry in enumerate(file.layers):
        mode = entry.mode.decode("utf-8", "backslashreplace")
        if mode not in MODES:
            notes.append(f"layer entry {place}: cache mode {mode!r} is not one that the newest reader knows")
        if len(entry.payloads):
            notes.append(f"layer entry {place}: {len(entry.payloads)} payloads, kept as they are")
        if place not in used and not entry.is_blank:
            notes.append(f"layer entry {place} (numbered {entry.layer}) answers for no layer; kept in the file only")
    return notes


def _source(
    file: File, path: str | None, places: Sequence[int | None], notes: Sequence[str], loaded: Loaded
) -> dict[str, Any]:
    names = ("num_layers", "num_heads", "seq_len", "head_dim", "num_query_heads")
    return {
        "format": "mlxkv",
        "path": path,
        "version": file.version,
        "byte_order": file.order,
        "encoding": file.encoding,
        "architecture": file.architecture.decode("utf-8", "backslashreplace"),
        **{name: getattr(file, name) for name in names},
        "token_offset": file.token_offset,
        "tokens": file.tokens,
        "generated": file.generated,
        "logit_shape": file.logit_shape,
        "entries": tuple(places),
        "info": tuple(notes),
        "extra": tuple(_extra(file)),
        "file": file,
        "loaded": loaded,
    }


def _extra(file: File) -> list[str]:
    """What no other format has a place for."""
    found = []
    for place, entry in enumerate(file.layers):
        if entry.mode:
            found.append(f"layer entry {place}: cache mode {entry.mode.decode('utf-8', 'backslashreplace')!r}")
        if len(entry.payloads):
            found.append(f"layer entry {place}: {len(entry.payloads)} payloads")
        if entry.max_size:
            found.append(f"layer entry {place}: MaxSize {entry.max_size}")
        if entry.has_slab and entry.heads:
            found.append(f"layer entry {place}: heads beside the slab")
    if file.trailing is not None:
        found.append(f"{file.trailing.length} bytes behind the end")
    return found


def slab_differences(snapshot: Snapshot) -> tuple[str, ...]:
    """Return one sentence for each layer whose slab and heads hold different values. Reads the tensors of those layers.

    Usual reason: the slab holds the rounded values of the engine, the heads were kept in float32.
    """
    found = []
    for layer in snapshot.layers:
        for role in ("k", "v") if layer.by_head else ():
            slab = layer.tensor(role)
            heads = [t for t in layer.by_head if t.role == role]
            if slab is None:
                continue
            left = widened(slab.values().reshape(-1))
            right = [widened(t.values().reshape(-1)) for t in heads]
            joined = np.concatenate(right) if right else np.zeros(0, np.float32)
            if left.size != joined.size:
                found.append(
                    f"layer {layer.index}: {left.size} values of {role} in the slab, {joined.size} in the heads"
                )
            elif not np.array_equal(left.view(np.uint32), joined.view(np.uint32)):
                with np.errstate(over="ignore", invalid="ignore"):
                    most = float(np.max(np.abs(left - joined)))
                found.append(f"layer {layer.index}: {role} in slab and heads differ by up to {most:.3g}")
    return tuple(found)

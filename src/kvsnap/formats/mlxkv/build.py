"""From a snapshot to what is written: the file it was loaded from where nothing has changed since, else a new one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.errors import InputError
from kvsnap.formats.mlxkv.model import ByteOrder, File, Head, LayerEntry, TensorData
from kvsnap.formats.mlxkv.pack import CODECS, nbytes_of, version_for
from kvsnap.formats.mlxkv.read import Loaded, slab_parts
from kvsnap.layout import Layer, Snapshot, Tensor
from kvsnap.tensors import TensorSpec

__all__ = ["Plan", "is_written", "loaded_of", "plan"]

Array = npt.NDArray[Any]

NATIVE = ("float32", "float16", "bfloat16")
_KEYS, _VALUES = ("k", "latent"), ("v", "rope")
_NEW = 3
"""Version of a new file that needs no later one: old and new readers take it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to write and how. `codec` None: every tensor as it is stored in `file`."""

    file: File
    codec: str | None
    version: int
    order: ByteOrder
    unchanged: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all head and slab values, as they are now."""
        total = 0
        for entry in self.file.layers:
            pairs = [(h.key, h.value) for h in entry.heads] + [(entry.key_slab, entry.value_slab)]
            total += sum(nbytes_of(t) for pair in pairs for t in pair if t is not None)
        return total


class _Shelf:
    """The tensor in use for each role, so that the heads of one tensor read it once; the one before is let go."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Tensor, Array]] = {}

    def get(self, tensor: Tensor, role: str) -> Array:
        """Return the values as `[head, row, dim]`."""
        held = self._held.get(role)
        if held is None or held[0] is not tensor:
            self._held.pop(role, None)
            held = (tensor, _by_head(tensor))
            self._held[role] = held
        return held[1]


def _by_head(tensor: Tensor) -> Array:
    spec, values = tensor.spec, tensor.values()
    if "head" not in spec.axes:
        moved = np.moveaxis(values, spec.row_axis, 0)
        return moved.reshape(1, moved.shape[0], -1)
    moved = np.moveaxis(values, (spec.axes.index("head"), spec.row_axis), (0, 1))
    return moved.reshape(*moved.shape[:2], -1)


class _OneHead:
    """One head of a tensor of a snapshot, as the packer wants it."""

    __slots__ = ("_head", "_role", "_shelf", "_tensor", "dtype", "n")
    selector = -1

    def __init__(self, shelf: _Shelf, tensor: Tensor, role: str, head: int, n_heads: int) -> None:
        self._shelf, self._tensor, self._role, self._head = shelf, tensor, role, head
        self.n = math.prod(tensor.shape) // max(1, n_heads)
        self.dtype = tensor.spec.dtype if tensor.spec.dtype in NATIVE else "float32"

    def read_into(self, out: memoryview) -> None:
        """Fill `out`."""
        values = self._shelf.get(self._tensor, self._role)[self._head]
        _fill(values, self.dtype, out)


class _Logits:
    """The logits of a snapshot, as the packer wants them."""

    __slots__ = ("_tensor", "n")
    selector = -1
    dtype = "float32"

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self.n = tensor, math.prod(tensor.shape)

    def read_into(self, out: memoryview) -> None:
        """Fill `out`."""
        _fill(self._tensor.values(), self.dtype, out)


class _Nothing:
    """An empty tensor."""

    __slots__ = ()
    selector = -1
    dtype = "float32"
    n = 0

    def read_into(self, out: memoryview) -> None:
        """Do nothing: there is nothing to fill."""


def _fill(values: Array, dtype: str, out: memoryview) -> None:
    target = np.frombuffer(out, dtype=np.uint8)
    if dtype == "float32" and values.dtype != np.float32:
        with np.errstate(over="ignore", invalid="ignore"):
            values = values.astype(np.float32)
    np.copyto(target, np.ascontiguousarray(values).reshape(-1).view(np.uint8))


def loaded_of(snapshot: Snapshot) -> Loaded | None:
    """Return what the snapshot was loaded from, changed since or not."""
    found = snapshot.source.get("loaded") if snapshot.source.get("format") == "mlxkv" else None
    return found if isinstance(found, Loaded) else None


def plan(
    snapshot: Snapshot, *, codec: str | None = None, version: int | None = None, byte_order: str | None = None
) -> Plan:
    """Decide what to write; reads no tensor.

    Raise `InputError` for a codec, version or byte order that there is not, and for a partial capture.
    """
    if codec is not None and codec not in CODECS:
        raise InputError("mlxkv: there is no such encoding", expected=", ".join(CODECS), found=codec)
    if byte_order not in (None, "little", "big"):
        raise InputError("mlxkv: there is no such byte order", expected="little or big", found=byte_order)
    if snapshot.row_start:
        raise InputError("a partial capture cannot be saved alone", found=f"rows from {snapshot.row_start}")
    loaded = loaded_of(snapshot)
    order: ByteOrder = "big" if byte_order == "big" else "little"
    if loaded is not None and byte_order is None:
        order = loaded.file.order
    if loaded is not None and loaded.is_still(snapshot):
        file = loaded.file
        if codec in ("float32", "q8") and any(e.has_slab for e in file.layers):
            file = replace(file, layers=tuple(_without_slab(e) for e in file.layers))
        return Plan(file, codec, version_for(file, codec, version), order, unchanged=True)
    chosen = codec or "float32"
    file = _new(snapshot, loaded)
    return Plan(file, chosen, version_for(file, chosen, version), order, unchanged=False)


def _without_slab(entry: LayerEntry) -> LayerEntry:
    """Return an entry whose slabs became heads: the original refuses to write them as float32 or q8."""
    heads = entry.heads
    parts = slab_parts(entry, 0)
    if not heads and parts:
        shelf = _Shelf()
        tensors = []
        for part in parts:
            spec = TensorSpec(
                id=0, name=part.name, layer=0, role=part.role, dtype=part.dtype, axes=("head", "row", "dim"),
                shape=(part.shape[0], 0, part.shape[2]), row_axis=1,
            )  # fmt: skip
            tensors.append(Tensor(spec, part.source, n_rows=part.shape[1]))
        heads = _pair(_heads_of(shelf, tensors[:1], "k"), _heads_of(shelf, tensors[1:], "v"))
    return replace(entry, heads=heads, key_shape=(), key_slab=None, value_shape=(), value_slab=None)


def _heads_of(shelf: _Shelf, tensors: Sequence[Tensor], role: str) -> list[TensorData]:
    found: list[TensorData] = []
    for tensor in tensors:
        spec = tensor.spec
        n_heads = spec.shape[spec.axes.index("head")] if "head" in spec.axes else 1
        found += [_OneHead(shelf, tensor, role, h, n_heads) for h in range(n_heads)]
    return found


def _pair(keys: Sequence[TensorData], values: Sequence[TensorData]) -> tuple[Head, ...]:
    n = max(len(keys), len(values))
    nothing = _Nothing()
    return tuple(
        Head(keys[i] if i < len(keys) else nothing, values[i] if i < len(values) else nothing) for i in range(n)
    )


def is_written(tensor: Tensor) -> bool:
    """True for a tensor that becomes keys or values of a new file."""
    return tensor.role in _KEYS + _VALUES and tensor.spec.row_axis >= 0


def _new(snapshot: Snapshot, loaded: Loaded | None) -> File:
    shelf = _Shelf()
    places: tuple[int | None, ...] = tuple(snapshot.source.get("entries", ())) if loaded is not None else ()
    entries = []
    for number, layer in enumerate(snapshot.layers):
        owner = snapshot.layers[layer.shares] if layer.shares is not None else layer
        entry = _entry(shelf, number, layer, owner)
        if loaded is not None and len(places) == len(snapshot.layers) and places[number] is not None:
            before = loaded.file.layers[places[number] or 0]
            # The payloads are pages of the whole state: after a change they are those of another one, and so is the
            # mode that goes with them.
            mode = b"" if len(before.payloads) else before.mode
            entry = replace(entry, cache_index=before.cache_index, mode=mode, max_size=before.max_size)
        entries.append(entry)
    written = [t for layer in snapshot.layers for t in layer.tensors if is_written(t)]
    keys = [t for t in written if t.role in _KEYS] or written
    architecture = snapshot.architecture.encode("utf-8", "backslashreplace")
    if loaded is not None and loaded.fields[0] == snapshot.architecture:
        architecture = loaded.file.architecture
    logits = snapshot.logits
    return File(
        version=_NEW if loaded is None else loaded.file.version,
        architecture=architecture,
        num_layers=len(snapshot.layers),
        num_heads=max((layer.num_heads for layer in snapshot.layers), default=0),
        seq_len=max((t.n_rows for t in keys), default=snapshot.n_rows),
        head_dim=max((layer.head_dim for layer in snapshot.layers), default=0),
        num_query_heads=snapshot.num_query_heads,
        token_offset=snapshot.token_offset,
        tokens=tuple(snapshot.tokens),
        generated=tuple(snapshot.generated),
        layers=tuple(entries),
        logit_shape=() if logits is None else (1, 1, math.prod(logits.shape)),
        logits=None if logits is None else _Logits(logits),
    )


def _entry(shelf: _Shelf, number: int, layer: Layer, owner: Layer) -> LayerEntry:
    tensors = [t for t in owner.tensors if is_written(t)]
    keys = [t for t in tensors if t.role in _KEYS]
    values = [t for t in tensors if t.role in _VALUES]
    if not tensors:
        return LayerEntry(number, -1)
    return LayerEntry(
        number,
        number if layer.shares is None else layer.shares,
        _pair(_heads_of(shelf, keys, "k"), _heads_of(shelf, values, "v")),
        max_size=max(t.spec.window for t in tensors),
    )

"""What an MLXKV001 file holds, as it stands there. docs/formats/mlxkv.md; no numpy arithmetic, no snapshots."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

__all__ = [
    "DTYPES", "ENCODINGS", "MAGIC", "MODES", "NEWEST", "Blob", "ByteOrder", "Bytes", "File", "FreshTensor", "Head",
    "LayerEntry", "Payloads", "Piece", "StoredTensor", "TensorData",
]  # fmt: skip

ByteOrder = Literal["little", "big"]

MAGIC = b"MLXKV001"
NEWEST = 6
DTYPES = {
    "float32": "float32", "F32": "float32", "float16": "float16", "F16": "float16", "bfloat16": "bfloat16",
    "BF16": "bfloat16",
}  # fmt: skip
"""Tags of native tensors, and the name that readers report."""
Q8_NATIVE = "q8-native"
TURBOQUANT = b"turboquant"
MODES = frozenset({"", "default", "fp16", "q8", "k-q8-v-q4", "paged", "fixed", "turboquant", "recurrent"})
"""Cache modes that the newest original reader takes."""


class Bytes(Protocol):
    """What is needed of a file here: `kvsnap.files.Reader`, or bytes in memory."""

    @property
    def path(self) -> str | None:
        """Name for messages."""

    @property
    def size(self) -> int:
        """Length in bytes."""

    def read_at(self, offset: int, length: int) -> bytes:
        """Bytes at a place."""

    def map(self) -> memoryview:
        """The whole file, read-only."""


class Blob(Protocol):
    """Some bytes that are read when they are asked for."""

    @property
    def length(self) -> int:
        """Number of bytes."""

    def read(self) -> memoryview:
        """The bytes; a view where the file is mapped."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A checked range of a file; nothing is read before `read`."""

    file: Bytes
    offset: int
    length: int
    mapped: bool = False

    def read(self) -> memoryview:
        """Return the bytes. Raise `DamagedError` where the file was cut since it was parsed."""
        if not self.length:
            return memoryview(b"")
        if self.mapped:
            return self.file.map()[self.offset : self.offset + self.length]
        return memoryview(self.file.read_at(self.offset, self.length))


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """One tensor of a file: `selector` (None: the plain list of versions 1 and 2), count, and its bytes verbatim.

    `n` counts values, for `q8-native` bytes. `scale_bits` are the bits of the q8 scale. `tag` is the dtype as written.
    """

    selector: int | None
    n: int
    data: Blob
    order: ByteOrder = "little"
    scale_bits: int = 0
    tag: str = ""

    @property
    def dtype(self) -> str:
        """`float32`, `float16`, `bfloat16` or `q8-native`: the dtype of the values."""
        return DTYPES.get(self.tag, self.tag) if self.selector == 2 else "float32"

    @property
    def scale(self) -> float:
        """The q8 scale."""
        return float(struct.unpack("<f", struct.pack("<I", self.scale_bits))[0])


class FreshTensor(Protocol):
    """Values that are not in such a file yet."""

    @property
    def n(self) -> int:
        """Number of values."""

    @property
    def dtype(self) -> str:
        """`float32`, `float16` or `bfloat16`."""

    @property
    def selector(self) -> int | None:
        """-1: in no file yet."""

    def read_into(self, out: memoryview) -> None:
        """Fill `out` with the values, little-endian."""


TensorData = StoredTensor | FreshTensor


@dataclass(frozen=True, slots=True)
class Head:
    """Keys and values of one head, `[seq, dim]` row by row."""

    key: TensorData
    value: TensorData


@dataclass(frozen=True, slots=True, eq=False)
class Payloads:
    """Opaque blobs of one layer, kept as one range of the file: each is a length word and its bytes."""

    count: int = 0
    data: Blob | None = None
    order: ByteOrder = "little"

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[memoryview]:
        if self.data is None:
            return
        data, at = self.data.read(), 0
        for _ in range(self.count):
            length = int.from_bytes(data[at : at + 4], self.order)
            yield data[at + 4 : at + 4 + length]
            at += 4 + length


NO_PAYLOADS = Payloads()


@dataclass(frozen=True, slots=True)
class LayerEntry:
    """One layer entry. `mode` are the bytes of the cache mode, `max_size` the window of the cache or 0."""

    layer: int
    cache_index: int
    heads: tuple[Head, ...] = ()
    mode: bytes = b""
    payloads: Payloads = NO_PAYLOADS
    max_size: int = 0
    key_shape: tuple[int, ...] = ()
    key_slab: TensorData | None = None
    value_shape: tuple[int, ...] = ()
    value_slab: TensorData | None = None

    @property
    def has_slab(self) -> bool:
        """True when a slab has values."""
        return any(slab is not None and slab.n for slab in (self.key_slab, self.value_slab))

    @property
    def is_blank(self) -> bool:
        """True for an entry without anything in it."""
        return not self.heads and not self.has_slab and not len(self.payloads)


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """All of one file, in its order. `token_offset` is None in version 1, 0 where 0 is stored."""

    version: int
    order: ByteOrder = "little"
    architecture: bytes = b""
    num_layers: int = 0
    num_heads: int = 0
    seq_len: int = 0
    head_dim: int = 0
    num_query_heads: int = 0
    token_offset: int | None = None
    tokens: tuple[int, ...] = ()
    generated: tuple[int, ...] = ()
    layers: tuple[LayerEntry, ...] = ()
    logit_shape: tuple[int, ...] = ()
    logits: TensorData | None = None
    trailing: Blob | None = None

    @property
    def offset(self) -> int:
        """The position of the next token: 0 and nothing stored both mean the number of tokens."""
        return self.token_offset or len(self.tokens)

    def find(self, layer: int) -> int | None:
        """Return which entry answers for a layer, as the original looks it up, or None.

        The entry at position `layer` if it is numbered so; else the first numbered so; else the entry at that position
        if it is numbered 0.
        """
        at_place = self.layers[layer] if 0 <= layer < len(self.layers) else None
        if at_place is not None and at_place.layer == layer:
            return layer
        for place, entry in enumerate(self.layers):
            if entry.layer == layer:
                return place
        return layer if at_place is not None and at_place.layer == 0 else None

    @property
    def encoding(self) -> str:
        """`float32`, `q8`, `native`, or `mixed`: what the tensors with values are stored as."""
        found = set()
        for entry in self.layers:
            pairs = [(h.key, h.value) for h in entry.heads] + [(entry.key_slab, entry.value_slab)]
            found |= {ENCODINGS[t.selector] for pair in pairs for t in pair if t is not None and t.n}
        return found.pop() if len(found) == 1 else "mixed" if found else "float32"


ENCODINGS = {None: "float32", -1: "float32", 0: "float32", 1: "q8", 2: "native"}
"""What a stored tensor is called, by its selector."""

"""DeepSeek V4 files (`COLIDV41`): another layout under the same file name. docs/formats/colikv.md section 8.

Header, token ids and the layers without compressor or indexer state are read. The layout of those states is not known,
and nothing behind the first of them can be found.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvsnap.errors import DamagedError, FormatError
from kvsnap.formats.colikv.geometry import MAX_LAYERS, MAX_WIDTH
from kvsnap.formats.colikv.header import DEEPSEEK_MAGIC, HEADER_SIZE
from kvsnap.formats.colikv.records import ByteSource

__all__ = ["DeepSeekFile", "DeepSeekLayer", "ratio_checksum", "read_deepseek"]

_WORDS = struct.Struct("<8s7iI")
_EXTRA_ROWS = 16  # compressed rows that a layer may have more than there are tokens


@dataclass(frozen=True, slots=True)
class DeepSeekLayer:
    """`window` `[window, head_dim]` (position p in row p mod window) and `compressed` rows `[n, head_dim]`, float32."""

    window: npt.NDArray[np.float32]
    compressed: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DeepSeekFile:
    """What can be told of a DeepSeek V4 file: the header, the token ids, and the layers up to `stopped`.

    `stopped` says why the rest was not read; None when all was.
    """

    n_layers: int
    window: int
    head_dim: int
    index_head_dim: int
    rope_head_dim: int
    vocab: int
    checksum: int
    tokens: tuple[int, ...]
    layers: tuple[DeepSeekLayer, ...]
    stopped: str | None

    def __str__(self) -> str:
        shown = ", ".join(str(t) for t in self.tokens[:8]) + (", ..." if len(self.tokens) > 8 else "")
        return (
            f"{self.n_layers} layers, window {self.window}, head width {self.head_dim}, index width "
            f"{self.index_head_dim}, rope width {self.rope_head_dim}, vocabulary {self.vocab}, "
            f"{len(self.tokens)} tokens [{shown}]"
        )


def ratio_checksum(ratios: list[int]) -> int:
    """Return the 32-bit FNV-1a of the compression ratio of each layer, four little-endian bytes each."""
    value = 2166136261
    for byte in b"".join(struct.pack("<i", ratio) for ratio in ratios):
        value = ((value ^ byte) * 16777619) & 0xFFFFFFFF
    return value


def read_deepseek(source: ByteSource, size: int, path: str | None = None, *, rows: bool = True) -> DeepSeekFile:
    """Read what is known of the layout. Raise `FormatError` (a number out of range), `DamagedError` (cut off).

    Without `rows` they are passed by, and no layer is returned.
    """
    head = bytearray(min(size, HEADER_SIZE))
    source.read_into(0, head)
    if bytes(head[:8]) != DEEPSEEK_MAGIC:
        raise FormatError("not a DeepSeek V4 file", path=path, offset=0, expected="COLIDV41", found=bytes(head[:8]))
    if size < HEADER_SIZE:
        raise DamagedError("the file ends inside its header", path=path, offset=size, expected=HEADER_SIZE, found=size)
    _, n_layers, window, head_dim, index_dim, rope_dim, vocab, count, checksum = _WORDS.unpack(head)
    limits = (
        ("n_layers", n_layers, 1, MAX_LAYERS), ("window", window, 0, MAX_WIDTH), ("head_dim", head_dim, 1, MAX_WIDTH),
        ("index_head_dim", index_dim, 0, MAX_WIDTH), ("qk_rope_head_dim", rope_dim, 0, MAX_WIDTH),
        ("vocab", vocab, 0, (1 << 31) - 1), ("token count", count, 0, (size - HEADER_SIZE) // 4),
    )  # fmt: skip
    for place, (name, value, low, high) in enumerate(limits):
        if not low <= value <= high:
            at, expected = 8 + 4 * place, f"{low} to {high}"
            raise FormatError(f"header: {name} out of range", path=path, offset=at, expected=expected, found=value)
    tokens = np.empty(count, np.dtype("<i4"))
    source.read_into(HEADER_SIZE, tokens)
    layers, stopped = _layers(
        source, size, HEADER_SIZE + 4 * count, (n_layers, window, head_dim, count), path, rows=rows
    )
    return DeepSeekFile(
        n_layers=n_layers, window=window, head_dim=head_dim, index_head_dim=index_dim, rope_head_dim=rope_dim,
        vocab=vocab, checksum=checksum, tokens=tuple(int(t) for t in tokens), layers=layers, stopped=stopped,
    )  # fmt: skip


def _layers(
    source: ByteSource, size: int, at: int, numbers: tuple[int, int, int, int], path: str | None, *, rows: bool
) -> tuple[tuple[DeepSeekLayer, ...], str | None]:
    n_layers, window, width, count = numbers
    layers: list[DeepSeekLayer] = []

    def word(offset: int, what: str) -> int:
        raw = bytearray(_room(size, offset, 4, what, path))
        source.read_into(offset, raw)
        return int.from_bytes(raw, "little", signed=True)

    def rows_at(offset: int, n: int, what: str) -> npt.NDArray[np.float32]:
        _room(size, offset, n * width * 4, what, path)
        if not rows:
            return np.empty((0, width), np.dtype("<f4"))
        out = np.empty((n, width), np.dtype("<f4"))
        source.read_into(offset, out)
        return out

    for layer in range(n_layers):
        n_compressed = word(at, f"layer {layer}: compressed rows")
        if not 0 <= n_compressed <= count + _EXTRA_ROWS:
            raise FormatError(
                f"layer {layer}: number of compressed rows out of range", path=path, offset=at,
                expected=f"0 to {count + _EXTRA_ROWS}", found=n_compressed,
            )  # fmt: skip
        ring = rows_at(at + 4, window, f"layer {layer}: window")
        at += 4 + window * width * 4
        compressed = rows_at(at, n_compressed, f"layer {layer}: compressed rows")
        at += n_compressed * width * 4
        if rows:
            layers.append(DeepSeekLayer(ring, compressed))
        for state in ("compressor", "indexer"):
            if word(at, f"layer {layer}: {state} flag"):
                return tuple(layers), f"layer {layer} has a {state} state, whose layout is not known"
            at += 4
    return tuple(layers), None


def _room(size: int, offset: int, length: int, what: str, path: str | None) -> int:
    if size - offset < length:
        left = size - offset
        raise DamagedError(f"{what}: the file ends early", path=path, offset=offset, expected=length, found=left)
    return length

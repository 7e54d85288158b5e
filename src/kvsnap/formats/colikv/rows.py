"""The rows of a `.coli_kv` record and their encodings, whole blocks at a time. docs/formats/colikv.md section 3.

Each encoding turns float32 rows `[n, width]` into codes `[n, code_size(width)]` (uint8) and one float32 number per row
(the scale of fp8, the radius of the packed ones), and back. Arithmetic is float32 where the published writers use it,
so that codes come out the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvsnap.errors import UnsupportedError

__all__ = ["Encoding", "decode", "encode", "fp8_bound", "rotates"]

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

MAX_WIDTH = 2048  # the widest row that the packed encodings rotate
_CACHED = 1 << 15  # values of one step of the transform
_TINY, _HUGE = np.float32(1e-35), np.float32(3.4e38)
_LARGEST = np.float32(448)
_LEVELS = (0.128, 0.388, 0.657, 0.942, 1.256, 1.618, 2.069, 2.733)
_BOOK = np.array([-level for level in reversed(_LEVELS)] + list(_LEVELS), np.float32)
_EDGES = (_BOOK[1:] + _BOOK[:-1]) / np.float32(2)

# A code that is not a number counts as 0.
_FP8 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_FP8[~np.isfinite(_FP8)] = 0


@dataclass(frozen=True, slots=True)
class Encoding:
    """How latent and rope rows are stored: `name` is `float32`, `fp8`, `int4` or `polar`, `bits` the width of a code.

    `version` is that of the file, `tag` its header word 36.
    """

    name: str
    bits: int = 0

    @property
    def version(self) -> int:
        return {"float32": 1, "fp8": 2, "int4": 3, "polar": 3}[self.name]

    @property
    def tag(self) -> int:
        return {"float32": 0, "fp8": 1, "int4": 256 + self.bits, "polar": self.bits}[self.name]

    def code_size(self, width: int) -> int:
        """Return the bytes of the codes of one row, without its scale or radius."""
        if self.name == "float32":
            return 4 * width
        if self.name == "fp8":
            return width
        if self.name == "int4":
            return width // 2
        half = width // 2
        return max(0, half * self.bits + (half - 1) * max(self.bits - 1, 1) + 7) // 8

    def row_size(self, width: int) -> int:
        """Return the bytes of one row in a record."""
        return self.code_size(width) + (0 if self.name == "float32" else 4)

    def __str__(self) -> str:
        return f"{self.name} {self.bits} bit" if self.name == "polar" else self.name


def rotates(width: int) -> bool:
    """Tell whether a packed encoding can hold rows of this width: a power of two from 2 to 2048, or none at all."""
    return width == 0 or (2 <= width <= MAX_WIDTH and width & (width - 1) == 0)


def encode(encoding: Encoding, rows: F32) -> tuple[U8, F32]:
    """Encode `rows` `[n, width]`; return codes and the number of each row (ones for float32, which stores none).

    Raise `UnsupportedError` for a width that a packed encoding would store as zeros.
    """
    rows = np.ascontiguousarray(rows, dtype="<f4")
    if not rows.size:
        empty = np.zeros((len(rows), encoding.code_size(rows.shape[1])), np.uint8)
        return empty, np.full(len(rows), 0 if encoding.version == 3 else 1, np.float32)
    if encoding.name == "float32":
        return rows.view(np.uint8).reshape(len(rows), -1), np.ones(len(rows), np.float32)
    if encoding.name == "fp8":
        return _encode_fp8(rows)
    width = rows.shape[1]
    if not rotates(width):
        raise UnsupportedError(
            f"{encoding} cannot hold rows of {width} values", expected="a power of two up to 2048", found=width
        )
    norms = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
    usable = (norms > _TINY) & (norms <= _HUGE)  # false for NaN
    radius = np.where(usable, norms, 0).astype(np.float32)
    rotated = _rotate(np.where(usable[:, None], rows, np.float32(0)))
    codes = _encode_int4(rotated, radius) if encoding.name == "int4" else _encode_polar(rotated, encoding.bits)
    codes[~usable] = 0
    return codes, radius


def decode(encoding: Encoding, codes: U8, numbers: F32, width: int) -> F32:
    """Decode codes `[n, code_size(width)]` and the number of each row into float32 rows `[n, width]`.

    Never fails: a scale or radius out of range gives a row of zeros, as the published readers do.
    """
    if not codes.size:
        return np.zeros((len(codes), width), np.float32)
    if encoding.name == "float32":
        return np.ascontiguousarray(codes).view("<f4").reshape(len(codes), width).astype(np.float32, copy=False)
    if encoding.name == "fp8":
        valid = (numbers > 0) & (numbers < _HUGE)
        values = np.take(_FP8, codes)
        with np.errstate(over="ignore"):  # a scale that no writer makes; the published readers get infinity as well
            values *= np.where(valid, numbers, np.float32(0))[:, None]
        values[~valid] = 0  # also the sign of a zero
        return values
    if not rotates(width):
        return np.zeros((len(codes), width), np.float32)
    radius = np.where((numbers > 0) & np.isfinite(numbers), numbers, np.float32(0))
    if encoding.name == "int4":
        rotated = np.empty((len(codes), width), np.float32)
        rotated[:, 0::2] = np.take(_BOOK, codes & 15)
        rotated[:, 1::2] = np.take(_BOOK, codes >> 4)
        rotated *= (radius / np.float32(math.sqrt(width)))[:, None]
    else:
        rotated = _decode_polar(codes, radius, width, encoding.bits)
    values = _butterflies(rotated)
    values *= _signs(width)
    values[radius == 0] = 0
    return values


def fp8_bound(codes: U8, scales: F32) -> float:
    """Return the largest error of a value of these fp8 rows against what was encoded; infinity where it is not known.

    Half the step between the largest codes, 16 scales, and four float32 roundings of values up to 448 scales. A row of
    zero codes with scale 1 may stand for an infinity, and a row with an invalid scale for anything.
    """
    if not len(scales) or not codes.shape[1]:
        return 0.0
    if not np.all((scales > 0) & (scales <= _HUGE / _LARGEST)):
        return math.inf
    ones = scales == 1
    if np.any(ones) and np.any(~codes[ones].any(axis=1)):
        return math.inf
    if np.any((codes & 0x7F) == 0x7F):
        return math.inf
    return float(scales.max()) * (16 + 448 * 4 * 2.0**-24)


# -- fp8 ----------------------------------------------------------------------------------------------------


def _encode_fp8(rows: F32) -> tuple[U8, F32]:
    magnitudes = np.abs(rows)
    magnitudes[np.isnan(magnitudes)] = 0
    largest = magnitudes.max(axis=1)
    usable = (largest > _TINY) & (largest <= _HUGE)
    safe = np.where(usable, largest, np.float32(1))
    scaled = np.where(usable[:, None], rows, np.float32(0)) * (_LARGEST / safe)[:, None]
    np.clip(scaled, -_LARGEST, _LARGEST, out=scaled)
    scaled[np.isnan(scaled)] = 0
    codes = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    codes[~usable] = 0
    return codes, np.where(usable, safe / _LARGEST, np.float32(1)).astype(np.float32)


# -- rotation -----------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def _signs(width: int) -> F32:
    """D: -1 where the lowest bit of the mixed position is set."""
    mixed = np.uint32(0x9E3779B9) ^ np.arange(width, dtype=np.uint32)
    mixed = mixed + np.uint32(0x9E3779B9)
    mixed = (mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    mixed ^= mixed >> np.uint32(16)
    signs: F32 = np.where(mixed & np.uint32(1), np.float32(-1), np.float32(1)).astype(np.float32)
    signs.flags.writeable = False
    return signs


def _butterflies(rows: F32) -> F32:
    """H, the Walsh-Hadamard transform in natural order, divided by the root of the width; `rows` is overwritten."""
    n, width = rows.shape
    step = max(1, _CACHED // width)
    for at in range(0, n, step):
        # Transposed, so that each step adds long runs; a few rows at a time, so that they stay in the cache.
        part = np.ascontiguousarray(rows[at : at + step].T)
        half = np.empty_like(part)
        stride = 1
        while stride < width:
            pairs = part.reshape(width // (2 * stride), 2, stride, -1)
            other = half.reshape(pairs.shape)
            np.add(pairs[:, 0], pairs[:, 1], out=other[:, 0])
            np.subtract(pairs[:, 0], pairs[:, 1], out=other[:, 1])
            part, half = half, part
            stride *= 2
        rows[at : at + step] = part.T
    rows *= np.float32(1 / math.sqrt(width))
    return rows


def _rotate(rows: F32) -> F32:
    return _butterflies(rows * _signs(rows.shape[1]))


# -- rotated int4 -------------------------------------------------------------------------------------------


def _encode_int4(rotated: F32, radius: F32) -> U8:
    width = rotated.shape[1]
    unit = np.where(radius > 0, np.float32(math.sqrt(width)) / np.where(radius > 0, radius, np.float32(1)), 0)
    unit = unit.astype(np.float32)
    # On an edge between two levels the lower one is taken.
    levels = np.searchsorted(_EDGES, rotated * unit[:, None], side="left").astype(np.uint8)
    packed: U8 = levels[:, 0::2] | (levels[:, 1::2] << np.uint8(4))
    return packed


# -- polar --------------------------------------------------------------------------------------------------


def _window(level: int) -> float:
    """Half the range of the angles of a level above the first, around a quarter of pi."""
    return min(1.5 / math.sqrt(2.0 ** (level - 1)), math.pi / 4)


def _plan(width: int, bits: int) -> list[tuple[int, int, float, float]]:
    """Per level: number of angles, bits of each, lowest angle, range."""
    plan = [(width // 2, bits, -math.pi, 2 * math.pi)]
    count, level = width // 4, 2
    while count:
        half = _window(level)
        plan.append((count, max(bits - 1, 1), math.pi / 4 - half, 2 * half))
        count, level = count // 2, level + 1
    return plan


def _encode_polar(rotated: F32, bits: int) -> U8:
    n, width = rotated.shape
    stream = []
    radii = rotated
    for _, wide, lowest, span in _plan(width, bits):
        first, second = radii[:, 0::2], radii[:, 1::2]
        steps = np.floor((np.arctan2(second, first) - np.float32(lowest)) * np.float32(2**wide / span))
        codes = np.clip(steps, 0, 2**wide - 1).astype(np.uint8)
        stream.append(np.unpackbits(codes[:, :, None], axis=2, bitorder="little", count=wide).reshape(n, -1))
        radii = np.hypot(first, second)
    return np.packbits(np.concatenate(stream, axis=1), axis=1, bitorder="little")


def _decode_polar(codes: U8, radius: F32, width: int, bits: int) -> F32:
    n = len(codes)
    stream = np.unpackbits(codes, axis=1, bitorder="little")
    angles, at = [], 0
    for count, wide, lowest, span in _plan(width, bits):
        part = stream[:, at : at + count * wide].reshape(n, count, wide)
        at += count * wide
        packed = np.packbits(part, axis=2, bitorder="little").reshape(n, count)
        angles.append(np.float32(lowest) + (packed.astype(np.float32) + np.float32(0.5)) * np.float32(span / 2**wide))
    radii = radius.reshape(n, 1)
    for angle in reversed(angles):
        pairs = np.empty((n, angle.shape[1], 2), np.float32)
        np.multiply(radii, np.cos(angle), out=pairs[:, :, 0])
        np.multiply(radii, np.sin(angle), out=pairs[:, :, 1])
        radii = pairs.reshape(n, -1)
    return radii

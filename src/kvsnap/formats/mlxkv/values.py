"""Values of stored tensors as arrays, and arrays as stored bytes. Bit patterns pass unchanged, NaN payloads too."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.codecs.q8 import dequantise, quantise
from kvsnap.formats.mlxkv.model import Q8_NATIVE, ByteOrder, StoredTensor, TensorData
from kvsnap.tensors import numpy_dtype

__all__ = ["GROUP", "bound_of", "decode", "encode_q8", "native_groups", "stored_bytes", "values_of", "widened"]

Array = npt.NDArray[Any]

GROUP = 64
"""Consecutive codes that share one scale in a `q8-native` slab."""
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
# Half of the smallest step of a scale, times 127: what a scale too small for float32 can lose.
_UNDERFLOW = 127 * 2.0**-150


def swapped(data: Any, width: int) -> npt.NDArray[np.uint8]:
    """Return the bytes with each group of `width` reversed (a copy)."""
    raw: Array = np.frombuffer(data, dtype=_UNSIGNED[width]).byteswap()
    return raw.view(np.uint8)


def native_groups(tensor: StoredTensor, shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Return (heads, seq, dim) when a `q8-native` slab can be decoded, else None."""
    if len(shape) != 4 or shape[0] != 1 or min(shape) < 0:
        return None
    _, heads, seq, dim = shape
    width = heads * dim
    if width % GROUP or seq * width + seq * (width // GROUP) * 4 != tensor.n:
        return None
    return heads, seq, dim


def values_of(tensor: StoredTensor) -> Array:
    """Return the values as a flat array of `tensor.dtype`, little-endian; a view of the file where that is possible."""
    if tensor.selector == 1:
        out = np.empty(tensor.n, dtype=np.float32)
        decode(tensor, out)
        return out
    dtype = numpy_dtype(tensor.dtype)
    data: Any = tensor.data.read()
    return np.frombuffer(data if tensor.order == "little" else swapped(data, dtype.itemsize), dtype=dtype)


def decode(tensor: TensorData, out: Array) -> None:
    """Fill `out` (flat, contiguous, of `tensor.dtype`) with the values."""
    if not isinstance(tensor, StoredTensor):
        raw: Any = out.view(np.uint8)
        tensor.read_into(memoryview(raw))
    elif tensor.selector == 1:
        codes = np.frombuffer(tensor.data.read(), dtype=np.int8)
        scales = np.array([tensor.scale_bits], dtype=np.uint32).view(np.float32)
        dequantise(codes[np.newaxis], scales, out[np.newaxis])
    else:
        # As unsigned words: a copy of floats may quieten a NaN.
        width = out.dtype.itemsize
        words = np.frombuffer(tensor.data.read(), dtype=_UNSIGNED[width])
        np.copyto(out.view(_UNSIGNED[width]), words if tensor.order == "little" else words.byteswap())


def decode_groups(tensor: StoredTensor, shape: tuple[int, int, int], out: Array) -> None:
    """Fill `out` (float32 `[heads, seq, dim]`) from a `q8-native` slab: all codes, then all scales, token by token."""
    heads, seq, dim = shape
    width = heads * dim
    data = tensor.data.read()
    codes = np.frombuffer(data[: seq * width], dtype=np.int8).reshape(seq, heads, dim)
    scales = np.frombuffer(data[seq * width :], dtype="<f4" if tensor.order == "little" else ">f4")
    each = np.repeat(scales.astype(np.float32).reshape(seq, width // GROUP), GROUP, axis=1).reshape(seq, heads, dim)
    with np.errstate(over="ignore", invalid="ignore"):
        np.multiply(codes.transpose(1, 0, 2), each.transpose(1, 0, 2), out=out)


def bound_of(tensor: TensorData) -> float:
    """Return the largest absolute error that q8 may have put into a value; 0 for the other encodings.

    A scale is the maximum / 127, rounded, so the largest value may lie a rounding outside of 127 * scale.
    """
    if not isinstance(tensor, StoredTensor) or tensor.selector != 1 or not tensor.n:
        return 0.0
    scale = abs(tensor.scale)
    if not math.isfinite(scale):
        return math.inf
    return max(scale * (0.5 + 2.0**-16), _UNDERFLOW + 127 * scale * 2.0**-24)


def widened(values: Array) -> npt.NDArray[np.float32]:
    """Return float16 or bfloat16 values as float32; NaN keeps its payload, signalling or not."""
    if values.dtype == np.float32:
        return values
    if values.dtype == numpy_dtype("bfloat16"):
        words = values.view(np.uint16).astype(np.uint32)
        return (words << 16).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        wide = values.astype(np.float32)
    if values.dtype == np.float16:
        nan = np.isnan(values)
        if nan.any():
            bits = values.view(np.uint16)[nan].astype(np.uint32)
            wide.view(np.uint32)[nan] = (bits & 0x8000) << 16 | 0x7F800000 | (bits & 0x3FF) << 13
    return wide


def encode_q8(values: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int8], np.float32] | None:
    """Return codes and scale of one tensor (flat float32) as the original computes them, or None: not finite.

    Two corners differ from `codecs.q8`, which is free to choose: a scale that underflows to 0 gives the codes of an
    x86-64, -127 throughout, and the largest float32 is quantised although 127 * scale overflows.
    """
    if not values.size:
        return np.zeros(0, np.int8), np.float32(1)
    codes, scales, good = quantise(values[np.newaxis])
    if not good[0]:
        if not np.isfinite(values).all():
            return None
        # Halving is exact where it matters: what turns subnormal here has code 0 either way.
        codes, scales, _ = quantise((values * np.float32(0.5))[np.newaxis])
        return codes[0], np.float32(scales[0] * np.float32(2))
    if scales[0] == 0:
        codes[...] = -127
    return codes[0], np.float32(scales[0])


def stored_bytes(tensor: StoredTensor, order: ByteOrder, shape: tuple[int, ...] = ()) -> Any:
    """Return the data of a tensor in a byte order; `shape` is that of a `q8-native` slab.

    A `q8-native` slab that does not fit its shape is passed on as it is: where its scales lie is not known.
    """
    data = tensor.data.read()
    if tensor.order == order or not len(data) or tensor.selector == 1:
        return data
    if tensor.selector != 2:
        return swapped(data, 4)
    if tensor.dtype == Q8_NATIVE:
        groups = native_groups(tensor, shape)
        if groups is None:
            return data
        n_codes = math.prod(groups)
        return np.concatenate([np.frombuffer(data[:n_codes], np.uint8), swapped(data[n_codes:], 4)])
    return swapped(data, numpy_dtype(tensor.dtype).itemsize)

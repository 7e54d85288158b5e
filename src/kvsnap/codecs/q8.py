"""Codec 3, `q8`: one signed byte per value and one float32 scale per head (docs/codecs.md section 3).

The arithmetic is the published one of MLXKV files: scale = max|x| / 127, code = x / scale rounded half away from zero,
decoded as code * scale, all in float32. Work goes through tiles of 256 KiB: three of them and the codes fit into a
second level cache of 1 MiB, and the cost of a call of numpy is spread over enough values (64 KiB: a third slower).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.codecs.exact import check_array
from kvsnap.errors import DamagedError, InputError
from kvsnap.protocols import Encoded
from kvsnap.tensors import TensorSpec

__all__ = ["Q8", "dequantise", "quantise"]

Array = npt.NDArray[Any]
Index = tuple[Any, ...]

_TILE = 65536
_ROLES = frozenset({"k", "v", "latent", "rope", "cross_k", "cross_v"})
_MODE_Q8, _MODE_FLOAT32 = 0, 1
_HEADER = struct.Struct("<II")
_TABLE = np.dtype([("scale", "<f4"), ("mode", "<u4")])
# The largest float32 below 0.5. Adding 0.5 itself would round 0.49999997 up to 1, because the sum is rounded to 1.0.
_BELOW_HALF = np.nextafter(np.float32(0.5), np.float32(0))
_BELOW_HALF_BITS, _SIGN_BIT = _BELOW_HALF.view(np.uint32), np.uint32(1 << 31)
_SMALLEST_NORMAL = np.float32(2.0**-126)


@dataclass(frozen=True, slots=True)
class _Cast:
    """Rounding of one of our dtypes: unit roundoff, and half of the smallest step (in the subnormal range)."""

    unit: float
    half_step: float


_CASTS = {
    "float32": _Cast(0.0, 0.0),
    "float16": _Cast(2.0**-11, 2.0**-25),
    "bfloat16": _Cast(2.0**-8, 2.0**-134),
}


def quantise(values: Array) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Quantise groups: `values` float32, float16 or bfloat16 `[group, ...]`, any strides.

    Return codes (int8, shape of `values`, -127..127), scales (float32 `[group]`), and which groups can be quantised
    (bool `[group]`); of the other groups the codes and the scale are 0. A group cannot be quantised when it holds NaN
    or infinity, or when 127 * scale overflows (only where the maximum is the largest float32).
    """
    source = _flat(values)
    scales, good = _scales(_peaks(source))
    codes = np.zeros(values.shape, dtype=np.int8)
    target = codes.reshape(source.shape)
    for first, last in _runs(good.tolist()):
        _quantise_into(source[first:last], scales[first:last], target[first:last])
    return codes, scales, good


def dequantise(codes: npt.NDArray[np.int8], scales: npt.NDArray[np.float32], out: Array) -> None:
    """Write `codes * scales` to `out`: codes int8 `[group, ...]`, scales float32 `[group]`, `out` shaped as `codes`.

    `out` is float32, float16 or bfloat16, any strides; the latter two are rounded to nearest, ties to even.
    """
    target = _flat(out)
    codes = codes.reshape(target.shape)
    single = out.dtype == np.float32
    work = np.empty(0 if single else min(out.size, _TILE), dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for index in _tiles(target.shape):
            tile = target[index]
            part = tile if single else work[: tile.size].reshape(tile.shape)
            np.copyto(part, codes[index])
            np.multiply(part, _scale_at(scales, index, part.ndim), out=part)
            if not single:
                np.copyto(tile, part, casting="unsafe")


class Q8:
    """Lossy, about a quarter of float32 or half of bfloat16. Heads with NaN or infinity are kept as float32."""

    __slots__ = ()
    id = 3
    name = "q8"
    expansion = 4

    def applies(self, spec: TensorSpec) -> bool:
        """Return whether this tensor may be stored with q8; the caller stores the others exactly."""
        return spec.role in _ROLES and spec.dtype in _CASTS

    def encode(self, spec: TensorSpec, values: npt.NDArray[Any]) -> Encoded:
        self._check(spec, values)
        source = _flat(_groups(spec, values))
        n_groups, n = source.shape[0], math.prod(source.shape[1:])
        peaks = _peaks(source)
        scales, good = _scales(peaks)
        kept = good.tolist()
        offsets, total = _places(kept, n)
        data = np.empty(total, dtype=np.uint8)
        table = np.zeros(n_groups, dtype=_TABLE)
        table["scale"], table["mode"] = scales, ~good
        data[: _HEADER.size] = np.frombuffer(_HEADER.pack(n_groups, 0), dtype=np.uint8)
        data[_HEADER.size : _HEADER.size + table.nbytes] = table.view(np.uint8)
        for first, last in _runs(kept):
            shape = (last - first, *source.shape[1:])
            _padding(data, offsets[first], shape)[...] = 0
            _quantise_into(source[first:last], scales[first:last], _codes(data, offsets[first], shape))
        for group in np.flatnonzero(~good):
            raw = np.ascontiguousarray(source[group]).astype("<f4").reshape(-1)
            data[offsets[group] : offsets[group] + raw.nbytes] = raw.view(np.uint8)
        # A cast to float32 and back may change the bits of a NaN, so only float32 is sure to come back the same.
        exact = values.size == 0 or (spec.dtype == "float32" and not good.any())
        return Encoded((data,), total, exact=exact, bound=_bound(spec, peaks, scales, kept))

    def stored_size(self, spec: TensorSpec, n_rows: int) -> int | None:
        """Return the size of a tensor without values; otherwise None, because a head with NaN takes more bytes."""
        if spec.nbytes(n_rows):
            return None
        shape = spec.shape_with(n_rows)
        n_groups = shape[spec.axes.index("head")] if "head" in spec.axes else 1
        return _HEADER.size + _TABLE.itemsize * n_groups

    def usual_size(self, spec: TensorSpec, n_rows: int) -> int:
        """Return the size where every head can be quantised."""
        shape = spec.shape_with(n_rows)
        n_groups = shape[spec.axes.index("head")] if "head" in spec.axes else 1
        return _HEADER.size + (_TABLE.itemsize + _padded(math.prod(shape) // max(1, n_groups))) * n_groups

    def decode(self, spec: TensorSpec, data: memoryview, out: npt.NDArray[Any]) -> None:
        self._check(spec, out)
        target = _flat(_groups(spec, out))
        n = math.prod(target.shape[1:])
        stored = np.frombuffer(data, dtype=np.uint8)
        scales, quantised = _read_table(spec, stored, target.shape[0])
        offsets, total = _places(quantised, n)
        if stored.size != total:
            what = "is cut off" if stored.size < total else "has trailing bytes"
            raise _damaged(spec, what, f"{total} bytes", f"{stored.size} bytes")
        runs = [(first, (last - first, *target.shape[1:])) for first, last in _runs(quantised)]
        for first, shape in runs:
            if _padding(stored, offsets[first], shape).any():
                raise _damaged(spec, "has padding that is not zero", "0", "another value")
        for first, shape in runs:
            last = first + shape[0]
            dequantise(_codes(stored, offsets[first], shape), scales[first:last], target[first:last])
        for group in (g for g, whole in enumerate(quantised) if not whole):
            raw = stored[offsets[group] : offsets[group] + 4 * n].view("<f4")
            with np.errstate(over="ignore", invalid="ignore"):
                np.copyto(target[group], raw.reshape(target.shape[1:]), casting="unsafe")

    def cut(self, spec: TensorSpec, data: memoryview, n_rows: int, kept: int) -> npt.NDArray[np.uint8]:
        shape = _groups(spec, np.empty(spec.shape_with(n_rows), np.bool_)).shape
        before = (slice(None),) * _row_axis(spec)
        stored = np.frombuffer(data, dtype=np.uint8)
        _, quantised = _read_table(spec, stored, shape[0])
        offsets, total = _places(quantised, math.prod(shape[1:]))
        if stored.size != total:
            raise _damaged(spec, "has the wrong length", f"{total} bytes", f"{stored.size} bytes")
        pieces = [stored[: offsets[0] if offsets else total]]
        for offset, whole in zip(offsets, quantised, strict=True):
            width = 1 if whole else 4
            group = stored[offset : offset + width * math.prod(shape[1:])].view(np.int8 if whole else "<f4")
            place = (*before, slice(0, kept))
            rows = group.reshape(1, *shape[1:])[place]
            pieces.append(np.ascontiguousarray(rows).reshape(-1).view(np.uint8))
            pieces.append(np.zeros(-rows.size % 4 if whole else 0, np.uint8))
        return np.concatenate(pieces)

    def _check(self, spec: TensorSpec, values: Array) -> None:
        if not self.applies(spec):
            raise InputError(
                f"q8 does not apply to tensor {spec.name}",
                expected=f"a role of {', '.join(sorted(_ROLES))} in {', '.join(_CASTS)}",
                found=f"{spec.role} in {spec.dtype}",
            )
        check_array(spec, values)


def _groups(spec: TensorSpec, values: Array) -> Array:
    """Return a view with one group per index of the first axis: the heads, or the whole tensor as one group."""
    if "head" in spec.axes:
        return np.moveaxis(values, spec.axes.index("head"), 0)
    return values[np.newaxis]


def _row_axis(spec: TensorSpec) -> int:
    """Return where the rows are in what `_groups` returns."""
    head = spec.axes.index("head") if "head" in spec.axes else -1
    return spec.row_axis if 0 <= head < spec.row_axis else spec.row_axis + 1


def _flat(groups: Array) -> Array:
    """Return `[group, value]` where each group lies in one piece, so that tiles need not follow axes; else `groups`."""
    if groups.ndim > 2 and groups.size and groups[0].flags.c_contiguous:
        flat: Array = groups.reshape(groups.shape[0], -1)
        return flat
    return groups


def _tiles(shape: tuple[int, ...]) -> Iterator[Index]:
    """Yield indices that cut an array of this shape into tiles of at most `_TILE` values, in order."""
    if 0 in shape:
        return
    axis, inner = len(shape), 1
    while axis > 0 and inner * shape[axis - 1] <= _TILE:
        axis -= 1
        inner *= shape[axis]
    if axis == 0:
        yield (slice(None),)
        return
    cut, step = axis - 1, _TILE // inner
    for lead in np.ndindex(*shape[:cut]):
        for start in range(0, shape[cut], step):
            yield (*lead, slice(start, start + step))


def _scale_at(scales: Array, index: Index, ndim: int) -> Any:
    """Return the scale of a tile inside one group, or the scales of a tile of whole groups, shaped to broadcast."""
    picked = scales[index[0]]
    return picked.reshape((-1,) + (1,) * (ndim - 1)) if isinstance(index[0], slice) else picked


def _peaks(groups: Array) -> npt.NDArray[np.float32]:
    """Return max|x| of each group; NaN where there is one (a maximum keeps NaN, so one pass finds NaN and infinity)."""
    peaks = np.zeros(groups.shape[0], dtype=np.float32)
    single = groups.dtype == np.float32
    work = np.empty(0 if single else min(groups.size, _TILE), dtype=np.float32)
    for index in _tiles(groups.shape):
        tile = groups[index]
        if not single:
            wide = work[: tile.size].reshape(tile.shape)
            np.copyto(wide, tile)
            tile = wide
        # Two reductions read faster than one that first writes |x|.
        over = tuple(range(1 if isinstance(index[0], slice) else 0, tile.ndim))
        found = np.maximum(tile.max(axis=over), -tile.min(axis=over))
        peaks[index[0]] = np.maximum(peaks[index[0]], found)
    return peaks


def _scales(peaks: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Return the scale of each group and which groups can be quantised; the scale of the others is 0."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        scales = peaks / np.float32(127)
        good = np.isfinite(scales * np.float32(127))
    scales[peaks == 0] = 1
    scales[~good] = 0
    return scales, good


def _runs(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """Return the spans `[first, last)` of consecutive True."""
    found, first = [], 0
    for flag, same in groupby(flags):
        last = first + sum(1 for _ in same)
        if flag:
            found.append((first, last))
        first = last
    return found


def _quantise_into(groups: Array, scales: npt.NDArray[np.float32], codes: Array) -> None:
    """Write the codes of finite groups. A scale that underflowed to 0 is replaced by 1, which gives code 0."""
    # Only a subnormal scale is rounded so coarsely that a quotient can pass 127.5.
    limit = bool((scales < _SMALLEST_NORMAL).any())
    divisors = np.where(scales == 0, np.float32(1), scales)
    quotient = np.empty(min(groups.size, _TILE), dtype=np.float32)
    half = np.empty_like(quotient)
    quotient_bits, half_bits = quotient.view(np.uint32), half.view(np.uint32)
    for index in _tiles(groups.shape):
        tile = groups[index]
        n = tile.size
        q = quotient[:n].reshape(tile.shape)
        divisor = _scale_at(divisors, index, tile.ndim)
        if tile.dtype == np.float32:
            np.divide(tile, divisor, out=q)
        else:
            np.copyto(q, tile)
            np.divide(q, divisor, out=q)
        if limit:
            np.clip(q, -127, 127, out=q)
        # copysign(_BELOW_HALF, q), at four times the speed of np.copysign.
        np.bitwise_and(quotient_bits[:n], _SIGN_BIT, out=half_bits[:n])
        np.bitwise_or(half_bits[:n], _BELOW_HALF_BITS, out=half_bits[:n])
        np.add(quotient[:n], half[:n], out=quotient[:n])
        np.copyto(codes[index], q, casting="unsafe")


def _padded(n: int) -> int:
    return (n + 3) & ~3


def _places(quantised: Sequence[bool], n: int) -> tuple[list[int], int]:
    """Return where the data of each group starts, and the length of the part."""
    start = _HEADER.size + _TABLE.itemsize * len(quantised)
    *offsets, total = accumulate((_padded(n) if whole else 4 * n for whole in quantised), initial=start)
    return offsets, total


def _codes(data: Array, offset: int, shape: tuple[int, ...]) -> npt.NDArray[np.int8]:
    """Return the codes of consecutive groups as a view of the part: int8 of `shape` = `[group, ...]`."""
    n = math.prod(shape[1:])
    step = _padded(n)
    piece = data[offset : offset + shape[0] * step]
    codes: npt.NDArray[np.int8] = piece.view(np.int8).reshape(shape[0], step)[:, :n]
    if len(shape) != 2:
        inner = [math.prod(shape[axis + 1 :]) for axis in range(1, len(shape))]
        codes = np.ndarray(shape, np.int8, piece, strides=(step, *inner))
    return codes


def _padding(data: Array, offset: int, shape: tuple[int, ...]) -> Array:
    """Return the padding behind the codes of consecutive groups as a view `[group, 0..3]`."""
    n = math.prod(shape[1:])
    step = _padded(n)
    padding: Array = data[offset : offset + shape[0] * step].reshape(shape[0], step)[:, n:]
    return padding


def _read_table(spec: TensorSpec, stored: Array, n_groups: int) -> tuple[npt.NDArray[np.float32], list[bool]]:
    """Return the scales and which groups are quantised, after checking the table against the bytes that are there."""
    start = _HEADER.size + _TABLE.itemsize * n_groups
    if stored.size < start:
        raise _damaged(spec, "is cut off in its table", f"at least {start} bytes", f"{stored.size} bytes")
    count, zero = _HEADER.unpack(stored[: _HEADER.size].tobytes())
    if count != n_groups:
        raise _damaged(spec, "has the wrong number of groups", n_groups, count)
    if zero != 0:
        raise _damaged(spec, "has a reserved word that is not zero", 0, zero)
    table = stored[_HEADER.size : start].view(_TABLE)
    modes = table["mode"].tolist()
    for scale, mode in zip(table["scale"].tolist(), modes, strict=True):
        if mode > _MODE_FLOAT32:
            raise _damaged(spec, "has a group of unknown mode", "0 or 1", mode)
        if not math.isfinite(scale) or math.copysign(1, scale) < 0 or (mode == _MODE_FLOAT32 and scale != 0):
            expected = "finite and not negative; 0 for mode 1"
            raise _damaged(spec, "has a scale that cannot be", expected, f"{scale} for mode {mode}")
    return table["scale"].astype(np.float32), [mode == _MODE_Q8 for mode in modes]


def _damaged(spec: TensorSpec, what: str, expected: object, found: object) -> DamagedError:
    return DamagedError(f"a q8 part of tensor {spec.name} {what}", expected=expected, found=found)


def _bound(
    spec: TensorSpec, peaks: npt.NDArray[np.float32], scales: npt.NDArray[np.float32], quantised: Sequence[bool]
) -> float:
    """Return the bound of docs/codecs.md section 3.5: the largest of the quantised groups, 0 where there are none."""
    cast = _CASTS[spec.dtype]
    bound = 0.0
    for peak, scale, whole in zip(peaks.tolist(), scales.tolist(), quantised, strict=True):
        if whole and peak:
            top = 127 * scale
            single = max(scale * (0.5 + 2.0**-16), peak - top + top * 2.0**-24)
            rounding = max(top * (1 + 2.0**-23) * cast.unit, cast.half_step)
            bound = max(bound, single + min(single, rounding))
    return bound

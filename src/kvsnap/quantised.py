"""Layers whose keys and values are kept as codes: what the text of a layer says, sizes, and rows out of codes.

Spec section 6. Rows are computed step by step as the library computes them that made the codes, in the same dtype, so
that they are the same bits. numpy only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.errors import FormatError, UnsupportedError
from kvsnap.tensors import Layer, Tensor

__all__ = ["Quantisation", "rows_of", "shape_of"]

Array = npt.NDArray[Any]

_PER_CODE = {1: 8, 2: 4, 3: 10, 4: 2, 8: 1}
"""Values in one stored number, by their bits; 3 bits stand in an int32."""
_KNOWN = {"hqq": ((1, 2, 3, 4, 8), (0, 1)), "quanto": ((2, 4), (0, -1))}
"""Bits and axes by kind."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How the keys and values of a layer are quantised: `kind` is `hqq`, `quanto` or `fp8`.

    `bits` of a code, `group` values share a scale, `axis_key` and `axis_value` tell along which axis, and `residual` is
    the length from which rows that are kept as they are become codes. `fp8` has one scale for each tensor, and no more
    to say.
    """

    kind: str
    bits: int = 8
    group: int = 0
    axis_key: int = 0
    axis_value: int = 0
    residual: int = 0

    @property
    def text(self) -> str:
        """The canonical JSON that stands in LAYOUT."""
        names = ("kind", "bits") if self.kind == "fp8" else tuple(self.__dataclass_fields__)
        return json.dumps({name: getattr(self, name) for name in names}, sort_keys=True, separators=(",", ":"))

    @staticmethod
    def of(text: str) -> Quantisation:
        """Read such a text. Raise `FormatError`; `UnsupportedError` for one that is not known here."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FormatError("the quantisation of a layer is no JSON", found=text[:60]) from error
        known = isinstance(data, dict) and set(data) <= set(Quantisation.__dataclass_fields__)
        known = known and isinstance(data.get("kind"), str)
        numbers = [value for name, value in data.items() if name != "kind"] if known else []
        if known and all(isinstance(value, int) and not isinstance(value, bool) for value in numbers):
            found = Quantisation(**data)
            bits, axes = _KNOWN.get(found.kind, ((), ()))
            grouped = found.bits in bits and found.group > 0 and {found.axis_key, found.axis_value} <= set(axes)
            if grouped or (found.kind == "fp8" and found.bits == 8):
                return found
        raise UnsupportedError(
            "the quantisation of a layer is not known", expected="hqq, quanto or fp8", found=text[:200]
        )

    @property
    def dtype(self) -> str:
        """Name of the dtype of the codes."""
        if self.kind == "fp8":
            return "float8_e4m3fn"
        return "int32" if self.bits == 3 else "uint8"

    @property
    def per_number(self) -> int:
        """Values in one stored number."""
        return 1 if self.kind == "fp8" else _PER_CODE[self.bits]

    def by_rows(self, of_values: bool) -> bool:
        """Tell whether a group is a row of the matrix of codes (else a column), of the keys or of the values."""
        axis = self.axis_value if of_values else self.axis_key
        return axis == (1 if self.kind == "hqq" else 0)

    def sizes(self, of_values: bool, n_values: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Return the shapes of the matrix of values, of the codes that they are packed in, and of the scales."""
        groups = n_values // self.group
        by_rows = self.by_rows(of_values)
        plain = (groups, self.group) if by_rows else (self.group, groups)
        packed = -(-plain[0] // _PER_CODE[self.bits])
        return plain, (packed, plain[1]), ((groups, 1) if by_rows else (1, groups))


def _unpacked(how: Quantisation, codes: Array, n: int) -> Array:
    """Return the first `n` rows of the values that are packed along the first axis."""
    per = _PER_CODE[how.bits]
    places = range(per) if how.kind == "quanto" else range(per - 1, -1, -1)
    mask = (1 << how.bits) - 1
    return np.concatenate([(codes >> (how.bits * place)) & mask for place in places])[:n]


def _grouped_rows(how: Quantisation, of_values: bool, parts: Sequence[Array], heads: int, width: int) -> Array:
    codes, scale, zero = parts
    n_values, in_row = scale.size * how.group, heads * width
    plain, packed, scales = how.sizes(of_values, n_values)
    if not in_row or n_values % in_row or (codes.shape, scale.shape, zero.shape) != (packed, scales, scales):
        raise FormatError(
            "codes and scales of a layer do not fit each other",
            expected=f"{list(packed)}, {list(scales)}", found=f"{list(codes.shape)}, {list(scale.shape)}",
        )  # fmt: skip
    shape = (heads, n_values // in_row, width)
    values = _unpacked(how, codes, plain[0]).astype(scale.dtype)
    if how.kind == "hqq":
        found: Array = (values - zero) * scale
        return found.reshape(shape)
    found = scale * values - zero
    if how.by_rows(of_values):
        return found.reshape(shape)
    split: Array = found.reshape(how.group, width, -1).transpose(2, 0, 1)
    return split.reshape(shape)


def rows_of(layer: Layer, *, of_values: bool, keep: bool = False) -> Array:
    """Return keys, or values, of a quantised layer `[head, row, dim]` in the dtype of its cache, all rows of it.

    They are the bits that the layer hands to the attention at its next pass. With `keep` the codes stay in memory for
    the next call, as `Tensor.array` does. Raise `FormatError` for tensors that do not fit each other, and what
    `Quantisation.of` raises.
    """
    how, found = _tensors_of(layer, of_values)
    *parts, residual = (tensor.array if keep else tensor.values() for tensor in found)
    if how.kind == "fp8":
        rows = _scaled_rows(parts[0], parts[1], residual)
    elif not math.prod(parts[1].shape):
        rows = residual[:, :0]
    else:
        rows = _grouped_rows(how, of_values, parts, residual.shape[0], residual.shape[2])
    return np.concatenate([rows, residual], axis=1)


def shape_of(layer: Layer, *, of_values: bool) -> tuple[int, int, int]:
    """Return heads, rows and width of what `rows_of` returns, without reading a tensor. Raise as it does."""
    how, (codes, scale, *_, residual) = _tensors_of(layer, of_values)
    heads, kept, width = residual.shape
    if how.kind == "fp8":
        n_rows = codes.shape[1] if len(codes.shape) == 3 else 0
    else:
        n_rows = math.prod(scale.shape) * how.group // max(1, heads * width)
    return heads, n_rows + kept, width


def _tensors_of(layer: Layer, of_values: bool) -> tuple[Quantisation, list[Tensor]]:
    """Return how a layer is quantised and the tensors of its keys, or values: codes, scale, perhaps zero, residual."""
    how, place = Quantisation.of(layer.quantisation), int(of_values)
    by_role: dict[str, list[Tensor]] = {}
    for tensor in layer.tensors:
        by_role.setdefault(tensor.role, []).append(tensor)
    roles = ("code", "scale", "residual") if how.kind == "fp8" else ("code", "scale", "zero", "residual")
    for role in roles:
        count = len(by_role.get(role, ()))
        if count != 2:
            raise FormatError(f"layer {layer.index} is quantised, by two of each {role}", expected=2, found=count)
    found = [by_role[role][place] for role in roles]
    wanted = [how.dtype, "float32" if how.kind == "fp8" else found[-1].spec.dtype, *[found[-1].spec.dtype] * 2]
    for tensor, dtype in zip(found, wanted, strict=False):
        if tensor.spec.dtype != dtype:
            raise FormatError(f"{tensor.name} is in another dtype", expected=dtype, found=tensor.spec.dtype)
    shape = found[-1].shape
    if len(shape) != 3:
        raise FormatError(f"layer {layer.index}: residual rows are not [head, row, dim]", found=list(shape))
    return how, found


def _scaled_rows(codes: Array, scale: Array, residual: Array) -> Array:
    if scale.size != 1 or codes.ndim != 3 or codes.shape[::2] != residual.shape[::2]:
        raise FormatError(
            "codes and scales of a layer do not fit each other",
            expected=f"{list(residual.shape)}, [1]", found=f"{list(codes.shape)}, {list(scale.shape)}",
        )  # fmt: skip
    rows: Array = (codes.astype(np.float32) * scale.reshape(())).astype(residual.dtype)
    return rows

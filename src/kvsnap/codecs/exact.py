"""Codec 1, `exact`: the bytes of the values, in C order, little-endian (docs/codecs.md section 2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.errors import DamagedError, InputError
from kvsnap.protocols import Encoded
from kvsnap.tensors import TensorSpec, numpy_dtype

__all__ = ["Exact", "check_array"]


def check_array(spec: TensorSpec, values: npt.NDArray[Any]) -> None:
    """Raise `InputError` unless `values` has the dtype of the spec and, apart from its rows, its shape."""
    n_rows = values.shape[spec.row_axis] if 0 <= spec.row_axis < values.ndim else 1
    expected = spec.shape_with(n_rows)
    if values.shape != expected or values.dtype != numpy_dtype(spec.dtype):
        raise InputError(
            f"the array given for tensor {spec.name} does not fit",
            expected=f"{spec.dtype}{list(expected)}",
            found=f"{values.dtype}{list(values.shape)}",
        )


class Exact:
    """Values as they are. Contiguous arrays are encoded as a view; others are copied once."""

    __slots__ = ()
    id = 1
    name = "exact"
    expansion = 1

    def applies(self, spec: TensorSpec) -> bool:  # noqa: ARG002 - the same question is put to every codec
        """Return True: any tensor can be stored exactly."""
        return True

    def encode(self, spec: TensorSpec, values: npt.NDArray[Any]) -> Encoded:
        check_array(spec, values)
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return Encoded((data,), data.nbytes, exact=True, bound=0.0)

    def stored_size(self, spec: TensorSpec, n_rows: int) -> int | None:
        return spec.nbytes(n_rows)

    def usual_size(self, spec: TensorSpec, n_rows: int) -> int:
        return spec.nbytes(n_rows)

    def decode(self, spec: TensorSpec, data: memoryview, out: npt.NDArray[Any]) -> None:
        check_array(spec, out)
        if data.nbytes != out.nbytes:
            raise _wrong_length(spec, out.nbytes, data.nbytes)
        np.copyto(out, np.frombuffer(data, dtype=out.dtype).reshape(out.shape))

    def cut(self, spec: TensorSpec, data: memoryview, n_rows: int, kept: int) -> npt.NDArray[np.uint8]:
        if data.nbytes != spec.nbytes(n_rows):
            raise _wrong_length(spec, spec.nbytes(n_rows), data.nbytes)
        values = np.frombuffer(data, dtype=numpy_dtype(spec.dtype)).reshape(spec.shape_with(n_rows))
        before = (slice(None),) * spec.row_axis
        place = (*before, slice(0, kept))
        rows = np.ascontiguousarray(values[place])
        return rows.reshape(-1).view(np.uint8)


def _wrong_length(spec: TensorSpec, expected: int, found: int) -> DamagedError:
    return DamagedError(
        f"an exact part of tensor {spec.name} has the wrong length",
        expected=f"{expected} bytes",
        found=f"{found} bytes",
    )

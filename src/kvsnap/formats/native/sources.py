"""Tensor bytes in a file: read on first use, checked before they are handed out, copied once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from kvsnap import codecs
from kvsnap.errors import DamagedError, FormatError
from kvsnap.formats.native.tables import Part
from kvsnap.tensors import TensorSpec, numpy_dtype

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["JoinedSource", "PartSource", "Slice"]

_STEP = 256 * 1024
Array = npt.NDArray[Any]


class Bytes(Protocol):
    """What is needed of a file here."""

    @property
    def path(self) -> str | None:
        """Name for messages."""

    @property
    def size(self) -> int:
        """Length in bytes."""

    def read_at(self, offset: int, length: int) -> bytes:
        """Bytes at a place."""

    def read_into(self, offset: int, buffer: WriteableBuffer) -> int:
        """Fill a buffer from a place."""

    def map(self) -> memoryview:
        """The whole file, read-only."""


class PartSource:
    """One part of one tensor. Its sizes are checked here against the file and LAYOUT, its bytes when read."""

    __slots__ = ("codec", "file", "mapped", "offset", "part", "spec")

    def __init__(self, file: Bytes, spec: TensorSpec, part: Part, payload: int, *, mapped: bool) -> None:
        self.file, self.spec, self.part, self.mapped = file, spec, part, mapped
        self.offset = payload + part.offset
        self.codec = codecs.codec_of_id(part.codec)
        if self.offset + part.stored > file.size:
            raise DamagedError(f"{self.what} ends behind the file", path=file.path, offset=self.offset)
        expected = self.codec.stored_size(spec, part.n_rows)
        if part.decoded != spec.nbytes(part.n_rows) or (expected is not None and expected != part.stored):
            raise FormatError(
                f"{self.what} has sizes that contradict LAYOUT", path=file.path, offset=self.offset,
                expected=f"{spec.nbytes(part.n_rows)} decoded, {expected} stored",
                found=f"{part.decoded}, {part.stored}",
            )  # fmt: skip

    @property
    def what(self) -> str:
        """The part in words, for messages."""
        first, last = self.part.row_start, self.part.row_start + self.part.n_rows
        return f"{self.spec.name} rows [{first}, {last})" if self.spec.grows else self.spec.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Decoded shape."""
        return self.spec.shape_with(self.part.n_rows)

    def stored(self) -> memoryview:
        """Return the stored bytes, checked."""
        part = self.part
        if self.mapped:
            data = self.file.map()[self.offset : self.offset + part.stored]
        else:
            data = memoryview(self.file.read_at(self.offset, part.stored))
        if xxhash.xxh3_64_intdigest(data) != part.checksum:
            raise self.damage()
        return data

    def damage(self) -> DamagedError:
        """Return the error that names tensor, rows and place."""
        return DamagedError(f"{self.what} does not fit its checksum", path=self.file.path, offset=self.offset)

    @property
    def is_plain(self) -> bool:
        """True when the stored bytes are the values."""
        return self.codec.id == codecs.EXACT.id

    def array(self) -> Array:
        """Return the values, read-only: a view of the mapped file where that is possible."""
        if self.is_plain:
            values = np.frombuffer(self.stored(), dtype=numpy_dtype(self.spec.dtype)).reshape(self.shape)
        else:
            values = np.empty(self.shape, dtype=numpy_dtype(self.spec.dtype))
            self.codec.decode(self.spec, self.stored(), values)
        values.flags.writeable = False
        return values

    def read_into(self, out: Array) -> None:
        """Fill `out`, checked."""
        if not self.is_plain or not out.flags.c_contiguous or not out.nbytes:
            self.codec.decode(self.spec, self.stored(), out)
            return
        target = out.reshape(-1).view(np.uint8)
        digest = xxhash.xxh3_64()
        if self.mapped:
            # Small steps keep what was copied in the cache of the processor for the hash that follows.
            origin = np.frombuffer(self.file.map(), np.uint8, self.part.stored, self.offset)
            for at in range(0, len(target), _STEP):
                target[at : at + _STEP] = origin[at : at + _STEP]
                digest.update(target[at : at + _STEP].data)
        else:
            for at in range(0, len(target), _STEP):
                piece = target[at : at + _STEP].data
                self.file.read_into(self.offset + at, piece)
                digest.update(piece)
        if digest.intdigest() != self.part.checksum:
            raise self.damage()


@dataclass(frozen=True, slots=True)
class Slice:
    """The first `n_rows` rows of a part."""

    source: PartSource
    n_rows: int

    @property
    def is_whole(self) -> bool:
        """True when nothing is cut off."""
        return self.n_rows == self.source.part.n_rows


class JoinedSource:
    """The rows of one tensor, from the spans of a session, one behind the other."""

    __slots__ = ("slices", "spec")

    def __init__(self, spec: TensorSpec, slices: tuple[Slice, ...]) -> None:
        self.spec, self.slices = spec, slices

    @property
    def n_rows(self) -> int:
        """Rows in all."""
        return sum(piece.n_rows for piece in self.slices)

    def array(self) -> Array:
        """Return the values in memory of their own, read-only."""
        out = np.empty(self.spec.shape_with(self.n_rows), dtype=numpy_dtype(self.spec.dtype))
        self.read_into(out)
        out.flags.writeable = False
        return out

    def read_into(self, out: Array) -> None:
        """Fill `out`, part by part, each checked."""
        axis, at = self.spec.row_axis, 0
        before = (slice(None),) * axis
        for piece in self.slices:
            place = (*before, slice(at, at + piece.n_rows))
            target = out[place]
            if piece.is_whole:
                piece.source.read_into(target)
            elif piece.n_rows:
                kept = (*before, slice(0, piece.n_rows))
                np.copyto(target, piece.source.array()[kept])
            at += piece.n_rows

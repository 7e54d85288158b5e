"""Tensor bytes in a file: read on first use, checked before they are handed out, copied once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from kvsnap import codecs
from kvsnap.errors import DamagedError, FormatError, KvsnapError, UnsupportedError, VersionError
from kvsnap.formats.native.tables import Part
from kvsnap.protocols import Codec
from kvsnap.tensors import TensorSpec, numpy_dtype

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["Bytes", "PartSource", "Sizes", "Slice"]

_STEP = 1 << 20
MAX_VALUES = 2**56
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


class Sizes:
    """Spec, codec and sizes of parts: the same few for all spans of a session, so computed once each.

    `replaced` tells which tensors may stand there: those that are replaced at each commit (in a STATE), or all others.
    """

    def __init__(self, specs: Sequence[TensorSpec], *, replaced: bool) -> None:
        self._specs = {spec.id: spec for spec in specs}
        self._replaced = replaced
        self._known: dict[tuple[int, int, int], tuple[TensorSpec, Codec, int, int | None]] = {}

    def of(self, part: Part, path: str | None, offset: int) -> tuple[TensorSpec, Codec, int, int | None]:
        """Return spec, codec, decoded size and stored size (None: depends on the values) of a part."""
        key = (part.tensor, part.codec, part.n_rows)
        known = self._known.get(key)
        if known is None:
            if part.tensor not in self._specs:
                raise FormatError(
                    "a part names a tensor that LAYOUT does not have", path=path, offset=offset, found=part.tensor
                )
            spec = self._specs[part.tensor]
            if (spec.growth == "replaced") != self._replaced:
                raise FormatError(
                    f"{spec.name} stands in the wrong kind of record", path=path, offset=offset,
                    expected="replaced tensors in STATE, all others in SPAN", found=spec.growth,
                )  # fmt: skip
            try:
                codec = codecs.codec_of_id(part.codec)
            except (VersionError, UnsupportedError) as error:
                error.path, error.offset = path, offset
                raise
            known = (spec, codec, spec.nbytes(part.n_rows), codec.stored_size(spec, part.n_rows))
            self._known[key] = known
        return known


class PartSource:
    """One part of one tensor. Its sizes are checked here against the file and LAYOUT, its bytes when read."""

    __slots__ = ("codec", "file", "mapped", "offset", "part", "spec")

    def __init__(self, file: Bytes, sizes: Sizes, part: Part, payload: int, *, mapped: bool) -> None:
        self.file, self.part, self.mapped = file, part, mapped
        self.offset = payload + part.offset
        self.spec, self.codec, decoded, stored = sizes.of(part, file.path, self.offset)
        if (part.row_start and not self.spec.grows) or (part.n_rows != 1 and self.spec.row_axis < 0):
            raise FormatError(
                f"{self.what} has rows, and is no tensor that grows", path=file.path, offset=self.offset,
                expected="row_start 0; n_rows 1 where no axis varies", found=f"{part.row_start}, {part.n_rows}",
            )  # fmt: skip
        if self.offset + part.stored > file.size:
            raise DamagedError(f"{self.what} ends behind the file", path=file.path, offset=self.offset)
        if stored is None and part.decoded > part.stored * self.codec.expansion:
            stored = -(-part.decoded // self.codec.expansion)
        if part.decoded != decoded or (stored is not None and stored != part.stored):
            raise FormatError(
                f"{self.what} has sizes that contradict LAYOUT", path=file.path, offset=self.offset,
                expected=f"{decoded} decoded, {stored} stored", found=f"{part.decoded}, {part.stored}",
            )  # fmt: skip
        # A shape with an empty axis takes no bytes, but the product of the others is limited all the same.
        if not decoded and math.prod(max(size, 1) for size in self.shape) > MAX_VALUES:
            raise FormatError(
                f"{self.what} has an impossible shape", path=file.path, offset=self.offset,
                expected=f"at most {MAX_VALUES} values", found=list(self.shape),
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
            with self._named():
                data = memoryview(self.file.read_at(self.offset, part.stored))
        if xxhash.xxh3_64_intdigest(data) != part.checksum:
            raise self.damage()
        return data

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the part in an error of the file, which knows places only."""
        try:
            yield
        except DamagedError as error:
            error.message = f"{self.what}: {error.message}"
            raise

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
            self._decode(values)
        values.flags.writeable = False
        return values

    def _decode(self, out: Array) -> None:
        data = self.stored()
        try:
            self.codec.decode(self.spec, data, out)
        except KvsnapError as error:  # a codec knows the part, not the file it stands in
            error.path, error.offset = self.file.path, self.offset
            raise

    def read_into(self, out: Array) -> None:
        """Fill `out`, checked."""
        if not self.is_plain or not out.flags.c_contiguous or not out.nbytes:
            self._decode(out)
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
                with self._named():
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

    def read_into(self, out: Array, at: int) -> None:
        """Fill the rows of `out` from `at` on, checked."""
        before = (slice(None),) * self.source.spec.row_axis
        place = (*before, slice(at, at + self.n_rows))
        if self.is_whole:
            self.source.read_into(out[place])
        elif self.n_rows:
            kept = (*before, slice(0, self.n_rows))
            np.copyto(out[place], self.source.array()[kept])

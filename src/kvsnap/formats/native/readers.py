"""What the native format reads from: a file, or bytes in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvsnap.errors import DamagedError
from kvsnap.files import Appender
from kvsnap.records import ReadAt

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["BytesReader", "FileReader", "Written"]


class FileReader(ReadAt, Protocol):
    """A `ReadAt` that can also fill arrays and be mapped."""

    def read_into(self, offset: int, buffer: WriteableBuffer) -> int:
        """Fill the buffer from `offset` on."""

    def map(self) -> memoryview:
        """The whole file, read-only."""


class BytesReader:
    """A file in memory, for `loads`."""

    path: str | None = None

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = memoryview(data).toreadonly().cast("B")
        self.size = len(self._data)

    def read_at(self, offset: int, length: int) -> bytes:
        """Return these bytes, or raise `DamagedError`."""
        if offset + length > self.size:
            raise DamagedError("the data is cut off", offset=offset, expected=length, found=max(0, self.size - offset))
        return bytes(self._data[offset : offset + length])

    def read_into(self, offset: int, buffer: WriteableBuffer) -> int:
        """Fill the buffer."""
        view = memoryview(buffer).cast("B")
        view[:] = self.read_at(offset, view.nbytes)
        return view.nbytes

    def map(self) -> memoryview:
        """Return the data itself."""
        return self._data


class Written:
    """A new file of known length, read before it has its name."""

    def __init__(self, appender: Appender, size: int) -> None:
        self.path: str | None = appender.path
        self.size = size
        self._appender = appender

    def read_at(self, offset: int, length: int) -> bytes:
        """Return these bytes."""
        return self._appender.read_at(offset, length)

    def read_into(self, offset: int, buffer: WriteableBuffer) -> int:
        """Fill the buffer."""
        return self._appender.read_into(offset, buffer)

    def map(self) -> memoryview:
        """Return all bytes."""
        return memoryview(self.read_at(0, self.size))

"""Files open for reading: `Reader`, and what it shares with the appender."""

from __future__ import annotations

import contextlib
import mmap
import os
from types import TracebackType
from typing import TYPE_CHECKING

from kvsnap.errors import InputError, KvsnapError
from kvsnap.files import system

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from typing_extensions import Self

    from kvsnap.files.system import StrPath


class OpenFile:
    """A descriptor with a path, closed once."""

    _locks = False

    def __init__(self, fd: int, path: str) -> None:
        self.path = path
        self._process = os.getpid()
        self._fd = fd

    def _checked(self) -> int:
        if self._fd < 0:
            raise InputError("the file is closed", path=self.path)
        return self._fd

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def close(self) -> None:
        """Close the file and give up its lock. Closing twice is allowed."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            if self._locks and self._process == os.getpid():  # a forked process does not give up what is not its own
                system.unlock_named(fd, self.path)
            try:
                os.close(fd)
            except OSError as error:
                raise system.translate(error, self.path, "close") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, KvsnapError):  # __init__ may not have come this far
            self.close()


class Reader(OpenFile):
    """A file open for reading. Takes no lock, never changes the file, and may be used by several threads at once.

    `size` is the length when it was opened; bytes appended later are not for this reader. Raise MissingError,
    InputError for anything but a regular file, StorageError (no permission).
    """

    def __init__(self, path: StrPath, *, follow_symlinks: bool = True) -> None:
        text = system.path_text(path)
        super().__init__(
            system.open_regular(text, os.O_RDONLY | (0 if follow_symlinks else system.NOFOLLOW), "read"), text
        )
        self.size = os.fstat(self._fd).st_size
        self._map: mmap.mmap | None = None

    def read_at(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset` on.

        A length beyond the end is refused before any memory is taken: DamagedError with offset, expected, found.
        """
        return system.get(self._checked(), self.path, offset, length)

    def read_into(self, offset: int, buffer: WriteableBuffer) -> int:
        """Fill the writable contiguous `buffer` from `offset` on and return its length in bytes.

        DamagedError where the file ends before; then the content of the buffer is undefined.
        """
        return system.get_into(self._checked(), self.path, offset, buffer)

    def map(self) -> memoryview:
        """Return the whole file (of `size` bytes) as a read-only view of mapped memory; nothing is read yet.

        Made once. The mapping lives as long as a view of it does, even after `close`. It is for files that nobody cuts
        short: touching a page that is gone ends the process.
        """
        fd = self._checked()
        if self.size == 0:
            return memoryview(b"")
        if self._map is None:
            try:
                self._map = mmap.mmap(fd, self.size, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise system.cut_off(self.path, 0, self.size, os.fstat(fd).st_size) from error
            except OSError as error:
                raise system.translate(error, self.path, "map") from error
        return memoryview(self._map)

    def close(self) -> None:
        """Close the file. Views from `map` stay valid. Closing twice is allowed."""
        self._map = None
        super().close()

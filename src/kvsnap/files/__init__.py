"""Durable bytes: write whole, append under a lock, read ranges, map.

The only module that opens a file for writing. Nothing here knows what the bytes mean. Every error of the operating
system leaves through `translate`. Files are made 0600, directories 0700, whatever the umask: a cache is a transcript.

Linux is tested. macOS flushes with `F_FULLFSYNC`. On Windows directories can't be flushed and positioned reads take
a lock; the rest is best effort.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvsnap.errors import BusyError, InputError, KvsnapError, PoisonedError, StorageError
from kvsnap.files import system
from kvsnap.files.reading import OpenFile, Reader
from kvsnap.files.recording import Operation, Recorder
from kvsnap.files.system import absolute, status, translate

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer
    from typing_extensions import Self

    from kvsnap.files.system import Buffers, StrPath

__all__ = [
    "TEMPORARY_PREFIX",
    "Appender",
    "Operation",
    "Reader",
    "Recorder",
    "Writer",
    "absolute",
    "fsync_directory",
    "make_directory",
    "move",
    "remove",
    "remove_left",
    "replacing",
    "status",
    "sync_file",
    "translate",
    "write_whole",
]

# A file of this prefix that no process is writing is what a killed process left; it may be removed.
TEMPORARY_PREFIX = ".kvsnap-"
_LEFT_AFTER = 60

# -- what crash tests see ----------------------------------------------------------------------------------

recorder: Recorder | None = None


def _note(operation: Operation, path: str, offset: int = 0, data: bytes = b"") -> None:
    if recorder is not None:
        recorder.record(operation, path, offset, data)


def _put(fd: int, path: str, named: str, buffers: Buffers, offset: int) -> int:
    def wrote(at: int, data: bytes) -> None:
        _note("write", named, at, data)

    return system.put(fd, path, buffers, offset, None if recorder is None else wrote)


def _sync(fd: int, path: str, named: str, *, data_only: bool) -> None:
    system.sync(fd, path, data_only=data_only)
    _note("sync", named)


def _truncate(fd: int, path: str, named: str, length: int) -> None:
    system.truncate(fd, path, length)
    _note("truncate", named, length)


# -- directories -------------------------------------------------------------------------------------------


def fsync_directory(path: StrPath) -> None:
    """Make the names in directory `path` durable. No effect where the system can't flush directories.

    Raise MissingError, or StorageError.
    """
    text = system.path_text(path)
    system.sync_directory(text)
    _note("fsync-dir", text)


def sync_file(path: StrPath) -> None:
    """Make what is in the file `path` durable, whoever wrote it. Raise MissingError, InputError, or StorageError."""
    text = system.path_text(path)
    fd = system.open_regular(text, (os.O_RDWR if sys.platform == "win32" else os.O_RDONLY) | system.NOFOLLOW, "sync")
    try:
        _sync(fd, text, text, data_only=True)
    finally:
        os.close(fd)


def make_directory(path: StrPath) -> None:
    """Make directory `path` and its missing parents, durable, each 0700 whatever the umask.

    One that is there already is left as it is. Raise InputError where a file is in the way, or StorageError.
    """
    text = system.path_text(path)
    if os.path.isdir(text):
        return
    parent = os.path.dirname(text.rstrip(os.sep)) or "."
    if not os.path.isdir(parent):
        make_directory(parent)
    try:
        os.mkdir(text, 0o700)
        os.chmod(text, 0o700)
    except OSError as error:
        if isinstance(error, FileExistsError) and os.path.isdir(text):  # another process was faster
            return
        raise translate(error, text, "make directory") from error
    _note("mkdir", text)
    fsync_directory(parent)


def remove(path: StrPath, *, sync: bool = True) -> None:
    """Remove the file `path`, durably unless `sync` is false. A symbolic link is removed, not followed.

    Raise MissingError, InputError for a directory, or StorageError.
    """
    text = system.path_text(path)
    try:
        if stat.S_ISDIR(os.lstat(text).st_mode):
            raise InputError("cannot remove: this is a directory", path=text)
        os.unlink(text)
    except OSError as error:
        raise translate(error, text, "remove") from error
    _note("unlink", text)
    if sync:
        fsync_directory(os.path.dirname(text) or ".")


def move(path: StrPath, target: StrPath) -> None:
    """Give the file `path` the name `target`, in any directory of the same file system, durably. No byte is copied.

    A symbolic link is moved, not followed. A file under `target` is replaced: who must not do that looks first, under
    a lock. Raise MissingError, InputError (a directory), or StorageError.
    """
    old, new = system.path_text(path), system.path_text(target)
    system.rename(old, new)
    _note("rename", old, data=os.fsencode(new))
    for directory in dict.fromkeys((os.path.dirname(new) or ".", os.path.dirname(old) or ".")):
        fsync_directory(directory)


# -- whole files -------------------------------------------------------------------------------------------


class Writer:
    """The file being written by `replacing`, open until the `with` block ends. Not for several threads at once."""

    def __init__(self, fd: int, path: str, named: str) -> None:
        self.path = path
        self._fd = fd
        self._named = named
        self._process = os.getpid()
        self._position = 0

    def _checked(self) -> int:
        if self._fd < 0:
            raise InputError("this writer is closed: its with block has ended", path=self.path)
        return self._fd

    def write(self, buffers: Buffers) -> int:
        """Write one buffer, or several in order, at the position; move it; return the number of bytes.

        Buffers must be contiguous; they are not copied. Raise StorageError (no space, file too large): then an
        unknown part is written, and leaving the with block removes the temporary file.
        """
        done = _put(self._checked(), self.path, self._named, buffers, self._position)
        self._position += done
        return done

    def pwrite(self, data: ReadableBuffer, offset: int) -> int:
        """Write one buffer at byte `offset`; the position stays. Errors as for `write`."""
        if offset < 0:
            raise InputError(f"cannot write at {offset}: an offset of 0 or more is expected", path=self.path)
        return self.write_at([data], offset)

    def write_at(self, buffers: Buffers, offset: int) -> int:
        """Write all buffers, one behind the other, at byte `offset`; the position stays. Errors as for `write`."""
        return _put(self._checked(), self.path, self._named, buffers, offset)

    def reserve(self, length: int) -> None:
        """Take room for `length` bytes, at most those that will be written: the file is never shorter from here on.

        Where the system does not offer it, nothing happens. Raise StorageError (no space, file too large).
        """
        system.reserve(self._checked(), self.path, length)

    def tell(self) -> int:
        """Return the position: the byte that the next `write` goes to."""
        return self._position

    def sync(self) -> None:
        """Make what was written so far durable. `replacing` does it at the end by itself."""
        _sync(self._checked(), self.path, self._named, data_only=False)

    def truncate(self, length: int) -> None:
        """Cut the file to `length` bytes (at most its present length); a position behind it moves there."""
        _truncate(self._checked(), self.path, self._named, length)
        self._position = min(self._position, length)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        try:
            os.close(fd)
        except OSError as error:  # network file systems report lack of space here
            raise translate(error, self.path, "close") from error


def _create_temporary(path: str, mode: int) -> tuple[int, str]:
    """A new empty file beside `path`, of an unpredictable name, with exactly the permissions `mode`."""
    try:
        system.refuse_irregular(os.lstat(path).st_mode, path)
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            raise translate(error, path, "write") from error
    named = os.path.join(os.path.dirname(path), f"{TEMPORARY_PREFIX}{secrets.token_hex(12)}.tmp")
    try:
        fd = os.open(named, os.O_RDWR | os.O_CREAT | os.O_EXCL | system.NOFOLLOW | system.COMMON, 0o600)
    except OSError as error:
        raise translate(error, path, "write") from error
    with contextlib.ExitStack() as undo:
        undo.callback(os.unlink, named)
        undo.callback(os.close, fd)
        system.hold(fd)  # for as long as it is written, so that nobody takes it for a left one
        system.set_mode(fd, mode)
        _note("create", named)
        undo.pop_all()
    return fd, named


def remove_left(directory: str) -> list[str]:
    """Remove temporary files that killed processes left in a directory; return their names.

    Left is what no process holds and nobody touched for a minute. Nothing is raised: this is only tidying.
    """
    removed = []
    with contextlib.suppress(OSError), os.scandir(directory) as found:
        names = [e.path for e in found if e.name.startswith(TEMPORARY_PREFIX) and e.name.endswith(".tmp")]
        for name in names:
            with contextlib.suppress(OSError):
                if time.time() - os.lstat(name).st_mtime > _LEFT_AFTER and system.is_left(name):
                    os.unlink(name)
                    _note("unlink", name)
                    removed.append(name)
    return removed


@contextlib.contextmanager
def replacing(path: StrPath, *, mode: int = 0o600, sync: bool = True, new: bool = False) -> Iterator[Writer]:
    """Write a file whole: yield a `Writer`, and put the file in place of `path` when the block ends without error.

    Until then `path` is what it was; after any error it still is, and the temporary file beside it is gone. With
    `sync` the bytes are durable before the name changes, and the name before this returns. Permissions are exactly
    `mode`. A symbolic link, a directory or a device under the name is refused. With `new` the name must be free at
    the moment the file appears (InputError), even when several processes try at once.

    Raise MissingError naming a missing directory, InputError, StorageError with `errno`. Only when the last step, the
    sync of the directory, fails is the new file in place nevertheless.
    """
    target = system.path_text(path)
    remove_left(os.path.dirname(target) or ".")
    fd, temporary = _create_temporary(target, mode)
    writer = Writer(fd, target, temporary)
    with contextlib.ExitStack() as undo:
        undo.callback(_discard, writer, temporary)
        yield writer
        if sync:
            writer.sync()
        writer._close()
        system.take_name(temporary, target, new=new)
        undo.pop_all()
    _note("rename", temporary, data=os.fsencode(target))
    if sync:
        fsync_directory(os.path.dirname(target) or ".")


def _discard(writer: Writer, temporary: str) -> None:
    if writer._process != os.getpid():  # forked meanwhile: the file is still being written
        return
    with contextlib.suppress(KvsnapError):  # the error that brought us here matters more
        if writer._fd >= 0:
            writer._close()
    with contextlib.suppress(OSError):
        os.unlink(temporary)
        _note("unlink", temporary)


def write_whole(
    path: StrPath, content: Buffers | Callable[[Writer], object], *, mode: int = 0o600, sync: bool = True,
    new: bool = False,
) -> int:  # fmt: skip
    """Write a file whole, as `replacing` does, and return its length in bytes.

    `content` is a buffer, several in order, or a function that is handed the `Writer`. Errors as for `replacing`; an
    error of the function passes through.
    """
    with replacing(path, mode=mode, sync=sync, new=new) as writer:
        if callable(content):
            content(writer)
        else:
            writer.write(content)
        return os.fstat(writer._fd).st_size


# -- appending --------------------------------------------------------------------------------------------


class Appender(OpenFile):
    """A file open for reading and writing under an exclusive lock. `open` and `create` make one.

    The lock is held until `close`, belongs to this object (a second one is refused in the same process too) and
    vanishes with the process. Readers don't see it. Once a sync failed, what reached the disk is unknown: every later
    call but `close` raises PoisonedError. Not for several threads at once.
    """

    _locks = True

    def __init__(self, fd: int, path: str, *, is_new: bool) -> None:
        super().__init__(fd, path)
        self._is_new = is_new
        self._poisoned = False

    @classmethod
    def open(cls, path: StrPath) -> Self:
        """Open the existing regular file `path` and lock it.

        Raise BusyError when another one holds the lock, MissingError, InputError for a symbolic link or anything but
        a regular file, StorageError.
        """
        text = system.path_text(path)
        for _ in range(8):
            fd = system.open_regular(text, os.O_RDWR | system.NOFOLLOW, "open")
            with contextlib.ExitStack() as undo:
                undo.callback(os.close, fd)
                system.lock(fd, text)
                if system.is_named(fd, text):
                    undo.pop_all()
                    return cls(fd, text, is_new=False)
            # The file was replaced between open and lock: what was locked has no name any more.
        raise BusyError("the file is replaced again and again by another process", path=text)

    @classmethod
    def create(cls, path: StrPath) -> Self:
        """Make the new empty file `path`, 0600, and lock it. Its name is durable after the first `sync`.

        Raise InputError when the name is taken, MissingError naming a missing directory, StorageError.
        """
        text = system.path_text(path)
        fd = system.open_regular(text, os.O_RDWR | os.O_CREAT | os.O_EXCL | system.NOFOLLOW, "create")
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, fd)
            system.set_mode(fd, 0o600)
            system.lock(fd, text)
            undo.pop_all()
        _note("create", text)
        return cls(fd, text, is_new=True)

    @classmethod
    def taking(cls, writer: Writer) -> Self:
        """Return an appender for the file that is being written; the lock that the writer holds goes over to it.

        To be called inside the block of `replacing`, used once the file has its name, else closed. The name is durable
        after the first `sync`, also when the block could not make it so.
        """
        return cls(os.dup(writer._checked()), writer.path, is_new=True)

    def _checked(self) -> int:
        if self._poisoned:
            raise PoisonedError("an earlier sync failed, so what reached the disk is unknown; reopen", path=self.path)
        return super()._checked()

    @property
    def poisoned(self) -> bool:
        """True after a failed sync."""
        return self._poisoned

    @property
    def is_named(self) -> bool:
        """False when another file took the place of this one, so that what is written here would be lost."""
        return system.is_named(self._checked(), self.path)

    def size(self) -> int:
        """Return the present length in bytes."""
        return os.fstat(self._checked()).st_size

    def read_at(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset` on; DamagedError where the file ends before."""
        return system.get(self._checked(), self.path, offset, length)

    def read_into(self, offset: int, buffer: WriteableBuffer) -> int:
        """Fill the writable contiguous `buffer` from `offset` on; as `Reader.read_into`."""
        return system.get_into(self._checked(), self.path, offset, buffer)

    def write_at(self, buffers: Buffers, offset: int) -> int:
        """Write one buffer, or several in order, from `offset` on; return the number of bytes.

        Buffers must be contiguous; they are not copied. Raise StorageError with `errno` (no space, file too large):
        then any part of the bytes may be written, and `truncate` to the old size undoes it.
        """
        if offset < 0:
            raise InputError(f"cannot write at {offset}: an offset of 0 or more is expected", path=self.path)
        return _put(self._checked(), self.path, self.path, buffers, offset)

    def sync(self) -> None:
        """Make everything written so far durable, and the name of a file just created.

        Raise StorageError when it fails; from then on this object is poisoned.
        """
        fd = self._checked()
        try:
            _sync(fd, self.path, self.path, data_only=True)
            if self._is_new:
                fsync_directory(os.path.dirname(self.path) or ".")
                self._is_new = False
        except StorageError:  # not an interrupt: then nothing is known to be lost, and the next sync covers it
            self._poisoned = True
            raise

    def truncate(self, length: int) -> None:
        """Cut the file to `length` bytes, at most its present length (else InputError). Not durable before `sync`."""
        _truncate(self._checked(), self.path, self.path, length)

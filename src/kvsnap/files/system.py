"""What `kvsnap.files` asks of the operating system: paths, errors, positioned reads and writes, sync, lock.

No state, and no knowledge of who records. Nothing outside `kvsnap.files` imports this.
"""

from __future__ import annotations

import contextlib
import ctypes  # numpy has imported it already
import errno
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterable
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias, cast

from kvsnap.errors import BusyError, DamagedError, InputError, KvsnapError, MissingError, StorageError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

    Buffers: TypeAlias = ReadableBuffer | Iterable[ReadableBuffer]

StrPath: TypeAlias = "str | os.PathLike[str]"

# One call moves at most this much: macOS refuses 2 GiB and more, Linux cuts it short.
_MAX_CALL = 1 << 30
_IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024) if hasattr(os, "sysconf") else 16
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
# O_NONBLOCK, so that a pipe under the name is refused instead of waited for; regular files ignore it.
COMMON = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}  # what file systems answer that have none

_seek_lock = threading.Lock()  # Windows only: seek and read are two calls there


# -- errors and paths --------------------------------------------------------------------------------------


def translate(error: OSError, path: StrPath, doing: str) -> KvsnapError:
    """Return the kvsnap error for an error of the operating system; `doing` is a verb ("write").

    MissingError: no such file or directory. InputError: the path names the wrong kind of thing (a directory, a
    symbolic link, a name too long, something that exists already). StorageError, with `errno`: all else.
    """
    shown = os.fspath(path)
    code = error.errno or 0
    reason = (os.strerror(code) if code else str(error)).lower()
    if code == errno.ENOENT:
        parent = os.path.dirname(shown) or "."
        if not os.path.isdir(parent):
            return MissingError(f"cannot {doing}: there is no directory {parent}", path=shown)
        return MissingError(f"cannot {doing}: no such file", path=shown)
    if code == errno.ELOOP:
        return InputError(f"cannot {doing}: symbolic links are refused; give the path of the file itself", path=shown)
    if code in {errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG}:
        return InputError(f"cannot {doing}: {reason}", path=shown)
    return StorageError(f"cannot {doing}: {reason}", errno=code or None, path=shown)


def status(path: StrPath) -> os.stat_result:
    """Return what the operating system tells of a file. Raise as `translate` does: it may be gone by now."""
    try:
        return os.stat(path)
    except OSError as error:
        raise translate(error, path, "read") from error


def path_text(path: StrPath) -> str:
    """Return `path` as text; InputError for bytes, the empty path, NUL, and what no file name can be made of."""
    text: object = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise InputError("not a path: a non-empty text without NUL is expected", found=repr(text))
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        raise InputError("not a path: this text has no encoding as a file name", found=ascii(text)) from error
    return text


def absolute(path: StrPath) -> str:
    """Return `path` as absolute text, so that it means the same in another working directory.

    Raise InputError as `path_text`, and MissingError for a relative path in a working directory that is gone.
    """
    text = path_text(path)
    try:
        return os.path.abspath(text)
    except FileNotFoundError as error:
        raise MissingError("a relative path, and the working directory is gone", path=text) from error
    except OSError as error:
        raise translate(error, text, "find") from error


def refuse_irregular(mode: int, path: str) -> None:
    """Raise InputError unless `mode` (of a stat) is that of a regular file."""
    if stat.S_ISREG(mode):
        return
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a pipe"}
    raise InputError("not a regular file", path=path, found=kinds.get(stat.S_IFMT(mode), "a device or socket"))


def open_regular(path: str, flags: int, doing: str) -> int:
    """Open and return a descriptor of a regular file; anything else is refused before it is opened."""
    try:
        if not flags & os.O_CREAT:
            refuse_irregular(os.stat(path, follow_symlinks=not flags & NOFOLLOW).st_mode, path)
        fd = os.open(path, flags | COMMON, 0o600)
    except OSError as error:
        raise translate(error, path, doing) from error
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, fd)
        refuse_irregular(os.fstat(fd).st_mode, path)  # again: the name may have changed hands in between
        undo.pop_all()
    return fd


# -- moving bytes ------------------------------------------------------------------------------------------


def flat_views(buffers: Buffers) -> list[memoryview]:
    """Flat byte views of one buffer or of several, empty ones left out. Nothing is copied."""
    try:
        items: Iterable[ReadableBuffer] = [memoryview(cast("ReadableBuffer", buffers))]
    except TypeError:
        items = cast("Iterable[ReadableBuffer]", buffers)
    views = []
    for item in items:
        try:
            view = memoryview(item)
        except TypeError as error:
            raise InputError("not bytes: a buffer is expected", found=type(item).__name__) from error
        if not view.c_contiguous:
            raise InputError("a contiguous buffer is expected", found=f"strides {view.strides}")
        if view.nbytes:
            views.append(view.cast("B"))
    return views


def put(fd: int, path: str, buffers: Buffers, offset: int, wrote: Callable[[int, bytes], None] | None = None) -> int:
    """Write all bytes of `buffers` from `offset` on and return their number.

    `wrote` is told offset and bytes of each system call after it succeeded, also when a later one fails.
    """
    views, first, start = flat_views(buffers), 0, offset
    while first < len(views):
        batch: list[memoryview] = []
        room = _MAX_CALL
        for view in islice(views, first, first + _IOV_MAX):
            batch.append(view[:room])
            room -= len(batch[-1])
            if room == 0:
                break
        try:
            done = _pwritev(fd, batch, offset)
        except OSError as error:
            raise translate(error, path, "write") from error
        if done <= 0:
            raise StorageError("cannot write: the system took no byte", errno=errno.EIO, path=path, offset=offset)
        if wrote is not None:
            wrote(offset, b"".join(batch)[:done])
        offset += done
        while first < len(views) and done >= len(views[first]):
            done -= len(views[first])
            first += 1
        if done:
            views[first] = views[first][done:]
    return offset - start


if sys.platform == "win32":

    def _pwritev(fd: int, batch: list[memoryview], offset: int) -> int:
        with _seek_lock:
            os.lseek(fd, offset, os.SEEK_SET)
            return os.write(fd, batch[0])

    def _preadv(fd: int, view: memoryview, offset: int) -> int:
        with _seek_lock:
            os.lseek(fd, offset, os.SEEK_SET)
            data = os.read(fd, len(view))
        view[: len(data)] = data
        return len(data)

else:

    def _pwritev(fd: int, batch: list[memoryview], offset: int) -> int:
        return os.pwritev(fd, batch, offset)

    def _preadv(fd: int, view: memoryview, offset: int) -> int:
        return os.preadv(fd, [view], offset)


def _fill(fd: int, path: str, view: memoryview, offset: int) -> None:
    """Fill `view` from `offset` on; DamagedError where the file ends before."""
    done = 0
    while done < len(view):
        try:
            got = _preadv(fd, view[done : done + _MAX_CALL], offset + done)
        except OSError as error:
            raise translate(error, path, "read") from error
        if got == 0:
            raise cut_off(path, offset, len(view), done)
        done += got


def cut_off(path: str, offset: int, length: int, found: int) -> DamagedError:
    """Return the error for a file that ends before `length` bytes from `offset` on."""
    return DamagedError("the file ends early", path=path, offset=offset, expected=f"{length} bytes", found=found)


def get(fd: int, path: str, offset: int, length: int) -> bytes:
    """Return `length` bytes from `offset` on, checked against the length of the file before memory is taken."""
    if offset < 0 or length < 0:
        raise InputError(f"cannot read {length} bytes at {offset}: both must be 0 or more", path=path)
    left = max(0, os.fstat(fd).st_size - offset)
    if length > left:
        raise cut_off(path, offset, length, left)
    if sys.platform != "win32" and length <= _MAX_CALL:
        try:
            data = os.pread(fd, length, offset)
        except OSError as error:
            raise translate(error, path, "read") from error
        if len(data) == length:  # the usual case, without a copy
            return data
    target = bytearray(length)
    _fill(fd, path, memoryview(target), offset)
    return bytes(target)


def get_into(fd: int, path: str, offset: int, buffer: WriteableBuffer) -> int:
    """Fill `buffer` from `offset` on and return its length in bytes."""
    view = memoryview(buffer)
    if view.readonly or not view.c_contiguous:
        raise InputError("a writable contiguous buffer is expected", path=path)
    if offset < 0:
        raise InputError(f"cannot read at {offset}: an offset of 0 or more is expected", path=path)
    if view.nbytes:
        _fill(fd, path, view.cast("B"), offset)
    return view.nbytes


def sync(fd: int, path: str, *, data_only: bool) -> None:
    """Make the bytes durable; the length too, but with `data_only` not permissions and times."""
    try:
        if sys.platform == "darwin":
            try:
                fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # fsync alone leaves the bytes in the drive's cache
            except OSError:
                os.fsync(fd)
        elif sys.platform != "win32" and data_only:
            os.fdatasync(fd)
        else:
            os.fsync(fd)
    except OSError as error:
        raise translate(error, path, "sync") from error


def sync_directory(path: str) -> None:
    """Make the names in a directory durable, where the system and the file system can."""
    if sys.platform == "win32":
        return
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:  # what file systems answer that can't
            raise translate(error, path, "sync directory") from error


def take_name(temporary: str, target: str, *, new: bool) -> None:
    """Give a temporary file its name; with `new` the name must be free (InputError). Raise StorageError."""
    try:
        if not new:
            os.replace(temporary, target)
            return
        try:
            os.link(temporary, target)  # unlike rename, refuses a name that is taken
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # FAT and the like: look first. Two processes that try at the same instant are not told apart there.
            if os.path.lexists(target):
                raise InputError("the name is taken", path=target) from error
            os.rename(temporary, target)
        else:
            os.unlink(temporary)
    except FileExistsError as error:
        raise InputError("the name is taken", path=target) from error
    except OSError as error:
        raise translate(error, target, "replace") from error


def rename(path: str, target: str) -> None:
    """Give a file another name, in place of the file that has it; not a directory."""
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            raise InputError("cannot move: this is a directory", path=path)
        os.replace(path, target)
    except OSError as error:
        raise translate(error, path, "move") from error


@cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    # Not os.posix_fallocate: where the file system cannot, the C library would write to every block instead.
    if sys.platform != "linux":
        return None
    try:
        call = ctypes.CDLL(None, use_errno=True).fallocate64
    except (AttributeError, OSError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

    def allocate(fd: int, mode: int, offset: int, length: int) -> int:
        return ctypes.get_errno() if call(fd, mode, offset, length) else 0

    return allocate


def reserve(fd: int, path: str, length: int) -> bool:
    """Take room for `length` bytes at once, the file growing to that length; return False where that is not offered.

    Writing into room that was taken costs less than growing a file piece by piece, and a lack of it shows before the
    first byte. Raise StorageError when there is no room.
    """
    call = _fallocate()
    if call is None or length <= 0:
        return False
    code = call(fd, 0, 0, length)
    if code in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        raise translate(OSError(code, os.strerror(code)), path, "write")
    return code == 0


def set_mode(fd: int, mode: int) -> None:
    """Set the permissions of an open file to exactly `mode`, where the file system has permissions."""
    # The umask may have taken more than it should, even the owner's own rights.
    if sys.platform != "win32":
        try:
            os.fchmod(fd, mode)
        except OSError as error:
            if error.errno not in {errno.EPERM, errno.ENOTSUP, errno.ENOSYS}:  # FAT and the like
                raise


def truncate(fd: int, path: str, length: int) -> None:
    """Cut the file to `length` bytes; it never grows by this."""
    size = os.fstat(fd).st_size
    if not 0 <= length <= size:
        raise InputError("cannot truncate", path=path, expected=f"a length in 0..{size}", found=length)
    try:
        os.ftruncate(fd, length)
    except OSError as error:
        raise translate(error, path, "truncate") from error


# -- locks --------------------------------------------------------------------------------------------------


def lock(fd: int, path: str) -> None:
    """Take the exclusive lock of an open file without waiting; it goes when the descriptor is closed.

    Where the file system has no locks nothing is taken: two writers then meet at the check of the end of the file.
    """
    try:
        if sys.platform == "win32":
            os.lseek(fd, 1 << 62, os.SEEK_SET)  # locks are mandatory there, so lock a byte that is never read
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in {errno.EAGAIN, errno.EACCES, errno.EDEADLK}:
            raise BusyError(
                "this file is open for writing elsewhere (another process, or another session object); try again",
                path=path,
            ) from error
        if error.errno not in {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}:
            raise translate(error, path, "lock") from error


def unlock_named(fd: int, path: str) -> None:
    """Give the lock of an open file up at once, also where a forked process still has the descriptor.

    Not for a file that does not have its name yet: whoever writes it holds the same lock.
    """
    if sys.platform != "win32":
        with contextlib.suppress(OSError):  # also a StorageError; closing gives it up, too
            if is_named(fd, path):
                fcntl.flock(fd, fcntl.LOCK_UN)


def hold(fd: int) -> None:
    """Mark a temporary file as being written, where the system has such locks; it goes with the descriptor."""
    if sys.platform != "win32":
        with contextlib.suppress(OSError):  # a file system without locks: the age of the file must do
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_left(path: str) -> bool:
    """Tell whether nobody holds a temporary file. Raises `OSError`."""
    if sys.platform == "win32":
        return False
    fd = os.open(path, os.O_RDONLY | NOFOLLOW | COMMON)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def is_named(fd: int, path: str) -> bool:
    """Tell whether `path` still names the open file. Raise StorageError where that cannot be seen."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise translate(error, path, "open") from error

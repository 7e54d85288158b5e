"""Where a library lies: its directories, marker, lock, pointers, and what stands in them. docs/library.md.

Nothing here follows a symbolic link inside the library, and nothing raises because a file vanished meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import xxhash

from kvsnap.errors import (
    BusyError,
    DamagedError,
    FormatError,
    InputError,
    KvsnapError,
    MissingError,
    VersionError,
)
from kvsnap.files import TEMPORARY_PREFIX, Appender, Reader, make_directory, move, remove, translate, write_whole
from kvsnap.library.names import check_name

__all__ = [
    "LINK",
    "OF_OTHERS",
    "UNDECODED",
    "Listing",
    "Place",
    "Pointer",
    "Seen",
    "Settings",
    "file_id_of",
    "session_name",
]

MARKER = "kvsnap-library"
VERSION = 1
LOCK = "lock"
CATALOGUE = "catalogue.sqlite"
NAMES, SESSIONS, QUARANTINE = "names", "sessions", "quarantine"
_OWN = {MARKER, LOCK, CATALOGUE, f"{CATALOGUE}-journal", NAMES, SESSIONS, QUARANTINE}
_ID = re.compile(r"([0-9a-f]{32})\.kvsnap")
_POINTER = re.compile(rb"kvsnap-name 1\nfile ([0-9a-f]{32})\npinned ([01])\n")
_SMALL = 1 << 16
LINK = "a symbolic link, which is not followed"
UNDECODED = "its name cannot be decoded"
"""A name in another encoding than that of the system now: it means a session all the same."""
OF_OTHERS = "it belongs to another user"
_WAIT = 10.0
_TICK = 100_000_000


def session_name(file_id: str) -> str:
    """Return the name of the file of a session."""
    return f"{file_id}.kvsnap"


def file_id_of(name: str) -> str | None:
    """Return the file id in the name of a file, or None when it is not such a name."""
    found = _ID.fullmatch(name)
    return found[1] if found else None


@dataclass(frozen=True, slots=True)
class Settings:
    """What the marker says. `max_bytes` is the size limit in bytes, None for no limit."""

    max_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Pointer:
    """What a file in names/ says: the file that the name means, and whether it is kept by every prune."""

    file_id: str
    pinned: bool = False

    def pack(self) -> bytes:
        """Return the bytes of the file."""
        head = f"kvsnap-name 1\nfile {self.file_id}\npinned {int(self.pinned)}\n".encode()
        return head + f"sum {xxhash.xxh3_64_hexdigest(head)}\n".encode()

    @staticmethod
    def parse(raw: bytes, path: str) -> Pointer:
        """Parse the bytes of the file. Raise `DamagedError` when they are not what was written."""
        found = _POINTER.match(raw)
        if found is None or raw[found.end() :] != f"sum {xxhash.xxh3_64_hexdigest(found[0])}\n".encode():
            raise DamagedError("this name is damaged: it does not say which session it means", path=path)
        return Pointer(found[1].decode(), found[2] == b"1")


@dataclass(frozen=True, slots=True)
class Seen:
    """A regular file of ours as the directory shows it. Times are nanoseconds since 1970-01-01 UTC."""

    name: str
    size: int
    mtime_ns: int
    inode: int
    mode: int

    @property
    def stamp(self) -> tuple[int, int, int]:
        """What changes when the file does."""
        return self.size, self.mtime_ns, self.inode


@dataclass(frozen=True, slots=True)
class Listing:
    """What stands in one directory: our files by name, and all else, which is never touched.

    `others` is by name with the reason; names that cannot be decoded are shown with escapes.
    """

    ours: dict[str, Seen]
    others: dict[str, str]
    other_bytes: int = 0


class Place:
    """The directory of a library. `path` may lie below symbolic links; inside the library none is followed.

    Made when the directory is missing or empty, unless `readonly`. Raise `MissingError`, `InputError` for a directory
    that is not a library or a link in the place of a directory, `VersionError` for a newer one, `StorageError`.
    """

    def __init__(self, path: str, *, readonly: bool) -> None:
        self.path = os.path.abspath(path)
        self.readonly = readonly
        self._gate = threading.RLock()
        self._held: Appender | None = None
        self._depth = 0
        self._pointers: dict[str, tuple[tuple[int, int, int], Pointer]] = {}
        if not readonly:
            self._make()
        self.settings = self._read_settings()
        self.check()

    def within(self, *parts: str) -> str:
        """Return a path inside the library."""
        return os.path.join(self.path, *parts)

    def session(self, file_id: str) -> str:
        """Return the path of the file of a session."""
        return self.within(SESSIONS, session_name(file_id))

    # -- making and checking ------------------------------------------------------------------------------

    def _make(self) -> None:
        make_directory(self.path)
        if not os.path.lexists(self.within(MARKER)):
            with _translated(self.path):
                inside = [name for name in os.listdir(self.path) if not name.startswith(TEMPORARY_PREFIX)]
            if inside and not os.path.lexists(self.within(MARKER)):  # another process may just have made it
                raise InputError(
                    f"not a library: this directory has no file {MARKER!r} and is not empty; name a new directory",
                    path=self.path,
                )
            with contextlib.suppress(InputError):
                write_whole(self.within(MARKER), _marker(Settings()), new=True)
        for name in (NAMES, SESSIONS, QUARANTINE):
            if not os.path.lexists(self.within(name)):
                make_directory(self.within(name))
        if not os.path.lexists(self.within(LOCK)):
            with contextlib.suppress(InputError):
                write_whole(self.within(LOCK), b"", new=True)

    def _read_settings(self) -> Settings:
        path = self.within(MARKER)
        if not os.path.lexists(path):
            if not os.path.isdir(self.path):
                raise MissingError("there is no such library", path=self.path)
            raise InputError(f"not a library: there is no file {MARKER!r}", path=self.path)
        raw = self._small(MARKER)
        try:
            data: Any = json.loads(raw)
            version, limit = data["kvsnap_library"], data.get("max_bytes")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise FormatError("the marker of the library cannot be read", path=path, found=str(error)) from error
        if version != VERSION:
            raise VersionError("a library of another version", path=path, expected=VERSION, found=version)
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 0):
            raise FormatError("the limit of the library is no number of bytes", path=path, found=repr(limit))
        return Settings(limit)

    def write_settings(self, settings: Settings) -> None:
        """Store the settings, under the lock."""
        with self.locked():
            write_whole(self.within(MARKER), _marker(settings))
            self.settings = settings

    def check(self) -> None:
        """Raise `InputError` when a link or a file stands where a directory of the library belongs, `MissingError`."""
        for name in (NAMES, SESSIONS, QUARANTINE):
            path = self.within(name)
            try:
                mode = os.lstat(path).st_mode
            except FileNotFoundError:
                raise MissingError("the library lacks one of its directories", path=path) from None
            except OSError as error:
                raise translate(error, path, "look at") from error
            if not stat.S_ISDIR(mode):
                what = LINK if stat.S_ISLNK(mode) else "no directory"
                raise InputError("a directory of the library is expected here", path=path, found=what)

    def _small(self, *parts: str) -> bytes:
        with Reader(self.within(*parts), follow_symlinks=False) as reader:
            return reader.read_at(0, min(reader.size, _SMALL))

    # -- the lock -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the library: names, creation and removal change under it only.

        Waits up to ten seconds for another process, then `BusyError`. May be nested by one thread.
        """
        if self.readonly:
            raise InputError("the library was opened for reading only", path=self.path)
        with self._gate:
            if self._depth == 0:
                self.check()
                self._held = self._take()
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0 and self._held is not None:
                    held, self._held = self._held, None
                    held.close()

    def _take(self) -> Appender:
        path, stop, pause = self.within(LOCK), time.monotonic() + _WAIT, 0.001
        while True:
            try:
                return Appender.open(path)
            except MissingError:  # removed by hand: it holds nothing
                with contextlib.suppress(InputError):
                    write_whole(path, b"", new=True)
            except BusyError:
                if time.monotonic() > stop:
                    raise BusyError("the library is being changed by another process; try again", path=path) from None
            time.sleep(pause)
            pause = min(0.05, pause * 2)

    # -- what stands there --------------------------------------------------------------------------------

    def listing(self, directory: str) -> Listing:
        """List one directory. What vanishes meanwhile is left out; what is not ours is told apart, and never opened."""
        ours: dict[str, Seen] = {}
        others: dict[str, str] = {}
        other_bytes = 0
        path = self.within(directory)
        owners = self._owners()
        with _translated(path), os.scandir(path) as entries:
            for entry in entries:
                try:
                    facts = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if entry.name.startswith(TEMPORARY_PREFIX):
                    continue
                why = _foreign(entry.name, facts, owners)
                if why:
                    others[ascii(entry.name)[1:-1]] = why
                    other_bytes += facts.st_size if stat.S_ISREG(facts.st_mode) else 0
                else:
                    ours[entry.name] = Seen(
                        entry.name, facts.st_size, facts.st_mtime_ns, entry.inode(), stat.S_IMODE(facts.st_mode)
                    )
        return Listing(ours, others, other_bytes)

    def _owners(self) -> set[int]:
        """Return whose files are ours: those of this user, and of the user whose library it is."""
        with _translated(self.path):
            return {os.stat(self.path).st_uid, os.geteuid() if hasattr(os, "geteuid") else 0}

    def session_bytes(self) -> int:
        """Return the bytes of all files in sessions/ that have the name of a session file of ours."""
        return sum(seen.size for name, seen in self.listing(SESSIONS).ours.items() if file_id_of(name))

    def strangers(self) -> list[str]:
        """Return the names in the top directory that are not of the library, printable."""
        with _translated(self.path):
            names = os.listdir(self.path)
        return sorted(ascii(n)[1:-1] for n in names if n not in _OWN and not n.startswith(TEMPORARY_PREFIX))

    # -- pointers -----------------------------------------------------------------------------------------

    def read_pointer(self, name: str) -> Pointer:
        """Read what a name means. Raise `MissingError`, `DamagedError`, `InputError` for a link."""
        return Pointer.parse(self._small(NAMES, name), self.within(NAMES, name))

    def pointer_of(self, seen: Seen) -> Pointer:
        """Return what a name means as it stands in a listing; read again only when its file changed. Raise as above."""
        known = self._pointers.get(seen.name)
        if known is not None and known[0] == seen.stamp:
            return known[1]
        pointer = self.read_pointer(seen.name)
        # Two changes within one tick of the clock may look like none.
        if time.time_ns() - seen.mtime_ns > _TICK:
            self._pointers[seen.name] = seen.stamp, pointer
        return pointer

    def write_pointer(self, name: str, pointer: Pointer) -> None:
        """Let a name mean a file, durably, whether or not there was such a name. Under the lock."""
        self._must_hold()
        write_whole(self.within(NAMES, check_name(name)), pointer.pack())

    def move_pointer(self, name: str, new: str) -> None:
        """Give a name another spelling, durably. Under the lock."""
        self._must_hold()
        move(self.within(NAMES, name), self.within(NAMES, check_name(new)))

    def remove_pointer(self, name: str) -> None:
        """Remove a name, durably. Under the lock. One that is gone already is no error."""
        self._must_hold()
        with contextlib.suppress(MissingError):
            remove(self.within(NAMES, name))

    # -- files --------------------------------------------------------------------------------------------

    def remove_session(self, file_id: str) -> None:
        """Remove the file of a session, durably. Under the lock. One that is gone already is no error."""
        self._must_hold()
        with contextlib.suppress(MissingError):
            remove(self.session(file_id))

    def quarantined(self, file_id: str) -> str:
        """Return the path that a damaged file has when it was set apart."""
        return self.within(QUARANTINE, session_name(file_id))

    def set_apart(self, file_id: str) -> str | None:
        """Move a damaged file to the quarantine and return its new name there; None when it is gone."""
        self._must_hold()
        name, number = session_name(file_id), 0
        while os.path.lexists(self.within(QUARANTINE, name)):
            number += 1
            name = f"{file_id}.{number}.kvsnap"
        try:
            move(self.session(file_id), self.within(QUARANTINE, name))
        except MissingError:
            return None
        return name

    def is_busy(self, file_id: str) -> bool:
        """Tell whether someone holds the file open for writing, or nobody may open it so."""
        try:
            Appender.open(self.session(file_id)).close()
        except MissingError:
            return False
        except KvsnapError:
            return True
        return False

    def _must_hold(self) -> None:
        if self._held is None:
            raise InputError("the library is changed under its lock only", path=self.path)


def _marker(settings: Settings) -> bytes:
    return json.dumps({"kvsnap_library": VERSION, "max_bytes": settings.max_bytes}).encode() + b"\n"


def _foreign(name: str, facts: os.stat_result, owners: set[int]) -> str:
    """Return why a file is not ours to touch, or nothing."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return UNDECODED
    if stat.S_ISLNK(facts.st_mode):
        return LINK
    if not stat.S_ISREG(facts.st_mode):
        return "not a regular file"
    if facts.st_uid not in owners:
        return OF_OTHERS
    return ""


@contextlib.contextmanager
def _translated(path: str) -> Iterator[None]:
    try:
        yield
    except KvsnapError:
        raise
    except OSError as error:
        raise translate(error, path, "look at") from error

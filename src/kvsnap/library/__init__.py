"""A directory of sessions: names, the longest common history, forks, a limit on its size. docs/library.md.

Names are pointers, files are named by their id, and what is known of them is kept in a catalogue that can be lost.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import platformdirs

from kvsnap.errors import BusyError, DamagedError, InputError, KvsnapError, MissingError
from kvsnap.files import write_whole
from kvsnap.formats.native.journal import empty_file
from kvsnap.identity import Identity
from kvsnap.library import doctor, evicting, forks, searching
from kvsnap.library.catalogue import Catalogue, CatalogueLost
from kvsnap.library.contents import OK
from kvsnap.library.names import check_free, check_name
from kvsnap.library.place import CATALOGUE, Place, Pointer, Settings
from kvsnap.library.reports import Branch, CollectReport, Doctor, Entry, Evicted, Finding, Found, PruneReport
from kvsnap.library.session import LibrarySession
from kvsnap.library.view import MISSING, SET_APART, View, look
from kvsnap.session import Session

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "Branch",
    "CollectReport",
    "Doctor",
    "Entry",
    "Evicted",
    "Finding",
    "Found",
    "Library",
    "LibrarySession",
    "PruneReport",
    "default_path",
]

T = TypeVar("T")
_FILE_ID = slice(40, 56)


def default_path() -> str:
    """Return where the library of this user lies: the environment variable KVSNAP_LIBRARY, else the user's data."""
    return os.environ.get("KVSNAP_LIBRARY") or os.path.join(platformdirs.user_data_dir("kvsnap", False), "library")


class Library:
    """A directory of sessions by name. A context manager; several processes and threads may use one at a time.

    `path` is the directory (default: `default_path()`), made when it is missing or empty. `max_bytes` limits the files
    of all sessions together for this object, in bytes; without it the stored limit holds (`set_limit`). A library opened
    for writing keeps its limit: when it is opened and after every commit the sessions used least recently are removed.
    With `readonly` nothing is written, and `overrun` tells by how much the limit is exceeded.

    Raise `MissingError` (read-only, and no such directory), `InputError` (not a library), `VersionError`,
    `StorageError`, `BusyError` when another process changes it for more than ten seconds.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, max_bytes: int | None = None, readonly: bool = False
    ) -> None:
        where = default_path() if path is None else os.fspath(path)
        if not isinstance(where, str) or not where or "\0" in where:
            raise InputError("not a path: a non-empty text without NUL is expected", found=repr(where))
        self._own_limit = None if max_bytes is None else _checked_limit(max_bytes)
        self._place = Place(where, readonly=readonly)
        self._catalogue = Catalogue(self._place.within(CATALOGUE), readonly=readonly)
        if not readonly:
            self._enforce(None)

    @property
    def path(self) -> str:
        """The directory, absolute."""
        return self._place.path

    @property
    def readonly(self) -> bool:
        """True when nothing is written."""
        return self._place.readonly

    @property
    def max_bytes(self) -> int | None:
        """The limit in bytes that holds; None for no limit."""
        return self._place.settings.max_bytes if self._own_limit is None else self._own_limit

    @property
    def nbytes(self) -> int:
        """Bytes of the files of all sessions now."""
        return self._look(lambda view: view.total)

    @property
    def overrun(self) -> int:
        """Bytes over the limit now; 0 when it is kept or there is none."""
        limit = self.max_bytes
        return 0 if limit is None else max(0, self.nbytes - limit)

    def set_limit(self, max_bytes: int | None) -> None:
        """Store the limit in bytes for everyone who opens the library; None for none. It holds at once."""
        self._place.write_settings(Settings(None if max_bytes is None else _checked_limit(max_bytes)))
        self._own_limit = None
        self._enforce(None)

    def close(self) -> None:
        """Close the catalogue. Sessions that are open stay so."""
        self._catalogue.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- sessions -----------------------------------------------------------------------------------------

    def open(self, name: str, *, create: bool = True, readonly: bool = False) -> LibrarySession:
        """Open a session; with `create` an empty one is made when there is no such name. Counts as a use.

        Raise `InputError` for a name that is none or looks like another one, `MissingError` when there is no such name
        or its file is gone, `BusyError` when it is open for writing elsewhere, `DamagedError` when it was set apart,
        and what `Session.open` raises.
        """
        check_name(name)
        if readonly or self.readonly:
            if not readonly:
                raise InputError("the library was opened for reading only", path=self.path)
            session = self._opened(self._known(self._names(), name).file_id, readonly=True)
        else:
            with self._place.locked():
                view = self._names()
                if create and name not in view.pointers and name not in view.bad_names:
                    self._create(name, view)
                    view = self._names()
                session = self._opened(self._known(view, name).file_id, readonly=False)
        session.keep(self, name)
        with suppress(CatalogueLost):
            self._catalogue.touch(session.file_id, time.time_ns())
        return session

    def _names(self) -> View:
        return self._look(lambda view: view)

    def _known(self, view: View, name: str) -> Pointer:
        """Return what a name means; raise when its file cannot be opened."""
        pointer = view.pointer(name, self._place)
        state = view.state(pointer.file_id)
        path = self._place.session(pointer.file_id)
        if state == SET_APART:
            raise DamagedError(
                f"session {name!r} was damaged and lies in the quarantine of the library; remove the name to use it "
                "again",
                path=path,
            )
        if state == MISSING:
            raise MissingError(f"the file of session {name!r} is gone", path=path)
        return pointer

    def _create(self, name: str, view: View) -> None:
        check_free(name, [*view.pointers, *view.bad_names])
        data = empty_file()
        file_id = data[_FILE_ID].hex()
        write_whole(self._place.session(file_id), data, new=True)
        self._place.write_pointer(name, Pointer(file_id))

    def _opened(self, file_id: str, *, readonly: bool) -> LibrarySession:
        path = self._place.session(file_id)
        if os.path.islink(path):
            raise InputError("a symbolic link inside the library is not followed", path=path)
        return cast("LibrarySession", LibrarySession.open(path, create=False, readonly=readonly))

    def session_path(self, name: str) -> str:
        """Return the path of the file of a session, for reading. Raise as `open` does."""
        return self._place.session(self._known(self._names(), check_name(name)).file_id)

    def committed(self, file_id: str, identity: Identity) -> None:
        """Take note of a commit: what the sessions of this library call. Raises nothing that undoes a turn."""
        with suppress(CatalogueLost):
            self._catalogue.touch(file_id, time.time_ns())
        with suppress(BusyError, KvsnapError):
            self._enforce(identity)

    # -- looking ------------------------------------------------------------------------------------------

    def _look(self, work: Callable[[View], T]) -> T:
        """Look at the library and do something with what is seen, again where the catalogue is lost meanwhile."""
        while True:
            with suppress(CatalogueLost):
                return work(look(self._place, self._catalogue))

    def list(self) -> tuple[Entry, ...]:
        """Return all names, sorted, with what is known of their files. Reads only files that changed."""
        return self._look(lambda view: searching.entries(self._place, self._catalogue, view))

    def find(self, tokens: Sequence[int], identity: Identity | None = None) -> Found | None:
        """Return the session whose history agrees longest with these ids from the start, or None.

        With `identity` only sessions count that a model of this identity may restore. Of several the one with most
        reusable rows is returned, then the one used last. Reads no tensor, and no file that has not changed; counts as
        no use. Raise `InputError` for ids outside 0..2^31-1.
        """
        ids = searching.checked_ids(tokens)
        return self._look(lambda view: searching.find(self._place, self._catalogue, view, ids, identity))

    def tree(self) -> tuple[Branch, ...]:
        """Return all files as a forest: forks below the file that their history starts in."""
        return self._look(searching.tree)

    def check(self) -> Doctor:
        """Look the library over; every file's index and tables are read again. Changes nothing but the catalogue."""
        return self._look(
            lambda view: doctor.examine(self._place, view, self.max_bytes, self._catalogue.notes)
        )

    def refresh(self) -> None:
        """Bring the catalogue up to date with the files. Every other call does so by itself."""
        self._names()

    # -- names --------------------------------------------------------------------------------------------

    def rename(self, name: str, new: str) -> None:
        """Give a session another name. Raise `InputError` when it is taken or looks like that of another session."""
        check_name(name)
        check_name(new)
        with self._place.locked():
            view = self._names()
            view.pointer(name, self._place)
            if new != name:
                check_free(new, [n for n in (*view.pointers, *view.bad_names) if n != name])
                self._place.move_pointer(name, new)

    def remove(self, name: str) -> tuple[Evicted, ...]:
        """Remove a name; its file goes too, unless another name means it or a fork needs it. Return what was removed.

        Files that only it needed and no name reaches go with it. A damaged file is set apart instead. Raise
        `MissingError`, `BusyError` when the session is open for writing.
        """
        with self._place.locked():
            view = self._names()
            if name in view.bad_names:  # whatever it means, it is no name any more
                self._place.remove_pointer(check_name(name))
                return ()
            file_id = view.pointer(name, self._place).file_id
            if file_id in view.rows and self._place.is_busy(file_id):
                raise BusyError(
                    f"session {name!r} is open for writing; close it first", path=self._place.session(file_id)
                )
            self._place.remove_pointer(name)
            view.names[file_id].remove(name)
            removed = tuple(evicting.remove_unneeded(self._place, view, file_id))
        self._forget([e.file_id for e in removed])
        return removed

    def pin(self, name: str) -> None:
        """Let no prune remove a session, nor what it needs. Raise `MissingError`."""
        self._set_pinned(name, pinned=True)

    def unpin(self, name: str) -> None:
        """Let a prune remove a session again. Raise `MissingError`."""
        self._set_pinned(name, pinned=False)

    def _set_pinned(self, name: str, *, pinned: bool) -> None:
        with self._place.locked():
            pointer = self._names().pointer(check_name(name), self._place)
            self._place.write_pointer(name, Pointer(pointer.file_id, pinned))

    # -- room ---------------------------------------------------------------------------------------------

    def prune(
        self, max_bytes: int | None = None, *, identity: Identity | None = None, dry_run: bool = False
    ) -> PruneReport:
        """Remove sessions until their files take at most `max_bytes` (default: the limit of the library).

        First damaged files are set apart. Then go files without a name, sessions of another identity (when `identity`
        is given), and the sessions used least recently. Kept are pinned ones, what a fork needs, and what is open for
        writing. With `dry_run` nothing changes and the same is reported.
        """
        limit = self.max_bytes if max_bytes is None else _checked_limit(max_bytes)
        if limit is None:
            raise InputError("no limit: the library has none, so say how many bytes its sessions may take")

        def work(view: View) -> PruneReport:
            is_other = searching.differs(self._catalogue, view, identity)
            return evicting.prune(self._place, view, limit, is_other=is_other, dry_run=dry_run)

        if dry_run:
            return self._look(work)
        with self._place.locked():
            report = self._look(work)
        self._forget([e.file_id for e in report.evicted])
        return report

    def collect(self, *, dry_run: bool = False) -> CollectReport:
        """Remove files that no name reaches, neither itself nor through a fork. What is damaged stays."""
        if dry_run:
            return self._look(lambda view: evicting.collect(self._place, view, dry_run=True))
        with self._place.locked():
            report = self._look(lambda view: evicting.collect(self._place, view, dry_run=False))
        self._forget([e.file_id for e in report.removed])
        return report

    def _enforce(self, identity: Identity | None) -> None:
        limit = self.max_bytes
        if limit is not None and self._place.session_bytes() > limit:
            self.prune(limit, identity=identity)

    def _forget(self, file_ids: Sequence[str]) -> None:
        with suppress(CatalogueLost):
            self._catalogue.drop_uses(list(file_ids))

"""A directory of sessions: names, the longest common history, forks, a limit on its size. docs/library.md.

Names are pointers, files are named by their id, and what is known of them is kept in a catalogue that can be lost.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

import platformdirs

from kvsnap.errors import BusyError, DamagedError, InputError, KvsnapError
from kvsnap.formats.native import NativeFile
from kvsnap.formats.native.copy import CompactReport
from kvsnap.identity import Identity
from kvsnap.library import evicting, making, searching
from kvsnap.library.catalogue import CatalogueLost
from kvsnap.library.contents import Facts
from kvsnap.library.names import check_free, check_name
from kvsnap.library.place import Place, Pointer, Settings
from kvsnap.library.reports import Branch, CollectReport, Doctor, Entry, Evicted, Finding, Found, PruneReport
from kvsnap.library.session import LibrarySession
from kvsnap.library.shelf import Shelf
from kvsnap.library.view import View
from kvsnap.protocols import Progress

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


def default_path() -> str:
    """Return where the library of this user lies: the environment variable KVSNAP_LIBRARY, else the user's data."""
    return os.environ.get("KVSNAP_LIBRARY") or os.path.join(platformdirs.user_data_dir("kvsnap", False), "library")


class Library(Shelf):
    """A directory of sessions by name. A context manager; several processes and threads may use one directory.

    `path` is the directory (default: `default_path()`), made when it is missing or empty. `max_bytes` limits the files
    of all sessions together for this object, in bytes; without it the stored limit holds (`set_limit`). A library that
    is opened for writing keeps its limit: when it is opened, and after every commit, the sessions used least recently
    are removed.
    With `readonly` nothing is written, and `overrun` tells by how much the limit is exceeded.

    Raise `MissingError` (read-only, and no such directory), `InputError` (not a library), `VersionError`,
    `StorageError`, `BusyError` when another process changes it for more than ten seconds.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, max_bytes: int | None = None, readonly: bool = False
    ) -> None:
        where: object = default_path() if path is None else os.fspath(path)
        if not isinstance(where, str) or not where or "\0" in where:
            raise InputError("not a path: a non-empty text without NUL is expected", found=repr(where))
        super().__init__(where, limit=None if max_bytes is None else _checked_limit(max_bytes), readonly=readonly)
        if not readonly:
            self._enforce(None)

    def set_limit(self, max_bytes: int | None) -> None:
        """Store the limit in bytes for everyone who opens the library; None for none. It holds at once."""
        self._place.write_settings(Settings(None if max_bytes is None else _checked_limit(max_bytes)))
        self._own_limit = None
        self._enforce(None)

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
            session = _opened(self._place, self._known(self._names(), name).file_id, readonly=True)
        else:
            with self._place.locked():
                view = self._names()
                if create and name not in view.pointers and name not in view.bad_names:
                    _check_free(name, view)
                    file_id = making.empty_session(self._place)
                    self._place.write_pointer(name, Pointer(file_id))
                else:
                    file_id = self._known(view, name).file_id
                session = _opened(self._place, file_id, readonly=False)
        session.keep(self, name)
        self._touch(session.file_id)
        return session

    def fork(
        self, name: str, new: str, *, n_tokens: int | None = None, commit: int | None = None, nearest: bool = False
    ) -> Entry:
        """Make a session `new` whose history starts in that of `name`; nothing is copied. Return its entry.

        It starts at the last commit or an earlier one (`commit`), and keeps all tokens of it or the first `n_tokens`,
        with `nearest` as many below as can be reached. Raise `InputError` for a name that is taken or a length that is
        none, `MissingError` for an unknown session or commit, `UnsupportedError` as `Session.truncate`.
        """
        check_name(name)
        check_name(new)
        with self._place.locked():
            view = self._names()
            file_id = self._known(view, name).file_id
            _check_free(new, view)
            made = making.fork_session(self._place, file_id, n_tokens=n_tokens, commit=commit, nearest=nearest)
            return self._made(new, made)

    def add(
        self, path: str | os.PathLike[str], name: str, *, allow_loss: bool = False, progress: Progress | None = None
    ) -> Entry:
        """Copy a file into the library as session `name`; return its entry. Any format that kvsnap reads is taken.

        Parts of a `.kvsnap` file are copied as they are stored, each checked. Raise `InputError` for a name that is
        taken, `LossError` listing what only the format of the file has a place for, unless `allow_loss`, and what
        `kvsnap.load` raises.
        """
        check_name(name)
        with self._place.locked():
            self.check_new(name)
        copied = making.added_file(self._place, os.fspath(path), progress, allow_loss=allow_loss)
        with copied as name_it, self._place.locked():
            self.check_new(name)  # the copy may have taken long
            return self._made(name, name_it())

    def _made(self, name: str, file_id: str) -> Entry:
        """Give a file that was just made a name, which is free; return its entry. Under the lock."""
        self._place.write_pointer(name, Pointer(file_id))
        self._touch(file_id)
        self._enforce(None, keep=file_id)
        return self._look(lambda view: searching.entry(self._place, self._catalogue, view, name))

    def check_new(self, name: str) -> None:
        """Raise `InputError` unless a new session may have this name: it is legal, free, and like no other."""
        check_name(name)
        _check_free(name, self._names())

    def compact(self, name: str, *, states: int | None = None, progress: Progress | None = None) -> CompactReport:
        """Write a session anew without what its history no longer needs; it gets a new file, and keeps its names.

        The old file stays for as long as a fork needs it. A fork becomes a session of its own. Raise as
        `Session.compact`, and `BusyError` when it is open for writing.
        """
        with self.open(name, create=False) as session:
            return session.compact(states=states, progress=progress)

    # -- what sessions ask for ----------------------------------------------------------------------------

    def committed(self, file_id: str, identity: Identity, facts: Facts) -> None:
        """Take note of a commit: what the sessions of this library call. Raises nothing that undoes a turn."""
        with suppress(KvsnapError, OSError, CatalogueLost):
            found = os.lstat(self._place.session(file_id))
            stamp = (found.st_size, found.st_mtime_ns, found.st_ino)
            self._catalogue.update({file_id: (stamp, facts)}, [])
        self._touch(file_id)
        with suppress(KvsnapError):
            self._enforce(identity, keep=file_id)

    def replaced(
        self, session: LibrarySession, file: NativeFile, progress: Progress | None, states: int | None
    ) -> CompactReport:
        """Put a compacted file in the place of that of a session of this library, which goes on there."""
        file_id = session.file_id
        with (
            making.compacted_session(self._place, file, progress, states) as (report, name_it),
            self._place.locked(),
        ):
            view = self._names()
            pointers = {name: view.pointers[name] for name in self.names_of(file_id, view)}
            name_it()
            with session.moving(report.path) as go_on:
                making.point(self._place, pointers, report.file_id, go_on)
            if not (view.children.get(file_id) or file_id in view.needed or view.unclear()):
                self._place.remove_session(file_id)
                parent = view.facts(file_id).parent
                view.drop(file_id)
                evicting.remove_unneeded(self._place, view, parent)
        self._touch(report.file_id)
        return report

    def _touch(self, file_id: str) -> None:
        with suppress(CatalogueLost):
            self._catalogue.touch(file_id, time.time_ns())

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
        check_name(name)
        with self._place.locked():
            view = self._names()
            try:
                file_id = view.pointer(name, self._place).file_id
            except DamagedError:  # it does not say of any file that it means it
                self._place.remove_pointer(name)
                return ()
            if file_id in view.rows and self._place.is_busy(file_id):
                raise BusyError(
                    f"session {name!r} is open for writing; close it first", path=self._place.session(file_id)
                )
            self._place.remove_pointer(name)
            view.names[file_id].remove(name)
            removed = tuple(evicting.remove_unneeded(self._place, view, file_id, (name,)))
        self._forget([e.file_id for e in removed])
        return removed

    def pin(self, name: str) -> None:
        """Let no prune remove a session, nor what it needs. Raise `MissingError`."""
        self._set_pinned(name, pinned=True)

    def unpin(self, name: str) -> None:
        """Let a prune remove a session again. Raise `MissingError`."""
        self._set_pinned(name, pinned=False)

    def _set_pinned(self, name: str, *, pinned: bool) -> None:
        check_name(name)
        with self._place.locked():
            pointer = self._names().pointer(name, self._place)
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

        return self._prune(limit, identity, dry_run=dry_run)

    def _prune(self, limit: int, identity: Identity | None, keep: str = "", *, dry_run: bool = False) -> PruneReport:
        def work(view: View) -> PruneReport:
            is_other = searching.differs(self._catalogue, view, identity)
            return evicting.prune(self._place, view, limit, is_other=is_other, keep=keep, dry_run=dry_run)

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

    def _enforce(self, identity: Identity | None, keep: str = "") -> None:
        """Prune where the limit asks for it, but not the file `keep`, which was made or changed just now."""
        limit = self.max_bytes
        if limit is not None and self._place.session_bytes() > limit:
            self._prune(limit, identity, keep)

    def _forget(self, file_ids: Sequence[str]) -> None:
        with suppress(CatalogueLost):
            self._catalogue.drop_uses(list(file_ids))


def _check_free(name: str, view: View) -> None:
    check_free(name, [*view.pointers, *view.bad_names])


def _checked_limit(max_bytes: int) -> int:
    given: object = max_bytes
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise InputError("a limit is a number of bytes", expected="0 or more", found=repr(max_bytes))
    return max_bytes


def _opened(place: Place, file_id: str, *, readonly: bool) -> LibrarySession:
    path = place.session(file_id)
    if os.path.islink(path):
        raise InputError("a symbolic link inside the library is not followed", path=path)
    return cast("LibrarySession", LibrarySession.open(path, create=False, readonly=readonly))

"""The catalogue: what is known of each session file, and a trie of all token histories. docs/library.md.

A cache in stdlib sqlite3. Losing it loses nothing but the times of last use. One that is damaged, foreign or of another
version is made anew; where it cannot be written, or someone holds it, one in memory takes its place.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvsnap.errors import KvsnapError
from kvsnap.files import remove, write_whole
from kvsnap.library.contents import Facts
from kvsnap.library.tables import (
    COLUMNS,
    NotOursError,
    Row,
    agreed_of,
    as_int,
    check_members,
    forget,
    identity_of,
    is_outdated,
    prepare,
    put,
    reach,
    row_of,
    transaction,
)
from kvsnap.library.trie import BLOCK, Reach, blocks

__all__ = ["Catalogue", "CatalogueLost", "Row"]

T = TypeVar("T")
_PATIENCE = 5.0
_PASSING = ("locked", "unable to open", "readonly", "disk", "locking protocol", "interrupted")
"""Words of errors of sqlite that a new file does not help against."""


class CatalogueLost(Exception):  # noqa: N818 # not an error: the work is done again with the new catalogue
    """The catalogue was replaced by an empty one, or what was asked for is gone from it: fill it and ask again."""


class Catalogue:
    """The catalogue of one library at `path`; None keeps it in memory. Several threads may use it.

    With `readonly` the file is read once and never written. Every call may raise `CatalogueLost`, at most twice in the
    life of a catalogue that nobody damages meanwhile.
    """

    def __init__(self, path: str, *, readonly: bool) -> None:
        self._gate = threading.RLock()
        self._path: str | None = path
        self._readonly = readonly
        self._inode = -1
        self._process = os.getpid()
        self._lost = 0
        self._left: list[sqlite3.Connection] = []
        self._changes = 0
        self._identities: dict[bytes, str] = {}
        self._rows: tuple[tuple[sqlite3.Connection, int, int], Mapping[str, Row]] | None = None
        self.notes: list[str] = []
        self.epoch = 0
        """Goes up whenever another catalogue is opened: numbers of files are those of one."""
        self._db = self._open()

    @property
    def in_memory(self) -> bool:
        """True when nothing that is noted outlives this process."""
        return self._path is None or self._readonly

    def close(self) -> None:
        """Close it. Closing twice is allowed."""
        with self._gate, suppress(sqlite3.Error):
            if os.getpid() == self._process:  # else it is that of the parent process, which may be using it
                self._db.close()

    # -- opening and losing -------------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        self.epoch += 1
        while self._path is not None:
            try:
                return self._open_memory_copy(self._path) if self._readonly else self._open_file(self._path)
            except (sqlite3.Error, KvsnapError, OSError, NotOursError) as error:
                self._give_up(error)
        db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        prepare(db)
        return db

    def _open_file(self, path: str) -> sqlite3.Connection:
        if not os.path.lexists(path):
            with suppress(KvsnapError):
                write_whole(path, b"", sync=False, new=True)  # 0600 from the start; the journal takes the same
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise sqlite3.OperationalError("unable to open: not a regular file")
        db = sqlite3.connect(path, timeout=_PATIENCE, isolation_level=None, check_same_thread=False)
        with _closed_after_error(db):
            for pragma in ("secure_delete = ON", "journal_mode = DELETE", "synchronous = OFF"):
                db.execute(f"PRAGMA {pragma}").fetchall()
            prepare(db)
            check_members(db)
            self._inode = os.lstat(path).st_ino
        return db

    @staticmethod
    def _open_memory_copy(path: str) -> sqlite3.Connection:
        db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        with _closed_after_error(db):
            if os.path.lexists(path) and stat.S_ISREG(os.lstat(path).st_mode):
                name = f"{Path(path).as_uri()}?mode=ro"
                with closing(sqlite3.connect(name, uri=True, timeout=_PATIENCE)) as stored:
                    stored.backup(db)
            prepare(db)
            check_members(db)
        return db

    def _give_up(self, error: Exception) -> None:
        """After an error: the next one to be opened is a new file, or, where that cannot be, one in memory."""
        self._lost += 1
        if _is_spoilt(error) and self._path is not None and not self._readonly and self._lost <= 2:
            try:
                for name in (f"{self._path}-journal", self._path):
                    if os.path.lexists(name):
                        remove(name, sync=False)
            except KvsnapError as refused:
                error = refused
            else:
                self.notes.append(f"the catalogue was damaged or not ours ({error}), and was made anew")
                return
        self.notes.append(f"the catalogue cannot be used ({error}); one in memory takes its place")
        self._path = None

    def _current(self) -> sqlite3.Connection:
        if os.getpid() != self._process:  # after a fork a connection is nobody's
            self._process = os.getpid()
            self._left.append(self._db)
            self._db = self._open()
        elif self._path is not None and not self._readonly:
            try:
                same = os.lstat(self._path).st_ino == self._inode
            except OSError:
                same = False
            if not same:  # deleted or replaced behind our back
                with suppress(sqlite3.Error):
                    self._db.close()
                self._db = self._open()
        return self._db

    def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._gate:
            try:
                return work(self._current())
            except (sqlite3.Error, OverflowError, ValueError) as error:
                with suppress(sqlite3.Error):
                    self._db.close()
                self._give_up(error)
                self._db = self._open()
                raise CatalogueLost from error

    # -- files --------------------------------------------------------------------------------------------

    def rows(self) -> Mapping[str, Row]:
        """Return everything known of each file, by file id, but the histories."""

        def work(db: sqlite3.Connection) -> Mapping[str, Row]:
            # Changes of other connections are counted by sqlite, those of this one here.
            moment = (db, db.execute("PRAGMA data_version").fetchone()[0], self._changes)
            if self._rows is None or self._rows[0] != moment:
                made = {r[1]: row_of(r) for r in db.execute(f"SELECT {COLUMNS} FROM files")}  # noqa: S608
                self._rows = moment, made
            return self._rows[1]

        return self._do(work)

    def update(
        self,
        changed: Mapping[str, tuple[tuple[int, ...], Facts]],
        gone: list[str],
        known: Mapping[str, Row] | None = None,
    ) -> None:
        """Note what changed files hold, and forget those that are gone (their last use is kept).

        With `known`, the rows that the changes were found by, what somebody else noted of a file meanwhile stays unless
        it is older. Else a slow look would take back what a commit noted.
        """
        if not changed and not gone:
            return

        def work(db: sqlite3.Connection) -> None:
            with transaction(db):
                for file_id in gone:
                    forget(db, file_id)
                for file_id, (stamp, facts) in changed.items():
                    if known is None or not is_outdated(db, file_id, stamp, known.get(file_id)):
                        put(db, file_id, stamp, facts)
            self._changes += 1

        self._do(work)

    def identity(self, digest: bytes) -> str:
        """Return an identity as JSON. Raise `CatalogueLost` for one that is not known any more."""
        if digest not in self._identities:
            found = self._do(lambda db: identity_of(db, digest))
            if found is None:
                raise CatalogueLost
            self._identities[digest] = found
        return self._identities[digest]

    def uses(self) -> dict[str, int]:
        """Return the time of last use by file id, in nanoseconds since 1970-01-01 UTC."""
        return self._do(lambda db: {str(f): as_int(at) for f, at in db.execute("SELECT file_id, time_ns FROM uses")})

    def touch(self, file_id: str, time_ns: int) -> None:
        """Note a use of a file."""

        def work(db: sqlite3.Connection) -> None:
            with transaction(db):
                db.execute(
                    "INSERT INTO uses VALUES (?, ?) ON CONFLICT (file_id) DO UPDATE SET time_ns = excluded.time_ns",
                    (file_id, time_ns),
                )

        self._do(work)

    def drop_uses(self, file_ids: list[str]) -> None:
        """Forget the last use of files that are removed for good."""

        def work(db: sqlite3.Connection) -> None:
            with transaction(db):
                db.executemany("DELETE FROM uses WHERE file_id = ?", [(f,) for f in file_ids])

        self._do(work)

    # -- histories ----------------------------------------------------------------------------------------

    def reaches(self, tokens: npt.NDArray[np.int32]) -> Iterator[Reach]:
        """Yield how far the histories of files agree with these ids, int32 `[ids]`: those that agree longest first.

        Each step names the files that part from the ids within one block, and how many ids agree with each. A file may
        be named again, with fewer.
        """
        path: list[bytes] = [bytes(16)]
        for digest, ids in blocks(tokens):
            if len(ids) < BLOCK * 4 or self._node(digest) != ids:
                break
            path.append(digest)
        for level in range(len(path) - 1, -1, -1):
            yield self._do(lambda db, at=level: reach(db, path[at], at * BLOCK, tokens))  # type: ignore[misc]

    def agreed(self, row: Row, tokens: npt.NDArray[np.int32], expected: int) -> tuple[Row, int]:
        """Return what is known of a file now, and with how many of these ids it agrees, from all ids of both.

        Raise `CatalogueLost` when the file is not known any more, or is the same and `expected` ids were said to agree.
        """

        def work(db: sqlite3.Connection) -> tuple[Row, int] | None:
            found = agreed_of(db, row.number, tokens)
            if found is not None and found[0].history == row.history and found[1] != expected:
                raise sqlite3.DatabaseError("the blocks of a history do not tell its length")
            return found

        found = self._do(work)
        if found is None or found[0].file_id != row.file_id:
            raise CatalogueLost
        return found

    def _node(self, digest: bytes) -> bytes | None:
        found = self._do(lambda db: db.execute("SELECT ids FROM nodes WHERE digest = ?", (digest,)).fetchone())
        return found[0] if found else None


def _is_spoilt(error: Exception) -> bool:
    """Tell whether the content is wrong, so that a new file helps; else the file cannot be used now."""
    if isinstance(error, sqlite3.OperationalError):
        return not any(words in str(error) for words in _PASSING)
    return not isinstance(error, (KvsnapError, OSError, sqlite3.ProgrammingError, sqlite3.InterfaceError))


@contextmanager
def _closed_after_error(db: sqlite3.Connection) -> Iterator[None]:
    with ExitStack() as undo:
        undo.callback(db.close)
        yield
        undo.pop_all()

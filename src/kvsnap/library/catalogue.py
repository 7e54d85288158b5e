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
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from kvsnap.errors import KvsnapError
from kvsnap.files import remove, write_whole
from kvsnap.library.contents import Facts
from kvsnap.library.trie import BLOCK, Reach, blocks, common

__all__ = ["Catalogue", "CatalogueLost", "Row"]

T = TypeVar("T")
_APPLICATION = 0x4B56534C
_VERSION = 1
_PATIENCE = 5.0
_SCHEMA = """
CREATE TABLE identities (digest BLOB PRIMARY KEY, json TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE files (
    number INTEGER PRIMARY KEY, file_id TEXT NOT NULL UNIQUE, stamp TEXT NOT NULL, state TEXT NOT NULL,
    reason TEXT NOT NULL, n_tokens INTEGER NOT NULL, n_rows INTEGER NOT NULL, n_pending INTEGER NOT NULL,
    n_commits INTEGER NOT NULL, complete INTEGER NOT NULL, created_ns INTEGER NOT NULL, identity BLOB NOT NULL,
    parent TEXT NOT NULL, rewindable INTEGER NOT NULL, turns BLOB NOT NULL
);
CREATE TABLE uses (file_id TEXT PRIMARY KEY, time_ns INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE nodes (
    number INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, parent BLOB NOT NULL, ids BLOB NOT NULL
);
CREATE INDEX nodes_parent ON nodes (parent);
CREATE TABLE members (
    node INTEGER NOT NULL, file INTEGER NOT NULL, PRIMARY KEY (node, file)
) WITHOUT ROWID;
CREATE INDEX members_file ON members (file);
"""
_COLUMNS = (
    "number, file_id, stamp, state, reason, n_tokens, n_rows, n_pending, n_commits, complete, created_ns, identity, "
    "parent, rewindable, turns"
)


class CatalogueLost(Exception):  # noqa: N818 # not an error: the work is done again with the new catalogue
    """The catalogue was replaced by an empty one: fill it and ask again."""


@dataclass(frozen=True, slots=True)
class Row:
    """One file as the catalogue knows it. `stamp` is size, time and inode of the file when it was read."""

    number: int
    file_id: str
    stamp: tuple[int, ...]
    identity: bytes
    facts: Facts


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
        self._db = self._open()

    @property
    def in_memory(self) -> bool:
        """True when nothing that is noted outlives this process."""
        return self._path is None or self._readonly

    def close(self) -> None:
        """Close it. Closing twice is allowed."""
        with self._gate, suppress(sqlite3.Error):
            self._db.close()

    # -- opening and losing -------------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        while self._path is not None:
            try:
                return self._open_memory_copy(self._path) if self._readonly else self._open_file(self._path)
            except (sqlite3.Error, KvsnapError, OSError, _NotOursError) as error:
                self._give_up(error)
        db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        _prepare(db)
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
            _prepare(db)
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
            _prepare(db)
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
                made = {r[1]: _row(r) for r in db.execute(f"SELECT {_COLUMNS} FROM files")}  # noqa: S608
                self._rows = moment, made
            return self._rows[1]

        return self._do(work)

    def update(self, changed: Mapping[str, tuple[tuple[int, ...], Facts]], gone: list[str]) -> None:
        """Note what changed files hold, and forget those that are gone (their last use is kept)."""
        if not changed and not gone:
            return

        def work(db: sqlite3.Connection) -> None:
            with _transaction(db):
                for file_id in gone:
                    _forget(db, file_id)
                for file_id, (stamp, facts) in changed.items():
                    _put(db, file_id, stamp, facts)
            self._changes += 1

        self._do(work)

    def identity(self, digest: bytes) -> str:
        """Return an identity as JSON; an empty object for one that is not known."""
        if digest not in self._identities:
            found = self._do(
                lambda db: db.execute("SELECT json FROM identities WHERE digest = ?", (digest,)).fetchone()
            )
            text = str(found[0]) if found else "{}"
            if xxhash.xxh3_128_digest(text.encode()) != digest:
                return text
            self._identities[digest] = text
        return self._identities[digest]

    def uses(self) -> dict[str, int]:
        """Return the time of last use by file id, in nanoseconds since 1970-01-01 UTC."""
        return self._do(lambda db: dict(db.execute("SELECT file_id, time_ns FROM uses").fetchall()))

    def touch(self, file_id: str, time_ns: int) -> None:
        """Note a use of a file."""

        def work(db: sqlite3.Connection) -> None:
            with _transaction(db):
                db.execute(
                    "INSERT INTO uses VALUES (?, ?) ON CONFLICT (file_id) DO UPDATE SET time_ns = excluded.time_ns",
                    (file_id, time_ns),
                )

        self._do(work)

    def drop_uses(self, file_ids: list[str]) -> None:
        """Forget the last use of files that are removed for good."""

        def work(db: sqlite3.Connection) -> None:
            with _transaction(db):
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
            yield self._do(lambda db, at=level: _reach(db, path[at], at * BLOCK, tokens))  # type: ignore[misc]

    def _node(self, digest: bytes) -> bytes | None:
        found = self._do(lambda db: db.execute("SELECT ids FROM nodes WHERE digest = ?", (digest,)).fetchone())
        return found[0] if found else None


class _NotOursError(Exception):
    """A database of something else, or of another version."""


def _is_spoilt(error: Exception) -> bool:
    """Tell whether the content is wrong, so that a new file helps; else the file cannot be used now."""
    if isinstance(error, sqlite3.OperationalError):
        return "no such" in str(error)  # a table or a column
    return not isinstance(error, (KvsnapError, OSError, sqlite3.ProgrammingError, sqlite3.InterfaceError))


def _prepare(db: sqlite3.Connection) -> None:
    if db.execute("PRAGMA application_id").fetchone()[0] == _APPLICATION:
        found = db.execute("PRAGMA user_version").fetchone()[0]
        if found != _VERSION:
            raise _NotOursError(f"version {found}, not {_VERSION}")
        db.execute(f"SELECT {_COLUMNS} FROM files LIMIT 1").fetchall()  # noqa: S608 # the names are constants
        return
    with _transaction(db):
        if db.execute("PRAGMA application_id").fetchone()[0] == _APPLICATION:  # another process was faster
            return
        if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise _NotOursError("a database of something else")
        for statement in _SCHEMA.split(";"):
            if statement.strip():
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {_VERSION}")
        db.execute(f"PRAGMA application_id = {_APPLICATION}")


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    def back() -> None:
        with suppress(sqlite3.Error):
            db.execute("ROLLBACK")

    db.execute("BEGIN IMMEDIATE")
    with ExitStack() as undo:
        undo.callback(back)
        yield
        db.execute("COMMIT")
        undo.pop_all()


@contextmanager
def _closed_after_error(db: sqlite3.Connection) -> Iterator[None]:
    with ExitStack() as undo:
        undo.callback(db.close)
        yield
        undo.pop_all()


def _row(r: tuple[object, ...]) -> Row:
    number, file_id, stamp, state, reason, n_tokens, n_rows, n_pending, n_commits, complete, created, *rest = r
    identity, parent, rewindable, turns = rest
    facts = Facts(
        state=str(state), reason=str(reason), n_tokens=_int(n_tokens), n_rows=_int(n_rows), n_pending=_int(n_pending),
        n_commits=_int(n_commits), complete=bool(complete), created_ns=_int(created), parent=str(parent),
        rewindable=bool(rewindable), turns=np.frombuffer(_bytes(turns), "<i8").reshape(-1, 2),
    )  # fmt: skip
    return Row(_int(number), str(file_id), tuple(map(int, str(stamp).split())), _bytes(identity), facts)


def _int(value: object) -> int:
    if not isinstance(value, int):
        raise sqlite3.DatabaseError(f"a number is expected, found {type(value).__name__}")
    return value


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise sqlite3.DatabaseError(f"bytes are expected, found {type(value).__name__}")
    return value


def _forget(db: sqlite3.Connection, file_id: str) -> None:
    found = db.execute("SELECT number FROM files WHERE file_id = ?", (file_id,)).fetchone()
    if found:
        _set_members(db, found[0], [])
        db.execute("DELETE FROM files WHERE number = ?", found)
        _drop_unused_identities(db)


def _drop_unused_identities(db: sqlite3.Connection) -> None:
    db.execute("DELETE FROM identities WHERE digest NOT IN (SELECT identity FROM files)")


def _put(db: sqlite3.Connection, file_id: str, stamp: tuple[int, ...], facts: Facts) -> None:
    identity = facts.identity_digest
    db.execute("INSERT OR IGNORE INTO identities VALUES (?, ?)", (identity, facts.identity))
    values = (
        " ".join(map(str, stamp)), facts.state, facts.reason.encode(errors="backslashreplace").decode(),
        facts.n_tokens, facts.n_rows, facts.n_pending, facts.n_commits, int(facts.complete), facts.created_ns, identity,
        facts.parent, int(facts.rewindable), facts.turns.astype("<i8").tobytes(),
    )  # fmt: skip
    found = db.execute("SELECT number, identity FROM files WHERE file_id = ?", (file_id,)).fetchone()
    if found:
        db.execute(
            "UPDATE files SET stamp=?, state=?, reason=?, n_tokens=?, n_rows=?, n_pending=?, n_commits=?, complete=?, "
            "created_ns=?, identity=?, parent=?, rewindable=?, turns=? WHERE number=?",
            (*values, found[0]),
        )
        number = found[0]
        if found[1] != identity:
            _drop_unused_identities(db)
    else:
        number = db.execute(
            f"INSERT INTO files ({_COLUMNS}) VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",  # noqa: S608
            (file_id, *values),
        ).lastrowid
    _set_members(db, number, list(blocks(facts.tokens)))


def _set_members(db: sqlite3.Connection, file: int, chain: list[tuple[bytes, bytes]]) -> None:
    """Let a file be a member of these nodes, which are made, and of no other; nodes without a member go."""
    old = {row[0] for row in db.execute("SELECT node FROM members WHERE file = ?", (file,))}
    new: set[int] = set()
    parent = bytes(16)
    for digest, ids in chain:
        found = db.execute("SELECT number FROM nodes WHERE digest = ?", (digest,)).fetchone()
        if found is None:
            cursor = db.execute("INSERT INTO nodes (digest, parent, ids) VALUES (?, ?, ?)", (digest, parent, ids))
            found = (cursor.lastrowid,)
        new.add(found[0])
        parent = digest
    db.executemany("INSERT OR IGNORE INTO members VALUES (?, ?)", [(node, file) for node in new - old])
    left = [(node,) for node in old - new]
    db.executemany("DELETE FROM members WHERE node = ? AND file = " + str(int(file)), left)  # noqa: S608
    db.executemany("DELETE FROM nodes WHERE number = ?1 AND NOT EXISTS (SELECT 1 FROM members WHERE node = ?1)", left)


def _reach(db: sqlite3.Connection, node: bytes, start: int, tokens: npt.NDArray[np.int32]) -> Reach:
    rest = tokens[start : start + BLOCK]
    files: dict[int, int] = {}
    if start:
        for (file,) in db.execute(
            "SELECT m.file FROM members m JOIN nodes n ON m.node = n.number WHERE n.digest = ?", (node,)
        ):
            files[file] = start
    children = db.execute("SELECT number, digest, ids FROM nodes WHERE parent = ?", (node,)).fetchall()
    for number, digest, ids in children:
        if xxhash.xxh3_128_digest(node + ids) != digest:
            raise sqlite3.DatabaseError("a block of ids does not fit its digest")
        agreed = common(np.frombuffer(ids, "<i4"), rest)
        if agreed:
            for (file,) in db.execute("SELECT file FROM members WHERE node = ?", (number,)):
                files[file] = start + agreed
    return Reach(start, files)

"""The tables of the catalogue: a row for each file, and a trie of all token histories. docs/library.md.

A row carries a checksum and the digest of its whole history, so that what a damaged database says is not believed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import xxhash

from kvsnap.library.contents import Facts
from kvsnap.library.trie import BLOCK, Reach, blocks, common

__all__ = [
    "COLUMNS", "NotOursError", "Row", "agreed_of", "as_bytes", "as_int", "check_members", "forget", "identity_of",
    "is_outdated", "prepare", "put", "reach", "row_of", "transaction",
]  # fmt: skip

_APPLICATION = 0x4B56534C
_VERSION = 2
_SCHEMA = """
CREATE TABLE identities (digest BLOB PRIMARY KEY, json TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, file_id TEXT NOT NULL UNIQUE, stamp TEXT NOT NULL, state TEXT NOT NULL,
    reason TEXT NOT NULL, n_tokens INTEGER NOT NULL, n_rows INTEGER NOT NULL, n_pending INTEGER NOT NULL,
    n_commits INTEGER NOT NULL, complete INTEGER NOT NULL, created_ns INTEGER NOT NULL, identity BLOB NOT NULL,
    parent TEXT NOT NULL, rewindable INTEGER NOT NULL, history BLOB NOT NULL, turns BLOB NOT NULL, sum BLOB NOT NULL
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
COLUMNS = (
    "number, file_id, stamp, state, reason, n_tokens, n_rows, n_pending, n_commits, complete, created_ns, identity, "
    "parent, rewindable, history, turns, sum"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One file as the catalogue knows it. `stamp` is size, time and inode of the file when it was read.

    `history` is the digest of the last block of its ids, 16 zero bytes for none. A number is never used again.
    """

    number: int
    file_id: str
    stamp: tuple[int, ...]
    identity: bytes
    history: bytes
    facts: Facts


_LENGTHS = """
SELECT f.n_tokens, coalesce(m.count, 0) FROM files f
LEFT JOIN (SELECT file, count(*) AS count FROM members JOIN nodes ON number = node GROUP BY file) m ON m.file = f.number
WHERE f.history != zeroblob(16)
"""
_LOOSE = """
SELECT 1 FROM nodes n
WHERE n.parent IS NOT zeroblob(16) AND NOT EXISTS (SELECT 1 FROM nodes p WHERE p.digest = n.parent)
"""


class NotOursError(Exception):
    """A database of something else, or of another version."""


def prepare(db: sqlite3.Connection) -> None:
    """Make the tables where there is nothing yet. Raise `NotOursError` unless all that is there is as we make it."""
    if db.execute("PRAGMA application_id").fetchone()[0] == _APPLICATION:
        found = db.execute("PRAGMA user_version").fetchone()[0]
        if found != _VERSION:
            raise NotOursError(f"version {found}, not {_VERSION}")
        if _objects(db) != _known_objects():
            raise NotOursError("tables, views or triggers that are not ours")
        return
    with transaction(db):
        if db.execute("PRAGMA application_id").fetchone()[0] == _APPLICATION:  # another process was faster
            return
        if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise NotOursError("a database of something else")
        _make(db)
        db.execute(f"PRAGMA user_version = {_VERSION}")
        db.execute(f"PRAGMA application_id = {_APPLICATION}")


def _make(db: sqlite3.Connection) -> None:
    for statement in _SCHEMA.split(";"):
        if statement.strip():
            db.execute(statement)


def _objects(db: sqlite3.Connection) -> list[tuple[object, ...]]:
    return sorted(db.execute("SELECT type, name, tbl_name, coalesce(sql, '') FROM sqlite_master"))


@lru_cache(maxsize=1)
def _known_objects() -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        _make(db)
        return _objects(db)


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Change all that the block changes, or nothing."""

    def back() -> None:
        with suppress(sqlite3.Error):
            db.execute("ROLLBACK")

    db.execute("BEGIN IMMEDIATE")
    with ExitStack() as undo:
        undo.callback(back)
        yield
        db.execute("COMMIT")
        undo.pop_all()


def row_of(r: tuple[object, ...]) -> Row:
    """Return a row as it was put there. Raise `DatabaseError` for any other."""
    if _sum(r[:-1]) != r[-1]:
        raise sqlite3.DatabaseError("what is known of a file does not fit its checksum")
    number, file_id, stamp, state, reason, n_tokens, n_rows, n_pending, n_commits, complete, created, *rest = r
    identity, parent, rewindable, last, turns, _ = rest
    facts = Facts(
        state=str(state), reason=str(reason), n_tokens=as_int(n_tokens), n_rows=as_int(n_rows),
        n_pending=as_int(n_pending), n_commits=as_int(n_commits), complete=bool(complete), created_ns=as_int(created),
        parent=str(parent), rewindable=bool(rewindable), turns=np.frombuffer(as_bytes(turns), "<i8").reshape(-1, 2),
    )  # fmt: skip
    return Row(
        as_int(number), str(file_id), tuple(map(int, str(stamp).split())), as_bytes(identity), as_bytes(last), facts
    )


def _sum(values: tuple[object, ...]) -> bytes:
    """Return XXH3-128 of the columns of a row, each with its type and length."""
    digest = xxhash.xxh3_128()
    for value in values:
        raw = value if isinstance(value, bytes) else str(value).encode()
        digest.update(f"{type(value).__name__} {len(raw)} ".encode())
        digest.update(raw)
    return digest.digest()


def as_int(value: object) -> int:
    """Return a whole number. Raise `DatabaseError` for anything else."""
    if not isinstance(value, int):
        raise sqlite3.DatabaseError(f"a number is expected, found {type(value).__name__}")
    return value


def as_bytes(value: object) -> bytes:
    """Return bytes. Raise `DatabaseError` for anything else."""
    if not isinstance(value, bytes):
        raise sqlite3.DatabaseError(f"bytes are expected, found {type(value).__name__}")
    return value


def forget(db: sqlite3.Connection, file_id: str) -> None:
    """Remove the row of a file and what only its history needs."""
    found = db.execute("SELECT number FROM files WHERE file_id = ?", (file_id,)).fetchone()
    if found:
        _set_members(db, found[0], [])
        db.execute("DELETE FROM files WHERE number = ?", found)
        _drop_unused_identities(db)


def _drop_unused_identities(db: sqlite3.Connection) -> None:
    db.execute("DELETE FROM identities WHERE digest NOT IN (SELECT identity FROM files)")


def is_outdated(db: sqlite3.Connection, file_id: str, stamp: tuple[int, ...], before: Row | None) -> bool:
    """Tell whether more is noted of a file than when it was known as `before`, and not of an earlier moment."""
    found = db.execute("SELECT stamp FROM files WHERE file_id = ?", (file_id,)).fetchone()
    if found is None:
        return False
    noted = tuple(map(int, str(found[0]).split()))
    if before is not None and noted == before.stamp:
        return False
    return (noted[1], noted[0]) >= (stamp[1], stamp[0])


def put(db: sqlite3.Connection, file_id: str, stamp: tuple[int, ...], facts: Facts) -> None:
    """Make or replace the row of a file, and its history."""
    identity = facts.identity_digest
    db.execute("INSERT OR IGNORE INTO identities VALUES (?, ?)", (identity, facts.identity))
    chain = list(blocks(facts.tokens))
    values = (
        " ".join(map(str, stamp)), facts.state, facts.reason.encode(errors="backslashreplace").decode(),
        facts.n_tokens, facts.n_rows, facts.n_pending, facts.n_commits, int(facts.complete), facts.created_ns, identity,
        facts.parent, int(facts.rewindable), chain[-1][0] if chain else bytes(16), facts.turns.astype("<i8").tobytes(),
    )  # fmt: skip
    found = db.execute("SELECT number, identity FROM files WHERE file_id = ?", (file_id,)).fetchone()
    if found is None:
        cursor = db.execute(
            "INSERT INTO files VALUES (NULL, ?, '', '', '', 0, 0, 0, 0, 0, 0, x'', '', 0, x'', x'', x'')", (file_id,)
        )
        found = (cursor.lastrowid, identity)
    number = found[0]
    db.execute(
        "UPDATE files SET stamp=?, state=?, reason=?, n_tokens=?, n_rows=?, n_pending=?, n_commits=?, complete=?, "
        "created_ns=?, identity=?, parent=?, rewindable=?, history=?, turns=?, sum=? WHERE number=?",
        (*values, _sum((number, file_id, *values)), number),
    )
    if found[1] != identity:
        _drop_unused_identities(db)
    _set_members(db, number, chain)


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


def reach(db: sqlite3.Connection, node: bytes, start: int, tokens: npt.NDArray[np.int32]) -> Reach:
    """Return the files that agree with these ids up to the block `node`, which ends at `start`, and part behind it."""
    rest = tokens[start : start + BLOCK]
    files: dict[int, int] = {}
    if start:
        for (file,) in db.execute(
            "SELECT m.file FROM members m JOIN nodes n ON m.node = n.number WHERE n.digest = ?", (node,)
        ):
            files[file] = start
    children = db.execute("SELECT number, digest, ids FROM nodes WHERE parent = ?", (node,)).fetchall()
    for number, digest, ids in children:
        agreed = common(np.frombuffer(_checked_ids(node, ids, digest), "<i4"), rest)
        if agreed:
            for (file,) in db.execute("SELECT file FROM members WHERE node = ?", (number,)):
                files[file] = start + agreed
    return Reach(start, files)


def _checked_ids(parent: object, ids: object, digest: object) -> bytes:
    checked = as_bytes(ids)
    if xxhash.xxh3_128_digest(as_bytes(parent) + checked) != digest:
        raise sqlite3.DatabaseError("a block of ids does not fit its digest")
    return checked


def history(db: sqlite3.Connection, last: bytes) -> npt.NDArray[np.int32]:
    """Return all ids up to the end of a block, int32 `[ids]`. Raise `DatabaseError` when they do not fit its digest."""
    pieces: list[bytes] = []
    digest = last
    while digest != bytes(16):
        found = db.execute("SELECT parent, ids FROM nodes WHERE digest = ?", (digest,)).fetchone()
        if found is None:
            raise sqlite3.DatabaseError("a block of ids is missing")
        parent, ids = found
        pieces.append(_checked_ids(parent, ids, digest))
        digest = as_bytes(parent)
    return np.frombuffer(b"".join(reversed(pieces)), "<i4")


def identity_of(db: sqlite3.Connection, digest: bytes) -> str | None:
    """Return the identity of this digest as JSON, None for an unknown one."""
    found = db.execute("SELECT json FROM identities WHERE digest = ?", (digest,)).fetchone()
    if found is None:
        return None
    text = str(found[0])
    if xxhash.xxh3_128_digest(text.encode()) != digest:
        raise sqlite3.DatabaseError("an identity does not fit its digest")
    return text


def check_members(db: sqlite3.Connection) -> None:
    """Raise `DatabaseError` unless each file has as many blocks as its history, and each block the one before it."""
    for n_tokens, count in db.execute(_LENGTHS):
        if count != -(-as_int(n_tokens) // BLOCK):
            raise sqlite3.DatabaseError("a file does not have the blocks of its history")
    if db.execute(_LOOSE).fetchone():
        raise sqlite3.DatabaseError("a block of ids is missing")


def agreed_of(db: sqlite3.Connection, number: int, tokens: npt.NDArray[np.int32]) -> tuple[Row, int] | None:
    """Return the row of a file now, and with how many of these ids its history agrees, from all ids of both."""
    db.execute("BEGIN")
    try:
        found = db.execute(f"SELECT {COLUMNS} FROM files WHERE number = ?", (number,)).fetchone()  # noqa: S608
        if found is None:
            return None
        row = row_of(found)
        return row, common(history(db, row.history), tokens)
    finally:
        with suppress(sqlite3.Error):
            db.execute("ROLLBACK")

"""A catalogue that says what is not so is not believed: damaged, crafted, or filled from a hostile file."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvsnap.formats.native.journal import new_header
from kvsnap.formats.native.tables import Commit, Operation
from kvsnap.formats.native.write import MemorySink, RecordWriter
from kvsnap.identity import Identity
from kvsnap.library import Library, catalogue, doctor, searching
from kvsnap.records import HEADER_SIZE, SESSION
from kvsnap.session import Session
from synthetic import IDENTITY, snapshot

LONG = tuple(range(1, 600))


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    with Library(tmp_path / "library") as made:
        with made.open("a") as session:
            session.append(snapshot((1, 2, 3)))
            session.append(snapshot((1, 2, 3, 4)))
        with made.open("long") as session:
            session.append(snapshot(LONG))
        made.fork("long", "fork", n_tokens=500)
        made.list()
        yield made


def spoil(library: Library, sql: str) -> int:
    with closing(sqlite3.connect(Path(library.path) / "catalogue.sqlite", isolation_level=None)) as db:
        return db.executescript(sql).rowcount if ";" in sql else db.execute(sql).rowcount


def answers(library: Library) -> object:
    return (
        [(e.name, e.state, e.n_tokens, e.n_rows, e.n_commits, e.parent, e.identity) for e in library.list()],
        [library.find(ids) for ids in ((1, 2, 7), (1, 2, 3, 4, 5), LONG[:256], LONG[:511], (*LONG, 7), (9,))],
        library.find((1, 2, 7), IDENTITY),
        library.find((1, 2, 7), Identity(architecture="another", weights=IDENTITY.weights)),
        library.tree(),
    )


LIES = [
    "UPDATE files SET n_tokens = 77",
    "UPDATE files SET n_rows = -5",
    "UPDATE files SET turns = x''",
    "UPDATE files SET turns = zeroblob(1600)",
    "UPDATE files SET turns = x'ffffffffffffffffffffffffffffffff'",
    "UPDATE files SET state = 'damaged'",
    "UPDATE files SET state = x'00'",
    "UPDATE files SET parent = ''",
    "UPDATE files SET parent = file_id",
    "UPDATE files SET rewindable = 0",
    "UPDATE files SET stamp = (SELECT stamp FROM files WHERE n_commits = 3)",
    "UPDATE files SET identity = x'00'",
    "UPDATE files SET history = zeroblob(16)",
    "UPDATE files SET number = number + 10",
    "UPDATE uses SET time_ns = 'x'",
    "UPDATE uses SET time_ns = x'00'",
    "UPDATE nodes SET ids = 'abcd'",
    "UPDATE nodes SET ids = x'00000000'",
    "UPDATE nodes SET parent = 5",
    "DELETE FROM nodes",
    "DELETE FROM members",
    "UPDATE members SET file = 99 WHERE node = 1",
    "UPDATE OR REPLACE members SET file = 1",
    "UPDATE identities SET json = '{}'",
    "CREATE TRIGGER t AFTER UPDATE ON files BEGIN UPDATE files SET n_tokens = 9; END;",
    "CREATE TRIGGER t AFTER INSERT ON uses BEGIN DELETE FROM uses; END;",
    "ALTER TABLE files RENAME TO f; CREATE VIEW files AS SELECT * FROM f;",
    "DROP INDEX nodes_parent; CREATE INDEX nodes_parent ON nodes (parent) WHERE number > 1000;",
]


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("lie", LIES)
def test_what_a_catalogue_says_is_not_believed(library: Library, lie: str, readonly: bool) -> None:
    expected = answers(library)
    library.close()
    spoil(library, lie)
    with Library(library.path, readonly=readonly) as again:
        assert answers(again) == expected
        if not readonly:
            with again.open("new") as session:
                session.append(snapshot((5, 6)))
            assert again.list()[-1].n_tokens == 2
            again.prune(10**9)
            again.remove("long")
            assert {e.name: (e.state, e.n_tokens) for e in again.list()} == {
                "a": ("ok", 4), "fork": ("ok", 500), "new": ("ok", 2),
            }  # fmt: skip


def test_what_the_catalogue_says_of_a_file_that_did_not_change_is_not_read_again(library: Library) -> None:
    library.close()
    with Library(library.path) as again:
        answers(again)
        assert not again._catalogue.notes  # so the test above does not pass because nothing is ever believed


@pytest.mark.parametrize("bit", range(0, 8, 3))
def test_a_flipped_bit_of_the_catalogue_changes_no_count(library: Library, bit: int) -> None:
    expected = answers(library)
    library.close()
    path = Path(library.path) / "catalogue.sqlite"
    whole = path.read_bytes()
    for at in range(bit * 5, len(whole), 997):
        raw = bytearray(whole)
        raw[at] ^= 1 << bit
        path.write_bytes(raw)
        with Library(library.path) as again:
            assert answers(again)[0] == expected[0], at  # type: ignore[index]


def test_a_number_is_not_used_again(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks at the catalogue another process may put one file in the place of another."""
    before = searching._usable

    def other(*args: object) -> object:
        found = before(*args)  # type: ignore[arg-type]
        with Library(library.path) as second:
            second.remove("fork")
            with second.open("new") as session:
                session.append(snapshot((*LONG[:550], 7)))
        monkeypatch.setattr(searching, "_usable", before)
        return found

    monkeypatch.setattr(searching, "_usable", other)
    found = library.find((*LONG[:550], 7))
    assert found is not None
    assert (found.name, found.n_tokens) in (("long", 550), ("new", 551))


def test_a_session_that_shrank_meanwhile_is_told_as_it_is(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    before = catalogue.Catalogue.reaches

    def other(self: catalogue.Catalogue, tokens: object) -> object:
        monkeypatch.setattr(catalogue.Catalogue, "reaches", before)
        steps = list(before(self, tokens))  # type: ignore[arg-type]
        with Library(library.path) as second, second.open("long") as session:
            session.truncate(300)
        yield from steps

    monkeypatch.setattr(catalogue.Catalogue, "reaches", other)
    found = library.find(LONG)
    assert found is not None
    assert (found.name, found.n_tokens, found.n_rows, found.keep) == ("long", 300, 300, 300)


def test_the_number_of_a_commit_may_be_any(library: Library) -> None:
    sink, header = MemorySink(), new_header(SESSION)
    sink.write_at([header.pack()], 0)
    writer = RecordWriter(sink, header, offset=HEADER_SIZE, sequence=0, commit=2**63)
    writer.commit(Commit(number=2**63, operation=Operation.RESET, time_ns=1))
    expected = answers(library)
    (Path(library.path) / "sessions" / f"{header.file_id.hex()}.kvsnap").write_bytes(bytes(sink.data))
    assert answers(library)[:4] == expected[:4]  # type: ignore[index]
    assert not library._catalogue.notes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_that_closes_a_library_leaves_the_catalogue_of_its_parent_alone(library: Library) -> None:
    db = library._catalogue._db
    db.execute("BEGIN IMMEDIATE")
    db.execute("INSERT INTO uses VALUES ('x', 1)")
    child = os.fork()
    if child == 0:
        library.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert list(Path(library.path).glob("catalogue.sqlite-journal"))  # the child did not roll back
    db.execute("COMMIT")
    assert "x" in library._catalogue.uses()


@pytest.mark.parametrize("act", ["collect", "prune", "remove", "open", "list"])
def test_a_catalogue_that_is_replaced_while_one_looks_hides_no_file(
    library: Library, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    """A fork that is not seen is a parent that is removed."""
    parent = Path(library.session_path("long"))
    library.remove("long")
    with library.open("new") as session:
        session.append(snapshot((5, 6)))
    with Session.open(parent) as session:  # the library is not told, so the next look reads it
        session.append(snapshot((*LONG, 7)))
    update = catalogue.Catalogue.update

    def other(self: catalogue.Catalogue, *given: object) -> None:
        monkeypatch.setattr(catalogue.Catalogue, "update", update)
        (Path(library.path) / "catalogue.sqlite").unlink()
        update(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(catalogue.Catalogue, "update", other)
    if act == "collect":
        library.collect()
    elif act == "prune":
        library.pin("fork")
        library.prune(0)
    elif act == "remove":
        library.remove("new")
    elif act == "open":
        library.open("fork").close()
    assert parent.exists()
    assert {e.name: e.state for e in library.list()}["fork"] == "ok"


@pytest.mark.parametrize(
    ("at", "raw"), [(18, b"\x09\x09"), (44, b"\x00\x00\x00\x09"), (56, b"\x00\x00\x00\x02"), (56, b"\x00\x00\x00\x09")]
)
def test_a_damaged_header_of_the_catalogue_is_made_anew(library: Library, at: int, raw: bytes) -> None:
    expected = answers(library)
    library.close()
    with (Path(library.path) / "catalogue.sqlite").open("r+b") as file:
        file.seek(at)
        file.write(raw)
    with Library(library.path) as again:
        assert answers(again) == expected
    with Library(library.path) as again:
        assert answers(again) == expected
        assert (again._catalogue.in_memory, again._catalogue.notes) == (False, [])


def test_a_session_that_is_written_while_the_doctor_looks_is_no_problem(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = doctor.read_facts

    def other(path: str, *given: object) -> object:
        monkeypatch.setattr(doctor, "read_facts", before)
        with Session.open(path) as session:
            session.append(snapshot((*session.tokens, 7)))
        return before(path, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(doctor, "read_facts", other)
    assert library.check().ok


def test_a_catalogue_that_is_replaced_during_a_search_does_not_tell_its_result(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    usable = searching._usable

    def other(*given: object) -> object:
        monkeypatch.setattr(searching, "_usable", usable)
        found = usable(*given)  # type: ignore[arg-type]
        (Path(library.path) / "catalogue.sqlite").unlink()
        with Library(library.path) as second:
            for name in ("z", "y", "x"):  # so files get other numbers
                second.fork("a", name)
            second.refresh()
        return found

    for ids in (LONG, (1, 2, 3, 4)):
        expected = library.find(ids)
        monkeypatch.setattr(searching, "_usable", other)
        found = library.find(ids)
        assert found is not None
        assert expected is not None
        assert (found.n_tokens, found.n_rows) == (expected.n_tokens, expected.n_rows)
        for name in ("z", "y", "x"):
            library.remove(name)

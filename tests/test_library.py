"""A library of sessions: names, forks, copies, compacting, and a catalogue that may be lost at any time."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import kvsnap
from kvsnap.errors import BusyError, DamagedError, FormatError, InputError, KvsnapError, MissingError, VersionError
from kvsnap.formats.native import NativeFile
from kvsnap.library import Library, LibrarySession, catalogue, default_path, place
from kvsnap.session import Session
from synthetic import same, snapshot

HERE = Path(__file__).parent


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    with Library(tmp_path / "library") as made:
        yield made


def add(library: Library, name: str, *turns: tuple[int, ...]) -> None:
    with library.open(name) as session:
        for tokens in turns:
            session.append(snapshot(tokens))


def names(library: Library) -> list[str]:
    return [entry.name for entry in library.list()]


def tokens_of(library: Library, name: str) -> tuple[int, ...]:
    with library.open(name, create=False, readonly=True) as session:
        return session.tokens


# -- the directory -----------------------------------------------------------------------------------------------------


def test_a_new_library_has_the_layout_of_the_page(tmp_path: Path) -> None:
    with Library(tmp_path / "a" / "library") as library:
        add(library, "chat", (1, 2))
    root = tmp_path / "a" / "library"
    assert (root / "kvsnap-library").read_bytes() == b'{"kvsnap_library": 1, "max_bytes": null}\n'
    assert sorted(p.name for p in root.iterdir()) == [
        "catalogue.sqlite", "kvsnap-library", "lock", "names", "quarantine", "sessions",
    ]  # fmt: skip
    (file,) = (root / "sessions").iterdir()
    header = file.read_bytes()[:128]
    assert file.name == f"{header[40:56].hex()}.kvsnap"
    first, second, third, fourth = (root / "names" / "chat").read_text().splitlines()
    assert (first, second, third) == ("kvsnap-name 1", f"file {header[40:56].hex()}", "pinned 0")
    assert fourth.startswith("sum ")
    assert len(fourth) == 20


def test_a_directory_that_is_no_library_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for readonly in (False, True):
        with pytest.raises(InputError, match="not a library"):
            Library(tmp_path, readonly=readonly)
    assert os.listdir(tmp_path) == ["mine.txt"]
    with pytest.raises(MissingError):
        Library(tmp_path / "nothing", readonly=True)
    with pytest.raises(KvsnapError):
        Library(tmp_path / "mine.txt")


@pytest.mark.parametrize("path", ["", "a\0b", b"bytes", 3], ids=repr)
def test_what_is_no_path_is_refused(path: object) -> None:
    with pytest.raises((InputError, TypeError)):
        Library(path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"kvsnap_library": 2, "max_bytes": null}', VersionError),
        ('{"kvsnap_library": 1, "max_bytes": -1}', FormatError),
        ('{"kvsnap_library": 1, "max_bytes": "x"}', FormatError),
        ("[]", FormatError),
        ("{", FormatError),
        ("[" * 100_000, FormatError),
    ],
)
def test_a_marker_that_is_not_ours_is_refused(tmp_path: Path, text: str, error: type[KvsnapError]) -> None:
    Library(tmp_path / "l").close()
    (tmp_path / "l" / "kvsnap-library").write_text(text)
    with pytest.raises(error):
        Library(tmp_path / "l")


def test_an_interrupted_creation_is_completed(tmp_path: Path) -> None:
    root = tmp_path / "l"
    Library(root).close()
    for name in ("names", "sessions", "quarantine"):
        (root / name).rmdir()
    (root / "lock").unlink()
    with Library(root) as library:
        add(library, "a", (1,))
        assert names(library) == ["a"]
    other = tmp_path / "m"
    other.mkdir()
    (other / ".kvsnap-0123.tmp").write_bytes(b"")  # killed while the marker was written
    Library(other).close()


def test_where_the_library_of_a_user_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSNAP_LIBRARY", str(tmp_path / "there"))
    with Library() as library:
        assert library.path == str(tmp_path / "there")
    monkeypatch.delenv("KVSNAP_LIBRARY")
    assert "kvsnap" in default_path()


# -- names and sessions ------------------------------------------------------------------------------------------------


def test_sessions_come_back_by_name(library: Library) -> None:
    whole = snapshot((1, 2, 3, 4))
    with library.open("chat") as session:
        assert isinstance(session, LibrarySession)
        session.append(whole)
    with library.open("chat", readonly=True) as session:
        assert same(session.load(), whole) == []
    with library.open("chat", create=False) as session:
        session.append(snapshot((1, 2, 3, 4, 5)))
        session.truncate(2)
    (entry,) = library.list()
    assert (entry.name, entry.n_tokens, entry.n_rows, entry.n_commits, entry.state) == ("chat", 2, 2, 4, "ok")
    assert entry.own_bytes == entry.nbytes == os.stat(entry.path).st_size == library.nbytes
    assert entry.identity.startswith("synthetic float32 synthetic ")


def test_a_session_is_open_for_writing_once(library: Library) -> None:
    with library.open("a") as session, pytest.raises(BusyError):
        library.open("a")
    session = library.open("a")
    with pytest.raises(BusyError, match="open for writing"):
        library.remove("a")
    assert names(library) == ["a"]
    session.close()
    library.remove("a")
    assert names(library) == []


def test_what_is_not_there_is_told(library: Library) -> None:
    for call in (
        lambda: library.open("a", create=False),
        lambda: library.open("a", readonly=True),
        lambda: library.remove("a"),
        lambda: library.rename("a", "b"),
        lambda: library.pin("a"),
        lambda: library.fork("a", "b"),
        lambda: library.compact("a"),
        lambda: library.session_path("a"),
    ):
        with pytest.raises(MissingError):
            call()
    assert os.listdir(Path(library.path) / "sessions") == []
    assert os.listdir(Path(library.path) / "names") == []


def test_illegal_names_are_refused_before_any_io(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    add(library, "a", (1,))

    def never(*_: object, **__: object) -> None:
        raise AssertionError("looked before the name was checked")

    monkeypatch.setattr(library, "_look", never)
    monkeypatch.setattr(place.Place, "locked", never)
    for bad in ("../x", "a/b", "/etc/x", "a\0b", "CON", "a.", "..", "\u2215", "x" * 256):
        for call in (
            lambda b=bad: library.open(b),
            lambda b=bad: library.open(b, readonly=True),
            lambda b=bad: library.rename("a", b),
            lambda b=bad: library.rename(b, "a"),
            lambda b=bad: library.fork("a", b),
            lambda b=bad: library.add("file", b),
            lambda b=bad: library.session_path(b),
            lambda b=bad: library.pin(b),
            lambda b=bad: library.remove(b),
        ):
            with pytest.raises(InputError, match="name"):
                call()


def test_names_that_look_alike_are_refused_by_name(library: Library) -> None:
    add(library, "chat", (1,))
    for call in (
        lambda: library.open("Chat"),
        lambda: library.fork("chat", "CHAT"),
        lambda: library.add(library.session_path("chat"), "\uff43hat"),
    ):
        with pytest.raises(InputError, match="'chat'"):
            call()
    with pytest.raises(MissingError):
        library.open("Chat", create=False)
    library.rename("chat", "Chat")  # itself is not in its own way
    assert names(library) == ["Chat"]
    add(library, "other", (1,))
    with pytest.raises(InputError, match="'Chat'"):
        library.rename("other", "chat")
    assert sorted(names(library)) == ["Chat", "other"]


@pytest.mark.parametrize("name", ["\u304a\u904a\u3073", "\u00fc", "\u0437\u0430\u043c\u0435\u0442\u043a\u0438 1"])
def test_names_of_any_script_come_back(tmp_path: Path, name: str) -> None:
    root = tmp_path / "\u0411\u0438\u0431\u043b\u0438\u043e\u0442\u0435\u043a\u0430 \u304a"
    with Library(root) as library:
        add(library, name, (1, 2))
    with Library(root) as library:
        assert names(library) == [name]
        assert tokens_of(library, name) == (1, 2)


def test_renaming_keeps_the_session_and_its_pin(library: Library) -> None:
    add(library, "a", (1, 2))
    library.pin("a")
    with library.open("a") as session:  # also while it is open
        library.rename("a", "b")
        session.append(snapshot((1, 2, 3)))
    (entry,) = library.list()
    assert (entry.name, entry.pinned, entry.n_tokens) == ("b", True, 3)
    add(library, "c", (5,))
    with pytest.raises(InputError, match="already"):
        library.rename("b", "c")
    library.rename("b", "b")
    library.unpin("b")
    assert [e.pinned for e in library.list()] == [False, False]


def test_a_damaged_name_is_told_and_can_be_removed(library: Library) -> None:
    add(library, "a", (1,))
    pointer = Path(library.path) / "names" / "a"
    raw = pointer.read_bytes()
    for bad in (raw[:-1], raw.replace(b"pinned 0", b"pinned 1"), b"", raw + b"\n", raw.replace(b"\n", b"\r\n")):
        pointer.write_bytes(bad)
        with pytest.raises(DamagedError):
            library.open("a")
        assert names(library) == []
        assert [f.kind for f in library.check().findings if f.is_problem] == ["name", "orphan"]
    library.remove("a")
    assert library.check().findings[0].kind == "orphan"
    add(library, "a", (2,))
    assert tokens_of(library, "a") == (2,)


def test_a_name_that_changed_within_one_tick_of_the_clock_is_read_again(library: Library) -> None:
    add(library, "a", (1,))
    pointer = Path(library.path) / "names" / "a"
    soon = time.time_ns() + 60_000_000_000
    os.utime(pointer, ns=(soon, soon))
    assert [e.pinned for e in library.list()] == [False]
    raw = place.Pointer(library.list()[0].file_id, pinned=True).pack()
    with pointer.open("r+b") as file:  # the same file, size and time
        file.write(raw)
    os.utime(pointer, ns=(soon, soon))
    assert [e.pinned for e in library.list()] == [True]


# -- forks, copies, compacting -----------------------------------------------------------------------------------------


def test_a_fork_copies_nothing_and_goes_on_alone(library: Library) -> None:
    add(library, "a", (1, 2, 3), (1, 2, 3, 4, 5))
    entry = library.fork("a", "b", n_tokens=4)
    assert entry.own_bytes < 65536
    assert entry.parent_names == ("a",)
    assert entry.nbytes == entry.own_bytes + os.stat(library.session_path("a")).st_size
    add(library, "b", (1, 2, 3, 4, 9))
    add(library, "a", (1, 2, 3, 4, 5, 6))
    assert tokens_of(library, "b") == (1, 2, 3, 4, 9)
    assert tokens_of(library, "a") == (1, 2, 3, 4, 5, 6)
    with library.open("b") as session:
        assert same(session.load(), snapshot((1, 2, 3, 4, 9))) == []
        made = session.fork("c")
    assert made.n_tokens == 5
    (root,) = library.tree()
    assert (root.names, [b.names for b in root.forks], [c.names for c in root.forks[0].forks]) == (
        ("a",), [("b",)], [("c",)],
    )  # fmt: skip
    assert library.fork("a", "d", commit=2).n_tokens == 3
    with pytest.raises(MissingError):
        library.fork("a", "e", commit=99)
    with pytest.raises(InputError):
        library.fork("a", "e", n_tokens=7)
    assert "e" not in names(library)


def test_a_parent_lives_for_as_long_as_a_fork_needs_it(library: Library) -> None:
    add(library, "a", (1, 2, 3))
    library.fork("a", "b")
    add(library, "b", (1, 2, 3, 4))
    assert library.remove("a") == ()
    assert names(library) == ["b"]
    assert tokens_of(library, "b") == (1, 2, 3, 4)
    assert library.collect().removed == ()
    assert [f.kind for f in library.check().findings] == []
    removed = library.remove("b")
    assert [(e.names, e.why) for e in removed] == [(("b",), "removed"), ((), "no name")]
    assert os.listdir(Path(library.path) / "sessions") == []


def test_a_long_chain_of_forks_is_copied_once(library: Library) -> None:
    add(library, "0", (1,))
    for depth in range(1, 67):
        library.fork(str(depth - 1), str(depth))
        add(library, str(depth), tuple(range(1, depth + 2)))
    assert tokens_of(library, "66") == tuple(range(1, 68))
    assert len(library.tree()) == 2
    assert library.check().ok


def test_compacting_takes_the_name_to_a_new_file(library: Library) -> None:
    add(library, "a", (1, 2, 3, 4), (1, 2, 3, 4, 5))
    library.pin("a")
    with library.open("a") as session:
        session.truncate(2)
        old, before = session.file_id, os.stat(session.path).st_size
        report = session.compact()
        assert session.file_id == report.file_id != old
        session.append(snapshot((1, 2, 7)))
        assert session.tokens == (1, 2, 7)
    assert report.nbytes < before
    assert tokens_of(library, "a") == (1, 2, 7)
    assert [e.pinned for e in library.list()] == [True]
    assert os.listdir(Path(library.path) / "sessions") == [f"{report.file_id}.kvsnap"]
    assert library.compact("a").n_tokens == 3


def test_compacting_keeps_the_old_file_while_a_fork_needs_it(library: Library) -> None:
    add(library, "a", (1, 2, 3, 4))
    library.fork("a", "b", n_tokens=3)
    library.compact("a")
    assert len(os.listdir(Path(library.path) / "sessions")) == 3
    library.compact("b")  # a fork becomes a session of its own, and nobody needs the old file any more
    assert tokens_of(library, "b") == (1, 2, 3)
    assert [len(branch.forks) for branch in library.tree()] == [0, 0]
    assert library.collect().removed == ()
    assert tokens_of(library, "a") == (1, 2, 3, 4)
    assert len(os.listdir(Path(library.path) / "sessions")) == 2


def test_files_are_added_as_copies(library: Library, tmp_path: Path) -> None:
    whole = snapshot((1, 2, 3), text="abc", metadata={"k": "v"})
    kvsnap.save(whole, tmp_path / "sealed.kvsnap")
    kvsnap.save(whole, tmp_path / "plain.safetensors", format="safetensors")
    with Session.open(tmp_path / "session.kvsnap") as session:
        session.append(whole)
        session.append(snapshot((1, 2, 3, 4)))
    assert library.add(tmp_path / "sealed.kvsnap", "sealed").n_tokens == 3
    assert library.add(tmp_path / "session.kvsnap", "session").n_commits == 2
    library.add(tmp_path / "session.kvsnap", "again")
    library.add(tmp_path / "plain.safetensors", "plain")
    with library.open("sealed") as session:
        assert same(session.load(), whole) == []
        session.append(snapshot((1, 2, 3, 9)))
    with pytest.raises(InputError, match="already"):
        library.add(tmp_path / "session.kvsnap", "again")
    with pytest.raises(MissingError):
        library.add(tmp_path / "gone.kvsnap", "gone")
    with pytest.raises(FormatError):
        library.add(HERE / "test_library.py", "code")
    assert names(library) == ["again", "plain", "sealed", "session"]
    assert len(os.listdir(Path(library.path) / "sessions")) == 4


# -- the catalogue -----------------------------------------------------------------------------------------------------


def spoil_garbage(path: Path) -> None:
    path.write_bytes(b"this is no database " * 400)


def spoil_middle(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[100 : len(raw)] = os.urandom(len(raw) - 100)
    path.write_bytes(raw)


def spoil_foreign(path: Path) -> None:
    path.unlink()
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE files (a, b)")
    db.commit()
    db.close()


def spoil_version(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()


def spoil_tables(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("DROP TABLE nodes")
    db.execute("DROP TABLE uses")
    db.commit()
    db.close()


def spoil_values(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("UPDATE files SET turns = 'text', n_tokens = 'many', stamp = 'x'")
    db.commit()
    db.close()


def spoil_nodes(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("UPDATE nodes SET ids = zeroblob(8)")
    db.commit()
    db.close()


SPOILERS = [
    Path.unlink, spoil_garbage, spoil_middle, spoil_foreign, spoil_version, spoil_tables, spoil_values, spoil_nodes,
]  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("when", ["closed", "open", "readonly"])
def test_a_lost_catalogue_loses_nothing(tmp_path: Path, spoil: object, when: str) -> None:
    root = tmp_path / "l"
    library = Library(root)
    add(library, "a", (1, 2, 3), (1, 2, 3, 4))
    add(library, "b", (1, 2, 9))
    library.fork("a", "c", n_tokens=2)
    expected = [(e.name, e.file_id, e.n_tokens, e.parent) for e in library.list()]
    if when != "open":
        library.close()
    spoil(root / "catalogue.sqlite")  # type: ignore[operator]
    if when != "open":
        library = Library(root, readonly=when == "readonly")
    with library:
        found = library.find((1, 2, 9, 9))
        assert found is not None
        assert (found.name, found.n_tokens) == ("b", 3)
        assert [(e.name, e.file_id, e.n_tokens, e.parent) for e in library.list()] == expected
        if when != "readonly":
            add(library, "b", (1, 2, 9, 10))
            assert library.check().ok
            assert (root / "catalogue.sqlite").stat().st_mode & 0o777 == 0o600
            application = sqlite3.connect(root / "catalogue.sqlite").execute("PRAGMA application_id").fetchone()
            assert application[0] == 0x4B56534C


def test_a_catalogue_that_someone_holds_is_replaced_in_memory(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(library, "a", (1, 2, 3))
    monkeypatch.setattr(catalogue, "_PATIENCE", 0.05)
    holder = sqlite3.connect(Path(library.path) / "catalogue.sqlite", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    with Library(library.path) as other:
        assert names(other) == ["a"]
        add(other, "b", (1, 2, 4))
        found = other.find((1, 2, 4, 5))
        assert found is not None
        assert found.name == "b"
        assert other._catalogue.in_memory
        assert any("in memory" in f.what for f in other.check().findings)
    holder.execute("ROLLBACK")
    holder.close()
    assert names(library) == ["a", "b"]


@pytest.mark.parametrize("kind", ["directory", "link", "dangling", "pipe"])
def test_what_stands_in_the_place_of_the_catalogue_is_left_alone(tmp_path: Path, kind: str) -> None:
    root, target = tmp_path / "l", tmp_path / "outside"
    with Library(root) as library:
        add(library, "a", (1,))
    path = root / "catalogue.sqlite"
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        if kind == "link":
            target.write_bytes(b"mine")
        path.symlink_to(target)
    with Library(root) as library:
        assert names(library) == ["a"]
        add(library, "b", (2,))
        assert library.find((2, 3)) is not None
    assert os.path.lexists(path)
    assert path.is_symlink() == (kind in ("link", "dangling"))
    assert not target.exists() or target.read_bytes() == b"mine"


def test_the_catalogue_deletes_for_good_and_keeps_no_second_copy(library: Library) -> None:
    add(library, "a", tuple(range(7_000_001, 7_000_600)))
    raw = (Path(library.path) / "catalogue.sqlite").read_bytes()
    needle = (7_000_300).to_bytes(4, "little") + (7_000_301).to_bytes(4, "little")
    assert needle in raw
    library.remove("a")
    library.refresh()
    library.close()
    assert needle not in (Path(library.path) / "catalogue.sqlite").read_bytes()
    assert not list(Path(library.path).glob("catalogue.sqlite-*"))


def test_histories_are_stored_once(library: Library) -> None:
    shared = tuple(range(1, 2049))
    add(library, "a", shared)
    for number in range(6):
        library.fork("a", f"f{number}")
        add(library, f"f{number}", (*shared, 5000 + number))
    db = sqlite3.connect(Path(library.path) / "catalogue.sqlite")
    assert db.execute("SELECT count(*) FROM nodes").fetchone()[0] == 8 + 6
    assert db.execute("SELECT count(*) FROM identities").fetchone()[0] == 1


# -- several at once ---------------------------------------------------------------------------------------------------

WORKER = """
    import random, sys
    from kvsnap.errors import KvsnapError, BusyError, InputError, MissingError
    from kvsnap.library import Library
    from synthetic import snapshot

    random.seed(int(sys.argv[2]))
    with Library(sys.argv[1]) as library:
        for step in range(60):
            a, b = random.choice("xyz"), random.choice("xyz")
            what = random.choice("open open rename remove fork list find prune collect pin".split())
            try:
                if what == "open":
                    with library.open(a) as session:
                        ids = session.tokens
                        session.append(snapshot((*ids, 1 + len(ids))))
                elif what == "rename":
                    library.rename(a, b)
                elif what == "remove":
                    library.remove(a)
                elif what == "fork":
                    library.fork(a, b)
                elif what == "list":
                    library.list()
                elif what == "find":
                    library.find((1, 2, 3, 4))
                elif what == "prune":
                    library.prune(8000)
                elif what == "collect":
                    library.collect()
                else:
                    library.pin(a); library.unpin(a)
            except (BusyError, InputError, MissingError) as error:
                assert what not in ("list", "find", "prune", "collect"), (what, error)
    print("done")
"""


def test_several_processes_change_the_same_names(tmp_path: Path) -> None:
    root = tmp_path / "l"
    command = [sys.executable, "-c", textwrap.dedent(WORKER), str(root)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    running = [
        subprocess.Popen([*command, str(seed)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for seed in range(3)
    ]
    for process in running:
        out, err = process.communicate(timeout=300)
        assert (process.returncode, out.strip()) == (0, b"done"), err.decode()
    with Library(root) as library:
        for entry in library.list():
            assert entry.state == "ok"
            assert tokens_of(library, entry.name) == tuple(range(1, entry.n_tokens + 1))
            assert kvsnap.verify(entry.path).ok
        library.collect()
        report = library.check()
        assert report.ok, [str(f) for f in report.findings]
        assert not [f for f in report.findings if f.kind == "foreign"]


def test_several_threads_use_one_library(library: Library) -> None:
    def work(number: int) -> int:
        for end in range(2, 12):
            with library.open(f"s{number}") as session:
                session.append(snapshot(tuple(range(number, number + end))))
            found = library.find(tuple(range(number, number + 20)))
            assert found is not None
            assert (found.name, found.n_tokens) == (f"s{number}", end)
            library.fork(f"s{number}", f"f{number}-{end}")
            library.list()
        return number

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, (100, 200, 300, 400))) == [100, 200, 300, 400]
    assert len(library.list()) == 44
    assert library.check().ok


def test_a_slow_look_does_not_take_back_what_a_commit_noted(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one reads a file before a turn and notes it after the turn, while this one searches."""
    add(library, "s", (1, 2))
    with Library(library.path) as other:
        session = library.open("s")
        note, reaches = catalogue.Catalogue.update, catalogue.Catalogue.reaches
        slow: list[Callable[[], None]] = []

        def later(self: catalogue.Catalogue, *given: Any, **named: Any) -> None:
            if self is other._catalogue and not slow:
                slow.append(lambda: note(self, *given, **named))
                session.append(snapshot((1, 2, 3, 4)))
            else:
                note(self, *given, **named)

        def reach(self: catalogue.Catalogue, tokens: Any) -> Any:
            if self is library._catalogue and len(slow) == 1:
                slow.append(slow[0])
                slow[0]()
            return reaches(self, tokens)

        os.utime(session.path)  # so that the other one reads it
        monkeypatch.setattr(catalogue.Catalogue, "update", later)
        monkeypatch.setattr(catalogue.Catalogue, "reaches", reach)
        other.refresh()
        found = library.find((1, 2, 3, 4, 5))
        session.close()
    assert len(slow) == 2
    assert found is not None
    assert found.n_tokens == 4


def test_a_slow_look_does_not_forget_what_was_made_since(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = catalogue.Catalogue.rows
    made: list[str] = []

    def made_meanwhile(self: catalogue.Catalogue) -> Any:
        if not made:
            made.append("new")
            add(library, "new", (1, 2))
        return rows(self)

    with Library(library.path) as other:
        monkeypatch.setattr(catalogue.Catalogue, "rows", made_meanwhile)
        other.refresh()
        monkeypatch.undo()
        assert [row.facts.n_tokens for row in other._catalogue.rows().values()] == [2]


def test_a_child_process_may_go_on_with_the_library_of_its_parent(library: Library) -> None:
    add(library, "a", (1, 2))
    child = os.fork()
    if child == 0:
        try:
            ok = library.find((1, 2, 3)) is not None
            add(library, "b", (1, 2, 3))
            os._exit(0 if ok else 1)
        except BaseException:  # noqa: BLE001 # must not return into the test of the parent
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert names(library) == ["a", "b"]


def test_a_deep_look_finds_damaged_tensors(tmp_path: Path) -> None:
    with Library(tmp_path / "l") as library:
        for name in ("whole", "hit"):
            with library.open(name) as session:
                session.append(snapshot((1, 2, 3, 4)))
        path = Path(library.session_path("hit"))
        with closing(NativeFile.open(path, mapped=False)) as file:
            (span,) = file.spans()
            place = span.payload + span.table.parts[0].offset
        raw = bytearray(path.read_bytes())
        raw[place] ^= 1
        path.write_bytes(raw)
        assert library.check().ok
        told: list[tuple[int, int]] = []
        found = library.check(deep=True, progress=lambda done, total: told.append((done, total)))
        (finding,) = [f for f in found.findings if f.is_problem]
        assert finding.where == "hit"
        assert "layer0.k rows [0, 4)" in finding.what
        assert told
        assert all(done <= total for done, total in told)

"""No session is lost that nobody removed, also where what means it or needs it cannot be read."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from kvsnap import files
from kvsnap.errors import BusyError, StorageError
from kvsnap.library import Library, place, session, view
from kvsnap.session import Session
from synthetic import snapshot

needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="gives files to another user")
Act = Callable[[Library], object]


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    with Library(tmp_path / "library") as made:
        yield made


def add(library: Library, name: str, *tokens: int) -> Path:
    with library.open(name) as session:
        session.append(snapshot(tokens or (1, 2, 3)))
    return Path(library.session_path(name))


def limit(library: Library) -> None:
    Library(library.path, max_bytes=1).close()


MAKING_ROOM: list[Act] = [Library.collect, lambda library: library.prune(0), limit]


# -- names that cannot be read -----------------------------------------------------------------------------------------


def shorten(pointer: Path) -> None:
    pointer.write_bytes(pointer.read_bytes()[:-1])


def empty(pointer: Path) -> None:
    pointer.write_bytes(b"")


def link(pointer: Path) -> None:
    away = pointer.parent.parent / "away"
    pointer.rename(away)
    pointer.symlink_to(away)


def give_away(pointer: Path) -> None:
    os.chown(pointer, 12345, 12345)


SPOILERS = [shorten, empty, link, pytest.param(give_away, marks=needs_root)]


@pytest.mark.parametrize("spoil", SPOILERS)
@pytest.mark.parametrize("act", MAKING_ROOM, ids=["collect", "prune", "limit"])
def test_a_name_that_cannot_be_read_may_mean_any_file_without_a_name(
    library: Library, spoil: Callable[[Path], None], act: Act
) -> None:
    path = add(library, "a")
    add(library, "other")
    library.pin("a")
    spoil(Path(library.path) / "names" / "a")
    act(library)
    assert path.exists()
    assert library.prune(0).held_by == ("names/a",)
    assert library.list() == () or act == Library.collect  # what has a name that can be read goes as ever
    (Path(library.path) / "names" / "a").unlink()
    assert [e.file_id for e in library.collect().removed] == [path.stem]


def test_what_a_name_may_mean_does_not_go_with_the_last_fork(library: Library) -> None:
    path = add(library, "a")
    library.fork("a", "b")
    library.fork("a", "c")
    shorten(Path(library.path) / "names" / "a")
    library.remove("b")
    library.compact("c")
    assert path.exists()
    library.prune(0)
    assert path.exists()


def test_a_name_of_another_unicode_keeps_its_file(library: Library) -> None:
    path = add(library, "a")
    names = Path(library.path) / "names"
    (names / "a").rename(names / "a\u0378")  # not assigned, so far
    (names / "junk\u0378").write_bytes(b"junk")  # keeps nothing
    add(library, "b")
    library.collect()
    report = library.prune(0)
    assert path.exists()
    assert (report.held_by, [e.names for e in report.evicted]) == ((), [("b",)])


# -- forks that cannot be read -----------------------------------------------------------------------------------------


def newer(path: Path) -> None:
    patch(path, 8, 2)


def newer_feature(path: Path) -> None:
    patch(path, 16, path.read_bytes()[16] | 0x80)


def patch(path: Path, at: int, value: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] = value
    raw[120:128] = xxhash.xxh3_64_intdigest(bytes(raw[:120])).to_bytes(8, "little")
    path.write_bytes(raw)


FORKS = [newer, newer_feature, pytest.param(give_away, marks=needs_root)]


@pytest.mark.parametrize("spoil", FORKS)
@pytest.mark.parametrize(
    "act", [*MAKING_ROOM, lambda library: library.remove("a")], ids=["collect", "prune", "limit", "rm"]
)
def test_what_a_fork_that_cannot_be_read_may_need_is_kept(
    library: Library, spoil: Callable[[Path], None], act: Act
) -> None:
    parent = add(library, "a")
    library.fork("a", "b")
    library.rename("a", "z")
    fork = Path(library.session_path("b"))
    library.rename("z", "a")
    library.close()
    (Path(library.path) / "catalogue.sqlite").unlink()  # nobody remembers the parent of b
    spoil(fork)
    with Library(library.path) as again:
        act(again)
        again.collect()
    assert parent.exists()
    assert fork.exists()


def test_a_newer_file_that_is_no_fork_keeps_nothing(library: Library) -> None:
    path, other = add(library, "a"), add(library, "b")
    newer_feature(path)
    assert library.prune(0).held_by == ()
    assert (path.exists(), other.exists()) == (True, False)


def test_a_newer_file_goes_by_its_own_name(library: Library) -> None:
    path = add(library, "a")
    newer(path)
    other = add(library, "b")
    library.remove("a")
    assert not path.exists()
    library.remove("b")
    assert not other.exists()


@needs_root
def test_a_fork_of_another_users_file_is_not_set_apart(library: Library) -> None:
    parent = add(library, "a")
    library.fork("a", "b")
    fork = Path(library.session_path("b"))
    give_away(parent)
    assert {e.name: e.state for e in library.list()} == {"a": "missing", "b": "ok"}
    assert library.prune(10**9).set_apart == ()
    assert fork.exists()
    os.truncate(parent, 300)
    assert {e.name: e.state for e in library.list()} == {"a": "missing", "b": "damaged"}


# -- compacting --------------------------------------------------------------------------------------------------------


def fail_behind_the_name(monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    sync = files.fsync_directory

    def failing(path: str) -> None:
        if os.path.basename(path) == "names":
            raise StorageError("no sync", path=path)
        sync(path)

    monkeypatch.setattr(files, "fsync_directory", failing)
    return StorageError


def fail_before_the_name(monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    def failing(*_: object) -> None:
        raise StorageError("no room")

    monkeypatch.setattr(place.Place, "write_pointer", failing)
    return StorageError


def interrupt_behind_the_name(monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    write = place.Place.write_pointer

    def interrupted(*given: object) -> None:
        write(*given)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(place.Place, "write_pointer", interrupted)
    return KeyboardInterrupt


def no_room_to_open(monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    def failing(*_: object) -> None:
        raise StorageError("too many open files")

    monkeypatch.setattr(session, "Journal", failing)
    return StorageError


FAILURES = [fail_behind_the_name, fail_before_the_name, interrupt_behind_the_name, no_room_to_open]


@pytest.mark.parametrize("fail", FAILURES)
def test_after_a_compacting_that_failed_turns_go_where_the_name_means(
    library: Library, monkeypatch: pytest.MonkeyPatch, fail: Callable[[pytest.MonkeyPatch], type[BaseException]]
) -> None:
    add(library, "a")
    library.fork("a", "b")  # so the old file stays
    with library.open("a") as opened:
        with monkeypatch.context() as patch, pytest.raises(fail(patch)):
            opened.compact()
        assert opened.path == library.session_path("a")
        opened.append(snapshot((1, 2, 3, 4)))
    assert {e.name: e.n_tokens for e in library.list()} == {"a": 4, "b": 3}
    library.collect()
    assert library.check().ok


def test_nobody_opens_a_compacted_file_before_the_session_does(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(library, "a")
    library.fork("a", "b")
    write = place.Place.write_pointer

    def other(*given: object) -> None:
        write(*given)  # type: ignore[arg-type]
        with pytest.raises(BusyError):
            Session.open(library.session_path("a"))

    with library.open("a") as opened:
        with monkeypatch.context() as patch:
            patch.setattr(place.Place, "write_pointer", other)
            opened.compact()
        opened.append(snapshot((1, 2, 3, 4)))
    assert {e.name: e.n_tokens for e in library.list()} == {"a": 4, "b": 3}


def test_a_name_that_moves_while_one_looks_is_followed(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    add(library, "a")
    listing = place.Place.listing

    def other(self: place.Place, directory: str) -> place.Listing:
        if directory == "sessions":
            monkeypatch.setattr(place.Place, "listing", listing)
            with Library(library.path) as second:
                second.compact("a")
        return listing(self, directory)

    def later(*given: object) -> object:
        monkeypatch.setattr(view, "read_facts", read_facts)
        with Library(library.path) as second:
            second.compact("a")
        return read_facts(*given)  # type: ignore[arg-type]

    read_facts = view.read_facts
    (Path(library.path) / "catalogue.sqlite").unlink()  # so the file is read, and is gone by then
    monkeypatch.setattr(view, "read_facts", later)
    assert [e.state for e in library.list()] == ["ok"]
    for look in (library.list, lambda: library.open("a", readonly=True).close(), library.check, library.tree):
        monkeypatch.setattr(place.Place, "listing", other)
        look()
    monkeypatch.setattr(place.Place, "listing", other)
    assert [e.state for e in library.list()] == ["ok"]
    monkeypatch.setattr(place.Place, "listing", other)
    assert library.check().ok


@pytest.mark.skipif(sys.platform != "linux", reason="the system takes no other bytes in the names of files")
def test_a_name_in_another_encoding_keeps_its_session(tmp_path: Path) -> None:
    with Library(tmp_path / "library") as library:
        for name in ("été", "plain"):
            with library.open(name) as session:
                session.append(snapshot(range(1, 9)))
        names = os.fsencode(tmp_path / "library" / "names")
        os.rename(os.path.join(names, "été".encode()), os.path.join(names, "été".encode("latin-1")))
    with Library(tmp_path / "library") as library:
        assert [entry.name for entry in library.list()] == ["plain"]
        report = library.collect()
        assert (report.removed, report.held_by) == ((), ("names/\\udce9t\\udce9",))
        assert [e.names for e in library.prune(0).evicted] == [("plain",)]
    os.rename(os.path.join(names, "été".encode("latin-1")), os.path.join(names, "été".encode()))
    with Library(tmp_path / "library") as library:
        assert [(entry.name, entry.state) for entry in library.list()] == [("été", "ok")]

"""Where a library lies: links, odd neighbours, other owners, permissions, media that cannot be written."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsnap.errors import InputError, KvsnapError, MissingError, StorageError
from kvsnap.library import Library
from synthetic import snapshot

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="links and permissions of POSIX")
needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may change owners")


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    with Library(tmp_path / "library") as made:
        yield made


def add(library: Library, name: str, *tokens: int) -> Path:
    with library.open(name) as session:
        session.append(snapshot(tokens or (1, 2, 3)))
        return Path(session.path)


def names(library: Library) -> list[str]:
    return [entry.name for entry in library.list()]


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def use_all(library: Library) -> None:
    """Call everything that looks at the whole library; nothing of it may fail."""
    library.list()
    library.find((1, 2, 3))
    library.tree()
    library.check()
    library.collect(dry_run=True)
    library.prune(0, dry_run=True)
    library.collect()
    library.prune(0)


# -- links -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    place = tmp_path / "outside"
    place.mkdir()
    (place / "target").write_bytes(b"mine")
    with Library(tmp_path / "other") as other:
        path = add(other, "x", 7, 8, 9)
    shutil.copy(path, place / path.name)
    return place


@pytest.mark.parametrize("directory", ["names", "sessions", "quarantine"])
@pytest.mark.parametrize("target", ["full", "dangling"])
def test_a_link_in_the_place_of_a_directory_is_refused(
    library: Library, outside: Path, directory: str, target: str
) -> None:
    add(library, "a")
    before = contents(outside)
    path = Path(library.path) / directory
    path.rename(path.with_name("moved"))
    path.symlink_to(outside if target == "full" else outside / "nothing")
    for call in (
        lambda: library.open("new"),
        lambda: library.open("a"),
        lambda: library.open("a", readonly=True),
        library.list,
        lambda: library.find((1, 2, 3)),
        lambda: library.prune(0),
        library.collect,
        lambda: library.remove("a"),
        lambda: library.rename("a", "b"),
        lambda: library.pin("a"),
        lambda: Library(library.path),
        lambda: Library(library.path, readonly=True),
    ):
        with pytest.raises(InputError, match="directory of the library"):
            call()
    assert contents(outside) == before
    assert not (outside / "nothing").exists()


@pytest.mark.parametrize("kind", ["file", "session", "directory", "dangling", "parent"])
def test_a_link_among_the_files_is_counted_and_its_target_never_touched(
    library: Library, outside: Path, kind: str
) -> None:
    add(library, "a")
    before = contents(outside)
    (session,) = outside.glob("*.kvsnap")
    target = {"file": outside / "target", "session": session, "directory": outside, "dangling": outside / "nothing"}
    links = [Path(library.path) / "sessions" / session.name, Path(library.path) / "names" / "x"]
    if kind == "parent":
        fork = library.fork("a", "b")
        moved = outside / Path(library.session_path("a")).name
        links[0] = Path(library.session_path("a"))
        links[0].rename(moved)
        links[0].symlink_to(moved)
        before = contents(outside)
        assert {e.name: e.state for e in library.list()} == {"a": "missing", "b": "no parent"}
        with pytest.raises(KvsnapError):
            library.open("b")
        assert library.find((1, 2, 3)) is None
        assert [e.file_id for e in library.prune(0, dry_run=True).set_apart] == [fork.file_id]
    else:
        for link in links:
            link.symlink_to(target[kind])
        for call in (lambda: library.open("x"), lambda: library.open("x", readonly=True), lambda: library.pin("x")):
            with pytest.raises(InputError, match=r"link|regular"):
                call()
    use_all(library)
    assert contents(outside) == before
    assert not (outside / "nothing").exists()
    assert links[0].is_symlink()


def test_a_name_may_not_lead_to_a_link(library: Library, outside: Path) -> None:
    path = add(library, "a")
    path.unlink()
    path.symlink_to(outside / "target")
    for call in (
        lambda: library.open("a"),
        lambda: library.open("a", readonly=True),
        lambda: library.session_path("a"),
    ):
        with pytest.raises(KvsnapError):
            call()
    library.remove("a")
    assert path.is_symlink()
    assert (outside / "target").read_bytes() == b"mine"


def test_a_link_that_comes_between_the_look_and_the_opening_is_not_followed(
    library: Library, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = add(library, "a")
    (session,) = outside.glob("*.kvsnap")
    known = Library._known

    def swapped(*args: Any) -> Any:
        pointer = known(*args)
        path.unlink(missing_ok=True)
        path.symlink_to(session)
        return pointer

    monkeypatch.setattr(Library, "_known", swapped)
    for readonly in (True, False):
        path.unlink()
        path.write_bytes(session.read_bytes()[:40] + bytes.fromhex(path.stem) + session.read_bytes()[56:])
        with pytest.raises(InputError, match="symbolic link"):
            library.open("a", readonly=readonly)


@pytest.mark.parametrize("name", ["lock", "kvsnap-library"])
def test_links_in_the_place_of_our_files_are_refused(library: Library, outside: Path, name: str) -> None:
    path = Path(library.path) / name
    shutil.copy(path, outside / name)
    path.unlink()
    path.symlink_to(outside / name)
    before = contents(outside)
    with pytest.raises(InputError):
        library.open("a") if name == "lock" else Library(library.path)
    with pytest.raises(InputError):
        library.set_limit(5)
    assert contents(outside) == before


def test_a_library_may_lie_behind_links_and_under_any_name(tmp_path: Path) -> None:
    real = tmp_path / "\u0414\u0430\u043d\u043d\u044b\u0435 \u304a"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    with Library(tmp_path / "link" / "\u00fcber") as library:
        add(library, "a")
    (tmp_path / "direct").symlink_to(real / "\u00fcber")
    with Library(tmp_path / "direct") as library:
        assert names(library) == ["a"]
        library.fork("a", "b")
        assert library.check().ok


@pytest.mark.skipif(sys.platform == "darwin", reason="names are UTF-8 there")
def test_a_library_may_lie_where_the_path_cannot_be_decoded(tmp_path: Path) -> None:
    root = os.fsdecode(os.path.join(os.fsencode(tmp_path), b"caf\xe9 #1?%20"))
    for readonly in (False, True):
        with Library(root, readonly=readonly) as library:
            if not readonly:
                path = add(library, "a")
                os.truncate(path, 300)
                add(library, "b")
            assert {e.name: e.state for e in library.list()} == {"a": "damaged", "b": "ok"}
            assert library.find((1, 2)) is not None
            assert not library._catalogue.notes


# -- neighbours --------------------------------------------------------------------------------------------------------


def test_odd_neighbours_are_ignored(library: Library) -> None:
    add(library, "a")
    root = os.fsencode(library.path)
    odd = [b"\xff\xfe.kvsnap", b"caf\xe9", b"\x80" * 20]
    for directory in (b"sessions", b"names", b"quarantine", b""):
        for name in odd:
            with open(os.path.join(root, directory, name), "wb") as file:
                file.write(b"mine")
        os.mkdir(os.path.join(root, directory, b"dir.kvsnap"))
        os.mkfifo(os.path.join(root, directory, b"pipe"))
    (Path(library.path) / "names" / "CON").write_bytes(b"mine")
    (Path(library.path) / "sessions" / f"{'0' * 32}.kvsnap").mkdir()
    (Path(library.path) / "sessions" / "x\ny\x1b[31m").write_bytes(b"mine")
    report = library.check()
    assert str(report).encode("ascii")  # printable, whatever the names are
    assert report.foreign == 3 + 1 + 1 + 1 + 1
    assert names(library) == ["a"]
    use_all(library)
    for directory in (b"sessions", b"names", b"quarantine", b""):
        assert set(odd) <= set(os.listdir(os.path.join(root, directory)))
    assert (Path(library.path) / "names" / "CON").read_bytes() == b"mine"
    add(library, "b")
    with Library(library.path, readonly=True) as again:
        assert names(again) == ["b"]


@needs_root
def test_files_of_other_users_are_left_alone(library: Library) -> None:
    path = add(library, "a")
    add(library, "b")
    os.chown(path, 12345, 12345)
    pointer = Path(library.path) / "names" / "b"
    os.chown(pointer, 12345, 12345)
    raw = path.read_bytes()
    assert [(e.name, e.state) for e in library.list()] == [("a", "missing")]
    report = library.prune(0)
    assert report.foreign == 1
    assert path.read_bytes() == raw
    for call in (library.open, library.remove, library.pin, lambda name: library.rename(name, "c")):
        with pytest.raises(InputError, match="not ours"):
            call("b")
    assert pointer.exists()
    assert any("another user" in f.what for f in library.check().findings)


# -- permissions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0, 0o777, 0o022])
def test_permissions_are_ours_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    old = os.umask(mask)
    try:
        with Library(tmp_path / "a" / "l") as library:
            add(library, "a")
            library.fork("a", "b")
            library.compact("a")
            library.pin("b")
            library.set_limit(10**9)
            library.add(library.session_path("a"), "c")
            path = add(library, "d")
            os.truncate(path, 200)
            library.prune(10**9)
            assert library.check().findings[0].kind == "set apart"
    finally:
        os.umask(old)
    found = {str(p.relative_to(tmp_path)): stat.S_IMODE(p.lstat().st_mode) for p in tmp_path.rglob("*")}
    assert len(found) > 12
    for name, mode in found.items():
        assert mode == (0o700 if (tmp_path / name).is_dir() else 0o600), name


def test_the_journal_of_the_catalogue_is_private_too(library: Library) -> None:
    old = os.umask(0)
    try:
        db = library._catalogue._db
        db.execute("BEGIN IMMEDIATE")
        db.execute("INSERT INTO uses VALUES ('x', 1)")
        (journal,) = Path(library.path).glob("catalogue.sqlite-journal")
        assert stat.S_IMODE(journal.stat().st_mode) == 0o600
        db.execute("ROLLBACK")
    finally:
        os.umask(old)


def test_permissions_that_let_others_in_are_told(library: Library) -> None:
    path = add(library, "a")
    path.chmod(0o644)
    (Path(library.path) / "names").chmod(0o755)
    found = [f.where for f in library.check().findings if f.kind == "permissions"]
    assert found == ["names", f"sessions/{path.name}"]


# -- media that cannot be written --------------------------------------------------------------------------------------


def as_nobody(work: Callable[[Path], None]) -> None:
    """Run something in a child process without the rights of root, in a directory of its own."""
    place = Path(tempfile.mkdtemp(prefix="kvsnap-test-", dir="/tmp"))  # others have to get there
    os.chown(place, 65534, 65534)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            work(place)
            code = 0
        except BaseException:  # noqa: BLE001 # must not return into the test of the parent
            traceback.print_exc()
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    for path in [place, *place.rglob("*")]:
        if path.is_dir():
            path.chmod(0o700)
    shutil.rmtree(place)
    assert status == 0


def closed(root: Path) -> None:
    """Take the right to write from everything in a library."""
    for path in [*root.rglob("*"), root]:
        path.chmod(0o500 if path.is_dir() else 0o400)


@needs_root
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("readonly", [True, False])
def test_a_library_that_cannot_be_written_can_be_read(fresh: bool, readonly: bool) -> None:
    def work(place: Path) -> None:
        root = place / "l"
        with Library(root) as library:
            path = add(library, "a", 1, 2, 3)
            library.fork("a", "b")
        if not fresh:
            (root / "catalogue.sqlite").unlink()
        closed(root)
        before = contents(root)
        with Library(root, readonly=readonly) as library:
            assert names(library) == ["a", "b"]
            found = library.find((1, 2, 4))
            assert found is not None
            assert found.n_tokens == 2
            with library.open("a", readonly=True) as session:
                assert session.tokens == (1, 2, 3)
            for call in (
                lambda: library.open("c"),
                lambda: library.remove("a"),
                lambda: library.fork("a", "c"),
                lambda: library.set_limit(1),
            ):
                with pytest.raises((StorageError, InputError)):
                    call()
            library.prune(0, dry_run=True)
            assert library.check().n_names == 2
        path.chmod(0)
        with Library(root, readonly=readonly) as library:
            states = {e.name: e.state for e in library.list()}
            assert states == ({"a": "ok", "b": "ok"} if fresh else {"a": "unreadable", "b": "unreadable"})
        path.chmod(0o400)
        assert contents(root) == before

    as_nobody(work)


@needs_root
def test_what_cannot_be_removed_is_skipped(tmp_path: Path) -> None:
    def work(place: Path) -> None:
        with Library(place / "l") as library:
            add(library, "a")
            add(library, "b")
            (place / "l" / "sessions").chmod(0o500)
            report = library.prune(0)
            assert report.evicted == ()
            assert len(report.skipped) == 2
            assert report.over == report.before == report.after
            (place / "l" / "sessions").chmod(0o700)
            assert names(library) == ["a", "b"]
            assert library.collect().removed == ()
            assert len(library.prune(0).evicted) == 2

    as_nobody(work)


def test_a_library_opened_for_reading_changes_nothing(library: Library) -> None:
    add(library, "a")
    library.close()
    (Path(library.path) / "lock").unlink()
    before = {str(p): (p.lstat().st_mtime_ns, p.lstat().st_ino) for p in Path(library.path).rglob("*")}
    with Library(library.path, readonly=True, max_bytes=1) as again:
        assert names(again) == ["a"]
        assert again.overrun > 0
        again.open("a", readonly=True).close()
        again.check()
        for call in (
            lambda: again.open("a"),
            lambda: again.open("new"),
            lambda: again.prune(0),
            again.collect,
            lambda: again.remove("a"),
            lambda: again.rename("a", "b"),
            lambda: again.pin("a"),
            lambda: again.compact("a"),
            lambda: again.add("x", "y"),
        ):
            with pytest.raises(InputError, match="reading only"):
                call()
    assert {str(p): (p.lstat().st_mtime_ns, p.lstat().st_ino) for p in Path(library.path).rglob("*")} == before


def test_a_directory_that_is_gone_is_told(library: Library) -> None:
    add(library, "a")
    shutil.rmtree(Path(library.path) / "quarantine")
    with pytest.raises(MissingError, match="lacks"):
        library.list()
    library.close()
    with Library(library.path) as again:
        assert names(again) == ["a"]

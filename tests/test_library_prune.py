"""Making room: what goes first, what is kept, what is set apart, and that nothing which vanishes meanwhile hurts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvsnap
from kvsnap.errors import ConflictError, DamagedError, InputError, MissingError, UnsupportedError
from kvsnap.identity import Identity
from kvsnap.library import Library, PruneReport, catalogue, contents, place, view
from synthetic import DATA, IDENTITY, snapshot

OTHER = replace(IDENTITY, cache_dtype="float16")


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    with Library(tmp_path / "library") as made:
        yield made


def add(library: Library, name: str, *tokens: int, **facts: Any) -> int:
    """Add a session; return the bytes of its file."""
    with library.open(name) as session:
        session.append(snapshot(tokens or (1, 2, 3), **facts))
        return session.nbytes


def use(library: Library, *names: str) -> None:
    """Use sessions one after the other, so that the first is the one used least recently."""
    for entry in library.list():
        os.utime(entry.path, ns=(0, 1_000_000_000))
    for time_ns, name in enumerate(names):
        library._catalogue.touch(next(e.file_id for e in library.list() if e.name == name), 2_000_000_000 + time_ns)


def names(library: Library) -> list[str]:
    return [entry.name for entry in library.list()]


def gone(report: PruneReport) -> list[tuple[str, ...]]:
    return [e.names for e in report.evicted]


def files(library: Library, directory: str = "sessions") -> list[str]:
    return sorted(os.listdir(Path(library.path) / directory))


# -- the order ---------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_go_until_the_rest_fits(library: Library) -> None:
    size, *_ = [add(library, name) for name in "abcd"]
    use(library, "c", "a", "d", "b")
    before = library.nbytes
    for dry_run in (True, False):
        report = library.prune(2 * size, dry_run=dry_run)
        assert gone(report) == [("c",), ("a",)]
        assert (report.before, report.after, report.over, report.dry_run) == (before, 2 * size, 0, dry_run)
        assert names(library) == (["a", "b", "c", "d"] if dry_run else ["b", "d"])
    assert library.nbytes == 2 * size
    assert len(files(library)) == 2
    assert library.prune(2 * size).evicted == ()
    with pytest.raises(InputError, match="no limit"):
        library.prune()
    for bad in (-1, True, 1.5, "1GB"):
        with pytest.raises(InputError):
            library.prune(bad)  # type: ignore[arg-type]


def test_the_time_of_a_file_counts_where_the_catalogue_was_lost(library: Library) -> None:
    size, *_ = [add(library, name) for name in "abc"]
    use(library, "c", "a", "b")
    for time_s, name in enumerate("bca"):
        os.utime(library.session_path(name), ns=(0, time_s * 1_000_000_000))
    library.close()
    (Path(library.path) / "catalogue.sqlite").unlink()
    with Library(library.path) as again:
        assert gone(again.prune(size)) == [("b",), ("c",)]


def test_sessions_of_another_identity_go_first(library: Library) -> None:
    size = add(library, "ours old")
    add(library, "theirs", identity=OTHER)
    add(library, "unknown", identity=Identity())
    add(library, "ours new")
    use(library, "ours old", "unknown", "ours new", "theirs")
    assert gone(library.prune(3 * size, identity=IDENTITY, dry_run=True)) == [("theirs",)]
    assert gone(library.prune(3 * size, dry_run=True)) == [("ours old",)]
    report = library.prune(2 * size, identity=IDENTITY)
    assert gone(report) == [("theirs",), ("ours old",)]
    assert [e.why for e in report.evicted] == ["another identity", "least used"]


def test_pinned_sessions_and_all_they_need_are_kept(library: Library) -> None:
    add(library, "a")
    library.fork("a", "b")
    add(library, "b", 1, 2, 3, 4)
    add(library, "c")
    library.pin("b")
    library.remove("a")
    use(library, "b", "c")
    report = library.prune(0)
    assert gone(report) == [("c",)]
    assert report.over == report.after > 0
    assert names(library) == ["b"]
    with library.open("b") as session:
        assert session.tokens == (1, 2, 3, 4)
    library.unpin("b")
    assert [e.why for e in library.prune(0).evicted] == ["least used", "no name"]
    assert files(library) == []


def test_a_parent_goes_after_its_forks_only(library: Library) -> None:
    size = add(library, "a")
    library.fork("a", "f1")
    library.fork("a", "f2")
    add(library, "x")
    use(library, "a", "f1", "x", "f2")
    report = library.prune(library.nbytes - 1, dry_run=True)
    assert gone(report) == [("f1",)]  # removing a would free nothing
    report = library.prune(size + 1000)
    assert gone(report) == [("f1",), ("x",)]
    assert gone(library.prune(size)) == [("f2",)]
    assert gone(library.prune(0)) == [("a",)]


def test_a_fork_that_was_used_keeps_what_it_needs(library: Library) -> None:
    size = add(library, "a")
    library.fork("a", "b")
    add(library, "x")
    use(library, "a", "x", "b")
    assert gone(library.prune(size + 1000)) == [("x",)]
    with library.open("b") as session:
        assert session.tokens == (1, 2, 3)


def test_files_without_a_name_go_first(library: Library) -> None:
    size = add(library, "a")
    add(library, "b")
    use(library, "b", "a")
    (Path(library.path) / "names" / "a").unlink()
    assert gone(library.prune(size)) == [()]
    assert names(library) == ["b"]


def test_a_session_that_is_being_written_is_skipped(library: Library) -> None:
    add(library, "a")
    add(library, "b")
    use(library, "a", "b")
    with library.open("a") as session:
        for dry_run in (True, False):
            report = library.prune(0, dry_run=dry_run)
            assert gone(report) == [("b",)]
            assert report.skipped == (session.file_id,)
        session.append(snapshot((1, 2, 3, 4)))
        assert session.n_tokens == 4
    assert gone(library.prune(0)) == [("a",)]


# -- the limit ---------------------------------------------------------------------------------------------------------


def test_the_limit_holds_when_a_library_is_opened_and_after_each_commit(tmp_path: Path) -> None:
    root = tmp_path / "l"
    with Library(root) as library:
        size, *_ = [add(library, f"s{number}") for number in range(8)]
    with Library(root, max_bytes=3 * size, readonly=True) as library:
        assert library.overrun == 5 * size
        assert len(library.list()) == 8
    with Library(root, max_bytes=3 * size) as library:
        assert (library.nbytes, library.overrun) == (3 * size, 0)
        assert names(library) == ["s5", "s6", "s7"]
        with library.open("new") as session:
            session.append(snapshot((1, 2, 3)))
            assert names(library) == ["new", "s6", "s7"]
            session.append(snapshot((1, 2, 3, 4)))  # the one that is being written is never its own victim
            assert "new" in names(library)
        assert library.overrun == 0
    with Library(root) as library:  # a limit of one object is not stored
        assert library.max_bytes is None


def test_a_stored_limit_holds_for_everyone(tmp_path: Path) -> None:
    root = tmp_path / "l"
    with Library(root) as library:
        size, *_ = [add(library, f"s{number}") for number in range(4)]
        library.set_limit(2 * size)
        assert names(library) == ["s2", "s3"]
    with Library(root) as library:
        assert library.max_bytes == 2 * size
        add(library, "s4")
        assert names(library) == ["s3", "s4"]
        assert library.prune().evicted == ()
        library.set_limit(None)
        add(library, "s5")
        assert len(library.list()) == 3
    with Library(root, readonly=True) as library, pytest.raises(InputError, match="reading only"):
        library.set_limit(1)


def test_a_full_library_can_still_evict_after_it_is_opened_again(tmp_path: Path) -> None:
    root = tmp_path / "l"
    with Library(root) as library:
        size, *_ = [add(library, f"s{number}") for number in range(3)]
        library.set_limit(3 * size)
    for number in range(3, 9):
        with Library(root) as library:
            library.fork(f"s{number - 1}", f"f{number}")
            add(library, f"s{number}")
            assert library.nbytes <= 3 * size
            assert f"s{number}" in names(library)


def test_what_is_larger_than_the_limit_stays_and_is_told(library: Library) -> None:
    library.set_limit(100)
    add(library, "a")
    assert names(library) == ["a"]
    assert library.overrun > 0
    finding = next(f for f in library.check().findings if f.kind == "size")
    assert "over the limit" in finding.what


# -- damage ------------------------------------------------------------------------------------------------------------


def cut_short(path: Path) -> None:
    os.truncate(path, 400)


def cut_header(path: Path) -> None:
    os.truncate(path, 60)


def spoil_header(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[60] ^= 1
    path.write_bytes(raw)


def spoil_table(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    place = raw.index(b"KVR1\x03") + 64 + 8
    raw[place] ^= 1
    path.write_bytes(raw)


DAMAGES: list[Callable[[Path], None]] = [cut_short, cut_header, spoil_header, spoil_table]


@pytest.mark.parametrize("spoil", DAMAGES, ids=lambda f: f.__name__)
def test_damaged_files_are_set_apart_and_never_deleted(library: Library, spoil: Callable[[Path], None]) -> None:
    size = add(library, "good")
    add(library, "bad")
    path = Path(library.session_path("bad"))
    spoil(path)
    raw = path.read_bytes()
    assert {e.name: e.state for e in library.list()} == {"good": "ok", "bad": "damaged"}
    assert library.find((1, 2, 3)).name == "good"  # type: ignore[union-attr]
    assert library.collect().removed == ()
    for dry_run in (True, False):
        report = library.prune(size, dry_run=dry_run)
        assert [e.names for e in report.set_apart] == [("bad",)]
        assert report.evicted == ()
        assert path.exists() == dry_run
    assert (Path(library.path) / "quarantine" / path.name).read_bytes() == raw
    assert {e.name: e.state for e in library.list()} == {"good": "ok", "bad": "set apart"}
    for call in (lambda: library.open("bad"), lambda: library.session_path("bad"), lambda: library.fork("bad", "x")):
        with pytest.raises(DamagedError, match="quarantine"):
            call()
    report = library.prune(0)
    assert files(library, "quarantine") == [path.name]
    assert library.check().set_apart == 1
    library.remove("bad")
    add(library, "bad", 7)
    assert {e.name: e.state for e in library.list()} == {"bad": "ok"}
    assert files(library, "quarantine") == [path.name]


def test_removing_the_name_of_a_damaged_session_sets_its_file_apart(library: Library) -> None:
    add(library, "a")
    path = Path(library.session_path("a"))
    spoil_header(path)
    library.remove("a")
    assert names(library) == []
    assert files(library, "quarantine") == [path.name]


def test_a_torn_tail_is_no_damage(library: Library) -> None:
    size = add(library, "a")
    path = Path(library.session_path("a"))
    with path.open("ab") as file:
        file.write(b"torn" * 100)
    report = library.prune(size + 1000)
    assert (report.set_apart, report.evicted) == ((), ())
    assert [e.state for e in library.list()] == ["ok"]
    found = library.check()
    assert [(f.kind, f.is_problem) for f in found.findings] == [("torn", False)]
    assert "400 bytes behind the last published turn" in found.findings[0].what
    with library.open("a") as session:
        assert library.check().findings == (), "somebody writes there, so nothing can be said of it"
        session.append(snapshot((1, 2, 3, 4)))
    assert library.check().findings == ()


def test_a_turn_that_was_cut_off_is_told(library: Library) -> None:
    add(library, "a")
    with library.open("a") as session:
        session.append(snapshot((1, 2, 3, 4)))
        length = session.nbytes
    os.truncate(library.session_path("a"), length - 1)
    assert [e.n_tokens for e in library.list()] == [3]
    found = library.check()
    assert found.ok
    assert [f.kind for f in found.findings] == ["torn"]


def test_a_damaged_parent_stays_while_a_fork_can_be_read(library: Library) -> None:
    add(library, "a")
    library.fork("a", "b")
    with library.open("a") as session:
        session.append(snapshot((1, 2, 3, 4)))
    path = Path(library.session_path("a"))
    raw = bytearray(path.read_bytes())
    raw[raw.rindex(b"KVR1\x03") + 64 + 8] ^= 1  # a turn that the fork does not need
    path.write_bytes(raw)
    assert {e.name: e.state for e in library.list()} == {"a": "damaged", "b": "ok"}
    report = library.prune(0)
    assert report.set_apart == ()
    assert path.exists()


def test_a_fork_whose_parent_is_gone_is_told_and_set_apart(library: Library) -> None:
    add(library, "a")
    entry = library.fork("a", "b")
    away = Path(library.path) / "elsewhere"
    parent = Path(library.session_path("a"))
    parent.rename(away)
    assert {e.name: e.state for e in library.list()} == {"a": "missing", "b": "no parent"}
    assert library.find((1, 2, 3)) is None
    with pytest.raises(MissingError):
        library.open("a")
    assert {f.kind for f in library.check().findings} == {"missing", "no parent", "foreign"}
    told = next(f for f in library.check().findings if f.kind == "no parent")
    assert str(told).startswith(f"b: the file that its history starts in is gone: {parent.name}")
    away.rename(parent)
    assert {e.name: e.state for e in library.list()} == {"a": "ok", "b": "ok"}
    parent.unlink()
    assert [e.file_id for e in library.prune(10**9).set_apart] == [entry.file_id]


def test_nothing_is_collected_while_a_fork_cannot_say_what_it_needs(library: Library) -> None:
    add(library, "a")
    library.fork("a", "b")
    library.remove("a")
    path = Path(library.session_path("b"))
    spoil_header(path)
    (Path(library.path) / "catalogue.sqlite").unlink()  # nobody remembers the parent of b
    (orphan,) = [f for f in files(library) if f != path.name]
    report = library.collect()
    assert report.removed == ()
    assert report.held_by == (path.stem,)
    assert orphan in files(library)
    library.prune(10**9)  # sets it apart
    assert [e.file_id for e in library.collect().removed] == [orphan.removesuffix(".kvsnap")]


def test_the_parent_of_a_damaged_fork_is_remembered(library: Library) -> None:
    add(library, "a")
    library.fork("a", "b")
    library.list()
    library.remove("a")
    spoil_header(Path(library.session_path("b")))
    report = library.collect()
    assert (report.removed, report.held_by) == ((), ())
    assert len(files(library)) == 2


# -- what is not ours --------------------------------------------------------------------------------------------------


def test_files_that_are_not_ours_are_counted_and_left_alone(library: Library) -> None:
    size = add(library, "a")
    sessions = Path(library.path) / "sessions"
    foreign = {
        "notes.txt": b"mine",
        f"{'0' * 32}.kvsnap": b"not a session of ours",
        f"{'1' * 32}.kvsnap": b"",
        f"{'2' * 32}.kvsnap": Path(library.session_path("a")).read_bytes(),  # under the name of another id
        "a.kvsnap": Path(library.session_path("a")).read_bytes(),
        f"{'A' * 32}.kvsnap": b"\x89KVSNAP\n",
    }
    for name, raw in foreign.items():
        (sessions / name).write_bytes(raw)
    kvsnap.save(snapshot((1, 2)), sessions / "sealed")
    sealed = (sessions / "sealed").read_bytes()
    name = f"{sealed[40:56].hex()}.kvsnap"
    (sessions / "sealed").rename(sessions / name)
    foreign[name] = sealed
    closed = (DATA / "tiny_encrypted.kvsnap").read_bytes()
    foreign[f"{closed[40:56].hex()}.kvsnap"] = closed
    (sessions / f"{closed[40:56].hex()}.kvsnap").write_bytes(closed)
    with pytest.raises(UnsupportedError, match="encrypted"):
        library.add(DATA / "tiny_encrypted.kvsnap", "closed")
    assert library.nbytes == size
    report = library.prune(0)
    assert gone(report) == [("a",)]
    assert (report.before, report.after) == (size, 0)
    assert (report.foreign, report.foreign_bytes) == (len(foreign), sum(map(len, foreign.values())))
    assert library.collect().removed == ()
    assert {f: (sessions / f).read_bytes() for f in files(library)} == foreign
    assert len([f for f in library.check().findings if f.kind == "foreign"]) == len(foreign)


def test_a_newer_file_is_left_alone(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    size = add(library, "a")
    path = Path(library.session_path("a"))
    raw = bytearray(path.read_bytes())
    raw[8] = 2
    import xxhash

    raw[120:128] = xxhash.xxh3_64_intdigest(bytes(raw[:120])).to_bytes(8, "little")
    path.write_bytes(raw)
    assert [e.state for e in library.list()] == ["newer"]
    report = library.prune(0)
    assert (report.evicted, report.set_apart, report.over) == ((), (), size)
    assert path.read_bytes() == raw


# -- what vanishes -----------------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[Library], object]] = {
    "list": lambda library: library.list(),
    "find": lambda library: library.find((1, 2, 3, 4)),
    "prune": lambda library: library.prune(3000),
    "dry run": lambda library: library.prune(3000, dry_run=True),
    "collect": lambda library: library.collect(),
    "tree": lambda library: library.tree(),
    "check": lambda library: library.check(),
    "refresh": lambda library: library.refresh(),
}


def moments(patch: pytest.MonkeyPatch, act: Callable[[int], None]) -> None:
    """Call `act` with a running number at each moment at which something on the disk is looked at or changed."""
    count = [0]

    def before(function: Any) -> Any:
        def call(*args: Any, **facts: Any) -> Any:
            act(count[0])
            count[0] += 1
            return function(*args, **facts)

        return call

    for owner, name in (
        (place.Place, "listing"), (place.Place, "read_pointer"), (place.Place, "is_busy"), (place.Place, "set_apart"),
        (place.Place, "remove_session"), (place.Place, "remove_pointer"), (view, "read_facts"),
        (contents.NativeFile, "open"), (catalogue.Catalogue, "rows"), (catalogue.Catalogue, "update"),
        (catalogue.Catalogue, "uses"),
    ):  # fmt: skip
        wrapped = before(getattr(owner, name))
        patch.setattr(owner, name, staticmethod(wrapped) if name == "open" else wrapped)


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("fresh", [True, False])
def test_a_file_that_vanishes_at_any_moment_raises_nothing(tmp_path: Path, what: str, fresh: bool) -> None:
    moment, reached = 0, True
    while reached:
        root = tmp_path / f"l{moment}"
        with Library(root) as library:
            for name in "abc":
                add(library, name)
            library.fork("a", "f")
            spoil_header(Path(library.session_path("c")))
            library.list()
        if not fresh:
            (root / "catalogue.sqlite").unlink()
        with Library(root) as library, pytest.MonkeyPatch.context() as patch:
            reached = False

            def vanish(number: int, root: Path = root, moment: int = moment) -> None:
                nonlocal reached
                if number == moment:
                    reached = True
                    for file in [*(root / "sessions").iterdir(), root / "names" / "b"]:
                        file.unlink(missing_ok=True)

            moments(patch, vanish)
            CALLS[what](library)
        with Library(root) as library:
            assert {e.state for e in library.list()} <= ({"missing", "set apart"} if reached else {"ok", "set apart",
                                                                                               "damaged"})  # fmt: skip
        moment += 1
    assert moment > 4  # there were moments


def test_a_name_without_a_file_is_told_and_can_be_removed(library: Library) -> None:
    add(library, "a")
    Path(library.session_path("a")).unlink()
    assert [e.state for e in library.list()] == ["missing"]
    with pytest.raises(MissingError, match="gone"):
        library.open("a")
    assert library.prune(0).evicted == ()
    library.remove("a")
    assert names(library) == []


def test_a_session_that_was_removed_while_it_was_open_does_not_write(library: Library) -> None:
    with library.open("a") as session:
        session.append(snapshot((1, 2, 3)))
        Path(session.path).unlink()
        with pytest.raises(ConflictError, match="changed since it was opened: it was removed"):
            session.append(snapshot((1, 2, 3, 4)))
    assert files(library) == []


def test_another_end_of_the_same_length_is_told_apart(library: Library) -> None:
    with library.open("a") as session:
        session.append(snapshot((1, 2, 3)))
        with open(session.path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        with pytest.raises(ConflictError, match="expected commit 2 at its end, found another end"):
            session.append(snapshot((1, 2, 3, 4)))

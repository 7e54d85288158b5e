"""Failures that people met with other tools, as far as a library of sessions is concerned. As test_reported_cases.py:
the id of a case stands in the name of its test."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvsnap
from kvsnap.cli import run
from kvsnap.errors import BusyError, DamagedError, InputError, KvsnapError, LossError, MissingError
from kvsnap.layout import Snapshot
from kvsnap.library import Library
from synthetic import DATA, IDENTITY, same, snapshot

linux = pytest.mark.skipif(sys.platform != "linux", reason="fork, limits and sparse files as on Linux")
no_fork_warning = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
CAP = 1_000_000
OTHER = replace(IDENTITY, cache_dtype="float16")
LARGE: dict[str, Any] = {"layers": 2, "heads": 4, "dim": 32}
"""64 tokens of these take about 132 kB."""


def large(number: int, **fields: Any) -> Snapshot:
    return snapshot(tuple(range(1000 * number, 1000 * number + 64)), **{**LARGE, **fields})


def state_of(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*"))
            if p.is_file() and not p.name.startswith("catalogue")}  # fmt: skip


# -- B7: nothing at all, and what is not there -----------------------------------------------------------------


def test_b7_an_empty_session_of_a_library_is_a_session(tmp_path: Path) -> None:
    kvsnap.save(Snapshot(), tmp_path / "empty.kvsnap")
    with Library(tmp_path / "library") as library:
        library.open("empty").close()
        library.add(tmp_path / "empty.kvsnap", "added")
        library.fork("empty", "fork")
        library.compact("fork")
        for name in ("empty", "added", "fork"):
            with library.open(name) as session:
                session.append(Snapshot())
                assert (session.n_tokens, session.tokens, session.load().tokens) == (0, (), ())
                session.append(large(1))
            with library.open(name) as session:
                assert same(session.load(), large(1)) == []
        assert library.check().ok


def test_b7_a_missing_session_changes_nothing(tmp_path: Path) -> None:
    with Library(tmp_path / "library") as library, library.open("used") as session:
        session.append(large(1))
        before = state_of(tmp_path)
        for call in (
            lambda: library.open("nope", create=False),
            lambda: library.open("nope", readonly=True),
            lambda: library.fork("nope", "new"),
            lambda: library.rename("nope", "new"),
            lambda: library.compact("nope"),
            lambda: library.remove("nope"),
            lambda: library.pin("nope"),
        ):
            with pytest.raises(MissingError):
                call()
        assert state_of(tmp_path) == before
        assert same(session.load(), large(1)) == []


# -- B12: several processes, one name --------------------------------------------------------------------------


@linux
@no_fork_warning
def test_b12_processes_that_make_one_session_at_once(tmp_path: Path) -> None:
    """Four processes open the same new names: one of them at a time writes, the others are told so."""
    Library(tmp_path / "library").close()
    versions = [large(number) for number in range(4)]

    def work(number: int) -> None:
        for turn in range(10):
            try:
                with Library(tmp_path / "library") as library, library.open(f"name {turn}") as session:
                    if session.n_tokens == 0:
                        session.append(versions[number])
            except BusyError:
                continue

    children = []
    for number in range(4):
        child = os.fork()
        if child == 0:
            try:
                work(number)
                os._exit(0)
            finally:
                os._exit(99)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    with Library(tmp_path / "library") as library:
        assert len(library.list()) == 10
        for entry in library.list():
            with library.open(entry.name) as session:
                assert any(same(session.load(), version) == [] for version in versions), entry.name
        assert library.check().ok
        assert len(os.listdir(tmp_path / "library" / "sessions")) == 10, "no file is left behind"


# -- B29: a limit that holds -----------------------------------------------------------------------------------


def fill(path: Path) -> dict[str, Path]:
    """Make a library of about 2 MB without a limit: ours, of another identity, cut off, and files that are none.

    Return the paths of all sessions by name. `old`, which is pinned, was used least recently, `theirs` most recently.
    """
    with Library(path) as library:
        for number, name in enumerate(("pinned", *(f"ours {n}" for n in range(6)), "cut short", "cut inside")):
            with library.open(name) as session:
                session.append(large(number))
        for number in range(6):
            with library.open(f"theirs {number}") as session:
                session.append(large(20 + number, identity=OTHER))
        library.pin("pinned")
        places = {entry.name: Path(entry.path) for entry in library.list()}
        for time_s, name in enumerate(("pinned", *(f"ours {n}" for n in range(6)), "cut inside", "cut short",
                                       *(f"theirs {n}" for n in range(6)))):  # fmt: skip
            library._catalogue.touch(places[name].stem, 2_000_000_000_000_000_000 + time_s)
    os.truncate(places["cut short"], 300)
    os.truncate(places["cut inside"], 60_000)  # behind its first commit, which is that of an empty session
    (path / "sessions" / f"{'0' * 32}.kvsnap").write_bytes(b"of another program" * 10_000)
    (path / "sessions" / "notes.txt").write_bytes(b"mine")
    total = sum(p.stat().st_size for p in places.values())
    assert 1.8 * CAP < total < 2.2 * CAP
    return places


def sessions(library: Library) -> set[str]:
    return {entry.name for entry in library.list() if entry.state == "ok"}


def total(path: Path, places: dict[str, Path]) -> int:
    """The bytes of the sessions that are there, by a look of our own at the directory."""
    known = {p.name for p in places.values()}
    return sum(p.stat().st_size for p in (path / "sessions").iterdir() if p.name in known)


def test_b29_a_limit_holds_when_a_library_is_opened(tmp_path: Path) -> None:
    places = fill(tmp_path / "a")
    before = total(tmp_path / "a", places)
    cut, foreign = places["cut short"].read_bytes(), (tmp_path / "a" / "sessions" / f"{'0' * 32}.kvsnap").read_bytes()

    # Opened for reading only: told, and nothing is done.
    unchanged = state_of(tmp_path)
    with Library(tmp_path / "a", max_bytes=CAP, readonly=True) as library:
        assert library.overrun == before - CAP > 0.8 * CAP
        assert library.check().foreign == 2
    assert state_of(tmp_path) == unchanged
    # Control: no limit, nothing goes.
    with Library(tmp_path / "a") as library:
        assert library.nbytes == before
    assert state_of(tmp_path) == unchanged

    with Library(tmp_path / "a", max_bytes=CAP) as library:
        assert library.nbytes == total(tmp_path / "a", places) <= CAP
        assert library.nbytes > CAP - 150_000, "and no more is removed than has to be"
        assert library.overrun == 0
        assert "pinned" in sessions(library), "it was used least recently, and stays"
        report = library.check()
        assert (report.set_apart, report.set_apart_bytes) == (1, 300)
        assert (report.foreign, report.foreign_bytes) == (2, len(foreign) + 4)
        assert {e.name: e.state for e in library.list()}["cut short"] == "set apart"
    assert (tmp_path / "a" / "quarantine" / places["cut short"].name).read_bytes() == cut
    assert (tmp_path / "a" / "sessions" / f"{'0' * 32}.kvsnap").read_bytes() == foreign
    assert (tmp_path / "a" / "sessions" / "notes.txt").read_bytes() == b"mine"

    # Control: without the pin it is the first to go.
    again = fill(tmp_path / "b")
    with Library(tmp_path / "b") as library:
        library.unpin("pinned")
    with Library(tmp_path / "b", max_bytes=CAP) as library:
        assert "pinned" not in sessions(library)
        assert not again["pinned"].exists()


@pytest.mark.parametrize("way", ["prune", "command", "commit"])
def test_b29_sessions_of_another_model_go_first(tmp_path: Path, way: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They were used last, so that without an identity to compare with ours would go: the control."""
    places = fill(tmp_path / "a")
    ours, theirs = {f"ours {n}" for n in range(6)}, {f"theirs {n}" for n in range(6)}
    kvsnap.save(large(99), tmp_path / "like.kvsnap")
    if way == "prune":
        with Library(tmp_path / "a") as library:
            plan = library.prune(CAP, dry_run=True)
            assert {n for e in plan.evicted for n in e.names} >= ours, "the control"
            report = library.prune(CAP, identity=IDENTITY)
            gone = {n for e in report.evicted for n in e.names}
            assert {e.why for e in report.evicted if set(e.names) & theirs} == {"another identity"}
    elif way == "command":
        like = ["--like", str(tmp_path / "like.kvsnap")]
        args = ["prune", "--library", str(tmp_path / "a"), "--max-bytes", "1MB", "--json"]
        assert run([*args, "--dry-run"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert {n for e in plan["evicted"] for n in e["names"]} >= ours, "the control"
        assert run([*args, *like]) == 0
        gone = {n for e in json.loads(capsys.readouterr().out)["evicted"] for n in e["names"]}
    else:  # a library that is full is opened, and a turn of ours is one too many
        with Library(tmp_path / "a") as library:
            full = library.nbytes - 300  # what is cut short is set apart first
        with Library(tmp_path / "a", max_bytes=full) as library:
            before = sessions(library)
            with library.open("new") as session:
                session.append(large(50))
            gone = before - sessions(library)
    assert gone
    assert gone <= theirs if way == "commit" else theirs <= gone
    with Library(tmp_path / "a") as library:
        assert "pinned" in sessions(library)
        for name in sessions(library) & (ours | {"pinned"}):
            with library.open(name, readonly=True) as session:
                assert session.load().layers[0].tensors[0].n_rows == 64
    assert places["pinned"].exists()


@pytest.mark.parametrize("what", ["first to go", "pinned", "its name too", "everything"])
def test_b29_a_file_that_is_deleted_behind_its_back(tmp_path: Path, what: str) -> None:
    places = fill(tmp_path / "a")
    with Library(tmp_path / "a") as library:
        library.list()  # it knows them all
        victims = list(places) if what == "everything" else ["pinned" if what == "pinned" else "ours 0"]
        for name in victims:
            places[name].unlink()
        if what == "its name too":
            (tmp_path / "a" / "names" / "ours 0").unlink()
        plan = library.prune(CAP, dry_run=True)
        report = library.prune(CAP)
        assert (plan.evicted, plan.before) == (report.evicted, report.before)
        assert not {n for e in report.evicted for n in e.names} & set(victims), "what is gone frees nothing"
        assert report.after == total(tmp_path / "a", places) <= CAP
        states = {e.name: e.state for e in library.list()}
        assert all(states.get(name) in (None, "missing", "set apart") for name in victims)
        with pytest.raises((MissingError, DamagedError)):
            library.open(victims[0], create=False)
        left = sessions(library)
        for name in left:
            with library.open(name, readonly=True) as session:
                session.load()
        for name in set(states) - left:
            library.remove(name)
        with library.open("after") as session:
            session.append(large(60))
        assert library.check().ok


def test_b29_a_full_library_can_still_evict_after_it_is_opened_again(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    with Library(tmp_path / "a") as library:
        library.set_limit(CAP)
        assert library.nbytes <= CAP
    for number in range(6):
        with Library(tmp_path / "a") as library:
            assert library.max_bytes == CAP
            assert library.nbytes > CAP - 150_000, "it is full"
            before = sessions(library)
            with library.open(f"new {number}") as session:
                session.append(large(70 + number))
            assert library.nbytes <= CAP
            assert before - sessions(library), "something made room"
            assert {"pinned", f"new {number}"} <= sessions(library)
    # Control: with everything pinned nothing can go, which is told, and no turn is lost.
    with Library(tmp_path / "a") as library:
        for name in sessions(library):
            library.pin(name)
        with library.open("one more") as session:
            session.append(large(80))
            assert same(session.load(), large(80)) == []
        assert library.overrun > 0


@linux
@no_fork_warning
def test_b29_a_prune_that_is_killed_leaves_a_library(tmp_path: Path) -> None:
    from kvsnap import files

    class Stop:
        def __init__(self, left: int) -> None:
            self.left = left

        def record(self, operation: str, path: str, offset: int, data: bytes) -> None:
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)

    counts = set()
    for last in (1, 2, 3, 4, 6, 9, 13):
        path = tmp_path / str(last)
        fill(path)
        child = os.fork()
        if child == 0:
            try:
                with Library(path) as library:
                    files.recorder = Stop(last)
                    library.prune(CAP, identity=IDENTITY)
                os._exit(0)
            finally:
                os._exit(99)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        with Library(path) as library:
            counts.add(len(sessions(library)))
            assert "pinned" in sessions(library)
            report = library.prune(CAP, identity=IDENTITY)
            assert report.after <= CAP
            assert len(list((path / "quarantine").iterdir())) == 1
            library.remove("cut short")
            library.collect()
            assert library.check().ok
    assert len(counts) > 2, "it was killed at different places"


# -- B31, B32, B35: what is put in is judged first -------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [b"", b"\x80\x04N.", b"PK\x03\x04" + bytes(100), b"\x89KVSNAP\n", b"MLXKV001" + b"\xff" * 40,
     b"COLIKV1\0" + b"\x7f" * 32, b"\xff" * 8 + b"{}"],
)  # fmt: skip
def test_b32_what_is_no_file_of_ours_is_not_added(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "bad").write_bytes(data)
    with Library(tmp_path / "library") as library:
        before = state_of(tmp_path)
        with pytest.raises(KvsnapError):
            library.add(tmp_path / "bad", "name")
        assert state_of(tmp_path) == before
        library.add(DATA / "tiny.kvsnap", "name")  # control: the name is free, and a good file goes in


@pytest.mark.parametrize("name", ["v5_turboquant", "v4_slab_f16_and_heads", "v5_cache_modes"])
def test_what_a_session_cannot_hold_is_not_lost_unsaid(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = DATA / "mlxkv" / f"{name}.mlxkv"
    with pytest.raises(LossError) as refused:
        kvsnap.convert(source, tmp_path / "converted")
    with Library(tmp_path / "library") as library:
        before = state_of(tmp_path)
        with pytest.raises(LossError) as caught:
            library.add(source, "foreign")
        assert state_of(tmp_path) == before
        told = refused.value.message.split(": ", 1)[1]
        assert caught.value.message.split(": ", 1)[1] == told, "the same as of a conversion"
        assert run(["fork", str(source), "@foreign", "--library", library.path]) == LossError.exit_code
        assert "only mlxkv has a place for it" in capsys.readouterr().err
        library.add(source, "foreign", allow_loss=True)
        with library.open("foreign") as session:
            rows = [(t.name, t.array.tobytes()) for t in session.load().tensors()]
        assert rows == [(t.name, t.array.tobytes()) for t in kvsnap.load(source).tensors()]
        assert run(["fork", str(source), "@again", "--allow-loss", "--library", library.path]) == 0
        library.add(DATA / "mlxkv" / "v3_f32.mlxkv", "whole")  # control: nothing is lost of this one
    # Who saves or appends such a snapshot is told what was left out.
    loaded = kvsnap.load(source)
    with kvsnap.Session.open(tmp_path / "session") as session:
        reports = [kvsnap.save(loaded, tmp_path / "saved"), session.append(loaded)]
    for report in reports:
        assert "; ".join(f"{loss.what}: {loss.detail}" for loss in report.losses[:6]) in told
        assert report.losses
    assert not kvsnap.save(kvsnap.load(DATA / "mlxkv" / "v3_f32.mlxkv"), tmp_path / "saved").losses
    assert run(["truncate", str(source), "2", "-o", str(tmp_path / "short")]) == 0
    assert "lost: " in capsys.readouterr().err


BAD_NAMES = [
    "", ".", "..", "a/b", "/etc/x", "a\0b", "a\\b", "CON", "nul.txt", "COM1", "aux.h", "blank ", "dot.", " blank",
    ".dot",
    "a\u2215b", "a\u2044b", "a\uff0fb", "a\uff0eb", "\udcff", "a\u200bb", "a\u202eb", "e\u0301", "x" * 201, "ü" * 101,
    "お遊び/ü", "a:b", "a*b", "a\nb", "-rf", "@x",
]  # fmt: skip
GOOD_NAMES = ["お遊び ü", "Кириллица", "名前", "a.b", "été", "x" * 200]


@linux
def test_b35_names_of_sessions_in_a_cyrillic_directory(tmp_path: Path) -> None:
    place = tmp_path / "Библиотека" / "お遊び"
    place.parent.mkdir()
    with Library(place) as library:
        for number, name in enumerate(GOOD_NAMES):
            with library.open(name) as session:
                session.append(large(number))
        undecodable = os.fsencode(place / "sessions") + b"/\xff\xfe.kvsnap"
        with open(undecodable, "wb") as file:
            file.write(b"beside")
        with open(os.fsencode(place / "names") + b"/\xff", "wb") as file:
            file.write(b"beside")
        before = state_of(place)
        for name in BAD_NAMES:
            for call in (
                lambda n=name: library.open(n),
                lambda n=name: library.fork("a.b", n),
                lambda n=name: library.rename("a.b", n),
                lambda n=name: library.add(DATA / "tiny.kvsnap", n),
                lambda n=name: library.remove(n),
            ):
                with pytest.raises(InputError):
                    call()
        for name in ("A.B", "\uff41.b", "ÉTÉ", "КИРИЛЛИЦА"):
            with pytest.raises(InputError, match="looks like"):
                library.open(name)
        assert state_of(place) == before
        assert [e.name for e in library.list()] == sorted(GOOD_NAMES)
        for number, name in enumerate(GOOD_NAMES):
            with library.open(name) as session:
                assert same(session.load(), large(number)) == []


@linux
@pytest.mark.parametrize("target", ["file", "directory", "dangling"])
@pytest.mark.parametrize("where", ["names", "sessions", "quarantine"])
def test_b35_a_link_in_a_library_is_not_followed_out(tmp_path: Path, where: str, target: str) -> None:
    outside = tmp_path / "outside"
    (outside / "directory").mkdir(parents=True)
    (outside / "file").write_bytes(b"precious")
    with Library(tmp_path / "library") as library:
        with library.open("a") as session:
            session.append(large(1))
        name = "linked" if where == "names" else f"{'f' * 32}.kvsnap"
        link = tmp_path / "library" / where / name
        link.symlink_to(f"../../outside/{target}")
        before = state_of(outside)
        calls: dict[str, Callable[[], object]] = {
            "open": lambda: library.open("linked"), "fork": lambda: library.fork("linked", "b"),
            "fork to": lambda: library.fork("a", "linked"), "rename": lambda: library.rename("a", "linked"),
            "pin": lambda: library.pin("linked"), "add": lambda: library.add(DATA / "tiny.kvsnap", "linked"),
            "remove": lambda: library.remove("linked"),
        }  # fmt: skip
        for what, call in calls.items() if where == "names" else ():
            with pytest.raises(KvsnapError):
                call()
                pytest.fail(what)
        for call in (lambda: library.fork("a", "f"), library.collect, library.list, library.check, library.refresh,
                     lambda: library.find((1, 2)), lambda: library.prune(0)):  # fmt: skip
            call()
        assert link.is_symlink()
        assert (outside / "directory").is_dir()
        assert os.listdir(outside / "directory") == []
        assert state_of(outside) == before

"""A crash behind every operation of everything that writes: the old content or the new, whole, and once done the new.

`crash_disk` makes the states, `crash_scenarios` says what is done.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import kvsnap
from crash_disk import Content, Disk, Inode, Mark, Scenario, explore, in_memory, play, unsynced
from crash_scenarios import (
    NAME,
    OTHER,
    SCENARIOS,
    SHAPE,
    TOLD,
    append,
    append_in_place_of_turns,
    compact,
    create,
    fork_of_a_turn_that_was_not_synced,
    reset,
    save,
    stopped_append,
    truncate,
    turn,
    write_and_remove,
)
from kvsnap import files
from kvsnap.files import Appender, Writer
from kvsnap.formats import native
from kvsnap.formats.native.journal import Journal
from kvsnap.layout import Snapshot
from kvsnap.session import Session
from synthetic import same, snapshot

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(sys.platform == "win32", reason="the promises tested here are those of POSIX systems"),
]


@pytest.fixture
def place() -> Iterator[Path]:
    with in_memory() as directory:
        yield directory


# -- two failures, one after the other -----------------------------------------------------------------------


def after_this(session: Session) -> tuple[Snapshot, Snapshot]:
    """What a session holds after a turn that was stopped: the turn before or that turn; and one more turn."""
    found = session.load()
    assert not same(found, OTHER if len(found.tokens) == 6 else turn(1))
    if len(found.tokens) == 3:
        return turn(1), turn(2)
    return OTHER, replace(snapshot((*found.tokens, 4, 5, 6), **SHAPE), metadata=found.metadata)


def interrupted(at: int) -> Scenario:
    """A turn is interrupted behind one of its operations and cut off; another one of the same size follows."""

    def scenario(directory: Path) -> Iterator[Mapping[str, Content] | Mark]:
        with Session.open(directory / NAME) as session:
            session.append(turn(1))
            yield {NAME: turn(1)}
            stopped_append(session, at)
            # Behind the COMMIT readers may have seen it. Once the last sync has begun, it is not taken back.
            there, last = after_this(session)
            yield Mark({NAME: there}, {NAME: [OTHER]})
            session.append(last)
            yield {NAME: last}

    return scenario


def killed(at: int) -> Scenario:
    """A writer is killed behind one of its operations; the next process finds what the system has not lost."""

    def scenario(directory: Path) -> Iterator[Mapping[str, Content] | Mark]:
        with Session.open(directory / NAME) as session:
            session.append(turn(1))
            yield {NAME: turn(1)}
            with mock.patch.object(Journal, "_cut_back", return_value=None):
                stopped_append(session, at)
        with Session.open(directory / NAME) as session:
            _, last = after_this(session)
            session.append(last)
            yield Mark({NAME: last}, {NAME: [OTHER]})

    return scenario


# -- the tests ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_crash_leaves_the_old_content_or_the_new(name: str, place: Path) -> None:
    scenario, then = SCENARIOS[name]
    TOLD.clear()
    slow = "index" in name
    report = explore(scenario, place, then=then, again=6, most=100 if slow else 200, draws=4 if slow else 8)
    print(f"{name}: {report}; told: {dict(TOLD)}")
    assert not report.violations, report.violations[:5]
    assert report.found["old"]
    assert report.found["new"]
    assert report.found["done"]
    if "append" in name:
        assert report.states > 800
        assert report.twice > 200
        assert TOLD["torn tail"] > 50
        assert TOLD["unreadable commit"] > 5


def operations_of(scenario: Scenario, place: Path) -> int:
    """How many operations a scenario makes between its first mark and its second."""
    home = place / "counted"
    home.mkdir()
    with unsynced():
        history = play(scenario, home)
    shutil.rmtree(home)
    return history.marks[1][0]


def two_turns(directory: Path) -> Iterator[Mapping[str, Content]]:
    with Session.open(directory / NAME) as session:
        session.append(turn(1))
        yield {NAME: turn(1)}
        session.append(OTHER)
        yield {NAME: OTHER}


@pytest.mark.parametrize("kind", ["interrupted", "killed"])
def test_a_turn_that_is_stopped_and_another_one_at_its_place(kind: str, place: Path) -> None:
    """Two failures in one: the first turn stops behind any of its operations, and power is lost in the next one."""
    count = operations_of(two_turns, place)
    assert count > 8
    states, violations = 0, []
    for at in range(1, count + 1):  # the last operation is the sync: behind it the turn is there for good
        home = place / str(at)
        home.mkdir()
        report = explore((interrupted if kind == "interrupted" else killed)(at), home, draws=4)
        states += report.states
        violations += report.violations
    print(f"{kind}: {states} states")
    assert not violations, violations[:5]
    assert states > 2000


# -- controls: a writer that breaks one rule is found out -------------------------------------------------------


def without_sync(parity: int) -> AbstractContextManager[Any]:
    """Of the two syncs of a commit, only one is made: 0 leaves out the first, 1 the second."""
    calls: Counter[Appender] = Counter()
    real = Appender.sync

    def sync(self: Appender) -> None:
        calls[self] += 1
        if calls[self] % 2 == parity:
            real(self)

    return mock.patch.object(Appender, "sync", sync)


def table_behind_the_commit() -> AbstractContextManager[Any]:
    """One order is swapped: the table of a SPAN is written directly behind the COMMIT that names it."""
    held: list[tuple[Any, int]] = []
    real = Appender.write_at

    def write_at(self: Appender, buffers: Any, offset: int) -> int:
        head = bytes(buffers[0][:5])
        if head == b"KVR1\x03":
            held.append((buffers, offset))
            return sum(len(b) for b in buffers)
        done = real(self, buffers, offset)
        while head == b"KVR1\x07" and held:
            real(self, *held.pop())
        return done

    return mock.patch.object(Appender, "write_at", write_at)


def cut_back_without_sync() -> AbstractContextManager[Any]:
    def cut_back(self: Journal, appender: Appender) -> None:
        appender.truncate(self.now.footer.file_length)

    return mock.patch.object(Journal, "_cut_back", cut_back)


def two_commits() -> AbstractContextManager[Any]:
    """A turn takes the place of others by two commits, one that cuts and one that appends."""
    real = Session.append

    def append(self: Session, made: Snapshot, *, after: int | None = None, **options: Any) -> Any:
        if after is not None:
            self.truncate(after)
        return real(self, made, **options)

    return mock.patch.object(Session, "append", append)


def write_in_place(directory: Path) -> Iterator[Mapping[str, Content]]:
    kvsnap.save(turn(1), directory / NAME)
    yield {NAME: turn(1)}
    with Appender.open(directory / NAME) as appender:
        appender.truncate(0)
        appender.write_at(native.dumps(turn(2)), 0)
        appender.sync()
    yield {NAME: native.load(directory / NAME)}


def no_directory_sync() -> AbstractContextManager[Any]:
    return mock.patch.object(files, "fsync_directory", return_value=None)


CONTROLS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Scenario | None, str]] = {
    "no sync before the commit": (lambda: without_sync(0), append, "DamagedError"),
    "no sync behind the commit": (lambda: without_sync(1), append, "tokens"),
    "no sync behind a truncate": (lambda: without_sync(1), truncate, "tokens"),
    "no sync behind a reset": (lambda: without_sync(1), reset, "tokens"),
    "the table of a span behind the commit": (table_behind_the_commit, append, "DamagedError"),
    "no sync behind a cut": (cut_back_without_sync, None, "DamagedError"),
    "a cut and a turn in two commits": (two_commits, append_in_place_of_turns, "tokens"),
    "no sync of the parent before a fork": (
        lambda: mock.patch("kvsnap.formats.native.fork.sync_file"),
        fork_of_a_turn_that_was_not_synced,
        "Error",
    ),
    "no sync of the directory behind compacting": (no_directory_sync, compact, "tokens"),
    "no sync before compacting ends": (lambda: mock.patch.object(Writer, "sync", return_value=None), compact, "Error"),
    "no sync of the directory behind a rename": (no_directory_sync, save, "tokens"),
    "no sync of the directory behind a link": (no_directory_sync, create, "no file is there"),
    "no sync of the directory behind a removal": (no_directory_sync, write_and_remove, "a file is there"),
    "no sync before a rename": (lambda: mock.patch.object(Writer, "sync", return_value=None), save, "Error"),
    "no sync before a link": (lambda: mock.patch.object(Writer, "sync", return_value=None), create, "Error"),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_a_writer_that_breaks_one_rule_is_found_out(name: str, place: Path) -> None:
    broken, scenario, found = CONTROLS[name]
    if scenario is None:
        scenario = interrupted(operations_of(two_turns, place) - 1)  # behind the COMMIT, before its sync
    with broken():
        report = explore(scenario, place)
    assert any(found in violation for violation in report.violations), (str(report), report.violations[:5])
    shutil.rmtree(place / "first")
    assert not explore(scenario, place).violations, "and without the breach there is nothing to find"


def test_a_file_that_is_written_in_place_is_found_out(place: Path) -> None:
    report = explore(write_in_place, place)
    assert len(report.violations) > 10
    assert any("behind operation 1 of" in violation for violation in report.violations)


# -- the model itself -----------------------------------------------------------------------------------------


def found_after(
    entries: list[tuple[str, str, int, bytes]], before: dict[str, bytes]
) -> set[tuple[tuple[str, bytes], ...]]:
    disk, rng = Disk(before), np.random.default_rng(0)
    for entry in entries:
        disk.apply(entry)
    return {tuple(sorted(state.items())) for _, state in disk.states(rng, 16)}


def test_what_is_synced_stays_and_what_is_not_may_be_lost() -> None:
    a, b = ("write", "/d/a", 0, b"AA"), ("write", "/d/a", 2, b"BB")
    before = {"/d/a": b""}
    assert found_after([a, ("sync", "/d/a", 0, b"")], before) == {(("/d/a", b"AA"),)}
    states = {state[0][1] for state in found_after([a, b], before)}
    assert {b"", b"AA", b"AABB", b"\0\0BB", b"AA\0\0", bytes(4)} <= states
    synced = {state[0][1] for state in found_after([a, ("sync", "/d/a", 0, b""), b], before)}
    assert {b"AA", b"AABB", b"AA\0\0"} <= synced
    assert all(s.startswith(b"AA") for s in synced)
    cut = {
        state[0][1]
        for state in found_after([("truncate", "/d/a", 1, b""), ("write", "/d/a", 1, b"X")], {"/d/a": b"abc"})
    }
    assert {b"abc", b"a", b"aX", b"aXc"} <= cut


def test_names_are_durable_with_their_directory() -> None:
    made = [("create", "/d/t", 0, b""), ("write", "/d/t", 0, b"new"), ("sync", "/d/t", 0, b"")]
    moved = [*made, ("rename", "/d/t", 0, b"/d/a")]
    before = {"/d/a": b"old"}
    assert found_after(made, before) == {(("/d/a", b"old"),), (("/d/a", b"old"), ("/d/t", b"new"))}
    assert {dict(s)["/d/a"] for s in found_after(moved, before)} == {b"old", b"new"}
    assert found_after([*moved, ("fsync-dir", "/d", 0, b"")], before) == {(("/d/a", b"new"),)}
    assert {len(s) for s in found_after([("mkdir", "/d/s", 0, b""), ("create", "/d/s/a", 0, b"")], {})} == {0, 1}
    inside = [("mkdir", "/d/s", 0, b""), ("create", "/d/s/a", 0, b""), ("fsync-dir", "/d/s", 0, b"")]
    assert () in found_after(inside, {}), "a name in a directory whose own name is lost"


def test_a_small_write_is_torn_in_every_way() -> None:
    node = Inode(b"")
    node.loose.append(("write", "a", 0, bytes(range(1, 193))))
    states = {data for _, data in node.versions(np.random.default_rng(0), 4)}
    thirds = [bytes(range(1 + 64 * i, 65 + 64 * i)) for i in range(3)]
    for kept in range(8):
        assert b"".join(t if kept >> i & 1 else bytes(64) for i, t in enumerate(thirds)) in states

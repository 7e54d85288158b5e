"""A crash behind every operation of everything that writes: the old content or the new, whole, and once done the new.

`crash_disk` makes the states. A further operation that writes is one more scenario here.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
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
from crash_disk import Content, Disk, Inode, Log, Mark, Scenario, explore, play, unsynced
from kvsnap import files
from kvsnap.errors import DamagedError
from kvsnap.files import Appender, Writer, remove, write_whole
from kvsnap.formats import native
from kvsnap.formats.native.journal import Journal, empty_file
from kvsnap.inspection import verify
from kvsnap.layout import Snapshot, Tensor
from kvsnap.session import Session
from synthetic import SAMPLER, same, snapshot

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the promises tested here are those of POSIX systems")

TOKENS = tuple(range(100, 190))
NAME = "a.kvsnap"
SHAPE: dict[str, Any] = {"heads": 1, "dim": 4, "vocab": 4}
EMPTY = native.loads(empty_file())
TOLD: Counter[str] = Counter()  # what sessions said about what was left behind


def turn(number: int, **fields: Any) -> Snapshot:
    """Turn `number` (from 1): three tokens more than the one before, the last of them not evaluated."""
    made = snapshot(TOKENS[: 3 * number], n_pending=1, **SHAPE | {"start": fields.pop("start", 0)})
    return replace(made, text="word " * number, sampler=SAMPLER, metadata={"turn": str(number)}, **fields)


def small(number: int) -> Snapshot:
    return snapshot(TOKENS[:number], heads=1, dim=1, vocab=0)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory in memory where there is one: thousands of files are written, and no disk has to last."""
    memory = Path("/dev/shm")  # noqa: S108 # the directory made in it has a random name
    directory = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    yield directory
    shutil.rmtree(directory)


# -- scenarios ------------------------------------------------------------------------------------------------


def create(directory: Path) -> Iterator[Mapping[str, Content]]:
    yield {NAME: None}
    Session.open(directory / NAME).close()
    yield {NAME: EMPTY}


def append(directory: Path) -> Iterator[Mapping[str, Content]]:
    with Session.open(directory / NAME) as session:
        yield {NAME: EMPTY}
        for number in (1, 2, 3):
            session.append(turn(number), complete=number != 2)
            yield {NAME: turn(number)}


def append_partial_captures(directory: Path) -> Iterator[Mapping[str, Content]]:
    with Session.open(directory / NAME) as session:
        session.append(turn(1))
        yield {NAME: turn(1)}
        for number in (2, 3):
            session.append(turn(number, start=session.n_rows))
            yield {NAME: turn(number)}


def append_recurrent(directory: Path) -> Iterator[Mapping[str, Content]]:
    made = [snapshot(TOKENS[:n], recurrent=True, **SHAPE) for n in (3, 6)]
    with Session.open(directory / NAME) as session:
        session.append(made[0])
        yield {NAME: made[0]}
        session.append(made[1])
        yield {NAME: made[1]}


def truncate(directory: Path) -> Iterator[Mapping[str, Content]]:
    with Session.open(directory / NAME) as session:
        for number in (1, 2, 3):
            session.append(turn(number))
        yield {NAME: turn(3)}
        session.truncate(6)  # where a turn ended
        back = replace(turn(2), metadata={"turn": "3"})
        yield {NAME: back}
        session.truncate(4)  # inside a turn: its state and its text do not belong to this end
        cut = replace(snapshot(TOKENS[:4], **SHAPE), logits=None, metadata={"turn": "3"})
        yield {NAME: cut}
        other = snapshot((*TOKENS[:4], 7, 8), **SHAPE)
        session.append(other)
        yield {NAME: replace(other, metadata={"turn": "3"})}


def reset(directory: Path) -> Iterator[Mapping[str, Content]]:
    with Session.open(directory / NAME) as session:
        session.append(turn(1))
        yield {NAME: turn(1)}
        session.reset()
        yield {NAME: session_without_history(turn(1))}
        other = replace(snapshot((1, 2, 3), **SHAPE), metadata={"a": "b"})
        session.append(other)
        yield {NAME: other}


def session_without_history(before: Snapshot) -> Snapshot:
    """What a reset leaves of a session: identity, metadata, and the shape of the cache."""
    made = snapshot((), **SHAPE)
    return replace(made, identity=before.identity, metadata=before.metadata)


def rewrite_of_the_index(directory: Path) -> Iterator[Mapping[str, Content]]:
    """The tail of entries grows beyond 32 on the way, so an INDEX is written; then it is kept in part."""
    with Session.open(directory / NAME) as session:
        for number in range(1, 32):
            session.append(small(number))
        yield {NAME: small(31)}
        for number in range(32, 36):
            session.append(small(number))
            yield {NAME: small(number)}
        assert session._now.commit.index
        assert 0 < session._now.commit.index_kept < 35
        session.truncate(5)
        yield {NAME: small(5)}
        session.append(small(6))
        yield {NAME: small(6)}


def failed_append(directory: Path) -> Iterator[Mapping[str, Content] | Mark]:
    """A turn fails half written and is cut off; the next one goes to the same place."""

    class Unreadable:
        def array(self) -> Any:
            raise DamagedError("a source that cannot be read")

        read_into = None

    other = snapshot((*TOKENS[:3], 1, 2, 3), **SHAPE)
    k, v = other.layers[0].tensors
    bad = replace(other.layers[0], tensors=(k, Tensor(v.spec, Unreadable(), n_rows=v.n_rows)))
    with Session.open(directory / NAME) as session:
        session.append(turn(1))
        yield {NAME: turn(1)}
        with pytest.raises(DamagedError):
            session.append(replace(other, layers=(bad,)))
        yield {NAME: turn(1)}
        session.append(turn(2))
        yield {NAME: turn(2)}


OTHER_TOKENS = (*TOKENS[:3], 1, 2, 3)
OTHER = replace(turn(2), tokens=OTHER_TOKENS, layers=snapshot(OTHER_TOKENS, n_pending=1, **SHAPE).layers)


class StoppedError(BaseException):
    """Raised behind an operation."""


def stopped_append(session: Session, at: int) -> None:
    """Append `OTHER`, and stop behind the operation of this number (from 1)."""
    log = files.recorder
    assert isinstance(log, Log)
    stop = len(log.entries) + at

    def interrupt(count: int) -> None:
        if count == stop:
            raise StoppedError

    log.then = interrupt
    with pytest.raises(StoppedError):
        session.append(OTHER)
    log.then = None


def interrupted(at: int) -> Scenario:
    """A turn is interrupted behind one of its operations and cut off; another one of the same size follows."""

    def scenario(directory: Path) -> Iterator[Mapping[str, Content] | Mark]:
        with Session.open(directory / NAME) as session:
            session.append(turn(1))
            yield {NAME: turn(1)}
            stopped_append(session, at)
            yield Mark({NAME: turn(1)}, {NAME: [OTHER]})  # published behind the last sync, until it is cut off
            session.append(turn(2))
            yield {NAME: turn(2)}

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
            found = session.load()
            assert not same(found, OTHER if len(found.tokens) == 6 else turn(1))
            last = replace(snapshot((*found.tokens, 4, 5, 6), **SHAPE), metadata=found.metadata)
            session.append(last)
            yield Mark({NAME: last}, {NAME: [OTHER]})

    return scenario


def save(directory: Path) -> Iterator[Mapping[str, Content]]:
    yield {NAME: None}
    for number in (1, 2, 3):
        kvsnap.save(turn(number), directory / NAME)
        yield {NAME: turn(number)}


def write_and_remove(directory: Path) -> Iterator[Mapping[str, Content]]:
    """What pointers from names to files are made of."""
    write_whole(directory / "other", b"stays")
    yield {"name": None, "other": b"stays"}
    files.make_directory(directory / "sub" / "sub")
    yield {"name": None, "other": b"stays"}
    write_whole(directory / "sub" / "sub" / "name", b"one", new=True)
    yield {"sub/sub/name": b"one", "other": b"stays"}
    write_whole(directory / "sub" / "sub" / "name", b"two")
    yield {"sub/sub/name": b"two", "other": b"stays"}
    remove(directory / "sub" / "sub" / "name")
    yield {"sub/sub/name": None, "other": b"stays"}


# -- what comes after a crash -----------------------------------------------------------------------------------


def go_on_with_the_session(directory: Path) -> Iterator[Mapping[str, Content]]:
    """Open at what the crash left, append, verify, cut back: what fell off is told, and nothing of it comes back."""
    path = directory / NAME
    if not path.exists():
        yield {NAME: None}
        Session.open(path).close()
        yield {NAME: EMPTY}
        return
    size = path.stat().st_size
    report = verify(path)
    assert report.ok, report.damages
    with Session.open(path) as session:
        assert path.stat().st_size == size, "opening changed the file"
        assert session.dropped == report.dropped == size - session.nbytes
        assert bool(session.dropped) == bool(report.notes)
        assert set(session.notes) <= set(report.notes)
        TOLD["torn tail"] += bool(session.dropped)
        TOLD["unreadable commit"] += bool(session.notes)
        found = session.load()
        yield {NAME: found}
        width = found.layers[0].tensors[0].spec.shape[-1] if found.layers else 4
        made = snapshot(
            (*found.tokens, 11, 12), heads=1, dim=width, vocab=4 if width == 4 else 0, recurrent=is_recurrent(found),
        )  # fmt: skip
        session.append(made)
        yield {NAME: replace(made, metadata=found.metadata)}
        assert session.nbytes == path.stat().st_size, "the torn tail is gone"
        report = verify(path)
        assert report.ok
        assert not report.damages, report.damages
        assert not report.dropped
        assert [t.commit for t in session.history] == list(range(session.n_commits, 0, -1))[::-1]


def is_recurrent(found: Snapshot) -> bool:
    return any(t.spec.role == "recurrent" for t in found.tensors())


def save_again(directory: Path) -> Iterator[Mapping[str, Content]]:
    path = directory / NAME
    yield {NAME: native.load(path) if path.exists() else None}
    kvsnap.save(turn(4), path)
    assert verify(path).ok
    yield {NAME: turn(4)}


# -- the tests ------------------------------------------------------------------------------------------------

SCENARIOS: dict[str, tuple[Scenario, Scenario | None]] = {
    "create": (create, go_on_with_the_session),
    "append": (append, go_on_with_the_session),
    "append partial captures": (append_partial_captures, go_on_with_the_session),
    "append recurrent states": (append_recurrent, go_on_with_the_session),
    "truncate": (truncate, go_on_with_the_session),
    "reset": (reset, go_on_with_the_session),
    "rewrite of the index": (rewrite_of_the_index, go_on_with_the_session),
    "failed append, then a good one": (failed_append, go_on_with_the_session),
    "save": (save, save_again),
    "write and remove": (write_and_remove, None),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_crash_leaves_the_old_content_or_the_new(name: str, place: Path) -> None:
    scenario, then = SCENARIOS[name]
    TOLD.clear()
    slow = "index" in name
    report = explore(scenario, place, then=then, again=8, most=150 if slow else 300, draws=4 if slow else 8)
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
    for at in range(1, count + 1):
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

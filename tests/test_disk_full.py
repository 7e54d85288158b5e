"""A disk that is full at any byte, and a sync that fails: what was there stays, and work goes on as documented."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import kvsnap
from crash_disk import Content, in_memory, matches
from crash_scenarios import EMPTY, SHAPE, session_without_history, small, turn
from disk_full_writer import NOT_PERMITTED
from kvsnap import files
from kvsnap.errors import PoisonedError, StorageError
from kvsnap.formats import native
from kvsnap.formats.native import BytesReader, NativeFile
from kvsnap.formats.native.journal import Journal, empty_file
from kvsnap.inspection import verify
from kvsnap.layout import Snapshot
from kvsnap.records import RECORD_SIZE, WITH_PARTS, scan
from kvsnap.session import Session
from synthetic import same, snapshot

if sys.platform != "win32":
    import resource

no_fork_warning = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.alone,
    pytest.mark.skipif(sys.platform != "linux", reason="limits and name spaces as on Linux"),
]


@dataclass(frozen=True)
class Action:
    """Something that is done with a session, what it holds before, and what behind it."""

    before: Callable[[Session], object]
    act: Callable[[Session], object]
    old: Snapshot
    new: Snapshot


def many(session: Session) -> None:
    for number in range(1, 33):
        session.append(small(number))


def three(session: Session) -> None:
    for number in (1, 2, 3):
        session.append(turn(number))


CUT = replace(snapshot(turn(3).tokens[:4], **SHAPE), logits=None, metadata=turn(3).metadata)
ACTIONS = {
    "first append": Action(lambda s: None, lambda s: s.append(turn(1)), EMPTY, turn(1)),
    "append": Action(lambda s: s.append(turn(1)), lambda s: s.append(turn(2)), turn(1), turn(2)),
    "append of a partial capture": Action(
        lambda s: s.append(turn(1)), lambda s: s.append(turn(2, start=s.n_rows)), turn(1), turn(2)
    ),
    "append with an index": Action(many, lambda s: s.append(small(33)), small(32), small(33)),
    "truncate": Action(three, lambda s: s.truncate(4), turn(3), CUT),
    "reset": Action(lambda s: s.append(turn(1)), lambda s: s.reset(), turn(1), session_without_history(turn(1))),
}


def base_of(action: Action, path: Path) -> bytes:
    with Session.open(path) as session:
        action.before(session)
    return path.read_bytes()


def boundaries(data: bytes, start: int = 0) -> list[int]:
    """Every length at which something ends in this file: records, tables, parts, footers; and one more and one less.

    Below `start`, where the file was before, some of them must do.
    """
    file = NativeFile(BytesReader(data))
    stops = {0, 8, 128, len(data), len(data) + 4096}
    for offset, record in scan(file.reader, file.header, len(data)):
        payload = offset + RECORD_SIZE
        stops |= {offset, payload, payload + record.table_length, payload + record.length}
        if record.kind in WITH_PARTS:
            parts = file.table_at(offset, record.kind)[0].parts
            stops |= {payload + p.offset for p in parts} | {payload + p.offset + p.stored for p in parts}
    every = sorted({max(0, stop + step) for stop in stops for step in (-1, 0, 1)})
    return [n for n in every if n < start][::10] + [n for n in every if n >= start]


def limited(room: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def in_a_child(work: Callable[[], dict[str, int]]) -> dict[str, int]:
    """Run `work` in a forked process, whose limits are its own, and return its counts."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            os.write(writing, json.dumps(work()).encode())
            os._exit(0)
        except BaseException:  # noqa: BLE001 # told, and seen by its exit status
            limited(resource.RLIM_INFINITY)
            traceback.print_exc()
        finally:
            os._exit(99)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, "the child failed: see its traceback"
    counts: dict[str, int] = json.loads(told)
    return counts


@contextmanager
def no_room_behind(length: int) -> Iterator[None]:
    limited(length)
    try:
        yield
    finally:
        limited(resource.RLIM_INFINITY)


# -- a limit on the size of a file stands for a full disk -------------------------------------------------------


@no_fork_warning
@pytest.mark.parametrize("name", ACTIONS)
def test_a_session_on_a_full_disk(name: str) -> None:
    action = ACTIONS[name]

    def work() -> dict[str, int]:
        with in_memory() as place:
            path = place / "a.kvsnap"
            base = base_of(action, path)
            with Session.open(path) as session:
                action.act(session)
            whole = path.read_bytes()
            counts = {"refused": 0, "done": 0, "limits": 0}
            for limit in boundaries(whole, len(base) - 1):
                path.write_bytes(base)
                with Session.open(path) as session:
                    counts["limits"] += 1
                    try:
                        with no_room_behind(limit):
                            action.act(session)
                        assert limit >= len(whole), "it fits only where there is room for all of it"
                        counts["done"] += 1
                    except StorageError as error:
                        known = (error.errno, error.path, limit < len(whole))
                        assert known == (errno.EFBIG, str(path), True)
                        assert path.read_bytes() == base
                        assert not same(session.load(), action.old)
                        counts["refused"] += 1
                        action.act(session)  # there is room again
                    assert not same(session.load(), action.new)
                report = verify(path)
                assert report.ok
                assert not report.damages
                assert not report.notes
            return counts

    counts = in_a_child(work)
    print(f"{name}: {counts}")
    assert counts["refused"] > 10
    assert counts["done"] >= 3


@no_fork_warning
def test_a_session_that_does_not_cut_back_is_found_out() -> None:
    """The control: with the step left out that undoes what was begun, the bytes differ at most limits."""
    action = ACTIONS["append"]

    def work() -> dict[str, int]:
        with in_memory() as place, mock.patch.object(Journal, "_cut_back", return_value=None):
            path, counts = place / "a.kvsnap", {"same": 0, "other": 0}
            base = base_of(action, path)
            for limit in range(len(base), len(base) + 3072, 64):
                path.write_bytes(base)
                with Session.open(path) as session, no_room_behind(limit), suppress(StorageError):
                    action.act(session)
                counts["same" if path.read_bytes() == base else "other"] += 1
            return counts

    assert in_a_child(work)["other"] > 10


@no_fork_warning
@pytest.mark.parametrize("there", [True, False], ids=["over a file", "to a new name"])
def test_a_save_on_a_full_disk(there: bool) -> None:
    old, new = turn(1), turn(3)

    def work() -> dict[str, int]:
        with in_memory() as place:
            path = place / "a.kvsnap"
            kvsnap.save(new, path)
            whole, counts = path.read_bytes(), {"refused": 0, "done": 0}
            path.unlink()
            for limit in boundaries(whole):
                path.unlink(missing_ok=True)
                if there:
                    kvsnap.save(old, path)
                before = path.read_bytes() if there else None
                try:
                    with no_room_behind(limit):
                        kvsnap.save(new, path)
                    assert limit >= len(whole)
                    counts["done"] += 1
                except StorageError as error:
                    known = (error.errno, error.path, limit < len(whole))
                    assert known == (errno.EFBIG, str(path), True)
                    assert (path.read_bytes() if path.exists() else None) == before
                    counts["refused"] += 1
                    kvsnap.save(new, path)
                assert not same(native.load(path), new)
                assert [p.name for p in place.iterdir()] == [path.name], "no temporary file stays"
            return counts

    counts = in_a_child(work)
    print(counts)
    assert counts["refused"] > 40
    assert counts["done"] >= 3


@no_fork_warning
@pytest.mark.parametrize("name", ["compact", "fork"])
def test_a_session_that_is_written_anew_on_a_full_disk(name: str) -> None:
    """The old file stays as it is, nothing is left beside it, and the session goes on."""

    def work() -> dict[str, int]:
        with in_memory() as place:
            path, copy = place / "a.kvsnap", place / "copy"
            action = ACTIONS["truncate"]
            base = base_of(action, path)

            def act(session: Session) -> Path:
                if name == "compact":
                    session.compact()
                    return path
                session.fork(copy)
                return copy

            with Session.open(path) as session:
                whole = act(session).read_bytes()
            counts = {"refused": 0, "done": 0}
            for limit in boundaries(whole):
                for one in place.iterdir():
                    one.unlink()
                path.write_bytes(base)
                with Session.open(path) as session:
                    try:
                        with no_room_behind(limit):
                            act(session)
                        assert limit >= len(whole)
                        counts["done"] += 1
                    except StorageError as error:
                        known = (error.errno, limit < len(whole), path.read_bytes() == base)
                        assert known == (errno.EFBIG, True, True)
                        assert [p.name for p in place.iterdir()] == [path.name], "no temporary file stays"
                        assert not same(session.load(), action.old)
                        counts["refused"] += 1
                        act(session)
                    assert not same(session.load(), action.old)
                    assert not same(native.load(path if name == "compact" else copy), action.old)
                    action.act(session)
                    assert not same(session.load(), action.new)
                assert verify(path).ok
            return counts

    counts = in_a_child(work)
    print(f"{name}: {counts}")
    assert counts["refused"] > 40
    assert counts["done"] >= 3


@no_fork_warning
def test_a_session_that_cannot_be_made_is_not_there() -> None:
    def work() -> dict[str, int]:
        with in_memory() as place:
            path, refused = place / "a.kvsnap", 0
            for limit in boundaries(empty_file()):
                try:
                    with no_room_behind(limit):
                        Session.open(path).close()
                    assert not same(native.load(path), EMPTY)
                    path.unlink()
                except StorageError:
                    refused += 1
                assert not list(place.iterdir())
            return {"refused": refused}

    assert in_a_child(work)["refused"] > 10


# -- a small file system ----------------------------------------------------------------------------------------


def test_a_small_file_system_that_is_full(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{Path(files.__file__).parents[2]}:{HERE}"}
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("unshare is not installed: no file system of its own can be mounted")
    trial = subprocess.run([unshare, "-rm", "true"], capture_output=True, text=True, check=False)
    if trial.returncode:
        pytest.skip(f"no name spaces of one's own here: {trial.stderr.strip()}")
    command = [unshare, "-rm", sys.executable, str(HERE / "disk_full_writer.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    if done.returncode == NOT_PERMITTED:
        pytest.skip(f"no file system may be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    appends, saves, fits = map(int, done.stdout.split())
    print(f"{appends} appends and {saves} saves refused, {fits} fitted")
    assert appends > 5
    assert saves > 5
    assert fits > 2


# -- a sync that fails -------------------------------------------------------------------------------------------


class FailingSync:
    """The sync of a file, or of a directory, fails at the n-th call, and works before and after."""

    def __init__(self, real: Callable[..., None], failing: int) -> None:
        self.real, self.failing, self.calls = real, failing, 0

    def __call__(self, *arguments: Any, **options: Any) -> None:
        self.calls += 1
        if self.calls == self.failing:
            raise StorageError("cannot sync: made up", errno=errno.EIO)
        self.real(*arguments, **options)


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("name", ACTIONS)
def test_a_failed_sync_poisons_a_session_until_it_is_opened_again(name: str, failing: int, tmp_path: Path) -> None:
    action, path = ACTIONS[name], tmp_path / "a.kvsnap"
    base = base_of(action, path)
    with Session.open(path) as session:
        sync = FailingSync(files.system.sync, failing)
        with mock.patch.object(files.system, "sync", sync), pytest.raises(StorageError, match="made up"):
            action.act(session)
        assert sync.calls == failing, "after a failed sync nothing more is synced"
        after = path.read_bytes()
        assert after.startswith(base), "what was published stays as it was"
        for again in (action.act, lambda s: s.append(turn(9)), lambda s: s.reset(), lambda s: s.truncate(0)):
            if again is action.act or session.n_tokens:
                with pytest.raises(PoisonedError, match="reopen"):
                    again(session)
        assert path.read_bytes() == after, "nothing more is written"
    with Session.open(path) as session:
        # The commit is written between the two syncs. Behind the second one it is there, unless power is lost too.
        assert not same(session.load(), action.new if failing == 2 else action.old)
        assert bool(session.dropped) == (failing == 1 and len(after) > len(base))
        if failing == 1:
            action.act(session)
        assert not same(session.load(), action.new)
    report = verify(path)
    assert report.ok
    assert not report.notes


@pytest.mark.parametrize("step", ["file", "directory"])
@pytest.mark.parametrize("there", [True, False], ids=["over a file", "to a new name"])
def test_a_failed_sync_of_a_save(step: str, there: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.kvsnap"
    if there:
        kvsnap.save(turn(1), path)
    module, name = (files.system, "sync") if step == "file" else (files, "fsync_directory")
    failing = FailingSync(getattr(module, name), 1)
    with mock.patch.object(module, name, failing), pytest.raises(StorageError, match="made up"):
        kvsnap.save(turn(2), path)
    assert [p.name for p in tmp_path.iterdir()] == ([path.name] if there or step == "directory" else [])
    # Only when the last step, the sync of the directory, fails is the new file in place nevertheless.
    old: Content = turn(1) if there else None
    assert not matches(path.read_bytes() if path.exists() else None, turn(2) if step == "directory" else old)
    kvsnap.save(turn(2), path)
    assert not same(native.load(path), turn(2))


def test_a_session_whose_first_sync_fails_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "a.kvsnap"
    with mock.patch.object(files.system, "sync", FailingSync(files.system.sync, 1)), pytest.raises(StorageError):
        Session.open(path)
    assert not list(tmp_path.iterdir())
    with Session.open(path) as session:
        assert not same(session.load(), EMPTY)

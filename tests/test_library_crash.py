"""Killed at every durable step of a change: the library opens, every name means a whole file, and nothing is lost."""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kvsnap
from crash_disk import Disk, Log, in_memory, put_down, read_files, recording, unsynced
from kvsnap import files
from kvsnap.library import Library
from synthetic import snapshot

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.alone,
    pytest.mark.skipif(sys.platform == "win32", reason="forks processes"),
]


class Killer:
    """Ends the process at the n-th durable operation, as a kill would: nothing is cleaned up."""

    def __init__(self, moment: int) -> None:
        self.left = moment

    def record(self, operation: str, path: str, offset: int, data: bytes) -> None:
        if self.left == 0:
            os._exit(77)
        self.left -= 1


def killed_at(moment: int, root: Path, act: Callable[[Library], object]) -> bool:
    """Do something in a child process that is killed at a moment; return False when it came to its end before."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            files.recorder = Killer(moment)
            with Library(root) as library:
                act(library)
            code = 0
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 77)
    return status == 77


def make(root: Path) -> None:
    with Library(root) as library:
        for name, tokens in (("a", (1, 2, 3, 4)), ("b", (1, 2, 5)), ("c", (7, 8, 9))):
            with library.open(name) as session:
                session.append(snapshot(tokens))
        library.fork("a", "f", n_tokens=3)
        path = library.session_path("c")
        with library.open("f") as session:
            session.append(snapshot((1, 2, 3, 6)))
        os.truncate(path, 300)
        library.pin("f")


def histories(root: Path) -> dict[str, tuple[int, ...]]:
    found = {}
    with Library(root) as library:
        for entry in library.list():
            if entry.state == "ok":
                with library.open(entry.name, readonly=True) as session:
                    found[entry.name] = session.tokens
    return found


def append(library: Library) -> None:
    with library.open("new") as session:
        session.append(snapshot((3, 3)))


def compact(library: Library) -> None:
    with library.open("a") as session:
        session.truncate(2)
        session.compact()


START = {"a": (1, 2, 3, 4), "b": (1, 2, 5), "f": (1, 2, 3, 6)}
CHANGES: dict[str, tuple[Callable[[Library], object], list[dict[str, tuple[int, ...] | None]]]] = {
    "open": (append, [{}, {"new": ()}, {"new": (3, 3)}]),
    "rename": (lambda library: library.rename("b", "z"), [{}, {"z": (1, 2, 5)}, {"b": None, "z": (1, 2, 5)}]),
    "remove": (lambda library: library.remove("b"), [{}, {"b": None}]),
    "remove fork": (lambda library: library.remove("f"), [{}, {"f": None}]),
    "remove damaged": (lambda library: library.remove("c"), [{}]),
    "fork": (lambda library: library.fork("f", "g"), [{}, {"g": (1, 2, 3, 6)}]),
    "pin": (lambda library: library.pin("a"), [{}]),
    "compact": (compact, [{}, {"a": (1, 2)}]),
    "prune": (lambda library: library.prune(0), [{}, {"b": None}]),
    "set limit": (lambda library: library.set_limit(10**9), [{}]),
    "add": (lambda library: library.add(library.session_path("f"), "g"), [{}, {"g": (1, 2, 3, 6)}]),
}


@pytest.mark.parametrize("what", CHANGES)
def test_killed_at_any_step_nothing_is_torn(tmp_path: Path, what: str) -> None:
    act, outcomes = CHANGES[what]
    allowed = [{n: t for n, t in {**START, **changes}.items() if t is not None} for changes in outcomes]
    original, root = tmp_path / "original", tmp_path / "l"
    make(original)
    (original / "catalogue.sqlite").unlink()
    moment, met = 0, []
    while True:
        shutil.copytree(original, root)
        was_killed = killed_at(moment, root, act)
        found = histories(root)
        assert found in allowed, (what, moment)
        met.append(found)
        with Library(root) as library:
            problems = {f.kind for f in library.check().findings if f.is_problem}
            assert problems <= {"orphan", "damaged", "set apart"}, (what, moment, problems)
            library.collect()
            library.prune(10**9)
            for name in ("c", "new"):
                if name in library:
                    library.remove(name)
            assert library.check().ok, (what, moment)
            for entry in library.list():
                assert kvsnap.verify(entry.path).ok
        assert {k: v for k, v in histories(root).items() if k != "new"} == {
            k: v for k, v in found.items() if k != "new"
        }
        shutil.rmtree(root)
        if not was_killed:
            break
        moment += 1
    assert moment > 2
    assert met[0] == allowed[0]
    assert met[-1] == allowed[-1]


@pytest.mark.parametrize("what", CHANGES)
def test_whatever_a_power_cut_leaves_is_the_library_before_or_after(what: str) -> None:
    act, outcomes = CHANGES[what]
    allowed = [{n: t for n, t in {**START, **changes}.items() if t is not None} for changes in outcomes]
    rng = np.random.default_rng(7)
    with in_memory() as place, unsynced():
        root, left = place / "l", place / "left"
        make(root)
        (root / "catalogue.sqlite").unlink()
        before, directories = read_files(root), [str(p) for p in (root, *root.rglob("*")) if p.is_dir()]
        log = Log()
        with recording(log), Library(root) as library:
            act(library)
        disk, seen, n_states = Disk(before, directories), set(), 0
        for done in range(len(log.entries) + 1):
            for kind, found in disk.states(rng, 1):
                kept = {os.path.relpath(p, root): data for p, data in found.items() if "catalogue" not in p}
                key = hash(frozenset(kept.items()))
                if key in seen and done < len(log.entries):
                    continue
                seen.add(key)
                n_states += 1
                shutil.rmtree(left, ignore_errors=True)
                put_down(kept, left)
                met = histories(left)
                assert met in (allowed[-1:] if done == len(log.entries) else allowed), (what, done, kind)
                with Library(left) as library:
                    problems = {f.kind for f in library.check().findings if f.is_problem} - {"permissions"}
                    assert problems <= {"orphan", "damaged", "set apart"}, (what, done, kind, problems)
            if done < len(log.entries):
                disk.apply(log.entries[done])
    assert n_states > 5


def test_a_full_disk_does_not_keep_a_library_from_making_room(tmp_path: Path) -> None:
    with Library(tmp_path / "l") as library:
        for number in range(6):
            with library.open(f"s{number}") as session:
                session.append(snapshot(tuple(range(1, 900 + number))))
                size = session.nbytes
    (tmp_path / "l" / "catalogue.sqlite").unlink()
    with Library(tmp_path / "l") as library:
        db = library._catalogue._db
        pages = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {pages}")  # no page more: as on a full disk
        with pytest.raises(sqlite3.OperationalError, match="full"):
            db.execute("CREATE TABLE filling AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE "
                       "i < 99999) SELECT i FROM n")  # fmt: skip
        assert len(library.prune(2 * size).evicted) == 4
        assert library._catalogue.in_memory
        assert library.find(tuple(range(1, 900))) is not None

"""A real writer process that is killed with SIGKILL, forked from a warm one, and what it had done by then."""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from crash_disk import Content, History, Log, Scenario, ViolationError, look, play, read_files, recording
from kvsnap import files

BEGUN = b"b"  # the setting is made: from here on operations are counted
STEP = b"o"
NAP = 0.0002  # seconds that a writer rests behind an operation when it is killed from outside


@dataclass
class Killed:
    """One writer that was killed: operations it told of (one more may have happened), and whether it was at work."""

    done: int
    ended: bool


class Teller(Log):
    """A recorder in the writer process: tells of each operation, then rests, or kills its own process."""

    def __init__(self, pipe: int, stop: int | None, nap: float) -> None:
        super().__init__()
        self.pipe, self.stop, self.nap = pipe, stop, nap

    def record(self, operation: str, path: str, offset: int, data: bytes) -> None:
        super().record(operation, path, offset, data)
        os.write(self.pipe, STEP)
        if len(self.entries) == self.stop:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.nap:
            time.sleep(self.nap)


def _write(scenario: Scenario, directory: Path, pipe: int, stop: int | None, nap: float) -> None:
    steps = scenario(directory)
    next(steps)
    os.write(pipe, BEGUN)
    with recording(Teller(pipe, stop, nap)):
        for _ in steps:
            pass


def kill_writer(scenario: Scenario, directory: Path, *, at: int, inside: bool, nap: float = NAP) -> Killed:
    """Fork a writer that plays a scenario, and kill it at operation `at` (from 1; 0: as soon as it has begun).

    `inside`: it kills itself directly behind the operation. Else it is killed from here, as soon as it has told of it:
    it may be anywhere later by then, also inside of a call of the system.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            _write(scenario, directory, writing, at if inside else None, 0.0 if inside else nap)
            os._exit(0)
        except BaseException:  # noqa: BLE001 # told, and seen by its exit status
            traceback.print_exc()
        finally:
            os._exit(99)
    os.close(writing)
    told = b""
    while inside or told.count(STEP) < at or not told.startswith(BEGUN):
        piece = os.read(reading, 1 if not inside else 4096)
        if not piece:
            break
        told += piece
    if not inside:
        os.kill(child, signal.SIGKILL)
    while piece := os.read(reading, 4096):
        told += piece
    os.close(reading)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the writer itself failed"
    return Killed(told.count(STEP), ended=not os.WIFSIGNALED(status))


@dataclass
class Tally:
    """What was found after the kills of one scenario."""

    found: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    inside: int = 0  # kills between the first write of an operation and its last sync
    left: int = 0  # kills that left a temporary file
    violations: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = ", ".join(f"{self.found[name]} {name}" for name in ("old", "new", "refused"))
        return f"{self.kills} kills, {self.inside} at work: {counts}; {self.left} left a temporary file"


def _look(history: History, directory: Path, done: int) -> tuple[dict[str, int], dict[str, list[Content]]]:
    allowed = history.allowed(done)
    found = {os.path.relpath(p, directory): d for p, d in read_files(directory).items()}
    return look(found, allowed), allowed


def after_kill(history: History, directory: Path, killed: Killed, tally: Tally) -> None:
    """Look at what a killed writer left. It told of `done` operations, and may have done one more."""
    tally.kills += not killed.ended
    ends = {place for place, _ in history.marks}
    tally.inside += not killed.ended and killed.done not in ends
    last = len(history.entries)
    trouble = ""
    for done in sorted({killed.done, min(killed.done + 1, last)}):
        try:
            outcome, allowed = _look(history, directory, done)
        except ViolationError as error:
            trouble = str(error)
            continue
        steps = [place for place, _ in history.marks if place <= killed.done]
        for name, number in outcome.items():
            fresh = number > 0 or (len(allowed[name]) == 1 and len(steps) == len(history.marks))
            tally.found["new" if fresh else "old"] += 1
        return
    tally.found["refused"] += 1
    tally.violations.append(f"killed at {killed.done} of {last}: {trouble}")


def killed_many(
    scenario: Scenario, place: Path, then: Scenario | None, *, kills: int, dice: random.Random, nap: float = NAP
) -> Tally:
    """Kill `kills` writers of a scenario, half of them from inside and half from outside; go on with what each left."""
    trial = place / "trial"
    trial.mkdir()
    history = play(scenario, trial)
    total, tally = len(history.entries), Tally()
    # Syncs, renames and cuts first: what was old becomes new there.
    order = sorted(range(1, total + 1), key=lambda i: (history.entries[i - 1][0] == "write", i * 7919 % total))
    for number in range(kills):
        home = place / str(number)
        home.mkdir()
        inside = number % 2 == 0
        at = order[number // 2 % total] if inside else dice.randrange(total)
        after_kill(history, home, kill_writer(scenario, home, at=at, inside=inside, nap=nap), tally)
        tally.left += any(p.name.startswith(files.TEMPORARY_PREFIX) for p in home.iterdir())
        if then is not None:
            for path in home.iterdir():  # what was left is not removed before it is old
                os.utime(path, (1, 1))
            goes_on = play(then, home, keep=False)
            found = {os.path.relpath(p, home): d for p, d in read_files(home).items()}
            look(found, goes_on.allowed(10**9))
    return tally

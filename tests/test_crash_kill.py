"""Hundreds of writers are killed with SIGKILL: each leaves the old content or the new, whole, and free to use."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from crash_disk import Content, Scenario, in_memory
from crash_scenarios import (
    NAME,
    SCENARIOS,
    append_megabytes,
    save_again,
    save_megabytes,
    turn,
)
from crash_writer import Tally, killed_many
from kvsnap import files
from kvsnap.files import Appender, write_whole
from kvsnap.formats import native

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.alone,
    pytest.mark.skipif(not hasattr(os, "fork") or sys.platform == "darwin", reason="writers are forked"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

KILLS = {
    "create": 12, "append": 60, "append partial captures": 24, "append recurrent states": 16, "truncate": 40,
    "reset": 30, "rewrite of the index": 24, "failed append, then a good one": 24, "save": 40, "write and remove": 24,
    "append in place of turns": 40, "rewind": 20, "copy to a fork": 30, "compact": 40, "fork without a copy": 30,
}  # fmt: skip


def tidied(then: Scenario | None) -> Scenario:
    """What comes after a kill: the next write also removes what the killed one left beside the file."""

    def scenario(directory: Path) -> Iterator[Mapping[str, Content]]:
        if then is None:
            yield {}
        else:
            yield from then(directory)
        write_whole(directory / "next", b"next")
        left = [p.name for p in directory.rglob("*") if p.name.startswith(files.TEMPORARY_PREFIX)]
        inner = [p for p in directory.rglob("*") if p.parent != directory and p.name in left]
        assert len(left) == len(inner), "a temporary file is left"
        yield {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}

    return scenario


@pytest.fixture(scope="module")
def tallies() -> dict[str, Tally]:
    return {}


@pytest.mark.parametrize("name", KILLS)
def test_a_killed_writer_leaves_the_old_content_or_the_new(name: str, tallies: dict[str, Tally]) -> None:
    scenario, then = SCENARIOS[name]
    with in_memory() as place:
        tally = killed_many(scenario, place, tidied(then), kills=KILLS[name], dice=random.Random(name))
    tallies[name] = tally
    assert not tally.violations, tally.violations[:5]
    assert tally.found["old"]
    assert tally.found["new"]
    assert not tally.found["refused"]
    assert tally.left > 10 or name != "save", "else nothing had to be tidied"


@pytest.mark.parametrize(("scenario", "then"), [(append_megabytes, None), (save_megabytes, save_again)])
def test_killed_inside_of_a_large_write(scenario: Scenario, then: Scenario | None, tallies: dict[str, Tally]) -> None:
    """No rests: the kill comes while the system copies bytes, so that a write may be cut in the middle."""
    with in_memory() as place:
        tally = killed_many(scenario, place, then, kills=16, dice=random.Random(4), nap=0)
    tallies[scenario.__name__] = tally
    assert not tally.violations, tally.violations[:5]
    assert tally.found["old"]
    assert not tally.found["refused"]


def test_at_least_half_of_two_hundred_kills_hit_a_writer_at_work(
    tallies: dict[str, Tally], capsys: pytest.CaptureFixture[str]
) -> None:
    if tallies.keys() != {*KILLS, append_megabytes.__name__, save_megabytes.__name__}:
        pytest.skip("counts what the other tests of this file did: run them all")
    kills = sum(t.kills for t in tallies.values())
    at_work = sum(t.inside for t in tallies.values())
    with capsys.disabled():
        print()
        for name, tally in tallies.items():
            print(f"{name}: {tally}")
        print(f"{kills} kills, {at_work} between the first write of an operation and its last sync")
    assert kills >= 200
    assert at_work >= kills / 2


def written_in_place(directory: Path) -> Iterator[Mapping[str, Content]]:
    write_whole(directory / NAME, native.dumps(turn(1)))
    yield {NAME: turn(1)}
    data = native.dumps(turn(2))
    with Appender.open(directory / NAME) as appender:
        for at in range(0, len(data), 256):
            appender.write_at(data[at : at + 256], at)
        appender.sync()
    yield {NAME: turn(2)}


def test_a_writer_that_writes_in_place_is_found_out() -> None:
    with in_memory() as place:
        tally = killed_many(written_in_place, place, None, kills=10, dice=random.Random(1))
    assert tally.found["refused"] > 5
    assert len(tally.violations) == tally.found["refused"]

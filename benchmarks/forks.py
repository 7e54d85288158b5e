"""Forks, copies and compacting: what a fork of a large session writes, and how fast parts are copied."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import common
from common import Figure, Work, interleave, ms, rate, ratio

import kvsnap
from kvsnap import Session
from kvsnap.formats.native.base import session_file_name
from kvsnap.formats.native.fork import fork_file


def grown(directory: Path, turns: int, rows: int) -> Path:
    """Write a session of so many turns under the name of its file id, as it lies in a library."""
    path, made, values = directory / "new", common.specs(), common.arrays(rows)
    with common.without_sync(), Session.open(path) as session:
        for number in range(turns):
            session.append(common.snapshot(values, made, start=number * rows))
    named = directory / session_file_name(bytes.fromhex(kvsnap.inspect(path).file_id))
    return path.rename(named)


def forking(path: Path, rounds: int) -> list[Figure]:
    made = [fork_file(str(path)) for _ in range(rounds)]

    def load_fork() -> None:
        kvsnap.load(made[0].path)

    times = interleave({"fork": Work(lambda: fork_file(str(path))), "load": Work(load_fork)}, rounds)
    read, _ = common.reads_of(lambda: fork_file(str(path)))
    written, size = made[0].nbytes, path.stat().st_size
    taken = ms(times["fork"])
    fork_bytes = f"{written} B"
    return [
        Figure(
            f"fork a session of {size / 1e9:.2f} GB", f"{taken:.1f} ms", "two syncs and a rename", "ms", taken < 100
        ),
        Figure("  bytes written", fork_bytes, f"{read / 1e3:.0f} kB read", "< 64 KB", written < 65536),
        Figure("  load the fork", f"{ms(times['load']):.1f} ms"),
    ]


def copying(path: Path, directory: Path, rounds: int) -> list[Figure]:
    size = path.stat().st_size
    target, plain = directory / "copy.kvsnap", directory / "plain"

    def copy(durable: bool) -> None:
        with Session.open(path, readonly=True) as session:
            if durable:
                session.fork(target)
            else:
                with common.without_sync():
                    session.fork(target)

    def write(durable: bool) -> None:
        with path.open("rb") as origin, plain.open("wb") as out:
            shutil.copyfileobj(origin, out, 1 << 20)
            if durable:
                os.fdatasync(out.fileno())

    works = {}
    for durable in (True, False):
        works[f"ours {durable}"] = Work(
            lambda durable=durable: copy(durable), common.settle, lambda: common.remove(target)
        )
        works[f"plain {durable}"] = Work(
            lambda durable=durable: write(durable), common.settle, lambda: common.remove(plain)
        )
    times = interleave(works, rounds)
    out = []
    for durable in (True, False):
        ours, theirs = times[f"ours {durable}"], times[f"plain {durable}"]
        words = "durable" if durable else "no sync"
        told = f"{rate(size, ours)} against {rate(size, theirs)}"
        out.append(
            Figure(
                f"copy or compact, each part checked, {words}, of a plain copy", f"{ratio(theirs, ours):.2f} x", told
            )
        )
    return out


def measure(directory: Path, options: argparse.Namespace) -> list[Figure]:
    rounds = 2 if options.small else options.rounds or 7
    turns, rows = (3, 32) if options.small else (24, 1024)
    path = grown(directory, turns, rows)
    return [*forking(path, rounds), *copying(path, directory, rounds)]


def main() -> None:
    options = common.parser(__doc__).parse_args()
    common.run(options, lambda directory: measure(directory, options), "xxhash")


if __name__ == "__main__":
    main()

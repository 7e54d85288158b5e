"""Sealed files: saving, restoring, opening. Each figure beside what the machine can do with the same bytes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import Figure, Work, interleave, ms, rate, ratio

import kvsnap
from kvsnap.layout import Snapshot
from kvsnap.tensors import read_all


def plain_write(path: Path, values: list[np.ndarray[Any, Any]], *, sync: bool) -> None:
    """The same bytes, with nothing around them, into a new file."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for value in values:
            left = memoryview(value).cast("B")
            while left:
                left = left[os.write(fd, left) :]
        if sync:
            os.fdatasync(fd)
    finally:
        os.close(fd)


def saving(directory: Path, made: Snapshot, values: list[np.ndarray[Any, Any]], rounds: int) -> list[Figure]:
    path, size = directory / "a", sum(v.nbytes for v in values)

    def fresh() -> None:
        common.remove(path)

    def settled() -> None:
        fresh()
        common.settle()

    times = interleave(
        {
            "plain": Work(lambda: plain_write(path, values, sync=False), fresh),
            "exact": Work(lambda: kvsnap.save(made, path, sync=False), fresh),
            "q8": Work(lambda: kvsnap.save(made, path, codec="q8", sync=False), fresh),
        },
        rounds,
    )
    synced = interleave(
        {
            "plain": Work(lambda: plain_write(path, values, sync=True), settled),
            "exact": Work(lambda: kvsnap.save(made, path), settled),
            "q8": Work(lambda: kvsnap.save(made, path, codec="q8"), settled),
        },
        max(3, rounds // 2),
    )
    fresh()

    def figure(what: str, base: str, ours: str, of: dict[str, list[float]], target: float | None) -> Figure:
        value = ratio(of[base], of[ours])
        return Figure(
            what, f"{value:.2f} x", f"{rate(size, of[ours])} against {rate(size, of[base])}",
            "" if target is None else f">= {target}", None if target is None else value >= target,
        )  # fmt: skip

    return [
        figure("save exact, of plain write, no sync", "plain", "exact", times, 0.9),
        figure("save exact, of plain write + fdatasync", "plain", "exact", synced, None),
        figure("save q8, of exact save, no sync", "exact", "q8", times, 1.0),
        figure("save q8, of exact save, with sync", "exact", "q8", synced, 1.0),
    ]


def resident_peak(*, reset: bool = False) -> int:
    """Bytes of the largest resident set so far, or since the last reset (Linux; `ru_maxrss` would count the parent)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def peak(mib: float, codec: str) -> tuple[int, int]:
    """Run in a fresh process: return the bytes by which a save raised the peak memory, and those of one tensor."""
    made = common.specs()
    values = common.arrays(common.rows_for(mib))
    state = common.snapshot(values, made)
    # A first small save, so that what is imported late and made once does not count.
    few = common.snapshot([np.ascontiguousarray(v[:, :16]) for v in values], made)
    kvsnap.save(few, "warm", codec=codec, sync=False)
    before = resident_peak(reset=True)
    kvsnap.save(state, "peak", codec=codec, sync=False)
    return resident_peak() - before, values[0].nbytes


def memory(directory: Path, mib: float) -> list[Figure]:
    if not Path("/proc/self/clear_refs").exists():
        return []
    out = []
    for codec in ("exact", "q8"):
        told = subprocess.run(
            [sys.executable, Path(__file__).resolve(), "--peak", str(mib), "--codec", codec],
            cwd=directory, env=common.environment(),
            stdout=subprocess.PIPE, text=True, check=True,
        ).stdout.split()  # fmt: skip
        grown, tensor = int(told[0]), int(told[1])
        out.append(
            Figure(
                f"save {codec}, extra peak memory", f"{grown / 1e6:.1f} MB", f"one tensor is {tensor / 1e6:.1f} MB",
                "one tensor", grown <= tensor,
            )
        )  # fmt: skip
        common.remove(directory / "peak")
    return out


def restoring(directory: Path, made: Snapshot, values: list[np.ndarray[Any, Any]], rounds: int) -> list[Figure]:
    path, size = directory / "sealed", sum(v.nbytes for v in values)
    kvsnap.save(made, path, sync=False)
    outs = [np.zeros_like(v) for v in values]
    opened = kvsnap.load(path)

    def memcpy() -> None:
        for out, value in zip(outs, values, strict=True):
            np.copyto(out, value)

    def restore(workers: int, *, fresh: bool = True, mmap: bool = True) -> None:
        found = kvsnap.load(path, mmap=mmap) if fresh else opened
        read_all(list(zip(found.tensors(), outs, strict=True)), workers=workers)

    times = interleave(
        {
            "memcpy": Work(memcpy),
            "1": Work(lambda: restore(1)),
            "2": Work(lambda: restore(2)),
            "1 again": Work(lambda: restore(1, fresh=False)),
            "2 again": Work(lambda: restore(2, fresh=False)),
            "1 read": Work(lambda: restore(1, mmap=False)),
            "2 read": Work(lambda: restore(2, mmap=False)),
        },
        rounds,
    )
    for out in outs:
        out.fill(0)
    restore(2)
    assert all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in zip(outs, values, strict=True))

    def figure(what: str, name: str, target: float | None) -> Figure:
        value = ratio(times["memcpy"], times[name])
        return Figure(
            f"restore exact, {what}, of one-thread memcpy", f"{value:.2f} x",
            f"{rate(size, times[name])} against {rate(size, times['memcpy'])}",
            "" if target is None else f">= {target}", None if target is None else value >= target,
        )  # fmt: skip

    return [
        figure("one thread", "1", 0.4),
        figure("two threads", "2", 0.8),
        figure("one thread, file mapped before", "1 again", None),
        figure("two threads, file mapped before", "2 again", None),
        figure("one thread, read instead of mapped", "1 read", None),
        figure("two threads, read instead of mapped", "2 read", None),
    ]


def opening(directory: Path, made: Snapshot, rounds: int) -> list[Figure]:
    kvsnap.save(common.snapshot(common.arrays(common.rows_for(1)), common.specs()), directory / "mib", sync=False)
    files = {"1 MiB": directory / "mib", f"{made.nbytes / 2**20:.0f} MiB": directory / "sealed"}
    times = interleave({name: Work(lambda p=path: kvsnap.load(p)) for name, path in files.items()}, 10 * rounds)
    return [
        Figure(f"open, mapped, {name}", f"{ms(taken):.1f} ms", "index, tables, identity", "< 10 ms", ms(taken) < 10)
        for name, taken in times.items()
    ]


def measure(directory: Path, options: argparse.Namespace) -> list[Figure]:
    mib, rounds = (8, 2) if options.small else (options.mib, options.rounds or 9)
    values = common.arrays(common.rows_for(mib))
    made = common.snapshot(values, common.specs())
    return [
        *saving(directory, made, values, rounds),
        *memory(directory, mib),
        *restoring(directory, made, values, rounds),
        *opening(directory, made, rounds),
    ]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--mib", type=float, default=1024, help="size of the cache")
    parser.add_argument("--peak", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--codec", default="exact", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak is not None:
        print(*peak(options.peak, options.codec))
        return
    common.run(options, lambda directory: measure(directory, options), "ml_dtypes", "xxhash")


if __name__ == "__main__":
    main()

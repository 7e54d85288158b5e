"""What statistics cost: a whole pass over a file against one plain copy of the same bytes, and a sample of it.

A cache of 16 layers with 8 heads of 128, as a sealed file and as a session of turns of 512 tokens. Memory is what a
process of its own took at most beside what it had before: anonymous memory, without the pages of a mapped file.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import common
import numpy as np
from common import Figure, Work, interleave, processor, rate, ratio, reads_of

import kvsnap
from kvsnap.layout import Snapshot, numpy_dtype
from kvsnap.session import Session

LAYERS, HEADS, DIM = 16, 8, 128
SAMPLE, TURN = 4096, 512


def snapshot(rows: int, dtype: str, layers: int, start: int = 0) -> Snapshot:
    """The same values in each layer, so that the cache need not be in memory while it is made."""
    random = np.random.default_rng(start)
    block = random.standard_normal((HEADS, min(rows, TURN), DIM), dtype=np.float32).astype(numpy_dtype(dtype))
    values = np.tile(block, (1, -(-rows // block.shape[1]), 1))[:, :rows]
    return common.snapshot([values] * (2 * layers), common.specs(layers, HEADS, DIM, dtype), start=start)


def sealed(path: Path, rows: int, dtype: str, layers: int = LAYERS) -> Path:
    kvsnap.save(snapshot(rows, dtype, layers), path, sync=False)
    return path


def session(path: Path, rows: int, dtype: str, layers: int = LAYERS) -> Path:
    with common.without_sync(), Session.open(path) as opened:
        for start in range(0, rows, TURN):
            opened.append(snapshot(min(TURN, rows - start), dtype, layers, start))
    return path


def copied(path: Path) -> None:
    """Read every tensor, checked, each into the same memory: what any pass has to do at least."""
    tensors = list(kvsnap.load(path).tensors())
    out = np.empty(tensors[0].shape, numpy_dtype(tensors[0].spec.dtype))
    for tensor in tensors:
        tensor.read_into(out)


def check(path: Path) -> None:
    """What is measured must be right: a head against numpy over the whole of it."""
    found = kvsnap.statistics(path, layers=[1], roles=["v"]).heads[5]
    head = kvsnap.load(path).head(1, 5)
    assert head is not None
    wide = head.v.astype(np.float64)
    singular = np.linalg.svd(wide - wide.mean(axis=0), compute_uv=False)
    shares = singular / singular.sum()
    assert found.effective_rank is not None
    assert np.isclose(found.effective_rank, np.exp(-(shares * np.log(shares)).sum()))
    assert np.isclose(found.mean_norm or 0, np.linalg.norm(wide, axis=1).mean())


def anonymous() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def peak(path: str, sample: int | None) -> int:
    """Return the bytes by which statistics raise the memory of this process, looked at each millisecond."""
    kvsnap.statistics(path, sample=64, layers=[0])  # what is imported late does not count
    before, most, done = anonymous(), [0], threading.Event()

    def look() -> None:
        while not done.wait(0.001):
            most[0] = max(most[0], anonymous())

    looking = threading.Thread(target=look)
    looking.start()
    kvsnap.statistics(path, sample=sample)
    done.set()
    looking.join()
    return most[0] - before


def memory(path: Path, what: str, tensor: int) -> list[Figure]:
    if not Path("/proc/self/status").exists():
        return []
    command = [sys.executable, Path(__file__).resolve(), "--peak", path]
    told = subprocess.run(command, env=common.environment(), stdout=subprocess.PIPE, text=True, check=True).stdout
    return [Figure(f"{what}, extra peak memory", f"{int(told) / 1e6:.0f} MB", f"one tensor is {tensor / 1e6:.0f} MB")]


def of_file(path: Path, what: str, rows: int, dtype: str, layers: int, rounds: int) -> list[Figure]:
    check(path)
    nbytes = rows * 2 * layers * HEADS * DIM * numpy_dtype(dtype).itemsize
    works: dict[str, Callable[[], object]] = {
        "copy": lambda: copied(path),
        "whole": lambda: kvsnap.statistics(path),
        "sample": lambda: kvsnap.statistics(path, sample=SAMPLE),
    }
    times = interleave({name: Work(run) for name, run in works.items()}, rounds)
    cpu = {name: processor(run) for name, run in works.items()}
    read = [reads_of(lambda sample=sample: kvsnap.statistics(path, sample=sample))[0] for sample in (None, SAMPLE)]
    size = f"{nbytes / 1e9:.2f} GB, {rows:,} rows, {dtype}"
    seconds = {name: f"{np.median(taken):.2f} s, {cpu[name]:.2f} s of processors" for name, taken in times.items()}
    note = "mapped" if not read[0] > nbytes // 2 else f"{read[0] / 1e6:,.0f} and {read[1] / 1e6:,.0f} MB read"
    return [
        Figure(f"{what}: read and check", rate(nbytes, times["copy"]), f"{seconds['copy']}; {size}"),
        Figure(f"{what}: statistics", rate(nbytes, times["whole"]), seconds["whole"]),
        Figure(f"{what}: of read and check", f"{ratio(times['copy'], times['whole']):.2f}", note),
        Figure(f"{what}: sample of {SAMPLE:,} rows", f"{np.median(times['sample']):.2f} s",
               f"{ratio(times['whole'], times['sample']):.1f} x as fast; {cpu['sample']:.2f} s of processors"),
        *memory(path, what, nbytes // (2 * layers)),
    ]  # fmt: skip


def measure(directory: Path, options: argparse.Namespace) -> list[Figure]:
    rounds, layers = (1, 2) if options.small else (options.rounds or 3, LAYERS)
    figures = []
    for make, dtype in ((sealed, "float32"), (sealed, "bfloat16"), (session, "bfloat16")):
        each = 2 * layers * HEADS * DIM * numpy_dtype(dtype).itemsize
        rows = 1024 if options.small else int(options.gib * (1 << 30)) // each
        path = make(directory / "cache", rows, dtype, layers)
        figures += of_file(path, f"{make.__name__}, {dtype}", rows, dtype, layers, rounds)
        common.remove(path)
    return figures


if __name__ == "__main__":
    parser = common.parser(__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of a file")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak is not None:
        print(peak(options.peak, None))
    else:
        common.run(options, lambda directory: measure(directory, options), "xxhash")

"""Comparing two files: time beside that of reading and checking both, and the memory that it takes."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import common
import numpy as np
from common import Figure, Work, interleave, processor, rate, ratio

import kvsnap

PAIRS = {"two that are the same": ("a", "same"), "exact and q8": ("a", "q8"), "two runs": ("a", "other")}


def files(directory: Path, mib: float) -> int:
    """Make the files that are compared; return the bytes of one cache."""
    values = common.arrays(common.rows_for(mib))
    made = common.snapshot(values, common.specs())
    kvsnap.save(made, directory / "a", sync=False)
    kvsnap.save(made, directory / "same", sync=False)
    kvsnap.save(made, directory / "q8", codec="q8", sync=False)
    for array in values:
        np.add(array, np.float32(1e-3), out=array)
    kvsnap.save(made, directory / "other", sync=False)
    return made.nbytes


def read(directory: Path, names: tuple[str, str]) -> None:
    """Read every tensor of both, checked and decoded, and keep none."""
    for name in names:
        for tensor in kvsnap.load(directory / name).tensors():
            np.add.reduce(tensor.values().view(np.uint8).reshape(-1)[::4096])


def times(directory: Path, nbytes: int, rounds: int) -> list[Figure]:
    out = []
    for what, names in PAIRS.items():
        a, b = (directory / name for name in names)
        found = kvsnap.diff(a, b)
        assert found.identical == (what == "two that are the same")
        assert found.layers[-1].n_rows == found.a.n_rows
        taken = interleave(
            {
                "read": Work(lambda n=names: read(directory, n)),  # type: ignore[misc] # mypy infers no default
                "diff": Work(lambda p=(a, b): kvsnap.diff(*p)),  # type: ignore[misc]
                "similar": Work(lambda p=(a, b): kvsnap.diff(*p, similar=True)),  # type: ignore[misc]
            },
            rounds,
        )
        cpu = {"diff": processor(lambda p=(a, b): kvsnap.diff(*p))}  # type: ignore[misc]
        cpu["similar"] = processor(lambda p=(a, b): kvsnap.diff(*p, similar=True))  # type: ignore[misc]
        for name, told in (("diff", what), ("similar", f"{what}, with similarity")):
            note = f"{rate(2 * nbytes, taken[name])} of both, {cpu[name]:.2f} s of processors; "
            note += f"reading both {rate(2 * nbytes, taken['read'])}"
            value = f"{1 / ratio(taken['read'], taken[name]):.1f} x"
            out.append(Figure(f"diff of {told}, in times that of reading both", value, note))
    return out


def resident_peak(*, reset: bool = False) -> int:
    """Bytes of the largest resident set since the last reset that are in memory of this process alone (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def peak(directory: Path) -> int:
    """Run in a fresh process: return the bytes by which a diff of two small-coded files raised the peak memory."""
    few = common.snapshot([np.ascontiguousarray(v[:, :16]) for v in common.arrays(16)], common.specs())
    kvsnap.diff(few, few)
    before = resident_peak(reset=True)
    kvsnap.diff(directory / "q8", directory / "q8", similar=True)
    return resident_peak() - before


def memory(directory: Path, nbytes: int) -> list[Figure]:
    if not Path("/proc/self/clear_refs").exists():
        return []
    told = subprocess.run(
        [sys.executable, Path(__file__).resolve(), "--peak", directory], env=common.environment(),
        stdout=subprocess.PIPE, text=True, check=True,
    ).stdout  # fmt: skip
    tensor = nbytes / (2 * common.LAYERS)
    note = f"one tensor decoded is {tensor / 1e6:.1f} MB, and the mapped files count: {nbytes / 2e6:.0f} MB"
    return [Figure("diff of two q8 files, extra peak memory", f"{int(told) / 1e6:.1f} MB", note)]


def measure(directory: Path, options: argparse.Namespace) -> list[Figure]:
    mib, rounds = (8, 2) if options.small else (options.mib, options.rounds or 5)
    nbytes = files(directory, mib)
    return [*times(directory, nbytes, rounds), *memory(directory, nbytes)]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--mib", type=float, default=1024, help="size of each cache")
    parser.add_argument("--peak", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak is not None:
        print(peak(options.peak))
        return
    common.run(options, lambda directory: measure(directory, options), "ml_dtypes", "xxhash")


if __name__ == "__main__":
    main()

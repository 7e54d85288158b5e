"""Why a file of our own: the same values in our file, SQLite, LMDB and safetensors. See design/001-file.md.

Values of 4 MiB are written durably, read back into memory, then 3 MiB are appended durably, again and again. Bytes on
disk are those that the process made the file system write out (Linux). LMDB and safetensors: when installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sqlite3
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import Figure, seconds

from kvsnap import Session
from kvsnap.layout import Layer, PositionRun, Run, Snapshot, Tensor, TensorSpec
from kvsnap.tensors import read_all

Values = list[np.ndarray[Any, Any]]
WRITTEN, APPENDED = 4 << 20, 3 << 20


class Plain:
    """Bytes in a file and a sync: no names, no checksums, no turns. The bar, not a candidate."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, values: Values) -> None:
        self.append(values)

    def append(self, values: Values) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for value in values:
            os.write(fd, value)
        os.fdatasync(fd)
        os.close(fd)

    def read(self, outs: Values) -> None:
        with self.path.open("rb", buffering=0) as file:
            for out in outs:
                file.readinto(out)

    def finish(self) -> None:
        """Nothing is open."""


class Kvsnap:
    """A session; a value is a tensor, an append one turn of one tensor of new rows."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, 0
        # The writer stays open, as in a conversation; the others here keep theirs open too.
        self.turns = Session.open(path.with_suffix(".turns"))

    def _turn(self, values: Values) -> Snapshot:
        layers = []
        for number, value in enumerate(values):
            spec = TensorSpec(
                id=number, name=f"v{number}", layer=number, role="other", dtype="uint8", axes=("row", "byte"),
                shape=(0, 4096), growth="window", row_axis=0,
            )  # fmt: skip
            layers.append(
                Layer(index=number, kind="none", tensors=(Tensor(spec, value.reshape(-1, 4096), start=self.rows),))
            )
        n_rows = self.rows + values[0].size // 4096
        return Snapshot(
            layers=tuple(layers), tokens=(0,) * n_rows, runs=(Run("prompt", n_rows),), n_rows=n_rows,
            row_start=self.rows, token_offset=n_rows, positions=(PositionRun(0, n_rows),),
        )  # fmt: skip

    def write(self, values: Values) -> None:
        with Session.open(self.path) as session:
            session.append(self._turn(values))

    def append(self, values: Values) -> None:
        self.turns.append(self._turn(values))
        self.rows = self.turns.n_rows

    def read(self, outs: Values) -> None:
        with Session.open(self.path, readonly=True) as session:
            found = list(session.load().tensors())
            read_all([(t, o.reshape(-1, 4096)) for t, o in zip(found, outs, strict=True)], workers=1)

    def finish(self) -> None:
        self.turns.close()


class Sqlite:
    """One row per value; write-ahead log, full sync, 64 KiB pages. The log is folded back within the time of write."""

    def __init__(self, path: Path) -> None:
        self.base = sqlite3.connect(path, isolation_level=None)
        for text in ("page_size=65536", "journal_mode=WAL", "synchronous=FULL", "mmap_size=0"):
            self.base.execute(f"PRAGMA {text}").fetchall()
        self.base.execute("CREATE TABLE IF NOT EXISTS parts (id INTEGER PRIMARY KEY, bytes BLOB NOT NULL)")

    def write(self, values: Values) -> None:
        self.append(values)
        self.base.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def append(self, values: Values) -> None:
        self.base.execute("BEGIN")
        self.base.executemany("INSERT INTO parts (bytes) VALUES (?)", ((v,) for v in values))
        self.base.execute("COMMIT")

    def read(self, outs: Values) -> None:
        for number, out in enumerate(outs, 1):
            found = self.base.execute("SELECT bytes FROM parts WHERE id = ?", (number,)).fetchone()[0]
            out[:] = np.frombuffer(found, np.uint8)

    def finish(self) -> None:
        self.base.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self.base.close()


class Lmdb:
    """One key per value, default settings: synced at commit, read through the map."""

    def __init__(self, path: Path) -> None:
        import lmdb

        self.base = lmdb.open(str(path), map_size=1 << 34, subdir=False)
        self.number = 0

    def write(self, values: Values) -> None:
        self.append(values)

    def append(self, values: Values) -> None:
        with self.base.begin(write=True) as transaction:
            for value in values:
                transaction.put(self.number.to_bytes(8, "big"), value.data)
                self.number += 1

    def read(self, outs: Values) -> None:
        with self.base.begin(buffers=True) as transaction:
            for number, out in enumerate(outs):
                out[:] = np.frombuffer(transaction.get(number.to_bytes(8, "big")), np.uint8)

    def finish(self) -> None:
        self.base.close()


class Safetensors:
    """One tensor per value. It cannot append: the whole file is written again, synced, and renamed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.all: Values = []

    def write(self, values: Values) -> None:
        from safetensors.numpy import save_file

        temporary = self.path.with_suffix(".tmp")
        save_file({str(i): v for i, v in enumerate(values)}, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(self.path)
        self.all = values

    def append(self, values: Values) -> None:
        self.write([*self.all, *values])

    def read(self, outs: Values) -> None:
        from safetensors import safe_open

        with safe_open(self.path, framework="np") as file:
            for number, out in enumerate(outs):
                out[:] = file.get_tensor(str(number))

    def finish(self) -> None:
        """Nothing is open."""


@dataclass
class Found:
    write: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    append: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)
    appended: list[float] = field(default_factory=list)


def candidates() -> dict[str, Callable[[Path], Any]]:
    out: dict[str, Callable[[Path], Any]] = {"plain file": Plain, "kvsnap": Kvsnap, "SQLite": Sqlite}
    if importlib.util.find_spec("lmdb"):
        out["LMDB"] = Lmdb
    if importlib.util.find_spec("safetensors"):
        out["safetensors"] = Safetensors
    return out


def one(make: Callable[[Path], Any], path: Path, values: Values, outs: Values, more: Values, found: Found) -> None:
    """Write, read back and append with one candidate, in a directory of its own."""
    path.mkdir()
    common.settle()
    store = make(path / "store")
    taken: list[float] = []
    nbytes = common.disk_bytes(lambda: taken.append(seconds(lambda: store.write(values))))
    found.write.append(taken[0])
    found.written.append(nbytes / sum(v.nbytes for v in values))
    store.read(outs)
    assert all(np.array_equal(a, b) for a, b in zip(outs, values, strict=True))
    found.read.append(seconds(lambda: store.read(outs)))
    common.settle()

    def appends() -> None:
        found.append.extend(seconds(partial(store.append, [value])) for value in more)
        store.finish()

    nbytes = common.disk_bytes(appends)
    found.appended.append(nbytes / sum(v.nbytes for v in more))


def damaged(make: Callable[[Path], Any], path: Path, values: Values, flips: int) -> dict[str, int]:
    """Flip one bit at a time, half of them in the first 16 KiB; open and read in a child; count how that ends."""
    path.mkdir()
    file = path / "store"
    store = make(file)
    store.write(values)
    store.finish()
    whole, random = file.read_bytes(), np.random.default_rng(1)
    ends = {"same data": 0, "refused": 0, "wrong data": 0, "crash": 0}
    for number in range(flips):
        copy = bytearray(whole)
        copy[int(random.integers(0, min(len(whole), 16384) if number % 2 else len(whole)))] ^= 1 << (number % 8)
        for left in path.iterdir():
            left.unlink()
        file.write_bytes(copy)
        ends[_outcome(make, file, values)] += 1
    return ends


def _outcome(make: Callable[[Path], Any], file: Path, values: Values) -> str:
    child = os.fork()
    if not child:
        code = 1
        try:
            outs = [np.zeros_like(v) for v in values]
            make(file).read(outs)
            code = 0 if all(np.array_equal(a, b) for a, b in zip(outs, values, strict=True)) else 2
        finally:
            os._exit(code)  # an exception is a refusal
    _, status = os.waitpid(child, 0)
    return "crash" if os.WIFSIGNALED(status) else ("same data", "refused", "wrong data")[os.WEXITSTATUS(status)]


def measure(directory: Path, options: argparse.Namespace) -> list[Figure]:
    count, n_more, rounds = (4, 3, 1) if options.small else (options.mib // 4, 20, options.rounds or 3)
    random = np.random.default_rng(0)
    values = [random.integers(0, 256, WRITTEN, dtype=np.uint8) for _ in range(count)]
    more = [random.integers(0, 256, APPENDED, dtype=np.uint8) for _ in range(n_more)]
    outs = [np.zeros_like(v) for v in values]
    size = sum(v.nbytes for v in values)
    found = {name: Found() for name in candidates()}
    for number in range(rounds):
        for name, make in candidates().items():
            path = directory / f"{name} {number}"
            # Writing a large file again for each append is slow and tells the same after a few.
            one(make, path, values, outs, more[:3] if name == "safetensors" else more, found[name])
            for left in path.iterdir():
                left.unlink()
    out = []
    for name, f in found.items():
        middle = statistics.median
        out += [
            Figure(f"{name}, write {size >> 20} MiB durably", f"{size / middle(f.write) / 1e9:.2f} GB/s",
                   f"{middle(f.written):.2f} bytes on disk per byte"),
            Figure(f"{name}, read it back", f"{size / middle(f.read) / 1e9:.2f} GB/s"),
            Figure(f"{name}, append 3 MiB durably", f"{middle(f.append) * 1e3:.1f} ms",
                   f"slowest {max(f.append) * 1e3:.0f} ms; {middle(f.appended):.2f} bytes on disk per byte"),
        ]  # fmt: skip
    return out


def damage(directory: Path, flips: int) -> list[Figure]:
    random, out = np.random.default_rng(0), []
    few = [random.integers(0, 256, 1 << 16, dtype=np.uint8) for _ in range(4)]
    for name, make in candidates().items():
        ends = damaged(make, directory / f"{name} damaged", few, flips)
        told = ", ".join(f"{end} {count}" for end, count in ends.items())
        bad = ends["wrong data"] + ends["crash"]
        out.append(Figure(f"{name}, {flips} times one flipped bit", f"{bad} bad ends", told))
    return out


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--mib", type=int, default=512, help="bytes of the first values, in MiB")
    parser.add_argument("--flips", type=int, default=200, help="damaged copies of each")
    options = parser.parse_args()
    flips = 10 if options.small else options.flips
    # Damage first: a child is quick to make while this process is small.
    common.run(options, lambda d: damage(d, flips) + measure(d, options), "xxhash", "lmdb", "safetensors")


if __name__ == "__main__":
    main()

"""What the benchmarks share: interleaved timing, synthetic caches, counts of the operating system, and the table."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from kvsnap.files import system
from kvsnap.identity import Identity, WeightDigest
from kvsnap.layout import Layer, PositionRun, Run, Snapshot, Tensor, TensorSpec, numpy_dtype

LAYERS, HEADS, DIM = 30, 3, 64
"""The cache of SmolLM2-135M: 46,080 bytes a token in float32."""
VOCAB = 49_152

# -- the machine -------------------------------------------------------------------------------------------


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def load() -> float:
    """Processes that wanted a core during the last minute; 0 where the system does not tell."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0


def machine(*packages: str) -> dict[str, str]:
    out = {
        "cpu": f"{os.cpu_count()} x {cpu_model()}",
        "kernel": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
    }
    for name in ("numpy", *packages):
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[name] = "not installed"
    return out


# -- timing ------------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """Something to time; `before` and `after` are not timed."""

    run: Callable[[], object]
    before: Callable[[], object] | None = None
    after: Callable[[], object] | None = None


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def processor(run: Callable[[], object]) -> float:
    """Return the seconds that processors worked for it: on a busy machine they say more than a clock."""
    before = time.process_time()
    run()
    return time.process_time() - before


def interleave(works: Mapping[str, Work], rounds: int, *, warm: bool = True) -> dict[str, list[float]]:
    """Time each work once a round, in an order that turns, so that a busy moment meets all of them alike."""
    names, times = list(works), {name: [] for name in works}  # type: dict[str, list[float]]
    for number in range(-1 if warm else 0, rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            work = works[name]
            if work.before is not None:
                work.before()
            taken = seconds(work.run)
            if work.after is not None:
                work.after()
            if number >= 0:
                times[name].append(taken)
    return times


def ratio(base: Sequence[float], ours: Sequence[float]) -> float:
    """How many times as fast as `base` we are: the median over the rounds."""
    return statistics.median(a / b for a, b in zip(base, ours, strict=True))


def rate(nbytes: int, times: Sequence[float]) -> str:
    return f"{nbytes / statistics.median(times) / 1e9:.2f} GB/s"


def ms(times: Sequence[float]) -> float:
    return statistics.median(times) * 1e3


# -- what the operating system counts ----------------------------------------------------------------------


def _io() -> dict[str, int]:
    try:
        text = Path("/proc/self/io").read_text(encoding="ascii")
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split(":")[1]) for line in text.splitlines()}


def reads_of(run: Callable[[], object]) -> tuple[int, int]:
    """Return the bytes read and the read calls made by `run`; (0, 0) where the system does not tell."""
    a = _io()
    b = _io()  # what looking itself costs
    run()
    c = _io()
    if not a:
        return 0, 0
    return c["rchar"] - b["rchar"] - (b["rchar"] - a["rchar"]), c["syscr"] - b["syscr"] - (b["syscr"] - a["syscr"])


def disk_bytes(run: Callable[[], object]) -> int:
    """Return the bytes that `run` made the file system write out; sync inside `run`."""
    before = _io()
    run()
    after = _io()
    return after["write_bytes"] - before["write_bytes"] if before else 0


def environment() -> dict[str, str]:
    """Return the environment of a child that imports what this process can."""
    # Not from this directory: no name in it may stand before one of the standard library.
    own = Path(__file__).resolve().parent
    path = [os.path.abspath(p) for p in sys.path if Path(p).resolve() != own]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}


@contextmanager
def without_sync() -> Iterator[None]:
    """Leave out every fsync and fdatasync of kvsnap: for building files, and for showing what syncing costs."""
    with mock.patch.object(system, "sync", return_value=None):
        yield


def remove(path: str | os.PathLike[str]) -> None:
    Path(path).unlink(missing_ok=True)


def settle() -> None:
    """Let the disk finish what earlier work left to it, so that the next sync does not wait for that."""
    if hasattr(os, "sync"):
        os.sync()


# -- caches ------------------------------------------------------------------------------------------------


def identity(weights: int = 272) -> Identity:
    """An identity as large as that of SmolLM2-135M."""
    return Identity(
        architecture="llama",
        config=tuple((f"setting_{i}", str(i)) for i in range(24)),
        weights=tuple(
            WeightDigest(f"model.layers.{i}.mlp.down_proj.weight", "float32", (576, 1536), f"{i:032x}")
            for i in range(weights)
        ),
        cache_dtype="float32",
        quantisation="none",
        tokenizer="ab" * 16,
        engine="synthetic",
    )


IDENTITY = identity()


def specs(
    layers: int = LAYERS, heads: int = HEADS, dim: int = DIM, dtype: str = "float32"
) -> list[tuple[TensorSpec, TensorSpec]]:
    def spec(layer: int, place: int) -> TensorSpec:
        return TensorSpec(
            id=2 * layer + place, name=f"layer{layer}.{'kv'[place]}", layer=layer, role="kv"[place], dtype=dtype,
            axes=("head", "row", "dim"), shape=(heads, 0, dim), row_axis=1, rope="after" if place == 0 else "none",
            pairing="half" if place == 0 else "",
        )  # fmt: skip

    return [(spec(layer, 0), spec(layer, 1)) for layer in range(layers)]


def arrays(
    rows: int, *, layers: int = LAYERS, heads: int = HEADS, dim: int = DIM, dtype: str = "float32", seed: int = 0
) -> list[np.ndarray[Any, Any]]:
    """Random K and V of each layer, `[heads, rows, dim]`."""
    random = np.random.default_rng(seed)
    return [
        random.standard_normal((heads, rows, dim), dtype=np.float32).astype(numpy_dtype(dtype))
        for _ in range(2 * layers)
    ]


_IDS = tuple(range(1 << 17))  # a live sequence keeps its ids as the same objects, so that comparing them is quick


def snapshot(
    values: Sequence[np.ndarray[Any, Any]],
    made: Sequence[tuple[TensorSpec, TensorSpec]],
    *,
    start: int = 0,
    logits: np.ndarray[Any, Any] | None = None,
) -> Snapshot:
    """The values as a snapshot, or with `start` as the rows from there on of a longer one."""
    n_rows = start + values[0].shape[1]
    layers = tuple(
        Layer(
            index=i, kind="attention", num_query_heads=3 * pair[0].shape[0],
            tensors=tuple(Tensor(s, values[2 * i + j], start=start) for j, s in enumerate(pair)),
        )
        for i, pair in enumerate(made)
    )  # fmt: skip
    last = TensorSpec(
        id=2**20, name="logits", layer=-1, role="logits", dtype="float32", axes=("vocab",), shape=(VOCAB,),
        growth="replaced", rope="none",
    )  # fmt: skip
    return Snapshot(
        architecture="llama",
        layers=layers,
        tokens=_IDS[:n_rows],
        runs=(Run("prompt", n_rows),),
        n_rows=n_rows,
        row_start=start,
        token_offset=n_rows,
        positions=(PositionRun(0, n_rows),),
        logits=None if logits is None else Tensor(last, logits),
        identity=IDENTITY,
    )


def rows_for(mib: float, dtype: str = "float32") -> int:
    """Rows of a SmolLM2 cache that make about so many MiB."""
    return max(16, int(mib * (1 << 20)) // (2 * LAYERS * HEADS * DIM * numpy_dtype(dtype).itemsize))


# -- the table ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """One measured figure. `met` is None where the design names no target."""

    what: str
    value: str
    note: str = ""
    target: str = ""
    met: bool | None = None


def below(value: float, limit: float) -> bool:
    return value <= limit


def parser(text: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=text)
    made.add_argument("--small", action="store_true", help="a few seconds; the figures then mean nothing")
    made.add_argument("--rounds", type=int, help="repetitions of each measurement")
    made.add_argument("--directory", default=None, help="where to write (default: the system's temporary directory)")
    made.add_argument("--json", action="store_true")
    return made


def run(options: argparse.Namespace, measure: Callable[[Path], list[Figure]], *packages: str) -> None:
    """Measure in a directory that is removed afterwards, and print the table or JSON."""
    before = load()
    with tempfile.TemporaryDirectory(prefix="kvsnap-bench-", dir=options.directory) as directory:
        figures = measure(Path(directory))
    told = machine(*packages) | {"load": f"{before} before, {load()} after", "small": str(options.small)}
    if options.json:
        print(json.dumps({"machine": told, "figures": [vars(f) for f in figures]}, indent=1))
        return
    print(", ".join(f"{key} {value}" for key, value in told.items()))
    table(figures)


def table(figures: Sequence[Figure]) -> None:
    rows = [("what", "measured", "target", "met", "from")]
    rows += [(f.what, f.value, f.target, {None: "", True: "yes", False: "NO"}[f.met], f.note) for f in figures]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        print(f"{cells}  {row[-1]}".rstrip())


if __name__ == "__main__":
    print(", ".join(f"{key} {value}" for key, value in machine("torch", "transformers").items()), f"load {load()}")

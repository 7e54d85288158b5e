"""How fast each codec encodes and decodes, as a share of memcpy in the same run. One thread; prints a table, or JSON.

Every round copies, encodes and decodes the same tensors one after the other, so that a busy machine slows all of them;
a row is the median of the rounds. memcpy is np.copyto into memory that was used before. Encoding writes fresh bytes for
each tensor and drops them, as a save does; decoding writes into memory that was used before.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvsnap.codecs import CODECS
from kvsnap.tensors import TensorSpec, numpy_dtype

HEADS, DIM = 3, 64


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(dtype: str, rows: int, total: int, rounds: int) -> list[dict[str, Any]]:
    spec = TensorSpec(
        id=0, name="k", layer=0, role="k", dtype=dtype, axes=("head", "row", "dim"), shape=(HEADS, 0, DIM), row_axis=1
    )
    count = max(1, total // spec.nbytes(rows))
    random = np.random.default_rng(0)
    values = [
        random.standard_normal((HEADS, rows, DIM), dtype=np.float32).astype(numpy_dtype(dtype)) for _ in range(count)
    ]
    outs = [np.zeros_like(v) for v in values]
    parts = {
        codec.id: [memoryview(np.array(codec.encode(spec, v).buffers[0])) for v in values] for codec in CODECS.values()
    }
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        works: dict[tuple[str, str], Callable[[], Any]] = {
            ("memcpy", ""): lambda: [np.copyto(o, v) for o, v in zip(outs, values, strict=True)]
        }
        for codec in CODECS.values():
            works[codec.name, "encode"] = lambda c=codec: [c.encode(spec, v).nbytes for v in values]
            works[codec.name, "decode"] = lambda c=codec: [
                c.decode(spec, part, out) for part, out in zip(parts[c.id], outs, strict=True)
            ]
        for key, work in works.items():
            times.setdefault(key, []).append(seconds(work))
    nbytes = spec.nbytes(rows) * count
    medians = {key: statistics.median(found) for key, found in times.items()}
    return [
        {
            "codec": codec,
            "what": what,
            "dtype": dtype,
            "rows": rows,
            "gb_per_s": round(nbytes / value / 1e9, 2),
            "of_memcpy": round(medians["memcpy", ""] / value, 3),
            "us_per_part": round(value / count * 1e6, 1),
        }
        for (codec, what), value in medians.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=96, help="bytes of tensors in each round, in MiB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
    parser.add_argument("--rows", default="16,256,4096", help="rows of one part")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    machine = {"cpu": cpu_model(), "python": platform.python_version(), "numpy": np.__version__, "threads": 1}
    rows = [
        row
        for dtype in options.dtypes.split(",")
        for n in map(int, options.rows.split(","))
        for row in measure(dtype, n, options.mib << 20, options.rounds)
    ]
    if options.json:
        print(json.dumps({"machine": machine, "rows": rows}, indent=1))
        return
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print(f"parts of {HEADS} heads x rows x {DIM}; {options.mib} MiB a round, median of {options.rounds} rounds")
    print(f"{'dtype':9} {'rows':>5} {'codec':7} {'what':7} {'GB/s':>7} {'of memcpy':>10} {'us/part':>9}")
    for r in rows:
        print(
            f"{r['dtype']:9} {r['rows']:5} {r['codec']:7} {r['what']:7} {r['gb_per_s']:7.2f} {r['of_memcpy']:10.3f} "
            f"{r['us_per_part']:9.1f}"
        )


if __name__ == "__main__":
    main()

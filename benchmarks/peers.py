"""The same cache saved and loaded by others in this process. llama.cpp, mlx-lm and LMCache need engines of their own.

Durable rows end with an fsync and a rename in every case: others are given what they do not do by themselves.
"""

from __future__ import annotations

import argparse
import io
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import Figure, Work, interleave, ms, rate, ratio

import kvsnap
from kvsnap.layout import Snapshot
from kvsnap.tensors import read_all

Arrays = list[np.ndarray[Any, Any]]
Saves = dict[str, Callable[[Path], object]]
Loads = dict[str, tuple[Path, Callable[[Path], object]]]


def durable(save: Callable[[Path], object], path: Path) -> None:
    """Save under another name, sync, rename, sync the directory: what kvsnap does at each save."""
    temporary = path.with_suffix(".tmp")
    save(temporary)
    fd = os.open(temporary, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    temporary.replace(path)
    fd = os.open(path.parent, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def plain_save(path: Path, values: Arrays) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    for value in values:
        left = memoryview(value.view(np.uint8)).cast("B")
        while left:
            left = left[os.write(fd, left) :]
    os.close(fd)


def plain_load(path: Path, outs: Arrays) -> None:
    with io.FileIO(path) as file:
        for out in outs:
            file.readinto(memoryview(out.view(np.uint8)).cast("B"))


def numpy_save(path: Path, values: dict[str, np.ndarray[Any, Any]]) -> None:
    with path.open("wb") as file:  # given a path, numpy adds an ending
        np.savez(file, **values)


def peers(made: Snapshot, values: Arrays, directory: Path) -> tuple[Saves, Loads]:
    """How each saves and loads; loads give memory of their own, filled, in every row but the mapped ones."""
    names = [t.name for t in made.tensors()]
    saves: Saves = {"plain write": lambda p: plain_save(p, values)}
    loads: Loads = {}

    def ours(path: Path) -> Arrays:
        found = kvsnap.load(path)
        outs = [np.empty(t.shape, v.dtype) for t, v in zip(found.tensors(), values, strict=True)]
        read_all(list(zip(found.tensors(), outs, strict=True)))
        return outs

    def written(name: str, save: Callable[[Path], object], load: Callable[[Path], object], what: str = "") -> None:
        path = directory / name
        saves.setdefault(name, save)
        save(path)
        loads[what or name] = (path, load)

    plain_save(directory / "plain", values)
    loads["plain read"] = (directory / "plain", lambda p: plain_load(p, [np.empty_like(v) for v in values]))
    kvsnap.save(made, directory / "kvsnap", sync=False)
    loads["kvsnap, into memory"] = (directory / "kvsnap", ours)
    loads["kvsnap, mapped, checked"] = (directory / "kvsnap", lambda p: [t.array for t in kvsnap.load(p).tensors()])
    plain = [value.view(np.uint16) if value.itemsize == 2 else value for value in values]  # no bfloat16 there
    as_numpy = dict(zip(names, plain, strict=True))
    written("numpy savez", lambda p: numpy_save(p, as_numpy), lambda p: dict(np.load(p)))
    try:
        import torch
        from safetensors import safe_open
        from safetensors.torch import load_file, save_file
    except ImportError:
        warnings.warn("torch or safetensors is not installed: numpy only", stacklevel=2)
        return saves, loads
    tensors = {n: torch.from_numpy(v) for n, v in as_numpy.items()}
    if made.layers[0].tensors[0].spec.dtype == "bfloat16":
        tensors = {n: t.view(torch.bfloat16) for n, t in tensors.items()}

    def copied(path: Path, threads: int) -> list[Any]:
        # Two threads of torch wait for each other after each tensor, which a busy machine punishes: show both.
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        with safe_open(path, framework="pt") as file:
            out = [file.get_tensor(n).clone() for n in names]
        torch.set_num_threads(before)
        return out

    written(
        "safetensors save_file", lambda p: save_file(tensors, p), load_file, "safetensors load_file, mapped, not read"
    )
    path = directory / "safetensors save_file"
    for threads in (1, 2):
        loads[f"safetensors safe_open, into memory, {threads} threads"] = (path, lambda p, n=threads: copied(p, n))
    written("torch.save", lambda p: torch.save(tensors, p), lambda p: torch.load(p, weights_only=True), "torch.load")
    return saves, loads


def figures(dtype: str, rows: int, rounds: int, directory: Path) -> list[Figure]:
    values = common.arrays(rows, dtype=dtype)
    made = common.snapshot(values, common.specs(dtype=dtype))
    size = made.nbytes
    saves, loads = peers(made, values, directory)
    target = directory / "target"

    def fresh() -> None:
        common.remove(target)

    def settled() -> None:
        fresh()
        common.settle()

    safe = {name: Work(lambda s=save: durable(s, target), settled) for name, save in saves.items()}
    safe["kvsnap"] = Work(lambda: kvsnap.save(made, target), settled)
    quick = {name: Work(lambda s=save: s(target), fresh) for name, save in saves.items()}
    quick["kvsnap"] = Work(lambda: kvsnap.save(made, target, sync=False), fresh)
    reads = {name: Work(lambda p=path, f=load: f(p)) for name, (path, load) in loads.items()}
    out = []
    for words, ours, works in (
        ("save, fsync + rename", "kvsnap", safe),
        ("save, no sync", "kvsnap", quick),
        ("load", "kvsnap, into memory", reads),
    ):
        times = interleave(works, rounds)
        for name, taken in sorted(times.items(), key=lambda item: ms(item[1])):
            value = 1.0 if name == ours else ratio(taken, times[ours])
            told = "" if name == ours else f"kvsnap is {value:.2f} x as fast"
            what = f"{dtype} {size / 1e6:.0f} MB, {words}: {name}"
            out.append(Figure(what, f"{ms(taken):.0f} ms", f"{rate(size, taken):10} {told}"))
    return out


def measure(directory: Path, options: argparse.Namespace) -> list[Figure]:
    rows, rounds = (64, 2) if options.small else (options.tokens, options.rounds or 11)
    out = []
    for dtype in ("bfloat16", "float32"):
        (directory / dtype).mkdir()
        out += figures(dtype, rows, rounds, directory / dtype)
    return out


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    common.run(options, lambda directory: measure(directory, options), "torch", "safetensors")


if __name__ == "__main__":
    main()

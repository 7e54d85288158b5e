"""Reading a whole snapshot, and changing JSON as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from kvsnap.errors import KvsnapError
from kvsnap.formats.native import MemorySink
from kvsnap.layout import Snapshot
from kvsnap.protocols import Format

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
KEY = bytes(range(32))  # of every encrypted input
sys.path.append(str(ROOT / "tests"))  # for spec_file and synthetic


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A directory in memory, where there is one."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)  # noqa: S108


_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 64, 2**31 - 1, 2**31, 2**32, 2**40, 2**63, -(2**63), 10**30, 0.0, -0.5, 1e308,
    "", "k", "row", "dim", "grow", "window", "replaced", "static", "float32", "q8", "\ud800", "é", [], {}, [0], [[]],
    {"a": 0}, float("inf"), float("nan"),
)  # fmt: skip


def read_whole(snapshot: Snapshot) -> None:
    """Read every tensor in both ways, every head, and what a user would look at."""
    for tensor in [*snapshot.tensors(), *([snapshot.logits] if snapshot.logits else [])]:
        array = tensor.array
        assert array.shape == tensor.shape, (tensor.name, array.shape, tensor.shape)
        tensor.read_into(np.empty(tensor.shape, dtype=array.dtype))
    for layer in range(min(snapshot.num_layers, 16)):
        for head in range(min(snapshot.num_heads or 0, 4)):
            snapshot.head(layer, head)
    assert len(snapshot.tokens) == sum(run.count for run in snapshot.runs)
    repr(snapshot)
    assert snapshot.nbytes >= 0


def write_again(form: Format, snapshot: Snapshot) -> None:
    """Tell the losses and write the snapshot, in one format; it may be refused, and what was written can be read."""
    sink = MemorySink()
    try:
        form.losses(snapshot)
        form.write(snapshot, sink)
    except KvsnapError:
        return
    try:
        read_whole(form.loads(bytes(sink.data)))
    except KvsnapError as error:
        raise AssertionError(f"{form.name} was written and cannot be read: {error}") from error


def change_json(raw: bytes, seed: int) -> bytes:
    """One leaf, member or element of a JSON text changed; the text itself when it is no JSON."""
    chance = random.Random(seed)  # noqa: S311 # the fuzzer hands out the seed
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError):
        return raw
    places: list[tuple[Any, Any]] = []
    waiting = [data] if isinstance(data, (dict, list)) else []
    while waiting and len(places) < 4096:
        at = waiting.pop()
        pairs = at.items() if isinstance(at, dict) else enumerate(at)
        for key, value in pairs:
            places.append((at, key))
            if isinstance(value, (dict, list)):
                waiting.append(value)
    if not places:
        return raw
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        with contextlib.suppress(KeyError, IndexError, RecursionError, ValueError):
            _change(*chance.choice(places), chance, places)
    return json.dumps(data).encode()


def _change(at: Any, key: Any, chance: random.Random, places: list[tuple[Any, Any]]) -> None:
    what = chance.randrange(8)
    if what == 0:
        del at[key]
    elif what == 1:
        other, name = chance.choice(places)
        at[key] = json.loads(json.dumps(other[name]))
    elif what == 2 and isinstance(at, list):
        at.append(json.loads(json.dumps(at[key])))
    elif what == 3 and type(at[key]) is int:
        at[key] += chance.choice((-1, 1, 8, -8))
    elif what == 4 and isinstance(at[key], str):
        # JSON inside JSON: settings of an identity, the metadata of safetensors.
        at[key] = change_json(at[key].encode("utf-8", "replace"), chance.getrandbits(30)).decode()
    else:
        at[key] = chance.choice(_VALUES)

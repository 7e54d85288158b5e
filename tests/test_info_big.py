"""info on files of 4 GiB reads next to nothing: no tensor is read or mapped, in any format.

The values are zeros, and the files have holes in their place, as in test_big_offsets.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsnap
from crash_disk import in_memory
from kvsnap.files import Reader
from kvsnap.formats.colikv import Encoding, Geometry
from kvsnap.formats.colikv.header import HEADER_SIZE, new_header
from kvsnap.formats.native.fork import fork_file
from kvsnap.inspection import Summary
from kvsnap.layout import Layer, PositionRun, Run, Snapshot, Tensor, TensorSpec
from kvsnap.session import Session
from test_big_offsets import holes, is_sparse

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sparse files and counts of bytes as on Linux")

GIB = 1 << 30
LAYERS, HEADS, DIM = 16, 8, 128
ROWS = 4 * GIB // (2 * LAYERS * HEADS * DIM * 4)


def large(n_rows: int, start: int = 0) -> Snapshot:
    """A snapshot of zeros, 16 layers of 8 heads of 128 in float32; the rows from `start` on."""
    layers = []
    for layer in range(LAYERS):
        specs = [
            TensorSpec(
                id=2 * layer + place, name=f"layer{layer}.{role}", layer=layer, role=role, dtype="float32",
                axes=("head", "row", "dim"), shape=(HEADS, 0, DIM), row_axis=1,
            )
            for place, role in enumerate(("k", "v"))
        ]  # fmt: skip
        values = np.zeros((HEADS, n_rows - start, DIM), np.float32)
        layers.append(Layer(index=layer, kind="attention", num_query_heads=32,
                            tensors=tuple(Tensor(spec, values, start=start) for spec in specs)))  # fmt: skip
    return Snapshot(
        architecture="synthetic", layers=tuple(layers), tokens=tuple(range(n_rows)), runs=(Run("prompt", n_rows),),
        n_rows=n_rows, row_start=start, token_offset=n_rows, positions=(PositionRun(0, n_rows),), text="word " * n_rows,
    )  # fmt: skip


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr("kvsnap.files.system.reserve", lambda *_: False)  # it would take the room for the zeros
    monkeypatch.setattr("test_big_offsets.LARGE", 1 << 19)
    with in_memory() as directory:
        yield directory


def bytes_read() -> int:
    line = next(x for x in Path("/proc/self/io").read_text().splitlines() if x.startswith("rchar"))
    return int(line.split()[1])


def told(path: Path, monkeypatch: pytest.MonkeyPatch, *, most: int = 1_000_000, key: bytes | None = None) -> Summary:
    """The summary of a file; fails when a byte is mapped, or more are read."""

    def mapped(reader: Reader) -> memoryview:
        raise AssertionError(f"{reader.path} was mapped")

    kvsnap.inspect(path, key=key)  # what is imported at the first call is not counted
    monkeypatch.setattr(Reader, "map", mapped)
    before = bytes_read()
    found = kvsnap.inspect(path, key=key)
    count = bytes_read() - before
    assert count < most, f"{count} bytes of {path.name} were read"
    monkeypatch.undo()
    assert found.file_bytes == path.stat().st_size
    return found


def is_large(path: Path) -> None:
    assert path.stat().st_size > 4 * GIB - (1 << 20)
    is_sparse(path)


def saved(path: Path, **options: Any) -> None:
    with holes() as left:
        kvsnap.save(large(ROWS), path, sync=False, **options)
    assert sum(left) == 4 * GIB


@pytest.mark.parametrize(("ending", "options"), [
    ("kvsnap", {}), ("safetensors", {"format": "safetensors"}), ("mlxkv", {"format": "mlxkv"}),
])  # fmt: skip
def test_info_on_a_snapshot_of_4_gib(
    ending: str, options: dict[str, Any], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = place / f"a.{ending}"
    saved(path, **options)
    found = told(path, monkeypatch)
    is_large(path)
    assert (found.n_tokens, found.n_rows, found.num_layers, found.num_heads) == (ROWS, ROWS, LAYERS, HEADS)
    assert found.tensor_bytes == sum(x.decoded for x in found.layers) == 4 * GIB
    assert sum(p.stored for p in found.parts) == 4 * GIB
    assert [g.layers for g in found.groups] == [tuple(range(LAYERS))]


def test_info_on_a_session_of_4_gib_in_many_turns(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, turns = place / "a.kvsnap", 128
    with holes(), Session.open(path) as session:
        for n in range(1, turns + 1):
            session.append(large(n * ROWS // turns, (n - 1) * ROWS // turns), complete=n % 2 == 0)
    found = told(path, monkeypatch)
    is_large(path)
    assert (found.n_tokens, found.n_spans, found.tensor_bytes) == (ROWS, turns, 4 * GIB)
    assert found.turns is not None
    assert (found.turns.n_live, found.turns.n_complete) == (turns, turns // 2)
    parent = place / f"{found.file_id}.kvsnap"  # the name under which it can have forks
    path.rename(parent)
    fork = told(Path(fork_file(str(parent)).path), monkeypatch)
    assert fork.fork is not None
    assert (fork.fork.above_bytes, fork.tensor_bytes, fork.n_tokens) == (parent.stat().st_size, 4 * GIB, ROWS)
    assert fork.turns is not None
    assert (fork.turns.n_live, fork.turns.n_inherited) == (turns, turns)


def test_info_on_an_encrypted_snapshot_opens_its_tables_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    path, key = place / "a.kvsnap", bytes(range(32))
    made = large(256)  # 32 MiB, which are sealed, so no holes
    kvsnap.save(made, path, key=key, sync=False)
    assert path.stat().st_size > made.nbytes
    assert told(path, monkeypatch, most=200_000, key=key).tensor_bytes == made.nbytes == 32 << 20


@pytest.mark.parametrize("codec", ["float32", "fp8", "int4"])
def test_info_on_a_coli_kv_file_of_4_gib(codec: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = place / "a.coli_kv"
    geometry = Geometry(n_layers=61, kv_lora=512, qk_rope=64, vocab=1000)
    header = new_header(geometry, Encoding(codec, 4 if codec == "int4" else 0))
    n = 4 * GIB // header.record_size
    path.write_bytes(replace(header, count=n).pack())
    os.truncate(path, HEADER_SIZE + n * header.record_size)
    found = told(path, monkeypatch, most=20_000)
    is_large(path)
    assert (found.n_tokens, found.num_layers, found.bound > 0) == (n, 61, codec != "float32")
    assert not found.notes
    assert found.stored[codec].stored == n * (header.record_size - 4)
    with path.open("r+b") as f:  # the control: an id among those that are looked at
        f.seek(header.offset(n - 1))
        f.write((1000).to_bytes(4, "little"))
    assert any("were probably written by another model" in note for note in kvsnap.inspect(path).notes)

"""MLXKV001 files."""

from __future__ import annotations

from pathlib import Path

from kvsnap.formats import mlxkv
from kvsnap.formats.native import plain
from parts import DATA, read_whole, write_again


def seeds() -> list[Path]:
    """The golden files."""
    return sorted((DATA / "mlxkv").glob("*.mlxkv"))


def one_input(data: bytes) -> None:
    """Read all; write it again as it is, as q8, and as a native file."""
    snapshot = mlxkv.loads(data)
    read_whole(snapshot)
    mlxkv.slab_differences(snapshot)
    write_again(mlxkv.FORMAT, snapshot)
    write_again(plain.FORMAT, snapshot)
    read_whole(mlxkv.loads(mlxkv.dumps(snapshot, codec="q8")))

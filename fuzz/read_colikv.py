"""`.coli_kv` files, as bytes and in place."""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvsnap.errors import InputError, KvsnapError
from kvsnap.formats import colikv
from kvsnap.formats.native import plain
from parts import DATA, read_whole, write_again

_directory = tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)  # noqa: S108
_PATH = Path(_directory.name) / ".coli_kv"


def seeds() -> list[Path]:
    """The golden files."""
    return sorted((DATA / "colikv").glob("*.coli_kv"))


def one_input(data: bytes) -> None:
    """Read all, as each dialect where the file does not tell; write it again; open it in place."""
    for dialect in (None, "fp8", "watermark"):
        try:
            snapshot = colikv.loads(data, dialect=dialect)
        except InputError:
            continue
        read_whole(snapshot)
        write_again(colikv.FORMAT, snapshot)
        write_again(plain.FORMAT, snapshot)
        if snapshot.source["magic"] != "COLIKV2":
            break
    _PATH.write_bytes(data)
    with contextlib.suppress(KvsnapError), colikv.ColiFile.open(_PATH) as file:
        loaded, rows = file.load(), file.rows()
        assert len(rows.tokens) == len(loaded.tokens) == loaded.n_rows
    assert _PATH.read_bytes() == data, "reading has changed the file"


def mutate(data: bytes, size: int, seed: int, change: Callable[[bytes, int], bytes]) -> bytes:
    """Change bytes; but seldom to thousands of layers: every one is some objects, and that is all there is to it."""
    out = bytearray(change(data, size))
    if len(out) >= 12 and seed % 32:
        layers = struct.unpack_from("<I", out, 8)[0]
        if 64 < layers <= 4096:
            struct.pack_into("<I", out, 8, layers % 64)
    return bytes(out)

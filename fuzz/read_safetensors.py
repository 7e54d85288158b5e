"""Plain safetensors that kvsnap wrote. The fuzzer changes bytes, or the JSON of header and metadata as JSON."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvsnap.formats import colikv, mlxkv, native
from kvsnap.formats.native import MemorySink, plain
from kvsnap.formats.safetensors import FORMAT
from parts import DATA, change_json, read_whole, write_again


def seeds() -> list[Path]:
    """Golden files of the other formats, converted."""
    made = []
    directory = Path(tempfile.mkdtemp())
    for name in ("tiny.kvsnap", "tiny_session.kvsnap", "mlxkv/v3_q8.mlxkv", "mlxkv/v3_native_heads_bf16.mlxkv",
                 "colikv/v1_dsa_all_layers.coli_kv"):  # fmt: skip
        form = {"kvsnap": native, "mlxkv": mlxkv, "coli_kv": colikv}[name.rpartition(".")[2]]
        sink = MemorySink()
        FORMAT.write(form.loads((DATA / name).read_bytes()), sink)
        path = directory / f"{Path(name).stem}.safetensors"
        path.write_bytes(sink.data)
        made.append(path)
    return made


def one_input(data: bytes) -> None:
    """Read all and write it again."""
    snapshot = FORMAT.loads(data)
    read_whole(snapshot)
    write_again(FORMAT, snapshot)
    write_again(plain.FORMAT, snapshot)


def mutate(data: bytes, size: int, seed: int, change: Callable[[bytes, int], bytes]) -> bytes:
    """Change bytes, the header, or the metadata inside the header."""
    way = seed % 4
    length = struct.unpack_from("<Q", data)[0] if len(data) > 8 else 0
    if way == 0 or not 2 <= length <= len(data) - 8:
        return change(data, size)
    header, rest = data[8 : 8 + length], data[8 + length :]
    if way == 1:
        header = change_json(header, seed)
    elif way == 2:
        try:
            table = json.loads(header)
            table["__metadata__"]["kvsnap"] = change_json(table["__metadata__"]["kvsnap"].encode(), seed).decode()
            header = json.dumps(table).encode()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            header = change(header, size)
    else:
        rest = change(rest, size)
    return (struct.pack("<Q", len(header)) + header + rest)[:size]

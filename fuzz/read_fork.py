"""Forks and their parents: the input lies under its own id beside an intact parent, a fork and a fork of the fork.

It is read by itself, and as the parent: of the fork that is there, where it took the place of a file of that id, and of
a fork that is made to fit it.
"""

from __future__ import annotations

import hashlib
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import xxhash

from checks import check_file
from parts import scratch
from sealing import BASE, COMMIT, joined, mutated, split
from seeds import damaged, forks

_directory = scratch()
_HERE = Path(_directory.name)
_FILES = {path.name: path.read_bytes() for path in forks()}
_NAMES = [path.name for path in forks()]
_FORK = forks()[1].read_bytes()
_CHILD = "ff" * 16 + ".kvsnap"


def seeds() -> list[Path]:
    """Parent, fork, fork of the fork, and damaged copies of each."""
    directory = Path(tempfile.mkdtemp())
    made = list(forks())
    for depth, path in enumerate(forks()):
        for name, data in damaged(path.read_bytes()):
            made.append(directory / f"{depth}-{name}.kvsnap")
            made[-1].write_bytes(data)
    return made


def fitting_fork(parent: bytes) -> bytes | None:
    """A fork of the last commit of `parent` that keeps all of it; None where there is no such commit."""
    _, pieces, _ = split(parent)
    commit = next((p for p in reversed(pieces) if p.kind == COMMIT and len(p.payload) >= 192), None)
    if commit is None:
        return None
    at = {p.at: p for p in pieces}
    number, n_tail = *struct.unpack_from("<Q", commit.payload), *struct.unpack_from("<I", commit.payload, 36)
    counts = struct.unpack_from("<QQQq", commit.payload, 40)
    kept, base = struct.unpack_from("<QQ", commit.payload, 112)
    digest = bytes(commit.payload[136:152])
    depth, inherited = 1, 0
    if base in at and at[base].kind == BASE and len(at[base].payload) == 128:
        depth += struct.unpack_from("<I", at[base].payload, 88)[0]
        inherited = struct.unpack_from("<Q", at[base].payload, 48)[0]
    header, own, _ = split(_FORK)
    first, second, third = own[0], own[1], own[2]  # BASE, COMMIT, footer
    header[40:56] = bytes.fromhex(_CHILD[:32])
    first.payload[:] = struct.pack(
        "<16sQQ16sQQQ16sI36s", parent[40:56], number, commit.at,
        xxhash.xxh3_128_digest(bytes(commit.head + commit.payload)), (inherited + kept + n_tail) % 2**64, *counts[:2],
        digest, depth % 2**32, bytes(36),
    )  # fmt: skip
    struct.pack_into("<QQQq", second.payload, 40, *counts)
    return joined(header, [first, second, third], b"")


def one_input(data: bytes) -> None:
    """Everything of `checks`, for the input and for the forks of it."""
    for old in _HERE.iterdir():
        old.unlink()
    for name, intact in _FILES.items():
        (_HERE / name).write_bytes(intact)
    path = _HERE / f"{data[40:56].ljust(16, bytes(1)).hex()}.kvsnap"
    path.write_bytes(data)
    dice = hashlib.sha256(data).digest()[1] % 3
    if dice < 2 or path.name not in _NAMES:
        check_file(path)
    if dice != 1 and path.name in _NAMES[:-1]:
        check_file(_HERE / _NAMES[_NAMES.index(path.name) + 1])
    child = fitting_fork(data) if dice else None
    if child is not None:
        (_HERE / _CHILD).write_bytes(child)
        check_file(_HERE / _CHILD)


def mutate(data: bytes, size: int, seed: int, plain: Callable[[bytes, int], bytes]) -> bytes:
    """As for native files; the id of the file seldom changes, since the forks name it."""
    out = plain(data, size) if seed % 8 == 0 else mutated(data, size, seed, plain)
    if seed % 64 and len(data) >= 56 and len(out) >= 128:
        header, pieces, rest = split(out[:40] + data[40:56] + out[56:])
        return joined(header, pieces, rest)[:size] if seed % 8 else out[:40] + data[40:56] + out[56:]
    return out

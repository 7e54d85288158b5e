"""Encrypted snapshots: with the right key, with another one and without; changed under the seal and outside of it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import kvsnap
from checks import attempt, check_file, load_whole
from kvsnap.errors import KvsnapError
from parts import KEY, scratch
from sealing import mutated
from seeds import damaged, encrypted

_directory = scratch()
_PATH = Path(_directory.name) / "a.kvsnap"
_OTHER = bytes(32)


def seeds() -> list[Path]:
    """A snapshot under each cipher, and damaged copies of one."""
    directory, made = Path(tempfile.mkdtemp()), []
    for i, raw in enumerate(encrypted()):
        for name, data in [("whole", raw), *(damaged(raw) if not i else ())]:
            made.append(directory / f"{i}-{name}.kvsnap")
            made[-1].write_bytes(data)
    return made


def one_input(data: bytes) -> None:
    """Everything of `checks` with the key; without it nothing but the frame; with another one nothing."""
    _PATH.write_bytes(data)
    closed = attempt(lambda: kvsnap.verify(_PATH))
    is_encrypted = len(data) >= 128 and bool(data[16] & 1)
    if not is_encrypted:
        check_file(_PATH)
        assert isinstance(attempt(lambda: kvsnap.load(_PATH, key=KEY)), KvsnapError), "a key to what is not encrypted"
        return
    check_file(_PATH, key=KEY)
    for key in (None, _OTHER):
        assert isinstance(attempt(lambda key=key: kvsnap.load(_PATH, key=key)), KvsnapError), "read without the key"
        assert isinstance(attempt(lambda key=key: kvsnap.inspect(_PATH, key=key)), KvsnapError), "told without the key"
    assert isinstance(attempt(lambda: kvsnap.verify(_PATH, key=_OTHER)), KvsnapError), "verified with another key"
    assert isinstance(attempt(lambda: kvsnap.repair(_PATH, _PATH.with_name("out"))), KvsnapError), "repaired sealed"
    opened = attempt(lambda: kvsnap.verify(_PATH, key=KEY))
    if not isinstance(opened, KvsnapError) and not opened.damages:
        assert not isinstance(closed, KvsnapError), f"whole with the key, and from outside: {closed}"
        assert not closed.damages, closed.damages
    attempt(lambda: load_whole(_PATH, mmap=True, key=KEY))


def mutate(data: bytes, size: int, seed: int, plain: Callable[[bytes, int], bytes]) -> bytes:
    """Change what is sealed and seal it again; one time in eight change what is stored."""
    return plain(data, size) if seed % 8 == 0 else mutated(data, size, seed, plain)

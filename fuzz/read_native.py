"""Native files, snapshots and sessions, with checksums that are right (see `sealing`) and with those of the input."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvsnap import formats
from kvsnap.errors import KvsnapError
from kvsnap.formats import native
from kvsnap.formats.native import BytesReader, NativeFile, verify_file
from kvsnap.formats.native.plain import FORMAT
from kvsnap.session import Session
from parts import DATA, read_whole, write_again
from sealing import mutated

_directory = tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)  # noqa: S108
_PATH = Path(_directory.name) / "a.kvsnap"


def seeds() -> list[Path]:
    """The golden files, and every golden file of another format that converts to a small one."""
    made = [DATA / "tiny.kvsnap", DATA / "tiny_session.kvsnap"]
    directory = Path(tempfile.mkdtemp())
    for path in (DATA / "mlxkv" / "v3_q8.mlxkv", DATA / "colikv" / "v1_dsa_all_layers.coli_kv"):
        for codec in ("exact", "q8"):
            target = directory / f"{path.stem}-{codec}.kvsnap"
            target.write_bytes(native.dumps(formats.format_of(path).load(str(path)), codec=codec))
            made.append(target)
    return made


def one_input(data: bytes) -> None:
    """Verify, read, list the history, write again. What verifies without a damage can be read whole."""
    damages: tuple[object, ...] = ("the file does not open",)
    with contextlib.suppress(KvsnapError):
        damages = verify_file(NativeFile(BytesReader(data), mapped=False)).damages
    try:
        snapshot = native.loads(data)
        read_whole(snapshot)
        write_again(FORMAT, snapshot)
    except KvsnapError as error:
        assert damages, f"verify finds nothing, and reading says: {error}"
    _PATH.write_bytes(data)
    with Session.open(_PATH, readonly=True) as session:
        assert session.history
        assert len(session.tokens) == session.n_tokens


def mutate(data: bytes, size: int, seed: int, plain: Callable[[bytes, int], bytes]) -> bytes:
    """Change one record as a record and put the checksums right; one time in eight leave them wrong."""
    return plain(data, size) if seed % 8 == 0 else mutated(data, size, seed, plain)

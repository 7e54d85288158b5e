"""Native files, snapshots and sessions, with checksums that are right (see `sealing`) and with those of the input."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from checks import check_file
from kvsnap import formats
from kvsnap.formats import native
from kvsnap.formats.native.plain import FORMAT
from parts import DATA, read_whole, scratch, write_again
from sealing import mutated
from seeds import damaged, long_session, session

_directory = scratch()
_PATH = Path(_directory.name) / "a.kvsnap"


def seeds() -> list[Path]:
    """The golden files, golden files of other formats that convert to small ones, sessions, whole and damaged."""
    made = [DATA / "tiny.kvsnap", DATA / "tiny_session.kvsnap"]
    directory = Path(tempfile.mkdtemp())

    def add(name: str, data: bytes) -> None:
        made.append(directory / f"{name}.kvsnap")
        made[-1].write_bytes(data)

    for path in (DATA / "mlxkv" / "v3_q8.mlxkv", DATA / "colikv" / "v1_dsa_all_layers.coli_kv"):
        for codec in ("exact", "q8"):
            add(f"{path.stem}-{codec}", native.dumps(formats.format_of(path).load(str(path)), codec=codec))
    add("session", session())
    add("recurrent", session(recurrent=True))
    add("long", long_session())
    for name, data in damaged(session()):
        add(f"damaged-{name}", data)
    return made


def one_input(data: bytes) -> None:
    """Everything of `checks`, and from memory; write it again."""
    _PATH.write_bytes(data)
    check_file(_PATH)
    snapshot = native.loads(data)
    read_whole(snapshot)
    write_again(FORMAT, snapshot)


def mutate(data: bytes, size: int, seed: int, plain: Callable[[bytes, int], bytes]) -> bytes:
    """Change one record as a record and put the checksums right; one time in eight leave them wrong."""
    return plain(data, size) if seed % 8 == 0 else mutated(data, size, seed, plain)

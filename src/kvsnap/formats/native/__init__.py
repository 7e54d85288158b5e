"""The native file, `.kvsnap`: docs/spec/file.md. One commit for a snapshot, many for a session (`kvsnap.session`)."""

from __future__ import annotations

import os

from kvsnap import codecs
from kvsnap.errors import DamagedError, FormatError, InputError
from kvsnap.files import Reader, replacing
from kvsnap.formats.native.assemble import snapshot_of
from kvsnap.formats.native.closed import verify_closed
from kvsnap.formats.native.live import check_whole
from kvsnap.formats.native.read import BytesReader, NativeFile
from kvsnap.formats.native.repair import RepairReport, repair_file
from kvsnap.formats.native.sealed import Lock, lock_of
from kvsnap.formats.native.vault import is_encrypted
from kvsnap.formats.native.verify import Damage, VerifyReport, verify_file
from kvsnap.formats.native.write import MemorySink, SaveReport, write_snapshot
from kvsnap.layout import Snapshot
from kvsnap.protocols import Progress
from kvsnap.records import MAGIC, SESSION, read_header

__all__ = [
    "BytesReader", "Damage", "Lock", "MemorySink", "NativeFile", "RepairReport", "SaveReport", "VerifyReport", "dumps",
    "is_encrypted", "is_session", "load", "loads", "lock_of", "repair_file", "save", "sniff", "verify_closed",
    "verify_file",
]  # fmt: skip

NAME = "native"
_RESERVE_FROM = 1 << 20


def sniff(head: bytes) -> bool:
    """Tell whether a file that starts with these bytes is one of ours."""
    return head.startswith(MAGIC)


def is_session(reader: Reader) -> bool:
    """Tell whether this is a session of ours that can be opened; anything else is not."""
    try:
        return sniff(reader.read_at(0, min(reader.size, len(MAGIC)))) and read_header(reader).use == SESSION
    except (DamagedError, FormatError):
        return False


def save(
    snapshot: Snapshot,
    path: str | os.PathLike[str],
    *,
    codec: str | None = None,
    sync: bool = True,
    progress: Progress | None = None,
    lock: Lock | None = None,
) -> SaveReport:
    """Write a sealed file durably: under a temporary name, synced, then renamed; on an error nothing has changed.

    `codec` is `exact` (the default) or `q8`; with `lock` the file is encrypted. Raise `InputError`, `MissingError` (no
    such directory), `StorageError`, or `ExtraMissingError`.
    """
    name = codecs.codec_of_name(codec or "exact").name
    with replacing(path, sync=sync) as writer:
        least = _least(snapshot, name)
        if least >= _RESERVE_FROM:
            writer.reserve(least)
        return write_snapshot(snapshot, writer, codec=name, path=os.fspath(path), progress=progress, lock=lock)


def _least(snapshot: Snapshot, wanted: str) -> int:
    """Return bytes that the parts take at least."""
    least = 0
    for tensor in snapshot.tensors():
        codec = codecs.codec_for(wanted, tensor.spec)
        stored = codec.stored_size(tensor.spec, tensor.n_rows)
        least += -(-tensor.nbytes // codec.expansion) if stored is None else stored
    return least


def dumps(snapshot: Snapshot, *, codec: str | None = None, lock: Lock | None = None) -> bytes:
    """Return the bytes of a sealed file; with `lock` they are encrypted."""
    sink = MemorySink()
    write_snapshot(snapshot, sink, codec=codec, lock=lock)
    return bytes(sink.data)


def load(path: str | os.PathLike[str], *, mmap: bool = True, key: bytes | None = None) -> Snapshot:
    """Open a file and return its snapshot; tensors are read, and checked, when they are first used.

    With `mmap` the exact tensors of a sealed file are views of the mapped file. A session is read at its last commit.
    An encrypted file needs its key (32 bytes), and a key an encrypted file; its tensors are never views of the file.
    Raise `UnsupportedError` where the state at the end was left out: the last commit of a compacted file is damaged.
    """
    file = NativeFile.open(path, mapped=mmap, key=key)
    check_whole(file)
    return snapshot_of(file)


def loads(data: bytes | bytearray | memoryview, *, key: bytes | None = None) -> Snapshot:
    """Return the snapshot in these bytes; tensors may be views of `data`, unless it is encrypted."""
    if not len(data):
        raise InputError("no bytes to load a snapshot from")
    file = NativeFile(BytesReader(data), key=key)
    check_whole(file)
    return snapshot_of(file)

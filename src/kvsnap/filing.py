"""Files as users see them: load, save, convert, inspect, verify, repair. `kvsnap.api` adds the engines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvsnap import formats, inspection
from kvsnap.errors import InputError, LossError
from kvsnap.files import Reader, replacing
from kvsnap.formats import native
from kvsnap.formats.native import MemorySink, RepairReport, SaveReport, VerifyReport
from kvsnap.inspection import Summary, refuse_key
from kvsnap.inspection.notebook import html_of
from kvsnap.inspection.summary import load_as
from kvsnap.layout import Snapshot, set_html, set_save
from kvsnap.protocols import Format, Loss, Progress

__all__ = ["LossReport", "convert", "dumps", "inspect", "load", "loads", "repair", "save", "verify"]

StrPath = str | os.PathLike[str]


def load(path: StrPath, *, format: str | None = None, mmap: bool = True, key: bytes | None = None) -> Snapshot:
    """Open a file (a snapshot, or a session at its last turn) and return its snapshot.

    Opening reads the index only; a tensor is read, and every byte of it checked, when it is first used. With `mmap` the
    exact tensors of a sealed file are read-only views of the mapped file. The format is judged by content; `format`
    demands one. Raise `MissingError`, `FormatError` (not a file that kvsnap reads), `VersionError`, `DamagedError`
    (also later, when a damaged tensor is used).

    `key` (32 bytes; `kvsnap.crypto.read_key`) opens an encrypted file. Raise `KeyNeededError` without it or with
    another one, `TamperedError` for bytes that are not what was sealed, and `InputError` for a key to a file that is
    not encrypted: it may have been put in place of one that is.
    """
    found = formats.format_of(path) if format is None else formats.format_named(format)
    return load_as(found, path, key, mmap=mmap)


def loads(data: bytes | bytearray | memoryview, *, format: str | None = None, key: bytes | None = None) -> Snapshot:
    """Return the snapshot in these bytes, as `load` does."""
    if not len(data):
        raise InputError("no bytes to load a snapshot from")
    head = bytes(memoryview(data)[: formats.HEAD])
    found = formats.format_of_bytes(head) if format is None else formats.format_named(format)
    if found.name == native.NAME:
        return native.loads(data, key=key)
    refuse_key(found.name, key)
    return found.loads(data)


def save(
    snapshot: Snapshot,
    path: StrPath,
    *,
    codec: str | None = None,
    format: str | None = None,
    version: int | None = None,
    byte_order: str | None = None,
    vocab: int | None = None,
    sync: bool = True,
    progress: Progress | None = None,
    key: bytes | None = None,
    cipher: str | None = None,
    label: str | None = None,
) -> SaveReport:
    """Write a sealed snapshot durably; whatever happens, the name holds the old file or the whole new one.

    `codec` is `exact` (the default of the native format) or `q8` (int8 with a scale per head: about a quarter of
    float32, not exact; the report gives the bound). Other formats have codecs, versions and byte orders of their own;
    what they cannot hold is in `SaveReport.losses`. `sync=False` leaves out the fsyncs, and with them the promise to
    survive a power cut. With `key` (32 bytes) a native file is encrypted, by `cipher` (`aes-256-gcm`, the default, or
    `chacha20-poly1305`); `label` tells people which key is meant, and stays in clear. Raise `InputError`,
    `MissingError` (no such directory), `StorageError` (no space, no permission), `ExtraMissingError`.
    """
    lock = native.lock_of(key, cipher, label)
    _refuse_session(path)
    if format in (None, native.NAME):
        if version not in (None, 1) or byte_order not in (None, "little"):
            raise InputError("the native format is little-endian and has version 1", found=version or byte_order)
        return native.save(snapshot, path, codec=codec, sync=sync, progress=progress, lock=lock)
    target = formats.format_named(str(format))
    refuse_key(target.name, lock)
    losses = target.losses(snapshot, codec=codec, version=version)
    with replacing(path, sync=sync) as writer:
        nbytes = target.write(
            snapshot, writer, codec=codec, version=version, byte_order=byte_order, progress=progress, vocab=vocab
        )
    return _foreign_report(snapshot, os.fspath(path), target.name, nbytes, losses)


def _refuse_session(path: StrPath) -> None:
    """A file that keeps a history is not replaced by one that does not."""
    if os.path.isfile(path):
        with Reader(path) as reader:
            if native.is_session(reader):
                raise InputError(
                    "this is a session, and its history would be lost: append to it, or use another name", path=path
                )


def _foreign_report(snapshot: Snapshot, path: str, name: str, nbytes: int, losses: Sequence[Loss]) -> SaveReport:
    bound = max([snapshot.bound, *(loss.bound for loss in losses)])
    changed = any(loss.kind in ("precision", "rows") for loss in losses)
    return SaveReport(
        path=path,
        format=name,
        nbytes=nbytes,
        tensor_bytes=snapshot.nbytes,
        n_tokens=len(snapshot.tokens),
        n_rows=snapshot.n_rows,
        exact=not changed and not bound,
        bound=bound,
        losses=tuple(losses),
    )


def dumps(
    snapshot: Snapshot,
    *,
    codec: str | None = None,
    format: str | None = None,
    version: int | None = None,
    byte_order: str | None = None,
    vocab: int | None = None,
    key: bytes | None = None,
    cipher: str | None = None,
    label: str | None = None,
) -> bytes:
    """Return the bytes that `save` would write."""
    sink = MemorySink()
    target = formats.format_named(format or native.NAME)
    lock = _lock_for(target, key, cipher, label)
    target.write(snapshot, sink, codec=codec, version=version, byte_order=byte_order, vocab=vocab, **lock)
    return bytes(sink.data)


def _lock_for(target: Format, key: bytes | None, cipher: str | None, label: str | None) -> dict[str, Any]:
    """Return what `write` of a format is told about encryption: nothing, unless it is the native one."""
    lock = native.lock_of(key, cipher, label)
    if target.name == native.NAME:
        return {"lock": lock}
    refuse_key(target.name, lock)
    return {}


@dataclass(frozen=True, slots=True)
class LossReport:
    """What a conversion wrote, and what the target cannot hold. False in a condition when nothing was lost."""

    source: str
    target: str
    source_format: str
    target_format: str
    nbytes: int
    losses: tuple[Loss, ...]

    def __bool__(self) -> bool:
        return bool(self.losses)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        data: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        data["losses"] = [loss.to_dict() for loss in self.losses]
        return data


def convert(
    src: StrPath,
    dst: StrPath,
    *,
    format: str | None = None,
    codec: str | None = None,
    version: int | None = None,
    byte_order: str | None = None,
    vocab: int | None = None,
    allow_loss: bool = False,
    progress: Progress | None = None,
    key: bytes | None = None,
    out_key: bytes | None = None,
    cipher: str | None = None,
    label: str | None = None,
) -> LossReport:
    """Write the snapshot in `src` (any format) to `dst` in another format or codec, tensor by tensor.

    `version`, `byte_order` and `vocab` (size of the vocabulary, for `colikv`) are for formats that have them.
    `key` opens an encrypted `src`. `dst` is encrypted only with `out_key`; `cipher` and `label` are as in `save`.
    Raise `LossError` listing what the target cannot hold, before anything is written, unless `allow_loss`.
    """
    origin = formats.format_of(src)
    target = formats.format_named(format or native.NAME)
    lock = _lock_for(target, out_key, cipher, label)
    snapshot = load(src, format=origin.name, key=key)
    losses = target.losses(snapshot, codec=codec, version=version)
    if losses and not allow_loss:
        told = "; ".join(f"{loss.what}: {loss.detail}" for loss in losses[:6])
        raise LossError(
            f"{target.name} cannot hold everything: {told}. Allow it to go on (allow_loss=True, --allow-loss)"
        )
    _refuse_session(dst)
    with replacing(dst) as writer:
        nbytes = target.write(
            snapshot, writer, codec=codec, version=version, byte_order=byte_order, vocab=vocab, progress=progress,
            **lock,
        )  # fmt: skip
    return LossReport(os.fspath(src), os.fspath(dst), origin.name, target.name, nbytes, losses)


def inspect(path: StrPath, *, key: bytes | None = None, partial: bool = False) -> Summary:
    """Tell what a file holds: geometry, tokens, turns, sizes, identity, fidelity. No tensor byte is read.

    `key` opens an encrypted file; raise as `load` does. With `partial` a file that is encrypted and whose key is not
    there, one whose index or tables cannot be read, and a fork whose parent is gone are no errors: what can be told is
    returned, and `Summary.error` says why it is not more.
    """
    return inspection.summarise(path, key=key, partial=partial)


def verify(path: StrPath, *, progress: Progress | None = None, key: bytes | None = None) -> VerifyReport:
    """Check every byte of a file; damage is reported with tensor and token range, not raised.

    An encrypted file is checked without its key too, from outside: damage shows, tampering does not.
    """
    return inspection.verify(path, progress=progress, key=key)


def repair(path: StrPath, out: StrPath, *, keep_tokens: bool = False, progress: Progress | None = None) -> RepairReport:
    """Write what can be proven of a damaged `.kvsnap` file (session, snapshot, or fork) to the new file `out`.

    The damaged file is never changed. Kept is the longest prefix of turns of which every byte is as it was written;
    damage outside of the history costs nothing. With `keep_tokens` the ids and the text of the turns behind it stay as
    pending tokens, as far as they are whole: an engine can evaluate them again. What is lost is in the report. The new
    file is read back and verified before it gets its name.

    Raise `InputError` when there is a file named `out`, `FormatError` for what is no `.kvsnap` file, `VersionError`,
    `DamagedError` when nothing can be kept, `MissingError` for a fork whose parent is gone, `StorageError`.
    """
    return native.repair_file(path, out, keep_tokens=keep_tokens, progress=progress)


set_save(save)
set_html(html_of)

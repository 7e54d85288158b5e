"""MLXKV001: the snapshot files of go-mlx and go-inference. Layout and rules: docs/formats/mlxkv.md.

Little-endian, or the big-endian dialect; versions 1 to 6; encodings `float32`, `q8` and `native`.
"""

from __future__ import annotations

import os

from kvsnap.files import Reader
from kvsnap.formats.mlxkv.build import plan
from kvsnap.formats.mlxkv.losses import losses_of
from kvsnap.formats.mlxkv.model import File, Head, LayerEntry, Payloads, StoredTensor
from kvsnap.formats.mlxkv.pack import CODECS, check_limits, pack, version_for
from kvsnap.formats.mlxkv.parse import parse, sniff
from kvsnap.formats.mlxkv.read import slab_differences, to_snapshot
from kvsnap.formats.native.read import BytesReader
from kvsnap.formats.native.write import MemorySink
from kvsnap.layout import Snapshot
from kvsnap.protocols import Loss, Progress, Sink

__all__ = [
    "FORMAT", "File", "Head", "LayerEntry", "MlxkvFormat", "Payloads", "StoredTensor", "dumps", "load", "loads", "pack",
    "parse", "slab_differences", "sniff", "version_for",
]  # fmt: skip


class MlxkvFormat:
    """The `Format` of MLXKV001 files."""

    name = "mlxkv"
    codecs: tuple[str, ...] = CODECS

    def sniff(self, head: bytes) -> bool:
        """Tell by the magic."""
        return sniff(head)

    def load(self, path: str, *, mmap: bool = True) -> Snapshot:
        """Open a file; tensors are read when they are first used.

        `source` keeps all that it says, so that an unchanged snapshot can be saved again byte for byte. With `mmap` the
        file must not be cut short while the snapshot is in use; go-mlx overwrites its files in place.
        """
        reader = Reader(path)
        return to_snapshot(parse(reader, mapped=mmap), reader.path)

    def loads(self, data: bytes | bytearray | memoryview) -> Snapshot:
        """Return the snapshot in these bytes, which it goes on reading from."""
        return to_snapshot(parse(BytesReader(data), mapped=True))

    def losses(self, snapshot: Snapshot, *, codec: str | None = None, version: int | None = None) -> tuple[Loss, ...]:
        """Tell what would be lost; the file has no place for sampler, text, metadata, weights and other roles."""
        return losses_of(snapshot, plan(snapshot, codec=codec, version=version))

    def write(
        self,
        snapshot: Snapshot,
        sink: Sink,
        *,
        codec: str | None = None,
        version: int | None = None,
        byte_order: str | None = None,
        progress: Progress | None = None,
        vocab: int | None = None,
    ) -> int:
        """Write a file, one tensor in memory at a time.

        `codec` None means float32; for an unchanged snapshot from such a file, every tensor as it was stored. `version`
        None means 3, or that of the file it came from, raised where the content needs a later one. `byte_order` None
        means little, or that of the file it came from. Raise `InputError` for other options, `UnsupportedError` for
        numbers that do not fit.
        """
        del vocab
        wanted = plan(snapshot, codec=codec, version=version, byte_order=byte_order)
        check_limits(wanted.file)
        total, done = wanted.nbytes, [0]

        def advance(count: int) -> None:
            if progress is not None:
                done[0] = min(total, done[0] + count)
                progress(done[0], total)

        return pack(
            wanted.file, sink, codec=wanted.codec, version=wanted.version, order=wanted.order, advance=advance
        )  # fmt: skip


FORMAT = MlxkvFormat()


def load(path: str | os.PathLike[str], *, mmap: bool = True) -> Snapshot:
    """Open a file and return its snapshot."""
    return FORMAT.load(os.fspath(path), mmap=mmap)


def loads(data: bytes | bytearray | memoryview) -> Snapshot:
    """Return the snapshot in these bytes."""
    return FORMAT.loads(data)


def dumps(
    snapshot: Snapshot, *, codec: str | None = None, version: int | None = None, byte_order: str | None = None
) -> bytes:
    """Return the bytes of a file; options as in `MlxkvFormat.write`."""
    sink = MemorySink()
    FORMAT.write(snapshot, sink, codec=codec, version=version, byte_order=byte_order)
    return bytes(sink.data)

"""The native file as one of the formats that files are converted between."""

from __future__ import annotations

from kvsnap import codecs
from kvsnap.errors import InputError
from kvsnap.formats import native
from kvsnap.formats.foreign import foreign_losses
from kvsnap.formats.native.sealed import Lock
from kvsnap.formats.native.write import write_snapshot
from kvsnap.layout import Snapshot
from kvsnap.protocols import Loss, Progress, Sink

__all__ = ["FORMAT", "NativeFormat"]


class NativeFormat:
    """The `Format` of `.kvsnap` files."""

    name = native.NAME
    codecs = ("exact", "q8")

    def sniff(self, head: bytes) -> bool:
        """Our magic."""
        return native.sniff(head)

    def load(self, path: str, *, mmap: bool = True, key: bytes | None = None) -> Snapshot:
        """Open a snapshot, or a session at its last commit."""
        return native.load(path, mmap=mmap, key=key)

    def loads(self, data: bytes | bytearray | memoryview, *, key: bytes | None = None) -> Snapshot:
        """Return the snapshot in these bytes."""
        return native.loads(data, key=key)

    def losses(self, snapshot: Snapshot, *, codec: str | None = None, version: int | None = None) -> tuple[Loss, ...]:
        """A lossy codec, and what only a foreign format knows."""
        del version
        found = []
        name = codec or "exact"
        lossy = [t for t in snapshot.tensors() if codecs.codec_for(name, t.spec).name != "exact"]
        if lossy:
            bits = f"{len(lossy)} tensors are stored as {name}; their bound is known once they are written"
            found.append(Loss("precision", "tensors", bits, float("inf")))
        found += foreign_losses(snapshot, self.name)
        return tuple(found)

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
        lock: Lock | None = None,
    ) -> int:
        """Write a sealed file; with `lock` it is encrypted."""
        del vocab
        if version not in (None, 1) or byte_order not in (None, "little"):
            raise InputError("the native format is little-endian and has version 1", found=version or byte_order)
        return write_snapshot(snapshot, sink, codec=codec, progress=progress, lock=lock).nbytes


FORMAT = NativeFormat()
"""The one instance; it holds no state."""

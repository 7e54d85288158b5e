"""`.coli_kv` files as snapshots: the `Format` of that name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing

from kvsnap.errors import InputError, UnsupportedError
from kvsnap.files import Reader
from kvsnap.formats.colikv.deepseek import read_deepseek
from kvsnap.formats.colikv.geometry import Geometry
from kvsnap.formats.colikv.header import (
    DEEPSEEK_MAGIC,
    HEADER_SIZE,
    Header,
    encoding_of,
    is_colikv,
    parse_header,
)
from kvsnap.formats.colikv.reading import outline_of, snapshot_of, with_index_layers
from kvsnap.formats.colikv.records import ByteSource, BytesSource, Unchanged
from kvsnap.formats.colikv.rows import Encoding
from kvsnap.formats.colikv.writing import content_of, losses_of, stored_records, write_snapshot
from kvsnap.formats.native.write import MemorySink
from kvsnap.layout import Snapshot
from kvsnap.protocols import Loss, Progress, Sink

__all__ = ["FORMAT", "ColikvFormat", "dumps", "load", "loads"]

_VERSIONS = {1: ("float32",), 2: ("fp8",), 3: ("int4", "polar")}


def _snapshot(
    source: ByteSource,
    size: int,
    path: str | None,
    geometry: Geometry | None,
    index_layers: Sequence[int] | None,
    dialect: str | None,
) -> Snapshot:
    if dialect not in {None, "fp8", "watermark"}:
        raise InputError("no such dialect", expected="fp8 or watermark", found=dialect)
    head, header = _header(source, size, path, dialect)
    header = with_index_layers(header, index_layers, path)
    if geometry is not None:
        header.require(geometry, path)
        header = with_index_layers(header, geometry.index_layers, path)
    has_draft = geometry is not None and geometry.has_draft
    unchanged = None if path is None else Unchanged(path, source, head)
    return snapshot_of(source, header, unchanged=unchanged, has_draft=has_draft)


def _header(source: ByteSource, size: int, path: str | None, dialect: str | None) -> tuple[bytes, Header]:
    """Read the header; return its bytes too. Raise `UnsupportedError` for a DeepSeek V4 file."""
    head = bytearray(min(size, HEADER_SIZE))
    source.read_into(0, head)
    if head[:8] == DEEPSEEK_MAGIC:
        found = read_deepseek(source, size, path, rows=False)
        raise UnsupportedError(
            f"a DeepSeek V4 file (COLIDV41) is recognised, its layers are not loaded as a snapshot: {found}", path=path
        )
    return bytes(head), parse_header(bytes(head), size, path=path, dialect=dialect)


def load(
    path: str | os.PathLike[str],
    *,
    geometry: Geometry | None = None,
    like: Snapshot | None = None,
    index_layers: Sequence[int] | None = None,
    dialect: str | None = None,
) -> Snapshot:
    """Open a file without a lock and return its usable records; rows are read when they are first used.

    A file that is written to in between is noticed then (`ConflictError`). With `geometry`, or with a snapshot that it
    must be `like` (`engine.capture()` of the model, empty or not), the file must be of that model (`CompatibilityError`
    naming each number); `index_layers` says which layers own the index rows, where none of the two does; `dialect`
    (`fp8` or `watermark`) what a COLIKV2 file is where its size does not tell. Raise `MissingError`, `InputError` (a
    symbolic link), `FormatError`, `VersionError`, `DamagedError` (cut off inside the header), `UnsupportedError`.
    """
    text = os.fspath(path)
    model = _model(geometry, like)
    reader = Reader(text, follow_symlinks=False)
    return _snapshot(reader, reader.size, text, model, index_layers, dialect)


def loads(
    data: bytes | bytearray | memoryview,
    *,
    geometry: Geometry | None = None,
    like: Snapshot | None = None,
    index_layers: Sequence[int] | None = None,
    dialect: str | None = None,
) -> Snapshot:
    """Return the usable records in these bytes, as `load` does. `data` must not change while the snapshot is used."""
    size = memoryview(data).nbytes
    return _snapshot(BytesSource(data), size, None, _model(geometry, like), index_layers, dialect)


def _model(geometry: Geometry | None, like: Snapshot | None) -> Geometry | None:
    if geometry is not None and like is not None:
        raise InputError("the model is told twice: give geometry or like")
    return geometry if like is None else Geometry.of(like)


def _chosen(snapshot: Snapshot, codec: str | None, version: int | None) -> Encoding:
    records = stored_records(snapshot) if codec is None and version is None else None
    if records is not None:
        return records.header.encoding
    if version is not None and version not in _VERSIONS:
        raise InputError("no such version of COLIKV", expected="1, 2 or 3", found=version)
    name, _, bits = (codec or _VERSIONS[version or 1][0]).partition(":")
    if bits and not (bits.isascii() and bits.isdigit()):
        raise InputError("a codec with bits is polar:2 or the like", found=codec)
    encoding = encoding_of(name, int(bits[:4]) if bits else None)
    if version is not None and encoding.version != version:
        expected = f"{' or '.join(_VERSIONS[version])} in version {version}"
        raise InputError("this codec belongs to another version", expected=expected, found=encoding.name)
    return encoding


class ColikvFormat:
    """The `Format` `colikv`. Codecs: `float32`, `fp8`, `int4`, `polar` (4 bits; `polar:3` for another number).

    None means float32; for an unchanged snapshot from such a file, every record as it is stored.
    """

    name = "colikv"
    codecs = ("float32", "fp8", "int4", "polar")

    def sniff(self, head: bytes) -> bool:
        """Tell a `.coli_kv` file by its magic, also of kinds and versions that are then refused by name."""
        return is_colikv(head) or head[:6] == b"COLIKV"

    def load(self, path: str, *, mmap: bool = True) -> Snapshot:
        """As `load`. Never mapped: such a file may be written to at any time."""
        del mmap
        return load(path)

    def loads(self, data: bytes | bytearray | memoryview) -> Snapshot:
        """As `loads`."""
        return loads(data)

    def outline(self, path: str) -> tuple[Snapshot, int]:
        """Return what the header tells, and the number of usable records: a snapshot without its ids and its values.

        Each record begins with its id, so all ids would be a read in every record; only some are looked at. What fp8
        may have put into a value is not computed: `bound` is infinite. Raise as `load` does.
        """
        with closing(Reader(path, follow_symlinks=False)) as reader:
            _, header = _header(reader, reader.size, path, None)
            return outline_of(reader, header), header.n_usable

    def losses(self, snapshot: Snapshot, *, codec: str | None = None, version: int | None = None) -> tuple[Loss, ...]:
        """Tell what would be lost; `UnsupportedError` where the snapshot cannot be written at all."""
        encoding = _chosen(snapshot, codec, version)
        return losses_of(snapshot, encoding, content_of(snapshot, for_writing=False))

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
        """Write a whole file; `vocab` is needed where the snapshot does not know the size of the vocabulary."""
        if byte_order not in {None, "little"}:
            raise InputError("a .coli_kv file is little-endian", expected="little", found=byte_order)
        return write_snapshot(snapshot, sink, _chosen(snapshot, codec, version), vocab=vocab, progress=progress)


FORMAT = ColikvFormat()


def dumps(
    snapshot: Snapshot, *, codec: str | None = None, version: int | None = None, vocab: int | None = None
) -> bytes:
    """Return the bytes of a file; options as in `ColikvFormat.write`."""
    sink = MemorySink()
    FORMAT.write(snapshot, sink, codec=codec, version=version, vocab=vocab)
    return bytes(sink.data)

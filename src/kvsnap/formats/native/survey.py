"""What is left of a damaged file: its header as far as it can be proven, and every record whose header is whole.

Spec sections 2, 3, 11 and 14. One pass over the headers; payloads are stepped over, and where no record starts the
search goes on in steps of 64 bytes. Nothing here is larger than the file allows.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from kvsnap.errors import DamagedError, FormatError, VersionError
from kvsnap.formats.native.readers import FileReader
from kvsnap.formats.native.tables import Commit, parse_commit
from kvsnap.records import (
    FOOTER_MAGIC,
    FOOTER_SIZE,
    HEADER_SIZE,
    MAGIC,
    RECORD_MAGIC,
    RECORD_SIZE,
    SESSION,
    FileHeader,
    Footer,
    Kind,
    RecordHeader,
    commit_digest,
    parse_footer,
    parse_record_header,
    read_header,
    read_record,
    record_end,
    seeded,
)

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["Patched", "Survey", "prove_header"]

_FIRST, _LARGEST = 1 << 10, 1 << 20
_RECORD_WORD = int.from_bytes(RECORD_MAGIC, "little")
_FOOTER_WORD = int.from_bytes(FOOTER_MAGIC, "little")
_WITNESSES = 16
_MASK = 0xFFFFFFFF
_U64 = struct.Struct("<Q")


class Patched:
    """A file whose header is taken for another one. Nothing on the disk changes."""

    def __init__(self, reader: FileReader, header: FileHeader) -> None:
        self.path, self.size = reader.path, reader.size
        self._reader, self._head = reader, header.pack()

    def read_at(self, offset: int, length: int) -> bytes:
        """Return bytes as the file would hold them with that header."""
        data = self._reader.read_at(offset, length)
        if offset >= HEADER_SIZE:
            return data
        head = self._head[offset : offset + length]
        return head + data[len(head) :]

    def read_into(self, offset: int, buffer: WriteableBuffer) -> int:
        """Fill the buffer."""
        view = memoryview(buffer).cast("B")
        view[:] = self.read_at(offset, view.nbytes)
        return view.nbytes

    def map(self) -> memoryview:
        """Return the file as it is on the disk: only what lies behind the header may be used."""
        return self._reader.map()


# -- the header ------------------------------------------------------------------------------------------------


def prove_header(reader: FileReader) -> tuple[FileHeader, bool]:
    """Return the file header, and whether it is whole.

    Of a damaged one the salt counts, which the checksums of records prove; a salt with one changed byte is found so,
    too. The use is then that of a session: the COMMIT says whether the file is sealed. Raise `FormatError` or
    `DamagedError` where no record proves a salt, and for a whole header what `read_header` raises.
    """
    raw = reader.read_at(0, min(reader.size, HEADER_SIZE))
    if len(raw) < HEADER_SIZE or _U64.unpack_from(raw, 120)[0] == xxhash.xxh3_64_intdigest(raw[:120]):
        return read_header(reader), True
    witnesses = list(_witnesses(reader))
    for salt in _salts(raw[56:64]):
        if any(_U64.unpack_from(record, 56)[0] == seeded(record[:56], salt, place) for place, record in witnesses):
            return FileHeader(SESSION, raw[40:56], salt, 0), False
    if raw[: len(MAGIC)] != MAGIC:
        raise FormatError("not a .kvsnap file", path=reader.path, offset=0, expected=MAGIC.hex(" "))
    raise DamagedError("the file header is damaged, and no record proves its salt", path=reader.path, offset=56)


def _salts(raw: bytes) -> Iterator[int]:
    yield _U64.unpack(raw)[0]
    for place in range(8):
        for value in range(256):
            yield _U64.unpack(raw[:place] + bytes([value]) + raw[place + 1 :])[0]


def _witnesses(reader: FileReader) -> Iterator[tuple[int, bytes]]:
    """Yield the first places where a record seems to start, with its header."""
    found = 0
    for place, is_record, raw in _marks(reader, HEADER_SIZE):
        if is_record:
            yield place, raw
            found += 1
        if found == _WITNESSES:
            return


def _marks(reader: FileReader, offset: int) -> Iterator[tuple[int, bool, bytes]]:
    """Yield each multiple of 64 from `offset` on where a record or a footer seems to start: which, and its bytes."""
    stop, window = reader.size & ~63, _FIRST
    while offset < stop:
        length = min(window, stop - offset)
        data = reader.read_at(offset, length)
        words = np.frombuffer(data, "<u8")[::8]
        records = words & np.uint64(_MASK) == _RECORD_WORD
        for hit in np.flatnonzero(records | (words == _FOOTER_WORD)).tolist():
            yield offset + 64 * hit, bool(records[hit]), data[64 * hit : 64 * hit + 64]
        offset, window = offset + length, min(2 * window, _LARGEST)


# -- the records -------------------------------------------------------------------------------------------------


class Survey:
    """Every record of a file whose header is whole, in order, and every footer; nothing is kept of what they hold.

    `footers` are by their offset, `gaps` counts the places where records were missing.
    """

    def __init__(self, reader: FileReader, header: FileHeader) -> None:
        """Go through the file. Raise `VersionError` for a record of a kind that must be known."""
        self.reader, self.header = reader, header
        self._offsets, self._commits, self._kinds = array("Q"), array("Q"), bytearray()
        self.footers: dict[int, Footer] = {}
        self.gaps = 0
        offset = HEADER_SIZE
        while offset + RECORD_SIZE <= reader.size:
            record = self._record(offset, reader.read_at(offset, RECORD_SIZE))
            if record is None:
                self.gaps += 1
                offset = self._next(offset)
                continue
            self._offsets.append(offset)
            self._commits.append(record.commit)
            self._kinds.append(record.kind)
            offset = record_end(offset, record)
            if record.kind == Kind.COMMIT:
                if offset + FOOTER_SIZE <= reader.size:
                    self._note_footer(offset, reader.read_at(offset, FOOTER_SIZE))
                offset += FOOTER_SIZE

    def _record(self, offset: int, raw: bytes) -> RecordHeader | None:
        if raw[:4] != RECORD_MAGIC:
            return None
        try:
            record = parse_record_header(raw, self.header.salt, offset, self.reader.path)
        except VersionError:
            raise
        except (DamagedError, FormatError):
            return None
        return record if offset + RECORD_SIZE + record.length <= self.reader.size else None

    def _next(self, offset: int) -> int:
        """Return the next place behind `offset` where a record starts; footers on the way are noted."""
        for place, is_record, raw in _marks(self.reader, offset):
            if not is_record:
                self._note_footer(place, raw)
            elif place > offset and self._record(place, raw) is not None:
                return place
        return self.reader.size

    def _note_footer(self, place: int, raw: bytes) -> None:
        footer = parse_footer(raw, self.header.salt, place)
        if footer is not None:
            self.footers[place] = footer

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Yield (offset, kind, number of the commit) of each record."""
        return zip(self._offsets, self._kinds, self._commits, strict=True)

    def of_kind(self, kind: int) -> list[int]:
        """Return the offsets of the records of a kind."""
        return [self._offsets[i] for i, found in enumerate(self._kinds) if found == kind]

    def commit_at(self, offset: int) -> tuple[Commit, bytes, int]:
        """Return a COMMIT, its digest, and where its footer should stand. Raise `DamagedError` or `FormatError`."""
        record, payload = read_record(self.reader, self.header, offset, kind=Kind.COMMIT)
        commit = parse_commit(payload, self.reader.path, offset + RECORD_SIZE)
        if commit.number != record.commit:
            raise FormatError(
                "COMMIT and its record disagree in the number", path=self.reader.path, offset=offset,
                expected=record.commit, found=commit.number,
            )  # fmt: skip
        digest = commit_digest(record.pack(self.header.salt, offset), payload)
        end = record_end(offset, record)
        footer = self.footers.get(end)
        if footer is not None and (footer.digest, footer.commit_offset) != (digest, offset):
            raise DamagedError("the footer behind a COMMIT is that of another one", path=self.reader.path, offset=end)
        return commit, digest, end

"""The frame of a `.kvsnap` file: file header, record headers, footers, and how to find the published end.

docs/spec/file.md sections 2, 3, 11 and 12. Nothing here knows what a payload means.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash

from kvsnap.errors import DamagedError, FormatError, VersionError

__all__ = [
    "FOOTER_SIZE",
    "HEADER_SIZE",
    "RECORD_SIZE",
    "End",
    "FileHeader",
    "Footer",
    "Kind",
    "ReadAt",
    "RecordHeader",
    "align64",
    "find_end",
    "read_header",
    "read_record",
    "read_record_header",
    "scan",
]

MAGIC = b"\x89KVSNAP\n"
RECORD_MAGIC = b"KVR1"
FOOTER_MAGIC = b"KVEND\r\n\x1a"
MAJOR, MINOR = 1, 0
HEADER_SIZE, RECORD_SIZE, FOOTER_SIZE = 128, 64, 64
MAX_LENGTH = 2**62
CRITICAL = 1
TAIL_READ = 64 * 1024

_HEADER = struct.Struct("<8sHHIQQB7s16sQq48s")
_RECORD = struct.Struct("<4sBBHQQQQQQ")
_FOOTER = struct.Struct("<8sQQQ16sQ")
_U64 = struct.Struct("<Q")


class Kind:
    """Record kinds, section 4. Numbers on disk: append-only."""

    IDENTITY, LAYOUT, SPAN, STATE, NOTE, INDEX, COMMIT, BASE, KEY = 1, 2, 3, 4, 5, 6, 7, 8, 9


KIND_NAMES = {value: name for name, value in vars(Kind).items() if name.isupper()}
WITH_PARTS = (Kind.SPAN, Kind.STATE)
SNAPSHOT, SESSION = 1, 2
ENCRYPTED = 1  # required feature bit 0: payloads are sealed under a key
FORKED = 2  # required feature bit 1: the history starts in another file
KNOWN_FEATURES = ENCRYPTED | FORKED


class ReadAt(Protocol):
    """Ranged reads of one file. `read_at` returns exactly `length` bytes or raises `DamagedError`."""

    @property
    def path(self) -> str | None:
        """Name for messages."""

    @property
    def size(self) -> int:
        """Length when it was opened, or as last refreshed."""

    def read_at(self, offset: int, length: int) -> bytes:
        """Bytes `[offset, offset + length)`."""


def align64(offset: int) -> int:
    """Return the first multiple of 64 at or behind `offset`."""
    return (offset + 63) & ~63


def seeded(data: bytes, salt: int, offset: int) -> int:
    """Checksum of a header: tied to the file by its salt and to the place by its offset."""
    return xxhash.xxh3_64_intdigest(data, seed=(salt + offset) & 0xFFFFFFFFFFFFFFFF)


@dataclass(frozen=True, slots=True)
class FileHeader:
    """Section 2."""

    use: int
    file_id: bytes
    salt: int
    created_ns: int
    major: int = MAJOR
    minor: int = MINOR
    required: int = 0
    optional: int = 0

    def pack(self) -> bytes:
        """Return the 128 bytes at the start of a file."""
        head = _HEADER.pack(
            MAGIC, self.major, self.minor, HEADER_SIZE, self.required, self.optional, self.use, bytes(7), self.file_id,
            self.salt, self.created_ns, bytes(48),
        )  # fmt: skip
        return head + _U64.pack(xxhash.xxh3_64_intdigest(head))


def read_header(reader: ReadAt) -> FileHeader:
    """Read and check the file header.

    Raise `FormatError` (not our magic), `VersionError` (newer major version, unknown required feature), `DamagedError`
    (cut off, or a checksum that does not fit).
    """
    raw = reader.read_at(0, min(reader.size, HEADER_SIZE))
    if raw[: len(MAGIC)] != MAGIC:
        if raw and MAGIC.startswith(raw):
            raise DamagedError(
                "the file is cut off inside its header", path=reader.path, expected=HEADER_SIZE, found=len(raw)
            )
        raise FormatError(
            "not a .kvsnap file",
            path=reader.path,
            offset=0,
            expected=MAGIC.hex(" "),
            found=raw[:8].hex(" ") or "no bytes",
        )
    if len(raw) < HEADER_SIZE:
        raise DamagedError(
            "the file is cut off inside its header", path=reader.path, expected=HEADER_SIZE, found=len(raw)
        )
    fields = _HEADER.unpack_from(raw)
    major, minor = fields[1], fields[2]
    intact = _U64.unpack_from(raw, 120)[0] == xxhash.xxh3_64_intdigest(raw[:120])
    if major != MAJOR and (intact or major > MAJOR):
        hint = "" if intact else " (or a damaged header)"
        raise VersionError(
            f"written by another major version{hint}",
            path=reader.path,
            offset=8,
            expected=f"{MAJOR}.x",
            found=f"{major}.{minor}",
        )
    if not intact:
        raise DamagedError("the file header does not fit its checksum", path=reader.path, offset=120)
    _, _, _, size, required, optional, use, reserved, file_id, salt, created, rest = fields
    if required & ~KNOWN_FEATURES:
        raise VersionError(
            "needs features that this release does not know",
            path=reader.path,
            offset=16,
            expected=f"none but {KNOWN_FEATURES:#x}",
            found=hex(required),
        )
    impossible = required & FORKED and use != SESSION
    if size != HEADER_SIZE or use not in (SNAPSHOT, SESSION) or any(reserved) or any(rest) or impossible:
        raise FormatError("a header field has a value that version 1 does not know", path=reader.path, offset=12)
    return FileHeader(use, file_id, salt, created, major, minor, required, optional)


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """Section 3."""

    kind: int
    sequence: int
    length: int
    commit: int
    table_length: int
    table_checksum: int
    flags: int = 0

    def pack(self, salt: int, offset: int) -> bytes:
        """Return the 64 bytes for this record at `offset` of the file with this salt."""
        head = _RECORD.pack(
            RECORD_MAGIC, self.kind, self.flags, 0, self.sequence, self.length, self.commit, self.table_length,
            self.table_checksum, 0,
        )  # fmt: skip
        return head + _U64.pack(seeded(head, salt, offset))

    @property
    def name(self) -> str:
        return KIND_NAMES.get(self.kind, f"kind {self.kind}")


def record_end(offset: int, header: RecordHeader) -> int:
    """Return the offset behind a record and its padding."""
    return align64(offset + RECORD_SIZE + header.length)


def parse_record_header(raw: bytes, salt: int, offset: int, path: str | None) -> RecordHeader:
    """Check 64 bytes as the header of a record at `offset`. Raise `DamagedError` or `FormatError`."""
    if raw[:4] != RECORD_MAGIC:
        raise DamagedError(
            "no record starts here", path=path, offset=offset, expected=RECORD_MAGIC.hex(" "), found=raw[:4].hex(" ")
        )
    if _U64.unpack_from(raw, 56)[0] != seeded(raw[:56], salt, offset):
        raise DamagedError("a record header does not fit its checksum", path=path, offset=offset)
    _, kind, flags, reserved, sequence, length, commit, table, checksum, rest = _RECORD.unpack_from(raw)
    if reserved or rest or flags > CRITICAL:
        raise FormatError("a reserved field of a record header is set", path=path, offset=offset)
    if table > length or length > MAX_LENGTH or (kind not in WITH_PARTS and table != length):
        raise FormatError(
            "a record header has impossible lengths", path=path, offset=offset, found=f"table {table}, payload {length}"
        )
    if kind not in KIND_NAMES and flags & CRITICAL:
        raise VersionError(
            "a record of a kind that this release must know and does not", path=path, offset=offset, found=kind
        )
    return RecordHeader(kind, sequence, length, commit, table, checksum, flags)


def read_record_header(reader: ReadAt, header: FileHeader, offset: int, *, kind: int | None = None) -> RecordHeader:
    """Read the record header at `offset`; `kind` is the one expected there. The whole record lies inside the file."""
    if offset % 64 or not HEADER_SIZE <= offset <= reader.size - RECORD_SIZE:
        raise DamagedError(
            "an offset points outside the file", path=reader.path, offset=offset, found=f"{reader.size} bytes in all"
        )
    record = parse_record_header(reader.read_at(offset, RECORD_SIZE), header.salt, offset, reader.path)
    if offset + RECORD_SIZE + record.length > reader.size:
        raise DamagedError(
            f"{record.name}: the record ends behind the file", path=reader.path, offset=offset,
            expected=f"{offset + RECORD_SIZE + record.length} bytes", found=f"{reader.size} bytes",
        )  # fmt: skip
    if kind is not None and record.kind != kind:
        raise DamagedError(
            "another kind of record stands here",
            path=reader.path,
            offset=offset,
            expected=KIND_NAMES[kind],
            found=record.name,
        )
    return record


def read_record(
    reader: ReadAt, header: FileHeader, offset: int, *, kind: int | None = None, limit: int = MAX_LENGTH
) -> tuple[RecordHeader, bytes]:
    """Read a record header and its table (the whole payload, unless the kind has parts), checked."""
    record = read_record_header(reader, header, offset, kind=kind)
    if record.table_length > limit:
        raise FormatError(
            f"{record.name} is larger than allowed",
            path=reader.path,
            offset=offset,
            expected=limit,
            found=record.table_length,
        )
    table = reader.read_at(offset + RECORD_SIZE, record.table_length)
    if xxhash.xxh3_64_intdigest(table) != record.table_checksum:
        raise DamagedError(f"{record.name} does not fit its checksum", path=reader.path, offset=offset + RECORD_SIZE)
    return record, table


@dataclass(frozen=True, slots=True)
class Footer:
    """Section 11."""

    commit_offset: int
    commit: int
    file_length: int
    digest: bytes

    def pack(self, salt: int, offset: int) -> bytes:
        """Return the 64 bytes for this footer at `offset`."""
        head = _FOOTER.pack(FOOTER_MAGIC, self.commit_offset, self.commit, self.file_length, self.digest, 0)
        return head + _U64.pack(seeded(head, salt, offset))


def parse_footer(raw: bytes, salt: int, offset: int) -> Footer | None:
    """Return the footer in these 64 bytes, or None when no valid one stands here."""
    if raw[:8] != FOOTER_MAGIC or _U64.unpack_from(raw, 56)[0] != seeded(raw[:56], salt, offset):
        return None
    _, commit_offset, commit, length, digest, rest = _FOOTER.unpack_from(raw)
    if rest or length != offset + FOOTER_SIZE:
        return None
    return Footer(commit_offset, commit, length, digest)


@dataclass(frozen=True, slots=True)
class End:
    """The published end of a file: its footer, the COMMIT payload, bytes behind it, and what was wrong behind it."""

    footer: Footer
    payload: bytes
    dropped: int
    notes: tuple[str, ...] = ()


def commit_digest(record: bytes, payload: bytes) -> bytes:
    """Digest of a COMMIT: its header and payload."""
    return xxhash.xxh3_128_digest(record + payload)


def _commit_of(reader: ReadAt, header: FileHeader, footer: Footer) -> bytes:
    record = read_record_header(reader, header, footer.commit_offset, kind=Kind.COMMIT)
    if record_end(footer.commit_offset, record) != footer.file_length - FOOTER_SIZE:
        raise DamagedError("a footer does not stand behind its COMMIT", path=reader.path, offset=footer.commit_offset)
    record, payload = read_record(reader, header, footer.commit_offset, kind=Kind.COMMIT)
    if commit_digest(record.pack(header.salt, footer.commit_offset), payload) != footer.digest:
        raise DamagedError(
            "COMMIT does not fit the digest in its footer", path=reader.path, offset=footer.commit_offset
        )
    return payload


def end_at(reader: ReadAt, header: FileHeader, offset: int, digest: bytes) -> End:
    """Return the published end that a COMMIT at this offset made, whatever follows it. Raise `DamagedError`."""
    record, payload = read_record(reader, header, offset, kind=Kind.COMMIT)
    found = commit_digest(record.pack(header.salt, offset), payload)
    if found != digest:
        raise DamagedError(
            "another COMMIT stands here", path=reader.path, offset=offset, expected=digest.hex(), found=found.hex()
        )
    return End(Footer(offset, record.commit, record_end(offset, record) + FOOTER_SIZE, digest), payload, 0)


def find_end(reader: ReadAt, header: FileHeader) -> End:
    """Find the last published commit, section 12. Reads 64 KiB when the file is whole, more only when it is not.

    Raise `DamagedError` when there is none, or when a sealed file does not end in its footer.
    """
    high, window = reader.size & ~63, TAIL_READ
    below = high
    notes: list[str] = []
    while high > HEADER_SIZE:
        low = max(HEADER_SIZE, (high - window) & ~63)
        data = reader.read_at(low, high - low)
        words = np.frombuffer(data, dtype="<u8")[::8]
        for place in np.flatnonzero(words == int.from_bytes(FOOTER_MAGIC, "little"))[::-1]:
            start = int(place) * 64
            footer = parse_footer(data[start : start + FOOTER_SIZE], header.salt, low + start)
            if footer is None or footer.file_length > below:
                continue
            try:
                payload = _commit_of(reader, header, footer)
            except (DamagedError, FormatError) as error:
                if header.use == SNAPSHOT:
                    raise
                notes.append(f"commit {footer.commit} was published but cannot be read: {error.message}")
                # No footer lies inside a COMMIT: so nothing is read twice, whatever a hostile file claims.
                below = min(footer.commit_offset, footer.file_length - FOOTER_SIZE)
                continue
            dropped = reader.size - footer.file_length
            if header.use == SNAPSHOT and dropped:
                raise DamagedError(
                    "bytes follow the end of a sealed file",
                    path=reader.path,
                    offset=footer.file_length,
                    expected=0,
                    found=dropped,
                )
            return End(footer, payload, dropped, tuple(notes))
        if header.use == SNAPSHOT and window > TAIL_READ:
            break
        high, window = low, min(window * 4, 16 * 1024 * 1024)
    raise DamagedError(
        "no published commit: the file is cut off, or its last footer is damaged", path=reader.path,
        offset=reader.size & ~63, expected="a footer at the end", found=f"none in {reader.size} bytes",
    )  # fmt: skip


def scan(
    reader: ReadAt, header: FileHeader, stop: int, *, start: int = HEADER_SIZE
) -> Iterator[tuple[int, RecordHeader]]:
    """Yield (offset, header) of every record in `[start, stop)`, reading headers only. Footers are stepped over.

    Raise `DamagedError` at the first place where no valid record starts.
    """
    offset = start
    while offset < stop:
        record = read_record_header(reader, header, offset)
        yield offset, record
        offset = record_end(offset, record) + (FOOTER_SIZE if record.kind == Kind.COMMIT else 0)

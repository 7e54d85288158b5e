"""Reading encrypted `.kvsnap` files. Spec section 20.

What is read is a file of plain payloads again: `Vault` has the reads of a file, at the offsets that the plain payloads
would have behind the headers of their records.
"""

from __future__ import annotations

import os
from bisect import bisect_right, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvsnap import crypto
from kvsnap.errors import (
    DamagedError,
    FormatError,
    InputError,
    KeyNeededError,
    TamperedError,
    UnsupportedError,
    VersionError,
)
from kvsnap.files import Reader
from kvsnap.formats.native import sealed
from kvsnap.formats.native.sealed import KeyInfo, Seal
from kvsnap.records import (
    CRITICAL,
    ENCRYPTED,
    HEADER_SIZE,
    MAGIC,
    RECORD_SIZE,
    SESSION,
    WITH_PARTS,
    FileHeader,
    Kind,
    ReadAt,
    RecordHeader,
    read_header,
    read_record,
    seeded,
)

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = [
    "Clear", "Stretches", "Vault", "check_key_record", "is_encrypted", "open_vault", "read_clear", "read_key_info",
    "read_stretch", "refuse_encrypted", "stretches_of",
]  # fmt: skip


class FileReader(ReadAt, Protocol):
    """What is read from."""

    def read_into(self, offset: int, buffer: WriteableBuffer) -> int:
        """Fill the buffer from `offset` on."""

    def map(self) -> memoryview:
        """The whole file, read-only."""


@dataclass(frozen=True, slots=True)
class Stretches:
    """Where the body of one record is stored: from `start` on, `stored` bytes; `plain` is its offset in plain bytes."""

    record: RecordHeader
    offset: int
    plain: int
    start: int
    stored: int

    @property
    def count(self) -> int:
        return -(-self.stored // (sealed.STRETCH + sealed.AROUND))

    @property
    def length(self) -> int:
        """Plain bytes."""
        return self.stored - sealed.AROUND * self.count

    def piece(self, number: int) -> tuple[int, int]:
        """Return offset and stored length of a piece; they count from 1."""
        at = (number - 1) * (sealed.STRETCH + sealed.AROUND)
        return self.start + at, min(sealed.STRETCH + sealed.AROUND, self.stored - at)


def stretches_of(record: RecordHeader, offset: int, path: str | None) -> Stretches:
    """Return how the body of a record is stored. Raise `FormatError` for lengths that cannot be."""
    stored = record.length - record.table_length
    if record.table_length < crypto.OVERHEAD or 0 < stored % (sealed.STRETCH + sealed.AROUND) <= sealed.AROUND:
        raise FormatError(
            f"{record.name}: the lengths are not those of a sealed record", path=path, offset=offset,
            found=f"table {record.table_length}, payload {record.length}",
        )  # fmt: skip
    start = offset + RECORD_SIZE + record.table_length
    return Stretches(record, offset, start - crypto.OVERHEAD, start, stored)


def read_stretch(reader: ReadAt, salt: int, body: Stretches, number: int) -> bytes:
    """Return a sealed piece of a body, checked against its checksum. Raise `DamagedError`."""
    at, length = body.piece(number)
    raw = reader.read_at(at, length)
    if int.from_bytes(raw[: sealed.SUM], "little") != seeded(raw[sealed.SUM :], salt, at):
        raise DamagedError(f"{body.record.name}: a sealed piece does not fit its checksum", path=reader.path, offset=at)
    return raw[sealed.SUM :]


class Vault:
    """An encrypted file as if it were plain: tables are opened by `table`, bodies are read at their plain offsets.

    Every byte handed out was authenticated. The piece read last is kept in memory; nothing plain is mapped or written.
    May be used by several threads.
    """

    def __init__(self, reader: FileReader, seal: Seal) -> None:
        self._reader, self._seal = reader, seal
        self._bodies: dict[int, Stretches] = {}
        self._starts: list[int] = []
        self._last: tuple[int, int, bytes] = (0, 0, b"")

    @property
    def info(self) -> KeyInfo:
        """What KEY says; authentic once a table was opened."""
        return self._seal.info

    @property
    def path(self) -> str | None:
        """Name for messages."""
        return self._reader.path

    @property
    def size(self) -> int:
        """Length of the file as stored."""
        return self._reader.size

    def map(self) -> memoryview:
        """Raise: what is mapped would be sealed."""
        raise UnsupportedError("an encrypted file cannot be mapped", path=self.path)

    def table(self, offset: int, record: RecordHeader, stored: bytes) -> tuple[bytes, int]:
        """Open the table of a record, which fits its checksum; return it and the plain length of the payload.

        Raise `FormatError` for impossible lengths, `TamperedError`.
        """
        body = stretches_of(record, offset, self.path)
        plain = self._unseal(stored, self._seal.data(record, offset, 0), record, offset + RECORD_SIZE)
        if record.kind in WITH_PARTS and body.plain not in self._bodies:
            self._bodies[body.plain] = body
            insort(self._starts, body.plain)
        return plain, len(plain) + body.length

    def _unseal(self, piece: bytes, data: bytes, record: RecordHeader, offset: int) -> bytes:
        try:
            return self._seal.box.unseal(piece, data)
        except TamperedError as error:
            raise TamperedError(f"{record.name}: {error.message}", path=self.path, offset=offset) from error

    def _piece(self, body: Stretches, number: int) -> bytes:
        offset, known, plain = self._last
        if (offset, known) == (body.offset, number):
            return plain
        stored = read_stretch(self._reader, self._seal.salt, body, number)
        data = self._seal.data(body.record, body.offset, number)
        plain = self._unseal(stored, data, body.record, body.piece(number)[0])
        self._last = (body.offset, number, plain)
        return plain

    def read_into(self, offset: int, buffer: WriteableBuffer) -> int:
        """Fill the buffer with plain bytes of one body. Raise `DamagedError` and `TamperedError`."""
        out = memoryview(buffer).cast("B") if memoryview(buffer).nbytes else memoryview(b"")
        place = bisect_right(self._starts, offset) - 1
        body = self._bodies[self._starts[place]] if place >= 0 else None
        if body is None or offset + len(out) > body.plain + body.length:
            if not len(out):
                return 0
            raise DamagedError("what is asked for lies outside a sealed body", path=self.path, offset=offset)
        done = 0
        while done < len(out):
            number, inside = divmod(offset + done - body.plain, sealed.STRETCH)
            piece = memoryview(self._piece(body, number + 1))[inside : inside + len(out) - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
        return done

    def read_at(self, offset: int, length: int) -> bytes:
        """Return plain bytes of one body."""
        if offset + length > self.size:
            raise DamagedError("the file is cut off", path=self.path, offset=offset, expected=length)
        out = bytearray(length)
        self.read_into(offset, out)
        return bytes(out)


# -- opening -----------------------------------------------------------------------------------------------


def read_key_info(reader: ReadAt, header: FileHeader) -> tuple[KeyInfo, bytes]:
    """Read KEY, the first record; return what it says, and the context of the file. Needs no key.

    Raise `DamagedError`, `FormatError`, and `VersionError` for a session or an unknown cipher.
    """
    if header.use == SESSION:
        what = "an encrypted session: this release knows encrypted snapshots only"
        raise VersionError(what, path=reader.path, offset=32)
    record, payload = read_record(reader, header, HEADER_SIZE, kind=Kind.KEY, limit=sealed.MAX_KEY)
    if record.flags != CRITICAL or record.sequence or record.commit != 1:
        raise FormatError("KEY: a field of its header has another value", path=reader.path, offset=HEADER_SIZE)
    info = sealed.parse_key_info(payload, reader.path, HEADER_SIZE + RECORD_SIZE)
    # Packed again, not read again: what is authenticated is what was parsed, whatever happens to the file meanwhile.
    return info, sealed.context_of(header.pack(), record.pack(header.salt, HEADER_SIZE), payload)


def check_key_record(reader: ReadAt, header: FileHeader, offset: int) -> None:
    """Raise unless a KEY record may stand at `offset`: `FormatError` in a plain file or at a second place."""
    if not header.required & ENCRYPTED or offset != HEADER_SIZE:
        expected = "the first record of an encrypted file"
        raise FormatError("KEY stands where none may be", path=reader.path, offset=offset, expected=expected)
    read_key_info(reader, header)


def open_vault(reader: FileReader, header: FileHeader, key: bytes | None) -> Vault | None:
    """Return what opens an encrypted file, or None for one that is not encrypted, where no key was given.

    Raise `KeyNeededError` without a key or with another one, `InputError` for a key to a plain file, and as
    `read_key_info` does.
    """
    if not header.required & ENCRYPTED:
        if key is not None:
            raise InputError(
                "a key was given, but the file is not encrypted: anyone could have written it; read it without a key "
                "if that is what you want",
                path=reader.path,
            )
        return None
    info, context = read_key_info(reader, header)
    if key is None:
        raise KeyNeededError(f"the file is encrypted ({info}); its key is needed", path=reader.path)
    box, check = crypto.box_of(key, cipher=info.cipher, salt=info.salt, file_id=header.file_id)
    try:
        crypto.check_fits(check, info.check)
    except KeyNeededError as error:
        error.path = reader.path
        raise
    return Vault(reader, Seal(info, box, context, header.salt))


@dataclass(frozen=True, slots=True)
class Clear:
    """What an encrypted file says without its key: nobody vouches for it."""

    version: str
    file_id: str
    created_ns: int
    nbytes: int
    cipher: str
    label: str


def read_clear(path: str | os.PathLike[str]) -> Clear:
    """Read what an encrypted file says in clear. Raise as `read_key_info` does, and `FormatError` for another file."""
    with Reader(path) as reader:
        header = read_header(reader)
        info, _ = read_key_info(reader, header)
        return Clear(
            f"{header.major}.{header.minor}", header.file_id.hex(), header.created_ns, reader.size, info.cipher,
            info.label,
        )  # fmt: skip


def is_encrypted(path: str | os.PathLike[str]) -> bool:
    """Tell from its header whether this is an encrypted `.kvsnap` file. Raise as opening a file does."""
    with Reader(path) as reader:
        if reader.read_at(0, min(reader.size, len(MAGIC))) != MAGIC:
            return False
        try:
            return bool(read_header(reader).required & ENCRYPTED)
        except (DamagedError, FormatError):
            return False


def refuse_encrypted(path: str | os.PathLike[str]) -> None:
    """Raise `UnsupportedError` for an encrypted file, where a session is needed."""
    if is_encrypted(path):
        raise UnsupportedError("an encrypted file is a sealed snapshot; sessions cannot be encrypted yet", path=path)

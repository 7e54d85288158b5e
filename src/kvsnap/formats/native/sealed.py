"""Encrypted `.kvsnap` files: the KEY record, sealed payloads, and the plain bytes behind them. Spec section 20.

What is read is a file of plain payloads again: `Vault` has the reads of a file, at the offsets that the plain payloads
would have behind the headers of their records. Only this module and `kvsnap.crypto` know that bytes are sealed.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

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
from kvsnap.formats.native.tables import canonical_json, parse_json
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
    align64,
    read_header,
    read_record,
    seeded,
)

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = [
    "BodyWriter", "KeyInfo", "Lock", "Seal", "Vault", "check_key_record", "is_encrypted", "lock_of", "new_seal",
    "open_vault", "read_key_info", "read_stretch", "refuse_encrypted", "seal_table", "stretches_of",
]  # fmt: skip

STRETCH = 1 << 20
SUM = 8
AROUND = SUM + crypto.OVERHEAD
"""Bytes that a stretch of the body takes besides its own."""
MAX_KEY = 1 << 16
_DATA = struct.Struct("<32sBB6sQQQQQQ")
_U64 = struct.Struct("<Q")


class Sink(Protocol):
    """What pieces are written to."""

    def write_at(self, buffers: Sequence[Any], offset: int) -> int:
        """Write all buffers one behind the other at `offset`; return the number of bytes."""


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """What KEY says: cipher, salt (32 bytes), check (16 bytes) and a label, which is not secret."""

    cipher: str
    salt: bytes
    check: bytes
    label: str = ""

    def pack(self) -> bytes:
        """Return the payload of the KEY record. Raise `InputError` for a label that cannot be written."""
        data = {"cipher": self.cipher, "salt": self.salt.hex(), "check": self.check.hex()}
        payload = canonical_json(data | ({"label": self.label} if self.label else {}))
        if len(payload) > MAX_KEY:
            raise InputError("the label of the key is too long", expected="below 64 kB", found=f"{len(payload)} bytes")
        return payload

    def __str__(self) -> str:
        return self.cipher + (f', key "{self.label}"' if self.label else "")


def parse_key_info(payload: bytes, path: str | None, offset: int) -> KeyInfo:
    """Parse the payload of a KEY record. Raise `FormatError`, or `VersionError` for an unknown cipher."""
    data = parse_json(payload, path, offset)
    cipher, label = data.get("cipher"), data.get("label", "")
    hexes = [data.get("salt"), data.get("check")]
    good = [isinstance(h, str) and re.fullmatch(f"[0-9a-f]{{{n}}}", h) for h, n in zip(hexes, (64, 32), strict=True)]
    if not isinstance(cipher, str) or not isinstance(label, str) or not all(good):
        raise FormatError("KEY: a member is missing or has a value that is not allowed", path=path, offset=offset)
    if cipher not in crypto.CIPHERS:
        expected = ", ".join(crypto.CIPHERS)
        raise VersionError(
            "encrypted with a cipher that this release does not know", path=path, offset=offset, expected=expected,
            found=repr(cipher)[:60],
        )  # fmt: skip
    return KeyInfo(cipher, bytes.fromhex(str(hexes[0])), bytes.fromhex(str(hexes[1])), label)


@dataclass(frozen=True, slots=True)
class Seal:
    """The box of a file, with what ties each piece to this file: the context, and the salt of its checksums."""

    info: KeyInfo
    box: crypto.Box
    context: bytes
    salt: int

    def data(self, record: RecordHeader, offset: int, piece: int) -> bytes:
        """Return the associated data of a piece of the record at `offset`; piece 0 is the table."""
        return _DATA.pack(
            self.context, record.kind, record.flags, bytes(6), offset, record.sequence, record.commit,
            record.table_length, 0 if piece else record.length, piece,
        )  # fmt: skip


# -- writing -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lock:
    """How a new file is to be encrypted: the key (32 bytes), the cipher (None: the default), and a label in clear."""

    key: bytes = field(repr=False)
    cipher: str | None = None
    label: str = ""

    def __post_init__(self) -> None:
        crypto.check_usable(self.key, self.cipher)


def lock_of(key: bytes | None, cipher: str | None, label: str | None) -> Lock | None:
    """Return the lock of a new file; None without a key. Raise `InputError` for a cipher or label without one."""
    if key is not None:
        return Lock(key, cipher, label or "")
    if cipher is not None or label:
        raise InputError("a cipher or a label needs a key: without one nothing is encrypted")
    return None


def new_seal(header: FileHeader, lock: Lock) -> tuple[Seal, bytes]:
    """Return the seal of a new file with this header, and the payload of its KEY record.

    Raise `InputError` and `ExtraMissingError` as `crypto.box_of` does.
    """
    name, salt = lock.cipher or crypto.CIPHERS[0], os.urandom(crypto.SALT_SIZE)
    box, check = crypto.box_of(lock.key, cipher=name, salt=salt, file_id=header.file_id)
    info = KeyInfo(name, salt, check, lock.label)
    payload = info.pack()
    checksum = xxhash.xxh3_64_intdigest(payload)
    record = RecordHeader(Kind.KEY, 0, len(payload), 1, len(payload), checksum, CRITICAL)
    context = _context(header.pack(), record.pack(header.salt, HEADER_SIZE), payload)
    return Seal(info, box, context, header.salt), payload


def _context(header: bytes, record: bytes, payload: bytes) -> bytes:
    return hashlib.sha256(header + record + payload).digest()


def seal_table(seal: Seal, kind: int, sequence: int, commit: int, offset: int, plain: bytes, body: int = 0) -> bytes:
    """Return the sealed table of a record at `offset`; `body` is the stored length of what follows it."""
    length = len(plain) + crypto.OVERHEAD
    return seal.box.seal(plain, seal.data(RecordHeader(kind, sequence, length + body, commit, length, 0), offset, 0))


class BodyWriter:
    """Takes the plain body of one record in order, and writes it sealed, stretch by stretch.

    A sink that counts as the plain file would: gaps between writes become zeros. `finish` ends it.
    """

    def __init__(
        self, seal: Seal, sink: Sink, kind: int, sequence: int, commit: int, offset: int, table: int
    ) -> None:  # fmt: skip
        self._seal, self._sink, self._offset = seal, sink, offset
        self._record = RecordHeader(kind, sequence, 0, commit, table + crypto.OVERHEAD, 0)
        self._plain = offset + RECORD_SIZE + table
        self._first = self._at = self._plain + crypto.OVERHEAD
        self._waiting = bytearray()
        self._pieces = 0

    def write_at(self, buffers: Sequence[Any], offset: int) -> int:
        """Take these bytes, which stand at `offset` of the plain file."""
        self._take(bytes(offset - self._plain))
        total = 0
        for buffer in buffers:
            view = memoryview(buffer)
            data = view.cast("B") if view.nbytes else memoryview(b"")
            self._take(data)
            total += len(data)
        return total

    def _take(self, data: bytes | memoryview) -> None:
        self._plain += len(data)
        at = 0
        while at < len(data):
            more = min(len(data) - at, STRETCH - len(self._waiting))
            if more == STRETCH:
                self._put(data[at : at + more])
            else:
                self._waiting += data[at : at + more]
                self._flush(least=STRETCH)
            at += more

    def _flush(self, *, least: int = 1) -> None:
        if len(self._waiting) >= least:
            waiting, self._waiting = self._waiting, bytearray()
            self._put(waiting)

    def _put(self, plain: bytes | bytearray | memoryview) -> None:
        self._pieces += 1
        piece = self._seal.box.seal(plain, self._seal.data(self._record, self._offset, self._pieces))
        self._sink.write_at([_U64.pack(seeded(piece, self._seal.salt, self._at)), piece], self._at)
        self._at += SUM + len(piece)

    def finish(self) -> int:
        """Write what is left and the padding of the record; return the stored length of the body."""
        self._flush()
        padding = align64(self._at) - self._at
        if padding:
            self._sink.write_at([bytes(padding)], self._at)
        return self._at - self._first


# -- reading -----------------------------------------------------------------------------------------------


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
        return -(-self.stored // (STRETCH + AROUND))

    @property
    def length(self) -> int:
        """Plain bytes."""
        return self.stored - AROUND * self.count

    def piece(self, number: int) -> tuple[int, int]:
        """Return offset and stored length of a piece; they count from 1."""
        at = (number - 1) * (STRETCH + AROUND)
        return self.start + at, min(STRETCH + AROUND, self.stored - at)


def stretches_of(record: RecordHeader, offset: int, path: str | None) -> Stretches:
    """Return how the body of a record is stored. Raise `FormatError` for lengths that cannot be."""
    stored = record.length - record.table_length
    if record.table_length < crypto.OVERHEAD or 0 < stored % (STRETCH + AROUND) <= AROUND:
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
    if _U64.unpack_from(raw)[0] != seeded(raw[SUM:], salt, at):
        raise DamagedError(f"{body.record.name}: a sealed piece does not fit its checksum", path=reader.path, offset=at)
    return raw[SUM:]


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

    def _unseal(self, sealed: bytes, data: bytes, record: RecordHeader, offset: int) -> bytes:
        try:
            return self._seal.box.unseal(sealed, data)
        except TamperedError as error:
            raise TamperedError(f"{record.name}: {error.message}", path=self.path, offset=offset) from error

    def _piece(self, body: Stretches, number: int) -> bytes:
        offset, known, plain = self._last
        if (offset, known) == (body.offset, number):
            return plain
        sealed = read_stretch(self._reader, self._seal.salt, body, number)
        data = self._seal.data(body.record, body.offset, number)
        plain = self._unseal(sealed, data, body.record, body.piece(number)[0])
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
            number, inside = divmod(offset + done - body.plain, STRETCH)
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
    record, payload = read_record(reader, header, HEADER_SIZE, kind=Kind.KEY, limit=MAX_KEY)
    if record.flags != CRITICAL or record.sequence:
        raise FormatError("KEY: a field of its header has another value", path=reader.path, offset=HEADER_SIZE)
    info = parse_key_info(payload, reader.path, HEADER_SIZE + RECORD_SIZE)
    return info, _context(reader.read_at(0, HEADER_SIZE), reader.read_at(HEADER_SIZE, RECORD_SIZE), payload)


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

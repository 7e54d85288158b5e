"""Encrypted `.kvsnap` files: the KEY record, associated data, and the writing of sealed payloads. Spec section 20.

`vault` reads them. The rest of the native format knows plain bytes only.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from kvsnap import crypto
from kvsnap.errors import (
    FormatError,
    InputError,
    VersionError,
)
from kvsnap.formats.native.tables import canonical_json, parse_json
from kvsnap.protocols import Sink
from kvsnap.records import (
    CRITICAL,
    HEADER_SIZE,
    RECORD_SIZE,
    FileHeader,
    Kind,
    RecordHeader,
    align64,
    seeded,
)

__all__ = ["BodyWriter", "KeyInfo", "Lock", "Seal", "lock_of", "new_seal", "seal_table"]

STRETCH = 1 << 20
SUM = 8
AROUND = SUM + crypto.OVERHEAD
"""Bytes that a stretch of the body takes besides its own."""
MAX_KEY = 1 << 16
_SHOWN = 80
_DATA = struct.Struct("<32sBB6sQQQQQQ")
_U64 = struct.Struct("<Q")


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
        # Anyone can have written the label: what would move a terminal's cursor is not shown.
        label = "".join(c if c.isprintable() else "?" for c in self.label[:_SHOWN])
        return self.cipher + (f', key "{label}"' if label else "")


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
    context = context_of(header.pack(), record.pack(header.salt, HEADER_SIZE), payload)
    return Seal(info, box, context, header.salt), payload


def context_of(header: bytes, record: bytes, payload: bytes) -> bytes:
    """Return the 32 bytes that stand for file header and KEY (its header and payload) in all associated data."""
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

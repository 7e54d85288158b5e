"""Native files changed record by record, with every checksum, digest and length put right again (docs/spec/file.md).

A changed byte of such a file is refused by the first checksum that it meets. What is behind the checksums must hold
against a writer that means harm, and is reached in this way only. Of encrypted files the plain payloads are changed,
and sealed again under `KEY`, as the owner of the key could do.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash

from parts import KEY, change_json
from spec_file import Cipher

SPAN, STATE, INDEX, COMMIT, BASE, KEY_RECORD = 3, 4, 6, 7, 8, 9
_JSON = (1, 2, 5, KEY_RECORD)
_FOOTER = b"KVEND\r\n\x1a"
_OFFSETS = (8, 72, 80, 88, 96, 104, 120)  # fields of a COMMIT that name records
_MASK = 2**64 - 1
_ENCRYPTED = 1
_TAG = 28  # bytes of a sealed piece besides the plain ones; 8 more where it is a stretch of a body


@dataclass
class Piece:
    """A record (header of 64 bytes, payload) or a footer (no payload), and where it stood before the change.

    `opened`: the payload is the plain one of an encrypted file; `stored` is then what the file holds.
    """

    at: int
    head: bytearray
    payload: bytearray
    opened: bool = False
    stored: bytes = b""

    @property
    def kind(self) -> int:
        return self.head[4] if self.head[:4] == b"KVR1" else 0

    @property
    def written(self) -> bytes:
        return self.stored if self.opened else bytes(self.payload)

    def end(self, at: int) -> int:
        return (at + 64 + len(self.payload) + 63) & ~63

    def copy(self) -> Piece:
        return Piece(self.at, bytearray(self.head), bytearray(self.payload), self.opened)


@dataclass
class _Made:
    """What was put together so far."""

    salt: int
    cipher: Cipher | None
    moved: dict[int, int] = field(default_factory=dict)
    tables: dict[int, Piece] = field(default_factory=dict)
    digests: dict[int, bytes] = field(default_factory=dict)
    live: list[tuple[int, bytes]] = field(default_factory=list)
    start: bytes = bytes(16)  # digest of what a fork keeps of its parent


def split(data: bytes) -> tuple[bytearray, list[Piece], bytes]:
    """The file header, the pieces, and the rest that is none."""
    pieces, at = [], 128
    while at + 64 <= len(data):
        head = bytearray(data[at : at + 64])
        length = struct.unpack_from("<Q", head, 16)[0] if head[:4] == b"KVR1" else 0
        if (head[:4] != b"KVR1" and head[:8] != _FOOTER) or at + 64 + length > len(data):
            break
        pieces.append(Piece(at, head, bytearray(data[at + 64 : at + 64 + length])))
        at = pieces[-1].end(at)
    _open(data, pieces)
    return bytearray(data[:128]), pieces, data[at:]


def joined(header: bytearray, pieces: list[Piece], rest: bytes) -> bytes:
    """The file again: offsets follow their records, lengths and checksums are right wherever that is possible."""
    if len(header) < 128:
        return bytes(header)
    struct.pack_into("<Q", header, 120, xxhash.xxh3_64_intdigest(bytes(header[:120])))
    out = bytearray(header)
    made = _Made(struct.unpack_from("<Q", header, 56)[0], _cipher(header, pieces))
    for piece in pieces:
        at = len(out)
        made.moved[piece.at] = at
        if piece.kind == COMMIT and len(piece.payload) >= 192:
            made.live = _commit(piece, made)
        elif piece.kind == INDEX and len(piece.payload) >= 64:
            made.live = _entries(piece, 64, made, [])
        elif piece.kind == BASE and len(piece.payload) >= 88:
            made.start = bytes(piece.payload[72:88])
        elif piece.kind in (SPAN, STATE):
            _parts(piece)
        if piece.kind:
            _seal_record(piece, made, at)
            made.tables[at] = piece
            if piece.kind == COMMIT:
                made.digests[at] = xxhash.xxh3_128_digest(bytes(piece.head) + piece.written)
            if piece.kind == KEY_RECORD and at == 128 and made.cipher is not None:
                made.cipher.context = hashlib.sha256(header + piece.head + piece.payload).digest()
        else:
            _seal_footer(piece, made, at)
        out += piece.head + piece.written
        out += bytes(-len(out) % 64)
    return bytes(out) + rest


# -- encryption (section 20) -----------------------------------------------------------------------------------------


def _about(piece: Piece, file_id: bytes) -> tuple[dict[str, object], Cipher] | None:
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        about = json.loads(piece.payload)
        return about, Cipher(KEY, about["cipher"], bytes.fromhex(about["salt"]), file_id)
    return None


def _open(data: bytes, pieces: list[Piece]) -> None:
    """Put plain payloads in the place of the sealed ones; what cannot be opened stays as it is."""
    if len(data) < 128 or not data[16] & _ENCRYPTED or not pieces or pieces[0].kind != KEY_RECORD:
        return
    found = _about(pieces[0], data[40:56])
    if found is None:
        return
    cipher = found[1]
    cipher.context = hashlib.sha256(data[:128] + pieces[0].head + pieces[0].payload).digest()
    for piece in pieces[1:]:
        if not piece.kind:
            continue
        kind, flags, _, sequence, length, commit, table = struct.unpack_from("<BBHQQQQ", piece.head, 4)
        place = (kind, flags, piece.at, sequence, commit, table)
        with contextlib.suppress(Exception):
            plain = cipher.unseal(bytes(piece.payload[:table]), cipher.data(*place, length, 0))
            if length > table:
                plain += cipher.unseal(bytes(piece.payload[table + 8 :]), cipher.data(*place, 0, 1))
            piece.payload, piece.opened = bytearray(plain), True
            struct.pack_into("<Q", piece.head, 32, table - _TAG)


def _cipher(header: bytearray, pieces: list[Piece]) -> Cipher | None:
    """The cipher that KEY names, whose check is put right."""
    key = next((piece for piece in pieces if piece.kind == KEY_RECORD), None)
    found = _about(key, bytes(header[40:56])) if key else None
    if key is None or found is None:
        return Cipher(KEY, "aes-256-gcm", bytes(32), bytes(16)) if any(p.opened for p in pieces) else None
    about, cipher = found
    if isinstance(about.get("check"), str) and len(str(about["check"])) == 32:
        about["check"] = cipher.check.hex()
        key.payload = bytearray(json.dumps(about).encode())
    return cipher


def _seal_record(piece: Piece, made: _Made, at: int) -> None:
    table = len(piece.payload)
    if piece.kind in (SPAN, STATE):
        table = min(table, struct.unpack_from("<Q", piece.head, 32)[0])
    stored = bytes(piece.payload)
    if piece.opened and made.cipher is not None:
        body = stored[table:]
        length = table + _TAG + (len(body) + 8 + _TAG if body else 0)
        kind, flags, _, sequence, _, commit = struct.unpack_from("<BBHQQQ", piece.head, 4)
        place = (kind, flags, at, sequence, commit, table + _TAG)
        stored = made.cipher.seal(stored[:table], made.cipher.data(*place, length, 0))
        if body:
            sealed = made.cipher.seal(body, made.cipher.data(*place, 0, 1))
            seed = (made.salt + at + 64 + len(stored)) & _MASK
            stored += struct.pack("<Q", xxhash.xxh3_64_intdigest(sealed, seed=seed)) + sealed
        piece.stored, table = stored, table + _TAG
    struct.pack_into("<Q", piece.head, 16, len(stored))
    struct.pack_into("<Q", piece.head, 32, table)
    struct.pack_into("<Q", piece.head, 40, xxhash.xxh3_64_intdigest(stored[:table]))
    _seed(piece.head, made.salt, at)


def _seed(head: bytearray, salt: int, at: int) -> None:
    struct.pack_into("<Q", head, 56, xxhash.xxh3_64_intdigest(bytes(head[:56]), seed=(salt + at) & _MASK))


def _seal_footer(piece: Piece, made: _Made, at: int) -> None:
    commit = struct.unpack_from("<Q", piece.head, 8)[0]
    commit = made.moved.get(commit, commit)
    struct.pack_into("<Q", piece.head, 8, commit)
    struct.pack_into("<Q", piece.head, 24, at + 64)
    piece.head[32:48] = made.digests.get(commit, bytes(piece.head[32:48]))
    _seed(piece.head, made.salt, at)


def _parts(piece: Piece) -> None:
    """Put the checksums of the parts right. A table whose counts do not add up stays as it is."""
    p = piece.payload
    if len(p) < 64:
        return
    n_tokens, n_runs, n_positions, n_parts, meta = struct.unpack_from("<QIIII", p, 24)
    at = (64 + 4 * n_tokens + 7) & ~7
    at = (at + 16 * (n_runs + n_positions) + meta + 63) & ~63
    if at + 64 * n_parts > len(p):
        return
    struct.pack_into("<Q", piece.head, 32, at + 64 * n_parts)
    for row in range(at, at + 64 * n_parts, 64):
        start, length = struct.unpack_from("<QQ", p, row + 24)
        if start + length <= len(p):
            struct.pack_into("<Q", p, row + 40, xxhash.xxh3_64_intdigest(bytes(p[start : start + length])))


def _entries(piece: Piece, first: int, made: _Made, before: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Put entries of the live list right: offsets, the checksum of their span, the digest of the history."""
    live, p = list(before), piece.payload
    for at in range(first, len(p) - 63, 64):
        span, n_tokens, _, n_rows, state = struct.unpack_from("<5Q", p, at)
        span, state = made.moved.get(span, span), made.moved.get(state, state)
        struct.pack_into("<Q", p, at, span)
        struct.pack_into("<Q", p, at + 32, state)
        if span not in made.tables:
            continue
        table = made.tables[span]
        ids = bytes(table.payload[64 : 64 + 4 * min(n_tokens, len(table.payload))])
        digest = xxhash.xxh3_128_digest((live[-1][1] if live else made.start) + ids + struct.pack("<Q", n_rows))
        p[at + 40 : at + 48] = table.head[56:64]
        p[at + 48 : at + 64] = digest
        live.append((span, digest))
    return live


def _commit(piece: Piece, made: _Made) -> list[tuple[int, bytes]]:
    p = piece.payload
    for offset in _OFFSETS:
        old = struct.unpack_from("<Q", p, offset)[0]
        struct.pack_into("<Q", p, offset, made.moved.get(old, old))
    previous, index, kept, base = struct.unpack_from("<Q", p, 8)[0], *struct.unpack_from("<QQQ", p, 104)
    found = made.tables.get(base)
    made.start = bytes(found.payload[72:88]) if found and found.kind == BASE else bytes(16)
    p[16:32] = made.digests.get(previous, bytes(p[16:32]))
    struct.pack_into("<I", p, 36, (len(p) - 192) // 64)
    before = made.live[:kept] if index else []
    after = _entries(piece, 192, made, before)
    p[136:152] = after[-1][1] if after else made.start
    return made.live if index else []


def mutated(data: bytes, size: int, seed: int, plain: Callable[[bytes, int], bytes]) -> bytes:
    """One piece changed, dropped, doubled or moved; then all is sealed."""
    header, pieces, rest = split(data)
    if not pieces:
        return plain(data, size)
    chance = random.Random(seed)  # noqa: S311 # the fuzzer hands out the seed
    what, piece = chance.randrange(20), chance.choice(pieces)
    if what == 0:
        header = bytearray(plain(bytes(header), 128))
    elif what == 1:
        pieces.remove(piece)
    elif what == 2:
        pieces.insert(chance.randrange(len(pieces)), piece.copy())
    elif what == 3:
        rest = plain(rest or b"\0", 256)
    elif what == 4:
        piece.head = bytearray(plain(bytes(piece.head), 64).ljust(64, b"\0"))
    elif piece.kind in _JSON and what < 16:
        piece.payload = bytearray(change_json(bytes(piece.payload), seed))
    elif what < 12 and len(piece.payload) >= 8:
        _number(piece.payload, chance, [p.at for p in pieces])
    else:
        piece.payload = bytearray(plain(bytes(piece.payload), len(piece.payload) + 256))
    return joined(header, pieces, rest)[:size]


def _number(payload: bytearray, chance: random.Random, places: list[int]) -> None:
    """One aligned number of the payload becomes one that is interesting, or moves a little."""
    width, form = chance.choice(((8, "<Q"), (8, "<Q"), (4, "<I")))
    at = chance.randrange(min(len(payload), 1024) // width) * width
    old = struct.unpack_from(form, payload, at)[0]
    near = (old + chance.choice((-64, -8, -4, -1, 1, 4, 8, 64))) % 2 ** (8 * width)
    values = [near, near, 0, 1, 2**31 - 1, 2**31, 2**32 - 1, chance.choice(places), len(payload), old * 2]
    if width == 8:
        values += [2**40, 2**61, 2**62, 2**63, 2**64 - 1]
    struct.pack_into(form, payload, at, chance.choice(values) % 2 ** (8 * width))

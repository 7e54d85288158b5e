"""Native files changed record by record, with every checksum, digest and length put right again (docs/spec/file.md).

A changed byte of such a file is refused by the first checksum that it meets. What is behind the checksums must hold
against a writer that means harm, and is reached in this way only.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from parts import change_json

SPAN, STATE, INDEX, COMMIT = 3, 4, 6, 7
_JSON = (1, 2, 5)
_FOOTER = b"KVEND\r\n\x1a"
_OFFSETS = (8, 72, 80, 88, 96, 104)  # fields of a COMMIT that name records
_MASK = 2**64 - 1


@dataclass
class Piece:
    """A record (header of 64 bytes, payload) or a footer (no payload), and where it stood before the change."""

    at: int
    head: bytearray
    payload: bytearray

    @property
    def kind(self) -> int:
        return self.head[4] if self.head[:4] == b"KVR1" else 0

    def end(self, at: int) -> int:
        return (at + 64 + len(self.payload) + 63) & ~63


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
    return bytearray(data[:128]), pieces, data[at:]


def joined(header: bytearray, pieces: list[Piece], rest: bytes) -> bytes:
    """The file again: offsets follow their records, lengths and checksums are right wherever that is possible."""
    if len(header) < 128:
        return bytes(header)
    struct.pack_into("<Q", header, 120, xxhash.xxh3_64_intdigest(bytes(header[:120])))
    salt = struct.unpack_from("<Q", header, 56)[0]
    out, moved = bytearray(header), {}
    tables: dict[int, Piece] = {}
    digests: dict[int, bytes] = {}
    live: list[tuple[int, bytes]] = []
    for piece in pieces:
        at = len(out)
        moved[piece.at] = at
        if piece.kind == COMMIT and len(piece.payload) >= 192:
            live = _commit(piece, moved, tables, digests, live)
        elif piece.kind == INDEX and len(piece.payload) >= 64:
            live = _entries(piece, 64, moved, tables, [])
        elif piece.kind in (SPAN, STATE):
            _parts(piece)
        if piece.kind:
            _seal_record(piece, salt, at)
            tables[at] = piece
            if piece.kind == COMMIT:
                digests[at] = xxhash.xxh3_128_digest(bytes(piece.head + piece.payload))
        else:
            _seal_footer(piece, salt, at, moved, digests)
        out += piece.head + piece.payload
        out += bytes(-len(out) % 64)
    return bytes(out) + rest


def _seal_record(piece: Piece, salt: int, at: int) -> None:
    table = len(piece.payload)
    if piece.kind in (SPAN, STATE):
        table = min(table, struct.unpack_from("<Q", piece.head, 32)[0])
    struct.pack_into("<Q", piece.head, 16, len(piece.payload))
    struct.pack_into("<Q", piece.head, 32, table)
    struct.pack_into("<Q", piece.head, 40, xxhash.xxh3_64_intdigest(bytes(piece.payload[:table])))
    _seed(piece.head, salt, at)


def _seed(head: bytearray, salt: int, at: int) -> None:
    struct.pack_into("<Q", head, 56, xxhash.xxh3_64_intdigest(bytes(head[:56]), seed=(salt + at) & _MASK))


def _seal_footer(piece: Piece, salt: int, at: int, moved: dict[int, int], digests: dict[int, bytes]) -> None:
    commit = struct.unpack_from("<Q", piece.head, 8)[0]
    commit = moved.get(commit, commit)
    struct.pack_into("<Q", piece.head, 8, commit)
    struct.pack_into("<Q", piece.head, 24, at + 64)
    piece.head[32:48] = digests.get(commit, bytes(piece.head[32:48]))
    _seed(piece.head, salt, at)


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


def _entries(
    piece: Piece, first: int, moved: dict[int, int], tables: dict[int, Piece], before: list[tuple[int, bytes]]
) -> list[tuple[int, bytes]]:
    """Put entries of the live list right: offsets, the checksum of their span, the digest of the history."""
    live, p = list(before), piece.payload
    for at in range(first, len(p) - 63, 64):
        span, n_tokens, _, n_rows, state = struct.unpack_from("<5Q", p, at)
        span, state = moved.get(span, span), moved.get(state, state)
        struct.pack_into("<Q", p, at, span)
        struct.pack_into("<Q", p, at + 32, state)
        if span not in tables:
            continue
        table = tables[span]
        ids = bytes(table.payload[64 : 64 + 4 * min(n_tokens, len(table.payload))])
        digest = xxhash.xxh3_128_digest((live[-1][1] if live else bytes(16)) + ids + struct.pack("<Q", n_rows))
        p[at + 40 : at + 48] = table.head[56:64]
        p[at + 48 : at + 64] = digest
        live.append((span, digest))
    return live


def _commit(
    piece: Piece, moved: dict[int, int], tables: dict[int, Piece], digests: dict[int, bytes],
    live: list[tuple[int, bytes]],
) -> list[tuple[int, bytes]]:  # fmt: skip
    p = piece.payload
    for field in _OFFSETS:
        old = struct.unpack_from("<Q", p, field)[0]
        struct.pack_into("<Q", p, field, moved.get(old, old))
    previous, index, kept = struct.unpack_from("<Q", p, 8)[0], *struct.unpack_from("<QQ", p, 104)
    p[16:32] = digests.get(previous, bytes(p[16:32]))
    struct.pack_into("<I", p, 36, (len(p) - 192) // 64)
    before = live[:kept] if index else []
    after = _entries(piece, 192, moved, tables, before)
    p[136:152] = after[-1][1] if after else bytes(16)
    return live if index else []


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
        pieces.insert(chance.randrange(len(pieces)), Piece(piece.at, bytearray(piece.head), bytearray(piece.payload)))
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

"""Reading an MLXKV001 file: every count is checked against the bytes left before anything is made of it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kvsnap.errors import DamagedError, FormatError, UnsupportedError, VersionError
from kvsnap.formats.mlxkv.model import (
    DTYPES,
    MAGIC,
    NEWEST,
    NO_PAYLOADS,
    Q8_NATIVE,
    TURBOQUANT,
    ByteOrder,
    Bytes,
    File,
    Head,
    LayerEntry,
    Payloads,
    Piece,
    StoredTensor,
)

__all__ = ["MAX_HEADS", "MAX_LAYERS", "parse", "sniff"]

# No model comes near; what is kept in memory for each entry is many times its 12 bytes in the file.
MAX_LAYERS = 1 << 12
MAX_HEADS = 1 << 16
MAX_SHAPE = 64
MAX_NAME = 1 << 20
_WINDOW = 4096
_PEEK = 32
"""Bytes that are read at once among the tensors: those of the next fields, and little of the values behind them."""
_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2, Q8_NATIVE: 1}


def sniff(head: bytes) -> bool:
    """Tell whether a file that starts with these bytes says it is one."""
    return head.startswith(MAGIC)


class _Cursor:
    """A place in a file, the field that stands there, and the bytes around it."""

    def __init__(self, file: Bytes, *, mapped: bool) -> None:
        self.file, self.mapped = file, mapped
        self.order: ByteOrder = "little"
        self.at = 0
        self._word, self._signed = struct.Struct("<I"), struct.Struct("<i")
        self._first, self._window = 0, b""
        self.together = _WINDOW

    def turn(self, order: ByteOrder) -> None:
        self.order = order
        mark = "<" if order == "little" else ">"
        self._word, self._signed = struct.Struct(f"{mark}I"), struct.Struct(f"{mark}i")

    @property
    def left(self) -> int:
        return self.file.size - self.at

    def need(self, length: int, field: str) -> None:
        """Raise `DamagedError` unless so many bytes are left."""
        if length > self.left:
            raise DamagedError(
                f"{field}: the file is cut off", path=self.file.path, offset=self.at, expected=f"{length} bytes",
                found=f"{self.left} bytes",
            )  # fmt: skip

    def take(self, length: int, field: str) -> bytes:
        """Return the next bytes; for short fields."""
        self.need(length, field)
        skip = self.at - self._first
        if skip + length > len(self._window) or skip < 0:
            self._first, skip = self.at, 0
            self._window = self.file.read_at(self.at, min(max(self.together, length), self.left))
        self.at += length
        return self._window[skip : skip + length]

    def word(self, field: str) -> int:
        return int(self._word.unpack(self.take(4, field))[0])

    def signed(self, field: str) -> int:
        return int(self._signed.unpack(self.take(4, field))[0])

    def count(self, field: str, size: int, limit: int | None = None) -> int:
        """Read a count of things that take at least `size` bytes each and must all be there."""
        place, found = self.at, self.word(field)
        if found * size > self.left:
            raise DamagedError(
                f"{field}: more than the file holds", path=self.file.path, offset=place,
                expected=f"at most {self.left // size} ({self.left} bytes left, {size} each)", found=found,
            )  # fmt: skip
        if limit is not None and found > limit:
            raise UnsupportedError(
                f"{field}: more than any model has", path=self.file.path, offset=place, expected=f"at most {limit}",
                found=found,
            )  # fmt: skip
        return found

    def piece(self, length: int, field: str) -> Piece:
        """Return the next bytes unread."""
        self.need(length, field)
        found = Piece(self.file, self.at, length, self.mapped)
        self.at += length
        return found

    def text(self, field: str) -> bytes:
        return self.take(self.count(f"{field} length", 1, MAX_NAME), field)

    def numbers(self, field: str, limit: int | None = None) -> tuple[int, ...]:
        """Read a list of signed numbers."""
        count = self.count(f"{field} count", 4, limit)
        raw = self.take(4 * count, field)  # not mapped: a page that is mapped brings its neighbours with it
        return tuple(np.frombuffer(raw, dtype="<i4" if self.order == "little" else ">i4").tolist())

    def wrong(self, message: str, offset: int, expected: object, found: object) -> FormatError:
        return FormatError(message, path=self.file.path, offset=offset, expected=expected, found=found)


def parse(file: Bytes, *, mapped: bool = False) -> File:
    """Return all of a file; tensors, payloads and logits stay in it until they are read.

    Raise `FormatError` (a rule is broken), `VersionError` (newer than version 6), `DamagedError` (cut off, or a count
    that does not fit) or `UnsupportedError` (more layers or heads than any model has), each with field and offset.
    """
    cursor = _Cursor(file, mapped=mapped)
    if file.size < len(MAGIC) or cursor.take(8, "magic") != MAGIC:
        found = file.read_at(0, min(file.size, 8))
        raise cursor.wrong("magic: not an MLXKV001 file", 0, MAGIC, found)
    version = _version(cursor)
    header = [cursor.text("architecture")]
    names = ("number of layers", "number of heads", "sequence length", "head width", "number of query heads")
    numbers = [cursor.word(name) for name in names]
    offset = cursor.word("token offset") if version >= 2 else None
    tokens = cursor.numbers("token ids")
    generated = cursor.numbers("generated token ids") if version >= 2 else ()
    cursor.together = _PEEK
    layers = _layers(cursor, version)
    shape = cursor.numbers("logit shape") if version >= 2 else ()
    logits = None
    if version >= 2:
        count = cursor.count("logits count", 4)
        logits = StoredTensor(None, count, cursor.piece(4 * count, "logits"), cursor.order)
    return File(
        version=version, order=cursor.order, architecture=header[0], num_layers=numbers[0], num_heads=numbers[1],
        seq_len=numbers[2], head_dim=numbers[3], num_query_heads=numbers[4], token_offset=offset, tokens=tokens,
        generated=generated, layers=layers, logit_shape=shape, logits=logits,
        trailing=cursor.piece(cursor.left, "trailing bytes") if cursor.left else None,
    )  # fmt: skip


def _version(cursor: _Cursor) -> int:
    """Read the version word, which also tells the byte order: 1 to 6 in one of the two."""
    place, raw = cursor.at, cursor.take(4, "version")
    little, big = int.from_bytes(raw, "little"), int.from_bytes(raw, "big")
    if 1 <= little <= NEWEST:
        return little
    if 1 <= big <= NEWEST:
        cursor.turn("big")
        return big
    found = f"{little} (big-endian: {big})"
    if little == 0:
        raise cursor.wrong("version: there is no such version", place, f"1 to {NEWEST}", found)
    raise VersionError(
        "version: newer than this reader", path=cursor.file.path, offset=place, expected=f"1 to {NEWEST}", found=found
    )


def _layers(cursor: _Cursor, version: int) -> tuple[LayerEntry, ...]:
    smallest = 12 + (8 if version >= 5 else 0) + (4 if version >= 6 else 0) + (24 if version >= 4 else 0)
    count = cursor.count("number of layer entries", smallest, MAX_LAYERS)
    layers: list[LayerEntry] = []
    n_heads = 0
    for place in range(count):
        layers.append(_layer(cursor, version, f"layer entry {place}", MAX_HEADS - n_heads))
        n_heads += len(layers[-1].heads)
    return tuple(layers)


def _layer(cursor: _Cursor, version: int, name: str, most_heads: int) -> LayerEntry:
    number, cache = cursor.signed(f"{name}, layer number"), cursor.signed(f"{name}, cache index")
    entry = LayerEntry(number, cache)
    n_heads = cursor.count(f"{name}, number of heads", 8 if version < 3 else 16, most_heads)
    if version >= 5:
        mode, payloads = _mode(cursor, name)
        entry = replace(entry, mode=mode, payloads=payloads)
    if version >= 6:
        entry = replace(entry, max_size=cursor.word(f"{name}, max size"))
    if version >= 4:
        key_shape = cursor.numbers(f"{name}, key slab shape", MAX_SHAPE)
        key = _tensor(cursor, f"{name}, key slab", slab=True)
        value_shape = cursor.numbers(f"{name}, value slab shape", MAX_SHAPE)
        value = _tensor(cursor, f"{name}, value slab", slab=True)
        entry = replace(entry, key_shape=key_shape, key_slab=key, value_shape=value_shape, value_slab=value)
    read: Callable[[_Cursor, str], StoredTensor] = _plain if version < 3 else _tensor
    heads = []
    for h in range(n_heads):
        key = read(cursor, f"{name}, head {h}, keys")
        heads.append(Head(key, read(cursor, f"{name}, head {h}, values")))
    return replace(entry, heads=tuple(heads))


def _mode(cursor: _Cursor, name: str) -> tuple[bytes, Payloads]:
    place = cursor.at
    mode = cursor.text(f"{name}, cache mode")
    count = cursor.count(f"{name}, number of payloads", 4)
    if bool(count) != (mode == TURBOQUANT):
        raise cursor.wrong(
            f"{name}, cache mode: payloads and mode contradict each other", place,
            "payloads in turboquant and only there",
            f"{count} payloads in mode {mode.decode('utf-8', 'backslashreplace')!r}",
        )  # fmt: skip
    first = cursor.at
    for p in range(count):
        length = cursor.count(f"{name}, payload {p}, length", 1)
        cursor.piece(length, f"{name}, payload {p}")
    if not count:
        return mode, NO_PAYLOADS
    return mode, Payloads(count, Piece(cursor.file, first, cursor.at - first, cursor.mapped), cursor.order)


def _plain(cursor: _Cursor, name: str) -> StoredTensor:
    count = cursor.count(f"{name}, count", 4)
    return StoredTensor(None, count, cursor.piece(4 * count, name), cursor.order)


def _tensor(cursor: _Cursor, name: str, *, slab: bool = False) -> StoredTensor:
    place, selector = cursor.at, cursor.word(f"{name}, selector")
    if selector == 0:
        return replace(_plain(cursor, name), selector=0)
    if selector == 1:
        at, count = cursor.at, cursor.word(f"{name}, count")
        scale = cursor.word(f"{name}, scale")
        if count > cursor.left:
            raise DamagedError(
                f"{name}, count: more than the file holds", path=cursor.file.path, offset=at,
                expected=f"at most {cursor.left}", found=count,
            )  # fmt: skip
        return StoredTensor(1, count, cursor.piece(count, name), cursor.order, scale_bits=scale)
    if selector != 2:
        raise cursor.wrong(f"{name}, selector: unknown encoding", place, "0, 1 or 2", selector)
    at, count = cursor.at, cursor.word(f"{name}, count")
    tag_at = cursor.at
    tag = cursor.text(f"{name}, dtype").decode("utf-8", "backslashreplace")
    if tag not in DTYPES and not (slab and tag == Q8_NATIVE):
        raise cursor.wrong(f"{name}, dtype: unknown", tag_at, ", ".join(DTYPES), tag[:40])
    raw = cursor.count(f"{name}, number of raw bytes", 1)
    width = _WIDTHS[DTYPES.get(tag, tag)]
    if raw != count * width:
        raise cursor.wrong(f"{name}, count: does not fit the raw bytes", at, f"{raw} bytes of {width} each", count)
    return StoredTensor(2, count, cursor.piece(raw, name), cursor.order, tag=tag)

"""Writing an MLXKV001 file, tensor by tensor, by the rules of the original writer."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvsnap.errors import InputError, UnsupportedError
from kvsnap.formats.mlxkv.model import MAGIC, NEWEST, Q8_NATIVE, ByteOrder, File, LayerEntry, StoredTensor, TensorData
from kvsnap.formats.mlxkv.values import decode, encode_q8, stored_bytes, swapped, widened
from kvsnap.protocols import Sink
from kvsnap.tensors import numpy_dtype

__all__ = ["CODECS", "check_limits", "nbytes_of", "pack", "version_for"]

CODECS = ("float32", "q8", "native")
_WORD = 2**32


def version_for(file: File, codec: str | None, version: int | None = None) -> int:
    """Return the version to write: the one asked for, else the file's, raised to what its content needs.

    `codec` None keeps the encoding of each tensor. Raise `InputError` outside 0..6 (0 means 6).
    """
    wanted = file.version if version is None else version or NEWEST
    if not 1 <= wanted <= NEWEST:
        raise InputError("mlxkv: there is no such version", expected=f"0 to {NEWEST}", found=version)
    if codec in ("q8", "native") or (codec is None and _has_selectors(file)):
        wanted = max(wanted, 3)
    for entry in file.layers:
        if entry.has_slab:
            wanted = max(wanted, 4)
        if entry.mode or len(entry.payloads):
            wanted = max(wanted, 5)
        if entry.max_size > 0:
            wanted = max(wanted, 6)
    return wanted


def _has_selectors(file: File) -> bool:
    return any(t.selector in (1, 2) for e in file.layers for h in e.heads for t in (h.key, h.value))


def check_limits(file: File) -> None:
    """Raise `UnsupportedError` for a number that its field cannot hold; nothing was written then."""
    unsigned = [
        ("number of layers", file.num_layers), ("number of heads", file.num_heads), ("sequence length", file.seq_len),
        ("head width", file.head_dim), ("number of query heads", file.num_query_heads),
        ("token offset", file.token_offset or 0), ("tokens", len(file.tokens)),
        ("logits", 0 if file.logits is None else file.logits.n),
    ]  # fmt: skip
    signed = [("token ids", file.tokens), ("generated token ids", file.generated), ("logit shape", file.logit_shape)]
    for place, entry in enumerate(file.layers):
        name = f"layer entry {place}"
        unsigned += [(f"{name}, max size", entry.max_size)]
        signed += [(f"{name}, shape", entry.key_shape), (f"{name}, shape", entry.value_shape)]
        for tensor in [t for h in entry.heads for t in (h.key, h.value)]:
            unsigned.append((f"{name}, bytes of a head", nbytes_of(tensor)))
    for name, value in unsigned:
        if not 0 <= value < _WORD:
            raise UnsupportedError(f"mlxkv cannot hold the {name}", expected=f"0 to {_WORD - 1}", found=value)
    for name, values in signed:
        if values and not -(2**31) <= min(values) <= max(values) < 2**31:
            raise UnsupportedError(f"mlxkv cannot hold the {name}", expected="signed 32-bit numbers", found="others")


class _Output:
    """Bytes in order into a sink; small fields are gathered."""

    __slots__ = ("_mark", "_small", "at", "order", "sink")

    def __init__(self, sink: Sink, order: ByteOrder) -> None:
        self.sink, self.order, self.at = sink, order, 0
        self._small = bytearray()
        self._mark = "<" if order == "little" else ">"

    def word(self, value: int) -> None:
        self._small += struct.pack(f"{self._mark}I", value)

    def signed(self, *values: int) -> None:
        self._small += np.array(values, dtype=f"{self._mark}i4").tobytes()

    def text(self, data: bytes) -> None:
        self.word(len(data))
        self._small += data

    def numbers(self, values: Sequence[int]) -> None:
        self.word(len(values))
        self.signed(*values)

    def data(self, data: Any) -> None:
        length = memoryview(data).nbytes
        if length < 4096:
            self._small += memoryview(data).cast("B") if length else b""
        else:
            self.flush(data)
        if len(self._small) > 1 << 20:
            self.flush()

    def flush(self, *more: Any) -> None:
        if self._small or more:
            self.at += self.sink.write_at([bytes(self._small), *more], self.at)
            self._small.clear()


def pack(
    file: File,
    sink: Sink,
    *,
    codec: str | None,
    version: int,
    order: ByteOrder = "little",
    advance: Callable[[int], None] | None = None,
) -> int:
    """Write all of `file` into an empty sink and return the length in bytes.

    `codec` None writes every tensor as it was stored, and the bytes behind the end too. `advance` is told the bytes of
    each tensor. At most one tensor is in memory at a time, besides what `file` holds.
    """
    out = _Output(sink, order)
    out.data(MAGIC)
    out.word(version)
    out.text(file.architecture)
    for number in (file.num_layers, file.num_heads, file.seq_len, file.head_dim, file.num_query_heads):
        out.word(number)
    if version >= 2:
        # The original writes the number of tokens for 0; a stored 0 is only kept together with all else.
        kept = codec is None and file.token_offset is not None
        out.word(file.token_offset or 0 if kept else file.offset)
    out.numbers(file.tokens)
    if version >= 2:
        out.numbers(file.generated)
    out.word(len(file.layers))
    for entry in file.layers:
        _layer(out, entry, codec, version, advance)
    if version >= 2:
        out.numbers(file.logit_shape)
        out.word(0 if file.logits is None else file.logits.n)
        if file.logits is not None and file.logits.n:
            out.data(_plain_bytes(file.logits, order))
    if codec is None and file.trailing is not None:
        out.data(file.trailing.read())
    out.flush()
    return out.at


def _layer(
    out: _Output, entry: LayerEntry, codec: str | None, version: int, advance: Callable[[int], None] | None
) -> None:
    out.signed(entry.layer, entry.cache_index)
    out.word(len(entry.heads))
    if version >= 5:
        out.text(entry.mode)
        out.word(len(entry.payloads))
        for payload in entry.payloads:
            out.word(len(payload))
            out.data(payload)
    if version >= 6:
        out.word(entry.max_size)
    if version >= 4:
        for shape, slab in ((entry.key_shape, entry.key_slab), (entry.value_shape, entry.value_slab)):
            out.numbers(shape)
            if slab is not None and slab.n and isinstance(slab, StoredTensor) and slab.dtype == Q8_NATIVE:
                _verbatim(out, slab, shape)
            else:
                _tensor(out, slab, codec)
            if advance is not None and slab is not None:
                advance(nbytes_of(slab))
    for tensor in [t for head in entry.heads for t in (head.key, head.value)]:
        _head(out, tensor, codec, version)
        if advance is not None:
            advance(nbytes_of(tensor))


def _head(out: _Output, tensor: TensorData, codec: str | None, version: int) -> None:
    if version < 3:
        out.word(tensor.n)
        out.data(_plain_bytes(tensor, out.order))
    else:
        _tensor(out, tensor, codec)


def nbytes_of(tensor: TensorData) -> int:
    """Return the bytes of the values."""
    return tensor.n * (1 if tensor.dtype == Q8_NATIVE else numpy_dtype(tensor.dtype).itemsize)


def _plain_bytes(tensor: TensorData, order: ByteOrder) -> Any:
    if isinstance(tensor, StoredTensor) and tensor.selector in (None, 0):
        return stored_bytes(tensor, order)
    return _in_order(widened(_values(tensor)), order)


def _values(tensor: TensorData) -> Any:
    out = np.empty(tensor.n, dtype=numpy_dtype(tensor.dtype))
    decode(tensor, out)
    return out


def _in_order(values: Any, order: ByteOrder) -> Any:
    raw = values.view(np.uint8)
    return raw if order == "little" else swapped(raw, values.dtype.itemsize)


def _verbatim(out: _Output, tensor: StoredTensor, shape: tuple[int, ...] = ()) -> None:
    out.word(tensor.selector or 0)
    out.word(tensor.n)
    if tensor.selector == 1:
        out.word(tensor.scale_bits)
    elif tensor.selector == 2:
        out.text(tensor.tag.encode("utf-8"))
        out.word(tensor.data.length)
    out.data(stored_bytes(tensor, out.order, shape))


def _tensor(out: _Output, tensor: TensorData | None, codec: str | None) -> None:
    """Write one tensor with a selector, by the table of section 4 of the page."""
    stored = tensor if isinstance(tensor, StoredTensor) else None
    if stored is not None and (codec is None or (codec == "q8" and stored.selector == 1)):
        _verbatim(out, stored)
    elif tensor is None or not tensor.n:
        out.word(1 if codec == "q8" else 0)
        out.word(0)
        if codec == "q8":
            out.word(0x3F800000)
    elif codec == "native":
        values = _values(tensor)
        out.word(2)
        out.word(tensor.n)
        out.text(tensor.dtype.encode("ascii"))
        out.word(values.nbytes)
        out.data(_in_order(values, out.order))
    else:
        _values_tensor(out, tensor, codec)


def _values_tensor(out: _Output, tensor: TensorData, codec: str | None) -> None:
    if codec != "q8":
        out.word(0)
        out.word(tensor.n)
        out.data(_plain_bytes(tensor, out.order))
        return
    values = widened(_values(tensor))
    found = encode_q8(values)
    out.word(0 if found is None else 1)
    out.word(tensor.n)
    if found is None:
        out.data(_in_order(values, out.order))
    else:
        codes, scale = found
        out.word(int(np.array([scale], dtype=np.float32).view(np.uint32)[0]))
        out.data(codes)

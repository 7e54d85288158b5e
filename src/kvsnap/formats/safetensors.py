"""Plain safetensors with documented key names, for other tools: docs/formats/safetensors.md.

The file format is read and written here, because tensors are streamed one by one and read when they are first used; the
tests let the safetensors library judge what is written.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.errors import DamagedError, FormatError, InputError, UnsupportedError, VersionError
from kvsnap.files import Reader
from kvsnap.formats.foreign import foreign_losses
from kvsnap.formats.native import schema
from kvsnap.formats.native.readers import BytesReader, FileReader
from kvsnap.formats.native.said import pack_messages, parse_said, unpack_messages
from kvsnap.formats.native.sources import MAX_VALUES
from kvsnap.identity import Identity
from kvsnap.layout import PositionRun, Run, Snapshot, Tensor
from kvsnap.protocols import Loss, Progress, Sink
from kvsnap.tensors import TensorSpec, numpy_dtype

__all__ = ["FORMAT", "SafetensorsFormat"]

_TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool":
    "BOOL",
}  # fmt: skip
_NAMES = {code: name for name, code in _TYPES.items()}
_MAX_HEADER = 100_000_000
_KEY = "kvsnap"
_VERSION = 1


class _Piece:
    """One tensor of the file, read when it is first used."""

    def __init__(self, file: FileReader, spec: TensorSpec, offset: int, n_rows: int, *, mapped: bool) -> None:
        self._file, self._spec, self._offset, self._n_rows, self._mapped = file, spec, offset, n_rows, mapped

    def array(self) -> npt.NDArray[Any]:
        """Return the values, read-only."""
        spec, nbytes = self._spec, self._spec.nbytes(self._n_rows)
        data: Any = self._file.map()[self._offset : self._offset + nbytes] if self._mapped else None
        if data is None:
            data = self._file.read_at(self._offset, nbytes)
        values = np.frombuffer(data, dtype=numpy_dtype(spec.dtype)).reshape(spec.shape_with(self._n_rows))
        values.flags.writeable = False
        return values

    def read_into(self, out: npt.NDArray[Any]) -> None:
        """Fill `out`."""
        np.copyto(out, self.array())


class SafetensorsFormat:
    """The `Format` of plain safetensors."""

    name = "safetensors"
    codecs = ("exact",)

    def sniff(self, head: bytes) -> bool:
        """A length that fits a header, then an object."""
        return len(head) > 8 and 2 <= struct.unpack_from("<Q", head)[0] <= _MAX_HEADER and head[8:9] == b"{"

    def load(self, path: str, *, mmap: bool = True) -> Snapshot:
        """Open a file that kvsnap wrote. Raise `FormatError` naming what does not fit."""
        return self._snapshot(Reader(path), mapped=mmap)

    def loads(self, data: bytes | bytearray | memoryview) -> Snapshot:
        """Return the snapshot in these bytes."""
        return self._snapshot(BytesReader(data), mapped=True)

    def losses(self, snapshot: Snapshot, *, codec: str | None = None, version: int | None = None) -> tuple[Loss, ...]:
        """Only what a foreign format alone knows is missing; there are no checksums, as `verify` says."""
        del codec, version
        return foreign_losses(snapshot, self.name)

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
        """Write header and tensors, one by one."""
        del vocab
        _no_options(codec, version, byte_order)
        if snapshot.row_start:
            raise InputError("a partial capture cannot be written alone", found=f"rows from {snapshot.row_start}")
        tensors = [*snapshot.tensors(), *([snapshot.logits] if snapshot.logits else [])]
        ids = np.asarray(snapshot.tokens, dtype="<i4")
        header: dict[str, Any] = {"__metadata__": {"format": "np", _KEY: json.dumps(_metadata(snapshot))}}
        at = 0
        for name, kind, shape, nbytes in [
            *((t.name, _TYPES[t.spec.dtype], t.shape, t.nbytes) for t in tensors),
            ("tokens", "I32", ids.shape, ids.nbytes),
        ]:
            if name in header:
                raise UnsupportedError("two tensors have one name", found=name)
            header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + nbytes]}
            at += nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        start = place = 8 + len(text)
        sink.write_at([struct.pack("<Q", len(text)), text], 0)
        for tensor in tensors:
            values = np.ascontiguousarray(tensor.values())
            place += sink.write_at([values.reshape(-1).view(np.uint8)], place)
            if progress is not None:
                progress(place - start, at)
        sink.write_at([ids.view(np.uint8)], place)
        return start + at

    def _snapshot(self, file: FileReader, *, mapped: bool) -> Snapshot:
        header, start = _header(file)
        metadata = header.pop("__metadata__", None)
        if not isinstance(metadata, dict) or not isinstance(metadata.get(_KEY), str):
            raise FormatError(
                "a safetensors file without the metadata that kvsnap writes",
                path=file.path,
                expected=f"__metadata__.{_KEY}",
            )
        about = _object(metadata[_KEY], file.path, "metadata")
        if about.get("version") != _VERSION:
            raise VersionError(
                "another version of these keys", path=file.path, expected=_VERSION, found=about.get("version")
            )
        geometry = schema.parse_layout(json.dumps(about.get("layout")).encode(), file.path, 8)
        tensors: dict[int, Tensor] = {}
        logits = None
        known = _entries(header, file, start)
        for spec, (row_start, bound) in zip(
            geometry.tensors, _starts(about, len(geometry.tensors), file.path), strict=True
        ):
            if spec.name not in known:
                continue
            dtype, shape, offset = known[spec.name]
            n_rows = shape[spec.row_axis] if 0 <= spec.row_axis < len(shape) else 1
            if dtype != spec.dtype or shape != spec.shape_with(n_rows):
                raise FormatError(
                    f"{spec.name} is not as the metadata says", path=file.path,
                    expected=f"{spec.dtype}{list(spec.shape)}", found=f"{dtype}{list(shape)}",
                )  # fmt: skip
            piece = _Piece(file, spec, offset, n_rows, mapped=mapped)
            tensor = Tensor(spec, piece, start=row_start, n_rows=n_rows, bound=bound)
            if spec.role == "logits":
                logits = tensor
            else:
                tensors[spec.id] = tensor
        return _build(about, geometry, tensors, logits, _tokens(known, file), file.path)


def _no_options(codec: str | None, version: int | None, byte_order: str | None) -> None:
    if codec not in (None, "exact"):
        raise InputError("safetensors holds values as they are", expected="exact", found=codec)
    if version is not None or byte_order is not None:
        raise InputError("safetensors has neither versions nor byte orders", found=version or byte_order)


def _metadata(snapshot: Snapshot) -> dict[str, Any]:
    geometry = schema.geometry_of(replace(snapshot, draft=None))
    held = {t.spec.id: t for t in [*snapshot.tensors(), *([snapshot.logits] if snapshot.logits else [])]}
    return {
        "version": _VERSION,
        "layout": json.loads(schema.pack_layout(geometry)),
        "starts": [[held[spec.id].start, held[spec.id].bound] for spec in geometry.tensors],
        "runs": [[run.kind, run.count] for run in snapshot.runs],
        "positions": [[run.start, run.count] for run in snapshot.positions],
        "n_rows": snapshot.n_rows,
        "n_pending": snapshot.n_pending,
        "token_offset": snapshot.token_offset,
        "state": json.loads(schema.pack_state(snapshot)),
        "identity": snapshot.identity.to_dict(),
        "text": snapshot.text,
        **({} if snapshot.messages is None else {"messages": unpack_messages(pack_messages(snapshot.messages))}),
        "metadata": dict(snapshot.metadata),
    }


def _object(raw: bytes | str, path: str | None, what: str) -> dict[str, Any]:
    try:
        data = json.loads(raw if isinstance(raw, str) else raw.decode())
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"the {what} of a safetensors file is not JSON", path=path, offset=8, found=str(error)
        ) from error
    if not isinstance(data, dict):
        raise FormatError(f"the {what} of a safetensors file is not an object", path=path, offset=8)
    return data


def _header(file: FileReader) -> tuple[dict[str, Any], int]:
    if file.size < 8:
        raise DamagedError("a safetensors file is cut off", path=file.path, expected="8 bytes or more", found=file.size)
    (length,) = struct.unpack("<Q", file.read_at(0, 8))
    if not 2 <= length <= min(_MAX_HEADER, file.size - 8):
        raise FormatError(
            "the header of a safetensors file does not fit", path=file.path, expected=file.size - 8, found=length
        )
    return _object(file.read_at(8, length), file.path, "header"), 8 + length


def _entries(header: Mapping[str, Any], file: FileReader, start: int) -> dict[str, tuple[str, tuple[int, ...], int]]:
    out = {}
    for name, entry in header.items():
        code = entry.get("dtype") if isinstance(entry, dict) else None
        if not isinstance(code, str) or code not in _NAMES:
            raise FormatError(f"{name}: not a tensor of a known dtype", path=file.path, offset=8)
        shape, span = _naturals(entry.get("shape"), 8), _naturals(entry.get("data_offsets"), 2)
        if shape is None or span is None or len(span) != 2:
            raise FormatError(f"{name}: shape or offsets are not lists of integers", path=file.path, offset=8)
        dtype = _NAMES[code]
        nbytes = numpy_dtype(dtype).itemsize
        for size in shape:
            nbytes *= size
        if math.prod(max(size, 1) for size in shape) > MAX_VALUES:  # an empty axis among them makes it no bytes
            raise FormatError(f"{name}: an impossible shape", path=file.path, offset=8, found=shape)
        if span[1] - span[0] != nbytes or start + span[1] > file.size:
            raise FormatError(
                f"{name}: offsets do not fit", path=file.path, offset=8, expected=f"{nbytes} bytes", found=span
            )
        out[name] = (dtype, tuple(shape), start + span[0])
    return out


def _naturals(values: Any, most: int) -> list[int] | None:
    """Return a list of at most so many sane integers, or None."""
    good = isinstance(values, list) and len(values) <= most and all(type(v) is int and 0 <= v < 2**40 for v in values)
    return list(values) if good else None


def _starts(about: Mapping[str, Any], count: int, path: str | os.PathLike[str] | None) -> Sequence[tuple[int, float]]:
    rows = about.get("starts")
    good = isinstance(rows, list) and len(rows) == count
    if not good or not all(isinstance(r, list) and len(r) == 2 and _is_start(*r) for r in rows or ()):
        raise FormatError("metadata: starts is not a list of [first row, bound]", path=path, offset=8)
    return [(row[0], float(row[1])) for row in rows or ()]


def _is_start(first: Any, bound: Any) -> bool:
    sane = type(bound) is float or (type(bound) is int and bound < 2**53)
    return type(first) is int and 0 <= first < 2**31 and sane and bound >= 0


def _tokens(known: Mapping[str, tuple[str, tuple[int, ...], int]], file: FileReader) -> tuple[int, ...]:
    dtype, shape, offset = known.get("tokens", ("", (), 0))
    if dtype != "int32" or len(shape) != 1:
        raise FormatError(
            "no tensor of token ids", path=file.path, expected="tokens, int32, one axis", found=dtype or None
        )
    return tuple(np.frombuffer(file.read_at(offset, 4 * shape[0]), "<i4").tolist())


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r:.60} is no whole number")
    return value


def _build(
    about: Mapping[str, Any], geometry: schema.Geometry, tensors: dict[int, Tensor], logits: Tensor | None,
    tokens: tuple[int, ...], path: str | None,
) -> Snapshot:  # fmt: skip
    try:
        runs = tuple(Run(kind, _whole(count)) for kind, count in about["runs"])
        positions = tuple(PositionRun(_whole(first), _whole(count)) for first, count in about["positions"])
        counts = {name: _whole(about[name]) for name in ("n_rows", "n_pending", "token_offset")}
        text = about.get("text")
        metadata = {str(k): str(v) for k, v in about.get("metadata", {}).items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(
            "metadata: a member is missing or of the wrong type", path=path, offset=8, found=error
        ) from error
    bad_kind = any(run.kind not in ("prompt", "generated") or run.count < 1 for run in runs)
    if bad_kind or sum(run.count for run in runs) != len(tokens) or sum(p.count for p in positions) != counts["n_rows"]:
        raise FormatError("metadata: runs do not sum up to tokens and rows", path=path, offset=8)
    for tensor in tensors.values():
        rows = counts["n_rows"] // tensor.spec.tokens_per_row
        if tensor.spec.grows and tensor.start + tensor.n_rows != rows:
            raise FormatError(f"{tensor.name}: rows are missing", path=path, expected=rows, found=tensor.n_rows)
    state = json.dumps(about.get("state")).encode()
    said = json.dumps({"messages": about["messages"]}).encode() if about.get("messages") is not None else b""
    added = parse_said(said, path, 8).messages
    return Snapshot(
        architecture=geometry.architecture,
        layers=geometry.build(tensors),
        tokens=tokens,
        runs=runs,
        positions=positions,
        logits=logits,
        sampler=schema.parse_sampler(state, path, 8),
        shard=schema.parse_proof(state, geometry.shard, path, 8),
        identity=Identity.from_dict(about.get("identity", {})),
        text=text if isinstance(text, str) else None,
        messages=None if added is None or added.messages is None else unpack_messages(added.messages),
        metadata=metadata,
        source={"format": "safetensors", "path": path},
        draft=None,
        **counts,
    )


FORMAT = SafetensorsFormat()
"""The one instance; it holds no state."""

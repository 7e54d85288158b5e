"""What is in a file, without its tensors and without a model."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsnap import formats
from kvsnap.errors import DamagedError, FormatError, InputError
from kvsnap.formats.native import NAME, Damage, NativeFile, VerifyReport, is_encrypted, verify_closed, verify_file
from kvsnap.formats.native.summary import LayerSummary, Stored, Summary, summary_of
from kvsnap.layout import Layer, Snapshot
from kvsnap.protocols import Progress

__all__ = ["LayerSummary", "NonFinite", "Stored", "Summary", "non_finite", "refuse_key", "summarise", "verify"]


def summarise(path: str | os.PathLike[str], *, key: bytes | None = None) -> Summary:
    """Summarise a file from its index and tables. Raise as `load` does; damaged tensors are `verify`'s business."""
    found = formats.format_of(path)
    if found.name == NAME:
        with closing(NativeFile.open(path, mapped=False, key=key)) as file:
            return summary_of(file)
    refuse_key(found.name, key, path)
    return _foreign_summary(found.load(os.fspath(path), mmap=True), os.fspath(path), found.name)


def refuse_key(name: str, key: object, path: str | os.PathLike[str] | None = None) -> None:
    """Raise `InputError` when a key was given for a format that has no encryption."""
    if key is not None:
        raise InputError(f"a key was given, but {name} files are not encrypted; only native ones are", path=path)


def verify(path: str | os.PathLike[str], *, progress: Progress | None = None, key: bytes | None = None) -> VerifyReport:
    """Check every byte of a file; damage is reported with tensor and token range, not raised.

    An encrypted file is checked without its key too, from outside: damage is found, tampering is not. Most foreign
    formats have no checksums: then only the structure can be checked, and a note says so. Raise `MissingError`,
    `FormatError`, `VersionError`, or `DamagedError` when no commit can be found at all.
    """
    found = formats.format_of(path)
    if found.name != NAME:
        refuse_key(found.name, key, path)
        return _foreign_verify(found.load(os.fspath(path), mmap=False), os.fspath(path), found.name, progress)
    if key is None and is_encrypted(path):
        return verify_closed(path, progress)
    with closing(NativeFile.open(path, mapped=False, key=key)) as file:
        return verify_file(file, progress)


@dataclass(frozen=True, slots=True)
class NonFinite:
    """Values of one tensor that are no numbers: how many are NaN, how many infinite, and the first row with one."""

    layer: int
    tensor: str
    nan: int
    infinite: int
    row: int

    def __str__(self) -> str:
        where = f"layer {self.layer}" if self.layer >= 0 else "logits"
        return f"{where}: {self.tensor} has {self.nan} NaN and {self.infinite} infinite values, first in row {self.row}"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def non_finite(snapshot: Snapshot, progress: Progress | None = None) -> tuple[NonFinite, ...]:
    """Count NaN and infinite values of the used rows, tensor by tensor; those without any are left out.

    Reads every tensor, one at a time, and so checks every byte. Integers have no such values.
    """
    found = []
    tensors = [*snapshot.tensors(), *([snapshot.logits] if snapshot.logits else [])]
    done, total = 0, max(1, sum(t.nbytes for t in tensors))
    for tensor in tensors:
        values = tensor.values()
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)
        if values.dtype.kind in "biu":
            continue
        bad = ~np.isfinite(values)
        if not bad.any():
            continue
        nan, axis, row = int(np.isnan(values).sum()), tensor.spec.row_axis, 0
        if axis >= 0:
            others = tuple(i for i in range(bad.ndim) if i != axis)
            row = tensor.start + int(np.argmax(bad.any(axis=others)))
        found.append(NonFinite(tensor.spec.layer, tensor.name, nan, int(bad.sum()) - nan, row))
    return tuple(found)


def _layer_summary(layer: Layer) -> LayerSummary:
    keys = layer.tensor("k") or layer.tensor("latent") or (layer.tensor("residual") if layer.quantisation else None)
    return LayerSummary(
        index=layer.index,
        kind=layer.kind,
        num_heads=layer.num_heads,
        num_query_heads=layer.num_query_heads,
        head_dim=layer.head_dim,
        dtype="" if keys is None else keys.spec.dtype,
        bytes_per_token=sum(t.spec.nbytes(1) / t.spec.tokens_per_row for t in layer.tensors if t.spec.grows),
    )


def _foreign_summary(snapshot: Snapshot, path: str, name: str) -> Summary:
    layers = tuple(_layer_summary(layer) for layer in snapshot.layers)
    first = next((layer for layer in layers if layer.head_dim), None)
    n_generated = sum(run.count for run in snapshot.runs if run.kind == "generated")
    source = snapshot.source
    info = source.get("info", source.get("notes", ()))
    order = str(source.get("byte_order", ""))
    dialect = " ".join(str(d) for d in (source.get("dialect"), f"{order}-endian" if order else "") if d)
    tensors = [*snapshot.tensors(), *([snapshot.logits] if snapshot.logits else [])]
    size = os.stat(path)
    stored = Stored(len(tensors), size.st_size, snapshot.nbytes, snapshot.bound)
    return Summary(
        path=path, format=name, version=str(snapshot.source.get("version", "")), use="snapshot", file_id="",
        created_ns=size.st_mtime_ns, commit=1, complete=True, sealed=True, architecture=snapshot.architecture,
        num_layers=snapshot.num_layers, num_heads=snapshot.num_heads, num_query_heads=snapshot.num_query_heads,
        head_dim=snapshot.head_dim, dtype=first.dtype if first else "", n_tokens=len(snapshot.tokens),
        n_prompt=len(snapshot.tokens) - n_generated, n_generated=n_generated, n_pending=snapshot.n_pending,
        n_rows=snapshot.n_rows, token_offset=snapshot.token_offset, n_spans=1, has_logits=snapshot.logits is not None,
        has_text=snapshot.text is not None,
        n_messages=None if snapshot.messages is None else len(snapshot.messages), sampler=snapshot.sampler,
        file_bytes=size.st_size, tensor_bytes=snapshot.nbytes,
        stored={str(snapshot.source.get("encoding", name)): stored},
        exact=not snapshot.bound, bound=snapshot.bound, layers=layers, identity=snapshot.identity,
        metadata=snapshot.metadata, dialect=dialect, shard=snapshot.shard,
        notes=tuple(str(note) for note in info) if isinstance(info, (list, tuple)) else (),
    )  # fmt: skip


def _foreign_verify(snapshot: Snapshot, path: str, name: str, progress: Progress | None) -> VerifyReport:
    damages = []
    tensors = [*snapshot.tensors(), *([snapshot.logits] if snapshot.logits else [])]
    done, total = 0, max(1, snapshot.nbytes)
    for tensor in tensors:
        try:
            tensor.values()
        except (DamagedError, FormatError) as error:
            damages.append(Damage(error.message, error.offset or 0, live=True, tensor=tensor.name))
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)
    note = f"{name} files have no checksums: sizes and counts were checked, changed values cannot be noticed"
    return VerifyReport(
        path=path, format=name, n_bytes=os.stat(path).st_size, n_records=1, n_parts=len(tensors), n_commits=1,
        n_tokens=len(snapshot.tokens), damages=tuple(damages), notes=(note,),
    )  # fmt: skip

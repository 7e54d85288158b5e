"""Checks of a file: every byte of it, and values that are no numbers."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsnap import formats
from kvsnap.errors import DamagedError, FormatError
from kvsnap.files import status
from kvsnap.formats.native import NAME, Damage, NativeFile, VerifyReport, is_encrypted, verify_closed, verify_file
from kvsnap.inspection.summary import refuse_key
from kvsnap.layout import Snapshot
from kvsnap.protocols import Progress

__all__ = ["NonFinite", "non_finite", "verify"]


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
        path=path, format=name, n_bytes=status(path).st_size, n_records=1, n_parts=len(tensors), n_commits=1,
        n_tokens=len(snapshot.tokens), damages=tuple(damages), notes=(note,),
    )  # fmt: skip

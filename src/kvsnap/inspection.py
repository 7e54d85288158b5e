"""What is in a file, without its tensors and without a model."""

from __future__ import annotations

import os
from contextlib import closing

from kvsnap.formats.native import NativeFile, VerifyReport, verify_file
from kvsnap.formats.native.summary import LayerSummary, Stored, Summary, summary_of
from kvsnap.protocols import Progress

__all__ = ["LayerSummary", "Stored", "Summary", "summarise", "verify"]


def summarise(path: str | os.PathLike[str]) -> Summary:
    """Summarise a file from its index and tables. Raise as `load` does; damaged tensors are `verify`'s business."""
    with closing(NativeFile.open(path, mapped=False)) as file:
        return summary_of(file)


def verify(path: str | os.PathLike[str], *, progress: Progress | None = None) -> VerifyReport:
    """Check every byte of a file; damage is reported with tensor and token range, not raised.

    Raise `MissingError`, `FormatError`, `VersionError`, or `DamagedError` when no commit can be found at all.
    """
    with closing(NativeFile.open(path, mapped=False)) as file:
        return verify_file(file, progress)

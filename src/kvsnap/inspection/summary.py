"""What is in a file, without its tensors and without a model."""

from __future__ import annotations

import os
from dataclasses import replace

from kvsnap import formats
from kvsnap.errors import InputError
from kvsnap.formats import native
from kvsnap.inspection.described import Summary
from kvsnap.inspection.of_foreign import foreign_summary
from kvsnap.inspection.of_native import summarise_native
from kvsnap.layout import Snapshot
from kvsnap.protocols import Format

__all__ = ["load_as", "refuse_key", "summarise"]


def summarise(path: str | os.PathLike[str], *, key: bytes | None = None, partial: bool = False) -> Summary:
    """Summarise a file from its index and tables. Raise as `load` does; damaged tensors are `verify`'s business.

    With `partial` an encrypted file without its key, and a `.kvsnap` file whose index or tables cannot be read, or
    whose parent is gone, is no error: what can be told is returned, and `Summary.error` says why it is not more.
    """
    found = formats.format_of(path)
    if found.name == native.NAME:
        return summarise_native(path, key, partial=partial)
    refuse_key(found.name, key, path)
    name = os.fspath(path)
    outline = getattr(found, "outline", None)  # of a format whose ids stand among its rows
    if outline is not None:
        snapshot, n_tokens = outline(name)
        return replace(foreign_summary(snapshot, name, found.name), n_tokens=n_tokens, n_prompt=n_tokens)
    return foreign_summary(found.load(name, mmap=True), name, found.name)


def load_as(found: Format, path: str | os.PathLike[str], key: bytes | None, *, mmap: bool = True) -> Snapshot:
    """Open a file as this format. Raise as `load`, `InputError` where a key was given and the format has none."""
    if found.name == native.NAME:
        return native.load(path, mmap=mmap, key=key)
    refuse_key(found.name, key, path)
    return found.load(os.fspath(path), mmap=mmap)


def refuse_key(name: str, key: object, path: str | os.PathLike[str] | None = None) -> None:
    """Raise `InputError` when a key was given for a format that has no encryption."""
    if key is not None:
        raise InputError(f"a key was given, but {name} files are not encrypted; only native ones are", path=path)

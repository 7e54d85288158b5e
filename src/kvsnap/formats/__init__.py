"""File formats. Each turns files into snapshots and back; conversion goes through the snapshot, never pairwise."""

from __future__ import annotations

import os
from importlib import import_module
from typing import cast

from kvsnap.errors import FormatError, InputError
from kvsnap.files import Reader
from kvsnap.protocols import Format

__all__ = ["NAMES", "format_named", "format_of", "format_of_bytes"]

# In the order in which they are asked. A module is loaded when its turn comes, so that users of one format do not pay
# for the others; each has its one instance under the name FORMAT.
_MODULES = {
    "native": "kvsnap.formats.native.plain",
    "mlxkv": "kvsnap.formats.mlxkv",
    "colikv": "kvsnap.formats.colikv",
    "safetensors": "kvsnap.formats.safetensors",
}
NAMES = tuple(_MODULES)
"""Names that `format=` takes."""
HEAD = 64


def format_named(name: str) -> Format:
    """Return the format of this name; raise `InputError` listing the names for another one."""
    if name not in _MODULES:
        raise InputError("no such format", expected=", ".join(NAMES), found=name)
    return cast("Format", import_module(_MODULES[name]).FORMAT)


def format_of_bytes(head: bytes, path: str | None = None) -> Format:
    """Return the format of a file that starts with these bytes, judged by content.

    Raise `FormatError` for no known one.
    """
    for name in NAMES:
        found = format_named(name)
        if found.sniff(head):
            return found
    shown = head[:8].hex(" ") or "no bytes"
    raise FormatError("not a file that kvsnap reads", path=path, offset=0, expected=", ".join(NAMES), found=shown)


def format_of(path: str | os.PathLike[str]) -> Format:
    """Return the format of a file, judged by its first bytes, never by its name."""
    with Reader(path) as reader:
        return format_of_bytes(reader.read_at(0, min(HEAD, reader.size)), reader.path)

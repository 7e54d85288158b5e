"""Checks of where a command is going to write, made before the work whose result would be lost."""

from __future__ import annotations

import os

from kvsnap import inspect
from kvsnap.errors import InputError, KvsnapError, MissingError, StorageError

__all__ = ["check_session", "check_target"]


def check_target(path: str, *, snapshot: bool = True) -> None:
    """Raise `MissingError` for a missing directory, `InputError` for a directory or a session, `StorageError`.

    A session is not replaced by a sealed snapshot: that would drop its history.
    """
    directory = os.path.dirname(path) or "."
    if not os.path.isdir(directory):
        raise MissingError("no such directory to write to", path=directory)
    if os.path.isdir(path):
        raise InputError("a file name is needed, this is a directory", path=path)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise StorageError("no permission to write in this directory", path=directory)
    if not snapshot or not os.path.exists(path):
        return
    try:
        sealed = inspect(path).sealed
    except KvsnapError:
        return  # something else has this name, and is replaced as it is anywhere
    if not sealed:
        raise InputError(
            "a session is not replaced by a snapshot: its history would be lost; use another name", path=path
        )


def check_session(path: str) -> None:
    """Raise as `check_target` does, and `InputError` for a sealed snapshot, which takes no turn."""
    check_target(path, snapshot=False)
    if os.path.exists(path) and inspect(path).sealed:
        raise InputError("a sealed snapshot takes no further turn; a session is needed here", path=path)

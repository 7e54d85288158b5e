"""Checks of where a command is going to write, made before the work whose result would be lost."""

from __future__ import annotations

import os
import stat
from contextlib import closing

from kvsnap import formats
from kvsnap.errors import InputError, KvsnapError, MissingError, StorageError
from kvsnap.formats.native import NAME, NativeFile, is_encrypted

__all__ = ["check_apart", "check_new", "check_session", "check_target", "is_sealed"]


def check_target(path: str, *, overwrite: bool = True, option: str = "--save") -> None:
    """Raise unless a new file can be put at `path`.

    `MissingError` for a missing directory; `InputError` for an empty name, a directory, a link or a device, a session
    (a sealed snapshot would drop its history), and anything that exists when `overwrite` is False; `StorageError`.
    """
    _check_place(path, option)
    if not os.path.lexists(path):
        return
    try:
        sealed = is_sealed(path)
    except KvsnapError:
        sealed = True  # something else has this name
    if not sealed:
        raise InputError(
            "a session is not replaced by a snapshot: its history would be lost; use another name", path=path
        )
    if not overwrite:
        instead = ", or --overwrite to replace it" if not option.startswith(":") else ""
        raise InputError(f"there is a file of this name: use another name{instead}", path=path)


def _check_place(path: str, option: str) -> None:
    if not path:
        raise InputError(f"{option} needs a file name", found="an empty one")
    directory = os.path.dirname(path) or "."
    if not os.path.isdir(directory):
        raise MissingError("no such directory to write to", path=directory)
    try:
        found = os.lstat(path).st_mode
    except FileNotFoundError:
        found = None
    except OSError as error:  # a name that is too long, for one
        raise StorageError(f"cannot be written: {error.strerror}", errno=error.errno, path=path) from error
    if os.path.isdir(path):
        raise InputError("a file name is needed, this is a directory", path=path)
    if found is not None and not stat.S_ISREG(found):
        raise InputError("a regular file is needed, this is a link or a device", path=path)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise StorageError("no permission to write in this directory", path=directory)


def check_new(path: str) -> None:
    """Raise as `check_target` does, and `InputError` when there is anything of this name."""
    _check_place(path, "NEW")
    if os.path.lexists(path):
        raise InputError("there is a file of this name: use another name", path=path)


def check_session(path: str) -> None:
    """Raise as `check_target` does, and `InputError` for a sealed snapshot, which takes no turn."""
    _check_place(path, "--session")
    if os.path.exists(path) and is_sealed(path):
        raise InputError("a sealed snapshot takes no further turn; a session is needed here", path=path)


def is_sealed(path: str) -> bool:
    """Tell whether a file takes no further turn; an encrypted one, and one of another format, does not.

    Reads the end of the file alone. Raise as `inspect` does.
    """
    if is_encrypted(path) or formats.format_of(path).name != NAME:
        return True
    with closing(NativeFile.open(path, mapped=False)) as file:
        return file.sealed


def check_apart(save: str | None, session: str | None) -> None:
    """Raise `InputError` when the snapshot and the session would be one file."""
    if save and session and os.path.abspath(save) == os.path.abspath(session):
        raise InputError("--save and the session need names of their own", path=save)

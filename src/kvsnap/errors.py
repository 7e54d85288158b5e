"""Every error kvsnap raises, sorted by what the caller does next.

One tree under `KvsnapError`. Each class inherits the builtin that people already catch, has a stable
`kind` (part of the public interface, append-only) and an `exit_code` for the command line. Instances carry
`path` and `offset` where a file is concerned, and say what was expected and what was found.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

__all__ = [
    "BusyError",
    "CompatibilityError",
    "ConflictError",
    "ContextError",
    "DamagedError",
    "ExtraMissingError",
    "FormatError",
    "InputError",
    "KeyNeededError",
    "KvsnapError",
    "LossError",
    "MissingError",
    "PoisonedError",
    "StorageError",
    "TamperedError",
    "UnsupportedError",
    "VersionError",
]


class KvsnapError(Exception):
    """Base of all errors raised on purpose.

    `kind` names the cause for programs, `exit_code` is what the command line returns, `path` and `offset`
    (bytes from the start of the file) say where, `expected` and `found` what was compared.
    """

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        offset: int | None = None,
        expected: Any = None,
        found: Any = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.path = None if path is None else os.fspath(path)
        self.offset = offset
        self.expected = expected
        self.found = found

    def __str__(self) -> str:
        where = "" if self.path is None else f"{self.path}: "
        at = "" if self.offset is None else f" (at byte {self.offset})"
        known = (("expected", self.expected), ("found", self.found))
        facts = ", ".join(f"{word} {value}" for word, value in known if value is not None)
        facts = f"; {facts}" if facts else ""
        return f"{where}{self.message}{facts}{at}"

    def to_dict(self) -> dict[str, Any]:
        """Return the error as JSON-ready data: kind, message, path, offset, expected, found."""
        return {
            "kind": self.kind,
            "message": self.message,
            "path": self.path,
            "offset": self.offset,
            "expected": None if self.expected is None else str(self.expected),
            "found": None if self.found is None else str(self.found),
        }


# -- the caller changes the call ---------------------------------------------------------------------------


class InputError(KvsnapError, ValueError):
    """An argument is wrong; nothing was done. Change the call."""

    kind = "input"
    exit_code = 2


class MissingError(KvsnapError, FileNotFoundError):
    """A file, directory or name that was asked for is not there."""

    kind = "missing"
    exit_code = 3


class ExtraMissingError(KvsnapError, ImportError):
    """An optional dependency is not installed; the message is the line to type."""

    kind = "extra"
    exit_code = 11


class UnsupportedError(KvsnapError, NotImplementedError):
    """This model, layer or feature is refused by name, because it could not be done exactly."""

    kind = "unsupported"
    exit_code = 12


# -- the caller uses another file --------------------------------------------------------------------------


class FormatError(KvsnapError, ValueError):
    """The bytes are not a file of the format they were opened as, or break one of its rules."""

    kind = "format"
    exit_code = 4


class VersionError(FormatError):
    """A file of a newer version, or with a required feature, that this release does not know."""

    kind = "version"
    exit_code = 5


class DamagedError(KvsnapError, ValueError):
    """Bytes were cut off or changed after they were written. Restore a copy, or try `kvsnap verify`."""

    kind = "damaged"
    exit_code = 6


class TamperedError(DamagedError):
    """Bytes are whole, but not those that the owner of the key wrote there. Do not trust the file."""

    kind = "tampered"
    exit_code = 17


# -- the caller gives the right key ------------------------------------------------------------------------


class KeyNeededError(KvsnapError, ValueError):
    """The file is encrypted, and its key was not given or is another one."""

    kind = "key"
    exit_code = 16


# -- the caller uses another model, or accepts by name -----------------------------------------------------


class CompatibilityError(KvsnapError, ValueError):
    """The snapshot does not belong to this model. `report` holds each compared field with both values."""

    kind = "wrong-model"
    exit_code = 7

    def __init__(self, message: str, *, report: Any = None, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.report = report


class ContextError(KvsnapError, ValueError):
    """More tokens than the context of the model holds; both numbers are in the message."""

    kind = "context"
    exit_code = 8


class LossError(KvsnapError, ValueError):
    """The target cannot hold all that the source has; accept the loss explicitly."""

    kind = "loss"
    exit_code = 13


# -- the caller tries again --------------------------------------------------------------------------------


class BusyError(KvsnapError, BlockingIOError):
    """Another process writes this file now. Try again."""

    kind = "busy"
    exit_code = 9


class ConflictError(KvsnapError, RuntimeError):
    """The file changed since it was opened. Reopen it, then try again."""

    kind = "conflict"
    exit_code = 10


class PoisonedError(KvsnapError, RuntimeError):
    """A sync failed earlier, so what reached the disk is unknown. Reopen the file before going on."""

    kind = "poisoned"
    exit_code = 15


# -- the caller makes room, or mends permissions -----------------------------------------------------------


class StorageError(KvsnapError, OSError):
    """The operating system refused: no space, no permission, an I/O error. `errno` is kept."""

    kind = "storage"
    exit_code = 14

    def __init__(self, message: str, *, errno: int | None = None, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.errno = errno

"""What a crash test may see of the durable operations: `kvsnap.files.recorder` is the place to put one."""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias

__all__ = ["Operation", "Recorder"]

Operation: TypeAlias = Literal["create", "write", "sync", "rename", "truncate", "unlink", "fsync-dir", "mkdir"]


class Recorder(Protocol):
    """Sees every durable operation after it succeeded, in order."""

    def record(self, operation: Operation, path: str, offset: int, data: bytes) -> None:
        """Take note of one operation on `path`, as it was named to the operating system.

        write: `data` went to byte `offset` (one call per system call, so a partial write is seen as such).
        rename: `data` is the new path, as `os.fsencode` gives it. truncate: `offset` is the new length.
        All others: offset 0, no data.
        """

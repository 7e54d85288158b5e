"""Sessions written anew: a copy under another name, and the same name without what the history no longer needs."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from kvsnap.errors import InputError
from kvsnap.files import Appender, Writer, replacing
from kvsnap.formats.native.assemble import snapshot_of
from kvsnap.formats.native.base import session_file_name
from kvsnap.formats.native.fork import at_commit, cut_at
from kvsnap.formats.native.journal import Journal
from kvsnap.formats.native.live import check_whole
from kvsnap.formats.native.read import NativeFile
from kvsnap.formats.native.readers import Written
from kvsnap.formats.native.replay import History, history_of, with_states, write_history
from kvsnap.protocols import Progress
from kvsnap.records import FileHeader, Footer

__all__ = ["CompactReport", "CopyReport", "check_alone", "copy_session", "replace_compacted", "write_compacted"]


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a copy wrote: `n_tokens` and `n_turns` are those of its history, `notes` what could not be taken along."""

    path: str
    file_id: str
    nbytes: int
    n_tokens: int
    n_turns: int
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {**{name: getattr(self, name) for name in self.__dataclass_fields__}, "notes": list(self.notes)}


@dataclass(frozen=True, slots=True)
class CompactReport(CopyReport):
    """What compacting did: the file had `nbytes_before` and `n_commits_before`, now it has `nbytes` and `n_turns`."""

    nbytes_before: int = 0
    n_commits_before: int = 0


def copy_session(
    file: NativeFile,
    path: str | os.PathLike[str],
    *,
    n_tokens: int | None = None,
    commit: int | None = None,
    nearest: bool = False,
    progress: Progress | None = None,
) -> CopyReport:
    """Write the history of an open session, or a part of it, to the new file `path`, and close the session file.

    `Session.fork` says the rest.
    """
    with closing(file if commit is None else at_commit(file, commit)) as origin:
        cut = cut_at(origin, n_tokens, nearest=nearest)
        if cut is None:
            check_whole(origin)
        history = history_of(origin, cut)
        if n_tokens is None:
            snapshot_of(origin)  # rows that do not add up are refused here too
        with replacing(path, new=True) as writer:
            header, footer = write_history(history, writer, progress=progress)
    return CopyReport(
        os.path.abspath(path), header.file_id.hex(), footer.file_length, history.end.n_tokens, len(history.pieces),
        history.notes,
    )  # fmt: skip


def check_alone(file: NativeFile) -> None:
    """Raise `InputError` for a file that others may start from, which has to stay as it is."""
    if file.path and os.path.basename(file.path) == session_file_name(file.header.file_id):
        raise InputError(
            "this file belongs to a library, and forks may need it: compact it with Library.compact", path=file.path
        )


def write_compacted(
    file: NativeFile, writer: Writer, progress: Progress | None, states: int | None = None
) -> tuple[History, FileHeader, Footer]:
    """Write the live history of an open session as a file of its own, with the states of the last `states` turns."""
    check_whole(file)
    history = with_states(history_of(file), states)
    snapshot_of(file)  # rows that do not add up are refused here too
    header, footer = write_history(history, writer, progress=progress)
    return history, header, footer


def compact_report(file: NativeFile, path: str, history: History, header: FileHeader, footer: Footer) -> CompactReport:
    """Say what compacting `file` to `path` did."""
    return CompactReport(
        path=path, file_id=header.file_id.hex(), nbytes=footer.file_length, n_tokens=history.end.n_tokens,
        n_turns=len(history.pieces), notes=history.notes, nbytes_before=file.end.footer.file_length,
        n_commits_before=file.commit.number,
    )  # fmt: skip


def replace_compacted(
    file: NativeFile,
    path: str,
    progress: Progress | None,
    ready: Callable[[Journal], None],
    states: int | None = None,
) -> CompactReport:
    """Put a compacted file in the place of `path`.

    `ready` is handed the journal of it, locked, before it has the name: whether it has got it, also when an error comes
    behind that (a directory that cannot be synced, an interrupt), `Journal.is_named` tells. It closes it if not.
    """
    with replacing(path) as writer:
        history, header, footer = write_compacted(file, writer, progress, states)
        appender = Appender.taking(writer)
        ready(Journal(path, appender, NativeFile(Written(appender, footer.file_length), mapped=False)))
    return compact_report(file, path, history, header, footer)

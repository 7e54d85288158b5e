"""The turns of a history, counted: which are live, which were complete, which were cut off since."""

from __future__ import annotations

from bisect import bisect_left

from kvsnap.formats.native import NativeFile
from kvsnap.formats.native.tables import Commit, Operation
from kvsnap.formats.native.told import stop_of
from kvsnap.formats.native.turns import walk
from kvsnap.inspection.described import TurnCounts
from kvsnap.layout import CUT_OFF

__all__ = ["turn_counts"]


def turn_counts(file: NativeFile) -> TurnCounts:
    """Count the turns of an open file, back to the beginning of its history. Reads each COMMIT, and its NOTE.

    Raise `DamagedError` or `FormatError` where the chain of commits is broken.
    """
    if file.vault is not None:  # a sealed snapshot, whose one commit was opened already
        whole = _is_whole(file, file.commit)
        return _counts(file, len(file.live), len(file.live) * whole, 0, 0)
    n_live = complete = inherited = dropped = 0
    for where, entries in file.stretches:
        n_live += len(entries)
        found, gone = _told(where, [entry.span for entry in entries])
        complete += found
        if where is file:
            dropped = gone
        else:
            inherited += len(entries)
    return _counts(file, n_live, complete, inherited, dropped)


def _counts(file: NativeFile, n_live: int, complete: int, inherited: int, dropped: int) -> TurnCounts:
    return TurnCounts(
        n_commits=file.commit.number, n_live=n_live, n_complete=complete, n_cut_off=n_live - complete,
        n_inherited=inherited, n_dropped=dropped, last_operation=file.commit.operation_name,
        last_stop=stop_of(file, file.commit),
    )  # fmt: skip


def _is_whole(file: NativeFile, commit: Commit) -> bool:
    return commit.complete and stop_of(file, commit) not in CUT_OFF


def _told(file: NativeFile, live: list[int]) -> tuple[int, int]:
    """Return how many turns of a file that are live were complete, and how many that it appended are not live."""
    complete = gone = 0
    for commit, offset in walk(file.commit, file.end.footer.commit_offset, file.header, file.reader):
        if commit.operation not in (Operation.APPEND, Operation.SEAL):
            continue
        place = bisect_left(live, commit.previous)  # its SPAN stands between the commit before and this one
        if place < len(live) and live[place] < offset:
            complete += _is_whole(file, commit)
        else:
            gone += 1
    return complete, gone

"""The turns of a history, counted: which are live, which were complete, which were cut off since."""

from __future__ import annotations

import os
from bisect import bisect_left
from contextlib import closing
from dataclasses import dataclass

from kvsnap.formats.native import NativeFile
from kvsnap.formats.native.tables import Commit, Operation
from kvsnap.formats.native.told import has_prompt, piece_of, stop_of
from kvsnap.formats.native.turns import walk
from kvsnap.inspection.described import TurnCounts
from kvsnap.layout import CUT_OFF, UNFINISHED

__all__ = ["TurnText", "turn_counts", "turn_texts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnText:
    """What one live turn added: its number from 1 on, its first token and the one behind its last, ids, and text.

    `text` is None where none is stored.
    """

    number: int
    start: int
    stop: int
    tokens: tuple[int, ...]
    text: str | None


def turn_texts(path: str | os.PathLike[str], key: bytes | None = None) -> tuple[TurnText, ...]:
    """Return what each live turn of a `.kvsnap` file added, oldest first; a snapshot is one turn. Reads no tensor.

    Raise as `kvsnap.load`.
    """
    found: list[TurnText] = []
    with closing(NativeFile.open(path, mapped=False, key=key)) as file:
        start = 0
        for number, span in enumerate(file.spans(), 1):
            stop = start + span.entry.n_tokens
            said = piece_of(span).text
            ids = tuple(span.table.tokens[: span.entry.n_tokens].tolist())
            text = None if said is None else said[1]
            found.append(TurnText(number=number, start=start, stop=stop, tokens=ids, text=text))
            start = stop
    return tuple(found)


def turn_counts(file: NativeFile) -> TurnCounts:
    """Count the turns of an open file, back to the beginning of its history. Reads each COMMIT, and its NOTE.

    Raise `DamagedError` or `FormatError` where the chain of commits is broken.
    """
    if file.vault is not None:  # a sealed snapshot, whose one commit was opened already
        whole = _is_whole(file, file.commit)
        return _counts(file, len(file.live), len(file.live) * whole, 0, 0, 0)
    n_live = complete = on_the_way = inherited = dropped = 0
    for where, entries in file.stretches:
        n_live += len(entries)
        found, parts, gone = _told(where, [entry.span for entry in entries])
        complete += found
        on_the_way += parts
        if where is file:
            dropped = gone
        else:
            inherited += len(entries)
    return _counts(file, n_live, complete, on_the_way, inherited, dropped)


def _counts(
    file: NativeFile, n_live: int, complete: int, on_the_way: int, inherited: int, dropped: int
) -> TurnCounts:  # fmt: skip
    return TurnCounts(
        n_commits=file.commit.number, n_live=n_live, n_complete=complete, n_cut_off=n_live - complete - on_the_way,
        n_on_the_way=on_the_way, n_inherited=inherited, n_dropped=dropped,
        last_operation=file.commit.operation_name, last_stop=stop_of(file, file.commit),
    )  # fmt: skip


def _is_whole(file: NativeFile, commit: Commit) -> bool:
    return commit.complete and stop_of(file, commit) not in CUT_OFF


def _told(file: NativeFile, live: list[int]) -> tuple[int, int, int]:
    """Count what a file appended: live turns that were complete, live parts of one that goes on, what is not live."""
    complete = on_the_way = gone = 0
    later = 0  # the SPAN of the commit behind, if that appended and is live; 0: not
    for commit, offset in walk(file.commit, file.end.footer.commit_offset, file.header, file.reader):
        behind, later = later, 0
        if commit.operation not in (Operation.APPEND, Operation.SEAL):
            continue
        place = bisect_left(live, commit.previous)  # its SPAN stands between the commit before and this one
        if place == len(live) or live[place] >= offset:
            gone += 1
            continue
        later = live[place]
        if _is_whole(file, commit):
            complete += 1
        elif behind and stop_of(file, commit) == UNFINISHED:
            on_the_way += not has_prompt(file, behind)
    return complete, on_the_way, gone

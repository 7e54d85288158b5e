"""The turns of a history, counted: which are live, which were complete, which were cut off since."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass

from kvsnap.errors import DamagedError, FormatError
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

    Parts of it that were published before its end are not turns of their own. `text` is None where none is stored.
    """

    number: int
    start: int
    stop: int
    tokens: tuple[int, ...]
    text: str | None


def turn_texts(path: str | os.PathLike[str], key: bytes | None = None) -> tuple[TurnText, ...]:
    """Return what each live turn of a `.kvsnap` file added, oldest first; a snapshot is one turn. Reads no tensor.

    Where the chain of commits is broken, parts that were published on the way are not told from turns. Raise as
    `kvsnap.load`.
    """
    found: list[TurnText] = []
    with closing(NativeFile.open(path, mapped=False, key=key)) as file:
        parts: set[tuple[NativeFile, int]] = set()
        with suppress(DamagedError, FormatError):
            parts = {(where, span) for where, told in _stretches(file) for span in told.parts}
        ids: list[int] = []
        said: list[str | None] = []
        start = 0
        for span in file.spans():
            ids += span.table.tokens[: span.entry.n_tokens].tolist()
            piece = piece_of(span).text
            said.append(None if piece is None else piece[1])
            if (span.file, span.entry.span) in parts:
                continue
            texts = [one for one in said if one is not None]
            text = "".join(texts) if len(texts) == len(said) else None
            stop = start + len(ids)
            found.append(TurnText(number=len(found) + 1, start=start, stop=stop, tokens=tuple(ids), text=text))
            start, ids, said = stop, [], []
    return tuple(found)


def turn_counts(file: NativeFile) -> TurnCounts:
    """Count the turns of an open file, back to the beginning of its history. Reads each COMMIT, and its NOTE.

    Raise `DamagedError` or `FormatError` where the chain of commits is broken.
    """
    stretches = list(_stretches(file))
    live = [told.n_live - len(told.parts) for _, told in stretches]
    complete = sum(told.n_complete for _, told in stretches)
    return TurnCounts(
        n_commits=file.commit.number, n_live=sum(live), n_complete=complete, n_cut_off=sum(live) - complete,
        n_on_the_way=sum(len(told.parts) for _, told in stretches), n_inherited=sum(live[:-1]),
        n_dropped=stretches[-1][1].n_gone, last_operation=file.commit.operation_name,
        last_stop=stop_of(file, file.commit),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Stretch:
    """What one file tells of its part of a history: live spans, whole turns, parts on the way, and what is gone."""

    n_live: int
    n_complete: int = 0
    parts: frozenset[int] = frozenset()
    n_gone: int = 0


def _stretches(file: NativeFile) -> Iterator[tuple[NativeFile, _Stretch]]:
    """Yield what each file of a history tells, the oldest first. Raise as `turn_counts`."""
    if file.vault is not None:  # a sealed snapshot, whose one commit was opened already
        n_live = len(file.live)
        yield file, _Stretch(n_live, n_live * _is_whole(file, file.commit))
        return
    for where, entries in file.stretches:
        yield where, _told(where, [entry.span for entry in entries])


def _is_whole(file: NativeFile, commit: Commit) -> bool:
    return commit.complete and stop_of(file, commit) not in CUT_OFF


def _told(file: NativeFile, live: list[int]) -> _Stretch:
    """Return what became of all that a file appended; `live` are the offsets of its live spans."""
    complete = gone = 0
    parts = set()
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
        elif behind and stop_of(file, commit) == UNFINISHED and not has_prompt(file, behind):
            parts.add(later)
    return _Stretch(len(live), complete, frozenset(parts), gone)

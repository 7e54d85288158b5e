"""The turns of a history, counted: which are live, which were complete, which were cut off since."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass

from kvsnap.errors import DamagedError, FormatError
from kvsnap.formats.native import NativeFile
from kvsnap.formats.native.said import Said
from kvsnap.formats.native.tables import Commit, Entry, Operation
from kvsnap.formats.native.told import goes_on, piece_of, stop_of
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
        before = said = Said()
        start = 0
        for span in file.spans():
            ids += span.table.tokens[: span.entry.n_tokens].tolist()
            said = said.add(piece_of(span))
            if (span.file, span.entry.span) in parts:
                continue
            stop, text = start + len(ids), _added(before.text, said.text)
            found.append(TurnText(number=len(found) + 1, start=start, stop=stop, tokens=tuple(ids), text=text))
            start, ids, before = stop, [], said
    return tuple(found)


def _added(before: str | None, text: str | None) -> str | None:
    """Return what a turn added to the text before it; None where one of the two is not stored."""
    if before is None or text is None:
        return None
    if text.startswith(before):
        return text[len(before) :]
    # The last character may have been half of one before: its missing bytes change it.
    return text[len(os.path.commonprefix([before, text])) :]  # noqa: RUF071 # characters are meant


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
    stretches = file.stretches
    for number, (where, entries) in enumerate(stretches):
        behind = next(((later, spans[0]) for later, spans in stretches[number + 1 :] if spans), None)
        yield where, _told(where, entries, behind)


def _is_whole(file: NativeFile, commit: Commit) -> bool:
    return commit.complete and stop_of(file, commit) not in CUT_OFF


def _told(file: NativeFile, entries: tuple[Entry, ...], behind: tuple[NativeFile, Entry] | None) -> _Stretch:
    """Return what became of all that a file appended; `entries` are its live ones, `behind` is the one after them."""
    live = [entry.span for entry in entries]
    complete = gone = 0
    parts = set()
    later = 0  # the SPAN of the commit behind, if that appended and is live; 0: not
    for commit, offset in walk(file.commit, file.end.footer.commit_offset, file.header, file.reader):
        appended, later = later, 0
        if commit.operation not in (Operation.APPEND, Operation.SEAL):
            continue
        place = bisect_left(live, commit.previous)  # its SPAN stands between the commit before and this one
        if place == len(live) or live[place] >= offset:
            gone += 1
            continue
        later = live[place]
        follows = (file, entries[place + 1]) if place + 1 < len(live) else behind
        unfinished = stop_of(file, commit) == UNFINISHED
        replaced = follows is not None and follows[1].span != appended
        if follows and (unfinished or replaced) and goes_on(file, entries[place], *follows, unfinished=unfinished):
            parts.add(later)
        elif _is_whole(file, commit):
            complete += 1
    return _Stretch(len(live), complete, frozenset(parts), gone)

"""The ids, the text and the messages of a history, read from the tables of its spans alone. Spec sections 7 and 9."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from kvsnap.errors import DamagedError, FormatError
from kvsnap.formats.native import schema
from kvsnap.formats.native.read import NativeFile, Span, spans_of
from kvsnap.formats.native.said import Piece, Said, pack_messages, parse_said
from kvsnap.formats.native.tables import Commit, Entry, Operation, Part
from kvsnap.layout import Snapshot
from kvsnap.records import RECORD_SIZE, Kind

__all__ = ["Told", "goes_on", "piece_of", "state_parts", "stop_of", "told_of"]


@dataclass(frozen=True, slots=True)
class Told:
    """What a history tells. `ends` has a pair for each entry behind which the messages are known: tokens, messages."""

    tokens: tuple[int, ...] = ()
    said: Said = field(default_factory=Said)
    ends: tuple[tuple[int, int], ...] = ()

    def with_turn(self, snapshot: Snapshot) -> Told:
        """Return what the history tells once a snapshot was appended. Raise `InputError` for what is no message."""
        said = replace(self.said, text=snapshot.text)
        if snapshot.messages is not None:
            said = Said(snapshot.text, pack_messages(snapshot.messages), whole=True, told=True)
        end = ((len(snapshot.tokens), len(said.messages)),) if said.known else ()
        return Told(snapshot.tokens, said, self.ends + end)


def piece_of(span: Span) -> Piece:
    """Return what an entry of a live list says, of which fewer tokens than those of its span may be kept."""
    piece = parse_said(span.table.meta, span.file.path, span.payload)
    return piece if span.entry.n_tokens == len(span.table.tokens) else piece.cut()


def told_of(live: Iterable[tuple[NativeFile, Entry]]) -> Told:
    """Return what a live list, or its beginning, tells. Raise `FormatError` or `DamagedError` as `spans_of`."""
    ids, said, ends, n_tokens = [], Said(), [], 0
    for span in spans_of(live):
        ids.append(span.table.tokens[: span.entry.n_tokens])
        n_tokens += span.entry.n_tokens
        said = said.add(piece_of(span))
        if said.known:
            ends.append((n_tokens, len(said.messages)))
    every = np.concatenate(ids) if ids else np.zeros(0, np.int32)
    return Told(tuple(every.tolist()), said, tuple(ends))


def state_parts(file: NativeFile) -> tuple[Part, ...]:
    """Return the parts of what is replaced at the end of the history."""
    where, offset = file.state_place()
    return where.table_at(offset, Kind.STATE)[0].parts if offset else ()


def stop_of(file: NativeFile, commit: Commit) -> str:
    """Return why the answer that a commit added ended, as its NOTE says; empty where it does not, or is damaged."""
    if commit.operation not in (Operation.APPEND, Operation.SEAL) or not commit.note:
        return ""
    with suppress(DamagedError, FormatError):
        raw, _, _ = file.table_of(commit.note, kind=Kind.NOTE)
        return schema.parse_note(raw, file.path, commit.note + RECORD_SIZE).get("stop", "")
    return ""


def goes_on(file: NativeFile, entry: Entry, where: NativeFile, behind: Entry, *, unfinished: bool) -> bool:
    """Tell whether the turn of an entry goes on in the one behind it, and does not end there or was left.

    An answer that is given once more reads the end of its prompt again: it begins with ids that were cut off for it.
    """
    table = where.table_at(behind.span, Kind.SPAN)[0]
    n_prompt = table.runs[0].count if table.runs and table.runs[0].kind == "prompt" else 0
    if not n_prompt:
        return unfinished
    own = file.table_at(entry.span, Kind.SPAN)[0].tokens
    cut = own[entry.n_tokens : entry.n_tokens + n_prompt]
    return len(table.runs) > 1 and cut.tolist() == table.tokens[:n_prompt].tolist()

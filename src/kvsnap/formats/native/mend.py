"""Opening a damaged file: what can be proven takes the place of the damaged header, footer, INDEX, BASE and LAYOUT.

Nothing is guessed: a list of spans is the right one when its digest is that of the COMMIT, and a record in the place of
another one must be named by a commit of the same history. Spec sections 10, 11, 14 and 19.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import cached_property

from kvsnap.errors import DamagedError, FormatError, MissingError, UnsupportedError, VersionError
from kvsnap.files import Reader
from kvsnap.formats.native import schema
from kvsnap.formats.native.base import Base, check_parent, missing_parent, parent_path, parse_base
from kvsnap.formats.native.read import MAX_JSON, NativeFile
from kvsnap.formats.native.readers import FileReader
from kvsnap.formats.native.survey import Patched, Survey, prove_header
from kvsnap.formats.native.tables import Commit, Entry, Operation, history_digest, parse_index
from kvsnap.formats.native.verify import Damage
from kvsnap.records import (
    ENCRYPTED,
    FOOTER_SIZE,
    FORKED,
    HEADER_SIZE,
    RECORD_SIZE,
    FileHeader,
    Kind,
    read_record,
    read_record_header,
    record_end,
)

__all__ = ["Findings", "Mended"]

_BROKEN = (DamagedError, FormatError)
_MAX_REWINDS = 1000  # made again for one file: each costs a pass over the tables before it


@dataclass(slots=True)
class Findings:
    """What was found: the places that cost a part of the history, and what else is to know."""

    lost: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def lose(self, what: str, offset: int, *, tensor: str = "", tokens: tuple[int, int] | None = None,
             path: str | None = None) -> None:  # fmt: skip
        """Say that a part of the history is lost."""
        self.lost.append(Damage(what, offset, live=True, tensor=tensor, tokens=tokens, path=path))


class Mended:
    """A damaged file, open at the last commit that can be used; `file` reads as if it were whole, up to its spans.

    The parent of a fork is mended too. Raise `DamagedError` when no commit can be used, `MissingError` without a
    parent that is needed.
    """

    def __init__(
        self, reader: FileReader, findings: Findings, opened: ExitStack, *, at: tuple[int, bytes] | None = None
    ) -> None:
        """Open the last commit, or the one of this offset and digest. Parents are closed by `opened`."""
        self.reader, self.findings, self._opened = reader, findings, opened
        self.header, self.intact = prove_header(reader)
        if self.header.required & ENCRYPTED or (not self.intact and _starts_with_key(reader, self.header)):
            raise UnsupportedError(
                "an encrypted file cannot be repaired: what is sealed is whole or nothing; take a copy",
                path=reader.path,
            )
        if not self.intact:
            findings.notes.append(f"{reader.path}: the file header is damaged; the new file has one of its own")
        offset, digest = self._last() if at is None else at
        self.file = self._open(offset, digest)
        self._mend_base()
        self._mend_entries(movable=at is None)
        if self.file.base is not None and self.file.parent is None:
            vars(self.file)["stretches"] = ((self.file, self.file.entries),)
        self._mend_layout()

    @cached_property
    def survey(self) -> Survey:
        """Every record of the file."""
        return Survey(self.reader, self.header)

    def _open(self, offset: int, digest: bytes) -> NativeFile:
        if self.intact:
            return NativeFile(self.reader, mapped=False, at=(offset, digest))
        commit, _, _ = self.survey.commit_at(offset)
        self.header = replace(self.header, required=FORKED if commit.base else 0)
        return NativeFile(Patched(self.reader, self.header), mapped=False, at=(offset, digest))

    # -- the commit ------------------------------------------------------------------------------------------

    def _last(self) -> tuple[int, bytes]:
        """Return offset and digest of the last commit that is whole, and say what stands behind it."""
        survey, notes = self.survey, self.findings.notes
        errors: list[str] = []
        for offset in reversed(survey.of_kind(Kind.COMMIT)):
            try:
                commit, digest, end = survey.commit_at(offset)
            except VersionError:
                raise
            except _BROKEN as error:
                errors.append(str(error))
                place = record_end(offset, read_record_header(self.reader, self.header, offset))
                if place not in survey.footers and place + FOOTER_SIZE <= self.reader.size:
                    self.findings.lose(f"a commit cannot be read: {error.message}", error.offset or offset)
                continue
            if end not in survey.footers:
                notes.append(f"commit {commit.number} has no valid footer, but is whole: it is taken for published")
            self._behind(min(end + FOOTER_SIZE, self.reader.size))
            return offset, digest
        told = f": {errors[0]}" if errors else ""
        raise DamagedError(f"no commit can be read, so nothing can be proven{told}", path=self.reader.path)

    def _behind(self, end: int) -> None:
        """Say what stands behind the end of the last commit."""
        survey = self.survey
        for place, footer in survey.footers.items():
            if place >= end:
                self.findings.lose(f"commit {footer.commit} was published, but cannot be read", footer.commit_offset)
        if self.reader.size > end:
            self.findings.notes.append(
                f"{self.reader.size - end} bytes behind the last commit that is whole are not part of the history"
            )

    # -- where a fork starts -----------------------------------------------------------------------------------

    def _mend_base(self) -> None:
        file = self.file
        try:
            base = file.base
        except VersionError:
            raise
        except _BROKEN as error:
            if bool(self.header.required & FORKED) != bool(file.commit.base):
                raise
            base = next(self._other_bases(), None)
            if base is None:
                raise
            vars(file)["base"] = base
            self.findings.notes.append(f"BASE is damaged, another one of the file says the same ({error.message})")
        if base is not None:
            vars(file)["parent"] = self._parent(base)

    def _other_bases(self) -> Iterator[Base]:
        """Yield each other BASE of the file with which the history has the digest that its COMMIT names."""
        file, first = self.file, None
        for offset in reversed(self.survey.of_kind(Kind.BASE)):
            try:
                _, payload = read_record(file.reader, file.header, offset, kind=Kind.BASE)
                base = parse_base(payload, file.path, offset + RECORD_SIZE)
                vars(file)["base"] = base
                vars(file).pop("entries", None)
                first = file.entries[0] if file.entries else None
                if first is not None:
                    table, _, _ = file.table_at(first.span, Kind.SPAN)
                    if history_digest(base.history, table.tokens[: first.n_tokens], first.n_rows) != first.digest:
                        continue
            except _BROKEN:
                continue
            yield base

    def _parent(self, base: Base) -> NativeFile | None:
        """Return the parent, mended; None where it cannot be read and nothing of it is kept."""
        place = parent_path(self.file.path, base)
        try:
            reader = self._opened.enter_context(closing(Reader(place, follow_symlinks=False)))
            parent = Mended(reader, self.findings, self._opened, at=(base.offset, base.digest)).file
            depth = parent.base.depth if parent.base else 0
            check_parent(self.file.path, base, file_id=parent.header.file_id, commit=parent.commit.number, depth=depth)
        except (MissingError, *_BROKEN) as error:
            commit = self.file.commit
            if base.kept or not (commit.layout and commit.identity):
                if isinstance(error, MissingError) and not os.path.exists(place):
                    raise missing_parent(self.file.path, place, error) from error
                raise
            self.findings.notes.append(f"the parent of this fork cannot be read, and nothing of it is kept: {error}")
            return None
        return parent

    # -- the live list -------------------------------------------------------------------------------------------

    def _mend_entries(self, *, movable: bool) -> None:
        file = self.file
        try:
            _ = file.entries
        except VersionError:
            raise
        except _BROKEN as error:
            place, digest, found = _Replayed(file, self.survey).run(error)
            last = file.commit.number
            if place == file.end.footer.commit_offset:
                vars(file)["entries"] = found
                self.findings.notes.append(f"{error.message}: the list of spans was made anew from the commits")
                return
            if not movable:
                raise
            self.file = file = self._open(place, digest)
            vars(file)["entries"] = found
            self.findings.lose(
                f"{error.message}, and the list of spans cannot be made anew: what commits "
                f"{file.commit.number + 1} to {last} did is lost", error.offset or 0,
            )  # fmt: skip
            self._mend_base()

    # -- the layout ------------------------------------------------------------------------------------------------

    def _mend_layout(self) -> None:
        file = self.file
        try:
            _ = file.geometry
        except VersionError:
            raise
        except _BROKEN as error:
            # All commits since the first span that is still live are of one history, and so of one geometry.
            first = self.number_of(file.entries[0]) if file.entries else None
            for offset, commit in self.commits_since(first) if first is not None else ():
                if commit.layout == file.commit.layout or not commit.layout:
                    continue
                try:
                    payload, place = file._payload(commit.layout, Kind.LAYOUT)
                    vars(file)["geometry"] = schema.parse_layout(payload, file.path, place)
                except _BROKEN:
                    continue
                self.findings.notes.append(
                    f"LAYOUT is damaged ({error.message}): that of the commit at byte {offset} of the same history "
                    "takes its place"
                )
                return
            raise DamagedError(
                f"LAYOUT is damaged ({error.message}), and no other one of this history is in the file, so that "
                "nothing can be repaired", path=error.path, offset=error.offset,
            ) from error  # fmt: skip

    def number_of(self, entry: Entry) -> int | None:
        """Return the number of the commit that published a span of this file; None when it cannot be read."""
        try:
            return read_record_header(self.file.reader, self.file.header, entry.span, kind=Kind.SPAN).commit
        except _BROKEN:
            return None

    def commits_since(self, number: int) -> Iterator[tuple[int, Commit]]:
        """Yield each commit from this number on up to the one that the file is open at, the last one first."""
        last = self.file.end.footer.commit_offset
        for offset in reversed(self.survey.of_kind(Kind.COMMIT)):
            if offset > last:
                continue
            try:
                commit, _, _ = self.survey.commit_at(offset)
            except _BROKEN:
                continue
            if commit.number < number:
                return
            yield offset, commit


def _starts_with_key(reader: FileReader, header: FileHeader) -> bool:
    try:
        return read_record_header(reader, header, HEADER_SIZE).kind == Kind.KEY
    except _BROKEN:
        return False


class _Replayed:
    """The live list made anew, commit by commit from the first one of the file."""

    def __init__(self, file: NativeFile, survey: Survey) -> None:
        self.file, self.survey = file, survey
        self.entries: list[Entry] = []
        self.ends: list[tuple[int, int]] = []  # tokens and rows behind each entry, in the whole history
        self.start = (0, 0, bytes(16))  # tokens, rows and digest of what is kept of a parent
        self.waiting: list[tuple[int, int]] = []  # spans that no commit was seen of: offset, number of their commit
        self.states: dict[int, int] = {}
        self.seen: dict[tuple[int, int, bytes], int] = {}  # commits whose list could be made: what they had, where
        self.rewinds = 0

    def run(
        self, error: DamagedError | FormatError, *, last: int | None = None
    ) -> tuple[int, bytes, tuple[Entry, ...]]:
        """Return the last commit whose list could be made, up to `last`: its offset, its digest, the entries.

        Raise the error given when there is none.
        """
        last = self.file.end.footer.commit_offset if last is None else last
        found: tuple[int, bytes, tuple[Entry, ...]] | None = None
        for offset, kind, number in self.survey:
            if offset > last:
                break
            if kind == Kind.SPAN:
                self.waiting.append((offset, number))
            elif kind == Kind.STATE:
                self.states[number] = offset
            elif kind == Kind.COMMIT:
                try:
                    commit, digest, _ = self.survey.commit_at(offset)
                    self._move_base(commit)
                except VersionError:
                    raise
                except _BROKEN:
                    continue
                if self._step(commit) or self._direct(commit) or self._rewind(commit, error):
                    found = (offset, digest, tuple(self.entries))
                    self.seen[commit.n_tokens, commit.n_rows, commit.digest] = offset
                self.waiting, self.states = [], {}
        if found is None:
            raise error
        return found

    def _move_base(self, commit: Commit) -> None:
        if commit.base:
            _, payload = read_record(self.file.reader, self.file.header, commit.base, kind=Kind.BASE, limit=MAX_JSON)
            base = parse_base(payload, self.file.path, commit.base + RECORD_SIZE)
            self.start = (base.n_tokens, base.n_rows, base.history)

    # -- one commit ----------------------------------------------------------------------------------------------

    def _fits(self, commit: Commit) -> bool:
        tokens, rows = self.ends[-1] if self.ends else self.start[:2]
        digest = self.entries[-1].digest if self.entries else self.start[2]
        state = self.entries[-1].state if self.entries else 0
        found = (commit.n_tokens, commit.n_rows, commit.digest, commit.state)
        return (tokens, rows, digest, state) == found

    def _step(self, commit: Commit) -> bool:
        """Take the list from the commit before to this one; tell whether it has the digest that the commit names."""
        if commit.operation == Operation.RESET:
            self._set(())
        try:
            for offset, number in self.waiting:
                self._append(offset, commit.state if number == commit.number else self.states.get(number, 0))
            self._cut(commit.n_tokens, commit.n_rows)
        except VersionError:
            raise
        except _BROKEN:
            return False
        n_tail = len(commit.tail)
        if n_tail and [e.digest for e in self.entries[-n_tail:]] == [e.digest for e in commit.tail]:
            self.entries[-n_tail:] = commit.tail
        return self._fits(commit)

    def _direct(self, commit: Commit) -> bool:
        """Take the list from the COMMIT and its INDEX."""
        kept: tuple[Entry, ...] = ()
        if commit.index:
            try:
                _, payload = read_record(self.file.reader, self.file.header, commit.index, kind=Kind.INDEX)
                kept = parse_index(payload, self.file.path, commit.index + RECORD_SIZE)[: commit.index_kept]
            except _BROKEN:
                return False
        self._set((*kept, *commit.tail))
        return self._fits(commit)

    def _rewind(self, commit: Commit, error: DamagedError | FormatError) -> bool:
        """Take the list of the earlier commit that a rewind went to, made once more from the start."""
        there = self.seen.get((commit.n_tokens, commit.n_rows, commit.digest))
        if commit.operation != Operation.REWIND or there is None or self.rewinds >= _MAX_REWINDS:
            return False
        self.rewinds += 1
        again = _Replayed(self.file, self.survey)
        again.rewinds = self.rewinds
        self._set(again.run(error, last=there)[2])
        self.rewinds = again.rewinds
        return self._fits(commit)

    def _set(self, entries: tuple[Entry, ...]) -> None:
        self.entries, self.ends = list(entries), []
        tokens, rows, _ = self.start
        for entry in entries:
            tokens, rows = tokens + entry.n_tokens, rows + entry.n_rows
            self.ends.append((tokens, rows))

    def _append(self, offset: int, state: int) -> None:
        table, _, check = self.file.table_at(offset, Kind.SPAN)
        self._cut(table.token_start, table.row_start)
        previous = self.entries[-1].digest if self.entries else self.start[2]
        digest = history_digest(previous, table.tokens, table.n_rows)
        self.entries.append(Entry(offset, len(table.tokens), table.row_start, table.n_rows, state, check, digest))
        self.ends.append((table.token_start + len(table.tokens), table.row_start + table.n_rows))

    def _cut(self, n_tokens: int, n_rows: int) -> None:
        """Keep so many tokens and rows, as a truncate does."""
        if (self.ends[-1] if self.ends else self.start[:2]) == (n_tokens, n_rows):
            return
        count = bisect_right(self.ends, n_tokens, key=lambda end: end[0])
        cut = self.entries[count : count + 1]
        del self.entries[count:], self.ends[count:]
        tokens, rows = self.ends[-1] if self.ends else self.start[:2]
        if n_tokens > tokens and cut:
            if n_rows < rows:
                raise FormatError("a cut keeps fewer rows than there were before", path=self.file.path, found=n_rows)
            table, _, _ = self.file.table_at(cut[0].span, Kind.SPAN)
            previous = self.entries[-1].digest if self.entries else self.start[2]
            digest = history_digest(previous, table.tokens[: n_tokens - tokens], n_rows - rows)
            self.entries.append(
                replace(cut[0], n_tokens=n_tokens - tokens, n_rows=n_rows - rows, state=0, digest=digest)
            )
            self.ends.append((n_tokens, n_rows))

"""The live list of a file made anew from its spans and commits, where INDEX is damaged. Spec sections 10, 11 and 19.

A history digest proves ids and counts, not which of two spans with the same ids is meant: a turn that was cut off and
written again has both. But what stands before a span in the list is always what stood there when it was published, and
a STATE belongs to one span. So a list is known by its last span, and a rewind is followed by what its COMMIT names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvsnap.errors import DamagedError, FormatError, VersionError
from kvsnap.formats.native.base import parse_base
from kvsnap.formats.native.read import NativeFile
from kvsnap.formats.native.survey import Survey
from kvsnap.formats.native.tables import MAX_JSON, Commit, Entry, Operation, history_digest, parse_index
from kvsnap.records import RECORD_SIZE, Kind, read_record

__all__ = ["relisted"]

_BROKEN = (DamagedError, FormatError)


def relisted(
    file: NativeFile, survey: Survey, error: DamagedError | FormatError
) -> tuple[int, bytes, tuple[Entry, ...]]:
    """Return the last commit, up to the one that `file` is open at, whose list can be made, and that list.

    That is the offset of the COMMIT, its digest, and the entries that lie in this file. Raise the error given when
    there is none.
    """
    return _Relisting(file, survey).run(error)


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """A list of entries: its last one, the list before it, and the tokens and rows of the whole history behind it."""

    before: _Node | None
    entry: Entry
    n_tokens: int
    n_rows: int


class _Relisting:
    """One run of `relisted`: commit by commit from the first one of the file. Lists share what they have in common."""

    def __init__(self, file: NativeFile, survey: Survey) -> None:
        self.file, self.survey = file, survey
        self.top: _Node | None = None
        self.start = (0, 0, bytes(16))  # tokens, rows and digest of what is kept of a parent
        self.waiting: list[tuple[int, int]] = []  # spans that no commit was seen of: offset, number of their commit
        self.states: dict[int, int] = {}
        self.sure = True  # False behind a commit whose list is not known
        self.of_span: dict[int, _Node] = {}
        self.of_state: dict[int, _Node] = {}
        self.of_digest: dict[bytes, set[_Node]] = {}

    def run(self, error: DamagedError | FormatError) -> tuple[int, bytes, tuple[Entry, ...]]:
        """Go through the file; `relisted` says the rest."""
        last = self.file.end.footer.commit_offset
        found: tuple[int, bytes, _Node | None] | None = None
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
                    self.sure = False
                    continue
                self.sure = self._follow(commit)
                if self.sure:
                    found = (offset, digest, self.top)
                    if self.top is not None:
                        self.of_digest.setdefault(commit.digest, set()).add(self.top)
                self.waiting, self.states = [], {}
        if found is None:
            raise error
        return found[0], found[1], _entries(found[2])

    def _move_base(self, commit: Commit) -> None:
        if commit.base:
            _, payload = read_record(self.file.reader, self.file.header, commit.base, kind=Kind.BASE, limit=MAX_JSON)
            base = parse_base(payload, self.file.path, commit.base + RECORD_SIZE)
            self.start = (base.n_tokens, base.n_rows, base.history)

    # -- one commit ----------------------------------------------------------------------------------------------

    def _follow(self, commit: Commit) -> bool:
        """Take the list to that of this commit; tell whether it is proven to be it."""
        if commit.operation == Operation.REWIND:
            return self._rewind(commit) or self._direct(commit)
        if not self.sure and self._direct(commit):
            return True
        return self._step(commit) or self._direct(commit)

    def _fits(self, commit: Commit) -> bool:
        """Tell whether the list has the digest and the last entries that a commit names, whose states are taken."""
        node, last = self.top, commit.tail
        for entry in reversed(last):
            if node is None or (node.entry.span, node.entry.digest) != (entry.span, entry.digest):
                return False
            node = node.before
        if any(a != b for a, b in zip(_entries(self.top, len(last)), last, strict=True)):
            self.top = node
            for entry in last:
                self._push(entry)
        tokens, rows = self._counts()
        digest = self.top.entry.digest if self.top else self.start[2]
        return (tokens, rows, digest) == (commit.n_tokens, commit.n_rows, commit.digest)

    def _step(self, commit: Commit) -> bool:
        """Take the list from the commit before to this one."""
        if commit.operation == Operation.RESET:
            self.top = None
        try:
            for offset, number in self.waiting:
                self._append(offset, commit.state if number == commit.number else self.states.get(number, 0))
            self._cut(commit.n_tokens, commit.n_rows)
        except VersionError:
            raise
        except _BROKEN:
            return False
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
        self.top = None
        for entry in (*kept, *commit.tail):
            self._push(entry)
        return self._fits(commit)

    def _rewind(self, commit: Commit) -> bool:
        """Take the list of the earlier commit that a rewind went to."""
        if commit.tail:
            first = self.of_span.get(commit.tail[0].span)
            if first is None:
                return False
            self.top = first.before
            for entry in commit.tail:
                self._push(entry)
        elif commit.state:
            if commit.state not in self.of_state:
                return False
            self.top = self.of_state[commit.state]
        elif (commit.n_tokens, commit.n_rows) == self.start[:2]:
            self.top = None
        else:
            known = self.of_digest.get(commit.digest, set())
            if len({node.entry.span for node in known}) != 1:
                return False
            self.top = next(iter(known))
        return self._fits(commit)

    # -- the list --------------------------------------------------------------------------------------------------

    def _counts(self) -> tuple[int, int]:
        return (self.top.n_tokens, self.top.n_rows) if self.top else self.start[:2]

    def _push(self, entry: Entry) -> None:
        known = self.of_span.get(entry.span)
        if known is None or known.before is not self.top or known.entry != entry:
            tokens, rows = self._counts()
            known = _Node(self.top, entry, tokens + entry.n_tokens, rows + entry.n_rows)
            self.of_span[entry.span] = known
            if entry.state:
                self.of_state[entry.state] = known
        self.top = known

    def _append(self, offset: int, state: int) -> None:
        table, _, check = self.file.table_at(offset, Kind.SPAN)
        self._cut(table.token_start, table.row_start)
        previous = self.top.entry.digest if self.top else self.start[2]
        digest = history_digest(previous, table.tokens, table.n_rows)
        self._push(Entry(offset, len(table.tokens), table.row_start, table.n_rows, state, check, digest))

    def _cut(self, n_tokens: int, n_rows: int) -> None:
        """Keep so many tokens and rows, as a truncate does."""
        if self._counts() == (n_tokens, n_rows):
            return
        cut: Entry | None = None
        while self.top is not None and self.top.n_tokens > n_tokens:
            cut, self.top = self.top.entry, self.top.before
        tokens, rows = self._counts()
        if n_tokens > tokens and cut is not None:
            if n_rows < rows:
                raise FormatError("a cut keeps fewer rows than there were before", path=self.file.path, found=n_rows)
            table, _, _ = self.file.table_at(cut.span, Kind.SPAN)
            previous = self.top.entry.digest if self.top else self.start[2]
            digest = history_digest(previous, table.tokens[: n_tokens - tokens], n_rows - rows)
            self._push(replace(cut, n_tokens=n_tokens - tokens, n_rows=n_rows - rows, state=0, digest=digest))


def _entries(node: _Node | None, count: int | None = None) -> tuple[Entry, ...]:
    """Return the last `count` entries of a list (None: all), in order."""
    found: list[Entry] = []
    while node is not None and len(found) != count:
        found.append(node.entry)
        node = node.before
    return tuple(reversed(found))

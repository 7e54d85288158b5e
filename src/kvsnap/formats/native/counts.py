"""What a session says of its last published commit, and of all commits, without reading a tensor."""

from __future__ import annotations

import threading
from contextlib import ExitStack, closing
from typing import Any

from kvsnap.errors import ConflictError, InputError
from kvsnap.files import Reader
from kvsnap.formats.native import turns as turning
from kvsnap.formats.native.journal import Journal, Published
from kvsnap.formats.native.live import ends_of, reach_of
from kvsnap.formats.native.read import NativeFile
from kvsnap.formats.native.said import unpack_messages
from kvsnap.formats.native.told import Told, told_of
from kvsnap.formats.native.turns import Turn
from kvsnap.identity import Identity
from kvsnap.reach import Reach
from kvsnap.records import read_header

__all__ = ["Counts"]


class Counts:
    """What a session says of its last published commit without reading anything, and of all commits."""

    path: str
    _journal: Journal
    _turns: threading.RLock
    dropped: int
    notes: tuple[str, ...]
    _told: Told | None = None
    _next: Journal | None = None  # of the file that compacting made, until the session goes on with it

    def _settle(self, *, ended: bool = True) -> None:
        """Go on with the file that compacting made, once it has the name; with `ended` forget one that has not."""
        made = self._next
        if made is not None and made.is_named:
            self.dropped, self.notes, self._told = 0, (), None
            before, self._journal = self._journal, made  # an interrupt finds one of both; the next call goes on
            if before is not made:
                before.close()
            self._next = None
        elif made is not None and ended:
            made.close()
            self._next = None

    @property
    def _now(self) -> Published:
        return self._journal.now

    def _reader(self) -> Reader:
        with ExitStack() as undo:
            reader = undo.enter_context(Reader(self.path))
            if read_header(reader).file_id != self._journal.header.file_id:
                raise ConflictError("another file took the place of the one that was opened", path=self.path)
            undo.pop_all()
        return reader

    def _file(self) -> NativeFile:
        footer = self._now.footer
        return NativeFile(self._reader(), mapped=False, at=(footer.commit_offset, footer.digest))

    @property
    def tokens(self) -> tuple[int, ...]:
        """All ids of the history. The first use reads the tables of the spans, not the tensors.

        Raise `ConflictError` when another file took the place of the one that was opened: `load` goes on with that.
        """
        return self._history().tokens

    @property
    def messages(self) -> tuple[dict[str, Any], ...] | None:
        """The chat messages that the history is of, as `Snapshot.messages`; None where they are not known.

        They belong to the caller. Reads and raises as `tokens`.
        """
        said = self._history().said
        return unpack_messages(said.messages) if said.known else None

    @property
    def tells_messages(self) -> bool:
        """True when a turn of the history spoke of messages, be they known or not. Reads and raises as `tokens`."""
        return self._history().said.told

    @property
    def message_ends(self) -> tuple[tuple[int, int], ...]:
        """Where each part of the history ends that a turn left: number of tokens, and of messages, up to there.

        Parts behind which the messages are not known are left out. Those of the parent of a fork are among them. Reads
        and raises as `tokens`.
        """
        return self._history().ends

    def _history(self) -> Told:
        with self._turns:  # else what was read before a change could be kept behind it
            self._settle(ended=False)
            if self._told is None:
                with closing(self._file()) as file:
                    self._told = told_of(file.live)
            return self._told

    def reach(self, n_tokens: int) -> Reach:
        """Return what `truncate` to `n_tokens` tokens would keep, or to the nearest length below that can be reached.

        Reads tables, not the tensors. Raise `InputError` outside 0..n_tokens, else as `tokens`.
        """
        with self._turns:
            self._settle(ended=False)
            self._check_length(n_tokens)
            with closing(self._file()) as file:
                return reach_of(file, n_tokens)

    def _check_length(self, n_tokens: int) -> None:
        if not 0 <= n_tokens <= self.n_tokens:
            raise InputError(
                "cannot truncate to this length", path=self.path, expected=f"0 to {self.n_tokens}", found=n_tokens
            )

    def _nearest(self, n_tokens: int) -> int:
        with closing(self._file()) as file:
            return ends_of(file).below(n_tokens)

    def check_open_to_turns(self) -> None:
        """Raise what `append` would raise whatever it is given: worth a look before a turn is generated.

        That is `InputError` (opened for reading only), `PoisonedError`, `ConflictError`, and `DamagedError` when a
        later commit was published and cannot be read.
        """
        self._journal.check_writable()
        self._journal.check_nothing_lost()

    @property
    def n_tokens(self) -> int:
        """Ids in the history."""
        return self._now.commit.n_tokens

    @property
    def n_rows(self) -> int:
        """Positions evaluated."""
        return self._now.commit.n_rows

    @property
    def n_pending(self) -> int:
        """Ids at the end that are not evaluated."""
        return self._now.commit.n_pending

    @property
    def n_commits(self) -> int:
        """Number of the last commit."""
        return self._now.commit.number

    @property
    def complete(self) -> bool:
        """False when the last turn was cut off."""
        return self._now.commit.complete

    @property
    def nbytes(self) -> int:
        """Length of the file up to the last published commit."""
        return self._now.footer.file_length

    @property
    def identity(self) -> Identity:
        """What the session was made with; all unknown while it is empty."""
        return self._now.identity

    @property
    def history(self) -> tuple[Turn, ...]:
        """Every commit, oldest first. Raise `DamagedError` when the chain of commits is broken, else as `tokens`."""
        with self._turns:  # else compacting could put another file in place in between
            self._settle(ended=False)
            now, header, opened = self._now, self._journal.header, self._reader()
        with closing(opened) as reader:
            turns = [
                Turn(c.number, c.operation_name, c.complete, c.n_tokens, c.n_rows, c.time_ns, offset)
                for c, offset in turning.walk(now.commit, now.footer.commit_offset, header, reader)
            ]
        return tuple(reversed(turns))

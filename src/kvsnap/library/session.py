"""A session of a library: what it commits is known to the catalogue and counts for the limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Protocol

import numpy as np

from kvsnap.errors import InputError
from kvsnap.files import Appender
from kvsnap.formats.native import NativeFile, SaveReport
from kvsnap.formats.native.copy import CompactReport
from kvsnap.formats.native.journal import Journal
from kvsnap.identity import Identity
from kvsnap.layout import Snapshot
from kvsnap.library.contents import OK, Facts, is_rewindable, pack_identity, read_facts
from kvsnap.library.reports import Entry
from kvsnap.protocols import Progress
from kvsnap.session import Session, changes

__all__ = ["Keeper", "LibrarySession"]


class Keeper(Protocol):
    """What a session asks of its library."""

    def committed(self, file_id: str, identity: Identity, facts: Facts) -> None:
        """A commit was published in this file, which holds this now."""

    def fork(
        self, name: str, new: str, *, n_tokens: int | None = None, commit: int | None = None, nearest: bool = False
    ) -> Entry:
        """Make a fork of a named session."""

    def name_of(self, file_id: str) -> str:
        """Return a name that means this file."""

    def replaced(
        self, session: LibrarySession, file: NativeFile, progress: Progress | None, states: int | None
    ) -> CompactReport:
        """Put a compacted file in the place of that of this session, which goes on there."""


class LibrarySession(Session):
    """A session opened by `Library.open`. Its name may change while it is open; its file id only by compacting.

    After every commit the catalogue follows and the limit of the library is enforced. The turn is published then, so
    nothing that goes wrong there is raised: the next look at the library catches up.
    """

    name: str = ""
    """The name under which it was opened."""
    _keeper: Keeper | None = None
    _facts: Facts | None = None

    def keep(self, keeper: Keeper, name: str) -> None:
        """Tell the session whose it is."""
        self._keeper, self.name = keeper, name

    @property
    def file_id(self) -> str:
        """The id of the file, 32 hex digits."""
        return self._journal.header.file_id.hex()

    def append(
        self, snapshot: Snapshot, *, after: int | None = None, complete: bool = True, codec: str | None = None,
        progress: Progress | None = None,
    ) -> SaveReport:  # fmt: skip
        """Publish a turn as `Session.append` does; then the library makes room where its limit asks for it."""
        with self._turns:
            report = super().append(snapshot, after=after, complete=complete, codec=codec, progress=progress)
            self._committed(snapshot if after is None else None)
        return report

    def truncate(self, n_tokens: int, *, nearest: bool = False, complete: bool = True) -> int:
        """Go back as `Session.truncate` does."""
        with self._turns:
            left = super().truncate(n_tokens, nearest=nearest, complete=complete)
            self._committed()
        return left

    def reset(self, *, any_model: bool = False) -> None:
        """Go back to an empty history as `Session.reset` does."""
        with self._turns:
            super().reset(any_model=any_model)
            self._committed()

    def rewind(self, commit: int) -> int:
        """Go to the state after an earlier commit as `Session.rewind` does."""
        with self._turns:
            left = super().rewind(commit)
            self._committed()
        return left

    def fork(  # type: ignore[override] # in a library a fork has a name and copies nothing
        self, name: str, *, n_tokens: int | None = None, commit: int | None = None, nearest: bool = False
    ) -> Entry:
        """Make a session `name` of the library that starts in this one, as `Library.fork` does; nothing is copied.

        `Session.fork(session, path)` copies to a file outside.
        """
        keeper = self._kept_by()
        return keeper.fork(keeper.name_of(self.file_id), name, n_tokens=n_tokens, commit=commit, nearest=nearest)

    @changes
    def compact(self, *, states: int | None = None, progress: Progress | None = None) -> CompactReport:
        """Write the session anew without what its history no longer needs, as `Library.compact` does, and go on there.

        The session has another file id and another path afterwards.
        """
        keeper = self._kept_by()
        self._journal.check_unchanged()
        self._journal.check_nothing_lost()
        with closing(self._file()) as file:
            return keeper.replaced(self, file, progress, states)

    @contextmanager
    def moving(self, path: str) -> Iterator[Callable[[], None]]:
        """Open and lock the file that is to take the place of this one; yield what makes the session go on there.

        So everything that may fail comes before: once a name means the new file, no turn goes to the old one.
        """
        with ExitStack() as undo:
            appender = undo.enter_context(Appender.open(path))
            with closing(NativeFile.open(path, mapped=False)) as made:
                journal = Journal(path, appender, made)

            def go_on() -> None:
                undo.pop_all()
                before, self.path, self._journal = self._journal, path, journal
                self.dropped, self.notes, self._told, self._facts = 0, (), None, None
                before.close()

            yield go_on

    def _kept_by(self) -> Keeper:
        if self._keeper is None:
            raise InputError("this session was not opened by a library", path=self.path)
        return self._keeper

    def _committed(self, added: Snapshot | None = None) -> None:
        """Tell the library what the file holds now. After an append that follows from what it held before."""
        now, before = self._now.commit, self._facts
        follows = before is not None and before.n_commits == now.number - 1 and before.n_tokens + before.n_rows > 0
        if before is None or added is None or not follows:
            facts = read_facts(self.path, self.file_id)
        else:
            end = np.array([[now.n_tokens, now.n_rows]], np.int64)
            more = np.array(added.tokens[before.n_tokens :], np.int32)
            facts = replace(
                before, n_tokens=now.n_tokens, n_rows=now.n_rows, n_pending=now.n_pending, n_commits=now.number,
                complete=now.complete, identity=pack_identity(self.identity),
                rewindable=is_rewindable(self._now.geometry.tensors), turns=np.concatenate([before.turns, end]),
                tokens=np.concatenate([before.tokens, more]),
            )  # fmt: skip
        self._facts = facts if facts is not None and facts.state == OK else None
        if self._facts is not None:
            self._kept_by().committed(self.file_id, self.identity, self._facts)

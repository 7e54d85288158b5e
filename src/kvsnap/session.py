"""A session: one conversation that grows on disk, commit by commit. Spec sections 10 to 14.

A turn is published by one commit. Killed at any instant, the file opens at the last published turn.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from kvsnap import codecs
from kvsnap.errors import ConflictError, InputError
from kvsnap.files import Appender, absolute, write_whole
from kvsnap.formats.native import turns as turning
from kvsnap.formats.native.assemble import snapshot_of
from kvsnap.formats.native.base import Base
from kvsnap.formats.native.copy import CompactReport, CopyReport, check_alone, copy_session, replace_compacted
from kvsnap.formats.native.counts import Counts
from kvsnap.formats.native.cut import NOTHING, Cut
from kvsnap.formats.native.fork import at_commit
from kvsnap.formats.native.journal import Journal, Published, empty_file
from kvsnap.formats.native.live import check_whole, cut_back, cut_live
from kvsnap.formats.native.read import NativeFile
from kvsnap.formats.native.schema import Geometry
from kvsnap.formats.native.tables import Commit, Entry, Operation
from kvsnap.formats.native.told import Told, told_of
from kvsnap.formats.native.turns import Turn
from kvsnap.formats.native.vault import refuse_encrypted
from kvsnap.formats.native.write import SaveReport, check_counts, report_of
from kvsnap.identity import Identity
from kvsnap.layout import Snapshot
from kvsnap.protocols import Progress

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Session", "Turn"]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="Session")


def changes(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate a method: one thread at a time changes the session, and that one not again before it is done."""

    @functools.wraps(method)
    def changing(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._turns:
            if self._change.locked():
                raise ConflictError(
                    "the session is being changed by what called this (a progress function, a signal handler)",
                    path=self.path,
                )
            with self._change:
                self._settle()
                return method(self, *args, **kwargs)

    return changing


class Session(Counts):
    """A session file. Open it with `Session.open`; use it as a context manager.

    Open for writing, it holds the exclusive lock of the file until it is closed; readers are not disturbed. After
    a failed sync every further write raises `PoisonedError` until the session is opened again. Several threads may use
    one session; after a fork the child has to open its own.
    """

    def __init__(self, journal: Journal, file: NativeFile) -> None:
        self.path = journal.path
        self._journal = journal
        self._turns = threading.RLock()
        self._change = threading.Lock()
        self.dropped = file.end.dropped
        """Bytes behind the last published commit when it was opened: a torn tail, not part of the history."""
        self.notes = file.end.notes
        """What was wrong behind the last published commit, one sentence each."""

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, create: bool = True, readonly: bool = False) -> Session:
        """Open a session; with `create` an empty one is made when there is no file.

        Raise `BusyError` when another process writes it, `MissingError`, `FormatError`, `VersionError`, `DamagedError`,
        `InputError` for a sealed snapshot, and `UnsupportedError` for an encrypted one.
        """
        name = absolute(path)  # the working directory may change
        if readonly:
            refuse_encrypted(name)
            file = NativeFile.open(name, mapped=False)
            return cls(Journal(name, None, file), file)
        if create and not os.path.lexists(name):
            with suppress(InputError):  # another process made it just now
                write_whole(name, empty_file(), new=True)
        with ExitStack() as undo:
            appender = undo.enter_context(Appender.open(name))
            refuse_encrypted(name)
            file = undo.enter_context(closing(NativeFile.open(name, mapped=False)))
            if file.sealed:
                raise InputError(
                    "a sealed snapshot cannot be appended to: open a new session and append what load returns",
                    path=name,
                )
            session = cls(Journal(name, appender, file), file)
            undo.pop_all()
        file.close()
        return session

    # -- what is there ------------------------------------------------------------------------------------

    def load(self, n_tokens: int | None = None) -> Snapshot:
        """Return the state at the last commit; tensors are read, and checked, when they are first used.

        With `n_tokens` it is what `truncate` to that length would leave; the session stays as it is. Opened for reading
        only, this moves the session to what was published meanwhile. Raise for a length as `truncate` does.
        """
        with self._turns:
            self._settle(ended=False)
            return self._load(n_tokens)

    def _load(self, n_tokens: int | None) -> Snapshot:
        file = NativeFile.open(self.path, mapped=False)
        if file.end.footer != self._now.footer:
            if self._journal.appender is not None:
                raise ConflictError("the file changed since it was opened", path=self.path)
            self._journal = Journal(self.path, None, file)
            self._told = None
        if n_tokens is None or n_tokens == self.n_tokens:
            check_whole(file)
            return snapshot_of(file)
        self._check_length(n_tokens)
        return snapshot_of(file, cut_live(file, n_tokens))

    # -- changing it --------------------------------------------------------------------------------------

    @changes
    def append(
        self, snapshot: Snapshot, *, after: int | None = None, complete: bool = True, codec: str | None = None,
        progress: Progress | None = None,
    ) -> SaveReport:  # fmt: skip
        """Publish what `snapshot` has beyond the session as one turn; only the new rows are written.

        `snapshot` may be partial (`capture(start=session.n_rows)`). `complete=False` marks a turn that was cut off.
        With `after` the turn takes the place of all that is behind the first `after` tokens, by the same commit: killed
        at any instant, the file has the old history or the new one. `rewind` finds the old one.
        Raise `InputError` when it does not continue the session (other tokens, or behind it: truncate first),
        `CompatibilityError` when it is of another model, `DamagedError` when a later commit was published and cannot be
        read (repair the file, or `rewind` to give it up); for `after` as `truncate`. On any error the session is as
        before; only an interrupt that comes during the very last sync finds the turn published.
        """
        self.check_open_to_turns()
        now, told = self._beginning(after)
        check_counts(snapshot, known=now.commit.n_tokens)
        codec_name = codecs.codec_of_name(codec or "exact").name
        turning.check_continues(now, snapshot, told.tokens, self.path)
        geometry, identity = turning.merged_geometry(now, snapshot, self.path), turning.merged_identity(now, snapshot)
        turning.check_static(now, snapshot, self._file)
        grown, before = told.with_turn(snapshot), turning.codes_before(now, snapshot, self._file, after)
        kept = len(now.entries) if after is None else self._unchanged(now.entries)
        with self._journal.writing() as writer:
            commit, entry, parts = turning.write_turn(
                now, writer, snapshot, grown.said.since(told.said), geometry, identity, codec_name, progress
            )
            commit = replace(commit, complete=complete)
            self._told = None  # an interrupt may come right behind the commit
            written = self._journal.publish(
                writer, commit, (*now.entries, entry), kept=kept, base=now.base, geometry=geometry, identity=identity
            )
        self._told = grown
        file_id = self._journal.header.file_id
        report = report_of(snapshot, parts, nbytes=written, path=self.path, commit=self.n_commits, file_id=file_id)
        return replace(report, requantised=turning.requantised(before, parts, snapshot))

    def _beginning(self, after: int | None) -> tuple[Published, Told]:
        """Return what a turn goes on from, and what that tells."""
        if after is None or after == self.n_tokens:
            now = self._now.restarted()
            return now, Told() if now.is_empty else self._history()
        self._check_length(after)
        with closing(NativeFile.open(self.path, mapped=False)) as file:
            cut = cut_live(file, after)
            return cut_back(self._now, cut, file).restarted(), told_of(cut.live)

    @changes
    def truncate(self, n_tokens: int, *, nearest: bool = False, complete: bool = True) -> int:
        """Go back to the first `n_tokens` tokens, as a commit of its own; return the number of tokens left.

        With `nearest` it may be fewer: the nearest length that can be reached. `complete=False` says that the turn that
        is the last one then was cut off. Logits, sampler and random state come
        back when the cut is where a turn ended. Nothing is deleted from the file. Raise `InputError` outside
        0..n_tokens, `UnsupportedError` that says which layers cannot be cut there, and names the nearest lengths below
        and above that can be reached.
        """
        self._journal.check_writable()  # also where nothing is to be written: behind a failed sync, no retry succeeds
        now = self._now
        self._check_length(n_tokens)
        n_tokens = self._nearest(n_tokens) if nearest else n_tokens
        if n_tokens == now.commit.n_tokens:
            return n_tokens
        if n_tokens == 0:
            self._cut_back(NOTHING, None, Operation.RESET, any_model=False, complete=True)
            return 0
        with closing(NativeFile.open(self.path, mapped=False)) as file:
            self._cut_back(cut_live(file, n_tokens), file, Operation.TRUNCATE, any_model=False, complete=complete)
        return n_tokens

    @changes
    def reset(self, *, any_model: bool = False) -> None:
        """Go back to an empty history, as a commit of its own. The identity stays, so that no other model goes on.

        With `any_model` it is forgotten: the next turn may be of any model, and its cache of any shape.
        """
        self._cut_back(NOTHING, None, Operation.RESET, any_model=any_model, complete=True)

    def _cut_back(self, cut: Cut, file: NativeFile | None, operation: int, *, any_model: bool, complete: bool) -> None:
        left = cut_back(self._now, cut, file)
        made_by = (Geometry("", (), ()), Identity()) if any_model else (None, None)
        self._rewrite(replace(left.commit, operation=operation, complete=complete), left.entries, left.base, *made_by)

    def fork(
        self,
        path: str | os.PathLike[str],
        *,
        n_tokens: int | None = None,
        commit: int | None = None,
        nearest: bool = False,
        progress: Progress | None = None,
    ) -> CopyReport:
        """Write the history to a new session file of its own, which then goes on independently.

        It starts at the last commit or at an earlier one (`commit`: also what was cut off since can be reached so), and
        keeps all tokens of it or the first `n_tokens` (with `nearest` as `truncate`). Parts are copied as
        they are stored, each checked. In a library `Library.fork` copies nothing. Raise `InputError` when there is a
        file of this name, `MissingError` for an unknown commit, `DamagedError` when a part that is needed is damaged,
        `UnsupportedError` as `truncate`.
        """
        with self._turns, closing(self._file()) as file:
            return copy_session(file, path, n_tokens=n_tokens, commit=commit, nearest=nearest, progress=progress)

    @changes
    def compact(self, *, states: int | None = None, progress: Progress | None = None) -> CompactReport:
        """Write the file anew without what the history no longer needs, and put it in the place of the old one.

        Turns that were cut off are gone afterwards, with their tokens and text, and with them the commits before: they
        can't be reached any more. With `states` only the last so many turns keep their states (recurrent states,
        logits, sampler): a history that needs one can't go back to the end of an earlier turn then. Parts are copied as
        they are stored; the file id is a new one. Raise `InputError` for `states` below 1, `DamagedError` naming what
        is damaged (then `kvsnap.repair` is the way), `StorageError` (no room for both): nothing changed.
        Only if the last step fails, the sync of the directory, does the session go on with the new file.
        """
        self._journal.check_unchanged()
        self._journal.check_nothing_lost()
        with closing(self._file()) as file:
            check_alone(file)
            try:
                return replace_compacted(file, self.path, progress, self._prepare, states)
            finally:
                self._settle()

    def _prepare(self, journal: Journal) -> None:
        self._next = journal

    @changes
    def rewind(self, commit: int) -> int:
        """Go to the state after an earlier commit, as a commit of its own; return the number of tokens then.

        So a truncate or a reset is undone, for as long as the file was not compacted. Raise `MissingError` for a commit
        that the session does not have, `UnsupportedError` where its state was left out when the file was compacted,
        `DamagedError` when the way there or its state is damaged.
        """
        self._journal.check_writable()
        with closing(self._file()) as file, closing(at_commit(file, commit)) as then:
            check_whole(then)
            then.state()  # what is damaged must not become the current state
            base, entries, geometry, identity = then.base, then.entries, then.geometry, then.identity
            made = replace(then.commit, operation=Operation.REWIND)
        self._rewrite(made, entries, base, geometry, identity)
        return made.n_tokens

    def _rewrite(
        self,
        commit: Commit,
        entries: tuple[Entry, ...],
        base: Base | None,
        geometry: Geometry | None = None,
        identity: Identity | None = None,
    ) -> None:
        same = self._unchanged(entries)
        with self._journal.writing() as writer:
            self._told = None
            self._journal.publish(writer, commit, entries, kept=same, base=base, geometry=geometry, identity=identity)

    def _unchanged(self, entries: tuple[Entry, ...]) -> int:
        return sum(1 for a, b in zip(self._now.entries, entries, strict=False) if a == b)

    def close(self) -> None:
        """Close the file and give up the lock. Waits for a change that another thread is making."""
        if self._journal.is_ours:  # after a fork the other thread is not here, and would be waited for for ever
            with self._turns:  # else it would write to a number that may be that of another file by then
                self._settle(ended=not self._change.locked())
                self._journal.close()
        else:
            self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

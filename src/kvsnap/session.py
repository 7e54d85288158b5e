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
from kvsnap.files import Appender, Reader, absolute, write_whole
from kvsnap.formats.native import turns as turning
from kvsnap.formats.native.assemble import snapshot_of
from kvsnap.formats.native.base import Base
from kvsnap.formats.native.copy import CompactReport, CopyReport, check_alone, copy_session, replace_compacted
from kvsnap.formats.native.fork import at_commit
from kvsnap.formats.native.journal import Journal, Published, empty_file
from kvsnap.formats.native.live import check_whole, cut_live, ends_of, reach_of
from kvsnap.formats.native.read import NativeFile
from kvsnap.formats.native.schema import Geometry
from kvsnap.formats.native.tables import Commit, Entry, Operation
from kvsnap.formats.native.turns import Turn
from kvsnap.formats.native.vault import refuse_encrypted
from kvsnap.formats.native.write import SaveReport, check_counts, report_of
from kvsnap.identity import Identity
from kvsnap.layout import Snapshot
from kvsnap.protocols import Progress
from kvsnap.reach import Reach
from kvsnap.records import read_header

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Session", "Turn"]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="Session")


class _Counts:
    """What a session says of its last published commit without reading anything, and of all commits."""

    path: str
    _journal: Journal
    _turns: threading.RLock
    dropped: int
    notes: tuple[str, ...]
    _tokens: tuple[int, ...] | None = None
    _text: str | None = None
    _next: Journal | None = None  # of the file that compacting made, until the session goes on with it

    def _settle(self, *, ended: bool = True) -> None:
        """Go on with the file that compacting made, once it has the name; with `ended` forget one that has not."""
        made = self._next
        if made is not None and made.is_named:
            self.dropped, self.notes, self._tokens, self._text = 0, (), None, None
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
        return self._history()[0]

    def _history(self) -> tuple[tuple[int, ...], str | None]:
        with self._turns:  # else what was read before a change could be kept behind it
            self._settle(ended=False)
            if self._tokens is None:
                with closing(self._file()) as file:
                    snapshot = file.snapshot()
                self._tokens, self._text = snapshot.tokens, snapshot.text
            return self._tokens, self._text

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


class Session(_Counts):
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
            self._tokens = self._text = None
        if n_tokens is None or n_tokens == self.n_tokens:
            check_whole(file)
            return file.snapshot()
        self._check_length(n_tokens)
        return snapshot_of(file, cut_live(file, n_tokens))

    # -- changing it --------------------------------------------------------------------------------------

    @changes
    def append(
        self, snapshot: Snapshot, *, complete: bool = True, codec: str | None = None, progress: Progress | None = None
    ) -> SaveReport:
        """Publish what `snapshot` has beyond the session as one turn; only the new rows are written.

        `snapshot` may be partial (`capture(start=session.n_rows)`). `complete=False` marks a turn that was cut off.
        Raise `InputError` when it does not continue the session (other tokens, or behind it: truncate first),
        `CompatibilityError` when it is of another model, `DamagedError` when a later commit was published and cannot be
        read (repair the file, or `rewind` to give it up). On any error the session is as before; only an interrupt that
        comes during the very last sync finds the turn published.
        """
        self.check_open_to_turns()
        check_counts(snapshot, known=self.n_tokens)
        codec_name = codecs.codec_of_name(codec or "exact").name
        now = self._now.restarted()
        turning.check_continues(now, snapshot, lambda: self.tokens, self.path)
        geometry, identity = turning.merged_geometry(now, snapshot, self.path), turning.merged_identity(now, snapshot)
        turning.check_static(now, snapshot, self._file)
        text, before = self._new_text(snapshot), turning.codes_before(now, snapshot, self._file)
        with self._journal.writing() as writer:
            commit, entry, parts = turning.write_turn(
                now, writer, snapshot, text, geometry, identity, codec_name, progress
            )
            commit = replace(commit, complete=complete)
            self._tokens = self._text = None  # an interrupt may come right behind the commit
            written = self._journal.publish(
                writer, commit, (*now.entries, entry), kept=len(now.entries), base=now.base, geometry=geometry,
                identity=identity,
            )  # fmt: skip
        self._tokens, self._text = snapshot.tokens, snapshot.text
        file_id = self._journal.header.file_id
        report = report_of(snapshot, parts, nbytes=written, path=self.path, commit=self.n_commits, file_id=file_id)
        return replace(report, requantised=turning.requantised(before, parts, snapshot))

    @changes
    def truncate(self, n_tokens: int, *, nearest: bool = False) -> int:
        """Go back to the first `n_tokens` tokens, as a commit of its own; return the number of tokens left.

        With `nearest` it may be fewer: the nearest length that can be reached. Logits, sampler and random state come
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
            self._reset()
            return 0
        with closing(NativeFile.open(self.path, mapped=False)) as file:
            cut = cut_live(file, n_tokens)
            entries = cut.within(file)
            base = cut.base(now.base, file) if now.base and not entries else None
        commit = replace(
            now.commit, operation=Operation.TRUNCATE, complete=True, n_tokens=n_tokens, n_rows=cut.n_rows,
            n_pending=cut.n_pending, token_offset=cut.token_offset, state=cut.state if entries else 0,
        )  # fmt: skip
        self._rewrite(commit, entries, base)
        return n_tokens

    @changes
    def reset(self) -> None:
        """Go back to an empty history, as a commit of its own. The identity stays."""
        self._reset()

    def _reset(self) -> None:
        base = self._now.base
        nothing = replace(base, kept=0, n_tokens=0, n_rows=0, history=bytes(16)) if base else None
        commit = replace(
            self._now.commit, operation=Operation.RESET, complete=True, n_tokens=0, n_rows=0, n_pending=0,
            token_offset=0, state=0,
        )  # fmt: skip
        self._rewrite(commit, (), nothing)

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
        same = sum(1 for a, b in zip(self._now.entries, entries, strict=False) if a == b)
        with self._journal.writing() as writer:
            self._tokens = self._text = None
            self._journal.publish(writer, commit, entries, kept=same, base=base, geometry=geometry, identity=identity)

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

    def _new_text(self, snapshot: Snapshot) -> tuple[int | None, str] | None:
        if snapshot.text is None:
            return None
        return turning.new_text(self._history()[1] if self.n_tokens else "", snapshot.text)

"""What of a damaged history can be kept: the longest prefix of turns of which every byte is as it was written.

Of the turns behind it the ids may be kept, not evaluated. Spec sections 7, 10 and 14.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvsnap import codecs
from kvsnap.errors import DamagedError, FormatError, KvsnapError, UnsupportedError, VersionError
from kvsnap.formats.native import schema
from kvsnap.formats.native.cut import Cut, Live
from kvsnap.formats.native.mend import Mended
from kvsnap.formats.native.read import NativeFile
from kvsnap.formats.native.replay import History, history_of
from kvsnap.formats.native.said import Said, pack_said, parse_said
from kvsnap.formats.native.sources import PartSource, Sizes
from kvsnap.formats.native.tables import Commit, Entry, Operation, Part, ReadTable, Table, history_digest, parse_json
from kvsnap.formats.native.verify import Damage, VerifyReport, verify_file
from kvsnap.identity import Identity
from kvsnap.layout import PositionRun, Run, cut_positions, cut_runs, join_runs
from kvsnap.protocols import Progress
from kvsnap.reach import needs_state
from kvsnap.records import HEADER_SIZE, RECORD_SIZE, Kind, read_record, read_record_header, record_end
from kvsnap.tensors import numpy_dtype

__all__ = ["salvage"]

_STEP = 1 << 20
_TOLD = 16
_BROKEN = (DamagedError, FormatError)


class _PartError(Exception):
    """A part that cannot be kept: its tensor, and what is wrong."""

    def __init__(self, tensor: str, error: KvsnapError) -> None:
        super().__init__(error.message)
        self.tensor, self.error = tensor, error


@dataclass(frozen=True, slots=True)
class _Turn:
    """One entry of the live list, looked at: its table where that is whole, and what is wrong with the rest."""

    live: Live
    table: ReadTable | None
    tokens: tuple[int, int]
    error: KvsnapError | None = None
    tensor: str = ""
    state_error: KvsnapError | None = None
    state_tensor: str = ""

    @property
    def entry(self) -> Entry:
        return self.live[1]


def salvage(mended: Mended, *, keep_tokens: bool, progress: Progress | None = None) -> History:
    """Return what can be kept of an open file; what cannot is said in the findings of `mended`.

    Raise `DamagedError` when nothing can be kept: no turn is whole, and ids are not asked for, or not there.
    """
    return _Salvage(mended, progress).history(keep_tokens=keep_tokens)


class _Looking:
    """Checks what the live list of a file points at, turn by turn, as far as it is asked for."""

    def __init__(self, file: NativeFile) -> None:
        self.file = file
        specs = file.geometry.tensors
        self.names = {spec.id: spec.name for spec in specs}
        self.sizes = {Kind.SPAN: Sizes(specs, replaced=False), Kind.STATE: Sizes(specs, replaced=True)}

    def turns(self, *, checked: bool) -> Iterator[_Turn]:
        """Yield every turn; behind the first broken one no parts are checked.

        With `checked` all checksums of the file were found right; but nobody looked at what earlier STATEs say.
        """
        previous, tokens, rows, broken = bytes(16), 0, 0, False
        free: dict[NativeFile, int] = {}
        for where, entry in self.file.live:
            between = (tokens, tokens + entry.n_tokens)
            tokens, rows = between[1], rows + entry.n_rows
            turn = _Turn((where, entry), None, between)
            try:
                table, payload, check = where.table_at(entry.span, Kind.SPAN)
                if entry.span < free.get(where, HEADER_SIZE):  # else one span could be copied again and again
                    raise FormatError("spans are out of order or overlap", path=where.path, offset=entry.span)
                free[where] = payload + table.payload_length
                self._check_table(turn, table, check, previous)
                turn = replace(turn, table=table)
                if not checked and not broken:
                    self._check_parts(where, Kind.SPAN, table, payload)
            except _PartError as bad:
                turn = replace(turn, error=bad.error, tensor=bad.tensor)
            except VersionError:
                raise
            except _BROKEN as error:
                turn = replace(turn, error=error)
            previous, broken = entry.digest, broken or turn.error is not None
            if not broken and entry.state:
                turn = self._with_state(turn, rows, checked=checked)
            yield turn

    def _check_table(self, turn: _Turn, table: ReadTable, check: int, previous: bytes) -> None:
        where, entry = turn.live
        fits = check == entry.check and (table.row_start, table.token_start) == (entry.row_start, turn.tokens[0])
        if not fits or entry.n_rows > table.n_rows or entry.n_tokens > len(table.tokens):
            raise FormatError("a SPAN is not the one that the live list means", path=where.path, offset=entry.span)
        if history_digest(previous, table.tokens[: entry.n_tokens], entry.n_rows) != entry.digest:
            raise DamagedError("the history digest of a SPAN does not fit", path=where.path, offset=entry.span)
        parse_said(table.meta, where.path, entry.span + RECORD_SIZE)

    def _check_parts(
        self, where: NativeFile, kind: int, table: ReadTable, payload: int, *, checked: bool = False
    ) -> None:
        for part in table.parts:
            name = self.names.get(part.tensor, f"tensor {part.tensor}")
            try:
                source = PartSource(where.reader, self.sizes[kind], part, payload, mapped=False)
                if not checked or part.codec != codecs.EXACT.id:
                    self._check_part(source, part)
            except (UnsupportedError, VersionError):
                raise
            except KvsnapError as error:
                raise _PartError(name, error) from error

    @staticmethod
    def _check_part(source: PartSource, part: Part) -> None:
        digest = xxhash.xxh3_64()
        for at in range(0, part.stored, _STEP):
            digest.update(source.file.read_at(source.offset + at, min(_STEP, part.stored - at)))
        if digest.intdigest() != part.checksum:
            raise source.damage()
        if part.codec != codecs.EXACT.id:
            source.read_into(np.empty(source.shape, dtype=numpy_dtype(source.spec.dtype)))

    def _with_state(self, turn: _Turn, rows: int, *, checked: bool) -> _Turn:
        where, entry = turn.live
        try:
            table, payload, _ = where.table_at(entry.state, Kind.STATE)
            if len(table.tokens) or table.n_rows or table.row_start != rows:
                raise FormatError("STATE is not that of the last row", path=where.path, offset=entry.state)
            schema.parse_sampler(table.meta, where.path, payload)
            schema.parse_token_offset(table.meta, where.path, payload)
            schema.parse_proof(table.meta, self.file.geometry.shard, where.path, payload)
            self._check_parts(where, Kind.STATE, table, payload, checked=checked)
        except _PartError as bad:
            return replace(turn, state_error=bad.error, state_tensor=bad.tensor)
        except VersionError:
            raise
        except _BROKEN as error:
            return replace(turn, state_error=error)
        return turn


class _Salvage:
    """One run of `salvage`."""

    def __init__(self, mended: Mended, progress: Progress | None) -> None:
        self.mended, self.file, self.findings = mended, mended.file, mended.findings
        specs = self.file.geometry.tensors
        self.needs_state = needs_state(specs)
        self.unstored = self.file.commit.n_rows + self.file.commit.n_pending - self.file.commit.n_tokens
        self.told: list[tuple[NativeFile, int, int]] = []  # records whose damage is among what is lost
        self.report: VerifyReport = verify_file(self.file, progress)
        # Where every record was found whole, it need not be read again before it is copied, and checked on the way.
        whole = not self.report.damages and len(self.file.stretches) == 1
        self.turns = list(_Looking(self.file).turns(checked=whole))

    # -- choosing --------------------------------------------------------------------------------------------------

    def history(self, *, keep_tokens: bool) -> History:
        """Return what is kept, and say what is not."""
        count = next((i for i, turn in enumerate(self.turns) if turn.error), len(self.turns))
        while self.needs_state and count and self._is_stateless(self.turns[count - 1]):
            count -= 1  # rows without the state that belongs to their end are of no use
        self._say_lost(count)
        behind = self._ids_behind(count) if keep_tokens else ()
        if self.turns and not count and not behind:
            raise self._nothing()
        kept = tuple(self._kept(turn) for turn in self.turns[:count])
        pending = self._pending_table(kept, behind) if behind else None
        end = self._end(kept, count)
        if pending is not None:
            tokens = end.n_tokens + len(pending.tokens)
            end = replace(end, n_tokens=tokens, n_pending=tokens + self.unstored - end.n_rows, complete=False)
            self.findings.notes.append(
                f"{len(pending.tokens)} ids behind what is kept stand in the new file as pending: not evaluated"
            )
        self._describe(kept)
        cut = Cut(kept, end.n_tokens, end.n_rows, end.n_pending, end.token_offset)
        history = history_of(self.file, cut)
        if count < len(self.turns) and not behind:  # what was said of later turns is not true of the last one kept
            said = (piece.metadata for piece in reversed(history.pieces) if piece.metadata is not None)
            history = replace(history, metadata=next(said, {}))
        self.findings.notes.extend(history.notes)
        self._say_rest()
        return replace(history, end=end, pending=pending)

    @staticmethod
    def _is_stateless(turn: _Turn) -> bool:
        """Tell whether a turn has no state to go back to: damaged, or left out when the file was compacted."""
        return turn.state_error is not None or (not turn.entry.state and turn.entry.row_start + turn.entry.n_rows > 0)

    def _say_lost(self, count: int) -> None:
        total = self.file.commit.n_tokens
        for i, turn in enumerate(self.turns):
            where, entry = turn.live
            if turn.state_error and i < count:
                what = (
                    f"STATE behind token {turn.tokens[1]}, so that no logits and no sampler are known there: "
                    f"{turn.state_error.message}"
                )
                self._lose(what, turn.state_error.offset or entry.state, where, entry.state, turn.state_tensor)
            elif i == count:  # what is wrong may be behind turns that have no state of their own to go back to
                bad = next((t for t in self.turns[count:] if t.error or t.state_error), self.turns[-1])
                error = bad.error or bad.state_error
                what = error.message if error else "the state at the end is not stored"
                tensor = bad.tensor or bad.state_tensor
                where, entry = bad.live
                at = entry.span if bad.error or not entry.state else entry.state
                self._lose(what, (error and error.offset) or at, where, at, tensor, (turn.tokens[0], total))
        if count < len(self.turns):
            ids = sum(t.entry.n_tokens for t in self.turns[count:] if t.table is not None)
            self.findings.notes.append(
                f"{len(self.turns) - count} of {len(self.turns)} turns are lost; "
                f"{ids} of their {total - self.turns[count].tokens[0]} tokens are whole as ids"
            )

    def _lose(
        self, what: str, offset: int, where: NativeFile, record: int, tensor: str = "",
        tokens: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        path = None if where is self.file else where.path
        self.findings.lose(what, offset, tensor=tensor, tokens=tokens, path=path)
        try:
            end = record_end(record, read_record_header(where.reader, where.header, record))
        except KvsnapError:
            end = record + RECORD_SIZE
        self.told.append((where, record, end))

    def _nothing(self) -> DamagedError:
        bad = next((turn for turn in self.turns if turn.error or turn.state_error), self.turns[-1])
        error = bad.error or bad.state_error
        what = "the first turn is damaged" if error else "the state at the end is not stored"
        if bad is not self.turns[0] and error:
            what = f"the turn behind token {bad.tokens[0]} is damaged"
        ids = self._ids_behind(0)
        hint = f"; {sum(t.entry.n_tokens for t in ids)} ids can be kept: ask for them (keep_tokens, --tokens)"
        reason = "" if error is None else f" ({error.message})"
        stateless = "" if bad is self.turns[0] else ", and no state of a turn before it is stored"
        return DamagedError(
            f"{what}{reason}{stateless}, so that nothing with rows can be kept{hint if ids else ''}",
            path=bad.live[0].path, offset=None if error is None else error.offset,
        )  # fmt: skip

    @staticmethod
    def _kept(turn: _Turn) -> Live:
        where, entry = turn.live
        return where, replace(entry, state=0) if turn.state_error else entry

    def _ids_behind(self, count: int) -> tuple[_Turn, ...]:
        """Return the turns from `count` on whose ids are whole, up to the first one whose are not."""
        rows = sum(turn.entry.n_rows for turn in self.turns[:count])
        if rows < self.unstored:  # ids that were never in the file would have to be evaluated before these
            return ()
        found = []
        for turn in self.turns[count:]:
            if turn.table is None:
                break
            found.append(turn)
        return tuple(found) if any(turn.entry.n_tokens for turn in found) else ()

    def _pending_table(self, kept: tuple[Live, ...], behind: tuple[_Turn, ...]) -> Table:
        runs: tuple[Run, ...] = ()
        said = before = Said()
        for i, turn in enumerate(self.turns[: len(kept) + len(behind)]):
            table, entry = turn.table, turn.entry
            assert table is not None  # noqa: S101 # both lists hold turns whose tables are whole
            if i == len(kept):
                before = said
            piece = parse_said(table.meta, turn.live[0].path, 0)
            said = said.add(piece if entry.n_tokens == len(table.tokens) else piece.cut())
            if i >= len(kept):
                runs = join_runs(runs, cut_runs(table.runs, entry.n_tokens))
        ids: list[npt.NDArray[Any]] = [t.table.tokens[: t.entry.n_tokens] for t in behind if t.table is not None]
        last = [entry for _, entry in kept]
        return Table(
            row_start=sum(e.n_rows for e in last), token_start=sum(e.n_tokens for e in last),
            tokens=np.concatenate(ids).astype(np.int32), runs=runs, meta=pack_said(said.since(before)),
        )  # fmt: skip

    # -- the end ---------------------------------------------------------------------------------------------------

    def _end(self, kept: tuple[Live, ...], count: int) -> Commit:
        """Return a commit with the counts at the end of what is kept."""
        if count == len(self.turns):
            return self.file.commit
        tokens = sum(entry.n_tokens for _, entry in kept)
        rows = sum(entry.n_rows for _, entry in kept)
        made = self._commit_of(kept[-1]) if kept else None
        if made is not None:
            return made
        pending = min(tokens, max(0, tokens + self.unstored - rows))
        return Commit(
            number=1, operation=Operation.TRUNCATE, n_tokens=tokens, n_rows=rows, n_pending=pending,
            token_offset=self._next_position(kept), time_ns=self.file.commit.time_ns,
        )  # fmt: skip

    def _commit_of(self, last: Live) -> Commit | None:
        where, entry = last
        if where is not self.file:
            return None
        for _, commit in self.mended.commits_since(self.mended.number_of(entry) or 0):
            if commit.digest == entry.digest:
                return commit
        return None

    def _next_position(self, kept: tuple[Live, ...]) -> int:
        if not kept:
            positions = self.turns[0].table.positions if self.turns[0].table else ()
            return positions[0].start if positions else 0
        where, entry = kept[-1]
        if entry.state:
            table, place, _ = where.table_at(entry.state, Kind.STATE)
            named = schema.parse_token_offset(table.meta, where.path, place)
            if named is not None:
                return named
        for turn in reversed(self.turns[: len(kept)]):
            runs: tuple[PositionRun, ...] = turn.table.positions if turn.table else ()
            if last := cut_positions(runs, turn.entry.n_rows):
                return last[-1].start + last[-1].count
        return 0

    def _describe(self, kept: tuple[Live, ...]) -> None:
        """Put what can be proven in the place of a damaged IDENTITY and NOTE."""
        file, commit = self.file, self.file.commit
        try:
            _ = file.identity
        except VersionError:
            raise
        except _BROKEN as error:
            found = self._other_identity(kept)
            vars(file)["identity"] = found or Identity()
            if found is None:
                self._lose(
                    f"IDENTITY ({error.message}): nobody can say any more which model this is of, and a restore needs "
                    "--accept weights", error.offset or commit.identity, file, commit.identity,
                )  # fmt: skip
            else:
                self.findings.notes.append(
                    f"IDENTITY is damaged ({error.message}): that of the last turn kept takes its place"
                )
        try:
            _ = file.metadata
        except VersionError:
            raise
        except _BROKEN as error:
            vars(file)["metadata"] = {}
            self._lose(f"NOTE, the metadata ({error.message})", error.offset or commit.note, file, commit.note)

    def _other_identity(self, kept: tuple[Live, ...]) -> Identity | None:
        """Return what a commit since the last turn kept says of the model, which holds for all before it, too.

        An earlier IDENTITY may not be taken: what a later turn did not know, nobody knows of the whole.
        """
        if not kept:
            return None
        where, entry = kept[-1]
        try:
            if where is not self.file:
                return where.identity
        except VersionError:
            raise
        except _BROKEN:
            return None
        number = self.mended.number_of(entry)
        commits = self.mended.commits_since(number) if number is not None else ()
        for offset in dict.fromkeys(commit.identity for _, commit in commits):
            if offset and offset != self.file.commit.identity:
                try:
                    _, payload = read_record(self.file.reader, self.file.header, offset, kind=Kind.IDENTITY)
                    return Identity.from_dict(parse_json(payload, self.file.path, offset))
                except _BROKEN:
                    continue
        return None

    def _say_rest(self) -> None:
        """Say what is damaged, and costs nothing of what is kept."""
        rest = [damage for damage in self.report.damages if not self._is_told(damage)]
        end = self.file.end.footer.file_length - 64
        notes = [f"damage that costs nothing here: {d}" for d in rest if d.offset != end]
        self.findings.notes.extend(dict.fromkeys(notes[:_TOLD]))
        if len(notes) > _TOLD:
            self.findings.notes.append(f"and {len(notes) - _TOLD} more places like these")

    def _is_told(self, damage: Damage) -> bool:
        for where, start, stop in self.told:
            same = damage.path == (None if where is self.file else where.path)
            if same and start <= damage.offset < stop:
                return True
        return False

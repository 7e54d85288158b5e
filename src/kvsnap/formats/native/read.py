"""Reading `.kvsnap` files: opening, the live list, and tensors that are read when they are used. Spec section 12."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from kvsnap.errors import DamagedError, FormatError, InputError, MissingError
from kvsnap.files import Reader
from kvsnap.formats.native import schema
from kvsnap.formats.native.base import (
    Base,
    check_parent,
    check_parent_id,
    kept_stretches,
    missing_parent,
    parent_path,
    parse_base,
)
from kvsnap.formats.native.readers import BytesReader, FileReader
from kvsnap.formats.native.sources import PartSource, Sizes
from kvsnap.formats.native.tables import (
    MAX_JSON,
    Commit,
    Entry,
    ReadTable,
    history_digest,
    parse_commit,
    parse_index,
    parse_json,
    parse_table,
)
from kvsnap.formats.native.vault import open_vault
from kvsnap.identity import Identity
from kvsnap.layout import Shard, Tensor
from kvsnap.records import (
    FORKED,
    HEADER_SIZE,
    MAX_LENGTH,
    RECORD_SIZE,
    SNAPSHOT,
    End,
    FileHeader,
    Kind,
    end_at,
    find_end,
    read_header,
    read_record,
)

if TYPE_CHECKING:
    from kvsnap.layout import SamplerState

__all__ = ["BytesReader", "NativeFile", "Span", "spans_of"]

_TRIES = 8


@dataclass(frozen=True, slots=True)
class Span:
    """A SPAN as it is used by the live list: the entry, its table, where its payload starts, and in which file."""

    entry: Entry
    table: ReadTable
    payload: int
    file: NativeFile


def _length(path: str | os.PathLike[str]) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # gone by now: whoever opens it again is told
        return -1


class NativeFile:
    """One open `.kvsnap` file at one commit. Reading takes no lock; a writer that appends does not disturb it."""

    def __init__(
        self, reader: FileReader, *, mapped: bool = True, at: tuple[int, bytes] | None = None, key: bytes | None = None
    ) -> None:
        """Open at the last commit, or at the one of this offset and digest; an encrypted file needs its key."""
        self.reader = reader
        self.header: FileHeader = read_header(reader)
        self.vault = open_vault(reader, self.header, key)
        self.content: FileReader = reader if self.vault is None else self.vault
        """Where the parts are read from, at the offsets that their tables give."""
        self.end: End = find_end(reader, self.header) if at is None else end_at(reader, self.header, *at)
        place = self.end.footer.commit_offset
        payload = self.end.payload if self.vault is None else self.table_of(place, kind=Kind.COMMIT)[0]
        self.commit: Commit = parse_commit(payload, self.path, place + RECORD_SIZE)
        # A journal may be cut by a later writer, which a mapping would not survive.
        self.mapped = mapped and self.sealed and self.vault is None
        if self.commit.number != self.end.footer.commit:
            raise FormatError(
                "COMMIT and its footer disagree", path=self.path, offset=self.end.footer.commit_offset,
                expected=self.end.footer.commit, found=self.commit.number,
            )  # fmt: skip
        if self.header.use == SNAPSHOT and (self.commit.number != 1 or self.commit.previous):
            raise FormatError(
                "a snapshot has one commit", path=self.path, offset=place, expected=1, found=self.commit.number
            )

    @staticmethod
    def open(path: str | os.PathLike[str], *, mapped: bool = True, key: bytes | None = None) -> NativeFile:
        """Open a file. Raise `MissingError`, `FormatError`, `VersionError`, `DamagedError` or `KeyNeededError`.

        Where a writer cuts off the end that was being looked at (a torn tail, a turn that failed), it is opened again.
        """
        for _ in range(_TRIES):
            reader = Reader(path)
            try:
                return NativeFile(reader, mapped=mapped, key=key)
            except DamagedError:
                if _length(path) == reader.size:
                    raise
        return NativeFile(Reader(path), mapped=mapped, key=key)

    @property
    def path(self) -> str | None:
        """Name for messages."""
        return self.reader.path

    @property
    def use(self) -> str:
        """What the file is: `snapshot` or `session`."""
        return "snapshot" if self.header.use == SNAPSHOT else "session"

    @property
    def sealed(self) -> bool:
        """True when nothing may be appended."""
        return self.header.use == SNAPSHOT or self.commit.sealed

    def close(self) -> None:
        """Close the file now; tensors that were not read yet can then no longer be read."""
        if isinstance(self.reader, Reader):
            self.reader.close()
        parent = vars(self).get("parent")  # opened only when it was needed
        if parent is not None:
            parent.close()

    # -- the parent of a fork -------------------------------------------------------------------------------

    @cached_property
    def base(self) -> Base | None:
        """Where the history of a fork starts; None for any other file. Raise `FormatError` or `DamagedError`."""
        if bool(self.header.required & FORKED) != bool(self.commit.base):
            raise FormatError(
                "a COMMIT names a BASE in a file that is no fork, or none in a fork", path=self.path,
                offset=self.end.footer.commit_offset, found=self.commit.base,
            )  # fmt: skip
        if not self.commit.base:
            return None
        payload, place = self._payload(self.commit.base, Kind.BASE)
        return parse_base(payload, self.path, place)

    @cached_property
    def parent(self) -> NativeFile | None:
        """The file that a fork starts in, open at the commit it was made from; None for any other file.

        Raise `MissingError` when it is not beside this one, `DamagedError` or `FormatError` when it is another one.
        """
        base = self.base
        if base is None:
            return None
        place = parent_path(self.path, base)
        with ExitStack() as undo:
            try:
                reader = undo.enter_context(Reader(place, follow_symlinks=False))
            except MissingError as error:
                raise missing_parent(self.path, place, error) from error
            except InputError as error:  # the name was not given by the caller
                raise DamagedError(error.message, path=place, found=error.found) from error
            check_parent_id(self.path, base, own=self.header.file_id, found=read_header(reader).file_id)
            file = NativeFile(reader, mapped=False, at=(base.offset, base.digest))
            depth = file.base.depth if file.base else 0
            check_parent(self.path, base, commit=file.commit.number, depth=depth)
            undo.pop_all()
        return file

    @cached_property
    def _inherited(self) -> tuple[tuple[NativeFile, tuple[Entry, ...]], ...]:
        base, parent = self.base, self.parent
        return () if base is None or parent is None else tuple(kept_stretches(base, parent.stretches, self.path))

    @property
    def stretches(self) -> tuple[tuple[NativeFile, tuple[Entry, ...]], ...]:
        """The live list, cut where it goes from one file into the next: the oldest ancestor first, this file last."""
        # Not kept: a file that held itself would stay open, and take its room, until the garbage collector comes.
        return (*self._inherited, (self, self.entries))

    @property
    def live(self) -> tuple[tuple[NativeFile, Entry], ...]:
        """The live list, each entry with the file that its offsets mean."""
        return tuple((file, entry) for file, entries in self.stretches for entry in entries)

    def state_place(self) -> tuple[NativeFile, int]:
        """Return the file and the offset of the STATE at the end of the history; offset 0 for none."""
        if self.commit.state or self.base is None or self.entries:
            return self, self.commit.state
        kept = [(file, entries) for file, entries in self.stretches if entries]
        return (kept[-1][0], kept[-1][1][-1].state) if kept else (self, 0)

    # -- what is there ----------------------------------------------------------------------------------------

    def table_of(self, offset: int, *, kind: int | None = None, limit: int = MAX_LENGTH) -> tuple[bytes, int, int]:
        """Read the table of a record; return it, the length of the payload, and the record's header checksum.

        Of an encrypted file table and length are the plain ones. Raise `DamagedError`, `FormatError`, `TamperedError`.
        """
        record, raw = read_record(self.reader, self.header, offset, kind=kind, limit=limit)
        check = int.from_bytes(record.pack(self.header.salt, offset)[56:], "little")
        return *((raw, record.length) if self.vault is None else self.vault.table(offset, record, raw)), check

    def _payload(self, offset: int, kind: int) -> tuple[bytes, int]:
        return self.table_of(offset, kind=kind, limit=MAX_JSON)[0], offset + RECORD_SIZE

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The live list, as far as it lies in this file.

        Raise `DamagedError` or `FormatError` when INDEX cannot be read or does not add up.
        """
        commit = self.commit
        kept: tuple[Entry, ...] = ()
        if commit.index:
            payload, _, _ = self.table_of(commit.index, kind=Kind.INDEX)
            kept = parse_index(payload, self.path, commit.index + RECORD_SIZE)
            if commit.index_kept > len(kept):
                raise FormatError(
                    "COMMIT keeps more of INDEX than there is",
                    path=self.path,
                    offset=commit.index,
                    expected=commit.index_kept,
                    found=len(kept),
                )
            kept = kept[: commit.index_kept]
        live = kept + commit.tail
        _check_live(self, live, self.base)
        return live

    @cached_property
    def geometry(self) -> schema.Geometry:
        """What LAYOUT says; empty when there is none."""
        if not self.commit.layout:
            return self.parent.geometry if self.parent else schema.Geometry("", (), ())
        return schema.parse_layout(*self._json(self.commit.layout, Kind.LAYOUT))

    def _json(self, offset: int, kind: int) -> tuple[bytes, str | None, int]:
        payload, place = self._payload(offset, kind)
        return payload, self.path, place

    @cached_property
    def identity(self) -> Identity:
        """What IDENTITY says; empty (all unknown) when there is none."""
        if not self.commit.identity:
            return self.parent.identity if self.parent else Identity()
        payload, path, place = self._json(self.commit.identity, Kind.IDENTITY)
        try:
            return Identity.from_dict(parse_json(payload, path, place))
        except FormatError as error:
            error.path, error.offset = path, place
            raise

    @cached_property
    def metadata(self) -> dict[str, str]:
        """The user's metadata."""
        if not self.commit.note:
            return self.parent.metadata if self.parent else {}
        return schema.parse_note(*self._json(self.commit.note, Kind.NOTE))

    def table_at(self, offset: int, kind: int) -> tuple[ReadTable, int, int]:
        """Read the table of a SPAN or STATE; return it, the offset of its payload, and the record's header checksum."""
        raw, length, check = self.table_of(offset, kind=kind)
        place = offset + RECORD_SIZE
        return parse_table(raw, length, self.path, place), place, check

    def spans(self, live: Iterable[tuple[NativeFile, Entry]] | None = None) -> Iterator[Span]:
        """Yield the spans of the live list, or of the beginning of it that is given; see `spans_of`."""
        return spans_of(self.live if live is None else live)

    def state(self) -> tuple[dict[int, Tensor], SamplerState | None]:
        """Read STATE: its tensors by id (not their bytes), and the sampler."""
        file, offset = self.state_place()
        return self.state_at(file, offset, self.commit.n_rows) if offset else ({}, None)

    def shard(self) -> Shard | None:
        """Return which part of a whole this is, with its proof where the end of the history has one; None: whole."""
        file, offset = self.state_place()
        if self.geometry.shard is None or not offset:
            return self.geometry.shard
        table, payload, _ = file.table_at(offset, Kind.STATE)
        return schema.parse_proof(table.meta, self.geometry.shard, file.path, payload)

    def state_at(self, file: NativeFile, offset: int, n_rows: int) -> tuple[dict[int, Tensor], SamplerState | None]:
        """Read the STATE at `offset` of `file`, which belongs to this one, as that of the first `n_rows` rows."""
        table, payload, _ = file.table_at(offset, Kind.STATE)
        if len(table.tokens) or table.n_rows or table.row_start != n_rows:
            raise FormatError(
                "STATE is not that of the last row", path=file.path, offset=offset,
                expected=f"row {n_rows}, no tokens or rows of its own",
                found=f"row {table.row_start}, {len(table.tokens)} tokens, {table.n_rows} rows",
            )  # fmt: skip
        schema.parse_token_offset(table.meta, file.path, payload)
        schema.parse_proof(table.meta, self.geometry.shard, file.path, payload)
        sizes, tensors = Sizes(self.geometry.tensors, replaced=True), {}
        for part in table.parts:
            source = PartSource(file.content, sizes, part, payload, mapped=file.mapped)
            tensors[part.tensor] = Tensor(source.spec, source, n_rows=part.n_rows, bound=part.bound)
        return tensors, schema.parse_sampler(table.meta, file.path, payload)


def spans_of(live: Iterable[tuple[NativeFile, Entry]]) -> Iterator[Span]:
    """Yield the spans of a live list, or of its beginning, each checked against its entry and the history digest.

    Raise `FormatError` or `DamagedError` at the first one that is not what the list means.
    """
    digest, n_tokens = bytes(16), 0
    before: NativeFile | None = None
    free = HEADER_SIZE
    for file, entry in live:
        free = free if file is before else HEADER_SIZE
        before = file
        if entry.span < free:
            raise FormatError(
                "spans are out of order or overlap", path=file.path, offset=entry.span, expected=f"{free} or above"
            )
        table, payload, check = file.table_at(entry.span, Kind.SPAN)
        free = payload + table.payload_length
        fits = check == entry.check and table.row_start == entry.row_start and table.token_start == n_tokens
        if not fits or entry.n_rows > table.n_rows or entry.n_tokens > len(table.tokens):
            raise FormatError("a SPAN is not the one that the live list means", path=file.path, offset=entry.span)
        digest = history_digest(digest, table.tokens[: entry.n_tokens], entry.n_rows)
        if digest != entry.digest:
            raise DamagedError("the history digest of a SPAN does not fit", path=file.path, offset=entry.span)
        n_tokens += entry.n_tokens
        yield Span(entry, table, payload, file)


def _check_live(file: NativeFile, live: tuple[Entry, ...], base: Base | None) -> None:
    """Raise `FormatError` unless a live list, behind what a fork keeps of its parent, is that of the commit."""
    commit = file.commit
    n_tokens = sum(e.n_tokens for e in live) + (base.n_tokens if base else 0)
    n_rows = base.n_rows if base else 0
    for entry in live:
        if entry.row_start != n_rows:
            raise FormatError(
                "the live list has a gap", path=file.path, offset=file.end.footer.commit_offset,
                expected=n_rows, found=entry.row_start,
            )  # fmt: skip
        n_rows += entry.n_rows
    digest = live[-1].digest if live else base.history if base else bytes(16)
    if (n_tokens, n_rows, digest) != (commit.n_tokens, commit.n_rows, commit.digest):
        raise FormatError(
            "the live list does not add up to its COMMIT", path=file.path, offset=file.end.footer.commit_offset,
            expected=f"{commit.n_tokens} tokens, {commit.n_rows} rows", found=f"{n_tokens} tokens, {n_rows} rows",
        )  # fmt: skip
    state = live[-1].state if live else 0
    if commit.state != state:
        raise FormatError(
            "COMMIT names another STATE than its last entry", path=file.path,
            offset=file.end.footer.commit_offset, expected=state, found=commit.state,
        )  # fmt: skip

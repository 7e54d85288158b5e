"""Checking every byte of a `.kvsnap` file, and naming what is damaged. Spec sections 12 and 14."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from kvsnap import codecs
from kvsnap.errors import (
    DamagedError,
    FormatError,
    KvsnapError,
    MissingError,
    TamperedError,
    UnsupportedError,
    VersionError,
)
from kvsnap.formats.native.assemble import snapshot_of
from kvsnap.formats.native.base import parse_base
from kvsnap.formats.native.read import NativeFile
from kvsnap.formats.native.sources import PartSource, Sizes
from kvsnap.formats.native.tables import Commit, Operation, ReadTable, parse_commit
from kvsnap.formats.native.vault import check_key_record
from kvsnap.protocols import Progress
from kvsnap.records import (
    FOOTER_SIZE,
    FORKED,
    HEADER_SIZE,
    RECORD_SIZE,
    SNAPSHOT,
    WITH_PARTS,
    Kind,
    ReadAt,
    RecordHeader,
    commit_digest,
    parse_footer,
    read_record,
    record_end,
    scan,
)
from kvsnap.tensors import numpy_dtype

__all__ = ["Damage", "VerifyReport", "verify_file"]

_STEP = 1 << 20


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged place: what it is, the offset of its bytes, and the history it takes with it.

    `live` tells whether the current history needs it. `tokens` is the range of tokens `[first, last)` that is lost.
    `path` names the file where that is another one: the parent of a fork. `tampered`: the bytes of an encrypted file
    are whole, but are not what the owner of the key wrote there.
    """

    what: str
    offset: int
    live: bool
    tensor: str = ""
    tokens: tuple[int, int] | None = None
    path: str | None = None
    tampered: bool = False

    def __str__(self) -> str:
        lost = "" if self.tokens is None else f", tokens [{self.tokens[0]}, {self.tokens[1]})"
        where = "" if self.path is None else f"{self.path}: "
        return (
            f"{where}byte {self.offset}: {self.what}{lost}{'' if self.live else ' (not part of the current history)'}"
        )


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found. `ok` is True when every byte of the current history is as it was written.

    `notes` are things to know that lose nothing: a torn tail, damage in records that are no longer live. `encryption`
    names the cipher of an encrypted file; `opened` is False where it was checked without its key, so from outside only.
    """

    path: str | None
    format: str
    n_bytes: int
    n_records: int
    n_parts: int
    n_commits: int
    n_tokens: int
    damages: tuple[Damage, ...]
    notes: tuple[str, ...]
    dropped: int = 0
    encryption: str = ""
    opened: bool = True

    @property
    def ok(self) -> bool:
        """True when nothing live is damaged."""
        return not any(d.live for d in self.damages)

    @property
    def tampered(self) -> bool:
        """True when something live was tampered with. Without the key of an encrypted file this cannot be seen."""
        return any(d.live and d.tampered for d in self.damages)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {
            "ok": self.ok,
            "tampered": self.tampered,
            **{name: getattr(self, name) for name in self.__dataclass_fields__ if name != "damages"},
            "notes": list(self.notes),
            "damages": [
                {name: getattr(damage, name) for name in Damage.__dataclass_fields__} for damage in self.damages
            ],
        }


@dataclass(slots=True)
class _Walk:
    file: NativeFile
    progress: Progress | None
    damages: list[Damage] = field(default_factory=list)
    n_records: int = 0
    n_parts: int = 0
    n_commits: int = 0
    live: set[int] = field(default_factory=set)
    live_tokens: dict[int, tuple[int, int]] = field(default_factory=dict)
    path: str | None = None

    def found(self, what: str, offset: int, record: int, **facts: Any) -> None:
        self.damages.append(Damage(what, offset, record in self.live, path=self.path, **facts))

    def failed(self, error: KvsnapError, **facts: Any) -> None:
        """Take in an error that ended the reading of the live history, in whichever file it was."""
        path = error.path if error.path != self.file.path else None
        tampered = isinstance(error, TamperedError)
        self.damages.append(Damage(error.message, error.offset or 0, live=True, path=path, tampered=tampered, **facts))

    def told(self, place: int) -> None:
        """Tell how far the walk has come."""
        if self.progress is not None:
            self.progress(place, self.file.end.footer.file_length)

    def zero(self, start: int, stop: int, record: int, reader: ReadAt | None = None) -> None:
        """Check padding."""
        if stop > start and any((reader or self.file.reader).read_at(start, stop - start)):
            self.found("padding is not zero", start, record)


def _live_records(file: NativeFile, walk: _Walk) -> list[_Walk]:
    """Note what the history needs of this file; return the same for the parents of a fork."""
    commit = file.commit
    walk.live = {
        file.end.footer.commit_offset, commit.identity, commit.layout, commit.state, commit.note, commit.index,
        commit.base, *([HEADER_SIZE] if file.vault else []),
    } - {0}  # fmt: skip
    walks = {file: walk}
    above = file.parent
    while above is not None:
        # Its COMMIT, BASE and INDEX are checked when they are read for the live list; no commit before is needed.
        walks[above] = _Walk(above, None, path=above.path)
        above = above.parent
    others, token = list(walks.values())[1:], 0
    for name in ("identity", "layout", "note"):
        where = file
        while not getattr(where.commit, name) and where.parent is not None:
            where = where.parent
        walks[where].live |= {getattr(where.commit, name)} - {0}
    for where, entries in file.stretches:
        walked = walks[where]
        for entry in entries:
            walked.live.add(entry.span)
            walked.live_tokens[entry.span] = (token, token + entry.n_tokens)
            token += entry.n_tokens
    where, state = file.state_place()
    walks[where].live |= {state} - {0}
    return others


def _check_parents(walk: _Walk, others: list[_Walk]) -> None:
    """Check the records that a fork needs of its parents; what else is in those files is their own business."""
    for other in others:
        for offset in sorted(other.live):
            _guarded(other, offset)
            walk.n_records += 1
        walk.damages += other.damages
        walk.n_parts += other.n_parts


def _check_parts(walk: _Walk, offset: int, record: RecordHeader, table: ReadTable) -> None:
    file = walk.file
    specs = {spec.id: spec for spec in file.geometry.tensors}
    at = offset + RECORD_SIZE + table.length_of_table
    for part in table.parts:
        start = offset + RECORD_SIZE + part.offset
        walk.zero(at, start, offset, file.content)
        at = start + part.stored
        # A record of an earlier history may have been written under another LAYOUT: its checksums are all there is.
        is_live = offset in walk.live
        spec = specs.get(part.tensor) if is_live else None
        name = spec.name if spec else f"tensor {part.tensor}"
        tokens = walk.live_tokens.get(offset)
        rows = f"rows [{part.row_start}, {part.row_start + part.n_rows})"
        digest = xxhash.xxh3_64()
        try:
            for place in range(start, at, _STEP):
                digest.update(file.content.read_at(place, min(_STEP, at - place)))
                walk.told(place)
        except DamagedError as error:
            walk.found(f"{name} {rows}: {error.message}", error.offset or start, offset, tensor=name, tokens=tokens,
                       tampered=isinstance(error, TamperedError))  # fmt: skip
            continue
        if digest.intdigest() != part.checksum:
            walk.found(f"{name} {rows} does not fit its checksum", start, offset, tensor=name, tokens=tokens)
        elif spec is None and is_live:
            walk.found(f"LAYOUT has no {name}", start, offset, tensor=name, tokens=tokens)
        elif spec is not None and part.codec != codecs.EXACT.id:
            sizes = Sizes(file.geometry.tensors, replaced=record.kind == Kind.STATE)
            source = PartSource(file.content, sizes, part, offset + RECORD_SIZE, mapped=False)
            source.read_into(np.empty(source.shape, dtype=numpy_dtype(spec.dtype)))
        walk.n_parts += 1


def _guarded(walk: _Walk, offset: int) -> None:
    try:
        _check_record(walk, offset)
    except (UnsupportedError, VersionError):
        raise
    except KvsnapError as error:
        walk.found(error.message, error.offset or offset, offset, tokens=walk.live_tokens.get(offset),
                   tampered=isinstance(error, TamperedError))  # fmt: skip


def _check_record(walk: _Walk, offset: int) -> None:
    file = walk.file
    record, raw = read_record(file.reader, file.header, offset)
    if record.kind == Kind.KEY:
        check_key_record(file.reader, file.header, offset)
    else:
        raw, _, _ = file.table_of(offset)
    end = offset + RECORD_SIZE + record.length
    walk.zero(end, record_end(offset, record), offset)
    if record.kind in WITH_PARTS:
        table, _, _ = file.table_at(offset, record.kind)
        _check_parts(walk, offset, record, table)
    elif record.kind == Kind.COMMIT:
        walk.n_commits += 1
        _check_commit(walk, offset, record, raw)


def _check_commit(walk: _Walk, offset: int, record: RecordHeader, raw: bytes) -> None:
    file, place = walk.file, record_end(offset, record)
    commit = parse_commit(raw, file.path, offset + RECORD_SIZE)
    footer = parse_footer(file.reader.read_at(place, FOOTER_SIZE), file.header.salt, place)
    _, stored = read_record(file.reader, file.header, offset)
    digest = commit_digest(record.pack(file.header.salt, offset), stored)
    if footer is None or footer.digest != digest or footer.commit_offset != offset:
        walk.found("a footer does not fit its COMMIT", place, offset)
    last = file.end.footer.commit_offset
    if offset < last and (commit.sealed or file.header.use == SNAPSHOT):
        walk.found("a commit follows one that is sealed", last, last)
    _check_base(walk, commit, offset)
    if commit.previous:
        _check_previous(walk, offset, commit)


def _check_previous(walk: _Walk, offset: int, commit: Commit) -> None:
    """Check the chain of commits. An older COMMIT that is damaged is no loss to the current history."""
    file, place = walk.file, commit.previous
    try:
        before, payload = read_record(file.reader, file.header, place, kind=Kind.COMMIT)
    except DamagedError:
        if all(d.offset not in {place, place + RECORD_SIZE} for d in walk.damages):
            raise  # nothing is damaged there: it is this COMMIT that points astray
        walk.found("broken history: the previous COMMIT is damaged", place, place)
        return
    if commit_digest(before.pack(file.header.salt, place), payload) != commit.previous_digest:
        walk.found("broken history: the previous COMMIT is not the one meant", place, offset)


def _check_base(walk: _Walk, commit: Commit, offset: int) -> None:
    file, forked = walk.file, bool(walk.file.header.required & FORKED)
    if bool(commit.base) != forked or (commit.number == 1 and forked != (commit.operation == Operation.FORK)):
        walk.found("a COMMIT of a fork in a file that is none, or another one in a fork", offset, offset)
    elif forked and file.base is not None:
        _, payload = read_record(file.reader, file.header, commit.base, kind=Kind.BASE)
        base = parse_base(payload, file.path, commit.base + RECORD_SIZE)
        if base.origin != file.base.origin:
            walk.found("this BASE has another origin than that of the last commit", commit.base, offset)


def _records(walk: _Walk) -> Iterator[tuple[int, RecordHeader]]:
    """Scan, and where a header is damaged go on at the next record that the live list knows."""
    file = walk.file
    stop, offset = file.end.footer.file_length, HEADER_SIZE
    known = sorted(walk.live)
    while offset < stop:
        try:
            for place, record in scan(file.reader, file.header, stop, start=offset):
                offset = record_end(place, record) + (FOOTER_SIZE if record.kind == Kind.COMMIT else 0)
                yield place, record
        except VersionError:
            raise
        except (DamagedError, FormatError) as error:
            later = [place for place in known if place > offset]
            walk.found(
                error.message, offset, offset if offset in walk.live else -1, tokens=walk.live_tokens.get(offset)
            )
            if not later:
                return
            offset = later[0]


def verify_file(file: NativeFile, progress: Progress | None = None) -> VerifyReport:
    """Check every record, part and padding byte of an open file. Damage is reported, not raised."""
    walk, others = _Walk(file, progress), []
    try:
        others = _live_records(file, walk)
    except VersionError:
        raise
    except (DamagedError, FormatError, MissingError) as error:
        walk.failed(error, tokens=(0, file.commit.n_tokens))
    stop = file.end.footer.file_length
    for offset, record in _records(walk):
        walk.n_records += 1
        _guarded(walk, offset)
        if progress is not None:
            progress(record_end(offset, record), stop)
    _check_parents(walk, others)
    try:
        for _ in file.spans():
            pass
        snapshot_of(file)
    except VersionError:
        raise
    except (DamagedError, FormatError, MissingError) as error:
        if all(not d.live for d in walk.damages):
            walk.failed(error)
    info = None if file.vault is None else file.vault.info
    notes = list(file.end.notes)
    walk.damages += [Damage(note, file.end.footer.file_length, live=True) for note in notes]
    if file.end.dropped:
        notes.append(f"{file.end.dropped} bytes behind the last published commit are not part of the history")
    return VerifyReport(
        path=file.path, format="native", n_bytes=file.reader.size, n_records=walk.n_records, n_parts=walk.n_parts,
        n_commits=walk.n_commits, n_tokens=file.commit.n_tokens, damages=tuple(walk.damages), notes=tuple(notes),
        dropped=file.end.dropped, encryption="" if info is None else info.cipher,
    )  # fmt: skip

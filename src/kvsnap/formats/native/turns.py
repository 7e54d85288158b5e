"""What one turn adds to a session, and whether a snapshot continues it. Spec sections 7, 10 and 11."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from kvsnap import codecs
from kvsnap.errors import CompatibilityError, DamagedError, FormatError, InputError
from kvsnap.formats.native import schema
from kvsnap.formats.native.journal import Published
from kvsnap.formats.native.live import cut_live
from kvsnap.formats.native.read import NativeFile
from kvsnap.formats.native.said import Piece
from kvsnap.formats.native.tables import (
    Commit,
    Entry,
    Operation,
    Part,
    Table,
    canonical_json,
    history_digest,
    parse_commit,
)
from kvsnap.formats.native.write import RecordWriter, span_table, state_tensors
from kvsnap.identity import Identity, compare
from kvsnap.layout import Snapshot
from kvsnap.protocols import Progress
from kvsnap.records import RECORD_SIZE, FileHeader, Kind, ReadAt, commit_digest, read_record
from kvsnap.tensors import INPUT_NAMES, OF_NO_LAYER, TensorSpec

__all__ = [
    "Turn",
    "check_continues",
    "check_static",
    "codes_before",
    "merged_geometry",
    "merged_identity",
    "requantised",
    "walk",
    "write_turn",
]


@dataclass(frozen=True, slots=True)
class Turn:
    """One commit of a session: what it did, whether the turn was complete, and the counts after it."""

    commit: int
    operation: str
    complete: bool
    n_tokens: int
    n_rows: int
    time_ns: int
    offset: int

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def write_turn(
    now: Published,
    writer: RecordWriter,
    snapshot: Snapshot,
    piece: Piece,
    geometry: schema.Geometry,
    identified: Identity,
    codec: str,
    progress: Progress | None,
) -> tuple[Commit, Entry, list[Part]]:
    """Write the records of one turn; return its commit, its entry in the live list, and its parts."""
    start, tokens = now.commit.n_rows, now.commit.n_tokens
    identity, layout, note = now.commit.identity, now.commit.layout, now.commit.note
    if identified != now.identity or not (identity or now.base):
        identity = writer.plain(Kind.IDENTITY, canonical_json(identified.to_dict()))
    if geometry != now.geometry or not (layout or now.base):
        layout = writer.plain(Kind.LAYOUT, schema.pack_layout(geometry))
    table = span_table(snapshot, row_start=start, token_start=tokens, piece=piece)
    rows = [
        t.rows(max(t.start, start // t.spec.tokens_per_row), t.start + t.n_rows)
        for t in snapshot.tensors()
        if t.spec.grows
    ]
    if now.is_empty:
        rows += [t for t in snapshot.tensors() if t.spec.growth == "static"]
    span, check, parts = writer.parts(Kind.SPAN, table, rows, codec, progress)
    state_table = Table(row_start=snapshot.n_rows, meta=schema.pack_state(snapshot))
    state, _, state_parts = writer.parts(Kind.STATE, state_table, state_tensors(snapshot), "exact")
    if snapshot.metadata:
        note = writer.plain(Kind.NOTE, schema.pack_note(snapshot.metadata))
    digest = history_digest(now.commit.digest, table.tokens, table.n_rows)
    entry = Entry(span, len(table.tokens), start, table.n_rows, state, check, digest)
    commit = Commit(
        number=writer.number, operation=Operation.APPEND, n_tokens=len(snapshot.tokens), n_rows=snapshot.n_rows,
        n_pending=snapshot.n_pending, token_offset=snapshot.token_offset, identity=identity, layout=layout,
        state=state, note=note, base=now.commit.base,
    )  # fmt: skip
    return commit, entry, [*parts, *state_parts]


def check_continues(now: Published, snapshot: Snapshot, tokens: tuple[int, ...], path: str) -> None:
    """Refuse a snapshot that does not go on from the published history, which has these ids."""
    commit = now.commit
    if snapshot.row_start > commit.n_rows:
        raise InputError(
            "rows are missing between the session and the capture", path=path,
            expected=f"rows from {commit.n_rows} or before", found=snapshot.row_start,
        )  # fmt: skip
    if len(snapshot.tokens) < commit.n_tokens or snapshot.n_rows < commit.n_rows:
        raise InputError(
            "the snapshot is behind the session: truncate the session first", path=path,
            expected=f"{commit.n_tokens} tokens, {commit.n_rows} rows, or more",
            found=f"{len(snapshot.tokens)} tokens, {snapshot.n_rows} rows",
        )  # fmt: skip
    unstored = commit.n_rows + commit.n_pending - commit.n_tokens
    found = snapshot.n_rows + snapshot.n_pending - len(snapshot.tokens)
    if commit.n_rows and found != unstored:
        raise InputError(
            "the snapshot and the session count evaluated positions differently", path=path,
            expected=f"{unstored} positions without stored ids", found=found,
        )  # fmt: skip
    if commit.n_tokens and snapshot.tokens[: commit.n_tokens] != tokens:
        pairs = zip(tokens, snapshot.tokens, strict=False)
        first = next(i for i, (a, b) in enumerate(pairs) if a != b)
        raise InputError(
            f"the snapshot does not continue the session: token {first} differs", path=path,
            expected=tokens[first], found=snapshot.tokens[first],
        )  # fmt: skip
    report = compare(now.identity, snapshot.identity)
    differing = [f for f in report.fields if f.verdict == "differ" and f.level == "fatal"]
    if differing:
        text = "; ".join(str(f) for f in differing[:4])
        raise CompatibilityError(f"the snapshot is of another model: {text}", path=path, report=report)


def check_static(now: Published, snapshot: Snapshot, opened: Callable[[], NativeFile]) -> None:
    """Refuse a snapshot with other static tensors than the session, which keeps those of its first turn.

    Compared are lengths, and the checksum where the bytes are stored as they are. `opened` opens the session file,
    which is closed here. Raise `InputError`.
    """
    statics = [t for t in snapshot.tensors() if t.spec.growth == "static"]
    if now.is_empty or not statics:
        return
    with closing(opened()) as file:
        where, entry = file.live[0]
        table, _, _ = where.table_at(entry.span, Kind.SPAN)
    parts = {part.tensor: part for part in table.parts}
    for tensor in statics:
        part = parts.get(tensor.spec.id)
        if tensor.name in INPUT_NAMES and (not tensor.n_rows or part is None or not part.n_rows):
            continue  # one of them does not know what it was made of
        same = part is not None and part.n_rows == tensor.n_rows
        if same and part is not None and part.codec == codecs.EXACT.id:
            values = np.ascontiguousarray(tensor.values()).reshape(-1).view(np.uint8)
            same = xxhash.xxh3_64_intdigest(values.data) == part.checksum
        if not same:
            what = "input of the encoder" if snapshot.encoder_input else tensor.name
            raise InputError(
                f"the snapshot has another {what} than the session, which keeps that of its first turn",
                path=file.path, expected="a session of its own",
            )  # fmt: skip


def merged_geometry(now: Published, snapshot: Snapshot, path: str) -> schema.Geometry:
    """Return the geometry of the session with this snapshot; refuse one that is shaped otherwise."""
    new, old = schema.geometry_of(snapshot), now.geometry
    if now.is_empty:
        return new
    if old.shard != new.shard:
        raise CompatibilityError(
            "the turns of a session are all of one shard", path=path,
            expected=old.shard or "a whole snapshot", found=new.shard or "a whole snapshot",
        )  # fmt: skip
    known = {spec.id: spec for spec in old.tensors}
    difference = schema.same_tensors(
        [s for s in old.tensors if s.role not in OF_NO_LAYER], [s for s in new.tensors if s.role not in OF_NO_LAYER]
    )
    quantised = [
        (index, a.quantisation or "none", b.quantisation or "none")
        for index, (a, b) in enumerate(zip(old.layers, new.layers, strict=False))
        if a.quantisation != b.quantisation
    ]
    if quantised:
        index, expected, found = quantised[0]
        raise CompatibilityError(
            f"layer {index} of the snapshot is quantised otherwise", path=path, expected=expected, found=found
        )
    if difference or old.layers != new.layers:
        raise CompatibilityError(
            f"the cache of the snapshot is shaped otherwise: {difference or 'other layers'}", path=path
        )
    return replace(old, tensors=tuple({**known, **{s.id: s for s in new.tensors}}.values()))


def merged_identity(now: Published, snapshot: Snapshot) -> Identity:
    """Return the identity of the session with this snapshot, which `check_continues` let pass.

    What one turn does not know, nobody knows of the whole: else a turn of unknown weights between two models would join
    them under the name of the last.
    """
    old, new = now.identity, snapshot.identity
    if now.is_empty:
        return new
    return replace(
        new,
        architecture=new.architecture if old.architecture else "",
        config=new.config if old.config else (),
        weights=new.weights if old.weights else (),
        cache_dtype=new.cache_dtype if old.cache_dtype else "",
        quantisation=new.quantisation if old.quantisation else "",
        cache_quantisation=new.cache_quantisation if old.cache_quantisation else "",
        tokenizer=new.tokenizer if old.tokenizer else "",
        adapters=new.adapters if old.adapters is not None else None,
        engine=new.engine if old.engine else "",
    )


def codes_before(
    now: Published, snapshot: Snapshot, opened: Callable[[], NativeFile], after: int | None = None
) -> dict[int, int]:
    """Return the checksum of the codes of each quantised tensor behind `after` tokens (None: all), by tensor id.

    Empty where nothing is quantised, or where that STATE cannot be read: then nothing is said of it.
    """
    if not any(_remade(t.spec) for t in snapshot.tensors()) or now.is_empty:
        return {}
    specs = {spec.id: spec for spec in now.geometry.tensors}
    with closing(opened()) as file, suppress(DamagedError, FormatError):
        place, offset = file.state_place() if after is None else cut_live(file, after).state_place
        parts = place.table_at(offset, Kind.STATE)[0].parts if offset else ()
        return {p.tensor: p.checksum for p in parts if p.decoded and p.tensor in specs and _remade(specs[p.tensor])}
    return {}


def _remade(spec: TensorSpec) -> bool:
    return spec.role == "code" and spec.growth == "replaced"


def requantised(before: Mapping[int, int], parts: Iterable[Part], snapshot: Snapshot) -> tuple[str, ...]:
    """Return the names of the tensors whose codes are others than `before`, of those that had any."""
    names = {t.spec.id: t.name for t in snapshot.tensors()}
    return tuple(names[p.tensor] for p in parts if p.tensor in before and p.checksum != before[p.tensor])


def walk(commit: Commit, offset: int, header: FileHeader, reader: ReadAt) -> Iterator[tuple[Commit, int]]:
    """Yield a commit and every one before it, each with its offset, following and checking the chain."""
    while True:
        yield commit, offset
        if not commit.previous:
            return
        if commit.previous >= offset:
            raise FormatError("a COMMIT points forward", path=reader.path, offset=offset, found=commit.previous)
        offset = commit.previous
        record, payload = read_record(reader, header, offset, kind=Kind.COMMIT)
        if commit_digest(record.pack(header.salt, offset), payload) != commit.previous_digest:
            raise DamagedError("broken history: this COMMIT is not the one meant", path=reader.path, offset=offset)
        commit = parse_commit(payload, reader.path, offset + RECORD_SIZE)

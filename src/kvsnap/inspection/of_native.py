"""What is in a `.kvsnap` file, from its index and tables alone."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap import codecs
from kvsnap.errors import DamagedError, FormatError, KeyNeededError, KvsnapError
from kvsnap.files import status
from kvsnap.formats.native import NativeFile
from kvsnap.formats.native.assemble import bound_of
from kvsnap.formats.native.base import parent_path
from kvsnap.formats.native.read import Span
from kvsnap.formats.native.said import Said, unpack_messages
from kvsnap.formats.native.schema import Geometry
from kvsnap.formats.native.tables import Part
from kvsnap.formats.native.told import piece_of, state_parts
from kvsnap.formats.native.vault import read_clear
from kvsnap.identity import Identity
from kvsnap.inspection.described import Fork, PartSize, Stored, Summary
from kvsnap.inspection.excerpt import excerpts
from kvsnap.inspection.geometry import Shape, groups_of, layer_summaries
from kvsnap.inspection.turns import turn_counts
from kvsnap.layout import Run, cut_runs, join_runs
from kvsnap.tensors import TensorSpec

__all__ = ["closed_summary", "native_summary", "summarise_native"]


@dataclass(slots=True)
class _Sums:
    """Sizes of parts by (tensor, codec): parts, bytes stored, bytes decoded, largest bound."""

    specs: Mapping[int, TensorSpec]
    found: dict[tuple[int, int], tuple[int, int, int, float]] = field(default_factory=dict)

    def add(self, part: Part, decoded: int, times: int = 1) -> None:
        parts, stored, before, bound = self.found.get((part.tensor, part.codec), (0, 0, 0, 0.0))
        self.found[part.tensor, part.codec] = (
            parts + times, stored + times * part.stored, before + times * decoded, max(bound, part.bound)
        )  # fmt: skip

    def decode(self, tensor: int, codec: int, decoded: int) -> None:
        """Say what parts that were added hold, decoded, in all."""
        if (tensor, codec) in self.found:
            parts, stored, _, bound = self.found[tensor, codec]
            self.found[tensor, codec] = parts, stored, decoded, bound

    def spec(self, tensor: int) -> TensorSpec:
        if tensor not in self.specs:
            raise FormatError("a part names a tensor that LAYOUT does not have", found=tensor)
        return self.specs[tensor]

    def sizes(self) -> tuple[PartSize, ...]:
        """Return the sums by layer, role and codec, in that order."""
        sums: dict[tuple[int, str, str], list[Any]] = {}
        for (tensor, codec), (parts, stored, decoded, bound) in self.found.items():
            spec = self.spec(tensor)
            row = sums.setdefault((spec.layer, spec.role, codecs.codec_of_id(codec).name), [0, 0, 0, 0, 0.0])
            row[:] = [row[0] + 1, row[1] + parts, row[2] + stored, row[3] + decoded, max(row[4], bound)]
        return tuple(PartSize(*key, *row) for key, row in sorted(sums.items(), key=lambda item: item[0][0] % 2**32))

    def by_codec(self) -> dict[str, Stored]:
        table: dict[str, Stored] = {}
        for (_, codec), (parts, stored, decoded, bound) in self.found.items():
            name = codecs.codec_of_id(codec).name
            old = table.get(name, Stored(0, 0, 0, 0.0))
            table[name] = Stored(
                old.parts + parts, old.stored + stored, old.decoded + decoded, max(old.bound, bound)
            )  # fmt: skip
        return table

    def states(self) -> Counter[int]:
        """Return, by layer, the decoded bytes of what does not grow."""
        found: Counter[int] = Counter()
        for (tensor, _), (_, _, decoded, _) in self.found.items():
            if not self.spec(tensor).grows:
                found[self.spec(tensor).layer] += decoded
        return found


class _Windows:
    """The decoded bytes that windows hold, from the spans in their order.

    Rows before a gap are stored, so that a rewind reaches them, and are no rows of the tensor. `gaps` tells whether
    there are any.
    """

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        self._specs = sorted((spec for spec in specs if spec.growth == "window"), key=lambda spec: spec.id)
        self.ids = np.array([spec.id for spec in self._specs], np.int64)
        self._per_row = np.array([spec.tokens_per_row for spec in self._specs], np.int64)
        self._ends = np.zeros(len(self.ids), np.int64)
        self._rows: dict[int, npt.NDArray[np.int64]] = {}  # by codec, of each tensor
        self.gaps = False

    def add(self, span: Span) -> None:
        """Take in a span."""
        tensors, codec_ids, starts, n_rows = span.table.part_ranges
        wanted = np.isin(tensors, self.ids)
        starts, n_rows, codec_ids = starts[wanted], n_rows[wanted], codec_ids[wanted]
        places = np.searchsorted(self.ids, tensors[wanted])
        stop = (span.entry.row_start + span.entry.n_rows) // self._per_row[places]
        kept = np.clip(stop - starts, 0, n_rows)
        gone = places[starts != self._ends[places]]
        for rows in self._rows.values():
            self.gaps |= bool(rows[gone].any())
            rows[gone] = 0
        for codec in np.unique(codec_ids).tolist():
            rows = self._rows.setdefault(codec, np.zeros(len(self.ids), np.int64))
            rows[places] += np.where(codec_ids == codec, kept, 0)
        self._ends[places] = starts + kept

    def count(self, sums: _Sums, n_rows: int) -> None:
        """Let these bytes count as decoded, after `n_rows` rows in all."""
        whole = self._ends == n_rows // self._per_row  # else nothing is held behind a gap at the end
        for codec, rows in self._rows.items():
            self.gaps |= bool(rows[~whole].any())
            for spec, held in zip(self._specs, np.where(whole, rows, 0).tolist(), strict=True):
                sums.decode(spec.id, codec, spec.nbytes(held) if held else 0)


def native_summary(file: NativeFile, *, partial: bool = False) -> Summary:
    """Summarise an open file; no tensor byte is read.

    With `partial` an error behind the last COMMIT is told in `error`, and what is known is returned.
    """
    try:
        return _whole(file)
    except KvsnapError as error:
        if not partial:
            raise
        return _told_of(_outline(file), error)


def closed_summary(path: str | os.PathLike[str], error: KeyNeededError) -> Summary:
    """Return what an encrypted file says in clear. Raise as opening a file does."""
    clear, found = read_clear(path), status(path)
    return Summary(
        path=os.fspath(path), format="native", version=clear.version, use="snapshot", file_id=clear.file_id,
        created_ns=clear.created_ns, commit=0, complete=False, sealed=True, architecture="", num_layers=0, num_heads=0,
        num_query_heads=0, head_dim=0, dtype="", n_tokens=0, n_prompt=0, n_generated=0, n_pending=0, n_rows=0,
        token_offset=0, n_spans=0, has_logits=False, has_text=False, n_messages=None, sampler=None,
        file_bytes=clear.nbytes, tensor_bytes=0, stored={}, exact=False, bound=0.0, layers=(), identity=Identity(),
        encryption=clear.cipher, key_label=clear.label, modified_ns=found.st_mtime_ns, error=_error(error),
    )  # fmt: skip


def _outline(file: NativeFile) -> Summary:
    """Return what the header and the last COMMIT say, and the fork if that can be read."""
    commit, header, path = file.commit, file.header, file.path
    size, modified = file.reader.size, 0
    if path is not None:
        with suppress(OSError):
            modified = os.stat(path).st_mtime_ns
    made = Summary(
        path=path, format="native", version=f"{header.major}.{header.minor}",
        use=file.use, file_id=header.file_id.hex(),
        created_ns=header.created_ns, commit=commit.number, complete=commit.complete, sealed=file.sealed,
        architecture="", num_layers=0, num_heads=0, num_query_heads=0, head_dim=0, dtype="",
        n_tokens=commit.n_tokens, n_prompt=0, n_generated=0, n_pending=commit.n_pending, n_rows=commit.n_rows,
        token_offset=commit.token_offset, n_spans=0, has_logits=False, has_text=False, n_messages=None, sampler=None,
        file_bytes=size, tensor_bytes=0, stored={}, exact=False, bound=0.0, layers=(), identity=Identity(),
        encryption="" if file.vault is None else file.vault.info.cipher,
        key_label="" if file.vault is None else file.vault.info.label, dropped=file.end.dropped,
        notes=file.end.notes, committed_ns=commit.time_ns, modified_ns=modified, damage=_damage(file),
    )  # fmt: skip
    with suppress(KvsnapError):
        made = replace(made, fork=_fork(file))
    for name in ("geometry", "identity", "metadata"):
        with suppress(KvsnapError):
            made = replace(made, **_facts(name, getattr(file, name)))
    return made


def _facts(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Geometry):
        return {name: value}
    layers = layer_summaries(_shapes(value), (), Counter())
    first = next((layer for layer in layers if layer.head_dim), None)
    return {
        "architecture": value.architecture, "layers": layers, "groups": groups_of(layers), "num_layers": len(layers),
        "num_heads": first.num_heads if first else 0, "num_query_heads": first.num_query_heads if first else 0,
        "head_dim": first.head_dim if first else 0, "dtype": first.dtype if first else "", "shard": value.shard,
    }  # fmt: skip


def _told_of(made: Summary, error: KvsnapError) -> Summary:
    return replace(made, error=_error(error), damage=(*made.damage, str(error)))


def _error(error: KvsnapError) -> dict[str, Any]:
    return {**error.to_dict(), "exit_code": error.exit_code}


def _damage(file: NativeFile) -> tuple[str, ...]:
    """Return what is wrong with the end of a file, as opening it showed."""
    if not file.end.dropped:
        return file.end.notes
    return (*file.end.notes, f"{file.end.dropped} bytes behind the last published turn are not part of the history")


def _shapes(geometry: Geometry) -> list[Shape]:
    specs = {spec.id: spec for spec in geometry.tensors}
    return [
        Shape(i, x.kind, x.num_query_heads, x.shares, x.quantisation, tuple(specs[t] for t in x.tensors))
        for i, x in enumerate(geometry.layers)
    ]


def _fork(file: NativeFile) -> Fork | None:
    base = file.base
    if base is None:
        return None
    reason, above = "", 0
    try:
        where = file.parent
        while where is not None:
            above += where.reader.size
            where = where.parent
    except KvsnapError as error:
        reason, above = error.message, 0
    place = "" if file.path is None else parent_path(file.path, base)
    return Fork(
        parent=base.parent.hex(), path=place, found=not reason, reason=reason, commit=base.commit,
        n_tokens=base.n_tokens, n_rows=base.n_rows, own_tokens=file.commit.n_tokens - base.n_tokens, depth=base.depth,
        above_bytes=above,
    )  # fmt: skip


def _whole(file: NativeFile) -> Summary:
    runs: tuple[Run, ...] = ()
    said = Said()
    geometry = file.geometry
    sums, windows = _Sums({spec.id: spec for spec in geometry.tensors}), _Windows(geometry.tensors)
    alike: dict[tuple[bytes, int], list[Any]] = {}
    for span in file.spans():
        entry, table = span.entry, span.table
        runs = join_runs(runs, cut_runs(table.runs, entry.n_tokens))
        said = said.add(piece_of(span))
        if len(windows.ids):
            windows.add(span)
        if entry.n_rows < table.n_rows:  # a cut in this span: its parts are there whole, fewer rows of them count
            for part in table.parts:
                sums.add(part, _kept_bytes(sums.spec(part.tensor), part, entry.row_start + entry.n_rows))
        else:
            same = alike.setdefault((table.signature, table.length_of_table), [table, 0])
            same[1] += 1
    for table, times in alike.values():  # spans of one signature differ in row numbers and checksums alone
        for part in table.parts:
            sums.add(part, part.decoded, times)
    windows.count(sums, file.commit.n_rows)
    replaced, sampler = file.state()
    for part in state_parts(file):
        sums.add(part, part.decoded)
    parts, stored = sums.sizes(), sums.by_codec()
    layers = layer_summaries(_shapes(geometry), parts, sums.states())
    generated = sum(r.count for r in runs if r.kind == "generated")
    bound = max((s.bound for s in stored.values()), default=0.0)
    if bound and windows.gaps:  # what is off may all be before them; the tables are read once more
        bound = bound_of(file, file.spans())
    begins, ends = excerpts(said.text, unpack_messages(said.messages))
    made = replace(
        _outline(file), layers=layers, groups=groups_of(layers), parts=parts, stored=stored, bound=bound,
        exact=bound == 0, tensor_bytes=sum(p.decoded for p in parts), n_spans=len(file.live),
        n_prompt=file.commit.n_tokens - generated, n_generated=generated, sampler=sampler, shard=file.shard(),
        has_logits=any(t.role == "logits" for t in replaced.values()),
        draft_bytes=sum(t.nbytes for t in replaced.values() if t.role == "draft"),
        has_text=bool(file.live) and said.text is not None, n_messages=len(said.messages) if said.known else None,
        begins=begins, ends=ends, identity=file.identity, metadata=file.metadata,
    )  # fmt: skip
    try:
        return replace(made, turns=turn_counts(file))
    except (DamagedError, FormatError) as error:  # what is live can be read all the same
        return replace(made, damage=(*made.damage, f"the turns cannot be counted: {error.message}"))


def _kept_bytes(spec: TensorSpec, part: Part, stop: int) -> int:
    """Return the decoded bytes of a part of which the rows of the sequence before `stop` count."""
    if not spec.grows:
        return part.decoded
    return spec.nbytes(min(part.n_rows, max(0, stop // spec.tokens_per_row - part.row_start)))


def summarise_native(path: str | os.PathLike[str], key: bytes | None, *, partial: bool) -> Summary:
    """Open a `.kvsnap` file and summarise it."""
    try:
        opened = NativeFile.open(path, mapped=False, key=key)
    except KeyNeededError as error:
        if not partial:
            raise
        return closed_summary(path, error)
    with closing(opened) as file:
        return native_summary(file, partial=partial)

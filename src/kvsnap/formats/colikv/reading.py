"""Records of a `.coli_kv` file as a snapshot. docs/formats/colikv.md sections 3 to 6."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.errors import CompatibilityError, InputError
from kvsnap.formats.colikv.geometry import UNASSIGNED, Geometry, check_index_layers
from kvsnap.formats.colikv.header import Header
from kvsnap.formats.colikv.records import (
    ByteSource,
    Column,
    LazyRows,
    Records,
    Unchanged,
    columns_of,
    read_bounds,
    read_columns,
    read_tokens,
)
from kvsnap.formats.colikv.rows import Encoding, decode, encode, fp8_bound
from kvsnap.identity import Identity
from kvsnap.layout import Layer, PositionRun, Run, Snapshot, Tensor, TensorSpec
from kvsnap.tensors import Source

__all__ = [
    "Stacked", "assign_index_layers", "assign_like", "foreign_rows", "has_loose_rows", "notes_of", "outline_of",
    "requantised", "snapshot_of", "with_index_layers",
]  # fmt: skip

_SAMPLE = 1024


def with_index_layers(header: Header, layers: Sequence[int] | None, path: str | None = None) -> Header:
    """Return the header knowing which layers own index rows; `CompatibilityError` unless it counts as many."""
    if layers is None:
        return header
    chosen = check_index_layers(layers, header.geometry.n_layers)
    if len(chosen) != header.geometry.index_count:
        raise CompatibilityError(
            "the file has index rows of another number of layers", path=path, offset=24,
            expected=f"{len(chosen)}, as index_layers says", found=header.geometry.index_count,
        )  # fmt: skip
    return replace(header, geometry=replace(header.geometry, index_layers=chosen))


def foreign_rows(source: ByteSource, header: Header, tokens: npt.NDArray[np.int32]) -> str | None:
    """Tell why the counted rows can't be of the model in the header, or None.

    Rows of another size shift the records, so that bytes of a row stand where a token id is expected. Also looked at
    are the first bytes behind the last record when nothing but counted records is before them.
    """
    vocab = header.geometry.vocab
    if vocab < 1:
        leftover = header.n_leftover
        return f"{leftover} bytes follow the last whole record" if leftover and len(tokens) else None
    outside = np.flatnonzero((tokens < 0) | (tokens >= vocab))
    if len(outside):
        at = int(outside[0])
        return f"record {at} has the token id {int(tokens[at])}, the vocabulary has {vocab}"
    return _foreign_tail(source, header, len(tokens))


def foreign_sample(source: ByteSource, header: Header, n_records: int) -> str | None:
    """As `foreign_rows`, from the ids of at most 1024 records, the first and the last among them."""
    chosen = np.unique(np.linspace(0, max(0, n_records - 1), min(n_records, _SAMPLE), dtype=np.int64))
    vocab = header.geometry.vocab
    if vocab < 1:
        leftover = header.n_leftover
        return f"{leftover} bytes follow the last whole record" if leftover and n_records else None
    word = bytearray(4)
    for record in chosen.tolist():
        source.read_into(header.offset(record), word)
        token = int.from_bytes(word, "little", signed=True)
        if not 0 <= token < vocab:
            return f"record {record} has the token id {token}, the vocabulary has {vocab}"
    return _foreign_tail(source, header, n_records)


def _foreign_tail(source: ByteSource, header: Header, n_records: int) -> str | None:
    """Look at the first bytes behind the last record when nothing but counted records is before them."""
    if n_records and header.n_physical == n_records and header.n_leftover >= 4:
        word = bytearray(4)
        source.read_into(header.offset(n_records), word)
        token = int.from_bytes(word, "little", signed=True)
        if not 0 <= token < header.geometry.vocab:
            return f"{header.n_leftover} bytes that begin with no token id follow the last record"
    return None


def damage_of(header: Header, foreign: str | None) -> tuple[str, ...]:
    """Say in sentences what is wrong with a file: rows of another model, records that are not there, a torn tail."""
    found = []
    if foreign is not None:
        found.append(
            f"the rows do not fit the count: {foreign}. They were probably written by another model under this header, "
            "and are not to be trusted"
        )
    if header.count > header.n_physical:
        found.append(f"the header counts {header.count} records, the file holds {header.n_physical} whole ones")
    if header.n_leftover:
        found.append(f"{header.n_leftover} bytes behind the last whole record are not read")
    return tuple(found)


def notes_of(header: Header, foreign: str | None, *, has_draft: bool = False) -> tuple[str, ...]:
    """Say in sentences what a reader should know about this file, what is wrong with it among that."""
    damage = damage_of(header, foreign)
    notes = list(damage[: foreign is not None])
    if header.dialect == "watermark":
        notes.append(
            f"COLIKV2 with a turn count: read as float32, and only {header.word} of {header.count} records, up to the "
            "end of the last complete turn, are used"
        )
    elif header.dialect == "syntara":
        notes.append(f"SYNTARAK file: read as {header.encoding}, as word 36 says")
    notes += damage[foreign is not None :]
    if header.count < 0:
        notes.append(f"the record count is {header.count}: nothing is counted")
    if header.is_lossy_width:
        notes.append(f"{header.encoding} cannot hold rows of these widths: they are zeros")
    if header.geometry.index_owners is None:
        notes.append(
            f"which {header.geometry.index_count} of {header.geometry.n_layers} layers own the index rows is not in "
            f"the file: they are kept apart as {UNASSIGNED}; give index_layers"
        )
    if has_draft:
        notes.append("rows of the draft (MTP) layer are never stored: that layer starts empty")
    return tuple(notes)


def _facts(header: Header, notes: tuple[str, ...]) -> dict[str, Any]:
    g = header.geometry
    facts: dict[str, Any] = {
        "format": "colikv",
        "magic": header.magic.rstrip(b"\0").decode("ascii"),
        "version": header.encoding.version if header.dialect != "watermark" else 2,
        "dialect": header.dialect,
        "codec": header.encoding.name,
        "bits": header.encoding.bits,
        "header": {
            "n_layers": g.n_layers, "kv_lora": g.kv_lora, "qk_rope": g.qk_rope, "index_width": g.index_width,
            "index_layer_count": g.index_count, "vocab": g.vocab, "record_count": header.count,
            "format_tag": header.word,
        },
        "record_size": header.record_size,
        "physical_records": header.n_physical,
        "leftover_bytes": header.n_leftover,
        "usable_records": header.n_usable,
        "draft_rows": "empty",
        "notes": list(notes),
    }  # fmt: skip
    if header.dialect == "watermark":
        facts["complete_turn_records"] = header.word
    return facts


def _identity(geometry: Geometry) -> Identity:
    """What the header tells of the model, under the names that its configuration uses."""
    config = {
        "num_hidden_layers": geometry.n_layers, "kv_lora_rank": geometry.kv_lora, "qk_rope_head_dim": geometry.qk_rope,
        "vocab_size": geometry.vocab,
    }  # fmt: skip
    if geometry.index_width:
        config["index_head_dim"] = geometry.index_width
    known = {name: str(value) for name, value in config.items() if value or name != "vocab_size"}
    return Identity(config=tuple(sorted(known.items())))


class Stacked:
    """Index rows of layers that are not known: one tensor `[row, index row, dim]` of all `rows`."""

    def __init__(self, columns: Sequence[Column], records: Records) -> None:
        self.rows = [LazyRows(column, records) for column in columns]

    @property
    def stored_as(self) -> tuple[str, int]:
        """The encoding of the rows, and the bytes that they take."""
        return self.rows[0].column.encoding.name, sum(rows.stored_as[1] for rows in self.rows)

    def array(self) -> npt.NDArray[np.float32]:
        return np.stack([rows.array() for rows in self.rows], axis=1)

    def read_into(self, out: npt.NDArray[np.float32]) -> None:
        np.copyto(out, self.array())


def _spec(number: int, name: str, layer: int, role: str, width: tuple[int, ...]) -> TensorSpec:
    axes = ("row", "dim") if len(width) == 1 else ("row", "index_row", "dim")
    return TensorSpec(
        id=number, name=name, layer=layer, role=role, dtype="float32", axes=axes, shape=(0, *width), row_axis=0,
        rope="none" if role == "latent" else "unknown",
    )  # fmt: skip


def snapshot_of(
    source: ByteSource,
    header: Header,
    *,
    n_records: int | None = None,
    unchanged: Unchanged | None = None,
    eager: bool = False,
    has_draft: bool = False,
) -> Snapshot:
    """Return the usable records as a snapshot; with `eager` all rows are read now, else when they are first used."""
    n = header.n_usable if n_records is None else n_records
    tokens = read_tokens(source, header, n)
    columns = columns_of(header)
    bounds = read_bounds(source, header, n, columns)
    records = Records(source, header, n, unchanged)
    values: dict[Column, npt.NDArray[np.float32] | Source] = {c: LazyRows(c, records) for c in columns}
    if eager:
        arrays = {c: np.empty((n, c.width), np.float32) for c in columns}
        read_columns(source, header, n, list(arrays.items()))
        values = dict(arrays)
    notes = notes_of(header, foreign_rows(source, header, tokens), has_draft=has_draft)
    made = _built(header, n, values, bounds, records, eager=eager)
    return replace(
        made, tokens=tuple(int(token) for token in tokens), runs=(Run("prompt", n),) if n else (),
        source=_facts(header, notes),
    )  # fmt: skip


def outline_of(source: ByteSource, header: Header) -> Snapshot:
    """Return what the header tells of the usable records, without their ids; no row is read.

    The ids of at most 1024 records are looked at, to tell whether the rows are those of another model.
    """
    n, columns = header.n_usable, columns_of(header)
    bounds = [0.0 if c.encoding.name == "float32" else float("inf") for c in columns]
    records = Records(source, header, n, None)
    foreign = foreign_sample(source, header, n)
    facts = {**_facts(header, notes_of(header, foreign)), "damage": damage_of(header, foreign)}
    made = _built(header, n, {c: LazyRows(c, records) for c in columns}, bounds, records, eager=False)
    return replace(made, source=facts)


def _built(
    header: Header, n: int, values: Mapping[Column, npt.NDArray[np.float32] | Source], bounds: Sequence[float],
    records: Records, *, eager: bool,
) -> Snapshot:  # fmt: skip
    """Return the tensors of `n` records as a snapshot without ids."""
    owners = header.geometry.index_owners
    placed: list[tuple[Column, float, int]] = []
    loose: list[Column] = []
    for column, bound in zip(values, bounds, strict=True):
        if column.role != "index":
            placed.append((column, bound, column.number))
        elif owners is None:
            loose.append(column)
        else:
            placed.append((column, bound, owners[column.number]))
    tensors: dict[int, list[Tensor]] = {layer: [] for layer in range(header.geometry.n_layers)}
    for number, (column, bound, layer) in enumerate(sorted(placed, key=lambda item: item[2])):
        spec = _spec(number, f"layers.{layer}.{column.role}", layer, column.role, (column.width,))
        tensors[layer].append(Tensor(spec, values[column], n_rows=n, bound=bound))
    if loose:
        spec = _spec(len(placed), UNASSIGNED, 0, "other", (len(loose), loose[0].width))
        stacked = Stacked(loose, records)
        tensors[0].append(Tensor(spec, stacked.array() if eager else stacked, n_rows=n))
    return Snapshot(
        layers=tuple(Layer(index=layer, kind="latent", tensors=tuple(own)) for layer, own in tensors.items()),
        n_rows=n,
        token_offset=n,
        positions=(PositionRun(0, n),) if n else (),
        identity=_identity(header.geometry),
    )


def assign_index_layers(snapshot: Snapshot, layers: Sequence[int]) -> Snapshot:
    """Give index rows that were kept apart to the layers that own them, in order.

    Raise `InputError` when the snapshot has none, `CompatibilityError` for another number of layers.
    """
    loose = next((t for t in snapshot.tensors() if t.name == UNASSIGNED), None)
    if loose is None:
        raise InputError("the snapshot has no index rows without a layer")
    chosen = check_index_layers(layers, snapshot.num_layers)
    if len(chosen) != loose.shape[1]:
        raise CompatibilityError("index rows of another number of layers", expected=loose.shape[1], found=len(chosen))
    given = {layer: loose.array[:, place] for place, layer in enumerate(chosen)}
    out, number = [], 0
    for layer in snapshot.layers:
        kept = [t for t in layer.tensors if t is not loose]
        own = []
        for tensor in kept:
            own.append(_renumbered(tensor, number))
            number += 1
        if layer.index in given:
            spec = _spec(number, f"layers.{layer.index}.index", layer.index, "index", (loose.shape[2],))
            own.append(Tensor(spec, given[layer.index]))
            number += 1
        out.append(replace(layer, tensors=tuple(own)))
    return replace(snapshot, layers=tuple(out))


def has_loose_rows(snapshot: Snapshot) -> bool:
    """Tell whether index rows were kept apart because the file does not say which layers own them."""
    return any(t.name == UNASSIGNED and t.role == "other" for t in snapshot.tensors())


def assign_like(snapshot: Snapshot, like: Snapshot) -> Snapshot:
    """Give index rows that were kept apart to the layers that own some in `like`, as `engine.capture()` tells it.

    A snapshot without such rows is returned as it is. Raise `CompatibilityError` for another number of layers.
    """
    if not has_loose_rows(snapshot):
        return snapshot
    if like.num_layers != snapshot.num_layers:
        raise CompatibilityError("another number of layers", expected=like.num_layers, found=snapshot.num_layers)
    return assign_index_layers(snapshot, [layer.index for layer in like.layers if layer.tensor("index") is not None])


def _renumbered(tensor: Tensor, number: int) -> Tensor:
    spec = replace(tensor.spec, id=number)
    values = tensor.array if tensor.batch is None else tensor.source
    return Tensor(spec, values, start=tensor.start, n_rows=tensor.n_rows, bound=tensor.bound)


def requantised(snapshot: Snapshot, encoding: Encoding) -> Snapshot:
    """Return the snapshot with latent and rope rows as they are after being stored in another encoding."""
    layers = []
    for layer in snapshot.layers:
        own = []
        for tensor in layer.tensors:
            if tensor.role in {"latent", "rope"}:
                codes, numbers = encode(encoding, tensor.array)
                values = decode(encoding, codes, numbers, tensor.shape[1])
                bound = fp8_bound(codes, numbers) if encoding.name == "fp8" else float("inf")
                own.append(Tensor(tensor.spec, values, start=tensor.start, bound=bound))
            else:
                own.append(tensor)
        layers.append(replace(layer, tensors=tuple(own)))
    return replace(snapshot, layers=tuple(layers))

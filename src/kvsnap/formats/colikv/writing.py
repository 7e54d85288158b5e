"""A snapshot as records of a `.coli_kv` file: what fits, what is lost, and writing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvsnap.errors import InputError, UnsupportedError
from kvsnap.formats.colikv.geometry import Geometry, found_in, vocabulary_of
from kvsnap.formats.colikv.header import new_header
from kvsnap.formats.colikv.reading import Stacked
from kvsnap.formats.colikv.records import Column, LazyRows, Records, Rows, columns_of, pack_records, step_of
from kvsnap.formats.colikv.rows import Encoding
from kvsnap.layout import Snapshot, Tensor
from kvsnap.protocols import Loss, Progress, Sink
from kvsnap.tensors import numpy_dtype, read_all

__all__ = [
    "Content",
    "check_ids",
    "content_of",
    "float_rows",
    "losses_of",
    "stored_records",
    "values_of",
    "write_snapshot",
]

# Decoded bytes of the tensors that are in memory at once while a file is written.
_GROUP = 64 << 20


@dataclass(frozen=True, slots=True)
class Content:
    """What a snapshot has for a `.coli_kv` file: the geometry, ids, and one tensor per row of a record.

    `tensors` are in the order of the columns; None stands for rope rows of width 0. A tensor with an index (place among
    the unassigned index rows) is sliced.
    """

    geometry: Geometry
    tokens: npt.NDArray[np.int32]
    tensors: tuple[tuple[Tensor | None, int | None], ...]
    left_out: tuple[Tensor, ...]
    as_latent: tuple[int, ...]


def content_of(snapshot: Snapshot, vocab: int | None = None, *, for_writing: bool = True) -> Content:
    """Sort a snapshot into the columns of a record.

    Raise `UnsupportedError` naming the layer that does not fit (no latent rows, or of another width than the first),
    `InputError` when the vocabulary size is not known. Reads no tensor bytes.
    """
    found = found_in(snapshot)
    n = snapshot.n_rows
    if len(snapshot.tokens) - snapshot.n_pending != n:
        raise UnsupportedError(
            "each record holds a token id: the ids of some rows are not stored in this snapshot",
            expected=f"{n} ids of evaluated tokens", found=len(snapshot.tokens) - snapshot.n_pending,
        )  # fmt: skip
    known = vocab if vocab is not None else vocabulary_of(snapshot)
    if known is None and for_writing:
        raise InputError("the vocabulary size of the model is not known, and the header needs it: give vocab")
    geometry = found.geometry(known or 0)
    ids = check_ids(snapshot.tokens[: len(snapshot.tokens) - snapshot.n_pending], known or 0)
    flat: list[tuple[Tensor | None, int | None]] = [(t, None) for pair in found.pairs for t in pair]
    used = {id(t) for t, _ in [*flat, *found.index] if t is not None}
    left_out = tuple(t for t in snapshot.tensors() if id(t) not in used)
    as_latent = tuple(layer.index for layer in snapshot.layers if layer.kind != "latent")
    return Content(geometry, ids, (*flat, *found.index), left_out, as_latent)


def check_ids(tokens: Sequence[int] | npt.NDArray[Any], vocab: int) -> npt.NDArray[np.int32]:
    """Return token ids as int32; raise `InputError` naming the first that is outside the vocabulary."""
    ids = np.asarray(tokens)
    if not ids.size:
        return np.zeros(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InputError("token ids are a flat list of integers", found=f"{ids.dtype}{list(ids.shape)}")
    limit = vocab or 1 << 31
    bad = np.flatnonzero((ids < 0) | (ids >= limit))
    if len(bad):
        at = int(bad[0])
        raise InputError(f"token {at} is outside the vocabulary", expected=f"0 to {limit - 1}", found=int(ids[at]))
    return ids.astype(np.int32)


def float_rows(values: Any, n_rows: int, width: int, what: str) -> Rows:
    """Return rows `[n_rows, width]` as float32, exactly; raise `InputError` naming `what` otherwise."""
    array = np.asarray(values)
    if array.dtype not in {np.dtype(t) for t in ("f4", "f2", ml_dtypes.bfloat16)}:
        raise InputError(f"{what}: rows of another type", expected="float32, float16 or bfloat16", found=array.dtype)
    if array.shape != (n_rows, width):
        raise InputError(f"{what}: rows of another shape", expected=[n_rows, width], found=list(array.shape))
    return array.astype(np.float32, copy=False)


def stored_records(snapshot: Snapshot) -> Records | None:
    """Return the records of the file that a snapshot was loaded from, if it is what they hold and nothing else.

    Then they can be copied as they are: encoding decoded rows once more may change them.
    """
    records: Records | None = None
    columns: set[Column] = set()
    for tensor in snapshot.tensors():
        given = tensor.source if hasattr(tensor, "source") else None
        if isinstance(given, Stacked) and not tensor.start:
            # Index rows of layers that are not known: in the order of the record, as `_index` writes them.
            records = records or given.rows[0].batch
            if any(rows.batch is not records for rows in given.rows):
                return None
            columns.update(rows.column for rows in given.rows)
            continue
        if not isinstance(given, LazyRows) or tensor.role != given.column.role or tensor.start:
            return None
        records = records or given.batch
        owners = records.header.geometry.index_owners
        place = given.column.number if given.column.role != "index" else owners[given.column.number] if owners else -1
        if given.batch is not records or place != tensor.spec.layer:
            return None
        columns.add(given.column)
    if records is None or records.n_records != snapshot.n_rows or columns != set(columns_of(records.header)):
        return None
    return records if records.header.dialect == "colibri" and not records.header.is_lossy_width else None


# -- what is lost -------------------------------------------------------------------------------------------


def losses_of(snapshot: Snapshot, encoding: Encoding, content: Content) -> tuple[Loss, ...]:
    """Tell what a file of this encoding leaves out or changes."""
    n, out = snapshot.n_rows, []
    i = snapshot.identity
    stated = {"num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim", "index_head_dim", "vocab_size"}
    more = {name for name, _ in i.config} - stated
    known = i.architecture or i.weights or i.cache_dtype or i.tokenizer or i.adapters or i.engine or more
    fields = (
        ("draft", snapshot.draft is not None, "the draft starts empty"),
        ("logits", snapshot.logits is not None, "the first token after a restore needs a forward pass"),
        ("sampler", snapshot.sampler is not None, "settings and random state are not stored"),
        ("identity", bool(known), "only six numbers of the model are stored"),
        ("architecture", bool(snapshot.architecture), "the name of the architecture is not stored"),
        ("text", snapshot.text is not None, "the text is not stored; the ids are"),
        ("messages", snapshot.messages is not None, "the messages of the chat are not stored"),
        ("metadata", bool(snapshot.metadata), "notes of the user are not stored"),
        ("shard", snapshot.shard is not None, f"that this is {snapshot.shard} is left out: it reads as a whole"),
        ("runs", any(r.kind == "generated" for r in snapshot.runs), "prompt and generated tokens are not told apart"),
        ("pending", snapshot.n_pending > 0, f"{snapshot.n_pending} tokens that are not evaluated yet have no record"),
        ("bound", snapshot.bound > 0, "that the rows are not exact is not recorded"),
    )
    out += [Loss("field", what, detail) for what, lost, detail in fields if lost]
    if [(r.start, r.count) for r in snapshot.positions] not in ([], [(0, n)]) or snapshot.token_offset not in {0, n}:
        out.append(Loss("rows", "positions", "positions are always 0, 1, 2 and so on"))
    owners = content.geometry.index_layers
    if owners and len(owners) != content.geometry.n_layers:
        out.append(Loss("field", "index_layers", f"that layers {list(owners)} own the index rows is not stored"))
    out += [
        Loss("field", f"layers.{layer}.kind", "keys and values of one head are stored as latent and rope rows")
        for layer in content.as_latent
    ]
    out += [Loss("field", t.name, f"{t.role} has no place in a record") for t in content.left_out]
    chosen = {id(t): t for t, _ in content.tensors if t is not None}.values()
    out += [Loss("dtype", t.name, f"{t.spec.dtype} is stored as float32") for t in chosen if t.spec.dtype != "float32"]
    if snapshot.source.get("dialect") == "watermark":
        out.append(Loss("field", "complete_turn_records", "where the last complete turn ends is not stored"))
    records = stored_records(snapshot)
    if encoding.name != "float32" and (records is None or records.header.encoding != encoding):
        detail = f"latent and rope rows are stored as {encoding}"
        out.append(Loss("precision", "layers", detail, float("inf")))
    return tuple(out)


# -- writing ------------------------------------------------------------------------------------------------


def write_snapshot(
    snapshot: Snapshot, sink: Sink, encoding: Encoding, *, vocab: int | None = None, progress: Progress | None = None
) -> int:
    """Write a whole file; return its length. Columns are written in groups, so that few tensors are in memory at once.

    Errors as for `content_of`, `UnsupportedError` for a width that the encoding cannot hold; nothing is written then.
    """
    if snapshot.row_start:
        raise InputError("a partial capture cannot be saved alone: append it", found=f"rows from {snapshot.row_start}")
    content = content_of(snapshot, vocab)
    geometry, n = content.geometry, snapshot.n_rows
    if geometry.index_rows and geometry.index_layers is None:
        # The rows are in order; which layers they belong to is not part of the file.
        header = replace(new_header(replace(geometry, index_width=0, index_count=0), encoding), geometry=geometry)
    else:
        header = new_header(geometry, encoding)
    header = replace(header, count=n)
    sink.write_at([header.pack()], 0)
    records = stored_records(snapshot)
    if records is not None and records.header.encoding == encoding:
        _copy(records, content.tokens, sink, progress)
        return header.offset(n)
    columns, step, total, done = columns_of(header), step_of(header), n * header.record_size, 0
    for first, last in _groups(columns, n):
        part = columns[first:last]
        rows = values_of(content.tensors[first:last], part, n)
        tokens = content.tokens if first == 0 else None
        for at in range(0, n, step):
            stop = min(n, at + step)
            raw = pack_records(part, [r[at:stop] for r in rows], None if tokens is None else tokens[at:stop])
            if raw.shape[1] == header.record_size:
                sink.write_at([raw], header.offset(at))
            else:
                begin = 0 if tokens is not None else part[0].offset
                for i, record in enumerate(raw):
                    sink.write_at([record], header.offset(at + i) + begin)
            done += raw.nbytes
            if progress is not None:
                progress(done, total)
    return header.offset(n)


def _copy(records: Records, tokens: npt.NDArray[np.int32], sink: Sink, progress: Progress | None) -> None:
    """Write records as they are stored, with the ids of the snapshot."""
    header, ids = records.header, tokens.astype("<i4").view(np.uint8).reshape(-1, 4)
    for at, block in records.raw():
        stop = at + len(block)
        block[:, :4] = ids[at:stop]
        sink.write_at([block], header.offset(at))
        if progress is not None:
            progress(stop * header.record_size, records.n_records * header.record_size)


def _groups(columns: Sequence[Column], n: int) -> list[tuple[int, int]]:
    """Neighbouring columns whose rows together stay below the limit, or one alone."""
    groups, first, size = [], 0, 0
    for place, column in enumerate(columns):
        more = n * column.width * 4
        if place > first and size + more > _GROUP:
            groups.append((first, place))
            first, size = place, 0
        size += more
    return [*groups, (first, len(columns))]


def values_of(chosen: Sequence[tuple[Tensor | None, int | None]], columns: Sequence[Column], n: int) -> list[Rows]:
    """Read tensors into fresh memory, so that a snapshot on disk does not stay in memory as a whole."""
    fresh: dict[int, tuple[Tensor, npt.NDArray[Any]]] = {}
    for tensor, _ in chosen:
        if tensor is not None and id(tensor) not in fresh:
            fresh[id(tensor)] = (tensor, np.empty(tensor.shape, dtype=numpy_dtype(tensor.spec.dtype)))
    read_all(list(fresh.values()), workers=1)
    out = []
    for (tensor, place), column in zip(chosen, columns, strict=True):
        if tensor is None:
            out.append(np.zeros((n, 0), np.float32))
            continue
        array = fresh[id(tensor)][1]
        flat = array[:, place] if place is not None else np.moveaxis(array, tensor.spec.row_axis, 0)
        out.append(flat.reshape(tensor.n_rows, column.width)[tensor.n_rows - n :].astype(np.float32, copy=False))
    return out

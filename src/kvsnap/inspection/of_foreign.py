"""What is in a file of a foreign format. Its snapshot is opened; no tensor of it is read."""

from __future__ import annotations

from collections import Counter

from kvsnap.files import status
from kvsnap.inspection.described import PartSize, Stored, Summary
from kvsnap.inspection.excerpt import excerpts
from kvsnap.inspection.geometry import groups_of, layer_summaries, shapes_of
from kvsnap.layout import Snapshot, Tensor

__all__ = ["foreign_summary"]


def foreign_summary(snapshot: Snapshot, path: str, name: str) -> Summary:
    """Summarise what a format opened."""
    source = snapshot.source
    encoding = str(source.get("encoding", name))
    parts = _sizes(snapshot, encoding)
    states: Counter[int] = Counter()
    for tensor in snapshot.tensors():
        states[tensor.spec.layer] += 0 if tensor.spec.grows else tensor.nbytes
    layers = layer_summaries(shapes_of(snapshot.layers), parts, states)
    first = next((layer for layer in layers if layer.head_dim), None)
    n_generated = sum(run.count for run in snapshot.runs if run.kind == "generated")
    info = source.get("info", source.get("notes", ()))
    order = str(source.get("byte_order", ""))
    dialect = " ".join(str(d) for d in (source.get("dialect"), f"{order}-endian" if order else "") if d)
    size = status(path)
    begins, ends = excerpts(snapshot.text, snapshot.messages)
    damage = tuple(str(what) for what in source.get("damage", ()))
    notes = tuple(str(note) for note in info) if isinstance(info, (list, tuple)) else ()
    return Summary(
        path=path, format=name, version=str(source.get("version", "")), use="snapshot", file_id="",
        created_ns=size.st_mtime_ns, commit=1, complete=True, sealed=True, architecture=snapshot.architecture,
        num_layers=snapshot.num_layers, num_heads=snapshot.num_heads, num_query_heads=snapshot.num_query_heads,
        head_dim=snapshot.head_dim, dtype=first.dtype if first else "", n_tokens=len(snapshot.tokens),
        n_prompt=len(snapshot.tokens) - n_generated, n_generated=n_generated, n_pending=snapshot.n_pending,
        n_rows=snapshot.n_rows, token_offset=snapshot.token_offset, n_spans=1, has_logits=snapshot.logits is not None,
        has_text=snapshot.text is not None,
        n_messages=None if snapshot.messages is None else len(snapshot.messages), sampler=snapshot.sampler,
        file_bytes=size.st_size, tensor_bytes=snapshot.nbytes, stored=_by_codec(parts), exact=not snapshot.bound,
        bound=snapshot.bound, layers=layers, identity=snapshot.identity, metadata=snapshot.metadata, dialect=dialect,
        shard=snapshot.shard, notes=notes, damage=damage,
        groups=groups_of(layers), parts=parts, modified_ns=size.st_mtime_ns, begins=begins, ends=ends,
    )  # fmt: skip


def _sizes(snapshot: Snapshot, encoding: str) -> tuple[PartSize, ...]:
    """Return sizes by layer, role and codec; a tensor that does not say how it is stored is stored as it is."""
    found: dict[tuple[int, str, str], list[float]] = {}
    for tensor in [*snapshot.tensors(), *snapshot.loose()]:
        codec, nbytes = _stored(tensor) or (encoding, tensor.nbytes)
        row = found.setdefault((tensor.spec.layer, tensor.role, codec), [0, 0, 0, 0.0])
        row[:] = [row[0] + 1, row[1] + nbytes, row[2] + tensor.nbytes, max(row[3], tensor.bound)]
    return tuple(
        PartSize(*key, int(n), int(n), int(stored), int(decoded), bound)
        for key, (n, stored, decoded, bound) in sorted(found.items(), key=lambda item: item[0][0] % 2**32)
    )  # fmt: skip


def _stored(tensor: Tensor) -> tuple[str, int] | None:
    told: tuple[str, int] | None = getattr(getattr(tensor, "source", None), "stored_as", None)
    return told


def _by_codec(parts: tuple[PartSize, ...]) -> dict[str, Stored]:
    table: dict[str, Stored] = {}
    for part in parts:
        old = table.get(part.codec, Stored(0, 0, 0, 0.0))
        table[part.codec] = Stored(
            old.parts + part.parts, old.stored + part.stored, old.decoded + part.decoded, max(old.bound, part.bound)
        )  # fmt: skip
    return table

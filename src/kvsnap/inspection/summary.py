"""What is in a file, without its tensors and without a model."""

from __future__ import annotations

import os
from contextlib import closing

from kvsnap import formats
from kvsnap.errors import InputError
from kvsnap.formats.native import NAME, NativeFile
from kvsnap.formats.native.summary import LayerSummary, Stored, Summary, summary_of
from kvsnap.layout import Layer, Snapshot

__all__ = ["LayerSummary", "Stored", "Summary", "refuse_key", "summarise"]


def summarise(path: str | os.PathLike[str], *, key: bytes | None = None) -> Summary:
    """Summarise a file from its index and tables. Raise as `load` does; damaged tensors are `verify`'s business."""
    found = formats.format_of(path)
    if found.name == NAME:
        with closing(NativeFile.open(path, mapped=False, key=key)) as file:
            return summary_of(file)
    refuse_key(found.name, key, path)
    return _foreign_summary(found.load(os.fspath(path), mmap=True), os.fspath(path), found.name)


def refuse_key(name: str, key: object, path: str | os.PathLike[str] | None = None) -> None:
    """Raise `InputError` when a key was given for a format that has no encryption."""
    if key is not None:
        raise InputError(f"a key was given, but {name} files are not encrypted; only native ones are", path=path)


def _layer_summary(layer: Layer) -> LayerSummary:
    keys = layer.tensor("k") or layer.tensor("latent") or (layer.tensor("residual") if layer.quantisation else None)
    return LayerSummary(
        index=layer.index,
        kind=layer.kind,
        num_heads=layer.num_heads,
        num_query_heads=layer.num_query_heads,
        head_dim=layer.head_dim,
        dtype="" if keys is None else keys.spec.dtype,
        bytes_per_token=sum(t.spec.nbytes(1) / t.spec.tokens_per_row for t in layer.tensors if t.spec.grows),
    )


def _foreign_summary(snapshot: Snapshot, path: str, name: str) -> Summary:
    layers = tuple(_layer_summary(layer) for layer in snapshot.layers)
    first = next((layer for layer in layers if layer.head_dim), None)
    n_generated = sum(run.count for run in snapshot.runs if run.kind == "generated")
    source = snapshot.source
    info = source.get("info", source.get("notes", ()))
    order = str(source.get("byte_order", ""))
    dialect = " ".join(str(d) for d in (source.get("dialect"), f"{order}-endian" if order else "") if d)
    tensors = [*snapshot.tensors(), *([snapshot.logits] if snapshot.logits else [])]
    size = os.stat(path)
    stored = Stored(len(tensors), size.st_size, snapshot.nbytes, snapshot.bound)
    return Summary(
        path=path, format=name, version=str(snapshot.source.get("version", "")), use="snapshot", file_id="",
        created_ns=size.st_mtime_ns, commit=1, complete=True, sealed=True, architecture=snapshot.architecture,
        num_layers=snapshot.num_layers, num_heads=snapshot.num_heads, num_query_heads=snapshot.num_query_heads,
        head_dim=snapshot.head_dim, dtype=first.dtype if first else "", n_tokens=len(snapshot.tokens),
        n_prompt=len(snapshot.tokens) - n_generated, n_generated=n_generated, n_pending=snapshot.n_pending,
        n_rows=snapshot.n_rows, token_offset=snapshot.token_offset, n_spans=1, has_logits=snapshot.logits is not None,
        has_text=snapshot.text is not None,
        n_messages=None if snapshot.messages is None else len(snapshot.messages), sampler=snapshot.sampler,
        file_bytes=size.st_size, tensor_bytes=snapshot.nbytes,
        stored={str(snapshot.source.get("encoding", name)): stored},
        exact=not snapshot.bound, bound=snapshot.bound, layers=layers, identity=snapshot.identity,
        metadata=snapshot.metadata, dialect=dialect, shard=snapshot.shard,
        notes=tuple(str(note) for note in info) if isinstance(info, (list, tuple)) else (),
    )  # fmt: skip

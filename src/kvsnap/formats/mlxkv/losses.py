"""What is lost by writing a snapshot as MLXKV001."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kvsnap.formats.mlxkv.build import NATIVE, Plan, is_written, loaded_of
from kvsnap.formats.mlxkv.model import File, TensorData
from kvsnap.layout import Snapshot, Tensor
from kvsnap.protocols import Loss

__all__ = ["losses_of"]

_IDENTITY = (
    "weights", "tokenizer", "quantisation", "adapters", "chat_template", "engine", "runtime", "cache_dtype",
)  # fmt: skip
_EXACT_IN_FLOAT32 = frozenset(
    {"float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int16", "bool"}
)


def losses_of(snapshot: Snapshot, plan: Plan) -> tuple[Loss, ...]:
    """Return all losses of carrying out `plan`; reads no tensor."""
    found = [*_fields(snapshot), *_version(plan)]
    found += _unchanged(snapshot, plan) if plan.unchanged else _new(snapshot, plan)
    return tuple(found)


def _fields(snapshot: Snapshot) -> Iterator[Loss]:
    identity = snapshot.identity
    known = [name for name in _IDENTITY if getattr(identity, name)]
    if known:
        yield Loss("field", "identity", f"only the architecture and head counts are kept, not {', '.join(known)}")
    if snapshot.sampler is not None:
        yield Loss("field", "sampler", "settings and random state of the sampler are left out")
    if snapshot.text is not None:
        yield Loss("field", "text", "the text is left out; the ids are kept")
    if snapshot.messages is not None:
        yield Loss("field", "messages", "the messages of the chat are left out")
    if snapshot.shard is not None:
        yield Loss("field", "shard", f"that this is {snapshot.shard} is left out: it reads as a whole")
    if snapshot.draft is not None:
        yield Loss("field", "draft", "the state of the draft is left out: it starts empty")
    if snapshot.metadata:
        yield Loss("field", "metadata", f"{', '.join(sorted(snapshot.metadata))}: left out")


def _version(plan: Plan) -> Iterator[Loss]:
    file = plan.file
    if plan.version < 2:
        if file.generated:
            yield Loss("field", "generated", "version 1 does not tell generated ids")
        if file.offset != len(file.tokens):
            yield Loss("field", "token_offset", "version 1 has no offset: readers take the number of tokens")
        if file.logits is not None and file.logits.n:
            yield Loss("field", "logits", "version 1 has no logits")
    elif plan.codec is not None and file.token_offset == 0 and file.tokens and not plan.unchanged:
        yield Loss("field", "token_offset", "an offset of 0 with tokens reads as the number of tokens")


def _heads(file: File) -> list[TensorData]:
    tensors = [t for e in file.layers for h in e.heads for t in (h.key, h.value)]
    return [t for t in tensors if t.n]


def _unchanged(snapshot: Snapshot, plan: Plan) -> Iterator[Loss]:
    loaded = loaded_of(snapshot)
    if loaded is None or plan.codec is None:
        return
    original, stored = loaded.file, _heads(plan.file)
    if original.trailing is not None:
        yield Loss("field", "trailing bytes", f"{original.trailing.length} bytes behind the end are left out")
    if plan.file is not original:
        for place, entry in enumerate(original.layers):
            if entry.has_slab:
                heads = plan.file.layers[place].heads
                how = "its heads are kept" if entry.heads else "its values are kept head by head"
                detail = (
                    f"{plan.codec} has no slabs: {how if heads else 'its values are lost, nothing tells their shape'}"
                )
                yield Loss("field", f"layers.{entry.layer}.slab", detail)
    halves = {t.dtype for t in stored if t.dtype != "float32"}
    if halves and plan.codec == "float32":
        yield Loss("dtype", "k, v", f"{', '.join(sorted(halves))} values are stored as float32; none changes")
    if any(t.selector == 1 for t in stored) and plan.codec != "q8":
        yield Loss("field", "bound", "that these values went through q8 is not told", snapshot.bound)
    if plan.codec == "q8" and any(t.selector != 1 for t in stored):
        yield _q8()


def _q8() -> Loss:
    # Half of the largest value / 127 of each head, which only the values tell.
    return Loss("precision", "k, v", "one scale per head: off by at most half of max|x| / 127 of the head", math.inf)


def _new(snapshot: Snapshot, plan: Plan) -> Iterator[Loss]:
    kinds = [run.kind for run in snapshot.runs]
    if kinds not in ([], ["prompt"], ["generated"], ["prompt", "generated"]):
        yield Loss("field", "runs", "only the last run of generated ids is told")
    straight = not snapshot.positions or (len(snapshot.positions) == 1 and snapshot.positions[0].start == 0)
    if not straight or snapshot.token_offset != snapshot.n_rows:
        yield Loss("field", "positions", "rows are taken to lie next to each other, the last one before the offset")
    written: list[Tensor] = []
    for number, layer in enumerate(snapshot.layers):
        if layer.kind not in ("attention", "none"):
            yield Loss("field", f"layers.{number}.kind", f"{layer.kind}: its rows are stored as keys and values")
        if layer.by_head:
            yield Loss("field", f"layers.{number}.heads", "the heads beside the slab are left out")
        for tensor in layer.tensors:
            if not is_written(tensor):
                yield Loss("field", tensor.name, f"there is no place for {tensor.role} tensors")
                continue
            written.append(tensor)
            if tensor.start + tensor.n_rows != snapshot.n_rows or tensor.spec.tokens_per_row != 1:
                yield Loss("rows", tensor.name, "rows that do not end at the last position are read as if they did")
    yield from _precision(snapshot, plan, written)
    loaded = loaded_of(snapshot)
    for entry in () if loaded is None else loaded.file.layers:
        if len(entry.payloads):
            yield Loss("field", f"layers.{entry.layer}.payloads", "payloads belong to the state before the change")


def _precision(snapshot: Snapshot, plan: Plan, written: list[Tensor]) -> Iterator[Loss]:
    kept = NATIVE if plan.codec == "native" else ("float32",)
    yield from _widened("k, v", {t.spec.dtype for t in written} - set(kept))
    if snapshot.logits is not None:
        yield from _widened("logits", {snapshot.logits.spec.dtype} - {"float32"})
    if plan.codec == "q8" and any(t.nbytes for t in written):
        yield _q8()
    if snapshot.bound and plan.codec != "q8":
        yield Loss(
            "field", "bound", "that these values are not exactly those of the engine is not told", snapshot.bound
        )


def _widened(what: str, dtypes: set[str]) -> Iterator[Loss]:
    exact = dtypes & _EXACT_IN_FLOAT32
    if exact:
        yield Loss("dtype", what, f"{', '.join(sorted(exact))} values are stored as float32; none changes")
    if dtypes - exact:
        yield Loss("precision", what, f"{', '.join(sorted(dtypes - exact))} is rounded to float32", math.inf)

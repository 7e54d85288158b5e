"""From a snapshot to a cache of a transformers model: compare the geometry, read into fresh memory, build."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvsnap.engines._tf_layers import Geometry, dtype_of, kind_of, layer_at, numpy_view
from kvsnap.engines._tf_model import Model
from kvsnap.engines._tf_state import Line, check_ids, check_room
from kvsnap.errors import CompatibilityError, InputError, UnsupportedError
from kvsnap.layout import PositionRun, Snapshot
from kvsnap.protocols import Progress
from kvsnap.tensors import Layer, Tensor, read_all

__all__ = ["build_cache", "check_snapshot", "line_of"]

_HELD_TWICE = 256 << 20


def check_snapshot(snapshot: Snapshot, model: Model, dtype: str, *, cast: bool) -> None:
    """Compare a snapshot with a model; raise an error that names the layer and both values. Reads no tensor."""
    if snapshot.row_start != 0:
        raise InputError(
            "a partial capture cannot be installed", expected="rows from 0", found=f"rows from {snapshot.row_start}"
        )
    n_rows, n_pending, stored = snapshot.n_rows, snapshot.n_pending, len(snapshot.tokens)
    if not (0 <= n_pending <= stored <= n_rows + n_pending):
        raise InputError(
            "the counts of the snapshot contradict each other",
            expected="pending <= tokens <= rows + pending", found=f"{n_pending}, {stored}, {n_rows}",
        )  # fmt: skip
    straight = (PositionRun(0, n_rows),) if n_rows else ()
    if tuple(snapshot.positions) not in ((), straight) or snapshot.token_offset != n_rows:
        raise UnsupportedError(
            "positions that do not count from 0 without a jump are not supported yet",
            expected=f"0 to {n_rows}", found=f"{list(snapshot.positions)}, then {snapshot.token_offset}",
        )  # fmt: skip
    check_ids(snapshot.tokens, model.vocab_size, n_rows + n_pending - stored)
    check_room(0, n_rows + n_pending, model.context_limit)
    if snapshot.logits is not None and snapshot.logits.shape != (model.vocab_size,):
        raise CompatibilityError(
            "the stored logits do not fit the vocabulary",
            expected=[model.vocab_size], found=list(snapshot.logits.shape),
        )  # fmt: skip
    if n_rows == 0 and not snapshot.layers:
        return
    if len(snapshot.layers) != len(model.geometry):
        raise CompatibilityError("wrong number of layers", expected=len(model.geometry), found=len(snapshot.layers))
    for index, layer in enumerate(snapshot.layers):
        _check_layer(layer, model.geometry[index], index, dtype, n_rows, cast=cast)


def _check_layer(layer: Layer, geometry: Geometry, index: int, dtype: str, n_rows: int, *, cast: bool) -> None:
    where, kind, specs = f"layer {index}", geometry.kind, geometry.specs(index, 0, dtype)
    roles = [t.role for t in layer.tensors]
    if layer.kind != kind or layer.shares is not None or sorted(roles) != sorted(s.role for s in specs):
        shared = "" if layer.shares is None else f" shared from layer {layer.shares}"
        raise CompatibilityError(
            f"{where} is of another kind",
            expected=f"{kind} with {', '.join(s.role for s in specs)}",
            found=f"{layer.kind}{shared} with {', '.join(roles)}",
        )  # fmt: skip
    for spec in specs:
        tensor = layer.tensor(spec.role)
        assert tensor is not None  # noqa: S101 - the roles were compared above
        found = tensor.spec
        compared: list[tuple[str, Any, Any]] = [
            ("axes", spec.axes, found.axes),
            ("shape", spec.shape_with(n_rows), tensor.shape),
            ("first row", 0, tensor.start),
        ]
        if not cast:
            compared.append(("dtype", spec.dtype, found.dtype))
        if "unknown" not in (spec.rope, found.rope):
            compared.append(("rope", f"{spec.rope} {spec.pairing}".strip(), f"{found.rope} {found.pairing}".strip()))
        for what, expected, value in compared:
            if expected != value:
                shown = [list(v) if isinstance(v, tuple) else v for v in (expected, value)]
                raise CompatibilityError(f"{where} {spec.role}: {what} differs", expected=shown[0], found=shown[1])


def line_of(snapshot: Snapshot) -> Line:
    """Return the sequence of a checked snapshot; without logits and with nothing pending its last row is given up."""
    logits = None if snapshot.logits is None else np.array(snapshot.logits.array)
    line = Line(snapshot.tokens, tuple(snapshot.runs), snapshot.n_rows, snapshot.n_pending, logits)
    if line.n_rows and not line.n_pending and logits is None:
        if not line.tokens:
            raise InputError("the snapshot has neither logits nor the last token, so there is nothing to go on from")
        return line.without_last_row()
    return line


def build_cache(
    snapshot: Snapshot, model: Model, dtype: Any, n_rows: int, workers: int, progress: Progress | None = None
) -> Any:
    """Read the first `n_rows` rows into memory of their own, on the device of each layer, and return them as a cache.

    Raise what the tensors raise when their bytes are damaged; nothing else has changed then.
    """
    import torch

    cache = model.fresh_cache()
    if n_rows == 0:
        return cache
    wanted = [
        (next(t for t in layer.tensors if t.role == part.role), torch.device(device))
        for layer, device, geometry in zip(snapshot.layers, model.devices(), model.geometry, strict=True)
        for part in geometry.parts
    ]
    read = iter([memory[..., :n_rows, :] for memory in _read(wanted, dtype, workers, progress)])
    for index, geometry in enumerate(model.geometry):
        target = layer_at(cache, index)
        kind_of(target, index).write(target, [next(read) for _ in geometry.parts])
    return cache


def _read(wanted: Sequence[tuple[Tensor, Any]], dtype: Any, workers: int, progress: Progress | None) -> list[Any]:
    """Read tensors into memory of their own, each on its device and in `dtype`.

    What is read here and then moved or converted is read a few tensors at a time, to bound what is held twice.
    """
    import torch

    total, done = sum(tensor.nbytes for tensor, _ in wanted), 0

    def advance(count: int, _: int) -> None:
        if progress is not None:
            progress(done + count, total)

    read: list[Any] = []
    for group in _groups(wanted, dtype_of(dtype, "the cache")):
        with torch.inference_mode(False), torch.no_grad():
            memories = [
                torch.empty((1, *t.shape), dtype=getattr(torch, t.spec.dtype), pin_memory=device.type == "cuda")
                for t, device in group
            ]
            pairs = [(t, numpy_view(memory)[0]) for (t, _), memory in zip(group, memories, strict=True)]
            read_all(pairs, workers=workers, progress=advance)
            read += [m.to(device=device, dtype=dtype) for m, (_, device) in zip(memories, group, strict=True)]
        done += sum(t.nbytes for t, _ in group)
    return read


def _groups(wanted: Sequence[tuple[Tensor, Any]], dtype: str) -> Iterator[list[tuple[Tensor, Any]]]:
    group: list[tuple[Tensor, Any]] = []
    held = 0
    for tensor, device in wanted:
        twice = tensor.nbytes if device.type != "cpu" or tensor.spec.dtype != dtype else 0
        if group and held + twice > _HELD_TWICE:
            yield group
            group, held = [], 0
        group.append((tensor, device))
        held += twice
    yield group

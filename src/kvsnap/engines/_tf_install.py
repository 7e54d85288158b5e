"""From a snapshot to a cache of a transformers model: compare the geometry, read into fresh memory, build."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvsnap.engines._tf_layers import kind_of, layer_at, numpy_view
from kvsnap.engines._tf_model import Model
from kvsnap.engines._tf_parts import Geometry, Part, state
from kvsnap.engines._tf_quantised import check_sizes, refuse_rows
from kvsnap.engines._tf_state import Line, check_ids, check_room, straightened
from kvsnap.errors import CompatibilityError, InputError, UnsupportedError
from kvsnap.labels import labels_of, together_of
from kvsnap.layout import PositionRun, Snapshot
from kvsnap.protocols import Progress
from kvsnap.tensors import Layer, Tensor, read_all

__all__ = ["build_cache", "check_snapshot", "is_encoded"]

_HELD_TWICE = 256 << 20


def check_snapshot(snapshot: Snapshot, model: Model, dtype: str, *, cast: bool, prefix: bool = False) -> Line:
    """Compare a snapshot with a model; raise an error that names the layer and both values. Reads no tensor but logits.

    Return the sequence that can go on from it: without logits and with nothing pending its last row is given up, unless
    it is the `prefix` of ids to come.
    """
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
    _check_positions(snapshot, model)
    check_ids(snapshot.tokens, model.vocab_size, n_rows + n_pending - stored)
    check_room(0, n_rows + n_pending, model.context_limit)
    check_room(0, snapshot.token_offset + n_pending, model.context_limit)
    check_room(0, n_rows + n_pending, model.room(model.fresh_cache()), "the static cache")
    if snapshot.logits is not None and snapshot.logits.shape != (model.vocab_size,):
        raise CompatibilityError(
            "the stored logits do not fit the vocabulary",
            expected=[model.vocab_size], found=list(snapshot.logits.shape),
        )  # fmt: skip
    line = _line_of(snapshot, prefix=prefix)
    if n_rows == 0 and not is_encoded(snapshot) and (not snapshot.layers or model.encodes):
        return line
    if len(snapshot.layers) != len(model.geometry):
        raise CompatibilityError("wrong number of layers", expected=len(model.geometry), found=len(snapshot.layers))
    for index, (layer, geometry) in enumerate(zip(snapshot.layers, model.geometry, strict=True)):
        _check_layer(layer, geometry, index, dtype, n_rows, cast=cast)
        for tensor, part in pairs_of(layer, geometry):
            _check_held(tensor, part, f"layer {index} {part.role}", line.n_rows, n_rows)
    _check_crossed(snapshot)
    return line


def is_encoded(snapshot: Snapshot) -> bool:
    """Tell whether a snapshot holds what the decoder uses of an encoded input."""
    return any(tensor.role == "cross_k" for tensor in snapshot.tensors())


def _check_crossed(snapshot: Snapshot) -> None:
    """Refuse a snapshot whose layers hold unequal numbers of rows of the encoder's output."""
    found = [(t.spec.layer, t.role, t.n_rows) for t in snapshot.tensors() if t.role in ("cross_k", "cross_v")]
    for layer, role, count in found:
        if not count or count != found[0][2]:
            raise CompatibilityError(
                f"layer {layer} {role}: another number of rows of the input than in layer 0",
                expected=found[0][2] or "1 or more", found=count,
            )  # fmt: skip


def _check_positions(snapshot: Snapshot, model: Model) -> None:
    straight = (PositionRun(0, snapshot.n_rows),) if snapshot.n_rows else ()
    if tuple(snapshot.positions) in ((), straight) and snapshot.token_offset == snapshot.n_rows:
        return
    if sum(run.count for run in snapshot.positions) != snapshot.n_rows:
        raise InputError(
            "the positions of the snapshot do not fit its rows",
            expected=snapshot.n_rows, found=sum(run.count for run in snapshot.positions),
        )  # fmt: skip
    first = min((run.start for run in snapshot.positions), default=0)
    if first < 0 or snapshot.token_offset < 0:
        raise InputError("positions below 0", expected="0 or above", found=min(first, snapshot.token_offset))
    if not model.takes_positions:
        raise UnsupportedError(
            f"positions that do not count from 0 without a jump: {type(model.module).__name__} takes no position_ids",
            expected=f"0 to {snapshot.n_rows}", found=f"{list(snapshot.positions)}, then {snapshot.token_offset}",
        )  # fmt: skip


def pairs_of(layer: Layer, geometry: Geometry) -> list[tuple[Tensor, Part]]:
    """Return each tensor of a layer with the part that describes it, in the order of the parts; states behind them."""
    by_role: dict[str, list[Tensor]] = {}
    for tensor in layer.tensors:
        by_role.setdefault(tensor.role, []).append(tensor)
    pairs = [(by_role[part.role].pop(0), part) for part in geometry.parts if by_role.get(part.role)]
    rest = [tensor for tensors in by_role.values() for tensor in tensors]
    pairs += [(t, state(t.role, t.shape, t.spec.dtype)) for t in sorted(rest, key=lambda t: t.spec.id)]
    return pairs


def _check_held(tensor: Tensor, part: Part, where: str, n_rows: int, of_rows: int) -> None:
    """Refuse a tensor that does not hold what is needed to go on behind its first `n_rows` of `of_rows` positions."""
    if part.growth == "window":
        first = n_rows - part.needed(n_rows)
        if tensor.start > first or tensor.start + tensor.n_rows < n_rows:
            raise UnsupportedError(
                f"{where}: rows that the window of {part.window} needs are missing",
                expected=f"{first} to {n_rows}", found=f"{tensor.start} to {tensor.start + tensor.n_rows}",
            )  # fmt: skip
    elif part.growth == "replaced" and n_rows != of_rows:
        raise UnsupportedError(
            f"{where}: there are no logits, and the last position cannot be evaluated again, for states are made anew",
            expected="logits, or an id that is not evaluated yet", found=f"{of_rows} positions, all evaluated",
        )  # fmt: skip


def _check_layer(layer: Layer, geometry: Geometry, index: int, dtype: str, n_rows: int, *, cast: bool) -> None:
    where, roles = f"layer {index}", [t.role for t in layer.tensors]
    expected = [part.role for part in geometry.parts]
    if layer.quantisation != geometry.quantisation:
        raise CompatibilityError(
            f"{where} is quantised otherwise",
            expected=geometry.quantisation or "none", found=layer.quantisation or "none",
        )  # fmt: skip
    states = ["conv", "recurrent"] if geometry.open else []
    more = [role for role in roles if role in states and roles.count(role) > expected.count(role)]
    fits = sorted(roles) == sorted([*expected, *more]) and (more or not geometry.open or not n_rows)
    if layer.kind != geometry.kind or layer.shares != geometry.shares or not fits:
        shared = "" if layer.shares is None else f" shared from layer {layer.shares}"
        raise CompatibilityError(
            f"{where} is of another kind",
            expected=f"{geometry.kind} with {', '.join([*expected, *states])}",
            found=f"{layer.kind}{shared} with {', '.join(roles)}",
        )  # fmt: skip
    for tensor, part in pairs_of(layer, geometry):
        found = tensor.spec
        compared: list[tuple[str, Any, Any]] = [
            ("axes", part.axes, found.axes),
            ("growth", part.growth, found.growth),
            ("window", part.window, found.window),
        ]
        if not part.fits(tensor.shape):
            compared.append(("shape", part.shape(part.needed(n_rows)), tensor.shape))
        if part.counts:
            compared += [
                ("positions for each row", part.tokens_per_row, found.tokens_per_row),
                ("shape", part.shape(part.needed(n_rows)), part.shape(tensor.n_rows)),
                ("first row", 0, tensor.start),
            ]
        # Codes mean something in the dtype they were made from only.
        if (layer.quantisation or not cast) and (part.dtype or part.row_axis >= 0):
            compared.append(("dtype", part.dtype or dtype, found.dtype))
        if "unknown" not in (part.rope, found.rope):
            compared.append(("rope", f"{part.rope} {part.pairing}".strip(), f"{found.rope} {found.pairing}".strip()))
        for what, wanted, value in compared:
            if wanted != value:
                shown = [list(v) if isinstance(v, tuple) else v for v in (wanted, value)]
                raise CompatibilityError(f"{where} {part.role}: {what} differs", expected=shown[0], found=shown[1])
    if geometry.quantisation:
        check_sizes(layer, geometry.parts, n_rows)


def _line_of(snapshot: Snapshot, *, prefix: bool) -> Line:
    logits = None if snapshot.logits is None else np.array(snapshot.logits.array)
    positions = straightened(snapshot.positions)
    behind = positions[-1].start + positions[-1].count if positions else snapshot.n_rows
    labels = tuple(labels_of(snapshot.metadata).items())
    line = Line(
        snapshot.tokens, tuple(snapshot.runs), snapshot.n_rows, snapshot.n_pending, logits, positions=positions,
        offset=None if snapshot.token_offset == behind else snapshot.token_offset,
        inexact_rows=snapshot.n_rows if snapshot.bound or labels else 0, bound=snapshot.bound, labels=labels,
        together=together_of(snapshot.metadata, snapshot.n_rows),
    )  # fmt: skip
    if line.n_rows and not line.n_pending and logits is None and not prefix:
        if not line.tokens:
            raise InputError("the snapshot has neither logits nor the last token, so there is nothing to go on from")
        return line.without_last_row()
    return line


def build_cache(
    snapshot: Snapshot,
    model: Model,
    dtype: Any,
    n_rows: int,
    workers: int,
    progress: Progress | None = None,
    batch: int = 1,
) -> Any:
    """Read what is needed for the first `n_rows` rows into memory of its own, on the device of each layer.

    Return it as a cache of `batch` equal sequences. Raise what the tensors raise when their bytes are damaged; nothing
    else has changed then.
    """
    cache = model.fresh_cache()
    if batch > 1:
        refuse_rows(snapshot.layers)
    if n_rows == 0 and not is_encoded(snapshot):
        return cache
    wanted, layers = [], []
    for layer, device, geometry in zip(snapshot.layers, model.devices(), model.geometry, strict=True):
        pairs = [(_needed(tensor, part, n_rows), part) for tensor, part in pairs_of(layer, geometry)]
        layers.append(pairs)
        wanted += [_Wanted(tensor, device, dtype, part) for tensor, part in pairs]
    read = iter(_read(wanted, workers, progress))
    for index, pairs in enumerate(layers):
        target = layer_at(cache, index)
        live = tuple((part.role, _times(_used(next(read), tensor, part, n_rows), batch)) for tensor, part in pairs)
        kind_of(target, index).write(target, live, n_rows)
    return cache


def _needed(tensor: Tensor, part: Part, n_rows: int) -> Tensor:
    """Return a tensor, of a window without what lies far before it: a session keeps every row that it was handed."""
    return tensor.since(n_rows - part.needed(n_rows)) if part.growth == "window" else tensor


def _times(tensor: Any, batch: int) -> Any:
    """Return `[1, ...]` as `[batch, ...]`, each in memory of its own."""
    return tensor if batch == 1 else tensor.repeat(batch, *(1 for _ in tensor.shape[1:]))


def _used(memory: Any, tensor: Tensor, part: Part, n_rows: int) -> Any:
    """Return the rows of a tensor `[1, ...]` that a cache of `n_rows` positions holds, as a view."""
    if not tensor.spec.grows:
        return memory
    stop = n_rows // part.tokens_per_row - tensor.start
    first = stop - part.needed(n_rows)
    return memory[(slice(None),) * (1 + part.row_axis) + (slice(first, stop),)]


class _Wanted:
    """A tensor that is read, onto a device and in a dtype: that of the cache, or its own where it is a state."""

    def __init__(self, tensor: Tensor, device: Any, dtype: Any, part: Part) -> None:
        import torch

        self.tensor = tensor
        self.device = torch.device(device)
        self.stored = getattr(torch, tensor.spec.dtype)
        own = getattr(torch, part.dtype) if part.dtype else dtype
        self.dtype = own if part.row_axis >= 0 else dtype if part.role == "conv" else self.stored

    @property
    def held_twice(self) -> int:
        """Bytes that are in memory twice while it is moved or converted."""
        return self.tensor.nbytes if self.device.type != "cpu" or self.stored != self.dtype else 0


def _read(wanted: Sequence[_Wanted], workers: int, progress: Progress | None) -> list[Any]:
    """Read tensors into memory of their own `[1, ...]`, each on its device and in its dtype.

    What is read here and then moved or converted is read a few tensors at a time, to bound what is held twice.
    """
    import torch

    total, done = sum(w.tensor.nbytes for w in wanted), 0

    def advance(count: int, _: int) -> None:
        if progress is not None:
            progress(done + count, total)

    read: list[Any] = []
    for group in _groups(wanted):
        with torch.inference_mode(False), torch.no_grad():
            memories = [
                torch.empty((1, *w.tensor.shape), dtype=w.stored, pin_memory=w.device.type == "cuda") for w in group
            ]
            pairs = [(w.tensor, numpy_view(memory)[0]) for w, memory in zip(group, memories, strict=True)]
            read_all(pairs, workers=workers, progress=advance)
            read += [m.to(device=w.device, dtype=w.dtype) for m, w in zip(memories, group, strict=True)]
        done += sum(w.tensor.nbytes for w in group)
    return read


def _groups(wanted: Sequence[_Wanted]) -> Iterator[list[_Wanted]]:
    group: list[_Wanted] = []
    held = 0
    for one in wanted:
        if group and held + one.held_twice > _HELD_TWICE:
            yield group
            group, held = [], 0
        group.append(one)
        held += one.held_twice
    yield group

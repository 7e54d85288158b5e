"""Edits of the middle: spans of tokens taken out of a snapshot, the rows of the others kept.

Every row behind the first token removed was computed while that was there, and its keys were rotated to another
position. So what comes of it is an approximation, and says so; only a cut of the end is exact.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvsnap.errors import InputError, UnsupportedError
from kvsnap.labels import EDITED
from kvsnap.layout import PositionRun, Run, Snapshot, join_positions, join_runs
from kvsnap.tensors import Array, Layer, Pairing, Tensor

__all__ = ["Rope", "needs_rope", "remove"]

"""Name under which the metadata of an edited snapshot tells what was removed."""

MOST_ROWS = 2**24
"""A file may count rows that it does not hold; an edit looks at each."""
Places = npt.NDArray[np.int64]
_UNROTATED = ("v", "latent")
_FIXED = ("cross_k", "cross_v")


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """How the keys of a layer are rotated: value pair `i` of a row at position `p` by the angle `p * inv_freq[i]`.

    `inv_freq` is float32 `[pairs]`, in radians per position. `pairing` tells which values make a pair: `half` (`i` and
    `pairs + i`) or `interleaved` (`2 i` and `2 i + 1`). The first `2 * pairs` values of a row are rotated.
    """

    inv_freq: npt.NDArray[np.float32]
    pairing: Pairing = "half"

    def __post_init__(self) -> None:
        if self.pairing not in ("half", "interleaved"):
            raise InputError(
                "a rope pairs values in one of two ways", expected="half or interleaved", found=self.pairing
            )
        given = np.asarray(self.inv_freq)
        if given.dtype != np.float32 or given.ndim != 1 or not given.size or not np.isfinite(given).all():
            raise InputError(
                "the frequencies of a rope are finite numbers, one for each pair", expected="float32[pairs]",
                found=f"{given.dtype}{list(given.shape)}",
            )  # fmt: skip

    @property
    def width(self) -> int:
        """Number of values of a row that are rotated, from the first on."""
        return 2 * len(self.inv_freq)

    def rotated(self, rows: Array, by: Places) -> Array:
        """Return rows `[..., rows, dim]` moved by so many positions each (`by`: `[rows]`), in their own dtype.

        Angles are float64, the rotation is float32 (float64 for such rows), and the result is rounded once.
        """
        wide = np.float64 if rows.dtype == np.float64 else np.float32
        pairs = len(self.inv_freq)
        angle = by.astype(np.float64)[:, None] * self.inv_freq.astype(np.float64)
        cos, sin = np.cos(angle).astype(wide), np.sin(angle).astype(wide)
        moved = rows.astype(wide)
        one, two = (slice(0, pairs), slice(pairs, 2 * pairs)) if self.pairing == "half" else (
            slice(0, self.width, 2), slice(1, self.width, 2))  # fmt: skip
        a, b = rows[..., one].astype(wide), rows[..., two].astype(wide)
        moved[..., one], moved[..., two] = a * cos - b * sin, b * cos + a * sin
        return moved.astype(rows.dtype)


def remove(
    snapshot: Snapshot,
    spans: Sequence[tuple[int, int]],
    *,
    rope: Rope | Sequence[Rope | None] | None = None,
    positions: Literal["close", "keep"] = "close",
) -> Snapshot:
    """Return a snapshot without the tokens of these spans `[(start, stop), ...]`, and without their rows.

    All spans count in the tokens of `snapshot` as it is, in order and apart. Removing the end is `truncate`, and exact.
    Else rows behind a removed one either close up to the positions that become free (`positions="close"`), for which
    their keys are rotated back with the frequencies in `rope` (one for all layers, or one for each), or keep theirs
    (`"keep"`), so that positions jump. Tensors with such rows get the bound infinity: they are approximations, whatever
    the model, because those rows saw what was removed; `metadata["edited"]` tells what was. Logits that saw it, the
    text and the messages are dropped. Pending tokens stay pending.

    Raise `InputError` for spans that are no spans, `UnsupportedError` naming the layer where rows cannot be removed, or
    keys cannot be rotated and why.
    """
    wanted = _checked(snapshot, spans)
    if positions not in ("close", "keep"):
        raise InputError("positions close up or are kept", expected="close or keep", found=positions)
    whole = len(snapshot.tokens)
    snapshot, wanted = _without_end(snapshot, wanted)
    if not wanted:
        return snapshot
    stays, cut = _cut_of(snapshot, wanted, closes=positions == "close")
    gone = snapshot.n_rows - len(cut.kept)
    pending = stays[len(stays) - snapshot.n_pending :]
    skipped = 0 if cut.closes or not pending.any() else int(np.argmax(pending))
    return replace(
        snapshot,
        layers=_layers(snapshot, cut, rope) if gone else snapshot.layers,
        tokens=tuple(t for t, stay in zip(snapshot.tokens, stays, strict=True) if stay),
        runs=_runs(snapshot.runs, stays),
        n_rows=len(cut.kept),
        n_pending=int(pending.sum()),
        token_offset=snapshot.token_offset - (gone if cut.closes else 0) + skipped,
        positions=_positions(snapshot, cut),
        logits=None if gone else snapshot.logits,
        draft=None,  # it holds what was taken out
        text=None,
        messages=None,
        metadata=_told(snapshot.metadata, spans, whole) if cut.touches else snapshot.metadata,
        source={name: value for name, value in snapshot.source.items() if name not in ("loaded", "path")},
    )


def needs_rope(snapshot: Snapshot, spans: Sequence[tuple[int, int]]) -> bool:
    """Tell whether closing these spans has to rotate keys, so that a rope must be given. Raise as `remove` else does.

    Reads no tensor.
    """
    snapshot, wanted = _without_end(snapshot, _checked(snapshot, spans))
    if not wanted or not _cut_of(snapshot, wanted, closes=True)[1].touches:
        return False
    turned = [t for layer in snapshot.layers for t in layer.tensors if _is_removable(t, layer) and _is_rotated(t)]
    return bool(turned)


def _checked(snapshot: Snapshot, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    if snapshot.row_start:
        raise InputError("a partial capture cannot be edited", found=f"rows from {snapshot.row_start}")
    if snapshot.shard is not None:
        raise InputError("a shard cannot be edited: join it with the others first", found=snapshot.shard)
    if snapshot.n_rows > MOST_ROWS:
        raise UnsupportedError("too many positions to edit", expected=f"at most {MOST_ROWS}", found=snapshot.n_rows)
    if snapshot.n_rows + snapshot.n_pending < len(snapshot.tokens):
        raise InputError("the counts of the snapshot contradict each other", found=snapshot)
    wanted: list[tuple[int, int]] = []
    for span in spans:
        try:
            start, stop = map(operator.index, span)
        except (TypeError, ValueError) as error:
            raise InputError("a span is a pair of token numbers", expected="(start, stop)", found=span) from error
        before = wanted[-1][1] if wanted else 0
        if not 0 <= start < stop <= len(snapshot.tokens):
            raise InputError(
                "no such span of tokens", expected=f"0 <= start < stop <= {len(snapshot.tokens)}", found=(start, stop)
            )
        if start < before:
            raise InputError(
                "spans count in the tokens as they are now: in order, and apart",
                expected=f"a start of {before} or above behind {wanted[-1]}", found=(start, stop),
            )  # fmt: skip
        wanted.append((start, stop))
    return wanted


def _without_end(snapshot: Snapshot, wanted: list[tuple[int, int]]) -> tuple[Snapshot, list[tuple[int, int]]]:
    """Cut off the spans that are the end of the snapshot; return what is left to be done in its middle."""
    while wanted and wanted[-1][1] == len(snapshot.tokens):
        snapshot, wanted = snapshot.truncate(wanted[-1][0]), wanted[:-1]
    return snapshot, wanted


def _told(metadata: Mapping[str, str], spans: Sequence[tuple[int, int]], n_tokens: int) -> dict[str, str]:
    said = f"tokens {', '.join(f'{start}:{stop}' for start, stop in spans)} of {n_tokens} were removed"
    before = metadata.get(EDITED)
    return {**metadata, EDITED: f"{before}; then {said}" if before else said}


# -- tokens and positions ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Cut:
    """The rows that stay, as numbers of the original, and how many rows before each are removed."""

    kept: Places
    back: Places
    closes: bool

    @property
    def touches(self) -> bool:
        """True when a row stays behind one that is removed."""
        return bool(self.back.size and self.back[-1])


def _cut_of(
    snapshot: Snapshot, wanted: Sequence[tuple[int, int]], *, closes: bool
) -> tuple[npt.NDArray[np.bool_], _Cut]:
    """Return which tokens stay, and the rows that do."""
    stays = np.ones(len(snapshot.tokens), dtype=bool)
    for start, stop in wanted:
        stays[start:stop] = False
    unstored = snapshot.n_rows + snapshot.n_pending - len(stays)
    rows_stay = np.concatenate((np.ones(unstored, dtype=bool), stays))[: snapshot.n_rows]
    return stays, _Cut(np.flatnonzero(rows_stay), np.cumsum(~rows_stay)[rows_stay], closes)


def _runs(runs: Sequence[Run], stays: npt.NDArray[np.bool_]) -> tuple[Run, ...]:
    out: tuple[Run, ...] = ()
    at = 0
    for run in runs:
        out = join_runs(out, (Run(run.kind, int(stays[at : at + run.count].sum())),))
        at += run.count
    return out


def _positions(snapshot: Snapshot, cut: _Cut) -> tuple[PositionRun, ...]:
    places = snapshot.row_positions(0, snapshot.n_rows)[cut.kept]
    if cut.closes:
        places = places - cut.back
    jumps = np.flatnonzero(np.diff(places) != 1) + 1
    pieces = [piece for piece in np.split(places, jumps) if piece.size]
    return join_positions((), [PositionRun(int(piece[0]), len(piece)) for piece in pieces])


# -- rows ----------------------------------------------------------------------------------------------------------


def _layers(snapshot: Snapshot, cut: _Cut, rope: Rope | Sequence[Rope | None] | None) -> tuple[Layer, ...]:
    ropes = [rope] * len(snapshot.layers) if rope is None or isinstance(rope, Rope) else list(rope)
    if len(ropes) != len(snapshot.layers):
        raise InputError(
            "a rope is given for all layers, or one for each", expected=len(snapshot.layers), found=len(ropes)
        )
    turns = cut.closes and cut.touches
    plans = [
        [(t, _rope_for(t, layer, found) if turns else None) for t in layer.tensors if _is_removable(t, layer)]
        for layer, found in zip(snapshot.layers, ropes, strict=True)
    ]  # everything is looked at before anything is read
    return tuple(
        replace(layer, tensors=tuple(_edited(t, cut, found) for t, found in plan), by_head=())
        for layer, plan in zip(snapshot.layers, plans, strict=True)
    )


def _is_removable(tensor: Tensor, layer: Layer) -> bool:
    """Return True, or raise `UnsupportedError` where the rows of single tokens cannot be taken out of a tensor."""
    spec, name = tensor.spec, f"layer {layer.index}: {tensor.name}"
    if spec.role in _FIXED and spec.growth == "static":
        return True
    if spec.growth == "replaced":
        raise UnsupportedError(f"{name} is a state of all tokens at once: none can be taken out of it again")
    if spec.growth == "window":
        raise UnsupportedError(f"{name} keeps a window of {spec.window} rows, in which those behind it are missing")
    if spec.tokens_per_row != 1:
        raise UnsupportedError(f"{name} has one row for {spec.tokens_per_row} tokens: none can be taken out of it")
    if spec.growth != "grow" or spec.role not in ("k", "rope", *_UNROTATED):
        raise UnsupportedError(f"{name}: rows of the kind {spec.role} cannot be removed")
    return True


def _is_rotated(tensor: Tensor) -> bool:
    return tensor.spec.role in ("k", "rope") and tensor.spec.rope != "none"


def _rope_for(tensor: Tensor, layer: Layer, rope: Rope | None) -> Rope | None:
    """Return how the rows of a tensor are rotated, None where they are not. Raise `UnsupportedError` saying why not."""
    spec, name = tensor.spec, f"layer {layer.index}: {tensor.name}"
    if not _is_rotated(tensor):
        return None
    if spec.rope != "after":
        raise UnsupportedError(
            f"{name} cannot be moved to other positions: how its rows are rotated is not known. Keep their positions "
            '(positions="keep")',
            expected="rope after, or none", found=spec.rope,
        )  # fmt: skip
    if rope is None:
        raise UnsupportedError(
            f"{name} has to be rotated to other positions, and its frequencies are not known: give them "
            '(rope=Rope(inv_freq, pairing)) or the engine (engine=...), or keep positions (positions="keep")'
        )
    if spec.row_axis == len(spec.shape) - 1 or rope.width > spec.shape[-1]:
        raise UnsupportedError(
            f"{name}: the rope given rotates more values than a row has", expected=spec.shape[-1], found=rope.width
        )
    if not spec.dtype.startswith(("float", "bfloat")):
        raise UnsupportedError(f"{name}: codes of the dtype {spec.dtype} cannot be rotated")
    if spec.pairing and spec.pairing != rope.pairing:
        raise UnsupportedError(f"{name}: the rope given pairs other values", expected=spec.pairing, found=rope.pairing)
    return rope


def _edited(tensor: Tensor, cut: _Cut, rope: Rope | None) -> Tensor:
    spec = tensor.spec
    if spec.growth == "static":
        return tensor
    values = np.take(tensor.values(), cut.kept, axis=spec.row_axis)
    touched = cut.back > 0
    if rope is not None and touched.any():
        rows = np.moveaxis(values, spec.row_axis, -2)  # a view
        rows[..., touched, :] = rope.rotated(rows[..., touched, :], -cut.back[touched])
    return Tensor(spec, values, bound=float("inf") if touched.any() else tensor.bound)

"""The values of a cache, layer by layer, in one shape whatever the layer is: float32 `[heads, rows, dim]`.

One tensor is in memory at a time, and of it one block of rows as float32, so a cache larger than memory can be passed
over. Every byte that is handed out was checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.layout import Layer, Snapshot, Tensor, numpy_dtype
from kvsnap.quantised import rows_of, shape_of

__all__ = ["BLOCK_BYTES", "HeadRows", "head_rows", "narrow"]

Floats = npt.NDArray[np.float32]

BLOCK_BYTES = 8 << 20
"""Bytes of float32 values that a block has at most, unless one row has more."""

_STORAGE = ("positions", "code", "scale", "residual", "zero", "other", "overlap", "draft", "logits")
"""Roles that hold no vectors of tokens: how others are stored, numbers of rows, names of an input."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadRows:
    """The vectors of one role of one layer: `n_heads` heads of `n_rows` rows, `dim` values each. Nothing is read yet.

    `role` is that of the tensor (`k`, `v`, `latent`, `rope`, `index`, `cross_k`, ...), of a quantised layer `k` or `v`.
    `first_head` counts the heads of the layer before these (heads of unequal width are several tensors). Row `i` stands
    for the `tokens_per_row` rows of the sequence from `(first_row + i) * tokens_per_row` on, where `grows`; else (a
    state, rows of an encoder) the rows are no tokens of the sequence. `bound` is the largest error that storing may
    have put into a value.
    """

    layer: int
    role: str
    first_head: int
    n_heads: int
    n_rows: int
    dim: int
    first_row: int
    tokens_per_row: int
    grows: bool
    bound: float
    dtype: str
    nbytes: int
    _tensor: Tensor | None = None
    _quantised: Layer | None = None

    @property
    def name(self) -> str:
        """`layer 3 k`: what a table or a message calls it."""
        return f"layer {self.layer} {self.role}"

    def values(self) -> npt.NDArray[Any]:
        """Return all of it as `[heads, rows, dim]` in the dtype of the cache; a view where the tensor is one.

        Reads and checks the tensor; raise `DamagedError` as it does.
        """
        if self._quantised is not None:
            return rows_of(self._quantised, of_values=self.role == "v")
        assert self._tensor is not None  # noqa: S101 # one of the two is there
        return _as_heads(self._tensor)

    def blocks(self, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, Floats]]:
        """Yield (number of the first row in it, float32 `[heads, some rows, dim]`) from the first row to the last."""
        yield from self.blocks_of(((0, self.n_rows),), block_bytes)

    def blocks_of(
        self, spans: Sequence[tuple[int, int]], block_bytes: int = BLOCK_BYTES
    ) -> Iterator[tuple[int, Floats]]:
        """Yield as `blocks` does the rows of these spans alone, which are in order and do not overlap.

        Row 0 is the first one held. What a session stores apart and holds none of these rows is not read; a tensor in
        one piece is read, and checked, as a whole.
        """
        step = max(1, block_bytes // max(1, 4 * self.n_heads * self.dim))
        for at, values, some in self._pieces(spans):
            for start, stop in some:
                for first in range(start, stop, step):
                    yield first, narrow(values[:, first - at : min(first + step, stop) - at])

    def _pieces(
        self, spans: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[int, npt.NDArray[Any], list[tuple[int, int]]]]:
        """Yield what is read at once: number of its first row, values, and the spans that lie in it."""
        tensor, start = self._tensor, 0 if self._tensor is None else self._tensor.start
        if tensor is None or tensor.spec.row_axis < 0:
            yield 0, self.values(), list(spans)
            return
        groups: list[list[tuple[int, int]]] = []
        cut: Tensor | None = None
        for span in spans:
            if cut is not None and span[0] + start < cut.start + cut.n_rows:  # its beginning is read already
                groups[-1].append(span)
            else:
                groups.append([span])
            cut = tensor.between(groups[-1][0][0] + start, span[1] + start)
        for group in groups:
            piece = tensor.between(group[0][0] + start, group[-1][1] + start)
            yield piece.start - start, _as_heads(piece), group

    def row_numbers(self) -> npt.NDArray[np.int64]:
        """Return the row of the sequence that each row begins with, int64 `[n_rows]`; 0, 1, ... where it is none."""
        start = self.first_row if self.grows else 0
        return (start + np.arange(self.n_rows, dtype=np.int64)) * (self.tokens_per_row if self.grows else 1)


def _measures(tensor: Tensor) -> tuple[int, int, int]:
    """Return heads, rows of a head, and values of a row. Said, not left to numpy: of no values it cannot tell."""
    spec, shape = tensor.spec, tensor.shape
    if not shape:
        return 1, 1, 1
    if spec.row_axis >= 0:
        heads = shape[spec.axes.index("head")] if "head" in spec.axes else 1
        other = (n for place, n in enumerate(shape) if place != spec.row_axis and spec.axes[place] != "head")
        return heads, tensor.n_rows, math.prod(other)
    has_heads = spec.axes[0] == "head" and len(shape) > 1
    return (shape[0], math.prod(shape[1:-1]), shape[-1]) if has_heads else (1, math.prod(shape[:-1]), shape[-1])


def _as_heads(tensor: Tensor) -> npt.NDArray[Any]:
    spec, values = tensor.spec, tensor.values()
    if spec.row_axis >= 0:
        names = list(spec.axes)
        values = np.moveaxis(values, spec.row_axis, 0)
        names.insert(0, names.pop(spec.row_axis))
        if "head" in names:
            values = np.moveaxis(values, names.index("head"), 0)
    return values.reshape(_measures(tensor))


def narrow(values: npt.NDArray[Any]) -> Floats:
    """Return values as float32."""
    with np.errstate(over="ignore", invalid="ignore"):  # float64 beyond float32 becomes infinite; a signalling NaN
        return np.asarray(values, dtype=np.float32)


def _of_tensor(layer: Layer, tensor: Tensor, first_head: int) -> HeadRows:
    spec = tensor.spec
    heads, rows, dim = _measures(tensor)
    return HeadRows(
        layer=layer.index, role=spec.role, first_head=first_head, n_heads=heads, n_rows=rows, dim=dim,
        first_row=tensor.start if spec.grows else 0, tokens_per_row=spec.tokens_per_row, grows=spec.grows,
        bound=tensor.bound, dtype=spec.dtype, nbytes=tensor.nbytes, _tensor=tensor,
    )  # fmt: skip


def _of_quantised(snapshot: Snapshot, layer: Layer) -> Iterator[HeadRows]:
    residuals = [t for t in layer.tensors if t.role == "residual"]
    for place, role in enumerate(("k", "v")):
        heads, rows, dim = shape_of(layer, of_values=bool(place))
        dtype = residuals[place].spec.dtype
        yield HeadRows(
            layer=layer.index, role=role, first_head=0, n_heads=heads, n_rows=rows, dim=dim,
            first_row=snapshot.n_rows - rows, tokens_per_row=1, grows=True, bound=layer.tensors[0].bound,
            dtype=dtype, nbytes=heads * rows * dim * numpy_dtype(dtype).itemsize, _quantised=layer,
        )  # fmt: skip


def head_rows(snapshot: Snapshot) -> Iterator[HeadRows]:
    """Yield what each layer holds, in the order of layers and of the tensors in them; a layer that shares is left out.

    It is what a restore would install: what a foreign file keeps beside it for looking at single heads is taken only of
    a layer that has nothing else. Values kept as codes are yielded as the keys and values that they stand for. Integers
    and what holds no vectors (row numbers, scales, names of an input) are left out.
    """
    for layer in snapshot.layers:
        if layer.shares is not None:
            continue
        if layer.quantisation:
            yield from _of_quantised(snapshot, layer)
            continue
        heads: dict[str, int] = {}
        for tensor in layer.tensors or layer.by_head:
            if tensor.role in _STORAGE or tensor.spec.dtype in ("bool", "uint8") or "int" in tensor.spec.dtype:
                continue
            found = _of_tensor(layer, tensor, heads.get(tensor.role, 0))
            heads[tensor.role] = found.first_head + found.n_heads
            yield found

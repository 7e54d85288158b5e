"""What the attention of a model was given: keys, queries, values and weights by layer and head. numpy only.

Rows count the evaluated ids of a sequence from 0, as in a snapshot. `AttentionSnapshot` has the fields of the type of
that name in go-mlx (`dappco.re/go/inference`: NumLayers, NumHeads, SeqLen, HeadDim, NumQueryHeads, Keys, Queries,
Architecture), whose keys and queries are flat lists by layer and head; here they are arrays.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.errors import InputError

__all__ = ["AttentionSnapshot", "HeadFigures", "LayerAttention", "Wanted", "figures_of"]

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is kept of the attention that is looked at.

    `layers` None: all. `last` keeps the queries and weights of so many rows at the end, None: of all. Keys are kept of
    every row that is seen.
    """

    weights: bool = False
    values: bool = False
    layers: tuple[int, ...] | None = None
    last: int | None = None

    @staticmethod
    def of(*, weights: bool, values: bool, layers: Sequence[int] | None, last: int | None) -> Wanted:
        """Check what a caller asks for. Raise `InputError` for what are no numbers, or a `last` below 1."""
        try:
            numbers = None if layers is None else tuple(sorted({operator.index(i) for i in layers}))
            count = None if last is None else operator.index(last)
        except TypeError as error:
            raise InputError("layers are a list of numbers, last is a number", found=error) from error
        if count is not None and count < 1:
            raise InputError("last keeps one row or more", expected="1 or more", found=count)
        if numbers == ():
            raise InputError("no layer is asked for", expected="one or more, or None for all", found="none")
        return Wanted(bool(weights), bool(values), numbers, count)

    def has(self, layer: int) -> bool:
        """Tell whether a layer is asked for."""
        return self.layers is None or layer in self.layers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerAttention:
    """The attention of one layer.

    `keys` is float32 `[heads, rows, dim]` from row `first_row` on, as the model compares them with its queries: rotated
    where it rotates; `values` `[heads, rows, width]`, or None. `queries` is `[query heads, queries, dim]`, of the rows
    `query_rows` (int64); query head `i` looks at key head `i // (query heads / heads)`. `weights` is
    `[query heads, queries, rows]`, or None: what the softmax gave, 0 where a query cannot look. `scaling` is what the
    model multiplies `q . k` by before the softmax.

    `kind` is `attention`, `latent` (keys as they are expanded for each query head; the cache keeps the latent rows),
    `cross` (keys of the encoder), or `none`. Where nothing was kept the arrays are empty, and `missing` says why.
    `window` is the number of rows that a sliding window spans, 0: all. `shares` is the layer whose keys it uses.
    """

    index: int
    kind: str
    keys: Floats
    queries: Floats
    query_rows: npt.NDArray[np.int64]
    values: Floats | None = None
    weights: Floats | None = None
    first_row: int = 0
    scaling: float = 0.0
    window: int = 0
    shares: int | None = None
    missing: str = ""

    @property
    def num_heads(self) -> int:
        return int(self.keys.shape[0])

    @property
    def num_query_heads(self) -> int:
        return int(self.queries.shape[0])

    @property
    def head_dim(self) -> int:
        return int(self.keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in (self.keys, self.queries, self.values, self.weights) if a is not None)

    def key_head(self, query_head: int) -> int:
        """Return the key head that a query head looks at."""
        return query_head // (self.num_query_heads // self.num_heads)


def absent(index: int, kind: str, missing: str, shares: int | None = None) -> LayerAttention:
    """Return a layer of which nothing was kept, with the reason."""
    empty: Floats = np.zeros((0, 0, 0), dtype=np.float32)
    rows = np.zeros(0, dtype=np.int64)
    return LayerAttention(
        index=index, kind=kind, keys=empty, queries=empty, query_rows=rows, missing=missing, shares=shares
    )


@dataclass(frozen=True, slots=True)
class HeadFigures:
    """What the weights of one query head say, as means over its queries.

    `entropy` in bits; `first` the share of the first row, which many heads rest on; `rest` the share that no row gets
    (a learned sink takes it); `distance` how many rows back a query looks; `key_norm` and `query_norm` the lengths of
    the vectors.
    """

    layer: int
    head: int
    key_head: int
    entropy: float
    first: float
    rest: float
    distance: float
    key_norm: float
    query_norm: float

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionSnapshot:
    """Keys and queries of every layer and head for the rows of one sequence.

    `tokens` are the ids of the evaluated rows (fewer than `seq_len` where a foreign file kept the last ones only),
    `positions` int64 `[seq_len]` their positions. `layers[i]` tells what layer i has, `cross` the same of what a
    decoder takes from its encoder (empty for other models). What is told without a layer is that of the first one with
    attention.
    """

    architecture: str
    tokens: tuple[int, ...]
    positions: npt.NDArray[np.int64]
    layers: tuple[LayerAttention, ...]
    cross: tuple[LayerAttention, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def seq_len(self) -> int:
        """Evaluated rows of the sequence."""
        return len(self.positions)

    @property
    def query_rows(self) -> npt.NDArray[np.int64]:
        """The rows whose queries are there, int64."""
        first = self._first()
        return np.zeros(0, dtype=np.int64) if first is None else first.query_rows

    def _first(self) -> LayerAttention | None:
        return next((layer for layer in self.layers if not layer.missing), None)

    @property
    def num_heads(self) -> int:
        """Key heads of the first layer with attention."""
        first = self._first()
        return 0 if first is None else first.num_heads

    @property
    def num_query_heads(self) -> int:
        first = self._first()
        return 0 if first is None else first.num_query_heads

    @property
    def head_dim(self) -> int:
        first = self._first()
        return 0 if first is None else first.head_dim

    @property
    def has_queries(self) -> bool:
        return any(layer.queries.size for layer in self.layers)

    @property
    def has_weights(self) -> bool:
        return any(layer.weights is not None for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(layer.nbytes for layer in (*self.layers, *self.cross))

    def layer(self, layer: int, *, cross: bool = False) -> LayerAttention:
        """Return a layer that was kept. Raise `InputError` for another, with the reason."""
        held = self.cross if cross else self.layers
        if cross and not held:
            raise InputError("this model has no encoder, so there is no cross-attention")
        if not 0 <= layer < len(held):
            raise InputError("no such layer", expected=f"0 to {len(held) - 1}", found=layer)
        if held[layer].missing:
            raise InputError(f"layer {layer} has no attention to show: {held[layer].missing}")
        return held[layer]

    def keys(self, layer: int, head: int, *, cross: bool = False) -> Floats:
        """Return the keys of a key head, float32 `[rows, dim]`, from `layers[layer].first_row` on."""
        return _head(self.layer(layer, cross=cross).keys, head, "key")

    def values(self, layer: int, head: int, *, cross: bool = False) -> Floats:
        """Return the values of a key head, float32 `[rows, width]`. `InputError` where they were not asked for."""
        found = self.layer(layer, cross=cross).values
        if found is None:
            raise InputError("values were not kept", expected="values=True", found="values=False")
        return _head(found, head, "key")

    def queries(self, layer: int, head: int, *, cross: bool = False) -> Floats:
        """Return the queries of a query head, float32 `[queries, dim]`, of `layers[layer].query_rows`."""
        return _head(self.layer(layer, cross=cross).queries, head, "query")

    def weights(self, layer: int, head: int, *, cross: bool = False) -> Floats:
        """Return the weights of a query head, float32 `[queries, rows]`.

        The rows are those of `keys(layer, ...)`. `InputError` where they were not asked for.
        """
        found = self.layer(layer, cross=cross).weights
        if found is None:
            raise InputError("weights were not kept", expected="weights=True", found="weights=False")
        return _head(found, head, "query")

    def figures(self, layer: int, *, cross: bool = False) -> tuple[HeadFigures, ...]:
        """Return what the weights of each query head of a layer say. `InputError` where they were not asked for."""
        found = self.layer(layer, cross=cross)
        if not len(found.query_rows):
            raise InputError(f"layer {layer} has no queries: they were cut with their rows")
        rows = None if cross else found.query_rows - found.first_row
        return tuple(
            figures_of(found, head, self.weights(layer, head, cross=cross), rows)
            for head in range(found.num_query_heads)
        )

    def __repr__(self) -> str:
        return (
            f"AttentionSnapshot({self.architecture or 'unknown'}, layers={self.num_layers}, heads={self.num_heads}, "
            f"query_heads={self.num_query_heads}, head_dim={self.head_dim}, seq_len={self.seq_len}, "
            f"queries={len(self.query_rows)})"
        )


def _head(array: Floats, head: int, what: str) -> Floats:
    if not 0 <= head < len(array):
        raise InputError(f"no such {what} head", expected=f"0 to {len(array) - 1}", found=head)
    found: Floats = array[head]
    return found


def figures_of(layer: LayerAttention, head: int, weights: Floats, rows: npt.NDArray[np.int64] | None) -> HeadFigures:
    """Return what weights `[queries, rows]` of a query head say.

    `rows` are the places of the queries among the keys; None where keys are of another sequence: the distance is 0.
    """
    shares = weights.astype(np.float64)
    logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    distance = 0.0
    if rows is not None:
        back = np.maximum(rows[:, None] - np.arange(shares.shape[1]), 0)
        distance = float((shares * back).sum(axis=1).mean())
    key_head = layer.key_head(head)
    return HeadFigures(
        layer=layer.index,
        head=head,
        key_head=key_head,
        entropy=abs(float(-(shares * logs).sum(axis=1).mean())),
        first=float(shares[:, 0].mean()) if layer.first_row == 0 else 0.0,
        rest=max(0.0, float(1 - shares.sum(axis=1).mean())),
        distance=distance,
        key_norm=_norm(layer.keys[key_head]),
        query_norm=_norm(layer.queries[head]),
    )


def _norm(vectors: Floats) -> float:
    return float(np.sqrt(np.square(vectors, dtype=np.float64).sum(axis=-1)).mean())

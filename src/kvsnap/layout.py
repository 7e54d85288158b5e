"""The model of a cache: tensors, layers, snapshots, heads. numpy views only; no I/O, no engine types.

Counts: `tokens` are all ids seen; `n_rows` counts the positions evaluated; `pending` are the stored ids behind the last
evaluated one; `token_offset` is the position that is evaluated next. Stored logits belong to `token_offset - 1`.
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvsnap.errors import InputError
from kvsnap.identity import Identity
from kvsnap.quantised import rows_of
from kvsnap.reach import Ends, Reach, Stop
from kvsnap.runs import PositionRun, Run, RunKind, cut_positions, cut_runs, join_positions, join_runs
from kvsnap.tensors import (
    DTYPES,
    ROLES,
    EncoderInput,
    Layer,
    Shard,
    Source,
    Tensor,
    TensorSpec,
    dtype_name,
    encoder_input_of,
    numpy_dtype,
)

if TYPE_CHECKING:
    import os

__all__ = [
    "CUT_OFF",
    "DTYPES",
    "ROLES",
    "UNFINISHED",
    "EncoderInput",
    "Head",
    "Layer",
    "PositionRun",
    "RandomState",
    "Reach",
    "Run",
    "RunKind",
    "Sampler",
    "SamplerState",
    "Shard",
    "Snapshot",
    "Source",
    "Tensor",
    "TensorSpec",
    "cut_positions",
    "cut_runs",
    "dtype_name",
    "join_positions",
    "join_runs",
    "numpy_dtype",
]  # fmt: skip # by meaning

UNFINISHED = "unfinished"
CUT_OFF = frozenset({"length", "context", "interrupted", UNFINISHED})
"""What `stop` in the metadata says of an answer that its model did not end; `unfinished`: published on the way."""


def _number(name: str, value: Any) -> float:
    number = float("nan")
    if not isinstance(value, bool) and isinstance(value, Real):
        with suppress(OverflowError):  # a Python integer may be larger than any float
            number = float(value)
    if not math.isfinite(number):
        found = reprlib.repr(value)
        raise InputError(f"sampler setting {name} is not a number", expected="a finite number", found=found)
    return number


def _integer(name: str, value: Any, *, optional: bool) -> int | None:
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"sampler setting {name} is not a whole number", expected="an integer", found=repr(value))
    return int(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """How the next token is chosen. Applied in the order of the fields; `temperature` 0 takes the most probable token.

    `top_k` 0, `top_p` 1.0, `min_p` 0.0 and `repetition_penalty` 1.0 switch the step off. `seed` starts the random
    numbers; None takes a seed from the operating system, which is then recorded.
    """

    repetition_penalty: float = 1.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("repetition_penalty", "temperature", "top_p", "min_p"):
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        for name in ("top_k", "seed"):
            object.__setattr__(self, name, _integer(name, getattr(self, name), optional=name == "seed"))
        rules = (
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "above 0, finite"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 or above"),
            ("top_k", 0 <= self.top_k <= 2**31, "from 0 to 2**31"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("seed", self.seed is None or 0 <= self.seed < 2**64, "None or from 0 to 2**64 - 1"),
        )
        for name, holds, expected in rules:
            if not holds:
                raise InputError(
                    f"sampler setting {name} is out of range", expected=expected, found=getattr(self, name)
                )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class RandomState:
    """State of the random numbers of a sampler: algorithm, key and how many numbers were drawn."""

    seed: int
    draws: int = 0
    algorithm: str = "philox4x64"


@dataclass(frozen=True, slots=True)
class SamplerState:
    """The settings of a sampler and where its random numbers stand."""

    settings: Sampler
    random: RandomState


@dataclass(frozen=True, slots=True)
class Head:
    """Keys and values of one head, post-RoPE in the model's own order.

    `k` and `v` are float32 `[seq, dim]`, `positions` int64 `[seq]`; of a row that stands for several positions the
    first one. A latent layer answers as one head: `k` the latent rows, `v` the rope rows, as stored.
    """

    k: npt.NDArray[np.float32]
    v: npt.NDArray[np.float32]
    positions: npt.NDArray[np.int64]

    def _repr_html_(self) -> str | None:
        return _html(self)


_hooks: dict[str, Callable[..., Any]] = {}


def set_save(function: Callable[..., Any]) -> None:
    """Tell `Snapshot.save` what to call; only the modules above this one know the formats."""
    _hooks["save"] = function


def set_html(function: Callable[[Any], str]) -> None:
    """Tell what makes HTML of a snapshot or a head for notebooks; only modules above this one know of tables."""
    _hooks["html"] = function


def _html(shown: Any) -> str | None:
    return str(_hooks["html"](shown)) if "html" in _hooks else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """A capture of one sequence. A *partial* one (`row_start` above 0) holds only the rows from there on.

    `tokens` are all ids seen, `runs` tell which were prompt and which generated. `logits` (`[vocab]`, in the dtype of
    the model) belong to the last evaluated position. `metadata` is the user's. `source` keeps what a foreign file said.
    `shard` tells which part of a whole this is; None: it is whole. `messages` are those of the chat that the tokens
    are of, each with a text `role`, and else what the caller put there, as JSON can hold it; None: not known.
    `draft` holds the state of a draft model that proposed ids for this one, as the bytes of a file of its own
    (`kvsnap.draft_of` opens it).
    """

    architecture: str = ""
    layers: tuple[Layer, ...] = ()
    tokens: tuple[int, ...] = ()
    runs: tuple[Run, ...] = ()
    n_rows: int = 0
    row_start: int = 0
    n_pending: int = 0
    token_offset: int = 0
    positions: tuple[PositionRun, ...] = ()
    logits: Tensor | None = None
    sampler: SamplerState | None = None
    identity: Identity = field(default_factory=Identity)
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    shard: Shard | None = None
    draft: Tensor | None = None

    def _repr_html_(self) -> str | None:
        return _html(self)

    @property
    def pending(self) -> tuple[int, ...]:
        """Ids that are stored but not evaluated yet."""
        return self.tokens[len(self.tokens) - self.n_pending :]

    @property
    def generated(self) -> tuple[int, ...]:
        """The trailing run of generated tokens; empty when the last tokens were prompt."""
        if not self.runs or self.runs[-1].kind != "generated":
            return ()
        return self.tokens[len(self.tokens) - self.runs[-1].count :]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def _first_attention(self) -> Layer | None:
        return next((layer for layer in self.layers if layer.head_dim), None)

    @property
    def num_heads(self) -> int:
        """Key/value heads of the first attention layer; `layers[i].num_heads` tells each."""
        layer = self._first_attention()
        return 0 if layer is None else layer.num_heads

    @property
    def num_query_heads(self) -> int:
        layer = self._first_attention()
        return 0 if layer is None else layer.num_query_heads

    @property
    def head_dim(self) -> int:
        layer = self._first_attention()
        return 0 if layer is None else layer.head_dim

    @property
    def seq_len(self) -> int:
        """Rows held by the first attention layer (fewer than `n_rows` in a window or a partial capture)."""
        layer = self._first_attention()
        keys = None if layer is None else layer.tensor("k") or layer.tensor("latent")
        return self.n_rows if keys is None else keys.n_rows

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, decoded."""
        return sum(t.nbytes for t in [*self.tensors(), *self.loose()])

    @property
    def bound(self) -> float:
        """Largest absolute error that storing may have put into any value; 0: exactly what the engine held."""
        return max((t.bound for t in self.tensors()), default=0.0)

    @property
    def encoder_input(self) -> EncoderInput | None:
        """The name of the input that an encoder-decoder was given, None for other models. Reads two small tensors."""
        return encoder_input_of(self.layers)

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor of every layer, in layer order (logits and draft are apart)."""
        for layer in self.layers:
            yield from layer.tensors

    def loose(self) -> tuple[Tensor, ...]:
        """Return the tensors that belong to no layer: logits, and the draft."""
        return tuple(t for t in (self.logits, self.draft) if t is not None)

    def row_positions(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the positions of the rows `[start, stop)` as int64."""
        if not self.positions:
            return np.arange(max(0, start), min(stop, self.n_rows), dtype=np.int64)
        pieces, at = [np.zeros(0, dtype=np.int64)], 0
        for r in self.positions:
            first, last = max(start, at), min(stop, at + r.count)
            if first < last:
                pieces.append(np.arange(r.start + first - at, r.start + last - at, dtype=np.int64))
            at += r.count
        return np.concatenate(pieces)

    def positions_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the positions of rows by number, int64; they are apart where one row stands for many positions."""
        if not self.positions:
            return rows
        stops = np.cumsum([run.count for run in self.positions], dtype=np.int64)
        moved = np.array([run.start for run in self.positions], dtype=np.int64) - np.append(0, stops[:-1])
        inside = rows[rows < stops[-1]]
        found: npt.NDArray[np.int64] = inside + moved[np.searchsorted(stops, inside, side="right")]
        return found

    def head(self, layer: int, head: int) -> Head | None:
        """Return keys and values of one head as float32 copies, or None where the layer has no such head.

        Of a quantised layer they are computed from its codes, as the layer itself does at its next pass.

        Raise `InputError` for a layer number outside the model.
        """
        if not 0 <= layer < len(self.layers):
            raise InputError("no such layer", expected=f"0 to {len(self.layers) - 1}", found=layer)
        entry = self.layers[layer]
        if entry.shares is not None:
            return self.head(entry.shares, head)
        if entry.quantisation:
            return self._quantised_head(entry, head)
        keys = entry.tensor_of_head("k", head) or entry.tensor_of_head("latent", head)
        values = entry.tensor_of_head("v", head) or entry.tensor_of_head("rope", head)
        if keys is None or values is None or not keys[0].spec.shape[-1]:
            return None
        rows = np.arange(keys[0].start, keys[0].start + keys[0].n_rows, dtype=np.int64) * keys[0].spec.tokens_per_row
        positions = self.positions_of(rows)
        return Head(_head_rows(*keys), _head_rows(*values), positions)

    def _quantised_head(self, entry: Layer, head: int) -> Head | None:
        if not 0 <= head < entry.num_heads:
            return None
        keys, values = (
            np.array(rows_of(entry, of_values=of_values, keep=True)[head], dtype=np.float32)
            for of_values in (False, True)
        )
        return Head(keys, values, self.row_positions(self.n_rows - len(keys), self.n_rows))

    def _ends(self) -> Ends:
        tensors = {t.spec.id: t for t in self.tensors()}
        return Ends(
            [t.spec for t in tensors.values()],
            (Stop(len(self.tokens), self.n_rows, state=True),),
            lambda _, spec: (tensors[spec.id].start, tensors[spec.id].start + tensors[spec.id].n_rows),
            unstored=self.n_rows + self.n_pending - len(self.tokens), first_row=self.row_start, rows_alone=True,
        )  # fmt: skip

    def reach(self, n_tokens: int) -> Reach:
        """Return what `truncate` to `n_tokens` tokens would keep, or to the nearest length below that can be reached.

        No tensor is read. Raise `InputError` outside 0..len(tokens).
        """
        self._check_length(n_tokens)
        return self._ends().reach(n_tokens, lambda n: not n or self.bound == 0)

    def _check_length(self, n_tokens: int) -> None:
        if not 0 <= n_tokens <= len(self.tokens):
            raise InputError("cannot truncate to this length", expected=f"0 to {len(self.tokens)}", found=n_tokens)

    def truncate(self, n_tokens: int) -> Snapshot:
        """Return the first `n_tokens` tokens as a snapshot of its own (views, nothing is copied).

        Logits are kept only when no row is cut, sampler and draft only when nothing is. 0 leaves a snapshot without
        rows and without what is replaced. Raise `InputError` outside 0..len(tokens), and before the rows of a partial
        capture; `UnsupportedError` that says which layers cannot be cut there, and names the nearest lengths below and
        above that can be reached.
        """
        self._check_length(n_tokens)
        if n_tokens == len(self.tokens):
            return self
        ends = self._ends()
        n_rows = ends.rows_at(n_tokens)
        if n_tokens and n_rows < self.row_start:
            raise InputError(
                "a partial capture does not hold these rows", expected=f"{self.row_start} or above", found=n_rows
            )
        ends.check(n_tokens)
        cut_rows = n_rows != self.n_rows or not n_tokens
        layers = tuple(_cut_layer(layer, n_rows) for layer in self.layers) if cut_rows else self.layers
        positions = cut_positions(self.positions, n_rows)
        return replace(
            self,
            layers=layers,
            tokens=self.tokens[:n_tokens],
            runs=cut_runs(self.runs, n_tokens),
            n_rows=n_rows,
            row_start=min(self.row_start, n_rows),
            n_pending=n_tokens + ends.unstored - n_rows if n_tokens else 0,
            token_offset=(positions[-1].start + positions[-1].count if positions else n_rows)
            if cut_rows
            else self.token_offset,
            positions=positions,
            logits=None if cut_rows else self.logits,
            sampler=None,  # its random numbers stand where the last token was drawn
            text=None,
            messages=None,
            shard=None if self.shard is None else self.shard.unproven(),
            draft=None,  # it may hold what is cut away here
        )

    def save(self, path: str | os.PathLike[str], **options: Any) -> Any:
        """Save to `path`; the same as `kvsnap.save(snapshot, path, **options)`."""
        if "save" not in _hooks:
            # The package loads its functions with the first name that is used, which may not have happened yet.
            _ = sys.modules[__name__.partition(".")[0]].save
        return _hooks["save"](self, path, **options)

    def __repr__(self) -> str:
        return (
            f"Snapshot({self.architecture or 'unknown'}, layers={self.num_layers}, heads={self.num_heads}, "
            f"head_dim={self.head_dim}, tokens={len(self.tokens)}, n_rows={self.n_rows}, pending={self.n_pending}, "
            f"nbytes={self.nbytes})"
        )


def _head_rows(tensor: Tensor, head: int) -> npt.NDArray[np.float32]:
    values = np.moveaxis(tensor.array, tensor.spec.row_axis, 0)
    if "head" in tensor.spec.axes:
        names = [axis for place, axis in enumerate(tensor.spec.axes) if place != tensor.spec.row_axis]
        values = np.take(values, head, axis=1 + names.index("head"))
    return np.array(values, dtype=np.float32, order="C")


def _cut_layer(layer: Layer, n_rows: int) -> Layer:
    """Return a layer with fewer rows; what is replaced is not there any more, static tensors stay."""
    kept = (t for t in layer.tensors if t.spec.growth != "replaced")
    return replace(
        layer, tensors=tuple(_cut(t, n_rows) for t in kept), by_head=tuple(_cut(t, n_rows) for t in layer.by_head)
    )


def _cut(tensor: Tensor, n_rows: int) -> Tensor:
    spec = tensor.spec
    if not spec.grows:
        return tensor
    stop = n_rows // spec.tokens_per_row
    if stop < tensor.start:  # a window of 1 needs no rows, and nothing holds those of the empty history
        return Tensor(spec, np.zeros(spec.shape, dtype=numpy_dtype(spec.dtype)), start=stop)
    return tensor.rows(tensor.start, min(stop, tensor.start + tensor.n_rows))

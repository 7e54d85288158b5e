"""Dtypes, tensors and layers of a cache. numpy views only; no I/O, no engine types. Users import them from `layout`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Literal, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvsnap.errors import FormatError, InputError, UnsupportedError

Array = npt.NDArray[Any]

DTYPES: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float64": np.dtype("<f8"),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype("i1"),
    "uint8": np.dtype("u1"),
    "int16": np.dtype("<i2"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "bool": np.dtype("?"),
}
"""Our dtype names and the little-endian numpy dtype of each."""

ROLES = (
    "k", "v", "latent", "rope", "index", "conv", "recurrent", "cross_k", "cross_v", "draft_k", "draft_v", "logits",
    "positions", "code", "scale", "residual", "other", "compressed", "buffer", "overlap", "zero",
    "draft",
)  # fmt: skip
OF_NO_LAYER = ("logits", "draft")
"""Roles of what is replaced at each commit and belongs to no layer: a history goes on without them."""
LAYER_KINDS = ("attention", "latent", "recurrent", "hybrid", "cross", "none")
Growth = Literal["grow", "window", "replaced", "static"]
RopeState = Literal["none", "before", "after", "unknown"]
Pairing = Literal["", "half", "interleaved"]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of one of our dtype names; raise `UnsupportedError` for another name."""
    if name not in DTYPES:
        raise UnsupportedError(f"dtype {name!r} is not known", expected=", ".join(DTYPES), found=name)
    return DTYPES[name]


def dtype_name(dtype: npt.DTypeLike) -> str:
    """Return our name of a numpy dtype; raise `UnsupportedError` where there is none."""
    wanted = np.dtype(dtype)
    for name, known in DTYPES.items():
        if known == wanted:
            return name
    raise UnsupportedError(f"dtype {wanted} has no name here", expected=", ".join(DTYPES), found=wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What is constant about one tensor of a cache while it grows.

    `shape` has 0 at `row_axis` (the axis that grows, or whose length may differ from commit to commit); `row_axis` is
    -1 where no axis does. A tensor that grows has one row for every `tokens_per_row` positions. `growth` is `grow`
    (rows are added), `window` (rows are added, old ones may be dropped), `replaced` (new at every commit) or `static`.
    """

    id: int
    name: str
    layer: int
    role: str
    dtype: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    growth: Growth = "grow"
    row_axis: int = -1
    tokens_per_row: int = 1
    window: int = 0
    rope: RopeState = "unknown"
    pairing: Pairing = ""

    @property
    def grows(self) -> bool:
        return self.growth in ("grow", "window")

    def shape_with(self, n_rows: int) -> tuple[int, ...]:
        """Return the full shape with `n_rows` at the row axis."""
        return tuple(n_rows if axis == self.row_axis else size for axis, size in enumerate(self.shape))

    def nbytes(self, n_rows: int) -> int:
        """Return the number of bytes of `n_rows` rows, as a Python integer that cannot overflow."""
        total = numpy_dtype(self.dtype).itemsize
        for size in self.shape_with(n_rows):
            total *= size
        return total


class Source(Protocol):
    """Where the bytes of a tensor come from when they are not in memory yet."""

    def array(self) -> Array:
        """Return the whole tensor as a read-only array.

        Checked before it is handed out; may be a view of a mapped file.
        """

    def read_into(self, out: Array) -> None:
        """Fill `out` (same shape and dtype).

        Raise `DamagedError` if a byte differs from what was written; `out` is then undefined, and the caller drops it.
        """


class Tensor:
    """One tensor of a cache: its spec, the first row it holds, and its values (in memory, or behind a `Source`).

    `start` is the row number of the first row held: above 0 in a partial capture and in a window. `bound` is the
    largest absolute error that storing may have put into a value; 0 means exactly what the engine held.
    """

    __slots__ = ("_array", "_values", "bound", "n_rows", "spec", "start")

    def __init__(
        self,
        spec: TensorSpec,
        values: Array | Source,
        *,
        start: int = 0,
        n_rows: int | None = None,
        bound: float = 0.0,
    ) -> None:
        self.spec = spec
        self.start = start
        self.bound = bound
        self._array: Array | None = None
        self._values: Source
        if isinstance(values, np.ndarray):
            self.n_rows = values.shape[spec.row_axis] if spec.row_axis >= 0 else 1
            self._check(values)
            self._array = values
        else:
            if n_rows is None:
                raise InputError(f"tensor {spec.name}: a source needs n_rows")
            self.n_rows = n_rows
            self._values = values

    def _check(self, values: Array) -> None:
        expected = self.spec.shape_with(self.n_rows)
        if values.shape != expected or values.dtype != numpy_dtype(self.spec.dtype):
            raise InputError(
                f"tensor {self.spec.name} does not fit its description",
                expected=f"{self.spec.dtype}{list(expected)}",
                found=f"{values.dtype}{list(values.shape)}",
            )

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def role(self) -> str:
        return self.spec.role

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape_with(self.n_rows)

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes(self.n_rows)

    @property
    def array(self) -> Array:
        """The values, read-only where they come from a file. The first access reads and checks them."""
        if self._array is None:
            self._array = self._values.array()
        return self._array

    def values(self) -> Array:
        """Return the values without keeping them: for a pass over tensors that are larger than memory together."""
        return self._values.array() if self._array is None else self._array

    @property
    def source(self) -> Source:
        """Where the bytes come from. Only a tensor that was made from a source has one."""
        return self._values

    @property
    def batch(self) -> Batch | None:
        """What reads this tensor together with others, when it is not in memory yet."""
        return None if self._array is not None else getattr(self._values, "batch", None)

    def read_into(self, out: Array) -> None:
        """Copy the values into `out` (same shape and dtype), checked on the way without an intermediate copy."""
        if out.shape != self.shape or out.dtype != numpy_dtype(self.spec.dtype):
            raise InputError(
                f"tensor {self.name}: the array given does not fit",
                expected=f"{self.spec.dtype}{list(self.shape)}",
                found=f"{out.dtype}{list(out.shape)}",
            )
        if self._array is None:
            self._values.read_into(out)
        else:
            np.copyto(out, self._array)

    def since(self, row: int) -> Tensor:
        """Return the tensor without rows before `row`, as far as they are stored apart: what is not needed is not read.

        It may begin before `row`, and is the tensor itself where its values are in memory or in one piece.
        """
        cut = getattr(self._values, "since", None) if self._array is None else None
        if cut is None:
            return self
        source, start, n_rows = cut(row)
        return Tensor(self.spec, source, start=start, n_rows=n_rows, bound=self.bound)

    def between(self, start: int, stop: int) -> Tensor:
        """Return the tensor without what is stored apart and holds no row of `[start, stop)`, as `since` does."""
        cut = getattr(self._values, "between", None) if self._array is None else None
        if cut is None:
            return self
        source, first, n_rows = cut(start, stop)
        return Tensor(self.spec, source, start=first, n_rows=n_rows, bound=self.bound)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the rows `[start, stop)` as a view. `start` and `stop` count as `self.start` does."""
        if not self.start <= start <= stop <= self.start + self.n_rows:
            raise InputError(
                f"tensor {self.name} does not hold these rows",
                expected=f"within [{self.start}, {self.start + self.n_rows})",
                found=f"[{start}, {stop})",
            )
        if start == self.start and stop == self.start + self.n_rows:
            return self
        index: list[slice] = [slice(None)] * len(self.spec.shape)
        index[self.spec.row_axis] = slice(start - self.start, stop - self.start)
        return Tensor(self.spec, self.array[tuple(index)], start=start, bound=self.bound)

    def __repr__(self) -> str:
        return f"Tensor({self.name}, {self.spec.dtype}{list(self.shape)}, start={self.start})"


class Batch(Protocol):
    """Sources that are read better together than one by one."""

    def read_many(self, pairs: Sequence[tuple[Source, Array]], progress: Callable[[int], None] | None = None) -> None:
        """Fill each array from its source, checked; `progress` is told the bytes as they are done."""


def read_all(
    pairs: Sequence[tuple[Tensor, Array]], *, workers: int = 2, progress: Callable[[int, int], None] | None = None
) -> None:
    """Fill each array from its tensor (same shape and dtype), with `workers` threads; every byte is checked.

    Raise `DamagedError`; the arrays are then undefined, and the caller drops them. `progress` is called with
    (done, total) bytes.
    """
    total, done, lock = sum(tensor.nbytes for tensor, _ in pairs), [0], Lock()

    def advance(count: int) -> None:
        if progress is not None:
            with lock:
                done[0] += count
                progress(done[0], total)

    def read(group: Sequence[tuple[Tensor, Array]]) -> None:
        batch = group[0][0].batch
        if batch is not None:
            batch.read_many([(tensor.source, out) for tensor, out in group], advance)
            return
        for tensor, out in group:
            tensor.read_into(out)
            advance(tensor.nbytes)

    jobs: list[list[tuple[Tensor, Array]]] = [[pair] for pair in pairs if pair[0].batch is None]
    together = [pair for pair in pairs if pair[0].batch is not None]
    share = -(-len(together) // max(1, workers))
    jobs += [together[at : at + share] for at in range(0, len(together), max(1, share))]
    if workers < 2 or len(jobs) < 2:
        for group in jobs:
            read(group)
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="kvsnap-read") as pool:
        futures = [pool.submit(read, group) for group in jobs]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:  # after the first failure the rest need not be read
                future.cancel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of the model and the tensors of its cache.

    `kind` is `attention`, `latent`, `recurrent`, `hybrid`, `cross` or `none`; `shares` is the layer whose tensors this
    one uses (None: its own). Ragged heads are several tensors of one role, each with the next heads. `by_head` holds
    what a foreign file keeps beside the tensors for looking at single heads; it is neither restored nor saved.
    `quantisation` is how keys and values are kept as codes, as canonical JSON; "" where they are not.
    """

    index: int
    kind: str
    tensors: tuple[Tensor, ...]
    num_query_heads: int = 0
    shares: int | None = None
    by_head: tuple[Tensor, ...] = ()
    quantisation: str = ""

    def tensor(self, role: str) -> Tensor | None:
        """Return the (first) tensor of that role, or None."""
        return next((t for t in self.tensors if t.role == role), None)

    def tensor_of_head(self, role: str, head: int) -> tuple[Tensor, int] | None:
        """Return the tensor that holds a head of that role, and the place of the head in it; None where there is none.

        Looks into `by_head` where it has anything, else into `tensors`.
        """
        if head < 0:
            return None
        for t in self.by_head or self.tensors:
            if t.role == role:
                n_heads = _heads_of(t)
                if head < n_heads:
                    return t, head
                head -= n_heads
        return None

    @property
    def num_heads(self) -> int:
        """Key/value heads; 1 for a latent layer, 0 for a layer without attention."""
        if any(t.role == "k" for t in self.tensors):
            return sum(_heads_of(t) for t in self.tensors if t.role == "k")
        residual = self.tensor("residual") if self.quantisation else None
        if residual is not None:
            return _heads_of(residual)
        return 1 if self.tensor("latent") is not None else 0

    @property
    def head_dim(self) -> int:
        """Width of one key row; the latent width for a latent layer."""
        k = self.tensor("k") or self.tensor("latent") or (self.tensor("residual") if self.quantisation else None)
        return 0 if k is None else int(k.spec.shape[-1])

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Which part of a whole a snapshot is: that of rank `index` of `count` ranks, which share the heads out.

    `heads` names each tensor that is divided: its id, and the heads that it has in the whole; all other tensors are the
    same in each shard. `parts` are the digests of all `count` shards of the snapshot that was split, in order, as 32
    hex digits each, and `starts` the first row of each of its window tensors (id, row). Both are empty where a shard
    was cut since: what it was a part of is then not known.
    """

    index: int
    count: int
    heads: tuple[tuple[int, int], ...] = ()
    parts: tuple[str, ...] = ()
    starts: tuple[tuple[int, int], ...] = ()

    def span(self, heads: int) -> tuple[int, int]:
        """Return the heads `[first, stop)` of a tensor with `heads` heads that this rank holds.

        Neighbours stay together. A tensor with fewer heads than ranks has each of them on `count / heads` ranks.
        """
        if heads % self.count == 0:
            width = heads // self.count
            return self.index * width, (self.index + 1) * width
        first = self.index * heads // self.count
        return first, first + 1

    def divides(self, heads: int) -> bool:
        """Tell whether so many heads can be shared out among the ranks."""
        return heads % self.count == 0 or (heads > 0 and self.count % heads == 0)

    def unproven(self) -> Shard:
        """Return what stays true of a shard whose rows were cut or added to."""
        return replace(self, parts=(), starts=())

    def __str__(self) -> str:
        return f"shard {self.index} of {self.count}"


def _heads_of(tensor: Tensor) -> int:
    spec = tensor.spec
    return int(spec.shape[spec.axes.index("head")]) if "head" in spec.axes else 1


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """The name of what an encoder-decoder was given: its ids (() where it was no text), and a digest of all of it.

    The digest is the XXH3-128 of names, dtypes, shapes and values, 16 bytes. Both are empty where a cache was taken
    over and nobody said what it was made of.
    """

    tokens: tuple[int, ...] = ()
    digest: bytes = b""

    def __str__(self) -> str:
        what = f"{len(self.tokens)} ids" if self.tokens else "features"
        return f"{what}, digest {self.digest.hex()}" if self.digest else "not known"


INPUT_NAMES = ("encoder.tokens", "encoder.digest")
"""Names of the tensors of the first layer that hold it: int64 `[ids]` and uint8 `[bytes]`, role `other`, `static`."""


def encoder_input_of(layers: Sequence[Layer]) -> EncoderInput | None:
    """Return the name of the input that layers belong to, None without one.

    Raise `FormatError` where it is not one, and what the tensors raise when they are damaged.
    """
    if not layers:
        return None
    own = {t.name: t for t in layers[0].tensors if t.role == "other" and t.name in INPUT_NAMES}
    if len(own) != len(INPUT_NAMES):
        return None
    tokens, digest = (own[name] for name in INPUT_NAMES)
    for tensor, dtype, lengths in ((tokens, "int64", range(1 << 40)), (digest, "uint8", (0, 16))):
        if tensor.spec.dtype != dtype or len(tensor.shape) != 1 or tensor.shape[0] not in lengths:
            raise FormatError(
                f"{tensor.name} does not name an input", expected=f"{dtype} in one axis",
                found=f"{tensor.spec.dtype}{list(tensor.shape)}",
            )  # fmt: skip
    return EncoderInput(tuple(tokens.array.tolist()), digest.array.tobytes())

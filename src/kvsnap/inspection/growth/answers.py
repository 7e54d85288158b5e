"""How a cache grows: bytes per token, by layer and by kind, and what it holds at any length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvsnap import codecs
from kvsnap.errors import InputError
from kvsnap.results import Result, Table, table_of
from kvsnap.tensors import TensorSpec

__all__ = [
    "LENGTHS", "Checked", "Growth", "GrowthPoint", "LayerGrowth", "TensorGrowth", "TurnGrowth", "kind_of", "points_of",
    "what_of",
]  # fmt: skip

LENGTHS = (1024, 8192, 32768, 131072)
"""Lengths in tokens that are looked at where none are named."""
LONGEST = 1 << 40
"""No length beyond is looked at; a cache that fits there fits at any length."""

_STATES = ("conv", "recurrent")
_ALIGNED, _ENTRY, _ID = 64, 64, 4  # of a part, of its line in the table (both spec section 7), of a token


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGrowth:
    """One tensor of a layer, as a rule for its size.

    `kind` is `full`, `window`, `latent`, `index`, `compressed`, `state`, `cross`, `codes` or `other`. A row stands for
    `tokens_per_row` positions. Of a tensor that is replaced, `held` tells how many rows there are: `rest`, the
    positions behind the last whole group of `group`; `last`, those of that group; `codes`, one for `group` values, of
    which each position has `values`; "", always `fixed_rows`.
    """

    kind: str
    spec: TensorSpec
    group: int = 0
    held: Literal["", "rest", "last", "codes"] = ""
    values: int = 0
    fixed_rows: int = 0

    @property
    def role(self) -> str:
        return self.spec.role

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; 0 where no axis varies."""
        return self.spec.nbytes(1) if self.spec.row_axis >= 0 else 0

    def rows(self, n: int) -> int:
        """Return the rows that are there between two passes, when `n` positions were evaluated."""
        if self.held == "rest":
            return n % self.group
        if self.held == "last":
            return self.group if n >= self.group else 0
        if self.held == "codes":
            return -(-n * self.values // self.group)
        if self.spec.grows and self.spec.window:
            return min(n, self.spec.window - 1) // self.spec.tokens_per_row
        return n // self.spec.tokens_per_row if self.spec.grows else self.fixed_rows

    def most_rows(self, n: int) -> int:
        """Return the rows at the most at `n` positions or any number below: a window that kept all that it was handed.

        A session on disk keeps them, and so does a live window that records what it passes by.
        """
        if self.held == "rest":
            return min(n, self.group - 1)
        return n // self.spec.tokens_per_row if self.spec.grows else self.rows(n)

    def nbytes(self, n: int) -> int:
        """Return the bytes at `n` positions."""
        return self.spec.nbytes(self.rows(n)) if n or self.spec.growth == "static" else 0

    def most_bytes(self, n: int) -> int:
        """Return the bytes of `most_rows`."""
        return self.spec.nbytes(self.most_rows(n)) if n or self.spec.growth == "static" else 0

    def per_token(self, n: int) -> float:
        """Return the bytes that a further token adds at `n` positions, on average over a group."""
        if self.held == "codes":
            return self.row_bytes * self.values / self.group
        if not self.spec.grows or (self.spec.window and n >= self.spec.window - 1):
            return 0.0
        return self.row_bytes / self.spec.tokens_per_row


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGrowth:
    """One layer: `kind` as in `Layer`, and `what` it keeps, in words (`full`, `window 4096`, `latent + index` ...).

    `shares` is the layer whose rows it uses instead of any of its own.
    """

    index: int
    kind: str
    what: str
    tensors: tuple[TensorGrowth, ...]
    shares: int | None = None

    def nbytes(self, n: int) -> int:
        """Return the bytes of the layer at `n` positions."""
        return sum(tensor.nbytes(n) for tensor in self.tensors)

    def per_token(self, n: int) -> float:
        """Return the bytes that a further token adds at `n` positions."""
        return sum(tensor.per_token(n) for tensor in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthPoint:
    """A cache of one sequence at one length.

    `cache_bytes` is what is live between two passes, and what a snapshot of it holds; `kept_bytes` what a session
    holds that was handed every row, those that windows drop later included. `bytes_per_token` is what the next token
    adds to `cache_bytes` (`kept_per_token` to the other). `by_kind` shares `cache_bytes` out among the kinds of
    tensors. `stored` is what a snapshot in one piece takes on disk under each codec: parts, their lines in its table,
    and the ids. Identity, layout, logits and text come on top, and do not grow.
    """

    n_tokens: int
    cache_bytes: int
    kept_bytes: int
    bytes_per_token: float
    kept_per_token: float
    by_kind: Mapping[str, int]
    stored: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnGrowth:
    """A session behind one of its commits: tokens and rows of the history, and the length of the file there."""

    commit: int
    operation: str
    n_tokens: int
    n_rows: int
    file_bytes: int
    time_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What figures were compared with: `against` says what, at `n_tokens` evaluated positions, over all layers.

    `predicted` bytes were expected, or up to `most` where windows kept more than they need; there were `actual` ones.
    `faults` names each tensor that is another than expected.
    """

    against: str
    n_tokens: int
    layers: int
    tensors: int
    predicted: int
    most: int
    actual: int
    faults: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True when every tensor is as expected."""
        return not self.faults

    @property
    def off(self) -> int:
        """Bytes that there are too many, or (negative) too few; 0 when all is as expected."""
        return self.actual - min(max(self.actual, self.predicted), self.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth(Result):
    """How a cache grows with the length of its sequence.

    `source` names what it was derived from, `source_kind` is `configuration`, `file`, `snapshot` or `engine`. `dtype`
    is that of the rows. `context_limit` is the length that the model is made for, None where it is not known.
    `encoder_rows` is the length of the encoder's input that cross-attention is counted with. `points` are the lengths
    that were asked for; `at` tells any other. `history` are the commits of a session. `notes` say what was assumed.
    """

    source: str
    source_kind: str
    architecture: str
    dtype: str
    layers: tuple[LayerGrowth, ...]
    points: tuple[GrowthPoint, ...] = ()
    context_limit: int | None = None
    encoder_rows: int | None = None
    history: tuple[TurnGrowth, ...] = ()
    checked: tuple[Checked, ...] = ()
    notes: tuple[str, ...] = ()

    def nbytes(self, n: int) -> int:
        """Return the bytes of the live cache at `n` positions."""
        return sum(layer.nbytes(n) for layer in self.layers)

    def at(self, n: int) -> GrowthPoint:
        """Return the figures at `n` positions. Raise `InputError` for a length below 0 or beyond 2**40."""
        return points_of(self.layers, (n,))[0]

    def fits(self, budget: int, *, kept: bool = False) -> int | None:
        """Return the most tokens whose cache takes at most `budget` bytes, None where any length fits.

        Every length below fits as well. -1: not even the fixed part does. `kept` asks for a session instead.
        """

        def needed(n: int) -> int:
            return sum(t.most_bytes(n) if kept or t.held == "rest" else t.nbytes(n) for t in _tensors(self.layers))

        if needed(LONGEST) <= budget:
            return None
        low, high = -1, LONGEST
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if needed(middle) <= budget else (low, middle)
        return low

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of tensors that there are, in the order of the layers."""
        return tuple(dict.fromkeys(tensor.kind for tensor in _tensors(self.layers)))

    def groups(self) -> tuple[tuple[tuple[int, ...], LayerGrowth], ...]:
        """Return layers that are alike together: their numbers, and the first of them."""
        found: dict[tuple[object, ...], list[LayerGrowth]] = {}
        for layer in self.layers:
            alike = tuple((t.kind, t.role, t.spec.dtype, t.spec.shape, t.spec.window, t.group) for t in layer.tensors)
            found.setdefault((layer.kind, layer.what, layer.shares is None, *alike), []).append(layer)
        return tuple((tuple(layer.index for layer in layers), layers[0]) for layers in found.values())

    def tables(self) -> tuple[Table, ...]:
        """Return the lengths, the layers by what they keep, and where there are any the turns and the checks."""
        made = [self._lengths(), self._layers()]
        if self.history:
            made.append(table_of("turns", self.history, ("commit", "operation", "n_tokens", "n_rows", "file_bytes")))
        if self.checked:
            names = ("against", "n_tokens", "layers", "tensors", "predicted", "most", "actual", "off", "ok")
            made.append(table_of("checked", self.checked, names))
        return tuple(made)

    def _lengths(self) -> Table:
        kinds, names = self.kinds, sorted({name for point in self.points for name in point.stored})
        columns = (
            "n_tokens", "cache_bytes", "bytes_per_token", "kept_bytes", *(f"{kind}_bytes" for kind in kinds),
            *(f"stored_{name}_bytes" for name in names),
        )  # fmt: skip
        rows = tuple(
            (
                point.n_tokens, point.cache_bytes, point.bytes_per_token, point.kept_bytes,
                *(point.by_kind.get(kind, 0) for kind in kinds), *(point.stored.get(name) for name in names),
            )
            for point in self.points
        )  # fmt: skip
        return Table(f"{self.architecture}, {self.dtype}", columns, rows)

    def _layers(self) -> Table:
        longest = max((point.n_tokens for point in self.points), default=LENGTHS[-1])
        columns = ("layers", "first_layer", "kind", "what", "bytes_per_token_at_first", "bytes_per_token_later",
                   "bytes_of_each", "bytes")  # fmt: skip
        rows = tuple(
            (
                len(numbers), numbers[0], layer.kind, layer.what, layer.per_token(0), layer.per_token(longest),
                layer.nbytes(longest), len(numbers) * layer.nbytes(longest),
            )
            for numbers, layer in self.groups()
        )  # fmt: skip
        return Table(f"layers, at {longest:,} tokens", columns, rows)


def _tensors(layers: Iterable[LayerGrowth]) -> Iterator[TensorGrowth]:
    for layer in layers:
        yield from layer.tensors


# -- from tensors to figures ---------------------------------------------------------------------------------------


def points_of(layers: Sequence[LayerGrowth], lengths: Iterable[int]) -> tuple[GrowthPoint, ...]:
    """Return the figures of these layers at each length. Raise `InputError` for one below 0 or beyond 2**40."""
    return tuple(_point(layers, n) for n in lengths)


def _point(layers: Sequence[LayerGrowth], n: int) -> GrowthPoint:
    if not 0 <= n <= LONGEST:
        raise InputError("this is no length in tokens", expected="0 to 2**40", found=n)
    tensors = list(_tensors(layers))
    by_kind: dict[str, int] = {}
    for tensor in tensors:
        by_kind[tensor.kind] = by_kind.get(tensor.kind, 0) + tensor.nbytes(n)
    growing = (t.row_bytes / t.spec.tokens_per_row if t.spec.grows else t.per_token(n) for t in tensors)
    return GrowthPoint(
        n_tokens=n, cache_bytes=sum(by_kind.values()), kept_bytes=sum(t.most_bytes(n) for t in tensors),
        bytes_per_token=sum(t.per_token(n) for t in tensors), kept_per_token=sum(growing), by_kind=by_kind,
        stored={codec.name: _stored(tensors, codec.name, n) for codec in codecs.CODECS.values()},
    )  # fmt: skip


def _stored(tensors: Iterable[TensorGrowth], name: str, n: int) -> int:
    total = -(-_ID * n // _ALIGNED) * _ALIGNED
    for tensor in tensors:
        n_rows = tensor.rows(n)
        size = codecs.codec_for(name, tensor.spec).usual_size(tensor.spec, n_rows)
        total += _ENTRY + -(-size // _ALIGNED) * _ALIGNED
    return total


def kind_of(spec: TensorSpec) -> str:
    """Return what kind of tensor this is, for figures by kind."""
    if spec.role in ("k", "v"):
        return "window" if spec.window else "full"
    if spec.role in ("latent", "rope"):
        return "latent"
    if spec.role in ("compressed", "buffer", "overlap"):
        return "compressed"
    if spec.role in _STATES:
        return "state"
    if spec.role.startswith("cross_"):
        return "cross"
    if spec.role in ("code", "scale", "zero", "residual"):
        return "codes"
    return "index" if spec.role == "index" else "other"


def what_of(tensors: Sequence[TensorGrowth], shares: int | None = None) -> str:
    """Return in words what a layer of these tensors keeps."""
    if shares is not None:
        return f"shared with layer {shares}"
    words: dict[str, None] = {}
    for tensor in tensors:
        kind, spec = tensor.kind, tensor.spec
        if kind == "window":
            words[f"window {spec.window}"] = None
        elif kind == "compressed" and tensor.role == "compressed":
            words[f"one row for {spec.tokens_per_row}"] = None
        elif kind not in ("compressed", "other"):
            words[kind] = None
    return " + ".join(words) or "nothing"

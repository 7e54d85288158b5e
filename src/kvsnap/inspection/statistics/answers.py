"""What the statistics of a cache are: by layer, by head, by channel and by row. Plain data; nothing is computed here.

A figure that cannot be told (no row without NaN, one row only, a state that has no rows) is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.errors import InputError
from kvsnap.results import Result, Table, table_of

__all__ = [
    "Channels",
    "Distribution",
    "HeadStatistics",
    "LayerStatistics",
    "RowNorms",
    "Similarity",
    "Sink",
    "Statistics",
    "token_of",
]

Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadStatistics:
    """Figures of one head of one role of one layer, over the rows that have no NaN and no infinite value.

    `mean`, `std`, `min`, `max` are of all values; norms are Euclidean, of rows, and the rows that have the smallest and
    the largest are numbered as in the sequence. `entropy` is that of the values in bits, in bins an eighth of `std`
    wide: a normal distribution has 5.05, less means that most values lie close together and a few far out.
    `exponent_entropy` is that of the binary exponents in bits: with the sign and the bits of the fraction it is what a
    lossless code of single values can reach (8 + `exponent_entropy` bits for a bfloat16).

    `mean_share` is the part of the energy (the mean squared norm) that the mean row has. The rest is the covariance of
    the channels, by whose eigenvalues the ranks count: `rank_90`, `rank_99`, `rank_999` are the fewest principal
    components that hold so many per cent (99.9) of its trace, `effective_rank` is the exponential of the entropy of the
    singular values (Roy and Vetterli 2007), `participation_ratio` is (sum of eigenvalues)^2 / sum of their squares.

    `outliers` are the channels whose root mean square is at least `OUTLIER_RATIO` times the median of the head's,
    `outlier_ratio` is the largest such ratio. `n_low_rows` counts rows whose norm is at most `LOW_RATIO` times the
    median norm. `dead`: all rows are the same, or so nearly that less than `DEAD_SHARE` of the energy varies.
    `twin` is the first head of the same role, as (layer, head), that holds the same rows bit by bit.
    """

    layer: int
    role: str
    head: int
    n_rows: int
    dim: int
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    mean_norm: float | None
    min_norm: float | None
    min_norm_row: int | None
    max_norm: float | None
    max_norm_row: int | None
    entropy: float | None = None
    exponent_entropy: float | None = None
    mean_share: float | None = None
    rank_90: int | None = None
    rank_99: int | None = None
    rank_999: int | None = None
    effective_rank: float | None = None
    participation_ratio: float | None = None
    outliers: tuple[int, ...] = ()
    outlier_ratio: float | None = None
    n_low_rows: int = 0
    n_nan: int = 0
    n_infinite: int = 0
    n_left_out: int = 0
    dead: bool = False
    twin: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStatistics:
    """Figures of one role of one layer, over all its heads: `mean` to `mean_norm` of all values and rows.

    Entropies, ranks and `mean_share` are means over the heads. `n_rows` are the rows looked at, of `n_held` held, from
    `first_row` on; each stands for `tokens_per_row` tokens. `is_state`: no rows of tokens, but a state that is replaced
    at each pass. `n_outliers` counts channels over all heads, `outlier_ratio` is the largest of the heads',
    `bound` is the error that storing may have put into a value.
    """

    layer: int
    kind: str
    role: str
    dtype: str
    n_heads: int
    dim: int
    n_rows: int
    n_held: int
    first_row: int
    tokens_per_row: int
    is_state: bool
    nbytes: int
    bound: float
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    mean_norm: float | None
    entropy: float | None
    exponent_entropy: float | None
    mean_share: float | None
    rank_90: float | None
    rank_99: float | None
    rank_999: float | None
    effective_rank: float | None
    participation_ratio: float | None
    n_outliers: int
    outlier_ratio: float | None
    n_dead: int
    n_nan: int
    n_infinite: int
    n_left_out: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Distribution:
    """How the values of one role of one layer lie: `counts[i]` of them from `edges[i]` to below `edges[i + 1]`.

    Bins are equally wide (the last one has both its edges), and end 6 standard deviations from the mean at the latest;
    `below` and `above` count what lies beyond. `n_values` were looked at: of a large tensor rows at equal distances.
    """

    layer: int
    role: str
    edges: npt.NDArray[np.float64]
    counts: Counts
    below: int
    above: int
    n_values: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowNorms:
    """Norms of the rows of one role along the sequence, NaN where no row was looked at.

    `by_row` is float32 `[rows]`, the mean over layers and heads. `by_layer` is float32 `[layers, columns]`, the mean
    over heads and over the rows `[edges[c], edges[c + 1])` of column `c`; `layers` numbers its lines. A row that stands
    for several tokens counts for each of them. Roles of another sequence (`cross_k`) count the rows of that one.
    """

    role: str
    layers: tuple[int, ...]
    edges: Counts
    by_layer: Floats
    by_row: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Channels:
    """Figures by channel of one role of one layer, each float32 `[heads, dim]`: root mean square, largest |x|, mean.

    `first_head` is above 0 where a layer has heads of unequal width: then several of these make the layer. NaN where
    no row could be used.
    """

    layer: int
    role: str
    first_head: int
    rms: Floats
    peak: Floats
    mean: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Similarity:
    """How alike the layers of one role are: linear CKA (Kornblith et al. 2019), float32 `[layers, layers]`.

    Compared are the rows of all heads of a layer side by side, at the `n_rows` rows of the sequence that all of them
    hold. 1: the same up to rotation and scale; about 0: nothing in common (the unbiased estimator of Song et al. 2012,
    which may be a little below 0). NaN where a layer does not vary.
    """

    role: str
    layers: tuple[int, ...]
    n_rows: int
    values: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Sink:
    """A row that may be an attention sink: its values are far shorter than those of other rows, in `n_layers` layers.

    `value_ratio` and `key_ratio` are its norm against the median norm of its layer, means over these layers. `token` is
    the id of the row, None where the file does not tell. Only a candidate: how much attention a row really gets is told
    by the queries, which no cache holds (`inspect_attention`).
    """

    row: int
    token: int | None
    n_layers: int
    layers: tuple[int, ...]
    value_ratio: float
    key_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Statistics(Result):
    """The statistics of one cache; `statistics` makes them.

    `n_tokens` and `n_rows` are those of the snapshot, `tokens` the ids of the rows, of the last ones where a foreign
    file has no more. `sample` is the number of rows that were asked for, None: all
    rows were looked at. `findings` says in words what stands out, `notes` what was left out or has to be known about
    the figures. Lists are in the order of layers, then of the tensors in a layer, then of heads.
    """

    path: str | None
    architecture: str
    num_layers: int
    n_tokens: int
    n_rows: int
    tokens: tuple[int, ...]
    sample: int | None
    layers: tuple[LayerStatistics, ...]
    heads: tuple[HeadStatistics, ...]
    distributions: tuple[Distribution, ...]
    norms: tuple[RowNorms, ...]
    channels: tuple[Channels, ...]
    similarity: tuple[Similarity, ...]
    sinks: tuple[Sink, ...]
    findings: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that heads were found of, in the order of the first one."""
        return tuple(dict.fromkeys(h.role for h in self.heads))

    def matrix(self, role: str, figure: str) -> npt.NDArray[np.float64]:
        """Return a figure of `HeadStatistics` as float64 `[num_layers, heads]`, NaN where there is none.

        For lists (`outliers`) it is how many there are.
        """
        mine = [h for h in self.heads if h.role == role]
        width = max((h.head + 1 for h in mine), default=0)
        found = np.full((self.num_layers, width), np.nan)
        for h in mine:
            value = getattr(h, figure)
            if value is not None:
                found[h.layer, h.head] = len(value) if isinstance(value, tuple) else value
        return found

    def shown_tables(self) -> tuple[Table, ...]:
        """Return what is told in words first."""
        *figures, words = self.tables()
        return (words, *figures)

    def tables(self) -> tuple[Table, ...]:
        """Return what is told by layer, by head, of candidates for sinks where there are any, and in words."""
        made = [table_of("layers", self.layers, _OF_LAYERS), self.table("head")]
        if self.sinks:
            columns = ("row", "token", "n_layers", "value_ratio", "key_ratio")
            made.append(table_of("rows that may be attention sinks", self.sinks, columns))
        told = (*(("finding", text) for text in self.findings), *(("note", text) for text in self.notes))
        return (*made, Table("in words", ("kind", "text"), told))

    def table(self, by: str) -> Table:
        """Return one table: by `layer` (and role), `head`, `channel`, or `row` of the sequence.

        Channels have a line for each head and channel, `ratio` is that of the root mean square to the median of the
        head. Rows have their token (None where the file does not tell), the mean norm of each role over layers and
        heads, and in how many layers a row may be a sink.
        Raise `InputError` for another word.
        """
        if by == "layer":
            return self.tables()[0]
        if by == "head":
            rows = [(*(getattr(h, c) for c in _OF_HEADS), len(h.outliers)) for h in self.heads]
            return Table("heads", (*_OF_HEADS, "n_outliers"), tuple(rows))
        if by == "channel":
            return self._by_channel()
        if by == "row":
            return self._by_row()
        raise InputError("no such table", expected="layer, head, channel or row", found=by)

    def _by_channel(self) -> Table:
        rows: list[tuple[int | float | str | None, ...]] = []
        for c in self.channels:
            for head, (rms, peak, mean) in enumerate(zip(c.rms, c.peak, c.mean, strict=True)):
                wide = rms.astype(np.float64)  # the mean of two values near the end of float32 is beyond it on the way
                middle = float(np.median(wide)) if len(wide) else 0.0
                ratios = wide / middle if middle > 0 else np.full(len(wide), np.nan)
                for channel, values in enumerate(zip(rms, peak, mean, ratios, strict=True)):
                    rows.append((c.layer, c.role, c.first_head + head, channel, *(_or_none(v) for v in values)))
        return Table("channels", ("layer", "role", "head", "channel", "rms", "peak", "mean", "ratio"), tuple(rows))

    def _by_row(self) -> Table:
        sinks = {s.row: s.n_layers for s in self.sinks}
        norms = [n for n in self.norms if not n.role.startswith("cross_")]
        rows = [
            (
                row,
                token_of(self.tokens, self.n_rows, row),
                *(_or_none(n.by_row[row]) for n in norms),
                sinks.get(row, 0),
            )
            for row in range(max((len(n.by_row) for n in norms), default=0))
        ]
        return Table("rows", ("row", "token", *(f"{n.role}_norm" for n in norms), "sink_layers"), tuple(rows))


def token_of(tokens: Sequence[int], n_rows: int, row: int) -> int | None:
    """Return the id of a row where `tokens` are those of the last of `n_rows` rows; None where it is not among them."""
    place = row - (n_rows - len(tokens))
    return tokens[place] if 0 <= place < len(tokens) else None


def _or_none(value: np.floating[Any]) -> float | None:
    return float(value) if np.isfinite(value) else None


_OF_LAYERS = (
    "layer", "kind", "role", "n_heads", "dim", "n_rows", "mean", "std", "min", "max", "mean_norm", "entropy",
    "exponent_entropy", "mean_share", "rank_90", "rank_99", "rank_999", "effective_rank", "participation_ratio",
    "n_outliers", "outlier_ratio", "n_dead", "n_nan", "n_infinite", "n_left_out",
)  # fmt: skip
_OF_HEADS = (
    "layer", "role", "head", "n_rows", "mean", "std", "min", "max", "mean_norm", "min_norm", "min_norm_row", "max_norm",
    "max_norm_row", "entropy", "exponent_entropy", "mean_share", "rank_90", "rank_99", "rank_999", "effective_rank",
    "participation_ratio", "outlier_ratio", "n_low_rows", "dead", "n_nan", "n_infinite", "n_left_out",
)  # fmt: skip

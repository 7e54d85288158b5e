"""What a comparison of two caches answers with: plain data, tables, and arrays to draw. `comparing` makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvsnap.errors import InputError
from kvsnap.inspection.growth.answers import LayerGrowth
from kvsnap.results import Result, Table, plain, table_of

__all__ = [
    "Alignment", "Diff", "FieldDifference", "GrowthDifference", "HeadDifference", "LayerDifference",
    "LengthDifference", "LogitsDifference", "NotCompared", "OtherDifference", "PositionDifference", "Same",
    "SameRun", "Side", "Similarity", "Verdict",
]  # fmt: skip

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Verdict = Literal["identical", "besides", "bound", "values", "tokens", "geometry"]
Same = Literal["equal", "differ", "only in a", "only in b", "unknown"]
"""`unknown`: at least one side does not say, so nothing is known to differ."""

_WORDS: dict[Verdict, str] = {
    "identical": "the same bits, and the same in all else",
    "besides": "the same bits in the cache; what is beside it differs",
    "bound": "the same tokens; all values within the stored bound of each other",
    "values": "the same tokens; values differ",
    "tokens": "other tokens from a place on",
    "geometry": "caches of another shape",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two: where it is from, and what it takes.

    `nbytes` are the tensors decoded (all that a layer holds, logits and draft too), `file_bytes` the length of the
    file, None of what was no file. `encodings` are stored bytes by codec. `bound` is the largest error that storing may
    have put into a value: 0 exact, infinite for an edited cache. `layers` is how many there are of each kind.
    """

    path: str | None
    format: str
    commit: int | None
    architecture: str
    dtype: str
    n_tokens: int
    n_rows: int
    row_start: int
    num_layers: int
    num_heads: int
    head_dim: int
    layers: Mapping[str, int]
    nbytes: int
    bytes_per_token: float
    file_bytes: int | None
    encodings: Mapping[str, int]
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldDifference:
    """One field of the two identities: what it decides (`level`), and both values as short text.

    `fatal`: a cache of one is no cache of the other. `exactness`: bits need not agree. `advice`: it decides nothing.
    """

    name: str
    verdict: Literal["match", "differ", "unknown"]
    level: Literal["fatal", "exactness", "advice"]
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class SameRun:
    """`count` ids that are the same on both sides, from these places on."""

    a: int
    b: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """How the two histories agree.

    `n_common` ids are the same from the first on. `first` is the place of the first id that differs, None where one
    history begins with the whole other one. `token_a` and `token_b` are the ids there; `text_before`, `text_a` and
    `text_b` the text around it where text is known. `runs` are ids that agree behind that place, wherever they stand;
    `n_same_place` counts the ids behind it that agree at the same place.

    `n_rows` rows of both have the same input: the same ids and positions up to there. `by` says how that is known:
    `tokens`, or `rows` where one side does not hold its ids (then rows are taken to be of the same input).
    """

    n_common: int
    first: int | None
    relation: Literal["same", "a begins with b", "b begins with a", "diverge", "unknown"]
    token_a: int | None
    token_b: int | None
    text_before: str | None
    text_a: str | None
    text_b: str | None
    runs: tuple[SameRun, ...]
    n_same_place: int
    n_rows: int
    by: Literal["tokens", "rows"]
    notes: tuple[str, ...] = ()

    def sentence(self, *, ids: bool = True) -> str:
        """Return in words how the histories agree, with the ids that differ or without any id."""
        n = f"{self.n_common:,}"
        if self.relation == "same":
            return f"the same {n} tokens"
        if self.relation == "unknown":
            return "tokens are not stored on both sides"
        if self.first is None:
            return f"{self.relation}: {n} tokens are the same, and one side goes on"
        told = f" ({self.token_a} in a, {self.token_b} in b)" if ids else ""
        if not self.n_common:
            return f"no token from the start is the same: the first one differs{told}"
        same = "the first token is the same" if self.n_common == 1 else f"the first {n} tokens are the same"
        return f"{same}; token {self.first:,} differs{told}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadDifference:
    """One head of one role of one layer, over the rows that were compared; d = a - b.

    `n_different` counts values with other bits (-0.0 and 0.0 differ; in the wider dtype where the dtypes differ).
    Errors are over the pairs in which both are finite: `relative_error` is ||d|| / ||a|| over all rows (Frobenius),
    `max_row_error` the largest ||d_row|| / ||a_row||, `cosine_mean` and `cosine_min` of rows (1 for two zero rows, 0
    for one). `rms_a` and `rms_b` are root mean squares of a value. `row` is the row of the sequence with the largest
    absolute error, `first_row` the first with other bits; None without any. `nonfinite_a` and `nonfinite_b` count NaN
    and infinite values, `n_nonfinite_differ` the pairs in which they are not the same (NaN for NaN, sign for sign).
    `bound` is what storing may account for (that of both sides added), `within_bound` whether it does; None where both
    are exact, or there is no bound.
    """

    layer: int
    role: str
    head: int
    n_rows: int
    n_values: int
    n_different: int
    relative_error: float
    max_row_error: float
    cosine_mean: float
    cosine_min: float
    max_abs: float
    mean_abs: float
    rms_a: float
    rms_b: float
    row: int | None
    first_row: int | None
    nonfinite_a: int
    nonfinite_b: int
    n_nonfinite_differ: int
    bound: float
    within_bound: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDifference:
    """One role of one layer, all heads together. Figures are those of `HeadDifference`; `head` is the one of `row`.

    `kind` is that of the layer (`a / b` where they differ). `heads_a`, `heads_b`, `dim_a`, `dim_b` are its shape.
    Where shapes differ there are no errors (None), but the root mean squares of all rows that both hold, and `cka`:
    see `Similarity`; None where it was not asked for or there are too few rows.
    """

    layer: int
    role: str
    kind: str
    dtype: str
    heads_a: int
    heads_b: int
    dim_a: int
    dim_b: int
    n_rows: int
    n_values: int
    n_different: int | None
    relative_error: float | None
    max_row_error: float | None
    cosine_mean: float | None
    cosine_min: float | None
    max_abs: float | None
    mean_abs: float | None
    rms_a: float
    rms_b: float
    head: int | None
    row: int | None
    first_row: int | None
    nonfinite_a: int
    nonfinite_b: int
    bound: float
    within_bound: bool | None
    cka: float | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PositionDifference:
    """How one role differs by place in the sequence: curves over all layers and heads, and layer x place matrices.

    `rows` are row numbers, int64 `[n]` (the first of those that a compressed row stands for); `relative_error` and
    `cosine` are float64 `[n]`: ||d|| / ||a|| of all layers and heads together, and the mean cosine. The matrices are
    float64 `[len(layers), len(edges) - 1]` over spans of rows: column i is of the rows from `edges[i]` to before
    `edges[i + 1]`; NaN where a layer has none there. `layer_max_abs` is the largest absolute error.
    """

    role: str
    tokens_per_row: int
    rows: Integers
    relative_error: Floats
    cosine: Floats
    layers: tuple[int, ...]
    edges: Integers
    layer_relative_error: Floats
    layer_cosine: Floats
    layer_max_abs: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Similarity:
    """Linear CKA of one role between each layer of a and each of b, over rows of the same input.

    Kornblith et al., "Similarity of Neural Network Representations Revisited", 2019: 1 for representations that are
    the same up to a rotation and a scale of the space of a row, about 0 for unrelated ones; heads of a layer are taken
    together. `biased` is the estimator of that paper, which is near 1 for anything where rows are fewer than values in
    a row. `cka` is the one without bias (Song et al. 2012, as in Nguyen et al. 2021), and may be a little below 0.
    Both float64 `[len(layers_a), len(layers_b)]`, NaN where all rows are alike. `n_rows` rows were taken, evenly.
    """

    role: str
    n_rows: int
    layers_a: tuple[int, ...]
    layers_b: tuple[int, ...]
    cka: Floats
    biased: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthDifference:
    """What the tensors of one kind take, decoded, in both.

    `kind` is that of `TensorGrowth` (`full`, `window`, `latent`, `state` ...). `per_token_*` are the bytes that one
    more token adds at the length that each holds, `nbytes_*` what is held now.
    """

    kind: str
    layers_a: int
    layers_b: int
    per_token_a: float
    per_token_b: float
    nbytes_a: int
    nbytes_b: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthDifference:
    """What each cache takes at one length, decoded: computed from what its layers keep, held or not."""

    n_tokens: int
    nbytes_a: int
    nbytes_b: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsDifference:
    """The stored logits, of the same position behind the same input. `kl_ab` is KL(softmax a || softmax b) in nats.

    None where they hold a NaN. `top1_a` and `top1_b` are the most probable ids, `max_abs` is over finite pairs.
    """

    n_values: int
    n_different: int
    kl_ab: float | None
    kl_ba: float | None
    top1_a: int
    top1_b: int
    max_abs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherDifference:
    """Something beside keys and values: `verdict`, and both sides as short text.

    `of_cache`: it is part of what layers hold or how they hold it, as dtypes and row numbers are.
    """

    name: str
    verdict: Same
    a: str = ""
    b: str = ""
    of_cache: bool = False


@dataclass(frozen=True, slots=True)
class NotCompared:
    """What was left out, and why."""

    what: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Diff(Result):
    """How two caches differ, `a` against `b`.

    `verdict` is the first of these that holds:

    * `geometry`: a layer of one has another shape than that of the other, or is missing there;
    * `tokens`: one has ids that the other has not; what stands before them was compared;
    * `values`: the same tokens, and values differ;
    * `bound`: the same tokens, and values differ by no more than storing may account for;
    * `besides`: the same bits, and something beside the cache differs;
    * `identical`: nothing that is known on both sides differs, and nothing was left out.

    `says` tells it in sentences, of which the first one is about the tokens.
    `all_rows` tells that rows behind the first difference of the tokens were compared too: those figures are of other
    inputs. `same_model` is False where the weights differ, None where they are not known on both sides.
    """

    a: Side
    b: Side
    verdict: Verdict
    says: tuple[str, ...]
    same_model: bool | None
    all_rows: bool
    tokens: Alignment
    identity: tuple[FieldDifference, ...]
    layers: tuple[LayerDifference, ...]
    heads: tuple[HeadDifference, ...]
    positions: tuple[PositionDifference, ...]
    similarity: tuple[Similarity, ...]
    growth: tuple[GrowthDifference, ...]
    lengths: tuple[LengthDifference, ...]
    rules: tuple[tuple[LayerGrowth, ...], tuple[LayerGrowth, ...]]
    logits: LogitsDifference | None
    others: tuple[OtherDifference, ...]
    not_compared: tuple[NotCompared, ...]

    @property
    def identical(self) -> bool:
        """True when nothing differs: the same bits, the same tokens, the same in all else that both sides tell."""
        return self.verdict == "identical"

    @property
    def same_cache(self) -> bool:
        """True when the caches are the same bits of the same tokens, all of them, whatever is beside them."""
        held = not any(other.of_cache and other.verdict not in ("equal", "unknown") for other in self.others)
        whole = not self.not_compared and self.tokens.relation == "same"
        return self.identical or (self.verdict == "besides" and held and whole)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that were compared, in the order of the layers."""
        return tuple(dict.fromkeys(layer.role for layer in self.layers))

    def matrix(self, role: str, figure: str = "relative_error") -> tuple[tuple[int, ...], Floats]:
        """Return (layers, float64 `[layers, heads]`) of a figure of `HeadDifference`; NaN where there is no such head.

        To draw one cell for each head. Both are empty for a role that was not compared.
        """
        found = [head for head in self.heads if head.role == role]
        layers = tuple(dict.fromkeys(head.layer for head in found))
        made = np.full((len(layers), max((h.head + 1 for h in found), default=0)), np.nan)
        for head in found:
            value = getattr(head, figure)
            made[layers.index(head.layer), head.head] = np.nan if value is None else value
        return layers, made

    def bytes_at(self, n_tokens: int) -> tuple[int, int]:
        """Return the bytes that each cache takes at a length, decoded. Raise `InputError` for one below 0."""
        if n_tokens < 0:
            raise InputError("this is no length in tokens", expected="0 or more", found=n_tokens)
        left, right = (sum(layer.nbytes(n_tokens) for layer in layers) for layers in self.rules)
        return left, right

    def tables(self) -> tuple[Table, ...]:
        """Return layers, heads, growth, what is beside, identity, and what was left out; the last ones as needed."""
        made = [_table(title, items, kind) for title, items, kind in (
            ("layers", self.layers, LayerDifference), ("heads", self.heads, HeadDifference),
            ("growth", self.growth, GrowthDifference), ("lengths", self.lengths, LengthDifference),
        )]  # fmt: skip
        differing = [f for f in self.identity if f.verdict != "match"]
        for title, items, kind in (
            ("identity", differing, FieldDifference), ("beside the cache", self.others, OtherDifference),
            ("not compared", self.not_compared, NotCompared),
        ):  # fmt: skip
            if items:
                made.append(_table(title, items, kind))
        return tuple(made)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data: every field by its name, and `identical`."""
        data: dict[str, Any] = {f.name: plain(getattr(self, f.name)) for f in fields(self) if f.name != "rules"}
        return {"identical": self.identical, **data}

    def sentences(self, *, ids: bool = True) -> tuple[str, ...]:
        """Return the verdict and what is said of it, with the ids of tokens or without any."""
        return (_WORDS[self.verdict], self.tokens.sentence(ids=ids), *self.says[1:])

    def in_words(self) -> tuple[str, ...]:
        """Return the verdict and what is said of it, for notebooks."""
        return self.sentences()

    def __str__(self) -> str:
        return "\n".join(self.sentences())


def _table(title: str, items: Any, kind: Any) -> Table:
    return table_of(title, items, [f.name for f in fields(kind)])

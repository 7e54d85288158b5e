"""The figures of quality: what is said of each encoding, and the yardsticks to read it by."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvsnap.inspection.quality.divergence import Divergence, Prediction
from kvsnap.results import Cell, Result, Table

__all__ = [
    "VERDICTS",
    "YARDSTICKS",
    "Effect",
    "Named",
    "Quality",
    "effect_of",
    "mean_of",
    "perplexity_of",
    "verdict_of",
]

Doubles = npt.NDArray[np.float64]

VERDICTS: tuple[tuple[float, str], ...] = (
    (1e-3, "indistinguishable"),
    (3e-3, "near-lossless"),
    (1e-2, "good"),
    (3e-2, "noticeable"),
    (math.inf, "visible"),
)
"""The largest mean KL in nats that each word stands for; `identical` is said of logits that are the same bit for bit,
`broken` where some are no numbers that are numbers in the reference."""

YARDSTICKS: tuple[tuple[str, str, str], ...] = (
    ("a float32 cache rounded to float16", "0.00000", "100 %"),
    ("a float32 cache rounded to bfloat16", "0.00001", "99.9 %"),
    ("the whole model in bfloat16 in place of float32", "0.0009 to 0.0013", "98.4 to 98.8 %"),
)
"""What, its mean KL in nats and its top-1 agreement: SmolLM2-135M-Instruct in float32, three technical texts in
English, 256 tokens of each behind 3,072; November 2026."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Effect:
    """What a model predicts from another cache of the same history, against what it predicts from the reference.

    `name` is a path, `codec q8`, `rounded to bfloat16` or `snapshot`; `codec` its codec where it was encoded for this;
    `stored_bytes` the length of the file, or of what was encoded, None where there is none and for a session, whose
    file holds more. `n` places are compared; `n_bad` more are left out because the logits of one side are no numbers
    there.

    Over the n places: KL(reference || other) in nats, its mean (`kl_se`: standard error of the mean, from the spread
    over places, None for one), median, 99th percentile and maximum; `top1` the part of places with the same most
    probable id, `top5` the mean part of the five most probable ids that are the same; `nll` the mean negative
    log-probability in nats of the ids that came next, `perplexity` its exponential; `nll_change` that against the
    reference over the same places (`nll_change_se`: standard error of the mean difference), `perplexity_change` the
    same as a part of the perplexity (0.01: one hundredth more). `logit_error` is the largest difference of any logit.
    Figures are None where no place is left. `verdict` is one of `VERDICTS`, or `identical`, `broken`, `unknown`.

    By place, `[n + n_bad]`: `kl` float64 (NaN: left out), `agrees` bool, `nlls` float64. `differs_at` is the first
    place where the most probable id is another one (None: nowhere), `expected` and `found` what the two predict there,
    `expected_text` and `found_text` the same as text, None without a tokenizer.
    """

    name: str
    codec: str | None
    stored_bytes: int | None
    bound: float
    n: int
    n_bad: int
    kl_mean: float | None
    kl_se: float | None
    kl_median: float | None
    kl_p99: float | None
    kl_max: float | None
    top1: float | None
    top5: float | None
    nll: float | None
    perplexity: float | None
    nll_change: float | None
    nll_change_se: float | None
    perplexity_change: float | None
    logit_error: float | None
    verdict: str
    differs_at: int | None
    expected: int | None
    found: int | None
    expected_text: str | None
    found_text: str | None
    notes: tuple[str, ...]
    kl: Doubles
    agrees: npt.NDArray[np.bool_]
    nlls: Doubles


_COLUMNS = (
    "name", "kl_mean", "kl_se", "kl_median", "kl_p99", "kl_max", "top1", "top5", "nll", "perplexity", "nll_change",
    "nll_change_se", "perplexity_change", "logit_error", "n", "n_bad", "bound", "stored_bytes", "verdict",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Quality(Result):
    """What encodings of one history cost the model, over a text behind it.

    `reference` names the cache that others are compared with, `architecture` its model, `bound` the largest error that
    storing had put into it before. The first `n_history` tokens come from the caches, `ids` int64 `[n]` behind them are
    evaluated, teacher-forced, and `targets` int64 `[n]` are the ids that came next: the model is judged at these n
    places. `source` tells where the text is from: `own` (what the model generates from the reference, always its most
    probable token), `given`, or `last` (the end of the history itself); `text` is it, None without a tokenizer.

    `nll` and `perplexity` are those of the reference over the `n - n_bad` places where its logits are numbers (None:
    nowhere), `nlls` float64 `[n]` by place. `stored_bytes` is the length of its file, None for none. `others` are the
    effects, in the order given; `notes` say what keeps the figures from meaning more.
    """

    reference: str
    architecture: str
    stored_bytes: int | None
    bound: float
    n_history: int
    n: int
    n_bad: int
    source: str
    text: str | None
    nll: float | None
    perplexity: float | None
    others: tuple[Effect, ...]
    notes: tuple[str, ...]
    ids: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    nlls: Doubles

    def tables(self) -> tuple[Table, ...]:
        """Return a row for each encoding, then the yardsticks, then a row for each place."""
        rows = tuple(tuple(getattr(e, name) for name in _COLUMNS) for e in self.others)
        main = Table(f"against {self.reference}: {self.n} places", _COLUMNS, rows)
        known = Table("yardsticks", ("what", "kl_mean", "top1"), YARDSTICKS)
        return main, known, self.places()

    def places(self) -> Table:
        """Return a row for each place: its row of the sequence, the id that came next, and what each cache gave."""
        names = ("kl", "agrees", "nll")
        columns = [f"{name}_{at}" for at in range(1, len(self.others) + 1) for name in names]
        rows = []
        for place in range(self.n):
            cells: list[Cell] = [self.n_history + place, int(self.targets[place]), _number(self.nlls[place])]
            for e in self.others:
                cells += [_number(e.kl[place]), bool(e.agrees[place]), _number(e.nlls[place])]
            rows.append(tuple(cells))
        return Table("by place", ("row", "target", "nll", *columns), tuple(rows))


def _number(value: np.float64) -> float | None:
    return None if np.isnan(value) else float(value)


def mean_of(values: Doubles) -> tuple[float | None, float | None]:
    """Return mean and standard error of the mean; None where there are too few values for it."""
    if not len(values):
        return None, None
    mean = float(values.mean())
    if len(values) < 2 or not math.isfinite(mean):
        return mean, None
    return mean, float(values.std(ddof=1) / math.sqrt(len(values)))


def perplexity_of(nll: float | None) -> float | None:
    """Return exp(nll), infinity where it overflows."""
    if nll is None:
        return None
    return math.exp(nll) if nll < 709 else math.inf


def verdict_of(kl_mean: float | None, *, same: bool = False, broken: bool = False) -> str:
    """Return the word for a mean KL in nats: `VERDICTS`."""
    if broken:
        return "broken"
    if kl_mean is None or math.isnan(kl_mean):
        return "unknown"
    if same:
        return "identical"
    return next(word for most, word in VERDICTS if kl_mean <= most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What is known of a cache beside its values: what it is called, how it is stored, and what to say of it."""

    name: str
    codec: str | None = None
    stored_bytes: int | None = None
    bound: float = 0.0
    notes: tuple[str, ...] = ()


def effect_of(
    named: Named, found: Divergence, reference: Prediction, detokenize: Callable[[int], str | None]
) -> Effect:
    """Return the figures of a comparison; `detokenize` tells the text of an id, None without a tokenizer."""
    good = ~np.isnan(found.kl)
    kl, other = found.kl[good], found.other
    n = len(kl)
    kl_mean, kl_se = mean_of(kl)
    nll, _ = mean_of(other.nll[good])
    change, change_se = mean_of(_change(reference.nll[good], other.nll[good]))
    differing = np.flatnonzero(good & ~found.agrees)
    at = int(differing[0]) if len(differing) else None
    expected, got = (None, None) if at is None else (int(reference.chosen[at]), int(other.chosen[at]))
    error = float(found.logit_error[good].max()) if n else None
    broken = bool((np.isnan(other.nll) & (other.chosen < 0) & (reference.chosen >= 0)).any())
    return Effect(
        name=named.name, codec=named.codec, stored_bytes=named.stored_bytes, bound=named.bound, n=n,
        n_bad=len(good) - n, kl_mean=kl_mean, kl_se=kl_se,
        kl_median=float(np.median(kl)) if n else None, kl_p99=_percentile(kl, 99),
        kl_max=float(kl.max()) if n else None,
        top1=float(found.agrees[good].mean()) if n else None,
        top5=float(found.overlap[good].mean()) if n else None, nll=nll, perplexity=perplexity_of(nll),
        nll_change=change, nll_change_se=change_se, perplexity_change=_part(change), logit_error=error,
        verdict=verdict_of(kl_mean, same=error == 0 and kl_mean == 0, broken=broken), differs_at=at, expected=expected,
        found=got, expected_text=None if expected is None else detokenize(expected),
        found_text=None if got is None else detokenize(got), notes=named.notes, kl=found.kl, agrees=found.agrees,
        nlls=other.nll,
    )  # fmt: skip


def _percentile(values: Doubles, part: float) -> float | None:
    if not len(values):
        return None
    with np.errstate(invalid="ignore"):
        found = float(np.percentile(values, part))
    return math.inf if math.isnan(found) else found  # between two places of which one is infinite


def _change(before: Doubles, after: Doubles) -> Doubles:
    """Return the change of each place; none where both hold the id that came next for impossible."""
    same = before == after
    return np.subtract(after, before, out=np.zeros(len(before)), where=~same)


def _part(change: float | None) -> float | None:
    """Return a change of the NLL as a part of the perplexity."""
    if change is None:
        return None
    return math.expm1(change) if change < 709 else math.inf

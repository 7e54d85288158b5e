"""What encodings cost the model, for a page: KL divergence, agreement, perplexity, and the words for them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from kvsnap.inspection.quality.answers import VERDICTS, YARDSTICKS, Effect, Quality
from kvsnap.plots import Bars, Line, Lines
from kvsnap.plots.colours import LINES
from kvsnap.plots.pictures import Floats
from kvsnap.reports.escaping import visible
from kvsnap.reports.page import Block, Card, Claims, Facts, Figure, Listing, Quote, Text
from kvsnap.reports.words import count, share, size
from kvsnap.results import Table

__all__ = ["cards_of_quality"]

_SOURCES = {
    "own": "that the model generates itself",
    "given": "of the text given",
    "last": "of the history itself",
}
_MOST_LINES = len(LINES)
_EXCERPT = 2400
"""Characters of the text that are shown."""
_COLUMNS = {
    "name": "cache", "verdict": "verdict", "kl_mean": "mean KL", "kl_se": "± its error", "top1": "top-1, %",
    "perplexity": "perplexity", "perplexity_change": "change, %", "stored_bytes": "stored bytes", "n": "places",
    "n_bad": "left out", "kl_median": "median KL", "kl_p99": "99 % below", "kl_max": "largest KL", "top5": "top-5, %",
    "logit_error": "largest logit error", "bound": "bound of a value",
}  # fmt: skip
_PERCENT = ("top1", "top5", "perplexity_change")


def cards_of_quality(quality: Quality, *, with_text: bool) -> list[Card]:
    """Return the cards of an answer. Without `with_text` neither the text it was judged by nor an id is told."""
    cards = [_verdicts(quality, with_text=with_text)]
    made = (_divergence(quality), _by_place(quality), _agreement(quality), _perplexity(quality))
    cards += [card for card in made if card is not None]
    if with_text and quality.text:
        rest = len(quality.text) - _EXCERPT
        cut = quality.text if rest <= 0 else f"{quality.text[:_EXCERPT]}\n\n… {rest:,} characters left out"
        cards.append(Card("The text it was judged by", (Quote(cut, "the text that was evaluated"),)))
    return cards


def _verdicts(quality: Quality, *, with_text: bool) -> Card:
    held = "" if quality.stored_bytes is None else f", {size(quality.stored_bytes)}"
    places = count(quality.n, "place")
    facts = [
        ("compared with", f"{quality.reference}{held}"),
        ("model", quality.architecture),
        ("judged by", f"{places} {_SOURCES[quality.source]}, behind {count(quality.n_history, 'token')}"),
        ("its perplexity", share(quality.perplexity)),
    ]  # fmt: skip
    said: list[Block] = [
        Claims(tuple((visible(_sentence(e)), None if e.verdict != "broken" else False) for e in quality.others)),
        Facts(tuple((name, visible(text)) for name, text in facts)),
    ]
    parted = [(e, e.differs_at) for e in quality.others if e.differs_at is not None]
    if parted:
        said.append(Text("First places where another token is the most probable one:"))
        said.append(Claims(tuple(
            (visible(_first(quality, e, at, with_text=with_text)), None) for e, at in parted
        )))  # fmt: skip
    notes = [*quality.notes, *(f"{e.name}: {note}" for e in quality.others for note in e.notes)]
    if notes:
        said += [Text("About these figures:", quiet=True), Claims(tuple((visible(note), None) for note in notes))]
    rows = tuple(tuple(_cell(e, name) for name in _COLUMNS) for e in quality.others)
    said.append(Listing(Table("Every encoding; KL in nats", tuple(_COLUMNS.values()), rows)))
    return Card("What it costs the model", tuple(said))


def _cell(effect: Effect, name: str) -> str | float | None:
    value: str | float | None = getattr(effect, name)
    if isinstance(value, str):
        return visible(value)
    return value if value is None or name not in _PERCENT else 100 * value


def _sentence(effect: Effect) -> str:
    """Return the verdict on an encoding with the figures that it rests on."""
    if effect.kl_mean is None or effect.top1 is None:
        return f"{effect.name}: {effect.verdict}; no place could be compared"
    change = effect.perplexity_change
    told = "" if change is None else f", perplexity {change:+.2%}"
    return (
        f"{effect.name}: {effect.verdict}. Mean KL {_nats(effect.kl_mean)} nats, the same most probable token at "
        f"{effect.top1:.1%} of {count(effect.n, 'place')}{told}"
    )


def _first(quality: Quality, effect: Effect, at: int, *, with_text: bool) -> str:
    told = f"{effect.name}: place {at + 1:,}, behind row {quality.n_history + at:,}"
    if not with_text:
        return told
    texts = effect.expected_text, effect.found_text
    expected, found = (effect.expected, effect.found) if None in texts else map(repr, texts)
    return f"{told}: {found} in place of {expected}"


def _nats(value: float) -> str:
    return "0" if not value else f"{value:.1e}" if value < 1e-4 else f"{value:.5f}"


def _divergence(quality: Quality) -> Card | None:
    known = [e for e in quality.others if e.kl_mean is not None]
    if not known:
        return None
    bars = {}
    for e in known:
        mean = math.nan if e.kl_mean is None else e.kl_mean
        error = "" if e.kl_se is None or not e.kl_se else f" ± {_nats(e.kl_se)}"
        bars[visible(e.name)] = (mean, f"{_nats(mean)}{error}")
    picture = Bars(
        "Mean KL divergence", "nats (logarithmic)", bars, tuple(_colour(e) for e in known), logarithmic=True,
        bands=VERDICTS,
    )  # fmt: skip
    text = (
        "How far the predictions of the next token move, on average over the places; ± is the standard error of the "
        "mean. The words above are those of the verdict; a value below the axis has no bar."
    )
    yardsticks = Table("To compare with", ("what", "mean KL in nats", "top-1 agreement"), YARDSTICKS)
    told = Text("Measured of SmolLM2-135M-Instruct on other texts: another model has other yardsticks.", quiet=True)
    return Card("Divergence", (Figure("quality-kl", picture, text), Listing(yardsticks), told))


def _colour(effect: Effect) -> int:
    """Return the colour of a bar: orange is what can be noticed."""
    good = effect.kl_mean is not None and effect.kl_mean <= 1e-2 and effect.verdict != "broken"
    return 1 if good else 2


def _by_place(quality: Quality) -> Card | None:
    rows = quality.n_history + np.arange(quality.n)
    shown = [e for e in quality.others if np.any(e.kl > 0)][:_MOST_LINES]
    if quality.n < 2 or not shown:
        return None
    lines = tuple(Line(visible(e.name), rows, e.kl) for e in shown)
    means = tuple(Line(visible(e.name), rows, _mean_so_far(e)) for e in shown)
    blocks: list[Block] = [
        Figure(
            "quality-by-place",
            Lines(title="KL divergence by place", x="row", y="nats", lines=lines, logarithmic_y=True),
            "Each place of the text. Peaks are places where the reference is unsure, or where rows were hit that "
            "matter there.",
        ),
        Figure(
            "quality-mean-so-far",
            Lines(title="Mean KL over the places so far", x="row", y="nats", lines=means, logarithmic_y=True),
            "Where these lines still climb or fall at their end, more places would give another mean.",
        ),
    ]
    left = sum(1 for e in quality.others if np.any(e.kl > 0)) - len(shown)
    if left:
        blocks.append(Text(f"{left:,} more are in the tables only.", quiet=True))
    return Card("Place by place", tuple(blocks))


def _mean_so_far(effect: Effect) -> Floats:
    """Return the mean KL from the first place on; places that were left out do not count."""
    good = np.isfinite(effect.kl)
    n = np.cumsum(good)
    sums = np.cumsum(np.where(good, effect.kl, 0.0))
    means: Floats = np.divide(sums, n, out=np.full(len(n), np.nan), where=n > 0)
    return means


def _bars(quality: Quality, figure: Callable[[Effect], float | None], text: Callable[[Effect], str]) -> dict[
    str, tuple[float, str]
]:  # fmt: skip
    found = ((e, figure(e)) for e in quality.others)
    return {visible(e.name): (value, text(e)) for e, value in found if value is not None and math.isfinite(value)}


def _agreement(quality: Quality) -> Card | None:
    bars = _bars(
        quality, lambda e: None if e.top1 is None else 100 * e.top1,
        lambda e: f"{e.top1:.1%}" + ("" if e.top5 is None else f", top-5 {e.top5:.1%}"),
    )  # fmt: skip
    if not bars:
        return None
    text = "Places with the same most probable token; top-5 is the mean part of the five most probable ones."
    axis = "% of places with the same most probable token"
    picture = Bars("Top-1 agreement", axis, bars, (1,) * len(bars), most=100)
    return Card("Agreement", (Figure("quality-agreement", picture, text),))


def _perplexity(quality: Quality) -> Card | None:
    if quality.perplexity is None or not math.isfinite(quality.perplexity):
        return None
    bars = {f"{visible(quality.reference)} (reference)": (quality.perplexity, share(quality.perplexity))}
    bars |= _bars(
        quality, lambda e: e.perplexity,
        lambda e: share(e.perplexity) + ("" if e.perplexity_change is None else f" ({e.perplexity_change:+.2%})"),
    )  # fmt: skip
    text = "Of the ids that really came next; lower is surer. A change is over the same places."
    colours = (3, *(1,) * (len(bars) - 1))
    return Card("Perplexity", (Figure("quality-perplexity", Bars("Perplexity", "perplexity", bars, colours), text),))

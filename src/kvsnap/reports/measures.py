"""Statistics of a cache for a page: heat maps by head, by place and by channel, distributions, similarity, tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, zip_longest

import numpy as np

from kvsnap.inspection.statistics import Channels, RowNorms, Statistics
from kvsnap.inspection.statistics.findings import findings_of
from kvsnap.plots import HeatMap, Histogram, Histograms, Strip
from kvsnap.plots.pictures import Floats
from kvsnap.reports.escaping import visible
from kvsnap.reports.page import Block, Card, Claims, Figure, Listing, Text
from kvsnap.reports.words import count, role_name
from kvsnap.results import Table

__all__ = ["cards_of", "tokens_of"]

_COLUMNS, _FEW_COLUMNS = 512, 256
"""Columns of a heat map at most, on a page about one file and about several; neighbours are put together."""
_PANELS = 48
_TOKENS, _FEW_TOKENS = 256, 64
"""Tokens that are shown from each end, on a page about one file and about several."""

_BY_HEAD = (
    ("mean_norm", "mean norm", "Mean Euclidean norm of the rows of each head."),
    (
        "effective_rank",
        "effective rank",
        "How many directions the rows of a head really use (Roy and Vetterli 2007). Low: it can be compressed.",
    ),
    (
        "outlier_ratio",
        "outlier ratio",
        "Root mean square of the strongest channel against the median one. Coarse quantisation loses such channels.",
    ),
)


def cards_of(
    statistics: Statistics, pieces: Sequence[str] | None, *, with_text: bool, brief: bool = False
) -> list[Card]:
    """Return the cards of one file. `pieces` are the texts of `statistics.tokens`, None: they are not to be shown.

    Without `with_text` no id of a token is told. `brief` draws fewer columns and tokens: for a page about several.
    """
    cards = [_findings(statistics, with_text=with_text)]
    roles = [role for role in statistics.roles if _rows(statistics, role)]
    made = (
        _by_head(statistics, roles),
        _distributions(statistics),
        _channels(statistics, roles),
        _by_place(statistics, _FEW_COLUMNS if brief else _COLUMNS, with_text=with_text),
        _alike(statistics),
        None if pieces is None else tokens_of(statistics, pieces, _FEW_TOKENS if brief else _TOKENS),
    )
    return cards + [card for card in made if card is not None]


def _rows(statistics: Statistics, role: str) -> bool:
    return any(not layer.is_state for layer in statistics.layers if layer.role == role)


def _findings(statistics: Statistics, *, with_text: bool) -> Card:
    said: list[Block] = []
    if statistics.sample is not None:
        said.append(Text(f"Figures are of a sample: {count(statistics.sample, 'row')} were asked for."))
    told = findings_of(statistics.layers, statistics.heads, statistics.sinks, statistics.similarity, ids=with_text)
    claims = tuple((visible(text), None) for text in told)
    said.append(Claims(claims) if claims else Text("Nothing stands out: no dead head, no outlier channel, no NaN."))
    if statistics.notes:
        said += [Text("About these figures:", quiet=True), Claims(tuple((visible(n), None) for n in statistics.notes))]
    columns = ("layer", "role", "n_heads", "dim", "n_rows", "mean", "std", "min", "max", "mean_norm", "effective_rank",
               "n_outliers", "n_dead", "n_nan", "n_infinite")  # fmt: skip
    rows = tuple(tuple(getattr(layer, c) for c in columns) for layer in statistics.layers)
    said.append(Listing(Table("Every layer", columns, rows), folded=True))
    return Card("What stands out", tuple(said))


def _by_head(statistics: Statistics, roles: Sequence[str]) -> Card | None:
    blocks: list[Block] = []
    for figure, scale, text in _BY_HEAD:
        for role in roles:
            matrix = statistics.matrix(role, figure)
            layers = _layers_of(statistics, role)
            if not layers or not np.isfinite(matrix).any():
                continue
            values = matrix[list(layers)].T
            blocks.append(Figure(
                f"{figure}-{role}",
                HeatMap(title=f"{scale.capitalize()}: {role_name(role)}", x="layer", y="head", scale=scale,
                        values=values, columns=tuple(map(str, layers)),
                        logarithmic=_is_wide(values)), text if role == roles[0] else "",
            ))  # fmt: skip
    return Card("Head by head", tuple(blocks)) if blocks else None


def _layers_of(statistics: Statistics, role: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(h.layer for h in statistics.heads if h.role == role))


def _is_wide(values: Floats) -> bool:
    """Tell whether values span so much that most of them would have one colour on an even scale."""
    known = values[np.isfinite(values)]
    return bool(len(known) and known.min() > 0 and known.max() > 30 * np.median(known))


def _distributions(statistics: Statistics) -> Card | None:
    layers = tuple(dict.fromkeys(d.layer for d in statistics.distributions))
    if not layers:
        return None
    step = -(-len(layers) // _PANELS)
    panels = []
    for layer in layers[::step]:
        mine = [d for d in statistics.distributions if d.layer == layer and d.counts.sum()]
        histograms = tuple(Histogram(role_name(d.role), d.edges, d.counts) for d in mine[:3])
        if histograms:
            panels.append((f"layer {layer}", histograms))
    if not panels:
        return None
    text = (
        "How the values of each layer lie; every outline has its own height. What lies beyond six standard deviations "
        "is not drawn."
    )
    if step > 1:
        text += f" Every {step}. layer is drawn."
    names = " and ".join(dict.fromkeys(role_name(d.role) for d in statistics.distributions))
    picture = Histograms(title="Distributions of values", x=f"value ({names})", panels=tuple(panels))
    return Card("Distributions of values", (Figure("distributions", picture, text),))


def _channels(statistics: Statistics, roles: Sequence[str]) -> Card | None:
    blocks: list[Block] = []
    for role in roles:
        mine = [c for c in statistics.channels if c.role == role]
        layers = tuple(dict.fromkeys(c.layer for c in mine))
        names, lines = _channel_lines(mine)
        if not lines:
            continue
        values = np.full((len(layers), len(names)), np.nan)
        for place, layer in enumerate(layers):
            line = lines[layer]
            values[place, : len(line)] = line
        picture = HeatMap(
            title=f"Channels: {role_name(role)}", x="channel", y="layer", scale="times the median channel",
            values=values, rows=tuple(map(str, layers)), columns=tuple(names), logarithmic=True,
            ticks=_heads_at(names),
        )  # fmt: skip
        text = (
            "Root mean square of each channel against the median channel of its head. Bright columns are outlier "
            "channels: the same in all layers for some models." if not blocks else ""
        )  # fmt: skip
        blocks.append(Figure(f"channels-{role}", picture, text))
    return Card("Outlier channels", tuple(blocks)) if blocks else None


def _heads_at(names: Sequence[str]) -> tuple[tuple[int, str], ...]:
    """Return the columns that heads begin at, at most 16 of them, with their labels."""
    starts = [i for i, name in enumerate(names) if name.startswith("0 of ")]
    step = -(-len(starts) // 16) or 1
    return tuple((i, names[i].removeprefix("0 of ")) for i in starts[::step]) if len(starts) > 1 else ()


def _channel_lines(mine: Sequence[Channels]) -> tuple[list[str], dict[int, Floats]]:
    """Return names of the columns, and for each layer the ratios of its channels, heads side by side.

    A column that is another channel of another head in some layer is named by its number alone.
    """
    parts: dict[int, list[Floats]] = {}
    names: dict[int, list[str]] = {}
    for found in mine:
        rms = np.asarray(found.rms, dtype=np.float64)
        fine = np.where(np.isfinite(rms), rms, np.nan)
        fine[~np.isfinite(rms).any(axis=1)] = 0.0  # a head without a number has no median channel, and nothing is drawn
        with np.errstate(invalid="ignore", divide="ignore"):
            middle = np.nanmedian(fine, axis=1, keepdims=True)
            ratios = np.where(middle > 0, rms / middle, np.nan)
        parts.setdefault(found.layer, []).append(ratios.ravel())
        heads, dim = rms.shape
        own = [f"{c} of head {found.first_head + h}" for h in range(heads) for c in range(dim)]
        names.setdefault(found.layer, []).extend(own)
    lines = {layer: np.concatenate(found) for layer, found in parts.items()}
    columns = (set(column) - {None} for column in zip_longest(*names.values()))
    return [str(next(iter(c))) if len(c) == 1 else str(i) for i, c in enumerate(columns)], lines


def _by_place(statistics: Statistics, most: int, *, with_text: bool) -> Card | None:
    blocks: list[Block] = []
    for norms in statistics.norms:
        picture = _place_map(norms, most)
        if picture is None:
            continue
        text = (
            "Mean norm over the heads of each layer, along the sequence. A bright or dark first column is what "
            "attention rests on in many models (a sink)." if not blocks else ""
        )  # fmt: skip
        blocks.append(Figure(f"positions-{norms.role}", picture, text))
    if statistics.sinks:
        columns = ("row", *(("token",) if with_text else ()), "n_layers", "value_ratio", "key_ratio")
        rows = tuple(tuple(getattr(s, c) for c in columns) for s in statistics.sinks)
        blocks.append(Listing(Table("Rows that may be attention sinks", columns, rows)))
    return Card("Along the sequence", tuple(blocks)) if blocks else None


def _place_map(norms: RowNorms, most: int) -> HeatMap | None:
    values, edges = np.asarray(norms.by_layer, dtype=np.float64), np.asarray(norms.edges)
    if not values.size or not np.isfinite(values).any():
        return None
    step = -(-values.shape[1] // most)
    if step > 1:
        widths = np.diff(edges)
        starts = np.arange(0, values.shape[1], step)
        known = np.isfinite(values)
        weighted = np.add.reduceat(np.where(known, values, 0.0) * widths, starts, axis=1)
        weights = np.add.reduceat(known * widths, starts, axis=1)
        values = np.divide(weighted, weights, out=np.full(weighted.shape, np.nan), where=weights > 0)
        edges = np.append(edges[:-1][starts], edges[-1])
    names = tuple(str(a) if b - a == 1 else f"{a} to {b - 1}" for a, b in pairwise(edges.tolist()))
    return HeatMap(
        title=f"Norms along the sequence: {role_name(norms.role)}", x="position", y="layer", scale="mean norm",
        values=values, rows=tuple(map(str, norms.layers)), columns=names, starts=tuple(int(e) for e in edges[:-1]),
        logarithmic=_is_wide(values),
    )  # fmt: skip


def _alike(statistics: Statistics) -> Card | None:
    blocks: list[Block] = []
    for found in statistics.similarity:
        if len(found.layers) < 2 or not np.isfinite(found.values).any():
            continue
        names = tuple(map(str, found.layers))
        picture = HeatMap(
            title=f"Similarity of layers: {role_name(found.role)}", x="layer", y="layer", scale="linear CKA",
            values=np.asarray(found.values, dtype=np.float64), rows=names, columns=names,
        )  # fmt: skip
        text = (
            f"Linear CKA (Kornblith et al. 2019) of the rows of two layers, over {count(found.n_rows, 'row')}. 1: the "
            "same up to rotation and scale; 0: nothing in common." if not blocks else ""
        )  # fmt: skip
        blocks.append(Figure(f"similarity-{found.role}", picture, text))
    return Card("Similarity of layers", tuple(blocks)) if blocks else None


def tokens_of(statistics: Statistics, pieces: Sequence[str], most: int) -> Card | None:
    """Return the tokens, coloured by the norms of their rows; the first and the last `most` of a long history.

    `pieces` are those of the last rows, where a foreign file has no more.
    """
    blocks: list[Block] = []
    unstored = max(0, statistics.n_rows - len(pieces))
    for norms in statistics.norms:
        if norms.role not in ("k", "v", "latent"):
            continue
        values = np.asarray(norms.by_row, dtype=np.float64)[unstored:]
        n = min(len(values), len(pieces))
        if not n:
            continue
        for first, stop in ((0, n),) if n <= 2 * most else ((0, most), (n - most, n)):
            part = "" if n <= 2 * most else f", positions {unstored + first:,} to {unstored + stop - 1:,}"
            picture = Strip(
                title=f"Tokens by the norm of their {role_name(norms.role)}{part}", scale="mean norm",
                tokens=tuple(visible(piece) for piece in pieces[first:stop]), values=values[first:stop],
                first=unstored + first, logarithmic=_is_wide(values[first:stop]),
            )  # fmt: skip
            blocks.append(Figure(f"tokens-{norms.role}-{unstored + first}", picture))
        if n > 2 * most:
            blocks.append(Text(f"{n - 2 * most:,} tokens in the middle are left out.", quiet=True))
    told = "Mean over layers and heads."
    if unstored:
        told += f" The file has the ids of the last {count(len(pieces), 'row')} only."
    return Card("Token by token", (Text(told), *blocks)) if blocks else None

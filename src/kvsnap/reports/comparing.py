"""A comparison of two caches for a page: what differs, by layer and head, along the sequence, and in size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from kvsnap.inspection.diff.answers import Diff, PositionDifference
from kvsnap.plots import HeatMap, Line, Lines
from kvsnap.reports.escaping import visible
from kvsnap.reports.page import Block, Card, Claims, Facts, Figure, Listing, Note, Text
from kvsnap.reports.words import role_name, share, size
from kvsnap.results import Table

__all__ = ["cards_of_diff"]

_FIGURES = (
    ("relative_error", "relative error", "Length of the difference of a head against that of a (Frobenius norms)."),
    ("cosine_min", "lowest cosine", "The row of each head that points away most: 1 is the same direction."),
)  # fmt: skip


def cards_of_diff(diff: Diff, names: tuple[str, str], *, with_text: bool) -> list[Card]:
    """Return the cards of a comparison; `names` are what the two files are called on the page."""
    made = [_verdict(diff, names, with_text=with_text)]
    cards = (_by_head(diff), _along(diff), _similarity(diff, names), _growth(diff, names))
    return made + [card for card in cards if card is not None]


def _verdict(diff: Diff, names: tuple[str, str], *, with_text: bool) -> Card:
    tokens = diff.tokens
    said: list[Block] = [Claims(tuple((visible(text), None) for text in diff.sentences(ids=with_text)))]
    facts = [
        ("a", names[0]), ("b", names[1]), ("tokens in common", f"{tokens.n_common:,} from the start"),
        ("rows of the same input", f"{tokens.n_rows:,}"),
    ]  # fmt: skip
    if tokens.first is not None:
        facts.append(("first difference", f"at token {tokens.first:,}"))
        if with_text:
            facts.append(("ids there", f"{tokens.token_a} and {tokens.token_b}"))
            texts = [("text before", tokens.text_before), ("text of a", tokens.text_a), ("text of b", tokens.text_b)]
            facts += [(name, visible(text)) for name, text in texts if text]
    said.append(Facts(tuple((name, visible(text)) for name, text in facts)))
    if diff.all_rows and tokens.first is not None:
        said.append(Note("Rows behind the first difference of the tokens were compared, too: they are of other input."))
    columns = ("layer", "role", "n_rows", "n_different", "relative_error", "cosine_mean", "max_abs", "within_bound")
    rows = tuple(tuple(getattr(layer, c) for c in columns) for layer in diff.layers)
    said.append(Listing(Table("Every layer", columns, rows), folded=True))
    differing = [f for f in diff.identity if f.verdict != "match"]
    if differing:
        fields = tuple((f.name, f.verdict, f.level, visible(f.a), visible(f.b)) for f in differing)
        said.append(Listing(Table("Identity", ("field", "verdict", "decides", "a", "b"), fields), folded=True))
    beside = [o for o in diff.others if o.verdict != "equal"]
    if beside:
        sides = tuple((o.name, o.verdict, *((visible(o.a), visible(o.b)) if with_text else ("", ""))) for o in beside)
        said.append(Listing(Table("Beside the cache", ("what", "verdict", "a", "b"), sides), folded=True))
    if diff.logits is not None:
        told = f"KL {share(diff.logits.kl_ab)} nats, largest difference {share(diff.logits.max_abs)}"
        said.append(Text(f"Stored logits: {told}."))
    if diff.not_compared:
        left = tuple((visible(n.what), visible(n.why)) for n in diff.not_compared)
        said.append(Listing(Table("Not compared", ("what", "why"), left), folded=True))
    return Card("What differs", tuple(said))


def _by_head(diff: Diff) -> Card | None:
    blocks: list[Block] = []
    for figure, scale, text in _FIGURES:
        first = True
        for role in diff.roles:
            layers, values = diff.matrix(role, figure)
            if not values.size or not np.isfinite(values).any():
                continue
            positive = values[np.isfinite(values) & (values > 0)]
            picture = HeatMap(
                title=f"{scale.capitalize()}: {role_name(role)}", x="layer", y="head", scale=scale, values=values.T,
                columns=tuple(map(str, layers)),
                logarithmic=bool(len(positive) and positive.max() > 30 * positive.min()),
            )  # fmt: skip
            blocks.append(Figure(f"diff-{figure}-{role}", picture, text if first else ""))
            first = False
    return Card("Head by head", tuple(blocks)) if blocks else None


def _along(diff: Diff) -> Card | None:
    blocks: list[Block] = []
    shown = [p for p in diff.positions if len(p.rows)]
    if not shown:
        return None
    lines = tuple(Line(role_name(p.role), p.rows, p.relative_error) for p in shown[:6])
    blocks.append(Figure(
        "diff-by-row",
        Lines(title="Relative error by position", x="position", y="relative error", lines=lines),
        "All layers and heads together.",
    ))  # fmt: skip
    blocks += [Figure(f"diff-positions-{p.role}", _place_map(p)) for p in shown if p.layer_relative_error.size]
    return Card("Along the sequence", tuple(blocks))


def _place_map(found: PositionDifference) -> HeatMap:
    edges = found.edges
    names = tuple(str(a) if b - a == 1 else f"{a} to {b - 1}" for a, b in pairwise(edges.tolist()))
    values = found.layer_relative_error
    positive = values[np.isfinite(values) & (values > 0)]
    return HeatMap(
        title=f"Relative error along the sequence: {role_name(found.role)}", x="position", y="layer",
        scale="relative error", values=values, rows=tuple(map(str, found.layers)), columns=names,
        starts=tuple(int(e) for e in edges[:-1]),
        logarithmic=bool(len(positive) and positive.max() > 30 * positive.min()),
    )  # fmt: skip


def _similarity(diff: Diff, names: tuple[str, str]) -> Card | None:
    blocks: list[Block] = []
    for found in diff.similarity:
        if not np.isfinite(found.cka).any():
            continue
        picture = HeatMap(
            title=f"Similarity of layers: {role_name(found.role)}", x=f"layer of {visible(names[1])}",
            y=f"layer of {visible(names[0])}", scale="linear CKA", values=found.cka,
            rows=tuple(map(str, found.layers_a)), columns=tuple(map(str, found.layers_b)),
        )  # fmt: skip
        text = f"Linear CKA over {found.n_rows:,} rows of the same input: 1 is the same up to rotation and scale."
        blocks.append(Figure(f"diff-similarity-{found.role}", picture, text))
    return Card("Similarity of layers", tuple(blocks)) if blocks else None


def _growth(diff: Diff, names: Sequence[str]) -> Card | None:
    if not diff.growth:
        return None
    blocks: list[Block] = []
    points = [point for point in diff.lengths if point.n_tokens > 0]
    if len(points) > 1:
        lengths = np.array([point.n_tokens for point in points])
        lines = (
            Line(f"a: {visible(names[0])}", lengths, np.array([p.nbytes_a for p in points]) / 1e6, marked=True),
            Line(f"b: {visible(names[1])}", lengths, np.array([p.nbytes_b for p in points]) / 1e6, marked=True),
        )
        picture = Lines(title="Size of the cache by length", x="tokens", y="MB", lines=lines, logarithmic_x=True,
                        logarithmic_y=True)  # fmt: skip
        text = f"For each token more: {size(diff.a.bytes_per_token)} and {size(diff.b.bytes_per_token)}, decoded."
        blocks.append(Figure("diff-growth", picture, text))
    columns = ("kind", "layers_a", "layers_b", "per_token_a", "per_token_b", "nbytes_a", "nbytes_b")
    rows = tuple(tuple(getattr(g, c) for c in columns) for g in diff.growth)
    blocks.append(Listing(Table("By kind", columns, rows)))
    return Card("Growth", tuple(blocks))

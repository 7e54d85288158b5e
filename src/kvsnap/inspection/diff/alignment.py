"""How two histories of ids agree: from the first id on, behind the first that differs, and as text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvsnap.inspection.diff.answers import Alignment, SameRun
from kvsnap.layout import PositionRun, Snapshot
from kvsnap.runs import common_length

__all__ = ["Detokenize", "align", "same_runs"]

Detokenize = Callable[[Sequence[int]], str]
Ids = npt.NDArray[np.int64]

_WORD = 4
"""Ids in a row that have to stand once on each side, for the sides to be tied together there."""
_AROUND = 16
"""Ids that are shown as text on each side of the first that differs."""
_CHARACTERS = 60
"""Characters that are shown instead where only stored texts are known."""


def align(a: Snapshot, b: Snapshot, decode: tuple[Detokenize | None, Detokenize | None] = (None, None)) -> Alignment:
    """Return how the ids of two snapshots agree, and how many rows of both have the same input.

    No rows are read. `decode` turns ids of each side into text.
    """
    skipped = [max(0, s.n_rows + s.n_pending - len(s.tokens)) for s in (a, b)]
    start = max(skipped)
    left, right = (s.tokens[start - skip :] for s, skip in zip((a, b), skipped, strict=True))
    n_common = common_length(left, right)
    # Where a side lacks the ids of its first rows, they are taken to be the same.
    known = not start and not (a.n_rows and not a.tokens) and not (b.n_rows and not b.tokens)
    notes = [] if known else [f"the ids of the first {start:,} rows are not stored on both sides: taken to be the same"]
    n_rows = min(start + n_common, a.n_rows, b.n_rows)
    positions = _same_positions(a, b, n_rows)
    if positions < n_rows:
        notes.append(f"positions differ from row {positions:,} on, where the ids are the same")
        n_rows = positions
    rows, told = _outside(a, b, n_rows)
    first = n_common if n_common < min(len(left), len(right)) else None
    relation = _relation(left, right, n_common) if known or first is not None else "unknown"
    made = Alignment(
        n_common=n_common, first=None if first is None else start + first, relation=relation,
        token_a=left[n_common] if first is not None else None, token_b=right[n_common] if first is not None else None,
        text_before=None, text_a=None, text_b=None, runs=(), n_same_place=0, n_rows=rows,
        by="tokens" if known else "rows", notes=(*notes, *told),
    )  # fmt: skip
    if n_common == len(left) == len(right):
        return made
    rest = np.asarray(left[n_common:], np.int64), np.asarray(right[n_common:], np.int64)
    shared = min(map(len, rest))
    runs = tuple(SameRun(r.a + start + n_common, r.b + start + n_common, r.count) for r in same_runs(*rest))
    made = replace(made, runs=runs, n_same_place=int((rest[0][:shared] == rest[1][:shared]).sum()))
    return _with_text(made, a, b, (left, right), decode)


def _relation(
    left: Sequence[int], right: Sequence[int], n_common: int
) -> Literal["same", "a begins with b", "b begins with a", "diverge", "unknown"]:
    if n_common == len(left) == len(right):
        return "same"
    if n_common == len(left):
        return "b begins with a"
    return "a begins with b" if n_common == len(right) else "diverge"


def _same_positions(a: Snapshot, b: Snapshot, n_rows: int) -> int:
    """Return how many of the first `n_rows` rows have the same positions. Walks runs, so it costs nothing for many."""
    left, right = (list(s.positions or (PositionRun(0, s.n_rows),)) for s in (a, b))
    i = j = at = behind_a = behind_b = 0
    while at < n_rows and i < len(left) and j < len(right):
        if left[i].start + at - behind_a != right[j].start + at - behind_b:
            return at
        ends = behind_a + left[i].count, behind_b + right[j].count
        at = min(ends)
        if ends[0] == at:
            i, behind_a = i + 1, ends[0]
        if ends[1] == at:
            j, behind_b = j + 1, ends[1]
    return min(at, n_rows)


def _outside(a: Snapshot, b: Snapshot, n_rows: int) -> tuple[int, list[str]]:
    """Return the rows of the same input in view of what is not ids: the input of an encoder, another tokenizer."""
    inputs = a.encoder_input, b.encoder_input
    if inputs[0] is not None and inputs[1] is not None and inputs[0] != inputs[1]:
        return 0, ["the encoder was given another input: no rows are of the same input"]
    names = a.identity.tokenizer, b.identity.tokenizer
    if all(names) and names[0] != names[1]:
        if a.text is not None and b.text is not None and a.tokens == b.tokens and a.text != b.text:
            return 0, ["the tokenizers differ, and the same ids are other text"]
        return n_rows, ["the tokenizers differ: the same ids may be other text"]
    return n_rows, []


# -- what agrees behind ----------------------------------------------------------------------------------------------


def same_runs(a: Ids, b: Ids) -> list[SameRun]:
    """Return runs of ids that agree, in the order of both, whatever was put in or taken out between them.

    The common end is one of them. Others hang on words of four ids that stand once on each side (as in patience diff),
    so that the cost is that of sorting; what repeats itself without such a word may be missed. int64 `[n]` each.
    """
    shared = min(len(a), len(b))
    differs = np.flatnonzero(a[len(a) - shared :][::-1] != b[len(b) - shared :][::-1])
    tail = int(differs[0]) if len(differs) else shared
    ends = len(a) - tail, len(b) - tail
    found: list[SameRun] = []
    at = 0, 0
    for i, j in _anchors(a[: ends[0]], b[: ends[1]]):
        if i < at[0] or j < at[1]:
            continue
        back = _agree(a[at[0] : i][::-1], b[at[1] : j][::-1])
        count = back + _agree(a[i : ends[0]], b[j : ends[1]])
        found.append(SameRun(i - back, j - back, count))
        at = i - back + count, j - back + count
    return [*found, SameRun(*ends, tail)] if tail else found


def _agree(a: Ids, b: Ids) -> int:
    """Return how many ids agree from the first on, looking at stretches that double."""
    shared, at, step = min(len(a), len(b)), 0, 64
    while at < shared:
        differs = np.flatnonzero(a[at : min(shared, at + step)] != b[at : min(shared, at + step)])
        if len(differs):
            return at + int(differs[0])
        at, step = at + step, 2 * step
    return shared


def _anchors(a: Ids, b: Ids) -> list[tuple[int, int]]:
    """Return the places of words that stand once on each side, the most that are in the same order on both."""
    if min(len(a), len(b)) < _WORD:
        return []
    words = [np.lib.stride_tricks.sliding_window_view(ids, _WORD) for ids in (a, b)]
    once = []
    for side in words:
        mixed = side.astype(np.uint64) @ np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 1],
                                                  np.uint64)  # fmt: skip
        keys, first, count = np.unique(mixed, return_index=True, return_counts=True)
        once.append((keys[count == 1], first[count == 1]))
    _, i, j = np.intersect1d(once[0][0], once[1][0], assume_unique=True, return_indices=True)
    places = np.stack([once[0][1][i], once[1][1][j]], axis=1)
    places = places[(words[0][places[:, 0]] == words[1][places[:, 1]]).all(axis=1)]  # two words of one key are no match
    return _rising(places[np.argsort(places[:, 0])].tolist())


def _rising(pairs: list[list[int]]) -> list[tuple[int, int]]:
    """Return the longest part of pairs, sorted by the first, in which the second rises."""
    tails: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for k, (_, j) in enumerate(pairs):
        at = bisect_left(tails, j)
        before.append(ends[at - 1] if at else -1)
        tails[at : at + 1], ends[at : at + 1] = [j], [k]
    made, k = [], ends[-1] if ends else -1
    while k >= 0:
        made.append((pairs[k][0], pairs[k][1]))
        k = before[k]
    return made[::-1]


# -- as text ---------------------------------------------------------------------------------------------------------


def _with_text(
    made: Alignment, a: Snapshot, b: Snapshot, ids: tuple[Sequence[int], Sequence[int]], decode: tuple[Any, Any]
) -> Alignment:
    n = made.n_common
    if decode[0] is not None and decode[1] is not None:
        before = [d(i[max(0, n - _AROUND) : n]) for d, i in zip(decode, ids, strict=True)]
        whole = [d(i[max(0, n - _AROUND) : n + _AROUND]) for d, i in zip(decode, ids, strict=True)]
        # A character may be spread over ids of both sides of the place: then the text before it ends earlier.
        same = min(len(before[0]), common_length(*whole))
        return replace(made, text_before=whole[0][:same], text_a=whole[0][same:], text_b=whole[1][same:])
    if a.text is None or b.text is None:
        return made
    same = _common_text(a.text, b.text)
    if same == len(a.text) == len(b.text):
        return replace(made, notes=(*made.notes, "the stored texts are the same, divided into other ids"))
    start = max(0, same - _CHARACTERS)
    return replace(
        made, text_before=a.text[start:same], text_a=a.text[same : same + _CHARACTERS],
        text_b=b.text[same : same + _CHARACTERS],
    )  # fmt: skip


def _common_text(a: str, b: str) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:  # a comparison of stretches is quick: halve
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low

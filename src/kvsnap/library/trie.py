"""Token histories as chains of blocks, each named by the digest of all ids up to its end. docs/library.md.

Equal beginnings have equal digests, so histories that share a beginning share its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kvsnap.library.contents import Facts

__all__ = ["BLOCK", "Reach", "blocks", "common", "is_end", "reusable"]

BLOCK = 256
"""Ids in a block; the last one of a history may have fewer."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Files, by their number in the catalogue, with how many ids of a history agree; `start` is the least of them."""

    start: int
    files: Mapping[int, int]


def blocks(tokens: npt.NDArray[np.int32]) -> Iterator[tuple[bytes, bytes]]:
    """Yield digest, `xxh3_128(digest before || ids)` with zeros before the first, and ids (i32) of each block."""
    digest = bytes(16)
    raw = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    for at in range(0, len(raw), 4 * BLOCK):
        ids = raw[at : at + 4 * BLOCK]
        digest = xxhash.xxh3_128_digest(digest + ids)
        yield digest, ids


def common(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    """Return how many ids two histories have in common from the start."""
    n = min(len(a), len(b))
    differing = np.flatnonzero(a[:n] != b[:n])
    return int(differing[0]) if len(differing) else n


def reusable(facts: Facts, agreed: int) -> tuple[int, int]:
    """Return what of a session is of use where its first `agreed` ids fit: (ids to keep, rows that stay).

    That is what `Session.truncate` leaves: a layer that cannot be cut inside a turn goes back to the end of one.
    """
    if agreed >= facts.n_tokens:
        return facts.n_tokens, facts.n_rows
    ends = facts.turns
    count = int(np.searchsorted(ends[:, 0], agreed, side="right"))
    tokens, rows = (int(ends[count - 1, 0]), int(ends[count - 1, 1])) if count else (0, 0)
    if tokens == agreed or not facts.rewindable:
        return tokens, rows
    unstored = facts.n_rows + facts.n_pending - facts.n_tokens
    more = min(int(ends[count, 1]) - rows, agreed + unstored - rows)
    return agreed, rows + max(0, more)


def is_end(facts: Facts, n_tokens: int) -> bool:
    """Tell whether a turn ended behind the first `n_tokens` ids, where a session can be cut."""
    ends = facts.turns[:, 0]
    place = int(np.searchsorted(ends, n_tokens))
    return place < len(ends) and int(ends[place]) == n_tokens

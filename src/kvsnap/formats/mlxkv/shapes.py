"""The shape of head tensors. A file stores only how many values each has, and header numbers that need not be true."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvsnap.formats.mlxkv.model import File, Head, LayerEntry

__all__ = ["HeadShape", "head_shapes"]


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Rows and widths of one head; `sure` is False where nothing in the file confirms them."""

    key_rows: int
    key_dim: int
    value_rows: int
    value_dim: int
    sure: bool = True


def head_shapes(file: File, entry: LayerEntry) -> tuple[HeadShape, ...]:
    """Return the shape of each head of an entry."""
    known: dict[tuple[int, int], HeadShape] = {}
    found = []
    for head in entry.heads:
        sizes = (head.key.n, head.value.n)
        if sizes not in known:
            known[sizes] = _shape(file, entry, head)
        found.append(known[sizes])
    return tuple(found)


def _shape(file: File, entry: LayerEntry, head: Head) -> HeadShape:
    n_key, n_value = head.key.n, head.value.n
    longest = n_key or n_value
    if not longest:
        return HeadShape(0, max(1, file.head_dim), 0, max(1, file.head_dim))
    for rows in _candidates(file, entry, longest):
        if rows and n_key % rows == 0 and n_value % rows == 0:
            key_dim, value_dim = n_key // rows, n_value // rows
            # An empty side has no rows, but a width all the same.
            return HeadShape(
                rows if n_key else 0, key_dim or value_dim, rows if n_value else 0, value_dim or key_dim
            )  # fmt: skip
    if file.head_dim and n_key % file.head_dim == 0 and n_value % file.head_dim == 0:
        return HeadShape(n_key // file.head_dim, file.head_dim, n_value // file.head_dim, file.head_dim)
    return HeadShape(1 if n_key else 0, n_key or 1, 1 if n_value else 0, n_value or 1, sure=False)


def _candidates(file: File, entry: LayerEntry, n_values: int) -> Iterator[int]:
    """Yield row counts, the most trustworthy first.

    Version 6 tells the window of a layer, and its head width may be that of the widest layer; so there the rows are
    trusted. Before, a window is not told, and the head width is that of the first layer: trusted where it gives no more
    rows than there are.
    """
    held = min(file.seq_len, entry.max_size or file.seq_len)
    by_width = n_values // file.head_dim if file.head_dim and n_values % file.head_dim == 0 else 0
    if file.version < 6 and 0 < by_width <= max(file.seq_len, len(file.tokens)):
        yield by_width
    yield held
    if by_width <= max(file.seq_len, len(file.tokens), 1):
        yield by_width
    shape = entry.key_shape
    if len(shape) == 4 and shape[2] > 0:
        yield shape[2]
    yield len(file.tokens)
    yield by_width

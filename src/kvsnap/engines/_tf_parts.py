"""What one layer of a transformers model keeps: its parts, their axes and sizes. No torch in here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvsnap.tensors import Growth, Pairing, RopeState, TensorSpec

__all__ = ["Geometry", "Part", "heads", "named", "rows", "state"]

Sizes = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a layer: its role, its axes and the size of each, how it grows, what was done to its rows.

    `sizes` has 0 for the axis `row`, and None where only a pass of the model tells the size. `dtype` is "" for the
    dtype of the cache; a state may have one of its own, which the pass tells too. `name` is that of the tensor in its
    layer, "" for one made from the role.

    `group` is set where positions are taken together in groups of so many, from the first one on: nothing can be taken
    out from between them. What is replaced and counts holds the positions behind the last whole group (`held` "rest"),
    or those of that group ("last").
    """

    role: str
    axes: tuple[str, ...]
    sizes: Sizes
    growth: Growth = "grow"
    window: int = 0
    tokens_per_row: int = 1
    dtype: str = ""
    rope: RopeState = "none"
    pairing: Pairing = ""
    group: int = 0
    held: Literal["", "rest", "last"] = ""
    name: str = ""

    @property
    def row_axis(self) -> int:
        return self.axes.index("row") if "row" in self.axes else -1

    @property
    def is_known(self) -> bool:
        return None not in self.sizes

    @property
    def counts(self) -> bool:
        """True where the number of rows follows from the number of positions, and is no other."""
        return self.growth == "grow" or bool(self.held)

    def needed(self, n_rows: int) -> int:
        """Return the rows of this tensor without which the model cannot go on behind `n_rows` positions."""
        if self.held == "rest":
            return n_rows % self.group
        if self.held == "last":
            return self.group if n_rows >= self.group else 0
        if self.growth == "window":
            return min(n_rows, self.window - 1)
        return n_rows // self.tokens_per_row

    def shape(self, n: int) -> Sizes:
        """Return the sizes with `n` for the axis `row`."""
        return tuple(n if axis == self.row_axis else size for axis, size in enumerate(self.sizes))

    def fits(self, shape: Sequence[int]) -> bool:
        """Tell whether a tensor without its batch axis may be this one, whatever its number of rows."""
        found = tuple(shape)
        return len(found) == len(self.sizes) and all(
            axis == self.row_axis or size is None or size == length
            for axis, (size, length) in enumerate(zip(self.sizes, found, strict=True))
        )

    def learned(self, shape: Sequence[int], dtype: str) -> Part:
        """Return the part with the sizes that a live tensor shows, without its batch axis."""
        sizes = tuple(0 if axis == self.row_axis else int(length) for axis, length in enumerate(shape))
        return replace(self, sizes=sizes, dtype=dtype if self.dtype or self.row_axis < 0 else "")


def heads(
    role: str, count: int | None, width: int | None, rope: RopeState = "none", pairing: Pairing = "", window: int = 0
) -> Part:
    """Return rows for each head: `[head, row, dim]`, of a window where one is given."""
    growth: Growth = "window" if window else "grow"
    return Part(role, ("head", "row", "dim"), (count, 0, width), growth, window, rope=rope, pairing=pairing)


def rows(role: str, width: int | None, rope: RopeState = "none", pairing: Pairing = "") -> Part:
    """Return rows without heads: `[row, dim]`."""
    return Part(role, ("row", "dim"), (0, width), rope=rope, pairing=pairing)


def state(role: str, shape: Sequence[int], dtype: str) -> Part:
    """Return a state that every pass makes anew, as a live tensor without its batch axis shows it."""
    names = {1: ("dim",), 2: ("channel", "tap"), 3: ("head", "key", "value")}
    axes = names.get(len(shape)) or tuple(f"axis{place}" for place in range(len(shape)))
    return Part(role, axes, tuple(map(int, shape)), "replaced", dtype=dtype)


@dataclass(frozen=True, slots=True)
class Geometry:
    """What one layer of a model keeps, and in which order; `kind` is that of `Layer`.

    `open`: the layer keeps states as well, or only states, that a pass of the model tells. `shares` is the layer whose
    tensors this one uses. `quantisation` is that of `Layer`.
    """

    kind: str
    query_heads: int
    parts: tuple[Part, ...] = ()
    open: bool = False
    shares: int | None = None
    quantisation: str = ""

    @property
    def is_known(self) -> bool:
        return not self.open and all(part.is_known for part in self.parts)

    def specs(self, layer: int, first: int, dtype: str) -> tuple[TensorSpec, ...]:
        """Return the specs of layer number `layer`, with ids from `first` on. The sizes must be known."""
        names = named(part.name or part.role for part in self.parts)
        return tuple(
            TensorSpec(
                id=first + place, name=f"layers.{layer}.{name}", layer=layer, role=part.role, dtype=part.dtype or dtype,
                axes=part.axes, shape=tuple(size or 0 for size in part.sizes), growth=part.growth,
                row_axis=part.row_axis, tokens_per_row=part.tokens_per_row, window=part.window, rope=part.rope,
                pairing=part.pairing,
            )
            for place, (name, part) in enumerate(zip(names, self.parts, strict=True))
        )  # fmt: skip


def named(roles: Iterable[str]) -> list[str]:
    """Return a name for each role of a layer: the role, and from the second of one role on its number."""
    seen: dict[str, int] = {}
    out = []
    for role in roles:
        count = seen[role] = seen.get(role, -1) + 1
        out.append(f"{role}.{count}" if count else role)
    return out

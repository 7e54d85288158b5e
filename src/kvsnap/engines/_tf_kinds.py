"""How one class of cache layer is handled: what is asked of every kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["LayerKind", "Live"]

Live = tuple[tuple[str, Any], ...]
"""The live tensors of a layer, each with its role. The roles of rows are those of keys and values, `k` and `v`."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """How one class of cache layer is handled.

    `read(layer)` returns the live tensors `[batch, ...]` with their roles, in the order of the parts, or () while it
    holds nothing; `write(layer, live, n_rows)` makes such tensors the content of an empty layer;
    `rows(layer)` counts the positions it has seen, None where it does not; `cut(layer, rows)` drops the positions
    behind, allocates nothing, may be called twice, and raises `UnsupportedError` where the layer cannot.

    To undo a pass that failed, `drop(layer, rows)` takes away the rows that it added, where there is one, and what the
    attributes `kept` referred to is put back; of those that a pass writes over in place, `copied`, the content is kept
    and put back into the same memory.

    `fixed(layer)` are the tensors that no pass changes, for noticing who else did. `module` is where the class is
    defined. `quantisation(layer)` tells how a layer keeps its rows as codes, as the text of `Layer`. With `spare` a
    window may hold a row more than the next pass reads, which is then none of its rows.
    """

    read: Callable[[Any], Live]
    write: Callable[[Any, Live, int], None]
    rows: Callable[[Any], int | None]
    cut: Callable[[Any, int], None]
    drop: Callable[[Any, int], None] | None = None
    kept: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    fixed: Callable[[Any], tuple[Any, ...]] | None = None
    module: str = "transformers.cache_utils"
    quantisation: Callable[[Any], str] = lambda _: ""
    spare: bool = False

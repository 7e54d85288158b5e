"""What a notebook shows of a snapshot or a head. No tensor of a snapshot is read."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from kvsnap.inspection.geometry import groups_of, layer_summaries, shapes_of
from kvsnap.layout import Head, Snapshot
from kvsnap.results import Table

__all__ = ["html_of"]


def html_of(shown: Snapshot | Head) -> str:
    """Return a table as HTML: counts, sizes and layers of a snapshot; shape, range and norms of a head."""
    return (_of_head(shown) if isinstance(shown, Head) else _of_snapshot(shown)).to_html()


def _of_snapshot(s: Snapshot) -> Table:
    rows: list[tuple[str, Any]] = [("architecture", s.architecture or "unknown")]
    rows += [("layers", group.text) for group in groups_of(layer_summaries(shapes_of(s.layers), (), Counter()))]
    rows += [
        ("tokens", len(s.tokens)), ("evaluated positions", s.n_rows), ("pending", s.n_pending),
        ("bytes of tensors", s.nbytes), ("logits", s.logits is not None),
        ("fidelity", "exact" if not s.bound else f"values off by up to {s.bound:.3g}"),
    ]  # fmt: skip
    return Table("Snapshot", ("what", "value"), tuple(rows))


def _of_head(head: Head) -> Table:
    rows = []
    for name, values in (("k", head.k), ("v", head.v)):
        wide = values.astype(np.float64)
        fine = wide[np.isfinite(wide)]
        norms = np.sqrt((wide * wide).sum(axis=-1))
        norms = norms[np.isfinite(norms)]
        rows.append((
            name, *values.shape, float(fine.min()) if fine.size else None, float(fine.max()) if fine.size else None,
            float(norms.mean()) if norms.size else None, int(wide.size - fine.size),
        ))  # fmt: skip
    return Table("Head", ("array", "rows", "width", "min", "max", "mean_norm", "not_finite"), tuple(rows))

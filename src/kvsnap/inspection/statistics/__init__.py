"""Statistics of a cache by layer, head, channel and row, in one pass with bounded memory."""

from __future__ import annotations

from kvsnap.inspection.statistics.answers import (
    Channels,
    Distribution,
    HeadStatistics,
    LayerStatistics,
    RowNorms,
    Similarity,
    Sink,
    Statistics,
)
from kvsnap.inspection.statistics.gathering import statistics

__all__ = [
    "Channels",
    "Distribution",
    "HeadStatistics",
    "LayerStatistics",
    "RowNorms",
    "Similarity",
    "Sink",
    "Statistics",
    "statistics",
]

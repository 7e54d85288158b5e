"""What is in a file or a cache, without a model: summaries, checks, figures. Answers are plain data (`results`)."""

from __future__ import annotations

from kvsnap.inspection.checking import NonFinite, non_finite, verify
from kvsnap.inspection.described import (
    Fork,
    InLibrary,
    LayerGroup,
    LayerSummary,
    PartSize,
    Stored,
    Summary,
    TurnCounts,
)
from kvsnap.inspection.summary import refuse_key, summarise

__all__ = [
    "Fork", "InLibrary", "LayerGroup", "LayerSummary", "NonFinite", "PartSize", "Stored", "Summary", "TurnCounts",
    "non_finite", "refuse_key", "summarise", "verify",
]  # fmt: skip

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
from kvsnap.inspection.diff.answers import Diff
from kvsnap.inspection.growth.answers import Checked, Growth, GrowthPoint, LayerGrowth, TensorGrowth, TurnGrowth
from kvsnap.inspection.summary import refuse_key, summarise

__all__ = [
    "Checked",
    "Diff",
    "Fork",
    "Growth",
    "GrowthPoint",
    "InLibrary",
    "LayerGroup",
    "LayerGrowth",
    "LayerSummary",
    "NonFinite",
    "PartSize",
    "Stored",
    "Summary",
    "TensorGrowth",
    "TurnCounts",
    "TurnGrowth",
    "non_finite",
    "refuse_key",
    "summarise",
    "verify",
]

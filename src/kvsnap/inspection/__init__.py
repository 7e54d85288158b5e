"""What is in a file or a cache, without a model: summaries, checks, figures. Answers are plain data (`results`)."""

from __future__ import annotations

from kvsnap.inspection.checking import NonFinite, non_finite, verify
from kvsnap.inspection.comparing import diff
from kvsnap.inspection.differences import Diff
from kvsnap.inspection.growth import Checked, Growth, GrowthPoint, LayerGrowth, TensorGrowth, TurnGrowth
from kvsnap.inspection.summary import LayerSummary, Stored, Summary, refuse_key, summarise

__all__ = [
    "Checked",
    "Diff",
    "Growth",
    "GrowthPoint",
    "LayerGrowth",
    "LayerSummary",
    "NonFinite",
    "Stored",
    "Summary",
    "TensorGrowth",
    "TurnGrowth",
    "diff",
    "non_finite",
    "refuse_key",
    "summarise",
    "verify",
]

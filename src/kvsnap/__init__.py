"""kvsnap: a save file for the live state of a language model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsnap.api import (
        LossReport,
        Restored,
        Rope,
        capture,
        check,
        connect,
        convert,
        dumps,
        generate,
        growth,
        inspect,
        join,
        load,
        loads,
        remove,
        repair,
        restore,
        reuse,
        save,
        split,
        verify,
        warm_from_tokens,
    )
    from kvsnap.attention import AttentionSnapshot
    from kvsnap.branching import Branch, Branches, branch
    from kvsnap.conversation import Conversation
    from kvsnap.drafts import draft_of, with_draft
    from kvsnap.errors import KvsnapError
    from kvsnap.identity import Compatibility, Identity
    from kvsnap.inspection.diff.answers import Diff
    from kvsnap.inspection.diff.comparing import diff
    from kvsnap.inspection.exporting import head_table
    from kvsnap.inspection.growth.answers import Growth
    from kvsnap.inspection.listing import listing
    from kvsnap.inspection.quality.answers import Quality
    from kvsnap.inspection.quality.judging import quality
    from kvsnap.inspection.statistics import Statistics, statistics
    from kvsnap.journalling import Journalled, journal
    from kvsnap.layout import Head, Layer, Sampler, Snapshot, Tensor
    from kvsnap.library import Library
    from kvsnap.probing import inspect_attention, probe, save_attention
    from kvsnap.protocols import Engine, Token
    from kvsnap.reporting import ReportFile, report, report_answer, report_library
    from kvsnap.session import Session
    from kvsnap.speculation import Speculated, Speculation, speculate
    from kvsnap.starting import Started, start
    from kvsnap.sweeping import Continuation, sweep

__version__ = "0.1.0"

__all__ = [
    "AttentionSnapshot",
    "Branch",
    "Branches",
    "Compatibility",
    "Continuation",
    "Conversation",
    "Diff",
    "Engine",
    "Growth",
    "Head",
    "Identity",
    "Journalled",
    "KvsnapError",
    "Layer",
    "Library",
    "LossReport",
    "Quality",
    "ReportFile",
    "Restored",
    "Rope",
    "Sampler",
    "Session",
    "Snapshot",
    "Speculated",
    "Speculation",
    "Started",
    "Statistics",
    "Tensor",
    "Token",
    "__version__",
    "branch",
    "capture",
    "check",
    "connect",
    "convert",
    "diff",
    "draft_of",
    "dumps",
    "generate",
    "growth",
    "head_table",
    "inspect",
    "inspect_attention",
    "join",
    "journal",
    "listing",
    "load",
    "loads",
    "probe",
    "quality",
    "remove",
    "repair",
    "report",
    "report_answer",
    "report_library",
    "restore",
    "reuse",
    "save",
    "save_attention",
    "speculate",
    "split",
    "start",
    "statistics",
    "sweep",
    "verify",
    "warm_from_tokens",
    "with_draft",
]

# numpy and the rest come with the first name that is used, not with the import: a program that only may need kvsnap
# starts as fast as one that does not.
_HOMES = ("api", "journalling", "sweeping", "errors", "identity", "layout", "protocols", "session")
_LATER = {
    "AttentionSnapshot": "attention",
    "Branch": "branching",
    "Branches": "branching",
    "Conversation": "conversation",
    "Growth": "inspection.growth.answers",
    "Diff": "inspection.diff.answers",
    "Library": "library",
    "Quality": "inspection.quality.answers",
    "ReportFile": "reporting",
    "Speculated": "speculation",
    "Speculation": "speculation",
    "Started": "starting",
    "Statistics": "inspection.statistics",
    "branch": "branching",
    "diff": "inspection.diff.comparing",
    "draft_of": "drafts",
    "head_table": "inspection.exporting",
    "inspect_attention": "probing",
    "listing": "inspection.listing",
    "probe": "probing",
    "quality": "inspection.quality.judging",
    "report": "reporting",
    "report_library": "reporting",
    "report_answer": "reporting",
    "save_attention": "probing",
    "speculate": "speculation",
    "start": "starting",
    "statistics": "inspection.statistics",
    "with_draft": "drafts",
}
"""Not needed by most programs, so loaded for themselves."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _LATER:
        return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    for home in _HOMES:  # the functions first: they tell `Snapshot.save` how to save
        module = import_module(f"{__name__}.{home}")
        globals().update({known: getattr(module, known) for known in __all__ if known in vars(module)})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

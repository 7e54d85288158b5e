"""Options for a draft that proposes ids, and the draft from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import click

import kvsnap
from kvsnap.cli._model import open_engine
from kvsnap.cli._output import count, remark
from kvsnap.errors import UnsupportedError
from kvsnap.layout import Sampler
from kvsnap.protocols import Drafting, Engine, Verifying

__all__ = ["Drafted", "draft_options", "open_draft", "show_speculated"]

Function = TypeVar("Function", bound=Callable[..., Any])
_DRAFT, _N_DRAFT = "kvsnap.draft", "kvsnap.n_draft"


@dataclass(frozen=True, slots=True)
class Drafted:
    """What proposes ids, and how many at a time; `name` is what the user called it."""

    draft: Drafting | Literal["lookup"]
    n_draft: int

    @property
    def engine(self) -> Drafting | None:
        """The engine that has a state of its own, None for a look-up."""
        return None if isinstance(self.draft, str) else self.draft

    def speculate(
        self, engine: Engine, ids: tuple[int, ...], max_tokens: int, sampler: Sampler | None
    ) -> kvsnap.Speculation:
        """Return the tokens of a turn, checked several at a time."""
        if not hasattr(engine, "verify"):
            raise UnsupportedError(f"the engine {engine.name} cannot check proposals", expected="transformers")
        checked = cast("Verifying", engine)
        return kvsnap.speculate(checked, self.draft, ids, max_tokens=max_tokens, n_draft=self.n_draft, sampler=sampler)


def draft_options(function: Function) -> Function:
    """Add --draft and --n-draft, which `open_draft` looks up."""

    def keep(name: str) -> Callable[[click.Context, click.Parameter, Any], None]:
        def kept(context: click.Context, _: click.Parameter, value: Any) -> None:
            context.meta[name] = value

        return kept

    for option in (
        click.option(
            "--n-draft", type=click.IntRange(1, 64), default=4, show_default=True, expose_value=False,
            callback=keep(_N_DRAFT), help="Ids that the draft proposes at a time.",
        ),
        click.option(
            "--draft", metavar="MODEL", expose_value=False, callback=keep(_DRAFT),
            help="A smaller model with the same tokenizer that proposes ids, or lookup: what followed before.",
        ),
    ):  # fmt: skip
        function = option(function)
    return function


def open_draft(dtype: str | None, attention: str | None) -> Drafted | None:
    """Load the draft of --draft; None where none was asked for."""
    meta = click.get_current_context().meta
    name = meta.get(_DRAFT)
    if name is None:
        return None
    if name == "lookup":
        return Drafted("lookup", meta[_N_DRAFT])
    engine = open_engine(name, dtype, attention, adapted=False)
    return Drafted(cast("Drafting", engine), meta[_N_DRAFT])


def show_speculated(facts: dict[str, Any]) -> None:
    """Say how much a draft saved."""
    if not facts["proposed"]:
        remark(f"the draft proposed nothing: {facts['passes']:,} passes for {count(facts['tokens'], 'token')}")
        return
    accepted = f"{facts['accepted']:,} of {count(facts['proposed'], 'proposal')} accepted ({facts['acceptance']:.0%})"
    remark(f"{accepted}: {facts['passes']:,} passes for {count(facts['tokens'], 'token')}")

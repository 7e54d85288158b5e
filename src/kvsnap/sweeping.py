"""Many sampler settings from one snapshot, one after the other or several in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast, runtime_checkable

from kvsnap import sampling
from kvsnap.api import generate
from kvsnap.errors import ContextError, InputError, UnsupportedError
from kvsnap.labels import accepted_label
from kvsnap.layout import Sampler, SamplerState, Snapshot
from kvsnap.protocols import Engine, Token
from kvsnap.restoring import placed, restore

__all__ = ["Continuation", "sweep"]


@dataclass(frozen=True, slots=True)
class Continuation:
    """One continuation of a sweep: the settings (with the seed that was used), its tokens and their log-probabilities.

    `stop` tells why it ended: `length` (max_tokens), `end` (the model ended the text), `context` (it is full).
    `forwards` counts the forward passes until then, of which each served `rows` continuations. `exact` promises the ids
    and log-probabilities that these settings give alone, bit for bit: in a pass of several rows they are not.
    """

    sampler: Sampler
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    forwards: int
    stop: str = "length"
    rows: int = 1
    exact: bool = True


def sweep(
    snapshot: Snapshot,
    engine: Engine,
    samplers: Sequence[Sampler],
    *,
    max_tokens: int = 64,
    accept: Sequence[str] = (),
    batch: int = 1,
) -> tuple[Continuation, ...]:
    """Continue one snapshot under each of the samplers, in their order, without evaluating it again.

    Each starts from the saved state with the random numbers of its own seed, and gives what it would give alone, bit
    for bit. With `batch` so many of them share each pass, which is faster and not exact: logits of a pass of several
    rows differ in the last bits, so that ids may differ, too. The cache is in memory once for each of them then.

    Identity is checked once. Afterwards, also on an error, the engine holds the snapshot. Raise as `restore` and
    `generate` do, and `UnsupportedError` naming what cannot be put into several rows.
    """
    if not samplers:
        raise InputError("a sweep needs at least one sampler")
    if batch < 1:
        raise InputError("a sweep takes one sampler or more in a pass", expected="1 or more", found=batch)
    if max_tokens < 1:
        raise InputError("max_tokens is too small", expected="1 or more", found=max_tokens)
    if batch > 1 and not isinstance(engine, _StepsRows):
        raise UnsupportedError(f"the engine {engine.name} steps one sequence at a time", expected=1, found=batch)
    report = restore(snapshot, engine, accept=accept).report
    snapshot = placed(snapshot if report is None else accepted_label(snapshot, report), engine)
    cast_rows = "dtype" in accept
    out: list[Continuation] = []
    try:
        for first in range(0, len(samplers), batch):
            runs = [_Run(s) for s in samplers[first : first + batch]]
            before = engine.forwards
            if len(runs) == 1:
                if out:
                    engine.install(snapshot, cast=cast_rows)
                _alone(engine, runs[0], max_tokens)
                runs[0].forwards = engine.forwards - before
            else:
                engine.install(snapshot, cast=cast_rows, rows=len(runs))
                _together(engine, runs, max_tokens)
            out += [run.done(len(runs)) for run in runs]
    finally:
        engine.install(snapshot, cast=cast_rows)
    return tuple(out)


@runtime_checkable
class _StepsRows(Protocol):
    """What an engine offers that goes on with several rows in one pass."""

    def step_rows(self, samplers: Sequence[SamplerState | None]) -> Sequence[tuple[Token, SamplerState] | None]:
        """Choose one token for each row; None for a row whose sampler is None, because it has ended."""


@dataclass(slots=True)
class _Run:
    """A continuation while it grows."""

    settings: Sampler
    state: SamplerState | None = None
    tokens: list[Token] = field(default_factory=list)
    stop: str = "length"
    forwards: int = 0

    def __post_init__(self) -> None:
        self.state = sampling.start(self.settings)
        if not self.settings.greedy:
            self.settings = replace(self.settings, seed=self.state.random.seed)

    def done(self, rows: int) -> Continuation:
        return Continuation(
            sampler=self.settings,
            tokens=tuple(t.id for t in self.tokens),
            text="".join(t.text for t in self.tokens),
            logprobs=tuple(t.logprob for t in self.tokens),
            forwards=self.forwards,
            stop=self.stop,
            rows=rows,
            exact=rows == 1,
        )


def _alone(engine: Engine, run: _Run, max_tokens: int) -> None:
    try:
        for token in generate(engine, max_tokens=max_tokens, sampler=run.settings):
            run.tokens.append(token)  # what is there must outlive an error
    except ContextError:
        if not run.tokens:
            raise
        run.stop = "context"
        return
    run.stop = "end" if run.tokens[-1].end else "length"


def _together(engine: Engine, runs: list[_Run], max_tokens: int) -> None:
    steps, before = cast("_StepsRows", engine).step_rows, engine.forwards
    for _ in range(max_tokens):
        try:
            chosen = steps([run.state for run in runs])
        except ContextError:
            if not runs[0].tokens:
                raise
            for run in runs:
                run.stop = "context" if run.state is not None else run.stop
            return
        for run, one in zip(runs, chosen, strict=True):
            if one is None:
                continue
            token, run.state = one
            run.tokens.append(token)
            run.forwards = engine.forwards - before
            if token.end:
                run.stop, run.state = "end", None
        if all(run.state is None for run in runs):
            return

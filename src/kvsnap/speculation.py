"""Speculative decoding: a draft proposes ids, the model checks several in one pass, and chooses as it would alone.

Each token is chosen from the logits of the model with its own sampler and its own counted random numbers, and a
proposal is accepted where it is that token. So a draft, whatever it proposes, decides how many passes are made and
nothing else; and a seed gives the tokens that it gives without one, as far as the last bits of the logits allow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from kvsnap import sampling
from kvsnap.errors import CompatibilityError, InputError
from kvsnap.layout import Sampler, SamplerState
from kvsnap.protocols import Drafting, Token, Verifying
from kvsnap.runs import common_length

__all__ = ["Lookup", "Speculated", "Speculation", "speculate"]

_LONGEST, _SHORTEST = 4, 2


@dataclass(frozen=True, slots=True)
class Speculated:
    """What was done: `tokens` came out of `passes` passes of the model, of `proposed` ids `accepted` were taken.

    Plain decoding makes a pass for each token, so `saved` passes were not made. `draft_passes` are those of the draft.
    """

    tokens: int = 0
    passes: int = 0
    proposed: int = 0
    accepted: int = 0
    draft_passes: int = 0

    @property
    def saved(self) -> int:
        return self.tokens - self.passes

    @property
    def acceptance(self) -> float:
        """The part of the proposals that was accepted; 0 without any."""
        return self.accepted / self.proposed if self.proposed else 0.0

    def to_dict(self) -> dict[str, float]:
        """Return JSON-ready data."""
        counts = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**counts, "saved": self.saved, "acceptance": self.acceptance}


class _Proposer(Protocol):
    def propose(self, tokens: tuple[int, ...], most: int, sampler: SamplerState, /) -> tuple[int, ...]:
        """Return up to `most` ids that may follow `tokens`."""

    @property
    def passes(self) -> int:
        """Passes made so far."""


class Lookup:
    """A draft without a model and without a state: what followed the last few ids where they stood before."""

    passes = 0

    def propose(self, tokens: tuple[int, ...], most: int, _: SamplerState) -> tuple[int, ...]:
        """Return what followed the last place of the longest ending of `tokens`, of 4 to 2 ids, that stood before."""
        ids = np.asarray(tokens, dtype=np.int64)
        for length in range(min(_LONGEST, len(ids) - 1), _SHORTEST - 1, -1):
            starts = len(ids) - length
            same = np.ones(starts, dtype=np.bool_)
            for place in range(length):
                same &= ids[place : place + starts] == ids[starts + place]
            found = np.flatnonzero(same)
            if len(found):
                behind = int(found[-1]) + length
                return tokens[behind : behind + most]
        return ()


class _ModelDraft:
    """A draft that is a model with a cache of its own, which follows the ids of the other."""

    def __init__(self, draft: Drafting, vocab_size: int) -> None:
        self._draft, self._vocab_size = draft, vocab_size
        self._before = draft.forwards

    @property
    def passes(self) -> int:
        return self._draft.forwards - self._before

    def propose(self, tokens: tuple[int, ...], most: int, sampler: SamplerState) -> tuple[int, ...]:
        """Return what the draft would choose with the same sampler and the same random numbers."""
        draft, limit = self._draft, self._draft.context_limit
        if limit is not None:
            most = min(most, limit - len(tokens))
        if most < 1 or max(tokens) >= draft.vocab_size:
            return ()
        follow(draft, tokens)
        found: list[int] = []
        with draft.ahead():
            draft.sampler = sampler
            while len(found) < most:
                token = draft.step()
                if token.id >= self._vocab_size:
                    break
                found.append(token.id)
                if token.end:
                    break
        return tuple(found)


def follow(draft: Drafting, tokens: tuple[int, ...]) -> None:
    """Have a draft hold just `tokens`, all evaluated: what it holds of them stays as far as its layers allow it."""
    have = draft.tokens
    stored = len(have) == draft.n_rows + draft.n_pending
    same = common_length(have, tokens)
    if not stored:
        draft.reset()
    elif same < len(have):
        draft.rewind(draft.reach(same).n_tokens)
    rest = tokens[len(draft.tokens) :]
    if rest:
        draft.prefill(rest)
    else:
        draft.settle()


class Speculation(Iterator[Token]):
    """The tokens of one speculation, in order; `done` tells what was done so far.

    At any token the engine holds just what was handed out, as with `generate`.
    """

    def __init__(
        self, engine: Verifying, draft: _Proposer, max_tokens: int, n_draft: int, *, stop_at_end: bool
    ) -> None:
        self._engine, self._draft = engine, draft
        self._left, self._n_draft, self._stop_at_end = max_tokens, n_draft, stop_at_end
        self._proposals: list[int] = []
        self._open = False
        self._tokens = self._passes = self._proposed = self._accepted = 0

    @property
    def done(self) -> Speculated:
        """What was done so far."""
        return Speculated(self._tokens, self._passes, self._proposed, self._accepted, self._draft.passes)

    def __next__(self) -> Token:
        if self._left < 1:
            raise StopIteration
        before = self._engine.forwards
        token = self._engine.take() if self._open else None
        if token is None:
            token = self._look_ahead()
        self._passes += self._engine.forwards - before
        if self._proposals:
            self._accepted += self._proposals.pop(0) == token.id
        self._tokens += 1
        self._left = 0 if token.end and self._stop_at_end else self._left - 1
        return token

    def _look_ahead(self) -> Token:
        engine, most = self._engine, min(self._n_draft, self._left - 1)
        limit, taken = engine.context_limit, engine.n_rows + engine.n_pending
        if limit is not None:
            most = min(most, limit - taken - 1)  # the token behind the last proposal has to fit, too
        ids = self._draft.propose(engine.tokens, most, engine.sampler) if most > 0 else ()
        self._proposals, self._open = list(ids), bool(ids)
        if ids:
            engine.verify(ids)
            self._proposed += len(ids)
            token = engine.take()
            if token is not None:
                return token
        return engine.step()


def speculate(
    engine: Verifying,
    draft: Drafting | Literal["lookup"],
    prompt: str | Sequence[int] = "",
    *,
    max_tokens: int,
    n_draft: int = 4,
    sampler: Sampler | None = None,
    stop_at_end: bool = True,
) -> Speculation:
    """Generate as `generate` does, with up to `n_draft` ids proposed by a draft and checked in one pass.

    `draft` is an engine with a model that has the same tokenizer, or `"lookup"`: what followed the last ids where they
    stood before, which needs no model. What the draft holds is used as far as it is a beginning of the sequence; the
    rest is evaluated. The tokens are those of the engine's own model and sampler, whatever is proposed; they are chosen
    from passes over several ids, whose last bits can differ from those of single steps, so a capture is marked not
    exact. Near the end of the context fewer ids are proposed.

    Raise as `generate`, and `CompatibilityError` for a draft with other ids, `UnsupportedError` for a model that cannot
    check proposals (docs/speculative.md), before anything has changed.
    """
    for name, value in (("max_tokens", max_tokens), ("n_draft", n_draft)):
        if value < 1:
            raise InputError(f"{name} is too small", expected="1 or more", found=value)
    engine.check_verify()
    proposer: _Proposer = Lookup()
    if not isinstance(draft, str):
        _check_ids(engine, draft)
        proposer = _ModelDraft(draft, engine.vocab_size)
    elif draft != "lookup":
        raise InputError("the draft is an engine or 'lookup'", found=draft)
    ids: Sequence[int] = prompt if not isinstance(prompt, str) else ()
    if isinstance(prompt, str) and prompt:
        ids = engine.tokenize(prompt, special=not engine.tokens)
    if not len(ids) and not engine.tokens:
        raise InputError("nothing to go on from: the prompt is empty and the engine holds no tokens")
    settings = None if sampler is None else sampling.start(sampler)
    if len(ids):
        engine.prefill(ids)
    if settings is not None:
        engine.sampler = settings
    return Speculation(engine, proposer, max_tokens, n_draft, stop_at_end=stop_at_end)


def _check_ids(engine: Verifying, draft: Drafting) -> None:
    """Raise `CompatibilityError` unless the ids of two models mean the same, `InputError` for one engine twice."""
    if draft is engine:
        raise InputError("the draft is the engine itself: connect its model once more, for a cache of its own")
    own, other = engine.tokenizer_digest(), draft.tokenizer_digest()
    if own and other and own != other:
        raise CompatibilityError("the draft has another tokenizer", expected=own, found=other)
    if not (own and other) and engine.vocab_size != draft.vocab_size:
        raise CompatibilityError(
            "the draft has another vocabulary", expected=f"{engine.vocab_size} ids", found=f"{draft.vocab_size} ids"
        )

"""The state of a conversation, in an engine and in its session: taken up, remembered, and cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvsnap.conversation.turns import Message
from kvsnap.errors import CompatibilityError, ContextError, InputError
from kvsnap.identity import Compatibility
from kvsnap.labels import LABELS, accepted_label
from kvsnap.layout import Sampler, Snapshot
from kvsnap.protocols import Engine, Progress
from kvsnap.reach import Reach
from kvsnap.restoring import Restored, check_one_model, placed, restore
from kvsnap.runs import common_length
from kvsnap.sampling import start
from kvsnap.session import Session

__all__ = ["Held", "OnMismatch"]

_OURS = ("stop", "preface")
"""What a conversation puts into the metadata of a session."""

OnMismatch = Literal["raise", "fresh"]


@dataclass(frozen=True, slots=True)
class _Kept:
    """A history as it was left. `unsaved`: some of it is in no session."""

    tokens: tuple[int, ...]
    messages: tuple[Message, ...] | None
    complete: bool
    ends: tuple[tuple[int, int], ...]
    stop: str
    unsaved: bool


class Held:
    """One history, live in an engine, and on disk where there is a session.

    `messages` are those that the history is known to be of, None where that is not known. `preface` counts the tokens
    before the first message.
    """

    def __init__(
        self,
        engine: Engine,
        session: Session | None,
        *,
        on_mismatch: OnMismatch,
        accept: Sequence[str],
        draft_reserve: int,
        codec: str | None,
        metadata: Mapping[str, str],
        progress: Progress | None,
    ) -> None:
        self.engine, self.session = engine, session
        self.accept, self.draft_reserve, self.codec = tuple(accept), draft_reserve, codec
        self.metadata = {name: text for name, text in metadata.items() if name not in _OURS}
        self.progress = progress
        self.notes: tuple[str, ...] = ()
        self.restored: Restored | None = None
        self.messages: tuple[Message, ...] | None = ()
        self.preface = 0
        self.complete = True
        self.ends: tuple[tuple[int, int], ...] = ()
        self._on_mismatch = on_mismatch
        self._agreed = 0  # so many ids of the session are those of the live history
        self._mark: tuple[Any, ...] | None = None
        self._commits: tuple[int, ...] = ()  # numbers that the last commit of the session may have
        self._labels: dict[str, str] = {}
        self._cut_off: frozenset[int] = frozenset()  # lengths at which turns ended that were cut off
        self._stop = "end"
        if session is None:
            self.preface = len(engine.tokens)
        else:
            self.take_up()
        self.keep()

    @property
    def n_tokens(self) -> int:
        """Ids of the whole history."""
        if self.session is not None and not self.is_held:
            return self.session.n_tokens
        return len(self.engine.tokens)

    @property
    def unsaved(self) -> int:
        """Ids that are live and not in the session."""
        if self.session is None or not self.is_held:
            return 0
        return len(self.engine.tokens) - self._agreed

    @property
    def is_held(self) -> bool:
        """True when the engine holds what this conversation left, and the session the commit that it published."""
        return self._mark == self._seen() and (self.session is None or self.session.n_commits in self._commits)

    @property
    def other_template(self) -> bool:
        """True when the chat template is another one than the saved conversation had."""
        report = self.report
        return report is not None and any(f.name == "chat_template" and f.verdict == "differ" for f in report.fields)

    @property
    def report(self) -> Compatibility | None:
        """How the saved identity compares with that of the engine; None where nothing was restored."""
        return None if self.restored is None else self.restored.report

    # -- taking it up -------------------------------------------------------------------------------------------------

    def take_up(self) -> None:
        """Put what the session holds into the engine, and start from that. Raise as `restore`."""
        session = self._opened()
        snapshot = session.load()
        self.restored = None
        try:
            check_one_model(snapshot, self.engine, accept=self.accept, progress=self.progress)
            if snapshot.tokens:
                self.restored = restore(
                    snapshot, self.engine, accept=self.accept, draft_reserve=self.draft_reserve, progress=self.progress
                )
        except (CompatibilityError, ContextError) as error:
            if self._on_mismatch == "raise":
                raise
            session.check_open_to_turns()  # what is damaged is not thrown away
            commit = session.n_commits
            session.reset(any_model=True)
            self.notes = (*self.notes, f"started anew: {error.message} (what was there is commit {commit})")
            snapshot = session.load()
        if not snapshot.tokens:
            self.engine.reset()
        said = session.tells_messages
        self.messages = session.messages if said else ()
        self.ends = session.message_ends
        # Where nothing was said, the history is a text that the conversation goes on from.
        self.preface = _preface(snapshot.metadata, session.n_tokens) if said else session.n_tokens
        self._stop = snapshot.metadata.get("stop", "end") if snapshot.tokens else "end"
        self.complete = session.complete
        told = snapshot.metadata
        self._labels = {name: told[name] for name in LABELS if name in told}
        saved = {name: text for name, text in told.items() if name not in (*_OURS, *LABELS)}
        self.metadata = {**saved, **self.metadata}
        self._agreed, self._commits = session.n_tokens, (session.n_commits,)

    def hold(self) -> None:
        """Make sure that the engine holds this history; put it there once more where it was used for something else.

        What was not stored yet is evaluated again, and so is a history in memory that a change left half done.
        """
        if self.is_held:
            self.engine.sampler = self.sampler
            return
        if self.session is None and self._mark is not None:
            raise InputError(
                "the engine was used for something else, and a conversation without a session cannot take up again"
            )
        kept, sampler, moved = self._kept, self.sampler, False
        if self.session is not None:
            moved = self.session.n_commits not in self._commits
            self.take_up()
        if kept.unsaved and not moved:
            self._put_back(kept)
        if not moved or not self.engine.tokens:
            self.engine.sampler = sampler
        self.keep()

    def _put_back(self, kept: _Kept) -> None:
        same = common_length(self.engine.tokens, kept.tokens)
        n_tokens, _ = self.cut(same, following=same < len(kept.tokens))
        if kept.tokens[n_tokens:]:
            self.engine.prefill(kept.tokens[n_tokens:])
            again = f"{len(kept.tokens) - n_tokens} tokens that were not stored were evaluated again"
            self.notes = (*self.notes, again)
        self.messages, self.complete, self.ends, self._stop = kept.messages, kept.complete, kept.ends, kept.stop

    def keep(self) -> None:
        """Remember what the engine holds now as this history."""
        self.mark()
        tokens = self.engine.tokens
        unsaved = self.session is None or len(tokens) > self._agreed
        self._kept = _Kept(tokens, self.messages, self.complete, self.ends, self._stop, unsaved)

    def leave(self, tokens: tuple[int, ...], messages: Sequence[Message]) -> None:
        """Remember these ids as the history, an answer that was cut off: the engine holds something else by now."""
        self.messages, self.complete = tuple(messages), False
        self._kept = _Kept(tokens, self.messages, False, self.ends, "interrupted", unsaved=True)

    def mark(self) -> None:
        """Remember the engine as it is now, while tokens are added."""
        self._mark, self.sampler = self._seen(), self.engine.sampler

    def changing(self) -> None:
        """Take note that a change begins: should it go wrong half way, what the engine holds is not this history."""
        self._mark = None

    def set_sampler(self, settings: Sampler) -> None:
        """Choose tokens with these settings from now on, and the random numbers of their seed."""
        self.sampler = start(settings)
        if self.is_held:
            self.engine.sampler = self.sampler

    def change_sampler(self, changes: Mapping[str, Any]) -> None:
        """Change settings; the random numbers go on unless the seed is among them."""
        state = replace(self.sampler, settings=replace(self.sampler.settings, **changes))
        self.sampler = start(state.settings) if "seed" in changes else state
        if self.is_held:
            self.engine.sampler = self.sampler

    def _seen(self) -> tuple[Any, ...]:
        engine = self.engine
        return engine.forwards, engine.n_rows, engine.tokens

    def _opened(self) -> Session:
        if self.session is None:
            raise InputError("this conversation has no session")
        return self.session

    # -- cutting it ---------------------------------------------------------------------------------------------------

    def cut(self, n_tokens: int, *, following: bool) -> tuple[int, Reach | None]:
        """Keep the first `n_tokens` ids in the engine, or the nearest number below that can be reached.

        Return how many were kept, and what limits it. Rows come from the session where it reaches further. With
        `following` ids are evaluated next, so that no logits are needed.
        """
        engine = self.engine
        if n_tokens == len(engine.tokens):
            return n_tokens, None
        kept, reach = self._cut(n_tokens, following=following)
        self._agreed = min(self._agreed, kept)
        self.ends = tuple(e for e in self.ends if e[0] <= kept)
        self._labels = self._labels if kept else {}
        return kept, reach

    def recomputed(self, reused: int) -> None:
        """Take note that rows behind the first `reused` were evaluated again: the session holds others."""
        self._agreed = min(self._agreed, reused)

    def _cut(self, n_tokens: int, *, following: bool) -> tuple[int, Reach]:
        engine, session = self.engine, self.session
        reach = engine.reach(n_tokens)
        if not reach.reached and session is not None:
            stored = session.reach(min(n_tokens, self._agreed))
            if stored.n_tokens > reach.n_tokens:
                self._install(session.load(stored.n_tokens), following=following)
                return stored.n_tokens, stored if stored.limits else reach
        engine.rewind(reach.n_tokens)
        return reach.n_tokens, reach

    def _install(self, snapshot: Snapshot, *, following: bool) -> None:
        sampler = self.engine.sampler
        if self.report is not None:
            snapshot = accepted_label(snapshot, self.report)
        self.engine.install(placed(snapshot, self.engine), cast="dtype" in self.accept, prefix=following)
        self.engine.sampler = sampler


def _preface(metadata: Mapping[str, str], n_tokens: int) -> int:
    """Return how many tokens come before the first message, as a session says it."""
    told = metadata.get("preface", "0")
    return min(int(told), n_tokens) if told.isascii() and told.isdecimal() and len(told) < 20 else 0

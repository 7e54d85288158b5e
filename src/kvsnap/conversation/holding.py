"""The state of a conversation, in an engine and in its session: taken up, cut, and stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from kvsnap.conversation.turns import Message
from kvsnap.errors import CompatibilityError, ContextError, InputError
from kvsnap.identity import Compatibility
from kvsnap.labels import accepted_label, labels_of
from kvsnap.layout import Sampler, Snapshot
from kvsnap.protocols import Engine, Progress
from kvsnap.reach import Reach
from kvsnap.restoring import Restored, placed, restore
from kvsnap.sampling import start
from kvsnap.session import Session

__all__ = ["Holding", "OnMismatch"]

_OURS = ("stop", "preface")
"""What a conversation puts into the metadata of a session."""

OnMismatch = Literal["raise", "fresh"]


class Holding:
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
        self.metadata = dict(metadata)
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
        self._stop = "end"
        if session is None:
            self.preface = len(engine.tokens)
        else:
            self.take_up()
        self.keep()

    @property
    def n_tokens(self) -> int:
        """Ids of the whole history."""
        if self.session is not None and self._mark != self._seen():
            return self.session.n_tokens
        return len(self.engine.tokens)

    @property
    def unsaved(self) -> int:
        """Ids that are live and not in the session."""
        if self.session is None or self._mark != self._seen():
            return 0
        return len(self.engine.tokens) - self._agreed

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
        if snapshot.tokens:
            try:
                self.restored = restore(
                    snapshot, self.engine, accept=self.accept, draft_reserve=self.draft_reserve, progress=self.progress
                )
            except (CompatibilityError, ContextError) as error:
                if self._on_mismatch == "raise":
                    raise
                commit = session.n_commits
                session.reset(any_model=True)
                self.notes = (*self.notes, f"started anew: {error.message} (what was there is commit {commit})")
                snapshot = session.load()
        if not snapshot.tokens:
            self.engine.reset()
        self.messages = session.messages if session.n_tokens else ()
        self.ends = session.message_ends
        # Where nothing was said, the history is a text that the conversation goes on from.
        said = session.tells_messages
        self.preface = _preface(snapshot.metadata, session.n_tokens) if said else session.n_tokens
        self.complete = session.complete
        self.metadata = {**{k: v for k, v in snapshot.metadata.items() if k not in _OURS}, **self.metadata}
        self._agreed = session.n_tokens

    def hold(self) -> None:
        """Make sure that the engine holds this history; put it there once more where it was used for something else."""
        if self._mark == self._seen():
            self.engine.sampler = self._sampler
            return
        sampler = self._sampler
        if self.session is not None:
            self.take_up()
        elif self._mark is not None:
            raise InputError(
                "the engine was used for something else, and a conversation without a session cannot take up again"
            )  # else a change went wrong half way: what is left is a beginning of the history
        self.engine.sampler = sampler
        self.keep()

    def keep(self) -> None:
        """Remember what the engine holds now as this history."""
        self._mark, self._sampler = self._seen(), self.engine.sampler

    def changing(self) -> None:
        """Take note that a change begins: should it go wrong half way, what the engine holds is not this history."""
        self._mark = None

    def set_sampler(self, settings: Sampler) -> None:
        """Choose tokens with these settings from now on, and the random numbers of their seed."""
        self._sampler = self.engine.sampler = start(settings)

    def change_sampler(self, changes: Mapping[str, Any]) -> None:
        """Change settings; the random numbers go on unless the seed is among them."""
        state = replace(self._sampler, settings=replace(self._sampler.settings, **changes))
        self._sampler = self.engine.sampler = start(state.settings) if "seed" in changes else state

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
        return kept, reach

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

    # -- storing it ---------------------------------------------------------------------------------------------------

    def store(self, messages: Sequence[Message], *, complete: bool, stop: str) -> int:
        """Publish what is new as one commit that takes the place of what was given up; return the bytes written."""
        self.messages, self.complete, self._stop = tuple(messages), complete, stop
        self.keep()
        n_tokens = len(self.engine.tokens)
        self.ends = (*(e for e in self.ends if e[0] < n_tokens and e[1] <= len(messages)), (n_tokens, len(messages)))
        session = self.session
        if session is None:
            return 0
        after, start_row = None, session.n_rows
        if self._agreed < session.n_tokens:
            reach = session.reach(self._agreed)
            after, start_row = reach.n_tokens, reach.n_rows
        snapshot = self._captured(start_row, messages, stop)
        report = session.append(snapshot, complete=complete, codec=self.codec, after=after)
        self._agreed = session.n_tokens
        self.ends = session.message_ends
        return report.nbytes

    def save(self) -> int:
        """Publish what an error kept from being stored; return the bytes written, 0 when all is."""
        if not self.unsaved or self.messages is None:
            return 0
        return self.store(self.messages, complete=self.complete, stop=self._stop)

    def _captured(self, start_row: int, messages: Sequence[Message], stop: str) -> Snapshot:
        snapshot = self.engine.capture(start=start_row)
        text = snapshot.text
        if text is None:
            text = self.engine.detokenize(snapshot.tokens)
        metadata = {**self.metadata, **labels_of(snapshot.metadata), "stop": stop}
        if self.preface:
            metadata["preface"] = str(self.preface)
        return replace(snapshot, messages=tuple(messages), text=text, metadata=metadata)

    def go_back(self, n_tokens: int, n_messages: int) -> None:
        """Go back to where a turn ended: its logits, sampler and random state come back where there is a session."""
        messages = None if self.messages is None else self.messages[:n_messages]
        if self.session is None:
            self.engine.rewind(n_tokens)
            self.ends = tuple(e for e in self.ends if e[0] <= n_tokens)
        else:
            self.session.truncate(n_tokens)
            self.take_up()
        self.messages, self.complete = messages, True
        self.keep()

    def go_back_inside(self, n_tokens: int, messages: Sequence[Message]) -> None:
        """Go back to a place inside of a turn, as near as it can be reached, where these are the messages."""
        self.changing()
        self.cut(n_tokens, following=True)
        self.store(messages, complete=True, stop="end")

    def reset(self) -> None:
        """Forget everything; in the session that is a commit, which can be undone."""
        if self.session is not None:
            self.session.reset()
        self.engine.reset()
        self.messages, self.preface, self.ends, self._agreed, self.complete = (), 0, (), 0, True
        self.keep()


def _preface(metadata: Mapping[str, str], n_tokens: int) -> int:
    """Return how many tokens come before the first message, as a session says it."""
    told = metadata.get("preface", "0")
    return min(int(told), n_tokens) if told.isascii() and told.isdecimal() and len(told) < 20 else 0

"""The state of a conversation, in an engine and in its session: stored, and gone back in."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from kvsnap.conversation.held import Held, OnMismatch
from kvsnap.conversation.turns import Message
from kvsnap.errors import DamagedError
from kvsnap.labels import LABELS
from kvsnap.layout import Snapshot

__all__ = ["Holding", "OnMismatch"]


class Holding(Held):
    """A history that grows, and is gone back in."""

    # -- storing it ---------------------------------------------------------------------------------------------------

    def store(self, messages: Sequence[Message], *, complete: bool, stop: str) -> int:
        """Publish what is new as one commit that takes the place of what was given up; return the bytes written."""
        self.messages, self.complete, self._stop = tuple(messages), complete, stop
        n_tokens = len(self.engine.tokens)
        self.ends = (*(e for e in self.ends if e[0] < n_tokens and e[1] <= len(messages)), (n_tokens, len(messages)))
        self._cut_off = self._cut_off - {n_tokens} if complete else self._cut_off | {n_tokens}
        self.keep()
        session = self.session
        if session is None:
            return 0
        if session.n_commits not in self._commits:
            self._agreed = 0  # someone changed it meanwhile: what it holds is not what was left
        after, start_row = None, session.n_rows
        if self._agreed < session.n_tokens:
            reach = session.reach(self._agreed)
            after, start_row = reach.n_tokens, reach.n_rows
        snapshot = self._captured(start_row, messages, stop)
        # An interrupt may come right behind the commit.
        self._commits = (session.n_commits, session.n_commits + 1)
        report = session.append(snapshot, complete=complete, codec=self.codec, after=after)
        self._agreed, self._commits = session.n_tokens, (session.n_commits,)
        self.ends = session.message_ends
        self.keep()
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
        # A part says nothing of the rows before it.
        self._labels |= {name: snapshot.metadata[name] for name in LABELS if name in snapshot.metadata}
        metadata = {**self.metadata, **self._labels, "stop": stop}
        if self.preface:
            metadata["preface"] = str(self.preface)
        return replace(snapshot, messages=tuple(messages), text=text, metadata=metadata)

    def go_back(self, n_tokens: int, n_messages: int) -> None:
        """Go back to where a turn ended: its logits, sampler and random state come back where there is a session."""
        messages = None if self.messages is None else self.messages[:n_messages]
        if self.session is None:
            self.changing()
            self.engine.rewind(n_tokens)
            self.ends = tuple(e for e in self.ends if e[0] <= n_tokens)
            self.complete = n_tokens not in self._cut_off
        else:
            self.session.truncate(n_tokens, complete=self._was_complete(n_tokens))
            self.take_up()
        self.messages = messages
        self.keep()

    def _was_complete(self, n_tokens: int) -> bool:
        """Tell whether the turn that ended there was complete; one of which no commit is left counts as that."""
        session = self._opened()
        with suppress(DamagedError):
            return next((t.complete for t in reversed(session.history) if t.n_tokens == n_tokens), True)
        return True

    def go_back_inside(self, ids: Sequence[int], kept: int, messages: Sequence[Message]) -> None:
        """Go back to a place inside of a turn, where these are the messages and `ids` say them: `kept` stay."""
        self.changing()
        n_tokens, _ = self.cut(kept, following=kept < len(ids))
        if ids[n_tokens:]:
            self.engine.prefill(ids[n_tokens:])
        self.store(messages, complete=True, stop="end")

    def reset(self) -> None:
        """Forget everything; in the session that is a commit, which can be undone."""
        self.changing()
        if self.session is not None:
            self.session.reset()
        self.engine.reset()
        self.messages, self.preface, self.ends, self._agreed, self.complete = (), 0, (), 0, True
        self._labels, self._stop = {}, "end"
        if self.session is not None:
            self._commits = (self.session.n_commits,)
        self.keep()

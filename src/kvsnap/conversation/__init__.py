"""A conversation: messages in, an answer out, and a state that stays warm. docs/conversations.md.

A turn renders the messages with the chat template of the model, keeps all that agrees with what is there already,
evaluates the rest, generates, and publishes one commit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from kvsnap.conversation.aligning import Why
from kvsnap.conversation.holding import Holding, OnMismatch
from kvsnap.conversation.rendering import checked, starts_of
from kvsnap.conversation.speaking import Drift, Speaking
from kvsnap.conversation.turns import Message, Stream, Turn
from kvsnap.errors import InputError, StorageError
from kvsnap.layout import Sampler
from kvsnap.protocols import Engine, Progress, Token
from kvsnap.restoring import Restored
from kvsnap.session import Session

__all__ = ["Conversation", "Message", "Stream", "Turn", "Why"]


class Conversation:
    """A conversation with a model, live in an engine and kept in a session, turn by turn.

    `session` is open for writing; what it holds is restored into the engine now, in place of what that holds. Without
    one the conversation is in memory only, and goes on behind what the engine holds. One thread at a time.

    `on_mismatch="fresh"`: a session of another model, or one that is too long for this one, is left and started anew
    (what was there stays a commit that `session.rewind` goes back to); `notes` say so. `accept` names fields to take on
    that are not known, as in `kvsnap.restore`; one that differs is refused, since a session is of one model. `sampler`
    replaces the saved settings and random numbers. `system` is the first message of a conversation that is empty.
    `template` is handed to the chat template (`tools`, `enable_thinking`, a date). `every` publishes a turn while it is
    generated, after so many tokens each time, so that a run that is killed loses no more. `draft_reserve` positions of
    the context stay free. `metadata` goes into the session, text under text.

    With `drift="keep"` the saved tokens of a history whose messages did not change stay as they are, whatever the
    template would make of them today, and only what follows is rendered: nothing is evaluated again. The default
    follows the template; `Turn.why` says what that cost.

    Raise `InputError` for options that are none, and what `restore` and `Session.load` raise.
    """

    def __init__(
        self,
        engine: Engine,
        session: Session | None = None,
        *,
        on_mismatch: OnMismatch = "raise",
        accept: Sequence[str] = (),
        sampler: Sampler | None = None,
        system: str | None = None,
        template: Mapping[str, Any] | None = None,
        drift: Drift = "recompute",
        every: int | None = None,
        draft_reserve: int = 0,
        codec: str | None = None,
        metadata: Mapping[str, str] | None = None,
        progress: Progress | None = None,
    ) -> None:
        if on_mismatch not in ("raise", "fresh") or drift not in ("recompute", "keep"):
            raise InputError(
                "not a choice", expected="on_mismatch 'raise' or 'fresh', drift 'recompute' or 'keep'",
                found=(on_mismatch, drift),
            )  # fmt: skip
        if every is not None and every < 1:
            raise InputError("every is a number of tokens", expected="1 or more", found=every)
        self.engine = engine
        self.session = session
        self._holding = Holding(
            engine, session, on_mismatch=on_mismatch, accept=accept, draft_reserve=draft_reserve, codec=codec,
            metadata=metadata or {}, progress=progress,
        )  # fmt: skip
        self._speaking = Speaking(self._holding, dict(template or {}), drift, every)
        self._torn = _torn(session)
        self.system = system
        if sampler is not None:
            self._holding.set_sampler(sampler)

    # -- what is there -------------------------------------------------------------------------------------------------

    @property
    def messages(self) -> tuple[Message, ...] | None:
        """The messages so far; None where it is not known which they are (the session was cut inside of a turn)."""
        return self._holding.messages

    @property
    def n_tokens(self) -> int:
        """Ids of the whole conversation."""
        return self._holding.n_tokens

    @property
    def preface(self) -> int:
        """Tokens before the first message: a text that was there when the conversation started. They stay."""
        return self._holding.preface

    @property
    def complete(self) -> bool:
        """False when the last answer was cut off, or is not there yet: `go_on` goes on with it, `rewind` drops it."""
        return self._holding.complete

    @property
    def restored(self) -> Restored | None:
        """What the last restore from the session did; None where nothing was restored."""
        return self._holding.restored

    @property
    def notes(self) -> tuple[str, ...]:
        """What happened when it was opened, one sentence each: a session that was started anew, a torn tail."""
        return (*self._torn, *self._holding.notes)  # what was torn is gone from the session with the next commit

    @property
    def last(self) -> Turn | None:
        """The last turn that ended here; None before."""
        return self._speaking.last

    @property
    def unsaved(self) -> int:
        """Ids that are not in the session yet, because storing them failed: `save` tries again."""
        return self._holding.unsaved

    @property
    def sampler(self) -> Sampler:
        """How tokens are chosen. Assigning starts the random numbers of its seed anew."""
        return self._holding.sampler.settings

    @sampler.setter
    def sampler(self, settings: Sampler) -> None:
        self._holding.set_sampler(settings)

    def change_sampler(self, **changes: Any) -> None:
        """Change single settings of the sampler. The random numbers go on, unless a `seed` is among the changes.

        Raise `InputError` for a setting that is out of range, `TypeError` for one that there is not.
        """
        self._holding.change_sampler(changes)

    # -- turns ---------------------------------------------------------------------------------------------------------

    def say(
        self,
        said: str | Sequence[Message],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        on_token: Callable[[Token], object] | None = None,
    ) -> Turn:
        """Say something and return the turn: a text is a further message of the user, a list replaces all messages.

        Of a list as much of the history stays as agrees with it, whatever was changed in it. The answer ends where the
        model ends it, at one of the texts `stop`, after `max_tokens`, or where the context is full; in the last two
        cases it is cut off. Ctrl-C ends it too: what is there is stored as cut off, then `KeyboardInterrupt` goes on,
        and `last` is the turn. `on_token` is called with each token.

        Raise `InputError` for no messages, or those that the template does not take, `ContextError` with both numbers
        where the prompt leaves no room for an answer: nothing has changed then. `StorageError` where the turn could not
        be stored: it is there all the same, `last` and the engine hold it, and the next turn or `save` stores it.
        """
        return _taken(self.stream(said, max_tokens=max_tokens, stop=stop), on_token)

    def stream(
        self, said: str | Sequence[Message], *, max_tokens: int | None = None, stop: str | Sequence[str] = ()
    ) -> Stream:
        """Say something as `say` does, and return the tokens of the answer as they come; the prompt is evaluated now.

        Use it in a `with` block: left early, the turn is stored as cut off.
        """
        self._hold_stored()
        messages = self._with(said) if isinstance(said, str) else checked(said)
        return self._speaking.begin(messages, max_tokens, _stops(stop))

    def _with(self, text: str) -> tuple[Message, ...]:
        before = self.messages or ()
        if self.messages is None and self.preface < self.n_tokens:
            raise InputError(
                "it is not known which messages this session holds, since it was cut inside of a turn: give all "
                "messages, or go back to the end of a turn (session.truncate, session.rewind)"
            )
        if not text:
            raise InputError("the message is empty; go_on() generates the answer to the last one")
        if before and before[-1]["role"] == "user":
            raise InputError("the last message has no answer yet: go_on() generates it, rewind() drops the message")
        if not before and self.system:
            before = ({"role": "system", "content": self.system},)
        return (*before, {"role": "user", "content": text})

    def go_on(
        self,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        on_token: Callable[[Token], object] | None = None,
    ) -> Turn:
        """Go on with an answer that was cut off, or generate one that is not there yet. Return and raise as `say`."""
        return _taken(self.stream_on(max_tokens=max_tokens, stop=stop), on_token)

    def stream_on(self, *, max_tokens: int | None = None, stop: str | Sequence[str] = ()) -> Stream:
        """Go on as `go_on` does, and return the tokens as they come."""
        self._hold_stored()
        if self.complete or not self.messages:
            raise InputError("there is no answer to go on with: the last one is complete, or nothing was said yet")
        return self._speaking.begin_on(max_tokens, _stops(stop))

    # -- going back ----------------------------------------------------------------------------------------------------

    def rewind(self, turns: int = 1) -> int:
        """Go back by so many turns, an answer that was cut off counts as one; return the tokens that are left.

        With a session that is a commit of its own, and logits, sampler and random numbers are those of that moment.
        Raise `InputError` when there are not so many.
        """
        self._hold_stored()
        messages = self.messages
        starts = starts_of(messages) if messages else []
        if not 0 <= turns <= len(starts):
            raise InputError("there are not so many turns to go back by", expected=f"0 to {len(starts)}", found=turns)
        if turns:
            keep = starts[-turns]
            n_tokens, n_messages = max((e for e in self._holding.ends if e[1] <= keep), default=(self.preface, 0))
            if n_messages < keep and messages:  # that turn is a part of a longer one, since its history was edited
                self._speaking.go_back_to(messages[:keep])
            else:
                self._holding.go_back(n_tokens, n_messages)
        return self.n_tokens

    def reset(self) -> None:
        """Forget all messages and tokens. With a session that is a commit, which `session.rewind` can undo."""
        self._speaking.end()
        self._holding.reset()

    def fork(self, target: str | os.PathLike[str]) -> Any:
        """Make another session that holds what is here, and stay with this one; return what `Session.fork` returns.

        `target` is the name of a new session for one of a library, else the path of a new file.
        """
        self.save()
        if self.session is None:
            raise InputError("this conversation has no session to fork")
        return self.session.fork(os.fspath(target))

    def save(self) -> int:
        """Store what is not stored yet, after an error; return the bytes written. 0 when all is stored."""
        self._hold()
        return self._holding.save()

    def _hold(self) -> None:
        self._speaking.end()
        self._holding.hold()

    def _hold_stored(self) -> None:
        self._hold()
        # A turn that could not be stored gets a commit of its own, so that it can be gone back to.
        with suppress(StorageError):
            self._holding.save()


def _torn(session: Session | None) -> tuple[str, ...]:
    if session is None or not session.dropped:
        return ()
    what = "they are of a turn that was not finished, or they are damaged"
    return (f"{session.dropped} bytes behind the last turn are not part of the history: {what}", *session.notes)


def _stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    given: tuple[object, ...] = stops
    if not all(isinstance(text, str) and text for text in given):
        raise InputError("a stop text is a non-empty text", found=repr(stops)[:80])
    return stops


def _taken(stream: Stream, on_token: Callable[[Token], object] | None) -> Turn:
    with stream:
        for token in stream:
            if on_token is not None:
                on_token(token)
    return stream.turn

"""The sessions of one tenant: which one a request goes on with, and the conversations that are open.

What drives the engine runs in its thread: everything here but `listed`, `told`, `history` and `forked`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal

from kvsnap.conversation import Conversation, Message, Turn, Why
from kvsnap.conversation.aligning import align
from kvsnap.errors import BusyError, ContextError, InputError, KvsnapError, MissingError
from kvsnap.library import Entry, Found, Library, LibrarySession
from kvsnap.protocols import Engine
from kvsnap.server.asking import Asked
from kvsnap.server.refusals import RefusalError
from kvsnap.server.settings import Settings
from kvsnap.server.tenants import Tenant

__all__ = ["Counts", "Placed", "Room"]

How = Literal["named", "continued", "forked", "new"]


@dataclass(slots=True)
class _Held:
    conversation: Conversation
    session: LibrarySession
    template: Mapping[str, Any]
    used: float


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a request goes on: the session, and how it was found.

    `made` tells that the session was made for this request; `agreed` tokens of a fork agree with the request.
    """

    name: str
    conversation: Conversation
    how: How
    made: bool = False
    agreed: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """What of a prompt was reused, evaluated once more, and evaluated for the first time, as this session sees it."""

    reused: int
    recomputed: int
    new: int
    why: Why | None

    @staticmethod
    def of(turn: Turn, placed: Placed) -> Counts:
        """Return the counts of a turn. What a fork leaves behind was never part of its own history."""
        if placed.how != "forked":
            return Counts(turn.reused, turn.recomputed, turn.new, turn.why)
        again = max(0, min(placed.agreed, turn.prompt_tokens) - turn.reused)
        return Counts(turn.reused, again, turn.prompt_tokens - turn.reused - again, turn.why if again else None)


class Room:
    """The library of a tenant, and the conversations of it that are open."""

    def __init__(self, engine: Engine, settings: Settings, tenant: Tenant) -> None:
        self._engine, self._settings = engine, settings
        self._library = Library(tenant.library)
        self._held: dict[str, _Held] = {}

    # -- a request -----------------------------------------------------------------------------------------------------

    def place(self, asked: Asked, name: str | None) -> Placed:
        """Return the conversation that a request goes on with: that of `name`, made when new, else by its beginning.

        Raise `RefusalError` and `ContextError` for a prompt that is too long before anything is made or changed.
        """
        ids = self._rendered(asked)
        if name is not None:
            made = name not in self._held and name not in self._library
            return Placed(name, self._open(name, asked.template, create=True), "named", made)
        return self._by_beginning(ids, asked)

    def leave(self, placed: Placed) -> None:
        """Let a request go: a session that was made for it and got no turn is removed."""
        held = self._held.get(placed.name)
        if held is None:
            return
        held.used = time.monotonic()
        if placed.made and placed.conversation.last is None:
            self._close(placed.name)
            with suppress(KvsnapError):  # the error that brought us here matters more
                self._library.remove(placed.name)

    def _rendered(self, asked: Asked) -> tuple[int, ...]:
        engine, most = self._engine, self._settings.limits.prompt_tokens
        ids = engine.render(asked.messages, **asked.template)
        if asked.template and ids == engine.render(asked.messages):
            raise RefusalError(
                400, "the chat template of this model takes no tools", param="tools", code="unsupported_parameter"
            )
        if most is not None and len(ids) > most:
            raise RefusalError(400, "the prompt is too long for this server", param="messages", code="prompt_too_long",
                          expected=f"at most {most} tokens", found=len(ids))  # fmt: skip
        limit = engine.context_limit
        if limit is not None and len(ids) + 1 > limit:
            raise ContextError(
                f"the context is full: the prompt takes {len(ids)} tokens, and the answer at least one; the model "
                f"holds {limit}. Leave out messages, or start anew"
            )
        return ids

    def _by_beginning(self, ids: tuple[int, ...], asked: Asked) -> Placed:
        found = self._found(ids)
        if found is None:
            return self._made(asked)
        how = self._continues(found, asked.messages)
        if how == "continued":
            try:
                return Placed(found.name, self._open(found.name, asked.template, create=False), "continued")
            except BusyError:  # another process goes on with it
                how = "forked"
        if how == "new" or found.n_rows < self._settings.min_reuse:
            return self._made(asked)
        name = _new_name()
        self._library.fork(found.name, name)
        with ExitStack() as undo:
            undo.callback(self._library.remove, name)
            conversation = self._open(name, asked.template, create=False)
            undo.pop_all()
        return Placed(name, conversation, "forked", made=True, agreed=found.n_tokens)

    def _made(self, asked: Asked) -> Placed:
        name = _new_name()
        return Placed(name, self._open(name, asked.template, create=True), "new", made=True)

    def _found(self, ids: tuple[int, ...]) -> Found | None:
        """Return the session that agrees longest: in ids, or in a text that the model wrote in other ids than these.

        By ids alone two sessions may agree equally long, up to an answer in other ids, and one of them in its text on.
        """
        if self._library.find(ids) is None:  # first without the identity of the model: its weights would be hashed
            return None
        identity = self._engine.identity()
        found = self._library.find(ids, identity)
        while found is not None:
            aligned = align(self._tokens_of(found.name), ids, self._engine.detokenize)
            longer = self._library.find(aligned.ids, identity) if aligned.kept > found.n_tokens else None
            if longer is None or longer.n_rows <= found.n_rows:
                break
            found, ids = longer, aligned.ids
        return found

    def _tokens_of(self, name: str) -> tuple[int, ...]:
        with self._read(name) as session:
            return session.tokens

    def _read(self, name: str) -> AbstractContextManager[LibrarySession]:
        """Return a session to read: the one that is open, which stays so, or one that is opened for that."""
        held = self._held.get(name)
        return nullcontext(held.session) if held else self._library.open(name, create=False, readonly=True)

    def _continues(self, found: Found, messages: Sequence[Message]) -> How:
        """Tell whether a request goes on where a session ends, or parts from it; a text that is no chat is neither."""
        with self._read(found.name) as session:
            if not any(number for _, number in session.message_ends):
                return "new"
            said, n_tokens = session.messages, session.n_tokens
        goes_on = said is not None and len(said) < len(messages) and tuple(messages[: len(said)]) == said
        return "continued" if goes_on or found.n_tokens == n_tokens else "forked"

    # -- open conversations --------------------------------------------------------------------------------------------

    def _open(self, name: str, template: Mapping[str, Any] | None, *, create: bool) -> Conversation:
        """Return the conversation of a session, with what the chat template is handed (None: whatever it is now)."""
        held = self._held.get(name)
        if held is not None and template in (None, held.template):
            held.used = time.monotonic()
            return held.conversation
        settings, is_new = self._settings, False
        with ExitStack() as undo:
            if held is not None:
                session = held.session
            else:
                is_new = create and name not in self._library
                session = self._library.open(name, create=create)
                undo.callback(self._library.remove, name) if is_new else None
                undo.callback(session.close)
            conversation = Conversation(
                self._engine, session, on_mismatch="fresh" if settings.fresh else "raise", template=template or {},
                every=settings.every, codec=settings.codec, metadata=settings.metadata,
            )  # fmt: skip
            undo.pop_all()
        self._held[name] = _Held(conversation, session, template or {}, time.monotonic())
        while len(self._held) > settings.limits.open_sessions:
            self._close(min((n for n in self._held if n != name), key=lambda n: self._held[n].used))
        return conversation

    def _close(self, name: str) -> None:
        held = self._held.pop(name, None)
        if held is not None:
            with ExitStack() as closing:
                closing.callback(held.session.close)
                if held.conversation.unsaved:
                    held.conversation.save()

    def save_live(self) -> None:
        """Store what an error kept from being stored, where the engine still holds it."""
        for held in self._held.values():
            if held.conversation.unsaved:
                with suppress(KvsnapError):  # told to its client already; the request that comes now is another one
                    held.conversation.save()

    def close_idle(self, seconds: float) -> None:
        """Close what was not used for so many seconds."""
        before = time.monotonic() - seconds
        for name in [n for n, held in self._held.items() if held.used <= before]:
            self._close(name)

    def close(self) -> None:
        """Close all sessions and the library, and store what is not stored. Raise `StorageError` where that fails."""
        with ExitStack() as closing:
            closing.callback(self._library.close)
            for name in list(self._held):
                closing.callback(self._close, name)

    # -- what clients do with sessions ---------------------------------------------------------------------------------

    def listed(self) -> list[dict[str, Any]]:
        """Return all sessions, as clients see them."""
        return [_session_data(entry, is_open=entry.name in self._held) for entry in self._library.list()]

    def told(self, name: str) -> dict[str, Any]:
        """Return one session. Raise `MissingError`."""
        for entry in self._library.list():
            if entry.name == name:
                return _session_data(entry, is_open=name in self._held)
        raise MissingError("no such session", found=name)

    def history(self, name: str) -> dict[str, Any]:
        """Return the commits and the messages of a session. Raise `MissingError`."""
        with self._library.open(name, create=False, readonly=True) as session:
            commits = [
                {"commit": turn.commit, "operation": turn.operation, "complete": turn.complete,
                 "n_tokens": turn.n_tokens, "time": turn.time_ns / 1e9}
                for turn in session.history
            ]  # fmt: skip
            said = session.messages
        return {"object": "kvsnap.history", "session": name, "commits": commits,
                "messages": None if said is None else list(said)}  # fmt: skip

    def forked(self, name: str, new: str | None, n_tokens: int | None, commit: int | None) -> dict[str, Any]:
        """Fork a session at its last turn or an earlier one; return the fork."""
        made = self._library.fork(name, new or _new_name(), n_tokens=n_tokens, commit=commit)
        return _session_data(made, is_open=False)

    def rewound(self, name: str, turns: int | None, commit: int | None) -> dict[str, Any]:
        """Go back by turns, or to an earlier commit; return the session."""
        if (turns is None) == (commit is None):
            raise InputError("say how far to go back", expected="turns or commit, one of both")
        if turns is not None:
            self._open(name, None, create=False).rewind(turns)
        else:
            self._close(name)
            with self._library.open(name, create=False) as session:
                session.rewind(commit or 0)
        return self.told(name)

    def saved(self, name: str) -> dict[str, Any]:
        """Store what is not stored yet; return the session, with the bytes written."""
        held = self._held.get(name)
        written = held.conversation.save() if held is not None else 0
        return {**self.told(name), "written": written}

    def emptied(self, name: str) -> dict[str, Any]:
        """Forget all of a session but its commits; return it."""
        self._close(name)
        with self._library.open(name, create=False) as session:
            session.reset()
        return self.told(name)

    def removed(self, name: str) -> dict[str, Any]:
        """Remove a session; return what is told of that."""
        self.told(name)
        self._close(name)
        self._library.remove(name)
        return {"object": "kvsnap.session.deleted", "id": name, "deleted": True}


def _new_name() -> str:
    return f"chat-{secrets.token_hex(6)}"


def _session_data(entry: Entry, *, is_open: bool) -> dict[str, Any]:
    return {
        "object": "kvsnap.session", "id": entry.name, "state": entry.state, "reason": entry.reason,
        "n_tokens": entry.n_tokens, "n_commits": entry.n_commits, "complete": entry.complete, "nbytes": entry.nbytes,
        "own_bytes": entry.own_bytes, "created": entry.created_ns // 10**9, "last_use": entry.last_use_ns // 10**9,
        "parents": list(entry.parent_names), "open": is_open,
    }  # fmt: skip

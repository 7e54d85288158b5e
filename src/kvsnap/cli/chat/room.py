"""What a chat has open: a model, a session, and the conversation between them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import kvsnap
from kvsnap.cli._model import ChosenModel, choose_model, open_engine, refusing
from kvsnap.cli._names import Named, check_place_of_session, library_path, opened_session, resolved, shown
from kvsnap.cli._output import progress
from kvsnap.cli._paths import check_new, check_target
from kvsnap.conversation import Conversation, Message, Stream
from kvsnap.errors import BusyError, InputError
from kvsnap.layout import Snapshot
from kvsnap.library import Library
from kvsnap.protocols import Engine, Progress
from kvsnap.session import Session

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Options", "Room", "exists", "file_of"]

_FRESH = "kvsnap chat --fresh starts the session anew for this model, and what is there stays in its log"


@dataclass(slots=True)
class Options:
    """What the command line asked for; `max_tokens` may be changed while the chat goes on."""

    model: str | None = None
    dtype: str | None = None
    attention: str | None = None
    sampler: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    max_tokens: int | None = None
    every: int | None = None
    accept: Sequence[str] = ()
    codec: str | None = None
    fresh: bool = False
    keep_history: bool = False


def file_of(name: str, *, may_be_new: bool = True) -> str:
    """Return the file that a name means: a path where it is one, else the session of that name of the library."""
    is_path = os.sep in name or (os.altsep or os.sep) in name or name.endswith(".kvsnap")
    return resolved(name if is_path or name.startswith("@") else f"@{name}", may_be_new=may_be_new)


def exists(file: str) -> bool:
    """Tell whether there is a session: a path that is taken, or a name that the library knows."""
    return not file.startswith("@") if isinstance(file, Named) else os.path.lexists(file)


class Room:
    """One conversation at a time, and the model that it is held with. A context manager.

    `file` is what was opened, `notes` what is worth telling about how it was opened.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.file = ""
        self.stop = ""
        self.notes: list[str] = []
        self._opened = ExitStack()
        self._engine: Engine | None = None
        self._chosen: ChosenModel | None = None
        self._conversation: Conversation | None = None
        self._system: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    # -- what is open --------------------------------------------------------------------------------------------------

    @property
    def conversation(self) -> Conversation:
        """The one that is open."""
        assert self._conversation is not None, "open comes first"  # noqa: S101 # told to mypy
        return self._conversation

    @property
    def session(self) -> Session:
        """The session of the conversation."""
        session = self.conversation.session
        assert session is not None, "a room opens no other"  # noqa: S101 # told to mypy
        return session

    @property
    def name(self) -> str:
        """The session as it was typed."""
        return shown(self.file)

    @property
    def model(self) -> str:
        """The model, in a word."""
        name = "" if self._chosen is None else self._chosen.name
        return os.path.basename(os.path.normpath(name)) if os.path.exists(name) else name

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages so far; none where it is not known which they are."""
        return self.conversation.messages or ()

    @property
    def system(self) -> str:
        """The system message, as it is or will be from the next turn on."""
        if self._system is not None:
            return self._system
        first = self.messages[0] if self.messages else None
        if first is not None:
            return str(first.get("content") or "") if first["role"] == "system" else ""
        return self.conversation.system or ""

    # -- opening -------------------------------------------------------------------------------------------------------

    def open(self, file: str) -> None:
        """Open a session in place of the one that is open, which stays open where this raises."""
        check_place_of_session(file)
        with ExitStack() as opened:
            session = opened.enter_context(_opened(file)) if exists(file) else None
            snapshot = None if session is None else session.load()
            if session is not None:
                session.check_open_to_turns()
            picked = choose_model(self.options.model, _metadata(snapshot))
            chosen = opened.enter_context(refusing(picked, _FRESH, turns=True))
            engine = self._engine_for(chosen, snapshot)
            _check_speaks(engine, file, chosen)
            if session is None:
                session = opened.enter_context(_opened(file))
            conversation = self._conversation_of(engine, session, chosen)
            before, self._opened = self._opened, opened.pop_all()
        before.close()
        self.file, self._engine, self._chosen, self._conversation = file, engine, chosen, conversation
        self.stop, self._system = _metadata(snapshot).get("stop", ""), None
        self._take_options()

    def _engine_for(self, chosen: ChosenModel, snapshot: Snapshot | None) -> Engine:
        identity = None if snapshot is None or not snapshot.tokens else snapshot.identity
        if self._engine is not None and self._chosen is not None and self._chosen.recorded == chosen.recorded:
            here = self._engine.identity() if identity is not None else None
            if here is None or identity is None or _runs_as(here) == _runs_as(identity):
                return self._engine
        return open_engine(chosen.name, self.options.dtype, self.options.attention, identity)

    def _conversation_of(self, engine: Engine, session: Session, chosen: ChosenModel) -> Conversation:
        options = self.options
        bars: list[Progress] = []

        def told(done: int, total: int) -> None:
            for bar in bars:
                bar(done, total)

        # The bar ends here, though the conversation restores again later: it would be drawn into an answer.
        with progress("restoring") as report:
            bars.append(report)
            made = Conversation(
                engine, session, on_mismatch="fresh" if options.fresh else "raise", accept=options.accept,
                system=options.system, drift="keep" if options.keep_history else "recompute", every=options.every,
                codec=options.codec, metadata={"model": chosen.recorded}, progress=told,
            )  # fmt: skip
        bars.clear()
        return made

    def _take_options(self) -> None:
        self.notes = list(self.conversation.notes)
        if self.options.sampler:
            self.conversation.change_sampler(**self.options.sampler)
        if self.options.system is not None and self.messages and self.system != self.options.system:
            self.notes.append("--system is for a conversation that is empty; :system TEXT changes that of this one")

    # -- turns ---------------------------------------------------------------------------------------------------------

    def say(self, text: str) -> Stream:
        """Say something; raise as `Conversation.stream`."""
        messages = self.messages
        if messages and messages[-1]["role"] == "user":
            raise InputError("the last message has no answer yet: :continue generates it, :drop takes the message back")
        if self._system is None:
            return self.conversation.stream(text, max_tokens=self.options.max_tokens)
        return self._say_all((*self._with_system(), {"role": "user", "content": text}))

    def go_on(self) -> Stream:
        """Go on with the answer that was cut off; raise as `Conversation.stream_on`."""
        if self.conversation.complete or not self.messages:
            raise InputError("there is nothing to go on with: the last answer is complete, or nothing was said yet")
        return self.conversation.stream_on(max_tokens=self.options.max_tokens)

    def again(self) -> Stream:
        """Answer the last message once more, with other random numbers; the old answer stays until the new one is."""
        messages = self._with_system()
        while messages and messages[-1]["role"] != "user":
            messages = messages[:-1]
        if not messages:
            raise InputError("there is no message to answer again")
        sampler = self.conversation.sampler
        if not sampler.greedy:
            self.conversation.sampler = replace(sampler, seed=None)
        return self._say_all(messages)

    def _say_all(self, messages: tuple[Message, ...]) -> Stream:
        stream = self.conversation.stream(messages, max_tokens=self.options.max_tokens)
        self._system = None
        return stream

    def _with_system(self) -> tuple[Message, ...]:
        messages = self.messages
        if self._system is None:
            return messages
        rest = messages[1:] if messages and messages[0]["role"] == "system" else messages
        return ({"role": "system", "content": self._system}, *rest) if self._system else rest

    def set_system(self, text: str) -> None:
        """Take another system message from the next turn on; an empty text takes it away."""
        if self.messages:
            self._system = text
        else:
            self.conversation.system = text or None

    # -- going back ----------------------------------------------------------------------------------------------------

    def rewind(self, turns: int) -> str:
        """Go back by so many turns; return the message that the first of them was, to be said in another way."""
        before = self.messages
        if self.conversation.messages is None:
            raise InputError(
                "it is not known which messages this session holds: kvsnap log and kvsnap rewind go back by commits, "
                ":reset starts anew"
            )
        self.conversation.rewind(turns)
        dropped = before[len(self.messages) :]
        return next((str(m.get("content") or "") for m in dropped if m["role"] == "user"), "")

    def reset(self) -> None:
        """Forget all messages; a system message stays for the conversation that starts now."""
        system = self.system
        self.conversation.reset()
        self._system, self.conversation.system = None, system or None

    # -- copies --------------------------------------------------------------------------------------------------------

    def fork(self, name: str) -> str:
        """Make another session that holds what is here; return it as it is typed."""
        file = file_of(name)
        if exists(file):
            raise InputError("there is a session of this name already: use another name", found=shown(file))
        self.conversation.save()
        if not isinstance(file, Named):
            check_new(file)
            Session.fork(self.session, file)
        elif isinstance(self.file, Named):
            self.conversation.fork(file.name)
        else:
            with Library(library_path()) as library:
                library.add(self.session.path, file.name)
        return shown(file)

    def save_to(self, path: str) -> kvsnap.SaveReport:
        """Write a sealed snapshot of what is here."""
        if path.startswith("@"):
            raise InputError("a snapshot is a file; :fork NAME makes another session of the library", found=path)
        check_target(path, overwrite=False, option=":save")
        self.conversation.save()
        with progress(f"saving {path}") as report:
            return kvsnap.save(self.session.load(), path, codec=self.options.codec, progress=report)


def _metadata(snapshot: Snapshot | None) -> Mapping[str, str]:
    return {} if snapshot is None else snapshot.metadata


def _runs_as(identity: kvsnap.Identity) -> tuple[str | None, str | None]:
    return identity.cache_dtype, dict(identity.runtime).get("attention")


@contextmanager
def _opened(file: str) -> Iterator[Session]:
    """Open a session, made when it is not there; a refusal names it as it was typed."""
    with ExitStack() as opened:
        try:
            session = opened.enter_context(opened_session(file))
        except BusyError as error:
            raise BusyError(
                f"session {shown(file)} is open for writing already, in another chat, server or command: close it "
                "there, or chat in another session", path=error.path,
            ) from error  # fmt: skip
        yield session


def _check_speaks(engine: Engine, file: str, chosen: ChosenModel) -> None:
    """Raise unless the model takes messages: it needs a tokenizer and a chat template."""
    if getattr(engine, "tokenizer", None) is None:
        raise InputError(
            f"{chosen.name} has no tokenizer, and a chat is text: put its tokenizer.json beside config.json, or give "
            "token ids to kvsnap generate --prompt-ids"
        )
    try:
        engine.render([{"role": "user", "content": "?"}])
    except InputError as error:
        raise InputError(
            f"{chosen.name} cannot chat: {error.message}. It takes plain text: kvsnap generate TEXT --session "
            f"{shown(file)} --model {chosen.name}"
        ) from error

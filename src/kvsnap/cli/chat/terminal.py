"""A chat in a terminal: a line to type in, answers as they come, and a line of figures at the bottom."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import platformdirs

from kvsnap.cli._model import error_text
from kvsnap.cli._output import remark, show
from kvsnap.cli.chat import answering
from kvsnap.cli.chat.commands import (
    COMMANDS,
    command_of,
    half_done,
    last_exchange,
    opening,
    run_command,
    said,
    sessions,
)
from kvsnap.cli.chat.page import Paint, clean, in_colour
from kvsnap.cli.chat.room import Room
from kvsnap.conversation import Stream
from kvsnap.errors import ContextError, ExtraMissingError, KvsnapError, StorageError
from kvsnap.files import write_whole
from kvsnap.layout import Sampler

__all__ = ["Terminal", "check_extra", "unseen_keys"]

_MARK, _MORE = "\u203a ", "\u00b7 "
_HINT = ":help lists the commands, Alt-Enter starts a further line, Ctrl-D leaves"
_STYLE = {"mark": "bold ansicyan", "more": "ansicyan", "bottom-toolbar": "noreverse ansibrightblack"}
_TAIL = 12
"""Lines of a message that are shown when a conversation is opened."""


def check_extra() -> None:
    """Raise `ExtraMissingError` unless what draws the terminal is installed."""
    try:
        import prompt_toolkit  # noqa: F401 # only whether it is there
    except ImportError as error:
        raise ExtraMissingError(
            "a chat in a terminal needs prompt_toolkit: pip install 'kvsnap[chat]' (or pipe the messages in)"
        ) from error


class Terminal:
    """Reads messages and commands until the user leaves, and shows what comes of them."""

    def __init__(self, room: Room, *, keep_typed: bool) -> None:
        self._room = room
        self._paint = Paint(in_colour())
        self._reader = _reader(self, keep_typed=keep_typed)
        self._draft = ""

    def run(self) -> None:
        """Chat until the user leaves."""
        self._open()
        while True:
            try:
                with answering.left_by_signal():
                    text = self._reader.prompt(default=self._draft)
            except KeyboardInterrupt:
                self._draft = ""
                continue
            except EOFError:
                return
            self._draft = ""
            if text.strip():
                try:
                    with answering.left_by_signal():
                        if not self._taken(text):
                            return
                except KeyboardInterrupt:
                    self._tell("interrupted: nothing was said")
                except ContextError as error:
                    self._warn(f"{error.message}")
                    self._tell(
                        ":rewind N goes back by N turns, :reset starts anew; :fork NAME keeps this as it is first"
                        + ("; Ctrl-C clears the line" if self._draft else "")
                    )
                except KvsnapError as error:
                    self._warn(error_text(error))

    def toolbar(self) -> str:
        """Return the line at the bottom, as much of it as fits."""
        from prompt_toolkit.utils import get_cwidth

        room, conversation = self._room, self._room.conversation
        limit, turn = conversation.engine.context_limit, conversation.last
        tokens = f"{conversation.n_tokens:,}{'' if limit is None else f'/{limit:,}'} tokens"
        parts = [room.name, room.model, tokens]
        if conversation.unsaved:
            parts.append(f"{conversation.unsaved:,} NOT STORED (:save)")
        parts += [] if turn is None else answering.figures(turn)
        width, line = shutil.get_terminal_size().columns, ""
        for part in parts:
            longer = f"{line} \u00b7 {part}" if line else f" {part}"
            if get_cwidth(clean(longer)) <= width:
                line = longer
        return clean(line)

    # -- one line typed ------------------------------------------------------------------------------------------------

    def _taken(self, text: str) -> bool:
        """Do what was typed; False when it was to leave."""
        command = command_of(text)
        if command is None:
            self._answer(lambda: self._room.say(said(text)), draft=text)
            return True
        reply = run_command(self._room, *command)
        self._draft = reply.draft
        for line in reply.lines:
            self._tell(line)
        if reply.opened:
            self._open()
        if reply.begin is not None:
            self._answer(reply.begin)
        return not reply.leave

    def _answer(self, begin: Callable[[], Stream], draft: str = "") -> None:
        before, self._draft = self._draft, draft  # until something was said, the message is there to be sent again
        answer = answering.take(self._room.conversation, begin, lambda text: show(clean(text)))
        self._draft = before
        show("\n")
        self._room.stop = answer.turn.stop
        for line in answering.remarks(answer):
            (self._tell if answer.error is None else self._warn)(line)
        show("\n")

    # -- what is shown -------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        for line in opening(self._room):
            self._tell(line)
        self._tell(_HINT)
        show("\n")
        for message in last_exchange(self._room):
            text = _tail(clean(str(message.get("content") or "")))
            mine = message["role"] == "user"
            show(f"{self._paint.user(_MARK)}{text}\n" if mine else f"{text}\n")
        half = half_done(self._room)
        if half:
            self._tell(half)
        if half or self._room.messages:
            show("\n")

    def _tell(self, text: str) -> None:
        for line in self._wrapped(text):
            show(self._paint.dim(line) + "\n")

    def _warn(self, text: str) -> None:
        for line in self._wrapped(" ".join(text.split())):
            show(self._paint.bad(line) + "\n")

    @staticmethod
    def _wrapped(text: str) -> list[str]:
        width = max(20, shutil.get_terminal_size().columns)
        options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "replace_whitespace": False}
        return textwrap.wrap(clean(text), width, **options) or [""]


def _tail(text: str) -> str:
    lines = text.rstrip("\n").split("\n")
    return text.rstrip("\n") if len(lines) <= _TAIL else "\n".join(("\u2026", *lines[-_TAIL:]))


@contextmanager
def unseen_keys() -> Iterator[None]:
    """Keep what is typed meanwhile out of what is shown: it is there, Enter included, when the next line is read."""
    try:
        import termios
    except ImportError:  # not on this system
        yield
        return
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    quiet = list(before)
    quiet[0] &= ~termios.ICRNL
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(keys, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(keys, termios.TCSANOW, before)


# -- the line that is typed in -----------------------------------------------------------------------------------------


def _reader(terminal: Terminal, *, keep_typed: bool) -> Any:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.formatted_text import FormattedText
    from prompt_toolkit.styles import Style

    made: Any = PromptSession(
        message=FormattedText([("class:mark", _MARK)]),
        prompt_continuation=FormattedText([("class:more", _MORE)]),
        multiline=True,
        key_bindings=_keys(),
        completer=_completer(),
        complete_while_typing=Condition(lambda: made.default_buffer.text.startswith(":")),
        history=_history(keep_typed=keep_typed),
        bottom_toolbar=terminal.toolbar,
        reserve_space_for_menu=4,
        style=Style.from_dict(_STYLE if in_colour() else {"bottom-toolbar": "noreverse"}),
        include_default_pygments_style=False,
    )  # fmt: skip
    return made


def _keys() -> Any:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    def newline(event: Any) -> None:
        event.current_buffer.newline(copy_margin=False)

    def enter(event: Any) -> None:
        typed = event.current_buffer
        if typed.document.is_cursor_at_the_end and typed.text.endswith("\\"):
            typed.delete_before_cursor()
            newline(event)
        else:
            typed.validate_and_handle()

    def clear(event: Any) -> None:
        event.current_buffer.reset()  # without leaving the prompt: no key that follows at once is lost

    keys.add("c-c")(clear)
    keys.add("enter")(enter)
    keys.add("escape", "enter")(newline)
    keys.add("c-j")(newline)
    return keys


def _completer() -> Any:
    from prompt_toolkit.completion import Completer, Completion, PathCompleter

    class Words(Completer):  # type: ignore[misc] # an extra, seen as Any
        """Completes commands, the sessions of the library, settings and paths."""

        def get_completions(self, document: Any, event: Any) -> Iterator[Any]:
            typed = document.text_before_cursor
            if not typed.startswith(":") or "\n" in typed:
                return
            word, blank, rest = typed[1:].partition(" ")
            if not blank:
                for name, command in COMMANDS.items():
                    if name.startswith(word):
                        yield Completion(
                            name, -len(word), display=f":{name} {command.takes}", display_meta=command.does
                        )
            elif word == "open":
                for name in sessions():
                    if name.startswith(rest.removeprefix("@")):
                        yield Completion(name, -len(rest.removeprefix("@")), display=f"@{name}")
            elif word == "set":
                last = rest.replace(",", " ").split(" ")[-1]
                for name in (*(f.name for f in fields(Sampler)), "max_tokens"):
                    if name.startswith(last):
                        yield Completion(f"{name}=", -len(last))
            elif word == "save":
                from prompt_toolkit.document import Document

                yield from PathCompleter(expanduser=True).get_completions(Document(rest), event)

    return Words()


def _history(*, keep_typed: bool) -> Any:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    if not keep_typed:
        return InMemoryHistory()
    directory = platformdirs.user_state_dir("kvsnap", False)
    path = os.path.join(directory, "chat-history")
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        if not os.path.lexists(path):
            write_whole(path, b"")
        os.chmod(path, 0o600)
        if not os.access(path, os.R_OK | os.W_OK):
            raise PermissionError(13, "no permission", path)
    except (OSError, StorageError) as error:
        remark(f"note: what is typed is not kept, because {path} cannot be written: {error}")
        return InMemoryHistory()
    return FileHistory(path)

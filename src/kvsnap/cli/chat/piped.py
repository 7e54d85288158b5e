"""A chat without a terminal: a message per line of stdin, answers on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

from kvsnap.cli._output import OutputLostError, finite, remark, show
from kvsnap.cli.chat import answering
from kvsnap.cli.chat.commands import command_of, half_done, opening, run_command, said
from kvsnap.cli.chat.room import Room
from kvsnap.conversation import Stream
from kvsnap.errors import FormatError

__all__ = ["Piped"]


class Piped:
    """Takes one message after another, and stops at the first that cannot be answered.

    `whole` takes all of stdin as one message, in which nothing is a command. With `as_json` every turn and every
    command is one JSON object on a line of stdout.
    """

    def __init__(self, room: Room, *, whole: bool, as_json: bool) -> None:
        self._room = room
        self._whole = whole
        self._as_json = as_json

    def run(self) -> None:
        """Answer all messages. Raise what a turn raises, `KeyboardInterrupt` for one that was interrupted."""
        with answering.left_by_signal():
            self._told()
            for text in self._messages():
                command = None if self._whole else command_of(text)
                if command is None:
                    message = text if self._whole else said(text)
                    self._answer(lambda message=message: self._room.say(message), message)  # type: ignore[misc]
                elif not self._command(*command):
                    return

    def _told(self) -> None:
        for line in opening(self._room):
            remark(line)
        half = half_done(self._room)
        if half:
            remark(half)

    def _messages(self) -> Iterator[str]:
        try:
            if self._whole:
                text = sys.stdin.read().rstrip("\n")
                if text.strip():
                    yield text
                return
            for line in sys.stdin:
                if line.strip():
                    yield line.rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise FormatError(f"a message is not UTF-8 text: {error.reason}") from error

    def _command(self, word: str, argument: str) -> bool:
        reply = run_command(self._room, word, argument)
        if self._as_json:
            self._emit({"command": word, "lines": list(reply.lines), "session": self._room.name})
        else:
            for line in reply.lines:
                show(f"{line}\n")
        if reply.opened:
            self._told()
        if reply.begin is not None:
            self._answer(reply.begin, None)
        return not reply.leave

    def _answer(self, begin: Callable[[], Stream], message: str | None) -> None:
        room = self._room

        def shown(text: str) -> None:
            if not self._as_json:
                show(text)

        try:
            answer = answering.take(room.conversation, begin, shown)
        except OutputLostError:
            raise BrokenPipeError from None  # nobody reads any more: the turn is stored as cut off
        room.stop = answer.turn.stop
        if self._as_json:
            told = {"said": message, **answer.turn.to_dict(), "session": room.name, "model": room.model}
            self._emit({**told, "n_tokens": room.conversation.n_tokens, "unsaved": room.conversation.unsaved})
        else:
            with suppress(OutputLostError):
                show("\n")
        for line in answering.remarks(answer):
            remark(line)
        if answer.error is not None:
            raise answer.error
        if answer.turn.stop == "interrupted":
            raise KeyboardInterrupt

    @staticmethod
    def _emit(data: object) -> None:
        show(json.dumps(finite(data), default=str) + "\n")

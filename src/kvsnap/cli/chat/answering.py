"""An answer while it comes: shown, stopped by Ctrl-C, and told of."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from kvsnap.cli._output import count, seconds, size, waiting
from kvsnap.conversation import Conversation, Stream, Turn
from kvsnap.errors import StorageError

__all__ = ["Answer", "figures", "left_by_signal", "remarks", "take"]

_ENDED = {
    "length": "it reached the limit of tokens (:set max_tokens=N)",
    "context": "the context is full",
    "interrupted": "it was interrupted",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a turn: `turn`, and `error` where it could not be stored."""

    turn: Turn
    error: StorageError | None = None


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


class _Stopping:
    """Ctrl-C and requests to end: raised as always at first; once `gentle`, the first one is only remembered.

    So an answer ends between two tokens, never inside of a pass, which would leave nothing to store.
    """

    def __init__(self) -> None:
        self.gentle = False
        self.asked = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.gentle and not self.asked:
            self.asked = number
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        elif not self.gentle:
            _leave(number, frame)

    def leave(self) -> None:
        """Leave where that was asked for."""
        if self.asked and self.asked != signal.SIGINT:
            _leave(self.asked, None)


@contextmanager
def _stopping() -> Iterator[_Stopping]:
    made = _Stopping()
    if threading.current_thread() is not threading.main_thread():
        yield made  # signals are not for this thread
        return
    before = [(number, signal.signal(number, made)) for number in (signal.SIGINT, *_ends())]
    try:
        yield made
    finally:
        for number, old in before:
            signal.signal(number, old)


def _ends() -> list[signal.Signals]:
    """Return the signals that ask a process to end, as far as this system has them."""
    return [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def left_by_signal() -> Iterator[None]:
    """Let a hang-up and a request to end leave as Ctrl-C does: what was generated is stored first."""
    before: list[tuple[int, Any]] = []
    if threading.current_thread() is threading.main_thread():
        before = [(number, signal.signal(number, _leave)) for number in _ends()]
    try:
        yield
    finally:
        for number, old in before:
            signal.signal(number, old)


def take(conversation: Conversation, begin: Callable[[], Stream], show: Callable[[str], object]) -> Answer:
    """Begin a turn, hand its text to `show` as it comes, and return what came of it.

    Ctrl-C while the prompt is evaluated raises `KeyboardInterrupt`, and nothing was said then; later it ends the
    answer, which is cut off. Raise what `Conversation.stream` raises, but for storing: the answer is there even so.
    """
    with _stopping() as stopping:
        with waiting("reading"):
            before = conversation.last
            stream = begin()
        stopping.gentle = True
        try:
            with stream:
                for token in stream:
                    show(token.text)
                    if stopping.asked:
                        break
        except StorageError as error:
            if conversation.last is before or conversation.last is None:
                raise
            stopping.leave()
            return Answer(conversation.last, error)
        stopping.leave()
    return Answer(stream.turn)


def cut_off(turn: Turn) -> str:
    """Return a sentence for an answer that was cut off, with what to do; an empty text for a complete one."""
    if turn.complete:
        return ""
    if turn.stop == "context":
        return f"cut off: {_ENDED['context']}. :rewind N goes back, :reset starts anew; :fork NAME keeps this first"
    return f"cut off: {_ENDED[turn.stop]}. :continue goes on, :drop takes it back"


def remarks(answer: Answer) -> list[str]:
    """Return what is worth telling about a turn at once, one sentence each."""
    turn, told = answer.turn, []
    if turn.why is not None and turn.recomputed > 1:
        told.append(f"{count(turn.recomputed, 'token')} evaluated again: {turn.why.detail} (:why)")
    if turn.complete and not turn.text.strip():
        told.append("the model ended its answer at once")
    if answer.error is None:
        told.append(cut_off(turn))
    else:
        told.append(f"not stored: {answer.error.message}. The answer is here; :save tries again, and so does a turn")
    return [text for text in told if text]


def figures(turn: Turn) -> list[str]:
    """Return the figures of a turn, the most telling first."""
    rest = turn.total_s - turn.first_token_s
    more = len(turn.tokens) - 1
    return [
        f"reused {turn.reused:,}, recomputed {turn.recomputed:,}",
        f"wrote {size(turn.written)}",
        *([f"first token {seconds(turn.first_token_s)}"] if turn.tokens else []),
        *([f"{more / rest:.1f}/s"] if more > 0 and rest > 0 else []),
    ]

"""What a turn of a conversation did, and the tokens of one that is being generated."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from kvsnap.conversation.aligning import Why
from kvsnap.errors import InputError
from kvsnap.protocols import Token

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Message", "Stop", "Stream", "Turn"]

Message = Mapping[str, Any]
"""One message: `role` (`system`, `user`, `assistant`, `tool`), `content`, and what else a chat template takes."""
Stop = Literal["end", "stop", "length", "context", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one turn did.

    `text`, `tokens` and `logprobs` are of the answer, or of the part of it that was generated now; `message` is the
    whole answer as a message. `prompt_tokens` are the ids that the answer goes on from, history included: `reused` of
    them were evaluated before and kept, `recomputed` were evaluated before and had to be once more (`why` says the
    reason), `new` were evaluated for the first time. `evaluated` positions took `forwards` passes, those of the answer
    included. `written` counts bytes added to the session file. Times are seconds: `first_token_s` until the first token
    was there, `total_s` all of it, with storing.

    `stop` tells why it ended: `end` (the model ended it), `stop` (a stop text was met), and those that leave it cut
    off: `length` (the limit given), `context` (it is full), `interrupted` (Ctrl-C, or the reader left).
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    message: Message | None
    prompt_tokens: int
    reused: int
    recomputed: int
    new: int
    evaluated: int
    forwards: int
    written: int
    first_token_s: float
    total_s: float
    stop: Stop
    why: Why | None = None
    notes: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """False for an answer that was cut off: it can be gone on with (`go_on`) or dropped (`rewind`)."""
        return self.stop in ("end", "stop")

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        told = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            **told,
            "tokens": list(self.tokens),
            "logprobs": list(self.logprobs),
            "message": None if self.message is None else dict(self.message),
            "why": None if self.why is None else self.why.to_dict(),
            "notes": list(self.notes),
            "complete": self.complete,
        }


class Stream:
    """The tokens of a turn as they come: an iterator and a context manager. `turn` is there when it has ended.

    Left before its end (a `break` inside of `with`, `close`, an exception, Ctrl-C) the turn ends as `interrupted`, and
    is stored as cut off. Outside of `with` that happens when `close` is called, or when the iterator is collected.
    Of a text that may become a stop text nothing is handed out before it is clear: the text of a `Token` is what can be
    shown, not always what that id adds.
    """

    def __init__(self, tokens: Generator[Token, None, None], ended: Callable[[], Turn | None]) -> None:
        self._tokens = tokens
        self._ended = ended

    @property
    def turn(self) -> Turn:
        """What the turn did. Raise `InputError` while it goes on."""
        turn = self._ended()
        if turn is None:
            raise InputError("the turn has not ended: take its tokens, or close the stream")
        return turn

    def __iter__(self) -> Iterator[Token]:
        return self._tokens

    def __next__(self) -> Token:
        return next(self._tokens)

    def close(self) -> None:
        """End the turn here. Closing twice is allowed."""
        self._tokens.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""Messages: what they may be, where turns start, and their ids under a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvsnap.conversation.turns import Message
from kvsnap.errors import InputError
from kvsnap.formats.native.said import pack_messages, unpack_messages
from kvsnap.protocols import Engine

__all__ = ["checked", "following", "rendered", "starts_of"]

_MARK = "kvsnap-mark-of-an-answer"


def checked(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages as they are kept. Raise `InputError` naming the one that is none."""
    if isinstance(messages, Mapping) or not isinstance(messages, Sequence):
        raise InputError("a turn is a text or a list of messages", found=type(messages).__name__)
    for place, message in enumerate(messages):
        given: object = message
        if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
            raise InputError(
                f"message {place} is none", expected='{"role": "user", "content": "..."}', found=repr(given)[:80]
            )
    if not messages:
        raise InputError("a turn needs a message, and there is none")
    return unpack_messages(pack_messages(messages))  # nothing of it is shared with the caller


def starts_of(messages: Sequence[Message]) -> list[int]:
    """Return the messages that turns start with: the first one, and each of a user that follows an answer."""
    return [
        place
        for place, message in enumerate(messages)
        if not place or (message["role"] == "user" and messages[place - 1]["role"] not in ("user", "system"))
    ]


def rendered(
    engine: Engine, messages: Sequence[Message], options: Mapping[str, Any], *, behind: bool, answer: bool = True
) -> tuple[int, ...]:
    """Return the ids of all messages, ready for an `answer`; `behind` other ids without those that start a text."""
    ids = engine.render(messages, answer=answer, **options)
    wrong = next((i for i in ids if not 0 <= i < engine.vocab_size), None)
    if not ids or wrong is not None:
        raise InputError(
            "the chat template gives nothing that can be evaluated", expected=f"ids of 0 to {engine.vocab_size - 1}",
            found="none" if wrong is None else wrong,
        )  # fmt: skip
    if not behind:
        return ids
    first = engine.tokenize("")
    return ids[len(first) :] if first and ids[: len(first)] == first else ids


def following(
    engine: Engine, messages: Sequence[Message], options: Mapping[str, Any], saved: Sequence[int], answered: int
) -> tuple[int, ...]:
    """Return the ids of what comes behind an answer: message `answered` of the list, which `saved` ends with.

    What a template puts there is found by rendering all with a mark in the place of that answer. Raise `InputError`
    where the template does not give an answer back as it is.
    """
    mark = _MARK
    while mark in repr(messages):
        mark += "x"
    marked = [dict(message) for message in messages]
    marked[answered]["content"] = mark
    _, found, after = engine.detokenize(engine.render(marked, **options)).rpartition(mark)
    if not found:
        raise InputError("this chat template does not give answers back as they are, so they can't be kept as they are")
    # An answer that the model ended is saved with the token that ends it.
    last = engine.detokenize(saved[-1:])
    return engine.tokenize(after.removeprefix(last), special=False)

"""What the spans of a history say of its text and its chat messages. Spec section 9."""

from __future__ import annotations

import json
import os
import reprlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvsnap.errors import FormatError, InputError
from kvsnap.formats.native.members import Members
from kvsnap.formats.native.tables import MAX_JSON, canonical_json, parse_json
from kvsnap.runs import common_length

__all__ = [
    "MAX_DEPTH",
    "MAX_MESSAGES",
    "Added",
    "Piece",
    "Said",
    "pack_messages",
    "pack_said",
    "parse_messages",
    "parse_said",
    "unpack_messages",
]

MAX_DEPTH, MAX_MESSAGES = 64, 2**20


@dataclass(frozen=True, slots=True)
class Added:
    """What a span adds to the messages: the first `after` before it stay (None: all), then come `messages`.

    Each message is JSON text, one object. `messages` is None where it is not known what was added.
    """

    messages: tuple[str, ...] | None
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """What one span says.

    `text` is how many characters of the text before stay (None: all), and what is added; None: not kept. `messages` is
    None where it says nothing of messages: those before stay.
    """

    text: tuple[int | None, str] | None = None
    messages: Added | None = None

    def cut(self) -> Piece:
        """Return what is left to say where fewer tokens of the span are kept."""
        return Piece(None, None if self.messages is None else Added(None, self.messages.after))


@dataclass(frozen=True, slots=True)
class Said:
    """What is known behind a span. A history begins with an empty text, and with no messages that nobody spoke of.

    `messages` are those known from the first on, each as JSON text. They are all there are only where `whole`; `told`
    is False until a span speaks of messages.
    """

    text: str | None = ""
    messages: tuple[str, ...] = ()
    whole: bool = True
    told: bool = False

    @property
    def known(self) -> bool:
        """True when all messages are known."""
        return self.whole and self.told

    def add(self, piece: Piece) -> Said:
        """Return what is known behind one more span."""
        text = self._joined_text(piece.text)
        added = piece.messages
        if added is None:
            return Said(text, self.messages, self.whole, self.told)
        before, after = len(self.messages), added.after
        if added.messages is None:
            return Said(text, self.messages[:after], whole=False, told=True)
        if after is None and self.whole:
            after = before
        if after is None or after > before:
            return Said(text, self.messages, whole=False, told=True)
        return Said(text, self.messages[:after] + added.messages, whole=True, told=True)

    def _joined_text(self, piece: tuple[int | None, str] | None) -> str | None:
        if piece is None:
            return None
        after, text = piece
        if after == 0:
            return text
        return None if self.text is None else self.text[:after] + text

    def since(self, before: Said) -> Piece:
        """Return what a span has to say so that this is known behind it, and `before` in front of it."""
        return Piece(_new_text(before.text, self.text), self._added(before))

    def _added(self, before: Said) -> Added | None:
        if (self.messages, self.whole, self.told) == (before.messages, before.whole, before.told):
            return None
        same = common_length(before.messages, self.messages)
        if not self.whole:
            return Added(None, same)
        all_stay = before.whole and same == len(before.messages)
        return Added(self.messages[same:], None if all_stay else same)


def _new_text(before: str | None, text: str | None) -> tuple[int | None, str] | None:
    if text is None:
        return None
    if before is None:
        return 0, text
    if text.startswith(before):
        return None, text[len(before) :]
    # The last character may have been half of one before: its missing bytes change it.
    kept = len(os.path.commonprefix([before, text]))  # noqa: RUF071 # characters are meant
    return kept, text[kept:]


def _text_of(message: Mapping[str, Any]) -> str:
    """Return a message as JSON text; the order of its members stays, since a template may print them in it."""
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def unpack_messages(messages: Sequence[str]) -> tuple[dict[str, Any], ...]:
    """Return messages as data, which belongs to the caller."""
    return tuple(json.loads(message) for message in messages)


def pack_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return messages of a caller as JSON text. Raise `InputError` naming the one that is no message."""
    if len(messages) > MAX_MESSAGES:
        raise InputError("too many messages", expected=f"at most {MAX_MESSAGES}", found=len(messages))
    return tuple(_encoded(message, f"message {i}") for i, message in enumerate(messages))


def _encoded(message: Any, where: str) -> str:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InputError(
            f"{where} is no message", expected="an object with a role, which is text", found=reprlib.repr(message)
        )
    try:
        made = _text_of(_plain(message, where, 1))
        made.encode()  # half of a surrogate pair cannot be written
    except ValueError as error:
        raise InputError(f"{where} cannot be written as JSON", found=str(error)) from error
    return made


def _plain(value: Any, where: str, depth: int) -> Any:
    """Return a value as the JSON library takes it, without a change that it would make silently."""
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, (int, float)):
        if not abs(value) <= sys.float_info.max:
            raise InputError(f"{where} has a number that other readers cannot hold", expected="the range of a double")
        return value
    if depth > MAX_DEPTH:
        raise InputError(f"{where} nests too deep", expected=f"at most {MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        strange = next((name for name in value if not isinstance(name, str)), None)
        if strange is not None or None in value:
            raise InputError(f"{where} has a member whose name is not text", found=strange)
        return {name: _plain(item, where, depth + 1) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where, depth + 1) for item in value]
    raise InputError(f"{where} cannot be written as JSON", expected="text, numbers, lists, objects", found=type(value))


# -- the meta of a SPAN ---------------------------------------------------------------------------------------------


def pack_said(piece: Piece) -> bytes:
    """Return the meta of a SPAN record, empty where it says nothing. Raise `InputError` where it would be too long."""
    members: dict[str, str] = {}  # not sorted inside a message: the order of its members is the user's
    if piece.text is not None:
        after, text = piece.text
        members["text"] = canonical_json(text).decode()
        if after is not None:
            members["after"] = str(after)
    if piece.messages is not None:
        added = piece.messages
        members["messages"] = "null" if added.messages is None else f"[{','.join(added.messages)}]"
        if added.after is not None:
            members["messages_after"] = str(added.after)
    if not members:
        return b""
    made = ("{" + ",".join(f'"{name}":{members[name]}' for name in sorted(members)) + "}").encode()
    if len(made) > MAX_JSON:
        raise InputError(
            "text and messages of one turn are too long", expected=f"at most {MAX_JSON} bytes", found=len(made)
        )
    return made


def parse_said(raw: bytes, path: str | None, offset: int) -> Piece:
    """Parse the meta of a SPAN record. Raise `FormatError` naming the member."""
    if not raw:
        return Piece()
    if len(raw) > MAX_JSON:
        raise FormatError(
            "SPAN meta is too long", path=path, offset=offset, expected=f"at most {MAX_JSON} bytes", found=len(raw)
        )
    r = Members(parse_json(raw, path, offset), "SPAN meta", path, offset)
    return Piece(_text(r), _messages(r))


def _text(r: Members) -> tuple[int | None, str] | None:
    if r.data.get("text") is None:
        return None
    return _after(r, "after"), r.text("text")


def _after(r: Members, name: str) -> int | None:
    return None if r.data.get(name) is None else r.integer(name, 0, 2**40)


def _messages(r: Members) -> Added | None:
    if "messages" not in r.data:
        return None
    after = _after(r, "messages_after")
    if r.data["messages"] is None:
        return Added(None, after)
    return Added(parse_messages(r.items("messages", MAX_MESSAGES), r.what, r.path, r.offset), after)


def parse_messages(items: Sequence[Any], what: str, path: str | None, offset: int) -> tuple[str, ...]:
    """Return messages of a file as JSON text. Raise `FormatError` naming the one that is no message."""
    found = []
    for i, item in enumerate(items):
        r = Members(item, f"{what} messages[{i}]", path, offset)
        r.text("role")
        _check_values(r)
        found.append(_text_of(r.data))
    return tuple(found)


def _check_values(r: Members) -> None:
    """Refuse a message that nests deeper than any is written, and numbers that JSON does not have."""
    level: list[Any] = [r.data]
    for _ in range(MAX_DEPTH):
        inside = [x for value in level for x in (value.values() if isinstance(value, dict) else value)]
        if not all(abs(x) <= sys.float_info.max for x in inside if isinstance(x, (int, float))):
            r.refuse("a number", "one within the range of a double", "one beyond it")
        level = [x for x in inside if isinstance(x, (dict, list))]
        if not level:
            return
    r.refuse("itself", f"at most {MAX_DEPTH} levels", "more")

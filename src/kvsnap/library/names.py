"""Names of sessions in a library: what a name may be, and which names look alike.

A name is the name of a file. It is checked before anything is read or written, and what is refused is refused on every
system alike, so that a library can be carried to another one.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from functools import lru_cache

from kvsnap.errors import InputError

__all__ = ["check_free", "check_name", "likeness"]

MAX_BYTES = 200
_FORBIDDEN = frozenset('<>:"/\\|?*')
# Letters that look like a separator, a colon or a dot and that no compatibility form tells.
_LOOKALIKES = frozenset(
    "\u2044\u2215\u29f8\u27cb\u2571\u0337\u0338\u1735"  # slashes
    "\u2216\u29f5\u29f9\u27cd\u2572"  # backslashes
    "\u2236\ua789\u05c3\u0589\u02f8"  # colons
    "\u2223\u01c0\u2502"  # bars
    "\u2024\ufe52\uff0e\u0701\u0702\ua4f8"  # dots
)
# Shown as nothing: two names that differ in these alone could not be told apart.
_INVISIBLE = frozenset({0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x3164, 0xFFA0})
_INVISIBLE_RANGES = ((0x180B, 0x180F), (0xFE00, 0xFE0F), (0xE0000, 0xE0FFF))
_BLANKS = frozenset(" \u3000")
_REFUSED = {
    "Cc": "a control character",
    "Cf": "an invisible or direction character",
    "Cs": "half of a character",
    "Co": "a private character",
    "Cn": "an unassigned character",
    "Zl": "a line separator",
    "Zp": "a paragraph separator",
}
_NUMBERED = tuple(f"{word}{digit}" for word in ("com", "lpt") for digit in "0123456789")
_RESERVED = frozenset(("con", "prn", "aux", "nul", "conin$", "conout$", "clock$", *_NUMBERED))


def check_name(name: str) -> str:
    """Return `name` when it may name a session; raise `InputError` saying what is wrong with it, before any I/O."""
    given: object = name
    if not isinstance(given, str):
        raise InputError("a name of a session is a text", found=type(given).__name__)
    why = _why_refused(given)
    if why:
        raise InputError(f"not a name for a session: {why}", found=ascii(name))
    return name


@lru_cache(maxsize=4096)
def _why_refused(name: str) -> str:
    """Return what is wrong with a name, or nothing."""
    if not name:
        return "it is empty"
    for place, letter in enumerate(name):
        wrong = _wrong(letter)
        if wrong:
            return f"{wrong} (U+{ord(letter):04X}) at character {place}"
    plain = unicodedata.normalize("NFKC", name)
    if unicodedata.normalize("NFC", name) != name:
        return "it is not composed (Unicode NFC); the composed form may be used"
    if len(name.encode()) > MAX_BYTES:
        return f"it is too long: {len(name.encode())} bytes of UTF-8, at most {MAX_BYTES}"
    for form in (name, plain):
        if form[0] in "-@":
            return f"it starts with {form[0]}"
        if form[0] in " ." or form[-1] in " .":
            return "it starts or ends with a blank or a dot"
    if unicodedata.category(name[0]).startswith("M"):
        return "it starts with a combining mark"
    if plain.split(".", 1)[0].rstrip(" ").casefold() in _RESERVED:
        return "it names a device on Windows"
    return ""


def _wrong(letter: str) -> str:
    """Return what is wrong with one character, or nothing."""
    if letter in _FORBIDDEN:
        return "a character that file systems reserve"
    category = unicodedata.category(letter)
    if category in _REFUSED:
        return _REFUSED[category]
    code = ord(letter)
    if code in _INVISIBLE or any(low <= code <= high for low, high in _INVISIBLE_RANGES):
        return "an invisible character"
    if category == "Zs" and letter not in _BLANKS:
        return "a character that looks like a blank"
    plain = unicodedata.normalize("NFKC", letter)
    if letter in _LOOKALIKES or (plain != letter and any(c in _FORBIDDEN | _LOOKALIKES | {"."} for c in plain)):
        return "a character that looks like a separator or a dot"
    return ""


@lru_cache(maxsize=4096)
def likeness(name: str) -> str:
    """Return what names that look alike have in common: compatibility form without case. "A" and "a" are alike."""
    folded = unicodedata.normalize("NFKC", name).casefold()
    return unicodedata.normalize("NFKC", folded)


def check_free(name: str, taken: Iterable[str]) -> str:
    """Return `name` when it may name a new session beside those `taken`; else `InputError` names the one in the way."""
    check_name(name)
    key = likeness(name)
    for other in taken:
        if other == name:
            raise InputError("there is a session of this name already", found=ascii(name))
        if likeness(other) == key:
            raise InputError(
                f"this name looks like that of another session, {other!r}: names that differ in case or width only are "
                "one name on some systems",
                found=ascii(name),
            )
    return name

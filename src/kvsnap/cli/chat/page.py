"""Text as a chat shows it: without control characters, in colours where they are wanted, cut to a few lines."""

from __future__ import annotations

import os
import re
import sys
import unicodedata

__all__ = ["Paint", "clean", "excerpt", "in_colour"]

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def clean(text: str) -> str:
    """Return text that commands no terminal: of the control characters only new line and tab stay, others are shown.

    What a model writes, and what a file holds, comes from others.
    """
    return _CONTROL.sub(_shown, text.replace("\r\n", "\n"))


def _shown(found: re.Match[str]) -> str:
    code = ord(found.group())
    return "\u2421" if code == 0x7F else chr(0x2400 + code) if code < 0x20 else "\ufffd"


def excerpt(text: str, characters: int) -> str:
    """Return the start of a text on one line, with dots where it goes on; never half of a combined character."""
    line = " ".join(clean(text).split())
    if len(line) <= characters:
        return line
    end = max(1, characters - 1)
    while end > 1 and (unicodedata.combining(line[end]) or line[end] in "\u200d\ufe0f" or line[end - 1] == "\u200d"):
        end -= 1
    return line[:end].rstrip() + "\u2026"


def in_colour() -> bool:
    """Tell whether stdout takes colours: a terminal that is no dumb one, and NO_COLOR is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


class Paint:
    """Puts colours around text, or leaves it as it is."""

    def __init__(self, on: bool) -> None:
        self.on = on

    def _in(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.on and text else text

    def dim(self, text: str) -> str:
        """Something beside the conversation."""
        return self._in("2", text)

    def bold(self, text: str) -> str:
        """A heading."""
        return self._in("1", text)

    def user(self, text: str) -> str:
        """What the user said."""
        return self._in("1;36", text)

    def bad(self, text: str) -> str:
        """Something that went wrong."""
        return self._in("31", text)

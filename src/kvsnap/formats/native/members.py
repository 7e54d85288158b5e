"""Typed access to one JSON object of a file."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from kvsnap.errors import FormatError, VersionError

__all__ = ["Members"]


class Members:
    """Typed access to one JSON object; every error names the record and the member."""

    def __init__(self, data: Any, what: str, path: str | None, offset: int) -> None:
        self.what, self.path, self.offset = what, path, offset
        if not isinstance(data, dict):
            self.refuse("itself", "an object", data)
        self.data: dict[str, Any] = data

    def refuse(self, name: str, expected: str, found: Any) -> NoReturn:
        shown = reprlib.repr(found)[:60]  # a file may nest deeper than repr can follow
        raise FormatError(
            f"{self.what}: {name} is not valid", path=self.path, offset=self.offset, expected=expected, found=shown
        )

    def text(self, name: str, choices: Sequence[str] = ()) -> str:
        value = self.data.get(name)
        if not isinstance(value, str):
            self.refuse(name, "text", value)
        if choices and value not in choices:
            self.refuse(name, "one of " + " ".join(c or "(empty)" for c in choices), value)
        return value

    def word(self, name: str, known: Sequence[str]) -> str:
        """Return a word of a list that a later version may add to. Raise `VersionError` for one that is not known."""
        value = self.text(name)
        if value not in known:
            raise VersionError(
                f"{self.what}: {name} is not known; a newer release may know it", path=self.path, offset=self.offset,
                expected="one of " + " ".join(w or "(empty)" for w in known), found=reprlib.repr(value)[:60],
            )  # fmt: skip
        return value

    def integer(self, name: str, low: int, high: int) -> int:
        return self.check_integer(name, self.data.get(name), low, high)

    def check_integer(self, name: str, value: Any, low: int, high: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.refuse(name, f"an integer from {low} to {high}", value)
        return value

    def number(self, name: str) -> float:
        value = self.data.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            self.refuse(name, "a number", value)
        if not abs(value) <= sys.float_info.max:
            self.refuse(name, "a finite number", "one beyond the range of a double")
        return float(value)

    def pair(self, name: str, value: Any, first: int, second: int) -> tuple[int, int]:
        """Check that a value is a pair of integers from 0 up to these."""
        if not isinstance(value, list) or len(value) != 2:
            self.refuse(name, "pairs", value)
        return self.check_integer(name, value[0], 0, first), self.check_integer(name, value[1], 0, second)

    def items(self, name: str, most: int) -> list[Any]:
        value = self.data.get(name)
        if not isinstance(value, list) or len(value) > most:
            self.refuse(name, f"a list of at most {most}", len(value) if isinstance(value, list) else value)
        return value

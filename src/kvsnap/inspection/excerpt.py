"""The first and last words of a conversation: what tells one large file from another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["EXCERPT", "excerpts"]

EXCERPT = 80
"""Characters of an excerpt at most, with the dots that stand for the rest."""
_LOOKED_AT = 4096


def excerpts(text: str | None, messages: Sequence[Mapping[str, Any]] | None) -> tuple[str, str]:
    """Return how a conversation begins and ends, on one line each, without control characters.

    It begins with the first message of a user, or else with the first one, or else with the text. Empty where nothing
    is known.
    """
    said = [(str(m.get("role", "")), _content(m.get("content"))) for m in messages or ()]
    said = [(role, content) for role, content in said if content.strip()]
    if said:
        first = next((content for role, content in said if role == "user"), said[0][1])
        return _first(first), _last(said[-1][1])
    return (_first(text), _last(text)) if text else ("", "")


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Iterable) and not isinstance(content, Mapping):  # parts, of which some are text
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        return " ".join(part for part in parts if isinstance(part, str))
    return ""


def _line(text: str) -> str:
    """Return text on one line; what is no printable character as its escape."""
    words = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in words)


def _first(text: str) -> str:
    line = _line(text[:_LOOKED_AT])
    cut = len(line) > EXCERPT or len(text) > _LOOKED_AT
    return line[: EXCERPT - 3].rstrip() + "..." if cut and len(line) > EXCERPT - 3 else line


def _last(text: str) -> str:
    line = _line(text[-_LOOKED_AT:])
    cut = len(line) > EXCERPT or len(text) > _LOOKED_AT
    return "..." + line[3 - EXCERPT :].lstrip() if cut and len(line) > EXCERPT - 3 else line

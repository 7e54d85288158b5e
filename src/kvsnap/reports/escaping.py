"""Texts from files, made safe to show: a cache file may come from anyone.

Nothing that is shown is read as markup, as a script or as a formula; what cannot be seen (control characters, marks
that turn the direction of a line around) is written as its number.
"""

from __future__ import annotations

import html
import json
import re
from typing import Any

__all__ = ["data", "escaped", "slug", "visible"]

# C0 and C1 controls, line and paragraph separators, zero-width and direction marks, tags, surrogates, noncharacters.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    "\ufff0-\ufffb\ufffe\uffff\U000e0000-\U000e007f]"
)
_BREAKS = {"\n": "⏎", "\t": "⇥"}


def visible(text: str, *, lines: bool = False) -> str:
    """Return a text in which every character can be seen; `lines` keeps line breaks and tabs as they are."""
    text = _UNSEEN.sub(lambda m: f"\\u{ord(m[0]):04x}", text.replace("\r\n", "\n"))
    return text if lines else text.replace("\n", _BREAKS["\n"]).replace("\t", _BREAKS["\t"])


def escaped(text: object, *, lines: bool = False) -> str:
    """Return a text for HTML, between tags and in attributes in double quotes."""
    return html.escape(visible(str(text), lines=lines), quote=True)


def data(value: Any) -> str:
    """Return JSON for a `<script type="application/json">`: nothing in it can end the element. Raise for NaN."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def slug(text: str) -> str:
    """Return a name for an id or a file: lower-case letters, digits and dashes, never empty."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "part"

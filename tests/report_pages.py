"""Looks into the pages of reports, and makes a file that would break a page which trusts it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import kvsnap
from synthetic import snapshot

EVIL = "</script><img src=x onerror=alert(1)>\u202e\x00\x1b[31m $x_{1}$ 'q' \"q\" &amp; "


class Page(HTMLParser):
    """What a page is made of, for looking into it."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.data: dict[str, Any] = {}
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self._inside = ""
        self._id = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag in ("script", "style"):
            self._inside = "json" if found.get("type") == "application/json" else tag
            self._id = found.get("id") or ""

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._inside = ""

    def handle_data(self, text: str) -> None:
        if self._inside == "json":
            self.data[self._id.removesuffix("-data")] = json.loads(text)
        elif self._inside == "script":
            self.scripts.append(text)
        elif self._inside == "style":
            self.styles.append(text)
        else:
            self.text += text

    def said(self) -> str:
        """All that it says: text, what a pointer is told, and what a screen reader is."""
        attributes = [str(v) for _, found in self.tags for name, v in found.items() if name not in ("d", "href")]
        return " ".join([self.text, json.dumps(self.data), *attributes])

    def figure(self, name: str) -> dict[str, Any]:
        """The data of the figure of this name."""
        ids = [a.get("id") for t, a in self.tags if t == "div" and a.get("class") == "plot"]
        names = [a.get("data-name") for t, a in self.tags if t == "figure"]
        found: dict[str, Any] = self.data[str(ids[names.index(name)])]
        return found


def page_of(path: str | Path = "r.html") -> Page:
    return Page(Path(path).read_text(encoding="utf-8"))


def hostile(path: str) -> None:
    taken = snapshot(
        range(1, 9), layers=2, text=EVIL * 3, metadata={"title": EVIL, EVIL: EVIL},
        messages=({"role": EVIL, "content": EVIL}, {"role": "user", "content": [{"type": "text", "text": EVIL}]}),
        architecture=EVIL.replace("\x00", ""),
    )  # fmt: skip
    kvsnap.save(taken, path)


def draw_only(monkeypatch: pytest.MonkeyPatch, *titles: str) -> None:
    """Leave pages without pictures, except those whose titles begin so; their tables stay. Drawing takes the time."""
    from kvsnap.plots import Drawn, Marks, drawn

    def some(picture: Any, prefix: str = "") -> Drawn:
        wanted = picture.title.startswith(titles) if titles else False
        return drawn(picture, prefix) if wanted else Drawn("<svg></svg>", Marks(()))

    monkeypatch.setattr("kvsnap.reports.page.drawn", some)

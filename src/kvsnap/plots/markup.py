"""Makes of matplotlib's SVG one that may stand in a page with others, under a policy that allows no inline styles."""

from __future__ import annotations

import html
import re

from kvsnap.plots.colours import VARIABLES

__all__ = ["for_page"]

_REFERENCES = re.compile(r'(?:href="|url\()#([^")]+)')
_IDS = re.compile(r'\s+id="([^"]*)"')
_STYLES = re.compile(r'\s+style="([^"]*)"')
_PLACES = re.compile(r'(\s(?:d="|transform="(?=translate)))([^"]*)"')
_LONG = re.compile(r"(\.\d\d)\d+")  # a hundredth of a point is finer than any screen
_SPACES = re.compile(r"\s*([A-Za-z])\s*")
_FONT = re.compile(r"(?:(?P<weight>bold|[1-9]00)\s+)?(?P<size>[\d.]+px)")


def for_page(text: str, prefix: str) -> str:
    """Return the `<svg>` element of a file: colours and font of the page, no styles, ids that begin with `prefix`.

    Ids that nothing refers to are left out, since a page holds several pictures.
    """
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    used = set(_REFERENCES.findall(text))
    text = _IDS.sub(lambda m: f' id="{prefix}{m[1]}"' if m[1] in used else "", text)
    text = _REFERENCES.sub(lambda m: m[0].replace(f"#{m[1]}", f"#{prefix}{m[1]}"), text)
    text = _STYLES.sub(_attributes, text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    text = re.sub(r"\s*\n\s*", "\n", text)
    text = _PLACES.sub(lambda m: m[1] + _SPACES.sub(r"\1", _LONG.sub(r"\1", m[2])) + '"', text)
    head, rest = text.split(">", 1)
    head = re.sub(r'\s(?:width|height|version|xmlns(?::xlink)?)="[^"]*"', "", head)
    # matplotlib leaves black out, as it is SVG's own default: the dark page needs it said.
    return f'{head} aria-hidden="true" focusable="false" fill="currentColor" stroke-linejoin="round">{rest}'.replace(
        "xlink:href=", "href="
    )


def _attributes(found: re.Match[str]) -> str:
    """Return declarations of CSS as presentation attributes; the family of a font is the page's business."""
    out = []
    for declaration in html.unescape(found[1]).split(";"):
        name, _, value = (part.strip() for part in declaration.partition(":"))
        if not value or name == "font-family":
            continue
        if name == "font":
            font = _FONT.search(value)
            if font is not None:
                out += [f'font-size="{font["size"]}"'] + ([f'font-weight="{font["weight"]}"'] if font["weight"] else [])
            continue
        if name == "image-rendering" and value != "pixelated":
            continue
        out.append(f'{name}="{html.escape(value)}"')
    return f" {' '.join(out)}" if out else ""

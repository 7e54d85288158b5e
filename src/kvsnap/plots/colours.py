"""The colours of pictures: stand-ins while matplotlib draws, CSS variables in a page, fixed ones on white paper."""

from __future__ import annotations

__all__ = ["BAD", "BARS", "FAINT", "INK", "LINES", "ON_WHITE", "SAME", "VARIABLES"]

# Stand for the colours of the page until the SVG is written; no colour map contains them by chance.
INK, FAINT, BAD = "#010203", "#040506", "#010205"
BARS = ("#070809", "#0a0b0c", "#0d0e0f")
LINES = ("#010301", "#010302", "#010303", "#010304", "#010305", "#010306")

VARIABLES = {
    INK: "currentColor",
    FAINT: "var(--faint)",
    BAD: "var(--bad)",
    **{colour: f"var(--bar-{n})" for n, colour in enumerate(BARS, 1)},
    **{colour: f"var(--line-{n})" for n, colour in enumerate(LINES, 1)},
}
"""What takes the place of each stand-in in a page."""

# Of the lines: the palette of Okabe and Ito (2008), which colour-blind readers tell apart, its light ones darkened to
# a contrast of 3 on white.
ON_WHITE = {
    INK: "#1c2330", FAINT: "#d5dae3", BAD: "#c02a2a",
    BARS[0]: "#2166ac", BARS[1]: "#c26a16", BARS[2]: "#77839a",
    LINES[0]: "#0072b2", LINES[1]: "#c26a16", LINES[2]: "#00805f", LINES[3]: "#b0558f", LINES[4]: "#2f8fc4",
    LINES[5]: "#6b7280",
}  # fmt: skip
"""Fixed colours for a file on white."""

SAME = {colour: colour for colour in VARIABLES}

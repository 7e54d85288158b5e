"""Numbers, sizes and times in words, the same way all over a page."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence

from kvsnap.results import count, size

__all__ = ["ROLES", "count", "role_name", "share", "shortest_names", "size", "unit_of", "when"]

ROLES = {
    "k": "keys", "v": "values", "latent": "latent rows", "rope": "rope rows", "index": "index rows",
    "cross_k": "keys of the encoder", "cross_v": "values of the encoder", "recurrent": "recurrent states",
    "conv": "convolution states",
}  # fmt: skip


def role_name(role: str) -> str:
    """Return what a role is called: `keys`, `values`, `latent rows`."""
    return ROLES.get(role, role.replace("_", " "))


def unit_of(n_bytes: float) -> tuple[float, str]:
    """Return a unit that suits so many bytes: how many bytes it has, and its name."""
    for size_, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n_bytes >= size_:
            return size_, name
    return 1.0, "B"


def when(time_ns: int) -> str:
    """Return a time to the second in UTC; empty where none is known."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_ns / 1e9)) if time_ns else ""


def shortest_names(paths: Sequence[str]) -> list[str]:
    """Return the shortest names that tell files apart: their own, or else their paths."""
    short = [os.path.basename(path) for path in paths]
    return [name if short.count(name) == 1 else path for name, path in zip(short, paths, strict=True)]


def share(value: float | None) -> str:
    """Return a number with four significant digits, or `not known`."""
    if value is None or math.isnan(value):
        return "not known"
    return f"{value:.4g}"

"""kvsnap: a save file for the live state of a language model."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"

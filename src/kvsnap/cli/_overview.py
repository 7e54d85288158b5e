"""The list of commands that `kvsnap --help` prints, by what they are for."""

from __future__ import annotations

import click

__all__ = ["Overview"]

_SECTIONS = (
    ("Run a model", "chat generate resume sweep serve attention quality check demo"),
    ("Look at a file", "info cat log head growth stats diff verify report"),
    ("Go back and branch", "truncate rewind reset fork compact"),
    ("Change, convert and mend", "convert edit split join repair keygen"),
    ("The library", "ls find rename rm pin unpin prune collect doctor"),
)
_LONGEST = 300
"""Characters of a first sentence; longer ones are cut by click."""


class Overview(click.Group):
    """The commands in sections, each with its first sentence; one that is in no section comes last."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections."""
        placed = [name for _, names in _SECTIONS for name in names.split()]
        rest = " ".join(name for name in self.list_commands(ctx) if name not in placed)
        width = max(map(len, self.commands), default=0)
        for title, names in (*_SECTIONS, ("More", rest)):
            known = [(name, self.commands[name]) for name in names.split() if name in self.commands]
            rows = [(name.ljust(width), c.get_short_help_str(_LONGEST)) for name, c in known if not c.hidden]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

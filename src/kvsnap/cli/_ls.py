"""A library, or any directory, as a table: ls."""

from __future__ import annotations

import time
from typing import Any

import click

from kvsnap.cli._names import library_option, open_existing
from kvsnap.cli._output import CheckFailed, count, emit, examples, json_option, remark, show_table, size, table
from kvsnap.errors import KvsnapError
from kvsnap.inspection.listing import SORTS, Listed, Listing, is_library, listing, listing_of
from kvsnap.library import Library

__all__ = ["COMMANDS"]

_SPARE = ("file id", "in all", "stored as", "made with", "turns", "commits", "created", "format", "used")
"""What a narrow terminal does without, the first one first."""
_ROOMY = {"begins": 26, "made with": 20}
"""Characters below which a column is wrapped into more lines than anyone wants to read."""


@click.command()
@click.argument("directories", nargs=-1, metavar="[DIR]...")
@click.option("--sort", type=click.Choice(SORTS), default="name", show_default=True,
              help="By name from a on; by all else the largest or the latest first.")  # fmt: skip
@click.option("--reverse", is_flag=True, help="The other way round.")
@click.option("--long", "is_long", is_flag=True, help="Show when it was made, commits, format and file id, too.")
@library_option
@json_option
@examples(
    "kvsnap ls",
    "kvsnap ls --sort used",
    "kvsnap ls ~/snapshots --long         # any directory: every format that kvsnap reads",
    "kvsnap ls --library ./sessions --json | jq '.sessions[].name'",
)
def ls(directories: tuple[str, ...], sort: str, reverse: bool, is_long: bool, as_json: bool) -> None:
    """List the sessions of the library, or the files of each DIR that kvsnap reads. No tensor is read.

    A fork shares the history that it starts with: `size` is that of its own file, `in all` with all that it needs. A
    file that is damaged, encrypted, or of a newer version is listed with what can be told of it; the rest goes on.
    """
    told: list[dict[str, Any]] = []
    code = 0
    for place, where in enumerate(directories or (None,)):
        try:
            found, more = _found(where)
        except KvsnapError as error:
            if len(directories) < 2:
                raise
            told.append({"path": where, "error": {**error.to_dict(), "exit_code": error.exit_code}})
            code = code or error.exit_code
            if not as_json:
                remark(f"kvsnap: {error}")
            continue
        found = found.sorted(sort, reverse=reverse)
        told.append(_data(found, more))
        if not as_json:
            if len(directories) > 1:
                print(f"{chr(10) if place else ''}{where}:")
            _show(found, more, is_long=is_long)
    if as_json:
        emit(told[0] if len(directories) < 2 else {"directories": told})
    if code:
        raise CheckFailed(code)


def _found(where: str | None) -> tuple[Listing, dict[str, Any]]:
    """Return what is in a directory (None: the library), and of a library its sizes and entries."""
    if where is not None and not is_library(where):
        return listing(where), {}
    with open_existing() if where is None else Library(where, readonly=True) as library:
        entries = {entry.name: entry.to_dict() for entry in library.list()}
        more = {"max_bytes": library.max_bytes, "nbytes": library.nbytes, "overrun": library.overrun}
        return listing_of(library), {**more, "entries": entries}


def _data(found: Listing, more: dict[str, Any]) -> dict[str, Any]:
    if not found.is_library:
        return found.to_dict()
    entries = more["entries"]
    sessions = [
        {**entries.get(one.name, {"name": one.name}), "begins": one.begins, "n_turns": one.n_turns,
         "model": one.model, "encodings": list(one.encodings)}
        for one in found.files
    ]  # fmt: skip
    return {"path": found.path, "is_library": True, **{k: v for k, v in more.items() if k != "entries"},
            "sessions": sessions}  # fmt: skip


def _show(found: Listing, more: dict[str, Any], *, is_long: bool) -> None:
    columns = ["name", "begins", "tokens", "turns"]
    columns += ["commits", "created", "format"] if is_long else []
    columns += [
        "stored as",
        "size",
        "in all",
        "used",
        "made with",
        *(["file id"] if is_long and found.is_library else []),
        "",
    ]
    made = table(*columns, right=("tokens", "turns", "commits", "size", "in all"))
    for one in found.files:
        nameless = "a removed session" if found.is_library else one.parent
        ids = [one.file_id] if is_long and found.is_library else []
        *row, notes = _row(one, is_long=is_long, nameless=nameless)
        made.add_row(*row, *ids, notes)
    show_table(made, spare=_SPARE, roomy=_ROOMY)
    total = sum(one.nbytes for one in found.files)
    if not found.is_library:
        other = f"; {count(found.n_other, 'other file')}" if found.n_other else ""
        remark(f"{count(len(found.files), 'file')}, {size(total)}{other}")
        return
    limit, over = more["max_bytes"], more["overrun"]
    told = "no limit" if limit is None else f"limit {size(limit)}" + (f", {size(over)} over" if over else "")
    remark(f"{count(len(found.files), 'session')}, {size(more['nbytes'])}, {told}")


def _row(one: Listed, *, is_long: bool, nameless: str) -> list[str]:
    from rich.markup import escape

    known = one.state == "ok"
    notes = [] if known else [f"[bold]{escape(one.state)}[/bold]"]
    if not known and not one.use:
        notes.append(escape(one.reason))
    notes += ["pinned"] if one.pinned else []
    notes += [escape(f"fork of {', '.join(one.parent_names) or nameless}")] if one.parent else []
    notes += [] if one.complete or not known else ["last turn cut off"]
    row = [escape(one.name), escape(one.begins)]
    row += [f"{one.n_tokens:,}", f"{one.n_turns:,}"] if known else ["", ""]
    if is_long:
        row += [f"{one.n_commits:,}" if known else "", _when(one.created_ns), one.format]
    row += [
        ", ".join(one.encodings),
        size(one.nbytes) if one.nbytes else "",
        size(one.total_bytes) if one.total_bytes else "",
    ]
    row += [_when(one.used_ns), escape(one.model), ", ".join(notes)]
    return row


def _when(time_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(time_ns / 1e9)) if time_ns else ""


COMMANDS = (ls,)

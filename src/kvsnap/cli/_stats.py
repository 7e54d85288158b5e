"""The command that measures what is in a file, without a model: stats."""

from __future__ import annotations

import csv
import sys
from typing import Any

import click

import kvsnap
from kvsnap.cli._keys import Keys, key_options
from kvsnap.cli._names import library_option, named
from kvsnap.cli._output import (
    count,
    csv_row,
    emit,
    examples,
    json_option,
    progress,
    remark,
    say,
    show_table,
    table,
    tell,
)
from kvsnap.cli._report import Drawing, page_options
from kvsnap.errors import InputError
from kvsnap.inspection.statistics import Statistics
from kvsnap.results import Cell, Table, text_of

__all__ = ["COMMANDS"]

_LIMIT = 40
"""Lines of a table by channel or by row that are printed where no limit is given."""
_SHOWN = {
    "layer": {
        "layer": "layer", "role": "role", "n_heads": "heads", "dim": "dim", "n_rows": "rows", "mean": "mean",
        "std": "std", "min": "min", "max": "max", "mean_norm": "norm", "entropy": "entropy", "mean_share": "mean share",
        "rank_99": "rank 99 %", "effective_rank": "eff. rank", "n_outliers": "outliers", "n_dead": "dead",
    },
    "head": {
        "layer": "layer", "role": "role", "head": "head", "mean": "mean", "std": "std", "mean_norm": "norm",
        "min_norm": "least", "max_norm": "largest", "entropy": "entropy", "mean_share": "mean share",
        "rank_90": "rank 90 %", "rank_99": "rank 99 %", "effective_rank": "eff. rank", "outlier_ratio": "widest",
        "n_outliers": "outliers", "dead": "dead",
    },
}  # fmt: skip
"""Columns that are printed, and their headings; --csv and --json have all."""
_SPARE = ("dim", "heads", "rows", "min", "max", "least", "largest", "mean", "rank 90 %", "eff. rank", "entropy")
"""What a narrow terminal does without, the first one first."""


@click.command()
@click.argument("file", callback=named)
@click.option("--layer", "layers", type=int, multiple=True, metavar="N", help="Only this layer; repeatable.")
@click.option("--role", "roles", multiple=True, metavar="NAME", help="Only k, v, latent, rope, index, ...; repeatable.")
@click.option(
    "--by", type=click.Choice(("layer", "head", "channel", "row")), default="layer", show_default=True,
    help="What a line of the table stands for.",
)  # fmt: skip
@click.option("--sort", metavar="COLUMN", help="Sort by a column (its name in --csv), the largest first.")
@click.option("--reverse", is_flag=True, help="With --sort: the smallest first.")
@click.option("--limit", type=click.IntRange(min=0), metavar="N",
              help=f"Lines of the table; 0: all.  [default: {_LIMIT} by channel or row]")  # fmt: skip
@click.option("--sample", type=click.IntRange(min=1), metavar="N", help="Look at N rows of each tensor, not at all.")
@page_options()
@click.option("--csv", "as_csv", is_flag=True, help="Print the table as CSV, all columns, nothing else.")
@key_options()
@library_option
@json_option
@examples(
    "kvsnap stats chat.kvsnap",
    "kvsnap stats chat.kvsnap --by head --role k --sort effective_rank --reverse --limit 10",
    "kvsnap stats chat.kvsnap --by channel --layer 0 --sort ratio",
    "kvsnap stats long.kvsnap --sample 4096 --by row --csv > norms.csv",
)
def stats(
    file: str, layers: tuple[int, ...], roles: tuple[str, ...], by: str, sort: str | None, reverse: bool,
    limit: int | None, sample: int | None, as_csv: bool, drawing: Drawing, keys: Keys,
    as_json: bool,
) -> None:  # fmt: skip
    """Measure the keys and values in FILE: norms, outlier channels, entropy, rank, dead heads, sinks.

    No model is needed. Each tensor is read once, one at a time; every byte that is read is checked. What stands out is
    told below the table.
    """
    if as_csv and as_json:
        raise click.UsageError("--csv and --json exclude each other")
    if reverse and sort is None:
        raise click.UsageError("--reverse goes with --sort")
    drawing.check()
    with progress(f"measuring {file}") as report:
        found = kvsnap.statistics(
            file, layers=layers or None, roles=roles or None, sample=sample, key=keys.of(file), progress=report
        )
    drawing.draw(found)
    if as_json:
        emit(_data(found, by))
        return
    whole = _sorted(found.table(by), sort, reverse=reverse)
    if as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(whole.columns)
        writer.writerows(map(csv_row, whole.rows[: limit or None]))
        return
    _print(found, whole, by, limit)


def _data(found: Statistics, by: str) -> dict[str, Any]:
    """Return all but the largest arrays, which are told when they are asked for."""
    data = found.to_dict()
    for name, wanted in (("channels", "channel"), ("norms", "row")):
        if by != wanted:
            del data[name]
    if by != "row":
        del data["tokens"]
    return data


def _sorted(whole: Table, sort: str | None, *, reverse: bool) -> Table:
    if sort is None:
        return whole
    if sort not in whole.columns:
        raise InputError("no such column to sort by", expected=", ".join(whole.columns), found=sort)
    at = whole.columns.index(sort)
    known = [row for row in whole.rows if row[at] is not None]
    known.sort(key=lambda row: row[at], reverse=not reverse)  # type: ignore[arg-type, return-value] # of one kind
    return Table(whole.title, whole.columns, (*known, *(row for row in whole.rows if row[at] is None)))


def _print(found: Statistics, whole: Table, by: str, limit: int | None) -> None:
    name = "".join(c if c.isprintable() else "?" for c in found.architecture)
    say(
        f"{name or 'unknown model'}: {count(found.num_layers, 'layer')}, "
        f"{count(found.n_tokens, 'token')}, {count(found.n_rows, 'row')}"
    )
    most = (_LIMIT if by in ("channel", "row") else 0) if limit is None else limit
    lines = whole.rows[: most or None]
    shown = _SHOWN.get(by) or {name: name.replace("_", " ") for name in whole.columns}
    places = [whole.columns.index(name) for name in shown]
    made = table(*shown.values(), right=tuple(n for c, n in shown.items() if c != "role"))
    for row in lines:
        made.add_row(*(_cell(row[place], whole.columns[place]) for place in places))
    show_table(made, spare=_SPARE, more="--csv")
    if len(lines) < len(whole.rows):
        remark(f"{len(whole.rows) - len(lines):,} more lines: --limit 0 prints all")
    for text in found.findings:
        tell(f"* {text}")
    for note in found.notes:
        remark(f"note: {note}")


def _cell(value: Cell, column: str) -> str:
    if isinstance(value, float):
        return f"{value:.1%}" if column == "mean_share" else f"{value:.1f}" if "rank" in column else f"{value:.3g}"
    return "" if value is False else text_of(value)


COMMANDS = (stats,)

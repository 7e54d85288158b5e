"""The command that compares two caches: diff."""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Sequence

import click

import kvsnap
from kvsnap.cli._keys import Keys, key_options
from kvsnap.cli._model import open_decoder
from kvsnap.cli._names import library_option, named, shown
from kvsnap.cli._output import (
    CheckFailed,
    count,
    csv_row,
    emit,
    examples,
    json_option,
    progress,
    say,
    show_table,
    size,
    table,
    tell,
)
from kvsnap.cli._report import Drawing, page_options
from kvsnap.formats.native import is_encrypted
from kvsnap.inspection.diff.answers import Diff, HeadDifference, LayerDifference, Side
from kvsnap.results import Cell, Table, text_of

__all__ = ["COMMANDS"]

_SHOWN_FIELDS = 8


@click.command()
@click.argument("a", callback=named)
@click.argument("b", required=False, callback=named)
@click.option("--commit-a", type=click.IntRange(min=1), metavar="K", help="Take A at this commit (see `kvsnap log`).")
@click.option("--commit-b", type=click.IntRange(min=1), metavar="K", help="Take B, or A again, at this commit.")
@click.option("--layer", "layers", type=int, multiple=True, metavar="N", help="Compare this layer only; repeatable.")
@click.option("--all-rows", is_flag=True, help="Compare rows behind the first token that differs, too, by place.")
@click.option("--similar/--no-similar", default=None,
              help="Similarity between all layers (linear CKA).  [default: of two models]")  # fmt: skip
@click.option("--by", type=click.Choice(["layer", "head", "position"]), default="layer", show_default=True,
              help="What a line of the table stands for.")  # fmt: skip
@click.option("--limit", type=click.IntRange(min=0), default=40, show_default=True, metavar="N",
              help="Lines of the table; 0: all.")  # fmt: skip
@click.option("--model", metavar="NAME", help="Take the text around a difference from the tokenizer of this model.")
@click.option("--require", type=click.Choice(["all", "cache", "bound"]), default="all", show_default=True,
              help="What exit code 0 asks for.")  # fmt: skip
@click.option("--csv", "as_csv", is_flag=True, help="Print the table as CSV, whole, and nothing else.")
@page_options()
@click.option("-q", "--quiet", is_flag=True, help="Print nothing: the exit code is the answer.")
@key_options()
@library_option
@json_option
@examples(
    "kvsnap diff story.kvsnap small.kvsnap              # what did quantising cost?",
    "kvsnap diff @rivers @rivers-fork --by head         # where two branches part",
    "kvsnap diff chat.kvsnap --commit-a 3               # what came since commit 3",
    "kvsnap diff llama-8b.kvsnap llama-3b.kvsnap        # how two variants of a model grow",
    "kvsnap diff a.kvsnap b.kvsnap -q && echo the same",
)
def diff(
    a: str, b: str | None, commit_a: int | None, commit_b: int | None, layers: tuple[int, ...], all_rows: bool,
    similar: bool | None, by: str, limit: int, model: str | None, require: str, as_csv: bool, drawing: Drawing,
    quiet: bool, keys: Keys, as_json: bool,
) -> None:  # fmt: skip
    """Compare the caches in A and B: encodings, runs, turns, formats of one model, or two variants of one.

    Tokens are aligned first; rows are compared as far as both sides have the same input. Exit code 0 when nothing
    differs, 1 when something does. --require cache asks only for the same bits in the cache, of the same tokens;
    --require bound for values that differ by no more than storing them may have changed them.
    """
    if b is None and commit_a is None and commit_b is None:
        raise click.UsageError("name a second file, or a commit of the first to compare it with (--commit-a)")
    if sum((as_csv, quiet, as_json)) > 1:
        raise click.UsageError("--csv, --json and --quiet exclude each other")
    drawing.check()
    other = a if b is None else b
    key_a, key_b = _keys(keys, a, other)
    decode = None if model is None else open_decoder(model)
    with progress("comparing") as report:
        found = kvsnap.diff(
            a, other, layers=layers or None, all_rows=all_rows, similar=similar, detokenize=decode,
            key_a=key_a, key_b=key_b, commit_a=commit_a, commit_b=commit_b, progress=report,
        )  # fmt: skip
    drawing.draw(found)
    code = 0 if _holds(found, require) else 1
    if as_json:
        data = found.to_dict()
        if by != "position":
            del data["positions"]
        emit({**data, "exit_code": code})
    elif as_csv:
        _print_csv(_whole_table(found, by))
    elif not quiet:
        _print(found, by, limit, (shown(a), shown(other)))
    if code:
        raise CheckFailed(code)


def _keys(keys: Keys, a: str, b: str) -> tuple[bytes | None, bytes | None]:
    """Return the key of each file. One is demanded of one file at least: an encrypted one may face one that is not."""
    locked = [os.path.isfile(path) and is_encrypted(path) for path in (a, b)]
    if not any(locked):
        return keys.of(a), None
    found = [keys.of(path) if is_locked else None for path, is_locked in zip((a, b), locked, strict=True)]
    return found[0], found[1]


def _holds(found: Diff, require: str) -> bool:
    if require == "all":
        return found.identical
    if require == "cache":
        return found.same_cache
    return found.same_cache or (found.verdict == "bound" and not found.not_compared)


# -- tables ----------------------------------------------------------------------------------------------------------

_LAYER = ("layer", "role", "kind", "n_rows", "n_different", "relative_error", "max_row_error", "cosine_min", "max_abs",
          "bound", "within_bound", "rms_a", "rms_b", "cka")  # fmt: skip
_HEAD = ("layer", "role", "head", "n_rows", "n_different", "relative_error", "max_row_error", "cosine_min", "max_abs",
         "row", "within_bound")  # fmt: skip
_NAMES = {
    "n_rows": "rows", "n_different": "differ", "relative_error": "rel. error", "max_row_error": "worst row",
    "cosine_min": "min cosine", "max_abs": "max error", "within_bound": "within", "rms_a": "rms a", "rms_b": "rms b",
    "row": "at row",
}  # fmt: skip
_SPARE = ("kind", "rms b", "rms a", "bound", "rows", "cka", "worst row")
"""What a narrow terminal does without, the first one first."""


def _whole_table(found: Diff, by: str) -> Table:
    """Return the table that `--by` asks for with all of its columns and rows."""
    if by == "position":
        return _by_position(found)
    return found.tables()[("layer", "head").index(by)]


def _by_position(found: Diff) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (int(row), place.role, float(error), float(cosine))
        for place in found.positions
        for row, error, cosine in zip(place.rows, place.relative_error, place.cosine, strict=True)
    ]
    return Table("positions", ("row", "role", "relative_error", "cosine"), tuple(rows))


def _short_table(found: Diff, by: str) -> tuple[Table, str]:
    """Return the table for people, and how it is sorted: layers in order, the rest with the largest errors first."""
    if by == "position":
        whole = _by_position(found)
        ranked = sorted((row for row in whole.rows if row[2]), key=lambda row: -float(row[2] or 0))
        return Table("", whole.columns, tuple(ranked)), "rows with the largest errors, of all layers and heads together"
    items: Sequence[LayerDifference | HeadDifference] = found.layers
    if not any(layer.n_different is None or layer.n_different for layer in found.layers):
        items = ()  # nothing but zeros
    names: tuple[str, ...] = _LAYER
    told = "by layer"
    if by == "head":
        items = sorted((h for h in found.heads if h.n_different), key=_error, reverse=True)
        names, told = _HEAD, "heads that differ, the largest errors first"
    kept = [name for name in names if name in ("layer", "role") or any(_says(getattr(i, name), name) for i in items)]
    rows = tuple(tuple(getattr(item, name) for name in kept) for item in items)
    return Table("", tuple(kept), rows), told


def _error(head: LayerDifference | HeadDifference) -> float:
    return head.relative_error or 0.0


def _says(value: Cell, name: str) -> bool:
    """Tell whether a value makes its column worth showing."""
    if name == "n_different":
        return value is not None
    return value is not None and value not in ((0, 0.0) if name in ("bound", "max_row_error") else ())


def _cell(column: str, value: Cell) -> str:
    return f"{value:.6f}" if column.startswith("cosine") and isinstance(value, float) else text_of(value)


def _print_csv(made: Table) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(made.columns)
    writer.writerows(map(csv_row, made.rows))


# -- for people ------------------------------------------------------------------------------------------------------


def _print(found: Diff, by: str, limit: int, names: tuple[str, str]) -> None:
    from rich.markup import escape

    sides = table("", "file", "tokens", "layers", "heads", "dtype", "cache", "per token", "on disk", "error up to",
                  right=("tokens", "layers", "cache", "per token", "on disk"))  # fmt: skip
    for letter, side, name in zip("ab", (found.a, found.b), names, strict=True):
        sides.add_row(letter, *map(escape, _side(side, name)))
    show_table(sides, spare=("dtype", "heads", "layers", "cache"))
    say()
    tell(str(found))
    small, large = sorted((found.a.file_bytes or 0, found.b.file_bytes or 0))
    if small and large / small > 1.01 and found.tokens.relation == "same":
        say(f"{'b' if found.b.file_bytes == small else 'a'} is {large / small:.2f} times smaller on disk")
    _print_place(found)
    made, told = _short_table(found, by)
    if made.rows:
        say(f"\n{told}\n")
        right = tuple(_NAMES.get(c, c) for c in made.columns if c not in ("role", "kind"))
        lines = table(*(_NAMES.get(column, column) for column in made.columns), right=right)
        for row in made.rows[: limit or None]:
            lines.add_row(*(escape(_cell(c, cell)) for c, cell in zip(made.columns, row, strict=True)))
        show_table(lines, spare=_SPARE, more="--csv")
        if limit and len(made.rows) > limit:
            say(f"{len(made.rows) - limit:,} more (--limit 0)")
    _print_rest(found)


def _side(side: Side, name: str) -> tuple[str, ...]:
    where = f"{name} at commit {side.commit}" if side.commit else name
    stored = "" if side.file_bytes is None else f"{size(side.file_bytes)} ({', '.join(side.encodings) or side.format})"
    bound = "exact" if not side.bound else "no bound" if side.bound == float("inf") else f"{side.bound:.4g}"
    return (
        where, f"{side.n_tokens:,}", f"{side.num_layers:,}", f"{side.num_heads} x {side.head_dim}", side.dtype,
        size(side.nbytes), size(side.bytes_per_token), stored, bound,
    )  # fmt: skip


def _print_place(found: Diff) -> None:
    """Print the text around the first id that differs, and what agrees behind it."""
    tokens = found.tokens
    if tokens.text_a is not None or tokens.text_b is not None:
        say(f"  before: {tokens.text_before!r}\n  a goes on: {tokens.text_a!r}\n  b goes on: {tokens.text_b!r}")
    if tokens.runs:
        n = sum(run.count for run in tokens.runs)
        say(f"{count(n, 'token')} behind agree, in {count(len(tokens.runs), 'run')}, and {tokens.n_same_place:,} "
              "stand at the same place")  # fmt: skip


def _print_rest(found: Diff) -> None:
    if found.logits is not None and found.logits.n_different:
        one = found.logits
        kl = "not known" if one.kl_ab is None else f"{one.kl_ab:.4g} nats"
        top = f"both {one.top1_a}" if one.top1_a == one.top1_b else f"{one.top1_a} in a, {one.top1_b} in b"
        say(f"\nlogits: {one.n_different:,} of {one.n_values:,} differ, KL(a || b) {kl}, most probable id {top}")
    if len(found.growth) > 1 or any(g.per_token_a != g.per_token_b or g.nbytes_a != g.nbytes_b for g in found.growth):
        say("\ngrowth\n")
        kinds = table("kind", "layers a", "layers b", "per token a", "per token b", "held a", "held b",
                      right=("layers a", "layers b", "per token a", "per token b", "held a", "held b"))  # fmt: skip
        for g in found.growth:
            kinds.add_row(g.kind, str(g.layers_a), str(g.layers_b), size(g.per_token_a), size(g.per_token_b),
                          size(g.nbytes_a), size(g.nbytes_b))  # fmt: skip
        show_table(kinds)
    _print_others(found)


def _print_others(found: Diff) -> None:
    differing: list[tuple[str, str, str, str]] = [
        (f.name, f.verdict, f.a, f.b) for f in found.identity if f.verdict == "differ"
    ]
    differing += [(o.name, o.verdict, o.a, o.b) for o in found.others if o.verdict not in ("equal", "unknown")]
    if differing:
        say("\nbeside the cache\n")
        for name, verdict, a, b in differing:
            counted = not b and a.endswith("values differ")
            both = f": {a}" if counted else f": {a!r} in a, {b!r} in b"
            told = {"only in a": f": {a!r}", "only in b": f": {b!r}"}.get(verdict, both) if a or b else ""
            say(f"  {name}: {verdict}{told}")
    if found.not_compared:
        say("\nnot compared\n")
        for left_out in found.not_compared[:_SHOWN_FIELDS]:
            say(f"  {left_out.what}: {left_out.why}")
        if len(found.not_compared) > _SHOWN_FIELDS:
            say(f"  and {len(found.not_compared) - _SHOWN_FIELDS} more (--json)")


COMMANDS = (diff,)

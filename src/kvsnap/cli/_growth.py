"""The command that tells how large a cache gets: growth."""

from __future__ import annotations

import csv
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click

import kvsnap
from kvsnap.cli._keys import Keys, key_options
from kvsnap.cli._model import open_engine
from kvsnap.cli._names import library_option, resolved, shown
from kvsnap.cli._output import (
    CheckFailed,
    count,
    csv_row,
    emit,
    examples,
    json_option,
    remark,
    say,
    show_table,
    size,
    table,
    tell,
    waiting,
)
from kvsnap.cli._report import Drawing, page_options
from kvsnap.errors import InputError, MissingError
from kvsnap.inspection import Growth
from kvsnap.inspection.growth.answers import LENGTHS
from kvsnap.protocols import Described

__all__ = ["COMMANDS"]

_TOKENS = re.compile(r"(\d+(?:\.\d+)?)\s*([km]?)", re.IGNORECASE)
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_DIGITS = 24
"""Characters of a length or a size, at most."""
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_PROBE = 40
"""Tokens that a live model evaluates, to be compared with the figures."""


@click.command()
@click.argument("sources", nargs=-1, metavar="[SOURCE]...")
@click.option("--model", "models", multiple=True, metavar="NAME", help="Load this model and look at its live cache.")
@click.option(
    "--at",
    "lengths",
    metavar="N,...",
    help="Lengths in tokens, as 1000 or 128k (k is 1,024).  [default: 1k,8k,32k,128k]",
)
@click.option("--dtype", metavar="NAME", help="Take rows of this dtype; default: the one that the configuration names.")
@click.option("--encoder", "encoder_rows", type=int, metavar="N", help="Length of the encoder's output.")
@click.option("--kinds", is_flag=True, help="Show the layers by what they keep, and the bytes of each kind.")
@click.option("--turns", is_flag=True, help="Show how a session grew, turn by turn.")
@click.option("--budget", metavar="SIZE", help="Tell how many tokens fit into so much memory, as 24GB or 80GiB.")
@click.option(
    "--check", is_flag=True, help="Run the model of a configuration without weights, shapes alone, and compare."
)
@page_options(has_text=False)
@click.option(
    "--csv", "as_csv", is_flag=True, help="Print the lengths of all sources as CSV, or with --turns their turns."
)
@library_option
@key_options()
@json_option
@examples(
    "kvsnap growth story.kvsnap",
    "kvsnap growth Llama-3.1-8B/config.json --at 128k",
    "kvsnap growth llama/ gemma/ deepseek/ --at 1k,32k,128k   # side by side",
    "kvsnap growth gemma/config.json --budget 24GB --kinds --check",
    "kvsnap growth --model smollm2",
    "kvsnap growth @chat --turns",
)
def growth(
    sources: tuple[str, ...], models: tuple[str, ...], lengths: str | None, dtype: str | None,
    encoder_rows: int | None, kinds: bool, turns: bool, budget: str | None, check: bool, as_csv: bool, drawing: Drawing,
    keys: Keys, as_json: bool,
) -> None:  # fmt: skip
    """Tell how large a cache gets: bytes per token, and totals up to a context length.

    SOURCE is a cache file, a model directory or a config.json: then no model is loaded, and neither torch nor
    transformers is needed. A live cache and a snapshot of it hold what is told under "cache"; "session" is a file that
    was handed every row, also those that windows drop. Figures are compared with the tensors of a file, and with a live
    model (--model) or a model without weights (--check); exit code 1 where they differ.
    """
    if not sources and not models:
        raise click.UsageError("Missing a SOURCE, or --model.")
    if as_csv and as_json:
        raise click.UsageError("--csv and --json exclude each other")
    if encoder_rows is not None and encoder_rows < 0:
        raise InputError("--encoder is a length", expected="0 or more", found=encoder_rows)
    drawing.check()
    chosen = LENGTHS if lengths is None else tuple(_tokens(text) for text in lengths.split(","))
    room = None if budget is None else _bytes(budget)
    found = [_of_source(text, chosen, dtype, encoder_rows, keys, check=check) for text in sources]
    found += [_of_model(name, chosen, dtype) for name in models]
    drawing.draw(found)
    if as_json:
        emit({"budget": room, "sources": [_data(one, room) for one in found]})
    elif as_csv:
        (_print_csv_of_turns if turns else _print_csv)(found)
    else:
        _print(found, room, kinds=kinds, turns=turns)
    if any(not one.ok for made in found for one in made.checked):
        raise CheckFailed(1)


def _of_source(
    text: str, lengths: Sequence[int], dtype: str | None, encoder_rows: int | None, keys: Keys, *, check: bool
) -> Growth:
    path = resolved(text, may_be_new=False)
    if not os.path.exists(path):
        raise MissingError(
            "no such cache file, model directory or config.json; a model is loaded by name with --model", path=path
        )
    if path.endswith(".gguf"):
        raise InputError("a GGUF file is no configuration: --model loads it", path=path)
    with waiting(f"running {text} without weights" if check else f"reading {text}"):
        made = kvsnap.growth(
            path, lengths=lengths, dtype=dtype, encoder_rows=encoder_rows, key=keys.of(path), check=check
        )
    return replace(made, source=shown(path))


def _of_model(name: str, lengths: Sequence[int], dtype: str | None) -> Growth:
    """Return the growth of a live model, compared with what it keeps after a few tokens."""
    engine = open_engine(name, dtype, None)
    if not (isinstance(engine, Described) and engine.configuration().get("is_encoder_decoder")):
        length = min(_PROBE, engine.context_limit or _PROBE)
        engine.prefill([number % engine.vocab_size for number in range(length)])
    return replace(kvsnap.growth(engine, lengths=lengths), source=name)


def _tokens(text: str) -> int:
    found = _TOKENS.fullmatch(text.strip())
    if found is None or len(text) > _DIGITS:
        raise InputError("--at takes lengths in tokens", expected="1000, 8k, 1m", found=text[:60])
    return int(float(found[1]) * 1024 ** _POWERS[found[2].lower()])


def _bytes(text: str) -> int:
    found = _BYTES.fullmatch(text.strip())
    if found is None or len(text) > _DIGITS:
        raise InputError("--budget takes a size", expected="24GB, 80GiB, 500MB", found=text[:60])
    return int(float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2].lower()])


# -- as data ---------------------------------------------------------------------------------------------------------


def _data(made: Growth, budget: int | None) -> dict[str, Any]:
    data = made.to_dict()
    data["layers"] = [
        {
            "layers": list(numbers), "kind": layer.kind, "what": layer.what, "shares": layer.shares,
            "tensors": [
                {
                    "role": t.role, "kind": t.kind, "dtype": t.spec.dtype, "axes": list(t.spec.axes),
                    "shape": list(t.spec.shape), "growth": t.spec.growth, "window": t.spec.window,
                    "tokens_per_row": t.spec.tokens_per_row, "row_bytes": t.row_bytes,
                }
                for t in layer.tensors
            ],
        }
        for numbers, layer in made.groups()
    ]  # fmt: skip
    data["num_layers"] = len(made.layers)
    for check, one in zip(data["checked"], made.checked, strict=True):
        check.update(ok=one.ok, off=one.off)
    if budget is not None:
        data["fits"] = {"cache": made.fits(budget), "session": made.fits(budget, kept=True)}
    return data


def _print_csv(found: Sequence[Growth]) -> None:
    codecs = sorted({name for made in found for point in made.points for name in point.stored})
    kinds = list(dict.fromkeys(kind for made in found for kind in made.kinds))
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(
        ["source", "architecture", "dtype", "n_tokens", "cache_bytes", "bytes_per_token", "session_bytes",
         *(f"{kind}_bytes" for kind in kinds), *(f"stored_{name}_bytes" for name in codecs)]
    )  # fmt: skip
    for made in found:
        for point in made.points:
            writer.writerow(
                [*csv_row((made.source, made.architecture, made.dtype)), point.n_tokens, point.cache_bytes,
                 point.bytes_per_token, point.kept_bytes, *(point.by_kind.get(kind, 0) for kind in kinds),
                 *(point.stored.get(name, "") for name in codecs)]
            )  # fmt: skip


def _print_csv_of_turns(found: Sequence[Growth]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["source", "commit", "operation", "n_tokens", "file_bytes"])
    for made in found:
        for turn in made.history:
            writer.writerow([*csv_row((made.source,)), turn.commit, turn.operation, turn.n_tokens, turn.file_bytes])


# -- for people ------------------------------------------------------------------------------------------------------


def _print(found: Sequence[Growth], budget: int | None, *, kinds: bool, turns: bool) -> None:
    if len(found) == 1:
        _print_one(found[0])
    else:
        _print_side_by_side(found)
    if budget is not None:
        _print_budget(found, budget)
    for made in found:
        if kinds:
            _print_kinds(made)
        if turns:
            _print_turns(made)
    for made in found:
        _print_checks(made, named=len(found) > 1)


def _print_one(made: Growth) -> None:
    first = made.at(0)
    words = [made.architecture or "a cache", made.dtype, count(len(made.layers), "layer")]
    if made.context_limit:
        words.append(f"made for {made.context_limit:,} tokens")
    say(f"{made.source}: {', '.join(word for word in words if word)}")
    later = made.at(max((point.n_tokens for point in made.points), default=0)).bytes_per_token
    text = f"{first.bytes_per_token:,.0f} B per token"
    say(text if later == first.bytes_per_token else f"{text} at first, {later:,.0f} B later")
    codecs = sorted({name for point in made.points for name in point.stored})
    heads = ("tokens", "cache", "session", *(f"on disk, {name}" for name in codecs))
    shown_table = table(*heads, right=heads)
    for point in made.points:
        shown_table.add_row(
            f"{point.n_tokens:,}", size(point.cache_bytes), size(point.kept_bytes),
            *(size(point.stored[name]) for name in codecs),
        )  # fmt: skip
    show_table(shown_table)


def _label(made: Growth) -> str:
    path = made.source.rstrip(os.sep)
    folder, _, name = path.rpartition(os.sep)
    return os.path.basename(folder) if name == "config.json" and folder else name or path


def _print_side_by_side(found: Sequence[Growth]) -> None:
    from rich.markup import escape

    lengths = [point.n_tokens for point in found[0].points]
    heads = ("B per token", "later", *(f"{n:,}" for n in lengths))
    shown_table = table("source", "family", "dtype", *heads, right=heads)
    for made in found:
        last = made.at(max(lengths)) if lengths else made.at(0)
        shown_table.add_row(
            escape(_label(made)), escape(made.architecture), made.dtype, f"{made.at(0).bytes_per_token:,.0f}",
            f"{last.bytes_per_token:,.0f}", *(size(point.cache_bytes) for point in made.points),
        )  # fmt: skip
    show_table(shown_table, spare=("dtype", "family", "later"))


def _print_budget(found: Sequence[Growth], budget: int) -> None:
    for made in found:
        live, kept = made.fits(budget), made.fits(budget, kept=True)
        beyond = made.context_limit is not None and (live is None or live > made.context_limit)
        more = f"; the model is made for {made.context_limit:,}" if beyond else ""
        session = "" if live == kept else f" ({_fitting(kept)} in a session that keeps every row)"
        tell(f"{_label(made)}: {size(budget)} holds {_fitting(live)}{session}{more}")


def _fitting(n_tokens: int | None) -> str:
    if n_tokens is None:
        return "any number of tokens"
    return "not even an empty cache" if n_tokens < 0 else count(n_tokens, "token")


def _print_kinds(made: Growth) -> None:
    from rich.markup import escape

    longest = max((point.n_tokens for point in made.points), default=LENGTHS[-1])
    right = ("layers", "B per token", "later", "each", "all")
    shown_table = table(
        "layers", "kind", "keeps", *right[1:], title=f"{escape(_label(made))}, at {longest:,} tokens", right=right
    )
    for numbers, layer in made.groups():
        shown_table.add_row(
            str(len(numbers)), escape(layer.kind), escape(layer.what),
            f"{layer.per_token(0):,.0f}", f"{layer.per_token(longest):,.0f}",
            size(layer.nbytes(longest)), size(len(numbers) * layer.nbytes(longest)),
        )  # fmt: skip
    show_table(shown_table)
    point = made.at(longest)
    say("by kind: " + ", ".join(f"{kind} {size(nbytes)}" for kind, nbytes in point.by_kind.items()))


def _print_turns(made: Growth) -> None:
    if not made.history:
        say(f"{_label(made)} has no turns: it is no session")
        return
    right = ("commit", "tokens", "file", "added", "B per new token")
    shown_table = table("commit", "what", *right[1:], right=right)
    before_bytes = before_tokens = 0
    for turn in made.history:
        added, tokens = turn.file_bytes - before_bytes, turn.n_tokens - before_tokens
        shown_table.add_row(
            str(turn.commit), turn.operation, f"{turn.n_tokens:,}", size(turn.file_bytes), size(added),
            f"{added / tokens:,.0f}" if tokens > 0 else "",
        )  # fmt: skip
        before_bytes, before_tokens = turn.file_bytes, turn.n_tokens
    show_table(shown_table)


def _print_checks(made: Growth, *, named: bool) -> None:
    who = f"{_label(made)}: " if named else ""
    for one in made.checked:
        where = f"{count(one.layers, 'layer')} at {count(one.n_tokens, 'position')}"
        if one.ok:
            tell(f"{who}checked against {one.against}: {where}, {size(one.actual)}, every byte as told")
            continue
        tell(f"{who}NOT as told by {one.against}: {where}, {one.off:+,} B")
        for fault in one.faults[:6]:
            say(f"  {fault}")
        if len(one.faults) > 6:
            say(f"  and {len(one.faults) - 6} more")
    for note in made.notes:
        remark(f"note: {who}{note}")


COMMANDS = (growth,)

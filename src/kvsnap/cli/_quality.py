"""The command quality: what another encoding of a cache costs the model."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Sequence
from dataclasses import replace

import click

import kvsnap
from kvsnap import codecs
from kvsnap.cli._keys import Keys, key_options
from kvsnap.cli._model import adapter_option, choose_model, model_options, open_engine, refusing
from kvsnap.cli._names import count_as_use, library_option, named, shown
from kvsnap.cli._output import (
    CheckFailed,
    count,
    csv_row,
    emit,
    examples,
    json_option,
    progress,
    remark,
    say,
    show_table,
    size,
    table,
    tell,
)
from kvsnap.cli._report import Drawing, page_options
from kvsnap.cli._run import accept_option, prompt_of
from kvsnap.errors import InputError
from kvsnap.inspection.quality.answers import VERDICTS, YARDSTICKS, Effect, Quality
from kvsnap.inspection.quality.judging import ROUNDED, stored_bytes
from kvsnap.results import Table

__all__ = ["COMMANDS"]

_SOURCES = {
    "own": "that the model generates itself",
    "given": "of the text given",
    "last": "of the history itself",
}


@click.command()
@click.argument("file", callback=named)
@click.argument("others", nargs=-1, callback=named)
@click.option(
    "--codec", "codec_names", type=click.Choice([c.name for c in codecs.CODECS.values()]), multiple=True,
    help="Compare with what FILE would be in this codec; repeatable, and no file is written.",
)  # fmt: skip
@click.option(
    "--rounded", type=click.Choice(ROUNDED), multiple=True,
    help="Compare with FILE rounded to a dtype and back: a yardstick of this model; repeatable.",
)  # fmt: skip
@click.option("--text", metavar="TEXT", help="Judge by what the model makes of this text behind the history.")
@click.option("--text-file", metavar="PATH", help="The same, of the text in a file (- for stdin).")
@click.option("--text-ids", metavar="IDS", help='The same, of token ids as "1 2 3".')
@click.option("--last", type=int, metavar="N", help="Judge by the last N tokens of the history, which is cut by them.")
@click.option(
    "--n-tokens", type=int, default=256, show_default=True, metavar="N", help="Places of the text to compare at most."
)
@click.option("--fail-above", type=float, metavar="KL", help="Exit code 1 where a mean KL is above this, in nats.")
@accept_option
@click.option("--csv", "as_csv", is_flag=True, help="Print one CSV record for each encoding.")
@click.option("--places", "as_places", is_flag=True, help="Print one CSV record for each place of the text.")
@page_options()
@model_options
@adapter_option
@library_option
@key_options()
@json_option
@examples(
    "kvsnap quality story.kvsnap --codec q8 --rounded bfloat16",
    "kvsnap quality story.kvsnap small.kvsnap --text-file next-chapter.txt",
    "kvsnap quality story.kvsnap --codec q8 --rounded bfloat16 -o cost.html",
    "kvsnap quality story.kvsnap --codec q8 --last 128 --fail-above 0.003",
)
def quality(
    file: str, others: tuple[str, ...], codec_names: tuple[str, ...], rounded: tuple[str, ...], text: str | None,
    text_file: str | None, text_ids: str | None, last: int | None, n_tokens: int, fail_above: float | None,
    accept: tuple[str, ...], as_csv: bool, as_places: bool, drawing: Drawing, model: str | None, dtype: str | None,
    attention: str | None, keys: Keys, as_json: bool,
) -> None:  # fmt: skip
    """Tell what other encodings of FILE cost the model: KL divergence, agreement, perplexity.

    The model reads a text behind the cache in FILE, and behind each of the others, which hold the same tokens; its
    predictions are compared place by place. Without a text it is one that the model generates itself.
    """
    if as_csv + as_places + as_json > 1:
        raise click.UsageError("--csv, --places and --json exclude each other")
    if not others and not codec_names and not rounded:
        raise click.UsageError("give another file to compare FILE with, or --codec, or --rounded")
    has_text = any(given is not None for given in (text, text_file, text_ids))
    if has_text and last is not None:
        raise click.UsageError("a text and --last exclude each other")
    if fail_above is not None and not fail_above >= 0:
        raise InputError("--fail-above is no KL", expected="0 or more", found=fail_above)
    drawing.check()
    wanted = prompt_of(text, text_file, text_ids, chat=False, needed=True, what="text") if has_text else None
    files = (file, *others)
    snapshots = [kvsnap.load(one, key=keys.of(one)) for one in files]
    for one in files:
        count_as_use(one)
    with refusing(choose_model(model, snapshots[0].metadata)) as chosen:
        engine = open_engine(chosen.name, dtype, attention, snapshots[0].identity)
        with progress("comparing") as report:
            found = kvsnap.quality(
                snapshots[0], snapshots[1:], engine, codec=codec_names, rounded=rounded, continuation=wanted, last=last,
                n_tokens=n_tokens, accept=accept, progress=report,
            )  # fmt: skip
    found = _called(found, files, [stored_bytes(one, key=keys.of(one)) for one in files])
    drawing.draw(found)
    if as_json:
        emit({"path": file, "model": chosen.name, **found.to_dict()})
    elif as_csv or as_places:
        _print_csv(found.places() if as_places else found.tables()[0])
    else:
        _print(found)
    if fail_above is not None and any(_fails(effect, fail_above) for effect in found.others):
        raise CheckFailed(1)


def _called(found: Quality, files: Sequence[str], sizes: Sequence[int | None]) -> Quality:
    """Return the answer with the names and sizes of the files."""
    others = [
        replace(effect, name=shown(file), stored_bytes=nbytes)
        for effect, file, nbytes in zip(found.others, files[1:], sizes[1:], strict=False)
    ]
    rest = found.others[len(others) :]
    return replace(found, reference=shown(files[0]), stored_bytes=sizes[0], others=(*others, *rest))


def _fails(effect: Effect, most: float) -> bool:
    return effect.verdict == "broken" or effect.kl_mean is None or not effect.kl_mean <= most


def _print_csv(found: Table) -> None:
    writer = csv.writer(sys.stdout)  # with another end of line a carriage return in a name would not be quoted
    writer.writerow(found.columns)
    writer.writerows(csv_row("" if cell is None else cell for cell in row) for row in found.rows)


# -- for people ------------------------------------------------------------------------------------------------------


def _print(found: Quality) -> None:
    held = "" if found.stored_bytes is None else f" ({size(found.stored_bytes)})"
    say(
        f"{found.architecture}: {count(found.n, 'place')} {_SOURCES[found.source]}, behind "
        f"{count(found.n_history, 'token')} of {found.reference}{held}; its perplexity {_figure(found.perplexity)}\n"
    )
    numbers = ("size", "KL mean", "+-", "median", "p99", "max", "top-1", "top-5", "perplexity", "change")
    left_out = any(e.n_bad for e in found.others)
    made = table("cache", *numbers, *["left out"] * left_out, "verdict", right=(*numbers, "left out"))
    for e in found.others:
        made.add_row(
            _escaped(e.name), "" if e.stored_bytes is None else size(e.stored_bytes), _nats(e.kl_mean), _nats(e.kl_se),
            _nats(e.kl_median), _nats(e.kl_p99), _nats(e.kl_max), _part(e.top1), _part(e.top5), _figure(e.perplexity),
            "" if e.perplexity_change is None else f"{e.perplexity_change:+.2%}",
            *[str(e.n_bad)] * left_out, e.verdict,
        )  # fmt: skip
    show_table(made, spare=("median", "p99", "top-5", "size", "+-", "max"))
    say()
    known = table("to compare with", "KL mean", "top-1", right=("KL mean", "top-1"))
    for what, kl, top in YARDSTICKS:
        known.add_row(what, kl, top)
    show_table(known)
    say()
    tell(f"mean KL in nats: {_verdicts()} (one text; others of 256 places differed by about 15 %)")
    for effect in found.others:
        if effect.differs_at is not None:
            say(_first_difference(found, effect))
    for note in found.notes:
        remark(f"note: {note}")
    for effect in found.others:
        for note in effect.notes:
            remark(f"note: {effect.name}: {note}")


def _verdicts() -> str:
    *finite, (_, above) = VERDICTS
    return ", ".join(f"up to {most:g} {word}" for most, word in finite) + f", above {above}"


def _first_difference(found: Quality, effect: Effect) -> str:
    place = 0 if effect.differs_at is None else effect.differs_at
    texts = effect.expected_text, effect.found_text
    expected, other = (effect.expected, effect.found) if None in texts else map(repr, texts)
    return (
        f"{effect.name}: first another token behind row {found.n_history + place:,}, place {place + 1:,}: "
        f"{other} in place of {expected}"
    )


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _nats(value: float | None) -> str:
    if value is None or not value:
        return "" if value is None else "0"
    return f"{value:.1e}" if value < 1e-4 else f"{value:.5f}"


def _part(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}" if math.isfinite(value) else str(value)


COMMANDS = (quality,)

"""The command sweep: one snapshot, many settings of the sampler."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import click

import kvsnap
from kvsnap.cli._keys import Keys, key_options
from kvsnap.cli._model import (
    adapter_option,
    choose_model,
    idle_settings,
    model_options,
    open_engine,
    parse_sampler,
    refusing,
)
from kvsnap.cli._names import count_as_use, library_option, named
from kvsnap.cli._output import count, emit, examples, json_option, remark, show_table, table, waiting
from kvsnap.cli._run import accept_option, check_count, max_tokens_option
from kvsnap.errors import InputError
from kvsnap.layout import Sampler
from kvsnap.sweeping import Continuation

__all__ = ["COMMANDS", "print_csv"]

_SETTINGS = tuple(f.name for f in fields(Sampler))


def _settings(texts: Sequence[str]) -> list[Sampler]:
    made = []
    for text in texts:
        given = parse_sampler(text)
        made.append(given)
        said = {item.partition("=")[0].strip().replace("-", "_"): True for item in text.split(",")}
        for warning in idle_settings(said, given):
            remark(f"warning: {text}: {warning.replace('--', '')}")
    return made


@click.command()
@click.argument("file", callback=named)
@click.option(
    "--sampler", "samplers", multiple=True, required=True, metavar="SETTINGS",
    help='As "temperature=0.7,top_p=0.9,seed=1", or "greedy"; once for each continuation.',
)  # fmt: skip
@max_tokens_option
@click.option(
    "--batch", type=int, default=1, show_default=True, metavar="K",
    help="Evaluate K continuations in each pass: faster, and not exact.",
)  # fmt: skip
@accept_option
@click.option("--csv", "as_csv", is_flag=True, help="Print one CSV record for each continuation.")
@model_options
@adapter_option
@library_option
@key_options()
@json_option
@examples(
    'kvsnap sweep story.kvsnap --sampler greedy --sampler "temperature=0.7,seed=1" --sampler "temperature=1.2,seed=1"',
    "kvsnap sweep story.kvsnap --sampler temperature=1 --sampler temperature=1.5 --batch 2 --csv > runs.csv",
)
def sweep(
    file: str, samplers: Sequence[str], max_tokens: int, batch: int, accept: tuple[str, ...], as_csv: bool,
    model: str | None, dtype: str | None, attention: str | None, keys: Keys, as_json: bool,
) -> None:  # fmt: skip
    """Continue FILE under several sampler settings; its history is evaluated for none of them.

    Each gives what it would give alone, bit for bit; with --batch it need not.
    """
    if as_csv and as_json:
        raise click.UsageError("--csv and --json exclude each other")
    settings = _settings(samplers)
    check_count(max_tokens)
    if batch < 1:
        raise InputError("--batch is too small", expected="1 or more", found=batch)
    snapshot = kvsnap.load(file, key=keys.of(file))
    count_as_use(file)
    chosen = choose_model(model, snapshot.metadata)
    with refusing(chosen):
        engine = open_engine(chosen.name, dtype, attention, snapshot.identity)
        with waiting(f"continuing {count(len(settings), 'time')}"):
            found = kvsnap.sweep(snapshot, engine, settings, max_tokens=max_tokens, accept=accept, batch=batch)
    if as_json:
        rows = [_data(text, c) for text, c in zip(samplers, found, strict=True)]
        emit({"path": file, "history": len(snapshot.tokens), "continuations": rows})
    elif as_csv:
        print_csv(samplers, found)
    else:
        _print_table(samplers, found)
        remark(f"from {count(len(snapshot.tokens), 'token')} that were not evaluated again")
        if not all(c.exact for c in found):
            remark("not exact: several were evaluated in one pass, so ids can differ from those of each alone")


def _data(text: str, run: Continuation) -> dict[str, Any]:
    return {
        "sampler": text,
        "settings": {name: getattr(run.sampler, name) for name in _SETTINGS},
        "tokens": list(run.tokens),
        "text": run.text,
        "logprobs": list(run.logprobs),
        "sum_logprob": sum(run.logprobs),
        "mean_logprob": sum(run.logprobs) / len(run.logprobs),
        "forwards": run.forwards,
        "stop": run.stop,
        "rows": run.rows,
        "exact": run.exact,
    }


def print_csv(samplers: Sequence[str], found: Sequence[Continuation]) -> None:
    """Print one record for each continuation, with a header."""
    writer = csv.writer(sys.stdout)  # with another end of line a carriage return in a text would not be quoted
    numbers = ("sum_logprob", "mean_logprob")
    words = ("forwards", "stop", "rows", "exact", "text")
    writer.writerow(("sampler", *_SETTINGS, "n_tokens", *numbers, *words))
    for text, run in zip(samplers, found, strict=True):
        data = _data(text, run)
        settings = ("" if value is None else value for value in data["settings"].values())
        writer.writerow((text, *settings, len(run.tokens), *(f"{data[n]:.4f}" for n in numbers),
                         *(data[word] for word in words)))  # fmt: skip


def _print_table(samplers: Sequence[str], found: Sequence[Continuation]) -> None:
    from rich.markup import escape

    numbers = ("tokens", "mean logprob", "forwards")
    made = table("sampler", *numbers, "stop", "text", right=numbers)
    for text, run in zip(samplers, found, strict=True):
        mean = sum(run.logprobs) / len(run.logprobs)
        seed = "" if run.sampler.seed is None or "seed" in text else f" (seed {run.sampler.seed})"
        made.add_row(escape(text + seed), str(len(run.tokens)), f"{mean:.3f}", str(run.forwards), run.stop,
                     escape(run.text))  # fmt: skip
    show_table(made)


COMMANDS = (sweep,)

"""The command that takes tokens out of the middle of a snapshot: edit."""

from __future__ import annotations

import re

import click

import kvsnap
from kvsnap import editing
from kvsnap.cli._keys import Keys, key_options
from kvsnap.cli._model import choose_model, model_options, open_engine, refusing
from kvsnap.cli._names import library_option, named, no_name
from kvsnap.cli._output import count, emit, examples, json_option, remark, size
from kvsnap.cli._paths import check_target
from kvsnap.errors import InputError
from kvsnap.layout import Snapshot

__all__ = ["COMMANDS"]


def _span(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,10}):([0-9]{1,10})", text)
    if found is None:
        raise InputError("--remove takes START:STOP, numbers of tokens from 0; STOP stays", expected="2:4", found=text)
    return int(found[1]), int(found[2])


@click.command()
@click.argument("file", callback=named)
@click.option(
    "--remove", "spans", multiple=True, required=True, metavar="START:STOP",
    help="Tokens to take out, START first, STOP not; repeatable, in order.",
)  # fmt: skip
@click.option("-o", "--output", metavar="OUT", required=True, callback=no_name, help="Name of the edited snapshot.")
@click.option("--keep-positions", is_flag=True, help="Leave a gap in the positions; no model is needed then.")
@click.option("--overwrite", is_flag=True, help="Replace OUT when it is there already.")
@click.option("--accept", multiple=True, metavar="FIELD", help="Take on a difference between FILE and the model.")
@model_options
@library_option
@key_options(writes=True)
@json_option
@examples(
    "kvsnap edit chat.kvsnap --remove 2:4 --remove 6:7 -o shorter.kvsnap",
    "kvsnap edit chat.kvsnap --remove 100:900 -o shorter.kvsnap --keep-positions",
)
def edit(
    file: str, spans: tuple[str, ...], output: str, keep_positions: bool, overwrite: bool, accept: tuple[str, ...],
    model: str | None, dtype: str | None, attention: str | None, keys: Keys, as_json: bool,
) -> None:  # fmt: skip
    """Take tokens out of the middle of FILE without evaluating the others again: an approximation.

    All numbers are those of FILE as it is. Rows behind a removed token were computed while it was there, so what goes
    on from OUT is near to what a history without those tokens would give, and never called exact. The rows close up,
    for which the model is asked how it rotates keys. A cut of the end is exact, and needs no model.
    """
    wanted = [_span(text) for text in spans]
    check_target(output, overwrite=overwrite, option="-o")
    keys.check(target=output, option="-o", source=file)
    snapshot = kvsnap.load(file, key=keys.of(file))
    if keep_positions:
        edited = kvsnap.remove(snapshot, wanted, positions="keep")
    elif model is None and not editing.needs_rope(snapshot, wanted):
        edited = kvsnap.remove(snapshot, wanted)
    else:
        edited = _closed(snapshot, wanted, model, dtype, attention, accept)
    report = kvsnap.save(edited, output, **keys.saving())
    for loss in report.losses:
        remark(f"lost: {loss.what}: {loss.detail}")
    exact = not edited.bound
    if as_json:
        emit({"n_tokens": len(edited.tokens), "n_tokens_before": len(snapshot.tokens), "n_rows": edited.n_rows,
              "positions": [[run.start, run.count] for run in edited.positions], "token_offset": edited.token_offset,
              "exact": exact, "path": output, "nbytes": report.nbytes})  # fmt: skip
        return
    verdict = "exact" if exact else "an approximation: rows behind what was removed had seen it"
    print(
        f"{output}: {count(len(edited.tokens), 'token')} of {len(snapshot.tokens):,}, {size(report.nbytes)}; {verdict}"
    )


def _closed(
    snapshot: Snapshot, spans: list[tuple[int, int]], model: str | None, dtype: str | None, attention: str | None,
    accept: tuple[str, ...],
) -> Snapshot:  # fmt: skip
    with refusing(choose_model(model, snapshot.metadata)) as chosen:
        engine = open_engine(chosen.name, dtype, attention, snapshot.identity)
        return kvsnap.remove(snapshot, spans, engine=engine, accept=accept)


COMMANDS = (edit,)

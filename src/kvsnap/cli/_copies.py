"""Commands that write a session anew: fork, compact."""

from __future__ import annotations

from contextlib import closing

import click

from kvsnap.cli._names import Named, library_option, named, named_or_new, opened_session, shown
from kvsnap.cli._output import count, emit, examples, json_option, progress, remark, size
from kvsnap.cli._paths import check_new
from kvsnap.formats.native.copy import copy_session
from kvsnap.formats.native.read import NativeFile
from kvsnap.formats.native.vault import refuse_encrypted
from kvsnap.library import Library

__all__ = ["COMMANDS"]


@click.command()
@click.argument("file", callback=named)
@click.argument("new", callback=named_or_new)
@click.option("--at", "n_tokens", metavar="N", type=click.IntRange(min=0), help="Keep the first N tokens only.")
@click.option("--commit", metavar="K", type=click.IntRange(min=1), help="Start from commit K (see `kvsnap log`).")
@click.option("--nearest", is_flag=True, help="Keep fewer than N where a layer cannot be cut there.")
@click.option(
    "--allow-loss", is_flag=True, help="Go on although a session cannot hold all of FILE, which is of another format."
)
@library_option
@json_option
@examples(
    "kvsnap fork chat.kvsnap idea.kvsnap",
    "kvsnap fork chat.kvsnap before.kvsnap --at 1200",
    "kvsnap fork chat.kvsnap undone.kvsnap --commit 7    # also what was cut off since",
    "kvsnap fork @chat @idea                             # in the library: nothing is copied",
    "kvsnap fork chat.kvsnap @chat                       # a copy of a file, into the library",
)
def fork(
    file: str, new: str, n_tokens: int | None, commit: int | None, nearest: bool, allow_loss: bool, as_json: bool
) -> None:
    """Make a second session that starts with the history of FILE and then goes its own way.

    Between files the history is copied, part by part as it is stored, each byte checked. From @NAME to @NAME nothing is
    copied: the new session starts in the file of the other. A FILE of another format goes into the library whole: what
    a session has no place for is listed, and without --allow-loss nothing is made then (exit code 13).
    """
    if isinstance(new, Named):
        _into_library(file, new, n_tokens, commit, nearest=nearest, allow_loss=allow_loss, as_json=as_json)
        return
    check_new(new)
    refuse_encrypted(file)
    with closing(NativeFile.open(file, mapped=False)) as opened, progress("copying") as report:
        made = copy_session(opened, new, n_tokens=n_tokens, commit=commit, nearest=nearest, progress=report)
    for note in made.notes:
        remark(f"note: {note}")
    if as_json:
        emit(made.to_dict())
    else:
        print(f"{new}: {count(made.n_tokens, 'token')} in {count(made.n_turns, 'turn')}, {size(made.nbytes)} written")


def _into_library(
    file: str,
    new: Named,
    n_tokens: int | None,
    commit: int | None,
    *,
    nearest: bool,
    allow_loss: bool,
    as_json: bool,
) -> None:
    with Library(new.library) as library:
        if isinstance(file, Named):
            made = library.fork(file.name, new.name, n_tokens=n_tokens, commit=commit, nearest=nearest)
        elif n_tokens is not None or commit is not None:
            raise click.UsageError("a file goes into the library as a whole: fork it to @NAME, then @NAME with --at")
        else:
            with progress("copying") as report:
                made = library.add(file, new.name, allow_loss=allow_loss, progress=report)
    if as_json:
        emit(made.to_dict())
    else:
        print(f"@{made.name}: {count(made.n_tokens, 'token')}, {size(made.own_bytes)} written")


@click.command()
@click.argument("file", callback=named)
@click.option(
    "--states",
    metavar="N",
    type=click.IntRange(min=1),
    help="Keep recurrent states, logits and random state at the end of the last N turns only.",
)
@library_option
@json_option
@examples(
    "kvsnap compact chat.kvsnap",
    "kvsnap compact hybrid.kvsnap --states 4    # it can then go back by 3 turns, not further",
)
def compact(file: str, states: int | None, as_json: bool) -> None:
    """Write a session anew without what its history no longer needs.

    What was cut off by truncate or reset is gone afterwards, with its text and tokens; parts that stay are copied as
    they are stored, each byte checked. The new file takes the name of the old one when it is whole and on disk.
    """
    with opened_session(file, create=False) as session, progress("compacting") as report:
        made = session.compact(states=states, progress=report)
    for note in made.notes:
        remark(f"note: {note}")
    if as_json:
        emit(made.to_dict())
        return
    print(f"{shown(file)}: {size(made.nbytes_before)} -> {size(made.nbytes)}, {count(made.n_turns, 'turn')}")


COMMANDS = (fork, compact)

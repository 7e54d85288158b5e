"""Commands on sessions, none of which needs a model: log, truncate, reset, rewind."""

from __future__ import annotations

import re
import time
from contextlib import closing

import click

import kvsnap
from kvsnap.cli._keys import Keys, key_options
from kvsnap.cli._library import show_tree
from kvsnap.cli._names import Named, library_option, named, no_name, opened_session, shown
from kvsnap.cli._output import count, emit, examples, json_option, remark, show_table, size, table
from kvsnap.cli._paths import check_target, is_sealed
from kvsnap.cli._turn import STOPS, is_whole
from kvsnap.errors import InputError
from kvsnap.formats.native.read import NativeFile
from kvsnap.formats.native.told import stop_of
from kvsnap.formats.native.turns import walk
from kvsnap.session import Session

__all__ = ["COMMANDS"]

# -- log -----------------------------------------------------------------------------------------------------


@click.command()
@click.argument("file", required=False, callback=named)
@click.option("--tree", is_flag=True, help="Show the forks of the library, or of the session @NAME, as a tree.")
@library_option
@json_option
@examples(
    "kvsnap log chat.kvsnap",
    "kvsnap log @chat",
    "kvsnap log --tree                   # which session of the library starts in which",
)
def log(file: str | None, tree: bool, as_json: bool) -> None:
    """List the turns of a session, oldest first: what each did, and whether it was complete or cut off, and why.

    A turn is complete when the model ended it; one that --max-tokens, a full context or Ctrl-C ended is cut off.
    """
    if tree:
        if file is not None and not isinstance(file, Named):
            raise click.UsageError("--tree shows the library: give no FILE, or @NAME")
        show_tree(None if file is None else file.name, as_json=as_json)
        return
    if file is None:
        raise click.UsageError("Missing argument 'FILE'.")
    with Session.open(file, create=False, readonly=True) as session:
        turns, notes, dropped = session.history, list(session.notes), session.dropped
    stops = _stops(file)
    if as_json:
        told = [{**t.to_dict(), "stop": stops.get(t.commit)} for t in turns]
        emit({"path": file, "turns": told, "notes": notes, "dropped": dropped})
        return
    made = table("commit", "when", "what", "turn", "why", "tokens", "change", "commit at",
                 right=("tokens", "change", "commit at"))  # fmt: skip
    before = 0
    for turn in turns:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(turn.time_ns / 1e9))
        stop = stops.get(turn.commit, "")
        state = "complete" if turn.complete and is_whole(stop) else "[bold]cut off[/bold]"
        why, what, change = STOPS.get(stop, ""), turn.operation, f"{turn.n_tokens - before:+,}"
        if turn.commit == 1 and turn.operation == "reset":  # the commit of an empty session: there was nothing before
            what, state, change = "created", "", ""
        made.add_row(str(turn.commit), when, what, state, why, f"{turn.n_tokens:,}", change, size(turn.offset))
        before = turn.n_tokens
    show_table(made)
    for note in notes:
        remark(f"note: {note}")
    if dropped:
        remark(f"note: {size(dropped)} behind the last published turn are not part of the history")


def _stops(file: str) -> dict[int, str]:
    """Return why the generation of each turn stopped, by commit, where the notes of the file say so."""
    with closing(NativeFile.open(file, mapped=False)) as opened:
        commits = walk(opened.commit, opened.end.footer.commit_offset, opened.header, opened.reader)
        return {commit.number: stop for commit, _ in commits if (stop := stop_of(opened, commit))}


# -- truncate, reset -----------------------------------------------------------------------------------------


class _Counting(click.Command):
    """A command whose number may be typed as below 0, which click takes for an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse a number below 0 by name."""
        for word in args[: args.index("--") if "--" in args else len(args)]:
            if re.fullmatch(r"-[0-9]+", word):
                raise InputError("N is the number of tokens to keep", expected="0 or more", found=word)
        return super().parse_args(ctx, args)


@click.command(cls=_Counting)
@click.argument("file", callback=named)
@click.argument("n_tokens", metavar="N", type=int)
@click.option(
    "-o", "--output", metavar="NEW", callback=no_name, help="Write a sealed snapshot of the first N tokens instead."
)
@click.option("--nearest", is_flag=True, help="Keep fewer than N where a layer cannot be cut there.")
@click.option("--overwrite", is_flag=True, help="Let -o replace a snapshot that is there already.")
@library_option
@key_options(writes=True)
@json_option
@examples(
    "kvsnap truncate chat.kvsnap 1200",
    "kvsnap truncate hybrid.kvsnap 1200 --nearest    # at most 1200: where its layers can be cut",
    "kvsnap truncate sealed.kvsnap 1200 -o shorter.kvsnap",
)
def truncate(
    file: str, n_tokens: int, output: str | None, nearest: bool, overwrite: bool, keys: Keys, as_json: bool
) -> None:
    """Go back to the first N tokens of a session.

    The cut is one more commit: the turns behind it stay in the file and in `kvsnap log`, and `kvsnap rewind` or
    `kvsnap fork --commit` reaches them again, until the file is compacted. At the end of an earlier turn its logits and
    random state come back too. A sealed snapshot is never changed: with -o its first N tokens are written as a new one
    (of a session, too, which then stays as it is).
    """
    if n_tokens < 0:
        raise InputError("N is the number of tokens to keep", expected="0 or more", found=n_tokens)
    keys.check(target=output, option="-o", source=file)
    if output is not None:
        check_target(output, overwrite=overwrite, option="-o")
        snapshot = kvsnap.load(file, key=keys.of(file))
        before = len(snapshot.tokens)
        left = _nearest(snapshot, n_tokens) if nearest else n_tokens
        report = kvsnap.save(snapshot.truncate(left), output, **keys.saving())
        for loss in report.losses:
            remark(f"lost: {loss.what}: {loss.detail}")
        _say_cut(output, before, left, report.nbytes, as_json=as_json)
        return
    _refuse_sealed(file, f"write its first tokens with: kvsnap truncate {file} {n_tokens} -o NEW")
    keys.refuse(file)
    with opened_session(file, create=False) as session:
        before, length = session.n_tokens, session.nbytes
        left = session.truncate(_nearest(session, n_tokens) if nearest else n_tokens)
        _say_cut(file, before, left, session.nbytes - length, as_json=as_json)


@click.command()
@click.argument("file", callback=named)
@library_option
@json_option
@examples(
    "kvsnap reset chat.kvsnap",
)
def reset(file: str, as_json: bool) -> None:
    """Go back to the empty history of a session.

    The turns before stay in the file and in `kvsnap log`, and `kvsnap rewind` reaches them again, until the file is
    compacted.
    """
    _refuse_sealed(file, "delete the file instead")
    with opened_session(file, create=False) as session:
        before, length = session.n_tokens, session.nbytes
        session.reset()
        _say_cut(file, before, 0, session.nbytes - length, as_json=as_json)


@click.command()
@click.argument("file", callback=named)
@click.argument("commit", metavar="COMMIT", type=click.IntRange(min=1))
@library_option
@json_option
@examples(
    "kvsnap log chat.kvsnap             # which commits there are",
    "kvsnap rewind chat.kvsnap 7        # the state after commit 7 is the current one",
)
def rewind(file: str, commit: int, as_json: bool) -> None:
    """Go to the state after an earlier commit: undoes a truncate, a reset or a turn.

    It is one more commit: the others stay in the file, and you can go back to them in the same way.
    """
    _refuse_sealed(file, "it has one commit only")
    with opened_session(file, create=False) as session:
        before, length = session.n_tokens, session.nbytes
        left = session.rewind(commit)
        _say_cut(file, before, left, session.nbytes - length, as_json=as_json)


def _refuse_sealed(file: str, hint: str) -> None:
    if is_sealed(file):
        raise InputError(f"a sealed snapshot is never changed; {hint}", path=file)


def _nearest(source: kvsnap.Session | kvsnap.Snapshot, n_tokens: int) -> int:
    """Return the nearest length at or below `n_tokens` that can be reached; a remark says why it is another one."""
    reach = source.reach(n_tokens)
    if not reach.reached:
        above = "" if reach.above is None else f", and above it {reach.above}"
        remark(f"{n_tokens} cannot be reached, {reach.n_tokens} is the nearest below{above}: {'; '.join(reach.limits)}")
    return reach.n_tokens


def _say_cut(file: str, before: int, after: int, written: int, *, as_json: bool) -> None:
    if as_json:
        emit({"path": str(file), "n_tokens_before": before, "n_tokens": after, "written": written})
    else:
        print(f"{shown(file)}: {before:,} -> {count(after, 'token')}, {size(written)} written")


COMMANDS = (log, truncate, reset, rewind)

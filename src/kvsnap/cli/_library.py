"""Commands on a library of sessions, none of which needs a model: rm, rename, pin, prune, collect, doctor."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

import click

import kvsnap
from kvsnap.cli._keys import Keys, key_options
from kvsnap.cli._names import library_option, library_path, named, open_existing
from kvsnap.cli._output import (
    CheckFailed,
    count,
    emit,
    examples,
    json_option,
    progress,
    remark,
    size,
)
from kvsnap.errors import InputError, MissingError
from kvsnap.library import Branch, Evicted, Library
from kvsnap.library.names import check_name

__all__ = ["COMMANDS", "show_tree"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30,
          "ti": 2**40}  # fmt: skip


def _n_bytes(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    """Return the number in a size as 20GB, 500 MB, 1.5GiB, 1000000; a callback for click. Raise `InputError`."""
    if value is None:
        return None
    found = re.fullmatch(r"([0-9]+)(\.[0-9]+)?\s*([kmgt]i?)?b?", value.strip().lower())
    if found is None or len(found[1]) > 18:
        raise InputError("not a size", expected="a number of bytes, as 20GB, 1.5GiB or 1000000", found=value)
    unit = _UNITS[found[3] or ""]
    return int(found[1]) * unit + int(float(found[2] or 0) * unit)


def _plain(name: str) -> str:
    """Return a name that may be typed with or without @."""
    return name.removeprefix("@")


def _when(time_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(time_ns / 1e9)) if time_ns else ""


# -- looking -----------------------------------------------------------------------------------------------------------


def show_tree(name: str | None, *, as_json: bool) -> None:
    """Print the forks of the library as a tree; of one session only the tree that it stands in."""
    with open_existing() as library:
        roots = library.tree()
        if name is not None:
            library.session_path(name)
            roots = tuple(root for root in roots if _holds(root, name))
    if as_json:
        emit({"path": library.path, "tree": [root.to_dict() for root in roots]})
        return
    for root in roots:
        for depth, last, branch in _walk(root):
            lead = "".join("    " if ended else "|   " for ended in last[:-1]) + ("`-- " if last[-1] else "|-- ")
            names = ", ".join(branch.names) or "(no name)"
            state = "" if branch.state == "ok" else f", {branch.state}"
            told = f"{names}  {count(branch.n_tokens, 'token')}, {size(branch.own_bytes)}{state}"
            print(told if not depth else f"{lead}{told}")


def _holds(branch: Branch, name: str) -> bool:
    return any(name in b.names for _, _, b in _walk(branch))


def _walk(root: Branch) -> Iterable[tuple[int, tuple[bool, ...], Branch]]:
    stack: list[tuple[tuple[bool, ...], Branch]] = [((), root)]
    while stack:
        last, branch = stack.pop()
        yield len(last), last or (True,), branch
        n = len(branch.forks)
        stack += [((*last, i == n - 1), fork) for i, fork in reversed(list(enumerate(branch.forks)))]


@click.command()
@library_option
@click.option("--deep", is_flag=True, help="Check every byte of every session, too.")
@json_option
@examples(
    "kvsnap doctor",
    "kvsnap doctor --deep       # as `kvsnap verify` for the whole library",
)
def doctor(deep: bool, as_json: bool) -> None:
    """Look the library over: names without a file, files without a name, damage, permissions, size, what is not ours.

    Index and tables of each file are read; with --deep every byte. Changes nothing; says of each finding what to do.
    Exit code 0 when there is no problem, else 1.
    """
    with open_existing() as library, progress("checking every byte") as report:
        found = library.check(deep=deep, progress=report)
    if as_json:
        emit(found.to_dict())
    else:
        for finding in found.findings:
            print(f"{'problem' if finding.is_problem else 'note'}: {finding}")
        limit = "no limit" if found.max_bytes is None else f"limit {size(found.max_bytes)}"
        print(f"{found.path}: {'well' if found.ok else 'NOT WELL'}, {count(found.n_names, 'name')}, "
              f"{count(found.n_files, 'file')}, {size(found.nbytes)}, {limit}")  # fmt: skip
    if not found.ok:
        raise CheckFailed(1)


# -- changing ----------------------------------------------------------------------------------------------------------


def _open() -> Library:
    open_existing().close()  # a mistyped directory is not made
    return Library(library_path())


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@library_option
@json_option
@examples(
    "kvsnap rm draft @old",
)
def rm(names: tuple[str, ...], as_json: bool) -> None:
    """Remove sessions from the library. One that is being written is refused (exit code 9).

    The file goes with its last name, unless a fork needs it: then it goes with the last of those.
    """
    removed: list[Evicted] = []
    with _open() as library:
        for name in map(_plain, names):
            check_name(name)
            if name not in library:
                raise MissingError(f"there is no session {name!r}, and nothing was removed", path=library.path)
        for name in map(_plain, names):
            done = library.remove(name)
            removed += done
            if not as_json:
                freed = sum(e.nbytes for e in done)
                print(
                    f"{name}: removed, {size(freed)} freed"
                    if done
                    else f"{name}: removed, its file stays (still needed, or damaged)"
                )
    if as_json:
        emit({"removed": [_plain(n) for n in names], "files": [e.to_dict() for e in removed]})


@click.command()
@click.argument("name")
@click.argument("new")
@library_option
@json_option
@examples(
    "kvsnap rename draft final",
)
def rename(name: str, new: str, as_json: bool) -> None:
    """Give a session of the library another name."""
    with _open() as library:
        library.rename(_plain(name), _plain(new))
    if as_json:
        emit({"name": _plain(new), "was": _plain(name)})
    else:
        print(f"{_plain(name)} -> {_plain(new)}")


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@library_option
@json_option
@examples(
    "kvsnap pin system-prompt",
)
def pin(names: tuple[str, ...], as_json: bool) -> None:
    """Let no prune and no limit remove these sessions, nor what they need."""
    _set_pins(names, pinned=True, as_json=as_json)


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@library_option
@json_option
@examples(
    "kvsnap unpin system-prompt",
)
def unpin(names: tuple[str, ...], as_json: bool) -> None:
    """Let a prune remove these sessions again."""
    _set_pins(names, pinned=False, as_json=as_json)


def _set_pins(names: tuple[str, ...], *, pinned: bool, as_json: bool) -> None:
    with _open() as library:
        for name in map(_plain, names):
            (library.pin if pinned else library.unpin)(name)
            if not as_json:
                print(f"{name}: {'pinned' if pinned else 'not pinned'}")
    if as_json:
        emit({"names": [_plain(n) for n in names], "pinned": pinned})


@click.command()
@click.option(
    "--max-bytes", metavar="SIZE", callback=_n_bytes,
    help="How much the sessions may take, as 20GB; default: the stored limit.",
)  # fmt: skip
@click.option("--remember", is_flag=True, help="Store this limit: it holds for everyone who opens the library.")
@click.option("--like", metavar="FILE", callback=named, help="Sessions of another model than that of FILE go first.")
@key_options()
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@library_option
@json_option
@examples(
    "kvsnap prune --max-bytes 20GB --dry-run",
    "kvsnap prune --max-bytes 20GB --remember",
)
def prune(
    max_bytes: int | None, remember: bool, like: str | None, dry_run: bool, keys: Keys, as_json: bool
) -> None:  # fmt: skip
    """Make room: remove the sessions used least recently until the rest takes at most --max-bytes.

    Pinned sessions stay, and those that are being written, and what a fork needs. Damaged files are set apart in
    quarantine/ and never deleted. Files that are not ours are counted and left alone.
    """
    if remember and (dry_run or max_bytes is None):
        raise click.UsageError("--remember needs --max-bytes, and no --dry-run")
    identity = None if like is None else kvsnap.inspect(like, key=keys.of(like)).identity
    with open_existing() if dry_run else _open() as library:
        report = library.prune(max_bytes, identity=identity, dry_run=dry_run)
        if remember:
            library.set_limit(max_bytes)
    if as_json:
        emit({"path": library.path, **report.to_dict()})
        return
    would = "would be " if dry_run else ""
    for e in report.set_apart:
        print(f"{_of(e)}: {would}set apart, {size(e.nbytes)} ({e.why})")
    for e in report.evicted:
        print(f"{_of(e)}: {would}removed, {size(e.nbytes)} ({e.why})")
    print(f"{size(report.before)} -> {size(report.after)}, limit {size(report.max_bytes)}"
          + (f", {size(report.over)} over: pinned or in use" if report.over else ""))  # fmt: skip
    _tell_held(report.held_by, "files that it may mean or need are kept")
    if report.foreign:
        remark(
            f"note: {count(report.foreign, 'file')} that are not ours ({size(report.foreign_bytes)}) were left alone"
        )


def _tell_held(held_by: Iterable[str], so: str) -> None:
    for what in held_by:
        remark(f"note: {what} cannot be read: {so} (see kvsnap doctor)")


def _of(e: Evicted) -> str:
    return ", ".join(e.names) or e.file_id


@click.command()
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@library_option
@json_option
@examples(
    "kvsnap collect",
)
def collect(dry_run: bool, as_json: bool) -> None:
    """Remove files that no name reaches, neither itself nor through a fork."""
    with open_existing() if dry_run else _open() as library:
        report = library.collect(dry_run=dry_run)
    if as_json:
        emit({"path": library.path, **report.to_dict()})
        return
    for e in report.removed:
        print(f"{e.file_id}: {'would be ' if dry_run else ''}removed, {size(e.nbytes)}")
    _tell_held(report.held_by, "nothing is removed, since it may mean or need what no name reaches")
    print(f"{count(len(report.removed), 'file')}, {size(report.nbytes)}")


COMMANDS = (rm, rename, pin, unpin, prune, collect, doctor)

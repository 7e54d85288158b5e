"""Commands for tensor-parallel shards: split, join."""

from __future__ import annotations

import os

import click

import kvsnap
from kvsnap.cli._keys import Keys, key_options
from kvsnap.cli._names import Named, library_option, named, no_name
from kvsnap.cli._output import count, emit, examples, json_option, remark, size
from kvsnap.cli._paths import check_target
from kvsnap.errors import InputError
from kvsnap.formats.foreign import foreign_losses

__all__ = ["COMMANDS"]


def _target(file: str, directory: str | None, index: int, n: int) -> str:
    """Return the name of one shard: that of the file, with its place before the ending."""
    folder, name = ("", file.name) if isinstance(file, Named) else os.path.split(file)
    stem, ending = os.path.splitext(name)
    ending = ending if ending == ".kvsnap" else ""
    return os.path.join(folder if directory is None else directory, f"{stem}.shard-{index}-of-{n}{ending or '.kvsnap'}")


@click.command()
@click.argument("file", callback=named)
@click.option("-n", "--ranks", metavar="N", type=click.IntRange(min=2), required=True, help="Number of shards.")
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    callback=no_name,
    help="An existing directory for the shards.  [default: that of FILE]",
)
@click.option("--overwrite", is_flag=True, help="Replace shards that are there already.")
@library_option
@key_options(writes=True)
@json_option
@examples(
    "kvsnap split story.kvsnap -n 2       # story.shard-0-of-2.kvsnap, story.shard-1-of-2.kvsnap",
    "kvsnap split story.kvsnap -n 4 -o ranks/",
)
def split(file: str, ranks: int, output: str | None, overwrite: bool, keys: Keys, as_json: bool) -> None:
    """Divide what FILE holds by heads into one snapshot for each tensor-parallel rank.

    What has no heads (latent rows, an index), ids, logits and sampler are in each. Every shard keeps which one it is
    and digests of all of them, so that no shard is taken for a whole, or for one of another file.
    """
    if output is not None and not output:
        raise InputError("-o needs a directory", found="an empty one")
    targets = [_target(file, output, i, ranks) for i in range(ranks)]
    for target in targets:
        check_target(target, overwrite=overwrite, option="-o")
    keys.check(target=targets[0], option="-n", source=file)
    snapshot = kvsnap.load(file, key=keys.of(file))
    losses = foreign_losses(snapshot, "native")
    shards = kvsnap.split(snapshot, ranks)
    written = [kvsnap.save(s, t, **keys.saving()) for s, t in zip(shards, targets, strict=True)]
    for loss in losses:
        remark(f"lost: {loss.what}: {loss.detail}")
    if as_json:
        made = zip(range(ranks), targets, written, strict=True)
        emit({"n_tokens": len(snapshot.tokens), "count": ranks, "losses": [loss.to_dict() for loss in losses],
              "shards": [{"index": i, "path": path, "nbytes": report.nbytes} for i, path, report in made]})  # fmt: skip
        return
    for target, report in zip(targets, written, strict=True):
        print(f"{target}: {size(report.nbytes)}")


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", callback=named)
@click.option("-o", "--output", metavar="OUT", required=True, callback=no_name, help="Name of the whole snapshot.")
@click.option("--overwrite", is_flag=True, help="Replace OUT when it is there already.")
@library_option
@key_options(writes=True)
@json_option
@examples(
    "kvsnap join story.shard-0-of-2.kvsnap story.shard-1-of-2.kvsnap -o story.kvsnap",
)
def join(files: tuple[str, ...], output: str, overwrite: bool, keys: Keys, as_json: bool) -> None:
    """Put all shards of one snapshot together again. FILE... are in the order of the ranks.

    Nothing is written unless each shard is at its place, all are of the very same snapshot, and every byte is the one
    that was split.
    """
    check_target(output, overwrite=overwrite, option="-o")
    keys.check(target=output, option="-o", source=files[0])
    whole = kvsnap.join([kvsnap.load(file, key=keys.of(file)) for file in files])
    report = kvsnap.save(whole, output, **keys.saving())
    if as_json:
        emit(report.to_dict())
        return
    print(f"{output}: {count(len(whole.tokens), 'token')} of {count(len(files), 'shard')}, {size(report.nbytes)}")


COMMANDS = (split, join)

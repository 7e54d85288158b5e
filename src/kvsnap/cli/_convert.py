"""The command that turns one file into another: convert."""

from __future__ import annotations

import os

import click

import kvsnap
from kvsnap.cli._keys import Keys, key_options
from kvsnap.cli._names import library_option, named, no_name
from kvsnap.cli._output import emit, examples, json_option, progress, remark, size
from kvsnap.cli._paths import check_target
from kvsnap.formats import NAMES

__all__ = ["COMMANDS"]

_ENDINGS = {".mlxkv": "mlxkv", ".coli_kv": "colikv", ".safetensors": "safetensors"}
"""What a name says of the format that is wanted, where no option says it."""


@click.command()
@click.argument("source", callback=named)
@click.argument("target", callback=no_name)
@click.option(
    "--format", "format_", metavar="NAME",
    help=f"Format of TARGET: {', '.join(NAMES)}.  [default: by the ending of TARGET, else native]",
)  # fmt: skip
@click.option(
    "--codec", metavar="NAME", help="How values are stored: exact, q8 (native); float32, q8, native (mlxkv)..."
)
@click.option("--version", type=int, help="Version of the format, where it has several (mlxkv: 1 to 6).")
@click.option("--byte-order", type=click.Choice(["little", "big"]), help="Byte order, where it can be chosen (mlxkv).")
@click.option("--vocab", type=int, help="Size of the vocabulary, where TARGET stores it and SOURCE does not (colikv).")
@click.option("--allow-loss", is_flag=True, help="Go on although TARGET cannot hold everything.")
@click.option("--overwrite", is_flag=True, help="Replace TARGET when it is there already.")
@library_option
@key_options(writes=True, changes=True)
@json_option
@examples(
    "kvsnap convert story.kvsnap story.safetensors",
    "kvsnap convert story.kvsnap story.kv --format mlxkv --codec q8 --allow-loss",
    "kvsnap convert story.kv story.kvsnap",
    "kvsnap convert story.kvsnap locked.kvsnap --encrypt --key-file ~/.kvsnap-key",
    "kvsnap convert locked.kvsnap again.kvsnap --key-file old-key --encrypt --new-key-file new-key",
)
def convert(
    source: str,
    target: str,
    format_: str | None,
    codec: str | None,
    version: int | None,
    byte_order: str | None,
    vocab: int | None,
    allow_loss: bool,
    overwrite: bool,
    keys: Keys,
    as_json: bool,
) -> None:
    """Write what SOURCE holds to TARGET in another format or codec.

    The format of SOURCE is judged by its content, never by its name. What TARGET cannot hold (fields, dtypes,
    precision) is listed; unless --allow-loss is given, nothing is written then and the exit code is 13. TARGET is
    encrypted with --encrypt only, whatever SOURCE is.
    """
    check_target(target, overwrite=overwrite, option="TARGET")
    format_ = format_ or _ENDINGS.get(os.path.splitext(target)[1])
    keys.check(target=target, option="TARGET", source=source)
    saving = keys.saving()
    with progress(f"converting {source}") as report:
        done = kvsnap.convert(
            source, target, format=format_, codec=codec, version=version, byte_order=byte_order, vocab=vocab,
            allow_loss=allow_loss, progress=report, key=keys.of(source), out_key=saving.pop("key", None), **saving,
        )  # fmt: skip
    if as_json:
        emit(done.to_dict())
        return
    print(f"{target}: {done.target_format}, {size(done.nbytes)}, from {done.source_format}")
    for loss in done.losses:
        remark(f"lost: {loss.what}: {loss.detail}")


COMMANDS = (convert,)

"""The command find: which session of the library a prompt, or a list of ids, has most in common with."""

from __future__ import annotations

import re
import sys

import click

import kvsnap
from kvsnap import formats
from kvsnap.cli._keys import Keys, key_options
from kvsnap.cli._model import adapter_option, choose_model, model_options, open_engine
from kvsnap.cli._names import library_option, named, open_existing
from kvsnap.cli._output import CheckFailed, count, emit, examples, json_option, progress, remark
from kvsnap.cli._run import chat_option, ids_of, ids_option, prompt_of
from kvsnap.errors import FormatError, InputError, MissingError, StorageError
from kvsnap.files import Reader
from kvsnap.identity import Identity

__all__ = ["COMMANDS"]


@click.command()
@click.option("--tokens-from", "source", metavar="FILE", callback=named,
              help="A file of kvsnap or another format, @NAME, or a text file of token ids (- for stdin).")  # fmt: skip
@click.option("--prompt", metavar="TEXT", help="The ids of this text under the model.")
@click.option("--prompt-file", metavar="PATH", help="Those of the text in a file (- for stdin).")
@ids_option
@chat_option
@model_options
@adapter_option
@key_options()
@library_option
@json_option
@examples(
    "kvsnap find --tokens-from other.kvsnap",
    'echo "1 2 3" | kvsnap find --tokens-from -',
    "kvsnap find --prompt-file report.txt --model ./my-model",
)
def find(
    source: str | None, prompt: str | None, prompt_file: str | None, prompt_ids: str | None, chat: bool,
    model: str | None, dtype: str | None, attention: str | None, keys: Keys, as_json: bool,
) -> None:  # fmt: skip
    """Find the session whose history agrees longest with some token ids, from the start.

    They are those of a file, or of a prompt under a model. Only sessions count that this model can go on with (of a
    file where it says which model it is of). No tensor of a session is read. Exit code 3 when no session agrees.
    """
    given = (prompt, prompt_file, prompt_ids)
    if (source is None) == all(p is None for p in given):
        both = "" if source is None else ", not both"
        raise click.UsageError(f"give --tokens-from FILE, or a prompt: --prompt, --prompt-file or --prompt-ids{both}")
    identity: Identity | None
    with open_existing() as library:  # before a model is loaded
        if source is not None:
            tokens, identity = _tokens_of(source, keys)
        else:
            wanted = prompt_of(prompt, prompt_file, prompt_ids, chat=chat, needed=True)
            engine = open_engine(choose_model(model, {}).name, dtype, attention)
            tokens = ids_of(engine, wanted, chat=chat)
            with progress("hashing the weights") as report:
                identity = engine.identity(report)
        found = library.find(tokens, identity)
    if as_json:
        emit({"path": library.path, "n_tokens": len(tokens), "found": found.to_dict() if found else None})
    elif found is None:
        remark(f"no session agrees with these {count(len(tokens), 'token')}")
    else:
        print(f"{found.name}: {found.n_tokens:,} of {count(len(tokens), 'token')} agree, "
              f"{count(found.n_rows, 'row')} can be reused by a cut to {count(found.keep, 'token')}")  # fmt: skip
        remark(f"to go on from there: kvsnap fork @{found.name} @NEW --at {found.keep}")
    if found is None:
        raise CheckFailed(MissingError.exit_code)


def _tokens_of(source: str, keys: Keys) -> tuple[tuple[int, ...], Identity | None]:
    if source != "-":
        try:
            formats.format_of(source)
        except FormatError:
            pass
        else:
            snapshot = kvsnap.load(source, mmap=False, key=keys.of(source))
            known = snapshot.identity if snapshot.identity.weights else None
            return snapshot.tokens, known
    if (keys.key_file or keys.key_command) is not None:
        raise InputError("a key was named, and token ids in a text are not encrypted", path=source)
    words = re.split(r"[,\s]+", _text(source).strip(" ,[]\n"))
    if not all(re.fullmatch(r"[0-9]+", word) for word in words):
        raise FormatError("neither a file that kvsnap reads nor a text of token ids", path=source)
    return tuple(_id(word) for word in words), None


def _id(word: str) -> int:
    """Return the number that these digits are. Raise `InputError` for one that no id can be."""
    digits = word.lstrip("0")
    if len(digits) > 10:
        raise InputError("this is no token id", expected="0 to 2^31 - 1", found=f"a number of {len(digits)} digits")
    return int(digits or "0")


def _text(source: str) -> str:
    try:
        if source == "-":
            return sys.stdin.read()
        with Reader(source) as reader:
            return reader.read_at(0, reader.size).decode()
    except UnicodeDecodeError as error:
        raise FormatError("neither a file that kvsnap reads nor a text of token ids", path=source) from error
    except OSError as error:
        if isinstance(error, kvsnap.KvsnapError):
            raise
        raise StorageError(f"cannot be read: {error.strerror}", errno=error.errno, path=source) from error


COMMANDS = (find,)

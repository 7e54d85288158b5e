"""The command `chat`: a conversation in a terminal, or of lines that are piped in. docs/chat.md."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import click

from kvsnap.cli._model import adapter_option, hash_once_option, model_options, sampler_options
from kvsnap.cli._names import library_option
from kvsnap.cli._output import examples, json_option
from kvsnap.cli._run import accept_option, codec_option
from kvsnap.cli.chat.piped import Piped
from kvsnap.cli.chat.room import Options, Room, file_of
from kvsnap.cli.chat.terminal import Terminal, check_extra, unseen_keys

__all__ = ["COMMANDS"]


@click.command()
@click.argument("name", default="chat")
@click.option("--system", metavar="TEXT", help="The system message of a conversation that is empty.")
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=1024, show_default=True, help="Cut an answer off after so many."
)
@click.option(
    "--every", type=click.IntRange(min=0), default=64, show_default=True,
    help="Store an answer after so many tokens each time, while it is generated; 0 at its end only.",
)  # fmt: skip
@click.option("--fresh", is_flag=True, help="Start a session of another model anew; what is there stays in its log.")
@click.option(
    "--keep-history", is_flag=True,
    help="Keep the tokens of earlier turns as they are, whatever the chat template makes of them today.",
)  # fmt: skip
@click.option("--no-history", is_flag=True, help="Keep what is typed in no file (the session keeps the messages).")
@click.option("--whole", is_flag=True, help="Take all of stdin as one message, with no commands in it.")
@codec_option
@accept_option
@model_options
@adapter_option
@hash_once_option
@sampler_options
@library_option
@json_option
@examples(
    "kvsnap chat                                  # the session @chat of the library",
    "kvsnap chat rivers --temperature 0.7         # another one; it remembers the settings",
    "kvsnap chat ./talk.kvsnap --model ./my-model",
    'echo "Name three rivers." | kvsnap chat rivers --json',
)
def chat(
    name: str, system: str | None, max_tokens: int, every: int, fresh: bool, keep_history: bool, no_history: bool,
    whole: bool, codec: str | None, accept: tuple[str, ...], model: str | None, dtype: str | None,
    attention: str | None, sampler: dict[str, Any], as_json: bool,
) -> None:  # fmt: skip
    """Chat with a model. NAME is a session of the library (@NAME means the same) or the path of one.

    Nothing is evaluated again when it is opened another day. Every turn is stored when it ends, and while it comes;
    killed at any moment, at most --every tokens are lost. Type :help for the commands. Without a terminal every line of
    stdin is a message, and with --json every answer one JSON object on a line.
    """
    at_terminal = not (as_json or whole) and sys.stdin.isatty() and sys.stdout.isatty()
    if at_terminal:
        check_extra()
    options = Options(
        model=model, dtype=dtype, attention=attention, sampler=sampler, system=system, max_tokens=max_tokens,
        every=every or None, accept=accept, codec=codec, fresh=fresh, keep_history=keep_history,
    )  # fmt: skip
    with unseen_keys() if at_terminal else nullcontext(), Room(options) as room:
        room.open(file_of(name))
        if at_terminal:
            Terminal(room, keep_typed=not no_history).run()
        else:
            Piped(room, whole=whole, as_json=as_json).run()


COMMANDS = (chat,)

"""The command that serves a model over HTTP: serve."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import click

from kvsnap import crypto
from kvsnap.cli._model import (
    adapter_option,
    choose_model,
    hash_once_option,
    model_options,
    open_engine,
    sampler_options,
)
from kvsnap.cli._names import library_option, library_path
from kvsnap.cli._output import examples, json_option, remark
from kvsnap.errors import ExtraMissingError, InputError
from kvsnap.layout import Sampler

if TYPE_CHECKING:
    from kvsnap.server import Tokens

__all__ = ["COMMANDS"]

_MARKER = "kvsnap-library"  # a file in every library


def _limits(function: Any) -> Any:
    for option in reversed((
        click.option("--max-tokens", type=int, default=4096, show_default=True,
                     help="The longest answer, and that of a request that names no number."),
        click.option("--max-prompt", type=int, help="The longest prompt in tokens.  [default: what the context holds]"),
        click.option("--max-body", type=int, default=4 << 20, show_default=True, help="Largest request, in bytes."),
        click.option("--max-messages", type=int, default=1000, show_default=True, help="Most messages of a request."),
        click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds for one request."),
        click.option("--waiting", type=int, default=32, show_default=True,
                     help="How many requests of one tenant may wait for the model."),
        click.option("--open-sessions", type=int, default=8, show_default=True,
                     help="How many sessions of one tenant stay open."),
        click.option("--idle", type=float, default=300.0, show_default=True,
                     help="Close a session after so many seconds without a request."),
        click.option("--grace", type=float, default=10.0, show_default=True,
                     help="Seconds that a running answer gets when the server is stopped."),
    )):  # fmt: skip
        function = option(function)
    return function


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="Port; 0 takes a free one."
)
@click.option("--name", help="What clients call the model.  [default: the last part of its name]")
@click.option("--token-file", metavar="FILE", help="A file with the token that clients have to send.")
@click.option(
    "--tokens-file", metavar="FILE",
    help="A file with a line TENANT TOKEN for each token; each tenant has a library of its own in the directory of "
    "--library.",
)  # fmt: skip
@click.option("--fresh", is_flag=True, help="Start a session of another model anew, in place of refusing it.")
@click.option(
    "--every", type=int, metavar="N", help="Publish an answer after N tokens each time while it is generated."
)
@click.option("--min-reuse", type=int, default=32, show_default=True,
              help="Fork a session for a request that begins as it does in so many tokens or more.")  # fmt: skip
@click.option("--codec", type=click.Choice(("exact", "q8")), help="How tensors are stored; q8 is a quarter of float32.")
@_limits
@model_options
@adapter_option
@hash_once_option
@sampler_options
@library_option
@json_option
@examples(
    "kvsnap serve                                     # http://127.0.0.1:8765/v1, this machine only",
    "kvsnap serve --model ./my-model --every 64       # a killed server loses at most 64 tokens",
    "kvsnap serve --host 0.0.0.0 --token-file token   # for others, with a token",
    "kvsnap serve --tokens-file tokens --library /srv/kvsnap",
)
def serve(
    host: str, port: int, name: str | None, token_file: str | None, tokens_file: str | None, fresh: bool,
    every: int | None, min_reuse: int, codec: str | None, max_tokens: int, max_prompt: int | None, max_body: int,
    max_messages: int, timeout: float, waiting: int, open_sessions: int, idle: float, grace: float, model: str | None,
    dtype: str | None, attention: str | None, sampler: dict[str, Any], as_json: bool,
) -> None:  # fmt: skip
    """Serve one model to many clients over HTTP, with sessions that last; needs kvsnap[server].

    Clients of the OpenAI interface take it as it is: chat completions, streamed or not. What was said before is not
    evaluated again: a request goes on with the session that it names, or with the one that begins as it does. SIGTERM
    and Ctrl-C store what is there; after a kill, at most the answer that was being generated is lost.
    """
    try:
        from kvsnap import server
    except ImportError as error:
        raise ExtraMissingError(f"serving needs {error.name}: pip install 'kvsnap[server]'") from error
    if every is not None and every < 1:
        raise InputError("--every is a number of tokens", expected="1 or more", found=every)
    limits = server.Limits(
        body_bytes=max_body, messages=max_messages, prompt_tokens=max_prompt, max_tokens=max_tokens, request_s=timeout,
        waiting=waiting, open_sessions=open_sessions, idle_s=idle,
    )  # fmt: skip
    chosen = choose_model(model, {})
    settings = server.Settings(
        model=name or os.path.basename(chosen.name.rstrip("/")) or chosen.name, sampler=Sampler(**sampler), fresh=fresh,
        every=every, min_reuse=min_reuse, codec=codec, grace_s=grace, metadata={"model": chosen.recorded},
        limits=limits,
    )  # fmt: skip
    tokens = _tokens(token_file, tokens_file)

    def ready(url: str) -> None:
        told = {"url": url, "model": settings.model, "library": library_path(), "pid": os.getpid()}
        print(json.dumps(told) if as_json else f"serving {settings.model} at {url}/v1", flush=True)

    with server.bound(host, port, has_tokens=tokens is not None) as where:
        engine = open_engine(chosen.name, dtype, attention)
        server.serve(engine, settings, where, library=library_path(), tokens=tokens, ready=ready)


def _tokens(token_file: str | None, tokens_file: str | None) -> Tokens | None:
    from kvsnap import server

    if token_file is not None and tokens_file is not None:
        raise click.UsageError("give --token-file or --tokens-file, not both")
    for file in (token_file, tokens_file):
        if file is not None and crypto.is_exposed(file):
            remark(f"warning: others can read {file}; chmod 600 keeps it to you")
    if tokens_file is not None:
        if os.path.lexists(os.path.join(library_path(), _MARKER)):
            raise InputError("this is a library; tenants need a directory of libraries", found=library_path())
        return server.read_tokens(tokens_file, library_path())
    if token_file is not None:
        return server.Tokens.of(server.read_token(token_file), library_path())
    told = os.environ.get(server.ENVIRONMENT)
    return server.Tokens.of(told, library_path()) if told else None


COMMANDS = (serve,)

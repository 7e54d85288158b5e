"""Commands that run a model: generate, resume, check, sweep."""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import click

import kvsnap
from kvsnap.cli._model import model_options, open_engine, parse_sampler, sampler_options, sampler_state
from kvsnap.cli._output import CheckFailed, count, emit, examples, json_option, progress, remark, show_table, table
from kvsnap.cli._paths import check_session, check_target
from kvsnap.cli._turn import Turn, prompt_ids, restored
from kvsnap.errors import CompatibilityError, ContextError, FormatError, InputError, MissingError, StorageError
from kvsnap.layout import Sampler
from kvsnap.protocols import Engine
from kvsnap.session import Session

__all__ = ["COMMANDS"]

_accept = click.option(
    "--accept",
    multiple=True,
    metavar="FIELD",
    help="Take on a difference: weights, dtype, tokenizer, config.NAME ... (repeatable). Then nothing is exact.",
)
_codec = click.option(
    "--codec", type=click.Choice(("exact", "q8")), help="How tensors are stored; q8 is a quarter of float32, not exact."
)
_max_tokens = click.option("--max-tokens", type=int, default=64, show_default=True, help="Stop after this many tokens.")
_chat = click.option("--chat", is_flag=True, help="Give the prompt as a user message, by the model's chat template.")


def _text_of(prompt: str | None, prompt_file: str | None, *, needed: bool) -> str:
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("give a prompt or --prompt-file, not both")
    text = prompt or ""
    if prompt_file is not None:
        try:
            with click.open_file(prompt_file, encoding="utf-8") as file:
                text = file.read()
        except FileNotFoundError:
            raise MissingError("no such prompt file", path=prompt_file) from None
        except UnicodeDecodeError as error:
            raise FormatError(f"the prompt file is not UTF-8 text: {error.reason}", path=prompt_file) from error
        except OSError as error:
            raise StorageError(f"cannot be read: {error.strerror}", errno=error.errno, path=prompt_file) from error
    if needed and not text:
        raise InputError("the prompt is empty")
    return text


def _check_count(max_tokens: int) -> None:
    if max_tokens < 1:
        raise InputError("--max-tokens is too small", expected="1 or more", found=max_tokens)


@click.command()
@click.argument("prompt", required=False)
@click.option("--prompt-file", metavar="PATH", help="Read the prompt from a file (- for stdin).")
@_chat
@click.option("--save", metavar="FILE", help="Write a sealed snapshot of the state at the end.")
@click.option("--session", "session_file", metavar="FILE", help="Append the turn to a session; made when not there.")
@_codec
@_max_tokens
@model_options
@sampler_options
@json_option
@examples(
    'kvsnap generate "Once upon a time" --save story.kvsnap',
    "kvsnap generate --prompt-file report.txt --max-tokens 1 --save report.kvsnap",
    'kvsnap generate "Name three rivers." --chat --session chat.kvsnap',
    'kvsnap generate "And their lengths?" --chat --session chat.kvsnap',
)
def generate(
    prompt: str | None, prompt_file: str | None, chat: bool, save: str | None, session_file: str | None,
    codec: str | None, max_tokens: int, model: str, dtype: str | None, attention: str | None,
    sampler: dict[str, Any], as_json: bool,
) -> None:  # fmt: skip
    """Evaluate PROMPT and generate text, which is printed as it comes; --save keeps the state.

    The state is saved with the next token's logits, so that resuming needs no forward pass to go on. Interrupted
    (Ctrl-C), what was generated so far is saved all the same; in a session the turn is marked as cut off.
    """
    text = _text_of(prompt, prompt_file, needed=True)
    _check_count(max_tokens)
    if save is not None:
        check_target(save)
    if session_file is not None:
        check_session(session_file)
    with ExitStack() as opened:
        session = None
        if session_file is not None and os.path.lexists(session_file):
            session = opened.enter_context(Session.open(session_file, create=False))
        identity = session.identity if session is not None and session.n_tokens else None
        engine = open_engine(model, dtype, attention, identity)
        back = None
        if session is not None and session.n_tokens:
            snapshot = session.load()
            back = restored(snapshot, engine, (), sampler_state(snapshot.sampler, sampler))
        turn = Turn(engine, max_tokens=max_tokens, as_json=as_json, restored=back)
        turn.run(prompt_ids(engine, text, chat=chat), None if back else Sampler(**sampler))
        turn.store(save=save, codec=codec, session=session, session_file=session_file)
    turn.finish()


@click.command()
@click.argument("file")
@click.option("--prompt", metavar="TEXT", help="Evaluate this text first.")
@click.option("--prompt-file", metavar="PATH", help="Read that text from a file (- for stdin).")
@_chat
@click.option("--save", metavar="FILE2", help="Write a sealed snapshot of the new state.")
@click.option("--append", is_flag=True, help="Append the new turn to FILE, which is a session.")
@_codec
@_accept
@_max_tokens
@model_options
@sampler_options
@json_option
@examples(
    "kvsnap resume story.kvsnap",
    "kvsnap resume story.kvsnap --temperature 0.9 --seed 7 --save other.kvsnap",
    'kvsnap resume chat.kvsnap --prompt "And then?" --append',
)
def resume(
    file: str, prompt: str | None, prompt_file: str | None, chat: bool, save: str | None, append: bool,
    codec: str | None, accept: tuple[str, ...], max_tokens: int, model: str, dtype: str | None, attention: str | None,
    sampler: dict[str, Any], as_json: bool,
) -> None:  # fmt: skip
    """Go on from the last token of FILE, a snapshot or a session, without evaluating its history again.

    The model must be the one that FILE was made with: its weights are hashed and compared. Sampler settings and random
    numbers go on as saved; options replace single settings. On stderr: tokens reused and recomputed, forward passes and
    time to the first token, and whether the continuation is exact.
    """
    text = _text_of(prompt, prompt_file, needed=prompt is not None or prompt_file is not None)
    if chat and not text:
        raise click.UsageError("--chat needs --prompt or --prompt-file")
    _check_count(max_tokens)
    if save is not None:
        check_target(save)
    with ExitStack() as opened:
        session = None
        if append:
            if kvsnap.inspect(file).sealed:
                raise InputError("a sealed snapshot takes no further turn; use --save NEW instead", path=file)
            session = opened.enter_context(Session.open(file, create=False))
            snapshot = session.load()
        else:
            snapshot = kvsnap.load(file)
        if not snapshot.tokens and not text:
            raise InputError("nothing to go on from: the file holds no tokens; give a --prompt", path=file)
        engine = open_engine(model, dtype, attention, snapshot.identity)
        back = restored(snapshot, engine, accept, sampler_state(snapshot.sampler, sampler))
        turn = Turn(engine, max_tokens=max_tokens, as_json=as_json, restored=back)
        turn.run(prompt_ids(engine, text, chat=chat) if text else (), None)
        turn.store(save=save, codec=codec, session=session, session_file=None)
    turn.finish()


@click.command()
@click.argument("file")
@_accept
@model_options
@json_option
@examples(
    "kvsnap check chat.kvsnap --model ./my-model",
    "kvsnap check chat.kvsnap --model ./finetuned --accept weights",
)
def check(
    file: str, accept: tuple[str, ...], model: str, dtype: str | None, attention: str | None, as_json: bool
) -> None:
    """Compare FILE with a model, field by field, without restoring anything.

    Exit code 0 when `kvsnap resume` would go ahead, 7 when it would refuse the model, 8 when the context is too small.
    """
    snapshot = kvsnap.load(file)
    engine = open_engine(model, dtype, attention, snapshot.identity)
    with progress("hashing the weights") as report:
        found = kvsnap.check(snapshot, engine, accept=accept, progress=report)
    if as_json:
        emit({"path": file, "model": model, **found.to_dict()})
    else:
        made = table("field", "verdict", "decides", "saved", "found")
        for f in found.fields:
            mark = "bold red" if f in found.refusals else "yellow" if f.verdict != "match" else "green"
            made.add_row(f.name, f"[{mark}]{f.verdict}[/{mark}]", f.level, f.saved, f.found)
        show_table(made)
        limit = "unknown" if found.limit is None else f"{found.limit:,}"
        print(f"context: {found.needed:,} of {limit} positions needed")
        answer = "refused" if not found.ok else "exact" if found.exact else "possible, but not exact"
        print(f"resume: {answer}")
    if found.refusals:
        raise CheckFailed(CompatibilityError.exit_code)
    if not found.context_fits:
        raise CheckFailed(ContextError.exit_code)


@click.command()
@click.argument("file")
@click.option(
    "--sampler", "samplers", multiple=True, required=True, metavar="SETTINGS",
    help='As "temperature=0.7,top_p=0.9,seed=1", or "greedy"; once for each continuation.',
)  # fmt: skip
@_max_tokens
@_accept
@click.option("--csv", "as_csv", is_flag=True, help="Print one CSV line for each continuation.")
@model_options
@json_option
@examples(
    'kvsnap sweep story.kvsnap --sampler greedy --sampler "temperature=0.7,seed=1" --sampler "temperature=1.2,seed=1"',
)
def sweep(
    file: str, samplers: Sequence[str], max_tokens: int, accept: tuple[str, ...], as_csv: bool, model: str,
    dtype: str | None, attention: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Continue FILE under several sampler settings; its history is evaluated for none of them."""
    if as_csv and as_json:
        raise click.UsageError("--csv and --json exclude each other")
    settings = [parse_sampler(text) for text in samplers]
    _check_count(max_tokens)
    snapshot = kvsnap.load(file)
    engine: Engine = open_engine(model, dtype, attention, snapshot.identity)
    found = kvsnap.sweep(snapshot, engine, settings, max_tokens=max_tokens, accept=accept)
    rows = [
        {
            "sampler": text,
            "tokens": list(c.tokens),
            "text": c.text,
            "mean_logprob": sum(c.logprobs) / len(c.logprobs),
            "forwards": c.forwards,
        }
        for text, c in zip(samplers, found, strict=True)
    ]
    if as_json:
        emit({"path": file, "history": len(snapshot.tokens), "continuations": rows})
    elif as_csv:
        writer = csv.writer(sys.stdout)
        writer.writerow(("sampler", "n_tokens", "mean_logprob", "forwards", "text"))
        writer.writerows(
            (r["sampler"], len(c.tokens), f"{r['mean_logprob']:.4f}", c.forwards, c.text)
            for r, c in zip(rows, found, strict=True)
        )
    else:
        from rich.markup import escape

        made = table(
            "sampler", "tokens", "mean logprob", "forwards", "text", right=("tokens", "mean logprob", "forwards")
        )
        for row, c in zip(rows, found, strict=True):
            made.add_row(escape(str(row["sampler"])), str(len(c.tokens)), f"{row['mean_logprob']:.3f}",
                         str(c.forwards), escape(c.text))  # fmt: skip
        show_table(made)
        remark(f"from {count(len(snapshot.tokens), 'token')} that were not evaluated again")


COMMANDS = (generate, resume, check, sweep)

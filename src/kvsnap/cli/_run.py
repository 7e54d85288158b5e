"""Commands that run a model: generate, resume, check."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import click

import kvsnap
from kvsnap import inspection
from kvsnap.cli._draft import draft_options, open_draft
from kvsnap.cli._keys import Keys, key_options
from kvsnap.cli._model import (
    ChosenModel,
    adapter_option,
    choose_model,
    idle_settings,
    model_options,
    open_engine,
    refusing,
    sampler_options,
    sampler_state,
)
from kvsnap.cli._names import (
    check_place_of_session,
    count_as_use,
    library_option,
    named,
    named_or_new,
    no_name,
    opened_session,
)
from kvsnap.cli._output import CheckFailed, emit, examples, json_option, progress, remark, show_table, table
from kvsnap.cli._paths import check_apart, check_target, is_sealed
from kvsnap.cli._turn import Turn, prompt_ids, restored, saying
from kvsnap.errors import CompatibilityError, ContextError, FormatError, InputError, MissingError, StorageError
from kvsnap.identity import Compatibility
from kvsnap.labels import inexact_because
from kvsnap.layout import Sampler, Snapshot
from kvsnap.protocols import Engine
from kvsnap.restoring import check_one_model
from kvsnap.session import Session

__all__ = [
    "COMMANDS", "accept_option", "chat_option", "check_count", "codec_option", "ids_of", "ids_option",
    "max_tokens_option", "prompt_of",
]  # fmt: skip

accept_option = click.option(
    "--accept",
    multiple=True,
    metavar="FIELD",
    help="Take on a difference: weights, dtype, tokenizer, config.NAME ... (repeatable). Then nothing is exact.",
)
codec_option = click.option(
    "--codec", type=click.Choice(("exact", "q8")), help="How tensors are stored; q8 is a quarter of float32, not exact."
)
max_tokens_option = click.option(
    "--max-tokens", type=int, default=64, show_default=True, help="Stop after this many tokens."
)
chat_option = click.option(
    "--chat", is_flag=True, help="Give the prompt as a user message, by the model's chat template."
)
ids_option = click.option(
    "--prompt-ids", metavar="IDS", help='Token ids as "1 2 3" in place of a text, for a model without a tokenizer.'
)
_every = click.option(
    "--every", type=int, metavar="N", help="Publish in the session after each N tokens, so that a kill loses no more."
)
_FRESH = "kvsnap generate --session FILE --fresh starts the session anew, and what is there stays in its log"
_APART = "without --append, --accept takes another one on, and --save keeps that in a file of its own"
_overwrite = click.option("--overwrite", is_flag=True, help="Let --save replace a snapshot that is there already.")


def prompt_of(
    prompt: str | None, prompt_file: str | None, ids: str | None, *, chat: bool, needed: bool, what: str = "prompt"
) -> str | tuple[int, ...]:
    """Return the text or the ids of the prompt; an empty text where there is none and none is needed.

    `what` is what it is called, in options and messages.
    """
    given = sum(p is not None for p in (prompt, prompt_file, ids))
    if given > 1:
        raise click.UsageError(f"give one {what}: a text, --{what}-file or --{what}-ids, not both")
    if ids is None:
        return _text_of(prompt, prompt_file, what, needed=needed or given > 0)
    if chat:
        raise click.UsageError(f"--chat makes a message of a text; --{what}-ids are taken as they are")
    words = re.split(r"[,\s]+", ids.strip(" ,[]\n"))
    if not all(re.fullmatch(r"[0-9]+", word) for word in words):
        raise InputError(f"--{what}-ids are token ids", expected='numbers, as "1 2 3"', found=repr(ids[:60]))
    return tuple(int(word) for word in words)


def _text_of(prompt: str | None, prompt_file: str | None, what: str, *, needed: bool) -> str:
    if needed and prompt is None and prompt_file is None:
        raise click.UsageError(f"give a {what}: a text, --{what}-file or --{what}-ids")
    text = prompt or ""
    if prompt_file is not None:
        try:
            with click.open_file(prompt_file, encoding="utf-8") as file:
                text = file.read()
        except FileNotFoundError:
            raise MissingError(f"no such {what} file", path=prompt_file) from None
        except UnicodeDecodeError as error:
            raise FormatError(f"the {what} file is not UTF-8 text: {error.reason}", path=prompt_file) from error
        except OSError as error:
            raise StorageError(f"cannot be read: {error.strerror}", errno=error.errno, path=prompt_file) from error
    if needed and not text:
        raise InputError(f"the {what} is empty")
    return text


def check_count(max_tokens: int) -> None:
    """Raise `InputError` for a number of tokens that is none."""
    if max_tokens < 1:
        raise InputError("--max-tokens is too small", expected="1 or more", found=max_tokens)


def _check_every(every: int | None, *, session: bool, option: str) -> None:
    if every is not None and every < 1:
        raise InputError("--every is too small", expected="1 or more", found=every)
    if every is not None and not session:
        raise click.UsageError(
            f"--every needs {option}: a session grows on the way, and a sealed snapshot is written once, at the end"
        )


def ids_of(engine: Engine, prompt: str | tuple[int, ...], *, chat: bool) -> tuple[int, ...]:
    if isinstance(prompt, tuple):
        return prompt
    return prompt_ids(engine, prompt, chat=chat) if prompt else ()


def _warned(given: Mapping[str, Any], saved: Sampler) -> list[str]:
    warnings = idle_settings(given, replace(saved, **given))
    for warning in warnings:
        remark(f"warning: {warning}")
    return warnings


def _settings_of(snapshot: Snapshot | None) -> Sampler:
    return Sampler() if snapshot is None or snapshot.sampler is None else snapshot.sampler.settings


@contextmanager
def _left(session: Session, engine: Engine, *, fresh: bool) -> Iterator[list[str]]:
    """With `fresh` start a session anew that the model refuses inside, and yield a list that says so then."""
    left: list[str] = []
    try:
        yield left
    except (CompatibilityError, ContextError) as error:
        if not fresh:
            raise
        commit = session.n_commits
        session.reset(any_model=True)
        engine.reset()
        left.append(f"started anew, since {error.message} (kvsnap rewind goes back to commit {commit})")
        remark(left[0])


@click.command()
@click.argument("prompt", required=False)
@click.option("--prompt-file", metavar="PATH", help="Read the prompt from a file (- for stdin).")
@ids_option
@chat_option
@click.option("--save", metavar="FILE", callback=no_name, help="Write a sealed snapshot of the state at the end.")
@_overwrite
@click.option(
    "--session", "session_file", metavar="FILE", callback=named_or_new,
    help="Append the turn to a session, made when it is not there; @NAME is one of the library.",
)  # fmt: skip
@_every
@key_options(writes=True)
@codec_option
@accept_option
@click.option("--fresh", is_flag=True, help="Start a session of another model anew; what is there stays in its log.")
@max_tokens_option
@model_options
@adapter_option
@draft_options
@sampler_options
@library_option
@json_option
@examples(
    'kvsnap generate "Once upon a time" --save story.kvsnap',
    "kvsnap generate --prompt-file report.txt --max-tokens 1 --save report.kvsnap",
    'kvsnap generate "Name three rivers." --chat --session chat.kvsnap',
    'kvsnap generate "And their lengths?" --chat --session chat.kvsnap',
    'kvsnap generate "Name three rivers." --chat --session @rivers      # a session of the library',
    "kvsnap generate --prompt-file plot.txt --session novel.kvsnap --max-tokens 5000 --every 64",
)
def generate(
    prompt: str | None, prompt_file: str | None, prompt_ids: str | None, chat: bool, save: str | None, overwrite: bool,
    session_file: str | None, every: int | None, keys: Keys, codec: str | None, accept: tuple[str, ...], fresh: bool,
    max_tokens: int, model: str | None, dtype: str | None, attention: str | None, sampler: dict[str, Any],
    as_json: bool,
) -> None:  # fmt: skip
    """Evaluate PROMPT and generate text, which is printed as it comes; --save keeps the state.

    The state is saved with the next token's logits, so that resuming needs no forward pass to go on. Stopped by Ctrl-C
    or by a full context, what was generated so far is saved all the same. In a session a turn that the model did not
    end itself is marked as cut off.
    """
    given = prompt_of(prompt, prompt_file, prompt_ids, chat=chat, needed=True)
    check_count(max_tokens)
    _check_every(every, session=session_file is not None, option="--session")
    if session_file is None and (accept or fresh):
        raise click.UsageError("--accept and --fresh need --session: nothing that was saved is gone on from without it")
    if save is not None:
        check_target(save, overwrite=overwrite)
    if session_file is not None:
        check_place_of_session(session_file)
    check_apart(save, session_file)
    keys.check(target=save, option="--save", session=session_file is not None)
    with ExitStack() as opened:
        session, snapshot = None, None
        if session_file is not None and os.path.lexists(session_file):
            session = opened.enter_context(opened_session(session_file, create=False))
            session.check_open_to_turns()
            snapshot = session.load()
        metadata = {} if snapshot is None else snapshot.metadata
        chosen = opened.enter_context(refusing(choose_model(model, metadata), _FRESH, turns=True))
        warnings = _warned(sampler, _settings_of(snapshot))
        identity = None if snapshot is None or not snapshot.tokens else snapshot.identity
        engine = open_engine(chosen.name, dtype, attention, identity)
        draft = open_draft(dtype, attention)
        back = None
        if session is not None and snapshot is not None:
            with _left(session, engine, fresh=fresh) as left:
                check_one_model(snapshot, engine, accept=accept)
                if snapshot.tokens:
                    back = restored(snapshot, engine, accept, sampler_state(snapshot.sampler, sampler), draft=draft)
            if left:
                snapshot = session.load()
                metadata, warnings = snapshot.metadata, [*warnings, *left]
        turn = Turn(engine, max_tokens=max_tokens, as_json=as_json, restored=back, warnings=warnings, codec=codec,
                    draft=draft, metadata={**metadata, "model": chosen.recorded},
                    said=saying(snapshot, given, chat=chat))  # fmt: skip
        turn.run(ids_of(engine, given, chat=chat), None if back else Sampler(**sampler), every=every,
                 opened=lambda: session or opened.enter_context(opened_session(session_file or "")))  # fmt: skip
        turn.store(save=save, session=session, session_file=session_file, locked=keys.saving())
    turn.finish()


@click.command()
@click.argument("file", callback=named)
@click.option("--prompt", metavar="TEXT", help="Evaluate this text first.")
@click.option("--prompt-file", metavar="PATH", help="Read that text from a file (- for stdin).")
@ids_option
@chat_option
@click.option("--save", metavar="FILE2", callback=no_name, help="Write a sealed snapshot of the new state.")
@_overwrite
@click.option("--append", is_flag=True, help="Append the new turn to FILE, which is a session.")
@_every
@key_options(writes=True)
@codec_option
@accept_option
@click.option("--refuse-non-finite", "refuse", is_flag=True, help="Restore nothing that holds NaN or infinite values.")
@max_tokens_option
@model_options
@adapter_option
@draft_options
@sampler_options
@library_option
@json_option
@examples(
    "kvsnap resume story.kvsnap",
    "kvsnap resume story.kvsnap --temperature 0.9 --seed 7 --save other.kvsnap",
    'kvsnap resume chat.kvsnap --prompt "And then?" --append',
)
def resume(
    file: str, prompt: str | None, prompt_file: str | None, prompt_ids: str | None, chat: bool, save: str | None,
    overwrite: bool, append: bool, every: int | None, keys: Keys, codec: str | None, accept: tuple[str, ...],
    refuse: bool, max_tokens: int, model: str | None, dtype: str | None, attention: str | None,
    sampler: dict[str, Any], as_json: bool,
) -> None:  # fmt: skip
    """Go on from the last token of FILE, a snapshot or a session, without evaluating its history again.

    The model must be the one that FILE was made with: its weights are hashed and compared. Sampler settings and random
    numbers go on as saved; options replace single settings. On stderr: tokens reused and recomputed, forward passes and
    time to the first token, and whether the continuation is exact.
    """
    given = prompt_of(prompt, prompt_file, prompt_ids, chat=chat, needed=False)
    if chat and not given:
        raise click.UsageError("--chat needs --prompt or --prompt-file")
    check_count(max_tokens)
    _check_every(every, session=append, option="--append")
    if save is not None:
        check_target(save, overwrite=overwrite)
    keys.check(target=save, option="--save", source=file, session=append)
    with ExitStack() as opened:
        session = None
        if append:
            if is_sealed(file):
                raise InputError("a sealed snapshot takes no further turn; use --save NEW instead", path=file)
            keys.refuse(file)
            session = opened.enter_context(opened_session(file, create=False))
            session.check_open_to_turns()
            snapshot = session.load()
        else:
            snapshot = kvsnap.load(file, key=keys.of(file))
            count_as_use(file)
        if not snapshot.tokens and not given:
            raise InputError("nothing to go on from: the file holds no tokens; give a --prompt", path=file)
        chosen = opened.enter_context(
            refusing(choose_model(model, snapshot.metadata), _APART if append else "", turns=append)
        )
        warnings = _warned(sampler, _settings_of(snapshot))
        engine = open_engine(chosen.name, dtype, attention, snapshot.identity)
        draft = open_draft(dtype, attention)
        if append:
            check_one_model(snapshot, engine, accept=accept)
        back = restored(snapshot, engine, accept, sampler_state(snapshot.sampler, sampler),
                        non_finite="refuse" if refuse else "allow", draft=draft)  # fmt: skip
        turn = Turn(engine, max_tokens=max_tokens, as_json=as_json, restored=back, warnings=warnings, codec=codec,
                    draft=draft, metadata={**snapshot.metadata, "model": chosen.recorded},
                    said=saying(snapshot, given, chat=chat))  # fmt: skip
        turn.run(ids_of(engine, given, chat=chat), None, every=every, opened=lambda: session)
        turn.store(save=save, session=session, locked=keys.saving())
    turn.finish()


@click.command()
@click.argument("file", callback=named)
@accept_option
@model_options
@adapter_option
@library_option
@key_options()
@json_option
@examples(
    "kvsnap check chat.kvsnap --model ./my-model",
    "kvsnap check chat.kvsnap --model ./finetuned --accept weights",
)
def check(
    file: str, accept: tuple[str, ...], model: str | None, dtype: str | None, attention: str | None, keys: Keys,
    as_json: bool,
) -> None:  # fmt: skip
    """Compare FILE with a model, field by field, without restoring anything; count NaN and infinite values.

    Exit code 0 when `kvsnap resume` would go ahead, 7 when it would refuse the model, 8 when the context is too small,
    or full, so that no token could be generated.
    """
    snapshot = kvsnap.load(file, key=keys.of(file))
    chosen = choose_model(model, snapshot.metadata)
    engine = open_engine(chosen.name, dtype, attention, snapshot.identity)
    with progress("hashing the weights") as report:
        found = kvsnap.check(snapshot, engine, accept=accept, progress=report)
    with progress("reading the values") as report:
        bad = inspection.non_finite(snapshot, report)
    room = None if found.limit is None else max(0, found.limit - found.needed)
    reason = inexact_because(snapshot)
    if as_json:
        emit({"path": file, "model": chosen.name, "model_was": chosen.why, **found.to_dict(), "room": room,
              "exact": found.exact and not reason, "inexact_because": reason,
              "non_finite": [b.to_dict() for b in bad], "ok": found.ok and room != 0})  # fmt: skip
    else:
        _show_check(found, chosen, room, reason)
        for b in bad:
            print(f"warning: {b}")
    if found.refusals:
        raise CheckFailed(CompatibilityError.exit_code)
    if room == 0:
        raise CheckFailed(ContextError.exit_code)


def _show_check(found: Compatibility, chosen: ChosenModel, room: int | None, reason: str) -> None:
    from rich.markup import escape

    made = table("field", "verdict", "decides", "saved", "found")
    for f in found.fields:
        mark = "bold red" if f in found.refusals else "yellow" if f.verdict != "match" else "green"
        made.add_row(escape(f.name), f"[{mark}]{f.verdict}[/{mark}]", f.level, escape(f.saved), escape(f.found))
    show_table(made)
    print(f"model: {chosen}")
    limit, known = ("", ", the model names no limit") if found.limit is None else (f" of {found.limit:,}", "")
    print(f"context: {found.needed:,}{limit} positions needed{known}")
    answer = "refused" if not found.ok else "exact" if found.exact and not reason else "possible, but not exact"
    if found.ok and found.exact and reason:
        answer += f": {reason}"
    if found.ok and room == 0:
        answer = "refused: the context is full, nothing can be generated"
    print(f"resume: {answer}")


COMMANDS = (generate, resume, check)

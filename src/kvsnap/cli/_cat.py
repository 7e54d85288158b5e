"""The text of a file, its ids, or the messages of its chat: cat."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import click

import kvsnap
from kvsnap import formats
from kvsnap.cli._keys import Keys, key_options
from kvsnap.cli._names import library_option, named, shown
from kvsnap.cli._output import count, emit, examples, json_option, remark, say
from kvsnap.errors import InputError
from kvsnap.formats.native import NAME
from kvsnap.inspection.turns import TurnText, turn_texts
from kvsnap.layout import Snapshot

__all__ = ["COMMANDS"]

Detokenize = Callable[[Sequence[int]], str]


@click.command()
@click.argument("file", callback=named)
@click.option("--tokens", "as_tokens", is_flag=True, help="Print token ids, one line for each run.")
@click.option("--messages", "as_messages", is_flag=True, help="Print the messages of the chat: role and content.")
@click.option("--turns", "by_turns", is_flag=True, help="Print turn by turn, each under its number and its tokens.")
@click.option("--prompt-only", is_flag=True, help="Only what was given.")
@click.option("--generated-only", is_flag=True, help="Only what the model said.")
@click.option("--model", metavar="NAME", help="Model whose tokenizer makes text of the ids. Its weights are not read.")
@key_options()
@library_option
@json_option
@examples(
    "kvsnap cat chat.kvsnap",
    "kvsnap cat chat.kvsnap --messages",
    "kvsnap cat @chat --turns",
    "kvsnap cat chat.kvsnap --tokens",
    "kvsnap cat chat.kvsnap --generated-only --model smollm2",
    "kvsnap cat state.coli_kv --model ./model         # a file without text",
)
def cat(
    file: str, as_tokens: bool, as_messages: bool, by_turns: bool, prompt_only: bool, generated_only: bool,
    model: str | None, keys: Keys, as_json: bool,
) -> None:  # fmt: skip
    """Print the text in FILE.

    The whole text is stored beside the ids, so no model is needed. A part of it (--prompt-only, --generated-only), and
    the text of a file that stores ids alone, is made by a tokenizer: name the model. The messages of a chat are stored
    as they were given, where they are known.
    """
    part = prompt_only or generated_only
    if as_messages and (as_tokens or part or by_turns):
        raise click.UsageError("--messages prints whole messages, not tokens or a part of the text")
    if by_turns and part:
        raise click.UsageError("--turns prints whole turns, not a part of the text")
    if prompt_only and generated_only:
        raise click.UsageError("--prompt-only and --generated-only leave nothing")
    key = keys.of(file)
    snapshot = kvsnap.load(file, key=key)
    detokenize = _detokenizer(model, snapshot, file)
    if as_messages and not as_json:
        _print_messages(snapshot, file)
    elif by_turns:
        turns = _turns(snapshot, file, key)
        if detokenize is None and not as_tokens and any(turn.text is None for turn in turns):
            detokenize = _recorded(snapshot, file)
        _print_turns(turns, detokenize, file, as_tokens=as_tokens, as_json=as_json)
    else:
        wanted = "prompt" if prompt_only else "generated" if generated_only else ""
        _print_runs(snapshot, wanted, detokenize, file, as_tokens=as_tokens, as_json=as_json)


def _write(text: str | None) -> None:
    """Print text as it is stored; on a terminal, which it could steer, what cannot be seen as its number."""
    (say if sys.stdout.isatty() else print)(text or "")


def _print_runs(
    snapshot: Snapshot, wanted: str, detokenize: Detokenize | None, file: str, *, as_tokens: bool, as_json: bool
) -> None:
    runs, start = [], 0
    for run in snapshot.runs:
        if wanted in ("", run.kind):
            runs.append((run.kind, snapshot.tokens[start : start + run.count]))
        start += run.count
    text = None if as_tokens and not as_json else _text(snapshot, runs, detokenize, file, strict=not as_json)
    if as_json:
        emit({"n_tokens": sum(len(ids) for _, ids in runs), "runs": [{"kind": k, "tokens": i} for k, i in runs],
              "text": text, "messages": snapshot.messages})  # fmt: skip
    elif as_tokens:
        for kind, ids in runs:
            print(f"{kind}: {' '.join(map(str, ids))}")
    else:
        _write(text)


def _print_messages(snapshot: Snapshot, file: str) -> None:
    if snapshot.messages is None:
        raise InputError("the messages are not known: this file does not tell them", path=file)
    for message in snapshot.messages:
        content = message.get("content")
        told = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        _write(f"{message['role']}: {told}")


def _turns(snapshot: Snapshot, file: str, key: bytes | None) -> tuple[TurnText, ...]:
    """Return the turns of a file; one of a foreign format is one turn."""
    if formats.format_of(file).name == NAME:
        return turn_texts(file, key)
    n = len(snapshot.tokens)
    return (TurnText(number=1, start=0, stop=n, tokens=snapshot.tokens, text=snapshot.text),)


def _print_turns(
    turns: Sequence[TurnText], detokenize: Detokenize | None, file: str, *, as_tokens: bool, as_json: bool
) -> None:
    told: list[dict[str, Any]] = []
    for turn in turns:
        text = turn.text
        if text is None and detokenize is not None and not (as_tokens and not as_json):
            text = detokenize(turn.tokens)
        if text is None and not as_tokens and not as_json:
            raise _needs_tokenizer(f"the text of turn {turn.number}: it is not stored", file)
        told.append({"turn": turn.number, "start": turn.start, "stop": turn.stop, "tokens": turn.tokens, "text": text})
    if as_json:
        emit({"path": file, "turns": told})
        return
    for one in told:
        print(f"--- turn {one['turn']}, tokens {one['start']:,} to {one['stop']:,}")
        _write(" ".join(map(str, one["tokens"])) if as_tokens else one["text"])


def _text(
    snapshot: Snapshot, runs: list[tuple[Any, tuple[int, ...]]], detokenize: Detokenize | None, file: str, *,
    strict: bool,
) -> str | None:  # fmt: skip
    ids = [i for _, part in runs for i in part]
    if len(ids) == len(snapshot.tokens) and snapshot.text is not None:
        return snapshot.text
    if not ids:
        return ""
    if detokenize is not None:
        return detokenize(ids)
    if not strict:
        return None
    raise _needs_tokenizer(
        "a part of the text" if snapshot.text is not None else "text of ids: this file has no text", file
    )


def _needs_tokenizer(what: str, file: str) -> InputError:
    return InputError(f"a tokenizer is needed for {what}; name one with --model, or use --tokens", path=file)


def _detokenizer(model: str | None, snapshot: Snapshot, file: str) -> Detokenize | None:
    """Return what makes text of ids, loaded when it is first used; None without a model."""
    if model is None:
        return None

    @lru_cache(maxsize=1)
    def loaded() -> Any:
        from kvsnap.cli._model import open_tokenizer

        tokenizer = open_tokenizer(model)
        _check(tokenizer, model, snapshot, file)
        return tokenizer

    def made(ids: Sequence[int]) -> str:
        from kvsnap.engines._tf_text import detokenize

        return detokenize(loaded(), ids)

    return made


def _recorded(snapshot: Snapshot, file: str) -> Detokenize | None:
    """Return what makes text of a turn whose text is not stored, by the tokenizer that made the file; None without."""
    from kvsnap.cli._model import recorded_decoder

    return recorded_decoder(shown(file), snapshot.metadata, snapshot.identity)


def _check(tokenizer: Any, model: str, snapshot: Snapshot, file: str) -> None:
    """Refuse a tokenizer that has no word for an id; remark on one that is not the one the file names."""
    from kvsnap.engines._tf_identity import tokenizer_digest

    beyond = [i for i in snapshot.tokens if not 0 <= i < len(tokenizer)]
    if beyond:
        raise InputError(
            f"the tokenizer of {model} has no token {beyond[0]}, and {count(len(beyond), 'id')} that it does not know: "
            "it is not the one that made this file",
            path=file, expected=f"ids below {len(tokenizer)}", found=beyond[0],
        )  # fmt: skip
    named_by_file = snapshot.identity.tokenizer
    if named_by_file and named_by_file != tokenizer_digest(tokenizer):
        remark(f"note: the tokenizer of {model} is not the one that {file} names: the text may be another")


COMMANDS = (cat,)

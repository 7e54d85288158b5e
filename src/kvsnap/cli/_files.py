"""Commands that read a file, none of which needs a model: info, cat, head, verify, repair."""

from __future__ import annotations

import io
import json
import time
from collections import Counter
from typing import Any

import click
import numpy as np

import kvsnap
from kvsnap.cli._keys import Keys, key_options
from kvsnap.cli._names import library_option, named, no_name
from kvsnap.cli._output import (
    CheckFailed,
    count,
    emit,
    examples,
    json_option,
    progress,
    remark,
    show_table,
    size,
    table,
)
from kvsnap.cli._paths import check_target
from kvsnap.cli._turn import STOPS, is_whole
from kvsnap.errors import DamagedError, InputError, KvsnapError, TamperedError
from kvsnap.files import write_whole
from kvsnap.formats.native import VerifyReport
from kvsnap.inspection import Summary
from kvsnap.layout import Head, Snapshot

__all__ = ["COMMANDS"]

QUOTE = '"'


# -- info ----------------------------------------------------------------------------------------------------


@click.command()
@click.argument("file", callback=named)
@key_options()
@library_option
@json_option
@examples(
    "kvsnap info chat.kvsnap",
    "kvsnap info chat.kvsnap --json | jq .n_tokens",
)
def info(file: str, keys: Keys, as_json: bool) -> None:
    """Tell what FILE holds: model, tokens, sizes, sampler, fidelity.

    No tensor is read and no model is needed, so this is quick for any size.
    """
    summary = kvsnap.inspect(file, key=keys.of(file))
    if as_json:
        emit(summary.to_dict())
        return
    made = table("", "")
    made.show_header = False
    for name, value in _rows(summary):
        made.add_row(f"[bold]{name}[/bold]", value)
    show_table(made)
    for note in summary.notes:
        remark(f"note: {note}")


def _rows(s: Summary) -> list[tuple[str, str]]:
    from rich.markup import escape

    logits = "stored, so the next token needs no forward pass" if s.has_logits and not s.n_pending else "not stored"
    if s.has_logits and s.n_pending:
        logits = f"stored; {count(s.n_pending, 'token')} still to be evaluated"
    # In a session the metadata may be of a turn that was cut since; `log` tells of each.
    stop = s.metadata.get("stop", "") if s.sealed else ""
    whole = ["sealed" if s.sealed else "open", "complete" if s.complete and is_whole(stop) else "last turn cut off"]
    fidelity = "exact: every bit as the engine held it" if s.exact else f"not exact: values off by up to {s.bound:.3g}"
    if s.bound == float("inf"):
        fidelity = "not exact: an approximation, without a bound on its errors"
    stored = ", ".join(
        f"{name} {size(c.stored)}" + (f" (decoded {size(c.decoded)})" if c.stored != c.decoded else "")
        for name, c in s.stored.items()
    )
    made = [
        ("file", f"{escape(s.path or '')}"),
        ("use", f"{s.use} ({', '.join(whole)}), {s.format} {s.version}, {count(s.commit, 'commit')}"),
        *([("dialect", escape(s.dialect))] if s.dialect else []),
        *([("encryption", escape(_encryption(s)))] if s.encryption else []),
        ("created", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(s.created_ns / 1e9))),
        ("architecture", escape(s.architecture) or "unknown"),
        ("cache", _cache_text(s)),
        ("heads", _heads_text(s)),
        *([("part", f"{s.shard}, of a cache split by heads")] if s.shard else []),
        ("tokens", f"{s.n_tokens:,} ({s.n_prompt:,} prompt, {s.n_generated:,} generated)"),
        ("evaluated", f"{s.n_rows:,} positions, next is {s.token_offset:,}"),
        ("logits", logits),
        ("text", "stored" if s.has_text else "not stored"),
        *([("messages", f"{s.n_messages:,}")] if s.n_messages is not None else []),
        ("size", f"{size(s.file_bytes)} in {count(s.n_spans, 'span')}; tensors {size(s.tensor_bytes)}"),
        ("stored as", stored or "nothing"),
        ("fidelity", fidelity),
        ("sampler", _sampler_text(s)),
        ("weights", f"{len(s.identity.weights)} digests" if s.identity.weights else "unknown"),
        ("made with", ", ".join([s.identity.engine or "unknown", *(escape(part) for part in _runtime(s))])),
    ]  # fmt: skip
    made += [(escape(k), escape(v)) for k, v in s.metadata.items() if k != "stop"]
    made += [("stop", STOPS.get(stop, escape(stop)))] if stop else []
    if s.dropped:
        made.append(("dropped", f"{size(s.dropped)} behind the last published turn are not part of the history"))
    return made


def _cache_text(s: Summary) -> str:
    """Return layers by kind and the dtype of the keys, of a cache of states alone that the identity names."""
    kinds = Counter(layer.kind for layer in s.layers)
    told = "" if set(kinds) <= {"attention"} else f" ({', '.join(f'{n} {kind}' for kind, n in kinds.items())})"
    return f"{s.num_layers} layers{told}, {s.dtype or (s.identity.cache_dtype if kinds else '') or 'no tensors'}"


def _heads_text(s: Summary) -> str:
    if not s.num_heads:
        return "no keys and values"
    return f"{s.num_heads} for keys and values, {s.num_query_heads} for queries, {s.head_dim} wide"


def _encryption(s: Summary) -> str:
    label = "".join(c if c.isprintable() else "?" for c in s.key_label)
    return s.encryption + (f", key {QUOTE}{label}{QUOTE}" if label else "")


def _runtime(s: Summary) -> list[str]:
    return [f"{name} {value.strip(QUOTE)}" for name, value in s.identity.runtime if value.strip(QUOTE)]


def _sampler_text(s: Summary) -> str:
    if s.sampler is None:
        return "not stored"
    settings = s.sampler.settings
    if settings.greedy:
        return "greedy"
    parts = [f"temperature {settings.temperature:g}"]
    parts += [f"top-k {settings.top_k}"] if settings.top_k else []
    parts += [f"top-p {settings.top_p:g}"] if settings.top_p < 1 else []
    parts += [f"min-p {settings.min_p:g}"] if settings.min_p else []
    parts += [f"repetition penalty {settings.repetition_penalty:g}"] if settings.repetition_penalty != 1 else []
    return f"{', '.join(parts)}; seed {s.sampler.random.seed}, {count(s.sampler.random.draws, 'number')} drawn"


# -- cat -----------------------------------------------------------------------------------------------------


@click.command()
@click.argument("file", callback=named)
@click.option("--tokens", "as_tokens", is_flag=True, help="Print token ids, one line for each run.")
@click.option("--messages", "as_messages", is_flag=True, help="Print the messages of the chat: role and content.")
@click.option("--prompt-only", is_flag=True, help="Only what was given.")
@click.option("--generated-only", is_flag=True, help="Only what the model said.")
@click.option("--model", metavar="NAME", help="Model whose tokenizer makes text of the ids.")
@key_options()
@library_option
@json_option
@examples(
    "kvsnap cat chat.kvsnap",
    "kvsnap cat chat.kvsnap --messages",
    "kvsnap cat chat.kvsnap --tokens",
    "kvsnap cat chat.kvsnap --generated-only --model smollm2",
)
def cat(
    file: str, as_tokens: bool, as_messages: bool, prompt_only: bool, generated_only: bool, model: str | None,
    keys: Keys, as_json: bool,
) -> None:  # fmt: skip
    """Print the text in FILE.

    The whole text is stored beside the ids, so no model is needed. A part of it (--prompt-only, --generated-only) is
    cut by tokens, for which the tokenizer is asked: name the model. The messages of a chat are stored as they were
    given, where they are known.
    """
    if as_messages and (as_tokens or prompt_only or generated_only):
        raise click.UsageError("--messages prints whole messages, not tokens or a part of the text")
    if prompt_only and generated_only:
        raise click.UsageError("--prompt-only and --generated-only leave nothing")
    snapshot = kvsnap.load(file, key=keys.of(file))
    if as_messages and not as_json:
        _print_messages(snapshot, file)
        return
    wanted = "prompt" if prompt_only else "generated" if generated_only else ""
    runs, start = [], 0
    for run in snapshot.runs:
        if wanted in ("", run.kind):
            runs.append((run.kind, snapshot.tokens[start : start + run.count]))
        start += run.count
    text = None if as_tokens and not as_json else _text(snapshot, runs, model, file, strict=not as_json)
    if as_json:
        emit({"n_tokens": sum(len(ids) for _, ids in runs), "runs": [{"kind": k, "tokens": i} for k, i in runs],
              "text": text, "messages": snapshot.messages})  # fmt: skip
    elif as_tokens:
        for kind, ids in runs:
            print(f"{kind}: {' '.join(map(str, ids))}")
    else:
        print(text)


def _print_messages(snapshot: Snapshot, file: str) -> None:
    if snapshot.messages is None:
        raise InputError("the messages are not known: this file does not tell them", path=file)
    for message in snapshot.messages:
        content = message.get("content")
        told = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        print(f"{message['role']}: {told}")


def _text(
    snapshot: Snapshot, runs: list[tuple[Any, tuple[int, ...]]], model: str | None, file: str, *, strict: bool
) -> str | None:
    ids = [i for _, part in runs for i in part]
    if len(ids) == len(snapshot.tokens) and snapshot.text is not None:
        return snapshot.text
    if not ids:
        return ""
    if model is None:
        if not strict:
            return None
        what = "a part of the text" if snapshot.text is not None else "text of ids: this file has no text"
        raise InputError(f"a tokenizer is needed for {what}; name one with --model, or use --tokens", path=file)
    from kvsnap.cli._model import open_engine

    return open_engine(model, None, None).detokenize(ids)


# -- head ----------------------------------------------------------------------------------------------------


@click.command()
@click.argument("file", callback=named)
@click.argument("layer", type=int)
@click.argument("head_", metavar="HEAD", type=int)
@click.option(
    "-o",
    "--output",
    metavar="PATH",
    callback=no_name,
    help="Write x.npz (k, v, positions), or x.npy as x.k.npy and x.v.npy.",
)
@key_options()
@library_option
@json_option
@examples(
    "kvsnap head chat.kvsnap 0 2",
    "kvsnap head chat.kvsnap 0 2 -o head.npz",
)
def head(file: str, layer: int, head_: int, output: str | None, keys: Keys, as_json: bool) -> None:
    """Show or export the keys and values of one HEAD of one LAYER (both count from 0).

    Keys are as the model uses them, with rope applied. Arrays are float32 [rows, head width].
    """
    if output is not None:
        if not output.endswith((".npy", ".npz")):
            raise InputError("the ending of the output says its format", expected=".npy or .npz", found=output)
        check_target(output, option="-o")
    snapshot = kvsnap.load(file, key=keys.of(file))
    found = snapshot.head(layer, head_)
    if found is None:
        heads = snapshot.layers[layer].num_heads
        raise InputError(f"layer {layer} has no such head", path=file, expected=f"0 to {heads - 1}", found=head_)
    written = [] if output is None else _export(found, output)
    stats = {"k": _stats(found.k), "v": _stats(found.v)}
    positions = [int(found.positions[0]), int(found.positions[-1])] if len(found.positions) else []
    if as_json:
        emit({"layer": layer, "head": head_, "shape": list(found.k.shape), "positions": positions, **stats,
              "bound": snapshot.bound, "written": written})  # fmt: skip
        return
    names = [name.replace("_", " ") for name in stats["k"]]
    made = table("", *names, title=f"layer {layer}, head {head_}: {found.k.shape[0]:,} rows of {found.k.shape[1]}")
    for name, row in stats.items():
        made.add_row(name, *(f"{v:,}" if isinstance(v, int) else f"{v:.5g}" for v in row.values()))
    show_table(made)
    for path in written:
        remark(f"wrote {path}")


def _stats(values: np.ndarray[Any, np.dtype[np.float32]]) -> dict[str, float | int]:
    if not values.size:
        return {"min": 0.0, "max": 0.0, "mean": 0.0, "std": 0.0, "mean_norm": 0.0, "max_norm": 0.0, "not_finite": 0}
    wide = values.astype(np.float64)
    norms = np.sqrt((wide * wide).sum(axis=-1))
    found = (wide.min(), wide.max(), wide.mean(), wide.std(), norms.mean(), norms.max())
    names = ("min", "max", "mean", "std", "mean_norm", "max_norm")
    stats: dict[str, float | int] = {n: float(v) for n, v in zip(names, found, strict=True)}
    return {**stats, "not_finite": int((~np.isfinite(values)).sum())}


def _export(found: Head, output: str) -> list[str]:
    def save(path: str, write: Any, *arrays: Any, **named: Any) -> str:
        memory = io.BytesIO()
        write(memory, *arrays, **named)
        write_whole(path, memory.getvalue())
        return path

    if output.endswith(".npz"):
        return [save(output, np.savez, k=found.k, v=found.v, positions=found.positions)]
    stem = output.removesuffix(".npy")
    return [save(f"{stem}.k.npy", np.save, found.k), save(f"{stem}.v.npy", np.save, found.v)]


# -- verify --------------------------------------------------------------------------------------------------


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", callback=named)
@key_options()
@library_option
@json_option
@examples(
    "kvsnap verify *.kvsnap",
)
def verify(files: tuple[str, ...], keys: Keys, as_json: bool) -> None:
    """Check every byte of each FILE against its checksum. Changes nothing.

    Each damaged place is named with its tensor and the tokens that it takes. Exit code 0 when all is whole, 6 when
    something live is damaged, 17 when somebody changed an encrypted file; a file that cannot be checked at all gives
    its own code. Without its key an encrypted file is checked from outside: damage shows, tampering does not.
    """
    results, code = [], 0
    for file in files:
        try:
            with progress(f"verifying {file}") as report:
                found = kvsnap.verify(file, progress=report, key=keys.of(file))
        except KvsnapError as error:
            results.append({"path": file, "ok": False, "error": error.to_dict()})
            code = code or error.exit_code
            if not as_json:
                remark(f"kvsnap: {error}")
            continue
        results.append(found.to_dict())
        code = code or (0 if found.ok else TamperedError.exit_code if found.tampered else DamagedError.exit_code)
        if as_json:
            continue
        print(f"{file}: {_verdict(found)}")
        for damage in found.damages:
            print(f"  {damage}")
        for note in found.notes:
            print(f"  note: {note}")
    if as_json:
        emit({"ok": code == 0, "files": results})
    if code:
        raise CheckFailed(code)


# -- repair --------------------------------------------------------------------------------------------------


@click.command()
@click.argument("file", callback=named)
@click.option(
    "-o", "--output", metavar="NEW", required=True, callback=no_name,
    help="Name of the new file; nothing may be there yet.",
)  # fmt: skip
@click.option("--tokens", "keep_tokens", is_flag=True, help="Keep the ids behind the damage, to be evaluated again.")
@library_option
@json_option
@examples(
    "kvsnap repair chat.kvsnap -o mended.kvsnap",
    "kvsnap repair chat.kvsnap -o mended.kvsnap --tokens",
)
def repair(file: str, output: str, keep_tokens: bool, as_json: bool) -> None:
    """Write what can be proven of a damaged FILE to a new one. FILE itself is never changed.

    Kept is the longest run of turns from the start of which every byte is as it was written. Exit code 0 when
    everything is there, 1 when something was lost, which is named; the code of the error when nothing can be kept.
    """
    with progress(f"repairing {file}") as report:
        done = kvsnap.repair(file, output, keep_tokens=keep_tokens, progress=report)
    if as_json:
        emit(done.to_dict())
    else:
        verdict = "complete" if done.complete else "NOT COMPLETE"
        pending = f", {done.n_pending:,} of them not evaluated" if done.n_pending else ""
        print(f"{output}: {verdict}, {size(done.nbytes)}, {count(done.n_turns, 'turn')}, "
              f"{count(done.n_tokens, 'token')}{pending}")  # fmt: skip
        for damage in done.lost:
            print(f"  lost: {damage}")
        for note in done.notes:
            print(f"  note: {note}")
    if not done.complete:
        raise CheckFailed(1)


def _verdict(found: VerifyReport) -> str:
    verdict = "whole" if found.ok else "TAMPERED" if found.tampered else "DAMAGED"
    if not found.opened:
        return f"{verdict} from outside, {size(found.n_bytes)}, {count(found.n_parts, 'sealed piece')}"
    inside = (count(found.n_parts, "part"), count(found.n_commits, "commit"), count(found.n_tokens, "token"))
    return ", ".join((verdict, size(found.n_bytes), *inside))


COMMANDS = (info, cat, head, verify, repair)

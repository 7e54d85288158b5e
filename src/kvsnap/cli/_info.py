"""What is in a file, without a model and without its tensors: info."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import click

import kvsnap
from kvsnap.cli._keys import Keys, key_options
from kvsnap.cli._names import library_option, named
from kvsnap.cli._output import (
    CheckFailed,
    count,
    emit,
    examples,
    json_option,
    remark,
    show_table,
    size,
    table,
)
from kvsnap.cli._turn import STOPS, is_whole
from kvsnap.errors import KvsnapError
from kvsnap.inspection import Summary
from kvsnap.inspection.geometry import quantisation_words
from kvsnap.inspection.listing import in_library
from kvsnap.results import text_of

__all__ = ["COMMANDS"]

QUOTE = '"'
Rows = list[tuple[str, str]]


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", callback=named)
@click.option("--layers", is_flag=True, help="Show each layer: heads, widths, bytes per token, bytes stored.")
@key_options()
@library_option
@json_option
@examples(
    "kvsnap info chat.kvsnap",
    "kvsnap info chat.kvsnap --layers",
    "kvsnap info *.kvsnap --json | jq '.files[] | {path, n_tokens, begins}'",
)
def info(files: tuple[str, ...], layers: bool, keys: Keys, as_json: bool) -> None:
    """Tell what each FILE holds: how it begins, model, layers, tokens, turns, sizes, fidelity, and damage that shows.

    No tensor is read and no model is needed, so this is quick for any size: `kvsnap verify` reads every byte. Of an
    encrypted file without its key, of a fork whose parent is gone, and of a file whose index is damaged, what can be
    told is told, then the error, and the exit code is that of the error.
    """
    told, code = [], 0
    for place, file in enumerate(files):
        summary = None
        try:
            summary = _summary(file, keys)
            error = summary.error
        except KvsnapError as failure:
            if len(files) == 1:
                raise
            error = {**failure.to_dict(), "exit_code": failure.exit_code}
        code = code or (0 if error is None else int(error["exit_code"]))
        told.append({"path": file, "error": error} if summary is None else summary.to_dict())
        if not as_json:
            if place:
                print()
            _show(summary, error, layers=layers)
    if as_json:
        emit(told[0] if len(files) == 1 else {"files": told})
    if code:
        raise CheckFailed(code)


def _summary(file: str, keys: Keys) -> Summary:
    found = kvsnap.inspect(file, key=keys.of(file), partial=True)
    return replace(found, library=in_library(file))


def _show(summary: Summary | None, error: Any, *, layers: bool) -> None:
    if summary is not None:
        made = table("", "")
        made.show_header = False
        for name, value in _rows(summary):
            made.add_row(f"[bold]{name}[/bold]", value)
        show_table(made)
        if layers and summary.layers:
            _show_layers(summary)
        for note in (note for note in summary.notes if note not in summary.damage):  # which is in the table
            remark(f"note: {note}")
    if error is not None:
        facts = {name: error[name] for name in ("path", "offset", "expected", "found")}
        remark(f"kvsnap: {' '.join(str(KvsnapError(error['message'], **facts)).split())}")


def _show_layers(s: Summary) -> None:
    from rich.markup import escape

    columns = (
        "layer",
        "kind",
        "roles",
        "heads",
        "width",
        "dtype",
        "window",
        "per token",
        "states",
        "stored",
        "decoded",
    )
    made = table(*columns, right=("layer", "heads", "width", "window", "per token", "states", "stored", "decoded"))
    for x in s.layers:
        roles = " ".join(x.roles) if x.shares is None else f"those of layer {x.shares}"
        made.add_row(str(x.index), x.kind, escape(roles), text_of(x.num_heads or None), text_of(x.head_dim or None),
                     x.dtype, text_of(x.window or None), _bytes(x.bytes_per_token), _bytes(x.state_bytes),
                     _bytes(x.stored), _bytes(x.decoded))  # fmt: skip
    show_table(made, spare=("states", "window", "decoded", "dtype", "roles"))


def _bytes(n_bytes: float) -> str:
    return size(n_bytes) if n_bytes else ""


def _rows(s: Summary) -> Rows:
    """Return the lines of a summary: what it is, what is in it, how it is stored, what made it, what is wrong."""
    from rich.markup import escape

    rows = [*_head_rows(s)]
    if s.error is None or s.layers:
        rows += _cache_rows(s)
    if s.error is None:
        rows += [*_content_rows(s), *_stored_rows(s), *_origin_rows(s)]
    elif s.commit:
        rows += [("tokens", f"{s.n_tokens:,} at the last commit"), ("size", size(s.file_bytes))]
    else:
        rows += [("size", size(s.file_bytes))]
    seen = s.damage if s.error is None else ()
    rows.append(("damage", "\n".join(escape(d) for d in seen) or "none that shows; tensors are not checked here"))
    return rows if s.error is None else rows[:-1]


def _head_rows(s: Summary) -> Rows:
    from rich.markup import escape

    # In a session the metadata may be of a turn that was cut since; `log` tells of each.
    stop = s.metadata.get("stop", "") if s.sealed else s.turns.last_stop if s.turns else ""
    whole = ["sealed" if s.sealed else "open"]
    if s.commit:
        whole.append("complete" if s.complete and is_whole(stop) else "last turn cut off")
    commits = f", {count(s.commit, 'commit')}" if s.commit and s.format == "native" else ""
    rows = [
        ("file", escape(s.path or "")),
        ("use", f"{s.use} ({', '.join(whole)}), {s.format} {s.version}{commits}"),
        *([("dialect", escape(s.dialect))] if s.dialect else []),
        *([("encryption", escape(_encryption(s)))] if s.encryption else []),
        *([("begins", escape(s.begins))] if s.begins else []),
        *([("ends", escape(s.ends))] if s.ends and s.ends != s.begins else []),
        *([("created", _when(s.created_ns))] if s.format == "native" and s.created_ns else []),
        *([("last commit", _when(s.committed_ns))] if s.committed_ns and not s.sealed else []),
        *([("modified", _when(s.modified_ns))] if s.modified_ns else []),
    ]
    return rows + _place_rows(s)


def _place_rows(s: Summary) -> Rows:
    from rich.markup import escape

    rows: Rows = []
    here = s.library
    if here is not None:
        names = ", ".join(f"@{name}" for name in here.names) or "no name"
        rows.append(("library", escape(f"{names}{' (pinned)' if here.pinned else ''} in {here.path}")))
    if s.fork is not None:
        names = ", ".join(f"@{name}" for name in here.parent_names) if here else ""
        parent = names or s.fork.parent
        told = f"{parent}, commit {s.fork.commit}: {count(s.fork.n_tokens, 'token')} of it, {s.fork.own_tokens:,} here"
        told += f"; through {count(s.fork.depth, 'file')}" if s.fork.depth > 1 else ""
        rows.append(("fork of", escape(told if s.fork.found else f"{told}; {s.fork.reason}")))
    if here is not None and here.n_forks:
        names = ", ".join(f"@{name}" for name in here.fork_names) or "without a name"
        rows.append(("forks", escape(f"{here.n_forks:,}: {names}")))
    return rows


def _cache_rows(s: Summary) -> Rows:
    from rich.markup import escape

    rows = [("architecture", escape(s.architecture) or "unknown"), ("cache", escape(_cache_text(s)))]
    if s.groups:
        rows.append(("layers", "\n".join(escape(group.text) for group in s.groups)))
    rows += [("part", f"{s.shard}, of a cache split by heads")] if s.shard else []
    if s.identity.cache_quantisation not in ("", "none") and not any(g.quantisation for g in s.groups):
        rows.append(("quantised", escape(quantisation_words(s.identity.cache_quantisation))))
    return rows


def _cache_text(s: Summary) -> str:
    """Return the dtype of the keys, of a cache of states alone that the identity names, and what a token takes."""
    dtype = s.dtype or (s.identity.cache_dtype if s.layers else "") or "no tensors"
    grows = sum(group.bytes_per_token for group in s.groups)
    states = sum(group.state_bytes for group in s.groups)
    told = [f"{count(s.num_layers, 'layer')}, {dtype}"]
    told += [f"{size(grows)} per token"] if grows else []
    told += [f"{size(states)} that do not grow"] if states else []
    return ", ".join(told)


def _content_rows(s: Summary) -> Rows:
    logits = "stored, so the next token needs no forward pass" if s.has_logits and not s.n_pending else "not stored"
    if s.has_logits and s.n_pending:
        logits = f"stored; {count(s.n_pending, 'token')} still to be evaluated"
    rows = [
        ("tokens", f"{s.n_tokens:,} ({s.n_prompt:,} prompt, {s.n_generated:,} generated)"),
        ("evaluated", f"{s.n_rows:,} positions, next is {s.token_offset:,}"
                      + (f"; {count(s.n_pending, 'token')} pending" if s.n_pending else "")),
    ]  # fmt: skip
    if s.turns is not None and not s.sealed:
        rows.append(("turns", _turns_text(s)))
    rows += [("logits", logits), ("text", "stored" if s.has_text else "not stored")]
    return rows + ([("messages", f"{s.n_messages:,}")] if s.n_messages is not None else [])


def _turns_text(s: Summary) -> str:
    t = s.turns
    assert t is not None  # noqa: S101 # the caller looked
    told = f"{t.n_live:,} ({t.n_complete:,} complete, {t.n_cut_off:,} cut off)"
    told += f", {t.n_inherited:,} of them of its parents" if t.n_inherited else ""
    told += "," if t.n_inherited and t.n_on_the_way else ""
    told += f" and {count(t.n_on_the_way, 'part')} published on the way" if t.n_on_the_way else ""
    told += f"; {t.n_dropped:,} more {'was' if t.n_dropped == 1 else 'were'} cut away since" if t.n_dropped else ""
    if t.last_operation != "append":
        return f"{told}; last came a {t.last_operation}"
    return f"{told}; last one: {STOPS[t.last_stop]}" if t.last_stop in STOPS else told


def _stored_rows(s: Summary) -> Rows:
    from rich.markup import escape

    fidelity = "exact: every bit as the engine held it" if s.exact else f"not exact: values off by up to {s.bound:.3g}"
    if s.bound == float("inf"):
        fidelity = "not exact: an approximation, without a bound on its errors"
    stored = [
        f"{name} {size(c.stored)}" + (f" (decoded {size(c.decoded)})" if c.stored != c.decoded else "")
        + (f", off by up to {c.bound:.3g}" if 0 < c.bound < float("inf") and len(s.stored) > 1 else "")
        for name, c in s.stored.items()
    ]  # fmt: skip
    roles: Counter[str] = Counter()
    for part in s.parts:
        roles[part.role] += part.stored
    by_role = ", ".join(f"{role} {size(n)}" for role, n in roles.most_common())
    rest = s.file_bytes - s.stored_bytes
    above = s.fork.above_bytes if s.fork else 0
    whole = f"{size(s.file_bytes)} in {count(s.n_spans, 'span')}; tensors {size(s.tensor_bytes)}"
    whole += f"; {size(above)} in the files above" if above else ""
    gone = "tables, text, and what was cut away" if not s.sealed else "tables and text"
    whole += f"; {size(rest)} for {gone}" if not above and rest > 0 else ""
    rows = [("size", whole), ("stored as", escape(", ".join(stored)) or "nothing")]
    return rows + ([("by role", escape(by_role))] if len(roles) > 1 else []) + [("fidelity", fidelity)]


def _origin_rows(s: Summary) -> Rows:
    from rich.markup import escape

    unknown = _unknown(s)
    rows = [
        ("sampler", escape(_sampler_text(s))),
        ("weights", f"{len(s.identity.weights)} digests" if s.identity.weights else "unknown"),
        *([("not known", f"{unknown}: a restore cannot compare them")] if unknown else []),
        ("made with", ", ".join(escape(part) for part in (s.identity.engine or "unknown", *_runtime(s)))),
    ]
    rows += [(escape(k), escape(v)) for k, v in s.metadata.items() if k != "stop"]
    stop = s.metadata.get("stop", "") if s.sealed else ""
    return rows + ([("stop", STOPS.get(stop, escape(stop)))] if stop else [])


def _unknown(s: Summary) -> str:
    """Return what of the identity is not known; where that is most of it, what is known."""
    known, unknown = ([n.replace("_", " ") for n in names] for names in (s.identity_known, s.identity_unknown))
    if len(unknown) <= len(known):
        return ", ".join(unknown)
    return f"everything but {', '.join(known)}" if known else "everything"


def _when(time_ns: int) -> str:
    """Return a time here, with its zone, and how long ago that was."""
    told = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(time_ns / 1e9))
    return f"{told} ({_age(time.time() - time_ns / 1e9)})"


def _age(seconds: float) -> str:
    for unit, length in (("year", 365.25 * 86400), ("day", 86400.0), ("hour", 3600.0), ("minute", 60.0)):
        if seconds >= length:
            return f"{count(int(seconds // length), unit)} ago"
    return "just now" if seconds >= 0 else "in the future of this clock"


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


COMMANDS = (info,)

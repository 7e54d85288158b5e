"""The public functions: files, engines, and the way between them. `import kvsnap` offers them all."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from kvsnap import editing, sampling
from kvsnap.drafts import same_beginning, with_draft
from kvsnap.editing import Rope
from kvsnap.engines.connect import connect
from kvsnap.errors import InputError, UnsupportedError
from kvsnap.filing import LossReport, convert, dumps, inspect, load, loads, repair, save, verify
from kvsnap.inspection import Growth
from kvsnap.inspection.growth import growing
from kvsnap.inspection.growth.configuration import read_configuration
from kvsnap.layout import Sampler, Snapshot
from kvsnap.protocols import Engine, Progress, Token
from kvsnap.restoring import Restored, check, ids_of, restore, reuse
from kvsnap.shards import join, split

__all__ = [
    "LossReport",
    "Restored",
    "Rope",
    "capture",
    "check",
    "connect",
    "convert",
    "dumps",
    "generate",
    "growth",
    "inspect",
    "join",
    "load",
    "loads",
    "remove",
    "repair",
    "restore",
    "reuse",
    "save",
    "split",
    "verify",
    "warm_from_tokens",
]


def capture(
    engine: Engine,
    *,
    row: int = 0,
    start: int = 0,
    settle: bool = False,
    draft: Engine | None = None,
    progress: Progress | None = None,
) -> Snapshot:
    """Copy the live state of an engine out, with its text where the engine has a tokenizer.

    `row` picks a sequence of a batch. `start` leaves out the rows before it (for `Session.append`). With `settle` the
    pending token is evaluated first, so that after a restore the next token needs no forward pass; the continuation is
    the same. With `draft` the state of that engine, which proposes ids for this one, is kept too, as far as it is of
    the same ids (`restore(..., draft=)`). `progress` is told of the weights that are digested, in bytes. Raise
    `UnsupportedError` naming a layer that cannot be captured exactly.
    """
    if settle:
        engine.settle()
    told: dict[str, Any] = {} if progress is None else {"progress": progress}
    snapshot = engine.capture(start=start, row=row, **told)
    if draft is not None:
        snapshot = with_draft(snapshot, same_beginning(draft.capture(**told), snapshot))
    if snapshot.text is not None:
        return snapshot
    try:
        return replace(snapshot, text=engine.detokenize(snapshot.tokens))
    except InputError:  # no tokenizer: ids are all there is
        return snapshot


def growth(
    source: str | os.PathLike[str] | Snapshot | Engine | Mapping[str, Any],
    *,
    lengths: Iterable[int] | None = None,
    dtype: str | None = None,
    encoder_rows: int | None = None,
    key: bytes | None = None,
    check: Snapshot | Engine | bool = False,
) -> Growth:
    """Tell how a cache grows with the length of its sequence: bytes per token, and totals at each of `lengths`.

    `source` is a cache file of any format (a session tells its turns too), a snapshot, an engine, or a configuration:
    the path of a `config.json` or of a model directory, or its settings as a mapping. No tensor is read, no model is
    loaded. `lengths` are 1,024, 8,192, 32,768 and 131,072 tokens where none are given. What is there is compared with
    the figures (`Growth.checked`): the tensors of a file or an engine with the rule that they should follow, and with
    what the settings say that they were made with.

    A configuration is compared with `check`: a capture, an engine, or True for a model of these settings that
    transformers runs without weights, shapes alone (as large as it is, in seconds, without its memory). `dtype`
    replaces that of the rows of a configuration; `encoder_rows` is the length of the encoder's output, which
    cross-attention keeps rows of. Raise as `load` does for files, `InputError` for a length below 0 and for settings
    that are missing, `UnsupportedError` naming what is not understood in a configuration, or a model that cannot be run
    without weights.
    """
    if isinstance(check, bool):
        made = growing.growth(source, lengths=lengths, dtype=dtype, encoder_rows=encoder_rows, key=key)
        return _checked_without_weights(source, made) if check else made
    return growing.growth(source, lengths=lengths, dtype=dtype, encoder_rows=encoder_rows, key=key, check=check)


_LONGEST_PASS = 16384
"""Positions of one pass without weights; a longer window is not filled."""


def _checked_without_weights(source: Any, made: Growth) -> Growth:
    from kvsnap.engines._tf_shapes import FEW, shapes_of  # needs the extra

    if made.source_kind != "configuration":
        raise InputError(
            "only a configuration is checked by a model without weights",
            expected="a config.json", found=f"a {made.source_kind}",
        )  # fmt: skip
    config = source if isinstance(source, Mapping) else read_configuration(source)
    tensors = [tensor for layer in made.layers for tensor in layer.tensors]
    window = max((t.spec.window for t in tensors), default=0)
    states = any(t.kind == "state" for t in tensors)  # a scan takes a step for each position
    more = window + 1 if window and not states and window <= _LONGEST_PASS else 1
    layers, count = shapes_of(config, made.dtype, max(more, FEW))
    found = growing.compared("a model without weights", made.layers, layers, count)
    return replace(made, checked=(*made.checked, found))


def remove(
    snapshot: Snapshot,
    spans: Sequence[tuple[int, int]],
    *,
    rope: Rope | Sequence[Rope | None] | None = None,
    engine: Engine | None = None,
    positions: Literal["close", "keep"] = "close",
    accept: Sequence[str] = (),
) -> Snapshot:
    """Take spans of tokens `[(start, stop), ...]` out of a snapshot: an approximation, and labelled as one.

    See `kvsnap.editing.remove`. With `engine` the frequencies come from its model, which must be that of the snapshot
    (checked as `restore` does, with `accept`), and the text is made anew. Raise as that does, `CompatibilityError`, and
    `UnsupportedError` for a model whose rotation is not known.
    """
    if engine is None:
        return editing.remove(snapshot, spans, rope=rope, positions=positions)
    if rope is None and positions == "close" and editing.needs_rope(snapshot, spans):
        report = check(snapshot, engine, accept=accept)
        if report.refusals:
            report.raise_if_refused()
        known = getattr(engine, "rope", None)
        if known is None:
            raise UnsupportedError(
                f"the engine {engine.name} does not tell how it rotates keys: give it (rope=Rope(...))"
            )
        rope = known()
    edited = editing.remove(snapshot, spans, rope=rope, positions=positions)
    try:
        return edited if edited is snapshot else replace(edited, text=engine.detokenize(edited.tokens))
    except InputError:  # no tokenizer
        return edited


def warm_from_tokens(engine: Engine, tokens: Sequence[int], *, progress: Progress | None = None) -> Restored:
    """Evaluate a token history again: the fallback where a cache cannot be used. Never exact.

    Raise `InputError` for an empty history or ids outside the vocabulary, `ContextError` when it does not fit.
    """
    ids = tuple(int(t) for t in tokens)
    started = time.perf_counter()
    engine.warm(ids, progress)
    note = "evaluated again from the token history; values can differ from the saved ones in the last bits"
    return Restored(0, len(ids), False, None, (note,), 0.0, time.perf_counter() - started)


def generate(
    engine: Engine,
    prompt: str | Sequence[int] = "",
    *,
    max_tokens: int,
    sampler: Sampler | None = None,
    stop_at_end: bool = True,
) -> Iterator[Token]:
    """Evaluate `prompt` (text or ids; empty: go on from the state) and yield up to `max_tokens` tokens.

    The prompt is evaluated before this returns, so that its errors are raised here. `sampler` replaces settings and
    random state; None keeps those of the engine (a restored engine goes on with the saved ones). Leaving the iterator
    at any token leaves the engine in a state that `capture` saves whole. Raise `InputError` (nothing to go on from, ids
    outside the vocabulary, `max_tokens` below 1), `ContextError` with both numbers.
    """
    if max_tokens < 1:
        raise InputError("max_tokens is too small", expected="1 or more", found=max_tokens)
    ids: tuple[int, ...]
    if isinstance(prompt, str):
        ids = engine.tokenize(prompt, special=not engine.tokens) if prompt else ()
    else:
        ids = ids_of(prompt)
    if not ids and not engine.tokens:
        raise InputError("nothing to go on from: the prompt is empty and the engine holds no tokens")
    settings = None if sampler is None else sampling.start(sampler)
    if ids:
        engine.prefill(ids)
    if settings is not None:
        engine.sampler = settings
    return _tokens(engine, max_tokens, stop_at_end)


def _tokens(engine: Engine, max_tokens: int, stop_at_end: bool) -> Iterator[Token]:
    for _ in range(max_tokens):
        token = engine.step()
        yield token
        if token.end and stop_at_end:
            return

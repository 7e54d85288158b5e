"""What an encoding of a cache costs the model: what it predicts over a text from one cache, and from another.

The text is evaluated behind each cache in the same passes, teacher-forced: whatever the model would choose, the next id
is that of the text. So both sides are judged at the same places, and a difference comes from the caches alone.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvsnap import formats
from kvsnap.codecs import codec_of_name
from kvsnap.errors import CompatibilityError, ContextError, InputError, UnsupportedError
from kvsnap.files import status
from kvsnap.formats import colikv, native
from kvsnap.identity import compare
from kvsnap.inspection.checking import non_finite
from kvsnap.inspection.quality.answers import Named, Quality, effect_of, mean_of, perplexity_of
from kvsnap.inspection.quality.divergence import Divergence, Prediction, apart, joined, predicted
from kvsnap.inspection.summary import summarise
from kvsnap.layout import RandomState, Sampler, SamplerState, Snapshot, Tensor, numpy_dtype
from kvsnap.protocols import Engine, Progress, Scoring
from kvsnap.runs import common_length

__all__ = ["MOST_BYTES", "ROUNDED", "quality", "stored_bytes"]

StrPath = str | os.PathLike[str]
Source = Snapshot | StrPath
Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

MOST_BYTES = 4 << 30
"""Bytes of float32 logits of the reference that are held while others are compared; more is refused."""
ROUNDED = ("bfloat16", "float16")
"""Dtypes that values can be rounded to, for a yardstick."""
_FEW = 100
"""Places of which a note says that they are few."""
_GREEDY = SamplerState(Sampler(), RandomState(0))
_UNNAMED = "snapshot"
"""What a cache is called that lies in no file."""


@runtime_checkable
class _Scores(Protocol):
    """An ability that not every engine has: `kvsnap.protocols.Scoring`, by its methods."""

    def aside(self) -> AbstractContextManager[None]: ...

    def score(self, ids: Sequence[int]) -> Iterator[Logits]: ...


def quality(
    reference: Source,
    others: Source | Sequence[Source],
    engine: Engine,
    *,
    codec: str | Sequence[str] = (),
    rounded: str | Sequence[str] = (),
    continuation: str | Sequence[int] | None = None,
    last: int | None = None,
    n_tokens: int = 256,
    accept: Sequence[str] = (),
    progress: Progress | None = None,
) -> Quality:
    """Tell what other encodings of a history cost the model, against the reference: KL, agreement, perplexity.

    `reference` and `others` are snapshots, or paths of files, of the same tokens. `codec` names codecs that the
    reference is encoded with in memory, as a file would hold it: `quality(snapshot, (), engine, codec="q8")`; `rounded`
    dtypes (`bfloat16`, `float16`) that the values which a lossy codec takes are rounded to and back, as a yardstick of
    this model. The text behind the history is `continuation` (text or ids), or with `last` the last so many tokens of
    the history itself, which every cache is cut by; without either it is what the model generates from the reference,
    always its most probable token. Of a text no more than `n_tokens` places are compared. The first id of it is only
    evaluated: how probable it is stands in logits that were there before.

    The engine must be that of the snapshots: identity is checked as `restore` does, `accept` takes fields on. Its live
    sequence is untouched, and takes memory beside the one cache that is evaluated and 4 x places x vocabulary bytes of
    logits. Values that are no numbers are told in `notes`; places whose logits are none are left out and counted.

    Raise `CompatibilityError`, `ContextError`; `InputError` for other tokens, a text that is too short, more than
    `MOST_BYTES` of logits; `UnsupportedError` for an engine that scores no text, and with `last` naming what cannot be
    cut there.
    """
    able = _able(engine)
    given = [others] if isinstance(others, Snapshot | str | os.PathLike) else list(others)
    codecs, dtypes = ([names] if isinstance(names, str) else list(names) for names in (codec, rounded))
    if not given and not codecs and not dtypes:
        raise InputError("nothing to compare the reference with: give another cache, or a codec")
    if continuation is not None and last is not None:
        raise InputError("a text of its own and the last tokens of the history exclude each other")
    if n_tokens < 1:
        raise InputError("n_tokens is too small", expected="1 or more", found=n_tokens)
    whole, named = _opened(reference)
    opened = [(whole, named), *(_opened(one) for one in given), *(_encoded(whole, one) for one in codecs)]
    opened += [_rounded(whole, one) for one in dtypes]
    caches, known = _aligned([cache for cache, _ in opened], last)
    with able.aside():
        notes = _checked([(cache, named.name) for cache, named in opened], able, accept)
        judge = _Judge(able, cast="dtype" in accept, progress=progress)
        if last is not None:
            source, text = "last", known
        elif continuation is not None:
            source, text = "given", (*known, *_ids_of(able, continuation))
        else:
            source, text = "own", (*known, *judge.own(whole, n_tokens + 1 - len(known), len(caches)))
            notes.append("the text is the model's own, of which it is surer than of any other: give one to judge by")
        if last is None and len(text) > n_tokens + 1:
            notes.append(f"of the text {n_tokens:,} of {len(text) - 1:,} places are compared")
            text = text[: n_tokens + 1]
        return judge.quality(list(zip(caches, [named for _, named in opened], strict=True)), text, source, notes)


def _able(engine: Engine) -> Scoring:
    if not isinstance(engine, _Scores):
        name = getattr(engine, "name", type(engine).__name__)
        raise UnsupportedError(f"the engine {name} does not evaluate a given text with the logits of each place")
    return cast("Scoring", engine)


# -- the caches ----------------------------------------------------------------------------------------------------


def _opened(source: Source) -> tuple[Snapshot, Named]:
    if isinstance(source, Snapshot):
        return source, Named(name=str(source.source.get("path") or _UNNAMED), bound=source.bound)
    if not isinstance(source, str | os.PathLike):
        raise InputError("a cache is a snapshot or the path of a file", found=type(source).__name__)
    path = os.fspath(source)
    found = formats.format_of(path).load(path)
    return found, Named(name=path, stored_bytes=stored_bytes(path), bound=found.bound)


def stored_bytes(path: StrPath, *, key: bytes | None = None) -> int | None:
    """Return the length of a file that holds one cache and nothing else, None for a session."""
    return status(path).st_size if summarise(path, key=key).sealed else None


def _encoded(snapshot: Snapshot, codec: str) -> tuple[Snapshot, Named]:
    """Return what a file of this codec would hold, by way of its bytes in memory."""
    data = native.dumps(snapshot, codec=codec)
    found = native.loads(data)
    return found, Named(name=f"codec {codec}", codec=codec, stored_bytes=len(data), bound=found.bound)


def _rounded(snapshot: Snapshot, dtype: str) -> tuple[Snapshot, Named]:
    """Return a snapshot whose values are rounded to a dtype and back, as far as they are what `q8` stores."""
    if dtype not in ROUNDED:
        raise InputError("not a dtype to round to", expected=", ".join(ROUNDED), found=dtype)
    worst, layers = 0.0, []
    for layer in snapshot.layers:
        made = []
        for tensor in layer.tensors:
            if not codec_of_name("q8").applies(tensor.spec):
                made.append(tensor)
                continue
            values = tensor.values()
            with np.errstate(over="ignore", invalid="ignore"):
                after = values.astype(numpy_dtype(dtype)).astype(values.dtype)
                off = np.abs(np.asarray(after, dtype=np.float32) - np.asarray(values, dtype=np.float32))
            worst = max(worst, float(np.nanmax(off, initial=0)))
            made.append(Tensor(tensor.spec, after, start=tensor.start, bound=tensor.bound))
        layers.append(replace(layer, tensors=tuple(made)))
    return replace(snapshot, layers=tuple(layers)), Named(name=f"rounded to {dtype}", bound=worst)


def _aligned(caches: Sequence[Snapshot], last: int | None) -> tuple[list[Snapshot], tuple[int, ...]]:
    """Return the caches with equally many rows and nothing pending, and the known ids behind those rows."""
    tokens = max((cache.tokens for cache in caches), key=len)
    evaluated = [len(cache.tokens) - cache.n_pending for cache in caches]
    rows_before = {cache.n_rows - n for cache, n in zip(caches, evaluated, strict=True)}
    for number, cache in enumerate(caches):
        same = common_length(caches[0].tokens, cache.tokens)
        if same < max(evaluated[0], evaluated[number]):
            raise InputError(
                f"the caches are not of the same history: cache {number} and the reference part at token {same}",
                expected=caches[0].tokens[same : same + 4] or "the end",
                found=cache.tokens[same : same + 4] or "the end",
            )  # fmt: skip
        if cache.encoder_input != caches[0].encoder_input:
            raise InputError(
                "the caches are of two inputs of the encoder", expected=caches[0].encoder_input,
                found=cache.encoder_input,
            )  # fmt: skip
    if len(rows_before) > 1:
        raise InputError("the caches hold different numbers of rows for the same tokens", found=sorted(rows_before))
    stop = min(evaluated)
    if last is not None:
        if not 2 <= last < len(tokens):
            raise InputError("not so many tokens can be judged", expected=f"last: 2 to {len(tokens) - 1}", found=last)
        stop = min(stop, len(tokens) - last)
    if stop < 1:
        raise InputError("there is no cache to judge: no token is evaluated", found=f"{len(tokens)} tokens")
    return [cache.truncate(stop) for cache in caches], tokens[stop:]


def _checked(caches: Sequence[tuple[Snapshot, str]], engine: Scoring, accept: Sequence[str]) -> list[str]:
    """Raise `CompatibilityError` for the named cache of another model; return what was accepted, a sentence each."""
    found, told = engine.identity(), []
    for cache, name in caches:
        facts: dict[str, Any] = {
            "needed": cache.token_offset, "limit": engine.context_limit, "shard": str(cache.shard or "")
        }  # fmt: skip
        try:
            compare(cache.identity, found, accept=accept, **facts).raise_if_refused()
        except (CompatibilityError, ContextError) as error:
            error.path = error.path or (name if name != _UNNAMED else None)
            raise
        told += [f"accepted: {f}" for f in compare(cache.identity, found, **facts).refusals]
    return list(dict.fromkeys(told))


def _notes(cache: Snapshot, *, of_reference: bool = False) -> list[str]:
    """Return what is to be said of a cache: values that are no numbers, an error that it had before."""
    bad = non_finite(cache)
    more = f"; and {len(bad) - 4} more tensors" if len(bad) > 4 else ""
    told = [f"it holds values that are no numbers: {'; '.join(map(str, bad[:4]))}{more}"] if bad else []
    if of_reference and cache.bound:
        told.append(f"the reference itself was stored with errors of up to {cache.bound:.3g}")
    return told


def _ids_of(engine: Scoring, text: str | Sequence[int] | None) -> tuple[int, ...]:
    if isinstance(text, str):
        return engine.tokenize(text, special=False)
    try:
        return tuple(operator.index(i) for i in text or ())
    except TypeError as error:
        raise InputError("a continuation is text or a list of token ids", found=error) from error


# -- the model -----------------------------------------------------------------------------------------------------


class _Judge:
    """An engine that is asked about one text behind several caches, the reference first."""

    def __init__(self, engine: Scoring, *, cast: bool, progress: Progress | None) -> None:
        self._engine, self._cast, self._progress = engine, cast, progress
        self._ids: Ids = np.empty(0, dtype=np.int64)
        self._targets: Ids = self._ids
        self._logits: Logits = np.empty((0, 0), dtype=np.float32)
        self._n = self._done = self._total = 0

    def own(self, cache: Snapshot, count: int, n_caches: int) -> tuple[int, ...]:
        """Return up to `count` ids that the model generates from a cache, always its most probable one."""
        engine, ids = self._engine, list[int]()
        limit, taken = engine.context_limit, cache.token_offset + cache.n_pending
        if limit is not None:
            count = min(count, max(1, limit - taken))
        engine.install(_placed(cache, engine), cast=self._cast)
        engine.sampler = _GREEDY
        while len(ids) < count:
            try:
                token = engine.step()
            except InputError as error:
                raise InputError(
                    "nothing can be generated from the reference: give a text to judge by", found=error
                ) from error
            ids.append(token.id)
            self._advance(1, count * (1 + n_caches))
            if token.end:
                break
        return tuple(ids)

    def quality(
        self, caches: Sequence[tuple[Snapshot, Named]], text: Sequence[int], source: str, notes: Sequence[str]
    ) -> Quality:
        """Evaluate a text behind each of the caches, the reference first, and compare."""
        self._begin(text, len(caches))
        whole, named = caches[0]
        mine = self._predictions(whole)
        others = [
            effect_of(replace(one, notes=tuple(_notes(cache))), self._compared(cache), mine, self._text_of)
            for cache, one in caches[1:]
        ]
        good = mine.nll[mine.chosen >= 0]
        nll, _ = mean_of(good)
        told = [*_notes(whole, of_reference=True), *notes]
        if self._n < _FEW:
            told.append(f"{self._n} places are few: their mean says little about other texts")
        return Quality(
            reference=named.name, architecture=whole.architecture, stored_bytes=named.stored_bytes, bound=named.bound,
            n_history=whole.n_rows, n=self._n, n_bad=self._n - len(good), source=source, text=self._text_of(*text),
            nll=nll, perplexity=perplexity_of(nll), others=tuple(others), notes=tuple(told), ids=self._ids,
            targets=self._targets, nlls=mine.nll,
        )  # fmt: skip

    def _begin(self, text: Sequence[int], n_caches: int) -> None:
        """Take a text. Raise `InputError` for one that cannot be judged."""
        if len(text) < 2:
            raise InputError("the text is too short to be judged", expected="2 ids or more", found=len(text))
        n, vocab = len(text) - 1, self._engine.vocab_size
        if 4 * n * vocab > MOST_BYTES:
            raise InputError(
                f"the logits of {n:,} places take {4 * n * vocab:,} bytes",
                expected=f"at most {MOST_BYTES // (4 * vocab):,} places", found=n,
            )  # fmt: skip
        wrong = next((i for i in text if not 0 <= i < vocab), None)
        if wrong is not None:
            raise InputError("the text has an id outside the vocabulary", expected=f"0 to {vocab - 1}", found=wrong)
        self._ids = np.array(text[:-1], dtype=np.int64)
        self._targets = np.array(text[1:], dtype=np.int64)
        self._n, self._total = n, self._done + n * n_caches

    def _predictions(self, cache: Snapshot) -> Prediction:
        """Evaluate the text behind the reference, whose logits are kept."""
        for first, block in self._blocks(cache):
            if not first:
                self._logits = np.empty((self._n, block.shape[1]), dtype=np.float32)
            self._logits[first : first + len(block)] = block
        return predicted(self._logits, self._targets)

    def _compared(self, cache: Snapshot) -> Divergence:
        """Evaluate the text behind another cache, in the same passes, and compare block by block."""
        found = []
        for first, block in self._blocks(cache):
            part = slice(first, first + len(block))
            found.append(apart(self._logits[part], block, self._targets[part]))
        return joined(found)

    def _text_of(self, *ids: int) -> str | None:
        """Return the text of ids, None without a tokenizer."""
        try:
            return self._engine.detokenize(ids)
        except InputError:
            return None

    def _blocks(self, cache: Snapshot) -> Iterator[tuple[int, Logits]]:
        engine, first = self._engine, 0
        engine.install(_placed(cache, engine), cast=self._cast, prefix=True)
        for block in engine.score(self._ids.tolist()):
            yield first, block
            first += len(block)
            self._advance(len(block), self._total)

    def _advance(self, count: int, total: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, total)


def _placed(cache: Snapshot, engine: Engine) -> Snapshot:
    """Return a cache for `install`: a `.coli_kv` file does not tell which layers own its index rows."""
    if not colikv.has_loose_rows(cache):
        return cache
    return colikv.assign_like(cache, engine.capture(start=engine.n_rows))

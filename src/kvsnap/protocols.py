"""What an engine, a codec and a format must offer. Each method's comment is its contract.

Everything here is synchronous. Unless a method says otherwise it may be called from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvsnap.identity import Identity
from kvsnap.layout import SamplerState, Snapshot
from kvsnap.reach import Reach
from kvsnap.tensors import Layer, TensorSpec

__all__ = [
    "Codec",
    "Described",
    "Drafting",
    "Encoded",
    "Engine",
    "Format",
    "Installed",
    "Loss",
    "Progress",
    "Scoring",
    "Sink",
    "Token",
    "Verifying",
]

Progress = Callable[[int, int], None]
"""Called with (done, total), in bytes or tokens, from the thread that does the work; must return quickly."""


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token: id, the text it adds (may be empty inside a multi-byte character), and its log-probability.

    `logprob` is the natural log of the probability under the model at temperature 1, before any sampler step. `end` is
    True for an end-of-text id of the model.
    """

    id: int
    text: str
    logprob: float
    end: bool = False


@dataclass(frozen=True, slots=True)
class Installed:
    """What `install` did: rows reused as they were saved, and ids that must be evaluated before the next token.

    `recomputed` counts evaluated positions whose rows could not be reused. `notes` say why, one sentence each.
    """

    reused: int
    recomputed: int
    notes: tuple[str, ...] = ()


@runtime_checkable
class Engine(Protocol):
    """One model and the live state of one sequence. The engine owns the decode loop, logits, and random state.

    State: `tokens` (all ids seen), of which the last `n_pending` are not evaluated yet; `n_rows` evaluated positions;
    logits of the last evaluated position, or none. A fresh engine holds no tokens.
    """

    name: str
    """Short name of the engine: `transformers`, `llamacpp`, `mlx`."""
    sampler: SamplerState
    """Settings and random state used by `step`. Assigning replaces both."""
    forwards: int
    """Forward passes made since the engine was connected; never reset."""
    evaluated: int
    """Positions evaluated in those passes."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """All ids of the live sequence."""

    @property
    def n_rows(self) -> int:
        """Positions evaluated."""

    @property
    def n_pending(self) -> int:
        """Ids at the end of `tokens` that are not evaluated yet (usually 0 or 1)."""

    @property
    def context_limit(self) -> int | None:
        """Positions that the model holds; None where it has no limit."""

    @property
    def vocab_size(self) -> int:
        """Ids are 0..vocab_size-1."""

    def identity(self, progress: Progress | None = None) -> Identity:
        """Digest the weights as loaded now, and the settings.

        Reads every weight at each call: nothing is remembered.
        """

    def tokenize(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Ids of a text; `special` adds what the tokenizer puts around a first text.

        `InputError` without a tokenizer.
        """

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included. `InputError` without a tokenizer."""

    def render(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True, **options: Any) -> tuple[int, ...]:
        """Ids of a conversation under the model's chat template; with `answer` ready for an answer.

        `options` are what the template takes: `tools`, `enable_thinking`, ... `InputError` without a template, and for
        messages that it does not take.
        """

    def reset(self) -> None:
        """Forget the sequence. Sampler and counters stay."""

    def prefill(self, ids: Sequence[int]) -> None:
        """Evaluate pending ids and then `ids` (prompt); afterwards nothing is pending and logits are there.

        All or nothing: on an error (ids outside the vocabulary, context full: both numbers named) the state is as
        before. Several passes may be made; the split depends on the length only.
        """

    def reach(self, n_tokens: int) -> Reach:
        """Tell what `rewind` to `n_tokens` would keep, or to the nearest length below that can be reached.

        Reads no row. `InputError` outside 0..len(tokens).
        """

    def rewind(self, n_tokens: int) -> Installed:
        """Cut the live sequence to its first `n_tokens` tokens, in memory; sampler and random state stay.

        Without logits behind the last row `prefill` goes on; `step` and `settle` evaluate that row again. `InputError`
        outside 0..len(tokens), `UnsupportedError` for a length that a layer cannot be cut to.
        """

    def step(self) -> Token:
        """Choose one token with the sampler; it is appended as pending.

        Evaluates what is pending first. With nothing pending and logits there, no forward pass is made. `InputError`
        on an empty sequence, `ContextError` when the context is full; the state is then as before.
        """

    def settle(self) -> None:
        """Evaluate what is pending, so that the logits of the next token are there. Nothing pending: does nothing."""

    def capture(self, *, start: int = 0, row: int = 0, progress: Progress | None = None) -> Snapshot:
        """Copy the state out: tensors from row `start` on, tokens, runs, positions, logits, sampler, identity.

        The arrays are the snapshot's own: later steps do not change them. `row` picks a sequence of a batch; its
        padding is left out, or the capture is refused with `UnsupportedError`. `progress` tells of the weights that
        are digested. Changes nothing live.
        """

    def install(
        self,
        snapshot: Snapshot,
        progress: Progress | None = None,
        *,
        cast: bool = False,
        rows: int = 1,
        prefix: bool = False,
    ) -> Installed:
        """Put a snapshot in place of the live sequence, atomically.

        Everything is read and checked into fresh memory, then swapped in; on any error the live state is as before.
        Identity is the caller's business (`kvsnap.restore` checks it); geometry is checked here: layer count, shapes,
        dtypes, ids against the vocabulary, context. The snapshot is not changed by later steps. Without stored logits
        and with nothing pending, the last row is given up and evaluated again (`recomputed` 1); with `prefix` it stays,
        because ids are prefilled next. `rows` puts it into so many rows of a batch. Random state and settings of the
        sampler are restored when the snapshot has them.
        """

    def warm(self, ids: Sequence[int], progress: Progress | None = None) -> None:
        """Forget the sequence and evaluate `ids` instead; all or nothing, as `prefill`."""


@runtime_checkable
class Described(Protocol):
    """An engine that tells what it keeps without copying it."""

    def layout(self) -> tuple[Layer, ...]:
        """Return what each layer holds now: tensors with their sizes, whose values cannot be read.

        () where only a pass tells, before there was one. No weight and no row is read. `UnsupportedError` for a batch.
        """

    def configuration(self) -> Mapping[str, Any]:
        """Return the settings of the model, as its `config.json` has them."""


class Drafting(Engine, Protocol):
    """An engine that can propose ids for another one."""

    def ahead(self) -> AbstractContextManager[None]:
        """Put back, at the end, whatever is evaluated inside: rows, ids, logits, sampler; any layers can."""

    def tokenizer_digest(self) -> str:
        """Digest of the tokenizer, as in the identity; empty without one. Hashed at each call."""


class Verifying(Drafting, Protocol):
    """An engine that can check proposed ids, several in one pass."""

    def check_verify(self) -> None:
        """Raise `UnsupportedError` naming what keeps this model from checking several proposals in one pass."""

    def verify(self, ids: Sequence[int]) -> None:
        """Evaluate what is pending and then `ids`, as proposals for what comes next; `take` chooses.

        The tokens stay as they are. All or nothing. `ContextError` where the proposals and one id more do not fit.
        """

    def take(self) -> Token | None:
        """Choose one token, as `step` does, from what the last `verify` evaluated; None when there is no more of it.

        While the tokens are the proposals, one after the other, their rows stay, and so does what is left of the pass;
        a token behind the last proposal ends it, and so does any other call that looks at the state or changes it.
        """


class Scoring(Engine, Protocol):
    """An engine that can evaluate a given text, and tell what it expected at each place of it."""

    def aside(self) -> AbstractContextManager[None]:
        """Put the live sequence aside, sampler and all, and take it up again at the end, whatever is done inside.

        Inside, the engine holds no tokens. Nothing is copied: two sequences are in memory where one is installed.
        """

    def score(self, ids: Sequence[int]) -> Iterator[npt.NDArray[np.float32]]:
        """Evaluate what is pending and then `ids`, whatever the model would choose, and yield the logits behind each.

        Yields blocks float32 `[n, vocab]`, in order, one row for each of `ids`, in memory of their own. How many ids
        share a pass depends on the model and on the length only; where passes of several ids differ from those of one
        beyond the last bits, each id has its own. A block that was yielded is part of the sequence; one that fails
        leaves the sequence behind the last block. Ids outside the vocabulary (`InputError`), and more than the context
        holds (`ContextError`), are refused before anything is evaluated; after another change of the sequence the next
        block is refused (`ConflictError`).
        """


@dataclass(frozen=True, slots=True)
class Encoded:
    """One encoded part: its bytes in order (buffers; views where possible).

    `exact` tells whether decoding returns the same bits; `bound` is otherwise the largest absolute error of any value,
    infinity where none is known.
    """

    buffers: tuple[memoryview | npt.NDArray[Any] | bytes, ...]
    nbytes: int
    exact: bool
    bound: float


class Codec(Protocol):
    """How the bytes of a part are stored. Stateless; methods may be called from several threads at once."""

    id: int
    """Number on disk: append-only, listed in docs/spec/file.md section 7."""
    name: str
    """Name for people and options: `exact`, `q8`."""
    expansion: int
    """Decoded bytes are at most this many times the stored ones: the bound on what a hostile file makes us allocate."""

    def applies(self, spec: TensorSpec) -> bool:
        """Tell whether this codec is meant for such a tensor; others are stored exactly."""

    def encode(self, spec: TensorSpec, values: npt.NDArray[Any]) -> Encoded:
        """Encode `values` (any strides, dtype of the spec).

        May return views of `values`, which the caller keeps alive.
        """

    def stored_size(self, spec: TensorSpec, n_rows: int) -> int | None:
        """Exact number of bytes that `encode` will return for `n_rows` rows, or None where it depends on the values."""

    def usual_size(self, spec: TensorSpec, n_rows: int) -> int:
        """Number of bytes for `n_rows` rows whose values are all finite, for figures told beforehand."""

    def decode(self, spec: TensorSpec, data: memoryview, out: npt.NDArray[Any]) -> None:
        """Decode all of `data` into `out` (shape with its rows, dtype of the spec, any strides).

        `data` was checked against its checksum; the codec still checks every count in it against the bytes that are
        there and raises `DamagedError`. Allocates nothing that `out` and `data` do not bound.
        """

    def cut(self, spec: TensorSpec, data: memoryview, n_rows: int, kept: int) -> npt.NDArray[np.uint8]:
        """Return the stored bytes of the first `kept` of the `n_rows` rows in `data`: they decode to the same bits.

        Nothing is encoded again. `data` was checked as for `decode`.
        """


@dataclass(frozen=True, slots=True)
class Loss:
    """One thing that a file format cannot hold.

    `kind` is `field` (left out), `dtype` (another one is stored), `precision` (values change, by at most `bound`) or
    `rows` (rows or positions are left out). `what` names it (`sampler`, `layers.3.index`), `detail` says it in a
    sentence.
    """

    kind: str
    what: str
    detail: str
    bound: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data; a bound that is not known before the values are read is null."""
        bound = self.bound if self.bound != float("inf") else None
        return {"kind": self.kind, "what": self.what, "detail": self.detail, "bound": bound}


class Format(Protocol):
    """A file format: how a file becomes a snapshot and back. Stateless."""

    name: str
    """Name for options and reports: `native`, `mlxkv`, `colikv`, `safetensors`."""
    codecs: tuple[str, ...]
    """Names that `codec=` takes, the default first."""

    def sniff(self, head: bytes) -> bool:
        """Tell from the first 64 bytes (fewer in a shorter file) whether this is such a file. Never from its name."""

    def load(self, path: str, *, mmap: bool = True) -> Snapshot:
        """Open a file. Every count is checked against the bytes that are there before anything is allocated.

        Tensors may be read when they are first used. Raise `FormatError` (with offset and field), `VersionError`,
        `DamagedError`, `MissingError`. What the file says and a snapshot has no field for is kept in `Snapshot.source`.
        """

    def loads(self, data: bytes | bytearray | memoryview) -> Snapshot:
        """The same, from bytes."""

    def losses(self, snapshot: Snapshot, *, codec: str | None = None, version: int | None = None) -> tuple[Loss, ...]:
        """Tell what would be lost by writing this snapshot. Reads no tensor bytes."""

    def write(
        self,
        snapshot: Snapshot,
        sink: Sink,
        *,
        codec: str | None = None,
        version: int | None = None,
        byte_order: str | None = None,
        progress: Progress | None = None,
        vocab: int | None = None,
    ) -> int:
        """Write a whole file into an empty sink, tensor by tensor; return its length in bytes.

        `vocab` is the size of the vocabulary, for formats that store it when the snapshot does not know it; others
        ignore it.
        Options that the format does not have are refused with `InputError`. What cannot be held is left out (`losses`
        told it); what cannot be written at all raises `UnsupportedError` before anything is written.
        """


class Sink(Protocol):
    """Positional writes. Ranges are written once, in any order; gaps between them are written too, later or earlier."""

    def write_at(self, buffers: Sequence[Any], offset: int) -> int:
        """Write all buffers one behind the other at `offset`; return the number of bytes. Raises `StorageError`."""

"""Looking at the attention of an engine: of a prompt, or of a generation while it runs."""

from __future__ import annotations

import operator
import os
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvsnap import files
from kvsnap.attention import AttentionSnapshot, LayerAttention, Wanted
from kvsnap.errors import InputError, UnsupportedError
from kvsnap.protocols import Engine

__all__ = ["Probe", "inspect_attention", "probe", "save_attention"]


class Probe(Protocol):
    """What a probe has seen; it can be asked inside the context, and after it."""

    def snapshot(self) -> AttentionSnapshot:
        """Return the attention of what was evaluated so far. Raise `InputError` where nothing was."""


@runtime_checkable
class _Attending(Protocol):
    """An engine that shows its attention: an ability that not every engine has."""

    def attend(self, ids: Sequence[int], wanted: Wanted, *, behind: bool = False) -> AttentionSnapshot: ...

    def observe(self, wanted: Wanted) -> AbstractContextManager[Probe]: ...


def inspect_attention(
    engine: Engine,
    prompt: str | Sequence[int],
    *,
    behind: bool = False,
    weights: bool = False,
    values: bool = False,
    layers: Sequence[int] | None = None,
    last: int | None = None,
) -> AttentionSnapshot:
    """Evaluate `prompt` (text or ids) and return keys and queries of every layer and head, as attention compares them.

    From an empty sequence, as go-mlx's `InspectAttention` does; with `behind` behind what the engine holds, pending ids
    first: then keys of all rows are there, and queries of the new ones. The live sequence is afterwards as it was
    before. `weights` and `values` keep those too, `layers` only some layers, `last` the queries and weights of so many
    rows at the end: weights take `query heads x queries x rows` floats for each layer.

    Arrays are float32, whatever the dtype of the model; no value is rounded by that. Keys are those of the cache, bit
    for bit, where it keeps keys. Raise `UnsupportedError` naming a model or an engine that does not show its attention,
    `InputError` for an empty prompt, ids outside the vocabulary or no such layer, `ContextError` where it does not fit.
    """
    wanted = Wanted.of(weights=weights, values=values, layers=layers, last=last)
    able = _able(engine)
    if isinstance(prompt, str):
        ids = engine.tokenize(prompt, special=not (behind and engine.tokens)) if prompt else ()
    else:
        try:
            ids = tuple(operator.index(i) for i in prompt)
        except TypeError as error:
            raise InputError("a prompt is text or a list of token ids", found=error) from error
    return able.attend(ids, wanted, behind=behind)


@contextmanager
def probe(
    engine: Engine,
    *,
    weights: bool = False,
    values: bool = False,
    layers: Sequence[int] | None = None,
    last: int | None = None,
) -> Iterator[Probe]:
    """Record the attention of all that the engine evaluates inside the context.

    `snapshot()` of what it yields gives the rows of the sequence, with a query for each row evaluated inside; options
    are those of `inspect_attention`, `last` counts from the end of the sequence. Ids, logits and the cache are what
    they are without a probe, and nothing in the model stays changed, however the context is left. Probes may be nested.
    Steps that failed are not in it, nor rows that were cut by a rewind; after `reset`, `restore` or another cache it
    begins anew. Calls of the model past the engine are not seen.

    Raise `UnsupportedError` and `InputError` as `inspect_attention` does, before anything is evaluated; a pass whose
    calls are not those of one sequence raises `UnsupportedError`, and is undone.
    """
    wanted = Wanted.of(weights=weights, values=values, layers=layers, last=last)
    with _able(engine).observe(wanted) as seen:
        yield seen


def _able(engine: Engine) -> _Attending:
    if not isinstance(engine, _Attending):
        name = getattr(engine, "name", type(engine).__name__)
        raise UnsupportedError(f"the engine {name} does not show its attention")
    return engine


# -- the arrays as a file ------------------------------------------------------------------------------------------


def save_attention(snapshot: AttentionSnapshot, path: str | os.PathLike[str]) -> int:
    """Write the arrays to an `.npz` file, for `numpy.load`, whole or not at all; return its length in bytes.

    Its names are `architecture`, `tokens`, `positions`, and for each layer that was kept `layer.N.keys`, `.queries`,
    `.query_rows`, `.first_row`, `.scaling`, and `.values` and `.weights` where they were kept; of cross-attention they
    begin with `cross.N`. Nothing in it is compressed or pickled. Raise `InputError`, `MissingError` and `StorageError`
    as `save` does.
    """

    def content(writer: files.Writer) -> None:
        stream: Any = _Stream(writer)
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
            for name, array in _named(snapshot):
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)

    return files.write_whole(path, content)


class _Stream:
    """A file that is only written, from its start to its end."""

    def __init__(self, writer: files.Writer) -> None:
        self._writer = writer

    def write(self, data: Any) -> int:
        self._writer.write(data)
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Do nothing: the writer keeps nothing back."""


def _named(snapshot: AttentionSnapshot) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    yield "architecture", np.array(snapshot.architecture)
    yield "tokens", np.array(snapshot.tokens, dtype=np.int64)
    yield "positions", snapshot.positions
    for kind, layers in (("layer", snapshot.layers), ("cross", snapshot.cross)):
        for layer in layers:
            if not layer.missing:
                yield from ((f"{kind}.{layer.index}.{name}", array) for name, array in _arrays(layer))


def _arrays(layer: LayerAttention) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    yield "keys", layer.keys
    yield "queries", layer.queries
    yield "query_rows", layer.query_rows
    yield "first_row", np.array(layer.first_row, dtype=np.int64)
    yield "scaling", np.array(layer.scaling)
    if layer.values is not None:
        yield "values", layer.values
    if layer.weights is not None:
        yield "weights", layer.weights

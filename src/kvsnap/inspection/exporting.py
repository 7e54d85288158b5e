"""The rows of one head as a table with their numbers, positions and ids; written as .npy, .npz, .csv or .parquet."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap import formats
from kvsnap.errors import ExtraMissingError, FormatError, InputError
from kvsnap.files import write_whole
from kvsnap.inspection.values import HeadRows, head_rows, narrow
from kvsnap.layout import Layer, Snapshot
from kvsnap.results import Result, Table

__all__ = ["ENDINGS", "HeadTable", "head_table", "refuse_cache", "targets_of"]

ENDINGS = (".npy", ".npz", ".csv", ".parquet")
"""Endings of file names, each a format that a table is written in."""
_WIDEST = 65_536
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadTable(Result):
    """The rows of one head of one layer. `values` are float32 `[rows, width]` by name: `k` and `v`, or a role.

    `rows` are the numbers of the rows in the sequence, int64 `[rows]`; of a row that stands for several tokens the
    first. `positions` and `tokens` are None where rows are no tokens of the sequence (a state, an encoder's rows);
    a token that the file does not know is -1. `bound` is the largest error that storing may have put into a value.
    """

    layer: int
    head: int
    values: Mapping[str, npt.NDArray[np.float32]]
    rows: Counts
    positions: Counts | None
    tokens: Counts | None
    bound: float

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Return each column by its name: `row`, `position`, `token` where known, `k_0` ..., `v_0` ...

        Raise `InputError` for rows of more than 65,536 values: a file of no rows may say any width.
        """
        if (width := sum(values.shape[1] for values in self.values.values())) > _WIDEST:
            raise InputError("too wide for a table: .npz and .npy take any width", expected=_WIDEST, found=width)
        made: dict[str, npt.NDArray[Any]] = {"row": self.rows}
        if self.positions is not None:
            made["position"] = self.positions
        if self.tokens is not None:
            made["token"] = self.tokens
        for name, values in self.values.items():
            made.update({f"{name}_{i}": values[:, i] for i in range(values.shape[1])})
        return made

    def tables(self) -> tuple[Table, ...]:
        """Return the rows; None for a token that is not known."""
        columns = self.columns()
        listed = [c.tolist() for c in columns.values()]
        if self.tokens is not None:
            place = list(columns).index("token")
            listed[place] = [None if token < 0 else token for token in listed[place]]
        title = f"layer {self.layer}, head {self.head}"
        return (Table(title, tuple(columns), tuple(zip(*listed, strict=True))),)

    def to_pandas(self) -> Any:
        """Return the rows as a `pandas.DataFrame` with the dtypes of the columns; a token not known is missing.

        Raise `ExtraMissingError` without pandas (the extra `tables`).
        """
        try:
            import pandas as pd  # noqa: PLC0415 # an extra
        except ImportError as error:
            raise ExtraMissingError("pandas is not installed: pip install 'kvsnap[tables]'") from error
        made = pd.DataFrame(self.columns())
        if self.tokens is not None:
            made["token"] = made["token"].astype("Int64").mask(self.tokens < 0)
        return made

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> tuple[str, ...]:
        """Write the rows, durably, each file whole or not at all; return the names of the files.

        The ending says how: `.csv` and `.parquet` hold the columns (`.parquet` typed, with layer and head in its
        metadata), `.npz` arrays (`k`, `v`, `rows`, `positions`, `tokens`), `.npy` one array: x.npy of two names is
        written as x.k.npy and x.v.npy. Raise `InputError` for another ending, or for a name that is taken unless
        `overwrite`; `ExtraMissingError` without pyarrow (the extra `tables`); `StorageError`.
        """
        names = targets_of(path, tuple(self.values))
        taken = next((name for name in names if os.path.lexists(name) and not overwrite), None)
        if taken is not None:
            raise InputError("there is a file of this name: use another name, or overwrite it", path=taken)
        for name in names:
            refuse_cache(name)
        contents = self._contents(os.fspath(path))
        for name, content in zip(names, contents, strict=True):
            write_whole(name, [content], new=not overwrite)
        return names

    def _contents(self, path: str) -> list[bytes]:
        if path.endswith(".npy"):
            return [_npy(values) for values in self.values.values()]
        if path.endswith(".npz"):
            known: dict[str, Any] = {"rows": self.rows, "positions": self.positions, "tokens": self.tokens}
            arrays: dict[str, Any] = {**self.values, **{k: v for k, v in known.items() if v is not None}}
            memory = io.BytesIO()
            np.savez(memory, **arrays)
            return [memory.getvalue()]
        return [self._csv() if path.endswith(".csv") else self._parquet()]

    def _csv(self) -> bytes:
        columns = self.columns()
        texts = [c.astype(str).tolist() for c in columns.values()]  # the shortest text that reads back as the same bits
        if self.tokens is not None:
            place = list(columns).index("token")
            texts[place] = ["" if token < 0 else str(token) for token in self.tokens.tolist()]
        lines = [",".join(columns), *(",".join(row) for row in zip(*texts, strict=True))]
        return ("\n".join(lines) + "\n").encode()

    def _parquet(self) -> bytes:
        try:
            import pyarrow as pa  # noqa: PLC0415 # an extra
            from pyarrow import parquet  # noqa: PLC0415 # an extra
        except ImportError as error:
            raise ExtraMissingError("pyarrow is not installed: pip install 'kvsnap[tables]'") from error
        arrays = {
            name: pa.array(column, mask=column < 0 if name == "token" else None)
            for name, column in self.columns().items()
        }
        told = {"kvsnap.layer": str(self.layer), "kvsnap.head": str(self.head), "kvsnap.bound": repr(self.bound)}
        memory = io.BytesIO()
        parquet.write_table(pa.table(arrays).replace_schema_metadata(told), memory)
        return memory.getvalue()


def refuse_cache(path: str) -> None:
    """Raise `InputError` where a cache file has this name: what is told about caches never takes the place of one."""
    if not os.path.isfile(path):
        return
    try:
        found = formats.format_of(path)
    except FormatError:
        return
    raise InputError("this is a cache file, which would be lost: use another name", path=path, found=found.name)


def _npy(values: npt.NDArray[Any]) -> bytes:
    memory = io.BytesIO()
    np.save(memory, values)
    return memory.getvalue()


def targets_of(path: str | os.PathLike[str], names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the files that a table with these values is written to. Raise `InputError` for an unknown ending."""
    text = os.fspath(path)
    if not text.endswith(ENDINGS):
        raise InputError("the ending of the output says its format", expected=", ".join(ENDINGS), found=text)
    if text.endswith(".npy") and len(names) > 1:
        return tuple(f"{text.removesuffix('.npy')}.{name}.npy" for name in names)
    return (text,)


def head_table(
    snapshot: Snapshot,
    layer: int,
    head: int,
    *,
    role: str | None = None,
    rows: tuple[int | None, int | None] = (None, None),
) -> HeadTable:
    """Return the rows of one head of one layer: keys and values as `Snapshot.head` gives them, or those of a `role`.

    A latent layer answers as one head: `k` the latent rows, `v` the rope rows. `role` is one that the layer has
    (`latent`, `rope`, `index`, `cross_k`, `recurrent`, ...). `rows` are the first row of the sequence that is wanted
    and the one behind the last; None for the first and the last there is. Reads the tensors of that layer, checked.
    Raise `InputError` for a layer, head or role that is not there, listing what is.
    """
    if not snapshot.layers:
        raise InputError("this cache has no layers", found=f"layer {layer}")
    if not 0 <= layer < len(snapshot.layers):
        raise InputError("no such layer", expected=f"0 to {len(snapshot.layers) - 1}", found=layer)
    entry = snapshot.layers[layer]
    if entry.shares is not None:
        entry = snapshot.layers[entry.shares]
    found = list(head_rows(_alone(snapshot, entry)))
    pairs = {"k": ("k", "latent"), "v": ("v", "rope")} if role is None else {role: (role,)}
    chosen = {name: _of_head(found, roles, head) for name, roles in pairs.items()}
    here = {name: one for name, one in chosen.items() if one is not None}
    if len(here) < len(pairs) or not next(iter(here.values())).dim:  # values may be of no width, keys not
        raise _none_such(entry, found, layer, head, role)
    first = next(iter(here.values()))
    if any(not np.array_equal(one.row_numbers(), first.row_numbers()) for one in here.values()):
        told = ", ".join(f"{one.n_rows} of {name}" for name, one in here.items())
        raise InputError(f"layer {layer} has keys and values of different rows: name one with role", found=told)
    wanted = _wanted(first, rows)
    values = {name: _values(one, head, wanted) for name, one in here.items()}
    numbers = first.row_numbers()[wanted]
    positions = tokens = None
    if first.grows:
        positions = snapshot.positions_of(numbers)
        tokens = _tokens(snapshot, numbers)
    bound = max(one.bound for one in here.values())
    return HeadTable(
        layer=layer, head=head, values=values, rows=numbers, positions=positions, tokens=tokens, bound=bound
    )  # fmt: skip


def _alone(snapshot: Snapshot, entry: Layer) -> Snapshot:
    """Return the snapshot with one of its layers, so that no other is read; of heads beside a slab the heads.

    `Snapshot.head` answers with them, as the readers do that the format comes from.
    """
    return replace(snapshot, layers=(replace(entry, tensors=entry.by_head or entry.tensors, by_head=()),))


def _of_head(found: list[HeadRows], roles: tuple[str, ...], head: int) -> HeadRows | None:
    for wanted in roles:
        for one in found:
            if one.role == wanted and one.first_head <= head < one.first_head + one.n_heads:
                return one
    return None


def _none_such(entry: Layer, found: list[HeadRows], layer: int, head: int, role: str | None) -> InputError:
    heads: dict[str, int] = {}
    for one in found:
        heads[one.role] = max(heads.get(one.role, 0), one.first_head + one.n_heads)
    if role is not None and role not in heads:
        told = ", ".join(heads) or "none"
        return InputError(f"layer {layer} has no rows of this role", expected=told, found=role)
    n_heads = heads.get(role, 0) if role else entry.num_heads
    if not n_heads:
        told = f"; it has {', '.join(heads)}: name one with role" if heads else ""
        return InputError(f"layer {layer} ({entry.kind}) has no keys and values{told}", found=head)
    if not heads:
        dtypes = ", ".join(dict.fromkeys(t.spec.dtype for t in entry.tensors))
        return InputError(f"layer {layer} ({entry.kind}) holds no keys and values as floats", found=dtypes)
    return InputError(f"layer {layer} has no such head", expected=f"0 to {n_heads - 1}", found=head)


def _wanted(one: HeadRows, rows: tuple[int | None, int | None]) -> slice:
    """Return which of the rows that are held lie in a range of the sequence."""
    numbers = one.row_numbers()
    first, stop = rows
    if (first is not None and first < 0) or (stop is not None and stop < (first or 0)):
        raise InputError("rows are from a first one to one behind the last", expected="0 <= A <= B", found=rows)
    low = 0 if first is None else int(np.searchsorted(numbers, first))
    high = len(numbers) if stop is None else int(np.searchsorted(numbers, stop))
    return slice(low, high)


def _values(one: HeadRows, head: int, wanted: slice) -> npt.NDArray[np.float32]:
    if wanted == slice(0, one.n_rows):
        return np.array(narrow(one.values()[head - one.first_head]))
    pieces = [np.zeros((0, one.dim), np.float32)]
    spans = [(wanted.start, wanted.stop)] if wanted.start < wanted.stop else []
    pieces += [block[head - one.first_head] for _, block in one.blocks_of(spans)]
    return np.concatenate(pieces)


def _tokens(snapshot: Snapshot, rows: Counts) -> Counts:
    """Return the id of each row; -1 for one that is not stored, as the first ones of some foreign files are not."""
    unstored = snapshot.n_rows + snapshot.n_pending - len(snapshot.tokens)
    ids = np.asarray(snapshot.tokens, dtype=np.int64)
    places = rows - unstored
    inside = (places >= 0) & (places < len(ids))
    found = np.full(len(rows), -1, dtype=np.int64)
    found[inside] = ids[places[inside]]
    return found

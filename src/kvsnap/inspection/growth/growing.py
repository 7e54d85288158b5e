"""The growth of anything that holds a cache, or will: a file, a snapshot, a live model, a configuration."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from kvsnap import formats
from kvsnap.errors import FormatError, InputError, UnsupportedError
from kvsnap.files import Reader
from kvsnap.formats import native
from kvsnap.formats.native.turns import walk
from kvsnap.identity import Identity
from kvsnap.inspection.growth.answers import (
    LENGTHS,
    Checked,
    Growth,
    LayerGrowth,
    TensorGrowth,
    TurnGrowth,
    kind_of,
    points_of,
    what_of,
)
from kvsnap.inspection.growth.configuration import Configured, configured, json_of, read_configuration
from kvsnap.inspection.growth.settings import INSIDE, text_settings
from kvsnap.inspection.summary import load_as
from kvsnap.layout import Snapshot
from kvsnap.protocols import Described, Engine
from kvsnap.quantised import Quantisation, shape_of
from kvsnap.tensors import INPUT_NAMES, Layer, Tensor

__all__ = ["compared", "growth", "layers_of"]

StrPath = str | os.PathLike[str]


def growth(
    source: StrPath | Snapshot | Engine | Mapping[str, Any],
    *,
    lengths: Iterable[int] | None = None,
    dtype: str | None = None,
    encoder_rows: int | None = None,
    key: bytes | None = None,
    check: Snapshot | Engine | None = None,
) -> Growth:
    """Tell how a cache grows with the length of its sequence: bytes per token, and totals at each of `lengths`.

    `source` is a cache file of any format (a session tells its turns too), a snapshot, an engine, or a configuration:
    the path of a `config.json` or of a model directory, or its settings as a mapping. No tensor is read, and no model
    is loaded. What is there is compared with the figures: the tensors of a file or an engine with the rule that they
    should follow, and with what the settings say that they were made with; `check` is a capture, or an engine, to
    compare a configuration with.

    `dtype` replaces that of the rows of a configuration, `encoder_rows` is the length of the encoder's output for
    cross-attention. Raise as `load` does for files, `InputError` for a length below 0 and settings that are missing,
    `UnsupportedError` naming what is not understood in a configuration.
    """
    if isinstance(source, Snapshot):
        made = _of_snapshot(source, "snapshot", "snapshot")
    elif isinstance(source, Mapping):
        made = _of_configuration(source, "configuration", dtype, encoder_rows)
    elif isinstance(source, str | os.PathLike):
        made = _of_path(Path(source), dtype, encoder_rows, key)
    elif isinstance(source, Engine):
        made = _of_engine(source)
    else:
        raise InputError(
            "no cache, and nothing that will have one",
            expected="a path, a snapshot, an engine, or the settings of a model", found=type(source).__name__,
        )  # fmt: skip
    if dtype is not None and made.source_kind != "configuration":
        raise InputError("the dtype of a cache that is there cannot be chosen", expected=made.dtype, found=dtype)
    checks = made.checked
    if check is not None:
        checks = (*checks, _check(made, check))
    chosen = LENGTHS if lengths is None else tuple(lengths)
    return replace(made, points=points_of(made.layers, chosen), checked=checks)


# -- from each kind of source ----------------------------------------------------------------------------------------


def _of_configuration(config: Mapping[str, Any], name: str, dtype: str | None, encoder_rows: int | None) -> Growth:
    found = configured(config, dtype, encoder_rows)
    return Growth(
        source=name, source_kind="configuration", architecture=found.architecture, dtype=found.dtype,
        layers=found.layers, context_limit=found.context_limit, encoder_rows=found.encoder_rows, notes=found.notes,
    )  # fmt: skip


def _of_path(path: Path, dtype: str | None, encoder_rows: int | None, key: bytes | None) -> Growth:
    if os.path.isdir(path) or (path.suffix == ".json" and os.path.isfile(path) and not _is_cache(path)):
        return _of_configuration(read_configuration(path), str(path), dtype, encoder_rows)
    found = formats.format_of(path)
    made = _of_snapshot(load_as(found, path, key), str(path), "file")
    return replace(made, history=_history(path)) if found.name == native.NAME else made


def _is_cache(path: Path) -> bool:
    with suppress(FormatError):
        formats.format_of(path)
        return True
    return False


_RECORD, _FOOTER = 64, 64  # spec sections 3 and 11


def _history(path: Path) -> tuple[TurnGrowth, ...]:
    with Reader(path) as reader:
        if not native.is_session(reader):
            return ()
    found = []
    with closing(native.NativeFile.open(path, mapped=False)) as file:
        for commit, offset in walk(file.commit, file.end.footer.commit_offset, file.header, file.reader):
            end = offset + _RECORD + len(commit.pack()) + _FOOTER
            found.append(
                TurnGrowth(
                    commit=commit.number, operation=commit.operation_name, n_tokens=commit.n_tokens,
                    n_rows=commit.n_rows, file_bytes=end, time_ns=commit.time_ns,
                )
            )  # fmt: skip
    return tuple(reversed(found))


def _of_snapshot(snapshot: Snapshot, name: str, kind: str) -> Growth:
    notes = []
    if snapshot.row_start:
        notes.append(f"a partial capture: rows before {snapshot.row_start:,} are not in it, and it was not checked")
    if snapshot.shard is not None:
        notes.append(f"all figures are those of {snapshot.shard}")
    layers = layers_of(snapshot.layers)
    made = Growth(
        source=name, source_kind=kind, architecture=snapshot.architecture, dtype=_dtype(layers), layers=layers,
        encoder_rows=_encoder_rows(snapshot.layers), notes=tuple(notes),
    )  # fmt: skip
    if snapshot.row_start or not layers:
        return made
    checks = [compared("its own tensors", layers, snapshot.layers, snapshot.n_rows)]
    if snapshot.shard is None and snapshot.identity.config:
        checks += _against_settings(_unflattened(snapshot.identity), made, snapshot.layers, snapshot.n_rows)
    return replace(made, checked=tuple(checks))


def _of_engine(engine: Engine) -> Growth:
    if not isinstance(engine, Described):
        return replace(_of_snapshot(engine.capture(), engine.name, "engine"), context_limit=engine.context_limit)
    held, config = engine.layout(), engine.configuration()
    layers = layers_of(held)
    if not held:
        found = configured(config)
        return Growth(
            source=engine.name, source_kind="engine", architecture=found.architecture, dtype=found.dtype,
            layers=found.layers, context_limit=engine.context_limit, encoder_rows=found.encoder_rows,
            notes=(*found.notes, "the model has made no pass yet: this is what its settings say"),
        )  # fmt: skip
    made = Growth(
        source=engine.name, source_kind="engine", architecture=text_settings(config).family, dtype=_dtype(layers),
        layers=layers, context_limit=engine.context_limit, encoder_rows=_encoder_rows(held),
    )  # fmt: skip
    checks = [compared("its own tensors", layers, held, engine.n_rows)] if engine.n_rows else []
    checks += _against_settings(config, made, held, engine.n_rows)
    return replace(made, checked=tuple(checks))


def _against_settings(config: Mapping[str, Any], made: Growth, held: Sequence[Layer], n_rows: int) -> Iterator[Checked]:
    """Yield a comparison with what the settings say, where they are understood and the rows are no codes."""
    if any(layer.quantisation for layer in held):
        return
    with suppress(InputError, UnsupportedError):
        found: Configured = configured(config, made.dtype, made.encoder_rows)
        yield compared("the settings of its model", found.layers, held, n_rows)


def _unflattened(identity: Identity) -> dict[str, Any]:
    """Return settings as a configuration nests them; the family is that of the identity, which leaves it out."""
    config: dict[str, Any] = {}
    for name, text in identity.config:
        *places, last = name.split(".")
        inner = config
        for place in places:
            inner = inner.setdefault(place, {})
            if not isinstance(inner, dict):
                return {}
        try:
            inner[last] = json_of(text)
        except ValueError:  # a file may say anything
            return {}
    inner = config
    while (inside := next((n for n in INSIDE if isinstance(inner.get(n), dict)), None)) is not None:
        inner = inner[inside]
    inner["model_type"] = identity.architecture
    return config


def _dtype(layers: Sequence[LayerGrowth]) -> str:
    of_rows = (t.spec.dtype for layer in layers for t in layer.tensors if t.kind not in ("state", "other", "codes"))
    of_codes = (t.spec.dtype for layer in layers for t in layer.tensors if t.role in ("residual", "conv"))
    return next(of_rows, None) or next(of_codes, "")


def _encoder_rows(layers: Sequence[Layer]) -> int | None:
    return next((t.n_rows for layer in layers for t in layer.tensors if t.role == "cross_k"), None)


# -- layers that are there -------------------------------------------------------------------------------------------


def layers_of(layers: Iterable[Layer]) -> tuple[LayerGrowth, ...]:
    """Return the rule of each tensor in these layers. No tensor is read."""
    return tuple(_layer_of(layer) for layer in layers)


def _layer_of(layer: Layer) -> LayerGrowth:
    own = [tensor for tensor in layer.tensors if tensor.name not in INPUT_NAMES]
    tensors = tuple(_coded(layer, own) if layer.quantisation else _plain(own))
    return LayerGrowth(
        index=layer.index, kind=layer.kind, what=what_of(tensors, layer.shares), tensors=tensors, shares=layer.shares
    )


def _plain(tensors: Sequence[Tensor]) -> Iterator[TensorGrowth]:
    groups = [t.spec.tokens_per_row for t in tensors if t.spec.grows and t.spec.tokens_per_row > 1]
    seen = {"buffer": 0, "overlap": 0}
    for tensor in tensors:
        spec, group = tensor.spec, 0
        held: Literal["", "rest", "last"] = ""
        if spec.role in seen and spec.growth == "replaced" and groups:
            # Two for each set of rows, values and gates, in the order of the sets.
            group = groups[min(seen[spec.role] // 2, len(groups) - 1)]
            seen[spec.role] += 1
            held = "rest" if spec.role == "buffer" else "last"
        elif spec.grows and spec.tokens_per_row > 1:
            group = spec.tokens_per_row
        yield TensorGrowth(kind=kind_of(spec), spec=spec, group=group, held=held, fixed_rows=tensor.n_rows)


def _coded(layer: Layer, tensors: Sequence[Tensor]) -> Iterator[TensorGrowth]:
    """Yield the rules of a layer that keeps codes, as they are when all rows are codes: behind a prefill.

    Raise `FormatError` where its tensors are not two of each kind, or do not fit each other.
    """
    how = Quantisation.of(layer.quantisation)
    for of_values in (0, 1):
        shape_of(layer, of_values=bool(of_values))
    seen: dict[str, int] = {}
    widths = [t.spec.shape[0] * t.spec.shape[2] for t in tensors if t.role == "residual"]
    for tensor in tensors:
        spec = tensor.spec
        of_values = seen[spec.role] = seen.get(spec.role, -1) + 1
        if spec.role == "residual" or how.kind == "fp8":
            yield TensorGrowth(kind="codes", spec=spec, fixed_rows=0)
            continue
        packed = spec.role == "code" and how.by_rows(bool(of_values))
        group = how.group * (how.per_number if packed else 1)
        yield TensorGrowth(kind="codes", spec=spec, group=group, held="codes", values=widths[min(of_values, 1)])


# -- checks ----------------------------------------------------------------------------------------------------------


def _check(made: Growth, against: Snapshot | Engine) -> Checked:
    if isinstance(against, Snapshot):
        if against.row_start:
            raise InputError(
                "a partial capture has not all rows to compare with", found=f"rows from {against.row_start}"
            )
        name, held, n_rows = "a capture", against.layers, against.n_rows
    else:
        name, n_rows = against.name, against.n_rows
        held = against.layout() if isinstance(against, Described) else against.capture().layers
        if not n_rows:
            raise InputError("this engine holds nothing to compare with: evaluate some tokens first")
    return compared(name, made.layers, held, n_rows)


def compared(against: str, expected: Sequence[LayerGrowth], held: Sequence[Layer], n_rows: int) -> Checked:
    """Compare the rules of layers with the tensors that are held after `n_rows` positions: each shape, dtype, length.

    `held` are the layers of a capture of a whole sequence. A window may hold more rows than its rule says.
    """
    faults: list[str] = []
    predicted = most = actual = count = 0
    if len(expected) != len(held):
        faults.append(f"expected {len(expected)} layers, found {len(held)}")
    for rule, layer in zip(expected, held, strict=False):
        own = [tensor for tensor in layer.tensors if tensor.name not in INPUT_NAMES]
        place = f"layer {layer.index}"
        if rule.kind != layer.kind:
            faults.append(f"{place}: expected the kind {rule.kind}, found {layer.kind}")
        if len(rule.tensors) != len(own):
            faults.append(f"{place}: expected {len(rule.tensors)} tensors, found {len(own)}")
        as_rows = next((t.n_rows for t in own if t.role == "residual"), 0) if layer.quantisation else 0
        for tensor, found in zip(rule.tensors, own, strict=False):
            n = n_rows - as_rows
            least = as_rows if tensor.role == "residual" else tensor.rows(n)
            longest = as_rows if tensor.role == "residual" else max(least, tensor.most_rows(n))
            fault = _fault(tensor, found, least, longest)
            if fault:
                faults.append(f"{place}: {found.role}: {fault}")
            count += 1
            predicted += tensor.spec.nbytes(least)
            most += tensor.spec.nbytes(longest if tensor.spec.window else least)
            actual += found.nbytes
    return Checked(
        against=against, n_tokens=n_rows, layers=len(held), tensors=count, predicted=predicted, most=most,
        actual=actual, faults=tuple(faults),
    )  # fmt: skip


def _fault(rule: TensorGrowth, found: Tensor, least: int, longest: int) -> str:
    """Return what is other in a tensor than its rule says; empty if nothing is."""
    for name in ("role", "dtype", "axes", "shape", "growth", "tokens_per_row", "window"):
        wanted, there = getattr(rule.spec, name), getattr(found.spec, name)
        if wanted != there:
            return f"expected {name} {wanted}, found {there}"
    longest = longest if rule.spec.window else least
    if rule.spec.row_axis >= 0 and not least <= found.n_rows <= longest:
        wanted = f"{least}" if least == longest else f"{least} to {longest}"
        return f"expected {wanted} rows, found {found.n_rows}"
    return ""

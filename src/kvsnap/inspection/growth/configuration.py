"""A configuration alone (`config.json`): what the cache of its model will hold. Without torch or transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsnap.errors import FormatError, MissingError, UnsupportedError
from kvsnap.files import Reader
from kvsnap.inspection.growth.answers import LayerGrowth
from kvsnap.inspection.growth.families import STATES
from kvsnap.inspection.growth.kept import NOT_UNDERSTOOD, layers_kept
from kvsnap.inspection.growth.settings import Settings, text_settings
from kvsnap.tensors import numpy_dtype

__all__ = ["Configured", "configured", "json_of", "read_configuration"]

_MOST_BYTES = 8 << 20
_DEEPEST = 100
_DTYPE = "bfloat16"
_OF_WEIGHTS = ("compression_config", "quantization_config")
_ROWS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """What a configuration says: the family, the dtype of rows, what each layer keeps, and what had to be assumed."""

    architecture: str
    dtype: str
    layers: tuple[LayerGrowth, ...]
    context_limit: int | None
    encoder_rows: int | None
    notes: tuple[str, ...]


def read_configuration(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the settings in a `config.json`, or in that of a model directory.

    Raise `MissingError`, `StorageError`, and `FormatError` for a file that is no JSON object, over 8 MiB or
    nested deeper than 100, `InputError` for what is no regular file.
    """
    place = Path(path)
    place = place / "config.json" if os.path.isdir(place) else place
    if not os.path.lexists(place):
        raise MissingError("no such configuration", path=place)
    with Reader(place) as reader:
        if reader.size > _MOST_BYTES:
            raise FormatError("too long for a configuration", path=place, expected=f"at most {_MOST_BYTES} bytes")
        data = reader.read_at(0, reader.size)
    try:
        found = json_of(data)
    except ValueError as error:
        raise FormatError(f"no JSON: {error}", path=place) from error
    if not isinstance(found, dict):
        raise FormatError("a configuration is an object", path=place, found=type(found).__name__)
    return found


def json_of(text: str | bytes) -> Any:
    """Return what a JSON text says. Raise `ValueError` for what is none, or is nested deeper than 100."""
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    level = [found]
    for _ in range(_DEEPEST):
        level = [one for held in level if isinstance(held, dict | list) for one in _inside(held)]
    if level:
        raise ValueError("nested too deep")
    return found


def _inside(held: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return held.values() if isinstance(held, dict) else held


def configured(config: Mapping[str, Any], dtype: str | None = None, encoder_rows: int | None = None) -> Configured:
    """Return what the layers of the model of a configuration keep.

    `dtype` is that of the rows, by default the one that the configuration names; `encoder_rows` is the length of an
    encoder's output. Raise `InputError` naming a setting that is missing or is no number, `UnsupportedError` naming
    what is not understood: a family that is not known is derived from `layer_types` and its heads, which `notes` say,
    and refused where its settings speak of more.
    """
    settings = text_settings(config)
    notes: list[str] = []
    if not settings.known:
        notes.append(_assumed(settings))
    chosen = dtype or _dtype_of(settings, config)
    if not chosen:
        chosen = _DTYPE
        notes.append(f"the configuration names no dtype: {_DTYPE} is assumed")
    if chosen not in _ROWS:
        raise UnsupportedError("rows are not kept in this dtype", expected=", ".join(_ROWS), found=chosen[:60])
    numpy_dtype(chosen)
    length = encoder_rows if encoder_rows is not None else settings.maybe("max_source_positions")
    if settings.family == "speech_to_text" and encoder_rows is None:
        length = None  # its convolutions shorten the input first
    layers = layers_kept(settings, chosen, length)
    crosses = any(layer.kind == "cross" for layer in layers)
    if crosses and length is None:
        notes.append("cross-attention has one row for each position of the encoder, and no length of it is given")
    notes += _remarks(settings, layers)
    context = settings.maybe("context")
    return Configured(
        architecture=settings.family, dtype=chosen, layers=layers, context_limit=context,
        encoder_rows=length if crosses else None, notes=tuple(notes),
    )  # fmt: skip


def _dtype_of(settings: Settings, config: Mapping[str, Any]) -> str:
    for place in (settings.config, config):
        for name in ("dtype", "torch_dtype"):
            if isinstance(place.get(name), str):
                return str(place[name]).removeprefix("torch.")
    return ""


def _assumed(settings: Settings) -> str:
    """Return what is assumed of a family that is not known; raise `UnsupportedError` where its settings say more."""
    more = sorted(
        name
        for name, value in settings.config.items()
        if value not in (None, False, 0, "", [], {})
        and any(part in name.lower() for part in NOT_UNDERSTOOD)
        and name not in _OF_WEIGHTS
    )
    if more:
        raise UnsupportedError(
            f"{settings.family} is not known, and its settings say that it keeps more than keys and values",
            expected="a family of docs/growth.md", found=", ".join(name[:60] for name in more[:6]),
        )  # fmt: skip
    return f"{settings.family} is not a family that is known: keys and values of every layer are assumed"


def _remarks(settings: Settings, layers: tuple[LayerGrowth, ...]) -> list[str]:
    notes = []
    if settings.taken:
        told = ", ".join(f"{name} {value:,}" for name, value in settings.taken.items())
        notes.append(f"left out, so that of a {settings.family} configuration without settings: {told}")
    if settings.family == "falcon" and settings.get("new_decoder_architecture"):
        notes.append("keys and values of each query head, as transformers keeps them; with those of groups it is less")
    kinds = {tensor.kind for layer in layers for tensor in layer.tensors}
    if "latent" in kinds:
        notes.append(
            "latent rows as transformers 5.24 keeps them; earlier releases keep the keys and values of each head"
        )
    if "state" in kinds and settings.family in STATES and STATES[settings.family] not in ("conv", "lightning"):
        notes.append("recurrent states are float32, whatever the dtype of the rows")
    if settings.family == "deepseek_v4":
        notes.append("live, keys and values of a window are one tensor; a snapshot stores both, and both are counted")
    return notes

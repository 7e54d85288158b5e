"""States of a padded batch: whether one is that of its sequence alone, and the refusal where it is not."""

from __future__ import annotations

from typing import Any

from kvsnap.engines._tf_caches import CACHES
from kvsnap.engines._tf_layers import kind_of
from kvsnap.engines._tf_model import Model
from kvsnap.engines._tf_parts import Part
from kvsnap.engines._tf_state import Line
from kvsnap.errors import UnsupportedError

__all__ = ["check_state"]

_PADDING, _IDS = 7, 5
_ROUNDING = {"float32": 1e-4}
_ROUNDING_OTHERS = 0.05


def check_state(model: Model, line: Line, part: Part, what: str, batch: int) -> None:
    """Raise `UnsupportedError` unless a state, or a row for several positions, is that of the sequence alone.

    A state takes up every column of the batch. Padding on the left of it is looked into once, with two short passes,
    for a batch of one and for others: some releases mask nothing in a batch of one.
    """
    if part.role in ("scale", "zero"):  # of codes, of which padding takes its share and no place
        return
    columns = range(line.n_rows) if line.select is None else line.select
    if line.columns is None or line.columns == len(columns):
        return
    if not columns or columns[-1] + 1 != line.columns:
        raise UnsupportedError(f"{what} has padding behind its last token in it, which cannot be taken out again")
    if columns[-1] - columns[0] + 1 != len(columns) or part.tokens_per_row != 1:
        raise UnsupportedError(f"{what} has padding in it, which cannot be taken out again")
    several = batch > 1
    if several not in model.masks_padding:
        # A family that is given one id at a time masks its later passes wrongly.
        model.masks_padding[several] = not model.cache.alone and _masks_padding(model, 2 if several else 1)
    if not model.masks_padding[several]:
        raise UnsupportedError(
            f"{what} has padding in it: {model.config.model_type} does not keep padding on the left out of its states"
        )


def _masks_padding(model: Model, batch: int) -> bool:
    """Evaluate a few ids alone and behind padding; tell whether the states are the same up to rounding."""
    import torch

    alone, padded = _states(model, 0, 1), _states(model, _PADDING, batch)
    bound = _ROUNDING.get(str(model.dtype()).removeprefix("torch."), _ROUNDING_OTHERS)
    return len(alone) == len(padded) > 0 and all(
        float((a.float() - b.float()).abs().max()) <= bound * max(float(a.float().abs().max()), 1e-6)
        and bool(torch.isfinite(b).all())
        for a, b in zip(alone, padded, strict=True)
    )


def _states(model: Model, padding: int, batch: int) -> list[Any]:
    """Return the states `[...]` after a few ids behind padding; further rows of the batch have no padding."""
    import torch

    cache = CACHES["dynamic"].make(model.module, {})
    device = model.module.get_input_embeddings().weight.device
    ids = [0] * padding + [1 + place % (model.vocab_size - 1) for place in range(_IDS)]
    options: dict[str, Any] = {model.cache_keyword: cache, "use_cache": True, "return_dict": True}
    if model.takes_positions:
        places = [[0] * padding + list(range(_IDS)), *[list(range(padding + _IDS))] * (batch - 1)]
        options["position_ids"] = torch.tensor(places, dtype=torch.long, device=device)
    with torch.inference_mode(False), torch.no_grad():
        rows = [[0] * padding + [1] * _IDS, *[[1] * (padding + _IDS)] * (batch - 1)]
        mask = torch.tensor(rows, dtype=torch.long, device=device)
        given = torch.tensor([ids] * batch, dtype=torch.long, device=device)
        model.module(input_ids=given, attention_mask=mask, **options)
    live = [one for index, layer in enumerate(cache.layers) for one in kind_of(layer, index).read(layer)]
    return [tensor[0] for role, tensor in live if role in ("conv", "recurrent")]

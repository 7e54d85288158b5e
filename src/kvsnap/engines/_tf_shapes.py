"""What a model of some settings keeps, seen by running it without weights: on torch's device `meta`, shapes alone.

The model is built as large as it is, and takes no memory; nothing is computed but the shape of every tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvsnap.engines._tf_capture import sizes_of
from kvsnap.engines._tf_model import Model
from kvsnap.errors import ExtraMissingError, UnsupportedError
from kvsnap.tensors import Layer

__all__ = ["FEW", "shapes_of"]

FEW = 9
"""Positions that are evaluated in the first pass."""


def shapes_of(config: Mapping[str, Any], dtype: str, more: int = 0) -> tuple[tuple[Layer, ...], int]:
    """Return the layers of a model of these settings after one pass, with the sizes of their tensors, and its length.

    `more` positions are evaluated in a second pass. Raise `ExtraMissingError` without transformers, and
    `UnsupportedError` where transformers does not take the settings, or its model looks at values.
    """
    try:
        import torch
        from huggingface_hub import errors as refusals
        from transformers import AutoModelForCausalLM
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise ExtraMissingError("transformers is not installed: pip install 'kvsnap[transformers]'") from error
    family = str(config.get("model_type") or "")
    refused = (
        ValueError, KeyError, TypeError, AttributeError, NotImplementedError, RuntimeError,
        getattr(refusals, "StrictDataclassError", ValueError),
    )  # fmt: skip
    try:
        whole = CONFIG_MAPPING[family].from_dict(_with_floats(config))
        settings = whole.get_text_config(decoder=True)
        if getattr(whole, "is_encoder_decoder", False):
            raise UnsupportedError(f"{family} has an encoder, whose output is not known without its weights")
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(settings, dtype=getattr(torch, dtype)).eval()
        model = Model.of(module)
        cache, count = model.fresh_cache(), 0
        for length in (FEW, more) if more else (FEW,):
            ids = torch.zeros((1, length), dtype=torch.long, device="meta")
            options: dict[str, Any] = {model.cache_keyword: cache, "use_cache": True, "input_ids": ids}
            if model.takes_positions:
                options["position_ids"] = torch.arange(count, count + length, device="meta")[None]
            with torch.no_grad():
                module(**options)
            count += length
        model.check(cache, count)
    except refused as error:
        if isinstance(error, UnsupportedError):
            raise
        what = " ".join(str(error).split())[:200]
        raise UnsupportedError(f"{family} cannot be run without its weights: {type(error).__name__}: {what}") from error
    return sizes_of(model, cache, dtype), count


def _with_floats(value: Any) -> Any:
    """Return settings with the floats that JSON lacks, which transformers writes as objects of one name."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {name: _with_floats(inner) for name, inner in value.items()}
    return value if not isinstance(value, list) else [_with_floats(inner) for inner in value]

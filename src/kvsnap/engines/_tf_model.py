"""What a transformers model is, as far as its cache goes: sizes, keywords, devices, and whether it is supported."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from kvsnap.engines._tf_geometry import INDEXED, attentions_of, geometry_of
from kvsnap.engines._tf_layers import Geometry, check_layer, kind_of, numpy_view, rows_of
from kvsnap.errors import InputError, UnsupportedError

__all__ = ["Model", "recognises"]


def recognises(model: object) -> bool:
    """Tell whether `model` is a transformers model (or a PEFT model around one) without importing anything."""
    names = {(cls.__module__.split(".", 1)[0], cls.__name__) for cls in type(model).__mro__}
    return ("transformers", "PreTrainedModel") in names or ("peft", "PeftModel") in names


@dataclass(frozen=True, slots=True)
class Model:
    """A supported model: the module that is called, its text settings, and how its forward wants to be called."""

    module: Any
    config: Any
    cache_keyword: str
    keeps_logits: bool
    geometry: tuple[Geometry, ...]
    vocab_size: int
    context_limit: int | None

    @staticmethod
    def of(model: Any) -> Model:
        """Look at a model. Raise `UnsupportedError` naming what in it is not supported."""
        module = _inside_peft(model)
        config = module.config.get_text_config(decoder=True)
        parameters = inspect.signature(type(module).forward).parameters
        keyword = next((name for name in ("cache", "past_key_values") if name in parameters), None)
        if keyword is None:
            raise UnsupportedError(
                f"{type(module).__name__}.forward takes no cache", expected="cache or past_key_values", found="neither"
            )
        layers = _refuse_unsupported(module, config)
        geometry = geometry_of(module, config, layers)
        limit = getattr(config, "max_position_embeddings", None)
        return Model(
            module, config, keyword, "logits_to_keep" in parameters, geometry, int(config.vocab_size),
            None if limit is None else int(limit),
        )  # fmt: skip

    def fresh_cache(self) -> Any:
        """Return a cache that holds nothing."""
        return _fresh_cache(self.module)

    def dtype(self) -> Any:
        """Return the torch dtype that the weights are in now, which is that of the cache."""
        return self.module.dtype

    def devices(self) -> list[Any]:
        """Return the device of each layer's weights now (a model may be moved, or be spread over several)."""
        count = len(self.geometry)
        lists = (part for part in self.module.modules() if type(part).__name__ == "ModuleList" and len(part) == count)
        blocks: Any = next((found for found in lists if _first_parameter(found[0]) is not None), ())
        if not blocks:  # LongCat has two layers of cache in each block
            found = attentions_of(self.module)
            blocks = [found[index] for index in range(count)] if set(range(count)) <= found.keys() else ()
        return [_device(block, self.module.device) for block in blocks] or [self.module.device] * count

    def evaluate(self, cache: Any, ids: Sequence[int]) -> npt.NDArray[Any]:
        """Evaluate ids behind what `cache` holds, in place; return the logits of the last one, `[vocab]`, as a copy."""
        import torch

        if self.module.training:
            raise InputError("the model is in training mode, where dropout makes every pass differ; call model.eval()")
        options: dict[str, Any] = {self.cache_keyword: cache, "use_cache": True, "return_dict": True}
        if self.keeps_logits:
            options["logits_to_keep"] = 1
        embedding = self.module.get_input_embeddings()
        # no_grad and not inference_mode: the cache must stay usable by the user's own calls.
        with torch.inference_mode(False), torch.no_grad():
            given = torch.tensor([list(ids)], dtype=torch.long, device=_device(embedding, self.module.device))
            before = rows_of(cache)
            found = self.module(input_ids=given, **options).logits[0, -1]
            self._check_rows(cache, before, len(ids))
            own = torch.empty(found.shape, dtype=found.dtype, device="cpu")
            own.copy_(found)
        return numpy_view(own)

    def _check_rows(self, cache: Any, before: Sequence[int], count: int) -> None:
        found = rows_of(cache)
        if len(found) != len(self.geometry):
            raise UnsupportedError(
                "the model does not keep one cache layer for each layer", expected=len(self.geometry), found=len(found)
            )
        for index, rows in enumerate(found):
            first = index >= len(before) or before[index] == 0
            expected = count if first else before[index] + count
            if rows != expected:
                raise UnsupportedError(
                    f"layer {index} does not keep a row for each token", expected=f"{expected} rows", found=rows
                )
            check_layer(cache.layers[index], index, self.geometry[index], rows)


def _inside_peft(model: Any) -> Any:
    if not hasattr(model, "get_base_model"):
        return model
    for name, settings in model.peft_config.items():
        if getattr(settings, "is_prompt_learning", False):
            raise UnsupportedError(f"adapter {name!r} puts learned rows before the prompt, which is not supported")
    return model.get_base_model()


def _fresh_cache(module: Any) -> Any:
    import transformers

    return transformers.DynamicCache(config=module.config)


def _refuse_unsupported(module: Any, config: Any) -> list[Any]:
    """Raise `UnsupportedError` naming what is not supported; return the layers of an empty cache, [] before 5.0."""
    if not module.can_generate():
        raise UnsupportedError(f"{type(module).__name__} does not generate text: it has no language model head")
    if getattr(module.config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{config.model_type} is an encoder-decoder, which is not supported yet")
    layers = _fresh_cache(module).layers
    for index, layer in enumerate(layers):
        kind_of(layer, index)
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in ("full_attention", *INDEXED):
            raise UnsupportedError(f"layer {index} is of the type {kind}, which is not supported yet")
    if layers and len(layers) != config.num_hidden_layers:
        raise UnsupportedError(
            f"{config.model_type} does not keep one cache layer for each layer",
            expected=config.num_hidden_layers, found=len(layers),
        )  # fmt: skip
    supports = getattr(module, "_supports_default_dynamic_cache", None)
    if getattr(module, "_is_stateful", False) or (supports is not None and not supports()):
        raise UnsupportedError(f"{config.model_type} keeps a state of its own beside the cache, which is not supported")
    if any(hasattr(part, "rope_deltas") for part in module.modules()):
        raise UnsupportedError(f"{config.model_type} counts positions in several dimensions: not supported yet")
    return list(layers)


def _first_parameter(module: Any) -> Any:
    return next(iter(module.parameters()), None)


def _device(module: Any, default: Any) -> Any:
    import torch

    parameter = _first_parameter(module)
    if parameter is not None and parameter.device.type != "meta":
        return parameter.device
    # Offloaded weights visit the device where their module runs.
    hooks = (getattr(part, "_hf_hook", None) for part in module.modules())
    device = next((d for hook in hooks if (d := getattr(hook, "execution_device", None)) is not None), default)
    if str(device) == "meta":
        raise UnsupportedError("the weights are on the device meta, and nothing says where they are to be used")
    return torch.device(device)  # accelerate also writes a bare number

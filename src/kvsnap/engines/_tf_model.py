"""What a transformers model is, as far as its cache goes: sizes, keywords, devices, and whether it is supported."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from kvsnap.engines._tf_caches import CACHES, CacheKind, cache_kind
from kvsnap.engines._tf_encoder import FAMILIES, crossed_length, held_nan, stand_in
from kvsnap.engines._tf_geometry import attentions_of, geometry_of
from kvsnap.engines._tf_layers import check_layer, cut, kind_of, learned, numpy_view, rows_of
from kvsnap.engines._tf_parts import Geometry
from kvsnap.engines._tf_states import starts_over
from kvsnap.engines._tf_views import layer_at, layers_of
from kvsnap.errors import InputError, UnsupportedError

__all__ = ["Model", "recognises"]

_ELSEWHERE = {
    "recurrent_gemma": "keeps its recurrent states in its own modules, where no cache reaches them",
    "reformer": "keeps hidden states and buckets in a ReformerDynamicCache, without keys and values",
    "xlnet": "keeps the hidden states of earlier passes as mems, not keys and values",
    "xlstm": "keeps its states in an xLSTMCache of its own, which is not supported",
    "rwkv": "keeps its state in a list of its own, which cannot be handed back to generate",
}
"""Families whose state is out of reach, and why."""
_STATEFUL = ("linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding", "recurrent")
"""Types of layers that need a cache layer for their states."""


def recognises(model: object) -> bool:
    """Tell whether `model` is a transformers model (or a PEFT model around one) without importing anything."""
    names = {(cls.__module__.split(".", 1)[0], cls.__name__) for cls in type(model).__mro__}
    return ("transformers", "PreTrainedModel") in names or ("peft", "PeftModel") in names


@dataclass(slots=True)
class Model:
    """A supported model: the module that is called, its text settings, and how its forward wants to be called.

    `geometry` is what each layer keeps, as far as it is known; the first pass tells the rest. `masks_padding` tells
    whether its states take no notice of padding on the left, in a batch of several and of one, once it was looked into.
    """

    module: Any
    config: Any
    cache_keyword: str
    keeps_logits: bool
    takes_positions: bool
    starts_over: bool
    geometry: tuple[Geometry, ...]
    vocab_size: int
    context_limit: int | None
    cache: CacheKind
    cache_options: Mapping[str, Any]
    encodes: bool = False
    masks_padding: dict[bool, bool] = field(default_factory=dict)

    @staticmethod
    def of(model: Any, cache: str = "dynamic", cache_options: Mapping[str, Any] | None = None) -> Model:
        """Look at a model. Raise `UnsupportedError` naming what in it is not supported."""
        module, options = _inside_peft(model), dict(cache_options or {})
        kind = cache_kind(cache, options, module)
        config = module.config.get_text_config(decoder=True)
        parameters = inspect.signature(type(module).forward).parameters
        layers = _refuse_unsupported(module, config, kind, options)
        names = ("cache", "past_key_values", "cache_params")
        keyword = next((name for name in names if name in parameters), None)
        if keyword is None:
            raise UnsupportedError(
                f"{type(module).__name__}.forward takes no cache", expected=" or ".join(names), found="none of them"
            )
        geometry = geometry_of(module, config, layers)
        limits = ("max_target_positions", "max_decoder_position_embeddings", "max_position_embeddings")
        limit = next((found for name in limits if (found := getattr(config, name, None)) is not None), None)
        return Model(
            module, config, keyword, "logits_to_keep" in parameters, "position_ids" in parameters,
            starts_over(module), geometry,
            int(config.vocab_size), None if limit is None else int(limit), kind, options,
            bool(getattr(module.config, "is_encoder_decoder", False)),
        )  # fmt: skip

    def fresh_cache(self) -> Any:
        """Return a cache that holds nothing."""
        return self.cache.make(self.module, self.cache_options)

    def room(self, cache: Any) -> int | None:
        """Return the rows that a cache has memory for; None where it grows."""
        windows = [max((part.window for part in geometry.parts), default=0) for geometry in self.geometry]
        limits = [
            int(layer.max_cache_len)
            for layer, window in zip(layers_of(cache), windows, strict=False)
            # A window that is as long as it should be goes on for ever.
            if hasattr(layer, "max_cache_len") and not 0 < window <= layer.max_cache_len
        ]
        return min(limits, default=None)

    def dtype(self) -> Any:
        """Return the torch dtype that the weights are in now, which is that of the cache."""
        return self.module.dtype

    def devices(self) -> list[Any]:
        """Return the device of each layer's weights now (a model may be moved, or be spread over several)."""
        count, inside = len(self.geometry), self.module.get_decoder() if self.encodes else self.module
        lists = (part for part in inside.modules() if type(part).__name__ == "ModuleList" and len(part) == count)
        blocks: Any = next((found for found in lists if _first_parameter(found[0]) is not None), ())
        if not blocks:  # LongCat has two layers of cache in each block
            found = attentions_of(self.module)
            blocks = [found[index] for index in range(count)] if set(range(count)) <= found.keys() else ()
        return [_device(block, self.module.device) for block in blocks] or [self.module.device] * count

    def evaluate(
        self, cache: Any, ids: Sequence[int], n_rows: int, positions: Sequence[int] | None = None, keep: int = 1
    ) -> npt.NDArray[Any]:
        """Evaluate ids behind the `n_rows` that `cache` holds, in place; return the last logits, as a copy.

        `positions` are theirs, where they are not simply the next ones. The logits are `[vocab]`, behind the last id;
        with `keep` above 1 `[keep, vocab]`, behind each of the last so many.
        """
        self._check_mode()
        outputs = None
        if self.encodes:
            length = crossed_length(cache)
            if not length:
                raise InputError("nothing is encoded yet: engine.encode(...) comes before the ids of the decoder")
            outputs = stand_in(self.module, length)
        if positions is None and self.cache.alone:
            positions = range(n_rows, n_rows + len(ids))
        return self._pass(cache, ids, n_rows, positions, outputs, keep)

    def evaluate_rows(
        self, cache: Any, ids: Sequence[Sequence[int]], n_rows: int, positions: Sequence[int] | None = None
    ) -> npt.NDArray[Any]:
        """Evaluate equally many ids for each row of a batch, in one pass; return the last logits `[rows, vocab]`."""
        self._check_mode()
        if positions is None and self.cache.alone:
            positions = range(n_rows, n_rows + len(ids[0]))
        return self._pass_rows(cache, ids, n_rows, positions, None)

    def encode(self, tensors: Mapping[str, Any]) -> Any:
        """Return a cache with what the decoder uses of an encoded input, and no row: two passes, one of each.

        The decoder evaluates one id, for only that makes its layers take what they need; the row is dropped.
        """
        import torch

        self._check_mode()
        cache = self.fresh_cache()
        with torch.inference_mode(False), torch.no_grad():
            outputs = self.module.get_encoder()(**tensors, return_dict=True)
        self._pass(cache, (0,), 0, None, outputs)
        cut(cache, 0)
        return cache

    def emptied(self, cache: Any) -> Any:
        """Return a cache without rows; one of an encoder-decoder shares what is encoded, which no pass changes."""
        fresh = self.fresh_cache()
        if self.encodes and crossed_length(cache):
            for index, layer in enumerate(layers_of(cache)):
                kind_of(layer, index).write(layer_at(fresh, index), kind_of(layer, index).read(layer), 0)
        return fresh

    def _check_mode(self) -> None:
        if self.module.training:
            raise InputError("the model is in training mode, where dropout makes every pass differ; call model.eval()")

    def _pass(
        self, cache: Any, ids: Sequence[int], n_rows: int, positions: Sequence[int] | None, outputs: Any, keep: int = 1
    ) -> npt.NDArray[Any]:
        logits: npt.NDArray[Any] = self._pass_rows(cache, (ids,), n_rows, positions, outputs, keep)[0]
        return logits

    def _pass_rows(
        self,
        cache: Any,
        ids: Sequence[Sequence[int]],
        n_rows: int,
        positions: Sequence[int] | None,
        outputs: Any,
        keep: int = 1,
    ) -> npt.NDArray[Any]:
        import torch

        count = len(ids[0])
        options: dict[str, Any] = {self.cache_keyword: cache, "use_cache": True, "return_dict": True}
        if self.keeps_logits:
            options["logits_to_keep"] = keep
        if outputs is not None:
            options["encoder_outputs"] = outputs
        embedding = self.module.get_input_embeddings()
        # no_grad and not inference_mode: the cache must stay usable by the user's own calls.
        with torch.inference_mode(False), torch.no_grad():
            device = _device(embedding, self.module.device)
            given = torch.tensor([list(row) for row in ids], dtype=torch.long, device=device)
            if positions is not None and not self.takes_positions:
                raise UnsupportedError(f"{type(self.module).__name__}.forward takes no position_ids")
            if self.takes_positions:  # as generate does: not every model counts them from what its cache holds
                places = list(range(n_rows, n_rows + count) if positions is None else positions)
                options["position_ids"] = torch.tensor([places] * len(ids), dtype=torch.long, device=device)
            options["decoder_input_ids" if self.encodes else "input_ids"] = given
            found = self.module(**options).logits[:, -1 if keep == 1 else slice(-keep, None)]
            if self.encodes and bool(found.isnan().any()) and not (n_rows and held_nan(cache, count)):
                raise UnsupportedError(
                    f"the logits of {self.config.model_type} are no numbers: its weights are not, or its decoder reads "
                    "the output of the encoder at every pass, which is not kept"
                )
            self.check(cache, n_rows + count)
            own = torch.empty(found.shape, dtype=found.dtype, device="cpu")
            own.copy_(found)
        return numpy_view(own)

    def check(self, cache: Any, n_rows: int) -> None:
        """Learn what a cache that has seen `n_rows` positions tells; raise `UnsupportedError` where it does not fit."""
        found = rows_of(cache)
        if len(found) != len(self.geometry):
            raise UnsupportedError(
                "the model does not keep one cache layer for each layer", expected=len(self.geometry), found=len(found)
            )
        geometry = list(self.geometry)
        for index, (rows, layer) in enumerate(zip(found, layers_of(cache), strict=True)):
            if rows is not None and rows != n_rows:
                raise UnsupportedError(
                    f"layer {index} does not keep a row for each token", expected=f"{n_rows} rows", found=rows
                )
            if n_rows:
                geometry[index] = learned(layer, index, geometry[index])
            check_layer(layer, index, geometry[index], n_rows)
        self.geometry = tuple(geometry)


def _inside_peft(model: Any) -> Any:
    if not hasattr(model, "get_base_model"):
        return model
    for name, settings in model.peft_config.items():
        if getattr(settings, "is_prompt_learning", False):
            raise UnsupportedError(f"adapter {name!r} puts learned rows before the prompt, which is not supported")
    return model.get_base_model()


def _refuse_unsupported(module: Any, config: Any, cache: CacheKind, options: Mapping[str, Any]) -> list[Any]:
    """Raise `UnsupportedError` naming what is not supported; return the layers of an empty cache, [] before 5.0."""
    if config.model_type in _ELSEWHERE:
        raise UnsupportedError(f"{config.model_type} {_ELSEWHERE[config.model_type]}")
    if not module.can_generate():
        raise UnsupportedError(f"{type(module).__name__} does not generate text: it has no language model head")
    family = module.config.model_type
    if getattr(module.config, "is_encoder_decoder", False) and family not in FAMILIES:
        raise UnsupportedError(
            f"{family} is an encoder-decoder whose decoder may keep more than its cache, which is not supported yet",
            expected=" ".join(sorted(FAMILIES)), found=family,
        )  # fmt: skip
    supports = getattr(module, "_supports_default_dynamic_cache", None)
    if supports is not None and not supports() and family not in cache.families:
        raise UnsupportedError(f"{config.model_type} keeps a cache of its own kind, which is not supported")
    layers = layers_of(cache.make(module, options))
    for index, layer in enumerate(layers):
        kind_of(layer, index)
    if cache.rows_as:
        made, layers = layers, CACHES[cache.rows_as].make(module, {}).layers
        for index, (layer, plain) in enumerate(zip(made, layers, strict=False)):
            if hasattr(plain, "recurrent_states") and not hasattr(layer, "recurrent_states"):
                raise UnsupportedError(f"layer {index}: a {type(layer).__name__} of this release keeps no states")
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if (
            family not in cache.families
            and kind in _STATEFUL
            and not (index < len(layers) and hasattr(layers[index], "recurrent_states"))
        ):
            raise UnsupportedError(
                f"layer {index} is of the type {kind}, which this release keeps no layer of cache for"
            )
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

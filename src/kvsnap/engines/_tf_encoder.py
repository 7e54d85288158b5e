"""The input of an encoder-decoder: encoded once, and named in every snapshot.

The decoder uses keys and values that are made of the encoder's output once. From then on nothing reads that output any
more; transformers asks for it all the same, for its length. `stand_in` has the length and is nothing but NaN, so that a
model that does read it cannot go on unnoticed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvsnap.engines._tf_layers import kind_of, numpy_view
from kvsnap.engines._tf_parts import Geometry, Part
from kvsnap.engines._tf_views import CrossLayer, layers_of
from kvsnap.errors import InputError, UnsupportedError
from kvsnap.tensors import INPUT_NAMES, EncoderInput, Layer, Tensor, TensorSpec, encoder_input_of

__all__ = [
    "FAMILIES", "cross_parts", "crossed_length", "encoder_input", "held_nan", "stand_in", "with_input", "without_input",
]  # fmt: skip

FAMILIES = frozenset(
    """
    bart mbart pegasus pegasus_x marian m2m_100 blenderbot blenderbot-small plbart mvp led bigbird_pegasus
    t5 mt5 umt5 longt5 t5gemma whisper speech_to_text
    """.split()  # noqa: SIM905 - a table of words is easier to read and to extend
)
"""Families whose decoders are known to use the encoder's output for these keys and values only."""


def encoder_input(given: Mapping[str, Any], module: Any) -> tuple[EncoderInput, dict[str, Any]]:
    """Return what an input is called, and the tensors `[1, ...]` that the encoder takes for it.

    Raise `InputError` for a keyword that it does not take, more than one sequence or ids outside the vocabulary, and
    `UnsupportedError` for an attention mask that masks something: leave the padding out instead.
    """
    import torch

    encoder = module.get_encoder()
    known = {
        **inspect.signature(type(module).forward).parameters,
        **inspect.signature(type(encoder).forward).parameters,
    }
    digest, tensors = xxhash.xxh3_128(), {}
    tokens: tuple[int, ...] = ()
    for name in sorted(name for name, value in given.items() if value is not None):
        if name not in known or name.startswith("decoder_") or name in ("self", "encoder_outputs", "labels"):
            raise InputError(f"the encoder takes no {name}", expected=module.main_input_name, found=name)
        tensor = torch.as_tensor(given[name]).detach()
        tensor = tensor[None] if name == "input_ids" and tensor.ndim == 1 else tensor
        if tensor.ndim < 2 or tensor.shape[0] != 1 or not tensor.numel():
            raise InputError(f"{name} must be one sequence", expected="[1, ...]", found=list(tensor.shape))
        if name == "attention_mask":
            if not bool((tensor != 0).all()):
                raise UnsupportedError("the attention mask masks padding: leave the padding out of the input instead")
            continue
        if name == "input_ids":
            tokens = _checked(tensor, module)
            tensor = tensor.long()
        array = np.ascontiguousarray(numpy_view(tensor.cpu().contiguous()))
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode() + b"\0")
        digest.update(array.view(np.uint8).data)
        dtype = module.dtype if tensor.is_floating_point() else tensor.dtype
        tensors[name] = tensor.to(device=module.device, dtype=dtype)
    if not tensors:
        raise InputError("nothing to encode", expected=f"{module.main_input_name}=...", found="no input")
    return EncoderInput(tokens, digest.digest()), tensors


def _checked(ids: Any, module: Any) -> tuple[int, ...]:
    size = int(module.get_encoder().get_input_embeddings().num_embeddings)
    values = tuple(int(value) for value in ids[0])
    if ids.is_floating_point() or min(values) < 0 or max(values) >= size:
        raise InputError(
            "ids of the input must be inside the vocabulary", expected=f"0 to {size - 1}", found=values[:8]
        )
    return values


def crossed_length(cache: Any) -> int:
    """Return the rows that the encoder made for a cache, 0 where nothing is encoded; raise where layers disagree."""
    lengths = {
        int(layer.cross_keys.shape[-2]) if layer.is_filled else 0
        for layer in layers_of(cache)
        if isinstance(layer, CrossLayer)
    }
    if len(lengths) > 1:
        raise InputError("the layers of the cache hold different inputs", expected="one length", found=sorted(lengths))
    return lengths.pop() if lengths else 0


def held_nan(cache: Any, n_new: int) -> bool:
    """Tell whether a cache held NaN before a pass that added `n_new` rows: then its logits say nothing of the model."""
    for index, layer in enumerate(layers_of(cache)):
        for role, tensor in kind_of(layer, index).read(layer):
            before = tensor if role.startswith("cross") else tensor[..., : max(0, tensor.shape[-2] - n_new), :]
            if before.is_floating_point() and bool(before.isnan().any()):
                return True
    return False


def stand_in(module: Any, length: int) -> Any:
    """Return what a forward takes for the output of the encoder: the shape, and NaN in every value."""
    import torch
    from transformers.modeling_outputs import BaseModelOutput

    settings = getattr(module.config, "encoder", None) or module.config
    width = int(getattr(settings, "d_model", None) or settings.hidden_size)
    nothing = torch.full((1, 1, 1), float("nan"), dtype=module.dtype, device=module.device)
    return BaseModelOutput(last_hidden_state=nothing.expand(1, length, width))


def cross_parts(geometry: Geometry) -> Geometry:
    """Return the geometry of a decoder layer with the keys and values of the encoder's output."""
    sizes = geometry.parts[0].sizes, geometry.parts[1].sizes
    axes = ("head", "row", "dim")
    more = (Part("cross_k", axes, sizes[0], "static"), Part("cross_v", axes, sizes[1], "static"))
    return replace(geometry, kind="cross", parts=(*geometry.parts, *more))


# -- in a snapshot -------------------------------------------------------------------------------------------------


def with_input(layers: Sequence[Layer], given: EncoderInput | None) -> tuple[Layer, ...]:
    """Return layers with the name of the input as two more tensors of the first one; None: nothing is encoded."""
    if given is None:
        return tuple(layers)
    first = sum(len(layer.tensors) for layer in layers)
    values: list[npt.NDArray[Any]] = [
        np.array(given.tokens, dtype=np.int64), np.frombuffer(given.digest, dtype=np.uint8).copy()
    ]  # fmt: skip
    made = tuple(
        Tensor(
            TensorSpec(
                id=first + place, name=name, layer=0, role="other", dtype=str(value.dtype), axes=("row",), shape=(0,),
                growth="static", row_axis=0, rope="none",
            ),
            value,
        )
        for place, (name, value) in enumerate(zip(INPUT_NAMES, values, strict=True))
    )  # fmt: skip
    return tuple(replace(layer, tensors=(*layer.tensors, *made)) if not layer.index else layer for layer in layers)


def without_input(layers: Sequence[Layer]) -> tuple[tuple[Layer, ...], EncoderInput | None]:
    """Return layers without the name of their input, and what it says. Raise as `encoder_input_of`."""
    given = encoder_input_of(layers)
    if given is None:
        return tuple(layers), None
    rest = tuple(t for t in layers[0].tensors if t.role != "other" or t.name not in INPUT_NAMES)
    return (replace(layers[0], tensors=rest), *layers[1:]), given

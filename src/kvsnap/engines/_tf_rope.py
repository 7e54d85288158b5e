"""The frequencies with which a transformers model rotates the keys of each layer: asked of the module that makes them.

What the module computes is compared with what its frequencies say, and the keys that the model makes of one token with
their rotation: no family, and no layer of one, is taken on trust.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.editing import Rope
from kvsnap.engines._tf_capture import read_layers
from kvsnap.engines._tf_layers import dtype_of
from kvsnap.engines._tf_model import Model
from kvsnap.engines._tf_state import Line
from kvsnap.errors import UnsupportedError
from kvsnap.layout import Run
from kvsnap.tensors import Layer

__all__ = ["rope_of"]

_FIXED = ("default", "linear", "llama3", "yarn")
"""Ways of scaling that give the same frequencies whatever the length."""
_ROTATED = ("k", "rope")
_PLACES = (0, 1, 7, 1000)


def rope_of(model: Model) -> tuple[Rope | None, ...]:
    """Return how each layer rotates its keys (or rope rows); None for a layer that does not, or where it is not known.

    Two passes over one token are made, apart from the live sequence. Raise `UnsupportedError` for scaling whose
    frequencies depend on the length, for a module that is not known, and naming a layer that rotates otherwise.
    """
    wanted = [
        next((p for p in layer.parts if p.role in _ROTATED and p.rope == "after"), None) for layer in model.geometry
    ]
    if not any(wanted):
        return (None,) * len(wanted)
    rotary = _rotary(model.module, model.config)
    kinds = getattr(model.config, "layer_types", None) or [""] * len(wanted)
    known: dict[str, npt.NDArray[np.float32]] = {}
    found: list[Rope | None] = []
    for part, kind in zip(wanted, kinds, strict=True):
        if part is None:
            found.append(None)
            continue
        name = kind if hasattr(rotary, f"{kind}_inv_freq") else ""
        if name not in known:
            known[name] = _frequencies(rotary, name)
        found.append(Rope(known[name], part.pairing))
    _check(model, found)
    return tuple(found)


def _check(model: Model, ropes: Sequence[Rope | None]) -> None:
    """Evaluate one token alone at two positions: it sees itself only, so its keys may differ by the rotation only."""
    far = min(model.context_limit or 500, 500) - 1
    near, moved = _alone(model, 0), _alone(model, far)
    for index, (rope, a, b) in enumerate(zip(ropes, near, moved, strict=True)):
        for one, other in zip(a.tensors, b.tensors, strict=True):
            if one.role not in _ROTATED or one.spec.rope == "unknown":
                continue
            turns = rope is not None and one.spec.rope == "after"
            expected = rope.rotated(one.array, np.array([far])) if rope is not None and turns else one.array
            size = float(np.abs(expected.astype(np.float32)).max(initial=0))
            off = float(np.abs(expected.astype(np.float32) - other.array.astype(np.float32)).max(initial=0))
            if not size or not off <= size * (1e-3 if one.spec.dtype in ("float32", "float64") else 2**-5):
                raise UnsupportedError(
                    f"layer {index}: {one.name} is not rotated as {type(model.module).__name__} seems to rotate; give "
                    "the frequencies of each layer (rope=[...])",
                    expected=f"values up to {size:.3g}", found=f"off by {off:.3g} at position {far}",
                )  # fmt: skip


def _alone(model: Model, position: int) -> tuple[Layer, ...]:
    cache, token = model.fresh_cache(), model.vocab_size // 2
    model.evaluate(cache, [token], 0, [position])
    line = Line((token,), (Run("prompt", 1),), 1)
    return read_layers(model, cache, line, 0, 0, dtype_of(model.dtype(), "the cache"))


def _rotary(module: Any, config: Any) -> Any:
    """Return the one module that makes angles of positions for all layers."""
    parts = (part for part in module.modules() if type(part).__name__.endswith("RotaryEmbedding"))
    found = [part for part in parts if getattr(part, "config", config) is config]
    if len(found) != 1:
        raise UnsupportedError(
            f"{config.model_type}: which module rotates the keys is not known; give the frequencies (rope=Rope(...))",
            expected="one rotary embedding", found=len(found),
        )  # fmt: skip
    return found[0]


def _frequencies(rotary: Any, kind: str) -> npt.NDArray[np.float32]:
    """Return the frequencies of a layer type (empty: all), compared with the angles that the module makes of them."""
    import torch

    given = getattr(rotary, f"{kind}_inv_freq" if kind else "inv_freq", None)
    scaling = getattr(rotary, "rope_type", None)
    scaling = scaling.get(kind) if isinstance(scaling, dict) else scaling
    if scaling not in _FIXED:
        raise UnsupportedError(
            f"the rope scaling {scaling} has other frequencies for other lengths: rows cannot be moved",
            expected=" ".join(_FIXED), found=scaling,
        )  # fmt: skip
    if given is None or given.ndim != 1:
        raise UnsupportedError(f"{type(rotary).__name__} does not tell its frequencies", expected="inv_freq")
    with torch.inference_mode(False), torch.no_grad():
        places = torch.tensor([_PLACES], device=given.device)
        like = torch.zeros(1, 1, device=given.device, dtype=torch.float32)
        made = rotary(like, places, kind) if kind else rotary(like, places)
        inv_freq: npt.NDArray[np.float32] = given.detach().to("cpu", torch.float32).numpy().copy()
        turned = _turned(made)
    expected = np.exp(1j * np.outer(_PLACES, inv_freq).astype(np.float32).astype(np.float64))
    forms = (expected, np.concatenate((expected, expected), axis=1), np.repeat(expected, 2, axis=1))
    if not any(turned.shape == form.shape and np.allclose(turned, form, atol=1e-4) for form in forms):
        raise UnsupportedError(f"{type(rotary).__name__} makes other angles than its frequencies say")
    return inv_freq


def _turned(made: Any) -> npt.NDArray[np.complex128]:
    """Return what a rotary module made, `[places, values]`, as complex numbers on the unit circle."""
    if isinstance(made, tuple):
        cos, sin = (part[0].to("cpu").double().numpy() for part in made)
        turned = cos + 1j * sin
    else:
        turned = made[0].to("cpu").numpy().astype(np.complex128)
    made_of: npt.NDArray[np.complex128] = turned / np.maximum(np.abs(turned), 1e-30)
    return made_of

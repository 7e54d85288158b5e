"""Layers of linear attention: convolution and recurrent states, which every pass makes anew.

Releases from 5.13 on number the states of a layer, those before have one of each.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from kvsnap.engines._tf_static import copy_into

__all__ = ["COPIED", "KEPT", "linear_read", "linear_write", "starts_over"]

COPIED = ("conv_states", "recurrent_states")
"""What a pass writes over in place."""
KEPT = (*COPIED, "is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state")
"""What a pass changes."""


def linear_read(layer: Any) -> tuple[tuple[str, Any], ...]:
    """Return the states of a layer `[batch, ...]` with their roles, `conv` and `recurrent`; () while it has none."""
    return tuple(_states(layer))


def _states(layer: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(layer.conv_states, dict):
        if layer.has_previous_state:
            for role, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
                if states is not None:
                    yield role, states
        return
    for number in layer.conv_states:
        if layer.has_previous_state[number]:
            for role, numbered in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
                if numbered[number] is not None:
                    yield role, numbered[number]


def linear_write(layer: Any, live: tuple[tuple[str, Any], ...]) -> None:
    """Make states the content of a layer that holds none, in the memory that it takes for them."""
    import torch

    seen = {"conv": -1, "recurrent": -1}
    for role, states in live:
        seen[role] += 1
        number = seen[role]
        name = f"{role}_states"
        if isinstance(layer.conv_states, dict):
            with torch.inference_mode(False):
                layer.lazy_initialization(**{name: states}, state_idx=number)
            copy_into(getattr(layer, name)[number], states)
            layer.has_previous_state[number] = True
        else:
            with torch.inference_mode(False):
                layer.lazy_initialization(**{name: states})
            copy_into(getattr(layer, name), states)
            layer.has_previous_state = True


def starts_over(module: Any) -> bool:
    """Tell whether a model forgets its states where several ids are evaluated behind them in one pass.

    transformers does not hand the state to the scan of Mamba's first kind, nor, in releases before 5.13, to a
    convolution alone: there a pass of several ids starts from nothing, without a word. Seen from the code of the
    modules that write a state.
    """
    return any(_starts_over(cls) for cls in {type(part) for part in module.modules()})


def _starts_over(cls: type) -> bool:
    words: set[object] = set()
    for member in vars(cls).values():
        code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
        if code is not None:
            words.update(code.co_names)
            words.update(word for names in code.co_consts if isinstance(names, tuple) for word in names)
    if "update_recurrent_state" in words:
        return not words & {"initial_state", "initial_states"}
    return "update_conv_state" in words and "conv_kernel_size" not in words

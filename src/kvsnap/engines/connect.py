"""Finding the engine for a model object. Engines are imported only when one of their objects is there."""

from __future__ import annotations

import sys
from typing import Any

from kvsnap.errors import UnsupportedError
from kvsnap.protocols import Engine

__all__ = ["connect"]


def connect(model: Any, tokenizer: Any = None, **options: Any) -> Engine:
    """Return an engine for a live model: a transformers causal language model (an engine is returned as it is).

    `tokenizer` is the model's own; without one, prompts are token ids. `options` are those of the engine, as
    `cache="static"` (docs/engines.md). Raise `UnsupportedError` for anything else.
    """
    if isinstance(model, Engine):
        return model
    if "transformers" in sys.modules:
        from kvsnap.engines.transformers import TransformersEngine, recognises  # needs the extra

        if recognises(model):
            return TransformersEngine(model, tokenizer, **options)
    raise UnsupportedError(
        "no engine recognises this model",
        expected="a transformers causal language model, or an engine",
        found=f"{type(model).__module__}.{type(model).__qualname__}",
    )

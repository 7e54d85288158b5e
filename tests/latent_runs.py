"""Engines with tiny models of latent attention, begun and looked at: what the suites on them share."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from kvsnap.engines.transformers import TransformersEngine
from kvsnap.layout import Snapshot
from latent_models import KNOWN, keeps_latent, latent_model
from test_engine_exactness import BEFORE
from tiny_models import PROMPT

__all__ = ["DTYPES", "IDS", "begin", "bits", "given", "ids_of", "make", "needs_latent", "roles", "state"]

IDS = list(PROMPT.encode())
DTYPES = ("float32", "bfloat16")


def given(*names: str) -> list[Any]:
    """Parameters: the families by name, those that the installed release does not have marked to be skipped."""
    reason = f"transformers {transformers.__version__} does not have it"
    return [pytest.param(name, marks=pytest.mark.skipif(name not in KNOWN, reason=reason)) for name in names]


def make(family: str, dtype: str = "float32", **changes: Any) -> TransformersEngine:
    """A fresh engine whose model counts the calls of its forward as `passes`."""
    model = latent_model(family, dtype, **changes)
    forward, model.passes = model.forward, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        model.passes += 1
        return forward(*args, **kwargs)

    model.forward = counted
    return TransformersEngine(model)


def begin(family: str, dtype: str = "float32", **changes: Any) -> TransformersEngine:
    engine = make(family, dtype, **changes)
    engine.prefill(IDS)
    for _ in range(BEFORE):
        engine.step()
    return engine


def ids_of(engine: TransformersEngine, count: int) -> list[int]:
    return [engine.step().id for _ in range(count)]


def bits(snapshot: Snapshot) -> list[tuple[str, bytes]]:
    return [(tensor.name, tensor.array.tobytes()) for tensor in snapshot.tensors()]


def roles(snapshot: Snapshot) -> list[tuple[str, ...]]:
    return [tuple(t.role for t in layer.tensors) for layer in snapshot.layers]


def needs_latent(family: str) -> None:
    if not keeps_latent(latent_model(family)):
        pytest.skip(f"transformers {transformers.__version__} keeps keys and values of {family}, not the latent row")


def state(engine: TransformersEngine) -> tuple[Any, ...]:
    return engine.tokens, engine.n_rows, engine.n_pending, bits(engine.capture())

"""What the steps of the demo share: a listener on the model, claims that are checked, the run itself."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.layout import Snapshot
from kvsnap.protocols import Engine

__all__ = ["Claim", "Listener", "Run", "Step", "digest", "listening", "state_digest"]


@dataclass(frozen=True, slots=True)
class Claim:
    """Something the demo says of itself, and whether the program found it true."""

    text: str
    holds: bool
    found: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {"claim": self.text, "ok": self.holds, "found": self.found}


@dataclass(slots=True)
class Step:
    """One step: what was done, in sentences; what was measured; what was checked."""

    number: int
    title: str
    lines: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True when every claim holds."""
        return all(c.holds for c in self.claims)

    def say(self, line: str) -> None:
        """Add a sentence to the story."""
        self.lines.append(line)

    def check(self, text: str, holds: bool, found: str = "") -> None:
        """Record a claim; `found` tells what was seen, for the case that it does not hold."""
        self.claims.append(Claim(text, bool(holds), found))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {"number": self.number, "title": self.title, "ok": self.ok, "facts": self.facts,
                "checks": [c.to_dict() for c in self.claims]}  # fmt: skip


def digest(data: Any) -> str:
    """Return a short SHA-256 of the bytes of a buffer."""
    return hashlib.sha256(data).hexdigest()[:32]


class Listener:
    """Hears every forward pass of a torch model, beside the engine: its time, and a digest of its last row of logits.

    With `keep` the rows are kept too, as float32.
    """

    def __init__(self, model: Any, *, keep: bool = False) -> None:
        self.digests: list[str] = []
        self.times: list[float] = []
        self.rows: list[npt.NDArray[np.float32]] = []
        self._keep = keep
        self._hook = model.register_forward_hook(self._heard)

    def _heard(self, _module: Any, _inputs: Any, output: Any) -> None:
        import torch

        self.times.append(time.perf_counter())
        row = output.logits[0, -1].detach().cpu().contiguous()
        self.digests.append(digest(row.view(torch.uint8).numpy()))
        if self._keep:
            self.rows.append(row.float().numpy().copy())

    def stop(self) -> None:
        """Hear no more."""
        self._hook.remove()


@contextmanager
def listening(model: Any, *, keep: bool = False) -> Iterator[Listener]:
    """Listen to a model inside a `with` block."""
    listener = Listener(model, keep=keep)
    try:
        yield listener
    finally:
        listener.stop()


def state_digest(engine: Engine) -> str:
    """Return a digest of all that an engine holds live: ids, every tensor, logits."""
    snapshot = engine.capture()
    total = hashlib.sha256(repr((snapshot.tokens, snapshot.n_rows, snapshot.sampler)).encode())
    for tensor in (*snapshot.tensors(), *([snapshot.logits] if snapshot.logits else [])):
        total.update(np.ascontiguousarray(tensor.array).view(np.uint8).data)
    return total.hexdigest()[:32]


@dataclass(slots=True)
class Run:
    """What the steps hand on: the model, the engine, the files, and the run that is never interrupted."""

    model_name: str
    model: Any
    tokenizer: Any
    engine: Engine
    output: str
    prompt: tuple[int, ...]
    half: int
    load_s: float
    middle: Snapshot | None = None
    ids: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    rows: list[npt.NDArray[np.float32]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)

    def path(self, name: str) -> str:
        """Return the path of an output file."""
        return os.path.join(self.output, name)

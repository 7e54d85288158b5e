"""The other process of the demo: `python -m kvsnap.cli._demo_child`, a JSON job on stdin, a JSON answer on stdout.

It knows the model's name and the files, and nothing else of the run that wrote them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np

import kvsnap
from kvsnap.cli._demo_parts import digest, listening
from kvsnap.cli._model import open_engine
from kvsnap.layout import Sampler

__all__ = ["work"]


def _resumed(engine: Any, path: str, n_tokens: int) -> dict[str, Any]:
    snapshot = kvsnap.load(path)
    started = time.perf_counter()
    back = kvsnap.restore(snapshot, engine)
    restored = time.perf_counter()
    with listening(engine.model) as heard:
        stream = kvsnap.generate(engine, max_tokens=n_tokens, stop_at_end=False)
        tokens = [next(stream)]
        first = time.perf_counter()
        first_forwards = len(heard.digests)
        tokens += list(stream)
    logits = snapshot.logits
    return {
        "pid": os.getpid(),
        "reused": back.reused,
        "recomputed": back.recomputed,
        "exact": back.exact,
        "notes": list(back.notes),
        "identity_s": back.identity_s,
        "install_s": back.install_s,
        "restore_s": restored - started,
        "first_s": first - restored,
        "first_forwards": first_forwards,
        "forwards": len(heard.digests),
        "ids": [t.id for t in tokens],
        "text": "".join(t.text for t in tokens),
        "digests": heard.digests,
        "stored_logits": "" if logits is None else digest(np.ascontiguousarray(logits.array).view(np.uint8)),
    }


def _again(engine: Any, ids: tuple[int, ...]) -> dict[str, float]:
    """Evaluate the same ids again, up to the first token."""
    started = time.perf_counter()
    kvsnap.warm_from_tokens(engine, ids)
    next(kvsnap.generate(engine, max_tokens=1, sampler=Sampler()))
    return {"prefill_first_s": time.perf_counter() - started}


def _greedy(engine: Any, path: str, n_tokens: int) -> dict[str, Any]:
    """Greedy ids from a restored prompt, and those of transformers' own `generate` on the same ids."""
    import torch

    snapshot = kvsnap.load(path)
    kvsnap.restore(snapshot, engine)
    with listening(engine.model) as heard:
        ours = [t.id for t in kvsnap.generate(engine, max_tokens=n_tokens, sampler=Sampler())]
    prompt = torch.tensor([list(snapshot.tokens)])
    settings = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "repetition_penalty": 1.0}
    found = engine.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n_tokens, **settings)
    return {
        "greedy_ids": ours,
        "greedy_forwards": len(heard.digests),
        "transformers_ids": found[0, prompt.shape[1] :].tolist(),
    }


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Do the job: restore and go on, evaluate the same again, compare greedy ids with transformers."""
    started = time.perf_counter()
    engine: Any = open_engine(job["model"], job["dtype"], job["attention"])
    loaded = time.perf_counter() - started
    resumed = _resumed(engine, job["middle"], job["n_tokens"])
    ids = kvsnap.load(job["middle"]).tokens
    return {**resumed, "load_s": loaded, **_again(engine, ids), **_greedy(engine, job["prompt"], job["n_greedy"])}


if __name__ == "__main__":
    print(json.dumps(work(json.load(sys.stdin))))

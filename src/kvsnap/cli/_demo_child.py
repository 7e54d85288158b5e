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


def _greedy(engine: Any, path: str, n_tokens: int) -> dict[str, Any]:
    """Greedy ids from a restored prompt, and from transformers' own `generate`, which evaluates the same ids again.

    Both are timed up to the first token, with the model loaded. The restore is timed without the hashing of the
    weights; what that took is known from the first restore of this process.
    """
    import torch

    snapshot = kvsnap.load(path)
    back = kvsnap.restore(snapshot, engine)
    started = time.perf_counter()
    stream = kvsnap.generate(engine, max_tokens=n_tokens, sampler=Sampler())
    ours = [next(stream).id]
    first_s = time.perf_counter() - started
    ours += [t.id for t in stream]
    prompt = torch.tensor([list(snapshot.tokens)])
    settings = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "repetition_penalty": 1.0}
    mask = torch.ones_like(prompt)
    with listening(engine.model) as heard:
        started = time.perf_counter()
        found = engine.model.generate(prompt, attention_mask=mask, max_new_tokens=n_tokens, **settings)
    return {
        "greedy_ids": ours,
        "transformers_ids": found[0, prompt.shape[1] :].tolist(),
        "prompt_tokens": prompt.shape[1],
        "restore_first_s": back.install_s + first_s,
        "prefill_first_s": heard.times[0] - started,
    }


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Do the job: restore and go on; compare greedy ids and time to the first token with transformers."""
    started = time.perf_counter()
    engine: Any = open_engine(job["model"], job["dtype"], job["attention"])
    loaded = time.perf_counter() - started
    resumed = _resumed(engine, job["middle"], job["n_tokens"])
    return {**resumed, "load_s": loaded, **_greedy(engine, job["prompt"], job["n_greedy"])}


if __name__ == "__main__":
    print(json.dumps(work(json.load(sys.stdin))))

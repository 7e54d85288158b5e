"""Time to the first token: restoring a saved cache against evaluating the same tokens again. SmolLM2-135M on the CPU.

The model is loaded in both cases. Hashing its weights, which a restore does at each call, is shown apart. The snapshot
was written before; its file is in the page cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import Figure, Work, interleave, ms, ratio

import kvsnap

GOES_ON = 8


def model_of(name: str, dtype: str) -> Any:
    if name != "tiny":
        from kvsnap.engines.models import load_model

        return load_model(name, dtype=dtype).model
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()


def counted(model: Any) -> Callable[[], int]:
    """Wrap the model's forward; return what tells the number of passes since the last time it was asked."""
    seen, forward = [0], model.forward

    def counting(*arguments: Any, **named: Any) -> Any:
        seen[0] += 1
        return forward(*arguments, **named)

    model.forward = counting

    def taken() -> int:
        found, seen[0] = seen[0], 0
        return found

    return taken


def figures(name: str, dtype: str, n_tokens: int, rounds: int, directory: Path) -> list[Figure]:
    model = model_of(name, dtype)
    passes = counted(model)
    source, fresh = kvsnap.connect(model), kvsnap.connect(model)
    ids = np.random.default_rng(0).integers(0, source.vocab_size, n_tokens).tolist()
    source.prefill(ids)
    report = kvsnap.capture(source).save(directory / dtype)
    passes()
    first: dict[str, list[int]] = {"again": [], "restore": []}
    forwards: dict[str, int] = {}
    parts: dict[str, list[float]] = {"load": [], "identity": [], "install": [], "step": []}

    def again() -> None:
        fresh.prefill(ids)
        first["again"].append(fresh.step().id)

    def restore() -> None:
        begun = time.perf_counter()
        snapshot = kvsnap.load(directory / dtype)
        loaded = time.perf_counter()
        done = kvsnap.restore(snapshot, fresh)
        restored = time.perf_counter()
        first["restore"].append(fresh.step().id)
        parts["load"].append(loaded - begun)
        parts["identity"].append(done.identity_s)
        parts["install"].append(done.install_s)
        parts["step"].append(time.perf_counter() - restored)
        assert done.exact
        assert done.reused == n_tokens

    def prepare() -> None:
        fresh.reset()
        passes()

    works = {
        "again": Work(again, prepare, lambda: forwards.update(again=passes())),
        "restore": Work(restore, prepare, lambda: forwards.update(restore=passes())),
    }
    times = interleave(works, rounds, warm=False)
    restore()
    passes()
    ours = [t.id for t in kvsnap.generate(fresh, max_tokens=GOES_ON, stop_at_end=False)]
    theirs = [source.step().id for _ in range(GOES_ON + 1)]
    assert [first["restore"][0], *ours] == theirs
    assert set(first["restore"]) == set(first["again"]) == {theirs[0]}
    n_restores = len(times["restore"])
    known = [sum(parts[part][i] for part in ("load", "install", "step")) for i in range(n_restores)]
    value, whole = ratio(times["again"], known), ratio(times["again"], times["restore"])
    apart = ", ".join(f"{part} {statistics.median(found[:n_restores]) * 1e3:.1f}" for part, found in parts.items())
    what = f"{name} {dtype}, {n_tokens} tokens ({report.nbytes / 1e6:.0f} MB): "
    small = name == "tiny"
    return [
        Figure(f"{what}evaluate again, first token", f"{ms(times['again']):.0f} ms", f"{forwards['again']} forwards"),
        Figure(f"{what}restore, first token", f"{ms(known):.1f} ms", f"{forwards['restore']} forwards; ms: {apart}"),
        Figure(
            f"{what}restore against evaluating", f"{value:.0f} x", f"{GOES_ON + 1} ids equal",
            "" if small else ">= 100 x", None if small else value >= 100,
        ),
        Figure(f"{what}the same with hashing the weights", f"{whole:.0f} x"),
    ]  # fmt: skip


def measure(directory: Path, options: argparse.Namespace) -> list[Figure]:
    name, n_tokens, rounds = options.model, options.tokens, options.rounds or 3
    if options.small:
        name, n_tokens, rounds = "tiny", 64, 2
    return [f for dtype in ("float32", "bfloat16") for f in figures(name, dtype, n_tokens, rounds, directory)]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="smollm2", help="as `kvsnap generate --model`")
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    common.run(options, lambda directory: measure(directory, options), "torch", "transformers")


if __name__ == "__main__":
    main()

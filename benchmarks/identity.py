"""What it costs to know that a model is the one: digesting its weights, with one and two threads, and adapters.

A Llama of random numbers of about 1 GB in float32. Beside it: the same hash over the same number of bytes in one piece,
and reading them (a sum), with one thread. Every restore, check and capture does this once.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import common
import numpy as np
import xxhash
from common import Figure, Work, interleave, ms

import kvsnap
from kvsnap.engines.transformers import TransformersEngine


def model_of(layers: int, hidden: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=16, max_position_embeddings=8192,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def measure(_: Path, options: argparse.Namespace) -> list[Figure]:
    layers, hidden, rounds = (2, 64, 2) if options.small else (5, 2048, options.rounds or 9)
    model = model_of(layers, hidden)
    engines = {workers: TransformersEngine(model, workers=workers) for workers in (1, 2)}
    before = engines[1].identity()
    assert before == engines[2].identity()
    total = sum(t.nbytes for t in model.parameters())
    piece = np.ones(total // 8, np.uint64)
    works = {
        "one": Work(engines[1].identity),
        "two": Work(engines[2].identity),
        "hash": Work(lambda: xxhash.xxh3_128_digest(piece)),
        "sum": Work(lambda: np.add.reduce(piece)),
    }
    times = interleave(works, rounds)
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1e-3  # no version counter sees this
    report = kvsnap.identity.compare(before, engines[2].identity())
    assert [f.name for f in report.refusals] == ["weights: layer 1 up_proj"]
    size = f"{total / 1e9:.2f} GB in {len(before.weights)} tensors"
    words = {
        "one": "digest the weights, one thread",
        "two": "digest the weights, two threads",
        "hash": "XXH3-128 over as many bytes in one piece, one thread",
        "sum": "read as many bytes (a sum), one thread",
    }
    return [
        Figure(f"{what}, for each GB", f"{ms(times[name]) / total * 1e9:.0f} ms", f"{size}: {ms(times[name]):.0f} ms")
        for name, what in words.items()
    ]


if __name__ == "__main__":
    options = common.parser(__doc__).parse_args()
    common.run(options, lambda directory: measure(directory, options), "xxhash", "torch", "transformers")

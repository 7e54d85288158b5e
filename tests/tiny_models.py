"""Tiny models with random weights for tests: real transformers models, built in milliseconds, a byte per token.

Plain random weights make greedy decoding repeat one token, so that a test of "the same ids" would pass on a broken
cache. These weights are drawn wide enough that 40 greedy tokens hold at least ten different ids, which
`tests/test_models.py` asserts for every builder and dtype.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

__all__ = ["CONTEXT", "PROMPT", "ByteTokenizer", "save_tiny", "tiny_config", "tiny_llama", "tiny_model", "tiny_qwen3"]

PROMPT = "A small model, and a prompt."
CONTEXT = 512
SPREAD = 0.3
"""Standard deviation of every weight matrix and embedding."""

_TOKENIZER_FILES = Path(__file__).parent / "data" / "models" / "tiny"


class ByteTokenizer:
    """The tokenizer of the tiny models, without the `tokenizers` library: the id of a token is its byte."""

    vocab_size = 256
    chat_template: str | None = None
    eos_token_id: int | None = None
    bos_token_id: int | None = None

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False, **_: Any) -> str:
        return bytes([ids] if isinstance(ids, int) else ids).decode("utf-8", "replace")

    def get_vocab(self) -> dict[str, int]:
        return {f"<{value:02x}>": value for value in range(self.vocab_size)}


def tiny_config(kind: str, **changes: Any) -> Any:
    """The configuration of a tiny `kind`: three layers, grouped queries, no end token unless one is given."""
    fields: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": kind == "qwen3",
    }
    return AutoConfig.for_model(kind, **{**fields, **changes})


def tiny_model(kind: str, seed: int, dtype: str = "float32", attention: str = "sdpa", **changes: Any) -> Any:
    """A model of `kind` in eval mode. The same `seed` gives the same float32 weights, rounded for the other dtypes."""
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(
            tiny_config(kind, **changes), dtype=getattr(torch, dtype), attn_implementation=attention
        )
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=draw, dtype=torch.float32) * SPREAD)
    return model.eval()


def tiny_llama(seed: int = 0, dtype: str = "float32", attention: str = "sdpa", **changes: Any) -> Any:
    """A tiny Llama: input and output embeddings apart."""
    return tiny_model("llama", seed, dtype, attention, **changes)


def tiny_qwen3(seed: int = 0, dtype: str = "float32", attention: str = "sdpa", **changes: Any) -> Any:
    """A tiny Qwen3: norms on queries and keys, one embedding for input and output."""
    return tiny_model("qwen3", seed, dtype, attention, **changes)


def save_tiny(
    directory: str | Path, kind: str = "llama", seed: int = 0, dtype: str = "float32", **changes: Any
) -> Path:
    """Write a tiny model with its tokenizer as a Hugging Face directory, and return the directory."""
    directory = Path(directory)
    tiny_model(kind, seed, dtype, **changes).save_pretrained(directory)
    for file in _TOKENIZER_FILES.iterdir():
        shutil.copyfile(file, directory / file.name)
    return directory

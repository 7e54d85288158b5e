"""A directory of a tiny model that chats: a character per token, wide ones and emoji among them, and a chat template.

Random weights say nothing, but they end an answer now and then (`ends`), or never.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tiny_models import tiny_model

__all__ = ["CHARACTERS", "END", "TEMPLATE", "save_chat"]

SPECIAL = ("<s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<unk>")
END = 4
CHARACTERS = "".join(
    (*map(chr, range(32, 127)), "\n", *"äöüßéèñçøå", *map(chr, range(0x4E00, 0x4E40)), *"🙂🚀🌍🎉💡", "\u0301")
)
TEMPLATE = (
    "<s>{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_chat(
    directory: str | Path, *, ends: bool = True, context: int = 2048, template: str | None = TEMPLATE, seed: int = 4
) -> Path:
    """Write the model and return its directory; `ends` makes an answer about a dozen tokens long."""
    directory = Path(directory)
    words = [*SPECIAL, *CHARACTERS]
    vocabulary = {word: place for place, word in enumerate(words)}
    model = tiny_model(
        "llama", seed, vocab_size=len(words), max_position_embeddings=context, eos_token_id=END, bos_token_id=0
    )
    with torch.no_grad():
        model.lm_head.weight[: len(SPECIAL)] = 0  # never the most probable one
        if ends:
            drawn = torch.randn(model.lm_head.weight.shape[1], generator=torch.Generator().manual_seed(seed))
            model.lm_head.weight[END] = drawn * 0.55
    model.save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106 # no password
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|end|>", unk_token="<unk>",  # noqa: S106 # no passwords
        additional_special_tokens=list(SPECIAL[1:4]), clean_up_tokenization_spaces=False, chat_template=template,
    )  # fmt: skip
    fast.save_pretrained(directory)
    return directory

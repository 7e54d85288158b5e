"""Tiny encoder-decoders with random weights, and inputs for them: a vocabulary of 256, dimensions of 32."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

__all__ = ["FAMILIES", "encdec_model", "input_of"]

VOCABULARY = 256
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 1}
_BART = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 128,
    "forced_eos_token_id": None, **_IDS,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 3,
    "num_heads": 4, **_IDS,
}  # fmt: skip
_GEMMA = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8,
    "max_position_embeddings": 128, "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
_LIKE_BART = (
    "bart", "mbart", "pegasus", "m2m_100", "blenderbot", "blenderbot-small", "plbart", "mvp", "bigbird_pegasus",
    "pegasus_x",
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_LIKE_BART, _BART),
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5"), _T5),
    "marian": {**_BART, "decoder_vocab_size": VOCABULARY},
    "led": {
        **_BART, "max_encoder_position_embeddings": 128, "max_decoder_position_embeddings": 128, "attention_window": 8,
    },
    "t5gemma": {"encoder": _GEMMA, "decoder": _GEMMA, "vocab_size": VOCABULARY},
    "whisper": {**_BART, "num_mel_bins": 16, "max_source_positions": 30, "max_target_positions": 128},
    "speech_to_text": {
        **_BART, "num_mel_bins": 16, "input_feat_per_channel": 16, "max_source_positions": 128,
        "max_target_positions": 128, "conv_channels": 32,
    },
}  # fmt: skip
_AUDIO = ("whisper", "speech_to_text")


def encdec_model(family: str, dtype: str = "float32", **changes: Any) -> Any:
    """A tiny model in eval mode; the same weights each time, wide enough that what is chosen varies."""
    config = AutoConfig.for_model(family, **{**FAMILIES[family], **changes})
    cls = AutoModelForSpeechSeq2Seq if family in _AUDIO else AutoModelForSeq2SeqLM
    with torch.random.fork_rng(devices=[]):
        model = cls.from_config(config, dtype=getattr(torch, dtype))
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=draw, dtype=torch.float32) * 0.3)
    transformers.logging.set_verbosity_error()
    return model.eval()


def input_of(family: str, seed: int = 0) -> dict[str, Any]:
    """An input for the encoder, by keyword: 12 ids, or features of 60 frames."""
    draw = torch.Generator().manual_seed(seed)
    if family in _AUDIO:
        shape = (1, 16, 60) if family == "whisper" else (1, 60, 16)
        return {"input_features": torch.randn(shape, generator=draw)}
    return {"input_ids": torch.randint(3, VOCABULARY, (1, 12), generator=draw)}

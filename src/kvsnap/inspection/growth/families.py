"""Facts about families of models: what their settings are where a configuration leaves them out, and their rules.

Read from the configurations and the modules of transformers 5.24; `tests/test_growth_families.py` compares each with a
capture of a model of the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

__all__ = [
    "ALIASES", "COMPUTED", "DECODERS", "EVERY", "PATTERNED", "REFUSED", "STATES", "SWITCHED", "USED_NAMES",
    "defaults_of", "known_families",
]  # fmt: skip

USED_NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim", "attention_head_dim", "d_kv", "kv_channels"),
    "hidden": ("n_embed", "hidden_size", "n_embd", "d_model"),
    "context": (
        "max_target_positions", "max_decoder_position_embeddings", "max_position_embeddings", "n_positions",
        "max_seq_len", "max_sequence_length", "seq_length", "model_max_length",
    ),
}  # fmt: skip
"""What settings are called that all families have, and some by names of their own."""

ALIASES = {
    "gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "gemma4": "gemma4_text", "llama4": "llama4_text",
    "gemma4_unified": "gemma4_unified_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text", "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text", "minimax_m3_vl": "minimax_m3_vl_text", "glm4v": "glm4v_text",
    "kimi_k2": "deepseek_v3", "llava": "llama", "llava_next": "llama", "RefinedWebModel": "falcon",
    "RefinedWeb": "falcon",
}  # fmt: skip
"""Families whose text model has another name, or whose layers are those of another family."""

DECODERS = frozenset(
    """
    bart mbart pegasus pegasus_x marian m2m_100 blenderbot blenderbot-small plbart mvp led bigbird_pegasus whisper
    speech_to_text t5 mt5 umt5 longt5 t5_gemma_module
    """.split()  # noqa: SIM905 - a table of words is easier to read and to extend
)
"""Decoders that attend to an encoder. All but those of T5 name their settings `decoder_layers` and so on."""

REFUSED = {
    "recurrent_gemma": "keeps its recurrent states in its own modules, where no cache reaches them",
    "reformer": "keeps hidden states and buckets, without keys and values",
    "xlnet": "keeps the hidden states of earlier passes as mems, not keys and values",
    "xlstm": "keeps its states in a cache of its own, which is not supported",
    "rwkv": "keeps its state in a list of its own, which cannot be handed back to generate",
}
"""Families that no engine captures, and why."""

SWITCHED = frozenset("qwen2 qwen2_moe qwen3 qwen3_moe smollm3 qwen2_vl_text qwen2_5_vl_text".split())  # noqa: SIM905
"""Families whose window counts only where `use_sliding_window` is true."""

EVERY: Mapping[str, tuple[str, int, str, str]] = {
    **dict.fromkeys(("gemma2", "vaultgemma", "gpt_oss", "t5_gemma_module"), ("", 2, "sliding", "full")),
    "gemma3_text": ("sliding_window_pattern", 6, "sliding", "full"),
    "gemma4_text": ("", 6, "sliding", "full"),
    "gemma4_unified_text": ("", 6, "sliding", "full"),
    "gemma3n_text": ("", 5, "sliding", "full"),
    "cohere2": ("sliding_window_pattern", 4, "sliding", "full"),
    "exaone4": ("sliding_window_pattern", 4, "sliding", "full"),
    "exaone_moe": ("sliding_window_pattern", 4, "sliding", "full"),
    "olmo3": ("", 4, "sliding", "full"),
    "afmoe": ("global_attn_every_n_layers", 4, "sliding", "full"),
    "qwen3_next": ("full_attention_interval", 4, "linear", "full"),
    "qwen3_5_text": ("full_attention_interval", 4, "linear", "full"),
    "qwen3_5_moe_text": ("full_attention_interval", 4, "linear", "full"),
    "minimax": ("", 2, "full", "linear"),
}
"""Families in which every n-th layer is another: the setting for n, n without it, the type of most, that of the n-th.

It counts only where a configuration does not list the types of its layers.
"""

COMPUTED = frozenset("bamba jamba mamba mamba2 falcon_mamba falcon_h1".split())  # noqa: SIM905
"""Families that take no list of types: other settings decide."""

PATTERNED = {"M": "linear", "E": "none", "*": "full", "-": "none"}
"""Letters of `hybrid_override_pattern`."""

STATES: Mapping[str, str] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), "delta"),
    "kimi_linear": "kda",
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba"), "mamba"),
    **dict.fromkeys(("mamba2", "falcon_h1", "bamba", "granitemoehybrid", "nemotron_h", "zamba2"), "mamba2"),
    "zamba": "mamba_heads",
    "minimax": "lightning",
    "lfm2": "conv",
    "lfm2_moe": "conv",
}
"""Families with states, and how these are shaped."""

# Names : layers, query heads, key/value heads, width of a head, hidden size, context (- : none, it follows from the
# others) : further settings.
_DEFAULTS = """
afmoe : 32 16 - 128 2048 16384 : sliding_window=1024 global_attn_every_n_layers=4
apertus : 32 32 - - 4096 65536
arcee : 32 32 - - 2560 4096
bamba : 32 32 8 - 4096 262144 : mamba_n_heads=128 mamba_d_state=256 mamba_d_conv=4 mamba_n_groups=1 mamba_expand=2
bart mbart pegasus marian m2m_100 mvp : 12 16 - - 1024 1024
bigbird_pegasus : 16 16 - - 1024 4096
biogpt : 24 16 - - 1024 1024
bitnet : 30 20 5 - 2560 2048
blenderbot : 24 32 - - 2560 128
blenderbot-small : 8 16 - - 512 512
bloom : 2 8 - - 64 -
codegen gptj : 28 16 - - 4096 2048
cohere : 40 64 - - 8192 8192
cohere2 : 40 64 - - 8192 8192 : sliding_window=4096
ctrl : 48 16 - - 1280 256
deepseek_v2 : 32 32 - - 4096 2048 : kv_lora_rank=512 qk_rope_head_dim=64
deepseek_v3 : 61 128 - - 7168 4096 : kv_lora_rank=512 qk_rope_head_dim=64
deepseek_v32 : 61 128 - - 7168 163840 : kv_lora_rank=512 qk_rope_head_dim=64 index_head_dim=128
deepseek_v4 : 43 64 1 512 4096 1048576 : sliding_window=128 index_head_dim=128
diffllama : 16 32 - - 2048 2048
doge : 32 8 - - 1024 2048
dots1 : 62 32 32 - 4608 2048 : sliding_window=4096 max_window_layers=62
ernie4_5 : 18 16 2 128 1024 131072
ernie4_5_moe : 28 20 4 - 2560 131072
exaone4 exaone_moe : 32 32 32 - 4096 2048 : sliding_window=4096 sliding_window_pattern=4
falcon : 32 71 - - 4544 2048 : multi_query=1
falcon_h1 : 32 32 8 - 4096 8192 : mamba_d_ssm=1024 mamba_n_heads=128 mamba_d_state=256 mamba_d_conv=4 mamba_n_groups=1
    mamba_expand=2
flex_olmo : 32 32 - - 4096 4096
gemma : 28 16 16 256 3072 8192
gemma2 vaultgemma : 26 8 4 256 2304 8192 : sliding_window=4096
gemma3_text : 26 8 4 256 2304 131072 : sliding_window=4096
gemma3n_text : 35 8 2 256 2048 32768 : sliding_window=512 num_kv_shared_layers=15
gemma4_text : 30 8 4 256 2304 131072 : sliding_window=512 num_kv_shared_layers=0
gemma4_unified_text : 30 8 4 256 2304 262144 : sliding_window=1024 num_kv_shared_layers=0
glm glm4 : 40 32 2 128 4096 131072
glm4_moe : 46 96 8 - 4096 131072
glm4_moe_lite : 47 20 - - 2048 202752 : kv_lora_rank=512 qk_rope_head_dim=64
glm4v_text : 40 32 2 - 4096 32768
glm_moe_dsa : 78 64 - - 6144 202752 : kv_lora_rank=512 qk_rope_head_dim=64 index_head_dim=128
gpt2 gpt_bigcode : 12 12 - - 768 1024
gpt_neox : 44 64 - - 6144 2048
gpt_oss : 36 64 8 64 2880 131072 : sliding_window=128
granitemoehybrid : 32 32 - - 4096 2048 : mamba_n_heads=128 mamba_d_state=256 mamba_d_conv=4 mamba_n_groups=1
    mamba_expand=2
helium : 24 20 20 128 2560 4096
jamba : 32 32 8 - 4096 262144 : mamba_d_state=16 mamba_d_conv=4 mamba_expand=2 attn_layer_period=8 attn_layer_offset=4
jetmoe : 12 - 16 128 2048 4096
kimi_linear : 27 32 - - 2304 1048576 : kv_lora_rank=512 qk_rope_head_dim=64 linear_conv_kernel_dim=4
    linear_head_dim=128 linear_num_heads=32
led : 12 16 - - 1024 1024
lfm2 : 32 32 8 - 2560 128000 : conv_L_cache=3
lfm2_moe : 32 32 8 - 2048 128000 : conv_L_cache=3
llama granite hunyuan_v1_dense olmo olmo2 granitemoe hunyuan_v1_moe : 32 32 - - 4096 2048
llama4_text : 48 40 8 128 5120 131072 : attention_chunk_size=8192 no_rope_layer_interval=4
longcat_flash : 28 64 - - 6144 131072 : kv_lora_rank=512 qk_rope_head_dim=64
mamba falcon_mamba : 32 - - - 768 - : conv_kernel=4 expand=2 state_size=16
mamba2 : 64 - - - 4096 - : num_heads=128 head_dim=64 conv_kernel=4 expand=2 state_size=128 n_groups=8
mimo_v2_flash : 48 64 4 192 4096 131072 : v_head_dim=128 sliding_window=129
minicpm3 : 62 40 - - 2560 32768 : kv_lora_rank=256 qk_rope_head_dim=32
minimax mixtral phimoe : 32 32 8 - 4096 131072
minimax_m2 : 62 48 8 128 3072 196608
minimax_m3_vl_text : 60 64 4 128 6144 524288 : index_head_dim=128
ministral3 : 34 32 8 128 4096 262144
mistral ministral : 32 32 8 - 4096 131072 : sliding_window=4096
mistral4 : 36 32 - - 4096 1048576 : kv_lora_rank=256 qk_rope_head_dim=64
modernbert-decoder : 22 12 - - 768 8192 : local_attention=128
mpt gpt_neo : 24 16 - - 2048 2048
dbrx : 24 16 - - 2048 2048
mt5 umt5 : 8 6 - 64 512 -
nanochat : 12 6 - - 768 2048
nemotron : 32 48 - - 6144 4096
nemotron_h : - 32 8 128 4096 4096 : mamba_num_heads=128 mamba_head_dim=64 ssm_state_size=128 conv_kernel=4 expand=2
    n_groups=8
olmo3 : 32 32 - - 4096 2048 : sliding_window=4096
olmo_hybrid : 32 30 - - 3840 65536 : linear_conv_kernel_dim=4
olmoe : 16 16 - - 2048 4096
opt : 12 12 - - 768 2048
pegasus_x : 16 16 - - 1024 16384
persimmon : 36 64 - - 4096 16384
phi : 24 32 - - 2048 2048
phi3 : 32 32 - - 3072 4096
phi4_multimodal : 32 32 8 - 3072 131072
plbart : 6 12 - - 768 1024
qwen2 : 32 32 32 - 4096 32768 : sliding_window=4096 max_window_layers=28
qwen2_moe : 24 16 16 - 2048 32768 : sliding_window=4096 max_window_layers=28
qwen2_vl_text qwen2_5_vl_text : 80 64 8 - 8192 32768 : sliding_window=4096 max_window_layers=80
qwen3 : 32 32 32 128 4096 32768 : sliding_window=4096 max_window_layers=28
qwen3_5_moe_text : 40 16 2 256 2048 32768 : linear_num_key_heads=16 linear_num_value_heads=32 linear_key_head_dim=128
    linear_value_head_dim=128 linear_conv_kernel_dim=4
qwen3_5_text : 32 16 4 256 4096 32768 : linear_num_key_heads=16 linear_num_value_heads=32 linear_key_head_dim=128
    linear_value_head_dim=128 linear_conv_kernel_dim=4
qwen3_moe : 24 32 4 - 2048 32768 : sliding_window=4096
qwen3_next : 48 16 2 256 2048 32768 : linear_num_key_heads=16 linear_num_value_heads=32 linear_key_head_dim=128
    linear_value_head_dim=128 linear_conv_kernel_dim=4
qwen3_vl_moe_text : 24 16 16 - 2048 128000
qwen3_vl_text : 32 32 32 128 4096 128000
seed_oss : 64 80 8 128 4096 524288
smollm3 : 36 16 4 - 2048 32768 : no_rope_layer_interval=4
solar_open : 48 64 8 128 4096 131072
speech_to_text : 6 4 - - 256 1024
stablelm : 32 32 32 - 2560 4096
starcoder2 : 30 24 2 - 3072 4096
t5_gemma_module : 26 8 4 256 2304 8192 : sliding_window=4096
t5 longt5 : 6 8 - 64 512 -
whisper : 4 6 - - 384 448 : max_source_positions=1500
xglm : 24 16 - - 1024 2048
zamba : 76 16 16 - 3712 4096 : mamba_d_state=16 mamba_d_conv=4 mamba_expand=2 n_mamba_heads=2 attn_layer_period=6
    attn_layer_offset=4
zamba2 : 54 32 - - 2560 4096 : mamba_d_state=64 mamba_d_conv=4 mamba_expand=2 n_mamba_heads=8 mamba_ngroups=1
"""
_COLUMNS = ("layers", "heads", "kv_heads", "head_dim", "hidden", "context")


@cache
def defaults_of(family: str) -> Mapping[str, int] | None:
    """Return the settings of a family where a configuration leaves them out; None for one that is not known."""
    for line in _DEFAULTS.replace("\n    ", " ").strip().splitlines():
        names, columns, *more = line.split(" : ")
        if family in names.split():
            found = {c: int(v) for c, v in zip(_COLUMNS, columns.split(), strict=True) if v != "-"}
            for pair in " ".join(more).split():
                name, _, value = pair.partition("=")
                found[name] = int(value)
            return found
    return None


def known_families() -> tuple[str, ...]:
    """Return every family with rules of its own, sorted."""
    lines = _DEFAULTS.replace("\n    ", " ").strip().splitlines()
    return tuple(sorted(name for line in lines for name in line.split(" : ")[0].split()))

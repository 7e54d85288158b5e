"""What a transformers model is, digested: every weight as loaded, settings, tokenizer, adapters, runtime."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import xxhash

from kvsnap.collecting import uncollected
from kvsnap.engines._tf_adapters import Adapters
from kvsnap.engines._tf_known import Known
from kvsnap.engines._tf_model import Model
from kvsnap.engines._tf_weights import digest_of, named_tensors, quantised_kinds, size_of
from kvsnap.identity import AdapterDigest, Identity, WeightDigest, flatten_config, quantisation_text
from kvsnap.protocols import Progress

__all__ = ["cache_quantisation_of", "digest_of_rust", "identity_of", "settings_of", "tokenizer_digest"]

# Settings that decide nothing about the rows of a cache: names, labels, output options, training, initial values of
# weights that are loaded, generation defaults.
_NOISE = frozenset(
    """
    transformers_version _name_or_path name_or_path dtype torch_dtype architectures auto_map model_type use_cache
    return_dict return_dict_in_generate output_attentions output_hidden_states output_router_logits output_scores
    output_past id2label label2id num_labels problem_type finetuning_task task_specific_params tokenizer_class prefix
    _attn_implementation _attn_implementation_internal _attn_implementation_autoset attn_implementation
    _commit_hash _output_attentions quantization_config gradient_checkpointing torchscript
    use_bfloat16 tf_legacy_loss initializer_range layerdrop encoder_layerdrop decoder_layerdrop
    router_aux_loss_coef z_loss_coefficient num_logits_to_keep
    w_init_variance_scale final_w_init_variance_scale rescale_prenorm_residual
    time_step_init_scheme time_step_scale time_step_max time_step_floor
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id decoder_start_token_id
    forced_bos_token_id forced_eos_token_id
    """.split()  # noqa: SIM905 - a table of words is easier to read and to extend
)
_NOISE_ENDINGS = ("dropout", "dropout_prob", "dropout_rate", "_pdrop")
# Noise for every family but these, which compute with them outside of training too.
_NOISE_BUT = {"router_jitter_noise": ("phimoe",)}
# Settings that choose among ways to compute the same: bits may differ, and nothing else.
_KERNELS = frozenset(
    {
        "_experts_implementation", "use_mambapy", "use_mamba_kernels", "use_associative_scan", "pretraining_tp",
        "slow_but_exact", "chunk_size_feed_forward",
    }
)  # fmt: skip
_TOKENIZER_STATE = ("truncation", "padding")
_canonical: dict[str, str] = {}


def identity_of(
    model: Model,
    tokenizer: Any,
    *,
    cache_dtype: str,
    workers: int,
    progress: Progress | None = None,
    prefill_step: int = 0,
    cache_quantisation: str = "none",
    cache: str = "dynamic",
    known: Known | None = None,
) -> Identity:
    """Digest everything anew. Weights are read where they lie; those on a GPU pass through a copy, one at a time.

    With `known` weights are not read again that torch counts no change of.

    `cache_quantisation` is what `cache_quantisation_of` says of the live cache. Raise `UnsupportedError` naming a
    weight or an adapter that cannot be digested whole.
    """
    settings, kernels = settings_of(model.module.config)
    tensors, used = dict(named_tensors(model.module)), Adapters.of(model.module)
    weights, adapters = _digests(tensors, used, workers, progress, known)
    template = getattr(tokenizer, "chat_template", None)
    return Identity(
        architecture=str(model.config.model_type),
        config=settings,
        weights=weights,
        cache_dtype=cache_dtype,
        quantisation=_weight_quantisation(model.module, tensors),
        cache_quantisation=cache_quantisation,
        tokenizer="" if tokenizer is None else tokenizer_digest(tokenizer),
        adapters=adapters,
        chat_template=_digest(_json(template).encode()) if template else "",
        engine="transformers",
        runtime=_runtime(model, prefill_step, cache, kernels),
    )


def _digest(data: Any) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def settings_of(config: Any) -> tuple[tuple[tuple[str, str], ...], dict[str, Any]]:
    """Return the settings that decide what a cache means, and those that choose among ways to compute the same."""
    kernels: dict[str, Any] = {}
    return flatten_config(_settings(_config_table(config), kernels)), kernels


def _config_table(config: Any) -> dict[str, Any]:
    """Return the settings of a model. How rope is set up is written in one way, whichever release of transformers."""
    table: dict[str, Any] = config.to_dict()
    scaling = table.get("rope_scaling")
    if "rope_parameters" in table or "rope_theta" not in table or "rope_local_base_freq" in table:
        return table
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": table.pop("rope_theta"), **(scaling or {})}
    if "type" in rope:
        rope["rope_type"] = rope.pop("type")
    if table.get("partial_rotary_factor") is not None:
        rope["partial_rotary_factor"] = table.pop("partial_rotary_factor")
    table.pop("rope_scaling", None)
    return {**table, "rope_parameters": rope}


def _settings(value: Any, kernels: dict[str, Any], family: str = "") -> Any:
    """Return the settings that decide, and put those that choose a way to compute into `kernels`."""
    if not isinstance(value, Mapping):
        return value
    family = str(value.get("model_type", family))
    kept = {}
    for key, inner in value.items():
        name = str(key)
        if name in _KERNELS:
            kernels[name] = inner
        elif not _is_noise(name, family):
            kept[name] = _settings(inner, kernels, family)
    return kept


def _is_noise(name: str, family: str) -> bool:
    if name in _NOISE_BUT:
        return family not in _NOISE_BUT[name]
    return name in _NOISE or name.endswith(_NOISE_ENDINGS)


# -- weights and adapters -------------------------------------------------------------------------------------------


def _digests(
    tensors: Mapping[str, Any], used: Adapters, workers: int, progress: Progress | None, known: Known | None
) -> tuple[tuple[WeightDigest, ...], tuple[AdapterDigest, ...]]:
    once = {id(tensor): (name, tensor) for name, tensor in tensors.items()}
    total, done = sum(size_of(tensor) for _, tensor in once.values()), 0
    found: dict[int, WeightDigest] = {}
    weights: list[WeightDigest] = []
    parts: dict[str, list[WeightDigest]] = {name: [] for name in used.used}

    def digest(named: tuple[str, Any]) -> WeightDigest:
        return digest_of(*named) if known is None else known.digest(*named, digest_of)

    with ThreadPoolExecutor(workers) as pool:
        for key, digest_ in zip(once, pool.map(digest, once.values()), strict=True):
            found[key] = digest_
            done += size_of(once[key][1])
            if progress is not None:
                progress(done, total)
    for name, tensor in tensors.items():
        plain, adapters = used.place(name)
        if adapters is None:
            weights.append(replace(found[id(tensor)], name=plain))
        for adapter in adapters or ():
            parts[adapter].append(replace(found[id(tensor)], name=plain))
    return tuple(sorted(weights, key=lambda w: w.name)), used.digests(parts)


def _weight_quantisation(module: Any, tensors: Mapping[str, Any]) -> str:
    """How the weights are quantised: what the configuration says, or what classes of tensors there are."""
    config = module.config
    for each in (config, config.get_text_config(decoder=True)):
        found: Any = getattr(each, "quantization_config", None)
        if found is not None:
            return quantisation_text(found.to_dict() if hasattr(found, "to_dict") else dict(found))
    kinds = quantised_kinds(tensors)
    return quantisation_text({"kinds": kinds} if kinds else None)


def cache_quantisation_of(layers: Iterable[Any]) -> str:
    """Return how layers of a cache are quantised, as text for an identity; "none" where none of them is.

    Everything public that a layer was set up with counts: numbers, words, and matrices such as those of a rotation.
    """
    found: list[dict[str, Any]] = []
    for layer in layers:
        if hasattr(layer, "_quantize") and (settings := _layer_settings(layer)) not in found:
            found.append(settings)
    if len(found) > 1:
        return quantisation_text({"layers": found})
    return quantisation_text(found[0] if found else None)


_LAYER_WORDS = {"nbits": "bits", "q_group_size": "group", "residual_length": "residual"}
_LAYER_STATE = frozenset({"keys", "values", "dtype", "device", "is_initialized", "cumulative_length", "max_batch_size"})


def _layer_settings(layer: Any) -> dict[str, Any]:
    import torch

    settings: dict[str, Any] = {"kind": type(layer).__name__}
    for name, value in vars(layer).items():
        word = _LAYER_WORDS.get(name, name)
        if name.startswith("_") or name in _LAYER_STATE:
            continue
        if isinstance(value, (str, int, float, bool)):
            settings[word] = value
        elif isinstance(value, torch.Tensor):
            settings[word] = digest_of(name, value).digest
        elif isinstance(value, torch.dtype):
            settings[word] = str(value).removeprefix("torch.")
    return settings


# -- tokenizer and runtime -----------------------------------------------------------------------------------------


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a digest of everything in a tokenizer that decides what ids mean."""
    rust = getattr(tokenizer, "backend_tokenizer", None)
    if rust is None or not hasattr(rust, "to_str"):
        return _digest(_json(_slow_tokenizer(tokenizer)).encode())
    return digest_of_rust(rust.to_str())


def digest_of_rust(text: str) -> str:
    """Return the digest of a tokenizer of the tokenizers library from what its `to_str` gives."""
    raw = _digest(text.encode())
    if raw not in _canonical:
        # Padding and truncation are left over from the last call, not part of what the tokenizer is.
        with uncollected():
            table = {k: v for k, v in json.loads(text).items() if k not in _TOKENIZER_STATE}
            if len(_canonical) > 64:
                _canonical.clear()
            _canonical[raw] = _digest(_json(table).encode())
            del table
    return _canonical[raw]


def _slow_tokenizer(tokenizer: Any) -> list[Any]:
    """What a tokenizer written in Python is: vocabulary, merges by rank, special tokens, sentencepiece model."""
    ranks: Mapping[Any, Any] = getattr(tokenizer, "bpe_ranks", None) or {}
    pieces = getattr(tokenizer, "sp_model", None)
    return [
        type(tokenizer).__name__,
        sorted(tokenizer.get_vocab().items()),
        sorted((rank, str(pair)) for pair, rank in ranks.items()),
        {name: str(value) for name, value in getattr(tokenizer, "special_tokens_map", {}).items()},
        "" if pieces is None else _digest(pieces.serialized_model_proto()),
    ]


def _runtime(model: Model, prefill_step: int, cache: str, kernels: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    import torch
    import transformers

    kinds = sorted({str(getattr(d, "type", d)) for d in model.devices()})
    facts: dict[str, Any] = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "attention": getattr(model.config, "_attn_implementation", None),
        "kernels": kernels,
        "device": "+".join(kinds),
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "prefill_step": prefill_step,
        "cache": cache,
        "sdp": [enabled() for enabled in (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.math_sdp_enabled)],
        "autocast": [torch.is_autocast_enabled(kind) for kind in kinds],
        "mkl": os.environ.get("MKL_CBWR", ""),
    }
    if "cpu" in kinds:
        facts["cpu"] = torch.backends.cpu.get_cpu_capability()
    if "cuda" in kinds:
        facts["cuda"] = torch.cuda.get_device_name()
    return tuple(sorted((name, _json(value)) for name, value in facts.items()))

"""What a transformers model is, digested: every weight as loaded, settings, tokenizer, adapters, runtime."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import xxhash

from kvsnap.engines._tf_model import Model
from kvsnap.errors import UnsupportedError
from kvsnap.identity import AdapterDigest, Identity, WeightDigest, flatten_config
from kvsnap.protocols import Progress

__all__ = ["identity_of", "weights_stamp"]

# Settings that decide nothing about the rows of a cache: names, labels, output options, training, generation defaults.
_NOISE = frozenset(
    """
    transformers_version _name_or_path name_or_path dtype torch_dtype architectures auto_map model_type use_cache
    return_dict return_dict_in_generate output_attentions output_hidden_states output_router_logits output_scores
    output_past id2label label2id num_labels problem_type finetuning_task task_specific_params tokenizer_class prefix
    _attn_implementation _attn_implementation_internal _attn_implementation_autoset attn_implementation
    _commit_hash _experts_implementation _output_attentions quantization_config gradient_checkpointing torchscript
    use_bfloat16 tf_legacy_loss initializer_range attention_dropout hidden_dropout attn_pdrop embd_pdrop resid_pdrop
    dropout layerdrop classifier_dropout router_aux_loss_coef router_jitter_noise
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    """.split()  # noqa: SIM905 - a table of words is easier to read and to extend
)
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
    cache: str = "dynamic",
) -> Identity:
    """Digest everything anew. Weights are read where they lie; those on a GPU pass through a copy, one at a time."""
    settings = _settings(model.module.config.to_dict())
    scales = dict(_adapter_scales(model.module))
    weights, adapters = _digests(model.module, scales, workers, progress)
    quantisation: Any = getattr(model.module.config, "quantization_config", None)
    if hasattr(quantisation, "to_dict"):
        quantisation = quantisation.to_dict()
    template = getattr(tokenizer, "chat_template", None)
    return Identity(
        architecture=str(model.config.model_type),
        config=flatten_config(settings),
        weights=weights,
        cache_dtype=cache_dtype,
        quantisation="none" if quantisation is None else _json(quantisation),
        tokenizer="" if tokenizer is None else _tokenizer_digest(tokenizer),
        adapters=adapters,
        chat_template=_digest(_json(template).encode()) if template else "",
        engine="transformers",
        runtime=_runtime(model, prefill_step, cache),
    )


def _digest(data: Any) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _settings(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {k: _settings(v) for k, v in value.items() if k not in _NOISE and not str(k).endswith("_token_id")}


# -- weights -------------------------------------------------------------------------------------------------------


def _named_tensors(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield parameters and buffers, a tied one once, under its first name.

    Rotary frequencies count as they are used. Those that a module stretches as the text grows are the exception: what
    they are stretched from is digested, the rest follows from settings and length.
    """
    parts = dict(module.named_modules())
    for name, parameter in module.named_parameters():
        owner, _, own = name.rpartition(".")
        # accelerate keeps offloaded weights aside and leaves an empty one in their place.
        aside = getattr(getattr(parts[owner], "_hf_hook", None), "weights_map", None)
        yield name, parameter if parameter.device.type != "meta" or aside is None else aside[own]
    for name, buffer in module.named_buffers():
        owner, _, own = name.rpartition(".")
        original = own[: -len("inv_freq")] + "original_inv_freq" if own.endswith("inv_freq") else ""
        if own.endswith("original_inv_freq"):
            continue  # a buffer in some releases, an attribute in others
        moves = any(kind in str(getattr(parts[owner], "rope_type", "")) for kind in ("dynamic", "longrope"))
        yield name, getattr(parts[owner], original, buffer) if original and moves else buffer


def _digests(
    module: Any, scales: Mapping[str, str], workers: int, progress: Progress | None
) -> tuple[tuple[WeightDigest, ...], tuple[AdapterDigest, ...]]:
    tensors = list(_named_tensors(module))
    total, done = sum(t.nbytes for _, t in tensors), 0
    weights: list[WeightDigest] = []
    parts: dict[str, list[WeightDigest]] = {name: [] for name in scales}
    with ThreadPoolExecutor(workers) as pool:
        for (name, tensor), digest in zip(tensors, pool.map(_weight, tensors), strict=True):
            adapter = _adapter_of(name, scales)
            if adapter is None:
                weights.append(digest)
            elif adapter in parts:
                parts[adapter].append(digest)
            done += tensor.nbytes
            if progress is not None:
                progress(done, total)
    adapters = tuple(AdapterDigest(name, _summary(parts[name]), scales[name]) for name in sorted(scales))
    return tuple(_sorted(weights)), adapters


def _summary(parts: Iterable[WeightDigest]) -> str:
    return _digest(_json([[w.name, w.dtype, w.shape, w.digest] for w in _sorted(parts)]).encode())


def _sorted(digests: Iterable[WeightDigest]) -> list[WeightDigest]:
    return sorted(digests, key=lambda w: w.name)


def _weight(named: tuple[str, Any]) -> WeightDigest:
    import torch

    name, tensor = named
    if tensor.device.type == "meta":
        raise UnsupportedError(f"weight {name} is not in memory (device meta), so the model cannot be identified")
    data = tensor.detach()
    if data.device.type != "cpu":
        data = data.cpu()
    try:
        view = data.contiguous().reshape(-1).view(torch.uint8).numpy()
    except (RuntimeError, TypeError) as error:
        raise UnsupportedError(
            f"weight {name} is a {type(tensor).__name__} whose bytes cannot be read, so the model cannot be identified"
        ) from error
    plain = name.replace(".base_layer.", ".")
    return WeightDigest(plain, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), _digest(view))


# -- adapters ------------------------------------------------------------------------------------------------------


def _adapter_scales(module: Any) -> Iterator[tuple[str, str]]:
    """Yield each active adapter (LoRA and its relatives, as PEFT puts them into the modules) and its scales as text."""
    found: dict[str, set[float]] = {}
    for part in module.modules():
        scaling = getattr(part, "scaling", None)
        if isinstance(scaling, Mapping) and hasattr(part, "active_adapters"):
            for name in () if getattr(part, "disable_adapters", False) else part.active_adapters:
                if name in scaling:
                    found.setdefault(str(name), set()).add(float(scaling[name]))
    for name, scales in found.items():
        yield name, ",".join(f"{s:g}" for s in sorted(scales))


def _adapter_of(weight: str, scales: Mapping[str, str]) -> str | None:
    """Return the adapter that a weight belongs to ("" for one that is loaded and not active), or None."""
    names = weight.split(".")
    if not any(n.startswith("lora_") for n in names):
        return None
    return next((n for n in names if n in scales), "")


# -- tokenizer and runtime -----------------------------------------------------------------------------------------


def _tokenizer_digest(tokenizer: Any) -> str:
    rust = getattr(tokenizer, "backend_tokenizer", None)
    if rust is None or not hasattr(rust, "to_str"):
        return _digest(_json(_slow_tokenizer(tokenizer)).encode())
    text = rust.to_str()
    raw = _digest(text.encode())
    if raw not in _canonical:
        # Padding and truncation are left over from the last call, not part of what the tokenizer is.
        with _uncollected():
            table = {k: v for k, v in json.loads(text).items() if k not in _TOKENIZER_STATE}
            if len(_canonical) > 64:
                _canonical.clear()
            _canonical[raw] = _digest(_json(table).encode())
            del table
    return _canonical[raw]


@contextmanager
def _uncollected() -> Iterator[None]:
    """Leave the garbage collector out of a block that makes very many objects and no cycles.

    A tokenizer is a JSON text of some 100,000 values. While they are made, the collector walks over all that torch and
    transformers have imported, several times: 0.2 of 0.35 s for the 1.5 MB of SmolLM2.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


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


def weights_stamp(module: Any) -> object:
    """Return what changes when torch knows that a weight was changed in place, replaced or moved. Reads no weight.

    It does not see everything (`parameter.data.add_(...)` leaves no trace), so it never stands for a digest.
    """
    stamp = []
    for parameter in module.parameters():
        known = not parameter.is_inference()  # an inference tensor counts no versions
        stamp.append((parameter.data_ptr(), parameter._version if known else 0))
    return tuple(stamp)


def _runtime(model: Model, prefill_step: int, cache: str) -> tuple[tuple[str, str], ...]:
    import torch
    import transformers

    kinds = sorted({str(getattr(d, "type", d)) for d in model.devices()})
    facts: dict[str, Any] = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "attention": getattr(model.config, "_attn_implementation", None),
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

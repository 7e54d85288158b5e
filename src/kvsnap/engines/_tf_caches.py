"""The kinds of cache that an engine may fill: which class of transformers each is, and how an empty one is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvsnap.errors import ExtraMissingError, InputError, UnsupportedError

__all__ = ["CACHES", "CacheKind", "cache_fact", "cache_kind", "refuse_offloading"]


@dataclass(frozen=True, slots=True)
class CacheKind:
    """One kind of cache: the names of its classes in transformers, the options it takes, and what makes an empty one.

    `make(module, options)` may raise `InputError`, `UnsupportedError` and `ExtraMissingError`. `alone`: behind the
    first pass the model is given one id a pass, and the position of each id, for it counts and masks several wrongly
    itself. `families` are those whose own class of cache it is. `rows_as` names the kind that keeps the same rows,
    whose layers then tell the geometry; empty: this one.
    """

    classes: tuple[str, ...]
    options: tuple[str, ...]
    make: Callable[[Any, Mapping[str, Any]], Any]
    alone: bool = False
    families: tuple[str, ...] = ()
    rows_as: str = ""


def _dynamic(module: Any, _: Mapping[str, Any]) -> Any:
    import transformers

    return transformers.DynamicCache(config=module.config)


def _static(module: Any, options: Mapping[str, Any]) -> Any:
    import transformers

    length = options.get("max_cache_len")
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise InputError("a static cache needs its length", expected="max_cache_len: 1 or more", found=length)
    release = f"transformers {transformers.__version__}"
    try:
        made = transformers.StaticCache(config=module.config, max_cache_len=length)
    except KeyError as error:
        raise UnsupportedError(f"{release} has no static cache for layers of the type {error}") from error
    for index, layer in enumerate(made.layers):
        name = type(layer).__name__
        if hasattr(layer, "max_cache_len") and not hasattr(getattr(layer, "cumulative_length", None), "fill_"):
            raise UnsupportedError(f"layer {index}: a {name} of {release} does not count its rows")
        if getattr(layer, "indexer_cumulative_length", None) is not None:  # since 5.24 it is made with the first rows
            raise UnsupportedError(f"layer {index}: the index of a {name} of {release} looks at rows not in use")
    return made


_QUANTISED_OPTIONS = ("backend", "nbits", "axis_key", "axis_value", "q_group_size", "residual_length")
_PACKAGES = {"quanto": "optimum-quanto", "hqq": "hqq"}


def _quantised(module: Any, options: Mapping[str, Any]) -> Any:
    import transformers

    backend = options.get("backend")
    if backend not in ("hqq", "quanto", "fp8"):
        raise InputError("a quantised cache needs its backend", expected="hqq, quanto or fp8", found=backend)
    _refuse_windows(module.config.get_text_config(decoder=True))
    given = {name: value for name, value in options.items() if name != "backend"}
    try:
        return transformers.QuantizedCache(backend, module.config, **given)
    except ImportError as error:
        package = _PACKAGES.get(backend, backend)
        raise ExtraMissingError(f"a cache quantised by {backend} needs the package {package}: {error}") from error
    except ValueError as error:
        if backend == "fp8" and "Unknown" in str(error):
            raise UnsupportedError(
                "this release of transformers has no fp8 cache", expected="5.24", found=transformers.__version__
            ) from error
        raise InputError(f"transformers refuses these options of a quantised cache: {error}", found=given) from error


def _refuse_windows(config: Any) -> None:
    # Releases before 5.24 would keep all rows of such layers, and mask them as if they were windows.
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    if not getattr(config, "layer_types", None) and window and getattr(config, "use_sliding_window", True):
        kinds = {"sliding_attention"}
    if kinds:
        raise UnsupportedError(
            f"{config.model_type} has layers that a quantised cache is not made for",
            expected="full_attention", found=", ".join(sorted(kinds)),
        )  # fmt: skip


def _encoder_decoder(module: Any, _: Mapping[str, Any]) -> Any:
    import transformers

    # Settings of the decoder alone may ask for windows; those of both count the layers of the encoder.
    decoder = getattr(module.config, "decoder", None)
    own = transformers.DynamicCache() if decoder is None else transformers.DynamicCache(config=decoder)
    return transformers.EncoderDecoderCache(own, transformers.DynamicCache())


def _minimax(_: Any, __: Mapping[str, Any]) -> Any:
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    return MiniMaxCache()


_OF_FAMILIES: dict[str, CacheKind] = {
    "encoder-decoder": CacheKind(("EncoderDecoderCache",), (), _encoder_decoder),
    "minimax": CacheKind(("MiniMaxCache",), (), _minimax, alone=True, families=("minimax",)),
}
"""The kinds that a family needs in place of a dynamic one."""
CACHES: dict[str, CacheKind] = {
    "dynamic": CacheKind(("DynamicCache",), (), _dynamic),
    "quantised": CacheKind(("QuantizedCache",), _QUANTISED_OPTIONS, _quantised),
    "static": CacheKind(("StaticCache",), ("max_cache_len",), _static, rows_as="dynamic"),
}
"""The kinds by the name that `connect(model, cache=...)` takes."""


def cache_fact(cache: Any) -> str:
    """Return what decides how the kernels see a cache: its kind, and the length of a static one."""
    name = next((name for name, kind in CACHES.items() if type(cache).__name__ in kind.classes), "other")
    lengths = [layer.max_cache_len for layer in getattr(cache, "layers", ()) if hasattr(layer, "max_cache_len")]
    return f"{name}[{max(lengths)}]" if lengths else name


def refuse_offloading(cache: Any) -> None:
    """Raise `UnsupportedError` for a cache whose rows move between devices in a stream of their own."""
    if getattr(cache, "offloading", False):
        raise UnsupportedError(
            "an offloaded cache is not supported: its rows move between devices while they would be copied",
            expected="offloading=False", found="offloading=True",
        )  # fmt: skip


def cache_kind(name: str, options: Mapping[str, Any], module: Any) -> CacheKind:
    """Return a kind of cache; raise `InputError` for a name or an option that is not known.

    `dynamic` is the kind that the family of the model uses itself. Raise `UnsupportedError` for another where it
    takes no other.
    """
    if name not in CACHES:
        raise InputError("no such kind of cache", expected=" or ".join(CACHES), found=name)
    kind = CACHES[name]
    unknown = sorted(options.keys() - set(kind.options))
    if unknown:
        raise InputError(
            f"a {name} cache has no such option", expected=", ".join(kind.options) or "no options", found=unknown
        )
    needs = "encoder-decoder" if getattr(module.config, "is_encoder_decoder", False) else str(module.config.model_type)
    if needs in _OF_FAMILIES:
        if name != "dynamic":
            raise UnsupportedError(
                f"{module.config.model_type} takes no {name} cache here", expected="dynamic", found=name
            )
        return _OF_FAMILIES[needs]
    return kind

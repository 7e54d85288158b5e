"""The kinds of cache that an engine may fill: which class of transformers each is, and how an empty one is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvsnap.errors import InputError, UnsupportedError

__all__ = ["CACHES", "CacheKind", "cache_fact", "cache_kind", "refuse_offloading"]


@dataclass(frozen=True, slots=True)
class CacheKind:
    """One kind of cache: the names of its classes in transformers, the options it takes, and what makes an empty one.

    `make(module, options)` may raise `InputError`, `UnsupportedError` and `ExtraMissingError`. `rows_as` names the kind
    that keeps the same rows, whose layers then tell the geometry; empty: this one.
    """

    classes: tuple[str, ...]
    options: tuple[str, ...]
    make: Callable[[Any, Mapping[str, Any]], Any]
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


CACHES: dict[str, CacheKind] = {
    "dynamic": CacheKind(("DynamicCache",), (), _dynamic),
    "static": CacheKind(("StaticCache",), ("max_cache_len",), _static, rows_as="dynamic"),
}
"""The kinds by the name that `connect(model, cache=...)` takes."""


def cache_fact(cache: Any) -> str:
    """Return what decides how the kernels see a cache: its kind, and the length of a static one."""
    name = next((name for name, kind in CACHES.items() if type(cache).__name__ in kind.classes), "other")
    lengths = [layer.max_cache_len for layer in cache.layers if hasattr(layer, "max_cache_len")]
    return f"{name}[{max(lengths)}]" if lengths else name


def refuse_offloading(cache: Any) -> None:
    """Raise `UnsupportedError` for a cache whose rows move between devices in a stream of their own."""
    if getattr(cache, "offloading", False):
        raise UnsupportedError(
            "an offloaded cache is not supported: its rows move between devices while they would be copied",
            expected="offloading=False", found="offloading=True",
        )  # fmt: skip


def cache_kind(name: str, options: Mapping[str, Any]) -> CacheKind:
    """Return a kind of cache; raise `InputError` for a name or an option that is not known."""
    if name not in CACHES:
        raise InputError("no such kind of cache", expected=" or ".join(CACHES), found=name)
    kind = CACHES[name]
    unknown = sorted(options.keys() - set(kind.options))
    if unknown:
        raise InputError(
            f"a {name} cache has no such option", expected=", ".join(kind.options) or "no options", found=unknown
        )
    return kind

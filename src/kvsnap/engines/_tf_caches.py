"""The kinds of cache that an engine may fill: which class of transformers each is, and how an empty one is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvsnap.errors import InputError

__all__ = ["CACHES", "CacheKind", "cache_kind"]


@dataclass(frozen=True, slots=True)
class CacheKind:
    """One kind of cache: the names of its classes in transformers, the options it takes, and what makes an empty one.

    `make(module, options)` may raise `InputError` and `ExtraMissingError`.
    """

    classes: tuple[str, ...]
    options: tuple[str, ...]
    make: Callable[[Any, Mapping[str, Any]], Any]


def _dynamic(module: Any, _: Mapping[str, Any]) -> Any:
    import transformers

    return transformers.DynamicCache(config=module.config)


CACHES: dict[str, CacheKind] = {"dynamic": CacheKind(("DynamicCache",), (), _dynamic)}
"""The kinds by the name that `connect(model, cache=...)` takes."""


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

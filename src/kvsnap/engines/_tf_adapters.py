"""Adapters as PEFT puts them into the modules of a model: which are in use, and what each of them is.

A wrapped layer keeps the layer that it wraps; the weights of that one keep the names that they have without PEFT.
What else a wrapper holds belongs to its adapters. Only adapters in use count: not those that are loaded and idle,
disabled, or merged into the weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache as remembered
from typing import Any

import xxhash

from kvsnap.errors import UnsupportedError
from kvsnap.identity import AdapterDigest, WeightDigest

__all__ = ["Adapters", "in_use"]

_INNER = frozenset({"base_layer", "original_module"})
"""Where a wrapper keeps what it wraps."""
_BETWEEN = frozenset({"token_adapter"})
"""Wrappers inside wrappers."""
_KNOWN = frozenset({"lora", "ia3", "loha", "lokr", "ln_tuning", "trainable_tokens", "modules_to_save"})
_VARIANTS = ("Dora",)
"""Variants of LoRA that a pass of this engine runs as their authors meant. Others look at the ids of the whole text."""
_DECIDES_NOTHING = ("dropout", "lora_alpha", "alpha", "use_rslora", "scaling", "use_dora", "r")
"""What a wrapper keeps of its settings and does not compute with: the scale and the tensors say it."""


@dataclass(slots=True)
class _Wrapper:
    """One wrapped layer: its kind, the adapters in use in the order of use, and those it holds."""

    part: Any
    kind: str
    used: tuple[str, ...]
    held: frozenset[str]


@dataclass(slots=True)
class Adapters:
    """The wrappers of a model by the names of their modules, and the adapters in use in the order of use."""

    wrappers: dict[str, _Wrapper] = field(default_factory=dict)
    used: tuple[str, ...] = ()

    @staticmethod
    def of(module: Any) -> Adapters:
        """Look at a model. Raise `UnsupportedError` naming an adapter of a kind that is not known."""
        wrappers, used = {}, dict[str, None]()
        for name, part in module.named_modules():
            if _is_wrapper(part):
                wrappers[name] = _look(name, part)
                used |= dict.fromkeys(wrappers[name].used)
        return Adapters(wrappers, tuple(used))

    def place(self, name: str) -> tuple[str, tuple[str, ...] | None]:
        """Return the name of a tensor without wrappers and adapters, and whose it is.

        None: the model's own. Otherwise the adapters in use that it belongs to, () for one that is idle.
        """
        if not self.wrappers:
            return name, None
        plain: list[str] = []
        owner: _Wrapper | None = None
        names = name.split(".")
        for place, part in enumerate(names):
            around = self.wrappers.get(".".join(names[:place]))
            owner = around or owner
            if owner is not None and around is not None and part in _INNER:
                owner = None
            elif not (around is not None and part in _BETWEEN):
                plain.append(part)
        if owner is None:
            return ".".join(plain), None
        if of := getattr(owner.part, "parameter_name", None):  # wrappers of a module may stand around one another
            plain.append(f"of {of}")
        whose = next((part for part in names if part in owner.held), None)
        if whose is None:
            return ".".join(plain), owner.used  # a tensor that all adapters of a layer share
        at = len(plain) - 1 - plain[::-1].index(whose)
        return ".".join(plain[:at] + plain[at + 1 :]), (whose,) if whose in owner.used else ()

    def digests(self, parts: Mapping[str, Iterable[WeightDigest]]) -> tuple[AdapterDigest, ...]:
        """Return the adapters in use; `parts` are the digests of their tensors, under names without the adapter's."""
        return tuple(self._digest(name, parts.get(name, ())) for name in self.used)

    def _digest(self, name: str, parts: Iterable[WeightDigest]) -> AdapterDigest:
        rows = sorted([w.name, w.dtype, list(w.shape), w.digest] for w in parts)
        scales: dict[str, str] = {}
        settings: list[Any] = []
        for where, wrapper in self.wrappers.items():
            if name not in wrapper.used:
                continue
            plain = self.place(f"{where}.x")[0]
            if scale := _scale(wrapper.part, name):
                scales[plain] = scale
            # The place tells in which order the adapters of a layer are added up: sums depend on it.
            settings.append([plain, wrapper.kind, wrapper.used.index(name), _settings(wrapper.part, name)])
        different = sorted(set(scales.values()), key=float) or ["1"]
        if len(different) > 1:
            settings.append(scales)
        text = json.dumps([rows, settings], sort_keys=True, default=str)
        return AdapterDigest(name, xxhash.xxh3_128_hexdigest(text.encode()), ",".join(different))


def in_use(part: Any) -> tuple[object, ...]:
    """Return which adapters a module uses, at which scale, and which are merged; () where it is no wrapper."""
    if not _is_wrapper(part):
        return ()
    active = part.active_adapters
    names = (active,) if isinstance(active, str) else tuple(active)
    used = () if getattr(part, "disable_adapters", False) else names
    return tuple((a, _scale(part, a)) for a in used), tuple(getattr(part, "merged_adapters", ()))


@remembered
def _is_wrapping(cls: type) -> bool:
    return any(base.__name__ in ("BaseTunerLayer", "AuxiliaryTrainingWrapper") for base in cls.__mro__)


def _is_wrapper(part: Any) -> bool:
    cls: type = type(part)
    if _is_wrapping(cls):
        return True
    inner = getattr(part, "_modules", {})
    return "base_layer" in inner and hasattr(part, "active_adapters") and not callable(part.active_adapters)


def _look(name: str, part: Any) -> _Wrapper:
    active = part.active_adapters
    active = [active] if isinstance(active, str) else list(active)
    held = frozenset(key for table in _tables(part) for key in table)
    merged = bool(getattr(part, "merged_adapters", ()))
    disabled = bool(getattr(part, "disable_adapters", False))
    if merged and disabled:
        raise UnsupportedError(
            f"the adapters of {name} are merged into its weights and disabled, so that the next pass takes them out "
            "again; call unmerge_adapter() first"
        )
    used = () if merged or disabled else tuple(a for a in dict.fromkeys(active) if a in held)
    kind = _kind(part)
    if used and kind not in _KNOWN:
        raise UnsupportedError(
            f"adapter {used[0]!r} is of the kind {kind} ({name}), and it is not known what all of it is",
            expected=", ".join(sorted(_KNOWN)), found=kind,
        )  # fmt: skip
    for adapter in used:
        variant = type(getattr(part, "lora_variant", {}).get(adapter)).__name__
        if variant != "NoneType" and not variant.startswith(_VARIANTS):
            raise UnsupportedError(f"adapter {adapter!r} is a variant of LoRA that is not supported: {variant}")
    return _Wrapper(part, kind, used, held)


def _kind(part: Any) -> str:
    for cls in type(part).__mro__:
        names = cls.__module__.split(".")
        if names[:2] == ["peft", "tuners"] and len(names) > 3:
            return names[2]
        if cls.__name__ == "ModulesToSaveWrapper":
            return "modules_to_save"
        if cls.__name__ == "TrainableTokensWrapper":
            return "trainable_tokens"
    return "lora" if hasattr(part, "lora_A") else type(part).__name__


def _tables(part: Any) -> list[Any]:
    """Return the tables of a wrapper that have a row for each adapter."""
    names = getattr(part, "adapter_layer_names", None) or [n for n in part._modules if n.startswith("lora_")]
    tables = []
    for dotted in names:
        found: Any = part
        for name in dotted.split("."):
            found = getattr(found, name, None)
        if found is not None and hasattr(found, "keys"):
            tables.append(found)
    return tables


def _scale(part: Any, adapter: str) -> str:
    scaling = getattr(part, "scaling", None)
    if not isinstance(scaling, Mapping) or adapter not in scaling:
        return ""
    value = float(scaling[adapter])
    return str(int(value)) if value.is_integer() else repr(value)


def _settings(part: Any, adapter: str) -> dict[str, Any]:
    """What a wrapper computes with beside tensors and scale; what is empty or off is left out."""
    found: dict[str, Any] = {}
    for name in getattr(part, "other_param_names", ()):
        table = getattr(part, name, None)
        if name in _DECIDES_NOTHING or "dropout" in name or not isinstance(table, Mapping):
            continue
        value = table.get(adapter)
        if isinstance(value, (str, int, float, list, tuple)) and value:
            found[name] = list(value) if isinstance(value, tuple) else value
    for name in ("fan_in_fan_out", "is_feedforward"):
        value = getattr(part, name, False)
        if value:
            found[name] = value if isinstance(value, bool) else value.get(adapter) if hasattr(value, "get") else True
    variant = getattr(part, "lora_variant", {}).get(adapter)
    if variant is not None:
        found["variant"] = type(variant).__name__
    return found

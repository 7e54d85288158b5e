"""The settings of a model as a configuration gives them: names, defaults of its family, and checks of each number."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, cast

from kvsnap.errors import InputError, UnsupportedError
from kvsnap.inspection.growth.families import ALIASES, DECODERS, REFUSED, SWITCHED, USED_NAMES, defaults_of

__all__ = ["INSIDE", "Settings", "checked_count", "text_settings"]

_MOST_LAYERS, _MOST, _MOST_NAME = 65536, 1 << 40, 200
INSIDE = ("decoder", "generator", "text_config", "llm_config", "language_config", "thinker_config")
"""Where a configuration of several models keeps the settings of the one that writes text."""
_DECODER_NAMES = {"layers": ("decoder_layers",), "heads": ("decoder_attention_heads",), "hidden": ("d_model",)}
_T5_NAMES = {"layers": ("num_decoder_layers", "num_layers")}


class Settings:
    """The settings of one text model; `family` is the name of its rules, `known` tells whether there are any.

    Every number that is asked for is checked: a whole one, not negative, not beyond 2**40.
    """

    def __init__(self, config: Mapping[str, Any], family: str) -> None:
        self.config = config
        self.family = family
        found = defaults_of(family)
        self.known = found is not None
        self._defaults: Mapping[str, int] = found or {}
        self.taken: dict[str, int] = {}
        """Numbers that were asked for, that the configuration leaves out and its family has."""
        self._numbers: dict[str, frozenset[int]] = {}
        self._inner: dict[str, Settings] = {}
        self._of_layers: dict[int, Mapping[str, Any]] | None = None

    def has(self, name: str) -> bool:
        """Tell whether the configuration itself has the setting."""
        return self.config.get(name) is not None

    def get(self, name: str) -> Any:
        """Return a setting, or what the family has where the configuration leaves it out. null means None."""
        return self.config[name] if name in self.config else self._defaults.get(name)

    def number(self, name: str, default: int | None = None) -> int:
        """Return a setting that is a number. Raise `InputError` where it is none, or there is none."""
        found = self.maybe(name)
        if found is None:
            found = default
        if found is None:
            raise InputError(f"the configuration does not say {' or '.join(self._names(name))}")
        return found

    def maybe(self, name: str) -> int | None:
        """Return a number as `number` does, None where there is none."""
        names = self._names(name)
        given = [spelt for spelt in names if spelt in self.config]
        value = next((self.config[spelt] for spelt in given if self.config[spelt] is not None), None)
        if value is None and not given and name in self._defaults:
            value = self.taken["hidden_size" if name == "hidden" else names[0]] = self._defaults[name]
        if value is None:
            return None
        whole = isinstance(value, float) and value.is_integer()
        if isinstance(value, bool) or not (isinstance(value, int) or whole) or not 0 <= value <= _MOST:
            raise InputError(
                f"{(given or names)[0]} is no number of layers, heads or values",
                expected=f"0 to {_MOST}", found=str(value)[:60],
            )  # fmt: skip
        return int(value)

    def listed(self, name: str) -> Sequence[Any] | None:
        """Return a setting that is a list, None where there is none. Raise `InputError` for anything else."""
        found = self.get(name)
        if found is not None and not isinstance(found, list | tuple):
            raise InputError(f"{name} is no list", found=str(found)[:60])
        return found

    def numbers(self, name: str) -> frozenset[int] | None:
        """Return the numbers in a list, None where there is none. Raise as `listed` does."""
        if name not in self._numbers:
            found = self.listed(name)
            if found is None:
                return None
            self._numbers[name] = frozenset(number for number in found if isinstance(number, int))
        return self._numbers[name]

    def inner(self, name: str) -> Settings:
        """Return settings that stand in one of these, under no family; empty where there are none."""
        if name not in self._inner:
            found = self.get(name)
            self._inner[name] = Settings(found if isinstance(found, Mapping) else {}, "")
        return self._inner[name]

    def _names(self, name: str) -> tuple[str, ...]:
        if self.family in DECODERS and self.family != "t5_gemma_module":
            of_decoder: Mapping[str, tuple[str, ...]] = _DECODER_NAMES
            of_decoder = _T5_NAMES if self.family.endswith("t5") else of_decoder
            if name in of_decoder:
                return of_decoder[name]
        return USED_NAMES.get(name, (name,))

    @property
    def layers(self) -> int:
        """Layers with a cache of their own kind. Raise `InputError` for more than 65,536."""
        return checked_count(self.number("layers") * (2 if self.family == "longcat_flash" else 1))

    @property
    def window(self) -> int | None:
        """Positions that a window spans, None without one."""
        if self.family == "modernbert-decoder":
            whole = self.maybe("local_attention")
            return whole // 2 if whole else None
        if self.family in SWITCHED and not self.get("use_sliding_window"):
            return None
        if self.has("sliding_window_size") and self.family == "mimo_v2_flash":
            return self.number("sliding_window_size") + 1
        found = self.maybe("sliding_window")
        if found and self._both_ways:
            return found // 2 + 1
        return found

    @property
    def _both_ways(self) -> bool:
        value = self.get("use_bidirectional_attention")
        return (self.family == "gemma3_text" and value is True) or (self.family.startswith("gemma4") and value == "all")

    def of_layer(self, index: int) -> Settings:
        """Return the settings of one layer, where the configuration has others for it."""
        if self._of_layers is None:
            self._of_layers = _by_layer(self.config.get("per_layer_config"))
        own = self._of_layers.get(index)
        if own is None:
            return self
        both = (cast("MutableMapping[str, Any]", one) for one in (own, self.config))  # only read
        found = Settings(ChainMap(*both), self.family)
        found.taken = self.taken
        return found


def text_settings(config: Mapping[str, Any]) -> Settings:
    """Return the settings of the text model that a configuration is of, or holds.

    Raise `InputError` where it names no family, `UnsupportedError` for a family that no engine captures.
    """
    inner, outer = config, _family_of(config)
    seen = 0
    while (name := next((n for n in INSIDE if isinstance(inner.get(n), Mapping)), None)) is not None and seen < 4:
        inner, seen = inner[name], seen + 1
    family = _family_of(inner)
    if not family and inner is not config:
        family = ALIASES.get(outer, "")
    if not family:
        raise InputError("the configuration names no family of models", expected="model_type", found="none")
    family = ALIASES.get(family, family)
    if family in REFUSED:
        raise UnsupportedError(f"{family} {REFUSED[family]}")
    return Settings(inner, family)


def _family_of(config: Mapping[str, Any]) -> str:
    """Return what a configuration is of, "" where it does not say."""
    found = config.get("model_type")
    if found is None:
        return ""
    if not isinstance(found, str) or len(found) > _MOST_NAME:
        raise InputError(
            "model_type is no name of a family", expected=f"a text of up to {_MOST_NAME} characters",
            found=str(found)[:60],
        )  # fmt: skip
    return found


def checked_count(count: int) -> int:
    """Return a number of layers. Raise `InputError` for none, and for more than 65,536."""
    if not 0 < count <= _MOST_LAYERS:
        raise InputError("no such number of layers", expected=f"1 to {_MOST_LAYERS}", found=count)
    return count


def _by_layer(others: object) -> dict[int, Mapping[str, Any]]:
    if not isinstance(others, Mapping):
        return {}
    found = [(int(k), v) for k, v in others.items() if _is_number(str(k)) and isinstance(v, Mapping)]
    return dict(reversed(found))  # the first one of a number counts


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= len(str(_MOST_LAYERS))

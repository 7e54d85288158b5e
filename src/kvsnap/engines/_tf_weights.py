"""Every number that a module computes with, by name, and its digest: parameters, buffers, and what lies beside them.

Tensors that are classes of their own (quantised when the model was loaded) are taken apart into the arrays inside.
What cannot be read is refused by name: a digest that leaves something out would be worth nothing.
"""

from __future__ import annotations

import enum
import functools
import json
import types
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from kvsnap.errors import UnsupportedError
from kvsnap.identity import WeightDigest

__all__ = ["Settings", "digest_of", "named_tensors", "quantised_kinds", "size_of"]

_DEPTH = 4
"""How deep attributes are followed: lists in tables in objects."""
_PLAIN = (list, tuple, deque, set, frozenset)
_NESTED = 60
"""How deep lists in lists are followed beyond that."""
_ASIDE = frozenset({"_hf_hook", "_old_forward", "_cache", "_caches", "config", "generation_config", "peft_config"})
"""Attributes that hold settings or run-time state, no weights."""
_ASIDE_ENDINGS = ("original_inv_freq", "max_seq_len_cached")


@dataclass(frozen=True, slots=True)
class Settings:
    """Numbers and words that stand beside a tensor which is no parameter: the group size of its codes, ..."""

    text: str


def named_tensors(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield parameters, buffers and tensors kept as attributes; one with two names in the model under both.

    Only the head that shares the matrix of the embedding goes without its name, which the settings of a model tell.
    Rotary frequencies count as they are used. Those that a module stretches as the text grows are the exception: what
    they are stretched from is digested, the rest follows from settings and length. Raise `UnsupportedError` naming a
    module whose weights are hidden (packed, or compiled to TorchScript).
    """
    import torch

    parts = dict(module.named_modules())
    for name, part in parts.items():
        if isinstance(part, torch.jit.ScriptModule):
            raise UnsupportedError(f"module {name or 'model'} is compiled to TorchScript, which hides its weights")
    paths = dict(module.named_modules(remove_duplicate=False))
    tied = _Tied(module, paths)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner, _, own = name.rpartition(".")
        if tied.is_usual(parameter, owner):
            continue
        # accelerate keeps offloaded weights aside and leaves an empty one in their place.
        aside = getattr(getattr(paths[owner], "_hf_hook", None), "weights_map", None)
        yield name, parameter if parameter.device.type != "meta" or aside is None else aside[own]
    for name, buffer in module.named_buffers(remove_duplicate=False):
        owner, _, own = name.rpartition(".")
        original = own[: -len("inv_freq")] + "original_inv_freq" if own.endswith("inv_freq") else ""
        if own.endswith("original_inv_freq"):
            continue  # a buffer in some releases, an attribute in others
        moves = any(kind in str(getattr(paths[owner], "rope_type", "")) for kind in ("dynamic", "longrope"))
        yield name, getattr(paths[owner], original, buffer) if original and moves else buffer
    yield from _beside(module, parts)


class _Tied:
    """Which parameters stand in the embedding, and again in the head of a model, as in most that share them."""

    def __init__(self, module: Any, paths: Mapping[str, Any]) -> None:
        self.paths, self.first = paths, dict[int, str]()
        self.ends = [self._parts(getattr(module, f"get_{end}_embeddings", None)) for end in ("input", "output")]

    @staticmethod
    def _parts(found: Any) -> frozenset[int]:
        try:
            end = found() if found is not None else None
        except (NotImplementedError, AttributeError):  # a model without one
            end = None
        return frozenset() if end is None else frozenset(map(id, end.modules()))

    def is_usual(self, parameter: Any, owner: str) -> bool:
        """Tell whether a parameter is in the one end, and was told of in the other."""
        before = self.first.setdefault(id(parameter), owner)
        here, there = id(self.paths[owner]), id(self.paths[before])
        one, other = self.ends
        return here != there and ((here in one and there in other) or (here in other and there in one))


def _beside(module: Any, parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    import torch

    usual = frozenset(vars(torch.nn.Module()))
    seen = {id(part) for part in parts.values()} | {id(t) for t in module.parameters()}
    seen |= {id(t) for t in module.buffers()}
    for owner, part in parts.items():
        for own, value in vars(part).items():
            if own not in usual and own not in _ASIDE and not own.endswith(_ASIDE_ENDINGS):
                yield from _inside(f"{owner}.{own}" if owner else own, value, seen, _DEPTH)


def _inside(name: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the tensors in an attribute: in lists, tables and objects, and in modules that are registered nowhere."""
    import torch

    if isinstance(value, torch.ScriptObject):
        raise UnsupportedError(f"{name} holds packed weights that cannot be read, so the model cannot be identified")
    if id(value) in seen or value is None or isinstance(value, (str, bytes, int, float, complex, type)):
        return
    if isinstance(value, torch.nn.Module):
        seen |= {id(part) for part in value.modules()}
        for inner, tensor in named_tensors(value):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{name}.{inner}", tensor
        return
    if isinstance(value, torch.Tensor):
        seen.add(id(value))
        yield name, value
        return
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        seen.add(id(value))
        yield name, Settings(_json([str(value.dtype), value.shape, xxhash.xxh3_128_hexdigest(value.tobytes())]))
        return
    items = _items(value)
    if items and (depth > 0 or isinstance(value, _PLAIN)):
        yield from _inside_items(name, value, items, seen, depth)


def _inside_items(
    name: str, value: Any, items: list[tuple[str, Any]], seen: set[int], depth: int
) -> Iterator[tuple[str, Any]]:
    if depth < -_NESTED:
        raise UnsupportedError(f"{name} is nested deeper than anybody looks, so the model cannot be identified")
    seen.add(id(value))
    held = 0
    for key, inner in items:
        for found in _inside(f"{name}.{key}", inner, seen, depth - 1):
            held += 1
            if isinstance(value, (set, frozenset)):
                raise UnsupportedError(f"{name} holds tensors in no order, so the model cannot be identified")
            yield found
    if held and not isinstance(value, _PLAIN):
        plain = {key: inner for key, inner in items if isinstance(inner, (str, int, float, bool))}
        if plain:
            yield f"{name}.settings", Settings(_json(plain))


def _items(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(str(key), inner) for key, inner in value.items()]
    if isinstance(value, np.ndarray):
        value = value.reshape(-1).tolist()
    if isinstance(value, _PLAIN):
        return [(str(place), inner) for place, inner in enumerate(value)]
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, types.MethodType):
        return [("self", value.__self__)]
    if isinstance(value, types.FunctionType):
        return [(str(place), cell.cell_contents) for place, cell in enumerate(value.__closure__ or ()) if _is_set(cell)]
    if isinstance(value, enum.Enum):
        return []
    slots = getattr(type(value), "__slots__", ())
    named = [slots] if isinstance(slots, str) else list(slots)
    table = {name: getattr(value, name) for name in named if hasattr(value, name)} | getattr(value, "__dict__", {})
    return list(table.items())


def _is_set(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def size_of(tensor: Any) -> int:
    """Return the bytes of one of `named_tensors`, as far as it tells: for progress only."""
    if isinstance(tensor, Settings):
        return 0
    return int(tensor.numel()) * int(tensor.element_size())


# -- digests ---------------------------------------------------------------------------------------------------------


def digest_of(name: str, tensor: Any) -> WeightDigest:
    """Digest one of `named_tensors`. Raise `UnsupportedError` naming what is not in memory or cannot be read."""
    if isinstance(tensor, Settings):
        return WeightDigest(name, "settings", (), xxhash.xxh3_128_hexdigest(tensor.text.encode()))
    if tensor.device.type == "meta":
        raise UnsupportedError(f"weight {name} is not in memory (device meta), so the model cannot be identified")
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(int(n) for n in tensor.shape)
    if hasattr(tensor, "__tensor_flatten__"):
        inner, context = tensor.__tensor_flatten__()
        parts = [_row(digest_of(part, getattr(tensor, part))) for part in inner]
        return WeightDigest(name, dtype, shape, _of_parts(tensor, _plain(name, context), parts))
    if type(tensor).__name__ == "Int8Params" or (type(tensor).__name__ == "Params4bit" and tensor.device.type == "cpu"):
        raise UnsupportedError(
            f"weight {name} is of bitsandbytes, which lays it out anew during the first pass: a model that has run "
            "cannot be known to be the same as one that has not"
        )
    own = _bytes_digest(name, tensor)
    # bitsandbytes keeps scales and code books as attributes of the parameter.
    attached = _attached(tensor)
    if not attached:
        return WeightDigest(name, dtype, shape, own)
    parts = [_row(digest_of(part, inner)) for part, inner in attached]
    return WeightDigest(name, dtype, shape, _of_parts(tensor, "", [["", dtype, list(shape), own], *parts]))


def _attached(tensor: Any) -> list[tuple[str, Any]]:
    if not _is_own_class(tensor):
        return []
    seen = {id(tensor)}
    found = []
    for own, value in vars(tensor).items():
        if own == "module":
            continue  # the module that the parameter belongs to
        found += list(_inside(own, value, seen, _DEPTH))
        if isinstance(value, (str, int, float, bool)) and own != "requires_grad":
            found.append((own, Settings(_json(value))))
    return found


def _is_own_class(tensor: Any) -> bool:
    import torch

    return type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _row(weight: WeightDigest) -> list[Any]:
    return [weight.name, weight.dtype, list(weight.shape), weight.digest]


def _of_parts(tensor: Any, settings: Any, parts: list[list[Any]]) -> str:
    text = _json([type(tensor).__name__, settings, parts])
    return xxhash.xxh3_128_hexdigest(text.encode())


def _bytes_digest(name: str, tensor: Any) -> str:
    import torch

    try:
        if tensor.is_quantized:  # its codes could be read, without their scales
            raise TypeError("quantised by torch")
        data = tensor.detach().resolve_conj().resolve_neg()
        if data.device.type != "cpu":
            data = data.cpu()
        if _is_own_class(data):
            data = data.as_subclass(torch.Tensor)
        return xxhash.xxh3_128_hexdigest(data.contiguous().reshape(-1).view(torch.uint8).numpy())
    except (RuntimeError, TypeError, NotImplementedError) as error:
        layout = str(tensor.layout).removeprefix("torch.")
        raise UnsupportedError(
            f"weight {name} is a {type(tensor).__name__} ({layout}, {tensor.dtype}) whose bytes cannot be read, so the "
            "model cannot be identified"
        ) from error


def _plain(name: str, value: Any) -> Any:
    """Return the settings of a tensor class as JSON data that is the same in every process; its device is left out."""
    import torch

    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, torch.device):
        return ""
    if isinstance(value, (torch.dtype, torch.layout, enum.Enum, type)):
        return str(value)
    if isinstance(value, Mapping):
        return sorted([str(key), _plain(name, inner)] for key, inner in value.items() if str(key) != "device")
    if isinstance(value, (list, tuple)):
        return [_plain(name, inner) for inner in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(_plain(name, inner)) for inner in value)
    items = _items(value)
    if not items:
        text = repr(value)
        if " at 0x" in text:
            raise UnsupportedError(
                f"weight {name} has settings of the class {type(value).__name__}, which cannot be read, so the model "
                "cannot be identified"
            )
        return text
    return [type(value).__name__, sorted([key, _plain(name, inner)] for key, inner in items)]


def quantised_kinds(tensors: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensor classes among the weights that hold more than one array."""
    return sorted({type(t).__name__ for t in tensors.values() if hasattr(t, "__tensor_flatten__")})


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)

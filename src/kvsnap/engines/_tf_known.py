"""Digests of weights that were read before and that nobody changed since, as far as torch tells."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from kvsnap.errors import InputError
from kvsnap.identity import WeightDigest

__all__ = ["Known"]


class Known:
    """Digests by tensor, for as long as a tensor lives and torch counts no change of it.

    What is written past torch (`parameter.data.add_(...)`, a numpy array over the same memory) is not counted. So this
    is for programs that loaded the model themselves and do not do that. Only plain tensors are remembered: those that
    count their changes and hide nothing in attributes.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Any], int, int, WeightDigest]] = {}

    @classmethod
    def of(cls, digest: str) -> Known | None:
        """Return what an engine remembers under an option: nothing for `always`. Raise `InputError` for another one."""
        if digest not in ("always", "changed"):
            raise InputError("weights are digested always, or where they changed", expected="always or changed",
                             found=digest)  # fmt: skip
        return cls() if digest == "changed" else None

    def digest(self, name: str, tensor: Any, read: Callable[[str, Any], WeightDigest]) -> WeightDigest:
        """Return the digest of a tensor, which is read unless it is known. Several threads may ask."""
        import torch

        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_inference()
        if not plain:
            return read(name, tensor)
        key, place, version = id(tensor), tensor.data_ptr(), tensor._version
        before = self._found.get(key)
        if before is not None and before[0]() is tensor and before[1:3] == (place, version):
            return before[3]
        found = read(name, tensor)
        self._found[key] = (weakref.ref(tensor, lambda _: self._found.pop(key, None)), place, version, found)
        return found

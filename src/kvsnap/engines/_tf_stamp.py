"""What tells that a model was changed under live rows, without reading a weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvsnap.engines._tf_adapters import in_use

__all__ = ["Stamp", "stamp_of"]


@dataclass(frozen=True, slots=True)
class Stamp:
    """What torch counts of the tensors of a model, and the adapters that its modules use.

    It does not see everything (`parameter.data.add_(...)` leaves no trace), so it never stands for a digest.
    """

    tensors: tuple[object, ...]
    adapters: tuple[object, ...]

    def holds(self, module: Any) -> bool:
        """Tell whether the adapters in use are the same. Tensors that were changed stay so, for the next full look."""
        return not self.adapters or self.adapters == _adapters(module)


def stamp_of(module: Any) -> Stamp:
    """Return what is another after a weight was changed in place, replaced or moved, or an adapter was switched."""
    return Stamp(tuple(_tensors(module)), _adapters(module))


def _adapters(module: Any) -> tuple[object, ...]:
    return tuple(used for part in module.modules() if (used := in_use(part)))


def _tensors(module: Any) -> Iterator[object]:
    for part in module.modules():
        kind = str(getattr(part, "rope_type", "")) if part._buffers else ""
        moves = "dynamic" in kind or "longrope" in kind  # stretched as the text grows
        buffers = (t for name, t in part._buffers.items() if not (moves and name.endswith("inv_freq")))
        for tensor in (*part._parameters.values(), *buffers):
            if tensor is not None:  # an inference tensor counts no versions
                yield tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version

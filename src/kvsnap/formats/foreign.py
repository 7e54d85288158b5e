"""What a snapshot from a foreign file holds that no other format has a place for."""

from __future__ import annotations

from kvsnap.layout import Snapshot
from kvsnap.protocols import Loss

__all__ = ["foreign_losses"]


def foreign_losses(snapshot: Snapshot, target: str) -> tuple[Loss, ...]:
    """Return one loss for each thing in `source["extra"]`, unless the snapshot came from this very format.

    Heads beside a slab (`Layer.by_head`) are among them.
    """
    origin = str(snapshot.source.get("format", target))
    if origin == target:
        return ()
    return tuple(Loss("field", what, f"only {origin} has a place for it") for what in snapshot.source.get("extra", ()))

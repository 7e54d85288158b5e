"""What a snapshot from a foreign file holds that no other format has a place for."""

from __future__ import annotations

from kvsnap.layout import Snapshot
from kvsnap.protocols import Loss

__all__ = ["foreign_losses"]


def foreign_losses(snapshot: Snapshot, target: str) -> tuple[Loss, ...]:
    """Return one loss for each thing in `source["extra"]`, unless the snapshot came from this format; and the draft.

    Heads beside a slab (`Layer.by_head`) are among them.
    """
    origin = str(snapshot.source.get("format", target))
    extra = () if origin == target else snapshot.source.get("extra", ())
    found = [Loss("field", what, f"only {origin} has a place for it") for what in extra]
    if snapshot.draft is not None and target != "native":
        found.append(Loss("field", "draft", "the state of the draft is left out: it starts empty"))
    return tuple(found)

"""Making room: what a prune evicts and a collection removes, and in which order. All of it under the lock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from heapq import heappop, heappush

from kvsnap.errors import KvsnapError
from kvsnap.library.contents import DAMAGED, NEWER, ORPHANED, UNREADABLE
from kvsnap.library.place import NAMES, Place
from kvsnap.library.reports import CollectReport, Evicted, PruneReport
from kvsnap.library.view import View

__all__ = ["collect", "prune", "remove_unneeded"]

_BAD = (DAMAGED, ORPHANED)


def prune(
    place: Place, view: View, max_bytes: int, *, is_other: Callable[[str], bool], keep: str = "", dry_run: bool
) -> PruneReport:
    """Set damaged files apart, then evict sessions until the files take at most `max_bytes`.

    `is_other` tells of a file whether it is of another identity than the one in use. The file `keep` stays, and what it
    needs. `view` follows what is done.
    """
    before, set_apart, skipped = view.total, [], set()
    for file_id in [f for f in view.rows if view.state(f) in _BAD]:
        if view.is_needed(file_id) or file_id in view.needed:
            continue
        if place.is_busy(file_id):
            skipped.add(file_id)
            continue
        done = Evicted(
            file_id, _names(view, file_id), view.seen[file_id].size, view.facts(file_id).reason or "no parent"
        )
        if not dry_run and not _set_apart(place, file_id):
            skipped.add(file_id)
            continue
        set_apart.append(done)
        _drop_file(view, file_id)
    evicted = _evict(place, view, max_bytes, is_other, keep, skipped, dry_run=dry_run)
    return PruneReport(
        max_bytes=max_bytes, before=before, after=view.total, evicted=tuple(evicted), set_apart=tuple(set_apart),
        skipped=tuple(sorted(skipped)), held_by=_held_by(view), foreign=len(view.others),
        foreign_bytes=view.other_bytes, dry_run=dry_run,
    )  # fmt: skip


def _evict(
    place: Place,
    view: View,
    max_bytes: int,
    is_other: Callable[[str], bool],
    keep: str,
    skipped: set[str],
    *,
    dry_run: bool,
) -> list[Evicted]:
    evicted: list[Evicted] = []
    total = view.total
    if total <= max_bytes:
        return evicted
    kept = _kept(view) | {keep}
    # What cannot be read now cannot be read later either, and means or needs what it did.
    kept |= {file_id for file_id in view.rows if view.may_be_needed(file_id)}
    queue: list[tuple[bool, bool, int, str]] = []

    def offer(file_id: str) -> None:
        """Queue a file that no fork needs: first what has no name, then other identities, then the least recent."""
        if file_id in view.rows and file_id not in kept | skipped and not view.children.get(file_id):
            heappush(queue, (bool(view.names.get(file_id)), not is_other(file_id), view.last_use(file_id), file_id))

    def evict(file_id: str, why: str) -> str:
        """Evict a file; return the parent that it leaves behind."""
        nonlocal total
        parent = view.facts(file_id).parent
        if not _remove(place, view, file_id, why, evicted, skipped, dry_run=dry_run):
            return ""
        total -= evicted[-1].nbytes
        return parent

    for file_id in view.rows:
        offer(file_id)
    while queue and total > max_bytes:
        is_named, is_same, _, file_id = heappop(queue)
        parent = evict(file_id, "no name" if not is_named else "least used" if is_same else "another identity")
        # A parent without a name that only this fork needed is of no use to anyone, whatever the limit.
        while parent in view.rows and not view.names.get(parent) and not (view.children.get(parent) or parent in kept):
            parent = evict(parent, "no name")
        offer(parent)
    return evicted


def _kept(view: View) -> set[str]:
    """Return the files that no prune may remove: pinned ones, and those not ours to judge.

    What they need stays as well: only files that nobody needs are ever offered.
    """
    kept = {f for f in view.rows if view.state(f) in (*_BAD, NEWER, UNREADABLE)}
    return kept | {pointer.file_id for pointer in view.pointers.values() if pointer.pinned}


def _held_by(view: View) -> tuple[str, ...]:
    """Return what cannot be read, so that nobody knows which files it means or needs: file ids, and names/NAME."""
    return (*sorted(view.unclear()), *(f"{NAMES}/{name}" for name in sorted(view.unread_names)))


def _remove(
    place: Place, view: View, file_id: str, why: str, done: list[Evicted], skipped: set[str], *, dry_run: bool
) -> bool:
    """Remove a file and the names that mean it, names first: killed in between, it is a file that no name reaches."""
    if place.is_busy(file_id):
        skipped.add(file_id)
        return False
    made = Evicted(file_id, _names(view, file_id), view.seen[file_id].size, why)
    if not dry_run:
        try:
            for name in made.names:
                place.remove_pointer(name)
            place.remove_session(file_id)
        except KvsnapError:  # no permission: the next one may go, and this one keeps its names
            skipped.add(file_id)
            for name in made.names:
                with suppress(KvsnapError):
                    place.write_pointer(name, view.pointers[name])
            return False
    done.append(made)
    view.drop(file_id)
    return True


def _names(view: View, file_id: str) -> tuple[str, ...]:
    return tuple(view.names.get(file_id, ()))


def _set_apart(place: Place, file_id: str) -> bool:
    try:
        place.set_apart(file_id)
    except KvsnapError:  # no permission: it stays where it is
        return False
    return True


def _drop_file(view: View, file_id: str) -> None:
    """Take note that a file is gone, and its names are not."""
    names = view.names.pop(file_id, None)
    view.drop(file_id)
    if names:
        view.names[file_id] = names


def collect(place: Place, view: View, *, dry_run: bool) -> CollectReport:
    """Remove the files that no name reaches, marking through parents. What is damaged or being written stays."""
    held = {*_held_by(view), *(f for f in view.rows if view.state(f) in (UNREADABLE, NEWER))}
    removed: list[Evicted] = []
    skipped: set[str] = set()
    if not held:
        reached = view.reached()
        left = [f for f in view.rows if f not in reached and view.state(f) not in (*_BAD, NEWER, UNREADABLE)]
        while True:
            # Forks go before the files that they need: killed in between, none is left without its parent.
            ready = [f for f in left if f in view.rows and f not in skipped and not view.children.get(f)]
            if not ready:
                break
            for file_id in sorted(ready):
                _remove(place, view, file_id, "no name", removed, skipped, dry_run=dry_run)
    return CollectReport(
        removed=tuple(removed), skipped=tuple(sorted(skipped)), held_by=tuple(sorted(held)), dry_run=dry_run
    )


def remove_unneeded(place: Place, view: View, file_id: str, lost: tuple[str, ...] = ()) -> list[Evicted]:
    """Remove a file that `lost` these names, and then those that only it needed, unless a name or a fork needs them.

    Where that cannot be known they stay; so does the file itself where only a fork may need it.
    """
    removed: list[Evicted] = []
    skipped: set[str] = set()
    at = file_id
    while at in view.rows and not view.names.get(at) and not view.children.get(at):
        if at in view.needed or view.unclear(but=at) or (not lost and view.may_be_needed(at)):
            break
        parent = view.facts(at).parent
        if view.state(at) in _BAD:
            place.set_apart(at)
            view.drop(at)
        elif not _remove(place, view, at, "removed" if lost else "no name", removed, skipped, dry_run=False):
            break
        else:
            removed[-1] = replace(removed[-1], names=lost)
        at, lost = parent, ()
    return removed

"""One look at a library: names, files, who needs whom, and when each was used. Nothing here changes anything."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from kvsnap.errors import InputError, KvsnapError, MissingError
from kvsnap.library.catalogue import Catalogue, CatalogueLost, Row
from kvsnap.library.contents import DAMAGED, FOREIGN, OK, ORPHANED, UNKNOWN, UNREADABLE, Facts, read_facts
from kvsnap.library.names import check_name
from kvsnap.library.place import (
    LINK,
    NAMES,
    OF_OTHERS,
    QUARANTINE,
    SESSIONS,
    UNDECODED,
    Place,
    Pointer,
    Seen,
    file_id_of,
    session_name,
)

__all__ = ["MISSING", "SET_APART", "View", "look"]

MISSING = "missing"
"""A name whose file is gone."""
SET_APART = "set apart"
"""A name whose file was damaged and lies in the quarantine."""


@dataclass(slots=True)
class View:
    """What was there at one moment. Files are named by their file id, 32 hex digits.

    `unread_names` may mean any file, `unread_forks` (of other users) may need any. `needed` are files that names which
    are no legal ones mean, and that forks of other users need.
    """

    pointers: dict[str, Pointer] = field(default_factory=dict)
    bad_names: dict[str, str] = field(default_factory=dict)
    seen: dict[str, Seen] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    other_bytes: int = 0
    set_apart: dict[str, int] = field(default_factory=dict)
    uses: dict[str, int] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    children: dict[str, list[str]] = field(default_factory=dict)
    unread_names: list[str] = field(default_factory=list)
    unread_forks: list[str] = field(default_factory=list)
    needed: set[str] = field(default_factory=set)
    epoch: int = 0

    @property
    def total(self) -> int:
        """Bytes of all files in sessions/ that are ours."""
        return sum(seen.size for seen in self.seen.values())

    def facts(self, file_id: str) -> Facts:
        """Return what a file holds."""
        return self.rows[file_id].facts

    def state(self, file_id: str) -> str:
        """Return the state of a file, or of what a name means: a word of `contents`, or missing, or set apart."""
        row = self.rows.get(file_id)
        if row is None:
            return SET_APART if any(name.startswith(file_id) for name in self.set_apart) else MISSING
        parent = row.facts.parent
        if row.facts.state == OK and parent and parent not in self.rows and not self._is_of_others(parent):
            return ORPHANED
        return row.facts.state

    def _is_of_others(self, file_id: str) -> bool:
        return self.others.get(session_name(file_id)) == OF_OTHERS

    def last_use(self, file_id: str) -> int:
        """Return when a file was used last: the catalogue knows, or else the time of the file, whichever is later."""
        seen = self.seen.get(file_id)
        return max(self.uses.get(file_id, 0), seen.mtime_ns if seen else 0)

    def ancestors(self, file_id: str) -> Iterator[str]:
        """Yield the files that a fork needs, nearest first, as far as they are there."""
        met = {file_id}
        row = self.rows.get(file_id)
        while row is not None and row.facts.parent and row.facts.parent not in met:
            parent = row.facts.parent
            met.add(parent)
            row = self.rows.get(parent)
            if row is not None:
                yield parent

    def descendants(self, file_id: str) -> Iterator[str]:
        """Yield the files that need this one."""
        met, left = {file_id}, list(self.children.get(file_id, ()))
        while left:
            child = left.pop()
            if child not in met:
                met.add(child)
                yield child
                left += self.children.get(child, ())

    def reached(self) -> set[str]:
        """Return the files that a name means, and all that those need."""
        found: set[str] = set()
        for file_id in (*self.needed, *(pointer.file_id for pointer in self.pointers.values())):
            found.add(file_id)
            found.update(self.ancestors(file_id))
        return found

    def is_needed(self, file_id: str) -> bool:
        """Tell whether a fork that can be read needs the file."""
        return any(self.facts(child).state in (OK, ORPHANED) for child in self.descendants(file_id))

    def unclear(self, *, but: str = "") -> list[str]:
        """Return the files that may be forks of any file, since they cannot be read; not the file `but`."""
        unknown = (f for f in self.children.get(UNKNOWN, ()) if f != but)
        return [*self.unread_forks, *unknown]

    def may_be_needed(self, file_id: str) -> bool:
        """Tell whether what cannot be read, or is not ours, means the file or needs it, as far as one can know."""
        meant = bool(self.unread_names) and not self.names.get(file_id)
        return meant or file_id in self.needed or bool(self.unclear(but=file_id))

    def drop(self, file_id: str) -> None:
        """Take note that a file is gone."""
        row = self.rows.pop(file_id, None)
        self.seen.pop(file_id, None)
        for name in self.names.pop(file_id, ()):
            self.pointers.pop(name, None)
        if row is not None and file_id in self.children.get(row.facts.parent, ()):
            self.children[row.facts.parent].remove(file_id)

    def pointer(self, name: str, place: Place) -> Pointer:
        """Return what a name means. Raise `MissingError`, `DamagedError`, `InputError` for what is not ours."""
        if name in self.pointers:
            return self.pointers[name]
        if name in self.bad_names:
            place.read_pointer(name)
            raise InputError(f"this name is not ours: {self.bad_names[name]}", path=place.path, found=ascii(name))
        raise MissingError("there is no session of this name", path=place.path, found=ascii(name))


def look(place: Place, catalogue: Catalogue) -> View:
    """Look at what is there; only files that changed since they were looked at are read.

    The catalogue follows. Raise `CatalogueLost` (also where names moved meanwhile: look again), `StorageError`,
    `InputError` where a directory was replaced by a link.
    """
    place.check()
    view = View()
    _look_at_names(place, view)
    listing = place.listing(SESSIONS)
    view.others, view.other_bytes = dict(listing.others), listing.other_bytes
    _look_at_others(place, view)
    for name, seen in listing.ours.items():
        file_id = file_id_of(name)
        if file_id is None:
            view.others[ascii(name)[1:-1]], view.other_bytes = (
                "not a name of a session file",
                view.other_bytes + seen.size,
            )
        else:
            view.seen[file_id] = seen
    view.set_apart = {name: seen.size for name, seen in place.listing(QUARANTINE).ours.items()}
    view.epoch = catalogue.epoch
    known = catalogue.rows()
    changed = _changed(place, view, known)
    gone = [file_id for file_id in known if file_id not in view.seen and _is_gone(place, view, file_id)]
    if changed or gone:
        expected = {*changed, *(known.keys() & view.seen.keys())}
        catalogue.update(changed, gone, known)
        view.epoch = catalogue.epoch
        known = catalogue.rows()
        # Whoever does not see a file does not see what it needs: the catalogue may have been replaced in between.
        if any(f not in known and os.path.lexists(place.session(f)) for f in expected):
            raise CatalogueLost
    for file_id in [f for f in view.seen if f in known]:
        facts = known[file_id].facts
        if facts.state == FOREIGN:
            view.others[session_name(file_id)] = facts.reason
            view.other_bytes += view.seen.pop(file_id).size
            continue
        view.rows[file_id] = known[file_id]
        view.children.setdefault(facts.parent, []).append(file_id)
    view.children.pop("", None)
    view.seen = {f: seen for f, seen in view.seen.items() if f in view.rows}  # what vanished while it was read
    view.uses = catalogue.uses()
    if _moved(place, view):
        raise CatalogueLost
    return view


def _is_gone(place: Place, view: View, file_id: str) -> bool:
    """Tell whether a file that was not listed is no session, and not one that was made since."""
    return session_name(file_id) in view.others or not os.path.lexists(place.session(file_id))


def _look_at_names(place: Place, view: View) -> None:
    listing = place.listing(NAMES)
    view.bad_names.update(listing.others)
    view.unread_names += [name for name, why in sorted(listing.others.items()) if why in (LINK, OF_OTHERS, UNDECODED)]
    for name, seen in sorted(listing.ours.items()):
        try:
            check_name(name)
        except InputError as error:
            view.bad_names[ascii(name)[1:-1]] = error.message
            with suppress(KvsnapError):  # made where it was legal, as under another version of Unicode
                view.needed.add(place.pointer_of(seen).file_id)
            continue
        try:
            view.pointers[name] = pointer = place.pointer_of(seen)
        except MissingError:
            continue
        except KvsnapError as error:
            view.bad_names[name] = error.message
            view.unread_names.append(name)
            continue
        view.names.setdefault(pointer.file_id, []).append(name)


def _moved(place: Place, view: View) -> bool:
    """Tell whether a name whose file is not seen means another one by now: its session was compacted meanwhile."""
    for name, pointer in view.pointers.items():
        if pointer.file_id not in view.rows:
            try:
                now = place.read_pointer(name)
            except MissingError:
                return True
            except KvsnapError:  # told by whoever opens it
                continue
            if now != pointer:
                return True
    return False


def _look_at_others(place: Place, view: View) -> None:
    """Look at session files of other users, which may be forks of ours. They are no part of the view."""
    for name, why in view.others.items():
        file_id = file_id_of(name) if why == OF_OTHERS else None
        facts = read_facts(place.session(file_id), file_id) if file_id else None
        if facts is None or file_id is None:
            continue
        if facts.parent == UNKNOWN or facts.state == UNREADABLE:
            view.unread_forks.append(file_id)
        elif facts.parent:
            view.needed.add(facts.parent)


def _changed(place: Place, view: View, known: Mapping[str, Row]) -> dict[str, tuple[tuple[int, ...], Facts]]:
    """Read the files that are not as the catalogue knows them, and what depends on them."""
    changed: dict[str, tuple[tuple[int, ...], Facts]] = {}

    def read(file_id: str) -> None:
        seen, before = view.seen[file_id], known.get(file_id)
        facts = read_facts(place.session(file_id), file_id, before.facts if before else None)
        if facts is not None:
            changed[file_id] = seen.stamp, facts

    for file_id, seen in view.seen.items():
        row = known.get(file_id)
        if row is None or row.stamp != seen.stamp or row.facts.state in (ORPHANED, UNREADABLE):
            read(file_id)
    # A fork is only as good as the file that its history starts in.
    suspects = {f for f, (_, facts) in changed.items() if facts.state == DAMAGED or _was(known, f) == DAMAGED}
    suspects |= {f for name, why in view.others.items() if why == OF_OTHERS and (f := file_id_of(name))}
    while suspects:
        forks = [f for f in view.seen if f in known and f not in changed and known[f].facts.parent in suspects]
        for file_id in forks:
            read(file_id)
        suspects = set(forks)
    return changed


def _was(known: Mapping[str, Row], file_id: str) -> str:
    row = known.get(file_id)
    return row.facts.state if row else ""


def is_wide(mode: int) -> bool:
    """Tell whether permissions let others in."""
    return os.name == "posix" and bool(mode & 0o077)

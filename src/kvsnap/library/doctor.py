"""Looking a library over: what is not as it should be, and what to do about it. Changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace

from kvsnap.errors import KvsnapError
from kvsnap.formats.native import NativeFile, verify_file
from kvsnap.library.catalogue import Catalogue
from kvsnap.library.contents import DAMAGED, NEWER, OK, ORPHANED, UNREADABLE, read_facts
from kvsnap.library.names import likeness
from kvsnap.library.place import CATALOGUE, LOCK, MARKER, NAMES, QUARANTINE, SESSIONS, Place, session_name
from kvsnap.library.reports import Doctor, Finding
from kvsnap.library.view import MISSING, SET_APART, View, is_wide
from kvsnap.protocols import Progress

__all__ = ["examine"]

_HINTS = {
    DAMAGED: "kvsnap repair @NAME -o NEW writes what can be proven; kvsnap prune sets it apart",
    ORPHANED: "put the file of its parent back into sessions/",
    NEWER: "a newer release of kvsnap reads it",
    UNREADABLE: "mend the permissions",
    MISSING: "put the file back, or remove the name: kvsnap rm",
    SET_APART: "it lies in quarantine/, see there; remove the name to use it again: kvsnap rm",
}


def examine(place: Place, catalogue: Catalogue, view: View, max_bytes: int | None) -> Doctor:
    """Return all that can be said of a library."""
    findings = [
        *_names(view), *_files(place, view), *_strange(place, view), *_permissions(place, view),
        *_disagreements(place, catalogue, view),
    ]  # fmt: skip
    findings += [Finding("catalogue", CATALOGUE, note, is_problem=False) for note in catalogue.notes]
    total = view.total
    if max_bytes is not None and total > max_bytes:
        findings.append(
            Finding(
                "size", SESSIONS, f"{total} bytes, {total - max_bytes} over the limit of {max_bytes}", "kvsnap prune"
            )
        )
    return Doctor(
        path=place.path, n_names=len(view.pointers), n_files=len(view.rows), nbytes=total, max_bytes=max_bytes,
        set_apart=len(view.set_apart), set_apart_bytes=sum(view.set_apart.values()), foreign=len(view.others),
        foreign_bytes=view.other_bytes, findings=tuple(findings),
    )  # fmt: skip


def examine_bytes(place: Place, view: View, found: Doctor, progress: Progress | None) -> Doctor:
    """Return the same with what a check of every byte of every session finds. A file that vanishes is left out."""
    findings, done = list(found.findings), 0
    for file_id in sorted(view.rows):
        told = done

        def report(at: int, _all: int, told: int = told) -> None:
            if progress is not None:
                progress(min(told + at, view.total), view.total)

        done += view.seen[file_id].size
        if view.state(file_id) != OK:
            continue  # said already
        where = ", ".join(view.names.get(file_id, ())) or f"{SESSIONS}/{session_name(file_id)}"
        with suppress(KvsnapError), closing(NativeFile.open(place.session(file_id), mapped=False)) as file:
            damages = verify_file(file, report).damages
            findings += [Finding(DAMAGED, where, str(d), _HINTS[DAMAGED], is_problem=d.live) for d in damages]
    return replace(found, findings=tuple(findings))


def _names(view: View) -> Iterator[Finding]:
    for name, why in sorted(view.bad_names.items()):
        hint = "remove this file by hand when nobody needs it"
        if name in view.unread_names:
            hint = "while it cannot be read, files without a name stay: kvsnap fork sessions/ID.kvsnap @NEW copies one"
        yield Finding("name", f"{NAMES}/{name}", why, hint)
    for name, pointer in sorted(view.pointers.items()):
        state = view.state(pointer.file_id)
        if state != OK:
            yield Finding(state, name, _reason(view, pointer.file_id) or f"its file is {state}", _HINTS.get(state, ""))
    alike: dict[str, list[str]] = {}
    for name in view.pointers:
        alike.setdefault(likeness(name), []).append(name)
    for names in alike.values():
        if len(names) > 1:
            yield Finding("name", NAMES, f"names that look alike: {', '.join(names)}", "kvsnap rename one of them")


def _reason(view: View, file_id: str) -> str:
    """Return what is wrong with a file, where more is known of it than its state."""
    row = view.rows.get(file_id)
    if row is not None and view.state(file_id) == ORPHANED and not row.facts.reason:
        return f"the file that its history starts in is gone: {session_name(row.facts.parent)}"
    return row.facts.reason if row is not None else ""


def _files(place: Place, view: View) -> Iterator[Finding]:
    reached = view.reached()
    for file_id in sorted(view.rows):
        if file_id in reached:
            continue
        where = f"{SESSIONS}/{session_name(file_id)}"
        state = view.state(file_id)
        if state != OK:
            yield Finding(state, where, _reason(view, file_id) or state, _HINTS.get(state, ""))
        else:
            yield Finding(
                "orphan", where, f"no name reaches this file of {view.seen[file_id].size} bytes",
                "kvsnap collect removes it" if not view.may_be_needed(file_id) else "it stays: see what cannot be read",
            )  # fmt: skip
    for name, size in sorted(view.set_apart.items()):
        yield Finding(
            "quarantine", f"{QUARANTINE}/{name}", f"a damaged file of {size} bytes that was set apart",
            "kvsnap repair FILE -o NEW writes what can be proven (of a fork in sessions/ only, beside its parent); "
            "remove it by hand when nobody needs it", is_problem=False,
        )  # fmt: skip
    if not os.path.lexists(place.within(LOCK)):
        yield Finding("lock", LOCK, "the lock file is gone; the next change makes it anew", is_problem=False)


def _strange(place: Place, view: View) -> Iterator[Finding]:
    for name, why in sorted(view.others.items()):
        yield Finding("foreign", f"{SESSIONS}/{name}", f"left alone: {why}", is_problem=False)
    for name in place.strangers():
        yield Finding("foreign", name, "left alone: not a part of a library", is_problem=False)


def _permissions(place: Place, view: View) -> Iterator[Finding]:
    for name in ("", NAMES, SESSIONS, QUARANTINE, MARKER, CATALOGUE):
        path = place.within(name) if name else place.path
        try:
            mode = os.stat(path, follow_symlinks=not name).st_mode & 0o7777
        except OSError:
            continue
        if is_wide(mode):
            yield Finding("permissions", name or ".", f"others may look in: {mode:04o}", "chmod go-rwx")
    for file_id, seen in sorted(view.seen.items()):
        if is_wide(seen.mode):
            yield Finding(
                "permissions", f"{SESSIONS}/{session_name(file_id)}", f"others may look in: {seen.mode:04o}",
                "chmod go-rwx",
            )  # fmt: skip


def _disagreements(place: Place, catalogue: Catalogue, view: View) -> Iterator[Finding]:
    """Read every file again and compare it with what the catalogue says of it."""
    for file_id, row in sorted(view.rows.items()):
        found = read_facts(place.session(file_id), file_id, row.facts)
        if found is None:
            continue
        if found.dropped and not place.is_busy(file_id):
            yield Finding(
                "torn", f"{SESSIONS}/{session_name(file_id)}",
                f"{found.dropped} bytes behind the last published turn are not part of the history",
                "kvsnap verify says what they are; the next turn takes their place", is_problem=False,
            )  # fmt: skip
        known = replace(row.facts, state=view.state(file_id))
        differing = [
            name for name in ("state", "n_tokens", "n_rows", "n_commits", "complete", "created_ns", "parent")
            if getattr(known, name) != getattr(found, name)
        ]  # fmt: skip
        if known.state == OK and (found.turns.shape != known.turns.shape or (found.turns != known.turns).any()):
            differing.append("turns")
        if known.state == OK and not differing:
            now, agreed = catalogue.agreed(row, found.tokens, found.n_tokens)
            if agreed != found.n_tokens and now.history == row.history:
                differing.append("ids")
        if differing and _is_unchanged(place, file_id, row.stamp):
            yield Finding(
                "catalogue", f"{SESSIONS}/{session_name(file_id)}",
                f"the catalogue says otherwise of {', '.join(differing)}", f"remove {CATALOGUE}: it is made anew",
            )  # fmt: skip


def _is_unchanged(place: Place, file_id: str, stamp: tuple[int, ...]) -> bool:
    """Tell whether the file is still the one that was looked at: another process may write it all the while."""
    try:
        found = os.lstat(place.session(file_id))
    except OSError:
        return False
    return (found.st_size, found.st_mtime_ns, found.st_ino) == stamp

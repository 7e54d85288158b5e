"""Answers from one look at a library: the list of names, the longest common history, the tree of forks."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvsnap.errors import FormatError, InputError
from kvsnap.identity import Identity, compare
from kvsnap.library.catalogue import Catalogue, CatalogueLost, Row
from kvsnap.library.contents import OK
from kvsnap.library.place import Place
from kvsnap.library.reports import Branch, Entry, Found
from kvsnap.library.trie import is_end, reusable
from kvsnap.library.view import View

__all__ = ["checked_ids", "differs", "entries", "entry", "find", "tree"]

_TOP = 2**31


def checked_ids(tokens: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return token ids as int32 `[ids]`. Raise `InputError` for what is no id, naming its place."""
    for place, token in enumerate(tokens):
        try:
            number = operator.index(token)
        except TypeError:
            raise InputError(f"token {place} is not a whole number", found=repr(token)) from None
        if not 0 <= number < _TOP:
            raise InputError(f"token {place} is out of range", expected="0 to 2^31 - 1", found=number)
    return np.array(tokens, dtype=np.int32)


@lru_cache(maxsize=64)
def _parsed(text: str) -> Identity | None:
    try:
        return Identity.from_dict(json.loads(text))
    except (FormatError, ValueError, RecursionError):
        return None


def _summary(identity: Identity | None, digest: bytes) -> str:
    if identity is None or identity == Identity():
        return ""
    words = [identity.architecture, identity.cache_dtype, identity.engine]
    return " ".join([*(word for word in words if word), digest.hex()[:8]])


def entries(place: Place, catalogue: Catalogue, view: View) -> tuple[Entry, ...]:
    """Return one entry for each name, sorted by name, but for names that do not say what they mean."""
    return tuple(entry(place, catalogue, view, name) for name in sorted(view.pointers))


def entry(place: Place, catalogue: Catalogue, view: View, name: str) -> Entry:
    """Return the entry of one name."""
    pointer = view.pointers[name]
    file_id, state = pointer.file_id, view.state(pointer.file_id)
    made = Entry(name=name, file_id=file_id, path=place.session(file_id), state=state, pinned=pointer.pinned)
    row = view.rows.get(file_id)
    if row is None:
        return replace(made, reason="its file is not in sessions/")
    facts, own = row.facts, view.seen[file_id].size
    above = sum(view.seen[a].size for a in view.ancestors(file_id))
    reason = facts.reason if facts.state != OK else "" if state == OK else "the file of its parent is gone"
    return replace(
        made, reason=reason, n_tokens=facts.n_tokens, n_rows=facts.n_rows, n_commits=facts.n_commits,
        complete=facts.complete, nbytes=own + above, own_bytes=own, created_ns=facts.created_ns,
        last_use_ns=view.last_use(file_id), parent=facts.parent, parent_names=tuple(view.names.get(facts.parent, ())),
        identity=_summary(_parsed(catalogue.identity(row.identity)), row.identity),
    )  # fmt: skip


def find(
    place: Place, catalogue: Catalogue, view: View, ids: npt.NDArray[np.int32], identity: Identity | None
) -> Found | None:
    """Return the named, readable session with most rows of use for these ids; None when there is none.

    Of equals it is one that is kept up to the end of a turn, then the one used last.
    """
    usable = _usable(catalogue, view, identity)
    if not len(ids) or not usable:
        return None
    best: tuple[int, bool, int, str] | None = None
    chosen: tuple[Row, int] | None = None
    # Rows whose ids are not stored come on top of those that agree.
    slack = max(r.facts.n_rows + r.facts.n_pending - r.facts.n_tokens for r in usable.values())
    for reach in catalogue.reaches(ids):
        for number, agreed in reach.files.items():
            row = usable.get(number)
            if row is None:
                continue
            keep, rows = reusable(row.facts, agreed)
            # Where a turn ended its logits are there, and nothing was evaluated together with what goes.
            rank = rows, is_end(row.facts, keep), view.last_use(row.file_id), row.file_id
            if rows and (best is None or rank > best):
                best, chosen = rank, (row, agreed)
        if best is not None and best[0] >= reach.start + slack:
            break  # what is still to come agrees less
    if catalogue.epoch != view.epoch:  # another one, where other files have these numbers
        raise CatalogueLost
    if chosen is None:
        return None
    # What the trie says is checked against the whole history; the file may have changed meanwhile.
    row, agreed = catalogue.agreed(chosen[0], ids, chosen[1])
    names = tuple(view.names[row.file_id])
    keep, rows = reusable(row.facts, agreed)
    if not rows:
        raise CatalogueLost  # it was of use a moment ago: look again
    return Found(names[0], row.file_id, place.session(row.file_id), agreed, rows, keep, names)


def _usable(catalogue: Catalogue, view: View, identity: Identity | None) -> dict[int, Row]:
    """Return the rows that a search may answer with, by number; identities are compared once each."""
    fits: dict[bytes, bool] = {}
    found = {}
    for file_id in view.names:
        row = view.rows.get(file_id)
        if row is None or view.state(file_id) != OK:
            continue
        if identity is not None and row.identity not in fits:
            saved = _parsed(catalogue.identity(row.identity))
            fits[row.identity] = saved is not None and compare(saved, identity).ok
        if identity is None or fits[row.identity]:
            found[row.number] = row
    return found


def differs(catalogue: Catalogue, view: View, identity: Identity | None) -> Callable[[str], bool]:
    """Return a function that tells of a file whether it is known to be of another identity. All is read now."""
    other: set[bytes] = set()
    if identity is not None:
        for digest in {row.identity for row in view.rows.values()}:
            saved = _parsed(catalogue.identity(digest))
            if saved is not None and any(
                f.level == "fatal" and f.verdict == "differ" for f in compare(saved, identity).fields
            ):
                other.add(digest)
    foreign = {row.file_id for row in view.rows.values() if row.identity in other}
    return foreign.__contains__


def tree(view: View) -> tuple[Branch, ...]:
    """Return all files as a forest, sorted by name and then by file id."""
    made: dict[str, Branch] = {}

    def order(file_id: str) -> tuple[bool, list[str], str]:
        names = view.names.get(file_id, [])
        return not names, names, file_id

    met: set[str] = set()
    stack = [f for f, row in view.rows.items() if row.facts.parent not in view.rows]
    ranked = list(stack)
    while stack:
        file_id = stack.pop()
        if file_id not in met:
            met.add(file_id)
            below = view.children.get(file_id, [])
            ranked += below
            stack += below
    for file_id in reversed(ranked):  # forks first, so that each finds its own
        row = view.rows[file_id]
        forks = tuple(made[child] for child in sorted(view.children.get(file_id, ()), key=order) if child in made)
        made[file_id] = Branch(
            file_id, tuple(view.names.get(file_id, ())), row.facts.n_tokens, view.seen[file_id].size,
            view.state(file_id), forks,
        )  # fmt: skip
    roots = [f for f, row in view.rows.items() if row.facts.parent not in view.rows]
    return tuple(made[f] for f in sorted(roots, key=order))

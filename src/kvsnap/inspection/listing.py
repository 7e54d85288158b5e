"""A directory as a table: the sessions of a library, or the files that kvsnap reads. No tensor is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, fields, replace

from kvsnap import codecs
from kvsnap.errors import FormatError, InputError, KvsnapError, MissingError
from kvsnap.formats.native import NativeFile
from kvsnap.formats.native.said import Said, unpack_messages
from kvsnap.formats.native.told import piece_of
from kvsnap.inspection.described import InLibrary, Summary
from kvsnap.inspection.excerpt import excerpts
from kvsnap.inspection.summary import summarise
from kvsnap.inspection.turns import turn_counts
from kvsnap.layout import CUT_OFF
from kvsnap.library import Branch, Entry, Library
from kvsnap.library.place import MARKER, SESSIONS, file_id_of
from kvsnap.results import Result, Table, plain

__all__ = ["SORTS", "Listed", "Listing", "in_library", "is_library", "listing", "listing_of"]

SORTS = ("name", "size", "total", "used", "created", "tokens", "turns", "commits")
"""What a listing can be sorted by."""
_OURS = (".kvsnap", ".mlxkv", ".coli_kv")
_STATES = {"key": "encrypted", "missing": "no parent"}
"""What the kind of an error means of a file that is there."""
_LOOKED_AT = 8
"""Spans that are read to find the words that a session begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One file or session. Sizes are bytes, times nanoseconds since 1970-01-01 UTC.

    `state` is `ok`, `encrypted` (and no key), `no parent` (a fork whose parent is gone), another word of `Library.list`
    for a session, else the kind of the error that reading it ended with; `reason` says more, and the rest is what is
    known all the same. `nbytes` is the length of the file, `total_bytes` that with all files which its history starts
    in. `n_turns` are the turns of its history, `n_commits` all commits of the file. `model` names what it was made
    with: the name that the file keeps of its model, and architecture, dtype and engine. `encodings` are the codecs of
    its tensors (of a session in a library: of its first spans). `begins` are the first words.
    """

    name: str
    path: str
    format: str = ""
    use: str = ""
    state: str = "ok"
    reason: str = ""
    begins: str = ""
    n_tokens: int = 0
    n_turns: int = 0
    n_commits: int = 0
    complete: bool = True
    nbytes: int = 0
    total_bytes: int = 0
    created_ns: int = 0
    used_ns: int = 0
    model: str = ""
    encodings: tuple[str, ...] = ()
    pinned: bool = False
    parent: str = ""
    parent_names: tuple[str, ...] = ()
    file_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing(Result):
    """What is in a directory. `is_library` tells whether these are the sessions of one.

    `n_other` are files that kvsnap does not read; they are not listed.
    """

    path: str
    is_library: bool
    files: tuple[Listed, ...]
    n_other: int = 0

    def tables(self) -> tuple[Table, ...]:
        """Return the files, one row each."""
        names = [f.name for f in fields(Listed)]
        rows = tuple(tuple(_cell(getattr(one, name)) for name in names) for one in self.files)
        return (Table(self.path, tuple(names), rows),)

    def sorted(self, by: str, *, reverse: bool = False) -> Listing:
        """Return the same, sorted: by name from a on, by all else the largest or latest first; else the other way.

        Equals are by name. Raise `InputError` for an unknown key.
        """
        if by not in SORTS:
            raise InputError("no such key to sort by", expected=", ".join(SORTS), found=by)
        by_name = sorted(self.files, key=lambda one: one.name)
        if by == "name":
            return replace(self, files=tuple(by_name[::-1] if reverse else by_name))
        return replace(self, files=tuple(sorted(by_name, key=_KEYS[by], reverse=not reverse)))


def _cell(value: object) -> str | int | bool:
    return ", ".join(value) if isinstance(value, tuple) else plain(value)


_KEYS: dict[str, Callable[[Listed], int]] = {
    "size": lambda one: one.nbytes,
    "total": lambda one: one.total_bytes,
    "used": lambda one: one.used_ns,
    "created": lambda one: one.created_ns,
    "tokens": lambda one: one.n_tokens,
    "turns": lambda one: one.n_turns,
    "commits": lambda one: one.n_commits,
}


def is_library(path: str | os.PathLike[str]) -> bool:
    """Tell whether a directory says that it is a library."""
    return os.path.isfile(os.path.join(path, MARKER))


def listing(path: str | os.PathLike[str]) -> Listing:
    """List a directory: a library by the names of its sessions, any other one by its files, sorted by name.

    Files of every format that kvsnap reads are listed, judged by content; one that cannot be read, though it is or
    calls itself one of them, is listed with the reason. Directories inside it are left out. Raise `MissingError`,
    `InputError` for what is no directory, and as opening a library does.
    """
    place = os.path.abspath(path)
    if is_library(place):
        with Library(place, readonly=True) as library:
            return listing_of(library)
    try:
        names = sorted(entry.name for entry in os.scandir(place) if entry.is_file())
    except FileNotFoundError as error:
        raise MissingError("there is no such directory", path=place) from error
    except NotADirectoryError as error:
        raise InputError("this is a file, where a directory is expected", path=place) from error
    found = [_file(os.path.join(place, name), name) for name in names]
    files = tuple(one for one in found if one is not None)
    return Listing(path=place, is_library=False, files=files, n_other=len(found) - len(files))


def listing_of(library: Library) -> Listing:
    """List the sessions of an open library, sorted by name.

    Besides its catalogue the first spans of each are read, and its commits.
    """
    return Listing(path=library.path, is_library=True, files=tuple(_session(entry) for entry in library.list()))


def _session(entry: Entry) -> Listed:
    begins, n_turns, model = "", 0, ""
    encodings: tuple[str, ...] = ()
    if entry.state == "ok":
        with suppress(KvsnapError):  # damaged since the catalogue was made: the library tells at its next look
            begins, n_turns, model, encodings = _beginning(entry.path)
    return Listed(
        name=entry.name, path=entry.path, format="native", use="session", state=entry.state, reason=entry.reason,
        begins=begins, n_tokens=entry.n_tokens, n_turns=n_turns, n_commits=entry.n_commits, complete=entry.complete,
        nbytes=entry.own_bytes, total_bytes=entry.nbytes, created_ns=entry.created_ns, used_ns=entry.last_use_ns,
        model=" ".join(word for word in (model, entry.identity) if word), encodings=encodings, pinned=entry.pinned,
        parent=entry.parent, parent_names=entry.parent_names, file_id=entry.file_id,
    )  # fmt: skip


def _beginning(path: str) -> tuple[str, int, str, tuple[str, ...]]:
    """Return of a session its first words, the number of its turns, the name of its model, and codecs.

    From its first spans, and from its commits.
    """
    with closing(NativeFile.open(path, mapped=False)) as file:
        said, live = Said(), file.live
        ids: set[int] = set()
        for span in file.spans(live[:_LOOKED_AT]):
            said = said.add(piece_of(span))
            ids |= {part.codec for part in span.table.parts}
            messages = unpack_messages(said.messages)
            if any(m.get("role") == "user" for m in messages):
                break
        begins = excerpts(said.text, unpack_messages(said.messages))[0]
        names = tuple(codecs.codec_of_id(number).name for number in sorted(ids))
        n_turns = len(live)
        with suppress(KvsnapError):  # a broken chain of commits: every part is taken for a turn
            n_turns = turn_counts(file).n_live
        return begins, n_turns, _name_of(file.metadata), names


def _name_of(metadata: Mapping[str, str]) -> str:
    """Return the name that a file keeps of its model; of a path the last part."""
    return os.path.basename(metadata.get("model", "").rstrip("/"))


def _file(path: str, name: str) -> Listed | None:
    """Return what a file is; None for one that is none of ours, and does not call itself so."""
    try:
        summary = summarise(path, partial=True)
    except FormatError as error:
        return _unread(path, name, error) if name.endswith(_OURS) else None
    except (KvsnapError, OSError) as error:
        return _unread(path, name, error)
    return _summarised(summary, name)


def _unread(path: str, name: str, error: Exception) -> Listed:
    nbytes = modified = 0
    with suppress(OSError):
        found = os.stat(path)
        nbytes, modified = found.st_size, found.st_mtime_ns
    kind = error.kind if isinstance(error, KvsnapError) else "storage"
    reason = error.message if isinstance(error, KvsnapError) else str(error)
    return Listed(
        name=name, path=path, state=kind, reason=reason, nbytes=nbytes, total_bytes=nbytes, used_ns=modified,
        complete=False,
    )  # fmt: skip


def _summarised(s: Summary, name: str) -> Listed:
    error = s.error or {}
    kind = str(error.get("kind", "ok"))
    above = s.fork.above_bytes if s.fork else 0
    words = [
        _name_of(s.metadata),
        s.identity.architecture or s.architecture,
        s.identity.cache_dtype or s.dtype,
        s.identity.engine,
    ]
    return Listed(
        name=name, path=s.path or "", format=s.format, use=s.use, state=_STATES.get(kind, kind),
        reason=str(error.get("message", "")), begins=s.begins, n_tokens=s.n_tokens,
        n_turns=s.turns.n_live if s.turns else int(s.n_tokens > 0), n_commits=s.commit,
        complete=s.complete and s.metadata.get("stop", "") not in CUT_OFF,
        nbytes=s.file_bytes, total_bytes=s.file_bytes + above, created_ns=s.created_ns, used_ns=s.modified_ns,
        model=" ".join(word for word in words if word), encodings=tuple(s.stored),
        parent=s.fork.parent if s.fork else "", file_id=s.file_id,
    )  # fmt: skip


def in_library(path: str | os.PathLike[str]) -> InLibrary | None:
    """Return what the library that a file lies in says of it; None for a file that lies in none. Reads no tensor.

    Raise as opening a library does.
    """
    directory, name = os.path.split(os.path.abspath(path))
    place, sessions = os.path.split(directory)
    file_id = file_id_of(name)
    if sessions != SESSIONS or file_id is None or not is_library(place):
        return None
    with Library(place, readonly=True) as library:
        found = _in_tree(library.tree(), file_id)
        entries = [entry for entry in library.list() if entry.file_id == file_id]
    if found is None:
        return None
    parent, branch = found
    return InLibrary(
        path=place, names=branch.names, parent_names=parent.names if parent else (),
        fork_names=tuple(name for fork in branch.forks for name in fork.names), n_forks=len(branch.forks),
        pinned=any(entry.pinned for entry in entries), last_use_ns=max((e.last_use_ns for e in entries), default=0),
    )  # fmt: skip


def _in_tree(roots: tuple[Branch, ...], file_id: str) -> tuple[Branch | None, Branch] | None:
    left: list[tuple[Branch | None, Branch]] = [(None, root) for root in roots]
    while left:
        parent, branch = left.pop()
        if branch.file_id == file_id:
            return parent, branch
        left += [(branch, fork) for fork in branch.forks]
    return None

"""New files in a library: empty sessions, forks, copies, compacted ones.

A file whose id is known only once it is written is written under a temporary name first.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress

from kvsnap import formats
from kvsnap.errors import InputError, KvsnapError, LossError, UnsupportedError
from kvsnap.files import TEMPORARY_PREFIX, move, remove, replacing, write_whole
from kvsnap.formats.native import NAME, NativeFile
from kvsnap.formats.native.base import MAX_DEPTH
from kvsnap.formats.native.copy import CompactReport, compact_report, copy_session, write_compacted
from kvsnap.formats.native.fork import fork_file
from kvsnap.formats.native.journal import empty_file
from kvsnap.formats.native.vault import refuse_encrypted
from kvsnap.library.place import SESSIONS, Place, Pointer
from kvsnap.protocols import Progress
from kvsnap.session import Session

__all__ = ["added_file", "compacted_session", "empty_session", "fork_session", "point"]

_FILE_ID = slice(40, 56)


def empty_session(place: Place) -> str:
    """Write a session without a history; return its file id."""
    data = empty_file()
    file_id = data[_FILE_ID].hex()
    write_whole(place.session(file_id), data, new=True)
    return file_id


def fork_session(place: Place, file_id: str, *, n_tokens: int | None, commit: int | None, nearest: bool) -> str:
    """Make a fork of a session; return its file id. Nothing is copied, but where 64 forks stand in a row already."""
    path = place.session(file_id)
    try:
        return fork_file(path, n_tokens=n_tokens, commit=commit, nearest=nearest).file_id
    except UnsupportedError:
        with closing(NativeFile.open(path, mapped=False)) as file:
            if file.base is None or file.base.depth < MAX_DEPTH:
                raise
            with _unnamed(place) as temporary:
                made = copy_session(file, temporary, n_tokens=n_tokens, commit=commit, nearest=nearest).file_id
                _name(place, temporary, made)
                return made


@contextmanager
def added_file(place: Place, path: str, progress: Progress | None, *, allow_loss: bool) -> Iterator[Callable[[], str]]:
    """Copy a file of any format as a session of its own, which is not yet a part of the library.

    Yield what is to be called under the lock: it gives the file its name and returns its id. Raise `LossError` listing
    what only a foreign format has a place for, before anything is written, unless `allow_loss`.
    """
    found = formats.format_of(path)
    if found.name == NAME:
        refuse_encrypted(path)
    else:
        snapshot = found.load(path, mmap=True)
        losses = formats.format_named(NAME).losses(snapshot)
        if losses and not allow_loss:
            told = "; ".join(f"{loss.what}: {loss.detail}" for loss in losses[:6])
            raise LossError(
                f"a session cannot hold everything: {told}. Allow it to go on (allow_loss=True, --allow-loss)",
                path=path,
            )
    with _unnamed(place) as temporary:
        if found.name == NAME:
            with closing(NativeFile.open(path, mapped=False)) as file:
                copy_session(file, temporary, progress=progress)
        else:
            with Session.open(temporary) as session:
                session.append(snapshot, progress=progress)
        with closing(NativeFile.open(temporary, mapped=False)) as made:
            file_id = made.header.file_id.hex()
        yield lambda: _name(place, temporary, file_id)


@contextmanager
def compacted_session(
    place: Place, file: NativeFile, progress: Progress | None, states: int | None
) -> Iterator[tuple[CompactReport, Callable[[], str]]]:
    """Write the live history of an open session as a new file, which is not yet a part of the library.

    Yield the report, which names the file, and what is to be called under the lock to give it this name.
    """
    with _unnamed(place) as temporary:
        with replacing(temporary, new=True) as writer:
            history, header, footer = write_compacted(file, writer, progress, states)
        file_id = header.file_id.hex()
        report = compact_report(file, place.session(file_id), history, header, footer)
        yield report, lambda: _name(place, temporary, file_id)


def point(place: Place, pointers: Mapping[str, Pointer], file_id: str, go_on: Callable[[], None]) -> None:
    """Let names mean another file, which nobody knows yet; call `go_on` once one does, also when an error comes behind.

    Where none does after an error, the file is removed.
    """
    try:
        for name, pointer in pointers.items():
            place.write_pointer(name, Pointer(file_id, pointer.pinned))
    finally:
        if any(_means(place, name, file_id) for name in pointers):
            go_on()
        else:
            with suppress(KvsnapError):  # the error that brought us here matters more
                place.remove_session(file_id)


def _means(place: Place, name: str, file_id: str) -> bool:
    try:
        return place.read_pointer(name).file_id == file_id
    except KvsnapError:  # not known: then nothing is removed
        return True


@contextmanager
def _unnamed(place: Place) -> Iterator[str]:
    """Yield a temporary path for a file whose id is not known yet. What is left there in the end is removed."""
    temporary = place.within(SESSIONS, f"{TEMPORARY_PREFIX}{secrets.token_hex(12)}.tmp")
    try:
        yield temporary
    finally:
        if os.path.lexists(temporary):
            with suppress(KvsnapError):  # the error that brought us here matters more
                remove(temporary, sync=False)


def _name(place: Place, temporary: str, file_id: str) -> str:
    """Give a file the name of its id, which makes it a part of the library; return the id."""
    target = place.session(file_id)
    if os.path.lexists(target):
        raise InputError("a file of this id is in the library already", path=target)
    move(temporary, target)
    return file_id

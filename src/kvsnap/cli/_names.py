"""@NAME in the place of a file: a session of the library. All commands resolve it here.

A file whose name starts with @ is typed with its directory: ./@file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvsnap.cli._paths import check_session
from kvsnap.errors import InputError, MissingError
from kvsnap.library import Library, default_path
from kvsnap.library.session import LibrarySession
from kvsnap.session import Session

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "Named",
    "check_place_of_session",
    "count_as_use",
    "library_option",
    "library_path",
    "named",
    "named_or_new",
    "no_name",
    "open_existing",
    "opened_session",
    "resolved",
    "shown",
    "shown_session",
]

Function = TypeVar("Function", bound=Callable[..., Any])
_KEY = "kvsnap.library"


class Named(str):
    """What was typed as @NAME: as text the path of the session's file, or @NAME itself where there is none yet."""

    __slots__ = ("library", "name")

    def __new__(cls, path: str, name: str, library: str) -> Self:
        """Make one from a path, the name, and the directory of the library."""
        made = super().__new__(cls, path)
        made.name, made.library = name, library
        return made

    name: str
    library: str


def _remember(context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        if not value:
            raise InputError("--library needs a directory", found="an empty one")
        context.meta[_KEY] = value


def library_option(function: Function) -> Function:
    """Add `--library DIR` to a command. It may also stand before the name of the command."""
    return click.option(
        "--library", metavar="DIR", expose_value=False, is_eager=True, callback=_remember,
        help="The library that @NAME means; else KVSNAP_LIBRARY, else the one of this user.",
    )(function)  # fmt: skip


def library_path() -> str:
    """Return the directory of the library that this command line means."""
    return str(click.get_current_context().meta.get(_KEY) or default_path())


def open_existing() -> Library:
    """Open the library for reading only. Raise `MissingError` when there is none."""
    where = library_path()
    if not os.path.isdir(where):
        raise MissingError("there is no library here yet; `kvsnap generate --session @NAME` makes one", path=where)
    return Library(where, readonly=True)


def resolved(text: str, *, may_be_new: bool) -> str:
    """Return the file that a text means; one of a session that may be new is @NAME itself where there is none yet."""
    if not text.startswith("@"):
        return text
    name, where = text[1:], library_path()
    if may_be_new and not os.path.isdir(where):
        return Named(text, name, where)
    with open_existing() as library:
        try:
            return Named(library.session_path(name), name, where)
        except MissingError:
            if may_be_new and name not in library:
                return Named(text, name, where)
            raise


def named(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
    """Resolve @NAME in a parameter that means a file which is there; a callback for click."""
    if isinstance(value, tuple):
        return tuple(resolved(text, may_be_new=False) for text in value)
    return None if value is None else resolved(value, may_be_new=False)


def named_or_new(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """Resolve @NAME in a parameter that means a session which may be made."""
    return None if value is None else resolved(value, may_be_new=True)


def no_name(_context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse @NAME in a parameter that means a snapshot to be written."""
    if value is not None and value.startswith("@"):
        raise InputError(
            f"{parameter.opts[0]} writes a file, and a library holds sessions; for a file of this name type ./{value}",
            found=value,
        )
    return value


def shown(file: str) -> str:
    """Return a file as it was typed."""
    return f"@{file.name}" if isinstance(file, Named) else file


def shown_session(session: Session) -> str:
    """Return an open session as it is typed."""
    return f"@{session.name}" if isinstance(session, LibrarySession) else session.path


@contextmanager
def opened_session(file: str, *, create: bool = True) -> Iterator[Session]:
    """Open a session for writing, one of a library through the library, so that its limit holds."""
    if isinstance(file, Named):
        with Library(file.library) as library, library.open(file.name, create=create) as session:
            yield session
    else:
        with Session.open(file, create=create) as session:
            yield session


def count_as_use(file: str) -> None:
    """Let a session of a library that is read count as used now."""
    if isinstance(file, Named):
        with Library(file.library) as library:
            library.open(file.name, create=False, readonly=True).close()


def check_place_of_session(file: str) -> None:
    """Raise unless a session can be opened or made here, before the work whose result would be lost."""
    if not isinstance(file, Named):
        check_session(file)
    elif file.startswith("@"):
        with Library(file.library) as library:
            library.check_new(file.name)

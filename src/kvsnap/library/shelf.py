"""The side of a library that only reads: what is there, the longest common history, forks, and whether all is well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from kvsnap.errors import DamagedError, MissingError, StorageError
from kvsnap.identity import Identity
from kvsnap.library import doctor, searching
from kvsnap.library.catalogue import Catalogue, CatalogueLost
from kvsnap.library.names import check_name
from kvsnap.library.place import CATALOGUE, Place, Pointer
from kvsnap.library.reports import Branch, Doctor, Entry, Found
from kvsnap.library.view import MISSING, SET_APART, View, look
from kvsnap.protocols import Progress

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Shelf"]

T = TypeVar("T")
_TRIES = 5


class Shelf:
    """What `Library` can tell of the directory at `path`. `limit` in bytes goes before the stored one."""

    def __init__(self, path: str, *, limit: int | None, readonly: bool) -> None:
        self._own_limit = limit
        self._place = Place(path, readonly=readonly)
        self._catalogue = Catalogue(self._place.within(CATALOGUE), readonly=readonly)

    @property
    def path(self) -> str:
        """The directory, absolute."""
        return self._place.path

    @property
    def readonly(self) -> bool:
        """True when nothing is written."""
        return self._place.readonly

    @property
    def max_bytes(self) -> int | None:
        """The limit in bytes that holds; None for no limit."""
        return self._place.settings.max_bytes if self._own_limit is None else self._own_limit

    @property
    def nbytes(self) -> int:
        """Bytes of the files of all sessions now."""
        return self._look(lambda view: view.total)

    @property
    def overrun(self) -> int:
        """Bytes over the limit now; 0 when it is kept or there is none."""
        limit = self.max_bytes
        return 0 if limit is None else max(0, self.nbytes - limit)

    def close(self) -> None:
        """Close the catalogue. Sessions that are open stay so."""
        self._catalogue.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _look(self, work: Callable[[View], T]) -> T:
        """Look at the library and do something with what is seen, again where the catalogue is lost meanwhile."""
        for _ in range(_TRIES):
            with suppress(CatalogueLost):
                return work(look(self._place, self._catalogue))
        raise StorageError(
            "the library is changed, or its catalogue lost, again and again", path=self._place.within(CATALOGUE)
        )

    def list(self) -> tuple[Entry, ...]:
        """Return all names, sorted, with what is known of their files. Reads only files that changed."""
        return self._look(lambda view: searching.entries(self._place, self._catalogue, view))

    def find(self, tokens: Sequence[int], identity: Identity | None = None) -> Found | None:
        """Return the session whose history agrees longest with these ids from the start, or None.

        With `identity` only sessions count that a model of this identity may restore. Of several the one with most
        reusable rows is returned; of equals one that is kept up to the end of a turn, then the one used last. Reads no
        tensor, and no file that has not changed; counts as no use. Raise `InputError` for ids outside 0..2^31-1.
        """
        ids = searching.checked_ids(tokens)
        return self._look(lambda view: searching.find(self._place, self._catalogue, view, ids, identity))

    def tree(self) -> tuple[Branch, ...]:
        """Return all files as a forest: forks below the file that their history starts in."""
        return self._look(searching.tree)

    def check(self, *, deep: bool = False, progress: Progress | None = None) -> Doctor:
        """Look the library over; every file's index and tables are read again. Changes nothing but the catalogue.

        With `deep` every byte of every session is checked, as `kvsnap.verify` does.
        """

        def work(view: View) -> Doctor:
            found = doctor.examine(self._place, self._catalogue, view, self.max_bytes)
            return doctor.examine_bytes(self._place, view, found, progress) if deep else found

        return self._look(work)

    def refresh(self) -> None:
        """Bring the catalogue up to date with the files. Every other call does so by itself."""
        self._names()

    def session_path(self, name: str) -> str:
        """Return the path of the file of a session, for reading. Raise as `open` does."""
        check_name(name)
        return self._place.session(self._known(self._names(), name).file_id)

    def __contains__(self, name: object) -> bool:
        view = self._names()
        return name in view.pointers or name in view.bad_names

    def name_of(self, file_id: str) -> str:
        """Return a name that means this file. Raise `MissingError` when there is none."""
        return self.names_of(file_id, self._names())[0]

    def names_of(self, file_id: str, view: View) -> tuple[str, ...]:
        """Return all names that mean this file. Raise `MissingError` when there is none."""
        names = view.names.get(file_id)
        if not names:
            raise MissingError("no name of the library means this session any more", path=self._place.session(file_id))
        return tuple(names)

    def _names(self) -> View:
        return self._look(lambda view: view)

    def _known(self, view: View, name: str) -> Pointer:
        """Return what a name means; raise when its file cannot be opened."""
        pointer = view.pointer(name, self._place)
        state = view.state(pointer.file_id)
        path = self._place.session(pointer.file_id)
        if state == SET_APART:
            raise DamagedError(
                f"session {name!r} was damaged and lies in the quarantine of the library; remove the name to use it "
                "again",
                path=self._place.quarantined(pointer.file_id),
            )
        if state == MISSING:
            raise MissingError(f"the file of session {name!r} is gone", path=path)
        return pointer

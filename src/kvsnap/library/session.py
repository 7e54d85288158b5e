"""A session of a library: what it commits is known to the catalogue and counts for the limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvsnap.errors import InputError
from kvsnap.formats.native import SaveReport
from kvsnap.layout import Snapshot
from kvsnap.protocols import Progress
from kvsnap.session import Session

if TYPE_CHECKING:
    from kvsnap.identity import Identity

__all__ = ["Keeper", "LibrarySession"]


class Keeper(Protocol):
    """What a session asks of its library."""

    def committed(self, file_id: str, identity: Identity) -> None:
        """A commit was published in this file."""


class LibrarySession(Session):
    """A session opened by `Library.open`. Its name may change while it is open; its file id does not.

    After every commit the catalogue follows and the limit of the library is enforced. The turn is published then, so
    nothing that goes wrong there is raised: the next look at the library catches up.
    """

    name: str = ""
    """The name under which it was opened."""
    _keeper: Keeper | None = None

    def keep(self, keeper: Keeper, name: str) -> None:
        """Tell the session whose it is."""
        self._keeper, self.name = keeper, name

    @property
    def file_id(self) -> str:
        """The id of the file, 32 hex digits."""
        return self._journal.header.file_id.hex()

    def append(
        self, snapshot: Snapshot, *, complete: bool = True, codec: str | None = None, progress: Progress | None = None
    ) -> SaveReport:
        """Publish a turn as `Session.append` does; then the library makes room where its limit asks for it."""
        report = super().append(snapshot, complete=complete, codec=codec, progress=progress)
        self._committed()
        return report

    def truncate(self, n_tokens: int) -> int:
        """Go back as `Session.truncate` does."""
        left = super().truncate(n_tokens)
        self._committed()
        return left

    def reset(self) -> None:
        """Go back to an empty history as `Session.reset` does."""
        super().reset()
        self._committed()

    def _committed(self) -> None:
        if self._keeper is None:
            raise InputError("this session was not opened by a library", path=self.path)
        self._keeper.committed(self.file_id, self.identity)

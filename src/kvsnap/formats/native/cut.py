"""The beginning of a live list: what a session is cut back to, and what a snapshot is made of. Spec section 10."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvsnap.formats.native.base import Base
from kvsnap.formats.native.read import NativeFile
from kvsnap.formats.native.tables import Entry

__all__ = ["NOTHING", "Cut", "Live"]

Live = tuple[NativeFile, Entry]
"""An entry of the live list, with the file that its offsets mean."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The first entries of a live list, and the counts at their end. `state` is an offset in the file of the last."""

    live: tuple[Live, ...]
    n_tokens: int
    n_rows: int
    n_pending: int
    token_offset: int

    @property
    def state(self) -> int:
        """Offset of the STATE at the end, in the file of the last entry; 0 for none."""
        return self.live[-1][1].state if self.live else 0

    @property
    def state_place(self) -> tuple[NativeFile, int]:
        """File and offset of that STATE. There has to be an entry."""
        return self.live[-1][0], self.state

    @property
    def digest(self) -> bytes:
        """History digest."""
        return self.live[-1][1].digest if self.live else bytes(16)

    def within(self, file: NativeFile) -> tuple[Entry, ...]:
        """Return the entries that lie in `file`: the last ones."""
        return tuple(entry for where, entry in self.live if where is file)

    def base(self, base: Base, file: NativeFile | None) -> Base:
        """Return what a fork, open as `file`, keeps of its parent when no more than this stays."""
        entries = [entry for where, entry in self.live if where is not file]
        return replace(
            base, kept=len(entries), n_tokens=sum(e.n_tokens for e in entries), n_rows=sum(e.n_rows for e in entries),
            history=entries[-1].digest if entries else bytes(16),
        )  # fmt: skip


NOTHING = Cut((), 0, 0, 0, 0)
"""What a reset keeps."""

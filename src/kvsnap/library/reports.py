"""What a library answers with."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Branch", "CollectReport", "Doctor", "Entry", "Evicted", "Finding", "Found", "PruneReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One name of a library. Sizes are bytes, times nanoseconds since 1970-01-01 UTC.

    `own_bytes` is the length of its file, `nbytes` that and all files which its history starts in. `state` is `ok`,
    `damaged`, `no parent`, `newer`, `unreadable`, `missing` (the file is gone) or `set apart` (it was damaged, and lies
    in the quarantine); `reason` says why. `parent` is the file id of the parent of a fork, `parent_names` its names.
    """

    name: str
    file_id: str
    path: str
    state: str = "ok"
    reason: str = ""
    n_tokens: int = 0
    n_rows: int = 0
    n_commits: int = 0
    complete: bool = True
    nbytes: int = 0
    own_bytes: int = 0
    created_ns: int = 0
    last_use_ns: int = 0
    pinned: bool = False
    parent: str = ""
    parent_names: tuple[str, ...] = ()
    identity: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {**asdict(self), "parent_names": list(self.parent_names)}


@dataclass(frozen=True, slots=True)
class Found:
    """The session whose history agrees longest with some token ids.

    `n_tokens` ids agree. `n_rows` rows are of use once the session is truncated to `keep` ids: fewer than agree where
    a layer cannot be cut inside a turn, or where ids are not evaluated. `names` are all names of the file.
    """

    name: str
    file_id: str
    path: str
    n_tokens: int
    n_rows: int
    keep: int
    names: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {**asdict(self), "names": list(self.names)}


@dataclass(frozen=True, slots=True)
class Evicted:
    """One file that was removed or set apart: its id, the names that meant it, its bytes, and why."""

    file_id: str
    names: tuple[str, ...]
    nbytes: int
    why: str

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {**asdict(self), "names": list(self.names)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What a prune did, or with `dry_run` would do. Bytes are those of the files in sessions/.

    `skipped` are files that were kept because they are being written, by file id. `held_by` are names (`names/NAME`)
    and forks (by file id) that cannot be read: files that they may mean or need are kept. `foreign` files are counted
    and never touched, and are no part of the sizes.
    """

    max_bytes: int
    before: int
    after: int
    evicted: tuple[Evicted, ...] = ()
    set_apart: tuple[Evicted, ...] = ()
    skipped: tuple[str, ...] = ()
    held_by: tuple[str, ...] = ()
    foreign: int = 0
    foreign_bytes: int = 0
    dry_run: bool = False

    @property
    def over(self) -> int:
        """Bytes that are still too many: what is pinned, being written, needed by such a file, or held."""
        return max(0, self.after - self.max_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        data: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        data.update(
            over=self.over, evicted=[e.to_dict() for e in self.evicted],
            set_apart=[e.to_dict() for e in self.set_apart], skipped=list(self.skipped), held_by=list(self.held_by),
        )  # fmt: skip
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectReport:
    """What a collection removed, or with `dry_run` would remove: files that no name reaches.

    Nothing is removed while a name cannot be read, or what may be a fork whose parent is not known: `held_by`, as
    names/NAME and file ids.
    """

    removed: tuple[Evicted, ...] = ()
    skipped: tuple[str, ...] = ()
    held_by: tuple[str, ...] = ()
    dry_run: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes freed."""
        return sum(e.nbytes for e in self.removed)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {
            "removed": [e.to_dict() for e in self.removed], "nbytes": self.nbytes, "skipped": list(self.skipped),
            "held_by": list(self.held_by), "dry_run": self.dry_run,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Branch:
    """One file of the fork tree: its names, size and length, and the forks that start in it."""

    file_id: str
    names: tuple[str, ...]
    n_tokens: int
    own_bytes: int
    state: str
    forks: tuple[Branch, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {
            "file_id": self.file_id, "names": list(self.names), "n_tokens": self.n_tokens,
            "own_bytes": self.own_bytes, "state": self.state, "forks": [fork.to_dict() for fork in self.forks],
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be: its kind, where, what, and what to do about it.

    `is_problem` is False for what is worth knowing and needs nothing.
    """

    kind: str
    where: str
    what: str
    hint: str = ""
    is_problem: bool = True

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" + (f" ({self.hint})" if self.hint else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Doctor:
    """What `check` found. `ok` when nothing needs anything to be done."""

    path: str
    n_names: int
    n_files: int
    nbytes: int
    max_bytes: int | None
    set_apart: int
    set_apart_bytes: int
    foreign: int
    foreign_bytes: int
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """True when there is no problem."""
        return not any(f.is_problem for f in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        data: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {"ok": self.ok, **data, "findings": [asdict(f) for f in self.findings]}

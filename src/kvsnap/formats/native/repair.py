"""Repairing: what of a damaged file can be proven, written to a new one. The damaged file is never changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

from kvsnap.errors import DamagedError, InputError
from kvsnap.files import Appender, Reader, Writer, replacing
from kvsnap.formats.native.mend import Findings, Mended
from kvsnap.formats.native.read import NativeFile
from kvsnap.formats.native.readers import Written
from kvsnap.formats.native.replay import History, write_history
from kvsnap.formats.native.salvage import salvage
from kvsnap.formats.native.verify import Damage, verify_file
from kvsnap.protocols import Progress
from kvsnap.records import SESSION, SNAPSHOT

__all__ = ["RepairReport", "repair_file"]

_STAGES = 3


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What a repair wrote to `out`, and what could not be kept of `path`.

    `n_tokens` ids, of them `n_pending` not evaluated, `n_rows` evaluated positions, in `n_turns` turns; `nbytes` and
    `file_id` are those of the new file. `complete` is True when everything of the last history that was published is in
    it, with all that belongs to it. Each thing that is not is in `lost`; `notes` tell what was damaged and costs
    nothing, and what took the place of what.
    """

    path: str
    out: str
    format: str
    file_id: str
    nbytes: int
    n_tokens: int
    n_rows: int
    n_pending: int
    n_turns: int
    complete: bool
    lost: tuple[Damage, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        data: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        lost = [{name: getattr(damage, name) for name in Damage.__dataclass_fields__} for damage in self.lost]
        return {**data, "lost": lost, "notes": list(self.notes)}


def repair_file(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    keep_tokens: bool = False,
    progress: Progress | None = None,
) -> RepairReport:
    """Write what can be proven of the file at `path` to the new file `out`: `kvsnap.repair` says the rest."""
    source, target = os.fspath(path), os.fspath(out)
    if os.path.lexists(target):
        raise InputError("there is a file of this name: a repair writes a new one", path=target)
    findings = Findings()
    with ExitStack() as opened:
        reader = opened.enter_context(closing(Reader(source)))
        mended = Mended(reader, findings, opened)
        history = salvage(mended, keep_tokens=keep_tokens, progress=_stage(progress, 0))
        n_spans = len(history.pieces) + (history.pending is not None)
        use = SNAPSHOT if mended.file.sealed and n_spans == 1 else SESSION
        with replacing(target, new=True) as writer:
            header, footer = write_history(history, writer, use=use, progress=_stage(progress, 1))
            _check(writer, footer.file_length, history, _stage(progress, 2))
    return RepairReport(
        path=os.path.abspath(source), out=os.path.abspath(target), format="native", file_id=header.file_id.hex(),
        nbytes=footer.file_length, n_tokens=history.end.n_tokens, n_rows=history.end.n_rows,
        n_pending=history.end.n_pending, n_turns=n_spans, complete=not findings.lost,
        lost=tuple(dict.fromkeys(findings.lost)), notes=tuple(dict.fromkeys(findings.notes)),
    )  # fmt: skip


def _stage(progress: Progress | None, number: int) -> Progress | None:
    """Return a progress for one of the three passes over the bytes: looking, writing, checking what was written."""
    if progress is None:
        return None
    tell: Callable[[int, int], None] = progress

    def report(done: int, total: int) -> None:
        tell(number * total + min(done, total), _STAGES * total)

    return report


def _check(writer: Writer, size: int, history: History, progress: Progress | None) -> None:
    """Read the new file back. Raise `DamagedError` when not every byte of it verifies: then it gets no name."""
    with closing(Appender.taking(writer)) as appender:
        made = NativeFile(Written(appender, size), mapped=False)
        report = verify_file(made, progress)
        if report.damages:
            first = report.damages[0]
            raise DamagedError(
                f"what was kept does not make a whole file: {first.what}", path=writer.path, offset=first.offset
            )
        found, end = made.commit, history.end
        counts = [(c.n_tokens, c.n_rows, c.n_pending, c.token_offset) for c in (found, end)]
        if counts[0] != counts[1]:
            raise DamagedError(
                "the new file has other counts than what was kept", path=writer.path, expected=counts[1],
                found=counts[0],
            )  # fmt: skip

"""What must hold of every native file, whatever is in it: the properties that the native targets check.

Only `KvsnapError` comes out of any way to read a file. What verifies can be read whole, and what was read whole
verifies. What a repair writes verifies, can be read, and is complete when it is repaired again; of a file that verifies
it is all.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import kvsnap
from kvsnap.errors import KvsnapError, UnsupportedError, VersionError
from kvsnap.files.reading import Reader
from kvsnap.formats.native import NativeFile, RepairReport, VerifyReport
from kvsnap.layout import Snapshot
from kvsnap.session import Session
from kvsnap.tensors import read_all
from parts import read_whole
from synthetic import same

T = TypeVar("T")
Reads = list[tuple[str, int, int]]
_reads: Reads | None = None
# Looking for the published end reads what it does not use.
_LOOKING = {"find_end"}


def _note_reads() -> None:
    """Let every reader note what is read, while `noted` asks for it."""
    at, into = Reader.read_at, Reader.read_into

    def read_at(self: Reader, offset: int, length: int) -> bytes:
        if _reads is not None and sys._getframe(1).f_code.co_name not in _LOOKING:
            _reads.append((self.path, offset, offset + length))
        return at(self, offset, length)

    def read_into(self: Reader, offset: int, buffer: Any) -> int:
        if _reads is not None:
            _reads.append((self.path, offset, offset + memoryview(buffer).nbytes))
        return into(self, offset, buffer)

    Reader.read_at, Reader.read_into = read_at, read_into


_note_reads()
os.fsync = os.fdatasync = lambda _: None  # nothing here is about power cuts


@contextmanager
def noted() -> Iterator[Reads]:
    """Note every read: path, first byte, behind the last byte."""
    global _reads  # noqa: PLW0603 # readers are made deep inside
    _reads = found = []
    try:
        yield found
    finally:
        _reads = None


def attempt(run: Callable[[], T]) -> T | KvsnapError:
    """What came of it: a value, or an error of ours. Anything else comes out."""
    try:
        return run()
    except KvsnapError as error:
        str(error)
        return error


def load_whole(path: Path, *, mmap: bool = False, key: bytes | None = None) -> Snapshot:
    snapshot = kvsnap.load(path, mmap=mmap, key=key)
    read_whole(snapshot)
    return snapshot


def read_together(snapshot: Snapshot) -> None:
    """Read all tensors in one pass, as an engine does; the values are those that each gives alone."""
    pairs = [(tensor, np.empty(tensor.shape, dtype=tensor.array.dtype)) for tensor in snapshot.tensors()]
    read_all(pairs, workers=1)
    for tensor, out in pairs:
        assert out.tobytes() == tensor.array.tobytes(), f"{tensor.name} is another one when all are read together"


def check_file(path: Path, key: bytes | None = None) -> None:
    """Look at one file in every way; assert what must hold. The files beside it belong to it."""
    raw = path.read_bytes()
    dice = hashlib.sha256(raw).digest()[0]  # what is costly is done for some inputs, always the same ones
    report = attempt(lambda: kvsnap.verify(path, key=key))
    with noted() as reads:
        loaded = attempt(lambda: load_whole(path, key=key))
    _agree(path, report, loaded, reads)
    summary = attempt(lambda: kvsnap.inspect(path, key=key).to_dict())
    turns = attempt(lambda: _history(path))
    if isinstance(report, VerifyReport) and report.ok:
        assert not isinstance(summary, KvsnapError), f"verify is content, and inspect says: {summary}"
        if not report.damages and not report.encryption:
            assert not isinstance(turns, KvsnapError), f"verify finds nothing, and the history says: {turns}"
    if dice % 4 == 0:
        _same_again(path, key, report, loaded)
    check_repair(path, report, loaded, dice)
    if dice % 4 == 1:
        check_changes(path, report)
    assert path.read_bytes() == raw, "reading has changed the file"


def _history(path: Path) -> int:
    with Session.open(path, readonly=True) as session:
        assert len(session.tokens) == session.n_tokens
        return len(session.history)


def _agree(path: Path, report: VerifyReport | KvsnapError, loaded: Snapshot | KvsnapError, reads: Reads) -> None:
    if isinstance(report, KvsnapError):
        assert isinstance(loaded, KvsnapError), f"the file can be read whole, and verify says: {report}"
        return
    if isinstance(loaded, KvsnapError):
        assert not report.ok, f"verify finds nothing that is live, and reading says: {loaded}"
        return
    assert report.n_tokens == len(loaded.tokens)
    for damage in report.damages:
        # Padding and the way back to older commits are looked at by verify only.
        if damage.live and not damage.what.startswith(("padding", "broken history", "a footer", "a commit follows")):
            place = os.path.abspath(damage.path or path)
            inside = [r for r in reads if os.path.abspath(r[0]) == place and r[1] <= damage.offset < r[2]]
            assert not inside or _is_way_back(path, damage.offset), f"what was read whole is damaged: {damage}"


def _is_way_back(path: Path, offset: int) -> bool:
    with closing(NativeFile.open(path, mapped=False)) as file:
        return file.commit.previous <= offset <= file.commit.previous + 64


def _same_again(
    path: Path, key: bytes | None, report: VerifyReport | KvsnapError, loaded: Snapshot | KvsnapError
) -> None:
    """A second look, and one at the mapped file, find the same."""
    again = attempt(lambda: kvsnap.verify(path, key=key))
    assert str(again) == str(report)
    for mmap in (False, True):
        second = attempt(lambda mapped=mmap: load_whole(path, mmap=mapped, key=key))
        if isinstance(loaded, Snapshot):
            assert isinstance(second, Snapshot), f"it was read before, and now: {second}"
            read_together(second)
            assert same(loaded, second) == []
        else:
            assert type(second) is type(loaded), (second, loaded)


def check_repair(path: Path, report: VerifyReport | KvsnapError, loaded: Snapshot | KvsnapError, dice: int) -> None:
    """Repair without and with the ids behind what is kept."""
    whole = loaded if isinstance(report, VerifyReport) and report.ok and isinstance(loaded, Snapshot) else None
    clean = whole is not None and isinstance(report, VerifyReport) and not report.dropped and not report.notes
    if isinstance(report, VerifyReport) and report.encryption:
        clean = False
    kept = None
    out = path.with_name("out")
    for keep_tokens in (False, True) if dice % 2 or not clean else (False,):
        made = attempt(lambda keep=keep_tokens: kvsnap.repair(path, out, keep_tokens=keep))
        if isinstance(made, KvsnapError):
            assert not out.exists()
            # The STATE of an earlier turn may need a newer release: verify does not look into it, and repair does.
            newer = isinstance(made, (VersionError, UnsupportedError))
            assert not clean or newer, f"verify is content, and repair says: {made}"
            assert kept is None, f"less is kept when ids may be kept as well: {made}"
            continue
        try:
            result = _check_repaired(out, made, twice=dice % 3 == 0)
            if clean and whole is not None:
                # The STATE of an earlier turn is not part of the current history; that it is gone is said all the same.
                assert all(damage.what.startswith("STATE behind token") for damage in made.lost), made.lost
                assert same(result, whole) == []
            elif whole is not None and isinstance(report, VerifyReport) and not report.dropped:
                assert result.tokens == whole.tokens[: len(result.tokens)], "ids that nobody wrote there"
            if kept is not None:
                assert made.n_tokens >= kept.n_tokens
                assert made.n_rows == kept.n_rows
            kept = made
        finally:
            out.unlink(missing_ok=True)


def _check_repaired(out: Path, made: RepairReport, *, twice: bool) -> Snapshot:
    report = kvsnap.verify(out)
    assert not report.damages, report.damages
    assert not report.notes, report.notes
    result = load_whole(out)
    assert (made.n_tokens, made.n_rows, made.n_pending) == (len(result.tokens), result.n_rows, result.n_pending)
    assert made.complete == (not made.lost)
    if not twice:
        return result
    second = out.with_name("second")
    try:
        again = kvsnap.repair(out, second)
        assert again.complete, again.lost
        assert not again.notes, again.notes
        assert same(load_whole(second), result) == []
        assert _history(out) >= made.n_turns
    finally:
        second.unlink(missing_ok=True)
    return result


def check_changes(path: Path, report: VerifyReport | KvsnapError) -> None:
    """Write to a copy beside the file: cut, go back, go on, write it out and anew."""
    copy, out = path.with_name("copy"), path.with_name("out")
    copy.write_bytes(path.read_bytes())
    clean = isinstance(report, VerifyReport) and not report.damages
    try:
        with Session.open(copy) as session:
            before = session.n_tokens
            for n in {before - 1, before // 2} - {-1, before}:
                if n < session.n_tokens and not isinstance(attempt(lambda n=n: session.truncate(n)), KvsnapError):
                    whole = attempt(session.load)
                    assert not clean or isinstance(whole, Snapshot), f"after a cut to {n}: {whole}"
            attempt(lambda: session.fork(out))
            for number in range(1, min(session.n_commits, 6)):
                attempt(lambda number=number: session.rewind(number))
                attempt(lambda: read_whole(session.load()))
            attempt(session.compact)
            attempt(session.reset)
        found = attempt(lambda: kvsnap.verify(copy))
        assert not clean or isinstance(found, VerifyReport), found
    except KvsnapError:
        return
    finally:
        copy.unlink(missing_ok=True)
        out.unlink(missing_ok=True)

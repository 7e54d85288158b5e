"""Offsets and lengths beyond 32 bits: sessions that go on behind a part of gigabytes, and torn tails of gigabytes.

The large values are zeros. The system call that would write them leaves a hole instead, so the files take no room; all
of kvsnap above that call does what it always does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsnap
from crash_disk import Log, in_memory, recording
from kvsnap.errors import DamagedError, FormatError
from kvsnap.formats import native
from kvsnap.formats.native import tables
from kvsnap.inspection import verify
from kvsnap.layout import Snapshot, Tensor, TensorSpec
from kvsnap.records import RecordHeader
from kvsnap.session import Session
from synthetic import SAMPLER, snapshot

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sparse files and memory counts as on Linux")

LARGE = 1 << 24  # buffers of so many bytes become holes
SIZES = [2**31 - 1, 2**31, 2**32 - 4096, 2**32 - 1, 2**32, 2**32 + 1]
SHAPE: dict[str, Any] = {"layers": 1, "heads": 2, "dim": 8}


def with_zeros(made: Snapshot, size: int) -> Snapshot:
    """The same, and one more tensor of `size` zero bytes that no row varies."""
    spec = TensorSpec(
        id=77, name="layer0.table", layer=0, role="other", dtype="uint8", axes=("dim",), shape=(size,), growth="static",
        rope="none",
    )  # fmt: skip
    (layer,) = made.layers
    return replace(made, layers=(replace(layer, tensors=(*layer.tensors, Tensor(spec, np.zeros(size, np.uint8)))),))


@pytest.fixture
def place() -> Iterator[Path]:
    with in_memory() as directory:
        yield directory


@contextmanager
def holes() -> Iterator[list[int]]:
    """Large buffers of zeros are not written: the file gets a hole. Yields the lengths left out."""
    real, left = os.pwritev, list[int]()

    def sparse(fd: int, buffers: list[memoryview], offset: int) -> int:
        total = 0
        for buffer in buffers:
            if len(buffer) < LARGE:
                assert real(fd, [buffer], offset + total) == len(buffer)
            else:
                left.append(len(buffer))
            total += len(buffer)
        return total

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", sparse)
        yield left


@contextmanager
def little_memory(most: int = 200 << 20) -> Iterator[None]:
    """What is done takes at most so many bytes of memory at once."""
    clear = Path("/proc/self/clear_refs")
    before = memory("VmRSS")
    clear.write_text("5")  # the mark of the highest use starts anew
    yield
    assert memory("VmHWM") - before < most


def memory(name: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def is_sparse(path: Path) -> None:
    found = path.stat()
    if found.st_blocks * 512 > found.st_size // 2:
        pytest.skip("this file system has no sparse files")
    assert found.st_blocks * 512 < 8 << 20


def check_rows(path: Path, made: Snapshot) -> None:
    """All but the large tensor, bit for bit."""
    loaded = native.load(path)
    assert (loaded.tokens, loaded.n_rows, loaded.text, loaded.sampler) == (
        made.tokens, made.n_rows, made.text, made.sampler,
    )  # fmt: skip
    expected = {t.name: t for t in made.tensors() if t.spec.id != 77}
    for tensor in loaded.tensors():
        if tensor.spec.id != 77:
            assert tensor.array.tobytes() == expected.pop(tensor.name).array.tobytes()
    assert not expected
    assert (loaded.logits is None) == (made.logits is None)
    if loaded.logits is not None and made.logits is not None:
        assert loaded.logits.array.tobytes() == made.logits.array.tobytes()


def turn(n: int) -> Snapshot:
    return snapshot(tuple(range(n)), n_pending=1, text="word " * n, sampler=SAMPLER, **SHAPE)


@pytest.mark.parametrize("size", SIZES)
def test_a_session_goes_on_behind_a_part_of_gigabytes(size: int, place: Path) -> None:
    path, log = place / "a.kvsnap", Log()
    with little_memory(), Session.open(path) as session:
        with holes() as left:
            session.append(with_zeros(turn(4), size))
        assert size - LARGE < sum(left) <= size
        is_sparse(path)
        end = session.nbytes
        assert end == path.stat().st_size > size
        with recording(log):
            session.append(with_zeros(turn(8), size))  # what no row varies is not written again
            session.append(with_zeros(turn(12), size))
        assert min(offset for operation, _, offset, _ in log.entries if operation == "write") >= end
        assert session.nbytes - end < 65536
        check_rows(path, turn(12))
        session.truncate(6)
        check_rows(path, replace(snapshot(tuple(range(6)), **SHAPE), logits=None))
        session.truncate(4)
        check_rows(path, turn(4))
        session.append(with_zeros(turn(9), size))
        assert [t.n_tokens for t in session.history] == [0, 4, 8, 12, 6, 4, 9]
    large = next(t for t in native.load(path).tensors() if t.spec.id == 77)
    assert large.nbytes == size
    with little_memory():
        report = verify(path)
        assert report.ok
        assert not report.damages
        assert not report.notes
        check_rows(path, turn(9))
    is_sparse(path)
    if size == max(SIZES):
        damaged_in_and_behind_the_large_part(path, size)


def damaged_in_and_behind_the_large_part(path: Path, size: int) -> None:
    """The control: one bit at the far end of the zeros, and one in a row behind them."""
    spans = [e.span for e in native.NativeFile.open(path, mapped=False).entries]
    assert spans[0] < 65536 < 2**32 < spans[1]
    with path.open("r+b") as f:
        f.seek(spans[0] + size)  # in the part: what stands before it in the record is less than what stands behind
        f.write(b"\1")
        f.seek(spans[1] + 64 + 512)
        byte = f.read(1)
        f.seek(spans[1] + 64 + 512)
        f.write(bytes([byte[0] ^ 1]))
    first, second = verify(path).damages
    assert (first.tensor, first.tokens) == ("layer0.table", (0, 4))
    assert first.offset < 65536
    assert second.offset > 2**32
    assert second.tokens == (4, 9)


def test_a_new_history_behind_one_of_gigabytes_that_is_gone(place: Path) -> None:
    path, size = place / "a.kvsnap", 2**32 + 64
    with little_memory(), Session.open(path) as session:
        with holes():
            session.append(with_zeros(turn(4), size))
        is_sparse(path)
        session.reset()
        for n in range(1, 40):  # far enough for an INDEX
            session.append(snapshot(tuple(range(n)), **SHAPE))
        assert session._now.commit.index > 2**32
    check_rows(path, snapshot(tuple(range(39)), **SHAPE))
    with little_memory():
        report = verify(path)
    assert report.ok
    assert not report.damages
    with Session.open(path) as session:
        session.truncate(20)
        check_rows(path, snapshot(tuple(range(20)), **SHAPE))


@pytest.mark.parametrize("tail", [2**31 + 64, 2**32 + 640])
def test_a_torn_tail_of_gigabytes(tail: int, place: Path) -> None:
    """What a crash may leave of a large turn: the length, and no bytes."""
    path = place / "a.kvsnap"
    with Session.open(path) as session:
        session.append(turn(4))
        end = session.nbytes
    os.truncate(path, end + tail)
    is_sparse(path)
    with little_memory():
        with Session.open(path) as session:
            assert session.dropped == tail
            check_rows(path, turn(4))
            session.append(turn(8))
            assert session.nbytes == path.stat().st_size < end + 65536
        check_rows(path, turn(8))
        assert verify(path).ok


@pytest.mark.parametrize("size", [2**31, 2**32 + 1])
def test_a_snapshot_of_gigabytes_is_saved_and_verified(size: int, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = place / "a.kvsnap"
    monkeypatch.setattr("kvsnap.files.system.reserve", lambda *_: False)  # it would take the room for the zeros
    made = with_zeros(turn(5), size)
    with little_memory():
        with holes() as left:
            report = kvsnap.save(made, path)
        is_sparse(path)
        assert report.nbytes == path.stat().st_size
        assert left == [2**30] * (size // 2**30), "a call of the system takes one GiB at most"
        assert verify(path).ok
        check_rows(path, made)


# -- controls: a file that keeps 32 bits of a number ---------------------------------------------------------------


def entry_of_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    real = tables.pack_entries
    cut = lambda entries: [replace(e, span=e.span % 2**32) for e in entries]  # noqa: E731
    monkeypatch.setattr(tables, "pack_entries", lambda entries: real(cut(entries)))


def record_length_of_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RecordHeader.pack
    cut = lambda header: replace(header, length=header.length % 2**32)  # noqa: E731
    monkeypatch.setattr(RecordHeader, "pack", lambda self, salt, offset: real(cut(self), salt, offset))


@pytest.mark.parametrize("breach", [entry_of_32_bits, record_length_of_32_bits])
def test_a_number_of_32_bits_is_found_out(breach: Any, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, size = place / "a.kvsnap", 2**32 + 1
    breach(monkeypatch)
    with holes(), Session.open(path) as session:
        session.append(with_zeros(turn(4), size))
        with pytest.raises((DamagedError, FormatError, AssertionError)):
            session.append(with_zeros(turn(8), size))
            check_rows(path, turn(8))

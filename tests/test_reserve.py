"""Room for a large save is taken before its first byte, and never more than the file will need."""

from __future__ import annotations

import errno
import resource
import signal
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import kvsnap
from kvsnap import files
from kvsnap.errors import StorageError
from kvsnap.files import system
from kvsnap.layout import Snapshot, Tensor
from synthetic import fixed, same, snapshot

N_TOKENS = 12_000  # 2 layers of k and v, 2 heads of 16 float32: 6 MB


class Writes:
    """Records the durable operations."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def record(self, operation: str, path: str, offset: int, data: bytes) -> None:
        self.seen.append(operation)


@pytest.fixture
def large() -> Snapshot:
    return snapshot(tuple(range(N_TOKENS)), layers=2, dim=16)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths that were asked for."""
    lengths: list[int] = []
    original = system.reserve

    def reserve(fd: int, path: str, length: int) -> bool:
        lengths.append(length)
        return original(fd, path, length)

    monkeypatch.setattr(system, "reserve", reserve)
    return lengths


@pytest.mark.parametrize("codec", ["exact", "q8"])
def test_the_file_is_as_long_as_its_report_and_the_room_was_not_more(
    tmp_path: Path, large: Snapshot, asked: list[int], codec: str
) -> None:
    report = large.save(tmp_path / "a", codec=codec)
    assert (tmp_path / "a").stat().st_size == report.nbytes
    assert len(asked) == 1
    assert 0.9 * report.nbytes < asked[0] <= report.nbytes


def test_a_q8_save_full_of_nan_needs_more_than_the_room_taken(
    tmp_path: Path, large: Snapshot, asked: list[int]
) -> None:
    layers = tuple(
        replace(x, tensors=tuple(Tensor(t.spec, np.full_like(t.array, np.nan)) for t in x.tensors))
        for x in large.layers
    )
    report = kvsnap.save(replace(large, layers=layers), tmp_path / "a", codec="q8")
    assert asked[0] < report.nbytes / 3
    assert kvsnap.verify(tmp_path / "a").damages == ()


def test_the_bytes_are_the_same_where_room_cannot_be_taken(
    tmp_path: Path, large: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fixed():
        large.save(tmp_path / "with")
    for code in (None, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM):
        call = None if code is None else (lambda *_, code=code: code)
        monkeypatch.setattr(system, "_fallocate", mock.Mock(return_value=call))
        with fixed():
            large.save(tmp_path / "without")
        assert (tmp_path / "without").read_bytes() == (tmp_path / "with").read_bytes()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_no_room_is_told_before_anything_is_written(
    tmp_path: Path, large: Snapshot, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    (tmp_path / "a").write_bytes(b"old")
    monkeypatch.setattr(system, "_fallocate", mock.Mock(return_value=lambda *_: code))
    writes = Writes()
    monkeypatch.setattr(files, "recorder", writes)
    with pytest.raises(StorageError) as found:
        large.save(tmp_path / "a")
    assert found.value.errno == code
    assert writes.seen == ["create", "unlink"]
    assert (tmp_path / "a").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_the_system_itself_refuses_a_file_above_the_limit(
    tmp_path: Path, large: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    if system._fallocate() is None:
        pytest.skip("this system does not offer it")
    writes = Writes()
    monkeypatch.setattr(files, "recorder", writes)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, old[1]))
    try:
        with pytest.raises(StorageError) as found:
            large.save(tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, before)
    assert found.value.errno == errno.EFBIG
    assert writes.seen == ["create", "unlink"]
    assert list(tmp_path.iterdir()) == []


def test_small_files_take_no_room(tmp_path: Path, asked: list[int]) -> None:
    made = snapshot((1, 2, 3))
    made.save(tmp_path / "a")
    assert asked == []
    assert same(kvsnap.load(tmp_path / "a"), made) == []

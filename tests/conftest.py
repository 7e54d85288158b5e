"""Fixtures that many suites use."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvsnap.cli import run

Shown = Callable[..., tuple[int, str, str]]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Bits are compared with one thread: with several, sums may be taken in another order."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Shown:
    """Return a call of the command line, which returns the exit code, stdout and stderr."""

    def call(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run([str(a) for a in args])
        done = capsys.readouterr()
        return code, done.out, done.err

    return call

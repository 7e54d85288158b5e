"""A session against a list: whatever is done to it, it holds what the list holds, in this process and in the next."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsnap import files
from kvsnap.errors import InputError
from kvsnap.formats import native
from kvsnap.inspection import verify
from kvsnap.layout import SamplerState, Snapshot
from kvsnap.session import Session
from spec_file import SpecReader
from synthetic import SAMPLER, rows, same, snapshot

SHAPE: dict[str, Any] = {"layers": 2, "heads": 2, "dim": 3, "vocab": 5}


class SessionMachine(RuleBasedStateMachine):
    """The model: tokens and how many rows; each row's codec; what the turns that still stand ended with."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "a.kvsnap"
        self.tokens: tuple[int, ...] = ()
        self.n_rows = 0
        self.codecs: list[str] = []  # of each row
        self.ends: list[tuple[int, int, Snapshot | None]] = []  # tokens, rows and state at the end of each turn
        self.n_commits = 1
        self.kept = True
        self.torn = 0  # bytes behind the end, until the next write removes them

    @initialize()
    def start(self) -> None:
        self.session = Session.open(self.path)

    # -- what is done

    @rule(
        more=st.lists(st.integers(0, 2**31 - 1), max_size=5),
        pending=st.integers(0, 2),
        partial=st.booleans(),
        codec=st.sampled_from([None, "exact", "q8"]),
        complete=st.booleans(),
        draws=st.none() | st.integers(0, 9),
    )
    def append(
        self, more: list[int], pending: int, partial: bool, codec: str | None, complete: bool, draws: int | None
    ) -> None:
        tokens = (*self.tokens, *more)
        pending = min(pending, len(tokens) - self.n_rows)
        sampler = None if draws is None else SamplerState(SAMPLER.settings, replace(SAMPLER.random, draws=draws))
        made = snapshot(
            tokens, n_pending=pending, start=self.n_rows if partial else 0, n_prompt=len(tokens) // 2 if more else None,
            sampler=sampler, **SHAPE,
        )  # fmt: skip
        # The ids decide the rows, so a history that was cut and went on otherwise has other rows.
        report = self.session.append(made, codec=codec, complete=complete)
        new = made.n_rows - self.n_rows
        assert report.exact == (codec != "q8" or new == 0)
        self.codecs += [codec or "exact"] * new
        self.tokens, self.n_rows = tokens, made.n_rows
        self.ends.append((len(tokens), made.n_rows, made))
        self.n_commits, self.torn = self.n_commits + 1, 0
        self.kept = complete

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, len(self.tokens)))
        if n == len(self.tokens):
            assert self.session.truncate(n) == n
            return
        self.session.truncate(n)
        whole = [end for end in self.ends if end[0] <= n] if n else []
        self.n_rows = whole[-1][1] if whole else 0
        if n and (not whole or whole[-1][0] < n):
            # A turn is cut: the rows it had of these tokens stay. Rows that a later turn evaluated do not.
            cut = next(end for end in self.ends if end[0] > n)
            self.n_rows = min(n, cut[1])
            whole.append((n, self.n_rows, None))
        self.ends = whole
        self.tokens = self.tokens[:n]
        self.codecs = self.codecs[: self.n_rows]
        self.n_commits, self.torn = self.n_commits + 1, 0
        self.kept = True

    @rule()
    def reset(self) -> None:
        self.session.reset()
        self.tokens, self.n_rows, self.codecs, self.ends = (), 0, [], []
        self.n_commits, self.torn = self.n_commits + 1, 0
        self.kept = True

    @rule()
    def reopen(self) -> None:
        self.session.close()
        self.session = Session.open(self.path)
        assert self.session.dropped == self.torn

    @rule(n=st.integers(1, 700))
    def reopen_after_a_torn_write(self, n: int) -> None:
        self.session.close()
        with self.path.open("ab") as f:
            f.write((bytes(range(256)) * 3)[:n])
        self.torn += n
        self.session = Session.open(self.path)
        assert self.session.dropped == self.torn

    @rule(wrong=st.integers(0, 2**31 - 1))
    def refuse_another_history(self, wrong: int) -> None:
        if not self.tokens or self.tokens[0] == wrong:
            return
        before = self.path.read_bytes()
        with pytest.raises(InputError):
            self.session.append(snapshot((wrong, *self.tokens[1:], 5), **SHAPE))
        assert self.path.read_bytes() == before

    # -- what holds

    @invariant()
    def counts_are_those_of_the_list(self) -> None:
        if not hasattr(self, "session"):
            return
        session = self.session
        assert session.tokens == self.tokens
        assert (session.n_tokens, session.n_rows) == (len(self.tokens), self.n_rows)
        assert session.n_pending == len(self.tokens) - self.n_rows
        assert session.n_commits == self.n_commits
        assert session.complete == self.kept
        assert len(session.history) == self.n_commits
        assert [t.commit for t in session.history] == list(range(1, self.n_commits + 1))

    def check(self, loaded: Snapshot) -> None:
        assert loaded.tokens == self.tokens
        assert loaded.n_rows == self.n_rows
        lossy = np.array([codec == "q8" for codec in self.codecs], bool)
        for tensor in loaded.tensors():
            expected = rows(self.tokens, 0, self.n_rows, tensor.spec.id, 2, 3, "float32")
            assert tensor.shape == expected.shape
            assert np.array_equal(tensor.array[:, ~lossy], expected[:, ~lossy])
            assert np.abs(tensor.array - expected).max(initial=0) <= tensor.bound
            assert bool(tensor.bound) >= bool(lossy.any())
        made = self.ends[-1][2] if self.ends else None
        if made is not None:
            assert loaded.sampler == made.sampler
            assert (loaded.logits is None) == (made.logits is None)
            if made.logits is not None and loaded.logits is not None:
                assert loaded.logits.array.tobytes() == made.logits.array.tobytes()
        else:
            assert loaded.logits is None
            assert loaded.sampler is None

    @rule()
    def load(self) -> None:
        self.check(self.session.load())

    @rule()
    def load_beside_the_writer(self) -> None:
        self.check(native.load(self.path))
        with Session.open(self.path, readonly=True) as reader:
            assert reader.tokens == self.tokens
            self.check(reader.load())

    @rule()
    def verify_and_read_with_the_spec(self) -> None:
        self.session.close()
        report = verify(self.path)
        assert report.ok
        assert not report.damages
        assert report.dropped == self.torn
        assert report.n_commits == self.n_commits
        if not self.torn:
            reader = SpecReader(self.path.read_bytes())
            reader.records()
            assert reader.content()["ids"] == list(self.tokens)
            assert len(reader.history()) == self.n_commits
        self.session = Session.open(self.path)

    @rule()
    def save_whole(self) -> None:
        loaded = self.session.load()
        again = native.loads(native.dumps(loaded))
        assert same(again, loaded) == []

    def teardown(self) -> None:
        if hasattr(self, "session"):
            self.session.close()
        self.directory.cleanup()


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(files.system, "sync", lambda *_a, **_k: None)
    monkeypatch.setattr(files, "fsync_directory", lambda *_a, **_k: None)
    return


class TestSession(SessionMachine.TestCase):  # type: ignore[misc] # made at run time
    settings = settings(
        max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )

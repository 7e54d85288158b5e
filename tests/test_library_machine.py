"""Any order of changes: every session stays what its own history says, and a prune removes what it may and no more."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsnap.errors import InputError, UnsupportedError
from kvsnap.files import system
from kvsnap.library import Library, PruneReport, catalogue, tables, trie
from synthetic import snapshot_of_kinds

pytestmark = pytest.mark.exhaustive

NAMES = ("a", "b", "c", "d", "e")
name = st.sampled_from(NAMES)


class Machine(RuleBasedStateMachine):
    """`told` is what each session holds, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp(prefix="kvsnap-"))
        self.patches = [
            mock.patch.object(system, "sync", return_value=None),
            mock.patch.object(system, "sync_directory", return_value=None),
            mock.patch.object(trie, "BLOCK", 4),
            mock.patch.object(catalogue, "BLOCK", 4),
            mock.patch.object(tables, "BLOCK", 4),
        ]
        for patch in self.patches:
            patch.start()
        self.library = Library(self.place / "l")
        self.kinds: tuple[str, ...] = ("grow",)
        self.told: dict[str, tuple[int, ...]] = {}
        self.pinned: set[str] = set()

    def teardown(self) -> None:
        self.library.close()
        for patch in self.patches:
            patch.stop()
        shutil.rmtree(self.place)

    @initialize(kinds=st.sampled_from([("grow",), ("grow", "window3"), ("grow4", "buffer"), ("window8", "recurrent")]))
    def start(self, kinds: tuple[str, ...]) -> None:
        self.kinds = kinds

    @rule(name=name, more=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def append(self, name: str, more: list[int]) -> None:
        tokens = (*self.told.get(name, ()), *more)
        with self.library.open(name) as session:
            session.append(snapshot_of_kinds(tokens, self.kinds, start=session.n_rows))
        self.told[name] = tokens

    @precondition(lambda self: self.told)
    @rule(data=st.data(), more=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def append_in_place_of_the_end(self, data: st.DataObject, more: list[int]) -> None:
        name = data.draw(st.sampled_from(sorted(self.told)))
        n_tokens = data.draw(st.integers(0, len(self.told[name])))
        with self.library.open(name) as session:
            reach = session.reach(n_tokens)
            tokens = (*self.told[name][: reach.n_tokens], *more)
            made = snapshot_of_kinds(tokens, self.kinds)
            if not reach.reached:
                with pytest.raises(UnsupportedError, match=f"reachable length is {reach.n_tokens},"):
                    session.append(made, after=n_tokens)
            session.append(made, after=reach.n_tokens)
        self.told[name] = tokens

    @precondition(lambda self: self.told)
    @rule(data=st.data(), new=name)
    def fork(self, data: st.DataObject, new: str) -> None:
        old = data.draw(st.sampled_from(sorted(self.told)))
        n_tokens = data.draw(st.integers(0, len(self.told[old])))
        if new in self.told:
            with pytest.raises(InputError):
                self.library.fork(old, new)
        else:
            with self.library.open(old, readonly=True) as session:
                reach = session.reach(n_tokens)
            if not reach.reached:
                with pytest.raises(UnsupportedError, match=f"reachable length is {reach.n_tokens},"):
                    self.library.fork(old, new, n_tokens=n_tokens)
            self.library.fork(old, new, n_tokens=n_tokens, nearest=True)
            self.told[new] = self.told[old][: reach.n_tokens]

    @precondition(lambda self: self.told)
    @rule(data=st.data(), what=st.sampled_from(["truncate", "reset", "compact", "remove", "pin", "unpin", "rewind"]))
    def change(self, data: st.DataObject, what: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.told)))
        if what in ("truncate", "reset", "rewind", "compact"):
            with self.library.open(name) as session:
                if what == "truncate":
                    n_tokens = data.draw(st.integers(0, len(self.told[name])))
                    left = session.reach(n_tokens).n_tokens
                    assert session.truncate(n_tokens, nearest=True) == left
                    self.told[name] = self.told[name][:left]
                elif what == "reset":
                    session.reset()
                    self.told[name] = ()
                elif what == "rewind":
                    number = data.draw(st.integers(1, session.n_commits))
                    try:
                        session.rewind(number)
                    except UnsupportedError:  # its state was left out
                        assert "recurrent" in self.kinds or "buffer" in self.kinds
                    self.told[name] = session.tokens
                else:
                    session.compact(states=data.draw(st.sampled_from([None, 1, 2])))
        elif what == "remove":
            self.library.remove(name)
            del self.told[name]
            self.pinned.discard(name)
        else:
            getattr(self.library, what)(name)
            (self.pinned.add if what == "pin" else self.pinned.discard)(name)

    @rule(old=name, new=name)
    def rename(self, old: str, new: str) -> None:
        if old in self.told and (new not in self.told or new == old):
            self.library.rename(old, new)
            self.told[new] = self.told.pop(old)
            if old in self.pinned:
                self.pinned.remove(old)
                self.pinned.add(new)

    @rule(limit=st.integers(0, 20_000))
    def prune(self, limit: int) -> None:
        said = self.library.prune(limit, dry_run=True)
        report = self.library.prune(limit)
        assert said.to_dict() == {**report.to_dict(), "dry_run": True}
        self.check_report(report)
        gone = {name for e in report.evicted for name in e.names}
        assert not gone & self.pinned
        for name in gone:
            del self.told[name]
        if report.over:  # all that is left is pinned, or needed by what is
            reached: set[str] = set()
            entries = {e.name: e for e in self.library.list()}
            assert set(entries) >= self.pinned
            for pinned in self.pinned:
                reached.add(entries[pinned].file_id)
            parents = {b.file_id: [f.file_id for f in b.forks] for root in self.library.tree() for b in walk(root)}
            while True:
                more = {p for p, forks in parents.items() if set(forks) & reached} - reached
                if not more:
                    break
                reached |= more
            assert set(parents) == reached

    def check_report(self, report: PruneReport) -> None:
        assert report.set_apart == ()
        assert report.skipped == ()
        assert report.before - report.after == sum(e.nbytes for e in report.evicted)
        assert report.after == self.library.nbytes
        if report.evicted and report.evicted[-1].names:  # not one more than needed
            assert report.after + report.evicted[-1].nbytes > report.max_bytes

    @rule()
    def collect(self) -> None:
        self.library.collect()
        assert self.library.collect().removed == ()
        assert not [f for f in self.library.check().findings if f.kind == "orphan"]

    @rule(lose=st.booleans())
    def open_again(self, lose: bool) -> None:
        self.library.close()
        if lose:
            (self.place / "l" / "catalogue.sqlite").unlink()
        self.library = Library(self.place / "l")

    @rule(query=st.lists(st.integers(0, 2), max_size=12))
    def find(self, query: list[int]) -> None:
        found = self.library.find(query)
        most = 0
        for tokens in self.told.values():
            same = next((i for i, (a, b) in enumerate(zip(tokens, query, strict=False)) if a != b),
                        min(len(tokens), len(query)))  # fmt: skip
            most = max(most, same)
        if self.kinds == ("grow",):
            assert (found.n_rows if found else 0) == most
        elif found:  # what is promised can be kept
            assert found.n_rows <= most
            with self.library.open(found.name, readonly=True) as session:
                reach = session.reach(found.keep)
            assert (reach.n_tokens, reach.n_rows) == (found.keep, found.n_rows)

    @invariant()
    def every_session_is_as_told(self) -> None:
        entries = {e.name: e for e in self.library.list()}
        assert set(entries) == set(self.told)
        for name, entry in entries.items():
            assert (entry.state, entry.n_tokens, entry.pinned) == ("ok", len(self.told[name]), name in self.pinned)
            with self.library.open(name, readonly=True) as session:
                assert session.tokens == self.told[name]
        assert {f.kind for f in self.library.check().findings} <= {"orphan"}


def walk(branch):  # type: ignore[no-untyped-def]
    yield branch
    for fork in branch.forks:
        yield from walk(fork)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)

"""The longest common history: against a search by brute force, what can be reused, and what is read for it."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsnap.errors import InputError, UnsupportedError
from kvsnap.files import system
from kvsnap.identity import Identity, compare
from kvsnap.library import Library, catalogue, tables, trie
from kvsnap.library.contents import Facts
from kvsnap.session import Session
from synthetic import IDENTITY, snapshot

OTHER = replace(IDENTITY, cache_dtype="float16")


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    with Library(tmp_path / "library") as made:
        yield made


def add(library: Library, name: str, *turns: Sequence[int], **facts: Any) -> None:
    with library.open(name) as session:
        for tokens in turns:
            session.append(snapshot(tokens, **facts))


def agreed(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


# -- what is found -----------------------------------------------------------------------------------------------------


def test_the_longest_is_found_and_nothing_else(library: Library) -> None:
    add(library, "short", (1, 2, 3))
    add(library, "long", (1, 2, 3, 4, 5))
    add(library, "other", (1, 2, 9, 9, 9, 9, 9))
    found = library.find((1, 2, 3, 4, 6, 7))
    assert found is not None
    assert (found.name, found.n_tokens, found.n_rows, found.keep) == ("long", 4, 4, 4)
    assert found.path == library.session_path("long")
    assert library.find((2, 3)) is None
    assert library.find(()) is None


def test_of_equals_the_one_used_last_is_returned_and_a_search_is_no_use(library: Library) -> None:
    for name in "abc":
        add(library, name, (1, 2, 3))
    for name in "bac":
        library.open(name, readonly=True).close()
        uses = [e.last_use_ns for e in library.list()]
        found = library.find((1, 2, 3))
        assert found is not None
        assert found.name == name
        assert [e.last_use_ns for e in library.list()] == uses


def test_of_equals_one_that_is_kept_up_to_the_end_of_a_turn_is_returned(library: Library) -> None:
    add(library, "ends there", (1, 2, 3), (1, 2, 3, 8))
    add(library, "goes on", (1, 2, 3, 9))  # used last
    found = library.find((1, 2, 3, 4))
    assert found is not None
    assert (found.name, found.n_rows, found.keep) == ("ends there", 3, 3)
    found = library.find((1, 2, 4))  # inside of a turn of both
    assert found is not None
    assert found.name == "goes on"


def test_all_names_of_a_file_are_told_and_files_without_a_name_are_not(library: Library) -> None:
    add(library, "a", (1, 2, 3, 4))
    library.fork("a", "b", n_tokens=2)
    root = Path(library.path) / "names"
    (root / "also").write_bytes((root / "b").read_bytes())
    found = library.find((1, 2, 7))
    assert found is not None
    assert found.names in (("a",), ("also", "b"))
    library.remove("a")  # its file stays for the forks
    found = library.find((1, 2, 3, 4))
    assert found is not None
    assert (found.names, found.n_tokens) == (("also", "b"), 2)


def test_only_sessions_that_fit_the_identity_count(library: Library) -> None:
    add(library, "ours", (1, 2, 3))
    add(library, "theirs", (1, 2, 3, 4), identity=OTHER)
    add(library, "unknown", (1, 2, 3, 4, 5), identity=Identity())
    for identity, name in ((IDENTITY, "ours"), (OTHER, "theirs"), (None, "unknown")):
        found = library.find((1, 2, 3, 4, 5, 6), identity)
        assert found is not None
        assert found.name == name
    assert library.find((1, 2), replace(IDENTITY, tokenizer="ff" * 16)) is None


def test_each_identity_is_compared_once(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(8):
        add(library, f"s{number}", (1, 2, number), identity=OTHER if number % 2 else IDENTITY)
    calls = []

    def counted(saved: Identity, found: Identity) -> Any:
        calls.append(saved)
        return compare(saved, found)

    monkeypatch.setattr("kvsnap.library.searching.compare", counted)
    library.find((1, 2, 3), IDENTITY)
    assert len(calls) == 2


def test_what_cannot_be_cut_goes_back_to_the_end_of_a_turn(library: Library) -> None:
    add(library, "state", (1, 2), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6), recurrent=True)
    add(library, "plain", (1, 2, 3, 9))
    found = library.find((1, 2, 3, 4, 5))
    assert found is not None
    assert (found.name, found.n_tokens, found.n_rows, found.keep) == ("state", 5, 4, 4)
    found = library.find((1, 2, 3))  # three rows of the plain one against two
    assert found is not None
    assert (found.name, found.n_tokens, found.n_rows) == ("plain", 3, 3)
    library.remove("plain")
    assert library.find((1,)) is None  # agrees, but nothing of it is of use
    with library.open("state") as session, pytest.raises(UnsupportedError):
        session.truncate(1)


def test_what_agrees_longest_is_not_always_what_is_of_most_use(library: Library) -> None:
    query = tuple(range(1, 700))
    add(library, "stiff", query[:10], query, recurrent=True)
    add(library, "plain", (*query[:300], 5, 5))
    found = library.find(query[:650])
    assert found is not None
    assert (found.name, found.n_tokens, found.n_rows) == ("plain", 300, 300)
    library.remove("plain")
    found = library.find(query[:650])
    assert found is not None
    assert (found.name, found.n_tokens, found.n_rows, found.keep) == ("stiff", 650, 10, 10)


def test_ids_that_are_not_evaluated_are_no_rows(library: Library) -> None:
    add(library, "a", (1, 2, 3, 4), n_pending=1)
    for query, rows in (((1, 2, 3, 4, 5), 3), ((1, 2, 3, 9), 3), ((1, 2, 9), 2)):
        found = library.find(query)
        assert found is not None
        assert found.n_rows == rows


@pytest.mark.parametrize("bad", [(-1,), (2**31,), (1.5,), ("a",), (None,), (1, 2, 2**70)], ids=repr)
def test_what_is_no_id_is_refused(library: Library, bad: Any) -> None:
    with pytest.raises(InputError, match=f"token {len(bad) - 1}"):
        library.find(bad)


def test_ids_may_come_as_an_array(library: Library) -> None:
    add(library, "a", (1, 2, 2**31 - 1))
    assert library.find(np.array([1, 2, 2**31 - 1], np.int64)) == library.find((1, 2, 2**31 - 1)) is not None  # type: ignore[arg-type]


# -- by brute force ----------------------------------------------------------------------------------------------------

history = st.lists(st.integers(0, 2), min_size=0, max_size=24).map(tuple)
plan = st.lists(
    st.tuples(history, st.lists(st.integers(1, 9), min_size=1, max_size=4), st.booleans(), st.integers(0, 1)),
    min_size=1,
    max_size=5,
)


def best_rows(sessions: list[tuple[Session, bool]], query: tuple[int, ...]) -> int:
    """The most rows that any session keeps when it is cut to what agrees, by what each file says of its turns."""
    most = 0
    for session, rewindable in sessions:
        same = agreed(session.tokens, query)
        ends = [(0, 0)]
        ends += [(turn.n_tokens, turn.n_rows) for turn in session.history if turn.operation == "append"]
        if same == session.n_tokens:
            rows = session.n_rows
        else:
            tokens, rows = max(end for end in ends if end[0] <= same)
            if rewindable and tokens < same:
                rows = min(same, min(end for end in ends if end[0] > same)[1])
        most = max(most, rows)
    return most


@pytest.mark.exhaustive
@settings(max_examples=60, deadline=None)
@given(plan, st.lists(history, min_size=1, max_size=6), st.sampled_from([1, 2, 4, 5]))
def test_a_search_agrees_with_brute_force(plan: Any, queries: list[tuple[int, ...]], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as place:
        patch.setattr(trie, "BLOCK", block)
        patch.setattr(catalogue, "BLOCK", block)
        patch.setattr(tables, "BLOCK", block)
        patch.setattr(system, "sync", lambda *_, **__: None)
        with Library(Path(place) / "l") as library:
            for number, (tokens, sizes, recurrent, pending) in enumerate(plan):
                ends = sorted({min(len(tokens), n) for n in itertools.accumulate(sizes)} - {0})
                turns = [tokens[:end] for end in ends]
                add(library, f"s{number}", *turns, recurrent=recurrent, n_pending=pending if len(turns) == 1 else 0)
            kinds = {f"s{n}": not recurrent for n, (_, _, recurrent, _) in enumerate(plan)}
            check_searches(library, kinds, [*queries, *(tokens for tokens, *_ in plan)])
            (Path(place) / "l" / "catalogue.sqlite").unlink()
            check_searches(library, kinds, queries)


def check_searches(library: Library, kinds: dict[str, bool], queries: list[tuple[int, ...]]) -> None:
    sessions = [(library.open(name, readonly=True), rewindable) for name, rewindable in kinds.items()]
    for number, query in enumerate(queries):
        found, most = library.find(query), best_rows(sessions, query)
        if found is None:
            assert most == 0
            continue
        assert found.n_rows == most
        copy = Path(library.path).parent / f"{number}.kvsnap"
        with library.open(found.name) as session:
            assert found.n_tokens == agreed(session.tokens, query)
            Session.fork(session, copy)
        with Session.open(copy) as session:
            assert session.truncate(found.keep) == found.keep <= found.n_tokens
            assert session.n_rows == found.n_rows
        copy.unlink()


def test_long_histories_of_real_blocks(library: Library) -> None:
    shared = tuple(range(1, 1001))
    add(library, "a", shared)
    add(library, "b", (*shared[:700], *range(5000, 5400)))
    for cut in (1, 255, 256, 257, 511, 512, 513, 699, 700, 701, 768, 999, 1000):
        found = library.find((*shared[:cut], 9, 9, 9))
        assert found is not None
        assert found.n_tokens == cut
    found = library.find((*shared[:700], *range(5000, 5300), 1))
    assert found is not None
    assert (found.name, found.n_tokens) == ("b", 1000)
    with library.open("a") as session:
        session.truncate(300)
    found = library.find(shared)
    assert found is not None
    assert (found.name, found.n_tokens) == ("b", 700)


def test_the_rows_of_a_cut_follow_from_the_turns() -> None:
    facts = Facts(n_tokens=6, n_rows=5, n_pending=1, turns=np.array([[2, 1], [4, 3], [6, 5]]))
    assert [trie.reusable(facts, n) for n in range(7)] == [(0, 0), (1, 1), (2, 1), (3, 3), (4, 3), (5, 5), (6, 5)]
    more = Facts(n_tokens=4, n_rows=6, turns=np.array([[2, 4], [4, 6]]))  # two rows whose ids are not stored
    assert [trie.reusable(more, n) for n in range(5)] == [(0, 0), (1, 3), (2, 4), (3, 5), (4, 6)]
    stiff = replace(facts, rewindable=False)
    assert [trie.reusable(stiff, n) for n in range(7)] == [(0, 0), (0, 0), (2, 1), (2, 1), (4, 3), (4, 3), (6, 5)]


# -- what is read ------------------------------------------------------------------------------------------------------


class Reads:
    """Counts the bytes that are read of files in sessions/, and how often one is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.nbytes = self.opened = self.tensor_bytes = 0
        for name in ("get", "get_into", "open_regular"):
            patch.setattr(system, name, self.counted(name, getattr(system, name)))

    def counted(self, name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            found = function(*args)
            if "/sessions/" in str(args[0] if name == "open_regular" else args[1]):
                self.opened += name == "open_regular"
                self.nbytes += 0 if name == "open_regular" else len(found) if name == "get" else found
            return found

        return call


@pytest.mark.exhaustive
def test_a_search_reads_nothing_of_files_that_did_not_change(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "sync", lambda *_, **__: None)
    base = tuple(range(1, 400))
    for number in range(200):
        ends = [399 + 2 * turn for turn in range(50)]
        tokens = (*base, *(1000 + number * 100 + k for k in range(101)))
        with library.open(f"s{number}") as session:
            session.append(snapshot(tokens[: ends[0]], heads=1, dim=1, vocab=0))
            for end in ends[1:]:
                session.append(snapshot(tokens[:end], start=session.n_rows, heads=1, dim=1, vocab=0))
    for again in (library, Library(library.path), Library(library.path, readonly=True)):
        reads = Reads(monkeypatch)
        found = again.find((*base, *(1000 + 137 * 100 + k for k in range(60)), 7, 7), IDENTITY)
        assert found is not None
        assert (found.name, found.n_tokens) == ("s137", 459)
        assert len(again.list()) == 200
        assert (reads.opened, reads.nbytes) == (0, 0)
        again.close()


def test_a_file_that_changed_is_read_again_without_its_tensors(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(library, "a", (1, 2, 3), heads=64, dim=64)
    add(library, "b", (1, 2, 4))
    path = library.session_path("a")
    with Session.open(path) as session:  # behind the back of the library
        session.append(snapshot((1, 2, 3, *range(10, 200)), heads=64, dim=64))
    size = Path(path).stat().st_size
    reads = Reads(monkeypatch)
    found = library.find((1, 2, 3, 10, 11, 5))
    assert found is not None
    assert (found.name, found.n_tokens) == ("a", 5)
    assert size > 6_000_000
    assert 0 < reads.nbytes < 150_000
    assert reads.opened == 2  # its first bytes, then its tables


def test_a_commit_that_the_library_was_not_told_of_is_not_left_out(library: Library) -> None:
    with library.open("a") as session:
        session.append(snapshot((1, 2)))
        Session.append(session, snapshot((1, 2, 3, 4), start=2))  # as if interrupted right behind the commit
        session.append(snapshot((1, 2, 3, 4, 5), start=4))
        found = library.find((1, 2, 3, 4, 5))
        assert found is not None
        assert (found.n_tokens, found.n_rows) == (5, 5)
    assert library.check().ok


def test_a_commit_brings_the_catalogue_up_to_date(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    add(library, "a", (1, 2, 3))
    with library.open("a") as session:
        for end in range(4, 9):
            session.append(snapshot(tuple(range(1, end)), start=session.n_rows))
            reads = Reads(monkeypatch)
            found = library.find(tuple(range(1, 20)))
            assert found is not None
            assert found.n_tokens == end - 1
            assert reads.nbytes == 0
        session.truncate(2)
        reads = Reads(monkeypatch)
        found = library.find(tuple(range(1, 20)))
        assert found is not None
        assert found.n_tokens == 2
        assert reads.nbytes == 0
        session.reset()
        assert library.find(tuple(range(1, 20))) is None
    assert library.check().ok

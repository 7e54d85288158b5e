"""A turn that takes the place of others in one commit: what it leaves, what it costs, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvsnap
from kvsnap import Session
from kvsnap.errors import DamagedError, InputError, UnsupportedError
from kvsnap.formats.native.fork import fork_file
from kvsnap.inspection import verify
from kvsnap.library import Library
from spec_file import COMMIT, SpecReader
from synthetic import SAMPLER, same, snapshot, snapshot_of_kinds

TOKENS = tuple(range(100, 130))
OTHER = tuple(range(1, 31))
SHAPE: dict[str, Any] = {"layers": 2, "heads": 2, "dim": 3, "vocab": 5}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "talk.kvsnap"


def made(tokens: tuple[int, ...], **fields: Any) -> kvsnap.Snapshot:
    return snapshot(tokens, text="".join(chr(97 + t % 26) for t in tokens), sampler=SAMPLER, **SHAPE | fields)


def talk(path: Path, *ends: int) -> Session:
    session = Session.open(path)
    for n in ends:
        session.append(made(TOKENS[:n], n_pending=1))
    return session


@pytest.mark.parametrize("after", [0, 1, 4, 5, 9, 10, 13, 15])
@pytest.mark.parametrize("partial", [False, True])
def test_the_file_is_as_after_a_truncate_and_an_append(path: Path, tmp_path: Path, after: int, partial: bool) -> None:
    def turn(start: int) -> kvsnap.Snapshot:
        return made((*TOKENS[:after], *OTHER[:7]), start=start if partial else 0)

    with talk(path, 5, 10, 15) as session, talk(tmp_path / "two", 5, 10, 15) as two:
        two.truncate(after)
        two.append(turn(two.n_rows))
        session.append(turn(two.load(after).n_rows if after else 0), after=after)
        assert same(session.load(), two.load()) == []
        assert same(session.load(), kvsnap.load(path)) == []
        assert (session.n_commits, [t.operation for t in session.history][-1]) == (5, "append")
        assert (session.tokens, session.n_rows) == (two.tokens, two.n_rows)
        assert session.nbytes < two.nbytes or after == 15
    content = SpecReader(path.read_bytes()).content()
    assert tuple(content["ids"]) == (*TOKENS[:after], *OTHER[:7])
    assert verify(path).damages == ()


def test_the_turns_before_come_back_by_a_rewind(path: Path) -> None:
    with talk(path, 5, 10, 15) as session:
        before = session.load()
        session.append(made((*TOKENS[:7], *OTHER[:3])), after=7)
        session.rewind(4)
        assert same(session.load(), before) == []


def test_only_the_new_rows_are_written(path: Path) -> None:
    with talk(path, 5, 20) as session:
        long = made((*TOKENS[:5], *range(1000, 3000)))
        session.append(long, after=5)
        report = session.append(made((*long.tokens[:2000], 1, 2)), after=2000)
        assert report.tensor_bytes == 2 * 2 * 2 * 2 * 3 * 4 + 5 * 4  # 2 rows: layers, k and v, heads, dim; logits
        assert report.nbytes < 4096


def many(path: Path) -> kvsnap.Snapshot:
    """Enough turns for an INDEX, of which ever less is kept; what the session holds in the end."""
    with Session.open(path) as session:
        for n in range(1, 60):
            session.append(made(tuple(range(n))))
        for n in range(57, 20, -4):
            session.append(made((*range(n), 7, 7)), after=n)
            assert session.tokens == (*range(n), 7, 7)
        assert session._now.commit.index
        return session.load()


def test_an_index_is_kept_in_part(path: Path) -> None:
    last = many(path)
    assert tuple(SpecReader(path.read_bytes()).content()["ids"]) == last.tokens == (*range(21), 7, 7)
    assert verify(path).damages == ()


def test_a_list_of_spans_that_is_damaged_is_made_anew_from_such_commits(path: Path) -> None:
    last, again = many(path), path.with_name("again")
    place = SpecReader(path.read_bytes()).commit["index"]
    data = bytearray(path.read_bytes())
    data[place + 64 + 64] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError):
        kvsnap.load(path)
    assert kvsnap.repair(path, again).complete
    assert same(kvsnap.load(again), last) == []


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [-1, 16, 10**9])
def test_a_length_outside_the_history_is_refused(path: Path, after: int) -> None:
    with talk(path, 5, 10, 15) as session:
        before = path.read_bytes()
        with pytest.raises(InputError, match="0 to 15"):
            session.append(made(TOKENS[:20]), after=after)
        assert path.read_bytes() == before


def test_a_length_that_cannot_be_reached_is_refused_and_names_those_that_can(path: Path) -> None:
    kinds = ("grow", "recurrent")
    with Session.open(path) as session:
        for n in (5, 10, 15):
            session.append(snapshot_of_kinds(TOKENS[:n], kinds))
        before = path.read_bytes()
        with pytest.raises(UnsupportedError, match=r"length is 5.*above.*10"):
            session.append(snapshot_of_kinds((*TOKENS[:7], 1), kinds), after=7)
        assert path.read_bytes() == before
        turn = snapshot_of_kinds((*TOKENS[:10], 1, 2), kinds)
        session.append(turn, after=10)
        assert same(session.load(), turn) == []


def test_a_snapshot_of_another_beginning_is_refused_and_one_of_another_end_is_not(path: Path) -> None:
    with talk(path, 5, 10) as session:
        before = path.read_bytes()
        with pytest.raises(InputError, match="token 4 differs"):
            session.append(made((*TOKENS[:4], 7, 8, 9)), after=6)
        with pytest.raises(InputError, match="token 5 differs"):  # the control: without `after` the end counts too
            session.append(made((*TOKENS[:5], *OTHER[:9])))
        assert path.read_bytes() == before
        session.append(made((*TOKENS[:5], *OTHER[:9])), after=5)


def test_rows_that_begin_behind_the_cut_are_refused(path: Path) -> None:
    with talk(path, 5, 10) as session:
        turn = made((*TOKENS[:5], *OTHER[:5]))
        with pytest.raises(InputError, match="rows are missing"):
            session.append(made(turn.tokens, start=5), after=5)  # one of the 5 is not evaluated there
        session.append(made(turn.tokens, start=4), after=5)
        assert same(session.load(), turn) == []


def test_a_shorter_snapshot_than_what_stays_is_refused(path: Path) -> None:
    with talk(path, 5, 10) as session, pytest.raises(InputError, match="behind the session"):
        session.append(made(TOKENS[:3]), after=5)


def test_a_state_that_is_damaged_does_not_become_a_beginning(path: Path) -> None:
    with talk(path, 5, 10) as session:
        state = session._now.entries[0].state
        with path.open("r+b") as file:
            file.seek(state + 64)
            file.write(b"\xff")
        before = path.read_bytes()
        with pytest.raises(DamagedError):
            session.append(made((*TOKENS[:5], 1)), after=5)
        assert path.read_bytes() == before


def test_a_reader_cannot(path: Path) -> None:
    talk(path, 5, 10).close()
    with Session.open(path, readonly=True) as session, pytest.raises(InputError, match="for reading only"):
        session.append(made((*TOKENS[:5], 1)), after=5)


# -- forks and libraries ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 3, 5, 8, 10, 12, 14])
def test_a_fork_cuts_in_what_is_its_parents_too(path: Path, after: int) -> None:
    with talk(path, 5, 10, 15) as parent:
        name = f"{parent._journal.header.file_id.hex()}.kvsnap"
    whole = path.rename(path.with_name(name)).read_bytes()
    fork = Path(fork_file(str(path.with_name(name)), n_tokens=10).path)
    with Session.open(fork) as session:
        session.append(made((*TOKENS[:10], *OTHER[:4])))
        assert session.tokens[:after] == (*TOKENS[:10], *OTHER[:4])[:after]
        turn = made((*session.tokens[:after], 60, 61, 62))
        session.append(turn, after=after)
        assert same(session.load(), turn) == []
        session.rewind(2)
        assert session.tokens == (*TOKENS[:10], *OTHER[:4])
        session.rewind(3)
    content = SpecReader(fork.read_bytes(), fork.parent).content()
    assert tuple(content["ids"]) == turn.tokens
    assert path.with_name(name).read_bytes() == whole
    assert verify(fork).damages == ()


def test_a_damaged_list_of_a_fork_that_was_cut_in_its_parent_is_made_anew(path: Path) -> None:
    with talk(path, 5, 10) as parent:
        name = f"{parent._journal.header.file_id.hex()}.kvsnap"
    path.rename(path.with_name(name))
    fork = Path(fork_file(str(path.with_name(name))).path)
    with Session.open(fork) as session:
        session.append(made((*TOKENS[:10], 1)))
        for after in (12, 11, 3):
            session.append(made((*session.tokens[:after], 2, 3)), after=min(after, session.n_tokens))
        for n in range(1, 36):
            session.append(made((*TOKENS[:3], 2, 3, *range(n))))
        last, place = session.load(), session._now.commit.index
    assert place
    data = bytearray(fork.read_bytes())
    data[place + 64 + 64] ^= 1
    fork.write_bytes(data)
    with pytest.raises(DamagedError):
        kvsnap.load(fork)
    again = path.with_name("again")
    assert kvsnap.repair(fork, again).complete
    assert same(kvsnap.load(again), last) == []


def test_the_catalogue_of_a_library_follows(tmp_path: Path) -> None:
    with Library(tmp_path) as library:
        with library.open("talk") as session:
            session.append(made(TOKENS[:10]))
            session.append(made((*TOKENS[:5], *OTHER[:3])), after=5)
            assert session.tokens == (*TOKENS[:5], *OTHER[:3])
        found = library.find((*TOKENS[:5], *OTHER[:6]))
        assert found is not None
        assert found.n_tokens == 8
        again = library.find(TOKENS[:10])
        assert again is not None
        assert again.n_tokens == 5


# -- what a commit says ----------------------------------------------------------------------------------------------


def test_the_commit_is_an_append_for_every_reader(path: Path) -> None:
    with talk(path, 5, 10) as session:
        session.append(made((*TOKENS[:7], *OTHER[:2])), after=7)
    reader = SpecReader(path.read_bytes())
    assert reader.commit["operation"] == 1
    assert [r["kind"] for r in reader.records()].count(COMMIT) == 4
    assert [e["n_tokens"] for e in reader.entries()] == [5, 2, 2]

"""Sessions in rough company: threads, forks, interrupts, readers beside a writer that cuts back, half characters."""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvsnap
from kvsnap import files, verify
from kvsnap.errors import CompatibilityError, ConflictError, DamagedError, FormatError, InputError
from kvsnap.formats import native
from kvsnap.formats.native import read
from kvsnap.formats.native.base import session_file_name
from kvsnap.formats.native.fork import fork_file
from kvsnap.formats.native.journal import Journal
from kvsnap.session import Session
from spec_file import SpecReader
from synthetic import IDENTITY, same, snapshot

IDS = tuple(range(1, 8))


def turn(count: int) -> kvsnap.Snapshot:
    return snapshot(IDS[:count])


def test_two_threads_on_one_session_publish_whole_turns(tmp_path: Path) -> None:
    for run in range(10):
        with Session.open(tmp_path / f"{run}.kvsnap") as session:
            session.append(turn(2))
            errors: list[Exception] = []

            def work(count: int, session: Session = session, errors: list[Exception] = errors) -> None:
                try:
                    session.append(turn(count))
                except InputError as error:  # the other one was further already
                    errors.append(error)

            threads = [threading.Thread(target=work, args=(count,)) for count in (5, 6, 7, 7)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert session.tokens == IDS
            assert same(session.load(), turn(7)) == []
        assert kvsnap.verify(session.path).ok


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_to_open_its_own(tmp_path: Path) -> None:
    session = Session.open(tmp_path / "a.kvsnap")
    session.append(turn(2))
    child = os.fork()
    if not child:
        code = 1
        try:
            session.append(turn(3))
        except ConflictError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    session.append(turn(4))
    assert session.load().tokens == IDS[:4]
    session.close()
    assert kvsnap.verify(session.path).ok


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Whoever starts a process in the background may have told it to ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_an_interrupt_during_a_sync_leaves_the_session_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fdatasync
    for which in (1, 2):
        path = tmp_path / f"{which}.kvsnap"
        with Session.open(path) as session:
            session.append(turn(3))
            calls = [0]

            def slow(fd: int, calls: list[int] = calls, which: int = which) -> None:
                real(fd)
                calls[0] += 1
                if calls[0] == which:
                    signal.raise_signal(signal.SIGINT)  # in this thread, whatever others there are
                    time.sleep(0.01)

            monkeypatch.setattr(os, "fdatasync", slow)
            with pytest.raises(KeyboardInterrupt):
                session.append(turn(5))
            monkeypatch.setattr(os, "fdatasync", real)
            # From its commit on readers may have seen the turn, so it is not taken back.
            assert session.tokens == (IDS[:3] if which == 1 else IDS[:5]) == native.load(path).tokens
            session.append(turn(6))
            assert session.load().tokens == IDS[:6]
        assert kvsnap.verify(path).ok


def test_an_interrupt_right_behind_the_commit_is_a_published_turn(tmp_path: Path) -> None:
    with Session.open(tmp_path / "a.kvsnap") as session:
        session.append(turn(3))
        assert session.tokens == IDS[:3]
        real = session._journal.publish

        def publish(*args: Any, **options: Any) -> int:
            real(*args, **options)
            raise KeyboardInterrupt

        session._journal.publish = publish  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            session.append(turn(5))
        session._journal.publish = real  # type: ignore[method-assign]
        assert session.tokens == IDS[:5]
        session.append(turn(7))
        assert same(session.load(), turn(7)) == []
    assert kvsnap.verify(session.path).ok


def test_a_reader_beside_a_writer_that_cuts_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.kvsnap"
    with Session.open(path) as session:
        session.append(turn(3))
    good = path.stat().st_size
    with path.open("ab") as file:
        file.write(os.urandom(64) * 4000)  # an append in flight
    real, raced = read.find_end, []

    def racing(reader: Any, header: Any) -> Any:
        if not raced:
            raced.append(True)
            os.truncate(path, good)  # the append failed, and its writer cut back
        return real(reader, header)

    monkeypatch.setattr(read, "find_end", racing)
    assert kvsnap.load(path).tokens == IDS[:3]
    assert raced
    monkeypatch.setattr(read, "find_end", real)
    os.truncate(path, 200)
    with pytest.raises(kvsnap.KvsnapError):
        kvsnap.load(path)


def test_a_turn_that_ends_inside_a_character(tmp_path: Path) -> None:
    texts = ("h\ufffd", "hé the", "hé there, then")
    with Session.open(tmp_path / "a.kvsnap") as session:
        for count, text in zip((2, 5, 7), texts, strict=True):
            session.append(replace(turn(count), text=text))
            assert session.load().text == text
        session.truncate(5)
        assert session.load().text == "hé the"
    with Session.open(tmp_path / "b.kvsnap") as session:
        session.append(turn(2))
        assert session.load().text is None
        session.append(replace(turn(4), text="now known"))
        assert session.load().text == "now known"


def test_the_working_directory_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Session.open("a.kvsnap") as session:
        session.append(turn(2))
        monkeypatch.chdir("/")
        session.append(turn(3))
    assert kvsnap.load(tmp_path / "a.kvsnap").tokens == IDS[:3]


def test_what_a_killed_writer_left_is_removed_by_a_later_one(tmp_path: Path) -> None:
    left, young = tmp_path / ".kvsnap-0123.tmp", tmp_path / ".kvsnap-4567.tmp"
    for path in (left, young, tmp_path / "mine.tmp"):
        path.write_bytes(b"x" * 100)
    os.utime(left, (1, 1))
    os.utime(tmp_path / "mine.tmp", (1, 1))
    with files.replacing(tmp_path / "held.kvsnap") as writer:
        writer.write(b"held")
        held = next(p for p in tmp_path.glob(".kvsnap-*.tmp") if p != young)
        os.utime(held, (1, 1))
        turn(2).save(tmp_path / "a.kvsnap")
        assert held.exists()
    assert not left.exists()
    assert young.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == [young.name, "a.kvsnap", "held.kvsnap", "mine.tmp"]


def test_an_interrupt_while_a_temporary_file_is_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.system, "set_mode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        turn(2).save(tmp_path / "a.kvsnap")
    assert list(tmp_path.iterdir()) == []


def test_a_session_opened_for_reading_says_so_first(tmp_path: Path) -> None:
    with Session.open(tmp_path / "a.kvsnap") as session:
        session.append(turn(3))
    with Session.open(tmp_path / "a.kvsnap", readonly=True) as session, pytest.raises(InputError, match="reading"):
        session.append(snapshot((9, 9, 9, 9)))


def test_without_locks_a_second_writer_is_a_conflict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(files.system.fcntl, "flock", no_locks)
    path = tmp_path / "s.kvsnap"
    with Session.open(path) as one, Session.open(path) as other:
        one.append(snapshot((1, 2, 3)))
        with pytest.raises(ConflictError, match="changed since it was opened"):
            other.append(snapshot((7, 8)))
        assert native.load(path).tokens == (1, 2, 3)
        one.append(snapshot((1, 2, 3, 4)))
    assert verify(path).ok
    with Session.open(path) as again:
        assert again.tokens == (1, 2, 3, 4)


def test_without_locks_two_writers_at_the_same_instant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "no locks")

    monkeypatch.setattr(files.system.fcntl, "flock", no_locks)
    path = tmp_path / "s.kvsnap"
    with Session.open(path) as one, Session.open(path) as other:
        checked = Journal._writer

        def meanwhile(journal: Journal, appender: files.Appender) -> Any:
            monkeypatch.setattr(Journal, "_writer", checked)
            writer = checked(journal, appender)
            other.append(snapshot(tuple(range(40))))  # between our look at the end and our first byte
            return writer

        monkeypatch.setattr(Journal, "_writer", meanwhile)
        with pytest.raises(ConflictError, match="another writer"):
            one.append(snapshot((1, 2, 3)))
        # Their commit is not cut off. Their rows were written over, which no lock kept us from: found, not handed out.
        assert path.stat().st_size == other.nbytes
        assert not verify(path).ok
        with pytest.raises((DamagedError, FormatError)):
            native.load(path).layers[0].tensors[0].values()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files as Linux shows them")
def test_a_file_that_is_let_go_of_is_closed_at_once(tmp_path: Path) -> None:
    """Not only when the garbage collector comes: till then a file that was removed keeps its room on the disk."""

    def n_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    path = tmp_path / "a.kvsnap"
    with Session.open(path) as session:
        session.append(turn(3))
        name = session_file_name(session._journal.header.file_id)
    path.rename(tmp_path / name)
    sealed, parent = tmp_path / "sealed", tmp_path / name
    kvsnap.save(turn(3), sealed)
    fork = fork_file(str(parent)).path
    gc.collect()
    gc.disable()
    try:
        before = n_open()
        for one in (sealed, parent, fork):
            for _ in range(5):
                assert native.load(one).n_rows == 3
                assert verify(one).ok
            assert n_open() == before, one
        with Session.open(fork) as session:
            held = n_open()
            for count in range(4, 7):
                session.append(turn(count))
                session.truncate(3)
                assert session.load().n_rows == 3
            assert n_open() == held
        kept = native.load(sealed)
        assert n_open() > before, "the control: what is held is open"
        assert kept.n_rows == 3
    finally:
        gc.enable()


@pytest.mark.parametrize("empties", [[kvsnap.Snapshot()], [kvsnap.Snapshot(architecture="llama")] * 3,
                                     [snapshot((), layers=3, recurrent=True)]])  # fmt: skip
@pytest.mark.parametrize("way", ["session", "fork", "fork of a fork", "compacted"])
def test_turns_that_hold_nothing_bind_nothing(tmp_path: Path, way: str, empties: list[kvsnap.Snapshot]) -> None:
    """What begins behind them may be of any shape, and its identity is known."""
    empties = [replace(e, identity=kvsnap.Identity(), metadata={"title": "t"}) for e in empties]
    with Session.open(tmp_path / "new") as session:
        for empty in empties:
            session.append(empty)
        if way == "compacted":
            session.compact()
        path = tmp_path / session_file_name(session._journal.header.file_id)
    (tmp_path / "new").rename(path)
    for _ in range(way.count("fork")):
        path = Path(fork_file(str(path)).path)
    made = [snapshot(IDS[:n], layers=2, recurrent=True) for n in (3, 5, 7)]
    with Session.open(path) as session:
        before = session.n_commits
        for one in made:
            session.append(one)
            assert same(session.load(), replace(one, metadata={"title": "t"})) == []
        assert session.identity == made[0].identity
        session.truncate(3)
        assert same(session.load(), replace(made[0], metadata={"title": "t"})) == []
        assert session.rewind(before) == 0
        assert same(session.load(), empties[-1]) == []
        session.append(made[1])
    assert kvsnap.verify(path).ok
    reader = SpecReader(path.read_bytes(), tmp_path)
    reader.history()
    content = reader.content()
    assert content["ids"] == list(IDS[:5])
    assert {t.name: t.array.tobytes() for t in made[1].tensors()} == {
        name: values.tobytes() for name, values in content["tensors"].items()
    }


def test_a_turn_that_holds_an_id_binds_the_shape(tmp_path: Path) -> None:
    """The control: one pending id is a history."""
    with Session.open(tmp_path / "a") as session:
        session.append(snapshot((1,), n_pending=1))
        with pytest.raises(CompatibilityError, match="shaped otherwise"):
            session.append(snapshot((1, 2), layers=2))
        with pytest.raises(CompatibilityError, match="another model"):
            session.append(snapshot((1, 2), identity=replace(IDENTITY, cache_dtype="float16")))


def test_a_published_commit_that_cannot_be_read_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "s.kvsnap"
    with Session.open(path) as session:
        session.append(turn(2))
        session.append(turn(5))
    raw = bytearray(path.read_bytes())
    raw[-200] ^= 1  # inside of the last COMMIT; its footer is whole
    path.write_bytes(raw)
    assert not verify(path).ok
    with Session.open(path) as session:
        assert (session.tokens, session.n_commits) == (IDS[:2], 2)
        for act in (lambda: session.append(turn(3)), session.compact, session.check_open_to_turns):
            with pytest.raises(DamagedError, match=r"commit 3 was published .* rewind to commit 2"):
                act()
        assert path.read_bytes() == bytes(raw)
        assert session.rewind(2) == 2  # on purpose
        session.check_open_to_turns()
        session.append(turn(3))
    assert verify(path).ok
    assert native.load(path).tokens == IDS[:3]


def test_a_torn_tail_is_cut_off_by_the_next_turn(tmp_path: Path) -> None:
    """The control: what never was published stands in nobody's way."""
    path = tmp_path / "s.kvsnap"
    with Session.open(path) as session:
        session.append(turn(2))
        session.append(turn(5))
        end = session.nbytes
    path.write_bytes(path.read_bytes()[: end - 64])  # the footer is gone
    assert verify(path).ok
    with Session.open(path) as session:
        session.append(turn(3))
    assert native.load(path).tokens == IDS[:3]

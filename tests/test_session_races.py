"""What threads, forked processes, signal handlers and interrupts that come one behind the other do to a session."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

import kvsnap
from kvsnap import Session, formats
from kvsnap.errors import BusyError, ConflictError, InputError, MissingError
from kvsnap.files import Appender, Reader, replacing
from kvsnap.formats.native import NativeFile, counts
from kvsnap.formats.native.told import Told
from kvsnap.formats.native.write import RecordWriter
from synthetic import same, snapshot

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the promises tested here are those of POSIX systems"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
TOKENS = tuple(range(1, 100))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "talk.kvsnap"


def made(path: Path, *lengths: int) -> Session:
    session = Session.open(path)
    for length in lengths:
        session.append(snapshot(TOKENS[:length], layers=3, text="x" * length))
    return session


def in_child(act: Callable[[], object]) -> None:
    """Run `act` in a forked process, and wait for its end."""
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        return
    try:
        act()
    finally:
        os._exit(0)


# -- processes ---------------------------------------------------------------------------------------------


def fork_that_fails(at: int) -> Callable[[int, int], None]:
    """A progress function that forks once; the child leaves by an exception, through all that is open."""
    calls = [0]

    def progress(done: int, total: int) -> None:
        calls[0] += 1
        if calls[0] == at:
            child = os.fork()
            if not child:
                raise SystemExit
            assert os.waitpid(child, 0)[1] == 0

    return progress


@pytest.mark.parametrize("act", ["append", "compact", "fork", "save"])
def test_a_process_that_is_forked_in_the_middle_and_ends_takes_nothing_away(path: Path, act: str) -> None:
    progress, there, whole = fork_that_fails(3), os.getpid(), snapshot(TOKENS[:20], layers=3)
    session = made(path, 8)
    try:
        if act == "append":
            session.append(whole, progress=progress)
        elif act == "compact":
            session.compact(progress=progress)
        elif act == "fork":
            session.fork(path.with_name("other"), progress=progress)
        else:
            whole.save(path.with_name("other"), progress=progress)
    finally:
        if os.getpid() != there:
            os._exit(0)
    for file in path.parent.iterdir():
        assert kvsnap.verify(file).damages == ()
    assert len(session.load().tokens) == (20 if act == "append" else 8)
    session.close()


def test_a_process_that_was_forked_does_not_keep_the_lock(path: Path) -> None:
    session = made(path, 8)
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.write(ready[1], b"x")
        os.read(done[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    try:
        session.close()
        with made(path) as again:
            assert again.n_tokens == 8
    finally:
        os.write(done[1], b"x")
        os.waitpid(child, 0)


def test_a_process_that_was_forked_does_not_give_up_the_lock_of_the_other(path: Path) -> None:
    with made(path, 8) as session:
        in_child(session.close)
        with pytest.raises(BusyError):
            Session.open(path)


def test_closing_what_was_forked_does_not_wait_for_a_thread_that_is_not_there(path: Path) -> None:
    session = made(path, 8)
    held, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with session._turns:
            held.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    in_child(session.close)
    leave.set()
    thread.join()
    session.close()


def test_a_file_that_has_no_name_yet_stays_held_when_an_appender_of_it_is_closed(path: Path) -> None:
    with replacing(path) as writer:
        Appender.taking(writer).close()
        left = [name for name in path.parent.iterdir() if name.name.startswith(".kvsnap-")]
        with pytest.raises(BusyError):
            Appender.open(left[0])


# -- one change at a time ----------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", ["append", "compact"])
def test_a_change_inside_of_a_change_is_refused(path: Path, outer: str) -> None:
    refused = []

    def progress(done: int, total: int) -> None:
        changes = (
            lambda: session.append(snapshot(TOKENS[:16], layers=3)),
            lambda: session.truncate(4),
            session.reset,
            lambda: session.rewind(1),
            session.compact,
        )
        for act in changes:
            with pytest.raises(ConflictError, match="is being changed"):
                act()
        refused.append(len(session.load().tokens))

    with made(path, 8) as session:
        if outer == "append":
            session.append(snapshot(TOKENS[:20], layers=3), progress=progress)
        else:
            session.compact(progress=progress)
        assert set(refused) == {8}
        assert session.n_tokens == (20 if outer == "append" else 8)
        session.truncate(4)
    assert kvsnap.verify(path).ok


def test_closing_waits_for_the_change_of_another_thread(path: Path) -> None:
    writing, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    def progress(done: int, total: int) -> None:
        writing.set()
        go_on.wait()

    session = made(path, 8)
    append = threading.Thread(target=lambda: session.append(snapshot(TOKENS[:20], layers=3), progress=progress))
    append.start()
    writing.wait()
    close = threading.Thread(target=lambda: (session.close(), closed.set()))
    close.start()
    assert not closed.wait(0.05)
    go_on.set()
    append.join()
    close.join()
    assert closed.is_set()
    assert kvsnap.load(path).tokens == TOKENS[:20]


def test_ids_that_were_read_before_a_change_are_not_kept_behind_it(path: Path) -> None:
    session = made(path, 8)
    session._told = None
    started = threading.Event()
    other = threading.Thread(target=lambda: session.append(snapshot(TOKENS[:12], layers=3, text="x" * 12)))

    def slow(read: Callable[..., Told]) -> Callable[..., Told]:
        def slowly(of: object) -> Told:
            found = read(of)
            if not started.is_set():
                started.set()
                other.start()
                other.join(0.2)  # without a lock it would be through by now
            return found

        return slowly

    with mock.patch.object(counts, "told_of", slow(counts.told_of)):
        assert session.tokens == TOKENS[:8]
        other.join()
    assert session.tokens == TOKENS[:12]
    session.append(snapshot(TOKENS[:16], layers=3, text="x" * 16))
    assert session.load().text == "x" * 16
    session.close()


def test_the_history_is_that_of_one_file_while_another_thread_compacts(path: Path) -> None:
    session = made(path, 4, 8)
    session.truncate(4)
    session.append(snapshot(TOKENS[:9], layers=3))
    expected = len(session.history)
    compact = threading.Thread(target=session.compact)
    opened, started = Session._reader, threading.Event()

    def slowly(of: Session) -> Reader:
        if threading.current_thread() is threading.main_thread() and not started.is_set():
            started.set()
            compact.start()
            compact.join(0.2)
        return opened(of)

    with mock.patch.object(Session, "_reader", slowly):
        assert len(session.history) == expected
        compact.join()
    assert len(session.history) == 2
    session.close()


# -- another file under the name -----------------------------------------------------------------------------


def test_a_reader_stays_at_its_turn_and_is_told_of_another_file(path: Path) -> None:
    with made(path, 8) as writer, Session.open(path, readonly=True) as reader:
        writer.append(snapshot(TOKENS[:12], layers=3))
        assert (reader.n_tokens, len(reader.tokens), len(reader.history)) == (8, 8, 2)
        writer.compact()
        reader._told = None
        for act in (lambda: reader.tokens, lambda: reader.history, lambda: reader.fork(path.with_name("other"))):
            with pytest.raises(ConflictError, match="another file took the place"):
                act()
        assert len(reader.load().tokens) == 12
        assert (reader.n_tokens, len(reader.tokens), len(reader.history)) == (12, 12, 2)


def test_a_directory_that_became_a_file_is_a_conflict(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with made(tmp_path / "a" / "talk", 8) as session:
        (tmp_path / "a").rename(tmp_path / "b")
        (tmp_path / "a").write_bytes(b"")
        for act in (lambda: session.append(snapshot(TOKENS[:20], layers=3)), session.reset, session.compact):
            with pytest.raises((ConflictError, InputError)):
                act()


# -- an interrupt behind an error -----------------------------------------------------------------------------


class Twice:
    """Interrupts the writing of a commit, and then the cutting back."""

    def __init__(self) -> None:
        self.left = 2

    def __call__(self, *arguments: object) -> None:
        self.left -= 1
        raise KeyboardInterrupt


@pytest.mark.parametrize("published", [False, True])
def test_an_interrupt_in_the_cutting_back_leaves_a_usable_session(path: Path, published: bool) -> None:
    twice = Twice()
    with made(path, 8) as session:
        with (
            mock.patch.object(RecordWriter, "commit", twice),
            mock.patch.object(Appender, "truncate", twice),
            pytest.raises(KeyboardInterrupt),
        ):
            session.append(snapshot(TOKENS[:12], layers=3))
        assert twice.left == 0
        assert path.stat().st_size > session.nbytes  # the negative control: something was left
        if published:
            session.compact()
        session.append(snapshot(TOKENS[:16], layers=3))
        assert same(session.load(), snapshot(TOKENS[:16], layers=3, text=None)) == []
        assert (session.dropped, path.stat().st_size) == (0, session.nbytes)
    assert kvsnap.verify(path).damages == ()


def test_bytes_of_somebody_else_are_not_cut_off_behind_such_an_interrupt(path: Path) -> None:
    twice = Twice()
    with made(path, 8) as session:
        before = path.read_bytes()
        with (
            mock.patch.object(RecordWriter, "commit", twice),
            mock.patch.object(Appender, "truncate", twice),
            pytest.raises(KeyboardInterrupt),
        ):
            session.append(snapshot(TOKENS[:12], layers=3))
        copy = path.with_name("copy")
        copy.write_bytes(before)
        with Session.open(copy) as other:
            other.append(snapshot(TOKENS[:10], layers=3))
        path.write_bytes(copy.read_bytes())  # as another writer would, where there are no locks
        with pytest.raises(ConflictError):
            session.append(snapshot(TOKENS[:12], layers=3))
    assert len(kvsnap.load(path).tokens) == 10


def test_an_interrupt_as_the_writing_ends_does_nothing_later(path: Path) -> None:
    """A change that was left unfinished must not cut the file back at the time when the garbage collector comes."""
    armed, kept = [True], []

    def trace(frame: object, event: str, argument: object) -> None:
        code = frame.f_code  # type: ignore[attr-defined]
        if event == "call" and code.co_name == "__exit__" and armed:
            owner = frame.f_locals.get("self")  # type: ignore[attr-defined]
            if type(owner).__name__ in {"_Writing", "_GeneratorContextManager"}:
                armed.clear()
                raise KeyboardInterrupt

    with made(path, 8) as session:
        sys.settrace(trace)
        try:
            session.truncate(6)
        except KeyboardInterrupt as error:
            kept.append(error)
        finally:
            sys.settrace(None)
        assert kept

        def progress(done: int, total: int) -> None:
            if kept:
                kept.clear()
                gc.collect()

        length = session.n_tokens
        session.append(snapshot(TOKENS[: length + 6], layers=3), progress=progress)
    assert kvsnap.verify(path).damages == ()


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupt_behind_the_new_name_of_a_compacted_file(path: Path, at: int) -> None:
    """The session goes on with the file that has the name, whatever it was kept from doing."""
    calls = [0]
    settle = Session._settle

    def interrupted(session: Session, **arguments: bool) -> None:
        calls[0] += 1
        if calls[0] == at + 1:  # the first is that before the change
            raise KeyboardInterrupt
        settle(session, **arguments)

    with made(path, 8) as session:
        session.truncate(6)
        before = path.read_bytes()
        with mock.patch.object(Session, "_settle", interrupted), pytest.raises(KeyboardInterrupt):
            session.compact()
            session.load()
            session.truncate(5)
        assert path.read_bytes() != before
        assert session.load().tokens == session.tokens == TOKENS[:6]
        assert len(session.history) == 1
        with pytest.raises(BusyError):
            Session.open(path)
        session.append(snapshot(TOKENS[:9], layers=3))
    with Session.open(path) as session:
        assert session.tokens == TOKENS[:9]
    assert kvsnap.verify(path).damages == ()


def test_a_damaged_file_that_is_removed_while_it_is_opened_is_missing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(path, 3, 5).close()
    path.write_bytes(path.read_bytes()[:300])

    def opened(name: str) -> Reader:
        reader = Reader(name)
        Path(name).unlink()
        return reader

    monkeypatch.setattr("kvsnap.formats.native.read.Reader", opened)
    with pytest.raises(MissingError, match="no such file"):
        NativeFile.open(path)


@pytest.mark.parametrize("look", [kvsnap.inspect, kvsnap.verify])
def test_a_foreign_file_that_is_removed_while_it_is_told_of_is_missing(
    look: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.mlxkv"
    kvsnap.save(snapshot(TOKENS[:8]), path, format="mlxkv")
    mlxkv = formats.format_named("mlxkv")

    class Removing:
        name = mlxkv.name

        def load(self, place: str, *, mmap: bool) -> kvsnap.Snapshot:
            found = mlxkv.load(place, mmap=mmap)
            path.unlink()
            return found

    monkeypatch.setattr(formats, "format_of", lambda _: Removing())
    with pytest.raises(MissingError, match="no such file"):
        look(path)

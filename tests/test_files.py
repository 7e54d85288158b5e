"""Durable bytes: what holds when writes are cut short, the disk is full, a sync fails, or somebody else writes."""

from __future__ import annotations

import errno
import gc
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsnap import files
from kvsnap.errors import (
    BusyError,
    DamagedError,
    InputError,
    KvsnapError,
    MissingError,
    PoisonedError,
    StorageError,
)
from kvsnap.files import Appender, Reader, replacing, write_whole

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the promises tested here are those of POSIX systems")


class Journal:
    """A recorder: keeps the operations, and can replay them into the bytes each file must hold."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, str, int, bytes]] = []

    def record(self, operation: str, path: str, offset: int, data: bytes) -> None:
        self.entries.append((operation, path, offset, data))

    @property
    def operations(self) -> list[str]:
        return [entry[0] for entry in self.entries]

    def replay(self) -> dict[str, bytes]:
        disk: dict[str, bytearray] = {}
        for operation, path, offset, data in self.entries:
            if operation == "create":
                disk[path] = bytearray()
            elif operation == "write":
                content = disk[path]
                content.extend(bytes(max(0, offset - len(content))))
                content[offset : offset + len(data)] = data
            elif operation == "truncate":
                del disk[path][offset:]
            elif operation == "rename":
                disk[os.fsdecode(data)] = disk.pop(path)
            elif operation == "unlink":
                del disk[path]
        return {path: bytes(content) for path, content in disk.items()}


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> Journal:
    made = Journal()
    monkeypatch.setattr(files, "recorder", made)
    return made


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def start(code: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    text = textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", text, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(files.__file__).parents[2])},
        **options,
    )


def run(code: str, *arguments: str, **options: Any) -> str:
    process = start(code, *arguments, **options)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out.strip()


def write_short(monkeypatch: pytest.MonkeyPatch, at_most: int) -> list[int]:
    """Let each system call take at most so many bytes; return the list of what they took."""
    real, taken = os.pwritev, []

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        data = b"".join(buffers)[:at_most]
        taken.append(real(fd, [data], offset))
        return taken[-1]

    monkeypatch.setattr(os, "pwritev", short)
    return taken


# -- whole files -------------------------------------------------------------------------------------------


def test_write_whole_takes_bytes_buffers_and_a_function(tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert write_whole(path, b"one") == 3
    assert path.read_bytes() == b"one"
    assert write_whole(path, [b"t", bytearray(b"w"), memoryview(b"o")]) == 3
    assert path.read_bytes() == b"two"
    assert write_whole(path, lambda writer: writer.write(b"three")) == 5
    assert path.read_bytes() == b"three"
    assert write_whole(path, b"") == 0
    assert path.read_bytes() == b""
    assert names(tmp_path) == ["a"]


def test_relative_paths_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_whole("a", b"x")
    with Appender.create("b") as appender:
        appender.write_at(b"y", 0)
        appender.sync()
    files.remove("a")
    files.make_directory("c")
    assert names(tmp_path) == ["b", "c"]


def test_writer_positions(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with replacing(path) as writer:
        assert writer.tell() == 0
        assert writer.write(b"0123456789") == 10
        assert writer.pwrite(b"AB", 2) == 2
        assert writer.tell() == 10
        writer.sync()
        writer.truncate(6)
        assert writer.tell() == 6
        writer.write([b"x", b"", b"yz"])
        writer.truncate(9)
        with pytest.raises(InputError, match="truncate"):
            writer.truncate(10)
        with pytest.raises(InputError, match="-1"):
            writer.pwrite(b"", -1)
    assert path.read_bytes() == b"01AB45xyz"
    with pytest.raises(InputError, match="closed"):
        writer.write(b"late")


def test_the_old_file_stays_until_the_end_and_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), replacing(path) as writer:
        writer.write(b"new")
        assert path.read_bytes() == b"old"
        assert len(names(tmp_path)) == 2
        assert [n for n in names(tmp_path) if n.startswith(files.TEMPORARY_PREFIX)]
        raise ZeroDivisionError
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_recorder_sees_write_sync_rename_and_directory_sync_in_order(tmp_path: Path, journal: Journal) -> None:
    path = tmp_path / "a"
    with replacing(path) as writer:
        writer.write([b"ab", b"cd"])
        writer.pwrite(b"X", 1)
    assert journal.operations == ["create", "write", "write", "sync", "rename", "fsync-dir"]
    temporary = journal.entries[0][1]
    assert journal.entries[1] == ("write", temporary, 0, b"abcd")
    assert journal.entries[4] == ("rename", temporary, 0, os.fsencode(path))
    assert journal.entries[5][1] == str(tmp_path)
    assert journal.replay() == {str(path): path.read_bytes()}


def test_without_sync_nothing_is_synced(tmp_path: Path, journal: Journal) -> None:
    write_whole(tmp_path / "a", b"abc", sync=False)
    assert journal.operations == ["create", "write", "rename"]


def test_recorder_sees_the_removal_after_an_error(tmp_path: Path, journal: Journal) -> None:
    with pytest.raises(KeyError), replacing(tmp_path / "a"):
        raise KeyError
    assert journal.operations == ["create", "unlink"]
    assert journal.replay() == {}


@pytest.mark.parametrize("step", ["fsync", "replace", "close"])
def test_each_failing_step_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    real_close = os.close

    def fail(*arguments: Any) -> None:
        if step == "close":
            real_close(*arguments)
        raise OSError(errno.EIO, "made up")

    with pytest.raises(StorageError) as caught, replacing(path) as writer:
        writer.write(b"new")
        monkeypatch.setattr(os, step, fail)
    monkeypatch.undo()
    assert caught.value.errno == errno.EIO
    assert caught.value.path == str(path)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_a_full_disk_is_a_storage_error_and_the_temporary_file_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.pwritev, []

    def fill_up(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "made up")
        return real(fd, [b"".join(buffers)[:3]], offset)

    monkeypatch.setattr(os, "pwritev", fill_up)
    with pytest.raises(StorageError, match="no space left") as caught:
        write_whole(tmp_path / "a", b"abcdef")
    assert caught.value.errno == errno.ENOSPC
    assert isinstance(caught.value, OSError)
    assert calls == [0, 3]
    assert names(tmp_path) == []


def test_a_file_size_limit_of_the_system(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    code = """
        import resource, sys
        from kvsnap import files
        from kvsnap.errors import StorageError
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            files.write_whole(sys.argv[1], bytes(200_000))
        except StorageError as error:
            print("whole", error.errno)
        with files.Appender.open(sys.argv[1]) as appender:
            try:
                appender.write_at([bytes(50_000)] * 4, 3)
            except StorageError as error:
                print("append", error.errno, appender.size())
            appender.truncate(3)
            appender.write_at(b"!", 3)
            appender.sync()
    """
    assert run(code, str(path)).splitlines() == [f"whole {errno.EFBIG}", f"append {errno.EFBIG} 100000"]
    assert path.read_bytes() == b"old!"
    assert names(tmp_path) == ["a"]


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    code = """
        import os, signal, sys
        from kvsnap import files
        with files.replacing(sys.argv[1]) as writer:
            writer.write(b"new")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    process = start(code, str(path))
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    assert all(n == "a" or n.startswith(files.TEMPORARY_PREFIX) for n in names(tmp_path))


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    for act in (
        lambda: write_whole(gone / "a", b""),
        lambda: Appender.create(gone / "a"),
        lambda: Appender.open(gone / "a"),
        lambda: Reader(gone / "a"),
    ):
        with pytest.raises(MissingError, match=f"no directory {gone}"):
            act()
    with pytest.raises(MissingError, match="no such file"):
        Reader(tmp_path / "a")
    with pytest.raises(FileNotFoundError):
        Appender.open(tmp_path / "a")


def test_only_regular_files_are_written_and_read(tmp_path: Path) -> None:
    target, link, pipe, loose = (tmp_path / n for n in ("target", "link", "pipe", "loose"))
    target.write_bytes(b"old")
    link.symlink_to(target)
    loose.symlink_to(tmp_path / "nowhere")
    os.mkfifo(pipe)
    for odd, kind in ((link, "symbolic link"), (loose, "symbolic link"), (tmp_path, "directory"), (pipe, "pipe")):
        with pytest.raises(InputError, match=kind):
            write_whole(odd, b"new")
        with pytest.raises(InputError, match=kind):
            Appender.open(odd)
    with pytest.raises(InputError, match="device"):
        write_whole("/dev/null", b"new")
    for odd, kind in ((tmp_path, "directory"), (pipe, "pipe")):
        with pytest.raises(InputError, match=kind):
            Reader(odd)
    with pytest.raises(InputError, match="symbolic link"):
        Reader(link, follow_symlinks=False)
    with Reader(link) as reader:
        assert reader.read_at(0, 3) == b"old"
    with pytest.raises(InputError, match="exists"):
        Appender.create(loose)
    assert not (tmp_path / "nowhere").exists()
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["link", "loose", "pipe", "target"]


def test_a_link_that_appears_between_the_look_and_the_open_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, path = tmp_path / "target", tmp_path / "a"
    target.write_bytes(b"old")
    path.write_bytes(b"")
    real = os.open

    def swap(name: str, *arguments: Any, **options: Any) -> int:
        path.unlink()
        path.symlink_to(target)
        return real(name, *arguments, **options)

    monkeypatch.setattr(os, "open", swap)
    with pytest.raises(InputError, match="symbolic link"):
        Appender.open(path)


@pytest.mark.timeout(30)
def test_a_pipe_that_appears_between_the_look_and_the_open_is_neither_waited_for_nor_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"")
    real = os.open

    def swap(name: str, *arguments: Any, **options: Any) -> int:
        path.unlink()
        os.mkfifo(path)
        return real(name, *arguments, **options)

    monkeypatch.setattr(os, "open", swap)
    with pytest.raises(InputError, match="pipe"):
        Reader(path)


@pytest.mark.parametrize("path", ["", "a\0b", b"bytes"])
def test_what_is_not_a_path_is_refused(path: Any) -> None:
    for act in (lambda p: write_whole(p, b""), Reader, Appender.open, Appender.create, files.remove):
        with pytest.raises(InputError, match="not a path"):
            act(path)
    with pytest.raises(InputError, match="too long"):
        Reader("x" * 300)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o277, 0o777])
def test_permissions_do_not_depend_on_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "whole", b"x")
        write_whole(tmp_path / "shared", b"x", mode=0o644)
        Appender.create(tmp_path / "appended").close()
        files.make_directory(tmp_path / "one" / "two")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "whole") == 0o600
    assert mode_of(tmp_path / "shared") == 0o644
    assert mode_of(tmp_path / "appended") == 0o600
    assert mode_of(tmp_path / "one") == mode_of(tmp_path / "one" / "two") == 0o700


def test_a_new_file_never_takes_a_name_that_is_taken(tmp_path: Path, journal: Journal) -> None:
    path = tmp_path / "a"
    assert write_whole(path, b"first", new=True) == 5
    assert journal.operations == ["create", "write", "sync", "rename", "fsync-dir"]
    with pytest.raises(InputError, match="taken"):
        write_whole(path, b"second", new=True)
    assert path.read_bytes() == b"first"
    assert names(tmp_path) == ["a"]
    with pytest.raises(InputError, match="taken"), replacing(tmp_path / "b", new=True) as writer:
        writer.write(b"slow")
        write_whole(tmp_path / "b", b"fast", new=True)
    assert (tmp_path / "b").read_bytes() == b"fast"
    assert names(tmp_path) == ["a", "b"]
    assert journal.replay() == {str(path): b"first", str(tmp_path / "b"): b"fast"}


def test_an_appender_tells_when_its_name_is_taken_by_another_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with Appender.create(path) as appender:
        assert appender.is_named
        write_whole(path, b"other")
        assert not appender.is_named
        files.remove(path)
        assert not appender.is_named


def test_the_temporary_file_is_private_too(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with replacing(tmp_path / "a"):
            assert mode_of(tmp_path / names(tmp_path)[0]) == 0o600
    finally:
        os.umask(before)


# -- writes cut short --------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_most", [1, 2, 3, 5, 100])
def test_partial_writes_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, journal: Journal, at_most: int
) -> None:
    taken = write_short(monkeypatch, at_most)
    buffers = [b"abc", b"", b"d", memoryview(b"efghij"), bytearray(b"k")]
    path, other = tmp_path / "a", tmp_path / "b"
    assert write_whole(path, buffers) == 11
    with Appender.create(other) as appender:
        assert appender.write_at(buffers, 0) == 11
        assert appender.write_at(b"XY", 4) == 2
    assert path.read_bytes() == b"abcdefghijk"
    assert other.read_bytes() == b"abcdXYghijk"
    assert max(taken) == min(at_most, 11)
    assert journal.replay() == {str(path): path.read_bytes(), str(other): other.read_bytes()}


def test_more_buffers_than_one_call_takes(tmp_path: Path) -> None:
    buffers = [bytes([i % 251]) * (i % 3) for i in range(5000)]
    write_whole(tmp_path / "a", buffers)
    assert (tmp_path / "a").read_bytes() == b"".join(buffers)


def test_calls_are_cut_at_the_limit_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.system, "_MAX_CALL", 4)
    real, sizes = os.pwritev, []

    def measure(fd: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(sum(len(b) for b in buffers))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", measure)
    write_whole(tmp_path / "a", [b"abc", b"defghi", b"j"])
    assert sizes == [4, 4, 2]
    with Reader(tmp_path / "a") as reader:
        assert reader.read_at(0, 10) == b"abcdefghij"


def test_a_write_that_takes_nothing_ends_in_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(StorageError, match="no byte"):
        write_whole(tmp_path / "a", b"x")


def test_only_contiguous_buffers_are_taken(tmp_path: Path) -> None:
    with Appender.create(tmp_path / "a") as appender:
        with pytest.raises(InputError, match="contiguous"):
            appender.write_at(memoryview(b"abcd")[::2], 0)
        with pytest.raises(InputError, match="buffer"):
            appender.write_at(["text"], 0)  # type: ignore[list-item]
        assert appender.size() == 0
        appender.write_at(memoryview(b"abcdefgh").cast("I", [2]), 0)
        assert appender.read_at(0, 8) == b"abcdefgh"


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.lists(st.binary(max_size=9), max_size=4), st.integers(0, 40)),
            st.tuples(st.just("cut"), st.just([]), st.integers(0, 40)),
        ),
        max_size=12,
    ),
    at_most=st.integers(1, 12),
)
def test_an_appender_is_an_array_of_bytes(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, list[bytes], int]], at_most: int
) -> None:
    path, model = tmp_path_factory.mktemp("model") / "a", bytearray()
    with pytest.MonkeyPatch.context() as patch, Appender.create(path) as appender:
        write_short(patch, at_most)
        for kind, buffers, offset in steps:
            if kind == "write":
                data = b"".join(buffers)
                assert appender.write_at(buffers, offset) == len(data)
                if data:
                    model.extend(bytes(max(0, offset - len(model))))
                    model[offset : offset + len(data)] = data
            else:
                length = min(offset, len(model))
                appender.truncate(length)
                del model[length:]
            assert appender.size() == len(model)
            assert appender.read_at(0, len(model)) == model


# -- appending ---------------------------------------------------------------------------------------------


def test_appender_order_and_the_name_of_a_new_file(tmp_path: Path, journal: Journal) -> None:
    with Appender.create(tmp_path / "a") as appender:
        appender.write_at([b"ab", b"c"], 0)
        appender.sync()
        appender.sync()
        appender.truncate(1)
    assert journal.operations == ["create", "write", "sync", "fsync-dir", "sync", "truncate"]
    assert journal.entries[-1][2] == 1
    assert journal.replay() == {str(tmp_path / "a"): b"a"}


def test_appender_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    with Appender.create(tmp_path / "a") as appender:
        appender.write_at(b"abc", 0)
        for act in (
            lambda: appender.truncate(4),
            lambda: appender.truncate(-1),
            lambda: appender.write_at(b"x", -1),
            lambda: appender.read_at(-1, 1),
            lambda: appender.read_into(0, b"readonly"),  # type: ignore[arg-type]
        ):
            with pytest.raises(InputError):
                act()
        with pytest.raises(InputError, match="exists"):
            Appender.create(tmp_path / "a")
        assert appender.read_at(0, 3) == b"abc"
    with pytest.raises(InputError, match="closed"):
        appender.size()
    appender.close()


def test_a_failed_sync_poisons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    write_whole(path, b"abc")
    appender = Appender.open(path)

    def fail(_fd: int) -> None:
        raise OSError(errno.EIO, "made up")

    appender.write_at(b"d", 3)
    with monkeypatch.context() as patch:
        for name in ("fdatasync", "fsync"):
            patch.setattr(os, name, fail, raising=False)
        with pytest.raises(StorageError, match="sync") as caught:
            assert not appender.poisoned
            appender.sync()
    assert appender.poisoned
    assert caught.value.errno == errno.EIO
    for act in (
        appender.sync,
        appender.size,
        lambda: appender.truncate(0),
        lambda: appender.write_at(b"x", 0),
        lambda: appender.read_at(0, 1),
        lambda: appender.read_into(0, bytearray(1)),
    ):
        with pytest.raises(PoisonedError, match="reopen"):
            act()
    assert path.read_bytes() == b"abcd"
    appender.close()
    with Appender.open(path) as reopened:
        reopened.sync()
        assert reopened.size() == 4


def test_a_failed_directory_sync_of_a_new_file_poisons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Appender.create(tmp_path / "a") as appender:
        with monkeypatch.context() as patch:

            def fail(_fd: int) -> None:
                raise OSError(errno.EIO, "made up")

            patch.setattr(os, "fsync", fail)
            with pytest.raises(StorageError, match="sync directory"):
                appender.sync()
        with pytest.raises(PoisonedError):
            appender.sync()


def test_a_second_writer_is_refused_and_a_reader_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_whole(path, b"abc")
    with Appender.open(path):
        with pytest.raises(BusyError, match="try again"):
            Appender.open(path)
        with Reader(path) as reader:
            assert reader.read_at(0, 3) == b"abc"
    Appender.open(path).close()


def test_the_lock_holds_between_processes_and_dies_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_whole(path, b"abc")
    code = """
        import sys
        from kvsnap.files import Appender
        held = Appender.open(sys.argv[1])
        print("locked", flush=True)
        sys.stdin.readline()
    """
    process = start(code, str(path))
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n", process.communicate()[1]
        with pytest.raises(BusyError):
            Appender.open(path)
    finally:
        process.kill()
        process.communicate(timeout=60)
    Appender.open(path).close()


def test_a_dropped_appender_gives_up_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "a"
    Appender.create(path)
    gc.collect()
    Appender.open(path).close()


def test_a_file_replaced_before_the_lock_is_not_the_one_that_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    write_whole(path, b"old")
    real, n_locks = files.system.lock, []

    def replaced_meanwhile(fd: int, name: str) -> None:
        n_locks.append(fd)
        if len(n_locks) == 1:
            write_whole(path, b"new")
        real(fd, name)

    monkeypatch.setattr(files.system, "lock", replaced_meanwhile)
    with Appender.open(path) as appender:
        assert appender.read_at(0, 3) == b"new"
    assert len(n_locks) == 2


# -- reading -----------------------------------------------------------------------------------------------


def test_reading_ranges(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_whole(path, b"0123456789")
    with Reader(path) as reader:
        assert reader.size == 10
        assert reader.read_at(3, 4) == b"3456"
        assert reader.read_at(10, 0) == b""
        buffer = bytearray(4)
        assert reader.read_into(6, buffer) == 4
        assert buffer == b"6789"
        assert reader.read_into(10, bytearray()) == 0
        with pytest.raises(InputError):
            reader.read_into(0, memoryview(bytearray(4))[::2])
        with pytest.raises(InputError):
            reader.read_into(-1, bytearray(1))
    with pytest.raises(InputError, match="closed"):
        reader.read_at(0, 1)


def test_a_short_read_names_offset_expected_and_found(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_whole(path, b"0123456789")
    with Reader(path) as reader:
        for act in (lambda: reader.read_at(8, 5), lambda: reader.read_into(8, bytearray(5))):
            with pytest.raises(DamagedError, match="expected 5 bytes, found 2") as caught:
                act()
            assert (caught.value.offset, caught.value.path) == (8, str(path))
        with pytest.raises(DamagedError, match="found 0"):
            reader.read_at(1 << 40, 1)
        with pytest.raises(DamagedError):
            reader.read_at(0, 1 << 62)  # nothing of this size is allocated


def test_reads_cut_short_by_the_system_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    write_whole(path, b"0123456789")
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda fd, n, at: pread(fd, min(n, 3), at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:3]], at))
    with Reader(path) as reader:
        assert reader.read_at(1, 8) == b"12345678"
        buffer = bytearray(9)
        reader.read_into(0, buffer)
        assert buffer == b"012345678"


def test_a_map_is_readonly_and_outlives_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_whole(path, b"0123456789" * 1000)
    with Reader(path) as reader:
        view = reader.map()
        part = reader.map()[5:8]
        assert view.readonly
        assert len(view) == 10_000
    del view
    gc.collect()
    assert part == b"567"
    with pytest.raises(TypeError):
        part[0] = 0
    with pytest.raises(InputError, match="closed"):
        reader.map()
    write_whole(path, b"other")  # another file under the same name
    assert part == b"567"


def test_maps_of_empty_and_of_shortened_files(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_whole(path, b"")
    with Reader(path) as reader:
        assert reader.map() == b""
    write_whole(path, b"0123456789")
    with Reader(path) as reader, Appender.open(path) as appender:
        appender.truncate(4)
        with pytest.raises(DamagedError, match="expected 10 bytes, found 4"):
            reader.map()


def test_reading_changes_nothing_and_needs_no_right_to_write(tmp_path: Path, journal: Journal) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    path.chmod(0o400)
    before = path.stat()
    with Reader(path) as reader:
        reader.read_at(0, 10)
        bytes(reader.map())
        reader.read_into(0, bytearray(10))
    after = path.stat()
    assert (before.st_mtime_ns, before.st_size, before.st_ino) == (after.st_mtime_ns, after.st_size, after.st_ino)
    assert journal.entries == []


def test_several_threads_read_at_once(tmp_path: Path) -> None:
    data = bytes(range(256)) * 64
    write_whole(tmp_path / "a", data)
    wrong: list[int] = []
    with Reader(tmp_path / "a") as reader:

        def read_all(first: int) -> None:
            wrong.extend(at for at in range(first, len(data) - 64, 97) if reader.read_at(at, 64) != data[at : at + 64])

        threads = [threading.Thread(target=read_all, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


# -- names and errors --------------------------------------------------------------------------------------


def test_directories_and_removal(tmp_path: Path, journal: Journal) -> None:
    deep = tmp_path / "one" / "two"
    files.make_directory(deep)
    files.make_directory(deep)
    assert journal.operations == ["mkdir", "fsync-dir"] * 2
    write_whole(deep / "a", b"x")
    (deep / "link").symlink_to(deep / "a")
    files.remove(deep / "link")
    assert names(deep) == ["a"]
    files.remove(deep / "a")
    assert journal.operations[-2:] == ["unlink", "fsync-dir"]
    with pytest.raises(MissingError):
        files.remove(deep / "a")
    with pytest.raises(InputError, match="directory"):
        files.remove(deep)
    (tmp_path / "file").write_bytes(b"")
    for taken in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError):
            files.make_directory(taken)
    with pytest.raises(MissingError):
        files.fsync_directory(tmp_path / "gone")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOENT, MissingError),
        (errno.EISDIR, InputError),
        (errno.ENOTDIR, InputError),
        (errno.EEXIST, InputError),
        (errno.ELOOP, InputError),
        (errno.ENAMETOOLONG, InputError),
        (errno.EACCES, StorageError),
        (errno.ENOSPC, StorageError),
        (errno.EDQUOT, StorageError),
        (errno.EFBIG, StorageError),
        (errno.EIO, StorageError),
        (errno.EROFS, StorageError),
        (None, StorageError),
    ],
)
def test_each_error_of_the_system_has_one_kind(tmp_path: Path, code: int | None, kind: type[KvsnapError]) -> None:
    cause = OSError("no number") if code is None else OSError(code, "made up")
    error = files.translate(cause, tmp_path / "a", "write")
    assert type(error) is kind
    assert error.path == str(tmp_path / "a")
    assert "cannot write" in str(error)
    if kind is StorageError:
        assert isinstance(error, OSError)
        assert error.errno == code


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="gives up root's rights in a new process")
def test_no_permission_is_a_storage_error(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_whole(path, b"secret")
    code = """
        import os, sys
        from kvsnap.errors import StorageError
        from kvsnap.files import Appender, Reader, write_whole
        os.setuid(65534)
        for act in (Reader, Appender.open, lambda p: write_whole(p, b"x")):
            try:
                act(sys.argv[1])
            except StorageError as error:
                print(error.errno)
    """
    tmp_path.chmod(0o755)  # so that it is the file, not the way to it, that is refused
    assert run(code, "a", cwd=tmp_path).split() == [str(errno.EACCES)] * 3


@pytest.mark.parametrize("name", ["a\ud800", "a\0", ""])
def test_what_can_be_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    place = str(tmp_path / name) if name else name
    for act in (
        Reader,
        Appender.open,
        Appender.create,
        files.absolute,
        files.remove,
        lambda path: write_whole(path, b""),
    ):
        with pytest.raises(InputError, match="not a path"):
            act(place)


def test_a_relative_path_in_a_directory_that_is_gone(tmp_path: Path) -> None:
    code = """
        import os, sys
        from kvsnap import Session
        from kvsnap.errors import MissingError
        os.mkdir(sys.argv[1]); os.chdir(sys.argv[1]); os.rmdir(sys.argv[1])
        try:
            Session.open("a.kvsnap")
        except MissingError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "gone")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "working directory is gone" in done.stdout


def test_a_new_name_where_the_file_system_has_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "a"
    files.write_whole(path, b"one", new=True)
    with pytest.raises(InputError, match="the name is taken"):
        files.write_whole(path, b"two", new=True)
    assert path.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["a"]

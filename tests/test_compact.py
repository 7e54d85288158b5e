"""Compacting, and copies of sessions: what stays is copied as it is stored, and nothing else is taken along."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvsnap import codecs, files
from kvsnap.errors import (
    BusyError,
    ConflictError,
    DamagedError,
    FormatError,
    InputError,
    KvsnapError,
    MissingError,
    PoisonedError,
    StorageError,
)
from kvsnap.formats import native
from kvsnap.formats.native import schema
from kvsnap.formats.native.copy import CompactReport, CopyReport
from kvsnap.formats.native.fork import fork_file
from kvsnap.formats.native.read import NativeFile
from kvsnap.formats.native.replay import history_of
from kvsnap.inspection import verify
from kvsnap.session import Session
from kvsnap.tensors import TensorSpec, numpy_dtype
from spec_file import INDEX, SPAN, STATE, SpecReader
from synthetic import same, snapshot
from test_forks import MADE, SHAPE, TOKENS, flip, forked, named, part_places, prefix, started, turn, windowed, within
from test_native_hostile import CASES

SYNC = files.system.sync


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.system, "sync", lambda *_a, **_k: None)
    monkeypatch.setattr(files, "fsync_directory", lambda *_a, **_k: None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.kvsnap"


def compacted(path: Path, way: str) -> tuple[Path, CopyReport]:
    """The two ways to write a session anew."""
    if way == "compact":
        with Session.open(path) as session:
            return path, session.compact()
    target = path.with_name("copy.kvsnap")
    with Session.open(path, readonly=True) as session:
        return target, session.fork(target)


def stored(path: Path) -> list[tuple[int, list[tuple[Any, ...]]]]:
    """The parts of the live SPANs and STATEs in order: everything but where they lie."""
    reader = SpecReader(path.read_bytes(), path.parent)
    out = []
    for where, entry in reader.live():
        for at, kind in ((entry["span"], SPAN), (entry["state"], STATE)):
            if at:
                parts = where.table(at, kind)["parts"]
                out.append((kind, [tuple(v for k, v in part.items() if k != "offset") for part in parts]))
    return out


def times(path: Path) -> list[tuple[int, bool, int, int, int]]:
    with Session.open(path, readonly=True) as session:
        return [(t.time_ns, t.complete, t.n_tokens, t.n_rows, t.commit) for t in session.history]


WAYS = pytest.mark.parametrize("way", ["compact", "fork"])


# -- what stays ----------------------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("codec", ["exact", "q8"])
def test_parts_are_copied_as_they_are_stored(path: Path, way: str, codec: str) -> None:
    with Session.open(path) as session:
        session.append(turn(1))
        session.truncate(1)
        session.reset()
        for i, one in enumerate(MADE):
            session.append(one, codec=codec, complete=i != 2)
        session.append(turn(6, metadata={}), codec=codec)
        session.truncate(15)
        before = session.load()
        [t.array for t in before.tensors()]
    old, data, history = stored(path), path.read_bytes(), times(path)
    target, report = compacted(path, way)
    assert stored(target) == old
    assert same(native.load(target), before) == []
    check = SpecReader(target.read_bytes())
    check.records()
    assert len(check.history()) == report.n_turns == 5
    assert times(target) == [(time, ok, n, rows, i + 1) for i, (time, ok, n, rows, _) in enumerate(history[4:9])]
    assert [ok for _, ok, *_ in times(target)] == [True, True, False, True, True]
    assert verify(target).damages == ()
    assert report.file_id == check.file_id.hex() != data[40:56].hex()
    assert report.nbytes == target.stat().st_size < len(data)
    assert report.n_tokens == 15
    assert report.notes == ()
    if isinstance(report, CompactReport):
        assert (report.nbytes_before, report.n_commits_before) == (len(data), 11)
    else:
        assert path.read_bytes() == data
    with Session.open(target) as session:  # back to every turn, with its state
        for n in (12, 9, 6, 3):
            session.truncate(n)
            found, wanted = session.load(), replace(prefix(MADE, n), metadata=before.metadata)
            assert found.sampler == wanted.sampler
            assert found.token_offset == wanted.token_offset
            assert found.text == wanted.text
            if codec == "exact":
                assert same(found, wanted) == []


@WAYS
@pytest.mark.parametrize("n", range(1, 15))
@pytest.mark.parametrize("codec", ["exact", "q8"])
def test_of_a_cut_turn_only_what_is_kept_goes_along(path: Path, way: str, n: int, codec: str) -> None:
    hidden = "never to be seen again"
    made = [turn(i, dim=16, text="ab" * i if 3 * i <= n else "ab" * (n // 3) + hidden) for i in range(1, 6)]
    with Session.open(path) as session:
        for one in made:
            session.append(one, codec=codec)
        session.truncate(n)
        before = session.load()
        arrays = [t.array.copy() for t in before.tensors()]
    data = path.read_bytes()
    target, _ = compacted(path, way)
    found = native.load(target)
    assert same(found, before) == []
    assert [t.array.tobytes() for t in found.tensors()] == [a.tobytes() for a in arrays]
    assert [t.bound for t in found.tensors()] == [t.bound for t in before.tensors()]
    assert verify(target).damages == ()
    new = target.read_bytes()
    SpecReader(new).records()
    assert hidden.encode() in data
    assert hidden.encode() not in new
    for token in TOKENS[n:15]:
        # No other number in the file is a token id by chance: the ids are looked for where only ids can stand.
        assert all(token not in SpecReader(new).table(e["span"], SPAN)["ids"] for e in SpecReader(new).entries())
    if codec == "exact":
        for tensor in made[-1].tensors():
            for row in range(found.n_rows, tensor.n_rows):
                gone = tensor.array[0, row].tobytes()
                assert gone in data
                assert gone not in new
            for row in range(found.n_rows):
                assert tensor.array[0, row].tobytes() in new
    with Session.open(target) as session:
        session.append(snapshot((*TOKENS[:n], 7, 8), start=session.n_rows, **(SHAPE | {"dim": 16})))
        assert session.tokens == (*TOKENS[:n], 7, 8)
        assert [t.rows(0, before.n_rows).array.tobytes() for t in session.load().tensors()] == [
            a.tobytes() for a in arrays
        ]


def test_the_bytes_of_removed_ids_are_not_in_the_file(path: Path) -> None:
    """Ids that no other number can be by chance."""
    ids = tuple(0x41424300 + i for i in range(9))
    with Session.open(path) as session:
        session.append(snapshot(ids[:5], **SHAPE))
        session.append(snapshot(ids, **SHAPE))
        session.truncate(7)
        session.compact()
    new = path.read_bytes()
    found = [i for i, token in enumerate(ids) if struct.pack("<i", token) in new]
    assert found == list(range(7))


@WAYS
def test_layers_with_states_and_windows(path: Path, way: str) -> None:
    for make in (windowed, lambda n: snapshot(TOKENS[:n], recurrent=True, **SHAPE)):
        path.unlink(missing_ok=True)
        path.with_name("copy.kvsnap").unlink(missing_ok=True)
        with Session.open(path) as session:
            for n in (3, 6, 12, 14):
                session.append(make(n))
            session.truncate(6)
            session.append(make(13))
        old = stored(path)
        target, _ = compacted(path, way)
        assert within(native.load(target), make(13)) == []
        assert stored(target) == old
        with Session.open(target) as session:
            session.truncate(6)
            assert within(session.load(), make(6)) == []


@WAYS
@pytest.mark.parametrize("reset", [False, True])
def test_an_empty_session(path: Path, way: str, reset: bool) -> None:
    with Session.open(path) as session:
        if reset:
            session.append(MADE[1])
            session.reset()
        identity, before = session.identity, session.load()
    target, report = compacted(path, way)
    assert (report.n_tokens, report.n_turns) == (0, 0)
    assert same(native.load(target), before) == []
    assert verify(target).damages == ()
    assert SpecReader(target.read_bytes()).content()["ids"] == []
    with Session.open(target) as session:
        assert session.identity == identity
        session.append(MADE[0])
    assert native.load(target).tokens == MADE[0].tokens


@WAYS
def test_a_session_of_many_turns_with_several_indexes(path: Path, way: str) -> None:
    made = [snapshot(TOKENS[: i + 1], **SHAPE) for i in range(200)]
    with Session.open(path) as session:
        for one in made[:150]:
            session.append(one)
        session.truncate(100)
        for one in made[100:]:
            session.append(one)
    old = stored(path)
    target, report = compacted(path, way)
    assert report.n_turns == 200
    assert stored(target) == old
    assert same(native.load(target), made[-1]) == []
    reader = SpecReader(target.read_bytes())
    assert sum(r["kind"] == INDEX for r in reader.records()) > 2
    assert all(c["n_tail"] <= 32 for c in reader.history())
    assert verify(target).damages == ()
    with Session.open(target) as session:
        for commit in (1, 33, 34, 120):
            copy = target.with_name(f"{commit}.kvsnap")
            session.fork(copy, commit=commit)
            assert same(native.load(copy), made[commit - 1]) == []


@WAYS
def test_a_fork_becomes_a_file_of_its_own(tmp_path: Path, way: str) -> None:
    path = started(tmp_path, MADE[:3], codec="q8")
    fork = forked(path, n_tokens=7)
    with Session.open(fork) as session:
        session.append(snapshot(TOKENS[:10], **SHAPE))
    fork = forked(fork).rename(tmp_path / "mine.kvsnap")
    before = native.load(fork)
    [t.array for t in before.tensors()]
    old = stored(fork)
    target, report = compacted(fork, way)
    path.unlink()
    reader = SpecReader(target.read_bytes())
    assert not reader.forked
    assert same(native.load(target), before) == []
    assert verify(target).damages == ()
    assert report.n_turns == 4
    new = stored(target)
    assert new[:4] == old[:4]  # two whole turns; the third one is cut
    assert new[5:] == old[5:]


# -- copies of a part of a session ---------------------------------------------------------------------------


def test_a_copy_of_an_earlier_commit_or_of_fewer_tokens(path: Path) -> None:
    with Session.open(path) as session:
        for one in MADE[:3]:
            session.append(one)
        session.truncate(4)
        for i, (options, expected) in enumerate(
            [
                ({}, prefix(MADE[:3], 4)),
                ({"commit": 4}, MADE[2]),
                ({"commit": 3}, MADE[1]),
                ({"commit": 4, "n_tokens": 8}, prefix(MADE[:3], 8)),
                ({"commit": 4, "n_tokens": 6}, MADE[1]),
                ({"n_tokens": 3}, MADE[0]),
                ({"n_tokens": 0}, prefix(MADE[:3], 0)),
                ({"commit": 5}, prefix(MADE[:3], 4)),
            ]
        ):
            target = path.with_name(f"{i}.kvsnap")
            report = session.fork(target, **options)
            assert report.path == str(target)
            loaded = native.load(target)
            assert same(loaded, expected) == []
            assert verify(target).damages == ()
            SpecReader(target.read_bytes()).history()
            with Session.open(target) as copy:
                assert copy.complete
                copy.append(snapshot((*expected.tokens, 5), **SHAPE))
        before = sorted(path.parent.iterdir())
        with pytest.raises(MissingError):
            session.fork(path.with_name("x.kvsnap"), commit=9)
        with pytest.raises(InputError):
            session.fork(path.with_name("x.kvsnap"), n_tokens=5)
        with pytest.raises(InputError):
            session.fork(path)
        with pytest.raises(InputError):
            session.fork(path.with_name("0.kvsnap"))
        assert sorted(path.parent.iterdir()) == before
        assert same(session.load(), prefix(MADE[:3], 4)) == []


# -- damage --------------------------------------------------------------------------------------------------


@WAYS
def test_a_broken_chain_of_commits_costs_only_what_it_says_of_turns(path: Path, way: str) -> None:
    with Session.open(path) as session:
        for one in MADE:
            session.append(one, complete=False)
        before = session.load()
        [t.array for t in before.tensors()]
        offset = session.history[3].offset
    old, known = stored(path), times(path)
    flip(path, offset + 64 + 130)
    target, report = compacted(path, way)
    (note,) = report.notes
    assert "before commit 5" in note
    assert str(offset + 64) in note
    assert stored(target) == old
    assert same(native.load(target), before) == []
    assert verify(target).damages == ()
    assert times(target)[-2:] == [(*known[i][:4], i) for i in (4, 5)]
    assert [t[2] for t in times(target)] == [3, 6, 9, 12, 15]
    with Session.open(target) as session:
        for commit in (1, 2, 3):  # the position that comes next is known from STATE
            copy = target.with_name(f"c{commit}.kvsnap")
            session.fork(copy, commit=commit)
            assert same(replace(native.load(copy), metadata={}), replace(MADE[commit - 1], metadata={})) == []
        session.truncate(9)
        assert session.load().token_offset == MADE[2].token_offset


def test_a_turn_without_rows_behind_a_broken_chain_keeps_its_position(path: Path) -> None:
    with Session.open(path) as session:
        session.append(snapshot(TOKENS[:3], **SHAPE))
        session.append(snapshot(TOKENS[:5], n_pending=2, **SHAPE))
        session.append(snapshot(TOKENS[:6], **SHAPE))
        offset = session.history[2].offset
    flip(path, offset + 64 + 130)
    with Session.open(path) as session:
        session.compact()
        session.fork(path.with_name("copy.kvsnap"), commit=2)
    assert native.load(path.with_name("copy.kvsnap")).token_offset == 3


@WAYS
@pytest.mark.parametrize("what", ["part", "state", "table", "span header", "layout", "identity", "note", "index"])
def test_a_live_part_that_is_damaged_is_named_and_the_file_stays(path: Path, way: str, what: str) -> None:
    with Session.open(path) as session:
        for one in MADE[:3]:
            session.append(one)
        for i in range(40):
            session.append(snapshot((*TOKENS[:9], *range(i + 1)), **SHAPE))
    reader = SpecReader(path.read_bytes())
    entry, commit = reader.entries()[1], reader.commit
    at = {
        "part": part_places(path)[5][2], "table": entry["span"] + 64 + 70, "span header": entry["span"] + 20,
        "state": entry["state"] + 64 + reader.table(entry["state"], STATE)["parts"][0]["offset"],
    }.get(what) or commit[what] + 64 + 2  # fmt: skip
    flip(path, at)
    data = path.read_bytes()
    with pytest.raises((DamagedError, FormatError)) as caught:
        compacted(path, way)
    assert caught.value.path == str(path)
    if what == "part":
        assert isinstance(caught.value, DamagedError)
        assert "layer0.v" in str(caught.value)
        assert caught.value.offset == at
    assert path.read_bytes() == data
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@WAYS
def test_damage_in_what_was_cut_off_does_not_matter(path: Path, way: str) -> None:
    with Session.open(path) as session:
        for one in MADE[:3]:
            session.append(one)
    places = part_places(path)
    with Session.open(path) as session:
        session.truncate(6)
    flip(path, places[8][2])
    target, _ = compacted(path, way)
    assert verify(target).damages == ()
    assert same(native.load(target), MADE[1]) == []


@WAYS
@pytest.mark.parametrize("rule", ["check", "order"])
def test_a_list_that_means_other_spans_is_not_copied(path: Path, way: str, rule: str) -> None:
    """What `load` refuses is not made into a file that it takes."""
    from spec_file import Minimal, chain

    made = Minimal(2)
    w = made.writer()
    at = made.places
    digest = chain(bytes(16), [5, 6, 7], 3)
    entry = {"span": at["span"], "n_tokens": 3, "row_start": 0, "n_rows": 3, "state": at["state"],
             "check": w.check_of(at["span"]), "digest": digest}  # fmt: skip
    fields = {"number": 2, "previous": at["commit"], "previous_digest": w.digest_of(at["commit"]), "n_tokens": 3,
              "n_rows": 3, "token_offset": 3, "flags": 1, "identity": at["identity"], "layout": at["layout"],
              "state": at["state"], "note": at["note"], "digest": digest}  # fmt: skip
    tail = [entry | {"check": bytes(8)}]
    if rule == "order":
        # A second span of no tokens and rows that stands before the first one, and would be copied twice.
        empty = w.table(SPAN, {"row_start": 3, "token_start": 3})
        more = {"span": empty, "n_tokens": 0, "row_start": 3, "n_rows": 0, "state": 0, "check": w.check_of(empty)}
        second = more | {"digest": chain(digest, [], 0)}
        tail = [entry, second, second | {"digest": chain(second["digest"], [], 0)}]
        fields |= {"digest": tail[-1]["digest"], "state": 0}
    w.commit(fields, tail)
    path.write_bytes(bytes(w.data))
    with pytest.raises(FormatError):
        native.load(path)
    with pytest.raises(FormatError):
        compacted(path, way)
    assert path.read_bytes() == bytes(w.data)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


# -- the lock, readers and other writers -----------------------------------------------------------------------

TRY = """
import sys
from kvsnap.errors import BusyError
from kvsnap.session import Session
try:
    Session.open(sys.argv[1]).close()
except BusyError:
    print("busy")
else:
    print("open")
"""


def asked(path: Path) -> str:
    """What another process finds that wants to write."""
    out = subprocess.run([sys.executable, "-c", TRY, str(path)], capture_output=True, text=True, check=True, timeout=60)
    return out.stdout.strip()


def test_the_lock_is_held_all_along(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class During:
        def __init__(self) -> None:
            self.found: list[tuple[str, str]] = []

        def record(self, operation: str, _path: str, _offset: int, _data: bytes) -> None:
            if operation in {"create", "sync", "rename"}:
                monkeypatch.setattr(files, "recorder", None)
                self.found.append((operation, asked(path)))
                monkeypatch.setattr(files, "recorder", self)

    during = During()
    with Session.open(path) as session:
        session.append(MADE[0])
        monkeypatch.setattr(files, "recorder", during)
        session.compact()
        monkeypatch.setattr(files, "recorder", None)
        assert asked(path) == "busy"
        with pytest.raises(BusyError):
            Session.open(path)
        session.append(MADE[1])
        assert asked(path) == "busy"
    assert {operation for operation, _ in during.found} >= {"create", "rename"}
    assert {answer for _, answer in during.found} == {"busy"}
    assert asked(path) == "open"  # the control
    assert same(native.load(path), MADE[1]) == []


def test_readers_that_were_there_before_read_the_old_content(path: Path) -> None:
    with Session.open(path) as session:
        for one in MADE[:3]:
            session.append(one)
        old = native.load(path)
        reader = Session.open(path, readonly=True)
        session.truncate(4)
        cut = native.load(path)
        session.compact()
        session.append(snapshot((*TOKENS[:4], 7), **SHAPE))
        assert same(old, MADE[2]) == []
        assert same(cut, prefix(MADE[:3], 4)) == []
        assert reader.n_tokens == 9
        assert reader.load().tokens == (*TOKENS[:4], 7)  # moves on to what was published
        reader.close()


def test_compact_and_go_on(path: Path) -> None:
    with Session.open(path) as session:
        session.append(MADE[0])
        session.append(MADE[1])
        session.truncate(4)
        for i in range(3):
            report = session.compact()
            assert report.n_commits_before == (5, 2, 2)[i] - (i == 0)
            assert session.n_commits == 2
            assert session.dropped == 0
            assert session.tokens == TOKENS[:4]
        session.append(snapshot(TOKENS[:8], **SHAPE))
        session.truncate(6)
        assert [t.operation for t in session.history] == ["append", "append", "append", "truncate"]
        session.compact()
        session.reset()
        session.append(MADE[4])
    with Session.open(path) as session:
        assert same(session.load(), MADE[4]) == []
    assert verify(path).damages == ()


def test_a_file_that_another_process_replaced_is_not_compacted(path: Path, tmp_path: Path) -> None:
    with Session.open(path) as session:
        session.append(MADE[0])
        other = tmp_path / "other.kvsnap"
        with Session.open(other) as second:
            second.append(MADE[1])
        os.replace(other, path)
        with pytest.raises(ConflictError):
            session.compact()
    assert same(native.load(path), MADE[1]) == []


def test_what_cannot_be_compacted(path: Path, tmp_path: Path) -> None:
    with Session.open(path) as session:
        session.append(MADE[0])
    with Session.open(path, readonly=True) as session, pytest.raises(InputError, match="reading only"):
        session.compact()
    mine = named(path)
    with Session.open(mine) as session, pytest.raises(InputError, match="library"):
        session.compact()
    fork = Path(fork_file(str(mine)).path)
    with Session.open(fork) as session, pytest.raises(InputError, match="library"):
        session.compact()
    assert same(native.load(fork), MADE[0]) == []
    assert len(list(tmp_path.iterdir())) == 2


# -- errors and interrupts at every operation ------------------------------------------------------------------


class Stop:
    """Raises at the `last` operation."""

    def __init__(self, last: int, error: BaseException) -> None:
        self.left, self.error = last, error
        self.operations: list[str] = []

    def record(self, operation: str, _path: str, _offset: int, _data: bytes) -> None:
        self.operations.append(operation)
        self.left -= 1
        if self.left == 0:
            raise self.error


@pytest.mark.parametrize("way", ["compact", "fork"])
def test_an_interrupt_at_any_operation_leaves_a_usable_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    count = Stop(0, KeyboardInterrupt())
    last = 0
    while last == 0 or last <= len(count.operations):
        path, target = tmp_path / f"{last}.kvsnap", tmp_path / f"copy{last}.kvsnap"
        with Session.open(path) as session:
            session.append(MADE[0])
            session.append(MADE[1])
            session.truncate(5)
            before = session.load()
            [t.array for t in before.tensors()]
            data = path.read_bytes()
            stop = count if last == 0 else Stop(last, KeyboardInterrupt())
            monkeypatch.setattr(files, "recorder", stop)
            try:
                session.compact() if way == "compact" else session.fork(target)
            except KeyboardInterrupt:
                assert last
            else:
                assert not last
            monkeypatch.setattr(files, "recorder", None)
            assert (path.read_bytes() == data) == (way == "fork" or (last > 0 and "rename" not in stop.operations))
            assert not [p.name for p in tmp_path.iterdir() if p.suffix != ".kvsnap"]
            assert target.exists() == (way == "fork" and "rename" in stop.operations)
            assert same(session.load(), before) == []
            assert asked(path) == "busy" if last in {1, len(count.operations)} else True
            session.append(snapshot((*TOKENS[:5], 9), **SHAPE))
            assert session.tokens == (*TOKENS[:5], 9)
        with Session.open(path) as session:
            assert session.tokens == (*TOKENS[:5], 9)
            assert session.dropped == 0
        assert verify(path).damages == ()
        if target.exists():
            assert same(native.load(target), before) == []
        last += 1
    assert count.operations.count("rename") == 1
    assert len(count.operations) > 8


@pytest.mark.parametrize("way", ["compact", "fork"])
@pytest.mark.parametrize("call", ["write", "sync", "rename"])
def test_a_full_disk_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch, way: str, call: str) -> None:
    def full(*_a: Any, **_k: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target = path.with_name("copy.kvsnap")
    with Session.open(path) as session:
        session.append(MADE[0])
        session.append(MADE[1])
        session.truncate(5)
        data = path.read_bytes()
        with monkeypatch.context() as patched:
            if call == "write":
                patched.setattr(os, "pwritev", full, raising=False)
                patched.setattr(os, "pwrite", full)
            elif call == "sync":
                patched.setattr(files.system, "sync", SYNC)
                patched.setattr(os, "fsync", full)
            else:
                patched.setattr(os, "replace", full)
                patched.setattr(os, "link", full)
            with pytest.raises(StorageError):
                session.compact() if way == "compact" else session.fork(target)
        assert path.read_bytes() == data
        assert [p.name for p in path.parent.iterdir()] == [path.name]
        session.append(snapshot((*TOKENS[:5], 9), **SHAPE))
        assert asked(path) == "busy"
        session.compact()
        assert session.tokens == (*TOKENS[:5], 9)
    assert verify(path).damages == ()


def test_a_sync_of_the_directory_that_fails_leaves_the_new_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step: the new file has the name, and the session goes on with it."""
    with Session.open(path) as session:
        session.append(MADE[0])
        session.append(MADE[1])
        session.truncate(5)

        def broken(directory: Any) -> None:
            raise StorageError("cannot sync directory", path=str(directory))

        with monkeypatch.context() as patched:
            patched.setattr(files, "fsync_directory", broken)
            with pytest.raises(StorageError):
                session.compact()
        assert session.tokens == TOKENS[:5]
        assert session.n_commits == 2
        # The name is made durable before anything more is published: else a crash could bring back the old file.
        with monkeypatch.context() as patched:
            patched.setattr(files, "fsync_directory", broken)
            with pytest.raises(StorageError):
                session.append(snapshot((*TOKENS[:5], 9), **SHAPE))
            with pytest.raises(PoisonedError):
                session.append(snapshot((*TOKENS[:5], 9), **SHAPE))
    with Session.open(path) as session:
        assert session.tokens == TOKENS[:5]
        session.append(snapshot((*TOKENS[:5], 9), **SHAPE))
    assert native.load(path).tokens == (*TOKENS[:5], 9)


def test_a_poisoned_session_is_not_compacted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Session.open(path) as session:
        session.append(MADE[0])

        def broken(*_a: Any, **_k: Any) -> None:
            raise OSError(errno.EIO, "broken")

        with monkeypatch.context() as patched:
            patched.setattr(files.system, "sync", SYNC)
            patched.setattr(os, "fdatasync", broken)
            patched.setattr(os, "fsync", broken)
            with pytest.raises(StorageError):
                session.append(MADE[1])
        with pytest.raises(PoisonedError):
            session.compact()


def test_progress_counts_up_to_the_end(path: Path) -> None:
    told: list[tuple[int, int]] = []
    with Session.open(path) as session:
        for one in MADE:
            session.append(one)
        session.compact(progress=lambda done, total: told.append((done, total)))
    assert told[0][0] == 0
    assert all(a[0] <= b[0] <= b[1] for a, b in pairwise(told))
    assert len({total for _, total in told}) == 1
    assert told[-1][0] == told[-1][1] > 0


# -- the cut of a codec ----------------------------------------------------------------------------------------

ORDERS = [("head", "row", "dim"), ("row", "head", "dim"), ("head", "dim", "row"), ("dim", "row"), ("row",)]
DTYPES = [
    "float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int16", "int32",
    "int64", "bool",
]  # fmt: skip


def described(dtype: str, axes: tuple[str, ...], **fields: Any) -> TensorSpec:
    sizes = {"head": 3, "row": 0, "dim": 5}
    values: dict[str, Any] = {
        "id": 1, "name": "layer0.k", "layer": 0, "role": "k", "dtype": dtype, "axes": axes,
        "shape": tuple(sizes[a] for a in axes), "growth": "grow", "row_axis": axes.index("row"),
    }  # fmt: skip
    return TensorSpec(**(values | fields))


def joined(encoded: Any) -> memoryview:
    return memoryview(b"".join(memoryview(b).cast("B").tobytes() for b in encoded.buffers))


def values_of(spec: TensorSpec, n_rows: int) -> np.ndarray[Any, Any]:
    made = np.random.default_rng(5).standard_normal(spec.shape_with(n_rows)) * 3
    return made.astype(numpy_dtype(spec.dtype))


def decoded(codec: Any, spec: TensorSpec, data: Any, n_rows: int) -> np.ndarray[Any, Any]:
    out = np.empty(spec.shape_with(n_rows), numpy_dtype(spec.dtype))
    codec.decode(spec, memoryview(data), out)
    return out


def oracle(values: np.ndarray[Any, Any], spec: TensorSpec, kept: int) -> bytes:
    return np.take(values, range(kept), axis=spec.row_axis).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axes", ORDERS)
def test_the_cut_of_an_exact_part(dtype: str, axes: tuple[str, ...]) -> None:
    spec, codec = described(dtype, axes), codecs.codec_of_name("exact")
    for n_rows in (0, 1, 7):
        values = values_of(spec, n_rows)
        data = joined(codec.encode(spec, values))
        for kept in range(n_rows + 1):
            assert codec.cut(spec, data, n_rows, kept).tobytes() == oracle(values, spec, kept)
    assert codec.cut(spec, data, 7, 6).tobytes() != oracle(values[..., ::-1], spec, 7)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("axes", ORDERS)
@pytest.mark.parametrize("bad", ["", "first", "middle", "last", "all"])
def test_the_cut_of_a_lossy_part(dtype: str, axes: tuple[str, ...], bad: str) -> None:
    """Decoding what was cut gives the bits that decoding everything and cutting then gives."""
    spec, codec = described(dtype, axes), codecs.codec_of_name("q8")
    for n_rows in (1, 2, 7, 8):
        values = values_of(spec, n_rows)
        if bad:
            heads = np.moveaxis(values, axes.index("head"), 0) if "head" in axes else values[None]
            chosen = {"first": [0], "middle": [len(heads) // 2], "last": [-1], "all": range(len(heads))}[bad]
            for head in chosen:
                heads[head].reshape(-1)[...] = heads[head].reshape(-1)
                heads[(head, *(-1 for _ in heads.shape[1:]))] = np.nan
        data = joined(codec.encode(spec, values))
        whole = decoded(codec, spec, data, n_rows)
        for kept in range(n_rows + 1):
            cut = codec.cut(spec, data, n_rows, kept)
            assert decoded(codec, spec, cut.data, kept).tobytes() == oracle(whole, spec, kept)
        assert codec.cut(spec, data, n_rows, n_rows).tobytes() == data.tobytes()


def test_the_cut_of_a_lossy_part_keeps_codes_and_scales() -> None:
    """Codes are not made again: a scale of what is kept alone would be another one."""
    spec, codec = described("float32", ("head", "row", "dim")), codecs.codec_of_name("q8")
    values = np.ones((3, 4, 5), np.float32)
    values[:, 3] = 100
    data = joined(codec.encode(spec, values))
    cut = codec.cut(spec, data, 4, 2)
    again = joined(codec.encode(spec, values[:, :2]))
    assert cut[:32].tobytes() == bytes(data[:32])
    assert cut.tobytes() != again.tobytes()
    assert cut.size == len(again)


@pytest.mark.parametrize("name", ["exact", "q8"])
def test_a_part_of_the_wrong_length_is_not_cut(name: str) -> None:
    spec, codec = described("float32", ("head", "row", "dim")), codecs.codec_of_name(name)
    data = bytes(joined(codec.encode(spec, values_of(spec, 7))))
    for wrong in (data[:-4], data + bytes(4), b""):
        with pytest.raises(DamagedError):
            codec.cut(spec, memoryview(wrong), 7, 3)


def test_what_commits_repeat_is_read_and_kept_once(tmp_path: Path) -> None:
    """A NOTE stands in force for all turns behind it, and every commit has a tail of entries: neither adds up."""
    path = tmp_path / "talk.kvsnap"
    with Session.open(path) as session:
        for n in range(1, 41):
            session.append(snapshot(tuple(range(1, n + 1)), metadata={"title": "long"} if n in (1, 30) else {}))
    read = mock.Mock(wraps=schema.parse_note)
    with closing(NativeFile.open(path)) as file, mock.patch.object(schema, "parse_note", read):
        history = history_of(file)
    assert [piece.metadata for piece in history.pieces] == [{"title": "long"}] * 40
    assert len({id(piece.metadata) for piece in history.pieces}) == 2
    assert read.call_count == 3  # each of the two once, and the one at the end
    assert not any(piece.commit.tail for piece in history.pieces)


# -- hostile files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_copy_of_what_breaks_a_rule_is_refused_or_verifies(tmp_path: Path, name: str) -> None:
    made = CASES[name][0]()
    source, out = tmp_path / "source.kvsnap", tmp_path / "out.kvsnap"
    for data in [made] if isinstance(made, bytes) else made[:3]:
        source.write_bytes(data)
        out.unlink(missing_ok=True)
        try:
            with Session.open(source, readonly=True) as session:
                Session.fork(session, out)
        except KvsnapError:
            assert not out.exists()
        else:
            assert verify(out).damages == ()
            native.load(out)

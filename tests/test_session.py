"""Sessions: what a turn costs, what is left after a crash, a full disk, a failed sync, and who may write when."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvsnap import files
from kvsnap.errors import (
    BusyError,
    CompatibilityError,
    ConflictError,
    DamagedError,
    FormatError,
    InputError,
    KvsnapError,
    PoisonedError,
    StorageError,
    UnsupportedError,
)
from kvsnap.files import Reader
from kvsnap.formats import native
from kvsnap.formats.native.assemble import snapshot_of
from kvsnap.formats.native.write import RecordWriter
from kvsnap.identity import Identity, WeightDigest
from kvsnap.inspection import verify
from kvsnap.layout import PositionRun, Snapshot
from kvsnap.session import Session
from kvsnap.tensors import read_all
from spec_file import SPAN, STATE, SpecReader, up
from synthetic import IDENTITY, SAMPLER, same, snapshot

HERE = Path(__file__).parent
TOKENS = tuple(range(100, 160))


def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.system, "sync", lambda *_a, **_k: None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.kvsnap"


def turns(n: int, step: int = 3, **options: Any) -> list[Snapshot]:
    return [snapshot(TOKENS[: step * (i + 1)], n_pending=1, **options) for i in range(n)]


def written(path: Path, snapshots: list[Snapshot], **options: Any) -> list[int]:
    """Append these turns; return the length of the file after each."""
    lengths = []
    with Session.open(path) as session:
        lengths.append(session.nbytes)
        for one in snapshots:
            session.append(one, **options)
            lengths.append(session.nbytes)
    return lengths


# -- what comes back ------------------------------------------------------------------------------------------


def test_each_turn_comes_back_bit_by_bit(path: Path) -> None:
    made = [replace(t, sampler=SAMPLER, text="ab" * (i + 1), metadata={"turn": str(i)}) for i, t in enumerate(turns(4))]
    with Session.open(path) as session:
        assert session.load().tokens == ()
        assert session.n_commits == 1
        for i, one in enumerate(made):
            report = session.append(one, complete=i != 2)
            assert report.exact
            assert report.commit == i + 2
            assert same(session.load(), one) == []
            assert session.complete == (i != 2)
        assert [t.complete for t in session.history] == [True, True, True, False, True]
        assert [t.n_tokens for t in session.history] == [0, 3, 6, 9, 12]
    assert same(native.load(path), made[-1]) == []
    assert same(native.load(path), made[-2]) != []  # the control
    assert SpecReader(path.read_bytes()).content()["ids"] == list(made[-1].tokens)


def test_partial_captures_add_up(path: Path) -> None:
    whole = turns(5)
    with Session.open(path) as session:
        for one in whole:
            session.append(snapshot(one.tokens, n_pending=1, start=session.n_rows))
        assert same(session.load(), whole[-1]) == []


def test_a_partial_capture_with_a_hole_is_refused(path: Path) -> None:
    with Session.open(path) as session:
        session.append(turns(1)[0])
        before = path.read_bytes()
        with pytest.raises(InputError, match="rows are missing"):
            session.append(snapshot(TOKENS[:9], start=4))
        lying = replace(snapshot(TOKENS[:9], start=4), row_start=2)
        with pytest.raises(InputError, match="first rows of layer0"):
            session.append(lying)
        assert path.read_bytes() == before


def test_append_refuses_what_does_not_continue(path: Path) -> None:
    with Session.open(path) as session:
        session.append(turns(2)[-1])
        before = path.read_bytes()
        other = snapshot((*TOKENS[:4], 7, *TOKENS[5:9]))
        with pytest.raises(InputError, match="token 4 differs"):
            session.append(other)
        with pytest.raises(InputError, match="behind the session"):
            session.append(snapshot(TOKENS[:5]))
        with pytest.raises(CompatibilityError, match="shaped otherwise"):
            session.append(snapshot(TOKENS[:9], heads=3))
        weights = (IDENTITY.weights[0], replace(IDENTITY.weights[1], digest="2" * 32))
        with pytest.raises(CompatibilityError, match="weights differ: layer 0 q_proj") as caught:
            session.append(replace(snapshot(TOKENS[:9]), identity=replace(IDENTITY, weights=weights)))
        assert caught.value.report.refusals
        assert isinstance(weights[0], WeightDigest)
        with pytest.raises(InputError, match="count evaluated positions differently"):
            session.append(replace(snapshot(TOKENS[:9]), n_rows=9, n_pending=2))
        with pytest.raises(InputError, match="no such codec"):
            session.append(snapshot(TOKENS[:9]), codec="q7")
        assert path.read_bytes() == before
        session.append(snapshot(TOKENS[:9]))


@pytest.mark.parametrize(
    ("what", "fields"),
    [
        ("token ids", {"tokens": (1, -2, 3)}),
        ("token ids", {"tokens": (1, 2**31, 3)}),
        ("token_offset", {"token_offset": 2**63}),
        ("positions", {"positions": (PositionRun(2**63 - 1, 3),)}),
        ("position runs", {"positions": (PositionRun(0, 2),)}),
        ("token runs", {"runs": ()}),
        ("metadata", {"metadata": {"a": 1}}),
        ("JSON", {"text": "\ud800"}),
        ("JSON", {"metadata": {"a": "\udfff"}}),
        ("contradict", {"n_pending": 4}),
        ("n_pending", {"n_pending": -1, "n_rows": 4, "positions": (PositionRun(0, 4),), "layers": ()}),
    ],
)
def test_what_could_not_be_read_again_is_not_written(what: str, fields: dict[str, Any], path: Path) -> None:
    bad = replace(snapshot((1, 2, 3)), **fields)
    with pytest.raises(InputError, match=what):
        native.dumps(bad)
    with Session.open(path) as session:
        before = path.read_bytes()
        with pytest.raises(InputError, match=what):
            session.append(bad)
        assert path.read_bytes() == before
        session.append(snapshot((1, 2, 3)))
        assert session.load().tokens == (1, 2, 3)


# -- going back -----------------------------------------------------------------------------------------------


def test_truncate_to_every_length_and_go_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_sync(monkeypatch)
    made = turns(4)
    for n in range(12, -1, -1):
        path.unlink(missing_ok=True)
        written(path, made)
        with Session.open(path) as session:
            assert session.truncate(n) == n
            loaded = session.load()
            assert loaded.tokens == TOKENS[:n]
            assert loaded.n_rows + loaded.n_pending == n
            whole = snapshot(TOKENS[:12])
            for mine, theirs in zip(loaded.tensors(), whole.tensors(), strict=False):
                assert np.array_equal(mine.array, theirs.array[:, : loaded.n_rows])
            longer = snapshot((*TOKENS[:n], 7, 8, 9), n_pending=1)
            session.append(longer)
            assert same(session.load(), longer) == []
        assert verify(path).ok
        assert SpecReader(path.read_bytes()).content()["ids"] == list(longer.tokens)


def test_truncate_to_the_end_of_a_turn_brings_the_turn_back(path: Path) -> None:
    # One token is pending at the end of a turn, and the next turn evaluates it: the cut still gives the turn, whole.
    made = [
        replace(t, sampler=replace(SAMPLER, random=replace(SAMPLER.random, draws=i))) for i, t in enumerate(turns(3))
    ]
    written(path, made)
    with Session.open(path) as session:
        session.truncate(6)
        assert same(session.load(), made[1]) == []
        session.truncate(3)
        assert same(session.load(), made[0]) == []
        session.truncate(2)
        assert session.load().logits is None
        assert session.load().sampler is None


def test_a_cut_of_ids_that_are_not_evaluated_leaves_the_position_that_comes_next(path: Path) -> None:
    first = replace(snapshot(TOKENS[:8], n_pending=3), token_offset=100)
    later = (PositionRun(0, 5), PositionRun(100, 5))
    with Session.open(path) as session:
        session.append(first)
        for n in (7, 6):
            session.truncate(n)
            assert session.load().token_offset == first.truncate(n).token_offset == 100
        session.append(replace(snapshot(TOKENS[:10], start=5), positions=later, token_offset=105))
        session.fork(path.with_name("fork.kvsnap"), n_tokens=6)
        session.truncate(7)  # a row is cut: what comes next follows the last one that stays
        assert session.load().token_offset == 102
        for n in (6, 5):
            session.truncate(n)
            assert session.load().token_offset == 100
        session.truncate(4)
        assert session.load().token_offset == 4
    assert native.load(path.with_name("fork.kvsnap")).token_offset == 100


def test_what_one_turn_does_not_know_of_the_cache_nobody_knows(path: Path) -> None:
    known = replace(IDENTITY, cache_quantisation='{"bits":4}')
    for i, identities in enumerate([(IDENTITY, known), (known, IDENTITY)]):
        with Session.open(path.with_name(f"{i}.kvsnap")) as session:
            for n, identity in enumerate(identities, 1):
                session.append(snapshot(TOKENS[: 2 * n], identity=identity))
            assert session.identity.cache_quantisation == ""


def test_turns_that_add_no_token_do_not_hide_what_follows(path: Path) -> None:
    first, later = snapshot(TOKENS[:5]), snapshot(TOKENS[:10])
    with Session.open(path) as session:
        session.append(first)
        session.append(replace(first, sampler=SAMPLER))
        session.append(later)
        session.truncate(7)
        assert session.load().tokens == TOKENS[:7]
        assert session.load().n_rows == 7
        session.truncate(5)
        assert same(session.load(), replace(first, sampler=SAMPLER)) == []
    assert native.load(path).tokens == TOKENS[:5]


def test_recurrent_states_come_back_where_a_turn_ended_and_nowhere_else(path: Path) -> None:
    made = turns(3, recurrent=True)
    written(path, made)
    with Session.open(path) as session:
        with pytest.raises(UnsupportedError, match=r"layer 0: .*recurrent.* nearest reachable length is 6"):
            session.truncate(7)
        assert session.n_tokens == 9
        session.truncate(6)
        assert same(session.load(), made[1]) == []


def test_truncate_does_not_publish_a_damaged_state(path: Path) -> None:
    written(path, turns(2))
    state = SpecReader(path.read_bytes()).entries()[0]["state"]
    data = bytearray(path.read_bytes())
    data[state + 70] ^= 1
    path.write_bytes(data)
    with Session.open(path) as session:
        with pytest.raises(DamagedError, match="STATE"):
            session.truncate(3)
        assert session.load().tokens == TOKENS[:6]
        session.truncate(2)
        assert session.load().tokens == TOKENS[:2]


def test_truncate_and_reset_refuse_and_repeat(path: Path) -> None:
    written(path, turns(1))
    with Session.open(path) as session:
        for n in (-1, 4):
            with pytest.raises(InputError, match="expected 0 to 3"):
                session.truncate(n)
        commits = session.n_commits
        assert session.truncate(3) == 3
        assert session.n_commits == commits
        session.reset()
        session.reset()
        assert session.n_tokens == 0
        assert session.tokens == ()
        assert session.identity == IDENTITY
        session.append(snapshot((9, 8), heads=3))  # another shape, once nothing is left of the old one
        assert same(session.load(), snapshot((9, 8), heads=3)) == []


# -- the cost ------------------------------------------------------------------------------------------------


class Counted:
    """Counts the bytes that any `Reader` reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n = 0
        real_at, real_into = Reader.read_at, Reader.read_into

        def read_at(reader: Reader, offset: int, length: int) -> bytes:
            self.n += length
            return real_at(reader, offset, length)

        def read_into(reader: Reader, offset: int, buffer: Any) -> int:
            self.n += memoryview(buffer).nbytes
            return real_into(reader, offset, buffer)

        monkeypatch.setattr(Reader, "read_at", read_at)
        monkeypatch.setattr(Reader, "read_into", read_into)


def test_a_turn_costs_the_same_after_1k_and_32k_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_sync(monkeypatch)
    cost = []
    for n in (1_000, 32_000):
        tokens = tuple(range(n + 16))
        with Session.open(tmp_path / str(n)) as session:
            session.append(snapshot(tokens[:n], layers=2))
            report = session.append(snapshot(tokens, layers=2, start=n))
            assert report.nbytes == session.nbytes - session.history[-2].offset - 320 or report.nbytes > 0
            cost.append((report.nbytes, report.tensor_bytes))
    assert abs(cost[0][0] - cost[1][0]) <= 16 << 10
    assert cost[1][1] == cost[0][1]
    assert cost[1][0] < (16 << 10) + cost[1][1]


def test_ten_thousand_turns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_sync(monkeypatch)
    n_turns, step = 10_000, 1
    tokens = tuple(i % 1000 for i in range(n_turns * step))
    one = snapshot(tokens[:1], vocab=0, dim=1, heads=1)
    overhead = []
    with Session.open(path) as session:
        for i in range(1, n_turns + 1):
            # Cheap to make: the rows are those of the last token only.
            part = snapshot(tokens[: i * step], start=session.n_rows, vocab=0, dim=1, heads=1) if i % 500 == 0 else None
            part = part or grown(one, tokens[: i * step], session.n_rows)
            report = session.append(part)
            overhead.append(report.nbytes - report.tensor_bytes)
        assert session.n_tokens == n_turns * step
    assert sum(overhead) / n_turns <= 16 << 10
    counted = Counted(monkeypatch)
    with Session.open(path, readonly=True) as session:
        assert session.n_tokens == n_turns * step
        assert session.n_commits == n_turns + 1
    assert counted.n < 1_000_000, counted.n
    loaded = native.load(path)
    assert loaded.tokens == tokens
    assert loaded.layers[0].tensors[0].array.shape == (1, n_turns * step, 1)


def grown(one: Snapshot, tokens: tuple[int, ...], start: int) -> Snapshot:
    """`one`, moved to the end of `tokens`: quick, where the values do not matter."""
    layer = one.layers[0]
    tensors = tuple(type(t)(t.spec, t.array, start=start) for t in layer.tensors)
    n = len(tokens)
    return replace(
        one, layers=(replace(layer, tensors=tensors),), tokens=tokens, runs=(replace(one.runs[0], count=n),), n_rows=n,
        row_start=start, token_offset=n, positions=(PositionRun(0, n),),
    )  # fmt: skip


# -- who may write -------------------------------------------------------------------------------------------


def test_a_second_writer_is_busy_and_readers_are_not(path: Path) -> None:
    made = turns(3)
    with Session.open(path) as session:
        session.append(made[0])
        with pytest.raises(BusyError):
            Session.open(path)
        with Session.open(path, readonly=True) as reader:
            assert same(reader.load(), made[0]) == []
            old = reader.load()
            session.append(made[1])
            assert same(old, made[0]) == []  # what was loaded stays what it was
            assert reader.n_tokens == 3
            assert same(reader.load(), made[1]) == []
            assert (reader.n_tokens, reader.tokens, len(reader.history)) == (6, made[1].tokens, 3)
            for act in (lambda: reader.append(made[2]), lambda: reader.truncate(1), reader.reset):
                with pytest.raises(InputError, match="reading only"):
                    act()
    with Session.open(path) as again:
        again.append(made[2])


def test_a_busy_file_is_busy_in_another_process(path: Path) -> None:
    with Session.open(path):
        assert run("import sys; from kvsnap.session import Session; Session.open(sys.argv[1])", path) == "BusyError"
    assert run("import sys; from kvsnap.session import Session; Session.open(sys.argv[1])", path) == ""


def run(code: str, *arguments: object) -> str:
    """Run code in a process; return the name of the kvsnap error that ended it, or what it printed."""
    body = textwrap.indent(textwrap.dedent(code), "    ")
    program = (
        f"from kvsnap.errors import KvsnapError\ntry:\n{body}\nexcept KvsnapError as e:\n    print(type(e).__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), str(HERE)])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_replaced_file_is_a_conflict(path: Path, tmp_path: Path) -> None:
    made = turns(2)
    with Session.open(path) as session:
        session.append(made[0])
        copy = tmp_path / "copy"
        copy.write_bytes(path.read_bytes())
        copy.replace(path)
        before = path.read_bytes()
        for act in (lambda: session.append(made[1]), lambda: session.truncate(1), session.reset):
            with pytest.raises(ConflictError, match="another one has its name"):
                act()
        assert path.read_bytes() == before


@pytest.mark.parametrize("change", ["longer", "shorter", "other end"])
def test_a_file_that_another_program_wrote_to_is_a_conflict(change: str, path: Path) -> None:
    made = turns(3)
    lengths = written(path, made[:2])
    with Session.open(path) as session:
        assert session.tokens == made[1].tokens
        if change == "longer":  # what a writer that ignores the lock appended
            with path.open("ab") as f:
                f.write(bytes(64))
        elif change == "shorter":
            os.truncate(path, lengths[1])
        else:
            with path.open("r+b") as f:
                f.seek(lengths[2] - 64)
                f.write(bytes(64))
        before = path.read_bytes()
        with pytest.raises(ConflictError):
            session.append(made[2])
        if change != "longer":
            with pytest.raises((ConflictError, DamagedError)):
                session.load()
        assert path.read_bytes() == before


def test_a_stale_session_is_a_conflict(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = turns(3)
    with Session.open(path) as session:
        session.append(made[0])
        with monkeypatch.context() as patch:
            patch.setattr(files.system, "lock", lambda *_: None)  # a file system without locks
            with Session.open(path) as other:
                other.append(made[1])
        with pytest.raises(ConflictError):
            session.append(made[1])
        with pytest.raises(ConflictError):
            session.load()
    assert same(native.load(path), made[1]) == []


def test_sealed_files_and_missing_ones(path: Path, tmp_path: Path) -> None:
    native.save(turns(1)[0], path)
    with pytest.raises(InputError, match="sealed"):
        Session.open(path)
    with Session.open(path, readonly=True) as session:
        assert session.tokens == TOKENS[:3]
    for options in ({"create": False}, {"readonly": True}):
        with pytest.raises(FileNotFoundError):
            Session.open(tmp_path / "none", **options)
    with pytest.raises(FileNotFoundError, match="no directory"):
        Session.open(tmp_path / "none" / "a")
    with pytest.raises(InputError):
        Session.open(tmp_path)
    assert not (tmp_path / "none").exists()


# -- what goes wrong ------------------------------------------------------------------------------------------


class FailingTensor:
    """A source of values that cannot be read."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def array(self) -> Any:
        raise self.error

    def read_into(self, out: Any) -> None:
        raise self.error


@pytest.mark.parametrize("error", [DamagedError("a part is damaged"), KeyboardInterrupt(), MemoryError()])
def test_an_error_in_the_middle_of_an_append_leaves_the_session_usable(error: BaseException, path: Path) -> None:
    made = turns(2)
    with Session.open(path) as session:
        session.append(made[0])
        before = path.read_bytes()
        bad = snapshot(made[1].tokens, n_pending=1)
        v = bad.layers[0].tensors[1]
        failing = type(v)(v.spec, FailingTensor(error), start=0, n_rows=v.n_rows)
        bad = replace(bad, layers=(replace(bad.layers[0], tensors=(bad.layers[0].tensors[0], failing)),))
        with pytest.raises(type(error)):
            session.append(bad)
        assert path.read_bytes() == before
        session.append(made[1])
        assert same(session.load(), made[1]) == []


def test_a_full_disk_leaves_the_turn_before_and_a_usable_session(path: Path) -> None:
    """The limit on the size of a file stands for a full disk, at every 64th byte of one append."""
    made = turns(2)
    lengths = written(path, made)
    path.unlink()
    code = f"""
    import resource, signal, sys
    from pathlib import Path
    sys.path.insert(0, {str(HERE)!r})
    from synthetic import same, snapshot
    from kvsnap.errors import StorageError
    from kvsnap.session import Session
    from kvsnap.inspection import verify
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    one, two = (snapshot({TOKENS!r}[:n], n_pending=1) for n in (3, 6))
    with Session.open(sys.argv[1]) as session:
        session.append(one)
        before = Path(sys.argv[1]).read_bytes()
        failed = 0
        for room in range(0, {lengths[2] - lengths[1]} + 64, 64):
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + room, resource.RLIM_INFINITY))
            try:
                session.append(two)
            except StorageError as error:
                assert error.errno is not None
                failed += 1
            else:
                break
            assert Path(sys.argv[1]).read_bytes() == before
            assert same(session.load(), one) == []
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert same(session.load(), two) == []
        session.truncate(2)
    assert verify(sys.argv[1]).ok
    print(failed)
    """
    assert int(run(code, path)) == (lengths[2] - lengths[1]) // 64


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failed_sync_poisons_until_it_is_opened_again(
    failing: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = turns(3)
    with Session.open(path) as session:
        session.append(made[0])
        calls = 0
        real = os.fdatasync

        def sync(fd: int) -> None:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise OSError(errno.EIO, "made up")
            real(fd)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", sync)
            with pytest.raises(StorageError, match="sync"):
                session.append(made[1])
        for act in (lambda: session.append(made[1]), lambda: session.truncate(1), session.reset):
            with pytest.raises(PoisonedError, match="reopen"):
                act()
    with Session.open(path) as session:
        # Before the second sync the commit is not written; after it failed, it may be there or not.
        assert session.n_tokens == (3 if failing == 1 else 6)
        assert same(session.load(), made[failing - 1]) == []
        session.append(made[2])
        assert same(session.load(), made[2]) == []


# -- torn, crashed, damaged ----------------------------------------------------------------------------------


def test_cut_off_at_every_length(path: Path, tmp_path: Path) -> None:
    made = [snapshot(()), *turns(3)]
    lengths = written(path, made[1:])
    data = path.read_bytes()
    cut = tmp_path / "cut"
    for n in range(len(data)):
        if n < lengths[0]:
            with pytest.raises((DamagedError, FormatError, InputError)):
                native.loads(data[:n])
            continue
        turn = max(i for i, length in enumerate(lengths) if length <= n)
        file = native.NativeFile(native.BytesReader(data[:n]))
        assert file.end.dropped == n - lengths[turn]
        assert file.commit.number == turn + 1
        loaded = snapshot_of(file)
        assert loaded.tokens == made[turn].tokens
        if n % 64 == 1:  # all bytes of the turn, at each record boundary
            assert turn == 0 or same(loaded, made[turn]) == []
            cut.write_bytes(data[:n])
            report = verify(cut)
            assert report.ok
            assert report.dropped == n - lengths[turn]
            assert len(report.notes) == 1
        file.close()
    for n in (lengths[1] + 1, lengths[2] - 1, lengths[2] - 64):
        cut.write_bytes(data[:n])
        with Session.open(cut) as session:
            assert session.dropped == n - lengths[1]
            assert cut.stat().st_size == n  # opening removes nothing
            session.append(made[2])
            assert cut.read_bytes()[: lengths[1]] == data[: lengths[1]]
            assert same(session.load(), made[2]) == []
        assert [r["sequence"] for r in SpecReader(cut.read_bytes()).records()]


class Disk:
    """Operations on one file as `kvsnap.files` records them, and what may be on the disk when power fails."""

    def __init__(self, content: bytes) -> None:
        self.start = content
        self.entries: list[tuple[str, int, bytes]] = []

    def record(self, operation: str, _path: str, offset: int, data: bytes) -> None:
        self.entries.append((operation, offset, data))

    @staticmethod
    def apply(content: bytearray, entry: tuple[str, int, bytes]) -> None:
        operation, offset, data = entry
        if operation == "write":
            content.extend(bytes(max(0, offset - len(content))))
            content[offset : offset + len(data)] = data
        elif operation == "truncate":
            del content[offset:]

    def crashes(self, rng: np.random.Generator) -> Iterator[tuple[int, bytes]]:
        """Yield (number of syncs that returned, bytes on the disk) for crashes behind every prefix of the writes."""
        for stop in range(len(self.entries) + 1):
            synced, n_syncs = 0, 0
            for i, entry in enumerate(self.entries[:stop]):
                if entry[0] == "sync":
                    synced, n_syncs = i + 1, n_syncs + 1
            durable = bytearray(self.start)
            for entry in self.entries[:synced]:
                self.apply(durable, entry)
            loose = self.entries[synced:stop]
            for version in self.versions(loose, rng):
                content = bytearray(durable)
                for entry in version:
                    self.apply(content, entry)
                yield n_syncs, bytes(content)

    @staticmethod
    def versions(
        loose: list[tuple[str, int, bytes]], rng: np.random.Generator
    ) -> Iterator[list[tuple[str, int, bytes]]]:
        yield []
        yield loose
        for _ in range(6):  # any of them, whole or in part, in pages of their own order
            kept = []
            for operation, offset, data in loose:
                fate = rng.integers(4)
                if fate == 0:
                    continue
                if operation == "write" and fate == 1:
                    at = int(rng.integers(len(data) + 1))
                    kept.append((operation, offset, data[:at]))
                elif operation == "write" and fate == 2:
                    at = int(rng.integers(len(data) + 1))
                    kept.append((operation, offset + at, data[at:]))
                else:
                    kept.append((operation, offset, data))
            yield kept


def append_two(session: Session) -> None:
    session.append(turns(2)[-1])


def damaged_append_then_good(session: Session) -> None:
    bad = snapshot(TOKENS[:9], n_pending=1, layers=1)
    v = bad.layers[0].tensors[1]
    failing = type(v)(v.spec, FailingTensor(DamagedError("x")), start=0, n_rows=v.n_rows)
    bad = replace(bad, layers=(replace(bad.layers[0], tensors=(bad.layers[0].tensors[0], failing)),))
    with pytest.raises(DamagedError):
        session.append(bad)
    append_two(session)


OTHER = snapshot((*TOKENS[:3], 1, 2), n_pending=1)


def interrupted_behind_the_commit_then_good(session: Session) -> None:
    real = RecordWriter.commit

    def interrupted(*arguments: Any) -> Any:
        real(*arguments)
        raise KeyboardInterrupt

    with mock.patch.object(RecordWriter, "commit", interrupted), pytest.raises(KeyboardInterrupt):
        session.append(OTHER)
    append_two(session)


ACTIONS: dict[str, tuple[Callable[[Session], None], tuple[int, ...]]] = {
    "append": (append_two, (3, 6)),
    "append of q8": (lambda s: s.append(turns(2)[-1], codec="q8") and None, (3, 6)),
    "truncate": (lambda s: s.truncate(2) and None, (3, 2)),
    "reset": (lambda s: s.reset(), (3, 0)),
    "failed append, then a good one": (damaged_append_then_good, (3, 6)),
    "interrupted append, then a good one": (interrupted_behind_the_commit_then_good, (3, 5, 6)),
}


@pytest.mark.parametrize("torn", [0, 100, 640])
@pytest.mark.parametrize("action", ACTIONS)
def test_a_crash_at_any_instant_leaves_a_whole_turn(
    action: str, torn: int, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    act, lengths = ACTIONS[action]
    written(path, turns(1))
    if torn:  # what an earlier crash left: part of a turn that was never published
        other = tmp_path / "other"
        other.write_bytes(path.read_bytes())
        written(other, turns(2)[-1:])
        path.write_bytes(path.read_bytes() + other.read_bytes()[path.stat().st_size :][:torn])
    disk = Disk(path.read_bytes())
    with Session.open(path) as session:
        monkeypatch.setattr(files, "recorder", disk)
        act(session)
        monkeypatch.setattr(files, "recorder", None)
        after = session.load()
    assert len(after.tokens) == lengths[-1]
    n_syncs = sum(1 for e in disk.entries if e[0] == "sync")
    seen = set()
    for syncs, content in disk.crashes(np.random.default_rng(1)):
        loaded = native.loads(content)
        seen.add(len(loaded.tokens))
        assert len(loaded.tokens) in lengths
        if syncs == n_syncs:
            assert len(loaded.tokens) == lengths[-1]  # once append returned, the turn stays
        expected = {3: turns(1)[0], 5: OTHER}.get(len(loaded.tokens), after)
        assert same(loaded, expected) == []
    assert seen == set(lengths)


@pytest.mark.exhaustive
def test_every_flipped_bit_is_found_or_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of every byte of a session with dead records, live ones, an INDEX and several commits."""
    no_sync(monkeypatch)
    made = turns(2, vocab=4, heads=1, dim=2)
    with Session.open(path) as session:
        session.append(made[0])
        session.append(snapshot((*TOKENS[:3], 7, 8), n_pending=1, vocab=4, heads=1, dim=2))
        session.truncate(3)
        session.append(made[1])
        last, before = session.nbytes, session.history[-1].offset
    data = path.read_bytes()
    spec = SpecReader(data)
    live = {spec.commit[n] for n in ("identity", "layout", "state", "note", "index")} | {spec.commit_at}
    live |= {e["span"] for e in spec.entries()}
    live -= {0}
    spans = {r["at"]: (r["at"] + 64 + len(r["payload"]), r["end"]) for r in spec.records()}
    padding: set[int] = set()  # between the parts of live records: nothing that is read, but verify looks there
    for place in live:
        if spec.record(place)["kind"] in {SPAN, STATE}:
            ends = [p["offset"] + p["stored"] for p in spec.table(place, spec.record(place)["kind"])["parts"]]
            padding |= {place + 64 + at for end in ends for at in range(end, up(end))}
    good = native.loads(data)
    outcomes = {"error": 0, "same": 0, "older": 0}
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 1 << (at % 8)
        place = max((p for p in spans if p <= at), default=None)
        is_live = at < 128 or (place in live and at < spans[place][0] and at not in padding) or at >= last - 64
        try:
            loaded = native.loads(bytes(bad))
            found = same(loaded, good)
        except KvsnapError:
            assert is_live, at
            outcomes["error"] += 1
            if at >= 128 and at % 4 == 0:  # behind the header, verify names the damage instead of giving up
                assert not verify_bytes(bytes(bad), path).ok, at
            continue
        if found:
            # Only the last COMMIT and footer may give the commit before, and they say so.
            assert at >= before, at
            assert loaded.tokens == TOKENS[:3]
            end = native.NativeFile(native.BytesReader(bytes(bad))).end
            assert end.dropped == last - end.footer.file_length > 0
            assert at >= last - 64 or "cannot be read" in end.notes[0]
            assert verify_bytes(bytes(bad), path).notes
            outcomes["older"] += 1
        else:
            assert not is_live, at
            outcomes["same"] += 1
            assert "".join(str(d) for d in verify_bytes(bytes(bad), path).damages), at
    assert min(outcomes.values()) > 100, outcomes


def test_a_damaged_index_is_an_error_that_names_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_sync(monkeypatch)
    made = [snapshot(TOKENS[:n], vocab=0, dim=1, heads=1) for n in range(1, 41)]
    written(path, made)
    data = path.read_bytes()
    spec = SpecReader(data)
    index = spec.commit["index"]
    assert index
    length = len(spec.record(index)["payload"])
    for at in range(index, index + 64 + length):
        bad = bytearray(data)
        bad[at] ^= 1 << (at % 8)
        with pytest.raises((DamagedError, FormatError)) as caught:
            native.loads(bytes(bad))
        assert caught.value.offset in {index, index + 64}
        if at >= index + 64:
            assert "INDEX" in str(caught.value)
    path.write_bytes(bytes(bad))
    with pytest.raises(DamagedError, match="INDEX"):
        Session.open(path)
    report = verify(path)
    assert not report.ok
    assert (0, 40) in {d.tokens for d in report.damages}


def test_readers_see_whole_turns_while_a_writer_writes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_sync(monkeypatch)
    made = {n: snapshot(TOKENS[:n], layers=2) for n in range(0, 61, 2)}
    seen: list[int] = []
    failed: list[BaseException] = []
    stop = threading.Event()

    def look() -> None:
        try:
            while not stop.is_set():
                loaded = native.load(path)
                seen.append(len(loaded.tokens))
                if loaded.tokens:
                    assert same(loaded, made[len(loaded.tokens)]) == []
        except BaseException as error:  # noqa: BLE001 # told by the test itself
            failed.append(error)

    with Session.open(path) as session:
        thread = threading.Thread(target=look)
        thread.start()
        for _ in range(100):  # until the other thread had its turns
            for n in range(2, 61, 2):
                session.append(made[n])
            for n in range(58, -1, -2):
                session.truncate(n)
            if len(set(seen)) > 3:
                break
        stop.set()
        thread.join()
    assert not failed, failed
    assert len(set(seen)) > 3


def verify_bytes(data: bytes, path: Path) -> Any:
    return native.verify_file(native.NativeFile(native.BytesReader(data)))


def test_tensors_read_together_are_checked_and_in_any_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_sync(monkeypatch)
    whole = snapshot(TOKENS[:40], layers=3)
    with Session.open(path) as session:
        for n in range(4, 41, 4):
            session.append(snapshot(TOKENS[:n], layers=3, start=session.n_rows), codec="q8" if n == 20 else None)
    loaded = native.load(path)
    expected = [t.array for t in native.load(path).tensors()]
    assert not np.array_equal(expected[0], next(whole.tensors()).array)  # one turn is q8
    for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [3, 0, 5], [1]):
        for workers in (1, 2):
            tensors = list(native.load(path).tensors())
            outs = [np.empty(tensors[i].shape, np.float32) for i in order]
            read_all([(tensors[i], out) for i, out in zip(order, outs, strict=True)], workers=workers)
            for i, out in zip(order, outs, strict=True):
                assert np.array_equal(out, expected[i]), (order, workers)
    spec = SpecReader(path.read_bytes())
    data = bytearray(path.read_bytes())
    table = spec.table(spec.entries()[-1]["span"], 3)
    data[spec.entries()[-1]["span"] + 64 + table["parts"][3]["offset"] + 5] ^= 16
    path.write_bytes(data)
    tensors = list(native.load(path).tensors())
    with pytest.raises(DamagedError, match=r"layer1.v rows \[36, 40\)"):
        read_all([(t, np.empty(t.shape, np.float32)) for t in tensors], workers=1)
    assert loaded.n_rows == 40


def test_q8_and_exact_turns_in_one_session(path: Path) -> None:
    made = turns(3, heads=2, dim=8)
    with Session.open(path) as session:
        for one, codec in zip(made, ("exact", "q8", "exact"), strict=True):
            report = session.append(one, codec=codec)
            assert report.exact == (codec == "exact")
        loaded = session.load()
    content = SpecReader(path.read_bytes()).content()
    for t, whole in zip(loaded.tensors(), made[-1].tensors(), strict=True):
        assert np.array_equal(content["tensors"][t.name], t.array)
        assert np.array_equal(t.array[:, :2], whole.array[:, :2])
        assert np.array_equal(t.array[:, 5:], whole.array[:, 5:])
        error = np.abs(t.array[:, 2:5] - whole.array[:, 2:5]).max()
        assert 0 < error <= t.bound <= loaded.bound


def test_verify_does_not_judge_what_is_gone_by_the_layout_of_today(path: Path) -> None:
    written(path, turns(1), codec="q8")
    with Session.open(path) as session:
        session.reset()
        session.append(replace(snapshot((1, 2, 3, 4), heads=3, dim=8, vocab=0), logits=None), codec="q8")
    assert verify(path).damages == ()
    old = next(r["at"] for r in SpecReader(path.read_bytes()).records() if r["kind"] == SPAN)
    data = bytearray(path.read_bytes())
    data[old + 64 + SpecReader(bytes(data)).table(old, SPAN)["parts"][0]["offset"]] ^= 1
    path.write_bytes(data)
    report = verify(path)
    assert report.ok
    assert [d.live for d in report.damages] == [False]


def test_history_in_json(path: Path) -> None:
    written(path, turns(2))
    with Session.open(path, readonly=True) as session:
        rows = json.loads(json.dumps([t.to_dict() for t in session.history]))
    assert [r["operation"] for r in rows] == ["reset", "append", "append"]


def test_what_one_turn_does_not_know_nobody_knows_of_the_session(path: Path) -> None:
    known = turns(4)
    other = replace(IDENTITY, weights=(replace(IDENTITY.weights[0], digest="9" * 32),), tokenizer="")
    with Session.open(path) as session:
        session.append(known[0])
        assert session.identity == IDENTITY
        session.append(replace(known[1], identity=Identity(architecture="synthetic")))
        assert session.identity == Identity(architecture="synthetic")
        session.append(replace(known[2], identity=other))  # nothing speaks against it, but nothing for it
        assert session.identity.weights == ()
        n = session.append(known[3]).nbytes
        assert n < 4096
        assert session.load().identity == session.identity
        assert session.identity.weights == ()
        session.reset()
        session.append(known[0])
        assert session.identity == IDENTITY
    with Session.open(path, readonly=True) as session:
        assert session.identity == IDENTITY


def windowed(n: int, width: int = 4) -> Snapshot:
    """A window layer that holds the last rows only."""
    whole = snapshot(TOKENS[:n])
    first = max(0, n - width)
    tensors = tuple(
        type(t)(replace(t.spec, growth="window", window=width), t.array[:, first:], start=first)
        for t in whole.layers[0].tensors
    )
    return replace(whole, layers=(replace(whole.layers[0], tensors=tensors),))


def test_a_window_keeps_every_row_it_was_handed_until_there_is_a_gap(path: Path) -> None:
    assert same(native.loads(native.dumps(windowed(10))), windowed(10)) == []
    with Session.open(path) as session:
        for n, start in ((3, 0), (6, 0), (9, 0), (20, 16), (22, 16)):
            session.append(windowed(n))
            loaded = session.load()
            whole = snapshot(TOKENS[:n])
            for tensor, full in zip(loaded.tensors(), whole.tensors(), strict=True):
                assert (tensor.start, tensor.n_rows) == (start, n - start)
                assert np.array_equal(tensor.array, full.array[:, start:])
            head = loaded.head(0, 1)
            assert head is not None
            assert head.positions.tolist() == list(range(start, n))
        with pytest.raises(
            UnsupportedError, match=r"\(window of 4\) .* nearest reachable length is 9, and above it 19"
        ):
            session.truncate(10)
        session.truncate(9)
        assert session.load().layers[0].tensors[0].start == 0


def test_a_reset_that_forgets_the_model_takes_another_one(tmp_path: Path) -> None:
    other = snapshot((7, 8), heads=3, architecture="gpt2", identity=replace(IDENTITY, architecture="gpt2"))
    with Session.open(tmp_path / "s.kvsnap") as session:
        session.append(snapshot((1, 2, 3)))
        commit, identity = session.n_commits, session.identity
        session.reset()
        with pytest.raises(CompatibilityError):
            session.append(other)
        session.reset(any_model=True)
        assert session.identity == Identity()
        session.append(other)
        assert session.identity == other.identity
        session.rewind(commit)
        assert (session.identity, session.tokens) == (identity, (1, 2, 3))
    assert verify(tmp_path / "s.kvsnap").ok

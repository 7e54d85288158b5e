"""How far back a history can be cut: a truth table per layer kind and length, in memory and on disk, against lists.

The lists know which rows were handed over, which of them still stand, and where a state was stored.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsnap import files, repair
from kvsnap.errors import DamagedError, InputError, UnsupportedError
from kvsnap.formats import native
from kvsnap.formats.native.fork import fork_file
from kvsnap.inspection import verify
from kvsnap.layout import Snapshot, Tensor
from kvsnap.reach import Ends
from kvsnap.session import Session
from reach_model import KINDS, TOKENS, Entry, Model, run
from spec_file import SpecReader
from synthetic import layer_of, snapshot_of_kinds


def check_table(session: Session, model: Model) -> None:
    """The whole truth table of a session, of what it loads as in memory, and of the rules in words."""
    for n in range(len(model.tokens) + 1):
        model.check_reach(n, session.reach(n))
    data = Path(session.path).read_bytes()
    assert SpecReader(data, Path(session.path).parent).reachable() == [
        n for n in range(len(model.tokens) + 1) if model.can(n)
    ]


def check_memory(kinds: Sequence[str], snapshot: Snapshot) -> None:
    """The same for one snapshot in memory; what is cut holds what it should, and is saved and read again."""
    held = {t.name.split(".")[2]: frozenset(range(t.start, t.start + t.n_rows)) for t in snapshot.tensors()}
    turn = Entry(len(snapshot.tokens), snapshot.n_rows, True, held)
    model = Model(kinds, snapshot.tokens, [turn], in_memory=True)
    for n in range(len(model.tokens) + 1):
        reach = snapshot.reach(n)
        model.check_reach(n, reach)
        if not reach.reached:
            expected = f"{'.*'.join(map(re.escape, reach.limits))}; .* is {reach.n_tokens}, and above it {reach.above}"
            with pytest.raises(UnsupportedError, match=expected):
                snapshot.truncate(n)
            continue
        cut, short = snapshot.truncate(n), replace(model, turns=list(model.turns))
        short.cut(n)
        short.check(cut)
        assert cut.n_pending == n - cut.n_rows
        number = next((i for i, layer in enumerate(cut.layers) if layer.tensor("k")), 0)
        keys = cut.layers[number].tensor("k")
        assert cut.seq_len == (keys.n_rows if keys else cut.n_rows)
        if keys:
            head, every = cut.head(number, 1), range(0, cut.n_rows, keys.spec.tokens_per_row)
            assert head is not None
            assert head.positions.tolist() == list(every)[keys.start : keys.start + keys.n_rows]
            assert len(head.k) == len(head.v) == keys.n_rows
        if n:
            short.check(native.loads(native.dumps(cut)))


PLANS: dict[str, list[tuple[int, int]]] = {
    "one row": [(1, 0)],
    "one by one": [(1, 0)] * 13,
    "a first turn longer than any window": [(21, 1)],
    "a gap in the middle": [(5, 0), (17, 0), (2, 1)],
    "pending ids": [(3, 2), (0, 1), (9, 2), (4, 0)],
    "two gaps, then one by one": [(12, 0), (11, 0), (1, 0), (1, 0), (1, 0), (1, 1), (6, 0)],
    "only pending at first": [(2, 2), (5, 0)],
}


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.system, "sync", lambda *_a, **_k: None)
    monkeypatch.setattr(files, "fsync_directory", lambda *_a, **_k: None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    empty = tmp_path / "new.kvsnap"
    Session.open(empty).close()
    return empty.rename(tmp_path / f"{empty.read_bytes()[40:56].hex()}.kvsnap")  # so that it can have forks


def made(path: Path, kinds: Sequence[str], plan: Sequence[tuple[int, int]]) -> Model:
    model = Model(kinds)
    with Session.open(path) as session:
        for n_new, n_pending in plan:
            run(session, model, n_new, n_pending)
            model.check(session.load())
    return model


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_truth_table(path: Path, kind: str, plan: str) -> None:
    model = made(path, (kind,), PLANS[plan])
    with Session.open(path, readonly=True) as session:
        check_table(session, model)
        check_memory((kind,), session.load())
    check_memory((kind,), snapshot_of_kinds(TOKENS[:21], (kind,), n_pending=1))


@pytest.mark.parametrize(
    "kinds", [("window8", "window3"), ("grow", "grow4", "window8"), ("static", "recurrent", "grow4")]
)
@pytest.mark.parametrize("plan", ["a gap in the middle", "two gaps, then one by one", "pending ids"])
def test_what_comes_back_is_what_would_have_been(path: Path, kinds: tuple[str, ...], plan: str) -> None:
    """Every length: cut, loaded, forked, copied, compacted, verified, and gone on from."""
    model = made(path, kinds, PLANS[plan])
    original = path.read_bytes()
    for n in range(len(model.tokens) + 1):
        path.write_bytes(original)
        short = model.copy()
        reach_n = max(k for k in range(n + 1) if model.can(k))
        short.cut(reach_n)
        fork = Path(fork_file(str(path), n_tokens=n, nearest=True).path)
        copy = path.parent / f"copy{n}.kvsnap"
        with Session.open(path) as session:
            assert session.fork(copy, n_tokens=n, nearest=True).n_tokens == reach_n
            if n != reach_n:
                expected = f"nearest reachable length is {reach_n},"
                with pytest.raises(UnsupportedError, match=expected):
                    session.truncate(n)
                with pytest.raises(UnsupportedError, match=expected):
                    session.fork(path.parent / "no", n_tokens=n)
                with pytest.raises(UnsupportedError, match=expected):
                    fork_file(str(path), n_tokens=n)
            assert session.truncate(n, nearest=True) == reach_n
            short.check(session.load())
        for file in (path, fork, copy):
            here = short.copy()
            with Session.open(file) as session:
                here.check(session.load())
                for n_new, n_pending in ((2, 1), (13, 0)):
                    run(session, here, n_new, n_pending)
                    here.check(session.load())
                if file == copy:
                    session.compact()
                    here.check(session.load())
                if n % 5 == 0:
                    check_table(session, here)
            assert verify(file).ok


def test_a_whole_capture_of_a_window_hands_over_what_the_session_lacks(path: Path) -> None:
    """`capture()` instead of `capture(start=)`: the rows that the session has are not written again."""
    model = Model(("window8",))
    with Session.open(path) as session:
        for n_new in (5, 1, 9, 2, 30):
            run(session, model, n_new, 0, partial=False)
            model.check(session.load())
            check_table(session, model)


def test_a_partial_capture_reaches_its_rows_and_nothing(path: Path) -> None:
    partial = snapshot_of_kinds(TOKENS[:20], ("grow", "grow4"), start=9)
    assert [partial.reach(n).n_tokens for n in (20, 19, 16, 12, 11, 9, 1)] == [20, 16, 16, 12, 0, 0, 0]
    assert partial.truncate(0).row_start == 0
    assert [(t.start, t.n_rows) for t in partial.truncate(16).tensors()] == [(9, 7), (9, 7), (2, 2), (2, 2)]
    with pytest.raises(InputError, match="partial capture"):
        partial.truncate(4)
    assert "rows from 9 on" in partial.reach(4).limits[0]


def test_exact_says_whether_what_is_kept_is(path: Path) -> None:
    with Session.open(path) as session:
        session.append(snapshot_of_kinds(TOKENS[:4], ("window8",)))
        session.append(snapshot_of_kinds(TOKENS[:7], ("window8",)), codec="q8")
        session.append(snapshot_of_kinds(TOKENS[:30], ("window8",)))
        for n in range(31):
            reach = session.reach(n)
            copy = path.parent / f"{n}.kvsnap"
            session.fork(copy, n_tokens=reach.n_tokens)
            assert reach.exact == (native.load(copy).bound == 0) == (reach.n_tokens not in {5, 6, 7})
        loaded = session.load()
    assert loaded.reach(28).exact
    with Session.open(path) as session:
        session.truncate(7)
        lossy = session.load()
    assert [lossy.reach(n).exact for n in (7, 3, 0)] == [False, False, True]


def test_no_tensor_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(path, KINDS[:6], PLANS["two gaps, then one by one"])
    snapshot = native.load(path)

    def refuse(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr("kvsnap.formats.native.sources.PartSource.stored", refuse)
    monkeypatch.setattr("kvsnap.formats.native.sources.PartSource.read_into", refuse)
    with Session.open(path, readonly=True) as session:
        for n in range(session.n_tokens + 1):
            session.reach(n)
            snapshot.reach(n)
        with pytest.raises(AssertionError, match="was read"):
            _ = session.load().layers[0].tensors[0].array


def test_lengths_outside_are_refused(path: Path) -> None:
    made(path, ("grow",), [(3, 0)])
    with Session.open(path, readonly=True) as session:
        for n in (-1, 4):
            with pytest.raises(InputError, match="0 to 3"):
                session.reach(n)
            with pytest.raises(InputError, match="0 to 3"):
                session.load().reach(n)


def test_the_sentences(path: Path) -> None:
    made(path, ("grow", "window8", "window8", "grow4", "recurrent"), [(12, 0), (8, 0), (21, 1)])
    with Session.open(path, readonly=True) as session:
        assert session.reach(14).limits == (
            "layer 4: layers.4.recurrent (replaced) is stored at 12 and 20 tokens",
            "layer 1: layers.1.window8.k (window of 8) does not hold all of rows 7 to 13 any more",
            "layer 3: layers.3.grow4.k (one row for 4 positions) can be cut behind whole groups only",
        )
        assert session.reach(5).limits[0] == "layer 4: layers.4.recurrent (replaced) is stored at 12 tokens"
        assert session.reach(30).limits[1] == (
            "layer 1: layers.1.window8.k (window of 8) does not hold all of rows 23 to 29 any more"
        )
        assert session.reach(20).limits == ()


def test_no_sentence_is_said_of_a_window_that_is_whole(path: Path) -> None:
    kinds = ["window8", "recurrent"]
    with Session.open(path.parent / "alone.kvsnap") as session:
        for n in range(1, 21):
            session.append(snapshot_of_kinds(TOKENS[:n], kinds, start=session.n_rows))
        session.compact(states=2)
        reach = session.reach(12)
        assert (reach.n_tokens, reach.above) == (0, 19)
        assert reach.limits == ("layer 1: layers.1.recurrent (replaced) is stored at 19 tokens",)


def test_static_tensors_are_those_of_the_first_turn(path: Path) -> None:
    def other(n: int, change: float, n_rows: int = 3) -> Snapshot:
        snapshot = snapshot_of_kinds(TOKENS[:n], ("grow", "static"))
        (cross,) = snapshot.layers[1].tensors
        values = cross.array[:, :n_rows] + np.float32(change)
        return replace(
            snapshot, layers=(snapshot.layers[0], replace(snapshot.layers[1], tensors=(Tensor(cross.spec, values),)))
        )

    with Session.open(path) as session:
        session.append(other(3, 0.0))
        session.append(other(5, 0.0))
        for wrong in (other(7, 1e-3), other(7, 0.0, n_rows=2)):
            with pytest.raises(InputError, match=r"another layers\.1\.static"):
                session.append(wrong)
        session.truncate(0)
        session.append(other(7, 1e-3))
        assert np.array_equal(session.load().layers[1].tensors[0].array, other(7, 1e-3).layers[1].tensors[0].array)
    with Session.open(Path(fork_file(str(path)).path)) as fork:
        with pytest.raises(InputError, match=r"another layers\.1\.static"):
            fork.append(other(9, 0.0))
        fork.append(other(9, 1e-3))


STATES = ("grow", "recurrent", "buffer")


@pytest.mark.parametrize("kinds", [STATES, ("grow", "window8")])
def test_compacting_can_leave_the_states_of_earlier_turns(path: Path, kinds: tuple[str, ...]) -> None:
    """States of the last two turns stay; what was in the others is gone, and the lengths that need it."""
    copy = path.parent / "copy.kvsnap"
    model = made(path, kinds, [(4, 0), (3, 1), (5, 0), (2, 0), (1, 0)])
    with Session.open(path) as session:
        session.fork(copy)
    with Session.open(copy) as session:
        with pytest.raises(InputError, match="always kept"):
            session.compact(states=0)
        full = session.compact().nbytes
        assert session.compact(states=5).nbytes == full
        assert session.compact(states=2).nbytes < full
        for turn in model.turns[:-2]:
            turn.state = False
        check_table(session, model)
        model.check(session.load())
        assert session.load().logits is not None
        if kinds == STATES:
            assert [session.reach(n).n_tokens for n in (4, 13, 14, 15)] == [0, 0, 14, 15]
            for call in (session.rewind, lambda commit: session.fork(path.parent / "no", commit=commit)):
                with pytest.raises(UnsupportedError, match=r"commit 2 is not stored .* nearest reachable length is 0"):
                    call(2)
            assert session.fork(path.parent / "fourth", commit=4).n_tokens == 14
        else:
            assert session.fork(path.parent / "second", commit=2).n_tokens == 7
        for n in (14, 12):
            short = model.copy()
            short.cut(max(k for k in range(n + 1) if short.can(k)))
            assert session.truncate(n, nearest=True) == len(short.tokens)
            short.check(session.load())
            run(session, short, 3, 0)
            short.check(session.load())
            session.rewind(5)
    assert verify(copy).ok


def test_an_end_whose_state_was_left_out_is_not_taken_for_whole(tmp_path: Path) -> None:
    """The last commit of a compacted file is damaged, and the turn before it has no state any more."""
    path, damaged = tmp_path / "a.kvsnap", tmp_path / "damaged.kvsnap"
    with Session.open(path) as session:
        for n in (4, 8, 13):
            session.append(snapshot_of_kinds(TOKENS[:n], STATES, start=session.n_rows))
    whole = bytearray(path.read_bytes())
    with Session.open(path) as session:
        session.compact(states=1)
    for raw, nearest in ((bytearray(path.read_bytes()), 0), (whole, 8)):
        raw[-100] ^= 1
        damaged.write_bytes(raw)
        with Session.open(damaged) as session:
            assert session.n_tokens == 8
            assert session.tokens == TOKENS[:8]
            reach = session.reach(8)
            assert (reach.n_tokens, reach.reached) == (nearest, nearest == 8)
            out = tmp_path / f"{nearest}.kvsnap"
            if nearest:  # the control: with its state it comes back, and can be copied and repaired
                assert session.load().n_rows == 8
                session.fork(out)
                assert repair(damaged, tmp_path / "repaired.kvsnap").n_tokens == 8
                continue
            for call in (session.load, lambda: native.load(damaged), partial(session.fork, out)):
                with pytest.raises(UnsupportedError, match=r"commit 2 is not stored .* nearest reachable length is 0"):
                    call()
            with pytest.raises(DamagedError, match=r"state at the end is not stored, .* 8 ids can be kept"):
                repair(damaged, out)
            report = repair(damaged, out, keep_tokens=True)
            assert (report.n_tokens, report.n_rows, report.complete) == (8, 0, False)
            assert native.load(out).pending == TOKENS[:8]
            assert session.truncate(8, nearest=True) == 0
            assert session.load().tokens == ()


def test_the_next_position_of_an_earlier_turn_is_never_left_out(path: Path) -> None:
    """Positions that jump at the end of a turn (several axes of rope) are known to its STATE alone."""
    copy = path.parent / "copy.kvsnap"
    with Session.open(path) as session:
        session.append(replace(snapshot_of_kinds(TOKENS[:4], ("grow",)), token_offset=9))
        session.append(snapshot_of_kinds(TOKENS[:6], ("grow",)))
        session.append(snapshot_of_kinds(TOKENS[:8], ("grow",)))
        session.fork(copy)
    with Session.open(copy) as session:
        session.compact(states=1)
        session.truncate(6)
        assert session.load().logits is None
        session.truncate(4)
        assert session.load().token_offset == 9


def test_repair_goes_back_to_a_turn_whose_state_is_there(path: Path) -> None:
    copy, mended = path.parent / "copy.kvsnap", path.parent / "mended.kvsnap"
    model = made(path, STATES, [(4, 0), (3, 1), (5, 0), (2, 0), (1, 0)])
    with Session.open(path) as session:
        session.fork(copy)
    with Session.open(copy) as session:
        session.compact(states=2)
    whole = copy.read_bytes()
    assert repair(copy, mended).complete
    with Session.open(mended, create=False) as session:
        assert [session.reach(n).n_tokens for n in (13, 14, 15)] == [0, 14, 15]
        model.check(session.load())
    spans = [r for r in SpecReader(whole).records() if r["kind"] == 3]
    for broken, left in ((4, 14), (3, None), (1, None)):
        data = bytearray(whole)
        record = spans[broken]
        data[record["at"] + 63 + len(record["stored"])] ^= 1
        copy.write_bytes(data)
        mended.unlink()
        if left is None:
            expected = "the turn behind token 12 .* no state .* before" if broken == 3 else "the turn behind token 4 "
            with pytest.raises(DamagedError, match=expected):
                repair(copy, mended)
            mended.write_bytes(b"")
            continue
        report = repair(copy, mended)
        assert not report.complete
        assert "layers.0.grow.v" in str(report.lost[0])
        short = model.copy()
        short.cut(left)
        short.check(native.load(mended))


# -- generated histories -----------------------------------------------------------------------------------------

TURNS = st.tuples(st.integers(0, 12), st.integers(0, 2), st.booleans())
CUTS = st.integers(0, 30)


@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True),
    steps=st.lists(TURNS | CUTS, min_size=1, max_size=9),
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
def test_generated_histories(kinds: list[str], steps: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, model = Path(folder) / "a.kvsnap", Model(kinds)
        with Session.open(path) as session:
            for step in steps:
                if isinstance(step, int):
                    n = min(step, len(model.tokens))
                    left = session.truncate(n, nearest=True)
                    model.cut(left)
                else:
                    run(session, model, step[0], step[1], partial=step[2])
                model.check(session.load())
            check_table(session, model)
            if model.tokens:
                check_memory(kinds, session.load())


# -- negative controls -------------------------------------------------------------------------------------------


def held_longer() -> Snapshot:
    """A window of 8 that holds 12 rows, as an engine may: good from 16 rows on."""
    layer = layer_of("window8", 0, TOKENS, 21, 9, every_row=True)
    return replace(snapshot_of_kinds(TOKENS[:21], ()), layers=(layer,))


def test_a_window_that_holds_more_reaches_further_back(path: Path) -> None:
    snapshot = held_longer()
    check_memory(("window8",), snapshot)
    assert [snapshot.reach(n).n_tokens for n in (15, 16, 20)] == [0, 16, 20]
    with Session.open(path) as session:
        session.append(snapshot)
        assert [session.reach(n).n_tokens for n in (15, 16, 20)] == [0, 16, 20]


@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_that_is_off_by_one_is_noticed(monkeypatch: pytest.MonkeyPatch, off: int) -> None:
    least = Ends._least
    monkeypatch.setattr(Ends, "_least", lambda self, i, spec: least(self, i, spec) + off)
    with pytest.raises(AssertionError):
        check_memory(("window8",), held_longer())


def test_a_gap_that_is_ignored_is_noticed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ends, "_run", lambda *_: 0)
    model = made(path, ("window8", "grow"), PLANS["a gap in the middle"])
    with Session.open(path, readonly=True) as session, pytest.raises(AssertionError):
        check_table(session, model)


def test_a_group_that_is_cut_is_noticed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsnap.reach.math.lcm", lambda *_: 1)
    model = made(path, ("grow4",), [(10, 0)])
    with Session.open(path, readonly=True) as session, pytest.raises(AssertionError):
        check_table(session, model)


def test_rows_that_are_moved_by_one_are_noticed(path: Path) -> None:
    model = made(path, ("window8",), [(21, 0)])
    loaded = native.load(path)
    layer = loaded.layers[0]
    moved = tuple(Tensor(t.spec, np.roll(t.array, 1, axis=1), start=t.start) for t in layer.tensors)
    with pytest.raises(AssertionError):
        model.check(replace(loaded, layers=(replace(layer, tensors=moved),)))

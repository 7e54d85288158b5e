"""Sessions against lists: whatever is done to them, they hold what the lists hold, in this process and in the next.

One machine works on one file; the other one on a directory of sessions, forks, forks of forks and copies.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsnap import files
from kvsnap.errors import InputError, UnsupportedError
from kvsnap.formats import native
from kvsnap.formats.native.fork import fork_file
from kvsnap.inspection import verify
from kvsnap.layout import SamplerState, Snapshot
from kvsnap.session import Session
from reach_model import KINDS, Model, run
from spec_file import SpecReader
from synthetic import SAMPLER, rows, same, snapshot

pytestmark = pytest.mark.exhaustive

End = tuple[int, int, "Snapshot | None"]
"""Tokens and rows at the end of a turn, and the snapshot whose state it ended with; None for a cut."""

SHAPE: dict[str, Any] = {"layers": 2, "heads": 2, "dim": 3, "vocab": 5}


def cut_ends(ends: Sequence[End], n: int) -> list[End]:
    """The ends of the turns that still stand behind a cut to `n` tokens, the last one perhaps cut itself."""
    whole = [end for end in ends if end[0] <= n] if n else []
    if n and (not whole or whole[-1][0] < n):
        # A turn is cut: the rows it had of these tokens stay. Rows that a later turn evaluated do not.
        cut = next(end for end in ends if end[0] > n)
        whole.append((n, min(n, cut[1]), None))
    return whole


def standing(ends: Sequence[End]) -> Sequence[End]:
    """The ends of the turns that a new one goes on from: turns that hold nothing at all are left out."""
    return ends if ends and ends[-1][:2] != (0, 0) else ()


@dataclass(frozen=True)
class State:
    """What a session holds after one of its commits; `complete` None where no one says so."""

    tokens: tuple[int, ...] = ()
    n_rows: int = 0
    codecs: tuple[str, ...] = ()
    ends: tuple[End, ...] = ()
    complete: bool | None = True

    def cut(self, n: int) -> State:
        """What a cut to `n` tokens leaves."""
        if n == len(self.tokens):
            return self
        ends = tuple(cut_ends(self.ends, n))
        n_rows = ends[-1][1] if ends else 0
        return State(self.tokens[:n], n_rows, self.codecs[:n_rows], ends)

    def turns(self) -> list[State]:
        """What the commits of a file hold that was written anew from this: one for each turn."""
        found = [
            State(self.tokens[: end[0]], end[1], self.codecs[: end[1]], self.ends[: i + 1], None)
            for i, end in enumerate(self.ends)
        ]
        return [*found[:-1], self]

    def check(self, loaded: Snapshot) -> None:
        """What was read must be this."""
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
        assert loaded.sampler == (made.sampler if made else None)
        wanted = made.logits if made else None
        assert (loaded.logits is None) == (wanted is None)
        if wanted is not None and loaded.logits is not None:
            assert loaded.logits.array.tobytes() == wanted.array.tobytes()


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
        self.ends = [*standing(self.ends), (len(tokens), made.n_rows, made)]
        self.n_commits, self.torn = self.n_commits + 1, 0
        self.kept = complete

    @rule(data=st.data(), more=st.lists(st.integers(0, 2**31 - 1), max_size=5), partial=st.booleans())
    def append_in_place_of_the_end(self, data: st.DataObject, more: list[int], partial: bool) -> None:
        n = data.draw(st.integers(0, len(self.tokens)))
        ends = list(self.ends) if n == len(self.tokens) else cut_ends(self.ends, n)
        n_rows = ends[-1][1] if ends else 0
        tokens = (*self.tokens[:n], *more)
        made = snapshot(tokens, start=n_rows if partial else 0, **SHAPE)
        self.session.append(made, after=n)
        self.codecs = [*self.codecs[:n_rows], *["exact"] * (made.n_rows - n_rows)]
        self.tokens, self.n_rows = tokens, made.n_rows
        self.ends = [*standing(ends), (len(tokens), made.n_rows, made)]
        self.n_commits, self.torn = self.n_commits + 1, 0
        self.kept = True

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, len(self.tokens)))
        if n == len(self.tokens):
            assert self.session.truncate(n) == n
            return
        self.session.truncate(n)
        self.ends = cut_ends(self.ends, n)
        self.n_rows = self.ends[-1][1] if self.ends else 0
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
        State(self.tokens, self.n_rows, tuple(self.codecs), tuple(self.ends)).check(loaded)

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


class Operations:
    """A recorder: every write and cut of one file, and an interrupt at an operation of any file when asked for."""

    def __init__(self, path: Path, stop: int = 0) -> None:
        self.path, self.stop = str(path), stop
        self.done: list[tuple[str, int, bytes]] = []
        self.names: list[str] = []

    def record(self, operation: str, path: str, offset: int, data: bytes) -> None:
        self.names.append(operation)
        if path == self.path and operation in {"write", "truncate"}:
            self.done.append((operation, offset, bytes(data)))
        if len(self.names) == self.stop:
            raise KeyboardInterrupt

    def __enter__(self) -> Operations:  # noqa: PYI034
        files.recorder = self
        return self

    def __exit__(self, *_: object) -> None:
        files.recorder = None


def replayed(before: bytes, done: Sequence[tuple[str, int, bytes]]) -> bytes:
    data = bytearray(before)
    for operation, offset, written in done:
        if operation == "truncate":
            del data[offset:]
        else:
            data[len(data) : offset] = bytes(max(0, offset - len(data)))
            data[offset : offset + len(written)] = written
    return bytes(data)


@dataclass
class Line:
    """One file: its session, and what it held after each of its commits. In a library its name is its id."""

    path: Path
    session: Session
    states: list[State]
    in_library: bool

    @property
    def now(self) -> State:
        return self.states[-1]


class ForkMachine(RuleBasedStateMachine):
    """A directory of sessions: each of them is a list, whatever happens to its parents and its children."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.folder = Path(self.directory.name)
        self.lines: list[Line] = []
        self.count = 0

    def free(self) -> Path:
        self.count += 1
        return self.folder / f"line{self.count}.kvsnap"

    @initialize()
    def start(self) -> None:
        path = self.free()
        Session.open(path).close()
        path = path.rename(path.with_name(f"{path.read_bytes()[40:56].hex()}.kvsnap"))
        self.lines.append(Line(path, Session.open(path), [State()], in_library=True))

    def line(self, data: st.DataObject, *, in_library: bool | None = None) -> Line | None:
        found = [i for i in self.lines if in_library is None or i.in_library == in_library]
        return data.draw(st.sampled_from(found)) if found else None

    def origin(self, data: st.DataObject, line: Line) -> tuple[dict[str, int], State]:
        """Where a fork or a copy starts: the options that say so, and what it holds."""
        options: dict[str, int] = {}
        state = line.now
        if data.draw(st.booleans()):
            options["commit"] = data.draw(st.integers(1, len(line.states)))
            state = line.states[options["commit"] - 1]
        if data.draw(st.booleans()):
            options["n_tokens"] = data.draw(st.integers(0, len(state.tokens)))
            state = state.cut(options["n_tokens"])
        return options, state

    def change(self, data: st.DataObject, line: Line) -> tuple[Callable[[], object], State]:
        """One change of a session, to be called, and what it holds then."""
        now = line.now
        what = data.draw(st.sampled_from(["append", "append", "append", "instead", "truncate", "reset", "rewind"]))
        if what == "rewind":
            commit = data.draw(st.integers(1, len(line.states)))
            return lambda: line.session.rewind(commit), line.states[commit - 1]
        if what == "truncate" and now.tokens:
            n = data.draw(st.integers(0, len(now.tokens) - 1))
            return lambda: line.session.truncate(n), now.cut(n)
        if what == "reset":
            return line.session.reset, State()
        after = data.draw(st.integers(0, len(now.tokens))) if what == "instead" else None
        now = now if after is None else now.cut(after)
        tokens = (*now.tokens, *data.draw(st.lists(st.integers(0, 2**31 - 1), max_size=4)))
        pending = min(data.draw(st.integers(0, 2)), len(tokens) - now.n_rows)
        codec, complete = data.draw(st.sampled_from(["exact", "q8"])), data.draw(st.booleans())
        made = snapshot(tokens, n_pending=pending, start=now.n_rows, **SHAPE)
        then = State(
            tokens,
            made.n_rows,
            (*now.codecs, *[codec] * (made.n_rows - now.n_rows)),
            (*standing(now.ends), (len(tokens), made.n_rows, made)),
            complete,
        )
        return lambda: line.session.append(made, after=after, codec=codec, complete=complete), then

    # -- what is done

    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        line = self.line(data)
        assert line is not None
        call, then = self.change(data, line)
        call()
        line.states.append(then)

    @rule(data=st.data(), torn=st.booleans())
    def crash_while_it_goes_on(self, data: st.DataObject, torn: bool) -> None:
        """The file holds what had reached it at some instant; it opens at the old state or the new one."""
        line = self.line(data)
        assert line is not None
        before = line.path.read_bytes()
        call, then = self.change(data, line)
        with Operations(line.path) as operations:
            call()
        line.session.close()
        done = operations.done
        last = data.draw(st.integers(0, len(done)))
        reached = list(done[:last])
        if torn and last < len(done) and done[last][0] == "write":
            operation, offset, written = done[last]
            reached.append((operation, offset, written[: data.draw(st.integers(0, len(written) - 1))]))
        line.path.write_bytes(replayed(before, reached))
        line.session = Session.open(line.path)
        if last == len(done):
            assert line.session.dropped == 0
            line.states.append(then)

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        line = self.line(data, in_library=True)
        assert line is not None
        options, state = self.origin(data, line)
        path = Path(fork_file(str(line.path), **options).path)
        self.lines.append(Line(path, Session.open(path), [state], in_library=True))

    @rule(data=st.data(), stop=st.integers(1, 12))
    def interrupted_fork(self, data: st.DataObject, stop: int) -> None:
        line = self.line(data, in_library=True)
        assert line is not None
        options, state = self.origin(data, line)
        before = set(self.folder.iterdir())
        with Operations(line.path, stop) as operations:
            try:
                fork_file(str(line.path), **options)
            except KeyboardInterrupt:
                assert "rename" not in operations.names or set(self.folder.iterdir()) - before
        new = set(self.folder.iterdir()) - before
        assert len(new) == ("rename" in operations.names)
        for path in new:  # whole, or not there
            assert path.name == f"{path.read_bytes()[40:56].hex()}.kvsnap"
            self.lines.append(Line(path, Session.open(path), [state], in_library=True))

    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        line, path = self.line(data), self.free()
        assert line is not None
        options, state = self.origin(data, line)
        line.session.fork(path, **options)
        self.lines.append(Line(path, Session.open(path), state.turns(), in_library=False))

    @rule(data=st.data())
    def copy_as_a_file(self, data: st.DataObject) -> None:
        """Under another name nobody needs it, also when it is a fork."""
        line = self.line(data)
        assert line is not None
        path = Path(shutil.copy(line.path, self.free()))
        self.lines.append(Line(path, Session.open(path), list(line.states), in_library=False))

    @rule(data=st.data(), stop=st.integers(0, 30))
    def compact(self, data: st.DataObject, stop: int) -> None:
        line = self.line(data, in_library=False)
        if line is None:
            return
        with Operations(line.path, stop) as operations:
            try:
                line.session.compact()
            except KeyboardInterrupt:
                assert stop
        if "rename" in operations.names:
            line.states = line.now.turns()

    @rule(data=st.data())
    def refuse_to_compact_what_forks_need(self, data: st.DataObject) -> None:
        line = self.line(data, in_library=True)
        assert line is not None
        with pytest.raises(InputError, match="library"):
            line.session.compact()

    @rule(data=st.data())
    def reopen(self, data: st.DataObject) -> None:
        line = self.line(data)
        assert line is not None
        line.session.close()
        line.session = Session.open(line.path)

    @rule(data=st.data())
    def verify_and_read_with_the_spec(self, data: st.DataObject) -> None:
        line = self.line(data)
        assert line is not None
        if line.session.dropped:
            return
        report = verify(line.path)
        assert report.damages == ()
        reader = SpecReader(line.path.read_bytes(), self.folder)
        reader.records()
        content = reader.content()
        assert content["ids"] == list(line.now.tokens)
        assert len(reader.history()) == report.n_commits == len(line.states)

    # -- what holds

    @invariant()
    def every_line_is_its_list(self) -> None:
        for line in self.lines:
            session, now = line.session, line.now
            assert session.tokens == now.tokens
            assert (session.n_rows, session.n_pending) == (now.n_rows, len(now.tokens) - now.n_rows)
            assert session.n_commits == len(line.states)
            assert now.complete is None or session.complete == now.complete
            now.check(native.load(line.path))
        assert not [path for path in self.folder.iterdir() if path.suffix != ".kvsnap"]

    def teardown(self) -> None:
        for line in self.lines:
            line.session.close()
        self.directory.cleanup()


@dataclass
class KindLine:
    """One file with layers of many kinds: what it held after each of its commits, and what was left out of it since."""

    path: Path
    session: Session
    states: list[Model]
    in_library: bool


class KindMachine(RuleBasedStateMachine):
    """Windows, groups of positions, states and static tensors under everything that is done to files and forks."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.folder = Path(self.directory.name)
        self.lines: list[KindLine] = []

    @initialize(kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True))
    def start(self, kinds: list[str]) -> None:
        path = self.folder / "first.kvsnap"
        Session.open(path).close()
        path = path.rename(path.with_name(f"{path.read_bytes()[40:56].hex()}.kvsnap"))
        self.lines.append(KindLine(path, Session.open(path), [Model(kinds)], in_library=True))

    def line(self, data: st.DataObject, *, in_library: bool | None = None) -> KindLine | None:
        found = [i for i in self.lines if in_library is None or i.in_library == in_library]
        return data.draw(st.sampled_from(found)) if found else None

    def add(self, path: Path, states: list[Model], *, in_library: bool) -> None:
        self.lines.append(KindLine(path, Session.open(path), states, in_library))

    @rule(data=st.data(), n_new=st.integers(0, 12), n_pending=st.integers(0, 2), partial=st.booleans())
    def append(self, data: st.DataObject, n_new: int, n_pending: int, partial: bool) -> None:
        line = self.line(data)
        assert line is not None
        model = line.states[-1].copy()
        run(line.session, model, n_new, n_pending, partial=partial)
        line.states.append(model)

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        line = self.line(data)
        assert line is not None
        model = line.states[-1].copy()
        n = data.draw(st.integers(0, len(model.tokens)))
        if n == len(model.tokens):
            return
        if not model.can(n):
            with pytest.raises(UnsupportedError, match="nearest reachable length"):
                line.session.truncate(n)
        model.cut(line.session.truncate(n, nearest=True))
        line.states.append(model)

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        line = self.line(data)
        assert line is not None
        commit = data.draw(st.integers(1, len(line.states)))
        model = line.states[commit - 1]
        if model.is_stateless:
            with pytest.raises(UnsupportedError, match="not stored any more"):
                line.session.rewind(commit)
            return
        line.session.rewind(commit)
        line.states.append(model.copy())

    @rule(data=st.data(), copy=st.booleans())
    def fork(self, data: st.DataObject, copy: bool) -> None:
        line = self.line(data, in_library=None if copy else True)
        assert line is not None
        commit = data.draw(st.integers(1, len(line.states)))
        model = line.states[commit - 1].copy()
        n = data.draw(st.integers(0, len(model.tokens)))
        if n == len(model.tokens) and model.is_stateless:
            return
        left = max(k for k in range(n + 1) if model.can(k))
        model.cut(left)
        if copy:
            path = self.folder / f"copy{len(self.lines)}.kvsnap"
            assert line.session.fork(path, commit=commit, n_tokens=n, nearest=True).n_tokens == left
            self.add(path, model.commits(), in_library=False)
        else:
            made = fork_file(str(line.path), commit=commit, n_tokens=n, nearest=True)
            assert made.n_tokens == left
            self.add(Path(made.path), [model], in_library=True)

    @rule(data=st.data(), states=st.none() | st.integers(1, 3))
    def compact(self, data: st.DataObject, states: int | None) -> None:
        line = self.line(data, in_library=False)
        if line is None:
            return
        line.session.compact(states=states)
        model = line.states[-1].copy()
        for turn in model.turns[: -states if states else 0]:
            turn.state = False
        line.states = model.commits()

    @rule(data=st.data())
    def reopen(self, data: st.DataObject) -> None:
        line = self.line(data)
        assert line is not None
        line.session.close()
        line.session = Session.open(line.path)

    @rule(data=st.data())
    def verify_and_read_with_the_spec(self, data: st.DataObject) -> None:
        line = self.line(data)
        assert line is not None
        model = line.states[-1]
        assert verify(line.path).damages == ()
        reader = SpecReader(line.path.read_bytes(), self.folder)
        reader.records()
        content = reader.content()
        assert content["ids"] == list(model.tokens)
        for tensor in line.session.load().tensors():
            if tensor.nbytes:
                assert content["tensors"][tensor.name].tobytes() == tensor.array.tobytes()
            assert content["starts"].get(tensor.name, tensor.start) == tensor.start
        assert reader.reachable() == [n for n in range(len(model.tokens) + 1) if model.can(n)]

    @invariant()
    def every_line_is_its_list(self) -> None:
        for line in self.lines:
            model = line.states[-1]
            assert line.session.tokens == model.tokens
            assert line.session.n_commits == len(line.states)
            model.check(line.session.load())
            n = len(model.tokens) // 2
            model.check_reach(n, line.session.reach(n))

    def teardown(self) -> None:
        for line in self.lines:
            line.session.close()
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


class TestForks(ForkMachine.TestCase):  # type: ignore[misc] # made at run time
    settings = settings(
        max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


class TestKinds(KindMachine.TestCase):  # type: ignore[misc] # made at run time
    settings = settings(
        max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )

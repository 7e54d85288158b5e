"""Forks: sessions whose history starts in another file. Spec section 19."""

from __future__ import annotations

import gc
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsnap import files, repair
from kvsnap.errors import (
    CompatibilityError,
    DamagedError,
    FormatError,
    InputError,
    KvsnapError,
    MissingError,
    UnsupportedError,
    VersionError,
)
from kvsnap.formats import native
from kvsnap.formats.native.fork import fork_file
from kvsnap.inspection import summarise, verify
from kvsnap.layout import Layer, PositionRun, Snapshot, Tensor
from kvsnap.session import Session
from spec_file import SPAN, MinimalFork, SpecReader, SpecWriter, chain
from synthetic import IDENTITY, SAMPLER, rows, same, snapshot, spec

TOKENS = tuple(range(100, 400))
SHAPE: dict[str, Any] = {"layers": 2, "heads": 2, "dim": 3, "vocab": 5}


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.system, "sync", lambda *_a, **_k: None)
    monkeypatch.setattr(files, "fsync_directory", lambda *_a, **_k: None)


def turn(i: int, **options: Any) -> Snapshot:
    """The history behind turn `i` (from 1): three tokens each, the last one pending; positions jump with each turn."""
    n, runs = 3 * i, []
    for j in range(1, i + 1):
        first = 3 * (j - 1) - (j > 1)
        runs.append(PositionRun(first + 10 * j, 3 * j - 1 - first))
    fields: dict[str, Any] = {
        "n_pending": 1, "positions": tuple(runs), "token_offset": 1000 + i, "text": "ab" * i,
        "sampler": replace(SAMPLER, random=replace(SAMPLER.random, draws=i)), "metadata": {"turn": "last"},
    }  # fmt: skip
    return snapshot(TOKENS[:n], **(SHAPE | fields | options))


def named(path: Path) -> Path:
    """Give a file the name of its id."""
    return path.rename(path.with_name(f"{path.read_bytes()[40:56].hex()}.kvsnap"))


def started(folder: Path, made: list[Snapshot], **options: Any) -> Path:
    path = folder / "new.kvsnap"
    with Session.open(path) as session:
        for one in made:
            session.append(one, **options)
    return named(path)


def forked(path: Path, **options: Any) -> Path:
    return Path(fork_file(str(path), **options).path)


def prefix(made: list[Snapshot], n: int) -> Snapshot:
    """What the first `n` tokens of turns of three tokens are: whole turns, or a cut one without its state."""
    if n % 3 == 0:
        return made[n // 3 - 1] if n else snapshot((), **(SHAPE | {"metadata": made[-1].metadata, "text": None}))
    runs, left = [], n
    for run in made[n // 3].positions:
        runs.append(replace(run, count=min(run.count, left)))
        left -= runs[-1].count
    runs = [run for run in runs if run.count]
    whole = n == made[n // 3].n_rows  # only an id that is not evaluated goes: what comes next stays
    end = made[n // 3].token_offset if whole else runs[-1].start + runs[-1].count
    fields = {"positions": tuple(runs), "token_offset": end, "metadata": made[-1].metadata}
    return snapshot(TOKENS[:n], **(SHAPE | {"vocab": 0} | fields))


def check(path: Path, expected: Snapshot) -> None:
    """The content of a file, read by the code in three ways and by the reader made from the spec."""
    with Session.open(path, readonly=True) as session:
        assert same(session.load(), expected) == []
        assert session.tokens == expected.tokens
    assert same(native.load(path), expected) == []
    report = verify(path)
    assert report.ok, [str(d) for d in report.damages]
    assert report.damages == ()
    assert summarise(path).n_tokens == len(expected.tokens)
    reader = SpecReader(path.read_bytes(), path.parent)
    reader.records()
    reader.history()
    content = reader.content()
    assert content["ids"] == list(expected.tokens)
    assert content["positions"] == [p.start + i for p in expected.positions for i in range(p.count)]
    for tensor in expected.tensors():
        found = content["tensors"].get(tensor.name)
        assert (b"" if found is None else found.tobytes()) == tensor.array.tobytes()
    logits = None if expected.logits is None else expected.logits.array.tobytes()
    assert (None if content["logits"] is None else content["logits"].tobytes()) == logits
    assert content["metadata"] == expected.metadata
    assert (content["random"] or {}).get("draws") == (expected.sampler and expected.sampler.random.draws)


MADE = [turn(i) for i in range(1, 6)]


# -- what a fork holds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(16))
def test_a_fork_holds_the_first_tokens_of_its_parent_bit_by_bit(tmp_path: Path, n: int) -> None:
    path = started(tmp_path, MADE)
    before = path.read_bytes()
    report = fork_file(str(path), n_tokens=n)
    check(Path(report.path), prefix(MADE, n))
    assert (report.n_tokens, report.depth, report.parent) == (n, 1, path.stem)
    assert report.nbytes == Path(report.path).stat().st_size < 1024
    assert path.read_bytes() == before
    assert same(native.load(report.path), prefix(MADE, (n + 1) % 16)) != []  # the control


def test_a_fork_of_everything_holds_everything_and_is_complete_as_its_parent(tmp_path: Path) -> None:
    path = started(tmp_path, MADE[:4])
    with Session.open(path) as session:
        session.append(MADE[4], complete=False)
    with Session.open(forked(path)) as session:
        assert same(session.load(), MADE[4]) == []
        assert not session.complete
        assert [t.operation for t in session.history] == ["fork"]
        assert session.n_pending == 1
    with Session.open(forked(path, commit=5)) as session:
        assert session.complete


@pytest.mark.parametrize("commit", range(1, 9))
def test_a_fork_of_an_earlier_commit_holds_what_that_commit_did(tmp_path: Path, commit: int) -> None:
    path = started(tmp_path, MADE[:3])
    with Session.open(path) as session:
        session.truncate(4)  # commit 5
        session.reset()
        session.append(MADE[0])
        session.append(MADE[1])
    wanted = [prefix(MADE, 0), MADE[0], MADE[1], MADE[2], prefix(MADE, 4), prefix(MADE, 0), MADE[0], MADE[1]]
    expected = wanted[commit - 1]
    if commit == 1:
        expected = Snapshot(architecture="", layers=(), tokens=(), runs=(), n_rows=0)
        assert native.load(forked(path, commit=1)).tokens == ()
        return
    check(forked(path, commit=commit), expected)
    if len(expected.tokens) > 2:
        check(forked(path, commit=commit, n_tokens=2), prefix(MADE, 2))


def test_no_such_commit_and_no_such_length(tmp_path: Path) -> None:
    path = started(tmp_path, MADE[:2])
    before = sorted(tmp_path.iterdir())
    for commit in (0, 4, -1):
        with pytest.raises(MissingError, match="no such commit"):
            fork_file(str(path), commit=commit)
    for n in (-1, 7):
        with pytest.raises(InputError, match="no such length"):
            fork_file(str(path), n_tokens=n)
    with pytest.raises(InputError, match="no such length"):
        fork_file(str(path), n_tokens=4, commit=2)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("n", [0, 1, 3, 5, 6, 8, 9])
def test_a_fork_goes_on_and_back_into_its_parent(tmp_path: Path, n: int) -> None:
    path = started(tmp_path, MADE[:2])
    fork = forked(path)
    with Session.open(fork) as session:
        session.append(MADE[2])
        session.append(MADE[3])
        assert same(session.load(), MADE[3]) == []
    check(fork, MADE[3])
    with Session.open(fork) as session:
        session.truncate(n)
        assert session.n_tokens == n
        assert same(session.load(), prefix(MADE[:4], n)) == []
    check(fork, prefix(MADE[:4], n))
    with Session.open(fork) as session:
        session.append(MADE[3])
        session.append(MADE[4])
        assert [t.operation for t in session.history][:2] == ["fork", "append"]
    with Session.open(fork) as session:
        assert session.tokens == MADE[4].tokens
        loaded = session.load()
    assert same(replace(loaded, text=None), replace(MADE[4], text=None)) == []
    check(path, MADE[1])


def test_back_twice_into_the_parent_and_to_nothing(tmp_path: Path) -> None:
    path = started(tmp_path, MADE[:4])
    fork = forked(path)
    with Session.open(fork) as session:
        for n in (11, 8, 7, 6, 2):
            session.truncate(n)
            check(fork, prefix(MADE[:4], n))
        session.reset()
        check(fork, prefix(MADE[:4], 0))
        session.append(snapshot((9, 8), **SHAPE))  # another history altogether
        assert session.tokens == (9, 8)
    assert native.load(fork).tokens == (9, 8)
    check(path, MADE[3])


def test_a_fork_that_was_reset_may_become_one_of_another_model(tmp_path: Path) -> None:
    path = started(tmp_path, MADE[:2])
    fork = forked(path)
    other = snapshot((1, 2, 3), identity=replace(IDENTITY, architecture="other"), architecture="other", dim=7)
    with Session.open(fork) as session:
        with pytest.raises(CompatibilityError):
            session.append(replace(turn(3), identity=other.identity))
        with pytest.raises(CompatibilityError, match="shaped otherwise"):
            session.append(snapshot(TOKENS[:9], n_pending=1, **(SHAPE | {"dim": 7})))
        assert same(session.load(), MADE[1]) == []
        session.reset()
        session.append(snapshot((1, 2, 3), dim=7))
        assert session.load().layers[0].tensors[0].shape == (2, 3, 7)
    assert verify(fork).ok
    check(path, MADE[1])


def test_the_parent_goes_on_without_the_fork(tmp_path: Path) -> None:
    path = started(tmp_path, MADE[:3])
    last, middle = forked(path), forked(path, n_tokens=4)
    with Session.open(path) as session:
        session.append(MADE[3])
        session.truncate(2)
        check(last, MADE[2])
        check(middle, prefix(MADE[:3], 4))
        session.append(snapshot((*TOKENS[:2], 9, 9, 9), **SHAPE))
        session.reset()
        session.append(snapshot((7, 7), metadata={"other": "yes"}, **SHAPE))
        with path.open("ab") as f:
            f.write(b"torn" * 100)
        check(last, MADE[2])
        check(middle, prefix(MADE[:3], 4))
    with Session.open(last) as session:
        session.append(MADE[4])
    check(last, MADE[4])


def test_metadata_and_identity_are_inherited_until_they_are_said_anew(tmp_path: Path) -> None:
    path = started(tmp_path, MADE[:2])
    fork = forked(path)
    with Session.open(fork) as session:
        assert session.identity == IDENTITY
        session.append(replace(MADE[2], metadata={}))
        assert session.load().metadata == {"turn": "last"}
        session.append(replace(MADE[3], metadata={"mine": "1"}))
        assert session.load().metadata == {"mine": "1"}
        kinds = [r["kind"] for r in SpecReader(fork.read_bytes(), tmp_path).records()]
        assert 1 not in kinds  # IDENTITY
        assert 2 not in kinds  # LAYOUT
        other = replace(IDENTITY, weights=IDENTITY.weights[:1])
        with pytest.raises(CompatibilityError, match="another model"):
            session.append(replace(MADE[4], identity=replace(other, tokenizer="00" * 16)))
    assert native.load(path).metadata == {"turn": "last"}
    assert native.load(forked(fork)).metadata == {"mine": "1"}


def test_text_goes_on_across_files(tmp_path: Path) -> None:
    path = started(tmp_path, [replace(MADE[0], text="caf\ufffd")])
    fork = forked(path)
    with Session.open(fork) as session:
        session.append(replace(MADE[1], text="café au"))
        assert session.load().text == "café au"
    again = forked(fork)
    with Session.open(again) as session:
        session.append(replace(MADE[2], text="café au lait"))
    assert native.load(again).text == "café au lait"
    assert native.load(fork).text == "café au"
    assert native.load(path).text == "caf\ufffd"
    assert native.load(forked(again, n_tokens=3)).text == "caf\ufffd"
    assert native.load(forked(again, n_tokens=4)).text is None


def test_exact_children_of_a_lossy_parent_and_the_reverse(tmp_path: Path) -> None:
    lossy = started(tmp_path, MADE[:2], codec="q8")
    fork = forked(lossy)
    with Session.open(fork) as session:
        assert session.append(MADE[2]).exact
        loaded, parent = session.load(), native.load(lossy)
        for new, old, made in zip(loaded.tensors(), parent.tensors(), MADE[2].tensors(), strict=True):
            assert new.array[:, :5].tobytes() == old.array.tobytes() != made.array[:, :5].tobytes()
            assert new.array[:, 5:].tobytes() == made.array[:, 5:].tobytes()
            assert new.bound == old.bound > 0
        session.append(MADE[3], codec="q8")
    assert verify(fork).ok
    exact = started(tmp_path, MADE[:2])
    fork = forked(exact)
    with Session.open(fork) as session:
        session.append(MADE[2], codec="q8")
        for tensor, made in zip(session.load().tensors(), MADE[2].tensors(), strict=True):
            assert tensor.array[:, :5].tobytes() == made.array[:, :5].tobytes()
            assert tensor.bound > 0
    assert all(t.bound == 0 for t in native.load(forked(fork, n_tokens=6)).tensors())


# -- layers that cannot be cut -------------------------------------------------------------------------------


def windowed(n: int, window: int = 4) -> Snapshot:
    """One growing layer, and one that holds the last `window` rows only."""
    made = snapshot(TOKENS[:n], heads=2, dim=3, vocab=5)
    start = max(0, n - window)
    tensors = tuple(
        Tensor(
            spec(10 + j, 1, role, 2, 3, "float32", growth="window", window=window),
            rows(TOKENS, start, n, 10 + j, 2, 3, "float32"),
            start=start,
        )
        for j, role in enumerate("kv")
    )
    return replace(made, layers=(*made.layers, Layer(index=1, kind="attention", tensors=tensors, num_query_heads=4)))


def within(loaded: Snapshot, made: Snapshot) -> list[str]:
    """What differs; a session may hold more rows of a window than the snapshot of its last turn."""
    layers = []
    for layer, other in zip(loaded.layers, made.layers, strict=True):
        pairs = zip(layer.tensors, other.tensors, strict=True)
        cut = [t if t.spec.growth != "window" else t.rows(o.start, t.start + t.n_rows) for t, o in pairs]
        layers.append(replace(layer, tensors=tuple(cut)))
    return same(replace(loaded, layers=tuple(layers)), made)


@pytest.mark.parametrize("kind", ["recurrent", "window"])
def test_a_fork_inside_a_turn_is_refused_where_a_layer_cannot_be_rewound(tmp_path: Path, kind: str) -> None:
    make: Callable[[int], Snapshot] = (
        windowed if kind == "window" else (lambda n: snapshot(TOKENS[:n], recurrent=True, **SHAPE))
    )
    made = [make(n) for n in (3, 6, 12)]
    path = started(tmp_path, made)
    # A window of 4 holds rows 0 to 6 and 8 to 12: it can be cut up to 6, and again where the 3 rows before are held.
    for n, nearest in ((1, 0), (5, 3), (11, 6)) if kind == "recurrent" else ((7, 6), (10, 6)):
        before = sorted(tmp_path.iterdir())
        with pytest.raises(UnsupportedError, match=f"layer {int(kind == 'window')}: .*nearest.* is {nearest}"):
            fork_file(str(path), n_tokens=n)
        assert sorted(tmp_path.iterdir()) == before
    for one in made:
        assert within(native.load(forked(path, n_tokens=len(one.tokens))), one) == []
    fork = forked(path, n_tokens=6)
    with Session.open(fork) as session:
        session.append(made[2])
        assert within(session.load(), made[2]) == []
        with pytest.raises(UnsupportedError, match="nearest reachable length is 6"):
            session.truncate(8)
        if kind == "recurrent":
            with pytest.raises(UnsupportedError, match="nearest reachable length is 0"):
                session.truncate(2)
        session.truncate(3)
        assert within(session.load(), made[0]) == []
        session.append(make(4))
        assert within(session.load(), make(4)) == []
    assert verify(fork).ok
    assert SpecReader(fork.read_bytes(), tmp_path).content()["ids"] == list(TOKENS[:4])


# -- forks of forks ------------------------------------------------------------------------------------------


def test_64_forks_of_forks_and_the_refusal_behind(tmp_path: Path) -> None:
    path = started(tmp_path, [snapshot(TOKENS[:2], **SHAPE)])
    chain_of = [path]
    for i in range(64):
        path = forked(path)
        chain_of.append(path)
        with Session.open(path) as session:
            session.append(snapshot(TOKENS[: 3 + i], **SHAPE))
    expected = snapshot(TOKENS[:66], **SHAPE)
    loaded = native.load(path)
    assert same(loaded, expected) == []
    assert verify(path).ok
    assert SpecReader(path.read_bytes(), tmp_path).base["depth"] == 64  # type: ignore[index]
    before = len(list(tmp_path.iterdir()))
    with pytest.raises(UnsupportedError, match="more than 64 forks"):
        fork_file(str(path))
    assert len(list(tmp_path.iterdir())) == before
    # What keeps nothing of the last file starts where that one starts.
    report = fork_file(str(path), n_tokens=40)
    assert report.depth == 64
    assert same(native.load(report.path), replace(snapshot(TOKENS[:40], **SHAPE))) == []
    for n in (2, 3, 33, 65, 66):
        with Session.open(path) as session:
            session.append(expected)  # no new tokens
            assert session.n_tokens == 66
        with Session.open(shutil.copy(path, tmp_path / "again.kvsnap")) as session:
            session.truncate(n)
            assert same(session.load(), snapshot(TOKENS[:n], **SHAPE)) == []
    chain_of[20].unlink()
    with pytest.raises(MissingError) as caught:
        native.load(path)
    assert chain_of[20].name in str(caught.value)
    assert not verify(path).ok


def test_forks_without_turns_of_their_own_do_not_grow_into_a_chain(tmp_path: Path) -> None:
    path = first = started(tmp_path, MADE[:3])
    for _ in range(70):
        report = fork_file(str(path))
        assert (report.depth, report.parent) == (1, first.stem)
        path = Path(report.path)
    check(path, MADE[2])
    with Session.open(path) as session:
        session.truncate(4)
    cut = forked(path)
    assert fork_file(str(cut)).depth == 1
    check(cut, prefix(MADE[:3], 4))
    path.unlink()
    check(cut, prefix(MADE[:3], 4))
    with Session.open(cut) as session:
        session.append(MADE[1])
    report = fork_file(str(cut))
    assert (report.depth, report.parent) == (2, cut.stem)
    assert fork_file(str(cut), n_tokens=4).depth == 2  # for its metadata


# -- what it costs -------------------------------------------------------------------------------------------


class Count:
    def __init__(self) -> None:
        self.written = 0
        self.paths: set[str] = set()

    def record(self, operation: str, path: str, _offset: int, data: bytes) -> None:
        if operation == "write":
            self.written += len(data)
            self.paths.add(path)


@pytest.mark.parametrize(("n_turns", "dim"), [(1, 4), (3, 4096), (150, 4)])
def test_a_fork_writes_less_than_a_kilobyte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_turns: int, dim: int
) -> None:
    path = started(tmp_path, [snapshot(TOKENS[: i + 1], dim=dim) for i in range(n_turns)])
    for options in ({}, {"n_tokens": 0}, {"n_tokens": n_turns // 2}, {"commit": n_turns}):
        count = Count()
        monkeypatch.setattr(files, "recorder", count)
        fork_file(str(path), **options)
        monkeypatch.setattr(files, "recorder", None)
        assert 0 < count.written < 1024
        assert len(count.paths) == 1
        assert str(path) not in count.paths


def test_opening_a_fork_reads_no_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reads of the parent are counted: header, COMMIT, INDEX, LAYOUT and IDENTITY, whatever the tensors weigh."""
    read: list[int] = []

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def get(*args: Any) -> Any:
            read.append(args[3] if isinstance(args[3], int) else memoryview(args[3]).nbytes)
            return real(*args)

        return get

    sizes = []
    for dim in (4, 4096):
        path = started(tmp_path, [snapshot(TOKENS[:50], dim=dim), snapshot(TOKENS[:100], dim=dim)])
        fork = forked(path, n_tokens=70)
        with monkeypatch.context() as patched:
            read.clear()
            patched.setattr(files.system, "get", counted(files.system.get))
            patched.setattr(files.system, "get_into", counted(files.system.get_into))
            with Session.open(fork) as session:
                assert session.n_tokens == 70
            sizes.append(sum(read))
    assert path.stat().st_size > 3_000_000
    assert sizes[0] < 16384
    assert sizes[1] < 16384


# -- the spec and the code -----------------------------------------------------------------------------------


def written(folder: Path, fork: MinimalFork | bytes) -> Path:
    data = fork if isinstance(fork, bytes) else fork.build()
    path = folder / f"{data[40:56].hex()}.kvsnap"
    path.write_bytes(data)
    return path


def minimal(folder: Path, n_turns: int = 3, **options: Any) -> tuple[Path, MinimalFork]:
    path = started(folder, MADE[:n_turns])
    return path, MinimalFork(SpecReader(path.read_bytes(), folder), **options)


@pytest.mark.parametrize(
    ("options", "n"),
    [({}, 9), ({"n_entries": 2}, 6), ({"n_entries": 0}, 0), ({"n_entries": 2, "n_tokens": 4, "n_rows": 4}, 4)],
)
def test_a_fork_that_the_spec_writes_is_read(tmp_path: Path, options: Any, n: int) -> None:
    _, fork = minimal(tmp_path, **options)
    expected = prefix(MADE[:3], n)
    fork.commit["token_offset"] = expected.token_offset
    path = written(tmp_path, fork)
    check(path, expected)
    with Session.open(path) as session:
        session.append(MADE[3])
    assert native.load(path).tokens == MADE[3].tokens
    check(forked(path, commit=1), expected)


def test_a_fork_of_the_spec_with_a_turn_of_its_own_and_a_cut(tmp_path: Path) -> None:
    _, fork = minimal(tmp_path, n_entries=1)
    made = snapshot(TOKENS[:5], **SHAPE)
    first, parts = 2, []
    for tensor in made.tensors():
        data = np.ascontiguousarray(tensor.array[:, first:]).tobytes()
        parts.append({"tensor": tensor.spec.id, "row_start": first, "n_rows": 3, "data": data})
    span = {"row_start": first, "n_rows": 3, "token_start": 3, "ids": TOKENS[3:5], "runs": [(0, 2)], "parts": parts,
            "positions": [(2, 3)]}  # fmt: skip
    fork.more = [{"span": span, "commit": {"n_pending": 0}}]
    path = written(tmp_path, fork)
    loaded = native.load(path)
    assert loaded.tokens == TOKENS[:5]
    assert [t.array.tobytes() for t in loaded.tensors()] == [t.array.tobytes() for t in made.tensors()]
    assert verify(path).ok
    assert SpecReader(path.read_bytes(), tmp_path).content()["ids"] == list(TOKENS[:5])


# -- hostile files -------------------------------------------------------------------------------------------


def refused(path: Path, *errors: type[KvsnapError], match: str | None = None) -> None:
    """The file is refused by the code, whichever way it is read, and by the reader made from the spec."""
    with pytest.raises(errors, match=match):
        native.load(path)
    with pytest.raises(errors), Session.open(path) as session:
        session.load()
    try:
        assert not verify(path).ok
    except VersionError:
        assert VersionError in errors
    except errors:
        pass  # no commit can be read at all
    with pytest.raises((ValueError, struct.error, IndexError)):
        SpecReader(path.read_bytes(), path.parent).content()


WRONG: dict[str, tuple[dict[str, Any], type[KvsnapError], str]] = {
    "id": ({"file_id": bytes(16)}, MissingError, "not beside it"),
    "commit number": ({"commit": 2}, DamagedError, "not the one this fork was made from: commit"),
    "commit zero": ({"commit": 0}, FormatError, "out of range"),
    "offset": ({"commit_offset": 128}, DamagedError, "another COMMIT"),
    "offset not aligned": ({"commit_offset": 129}, FormatError, "out of range"),
    "offset behind the end": ({"commit_offset": 1 << 40}, DamagedError, ""),
    "digest": ({"digest": bytes(16)}, DamagedError, "another COMMIT"),
    "depth zero": ({"depth": 0}, FormatError, "depth of 1 to 64"),
    "depth of a grandchild": ({"depth": 2}, DamagedError, "depth 0, not 1"),
    "depth too great": ({"depth": 65}, FormatError, "depth of 1 to 64"),
    "entries": ({"n_entries": 4}, DamagedError, "4 entries are kept, 3 are there"),
    "fewer entries": ({"n_entries": 2}, DamagedError, "tokens and"),
    "tokens": ({"n_tokens": 8}, KvsnapError, ""),
    "more tokens": ({"n_tokens": 10}, KvsnapError, ""),
    "rows": ({"n_rows": 7}, KvsnapError, ""),
    "more rows": ({"n_rows": 9}, KvsnapError, ""),
    "counts": ({"n_tokens": 2**63}, FormatError, "counts of BASE"),
    "tokens without entries": ({"n_entries": 0}, FormatError, "counts of BASE"),
    "history": ({"history_digest": bytes(16)}, KvsnapError, ""),
    "reserved": ({"reserved": bytes(35) + b"\1"}, FormatError, "out of range"),
    "longer": ({"extra": bytes(64)}, FormatError, "wrong length"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("fitting", [False, True])
def test_a_wrong_base_is_refused(tmp_path: Path, name: str, fitting: bool) -> None:
    """Each rule of section 19; `fitting`: the COMMIT agrees with the wrong BASE in counts and digest."""
    fields, error, match = WRONG[name]
    _, fork = minimal(tmp_path)
    fork.base |= fields
    if fitting:
        for commit, base in (("n_tokens", "n_tokens"), ("n_rows", "n_rows"), ("digest", "history_digest")):
            fork.commit[commit] = fork.base[base]
        fork.commit["n_pending"] = max(0, fork.commit["n_tokens"] - fork.commit["n_rows"])
    path = written(tmp_path, fork)
    refused(path, KvsnapError if fitting else error, match=None if fitting else match or None)


def test_the_control_of_the_wrong_bases_is_accepted(tmp_path: Path) -> None:
    _, fork = minimal(tmp_path)
    fork.commit["token_offset"] = MADE[2].token_offset
    check(written(tmp_path, fork), MADE[2])


@pytest.mark.parametrize("own", [False, True])
def test_a_history_digest_of_nothing_that_is_not_zero_is_refused(tmp_path: Path, own: bool) -> None:
    _, fork = minimal(tmp_path, n_entries=0)
    fork.base["history_digest"] = fork.commit["digest"] = b"x" * 16
    if own:
        fork.more = [
            {"span": {"ids": (1, 2), "runs": [(0, 2)], "row_start": 0, "n_rows": 0}, "commit": {"n_pending": 2}}
        ]
    path = written(tmp_path, fork)
    refused(path, FormatError, DamagedError)


def test_a_file_is_not_its_own_parent(tmp_path: Path) -> None:
    """The digest of an earlier commit of the same file is known when a later BASE is written."""
    _, fork = minimal(tmp_path)
    first = fork.build()
    reader = SpecReader(first, tmp_path)
    own = {"file_id": reader.file_id, "commit": 1, "commit_offset": reader.commit_at,
           "digest": reader.footer["digest"], "depth": 2}  # fmt: skip
    fork.more = [{"base": own}]
    refused(written(tmp_path, fork), DamagedError, FormatError, match="itself|its own parent")


def test_records_that_disagree_in_their_origin_are_found(tmp_path: Path) -> None:
    """Two parents in one file: each commit can be read, the file breaks a rule, and verify says so."""
    _, fork = minimal(tmp_path)
    other = started(tmp_path, MADE[:3])
    reader = SpecReader(other.read_bytes(), tmp_path)
    base = MinimalFork(reader).base
    fork.more = [{"base": base}]
    path = written(tmp_path, fork)
    with pytest.raises(ValueError, match="one origin"):
        SpecReader(path.read_bytes(), tmp_path).history()
    report = verify(path)
    assert any("origin" in d.what for d in report.damages)
    fork.more = [{"base": {}}]
    assert verify(written(tmp_path, fork)).damages == ()  # the control


def test_a_cycle_is_refused(tmp_path: Path) -> None:
    """Two forks that name each other: only one of the digests can fit, and the depths never do."""
    _, a = minimal(tmp_path)
    path_a = written(tmp_path, a)
    b = MinimalFork(SpecReader(path_a.read_bytes(), tmp_path))
    b.header["file_id"] = b"b" * 16
    path_b = written(tmp_path, b)
    assert verify(path_b).ok
    reader = SpecReader(path_b.read_bytes(), tmp_path)
    again = MinimalFork(reader).base
    for depth in (1, 2, 3, 64):
        a.base = again | {"depth": depth}
        refused(written(tmp_path, a), DamagedError, FormatError)
        with pytest.raises((DamagedError, FormatError)):
            native.load(path_b)
        for path in (path_a, path_b):  # a repair follows them, too, and comes to an end
            with pytest.raises((DamagedError, FormatError)):
                repair(path, tmp_path / "mended.kvsnap")


def test_a_base_in_a_file_that_is_no_fork_and_a_fork_without_one(tmp_path: Path) -> None:
    _, fork = minimal(tmp_path)
    fork.header["required"] = 0
    refused(written(tmp_path, fork), FormatError, match="no fork, or none in a fork")
    fork.header["required"] = 2
    fork.commit["base"] = 0
    refused(written(tmp_path, fork), FormatError, match="no fork, or none in a fork")
    del fork.commit["base"]
    fork.header["use"] = 1
    refused(written(tmp_path, fork), FormatError, match="header field")
    fork.header |= {"use": 2, "required": 6}
    refused(written(tmp_path, fork), VersionError, match="features")


def test_a_base_that_is_another_record_is_refused(tmp_path: Path) -> None:
    _, fork = minimal(tmp_path)
    at = SpecReader(fork.build(), tmp_path).commit_at
    fork.commit["base"] = at
    refused(written(tmp_path, fork), FormatError, DamagedError)


@pytest.mark.parametrize("where", ["lost", "an earlier commit"])
def test_verify_checks_the_base_of_every_commit(tmp_path: Path, where: str) -> None:
    _, fork = minimal(tmp_path)
    fork.more = [{"base": {}}]
    data = bytearray(fork.build())
    data[128 + 64 + (3 if where == "lost" else 60)] ^= 1
    path = written(tmp_path, bytes(data))
    native.load(path)  # the last commit has a BASE of its own
    assert verify(path).ok
    assert verify(path).damages


# -- parents that are gone, other ones, or damaged -----------------------------------------------------------


def fork_of_turns(folder: Path) -> tuple[Path, Path]:
    """A parent with three turns, and a fork in the middle of the second one that has a turn of its own."""
    path = started(folder, MADE[:3])
    fork = forked(path, n_tokens=5)
    with Session.open(fork) as session:
        session.append(snapshot(TOKENS[:8], **SHAPE))
    return path, fork


def test_a_parent_that_is_missing_is_named(tmp_path: Path) -> None:
    path, fork = fork_of_turns(tmp_path)
    path.unlink()
    with pytest.raises(MissingError, match="not beside it") as caught:
        native.load(fork)
    assert caught.value.path == str(fork)
    assert path.name in str(caught.value.expected)
    with pytest.raises(MissingError):
        Session.open(fork)
    report = verify(fork)
    assert not report.ok
    assert "not beside it" in str(report.damages[0])
    assert path.name in str(report.damages[0])


def test_a_fork_that_describes_itself_still_needs_its_parent_when_it_is_read(tmp_path: Path) -> None:
    path = started(tmp_path, [snapshot(TOKENS[:3], **(SHAPE | {"vocab": 0}))])
    fork = forked(path)
    with Session.open(fork) as session:
        session.append(snapshot(TOKENS[:4], **SHAPE))  # with logits: a LAYOUT of its own
    path.unlink()
    with pytest.raises(MissingError, match="not beside it"):
        native.load(fork)
    assert not verify(fork).ok


@pytest.mark.parametrize("what", ["another session", "another id", "cut off", "empty", "directory"])
def test_a_parent_that_is_another_file_is_refused(tmp_path: Path, what: str) -> None:
    path, fork = fork_of_turns(tmp_path)
    data = path.read_bytes()
    (tmp_path / "aside").mkdir()
    if what == "another session":
        other = started(tmp_path / "aside", MADE[:3])
        shutil.copy(other, path)
    elif what == "another id":
        w = SpecWriter(2, header={"file_id": data[40:56]}, salt=struct.unpack_from("<Q", data, 56)[0])
        path.write_bytes(bytes(w.data) + data[128:])
        assert verify(path).ok  # the control: nothing but the header was made anew
        w = SpecWriter(2, header={"file_id": b"z" * 16}, salt=struct.unpack_from("<Q", data, 56)[0])
        path.write_bytes(bytes(w.data) + data[128:])
    elif what == "cut off":
        path.write_bytes(data[: SpecReader(data).history()[-2]["tail"][0]["span"]])
    elif what == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
        path.mkdir()
    with pytest.raises(FormatError if what == "empty" else DamagedError) as caught:
        native.load(fork)
    assert path.stem in str(caught.value)
    report = verify(fork)
    assert not report.ok
    assert any(path.stem in str(d) for d in report.damages)
    assert fork.exists()


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    path, fork = fork_of_turns(tmp_path)
    away = tmp_path / "away"
    away.mkdir()
    path.rename(away / path.name)
    path.symlink_to(away / path.name)
    with pytest.raises(DamagedError, match="symbolic link"):
        native.load(fork)
    assert not verify(fork).ok
    path.unlink()
    (away / path.name).rename(path)
    assert verify(fork).ok


def test_a_fork_is_not_made_through_a_link(tmp_path: Path) -> None:
    path = started(tmp_path, MADE[:1])
    away = tmp_path / "away"
    away.mkdir()
    (away / path.name).symlink_to(path)
    with pytest.raises(InputError, match="symbolic link"):
        fork_file(str(away / path.name))
    assert [p.name for p in away.iterdir()] == [path.name]


def part_places(path: Path) -> list[tuple[int, int, int]]:
    """Offset of the span, index of the part, and offset of the first stored byte of every part of a session."""
    reader, out = SpecReader(path.read_bytes(), path.parent), []
    for entry in reader.entries():
        for i, part in enumerate(reader.table(entry["span"], SPAN)["parts"]):
            out.append((entry["span"], i, entry["span"] + 64 + part["offset"]))
    return out


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("number", range(12))
def test_a_damaged_parent_is_named_with_tensor_and_tokens(tmp_path: Path, number: int) -> None:
    path, fork = fork_of_turns(tmp_path)
    _, index, at = part_places(path)[number]
    needed = number < 8  # the parts of the first two turns
    flip(path, at)
    report = verify(fork)
    assert report.ok == (not needed)
    if not needed:
        assert report.damages == ()
        [t.array for t in native.load(fork).tensors()]
        assert not verify(path).ok
        return
    (damage,) = report.damages
    name = [t.name for t in MADE[0].tensors()][index]
    assert (damage.path, damage.tensor, damage.offset) == (str(path), name, at)
    assert damage.tokens == ((0, 3) if number < 4 else (3, 5))
    assert str(path) in str(damage)
    with pytest.raises(DamagedError) as caught:
        [t.array for t in native.load(fork).tensors()]
    assert caught.value.path == str(path)
    assert caught.value.offset == at


@pytest.mark.parametrize("what", ["identity", "layout", "note", "commit", "header", "table", "state"])
def test_what_else_a_fork_needs_of_its_parent_is_checked_and_named(tmp_path: Path, what: str) -> None:
    path = started(tmp_path, MADE[:2])
    fork = forked(path)
    with Session.open(path) as session:
        session.append(replace(MADE[2], metadata={"later": "1"}))
    reader = SpecReader(path.read_bytes(), tmp_path)
    made = reader.history()[1]
    entry = reader.entries()[1]
    places = {"header": 8, "commit": SpecReader(fork.read_bytes(), tmp_path).base["commit_offset"] + 64 + 40,  # type: ignore[index]
              "table": entry["span"] + 64 + 64, "state": entry["state"] + 64 + 64}  # fmt: skip
    at = places[what] if what in places else made[what] + 64 + 3
    flip(path, at)
    report = verify(fork)
    assert not report.ok
    assert any(d.path == str(path) and path.stem in str(d) for d in report.damages)
    with pytest.raises(KvsnapError):
        native.load(fork)
    flip(path, at)
    assert verify(fork).ok


def test_everything_that_is_damaged_is_named_at_once(tmp_path: Path) -> None:
    path, fork = fork_of_turns(tmp_path)
    reader = SpecReader(path.read_bytes(), tmp_path)
    places = [reader.commit["identity"] + 64 + 3, part_places(path)[1][2], part_places(path)[6][2]]
    own = part_places(fork)[0][2]
    for at in places:
        flip(path, at)
    flip(fork, own)
    found = {(d.path, d.tensor, d.tokens) for d in verify(fork).damages if d.live}
    assert found == {
        (None, "layer0.k", (5, 8)),
        (str(path), "", None),
        (str(path), "layer0.v", (0, 3)),
        (str(path), "layer1.k", (3, 5)),
    }


# -- what cannot be forked, or read --------------------------------------------------------------------------


def test_the_bytes_of_a_fork_alone_are_refused(tmp_path: Path) -> None:
    path, fork = fork_of_turns(tmp_path)
    with pytest.raises(UnsupportedError, match="bytes alone"):
        native.loads(fork.read_bytes())
    assert native.loads(path.read_bytes()).tokens == MADE[2].tokens  # the control


def test_what_cannot_be_forked(tmp_path: Path) -> None:
    sealed = tmp_path / "sealed.kvsnap"
    native.save(MADE[0], sealed)
    sealed = named(sealed)
    with pytest.raises(UnsupportedError, match="sealed snapshot"):
        fork_file(str(sealed))
    path = started(tmp_path, MADE[:1])
    other = Path(shutil.copy(path, tmp_path / "mine.kvsnap"))
    with pytest.raises(InputError, match="under the name of its id"):
        fork_file(str(other))
    with pytest.raises(MissingError):
        fork_file(str(tmp_path / "nothing.kvsnap"))
    assert len(list(tmp_path.iterdir())) == 3


def test_a_fork_under_another_name_is_a_fork_still(tmp_path: Path) -> None:
    path, fork = fork_of_turns(tmp_path)
    mine = fork.rename(tmp_path / "mine.kvsnap")
    assert native.load(mine).tokens == TOKENS[:8]
    away = tmp_path / "away"
    away.mkdir()
    with pytest.raises(MissingError, match="not beside it"):
        native.load(shutil.copy(mine, away))
    shutil.copy(path, away)
    assert native.load(away / "mine.kvsnap").tokens == TOKENS[:8]


def test_a_writer_and_its_forks_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = started(tmp_path, MADE[:2])
    with Session.open(path) as parent:
        fork = forked(path)
        with Session.open(fork) as session:
            session.append(MADE[2])
            parent.append(replace(MADE[3], metadata={}))
            assert same(session.load(), MADE[2]) == []
            session.truncate(4)
            parent.truncate(8)
            assert same(session.load(), prefix(MADE[:2], 4)) == []
    cut = prefix(MADE[:4], 8)  # in the middle of the rows of a turn, unlike those of the third one
    check(path, replace(cut, token_offset=cut.positions[-1].start + cut.positions[-1].count))


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    _, fork = fork_of_turns(tmp_path)
    with Session.open(forked(fork)) as session:
        session.append(snapshot(TOKENS[:9], **SHAPE))
        third = Path(session.path)
    gc.collect()
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    gc.disable()
    kept = []
    for _ in range(3):
        session = Session.open(third)
        kept.append(session)
        session.fork(tmp_path / f"copy{len(kept)}.kvsnap", commit=1, n_tokens=4)
        session.truncate(session.n_tokens - 1)
        session.rewind(1)
        session.close()
        kept.append(verify(third))
    gc.enable()
    if before:
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_digest_in_the_list_of_the_parent_is_checked_too(tmp_path: Path) -> None:
    """A BASE may agree with a parent whose own list is wrong: the ids are hashed again when spans are read."""
    path, fork = minimal(tmp_path, n_entries=2, n_tokens=4, n_rows=4)
    wrong = chain(bytes(16), [1, 2, 3], 3)
    fork.base["history_digest"] = fork.commit["digest"] = wrong
    refused(written(tmp_path, fork), DamagedError, match="history digest")
    assert verify(path).ok

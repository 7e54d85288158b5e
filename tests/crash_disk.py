"""A model of a disk that loses power: which files may be there, given what `kvsnap.files` recorded so far.

What is promised by POSIX, and no more: what a file held at its last sync stays; the names in a directory at its last
sync stay; a rename happens or does not. Everything later may be there or not, in any order and in part: single writes,
single sectors of a write, the length without the bytes (then zeros or stale bytes stand there), the bytes without the
length, a name without the bytes, the bytes without the name, a cut that did not happen. Sectors are 512 bytes, and in
half of the draws 64, which is finer than any disk: of a small write that is alone, all subsets of them are tried. One
thing is taken for granted, as databases do: a sector that is written again keeps the bytes that did not change.

A *scenario* does one thing after the other, and yields, after each, what every file must hold from then on. `explore`
runs it once, and looks at the crashes behind every operation.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import numpy as np

from kvsnap import files
from kvsnap.errors import KvsnapError
from kvsnap.formats.native import BytesReader, NativeFile
from kvsnap.formats.native.assemble import snapshot_of
from kvsnap.layout import Snapshot
from kvsnap.records import FORKED, HEADER_SIZE, MAGIC
from synthetic import same

Entry: TypeAlias = "tuple[str, str, int, bytes]"
Content: TypeAlias = "Snapshot | bytes | None"  # None: there is no such file
Files: TypeAlias = "dict[str, bytes]"
State: TypeAlias = "tuple[str, Files, dict[str, Content]]"  # kind of loss, files by name, what each was found to hold
SECTORS = (512, 64)
EVERY_SUBSET = 5  # of so many operations, all subsets are tried; of more, each alone, all but each, and some at random
EVERY_SECTOR = 9  # and of so many sectors of a single write


class Log:
    """A recorder that keeps the operations, and may do something behind one of them."""

    def __init__(self, then: Callable[[int], None] | None = None) -> None:
        self.entries: list[Entry] = []
        self.then = then

    def record(self, operation: str, path: str, offset: int, data: bytes) -> None:
        self.entries.append((operation, path, offset, data))
        if self.then is not None:
            self.then(len(self.entries))


@contextmanager
def recording(log: Log | None) -> Iterator[None]:
    with mock.patch.object(files, "recorder", log):
        yield


@contextmanager
def unsynced() -> Iterator[None]:
    """The operations are recorded, but the disk that the tests run on is not made to wait for each."""
    with mock.patch.object(files.system, "sync", return_value=None):
        yield


@contextmanager
def in_memory() -> Iterator[Path]:
    """A directory in memory where there is one: thousands of files are written, and no disk has to last."""
    memory = Path("/dev/shm")  # noqa: S108 # the directory made in it has a random name
    directory = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


# -- the disk -------------------------------------------------------------------------------------------------


def pieces_of(write: Entry, sector: int) -> list[Entry]:
    """Cut one write where the sectors of the file end."""
    operation, path, offset, data = write
    if operation != "write":
        return [write]
    cuts = [0, *range(sector - offset % sector, len(data), sector), len(data)]
    return [(operation, path, offset + a, data[a:b]) for a, b in itertools.pairwise(cuts) if b > a]


def laid_out(content: bytes, kept: Sequence[Entry], filler: bytes = b"\0") -> bytearray:
    """`content` after these writes and cuts; what was never written is filled."""
    out = bytearray(content)
    for operation, _, offset, data in kept:
        if operation == "write":
            out += filler * (-(-max(0, offset - len(out)) // len(filler)))
            out[offset : offset + len(data)] = data
        else:
            del out[offset:]
    return out


class Inode:
    """One file: the bytes at its last sync, and what happened to it since."""

    def __init__(self, content: bytes = b"") -> None:
        self.synced = content
        self.loose: list[Entry] = []

    def sync(self) -> None:
        self.synced, self.loose = bytes(laid_out(self.synced, self.loose)), []

    def versions(self, rng: np.random.Generator, draws: int) -> Iterator[tuple[str, bytes]]:
        """Yield (kind of loss, bytes) of what may be found of this file."""
        yield "nothing lost", bytes(laid_out(self.synced, self.loose))
        if not self.loose:
            return
        yield "all lost", self.synced
        for stop in range(1, len(self.loose)):
            yield "cut short", bytes(laid_out(self.synced, self.loose[:stop]))
        lengths = {len(self.synced)} | {len(laid_out(self.synced, self.loose[: i + 1])) for i in range(len(self.loose))}
        for kept in subsets(self.loose, rng, draws):
            content = laid_out(self.synced, kept)
            yield "reordered", bytes(content)
            yield "reordered, length first", bytes(content) + bytes(max(0, max(lengths) - len(content)))
            yield "reordered, length lost", bytes(content[: len(self.synced)])
        alone = pieces_of(self.loose[0], SECTORS[-1]) if len(self.loose) == 1 else []
        for kept in subsets(alone, rng, draws, EVERY_SECTOR):
            content = laid_out(self.synced, kept)
            yield "torn", bytes(content) + bytes(max(0, max(lengths) - len(content)))
        for draw in range(draws):
            pieces = [p for one in self.loose for p in pieces_of(one, SECTORS[draw % 2])]
            kept = [p for p, keep in zip(pieces, rng.random(len(pieces)) < rng.uniform(0.2, 1), strict=True) if keep]
            stale = rng.bytes(4096)
            content = laid_out(self.synced, kept, (b"\0", stale)[draw // 2 % 2])
            yield "torn", bytes(content)
            length = int(rng.choice(sorted(lengths)))
            yield "torn, another length", bytes(content[:length]) + stale[: max(0, length - len(content))]


def subsets(
    items: Sequence[Any], rng: np.random.Generator, draws: int, every: int = EVERY_SUBSET
) -> Iterator[list[Any]]:
    """Yield sublists: all of a few items; of many, each alone, all but each, and some at random."""
    n = len(items)
    if n <= every:
        masks = [[bool(bits >> i & 1) for i in range(n)] for bits in range(2**n)]
    else:
        masks = [[(i == j) == alone for i in range(n)] for j in range(n) for alone in (True, False)]
        masks += [list(rng.random(n) < 0.5) for _ in range(draws)]
    for mask in masks:
        yield [item for item, keep in zip(items, mask, strict=True) if keep]


@dataclass(frozen=True)
class Change:
    """One change of the names in a directory. `old` goes, `new` comes; the other may be empty."""

    old: str = ""
    new: str = ""
    node: Inode | None = None  # None with a new name: a directory


Names: TypeAlias = "dict[str, Inode | None]"


def renamed(names: Names, changes: Sequence[Change]) -> Names:
    out = dict(names)
    for change in changes:
        out.pop(change.old, None)
        if change.new:
            out[change.new] = change.node
    return out


class Disk:
    """Files by absolute path, all durable at first; `apply` is told of each operation."""

    def __init__(self, content: Mapping[str, bytes], directories: Sequence[str] = ()) -> None:
        self.synced: Names = {path: Inode(data) for path, data in content.items()}
        self.synced |= dict.fromkeys(directories)
        self.now: Names = dict(self.synced)
        self.loose: list[Change] = []

    def apply(self, entry: Entry) -> None:
        operation, path, _, data = entry
        if operation in ("write", "truncate"):
            self._node(path).loose.append(entry)
        elif operation == "sync":
            self._node(path).sync()
        elif operation == "fsync-dir":
            mine = [c for c in self.loose if os.path.dirname(c.new or c.old) == path.rstrip(os.sep)]
            self.synced, self.loose = renamed(self.synced, mine), [c for c in self.loose if c not in mine]
        else:
            if operation == "create":
                change = Change(new=path, node=Inode())
            elif operation == "mkdir":
                change = Change(new=path)
            elif operation == "rename":
                change = Change(old=path, new=os.fsdecode(data), node=self._node(path))
            else:
                assert operation == "unlink", operation
                change = Change(old=path)
            self.loose.append(change)
            self.now = renamed(self.now, [change])

    def _node(self, path: str) -> Inode:
        node = self.now[path]
        assert node is not None, path
        return node

    def _names(self, rng: np.random.Generator, draws: int) -> Iterator[Names]:
        for kept in subsets(self.loose, rng, draws):
            yield renamed(self.synced, kept)
            for change in kept:  # a name that was free is taken by a link, and the old one removed
                if change.old and change.new and change.new not in self.synced:
                    yield renamed(self.synced, kept) | {change.old: change.node}

    def states(self, rng: np.random.Generator, draws: int) -> Iterator[tuple[str, Files]]:
        """Yield (kind of loss, files by path) of what may be found after a crash at this moment."""
        for names in self._names(rng, draws):
            here = {
                path: node
                for path, node in names.items()
                if node is not None and all(self._has(names, str(up)) for up in Path(path).parents)
            }
            loose = [path for path, node in here.items() if node.loose]
            versions = {path: list(here[path].versions(rng, draws)) for path in loose}
            rest = {path: node.synced for path, node in here.items() if not node.loose}
            if not loose:
                yield ("nothing lost" if names == self.now else "names lost"), rest
            for number in range(max((len(v) for v in versions.values()), default=0)):
                # Mostly one file is being written; of several, each version meets a random one of the others.
                picked = {
                    path: v[number % len(v)] if path == loose[0] else v[int(rng.integers(len(v)))]
                    for path, v in versions.items()
                }
                yield picked[loose[0]][0], rest | {path: data for path, (_, data) in picked.items()}

    def _has(self, names: Names, directory: str) -> bool:
        """A directory is there unless it was made in this log and its making is lost."""
        return directory in names or directory not in self.now


# -- scenarios ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """One thing was done: what files hold from here on, and what else they may hold while it was being done."""

    files: Mapping[str, Content]
    meanwhile: Mapping[str, Sequence[Content]] = field(default_factory=dict)


Scenario: TypeAlias = "Callable[[Path], Iterator[Mapping[str, Content] | Mark]]"


@dataclass
class History:
    """What a scenario did: the files it began with, the operations, and how many of them preceded each mark."""

    directory: Path
    before: Files
    entries: list[Entry]
    marks: list[tuple[int, Mark]]
    directories: list[str]

    def allowed(self, done: int) -> dict[str, list[Content]]:
        """What may be found by name when the first `done` operations happened and a crash came then."""
        last = max(i for i, (place, _) in enumerate(self.marks) if place <= done)
        out: dict[str, list[Content]] = {name: [content] for name, content in self.marks[last][1].files.items()}
        if last + 1 < len(self.marks) and done > self.marks[last][0]:
            coming = self.marks[last + 1][1]
            for name, content in coming.files.items():
                out.setdefault(name, [None]).append(content)
            for name, others in coming.meanwhile.items():
                out.setdefault(name, [None]).extend(others)
        return out


def read_files(directory: Path) -> Files:
    return {str(p): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def play(scenario: Scenario, directory: Path, *, keep: bool = True) -> History:
    """Run a scenario. What it does before its first mark is its setting, durable from the start."""
    log = Log()
    steps = scenario(directory)
    marks = [(0, _mark(next(steps)))]
    before = read_files(directory) if keep else {}
    directories = [str(p) for p in directory.rglob("*") if p.is_dir()] if keep else []
    with recording(log):
        marks.extend((len(log.entries), _mark(step)) for step in steps)
    return History(directory, before, log.entries, marks, directories)


def _mark(step: Mapping[str, Content] | Mark) -> Mark:
    return step if isinstance(step, Mark) else Mark(step)


# -- what is found ----------------------------------------------------------------------------------------------


class ViolationError(AssertionError):
    """A promise is broken."""


def matches(data: bytes | None, content: Content, path: Path | None = None) -> str:
    """Return what is wrong with a file that must hold this content; empty when nothing is.

    With a path it is read from there: a fork needs its parent beside it.
    """
    if data is None or content is None:
        return "" if data is content else f"{'a' if data is not None else 'no'} file is there"
    if isinstance(content, bytes):
        return "" if data == content else "other bytes"
    try:
        with closing(NativeFile(BytesReader(data)) if path is None else NativeFile.open(path, mapped=False)) as file:
            found = snapshot_of(file)
            if file.end.dropped != len(data) - file.end.footer.file_length:
                return f"{file.end.dropped} bytes are said to be dropped, of {len(data)}"
            return ", ".join(same(found, content))
    except KvsnapError as error:
        return f"{type(error).__name__}: {error}"


def is_fork(data: bytes) -> bool:
    return data.startswith(MAGIC) and len(data) >= HEADER_SIZE and bool(data[16] & FORKED)


def put_down(found: Files, directory: Path) -> None:
    for name, data in found.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)


def look(found: Files, allowed: Mapping[str, Sequence[Content]]) -> dict[str, int]:
    """Return which of the allowed contents each file holds; raise `ViolationError` where it holds none."""
    for name in found.keys() - allowed.keys():
        if not Path(name).name.startswith(files.TEMPORARY_PREFIX):
            raise ViolationError(f"{name} is there, and nobody made it")
    if not any(map(is_fork, found.values())):
        return _look(found, allowed, None)
    with in_memory() as directory:
        put_down(found, directory)
        return _look(found, allowed, directory)


def _look(found: Files, allowed: Mapping[str, Sequence[Content]], directory: Path | None) -> dict[str, int]:
    outcome: dict[str, int] = {}
    for name, contents in allowed.items():
        wrong = []
        for number in reversed(range(len(contents))):
            wrong.append(matches(found.get(name), contents[number], directory and directory / name))
            if not wrong[-1]:
                outcome[name] = number
                break
        else:
            raise ViolationError(f"{name}: {' / '.join(reversed(wrong))}")
    return outcome


@dataclass
class Report:
    """How many states were looked at, by kind of loss and by what was found; and what was wrong."""

    losses: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    twice: int = 0  # states after a second crash

    @property
    def states(self) -> int:
        return self.losses.total()

    def __str__(self) -> str:
        def counts(counter: Counter[str]) -> str:
            return ", ".join(f"{n} {name}" for name, n in counter.most_common())

        return f"{self.states} states ({counts(self.losses)}), {self.twice} of second crashes; {counts(self.found)}"


def explore(
    scenario: Scenario,
    directory: Path,
    *,
    then: Scenario | None = None,
    most: int = 600,
    again: int = 0,
    draws: int = 8,
    seed: int = 1,
) -> Report:
    """Crash behind every operation of a scenario, and look at each state that may be left.

    With `then`, that scenario is played on the files of each state, or of `most` of them taken at random: what it does
    must succeed. `again` of these are taken for a second crash, during `then`.
    """
    home = directory / "first"
    home.mkdir()
    with unsynced():
        history = play(scenario, home)
        report = Report()
        rng = np.random.default_rng(seed)
        left = _crash(history, report, rng, draws)
        picked = rng.permutation(len(left))[:most] if then is not None else []
        for number, which in enumerate(picked):
            assert then is not None
            _go_on(then, directory / "next", left[int(which)], report, rng if number < again else None)
    return report


def _crash(history: History, report: Report, rng: np.random.Generator, draws: int) -> list[State]:
    """Look at all states; return the different ones, by relative name, with what each file was found to hold."""
    disk = Disk(history.before, history.directories)
    seen: dict[tuple[object, ...], set[int]] = {}
    left: list[State] = []
    for done in range(len(history.entries) + 1):
        if done:
            disk.apply(history.entries[done - 1])
        allowed = history.allowed(done)
        era = tuple((name, tuple(map(id, contents))) for name, contents in sorted(allowed.items()))
        known = seen.setdefault(era, set())
        for loss, state in disk.states(rng, draws):
            found = {os.path.relpath(path, history.directory): data for path, data in state.items()}
            key = _key(found)
            if key in known:
                continue
            known.add(key)
            report.losses[loss] += 1
            label = f"{loss}, behind operation {done} of {len(history.entries)}"
            try:
                outcome = look(found, allowed)
            except ViolationError as error:
                report.violations.append(f"{label}: {error}")
                continue
            for name, number in outcome.items():
                report.found["done" if len(allowed[name]) == 1 else ("old", "new", "other")[min(number, 2)]] += 1
            left.append((label, found, {name: allowed[name][number] for name, number in outcome.items()}))
    return left


def _key(found: Files) -> int:
    """What is in a temporary file is of no account: only that it is there."""
    named = [(n, d) for n, d in sorted(found.items()) if not Path(n).name.startswith(files.TEMPORARY_PREFIX)]
    digest = hashlib.blake2b(str(len(found)).encode(), digest_size=8)
    for name, data in named:
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return int.from_bytes(digest.digest(), "little")


def _go_on(then: Scenario, directory: Path, left: State, report: Report, rng: np.random.Generator | None) -> None:
    label, state, outcome = left
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    put_down(state, directory)
    try:
        history = play(then, directory, keep=rng is not None)
        first = history.marks[0][1].files
        for name, content in outcome.items():
            if name in first and not _alike(first[name], content):
                report.violations.append(f"{label}: {name} was opened at something else")
        look({os.path.relpath(p, directory): d for p, d in read_files(directory).items()}, history.allowed(10**9))
    except (KvsnapError, AssertionError) as error:
        report.violations.append(f"{label}: going on failed: {type(error).__name__}: {error}")
        return
    if rng is not None:
        before = report.states
        _crash(history, report, rng, 3)
        report.twice += report.states - before


def _alike(a: Content, b: Content) -> bool:
    return not same(a, b) if isinstance(a, Snapshot) and isinstance(b, Snapshot) else a == b

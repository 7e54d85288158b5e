"""What the crash tests do: everything that writes, one scenario each, and what must work on whatever a crash left.

A further operation that writes is one more scenario here; see `crash_disk` for what a scenario is.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import kvsnap
from crash_disk import Content, Log, Mark, Scenario
from kvsnap import files
from kvsnap.errors import DamagedError
from kvsnap.files import remove, write_whole
from kvsnap.formats import native
from kvsnap.formats.native.fork import fork_file
from kvsnap.formats.native.journal import Journal, empty_file
from kvsnap.inspection import verify
from kvsnap.layout import Snapshot, Tensor
from kvsnap.session import Session
from synthetic import SAMPLER, snapshot

TOKENS = tuple(range(100, 190))
NAME = "a.kvsnap"
SHAPE: dict[str, Any] = {"heads": 1, "dim": 4, "vocab": 4}
EMPTY = native.loads(empty_file())
TOLD: Counter[str] = Counter()  # what sessions said about what was left behind


def turn(number: int, **fields: Any) -> Snapshot:
    """Turn `number` (from 1): three tokens more than the one before, the last of them not evaluated."""
    made = snapshot(TOKENS[: 3 * number], n_pending=1, **SHAPE | {"start": fields.pop("start", 0)})
    return replace(made, text="word " * number, sampler=SAMPLER, metadata={"turn": str(number)}, **fields)


def small(number: int) -> Snapshot:
    return snapshot(TOKENS[:number], heads=1, dim=1, vocab=0)


OTHER_TOKENS = (*TOKENS[:3], 1, 2, 3)
OTHER_END = snapshot((*TOKENS[:6], 8, 9), **SHAPE)
OTHER = replace(turn(2), tokens=OTHER_TOKENS, layers=snapshot(OTHER_TOKENS, n_pending=1, **SHAPE).layers)


# -- scenarios ------------------------------------------------------------------------------------------------


def create(directory: Path) -> Iterator[Mapping[str, Content]]:
    yield {NAME: None}
    Session.open(directory / NAME).close()
    yield {NAME: EMPTY}


def append(directory: Path) -> Iterator[Mapping[str, Content]]:
    with Session.open(directory / NAME) as session:
        yield {NAME: EMPTY}
        for number in (1, 2, 3):
            session.append(turn(number), complete=number != 2)
            yield {NAME: turn(number)}


def append_partial_captures(directory: Path) -> Iterator[Mapping[str, Content]]:
    with Session.open(directory / NAME) as session:
        session.append(turn(1))
        yield {NAME: turn(1)}
        for number in (2, 3):
            session.append(turn(number, start=session.n_rows))
            yield {NAME: turn(number)}


def append_recurrent(directory: Path) -> Iterator[Mapping[str, Content]]:
    made = [snapshot(TOKENS[:n], recurrent=True, **SHAPE) for n in (3, 6)]
    with Session.open(directory / NAME) as session:
        session.append(made[0])
        yield {NAME: made[0]}
        session.append(made[1])
        yield {NAME: made[1]}


def truncate(directory: Path) -> Iterator[Mapping[str, Content]]:
    with Session.open(directory / NAME) as session:
        for number in (1, 2, 3):
            session.append(turn(number))
        yield {NAME: turn(3)}
        session.truncate(6)  # where a turn ended
        back = replace(turn(2), metadata={"turn": "3"})
        yield {NAME: back}
        session.truncate(4)  # inside a turn: its state and its text do not belong to this end
        cut = replace(snapshot(TOKENS[:4], **SHAPE), logits=None, metadata={"turn": "3"})
        yield {NAME: cut}
        other = snapshot((*TOKENS[:4], 7, 8), **SHAPE)
        session.append(other)
        yield {NAME: replace(other, metadata={"turn": "3"})}


MESSAGES = tuple({"role": role, "content": f"message {i}"} for i, role in enumerate(("user", "assistant", "user")))


def append_in_place_of_turns(directory: Path) -> Iterator[Mapping[str, Content]]:
    """The old turns whole or the new one whole: nothing in between, also not the history cut back."""
    with Session.open(directory / NAME) as session:
        for number in (1, 2, 3):
            session.append(turn(number, messages=MESSAGES[:number]))
        yield {NAME: turn(3, messages=MESSAGES)}
        other = replace(OTHER, messages=(*MESSAGES[:1], {"role": "assistant", "content": "another"}))
        session.append(other, after=3)  # where a turn ended
        yield {NAME: other}
        inside = replace(snapshot((*TOKENS[:2], 7, 8), start=2, **SHAPE), messages=MESSAGES[:2])
        session.append(inside, after=2)
        yield {NAME: replace(snapshot((*TOKENS[:2], 7, 8), **SHAPE), messages=MESSAGES[:2], metadata=other.metadata)}
        session.append(turn(1), after=0)
        yield {NAME: turn(1)}


def reset(directory: Path) -> Iterator[Mapping[str, Content]]:
    with Session.open(directory / NAME) as session:
        session.append(turn(1))
        yield {NAME: turn(1)}
        session.reset()
        yield {NAME: session_without_history(turn(1))}
        other = replace(snapshot((1, 2, 3), **SHAPE), metadata={"a": "b"})
        session.append(other)
        yield {NAME: other}


def session_without_history(before: Snapshot) -> Snapshot:
    """What a reset leaves of a session: identity, metadata, and the shape of the cache."""
    made = snapshot((), **SHAPE)
    return replace(made, identity=before.identity, metadata=before.metadata)


def rewrite_of_the_index(directory: Path) -> Iterator[Mapping[str, Content]]:
    """The tail of entries grows beyond 32 on the way, so an INDEX is written; then it is kept in part."""
    with Session.open(directory / NAME) as session:
        for number in range(1, 32):
            session.append(small(number))
        yield {NAME: small(31)}
        for number in range(32, 36):
            session.append(small(number))
            yield {NAME: small(number)}
        assert session._now.commit.index
        assert 0 < session._now.commit.index_kept < 35
        session.truncate(5)
        yield {NAME: small(5)}
        session.append(small(6))
        yield {NAME: small(6)}


def failed_append(directory: Path) -> Iterator[Mapping[str, Content] | Mark]:
    """A turn fails half written and is cut off; the next one goes to the same place."""

    class Unreadable:
        def array(self) -> Any:
            raise DamagedError("a source that cannot be read")

        read_into = None

    other = snapshot((*TOKENS[:3], 1, 2, 3), **SHAPE)
    k, v = other.layers[0].tensors
    bad = replace(other.layers[0], tensors=(k, Tensor(v.spec, Unreadable(), n_rows=v.n_rows)))
    with Session.open(directory / NAME) as session:
        session.append(turn(1))
        yield {NAME: turn(1)}
        with pytest.raises(DamagedError):
            session.append(replace(other, layers=(bad,)))
        yield {NAME: turn(1)}
        session.append(turn(2))
        yield {NAME: turn(2)}


@contextmanager
def counted_ids() -> Iterator[None]:
    """File ids that are the same each time the scenario is played, since files are named by them."""
    count = itertools.count(1)
    with mock.patch.object(os, "urandom", lambda n: next(count).to_bytes(n, "big")):
        yield


class StoppedError(BaseException):
    """Raised behind an operation."""


def stopped_append(session: Session, at: int | None = None) -> None:
    """Append `OTHER`, and stop behind the operation of this number (from 1), or else behind the COMMIT."""
    log, number = files.recorder, 0
    assert isinstance(log, Log)

    def interrupt(count: int) -> None:
        nonlocal number
        number += 1
        operation, _, _, data = log.entries[count - 1]
        if number == at or (at is None and operation == "write" and data.startswith(b"KVR1\7")):
            raise StoppedError

    log.then = interrupt
    with pytest.raises(StoppedError):
        session.append(OTHER)
    log.then = None


def rewind(directory: Path) -> Iterator[Mapping[str, Content]]:
    with Session.open(directory / NAME) as session:
        for number in (1, 2, 3):
            session.append(turn(number))
        session.truncate(4)
        yield {NAME: replace(snapshot(TOKENS[:4], **SHAPE), logits=None, metadata=turn(3).metadata)}
        session.rewind(4)
        yield {NAME: turn(3)}
        session.rewind(2)
        yield {NAME: turn(1)}


def copy_to_a_fork(directory: Path) -> Iterator[Mapping[str, Content]]:
    with Session.open(directory / NAME) as session:
        for number in (1, 2, 3):
            session.append(turn(number))
        yield {NAME: turn(3), "fork": None}
        session.fork(directory / "fork", n_tokens=6)
        copied = replace(turn(2), metadata=turn(3).metadata)
        yield {NAME: turn(3), "fork": copied}
        session.append(turn(4))
        yield {NAME: turn(4), "fork": copied}
    with Session.open(directory / "fork") as session:
        session.append(OTHER_END)
        yield {NAME: turn(4), "fork": replace(OTHER_END, metadata=copied.metadata)}


def compact(directory: Path) -> Iterator[Mapping[str, Content]]:
    with Session.open(directory / NAME) as session:
        for number in (1, 2):
            session.append(turn(number))
        session.truncate(3)
        session.append(turn(3))
        yield {NAME: turn(3)}
        session.compact()
        yield {NAME: turn(3)}
        session.append(turn(4))  # goes to the new file
        yield {NAME: turn(4)}
        session.reset()
        yield {NAME: session_without_history(turn(4))}
        session.compact()
        yield {NAME: session_without_history(turn(4))}


def fork_without_a_copy(directory: Path) -> Iterator[Mapping[str, Content]]:
    """The history of a fork starts in another file: wherever the fork is, the turn it starts from is, too."""
    with counted_ids():
        parent = Session.open(directory / NAME)
        parent.append(turn(1))
        parent.append(turn(2))
        parent.close()
        name = f"{parent._journal.header.file_id.hex()}.kvsnap"
        (directory / NAME).rename(directory / name)
        yield {name: turn(2)}
        fork = Path(fork_file(str(directory / name), n_tokens=3).path)
        yield {name: turn(2), fork.name: replace(turn(1), metadata=turn(2).metadata)}
        with Session.open(fork) as session:
            session.append(OTHER)
            yield {name: turn(2), fork.name: OTHER}
            session.truncate(2)
            cut = replace(snapshot(TOKENS[:2], **SHAPE), logits=None, metadata=OTHER.metadata)
            yield {name: turn(2), fork.name: cut}
        with Session.open(directory / name) as session:
            session.append(turn(3))
            yield {name: turn(3), fork.name: cut}
        with Session.open(fork) as session:
            inside = replace(snapshot((*TOKENS[:1], 7, 8), **SHAPE), metadata=cut.metadata)
            session.append(inside, after=1)  # inside of what is the parent's
            yield {name: turn(3), fork.name: inside}


def fork_of_a_turn_that_was_not_synced(directory: Path) -> Iterator[Mapping[str, Content] | Mark]:
    """The writer is killed between the COMMIT and the last sync; what the next process sees is forked."""
    with counted_ids():
        parent = Session.open(directory / NAME)
        parent.append(turn(1))
        parent.close()
        name = f"{parent._journal.header.file_id.hex()}.kvsnap"
        (directory / NAME).rename(directory / name)
        yield {name: turn(1)}
        with Session.open(directory / name) as session, mock.patch.object(Journal, "_cut_back", return_value=None):
            stopped_append(session)
        fork = Path(fork_file(str(directory / name)).path)
        yield {name: OTHER, fork.name: OTHER}


def save(directory: Path) -> Iterator[Mapping[str, Content]]:
    yield {NAME: None}
    for number in (1, 2, 3):
        kvsnap.save(turn(number), directory / NAME)
        yield {NAME: turn(number)}


def append_megabytes(directory: Path) -> Iterator[Mapping[str, Content]]:
    """Writes that take their time, so that one may be hit in the middle."""
    made = [snapshot(tuple(range(n)), heads=8, dim=64, vocab=4) for n in (8, 1500)]
    with Session.open(directory / NAME) as session:
        session.append(made[0])
        yield {NAME: made[0]}
        session.append(made[1])
        yield {NAME: made[1]}


def save_megabytes(directory: Path) -> Iterator[Mapping[str, Content]]:
    made = [snapshot(tuple(range(n)), heads=8, dim=64, vocab=4) for n in (8, 1500)]
    kvsnap.save(made[0], directory / NAME)
    yield {NAME: made[0]}
    kvsnap.save(made[1], directory / NAME)
    yield {NAME: made[1]}


def write_and_remove(directory: Path) -> Iterator[Mapping[str, Content]]:
    """What pointers from names to files are made of."""
    write_whole(directory / "other", b"stays")
    yield {"name": None, "other": b"stays"}
    files.make_directory(directory / "sub" / "sub")
    yield {"name": None, "other": b"stays"}
    write_whole(directory / "sub" / "sub" / "name", b"one", new=True)
    yield {"sub/sub/name": b"one", "other": b"stays"}
    write_whole(directory / "sub" / "sub" / "name", b"two")
    yield {"sub/sub/name": b"two", "other": b"stays"}
    remove(directory / "sub" / "sub" / "name")
    yield {"sub/sub/name": None, "other": b"stays"}


# -- what comes after a crash -----------------------------------------------------------------------------------


def go_on_with_the_session(directory: Path) -> Iterator[Mapping[str, Content]]:
    """Open at what the crash left, append, verify, cut back: what fell off is told, and nothing of it comes back."""
    path = directory / NAME
    if not path.exists():
        yield {NAME: None}
        Session.open(path).close()
        yield {NAME: EMPTY}
        return
    size = path.stat().st_size
    report = verify(path)
    with Session.open(path) as session:
        # A footer without its COMMIT may be all that a power cut left of a turn, or damage of one that was published.
        assert report.ok == (not session.notes), report.damages
        assert path.stat().st_size == size, "opening changed the file"
        assert session.dropped == report.dropped == size - session.nbytes
        assert bool(session.dropped) == bool(report.notes)
        assert set(session.notes) <= set(report.notes)
        TOLD["torn tail"] += bool(session.dropped)
        TOLD["unreadable commit"] += bool(session.notes)
        found = session.load()
        yield {NAME: found}
        width = found.layers[0].tensors[0].spec.shape[-1] if found.layers else 4
        made = snapshot(
            (*found.tokens, 11, 12), heads=1, dim=width, vocab=4 if width == 4 else 0, recurrent=is_recurrent(found),
        )  # fmt: skip
        if session.notes:
            with pytest.raises(DamagedError, match="was published"):
                session.append(made)
            session.rewind(session.n_commits)  # on purpose
            yield {NAME: found}
        session.append(made)
        yield {NAME: replace(made, metadata=found.metadata, messages=found.messages)}
        assert session.nbytes == path.stat().st_size, "the torn tail is gone"
        report = verify(path)
        assert report.ok
        assert not report.damages, report.damages
        assert not report.dropped
        assert [t.commit for t in session.history] == list(range(session.n_commits, 0, -1))[::-1]


def is_recurrent(found: Snapshot) -> bool:
    return any(t.spec.role == "recurrent" for t in found.tensors())


def save_again(directory: Path) -> Iterator[Mapping[str, Content]]:
    path = directory / NAME
    yield {NAME: native.load(path) if path.exists() else None}
    kvsnap.save(turn(4), path)
    assert verify(path).ok
    yield {NAME: turn(4)}


SCENARIOS: dict[str, tuple[Scenario, Scenario | None]] = {
    "create": (create, go_on_with_the_session),
    "append": (append, go_on_with_the_session),
    "append partial captures": (append_partial_captures, go_on_with_the_session),
    "append recurrent states": (append_recurrent, go_on_with_the_session),
    "truncate": (truncate, go_on_with_the_session),
    "append in place of turns": (append_in_place_of_turns, go_on_with_the_session),
    "reset": (reset, go_on_with_the_session),
    "rewrite of the index": (rewrite_of_the_index, go_on_with_the_session),
    "failed append, then a good one": (failed_append, go_on_with_the_session),
    "rewind": (rewind, go_on_with_the_session),
    "copy to a fork": (copy_to_a_fork, None),
    "compact": (compact, go_on_with_the_session),
    "fork without a copy": (fork_without_a_copy, None),
    "fork of a turn that was not synced": (fork_of_a_turn_that_was_not_synced, None),
    "save": (save, save_again),
    "write and remove": (write_and_remove, None),
}

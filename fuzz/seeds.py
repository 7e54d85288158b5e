"""Native files to start from: sessions of every operation, forks, encrypted snapshots, and damaged copies.

As a script it makes tests/data/forks: a session, a fork of it, and a fork of the fork. Run once; inputs name their ids.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

from kvsnap.formats import native
from kvsnap.formats.native import Lock, journal
from kvsnap.formats.native.base import session_file_name
from kvsnap.formats.native.fork import fork_file
from kvsnap.session import Session
from parts import DATA, KEY, scratch
from sealing import split
from synthetic import SAMPLER, counted, snapshot, tiny

FORKS = DATA / "forks"
IDS = tuple(range(21, 81))
_SMALL = {"heads": 1, "dim": 2, "vocab": 2}


@contextmanager
def _small_tails() -> Iterator[None]:
    """An INDEX behind three entries, where a writer would put it behind 33."""
    with ExitStack() as stack:
        stack.enter_context(counted())
        stack.enter_context(mock.patch.object(journal, "max", create=True, return_value=2))
        yield


def session(*, recurrent: bool = False) -> bytes:
    """A lossy turn, notes, a cut inside a turn, a rewind, a reset, an INDEX and a tail."""
    with scratch() as directory, _small_tails():
        path = Path(directory) / "a.kvsnap"
        with Session.open(path) as made:

            def turn(n: int, codec: str = "exact", **fields: object) -> None:
                start = 0 if recurrent else made.n_rows
                made.append(
                    snapshot(IDS[:n], start=start, n_prompt=2, recurrent=recurrent, **_SMALL, **fields),
                    codec=codec,
                )

            turn(3, n_pending=1, text="on", sampler=SAMPLER, metadata={"a": "1"})
            turn(6, "q8", text="one two", token_offset=9)
            if not recurrent:
                made.truncate(5)
                turn(7, text="one two t", metadata={"a": "2"})
                made.rewind(3)
                turn(7)
                turn(8, text="one")
                turn(9, text="one four")
                turn(10)
        return path.read_bytes()


def long_session(n: int = 34) -> bytes:
    """As many turns as put an INDEX into the file, none with more than one row."""
    with scratch() as directory, counted():
        path = Path(directory) / "a.kvsnap"
        with Session.open(path) as made:
            for i in range(1, n + 1):
                made.append(snapshot(IDS[:i], start=i - 1, heads=1, dim=1, vocab=0, dtype="int8", n_prompt=2))
        return path.read_bytes()


def encrypted() -> list[bytes]:
    """A snapshot under each cipher."""
    with counted():
        return [native.dumps(tiny(), lock=Lock(KEY, cipher=cipher)) for cipher in ("aes-256-gcm", "chacha20-poly1305")]


def damaged(raw: bytes) -> Iterator[tuple[str, bytes]]:
    """Copies with one changed byte in each kind of place, cut off, and with bytes behind the end."""
    _, pieces, _ = split(raw)
    places = {"magic": 3, "required": 16, "salt": 58}
    for piece in pieces:
        places[f"head-{piece.kind}"] = piece.at + 20  # the last one of each kind stays
        if piece.payload:
            places[f"payload-{piece.kind}"] = piece.at + 64 + 12
            places[f"last-{piece.kind}"] = piece.at + 64 + len(piece.payload) - 1
    for name, place in places.items():
        yield name, raw[:place] + bytes([raw[place] ^ 0x41]) + raw[place + 1 :]
    yield "cut", raw[:-96]
    yield "torn", raw + raw[128:400]
    yield "hole", raw[: len(raw) // 2 & ~63] + bytes(128) + raw[(len(raw) // 2 & ~63) + 128 :]


def forks() -> tuple[Path, Path, Path]:
    """The committed files: the parent, a fork of it, a fork of the fork."""
    found = {}
    for path in FORKS.glob("*.kvsnap"):
        raw = path.read_bytes()
        _, pieces, _ = split(raw)
        base = next((p.payload for p in pieces if p.kind == 8), None)
        found[struct.unpack_from("<I", base, 88)[0] if base else 0] = path
    return found[0], found[1], found[2]


def write_forks() -> None:
    """Make the committed files."""
    with scratch() as directory, _small_tails():
        path = Path(directory) / "a.kvsnap"
        with Session.open(path) as made:
            for n in range(2, 9, 2):
                made.append(snapshot(IDS[:n], start=made.n_rows, n_prompt=2, text="text"[: n // 2], **_SMALL))
        names = [path.rename(path.with_name(session_file_name(path.read_bytes()[40:56])))]
        for depth in (1, 2):
            made_fork = Path(fork_file(str(names[-1]), n_tokens=7 if depth == 1 else None).path)
            with Session.open(made_fork) as made:
                for n in (9 + 3 * depth, 10 + 3 * depth):
                    made.append(snapshot(IDS[:n], start=made.n_rows, n_prompt=2, metadata={"a": "b"}, **_SMALL))
            names.append(made_fork)
        FORKS.mkdir(exist_ok=True)
        for name in names:
            (FORKS / name.name).write_bytes(name.read_bytes())


if __name__ == "__main__":
    write_forks()

"""The library: searching, listing and forking among many sessions, and what a turn costs in it."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import common
import numpy as np
from common import Figure, Work, interleave, ms, ratio

from kvsnap import Library, Session


def tokens_of(session: int, turns: int, turn: int) -> tuple[int, ...]:
    """Token ids of a session: a third in common with all, a third with its group of ten, the rest its own."""
    n = turns * turn
    seeds = (0, 1_000 + session // 10, 2_000 + session)
    pieces = [np.random.default_rng(seed).integers(0, 40_000, n // 3 + 1) for seed in seeds]
    return tuple(int(i) for i in np.concatenate(pieces)[:n])


def filled(directory: Path, sessions: int, turns: int, turn: int) -> Library:
    made = common.specs(layers=1, heads=1, dim=4)
    library = Library(directory)
    with common.without_sync():
        for number in range(sessions):
            ids = tokens_of(number, turns, turn)
            with library.open(f"session {number}") as session:
                for end in range(turn, turns * turn + 1, turn):
                    values = common.arrays(turn, layers=1, heads=1, dim=4)
                    new = common.snapshot(values, made, start=end - turn)
                    session.append(replace(new, tokens=ids[:end]))
    return library


def searching(library: Library, sessions: int, turns: int, turn: int, rounds: int) -> list[Figure]:
    wanted = sessions // 2
    query = (*tokens_of(wanted, turns, turn), 7, 7, 7)
    found = library.find(query, common.IDENTITY)
    assert found is not None
    assert found.name == f"session {wanted}"
    assert found.n_tokens == turns * turn
    read, _ = common.reads_of(lambda: library.find(query, common.IDENTITY))
    numbers = iter(range(10**6))
    works = {
        "find": Work(lambda: library.find(query, common.IDENTITY)),
        "list": Work(library.list),
        "fork": Work(lambda: library.fork("session 0", f"fork {next(numbers)}")),
    }
    times = interleave(works, rounds)
    n = sessions * turns
    return [
        Figure(f"find the longest common history among {sessions} sessions", f"{ms(times['find']):.1f} ms",
               f"{len(query):,} ids; {n:,} turns; {read / 1e3:.0f} kB read, of the catalogue"),
        Figure("  list them", f"{ms(times['list']):.1f} ms"),
        Figure("  fork one", f"{ms(times['fork']):.1f} ms", "with its name, durable"),
    ]  # fmt: skip


def appending(directory: Path, n_rows: int, rounds: int) -> list[Figure]:
    """A turn of 64 tokens in a library, and in a file alone."""
    made, values = common.specs(), common.arrays(64)
    with ExitStack() as stack:
        library = stack.enter_context(Library(directory / "one"))
        places: dict[str, Session] = {
            "library": stack.enter_context(library.open("talk")),
            "alone": stack.enter_context(Session.open(directory / "alone")),
        }
        with common.without_sync():
            for session in places.values():
                for start in range(0, n_rows, 64):
                    session.append(common.snapshot(values, made, start=start))
        common.settle()

        def append(session: Session) -> None:
            session.append(common.snapshot(values, made, start=session.n_rows))

        works = {name: Work(lambda s=session: append(s), common.settle) for name, session in places.items()}
        times = interleave(works, rounds)
    value = 1 / ratio(times["alone"], times["library"])
    told = f"{ms(times['library']):.1f} against {ms(times['alone']):.1f} ms, with the syncs of both"
    return [Figure(f"append 64 tokens to {n_rows:,} in a library, of the time in a file alone", f"{value:.2f} x", told)]


def measure(directory: Path, options: argparse.Namespace) -> list[Figure]:
    sessions, turns, turn = (12, 3, 20) if options.small else (200, 10, 100)
    rounds = 2 if options.small else options.rounds or 9
    with filled(directory / "many", sessions, turns, turn) as library:
        found = searching(library, sessions, turns, turn, rounds)
    return [*found, *appending(directory, 256 if options.small else 8192, rounds)]


def main() -> None:
    options = common.parser(__doc__).parse_args()
    common.run(options, lambda directory: measure(directory, options), "xxhash")


if __name__ == "__main__":
    main()

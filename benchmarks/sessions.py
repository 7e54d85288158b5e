"""Sessions: opening a long one, adding a turn to a short and a long one, reading many small spans."""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack, nullcontext
from pathlib import Path

import common
import numpy as np
from common import Figure, Work, interleave, ms, rate, ratio

import kvsnap
from kvsnap import Session
from kvsnap.tensors import read_all


def grown(path: Path, n_spans: int, rows: int, **shape: int) -> None:
    """Write a session of so many turns of so many rows."""
    made = common.specs(**shape)
    values = common.arrays(rows, **shape)
    with common.without_sync(), Session.open(path) as session:
        for number in range(n_spans):
            session.append(common.snapshot(values, made, start=number * rows))


def spans(directory: Path, n_spans: int, rounds: int) -> list[Figure]:
    many, one, sealed = directory / "many", directory / "one", directory / "sealed"
    grown(many, n_spans, 16)
    whole = common.arrays(16)
    values = [np.ascontiguousarray(np.tile(v, (1, n_spans, 1))) for v in whole]
    made = common.snapshot(values, common.specs())
    size = made.nbytes
    with common.without_sync(), Session.open(one) as session:
        session.append(made)
    kvsnap.save(made, sealed, sync=False)
    outs = [np.zeros_like(v) for v in values]

    def fill(path: Path, workers: int) -> None:
        found = kvsnap.load(path)
        read_all(list(zip(found.tensors(), outs, strict=True)), workers=workers)

    opened = kvsnap.load(many)

    def fill_opened() -> None:
        read_all(list(zip(opened.tensors(), outs, strict=True)), workers=2)

    files = {"many": many, "one": one, "sealed": sealed}
    works = {f"{name} {n}": Work(lambda p=path, n=n: fill(p, n)) for name, path in files.items() for n in (1, 2)}
    times = interleave(works | {"opened 2": Work(fill_opened), "load": Work(lambda: kvsnap.load(many))}, rounds)
    for out in outs:
        out.fill(0)
    fill(many, 2)
    assert all(np.array_equal(a, b) for a, b in zip(outs, values, strict=True))
    out = []
    for threads in (1, 2):
        for base, words in (("one", "a session of one span"), ("sealed", "a sealed file")):
            value = ratio(times[f"{base} {threads}"], times[f"many {threads}"])
            told = f"{rate(size, times[f'many {threads}'])} against {rate(size, times[f'{base} {threads}'])}"
            what = f"open and restore {n_spans} spans of 16 tokens, {threads} thread(s), of {words}"
            out.append(Figure(what, f"{value:.2f} x", told, ">= 0.5", value >= 0.5))
    value = ratio(times["one 2"], times["opened 2"])
    told = f"{rate(size, times['opened 2'])}; opening {n_spans} tables takes {ms(times['load']):.0f} ms"
    out.append(
        Figure("the same, opened before, 2 threads, of one span", f"{value:.2f} x", told, ">= 0.5", value >= 0.5)
    )
    return out


def opening(directory: Path, n_turns: int, rounds: int) -> list[Figure]:
    path = directory / "turns"
    # Few bytes a row, as many tensors as a real one: what is opened does not depend on the rows.
    grown(path, n_turns, 1, heads=1, dim=4)

    def opened() -> None:
        Session.open(path).close()

    times = interleave({"open": Work(opened), "load": Work(lambda: kvsnap.load(path))}, max(2, rounds))
    nbytes, calls = common.reads_of(opened)
    load_bytes, load_calls = common.reads_of(lambda: kvsnap.load(path))
    taken = ms(times["open"])
    return [
        Figure(f"open a session of {n_turns} turns", f"{taken:.1f} ms", "", "< 50 ms", taken < 50),
        Figure("  bytes read", f"{nbytes / 1e6:.2f} MB", f"in {calls} reads", "< 1 MB", nbytes < 1e6),
        Figure(
            "  load it (the tables of all turns)", f"{ms(times['load']):.0f} ms",
            f"{load_bytes / 1e6:.1f} MB in {load_calls} reads",
        ),
    ]  # fmt: skip


def appending(directory: Path, history: dict[str, int], turn: int, rounds: int) -> list[Figure]:
    """Append a turn to each history in turn, so that a busy disk meets all of them."""
    made, values = common.specs(), common.arrays(256)
    logits = np.zeros(common.VOCAB, np.float32)
    few = [np.ascontiguousarray(v[:, :turn]) for v in values]
    rows = sum(v.nbytes for v in few)
    beyond: dict[str, list[int]] = {}
    with ExitStack() as stack:
        sessions = {}
        for name, n_rows in history.items():
            session = sessions[name] = stack.enter_context(Session.open(directory / name))
            with common.without_sync():
                for start in range(0, n_rows, 256):
                    session.append(common.snapshot(values, made, start=start))
        common.settle()

        def append(name: str, *, sync: bool) -> None:
            with nullcontext() if sync else common.without_sync():
                report = sessions[name].append(coming[name])
            beyond.setdefault(name, []).append(report.nbytes - rows - logits.nbytes)

        coming: dict[str, kvsnap.Snapshot] = {}

        def prepare(name: str, *, sync: bool) -> None:
            # What an engine hands over: the new rows, and all ids.
            coming[name] = common.snapshot(few, made, start=sessions[name].n_rows, logits=logits)
            if sync:
                common.settle()

        works = {
            (name, sync): Work(
                lambda name=name, sync=sync: append(name, sync=sync),
                lambda name=name, sync=sync: prepare(name, sync=sync),
            )
            for name in history
            for sync in (True, False)
        }
        times = interleave({f"{name} {sync}": work for (name, sync), work in works.items()}, rounds)
    out = []
    for sync in (True, False):
        words = "with two syncs" if sync else "without sync"
        first, *others = history
        taken = ms(times[f"{first} {sync}"])
        told = f"{(rows + logits.nbytes) / 1e6:.1f} MB of rows and logits"
        out.append(Figure(f"append {turn} tokens to {first}, {words}", f"{taken:.1f} ms", told))
        for name in others:
            value = 1 / ratio(times[f"{first} {sync}"], times[f"{name} {sync}"])
            told = f"{ms(times[f'{name} {sync}']):.1f} ms"
            what = f"  the same to {name}, of the time to {first}"
            out.append(Figure(what, f"{value:.2f} x", told, "0.8 to 1.2", 0.8 <= value <= 1.2))
    for name, found in beyond.items():
        value = statistics.mean(found)
        told = f"mean of {len(found)} appends, at most {max(found) / 1024:.1f} KiB"
        what = f"  bytes beyond rows and logits, to {name}"
        out.append(Figure(what, f"{value / 1024:.1f} KiB", told, "<= 16 KiB", value <= 16384))
    return out


def measure(directory: Path, options: argparse.Namespace) -> list[Figure]:
    rounds = 2 if options.small else options.rounds or 15
    if options.small:
        history = {"256 tokens": 256, "512 tokens": 512}
        return [*spans(directory, 20, 2), *opening(directory, 50, 2), *appending(directory, history, 16, rounds)]
    history = {"1k tokens": 1 << 10, "32k tokens": 1 << 15}
    return [
        *appending(directory, history, 64, rounds),
        *opening(directory, 10_000, rounds),
        *spans(directory, 1000, max(3, rounds // 2)),
    ]


def main() -> None:
    options = common.parser(__doc__).parse_args()
    common.run(options, lambda directory: measure(directory, options), "xxhash")


if __name__ == "__main__":
    main()

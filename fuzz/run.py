"""Fuzz a reader: `run.py READER SECONDS`; or `run.py READER --minimise` for the committed corpus.

The fuzzer runs in a process of its own (`--inside`). What breaks the rule is kept under build/fuzz/READER/findings, one
input for each place in the code; the exit status is 1 when there is any.
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
READERS = ("mlxkv", "colikv", "safetensors", "native", "fork", "encrypted")
MEMORY, SECONDS, LENGTH = 512 << 20, 4.0, 16 << 10
LENGTHS = {"native": 72 << 10}  # a session of as many turns as put an INDEX into the file
CORPUS_BYTES = {"native": 150_000, "encrypted": 60_000}  # of the committed corpus of one reader; else 80,000


class TooLong(BaseException):
    """Raised in the middle of an input that takes too long. Nothing catches it as an error of its own."""


class Guard:
    """Runs inputs and keeps those that let out anything but `KvsnapError`, or took too long."""

    def __init__(self, one_input: Any, findings: Path) -> None:
        from kvsnap.errors import KvsnapError

        self._one_input, self._findings, self._allowed = one_input, findings, KvsnapError
        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
        signal.signal(signal.SIGVTALRM, self._too_long)

    @staticmethod
    def _too_long(*_: object) -> None:
        raise TooLong(f"more than {SECONDS} s of CPU time")

    def __call__(self, data: bytes) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        try:
            self._one_input(data)
        except self._allowed:
            pass
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 # what must not come out is what is looked for
            self._keep(data, error)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def _keep(self, data: bytes, error: BaseException) -> None:
        every = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<")]
        frames = [f for f in every if "kvsnap" in f.filename] if not isinstance(error, AssertionError) else every
        place = f"{Path(frames[-1].filename).stem}-{frames[-1].lineno}" if frames else "here"
        stem = self._findings / f"{type(error).__name__}-{place}"
        if stem.with_suffix(".bin").exists() and stem.with_suffix(".bin").stat().st_size <= len(data):
            return
        stem.with_suffix(".bin").write_bytes(data)
        stem.with_suffix(".txt").write_text("".join(traceback.format_exception(error)), encoding="utf-8")


def inside(reader: str, arguments: list[str]) -> None:
    import atheris

    with atheris.instrument_imports(include=["kvsnap"]):
        harness = import_module(f"read_{reader}")
    guard = Guard(harness.one_input, ROOT / "build" / "fuzz" / reader / "findings")
    options: dict[str, Any] = {}
    if hasattr(harness, "mutate"):
        options["custom_mutator"] = lambda data, size, seed: harness.mutate(data, size, seed, atheris.Mutate)
    # For a merge libFuzzer starts its first argument again, with the others and some of its own.
    atheris.Setup([os.environ["KVSNAP_FUZZ_AGAIN"], *arguments], guard, **options)
    atheris.Fuzz()


def start(reader: str, arguments: list[str]) -> str:
    """Run the fuzzer in a process of its own; return what it printed."""
    again = ROOT / "build" / "fuzz" / reader / "again.sh"
    again.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" --inside {reader} "$@"\n', encoding="utf-8")
    again.chmod(0o755)
    command = [str(again), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "KVSNAP_FUZZ_AGAIN": str(again)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, errors="replace"
    )
    if done.returncode:
        print(done.stderr[-4000:])
        raise SystemExit(f"fuzz {reader}: the fuzzer ended with {done.returncode}")
    return done.stdout + done.stderr


def length(reader: str) -> int:
    """The longest input of a reader."""
    return LENGTHS.get(reader, LENGTH)


def directories(reader: str) -> tuple[Path, Path, Path]:
    """The growing corpus, the seeds (made anew), and the committed corpus."""
    base = ROOT / "build" / "fuzz" / reader
    corpus, seeds, committed = base / "corpus", base / "seeds", ROOT / "tests" / "data" / "fuzz" / reader
    shutil.rmtree(seeds, ignore_errors=True)
    for each in (corpus, seeds, committed, base / "findings"):
        each.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(ROOT / "src"))
    for path in import_module(f"read_{reader}").seeds():
        shutil.copy(path, seeds / path.name)
    return corpus, seeds, committed


def fuzz(reader: str, seconds: int) -> int:
    shutil.rmtree(ROOT / "build" / "fuzz" / reader / "findings", ignore_errors=True)  # those of the run before
    corpus, seeds, committed = directories(reader)
    limits = [f"-max_total_time={seconds}", f"-max_len={length(reader)}", "-timeout=60", "-rss_limit_mb=3000"]
    limits += ["-len_control=0"]
    said = start(reader, [*limits, str(corpus), str(seeds), str(committed)])
    coverage = [int(found) for found in re.findall(r"cov: (\d+)", said)]
    runs = [int(found) for found in re.findall(r"^#(\d+)\s", said, re.MULTILINE)]
    findings = sorted((corpus.parent / "findings").glob("*.txt"))
    grown = f"{coverage[0] if coverage else 0} -> {max(coverage, default=0)}"
    print(
        f"fuzz {reader}: {max(runs, default=0)} executions in {seconds} s, coverage {grown}, "
        f"{len(list(corpus.iterdir()))} inputs kept, {len(findings)} findings"
    )
    for path in findings:
        print(f"  {path.relative_to(ROOT)}: {path.read_text(encoding='utf-8').strip().splitlines()[-1][:160]}")
    return 1 if findings else 0


def minimise(reader: str) -> int:
    """Add to the committed corpus, smallest first, what covers more than the golden files and it do."""
    corpus, seeds, committed = directories(reader)
    merged = corpus.parent / "merged"
    shutil.rmtree(merged, ignore_errors=True)
    shutil.copytree(seeds, merged)
    old = [path for path in committed.iterdir() if not path.name.startswith("finding-")]
    for path in committed.iterdir():
        shutil.copy(path, merged / path.name)
    before = {path.name for path in merged.iterdir()}
    start(reader, ["-merge=1", "-use_counters=0", f"-max_len={length(reader)}", str(merged), str(corpus)])
    added = sorted((p for p in merged.iterdir() if p.name not in before), key=lambda p: p.stat().st_size)
    room = CORPUS_BYTES.get(reader, 80_000) - sum(path.stat().st_size for path in old)
    count = 0
    for path in added:
        data = path.read_bytes()
        if len(data) <= room:
            (committed / f"{hashlib.sha256(data).hexdigest()[:16]}.bin").write_bytes(data)
            room, count = room - len(data), count + 1
    print(f"fuzz {reader}: {count} of {len(added)} new inputs added to {committed.relative_to(ROOT)}")
    return 0


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--inside"]:
        inside(arguments[1], arguments[2:])
        return 0
    reader, what = arguments
    if reader not in READERS:
        raise SystemExit(f"no such reader: {reader}; there are {', '.join(READERS)}")
    return minimise(reader) if what == "--minimise" else fuzz(reader, int(what))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

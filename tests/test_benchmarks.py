"""Each benchmark runs, small, and prints its table: what its figures rest on is asserted inside. No time is tested."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
ENGINE = {"conversations.py", "identity.py", "resume.py", "server.py"}
LIBRARY = {"common.py"}
OLDER = {"codec_speed.py"}  # has options of its own


def ran(name: str, directory: Path, *options: str) -> str:
    path = os.pathsep.join(filter(None, map(os.path.abspath, filter(None, sys.path))))
    done = subprocess.run(
        [sys.executable, BENCHMARKS / name, *options],
        cwd=directory, env=os.environ | {"PYTHONPATH": path, "TMPDIR": str(directory)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list(directory.glob("kvsnap-*")) == []
    return done.stdout


def marked(name: str) -> Any:
    return pytest.param(name, marks=[pytest.mark.engine, pytest.mark.newest] if name in ENGINE else [])


SCRIPTS = sorted(p.name for p in BENCHMARKS.glob("*.py") if p.name not in LIBRARY | OLDER)


@pytest.mark.parametrize("name", [marked(name) for name in SCRIPTS])
def test_it_runs_small_and_says_what_it_measured(tmp_path: Path, name: str) -> None:
    told = json.loads(ran(name, tmp_path, "--small", "--json"))
    assert told["machine"]["small"] == "True"
    assert {"cpu", "python", "numpy", "load"} <= told["machine"].keys()
    assert told["figures"]
    for figure in told["figures"]:
        assert figure["value"].split()[0].replace(".", "", 1).replace("-", "", 1).isdigit(), figure
        assert (figure["met"] is None) == (figure["target"] == ""), figure


def test_the_table_names_target_and_verdict(tmp_path: Path) -> None:
    lines = ran("import_time.py", tmp_path, "--small").splitlines()
    assert lines[0].startswith("cpu ")
    assert lines[1].split() == ["what", "measured", "target", "met", "from"]
    row = next(line for line in lines if line.startswith("import kvsnap"))
    assert "< 200 ms" in row
    assert "  yes  " in row or "  NO   " in row


def test_the_older_benchmark_runs(tmp_path: Path) -> None:
    told = json.loads(ran("codec_speed.py", tmp_path, "--mib", "1", "--rounds", "1", "--rows", "16", "--json"))
    assert {row["codec"] for row in told["rows"]} == {"memcpy", "exact", "q8"}


def test_every_script_is_known_here() -> None:
    names = {p.name for p in BENCHMARKS.glob("*.py")}
    assert (
        names >= {"file.py", "sessions.py", "peers.py", "resume.py", "import_time.py", "design001.py"} | LIBRARY | OLDER
    )


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("benchmark_common", BENCHMARKS / "common.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_works_are_timed_in_turning_order_and_warmed_once(common: Any) -> None:
    seen: list[str] = []
    works = {
        name: common.Work(lambda n=name: seen.append(n), lambda n=name: seen.append(f"before {n}")) for name in "abc"
    }
    times = common.interleave(works, 3)
    assert {name: len(taken) for name, taken in times.items()} == {"a": 3, "b": 3, "c": 3}
    runs = "".join(s for s in seen if len(s) == 1)
    assert runs[3:] == "abc" + "bca" + "cab"
    assert sorted(runs[:3]) == ["a", "b", "c"]
    assert seen[0::2] == [f"before {s}" for s in seen[1::2]]


def test_the_ratio_is_the_median_of_pairs_not_of_times(common: Any) -> None:
    # A slow second round met both alike.
    assert common.ratio([1.0, 10.0, 1.0], [2.0, 20.0, 2.0]) == 0.5
    assert common.ratio([1.0, 2.0, 30.0], [1.0, 1.0, 1.0]) == 2.0


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="Linux counts the bytes of a process")
def test_reads_are_counted(common: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(5000))
    nbytes, calls = common.reads_of(lambda: os.close(_read(tmp_path / "a", 3000)))
    assert (nbytes, calls) == (3000, 1)


def _read(path: Path, count: int) -> int:
    fd = os.open(path, os.O_RDONLY)
    assert len(os.pread(fd, count, 0)) == count
    return fd

"""The inputs that fuzzing kept (fuzz/README.md): each is read in every way, and only `KvsnapError` comes out.

`finding-*` are the inputs that once let something else out. The files that fuzzing starts from are read, too. No
fuzzer is needed. As a script it reads the files of one reader in a process with little memory.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import traceback
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kvsnap.errors import KvsnapError

HERE = Path(__file__).resolve().parent
FUZZ = HERE.parent / "fuzz"
CORPUS = HERE / "data" / "fuzz"
READERS = ("mlxkv", "colikv", "safetensors", "native", "fork", "encrypted")
MEMORY = 512 << 20


def replay(one_input: Any, files: list[Path]) -> list[str]:
    """Read each file; return what came out that may not."""
    wrong = []
    for path in files:
        try:
            one_input(path.read_bytes())
        except KvsnapError:
            continue
        except BaseException:  # noqa: BLE001 # what must not come out is what is looked for
            wrong.append(f"{path.name}: {traceback.format_exc()}")
    return wrong


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit of memory is that of Linux")
@pytest.mark.parametrize("reader", READERS)
def test_nothing_but_our_errors_comes_out(reader: str) -> None:
    done = subprocess.run(
        [sys.executable, __file__, reader], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), str(FUZZ)])},
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert int(done.stdout.split()[0]) >= 20, "the corpus is there"


@pytest.mark.parametrize("error", [ValueError, MemoryError, RecursionError, AssertionError])
def test_another_error_is_told(error: type[BaseException], tmp_path: Path) -> None:
    # Negative control: an error that is no KvsnapError, although some are ValueErrors too.
    def one_input(data: bytes) -> None:
        raise error("out of the reader") if data == b"bad" else KvsnapError("refused")

    for name in ("good", "bad"):
        (tmp_path / name).write_bytes(name.encode())
    wrong = replay(one_input, sorted(tmp_path.iterdir()))
    assert len(wrong) == 1
    assert wrong[0].startswith("bad: ")
    assert "out of the reader" in wrong[0]


# Faults put into what the native targets call, and files that must show each of them: what is checked can fail.
FAULTS = ("verify_misses", "verify_invents", "load_differs", "repair_forgets", "repair_loses", "inspect_refuses")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="as above")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told(fault: str) -> None:
    done = subprocess.run(
        [sys.executable, __file__, "--fault", fault], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), str(FUZZ)])},
    )  # fmt: skip
    assert done.returncode == 1, (done.stdout + done.stderr)[-3000:]
    assert "AssertionError" in done.stdout


def with_fault(fault: str) -> int:
    """Read a whole session and damaged copies of it while one function says what is not true."""
    import kvsnap
    import read_native
    from kvsnap.formats.native import Damage

    files = [path for path in read_native.seeds() if path.stem in {"session", "damaged-last-3", "damaged-head-4"}]
    assert replay(read_native.one_input, files) == []
    verify, load, inspect, repair = kvsnap.verify, kvsnap.load, kvsnap.inspect, kvsnap.repair

    def changed_load(*args: Any, **options: Any) -> Any:
        found = load(*args, **options)
        return replace(found, tokens=(*found.tokens[:-1], 99)) if Path(args[0]).name == "out" else found

    def changed_verify(*args: Any, **options: Any) -> Any:
        found = verify(*args, **options)
        if fault == "verify_misses":
            return replace(found, damages=())
        place = {tuple(range(21, 31)): 10944}.get(kvsnap.load(args[0]).tokens, 0)
        return replace(found, damages=(Damage("invented", place, live=True),))

    def changed_repair(source: Any, out: Any, **options: Any) -> Any:
        if fault == "repair_loses":
            return replace(repair(source, out, **options), complete=False, lost=(Damage("lost", 0, live=True),))
        from kvsnap.session import Session

        found = repair(source, out, **options)
        with Session.open(out) as session:
            session.truncate(3)
        return replace(found, n_tokens=3, n_rows=2, n_pending=1)

    def refused(*_: Any, **__: Any) -> Any:
        raise KvsnapError("no")

    name, function = {
        "load_differs": ("load", changed_load), "inspect_refuses": ("inspect", refused),
        "repair_forgets": ("repair", changed_repair), "repair_loses": ("repair", changed_repair),
    }.get(fault, ("verify", changed_verify))  # fmt: skip
    setattr(kvsnap, name, function)
    assert inspect is not refused
    wrong = replay(read_native.one_input, files)
    print(*wrong, sep="\n")
    return 1 if wrong else 0


def main(reader: str) -> int:
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    harness = import_module(f"read_{reader}")
    files = sorted((CORPUS / reader).iterdir()) + harness.seeds()
    wrong = replay(harness.one_input, files)
    print(len(files), "read", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(with_fault(sys.argv[2]) if sys.argv[1] == "--fault" else main(sys.argv[1]))

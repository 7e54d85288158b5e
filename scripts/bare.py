"""Check the installed wheel without extras: bare.py WHEEL GOLDEN.

Runs in an environment that holds the wheel and its core dependencies, outside the source tree. The time of
the import is printed for a reader; it decides nothing.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

TIMED_IMPORT = "import time; t = time.perf_counter(); import kvsnap; print(time.perf_counter() - t)"
HEAVY = "{'torch', 'transformers', 'matplotlib'}"
NO_TORCH = f"import sys, kvsnap; kvsnap.load; print(','.join({HEAVY} & set(sys.modules)))"


def run(*command: str, cwd: str) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        sys.exit(f"bare: {' '.join(command)} gave {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def check_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    stray = [n for n in names if not n.startswith(("kvsnap/", "kvsnap-"))]
    assert not stray, f"the wheel holds more than the package: {stray}"
    for needed in ("kvsnap/__init__.py", "kvsnap/py.typed"):
        assert needed in names, f"the wheel lacks {needed}"
    print(f"bare: {wheel.name} holds {len(names)} files, the package only")


def main() -> None:
    wheel, golden = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    check_wheel(wheel)
    assert importlib.util.find_spec("torch") is None, "torch is installed here, so this would prove nothing"
    kvsnap = str(Path(sys.executable).parent / "kvsnap")
    with tempfile.TemporaryDirectory() as cwd:
        where = run(sys.executable, "-c", "import kvsnap; print(kvsnap.__file__)", cwd=cwd)
        assert "site-packages" in where, f"kvsnap was imported from {where.strip()}, not from the wheel"
        loaded = run(sys.executable, "-c", NO_TORCH, cwd=cwd).strip()
        assert not loaded, f"import kvsnap loads {loaded}"
        times = [float(run(sys.executable, "-c", TIMED_IMPORT, cwd=cwd)) for _ in range(5)]
        print(f"bare: import kvsnap takes {statistics.median(times) * 1000:.0f} ms (median of 5 processes)")
        assert "Usage" in run(kvsnap, "--help", cwd=cwd), "kvsnap --help prints no usage"
        for command in ("info", "verify", "cat"):
            assert run(kvsnap, command, str(golden), cwd=cwd).strip(), f"kvsnap {command} printed nothing"
            print(f"bare: kvsnap {command} works")
        assert importlib.util.find_spec("cryptography") is None, "cryptography is installed here"
        told = run(kvsnap, "verify", str(golden.with_name("tiny_encrypted.kvsnap")), cwd=cwd)
        assert "whole from outside" in told, told
        print("bare: an encrypted file is verified without the extra")


if __name__ == "__main__":
    main()

"""The inputs that fuzzing kept (fuzz/README.md): each is read in every way, and only `KvsnapError` comes out.

`finding-*` are the inputs that once let something else out. No fuzzer is needed. As a script it reads the files of one
reader in a process with little memory.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kvsnap.errors import KvsnapError

HERE = Path(__file__).resolve().parent
FUZZ = HERE.parent / "fuzz"
CORPUS = HERE / "data" / "fuzz"
READERS = ("mlxkv", "colikv", "safetensors", "native")
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


def main(reader: str) -> int:
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    files = sorted((CORPUS / reader).iterdir())
    wrong = replay(import_module(f"read_{reader}").one_input, files)
    print(len(files), "read", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

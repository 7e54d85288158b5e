"""`.coli_kv` files made to harm: opened in a process with little memory, and mutated at random.

Nothing but `KvsnapError` may come out of any way to read a file, and the numbers of a header must not decide how much
memory is taken before they are held against the bytes that are there.
"""

from __future__ import annotations

import json
import os
import re
import resource
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsnap.errors import KvsnapError
from kvsnap.formats.colikv import FORMAT, ColiFile, load, loads
from kvsnap.formats.native.write import MemorySink

HERE = Path(__file__).parent
DATA = HERE / "data" / "colikv"
MEMORY = 512 << 20
HUGE = 2**31 - 1
NAMES = [path.stem for path in sorted(DATA.glob("*.coli_kv"))]


def header(version: int = 1, **changes: int) -> bytes:
    numbers = {
        "n_layers": 3, "kv_lora": 8, "qk_rope": 4, "index_width": 0, "index_count": 0, "vocab": 1000, "count": 5,
        "word": {1: 0, 2: 1, 3: 260}[version],
    } | changes  # fmt: skip
    return struct.pack("<8s8i", f"COLIKV{version}\0".encode(), *numbers.values())


BODY = (DATA / "v1_basic.coli_kv").read_bytes()[40:]
DEEPSEEK = (DATA / "dsv4_window_only.coli_kv").read_bytes()


def deepseek(at: int, value: int) -> bytes:
    return DEEPSEEK[:at] + struct.pack("<i", value) + DEEPSEEK[at + 4 :]


# Bytes, the class of error ("" for a file that loads), and what the message must name.
CASES: dict[str, tuple[bytes, str, str]] = {
    "no_layers": (header(n_layers=0) + BODY, "FormatError", "n_layers.*at byte 8"),
    "negative_layers": (header(n_layers=-3) + BODY, "FormatError", "n_layers.*at byte 8"),
    "huge_layers": (header(n_layers=HUGE) + BODY, "FormatError", "n_layers.*at byte 8"),
    "many_layers_no_rows": (header(n_layers=4096), "", ""),
    "no_latent": (header(kv_lora=0) + BODY, "FormatError", "kv_lora.*at byte 12"),
    "negative_latent": (header(kv_lora=-8) + BODY, "FormatError", "kv_lora.*at byte 12"),
    "huge_latent": (header(kv_lora=HUGE) + BODY, "FormatError", "kv_lora.*at byte 12"),
    "negative_rope": (header(qk_rope=-4) + BODY, "FormatError", "qk_rope.*at byte 16"),
    "huge_rope": (header(qk_rope=HUGE) + BODY, "FormatError", "qk_rope.*at byte 16"),
    "rope_that_makes_a_record_negative": (header(kv_lora=8, qk_rope=-20) + BODY, "FormatError", "qk_rope.*at byte 16"),
    "negative_index_width": (header(index_width=-1) + BODY, "FormatError", "index width.*at byte 20"),
    "huge_index_width": (header(index_width=HUGE, index_count=1) + BODY, "FormatError", "index width.*at byte 20"),
    "negative_index_count": (header(index_count=-1) + BODY, "FormatError", "index layer count.*at byte 24"),
    "more_index_layers_than_layers": (header(index_width=6, index_count=4) + BODY, "FormatError", "index.*at byte 24"),
    "huge_index_count": (header(index_width=6, index_count=HUGE) + BODY, "FormatError", "index.*at byte 24"),
    "huge_index_count_unused": (header(index_count=HUGE) + BODY, "", ""),
    "negative_vocabulary": (header(vocab=-1) + BODY, "FormatError", "vocabulary size.*at byte 28"),
    "huge_count": (header(count=HUGE) + BODY, "", ""),
    "more_records_than_any_context": (
        header(n_layers=1, kv_lora=1, qk_rope=0, count=HUGE) + bytes(8 * (2**22 + 1)), "UnsupportedError", "at byte 32",
    ),
    "lowest_count": (header(count=-HUGE - 1) + BODY, "", ""),
    "largest_allowed_product": (header(n_layers=4096, kv_lora=1 << 20, qk_rope=1 << 20, count=HUGE) + BODY, "", ""),
    "product_beyond_64_bits_is_computed": (
        header(n_layers=4096, kv_lora=1 << 20, qk_rope=1 << 20, index_width=1 << 20, index_count=4096, count=HUGE),
        "", "",
    ),
    "fp8_huge_count": (header(2, count=HUGE) + bytes(64 * 3 + 1), "", ""),
    "packed_unknown_codec": (header(3, word=2 * 256 + 4) + BODY, "VersionError", "packed encoding.*at byte 36"),
    "packed_int4_of_3_bits": (header(3, word=256 + 3) + BODY, "VersionError", "at byte 36"),
    "packed_polar_of_no_bits": (header(3, word=0) + BODY, "VersionError", "at byte 36"),
    "packed_polar_of_9_bits": (header(3, word=9) + BODY, "VersionError", "at byte 36"),
    "packed_negative_word": (header(3, word=-1) + BODY, "VersionError", "at byte 36"),
    "packed_widths_that_are_no_power_of_two": (header(3, kv_lora=6, qk_rope=3) + bytes(5 * (4 + 3 * 12)), "", ""),
    "packed_very_wide": (header(3, kv_lora=1 << 20, qk_rope=0, n_layers=1, count=HUGE) + bytes(1 << 20), "", ""),
    "fp8_all_bytes_set": (header(2, count=3) + b"\xff" * 64 * 3, "", ""),
    "packed_all_bytes_set": (header(3, count=3) + b"\xff" * 46 * 3, "", ""),
    "version_0": (b"COLIKV0\0" + header()[8:] + BODY, "VersionError", "version"),
    "version_4": (b"COLIKV4\0" + header()[8:] + BODY, "VersionError", "version"),
    "magic_without_nul": (b"COLIKV1 " + header()[8:] + BODY, "FormatError", "magic"),
    "magic_alone": (b"COLIKV1\0", "DamagedError", "inside its header"),
    "three_bytes": (b"COL", "FormatError", "magic"),
    "empty": (b"", "FormatError", "magic"),
    "syntara_unknown_word": (b"SYNTARAK" + header(word=9000)[8:] + BODY, "VersionError", "at byte 36"),
    "watermark_negative": (header(2, word=-7) + BODY, "", ""),
    "watermark_beyond_the_count": (header(2, word=HUGE) + BODY, "", ""),
    "deepseek_short": (DEEPSEEK[:20], "DamagedError", "inside its header"),
    "deepseek_huge_token_count": (deepseek(32, HUGE), "FormatError", "token count.*at byte 32"),
    "deepseek_negative_token_count": (deepseek(32, -1), "FormatError", "token count.*at byte 32"),
    "deepseek_huge_layers": (deepseek(8, HUGE), "FormatError", "n_layers.*at byte 8"),
    "deepseek_huge_window": (deepseek(12, 1 << 20), "DamagedError", "layer 0: window"),
    "deepseek_negative_compressed": (deepseek(52, -1), "FormatError", "layer 0: number of compressed rows.*at byte 52"),
    "deepseek_many_compressed": (deepseek(52, 20), "FormatError", "layer 0: number of compressed rows"),
    "deepseek_cut": (DEEPSEEK[:-3], "DamagedError", "layer 1: indexer flag"),
    "deepseek_whole": (DEEPSEEK, "UnsupportedError", "COLIDV41"),
    **{name: ((DATA / f"{name}.coli_kv").read_bytes(), "*", "") for name in NAMES},
}  # fmt: skip


def read_everything(snapshot: Any) -> None:
    for tensor in snapshot.tensors():
        assert tensor.array.shape == tensor.shape
    json.dumps(dict(snapshot.source))


def again(path: Path) -> None:
    """Read, write as every encoding that takes it, and read that."""
    snapshot = load(path)
    for codec in ("float32", "fp8", "int4", "polar"):
        sink = MemorySink()
        try:
            FORMAT.write(snapshot, sink, codec=codec)
        except KvsnapError:
            continue
        read_everything(loads(bytes(sink.data)))


def in_place(path: Path) -> None:
    with ColiFile.open(path) as opened:
        read_everything(opened.load())
        opened.rows()


WAYS: dict[str, Callable[[Path], None]] = {
    "load": lambda path: read_everything(load(path)),
    "loads": lambda path: read_everything(loads(path.read_bytes())),
    "in place": in_place,
    "again": again,
    "losses": lambda path: str(FORMAT.losses(load(path), codec="fp8")) and None,
}


def main(directory: Path) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    for path in sorted(directory.iterdir()):
        before = path.read_bytes()
        for way, run in WAYS.items():
            outcome = {"error": "", "kvsnap": True, "message": ""}
            try:
                run(path)
            except KvsnapError as error:
                outcome = {"error": type(error).__name__, "kvsnap": True, "message": str(error)}
            except BaseException as error:  # noqa: BLE001 # what must not come out is what is looked for
                outcome = {"error": type(error).__name__, "kvsnap": False, "message": repr(error)[:300]}
            assert path.read_bytes() == before
            print(json.dumps({"file": path.name, "way": way} | outcome), flush=True)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("hostile")
    for name, (data, _, _) in CASES.items():
        (directory / name).write_bytes(data)
    done = subprocess.run(
        [sys.executable, __file__, str(directory)], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), str(HERE)])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[dict[str, Any]]] = {}
    for line in done.stdout.splitlines():
        row = json.loads(line)
        found.setdefault(row["file"], []).append(row)
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit of memory is that of Linux")
@pytest.mark.parametrize("name", CASES)
def test_a_hostile_file_is_refused_or_read_within_little_memory(
    name: str, outcomes: dict[str, list[dict[str, Any]]]
) -> None:
    _, expected, message = CASES[name]
    assert len(outcomes[name]) == len(WAYS)
    for row in outcomes[name]:
        assert row["kvsnap"], row
        if expected != "*" and row["way"] in {"load", "loads"}:
            assert row["error"] == expected, row
            assert re.search(message, row["message"]), row
        if expected not in {"*", ""}:
            assert row["error"] in {expected, "UnsupportedError"}, row


@given(
    st.sampled_from(NAMES),
    st.lists(st.tuples(st.integers(0, 1400), st.integers(0, 255)), max_size=6),
    st.lists(
        st.tuples(st.integers(2, 9), st.sampled_from([0, -1, 1, 2, 3, 4, 7, 64, 1 << 12, HUGE, -HUGE])), max_size=3
    ),
    st.one_of(st.none(), st.integers(0, 1400)),
)
@settings(max_examples=400, deadline=None)
def test_mutated_files_are_read_or_refused(
    name: str, bytes_set: list[tuple[int, int]], words_set: list[tuple[int, int]], length: int | None
) -> None:
    data = bytearray((DATA / f"{name}.coli_kv").read_bytes())
    for at, value in bytes_set:
        if at < len(data):
            data[at] = value
    for place, value in words_set:
        if len(data) >= 4 * place + 4:
            struct.pack_into("<i", data, 4 * place, value)
    raw = bytes(data if length is None else data[:length])
    try:
        snapshot = loads(raw)
        read_everything(snapshot)
    except KvsnapError:
        return
    assert snapshot.n_rows == len(snapshot.tokens) == snapshot.source["usable_records"]
    assert snapshot.n_rows * snapshot.source["record_size"] <= len(raw) - 40
    assert not any(np.isnan(t.array).any() for t in snapshot.tensors() if t.role != "index" and t.bound > 0)


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_random_bytes_behind_every_magic_are_read_or_refused(tail: bytes) -> None:
    for magic in (b"COLIKV1\0", b"COLIKV2\0", b"COLIKV3\0", b"SYNTARAK", b"COLIDV41", b"COLIKV1", b""):
        try:
            read_everything(loads(magic + tail))
        except KvsnapError:
            continue


if __name__ == "__main__":
    main(Path(sys.argv[1]))

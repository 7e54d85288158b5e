"""MLXKV001 files that are broken, odd or hostile: the outcome that the MANIFEST names, in little memory, at once.

Nothing but `KvsnapError` may come out of any way to read a file. Ours accepts all that any of the three original
readers accepts (`dialect_*`, `ok_*`, native tensors in version 3); a file that all refuse is refused.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsnap.errors import DamagedError, FormatError, KvsnapError, VersionError
from kvsnap.formats import mlxkv

GOLDEN = Path(__file__).parent / "data" / "mlxkv"
MANIFEST = json.loads((GOLDEN / "MANIFEST.json").read_text())["files"]
MEMORY = 512 << 20

# Of every file that must be refused: the class, the field and the offset that the message names.
REFUSED: dict[str, tuple[type[KvsnapError], str, int]] = {
    "err_empty_file": (FormatError, "magic", 0),
    "err_bad_magic": (FormatError, "magic", 0),
    "err_version_0": (FormatError, "version", 8),
    "err_version_7": (VersionError, "version", 8),
    "err_big_endian": (DamagedError, "token ids count", 51),
    "err_truncated_header": (DamagedError, "sequence length", 35),
    "err_truncated_tokens": (DamagedError, "token ids count", 51),
    "err_truncated_last_logit": (DamagedError, "logits count", 1179),
    "err_q8_codes_truncated": (DamagedError, "layer entry 2, head 1, values, count", 621),
    "err_native_unknown_dtype": (FormatError, "layer entry 0, head 0, keys, dtype", 111),
    "err_payloads_without_mode": (FormatError, "layer entry 0, cache mode", 103),
    "err_turboquant_without_payloads": (FormatError, "layer entry 0, cache mode", 103),
    "err_token_count_huge": (DamagedError, "token ids count", 51),
    "err_string_length_huge": (DamagedError, "architecture length", 12),
    "err_selector_3": (FormatError, "layer entry 0, head 0, keys, selector", 149),
    "err_q8_count_huge": (DamagedError, "layer entry 0, head 0, keys, count", 153),
    "err_layer_count_huge": (DamagedError, "number of layer entries", 87),
}


def data_of(name: str) -> bytes:
    return (GOLDEN / f"{name}.mlxkv").read_bytes()


def test_every_file_that_must_be_refused_is_in_the_table() -> None:
    assert {e["name"] for e in MANIFEST if e["expect"] == "error"} == set(REFUSED)
    assert len(MANIFEST) > 50


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_field_and_offset(name: str, tmp_path: Path) -> None:
    kind, field, offset = REFUSED[name]
    path = tmp_path / "x"
    path.write_bytes(data_of(name))
    ways: tuple[Callable[[], Any], ...] = (
        lambda: mlxkv.loads(data_of(name)),
        lambda: mlxkv.load(path),
        lambda: mlxkv.load(path, mmap=False),
    )
    for way in ways:
        with pytest.raises(KvsnapError) as caught:
            way()
        assert type(caught.value) is kind
        assert caught.value.message.startswith(field)
        assert caught.value.offset == offset
    assert caught.value.path == str(path)


# -- in little memory ---------------------------------------------------------------------------------------------


def u(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def header(version: int, layers: int) -> bytes:
    """Everything before the layer entries, with counts that lie."""
    big = 2**32 - 1
    return b"MLXKV001" + u(version, 0, big, big, big, big, big) + (u(big) if version > 1 else b"") + u(0, 0, layers)


def many_heads() -> bytes:
    """Half a million empty heads: 8 bytes each in the file."""
    return header(2, 1) + u(0, 0, 500_000) + bytes(8 * 500_000) + u(0, 0)


def most_heads() -> bytes:
    """As many empty heads as are taken."""
    return header(2, 1) + u(0, 0, 1 << 16) + bytes(8 << 16) + u(0, 0)


def many_layers() -> bytes:
    """More blank entries than are taken."""
    return header(2, 500_000) + bytes(12 * 500_000) + u(0, 0)


def most_layers() -> bytes:
    """As many blank entries as are taken."""
    return header(2, 1 << 12) + bytes(12 << 12) + u(0, 0)


def far_layer() -> bytes:
    """One entry with the largest number."""
    return header(2, 1) + u(2**31 - 1, 0, 0) + u(0, 0)


def impossible_slab() -> bytes:
    """Slab shapes whose product overflows 64 bits and comes out as the count."""
    shape = u(4, 1, 2**31 - 1, 2**31 - 1, 2**31 - 1)
    return header(4, 1) + u(0, 0, 0) + (shape + u(0, 1) + bytes(4)) * 2 + u(0, 0)


def negative_slab() -> bytes:
    """Negative entries in a slab shape, with the right product."""
    shape = u(4, 1, 2**32 - 1, 2**32 - 1, 1)
    return header(4, 1) + u(0, 0, 0) + (shape + u(0, 1) + bytes(4)) * 2 + u(0, 0)


def long_shape() -> bytes:
    """A slab shape of a million entries."""
    return header(4, 1) + u(0, 0, 0) + u(1_000_000) + bytes(4_000_000) + u(0, 0, 0, 0, 0) + u(0, 0)


def many_payloads() -> bytes:
    """Many payloads of no bytes."""
    layer = u(0, 0, 0) + u(10) + b"turboquant" + u(200_000) + bytes(800_000) + u(0, 0, 0, 0, 0, 0)
    return header(5, 1) + layer + u(0, 0)


def bad_scales() -> bytes:
    """A q8 tensor whose scale is NaN, and one whose scale is infinite."""
    tensors = u(1, 3, 0x7FC00000) + b"\1\2\0" + u(1, 3, 0x7F800000) + b"\1\2\0"
    return header(3, 1) + u(0, 0, 1) + tensors + u(0, 0)


ODD: dict[str, tuple[Callable[[], bytes], str]] = {
    "many_heads": (many_heads, "UnsupportedError"),
    "most_heads": (most_heads, "loaded"),
    "many_layers": (many_layers, "UnsupportedError"),
    "most_layers": (most_layers, "loaded"),
    "far_layer": (far_layer, "loaded"),
    "impossible_slab": (impossible_slab, "loaded"),
    "negative_slab": (negative_slab, "loaded"),
    "long_shape": (long_shape, "UnsupportedError"),
    "many_payloads": (many_payloads, "loaded"),
    "bad_scales": (bad_scales, "loaded"),
}

PROGRAM = """
import json, resource, sys
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
sys.path.insert(0, sys.argv[2])
from test_mlxkv_hostile import use
from pathlib import Path
print(json.dumps({Path(p).name: use(p) for p in sys.argv[3:]}))
"""


def use(path: str) -> str:
    """Read a file in every way there is, and write it again in every way; what came of it."""
    try:
        for mmap in (True, False):
            exhaust(mlxkv.load(path, mmap=mmap))
    except KvsnapError as error:
        return type(error).__name__
    except MemoryError:
        return "out of memory"
    return "loaded"


def exhaust(snapshot: Any) -> None:
    for layer in snapshot.layers:
        for h in range(min(layer.num_heads, 3)):
            snapshot.head(layer.index, h)
        for tensor in (*layer.tensors, *layer.by_head):
            tensor.values()
    if snapshot.logits is not None:
        snapshot.logits.values()
    mlxkv.slab_differences(snapshot)
    mlxkv.FORMAT.losses(snapshot)
    assert mlxkv.dumps(snapshot, byte_order="little") or True
    for codec in ("float32", "q8", "native"):
        mlxkv.dumps(snapshot, codec=codec, byte_order="big")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a process with 512 MB of address space makes of all the files."""
    folder = tmp_path_factory.mktemp("hostile")
    for name, (make, _) in ODD.items():
        (folder / name).write_bytes(make())
    paths = [str(p) for p in (*GOLDEN.glob("*.mlxkv"), *folder.iterdir())]
    source = Path(mlxkv.__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(source), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(MEMORY), str(Path(__file__).parent), *paths],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", [e["name"] for e in MANIFEST] + ["big_endian"])
def test_the_outcome_of_every_golden_in_little_memory(name: str, outcomes: dict[str, str]) -> None:
    expected = REFUSED[name][0].__name__ if name in REFUSED else "loaded"
    assert outcomes[f"{name}.mlxkv"] == expected


@pytest.mark.parametrize("name", ODD)
def test_the_outcome_of_odd_files_in_little_memory(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes[name] == ODD[name][1]


def test_the_limit_is_one(tmp_path: Path) -> None:
    program = PROGRAM.split("sys.path", maxsplit=1)[0] + "bytearray(600 << 20)"
    done = subprocess.run([sys.executable, "-c", program, str(MEMORY)], capture_output=True, text=True, check=False)
    assert "MemoryError" in done.stderr


# -- damage in every place ----------------------------------------------------------------------------------------

SMALL = [
    "v1_f32",
    "v3_q8",
    "v4_slab_bf16_no_heads",
    "v5_turboquant",
    "v6_ragged_heads",
    "v6_q8_native_slab",
    "big_endian",
]


@pytest.mark.parametrize("name", SMALL)
def test_a_file_cut_anywhere_is_refused(name: str) -> None:
    data = data_of(name)
    for length in range(len(data)):
        with pytest.raises((FormatError, DamagedError)) as caught:
            mlxkv.loads(data[:length])
        assert caught.value.offset is not None
        assert caught.value.offset <= length
    assert mlxkv.loads(data).num_layers


WORDS = [0, 1, 2, 3, 5, 6, 7, 2**16, 2**24, 2**28, 2**31 - 1, 2**31, 2**32 - 1]


def mutated() -> Iterator[st.SearchStrategy[bytes]]:
    for path in sorted(GOLDEN.glob("*.mlxkv")):
        data = path.read_bytes()
        if not data:
            continue
        place = st.integers(0, len(data) - 1)
        change = st.one_of(
            st.tuples(st.just("byte"), place, st.binary(min_size=1, max_size=1)),
            st.tuples(st.just("word"), place, st.sampled_from(WORDS).map(lambda w: struct.pack("<I", w))),
            st.tuples(st.just("word"), place, st.sampled_from(WORDS).map(lambda w: struct.pack(">I", w))),
            st.tuples(st.just("cut"), place, st.just(b"")),
            st.tuples(st.just("insert"), place, st.binary(min_size=1, max_size=40)),
            st.tuples(st.just("remove"), place, st.binary(min_size=1, max_size=40)),
        )
        yield st.lists(change, min_size=1, max_size=4).map(lambda changes, data=data: apply(data, changes))  # type: ignore[misc]


def apply(data: bytes, changes: list[tuple[str, int, bytes]]) -> bytes:
    for what, at, new in changes:
        if what == "cut":
            data = data[:at]
        elif what == "insert":
            data = data[:at] + new + data[at:]
        elif what == "remove":
            data = data[:at] + data[at + len(new) :]
        else:
            data = data[:at] + new + data[at + len(new) :]
    return data


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.one_of(*mutated()) | st.binary(max_size=200).map(lambda tail: b"MLXKV001" + tail))
def test_nothing_but_our_errors_comes_out_of_changed_files(data: bytes) -> None:
    try:
        snapshot = mlxkv.loads(data)
    except KvsnapError:
        return
    # What loads is saved again byte for byte, and read again in the other byte order.
    assert mlxkv.dumps(snapshot) == data
    exhaust(snapshot)
    other = mlxkv.loads(mlxkv.dumps(snapshot, byte_order="big"))
    assert other.tokens == snapshot.tokens
    assert [t.shape for t in other.tensors()] == [t.shape for t in snapshot.tensors()]


def test_the_fuzz_reaches_both_outcomes() -> None:
    data = data_of("v6_q8")
    assert mlxkv.loads(apply(data, [("byte", 30, b"\x09")]))
    with pytest.raises(KvsnapError):
        mlxkv.loads(apply(data, [("word", 51, struct.pack("<I", 2**31))]))

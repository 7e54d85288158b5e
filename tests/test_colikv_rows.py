"""Encodings of `.coli_kv` rows, against the codes of the golden files and against a plain scalar reference."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsnap.errors import InputError, UnsupportedError
from kvsnap.formats.colikv import Encoding, encoding_of
from kvsnap.formats.colikv.rows import decode, encode, fp8_bound, rotates

DATA = Path(__file__).parent / "data" / "colikv"
FP8, INT4, POLAR = Encoding("fp8"), Encoding("int4", 4), Encoding("polar", 4)
GOLDEN = {
    "v2_fp8": FP8, "v2_fp8_dsa": FP8, "v2_zero_row": FP8, "v2_invalid_codes": FP8, "v2_read_without_fp8": FP8,
    "v3_polar": POLAR, "v3_bits_mismatch": POLAR, "v3_rotated_int4": INT4, "v3_zero_row": INT4,
}  # fmt: skip


def golden_rows(name: str) -> list[tuple[str, int, dict[str, Any]]]:
    """Role, record and content of each stored latent and rope row of a golden file."""
    sidecar = json.loads((DATA / f"{name}.json").read_text())
    records = sidecar["records"]
    return [(role, i, row) for i, record in enumerate(records) for role in ("latent", "rope") for row in record[role]]


def floats(hexed: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytes.fromhex(hexed), "<f4")


def codes_of(row: dict[str, Any]) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytes.fromhex(row["codes_hex"]), np.uint8)[None]


@pytest.mark.parametrize("name", GOLDEN)
def test_decoding_golden_codes_gives_the_values_of_the_original(name: str) -> None:
    encoding = GOLDEN[name]
    tolerance = json.loads((DATA / f"{name}.json").read_text()).get("float_tolerance", 0)
    n = 0
    for _, _, row in golden_rows(name):
        expected = floats(row["f32_hex"])
        found = decode(encoding, codes_of(row), floats(row["scale_hex"]), len(expected))[0]
        assert np.max(np.abs(found - expected), initial=0) <= tolerance
        if encoding.name == "fp8":
            assert found.tobytes() == expected.tobytes()
        n += 1
    assert n >= 12


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("v2_fp8", "v1_basic"),
        ("v3_polar", "v1_basic"),
        ("v3_rotated_int4", "v1_basic"),
        ("v2_fp8_dsa", "v1_dsa_some_layers"),
    ],
)
def test_encoding_the_same_rows_gives_the_codes_of_the_original(name: str, source: str) -> None:
    encoding, n = GOLDEN[name], 0
    plain = {(role, i): [] for role, i, _ in golden_rows(source)}
    for role, i, row in golden_rows(source):
        plain[role, i].append(row)
    stored: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for role, i, row in golden_rows(name):
        stored.setdefault((role, i), []).append(row)
    for key, rows in stored.items():
        if name == "v2_fp8_dsa" and key[1] > 0:
            continue  # later records of the two files hold other tokens
        values = np.stack([floats(row["f32_hex"]) for row in plain[key]])
        codes, numbers = encode(encoding, values)
        assert [bytes(c).hex() for c in codes] == [row["codes_hex"] for row in rows]
        assert [struct.pack("<f", x).hex() for x in numbers] == [row["scale_hex"] for row in rows]
        n += len(rows)
    assert n >= 8


def test_a_changed_value_changes_the_codes() -> None:
    # The negative control of the test above.
    row = floats(golden_rows("v1_basic")[0][2]["f32_hex"]).copy()
    for encoding in (FP8, INT4, POLAR):
        before = encode(encoding, row[None])[0].tobytes()
        other = row.copy()
        other[0] = -other[0]
        assert encode(encoding, other[None])[0].tobytes() != before


# -- fp8


def e4m3(value: float) -> int:
    """The nearest code, ties to even, saturated: by trying all."""

    def value_of(code: int) -> float:
        exponent, mantissa = code >> 3 & 15, code & 7
        return mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)

    sign = 0x80 if math.copysign(1, value) < 0 else 0
    best = min(range(0x7F), key=lambda code: (abs(value_of(code) - abs(value)), code & 1))
    return sign | best


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=12))
@settings(max_examples=150, deadline=None)
def test_fp8_agrees_with_a_scalar_reference(values: list[float]) -> None:
    row = np.array([values], np.float32)
    codes, scales = encode(FP8, row)
    largest = np.abs(row).max()
    if largest <= 1e-35:
        assert not codes.any()
        assert scales[0] == 1
        return
    factor = np.float32(448) / largest
    assert [int(c) for c in codes[0]] == [e4m3(float(x * factor)) for x in row[0]]
    assert scales[0] == largest / np.float32(448)


@given(st.integers(0, 2**32), st.sampled_from([1, 5, 64]), st.floats(-30, 30))
@settings(max_examples=60, deadline=None)
def test_the_bound_of_fp8_holds_and_is_not_loose(seed: int, width: int, power: float) -> None:
    rows = (np.random.default_rng(seed).standard_normal((7, width)) * 10**power).astype(np.float32)
    codes, scales = encode(FP8, rows)
    bound = fp8_bound(codes, scales)
    assert np.abs(decode(FP8, codes, scales, width).astype(np.float64) - rows).max() <= bound < math.inf
    assert bound <= 0.0358 * np.abs(rows).max()


def test_the_bound_of_fp8_is_reached_in_the_middle_of_a_step() -> None:
    row = np.array([[448, 272]], np.float32)  # 272 is half way between 256 and 288
    codes, scales = encode(FP8, row)
    assert np.abs(decode(FP8, codes, scales, 2) - row).max() == 16 <= fp8_bound(codes, scales) < 16.01


def test_the_bound_of_fp8_is_unknown_where_anything_may_have_been() -> None:
    infinite = np.array([[np.inf, 1]], np.float32)
    assert fp8_bound(*encode(FP8, infinite)) == math.inf
    codes = np.array([[0x10, 0x20]], np.uint8)
    assert fp8_bound(codes, np.array([-1], np.float32)) == math.inf
    assert fp8_bound(np.array([[0x7F, 1]], np.uint8), np.ones(1, np.float32)) == math.inf
    assert fp8_bound(codes, np.ones(1, np.float32)) < math.inf


@pytest.mark.parametrize("value", [0.0, 1e-36, np.inf, -np.inf, 3.402e38, np.nan])
def test_fp8_rows_without_a_usable_maximum_are_zero_with_scale_one(value: float) -> None:
    codes, scales = encode(FP8, np.full((1, 3), value, np.float32))
    assert codes.tobytes() == bytes(3)
    assert scales[0] == 1


def test_a_nan_beside_numbers_becomes_zero_in_fp8() -> None:
    codes, scales = encode(FP8, np.array([[np.nan, 448, -448]], np.float32))
    assert codes.tobytes() == bytes([0, 0x7E, 0xFE])
    assert scales[0] == 1


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf, 3.4e38])
def test_an_invalid_fp8_scale_gives_a_row_of_zeros(scale: float) -> None:
    found = decode(FP8, np.array([[0x7E, 0xFE]], np.uint8), np.array([scale], np.float32), 2)
    assert found.tobytes() == bytes(8)


# -- packed


def scalar_signs(row: list[float]) -> list[float]:
    def mix(x: int) -> int:
        x = (x + 0x9E3779B9) & 0xFFFFFFFF
        x = ((x ^ x >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
        x = ((x ^ x >> 13) * 0xC2B2AE35) & 0xFFFFFFFF
        return x ^ x >> 16

    return [-v if mix(0x9E3779B9 ^ i) & 1 else v for i, v in enumerate(row)]


def scalar_hadamard(row: list[float]) -> list[float]:
    """In doubles and plain loops."""
    width, y = len(row), list(row)
    stride = 1
    while stride < width:
        for i in range(0, width, 2 * stride):
            for j in range(i, i + stride):
                y[j], y[j + stride] = y[j] + y[j + stride], y[j] - y[j + stride]
        stride *= 2
    return [v / math.sqrt(width) for v in y]


LEVELS = [0.128, 0.388, 0.657, 0.942, 1.256, 1.618, 2.069, 2.733]
BOOK = sorted([-x for x in LEVELS] + LEVELS)


@given(st.integers(0, 2**32), st.sampled_from([2, 4, 32, 256]))
@settings(max_examples=40, deadline=None)
def test_int4_agrees_with_a_scalar_reference(seed: int, width: int) -> None:
    row = np.random.default_rng(seed).standard_normal((1, width)).astype(np.float32)
    codes, radius = encode(INT4, row)
    norm = math.sqrt(sum(float(x) ** 2 for x in row[0]))
    assert radius[0] == np.float32(norm)
    wanted = [y * math.sqrt(width) / norm for y in scalar_hadamard(scalar_signs([float(x) for x in row[0]]))]
    found = [int(c) >> shift & 15 for c in codes[0] for shift in (0, 4)]
    for level, y in zip(found, wanted, strict=True):
        assert abs(BOOK[level] - y) <= min(abs(b - y) for b in BOOK) + 1e-5
    back = decode(INT4, codes, radius, width)[0]
    again = scalar_signs(scalar_hadamard([BOOK[level] * norm / math.sqrt(width) for level in found]))
    assert np.allclose(back, again, atol=1e-5 * norm)


def test_on_an_edge_between_two_int4_levels_the_lower_one_is_taken() -> None:
    codes, _ = encode(INT4, np.array([[1, 1]], np.float32))
    levels = {int(codes[0, 0]) & 15, int(codes[0, 0]) >> 4}
    assert 7 in levels  # one of the rotated values is 0, between -0.128 and 0.128


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("width", [2, 4, 8, 64, 2048])
def test_polar_rows_come_back_within_what_their_bits_allow(bits: int, width: int) -> None:
    encoding = Encoding("polar", bits)
    rows = np.random.default_rng(bits).standard_normal((16, width)).astype(np.float32)
    codes, radius = encode(encoding, rows)
    assert codes.shape == (16, encoding.code_size(width))
    back = decode(encoding, codes, radius, width)
    # The length of a row is kept exactly, whatever the angles.
    assert np.allclose(np.linalg.norm(back, axis=1), np.linalg.norm(rows, axis=1), rtol=1e-5)
    error = np.linalg.norm(back - rows, axis=1) / np.linalg.norm(rows, axis=1)
    assert error.max() <= {1: 1.6, 2: 1.2, 3: 0.8, 4: 0.4, 5: 0.2, 6: 0.1, 7: 0.05, 8: 0.03}[bits]
    again, same = encode(encoding, back)
    assert np.allclose(same, radius, rtol=1e-5)
    assert (again != codes).mean() < 0.02  # the middle of a step stays in it


@pytest.mark.parametrize("encoding", [INT4, POLAR])
@pytest.mark.parametrize("value", [0.0, 1e-37, np.inf, np.nan, 3.4e38])
def test_packed_rows_without_a_usable_norm_are_zero(encoding: Encoding, value: float) -> None:
    codes, radius = encode(encoding, np.full((2, 4), value, np.float32))
    assert not codes.any()
    assert not radius.any()
    assert not decode(encoding, codes, radius, 4).any()


@pytest.mark.parametrize("encoding", [INT4, POLAR])
@pytest.mark.parametrize("radius", [-1.0, np.nan, np.inf, 0.0])
def test_an_invalid_radius_gives_a_row_of_zeros(encoding: Encoding, radius: float) -> None:
    codes = np.full((1, encoding.code_size(8)), 0xA5, np.uint8)
    assert decode(encoding, codes, np.array([radius], np.float32), 8).tobytes() == bytes(32)


def test_a_width_that_is_no_power_of_two_is_refused_on_encoding_and_zero_on_decoding() -> None:
    for width in (3, 6, 4096):
        assert not rotates(width)
        with pytest.raises(UnsupportedError, match=f"{width} values"):
            encode(INT4, np.ones((1, width), np.float32))
        codes = np.full((1, INT4.code_size(width)), 0xFF, np.uint8)
        assert not decode(INT4, codes, np.ones(1, np.float32), width).any()


def test_row_sizes_are_those_of_the_page() -> None:
    assert [Encoding("float32").row_size(8), FP8.row_size(8), INT4.row_size(8), POLAR.row_size(8)] == [32, 12, 8, 8]
    assert [e.row_size(0) for e in (Encoding("float32"), FP8, INT4, POLAR)] == [0, 4, 4, 4]
    assert Encoding("polar", 3).code_size(8) == math.ceil((4 * 3 + 3 * 2) / 8)
    assert Encoding("polar", 1).code_size(8) == math.ceil((4 * 1 + 3 * 1) / 8)


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("encoding", [Encoding("float32"), FP8, INT4, POLAR])
@pytest.mark.parametrize("width", [0, 2])
def test_no_rows_and_no_width_are_fine(encoding: Encoding, rows: int, width: int) -> None:
    codes, numbers = encode(encoding, np.ones((rows, width), np.float32))
    assert codes.shape == (rows, encoding.code_size(width))
    assert decode(encoding, codes, numbers, width).shape == (rows, width)


@pytest.mark.parametrize(("name", "bits"), [("q8", None), ("int4", 3), ("polar", 9), ("polar", -1), ("fp8", 8)])
def test_unknown_encodings_are_refused(name: str, bits: int | None) -> None:
    with pytest.raises(InputError):
        encoding_of(name, bits)

"""Codecs: exactness, the arithmetic of q8 against a reference and golden values, its bound, a hostile part per rule."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsnap import codecs
from kvsnap.codecs import EXACT, Q8_PLAIN, codec_for, codec_of_id, codec_of_name
from kvsnap.codecs import q8 as q8_module
from kvsnap.codecs.q8 import dequantise, quantise
from kvsnap.errors import DamagedError, InputError, UnsupportedError, VersionError
from kvsnap.tensors import DTYPES, TensorSpec, numpy_dtype

GOLDEN = Path(__file__).parent / "data" / "mlxkv"
F32 = np.float32
FLOATS = ("float32", "float16", "bfloat16")


def make_spec(
    dtype: str = "float32",
    axes: tuple[str, ...] = ("head", "row", "dim"),
    shape: tuple[int, ...] = (3, 0, 8),
    role: str = "k",
) -> TensorSpec:
    row_axis = axes.index("row") if "row" in axes else -1
    growth: Any = "grow" if "row" in axes else "replaced"
    return TensorSpec(
        id=0, name="k0", layer=0, role=role, dtype=dtype, axes=axes, shape=shape, growth=growth, row_axis=row_axis
    )


def bits(values: np.ndarray[Any, Any]) -> bytes:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).tobytes()


def stored(codec: Any, spec: TensorSpec, values: np.ndarray[Any, Any]) -> bytes:
    encoded = codec.encode(spec, values)
    data = b"".join(bytes(memoryview(b).cast("B")) for b in encoded.buffers)
    assert len(data) == encoded.nbytes
    size = codec.stored_size(spec, values.shape[spec.row_axis] if spec.row_axis >= 0 else 1)
    assert size is None or size == len(data)
    return data


def decoded(codec: Any, spec: TensorSpec, data: bytes, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    out = np.ones(shape, dtype=numpy_dtype(spec.dtype))
    codec.decode(spec, memoryview(data), out)
    return out


def normal(shape: tuple[int, ...], seed: int = 0, dtype: str = "float32") -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(F32).astype(numpy_dtype(dtype))


# -- registry ----------------------------------------------------------------------------------------------


def test_codecs_are_found_by_their_numbers_and_names() -> None:
    assert (codec_of_id(1), codec_of_id(3)) == (EXACT, Q8_PLAIN)
    assert (codec_of_name("exact"), codec_of_name("q8")) == (EXACT, Q8_PLAIN)
    assert all(number == codec.id for number, codec in codecs.CODECS.items())
    assert not set(codecs.RESERVED) & set(codecs.CODECS)


@pytest.mark.parametrize("number", [2, 4])
def test_a_reserved_number_is_unsupported(number: int) -> None:
    with pytest.raises(UnsupportedError, match=f"codec {number}"):
        codec_of_id(number)


@pytest.mark.parametrize("number", [-1, 0, 5, 2**32 - 1])
def test_an_unknown_number_belongs_to_a_newer_version(number: int) -> None:
    with pytest.raises(VersionError, match="newer"):
        codec_of_id(number)


def test_an_unknown_name_lists_the_names() -> None:
    with pytest.raises(InputError, match=r"exact, q8, found zip"):
        codec_of_name("zip")


@pytest.mark.parametrize(
    ("dtype", "role", "applies"),
    [
        *((dtype, "k", True) for dtype in FLOATS),
        *(("float32", role, True) for role in ("v", "latent", "rope", "cross_k", "cross_v")),
        *(("float32", role, False) for role in ("index", "positions", "conv", "recurrent", "logits", "code", "other")),
        *((dtype, "k", False) for dtype in DTYPES if dtype not in FLOATS),
    ],
)
def test_q8_applies_to_float_rows_of_attention_only(dtype: str, role: str, applies: bool) -> None:
    spec = make_spec(dtype, role=role)
    assert Q8_PLAIN.applies(spec) is applies
    assert codec_for("q8", spec) is (Q8_PLAIN if applies else EXACT)
    assert codec_for("exact", spec) is EXACT
    if not applies:
        values = np.zeros((3, 1, 8), dtype=numpy_dtype(dtype))
        with pytest.raises(InputError, match="does not apply"):
            Q8_PLAIN.encode(spec, values)
        with pytest.raises(InputError, match="does not apply"):
            Q8_PLAIN.decode(spec, memoryview(b""), values)


@pytest.mark.parametrize("codec", [EXACT, Q8_PLAIN])
def test_arrays_that_do_not_fit_the_spec_are_refused(codec: Any) -> None:
    spec = make_spec()
    for bad in (np.zeros((3, 2, 9), F32), np.zeros((2, 2, 8), F32), np.zeros((3, 2, 8), ">f4"), np.zeros((3, 16), F32)):
        with pytest.raises(InputError, match="does not fit"):
            codec.encode(spec, bad)
        with pytest.raises(InputError, match="does not fit"):
            codec.decode(spec, memoryview(bytes(bad.nbytes)), bad)


# -- exact -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_exact_keeps_every_bit_of_every_dtype(dtype: str, rows: int) -> None:
    spec = make_spec(dtype)
    size = rows * 3 * 8 * numpy_dtype(dtype).itemsize
    raw = np.random.default_rng(rows).integers(0, 256, size, dtype=np.uint8)
    if dtype == "bool":
        raw &= 1
    values = raw.view(numpy_dtype(dtype)).reshape(3, rows, 8)
    encoded = EXACT.encode(spec, values)
    assert (encoded.exact, encoded.bound) == (True, 0.0)
    data = stored(EXACT, spec, values)
    assert data == raw.tobytes()
    assert bits(decoded(EXACT, spec, data, values.shape)) == raw.tobytes()


def test_exact_is_little_endian_in_c_order() -> None:
    values = np.array([[[1.0], [-2.0]], [[0.5], [3.0]]], F32)
    data = stored(EXACT, make_spec(shape=(2, 0, 1)), np.asfortranarray(values))
    assert data == struct.pack("<4f", 1.0, -2.0, 0.5, 3.0)


def test_exact_copies_only_what_is_strided() -> None:
    spec, values = make_spec(), normal((3, 6, 8))
    (view,) = EXACT.encode(spec, values).buffers
    assert isinstance(view, np.ndarray)
    assert np.shares_memory(view, values)
    (copy,) = EXACT.encode(spec, values[:, ::2]).buffers
    assert isinstance(copy, np.ndarray)
    assert not np.shares_memory(copy, values)


def test_exact_takes_a_tensor_without_axes() -> None:
    spec = make_spec(axes=(), shape=(), role="other")
    data = stored(EXACT, spec, np.array(7.0, F32))
    assert decoded(EXACT, spec, data, ()) == 7.0


@pytest.mark.parametrize("off", [-1, 1, -4, 4, 10**6])
def test_exact_refuses_another_length(off: int) -> None:
    spec, values = make_spec(), normal((3, 2, 8))
    data = stored(EXACT, spec, values)
    with pytest.raises(DamagedError, match="192 bytes"):
        decoded(EXACT, spec, (data + bytes(max(off, 0)))[: len(data) + off], values.shape)


# -- q8: arithmetic ----------------------------------------------------------------------------------------


def near_halves() -> np.ndarray[Any, Any]:
    """Return every float32 within 40 steps of k and k + 0.5, k = 0..127, at most 127, and their negatives."""
    centres = np.arange(0, 128, 0.5, dtype=F32).view(np.int32)
    near = centres[:, None] + np.arange(-40, 41, dtype=np.int32)
    values = near[near >= 0].view(F32)
    values = values[values <= 127]
    return np.concatenate([values, -values])


def half_away(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Round half away from zero in float64, where the sum with 0.5 is exact for every float32 below 2**28."""
    exact = values.astype(np.float64)
    return np.copysign(np.floor(np.abs(exact) + 0.5), exact)


def test_codes_are_rounded_half_away_from_zero_near_every_step() -> None:
    values = near_halves()
    assert values.size > 40_000
    group = np.concatenate([values, [F32(127)]])[
        None
    ]  # the maximum of 127 makes the scale 1.0, so values are quotients
    codes, scales, good = quantise(group)
    assert scales.tolist() == [1.0]
    assert good.all()
    assert np.array_equal(codes[0], half_away(group[0]))
    assert not np.array_equal(codes[0], np.rint(group[0])), "the values must tell half-to-even apart"


def test_adding_a_whole_half_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(q8_module, "_BELOW_HALF_BITS", F32(0.5).view(np.uint32))
    codes, _, _ = quantise(np.concatenate([near_halves(), [F32(127)]])[None])
    wrong = codes[0, :-1] != half_away(near_halves())
    assert np.abs(near_halves()[wrong]).tolist() == [F32(0.49999997)] * 2


def golden_heads(name: str) -> list[dict[str, Any]]:
    content = json.loads((GOLDEN / f"{name}.json").read_text())["content"]
    return [head[side] for layer in content["layers"] for head in layer["heads"] for side in ("key", "value")]


def golden_mismatches(heads: list[dict[str, Any]], round_codes: Any = None) -> int:
    wrong = 0
    for head in heads:
        values = np.frombuffer(bytes.fromhex(head["source_f32_hex"]), "<f4")
        codes, scales, good = quantise(values[None])
        if round_codes is not None:
            codes = round_codes(values[None] / scales[0]).astype(np.int8)
        out = np.empty(values.shape, F32)
        dequantise(codes, scales, out[None])
        same_scale = scales.tobytes().hex() == head["scale_hex"]
        same_values = out.tobytes().hex() == head["f32_hex"]
        wrong += not (good.all() and same_scale and codes[0].tolist() == head["codes"] and same_values)
    return wrong


@pytest.mark.parametrize("name", ["v3_q8_zero_and_ties", "v3_q8_nonfinite", "v3_q8_scale_underflow"])
def test_golden_codes_scales_and_values_are_met(name: str) -> None:
    every = golden_heads(name)
    heads = [head for head in every if head["selector"] == 1 and head["scale_hex"] != "00000000"]
    assert len(heads) >= 6
    file = (GOLDEN / f"{name}.mlxkv").read_bytes()
    for head in heads:
        scale, codes = bytes.fromhex(head["scale_hex"]), np.array(head["codes"], np.int8).tobytes()
        assert struct.pack("<II", 1, head["n"]) + scale + codes in file, "the description must belong to the file"
    assert golden_mismatches(heads) == 0


def test_half_to_even_fails_the_golden_values() -> None:
    heads = [head for head in golden_heads("v3_q8_zero_and_ties") if head["selector"] == 1]
    assert golden_mismatches(heads, np.rint) > 0
    assert golden_mismatches(heads, half_away) == 0, "only the rounding may make the difference"


def test_golden_heads_with_nan_or_infinity_stay_float32() -> None:
    heads = [head for head in golden_heads("v3_q8_nonfinite") if head["selector"] == 0]
    assert len(heads) >= 2
    for head in heads:
        values = np.frombuffer(bytes.fromhex(head["f32_hex"]), "<f4").reshape(1, 5, 4)
        assert not quantise(values)[2].any()
        spec = make_spec(shape=(1, 0, 4))
        encoded = Q8_PLAIN.encode(spec, values)
        assert (encoded.exact, encoded.bound) == (True, 0.0)
        assert bits(decoded(Q8_PLAIN, spec, stored(Q8_PLAIN, spec, values), (1, 5, 4))) == bits(values)


def test_a_scale_that_underflows_gives_zeros_and_says_so() -> None:
    (head,) = [head for head in golden_heads("v3_q8_scale_underflow") if head["scale_hex"] == "00000000"]
    values = np.frombuffer(bytes.fromhex(head["source_f32_hex"]), "<f4").reshape(1, 5, 4)
    spec = make_spec(shape=(1, 0, 4))
    encoded = Q8_PLAIN.encode(spec, values)
    data = stored(Q8_PLAIN, spec, values)
    assert data == struct.pack("<IIfI", 1, 0, 0.0, 0) + bytes(20)
    assert np.array_equal(decoded(Q8_PLAIN, spec, data, (1, 5, 4)), np.zeros((1, 5, 4)))
    assert encoded.bound == float(np.abs(values).max()) > 0


def test_a_head_of_zeros_has_scale_one_and_no_error() -> None:
    spec = make_spec(shape=(2, 0, 2))
    values = np.array([[[0.0, -0.0]], [[254.0, -254.0]]], F32)
    data = stored(Q8_PLAIN, spec, values)
    assert struct.unpack_from("<fIfI", data, 8) == (1.0, 0, 2.0, 0)
    zeros = Q8_PLAIN.encode(spec, values * 0)
    assert (zeros.exact, zeros.bound) == (False, 0.0), "a negative zero loses its sign"


def test_the_largest_float32_does_not_become_infinity() -> None:
    spec = make_spec(shape=(1, 0, 2))
    largest = np.finfo(F32).max
    with np.errstate(over="ignore"):
        assert np.isinf(F32(127) * (largest / F32(127))), "otherwise the case needs no rule"
    values = np.array([[[largest, 1.0]]], F32)
    assert np.array_equal(decoded(Q8_PLAIN, spec, stored(Q8_PLAIN, spec, values), (1, 1, 2)), values)
    values[0, 0, 0] = np.nextafter(largest, F32(0))
    out = decoded(Q8_PLAIN, spec, stored(Q8_PLAIN, spec, values), (1, 1, 2))
    assert np.isfinite(out).all()
    assert out[0, 0, 1] == 0


# -- q8: layout, strides, shapes -----------------------------------------------------------------------------


def test_the_layout_is_the_documented_one() -> None:
    values = np.array([[[127.0, -2.5, 1.0]], [[np.inf, 1.0, 2.0]], [[-254.0, 3.0, 0.0]]], F32)
    data = stored(Q8_PLAIN, make_spec(shape=(3, 0, 3)), values)
    assert data == (
        struct.pack("<II", 3, 0)
        + struct.pack("<fIfIfI", 1.0, 0, 0.0, 1, 2.0, 0)
        + struct.pack("<3bx", 127, -3, 1)
        + struct.pack("<3f", np.inf, 1.0, 2.0)
        + struct.pack("<3bx", -127, 2, 0)
    )


def test_the_example_of_the_page_is_what_is_written() -> None:
    page = (Path(__file__).parent.parent / "docs" / "codecs.md").read_text()
    lines = re.findall(r"^ *(\d+)  ((?:[0-9a-f]{2} ?[ ]?)+?)  +\S.*$", page, re.MULTILINE)
    example = b"".join(bytes.fromhex(line) for _, line in lines)
    assert len(lines) == 7
    assert [int(offset) for offset, _ in lines] == [0, 8, 16, 24, 32, 36, 48]
    values = np.array([[[127.0, -2.5, 1.0]], [[np.inf, 1.0, 2.0]], [[-254.0, 3.0, 0.0]]], F32)
    assert stored(Q8_PLAIN, make_spec(shape=(3, 0, 3)), values) == example


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [0, 1, 16, 700, 9000])
def test_rows_and_strides_do_not_change_the_result(dtype: str, rows: int) -> None:
    spec = make_spec(dtype, shape=(2, 0, 33))
    wide = normal((rows, 4, 34), seed=rows, dtype=dtype)
    values = wide[:, ::2, :33].transpose(1, 0, 2)
    data = stored(Q8_PLAIN, spec, values)
    assert data == stored(Q8_PLAIN, spec, np.ascontiguousarray(values))
    plain = decoded(Q8_PLAIN, spec, data, (2, rows, 33))
    store = np.full((rows, 4, 34), 7, dtype=numpy_dtype(dtype))
    Q8_PLAIN.decode(spec, memoryview(data), store[:, ::2, :33].transpose(1, 0, 2))
    assert bits(store[:, ::2, :33].transpose(1, 0, 2)) == bits(plain)
    assert (store[:, 1::2] == 7).all()
    assert (store[:, :, 33] == 7).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_codes_match_the_plain_formula_in_every_tile_and_group_size(dtype: str) -> None:
    for heads, rows, dim in ((1, 5000, 64), (3, 1024, 64), (70, 16, 64), (5, 1, 1), (2, 1025, 64)):
        values = normal((heads, rows, dim), seed=rows, dtype=dtype) * np.arange(1, heads + 1)[:, None, None]
        values = values.astype(numpy_dtype(dtype))
        data = stored(Q8_PLAIN, make_spec(dtype, shape=(heads, 0, dim)), values)
        single = values.astype(F32)
        scales = np.abs(single).max(axis=(1, 2)) / F32(127)
        table = np.frombuffer(data, [("scale", "<f4"), ("mode", "<u4")], heads, 8)
        assert np.array_equal(table["scale"], scales)
        step = (rows * dim + 3) & ~3
        codes = np.frombuffer(data, np.int8, heads * step, 8 + 8 * heads).reshape(heads, step)[:, : rows * dim]
        expected = half_away(single / scales[:, None, None]).astype(np.int8)
        assert np.array_equal(codes, expected.reshape(heads, -1))
        out = decoded(Q8_PLAIN, make_spec(dtype, shape=(heads, 0, dim)), data, values.shape)
        assert bits(out) == bits((expected.astype(F32) * scales[:, None, None]).astype(numpy_dtype(dtype)))


def test_the_head_axis_may_stand_anywhere_or_be_missing() -> None:
    values = normal((2, 5, 3, 8))
    spec = make_spec(axes=("batch", "row", "head", "dim"), shape=(2, 0, 3, 8))
    data = stored(Q8_PLAIN, spec, values)
    assert struct.unpack_from("<I", data) == (3,)
    moved = np.ascontiguousarray(np.moveaxis(values, 2, 0))
    assert data == stored(Q8_PLAIN, make_spec(axes=("head", "batch", "row", "dim"), shape=(3, 2, 0, 8)), moved)
    out = decoded(Q8_PLAIN, spec, data, values.shape)
    assert np.abs(out - values).max() <= Q8_PLAIN.encode(spec, values).bound
    latent = make_spec(axes=("row", "latent"), shape=(0, 8), role="latent")
    whole = stored(Q8_PLAIN, latent, values[0, :, 0])
    assert struct.unpack_from("<If", whole, 0)[0] == 1
    assert struct.unpack_from("<f", whole, 8)[0] == F32(np.abs(values[0, :, 0]).max() / F32(127))


def test_no_heads_and_no_rows_are_stored_in_full() -> None:
    for heads, rows in ((0, 4), (3, 0)):
        spec = make_spec(shape=(heads, 0, 8))
        values = np.zeros((heads, rows, 8), F32)
        encoded = Q8_PLAIN.encode(spec, values)
        assert (encoded.exact, encoded.bound) == (True, 0.0)
        assert Q8_PLAIN.stored_size(spec, rows) == encoded.nbytes == 8 + 8 * heads
        assert decoded(Q8_PLAIN, spec, stored(Q8_PLAIN, spec, values), values.shape).shape == values.shape
    assert Q8_PLAIN.stored_size(make_spec(), 1) is None


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_infinity_keep_only_their_own_head_out(dtype: str) -> None:
    values = normal((6, 7, 5), dtype=dtype)
    values[1, 3, 2], values[4, 0, 0], values[5, 6, 4] = np.nan, np.inf, -np.inf
    spec = make_spec(dtype, shape=(6, 0, 5))
    encoded, data = Q8_PLAIN.encode(spec, values), stored(Q8_PLAIN, spec, values)
    modes = np.frombuffer(data, "<u4", 12, 8)[1::2]
    assert modes.tolist() == [0, 1, 0, 0, 1, 1]
    out = decoded(Q8_PLAIN, spec, data, values.shape)
    for head, mode in enumerate(modes):
        same = np.array_equal(out[head].astype(F32), values[head].astype(F32), equal_nan=True)
        assert same is bool(mode)
    error = np.abs(out[[0, 2, 3]].astype(np.float64) - values[[0, 2, 3]].astype(np.float64))
    assert 0 < error.max() <= encoded.bound
    assert not encoded.exact


# -- q8: bound -----------------------------------------------------------------------------------------------

any_float32 = st.floats(width=32, allow_nan=True, allow_infinity=True)
small_float32 = st.floats(-1, 1, width=32)
tiny_float32 = st.integers(-(2**12), 2**12).map(lambda n: float(F32(n) * F32(2.0**-149)))


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(FLOATS),
    st.integers(1, 3),
    st.integers(0, 5),
    st.integers(1, 4),
    st.one_of(*(st.lists(kind, min_size=60, max_size=60) for kind in (any_float32, small_float32, tiny_float32))),
)
def test_the_bound_holds(dtype: str, heads: int, rows: int, dim: int, numbers: list[float]) -> None:
    spec = make_spec(dtype, shape=(heads, 0, dim))
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.array(numbers[: heads * rows * dim], F32).reshape(heads, rows, dim).astype(numpy_dtype(dtype))
    encoded = Q8_PLAIN.encode(spec, values)
    out = decoded(Q8_PLAIN, spec, stored(Q8_PLAIN, spec, values), values.shape)
    good = np.isfinite(values.astype(F32))
    assert np.array_equal(np.isfinite(out.astype(F32)), good)
    error = np.abs(out[good].astype(np.float64) - values[good].astype(np.float64))
    assert np.isfinite(encoded.bound)
    assert error.size == 0 or error.max() <= encoded.bound
    if encoded.exact:
        assert bits(out) == bits(values)


@pytest.mark.parametrize(("dtype", "slack"), [("float32", 1.001), ("float16", 1.15), ("bfloat16", 1.35)])
def test_the_bound_is_close_to_the_worst_case(dtype: str, slack: float) -> None:
    worst = 0.0
    for seed in range(20):
        values = normal((1, 4000, 8), seed, dtype)
        spec = make_spec(dtype, shape=(1, 0, 8))
        encoded = Q8_PLAIN.encode(spec, values)
        out = decoded(Q8_PLAIN, spec, stored(Q8_PLAIN, spec, values), values.shape)
        error = float(np.abs(out.astype(np.float64) - values.astype(np.float64)).max())
        assert error <= encoded.bound
        worst = max(worst, error / encoded.bound)
    assert worst * slack >= 1


def test_every_bfloat16_and_float16_maximum_keeps_within_the_bound() -> None:
    for dtype, kind in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)):
        every = np.arange(1, 2**15, dtype=np.uint16).view(kind)
        every = every[np.isfinite(every.astype(F32))]
        peaks = every[:: 31 if dtype == "bfloat16" else 29]
        fractions = np.linspace(-1, 1, 41)
        values = (peaks.astype(np.float64)[:, None, None] * fractions[None, None]).astype(F32).astype(kind)
        spec = make_spec(dtype, shape=(1, 0, 41))
        for group in values:
            encoded = Q8_PLAIN.encode(spec, group[None])
            out = decoded(Q8_PLAIN, spec, stored(Q8_PLAIN, spec, group[None]), (1, 1, 41))
            error = np.abs(out[0].astype(np.float64) - group.astype(np.float64)).max()
            assert error <= encoded.bound


# -- q8: hostile parts ---------------------------------------------------------------------------------------

HOSTILE = make_spec(shape=(2, 0, 3))


def hostile_part() -> bytearray:
    values = np.array([[[1.0, 2.0, 127.0]], [[np.nan, 1.0, 2.0]]], F32)
    return bytearray(stored(Q8_PLAIN, HOSTILE, values))


def refuse(data: bytes, match: str, spec: TensorSpec = HOSTILE, rows: int = 1) -> None:
    out = np.full((2, rows, 3), 5, F32)
    with pytest.raises(DamagedError, match=match):
        Q8_PLAIN.decode(spec, memoryview(data), out)
    assert (out == 5).all(), "nothing is written before everything is checked"


def test_the_hostile_part_is_good_before_it_is_changed() -> None:
    out = decoded(Q8_PLAIN, HOSTILE, bytes(hostile_part()), (2, 1, 3))
    assert out[0].tolist() == [[1.0, 2.0, 127.0]]
    assert len(hostile_part()) == 24 + 4 + 12


@pytest.mark.parametrize("length", [*range(24)])
def test_a_part_cut_off_in_its_table_is_refused(length: int) -> None:
    refuse(bytes(hostile_part()[:length]), "cut off in its table")


@pytest.mark.parametrize("length", [*range(24, 40)])
def test_a_part_cut_off_in_its_data_is_refused(length: int) -> None:
    refuse(bytes(hostile_part()[:length]), "is cut off; expected 40 bytes")


@pytest.mark.parametrize("extra", [1, 4, 1000])
def test_trailing_bytes_are_refused(extra: int) -> None:
    refuse(bytes(hostile_part()) + bytes(extra), "trailing bytes")


@pytest.mark.parametrize("count", [0, 1, 3, 2**31, 2**32 - 1])
def test_another_number_of_groups_is_refused(count: int) -> None:
    part = hostile_part()
    struct.pack_into("<I", part, 0, count)
    refuse(bytes(part), f"number of groups; expected 2, found {count}")


def test_a_reserved_word_is_refused() -> None:
    part = hostile_part()
    struct.pack_into("<I", part, 4, 1)
    refuse(bytes(part), "reserved word")


@pytest.mark.parametrize("mode", [2, 255, 2**31, 2**32 - 1])
def test_an_unknown_mode_is_refused(mode: int) -> None:
    part = hostile_part()
    struct.pack_into("<I", part, 12, mode)
    refuse(bytes(part), f"unknown mode; expected 0 or 1, found {mode}")


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -1.0, -0.0])
def test_a_scale_that_is_not_finite_or_negative_is_refused(scale: float) -> None:
    part = hostile_part()
    struct.pack_into("<f", part, 8, scale)
    refuse(bytes(part), "scale that cannot be")


def test_a_scale_beside_float32_values_is_refused() -> None:
    part = hostile_part()
    struct.pack_into("<f", part, 16, 1.0)
    refuse(bytes(part), r"found 1\.0 for mode 1")


def test_a_mode_that_changes_the_length_is_refused() -> None:
    part = hostile_part()
    struct.pack_into("<I", part, 12, 1)
    struct.pack_into("<f", part, 8, 0.0)
    refuse(bytes(part), "expected 48 bytes, found 40")


def test_padding_that_is_not_zero_is_refused() -> None:
    part = hostile_part()
    part[24 + 3] = 1
    refuse(bytes(part), "padding")


@pytest.mark.parametrize("rows", [0, 2])
def test_a_part_of_other_rows_is_refused(rows: int) -> None:
    refuse(bytes(hostile_part()), "cut off|trailing", rows=rows)


def test_the_code_minus_128_is_accepted() -> None:
    part = hostile_part()
    struct.pack_into("<b", part, 24, -128)
    assert decoded(Q8_PLAIN, HOSTILE, bytes(part), (2, 1, 3))[0, 0, 0] == -128

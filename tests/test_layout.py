"""Snapshots, tensors and heads in memory: counts, cutting, rows, and what is refused by name."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsnap.errors import InputError, UnsupportedError
from kvsnap.formats import native
from kvsnap.layout import (
    DTYPES,
    Layer,
    PositionRun,
    Run,
    Snapshot,
    Tensor,
    cut_positions,
    cut_runs,
    dtype_name,
    join_positions,
    join_runs,
    numpy_dtype,
)
from kvsnap.tensors import read_all
from synthetic import SAMPLER, same, snapshot, spec


def test_the_fields_of_a_snapshot() -> None:
    s = snapshot(range(1, 8), n_pending=1, layers=3, heads=2, dim=4, n_prompt=5)
    assert (s.num_layers, s.num_heads, s.num_query_heads, s.head_dim, s.seq_len) == (3, 2, 4, 4, 6)
    assert (s.n_rows, s.pending, s.generated, s.token_offset) == (6, (7,), (6, 7), 6)
    assert s.logits is not None
    assert s.nbytes == 3 * 2 * 2 * 6 * 4 * 4 + s.logits.nbytes
    assert s.bound == 0
    assert "layers=3" in repr(s)
    empty = Snapshot()
    assert (empty.num_heads, empty.head_dim, empty.seq_len, empty.pending, empty.generated) == (0, 0, 0, (), ())
    assert snapshot(range(4)).generated == ()


def test_layers_without_attention_are_passed_over() -> None:
    s = snapshot(range(5), recurrent=True, layers=2)
    first = replace(s.layers[0], kind="recurrent", tensors=s.layers[0].tensors[2:])
    s = replace(s, layers=(first, s.layers[1]))
    assert (s.num_heads, s.head_dim) == (2, 4)
    assert s.layers[0].num_heads == 0
    assert s.head(0, 0) is None
    assert s.head(1, 0) is not None


# -- heads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_head_gives_float32_rows_and_positions(dtype: str) -> None:
    s = replace(snapshot(range(5), dtype=dtype, heads=3), positions=(PositionRun(0, 2), PositionRun(10, 3)))
    for number in range(3):
        head = s.head(0, number)
        assert head is not None
        k, v = s.layers[0].tensors
        assert (head.k.dtype, head.v.dtype, head.positions.dtype) == (np.float32, np.float32, np.int64)
        assert np.array_equal(head.k, k.array[number].astype(np.float32))
        assert np.array_equal(head.v, v.array[number].astype(np.float32))
        assert head.positions.tolist() == [0, 1, 10, 11, 12]
        head.k[...] = 0  # a copy: the cache stays what it was
        assert k.array[number].any()
    assert s.head(0, 3) is None
    assert s.head(0, -1) is None
    for layer in (-1, 1):
        with pytest.raises(InputError, match="no such layer"):
            s.head(layer, 0)


@pytest.mark.parametrize("axes", [("head", "row", "dim"), ("row", "head", "dim")])
def test_head_is_rows_by_dim_whatever_the_order_of_the_axes(axes: tuple[str, ...]) -> None:
    sizes = {"head": 2, "row": 5, "dim": 3}
    values = np.arange(30, dtype=np.float32).reshape([sizes[a] for a in ("head", "row", "dim")])
    turned = values.transpose([("head", "row", "dim").index(a) for a in axes])
    shape = tuple(0 if a == "row" else sizes[a] for a in axes)
    tensors = tuple(
        Tensor(spec(i, 0, role, 2, 3, "float32", axes=axes, shape=shape, row_axis=axes.index("row")), turned)
        for i, role in enumerate("kv")
    )
    layer = Layer(index=0, kind="attention", tensors=tensors)
    s = replace(snapshot(range(5)), layers=(layer,))
    head = s.head(0, 1)
    assert head is not None
    assert np.array_equal(head.k, values[1])
    again = native.loads(native.dumps(s))
    assert same(again, s) == []
    cut = s.truncate(3).head(0, 1)
    assert cut is not None
    assert np.array_equal(cut.v, values[1][:3])


def test_a_shared_layer_answers_with_the_one_it_shares() -> None:
    s = snapshot(range(4), layers=2)
    s = replace(s, layers=(s.layers[0], replace(s.layers[1], tensors=(), shares=0)))
    a, b = s.head(0, 1), s.head(1, 1)
    assert a is not None
    assert b is not None
    assert np.array_equal(a.k, b.k)
    assert same(native.loads(native.dumps(s)), s) == []


def test_a_head_of_rows_for_very_many_positions_takes_little_memory() -> None:
    """A file of a few KB can count two thousand million positions, and hold a row for every million of them."""
    n_rows, per_row = 2**31 - 1, 2**20
    held = n_rows // per_row
    tensors = tuple(
        Tensor(spec(i, 0, role, 1, 2, "float32", tokens_per_row=per_row), np.zeros((1, held, 2), np.float32))
        for i, role in enumerate("kv")
    )
    layer = Layer(index=0, kind="attention", tensors=tensors)
    runs = (PositionRun(5, per_row + 1), PositionRun(2**40, n_rows - per_row - 1))
    for positions, third in (((), 2 * per_row), (runs, 2**40 + per_row - 1)):
        s = replace(snapshot((1, 2)), layers=(layer,), n_rows=n_rows, positions=positions)
        tracemalloc.start()
        head = s.head(0, 0)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert head is not None
        assert len(head.positions) == held
        assert head.positions[2] == third
        assert peak < 2**20


def test_a_latent_layer_answers_as_one_head() -> None:
    kinds = {"latent": 6, "rope": 2}
    tensors = tuple(
        Tensor(
            spec(i, 0, role, 1, n, "float32", axes=("row", "dim"), shape=(0, n), row_axis=0),
            np.arange(4 * n, dtype=np.float32).reshape(4, n),
        )
        for i, (role, n) in enumerate(kinds.items())
    )
    s = replace(snapshot(range(4)), layers=(Layer(index=0, kind="latent", tensors=tensors, num_query_heads=8),))
    head = s.head(0, 0)
    assert (s.num_heads, s.head_dim, s.num_query_heads) == (1, 6, 8)
    assert head is not None
    assert np.array_equal(head.k, tensors[0].array)
    assert np.array_equal(head.v, tensors[1].array)
    assert s.head(0, 1) is None
    assert same(native.loads(native.dumps(s)), s) == []


def test_rows_of_many_tokens_in_a_file() -> None:
    # One row for each four tokens, as compressed caches have it: 10 tokens make 2 rows.
    k, v = (
        spec(i, 0, role, 1, 2, "float32", shape=(1, 0, 2), tokens_per_row=4)
        for i, role in enumerate(("index", "other"))
    )
    tensors = tuple(Tensor(s, np.arange(4, dtype=np.float32).reshape(1, 2, 2)) for s in (k, v))
    s = replace(snapshot(range(10)), layers=(Layer(index=0, kind="attention", tensors=tensors),))
    assert same(native.loads(native.dumps(s)), s) == []
    for n, n_rows in ((4, 1), (8, 2), (0, 0)):
        assert [t.n_rows for t in s.truncate(n).tensors()] == [n_rows, n_rows]
    with pytest.raises(UnsupportedError, match=r"one row for 4 positions.* nearest .* is 4, and above it 8"):
        s.truncate(7)
    with pytest.raises(UnsupportedError, match="nearest reachable length is 8, and above it 10"):
        s.truncate(9)
    with pytest.raises(InputError, match="rows do not fit"):
        native.dumps(
            replace(s, tokens=tuple(range(12)), runs=(Run("prompt", 12),), n_rows=12, positions=(PositionRun(0, 12),))
        )


# -- cutting -------------------------------------------------------------------------------------------------


def test_truncate_is_a_prefix_and_copies_nothing() -> None:
    s = replace(
        snapshot(range(1, 9), n_pending=2, layers=2, n_prompt=5), sampler=SAMPLER, text="x",
        positions=(PositionRun(0, 3), PositionRun(20, 3)), token_offset=23,
    )  # fmt: skip
    for n in range(9):
        cut = s.truncate(n)
        assert cut.tokens == s.tokens[:n]
        assert cut.n_rows == min(n, 6)
        assert cut.n_rows + cut.n_pending == n
        assert sum(r.count for r in cut.runs) == n
        assert cut.row_positions(0, 6).tolist() == [0, 1, 2, 20, 21, 22][: cut.n_rows]
        for mine, theirs in zip(cut.tensors(), s.tensors(), strict=True):
            assert np.array_equal(mine.array, theirs.array[:, : cut.n_rows])
            assert not mine.nbytes or np.shares_memory(mine.array, theirs.array)
        assert (cut.logits is None) == (n < 6)  # they belong to the last row
        assert (cut.text is None) == (n < 8)
        assert (cut.sampler is None) == (n < 8)  # it has drawn the last token, as in a session
        if cut.n_rows:
            assert cut.token_offset == int(cut.row_positions(0, 6)[-1]) + 1
        native.loads(native.dumps(cut))
    assert s.truncate(8) is s
    for n in (-1, 9):
        with pytest.raises(InputError, match="expected 0 to 8"):
            s.truncate(n)


def test_a_partial_capture_is_cut_no_further_than_its_start() -> None:
    s = snapshot(range(8), start=5)
    assert s.truncate(6).layers[0].tensors[0].n_rows == 1
    assert s.truncate(5).layers[0].tensors[0].n_rows == 0
    with pytest.raises(InputError, match="partial capture"):
        s.truncate(4)


@pytest.mark.parametrize("growth", ["window", "replaced"])
def test_what_cannot_be_rewound_says_so(growth: str) -> None:
    s = snapshot(range(6), layers=2)
    k = s.layers[1].tensors[0]
    row_axis = 1 if growth == "window" else -1
    shape = (2, 0, 4) if growth == "window" else (2, 6, 4)
    window = 4 if growth == "window" else 0
    first = 1 if growth == "window" else 0
    made = replace(k.spec, growth=growth, row_axis=row_axis, shape=shape, window=window)
    other = Tensor(made, k.array[:, first:], start=first)
    s = replace(s, layers=(s.layers[0], replace(s.layers[1], tensors=(other, s.layers[1].tensors[1]))))
    above = 4 if growth == "window" else 6
    expected = rf"layer 1: layer1\.k \({growth}.*\) .* nearest reachable length is 0, and above it {above}"
    with pytest.raises(UnsupportedError, match=expected):
        s.truncate(3)
    assert s.truncate(6) is s
    assert s.truncate(0).n_rows == 0


def test_static_tensors_stay_whole() -> None:
    s = snapshot(range(6))
    k, v = s.layers[0].tensors
    cross = Tensor(replace(k.spec, id=7, name="x", role="cross_k", growth="static"), k.array)
    s = replace(s, layers=(replace(s.layers[0], tensors=(k, v, cross)),))
    assert s.truncate(2).layers[0].tensors[2].n_rows == 6
    assert same(native.loads(native.dumps(s)), s) == []


# -- tensors -------------------------------------------------------------------------------------------------


def test_rows_of_a_tensor_are_views_and_count_from_its_start() -> None:
    t = snapshot(range(9), start=3).layers[0].tensors[0]
    assert (t.start, t.n_rows) == (3, 6)
    part = t.rows(4, 7)
    assert (part.start, part.n_rows, part.shape) == (4, 3, (2, 3, 4))
    assert np.array_equal(part.array, t.array[:, 1:4])
    assert np.shares_memory(part.array, t.array)
    assert t.rows(3, 9) is t
    assert t.rows(5, 5).nbytes == 0
    for bad in ((2, 5), (4, 10), (6, 5)):
        with pytest.raises(InputError, match="does not hold these rows"):
            t.rows(*bad)


def test_a_tensor_fits_its_description_or_is_refused() -> None:
    description = spec(0, 0, "k", 2, 4, "float32")
    for bad in (np.zeros((2, 3, 5), np.float32), np.zeros((2, 3, 4), np.float64), np.zeros((3, 3, 4), np.float32)):
        with pytest.raises(InputError, match="does not fit"):
            Tensor(description, bad)
    t = Tensor(description, np.ones((2, 3, 4), np.float32))
    with pytest.raises(InputError, match="does not fit"):
        t.read_into(np.empty((2, 4, 4), np.float32))
    out = np.zeros((2, 3, 4), np.float32)
    t.read_into(out)
    assert out.all()


def test_read_all_fills_everything_and_tells_how_far_it_is() -> None:
    s = native.loads(native.dumps(snapshot(range(50), layers=4)))
    pairs = [(t, np.empty(t.shape, np.float32)) for t in s.tensors()]
    told: list[tuple[int, int]] = []
    read_all(pairs, workers=2, progress=lambda done, total: told.append((done, total)))
    for t, out in pairs:
        assert np.array_equal(out, t.array)
    assert told[-1] == (s.nbytes - 32, s.nbytes - 32)
    assert told == sorted(told)
    read_all([])


def test_dtype_names_are_those_of_numpy_and_back() -> None:
    for name, dtype in DTYPES.items():
        assert numpy_dtype(name) == dtype
        assert dtype_name(dtype) == name
    assert dtype_name(ml_dtypes.bfloat16) == "bfloat16"
    for bad in ("complex64", "object"):
        with pytest.raises(UnsupportedError):
            numpy_dtype(bad)
        with pytest.raises(UnsupportedError):
            dtype_name(bad)


# -- runs ----------------------------------------------------------------------------------------------------

RUNS = st.lists(st.builds(Run, st.sampled_from(["prompt", "generated"]), st.integers(0, 4)), max_size=6)
POSITIONS = st.lists(st.builds(PositionRun, st.integers(-3, 9), st.integers(0, 4)), max_size=6)


def kinds(runs: Any) -> list[str]:
    return [r.kind for r in runs for _ in range(r.count)]


def places(runs: Any) -> list[int]:
    return [r.start + i for r in runs for i in range(r.count)]


@given(RUNS, RUNS, st.integers(0, 12))
def test_runs_against_lists(a: list[Run], b: list[Run], n: int) -> None:
    joined = join_runs(join_runs((), a), b)
    assert kinds(joined) == kinds(a) + kinds(b)
    assert all(x.kind != y.kind for x, y in itertools.pairwise(joined))
    assert kinds(cut_runs(joined, n)) == kinds(joined)[:n]


@given(POSITIONS, POSITIONS, st.integers(0, 12), st.integers(0, 12))
def test_positions_against_lists(a: list[PositionRun], b: list[PositionRun], n: int, m: int) -> None:
    joined = join_positions(join_positions((), a), b)
    assert places(joined) == places(a) + places(b)
    assert places(cut_positions(joined, n)) == places(joined)[:n]
    s = Snapshot(positions=joined, n_rows=len(places(joined)))
    if joined:
        assert s.row_positions(n, m).tolist() == places(joined)[n:m]
    assert Snapshot(n_rows=5).row_positions(1, 9).tolist() == [1, 2, 3, 4]


def test_a_snapshot_saves_itself_whichever_module_was_imported(tmp_path: Any) -> None:
    code = "import sys; from kvsnap.layout import Snapshot; print(Snapshot().save(sys.argv[1]).n_tokens)"
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a")], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert (found.stdout.strip(), found.stderr) == ("0", "")

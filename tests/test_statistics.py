"""Statistics of a cache: each figure against numpy written down anew, what must and must not change it, and samples."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - registers bfloat16 with numpy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvsnap
import synthetic
from kvsnap.errors import DamagedError, InputError
from kvsnap.inspection.statistics import HeadStatistics, Statistics, statistics
from kvsnap.inspection.statistics.measuring import HeadMoments, has_products, measure, spans_for
from kvsnap.inspection.values import head_rows
from kvsnap.layout import Layer, Snapshot, Tensor
from kvsnap.session import Session

DATA = Path(__file__).parent / "data"


def snapshot_of(*layers: dict[str, np.ndarray[Any, Any]], **fields: Any) -> Snapshot:
    """A snapshot whose layers hold these arrays `[heads, rows, dim]` by role."""
    n_rows = max(a.shape[1] for layer in layers for a in layer.values())
    made = []
    for i, arrays in enumerate(layers):
        tensors = []
        for j, (role, values) in enumerate(arrays.items()):
            name = str(values.dtype)
            spec = synthetic.spec(10 * i + j, i, role, values.shape[0], values.shape[2], name)
            tensors.append(Tensor(spec, values, start=n_rows - values.shape[1]))
        made.append(Layer(index=i, kind="attention", tensors=tuple(tensors), num_query_heads=4))
    base = synthetic.snapshot(range(n_rows), layers=0, **fields)
    return replace(base, layers=tuple(made))


def drawn(heads: int = 3, rows: int = 200, dim: int = 16, seed: int = 0) -> np.ndarray[Any, Any]:
    """Values with some channels much wider than others, around a mean that is not 0, of less than full rank."""
    random = np.random.default_rng(seed)
    mixed = random.standard_normal((heads, rows, dim - 3)) @ random.standard_normal((heads, dim - 3, dim))
    return (mixed * random.uniform(0.2, 2, (heads, 1, dim)) + random.standard_normal((heads, 1, dim)) * 3).astype(
        np.float32
    )


def entropy(counts: np.ndarray[Any, Any]) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def direct(values: np.ndarray[Any, Any]) -> dict[str, float]:
    """The figures of one head `[rows, dim]` without the code under test: whole arrays, singular values, no sums."""
    wide = np.asarray(values, np.float64)
    norms = np.linalg.norm(wide, axis=1)
    told = {
        "mean": wide.mean(), "std": wide.std(), "min": wide.min(), "max": wide.max(), "mean_norm": norms.mean(),
        "min_norm": norms.min(), "max_norm": norms.max(),
        "mean_share": (wide.mean(axis=0) ** 2).sum() / (wide**2).sum(axis=1).mean(),
    }  # fmt: skip
    singular = np.linalg.svd(wide - wide.mean(axis=0), compute_uv=False)
    singular = singular[singular > singular[0] * 1e-7]
    energy = np.cumsum(singular**2) / (singular**2).sum()
    for name, share in (("rank_90", 0.9), ("rank_99", 0.99), ("rank_999", 0.999)):
        told[name] = int(np.searchsorted(energy, share - 1e-9)) + 1
    told["effective_rank"] = 2 ** entropy(singular)
    told["participation_ratio"] = (singular**2).sum() ** 2 / (singular**4).sum()
    rms = np.sqrt((wide**2).mean(axis=0))
    told["outlier_ratio"] = rms.max() / np.median(rms)
    told["n_low_rows"] = int((norms <= np.median(norms) / 4).sum())
    edges = wide.mean() + wide.std() / 8 * np.arange(-400, 401)
    told["entropy"] = entropy(np.histogram(wide, bins=edges)[0])
    _, exponents = np.frexp(np.where(wide == 0, 2.0**-140, wide))
    told["exponent_entropy"] = entropy(np.unique(exponents, return_counts=True)[1])
    return told


def check(head: HeadStatistics, values: np.ndarray[Any, Any], first_row: int = 0) -> None:
    for name, expected in direct(values).items():
        assert getattr(head, name) == pytest.approx(expected, rel=2e-5, abs=1e-6), name
    norms = np.linalg.norm(np.asarray(values, np.float64), axis=1)
    assert head.min_norm_row is not None
    assert head.max_norm_row is not None
    # By their norms: of rows that are equally long any may be named.
    assert norms[head.min_norm_row - first_row] == pytest.approx(norms.min(), rel=1e-6)
    assert norms[head.max_norm_row - first_row] == pytest.approx(norms.max(), rel=1e-6)


def head_of(found: Statistics, layer: int, role: str, head: int) -> HeadStatistics:
    return next(h for h in found.heads if (h.layer, h.role, h.head) == (layer, role, head))


# -- against numpy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_figures_of_heads_are_those_of_numpy(dtype: str) -> None:
    k, v = drawn(seed=1).astype(dtype), drawn(heads=2, seed=2).astype(dtype)
    found = statistics(snapshot_of({"k": k, "v": v}, {"k": k[::-1] * 2, "v": v + 1}))
    assert [(h.layer, h.role, h.head) for h in found.heads] == [
        (layer, role, head) for layer in (0, 1) for role, n in (("k", 3), ("v", 2)) for head in range(n)
    ]
    for head in range(3):
        check(head_of(found, 0, "k", head), k[head].astype(np.float32))
        check(head_of(found, 1, "k", head), (k[::-1] * 2)[head].astype(np.float32))
    check(head_of(found, 1, "v", 1), (v + 1)[1].astype(np.float32))
    with pytest.raises(AssertionError):  # the comparison notices a row of zeros, and one row less
        check(head_of(found, 0, "k", 0), np.concatenate([k[0, :-1], np.zeros_like(k[0, :1])]).astype(np.float32))
    with pytest.raises(AssertionError):
        check(head_of(found, 0, "k", 0), k[0, :-1].astype(np.float32))


def test_short_rows_and_wide_channels_are_counted_against_medians() -> None:
    random = np.random.default_rng(7)
    k = random.standard_normal((2, 400, 16)) * np.exp(1.2 * random.standard_normal((2, 400, 1)))
    k *= np.exp(random.standard_normal((2, 1, 16)))
    found = statistics(snapshot_of({"k": k.astype(np.float32), "v": k.astype(np.float32)}))
    for head in range(2):
        told, wide = found.heads[head], k[head].astype(np.float32).astype(np.float64)
        norms, rms = np.linalg.norm(wide, axis=1), np.sqrt((wide**2).mean(axis=0))
        assert told.n_low_rows == (norms <= np.median(norms) / 4).sum() > 20
        assert told.outliers == tuple(np.flatnonzero(rms >= 4 * np.median(rms)))
    assert any(h.outliers for h in found.heads)


def test_layers_channels_distributions_and_norms_are_those_of_numpy() -> None:
    k, v = drawn(seed=3), drawn(heads=2, dim=12, seed=4)
    found = statistics(snapshot_of({"k": k, "v": v}))
    layer = found.layers[0]
    assert (layer.role, layer.n_heads, layer.dim, layer.n_rows, layer.dtype) == ("k", 3, 16, 200, "float32")
    wide = k.astype(np.float64)
    for name, expected in (("mean", wide.mean()), ("std", wide.std()), ("min", wide.min()), ("max", wide.max())):
        assert getattr(layer, name) == pytest.approx(expected, rel=1e-6)
    assert layer.effective_rank == pytest.approx(np.mean([h.effective_rank for h in found.heads[:3]]))
    channels = found.channels[0]
    np.testing.assert_allclose(channels.rms, np.sqrt((wide**2).mean(axis=1)), rtol=1e-5)
    np.testing.assert_array_equal(channels.peak, np.abs(k).max(axis=1))
    np.testing.assert_allclose(channels.mean, wide.mean(axis=1), rtol=1e-4, atol=1e-6)
    distribution = found.distributions[0]
    low, high = max(wide.min(), wide.mean() - 6 * wide.std()), min(wide.max(), wide.mean() + 6 * wide.std())
    counts, edges = np.histogram(wide, bins=64, range=(low, high))
    np.testing.assert_allclose(distribution.edges, edges)
    assert np.abs(distribution.counts - counts).sum() <= 2  # one value may lie on an edge
    assert distribution.counts.sum() + distribution.below + distribution.above == k.size == distribution.n_values
    assert (distribution.below, distribution.above) == ((wide < low).sum(), (wide > high).sum())
    norms = np.linalg.norm(wide, axis=2).mean(axis=0)
    np.testing.assert_allclose(found.norms[0].by_row, norms, rtol=1e-5)
    np.testing.assert_allclose(found.norms[0].by_layer, norms[None], rtol=1e-5)
    assert found.norms[0].edges.tolist() == list(range(201))
    assert found.matrix("k", "mean_norm").tolist() == [[h.mean_norm for h in found.heads[:3]]]


def test_rows_of_a_large_tensor_that_distributions_are_of_are_at_equal_distances() -> None:
    k = drawn(heads=3, rows=20_000, dim=9, seed=90)  # two blocks, the second from row 14,563 on
    found = next(iter(head_rows(snapshot_of({"k": k, "v": k[:, :1]}))))
    kept: list[int] = []
    measured = measure(found, ((0, 20_000),), np.array([0, 9_999, 19_999]), products=True, advance=kept.append)
    assert len(kept) > 1
    np.testing.assert_array_equal(measured.spread, k[:, ::5])
    np.testing.assert_array_equal(measured.picked, k[:, [0, 9_999, 19_999]])
    assert measured.spread.size <= 1 << 17
    told = statistics(snapshot_of({"k": k, "v": k})).distributions[0]
    assert told.n_values == k[:, ::5].size == told.counts.sum() + told.below + told.above


def test_norms_of_a_long_sequence_are_means_of_columns() -> None:
    k = drawn(heads=2, rows=5000, dim=4, seed=5)
    norms = statistics(snapshot_of({"k": k, "v": k}, {"k": 2 * k, "v": k})).norms[0]
    assert norms.by_layer.shape == (2, 1024)
    rows = np.linalg.norm(k.astype(np.float64), axis=2).mean(axis=0)
    np.testing.assert_allclose(norms.by_row, 1.5 * rows, rtol=1e-5)
    expected = [rows[a:b].mean() for a, b in zip(norms.edges[:-1], norms.edges[1:], strict=True)]
    np.testing.assert_allclose(norms.by_layer, [expected, np.multiply(expected, 2)], rtol=1e-5)


@pytest.mark.parametrize("path", [*sorted(DATA.glob("mlxkv/ok_*.mlxkv")), DATA / "mlxkv" / "big_endian.mlxkv"])
def test_golden_files_of_mlxkv(path: Path) -> None:
    content = json.loads(path.with_suffix(".json").read_text())["content"]
    found = statistics(path)
    n_checked = 0
    for layer in content["layers"]:
        slabs = [layer["key_slab"], layer["value_slab"]]
        for role, slab in zip("kv", slabs, strict=True):
            for number, head in enumerate(layer["heads"]):
                if slab is None:
                    told = head["key" if role == "k" else "value"]
                    values = np.frombuffer(bytes.fromhex(told["f32_hex"]), "<f4").reshape(content["seq_len"], -1)
                    check(head_of(found, layer["layer"], role, number), values)
                    n_checked += 1
    assert n_checked or any(layer["key_slab"] for layer in content["layers"])


def test_golden_files_of_kvsnap() -> None:
    content = json.loads((DATA / "tiny.json").read_text())
    found = statistics(DATA / "tiny.kvsnap")
    assert (found.n_tokens, found.n_rows, found.num_layers) == (6, 5, 2)
    for head in found.heads:
        tensor = content["tensors"][f"layer{head.layer}.{head.role}"]
        values = np.frombuffer(bytes.fromhex(tensor["hex"]), "<f4").reshape(tensor["shape"])[head.head]
        check(head, values)
    assert len(found.heads) == 8


def test_golden_files_of_colikv() -> None:
    path = DATA / "colikv" / "v1_dsa_all_layers.coli_kv"
    content = json.loads(path.with_suffix(".json").read_text())
    found = statistics(path)
    assert found.roles == ("latent", "rope", "index")
    for layer in range(4):
        for role in ("latent", "rope", "index"):
            rows = [
                np.frombuffer(bytes.fromhex(record[role][layer]["f32_hex"]), "<f4") for record in content["records"]
            ]
            check(head_of(found, layer, role, 0), np.stack(rows))


# -- sums in pieces --------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_sums_in_pieces_are_sums_of_the_whole(data: st.DataObject) -> None:
    n, dim = data.draw(st.integers(2, 40)), data.draw(st.integers(1, 6))
    seed, far = data.draw(st.integers(0, 1 << 30)), data.draw(st.sampled_from([0.0, 1.0, 1e4, -1e7]))
    random = np.random.default_rng(seed)
    values = (random.standard_normal((n, dim)) + far).astype(np.float32)
    for place in data.draw(st.lists(st.integers(0, n - 1), max_size=3)):
        values[place, random.integers(dim)] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    cuts = sorted(data.draw(st.sets(st.integers(1, n - 1))))
    moments, norms = HeadMoments.empty(dim, products=True), []
    norms += [moments.add(piece, np.empty((len(piece), dim))) for piece in np.split(values, cuts)]
    whole = np.isfinite(values).all(axis=1)
    assert moments.n == whole.sum()
    assert moments.n_left_out == (~whole).sum()
    assert (moments.n_nan, moments.n_infinite) == (np.isnan(values).sum(), np.isinf(values).sum())
    assert np.isnan(np.concatenate(norms)).tolist() == (~whole).tolist()
    if whole.any():
        kept = values[whole].astype(np.float64)
        np.testing.assert_allclose(moments.mean, kept.mean(axis=0), rtol=1e-12)
        centred = kept - kept.mean(axis=0)
        np.testing.assert_allclose(moments.scatter, centred.T @ centred, rtol=1e-9, atol=1e-9 * max(1, abs(far)))
        assert (moments.low == kept.min(axis=0)).all()
        assert (moments.high == kept.max(axis=0)).all()


def test_a_mean_that_moves_far_costs_no_digits() -> None:
    random = np.random.default_rng(0)
    values = random.standard_normal((4000, 4)).astype(np.float32)
    values[2000:] += 30_000
    moments = HeadMoments.empty(4, products=True)
    for piece in np.split(values, 40):
        moments.add(piece, np.empty((100, 4)))
    exact = values.astype(np.longdouble)
    centred = exact - exact.mean(axis=0)
    np.testing.assert_allclose(moments.scatter, (centred.T @ centred).astype(np.float64), rtol=1e-12)


def test_huge_and_tiny_values_do_not_overflow_or_vanish() -> None:
    k = np.stack([drawn(heads=1)[0] * np.float32(1e30), drawn(heads=1, seed=1)[0] * np.float32(1e-30)])
    found = statistics(snapshot_of({"k": k, "v": k}))
    for head in range(2):
        check(head_of(found, 0, "k", head), k[head])
        assert not head_of(found, 0, "k", head).dead


# -- what stands out -------------------------------------------------------------------------------------------------


def test_a_head_whose_rows_are_alike_is_dead_and_one_that_varies_is_not() -> None:
    k, v = drawn(heads=4, seed=6), drawn(heads=4, seed=7)
    k[1] = k[1, :1]
    k[2] = 0
    found = statistics(snapshot_of({"k": k, "v": v}))
    assert not any(h.twin for h in statistics(snapshot_of({"k": k, "v": v}, {"k": k[:3], "v": v + 1})).heads if h.dead)
    assert [h.dead for h in found.heads] == [False, True, True, False, False, False, False, False]
    assert found.findings[0] == "dead heads: layer 0 k head 1 (all rows alike); layer 0 k head 2 (zeros)"
    assert found.heads[1].effective_rank is None
    assert found.heads[1].mean_share == pytest.approx(1)
    assert found.layers[0].n_dead == 2
    k[1, 5] *= 2
    k[2, 7, 3] = 1e-20
    assert not any(h.dead for h in statistics(snapshot_of({"k": k, "v": v})).heads)


def test_a_channel_made_20_times_wider_is_named() -> None:
    random = np.random.default_rng(8)
    k = random.standard_normal((2, 300, 16)).astype(np.float32)
    v = random.standard_normal((2, 300, 16)).astype(np.float32)
    before = statistics(snapshot_of({"k": k, "v": v}))
    assert not any(h.outliers for h in before.heads)
    assert not any("outlier" in f for f in before.findings)
    k[1, :, 11] *= 20
    found = statistics(snapshot_of({"k": k, "v": v}))
    assert [h.outliers for h in found.heads] == [(), (11,), (), ()]
    assert found.heads[1].outlier_ratio == pytest.approx(20, rel=0.1)
    assert found.layers[0].n_outliers == 1
    assert "layer 0 head 1 channel 11" in next(f for f in found.findings if "outlier" in f)


def test_the_order_of_rows_changes_norms_along_the_sequence_and_nothing_else() -> None:
    k, v = drawn(seed=9), drawn(seed=10)
    order = np.random.default_rng(0).permutation(200)
    a, b = statistics(snapshot_of({"k": k, "v": v})), statistics(snapshot_of({"k": k[:, order], "v": v[:, order]}))
    for one, other in zip(a.heads, b.heads, strict=True):
        for name in ("mean", "std", "mean_norm", "effective_rank", "rank_99", "entropy", "mean_share", "outlier_ratio"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-9), name
        assert order[other.max_norm_row] == one.max_norm_row
    np.testing.assert_allclose(a.norms[0].by_row[order], b.norms[0].by_row, rtol=1e-6)
    assert not np.allclose(a.norms[0].by_row, b.norms[0].by_row)


def test_values_that_are_no_numbers_are_counted_and_spoil_nothing() -> None:
    k, v = drawn(seed=11), drawn(seed=12)
    k[1, 40, 3], k[1, 41, 2], k[2, 0, 0] = np.nan, -np.inf, np.inf
    found = statistics(snapshot_of({"k": k, "v": v}, {"k": k, "v": v}))
    assert [(h.n_nan, h.n_infinite, h.n_left_out, h.n_rows) for h in found.heads[:3]] == [
        (0, 0, 0, 200), (1, 1, 2, 198), (0, 1, 1, 199),
    ]  # fmt: skip
    kept = np.delete(k[1], [40, 41], axis=0)
    expected = direct(kept)
    assert found.heads[1].mean_norm == pytest.approx(expected["mean_norm"])
    assert found.heads[1].effective_rank == pytest.approx(expected["effective_rank"])
    assert found.heads[1].max_norm == pytest.approx(expected["max_norm"])
    assert "1 NaN, 2 infinite, 3 rows of heads left out" in found.findings[0]
    assert np.isfinite(found.norms[0].by_row).all()  # other heads hold the row
    assert np.isfinite(found.channels[0].rms).all()
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_head_of_nothing_but_nan_has_no_figures() -> None:
    k, v = drawn(seed=13), drawn(seed=14)
    k[0] = np.nan
    found = statistics(snapshot_of({"k": k, "v": v}))
    head = found.heads[0]
    assert (head.n_rows, head.mean, head.effective_rank, head.max_norm_row, head.dead) == (0, None, None, None, False)
    assert np.isnan(found.matrix("k", "mean")[0]).tolist() == [True, False, False]
    assert found.layers[0].mean == pytest.approx(k[1:].astype(np.float64).mean())
    v[...] = np.inf
    k[...] = np.nan
    nothing = statistics(snapshot_of({"k": k, "v": v}))
    assert nothing.distributions == ()
    assert all(h.mean is None for h in nothing.heads)
    assert np.isnan(nothing.norms[0].by_row).all()


def test_twins_are_the_same_bits_in_the_same_order() -> None:
    k, v = drawn(heads=2, seed=15), drawn(heads=2, seed=16)
    other = k[::-1].copy()
    found = statistics(snapshot_of({"k": k, "v": v}, {"k": other, "v": v + 1}))
    assert [h.twin for h in found.heads if h.role == "k"] == [None, None, (0, 1), (0, 0)]
    assert all(h.twin is None for h in found.heads if h.role == "v")
    assert "layer 1 k head 0 is layer 0 head 1" in next(f for f in found.findings if "bit by bit" in f)
    other[0, 199, 0] = np.nextafter(other[0, 199, 0], np.float32(np.inf))
    other[1] = other[1, ::-1]
    assert all(h.twin is None for h in statistics(snapshot_of({"k": k, "v": v}, {"k": other, "v": v})).heads[4:6])


def test_rows_with_short_values_may_be_sinks() -> None:
    layers = []
    for i in range(4):
        k, v = drawn(seed=20 + i) + 5, drawn(seed=30 + i) + 5
        if i:
            v[:, 0] *= 0.02
            k[:, 0] *= 0.5
        v[:, 50] *= 0.45  # short, but not so short
        if i == 3:
            v[0, 100] *= 0.01  # in one head of three
        layers.append({"k": k, "v": v})
    found = statistics(snapshot_of(*layers))
    (sink,) = found.sinks
    assert (sink.row, sink.token, sink.n_layers, sink.layers) == (0, 0, 3, (1, 2, 3))
    norms = np.linalg.norm(layers[1]["v"].astype(np.float64), axis=2)
    ratios = [
        np.median(n[:, 0] / np.median(n, axis=1))
        for n in (np.linalg.norm(layer["v"].astype(np.float64), axis=2) for layer in layers[1:])
    ]
    assert sink.value_ratio == pytest.approx(np.mean(ratios), rel=1e-5)
    assert sink.value_ratio < 0.25 < norms[0, 100] / np.median(norms[0])
    assert sink.key_ratio is not None
    assert 0.3 < sink.key_ratio < 0.8
    assert any("row 0 (token 0), in up to 3 layers" in f for f in found.findings)
    layers[1]["v"][:, 0] *= 50
    layers[2]["v"][:, 0] *= 50
    layers[3]["v"][:, 0] *= 50
    assert statistics(snapshot_of(*layers)).sinks == ()


# -- similarity ------------------------------------------------------------------------------------------------------


def cka(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """Debiased linear CKA, term by term as Song et al. 2012 write HSIC, of rows `[n, features]`."""
    n = len(a)

    def hsic(k: np.ndarray[Any, Any], m: np.ndarray[Any, Any]) -> float:
        k, m = k - np.diag(np.diag(k)), m - np.diag(np.diag(m))
        one = np.ones(n)
        terms = np.trace(k @ m) + (one @ k @ one) * (one @ m @ one) / (n - 1) / (n - 2)
        return float(terms - 2 / (n - 2) * (one @ k @ m @ one))

    k, m = a @ a.T, b @ b.T
    return hsic(k, m) / np.sqrt(hsic(k, k) * hsic(m, m))


def test_similarity_is_cka_and_does_not_see_rotations_or_scale() -> None:
    random = np.random.default_rng(0)
    k = random.standard_normal((2, 120, 8)).astype(np.float32)
    turn = np.linalg.qr(random.standard_normal((8, 8)))[0]
    turned = (3 * k @ turn).astype(np.float32)
    mixed = (k + random.standard_normal(k.shape)).astype(np.float32)
    other = random.standard_normal(k.shape).astype(np.float32)
    arrays = [k, turned, mixed, other, k[:, ::-1]]
    found = statistics(snapshot_of(*({"k": a, "v": a} for a in arrays))).similarity[0]
    assert (found.role, found.layers, found.n_rows) == ("k", (0, 1, 2, 3, 4), 120)
    flat = [a.transpose(1, 0, 2).reshape(120, -1).astype(np.float64) for a in arrays]
    expected = [[cka(a, b) for b in flat] for a in flat]
    np.testing.assert_allclose(found.values, expected, atol=2e-5)
    assert found.values[0, 1] == pytest.approx(1, abs=1e-5)
    assert 0.3 < found.values[0, 2] < 0.9
    assert abs(found.values[0, 3]) < 0.15
    assert abs(found.values[0, 4]) < 0.15  # the rows in another order


def test_similarity_is_of_rows_that_all_layers_hold() -> None:
    k = drawn(heads=2, rows=600, seed=40)
    window = {"k": k[:, -50:], "v": k[:, -50:]}
    found = statistics(snapshot_of({"k": k, "v": k}, window)).similarity[0]
    assert found.n_rows == 50
    assert found.values[0, 1] == pytest.approx(1, abs=1e-5)
    other_way = statistics(snapshot_of(window, {"k": k, "v": k})).similarity[0]
    assert other_way.n_rows == 50
    assert other_way.values[0, 1] == pytest.approx(1, abs=1e-5)
    shifted = {"k": k[:, -51:-1], "v": k[:, -51:-1]}  # off by one
    assert statistics(snapshot_of({"k": k, "v": k}, shifted)).similarity[0].values[0, 1] < 0.5
    short = {"k": k[:, -3:], "v": k[:, -3:]}
    assert statistics(snapshot_of({"k": k, "v": k}, short)).similarity == ()


# -- samples ---------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(1, 20_000))
def test_a_sample_is_in_order_inside_small_enough_and_has_both_ends(n_rows: int, sample: int) -> None:
    spans = spans_for(n_rows, sample)
    taken = sum(stop - start for start, stop in spans)
    assert all(start < stop for start, stop in spans)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert taken <= sample
    if n_rows <= sample:
        assert taken == n_rows
    else:
        assert taken > sample - sample // 64 - 1 - 64 or taken >= sample * 0.9
        assert spans[0][0] == 0
        assert spans[-1][1] == (n_rows if sample > 1 else 1)
    assert spans == spans_for(n_rows, sample)


def taken_rows(n_rows: int, sample: int) -> np.ndarray[Any, Any]:
    return np.concatenate([np.arange(a, b) for a, b in spans_for(n_rows, sample)])


def test_figures_of_a_sample_are_those_of_its_rows() -> None:
    k, v = drawn(rows=3000, seed=50), drawn(rows=3000, seed=51)
    found = statistics(snapshot_of({"k": k, "v": v}, {"k": k, "v": v + 1}), sample=500)
    rows = taken_rows(3000, 500)
    assert 450 <= len(rows) <= 500
    for head in range(3):
        expected = direct(k[head, rows])
        told = head_of(found, 0, "k", head)
        assert told.n_rows == len(rows)
        for name in ("mean", "std", "mean_norm", "effective_rank", "entropy"):
            assert getattr(told, name) == pytest.approx(expected[name], rel=2e-5), name
        assert told.max_norm_row == rows[np.linalg.norm(k[head, rows].astype(np.float64), axis=1).argmax()]
    assert np.flatnonzero(np.isfinite(found.norms[0].by_row)).tolist() == rows.tolist()
    assert found.similarity[0].values[0, 1] == pytest.approx(1, abs=1e-5)
    assert "figures are of a sample" in found.notes[0]
    assert (found.layers[0].n_rows, found.layers[0].n_held) == (len(rows), 3000)
    assert statistics(snapshot_of({"k": k, "v": v}), sample=3000).notes[0].startswith("no layer has more rows")


def long_session(path: Path, turns: int = 20, rows: int = 100, codec: str | None = None) -> Snapshot:
    tokens = list(range(turns * rows))
    with Session.open(path) as session:
        for turn in range(1, turns + 1):
            start = (turn - 1) * rows
            session.append(synthetic.snapshot(tokens[: turn * rows], start=start, layers=2, dim=8), codec=codec)
    return synthetic.snapshot(tokens, layers=2, dim=8)


@pytest.mark.parametrize("codec", [None, "q8"])
def test_a_sample_of_a_session_reads_the_spans_that_hold_it(tmp_path: Path, codec: str | None) -> None:
    path = tmp_path / "chat.kvsnap"
    whole = long_session(path, codec=codec)
    found, in_memory = statistics(path, sample=128), statistics(whole, sample=128)
    for a, b in zip(found.heads, in_memory.heads, strict=True):
        assert a.mean_norm == pytest.approx(b.mean_norm, rel=1e-2 if codec else 1e-12)
        assert a.max_norm_row == b.max_norm_row or codec
    assert (found.layers[0].bound > 0) == (codec == "q8")
    # 128 rows are two runs: the first 64 and the last 64 rows, so in the first and in the last span.
    data = bytearray(path.read_bytes())
    values = next(iter(head_rows(kvsnap.load(path)))).values()
    if codec is None:
        at = data.index(np.ascontiguousarray(values[:, 1000:1100]).tobytes()[:64])
        data[at + 3] ^= 1
        path.write_bytes(data)
        assert statistics(path, sample=128).heads == found.heads
        with pytest.raises(DamagedError):
            statistics(path)
        with pytest.raises(DamagedError):
            statistics(path, sample=1900)


@settings(max_examples=40, deadline=None)
@given(spans=st.lists(st.integers(0, 1999), min_size=2, max_size=12, unique=True))
def test_any_spans_of_a_session_are_the_rows_they_say(
    tmp_path_factory: pytest.TempPathFactory, spans: list[int]
) -> None:
    path = tmp_path_factory.getbasetemp() / "spans.kvsnap"
    if not path.exists():
        long_session(path)
    ends = sorted(spans)[: len(spans) // 2 * 2]
    wanted: Sequence[tuple[int, int]] = list(zip(ends[::2], ends[1::2], strict=True))
    found = next(iter(head_rows(kvsnap.load(path))))
    values = found.values()
    for start, block in found.blocks_of(wanted, 4 * 2 * 8 * 30):
        assert any(a <= start and start + block.shape[1] <= b for a, b in wanted)
        np.testing.assert_array_equal(block, values[:, start : start + block.shape[1]])
    taken = [(start, start + block.shape[1]) for start, block in found.blocks_of(wanted)]
    assert sum(b - a for a, b in taken) == sum(b - a for a, b in wanted)


# -- any cache -------------------------------------------------------------------------------------------------------


def test_windows_groups_of_tokens_states_and_rows_of_an_encoder() -> None:
    tokens = list(range(41))
    made = synthetic.snapshot_of_kinds(tokens, ["grow", "window8", "grow4", "recurrent", "grow+static", "buffer"])
    found = statistics(made)
    by_layer = {(r.layer, r.role): r for r in found.layers}
    assert (by_layer[1, "k"].n_rows, by_layer[1, "k"].first_row) == (7, 34)
    assert (by_layer[2, "k"].n_rows, by_layer[2, "k"].tokens_per_row) == (10, 4)
    state = by_layer[3, "recurrent"]
    assert (state.is_state, state.n_rows, state.effective_rank, state.n_outliers) == (True, 1, None, 0)
    assert state.max is not None
    assert by_layer[4, "cross_k"].n_rows == 3
    assert not by_layer[4, "cross_k"].is_state
    norms = {n.role: n for n in found.norms}
    assert norms["cross_k"].by_row.shape == (3,)
    assert norms["k"].by_row.shape == (41,)
    window = norms["k"].by_layer[norms["k"].layers.index(1)]
    assert np.flatnonzero(np.isfinite(window)).tolist() == list(range(34, 41))
    grouped = norms["k"].by_layer[norms["k"].layers.index(2)]
    assert np.flatnonzero(np.isfinite(grouped)).tolist() == list(range(40))
    assert len(set(grouped[:40].tolist())) == 10
    assert head_of(found, 1, "k", 0).max_norm_row in range(34, 41)
    assert head_of(found, 2, "k", 0).max_norm_row % 4 == 0
    assert found.similarity == ()  # their rows stand for other numbers of tokens


def test_a_window_is_sampled_on_its_own() -> None:
    k = drawn(rows=5000, seed=60)
    found = statistics(snapshot_of({"k": k, "v": k}, {"k": k[:, -700:], "v": k[:, -700:]}), sample=640)
    assert {(r.layer, r.n_rows) for r in found.layers} == {(0, 640), (1, 640)}
    rows = taken_rows(700, 640)
    told, expected = head_of(found, 1, "k", 0), direct(k[0, -700:][rows])
    assert told.mean_norm == pytest.approx(expected["mean_norm"])
    assert told.max_norm_row == 4300 + rows[np.linalg.norm(k[0, -700:][rows].astype(np.float64), axis=1).argmax()]
    assert found.similarity[0].n_rows >= 64  # the last run at least


def test_heads_of_unequal_width_and_layers_that_share() -> None:
    a, b = drawn(heads=2, dim=8, seed=61), drawn(heads=1, dim=16, seed=62)
    base = snapshot_of({"k": a, "v": a})
    specs = [synthetic.spec(50 + i, 0, "k", len(x), x.shape[2], "float32") for i, x in enumerate((a, b))]
    ragged = Layer(index=0, kind="attention", tensors=tuple(Tensor(s, x) for s, x in zip(specs, (a, b), strict=True)))
    second = replace(base.layers[0], index=1)
    sharing = [Layer(index=i, kind="attention", tensors=(), shares=1) for i in (2, 3)]
    found = statistics(replace(base, layers=(ragged, second, *sharing)))
    assert [(h.head, h.dim) for h in found.heads if h.layer == 0] == [(0, 8), (1, 8), (2, 16)]
    check(head_of(found, 0, "k", 2), b[0])
    both = np.concatenate([a.ravel(), b.ravel()]).astype(np.float64)
    assert found.layers[0].mean == pytest.approx(both.mean())
    assert found.layers[0].std == pytest.approx(both.std())
    assert [(c.first_head, c.rms.shape) for c in found.channels[:2]] == [(0, (2, 8)), (2, (1, 16))]
    assert "layers 2 to 3 use the keys and values of layer 1 and have no figures of their own" in found.notes
    assert found.matrix("k", "dim").shape == (4, 3)


def test_an_empty_cache_has_no_figures() -> None:
    made = synthetic.snapshot((), layers=2)
    found = statistics(made)
    assert found.heads == found.layers == found.sinks == found.distributions == ()
    assert found.notes == ("layers 0 to 1 hold no vectors",)
    assert found.tables()[0].rows == found.table("row").rows == ()
    one = statistics(synthetic.snapshot((5,), layers=2))
    assert one.heads[0].effective_rank is None
    assert one.heads[0].mean is not None
    assert not one.heads[0].dead


def test_layers_and_roles_that_are_asked_for() -> None:
    made = synthetic.snapshot(range(30), layers=3)
    found = statistics(made, layers=[2], roles=["v"])
    assert {(h.layer, h.role) for h in found.heads} == {(2, "v")}
    assert found.heads == tuple(h for h in statistics(made).heads if (h.layer, h.role) == (2, "v"))
    assert found.matrix("v", "mean").shape == (3, 2)
    for wrong in (
        {"layers": [3]},
        {"layers": [-1]},
        {"roles": ["latent"]},
        {"sample": 0},
        {"sample": -5},
        {"sample": 2.5},
        {"layers": ["a"]},
    ):
        with pytest.raises(InputError):
            statistics(made, **wrong)


def test_progress_ends_at_the_end_and_never_goes_back() -> None:
    told: list[tuple[int, int]] = []
    made = synthetic.snapshot(range(3000), layers=2, recurrent=True)
    statistics(made, progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1]
    assert [d for d, _ in told] == sorted(d for d, _ in told)


def test_memory_is_one_tensor_and_some_blocks(tmp_path: Path) -> None:
    path = tmp_path / "long.kvsnap"
    k = drawn(heads=2, rows=40_000, dim=64, seed=70)  # 20 MB
    kvsnap.save(snapshot_of(*({"k": k + i, "v": k - i} for i in range(3))), path, sync=False)
    tracemalloc.start()
    try:
        statistics(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < k.nbytes  # mapped, so not even one tensor; the file has six


def test_tables_data_and_html() -> None:
    found = statistics(snapshot_of({"k": drawn(), "v": drawn(seed=1)}))
    layers, heads, words = found.tables()
    assert [text for kind, text in words.rows if kind == "finding"] == list(found.findings)
    assert layers.to_dicts()[0]["mean"] == found.layers[0].mean
    assert len(heads.rows) == 6
    assert found._repr_html_().startswith("<table><caption>in words</caption>")
    data = found.to_dict()
    assert data["heads"][2]["twin"] is None
    assert len(data["channels"][0]["rms"][0]) == 16
    json.dumps(data)


def test_tokens_of_rows_where_a_file_has_only_the_last_ones() -> None:
    k = drawn(rows=50, seed=80) + 5
    v = drawn(rows=50, seed=81) + 5
    v[:, 45] = 0.001
    base = snapshot_of({"k": k, "v": v})
    found = statistics(replace(base, tokens=tuple(range(100, 112)), n_pending=2))  # of 10 rows, and two behind them
    assert (found.n_tokens, found.tokens) == (12, tuple(range(100, 110)))
    assert [(s.row, s.token) for s in found.sinks] == [(45, 105)]
    table = found.table("row").to_dicts()
    assert [row["token"] for row in table] == [None] * 40 + list(range(100, 110))
    assert [row["row"] for row in table if row["sink_layers"]] == [45]


def test_what_is_too_wide_has_no_principal_components_and_what_is_empty_is_left_out() -> None:
    wide, empty = drawn(heads=1, rows=4, dim=1025, seed=82), np.zeros((2, 200, 0), np.float32)
    found = statistics(snapshot_of({"k": wide, "v": wide[..., :1024]}))
    assert found.heads[0].effective_rank is None
    assert found.heads[0].mean_share is not None
    assert found.heads[1].effective_rank is not None
    expected = direct(wide[0])
    for name in ("mean", "std", "mean_norm", "mean_share", "outlier_ratio"):
        assert getattr(found.heads[0], name) == pytest.approx(expected[name], rel=1e-5)
    assert "layer 0 k: rows too wide, or too many heads, for principal components" in found.notes
    many = next(iter(head_rows(snapshot_of({"k": np.zeros((9000, 1, 64), np.float32)}))))
    assert not has_products(many)  # 9,000 matrices of 64 x 64 would take 295 MB
    assert has_products(next(iter(head_rows(snapshot_of({"k": np.zeros((128, 1, 128), np.float32)})))))
    assert statistics(snapshot_of({"k": drawn(), "v": empty})).roles == ("k",)


def test_a_table_of_something_else_is_refused() -> None:
    with pytest.raises(InputError):
        statistics(synthetic.tiny()).table("token")


def test_heads_of_one_layer_that_hold_other_rows_than_each_other_are_told_without_sinks() -> None:
    made = synthetic.snapshot_of_kinds(range(1, 41), ["grow+window8", "grow"])
    found = statistics(made)
    assert [(h.layer, h.role, h.head, h.n_rows) for h in found.heads if h.role == "v"] == [
        (0, "v", 0, 40), (0, "v", 1, 40), (0, "v", 2, 7), (0, "v", 3, 7), (1, "v", 0, 40), (1, "v", 1, 40),
    ]  # fmt: skip
    assert found.sinks == statistics(made, layers=[1]).sinks


def test_sinks_are_told_from_an_eighth_of_the_layers_on() -> None:
    layers = [{"k": drawn(seed=i), "v": drawn(seed=100 + i) + 5} for i in range(16)]
    layers[3]["v"][:, 7] *= 0.01
    assert statistics(snapshot_of(*layers)).sinks == ()
    layers[9]["v"][:, 7] *= 0.01
    (sink,) = statistics(snapshot_of(*layers)).sinks
    assert (sink.row, sink.layers) == (7, (3, 9))
    layers[3]["v"][:, 50, 0] = np.nan  # a row that cannot be told of changes nothing for the others
    (again,) = statistics(snapshot_of(*layers)).sinks
    assert (again.row, again.layers) == (7, (3, 9))
    assert again.value_ratio == pytest.approx(sink.value_ratio, rel=0.02)


@pytest.mark.parametrize(("varies", "dead"), [(0.0, True), (1e-4, True), (1e-2, False)])
def test_a_head_is_dead_where_next_to_nothing_of_its_energy_varies(varies: float, dead: bool) -> None:
    k = (1 + varies * drawn(seed=5)).astype(np.float32)
    found = statistics(snapshot_of({"k": k, "v": drawn(seed=6)}))
    wide = k.astype(np.float64)
    shares = wide.var(axis=1).sum(axis=1) / (wide**2).mean(axis=1).sum(axis=1)
    assert all((share <= 1e-6) == dead for share in shares)
    assert [h.dead for h in found.heads if h.role == "k"] == [dead] * len(k)

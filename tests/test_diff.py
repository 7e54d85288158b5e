"""diff: figures against numpy done in the plainest way, on files read by the reader of the specification."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvsnap
import synthetic
from kvsnap import Diff, cli, diff
from kvsnap.errors import DamagedError, InputError, MissingError
from kvsnap.inspection.diff.alignment import same_runs
from kvsnap.inspection.similarity import cka_between, gram
from kvsnap.layout import (
    Layer,
    PositionRun,
    RandomState,
    Run,
    Sampler,
    SamplerState,
    Snapshot,
    Tensor,
    TensorSpec,
    numpy_dtype,
)
from spec_file import SpecReader

DATA = Path(__file__).parent / "data"


# -- the plainest way --------------------------------------------------------------------------------------------------


def plain_figures(a: np.ndarray, b: np.ndarray) -> dict[str, Any]:
    """Figures of one head, `[rows, dim]`, row by row and value by value."""
    rows, dim = a.shape
    x, y = a.astype(np.float64), b.astype(np.float64)
    used = np.isfinite(x) & np.isfinite(y)
    row_errors, cosines, errors, places = [], [], [], []
    for r in range(rows):
        p, q = x[r][used[r]], y[r][used[r]]
        d = float(np.linalg.norm(p - q))
        length = float(np.linalg.norm(p))
        row_errors.append(0.0 if d == 0 else d / length if length else math.inf)
        lengths = length * float(np.linalg.norm(q))
        cosines.append(1.0 if d == 0 else float(p @ q) / lengths if lengths else 0.0)
        errors += [abs(float(u) - float(v)) for u, v in zip(p, q, strict=True)]
        places += [r] * len(p)
    p, q = x[used], y[used]
    a_bits, b_bits = ([np.asarray(v).tobytes() for v in side.reshape(-1)] for side in (a, b))
    different = [i // dim for i, (u, v) in enumerate(zip(a_bits, b_bits, strict=True)) if u != v]
    largest = max(errors, default=0.0)
    return {
        "n_rows": rows,
        "n_values": rows * dim,
        "n_different": len(different),
        "relative_error": float(np.linalg.norm(p - q) / np.linalg.norm(p)) if (p != q).any() else 0.0,
        "max_row_error": max(row_errors),
        "cosine_mean": float(np.mean(cosines)),
        "cosine_min": min(cosines),
        "max_abs": largest,
        "mean_abs": float(np.mean(errors)) if errors else 0.0,
        "rms_a": float(np.sqrt(np.mean(p**2))) if p.size else 0.0,
        "rms_b": float(np.sqrt(np.mean(q**2))) if q.size else 0.0,
        "row": places[errors.index(largest)] if largest else None,
        "first_row": different[0] if different else None,
        "nonfinite_a": int((~np.isfinite(x)).sum()),
        "nonfinite_b": int((~np.isfinite(y)).sum()),
    }


def faults(found: Any, expected: dict[str, Any]) -> list[str]:
    """Names of the figures that are not as expected."""
    wrong = []
    for name, value in expected.items():
        told = getattr(found, name)
        fits = told == value if value is None or isinstance(value, int) else told == pytest.approx(value, 1e-9, 1e-12)
        if not fits:
            wrong.append(f"{name}: {told} is not {value}")
    return wrong


def of_file(path: Path) -> dict[str, np.ndarray]:
    """Tensors by name, by the reader of the specification."""
    return SpecReader(path.read_bytes()).content()["tensors"]


def head_of(d: Diff, layer: int, role: str, head: int) -> Any:
    return next(h for h in d.heads if (h.layer, h.role, h.head) == (layer, role, head))


def changed(snapshot: Snapshot, layer: int, role: str, change: Any) -> Snapshot:
    """A snapshot in which `change` was called with a copy of the values of one tensor."""
    layers = []
    for entry in snapshot.layers:
        tensors = []
        for tensor in entry.tensors:
            if (entry.index, tensor.role) == (layer, role):
                values = tensor.array.copy()
                change(values)
                tensors.append(Tensor(tensor.spec, values, start=tensor.start, bound=tensor.bound))
            else:
                tensors.append(tensor)
        layers.append(replace(entry, tensors=tuple(tensors)))
    return replace(snapshot, layers=tuple(layers))


BASE = synthetic.snapshot(range(1, 41), layers=3, heads=4, dim=8)


# -- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_figures_of_a_quantised_file_are_those_of_plain_numpy(dtype: str, tmp_path: Path) -> None:
    snapshot = synthetic.snapshot(range(1, 60), layers=2, heads=3, dim=8, dtype=dtype)
    kvsnap.save(snapshot, tmp_path / "a.kvsnap")
    kvsnap.save(snapshot, tmp_path / "b.kvsnap", codec="q8")
    found = diff(tmp_path / "a.kvsnap", tmp_path / "b.kvsnap")
    a, b = of_file(tmp_path / "a.kvsnap"), of_file(tmp_path / "b.kvsnap")
    assert found.verdict == "bound"
    assert len(found.heads) == 2 * 2 * 3
    for head in found.heads:
        name = f"layer{head.layer}.{head.role}"
        expected = plain_figures(a[name][head.head], b[name][head.head])
        assert faults(head, expected) == []
        assert head.within_bound
        assert 0 < head.max_abs <= head.bound
        # Off by one row, or by a head: noticed.
        assert faults(head, plain_figures(a[name][head.head], np.roll(b[name][head.head], 1, axis=0)))
        assert faults(head, plain_figures(a[name][head.head], b[name][head.head - 1]))
    for layer in found.layers:
        name = f"layer{layer.layer}.{layer.role}"
        x, y = (side[name].astype(np.float64) for side in (a, b))
        assert layer.relative_error == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(x), 1e-9)
        assert layer.max_abs == np.abs(x - y).max()
        assert layer.n_different == int((a[name] != b[name]).sum())
        assert (layer.head, layer.row) == np.unravel_index(np.abs(x - y).argmax(), x.shape)[:2]
    for role in "kv":
        x, y = (np.stack([side[f"layer{i}.{role}"].astype(np.float64) for i in range(2)]) for side in (a, b))
        told = next(line for line in found.says if line.startswith("relative error over all layers"))
        assert f"{role} {np.linalg.norm(x - y) / np.linalg.norm(x):.3g}" in told
    assert found.a.encodings.keys() == {"exact"}
    assert found.b.file_bytes == (tmp_path / "b.kvsnap").stat().st_size
    assert found.b.bound == max(head.bound for head in found.heads)


def test_the_curves_and_matrices_by_place_are_those_of_plain_numpy(tmp_path: Path) -> None:
    snapshot = synthetic.snapshot(range(1, 701), layers=2, heads=3, dim=8)
    kvsnap.save(snapshot, tmp_path / "a.kvsnap")
    kvsnap.save(snapshot, tmp_path / "b.kvsnap", codec="q8")
    found = diff(tmp_path / "a.kvsnap", tmp_path / "b.kvsnap")
    a, b = of_file(tmp_path / "a.kvsnap"), of_file(tmp_path / "b.kvsnap")
    assert [p.role for p in found.positions] == ["k", "v"]
    for place in found.positions:
        x, y = (np.stack([side[f"layer{i}.{place.role}"].astype(np.float64) for i in range(2)]) for side in (a, b))
        d, length = np.linalg.norm(x - y, axis=(1, 3)), np.linalg.norm(x, axis=(1, 3))  # [layer, row]
        cosine = (x * y).sum(-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1)
        assert place.rows.tolist() == list(range(700))
        np.testing.assert_allclose(place.relative_error, np.sqrt((d**2).sum(0) / (length**2).sum(0)), 1e-9)
        np.testing.assert_allclose(place.cosine, cosine.mean(axis=(0, 1)), 1e-12)
        assert place.edges[0] == 0
        assert place.edges[-1] == 700
        assert place.layer_relative_error.shape == (2, len(place.edges) - 1) == (2, 256)
        for i, (start, stop) in enumerate(zip(place.edges[:-1], place.edges[1:], strict=True)):
            for layer in range(2):
                span = (slice(start, stop),)
                expected = np.sqrt((d[layer][span] ** 2).sum() / (length[layer][span] ** 2).sum())
                assert place.layer_relative_error[layer, i] == pytest.approx(expected, 1e-9)
                assert place.layer_cosine[layer, i] == pytest.approx(cosine[layer][:, start:stop].mean(), 1e-12)
                largest = np.abs(x - y)[layer][:, start:stop].max()
                assert place.layer_max_abs[layer, i] == largest
    layers, matrix = found.matrix("k", "max_abs")
    assert layers == (0, 1)
    x, y = (np.stack([side[f"layer{i}.k"].astype(np.float64) for i in range(2)]) for side in (a, b))
    np.testing.assert_array_equal(matrix, np.abs(x - y).max(axis=(2, 3)))


def test_one_bit_is_found_and_named() -> None:
    def flip(values: np.ndarray) -> None:
        values.view(np.uint32)[2, 17, 5] ^= 1

    found = diff(BASE, changed(BASE, 1, "v", flip))
    assert found.verdict == "values"
    assert [(h.layer, h.role, h.head) for h in found.heads if h.n_different] == [(1, "v", 2)]
    head = head_of(found, 1, "v", 2)
    assert (head.n_different, head.row, head.first_row) == (1, 17, 17)
    assert 0 < head.max_abs < 1e-6
    assert "layer 1 v head 2 row 17" in " ".join(found.says)
    assert diff(BASE, BASE).identical


def test_a_zeroed_row_has_an_error_of_one_and_no_direction() -> None:
    def zero(values: np.ndarray) -> None:
        values[3, 8] = 0

    head = head_of(diff(BASE, changed(BASE, 0, "k", zero)), 0, "k", 3)
    assert (head.max_row_error, head.cosine_min, head.row) == (1.0, 0.0, 8)
    back = head_of(diff(changed(BASE, 0, "k", zero), BASE), 0, "k", 3)
    assert (back.max_row_error, back.cosine_min) == (math.inf, 0.0)
    json.dumps(diff(changed(BASE, 0, "k", zero), BASE).to_dict())


def test_rows_off_by_one_and_swapped_heads_are_noticed() -> None:
    def roll(values: np.ndarray) -> None:
        values[:] = np.roll(values, 1, axis=1)

    def swap(values: np.ndarray) -> None:
        values[[0, 1]] = values[[1, 0]]

    rolled = diff(BASE, changed(BASE, 2, "k", roll))
    assert [(h.layer, h.role) for h in rolled.heads if h.n_different] == [(2, "k")] * 4
    assert all(h.relative_error > 0.5 and h.first_row == 0 for h in rolled.heads if h.n_different)
    swapped = diff(BASE, changed(BASE, 2, "k", swap))
    assert [h.head for h in swapped.heads if h.n_different] == [0, 1]
    assert swapped.verdict == rolled.verdict == "values"


def test_signs_of_zero_and_payloads_of_nan_are_bits() -> None:
    def zero(values: np.ndarray) -> None:
        values[0, 3, 0] = 0.0

    def minus_zero(values: np.ndarray) -> None:
        values[0, 3, 0] = -0.0

    found = diff(changed(BASE, 0, "k", zero), changed(BASE, 0, "k", minus_zero))
    head = head_of(found, 0, "k", 0)
    assert (head.n_different, head.max_abs, head.first_row, head.relative_error) == (1, 0.0, 3, 0.0)
    assert found.verdict == "values"
    assert "same numbers in other bits" in " ".join(found.says)

    def nan(payload: int) -> Any:
        def change(values: np.ndarray) -> None:
            values.view(np.uint32)[1, 4, 2] = 0x7FC00000 | payload

        return change

    one, other = (changed(BASE, 0, "k", nan(p)) for p in (1, 2))
    assert diff(one, one).identical
    head = head_of(diff(one, other), 0, "k", 1)
    assert (head.n_different, head.nonfinite_a, head.nonfinite_b, head.n_nonfinite_differ) == (1, 1, 1, 0)


def test_values_that_are_no_numbers_are_counted_and_spoil_nothing() -> None:
    def odd(values: np.ndarray) -> None:
        values[1, 5, 0], values[1, 5, 1], values[1, 6, 2] = np.nan, np.inf, -np.inf
        values[1, 7, 3] += 0.5

    def other(values: np.ndarray) -> None:
        values[1, 6, 2] = np.inf

    a, b = changed(BASE, 1, "k", other), changed(BASE, 1, "k", odd)
    found = diff(a, b)
    x, y = (next(t for t in s.tensors() if t.name == "layer1.k").array for s in (a, b))
    head = head_of(found, 1, "k", 1)
    assert faults(head, plain_figures(x[1], y[1])) == []
    assert (head.nonfinite_a, head.nonfinite_b, head.n_nonfinite_differ) == (1, 3, 3)
    assert head.max_abs == pytest.approx(0.5)
    assert all(np.isfinite(value) for h in found.heads for value in (h.relative_error, h.cosine_mean, h.rms_b))
    assert "3 values are NaN or infinite" in " ".join(found.says)
    assert np.isfinite(found.positions[0].relative_error).all()


def test_dtypes_that_differ_are_compared_as_numbers() -> None:
    narrow = synthetic.snapshot(range(1, 20), dtype="bfloat16")
    layer = narrow.layers[0]
    wide = replace(narrow, layers=(replace(layer, tensors=tuple(
        Tensor(replace(t.spec, dtype="float32"), t.array.astype(np.float32)) for t in layer.tensors
    )),))  # fmt: skip
    found = diff(narrow, wide)
    assert sum(head.n_different for head in found.heads) == 0
    assert found.verdict == "besides"
    assert not found.same_cache  # the same numbers, not the same bits
    assert [(o.name, o.a, o.b) for o in found.others if o.verdict == "differ"] == [
        ("dtype of layers 0", "bfloat16", "float32")
    ]
    rounded = replace(wide, layers=(replace(layer, tensors=tuple(
        Tensor(t.spec, (t.array + np.float32(2**-12)).astype(numpy_dtype("float32"))) for t in wide.layers[0].tensors
    )),))  # fmt: skip
    assert diff(narrow, rounded).heads[0].max_abs == 2**-12


def test_float64_is_compared_as_float64() -> None:
    a = synthetic.snapshot(range(1, 20), dtype="float64")
    b = changed(a, 0, "k", lambda values: values.__setitem__((0, 2, 1), values[0, 2, 1] + 1e-12))
    head = head_of(diff(a, b), 0, "k", 0)
    assert (head.n_different, head.row) == (1, 2)
    assert head.max_abs == pytest.approx(1e-12, rel=1e-3)


def test_heads_in_several_tensors_are_compared_with_heads_in_one() -> None:
    whole = synthetic.snapshot(range(1, 20), heads=3)
    parts = []
    for tensor in whole.layers[0].tensors:
        for h, stop in ((0, 1), (1, 3)):
            spec = replace(tensor.spec, id=100 + 10 * tensor.spec.id + h, name=f"{tensor.name}.{h}",
                           shape=(stop - h, 0, 4))  # fmt: skip
            parts.append(Tensor(spec, tensor.array[h:stop]))
    split = replace(whole, layers=(replace(whole.layers[0], tensors=tuple(parts)),))
    found = diff(whole, split)
    assert (len(found.heads), sum(h.n_different for h in found.heads)) == (6, 0)
    assert found.identical
    bad = replace(split, layers=(replace(split.layers[0], tensors=(
        parts[0], Tensor(parts[1].spec, parts[1].array[::-1].copy()), *parts[2:],
    )),))  # fmt: skip
    assert [h.head for h in diff(whole, bad).heads if h.n_different] == [1, 2]


# -- alignment -------------------------------------------------------------------------------------------------------


def test_rows_behind_another_token_are_not_compared() -> None:
    ids = list(range(1, 31))
    a = synthetic.snapshot(ids, layers=2, text="".join(chr(96 + i % 26) for i in ids))
    other = [*ids[:12], 99, *ids[13:]]
    b = synthetic.snapshot(other, layers=2, text="".join(chr(96 + i % 26) if i != 99 else "!" for i in other))
    found = diff(a, b)
    assert found.verdict == "tokens"
    assert (found.tokens.n_common, found.tokens.first, found.tokens.n_rows) == (12, 12, 12)
    assert (found.tokens.token_a, found.tokens.token_b) == (13, 99)
    assert (found.tokens.text_before, found.tokens.text_a[:1], found.tokens.text_b[:1]) == ("abcdefghijkl", "m", "!")
    assert [(r.a, r.b, r.count) for r in found.tokens.runs] == [(13, 13, 17)]
    assert found.tokens.n_same_place == 17
    assert {(h.n_rows, h.n_different) for h in found.heads} == {(12, 0)}
    assert found.not_compared[0].what == "rows 12 to 29"
    assert found.logits is None
    every = diff(a, b, all_rows=True)
    assert every.all_rows
    assert {h.n_rows for h in every.heads} == {30}
    assert {h.first_row for h in every.heads} == {12}


def test_a_history_that_goes_on_is_told() -> None:
    a, b = synthetic.snapshot(range(1, 11)), synthetic.snapshot(range(1, 16))
    found = diff(a, b)
    assert (found.tokens.relation, found.tokens.first, found.tokens.n_rows) == ("b begins with a", None, 10)
    assert diff(b, a).tokens.relation == "a begins with b"
    assert found.verdict == "tokens"
    assert [(n.what, n.why) for n in found.not_compared] == [("rows 10 to 14", "one side ends before them")]
    assert all(h.n_different == 0 and h.n_rows == 10 for h in found.heads)


def test_positions_end_what_has_the_same_input() -> None:
    a = synthetic.snapshot(range(1, 11), positions=(PositionRun(0, 10),))
    b = synthetic.snapshot(range(1, 11), positions=(PositionRun(0, 4), PositionRun(6, 6)), token_offset=12)
    found = diff(a, b)
    assert found.tokens.n_rows == 4
    assert "positions differ from row 4" in found.tokens.notes[0]
    assert {h.n_rows for h in found.heads} == {4}
    split = synthetic.snapshot(range(1, 11), positions=(PositionRun(0, 3), PositionRun(3, 7)))
    assert diff(a, split).tokens.n_rows == 10


def test_ids_that_one_side_does_not_store() -> None:
    a = synthetic.snapshot(range(1, 11))
    b = replace(a, tokens=(), runs=())
    found = diff(a, b)
    assert (found.tokens.by, found.tokens.relation, found.tokens.n_rows) == ("rows", "unknown", 10)
    assert "the ids of the first 10 rows" in found.tokens.notes[0]
    assert {h.n_rows for h in found.heads} == {10}
    assert found.verdict == "besides"
    assert ("tokens", "only in a") in [(o.name, o.verdict) for o in found.others]
    last = replace(a, tokens=a.tokens[4:], runs=())  # as a foreign file may keep them
    assert (diff(a, last).tokens.relation, diff(a, last).tokens.n_rows) == ("unknown", 10)
    other = replace(a, tokens=(5, 6, 99, 8, 9, 10), runs=())
    assert (diff(a, other).tokens.first, diff(a, other).tokens.n_rows) == (6, 6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=60), st.lists(st.integers(0, 5), max_size=60))
def test_runs_agree_and_are_in_order(a: list[int], b: list[int]) -> None:
    at = (0, 0)
    for run in same_runs(np.array(a, np.int64), np.array(b, np.int64)):
        assert run.a >= at[0]
        assert run.b >= at[1]
        assert run.count > 0
        assert a[run.a : run.a + run.count] == b[run.b : run.b + run.count]
        at = run.a + run.count, run.b + run.count
    assert at[0] <= len(a)
    assert at[1] <= len(b)


def test_runs_find_what_was_put_in_and_taken_out() -> None:
    draw = np.random.default_rng(1)
    a = draw.integers(0, 30_000, 20_000)
    b = np.concatenate([a[:5000], draw.integers(0, 30_000, 7), a[5000:9000], a[9010:]])
    found = [(r.a, r.b, r.count) for r in same_runs(a, b)]
    assert found == [(0, 0, 5000), (5000, 5007, 4000), (9010, 9007, 10_990)]


# -- windows, states, parts ------------------------------------------------------------------------------------------


def test_a_window_is_compared_by_place_where_both_hold_rows() -> None:
    a = synthetic.snapshot_of_kinds(range(1, 41), ["window8", "grow"])
    b = replace(a, layers=(synthetic.layer_of("window8", 0, range(1, 41), 40, 0, every_row=True), a.layers[1]))
    found = diff(a, b)
    assert sum(h.n_different for h in found.heads) == 0
    assert {h.n_rows for h in found.heads if h.layer == 0} == {7}
    assert [(n.what, n.why) for n in found.not_compared] == [("k, v of layer 0", "rows 0 to 32 are held by b only")]
    assert found.verdict == "besides"
    assert not found.same_cache

    def wrong(values: np.ndarray) -> None:
        values[1, -2] += 1

    head = head_of(diff(changed(a, 0, "k", wrong), b), 0, "k", 1)
    assert (head.row, head.n_different) == (38, 3)


def test_compressed_rows_name_the_first_row_of_the_sequence() -> None:
    a = synthetic.snapshot_of_kinds(range(1, 41), ["grow4"])
    b = changed(a, 0, "v", lambda values: values.__setitem__((0, 5), 9.0))
    found = diff(a, b)
    assert head_of(found, 0, "v", 0).row == 20
    place = next(p for p in found.positions if p.role == "v")
    assert (place.tokens_per_row, place.rows.tolist()) == (4, list(range(0, 40, 4)))
    assert place.relative_error.argmax() == 5
    shorter = synthetic.snapshot_of_kinds([*range(1, 23), 99, *range(24, 41)], ["grow4"])
    assert {h.n_rows for h in diff(a, shorter).heads} == {5}  # 22 ids in common: 5 whole groups


def test_states_are_compared_only_behind_the_same_input() -> None:
    a = synthetic.snapshot_of_kinds(range(1, 21), ["recurrent", "buffer+grow"])
    assert diff(a, a).identical
    later = synthetic.snapshot_of_kinds(range(1, 24), ["recurrent", "buffer+grow"])
    found = diff(a, later)
    assert "recurrent" not in {h.role for h in found.heads}
    assert ("recurrent of layer 0", "a state, which is behind 20 and 23 rows") in [
        (n.what, n.why) for n in found.not_compared
    ]
    other = changed(a, 0, "recurrent", lambda values: values.__setitem__((1, 2), 7.0))
    told = diff(a, other)
    assert [(h.role, h.head, h.n_different) for h in told.heads if h.n_different] == [("recurrent", 1, 1)]
    assert told.verdict == "values"


def test_partial_captures_are_compared_where_both_hold_rows() -> None:
    whole, tail = synthetic.snapshot(range(1, 21)), synthetic.snapshot(range(1, 21), start=12)
    found = diff(whole, tail)
    assert {(h.n_rows, h.n_different) for h in found.heads} == {(8, 0)}
    assert found.not_compared[0].why == "rows 0 to 11 are held by a only"
    assert found.positions[0].rows.tolist() == list(range(12, 20))


def test_what_is_beside_the_cache_is_told() -> None:
    a = synthetic.snapshot(range(1, 11), text="ten", metadata={"title": "x", "same": "1"}, sampler=synthetic.SAMPLER,
                           messages=({"role": "user", "content": "a"},))  # fmt: skip
    b = replace(a, metadata={"title": "y", "same": "1", "more": "z"}, text="eleven", sampler=None, messages=None)
    found = diff(a, b)
    told = {o.name: (o.verdict, o.a, o.b) for o in found.others if o.verdict != "equal"}
    assert told["metadata title"] == ("differ", "x", "y")
    assert told["metadata more"] == ("only in b", "", "z")
    assert told["text"] == ("differ", "ten", "eleven")
    assert told["sampler"][0] == told["random state"][0] == told["messages"][0] == "only in a"
    assert "metadata same" not in told
    assert found.verdict == "besides"
    assert found.same_cache
    assert not found.identical
    assert all(o.verdict == "equal" for o in diff(a, a).others)


def test_long_texts_are_shown_where_they_begin_to_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = synthetic.snapshot(range(1, 11), text=f"{'same ' * 40}left and on")
    b = synthetic.snapshot(range(1, 11), text=f"{'same ' * 40}right and on and on")
    assert b.logits is not None
    b = replace(b, logits=kvsnap.Tensor(b.logits.spec, b.logits.values() + 1))
    (told,) = (o for o in diff(a, b).others if o.name == "text")
    assert (told.a, told.b) == ("...same same same same left and on", "...same same same same right and on and on")
    short = diff(replace(a, text="ten"), replace(b, text="eleven")).others
    assert [(o.a, o.b) for o in short if o.name == "text"] == [("ten", "eleven")]
    for name, one in (("a", a), ("b", replace(b, messages=None, text=None))):
        one.save(tmp_path / f"{name}.kvsnap")
    assert cli.run(["diff", str(tmp_path / "a.kvsnap"), str(tmp_path / "b.kvsnap")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"  text: only in a: '{('same ' * 40)[:77]}...'" in lines
    assert [line.partition(" of ")[2] for line in lines if line.startswith("  logits: ")] == ["8 values differ"]


def test_random_numbers_that_decide_nothing_do_not_differ() -> None:
    def sampled(temperature: float, seed: int) -> Snapshot:
        state = SamplerState(Sampler(temperature=temperature, seed=seed), RandomState(seed, 3))
        return synthetic.snapshot(range(1, 11), sampler=state)

    assert diff(sampled(0.0, 1), sampled(0.0, 2)).identical
    told = {o.name: o.verdict for o in diff(sampled(0.5, 1), sampled(0.5, 2)).others}
    assert told["sampler"] == told["random state"] == "differ"
    assert diff(sampled(0.0, 1), sampled(0.5, 1)).verdict == "besides"


def test_logits_are_compared_as_distributions() -> None:
    a = synthetic.snapshot(range(1, 11), vocab=8)
    assert a.logits is not None
    values = a.logits.array.copy()
    values[5] += 3.0
    b = replace(a, logits=Tensor(a.logits.spec, values))
    found = diff(a, b).logits
    assert found is not None
    p, q = (np.exp(v.astype(np.float64)) / np.exp(v.astype(np.float64)).sum() for v in (a.logits.array, values))
    assert found.kl_ab == pytest.approx(float((p * np.log(p / q)).sum()))
    assert found.kl_ba == pytest.approx(float((q * np.log(q / p)).sum()))
    assert (found.n_different, found.top1_b) == (1, int(values.argmax()))
    values = values.copy()
    values[2] = -np.inf
    masked = replace(a, logits=Tensor(a.logits.spec, values))
    assert diff(a, masked).logits.kl_ab == math.inf  # type: ignore[union-attr]
    assert math.isfinite(diff(masked, a).logits.kl_ab)  # type: ignore[union-attr]
    values = values.copy()
    values[3] = np.nan
    assert diff(a, replace(a, logits=Tensor(a.logits.spec, values))).logits.kl_ab is None  # type: ignore[union-attr]


def test_identity_fields_are_named() -> None:
    a = synthetic.snapshot(range(1, 11))
    weights = tuple(replace(w, digest="9" * 32) for w in a.identity.weights)
    b = replace(a, identity=replace(a.identity, weights=weights, engine="other"))
    found = diff(a, b)
    told = {f.name: f for f in found.identity}
    assert (told["engine"].verdict, told["engine"].b) == ("differ", "other")
    assert "2 differ, first embed" in told["weights"].a
    assert found.same_model is False
    assert found.similarity  # of other weights: similarity is told
    assert not diff(a, a).similarity
    assert diff(a, a).same_model is True
    unknown = replace(a, identity=replace(a.identity, weights=()))
    assert diff(a, unknown).same_model is None
    assert diff(a, unknown).identical  # what is not known does not differ


# -- two variants ----------------------------------------------------------------------------------------------------


def test_other_shapes_are_told_by_size_and_similarity() -> None:
    a = synthetic.snapshot(range(1, 61), layers=2, heads=4, dim=8)
    b = synthetic.snapshot(range(1, 61), layers=3, heads=2, dim=6)
    found = diff(a, b)
    assert found.verdict == "geometry"
    assert found.heads == ()
    assert [(x.layer, x.role, x.heads_a, x.heads_b, x.dim_b) for x in found.layers] == [
        (i, role, 4, 2, 6) for i in range(2) for role in "kv"
    ]
    x = next(t for t in a.tensors() if t.name == "layer1.v").array.astype(np.float64)
    assert found.layers[3].rms_a == pytest.approx(np.sqrt((x**2).mean()))
    assert ("k, v of layer 2", "held by b only") in [(n.what, n.why) for n in found.not_compared]
    one = found.similarity[0]
    assert one.cka.shape == one.biased.shape == (2, 3)
    assert found.layers[0].cka == one.cka[0, 0]
    assert found.same_model is False
    assert [(g.kind, g.layers_a, g.layers_b, g.per_token_a, g.per_token_b) for g in found.growth] == [
        ("full", 2, 3, 2 * 2 * 4 * 8 * 4, 3 * 2 * 2 * 6 * 4)
    ]
    assert found.bytes_at(60) == (a.layers[0].nbytes * 2, b.layers[0].nbytes * 3)
    assert [(x.n_tokens, x.nbytes_a, x.nbytes_b) for x in found.lengths][:2] == [
        (60, *found.bytes_at(60)), (1024, 1024 * 2 * 2 * 4 * 8 * 4, 1024 * 3 * 2 * 2 * 6 * 4)
    ]  # fmt: skip
    windows = synthetic.snapshot_of_kinds(range(1, 41), ["window8", "grow"])
    assert diff(windows, windows).bytes_at(40)[0] == sum(layer.nbytes for layer in windows.layers)


def plain_cka(x: np.ndarray, y: np.ndarray) -> float:
    """As Kornblith et al. write it down: of centred columns, by the products of features."""
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    norm = np.linalg.norm
    return float(norm(y.T @ x) ** 2 / (norm(x.T @ x) * norm(y.T @ y)))


def plain_unbiased(x: np.ndarray, y: np.ndarray) -> float:
    """HSIC without bias as Song et al. write it down (their equation 5), then the ratio."""

    def hsic(k: np.ndarray, other: np.ndarray) -> float:
        n = len(k)
        k, other, one = k * (1 - np.eye(n)), other * (1 - np.eye(n)), np.ones(n)
        middle = (one @ k @ one) * (one @ other @ one) / ((n - 1) * (n - 2))
        total = np.trace(k @ other) + middle - 2 / (n - 2) * (one @ k @ other @ one)
        return float(total / (n * (n - 3)))

    k, other = x @ x.T, y @ y.T
    return hsic(k, other) / math.sqrt(hsic(k, k) * hsic(other, other))


def test_similarity_is_that_of_the_papers() -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((40, 12))
    y = x[:, :5] @ draw.standard_normal((5, 7)) + draw.standard_normal((40, 7))
    grams = [{0: gram(v.astype(np.float32).reshape(1, 40, -1))} for v in (x, y)]
    x, y = x.astype(np.float32).astype(np.float64), y.astype(np.float32).astype(np.float64)
    assert cka_between(*grams, biased=True)[0, 0] == pytest.approx(plain_cka(x, y), 1e-9)
    assert cka_between(*grams, biased=False)[0, 0] == pytest.approx(plain_unbiased(x, y), 1e-9)
    assert plain_cka(x, y) != pytest.approx(plain_unbiased(x, y), 1e-2)
    turned = x @ np.linalg.qr(draw.standard_normal((12, 12)))[0] * 3
    assert plain_cka(x, turned) == pytest.approx(1)
    same = [grams[0], {0: gram(turned.astype(np.float32).reshape(1, 40, -1))}]
    assert cka_between(*same, biased=True)[0, 0] == pytest.approx(1, abs=1e-5)
    assert cka_between(*same, biased=False)[0, 0] == pytest.approx(1, abs=1e-5)
    wide = [{0: gram(draw.standard_normal((1, 40, 2000)).astype(np.float32))} for _ in range(2)]
    assert cka_between(*wide, biased=True)[0, 0] > 0.9  # fewer rows than values: only the other one says so
    assert abs(cka_between(*wide, biased=False)[0, 0]) < 0.1
    flat = {0: gram(np.ones((1, 40, 3), np.float32))}
    assert math.isnan(cka_between(flat, grams[1], biased=True)[0, 0])


def test_similarity_is_over_rows_that_all_layers_hold() -> None:
    a = synthetic.snapshot_of_kinds(range(1, 41), ["window8", "grow"])
    found = diff(a, a, similar=True)
    assert found.similarity[0].n_rows == 7
    np.testing.assert_allclose(np.diag(found.similarity[0].cka), 1)
    few = synthetic.snapshot_of_kinds(range(1, 41), ["window3", "grow"])
    told = diff(few, few, similar=True)
    assert told.similarity == ()
    assert "fewer than 4 rows of the same input" in told.not_compared[0].why


# -- properties ------------------------------------------------------------------------------------------------------


@st.composite
def snapshots(draw: Any) -> Snapshot:
    ids = draw(st.lists(st.integers(0, 6), min_size=0, max_size=14))
    kinds = draw(st.lists(st.sampled_from(["grow", "window4", "grow4", "recurrent", "buffer+grow"]), max_size=3))
    return synthetic.snapshot_of_kinds(ids, kinds, vocab=0)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(snapshots())
def test_a_cache_is_identical_with_itself(snapshot: Snapshot) -> None:
    found = diff(snapshot, snapshot)
    assert found.identical, (found.says, found.not_compared, found.others)
    assert all(x.n_different == 0 and x.relative_error == 0 and x.cosine_min == 1 for x in found.layers)


MIRRORED = {"a begins with b": "b begins with a", "b begins with a": "a begins with b"}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(snapshots(), snapshots(), st.booleans())
def test_there_and_back_say_the_same(a: Snapshot, b: Snapshot, all_rows: bool) -> None:
    one, other = diff(a, b, all_rows=all_rows), diff(b, a, all_rows=all_rows)
    assert one.verdict == other.verdict
    assert other.tokens.relation == MIRRORED.get(one.tokens.relation, one.tokens.relation)
    assert (one.tokens.n_common, one.tokens.n_rows) == (other.tokens.n_common, other.tokens.n_rows)
    back = {(x.layer, x.role): x for x in other.layers}
    for x in one.layers:
        y = back[x.layer, x.role]
        assert (x.n_rows, x.n_different, x.rms_a, x.rms_b) == (y.n_rows, y.n_different, y.rms_b, y.rms_a)
        assert x.max_abs == y.max_abs
        assert x.cosine_mean == pytest.approx(y.cosine_mean)
    assert len(one.not_compared) == len(other.not_compared)


# -- files and arguments ---------------------------------------------------------------------------------------------


def test_formats_of_one_cache_are_compared(tmp_path: Path) -> None:
    source = DATA / "mlxkv" / "v3_q8.mlxkv"
    content = json.loads((DATA / "mlxkv" / "v3_q8.json").read_text())["content"]
    kvsnap.convert(source, tmp_path / "b.kvsnap", allow_loss=True)
    same = diff(source, tmp_path / "b.kvsnap")
    assert same.same_cache or same.verdict == "besides", same.says
    assert sum(h.n_different for h in same.heads) == 0
    assert len(same.heads) == 3 * 2 * 2
    # Against what was quantised, which the golden file keeps beside it.
    exact = kvsnap.load(source)
    layers = []
    for entry, told in zip(exact.layers, content["layers"], strict=True):
        tensors = []
        for t in entry.tensors:
            name = {"k": "key", "v": "value"}[t.role]
            rows = [np.frombuffer(bytes.fromhex(h[name]["source_f32_hex"]), "<f4").reshape(t.n_rows, -1)
                    for h in told["heads"]]  # fmt: skip
            own = TensorSpec(
                id=t.spec.id,
                name=t.name,
                layer=entry.index,
                role=t.role,
                dtype="float32",
                axes=("head", "row", "dim"),
                shape=(len(rows), 0, rows[0].shape[1]),
                row_axis=1,
            )
            tensors.append(Tensor(own, np.stack(rows)))
        layers.append(Layer(index=entry.index, kind="attention", tensors=tuple(tensors)))
    found = diff(replace(exact, layers=tuple(layers)), source)
    for head in found.heads:
        told = content["layers"][head.layer]["heads"][head.head][{"k": "key", "v": "value"}[head.role]]
        a, b = (np.frombuffer(bytes.fromhex(told[n]), "<f4").reshape(5, 4) for n in ("source_f32_hex", "f32_hex"))
        assert faults(head, plain_figures(a, b)) == []
        assert head.within_bound


GOLDEN = sorted(p.name for p in (DATA / "mlxkv").glob("*.mlxkv") if not p.name.startswith("err_"))


@pytest.mark.parametrize("name", [*GOLDEN, *sorted(p.name for p in (DATA / "colikv").glob("*.coli_kv"))])
def test_a_converted_golden_file_has_the_same_bits(name: str, tmp_path: Path) -> None:
    source = DATA / name.rpartition(".")[2].replace("coli_kv", "colikv") / name
    try:
        kvsnap.convert(source, tmp_path / "b.kvsnap", allow_loss=True)
    except kvsnap.KvsnapError:
        pytest.skip("this one is refused, or holds ids that no file of ours takes")
    found = diff(source, tmp_path / "b.kvsnap")
    assert found.verdict in ("identical", "besides"), found.says
    assert found.not_compared == ()
    assert found.heads or not found.a.n_rows


def test_a_golden_file_against_its_content() -> None:
    content = json.loads((DATA / "tiny.json").read_text())
    made = synthetic.tiny()
    for name, told in content["tensors"].items():
        values = np.frombuffer(bytes.fromhex(told["hex"]), told["dtype"]).reshape(told["shape"])
        layer, role = int(name[5]), name[-1]
        other = changed(made, layer, role, lambda v, new=values: v.__setitem__(..., new + np.float32(0.25)))
        found = diff(DATA / "tiny.kvsnap", other)
        for head in (h for h in found.heads if (h.layer, h.role) == (layer, role)):
            assert faults(head, plain_figures(values[head.head], values[head.head] + np.float32(0.25))) == []
        assert {(h.layer, h.role) for h in found.heads if h.n_different} == {(layer, role)}
    assert diff(DATA / "tiny.kvsnap", made).identical


def test_turns_of_one_session(tmp_path: Path) -> None:
    with kvsnap.Session.open(tmp_path / "s.kvsnap") as session:
        for n in (8, 12, 20):
            session.append(synthetic.snapshot(range(1, n + 1), start=session.n_rows))
    path = tmp_path / "s.kvsnap"
    found = diff(path, path, commit_a=2)
    assert (found.a.commit, found.a.n_tokens, found.b.n_tokens) == (2, 8, 20)
    assert found.tokens.relation == "b begins with a"
    assert diff(path, path, commit_a=3, commit_b=3).identical
    with pytest.raises(MissingError):
        diff(path, path, commit_a=9)
    with pytest.raises(InputError, match="no commits"):
        diff(synthetic.tiny(), path, commit_a=1)


def test_shards_are_compared_with_the_same_shard_only() -> None:
    parts = kvsnap.split(BASE, 2)
    assert diff(parts[0], parts[0]).same_cache
    for other in (parts[1], BASE):
        with pytest.raises(InputError, match="shard"):
            diff(parts[0], other)


def test_a_layer_can_be_picked() -> None:
    found = diff(BASE, BASE, layers=[1])
    assert {x.layer for x in found.layers} == {1}
    assert "only layers 1 were compared" in found.says
    with pytest.raises(InputError, match="neither side has this layer"):
        diff(BASE, BASE, layers=[7])


def test_one_tensor_of_each_side_is_in_memory_at_a_time() -> None:
    alive, most, read = [0], [0], [0]

    class Counted:
        def __init__(self, values: np.ndarray) -> None:
            self.values = values

        def array(self) -> np.ndarray:
            made = self.values.copy()
            alive[0], read[0] = alive[0] + 1, read[0] + 1
            most[0] = max(most[0], alive[0])
            weakref.finalize(made, lambda: alive.__setitem__(0, alive[0] - 1))
            return made

        def read_into(self, out: np.ndarray) -> None:
            np.copyto(out, self.values)

    def counted(snapshot: Snapshot) -> Snapshot:
        layers = tuple(
            replace(x, tensors=tuple(Tensor(t.spec, Counted(t.array), n_rows=t.n_rows) for t in x.tensors))
            for x in snapshot.layers
        )
        return replace(snapshot, layers=layers)

    found = diff(counted(BASE), counted(BASE), similar=True)
    assert found.identical
    assert len(found.similarity) == 2
    assert (most[0], read[0]) == (2, 2 * 3 * 2)
    diff(counted(BASE), counted(synthetic.snapshot(range(1, 41), layers=2, heads=3, dim=8)))
    assert most[0] == 2


def named_input(snapshot: Snapshot, ids: list[int]) -> Snapshot:
    """A snapshot of an encoder-decoder whose encoder was given these ids."""
    tokens = TensorSpec(id=900, name="encoder.tokens", layer=0, role="other", dtype="int64", axes=("token",),
                        shape=(0,), growth="static", row_axis=0)  # fmt: skip
    digest = replace(tokens, id=901, name="encoder.digest", dtype="uint8", axes=("byte",))
    added = (Tensor(tokens, np.array(ids, np.int64)), Tensor(digest, np.full(16, sum(ids) % 251, np.uint8)))
    first = snapshot.layers[0]
    return replace(snapshot, layers=(replace(first, tensors=(*first.tensors, *added)), *snapshot.layers[1:]))


def test_rows_of_another_input_of_the_encoder_are_not_compared() -> None:
    plain = synthetic.snapshot_of_kinds(range(1, 21), ["grow+static"])
    a, same, other = (named_input(plain, ids) for ids in ([1, 2, 3], [1, 2, 3], [1, 2, 4]))
    assert diff(a, same).identical
    assert {h.role for h in diff(a, same).heads} == {"k", "v", "cross_k"}
    found = diff(a, other)
    assert found.heads == ()
    assert "the encoder was given another input" in found.tokens.notes[0]
    assert ("encoder input", "differ") in [(o.name, o.verdict) for o in found.others]
    assert any(n.why == "of another input of the encoder" for n in found.not_compared)


def test_ids_of_other_tokenizers_are_told() -> None:
    a = synthetic.snapshot(range(1, 11), text="abcdefghij")
    other = replace(a.identity, tokenizer="99" * 16)
    assert "may be other text" in diff(a, replace(a, identity=other)).tokens.notes[0]
    assert diff(a, replace(a, identity=other)).tokens.n_rows == 10
    found = diff(a, replace(a, identity=other, text="zzzzzzzzzz"))
    assert found.tokens.n_rows == 0
    assert "are other text" in found.tokens.notes[0]


def test_text_around_a_difference_comes_from_the_tokenizer() -> None:
    def decode(ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    a, b = (
        synthetic.snapshot(list(text.encode()))
        for text in ("the cost is 5 €, told once", "the cost is 5 ₪, told twice")
    )
    told = diff(a, b, detokenize=decode).tokens
    assert told.first == 16  # inside of the three bytes of the sign
    assert told.text_before == "the cost is 5 "
    assert (told.text_a or "").startswith("€, told")
    assert (told.text_b or "").startswith("₪, told")
    assert [(r.a, r.b, r.count) for r in told.runs] == [(17, 17, 7), (26, 27, 2)]
    assert diff(a, b).tokens.text_a is None


def test_damage_is_raised(tmp_path: Path) -> None:
    kvsnap.save(BASE, tmp_path / "a.kvsnap")
    data = bytearray((tmp_path / "a.kvsnap").read_bytes())
    at = data.index(next(BASE.tensors()).array.tobytes()[:64])
    data[at] ^= 1
    (tmp_path / "b.kvsnap").write_bytes(data)
    with pytest.raises(DamagedError):
        diff(tmp_path / "a.kvsnap", tmp_path / "b.kvsnap")


def test_answers_are_data_tables_and_html(tmp_path: Path) -> None:
    kvsnap.save(BASE, tmp_path / "<b>.kvsnap", codec="q8")
    told: list[tuple[int, int]] = []
    found = diff(BASE, tmp_path / "<b>.kvsnap", progress=lambda done, total: told.append((done, total)))
    data = json.loads(json.dumps(found.to_dict()))
    assert data["identical"] is False
    assert data["heads"][0]["relative_error"] == found.heads[0].relative_error
    assert data["positions"][0]["rows"] == list(range(40))
    assert [t.title for t in found.tables()][:2] == ["layers", "heads"]
    shown = found._repr_html_()
    assert shown.startswith("<p>the same tokens; all values within the stored bound of each other</p><p>")
    assert "<b>" not in shown
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == told[-1][1]


def test_float8_values_are_compared() -> None:
    a = synthetic.snapshot(range(1, 11), dtype="float8_e4m3fn")
    b = changed(a, 0, "k", lambda v: v.__setitem__((0, 0, 0), ml_dtypes.float8_e4m3fn(2.0)))
    head = head_of(diff(a, b), 0, "k", 0)
    assert (head.n_different, head.row) == (1, 0)


def test_the_bound_is_that_of_both_sides_together(tmp_path: Path) -> None:
    made = synthetic.snapshot(range(1, 30), layers=2)
    kvsnap.save(made, tmp_path / "exact.kvsnap")
    kvsnap.save(made, tmp_path / "q8.kvsnap", codec="q8")
    exact, lossy = kvsnap.load(tmp_path / "exact.kvsnap"), kvsnap.load(tmp_path / "q8.kvsnap")
    for a, b in ((exact, lossy), (lossy, exact), (lossy, lossy), (exact, exact)):
        for head in diff(a, b).heads:
            sides = [s.layers[head.layer].tensor(head.role) for s in (a, b)]
            assert head.bound == sum(t.bound for t in sides if t is not None)


def test_runs_are_counted_from_the_first_row_where_only_the_last_ids_are_stored() -> None:
    whole = synthetic.snapshot(range(1, 41))
    changed = synthetic.snapshot([*range(1, 21), 99, *range(22, 41)])
    a, b = (replace(s, tokens=s.tokens[10:], runs=(Run("prompt", 30),)) for s in (whole, changed))
    found = diff(a, b).tokens
    assert (found.first, found.n_common) == (20, 10)
    assert [(run.a, run.b, run.count) for run in found.runs] == [(21, 21, 19)]


def test_the_error_over_all_layers_weighs_layers_by_what_they_hold() -> None:
    a = synthetic.snapshot_of_kinds(range(1, 41), ["grow", "window8"])
    factors = (1.001, 1.1)
    b = replace(a, layers=tuple(
        replace(layer, tensors=tuple(Tensor(t.spec, t.array * np.float32(f), start=t.start) for t in layer.tensors))
        for layer, f in zip(a.layers, factors, strict=True)
    ))  # fmt: skip
    told = []
    for role in ("k", "v"):
        pairs = [(x.tensor(role).array.astype(float), y.tensor(role).array.astype(float))
                 for x, y in zip(a.layers, b.layers, strict=True)]  # fmt: skip
        d2, a2 = sum(((x - y) ** 2).sum() for x, y in pairs), sum((x**2).sum() for x, _ in pairs)
        told.append(f"{role} {math.sqrt(d2 / a2):.3g}")
    assert f"relative error over all layers: {', '.join(told)}" in diff(a, b).says


def test_growth_tells_all_that_is_held() -> None:
    a = synthetic.snapshot_of_kinds(range(1, 41), ["grow", "grow", "window8", "recurrent"])
    b = synthetic.snapshot_of_kinds(range(1, 21), ["grow", "grow", "window8", "recurrent"])
    found = {one.kind: (one.nbytes_a, one.nbytes_b) for one in diff(a, b).growth}
    for kind, layers in (("full", (0, 1)), ("window", (2,)), ("state", (3,))):
        assert found[kind] == tuple(sum(t.nbytes for n in layers for t in s.layers[n].tensors) for s in (a, b))


def test_places_of_rows_that_stand_for_several_tokens_are_tokens() -> None:
    a = synthetic.snapshot_of_kinds(range(1, 25), ["grow4"])
    for place in diff(a, a).positions:
        assert place.tokens_per_row == 4
        assert place.rows.tolist() == [0, 4, 8, 12, 16, 20]
        assert place.edges.tolist() == [0, 4, 8, 12, 16, 20, 24]

"""The values of a cache in one shape: against `Snapshot.head`, and against the tensors by hand."""

from __future__ import annotations

import numpy as np
import pytest

import kvsnap
import synthetic
from kvsnap.errors import DamagedError
from kvsnap.inspection.values import head_rows
from kvsnap.layout import Snapshot


def whole(snapshot: Snapshot, layer: int, role: str) -> np.ndarray:
    pieces = []
    for found in head_rows(snapshot):
        if (found.layer, found.role) == (layer, role):
            blocks = list(found.blocks(block_bytes=4 * found.n_heads * found.dim * 3))
            assert [start for start, _ in blocks] == list(range(0, found.n_rows, 3))
            pieces.append(np.concatenate([values for _, values in blocks], axis=1))
    return np.concatenate(pieces)


def test_blocks_put_together_are_the_heads_of_the_snapshot() -> None:
    snapshot = synthetic.snapshot(range(1, 12))
    for layer in range(snapshot.num_layers):
        k, v = whole(snapshot, layer, "k"), whole(snapshot, layer, "v")
        assert len(k) == snapshot.layers[layer].num_heads
        for head in range(len(k)):
            found = snapshot.head(layer, head)
            assert found is not None
            np.testing.assert_array_equal(k[head], found.k)
            np.testing.assert_array_equal(v[head], found.v)


@pytest.mark.parametrize("name", ["whole.kvsnap", "small.kvsnap"])
def test_a_file_gives_what_was_saved(name: str, tmp_path) -> None:
    snapshot = synthetic.snapshot(range(1, 30))
    codec = "q8" if name.startswith("small") else None
    kvsnap.save(snapshot, tmp_path / name, codec=codec)
    loaded = kvsnap.load(tmp_path / name)
    for before, after in zip(head_rows(snapshot), head_rows(loaded), strict=True):
        assert (before.name, before.n_heads, before.n_rows, before.dim) == (
            after.name, after.n_heads, after.n_rows, after.dim,
        )  # fmt: skip
        error = np.abs(np.asarray(before.values(), np.float64) - np.asarray(after.values(), np.float64)).max()
        assert error <= after.bound
        assert (after.bound > 0) == (codec == "q8")
        assert (error > 0) == (codec == "q8")


def test_damage_is_raised_and_never_read_past(tmp_path) -> None:
    path = tmp_path / "a.kvsnap"
    kvsnap.save(synthetic.snapshot(range(1, 30)), path)
    data = bytearray(path.read_bytes())
    values = next(iter(head_rows(kvsnap.load(path)))).values()
    at = data.index(np.ascontiguousarray(values).tobytes()[:64])
    data[at + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError):
        list(next(iter(head_rows(kvsnap.load(path)))).blocks())


def test_rows_of_windows_and_compressed_rows_know_where_they_stand() -> None:
    from dataclasses import replace

    from kvsnap.layout import Layer, Tensor, TensorSpec

    base = synthetic.snapshot(range(1, 41))
    window = TensorSpec(id=90, name="w", layer=0, role="k", dtype="float32", axes=("head", "row", "dim"),
                        shape=(2, 0, 4), growth="window", row_axis=1, window=8)  # fmt: skip
    packed = TensorSpec(id=91, name="p", layer=0, role="compressed", dtype="float32", axes=("row", "dim"),
                        shape=(0, 6), row_axis=0, tokens_per_row=4)  # fmt: skip
    state = TensorSpec(id=92, name="s", layer=0, role="recurrent", dtype="float32", axes=("head", "dim", "state"),
                       shape=(3, 5, 7), growth="replaced")  # fmt: skip
    counted = np.arange(3 * 5 * 7, dtype=np.float32).reshape(3, 5, 7)
    layer = Layer(index=0, kind="hybrid", tensors=(
        Tensor(window, np.ones((2, 8, 4), np.float32), start=32),
        Tensor(packed, np.ones((10, 6), np.float32)),
        Tensor(state, counted),
    ))  # fmt: skip
    found = {r.role: r for r in head_rows(replace(base, layers=(layer,)))}
    assert found["k"].row_numbers().tolist() == list(range(32, 40))
    assert found["compressed"].row_numbers().tolist() == list(range(0, 40, 4))
    assert (found["recurrent"].n_heads, found["recurrent"].n_rows, found["recurrent"].dim) == (3, 5, 7)
    np.testing.assert_array_equal(found["recurrent"].values(), counted)
    assert not found["recurrent"].grows


def test_the_slab_is_measured_and_not_the_heads_beside_it() -> None:
    from dataclasses import replace

    from kvsnap.layout import Layer, Tensor, TensorSpec

    base = synthetic.snapshot(range(1, 11))
    specs = [
        TensorSpec(id=i, name=f"{role}{i}", layer=0, role=role, dtype="float32", axes=("head", "row", "dim"),
                   shape=(2, 0, 4), row_axis=1)
        for i, role in enumerate("kvkv")
    ]  # fmt: skip
    slab, beside = (tuple(Tensor(s, np.full((2, 10, 4), n, np.float32)) for s in specs[at : at + 2])
                    for n, at in ((1.0, 0), (2.0, 2)))  # fmt: skip
    layer = Layer(index=0, kind="attention", tensors=slab, by_head=beside)
    both = replace(base, layers=(layer,))
    assert {float(r.values().max()) for r in head_rows(both)} == {1.0}
    assert kvsnap.statistics(both).layers[0].max == 1.0
    assert kvsnap.diff(both, replace(base, layers=(replace(layer, by_head=()),))).verdict == "identical"
    # Heads answer as they always did, and alone they are what there is.
    head = both.head(0, 0)
    assert head is not None
    assert head.k.max() == kvsnap.head_table(both, 0, 0).values["k"].max() == 2.0
    assert {float(r.values().max()) for r in head_rows(replace(base, layers=(replace(layer, tensors=()),)))} <= {2.0}

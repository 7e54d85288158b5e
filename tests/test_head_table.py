"""The rows of a head as a table: what is written is what the library holds, bit for bit, with numbers and ids."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsnap
from kvsnap.errors import InputError
from kvsnap.inspection.exporting import HeadTable, head_table, targets_of
from kvsnap.layout import Layer, Snapshot, Tensor
from spec_file import Minimal
from synthetic import DATA, snapshot, snapshot_of_kinds, spec

Shown = Callable[..., tuple[int, str, str]]
MLXKV = json.loads((DATA / "mlxkv" / "MANIFEST.json").read_text())["files"]
COLIKV = json.loads((DATA / "colikv" / "MANIFEST.json").read_text())["files"]


def same_bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def strange(n: int = 12) -> Snapshot:
    """A snapshot with values that are no numbers, none and the least of all, in bfloat16."""
    made = snapshot(tuple(range(100, 100 + n)), heads=3, dim=5, dtype="bfloat16", n_pending=1, layers=2)
    values = made.layers[1].tensors[0].array.copy()
    values[2, 0, :4] = [np.nan, np.inf, -np.inf, -0.0]
    values[2, 1, 0] = 1e-40
    tensor = Tensor(made.layers[1].tensors[0].spec, values)
    layer = replace(made.layers[1], tensors=(tensor, made.layers[1].tensors[1]))
    return replace(made, layers=(made.layers[0], layer))


def from_csv(text: str) -> dict[str, list[str]]:
    rows = list(csv.reader(io.StringIO(text)))
    return {name: [row[i] for row in rows[1:]] for i, name in enumerate(rows[0])}


def check(table: HeadTable, made: Snapshot, layer: int, head: int) -> None:
    expected = made.head(layer, head)
    assert expected is not None
    assert same_bits(table.values["k"], expected.k)
    assert same_bits(table.values["v"], expected.v)
    assert table.positions is not None
    assert table.positions.tolist() == expected.positions.tolist()


@pytest.mark.parametrize("kind", ["grow", "grow4", "window8", "grow+recurrent", "static+grow"])
def test_a_table_holds_what_head_gives(kind: str) -> None:
    made = snapshot_of_kinds(range(1, 30), [kind], n_pending=2)
    for head in range(2):
        check(head_table(made, 0, head), made, 0, head)
    with pytest.raises(InputError, match="no such head"):
        head_table(made, 0, 2)
    other = head_table(made, 0, 1)  # the control
    expected = made.head(0, 0)
    assert expected is not None
    assert not same_bits(other.values["k"], expected.k)


def test_rows_positions_and_ids() -> None:
    made = replace(snapshot(tuple(range(50, 60)), n_pending=1), token_offset=109)
    made = replace(made, positions=(replace(made.positions[0], start=100),))
    table = head_table(made, 0, 0)
    assert table.rows.tolist() == list(range(9))
    assert table.positions is not None
    assert table.positions.tolist() == list(range(100, 109))
    assert table.tokens is not None
    assert table.tokens.tolist() == list(range(50, 59))
    some = head_table(made, 0, 0, rows=(3, 5))
    assert some.rows.tolist() == [3, 4]
    assert same_bits(some.values["v"], np.ascontiguousarray(table.values["v"][3:5]))
    assert head_table(made, 0, 0, rows=(7, None)).rows.tolist() == [7, 8]
    assert head_table(made, 0, 0, rows=(None, 2)).rows.tolist() == [0, 1]
    assert head_table(made, 0, 0, rows=(20, 30)).values["k"].shape == (0, 4)
    with pytest.raises(InputError, match="rows"):
        head_table(made, 0, 0, rows=(5, 3))
    few = replace(made, tokens=made.tokens[4:], runs=(replace(made.runs[0], count=6),))  # ids of the last rows alone
    tokens = head_table(few, 0, 0).tokens
    assert tokens is not None
    assert tokens.tolist() == [-1, -1, -1, -1, 54, 55, 56, 57, 58]
    assert head_table(few, 0, 0).tables()[0].to_dicts()[3]["token"] is None
    by4 = head_table(snapshot_of_kinds(range(1, 18), ["grow4"]), 0, 0)
    assert by4.rows.tolist() == [0, 4, 8, 12]
    assert by4.tokens is not None
    assert by4.tokens.tolist() == [1, 5, 9, 13]


def test_a_role_is_shown_as_it_is_held() -> None:
    made = snapshot_of_kinds(range(1, 20), ["grow+recurrent", "static+grow"])
    state = head_table(made, 0, 1, role="recurrent")
    held = made.layers[0].tensor("recurrent")
    assert held is not None
    assert same_bits(state.values["recurrent"], np.asarray(held.array[1:2], np.float32))
    assert (state.positions, state.tokens) == (None, None)
    cross = head_table(made, 1, 0, role="cross_k")
    held = made.layers[1].tensor("cross_k")
    assert held is not None
    assert same_bits(cross.values["cross_k"], np.ascontiguousarray(held.array[0]))
    assert list(cross.columns()) == ["row", "cross_k_0", "cross_k_1", "cross_k_2"]
    with pytest.raises(InputError, match="no rows of this role"):
        head_table(made, 0, 0, role="latent")
    with pytest.raises(InputError, match="no such layer"):
        head_table(made, 2, 0)
    with pytest.raises(InputError, match="no such head"):
        head_table(made, 0, 2, role="recurrent")
    with pytest.raises(InputError, match="no keys and values; it has recurrent"):
        head_table(snapshot_of_kinds(range(1, 9), ["recurrent"]), 0, 0)


def test_a_layer_that_shares_and_one_without_rows() -> None:
    made = snapshot(tuple(range(8)), layers=1)
    shared = Layer(index=1, kind="attention", tensors=(), num_query_heads=4, shares=0)
    made = replace(made, layers=(*made.layers, shared))
    check(head_table(made, 1, 1), made, 1, 1)
    empty = snapshot(())
    table = head_table(empty, 0, 0)
    assert table.values["k"].shape == (0, 4)
    check(table, empty, 0, 0)
    one = Tensor(spec(0, 0, "latent", 1, 1, "float32", axes=("row", "dim"), shape=(0, 6), row_axis=0),
                 np.arange(18, dtype=np.float32).reshape(3, 6))  # fmt: skip
    two = Tensor(spec(1, 0, "rope", 1, 1, "float32", axes=("row", "dim"), shape=(0, 0), row_axis=0),
                 np.zeros((3, 0), np.float32))  # fmt: skip
    layer = Layer(index=0, kind="latent", tensors=(one, two))
    latent = replace(snapshot((1, 2, 3)), layers=(layer,))
    check(head_table(latent, 0, 0), latent, 0, 0)


# -- files ---------------------------------------------------------------------------------------------------------


def test_csv_reads_back_as_the_same_bits(tmp_path: Path, shown: Shown) -> None:
    made, path = strange(), tmp_path / "a.kvsnap"
    kvsnap.save(made, path)
    out = tmp_path / "x.csv"
    assert shown("head", path, 1, 2, "-o", out)[0] == 0
    columns = from_csv(out.read_text())
    assert list(columns) == ["row", "position", "token", *(f"k_{i}" for i in range(5)), *(f"v_{i}" for i in range(5))]
    expected = made.head(1, 2)
    assert expected is not None
    for name, values in (("k", expected.k), ("v", expected.v)):
        read = np.array([columns[f"{name}_{i}"] for i in range(5)], dtype=np.float32).T
        nan = np.isnan(values)
        assert np.array_equal(np.isnan(read), nan)
        assert same_bits(np.where(nan, np.float32(0), read), np.where(nan, np.float32(0), values))
    assert columns["token"] == [str(i) for i in range(100, 111)]
    assert columns["k_0"][0] == "nan"
    assert [int(x) for x in columns["position"]] == expected.positions.tolist()
    control = made.head(1, 1)
    assert control is not None
    assert columns["v_0"] != control.v[:, 0].astype(str).tolist()


def test_parquet_is_typed(tmp_path: Path, shown: Shown) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    made, path, out = strange(), tmp_path / "a.kvsnap", tmp_path / "x.parquet"
    kvsnap.save(made, path)
    assert shown("head", path, 1, 2, "-o", out, "--rows", "2:9")[0] == 0
    table = parquet.read_table(out)
    assert [str(t) for t in table.schema.types[:4]] == ["int64", "int64", "int64", "float"]
    assert table.schema.metadata[b"kvsnap.layer"] == b"1"
    expected = made.head(1, 2)
    assert expected is not None
    for name, values in (("k", expected.k), ("v", expected.v)):
        read = np.stack([table[f"{name}_{i}"].to_numpy() for i in range(5)], axis=1)
        assert same_bits(np.ascontiguousarray(read), np.ascontiguousarray(values[2:9]))
    assert table["row"].to_pylist() == list(range(2, 9))
    few = replace(made, tokens=made.tokens[4:], runs=(replace(made.runs[0], count=8),))
    head_table(few, 1, 2).save(out, overwrite=True)
    assert parquet.read_table(out)["token"].to_pylist() == [None] * 4 + list(range(104, 111))


def test_without_the_extra_parquet_says_what_to_install(
    tmp_path: Path, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, _, err = shown("head", DATA / "tiny.kvsnap", 0, 0, "-o", tmp_path / "x.parquet")
    assert (code, "kvsnap[tables]" in err, list(tmp_path.iterdir())) == (11, True, [])


def test_a_data_frame_has_the_dtypes_of_the_columns() -> None:
    pandas = pytest.importorskip("pandas")
    frame = head_table(strange(), 1, 2).to_pandas()
    assert [str(t) for t in frame.dtypes[:4]] == ["int64", "int64", "Int64", "float32"]
    assert pandas.isna(frame["k_0"][0])
    assert len(head_table(strange(), 1, 2).tables()[0].rows) == 11


def test_arrays_are_written_as_arrays(tmp_path: Path, shown: Shown) -> None:
    made, path = strange(), tmp_path / "a.kvsnap"
    kvsnap.save(made, path)
    table = head_table(made, 0, 1)
    data = json.loads(shown("head", path, 0, 1, "-o", tmp_path / "x.npy", "--json")[1])
    assert data["written"] == [str(tmp_path / "x.k.npy"), str(tmp_path / "x.v.npy")]
    assert same_bits(np.load(tmp_path / "x.k.npy"), table.values["k"])
    assert shown("head", path, 0, 1, "-o", tmp_path / "x.npz")[0] == 0
    with np.load(tmp_path / "x.npz") as held:
        assert sorted(held) == ["k", "positions", "rows", "tokens", "v"]
        assert same_bits(held["v"], table.values["v"])
    assert shown("head", path, 0, 1, "--role", "k", "-o", tmp_path / "y.npy")[0] == 0
    assert same_bits(np.load(tmp_path / "y.npy"), table.values["k"])


def test_what_is_there_is_replaced_only_when_asked(tmp_path: Path, shown: Shown) -> None:
    path, out = DATA / "tiny.kvsnap", tmp_path / "x.npy"
    (tmp_path / "x.v.npy").write_bytes(b"mine")
    code, _, err = shown("head", path, 0, 0, "-o", out)
    assert (code, "--overwrite" in err) == (2, True)
    assert [p.name for p in tmp_path.iterdir()] == ["x.v.npy"]
    with pytest.raises(InputError):
        head_table(kvsnap.load(path), 0, 0).save(out)
    assert (tmp_path / "x.v.npy").read_bytes() == b"mine"
    assert shown("head", path, 0, 0, "-o", out, "--overwrite")[0] == 0
    assert np.load(tmp_path / "x.v.npy").shape == (5, 4)
    assert shown("head", path, 0, 0, "--overwrite")[0] == 2
    for bad in ("x.txt", "x", "npy"):
        with pytest.raises(InputError, match="ending"):
            targets_of(bad, ("k", "v"))
    for rows in ("5", "a:b", "-1:2", "5:3", ":"):
        assert shown("head", path, 0, 0, "--rows", rows)[0] == (0 if rows == ":" else 2), rows


# -- golden files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", [e for e in MLXKV if e["expect"] == "load"], ids=lambda e: e["name"])
def test_the_heads_of_golden_mlxkv_files(entry: dict[str, Any], tmp_path: Path, shown: Shown) -> None:
    content = json.loads((DATA / "mlxkv" / entry["sidecar"]).read_text())["content"]
    loaded = kvsnap.load(DATA / "mlxkv" / entry["file"])
    for number, layer in enumerate(loaded.layers):
        for head in range(layer.num_heads):
            expected = loaded.head(number, head)
            if expected is None or layer.shares is not None:
                continue
            table = head_table(loaded, number, head)
            assert same_bits(table.values["k"], expected.k)
            assert same_bits(table.values["v"], expected.v)
    first = next((e for e in content["layers"] if e["layer"] == 0 and e["heads"]), None)
    if first is None or "f32_hex" not in first["heads"][0]["key"] or (first["key_slab"] or {}).get("n"):
        return
    out = tmp_path / "x.npz"
    assert shown("head", DATA / "mlxkv" / entry["file"], 0, 0, "-o", out)[0] == 0
    with np.load(out) as held:
        assert held["k"].tobytes().hex() == first["heads"][0]["key"]["f32_hex"]
        assert held["v"].tobytes().hex() == first["heads"][0]["value"]["f32_hex"]


@pytest.mark.parametrize("entry", [e for e in COLIKV if e["expect"] == "load"], ids=lambda e: e["name"])
def test_the_heads_of_golden_coli_kv_files(entry: dict[str, Any], tmp_path: Path, shown: Shown) -> None:
    side = json.loads((DATA / "colikv" / entry["sidecar"]).read_text())
    for layer in range(side["header"]["n_layers"]):
        out = tmp_path / f"{layer}.npz"
        assert shown("head", DATA / "colikv" / entry["file"], layer, 0, "-o", out)[0] == 0
        with np.load(out) as held:
            assert held["tokens"].tolist() == [r["token"] for r in side["records"]]
            for row, record in enumerate(side["records"]):
                expected = np.frombuffer(bytes.fromhex(record["latent"][layer]["f32_hex"]), np.float32)
                if "polar" in entry["name"]:  # by cosines, whose last bit depends on the machine
                    assert np.allclose(held["k"][row], expected, atol=1e-5)
                else:
                    assert same_bits(held["k"][row], expected)


@pytest.mark.parametrize(("kind", "axis"), [("quanto", 0), ("quanto", -1), ("hqq", 1)])
def test_the_rows_of_a_quantised_layer_are_what_its_codes_stand_for(kind: str, axis: int) -> None:
    from kvsnap.layout import PositionRun, Run
    from kvsnap.quantised import Quantisation
    from test_quantised import GROUP, layer_of

    layer = layer_of(Quantisation(kind, 4, GROUP, axis, axis, 128), 8, 4)
    made = Snapshot(layers=(layer,), tokens=tuple(range(20, 32)), runs=(Run("prompt", 12),), n_rows=12, token_offset=12,
                    positions=(PositionRun(0, 12),))  # fmt: skip
    table = head_table(made, 0, 1)
    check(table, made, 0, 1)
    assert table.tokens is not None
    assert table.tokens.tolist() == list(range(20, 32))
    some = head_table(made, 0, 1, rows=(6, 10))
    assert same_bits(some.values["k"], np.ascontiguousarray(table.values["k"][6:10]))


def test_a_file_of_no_rows_may_say_any_width(tmp_path: Path) -> None:
    made = Minimal()
    for tensor in made.layout["tensors"][:2]:
        tensor["shape"] = [1, 0, 2**30]
    made.span |= {"n_rows": 0, "ids": [], "runs": [], "positions": []}
    made.span["parts"] = [{"tensor": i, "n_rows": 0, "data": b""} for i in (0, 1)]
    made.state |= {"parts": [], "row_start": 0}
    made.commit["token_offset"] = 0
    path = tmp_path / "a.kvsnap"
    path.write_bytes(made.build())
    found = kvsnap.head_table(kvsnap.load(path), 0, 0)
    for act in (found.columns, found.tables, lambda: found.save(tmp_path / "x.csv")):
        with pytest.raises(InputError, match="too wide for a table"):
            act()
    found.save(tmp_path / "x.npz")
    assert np.load(tmp_path / "x.npz")["k"].shape == (0, 2**30)


def test_keys_and_values_of_different_rows_are_no_table() -> None:
    taken = snapshot(range(1, 9))
    k, v = taken.layers[0].tensors
    cut = Tensor(v.spec, np.ascontiguousarray(v.array[:, :5]))
    odd = replace(taken, layers=(replace(taken.layers[0], tensors=(k, cut)),))
    with pytest.raises(InputError, match="keys and values of different rows"):
        kvsnap.head_table(odd, 0, 0)
    assert kvsnap.head_table(odd, 0, 0, role="v").values["v"].shape == (5, 4)

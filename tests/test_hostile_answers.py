"""What hostile files and configurations come to in the answers of inspections: texts, numbers and settings."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsnap
from kvsnap.cli import run
from kvsnap.errors import FormatError, InputError, UnsupportedError
from kvsnap.layout import Layer, Snapshot, Tensor
from report_pages import page_of
from spec_file import Minimal
from synthetic import snapshot

UNSEEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]")
EVIL = "=1+1 \x1b[31m\u202e\x07 [bold]x[/]"
NAME = "=\x1b[31mname.kvsnap"
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "hidden_size": 256, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    taken = snapshot(range(1, 9), architecture=EVIL, text=EVIL, metadata={EVIL: EVIL, "title": EVIL})
    kvsnap.save(taken, "evil.kvsnap")
    kvsnap.save(snapshot(range(1, 9)), "=\x1b[31mname.kvsnap")
    return "evil.kvsnap"


@pytest.mark.parametrize(
    "args",
    [
        ("info",), ("info", "--layers"), ("growth",), ("growth", "--kinds", "--turns"), ("growth", NAME),
        ("diff", NAME),
        ("diff", NAME, "--by", "head"), ("stats",), ("head", "0", "0"),
    ],
)  # fmt: skip
def test_texts_of_files_cannot_steer_a_terminal(
    evil: str, args: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([args[0], evil, *args[1:]]) in (0, 1)
    told = "".join(capsys.readouterr())
    assert told
    assert not UNSEEN.search(told)
    if args[0] in ("info", "growth"):
        assert "\\u001b[31m\\u202e\\u0007" in "".join(told.split())
        assert "[bold]x[/]" in told


def test_names_of_files_cannot_either(evil: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ls", "."]) == 0
    assert run(["info", "none\x1b[31m"]) == 3
    told = capsys.readouterr()
    assert "=\\u001b[31mname" in told.out
    assert "none\\u001b[31m" in told.err
    assert not UNSEEN.search(told.out + told.err)


def test_cat_is_exact_in_a_pipe_and_careful_on_a_terminal(
    evil: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["cat", evil]) == 0
    assert capsys.readouterr().out == f"{EVIL}\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert run(["cat", evil]) == 0
    assert capsys.readouterr().out == "=1+1 \\u001b[31m\\u202e\\u0007 [bold]x[/]\n"


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_logits_that_are_nan_of_any_bits_are_compared(tmp_path: Path) -> None:
    taken = snapshot(range(1, 9), dtype="float16")
    assert taken.logits is not None
    values = np.full(8, 0x7D01, np.uint16).view(np.float16)
    logits = Tensor(replace(taken.logits.spec, dtype="float16"), values)
    kvsnap.save(replace(taken, logits=logits), tmp_path / "a.kvsnap")
    assert kvsnap.diff(tmp_path / "a.kvsnap", tmp_path / "a.kvsnap").verdict == "identical"


def test_csv_on_a_terminal_steers_it_no_more_than_the_rest(
    evil: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert run(["growth", "--csv", NAME, evil]) == 0
    told = capsys.readouterr().out
    assert not UNSEEN.search(told)
    assert "'=1+1 \\u001b[31m" in told


def test_no_formula_gets_into_csv(evil: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["growth", "--csv", "=\x1b[31mname.kvsnap", evil]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {row["source"] for row in rows} == {"'=\x1b[31mname.kvsnap", evil}
    assert {row["architecture"] for row in rows} == {"synthetic", f"'{EVIL}"}
    assert all(row["cache_bytes"].isdigit() for row in rows)


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 10**9},  # heads of no width
        {"num_key_value_heads": 0},
        {"model_type": float("nan")},
        {"model_type": ["llama"]},
        {"model_type": "a" * 1000},
    ],
)
def test_growth_refuses_what_no_model_has(change: dict[str, Any]) -> None:
    assert kvsnap.growth(LLAMA, lengths=[10]).at(10).cache_bytes == 4 * 2 * 10 * 2 * 32 * 2
    with pytest.raises(kvsnap.KvsnapError, match=r"model_type|a head and a width"):
        kvsnap.growth({**LLAMA, **change})


@pytest.mark.parametrize("name", ["\u00b2", "9" * 5000, "", "x"])
def test_settings_of_layers_that_are_not_there_change_nothing(name: str) -> None:
    found = kvsnap.growth({**LLAMA, "per_layer_config": {name: {"num_key_value_heads": 8}}}, lengths=[10])
    own = kvsnap.growth({**LLAMA, "per_layer_config": {"1": {"num_key_value_heads": 8}}}, lengths=[10])
    assert found.at(10).cache_bytes == 10240 < own.at(10).cache_bytes == 10240 // 4 * 3 + 10240


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("lfm2", {"full_attn_idxs": 3}, "full_attn_idxs is no list"),
        ("bamba", {"attn_layer_indices": 3}, "attn_layer_indices is no list"),
        ("kimi_linear", {"linear_attn_config": {"full_attn_layers": 3, "kda_layers": []}}, "full_attn_layers is no"),
        ("deepseek_v4", {"compress_ratios": [[]]}, "layer 0 is of a type that is not known"),
        ("minimax_m3_vl_text", {"sparse_attention_config": {"sparse_attention_freq": [1], "sparse_index_dim": "x"}},
         "sparse_index_dim is no number"),
        ("gemma3_text", {"sliding_window_pattern": ""}, "sliding_window_pattern is no number"),
        ("nemotron_h", {"hybrid_override_pattern": "*" * 70000}, "no such number of layers"),
        ("nemotron_h", {"layer_types": ["moe"] * 70000}, "no such number of layers"),
        ("llama", {"dtype": "x" * 100}, "rows are not kept in this dtype"),
    ],
)  # fmt: skip
def test_settings_of_another_kind_are_named(family: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(kvsnap.KvsnapError, match=message) as raised:
        kvsnap.growth({**LLAMA, "model_type": family, **change})
    assert len(str(raised.value)) < 400


def test_lists_of_another_kind_say_nothing_where_the_family_has_a_rule() -> None:
    glm = {**LLAMA, "model_type": "glm_moe_dsa"}
    assert kvsnap.growth({**glm, "indexer_types": {"a": 1}}).layers == kvsnap.growth(glm).layers


@pytest.mark.parametrize("family", ["llama", "lfm2", "gemma3n_text"])
def test_settings_for_every_layer_take_no_longer_than_the_layers(family: str) -> None:
    n = 20000
    own: dict[str, Any] = {str(i): {} for i in range(n)}
    change = {"num_hidden_layers": n, "per_layer_config": own, "full_attn_idxs": list(range(n)), **own}
    types = ["full_attention", *["sliding_attention"] * (n - 1)]
    shared = {"layer_types": types, "num_kv_shared_layers": n - 2, "sliding_window": 8} if "gemma" in family else {}
    started = time.process_time()
    assert len(kvsnap.growth({**LLAMA, "model_type": family, **change, **shared}, lengths=[1]).layers) == n
    assert time.process_time() - started < 20


@pytest.mark.parametrize(
    "text", ["[" * 100000, '{"a":' * 100000, '{"a":' * 101 + "1" + "}" * 101, '{"a":', "9" * 5000, '"x"', "\ufeff{"]
)
def test_a_configuration_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(FormatError):
        kvsnap.growth(path)
    path.write_text(json.dumps(LLAMA | {"nested": json.loads("[" * 98 + "]" * 98)}))
    assert kvsnap.growth(path).architecture == "llama"


def test_a_configuration_is_a_file_of_some_size(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    os.mkfifo(path)
    with pytest.raises(InputError):
        kvsnap.growth(tmp_path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(InputError):
        kvsnap.growth(tmp_path)
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(kvsnap.KvsnapError):
        kvsnap.growth(tmp_path)
    path.unlink()
    path.write_text(json.dumps(LLAMA) + " " * (8 << 20))
    with pytest.raises(FormatError, match="too long"):
        kvsnap.growth(tmp_path)
    with pytest.raises(kvsnap.KvsnapError):
        kvsnap.growth(tmp_path / ("a" * 5000))


@pytest.mark.parametrize(
    "identity",
    [
        {"config": {"num_hidden_layers": "[" * 100000}},
        {"config": {"num_hidden_layers": "{"}},
        {"config": {".".join("a" * 100000): "1"}},
        {"quantisation": '{"a":' * 800 + "1" + "}" * 800},
        {"cache_quantisation": "[" * 100000},
        {"runtime": {"kernels": "[" * 100000}},
    ],
)
def test_an_identity_may_say_anything(identity: dict[str, Any], tmp_path: Path) -> None:
    made = Minimal()
    made.identity = {"architecture": "llama", "config": {}, "weights": []} | identity
    path, other = tmp_path / "a.kvsnap", tmp_path / "b.kvsnap"
    path.write_bytes(made.build())
    made.identity = {"architecture": "llama", "config": {"a": "1"}, "weights": [], "quantisation": '{"a":1}'}
    other.write_bytes(made.build())
    started = time.process_time()
    assert kvsnap.growth(path).checked[0].ok
    kvsnap.inspect(path)
    assert kvsnap.diff(path, other).verdict in ("identical", "besides")
    assert kvsnap.diff(other, path).verdict in ("identical", "besides")
    assert time.process_time() - started < 5


HQQ = '{"axis_key":1,"axis_value":1,"bits":4,"group":4,"kind":"hqq","residual":128}'


@pytest.mark.parametrize("quantisation", [HQQ, '{"bits":8,"kind":"fp8"}', '{"bits":1e999,"kind":"x"}'])
@pytest.mark.parametrize("roles", [("k", "v"), ("code", "scale"), ("residual", "residual"), ("code", "code")])
def test_a_layer_that_is_called_quantised_and_is_not_is_refused(
    quantisation: str, roles: tuple[str, str], tmp_path: Path
) -> None:
    made = Minimal()
    made.layout["layers"][0]["quantisation"] = quantisation
    for tensor, role in zip(made.layout["tensors"], roles, strict=False):
        tensor.update(role=role, growth="replaced", axes=["row", "dim"], shape=[0, 8], row_axis=0)
    made.state["parts"] += [{"tensor": i, "n_rows": 3, "data": made.k.tobytes()} for i in (0, 1)]
    made.span["parts"] = []
    path = tmp_path / "a.kvsnap"
    path.write_bytes(made.build())
    assert kvsnap.inspect(path).groups
    for look in (kvsnap.growth, kvsnap.statistics, lambda p: kvsnap.diff(p, p)):
        with pytest.raises((FormatError, UnsupportedError), match=r"layer|residual"):
            look(path)


@pytest.mark.parametrize("option", ["--at", "--budget"])
def test_lengths_of_hundreds_of_digits_are_no_bug(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert run(["growth", str(path), option, "9" * 400]) == 2
    assert f"{option} takes" in capsys.readouterr().err


def _filled(value: float, dtype: str = "float32", bits: int | None = None) -> Snapshot:
    made = snapshot(range(1, 20), layers=2, dtype=dtype)
    layers = []
    for layer in made.layers:
        arrays = [np.full_like(np.asarray(t.array), value) for t in layer.tensors]
        if bits is not None:
            arrays = [np.full_like(a.view(np.uint32), bits).view(np.float32) for a in arrays]
        tensors = tuple(Tensor(t.spec, a) for t, a in zip(layer.tensors, arrays, strict=True))
        layers.append(Layer(index=layer.index, kind=layer.kind, tensors=tensors, num_query_heads=4))
    return replace(made, layers=tuple(layers))


@pytest.mark.parametrize(
    ("value", "dtype", "bits"),
    [
        (float("nan"), "float32", None), (float("inf"), "float32", None), (3e38, "float32", None),
        (1e300, "float64", None), (0.0, "float32", 0x7F800001),  # the last one: a signalling NaN
    ],
)  # fmt: skip
def test_no_value_is_worth_a_warning(value: float, dtype: str, bits: int | None, tmp_path: Path) -> None:
    path = str(tmp_path / "a.kvsnap")
    kvsnap.save(_filled(value, dtype, bits), path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = kvsnap.statistics(path)
        assert sum(layer.n_nan + layer.n_infinite for layer in found.layers) == (0 if value == 3e38 else 4 * 19 * 8)
        if value == 3e38:  # rows whose norms are beyond float32 are in the means
            assert all(h.mean_norm == pytest.approx(2 * 3e38) and h.n_left_out == 0 for h in found.heads)
            assert {row[-1] for row in found.table("channel").rows} == {1.0}
        for by in ("layer", "head", "channel", "row"):
            found.table(by)
        kvsnap.head_table(kvsnap.load(path), 0, 0)
        assert kvsnap.diff(path, path)
        pytest.importorskip("matplotlib")
        assert not kvsnap.report(path, tmp_path / "r.html").problems


def test_head_says_what_is_missing() -> None:
    with pytest.raises(kvsnap.KvsnapError, match="no layers"):
        kvsnap.head_table(snapshot(range(1, 9), layers=0), 0, 0)
    with pytest.raises(kvsnap.KvsnapError, match=r"no keys and values as floats.*int8"):
        kvsnap.head_table(snapshot(range(1, 9), dtype="int8"), 0, 0)


@pytest.mark.parametrize("name", ["own.kvsnap", "other.kvsnap", "other.mlxkv", "session.kvsnap"])
def test_no_page_and_no_table_takes_the_place_of_a_cache(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for path in ("own.kvsnap", "other.kvsnap"):
        kvsnap.save(snapshot(range(1, 9)), path)
    kvsnap.save(snapshot(range(1, 9)), "other.mlxkv", format="mlxkv")
    with kvsnap.Session.open("session.kvsnap") as session:
        session.append(snapshot(range(1, 9)))
    before = Path(name).read_bytes()
    taken = kvsnap.head_table(kvsnap.load("own.kvsnap"), 0, 0)
    assert run(["report", "own.kvsnap", "-o", name, "--overwrite"]) == 2
    assert run(["stats", "own.kvsnap", "-o", name, "--overwrite"]) == 2
    with pytest.raises(kvsnap.KvsnapError, match="this is a cache file"):
        kvsnap.report("own.kvsnap", name, overwrite=True)
    Path(name).rename("x.csv")
    with pytest.raises(kvsnap.KvsnapError, match="this is a cache file"):
        taken.save("x.csv", overwrite=True)
    assert Path("x.csv").read_bytes() == before
    Path("x.csv").write_text("old")
    assert taken.save("x.csv", overwrite=True) == ("x.csv",)
    assert Path("x.csv").read_text().startswith("row,")
    capsys.readouterr()


@pytest.mark.parametrize("n_changes", [0, 1, 100])
def test_a_page_tells_of_one_commit(n_changes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    path = str(tmp_path / "s.kvsnap")
    with kvsnap.Session.open(path) as session:
        session.append(snapshot(range(1, 9)))
    lengths = [8]

    def load(*args: Any, **settings: Any) -> Any:
        if len(lengths) <= n_changes:
            lengths.append(lengths[-1] + 1)
            with kvsnap.Session.open(path) as session:
                session.append(snapshot(range(1, lengths[-1] + 1)))
        return kvsnap.load(*args, **settings)

    monkeypatch.setattr("kvsnap.reporting.load", load)
    told = kvsnap.report(path, tmp_path / "r.html")
    if n_changes > 50:
        assert "changed again and again" in told.problems[0]
        return
    assert not told.problems
    assert f"{8 + n_changes} tokens in 1 file" in page_of(tmp_path / "r.html").text

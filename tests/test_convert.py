"""Conversion between formats: through the snapshot, tensor by tensor, with a report of what the target cannot hold."""

from __future__ import annotations

import json
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvsnap
from kvsnap import formats
from kvsnap.cli import run
from kvsnap.errors import FormatError, InputError, LossError
from synthetic import snapshot as made

GOLDEN = Path(__file__).parent / "data" / "mlxkv"


def synthetic_snapshot() -> kvsnap.Snapshot:
    return made(range(12), n_pending=1, layers=2, n_prompt=7, dtype="bfloat16", text="a text", metadata={"who": "me"})


def same(a: kvsnap.Snapshot, b: kvsnap.Snapshot) -> bool:
    left, right = list(a.tensors()), list(b.tensors())
    return len(left) == len(right) and all(
        x.name == y.name and x.array.dtype == y.array.dtype and x.array.tobytes() == y.array.tobytes()
        for x, y in zip(left, right, strict=True)
    )


@pytest.fixture
def native(tmp_path: Path) -> Path:
    path = tmp_path / "a.kvsnap"
    kvsnap.save(synthetic_snapshot(), path)
    return path


def test_safetensors_and_back_loses_nothing(native: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "a.safetensors", tmp_path / "b.kvsnap"
    assert not kvsnap.convert(native, there, format="safetensors")
    report = kvsnap.convert(there, back)
    assert (report.source_format, report.target_format, report.losses) == ("safetensors", "native", ())
    a, b = kvsnap.load(native), kvsnap.load(back)
    assert same(a, b)
    for name in ("tokens", "runs", "n_rows", "n_pending", "token_offset", "positions", "sampler", "identity", "text"):
        assert getattr(a, name) == getattr(b, name), name
    assert dict(a.metadata) == dict(b.metadata)
    assert a.logits is not None
    assert b.logits is not None
    assert a.logits.array.tobytes() == b.logits.array.tobytes()


def test_one_changed_value_is_seen_by_the_comparison(native: Path) -> None:
    a, b = kvsnap.load(native), kvsnap.load(native)
    first = b.layers[0].tensors[0]
    values = first.array.copy()
    values.reshape(-1).view(np.uint8)[0] ^= 1
    changed = kvsnap.Tensor(first.spec, values)
    layer = replace(b.layers[0], tensors=(changed, *b.layers[0].tensors[1:]))
    assert not same(a, replace(b, layers=(layer, *b.layers[1:])))


def test_the_safetensors_library_reads_what_is_written(native: Path, tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "a.safetensors"
    kvsnap.convert(native, path, format="safetensors")
    snapshot = kvsnap.load(native)
    found = numpy.load_file(path)
    assert found["tokens"].tolist() == list(snapshot.tokens)
    names = {t.name for t in snapshot.tensors()}
    assert names <= set(found)
    for tensor in snapshot.tensors():
        assert found[tensor.name].shape == tensor.shape
        assert found[tensor.name].tobytes() == tensor.array.tobytes()


@pytest.mark.parametrize("order", ["little", "big"])
def test_mlxkv_is_told_by_content_and_needs_leave_to_lose(native: Path, tmp_path: Path, order: str) -> None:
    path = tmp_path / "story.safetensors"  # a misleading name
    with pytest.raises(LossError, match="the text is left out"):
        kvsnap.convert(native, path, format="mlxkv", byte_order=order)
    assert not path.exists()
    report = kvsnap.convert(native, path, format="mlxkv", byte_order=order, allow_loss=True)
    assert "text" in {loss.what for loss in report.losses}
    assert kvsnap.inspect(path).format == "mlxkv"
    assert kvsnap.inspect(path).dialect == f"{order}-endian"
    a, b = kvsnap.load(native), kvsnap.load(path)
    assert b.tokens == a.tokens
    head, other = a.head(0, 0), b.head(0, 0)
    assert head is not None
    assert other is not None
    assert head.k.tobytes() == other.k.tobytes()


def test_what_only_the_source_knows_is_named(tmp_path: Path) -> None:
    with pytest.raises(LossError, match="payloads"):
        kvsnap.convert(GOLDEN / "v5_turboquant.mlxkv", tmp_path / "x.kvsnap")
    plain = kvsnap.convert(GOLDEN / "v3_f32.mlxkv", tmp_path / "x.kvsnap")
    assert not plain
    assert kvsnap.load(tmp_path / "x.kvsnap").tokens == kvsnap.load(GOLDEN / "v3_f32.mlxkv").tokens


def test_a_lossy_codec_is_a_loss(native: Path, tmp_path: Path) -> None:
    with pytest.raises(LossError, match="q8"):
        kvsnap.convert(native, tmp_path / "q.kvsnap", codec="q8")
    assert kvsnap.convert(native, tmp_path / "q.kvsnap", codec="q8", allow_loss=True)
    assert kvsnap.load(tmp_path / "q.kvsnap").bound > 0


def test_unknown_formats_and_options(native: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="format"):
        kvsnap.convert(native, tmp_path / "x", format="pickle")
    with pytest.raises(InputError):
        kvsnap.convert(native, tmp_path / "x", format="safetensors", version=3)
    with pytest.raises(FormatError, match="not a file that kvsnap reads"):
        kvsnap.convert(Path(__file__), tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "edit",
    [
        lambda h: h["layer0.k"].update(data_offsets=[0, 2**39]),
        lambda h: h["layer0.k"].update(shape=[2**39, 2**39]),
        lambda h: h["layer0.k"].update(dtype="F32" if h["layer0.k"]["dtype"] != "F32" else "F16"),
        lambda h: h["layer0.k"].update(shape="x"),
        lambda h: h.pop("tokens"),
        lambda h: h.pop("__metadata__"),
        lambda h: h.update(__metadata__={"kvsnap": "[]"}),
        lambda h: h.update(__metadata__={"kvsnap": "{"}),
        lambda h: h["tokens"].update(shape=[1]),
    ],
)
def test_hostile_safetensors(native: Path, tmp_path: Path, edit: object) -> None:
    path = tmp_path / "a.safetensors"
    kvsnap.convert(native, path, format="safetensors")
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    edit(header)  # type: ignore[operator]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    with pytest.raises(kvsnap.KvsnapError):
        kvsnap.load(path)


def test_every_cut_of_a_safetensors_file_is_refused(native: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    kvsnap.convert(native, path, format="safetensors")
    raw = path.read_bytes()
    for length in range(len(raw)):
        with pytest.raises(kvsnap.KvsnapError):
            snapshot = kvsnap.loads(raw[:length])
            for tensor in snapshot.tensors():
                tensor.values()


def test_converting_holds_about_one_tensor(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    small = synthetic_snapshot()
    spec = small.layers[0].tensors[0].spec
    layers = []
    for index in range(8):
        tensors = []
        for place, role in enumerate("kv"):
            one = replace(
                spec, id=2 * index + place, name=f"layers.{index}.{role}", layer=index, role=role, dtype="float32",
                shape=(4, 0, 64),
            )  # fmt: skip
            tensors.append(kvsnap.Tensor(one, rng.normal(size=(4, 2000, 64)).astype("f4")))
        layers.append(kvsnap.Layer(index=index, kind="attention", tensors=tuple(tensors), num_query_heads=8))
    big = replace(
        small, layers=tuple(layers), tokens=tuple(range(2000)), runs=(replace(small.runs[0], count=2000),), n_rows=2000,
        n_pending=0, token_offset=2000, positions=(replace(small.positions[0], count=2000),), text=None,
    )  # fmt: skip
    path = tmp_path / "big.kvsnap"
    big.save(path, sync=False)
    one = big.layers[0].tensors[0].nbytes
    total = 16 * one
    del big, layers, tensors
    for name in formats.NAMES:
        if name in ("native", "colikv"):
            continue
        tracemalloc.start()
        kvsnap.convert(path, tmp_path / "big.out", format=name, allow_loss=True)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 3 * one < total / 4, name


def test_command(native: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "a.kv")
    assert run(["convert", str(native), out, "--format", "mlxkv"]) == LossError.exit_code
    assert "allow-loss" in capsys.readouterr().err
    assert run(["convert", str(native), out, "--format", "mlxkv", "--byte-order", "big", "--allow-loss", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target_format"] == "mlxkv"
    assert run(["info", out]) == 0
    assert "big-endian" in capsys.readouterr().out
    assert run(["convert", out, str(tmp_path / "missing" / "x.kvsnap")]) == 3


def test_colikv_to_mlxkv_and_back_gives_the_same_file(tmp_path: Path) -> None:
    origin = Path(__file__).parent / "data" / "colikv" / "v1_basic.coli_kv"
    there, back = tmp_path / "a.kv", tmp_path / "b.coli_kv"
    kvsnap.convert(origin, there, format="mlxkv", allow_loss=True)
    latent, head = kvsnap.load(origin).layers[0].tensor("latent"), kvsnap.load(there).head(0, 0)
    assert latent is not None
    assert head is not None
    assert head.k.tobytes() == latent.array.tobytes()
    vocab = struct.unpack_from("<i", origin.read_bytes(), 28)[0]
    with pytest.raises(InputError, match="vocab"):
        kvsnap.convert(there, back, format="colikv", allow_loss=True)
    kvsnap.convert(there, back, format="colikv", vocab=vocab, allow_loss=True)
    assert back.read_bytes() == origin.read_bytes()


def test_index_rows_are_in_the_loss_report(tmp_path: Path) -> None:
    origin = Path(__file__).parent / "data" / "colikv" / "v1_dsa_all_layers.coli_kv"
    with pytest.raises(LossError, match="index"):
        kvsnap.convert(origin, tmp_path / "a.kv", format="mlxkv")
    assert not kvsnap.convert(origin, tmp_path / "a.kvsnap")


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        ("x.safetensors", [], "safetensors"),
        ("x.mlxkv", ["--allow-loss"], "mlxkv"),
        ("x.kv", [], "native"),
        ("x.safetensors", ["--format", "native"], "native"),
    ],
)
def test_the_ending_of_the_target_says_the_format_where_no_option_does(
    tmp_path: Path, name: str, options: list[str], wanted: str
) -> None:
    kvsnap.save(made(range(6)), tmp_path / "a.kvsnap")
    assert run(["convert", str(tmp_path / "a.kvsnap"), str(tmp_path / name), *options]) == 0
    assert formats.format_of(tmp_path / name).name == wanted

"""Windows, states and static tensors in what reads and writes files: the command line, other formats, inspection."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsnap
from kvsnap.cli import run
from kvsnap.errors import InputError
from kvsnap.inspection import non_finite
from kvsnap.layout import Tensor
from kvsnap.session import Session
from reach_model import TOKENS, Model
from reach_model import run as turn
from synthetic import layer_of, rows, same, snapshot_of_kinds

KINDS = ("window8", "grow", "recurrent", "buffer", "static")


def told(capsys: pytest.CaptureFixture[str], *args: object, code: int = 0) -> Any:
    capsys.readouterr()
    assert run([str(a) for a in args]) == code
    out, err = capsys.readouterr()
    return json.loads(out) if code == 0 else err


def made(path: Path, kinds: tuple[str, ...]) -> Model:
    model = Model(kinds)
    with Session.open(path) as session:
        for n_new, n_pending in ((5, 0), (17, 0), (2, 1), (1, 0)):
            turn(session, model, n_new, n_pending)
    return model


def test_truncate_and_fork_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.kvsnap"
    model = made(path, ("window8", "grow"))
    before = path.read_bytes()
    expected = "rows 8 to 14 any more; the nearest reachable length is 5, and above it 22"
    assert expected in told(capsys, "truncate", path, 15, code=12)
    assert expected in told(capsys, "fork", path, tmp_path / "b.kvsnap", "--at", 15, code=12)
    assert path.read_bytes() == before
    assert told(capsys, "fork", path, tmp_path / "b.kvsnap", "--at", 15, "--nearest", "--json")["n_tokens"] == 5
    out = tmp_path / "c.kvsnap"
    assert told(capsys, "truncate", path, 24, "-o", out, "--nearest", "--json")["n_tokens"] == 24
    assert told(capsys, "truncate", path, 15, "--nearest", "--json")["n_tokens"] == 5
    for file in (path, tmp_path / "b.kvsnap"):
        short = model.copy()
        short.cut(5)
        short.check(kvsnap.load(file))
    assert (len(kvsnap.load(out).tokens), kvsnap.load(out).layers[0].tensors[0].start) == (24, 15)


def test_compact_states_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.kvsnap"
    made(path, KINDS)
    assert told(capsys, "compact", path, "--states", 2, "--json")["n_turns"] == 4
    assert "is stored at 24 tokens" in told(capsys, "truncate", path, 22, code=12)
    assert "not stored any more" in told(capsys, "rewind", path, 2, code=12)
    assert told(capsys, "truncate", path, 24, "--json")["n_tokens"] == 24
    assert told(capsys, "info", path, "--json")["n_tokens"] == 24
    assert len(told(capsys, "log", path, "--json")["turns"]) == 5


def test_head_of_a_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "a.kvsnap", tmp_path / "head.npz"
    model = made(path, ("window8",))
    said = told(capsys, "head", path, 0, 1, "-o", out, "--json")
    assert (said["positions"], said["shape"]) == ([15, 24], [10, 3])
    with np.load(out) as data:
        assert data["positions"].tolist() == list(range(15, 25))
        assert np.array_equal(data["k"], rows(model.tokens, 15, 25, 0, 2, 3, "float32")[1])
    assert str(model.tokens[-1]) in json.dumps(told(capsys, "cat", path, "--json"))


def test_safetensors_and_back(tmp_path: Path) -> None:
    path, plain = tmp_path / "a.kvsnap", tmp_path / "a.safetensors"
    model = made(path, (*KINDS, "grow4"))
    report = kvsnap.convert(path, plain)
    assert not report.losses
    again = kvsnap.load(plain)
    assert same(again, kvsnap.load(path)) == []
    model.check(again)
    assert again.reach(24).n_tokens == 0
    window = replace(again.layers[0], tensors=tuple(t.rows(t.start, t.start + 3) for t in again.layers[0].tensors))
    with pytest.raises(InputError, match=r"window8\.k rows do not fit"):
        kvsnap.save(replace(again, layers=(window, *again.layers[1:])), tmp_path / "b.kvsnap")


def test_mlxkv_tells_what_it_has_no_place_for(tmp_path: Path) -> None:
    path = tmp_path / "a.kvsnap"
    made(path, KINDS)
    report = kvsnap.convert(path, tmp_path / "a.bin", format="mlxkv", allow_loss=True)
    text = " ".join(f"{loss.what} {loss.detail}" for loss in report.losses)
    for name in ("layers.2.recurrent", "layers.3.buffer"):
        assert name in text
    loaded = kvsnap.load(tmp_path / "a.bin")
    first = loaded.layers[0].tensors[0]
    assert (first.start, first.n_rows) == (15, 10)


def test_not_finite_values_are_told_by_their_row() -> None:
    layer = layer_of("window8", 0, TOKENS, 21, 0)
    k, v = layer.tensors
    values = k.array.copy()
    values[1, 2, 0] = np.nan
    snapshot = replace(
        snapshot_of_kinds(TOKENS[:21], ()), layers=(replace(layer, tensors=(Tensor(k.spec, values, start=k.start), v)),)
    )
    (found,) = non_finite(snapshot)
    assert (found.row, found.nan) == (16, 1)
    assert non_finite(snapshot.truncate(21)) == (found,)


def test_rows_long_before_a_window_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "long.kvsnap"
    model = Model(("window8",))
    with Session.open(path) as session:
        for _ in range(12):
            turn(session, model, 4, 0)
        whole = session.load()
    tensor = next(iter(whole.tensors()))
    assert (tensor.start, tensor.n_rows) == (0, 48)
    later = tensor.since(40)
    assert (later.start, later.n_rows) == (40, 8)
    assert tensor.since(42).start == 40
    assert tensor.since(0).n_rows == 48
    expected = tensor.array[..., 40:, :].copy()

    # The first turn is damaged: what needs it says so, what does not is none the worse.
    first = next(iter(kvsnap.load(path).tensors())).source.batch.slice(0, tensor.spec.id).source  # type: ignore[attr-defined]
    data = bytearray(path.read_bytes())
    data[first.offset] ^= 1
    path.write_bytes(data)
    damaged = next(iter(kvsnap.load(path).tensors()))
    assert damaged.since(40).array.tobytes() == expected.tobytes()
    with pytest.raises(kvsnap.KvsnapError, match=r"rows \[0, 4\)"):
        _ = damaged.array

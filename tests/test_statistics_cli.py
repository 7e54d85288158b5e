"""kvsnap stats: tables, CSV and JSON say what `statistics` says."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsnap
import synthetic
from kvsnap.cli import run as run_kvsnap
from test_statistics import drawn, snapshot_of


@pytest.fixture
def path(tmp_path: Path) -> str:
    made = tmp_path / "a.kvsnap"
    k, v = drawn(rows=80, seed=1), drawn(rows=80, seed=2)
    k[1] = k[1, :1]
    kvsnap.save(snapshot_of({"k": k, "v": v}, {"k": k + 1, "v": v * 2}, text="x"), made)
    return str(made)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = run_kvsnap(["stats", *words])
    out, err = capsys.readouterr()
    return code, out, err


def lines(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_the_table_is_followed_by_what_stands_out(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, path)
    assert (code, err) == (0, "")
    found = kvsnap.statistics(path)
    told = [line for line in out.splitlines() if line.strip().startswith(("0 ", "1 "))]
    assert [line.split()[:3] for line in told] == [["0", "k", "3"], ["0", "v", "3"], ["1", "k", "3"], ["1", "v", "3"]]
    assert f"{found.layers[0].mean_norm:.3g}" in told[0]
    assert f"{found.layers[0].effective_rank:.1f}" in told[0]
    assert "* dead heads: layer 0 k head 1 (all rows alike)" in out
    for finding in found.findings:
        assert f"* {finding}" in out


@pytest.mark.parametrize("by", ["layer", "head", "channel", "row"])
def test_csv_has_every_line_and_column(path: str, by: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, path, "--by", by, "--csv")
    table = kvsnap.statistics(path).table(by)
    told = lines(out)
    assert code == 0
    assert len(told) == len(table.rows) == {"layer": 4, "head": 12, "channel": 12 * 16, "row": 80}[by]
    assert tuple(told[0]) == table.columns
    for line, row in zip(told, table.rows, strict=True):
        assert list(line.values()) == ["" if cell is None else str(cell) for cell in row]
    code, out, err = run(capsys, path, "--by", by)
    assert code == 0
    assert ("more lines" in err) == (by in ("channel", "row"))


def test_figures_by_channel_and_row_are_those_of_the_file(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    head = kvsnap.load(path).head(1, 2)
    assert head is not None
    told = [t for t in lines(run(capsys, path, "--by", "channel", "--csv")[1])
            if (t["layer"], t["role"], t["head"]) == ("1", "v", "2")]  # fmt: skip
    rms = np.sqrt((head.v.astype(np.float64) ** 2).mean(axis=0))
    np.testing.assert_allclose([float(t["rms"]) for t in told], rms, rtol=1e-5)
    np.testing.assert_allclose([float(t["ratio"]) for t in told], rms / np.median(rms), rtol=1e-5)
    rows = lines(run(capsys, path, "--by", "row", "--role", "v", "--layer", "1", "--csv")[1])
    norms = [np.linalg.norm(kvsnap.load(path).head(1, h).v.astype(np.float64), axis=1) for h in range(3)]  # type: ignore[union-attr]
    np.testing.assert_allclose([float(t["v_norm"]) for t in rows], np.mean(norms, axis=0), rtol=1e-5)
    assert [t["token"] for t in rows] == [str(i) for i in range(80)]
    assert "k_norm" not in rows[0]


def test_sort_and_limit(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = lines(run(capsys, path, "--by", "head", "--sort", "effective_rank", "--csv")[1])
    values = [float(t["effective_rank"]) for t in told if t["effective_rank"]]
    assert values == sorted(values, reverse=True)
    assert [t["effective_rank"] for t in told[-2:]] == ["", ""]  # of dead heads, which have none
    told = lines(run(capsys, path, "--by", "head", "--sort", "mean_norm", "--reverse", "--limit", "3", "--csv")[1])
    assert len(told) == 3
    assert float(told[0]["mean_norm"]) == min(h.mean_norm for h in kvsnap.statistics(path).heads if h.mean_norm)
    code, _, err = run(capsys, path, "--sort", "size")
    assert code == 2
    assert "no such column to sort by" in err
    assert "mean_norm" in err
    assert run(capsys, path, "--reverse")[0] == 2


def test_json_has_the_large_arrays_only_when_they_are_asked_for(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    def data(*words: str) -> dict[str, Any]:
        code, out, _ = run(capsys, path, "--json", *words)
        assert code == 0
        loaded = json.loads(out)
        assert isinstance(loaded, dict)
        return loaded

    plain, found = data(), kvsnap.statistics(path)
    assert plain["n_tokens"] == 80
    assert plain["heads"][0]["effective_rank"] == found.heads[0].effective_rank
    assert plain["similarity"][0]["values"][0][0] == pytest.approx(1)
    assert plain["findings"] == list(found.findings)
    assert not {"channels", "norms", "tokens"} & set(plain)
    assert len(data("--by", "row")["norms"][0]["by_row"]) == 80
    assert np.shape(data("--by", "channel")["channels"][0]["rms"]) == (3, 16)
    assert run(capsys, path, "--json", "--csv")[0] == 2


def test_samples_and_what_is_not_there(path: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, path, "--sample", "20", "--layer", "1", "--role", "k")
    assert code == 0
    assert "note: figures are of a sample: 20 of 80 rows" in err
    assert [line.split()[:2] for line in out.splitlines() if line.strip().startswith(("0 ", "1 "))] == [["1", "k"]]
    for words in (["--layer", "7"], ["--role", "latent"], ["--sample", "0"]):
        code, out, err = run(capsys, path, *words)
        assert (code, out) == (2, "")
    assert run(capsys, str(tmp_path / "gone.kvsnap"))[0] == 3
    data = bytearray(Path(path).read_bytes())
    at = data.index(kvsnap.load(path).layers[1].tensors[0].array.tobytes()[:64])
    data[at] ^= 1
    Path(path).write_bytes(data)
    code, out, err = run(capsys, path)
    assert (code, out) == (6, "")
    assert run(capsys, path, "--layer", "0")[0] == 0  # the damage is not read


def test_an_encrypted_file_and_a_session_of_a_library(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    key = tmp_path / "key"
    key.write_bytes(synthetic.KEY)
    key.chmod(0o600)
    file = str(Path(__file__).parent / "data" / "tiny_encrypted.kvsnap")
    assert run(capsys, file)[0] == 16
    code, out, _ = run(capsys, file, "--key-file", str(key), "--csv")
    assert code == 0
    plain = run(capsys, str(Path(file).with_name("tiny.kvsnap")), "--csv")[1]
    assert out == plain
    monkeypatch.setenv("KVSNAP_LIBRARY", str(tmp_path / "library"))
    with kvsnap.Library() as library, library.open("chat") as session:
        session.append(synthetic.tiny())
    assert run(capsys, "@chat", "--csv")[1] == plain

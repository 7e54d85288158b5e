"""`kvsnap attention`: a table for people, JSON for programs, arrays for numpy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import kvsnap  # noqa: E402 - after the extras are known to be there
from kvsnap.cli import run  # noqa: E402
from kvsnap.engines.models import load_model  # noqa: E402
from kvsnap.errors import InputError, MissingError, UnsupportedError  # noqa: E402
from tiny_models import PROMPT, save_tiny  # noqa: E402

pytestmark = pytest.mark.engine

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def kv(capsys: pytest.CaptureFixture[str], model: Path) -> Call:
    def call(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run(["attention", *map(str, args), "--model", str(model)])
        return (code, *capsys.readouterr())

    return call


def own(model: Path, **options: Any) -> kvsnap.AttentionSnapshot:
    loaded = load_model(str(model))
    return kvsnap.inspect_attention(kvsnap.connect(loaded.model, loaded.tokenizer), PROMPT, weights=True, **options)


def test_a_line_for_each_layer(kv: Call, model: Path) -> None:
    code, out, _ = kv(PROMPT)
    assert code == 0
    assert out.startswith("llama: 3 layers, 4 query heads on 2 key heads of 16, 28 tokens; figures of the last 28")
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    means = [np.mean([f.entropy for f in own(model).figures(layer)]) for layer in range(3)]
    assert [float(row[2]) for row in rows] == pytest.approx(means, abs=0.006)


def test_a_layer_shows_its_heads_and_a_head_what_the_last_token_looks_at(kv: Call, model: Path) -> None:
    code, out, _ = kv(PROMPT, "--layer", 1, "--head", 2)
    assert code == 0
    _, heads, looks = out.split("\nlayer 1")
    assert [line.split()[:2] for line in heads.splitlines() if line.strip()[:1].isdigit()] == [
        ["0", "0"], ["1", "0"], ["2", "1"], ["3", "1"],
    ]  # fmt: skip
    assert looks.startswith(", head 2: what row 27 looks at")
    first = next(line.split() for line in looks.splitlines() if line.strip()[:1].isdigit())
    weights = own(model).weights(1, 2)[-1]
    assert int(first[0]) == int(weights.argmax())
    assert first[-1] == f"{weights.max():.1%}"


def test_json_has_the_figures_and_on_request_the_weights(kv: Call, model: Path) -> None:
    code, out, _ = kv(PROMPT, "--json")
    data, found = json.loads(out), own(model)
    assert code == 0
    assert (data["num_layers"], data["num_heads"], data["num_query_heads"]) == (3, 2, 4)
    assert (data["seq_len"], data["head_dim"], data["architecture"]) == (28, 16, "llama")
    assert data["tokens"] == list(PROMPT.encode())
    told = [head for layer in data["layers"] for head in layer["heads"]]
    assert told == [figures.to_dict() for layer in range(3) for figures in found.figures(layer)]
    _, out, _ = kv(PROMPT, "--json", "--weights", "--layer", 2, "--head", 3, "--last", 4)
    layers = json.loads(out)["layers"]
    assert [layer["missing"] for layer in layers] == ["it was not asked for", "it was not asked for", None]
    (head,) = layers[2]["heads"]
    assert np.allclose(head["weights"], found.weights(2, 3)[-4:], atol=1e-6)


def test_an_npz_has_the_arrays(kv: Call, model: Path, tmp_path: Path) -> None:
    path, found = tmp_path / "look.npz", own(model, values=True)
    code, out, _ = kv(PROMPT, "--npz", path, "--weights", "--values", "--last", 0)
    assert code == 0
    assert out.splitlines()[-1].startswith(f"{path}: ")
    assert path.stat().st_mode & 0o777 == 0o600
    with np.load(path, allow_pickle=False) as held:
        assert str(held["architecture"]) == "llama"
        assert held["tokens"].tolist() == list(PROMPT.encode())
        for layer in found.layers:
            for name in ("keys", "queries", "values", "weights", "query_rows"):
                assert np.array_equal(held[f"layer.{layer.index}.{name}"], getattr(layer, name)), name
            assert held[f"layer.{layer.index}.scaling"] == layer.scaling
    before = path.read_bytes()
    code, _, err = kv(PROMPT, "--npz", path)
    assert (code, path.read_bytes()) == (InputError.exit_code, before)
    assert "--overwrite" in err
    code, _, _ = kv(PROMPT, "--npz", path, "--overwrite")
    assert code == 0
    with np.load(path) as held:
        assert "layer.0.weights" not in held
        assert "layer.0.keys" in held


def test_a_prompt_comes_from_a_file_or_as_ids(kv: Call, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    _, whole, _ = kv(PROMPT, "--json")
    assert kv("--prompt-file", tmp_path / "prompt.txt", "--json")[1] == whole
    assert kv("--prompt-ids", " ".join(map(str, PROMPT.encode())), "--json")[1] == whole


@pytest.mark.parametrize(
    ("args", "code", "told"),
    [
        ((), 2, "give a prompt: a text, --prompt-file or --prompt-ids"),
        (("",), InputError.exit_code, "the prompt is empty"),
        (("text", "--layer", "7"), InputError.exit_code, "no such layer; expected 0 to 2"),
        (("text", "--head", "1"), 2, "--head is one of a layer"),
        (("text", "--layer", "0", "--head", "9"), InputError.exit_code, "no such query head; expected 0 to 3"),
        (("text", "--last", "-1"), InputError.exit_code, "--last is too small"),
        (("text", "--weights"), 2, "--weights go into --npz or --json"),
        (("text", "--values"), 2, "--values go into --npz"),
        (("text", "--npz", "no/such/place.npz"), MissingError.exit_code, "no such directory"),
    ],
)
def test_bad_input_is_told_in_one_line(kv: Call, args: tuple[str, ...], code: int, told: str) -> None:
    found, out, err = kv(*args)
    assert (found, out) == (code, "")
    assert told in err
    assert err.count("\n") == 1


def test_a_model_that_shows_no_attention_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    from kvsnap.engines import _tf_probe

    def refused(_: Any) -> Any:
        raise UnsupportedError("bloom: layer 0 does not attend through transformers' attention functions")

    monkeypatch.setattr(_tf_probe, "places_of", refused)
    code = run(["attention", "text", "--npz", str(tmp_path / "a.npz"), "--model", str(model)])
    assert code == UnsupportedError.exit_code
    assert "bloom: layer 0" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_behind_a_saved_state_it_looks_at_that_too(kv: Call, model: Path, tmp_path: Path) -> None:
    loaded = load_model(str(model))
    engine = kvsnap.connect(loaded.model, loaded.tokenizer)
    engine.prefill(engine.tokenize(PROMPT[:14]))
    kvsnap.capture(engine).save(tmp_path / "s.kvsnap")
    wanted = kvsnap.inspect_attention(engine, PROMPT[14:], behind=True, weights=True, layers=[1])
    code, out, _ = kv(PROMPT[14:], "--after", tmp_path / "s.kvsnap", "--layer", 1, "--weights", "--json")
    assert code == 0
    told = json.loads(out)
    assert told["seq_len"] == len(PROMPT)
    assert np.array_equal(told["layers"][1]["heads"][2]["weights"], wanted.weights(1, 2).tolist())
    code, _, err = kv(PROMPT, "--after", tmp_path / "none.kvsnap")
    assert code == MissingError.exit_code
    assert "none.kvsnap" in err

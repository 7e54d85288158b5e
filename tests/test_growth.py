"""Growth: the arithmetic, real configurations with published sizes, files against their own tensors."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsnap
from kvsnap.cli import run
from kvsnap.errors import FormatError, InputError, MissingError, UnsupportedError
from kvsnap.formats.native import NativeFile
from kvsnap.formats.native.told import state_parts
from kvsnap.inspection.growth.answers import Growth
from kvsnap.inspection.growth.growing import compared, layers_of
from kvsnap.layout import Tensor
from kvsnap.records import align64
from kvsnap.session import Session
from synthetic import snapshot, snapshot_of_kinds

DATA = Path(__file__).parent / "data"
CONFIGS = DATA / "configs"
LONG = 131072

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def kv(capsys: pytest.CaptureFixture[str]) -> Call:
    def call(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run(["growth", *map(str, args)])
        return (code, *capsys.readouterr())

    return call


def of(name: str, **options: Any) -> Growth:
    return kvsnap.growth(CONFIGS / f"{name}.json", **options)


# -- real models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "first", "later"),
    [
        # KV cache per token in BF16, DeepSeek-AI, "Insights into DeepSeek-V3", 2025, table 1, in KB of 1,000 bytes.
        ("DeepSeek-V3", 70_272, 70_272), ("Qwen2.5-72B", 327_680, 327_680), ("Llama-3.1-405B", 516_096, 516_096),
        # 32 layers x 8 heads x 128 x (k, v) x 2 bytes, and so on.
        ("Llama-3.1-8B", 131_072, 131_072), ("Llama-2-7b", 524_288, 524_288), ("Mistral-7B-v0.1", 131_072, 0),
        ("gemma-3-27b", 62 * 8192, 10 * 8192), ("gpt-oss-20b", 24 * 2048, 12 * 2048),
        ("Qwen3-Next-80B-A3B", 12 * 2048, 12 * 2048), ("Jamba-v0.1", 4 * 4096, 4 * 4096), ("mamba-2.8b", 0, 0),
        ("SmolLM2-135M", 23_040, 23_040),
    ],
)  # fmt: skip
def test_bytes_per_token_of_real_models(name: str, first: int, later: int) -> None:
    made = of(name)
    assert (made.at(0).bytes_per_token, made.at(LONG).bytes_per_token) == (first, later)
    assert made.at(1001).cache_bytes - made.at(1000).cache_bytes in (first, later)
    assert not [check for check in made.checked if not check.ok]


@pytest.mark.parametrize(("name", "gib"), [("Llama-2-7b", 128), ("Mistral-7B-v0.1", 32), ("Jamba-v0.1", 4)])
def test_a_published_table_of_256k_tokens(name: str, gib: int) -> None:
    """Lieber and others, "Jamba", 2024, table 1: KV cache of 256K tokens at 16 bits, where every row is kept."""
    point = of(name).at(256 * 1024)
    states = point.by_kind.get("state", 0)
    assert point.kept_bytes - states == gib << 30


def test_a_window_stops_and_a_session_goes_on() -> None:
    made = of("Mistral-7B-v0.1")
    assert made.at(4094).cache_bytes == 4094 * 131_072
    assert made.at(4095).cache_bytes == made.at(10**9).cache_bytes == 4095 * 131_072
    assert made.at(LONG).kept_bytes == LONG * 131_072
    assert (made.fits(24 * 10**9), made.fits(24 * 10**9, kept=True)) == (None, 183_105)
    assert made.fits(10) == 0


def test_states_have_their_size_from_the_first_token() -> None:
    made = of("Qwen3-Next-80B-A3B")
    state = 36 * (32 * 128 * 128 * 4 + 8192 * 4 * 2)
    assert made.at(0).cache_bytes == 0
    assert made.at(1).by_kind == {"state": state, "full": 12 * 2048}
    assert made.at(LONG).cache_bytes == state + LONG * 12 * 2048
    assert made.fits(state - 1) == 0


@pytest.mark.parametrize("name", [path.stem for path in sorted(CONFIGS.glob("*.json"))])
@pytest.mark.parametrize("budget", [10**6, 3 * 10**9, 10**12])
def test_what_fits_is_the_longest_that_does(name: str, budget: int) -> None:
    made = of(name)
    for kept in (False, True):
        found = made.fits(budget, kept=kept)
        if found is None:
            continue
        size = [made.at(n).kept_bytes if kept else made.at(n).cache_bytes for n in (found, found + 1)]
        assert size[0] <= budget < size[1]


def test_a_dtype_may_be_chosen() -> None:
    assert of("SmolLM2-135M", dtype="float32").at(0).bytes_per_token == 46_080
    assert of("Llama-3.1-8B", dtype="float8_e4m3fn").at(0).bytes_per_token == 65_536
    with pytest.raises(UnsupportedError, match="dtype"):
        of("Llama-3.1-8B", dtype="int4")


def test_compressed_rows_and_what_waits_for_them() -> None:
    made = kvsnap.growth(
        {"model_type": "deepseek_v4", "num_hidden_layers": 2, "compress_ratios": [128, 4], "dtype": "bfloat16"}
    )
    long, short = made.layers
    assert (long.what, short.what) == ("window 128 + one row for 128", "window 128 + one row for 4 + index")
    compressed = next(t for t in long.tensors if t.role == "compressed")
    assert [compressed.rows(n) for n in (127, 128, 300)] == [0, 1, 2]
    buffer = next(t for t in long.tensors if t.role == "buffer")
    assert [buffer.rows(n) for n in (127, 128, 300)] == [127, 0, 44]
    overlap = next(t for t in short.tensors if t.role == "overlap")
    assert [overlap.rows(n) for n in (3, 4, 300)] == [0, 4, 4]
    budget = made.at(5000).cache_bytes
    fitting = made.fits(budget)
    assert fitting is not None
    assert all(made.nbytes(n) <= budget for n in range(fitting + 1))


# -- configurations --------------------------------------------------------------------------------------------------


def test_where_a_configuration_is_found(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((CONFIGS / "gemma-3-27b.json").read_bytes())
    wanted = of("gemma-3-27b").points
    assert kvsnap.growth(tmp_path).points == kvsnap.growth(tmp_path / "config.json").points == wanted
    with pytest.raises(MissingError):
        kvsnap.growth(tmp_path / "none.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingError, match="no such configuration"):
        kvsnap.growth(tmp_path / "empty")
    for text, message in (("{", "no JSON"), ("[1]", "an object")):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(FormatError, match=message):
            kvsnap.growth(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": "many"}, "num_hidden_layers is no number"),
        ({"num_hidden_layers": 10**7}, "no such number of layers"),
        ({"num_hidden_layers": 0}, "no such number of layers"),
        ({"num_key_value_heads": -1}, "num_key_value_heads is no number"),
        ({"num_key_value_heads": True}, "num_key_value_heads is no number"),
        ({"head_dim": 1.5}, "head_dim is no number"),
        ({"num_attention_heads": 0}, "without query heads"),
        ({"layer_types": ["full_attention"]}, "does not fit the number of layers"),
        ({"layer_types": "full_attention"}, "no list"),
        ({"layer_types": ["sliding_attention"] * 32, "sliding_window": 1}, "a window that holds nothing"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    config = json.loads((CONFIGS / "Llama-3.1-8B.json").read_text())
    with pytest.raises(InputError, match=message):
        kvsnap.growth({**config, **changes})


def test_a_type_of_layer_that_is_not_known_is_named() -> None:
    config = json.loads((CONFIGS / "Llama-3.1-8B.json").read_text())
    with pytest.raises(UnsupportedError, match=r"layer 1 is of a type.*found odd_attention"):
        kvsnap.growth({**config, "layer_types": ["full_attention", "odd_attention"] * 16})


def test_the_last_layer_of_a_pattern_in_letters_is_full() -> None:
    made = kvsnap.growth({"model_type": "exaone4", "num_hidden_layers": 6, "sliding_window_pattern": "LLLG"})
    assert [layer.what[:4] for layer in made.layers] == ["wind", "wind", "wind", "full", "wind", "full"]


def test_cross_attention_needs_the_length_of_the_encoder() -> None:
    config = {"model_type": "t5", "dtype": "float32", "num_layers": 2}
    bare = kvsnap.growth(config)
    assert "no length of it is given" in bare.notes[0]
    made = kvsnap.growth(config, encoder_rows=100)
    assert made.at(0).cache_bytes == made.at(10).by_kind["cross"] == 2 * 2 * 100 * 512 * 4
    assert kvsnap.growth({"model_type": "whisper", "dtype": "float32"}).encoder_rows == 1500


# -- files and snapshots ---------------------------------------------------------------------------------------------

KINDS = ("grow", "window8", "grow4", "recurrent", "grow+recurrent", "static")


@pytest.mark.parametrize("n_tokens", [1, 3, 7, 8, 9, 21])
def test_a_capture_is_as_its_own_rule_says(n_tokens: int) -> None:
    made = snapshot_of_kinds(range(n_tokens), KINDS)
    found = kvsnap.growth(made)
    assert [check.ok for check in found.checked] == [True]
    wanted = sum(tensor.nbytes for tensor in made.tensors())
    assert found.at(n_tokens).cache_bytes == wanted == found.checked[0].actual
    assert found.checked[0].off == 0


def _shorter(tensor: Tensor) -> Tensor:
    return tensor.rows(tensor.start, tensor.start + tensor.n_rows - 1)


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_missing_row_is_noticed(kind: int) -> None:
    made = snapshot_of_kinds(range(21), KINDS)
    rules = layers_of(made.layers)
    layer = made.layers[kind]
    bad = replace(layer, tensors=(_shorter(layer.tensors[0]), *layer.tensors[1:]))
    layers = (*made.layers[:kind], bad, *made.layers[kind + 1 :])
    found = compared("a capture", rules, layers, 21)
    assert not found.ok
    assert found.off == -layer.tensors[0].spec.nbytes(1)
    assert found.faults == (f"layer {kind}: k: expected {_rows(kind)} rows, found {layer.tensors[0].n_rows - 1}",)


def _rows(kind: int) -> str:
    return ("21", "7 to 21", "5")[kind]


def test_a_window_that_kept_more_is_as_told() -> None:
    made = snapshot_of_kinds(range(21), ("window8",))
    whole = snapshot(range(21), layers=1, dim=3).layers[0].tensors
    more = tuple(
        Tensor(t.spec, np.zeros(t.spec.shape_with(15), np.float32), start=6) for t in made.layers[0].tensors
    )  # fmt: skip
    assert len(whole) == len(more)
    found = compared("a session", layers_of(made.layers), [replace(made.layers[0], tensors=more)], 21)
    assert found.ok
    assert found.predicted < found.actual < found.most
    assert found.off == 0


@pytest.mark.parametrize("codec", ["exact", "q8"])
def test_what_is_stored_grows_as_told(codec: str, tmp_path: Path) -> None:
    """The file is longer than what is told by the same number of bytes at every length."""
    over = set()
    for n_tokens in (5, 64, 300):
        made = snapshot_of_kinds(range(n_tokens), ("grow", "window8", "grow4", "recurrent"))
        path = tmp_path / f"{n_tokens}.kvsnap"
        made.save(path, codec=codec)
        told = kvsnap.growth(path).at(n_tokens).stored[codec]
        table = align64(64 + align64(4 * n_tokens) + 32) - align64(4 * n_tokens)  # ids are rounded up with the table
        over.add(path.stat().st_size - told - table)
    assert max(over) - min(over) <= 128  # counts in JSON have as many digits as they have
    assert 0 < min(over) < 8192


def test_a_session_tells_how_it_grew(tmp_path: Path) -> None:
    path = tmp_path / "chat.kvsnap"
    with Session.open(path) as session:
        for stop in (3, 9, 20):
            session.append(snapshot(range(stop), start=session.n_rows))
    made = kvsnap.growth(path)
    assert [(turn.n_tokens, turn.operation) for turn in made.history[-3:]] == [
        (3, "append"), (9, "append"), (20, "append"),
    ]  # fmt: skip
    assert made.history[-1].file_bytes == path.stat().st_size
    assert all(check.ok for check in made.checked)


def test_a_partial_capture_is_not_checked() -> None:
    made = kvsnap.growth(snapshot(range(9), start=4))
    assert made.checked == ()
    assert made.notes[0].startswith("a partial capture: rows before 4")
    with pytest.raises(InputError, match="partial capture"):
        kvsnap.growth({"model_type": "llama"}, check=snapshot(range(9), start=4))


def test_what_is_no_source() -> None:
    with pytest.raises(InputError, match="no cache"):
        kvsnap.growth(7)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="cannot be chosen"):
        kvsnap.growth(snapshot(range(3)), dtype="float16")
    with pytest.raises(InputError, match="no length"):
        kvsnap.growth(snapshot(range(3)), lengths=[-1])


def test_golden_files_are_as_their_own_rules_say() -> None:
    for path in sorted(DATA.glob("tiny*.kvsnap")):
        if "encrypted" not in path.name:
            assert [check.ok for check in kvsnap.growth(path).checked] == [True], path.name
    key = bytes(range(32))
    pytest.importorskip("cryptography")
    assert kvsnap.growth(DATA / "tiny_encrypted.kvsnap", key=key).checked[0].ok


def test_data_frames_and_json() -> None:
    made = of("gemma-3-27b", lengths=(1000, LONG))
    lengths, layers = made.tables()
    assert [row["n_tokens"] for row in lengths.to_dicts()] == [1000, LONG]
    assert [row["layers"] for row in layers.to_dicts()] == [52, 10]
    assert sum(int(row["bytes"]) for row in layers.to_dicts()) == made.at(LONG).cache_bytes
    assert json.loads(json.dumps(made.to_dict()))["points"][1]["cache_bytes"] == made.at(LONG).cache_bytes
    pytest.importorskip("pandas")
    assert list(made.to_pandas()["n_tokens"]) == [1000, LONG]


# -- the command -----------------------------------------------------------------------------------------------------


def test_one_source(kv: Call) -> None:
    code, out, _ = kv(CONFIGS / "gemma-3-27b.json", "--kinds", "--budget", "24GB")
    assert code == 0
    assert "507,904 B per token at first, 81,920 B later" in out
    assert " 131,072    11.2 GB    66.6 GB" in out
    assert "24.0 GB holds 287,649 tokens (47,253 tokens in a session that keeps every row)" in out
    assert "by kind: window 435.8 MB, full 10.7 GB" in out


def test_sources_side_by_side(kv: Call) -> None:
    names = ("Llama-3.1-8B", "DeepSeek-V3", "gpt-oss-20b")
    code, out, err = kv(*(CONFIGS / f"{name}.json" for name in names), "--at", "1000,128k")
    assert code == 0
    rows = [line.split() for line in out.splitlines() if line.strip().startswith(names)]
    assert [row[3:5] for row in rows] == [["131,072", "131,072"], ["70,272", "70,272"], ["49,152", "24,576"]]
    assert "latent rows as transformers 5.24 keeps them" in err


def test_json_and_csv(kv: Call) -> None:
    path = CONFIGS / "gpt-oss-20b.json"
    code, out, _ = kv(path, "--json", "--at", "1k", "--budget", "1GiB")
    data = json.loads(out)
    assert code == 0
    assert data["budget"] == 1 << 30
    (source,) = data["sources"]
    assert source["points"][0]["n_tokens"] == 1024
    assert source["fits"]["cache"] == of("gpt-oss-20b").fits(1 << 30)
    assert [len(group["layers"]) for group in source["layers"]] == [12, 12]
    code, out, _ = kv(path, "--csv", "--at", "10,20")
    table = list(csv.DictReader(io.StringIO(out)))
    assert [row["n_tokens"] for row in table] == ["10", "20"]
    assert int(table[1]["cache_bytes"]) == 20 * 49_152


def test_a_session_turn_by_turn(kv: Call) -> None:
    path = DATA / "tiny_session.kvsnap"
    code, out, _ = kv(path, "--turns", "--csv")
    assert code == 0
    turns = list(csv.DictReader(io.StringIO(out)))
    history = kvsnap.Session.open(path, readonly=True, create=False).history
    assert [(int(t["commit"]), t["operation"], int(t["n_tokens"])) for t in turns] == [
        (h.commit, h.operation, h.n_tokens) for h in history
    ]  # fmt: skip
    assert int(turns[-1]["file_bytes"]) == path.stat().st_size
    code, out, _ = kv(path, "--turns")
    assert code == 0
    assert "truncate" in out
    assert "checked against its own tensors" in out


def test_what_is_wrong_is_said(kv: Call, tmp_path: Path) -> None:
    assert kv()[0] == 2
    for option, text in (("--at", "long"), ("--budget", "much"), ("--encoder", "-1")):
        code, _, err = kv(CONFIGS / "Llama-3.1-8B.json", option, text)
        assert code == 2
        assert option in err
    code, _, err = kv(tmp_path / "none")
    assert code == 3
    assert "--model" in err
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert kv(tmp_path / "x.gguf")[0] == 2
    (tmp_path / "config.json").write_text('{"model_type": "rwkv"}')
    code, _, err = kv(tmp_path)
    assert code == 12
    assert "rwkv keeps its state in a list of its own" in err


def test_numbers_that_the_family_gives_are_named() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    told = kvsnap.growth({"model_type": "gemma3", "text_config": text, "dtype": "bfloat16"}).notes
    named = "num_attention_heads 8, num_key_value_heads 4, head_dim 256"
    assert told == (f"left out, so that of a gemma3_text configuration without settings: {named}",)
    assert "hidden_size 4,096" in kvsnap.growth({"model_type": "llama", "dtype": "bfloat16"}).notes[0]
    whole = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    assert kvsnap.growth({**whole, "dtype": "bfloat16"}).notes == ()


def test_heads_that_transformers_repeats_are_told() -> None:
    config = {"model_type": "falcon", "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128,
              "num_kv_heads": 8, "new_decoder_architecture": True, "dtype": "bfloat16"}  # fmt: skip
    made = kvsnap.growth(config, lengths=[1])
    assert made.points[0].cache_bytes == 2 * 60 * 128 * 64 * 2
    assert "each query head" in made.notes[0]
    assert kvsnap.growth({**config, "new_decoder_architecture": False}).notes == ()


def test_what_is_told_as_stored_is_what_a_file_holds(tmp_path: Path) -> None:
    made = snapshot_of_kinds(range(1, 101), ["grow", "grow4", "recurrent"])
    for codec in ("exact", "q8"):
        path = tmp_path / f"{codec}.kvsnap"
        kvsnap.save(replace(made, logits=None), path, codec=codec)
        with closing(NativeFile.open(path)) as file:
            parts = [*next(iter(file.spans())).table.parts, *state_parts(file)]
        assert len(parts) == sum(len(layer.tensors) for layer in made.layers)
        held = sum(64 + align64(part.stored) for part in parts) + align64(4 * 100)
        assert kvsnap.growth(path).at(100).stored[codec] == held


def test_the_next_token_adds_what_a_window_still_takes_in() -> None:
    made = kvsnap.growth(snapshot_of_kinds(range(1, 41), ["window8", "grow4"]))
    window, rows = (sum(t.row_bytes for t in layer.tensors) for layer in made.layers)
    for n in (0, 6, 7, 8, 100):  # a window of 8 keeps 7 rows between two passes
        point = made.at(n)
        assert point.bytes_per_token == rows / 4 + (window if n < 7 else 0)
        assert point.kept_per_token == rows / 4 + window
        assert point.cache_bytes == rows * (n // 4) + window * min(n, 7)
        assert point.kept_bytes == rows * (n // 4) + window * n


def test_a_budget_that_is_met_exactly_fits() -> None:
    grows = kvsnap.growth(snapshot_of_kinds(range(1, 41), ["grow"]))
    assert grows.fits(grows.nbytes(100)) == 100
    assert grows.fits(grows.nbytes(100) - 1) == 99
    state = kvsnap.growth(snapshot_of_kinds(range(1, 41), ["recurrent"]))
    assert state.fits(state.nbytes(1)) is None
    assert state.fits(state.nbytes(1) - 1) == 0


def test_what_waits_for_its_row_is_one_less_than_a_group() -> None:
    layers = kvsnap.growth({"model_type": "deepseek_v4"}).layers
    waits = next(t for layer in layers for t in layer.tensors if (t.role, t.group) == ("buffer", 4))
    assert [waits.rows(n) for n in (3, 4, 7, 8)] == [3, 0, 3, 0]
    assert [waits.most_rows(n) for n in (0, 2, 3, 4, 100)] == [0, 2, 3, 3, 3]

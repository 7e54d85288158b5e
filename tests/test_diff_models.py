"""diff of what real models hold: encodings, codes, latent and compressed rows, states, variants; and the command."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import kvsnap  # noqa: E402 - after the extras are known to be there
from compressed_models import compressed_model  # noqa: E402
from family_models import FAMILIES, build, known  # noqa: E402
from kvsnap import diff  # noqa: E402
from kvsnap.cli import run  # noqa: E402
from kvsnap.engines.transformers import TransformersEngine  # noqa: E402
from kvsnap.errors import ExtraMissingError, InputError, UnsupportedError  # noqa: E402
from kvsnap.layout import Snapshot  # noqa: E402
from latent_models import KNOWN, latent_model  # noqa: E402
from tiny_models import save_tiny, tiny_llama  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.newest, pytest.mark.usefixtures("one_thread")]

IDS = [5, 17, 42, 99, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 20, 30, 40, 50, 60, 70]


def captured(model: object, ids: list[int] | None = None, **options: object) -> Snapshot:
    engine = TransformersEngine(model, **options)
    engine.prefill(ids or IDS)
    return kvsnap.capture(engine)


def test_a_quantised_file_of_a_model(tmp_path: Path) -> None:
    snapshot = captured(tiny_llama(1))
    snapshot.save(tmp_path / "a.kvsnap")
    snapshot.save(tmp_path / "b.kvsnap", codec="q8")
    found = diff(tmp_path / "a.kvsnap", tmp_path / "b.kvsnap")
    assert found.verdict == "bound"
    assert found.same_model is True
    assert [(h.layer, h.role, h.head) for h in found.heads] == [
        (i, r, h) for i in range(3) for r in "kv" for h in (0, 1)
    ]
    small = kvsnap.load(tmp_path / "b.kvsnap")
    for head in found.heads:
        one, other = (s.head(head.layer, head.head) for s in (snapshot, small))
        assert one is not None
        assert other is not None
        a, b = (np.float64(getattr(x, head.role)) for x in (one, other))
        assert head.relative_error == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a))
        assert head.max_abs == np.abs(a - b).max()
        assert 0 < head.relative_error < 0.02


def test_two_runs_are_the_same_bits_and_other_prompts_are_not() -> None:
    model = tiny_llama(1)
    a, b = captured(model), captured(model)
    assert diff(a, b).identical
    other = captured(model, [*IDS[:10], 200, *IDS[11:]])
    found = diff(a, other)
    assert (found.verdict, found.tokens.n_rows) == ("tokens", 10)
    assert sum(h.n_different for h in found.heads) == 0  # causal: rows before it do not know
    behind = diff(a, other, all_rows=True)
    assert all(h.first_row == 10 for h in behind.heads)
    assert all(len(p.rows) == len(IDS) and p.relative_error[10:].min() > 0 for p in behind.positions)


def test_dtypes_of_one_model_differ_by_rounding() -> None:
    a, b = captured(tiny_llama(1)), captured(tiny_llama(1, "bfloat16"))
    found = diff(a, b)
    assert found.verdict == "values"
    assert found.layers[0].dtype == "float32 / bfloat16"
    assert all(0 < layer.relative_error < 0.2 for layer in found.layers if layer.relative_error is not None)
    assert found.same_model is False  # weights are digested as loaded


@pytest.mark.newest
@pytest.mark.parametrize("backend", ["hqq", "quanto", "fp8"])
def test_codes_are_compared_with_unquantised_rows(backend: str) -> None:
    options = {"backend": backend}
    if backend != "fp8":
        options |= {"nbits": 4, "q_group_size": 8, "residual_length": 4, "axis_key": int(backend == "hqq"),
                    "axis_value": int(backend == "hqq")}  # fmt: skip
    try:
        codes = captured(tiny_llama(1), cache="quantised", cache_options=options)
    except (ExtraMissingError, UnsupportedError) as error:
        pytest.skip(str(error))
    plain = captured(tiny_llama(1))
    found = diff(plain, codes)
    # Codes of the first layer are of the very keys that the plain cache holds.
    first = [x for x in found.layers if x.layer == 0]
    assert [(x.role, x.n_rows) for x in first] == [("k", len(IDS)), ("v", len(IDS))]
    assert all(0 < (x.relative_error or 0) < 0.2 for x in first)
    for x in first:
        b = np.stack([getattr(codes.head(0, h), x.role) for h in range(2)]).astype(np.float64)
        a = np.stack([getattr(plain.head(0, h), x.role) for h in range(2)]).astype(np.float64)
        assert x.relative_error == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a))
    assert any(o.name.startswith("quantisation of layers") for o in found.others)
    assert diff(codes, codes).identical
    assert {g.kind for g in found.growth} == {"full", "codes"}
    assert found.bytes_at(10_000)[1] < found.bytes_at(10_000)[0]


@pytest.mark.parametrize("name", [n for n in ("deepseek_v3", "deepseek_v32") if n in KNOWN])
def test_latent_rows(name: str, tmp_path: Path) -> None:
    snapshot = captured(latent_model(name))
    snapshot.save(tmp_path / "a.kvsnap")
    snapshot.save(tmp_path / "b.kvsnap", codec="q8")
    assert diff(snapshot, tmp_path / "a.kvsnap").identical
    found = diff(tmp_path / "a.kvsnap", tmp_path / "b.kvsnap")
    assert found.verdict == "bound"
    assert {h.role for h in found.heads} == {t.role for t in snapshot.tensors()}


@pytest.mark.newest
def test_compressed_rows_and_their_buffers(tmp_path: Path) -> None:
    model = compressed_model("v4")
    snapshot = captured(model)
    snapshot.save(tmp_path / "a.kvsnap")
    assert diff(tmp_path / "a.kvsnap", snapshot).identical
    longer = captured(model, [*IDS, 80, 90, 100])
    found = diff(snapshot, longer)
    assert found.tokens.relation == "b begins with a"
    assert {p.tokens_per_row for p in found.positions} > {1}
    assert "buffer" not in {h.role for h in found.heads}  # of another length now
    assert any(n.what.startswith("buffer") for n in found.not_compared)


@pytest.mark.parametrize("name", [n for n in ("jamba", "mamba2", "gemma3_text", "qwen3_next") if n in FAMILIES])
def test_states_and_windows(name: str) -> None:
    if not known(FAMILIES[name]):
        pytest.skip(f"this release does not have {name}")
    model = build(name)
    a = captured(model)
    assert diff(a, captured(model)).identical
    other = captured(model, [*IDS[:-1], 200])
    states = {t.role for t in a.tensors() if not t.spec.grows}
    found = diff(a, other)
    assert not states & {h.role for h in found.heads}
    assert states <= {h.role for h in diff(a, other, all_rows=True).heads}


def test_two_variants_with_other_heads() -> None:
    a, b = captured(tiny_llama(1)), captured(tiny_llama(1, num_key_value_heads=4, num_hidden_layers=5))
    found = diff(a, b)
    assert (found.verdict, found.same_model) == ("geometry", False)
    assert found.a.bytes_per_token == 3 * 2 * 2 * 16 * 4
    assert found.b.bytes_per_token == 5 * 2 * 4 * 16 * 4
    assert found.bytes_at(100_000) == (100_000 * found.a.bytes_per_token, 100_000 * found.b.bytes_per_token)
    assert [s.cka.shape for s in found.similarity] == [(3, 5)] * 2
    assert "config" in {f.name.partition(".")[0] for f in found.identity if f.verdict == "differ"}
    seeds = diff(a, captured(tiny_llama(2)))
    assert seeds.verdict == "values"
    assert len(seeds.similarity) == 2
    assert all(layer.cka is not None and (layer.relative_error or 0) > 0.5 for layer in seeds.layers)


def test_formats_of_one_cache(tmp_path: Path) -> None:
    snapshot = captured(tiny_llama(1))
    for name in ("safetensors", "mlxkv"):
        path = tmp_path / f"a.{name}"
        snapshot.save(path, format=name, **({"codec": "native"} if name == "mlxkv" else {}))
        found = diff(snapshot, path)
        assert sum(h.n_different for h in found.heads) == 0, name
        assert len(found.heads) == 12, name
        assert found.verdict in ("identical", "besides"), (name, found.says)
        assert found.tokens.relation == "same"


# -- the command -----------------------------------------------------------------------------------------------------

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("diff")
    directory = save_tiny(folder / "tiny", seed=1)
    snapshot = captured(tiny_llama(1))
    other = captured(tiny_llama(1), [*IDS[:10], 200, *IDS[11:]])
    found = {name: folder / f"{name}.kvsnap" for name in ("exact", "small", "other", "session")}
    snapshot.save(found["exact"])
    snapshot.save(found["small"], codec="q8")
    other.save(found["other"])
    with kvsnap.Session.open(found["session"]) as session:
        session.append(captured(tiny_llama(1), IDS[:8]))
        session.append(snapshot, after=0)
    return {**found, "model": directory}


@pytest.fixture
def kv(capsys: pytest.CaptureFixture[str], files: dict[str, Path]) -> Call:
    def call(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run(["diff", *(str(files.get(str(a), a)) for a in args)])
        return (code, *capsys.readouterr())

    return call


def test_the_exit_code_is_the_answer(kv: Call) -> None:
    assert kv("exact", "exact")[0] == 0
    assert kv("exact", "small")[0] == 1
    assert kv("exact", "small", "--require", "cache")[0] == 1
    assert kv("exact", "small", "--require", "bound")[0] == 0
    assert kv("exact", "other", "--require", "bound")[0] == 1
    assert kv("exact", "small", "-q") == (1, "", "")
    assert kv("exact", "exact", "-q") == (0, "", "")
    assert kv("exact", "gone.kvsnap")[0] == 3
    assert kv("exact", "small", "--layer", "9")[0] == InputError.exit_code
    assert kv("exact")[0] == 2
    assert kv("exact", "small", "--csv", "--json")[0] == 2


def test_people_are_told_what_differs(kv: Call) -> None:
    code, out, err = kv("exact", "small")
    assert (code, err) == (1, "")
    assert "all values within the stored bound of each other" in out
    assert len([line for line in out.splitlines() if " attention " in line]) == 6
    assert "b is " in out
    assert " times smaller on disk" in out
    code, out, _ = kv("exact", "exact")
    assert (code, "the same bits, and the same in all else" in out, "by layer" in out) == (0, True, False)
    code, out, _ = kv("exact", "small", "--by", "head", "--limit", 3)
    assert "9 more (--limit 0)" in out
    code, out, _ = kv("exact", "other", "--model", "model")
    assert "token 10 differs (9 in a, 200 in b)" in out
    assert "a goes on: '\\t" in out
    assert "not compared" in out
    code, out, _ = kv("session", "--commit-a", 2)
    assert "a begins with b" not in out
    assert "b begins with a: 8 tokens are the same" in out
    assert "smaller on disk" not in out  # of other tokens that says nothing


def test_a_session_of_the_library_goes_by_its_name(kv: Call, files: dict[str, Path], tmp_path: Path) -> None:
    with kvsnap.Library(tmp_path / "sessions") as library:
        library.add(files["session"], "story")
    code, out, _ = kv("@story", "small", "--library", tmp_path / "sessions")
    assert code == 1
    assert " a   @story " in out
    assert str(tmp_path) not in out
    data = json.loads(kv("@story", "small", "--library", tmp_path / "sessions", "--json")[1])
    assert Path(data["a"]["path"]).is_file()


def test_nothing_in_common_is_told_so(kv: Call, tmp_path: Path) -> None:
    captured(tiny_llama(1), [7, 8]).save(tmp_path / "a.kvsnap")
    captured(tiny_llama(1), [8, 8]).save(tmp_path / "b.kvsnap")
    captured(tiny_llama(1), [7, 9]).save(tmp_path / "c.kvsnap")
    out = kv(tmp_path / "a.kvsnap", tmp_path / "b.kvsnap")[1]
    assert "no token from the start is the same: the first one differs (7 in a, 8 in b)" in out
    out = kv(tmp_path / "a.kvsnap", tmp_path / "c.kvsnap")[1]
    assert "the first token is the same; token 1 differs (8 in a, 9 in b)" in out


def test_json_and_csv_have_the_figures(kv: Call, files: dict[str, Path]) -> None:
    expected = diff(files["exact"], files["small"])
    code, out, _ = kv("exact", "small", "--json")
    data = json.loads(out)
    assert (code, data["exit_code"], data["verdict"], data["identical"]) == (1, 1, "bound", False)
    assert [h["relative_error"] for h in data["heads"]] == [h.relative_error for h in expected.heads]
    assert "positions" not in data
    assert "positions" in json.loads(kv("exact", "small", "--json", "--by", "position")[1])
    assert json.loads(kv("exact", "exact", "--json")[1])["exit_code"] == 0
    _, out, _ = kv("exact", "small", "--csv", "--by", "head")
    rows = list(csv.DictReader(out.splitlines()))
    assert [float(r["max_abs"]) for r in rows] == [h.max_abs for h in expected.heads]
    _, out, _ = kv("exact", "small", "--csv", "--by", "position")
    assert len(out.splitlines()) == 1 + 2 * len(IDS)


def test_encrypted_files_are_compared(kv: Call, files: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    key = tmp_path / "key"
    key.write_text("11" * 32)
    key.chmod(0o600)
    kvsnap.save(kvsnap.load(files["exact"]), tmp_path / "locked.kvsnap", key=bytes.fromhex("11" * 32))
    locked = tmp_path / "locked.kvsnap"
    assert kv(locked, locked, "--key-file", key)[0] == 0
    assert kv("exact", locked, "--key-file", key, "-q")[0] == 0
    assert kv("exact", locked)[0] == 16
    assert kv("exact", "exact", "--key-file", key)[0] == InputError.exit_code

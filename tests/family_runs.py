"""Runs of every family: saved, resumed in a new process, and compared with the run that was never interrupted.

As a script, `family_runs.py DIRECTORY` is that new process: it resumes all that `begin_all` has written there.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
import transformers

import kvsnap
from family_models import FAMILIES, attentions, build, known
from kvsnap.engines.transformers import TransformersEngine
from kvsnap.errors import KvsnapError, UnsupportedError
from kvsnap.layout import Snapshot
from tiny_models import PROMPT

__all__ = [
    "AFTER",
    "FEW",
    "POINTS",
    "Case",
    "Course",
    "Point",
    "Result",
    "begun_engine",
    "bits",
    "cases_of",
    "engine_of",
    "go_on",
    "points_of",
    "run_all",
    "start",
]

ROOT = Path(__file__).resolve().parent.parent
AFTER = 16
IDS = list((PROMPT * 4).encode())


ERRORS = (
    KvsnapError, ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""What may go wrong with one family and must not hide the others; it is told in the result."""


class Point(NamedTuple):
    """Where a run is saved: after so many ids of prompt and steps; settled, its pending token is evaluated first."""

    prompt: int
    steps: int
    settled: bool = False


POINTS = {
    "one row": Point(1, 0),
    "1": Point(1, 3),
    "5": Point(5, 3),
    "8": Point(8, 3),
    "9": Point(9, 3),
    "40": Point(40, 3),
    "40 settled": Point(40, 3, settled=True),
    "decoding": Point(5, 14),
}
"""The lengths, with a window of eight: one row, below it, at it, one beyond, far beyond, and grown into it."""

FEW = ("5", "40")
"""Those of other attentions and dtypes than the first: the kinds of layers and the lengths are the same."""

TURNS = (Point(5, 3), Point(7, 2), Point(1, 1), Point(20, 3))
"""The turns of a session, each written when it has ended."""

LATER_RUNS = ("session", "a turn later")
LATER = Point(12, 8)
"""One turn more, in the new process: ids evaluated together behind what was restored."""


class Case(NamedTuple):
    family: str
    attention: str
    dtype: str

    @property
    def name(self) -> str:
        return "-".join(self)


class Course(NamedTuple):
    """What a run did: the ids, the logits each was chosen from, as raw bits, and the ids given in each pass."""

    ids: list[int]
    logits: np.ndarray[Any, Any]
    passes: list[int]


class Result(NamedTuple):
    """One case: why it is refused; or what went wrong, the runs by point, the layers and what is kept of them."""

    refused: str
    error: str
    courses: dict[str, tuple[Course, Course]]
    classes: tuple[str, ...]
    kept: tuple[str, ...]


def points_of(case: Case) -> dict[str, Point]:
    """Return the points at which a case is saved: all; with another attention or dtype than the first, two of them."""
    few = case.attention != attentions(case.family)[0] or case.dtype != "float32"
    return {name: point for name, point in POINTS.items() if not few or name in FEW}


def engine_of(case: Case) -> TransformersEngine:
    """Return a fresh engine whose model notes in `passes` how many ids each call of its forward was given."""
    model = build(case.family, case.dtype, case.attention)
    forward, model.passes = model.forward, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        model.passes.append(int(kwargs.get("decoder_input_ids", kwargs.get("input_ids")).shape[1]))
        return forward(*args, **kwargs)

    model.forward = counted
    return TransformersEngine(model)


def begun_engine(case: Case) -> TransformersEngine:
    """Return a fresh engine; that of an encoder-decoder has encoded an input, which is kept from then on."""
    engine = engine_of(case)
    if engine.model.config.is_encoder_decoder:
        if case.family == "whisper":
            draw = torch.Generator().manual_seed(9)
            engine.encode(input_features=torch.randn(1, 80, 32, generator=draw))
        else:
            engine.encode(IDS[:11])
    return engine


def start(engine: TransformersEngine, point: Point, offset: int = 0) -> None:
    """Evaluate ids of a prompt behind what the engine holds, and take the steps of a point."""
    engine.prefill(IDS[offset : offset + point.prompt])
    for _ in range(point.steps):
        engine.step()
    if point.settled:
        engine.settle()


def go_on(engine: TransformersEngine, count: int = AFTER) -> Course:
    ids, rows, before = [], [], len(engine.model.passes)
    for _ in range(count):
        engine.settle()
        logits = engine._live.lines[0].logits
        assert logits is not None
        assert np.isfinite(logits.astype(np.float32)).all()
        rows.append(logits.view(np.uint8))
        ids.append(engine.step().id)
    return Course(ids, np.stack(rows), engine.model.passes[before:])


def bits(snapshot: Snapshot) -> str:
    """Return a digest of all values of a snapshot with their names and places, and of its ids."""
    found = hashlib.sha256(repr((snapshot.tokens, snapshot.n_rows, snapshot.n_pending)).encode())
    for tensor in snapshot.tensors():
        found.update(repr((tensor.name, tensor.start, tensor.shape, tensor.spec.dtype)).encode())
        found.update(np.ascontiguousarray(tensor.array).view(np.uint8).tobytes())
    return found.hexdigest()


def classes_of(engine: TransformersEngine) -> tuple[str, ...]:
    """Return the classes of the live cache, where it is not the usual one, and of its layers, each once, in order."""
    cache = engine.cache
    own = type(cache).__name__
    layers = cache.self_attention_cache.layers if own == "EncoderDecoderCache" else cache.layers
    classes = [own] if own != "DynamicCache" else []
    return tuple(dict.fromkeys([*classes, *(type(layer).__name__ for layer in layers)]))


def kept_by(snapshot: Snapshot) -> tuple[str, ...]:
    """Return what the kinds of layers keep, each once: `attention: k (window 8), v (window 8)`."""
    found = []
    for layer in snapshot.layers:
        words: dict[str, int] = {}
        for tensor in layer.tensors:
            if tensor.name.startswith("encoder."):
                continue  # the name of what was encoded
            spec = tensor.spec
            how = {"grow": "", "window": f" (window {spec.window})"}.get(spec.growth, f" ({spec.growth})")
            every = f" (1 for {spec.tokens_per_row})" if spec.tokens_per_row > 1 else ""
            word = f"{tensor.role}{how}{every}"
            words[word] = words.get(word, 0) + 1
        told = ", ".join(word if count == 1 else f"{count} {word}" for word, count in words.items())
        found.append(f"{layer.kind}: {told}" if told else layer.kind)
    return tuple(dict.fromkeys(found))


# -- the uninterrupted runs, and what they leave on disk -----------------------------------------------------------


class Begun(NamedTuple):
    refused: str
    courses: dict[str, Course]
    notes: dict[str, str]
    classes: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def _begin(case: Case, directory: Path) -> Begun:
    try:
        engine = begun_engine(case)
        engine.prefill(IDS[:5])
        engine.step()
        engine.settle()
        snapshot = engine.capture()
    except UnsupportedError as error:
        return Begun(str(error), {}, {})
    courses, notes = {}, {}
    for name, point in points_of(case).items():
        engine.reset()
        start(engine, point)
        kvsnap.save(engine.capture(), directory / f"{case.name}-{name}.kvsnap", sync=False)
        courses[name] = go_on(engine)
    engine.reset()
    offset = 0
    with kvsnap.Session.open(directory / f"{case.name}.session.kvsnap") as session:
        for turn in TURNS:
            start(engine, turn, offset)
            offset += turn.prompt
            session.append(engine.capture(start=session.n_rows))
    courses["session"] = go_on(engine)
    notes["session"] = bits(engine.capture())
    start(engine, Point(LATER.prompt, 0), offset)
    courses["a turn later"] = go_on(engine, LATER.steps)
    notes["a turn later"] = bits(engine.capture())
    return Begun("", courses, notes, classes_of(engine), kept_by(snapshot))


def _resume(case: Case, directory: Path) -> tuple[dict[str, Course], dict[str, str]]:
    engine = engine_of(case)
    courses, notes = {}, {}

    def restored(snapshot: Snapshot, passes: int) -> None:
        done = kvsnap.restore(snapshot, engine)
        assert done.exact, done.notes
        assert (done.reused, done.recomputed) == (snapshot.n_rows, 0)
        assert len(engine.model.passes) == passes

    for name in points_of(case):
        restored(kvsnap.load(directory / f"{case.name}-{name}.kvsnap"), len(engine.model.passes))
        courses[name] = go_on(engine)
    path = directory / f"{case.name}.session.kvsnap"
    with kvsnap.Session.open(path) as session:
        restored(session.load(), len(engine.model.passes))
        courses["session"] = go_on(engine)
        session.append(engine.capture(start=session.n_rows))
    with kvsnap.Session.open(path) as session:
        restored(session.load(), len(engine.model.passes))
        notes["session"] = bits(engine.capture())
        start(engine, Point(LATER.prompt, 0), sum(turn.prompt for turn in TURNS))
        courses["a turn later"] = go_on(engine, LATER.steps)
        session.append(engine.capture(start=session.n_rows))
        engine.reset()
        engine.install(session.load())
        notes["a turn later"] = bits(engine.capture())
    assert kvsnap.verify(path).ok
    return courses, notes


# -- what makes a case exact ---------------------------------------------------------------------------------------


def fault_in(case: Case, result: Result) -> str:
    """Return what keeps a case that is not refused from being exact, empty if nothing does.

    Ids and every bit of the logits are equal at every point, they vary (or they would prove nothing), and nothing was
    evaluated again: one pass of one id for each token, and none for the first where its logits were stored.
    """
    if result.error:
        return result.error
    expected = {*points_of(case), *LATER_RUNS}
    if set(result.courses) != expected:
        return f"expected runs from {sorted(expected)}, found {sorted(result.courses)}"
    for name, (whole, found) in result.courses.items():
        point = points_of(case).get(name)
        stored = name == "a turn later" or (point is not None and (point.settled or not point.steps))
        if found.ids != whole.ids:
            return f"{name}: ids {whole.ids} went on as {found.ids}"
        if found.logits.shape != whole.logits.shape or not np.array_equal(found.logits, whole.logits):
            return f"{name}: the logits differ from token {_first(found.logits, whole.logits)} on"
        if len(set(whole.ids)) < 3 or len({row.tobytes() for row in whole.logits}) < len(whole.ids):
            return f"{name}: {whole.ids} hardly vary"
        if found.passes != [1] * (len(found.ids) - stored):
            return f"{name}: the passes had {found.passes} ids"
    return ""


def _first(found: np.ndarray[Any, Any], whole: np.ndarray[Any, Any]) -> int:
    return int(np.flatnonzero((found != whole).any(axis=1))[0]) if found.shape == whole.shape else 0


# -- both processes ------------------------------------------------------------------------------------------------


def cases_of(families: Iterable[str], dtype: str) -> list[Case]:
    """Return a case for each family that the installed release has and each implementation of attention."""
    names = [name for name in families if known(FAMILIES[name])]
    return [Case(name, attention, dtype) for name in names for attention in attentions(name)]


def run_all(cases: Iterable[Case], directory: Path) -> dict[Case, Result]:
    """Begin every case here, resume each in a new process (one for all of them), and return both sides.

    The new process takes a case as soon as it is begun, so that both are busy.
    """
    begun: dict[Case, Begun] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _new_process(directory) as other:
            for case in cases:
                begun[case] = _begun(case, directory)
                if begun[case].courses:
                    print(json.dumps(case), file=other, flush=True)
    finally:
        torch.set_num_threads(threads)
    resumed = _told(directory)
    return {case: _result(found, *resumed.get(case.name, ({}, {}))) for case, found in begun.items()}


def _result(found: Begun, courses: dict[str, Course], notes: dict[str, str]) -> Result:
    pairs = {name: (course, courses[name]) for name, course in found.courses.items() if name in courses}
    error = found.notes.get("error") or notes.get("error", "")
    if not error and found.notes != notes:
        error = f"what was captured differs: {[name for name in notes if notes[name] != found.notes.get(name)]}"
    return Result(found.refused, error, pairs, found.classes, found.kept)


def _begun(case: Case, directory: Path) -> Begun:
    try:
        return _begin(case, directory)
    except ERRORS as error:
        return Begun("", {}, {"error": f"uninterrupted: {type(error).__name__}: {error}"})


@contextmanager
def _new_process(directory: Path) -> Iterator[IO[str]]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    with (directory / "said.txt").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, __file__, str(directory)],
            env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=said, stderr=said, text=True,
        )  # fmt: skip
        assert process.stdin is not None
        try:
            with process.stdin:
                yield process.stdin
            process.wait(timeout=900)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 0, (directory / "said.txt").read_text()


def _told(directory: Path) -> dict[str, tuple[dict[str, Course], dict[str, str]]]:
    told = json.loads((directory / "found.json").read_text())
    with np.load(directory / "found.npz") as logits:
        return {
            case: ({n: Course(ids, logits[f"{case}/{n}"], passes) for n, (ids, passes) in courses.items()}, notes)
            for case, (courses, notes) in told.items()
        }


def resume_all(cases: Iterable[str], directory: Path) -> None:
    torch.set_num_threads(1)
    told: dict[str, Any] = {}
    logits: dict[str, Any] = {}
    for line in cases:
        case = Case(*json.loads(line))
        try:
            courses, notes = _resume(case, directory)
        except ERRORS as error:
            courses, notes = {}, {"error": f"resumed: {type(error).__name__}: {error}"}
        told[case.name] = ({name: (course.ids, course.passes) for name, course in courses.items()}, notes)
        logits |= {f"{case.name}/{name}": course.logits for name, course in courses.items()}
    np.savez(directory / "found.npz", **logits)
    (directory / "found.json").write_text(json.dumps(told))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    resume_all(sys.stdin, Path(sys.argv[1]))

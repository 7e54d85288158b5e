"""Failures that people met with other tools, told as cases (B1 to B38), as far as files, q8, MLXKV001, `.coli_kv` and
the transformers engine are concerned. The id of a case stands in the name of its test.

Cases whose right outcome is tested elsewhere already, and the test that shows it:

| case | where |
|---|---|
| B1 | test_engine_rewind.py: test_b01_... |
| B2, B15, B17, B18 | test_reported_models.py; switched under live rows: test_engine_adapters.py: test_b18_... |
| B4, and B9 of windows, states and sessions | test_reuse.py: test_b04_..., test_b09_... |
| B15 another model | test_api.py: test_one_changed_weight_is_refused_by_name_and_changes_nothing |
| B20, B21 quantised caches | test_engine_quantised.py: test_b20_..., test_b21_... |
| B24 rotated keys against those made anew | test_engine_editing.py |
| B21 odd widths | no padding: test_codecs.py: test_codes_match_the_plain_formula_in_every_tile_and_group_size |
| B27 | test_engine_layers.py: test_b27_... |
| B31, one file per rule | under 512 MB: test_native_hostile.py: test_hostile_file_is_refused; test_mlxkv_hostile.py: |
| | test_the_outcome_of_every_golden_in_little_memory; test_colikv_hostile.py: test_a_hostile_file_is_refused_... |
| B31 zstd bomb | there is no zstd yet; its number is refused: test_codecs.py: test_a_reserved_number_is_unsupported |
| B10 power cuts | test_session.py, test_colikv.py: test_a_crash_...; every failing step: test_files.py |
| B35 races | a link or pipe that appears between look and open: test_files.py |
| too long | test_api.py: test_too_long_a_snapshot_names_both_numbers |

Those of a library of sessions (B29, and B7, B12, B32, B35 once more): test_reported_library.py.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsnap
from kvsnap import files, formats, inspection
from kvsnap.errors import ConflictError, DamagedError, FormatError, InputError, KvsnapError, MissingError, StorageError
from kvsnap.formats import colikv, mlxkv, native
from kvsnap.formats.colikv import ColiFile, Geometry
from kvsnap.formats.native import schema
from kvsnap.layout import Layer, PositionRun, Run, Snapshot, Tensor, TensorSpec
from kvsnap.session import Session
from spec_file import Minimal
from synthetic import same
from synthetic import snapshot as synthetic

linux = pytest.mark.skipif(sys.platform != "linux", reason="fork, limits and sparse files as on Linux")
no_fork_warning = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
ROOT = Path(__file__).resolve().parent.parent
GEOMETRY = Geometry(n_layers=2, kv_lora=8, qk_rope=4, vocab=1000)
FORMATS = ("native", "mlxkv", "colikv", "safetensors")


def latent(count: int, first: int = 0, **fields: Any) -> Snapshot:
    """A snapshot that every format can hold: latent layers of `GEOMETRY`, rows that follow from token and place."""
    layers = []
    for number in range(2):
        tensors = []
        for place, (role, width) in enumerate((("latent", 8), ("rope", 4))):
            spec = TensorSpec(
                id=2 * number + place, name=f"layers.{number}.{role}", layer=number, role=role, dtype="float32",
                axes=("row", "dim"), shape=(0, width), row_axis=0, rope="none" if role == "latent" else "unknown",
            )  # fmt: skip
            row = np.arange(count, dtype=np.float32)[:, None] + first + 100 * (number + place)
            tensors.append(Tensor(spec, row + np.linspace(0, 0.5, width, dtype=np.float32)))
        layers.append(Layer(index=number, kind="latent", tensors=tuple(tensors)))
    return Snapshot(
        layers=tuple(layers), tokens=tuple(range(first, first + count)), runs=(Run("prompt", count),) if count else (),
        n_rows=count, token_offset=count, positions=(PositionRun(0, count),) if count else (), **fields,
    )  # fmt: skip


def options(name: str) -> dict[str, Any]:
    return {"format": name, **({"vocab": 1000} if name == "colikv" else {})}


def content(snapshot: Snapshot) -> tuple[Any, ...]:
    """Ids and the bytes of all rows; the invariant of every complete file is checked on the way."""
    assert len(snapshot.tokens) == snapshot.n_rows + snapshot.n_pending
    rows = [t.array.astype(np.float32).ravel().tobytes() for t in snapshot.tensors()]
    assert {t.n_rows for t in snapshot.tensors()} <= {snapshot.n_rows}
    return snapshot.tokens, rows


# -- with an engine -------------------------------------------------------------------------------------------


@pytest.fixture
def models() -> Iterator[Callable[[], Any]]:
    """Makes engines of one tiny Llama, in one thread."""
    torch = pytest.importorskip("torch")
    from tiny_models import tiny_llama

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda **changes: kvsnap.connect(tiny_llama(**changes))
    torch.set_num_threads(before)


PROMPT = list(b"A small model, and a prompt.")


def say(engine: Any, count: int, prompt: Any = "") -> list[tuple[int, float]]:
    """Ids and log-probabilities: floats that depend on every row."""
    return [(t.id, t.logprob) for t in kvsnap.generate(engine, prompt, max_tokens=count)]


@pytest.mark.engine
@pytest.mark.parametrize("place", ["first row", "last row", "logits", "ids"])
@pytest.mark.parametrize("mmap", [True, False])
def test_b6_a_corrupt_file_leaves_the_live_session_as_it_was(
    models: Callable[..., Any], tmp_path: Path, place: str, mmap: bool
) -> None:
    live, reference = models(), models()
    assert say(live, 5, PROMPT[:9]) == say(reference, 5, PROMPT[:9])
    other = models()
    say(other, 5, PROMPT)
    path = tmp_path / "f.kvsnap"
    snapshot = kvsnap.capture(other, settle=True)
    snapshot.save(path)
    first, last = snapshot.layers[0].tensors[0].array, snapshot.layers[-1].tensors[-1].array
    wanted = {"first row": first[0, :1], "last row": last[-1, -1:], "logits": snapshot.logits.array[:16],
              "ids": np.array(snapshot.tokens[:12], "<u4")}[place]  # fmt: skip
    raw = bytearray(path.read_bytes())
    at = raw.index(wanted.tobytes())
    raw[at + 3] ^= 4
    path.write_bytes(raw)
    with pytest.raises(DamagedError):
        kvsnap.restore(kvsnap.load(path, mmap=mmap), live)
    assert say(live, 12) == say(reference, 12)
    assert path.read_bytes() == raw, "a failed restore repairs nothing on the disk"
    raw[at + 3] ^= 4
    path.write_bytes(raw)
    kvsnap.restore(kvsnap.load(path, mmap=mmap), live)
    assert say(live, 6) == say(other, 6)


@pytest.mark.engine
@pytest.mark.parametrize("name", ["mlxkv", "native"])
def test_b6_a_file_that_is_cut_while_it_is_restored(models: Callable[..., Any], tmp_path: Path, name: str) -> None:
    live, reference, other = models(), models(), models()
    assert say(live, 5, PROMPT[:9]) == say(reference, 5, PROMPT[:9])
    say(other, 5, PROMPT)
    path = tmp_path / "f"
    kvsnap.capture(other, settle=True).save(path, format=name)
    snapshot = kvsnap.load(path, mmap=False)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(DamagedError):
        kvsnap.restore(snapshot, live, accept=["weights"])
    assert say(live, 12) == say(reference, 12)


@pytest.mark.engine
@pytest.mark.parametrize("use", ["snapshot", "session", "mlxkv"])
def test_b7_an_empty_session_is_a_valid_file(models: Callable[..., Any], tmp_path: Path, use: str) -> None:
    empty, path = models(), tmp_path / "empty"
    snapshot = kvsnap.capture(empty)
    assert (snapshot.tokens, snapshot.n_rows) == ((), 0)
    if use == "session":
        with Session.open(path) as session:
            session.append(snapshot)
    else:
        snapshot.save(path, format="mlxkv" if use == "mlxkv" else None)
    back = kvsnap.load(path)
    assert (back.tokens, back.n_rows, back.seq_len, back.token_offset) == ((), 0, 0, 0)
    used = models()
    say(used, 3, PROMPT[:4])
    kvsnap.restore(back, used, accept=["weights"] if use == "mlxkv" else [])
    assert (used.tokens, used.n_rows) == ((), 0)
    with pytest.raises(InputError, match="nothing to go on from"):
        say(used, 1)
    assert say(used, 8, PROMPT) == say(models(), 8, PROMPT)
    if use == "session":
        with Session.open(path) as session:
            session.append(kvsnap.capture(used))
            assert session.n_tokens == len(PROMPT) + 8


@pytest.mark.engine
def test_b7_a_missing_file_clears_nothing(models: Callable[..., Any], tmp_path: Path) -> None:
    used, reference = models(), models()
    assert say(used, 3, PROMPT) == say(reference, 3, PROMPT)
    for name in ("nope.kv", "no-directory/nope.kv"):
        with pytest.raises(MissingError, match=r"no such file|no directory"):
            kvsnap.restore(kvsnap.load(tmp_path / name), used)
    with pytest.raises(MissingError):
        Session.open(tmp_path / "nope.kv", create=False)
    assert list(tmp_path.iterdir()) == []
    assert say(used, 9) == say(reference, 9)


@pytest.mark.engine
def test_b9_a_full_hit_needs_no_new_input_and_no_pass(models: Callable[..., Any], tmp_path: Path) -> None:
    engine = models()
    say(engine, 4, PROMPT)
    snapshot = kvsnap.capture(engine, settle=True)
    snapshot.save(tmp_path / "full.kvsnap")
    expected = say(engine, 6)
    for nothing in ("", []):
        other = models()
        kvsnap.restore(kvsnap.load(tmp_path / "full.kvsnap"), other)
        first = say(other, 1, nothing)
        assert other.forwards == 0
        assert first + say(other, 5) == expected
    # Control: the logits are what makes it so.
    replace(snapshot, logits=None).save(tmp_path / "without.kvsnap")
    other = models()
    assert kvsnap.restore(kvsnap.load(tmp_path / "without.kvsnap"), other).recomputed == 1
    assert say(other, 6)[0][0] == expected[0][0]
    assert other.forwards == 6


@pytest.mark.engine
def test_b15_the_same_path_and_name_with_other_weights(models: Callable[..., Any], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    engine = models()
    say(engine, 4, PROMPT)
    kvsnap.capture(engine).save(tmp_path / "a.kvsnap")
    other = models()
    weight = other.model.model.layers[0].self_attn.q_proj.weight
    for step in (1e-3, -1e-3):
        with torch.no_grad():
            before = weight[0, 0].clone()
            weight[0, 0] += step
        with pytest.raises(kvsnap.KvsnapError, match="weights differ: layer 0 q_proj"):
            kvsnap.restore(kvsnap.load(tmp_path / "a.kvsnap"), other)
        with torch.no_grad():
            weight[0, 0] = before
    kvsnap.restore(kvsnap.load(tmp_path / "a.kvsnap"), other)
    assert say(other, 8) == say(engine, 8)


@pytest.mark.engine
def test_b38_the_size_follows_the_use_and_not_the_capacity(models: Callable[..., Any], tmp_path: Path) -> None:
    sizes = {}
    for capacity in (64, 4096):
        for count in (0, 10, 20):
            engine = models(max_position_embeddings=capacity)
            if count:
                engine.prefill(range(count))
            path = tmp_path / f"{capacity}-{count}"
            snapshot = kvsnap.capture(engine)
            sizes[capacity, count] = snapshot.save(path).nbytes
            assert path.stat().st_size == sizes[capacity, count]
            if count:
                payload, logits = 3 * 2 * 2 * 16 * 4 * count, 256 * 4
                assert snapshot.nbytes == payload + logits
                assert sizes[capacity, count] <= 1.05 * (payload + logits + sizes[capacity, 0]) + 256
    assert abs(sizes[4096, 10] - sizes[64, 10]) <= 64, "the number itself is one of the settings"
    assert abs(sizes[4096, 20] - sizes[4096, 10] - 3 * 2 * 2 * 16 * 4 * 10) <= 256


# -- writers that are killed ----------------------------------------------------------------------------------


def forked(work: Callable[[], None]) -> int:
    """Run `work` in a child and return its wait status; nothing of the test runs on in it."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(99)
    return os.waitpid(child, 0)[1]


class Stop:
    """A recorder that stops at the `last` operation: by SIGKILL, or by an exception."""

    def __init__(self, last: int, error: bool) -> None:
        self.left, self.error, self.seen = last, error, 0

    def record(self, operation: str, path: str, offset: int, data: bytes) -> None:
        self.seen += 1
        self.left -= 1
        if self.left == 0:
            if self.error:
                raise OSError(5, "injected")
            os.kill(os.getpid(), signal.SIGKILL)


def steps(work: Callable[[], object]) -> int:
    """How many operations on files `work` makes."""
    counter = Stop(-1, error=True)
    files.recorder = counter
    try:
        work()
    finally:
        files.recorder = None
    return counter.seen


@linux
@no_fork_warning
@pytest.mark.parametrize("error", [False, True], ids=["killed", "exception"])
@pytest.mark.parametrize("name", FORMATS)
def test_b10_a_rewrite_that_is_stopped_leaves_the_old_file_or_the_new(tmp_path: Path, name: str, error: bool) -> None:
    path = tmp_path / "a"
    old, new = latent(10), latent(20, first=500)
    total = steps(lambda: kvsnap.save(new, tmp_path / "trial", **options(name)))
    assert total >= 4
    seen = set()
    for last in range(1, total + 1):
        kvsnap.save(old, path, **options(name))

        def work(last: int = last) -> None:
            files.recorder = Stop(last, error)
            kvsnap.save(new, path, **options(name))

        status = forked(work)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 99, "the child was stopped"
        found = content(kvsnap.load(path))
        assert found in (content(old), content(new)), f"stopped at operation {last}"
        assert kvsnap.verify(path).ok
        seen.add(len(found[0]))
    assert seen == {10, 20}, "before the rename, and behind it"


@linux
@no_fork_warning
@pytest.mark.parametrize("error", [False, True], ids=["killed", "exception"])
def test_b10_a_turn_that_is_stopped_is_there_or_not(tmp_path: Path, error: bool) -> None:
    tokens = tuple(range(30))
    whole = [synthetic(tokens[:n], n_prompt=n) for n in (10, 20)]
    with Session.open(tmp_path / "trial") as session:
        session.append(whole[0])
        total = steps(lambda: session.append(whole[1]))
    for last in range(1, total + 1):
        path = tmp_path / f"{last}"
        with Session.open(path) as session:
            session.append(whole[0])

        def work(last: int = last, path: Path = path) -> None:
            with Session.open(path) as session:
                files.recorder = Stop(last, error)
                session.append(whole[1])

        forked(work)
        loaded = kvsnap.load(path)
        assert not same(loaded, whole[1 if loaded.n_rows == 20 else 0]), f"stopped at operation {last}"
        with Session.open(path) as session:
            session.append(whole[1])
            assert not same(session.load(), whole[1])
            assert kvsnap.verify(path).ok


@linux
@no_fork_warning
@pytest.mark.parametrize("error", [False, True], ids=["killed", "exception"])
def test_b10_a_coli_turn_that_is_stopped_is_there_or_not(tmp_path: Path, error: bool) -> None:
    whole = [latent(10), latent(20)]

    def grown(path: Path, snapshot: Snapshot, last: int = 0) -> None:
        with ColiFile.open(path, GEOMETRY, create=True) as file:
            if last:
                files.recorder = Stop(last, error)
            file.append_snapshot(snapshot)

    grown(tmp_path / "trial", whole[0])
    total = steps(lambda: grown(tmp_path / "trial", whole[1]))
    found = set()
    for last in range(1, total + 1):
        path = tmp_path / f"{last}"
        grown(path, whole[0])
        forked(lambda path=path, last=last: grown(path, whole[1], last))
        loaded = kvsnap.load(path)
        assert content(loaded) == content(whole[1 if loaded.n_rows == 20 else 0]), f"stopped at operation {last}"
        found.add(loaded.n_rows)
        grown(path, whole[1])
        assert content(kvsnap.load(path)) == content(whole[1])
    assert 10 in found


@linux
@no_fork_warning
@pytest.mark.parametrize("name", FORMATS)
def test_b12_processes_that_save_one_name_at_once(tmp_path: Path, name: str) -> None:
    """Four writers, fifty saves each; a fifth may not write more than a kilobyte, and must be told so each time."""
    path = tmp_path / "shared"
    versions = [latent(40 + i, first=100 * i) for i in range(4)]
    kvsnap.save(versions[0], path, **options(name), sync=False)

    def writer(number: int) -> None:
        for _ in range(50):
            kvsnap.save(versions[number], path, **options(name), sync=False)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
        for _ in range(50):
            try:
                kvsnap.save(versions[0], path, **options(name), sync=False)
            except StorageError:
                continue
            os._exit(7)

    children = []
    for work in [*(lambda n=n: writer(n) for n in range(4)), limited]:
        child = os.fork()
        if child == 0:
            try:
                work()
                os._exit(0)
            finally:
                os._exit(99)
        children.append(child)
    wanted, looks = [content(v) for v in versions], 0
    for child in children:
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            try:
                assert content(kvsnap.load(path)) in wanted, "a reader sees one version, complete, at any time"
                looks += 1
            except ConflictError:  # a `.coli_kv` file is changed in place by others, so its lazy rows must tell
                assert name == "colikv"
            if done:
                assert status == 0, "a save returned although it could not be whole, or failed without a reason"
                break
    assert looks > 5 or name == "colikv"
    assert content(kvsnap.load(path)) in wanted
    assert [p.name for p in tmp_path.iterdir()] == ["shared"], "no temporary file is left"


# -- bytes that changed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["exact", "q8"])
def test_b14_a_thousand_random_bits(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "a.kvsnap"
    snapshot = synthetic(tuple(range(200)), layers=2, heads=2, dim=8, n_prompt=150, text="x" * 200)
    snapshot.save(path, codec=codec)
    raw, dice = path.read_bytes(), random.Random(14)
    assert kvsnap.verify(path).ok
    parts = 0
    for _ in range(1000):
        bit = dice.randrange(len(raw) * 8)
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            report = kvsnap.verify(path)
        except KvsnapError:
            continue
        assert not report.ok, f"bit {bit} of {len(raw) * 8} is not noticed"
        damage = report.damages[0]
        if damage.tensor:
            parts += 1
            if not damage.tensor.startswith("logits"):
                assert damage.tokens == (0, 200), "the tokens are named"
        if damage.what == "padding is not zero":
            continue  # behind the data: nothing of it is handed out
        with pytest.raises(KvsnapError):
            content(kvsnap.load(path))
            _ = kvsnap.load(path).logits.array
    assert parts > 300, "most of the file are parts of tensors"


# -- sizes that need more than 32 bits ------------------------------------------------------------------------


class Zeros:
    """Where a large tensor of zeros comes from: memory that is never written, so that it takes none."""

    def __init__(self, tensor: TensorSpec, n_rows: int) -> None:
        self.shape, self.dtype = tensor.shape_with(n_rows), np.dtype("u1")

    def array(self) -> Any:
        return np.zeros(self.shape, self.dtype)

    def read_into(self, out: Any) -> None:
        out[...] = 0


class SparseFile:
    """A sink that leaves holes where large buffers (zeros, in these tests) would be written."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w+b")

    def write_at(self, buffers: Any, offset: int) -> int:
        buffers = [buffers] if isinstance(buffers, (bytes, bytearray, memoryview)) else buffers
        total = 0
        for buffer in buffers:
            view = memoryview(buffer).cast("B") if memoryview(buffer).nbytes else memoryview(b"")
            if view.nbytes <= 1 << 20:
                self.file.seek(offset + total)
                self.file.write(view)
            total += view.nbytes
        self.file.flush()
        return total


SIZES = [2**31 - 1, 2**31, 2**32, 2**32 + 1]


@linux
@pytest.mark.parametrize("size", SIZES)
def test_b30_a_native_part_of_more_than_32_bits(tmp_path: Path, size: int) -> None:
    """The tensor behind it is found and checked: offsets and lengths are right. The large one is not read again."""
    made = []
    for number, width in enumerate((size, 64)):
        spec = TensorSpec(
            id=number, name=f"layers.{number}.k", layer=number, role="other", dtype="uint8", axes=("row", "dim"),
            shape=(0, width), row_axis=0,
        )  # fmt: skip
        values = Zeros(spec, 1) if number == 0 else np.arange(64, dtype=np.uint8)[None]
        made.append(Layer(index=number, kind="attention", tensors=(Tensor(spec, values, n_rows=1),)))
    snapshot = Snapshot(
        layers=tuple(made), tokens=(7,), runs=(Run("prompt", 1),), n_rows=1, token_offset=1,
        positions=(PositionRun(0, 1),),
    )  # fmt: skip
    assert snapshot.nbytes == size + 64
    path = tmp_path / "large"
    sink = SparseFile(path)
    formats.format_named(native.NAME).write(snapshot, sink)
    sink.file.close()
    assert size + 64 < path.stat().st_size < size + 65536
    loaded = kvsnap.load(path)
    assert loaded.layers[0].tensors[0].nbytes == size
    assert np.array_equal(loaded.layers[1].tensors[0].array, np.arange(64, dtype=np.uint8)[None])
    summary = kvsnap.inspect(path)
    assert (summary.file_bytes, summary.tensor_bytes) == (path.stat().st_size, size + 64)


@linux
@pytest.mark.parametrize("size", [s for s in SIZES if s < 2**32] + [2**32 - 1])
def test_b30_an_mlxkv_tensor_of_almost_32_bits_of_codes(tmp_path: Path, size: int) -> None:
    """u32 is what the format has for one tensor; the file is larger. The head behind the large one is found."""
    path = tmp_path / "large"
    fields = struct.pack("<8sII5II", b"MLXKV001", 3, 0, 1, 2, 1, size, 2, 1)
    ids = struct.pack("<IiI", 1, 5, 0)
    entry = struct.pack("<IiiI", 1, 0, 0, 2)
    large = struct.pack("<IIf", 1, size, 1.0)
    small = struct.pack("<II4f", 0, 4, 1, 2, 3, 4)
    with path.open("wb") as file:
        file.write(fields + ids + entry + large)
        file.seek(size, os.SEEK_CUR)
        file.write(large)
        file.seek(size, os.SEEK_CUR)
        file.write(small * 2 + struct.pack("<II", 0, 0))
    found = mlxkv.parse(files.Reader(path), mapped=True)
    (layer,) = found.layers
    assert (layer.heads[0].key.n, layer.heads[0].value.n) == (size, size)
    assert bytes(layer.heads[1].value.data.read()) == struct.pack("<4f", 1, 2, 3, 4)
    assert found.trailing is None or not found.trailing.length
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(DamagedError, match="logits count: the file is cut off"):
        mlxkv.parse(files.Reader(path), mapped=True)


@pytest.mark.parametrize("n_rows", [2**30, 2**31, 2**32])
def test_b30_an_mlxkv_tensor_of_more_than_32_bits_is_refused_before_it_is_written(n_rows: int) -> None:
    spec = TensorSpec(
        id=0, name="layers.0.k", layer=0, role="k", dtype="float32", axes=("head", "row", "dim"), shape=(1, 0, 4),
        row_axis=1,
    )  # fmt: skip

    class Nothing(Zeros):
        def array(self) -> Any:
            raise AssertionError("nothing is read before the counts are known to fit")

        read_into = array

    layer = Layer(index=0, kind="attention", tensors=tuple(
        Tensor(replace(spec, id=i, name=f"layers.0.{role}", role=role), Nothing(spec, n_rows), n_rows=n_rows)
        for i, role in enumerate("kv")
    ))  # fmt: skip
    snapshot = Snapshot(
        layers=(layer,), tokens=(5,), runs=(Run("prompt", 1),), n_rows=n_rows, token_offset=n_rows,
        positions=(PositionRun(0, n_rows),),
    )  # fmt: skip
    with pytest.raises(KvsnapError, match=r"sequence length; expected|layer entry 0, .* of a head; expected"):
        kvsnap.dumps(snapshot, format="mlxkv")


@linux
@pytest.mark.parametrize("limit", [2**31, 2**32])
def test_b30_coli_records_behind_32_bits(tmp_path: Path, limit: int) -> None:
    layers, width = 64, 1 << 18
    record = 4 + layers * width * 4
    count = limit // record + 2
    path = tmp_path / ".coli_kv"
    last = struct.pack("<i", 77) + np.arange(width, dtype="<f4").tobytes()
    with path.open("wb") as file:
        file.write(struct.pack("<8s8i", b"COLIKV1\0", layers, width, 0, 0, 0, 1000, count, 0))
        for number in range(count - 1):
            file.seek(40 + number * record)
            file.write(struct.pack("<i", number % 50))
        file.seek(40 + (count - 1) * record)
        file.write(last)
        file.truncate(40 + count * record)
    geometry = Geometry(n_layers=layers, kv_lora=width, qk_rope=0, vocab=1000)
    snapshot = colikv.load(path, geometry=geometry)
    assert snapshot.tokens == (*(number % 50 for number in range(count - 1)), 77)
    assert snapshot.nbytes == count * (record - 4) > limit
    assert np.array_equal(snapshot.layers[0].tensor("latent").array[-1], np.arange(width, dtype=np.float32))
    with ColiFile.open(path, geometry) as file:
        row = [np.full((1, width), 5 + layer, np.float32) for layer in range(layers)]
        assert file.append([78], row) == count + 1
    assert path.stat().st_size == 40 + (count + 1) * record
    with path.open("rb") as raw:
        raw.seek(40 + count * record)
        assert struct.unpack("<if", raw.read(8)) == (78, 5.0)


def test_b30_sizes_are_whole_numbers_of_any_length() -> None:
    spec = TensorSpec(
        id=0, name="k", layer=0, role="k", dtype="float32", axes=("head", "row", "dim"), shape=(128, 0, 65536),
        row_axis=1,
    )  # fmt: skip
    assert spec.nbytes(2**33) == 128 * 65536 * 4 * 2**33
    assert colikv.Header(
        b"COLIKV1\0", Geometry(n_layers=4096, kv_lora=1 << 20, qk_rope=1 << 20, vocab=1), colikv.Encoding("float32"),
        2**31 - 1, 0, "colibri", 2**62,
    ).offset(2**31 - 1) == 40 + (2**31 - 1) * (4 + 4096 * 2 * (1 << 20) * 4)  # fmt: skip


# -- counts that promise more than there is -------------------------------------------------------------------


GREEDY = """
import json, resource, sys, tracemalloc
from pathlib import Path
import numpy as np
import kvsnap
from kvsnap.library import Library

def used(snapshot):
    for tensor in snapshot.tensors():
        tensor.array
    return len(snapshot.tokens)

def opened(path):
    with kvsnap.Session.open(path, readonly=True) as session:
        return used(session.load()), session.history

def forked(path):
    with kvsnap.Session.open(path, readonly=True) as session:
        session.fork(path.with_name(path.name + ".fork"))

def checked(path):
    if not kvsnap.verify(path).ok:
        raise kvsnap.errors.DamagedError("damaged")

def added(path):
    with Library(path.with_name("library")) as library:
        library.add(path, "name", allow_loss=True)
        library.remove("name")

WAYS = {
    "load": lambda p: used(kvsnap.load(p)), "read": lambda p: used(kvsnap.load(p, mmap=False)),
    "loads": lambda p: used(kvsnap.loads(p.read_bytes())), "inspect": kvsnap.inspect,
    "verify": checked, "session": opened, "fork": forked, "add": added,
    "repair": lambda p: kvsnap.repair(p, p.with_name(p.name + ".repaired")),
    "convert": lambda p: kvsnap.convert(p, p.with_name("converted"), allow_loss=True),
}
used(kvsnap.load(sys.argv[1]))  # whatever is loaded later is loaded now
in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + (512 << 20),) * 2)
tracemalloc.start()
for name in sys.argv[1:]:
    for way, run in WAYS.items():
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            run(Path(name))
            found = ""
        except kvsnap.KvsnapError as error:
            found = type(error).__name__
        except BaseException as error:
            found = "not ours: " + repr(error)
        print(json.dumps([Path(name).name, way, found, tracemalloc.get_traced_memory()[1] - before]))
try:
    np.zeros(1 << 30, np.uint8)
except MemoryError:
    print(json.dumps(["control", "", "MemoryError", 0]))
"""


def greedy_files() -> dict[str, bytes]:
    """Small files whose counts ask for gigabytes; in those of our own the checksums fit."""
    top, u32 = 2**31 - 1, 2**32 - 1
    found = {
        "mlxkv tokens": struct.pack("<8s8I", b"MLXKV001", 6, 0, u32, u32, top, u32, u32, top),
        "mlxkv layers": struct.pack("<8s10I", b"MLXKV001", 3, 0, u32, u32, top, u32, u32, 0, 0, u32),
        "coli records": struct.pack("<8s8i", b"COLIKV1\0", 64, 1 << 18, 0, 0, 0, 1000, top, 0) + bytes(64),
        "coli layers": struct.pack("<8s8i", b"COLIKV1\0", top, top, top, 0, 0, 1000, top, 0),
        "safetensors header": struct.pack("<Q", 2**62) + b"{" + b" " * 31,
    }
    shape = json.dumps({"x": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 2**42]}}).encode()
    found["safetensors shape"] = struct.pack("<Q", len(shape)) + shape

    def changed(change: Callable[[Any], object]) -> bytes:
        m = Minimal()
        change(m)
        return m.build()

    def axis(m: Any, **fields: Any) -> None:
        m.layout["tensors"][0] |= fields

    def part(m: Any, **fields: Any) -> None:
        m.span["parts"][0] = {**m.span["parts"][0], **fields}

    bomb = zlib.compress(bytes(1 << 20), 9)
    found |= {
        "native tokens": changed(lambda m: m.span.update(set_n_tokens=top)),
        "native tokens of the commit": changed(lambda m: m.commit.update(n_tokens=top, n_rows=top)),
        "native rows": changed(lambda m: m.span.update(n_rows=top, positions=[(0, top)])),
        "native parts": changed(lambda m: m.span.update(set_n_parts=u32)),
        "native entries": changed(lambda m: m.commit.update(n_tail=u32)),
        "native heads": changed(lambda m: axis(m, shape=[u32, 0, 4])),
        "native shape": changed(lambda m: axis(m, shape=[2**40, 0, 2**40])),
        "native layer": changed(lambda m: m.layout["layers"][0].update(index=u32)),
        "native decoded": changed(lambda m: part(m, decoded=2**40)),
        "native zstd": changed(lambda m: part(m, codec=4, flags=0, bound=1.0, data=bomb, decoded=10 << 30)),
        "native lossless": changed(lambda m: part(m, codec=2, data=bomb, decoded=10 << 30)),
    }
    return found


@linux
def test_b31_counts_that_promise_gigabytes_take_no_memory(tmp_path: Path) -> None:
    names = []
    (tmp_path / "good").write_bytes(Minimal().build())
    for name, data in greedy_files().items():
        (tmp_path / name).write_bytes(data)
        assert len(data) < 4096
        names.append(name)
    done = subprocess.run(
        [sys.executable, "-c", GREEDY, *(str(tmp_path / name) for name in ["good", *names])], capture_output=True,
        text=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found.pop()[2] == "MemoryError", "the control: there is a limit"
    assert len({(name, way) for name, way, _, _ in found}) == 10 * (1 + len(names))
    for name, way, error, peak in found:
        assert peak < 8 << 20, (name, way, peak)
        assert not error.startswith("not ours"), (name, way, error)
        if name == "good":
            assert error == "", (way, error)
        elif name == "coli records" and way not in ("session", "fork", "repair"):
            assert error == "", "a counter above the records that are there: none of them is whole, as with colibri"
        elif way in ("load", "read", "loads", "convert", "add", "session", "fork"):
            assert error, (name, way)


# -- holes ----------------------------------------------------------------------------------------------------


HOLES = (PositionRun(0, 4), PositionRun(7, 2), PositionRun(12, 4))
"""What is left of 16 rows when those at 4 to 6 and 9 to 11 were removed."""


@pytest.mark.parametrize("way", ["native", "safetensors", "session", "compacted", "fork", "repaired", "mlxkv"])
def test_b26_rows_around_holes_are_all_there_once(tmp_path: Path, way: str) -> None:
    whole = synthetic(tuple(range(10, 26)), dim=8)
    kept = [p.start + i for p in HOLES for i in range(p.count)]
    layers = tuple(
        replace(layer, tensors=tuple(Tensor(t.spec, t.array[:, kept]) for t in layer.tensors)) for layer in whole.layers
    )
    holed = replace(
        whole, layers=layers, tokens=tuple(whole.tokens[i] for i in kept), runs=(Run("prompt", 10),), n_rows=10,
        positions=HOLES,
    )  # fmt: skip
    path = tmp_path / "a"
    if way == "mlxkv":  # it has no place for positions, and says so
        assert "positions" in [loss.what for loss in kvsnap.save(holed, path, format="mlxkv").losses]
        assert [t.array.tobytes() for t in kvsnap.load(path).tensors()] == [t.array.tobytes() for t in holed.tensors()]
        return
    if way in FORMATS:
        kvsnap.save(holed, path, format=way)
    else:
        with Session.open(path) as session:
            for count in (3, 6, 8):  # turns end inside of a run, and cuts leave holes in the file as well
                session.append(holed.truncate(count))
                session.truncate(count - 1)
            session.append(holed)
            if way == "compacted":
                session.compact()
            if way == "fork":
                session.fork(tmp_path / "b")
        if way == "repaired":
            assert kvsnap.repair(path, tmp_path / "b").complete
        path = tmp_path / "b" if way in ("fork", "repaired") else path
    found = kvsnap.load(path)
    assert same(found, holed) == []
    assert found.positions == HOLES
    assert found.head(0, 1).positions.tolist() == kept  # type: ignore[union-attr]
    assert np.array_equal(found.head(0, 1).k, whole.head(0, 1).k[kept])  # type: ignore[union-attr]
    assert found.truncate(5).positions == (PositionRun(0, 4), PositionRun(7, 1))
    assert same(found, replace(holed, positions=(PositionRun(0, 10),))) == ["positions"], "the control"
    assert kvsnap.verify(path).ok


@pytest.mark.engine
def test_b26_the_unused_cells_of_a_cache_are_left_out(models: Callable[..., Any], tmp_path: Path) -> None:
    """Cells that a mask takes out of the middle of a cache: the others are saved, and go on as the live ones do."""
    torch = pytest.importorskip("torch")
    live = models()
    ids, unused = torch.tensor([PROMPT]), [0, 5, 6, 7, 20]
    mask = torch.ones_like(ids)
    mask[0, unused] = 0
    with torch.no_grad():
        places = (mask.cumsum(1) - 1).clamp(0)
        out = live.model(ids, attention_mask=mask, position_ids=places, use_cache=True)
    before = [layer.keys.clone() for layer in out.past_key_values.layers]
    live.adopt(out.past_key_values, ids, attention_mask=mask, logits=out.logits[:, -1], position_ids=places)
    used = [i for i in range(len(PROMPT)) if i not in unused]
    snapshot = kvsnap.capture(live)
    assert snapshot.tokens == tuple(PROMPT[i] for i in used)
    assert snapshot.positions == (PositionRun(0, len(used)),)
    for layer, keys in zip(snapshot.layers, before, strict=True):
        assert layer.tensors[0].array.tobytes() == keys[0][:, used].numpy().tobytes()
    with Session.open(tmp_path / "a") as session:
        session.append(snapshot.truncate(9))
        session.append(snapshot)
    fresh = models()
    assert kvsnap.restore(kvsnap.load(tmp_path / "a"), fresh).exact
    assert say(fresh, 8) == say(live, 8)
    # Control: the rows tell which cells were used.
    other = models()
    other.prefill(PROMPT)
    assert say(other, 8) != say(models(), 8, [PROMPT[i] for i in used])
    assert [i for i, _ in say(models(), 8, [PROMPT[i] for i in used])] == list(fresh.tokens[len(used) :])


# -- what is in a file does not run ---------------------------------------------------------------------------


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("kind", ["pickle", "torch", "old torch"])
def test_b32_a_pickle_is_never_run(tmp_path: Path, kind: str) -> None:
    path, marker = tmp_path / "a.kvsnap", tmp_path / "marker"
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Bomb(marker)))
    else:
        torch = pytest.importorskip("torch")
        torch.save(Bomb(marker), path, _use_new_zipfile_serialization=kind == "torch")
    for call in (kvsnap.load, kvsnap.inspect, kvsnap.verify, Session.open):
        with pytest.raises(FormatError):
            call(path)
    for name in FORMATS:
        with pytest.raises(KvsnapError):
            kvsnap.load(path, format=name)
    with pytest.raises(FormatError):
        kvsnap.convert(path, tmp_path / "b", allow_loss=True)
    assert not marker.exists()
    # Control: unpickled, it would run.
    if kind == "pickle":
        pickle.loads(path.read_bytes())  # noqa: S301 # what this test is about
        assert marker.exists()


KINDS = ["os.system", "transformers.cache_utils.DynamicLayer", "__import__", ""]


@pytest.mark.parametrize("kind", KINDS)
def test_b32_a_native_file_with_an_unknown_kind_of_layer_is_refused_by_name(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = latent(3)
    wrong = replace(snapshot, layers=tuple(replace(layer, kind=kind) for layer in snapshot.layers))
    with pytest.raises(InputError, match="layer 0 is of an unknown kind"):
        kvsnap.dumps(wrong)
    with monkeypatch.context() as patch:  # as another program would write it, checksums and all
        patch.setattr(schema, "LAYER_KINDS", ("latent", kind))
        data = kvsnap.dumps(wrong)
    with pytest.raises(
        FormatError, match=r"LAYOUT layer 0: kind is not known; a newer release may know it; expected one of attention"
    ):
        content(kvsnap.loads(data))


@pytest.mark.parametrize("kind", KINDS)
def test_b32_an_unknown_kind_of_layer_is_no_class(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.safetensors"
    kvsnap.save(latent(3), path, format="safetensors")
    raw = path.read_bytes()
    length = struct.unpack_from("<Q", raw)[0]
    head = json.loads(raw[8 : 8 + length])
    text = json.dumps(head)
    assert text.count("latent") >= 2
    changed = {k: v.replace('"kind":"latent"', f'"kind":"{kind}"').replace('"kind": "latent"', f'"kind": "{kind}"')
               for k, v in head["__metadata__"].items()}  # fmt: skip
    assert changed != head["__metadata__"], "the kind is a word in the metadata"
    head["__metadata__"] = changed
    data = json.dumps(head).encode()
    data += b" " * (-len(data) % 8)
    path.write_bytes(struct.pack("<Q", len(data)) + data + raw[8 + length :])
    with pytest.raises(KvsnapError, match="kind"):
        kvsnap.load(path)


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_without_our_magic_is_never_reinterpreted(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"a.{name}"
    kvsnap.save(latent(6), path, **options(name))
    raw = path.read_bytes()
    places = range(8) if name != "safetensors" else [7]
    for at in places:
        changed = bytearray(raw)
        changed[at] ^= 0x55
        path.write_bytes(changed)
        with pytest.raises((FormatError, DamagedError)):
            kvsnap.load(path)
    for head in (b"", b"\0", raw[:5], b"\0" * 4096, os.urandom(4096)):
        path.write_bytes(head)
        with pytest.raises((FormatError, DamagedError)):
            kvsnap.load(path)


# -- NaN ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["native", "mlxkv", "safetensors"])
@pytest.mark.parametrize("used", [0, 1, 10])
def test_b34_rows_beyond_the_length_are_never_written(tmp_path: Path, name: str, used: int) -> None:
    """A cache allocated for 64 rows, NaN and a password behind the rows that are used."""
    capacity = np.full((2, 64, 8), np.nan, np.float32)
    capacity[:, used:] = np.frombuffer(b"pass" * 8, np.float32)
    capacity[:, used:, 0] = np.nan
    capacity[:, :used] = 0.25
    tensors = []
    for number, role in enumerate("kv"):
        spec = TensorSpec(
            id=number, name=f"layers.0.{role}", layer=0, role=role, dtype="float32", axes=("head", "row", "dim"),
            shape=(2, 0, 8), row_axis=1,
        )  # fmt: skip
        tensors.append(Tensor(spec, capacity[:, :used]))
    snapshot = Snapshot(
        layers=(Layer(index=0, kind="attention", tensors=tuple(tensors)),), tokens=tuple(range(used)),
        runs=(Run("prompt", used),) if used else (), n_rows=used, token_offset=used,
        positions=(PositionRun(0, used),) if used else (),
    )  # fmt: skip
    path = tmp_path / "a"
    kvsnap.save(snapshot, path, format=name)
    assert b"passpass" not in path.read_bytes()
    loaded = kvsnap.load(path)
    for tensor in loaded.tensors():
        assert np.array_equal(tensor.array, np.full((2, used, 8), 0.25, np.float32))
    with Session.open(tmp_path / "s") as session:
        session.append(snapshot)
    assert b"passpass" not in (tmp_path / "s").read_bytes()


NAMED = (0x7FC00001, 0x7F800001, 0xFFC0DEAD, 0x7F800000, 0xFF800000, 0x80000000)


@pytest.mark.parametrize("codec", ["exact", "q8", "mlxkv", "mlxkv q8", "colikv"])
def test_b34_nan_inside_used_rows_is_kept_to_the_bit_and_counted(tmp_path: Path, codec: str) -> None:
    snapshot = latent(9)
    bad = snapshot.layers[1].tensors[0].array.copy()
    bad.view(np.uint32)[4, :6] = NAMED
    layers = (snapshot.layers[0], replace(snapshot.layers[1], tensors=(
        Tensor(snapshot.layers[1].tensors[0].spec, bad), snapshot.layers[1].tensors[1],
    )))  # fmt: skip
    path = tmp_path / "a"
    name, _, inner = codec.partition(" ")
    ours: dict[str, dict[str, Any]] = {"exact": {}, "q8": {"codec": "q8"}}
    kvsnap.save(
        replace(snapshot, layers=layers),
        path,
        **(ours[name] if name in ours else options(name)),
        **({"codec": inner} if inner else {}),
    )
    found = kvsnap.load(path)
    keys = found.head(1, 0).k
    assert keys.view(np.uint32)[4, :6].tolist() == list(NAMED)
    assert np.isfinite(np.delete(keys, 4, 0)).all()
    done = subprocess.run(
        [sys.executable, "-m", "kvsnap", "head", str(path), "1", "0", "--json"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["k"]["not_finite"] == 5
    (bad,) = inspection.non_finite(found)
    assert (bad.layer, bad.nan, bad.infinite, bad.row) == (1, 3, 2, 4)
    assert inspection.non_finite(snapshot) == ()


@pytest.mark.engine
def test_b34_a_restore_refuses_nan_on_request_and_changes_nothing(models: Callable[..., Any], tmp_path: Path) -> None:
    engine = models()
    say(engine, 4, PROMPT)
    good = kvsnap.capture(engine)
    bad = good.layers[1].tensors[1]
    values = bad.array.copy()
    values[0, 2, 3] = np.inf
    layer = replace(good.layers[1], tensors=(good.layers[1].tensors[0], Tensor(bad.spec, values)))
    kvsnap.save(replace(good, layers=(good.layers[0], layer, *good.layers[2:])), tmp_path / "a")
    with pytest.raises(FormatError, match=r"layer 1: .* 0 NaN and 1 infinite values, first in row 2"):
        kvsnap.restore(kvsnap.load(tmp_path / "a"), engine, non_finite="refuse")
    assert same(kvsnap.capture(engine), good) == []
    kvsnap.restore(good, engine, non_finite="refuse")
    assert kvsnap.restore(good, engine, non_finite="report").notes == ()
    told = kvsnap.restore(kvsnap.load(tmp_path / "a"), engine, non_finite="report").notes
    assert "values that are no numbers" in told[0]
    kvsnap.restore(kvsnap.load(tmp_path / "a"), engine)  # what was saved is what comes back
    assert np.isinf(kvsnap.capture(engine).layers[1].tensors[1].array[0, 2, 3])


# -- names and neighbours -------------------------------------------------------------------------------------


def writers(name: str) -> Callable[[Path], object]:
    if name == "session":
        return lambda path: Session.open(path).close()
    if name == "coli file":
        return lambda path: ColiFile.open(path, GEOMETRY, create=True).close()
    if name == "convert":
        return lambda path: kvsnap.convert(ROOT / "tests" / "data" / "tiny.kvsnap", path, format="native")
    return lambda path: kvsnap.save(latent(3), path, **options(name))


WRITERS = [*FORMATS, "session", "coli file", "convert"]


@linux
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("target", ["file", "directory", "dangling"])
def test_b35_a_link_is_not_followed_out(tmp_path: Path, name: str, target: str) -> None:
    outside, store = tmp_path / "outside", tmp_path / "store"
    outside.mkdir()
    store.mkdir()
    (outside / "file").write_bytes(b"precious")
    (outside / "directory").mkdir()
    link = store / "a.kvsnap"
    link.symlink_to(f"../outside/{target}")
    before = sorted((p.name, p.is_file() and p.read_bytes()) for p in outside.iterdir())
    with pytest.raises(KvsnapError):
        writers(name)(link)
    assert sorted((p.name, p.is_file() and p.read_bytes()) for p in outside.iterdir()) == before
    assert link.is_symlink()
    assert [p.name for p in store.iterdir()] == ["a.kvsnap"]


@linux
@pytest.mark.parametrize("name", WRITERS)
def test_b35_a_pipe_a_socket_and_a_device_are_neither_waited_for_nor_replaced(tmp_path: Path, name: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    begun = time.monotonic()
    for path in (pipe, Path("/dev/null"), Path("/dev/zero"), tmp_path):
        kind = path.stat().st_mode
        with pytest.raises(KvsnapError):
            writers(name)(path)
        assert path.stat().st_mode == kind
        with pytest.raises(KvsnapError):
            kvsnap.load(path)
        with pytest.raises(KvsnapError):
            kvsnap.inspect(path)
    assert time.monotonic() - begun < 60, "nothing was waited for"
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]


ODD = [
    "Кириллица/снимок",
    "お遊び/ü",
    "a b/ c ",
    "dots/...",
    "-rf/--help",
    "new\nline/tab\t",
    "'quote\"/$HOME",
    "e\u0301/é",
]


@linux
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("place", ODD)
def test_b35_directories_and_names_of_any_script(tmp_path: Path, name: str, place: str) -> None:
    path = tmp_path / place
    path.parent.mkdir(parents=True)
    undecodable = os.fsencode(path.parent) + b"/\xff\xfe.kvsnap"
    with open(undecodable, "wb") as file:
        file.write(b"beside")
    (path.parent / "dangling").symlink_to("nowhere")
    writers(name)(path)
    found = kvsnap.load(path)
    if name in FORMATS:
        assert content(found) == content(latent(3))
    assert kvsnap.inspect(path).path == str(path)
    assert kvsnap.verify(path).ok
    assert sorted(os.listdir(os.fsencode(path.parent))) == sorted(
        [os.fsencode(path.name), b"\xff\xfe.kvsnap", b"dangling"]
    )
    with open(undecodable, "rb") as file:
        assert file.read() == b"beside"


@linux
def test_b35_a_name_that_cannot_be_decoded_is_a_name(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe.kvsnap")
    kvsnap.save(latent(3), path)
    assert content(kvsnap.load(path)) == content(latent(3))
    with pytest.raises(DamagedError) as caught:
        with open(path, "r+b") as file:
            file.truncate(700)
        kvsnap.load(path)
    assert str(caught.value).encode("utf-8", "backslashreplace")
    done = subprocess.run(
        [sys.executable, "-m", "kvsnap", "info", os.fsencode(path)], capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "utf-8"}, check=False,
    )  # fmt: skip
    assert done.returncode == 6, done.stderr


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 300])
def test_b35_illegal_names_are_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    path = f"{tmp_path}/{name}" if name else ""
    for work in WRITERS:
        with pytest.raises(KvsnapError):
            writers(work)(path)  # type: ignore[arg-type] # text, as Path would change or refuse it
    with pytest.raises(KvsnapError):
        kvsnap.load(path)
    assert list(tmp_path.iterdir()) == []


# -- shards ---------------------------------------------------------------------------------------------------


@pytest.mark.engine
def test_b19_shards_swapped_or_missing_are_refused_and_right_ones_are_exact(
    models: Callable[[], Any], tmp_path: Path
) -> None:
    engine = models()
    say(engine, 4, PROMPT)
    kvsnap.save(kvsnap.capture(engine, settle=True), tmp_path / "whole.kvsnap")
    reference = say(engine, 8)
    for n in (2, 4):
        for i, shard in enumerate(kvsnap.split(kvsnap.load(tmp_path / "whole.kvsnap"), n)):
            kvsnap.save(shard, tmp_path / f"{i}-of-{n}.kvsnap")
    first, second = (kvsnap.load(tmp_path / f"{i}-of-2.kvsnap") for i in range(2))
    with pytest.raises(InputError, match="position 0 holds another shard; expected shard 0 of 2, found shard 1 of 2"):
        kvsnap.join([second, first])
    with pytest.raises(InputError, match="shard 1 of 2 is missing"):
        kvsnap.join([first])
    with pytest.raises(InputError, match="position 1 is a shard of another count"):
        kvsnap.join([first, kvsnap.load(tmp_path / "1-of-4.kvsnap")])
    for n in (2, 4):
        joined = kvsnap.join([kvsnap.load(tmp_path / f"{i}-of-{n}.kvsnap") for i in range(n)])
        assert same(joined, kvsnap.load(tmp_path / "whole.kvsnap")) == []
        fresh = models()
        assert kvsnap.restore(joined, fresh).exact
        assert say(fresh, 8) == reference
    # Control: the heads of another rank in the place of one's own go on otherwise.
    layers = tuple(
        replace(x, tensors=tuple(Tensor(t.spec, t.array[::-1].copy()) for t in x.tensors)) for x in joined.layers
    )
    kvsnap.restore(replace(joined, layers=layers), fresh)
    assert say(fresh, 8) != reference


# -- edits of the middle --------------------------------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_b24_two_spans_of_the_middle_are_removed_and_the_rest_closes_up(
    dtype: str, models: Callable[[], Any], tmp_path: Path
) -> None:
    engine = models(dtype=dtype)
    if not hasattr(engine.model.config, "rope_parameters"):
        pytest.skip("before transformers 5 the scaling of the rope is told otherwise")
    engine.prefill(list(b"abcdefghj"))
    made = kvsnap.capture(engine)
    kvsnap.save(kvsnap.remove(made, [(2, 4), (6, 7)], engine=engine), tmp_path / "edited.kvsnap")
    edited = kvsnap.load(tmp_path / "edited.kvsnap")
    assert bytes(edited.tokens) == b"abefhj"
    assert edited.row_positions(0, edited.n_rows).tolist() == [0, 1, 2, 3, 4, 5]
    assert edited.token_offset == 6
    again = models(dtype=dtype)
    again.prefill(list(b"abefhj"))
    anew = kvsnap.capture(again)
    rows = [0, 1, 4, 5, 7, 8]
    for number, (old, new) in enumerate(zip(made.tensors(), edited.tensors(), strict=True)):
        assert new.array[:, :2].tobytes() == old.array[:, :2].tobytes()  # a and b saw nothing that is gone
        if old.role == "v":
            assert new.array.tobytes() == old.array[:, rows].tobytes()
        elif number == 0:  # layer 0 does not depend on other tokens: within the tolerance, and not without rotation
            expected = next(iter(anew.tensors())).array.astype(np.float64)
            limit = np.abs(expected).max() * (2e-5 if dtype == "float32" else 2**-6)
            assert np.abs(new.array.astype(np.float64) - expected).max() <= limit
            assert np.abs(old.array[:, rows].astype(np.float64) - expected).max() > 10 * limit
    fresh = models(dtype=dtype)
    done = kvsnap.restore(edited, fresh)
    assert not done.exact
    assert "the history was edited (tokens 2:4, 6:7 of 9 were removed)" in " ".join(done.notes)
    assert len(say(fresh, 5)) == 5
    assert kvsnap.restore(kvsnap.remove(made, [(4, 9)]), fresh).notes == (
        "no logits are stored, so the last row is evaluated again",
    )  # a cut of the end is not an edit


@pytest.mark.parametrize("positions", ["close", "keep"])
def test_b26_all_rows_of_a_fragmented_cache_come_back_once_in_order(positions: Any, tmp_path: Path) -> None:
    made = synthetic(range(20))
    rope = kvsnap.Rope(np.asarray([0.5, 0.1], np.float32))
    edited = kvsnap.remove(made, [(3, 5), (9, 10), (12, 17)], rope=rope, positions=positions)
    kvsnap.save(edited, tmp_path / "a.kvsnap")
    back = kvsnap.load(tmp_path / "a.kvsnap")
    assert same(back, edited) == []
    assert back.tokens == (0, 1, 2, 5, 6, 7, 8, 10, 11, 17, 18, 19)
    places = back.row_positions(0, back.n_rows).tolist()
    assert places == (list(range(12)) if positions == "close" else list(back.tokens))
    values = made.layers[0].tensors[1].array
    assert back.layers[0].tensors[1].array.tobytes() == values[:, list(back.tokens)].tobytes()

"""Edits of the middle, without a model: rows that stay, positions, rotated keys, labels, and what is refused."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsnap
from kvsnap.cli import run
from kvsnap.editing import EDITED, Rope, needs_rope, remove
from kvsnap.errors import InputError, UnsupportedError
from kvsnap.layout import Layer, PositionRun, Run, Snapshot, Tensor, numpy_dtype
from kvsnap.session import Session
from synthetic import SAMPLER, same, snapshot, spec

TOKENS = tuple(range(20, 30))
HEADS, DIM = 2, 12
FREQUENCIES = np.asarray([1.0, 0.5, 0.21, 0.07], np.float32)  # of 8 of the 12 values of a row
STEPS = {"float32": 2e-6, "float64": 1e-12, "bfloat16": 2**-7, "float16": 2**-10}
"""How far a rotated value may be from the exact one, as a part of the largest of its row."""


def turned(rows: Any, positions: Any, pairing: str, width: int = 8) -> Any:
    """The definition, in complex numbers: pair `i` at position `p` times exp(i p f)."""
    out = np.array(rows, np.float64)
    half = width // 2
    one = np.arange(half) if pairing == "half" else np.arange(0, width, 2)
    two = one + half if pairing == "half" else one + 1
    angles = np.outer(positions, FREQUENCIES[:half].astype(np.float64))
    pairs = (out[..., one] + 1j * out[..., two]) * np.exp(1j * angles)
    out[..., one], out[..., two] = pairs.real, pairs.imag
    return out


def plain_rows(n: int, seed: int = 5) -> Any:
    return np.random.default_rng(seed).normal(size=(HEADS, n, DIM))


def rotated(
    *, pairing: str = "half", dtype: str = "float32", behind: bool = False, n_pending: int = 0, places: Any = None,
    **fields: Any,
) -> Snapshot:  # fmt: skip
    """One layer whose keys are `plain_rows`, rotated by their positions, and whose values are not."""
    n = len(TOKENS) - n_pending
    places = np.arange(n) if places is None else places
    k = turned(plain_rows(n), places, pairing).astype(numpy_dtype(dtype))
    v = plain_rows(n, 6).astype(numpy_dtype(dtype))
    form: dict[str, Any] = {"pairing": pairing}
    if behind:  # heads behind the rows
        form |= {"axes": ("row", "head", "dim"), "shape": (0, HEADS, DIM), "row_axis": 0}
        k, v = np.swapaxes(k, 0, 1).copy(), np.swapaxes(v, 0, 1).copy()
    tensors = tuple(
        Tensor(spec(i, 0, role, HEADS, DIM, dtype, **form), values)
        for i, (role, values) in enumerate((("k", k), ("v", v)))
    )
    made = snapshot(
        TOKENS, n_pending=n_pending, n_prompt=6, heads=HEADS, dim=DIM, sampler=SAMPLER, text="words", **fields
    )
    return replace(made, layers=(Layer(index=0, kind="attention", tensors=tensors, num_query_heads=4),))


def keys(s: Snapshot) -> Any:
    t = s.layers[0].tensors[0]
    values = t.array.astype(np.float64)
    return np.swapaxes(values, 0, 1) if t.spec.row_axis == 0 else values


def off(found: Snapshot, kept: list[int], places: list[int], pairing: str) -> float:
    """How far the keys are from the rows `kept` at their new positions, as a part of the largest value."""
    expected = turned(plain_rows(len(TOKENS))[:, kept], places, pairing)
    return float(np.abs(keys(found) - expected).max() / np.abs(expected).max())


# -- the keys ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_keys_are_those_of_the_new_positions(pairing: Any, dtype: str, behind: bool) -> None:
    made = rotated(pairing=pairing, dtype=dtype, behind=behind)
    found = remove(made, [(2, 4), (6, 7)], rope=Rope(FREQUENCIES, pairing))
    kept = [0, 1, 4, 5, 7, 8, 9]
    assert found.tokens == tuple(TOKENS[i] for i in kept)
    assert (found.positions, found.token_offset, found.n_rows) == ((PositionRun(0, 7),), 7, 7)
    assert off(found, kept, [*range(7)], pairing) < STEPS[dtype]
    axis = 0 if behind else 1
    before, after = made.layers[0].tensors, found.layers[0].tensors
    assert after[1].array.tobytes() == np.take(before[1].array, kept, axis).tobytes()  # values are not rotated
    for part in (0, 1):  # rows before the first removed one are untouched
        assert np.take(after[part].array, [0, 1], axis).tobytes() == np.take(before[part].array, [0, 1], axis).tobytes()
    assert keys(found)[..., 8:].tobytes() == keys(made)[:, kept, 8:].tobytes()  # the part of a row without rotation
    assert after[0].spec == before[0].spec


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        ("wrong direction", Rope(-FREQUENCIES)),
        ("wrong pairing", Rope(FREQUENCIES, "interleaved")),
        ("too narrow", Rope(FREQUENCIES[:3])),
        ("other frequencies", Rope(FREQUENCIES * np.float32(1.05))),
        ("not at all", Rope(FREQUENCIES * 0)),
    ],
)
def test_a_wrong_rotation_is_far_off(name: str, rope: Rope) -> None:
    made = rotated()
    layer = made.layers[0]
    tensors = tuple(Tensor(replace(t.spec, pairing=""), t.array) for t in layer.tensors)  # nothing says the pairing
    made = replace(made, layers=(replace(layer, tensors=tensors),))
    kept = [0, 1, 4, 5, 7, 8, 9]
    assert off(remove(made, [(2, 4), (6, 7)], rope=rope), kept, [*range(7)], "half") > 0.01, name
    assert off(remove(made, [(2, 4), (6, 7)], rope=Rope(FREQUENCIES)), kept, [*range(7)], "half") < 2e-6


def test_positions_that_jump_close_up_by_what_was_removed() -> None:
    places = np.array([0, 1, 2, 3, 4, 40, 41, 42, 43, 44])
    made = rotated(places=places, positions=(PositionRun(0, 5), PositionRun(40, 5)), token_offset=45)
    found = remove(made, [(1, 3), (7, 8)], rope=Rope(FREQUENCIES))
    assert found.positions == (PositionRun(0, 3), PositionRun(38, 4))
    assert found.token_offset == 42
    assert off(found, [0, 3, 4, 5, 6, 8, 9], [0, 1, 2, 38, 39, 40, 41], "half") < 2e-6


def test_kept_positions_jump_and_nothing_is_rotated() -> None:
    made = rotated()
    found = remove(made, [(2, 4), (6, 7)], positions="keep")
    assert found.positions == (PositionRun(0, 2), PositionRun(4, 2), PositionRun(7, 3))
    assert (found.token_offset, found.n_rows) == (10, 7)
    for a, b in zip(found.tensors(), made.tensors(), strict=True):
        assert a.array.tobytes() == b.array[:, [0, 1, 4, 5, 7, 8, 9]].tobytes()
        assert a.bound == math.inf  # still: the rows saw what was removed


# -- the rest of a snapshot ----------------------------------------------------------------------------------------


def test_what_else_an_edit_changes() -> None:
    made = rotated(n_pending=1, metadata={"title": "t"})
    found = remove(made, [(1, 2), (5, 7)], rope=Rope(FREQUENCIES))
    assert found.tokens == (20, 22, 23, 24, 27, 28, 29)
    assert (found.n_rows, found.n_pending, found.pending, found.token_offset) == (6, 1, (29,), 6)
    assert found.runs == (Run("prompt", 4), Run("generated", 3))
    assert (found.logits, found.text) == (None, None)
    assert (found.sampler, found.identity) == (made.sampler, made.identity)
    assert found.metadata == {"title": "t", EDITED: "tokens 1:2, 5:7 of 10 were removed"}
    again = remove(found, [(0, 1)], rope=Rope(FREQUENCIES))
    assert again.metadata[EDITED] == "tokens 1:2, 5:7 of 10 were removed; then tokens 0:1 of 7 were removed"
    assert made.tokens == TOKENS
    assert keys(made).tobytes() == keys(rotated(n_pending=1)).tobytes()  # the snapshot itself is as it was


def test_a_cut_of_the_end_is_exact() -> None:
    made = rotated()
    assert same(remove(made, [(6, 10)]), made.truncate(6)) == []
    assert same(remove(made, [(6, 8), (8, 10)]), made.truncate(6)) == []
    assert remove(made, [(6, 10)]).bound == 0
    assert EDITED not in remove(made, [(6, 10)]).metadata
    assert remove(made, []) is made
    assert remove(made, [(0, 10)]).tokens == ()
    found = remove(made, [(2, 4), (8, 10)], rope=Rope(FREQUENCIES))
    apart = remove(made.truncate(8), [(2, 4)], rope=Rope(FREQUENCIES))
    assert same(found, replace(apart, metadata=found.metadata)) == []
    assert off(found, [0, 1, 4, 5, 6, 7], [*range(6)], "half") < 2e-6


def test_only_what_stands_behind_is_an_approximation() -> None:
    made = rotated(n_pending=2)
    end = remove(made, [(6, 8)])  # the last rows: what is pending is evaluated behind the others
    assert (end.n_rows, end.pending, end.token_offset, end.bound, end.logits) == (6, TOKENS[8:], 6, 0, None)
    assert EDITED not in end.metadata
    waiting = remove(made, [(8, 9)])  # a token that was not evaluated
    assert (waiting.n_rows, waiting.pending, waiting.token_offset, waiting.bound) == (8, (29,), 8, 0)
    assert waiting.logits is made.logits
    assert remove(made, [(8, 9)], positions="keep").token_offset == 9
    assert remove(made, [(6, 8)], positions="keep").token_offset == 8
    nothing = remove(made, [(0, 8)])
    assert (nothing.n_rows, nothing.positions, nothing.pending, nothing.bound) == (0, (), TOKENS[8:], 0)


def test_ids_that_are_not_stored_stay_in_front() -> None:
    made = rotated()
    partly = replace(made, tokens=TOKENS[3:], runs=(Run("prompt", 7),))
    found = remove(partly, [(1, 2)], rope=Rope(FREQUENCIES))
    assert (found.tokens, found.n_rows) == ((*TOKENS[3:4], *TOKENS[5:]), 9)
    assert off(found, [0, 1, 2, 3, 5, 6, 7, 8, 9], [*range(9)], "half") < 2e-6


# -- labels --------------------------------------------------------------------------------------------------------


def test_the_label_outlives_files_and_sessions(tmp_path: Path) -> None:
    found = remove(rotated(metadata={"title": "t"}), [(2, 4)], rope=Rope(FREQUENCIES))
    report = kvsnap.save(found, tmp_path / "a.kvsnap")
    assert (report.exact, report.bound) == (False, math.inf)
    back = kvsnap.load(tmp_path / "a.kvsnap")
    assert same(back, found) == []
    assert back.bound == math.inf
    assert kvsnap.inspect(tmp_path / "a.kvsnap").exact is False
    assert kvsnap.verify(tmp_path / "a.kvsnap").ok
    with Session.open(tmp_path / "s.kvsnap") as session:
        session.append(found)
        assert session.load().bound == math.inf
        assert EDITED in session.load().metadata
    for options in ({"codec": "q8"}, {"format": "safetensors"}):
        data = kvsnap.dumps(found, **options)
        assert kvsnap.loads(data).bound == math.inf


def test_the_reason_is_told_in_plain_words() -> None:
    from kvsnap.labels import inexact_because

    found = remove(rotated(), [(2, 4)], rope=Rope(FREQUENCIES))
    assert inexact_because(found) == (
        "the history was edited (tokens 2:4 of 10 were removed): the rows behind were computed while that was there"
    )
    assert inexact_because(replace(found, metadata={})) == "values may be off by an unknown amount"
    assert "edited" not in inexact_because(remove(rotated(), [(6, 10)]))


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spans",
    [
        [(4, 2)], [(3, 3)], [(-1, 2)], [(8, 11)], [(4, 6), (2, 3)], [(2, 5), (4, 6)], [(2, 5), (2, 5)], [(1,)],
        [(1, 2, 3)], [5], [("1", "2")], [(0.0, 2.0)],
    ],
)  # fmt: skip
def test_spans_that_are_none(spans: Any) -> None:
    made = rotated()
    with pytest.raises(InputError, match="span"):
        remove(made, spans, rope=Rope(FREQUENCIES))


def with_tensor(role: str, **fields: Any) -> Callable[[Snapshot], Snapshot]:
    def make(s: Snapshot) -> Snapshot:
        shape = {"axes": ("head", "row", "dim"), "shape": (2, 0, 3)} | fields
        description = spec(9, 1, role, 2, 3, "float32", **shape)
        n = 5 if description.tokens_per_row == 2 else 10
        values = np.zeros(description.shape_with(n if description.row_axis >= 0 else 1), np.float32)
        layer = Layer(index=1, kind="attention", tensors=(Tensor(description, values),), num_query_heads=4)
        return replace(s, layers=(*s.layers, layer))

    return make


REFUSED: dict[str, tuple[Callable[[Snapshot], Snapshot], str]] = {
    "index": (with_tensor("index"), r"layer 1: layer1.index: rows of the kind index cannot be removed"),
    "window": (with_tensor("k", growth="window", window=8), r"layer 1: layer1.k keeps a window of 8 rows"),
    "state": (with_tensor("recurrent", axes=("head", "dim"), shape=(2, 3), growth="replaced", row_axis=-1),
              "layer 1: layer1.recurrent is a state of all tokens at once"),
    "compressed": (with_tensor("k", tokens_per_row=2), "layer 1: layer1.k has one row for 2 tokens"),
    "codes": (with_tensor("code"), "layer 1: layer1.code: rows of the kind code cannot be removed"),
    "draft": (with_tensor("draft_k"), "layer 1: layer1.draft_k: rows of the kind draft_k"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_cannot_be_removed_are_refused_by_layer(name: str) -> None:
    make, message = REFUSED[name]
    made = make(rotated())
    for positions in ("close", "keep"):
        with pytest.raises(UnsupportedError, match=message):
            remove(made, [(2, 4)], rope=Rope(FREQUENCIES), positions=positions)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=message):
        needs_rope(made, [(2, 4)])
    assert remove(rotated(), [(2, 4)], rope=Rope(FREQUENCIES)).n_rows == 8  # the control


def test_positions_without_rows_are_not_looked_at_one_by_one() -> None:
    """A file of 1 KB can count two thousand million positions that it does not hold."""
    made = replace(snapshot(TOKENS), layers=(), n_rows=2**31 - 1, positions=(PositionRun(0, 2**31 - 1),))
    tracemalloc.start()
    for call in (remove, needs_rope):
        with pytest.raises(UnsupportedError, match="too many positions to edit"):
            call(made, [(2, 4)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_keys_that_cannot_be_rotated_are_refused_and_it_is_said_what_to_give() -> None:
    made = rotated()

    def stated(**fields: Any) -> Snapshot:
        layer = made.layers[0]
        tensors = tuple(Tensor(replace(t.spec, **fields), t.array) for t in layer.tensors)
        return replace(made, layers=(replace(layer, tensors=tensors),))

    with pytest.raises(UnsupportedError, match=r"layer 0: layer0.k .*give them \(rope=Rope.*engine=.*positions="):
        remove(made, [(2, 4)])
    for state in ("unknown", "before"):
        with pytest.raises(
            UnsupportedError, match=rf"layer 0: .*not known.*expected rope after, or none, found {state}"
        ):
            remove(stated(rope=state), [(2, 4)], rope=Rope(FREQUENCIES))
        assert remove(stated(rope=state), [(2, 4)], positions="keep").n_rows == 8
    none = remove(stated(rope="none"), [(2, 4)])
    assert (
        none.layers[0].tensors[0].array.tobytes() == made.layers[0].tensors[0].array[:, [0, 1, *range(4, 10)]].tobytes()
    )
    with pytest.raises(UnsupportedError, match="pairs other values; expected half, found interleaved"):
        remove(made, [(2, 4)], rope=Rope(FREQUENCIES, "interleaved"))
    with pytest.raises(UnsupportedError, match="more values than a row has; expected 12, found 14"):
        remove(made, [(2, 4)], rope=Rope(np.ones(7, np.float32)))
    with pytest.raises(InputError, match="one for each; expected 1, found 2"):
        remove(made, [(2, 4)], rope=[Rope(FREQUENCIES)] * 2)
    with pytest.raises(InputError, match="close or keep"):
        remove(made, [(2, 4)], positions="shut")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="partial capture"):
        remove(replace(made, row_start=1), [(2, 4)])
    with pytest.raises(InputError, match="shard"):
        remove(kvsnap.split(made, 2)[0], [(2, 4)])


def test_one_rope_for_each_layer() -> None:
    one = rotated()
    tensors = tuple(Tensor(replace(t.spec, id=7 + i, layer=1), t.array) for i, t in enumerate(one.tensors()))
    both = replace(one, layers=(*one.layers, Layer(index=1, kind="attention", tensors=tensors, num_query_heads=4)))
    found = remove(both, [(2, 4)], rope=[Rope(FREQUENCIES), Rope(FREQUENCIES * np.float32(2))])
    kept = [0, 1, *range(4, 10)]
    assert off(found, kept, [*range(8)], "half") < 2e-6
    other = replace(found, layers=(replace(found.layers[1], index=0),))
    assert off(other, kept, [*range(8)], "half") > 0.1
    with pytest.raises(UnsupportedError, match=r"layer 1: layer0.k has to be rotated"):
        remove(both, [(2, 4)], rope=[Rope(FREQUENCIES), None])


@pytest.mark.parametrize(
    "given",
    [np.ones(4), np.ones((2, 2), np.float32), np.zeros(0, np.float32), np.full(2, np.nan, np.float32), [1.0, 0.5]],
)
def test_frequencies_that_are_none(given: Any) -> None:
    with pytest.raises(InputError, match="frequencies"):
        Rope(given)
    with pytest.raises(InputError, match="half or interleaved"):
        Rope(FREQUENCIES, "")


def test_what_needs_a_rope() -> None:
    made = rotated(n_pending=1)
    assert needs_rope(made, [(2, 4)])
    assert not needs_rope(made, [(2, 10)])  # the end
    assert not needs_rope(made, [(7, 9)])  # nothing evaluated stands behind
    assert not needs_rope(made, [])
    with pytest.raises(InputError):
        needs_rope(made, [(2, 40)])


# -- on the command line -------------------------------------------------------------------------------------------


def call(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, Any, str]:
    code = run([str(a) for a in args])
    out, err = capsys.readouterr()
    return code, json.loads(out) if "--json" in args else out, err


def test_edit_on_the_command_line_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "a.kvsnap", tmp_path / "b.kvsnap"
    made = rotated()
    kvsnap.save(made, file)
    args = ("edit", file, "--remove", "2:4", "--remove", "6:7", "-o", out)
    code, data, _ = call(capsys, *args, "--keep-positions", "--json")
    assert code == 0
    assert (data["n_tokens"], data["n_tokens_before"], data["exact"]) == (7, 10, False)
    assert data["positions"] == [[0, 2], [4, 2], [7, 3]]
    assert same(kvsnap.load(out), remove(made, [(2, 4), (6, 7)], positions="keep")) == []
    assert "an approximation" in call(capsys, "info", out)[1]
    assert "tokens 2:4, 6:7 of 10 were removed" in call(capsys, "info", out)[1]
    assert call(capsys, *args, "--keep-positions")[0] == 2  # it is there
    code, text, _ = call(capsys, "edit", file, "--remove", "6:10", "-o", out, "--overwrite")
    assert code == 0
    assert "6 tokens of 10" in text
    assert text.strip().endswith("; exact")
    assert same(kvsnap.load(out), made.truncate(6)) == []
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for wrong in ("4:2", "x", "1", "2:99", "-1:3", "1:2:3", ""):
        code, data, _ = call(capsys, "edit", file, f"--remove={wrong}", "-o", out, "--overwrite", "--json")
        assert (code, data["error"]["kind"]) == (2, "input"), wrong
    assert call(capsys, "edit", file, "-o", out)[0] == 2
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before

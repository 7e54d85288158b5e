"""Layers of codes without a model: what LAYOUT says, rows out of codes, and what a session tells of new codes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsnap
from kvsnap.errors import CompatibilityError, FormatError, UnsupportedError
from kvsnap.layout import Layer, Snapshot, Tensor, TensorSpec, numpy_dtype
from kvsnap.quantised import Quantisation, rows_of, shape_of
from spec_file import Minimal, SpecReader
from synthetic import snapshot

HEADS, WIDTH, GROUP = 2, 6, 4
CASES = [
    Quantisation(kind, bits, GROUP, axis, axis, 8)
    for kind, sizes, axes in (("hqq", (1, 2, 3, 4, 8), (0, 1)), ("quanto", (2, 4), (0, -1)))
    for bits, axis in itertools.product(sizes, axes)
]


def packed(how: Quantisation, matrix: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The matrix of values packed as docs/spec/file.md says, value by value."""
    per = {1: 8, 2: 4, 3: 10, 4: 2, 8: 1}[how.bits]
    n = math.ceil(len(matrix) / per)
    out = np.zeros((n, matrix.shape[1]), dtype=np.int64)
    for i, row in enumerate(matrix.astype(np.int64)):
        # Row i stands in stored row i mod n, as its value number i div n: from the top for hqq, from the bottom else.
        number = i // n
        place = number if how.kind == "quanto" else per - 1 - number
        out[i % n] |= row << (how.bits * place)
    return out.astype(numpy_dtype("int32" if how.bits == 3 else "uint8"))


def layer_of(how: Quantisation, n_codes: int, n_residual: int, dtype: str = "float32", seed: int = 0) -> Layer:
    """A layer with random codes for `n_codes` rows and `n_residual` rows as they are."""
    draw = np.random.default_rng(seed)
    tensors = []
    for of_values in range(2):
        axis = how.axis_value if of_values else how.axis_key
        by_rows = axis == (1 if how.kind == "hqq" else 0)
        groups = HEADS * n_codes * WIDTH // GROUP
        matrix = draw.integers(0, 2**how.bits, (groups, GROUP) if by_rows else (GROUP, groups))
        size = (groups, 1) if by_rows else (1, groups)
        residual = draw.normal(size=(HEADS, n_residual, WIDTH)).astype(numpy_dtype(dtype))
        values = {
            "code": packed(how, matrix),
            "scale": draw.uniform(0.1, 1, size).astype(numpy_dtype(dtype)),
            "zero": draw.uniform(0, 3, size).astype(numpy_dtype(dtype)),
            "residual": residual,
        }
        for role, array in values.items():
            row = 1 if role == "residual" or not by_rows else 0
            shape = tuple(0 if place == row else length for place, length in enumerate(array.shape))
            axes = ("head", "row", "dim") if role == "residual" else ("row", "group") if by_rows else ("group", "row")
            spec = TensorSpec(
                id=len(tensors), name=f"layers.0.{'kv'[of_values]}_{role}", layer=0, role=role,
                dtype=str(array.dtype), axes=axes, shape=shape, growth="replaced", row_axis=row,
            )  # fmt: skip
            tensors.append(Tensor(spec, array))
    return Layer(index=0, kind="attention", tensors=tuple(tensors), num_query_heads=4, quantisation=how.text)


def by_hand(how: Quantisation, layer: Layer, of_values: bool) -> np.ndarray[Any, Any]:
    """The rows of a layer, one number at a time, from what docs/spec/file.md says."""
    code, scale, zero, residual = (
        [t for t in layer.tensors if t.role == role][of_values].array for role in ("code", "scale", "zero", "residual")
    )
    axis = how.axis_value if of_values else how.axis_key
    by_rows = axis == (1 if how.kind == "hqq" else 0)
    groups = scale.size
    n_codes = groups * GROUP // (HEADS * WIDTH)
    per = {1: 8, 2: 4, 3: 10, 4: 2, 8: 1}[how.bits]
    flat = np.zeros(groups * GROUP, dtype=residual.dtype)
    for group, member in itertools.product(range(groups), range(GROUP)):
        row, column = (group, member) if by_rows else (member, group)
        number = row // len(code)
        place = number if how.kind == "quanto" else per - 1 - number
        bits = (int(code[row % len(code), column]) >> (how.bits * place)) % 2**how.bits
        value = np.array(bits, dtype=residual.dtype)
        s, z = scale.reshape(-1)[group], zero.reshape(-1)[group]
        result = (value - z) * s if how.kind == "hqq" else s * value - z
        if by_rows:
            at = group * GROUP + member
        elif how.kind == "hqq":
            at = member * groups + group
        else:  # the last axis: groups of one column of the rows stand side by side
            of_column, number = divmod(group, groups // WIDTH)
            at = (number * GROUP + member) * WIDTH + of_column
        flat[at] = result
    return np.concatenate([flat.reshape(HEADS, n_codes, WIDTH), residual], axis=1)


def of_codes(layer: Layer, n_rows: int) -> Snapshot:
    made = snapshot(range(1, n_rows + 1))
    return replace(made, layers=(layer,))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("how", CASES, ids=lambda how: f"{how.kind}-{how.bits}-{how.axis_key}")
def test_rows_out_of_codes_are_those_of_the_specification(how: Quantisation, dtype: str) -> None:
    layer = layer_of(how, 8, 3, dtype)
    for of_values in (False, True):
        found = rows_of(layer, of_values=of_values)
        assert found.dtype == numpy_dtype(dtype)
        assert found.tobytes() == by_hand(how, layer, of_values).tobytes()
    made = of_codes(layer, 11)
    assert (made.num_heads, made.head_dim, made.seq_len, made.num_query_heads) == (HEADS, WIDTH, 11, 4)
    head = made.head(0, 1)
    assert head is not None
    assert np.array_equal(head.v, by_hand(how, layer, True)[1].astype(np.float32))
    assert head.positions.tolist() == list(range(11))
    assert made.head(0, HEADS) is None


@pytest.mark.parametrize("how", CASES, ids=lambda how: f"{how.kind}-{how.bits}-{how.axis_key}")
def test_layers_of_codes_go_through_a_file(how: Quantisation, tmp_path: Path) -> None:
    made = of_codes(layer_of(how, 8, 3), 11)
    kvsnap.save(made, tmp_path / "a.kvsnap", codec="q8")  # codes are never encoded again
    loaded = kvsnap.load(tmp_path / "a.kvsnap")
    assert loaded.bound == 0
    assert loaded.layers[0].quantisation == how.text
    assert Quantisation.of(loaded.layers[0].quantisation) == how
    for a, b in zip(made.tensors(), loaded.tensors(), strict=True):
        assert (a.spec, a.array.tobytes()) == (b.spec, b.array.tobytes())
    found = SpecReader((tmp_path / "a.kvsnap").read_bytes()).content()
    assert found["layout"]["layers"][0]["quantisation"] == how.text
    assert found["tensors"]["layers.0.k_code"].tobytes() == made.layers[0].tensors[0].array.tobytes()
    info = kvsnap.inspect(tmp_path / "a.kvsnap")
    assert (info.num_heads, info.head_dim, info.dtype) == (HEADS, WIDTH, "float32")


def test_a_file_that_another_writer_made_is_read() -> None:
    m = Minimal()
    m.layout["layers"][0]["quantisation"] = '{"bits":8,"kind":"fp8"}'
    assert kvsnap.loads(m.build()).layers[0].quantisation == '{"bits":8,"kind":"fp8"}'
    m.layout["layers"][0]["quantisation"] = 7
    with pytest.raises(FormatError, match="quantisation is not valid"):
        kvsnap.loads(m.build())


def test_without_codes_nothing_of_it_is_written() -> None:
    layout = SpecReader(kvsnap.dumps(snapshot(range(1, 5)))).content()["layout"]
    assert "quantisation" not in layout["layers"][0]


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "{}", "7", '{"kind":"other","bits":4}', '{"kind":"hqq","bits":5,"group":8}',
        '{"kind":"hqq","bits":4,"group":0}', '{"kind":"hqq","bits":4,"group":8,"axis_key":-1}',
        '{"kind":"quanto","bits":4,"group":8,"axis_value":1}', '{"kind":"fp8","bits":4}', '{"kind":"fp8","more":1}',
        '{"kind":"hqq","bits":4.0,"group":8}', '{"kind":"hqq","bits":true,"group":8}', '{"kind":["hqq"],"bits":4}',
    ],
)  # fmt: skip
def test_a_quantisation_that_is_not_known_is_refused(text: str) -> None:
    with pytest.raises((FormatError, UnsupportedError), match="quantisation of a layer"):
        Quantisation.of(text)
    layer = replace(layer_of(CASES[0], 8, 1), quantisation=text or "?")
    with pytest.raises((FormatError, UnsupportedError), match="quantisation of a layer"):
        of_codes(layer, 9).head(0, 0)


def test_codes_that_do_not_fit_their_scales_are_refused() -> None:
    how = CASES[1]
    layer = layer_of(how, 8, 1)
    for role in ("code", "scale", "zero", "residual"):
        for change in (lambda t: None, lambda t: Tensor(t.spec, np.take(t.array, range(1), axis=t.spec.row_axis))):
            tensors = [change(t) if t.role == role and t.name.startswith("layers.0.k") else t for t in layer.tensors]
            wrong = replace(layer, tensors=tuple(t for t in tensors if t is not None))
            if role == "residual" and change(layer.tensors[0]) is not None:
                continue  # fewer rows behind the codes are as good as any
            with pytest.raises(FormatError, match=r"do not fit each other|by two of each"):
                rows_of(wrong, of_values=False)
    for role in ("code", "scale", "zero"):  # never computed with numbers of another kind
        wrong = replace(layer, tensors=tuple(in_another_dtype(t) if t.role == role else t for t in layer.tensors))
        with pytest.raises(FormatError, match="in another dtype"):
            rows_of(wrong, of_values=True)
    for width in (0, 5):
        residual = next(t for t in layer.tensors if t.role == "residual")
        spec = replace(residual.spec, shape=(HEADS, 0, width))
        other = Tensor(spec, np.zeros((HEADS, 1, width), dtype=np.float32))
        wrong = replace(layer, tensors=tuple(other if t is residual else t for t in layer.tensors))
        with pytest.raises(FormatError, match="do not fit each other"):
            rows_of(wrong, of_values=False)


def in_another_dtype(tensor: Tensor) -> Tensor:
    return Tensor(replace(tensor.spec, dtype="float64"), tensor.array.astype(np.float64))


def test_fp8_codes_that_do_not_fit_are_refused() -> None:
    def layer(codes: tuple[int, ...], scale: int = 1, dtype: str = "float8_e4m3fn") -> Layer:
        tensors = []
        for number, (role, kind, shape) in enumerate(
            [("residual", "float32", (2, 0, 6)), ("code", dtype, codes), ("scale", "float32", (scale,))] * 2
        ):
            row = 1 if role != "scale" else -1
            spec = TensorSpec(
                id=number, name=f"{role}.{number}", layer=0, role=role, dtype=kind, axes=("a", "b", "c")[: len(shape)],
                shape=tuple(0 if axis == row else size for axis, size in enumerate(shape)), growth="replaced",
                row_axis=row,
            )  # fmt: skip
            tensors.append(Tensor(spec, np.ones(shape, dtype=numpy_dtype(kind))))
        return Layer(index=0, kind="attention", tensors=tuple(tensors), quantisation=Quantisation("fp8").text)

    assert rows_of(layer((2, 3, 6)), of_values=False).tolist() == np.ones((2, 3, 6)).tolist()
    for wrong in (layer((2, 3, 5)), layer((1, 3, 6)), layer((2, 3, 6), 2)):
        with pytest.raises(FormatError, match="do not fit each other"):
            rows_of(wrong, of_values=False)
    with pytest.raises(FormatError, match="in another dtype"):
        rows_of(layer((2, 3, 6), dtype="float8_e5m2"), of_values=False)


def test_a_session_tells_which_codes_were_made_anew(tmp_path: Path) -> None:
    how = CASES[1]

    def turn(n_codes: int, n_residual: int, seed: int = 0) -> Snapshot:
        return of_codes(layer_of(how, n_codes, n_residual, seed=seed), n_codes + n_residual)

    base = turn(8, 0)
    more = replace(turn(8, 1), layers=(with_codes_of(turn(8, 1).layers[0], base.layers[0]),))
    with kvsnap.Session.open(tmp_path / "a.kvsnap") as session:
        assert session.append(base).requantised == ()
        assert session.append(more).requantised == ()  # one row more that is no code
        report = session.append(turn(10, 0, seed=1))
        assert report.requantised == ("layers.0.k_code", "layers.0.v_code")
        assert report.to_dict()["requantised"] == ["layers.0.k_code", "layers.0.v_code"]
        one = turn(10, 1, seed=1)
        one = replace(one, layers=(with_codes_of(one.layers[0], turn(10, 0, seed=1).layers[0], only="k"),))
        assert session.append(one).requantised == ("layers.0.v_code",)
        other = replace(turn(12, 0), layers=(layer_of(replace(how, residual=9), 12, 0),))
        with pytest.raises(CompatibilityError, match="layer 0 of the snapshot is quantised otherwise") as raised:
            session.append(other)
        assert (raised.value.expected, raised.value.found) == (how.text, replace(how, residual=9).text)
        last = session.n_commits
        kept = replace(turn(8, 2), layers=(with_codes_of(turn(8, 2).layers[0], base.layers[0]),))
        assert session.append(kept, after=9).requantised == ()  # against the turn that it goes on from
        session.rewind(last)
    # Each turn has the codes of then.
    with kvsnap.Session.open(tmp_path / "a.kvsnap") as session:
        for end, made in ((11, one), (10, turn(10, 0, seed=1)), (9, more), (8, base)):
            session.truncate(end)
            assert [t.array.tobytes() for t in session.load().tensors()] == [t.array.tobytes() for t in made.tensors()]


def with_codes_of(layer: Layer, other: Layer, only: str = "kv") -> Layer:
    """The layer with the codes of the keys, of the values, or of both of another."""
    codes = {t.name: t for t in other.tensors if t.role == "code" and t.name.split(".")[-1][0] in only}
    return replace(layer, tensors=tuple(codes.get(t.name, t) for t in layer.tensors))


class _Counted:
    """A source that counts how often it is read."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values, self.reads = values, 0

    def array(self) -> np.ndarray[Any, Any]:
        self.reads += 1
        return self.values

    def read_into(self, out: np.ndarray[Any, Any]) -> None:
        np.copyto(out, self.array())


@pytest.mark.parametrize("how", [CASES[0], CASES[3], Quantisation("fp8")], ids=lambda how: how.text)
def test_a_pass_over_codes_keeps_none_in_memory_and_tells_shapes_unread(how: Quantisation) -> None:
    from kvsnap.inspection.values import head_rows

    plain = fp8_layer() if how.kind == "fp8" else layer_of(how, 16, 3)
    sources = [_Counted(t.array) for t in plain.tensors]
    tensors = tuple(
        Tensor(t.spec, source, start=t.start, n_rows=t.n_rows)
        for t, source in zip(plain.tensors, sources, strict=True)
    )  # fmt: skip
    held = replace(snapshot(range(1, 20)), layers=(replace(plain, tensors=tensors),), n_rows=19)
    found = list(head_rows(held))
    assert not any(source.reads for source in sources)
    for place, one in enumerate(found):
        wanted = rows_of(plain, of_values=bool(place))
        assert (one.n_heads, one.n_rows, one.dim) == wanted.shape == shape_of(plain, of_values=bool(place))
        assert (one.nbytes, one.first_row) == (wanted.nbytes, 19 - wanted.shape[1])
        for _ in range(2):
            assert np.array_equal(np.concatenate([b for _, b in one.blocks()], axis=1), np.asarray(wanted, np.float32))
    assert all(source.reads == 2 for source in sources)  # twice each: nothing was kept
    assert held.head(0, 0) is not None
    assert held.head(0, 1) is not None
    assert all(source.reads == 3 for source in sources)  # heads one by one do keep them


def fp8_layer() -> Layer:
    """A layer of float8 codes with a scale each for keys and values."""
    how, tensors = Quantisation("fp8"), []
    draw = np.random.default_rng(5)
    for name in "kv":
        arrays = {
            "code": draw.normal(size=(HEADS, 16, WIDTH)).astype(numpy_dtype("float8_e4m3fn")),
            "scale": np.array([0.5], np.float32),
            "residual": draw.normal(size=(HEADS, 3, WIDTH)).astype(np.float32),
        }
        for role, array in arrays.items():
            rows = role != "scale"
            spec = TensorSpec(
                id=len(tensors), name=f"layers.0.{name}_{role}", layer=0, role=role,
                dtype="float8_e4m3fn" if role == "code" else "float32",
                axes=("head", "row", "dim") if rows else ("one",),
                shape=(HEADS, 0, WIDTH) if rows else (1,), growth="replaced", row_axis=1 if rows else -1,
            )  # fmt: skip
            tensors.append(Tensor(spec, array))
    return Layer(index=0, kind="attention", tensors=tuple(tensors), num_query_heads=4, quantisation=how.text)

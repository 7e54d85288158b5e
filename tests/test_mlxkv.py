"""MLXKV001: the golden files value for value and byte for byte; new files judged by a reader of their own."""

from __future__ import annotations

import json
import math
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsnap.errors import FormatError, InputError, UnsupportedError
from kvsnap.formats import mlxkv, native
from kvsnap.formats.mlxkv import model
from kvsnap.formats.mlxkv.read import resolve, to_snapshot
from kvsnap.formats.mlxkv.shapes import head_shapes
from kvsnap.formats.mlxkv.tokens import history
from kvsnap.formats.mlxkv.values import encode_q8, values_of, widened
from kvsnap.formats.native.read import BytesReader
from kvsnap.formats.native.write import MemorySink
from kvsnap.identity import Identity
from kvsnap.layout import (
    Layer,
    PositionRun,
    RandomState,
    Run,
    Sampler,
    SamplerState,
    Snapshot,
    Tensor,
    TensorSpec,
    numpy_dtype,
)

GOLDEN = Path(__file__).parent / "data" / "mlxkv"
MANIFEST = json.loads((GOLDEN / "MANIFEST.json").read_text())["files"]
LOADED = [entry for entry in MANIFEST if entry["expect"] == "load"]
NAMES = [entry["name"] for entry in LOADED]
RESAVED = [(entry["name"], option) for entry in LOADED for option in entry["resave_identical_with"]]
EVERY = [*NAMES, "big_endian"]


def data_of(name: str) -> bytes:
    return (GOLDEN / f"{name}.mlxkv").read_bytes()


def content_of(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text())["content"]
    return content


# -- a reader of the format page, without anything of the package ----------------------------------------------


class SpecReader:
    """Reads a whole file by the table of the page and checks nothing; hex comes out little-endian."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.mark = data, 8, "<"

    def take(self, n: int) -> bytes:
        self.at += n
        return self.data[self.at - n : self.at]

    def u(self) -> int:
        return int(struct.unpack(f"{self.mark}I", self.take(4))[0])

    def i(self) -> int:
        return int(struct.unpack(f"{self.mark}i", self.take(4))[0])

    def ints(self) -> list[int]:
        return [self.i() for _ in range(self.u())]

    def raw(self, n: int, width: int) -> bytes:
        data = self.take(n * width)
        if self.mark == "<":
            return data
        return b"".join(data[k : k + width][::-1] for k in range(0, len(data), width))

    def plain(self, selector: int | None) -> dict[str, Any]:
        n = self.u()
        return {"selector": selector, "n": n, "f32_hex": self.raw(n, 4).hex()}

    def tensor(self) -> dict[str, Any]:
        selector = self.u()
        if selector == 0:
            return self.plain(0)
        n = self.u()
        if selector == 1:
            scale = self.raw(1, 4).hex()
            return {"selector": 1, "n": n, "scale_hex": scale, "codes": list(struct.unpack(f"{n}b", self.take(n)))}
        tag = self.take(self.u()).decode()
        width = {"float32": 4, "F32": 4, "q8-native": 1}.get(tag, 2)
        return {"selector": 2, "n": n, "stored_dtype": tag, "raw_hex": self.raw(self.u() // width, width).hex()}

    def layer(self, version: int) -> dict[str, Any]:
        out: dict[str, Any] = {"layer": self.i(), "cache_index": self.i()}
        n_heads = self.u()
        out |= {"cache_mode": "", "payloads_hex": [], "max_size": 0, "key_shape": [], "value_shape": []}
        out |= {"key_slab": None, "value_slab": None}
        if version >= 5:
            out["cache_mode"] = self.take(self.u()).decode()
            out["payloads_hex"] = [self.take(self.u()).hex() for _ in range(self.u())]
        if version >= 6:
            out["max_size"] = self.u()
        if version >= 4:
            out["key_shape"], out["key_slab"] = self.ints(), self.tensor()
            out["value_shape"], out["value_slab"] = self.ints(), self.tensor()
        read = self.tensor if version >= 3 else lambda: self.plain(None)
        out["heads"] = [{"key": read(), "value": read()} for _ in range(n_heads)]
        return out

    def read(self) -> dict[str, Any]:
        if struct.unpack("<I", self.data[8:12])[0] > 6:
            self.mark = ">"
        version = self.u()
        out: dict[str, Any] = {"version": version, "architecture_hex": self.take(self.u()).hex()}
        for name in ("num_layers", "num_heads", "seq_len", "head_dim", "num_query_heads"):
            out[name] = self.u()
        out["token_offset_stored"] = self.u() if version >= 2 else None
        out["tokens"] = self.ints()
        out["generated"] = self.ints() if version >= 2 else []
        out["layers"] = [self.layer(version) for _ in range(self.u())]
        out["logit_shape"] = self.ints() if version >= 2 else []
        out["logits_hex"] = self.raw(self.u(), 4).hex() if version >= 2 else ""
        out["trailing_bytes"] = len(self.data) - self.at
        return out


def differences(found: Any, expected: Any, where: str = "") -> list[str]:
    """Where two contents differ, over the keys that `found` has."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return [d for key in found for d in differences(found[key], expected.get(key), f"{where}/{key}")]
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        return [
            d for k, pair in enumerate(zip(found, expected, strict=True)) for d in differences(*pair, f"{where}/{k}")
        ]
    return [] if found == expected else [f"{where}: {str(found)[:60]} != {str(expected)[:60]}"]


@pytest.mark.parametrize("name", EVERY)
def test_the_reader_of_these_tests_reads_the_goldens(name: str) -> None:
    assert differences(SpecReader(data_of(name)).read(), content_of(name)) == []


# -- reading ---------------------------------------------------------------------------------------------------


def hex_of(values: np.ndarray[Any, Any]) -> str:
    return np.ascontiguousarray(values).tobytes().hex()


def told_by(tensor: Any) -> dict[str, Any]:
    """What the package says of a stored tensor, in the words of the sidecars."""
    assert isinstance(tensor, model.StoredTensor)
    out: dict[str, Any] = {"selector": tensor.selector, "n": tensor.n}
    if tensor.selector == 1:
        out["scale_hex"] = struct.pack("<I", tensor.scale_bits).hex()
        out["codes"] = np.frombuffer(tensor.data.read(), np.int8).tolist()
    if tensor.selector == 2:
        out |= {"stored_dtype": tensor.tag, "dtype": tensor.dtype}
    if tensor.dtype == "q8-native":
        return out | {"raw_hex": bytes(tensor.data.read()).hex()}
    values = values_of(tensor)
    if tensor.selector == 2:
        out["raw_hex"] = hex_of(values)
    return out | {"f32_hex": hex_of(widened(values))}


def told_by_file(file: model.File) -> dict[str, Any]:
    names = ("version", "num_layers", "num_heads", "seq_len", "head_dim", "num_query_heads")
    logits = b"" if file.logits is None else values_of(file.logits).tobytes()  # type: ignore[arg-type]
    return {
        **{name: getattr(file, name) for name in names},
        "architecture_hex": file.architecture.hex(),
        "token_offset_stored": file.token_offset,
        "token_offset": file.offset,
        "tokens": list(file.tokens),
        "generated": list(file.generated),
        "logit_shape": list(file.logit_shape),
        "logits_hex": logits.hex(),
        "trailing_bytes": 0 if file.trailing is None else file.trailing.length,
        "layers": [
            {
                "layer": e.layer, "cache_index": e.cache_index, "cache_mode": e.mode.decode(), "max_size": e.max_size,
                "payloads_hex": [bytes(p).hex() for p in e.payloads],
                "key_shape": list(e.key_shape), "value_shape": list(e.value_shape),
                "key_slab": None if e.key_slab is None else told_by(e.key_slab),
                "value_slab": None if e.value_slab is None else told_by(e.value_slab),
                "heads": [{"key": told_by(h.key), "value": told_by(h.value)} for h in e.heads],
            }
            for e in file.layers
        ],
    }  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
def test_the_parser_keeps_everything_of_a_golden(name: str) -> None:
    file = mlxkv.parse(BytesReader(data_of(name)))
    assert differences(told_by_file(file), content_of(name)) == []
    assert file.order == ("big" if name == "big_endian" else "little")


def test_a_changed_value_is_noticed_by_that_comparison() -> None:
    data = bytearray(data_of("v3_f32"))
    data[200] ^= 1
    found = differences(told_by_file(mlxkv.parse(BytesReader(data))), content_of("v3_f32"))
    assert len(found) == 1
    assert "f32_hex" in found[0]


def entry_for(content: dict[str, Any], layer: int) -> dict[str, Any] | None:
    """The look-up of the original, written down once more from the page."""
    entries: list[dict[str, Any]] = content["layers"]
    if layer < len(entries) and entries[layer]["layer"] == layer:
        return entries[layer]
    for entry in entries:
        if entry["layer"] == layer:
            return entry
    if layer < len(entries) and entries[layer]["layer"] == 0:
        return entries[layer]
    return None


@pytest.mark.parametrize("name", EVERY)
def test_head_answers_as_the_original_does_wherever_it_finds_one(name: str) -> None:
    snapshot, content, compared = mlxkv.loads(data_of(name)), content_of(name), 0
    for layer in range(snapshot.num_layers):
        entry = entry_for(content, layer)
        heads = [] if entry is None else entry["heads"]
        for h, expected in enumerate(heads):
            head = snapshot.head(layer, h)
            assert head is not None
            assert (hex_of(head.k), hex_of(head.v)) == (expected["key"]["f32_hex"], expected["value"]["f32_hex"])
            assert head.k.shape[0] == head.v.shape[0] == len(head.positions)
            assert head.positions[-1] == snapshot.token_offset - 1
            compared += 1
        if heads:
            assert snapshot.head(layer, len(heads)) is None
    assert compared == sum(len(entry["heads"]) for entry in content["layers"])


@pytest.mark.parametrize("name", EVERY)
def test_find_is_the_look_up_of_the_original(name: str) -> None:
    file, content = mlxkv.parse(BytesReader(data_of(name))), content_of(name)
    snapshot = mlxkv.loads(data_of(name))
    for layer in range(-1, 6):
        place = file.find(layer)
        expected = entry_for(content, layer) if layer >= 0 else None
        assert (None if place is None else content["layers"][place]) == expected
        if 0 <= layer < snapshot.num_layers:
            assert snapshot.source["entries"][layer] == place


def entry(number: int, cache: int = 0, heads: int = 0) -> model.LayerEntry:
    one = model.StoredTensor(0, 4, model.Piece(BytesReader(struct.pack("<4f", *[number] * 4)), 0, 16))
    return model.LayerEntry(number, cache, heads=(model.Head(one, one),) * heads)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((0, 1, 2), (0, 1, 2)),
        ((2, 1, 0), (2, 1, 0)),
        ((0, 0, 0), (0, 1, 2)),  # blank entries stand for the layer at their place
        ((1, 1, 0), (2, 1, 2)),  # a duplicate: the one at its place wins; layer 2 falls back to the entry numbered 0
        ((5,), (None, None, None, None, None, 0)),
        ((3, 0, 3), (1, 1, None, 0)),
        ((-1, 2**31 - 1), (None, None)),
    ],
)
def test_layers_that_are_unordered_blank_or_duplicate(
    numbers: tuple[int, ...], expected: tuple[int | None, ...]
) -> None:
    file = model.File(version=6, seq_len=2, head_dim=2, layers=tuple(entry(n, heads=1) for n in numbers))
    assert resolve(file) == expected
    assert tuple(file.find(layer) for layer in range(len(expected))) == expected
    snapshot = to_snapshot(file)
    for layer, place in enumerate(expected):
        head = snapshot.head(layer, 0)
        assert (head is None) == (place is None)
        if head is not None and place is not None:
            assert head.k[0, 0] == numbers[place]


def test_slab_only_layers_answer_from_the_slab() -> None:
    snapshot, content = mlxkv.loads(data_of("v4_slab_bf16_no_heads")), content_of("v4_slab_bf16_no_heads")
    for layer, e in enumerate(content["layers"]):
        heads = [snapshot.head(layer, h) for h in range(snapshot.layers[layer].num_heads)]
        assert "".join(hex_of(h.k) for h in heads if h) == e["key_slab"]["f32_hex"]
        assert "".join(hex_of(h.v) for h in heads if h) == e["value_slab"]["f32_hex"]
        assert snapshot.layers[layer].tensors[0].spec.dtype == "bfloat16"


def test_a_slab_beside_heads_is_what_is_restored_and_the_difference_is_told() -> None:
    snapshot, content = mlxkv.loads(data_of("v6_native_capture")), content_of("v6_native_capture")
    for layer, e in zip(snapshot.layers, content["layers"], strict=True):
        assert [t.spec.dtype for t in layer.tensors] == ["bfloat16", "bfloat16"]
        assert [hex_of(t.array) for t in layer.tensors] == [e["key_slab"]["raw_hex"], e["value_slab"]["raw_hex"]]
    told = mlxkv.slab_differences(snapshot)
    assert len(told) == 6
    assert "layer 0: k in slab and heads differ by up to" in told[0]
    assert any("layer 0: slab and heads" in note for note in snapshot.source["info"])
    assert mlxkv.slab_differences(mlxkv.loads(data_of("v3_f32"))) == ()


def test_slabs_that_the_original_drops_are_kept() -> None:
    snapshot, content = mlxkv.loads(data_of("ok_slab_not_native")), content_of("ok_slab_not_native")["layers"][0]
    slabs = [t for t in snapshot.layers[0].tensors if t.role == "other"]
    assert [hex_of(t.array) for t in slabs] == [content["key_slab"]["f32_hex"], content["value_slab"]["f32_hex"]]
    assert [t.shape for t in slabs] == [(1, 2, 2), (1, 2, 2)]
    assert any("not native" in note for note in snapshot.source["info"])
    again = mlxkv.loads(mlxkv.dumps(snapshot, codec="native"))  # native slabs are seen by every reader
    assert [t.spec.dtype for t in again.layers[0].tensors] == ["float32", "float32"]
    assert hex_of(again.layers[0].tensors[0].array) == content["key_slab"]["f32_hex"]


def test_q8_native_slabs_are_decoded_group_by_group() -> None:
    snapshot, content = mlxkv.loads(data_of("v6_q8_native_slab")), content_of("v6_q8_native_slab")
    for layer, e in zip(snapshot.layers, content["layers"], strict=True):
        for tensor, slab in zip(layer.tensors, (e["key_slab"], e["value_slab"]), strict=True):
            raw = bytes.fromhex(slab["raw_hex"])
            codes, scales = struct.unpack("320b", raw[:320]), struct.unpack("<5f", raw[320:])
            for h, s, d in np.ndindex(2, 5, 32):
                expected = np.float32(codes[s * 64 + h * 32 + d]) * np.float32(scales[s])
                assert tensor.array[h, s, d] == expected
            assert tensor.bound == 0


def test_window_layers_say_which_rows_they_hold() -> None:
    snapshot = mlxkv.loads(data_of("v6_sliding_window"))
    assert (snapshot.token_offset, snapshot.n_rows, len(snapshot.tokens)) == (42, 42, 5)
    held = [(t.start, t.n_rows, t.spec.window) for t in (layer.tensors[0] for layer in snapshot.layers)]
    assert held == [(37, 5, 0), (39, 3, 3), (37, 5, 0)]
    head = snapshot.head(1, 0)
    assert head is not None
    assert head.positions.tolist() == [39, 40, 41]


def test_ragged_heads_are_several_tensors_of_one_role() -> None:
    def stored(n: int) -> model.StoredTensor:
        return model.StoredTensor(0, n, model.Piece(BytesReader(np.arange(n, dtype="<f4").tobytes()), 0, 4 * n))

    pairs = ((8, 8), (8, 12), (16, 12), (0, 0))
    heads = tuple(model.Head(stored(k), stored(v)) for k, v in pairs)
    file = model.File(version=6, seq_len=4, head_dim=2, token_offset=4, layers=(model.LayerEntry(0, 0, heads=heads),))
    snapshot = to_snapshot(file)
    layer = snapshot.layers[0]
    assert [(t.name, t.shape) for t in layer.tensors] == [
        ("layers.0.k.0", (2, 4, 2)), ("layers.0.k.2", (1, 4, 4)), ("layers.0.k.3", (1, 0, 2)),
        ("layers.0.v.0", (1, 4, 2)), ("layers.0.v.1", (2, 4, 3)), ("layers.0.v.3", (1, 0, 2)),
    ]  # fmt: skip
    assert layer.num_heads == 4
    for h, (k, v) in enumerate(pairs):
        head = snapshot.head(0, h)
        assert head is not None
        assert (head.k.size, head.v.size) == (k, v)
        assert head.k.ravel().tolist() == list(range(k))
    again = mlxkv.loads(mlxkv.dumps(replace(snapshot, tokens=(1,)), codec="float32"))
    assert [t.shape for t in again.layers[0].tensors] == [t.shape for t in layer.tensors]


@pytest.mark.parametrize(
    ("version", "seq", "dim", "max_size", "sizes", "expected"),
    [
        (6, 5, 4, 0, (20, 20), (5, 4, 5, 4)),
        (6, 5, 4, 0, (20, 30), (5, 4, 5, 6)),
        (6, 10, 512, 0, (2560, 2560), (10, 256, 10, 256)),  # a narrow layer: the header has the widest
        (6, 10, 256, 5, (1280, 1280), (5, 256, 5, 256)),  # a window
        (3, 10, 4, 0, (20, 20), (5, 4, 5, 4)),  # a window that version 3 cannot tell
        (3, 10, 256, 0, (5120, 5120), (10, 512, 10, 512)),  # a wide layer: 20 rows are more than there are
        (6, 7, 4, 0, (0, 0), (0, 4, 0, 4)),
        (6, 5, 4, 0, (20, 0), (5, 4, 0, 4)),
        (6, 0, 0, 0, (6, 6), (1, 6, 1, 6)),
    ],
)
def test_shapes_follow_from_counts(version: int, seq: int, dim: int, max_size: int, sizes: Any, expected: Any) -> None:
    head = model.Head(*(model.StoredTensor(0, n, model.Piece(BytesReader(b""), 0, 0)) for n in sizes))
    e = model.LayerEntry(0, 0, heads=(head,), max_size=max_size)
    (shape,) = head_shapes(model.File(version=version, seq_len=seq, head_dim=dim, layers=(e,)), e)
    assert (shape.key_rows, shape.key_dim, shape.value_rows, shape.value_dim) == expected


@pytest.mark.parametrize(
    ("tokens", "generated", "offset", "seq", "expected", "tail"),
    [
        ((1, 2, 3), (), 3, 3, (1, 2, 3), ()),
        ((1, 2, 3), (2, 3), 3, 3, (1, 2, 3), (2, 3)),
        ((1, 2, 3), (4, 5), 5, 5, (1, 2, 3, 4, 5), (4, 5)),
        ((1, 2, 3), (2, 3), 5, 5, (1, 2, 3, 2, 3), (2, 3)),  # the offset wins over a tail that matches
        ((1, 2, 3), (2, 3), 0, 5, (1, 2, 3, 2, 3), (2, 3)),  # a stored 0 decides nothing: the length does
        ((1, 2, 3), (2, 3), 42, 7, (1, 2, 3), (2, 3)),  # nothing decides but the tail
        ((1, 2, 3), (7, 8), 42, 7, (1, 2, 3, 7, 8), (7, 8)),
        ((1, 2, 3), (7, 8), 3, 3, (1, 2, 3), ()),  # no room behind, and not the tail
        ((), (7, 8), 2, 2, (7, 8), (7, 8)),
    ],
)
def test_generated_ids_are_the_tail_or_follow(
    tokens: Any, generated: Any, offset: int, seq: int, expected: Any, tail: Any
) -> None:
    file = model.File(version=6, tokens=tokens, generated=generated, token_offset=offset, seq_len=seq)
    told = history(file)
    assert told.tokens == expected
    assert sum(r.count for r in told.runs) == len(expected)
    snapshot = to_snapshot(file)
    assert (snapshot.tokens, snapshot.generated) == (expected, tail)
    assert (snapshot.source["tokens"], snapshot.source["generated"]) == (tokens, generated)


def test_source_tells_header_and_differences() -> None:
    source = mlxkv.loads(data_of("ok_header_counts_lie")).source
    assert (source["format"], source["version"], source["byte_order"], source["encoding"]) == (
        "mlxkv",
        6,
        "little",
        "float32",
    )
    assert (source["num_layers"], source["num_heads"], source["seq_len"], source["head_dim"]) == (99, 1, 3, 1000)
    info = "\n".join(source["info"])
    for text in ("layers 99, the tensors say 3", "heads 1,", "head width 1000, the tensors say 4", "sequence length 3"):
        assert text in info
    assert mlxkv.loads(data_of("v3_f32")).source["info"] == ()
    assert mlxkv.loads(data_of("big_endian")).source["byte_order"] == "big"


def test_identity_knows_what_the_file_tells_and_no_weights() -> None:
    identity = mlxkv.loads(data_of("v3_f32")).identity
    assert identity.architecture == "gemma4_text"
    expected = {"num_attention_heads": "8", "num_hidden_layers": "3", "num_key_value_heads": "2"}
    assert dict(identity.config) == expected
    assert identity.weights == ()
    assert "num_key_value_heads" not in dict(mlxkv.loads(data_of("v6_ragged_heads")).identity.config)


def test_q8_bounds_hold_for_the_values_before() -> None:
    compared = 0
    for name in ("v3_q8", "v3_q8_zero_and_ties", "v3_q8_nonfinite", "v3_q8_scale_underflow", "v6_q8"):
        snapshot = mlxkv.loads(data_of(name))
        for layer, e in zip(snapshot.layers, content_of(name)["layers"], strict=True):
            for tensor, role in zip(layer.tensors, ("key", "value"), strict=True):
                quantised = [h for h in range(2) if "source_f32_hex" in e["heads"][h][role]]
                assert (tensor.bound > 0) == any(e["heads"][h][role]["selector"] == 1 for h in range(2))
                for h in quantised:
                    before = np.frombuffer(bytes.fromhex(e["heads"][h][role]["source_f32_hex"]), "<f4")
                    error = np.abs(before.astype(np.float64) - tensor.array[h].ravel()).max()
                    assert error <= tensor.bound
                    compared += 1
    assert compared > 20


class Counting(BytesReader):
    """Bytes that tell how many of them were read."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.read = 0

    def read_at(self, offset: int, length: int) -> bytes:
        self.read += length
        return super().read_at(offset, length)


def test_loading_reads_no_tensor_until_it_is_used(tmp_path: Path) -> None:
    data = mlxkv.dumps(made(layers=4, rows=4096, dim=16))
    file = Counting(data)
    snapshot = to_snapshot(mlxkv.parse(file, mapped=False))
    assert file.read < len(data) // 20
    before = file.read
    tensor = snapshot.layers[2].tensors[0]
    assert tensor.array.shape == (2, 4096, 16)
    assert tensor.nbytes <= file.read - before < 2 * tensor.nbytes
    (tmp_path / "a").write_bytes(data)
    for mmap in (True, False):
        assert hex_of(mlxkv.load(tmp_path / "a", mmap=mmap).layers[2].tensors[0].array) == hex_of(tensor.array)


# -- writing what was read --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "codec"), RESAVED)
def test_saving_a_golden_again_gives_its_bytes(name: str, codec: str) -> None:
    assert mlxkv.dumps(mlxkv.loads(data_of(name)), codec=codec) == data_of(name)


@pytest.mark.parametrize("name", EVERY)
def test_an_unchanged_snapshot_keeps_everything(name: str) -> None:
    snapshot = mlxkv.loads(data_of(name))
    assert mlxkv.dumps(snapshot) == data_of(name)
    assert mlxkv.FORMAT.losses(snapshot) == ()
    assert mlxkv.dumps(replace(snapshot, metadata={"a": "b"})) == data_of(name)


@pytest.mark.parametrize("name", EVERY)
def test_both_byte_orders_hold_the_same(name: str) -> None:
    snapshot = mlxkv.loads(data_of(name))
    big = mlxkv.dumps(snapshot, byte_order="big")
    assert big != mlxkv.dumps(snapshot, byte_order="little")
    content = content_of(name)
    if name != "v6_q8_native_slab":  # its hex is that of the whole raw bytes, and the reader above swaps no scales
        assert differences(SpecReader(big).read(), content) == []
    there = mlxkv.loads(big)
    assert there.source["byte_order"] == "big"
    for a, b in zip(snapshot.tensors(), there.tensors(), strict=True):
        assert (a.name, hex_of(a.array)) == (b.name, hex_of(b.array))
    assert mlxkv.dumps(there) == big
    assert mlxkv.dumps(there, byte_order="little") == mlxkv.dumps(snapshot, byte_order="little")


def test_the_scales_of_a_q8_native_slab_are_swapped_and_its_codes_are_not() -> None:
    raw = bytes.fromhex(content_of("v6_q8_native_slab")["layers"][0]["key_slab"]["raw_hex"])
    big = mlxkv.dumps(mlxkv.loads(data_of("v6_q8_native_slab")), byte_order="big")
    assert raw[:320] + b"".join(raw[k : k + 4][::-1] for k in range(320, 340, 4)) in big


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("codec", ["float32", "q8", "native"])
def test_another_encoding_keeps_the_values(name: str, codec: str) -> None:
    snapshot = mlxkv.loads(data_of(name))
    data = mlxkv.dumps(snapshot, codec=codec)
    there = mlxkv.loads(data)
    assert there.source["version"] >= (1 if codec == "float32" else 3)
    assert (there.tokens, there.runs, there.token_offset) == (snapshot.tokens, snapshot.runs, snapshot.token_offset)
    for layer in snapshot.layers:
        for h in range(layer.num_heads):
            a, b = snapshot.head(layer.index, h), there.head(layer.index, h)
            assert a is not None
            assert b is not None
            if codec != "q8":
                assert (hex_of(a.k), hex_of(a.v)) == (hex_of(b.k), hex_of(b.v))
            else:
                for x, y in ((a.k, b.k), (a.v, b.v)):
                    finite = np.isfinite(x).all()
                    limit = np.abs(x).max() / 254 * 1.001 if finite else 0
                    assert np.allclose(x, y, rtol=0, atol=limit, equal_nan=True)


def test_float32_of_a_slab_is_told_and_the_layer_keeps_the_rest() -> None:
    snapshot = mlxkv.loads(data_of("v6_native_capture"))
    told = [loss for loss in mlxkv.FORMAT.losses(snapshot, codec="float32") if "slab" in loss.what]
    assert len(told) == 3
    found = SpecReader(mlxkv.dumps(snapshot, codec="float32")).read()
    expected = content_of("v6_native_capture")
    for e, before in zip(found["layers"], expected["layers"], strict=True):
        assert (e["cache_mode"], e["max_size"], e["cache_index"]) == (
            "fixed",
            before["max_size"],
            before["cache_index"],
        )
        assert (e["key_shape"], e["key_slab"]["n"], len(e["heads"])) == ([], 0, 2)
        assert [h["key"]["f32_hex"] for h in e["heads"]] == [h["key"]["f32_hex"] for h in before["heads"]]


# -- q8 ---------------------------------------------------------------------------------------------------------


def test_q8_from_the_values_before_gives_codes_and_scales_of_the_goldens() -> None:
    compared = 0
    for name in NAMES:
        for layer in content_of(name)["layers"]:
            for head in layer["heads"]:
                for tensor in (head["key"], head["value"]):
                    if "source_f32_hex" not in tensor:
                        continue
                    found = encode_q8(np.frombuffer(bytes.fromhex(tensor["source_f32_hex"]), "<f4"))
                    if tensor["selector"] == 0:
                        assert found is None
                    else:
                        assert found is not None
                        assert found[0].tolist() == tensor["codes"]
                        assert hex_of(np.array([found[1]])) == tensor["scale_hex"]
                    compared += 1
    assert compared > 40


def test_q8_corners() -> None:
    # The largest float32: 127 * scale overflows, and the original quantises all the same.
    top = np.finfo(np.float32).max
    values = np.concatenate([[top, -top, top / 2, 0, 1], np.random.default_rng(1).uniform(-1, 1, 500) * top])
    values = values.astype(np.float32)
    codes, scale = encode_q8(values) or (None, None)
    assert codes is not None
    assert scale == top / np.float32(127)
    quotients = (values / scale).astype(np.float64)  # divided in float32, rounded half away from zero
    assert codes.tolist() == (np.sign(quotients) * np.floor(np.abs(quotients) + 0.5)).astype(int).tolist()
    tiny = np.array([1e-45, 0, -3e-45], np.float32)
    codes, scale = encode_q8(tiny) or (None, None)
    assert codes is not None
    assert (codes.tolist(), scale) == ([-127] * 3, 0)
    assert encode_q8(np.array([1, math.nan], np.float32)) is None
    codes, scale = encode_q8(np.array([0.0, -0.0], np.float32)) or (None, None)
    assert codes is not None
    assert (codes.tolist(), scale) == ([0, 0], 1)


# -- writing new files ------------------------------------------------------------------------------------------


def made(layers: int = 2, rows: int = 3, dim: int = 4, dtype: str = "float32", **fields: Any) -> Snapshot:
    """A snapshot as an engine captures one."""
    rng = np.random.default_rng(7)
    built = []
    for n in range(layers):
        tensors = []
        for role, width in (("k", dim), ("v", dim + 2)):
            spec = TensorSpec(
                id=len(built) * 2 + (role == "v"), name=f"layers.{n}.{role}", layer=n, role=role, dtype=dtype,
                axes=("head", "row", "dim"), shape=(2, 0, width), row_axis=1,
            )  # fmt: skip
            values = rng.standard_normal((2, rows, width)).astype(numpy_dtype(dtype))
            tensors.append(Tensor(spec, values))
        built.append(Layer(index=n, kind="attention", tensors=tuple(tensors), num_query_heads=8))
    values = {
        "architecture": "llama", "layers": tuple(built), "tokens": tuple(range(10, 10 + rows)), "n_rows": rows,
        "runs": (Run("prompt", rows - 1), Run("generated", 1)), "token_offset": rows,
        "positions": (PositionRun(0, rows),), "identity": Identity(architecture="llama"),
    }  # fmt: skip
    return Snapshot(**(values | fields))  # type: ignore[arg-type]


def logits(n: int, dtype: str = "float32") -> Tensor:
    spec = TensorSpec(
        id=99, name="logits", layer=-1, role="logits", dtype=dtype, axes=("vocab",), shape=(n,), growth="replaced"
    )
    return Tensor(spec, np.arange(n).astype(numpy_dtype(dtype)))


def test_a_new_file_is_version_3_float32_and_read_by_another_reader() -> None:
    snapshot = made(logits=logits(7))
    found = SpecReader(mlxkv.dumps(snapshot)).read()
    assert found["trailing_bytes"] == 0
    assert (found["version"], bytes.fromhex(found["architecture_hex"])) == (3, b"llama")
    names = ("num_layers", "num_heads", "seq_len", "head_dim", "num_query_heads", "token_offset_stored")
    assert [found[name] for name in names] == [2, 2, 3, 4, 8, 3]
    assert (found["tokens"], found["generated"]) == ([10, 11, 12], [12])
    assert (found["logit_shape"], found["logits_hex"]) == ([1, 1, 7], hex_of(np.arange(7, dtype="<f4")))
    for n, e in enumerate(found["layers"]):
        assert (e["layer"], e["cache_index"], len(e["heads"])) == (n, n, 2)
        for h, head in enumerate(e["heads"]):
            k, v = snapshot.layers[n].tensors
            assert head["key"] == {"selector": 0, "n": 12, "f32_hex": hex_of(k.array[h])}
            assert head["value"] == {"selector": 0, "n": 18, "f32_hex": hex_of(v.array[h])}
    assert mlxkv.FORMAT.losses(snapshot) == ()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_native_keeps_the_dtype_and_float32_widens_it(dtype: str) -> None:
    snapshot = made(dtype=dtype)
    k = snapshot.layers[1].tensors[0].array
    head = SpecReader(mlxkv.dumps(snapshot, codec="native")).read()["layers"][1]["heads"][1]["key"]
    assert head == {"selector": 2, "n": 12, "stored_dtype": dtype, "raw_hex": hex_of(k[1])}
    head = SpecReader(mlxkv.dumps(snapshot)).read()["layers"][1]["heads"][1]["key"]
    assert head["f32_hex"] == hex_of(k[1].astype(np.float32))
    assert [loss.kind for loss in mlxkv.FORMAT.losses(snapshot)] == ([] if dtype == "float32" else ["dtype"])
    assert mlxkv.FORMAT.losses(snapshot, codec="native") == ()
    with_logits = replace(snapshot, logits=logits(3, dtype))
    told = [(loss.kind, loss.what) for loss in mlxkv.FORMAT.losses(with_logits, codec="native")]
    assert told == ([] if dtype == "float32" else [("dtype", "logits")])
    found = SpecReader(mlxkv.dumps(with_logits, codec="native")).read()["logits_hex"]
    assert found == hex_of(np.arange(3, dtype="<f4"))


@pytest.mark.parametrize(
    ("codec", "asked", "expected"),
    [
        (None, None, 3), ("float32", 1, 1), ("float32", 2, 2), ("q8", 1, 3), ("native", 2, 3), ("q8", 5, 5),
        (None, 0, 6), (None, 6, 6), ("float32", 4, 4),
    ],
)  # fmt: skip
def test_the_version_is_only_ever_raised(codec: str | None, asked: int | None, expected: int) -> None:
    found = SpecReader(mlxkv.dumps(made(), codec=codec, version=asked)).read()
    assert (found["version"], found["trailing_bytes"]) == (expected, 0)
    assert len(found["layers"][0]["heads"]) == 2


def test_what_needs_a_later_version_raises_it() -> None:
    for name, codec, least in (
        ("v4_slab_bf16_no_heads", "native", 4), ("v5_cache_modes", "float32", 5), ("v6_sliding_window", "float32", 6),
        ("v3_q8", None, 3), ("v1_f32", "float32", 1),
    ):  # fmt: skip
        data = mlxkv.dumps(mlxkv.loads(data_of(name)), codec=codec, version=1)
        assert SpecReader(data).read()["version"] == least, name


def test_version_1_tells_what_it_leaves_out() -> None:
    snapshot = made(logits=logits(3))
    told = {loss.what for loss in mlxkv.FORMAT.losses(snapshot, version=1)}
    assert told == {"generated", "logits"}
    assert mlxkv.loads(mlxkv.dumps(snapshot, version=1)).logits is None


def test_an_offset_of_0_is_written_as_the_number_of_ids() -> None:
    snapshot = made(token_offset=0, positions=())
    assert SpecReader(mlxkv.dumps(snapshot)).read()["token_offset_stored"] == 3
    assert "token_offset" in {loss.what for loss in mlxkv.FORMAT.losses(snapshot)}
    loaded = mlxkv.loads(data_of("ok_stored_offset_zero"))
    assert loaded.token_offset == 5
    assert SpecReader(mlxkv.dumps(loaded)).read()["token_offset_stored"] == 0  # unchanged: as it was
    assert SpecReader(mlxkv.dumps(loaded, codec="float32")).read()["token_offset_stored"] == 5  # as the original writes
    assert mlxkv.dumps(loaded, codec="float32") == data_of("v2_full")


@pytest.mark.parametrize(
    "options", [{"codec": "lossless"}, {"version": 7}, {"version": -1}, {"byte_order": "middle"}, {"codec": "exact"}]
)
def test_options_that_the_format_does_not_have_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        mlxkv.dumps(made(), **options)


def test_numbers_that_do_not_fit_are_refused_before_anything_is_written() -> None:
    for fields in ({"tokens": (1, 2**31, 3)}, {"token_offset": -1}, {"token_offset": 2**32}):
        sink = MemorySink()
        with pytest.raises(UnsupportedError):
            mlxkv.FORMAT.write(made(**fields), sink)
        assert not sink.data
    with pytest.raises(InputError):
        mlxkv.dumps(made(row_start=1))


def test_losses_name_what_has_no_place() -> None:
    sampler = SamplerState(Sampler(), RandomState(1))
    spec = TensorSpec(
        id=77,
        name="layers.0.index",
        layer=0,
        role="index",
        dtype="float32",
        axes=("row", "dim"),
        shape=(0, 3),
        row_axis=0,
    )
    base = made()
    layer = replace(base.layers[0], tensors=(*base.layers[0].tensors, Tensor(spec, np.zeros((3, 3), np.float32))))
    snapshot = replace(
        base, layers=(layer, base.layers[1]), sampler=sampler, text="x", metadata={"a": "b"},
        identity=Identity(tokenizer="t"), positions=(PositionRun(5, 3),), runs=(Run("generated", 1), Run("prompt", 2)),
    )  # fmt: skip
    told = {loss.what for loss in mlxkv.FORMAT.losses(snapshot)}
    assert told == {"identity", "sampler", "text", "metadata", "layers.0.index", "positions", "runs"}
    told_q8 = [loss for loss in mlxkv.FORMAT.losses(base, codec="q8") if loss.kind == "precision"]
    assert len(told_q8) == 1
    assert mlxkv.loads(mlxkv.dumps(base, codec="q8")).bound > 0


def test_latent_rows_become_keys_and_rope_rows_values_of_one_head() -> None:
    def tensor(role: str, dim: int) -> Tensor:
        spec = TensorSpec(
            id=dim,
            name=f"layers.0.{role}",
            layer=0,
            role=role,
            dtype="float32",
            axes=("row", "dim"),
            shape=(0, dim),
            row_axis=0,
        )
        return Tensor(spec, np.arange(3 * dim, dtype=np.float32).reshape(3, dim))

    layer = Layer(index=0, kind="latent", tensors=(tensor("latent", 8), tensor("rope", 2)))
    snapshot = replace(made(), layers=(layer,))
    there = mlxkv.loads(mlxkv.dumps(snapshot))
    head = there.head(0, 0)
    assert head is not None
    assert (head.k.shape, head.v.shape) == ((3, 8), (3, 2))
    assert head.k.ravel().tolist() == list(range(24))
    assert "layers.0.kind" in {loss.what for loss in mlxkv.FORMAT.losses(snapshot)}


def test_shared_and_empty_layers_are_written() -> None:
    base = made()
    layers = (
        base.layers[0],
        Layer(index=1, kind="none", tensors=()),
        Layer(index=2, kind="attention", tensors=(), shares=0),
    )
    found = SpecReader(mlxkv.dumps(replace(base, layers=layers))).read()["layers"]
    assert [(e["layer"], e["cache_index"], len(e["heads"])) for e in found] == [(0, 0, 2), (1, -1, 0), (2, 0, 2)]
    assert found[0]["heads"] == found[2]["heads"]


def test_a_changed_snapshot_keeps_version_modes_and_cache_indexes() -> None:
    snapshot = mlxkv.loads(data_of("v5_cache_modes")).truncate(3)
    found = SpecReader(mlxkv.dumps(snapshot)).read()
    expected = content_of("v5_cache_modes")
    assert (found["version"], found["tokens"], found["seq_len"]) == (5, expected["tokens"][:3], 3)
    assert [e["cache_mode"] for e in found["layers"]] == [e["cache_mode"] for e in expected["layers"]]
    for e, before in zip(found["layers"], expected["layers"], strict=True):
        assert before["heads"][1]["key"]["f32_hex"].startswith(e["heads"][1]["key"]["f32_hex"])
    payloads = mlxkv.loads(data_of("v5_turboquant")).truncate(3)
    assert "layers.0.payloads" in {loss.what for loss in mlxkv.FORMAT.losses(payloads)}
    assert [e["payloads_hex"] for e in SpecReader(mlxkv.dumps(payloads)).read()["layers"]] == [[], [], []]


@pytest.mark.parametrize("name", [n for n in EVERY if n not in ("v6_text_and_ids", "big_endian")])
def test_native_files_and_back_keep_heads_and_tokens(name: str) -> None:
    snapshot = mlxkv.loads(data_of(name))
    there = native.loads(native.dumps(snapshot))
    back = mlxkv.loads(mlxkv.dumps(there, codec="native"))
    assert (back.tokens, back.generated, back.token_offset) == (
        snapshot.tokens,
        snapshot.generated,
        snapshot.token_offset,
    )
    for layer in snapshot.layers:
        for h in range(layer.num_heads):
            expected = snapshot.layers[layer.index]
            a = replace(snapshot, layers=tuple(replace(x, by_head=()) for x in snapshot.layers)).head(layer.index, h)
            b = back.head(layer.index, h)
            assert a is not None
            assert b is not None
            assert (hex_of(a.k), hex_of(a.v), a.positions.tolist()) == (hex_of(b.k), hex_of(b.v), b.positions.tolist())
            assert expected.num_heads == back.layers[layer.index].num_heads


class Discard:
    """A sink that keeps nothing but the length."""

    def __init__(self) -> None:
        self.length = 0

    def write_at(self, buffers: Any, offset: int) -> int:
        assert offset == self.length
        n = sum(memoryview(b).nbytes for b in buffers)
        self.length += n
        return n


class Zeros:
    """A source that makes its array when it is asked for."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def array(self) -> Any:
        return np.zeros(self.shape, np.float32)

    def read_into(self, out: Any) -> None:
        out[...] = 0


@pytest.mark.parametrize("codec", ["float32", "q8", "native"])
def test_writing_takes_the_memory_of_few_tensors(codec: str) -> None:
    shape = (4, 4096, 32)  # 2 MiB
    layers = []
    for n in range(16):
        tensors = tuple(
            Tensor(
                TensorSpec(
                    id=2 * n, name=f"layers.{n}.{role}", layer=n, role=role, dtype="float32",
                    axes=("head", "row", "dim"), shape=(4, 0, 32), row_axis=1,
                ),
                Zeros(shape), n_rows=4096,
            )
            for role in ("k", "v")
        )  # fmt: skip
        layers.append(Layer(index=n, kind="attention", tensors=tensors))
    snapshot = Snapshot(layers=tuple(layers), n_rows=4096, token_offset=4096, positions=(PositionRun(0, 4096),))
    sink, seen = Discard(), []
    tracemalloc.start()
    length = mlxkv.FORMAT.write(snapshot, sink, codec=codec, progress=lambda done, total: seen.append((done, total)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert length == sink.length > (16 if codec == "q8" else 64) << 20
    assert peak < 10 << 20  # of 64 MiB: keys and values of one layer, and one head on its way
    assert seen[-1] == (64 << 20, 64 << 20)


def test_save_and_load_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    snapshot = made(logits=logits(5))
    report = snapshot.save(path, format="mlxkv", codec="native", byte_order="big", sync=False)
    assert report.nbytes == path.stat().st_size
    there = mlxkv.load(path)
    assert (there.source["byte_order"], there.source["path"]) == ("big", str(path))
    assert there.logits is not None
    assert there.logits.array.tolist() == [0, 1, 2, 3, 4]
    there.save(path, format="mlxkv", sync=False)  # over the file that it is read from
    assert mlxkv.loads(path.read_bytes()).source["byte_order"] == "big"
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("codec", ["float32", "q8", "native"])
@pytest.mark.parametrize("order", ["little", "big"])
def test_large_tensors_reach_the_file_as_they_reach_memory(codec: str, order: str, tmp_path: Path) -> None:
    snapshot = made(rows=5000, dtype="bfloat16", logits=logits(3))
    data = mlxkv.dumps(snapshot, codec=codec, byte_order=order)
    snapshot.save(tmp_path / "a", format="mlxkv", codec=codec, byte_order=order, sync=False)
    assert (tmp_path / "a").read_bytes() == data
    assert SpecReader(data).read()["trailing_bytes"] == 0
    there = mlxkv.load(tmp_path / "a")
    there.save(tmp_path / "b", format="mlxkv", sync=False)
    assert (tmp_path / "b").read_bytes() == data


@pytest.mark.parametrize("n_pending", [0, 1])
@pytest.mark.parametrize("n_generated", [0, 1, 2, 3])
def test_tokens_generated_and_pending_come_back(n_pending: int, n_generated: int) -> None:
    runs = tuple(r for r in (Run("prompt", 6 - n_generated), Run("generated", n_generated)) if r.count)
    n_rows = 6 - n_pending
    snapshot = made(
        rows=n_rows, tokens=(9, 8, 7, 6, 5, 4), runs=runs, n_pending=n_pending, n_rows=n_rows, token_offset=n_rows,
        positions=(PositionRun(0, n_rows),),
    )  # fmt: skip
    there = mlxkv.loads(mlxkv.dumps(snapshot))
    for name in ("tokens", "runs", "n_rows", "n_pending", "token_offset", "positions", "generated", "pending"):
        assert getattr(there, name) == getattr(snapshot, name), name


def test_sniff_goes_by_content() -> None:
    assert mlxkv.FORMAT.sniff(data_of("big_endian")[:64])
    assert not mlxkv.FORMAT.sniff(data_of("err_bad_magic")[:64])
    assert not mlxkv.FORMAT.sniff(b"")


def test_a_file_that_is_cut_after_it_was_opened_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    path.write_bytes(mlxkv.dumps(made()))
    snapshot = mlxkv.load(path, mmap=False)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises((FormatError, ValueError)):
        _ = snapshot.layers[1].tensors[1].array

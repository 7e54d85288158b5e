"""info and cat: what a file holds, told without a tensor, for every format and every golden file."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any
from unittest import mock

import numpy as np
import pytest

import kvsnap
from kvsnap.errors import DamagedError, KeyNeededError, MissingError
from kvsnap.formats import mlxkv, native
from kvsnap.formats.mlxkv import StoredTensor, parse
from kvsnap.formats.mlxkv.model import Piece
from kvsnap.formats.native import NativeFile
from kvsnap.formats.native.readers import BytesReader
from kvsnap.inspection import Summary, summarise
from kvsnap.inspection.excerpt import EXCERPT, excerpts
from kvsnap.inspection.geometry import Shape, groups_of, layer_summaries, quantisation_words
from kvsnap.layout import Run, Snapshot, TensorSpec
from kvsnap.quantised import Quantisation
from kvsnap.session import Session
from synthetic import DATA, snapshot, snapshot_of_kinds, spec

MLXKV = json.loads((DATA / "mlxkv" / "MANIFEST.json").read_text())["files"]
COLIKV = json.loads((DATA / "colikv" / "MANIFEST.json").read_text())["files"]
NATIVE = [*sorted(DATA.glob("tiny*.kvsnap")), *sorted((DATA / "forks").glob("*.kvsnap"))]
KEY = bytes(range(32))

Shown = Callable[..., tuple[int, str, str]]


def json_of(shown: Shown, *args: object) -> Any:
    return json.loads(shown(*args, "--json")[1])


def key_of(path: Path) -> bytes | None:
    return KEY if native.is_encrypted(path) else None


def timeless(summary: Summary) -> dict[str, Any]:
    data = summary.to_dict()
    return {k: v for k, v in data.items() if k not in ("modified_ns", "created_ns", "path", "fork")}


# -- golden files --------------------------------------------------------------------------------------------------


def stored_in_golden(tensor: dict[str, Any]) -> int:
    """Return the bytes that the values of a stored tensor take: codes and their scale, raw bytes, or float32."""
    if tensor["selector"] == 1:
        return 4 + int(tensor["n"])
    return len(tensor["raw_hex"]) // 2 if tensor["selector"] == 2 else 4 * int(tensor["n"])


@pytest.mark.parametrize("entry", [e for e in MLXKV if e["expect"] == "load"], ids=lambda e: e["name"])
def test_info_and_cat_of_a_golden_mlxkv_file(entry: dict[str, Any], shown: Shown) -> None:
    path = DATA / "mlxkv" / entry["file"]
    content = json.loads((DATA / "mlxkv" / entry["sidecar"]).read_text())["content"]
    found, snapshot = kvsnap.inspect(path), kvsnap.load(path)
    assert found.version == str(content["version"])
    assert list(snapshot.tokens)[: len(content["tokens"])] == content["tokens"]
    assert (found.n_tokens, found.n_rows, found.n_pending) == (
        len(snapshot.tokens), snapshot.n_rows, snapshot.n_pending,
    )  # fmt: skip
    assert found.tensor_bytes == snapshot.nbytes == sum(p.decoded for p in found.parts)
    assert found.file_bytes == entry["size"]
    expected: Counter[str] = Counter()
    for layer in content["layers"]:
        for role, word in (("k", "key"), ("v", "value")):
            slab = layer[f"{word}_slab"]
            is_rows = slab and slab["n"] and slab["selector"] == 2
            held = [slab] if is_rows else [head[word] for head in layer["heads"]]
            expected[role] += sum(map(stored_in_golden, held))
    assert {role: sum(p.stored for p in found.parts if p.role == role) for role in expected} == expected
    data = json_of(shown, "cat", path, "--tokens")
    assert [i for r in data["runs"] for i in r["tokens"]] == list(snapshot.tokens)


@pytest.mark.parametrize("entry", [e for e in COLIKV if e["expect"] == "load"], ids=lambda e: e["name"])
def test_info_and_cat_of_a_golden_coli_kv_file(entry: dict[str, Any], shown: Shown) -> None:
    path = DATA / "colikv" / entry["file"]
    side = json.loads((DATA / "colikv" / entry["sidecar"]).read_text())
    found = kvsnap.inspect(path)
    assert found.n_tokens == found.n_rows == side["usable_records"] == len(side["records"])
    assert found.num_layers == side["header"]["n_layers"]
    assert found.head_dim == side["header"]["kv_lora"]
    assert sum(p.stored for p in found.parts) == found.n_tokens * (side["record_bytes"] - 4)
    loaded = kvsnap.load(path)
    assert found.tensor_bytes == loaded.nbytes
    assert (found.bound == 0) == (loaded.bound == 0)
    assert found.bound >= loaded.bound
    assert found.notes == tuple(loaded.source["notes"])
    data = json_of(shown, "cat", path, "--tokens")
    assert [i for r in data["runs"] for i in r["tokens"]] == [r["token"] for r in side["records"]]


@pytest.mark.parametrize("path", NATIVE, ids=lambda p: p.name[:16])
def test_info_of_a_golden_kvsnap_file_agrees_with_its_snapshot(path: Path) -> None:
    key = key_of(path)
    if key is not None:
        pytest.importorskip("cryptography")
    found, loaded = kvsnap.inspect(path, key=key), kvsnap.load(path, key=key)
    assert (found.n_tokens, found.n_rows, found.n_pending) == (len(loaded.tokens), loaded.n_rows, loaded.n_pending)
    generated = sum(run.count for run in loaded.runs if run.kind == "generated")
    assert (found.n_generated, found.n_prompt) == (generated, len(loaded.tokens) - generated)
    assert found.tensor_bytes == loaded.nbytes == sum(p.decoded for p in found.parts)
    assert sum(x.decoded for x in found.layers) == sum(t.nbytes for t in loaded.tensors())
    assert {name: s.stored for name, s in found.stored.items()} == {
        name: sum(p.stored for p in found.parts if p.codec == name) for name in found.stored
    }
    assert found.bound == loaded.bound
    with closing(NativeFile.open(path, key=key)) as file:
        assert found.n_spans == len(file.live)
    assert found.turns is not None
    assert found.turns.n_live + found.turns.n_on_the_way == found.n_spans


def test_the_coli_kv_files_that_are_refused_are_refused_by_info(shown: Shown) -> None:
    """The control of the goldens: what load refuses, info refuses with the same error."""
    refused = 0
    for entry in COLIKV:
        path = DATA / "colikv" / entry["file"]
        code = shown("info", path)[0]
        assert code == shown("cat", path, "--tokens")[0], entry["name"]
        refused += bool(code)
    assert refused > 2


# -- no tensor byte matters ----------------------------------------------------------------------------------------


def spoiled_native(path: Path, key: bytes | None) -> bytes:
    raw = bytearray(path.read_bytes())
    n = 0
    with closing(NativeFile.open(path, key=key)) as file:
        for span in file.spans():
            if span.file is file:
                for part in span.table.parts:
                    raw[span.payload + part.offset : span.payload + part.offset + part.stored] = b"\xa5" * part.stored
                    n += part.stored
    assert n
    return bytes(raw)


@pytest.mark.parametrize("name", ["tiny.kvsnap", "tiny_session.kvsnap", "tiny_messages.kvsnap"])
def test_info_looks_at_no_tensor_of_a_kvsnap_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(spoiled_native(DATA / name, None))
    assert timeless(kvsnap.inspect(path)) == timeless(kvsnap.inspect(DATA / name))
    assert not kvsnap.verify(path).ok  # the control: the bytes are others


def test_info_looks_at_no_tensor_of_an_mlxkv_file(tmp_path: Path) -> None:
    for entry in MLXKV:
        if entry["expect"] != "load":
            continue
        raw = bytearray((DATA / "mlxkv" / entry["file"]).read_bytes())
        file = parse(BytesReader(bytes(raw)))
        pieces = [t for e in file.layers for h in e.heads for t in (h.key, h.value)]
        pieces += [t for e in file.layers for t in (e.key_slab, e.value_slab) if t is not None]
        pieces += [file.logits] if file.logits is not None else []
        for stored in pieces:
            assert isinstance(stored, StoredTensor)
            assert isinstance(stored.data, Piece)
            at, n = stored.data.offset, stored.data.length
            raw[at : at + n] = b"\xa5" * n
        path = tmp_path / entry["file"]
        path.write_bytes(raw)
        assert timeless(kvsnap.inspect(path)) == timeless(kvsnap.inspect(DATA / "mlxkv" / entry["file"]))


def test_info_looks_at_no_tensor_of_a_safetensors_file(tmp_path: Path) -> None:
    path, spoiled = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    made = snapshot(tuple(range(40)), layers=2, text="a text")
    kvsnap.save(made, path, format="safetensors")
    raw = bytearray(path.read_bytes())
    values = b"".join(t.array.tobytes() for t in made.tensors())
    place = raw.index(values[:64])
    raw[place : place + len(values)] = b"\xa5" * len(values)
    spoiled.write_bytes(raw)
    assert timeless(kvsnap.inspect(path)) == timeless(kvsnap.inspect(spoiled))
    assert kvsnap.load(spoiled).layers[0].tensors[0].array.tobytes() != made.layers[0].tensors[0].array.tobytes()


# -- layers --------------------------------------------------------------------------------------------------------

KINDS = ("grow", "grow4", "window8", "recurrent", "grow+recurrent", "static+grow", "buffer+grow")


def described(*shapes: Shape) -> list[str]:
    return [group.text for group in groups_of(layer_summaries(shapes, (), Counter()))]


def shape(index: int, *specs: TensorSpec, kind: str = "attention", **fields: Any) -> Shape:
    values: dict[str, Any] = {"num_query_heads": 8, "shares": None, "quantisation": ""} | fields
    return Shape(index=index, kind=kind, specs=specs, **values)


def pair(index: int, heads: int = 2, dim: int = 4, width: int = 4, **fields: Any) -> tuple[TensorSpec, TensorSpec]:
    return (
        spec(10 * index, index, "k", heads, dim, "bfloat16", **fields),
        spec(10 * index + 1, index, "v", heads, width, "bfloat16", **fields),
    )


def test_layers_are_told_by_kind() -> None:
    window = {"growth": "window", "window": 128}
    shapes = [shape(i, *pair(i, **(window if i % 2 else {}))) for i in range(6)]
    assert described(*shapes) == [
        "3 attention layers: 2 heads of 4 (8 query heads), bfloat16",
        "3 sliding layers (window 128): 2 heads of 4 (8 query heads), bfloat16",
    ]
    wide = shape(0, *pair(0, heads=1, width=6), num_query_heads=1)
    assert described(wide) == ["1 attention layer: 1 head of 4, values of 6, bfloat16"]
    two = shape(0, *pair(0), spec(2, 0, "k", 3, 4, "bfloat16"), num_query_heads=0)
    assert described(two) == ["1 attention layer: 5 heads of 4, bfloat16"]  # ragged heads are several tensors
    rows = {"axes": ("row", "dim"), "row_axis": 0}
    latent = shape(
        0, spec(0, 0, "latent", 1, 1, "float32", shape=(0, 512), **rows),
        spec(1, 0, "rope", 1, 1, "float32", shape=(0, 64), **rows),
        spec(2, 0, "index", 1, 1, "float32", shape=(0, 128), **rows), kind="latent",
    )  # fmt: skip
    assert described(latent) == ["1 latent layer: latent rows of 512 and rope rows of 64, index rows, float32"]
    state = spec(0, 0, "recurrent", 2, 4, "float32", axes=("head", "dim"), shape=(2, 4), growth="replaced", row_axis=-1)
    assert described(shape(0, state, kind="recurrent"), shape(1, kind="none"), shape(2, shares=0)) == [
        "1 recurrent layer: recurrent states",
        "1 layer without a cache",
        "1 layer without a cache of their own: they use that of another layer",
    ]


def test_a_quantised_cache_is_told_in_words() -> None:
    text = Quantisation("quanto", 4, 64, 0, 0, 128).text
    assert quantisation_words(text) == (
        "kept as codes of 4 bits (quanto), a scale for 64 values, up to 128 rows as they are"
    )
    assert quantisation_words(Quantisation("fp8").text) == "kept as codes of 8 bits (fp8), a scale for each tensor"
    for strange in ("no JSON", "[]", '{"kind":"x"}', '{"kind":"x","bits":"many"}', "[" * 100_000):
        assert quantisation_words(strange) == strange


@pytest.mark.parametrize("codec", ["exact", "q8"])
def test_sizes_add_up_for_every_kind_of_layer(codec: str, tmp_path: Path) -> None:
    path = tmp_path / "a.kvsnap"
    made = snapshot_of_kinds(range(1, 24), KINDS)
    kvsnap.save(made, path, codec=codec)
    found = kvsnap.inspect(path)
    assert found.tensor_bytes == made.nbytes
    for layer, held in zip(found.layers, made.layers, strict=True):
        assert layer.decoded == held.nbytes
        assert layer.state_bytes == sum(t.nbytes for t in held.tensors if not t.spec.grows)
        assert (layer.num_heads, layer.head_dim) == (held.num_heads, held.head_dim)
    assert sum(g.decoded for g in found.groups) == sum(x.decoded for x in found.layers)
    assert sorted(n for g in found.groups for n in g.layers) == list(range(len(made.layers)))
    stored = sum(p.stored for p in found.parts)
    assert stored == found.stored_bytes < found.file_bytes
    assert (stored < found.tensor_bytes) == (codec == "q8")


def test_a_cut_span_counts_the_rows_that_stay(tmp_path: Path) -> None:
    path = tmp_path / "a.kvsnap"
    with Session.open(path) as session:
        session.append(snapshot(tuple(range(10))))
        whole = kvsnap.inspect(path)
        session.truncate(7)
    cut = kvsnap.inspect(path)
    assert cut.tensor_bytes == kvsnap.load(path).nbytes
    assert [x.decoded for x in cut.layers] == [x.decoded * 7 // 10 for x in whole.layers]
    assert [x.stored for x in cut.layers] == [x.stored for x in whole.layers]  # the bytes are there all the same


def test_a_row_for_several_tokens_adds_its_part_for_each(tmp_path: Path) -> None:
    path = tmp_path / "a.kvsnap"
    made = snapshot_of_kinds(range(1, 24), ["grow", "grow4", "grow4+recurrent"])
    kvsnap.save(made, path)
    found = kvsnap.inspect(path)
    expected = [
        sum(t.spec.nbytes(4) / 4 / t.spec.tokens_per_row for t in x.tensors if t.spec.grows) for x in made.layers
    ]
    assert [x.bytes_per_token for x in found.layers] == expected
    assert sum(g.bytes_per_token for g in found.groups) == sum(expected)


def test_no_adapters_are_known_and_adapters_that_are_not_told_are_not(tmp_path: Path) -> None:
    made = snapshot(range(1, 9))
    for adapters, known in (((), True), (None, False)):
        path = tmp_path / f"{known}.kvsnap"
        kvsnap.save(replace(made, identity=replace(made.identity, adapters=adapters)), path)
        found = kvsnap.inspect(path)
        assert ("adapters" in found.identity_known, "adapters" in found.identity_unknown) == (known, not known)


@pytest.mark.parametrize("ends", [(6, 19), (6, 9, 12), (4, 20, 22, 40)])
def test_rows_of_a_window_before_a_gap_are_stored_and_not_decoded(ends: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "a.kvsnap"
    with Session.open(path) as session:
        for start, stop in zip((0, *ends[:-1]), ends, strict=True):
            session.append(snapshot_of_kinds(range(1, stop + 1), ["window8", "grow+window8"], start=start))
    found, loaded = kvsnap.inspect(path), kvsnap.load(path)
    assert [x.decoded for x in found.layers] == [sum(t.nbytes for t in x.tensors) for x in loaded.layers]
    assert found.tensor_bytes == loaded.nbytes == sum(s.decoded for s in found.stored.values())
    handed_over = sum(min(stop - start, 7) for start, stop in zip((0, *ends[:-1]), ends, strict=True))
    row = loaded.layers[0].tensors[0].spec.nbytes(1)
    assert found.layers[0].stored == 2 * handed_over * row
    assert (found.layers[0].stored > found.layers[0].decoded) == (len(ends) != 3)


@pytest.mark.parametrize(
    ("ends", "lossy", "exact"),
    [((6, 19), 1, True), ((4, 20, 22), 1, True), ((6, 9, 12), 1, False), ((4, 20), 2, False)],
)
def test_a_file_is_exact_where_all_that_is_off_is_before_a_gap(
    ends: tuple[int, ...], lossy: int, exact: bool, tmp_path: Path
) -> None:
    path = tmp_path / "a.kvsnap"
    with Session.open(path) as session:
        for number, (start, stop) in enumerate(zip((0, *ends[:-1]), ends, strict=True), 1):
            made = snapshot_of_kinds(range(1, stop + 1), ["window8"], start=start)
            session.append(made, codec="q8" if number == lossy else "exact")
    found, loaded = kvsnap.inspect(path), kvsnap.load(path)
    assert (found.exact, found.bound) == (loaded.bound == 0, loaded.bound)
    assert found.exact == exact
    assert found.stored["q8"].bound > 0


# -- turns, forks, damage ------------------------------------------------------------------------------------------


def test_turns_are_counted_by_what_became_of_them(tmp_path: Path, shown: Shown) -> None:
    path = tmp_path / "a.kvsnap"
    with Session.open(path) as session:
        for n in (4, 8, 12, 16, 20):
            session.append(snapshot(tuple(range(n)), metadata={"stop": "length" if n == 8 else "end"}))
        session.append(snapshot(tuple(range(24))), complete=False)
        session.truncate(14)
    turns = kvsnap.inspect(path).turns
    assert turns is not None
    assert (turns.n_live, turns.n_complete, turns.n_cut_off, turns.n_dropped) == (4, 3, 1, 2)
    assert (turns.last_operation, turns.last_stop, turns.n_commits) == ("truncate", "", 8)
    assert "4 (3 complete, 1 cut off); 2 more were cut away since; last came a truncate" in shown("info", path)[1]
    with Session.open(path) as session:
        session.append(snapshot(tuple(range(15)), metadata={"stop": "context"}))
    turns = kvsnap.inspect(path).turns
    assert turns is not None
    assert (turns.n_live, turns.n_complete, turns.n_cut_off, turns.last_stop) == (5, 3, 2, "context")
    assert "the context is full" in shown("info", path)[1]
    with Session.open(path) as session:
        session.reset()
    turns = kvsnap.inspect(path).turns
    assert turns is not None
    assert (turns.n_live, turns.n_dropped) == (0, 7)


def publish(session: Session, *runs: tuple[str, int], stop: str) -> None:
    """Append up to the end of these runs, with a letter of text for each token."""
    made = tuple(Run(kind, n) for kind, n in runs)  # type: ignore[arg-type]
    n = sum(run.count for run in made)
    taken = snapshot(tuple(range(n)), metadata={"stop": stop}, text=ascii_lowercase[:n])
    session.append(replace(taken, runs=made), complete=stop != "unfinished")


def test_parts_published_on_the_way_are_not_cut_off(tmp_path: Path, shown: Shown) -> None:
    path = tmp_path / "a.kvsnap"
    with Session.open(path) as session:
        publish(session, ("prompt", 4), stop="unfinished")
        publish(session, ("prompt", 4), ("generated", 2), stop="unfinished")
        publish(session, ("prompt", 4), ("generated", 5), stop="end")
        publish(session, ("prompt", 4), ("generated", 5), ("prompt", 3), stop="unfinished")  # and was left so
    turns = kvsnap.inspect(path).turns
    assert turns is not None
    assert (turns.n_live, turns.n_complete, turns.n_on_the_way, turns.n_cut_off) == (2, 1, 2, 1)
    assert "2 (1 complete, 1 cut off) and 2 parts published on the way; last one" in shown("info", path)[1]
    with Session.open(path) as session:  # a new turn follows: what was left stays cut off
        publish(session, ("prompt", 4), ("generated", 5), ("prompt", 5), ("generated", 1), stop="end")
    turns = kvsnap.inspect(path).turns
    assert turns is not None
    assert (turns.n_live, turns.n_complete, turns.n_on_the_way, turns.n_cut_off) == (3, 2, 2, 1)
    with Session.open(path) as session:  # the end of the first turn is cut away, its parts are all there is of it
        session.truncate(6)
    turns = kvsnap.inspect(path).turns
    assert turns is not None
    assert (turns.n_live, turns.n_complete, turns.n_on_the_way, turns.n_cut_off) == (1, 0, 1, 1)


def test_parts_published_on_the_way_are_no_turns_in_cat_and_ls(tmp_path: Path, shown: Shown) -> None:
    with kvsnap.Library(tmp_path / "library") as library:
        with library.open("chat") as session:
            publish(session, ("prompt", 4), stop="unfinished")
            publish(session, ("prompt", 4), ("generated", 2), stop="unfinished")
            publish(session, ("prompt", 4), ("generated", 5), stop="end")
            publish(session, ("prompt", 4), ("generated", 5), ("prompt", 3), stop="unfinished")  # and was left so
        library.fork("chat", "fork")
        with library.open("fork") as session:
            publish(session, ("prompt", 4), ("generated", 5), ("prompt", 4), stop="unfinished")
            publish(session, ("prompt", 4), ("generated", 5), ("prompt", 4), ("generated", 1), stop="end")
        path = library.session_path("chat")
    there = ("--library", tmp_path / "library")
    turns = json_of(shown, *there, "cat", "@chat", "--turns")["turns"]
    assert [(t["turn"], t["start"], t["stop"], t["text"]) for t in turns] == [
        (1, 0, 9, "abcdefghi"), (2, 9, 12, "jkl"),
    ]  # fmt: skip
    assert [t["tokens"] for t in turns] == [list(range(9)), list(range(9, 12))]
    turns = json_of(shown, *there, "cat", "@fork", "--turns")["turns"]
    assert [t["text"] for t in turns] == ["abcdefghi", "jkl", "mn"]
    assert {f.name: f.n_turns for f in kvsnap.listing(tmp_path / "library").files} == {"chat": 2, "fork": 3}
    assert {f.path: f.n_turns for f in kvsnap.listing(Path(path).parent).files}[path] == 2
    found = kvsnap.inspect(kvsnap.Library(tmp_path / "library", readonly=True).session_path("fork")).turns
    assert found is not None
    assert (found.n_live, found.n_on_the_way, found.n_inherited) == (3, 3, 2)


def test_an_answer_that_is_given_once_more_is_no_turn_of_its_own(tmp_path: Path, shown: Shown) -> None:
    path = tmp_path / "a.kvsnap"
    with Session.open(path) as session:
        publish(session, ("prompt", 2), ("generated", 2), stop="end")
        publish(session, ("prompt", 2), ("generated", 2), ("prompt", 4), stop="unfinished")
        publish(session, ("prompt", 2), ("generated", 2), ("prompt", 4), ("generated", 3), stop="end")
        again = replace(
            snapshot(tuple(range(10)), metadata={"stop": "end"}, text=ascii_lowercase[:10]),
            runs=(Run("prompt", 2), Run("generated", 2), Run("prompt", 4), Run("generated", 2)),
        )  # fmt: skip
        session.append(again, after=7)  # the last token of the prompt is read again
    turns = kvsnap.inspect(path).turns
    assert turns is not None
    assert (turns.n_live, turns.n_complete, turns.n_on_the_way, turns.n_cut_off, turns.n_dropped) == (2, 2, 1, 0, 1)
    assert (
        "2 (2 complete, 0 cut off) and 1 part published on the way; 1 more was cut away since"
        in (shown("info", path)[1])
    )
    assert [t["text"] for t in json_of(shown, "cat", path, "--turns")["turns"]] == ["abcd", "efghij"]


def test_a_turn_that_was_cut_inside_does_not_hide_the_others(tmp_path: Path, shown: Shown) -> None:
    path = tmp_path / "a.kvsnap"
    with Session.open(path) as session:
        publish(session, ("prompt", 2), ("generated", 2), stop="end")
        publish(session, ("prompt", 2), ("generated", 2), ("prompt", 4), ("generated", 3), stop="end")
        session.truncate(6)
        publish(session, ("prompt", 2), ("generated", 2), ("prompt", 2), ("prompt", 1), stop="end")
        publish(session, ("prompt", 2), ("generated", 2), ("prompt", 3), ("generated", 1), stop="end")
    turns = json_of(shown, "cat", path, "--turns")["turns"]
    # Of the third one the file keeps all text up to its end: that is not what it added.
    assert [(t["stop"], t["text"]) for t in turns] == [(4, "abcd"), (6, None), (7, None), (8, "h")]


def test_a_notebook_shows_times_as_dates(tmp_path: Path) -> None:
    path = tmp_path / "a.kvsnap"
    snapshot((1, 2, 3)).save(path)
    found = replace(kvsnap.inspect(path), created_ns=1_796_057_627_492_270_652)
    html = found._repr_html_()
    assert "<td>created</td><td>2026-11-30 16:53:47 UTC</td>" in re.sub(r"<td[^>]*>", "<td>", html)
    assert "_ns" not in html
    assert found.to_dict()["created_ns"] == 1_796_057_627_492_270_652


def test_where_the_chain_of_commits_is_broken_each_part_is_told_by_itself(tmp_path: Path, shown: Shown) -> None:
    path = tmp_path / "a.kvsnap"
    with Session.open(path) as session:
        publish(session, ("prompt", 4), stop="unfinished")
        publish(session, ("prompt", 4), ("generated", 5), stop="end")
        offset = session.history[1].offset
    raw = bytearray(path.read_bytes())
    raw[offset + 70] ^= 1
    path.write_bytes(raw)
    assert [t["text"] for t in json_of(shown, "cat", path, "--turns")["turns"]] == ["abcd", "efghi"]


def test_the_turns_agree_with_log(tmp_path: Path, shown: Shown) -> None:
    path = tmp_path / "a.kvsnap"
    with Session.open(path) as session:
        for n in range(1, 90):  # far enough for an INDEX
            session.append(snapshot(tuple(range(2 * n))), complete=n % 3 > 0)
    told = [t for t in json_of(shown, "log", path)["turns"] if t["operation"] == "append"]
    turns = kvsnap.inspect(path).turns
    assert turns is not None
    assert turns.n_complete == sum(t["complete"] for t in told)
    assert turns.n_cut_off == sum(not t["complete"] for t in told) > 20


def test_broken_history_is_damage_and_the_rest_is_told(tmp_path: Path, shown: Shown) -> None:
    path = tmp_path / "a.kvsnap"
    with Session.open(path) as session:
        for n in (2, 4, 6):
            session.append(snapshot(tuple(range(n))))
        offset = session.history[1].offset
    raw = bytearray(path.read_bytes())
    raw[offset + 70] ^= 1
    path.write_bytes(raw)
    found = kvsnap.inspect(path)
    assert found.turns is None
    assert (found.n_tokens, found.error, len(found.damage)) == (6, None, 1)
    assert "turns cannot be counted" in shown("info", path)[1]


def test_a_torn_tail_is_damage(tmp_path: Path, shown: Shown) -> None:
    path = tmp_path / "a.kvsnap"
    with Session.open(path) as session:
        session.append(snapshot((1, 2)))
    assert kvsnap.inspect(path).damage == ()
    assert "none that shows" in shown("info", path)[1]
    with path.open("ab") as f:
        f.write(b"\x01" * 100)
    found = kvsnap.inspect(path)
    assert (found.dropped, found.n_tokens) == (100, 2)
    assert "100 bytes behind the last published turn" in found.damage[-1]
    code, out, _ = shown("info", path)
    assert code == 0
    assert "100 bytes behind" in out


def test_a_fork_tells_its_parent_and_what_is_left_without_it(tmp_path: Path, shown: Shown) -> None:
    with kvsnap.Library(tmp_path / "library") as library:
        with library.open("old") as session:
            session.append(snapshot((1, 2, 3, 4), text="hello"))
        library.fork("old", "new")
        with library.open("new") as session:
            session.append(snapshot((1, 2, 3, 4, 5, 6), text="hello there"))
        old, new = library.session_path("old"), library.session_path("new")
    found = kvsnap.inspect(new)
    assert found.fork is not None
    assert (found.fork.found, found.fork.depth, found.fork.n_tokens, found.fork.own_tokens) == (True, 1, 4, 2)
    assert found.fork.above_bytes == os.path.getsize(old)
    assert found.turns is not None
    assert (found.turns.n_live, found.turns.n_inherited) == (2, 1)
    there = ("--library", tmp_path / "library")
    data = json_of(shown, "info", "@old", *there)
    assert (data["library"]["names"], data["library"]["fork_names"], data["library"]["n_forks"]) == (
        ["old"],
        ["new"],
        1,
    )
    code, out, _ = shown("info", "@new", *there)
    assert code == 0
    assert "@old, commit 2: 4 tokens of it, 2 here" in out
    os.remove(old)
    with pytest.raises(MissingError):
        kvsnap.inspect(new)
    lost = kvsnap.inspect(new, partial=True)
    assert lost.fork is not None
    assert (lost.fork.found, lost.n_tokens, lost.error and lost.error["kind"]) == (False, 6, "missing")
    code, out, err = shown("info", new)
    assert code == MissingError.exit_code
    assert "beside it" in out
    assert "not beside it" in err
    assert json_of(shown, "info", new)["error"]["exit_code"] == MissingError.exit_code


def test_a_fork_of_a_fork_counts_all_files_above_it(tmp_path: Path) -> None:
    with kvsnap.Library(tmp_path / "library") as library:
        with library.open("first") as session:
            session.append(snapshot((1, 2, 3, 4)))
        for parent, name, n in (("first", "second", 6), ("second", "third", 9)):
            library.fork(parent, name)
            with library.open(name) as session:
                session.append(snapshot(tuple(range(1, n + 1))))
        paths = [library.session_path(name) for name in ("first", "second", "third")]
    found = kvsnap.inspect(paths[2])
    assert found.fork is not None
    assert (found.fork.depth, found.fork.n_tokens, found.fork.own_tokens) == (2, 6, 3)
    assert found.fork.above_bytes == sum(map(os.path.getsize, paths[:2]))
    assert found.turns is not None
    assert (found.turns.n_live, found.turns.n_inherited) == (3, 2)


def test_an_unreadable_index_leaves_what_the_commit_says(tmp_path: Path, shown: Shown) -> None:
    path = tmp_path / "a.kvsnap"
    with Session.open(path) as session:
        for n in range(1, 60):
            session.append(snapshot(tuple(range(n))))
        place = session._now.commit.index
    raw = bytearray(path.read_bytes())
    raw[place + 70] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DamagedError):
        kvsnap.inspect(path)
    found = kvsnap.inspect(path, partial=True)
    assert (found.n_tokens, found.num_layers, found.architecture) == (59, 1, "synthetic")
    assert "INDEX" in found.damage[0]
    code, out, err = shown("info", path)
    assert (code, "59 at the last commit" in out, "INDEX" in err) == (DamagedError.exit_code, True, True)


def test_an_encrypted_file_without_its_key_tells_what_stands_in_clear(shown: Shown) -> None:
    path = DATA / "tiny_encrypted.kvsnap"
    with pytest.raises(KeyNeededError):
        kvsnap.inspect(path)
    found = kvsnap.inspect(path, partial=True)
    assert (found.n_tokens, found.layers, found.file_bytes, found.use) == (0, (), path.stat().st_size, "snapshot")
    assert (found.encryption, found.key_label) == ("aes-256-gcm", "bytes 0 to 31")
    code, out, err = shown("info", path)
    assert code == KeyNeededError.exit_code
    assert found.encryption in out
    assert "its key is needed" in err
    data = json_of(shown, "info", path)
    assert (data["error"]["kind"], data["error"]["exit_code"], data["file_id"]) == ("key", 16, found.file_id)
    pytest.importorskip("cryptography")
    opened = kvsnap.inspect(path, key=KEY)
    same = ("encryption", "key_label", "file_id", "created_ns", "file_bytes", "use", "version")
    assert [getattr(found, name) for name in same] == [getattr(opened, name) for name in same]
    assert (opened.n_tokens > 0, opened.error) == (True, None)


def test_several_files_are_told_one_after_the_other(shown: Shown, tmp_path: Path) -> None:
    good, none = DATA / "tiny.kvsnap", tmp_path / "none.kvsnap"
    data = json_of(shown, "info", good, DATA / "tiny_session.kvsnap")
    assert [f["n_tokens"] for f in data["files"]] == [6, 6]
    code, out, err = shown("info", none, good)
    assert code == MissingError.exit_code
    assert "tiny.kvsnap" in out
    assert "none.kvsnap" in err
    data = json_of(shown, "info", good, none)
    assert (data["files"][0]["n_tokens"], data["files"][1]["error"]["kind"]) == (6, "missing")
    assert "error" not in data["files"][0]
    assert "k v" in shown("info", good, "--layers")[1]


def test_a_summary_is_a_result() -> None:
    found = kvsnap.inspect(DATA / "tiny_session.kvsnap")
    layers, parts, roles, facts = found.tables()
    assert (len(layers.rows), len(parts.rows)) == (len(found.layers), len(found.parts))
    assert sum(row[3] for row in roles.rows) == sum(p.stored for p in found.parts)  # type: ignore[misc]
    assert ("n_tokens", 6) in facts.rows
    assert json.loads(json.dumps(found.to_dict()))["turns"]["n_live"] == 3
    assert found._repr_html_().startswith("<table><caption>facts</caption>")
    assert set(found.identity_known) | set(found.identity_unknown) >= {"weights", "tokenizer", "engine"}
    pandas = pytest.importorskip("pandas")
    assert isinstance(found.to_pandas(), pandas.DataFrame)


# -- words ---------------------------------------------------------------------------------------------------------


def test_a_conversation_begins_with_its_user() -> None:
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "which\nchat\x1b[2J is this?"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": [{"type": "text", "text": "this"}]},
    ]
    assert excerpts("all of it", chat) == ("which chat\\x1b[2J is this?", "this")
    assert excerpts("  some \t text\n", None) == ("some text", "some text")
    assert excerpts(None, None) == ("", "")
    assert excerpts("", [{"role": "user"}, {"role": "user", "content": 5}]) == ("", "")
    begins, ends = excerpts("start " + "x" * 100_000 + " end", None)
    assert begins.startswith("start xx")
    assert begins.endswith("...")
    assert ends.startswith("...xx")
    assert ends.endswith("xx end")
    assert len(begins) <= EXCERPT >= len(ends)
    assert excerpts("y" * EXCERPT, None) == ("y" * EXCERPT, "y" * EXCERPT)


def test_info_tells_how_it_begins_and_ends(tmp_path: Path, shown: Shown) -> None:
    path = tmp_path / "a.kvsnap"
    chat = ({"role": "user", "content": "tell me of [red]cats[/red]"}, {"role": "assistant", "content": "They purr."})
    kvsnap.save(snapshot((1, 2, 3), text="<user>tell me", messages=chat), path)
    out = shown("info", path)[1]
    assert "tell me of [red]cats[/red]" in out
    assert "They purr." in out
    assert json_of(shown, "info", path)["begins"] == "tell me of [red]cats[/red]"


def test_cat_by_turns(tmp_path: Path, shown: Shown) -> None:
    path = tmp_path / "a.kvsnap"
    with Session.open(path) as session:
        session.append(snapshot((1, 2, 3), text="one two"))
        session.append(snapshot((1, 2, 3, 4, 5), text="one two, three"))
    assert shown("cat", path, "--turns")[1] == (
        "--- turn 1, tokens 0 to 3\none two\n--- turn 2, tokens 3 to 5\n, three\n"
    )
    assert shown("cat", path, "--turns", "--tokens")[1].splitlines()[1::2] == ["1 2 3", "4 5"]
    data = json_of(shown, "cat", path, "--turns")["turns"]
    assert [(t["start"], t["stop"], t["tokens"]) for t in data] == [(0, 3, [1, 2, 3]), (3, 5, [4, 5])]
    assert shown("cat", path, "--turns", "--prompt-only")[0] == 2
    golden = DATA / "colikv" / "v1_basic.coli_kv"
    assert json_of(shown, "cat", golden, "--turns")["turns"][0]["tokens"] == list(kvsnap.load(golden).tokens)
    code, _, err = shown("cat", golden, "--turns")
    assert (code, "--model" in err) == (2, True)


def test_summaries_of_copies_agree_but_for_where_they_lie(tmp_path: Path) -> None:
    """The control of `timeless`: another content is another summary."""
    shutil.copy(DATA / "tiny.kvsnap", tmp_path / "a.kvsnap")
    assert timeless(summarise(tmp_path / "a.kvsnap")) == timeless(summarise(DATA / "tiny.kvsnap"))
    changed: Snapshot = replace(kvsnap.load(DATA / "tiny.kvsnap"), metadata={"title": "other"})
    kvsnap.save(changed, tmp_path / "b.kvsnap")
    assert timeless(summarise(tmp_path / "b.kvsnap")) != timeless(summarise(DATA / "tiny.kvsnap"))
    assert np.isfinite(summarise(tmp_path / "b.kvsnap").bound)
    assert mlxkv.FORMAT.name == "mlxkv"


@pytest.mark.engine
def test_cat_makes_text_of_ids_with_the_tokenizer_of_a_model(
    tmp_path: Path, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from kvsnap.engines import models
    from tiny_models import save_tiny

    model = tmp_path / "model"
    save_tiny(model)
    tokenizer = models.load_tokenizer(model)

    def loaded(*args: object, **kwargs: object) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(models, "_load_weights", loaded)
    ids = tuple(tokenizer.encode("what was kept", add_special_tokens=False))
    path = tmp_path / "a.mlxkv"
    kvsnap.save(snapshot(ids), path, format="mlxkv")
    code, out, _ = shown("cat", path, "--model", model)
    assert (code, out) == (0, tokenizer.decode(list(ids), clean_up_tokenization_spaces=False) + "\n")
    assert "what was kept" in shown("cat", path, "--turns", "--model", model)[1]
    code, _, err = shown("cat", path)
    assert (code, "--model" in err) == (2, True)
    kvsnap.save(snapshot((*ids, 10**6)), path, format="mlxkv")
    code, _, err = shown("cat", path, "--model", model)
    assert (code, "1 id that it does not know" in err) == (2, True)
    kvsnap.save(snapshot(ids), tmp_path / "b.kvsnap")  # its identity names another tokenizer
    code, out, err = shown("cat", tmp_path / "b.kvsnap", "--model", model)
    assert (code, "the text may be another" in err) == (0, True)


@pytest.mark.parametrize("name", ["v1_torn_tail_long", "hazard_foreign_rows"])
def test_damage_of_a_coli_kv_file_shows(name: str, shown: Shown) -> None:
    found = kvsnap.inspect(DATA / "colikv" / f"{name}.coli_kv")
    assert found.damage
    assert set(found.damage) <= set(found.notes)
    code, out, err = shown("info", DATA / "colikv" / f"{name}.coli_kv")
    assert (code, found.damage[0][:30] in out, found.damage[0] in err) == (0, True, False)
    assert kvsnap.inspect(DATA / "colikv" / "v1_basic.coli_kv").damage == ()


def test_info_reads_no_row_of_a_deepseek_file(monkeypatch: pytest.MonkeyPatch, shown: Shown) -> None:
    from kvsnap.files import Reader

    path, counts = DATA / "colikv" / "dsv4_window_only.coli_kv", list[int]()
    real = Reader.read_into

    def counted(self: Reader, offset: int, buffer: Any) -> int:
        counts.append(memoryview(buffer).nbytes)
        return real(self, offset, buffer)

    monkeypatch.setattr(Reader, "read_into", counted)
    assert shown("info", path)[0] == 12
    assert sum(counts) < 128 < path.stat().st_size


def test_index_rows_without_a_layer_are_told_and_counted_as_they_are_stored() -> None:
    folder = Path(__file__).parent / "data" / "colikv"
    found = kvsnap.inspect(folder / "v1_dsa_some_layers.coli_kv")
    assert [group.text for group in found.groups] == [
        "1 latent layer: latent rows of 8 and rope rows of 4, others kept as they are, float32",
        "3 latent layers: latent rows of 8 and rope rows of 4, float32",
    ]
    assert {name: part.stored for name, part in found.stored.items()} == {"float32": 960}
    for path in sorted(folder.glob("v[123]_*dsa*.coli_kv")):
        found = kvsnap.inspect(path)
        assert found.stored_bytes == found.file_bytes - 40 - 4 * found.n_tokens  # nothing else is in these files
        assert set(found.stored) <= {"float32", "fp8"}


def test_times_are_told_with_their_zone_and_how_long_ago(tmp_path: Path, shown: Shown) -> None:
    path = tmp_path / "a.kvsnap"
    with mock.patch("time.time_ns", return_value=time.time_ns() - 3 * 86_400 * 10**9 - 10**9):
        kvsnap.save(snapshot((1, 2, 3)), path)
    out = shown("info", path)[1]
    assert re.search(r"created +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S+ \(3 days ago\)", out)
    assert re.search(r"modified .*\(just now\)", out)

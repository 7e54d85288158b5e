"""`.coli_kv` files: reading and writing every golden file, `ColiFile` in place, crashes at every step, snapshots."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsnap import files
from kvsnap.errors import (
    BusyError,
    CompatibilityError,
    ConflictError,
    ContextError,
    DamagedError,
    FormatError,
    InputError,
    KvsnapError,
    MissingError,
    PoisonedError,
    StorageError,
    UnsupportedError,
    VersionError,
)
from kvsnap.formats import mlxkv, native
from kvsnap.formats.colikv import (
    FORMAT,
    ColiFile,
    Encoding,
    Geometry,
    assign_index_layers,
    dumps,
    encoding_of,
    load,
    loads,
    ratio_checksum,
    read_deepseek,
)
from kvsnap.formats.colikv import file as file_module
from kvsnap.formats.colikv import records as records_module
from kvsnap.formats.colikv.records import BytesSource
from kvsnap.formats.native.write import MemorySink
from kvsnap.identity import Identity
from kvsnap.layout import Layer, PositionRun, RandomState, Run, Sampler, SamplerState, Snapshot, Tensor, TensorSpec

DATA = Path(__file__).parent / "data" / "colikv"
MANIFEST = json.loads((DATA / "MANIFEST.json").read_text())["files"]
NAMES = [entry["name"] for entry in MANIFEST]
EXPECT = {entry["name"]: entry["expect"] for entry in MANIFEST}
WITH_HEADER = [
    n for n in NAMES if n not in {"mismatch_magic", "v1_short_inside_header", "v1_empty_file", "dsv4_window_only"}
]


def sidecar(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return found


def golden(name: str) -> bytes:
    return (DATA / f"{name}.coli_kv").read_bytes()


def geometry_of(name: str) -> Geometry:
    r, header = sidecar(name)["reader"], sidecar(name).get("header", {})
    layers = tuple(r["index_layers"]) if r["index_width"] else None
    count = 0 if layers is not None else header.get("index_layer_count", 0)
    return Geometry(
        n_layers=r["n_layers"], kv_lora=r["kv_lora"], qk_rope=r["qk_rope"], vocab=r["vocab"],
        index_width=r["index_width"], index_layers=layers, index_count=count, has_draft=r["has_mtp"],
    )  # fmt: skip


def encoding_for(name: str) -> Encoding:
    r = sidecar(name)["reader"]
    if r["tq"]:
        return encoding_of("int4" if r["tq"]["codec"] else "polar", r["tq"]["bits"])
    return Encoding("fp8") if r["fp8"] else Encoding("float32")


def floats(hexed: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytes.fromhex(hexed), "<f4")


Rows = tuple[list[int], list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]


def rows_of(name: str, start: int = 0, stop: int | None = None) -> Rows:
    """Tokens, latent, rope and index rows of the records of a golden file, as its sidecar has them."""
    records = sidecar(name)["records"][start:stop]

    def stacked(role: str) -> list[np.ndarray[Any, Any]]:
        return [np.stack([floats(r[role][i]["f32_hex"]) for r in records]) for i in range(len(records[0][role]))]

    return [r["token"] for r in records], stacked("latent"), stacked("rope"), stacked("index")


def copy(name: str, directory: Path) -> Path:
    path = directory / f"{name}.coli_kv"
    path.write_bytes(golden(name))
    return path


def usable(name: str) -> int:
    return int(sidecar(name).get("usable_records", 0))


# -- reading the goldens


def test_the_manifest_is_of_these_files() -> None:
    assert len(MANIFEST) >= 33
    for entry in MANIFEST:
        assert hashlib.sha256(golden(entry["name"])).hexdigest() == entry["sha256"]


@pytest.mark.parametrize("name", WITH_HEADER)
@pytest.mark.parametrize("way", ["load", "loads", "file"])
def test_a_golden_file_loads_as_its_sidecar_says(name: str, way: str, tmp_path: Path) -> None:
    facts, path = sidecar(name), copy(name, tmp_path)
    owners = tuple(facts["reader"]["index_layers"]) if facts["header"]["index_width"] else None
    if way == "file":
        with ColiFile.open(path, index_layers=owners) as opened:
            assert opened.n_records == usable(name)
            snapshot = opened.load()
    else:
        snapshot = load(path, index_layers=owners) if way == "load" else loads(golden(name), index_layers=owners)
    header, source = dict(facts["header"]), snapshot.source
    header.setdefault("format_tag", header.pop("complete_turn_records", None))
    assert source["header"] == header
    assert source["record_size"] == facts["record_bytes"]
    assert (source["physical_records"], source["usable_records"]) == (facts["physical_records"], usable(name))
    assert source["leftover_bytes"] == facts.get("leftover_bytes", 0)
    assert source["format"] == "colikv"
    assert (snapshot.n_rows, snapshot.n_pending, snapshot.token_offset) == (usable(name), 0, usable(name))
    if usable(name):
        check_rows(snapshot, name)
    assert path.read_bytes() == golden(name)


def check_rows(snapshot: Snapshot, name: str) -> None:
    facts = sidecar(name)
    records = facts.get("records") or sidecar("v1_basic")["records"]  # the hand-made dialect file has those
    n, tolerance = usable(name), facts.get("float_tolerance", 0)
    assert list(snapshot.tokens) == [r["token"] for r in records[:n]]
    owners = facts["reader"]["index_layers"] if facts["header"]["index_width"] else []
    for layer in snapshot.layers:
        assert layer.kind == "latent"
        roles = ["latent", "rope", *(["index"] if layer.index in owners else [])]
        assert [t.role for t in layer.tensors] == roles
        for tensor in layer.tensors:
            place = owners.index(layer.index) if tensor.role == "index" else layer.index
            expected = np.stack([floats(r[tensor.role][place]["f32_hex"]) for r in records[:n]])
            if tolerance and tensor.role != "index":
                assert np.abs(tensor.array - expected).max() <= tolerance
            else:
                assert tensor.array.tobytes() == expected.tobytes()
            if facts["magic_version"] == 1 or tensor.role == "index":
                assert tensor.bound == 0
            elif facts["magic_version"] == 3:
                assert tensor.bound == np.inf


def test_one_changed_byte_is_seen_by_the_check_of_the_rows() -> None:
    # The negative control of the test above.
    data = bytearray(golden("v1_basic"))
    data[-1] ^= 1
    with pytest.raises(AssertionError):
        check_rows(loads(bytes(data)), "v1_basic")


MODES = {"first_generation": "original-v1", "latest_generation": "original-latest"}


@pytest.mark.parametrize(
    ("name", "generation"), [(n, generation) for n in NAMES for generation in sidecar(n).get("original_readers", {})]
)
def test_the_modes_do_what_the_original_readers_did(name: str, generation: str, tmp_path: Path) -> None:
    wanted, mode = sidecar(name)["original_readers"][generation], MODES[generation]
    reader = sidecar(name)["reader"]
    with ColiFile.open(
        copy(name, tmp_path), geometry_of(name), mode=mode, encoding=encoding_for(name),
        context=reader["max_context"], draft_reserve=reader["draft"],
    ) as opened:  # fmt: skip
        assert opened.outcome == wanted["outcome"]
        assert opened.n_records == wanted["committed_after"]
        assert opened.draft_empty == wanted["draft_layer_marked_empty"]
        assert len(opened.load().tokens) == wanted["records_loaded"]


def test_the_safe_mode_reads_what_an_original_without_fp8_refuses(tmp_path: Path) -> None:
    path = copy("v2_read_without_fp8", tmp_path)
    with ColiFile.open(path, geometry_of("v2_read_without_fp8")) as opened:
        check_rows(opened.load(), "v2_read_without_fp8")


@pytest.mark.parametrize(
    ("name", "field", "values"),
    [("mismatch_layers", "layers", ("3", "4")), ("mismatch_vocab", "vocabulary", ("1000", "1001"))],
)
def test_another_model_is_refused_with_the_number_that_differs(
    name: str, field: str, values: tuple[str, str], tmp_path: Path
) -> None:
    path, geometry = copy(name, tmp_path), geometry_of(name)
    values = (values[0], str(geometry.n_layers if field == "layers" else geometry.vocab))
    for attempt in (lambda: ColiFile.open(path, geometry), lambda: load(path, geometry=geometry)):
        with pytest.raises(CompatibilityError, match=f"{field}: file {values[0]}, model {values[1]}") as caught:
            attempt()
        assert [f.name for f in caught.value.report.refusals] == [field]


def test_every_number_that_differs_is_named(tmp_path: Path) -> None:
    other = Geometry(n_layers=5, kv_lora=9, qk_rope=3, vocab=7, index_width=2, index_layers=(1,))
    with pytest.raises(CompatibilityError) as caught:
        load(copy("v1_basic", tmp_path), geometry=other)
    named = [f.name for f in caught.value.report.refusals]
    assert named == ["layers", "latent width", "rope width", "index width", "index layers", "vocabulary"]
    assert all(name in str(caught.value) for name in named)


def test_index_layers_are_checked_against_the_header(tmp_path: Path) -> None:
    path = copy("v1_dsa_some_layers", tmp_path)
    with pytest.raises(CompatibilityError, match="another number of layers"):
        load(path, index_layers=(0, 1, 2))
    for wrong in ((2, 0), (0, 4), (0, 0)):
        with pytest.raises(InputError, match="layers of this model"):
            load(path, index_layers=wrong)


def test_index_rows_of_unknown_layers_are_kept_apart_and_can_be_assigned(tmp_path: Path) -> None:
    snapshot = load(copy("v1_dsa_some_layers", tmp_path))
    assert any("give index_layers" in note for note in snapshot.source["notes"])
    loose = [t for t in snapshot.tensors() if t.role == "other"]
    assert [(t.name, t.shape) for t in loose] == [("index_rows", (4, 2, 6))]
    assert written(snapshot) == golden("v1_dsa_some_layers")
    placed = assign_index_layers(snapshot, (0, 2))
    check_rows(placed, "v1_dsa_some_layers")
    assert [t.spec.id for t in placed.tensors()] == list(range(10))
    with pytest.raises(CompatibilityError):
        assign_index_layers(snapshot, (0,))
    with pytest.raises(InputError):
        assign_index_layers(placed, (0, 2))


def test_the_context_rule_is_that_of_colibri(tmp_path: Path) -> None:
    path, geometry = copy("v1_context_full", tmp_path), geometry_of("v1_context_full")
    for context, reserve, fits in [(18, 0, True), (17, 0, False), (20, 3, False), (21, 3, True), (20, 2, True)]:
        with ColiFile.open(path, geometry, context=context, draft_reserve=reserve) as opened:
            if fits:
                assert opened.load().n_rows == 9
            else:
                with pytest.raises(ContextError, match=f"9 records .*{context}.*fewer than {context - 8 - reserve}"):
                    opened.load()


def test_a_draft_layer_starts_empty_and_is_said_so(tmp_path: Path) -> None:
    geometry = geometry_of("v1_mtp_model")
    assert geometry.has_draft
    with ColiFile.open(copy("v1_mtp_model", tmp_path), geometry) as opened:
        assert opened.draft_empty
        snapshot = opened.load()
    assert snapshot.source["draft_rows"] == "empty"
    assert any("draft" in note for note in snapshot.source["notes"])
    assert snapshot.num_layers == 3


def test_the_header_of_another_model_over_its_rows_is_a_warning_and_no_place_to_append(tmp_path: Path) -> None:
    name = "hazard_foreign_rows"
    path, geometry = copy(name, tmp_path), geometry_of(name)
    for snapshot in (load(path), loads(golden(name))):
        check_rows(snapshot, name)
        assert any("do not fit the count" in note for note in snapshot.source["notes"])
    assert not any("do not fit" in note for note in load(copy("v1_torn_tail_long", tmp_path)).source["notes"])
    more = rows_of("v1_basic", 0, 2)
    with ColiFile.open(path, geometry) as opened:
        with pytest.raises(CompatibilityError, match="rows do not fit the header"):
            opened.append(*more)
        assert path.read_bytes() == golden(name)
        opened.truncate(0)
        assert opened.append(*more) == 2
    assert path.read_bytes()[40:] == golden("v1_basic")[40 : 40 + 2 * 148]
    with ColiFile.open(path, geometry) as opened:  # nothing foreign is left
        assert opened.append(*rows_of("v1_basic", 2)) == 5
    assert path.read_bytes() == golden("v1_basic")


def test_rows_that_do_not_fit_can_be_trusted_explicitly(tmp_path: Path) -> None:
    path = copy("hazard_foreign_rows", tmp_path)
    with ColiFile.open(path, geometry_of("hazard_foreign_rows")) as opened:
        opened.trust_rows()
        assert opened.append(*rows_of("v1_basic", 0, 1)) == 7


def test_a_single_foreign_record_is_noticed_by_what_follows_it(tmp_path: Path) -> None:
    data = bytearray(golden("hazard_foreign_rows")[: 40 + 168])  # one record of 168 bytes under a header of 148
    data[32:36] = (1).to_bytes(4, "little")
    assert any("do not fit the count" in note for note in loads(bytes(data)).source["notes"])


# -- dialects


def test_a_turn_count_is_told_apart_from_fp8_by_the_size(tmp_path: Path) -> None:
    path = copy("dialect_v2_watermark", tmp_path)
    snapshot = load(path)
    assert (snapshot.source["dialect"], snapshot.source["complete_turn_records"], snapshot.n_rows) == (
        "watermark",
        3,
        3,
    )
    assert load(copy("v2_fp8", tmp_path)).source["dialect"] == "colibri"
    with ColiFile.open(path, geometry_of("dialect_v2_watermark")) as opened:
        for change in (opened.reset, lambda: opened.append(*rows_of("v1_basic", 0, 1))):
            with pytest.raises(UnsupportedError, match="read only"):
                change()
    assert path.read_bytes() == golden("dialect_v2_watermark")


def test_where_size_and_word_fit_both_meanings_the_caller_is_asked() -> None:
    # 37 fp8 records of 64 bytes take as much room as 16 float32 records of 148.
    data = bytearray(golden("v2_fp8")[:40] + bytes(37 * 64))
    data[32:36] = (4).to_bytes(4, "little")
    with pytest.raises(InputError, match="size does not tell"):
        loads(bytes(data))
    assert loads(bytes(data), dialect="fp8").source["codec"] == "fp8"
    assert loads(bytes(data), dialect="watermark").n_rows == 1
    data[32:36] = (37).to_bytes(4, "little")  # more than there would be as float32
    assert loads(bytes(data)).source["codec"] == "fp8"


@pytest.mark.parametrize(
    ("word", "source"), [(0, "v1_basic"), (1, "v2_fp8"), (260, "v3_rotated_int4"), (4, "v3_polar")]
)
def test_a_syntara_file_is_read_as_its_word_says(word: int, source: str) -> None:
    snapshot = loads(b"SYNTARAK" + golden(source)[8:])
    assert snapshot.source["dialect"] == "syntara"
    assert snapshot.source["header"]["format_tag"] == word
    check_rows(snapshot, source)


def test_a_deepseek_v4_file_is_recognised_and_refused_by_name(tmp_path: Path) -> None:
    facts, data = sidecar("dsv4_window_only"), golden("dsv4_window_only")
    with pytest.raises(UnsupportedError, match=r"COLIDV41.*2 layers, window 4.*3 tokens \[13, 932, 851\]"):
        load(copy("dsv4_window_only", tmp_path))
    found = read_deepseek(BytesSource(data), len(data))
    assert list(found.tokens) == facts["tokens"]
    header = facts["header"]
    assert (found.n_layers, found.window, found.head_dim) == (2, header["sliding_window"], header["head_dim"])
    assert (found.index_head_dim, found.rope_head_dim, found.vocab) == (6, 4, 1000)
    assert found.checksum == header["ratio_checksum"] == ratio_checksum([0, 0])
    for layer, expected in zip(found.layers, facts["layers"], strict=True):
        assert layer.window.tobytes() == bytes.fromhex(expected["window"]["f32_hex"])
        assert len(layer.compressed) == expected["compressed_count"]
    assert found.stopped is None
    flagged = bytearray(data)
    flagged[40 + 12 + 4 + 128] = 1  # the compressor flag of layer 0
    assert "compressor state" in str(read_deepseek(BytesSource(bytes(flagged)), len(data)).stopped)


# -- writing the goldens

MADE = [
    "v1_basic", "v1_dsa_some_layers", "v1_dsa_all_layers", "v1_no_rope", "v1_mtp_model", "v1_special_values",
    "v1_index_count_without_dsa", "v1_context_full", "v1_incremental", "mismatch_vocab", "mismatch_layers",
]  # fmt: skip


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("step", [100, 3, 1])
def test_the_same_records_give_the_same_bytes_whatever_the_appends(name: str, step: int, tmp_path: Path) -> None:
    g, header = geometry_of(name), sidecar(name)["header"]
    g = replace(g, n_layers=header["n_layers"], vocab=header["vocab"])
    path, n = tmp_path / "made.coli_kv", usable(name)
    for at in range(0, n, step):
        with ColiFile.open(path, g, create=True) as opened:
            assert opened.append(*rows_of(name, at, at + step)) == min(n, at + step)
    assert path.read_bytes() == golden(name)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["v2_fp8", "v3_polar", "v3_rotated_int4"])
def test_the_same_rows_encoded_give_the_bytes_of_the_original(name: str, tmp_path: Path) -> None:
    path, g = tmp_path / "made.coli_kv", geometry_of(name)
    with ColiFile.open(path, g, create=True, encoding=encoding_for(name)) as opened:
        opened.append(*rows_of("v1_basic", 0, 1))
        opened.append(*rows_of("v1_basic", 1, 4))
        opened_rows = opened.rows()
    assert path.read_bytes() == golden(name)
    assert opened_rows.tokens.tolist() == [r["token"] for r in sidecar(name)["records"]]
    # A float32 file is rewritten by the next append when it is opened with an encoding, as the original does.
    path.unlink()
    with ColiFile.open(path, g, create=True) as opened:
        opened.append(*rows_of("v1_basic", 0, 3))
    with ColiFile.open(path, g, encoding=encoding_for(name)) as opened:
        assert opened.load().tokens == tuple(opened_rows.tokens[:3])
        assert path.read_bytes()[:8] == b"COLIKV1\0"
        assert opened.append(*rows_of("v1_basic", 3, 4)) == 4
    assert path.read_bytes() == golden(name)


def test_an_original_in_fp8_mode_quantises_a_float32_file_on_the_fly(tmp_path: Path) -> None:
    path = copy("v1_basic", tmp_path)
    with ColiFile.open(path, geometry_of("v1_basic"), mode="original-latest", encoding=Encoding("fp8")) as opened:
        loaded = opened.load().truncate(4)
        check_rows(replace(loaded, source={}), "v2_fp8")
        assert path.read_bytes() == golden("v1_basic")


def test_truncate_then_append_leaves_the_stale_record_of_the_original(tmp_path: Path) -> None:
    path, name = tmp_path / "made.coli_kv", "v1_truncate_then_append"
    with ColiFile.open(path, geometry_of(name), create=True) as opened:
        opened.append(*rows_of("v1_incremental", 0, 6))
        opened.truncate(3)
        assert opened.load().tokens == tuple(rows_of("v1_incremental", 0, 3)[0])
        opened.append(*rows_of(name, 3))
    assert path.read_bytes() == golden(name)


def test_reset_leaves_the_stale_records_of_the_original(tmp_path: Path) -> None:
    path = tmp_path / "made.coli_kv"
    with ColiFile.open(path, geometry_of("v1_reset"), create=True) as opened:
        opened.append(*rows_of("v1_basic", 0, 3))
        opened.reset()
        assert opened.n_records == 0
    assert path.read_bytes() == golden("v1_reset")


def test_a_torn_tail_is_appended_over_and_an_overlong_count_is_lowered_first(tmp_path: Path) -> None:
    for name in ("v1_torn_tail_long", "v1_torn_tail_short"):
        path = copy(name, tmp_path)
        with ColiFile.open(path, geometry_of(name)) as opened:
            assert opened.n_records == 3
            assert opened.append(*rows_of("v1_basic", 3, 5)) == 5
        assert path.read_bytes()[: 40 + 5 * 148] == golden("v1_basic")


def test_a_packed_encoding_refuses_widths_that_it_would_store_as_zeros(tmp_path: Path) -> None:
    g = Geometry(n_layers=1, kv_lora=6, qk_rope=4, vocab=10)
    with pytest.raises(UnsupportedError, match="powers of two"):
        ColiFile.open(tmp_path / "x", g, create=True, encoding=Encoding("int4", 4))
    assert not (tmp_path / "x").exists()


def test_a_header_only_file_of_ours_is_what_the_original_writes(tmp_path: Path) -> None:
    ColiFile.open(tmp_path / "x", geometry_of("v1_header_only"), create=True).close()
    assert (tmp_path / "x").read_bytes() == golden("v1_header_only")


# -- opening


def test_opening_what_is_not_there_or_not_whole(tmp_path: Path) -> None:
    g = geometry_of("v1_basic")
    with pytest.raises(MissingError):
        ColiFile.open(tmp_path / "none", g)
    with pytest.raises(InputError, match="geometry"):
        ColiFile.open(tmp_path / "none", create=True)
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    with pytest.raises(FormatError):
        ColiFile.open(empty, g)
    with ColiFile.open(empty, g, create=True) as opened:
        assert opened.append(*rows_of("v1_basic")) == 5
    assert empty.read_bytes() == golden("v1_basic")
    short = copy("v1_short_inside_header", tmp_path)
    for create in (False, True):
        with pytest.raises(DamagedError, match=r"inside its header.*expected 40 bytes, found 23"):
            ColiFile.open(short, g, create=create)
    with pytest.raises(VersionError, match="1 to 3"):
        ColiFile.open(copy("mismatch_magic", tmp_path), g)
    assert short.read_bytes() == golden("v1_short_inside_header")


def test_symbolic_links_are_refused(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(copy("v1_basic", tmp_path))
    for attempt in (lambda: ColiFile.open(link), lambda: load(link)):
        with pytest.raises(InputError):
            attempt()
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KvsnapError):
        ColiFile.open(dangling, geometry_of("v1_basic"), create=True)
    assert not (tmp_path / "elsewhere").exists()


def test_a_second_writer_is_refused_and_a_reader_is_not(tmp_path: Path) -> None:
    path = copy("v1_basic", tmp_path)
    with ColiFile.open(path):
        with pytest.raises(BusyError):
            ColiFile.open(path)
        assert load(path).n_rows == 5
    ColiFile.open(path).close()


def test_arguments_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    path, g = copy("v1_basic", tmp_path), geometry_of("v1_basic")
    tokens, latent, rope, _ = rows_of("v1_basic", 0, 2)
    bad: list[tuple[str, Any]] = [
        ("outside the vocabulary", ([1, 1000], latent, rope)),
        ("outside the vocabulary", ([-1, 0], latent, rope)),
        ("integers", ([0.5, 1], latent, rope)),
        ("one array per layer", (tokens, latent[:2], rope)),
        ("one array per layer", (tokens, latent)),
        ("one array per layer", (tokens, latent, rope, [np.zeros((2, 6), np.float32)])),
        ("another shape", (tokens, rope, rope)),
        ("another shape", (tokens[:1], latent, rope)),
        ("another type", (tokens, [x.astype(np.float64) for x in latent], rope)),
    ]
    with ColiFile.open(path, g) as opened:
        for message, arguments in bad:
            with pytest.raises(InputError, match=message):
                opened.append(*arguments)
        assert opened.append([], [x[:0] for x in latent], [x[:0] for x in rope]) == 5
        for n in (-1, 6):
            with pytest.raises(InputError, match="cannot truncate"):
                opened.truncate(n)
        with pytest.raises(InputError):
            ColiFile.open(path, g, mode="other")
    with ColiFile.open(path) as opened, pytest.raises(InputError, match="geometry"):
        opened.append(tokens, latent, rope)
    assert path.read_bytes() == golden("v1_basic")


def test_a_file_changed_by_another_program_is_not_written_to(tmp_path: Path) -> None:
    path, g = copy("v1_basic", tmp_path), geometry_of("v1_basic")
    with ColiFile.open(path, g) as opened:
        changed = bytearray(path.read_bytes())
        changed[32] = 4
        path.write_bytes(changed)
        for change in (lambda: opened.append(*rows_of("v1_basic", 0, 1)), opened.reset):
            with pytest.raises(ConflictError):
                change()
    assert path.read_bytes() == changed


def test_a_lazy_snapshot_notices_that_the_file_changed(tmp_path: Path) -> None:
    path = copy("v1_basic", tmp_path)
    snapshot = load(path)
    first = snapshot.layers[0].tensors[0].array.copy()
    with ColiFile.open(path, geometry_of("v1_basic")) as opened:
        opened.reset()
    assert np.array_equal(snapshot.layers[0].tensors[0].array, first)
    with pytest.raises(ConflictError):
        _ = snapshot.layers[1].tensors[0].array


def test_the_first_engine_would_write_under_a_foreign_header_and_this_does_not(tmp_path: Path) -> None:
    path = copy("v1_basic", tmp_path)
    other = Geometry(n_layers=2, kv_lora=16, qk_rope=4, vocab=1000)
    zeros = [np.zeros((1, 16), np.float32)] * 2, [np.zeros((1, 4), np.float32)] * 2
    with ColiFile.open(path, other, mode="original-v1") as opened:
        with pytest.raises(CompatibilityError, match="first engine"):
            opened.append([1], *zeros)
        with pytest.raises(CompatibilityError):
            opened.reset()
    assert path.read_bytes() == golden("v1_basic")
    with ColiFile.open(path, other, mode="original-latest") as opened:  # the latest one starts a fresh file
        assert opened.append([1], *zeros) == 1
    assert load(path, geometry=other).tokens == (1,)


def test_an_original_that_finds_the_context_full_starts_over_at_the_first_record(tmp_path: Path) -> None:
    name = "v1_context_full"
    path = copy(name, tmp_path)
    with ColiFile.open(path, geometry_of(name), mode="original-latest", context=17) as opened:
        assert (opened.outcome, opened.n_records, opened.load().tokens) == ("exceeds-context", 0, ())
        assert opened.append(*rows_of(name, 4, 6)) == 2
        assert opened.load().tokens == tuple(rows_of(name, 4, 6)[0])
    assert len(path.read_bytes()) == len(golden(name))


# -- failing disks


def test_no_space_leaves_the_file_as_it_was_and_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, g = copy("v1_basic", tmp_path), geometry_of("v1_basic")
    monkeypatch.setattr(records_module, "_BLOCK", 148)
    with ColiFile.open(path, g) as opened:
        real, left = files.system._pwritev, [1]

        def full(fd: int, batch: list[memoryview], offset: int) -> int:
            if left[0] == 0:
                raise OSError(errno.ENOSPC, "full")
            left[0] -= 1
            return real(fd, batch, offset)

        monkeypatch.setattr(files.system, "_pwritev", full)
        with pytest.raises(StorageError) as caught:
            opened.append(*rows_of("v1_incremental", 5, 7))
        assert caught.value.errno == errno.ENOSPC
        assert path.read_bytes() == golden("v1_basic")
        monkeypatch.setattr(files.system, "_pwritev", real)
        assert opened.append(*rows_of("v1_incremental", 5, 7)) == 7
    assert path.read_bytes() == golden("v1_incremental")


def test_a_failed_sync_poisons_the_file_and_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, g = copy("v1_basic", tmp_path), geometry_of("v1_basic")
    with ColiFile.open(path, g) as opened:

        def failed(fd: int) -> None:
            raise OSError(errno.EIO, "gone")

        monkeypatch.setattr(os, "fdatasync", failed)
        with pytest.raises(StorageError):
            opened.append(*rows_of("v1_incremental", 5, 7))
        monkeypatch.undo()
        with pytest.raises(PoisonedError):
            opened.append(*rows_of("v1_incremental", 5, 7))
    assert path.read_bytes()[:40] == golden("v1_basic")[:40]
    with ColiFile.open(path, g) as opened:
        assert opened.append(*rows_of("v1_incremental", 5, 7)) == 7
    assert path.read_bytes() == golden("v1_incremental")


# -- crashes


class Disk:
    """A recorder that can tell every state in which a power cut could leave the file."""

    def __init__(self, start: bytes) -> None:
        self.start = start
        self.entries: list[tuple[str, int, bytes]] = []

    def record(self, operation: str, path: str, offset: int, data: bytes) -> None:
        del path
        self.entries.append((operation, offset, data))

    def states(self) -> Iterator[bytes]:
        """For every prefix: what was synced, and any choice of the later operations, the last one also cut short."""
        durable, pending = self.start, []
        yield durable
        for operation, offset, data in self.entries:
            if operation == "sync":
                durable, pending = applied(durable, pending), []
            else:
                pending.append((operation, offset, data))
                for kept in itertools.product((False, True), repeat=len(pending)):
                    chosen = [p for p, keep in zip(pending, kept, strict=True) if keep]
                    yield applied(durable, chosen)
                    if chosen and len(chosen[-1][2]) > 4:  # the count is one write of four bytes inside a sector
                        for cut in (1, len(chosen[-1][2]) // 2, len(chosen[-1][2]) - 1):
                            last = chosen[-1]
                            yield applied(durable, [*chosen[:-1], (last[0], last[1], last[2][:cut])])


def applied(content: bytes, operations: Sequence[tuple[str, int, bytes]]) -> bytes:
    out = bytearray(content)
    for operation, offset, data in operations:
        if operation == "write":
            out.extend(bytes(max(0, offset + len(data) - len(out))))
            out[offset : offset + len(data)] = data
        elif operation == "truncate":
            del out[offset:]
    return bytes(out)


def crash(
    kind: type[ColiFile], start: bytes, g: Geometry, act: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> list[bytes]:
    path = tmp_path / "crash.coli_kv"
    path.write_bytes(start)
    disk = Disk(start)
    monkeypatch.setattr(records_module, "_BLOCK", 148)  # one record at a time
    with kind.open(path, g) as opened:
        monkeypatch.setattr(files, "recorder", disk)
        act(opened)
        monkeypatch.setattr(files, "recorder", None)
    found = list(disk.states())
    assert found[0] == start
    assert len(disk.entries) >= 3
    return found


def torn(states: list[bytes], allowed: dict[int, list[int]], reference: bytes) -> list[int]:
    """Numbers of the states that show counted records which are not the allowed ones, bit for bit."""
    bad = []
    for number, state in enumerate(states):
        snapshot = loads(state)
        n, size = snapshot.n_rows, snapshot.source["record_size"]
        if list(snapshot.tokens) != allowed.get(n) or state[40 : 40 + n * size] != reference[40 : 40 + n * size]:
            bad.append(number)
    return bad


@pytest.mark.parametrize("start", ["v1_header_only", "v1_basic", "v1_torn_tail_short", "v1_torn_tail_long"])
def test_a_crash_during_append_loses_at_most_what_was_being_appended(
    start: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before, reference = usable(start), golden("v1_incremental")
    tokens = [r["token"] for r in sidecar("v1_incremental")["records"]]
    states = crash(
        ColiFile, golden(start), geometry_of(start), lambda f: f.append(*rows_of("v1_incremental", before, 7)),
        monkeypatch, tmp_path,
    )  # fmt: skip
    assert len(states) >= 9
    assert torn(states, {before: tokens[:before], 7: tokens}, reference) == []
    for state in states:  # each is a file to go on with
        n = loads(state).n_rows
        (tmp_path / "after").write_bytes(state)
        with ColiFile.open(tmp_path / "after", geometry_of(start)) as opened:
            assert opened.append(*rows_of("v1_incremental", n, 7)) == 7 if n < 7 else opened.n_records == 7
        assert (tmp_path / "after").read_bytes() == reference


def test_a_crash_during_truncate_then_append_never_mixes_old_and_new(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = "v1_truncate_then_append"

    def act(opened: ColiFile) -> None:
        opened.truncate(3)
        opened.append(*rows_of(name, 3))

    old, new = golden("v1_incremental"), golden(name)
    states = crash(ColiFile, old, geometry_of(name), act, monkeypatch, tmp_path)
    for state in states:
        n = loads(state).n_rows
        assert n in {7, 3, 5}
        reference = old if n == 7 else new
        assert state[40 : 40 + n * 148] == reference[40 : 40 + n * 148]


class CountFirst(ColiFile):
    """Publishes the count before the records are there: what a file must not do."""

    def _append(self, ids: Any, rows: Any) -> int:
        header, before = self.header, self.n_records
        self._publish(before + len(ids))
        raw = records_module.pack_records(records_module.columns_of(header), rows, ids)
        self._file.write_at([raw.data], header.offset(before))
        self._file.sync()
        return self.n_records


class OneSync(ColiFile):
    """Leaves out the sync between records and count."""

    def _append(self, ids: Any, rows: Any) -> int:
        real, calls = self._file.sync, [0]

        def sync() -> None:
            calls[0] += 1
            if calls[0] > 1:
                real()

        self._file.sync = sync  # type: ignore[method-assign]
        return super()._append(ids, rows)


@pytest.mark.parametrize("kind", [CountFirst, OneSync])
def test_the_crash_test_finds_a_wrong_order(
    kind: type[ColiFile], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tokens = [r["token"] for r in sidecar("v1_incremental")["records"]]
    states = crash(
        kind, golden("v1_basic"), geometry_of("v1_basic"), lambda f: f.append(*rows_of("v1_incremental", 5, 7)),
        monkeypatch, tmp_path,
    )  # fmt: skip
    assert torn(states, {5: tokens[:5], 7: tokens}, golden("v1_incremental")) != []


def test_a_rewrite_in_another_encoding_appears_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = copy("v1_basic", tmp_path)
    seen: list[tuple[str, str, bytes]] = []

    class Watch:
        def record(self, operation: str, named: str, offset: int, data: bytes) -> None:
            seen.append((operation, named, path.read_bytes()[:8]))

    monkeypatch.setattr(files, "recorder", Watch())
    with ColiFile.open(path, geometry_of("v1_basic"), encoding=Encoding("fp8")) as opened:
        opened.append(*rows_of("v1_incremental", 5, 6))
    monkeypatch.setattr(files, "recorder", None)
    names = [operation for operation, _, _ in seen]
    renamed = names.index("rename")
    assert "sync" in names[:renamed]
    assert all(magic == b"COLIKV1\0" for _, _, magic in seen[:renamed])
    assert all(named != str(path) for _, named, _ in seen[:renamed])
    assert load(path).n_rows == 6


# -- snapshots


def written(snapshot: Snapshot, **options: Any) -> bytes:
    sink = MemorySink()
    n = FORMAT.write(snapshot, sink, **options)
    assert n == len(sink.data)
    return bytes(sink.data)


def in_memory(snapshot: Snapshot) -> Snapshot:
    """The same with arrays that come from no file."""
    return replace(
        snapshot,
        layers=tuple(
            replace(layer, tensors=tuple(Tensor(t.spec, t.array.copy()) for t in layer.tensors))
            for layer in snapshot.layers
        ),
    )


@pytest.mark.parametrize("name", [*MADE, "v1_torn_tail_long", "v1_reserved_word_set"])
@pytest.mark.parametrize("group", [1, 64 << 20])
def test_a_loaded_file_is_saved_as_it_was(name: str, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsnap.formats.colikv.writing._GROUP", group)  # one column at a time, or whole records
    data, facts = golden(name), sidecar(name)
    if name == "v1_reserved_word_set":
        data = data[:36] + bytes(4) + data[40:]
    owners = tuple(facts["reader"]["index_layers"]) if facts["header"]["index_width"] else None
    snapshot = loads(data, index_layers=owners)
    expected = data[: 40 + usable(name) * facts["record_bytes"]]
    assert written(snapshot) == expected
    assert written(in_memory(snapshot)) == expected  # packed again, not copied
    left_out = {"runs", "index_layers"}
    assert {loss.what for loss in FORMAT.losses(snapshot)} <= left_out


def test_index_rows_without_a_layer_do_not_keep_codes_from_being_copied(tmp_path: Path) -> None:
    path, saved = copy("v2_fp8_dsa", tmp_path), tmp_path / "saved"
    snapshot = load(path)
    assert [t.name for t in snapshot.tensors() if t.role == "other"] == ["index_rows"]
    assert snapshot.save(saved, format="colikv").nbytes == len(golden("v2_fp8_dsa"))
    assert saved.read_bytes() == golden("v2_fp8_dsa")
    (tmp_path / "b").mkdir()
    other = load(copy("v2_fp8_dsa", tmp_path / "b"))
    mixed = replace(snapshot, layers=(other.layers[0], *snapshot.layers[1:]))
    assert dumps(mixed)[:8] == b"COLIKV1\0", "rows of two files are no file that could be copied"


@pytest.mark.parametrize("name", ["v2_fp8", "v2_fp8_dsa", "v2_invalid_codes", "v3_polar", "v3_rotated_int4"])
def test_stored_codes_are_copied_and_never_encoded_again(name: str, tmp_path: Path) -> None:
    owners = tuple(sidecar(name)["reader"]["index_layers"]) or None
    path, saved = copy(name, tmp_path), tmp_path / "saved"
    snapshot = load(path, index_layers=owners)
    _ = [t.array for t in snapshot.tensors()]
    assert snapshot.save(saved, format="colikv").nbytes == len(golden(name))
    assert saved.read_bytes() == golden(name) == dumps(snapshot)
    # A snapshot that is not all of the file any more is encoded.
    fewer = dumps(snapshot.truncate(1), codec=encoding_for(name).name)
    assert len(fewer) == 40 + sidecar(name)["record_bytes"]
    assert dumps(snapshot.truncate(1))[:8] == b"COLIKV1\0"
    swapped = replace(snapshot, layers=(replace(snapshot.layers[1], index=0), *snapshot.layers[1:]))
    assert dumps(swapped)[:8] == b"COLIKV1\0"


@pytest.mark.parametrize("name", ["v1_basic", "v1_dsa_some_layers", "v1_no_rope", "v1_special_values"])
@pytest.mark.parametrize("known", [True, False])
def test_the_way_through_the_native_file_and_back_keeps_every_byte(name: str, known: bool) -> None:
    owners = tuple(sidecar(name)["reader"]["index_layers"])
    snapshot = loads(golden(name), index_layers=owners if known and owners else None)
    assert dumps(native.loads(native.dumps(snapshot))) == golden(name)


def latent_snapshot(n: int = 4, layers: int = 2, dtype: str = "float32", **changes: Any) -> Snapshot:
    rng, number, out = np.random.default_rng(5), itertools.count(), []
    for layer in range(layers):
        tensors = []
        for role, width in (("latent", 8), ("rope", 4)):
            spec = TensorSpec(
                id=next(number), name=f"layers.{layer}.{role}", layer=layer, role=role, dtype=dtype,
                axes=("row", "dim"), shape=(0, width), row_axis=0,
            )  # fmt: skip
            tensors.append(Tensor(spec, rng.standard_normal((n, width)).astype(spec_dtype(dtype))))
        out.append(Layer(index=layer, kind="latent", tensors=tuple(tensors)))
    fields: dict[str, Any] = {
        "layers": tuple(out), "tokens": tuple(range(n)), "runs": (Run("prompt", n),), "n_rows": n, "token_offset": n,
        "positions": (PositionRun(0, n),), "identity": Identity(config=(("vocab_size", "50"),)),
    }  # fmt: skip
    return Snapshot(**{**fields, **changes})


def spec_dtype(name: str) -> Any:
    from kvsnap.layout import numpy_dtype

    return numpy_dtype(name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_snapshot_comes_back_bit_for_bit(dtype: str) -> None:
    snapshot = latent_snapshot(dtype=dtype)
    back = loads(written(snapshot))
    for mine, found in zip(snapshot.tensors(), back.tensors(), strict=True):
        assert np.array_equal(mine.array.astype(np.float32), found.array)
    assert back.tokens == snapshot.tokens
    assert dict(back.identity.config)["kv_lora_rank"] == "8"
    lost = [loss.what for loss in FORMAT.losses(snapshot) if loss.kind == "dtype"]
    assert len(lost) == (0 if dtype == "float32" else 4)


@pytest.mark.parametrize(("codec", "version"), [("fp8", 2), ("int4", 3), ("polar", 3), ("polar:3", 3)])
def test_a_snapshot_is_written_in_the_other_encodings(codec: str, version: int) -> None:
    snapshot = latent_snapshot(n=50)
    back = loads(written(snapshot, codec=codec))
    assert back.source["version"] == version
    for mine, found in zip(snapshot.tensors(), back.tensors(), strict=True):
        error = np.abs(mine.array - found.array).max()
        assert 0 < error <= found.bound
        assert error < 2
    assert [loss.what for loss in FORMAT.losses(snapshot, codec=codec)] == ["layers"]
    data = written(snapshot, codec=codec)
    assert written(back) == data
    assert written(back, codec=codec) == data
    assert FORMAT.losses(back, codec=codec) == FORMAT.losses(back)
    assert [loss.what for loss in FORMAT.losses(back, codec="int4" if version == 2 else "fp8")] == ["bound", "layers"]
    plain = loads(written(back, version=1))
    for stored, found in zip(back.tensors(), plain.tensors(), strict=True):
        assert np.array_equal(stored.array, found.array)


def test_what_a_file_cannot_hold_is_listed() -> None:
    logits = TensorSpec(
        id=99, name="logits", layer=-1, role="logits", dtype="float32", axes=("vocab",), shape=(50,), growth="replaced"
    )
    full = latent_snapshot(
        tokens=(0, 1, 2, 3, 4), n_pending=1, runs=(Run("prompt", 3), Run("generated", 2)), architecture="DeepseekV3",
        logits=Tensor(logits, np.zeros(50, np.float32)), sampler=SamplerState(Sampler(), RandomState(1)),
        text="x", metadata={"a": "b"},
        positions=(PositionRun(3, 4),), identity=Identity(config=(("rope_theta", "1"), ("vocab_size", "50"))),
    )  # fmt: skip
    lost = {loss.what for loss in FORMAT.losses(full)}
    assert lost == {
        "logits", "sampler", "identity", "architecture", "text", "metadata", "runs", "pending", "positions",
    }  # fmt: skip
    assert FORMAT.losses(latent_snapshot()) == ()
    assert loads(written(full)).tokens == (0, 1, 2, 3)


def with_layer(snapshot: Snapshot, place: int, **changes: Any) -> Snapshot:
    layers = list(snapshot.layers)
    layers[place] = replace(layers[place], **changes)
    return replace(snapshot, layers=tuple(layers))


def test_what_does_not_fit_is_refused_by_name_before_anything_is_written() -> None:
    good = latent_snapshot()
    wide = TensorSpec(
        id=7,
        name="layers.1.latent",
        layer=1,
        role="latent",
        dtype="float32",
        axes=("row", "dim"),
        shape=(0, 16),
        row_axis=0,
    )
    ragged = with_layer(good, 1, tensors=(Tensor(wide, np.zeros((4, 16), np.float32)), good.layers[1].tensors[1]))
    cases = [
        (ragged, UnsupportedError, "layer 1"),
        (with_layer(good, 1, kind="recurrent", tensors=()), UnsupportedError, "layer 1 .recurrent."),
        (with_layer(good, 1, shares=0), UnsupportedError, "layer 1"),
        (replace(good, layers=()), UnsupportedError, "none"),
        (replace(good, tokens=(1, 2)), UnsupportedError, "token id"),
        (replace(good, tokens=(1, 2, 3, 50)), InputError, "vocabulary"),
        (replace(good, identity=Identity()), InputError, "give vocab"),
        (replace(good, row_start=1), InputError, "partial"),
    ]
    for snapshot, error, message in cases:
        sink = MemorySink()
        with pytest.raises(error, match=message):
            FORMAT.write(snapshot, sink)
        assert not sink.data
    for options in (
        {"byte_order": "big"},
        {"version": 4},
        {"codec": "q8"},
        {"codec": "fp8", "version": 1},
        {"codec": "polar:x"},
    ):
        with pytest.raises(InputError):
            FORMAT.write(good, MemorySink(), **options)
    assert len(written(replace(good, identity=Identity()), vocab=50)) == 40 + 4 * (4 + 2 * 48)


def test_one_head_of_keys_and_values_is_stored_as_latent_and_rope_rows() -> None:
    rng, tensors = np.random.default_rng(3), []
    for number, (role, width) in enumerate((("k", 8), ("v", 4))):
        spec = TensorSpec(
            id=number, name=f"layers.0.{role}", layer=0, role=role, dtype="float32", axes=("head", "row", "dim"),
            shape=(1, 0, width), row_axis=1,
        )  # fmt: skip
        tensors.append(Tensor(spec, rng.standard_normal((1, 4, width)).astype(np.float32)))
    snapshot = replace(latent_snapshot(), layers=(Layer(index=0, kind="attention", tensors=tuple(tensors)),))
    back = loads(written(snapshot))
    assert [np.array_equal(t.array, tensors[i].array[0]) for i, t in enumerate(back.tensors())] == [True, True]
    assert [loss.what for loss in FORMAT.losses(snapshot)] == ["layers.0.kind"]


@pytest.mark.parametrize("name", ["v1_basic", "v1_no_rope", "v1_context_full"])
def test_the_way_through_mlxkv_and_back_keeps_every_byte(name: str) -> None:
    back = mlxkv.loads(mlxkv.dumps(loads(golden(name))))
    assert "vocab" not in {loss.what for loss in FORMAT.losses(back)}
    assert dumps(back, vocab=1000) == golden(name)
    with pytest.raises(InputError, match="give vocab"):
        dumps(back)


def test_a_growing_snapshot_is_appended_turn_by_turn(tmp_path: Path) -> None:
    whole, path = loads(golden("v1_dsa_some_layers"), index_layers=(0, 2)), tmp_path / "x"
    g = geometry_of("v1_dsa_some_layers")
    with ColiFile.open(path, g, create=True) as opened:
        assert opened.append_snapshot(whole.truncate(1)) == 1
        assert opened.append_snapshot(whole.truncate(3)) == 3
        tail = replace(
            whole,
            row_start=2,
            layers=tuple(replace(x, tensors=tuple(t.rows(2, 4) for t in x.tensors)) for x in whole.layers),
        )
        assert opened.append_snapshot(tail) == 4
        assert opened.append_snapshot(whole) == 4
        with pytest.raises(ConflictError, match=r"position 2 on: truncate\(2\)"):
            opened.append_snapshot(replace(whole, tokens=(*whole.tokens[:2], 5, 6)))
        elsewhere = loads(golden("v1_dsa_some_layers"), index_layers=(0, 1))
        with pytest.raises(CompatibilityError, match="other layers"):
            opened.append_snapshot(elsewhere)
    assert path.read_bytes() == golden("v1_dsa_some_layers")
    with ColiFile.open(path, g) as opened:
        opened.truncate(0)
        with pytest.raises(InputError, match="missing"):
            opened.append_snapshot(tail)
        with pytest.raises(CompatibilityError):
            opened.append_snapshot(latent_snapshot())


def test_sniffing_is_by_content() -> None:
    for name in NAMES:
        assert FORMAT.sniff(golden(name)[:64]) == (name != "v1_empty_file")
    assert FORMAT.sniff(b"SYNTARAK" + bytes(40))
    assert not FORMAT.sniff(b"MLXKV001" + bytes(40))


def test_a_large_file_is_read_in_blocks_and_by_column_alike(tmp_path: Path) -> None:
    g = Geometry(n_layers=6, kv_lora=512, qk_rope=64, vocab=100, index_width=128, index_layers=(1, 4))
    rng, n = np.random.default_rng(0), 700
    latent = [rng.standard_normal((n, 512)).astype(np.float32) for _ in range(6)]
    rope = [rng.standard_normal((n, 64)).astype(np.float32) for _ in range(6)]
    index = [rng.standard_normal((n, 128)).astype(np.float32) for _ in range(2)]
    path = tmp_path / "big"
    with ColiFile.open(path, g, create=True) as opened:
        opened.append(np.arange(n) % 100, latent, rope, index)
        eager = opened.load()
    lazy = load(path, geometry=g)
    outs = [np.empty(t.shape, np.float32) for t in lazy.tensors()]
    from kvsnap.tensors import read_all

    read_all(list(zip(lazy.tensors(), outs, strict=True)))
    for a, b, c in zip(eager.tensors(), load(path, geometry=g).tensors(), outs, strict=True):
        assert np.array_equal(a.array, b.array)
        assert np.array_equal(a.array, c)
    assert np.array_equal(lazy.layers[5].tensors[1].array, rope[5])
    assert np.array_equal(lazy.layers[4].tensors[2].array, index[1])
    assert os.path.getsize(path) == len(written(lazy))
    assert file_module.ColiFile is ColiFile

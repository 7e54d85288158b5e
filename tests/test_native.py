"""The native file against its spec: an independent reader and writer, golden files, sizes, and every damaged byte."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import synthetic
from kvsnap.drafts import draft_of
from kvsnap.errors import DamagedError, FormatError, InputError, MissingError, VersionError
from kvsnap.formats import native
from kvsnap.formats.native import listing
from kvsnap.inspection import summarise, verify
from kvsnap.layout import Snapshot, Tensor, numpy_dtype
from kvsnap.library.contents import NEWER, read_facts
from kvsnap.session import Session
from spec_file import IDENTITY, INDEX, LAYOUT, SPAN, STATE, Minimal, SpecReader, SpecWriter, h128, up
from synthetic import DATA, SAMPLER, same, snapshot

DTYPES = ["float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "int32", "int64"]


def check_against_spec(data: bytes, made: Snapshot, key: bytes | None = None) -> None:
    """What the independent reader finds in these bytes must be this snapshot."""
    reader = SpecReader(data, key=key)
    reader.records()
    found = reader.content()
    assert found["ids"] == list(made.tokens)
    assert found["kinds"] == [i for run in made.runs for i in [int(run.kind == "generated")] * run.count]
    assert found["positions"] == made.row_positions(0, made.n_rows).tolist()
    commit = reader.commit
    assert [commit[n] for n in ("n_tokens", "n_rows", "n_pending", "token_offset")] == [
        len(made.tokens), made.n_rows, made.n_pending, made.token_offset,
    ]  # fmt: skip
    for tensor in made.tensors():
        if tensor.nbytes:
            assert found["tensors"][tensor.name].dtype == tensor.array.dtype
            assert found["tensors"][tensor.name].tobytes() == tensor.array.tobytes(), tensor.name
    assert (found["logits"] is None) == (made.logits is None)
    if made.logits is not None:
        assert found["logits"].tobytes() == made.logits.array.tobytes()
    if made.sampler is None:
        assert found["sampler"] is None
    else:
        assert found["sampler"]["temperature"] == made.sampler.settings.temperature
        assert found["random"] == {"algorithm": "philox4x64", "seed": 7, "draws": made.sampler.random.draws}
    assert found["identity"] == made.identity.to_dict()
    assert found["metadata"] == dict(made.metadata)
    texts = found["texts"]
    assert ("".join(texts) if texts and None not in texts else None) == made.text


SHAPES: dict[str, dict[str, Any]] = {
    "empty": {"tokens": ()},
    "one token, not evaluated": {"tokens": (5,), "n_pending": 1},
    "one row": {"tokens": (5,)},
    "odd": {"tokens": range(1, 8), "layers": 3, "heads": 3, "dim": 5, "vocab": 17, "n_pending": 2},
    "text": {"tokens": range(9), "text": "täxt\n", "sampler": SAMPLER, "metadata": {"k": "ü"}, "n_prompt": 4},
    "no logits": {"tokens": range(40), "vocab": 0},
    "many": {"tokens": range(300), "layers": 2, "dim": 32},
    "recurrent": {"tokens": range(5), "recurrent": True},
}


def make(name: str) -> Snapshot:
    options = dict(SHAPES[name])
    return snapshot(tuple(options.pop("tokens")), **options)


@pytest.mark.parametrize("name", SHAPES)
def test_a_reader_made_from_the_spec_reads_what_we_write(name: str, tmp_path: Path) -> None:
    made = make(name)
    data = native.dumps(made)
    check_against_spec(data, made)
    assert same(native.loads(data), made) == []
    path = tmp_path / "a"
    report = native.save(made, path)
    assert report.nbytes == path.stat().st_size == len(data)
    assert report.exact
    for mmap in (True, False):
        assert same(native.load(path, mmap=mmap), made) == []
    assert verify(path).ok
    with Session.open(tmp_path / "b") as session:
        session.append(made)
    check_against_spec((tmp_path / "b").read_bytes(), made)
    if len(made.tokens) > 1:
        other = replace(made, tokens=(*made.tokens[:-1], 3))
        with pytest.raises(AssertionError):
            check_against_spec(data, other)  # the control


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bit_by_bit(dtype: str) -> None:
    made = snapshot(range(6), dtype=dtype)
    bits = np.frombuffer(np.random.default_rng(3).bytes(made.layers[0].tensors[0].nbytes), numpy_dtype(dtype))
    tensors = list(made.layers[0].tensors)
    tensors[0] = Tensor(tensors[0].spec, bits.reshape(tensors[0].shape))  # NaN with payload, infinities, subnormals
    made = replace(made, layers=(replace(made.layers[0], tensors=tuple(tensors)),))
    data = native.dumps(made)
    check_against_spec(data, made)
    assert same(native.loads(data), made) == []


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_q8_decodes_as_the_spec_says(dtype: str) -> None:
    made = snapshot(range(7), dtype=dtype, heads=3, dim=5)
    data = native.dumps(made, codec="q8")
    found, loaded = SpecReader(data).content(), native.loads(data)
    assert not found["exact"]
    assert found["bound"] == loaded.bound > 0
    for tensor, original in zip(loaded.tensors(), made.tensors(), strict=True):
        assert found["tensors"][tensor.name].tobytes() == tensor.array.tobytes()
        error = np.abs(tensor.array.astype(np.float64) - original.array.astype(np.float64)).max()
        assert 0 < error <= tensor.bound
    again = native.loads(native.dumps(loaded))
    assert again.bound == loaded.bound  # stored exactly, but what q8 did to it stays on record
    assert native.dumps(loaded) != native.dumps(made)


def test_we_read_what_a_writer_made_from_the_spec_writes(tmp_path: Path) -> None:
    m = Minimal()
    m.layout["comment"] = m.layout["tensors"][0]["comment"] = "members that we do not know are ignored"
    m.header["minor"], m.header["optional"] = 9, 1 << 40
    data = m.build()
    loaded = native.loads(data)
    assert (loaded.tokens, loaded.architecture, loaded.text) == ((5, 6, 7), "tiny", "abc")
    assert [(r.kind, r.count) for r in loaded.runs] == [("prompt", 2), ("generated", 1)]
    assert loaded.generated == (7,)
    assert loaded.identity.config == (("width", "4"),)
    assert loaded.metadata == {"a": "b"}
    assert loaded.logits is not None
    assert np.array_equal(loaded.logits.array, m.logits)
    head = loaded.head(0, 1)
    assert head is not None
    assert np.array_equal(head.k, m.k[1])
    assert np.array_equal(head.v, m.k[1])
    assert head.positions.tolist() == [0, 1, 2]
    path = tmp_path / "a"
    path.write_bytes(data)
    assert verify(path).ok
    assert summarise(path).version == "1.9"


def test_we_read_and_continue_a_session_made_from_the_spec(tmp_path: Path) -> None:
    """Two spans and their INDEX; the second entry is cut."""
    m = Minimal(2)
    w = SpecWriter(2)
    layout, identity = w.json(LAYOUT, m.layout), w.json(IDENTITY, {})
    spans, digest, entries = [], bytes(16), []
    for i in range(2):
        spans.append(w.table(SPAN, m.span | {"row_start": 3 * i, "token_start": 3 * i, "positions": [(3 * i, 3)]}))
        m.part(0)["row_start"] = m.span["parts"][1]["row_start"] = 3
    for i, kept in enumerate((3, 2)):
        digest = h128(digest + np.array([5, 6, 7][:kept], "<i4").tobytes() + np.array([kept], "<u8").tobytes())
        entries.append({
            "span": spans[i], "n_tokens": kept, "row_start": 3 * i, "n_rows": kept, "state": 0,
            "check": w.check_of(spans[i]), "digest": digest,
        })  # fmt: skip
    from spec_file import pack_entries

    index = w.record(INDEX, (2).to_bytes(8, "little") + bytes(56) + pack_entries(entries))
    w.commit(
        {"flags": 1, "n_tokens": 5, "n_rows": 5, "token_offset": 5, "layout": layout, "identity": identity,
         "index": index, "index_kept": 1, "digest": digest}, entries[1:],
    )  # fmt: skip
    path = tmp_path / "a"
    path.write_bytes(bytes(w.data))
    assert verify(path).ok
    with Session.open(path) as session:
        loaded = session.load()
        assert loaded.tokens == (5, 6, 7, 5, 6)
        assert np.array_equal(loaded.layers[0].tensors[0].array, np.concatenate([m.k, m.k[:, :2]], axis=1))
        session.truncate(4)
        assert session.load().tokens == (5, 6, 7, 5)
    assert SpecReader(path.read_bytes()).content()["ids"] == [5, 6, 7, 5]


# -- golden files --------------------------------------------------------------------------------------------


def test_the_golden_snapshot_is_read_for_ever() -> None:
    expected = json.loads((DATA / "tiny.json").read_text())
    data = (DATA / "tiny.kvsnap").read_bytes()
    found = SpecReader(data).content()
    loaded = native.load(DATA / "tiny.kvsnap")
    assert found["ids"] == list(loaded.tokens) == expected["ids"]
    assert found["kinds"] == expected["kinds"]
    assert found["positions"] == loaded.row_positions(0, loaded.n_rows).tolist() == expected["positions"]
    assert loaded.architecture == expected["architecture"]
    for name in ("n_rows", "n_pending", "token_offset", "text"):
        assert getattr(loaded, name) == expected[name]
    assert found["metadata"] == loaded.metadata == expected["metadata"]
    assert {t.name for t in loaded.tensors()} == set(expected["tensors"]) == set(found["tensors"])
    for tensor in loaded.tensors():
        row = expected["tensors"][tensor.name]
        assert (tensor.spec.dtype, list(tensor.shape)) == (row["dtype"], row["shape"])
        assert tensor.array.tobytes().hex() == found["tensors"][tensor.name].tobytes().hex() == row["hex"]
    assert loaded.logits is not None
    assert loaded.logits.array.tobytes().hex() == found["logits"].tobytes().hex() == expected["logits"]
    assert found["sampler"] == expected["sampler"]
    assert found["random"] == expected["random"]
    assert loaded.sampler == SAMPLER
    assert found["identity"] == loaded.identity.to_dict() == expected["identity"]
    assert verify(DATA / "tiny.kvsnap").ok


def test_the_golden_files_are_what_we_write_today(tmp_path: Path) -> None:
    assert synthetic.tiny_bytes() == (DATA / "tiny.kvsnap").read_bytes()
    assert synthetic.tiny_content() == json.loads((DATA / "tiny.json").read_text())
    synthetic.write_session(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == (DATA / "tiny_session.kvsnap").read_bytes()


def test_the_golden_session_is_read_for_ever() -> None:
    data = (DATA / "tiny_session.kvsnap").read_bytes()
    found = SpecReader(data)
    loaded = native.load(DATA / "tiny_session.kvsnap")
    assert found.content()["ids"] == list(loaded.tokens) == [21, 22, 23, 24, 25, 27]
    assert [c["operation"] for c in found.history()] == [1, 2, 1, 1, 3]
    assert (loaded.n_rows, loaded.n_pending, loaded.text) == (6, 0, None)
    exact = snapshot((21, 22, 23, 24, 25, 27))
    for tensor, whole in zip(loaded.tensors(), exact.tensors(), strict=True):
        assert tensor.array.tobytes() == found.content()["tensors"][tensor.name].tobytes()
        assert np.array_equal(tensor.array[:, [0, 1, 5]], whole.array[:, [0, 1, 5]])
        assert 0 < np.abs(tensor.array - whole.array).max() <= tensor.bound
    assert not loaded.source["complete"]
    assert verify(DATA / "tiny_session.kvsnap").ok


def test_the_golden_session_with_a_draft_is_read_for_ever() -> None:
    golden = DATA / "tiny_draft.kvsnap"
    loaded, found = native.load(golden), SpecReader(golden.read_bytes()).content()
    assert loaded.tokens == (41, 42, 43, 44, 45) == tuple(found["ids"])
    kept = draft_of(loaded)
    assert kept is not None
    assert same(kept, snapshot((41, 42, 43, 44), layers=2, heads=1, dim=2)) == []
    inner = SpecReader(found["tensors"]["draft"].tobytes()).content()  # a file of its own
    assert inner["ids"] == [41, 42, 43, 44]
    assert verify(golden).ok
    with Session.open(golden, readonly=True) as session:
        assert [session.load(n).draft is not None for n in (3, 4, 5)] == [True, False, True]


@pytest.mark.parametrize(
    ("where", "name"),
    [("tensors", "role"), ("tensors", "dtype"), ("tensors", "growth"), ("tensors", "rope"), ("tensors", "pairing"),
     ("layers", "kind")],
)  # fmt: skip
def test_a_word_of_a_later_version_is_refused_by_name_and_is_no_damage(where: str, name: str, tmp_path: Path) -> None:
    """Section 6: without it nothing can be said of the history. A library leaves such a session alone."""
    path, made = tmp_path / "a.kvsnap", Minimal(use=2)
    made.commit = {"operation": 1, "flags": 1}
    path.write_bytes(made.build())
    assert native.load(path).tokens == (5, 6, 7)
    made.layout[where][0][name] = "hologram"
    path.write_bytes(made.build())
    with pytest.raises(VersionError, match=f"{name} is not known") as caught:
        native.load(path)
    assert "hologram" in str(caught.value.found)
    facts = read_facts(str(path), SpecReader(path.read_bytes()).file_id.hex())
    assert facts is not None
    assert facts.state == NEWER


def test_the_example_page_is_made_from_the_golden_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert listing.main([str(DATA / "tiny.kvsnap")]) == 0
    text = capsys.readouterr().out
    page = (DATA.parent.parent / "docs" / "spec" / "example.md").read_text()
    assert f"```text\n{text}```\n" in page
    assert listing.main([]) == 2
    assert listing.main([str(tmp_path / "none")]) == MissingError.exit_code
    (tmp_path / "a").write_bytes((DATA / "tiny_session.kvsnap").read_bytes() + b"torn")
    assert listing.main([str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    assert "4 bytes that were never published" in out
    assert out.count("COMMIT ") == 2 * 5


# -- sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_the_size_formula_of_section_16(name: str) -> None:
    made = make(name)
    data = native.dumps(made)
    reader = SpecReader(data)

    def length(field: str, kind: int) -> int:
        return len(reader.record(reader.commit[field], kind)["payload"])

    n, tensors = len(made.tokens), [t for t in made.tensors() if t.spec.growth != "replaced"]
    replaced = [t for t in made.tensors() if t.spec.growth == "replaced"] + ([made.logits] if made.logits else [])
    span_meta = (
        len(json.dumps({"text": made.text}, separators=(",", ":"), ensure_ascii=False).encode()) if made.text else 0
    )
    runs = 16 * (len(made.runs) + len(made.positions))
    size = 128 + 64 + up(length("identity", 1)) + 64 + up(length("layout", 2))
    size += 64 + up(64 + up(4 * n, 8) + runs + span_meta) + 64 * len(tensors) + sum(up(t.nbytes) for t in tensors)
    state_meta = reader.record(reader.commit["state"], STATE)["payload"][44:48]
    size += (
        64 + up(64 + int.from_bytes(state_meta, "little")) + 64 * len(replaced) + sum(up(t.nbytes) for t in replaced)
    )
    size += 64 + up(length("note", 5)) if made.metadata else 0
    size += 64 + 192 + 64 + 64
    assert size == len(data)


# -- damage --------------------------------------------------------------------------------------------------


def test_every_flipped_bit_of_a_sealed_file_is_found(tmp_path: Path) -> None:
    """Reading everything finds it, or the byte is padding that is never read, and `verify` finds that."""
    made = replace(synthetic.tiny(), metadata={"a": "b"})
    data = native.dumps(made)
    good = native.loads(data)
    path = tmp_path / "a"
    outcomes = {"refused": 0, "padding": 0}
    for at in range(len(data)):
        for bit in (at % 8, (at + 5) % 8):
            bad = bytearray(data)
            bad[at] ^= 1 << bit
            try:
                found = same(native.loads(bytes(bad)), good)
            except (DamagedError, FormatError, VersionError):
                outcomes["refused"] += 1
                continue
            assert found == [], at
            assert data[at] == 0, at
            outcomes["padding"] += 1
            path.write_bytes(bytes(bad))
            report = verify(path)
            assert not report.ok, at
            assert abs(report.damages[0].offset - at) < 64
    assert min(outcomes.values()) > 200, outcomes


def test_damage_is_told_with_tensor_and_tokens(tmp_path: Path) -> None:
    path = tmp_path / "a"
    native.save(synthetic.tiny(), path)
    span = SpecReader(path.read_bytes()).entries()[0]["span"]
    part = SpecReader(path.read_bytes()).table(span, SPAN)["parts"][3]
    data = bytearray(path.read_bytes())
    data[span + 64 + part["offset"] + 7] ^= 1
    path.write_bytes(data)
    report = verify(path)
    (damage,) = report.damages
    assert (damage.tensor, damage.tokens, damage.live) == ("layer1.v", (0, 6), True)
    assert "layer1.v" in str(damage)
    assert "tokens [0, 6)" in str(damage)
    for mmap in (True, False):
        loaded = native.load(path, mmap=mmap)
        assert np.array_equal(loaded.layers[1].tensors[0].array, synthetic.tiny().layers[1].tensors[0].array)
        broken = loaded.layers[1].tensors[1]
        for read in (lambda t=broken: t.array, lambda t=broken: t.read_into(np.empty(t.shape, np.float32))):
            with pytest.raises(DamagedError, match=r"layer1\.v rows \[0, 5\)") as caught:
                read()
            assert caught.value.offset == span + 64 + part["offset"]
            assert caught.value.path == str(path)


def test_a_sealed_file_cut_off_anywhere_is_an_error(tmp_path: Path) -> None:
    data = native.dumps(synthetic.tiny())
    for n in range(len(data)):
        with pytest.raises((DamagedError, FormatError, InputError)):
            native.loads(data[:n])
    for more in (b"\0", bytes(64), data[-64:]):
        with pytest.raises(DamagedError, match=r"bytes follow the end|cut off"):
            native.loads(data + more)
    with pytest.raises(InputError, match="no bytes"):
        native.loads(b"")
    for strange in (b"GGUF" + bytes(200), b"{", b"\x89PNG\r\n\x1a\n" * 20):
        with pytest.raises(FormatError, match=r"not a \.kvsnap file"):
            native.loads(strange)
    path = tmp_path / "a"
    path.write_bytes(b"")
    with pytest.raises(FormatError, match="no bytes"):
        native.load(path)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    native.save(synthetic.tiny(), path)
    before = path.read_bytes()
    with pytest.raises(InputError, match="partial capture"):
        native.save(snapshot(range(6), start=2), path)
    with pytest.raises(InputError, match="no such codec"):
        native.save(synthetic.tiny(), path, codec="zip")
    with pytest.raises(InputError):
        native.save(replace(synthetic.tiny(), token_offset=2**70), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    with pytest.raises(MissingError, match="no directory"):
        native.save(synthetic.tiny(), tmp_path / "none" / "a")


def test_values_from_a_file_cannot_be_written_to(tmp_path: Path) -> None:
    path = tmp_path / "a"
    native.save(synthetic.tiny(), path)
    for mmap in (True, False):
        array = native.load(path, mmap=mmap).layers[0].tensors[0].array
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_two_saves_have_ids_of_their_own() -> None:
    a, b = native.dumps(synthetic.tiny()), native.dumps(synthetic.tiny())
    assert a[40:64] != b[40:64]
    assert same(native.loads(a), native.loads(b)) == []


def test_inspect_reads_no_tensor_byte(tmp_path: Path) -> None:
    path = tmp_path / "a"
    made = synthetic.tiny()
    native.save(made, path)
    data = bytearray(path.read_bytes())
    span = SpecReader(bytes(data)).entries()[0]["span"]
    for part in SpecReader(bytes(data)).table(span, SPAN)["parts"]:
        at = span + 64 + part["offset"]
        data[at : at + part["stored"]] = bytes(part["stored"])
    path.write_bytes(data)
    found = summarise(path)
    assert (found.n_tokens, found.n_prompt, found.n_generated, found.n_pending, found.n_rows) == (6, 4, 2, 1, 5)
    assert (found.num_layers, found.num_heads, found.num_query_heads, found.head_dim) == (2, 2, 4, 4)
    assert found.exact
    assert found.sealed
    assert found.has_text
    assert found.has_logits
    assert found.tensor_bytes == made.nbytes
    assert json.loads(json.dumps(found.to_dict()))["identity"]["weights"] == 2
    assert not verify(path).ok

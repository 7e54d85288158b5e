"""ls: a library and any other directory as a table, whatever lies in it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvsnap
from kvsnap.errors import InputError, MissingError
from kvsnap.inspection.listing import SORTS, in_library, is_library, listing
from kvsnap.session import Session
from synthetic import DATA, snapshot

Shown = Callable[..., tuple[int, str, str]]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with files of every format, and with what is none."""
    place = tmp_path / "files"
    (place / "below").mkdir(parents=True)
    made = snapshot(tuple(range(7)), text="the first words")
    kvsnap.save(made, place / "a.kvsnap")
    kvsnap.save(replace(made, text=None), place / "b.safetensors", format="safetensors")
    (place / "c.coli_kv").write_bytes((DATA / "colikv" / "v1_basic.coli_kv").read_bytes())
    (place / "d.mlxkv").write_bytes((DATA / "mlxkv" / "v3_f32.mlxkv").read_bytes())
    with Session.open(place / "e.kvsnap") as session:
        session.append(snapshot((1, 2)))
        session.append(snapshot((1, 2, 3)), complete=False)
    (place / "f.kvsnap").write_bytes((DATA / "tiny_encrypted.kvsnap").read_bytes())
    whole = (place / "a.kvsnap").read_bytes()
    (place / "g.kvsnap").write_bytes(whole[: len(whole) // 2])
    (place / "h.kvsnap").write_bytes(b"")
    (place / "readme.txt").write_bytes(b"not a cache")
    kvsnap.save(made, place / "below" / "x.kvsnap")
    return place


def test_a_directory_is_listed_by_what_its_files_are(place: Path, shown: Shown) -> None:
    found = listing(place)
    assert not found.is_library
    assert found.n_other == 1
    told = {one.name: one for one in found.files}
    assert [(n, told[n].format, told[n].state) for n in sorted(told)] == [
        ("a.kvsnap", "native", "ok"), ("b.safetensors", "safetensors", "ok"), ("c.coli_kv", "colikv", "ok"),
        ("d.mlxkv", "mlxkv", "ok"), ("e.kvsnap", "native", "ok"), ("f.kvsnap", "native", "encrypted"),
        ("g.kvsnap", "", "damaged"), ("h.kvsnap", "", "format"),
    ]  # fmt: skip
    for name in ("a.kvsnap", "b.safetensors", "c.coli_kv", "d.mlxkv", "e.kvsnap"):
        loaded = kvsnap.load(place / name)
        assert (told[name].n_tokens, told[name].nbytes) == (len(loaded.tokens), (place / name).stat().st_size)
    assert (told["a.kvsnap"].begins, told["a.kvsnap"].model) == ("the first words", "synthetic float32 synthetic")
    assert (told["e.kvsnap"].n_turns, told["e.kvsnap"].n_commits, told["e.kvsnap"].complete) == (2, 3, False)
    code, out, err = shown("ls", place)
    assert code == 0
    for text in ("the first words", "encrypted", "damaged", "last turn cut off"):
        assert text in out
    assert "8 files" in err
    assert "1 other file" in err
    data = json.loads(shown("ls", place, "--json")[1])
    assert [f["name"] for f in data["files"]] == sorted(told)
    assert data["is_library"] is False


def test_a_listing_names_the_model_and_the_encodings(tmp_path: Path, shown: Shown) -> None:
    made = snapshot(tuple(range(40)), metadata={"model": "/where/it/lies/small-model/"})
    kvsnap.save(made, tmp_path / "a.kvsnap")
    kvsnap.save(made, tmp_path / "b.kvsnap", codec="q8")
    kvsnap.save(snapshot((1, 2)), tmp_path / "c.kvsnap")
    told = {one.name: one for one in listing(tmp_path).files}
    assert told["a.kvsnap"].model == "small-model synthetic float32 synthetic"
    assert told["c.kvsnap"].model == "synthetic float32 synthetic"
    assert (told["a.kvsnap"].encodings, "q8" in told["b.kvsnap"].encodings) == (("exact",), True)
    with kvsnap.Library(tmp_path / "library") as library, library.open("one") as session:
        session.append(made)
    (one,) = listing(tmp_path / "library").files
    assert one.model.startswith("small-model ")
    assert one.encodings == ("exact",)
    out = shown("ls", tmp_path)[1]
    assert "stored as" in out
    assert "q8" in out


def test_a_listing_is_sorted(place: Path, shown: Shown) -> None:
    (place / "zz.kvsnap").write_bytes((place / "a.kvsnap").read_bytes())
    for n, name in enumerate(sorted(os.listdir(place))):
        os.utime(place / name, (time.time() - n * 1000,) * 2)
    found = listing(place)
    names = [one.name for one in found.files]
    assert names == sorted(names)
    values: dict[str, Callable[[Any], Any]] = {
        "size": lambda f: f.nbytes, "total": lambda f: f.total_bytes, "used": lambda f: f.used_ns,
        "created": lambda f: f.created_ns, "tokens": lambda f: f.n_tokens, "turns": lambda f: f.n_turns,
        "commits": lambda f: f.n_commits,
    }  # fmt: skip
    assert set(values) | {"name"} == set(SORTS)
    for by, value in values.items():
        told = [value(f) for f in found.sorted(by).files]
        assert told == sorted(told, reverse=True)
        assert [value(f) for f in found.sorted(by, reverse=True).files] == sorted(told)
        shown_names = [f["name"] for f in json.loads(shown("ls", place, "--sort", by, "--json")[1])["files"]]
        assert shown_names == [f.name for f in found.sorted(by).files]
    assert [f.name for f in found.sorted("name", reverse=True).files] == names[::-1]
    assert len({f.n_tokens for f in found.files}) > 2  # the control: there is something to sort
    with pytest.raises(InputError, match="sort by"):
        found.sorted("colour")
    assert shown("ls", place, "--sort", "colour")[0] == 2


def test_a_library_is_listed_by_its_names(tmp_path: Path, shown: Shown) -> None:
    where = tmp_path / "library"
    with kvsnap.Library(where) as library:
        with library.open("old") as session:
            session.append(snapshot((1, 2), messages=({"role": "system", "content": "be brief"},)))
            session.append(snapshot((1, 2, 3), messages=(
                {"role": "system", "content": "be brief"}, {"role": "user", "content": "which one is it?"},
            )))  # fmt: skip
        library.fork("old", "new")
        with library.open("new") as session:
            session.append(snapshot((1, 2, 3, 4, 5)))
        library.pin("old")
        old = library.session_path("old")
    assert is_library(where)
    found = listing(where)
    assert found.is_library
    assert [(f.name, f.begins, f.n_tokens, f.n_turns, f.pinned) for f in found.files] == [
        ("new", "which one is it?", 5, 3, False), ("old", "which one is it?", 3, 2, True),
    ]  # fmt: skip
    new = found.files[0]
    assert (new.parent_names, new.total_bytes) == (("old",), new.nbytes + os.path.getsize(old))
    data = json.loads(shown("ls", where, "--json")[1])
    assert {"path", "max_bytes", "nbytes", "overrun", "sessions"} <= set(data)
    assert [(s["name"], s["n_commits"], s["n_turns"]) for s in data["sessions"]] == [("new", 2, 3), ("old", 3, 2)]
    again = json.loads(shown("ls", "--library", where, "--json")[1])
    assert again == data
    code, out, err = shown("ls", where, "--long", "--sort", "size")
    assert (code, "fork of" in out, "2 sessions" in err) == (0, True, True)
    told = in_library(old)
    assert told is not None
    assert (told.names, told.fork_names, told.n_forks, told.pinned, told.parent_names) == (
        ("old",),
        ("new",),
        1,
        True,
        (),
    )
    assert in_library(DATA / "tiny.kvsnap") is None
    raw = bytearray(Path(old).read_bytes())
    raw[25] ^= 1  # the header
    Path(old).write_bytes(raw)
    assert {f.name: (f.state, f.begins) for f in listing(where).files} == {
        "old": ("damaged", ""),
        "new": ("damaged", ""),
    }
    assert shown("ls", where)[1].count("damaged") == 2


def test_several_directories_and_those_that_are_none(place: Path, tmp_path: Path, shown: Shown) -> None:
    code, out, err = shown("ls", place, tmp_path / "gone", place / "below")
    assert code == MissingError.exit_code
    assert "a.kvsnap" in out
    assert "x.kvsnap" in out
    assert "no such directory" in err
    data = json.loads(shown("ls", place, tmp_path / "gone", "--json")[1])["directories"]
    assert [("files" in d, d.get("error", {}).get("kind")) for d in data] == [(True, None), (False, "missing")]
    assert shown("ls", place / "a.kvsnap")[0] == InputError.exit_code
    assert shown("ls", tmp_path / "gone")[0] == MissingError.exit_code
    empty = tmp_path / "empty"
    empty.mkdir()
    assert shown("ls", empty)[0] == 0


def test_a_fork_without_its_parent_is_listed_as_such(tmp_path: Path, shown: Shown) -> None:
    (forks,) = [[p for p in sorted((DATA / "forks").glob("*.kvsnap")) if kvsnap.inspect(p).fork is not None]]
    (tmp_path / forks[0].name).write_bytes(forks[0].read_bytes())
    (one,) = listing(tmp_path).files
    assert (one.state, one.n_tokens) == ("no parent", kvsnap.inspect(forks[0]).n_tokens)
    assert "no parent" in shown("ls", tmp_path)[1]


def test_a_listing_is_a_result(place: Path) -> None:
    found = kvsnap.listing(place)
    (table,) = found.tables()
    assert len(table.rows) == len(found.files)
    assert "the first words" in found._repr_html_()
    pandas = pytest.importorskip("pandas")
    frame = found.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.set_index("name")["n_tokens"]["a.kvsnap"] == 7


def test_a_notebook_shows_snapshots_and_heads() -> None:
    made = kvsnap.load(DATA / "tiny.kvsnap")
    shown_html = made._repr_html_()
    assert shown_html is not None
    assert "2 attention layers: 2 heads of 4" in shown_html
    head = made.head(0, 0)
    assert head is not None
    shown_html = head._repr_html_()
    assert shown_html is not None
    assert f"{float(head.k.max()):.4g}" in shown_html
    evil = replace(made, architecture="<script>")._repr_html_()
    assert evil is not None
    assert "<script>" not in evil
    assert kvsnap.Snapshot()._repr_html_() is not None


def test_the_total_of_a_fork_counts_the_files_that_its_history_starts_in() -> None:
    files = {one.file_id: one for one in listing(DATA / "forks").files}
    forks = [one for one in files.values() if one.parent]
    assert forks
    for one in files.values():
        expected, at = one.nbytes, one
        while at.parent:
            at = files[at.parent]
            expected += at.nbytes
        assert one.total_bytes == expected


def test_a_file_of_another_format_tells_that_its_answer_was_cut_off(tmp_path: Path) -> None:
    for stop in ("length", "end"):
        snapshot((1, 2, 3), metadata={"stop": stop}).save(tmp_path / f"{stop}.safetensors", format="safetensors")
    assert {f.name: f.complete for f in kvsnap.listing(tmp_path).files} == {
        "length.safetensors": False, "end.safetensors": True,
    }  # fmt: skip

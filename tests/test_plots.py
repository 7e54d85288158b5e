"""Pictures as plain data: what is drawn, where its values stand, and what their table says."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree as ET

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from kvsnap.plots import (
    Bars,
    Drawn,
    Grid,
    HeatMap,
    Histogram,
    Histograms,
    Line,
    Lines,
    Marks,
    Node,
    Picture,
    Strip,
    Timeline,
    Tree,
    TurnBar,
    drawn,
    png,
    svg_file,
)
from kvsnap.plots.hover import rounded
from kvsnap.plots.matrices import norm_of
from kvsnap.results import text_of

NASTY = '</svg><script>alert("1")</script> $x_{1}$ & \\frac{1}{2} $'


def pictures() -> dict[str, Picture]:
    values = np.arange(12, dtype=np.float64).reshape(3, 4)
    values[1, 2] = np.nan
    edges = np.linspace(-1, 1, 6)
    return {
        "bars": Bars("Sizes", "MB", {NASTY: (3.0, "3 MB"), "q8": (1.0, "1 MB")}, (1, 2)),
        "bands": Bars("KL", "nats", {NASTY: (0.0, "0"), "q8": (2e-3, "0.002"), "q4": (np.nan, "?"), "q2": (1e9, "a")},
                      (1, 2, 1, 1), logarithmic=True, bands=((1e-3, "same"), (3e-3, NASTY), (np.inf, "bad"))),
        "heat": HeatMap(title=NASTY, x="layer", y="head", scale=NASTY, values=values),
        "diverging": HeatMap(title="d", x="a", y="b", scale="c", values=values - 5, diverging=True),
        "logarithmic": HeatMap(title="d", x="a", y="b", scale="c", values=values, logarithmic=True),
        "lines": Lines(title="Growth", x="tokens", y="MB", lines=(
            Line(NASTY, np.array([1, 10, 100]), np.array([1.0, 10.0, np.nan])),
            Line("b", np.array([1, 10, 100]), np.array([2.0, 20.0, 200.0]), marked=True),
        ), logarithmic_x=True, logarithmic_y=True),
        "histograms": Histograms(title="h", x="value", panels=(
            (NASTY, (
                Histogram("k", edges, np.array([1, 2, 9, 2, 1])), Histogram("v", edges, np.array([0, 0, 5, 0, 0])),
            )),
            ("layer 1", (Histogram("k", edges, np.zeros(5)),)),
        )),
        "strip": Strip(title="t", scale="norm", tokens=(NASTY, "b", "c" * 40), values=np.array([1.0, np.nan, 3.0])),
        "tree": Tree(title="Forks", axis="MB", nodes=(
            Node(name="root", depth=0, value=3, text="3 MB"),
            Node(name=NASTY, depth=1, value=0, text="0 B", faded=True),
        )),
        "timeline": Timeline(title="Turns", turns=(
            TurnBar(name="1", before=0, after=10, what="append", text=NASTY),
            TurnBar(name="2", before=10, after=4, what="truncate", text="-6", complete=False),
            TurnBar(name="3", before=4, after=4, what="reset", text="0"),
        )),
    }  # fmt: skip


NAMES = list(pictures())


@pytest.mark.parametrize("name", NAMES)
def test_an_svg_for_a_page_has_its_colours_and_no_styles(name: str) -> None:
    text = drawn(pictures()[name], "p-").svg
    assert text.startswith("<svg")
    ET.fromstring(text)  # noqa: S314 # our own
    assert " style=" not in text
    assert "<style" not in text
    assert "<script" not in text
    assert "#0102" not in text
    assert "currentColor" in text
    assert "http" not in text
    for used in re.findall(r"url\(#([^)]*)\)", text):
        assert used.startswith("p-")
        assert f'id="{used}"' in text


@pytest.mark.parametrize("name", NAMES)
def test_files_are_png_and_svg(name: str) -> None:
    picture = pictures()[name]
    assert png(picture).startswith(b"\x89PNG")
    text = svg_file(picture)
    ET.fromstring(text)  # noqa: S314 # our own
    assert b"<script" not in text


@pytest.mark.parametrize("name", NAMES)
def test_each_picture_says_its_numbers_as_a_table(name: str) -> None:
    table = pictures()[name].table()
    assert table.rows
    assert all(len(row) == len(table.columns) for row in table.rows)


def test_the_grid_of_a_heat_map_is_where_its_image_is() -> None:
    made = drawn(pictures()["heat"])
    assert isinstance(made.hover, Grid)
    box = re.search(r'<svg[^>]*viewBox="0 0 ([\d.]+) ([\d.]+)"', made.svg)
    assert box is not None
    left, top, width, height = made.hover.box
    assert left > 0
    assert left + width < float(box[1])
    assert top > 0
    assert top + height < float(box[2])
    # The drawing itself says where it put the image, by what it clips it with.
    clips = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"/>\s*</clipPath>', made.svg)
    assert any(np.allclose(list(map(float, clip)), made.hover.box, atol=0.06) for clip in clips)


def test_marks_of_lines_stand_on_the_line() -> None:
    made = drawn(Lines(title="g", x="n", y="MB", lines=(Line("a", np.arange(3), np.array([0.0, 5.0, 10.0]), True),)))
    assert isinstance(made.hover, Marks)
    (row,) = made.hover.rows
    assert [mark.text for mark in row] == ["n 0: 0 MB", "n 1: 5 MB", "n 2: 10 MB"]
    (x0, y0, *_), (x1, y1, *_), (x2, y2, *_) = (mark.box for mark in row)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert y0 > y1 > y2  # a page counts from the top
    drawn_at = [tuple(map(float, pair)) for pair in re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)"', made.svg)]
    assert any(abs(x - x1) < 0.3 and abs(y - y1) < 0.3 for x, y in drawn_at)


def test_values_of_a_grid_have_four_digits_and_gaps_are_none() -> None:
    values = np.array([[1.23456, np.nan, np.inf, -np.inf, 123456.7, 0.0]])
    data = drawn(HeatMap(title="t", x="x", y="y", scale="s", values=values)).hover.to_dict()
    assert data["values"] == [1.235, None, "infinite", "minus infinite", 123500, 0]
    assert rounded(2.0) == 2


def test_texts_of_a_row_share_their_beginning_and_lose_nothing() -> None:
    made: Drawn = drawn(pictures()["histograms"])
    assert isinstance(made.hover, Marks)
    for row, data in zip([r for r in made.hover.rows if r], made.hover.to_dict()["rows"], strict=True):
        assert [m.text for m in row] == [data["lead"] + m[4] for m in data["marks"]]
    texts = [mark.text for row in made.hover.rows for mark in row]
    assert f"{NASTY} k, -0.2 to 0.2: 9 values" in texts
    assert len(texts) == 6  # bins without values are not pointed at


def test_a_wide_heat_map_has_a_table_of_means_over_cells_that_have_values() -> None:
    values = np.arange(100, dtype=np.float64)[None, :].repeat(2, axis=0)
    values[0, :5] = np.nan
    values[1, 1] = np.nan
    table = HeatMap(title="t", x="position", y="layer", scale="s", values=values).table()
    assert len(table.columns) == 1 + 20
    assert table.columns[1] == "position 0 to 4"
    assert table.rows[0][1] is None
    assert table.rows[1][1] == pytest.approx((0 + 2 + 3 + 4) / 4)
    assert table.rows[0][-1] == pytest.approx(97)
    assert "means of 5" in table.title


def test_scales_survive_what_is_no_number() -> None:
    for values in (np.full((2, 2), np.nan), np.zeros((2, 2)), np.array([[np.inf, 1.0]]), np.array([[-1.0, -2.0]])):
        for logarithmic in (False, True):
            for diverging in (False, True):
                norm = norm_of(values, logarithmic=logarithmic, diverging=diverging)
                assert norm.vmin < norm.vmax
                drawn(HeatMap(title="t", x="x", y="y", scale="s", values=values, logarithmic=logarithmic,
                              diverging=diverging))  # fmt: skip


def test_an_axis_of_powers_without_a_value_is_an_empty_one() -> None:
    for x, y in (([1, 2], [0.0, 0.0]), ([0, -1], [1.0, 2.0]), ([1], [np.nan]), ([], [])):
        line = Line("a", np.array(x, dtype=np.float64), np.array(y, dtype=np.float64), marked=True)
        made = drawn(Lines(title="t", x="x", y="y", lines=(line,), logarithmic_x=True, logarithmic_y=True))
        assert made.hover == Marks(((),))


def test_a_diverging_scale_has_zero_in_its_middle() -> None:
    for ends in ([-1.0, 5.0], [-5.0, 1.0]):
        norm = norm_of(np.array(ends), logarithmic=False, diverging=True)
        assert norm(0.0) == 0.5
        assert (norm.vmin, norm.vmax) == (-5.0, 5.0)


def test_a_cell_without_a_value_is_hatched_and_one_with_is_not() -> None:
    values = np.ones((2, 2))
    whole = drawn(HeatMap(title="t", x="x", y="y", scale="s", values=values)).svg
    values[0, 0] = np.nan
    assert "<pattern" in drawn(HeatMap(title="t", x="x", y="y", scale="s", values=values)).svg
    assert "<pattern" not in whole


def test_texts_on_cells_have_colours_of_their_own_whatever_the_page_has() -> None:
    # A page's own colour of text is light on a dark page, and unreadable on a yellow cell.
    strip = Strip(title="t", scale="norm", tokens=("dim", "bright", "none"), values=np.array([1.0, 9.0, np.nan]))
    text = drawn(strip).svg
    found = {word: re.search(rf"<text([^>]*)>{word}<", text) for word in strip.tokens}
    fills = {word: re.search(r'fill="([^"]*)"', made[1]) for word, made in found.items() if made is not None}
    assert {word: made and made[1] for word, made in fills.items()} == {
        "dim": "#ffffff", "bright": "#000001", "none": "currentColor",
    }  # fmt: skip


def texts_in(picture: Picture) -> list[str]:
    """Return what is written into a picture, in the order of its drawing."""
    root = ET.fromstring(drawn(picture).svg)  # noqa: S314 # our own
    return ["".join(element.itertext()).strip() for element in root.iter() if element.tag.endswith("text")]


def test_a_logarithmic_axis_of_a_flat_line_has_numbers() -> None:
    lengths = np.array([1, 1000, 100_000])
    lines = (Line("live", lengths, np.full(3, 26.2)), Line("stored", lengths, np.array([26.2, 26.3, 27.2])))
    picture = Lines(title="g", x="tokens", y="MB", lines=lines, logarithmic_x=True, logarithmic_y=True)
    texts = texts_in(picture)
    assert {"10", "100", "1,000", "10,000", "100,000"} <= set(texts)
    hover = drawn(picture).hover
    assert isinstance(hover, Marks)
    heights = [mark.box[1] for mark in hover.rows[1]]
    assert max(heights) - min(heights) < 10  # 4 % more must not look like a cliff
    alone = Lines(title="g", x="n", y="nats", lines=(Line("a", lengths, np.full(3, 1e-3)),), logarithmic_y=True)
    assert {"0.001", "0.01"} <= set(texts_in(alone))


def test_large_numbers_are_told_without_powers_of_ten() -> None:
    picture = Lines(
        title="g", x="tokens", y="MB", lines=(Line("a", np.array([131072, 262144]), np.array([6039.797, 12079.59])),)
    )
    hover = drawn(picture).hover
    assert isinstance(hover, Marks)
    assert [mark.text for mark in hover.rows[0]] == ["tokens 131,072: 6,040 MB", "tokens 262,144: 12,080 MB"]
    assert [text_of(cell) for cell in picture.table().rows[1][1:]] == ["262,144", "12,080"]
    assert [text_of(value) for value in (1536.0, 0.012345, 1.5e-7, 2e18)] == ["1,536", "0.01235", "1.5e-07", "2e+18"]


def test_an_axis_of_percents_ends_at_100() -> None:
    bars = {"q8": (97.5, "97.5%, top-5 97.3%"), "rounded": (100.0, "100.0%, top-5 99.8%")}
    assert "120" in texts_in(Bars("Agreement", "%", bars, (1, 1)))
    texts = texts_in(Bars("Agreement", "%", bars, (1, 1), most=100))
    assert "100" in texts
    assert "120" not in texts


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.6, 9.8, {"1", "3", "6", "0.6"}), (0.1, 15, {"0.1", "0.3", "1", "3", "10"}), (2e-3, 0.06, {"0.002", "0.01"}),
     (1e-5, 10, {"1e-05", "0.001", "0.1", "10"}), (1.01, 1.02, {"1.01", "1.02"})],
)  # fmt: skip
def test_a_logarithmic_scale_of_colours_has_plain_numbers(low: float, high: float, expected: set[str]) -> None:
    values = np.geomspace(low, high, 12).reshape(3, 4)
    texts = texts_in(HeatMap(title="t", x="x", y="y", scale="times", values=values, logarithmic=True))
    assert expected <= set(texts)
    assert not [text for text in texts if ("times" in text and text != "times") or "{" in text or "×" in text]


@pytest.mark.filterwarnings("error")
def test_the_label_of_a_low_scale_is_not_cut() -> None:
    label = "times the median channel"
    sizes = []
    for n_rows in (3, 30):
        svg = drawn(HeatMap(title="t", x="x", y="y", scale=label, values=np.ones((n_rows, 4)))).svg
        sizes += [float(found) for found in re.findall(rf'font-size="([\d.]+)px"[^>]*>{label}', svg)]
    assert sizes[0] < 0.9 * sizes[1]


def test_names_in_any_script_are_drawn_without_a_warning() -> None:
    bars = Bars("東京の空", "MB", {"東京の空": (3.0, "3 MB")}, (1,))
    assert "東京の空" in texts_in(bars)
    assert png(bars).startswith(b"\x89PNG")


def test_a_token_stays_in_its_cell() -> None:
    tokens = ("<|im_start|>", "phenomenon", "because", " appears", "wwwwwwww", "東京都庁舎前", "a", " assistant")
    texts = texts_in(Strip(title="t", scale="norm", tokens=tokens, values=np.arange(8.0)))
    assert {"because", "appears", "a", "<|im_s…", "phenom…"} <= set(texts)
    assert not set(texts) & set(tokens) - {"because", "a"}
    assert "東京都…" in texts


def test_what_can_be_pointed_at_stands_where_it_is_drawn() -> None:
    made = {name: drawn(picture).hover for name, picture in pictures().items()}
    strip = made["strip"]
    assert isinstance(strip, Marks)
    boxes = [mark.box for mark in strip.rows[0]]
    assert boxes[0][2] > 10
    for (left, top, width, height), (nxt, *rest) in pairwise(boxes):
        assert nxt == pytest.approx(left + width, abs=0.2)
        assert rest == pytest.approx([top, width, height], abs=0.2)
    histograms = made["histograms"]
    assert isinstance(histograms, Marks)
    counts = np.array([1, 2, 9, 2, 1])
    heights = [mark.box[3] for mark in histograms.rows[0]]
    assert all(mark.box[1] > 0 for mark in histograms.rows[0])  # the fullest bin too stands in the picture
    assert heights == pytest.approx((counts * max(heights) / 9).tolist(), abs=0.2)
    turns = (
        TurnBar(name="1", before=0, after=10, what="append", text=""),
        TurnBar(name="2", before=10, after=40, what="append", text=""),
        TurnBar(name="3", before=40, after=20, what="truncate", text=""),
    )
    timeline = drawn(Timeline(title="t", turns=turns)).hover
    assert isinstance(timeline, Marks)
    lefts, widths = zip(*((row[0].box[0], row[0].box[2]) for row in timeline.rows), strict=True)
    unit = widths[0] / 10
    assert widths == pytest.approx([10 * unit, 30 * unit, 20 * unit], abs=0.2)
    assert [left - lefts[0] for left in lefts] == pytest.approx([0, 10 * unit, 20 * unit], abs=0.3)

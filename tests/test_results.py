"""Plain answers: tables for people, data frames and JSON for programs."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

import numpy as np
import pytest

from kvsnap.results import Result, Table, count, plain, size, table_of, text_of


@dataclass(frozen=True, slots=True)
class Item:
    layer: int
    share: float
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Answer(Result):
    items: tuple[Item, ...]
    norms: np.ndarray

    def tables(self) -> tuple[Table, ...]:
        return (table_of("items", self.items, ("layer", "share", "name")),)


ANSWER = Answer((Item(0, 0.5, "a<b>&"), Item(1, float("nan"), "c")), np.arange(3, dtype=np.float32))


def test_data_is_plain_to_the_last_leaf() -> None:
    data = ANSWER.to_dict()
    assert data["norms"] == [0.0, 1.0, 2.0]
    assert data["items"][0] == {"layer": 0, "share": 0.5, "name": "a<b>&"}
    assert json.loads(json.dumps(data))["items"][0]["layer"] == 0
    assert plain({1: np.int64(4), "b": b"\x01\xff"}) == {"1": 4, "b": "01ff"}


def test_a_notebook_is_given_escaped_text_and_headers() -> None:
    shown = ANSWER._repr_html_()
    assert "a&lt;b&gt;&amp;" in shown
    assert "<b>" not in shown
    assert shown.count('scope="col"') == 3


def test_a_long_table_says_how_much_is_left_out() -> None:
    table = Table("t", ("n",), tuple((i,) for i in range(1000)))
    assert table.to_html(10).count("<tr>") == 11
    assert "990 more rows" in table.to_html(10)


def test_a_data_frame_has_the_columns_and_numbers() -> None:
    pytest.importorskip("pandas")
    frame = ANSWER.to_pandas()
    assert list(frame.columns) == ["layer", "share", "name"]
    assert frame["layer"].tolist() == [0, 1]
    assert frame["share"].isna().tolist() == [False, True]


class Spoken(Answer):
    """An answer with words of its own."""

    __slots__ = ()

    def in_words(self) -> tuple[str, ...]:
        return ("a < b", "and so on")

    def tables(self) -> tuple[Table, ...]:
        return (*Answer.tables(self), Table("t", ("n",), ((1,),)))

    def shown_tables(self) -> tuple[Table, ...]:
        return self.tables()[::-1]


def test_a_notebook_shows_the_words_first_and_the_tables_in_the_order_of_a_reader() -> None:
    spoken = Spoken(**{f.name: getattr(ANSWER, f.name) for f in fields(ANSWER)})
    items, other = spoken.tables()
    assert spoken._repr_html_() == f"<p>a &lt; b</p><p>and so on</p>{other.to_html()}{items.to_html()}"
    assert ANSWER._repr_html_() == ANSWER.tables()[0].to_html()


def test_sizes_and_numbers_in_words() -> None:
    told = [size(n) for n in (0, 999, 1000, 1_023, 78_349_999, 10**9, 10**12, 1234 * 10**12)]
    assert told == ["0 B", "999 B", "1.0 kB", "1.0 kB", "78.3 MB", "1.0 GB", "1.0 TB", "1,234.0 TB"]
    assert [count(n, "token") for n in (0, 1, 1000)] == ["0 tokens", "1 token", "1,000 tokens"]
    cells = (None, True, False, 1234, 0.123456, 12345.678, float("inf"), "x")
    assert [text_of(cell) for cell in cells] == ["", "yes", "no", "1,234", "0.1235", "12,346", "inf", "x"]

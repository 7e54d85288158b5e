"""Plain answers: tables for people, data frames and JSON for programs."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

import numpy as np
import pytest

from kvsnap.results import Result, Table, plain, table_of


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

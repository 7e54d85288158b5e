"""What an inspection answers with: plain data that can be printed, handed to a program, and shown in a notebook."""

from __future__ import annotations

import html
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from kvsnap.errors import ExtraMissingError

__all__ = ["NOTEBOOK_ROWS", "Result", "Table", "count", "float_text", "numbers", "plain", "size", "table_of", "text_of"]

NOTEBOOK_ROWS = 200
"""Rows of a table that a notebook is given; the rest is counted."""

Cell = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Table:
    """A table: names of its columns (snake_case, with the unit where there is one), and a value for each in every row.

    None stands for what is not known or does not apply. Numbers are numbers, not texts.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame`. Raise `ExtraMissingError` without pandas (the extra `tables`)."""
        try:
            import pandas as pd  # noqa: PLC0415 # an extra
        except ImportError as error:
            raise ExtraMissingError("pandas is not installed: pip install 'kvsnap[tables]'") from error
        return pd.DataFrame.from_records(list(self.rows), columns=list(self.columns))

    def to_dicts(self) -> list[dict[str, Cell]]:
        """Return each row by the names of the columns."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def to_html(self, limit: int = NOTEBOOK_ROWS) -> str:
        """Return a `<table>` of the first `limit` rows with headers that a screen reader can tell; all is escaped."""
        right = [all(isinstance(row[i], int | float) or row[i] is None for row in self.rows) and bool(self.rows)
                 for i in range(len(self.columns))]  # fmt: skip
        style = [' style="text-align:right"' if r else ' style="text-align:left"' for r in right]
        head = "".join(
            f'<th scope="col"{s}>{html.escape(c.replace("_", " "))}</th>'
            for c, s in zip(self.columns, style, strict=True)
        )
        body = "".join(
            "<tr>"
            + "".join(f"<td{s}>{html.escape(text_of(v))}</td>" for v, s in zip(row, style, strict=True))
            + "</tr>"
            for row in self.rows[:limit]
        )
        caption = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        more = len(self.rows) - limit
        rest = f"<p>{more:,} more rows</p>" if more > 0 else ""
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}"


class Result(ABC):
    """Base of the frozen dataclasses that inspections return.

    A subclass says what it is in `tables`; data, data frames and notebooks follow from that and from its fields.
    """

    __slots__ = ()

    @abstractmethod
    def tables(self) -> tuple[Table, ...]:
        """Return what it says as tables, the main one first; never empty."""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data: every field by its name."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]

    def to_pandas(self) -> Any:
        """Return the main table as a `pandas.DataFrame`.

        Raise `ExtraMissingError` without pandas (the extra `tables`).
        """
        return self.tables()[0].to_pandas()

    def in_words(self) -> tuple[str, ...]:
        """Return what it says in sentences, which a notebook shows above the tables; none by default."""
        return ()

    def shown_tables(self) -> tuple[Table, ...]:
        """Return the tables in the order in which a notebook shows them: what a reader looks for first, first."""
        return self.tables()

    def _repr_html_(self) -> str:
        words = "".join(f"<p>{html.escape(line)}</p>" for line in self.in_words())
        return words + "".join(table.to_html() for table in self.shown_tables())


def plain(value: Any) -> Any:
    """Return data that JSON can hold: arrays and tuples as lists, results and dataclasses by field, bytes as hex.

    Floats stay floats, also those that are no numbers: whoever prints JSON says how those are written.
    """
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [plain(v) for v in value]
    return value


def text_of(value: Cell) -> str:
    """Return a cell for people: thousands apart, floats as `float_text` tells them, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return float_text(value)
    return value


def float_text(value: float) -> str:
    """Return a number with four significant digits, thousands apart; a large one without its fraction."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:,.4g}"


def size(n_bytes: float) -> str:
    """Return a number of bytes for people: `78.3 MB` (powers of 1000)."""
    value = float(n_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:,.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def count(number: int, what: str) -> str:
    """Return `1 token`, `2 tokens`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def numbers(values: Iterable[int]) -> str:
    """Return whole numbers in order as people write them: `0 to 3, 7`."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs)


def table_of(title: str, items: Sequence[Any], columns: Sequence[str]) -> Table:
    """Return a table of dataclasses: a row for each, with these fields of it."""
    return Table(title, tuple(columns), tuple(tuple(plain(getattr(i, c)) for c in columns) for i in items))

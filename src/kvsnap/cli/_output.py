"""What commands print with: JSON or text on stdout, remarks and progress on stderr, sizes for people."""

from __future__ import annotations

import inspect
import io
import json
import math
import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from kvsnap.reports.escaping import visible
from kvsnap.results import count, size

__all__ = [
    "CheckFailed",
    "count",
    "csv_row",
    "emit",
    "examples",
    "finite",
    "json_option",
    "progress",
    "remark",
    "say",
    "seconds",
    "show_table",
    "size",
    "table",
    "tell",
    "waiting",
]  # fmt: skip

Function = TypeVar("Function", bound=Callable[..., Any])
_LONG_WORD = 24
"""A word beyond this many characters (a path, a digest, settings in JSON) may be broken in a table."""
_PIPED = 4000
"""Columns that a table may take in a pipe, where nothing is folded: a reader of lines wants a row in one."""
_PATIENCE = 1.0
"""Seconds of work before a progress bar appears."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""What the formulas of spreadsheets begin with."""


class CheckFailed(Exception):  # noqa: N818 # not an error: the command did its work, and the answer is no
    """A command worked, has printed its answer, and the answer is no."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


def json_option(function: Function) -> Function:
    """Add `--json` to a command, as the parameter `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else.")(
        function
    )


def examples(*lines: str) -> Callable[[Function], Function]:
    """Add command lines to the help of a command, printed as they are. Stands next to the function."""

    def add(function: Function) -> Function:
        # Backspace is click's mark for a paragraph that is not rewrapped.
        shown = "\n".join(f"  {line}" for line in lines)
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n\b\nExamples:\n{shown}"
        return function

    return add


def finite(value: Any) -> Any:
    """Return data with the floats that JSON lacks (NaN, infinity) as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, list | tuple) else value


def emit(data: Any) -> None:
    """Print data as JSON on stdout."""
    print(json.dumps(finite(data), indent=2, default=str))


class OutputLostError(Exception):
    """Standard output cannot be written any more: its reader is gone, or its disk is full."""


def show(text: str) -> None:
    """Write text to stdout at once. After a failure, which is told once, stdout leads nowhere."""
    try:
        print(text, end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            remark(f"kvsnap: standard output cannot be written: {error.strerror}")
        raise OutputLostError from error


def say(text: str = "") -> None:
    """Print text for people on stdout: what files hold of it cannot steer a terminal."""
    print(visible(text, lines=True))


def csv_row(cells: Iterable[Any]) -> list[Any]:
    """Return cells for CSV: a text that a spreadsheet would take for a formula stands behind an apostrophe.

    On a terminal what cannot be seen of a text is written as its number.
    """
    seen = [visible(cell) if isinstance(cell, str) and sys.stdout.isatty() else cell for cell in cells]
    return [f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell for cell in seen]


def remark(text: str) -> None:
    """Print one line on stderr; on a terminal it is wrapped between words."""
    text = visible(text, lines=True)
    print(_wrapped(text) if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def tell(text: str) -> None:
    """Print lines on stdout; on a terminal each is wrapped between words."""
    text = visible(text, lines=True)
    print("\n".join(map(_wrapped, text.split("\n"))) if sys.stdout.isatty() else text)


def _wrapped(line: str) -> str:
    width = shutil.get_terminal_size().columns
    return textwrap.fill(line, max(20, width), break_long_words=False, break_on_hyphens=False)


def seconds(value: float) -> str:
    """Return a time for people: `12 ms`, `3.4 s`."""
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.1f} s"


def table(*columns: str, title: str | None = None, right: tuple[str, ...] = ()) -> Any:
    """Return an empty rich table with these columns; those named in `right` are set flush right.

    What cannot be seen of a cell, as what steers a terminal, is shown as its number.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    class Seen(Table):
        def add_row(self, *cells: Any, **settings: Any) -> None:
            super().add_row(*(visible(c, lines=True) if isinstance(c, str) else c for c in cells), **settings)

    title = None if title is None else visible(title)
    made = Seen(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def show_table(
    made: Any, *, spare: tuple[str, ...] = (), more: str = "--json", roomy: Mapping[str, int] | None = None
) -> None:
    """Print a rich table on stdout: on a terminal wrapped between words, in a pipe each row on one line.

    Where a terminal is too narrow the columns in `spare` are left out, one after the other, until the rest fits; a
    remark names them, and the option `more` that shows them. What does not fit all the same is printed row by row.
    `roomy` names columns that are not wrapped to less than so many characters while there is something to spare.
    """
    from rich.console import Console

    if sys.stdout.isatty():
        width, height = shutil.get_terminal_size()
        console = Console(highlight=False, width=width, height=height)  # rich asks no dumb terminal for its width
        narrow, left_out = _narrowed(made, spare, console, roomy or {})
        if narrow is None:
            _show_rows(made, console)
            return
        console.print(narrow)
        if left_out:
            remark(f"too narrow for {', '.join(left_out)}: {more} has all")
        return
    console = Console(highlight=False, width=_PIPED, file=io.StringIO())
    _fit(made, console)
    with console.capture() as captured:
        console.print(made)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n"))


def _narrowed(
    made: Any, spare: tuple[str, ...], console: Any, roomy: Mapping[str, int]
) -> tuple[Any, list[str]]:  # fmt: skip
    """Return a table that fits, without as few of the spare columns as that takes, and their names; None if none do."""
    left_out: list[str] = []
    there = {column.header for column in made.columns}
    still = [name for name in spare if name in there]
    while not _fit(made, console, roomy if still else {}):
        if not still:
            return None, left_out
        left_out.append(still.pop(0))
        made = _without(made, left_out[-1])
    return made, left_out


def _without(made: Any, name: str) -> Any:
    kept = [column for column in made.columns if column.header != name]
    right = tuple(column.header for column in kept if column.justify == "right")
    other = table(*(column.header for column in kept), title=made.title, right=right)
    for row in zip(*(column.cells for column in kept), strict=True):
        other.add_row(*row)
    return other


def _fit(made: Any, console: Any, roomy: Mapping[str, int] | None = None) -> bool:
    """Set the widths of the columns, the widest ones narrowed first; False if that would break a word or a number.

    A cell that is set flush right is a number, with its unit. Columns in `roomy` keep so many characters.
    """
    from rich.text import Text

    widths, least = [], []
    for column in made.columns:
        texts = [Text.from_markup(str(cell)) for cell in (column.header, *column.cells)]
        lines = [line for text in texts for line in text.plain.splitlines()]
        widths.append(max((Text(line).cell_len for line in lines), default=0))
        whole = [] if column.justify != "right" else lines[len(str(column.header).splitlines()) :]
        words = (Text(word).cell_len for line in lines for word in ([line] if line in whole else line.split()))
        room = min(widths[-1], (roomy or {}).get(str(column.header), 0))
        least.append(max(room, min(max(words, default=0), _LONG_WORD)))
    room = console.width - (3 * len(widths) - 1)  # a blank on each side of a cell, one between two, and the edges
    while sum(widths) > room:
        spare = [w - n for w, n in zip(widths, least, strict=True)]
        wide = [i for i, s in enumerate(spare) if s > 0]
        if not wide:
            return False
        widths[max(wide, key=lambda i: widths[i])] -= 1
    for column, width in zip(made.columns, widths, strict=True):
        column.width = max(1, width)
    return True


def _show_rows(made: Any, console: Any) -> None:
    from rich.padding import Padding

    columns = list(made.columns)
    for row in zip(*(column.cells for column in columns), strict=True):
        for number, (column, cell) in enumerate(zip(columns, row, strict=True)):
            # The first cell names the row, unless it is a number: of what, its column says.
            named = column.header and (number or column.justify == "right")
            name = f"{column.header}: " if named else ""
            console.print(Padding(f"{name}{cell}", (0, 0, 0, 2 if number else 0), expand=False))


@contextmanager
def waiting(title: str) -> Iterator[Callable[[], None]]:
    """Show a sign of life on a terminal once a block lasts over a second; yield a function that ends it early."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console

    status = Console(stderr=True).status(title)
    timer = threading.Timer(_PATIENCE, status.start)
    timer.daemon = True
    timer.start()

    def stop() -> None:
        timer.cancel()
        timer.join()
        status.stop()

    try:
        yield stop
    finally:
        stop()


@contextmanager
def progress(title: str) -> Iterator[Callable[..., None]]:
    """Yield a function to be told (done, total), which draws a bar on stderr once the work has lasted over a second.

    Nothing is drawn where stderr is not a terminal.
    """
    started = time.monotonic()
    bars: list[Any] = []

    def report(done: int, total: int, text: str = "") -> None:
        if not bars:
            if not sys.stderr.isatty() or time.monotonic() - started < _PATIENCE or done >= total:
                return
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
            bars.append(Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True))
            bars[0].add_task(text or title, total=total)
            bars[0].start()
        task = bars[0].task_ids[0]
        bars[0].update(task, completed=done, total=total, description=text or title)

    try:
        yield report
    finally:
        for bar in bars:
            bar.stop()

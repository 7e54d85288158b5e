"""The command that writes a page with pictures: report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import click

import kvsnap
from kvsnap.cli._keys import Keys, key_options
from kvsnap.cli._names import library_option, named, no_name, open_existing, shown
from kvsnap.cli._output import CheckFailed, count, emit, examples, json_option, progress, remark, size
from kvsnap.cli._paths import check_target
from kvsnap.plots import check_matplotlib

__all__ = ["COMMANDS", "check_page", "page_options", "write_page"]

Function = TypeVar("Function", bound=Callable[..., Any])


def page_options(function: Function) -> Function:
    """Add `-o PAGE` and `--overwrite` to a command whose answer can be drawn; as the parameters `page`, `overwrite`."""
    for option in (
        click.option("--overwrite", is_flag=True, help="Replace PAGE when it is there already."),
        click.option("-o", "--output", "page", metavar="PAGE", callback=no_name, help="Draw it, too: an .html file."),
    ):
        function = option(function)
    return function


def check_page(page: str | None, *, overwrite: bool) -> None:
    """Raise, before any work, where the page that is asked for cannot be written."""
    if page is not None:
        check_target(page, overwrite=overwrite, option="-o")
        check_matplotlib()


def write_page(found: Any, page: str | None, *, overwrite: bool) -> None:
    """Write what a command found as a page, where one was asked for, and say so on stderr."""
    if page is not None:
        with progress("drawing") as told:
            made = kvsnap.report_answer(found, page, overwrite=overwrite, progress=told)
        remark(f"{made.path}: {size(made.nbytes)}, {count(len(made.figures), 'picture')}")


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, callback=named)
@click.option(
    "-o", "--output", metavar="PAGE", required=True, callback=no_name, help="The page to write, an .html file."
)
@click.option("--figures", metavar="DIR", help="Write each picture into this directory, too.")
@click.option(
    "--figure-format",
    type=click.Choice(["png", "svg"]),
    default="png",
    show_default=True,
    help="Of --figures.",
)
@click.option("--sample", type=click.IntRange(min=1), metavar="N", help="Look at N rows of each tensor, not at all.")
@click.option("--no-text", is_flag=True, help="Leave text and token ids out of the page.")
@click.option("--title", metavar="TEXT", help="The heading of the page.")
@click.option("--model", metavar="NAME", help="Ask this model's tokenizer for the text of single tokens.")
@click.option("--overwrite", is_flag=True, help="Replace PAGE when it is there already.")
@library_option
@key_options()
@json_option
@examples(
    "kvsnap report chat.kvsnap -o report.html",
    "kvsnap report exact.kvsnap q8.kvsnap -o cost.html --figures pictures --figure-format svg",
    "kvsnap report long.kvsnap -o long.html --sample 4096 --no-text",
    "kvsnap report --library ./sessions -o library.html    # no FILE: the library",
)
def report(
    files: tuple[str, ...], output: str, figures: str | None, figure_format: Literal["png", "svg"], sample: int | None,
    no_text: bool, title: str | None, model: str | None, overwrite: bool, keys: Keys, as_json: bool,
) -> None:  # fmt: skip
    """Write one page about FILEs, with pictures: sizes, turns, growth, statistics, text.

    Of several files each is compared with the first one, too. Without a FILE it is about the library: its forks as a
    tree, sizes, ages, what could go; `--library DIR` says which. The page is one file that asks no network; it works in
    light and dark, by keyboard, and without scripts. It holds text of the conversation unless --no-text is given.
    """
    if not files and (sample is not None or model is not None or no_text):
        raise click.UsageError("--sample, --model and --no-text are for FILEs")
    check_page(output, overwrite=overwrite)
    with progress("reporting") as told:
        if not files:
            with open_existing() as library:
                made = kvsnap.report_library(
                    library, output, title=title, figures=figures, figure_format=figure_format,
                    overwrite=overwrite, progress=told,
                )  # fmt: skip
        else:
            made = kvsnap.report(
                files, output, title=title, names=_names(files), sample=sample, text=not no_text, figures=figures,
                figure_format=figure_format, overwrite=overwrite, key=keys.of,
                detokenize=_detokenize(model), progress=told,
            )  # fmt: skip
    if as_json:
        emit(made.to_dict())
    else:
        where = f", each in {figures}" if figures else ""
        print(f"{made.path}: {size(made.nbytes)}, {count(len(made.figures), 'picture')}{where}")
        for problem in made.problems:
            remark(f"could not be read: {problem}")
    if made.problems:
        raise CheckFailed(1)


def _names(files: Sequence[str]) -> Sequence[str] | None:
    names = [shown(file) for file in files]
    return names if any(name.startswith("@") for name in names) else None


def _detokenize(model: str | None) -> Callable[[Sequence[int]], str] | None:
    if model is None:
        return None
    from kvsnap.cli._model import open_engine

    return open_engine(model, None, None).detokenize


COMMANDS = (report,)

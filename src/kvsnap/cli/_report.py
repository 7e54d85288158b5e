"""The command that writes a page with pictures: report."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

import kvsnap
from kvsnap.cli._keys import Keys, key_options
from kvsnap.cli._model import open_decoder, recorded_decoder
from kvsnap.cli._names import library_option, named, no_name, open_existing, shown
from kvsnap.cli._output import CheckFailed, count, emit, examples, json_option, progress, remark, size
from kvsnap.cli._paths import check_target
from kvsnap.errors import InputError
from kvsnap.plots import check_matplotlib

if TYPE_CHECKING:
    from kvsnap.reports.answers import Answer

__all__ = ["COMMANDS", "Drawing", "page_options"]

Function = TypeVar("Function", bound=Callable[..., Any])
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Drawing:
    """Where the answer of a command is drawn to, too: a page, a directory for its pictures, both, or nowhere."""

    page: str | None
    overwrite: bool
    figures: str | None
    figure_format: Literal["png", "svg"]
    no_text: bool

    def check(self) -> None:
        """Raise, before any work, where what is asked for cannot be written."""
        if self.page is not None:
            check_target(self.page, overwrite=self.overwrite, option="-o")
        if self.page is not None or self.figures is not None:
            check_matplotlib()
        if self.figures is not None and os.path.lexists(self.figures) and not os.path.isdir(self.figures):
            raise InputError("--figures needs a directory, this is a file", path=self.figures)

    def draw(self, found: Answer) -> None:
        """Write what a command found, where that was asked for, and say so on stderr."""
        if self.page is None and self.figures is None:
            return
        with progress("drawing") as told:
            made = kvsnap.report_answer(
                found, self.page, text=not self.no_text, figures=self.figures, figure_format=self.figure_format,
                overwrite=self.overwrite, progress=told,
            )  # fmt: skip
        pictures = count(len(made.figures), "picture")
        if self.page is not None:
            pictures = f"{made.path}: {size(made.nbytes)}, {pictures}"
        remark(f"{pictures}, each in {self.figures}" if self.figures is not None else pictures)


def page_options(*, has_text: bool = True) -> Callable[[Function], Function]:
    """Return what adds `-o PAGE` and its relatives to a command whose answer can be drawn: the parameter `drawing`.

    `has_text` tells whether text or token ids may be in the answer, and can be left out.
    """
    options = [
        click.option("-o", "--output", "page", metavar="PAGE", callback=no_name, help="Draw it, too: an .html file."),
        click.option("--figures", metavar="DIR", help="Write each picture into this directory, with or without -o."),
        _format_option(),
        click.option("--overwrite", is_flag=True, help="Replace PAGE when it is there already."),
    ]
    if has_text:
        options.append(click.option("--no-text", is_flag=True, help="Leave text and token ids out of what is drawn."))

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def gathered(
            *, page: str | None, figures: str | None, figure_format: Literal["png", "svg"], overwrite: bool,
            no_text: bool = False, **given: Any,
        ) -> Any:  # fmt: skip
            return function(drawing=Drawing(page, overwrite, figures, figure_format, no_text), **given)

        decorated: Any = gathered
        for option in reversed(options):
            decorated = option(decorated)
        return decorated  # type: ignore[no-any-return] # click keeps the function

    return decorate


def _format_option() -> Callable[[Any], Any]:
    return click.option("--figure-format", type=click.Choice(["png", "svg"]), default="png", show_default=True,
                        help="Of --figures.")  # fmt: skip


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, callback=named)
@click.option(
    "-o", "--output", metavar="PAGE", required=True, callback=no_name, help="The page to write, an .html file."
)
@click.option("--figures", metavar="DIR", help="Write each picture into this directory, too.")
@_format_option()
@click.option("--sample", type=click.IntRange(min=1), metavar="N", help="Look at N rows of each tensor, not at all.")
@click.option("--no-text", is_flag=True, help="Leave text and token ids out of the page.")
@click.option("--title", metavar="TEXT", help="The heading of the page.")
@click.option("--model", metavar="NAME", help="Take the text of single tokens from the tokenizer of this model.  "
              "[default: the local one that FILE was made with, where it is there]")  # fmt: skip
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
    Drawing(output, overwrite, figures, figure_format, no_text).check()
    decoders = None if no_text else _decoders(files, model, keys)
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
                detokenize=decoders, progress=told,
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


def _decoders(files: Sequence[str], model: str | None, keys: Keys) -> Decode | dict[str, Decode]:
    """Return what turns ids into text: one for all where a model was named, else what each file's own model offers."""
    if model is not None:
        return open_decoder(model)
    found: dict[str, Decode] = {}
    known: dict[tuple[str, str], Decode | None] = {}
    for file in files:
        summary = kvsnap.inspect(file, key=keys.of(file))
        named_model = (summary.metadata.get("model", ""), summary.identity.tokenizer)
        if named_model not in known:  # one function for files of one model: then they can be compared as text
            known[named_model] = recorded_decoder(shown(file), summary.metadata, summary.identity)
        decode = known[named_model]
        if decode is not None:
            found[file] = decode
    return found


COMMANDS = (report,)

"""Writes reports: one page for files, or for a library, and on request each picture as a file of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from kvsnap import __version__
from kvsnap.errors import ConflictError, ExtraMissingError, InputError, KvsnapError, MissingError
from kvsnap.files import make_directory, write_whole
from kvsnap.filing import inspect, load
from kvsnap.formats.native import NAME
from kvsnap.inspection.described import Summary
from kvsnap.inspection.diff.comparing import diff
from kvsnap.inspection.exporting import refuse_cache
from kvsnap.inspection.growth.answers import Growth
from kvsnap.inspection.growth.growing import growth
from kvsnap.inspection.listing import in_library
from kvsnap.inspection.statistics import statistics
from kvsnap.layout import Snapshot
from kvsnap.library import Library
from kvsnap.plots import check_matplotlib, png, svg_file
from kvsnap.protocols import Progress
from kvsnap.reports.answers import Answer, page_of_answer, text_note
from kvsnap.reports.comparing import cards_of_diff
from kvsnap.reports.contents import overview, overview_table, sizes, text_of_chat, turns_of
from kvsnap.reports.escaping import slug, visible
from kvsnap.reports.growing import cards_of_growth, compared_growth
from kvsnap.reports.measures import cards_of
from kvsnap.reports.page import Block, Card, Figure, Group, Listing, Note, Page, figures_of, html_of
from kvsnap.reports.shelves import page_of_library
from kvsnap.reports.words import count, shortest_names
from kvsnap.results import Result, Table, table_of
from kvsnap.session import Session

__all__ = ["FigureFile", "ReportFile", "report", "report_answer", "report_library"]

Path = str | os.PathLike[str]
Keys = bytes | Callable[[str], bytes | None] | None
Detokenize = Callable[[Sequence[int]], str]
Decoders = Detokenize | Mapping[str, Detokenize] | None

_TRIES = 5
"""Times that a file is read which a session is writing to meanwhile: a page tells of one commit."""


@dataclass(frozen=True, slots=True)
class FigureFile:
    """A picture of a report: its name, its title, and the file that it was written to; "" where none was asked for."""

    name: str
    title: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFile(Result):
    """A report that was written: where, its length in bytes, its pictures, and what could not be read on the way.

    `path` is "" and `nbytes` 0 where only pictures were asked for.
    """

    path: str
    nbytes: int
    title: str
    figures: tuple[FigureFile, ...]
    problems: tuple[str, ...] = ()

    def tables(self) -> tuple[Table, ...]:
        """Return the pictures."""
        return (table_of("pictures", self.figures, ("name", "title", "path")),)


@dataclass(slots=True)
class _Steps:
    """Work in steps of equal share, told as (done, total) of 1000 for each."""

    total: int
    progress: Progress | None
    done: int = 0

    def within(self, done: int, total: int) -> None:
        """Tell how far the present step is."""
        if self.progress is not None:
            self.progress(1000 * self.done + 1000 * min(done, total) // max(1, total), 1000 * self.total)

    def next(self) -> None:
        """Tell that a step is done."""
        self.done += 1
        self.within(0, 1)


@dataclass(frozen=True, slots=True)
class _Options:
    sample: int | None
    text: bool
    key: Keys
    detokenize: Decoders
    brief: bool

    def key_of(self, path: str) -> bytes | None:
        return self.key(path) if callable(self.key) else self.key

    def decoder_of(self, *paths: str) -> Detokenize | None:
        """Return what turns ids of all these files into text; None where that is not one and the same."""
        if not self.text or callable(self.detokenize):
            return self.detokenize if self.text and callable(self.detokenize) else None
        first, *others = [(self.detokenize or {}).get(path) for path in paths]
        return first if all(other is first for other in others) else None


@dataclass(slots=True)
class _Told:
    """What one file came to."""

    name: str
    path: str
    summary: Summary
    cards: list[Card]
    growth: Growth | None = None
    problem: str = ""


def report(
    files: Path | Sequence[Path],
    out: Path,
    *,
    title: str | None = None,
    names: Sequence[str] | None = None,
    sample: int | None = None,
    text: bool = True,
    figures: Path | None = None,
    figure_format: Literal["png", "svg"] = "png",
    overwrite: bool = False,
    key: Keys = None,
    detokenize: Decoders = None,
    progress: Progress | None = None,
) -> ReportFile:
    """Write one page about cache files to `out`, durably, readable by its owner only.

    For each file: what it is, sizes, turns, growth, statistics by layer, head, channel and place, text. Of several
    files each is compared with the first, too. `names` are what the page calls them (default: the names of the files).
    `sample` looks at so many rows only. With `text=False` neither text nor token ids are in the page. `figures` is a
    directory that gets each picture as `figure_format`; those there are replaced with `overwrite` only. `detokenize`
    turns ids into the text of single tokens, or is a mapping of paths to such functions; without one ids are shown.
    `key` opens encrypted files, or is a function of a path that returns a key or None.

    A file whose tensors are damaged is reported as far as it can be read, and `problems` says so. Raise
    `ExtraMissingError` without matplotlib, `InputError` for no file or one of the name `out`, `MissingError`,
    `FormatError` and others as `inspect` does, `StorageError`. `progress` is called with (done, total).
    """
    paths = [os.fspath(p) for p in ([files] if isinstance(files, str | os.PathLike) else files)]
    if not paths:
        raise InputError("a report needs a file")
    if names is not None and len(names) != len(paths):
        raise InputError("each file needs one name", expected=len(paths), found=len(names))
    _check(out, figures, figure_format, overwrite=overwrite)
    shown = list(names) if names is not None else shortest_names(paths)
    options = _Options(sample, text, key, detokenize, brief=len(paths) > 1)
    steps = _Steps(2 * len(paths), progress)  # each file, each comparison, and drawing
    told = []
    for name, path in zip(shown, paths, strict=True):
        told.append(_told(name, path, options, steps))
        steps.next()
    groups = _overview(told)
    problems = [t.problem for t in told if t.problem]
    for other in told[1:]:
        cards, problem = _compared(told[0], other, options, steps)
        groups.append(Group(f"{visible(told[0].name)} and {visible(other.name)}", tuple(cards)))
        problems += [problem] if problem else []
        steps.next()
    groups += [Group(visible(t.name), tuple(t.cards)) for t in told]
    head = title or (f"Report of {visible(shown[0])}" if len(shown) == 1 else f"Report of {len(shown)} files")
    n_tokens = sum(t.summary.n_tokens for t in told)
    lead = f"{count(n_tokens, 'token')} in {count(len(told), 'file')}, kvsnap {__version__}"
    notes = (*(Note(visible(f"Not everything could be read. {problem}"), bad=True) for problem in problems),
             text_note(with_text=text))  # fmt: skip
    page = Page(head, lead, tuple(groups), notes=notes)
    return _written(page, out, figures, figure_format, problems, steps, overwrite=overwrite)


def report_library(
    library: Library | Path | None,
    out: Path,
    *,
    title: str | None = None,
    figures: Path | None = None,
    figure_format: Literal["png", "svg"] = "png",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ReportFile:
    """Write one page about a library: its forks as a tree, sizes, ages, and what could go. No tensor is read.

    `library` is an open one, or its directory (None: that of this user), which is opened for reading. Raise as
    `Library` and `report` do.
    """
    _check(out, figures, figure_format, overwrite=overwrite)
    steps = _Steps(1, progress)
    head = title or "Report of a library"
    if isinstance(library, Library):
        page = page_of_library(library, head)
    else:
        with Library(library, readonly=True) as opened:
            page = page_of_library(opened, head)
    return _written(page, out, figures, figure_format, [], steps, overwrite=overwrite)


def report_answer(
    found: Answer,
    out: Path | None = None,
    *,
    title: str | None = None,
    text: bool = True,
    figures: Path | None = None,
    figure_format: Literal["png", "svg"] = "png",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ReportFile:
    """Write one page about what `diff`, `statistics`, `quality` or `growth` answered; several growths side by side.

    With `text=False` no text and no token id is in it. Without `out` only the pictures are written, to `figures`; the
    `path` of the answer is "" then. Raise as `report` does, `InputError` for an empty sequence or neither of the two.
    """
    if out is None and figures is None:
        raise InputError("name a page to write, or a directory for the pictures")
    _check(out, figures, figure_format, overwrite=overwrite)
    page = page_of_answer(found, f"kvsnap {__version__}", title=title, with_text=text)
    return _written(page, out, figures, figure_format, [], _Steps(1, progress), overwrite=overwrite)


def _check(out: Path | None, figures: Path | None, figure_format: str, *, overwrite: bool) -> None:
    """Raise before any work is done whose result could not be kept."""
    check_matplotlib()
    if figure_format not in ("png", "svg"):
        raise InputError("not a format of pictures", expected="png or svg", found=figure_format)
    if out is not None:
        _check_page(os.fspath(out), overwrite=overwrite)
    if figures is not None and os.path.lexists(figures) and not os.path.isdir(figures):
        raise InputError("pictures need a directory, this is a file", path=os.fspath(figures))


def _check_page(path: str, *, overwrite: bool) -> None:
    if not path or os.path.isdir(path):
        raise InputError("a report needs the name of a file", path=path or None)
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise MissingError("no such directory to write to", path=os.path.dirname(path))
    if os.path.lexists(path) and not overwrite:
        raise InputError("there is a file of this name: use another name, or allow to overwrite it", path=path)
    refuse_cache(path)


def _told(name: str, path: str, options: _Options, steps: _Steps) -> _Told:
    key = options.key_of(path)
    found = _Told(name, path, _summary(path, key), [])
    try:
        for _ in range(_TRIES):
            snapshot = _read(found, key, options)
            now = _summary(path, key)
            if _state(now) == _state(found.summary):
                break
            found = _Told(name, path, now, [])
        else:
            raise ConflictError("the file was changed again and again while it was read", path=path)
        measured = statistics(snapshot, sample=options.sample, progress=steps.within)
        pieces = _pieces(measured.tokens, path, options)
        found.cards += cards_of(measured, pieces, with_text=options.text, brief=options.brief)
        if options.text:
            found.cards += [card for card in (text_of_chat(snapshot),) if card is not None]
    except ExtraMissingError:
        raise
    except KvsnapError as error:
        found.problem = str(error) if error.path == name else f"{name}: {error}"
        found.cards.append(_unread(error))
    return found


def _summary(path: str, key: bytes | None) -> Summary:
    """Return what the file is, with what its library, if it lies in one that can be read, says of it."""
    summary = inspect(path, key=key)
    with suppress(KvsnapError):
        summary = replace(summary, library=in_library(path))
    return summary


def _read(found: _Told, key: bytes | None, options: _Options) -> Snapshot:
    """Add what is told without reading all rows; return the snapshot, which stays as it is whatever comes."""
    summary, path = found.summary, found.path
    found.cards.append(overview(summary, with_text=options.text))
    found.cards += [card for card in (sizes(summary),) if card is not None]
    snapshot = load(path, key=key)
    if summary.format == NAME and not summary.sealed:
        with Session.open(path, readonly=True, create=False) as session:
            found.cards += [card for card in (turns_of(session.history),) if card is not None]
    found.growth = growth(path, key=key)
    found.cards += cards_of_growth(found.growth)
    return snapshot


def _state(summary: Summary) -> tuple[object, ...]:
    """Return what differs once a file was written to, or another one took its name."""
    return summary.file_id, summary.file_bytes, summary.commit, summary.n_tokens


def _unread(error: KvsnapError) -> Card:
    return Card("What could not be read", (Note(visible(str(error)), bad=True),))


def _pieces(ids: Sequence[int], path: str, options: _Options) -> list[str] | None:
    """Return what is written for each of these tokens; None where it is not to be shown."""
    if not options.text:
        return None
    told = options.decoder_of(path)
    return [str(i) if told is None else told([i]) or str(i) for i in ids]


def _overview(told: Sequence[_Told]) -> list[Group]:
    if len(told) < 2:
        return []
    blocks: list[Block] = [Listing(overview_table([(visible(t.name), t.summary) for t in told]))]
    cards = [Card("Side by side", tuple(blocks))]
    side = compared_growth([(t.name, t.growth) for t in told if t.growth is not None])
    return [Group("All files", (*cards, *([side] if side is not None else [])))]


def _commit_of(summary: Summary) -> int | None:
    """Return the commit that a page tells of, which need not be the last one by now; None: the file has no others."""
    return summary.commit if summary.format == NAME and not summary.sealed else None


def _compared(a: _Told, b: _Told, options: _Options, steps: _Steps) -> tuple[list[Card], str]:
    try:
        found = diff(
            a.path, b.path, key_a=options.key_of(a.path), key_b=options.key_of(b.path),
            commit_a=_commit_of(a.summary), commit_b=_commit_of(b.summary),
            detokenize=options.decoder_of(a.path, b.path), progress=steps.within,
        )  # fmt: skip
    except ExtraMissingError:
        raise
    except KvsnapError as error:
        return [_unread(error)], f"{a.name} and {b.name}: {error}"
    return cards_of_diff(found, (a.name, b.name), with_text=options.text), ""


def _written(
    page: Page,
    out: Path | None,
    directory: Path | None,
    figure_format: str,
    problems: Sequence[str],
    steps: _Steps,
    *,
    overwrite: bool,
) -> ReportFile:
    figures = list(figures_of(page))
    made = _places(figures, directory, figure_format)
    there = [one.path for one in made if one.path and os.path.lexists(one.path)]
    if there and not overwrite:
        raise InputError("there is a picture of this name: use another directory, or allow to overwrite", path=there[0])
    for path in there:
        refuse_cache(path)
    nbytes = 0 if out is None else write_whole(out, html_of(page, steps.within).encode("utf-8"), new=not overwrite)
    for number, (figure, one) in enumerate(zip(figures, made, strict=True), 1):
        if one.path:
            _draw(figure, one.path, new=not overwrite)
        if out is None:
            steps.within(number, len(figures))
    steps.next()
    return ReportFile(
        path="" if out is None else os.fspath(out),
        nbytes=nbytes,
        title=page.title,
        figures=tuple(made),
        problems=tuple(problems),
    )


def _places(figures: Sequence[Figure], directory: Path | None, figure_format: str) -> list[FigureFile]:
    """Name each picture, no two the same, and say where it goes; nowhere without a directory."""
    made: list[FigureFile] = []
    for number, figure in enumerate(figures, 1):
        name = slug(figure.name)
        name = name if name not in {one.name for one in made} else f"{name}-{number}"
        path = "" if directory is None else os.path.join(directory, f"{name}.{figure_format}")
        made.append(FigureFile(name, figure.picture.title, path))
    return made


def _draw(figure: Figure, path: str, *, new: bool) -> None:
    if not os.path.isdir(os.path.dirname(path)):
        make_directory(os.path.dirname(path))
    made = svg_file(figure.picture) if path.endswith(".svg") else png(figure.picture)
    write_whole(path, made, sync=False, new=new)

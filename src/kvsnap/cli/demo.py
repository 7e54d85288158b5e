"""`kvsnap demo`: the main job on real weights and real text, every claim checked by the program."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from importlib import resources
from typing import Any

import click

from kvsnap import files
from kvsnap.cli._model import EMBEDDED, model_options, open_engine
from kvsnap.cli._output import CheckFailed, count, emit, examples, json_option, remark, seconds, size
from kvsnap.errors import ContextError, InputError

__all__ = ["demo"]

_MADE = ("prompt.kvsnap", "middle.kvsnap", "middle.q8.kvsnap", "session.kvsnap", "flipped.kvsnap")
_TURNS = 128
"""Positions kept free for the questions and answers of step 5."""


@click.command()
@click.option("--output", default="demo-out", show_default=True, metavar="DIR", help="Where files and pictures go.")
@click.option("--tokens", type=int, metavar="N", help="Use only the first N tokens of the text.")
@click.option("--half", type=int, default=32, show_default=True, metavar="N", help="Tokens before and after the stop.")
@model_options
@json_option
@examples("kvsnap demo", "kvsnap demo --json --output /tmp/demo", "kvsnap demo --model ./my-model --tokens 500")
def demo(
    output: str,
    tokens: int | None,
    half: int,
    model: str | None,
    dtype: str | None,
    attention: str | None,
    as_json: bool,
) -> None:
    """Show the main job on a real model: save, resume in a new process, compare.

    A text of about 2,000 tokens is read, an answer is begun, stopped and saved; a new process goes on, and every step
    is compared with the run that never stopped. Then: other sampler settings, the small encoding, a session with a
    rewind, forks in a library, and refusals. Each claim is checked while it runs; when one fails, the exit code is 1.

    One to three minutes on two quiet cores, more when they are busy; the output directory takes about 400 MB.
    """
    model = EMBEDDED if model is None else model
    _check(output, tokens, half, model)
    from kvsnap.cli import _demo_forks, _demo_steps, _demo_trust

    story = _Story(as_json)
    started = time.perf_counter()
    run = _prepare(output, tokens, half, model, dtype, attention)
    story.begin(model)
    stages: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("reading the text", lambda: _demo_steps.read_and_save(run)),
        ("going on in a new process, then evaluating the same again", lambda: _demo_steps.go_on(run, dtype, attention)),
        ("three continuations", lambda: _demo_steps.sweep(run)),
        ("the small encoding", lambda: _demo_trust.small_encoding(run)),
        ("turns of a session", lambda: _demo_trust.grow_and_rewind(run)),
        ("branches in a library", lambda: _demo_forks.branch(run)),
        ("what it refuses", lambda: _demo_trust.refusals(run)),
    )
    steps = [story.step(title, work) for title, work in stages]
    from kvsnap.cli._demo_report import write_report

    taken = time.perf_counter() - started
    pictures = write_report(run, steps, _demo_trust.key_norms(run), taken)
    ok = all(s.ok for s in steps)
    if as_json:
        emit({"ok": ok, "model": model, "output": output, "seconds": taken, "steps": [s.to_dict() for s in steps],
              "files": run.files, "report": pictures})  # fmt: skip
    else:
        story.end(run.files, pictures, ok=ok, taken=taken)
    if not ok:
        raise CheckFailed(1)


def _taken_by(path: str) -> int:
    """Return the bytes of a file, or of all files in a directory."""
    if not os.path.isdir(path):
        return os.path.getsize(path)
    return sum(os.path.getsize(os.path.join(where, name)) for where, _, names in os.walk(path) for name in names)


def _text() -> str:
    return (resources.files("kvsnap") / "data" / "essay.txt").read_text(encoding="utf-8").strip()


def _check(output: str, tokens: int | None, half: int, model: str) -> None:
    """Raise for what can be told to be wrong before anything is loaded."""
    from kvsnap.engines.gguf import require
    from kvsnap.engines.models import resolve

    if half < 2:
        raise InputError("--half is too small", expected="2 or more", found=half)
    if tokens is not None and tokens < 1:
        raise InputError("--tokens is too small", expected="1 or more", found=tokens)
    if not output:
        raise InputError("--output needs the name of a directory", found="an empty one")
    if os.path.lexists(output) and not os.path.isdir(output):
        raise InputError("a directory is needed, this is a file", path=output)
    for module in ("torch", "transformers"):
        require(module)
    resolve(model)


def _prepare(output: str, tokens: int | None, half: int, model: str, dtype: str | None, attention: str | None) -> Any:
    from kvsnap.cli._demo_parts import Run

    started = time.perf_counter()
    engine: Any = open_engine(model, dtype, attention)
    loaded = time.perf_counter() - started
    if engine.tokenizer is None:
        raise InputError("the demo reads a text, and this model has no tokenizer", path=model)
    ids = engine.tokenize(_text())
    room, reserve = engine.context_limit, 2 * half + _TURNS
    if room is not None and (tokens or 1) + reserve > room:
        raise ContextError(
            f"the context of this model is too short for the demo: it holds {room} positions, and {reserve} of them "
            f"are for what it says",
            expected=f"{(tokens or 1) + reserve} or more", found=room,
        )  # fmt: skip
    if tokens is None and room is not None:
        tokens = min(len(ids), room - reserve)
    ids = ids[:tokens]
    if not os.path.isdir(output):
        files.make_directory(output)
    for name in _MADE:  # of an earlier run; a session would go on growing
        if os.path.lexists(os.path.join(output, name)):
            files.remove(os.path.join(output, name))
    return Run(model, engine.model, engine.tokenizer, engine, output, ids, half, loaded)


class _Story:
    """Prints the steps for a reader; with `--json` nothing."""

    def __init__(self, silent: bool) -> None:
        from rich.console import Console

        self._silent = silent
        self._console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
        self._wait = Console(stderr=True)

    def _tell(self, *what: Any, soft_wrap: bool = False) -> None:
        """Print; where that is no terminal, without the blanks that fill a wrapped line up."""
        if sys.stdout.isatty():
            self._console.print(*what, soft_wrap=soft_wrap)
            return
        with self._console.capture() as captured:
            self._console.print(*what, soft_wrap=soft_wrap)
        print("\n".join(line.rstrip() for line in captured.get().split("\n")), end="", flush=True)

    def begin(self, model: str) -> None:
        if not self._silent:
            self._tell(f"[bold]kvsnap demo[/bold] with {model}: save the live state of a model, go on elsewhere.")
            self._tell("Every line marked ok was checked by this program while it ran.\n")

    def step(self, title: str, work: Callable[[], Any]) -> Any:
        """Do one step behind a spinner, then print it."""
        if self._silent or not sys.stderr.isatty():
            done = work()
        else:
            with self._wait.status(title):
                done = work()
        if not self._silent:
            self._print(done)
        return done

    def _print(self, step: Any) -> None:
        from rich.padding import Padding

        mark = "" if step.ok else "  [bold red]FAILED[/bold red]"
        self._tell(f"[bold cyan]{step.number}  {step.title}[/bold cyan]{mark}")
        for line in step.lines:
            self._tell(Padding(line, (0, 0, 0, 3), expand=False))
        for claim in step.claims:
            word = "[green]ok[/green]    " if claim.holds else "[bold red]FAILED[/bold red]"
            found = "" if claim.holds or not claim.found else f" (found: {claim.found})"
            self._tell(Padding(f"{word} {claim.text}{found}", (0, 0, 0, 3), expand=False))
        self._tell()

    def end(self, made: dict[str, str], pictures: dict[str, str], *, ok: bool, taken: float) -> None:
        self._tell("[bold cyan]8  Where everything lies[/bold cyan]")
        paths = [*made.values(), *pictures.values()]
        for path in paths:
            self._tell(f"   {size(_taken_by(path)):>9}  {path}", soft_wrap=True)
        total = sum(map(_taken_by, paths))
        self._tell(f"   {size(total):>9}  in all\n")
        if len(pictures) == 1:
            remark("no pictures: pip install 'kvsnap[plots]'")
        verdict = "[bold green]Every claim held.[/bold green]" if ok else "[bold red]A claim FAILED.[/bold red]"
        self._tell(f"{verdict} {count(len(paths), 'file')}, {seconds(taken)}.")

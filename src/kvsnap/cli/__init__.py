"""The command line: parses, calls the public functions, prints text or JSON.

This module is the rim: every error becomes one line on stderr (with `--json` an object on stdout) and an exit code.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import click

import kvsnap
from kvsnap.cli import (
    _attention,
    _cat,
    _convert,
    _copies,
    _diff,
    _edit,
    _files,
    _find,
    _growth,
    _head,
    _info,
    _keys,
    _library,
    _ls,
    _quality,
    _report,
    _run,
    _serve,
    _sessions,
    _shards,
    _stats,
    _sweep,
    chat,
)
from kvsnap.cli._model import RefusedModelError, error_text
from kvsnap.cli._names import library_option
from kvsnap.cli._output import CheckFailed, examples
from kvsnap.cli._overview import Overview
from kvsnap.cli._turn import INTERRUPTED, interruption
from kvsnap.cli.demo import demo
from kvsnap.errors import KvsnapError, StorageError
from kvsnap.reports.escaping import visible

__all__ = ["main", "root", "run"]

_BROKEN_PIPE, _USAGE = 141, 2
_SWALLOWED = 2.0
"""Seconds behind Ctrl-C in which an error that is nobody's comes of it."""


@click.group(cls=Overview, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@library_option
@click.version_option(kvsnap.__version__, prog_name="kvsnap")
@examples(
    'kvsnap generate "Once upon a time" --save story.kvsnap',
    "kvsnap resume story.kvsnap          # goes on at the last token, nothing is evaluated again",
    "kvsnap info story.kvsnap            # what is in it, without loading a model",
    "kvsnap verify story.kvsnap          # every byte is checked",
    "kvsnap chat rivers                  # a conversation that stays warm, closed and opened again",
    "kvsnap demo                         # the whole story on real weights, every claim checked",
)
def root() -> None:
    """Save, resume, rewind and inspect the live state (KV cache) of a language model.

    Exit codes: 0 done, 1 a check failed or a bug, 2 wrong usage, 3 missing, 4 not our format, 5 newer version,
    6 damaged, 7 wrong model, 8 context too small, 9 busy, 10 changed meanwhile, 11 extra not installed,
    12 unsupported, 13 would lose something, 14 storage, 15 reopen first, 16 key needed, 17 tampered, 130 interrupted.
    """


_PARTS = (
    _run,
    chat,
    _serve,
    _sweep,
    _attention,
    _quality,
    _info,
    _cat,
    _head,
    _files,
    _stats,
    _diff,
    _sessions,
    _copies,
    _ls,
    _library,
    _growth,
    _report,
    _find,
    _convert,
    _shards,
    _edit,
    _keys,
)
for _command in (*(command for part in _PARTS for command in part.COMMANDS), demo):
    root.add_command(_command)


def _error_data(error: KvsnapError) -> dict[str, Any]:
    data = error.to_dict()
    data["exit_code"] = error.exit_code
    report = getattr(error, "report", None)
    if report is not None:
        data["report"] = report.to_dict()
    if isinstance(error, RefusedModelError):
        data.update(model=error.chosen.name, model_was=error.chosen.why)
    return data


def _other_data(kind: str, message: str, code: int) -> dict[str, Any]:
    """Return the same fields as for an error of the library."""
    return {**KvsnapError(message).to_dict(), "kind": kind, "exit_code": code}


def _fail(code: int, data: dict[str, Any], text: str, *, as_json: bool) -> int:
    if as_json:
        with suppress(OSError):  # a full disk behind stdout: the exit code has to do
            print(json.dumps({"error": data}), flush=True)
    else:
        print(f"kvsnap: {visible(' '.join(text.split()))}", file=sys.stderr)
    return code


class _Interrupt:
    """When Ctrl-C came: a library in C may swallow what it raises, and fail with an error of its own."""

    def __init__(self) -> None:
        self.at = -math.inf

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.at = time.monotonic()
        signal.default_int_handler(number, frame)


_interrupt = _Interrupt()


def _bug(error: BaseException, *, as_json: bool) -> int:
    if time.monotonic() - _interrupt.at < _SWALLOWED:
        return _fail(INTERRUPTED, interruption(), "interrupted", as_json=as_json)
    if os.environ.get("KVSNAP_DEBUG"):
        traceback.print_exception(error)
    what = f"{type(error).__name__}: {error}".strip()
    text = f"a bug, please report it: {what} (set KVSNAP_DEBUG=1 for the traceback)"
    return _fail(1, _other_data("bug", what, 1), text, as_json=as_json)


def _is_from_printing(error: OSError) -> bool:
    """Tell whether stdout could not be written: opening a file names it, libraries give no number."""
    return error.filename is None and error.errno in (errno.ENOSPC, errno.EIO, errno.EBADF, errno.EFBIG)


def run(args: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. Prints; raises nothing."""
    given = list(sys.argv[1:] if args is None else args)
    as_json = "--json" in given[: given.index("--") if "--" in given else len(given)]
    try:
        # Not root.main: it has a rim of its own, which prints, and ends the process on a broken pipe.
        with root.make_context("kvsnap", given) as context:
            root.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as done:
        return done.exit_code
    except CheckFailed as failure:
        return failure.exit_code
    except KvsnapError as error:
        return _fail(error.exit_code, _error_data(error), error_text(error), as_json=as_json)
    except click.ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # click 8.2 and newer; before, help is printed at once
            print(error.format_message())
            return _USAGE
        command = getattr(getattr(error, "ctx", None), "command_path", "kvsnap")
        message = error.format_message()
        data = _other_data("usage", message, _USAGE)
        return _fail(_USAGE, data, f"{message} (see {command} --help)", as_json=as_json)
    except (KeyboardInterrupt, click.Abort):
        return _fail(INTERRUPTED, interruption(), "interrupted", as_json=as_json)
    except BrokenPipeError:
        # Whoever read has seen enough; the interpreter must not complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except OSError as error:
        if not _is_from_printing(error):
            return _bug(error, as_json=as_json)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        told = _other_data("storage", f"standard output cannot be written: {error.strerror}", StorageError.exit_code)
        return _fail(StorageError.exit_code, told, told["message"], as_json=as_json)
    except Exception as error:  # noqa: BLE001 # the rim: whatever gets here is a bug, and the user sees one line
        return _bug(error, as_json=as_json)
    return 0


def main() -> None:
    """Run the command line of this process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this process
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 # for the whole process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to lose a run
    sys.exit(run())

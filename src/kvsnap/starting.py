"""From a prompt to a session: the longest saved beginning is forked, and the rest evaluated."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from kvsnap.api import capture
from kvsnap.errors import ConflictError, InputError, MissingError, UnsupportedError
from kvsnap.layout import Snapshot
from kvsnap.library import Library, LibrarySession
from kvsnap.protocols import Engine
from kvsnap.restoring import Restored, ids_of, reuse
from kvsnap.runs import common_length

__all__ = ["Started", "start"]

_TRIES = 3


@dataclass(frozen=True, slots=True)
class Started:
    """A session that was started from what a library holds.

    `session` is open for writing, and for the caller to close; the engine holds what it does. `restored` counts the ids
    that were reused and evaluated, and says whether that is exact. `source` names the session whose beginning was
    forked, "" where none agreed.
    """

    session: LibrarySession
    restored: Restored
    source: str


def start(library: Library, name: str, engine: Engine, prompt: str | Sequence[int]) -> Started:
    """Start a session `name` with a prompt (text or ids) whose longest saved beginning is reused.

    The session of the library with most rows of use that this model may restore is forked (nothing is copied, and it is
    not changed) as far as the prompt agrees and its layers can be cut; that is restored, the rest of the prompt is
    evaluated behind it, and published as a turn that is cut off, for its answer is still to come. Where nothing agrees
    the prompt is evaluated whole. Sampler and random state are those that the beginning was saved with, if any.

    Raise `InputError` for a name that is taken or none and for ids outside the vocabulary, `ContextError` where the
    prompt does not fit, and what `Library.fork`, `reuse` and `Session.append` raise. On an error there is no session of
    this name; the engine is as after `reuse`.
    """
    ids = engine.tokenize(prompt) if isinstance(prompt, str) else ids_of(prompt)
    if not ids:
        raise InputError("the prompt is empty")
    library.check_new(name)
    source = _forked(library, name, engine, ids)
    with ExitStack() as undo:
        session = undo.enter_context(library.open(name))
        if not source and session.n_tokens:
            raise ConflictError("another process made a session of this name just now", path=session.path)
        undo.pop_all()
    with ExitStack() as undo:
        undo.callback(_removed, library, name)
        undo.enter_context(session)
        restored = _filled(session, engine, ids)
        undo.pop_all()
    return Started(session, restored, source if restored.reused else "")


def _forked(library: Library, name: str, engine: Engine, ids: tuple[int, ...]) -> str:
    """Fork the session that is of most use as `name`; return its name, "" where there is none."""
    identity = engine.identity()
    for _ in range(_TRIES):
        found = library.find(ids, identity)
        if found is None:
            break
        with suppress(MissingError, InputError, UnsupportedError):  # another process changed it since
            library.fork(found.name, name, n_tokens=found.keep, nearest=True)
            return found.name
        library.check_new(name)
    return ""


def _removed(library: Library, name: str) -> None:
    with suppress(MissingError):
        library.remove(name)


def _filled(session: LibrarySession, engine: Engine, ids: tuple[int, ...]) -> Restored:
    """Cut a session to the beginning of `ids` that is of use, and bring engine and session to the end of them."""
    kept = _cut(session, ids)
    if kept.n_rows:
        restored = reuse(kept, engine, ids)
    else:
        started, evaluated = time.perf_counter(), engine.evaluated
        engine.warm(ids)
        note = "no session begins like this: all ids were evaluated"
        took = time.perf_counter() - started
        restored = Restored(0, engine.evaluated - evaluated, True, None, (note,), 0.0, took)
    if len(ids) > session.n_tokens or engine.n_rows > session.n_rows:
        session.append(capture(engine, start=session.n_rows), complete=False)
    return restored


def _cut(session: LibrarySession, ids: tuple[int, ...]) -> Snapshot:
    """Truncate a session to what of it begins `ids` and can be gone on from; return that."""
    same = common_length(session.tokens, ids)
    if same < session.n_tokens:
        session.truncate(same, nearest=True)
    kept = session.load()
    if session.n_tokens == len(ids) and kept.logits is None and not kept.n_pending:
        session.truncate(len(ids) - 1, nearest=True)  # the last id is evaluated again, for its logits
        kept = session.load()
    if session.n_tokens and not session.n_rows:
        session.truncate(0)
        kept = session.load()
    return kept

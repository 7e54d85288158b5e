"""A long generation that is published as it goes, so that a run that is killed loses a few tokens only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvsnap.api import capture
from kvsnap.errors import ContextError, InputError
from kvsnap.formats.native import SaveReport
from kvsnap.layout import UNFINISHED
from kvsnap.protocols import Engine, Progress, Token
from kvsnap.session import Session

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Journalled", "Saying", "Shown", "journal"]

Shown = Callable[[str], AbstractContextManager[Progress | None]]
"""Called with what is done before each step of a commit; what it yields is told of the bytes."""

Saying = Callable[[str], tuple[Mapping[str, Any], ...] | None]
"""Returns the messages of a chat once its last answer goes on with a text; None where they are not known."""


def journal(
    engine: Engine,
    session: Session,
    tokens: Iterable[Token],
    *,
    every: int = 64,
    codec: str | None = None,
    metadata: Mapping[str, str] | None = None,
    said: Saying | None = None,
    shown: Shown | None = None,
) -> Journalled:
    """Hand on `tokens`, which `generate(engine, ...)` makes, and publish them in `session` as they come.

    What the engine holds beyond the session (the prompt, which `generate` has evaluated) is published at once, what
    follows after each `every` tokens, before the last of them is handed on: a run that is killed loses fewer than
    `every` tokens that were handed on. These commits are marked as cut off. The one at the end is complete if the model
    ended the text. Each commit has `metadata` (default: that of the session), and why the run stopped under `stop`.
    `said` makes the messages of a chat from the text that was generated so far.

    Raise `InputError` (`every` below 1, a session that is not the beginning of what the engine holds), and what
    `capture` and `Session.append` raise, here and while tokens are taken; the session then holds what was published.
    """
    if every < 1:
        raise InputError("a journal is written every so many tokens", expected="1 or more", found=every)
    session.check_open_to_turns()
    stored = session.tokens
    if engine.tokens[: len(stored)] != stored or engine.n_rows < session.n_rows:
        raise InputError(
            "the engine does not hold the history of this session: restore it first", path=session.path,
            expected=f"{len(stored)} ids that begin what the engine holds", found=f"{len(engine.tokens)} ids",
        )  # fmt: skip
    kept = session.load().metadata if metadata is None else metadata
    made = Journalled(engine, session, iter(tokens), every, codec, dict(kept), said, shown)
    if engine.n_rows > session.n_rows or len(engine.tokens) > len(stored):
        made.publish(UNFINISHED)
    return made


class Journalled(Iterator[Token]):
    """The tokens of a run that is published on the way; `journal` makes one. A context manager.

    At the end of the tokens all is published. A run that is left earlier is ended with `close`, or by leaving the
    context: then what is still missing is published, marked as cut off.
    """

    def __init__(
        self,
        engine: Engine,
        session: Session,
        tokens: Iterator[Token],
        every: int,
        codec: str | None,
        metadata: Mapping[str, str],
        said: Saying | None,
        shown: Shown | None,
    ) -> None:
        self.session = session
        self.stop: str | None = None
        """Why it ended: `end`, `length`, `context` (full), `interrupted` (left earlier); None while it runs."""
        self.n_commits = 0
        """Commits that were published."""
        self.nbytes = 0
        """Bytes that they took."""
        self.report: SaveReport | None = None
        """What the last of them wrote."""
        self.seconds = 0.0
        """Time that they took: evaluating the last token, hashing the weights, writing, syncing."""
        self._engine, self._tokens, self._every, self._codec = engine, tokens, every, codec
        self._metadata, self._shown = metadata, shown or (lambda _: nullcontext())
        self._said, self._text = said or (lambda _: None), ""
        self._waiting = 0
        self._last: Token | None = None

    def __next__(self) -> Token:
        if self.stop is not None:
            raise StopIteration
        try:
            token = next(self._tokens)
        except StopIteration:
            self._end("end" if self._last is not None and self._last.end else "length")
            raise
        except ContextError:
            self._end("context")
            raise
        self._last = token
        self._text += token.text
        self._waiting += 1
        if self._waiting >= self._every:
            self.publish(UNFINISHED)
        return token

    def publish(self, stop: str) -> None:
        """Publish what the engine holds beyond the session; `stop` goes into the metadata, `end` is complete."""
        started = time.perf_counter()
        with self._shown("hashing the weights") as progress:
            snapshot = capture(self._engine, start=self.session.n_rows, settle=True, progress=progress)
        metadata = {**self._metadata, **snapshot.metadata, "stop": stop}
        snapshot = replace(snapshot, metadata=metadata, messages=self._said(self._text))
        with self._shown(f"appending to {self.session.path}") as progress:
            done = self.session.append(snapshot, complete=stop == "end", codec=self._codec, progress=progress)
        self._waiting = 0
        self.n_commits += 1
        self.nbytes, self.report = self.nbytes + done.nbytes, done
        self.seconds += time.perf_counter() - started

    def close(self) -> None:
        """End the run here, and publish what is missing as cut off. A run that has ended stays as it is."""
        if self.stop is None:
            self._end("interrupted")

    def _end(self, stop: str) -> None:
        self.stop = stop  # first: what cannot be published now is not tried again
        self.publish(stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

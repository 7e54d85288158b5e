"""One long context, many continuations: branches of a live sequence that take turns in one engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from kvsnap.api import capture, generate
from kvsnap.errors import InputError, UnsupportedError
from kvsnap.layout import Sampler, Snapshot
from kvsnap.protocols import Engine, Progress, Token

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Branch", "Branches", "branch"]


def branch(engine: Engine, n: int, *, progress: Progress | None = None) -> Branches:
    """Return `n` branches that each go on from what the engine holds now, on their own.

    What is pending is evaluated first, so that no branch has to. The state is captured once (one copy of the cache, and
    the weights are hashed once); a branch takes a copy of its own when it is first used, and no memory before. From
    then on branches change places in the engine without a copy. Raise `InputError` for `n` below 1 or an empty engine,
    `UnsupportedError` for a batch, or an engine that cannot set its state aside.
    """
    if n < 1:
        raise InputError("too few branches", expected="1 or more", found=n)
    if not isinstance(engine, _SetsAside):
        raise UnsupportedError(f"the engine {engine.name} cannot set its state aside", expected="set_aside, take_up")
    if not engine.tokens:
        raise InputError("nothing to branch from: the engine holds no tokens")
    made = Branches(engine, capture(engine, settle=True, progress=progress))
    for _ in range(n):
        made.add()
    return made


@runtime_checkable
class _SetsAside(Protocol):
    """What an engine offers that can hold several states, one of them live."""

    def set_aside(self) -> Any:
        """Take the live state out, and leave an empty one."""

    def take_up(self, aside: Any) -> None:
        """Make such a state live again, in place of the one that is. Once for each."""


class Branches(Sequence["Branch"]):
    """The branches of one live sequence; `branch` makes them. A context manager.

    They take turns: the engine holds one of them, or the sequence that they start from, the trunk. What is done with
    the engine directly is done to the one that it holds. `close` puts the trunk back as it was and drops the branches.
    """

    def __init__(self, engine: Engine, snapshot: Snapshot) -> None:
        self.engine = engine
        self.snapshot = snapshot
        """What each branch starts from."""
        self.closed = False
        self._trunk = Branch(self, -1)
        self._live = self._trunk
        self._made: list[Branch] = []

    def add(self) -> Branch:
        """Return one more branch that starts where the others do."""
        self._check_open()
        self._made.append(Branch(self, len(self._made)))
        return self._made[-1]

    def __len__(self) -> int:
        return len(self._made)

    def __getitem__(self, place: Any) -> Any:
        return self._made[place]

    @property
    def live(self) -> Branch | None:
        """The branch that the engine holds; None: the trunk."""
        return None if self._live is self._trunk else self._live

    def switch(self, wanted: Branch) -> None:
        """Make the engine hold this branch; what it held is set aside. On an error it holds that again."""
        self._check_open()
        if wanted is self._live:
            return
        engine: Any = self.engine
        before = self._live
        before.tokens_aside, before.rows_aside = engine.tokens, engine.n_rows
        aside = engine.set_aside()
        with ExitStack() as undo:
            undo.callback(engine.take_up, aside)
            if wanted.aside is None:
                engine.install(self.snapshot)
            else:
                engine.take_up(wanted.aside)
            undo.pop_all()
        self._live, wanted.aside, before.aside = wanted, None, aside

    def close(self) -> None:
        """Put the trunk back into the engine as it was, and drop the branches. A second call does nothing."""
        if self.closed:
            return
        self.switch(self._trunk)
        self.closed = True
        for one in self._made:
            one.aside = None

    def _check_open(self) -> None:
        if self.closed:
            raise InputError("these branches were closed: what they held is gone")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Branch:
    """One continuation of a sequence, with tokens, cache, sampler and random state of its own.

    Each method makes the engine hold this branch first.
    """

    def __init__(self, branches: Branches, number: int) -> None:
        self.number = number
        """Its place among the branches, from 0 on."""
        self.aside: Any = None
        self.tokens_aside = branches.snapshot.tokens
        self.rows_aside = branches.snapshot.n_rows
        self._branches = branches

    def use(self) -> Engine:
        """Make the engine hold this branch, and return it: for everything that takes an engine."""
        self._branches.switch(self)
        return self._branches.engine

    @property
    def is_live(self) -> bool:
        """Tell whether the engine holds this branch."""
        return self._branches.live is self

    @property
    def tokens(self) -> tuple[int, ...]:
        """All ids of the branch, those of the trunk included."""
        return self._branches.engine.tokens if self.is_live else self.tokens_aside

    @property
    def n_rows(self) -> int:
        """Positions evaluated."""
        return self._branches.engine.n_rows if self.is_live else self.rows_aside

    def prefill(self, ids: Sequence[int]) -> None:
        """Evaluate ids, as `Engine.prefill`."""
        self.use().prefill(ids)

    def generate(
        self,
        prompt: str | Sequence[int] = "",
        *,
        max_tokens: int,
        sampler: Sampler | None = None,
        stop_at_end: bool = True,
    ) -> Iterator[Token]:
        """Evaluate `prompt` and yield tokens, as `kvsnap.generate`. Those of several branches may be taken by turns."""
        tokens = generate(self.use(), prompt, max_tokens=max_tokens, sampler=sampler, stop_at_end=stop_at_end)
        return self._by_turns(tokens)

    def _by_turns(self, tokens: Iterator[Token]) -> Iterator[Token]:
        with suppress(StopIteration):
            while True:
                self.use()
                yield next(tokens)

    def capture(self, *, start: int = 0, settle: bool = False, progress: Progress | None = None) -> Snapshot:
        """Copy the state of the branch out, as `kvsnap.capture`."""
        return capture(self.use(), start=start, settle=settle, progress=progress)

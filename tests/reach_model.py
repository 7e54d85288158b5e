"""A history as a list: which rows of windows were handed over and still stand, and where a state was stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvsnap.layout import Reach, Snapshot
from kvsnap.session import Session
from synthetic import layer_of, snapshot_of_kinds

TOKENS = tuple(range(100, 200))
KINDS = (
    "grow", "grow4", "window8", "window3", "window1", "window0", "recurrent", "buffer", "static", "grow4+window4",
    "grow4+buffer", "window8+recurrent",
)  # fmt: skip


@dataclass
class Entry:
    """What the list knows of one turn: its end, whether a state is stored there, and the rows of each window."""

    n_tokens: int
    n_rows: int
    state: bool
    held: dict[str, frozenset[int]] = field(default_factory=dict)


@dataclass
class Model:
    """A history as a list of turns."""

    kinds: Sequence[str]
    tokens: tuple[int, ...] = ()
    turns: list[Entry] = field(default_factory=list)
    in_memory: bool = False

    @property
    def parts(self) -> list[str]:
        return [part for kind in self.kinds for part in kind.split("+")]

    @property
    def windows(self) -> list[str]:
        return [part for part in self.parts if part.startswith("window")]

    @property
    def stateful(self) -> bool:
        return bool({"recurrent", "buffer"} & set(self.parts))

    @property
    def n_rows(self) -> int:
        return self.turns[-1].n_rows if self.turns else 0

    def append(self, tokens: tuple[int, ...], n_rows: int, first: int) -> None:
        """A turn that hands over what an engine holds; window rows before `first` are not among it."""
        held = {}
        for name in self.windows:
            width = int(name[6:])
            start = max(first, self.n_rows, n_rows - (width - 1) if width else 0)
            held[name] = frozenset(range(start, n_rows))
        standing = self.turns if self.tokens or self.n_rows else []
        self.tokens, self.turns = tokens, [*standing, Entry(len(tokens), n_rows, True, held)]

    def rows_of(self, name: str, n_rows: int) -> set[int]:
        """Rows of a window that the history holds below `n_rows`."""
        return {row for turn in self.turns for row in turn.held[name] if row < n_rows}

    def rows_at(self, n: int) -> int:
        if n == len(self.tokens):
            return self.n_rows
        ends = [turn for turn in self.turns if turn.n_tokens == n and (turn.state or not self.stateful)]
        if n == 0 or ends:
            return ends[-1].n_rows if n else 0
        return min(n, next(turn.n_rows for turn in self.turns if turn.n_tokens > n))

    def can(self, n: int) -> bool:
        if n in (0, len(self.tokens)):
            return True
        if any(turn.n_tokens == n and (turn.state or not self.stateful) for turn in self.turns):
            return True
        rows = self.rows_at(n)
        if self.stateful and not (self.in_memory and rows == self.n_rows):
            return False
        if rows in {turn.n_rows for turn in self.turns if turn.n_tokens > n}:
            return True
        if any(name.startswith("grow4") for name in self.parts) and rows % 4:
            return False
        for name in self.windows:
            width = int(name[6:])
            needed = range(max(0, rows - (width - 1)) if width else 0, rows)
            if not self.rows_of(name, rows).issuperset(needed):
                return False
        return True

    def check_reach(self, n: int, found: Reach) -> None:
        """One line of the truth table."""
        every = [k for k in range(len(self.tokens) + 1) if self.can(k)]
        nearest = max(k for k in every if k <= n)
        above = None if nearest == n else min(k for k in every if k > n)
        assert (found.asked, found.n_tokens, found.above) == (n, nearest, above)
        assert (found.n_rows, found.reused) == (self.rows_at(nearest),) * 2
        assert found.recomputed == n - nearest
        assert found.reached == (not found.limits) == (nearest == n)
        assert found.exact

    @property
    def is_stateless(self) -> bool:
        """Whether the end of it cannot be gone back to: its state was left out."""
        return self.stateful and self.n_rows > 0 and not self.turns[-1].state

    def commits(self) -> list[Model]:
        """What the commits of a file hold that was written anew from this."""
        if not self.turns:
            return [self]
        return [replace(self, tokens=self.tokens[: t.n_tokens], turns=[replace(t) for t in self.turns[: i + 1]])
                for i, t in enumerate(self.turns)]  # fmt: skip

    def copy(self) -> Model:
        """The same list, to be changed alone."""
        return replace(self, turns=[replace(turn) for turn in self.turns])

    def cut(self, n: int) -> None:
        if n == len(self.tokens):
            return
        n_rows = self.rows_at(n)
        last = max((i for i, t in enumerate(self.turns) if t.n_tokens == n and (t.state or not self.stateful)),
                   default=None)  # fmt: skip
        if not n:
            self.turns = []
        elif last is not None:
            self.turns = self.turns[: last + 1]
        else:
            kept = [turn for turn in self.turns if turn.n_tokens <= n]
            held = {name: frozenset(r for r in rows if r < n_rows) for name, rows in self.turns[len(kept)].held.items()}
            state = self.in_memory and n_rows == self.n_rows
            self.turns = [*kept, Entry(n, n_rows, state, held)]
        self.tokens = self.tokens[:n]

    def check(self, loaded: Snapshot) -> None:
        """What was read holds the rows that the list knows, bit by bit, and starts where they start."""
        assert (loaded.tokens, loaded.n_rows) == (self.tokens, self.n_rows)
        whole = bool(self.turns) and self.turns[-1].state
        if not loaded.layers:
            assert not self.turns
            return
        for i, kind in enumerate(self.kinds):
            found = {t.spec.id: t for t in loaded.layers[i].tensors}
            for tensor in layer_of(kind, i, self.tokens, self.n_rows, 0, every_row=True).tensors:
                number, growth = tensor.spec.id, tensor.spec.growth
                if (growth == "replaced" and not whole) or (
                    growth == "static" and not self.turns and not self.in_memory
                ):
                    assert number not in found
                    continue
                first = self._first(tensor.name.split(".")[2])
                assert (found[number].spec, found[number].start) == (tensor.spec, first)
                wanted = tensor.array[:, first:] if growth == "window" else tensor.array
                assert found[number].array.tobytes() == wanted.tobytes()
                assert found[number].shape == wanted.shape

    def _first(self, name: str) -> int:
        """The first row of a window behind the last gap."""
        if not name.startswith("window"):
            return 0
        row, held = self.n_rows, self.rows_of(name, self.n_rows)
        while row - 1 in held:
            row -= 1
        return row


def run(session: Session, model: Model, n_new: int, n_pending: int, *, partial: bool = True) -> None:
    """One turn of `n_new` tokens, as an engine captures it, on disk and in the list."""
    # What a cut turn goes on with has other ids, and so other rows.
    tokens = (*model.tokens, *(1000 * len(model.turns) + token for token in TOKENS[:n_new]))
    n_pending = min(n_pending, len(tokens) - model.n_rows)
    start = model.n_rows if partial else 0
    session.append(snapshot_of_kinds(tokens, model.kinds, start=start, n_pending=n_pending))
    model.append(tokens, len(tokens) - n_pending, start)

"""Which ids are the history: the two token lists of a file become one, and one becomes two."""

from __future__ import annotations

from dataclasses import dataclass

from kvsnap.formats.mlxkv.model import File
from kvsnap.layout import Run

__all__ = ["History", "history"]


@dataclass(frozen=True, slots=True)
class History:
    """All ids seen, which of them were prompt and generated, and what was decided by what."""

    tokens: tuple[int, ...]
    runs: tuple[Run, ...]
    note: str = ""


def history(file: File) -> History:
    """Join the token list and the generated list.

    The position of the next token decides whether the generated ids are the tail of the list or follow it; then the
    sequence length; then a matching tail; else they follow.
    """
    tokens, generated = file.tokens, file.generated
    if not generated:
        return History(tokens, _runs(len(tokens), 0))
    inside, behind = len(tokens), len(tokens) + len(generated)
    matches = tokens[-len(generated) :] == generated
    # A stored 0 stands for the number of tokens, so it decides nothing.
    for length, name in ((file.token_offset or 0, "token offset"), (file.seq_len, "sequence length")):
        if length == inside and inside:
            if matches:
                return History(tokens, _runs(inside - len(generated), len(generated)))
            note = f"generated ids are not the tail of the tokens, though the {name} leaves no room behind them"
            return History(tokens, _runs(inside, 0), note)
        if length == behind:
            return History(
                tokens + generated, _runs(inside, len(generated)), f"generated ids follow the tokens, by the {name}"
            )
    if matches:
        return History(tokens, _runs(inside - len(generated), len(generated)))
    note = "generated ids follow the tokens: neither offset nor sequence length decides, and they are not their tail"
    return History(tokens + generated, _runs(inside, len(generated)), note)


def _runs(prompt: int, generated: int) -> tuple[Run, ...]:
    runs = (Run("prompt", prompt), Run("generated", generated))
    return tuple(run for run in runs if run.count)

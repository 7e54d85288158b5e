"""Going on with several sequences in one pass: rows of a batch that came from one snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsnap.engines import _tf_text
from kvsnap.engines._tf_input import Encoding
from kvsnap.engines._tf_state import Line, check_room
from kvsnap.errors import InputError, UnsupportedError
from kvsnap.layout import SamplerState
from kvsnap.protocols import Token
from kvsnap.sampling import choose

__all__ = ["Batched"]


class Batched(Encoding):
    """A live state whose batch can be stepped as well as a single sequence."""

    _ends: frozenset[int]

    def step_rows(self, samplers: Sequence[SamplerState | None]) -> tuple[tuple[Token, SamplerState] | None, ...]:
        """Choose one token for each row of the batch, with a sampler for each, and return what each goes on with.

        What is pending is evaluated first, in one pass for all rows: its logits are not those of a pass of one row, bit
        for bit. A row whose sampler is None has ended: its last id takes its place in the pass, and nothing is chosen.
        Rows are equally long, as `install(rows=...)` makes them; others raise `UnsupportedError`. Else as `step`: on
        any error the state is as before.
        """
        if len(samplers) != self.rows:
            raise InputError("a batch takes one sampler for each row", expected=self.rows, found=len(samplers))
        with self._change_rows() as live:
            lines = live.lines
            _check_equal(lines)
            check_room(max(lines[0].taken, lines[0].next_position + lines[0].n_pending), 1, self._model.context_limit)
            check_room(lines[0].taken, 1, self._model.room(live.cache), "the static cache")
            ready = self._evaluate_rows(live.cache, lines)
            chosen: list[tuple[Token, SamplerState] | None] = []
            grown = []
            for line, sampler in zip(ready, samplers, strict=True):
                if line.logits is None:
                    raise InputError("there are no logits to choose from")
                if sampler is None:
                    chosen.append(None)
                    grown.append(line.extended(line.tokens[-1:], "generated"))
                    continue
                number, logprob, after = choose(line.logits, line.tokens, sampler)
                end = number in self._ends
                text = "" if end else _tf_text.piece(self.tokenizer, line.tokens, number)
                chosen.append((Token(number, text, logprob, end), after))
                grown.append(line.extended((number,), "generated"))
            self._publish_rows(tuple(grown), live.sampler)
        return tuple(chosen)

    def _evaluate_rows(self, cache: Any, lines: tuple[Line, ...]) -> tuple[Line, ...]:
        first = lines[0]
        total = first.n_pending
        positions = first.pending_positions if first.positions or first.offset is not None else None
        rows = [line.pending for line in lines]
        logits = None
        for start, stop in self._split(first, total):
            places = None if positions is None else positions[start:stop]
            part = [row[start:stop] for row in rows]
            logits = self._model.evaluate_rows(cache, part, first.n_rows + start, places)
            self.forwards += 1
            self.evaluated += len(rows) * (stop - start)
        if logits is None:
            return lines
        made = (line.evaluated(own, positions) for line, own in zip(lines, logits, strict=True))
        return tuple(made)


def _check_equal(lines: Sequence[Line]) -> None:
    counts = {(line.n_rows, line.n_pending, line.position_runs, line.again) for line in lines}
    if len(counts) > 1 or any(line.select is not None for line in lines) or not lines[0].taken:
        raise UnsupportedError(
            "only rows of equal length go on together, as install(rows=...) makes them; capture one and install it",
            expected="rows of one length, without padding",
            found=sorted({line.n_rows for line in lines}),
        )

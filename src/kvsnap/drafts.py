"""The state of a draft model in the snapshot of the model that it proposes ids for: put in, taken out, restored.

It is a snapshot of its own, kept as the bytes of a file (docs/spec/file.md, section 6). The model does not depend on
it: where it is missing, damaged or of another model, the draft starts empty and evaluates the history on its first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvsnap.errors import FormatError, InputError, KvsnapError
from kvsnap.formats import native
from kvsnap.identity import compare
from kvsnap.layout import Snapshot, Tensor, TensorSpec
from kvsnap.protocols import Engine, Progress
from kvsnap.runs import common_length

__all__ = ["draft_of", "restore_draft", "same_beginning", "with_draft"]


def with_draft(snapshot: Snapshot, draft: Snapshot | None) -> Snapshot:
    """Return a snapshot that keeps the state of a draft; None takes it away. The bytes of the draft are copied.

    Raise `InputError` for a partial capture of the draft, or ids that the history does not begin with.
    """
    if draft is None:
        return replace(snapshot, draft=None)
    if draft.row_start:
        raise InputError("the draft has to be captured whole", expected="rows from 0", found=draft.row_start)
    _check_ids(draft, snapshot)
    data = native.dumps(replace(draft, draft=None, text=None, messages=None))
    taken = [t.spec.id for t in snapshot.tensors()]
    spec = TensorSpec(
        # Behind the place of the logits, whether there are any: a session keeps one id for each.
        id=max([*taken, -1] if snapshot.logits is None else [*taken, snapshot.logits.spec.id - 1]) + 2,
        name="draft", layer=-1, role="draft", dtype="uint8", axes=("byte",), shape=(0,), growth="replaced", row_axis=0,
        rope="none",
    )  # fmt: skip
    return replace(snapshot, draft=Tensor(spec, np.frombuffer(data, np.uint8)))


def draft_of(snapshot: Snapshot) -> Snapshot | None:
    """Return the state of the draft that a snapshot keeps; None where it keeps none.

    Raise `DamagedError` for bytes that are not what was written, `FormatError` for what is no such file or holds other
    ids than the history begins with.
    """
    if snapshot.draft is None:
        return None
    found = native.loads(snapshot.draft.array.tobytes())
    try:
        _check_ids(found, snapshot)
    except InputError as error:
        raise FormatError(error.message, expected=error.expected, found=error.found) from error
    return found


def same_beginning(draft: Snapshot, snapshot: Snapshot) -> Snapshot | None:
    """Return what of a draft's state is of ids that a history begins with, as far as its layers can be cut there."""
    same = common_length(draft.tokens, snapshot.tokens)
    if len(draft.tokens) != draft.n_rows + draft.n_pending:  # the first ids are not known
        return None
    found = draft.truncate(draft.reach(same).n_tokens)
    return found if found.tokens else None


def restore_draft(
    snapshot: Snapshot, draft: Engine, *, accept: Sequence[str] = (), progress: Progress | None = None
) -> tuple[int, tuple[str, ...]]:
    """Put the state of a draft that a snapshot keeps into its engine, in place of what that holds.

    Return how many ids it holds then, and why it starts empty if it does. Its identity is checked like that of the
    model, with `accept`.
    """
    draft.reset()
    try:
        found = draft_of(snapshot)
        if found is None:
            return 0, ("no state of a draft is stored: the draft starts empty",)
        needed = found.token_offset + found.n_pending
        limit = draft.context_limit
        report = compare(found.identity, draft.identity(progress), accept=accept, needed=needed, limit=limit)
        report.raise_if_refused()
        draft.install(found, progress, cast="dtype" in accept, prefix=True)
    except KvsnapError as error:
        draft.reset()
        return 0, (f"the draft starts empty: {error}",)
    return len(draft.tokens), ()


def _check_ids(draft: Snapshot, snapshot: Snapshot) -> None:
    if draft.tokens != snapshot.tokens[: len(draft.tokens)]:
        raise InputError(
            "the draft is of another history",
            expected=f"the first {len(draft.tokens)} of {len(snapshot.tokens)} ids", found="other ids",
        )  # fmt: skip

"""A snapshot put into an engine: whether it may, all of it, or the longest beginning that is of use."""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvsnap import inspection, sampling
from kvsnap.drafts import restore_draft
from kvsnap.errors import CompatibilityError, FormatError, InputError
from kvsnap.formats import colikv
from kvsnap.identity import Compatibility, compare
from kvsnap.labels import accepted_label, inexact_because
from kvsnap.layout import Sampler, Snapshot
from kvsnap.protocols import Engine, Progress
from kvsnap.runs import common_length
from kvsnap.session import Session

__all__ = ["Policy", "Restored", "check", "check_one_model", "ids_of", "placed", "restore", "reuse"]

Policy = Literal["allow", "report", "refuse"]
"""What a restore does about NaN and infinite values: nothing, look and tell, look and refuse."""

# colibri goes on from a file only where more than 8 positions are left behind its records and the draft buffer.
_COLIBRI_KEEPS_FREE = 9


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore did.

    `reused` tokens came from the file, `recomputed` had to be evaluated again (by `reuse`: all that it evaluated).
    `exact` promises that ids and logits go on bit-identical to the run that was never interrupted; when it is False,
    `notes` say why. Times are seconds: `identity_s` hashing the weights of the live model, `install_s` reading,
    checking and installing. `drafted` counts the ids that the draft holds, None where none was given.
    """

    reused: int
    recomputed: int
    exact: bool
    report: Compatibility | None
    notes: tuple[str, ...] = ()
    identity_s: float = 0.0
    install_s: float = 0.0
    drafted: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {
            "reused": self.reused,
            "recomputed": self.recomputed,
            "exact": self.exact,
            "notes": list(self.notes),
            "identity_s": self.identity_s,
            "install_s": self.install_s,
            "drafted": self.drafted,
            "report": None if self.report is None else self.report.to_dict(),
        }


def check(
    snapshot: Snapshot,
    engine: Engine,
    *,
    accept: Sequence[str] = (),
    draft_reserve: int = 0,
    progress: Progress | None = None,
) -> Compatibility:
    """Compare a snapshot with a live engine, field by field, and its length with the context. Changes nothing.

    A snapshot of a `.coli_kv` file has colibri's rule for the context: 9 positions more must be free. A shard is
    refused unless `accept` names `shard`: the caller says by that that the engine is the rank which the shard is for.
    """
    needed = snapshot.token_offset + snapshot.n_pending + draft_reserve
    if snapshot.source.get("format") == colikv.FORMAT.name and snapshot.tokens:
        needed += _COLIBRI_KEEPS_FREE
    found = engine.identity(progress)
    shard = str(snapshot.shard or "")
    return compare(snapshot.identity, found, accept=accept, needed=needed, limit=engine.context_limit, shard=shard)


def check_one_model(
    snapshot: Snapshot, engine: Engine, *, accept: Sequence[str] = (), progress: Progress | None = None
) -> None:
    """Raise `CompatibilityError` where a session takes no turn of this engine, and `restore` would not refuse it.

    A session is of one model, also when it is empty again. So a difference that is accepted, or that no restore meets,
    is refused here, before an answer is generated that could not be stored. Unknown fields are no difference.
    """
    if not accept if snapshot.tokens else not snapshot.identity.weights:
        return
    report = check(snapshot, engine, accept=accept, progress=progress)
    differing = [f for f in report.fields if f.level == "fatal" and f.verdict == "differ"]
    if differing:
        told = "; ".join(str(f) for f in differing[:4])
        raise CompatibilityError(
            f"a session takes turns of one model only, and this is another one: {told}", report=report
        )


def restore(
    snapshot: Snapshot,
    engine: Engine,
    *,
    accept: Sequence[str] = (),
    sampler: Sampler | None = None,
    draft: Engine | None = None,
    draft_reserve: int = 0,
    non_finite: Policy = "allow",
    rows: int = 1,
    progress: Progress | None = None,
) -> Restored:
    """Put a snapshot into an engine in place of what it holds; on any error the engine is as before.

    Identity is checked first: weights (hashed now), configuration, dtype, tokenizer, adapters. A difference raises
    `CompatibilityError` with the report, unless its field is named in `accept`; then the result is not exact. More
    tokens than the context raise `ContextError`. `sampler` replaces the saved settings and random state. What was saved
    with NaN or infinite values in it comes back with them; `non_finite="report"` looks first and says in `notes` where
    they are, `"refuse"` raises `FormatError` naming layer and tensor. `rows` makes a batch of so many equal sequences,
    for the user's own `generate`. `draft` is the engine that proposes ids for this one: afterwards it holds the state
    that was kept of it, checked like that of the model, or it is empty, and `notes` say why; the tokens are the same.
    """
    if not isinstance(snapshot, Snapshot):
        raise InputError(
            "restore takes a snapshot: kvsnap.load(path), or session.load()", found=type(snapshot).__name__
        )
    if sampler is not None and not isinstance(sampler, Sampler):
        raise InputError("the sampler given is none", expected="kvsnap.Sampler", found=type(sampler).__name__)
    started = time.perf_counter()
    report = check(snapshot, engine, accept=accept, draft_reserve=draft_reserve, progress=progress)
    report.raise_if_refused()
    identified = time.perf_counter()
    found = _non_finite(snapshot, non_finite)
    labelled = accepted_label(snapshot, report)
    installed = engine.install(placed(labelled, engine), progress, cast="dtype" in accept, rows=rows)
    finished = time.perf_counter()
    if sampler is not None:
        engine.sampler = sampling.start(sampler)
    drafted, empty = (None, ()) if draft is None else restore_draft(snapshot, draft, accept=accept, progress=progress)
    notes = [*installed.notes, *found, *empty]
    reason = inexact_because(snapshot)
    if reason and reason not in notes:
        notes.insert(0, reason)
    if not report.exact:
        decisive = [f for f in report.fields if f.level != "advice" and f.verdict != "match"]
        notes += [str(f) for f in decisive[:8]]
    return Restored(
        reused=installed.reused,
        recomputed=installed.recomputed,
        exact=report.exact and not reason and not installed.recomputed,
        report=report,
        notes=tuple(notes),
        identity_s=identified - started,
        install_s=finished - identified,
        drafted=drafted,
    )


def reuse(
    source: Snapshot | Session,
    engine: Engine,
    ids: Sequence[int],
    *,
    accept: Sequence[str] = (),
    min_reuse: int = 1,
    non_finite: Policy = "allow",
    progress: Progress | None = None,
) -> Restored:
    """Put the longest stored beginning of `ids` into an engine, and evaluate the rest behind it, as one prompt.

    Of a snapshot it is a beginning that every layer can be cut to, of a session also the end of an earlier turn.
    Afterwards all ids are evaluated and the logits of the next token are there; where everything was stored with its
    logits no pass is made. `reused` and `recomputed` count the ids of both kinds. Identity is checked as in `restore`.
    Not exact where a turn is cut inside: the rows kept were evaluated together with others.

    Raise `InputError` where fewer than `min_reuse` ids can be reused (with 0 everything is evaluated, and a note says
    so) and for ids outside the vocabulary, `ContextError` where they do not fit, before anything has changed; else as
    `restore`. When the pass over the rest fails the engine holds what was stored.
    """
    wanted = _wanted(ids, engine)
    started = time.perf_counter()
    snapshot, same = _beginning(source, wanted)
    _check_input(snapshot, engine)
    found = engine.identity(progress)
    report = compare(snapshot.identity, found, accept=accept, needed=len(wanted), limit=engine.context_limit)
    report.raise_if_refused()
    if snapshot.n_rows < min_reuse:
        raise InputError(
            f"of {len(wanted)} ids {same} begin what is stored, and {snapshot.n_rows} of them can be reused",
            expected=f"min_reuse: {min_reuse} or more", found=snapshot.n_rows,
        )  # fmt: skip
    bad = _non_finite(snapshot, non_finite)
    identified = time.perf_counter()
    evaluated, rest, reused = engine.evaluated, wanted[len(snapshot.tokens) :], snapshot.n_rows
    notes = [*bad, *(str(f) for f in report.fields if f.level != "advice" and f.verdict != "match")][:8]
    if not reused:
        engine.warm(wanted, progress)
        notes.append("nothing could be reused: all ids were evaluated")
    else:
        fitting = placed(accepted_label(snapshot, report), engine)
        notes += engine.install(fitting, progress, cast="dtype" in accept, prefix=bool(rest)).notes
        if rest or snapshot.n_pending:
            engine.prefill(rest)
    inside = reused > 0 and snapshot.logits is None and not snapshot.n_pending
    reason = "" if inside else inexact_because(snapshot)
    if inside:
        reason = f"cut at {reused} tokens, inside of what was evaluated together: the last bits can differ"
    return Restored(
        reused=reused, recomputed=engine.evaluated - evaluated, exact=report.exact and not reason, report=report,
        notes=(*notes, reason) if reason else tuple(notes), identity_s=identified - started,
        install_s=time.perf_counter() - identified,
    )  # fmt: skip


def _wanted(ids: Sequence[int], engine: Engine) -> tuple[int, ...]:
    wanted = ids_of(ids)
    wrong = next((i for i in wanted if not 0 <= i < engine.vocab_size), None)
    if not wanted or wrong is not None:
        raise InputError("ids to reuse a beginning of", expected=f"one or more of 0 to {engine.vocab_size - 1}",
                         found="none" if wrong is None else wrong)  # fmt: skip
    return wanted


def _check_input(snapshot: Snapshot, engine: Engine) -> None:
    """Refuse a history of another input of an encoder-decoder than the one that is encoded: its ids do not tell."""
    own, encoded = snapshot.encoder_input, getattr(engine, "encoded", None)
    if own is not None and encoded is not None and own != encoded:
        raise InputError(
            "what is stored is of another input of the encoder than the one that is encoded",
            expected=encoded,
            found=own,
        )


def _beginning(source: Snapshot | Session, ids: tuple[int, ...]) -> tuple[Snapshot, int]:
    """Return the longest beginning of `ids` that can be gone on from, and how many ids are the same."""
    whole = source.load() if isinstance(source, Session) else source
    if not isinstance(whole, Snapshot):
        raise InputError("reuse takes a snapshot or a session", found=type(source).__name__)
    stored = whole.tokens if len(whole.tokens) == whole.n_rows + whole.n_pending else ()  # else the first are not known
    same = common_length(stored, ids)
    # Where all ids are stored, but not the logits behind the last, that one is evaluated again.
    for length in (same, len(ids) - 1) if same == len(ids) else (same,):
        nearest = source.reach(length).n_tokens if stored else 0
        found = source.load(nearest) if isinstance(source, Session) else whole.truncate(nearest)
        if len(found.tokens) < len(ids) or found.logits is not None or found.n_pending:
            break
    return found, same


def _non_finite(snapshot: Snapshot, policy: Policy) -> list[str]:
    """Return a note on values that are no numbers, if any; raise `FormatError` where they are refused."""
    bad = [] if policy == "allow" else inspection.non_finite(snapshot)
    if not bad:
        return []
    more = f"; and {len(bad) - 4} more tensors" if len(bad) > 4 else ""
    told = f"the cache holds values that are no numbers: {'; '.join(map(str, bad[:4]))}{more}"
    if policy == "refuse":
        raise FormatError(told, path=snapshot.source.get("path"))
    return [told]


def placed(snapshot: Snapshot, engine: Engine) -> Snapshot:
    """Return a snapshot for `install`: a `.coli_kv` file does not tell which layers own its index rows."""
    if not colikv.has_loose_rows(snapshot):
        return snapshot
    return colikv.assign_like(snapshot, engine.capture(start=engine.n_rows))


def ids_of(prompt: Sequence[int]) -> tuple[int, ...]:
    """Return token ids as a tuple of integers. Raise `InputError` for what is none."""
    try:
        return tuple(operator.index(i) for i in prompt)
    except TypeError as error:
        raise InputError(
            "a prompt is text or a list of token ids; for chat messages: engine.render(messages)", found=error
        ) from error

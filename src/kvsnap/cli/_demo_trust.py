"""Steps 4, 5 and 7 of the demo: the small encoding, a session that grows and goes back, and refusals."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvsnap
from kvsnap import files
from kvsnap.cli._demo_parts import Run, Step, listening, state_digest
from kvsnap.cli._output import count, size
from kvsnap.errors import CompatibilityError, DamagedError, KvsnapError
from kvsnap.identity import describe_weight
from kvsnap.session import Session

__all__ = ["grow_and_rewind", "key_norms", "refusals", "small_encoding"]

_QUESTIONS = (" And what does it cost?", " Who needs to keep it?", " What could go wrong?")
_OVERHEAD = 16 << 10
"""Bytes that a commit may add to its rows and its logits: records, tables, text, footer."""


def _divergence(exact: npt.NDArray[np.float32], moved: npt.NDArray[np.float32]) -> float:
    """Return KL(exact || moved) in nats, of two rows of logits."""
    a, b = (x.astype(np.float64) - x.max() for x in (exact, moved))
    log_p, log_q = a - np.log(np.exp(a).sum()), b - np.log(np.exp(b).sum())
    return float((np.exp(log_p) * (log_p - log_q)).sum())


def small_encoding(run: Run) -> Step:
    """Save as q8; measure size, error of the values, and how far the next-token distribution moved."""
    step = Step(4, "A quarter of the size, and what that costs")
    exact = kvsnap.load(run.files["middle"])
    run.files["q8"] = run.path("middle.q8.kvsnap")
    saved = kvsnap.save(exact, run.files["q8"], codec="q8")
    small = kvsnap.load(run.files["q8"])
    worst = 0.0
    for a, b in zip(exact.tensors(), small.tensors(), strict=True):
        worst = max(worst, float(np.abs(a.array.astype(np.float64) - b.array.astype(np.float64)).max(initial=0.0)))
    back = kvsnap.restore(small, run.engine)
    ids = run.ids[: min(16, len(run.rows))]
    with listening(run.model, keep=True) as heard:
        for i in ids:  # the tokens of the exact run, so that each step compares the same history
            run.engine.prefill((i,))
    pairs = list(zip(run.rows, heard.rows, strict=False))
    divergences = [_divergence(a, b) for a, b in pairs]
    agree = sum(int(a.argmax() == b.argmax()) for a, b in pairs)
    whole = os.path.getsize(run.files["middle"])
    step.facts.update(exact_bytes=whole, q8_bytes=saved.nbytes, ratio=whole / saved.nbytes, bound=saved.bound,
                      largest_error=worst, kl=divergences, kl_mean=float(np.mean(divergences)),
                      kl_max=max(divergences), top1=agree, steps=len(pairs))  # fmt: skip
    step.say(f"q8 (one byte per value, one scale per head): {size(saved.nbytes)} instead of {size(whole)}, "
             f"{whole / saved.nbytes:.2f} times smaller.")  # fmt: skip
    step.say(f"The next-token distribution moved by {np.mean(divergences):.2g} nats on average "
             f"(KL, {count(len(pairs), 'step')}), {max(divergences):.2g} at most; the most probable token was the same "
             f"in {agree} of {len(pairs)} steps.")  # fmt: skip
    step.check(f"no value is off by more than the file says ({saved.bound:.3g})", worst <= saved.bound, f"{worst:.3g}")
    step.check("the restore does not call itself exact, and says why", not back.exact and bool(back.notes))
    step.check("the prefix was not evaluated again", len(heard.digests) == len(ids), str(len(heard.digests)))
    return step


def _turn(run: Run, question: str) -> tuple[list[int], list[str]]:
    with listening(run.model) as heard:
        ids = run.engine.tokenize(question, special=False)
        said = [t.id for t in kvsnap.generate(run.engine, ids, max_tokens=12, stop_at_end=False)]
    return said, heard.digests


def grow_and_rewind(run: Run) -> Step:
    """Append turns to a session, then go back one turn and say it again."""
    step = Step(5, "A conversation on disk: add turns, go back")
    run.files["session"] = run.path("session.kvsnap")
    middle = kvsnap.load(run.files["middle"])
    kvsnap.restore(middle, run.engine)
    with Session.open(run.files["session"]) as session:
        history = session.append(middle).nbytes
        turns: list[dict[str, Any]] = []
        said: tuple[list[int], list[str]] = ([], [])
        for question in _QUESTIONS:
            said = _turn(run, question)
            new = kvsnap.capture(run.engine, start=session.n_rows, settle=True)
            needed = new.nbytes
            added = len(new.tokens) - session.n_tokens
            report = session.append(new)
            turns.append({"tokens": added, "written": report.nbytes, "needed": needed, "file": session.nbytes})
        last = turns[-1]
        session.truncate(session.n_tokens - last["tokens"])
        rewound = session.load()
        kvsnap.restore(rewound, run.engine)
        again = _turn(run, _QUESTIONS[-1])
        log = [t.operation for t in session.history]
    step.facts.update(first_bytes=history, turns=turns, log=log)
    step.say(f"The first commit holds the {count(len(middle.tokens), 'token')} so far: {size(history)}.")
    for number, turn in enumerate(turns, 1):
        step.say(f"Turn {number}: {turn['tokens']} new tokens, {size(turn['written'])} written, "
                 f"{turn['written'] / turn['file']:.2%} of the file.")  # fmt: skip
    step.say(f"Then back by one turn to {count(len(rewound.tokens), 'token')}, and the same question once more.")
    most = max(t["written"] - t["needed"] for t in turns)
    step.check(f"each turn wrote its rows and logits and at most {size(_OVERHEAD)} more", most <= _OVERHEAD, size(most))
    step.check("the rewound session gives the same ids and bit-identical logits as before", again == said,
               f"{again[0]} for {said[0]}")  # fmt: skip
    step.check(
        "the log still lists every turn", log[-1] == "truncate" and log.count("append") == len(turns) + 1, str(log)
    )
    return step


def refusals(run: Run) -> Step:
    """One flipped byte, then one changed weight: both refused, and the live engine stays as it was."""
    from rich.markup import escape

    step = Step(7, "What it refuses")
    before = state_digest(run.engine)
    content = bytearray(Path(run.files["middle"]).read_bytes())
    place = len(content) // 2
    content[place] ^= 0x01
    run.files["flipped"] = run.path("flipped.kvsnap")
    files.write_whole(run.files["flipped"], bytes(content))
    report = kvsnap.verify(run.files["flipped"])
    named = [d for d in report.damages if d.tensor and d.tokens]
    error = _refusal(run, run.files["flipped"])
    step.say(
        f"One bit of byte {place:,} changed in a copy. verify: {report.damages[0] if report.damages else 'whole'}."
    )
    step.say(escape(f"restore: {type(error).__name__}: {error}"))
    step.check("the flipped bit is found, with tensor and tokens", not report.ok and bool(named), str(report.damages))
    step.check("restoring it is refused as damaged", isinstance(error, DamagedError), repr(error))
    step.check("the live engine is as before", state_digest(run.engine) == before)
    step.facts.update(flipped=report.to_dict(), flipped_error=None if error is None else error.to_dict())
    _wrong_weight(run, step, before)
    return step


def _refusal(run: Run, path: str) -> KvsnapError | None:
    try:
        kvsnap.restore(kvsnap.load(path), run.engine)
    except KvsnapError as error:
        return error
    return None


def _wrong_weight(run: Run, step: Step, before: str) -> None:
    import torch
    from rich.markup import escape

    matrices = [(n, p) for n, p in run.model.named_parameters() if p.dim() == 2 and "layers" in n]
    name, weight = matrices[len(matrices) // 2]
    kept = weight.data[0, 0].clone()
    with torch.no_grad():
        weight.data[0, 0] += 1e-3
    try:
        error = _refusal(run, run.files["middle"])
    finally:
        weight.data[0, 0] = kept
    differing = []
    if isinstance(error, CompatibilityError):
        differing = [f.name for f in error.report.refusals]
    short = describe_weight(name)
    step.say(f"One of {sum(p.numel() for p in run.model.parameters()):,} weights moved by 0.001, in {short}.")
    step.say(escape(f"restore: {type(error).__name__}: {error}"))
    step.check(f"refused, and the one tensor that differs is named ({short})", differing == [f"weights: {short}"],
               repr(error))  # fmt: skip
    step.check("the live engine is as before", state_digest(run.engine) == before)
    back = kvsnap.restore(kvsnap.load(run.files["middle"]), run.engine)
    step.check("with the weight put back, it restores exactly", back.exact, "; ".join(back.notes))
    step.facts.update(perturbed=name, weight_error=None if error is None else error.to_dict())


def key_norms(run: Run, columns: int = 400) -> npt.NDArray[np.float64]:
    """Return the mean length of the keys, layer x position; neighbouring positions averaged down to `columns`."""
    snapshot = kvsnap.load(run.files["middle"])
    rows = []
    for layer in range(snapshot.num_layers):
        heads = [snapshot.head(layer, h) for h in range(snapshot.layers[layer].num_heads)]
        norms = np.mean([np.linalg.norm(h.k, axis=-1) for h in heads if h is not None], axis=0)
        rows.append([part.mean() for part in np.array_split(norms, min(columns, len(norms)))])
    return np.array(rows)

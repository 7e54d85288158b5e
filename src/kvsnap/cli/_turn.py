"""One turn on the command line: restore, prompt, stream, save, report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import kvsnap
from kvsnap.api import Restored
from kvsnap.cli._output import count, emit, progress, remark, seconds, size, waiting
from kvsnap.errors import InputError
from kvsnap.layout import Sampler, SamplerState, Snapshot
from kvsnap.protocols import Engine, Token
from kvsnap.session import Session

__all__ = ["Turn", "prompt_ids", "restored"]

_MARK = "kvsnap-mark-of-an-answer"


def restored(
    snapshot: Snapshot, engine: Engine, accept: Sequence[str], sampler: SamplerState | None
) -> Restored | None:
    """Restore a snapshot with a progress bar; None when it holds no tokens (then there is nothing to restore)."""
    if not snapshot.tokens:
        if sampler is not None:
            engine.sampler = sampler
        return None
    with progress("restoring") as report:
        done = kvsnap.restore(snapshot, engine, accept=accept, progress=report)
    if sampler is not None:
        engine.sampler = sampler
    return done


def prompt_ids(engine: Engine, text: str, *, chat: bool) -> tuple[int, ...]:
    """Return the ids of a prompt; with `chat` as a user message, after what the engine holds already."""
    if not chat:
        return engine.tokenize(text, special=not engine.tokens)
    if not engine.tokens:
        return engine.render([{"role": "user", "content": text}])
    # What a template puts between an answer and the next message is found by rendering both around a mark.
    messages = [("user", "?"), ("assistant", _MARK), ("user", text)]
    whole = engine.detokenize(engine.render([{"role": r, "content": c} for r, c in messages]))
    _, found, after = whole.partition(_MARK)
    if not found:
        raise InputError("this chat template rewrites earlier answers, so a turn cannot be added with --chat")
    last = engine.detokenize(engine.tokens[-1:])
    return engine.tokenize(after.removeprefix(last), special=False)


def _passes(number: int) -> str:
    return f"{number or 'no'} forward pass{'' if number == 1 else 'es'}"


@dataclass
class Turn:
    """What one run of `generate` or `resume` does after the engine stands: generate, save, report."""

    engine: Engine
    max_tokens: int
    as_json: bool
    restored: Restored | None
    tokens: list[Token] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False

    def run(self, ids: Sequence[int], sampler: Sampler | None) -> None:
        """Evaluate the prompt and generate, streaming text to stdout. An interrupt ends it, and is remembered."""
        engine = self.engine
        forwards, started = engine.forwards, time.perf_counter()
        with waiting(f"reading {count(len(ids), 'token')}"):
            stream = kvsnap.generate(engine, ids, max_tokens=self.max_tokens, sampler=sampler)
        prefilled = time.perf_counter()
        first_s, first_forwards = 0.0, 0
        try:
            for token in stream:
                if not self.tokens:
                    first_s, first_forwards = time.perf_counter() - started, engine.forwards - forwards
                self.tokens.append(token)
                if not self.as_json:
                    print(token.text, end="", flush=True)
        except KeyboardInterrupt:
            self.interrupted = True
        ended = time.perf_counter()
        if not self.as_json:
            print()
        waited = 0.0 if self.restored is None else self.restored.install_s + self.restored.identity_s
        self.facts.update(
            prompt_tokens=len(ids),
            generated_tokens=len(self.tokens),
            total_tokens=len(engine.tokens),
            stop="interrupted" if self.interrupted else "end" if self.tokens and self.tokens[-1].end else "max_tokens",
            forwards_to_first_token=first_forwards,
            forwards=engine.forwards - forwards,
            first_token_s=first_s,
            time_to_first_token_s=waited + first_s,
            prompt_s=prefilled - started,
            generate_s=ended - prefilled,
            seed=None if engine.sampler.settings.greedy else engine.sampler.random.seed,
        )

    def store(self, *, save: str | None, codec: str | None, session: Session | None, session_file: str | None) -> None:
        """Save a snapshot, append to the session (open, or made now), as asked for."""
        if save is None and session is None and session_file is None:
            return
        started = time.perf_counter()
        start = 0 if save is not None or session is None else session.n_rows
        snapshot = kvsnap.capture(self.engine, start=start, settle=True)
        captured = time.perf_counter()
        self.facts["capture_s"] = captured - started
        if save is not None:
            with progress(f"saving {save}") as report:
                saved = kvsnap.save(snapshot, save, codec=codec, progress=report)
            self.facts["save"] = {**saved.to_dict(), "save_s": time.perf_counter() - captured}
        if session is None and session_file is not None:
            with Session.open(session_file) as made:
                self._append(made, snapshot, codec)
        elif session is not None:
            self._append(session, snapshot, codec)

    def _append(self, session: Session, snapshot: Snapshot, codec: str | None) -> None:
        started = time.perf_counter()
        with progress(f"appending to {session.path}") as report:
            done = session.append(snapshot, complete=not self.interrupted, codec=codec, progress=report)
        self.facts["append"] = {
            **done.to_dict(),
            "file_bytes": session.nbytes,
            "append_s": time.perf_counter() - started,
        }

    def finish(self) -> None:
        """Print the report, and raise `KeyboardInterrupt` when the user interrupted the generation."""
        if self.as_json:
            if not self.interrupted:
                emit({**self._texts(), **self.facts, "restored": self._restored()})
        else:
            self._remarks()
        if self.interrupted:
            raise KeyboardInterrupt

    def _texts(self) -> dict[str, Any]:
        return {"text": "".join(t.text for t in self.tokens), "tokens": [t.id for t in self.tokens],
                "logprobs": [t.logprob for t in self.tokens]}  # fmt: skip

    def _restored(self) -> dict[str, Any] | None:
        return None if self.restored is None else self.restored.to_dict()

    def _remarks(self) -> None:
        facts, back = self.facts, self.restored
        if back is not None:
            reused = f"reused {count(back.reused, 'token')}, recomputed {back.recomputed}"
            remark(f"{reused}; restored in {seconds(back.install_s)}, weights hashed in {seconds(back.identity_s)}")
            exact = "exact: ids and logits go on as if never interrupted" if back.exact else "not exact"
            remark(exact + ("" if not back.notes else ": " + "; ".join(back.notes)))
        rate = facts["generated_tokens"] / facts["generate_s"] if facts["generate_s"] else 0.0
        seed = "" if facts["seed"] is None else f", seed {facts['seed']}"
        if facts["prompt_tokens"]:
            remark(f"{count(facts['prompt_tokens'], 'prompt token')} in {seconds(facts['prompt_s'])}")
        remark(f"{count(facts['generated_tokens'], 'token')} generated ({rate:.1f}/s, {facts['stop']}{seed})")
        first = seconds(facts["time_to_first_token_s"])
        remark(f"first token after {_passes(facts['forwards_to_first_token'])} and {first}")
        if "save" in facts:
            save = facts["save"]
            fidelity = "exact" if save["exact"] else f"off by up to {save['bound']:.3g}"
            what = f"{count(save['n_tokens'], 'token')}, {size(save['nbytes'])}, {fidelity}"
            remark(f"saved {save['path']}: {what}, {seconds(save['save_s'])}")
        if "append" in facts:
            done = facts["append"]
            what = f"{size(done['nbytes'])} written, {size(done['file_bytes'])} and {count(done['n_tokens'], 'token')}"
            cut = "; the turn is marked as cut off" if self.interrupted else ""
            remark(f"appended to {done['path']}: {what} in all{cut}")

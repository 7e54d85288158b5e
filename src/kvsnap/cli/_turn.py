"""One turn on the command line: restore, prompt, stream, save, report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import kvsnap
from kvsnap.api import Restored
from kvsnap.cli._draft import Drafted, show_speculated
from kvsnap.cli._names import opened_session, shown_session
from kvsnap.cli._output import (
    CheckFailed,
    OutputLostError,
    count,
    emit,
    progress,
    remark,
    seconds,
    show,
    size,
    waiting,
)
from kvsnap.conversation.rendering import following
from kvsnap.errors import ContextError, InputError
from kvsnap.journalling import Journalled, Saying, journal
from kvsnap.layout import CUT_OFF, UNFINISHED, Sampler, SamplerState, Snapshot
from kvsnap.protocols import Engine, Token
from kvsnap.session import Session
from kvsnap.speculation import Speculation

__all__ = ["INTERRUPTED", "STOPS", "Turn", "interruption", "is_whole", "prompt_ids", "restored", "saying"]

_NOTE = 160
"""Characters of the one note that is shown where a restore is not exact."""
INTERRUPTED = 130
STOPS = {
    "end": "the model ended it",
    "length": "stopped by --max-tokens",
    "context": "the context is full",
    "interrupted": "interrupted",
    UNFINISHED: "published on the way, before its end",
}
"""Why a generation stopped: the word in JSON and in a file's metadata, and in words. Only `end` completes a turn."""


def is_whole(stop: str) -> bool:
    """Tell whether a file with this word in its metadata may be called complete; one without a word may."""
    return stop not in CUT_OFF


def interruption() -> dict[str, Any]:
    """Return the error object of an interrupted command."""
    return {"kind": "interrupted", "message": "interrupted", "path": None, "offset": None, "expected": None,
            "found": None, "exit_code": INTERRUPTED}  # fmt: skip


def _has_tokenizer(engine: Engine) -> bool:
    return getattr(engine, "tokenizer", None) is not None


def restored(
    snapshot: Snapshot,
    engine: Engine,
    accept: Sequence[str],
    sampler: SamplerState | None,
    *,
    non_finite: Literal["allow", "refuse"] = "allow",
    draft: Drafted | None = None,
) -> Restored | None:
    """Restore a snapshot with a progress bar; None when it holds no tokens (then there is nothing to restore)."""
    if not snapshot.tokens:
        if sampler is not None:
            engine.sampler = sampler
        return None
    with progress("restoring") as report:
        done = kvsnap.restore(snapshot, engine, accept=accept, non_finite=non_finite, progress=report,
                              draft=None if draft is None else draft.engine)  # fmt: skip
    if sampler is not None:
        engine.sampler = sampler
    return done


def prompt_ids(engine: Engine, text: str, *, chat: bool) -> tuple[int, ...]:
    """Return the ids of a prompt; with `chat` as a user message, after what the engine holds already."""
    if not _has_tokenizer(engine):
        raise InputError(
            "the model has no tokenizer, so it takes no text: give token ids with --prompt-ids, "
            "or put its tokenizer.json beside config.json"
        )
    if not chat:
        return engine.tokenize(text, special=not engine.tokens)
    if not engine.tokens:
        return engine.render([{"role": "user", "content": text}])
    roles = (("user", "?"), ("assistant", "?"), ("user", text))
    return following(engine, [{"role": r, "content": c} for r, c in roles], {}, engine.tokens, 1)


def saying(snapshot: Snapshot | None, prompt: str | tuple[int, ...], *, chat: bool) -> Saying:
    """Return what makes the messages of a chat that goes on with a prompt, or with an answer that was cut off."""
    before = () if snapshot is None or not snapshot.tokens else snapshot.messages
    answer = ""
    if before is not None and prompt and chat:
        before = (*before, {"role": "user", "content": prompt})
    elif before and not prompt and snapshot is not None and snapshot.metadata.get("stop", "end") not in ("end", "stop"):
        if before[-1]["role"] == "assistant":
            before, answer = before[:-1], str(before[-1].get("content") or "")
    else:
        before = None  # a text beside the messages, or behind an answer that was complete
    known = before

    def said(text: str) -> tuple[Mapping[str, Any], ...] | None:
        if known is None or not answer + text:
            return known
        return (*known, {"role": "assistant", "content": answer + text})

    return said


def _short(notes: Sequence[str]) -> str:
    """Return the first note, cut to a sentence, and how many more there are."""
    if not notes:
        return ""
    first = notes[0] if len(notes[0]) <= _NOTE else f"{notes[0][:_NOTE].rsplit(' ', 1)[0]} ..."
    return f": {first}" + (f"; and {len(notes) - 1} more, which --json lists" if len(notes) > 1 else "")


def _passes(number: int) -> str:
    return f"{number or 'no'} forward pass{'' if number == 1 else 'es'}"


@dataclass
class Turn:
    """What one run of `generate` or `resume` does after the engine stands: generate, save, report."""

    engine: Engine
    max_tokens: int
    as_json: bool
    restored: Restored | None
    metadata: Mapping[str, str] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    codec: str | None = None
    said: Saying | None = None
    tokens: list[Token] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    stop: str = "length"
    journalled: Journalled | None = None
    draft: Drafted | None = None
    speculation: Speculation | None = None
    appended_to: str = ""

    def _stream(
        self, ids: Sequence[int], sampler: Sampler | None, every: int | None, opened: Callable[[], Session | None]
    ) -> Iterator[Token]:
        with waiting(f"reading {count(len(ids), 'token')}"):
            stream: Iterator[Token]
            if self.draft is None:
                stream = kvsnap.generate(self.engine, ids, max_tokens=self.max_tokens, sampler=sampler)
            else:
                stream = self.speculation = self.draft.speculate(self.engine, tuple(ids), self.max_tokens, sampler)
        # Opened after the prompt, whose errors leave no session behind.
        session = opened() if every else None
        if session is None or every is None:
            return stream
        self.journalled = journal(self.engine, session, stream, every=every, codec=self.codec, metadata=self.metadata,
                                  said=self.said, shown=progress)  # fmt: skip
        return self.journalled

    def run(
        self,
        ids: Sequence[int],
        sampler: Sampler | None,
        *,
        every: int | None = None,
        opened: Callable[[], Session | None] = lambda: None,
    ) -> None:
        """Evaluate the prompt and generate, streaming text to stdout.

        With `every` what there is is published after so many tokens, in the session that `opened` returns.
        An interrupt or a full context ends it, and is remembered; `ContextError` when no token could be generated.
        """
        engine = self.engine
        forwards, started = engine.forwards, time.perf_counter()
        stream = self._stream(ids, sampler, every, opened)
        prefilled = time.perf_counter()
        first_s, first_forwards = 0.0, 0
        as_text = _has_tokenizer(engine)
        try:
            for token in stream:
                if not self.tokens:
                    first_s, first_forwards = time.perf_counter() - started, engine.forwards - forwards
                self.tokens.append(token)
                if not self.as_json:
                    show(token.text if as_text else f"{token.id} ")
            self.stop = "end" if self.tokens and self.tokens[-1].end else "length"
        except (KeyboardInterrupt, OutputLostError):
            self.stop = "interrupted"  # also when nobody reads any more: what was generated is saved all the same
        except ContextError:
            if not self.tokens:
                raise
            self.stop = "context"
        finally:
            if self.tokens and not self.as_json:
                with suppress(OutputLostError):
                    show("\n")  # whatever comes next starts on a line of its own
        ended = time.perf_counter()
        waited = 0.0 if self.restored is None else self.restored.install_s + self.restored.identity_s
        self.facts.update(
            prompt_tokens=len(ids),
            generated_tokens=len(self.tokens),
            total_tokens=len(engine.tokens),
            positions=engine.n_rows + engine.n_pending,
            context_limit=engine.context_limit,
            stop=self.stop,
            forwards_to_first_token=first_forwards,
            forwards=engine.forwards - forwards,
            first_token_s=first_s,
            time_to_first_token_s=waited + first_s,
            prompt_s=prefilled - started,
            generate_s=ended - prefilled,
            seed=None if engine.sampler.settings.greedy else engine.sampler.random.seed,
            warnings=list(self.warnings),
        )
        if self.speculation is not None:
            self.facts["speculated"] = self.speculation.done.to_dict()

    def store(
        self, *, save: str | None, session: Session | None, session_file: str | None = None, locked: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Save a snapshot (encrypted as `locked` says), append to the session (open, or made now), as asked for."""
        if self.journalled is not None:
            self._end_journal(self.journalled)
            session = session_file = None
        if save is None and session is None and session_file is None:
            return
        started = time.perf_counter()
        start = 0 if save is not None or session is None else session.n_rows
        with progress("hashing the weights") as report:
            draft = None if self.draft is None else self.draft.engine
            snapshot = kvsnap.capture(self.engine, start=start, settle=True, progress=report, draft=draft)
        messages = None if self.said is None else self.said("".join(token.text for token in self.tokens))
        metadata = {**self.metadata, **snapshot.metadata, "stop": self.stop}
        snapshot = replace(snapshot, metadata=metadata, messages=messages)
        captured = time.perf_counter()
        self.facts["capture_s"] = captured - started
        if save is not None:
            with progress(f"saving {save}") as report:
                saved = kvsnap.save(snapshot, save, codec=self.codec, progress=report, **locked)
            self.facts["save"] = {**saved.to_dict(), "save_s": time.perf_counter() - captured}
        if session is None and session_file is not None:
            with opened_session(session_file) as made:
                self._append(made, snapshot)
        elif session is not None:
            self._append(session, snapshot)

    def _end_journal(self, journalled: Journalled) -> None:
        journalled.close()
        self.appended_to = shown_session(journalled.session)
        if journalled.report is not None:
            self.facts["append"] = {
                **journalled.report.to_dict(),
                "nbytes": journalled.nbytes,
                "commits": journalled.n_commits,
                "file_bytes": journalled.session.nbytes,
                "append_s": journalled.seconds,
            }

    def _append(self, session: Session, snapshot: Snapshot) -> None:
        started = time.perf_counter()
        self.appended_to = shown_session(session)
        with progress(f"appending to {self.appended_to}") as report:
            done = session.append(snapshot, complete=self.stop == "end", codec=self.codec, progress=report)
        self.facts["append"] = {
            **done.to_dict(),
            "commits": 1,
            "file_bytes": session.nbytes,
            "append_s": time.perf_counter() - started,
        }

    def finish(self) -> None:
        """Print the report. Raise when the user interrupted the generation: the exit code is 130 then."""
        interrupted = self.stop == "interrupted"
        if self.as_json:
            told = {"exit_code": INTERRUPTED, "error": interruption()} if interrupted else {}
            emit({**self._texts(), **self.facts, "restored": self._restored(), **told})
            if interrupted:
                raise CheckFailed(INTERRUPTED)
            return
        self._remarks()
        if interrupted:
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
            remark(exact + _short(back.notes))
        rate = facts["generated_tokens"] / facts["generate_s"] if facts["generate_s"] else 0.0
        seed = "" if facts["seed"] is None else f", seed {facts['seed']}"
        if facts["prompt_tokens"]:
            remark(f"{count(facts['prompt_tokens'], 'prompt token')} in {seconds(facts['prompt_s'])}")
        remark(f"{count(facts['generated_tokens'], 'token')} generated ({rate:.1f}/s, {STOPS[self.stop]}{seed})")
        if "speculated" in facts:
            show_speculated(facts["speculated"])
        if self.stop == "context":
            limit, asked = facts["context_limit"], self.max_tokens
            taken = f"{facts['positions']:,} of {limit:,} positions are taken" if limit else "no position is left"
            remark(f"the context is full: {taken}, so {facts['generated_tokens']:,} of {asked:,} tokens were generated")
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
            cut = "" if self.stop == "end" else f"; the turn is marked as cut off ({STOPS[self.stop]})"
            times = f" in {done['commits']} commits" if done["commits"] > 1 else ""
            remark(f"appended to {self.appended_to}{times}: {what} in all{cut}")

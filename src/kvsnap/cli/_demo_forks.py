"""Step 6 of the demo: branches of one conversation in a library."""

from __future__ import annotations

from typing import Any

import kvsnap
from kvsnap.cli._demo_parts import Run, Step, listening
from kvsnap.cli._output import count, size
from kvsnap.library import Library

__all__ = ["branch"]

_QUESTIONS = {"cost": " And what does it cost?", "keeper": " Who needs to keep it?", "risk": " What could go wrong?"}
_OVERHEAD = 16 << 10
_MOST = 64 << 10
"""Bytes that a turn may add to its rows and logits, and bytes that a fork may write."""


def branch(run: Run) -> Step:
    """Put the conversation into a library, fork it, and ask each fork something else."""
    from rich.markup import escape

    step = Step(6, "Branches of one conversation, nothing copied")
    run.files["library"] = run.path("library")
    forks: list[dict[str, Any]] = []
    with Library(run.files["library"]) as library:
        if "talk" in library:  # of an earlier run
            for name in ("talk", *_QUESTIONS):
                if name in library:
                    library.remove(name)
        trunk = library.add(run.files["middle"], "talk")
        before = kvsnap.verify(trunk.path)
        for name, question in _QUESTIONS.items():
            made = library.fork("talk", name)
            with library.open(name) as session:
                restored = kvsnap.restore(session.load(), run.engine)
                ids = run.engine.tokenize(question, special=False)
                with listening(run.model) as heard:
                    said = "".join(t.text for t in kvsnap.generate(run.engine, ids, max_tokens=12, stop_at_end=False))
                new = kvsnap.capture(run.engine, start=session.n_rows, settle=True)
                beyond = session.append(new).nbytes - new.nbytes
            forks.append({"name": name, "fork_bytes": made.own_bytes, "beyond": beyond, "said": said,
                          "reused": restored.reused, "recomputed": restored.recomputed,
                          "forwards": len(heard.digests)})  # fmt: skip
            step.say(f"[bold]{name}[/bold]{escape(question)} …{escape(' '.join(said.split()))}")
        # The last branch once more, from the file it was forked from: the same question has the same answer.
        kvsnap.restore(kvsnap.load(trunk.path), run.engine)
        ids = run.engine.tokenize(question, special=False)
        again = "".join(t.text for t in kvsnap.generate(run.engine, ids, max_tokens=12, stop_at_end=False))
        after, entries = kvsnap.verify(trunk.path), {e.name: e for e in library.list()}
    tokens = trunk.n_tokens
    shown = f"The conversation of {count(tokens, 'token')} takes {size(trunk.own_bytes)}. "
    step.say(f"{shown}Each fork of it wrote {size(max(f['fork_bytes'] for f in forks))}, then its own turn.")
    step.facts.update(trunk_bytes=trunk.own_bytes, forks=forks)
    most = max(f["fork_bytes"] for f in forks)
    step.check(f"a fork writes less than {size(_MOST)}", most < _MOST, size(most))
    step.check(f"all {tokens:,} tokens were reused in each branch, none recomputed",
               all((f["reused"], f["recomputed"]) == (tokens, 0) for f in forks), str(forks))  # fmt: skip
    most = max(f["beyond"] for f in forks)
    step.check(f"the file of a branch holds its rows and logits and at most {size(_OVERHEAD)} more",
               most <= _OVERHEAD and all(entries[n].n_tokens > tokens for n in _QUESTIONS), size(most))  # fmt: skip
    step.check("a branch says what the trunk would have said", again == forks[-1]["said"],
               f"{again!r} for {forks[-1]['said']!r}")  # fmt: skip
    step.check("the trunk did not change", before.ok and after.ok and before.n_bytes == after.n_bytes)
    return step

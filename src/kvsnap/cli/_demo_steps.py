"""Steps 1 to 3 of the demo: read and save, go on in a new process, sweep."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np

import kvsnap
from kvsnap import sampling
from kvsnap.cli._demo_parts import Run, Step, digest, listening
from kvsnap.cli._output import count, seconds, size
from kvsnap.errors import KvsnapError
from kvsnap.layout import Sampler

__all__ = ["go_on", "read_and_save", "sweep"]

SAMPLER = Sampler(temperature=0.8, seed=2026)


def read_and_save(run: Run) -> Step:
    """Prefill, generate half, save, and go on to the end without interruption: the run to compare with."""
    from rich.markup import escape

    step = Step(1, "Read a text, start to answer, stop in the middle, save")
    engine, n = run.engine, len(run.prompt)
    started = time.perf_counter()
    engine.prefill(run.prompt)
    prefill_s = time.perf_counter() - started
    step.say(
        f"{run.model_name} read {count(n, 'token')} in {seconds(prefill_s)} (loading it took {seconds(run.load_s)})."
    )
    run.files["prompt"] = run.path("prompt.kvsnap")
    kvsnap.save(kvsnap.capture(engine), run.files["prompt"])
    engine.sampler = sampling.start(SAMPLER)
    said = list(kvsnap.generate(engine, max_tokens=run.half, stop_at_end=False))
    text = "".join(t.text for t in said)
    step.say(f"It said {count(run.half, 'token')} at temperature 0.8: “…{escape(' '.join(text.split())[-90:])}”")
    run.middle = kvsnap.capture(engine, settle=True)
    run.files["middle"] = run.path("middle.kvsnap")
    started = time.perf_counter()
    saved = kvsnap.save(run.middle, run.files["middle"])
    save_s = time.perf_counter() - started
    checked = kvsnap.verify(run.files["middle"])
    step.say(f"Stopped there and saved to {run.files['middle']}: {size(saved.nbytes)} in {seconds(save_s)}.")
    with listening(run.model, keep=True) as heard:
        more = list(kvsnap.generate(engine, max_tokens=run.half, stop_at_end=False))
    run.ids, run.digests, run.rows = [t.id for t in more], heard.digests, heard.rows
    step.say(f"This process then went on for {run.half} more tokens: the run that was never interrupted.")
    step.facts.update(prompt_tokens=n, generated_tokens=2 * run.half, prefill_s=prefill_s, save_s=save_s,
                      load_s=run.load_s, file_bytes=saved.nbytes, tensor_bytes=saved.tensor_bytes)  # fmt: skip
    step.check(f"the file holds all {n + run.half:,} tokens, every one evaluated",
               saved.n_tokens == saved.n_rows == n + run.half,
               f"{saved.n_tokens} tokens, {saved.n_rows} rows")  # fmt: skip
    step.check("every byte of it fits its checksum, and it is exact", checked.ok and saved.exact, str(checked.damages))
    return step


def _ask_child(job: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvsnap.cli._demo_child"]
    done = subprocess.run(  # noqa: S603 # a module of this package under this interpreter
        command, input=json.dumps(job), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise KvsnapError(f"the second process of the demo ended with {done.returncode}: {last}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def go_on(run: Run, dtype: str | None, attention: str | None) -> Step:
    """Restore in a new process and compare with the run that was never interrupted."""
    step = Step(2, "Go on in a new process")
    job = {"model": run.model_name, "dtype": dtype, "attention": attention, "middle": run.files["middle"],
           "prompt": run.files["prompt"], "n_tokens": run.half, "n_greedy": min(16, run.half)}  # fmt: skip
    found = _ask_child(job)
    ready, again = found["restore_first_s"], found["prefill_first_s"]
    hashed = ready + found["identity_s"]
    step.facts.update(found, restore_hashed_first_s=hashed, speedup=again / hashed, speedup_known=again / ready)
    step.say(f"Process {found['pid']} (this one is {os.getpid()}) loaded the model, restored "
             f"{count(found['reused'], 'token')} and went on.")  # fmt: skip
    step.say(f"First token of an answer to the {count(found['prompt_tokens'], 'token')} of the text, with the model "
             f"loaded: [bold]{seconds(hashed)}[/bold] with a restore, weights hashed too; "
             f"[bold]{seconds(again)}[/bold] with transformers' own generate, which reads them again: "
             f"{again / hashed:,.0f} times longer.")  # fmt: skip
    step.say(f"Every restore hashes the weights ({seconds(found['identity_s'])} here). Where the model's identity is "
             f"known, as between the continuations of step 3, the first token takes {seconds(ready)}: reading again "
             f"takes {again / ready:,.0f} times longer than that.")  # fmt: skip
    logits = None if run.middle is None else run.middle.logits
    stored = "" if logits is None else digest(np.ascontiguousarray(logits.array).view(np.uint8))
    total = len(run.prompt) + run.half
    step.check("it is another process", found["pid"] != os.getpid())
    step.check("the first token needed no forward pass", found["first_forwards"] == 0, str(found["first_forwards"]))
    step.check(f"all {total:,} tokens were reused, none recomputed",
               (found["reused"], found["recomputed"]) == (total, 0),
               f"{found['reused']} reused, {found['recomputed']} recomputed")  # fmt: skip
    step.check(f"{run.half} tokens took {run.half - 1} forward passes", found["forwards"] == run.half - 1,
               str(found["forwards"]))  # fmt: skip
    step.check("the same token ids as the run that never stopped", found["ids"] == run.ids,
               f"{found['ids']} for {run.ids}")  # fmt: skip
    same = sum(a == b for a, b in zip(found["digests"], run.digests, strict=False))
    step.check("bit-identical logits at every step",
               found["digests"] == run.digests and found["stored_logits"] == stored,
               f"{same} of {len(run.digests)} steps agree")  # fmt: skip
    step.check("the restore calls itself exact", found["exact"], "; ".join(found["notes"]))
    n = len(found["transformers_ids"])
    step.check(f"greedy ids equal transformers' own generate ({count(n, 'token')})",
               n > 0 and found["greedy_ids"] == found["transformers_ids"],
               f"{found['greedy_ids']} for {found['transformers_ids']}")  # fmt: skip
    return step


def sweep(run: Run) -> Step:
    """Three sampler settings from one snapshot."""
    from rich.markup import escape

    step = Step(3, "Three continuations from one snapshot, no prefill")
    snapshot = kvsnap.load(run.files["middle"])
    samplers = (Sampler(), Sampler(temperature=0.7, top_p=0.9, seed=1), Sampler(temperature=1.2, min_p=0.05, seed=1))
    n_tokens = min(16, run.half)
    started = time.perf_counter()
    with listening(run.model) as heard:
        found = kvsnap.sweep(snapshot, run.engine, samplers, max_tokens=n_tokens)
    taken = time.perf_counter() - started
    rows = []
    for name, c in zip(("greedy", "temperature 0.7, top-p 0.9", "temperature 1.2, min-p 0.05"), found, strict=True):
        rows.append({"sampler": name, "tokens": list(c.tokens), "text": c.text, "forwards": c.forwards,
                     "mean_logprob": sum(c.logprobs) / len(c.logprobs)})  # fmt: skip
        step.say(f"[bold]{name}[/bold]: {escape(' '.join(c.text.split()))}")
    expected = sum(len(c.tokens) - 1 for c in found)
    step.say(f"All three together took {seconds(taken)}.")
    step.facts.update(continuations=rows, forwards=len(heard.digests), seconds=taken)
    tokens = f"{expected + len(found)} tokens, none for the {len(snapshot.tokens):,} before"
    step.check(f"{expected} forward passes for {tokens}",
               len(heard.digests) == expected == sum(c.forwards for c in found), str(len(heard.digests)))  # fmt: skip
    return step

"""A run that is killed: goes on in a session with a tiny model, journalled, and says each id that it was handed.

`journal_writer.py SESSION EVERY COUNT [lose]`: until the session holds COUNT generated ids; with `lose` the random
state of the session is left out, which must be noticed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import kvsnap
from tiny_models import PROMPT, ByteTokenizer, tiny_llama

__all__ = ["SAMPLER", "generated", "make_engine"]

SAMPLER = kvsnap.Sampler(temperature=1.0, seed=11)


def make_engine() -> Any:
    torch.set_num_threads(1)
    return kvsnap.connect(tiny_llama(), ByteTokenizer())


def generated(session: kvsnap.Session) -> int:
    """Ids of the session behind the prompt."""
    return max(session.n_tokens - len(PROMPT.encode()), 0)


def main(path: str, every: int, count: int, *, lose: bool) -> None:
    engine = make_engine()
    with kvsnap.Session.open(Path(path)) as session:
        more, prompt, sampler = count - generated(session), PROMPT, SAMPLER
        if session.n_tokens:
            done = kvsnap.restore(session.load(), engine, sampler=SAMPLER if lose else None)
            assert done.exact
            prompt, sampler = "", None
        print("evaluated", engine.evaluated, flush=True)
        tokens = kvsnap.generate(engine, prompt, max_tokens=more, sampler=sampler)
        for token in kvsnap.journal(engine, session, tokens, every=every):
            print(token.id, flush=True)
    print("evaluated", engine.evaluated, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), lose="lose" in sys.argv)

"""One process of a conversation: `python conversation_child.py SESSION`; each line of stdin is one thing to do.

A line is JSON: `{"say": text, "max_tokens": n, "every": n}`, or `{"go_on": true, ...}`. It answers with one line each:
tokens, log-probabilities as hex, reused and recomputed tokens, and a digest of the logits that come next. While an
answer is generated it prints a dot for each token where `dots` is set.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
import xxhash

from chat_models import chat_engine
from kvsnap.conversation import Conversation
from kvsnap.layout import Sampler
from kvsnap.session import Session

SAMPLER = Sampler(temperature=0.9, top_k=40, seed=11)


def answered(conversation: Conversation, order: dict[str, Any]) -> dict[str, Any]:
    more = {"max_tokens": order.get("max_tokens")}
    stream = conversation.stream_on(**more) if order.get("go_on") else conversation.stream(order["say"], **more)
    with stream:
        for _ in stream:
            if order.get("dots"):
                print(".", end="", flush=True)
    turn = stream.turn
    engine = conversation.engine
    snapshot = engine.capture()
    raw = b"".join(np.ascontiguousarray(t.values()).tobytes() for layer in snapshot.layers for t in layer.tensors)
    return {
        "tokens": list(turn.tokens), "logprobs": [x.hex() for x in turn.logprobs], "reused": turn.reused,
        "recomputed": turn.recomputed, "stop": turn.stop, "cache": xxhash.xxh3_128_hexdigest(raw),
    }  # fmt: skip


def main(path: str) -> None:
    torch.set_num_threads(1)
    engine = chat_engine("llama")
    with Session.open(path) as session:
        conversation: Conversation | None = None
        for line in sys.stdin:
            order = json.loads(line)
            if conversation is None:
                settings = None if session.n_tokens else SAMPLER
                conversation = Conversation(engine, session, sampler=settings, every=order.get("every"))
                print(json.dumps({"tokens": session.n_tokens, "complete": conversation.complete}), flush=True)
            print(json.dumps(answered(conversation, order)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

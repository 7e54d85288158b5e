"""A chat that is opened again: time to the first token of the next answer, warm against cold, and what a turn costs.

SmolLM2-135M on the CPU; the model is loaded in both cases. Cold is what a program without a saved cache does: render
the whole chat and evaluate it. Warm opens the session, checks the identity of the model (its weights are hashed),
restores, and evaluates the new message. That both answer the same is asserted for the tiny model, where passes agree.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import common
from common import Figure, Work, interleave, ms, ratio

import kvsnap
from kvsnap.conversation import Conversation, Turn
from kvsnap.session import Session

QUESTION = "And what does that mean?"
ANSWER = 8
TEXT = "Rivers carry water, and what is in it, from the hills to the sea; some of them are known to be very long. "


def engine_of(name: str) -> Any:
    if name != "tiny":
        from kvsnap.engines.models import load_model

        loaded = load_model(name)
        return kvsnap.connect(loaded.model, loaded.tokenizer)
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return kvsnap.connect(LlamaForCausalLM(config).eval(), _Bytes())


class _Bytes:
    """A byte a token, in Latin-1, and a chat template of one line."""

    chat_template = "{{ messages }}"

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode("latin-1"))

    def decode(self, ids: Any, **_: Any) -> str:
        return bytes(ids).decode("latin-1")

    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i for i in range(256)}

    def apply_chat_template(self, messages: Any, *, add_generation_prompt: bool, **_: Any) -> list[int]:
        text = "".join(f"<{m['role']}>{m['content']}</>" for m in messages)
        return self.encode(text + ("<assistant>" if add_generation_prompt else ""))


def prepared(engine: Any, path: Path, n_tokens: int, turns: int) -> None:
    """Write a session of so many tokens in so many turns."""
    words = max(1, len(engine.tokenize(TEXT, special=False)))
    times = max(1, n_tokens // turns // words)
    with Session.open(path) as session:
        conversation = Conversation(engine, session)
        for number in range(turns):
            conversation.say(f"{number}: " + TEXT * times, max_tokens=ANSWER)


def figures(name: str, n_tokens: int, rounds: int, directory: Path) -> list[Figure]:
    engine, path = engine_of(name), directory / "chat.kvsnap"
    prepared(engine, path, n_tokens, 8)
    with Session.open(path, readonly=True) as session:
        messages = [*(session.messages or ()), {"role": "user", "content": QUESTION}]
        total, commit = session.n_tokens, session.n_commits
    turns: dict[str, Turn] = {}
    parts: dict[str, list[float]] = {"identity": [], "install": []}
    first: dict[str, list[float]] = {"cold": [], "warm": []}

    def cold() -> None:
        engine.reset()
        turns["cold"] = Conversation(engine).say(messages, max_tokens=ANSWER)
        first["cold"].append(turns["cold"].first_token_s)

    def warm() -> None:
        begun = time.perf_counter()
        with Session.open(path) as session:
            conversation = Conversation(engine, session)
            with conversation.stream(QUESTION, max_tokens=ANSWER) as stream:
                tokens = list(stream)
            opened = time.perf_counter() - begun
            turn = turns["warm"] = stream.turn
            back = conversation.restored
            assert back is not None
            assert back.exact
            assert (turn.recomputed, len(tokens)) == (0, ANSWER)
            parts["identity"].append(back.identity_s)
            parts["install"].append(back.install_s)
            first["warm"].append(opened - turn.total_s + turn.first_token_s)

    def undo() -> None:
        with Session.open(path) as session:
            session.rewind(commit)

    interleave({"cold": Work(cold), "warm": Work(warm, None, undo)}, rounds, warm=False)
    if name == "tiny":
        assert turns["warm"].tokens == turns["cold"].tokens
    what = f"{name}, a chat of {total} tokens: "
    value = ratio(first["cold"], first["warm"])
    known = [w - i for w, i in zip(first["warm"], parts["identity"], strict=True)]
    return [
        Figure(f"{what}first token, cold", f"{ms(first['cold']):.0f} ms", f"{turns['cold'].new} tokens evaluated"),
        Figure(
            f"{what}first token, opened again", f"{ms(first['warm']):.0f} ms",
            f"{turns['warm'].new} tokens evaluated; ms: hashing the weights {ms(parts['identity']):.0f}, restoring "
            f"{ms(parts['install']):.0f}",
        ),
        Figure(f"{what}warm against cold", f"{value:.1f} x", f"{ratio(first['cold'], known):.1f} x, hashing apart"),
        *costs(engine, directory / "costs.kvsnap", what, rounds),
    ]  # fmt: skip


def costs(engine: Any, path: Path, what: str, rounds: int) -> list[Figure]:
    """What a turn costs beside the passes: aligning, capturing, hashing, appending."""
    with Session.open(path) as session:
        conversation = Conversation(engine, session)
        conversation.say(TEXT * 4, max_tokens=ANSWER)
        over, written = [], []
        for _ in range(max(3, rounds)):
            with conversation.stream(QUESTION, max_tokens=ANSWER) as stream:
                for _ in stream:
                    passes = time.perf_counter()
            over.append(time.perf_counter() - passes)
            written.append(stream.turn.written)
    return [
        Figure(
            f"{what}storing a turn of about 24 tokens", f"{statistics.median(over) * 1e3:.0f} ms",
            f"{statistics.median(written) / 1e6:.2f} MB written, weights hashed",
        )
    ]  # fmt: skip


def measure(directory: Path, options: argparse.Namespace) -> list[Figure]:
    sizes, name, rounds = options.tokens, options.model, options.rounds or 3
    if options.small:
        sizes, name, rounds = [400], "tiny", 2
    return [f for n in sizes for f in figures(name, n, rounds, _made(directory / str(n)))]


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="smollm2", help="as `kvsnap chat --model`")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1024, 4096])
    options = parser.parse_args()
    common.run(options, lambda directory: measure(directory, options), "torch", "transformers")


if __name__ == "__main__":
    main()

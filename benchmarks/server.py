"""What a server adds to a turn, and the time to the first token: a new conversation, a known one, after a restart.

The server runs in a process of its own on this machine; one client asks, one request at a time. Its time is the wall
time of the client until the first text of the stream, or until the whole answer.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import common
from common import Figure, ms

WORDS = "The river rises in the hills, and it is told that a miller lived there who counted every stone of its bed. "


def tiny_chat(directory: Path) -> Path:
    """A tiny model with a chat template, a byte for each token."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
    PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template).save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@contextmanager
def serving(model: str, library: Path) -> Iterator[http.client.HTTPConnection]:
    command = [sys.executable, "-m", "kvsnap", "serve", "--json", "--port", "0", "--min-reuse", "8", "--model", model]
    process = subprocess.Popen(
        [*command, "--library", str(library)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=common.environment(),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        where = urlsplit(json.loads(process.stdout.readline())["url"])
        yield http.client.HTTPConnection(str(where.hostname), where.port, timeout=600)
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def asked(
    client: http.client.HTTPConnection, messages: list[dict[str, str]], session: str | None, *, stream: bool = False
) -> tuple[float, dict[str, Any]]:
    """Ask; return the seconds until the first text (of a stream) or the answer, and what the server told."""
    body = json.dumps({"messages": messages, "max_tokens": 4, "stream": stream})
    headers = {} if session is None else {"X-Kvsnap-Session": session}
    begun = time.perf_counter()
    client.request("POST", "/v1/chat/completions", body, headers)
    answer = client.getresponse()
    assert answer.status == 200, answer.read()
    if not stream:
        told = json.loads(answer.read())
        return time.perf_counter() - begun, told
    first, told = 0.0, {}
    while line := answer.readline():
        if line.startswith(b"data: {"):
            told = json.loads(line[6:])
            if not first and told["choices"][0]["delta"].get("content"):
                first = time.perf_counter() - begun
    return first or time.perf_counter() - begun, told


def figures(model: str, n_words: int, rounds: int, directory: Path) -> list[Figure]:
    times: dict[str, list[float]] = {"cold": [], "warm": [], "found": [], "restart": []}
    over: dict[str, list[float]] = {"named": [], "found": [], "switch": []}
    reused = []

    def said(number: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{number}. " + WORDS * n_words}]

    def more(messages: list[dict[str, str]]) -> list[dict[str, str]]:
        return [*messages, {"role": "assistant", "content": "So it is."}, {"role": "user", "content": "And then?"}]

    with serving(model, directory / "library") as client:
        asked(client, [{"role": "user", "content": "warm up"}], "first")
        for number in range(rounds):
            taken, told = asked(client, said(number), f"of-{number}", stream=True)
            times["cold"].append(taken)
            assert told["kvsnap"]["reused"] == 0
            taken, told = asked(client, more(said(number)), f"of-{number}", stream=True)
            times["warm"].append(taken)
            reused.append(told["kvsnap"]["reused"])
            assert told["kvsnap"]["new"] < told["kvsnap"]["reused"]
            taken, told = asked(client, more(more(said(number))), None, stream=True)
            times["found"].append(taken)
            assert told["kvsnap"]["how"] in ("continued", "forked")
            assert told["kvsnap"]["reused"] > reused[-1] // 2
        short = [{"role": "user", "content": "Hello."}]
        for session in ("short-0", "short-1"):
            asked(client, short, session)
        # One behind the other, not in turns: what the engine held before decides what a request has to restore.
        for name, added in over.items():
            for number in range(-1, rounds * 4):
                session = {"named": "short-0", "switch": f"short-{number % 2}", "found": None}[name]
                taken, told = asked(client, more(short) if session is None else short, session)
                if number >= 0:
                    added.append(taken - told["kvsnap"]["total_s"])
                    assert told["kvsnap"]["how"] == ("forked" if session is None else "named")
    for number in range(rounds):
        with serving(model, directory / "library") as client:
            asked(client, [{"role": "user", "content": "warm up"}], "first")
            taken, told = asked(client, more(said(number)), f"of-{number}", stream=True)
            times["restart"].append(taken)
            assert told["kvsnap"]["reused"] > reused[number] // 2
    n_tokens = statistics.median(reused)
    what = f"{Path(model).name}, {n_tokens:.0f} tokens: "
    return [
        Figure(f"{what}a new conversation, first text", f"{ms(times['cold']):.0f} ms"),
        Figure(f"{what}one that is live, by name, first text", f"{ms(times['warm']):.0f} ms"),
        Figure(f"{what}found by its beginning, first text", f"{ms(times['found']):.0f} ms"),
        Figure(f"{what}after a restart of the server, first text", f"{ms(times['restart']):.0f} ms"),
        Figure("what a request adds to its turn: the session before, by name", f"{ms(over['named']):.1f} ms"),
        Figure("another one than before, by name", f"{ms(over['switch']):.1f} ms", "restored, weights hashed"),
        Figure("found by its beginning and forked", f"{ms(over['found']):.1f} ms", "searched, forked, restored"),
    ]


def measure(directory: Path, options: argparse.Namespace) -> list[Figure]:
    if options.small:
        return figures(str(tiny_chat(directory / "tiny")), 2, 1, directory)
    return figures(options.model, options.words, options.rounds or 3, directory)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="smollm2", help="as `kvsnap serve --model`")
    parser.add_argument("--words", type=int, default=42, help="how often the prompt says its 24 words")
    options = parser.parse_args()
    common.run(options, lambda directory: measure(directory, options), "torch", "transformers", "starlette", "uvicorn")


if __name__ == "__main__":
    main()

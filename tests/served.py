"""A server in a process of its own, for tests: started on a free port, asked over HTTP, killed in the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from safetensors.numpy import load_file, save_file

from tiny_models import save_tiny

__all__ = ["CONTEXT", "TEMPLATE", "Served", "chat_model", "serving", "user"]

CONTEXT = 4096
TEMPLATE = (
    "{% if tools %}{{ '\x02tools:' + tools | tojson + '\x03' }}{% endif %}"
    "{% for m in messages %}{{ '\x02' + m['role'] + ':' + m['content'] + '\x03' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\x02assistant:' }}{% endif %}"
)
_WAIT = 120.0


def chat_model(directory: Path, seed: int = 0, template: str = TEMPLATE) -> Path:
    """Write a tiny model that knows a chat template, and answers in printable ASCII. It never ends an answer itself."""
    save_tiny(directory, seed=seed, max_position_embeddings=CONTEXT)
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"][[i for i in range(256) if not 32 <= i < 127]] = 0  # the best of the others is above
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "tokenizer_config.json"
    settings = {**json.loads(path.read_text(encoding="utf-8")), "model_max_length": CONTEXT}
    path.write_text(json.dumps({**settings, "chat_template": template}), encoding="utf-8")
    return directory


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


class Served:
    """A server that answers. `log` is the file of its stderr."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path, library: Path) -> None:
        self.process, self.url, self.log, self.library = process, url, log, library
        self.http = httpx.Client(base_url=url, timeout=_WAIT)

    def openai(self, token: str = "no-token", session: str | None = None) -> Any:  # noqa: S107
        import openai

        headers = {} if session is None else {"X-Kvsnap-Session": session}
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=token, max_retries=0, timeout=_WAIT, default_headers=headers
        )

    def post(self, body: Any, session: str | None = None, **headers: str) -> httpx.Response:
        """Ask for an answer; a body that is no object goes out as it is."""
        named = {} if session is None else {"X-Kvsnap-Session": session}
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(
            "/v1/chat/completions", content=raw, headers={"Content-Type": "application/json", **named, **headers}
        )

    def say(self, messages: list[dict[str, Any]], session: str | None = None, **more: Any) -> dict[str, Any]:
        """Ask for an answer, and return it. It has to come."""
        got = self.post({"messages": messages, "max_tokens": 6, **more}, session)
        assert got.status_code == 200, got.text
        return dict(got.json())

    def session(self, name: str) -> dict[str, Any]:
        got = self.http.get(f"/v1/sessions/{name}")
        assert got.status_code == 200, got.text
        return dict(got.json())

    def settled(self, name: str) -> dict[str, Any]:
        """A session once all that was asked for before is done: what changes sessions waits in the same line."""
        got = self.http.post(f"/v1/sessions/{name}/save")
        assert got.status_code == 200, got.text
        return dict(got.json())

    def names(self) -> list[str]:
        return [one["id"] for one in self.http.get("/v1/sessions").json()["data"]]

    def http_is_open(self) -> bool:
        """Tell whether new connections are taken."""
        try:
            httpx.get(f"{self.url}/health", timeout=_WAIT)
        except httpx.TransportError:
            return False
        return True

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait, and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(_WAIT)


@contextmanager
def serving(model: Path | str, library: Path, *options: str, **environment: str) -> Iterator[Served]:
    """Start a server, and kill it in the end if it still runs."""
    log = library.parent / f"{library.name}-{os.urandom(4).hex()}.log"
    command = [sys.executable, "-m", "kvsnap", "serve", "--json", "--port", "0", "--model", str(model)]
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [*command, "--library", str(library), *options], stdout=subprocess.PIPE, stderr=stderr, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )  # fmt: skip
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, log.read_text(encoding="utf-8")
        yield Served(process, json.loads(line)["url"], log, library)
    finally:
        process.kill()
        process.wait(_WAIT)
        process.stdout.close()

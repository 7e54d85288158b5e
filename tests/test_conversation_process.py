"""Conversations across processes: closed and opened again, and killed at any moment."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsnap.inspection import verify
from kvsnap.session import Session
from kvsnap.tensors import Tensor

pytest.importorskip("torch")

pytestmark = pytest.mark.engine

CHILD = Path(__file__).with_name("conversation_child.py")
SAID = ("the first thing to say", "and another", "at the end")
EVERY = 4


def start(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(CHILD), str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def run(path: Path, *orders: dict[str, Any]) -> list[dict[str, Any]]:
    child = start(path)
    out, _ = child.communicate("".join(json.dumps(order) + "\n" for order in orders), timeout=120)
    assert child.returncode == 0
    return [json.loads(line.lstrip(".")) for line in out.splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A conversation in one process that was never interrupted: the answer of each turn."""
    path = tmp_path_factory.mktemp("whole") / "s.kvsnap"
    return run(path, *({"say": text, "max_tokens": 24} for text in SAID))[1:]


def test_each_turn_in_a_new_process_is_what_one_process_gives(tmp_path: Path, whole: list[dict[str, Any]]) -> None:
    path = tmp_path / "s.kvsnap"
    found = []
    for text in SAID:
        opened, turn = run(path, {"say": text, "max_tokens": 24})
        assert bool(opened["tokens"]) == bool(found)
        assert turn["recomputed"] == 0
        found.append(turn)
    assert found == whole
    assert len({turn["cache"] for turn in found}) == len(SAID)


def test_a_row_that_was_zeroed_shows(tmp_path: Path, whole: list[dict[str, Any]]) -> None:
    """The negative control: the same comparison finds one row of one head that is not what it was."""
    path, other = tmp_path / "s.kvsnap", tmp_path / "t.kvsnap"
    run(path, {"say": SAID[0], "max_tokens": 24})
    with Session.open(path, readonly=True) as session, Session.open(other) as spoilt:
        snapshot = session.load()
        layer = snapshot.layers[1]
        values = np.array(layer.tensors[0].values())
        values[0, 3] = 0.0
        tensors = (Tensor(layer.tensors[0].spec, values), *layer.tensors[1:])
        layers = list(snapshot.layers)
        layers[1] = replace(layer, tensors=tensors)
        spoilt.append(replace(snapshot, layers=tuple(layers)))
    assert run(other, {"say": SAID[1], "max_tokens": 24})[1] != whole[1]


@pytest.mark.newest
def test_a_killed_conversation_loses_no_more_than_was_not_published(
    tmp_path: Path, whole: list[dict[str, Any]]
) -> None:
    """kill -9 while it answers: the prompt and all but the last few tokens are there, and it goes on bit for bit."""
    path, draw = tmp_path / "s.kvsnap", random.Random(3)
    run(path, {"say": SAID[0], "max_tokens": 24})
    before = path.read_bytes()
    for seen in sorted(draw.sample(range(1, 24), 3)):
        path.write_bytes(before)
        child = start(path)
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps({"say": SAID[1], "max_tokens": 24, "every": EVERY, "dots": True}) + "\n")
        child.stdin.flush()
        opened = json.loads(child.stdout.readline())
        assert child.stdout.read(seen) == "." * seen
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=60)
        child.stdin.close()
        child.stdout.close()
        assert verify(path).ok
        with Session.open(path) as session:
            generated = session.load().generated
            assert not session.complete
            assert len(generated) >= seen - EVERY
            assert generated == tuple(whole[1]["tokens"][: len(generated)])
            assert session.n_tokens > opened["tokens"]
            assert [m["role"] for m in session.messages or ()][:3] == ["user", "assistant", "user"]
        left = 24 - len(generated)
        if not left:
            continue
        _, turn = run(path, {"go_on": True, "max_tokens": left})
        assert list(generated) + turn["tokens"] == whole[1]["tokens"]
        assert turn["logprobs"] == whole[1]["logprobs"][len(generated) :]
        assert turn["cache"] == whole[1]["cache"]


@pytest.mark.newest
def test_killed_before_anything_was_published_nothing_is_lost(tmp_path: Path, whole: list[dict[str, Any]]) -> None:
    path = tmp_path / "s.kvsnap"
    run(path, {"say": SAID[0], "max_tokens": 24})
    child = start(path)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps({"say": SAID[1], "max_tokens": 24, "dots": True}) + "\n")
    child.stdin.flush()
    child.stdout.readline()
    assert child.stdout.read(3) == "..."
    child.kill()
    child.wait(timeout=60)
    child.stdin.close()
    child.stdout.close()
    opened, turn = run(path, {"say": SAID[1], "max_tokens": 24})
    assert opened["complete"] is False  # the first answer was cut off by its limit
    assert turn == whole[1]

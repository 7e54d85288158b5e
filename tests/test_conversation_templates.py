"""What a turn says of templates shaped as those of known models: the cause told, and what keeping the history saves.

The shapes are told from the models' documentation, in our own words: a date in the system message (Llama 3.1), thoughts
left out of earlier answers and an empty thought in the prompt (Qwen3), channels (gpt-oss), white space that is trimmed
(Mistral, Gemma).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import kvsnap
from kvsnap.conversation import Conversation, Turn
from kvsnap.session import Session

pytest.importorskip("torch")

from chat_models import END, chat_engine

pytestmark = pytest.mark.engine

_CLOSE = "{{ '\x03' }}"
_ASK = "{% if add_generation_prompt %}{{ '\x02assistant:' }}{% endif %}"


def each(content: str, before: str = "{{ '\x01' }}", ask: str = _ASK) -> str:
    """A template that puts `content` for each message `m`."""
    return f"{before}{{% for m in messages %}}{{{{ '\x02' + m['role'] + ':' }}}}{content}{_CLOSE}{{% endfor %}}{ask}"


@dataclass(frozen=True)
class Shape:
    """A template, what it is given, what the model wrote, and the cause that a second turn has to tell."""

    template: str
    wrote: str
    cause: str
    then: dict[str, Any] = field(default_factory=dict)
    first: dict[str, Any] = field(default_factory=dict)


_STRIPPED = (
    "{% if m['role'] == 'assistant' %}{{ m['content'].split('</think>')[-1].lstrip('\\n') }}"
    "{% else %}{{ m['content'] }}{% endif %}"
)
_EMPTY = _ASK.replace("{% endif %}", "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}")
_FINAL = (
    "{% if m['role'] == 'assistant' %}{{ '<|channel|>final<|message|>' + m['content'].split('<|message|>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}"
)
SHAPES = {
    "a date": Shape(
        each("{{ m['content'] }}", "{{ '\x01\x02system:Today: ' + date + '\x03' }}"), "Good day.", "template",
        first={"date": "26 Jul"}, then={"date": "27 Jul"},
    ),
    "thoughts": Shape(each(_STRIPPED), "<think>\nlet me see\n</think>\n\nGood day.", "thinking"),
    "an empty thought in the prompt": Shape(each(_STRIPPED, ask=_EMPTY), "Good day.", "thinking"),
    "channels": Shape(
        each(_FINAL), "<|channel|>analysis<|message|>let me see<|end|><|channel|>final<|message|>Good day.", "thinking"
    ),
    "trimmed": Shape(each("{{ m['content'] | trim }}"), " Good day.\n", "template"),
    "plain": Shape(each("{{ m['content'] }}"), " Good day.\n", ""),
}  # fmt: skip


def second_turn(shape: Shape, path: Path, **options: Any) -> tuple[Turn, int]:
    """Return the turn behind an answer that a model wrote as the shape says, and how many tokens were there."""
    engine = chat_engine(template=shape.template)
    said = {"role": "user", "content": "hello"}
    wrote = engine.tokenize(shape.wrote, special=False)
    engine.warm((*engine.render([said], **shape.first), *wrote, END))
    with Session.open(path) as session:
        answer = {"role": "assistant", "content": shape.wrote}
        session.append(replace(kvsnap.capture(engine), messages=(said, answer)))
        conversation = Conversation(chat_engine(template=shape.template), session, template=shape.then, **options)
        assert conversation.preface == 0
        there = conversation.n_tokens
        return conversation.say("and then", max_tokens=3), there


@pytest.mark.parametrize("name", SHAPES)
def test_the_cause_is_the_right_one(name: str, tmp_path: Path) -> None:
    turn, there = second_turn(SHAPES[name], tmp_path / "s.kvsnap")
    if not SHAPES[name].cause:
        assert (turn.why, turn.recomputed, turn.reused) == (None, 0, there)
        return
    assert turn.why is not None
    assert turn.why.cause == SHAPES[name].cause
    assert turn.reused == turn.why.token < there
    assert turn.recomputed > 0


@pytest.mark.parametrize("name", SHAPES)
def test_a_history_that_is_kept_is_not_evaluated_again(name: str, tmp_path: Path) -> None:
    turn, there = second_turn(SHAPES[name], tmp_path / "s.kvsnap", drift="keep")
    assert (turn.why, turn.recomputed, turn.reused) == (None, 0, there)
    assert turn.new > 0

"""How far a rendered conversation agrees with what is saved, where it parts, and the likely cause."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvsnap.reach import Reach
from kvsnap.runs import common_length

__all__ = ["Agreed", "Aligned", "Cause", "Why", "align", "cause_of", "limited"]

Cause = Literal["edited", "template", "thinking", "tokenisation", "layer", "logits"]
Detokenize = Callable[[Sequence[int]], str]

_AROUND = 12
"""Tokens before and behind the first that differs that are shown as text."""
_CONTEXT = 16
"""Tokens decoded before one whose text is wanted: enough for a character spread over several, and a leading space."""
_NEAR = 200
"""Characters behind the first token that differs in which a thought has to open to be the cause."""
_BROKEN = "\ufffd"
_TRIES = 8
_THOUGHT = re.compile(
    r"<think(?:ing)?>|<reasoning>|<thought>|<seed:think>|\[THINK\]|<\|START_THINKING\|>|<\|channel\|>analysis|◁think▷"
)
"""How models open what they think before they answer."""
_THOUGHT_ENDS = re.compile(r"</think(?:ing)?>|</reasoning>|</thought>|\[/THINK\]|<\|END_THINKING\|>|<\|end\|>")
_WORDS: dict[str, str] = {
    "edited": "the history was edited",
    "template": "the chat template gives the same messages in another form than before",
    "thinking": "the chat template leaves out what the model thought before it answered",
    "tokenisation": "the same text is divided into other tokens",
    "layer": "the cache cannot be cut there",
    "logits": "the logits behind the last token are not kept",
}


@dataclass(frozen=True, slots=True)
class Why:
    """Why tokens that were evaluated before had to be evaluated again.

    `token` is the first one that differs, counted from 0. `saved` and `given` are the text around it as it was saved
    and as it is now, from the same place on; both empty where no token differs. `cause` is the likely cause:

    * `edited`: another message, or fewer, than before;
    * `template`: the same messages in another form: another template, a date in it, white space that it trims;
    * `thinking`: the template leaves out what the model thought before it answered;
    * `tokenisation`: the same text in other tokens, with no common end of a token to go on from;
    * `layer`: no token differs, but a layer of the cache cannot be cut there;
    * `logits`: no token differs, but the last one is evaluated again for its logits.

    `detail` says it in a sentence.
    """

    token: int
    saved: str
    given: str
    cause: Cause
    detail: str

    def __str__(self) -> str:
        """One line: the cause, and the place."""
        shown = f": {self.saved!r} was saved, {self.given!r} is given" if self.saved or self.given else ""
        return f"{self.detail} (from token {self.token} on{shown})"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class Aligned:
    """The ids to go on with: the first `kept` of what is saved, then what is new. `seams` of them differ in id only.

    `seams` counts the saved ids that stay because they say the same text, though the template's text is divided into
    other ids.
    """

    ids: tuple[int, ...]
    kept: int
    seams: int


@dataclass(frozen=True, slots=True)
class Agreed:
    """Ids that were `given` before and those that were `kept` for them, which say the same; seams begin at `first`."""

    given: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    first: int | None = None


def align(saved: Sequence[int], given: Sequence[int], detokenize: Detokenize, agreed: Agreed | None = None) -> Aligned:
    """Return how to go on from `saved` ids to `given` ones, keeping as many of the saved ones as say the same.

    A model may write a text in other tokens than its tokenizer would: what it wrote stays as it was, up to the last
    place where a token ends on both sides. Where both begin as was `agreed` before, that part is not compared again.
    """
    if agreed is not None and agreed.given:
        here, there = len(agreed.kept), len(agreed.given)
        if tuple(saved[:here]) == agreed.kept and tuple(given[:there]) == agreed.given:
            rest = align(saved[here:], given[there:], detokenize)
            kept = here + rest.kept
            seams = rest.seams if agreed.first is None else kept - agreed.first
            return Aligned((*agreed.kept, *rest.ids), kept, seams)
    common = common_length(saved, given)
    if common in (len(saved), len(given)):
        return Aligned((*saved[:common], *given[common:]), common, 0)
    here, there = _seam(saved, given, common, detokenize)
    return Aligned((*saved[:here], *given[there:]), here, here - common)


def _seam(saved: Sequence[int], given: Sequence[int], common: int, detokenize: Detokenize) -> tuple[int, int]:
    """Return the last places in both, behind `common` ids, up to which they say the same text."""
    start = max(0, common - _CONTEXT)
    texts = detokenize(saved[start:]), detokenize(given[start:])
    same = len(os.path.commonprefix(texts))  # noqa: RUF071 # characters are meant
    before = len(detokenize(saved[start:common]))
    if same <= before:
        return common, common
    ends = dict(_ends(saved, common, before, same, detokenize))
    others = dict(_ends(given, common, before, same, detokenize))
    places = sorted(ends.keys() & others.keys(), reverse=True)
    for place in places[:_TRIES]:
        here, there = ends[place], others[place]
        if detokenize(saved[start:here]) == detokenize(given[start:there]) == texts[0][:place]:
            return here, there
    return common, common


def _ends(ids: Sequence[int], first: int, length: int, most: int, detokenize: Detokenize) -> list[tuple[int, int]]:
    """Return (characters, ids) at the end of each token from `first` on that ends a character, up to `most`."""
    found = []
    for place in range(first, len(ids)):
        window = ids[max(0, place - _CONTEXT) : place + 1]
        whole, old = detokenize(window), detokenize(window[:-1])
        length += len(whole.rstrip(_BROKEN)) - len(old.rstrip(_BROKEN))
        if length > most:
            break
        if not whole.endswith(_BROKEN):
            found.append((length, place + 1))
    return found


def cause_of(
    saved: Sequence[int],
    aligned: Aligned,
    before: Sequence[Mapping[str, Any]] | None,
    now: Sequence[Mapping[str, Any]],
    detokenize: Detokenize,
    *,
    other_template: bool = False,
) -> Why | None:
    """Return why the saved ids behind those kept are of no use; None where all are kept.

    `before` are the messages that `saved` is known to be of (None: not known), `now` those that were rendered.
    """
    kept = aligned.kept
    if kept == len(saved):
        return None
    start = max(0, kept - _AROUND)
    old, new = detokenize(saved[start : kept + _AROUND]), detokenize(aligned.ids[start : kept + _AROUND])
    rest = detokenize(saved[kept:])
    following = detokenize(aligned.ids[kept:])
    cause, detail = _likely(rest, following, before, now, other_template=other_template)
    return Why(kept, old, new, cause, detail)


def _likely(
    rest: str, following: str, before: Sequence[Mapping[str, Any]] | None, now: Sequence[Mapping[str, Any]],
    *, other_template: bool,
) -> tuple[Cause, str]:  # fmt: skip
    if before is not None:
        changed = next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), None)
        if changed is not None:
            return "edited", f"{_WORDS['edited']}: message {changed} ({before[changed].get('role')}) is another one"
        if len(now) < len(before):
            return "edited", f"{_WORDS['edited']}: {len(before)} messages were saved, {len(now)} are given"
    if other_template:
        return "template", "the chat template is another one than that of the saved conversation"
    if _thought(rest, following):
        return "thinking", _WORDS["thinking"]
    if rest and (following.startswith(rest) or rest.startswith(following[:_AROUND])):
        return "tokenisation", _WORDS["tokenisation"]
    if before is None:
        return "edited", "what is saved is not this conversation under the chat template"
    return "template", _WORDS["template"]


def _thought(rest: str, following: str) -> bool:
    """Tell whether the saved text opens a thought, or is in one, and what is given has none there, or an empty one."""
    opens, given = _THOUGHT.search(rest), _THOUGHT.search(following)
    closes, others = _THOUGHT_ENDS.search(rest), _THOUGHT_ENDS.search(following)
    if closes is not None and (opens is None or closes.start() < opens.start()):
        return others is None or not following[: others.start()].strip()
    return opens is not None and opens.start() < _NEAR and (given is None or given.start() > opens.start())


def limited(why: Why | None, asked: int, reach: Reach | None, n_tokens: int) -> Why | None:
    """Return why with what the layers add to it: a cut was `asked` for, and `n_tokens` could be kept."""
    if n_tokens >= asked:
        return why
    told = "; ".join(reach.limits) if reach is not None and reach.limits else "no state is stored there"
    detail = f"{_WORDS['layer']}, only at {n_tokens} tokens: {told}"
    if why is None:
        return Why(asked, "", "", "layer", detail)
    return replace(why, detail=f"{why.detail}; {detail}")

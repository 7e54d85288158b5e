"""What a file is, for a page: overview, sizes, turns and text. From its summary and its commits, not its tensors."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from kvsnap.inspection.described import Summary
from kvsnap.layout import Snapshot
from kvsnap.plots import Bars, Timeline, TurnBar
from kvsnap.reports.escaping import visible
from kvsnap.reports.page import Block, Card, Facts, Figure, Listing, Note, Quote, Text, Tiles
from kvsnap.reports.words import count, size, unit_of, when
from kvsnap.results import Table
from kvsnap.session import Turn

__all__ = ["fidelity_of", "overview", "overview_table", "sizes", "text_of_chat", "turns_of"]

_TURNS = 60
"""Turns that are drawn: the last ones of a longer history."""
_EXCERPT = 1200
"""Characters of a text that are shown from each end."""
_MESSAGES = 12


def fidelity_of(summary: Summary) -> str:
    """Return how true the stored values are, in words."""
    if summary.exact:
        return "exact"
    return "off by an unknown amount" if math.isinf(summary.bound) else f"off by up to {summary.bound:.3g}"


def _fidelity_tile(summary: Summary) -> tuple[str, str]:
    if summary.exact:
        return "exact", "every value as the engine held it"
    return ("?" if math.isinf(summary.bound) else f"≤ {summary.bound:.3g}"), "off, at the most, of a value"


def overview(summary: Summary, *, with_text: bool) -> Card:
    """Return what the file is."""
    per_token = sum(layer.bytes_per_token for layer in summary.layers if layer.kind != "none")
    tiles = Tiles((
        (f"{summary.n_tokens:,}", "tokens"),
        (size(summary.file_bytes), "file"),
        (size(summary.tensor_bytes), "cache, decoded"),
        (size(per_token), "for each token more"),
        (count(summary.num_layers, "layer"), f"of {summary.architecture or 'an unknown model'}"),
        (*_fidelity_tile(summary),),
    ))  # fmt: skip
    blocks: list[Block] = [tiles]
    blocks += [Note(visible(text), bad=True) for text in summary.damage]
    begins = summary.begins if with_text else ""
    ends = summary.ends if with_text and summary.ends != begins else ""
    title = summary.metadata.get("title", "") if with_text else ""
    facts = [
        ("titled", title), ("begins", begins), ("ends", ends), ("format", _format(summary)),
        ("tokens", _tokens(summary)), ("turns", _turn_words(summary)), ("forked from", _fork(summary)),
        ("forks", _forks(summary)),
        ("geometry", "; ".join(group.text for group in summary.groups)), ("model", _identity(summary)),
        ("stored beside", _beside(summary)), ("sampler", _sampler(summary)),
        ("saved", when(summary.committed_ns or summary.created_ns)), ("shard", str(summary.shard or "")),
        ("dropped", f"{size(summary.dropped)} behind the last published turn" if summary.dropped else ""),
        ("notes", "; ".join(summary.notes)),
    ]  # fmt: skip
    blocks.append(Facts(tuple((name, visible(text)) for name, text in facts if text)))
    blocks.append(Text("Told by the index and the tables of the file; kvsnap verify checks every byte.", quiet=True))
    return Card("What it is", tuple(blocks))


def _format(summary: Summary) -> str:
    words = [summary.format, summary.version, summary.dialect, summary.use, "sealed" if summary.sealed else "",
             f"encrypted with {summary.encryption}" if summary.encryption else ""]  # fmt: skip
    return ", ".join(word for word in words if word)


def _tokens(summary: Summary) -> str:
    pending = f", {summary.n_pending:,} not evaluated yet" if summary.n_pending else ""
    return (
        f"{summary.n_prompt:,} of prompts, {summary.n_generated:,} generated{pending}; "
        f"{count(summary.n_rows, 'row')} evaluated"
    )


def _turn_words(summary: Summary) -> str:
    turns = summary.turns
    if turns is None:
        return "" if summary.complete else "the last one was cut off"
    told = f"{turns.n_complete:,} complete, {turns.n_cut_off:,} cut off"
    told += f", {turns.n_on_the_way:,} parts published on the way" if turns.n_on_the_way else ""
    return told + (f", {turns.n_dropped:,} given up since" if turns.n_dropped else "")


def _fork(summary: Summary) -> str:
    fork = summary.fork
    if fork is None:
        return ""
    there = "" if fork.found else f"; it is missing: {fork.reason}"
    names = summary.library.parent_names if summary.library is not None else ()
    parent = ", ".join(f"@{name}" for name in names) or fork.parent
    return f"{parent} at commit {fork.commit}, {count(fork.n_tokens, 'token')} of it{there}"


def _forks(summary: Summary) -> str:
    here = summary.library
    if here is None or not here.n_forks:
        return ""
    return f"{here.n_forks:,}: {', '.join(f'@{name}' for name in here.fork_names) or 'without a name'}"


def _identity(summary: Summary) -> str:
    identity = summary.identity
    name = os.path.basename(summary.metadata.get("model", "").rstrip("/"))
    words = [
        name,
        identity.architecture,
        identity.engine,
        f"{count(len(identity.weights), 'weight')} digested" if identity.weights else "",
    ]
    told = ", ".join(word for word in words if word)
    unknown = "" if identity.weights else "not known: a restore cannot tell whether the model is the right one"
    return "; ".join(word for word in (told, unknown) if word)


def _beside(summary: Summary) -> str:
    words = [
        "logits" if summary.has_logits else "", "text" if summary.has_text else "",
        "" if summary.n_messages is None else count(summary.n_messages, "message"),
        f"a draft of {size(summary.draft_bytes)}" if summary.draft_bytes else "",
    ]  # fmt: skip
    return ", ".join(word for word in words if word)


def _sampler(summary: Summary) -> str:
    if summary.sampler is None:
        return ""
    settings = summary.sampler.settings
    return "greedy" if settings.greedy else ", ".join(
        f"{name} {getattr(settings, name)}" for name in settings.__dataclass_fields__ if getattr(settings, name)
    )  # fmt: skip


def overview_table(summaries: Sequence[tuple[str, Summary]]) -> Table:
    """Return several files side by side."""
    columns = ("file", "format", "model", "layers", "tokens", "file_bytes", "cache_bytes", "encodings", "fidelity")
    rows = tuple(
        (name, s.format, s.architecture, s.num_layers, s.n_tokens, s.file_bytes, s.tensor_bytes,
         ", ".join(s.stored), fidelity_of(s)) for name, s in summaries
    )  # fmt: skip
    return Table("Files", columns, rows)


def sizes(summary: Summary) -> Card | None:
    """Return what the layers take by kind and by encoding."""
    if not summary.stored or not summary.tensor_bytes:
        return None
    bars = {}
    scale, unit = unit_of(max(stored.stored for stored in summary.stored.values()))
    for name, stored in summary.stored.items():
        known = "without a known bound" if math.isinf(stored.bound) else f"bound {stored.bound:.3g}"
        bound = known if stored.bound else "exact"
        bars[visible(name)] = (
            stored.stored / scale,
            f"{size(stored.stored)}, decoded {size(stored.decoded)}, {bound}",
        )
    blocks: list[Block] = [
        Figure("sizes", Bars("Stored bytes by encoding", unit, bars, tuple(1 + i % 3 for i in range(len(bars)))))
    ]
    rows = tuple(
        (visible(g.text), len(g.layers), g.bytes_per_token, g.state_bytes, g.decoded, g.stored) for g in summary.groups
    )
    if rows:
        columns = ("layers that are alike", "layers", "bytes_per_token", "state_bytes", "decoded_bytes", "stored_bytes")
        blocks.append(Listing(Table("By kind of layer", columns, rows)))
    return Card("Sizes", tuple(blocks))


def turns_of(turns: Sequence[Turn]) -> Card | None:
    """Return the history of a session: each commit, with what it added or took away."""
    if not turns:
        return None
    bars, before = [], 0
    previous = None
    for turn in turns:
        change = turn.n_tokens - before
        written = turn.offset - previous.offset if previous is not None else turn.offset
        words = [f"{change:+,} tokens", size(max(0, written)), "" if turn.complete else "not complete"]
        bars.append(TurnBar(
            name=str(turn.commit), before=before, after=turn.n_tokens, what=turn.operation, complete=turn.complete,
            text=visible(", ".join(word for word in words if word)),
        ))  # fmt: skip
        before, previous = turn.n_tokens, turn
    shown = bars[-_TURNS:]
    left = len(bars) - len(shown)
    text = (
        "A bar reaches from the tokens before a commit to those after it. Blue: the answer is complete. Orange: it was "
        "cut off, or published before its end. Hatched red, to the left: the history was taken back."
    )
    said = f"{count(len(turns), 'commit')} from {when(turns[0].time_ns)} to {when(turns[-1].time_ns)}."
    if left:
        said += f" The last {len(shown)} are drawn; {left:,} earlier ones are left out."
    return Card("Turns", (Text(said), Figure("turns", Timeline(title="Turns", turns=tuple(shown)), text)))


def text_of_chat(snapshot: Snapshot) -> Card | None:
    """Return the messages, or else the text, cut in the middle."""
    blocks: list[Block] = []
    if snapshot.messages:
        shown = snapshot.messages
        left = max(0, len(shown) - _MESSAGES)
        half = _MESSAGES // 2
        picked = list(shown) if not left else [*shown[:half], None, *shown[-half:]]
        for message in picked:
            if message is None:
                blocks.append(Text(f"{left:,} messages are left out here.", quiet=True))
            else:
                role = str(message.get("role", ""))
                blocks += [Text(f"{role}:", quiet=True), Quote(_cut(_content(message)), f"message of {role}")]
        return Card("Messages", tuple(blocks))
    if snapshot.text:
        return Card("Text", (Quote(_cut(snapshot.text), "the text of the tokens"),))
    return None


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)


def _cut(text: str) -> str:
    if len(text) <= 2 * _EXCERPT:
        return text
    return f"{text[:_EXCERPT]}\n\n… {len(text) - 2 * _EXCERPT:,} characters left out …\n\n{text[-_EXCERPT:]}"

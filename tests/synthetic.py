"""Synthetic snapshots without a model: what a row holds follows from its token, its place and its tensor."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from kvsnap.identity import AdapterDigest, Identity, WeightDigest
from kvsnap.layout import (
    Layer,
    PositionRun,
    RandomState,
    Run,
    Sampler,
    SamplerState,
    Snapshot,
    Tensor,
    TensorSpec,
    join_runs,
    numpy_dtype,
)

DATA = Path(__file__).parent / "data"
IDENTITY = Identity(
    architecture="synthetic",
    config=(("num_layers", "2"), ("rope_theta", "10000.0")),
    weights=(
        WeightDigest("model.embed.weight", "float32", (8, 4), "0" * 32),
        WeightDigest("model.layers.0.self_attn.q_proj.weight", "float32", (4, 4), "1" * 32),
    ),
    cache_dtype="float32",
    quantisation="none",
    tokenizer="ab" * 16,
    adapters=(AdapterDigest("style", "cd" * 16, "0.5"),),
    chat_template="ef" * 16,
    engine="synthetic",
    runtime=(("threads", "1"),),
)


def rows(
    tokens: Sequence[int], start: int, stop: int, key: int, heads: int, dim: int, dtype: str
) -> np.ndarray[Any, Any]:
    """Values `[heads, stop - start, dim]` in [-1, 1) of the rows `[start, stop)`, a function of token, row, `key`."""
    ids = np.asarray(tokens[start:stop], np.uint64)
    place = np.arange(start, stop, dtype=np.uint64)
    row = ids * np.uint64(0x9E3779B1) + place * np.uint64(0x85EBCA77) + np.uint64(key * 0xC2B2AE3D)
    cell = np.arange(heads * dim, dtype=np.uint64).reshape(heads, 1, dim) * np.uint64(0x27D4EB2F)
    mixed = row[None, :, None] ^ cell
    mixed = mixed * np.uint64(0xD6E8FEB86659FD93)
    mixed ^= mixed >> np.uint64(32)
    return ((mixed & np.uint64(0xFFFF)).astype(np.float64) / 32768 - 1).astype(numpy_dtype(dtype))


def spec(number: int, layer: int, role: str, heads: int, dim: int, dtype: str, **fields: Any) -> TensorSpec:
    values: dict[str, Any] = {
        "id": number, "name": f"layer{layer}.{role}", "layer": layer, "role": role, "dtype": dtype,
        "axes": ("head", "row", "dim"), "shape": (heads, 0, dim), "growth": "grow", "row_axis": 1, "rope": "after",
        "pairing": "half",
    } | fields  # fmt: skip
    return TensorSpec(**values)


def logits_of(tokens: Sequence[int], n_rows: int, vocab: int, dtype: str = "float32") -> Tensor:
    description = TensorSpec(
        id=2**20, name="logits", layer=-1, role="logits", dtype=dtype, axes=("vocab",), shape=(vocab,),
        growth="replaced", rope="none",
    )  # fmt: skip
    last = [*tokens[: n_rows - 1 or None], 0]
    return Tensor(description, rows(last[-1:] * n_rows, n_rows - 1, n_rows, 99, 1, vocab, dtype).reshape(vocab))


def snapshot(
    tokens: Sequence[int],
    *,
    start: int = 0,
    n_pending: int = 0,
    layers: int = 1,
    heads: int = 2,
    dim: int = 4,
    dtype: str = "float32",
    vocab: int = 8,
    n_prompt: int | None = None,
    recurrent: bool = False,
    **fields: Any,
) -> Snapshot:
    """A snapshot of these tokens, the last `n_pending` not evaluated, holding the rows from `start` on."""
    n_rows = len(tokens) - n_pending
    n_prompt = len(tokens) if n_prompt is None else min(n_prompt, len(tokens))
    made = []
    for i in range(layers):
        tensors = [
            Tensor(
                spec(2 * i + j, i, role, heads, dim, dtype),
                rows(tokens, start, n_rows, 2 * i + j, heads, dim, dtype),
                start=start,
            )
            for j, role in enumerate("kv")
        ]
        if recurrent:
            state = spec(1000 + i, i, "recurrent", heads, dim, dtype, axes=("head", "dim"), shape=(heads, dim),
                         growth="replaced", row_axis=-1, rope="none", pairing="")  # fmt: skip
            last = rows([*tokens, 1], max(n_rows - 1, 0), max(n_rows, 1), 50 + i, heads, dim, dtype)
            tensors.append(Tensor(state, last.reshape(heads, dim)))
        made.append(Layer(index=i, kind="attention", tensors=tuple(tensors), num_query_heads=2 * heads))
    values: dict[str, Any] = {
        "architecture": "synthetic",
        "layers": tuple(made),
        "tokens": tuple(tokens),
        "runs": join_runs((), (Run("prompt", n_prompt), Run("generated", len(tokens) - n_prompt))),
        "n_rows": n_rows,
        "row_start": start,
        "n_pending": n_pending,
        "token_offset": n_rows,
        "positions": (PositionRun(0, n_rows),) if n_rows else (),
        "logits": logits_of(tokens, n_rows, vocab) if vocab and n_rows else None,
        "identity": IDENTITY,
    }
    return Snapshot(**(values | fields))


def layer_of(kind: str, i: int, tokens: Sequence[int], n_rows: int, start: int, *, every_row: bool = False) -> Layer:
    """A layer of one kind as an engine holds it after `n_rows` rows, with the rows from `start` on.

    `grow`; `grow4`: one row for 4 positions; `window8`: the last 7 rows (unless `every_row`); `recurrent`: a state;
    `buffer`: what is left of the last group of 4, a state whose length changes; `static`: 3 rows of another sequence.
    Several are joined by `+`.
    """
    tensors = []
    for j, name in enumerate(kind.split("+")):
        key, size = 8 * i + 2 * j, int(name.lstrip("abcdefghijklmnopqrstuvwxyz") or 0)
        fields: dict[str, Any] = {"name": f"layers.{i}.{name}"}
        if name.startswith(("grow", "window")):
            per_row = max(1, size) if name.startswith("grow") else 1
            first = start // per_row
            if name.startswith("window"):
                fields |= {"growth": "window", "window": size}
                first = start if every_row or not size else max(start, n_rows - (size - 1))
            fields |= {"tokens_per_row": per_row}
            for more, role in enumerate("kv"):
                values = rows(tokens, 0, n_rows, key + more, 2, 3, "float32")[:, per_row - 1 :: per_row]
                fields["name"] = f"layers.{i}.{name}.{role}"
                made = spec(key + more, i, role, 2, 3, "float32", **fields)
                tensors.append(Tensor(made, values[:, first:].copy(), start=first))
            continue
        if name == "static":
            values, role = rows((7, 8, 9), 0, 3, key, 2, 3, "float32"), "cross_k"
        else:
            length = n_rows % 4 if name == "buffer" else 1
            role = "residual" if name == "buffer" else "recurrent"
            values = rows([*tokens, 1], n_rows - length, n_rows, key, 2, 3, "float32") if n_rows else np.zeros(
                (2, length, 3), np.float32
            )  # fmt: skip
        fields |= {"growth": "static" if name == "static" else "replaced", "rope": "none", "pairing": ""}
        if name == "recurrent":
            fields |= {"axes": ("head", "dim"), "shape": (2, 3), "row_axis": -1}
            values = values.reshape(2, 3)
        tensors.append(Tensor(spec(key, i, role, 2, 3, "float32", **fields), values))
    return Layer(index=i, kind="attention", tensors=tuple(tensors), num_query_heads=4)


def snapshot_of_kinds(
    tokens: Sequence[int], kinds: Sequence[str], *, start: int = 0, n_pending: int = 0, **fields: Any
) -> Snapshot:
    """A snapshot with a layer of each kind (see `layer_of`), otherwise as `snapshot`."""
    n_rows = len(tokens) - n_pending
    made = snapshot(tokens, start=start, n_pending=n_pending, layers=0, **fields)
    layers = tuple(layer_of(kind, i, tokens, n_rows, start) for i, kind in enumerate(kinds))
    return replace(made, layers=layers)


def same(a: Snapshot, b: Snapshot) -> list[str]:
    """Return what differs between two snapshots, bit by bit; empty when nothing does."""
    names = [
        "architecture", "tokens", "runs", "n_rows", "n_pending", "token_offset", "positions", "sampler", "identity",
        "text", "messages", "metadata",
    ]  # fmt: skip
    found = [name for name in names if getattr(a, name) != getattr(b, name)]
    left = [*a.tensors(), *([a.logits] if a.logits else [])]
    right = [*b.tensors(), *([b.logits] if b.logits else [])]
    if [(t.spec, t.start, t.n_rows) for t in left] != [(t.spec, t.start, t.n_rows) for t in right]:
        return [*found, "tensors"]
    for s, t in zip(left, right, strict=True):
        if s.array.tobytes() != t.array.tobytes() or s.bound != t.bound:
            found.append(s.name)
    if [(x.index, x.kind, x.num_query_heads, x.shares) for x in a.layers] != [
        (x.index, x.kind, x.num_query_heads, x.shares) for x in b.layers
    ]:
        found.append("layers")
    return found


SAMPLER = SamplerState(
    Sampler(repetition_penalty=1.25, temperature=0.75, top_k=40, top_p=0.9375, min_p=0.0625, seed=7), RandomState(7, 3)
)


def tiny() -> Snapshot:
    """The content of data/tiny.kvsnap."""
    return snapshot(
        (11, 12, 13, 14, 15, 16), n_pending=1, layers=2, n_prompt=4, sampler=SAMPLER, text="a small\nexample",
        metadata={"title": "tiny", "note": "made by tests/synthetic.py"},
        positions=(PositionRun(0, 3), PositionRun(7, 2)), token_offset=9,
    )  # fmt: skip


def fixed() -> ExitStack:
    """A context in which file ids, salts and times are always the same."""
    stack = ExitStack()
    stack.enter_context(mock.patch.object(os, "urandom", lambda n: bytes(range(1, n + 1))))
    stack.enter_context(mock.patch.object(time, "time_ns", return_value=1_700_000_000_000_000_000))
    return stack


def counted() -> ExitStack:
    """As `fixed`, but no two random bytes strings are the same: what is encrypted twice needs two nonces."""
    stack, drawn = fixed(), itertools.count()

    def urandom(n: int) -> bytes:
        return hashlib.shake_256(str(next(drawn)).encode()).digest(n)

    stack.enter_context(mock.patch.object(os, "urandom", urandom))
    return stack


KEY = bytes(range(32))


def tiny_encrypted_bytes() -> bytes:
    """The bytes of data/tiny_encrypted.kvsnap."""
    from kvsnap.formats.native import Lock, dumps

    with counted():
        return dumps(tiny(), lock=Lock(KEY, label="bytes 0 to 31"))


def tiny_bytes() -> bytes:
    """The bytes of data/tiny.kvsnap."""
    from kvsnap.formats.native import dumps

    with fixed():
        return dumps(tiny())


def tiny_content() -> dict[str, Any]:
    """What data/tiny.json says: values as hex, so that nothing is rounded."""
    made = tiny()
    assert made.logits is not None
    return {
        "architecture": made.architecture,
        "ids": list(made.tokens),
        "kinds": [0, 0, 0, 0, 1, 1],
        "positions": [0, 1, 2, 7, 8],
        "n_rows": made.n_rows,
        "n_pending": made.n_pending,
        "token_offset": made.token_offset,
        "text": made.text,
        "metadata": dict(made.metadata),
        "tensors": {
            t.name: {"dtype": t.spec.dtype, "shape": list(t.shape), "hex": t.array.tobytes().hex()}
            for t in made.tensors()
        },
        "logits": made.logits.array.tobytes().hex(),
        "sampler": {
            "repetition_penalty": 1.25, "temperature": 0.75, "top_k": 40, "top_p": 0.9375, "min_p": 0.0625, "seed": 7,
        },
        "random": {"algorithm": "philox4x64", "seed": 7, "draws": 3},
        "identity": made.identity.to_dict(),
    }  # fmt: skip


def write_session(path: Path) -> None:
    """Make data/tiny_session.kvsnap: two turns, the second one lossy, a cut inside it, and one more turn."""
    from kvsnap.session import Session

    with fixed(), Session.open(path) as session:
        session.append(snapshot((21, 22, 23), n_pending=1, n_prompt=2, text="one", sampler=SAMPLER))
        session.append(snapshot((21, 22, 23, 24, 25, 26), n_pending=1, n_prompt=2), codec="q8")
        session.truncate(5)
        session.append(snapshot((21, 22, 23, 24, 25, 27), start=session.n_rows, n_prompt=2), complete=False)


MESSAGES = (
    {"role": "user", "content": "zwölf?"},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"y": 5, "x": 7.0}}]},
    {"role": "tool", "content": "12"},
)


def write_messages(path: Path) -> None:
    """Make data/tiny_messages.kvsnap: a cut inside a turn, a turn that makes all known, one in the place of its end."""
    from kvsnap.session import Session

    with fixed(), Session.open(path) as session:
        session.append(snapshot((31, 32), messages=MESSAGES[:1]))
        session.append(snapshot((31, 32, 33, 34), messages=MESSAGES[:2]))
        session.truncate(3)
        session.append(snapshot((31, 32, 33, 35, 36), messages=MESSAGES[:2]))
        session.append(snapshot((31, 32, 33, 35, 37, 38), messages=MESSAGES), after=4)


def write_draft(path: Path) -> None:
    """Make data/tiny_draft.kvsnap: a turn with the state of a draft, one without, one with a longer state."""
    from kvsnap.drafts import with_draft
    from kvsnap.session import Session

    draft = {"layers": 2, "heads": 1, "dim": 2}
    with fixed(), Session.open(path) as session:
        session.append(with_draft(snapshot((41, 42, 43)), snapshot((41, 42), **draft)))
        session.append(snapshot((41, 42, 43, 44), start=3))
        session.append(with_draft(snapshot((41, 42, 43, 44, 45), start=4), snapshot((41, 42, 43, 44), **draft)))


def write_golden() -> None:
    """Make the files in data/. Run once; they are never made again."""
    (DATA / "tiny.kvsnap").write_bytes(tiny_bytes())
    (DATA / "tiny_session.kvsnap").unlink(missing_ok=True)
    write_session(DATA / "tiny_session.kvsnap")
    (DATA / "tiny_session.kvsnap").chmod(0o644)
    (DATA / "tiny_messages.kvsnap").unlink(missing_ok=True)
    write_messages(DATA / "tiny_messages.kvsnap")
    (DATA / "tiny_messages.kvsnap").chmod(0o644)
    (DATA / "tiny_draft.kvsnap").unlink(missing_ok=True)
    write_draft(DATA / "tiny_draft.kvsnap")
    (DATA / "tiny_draft.kvsnap").chmod(0o644)
    (DATA / "tiny_encrypted.kvsnap").write_bytes(tiny_encrypted_bytes())
    (DATA / "tiny.json").write_text(json.dumps(tiny_content(), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    write_golden()

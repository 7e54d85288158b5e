"""What two snapshots hold beside vectors: identities, logits, sampler, messages, names of rows, other tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsnap.identity import FieldCheck, compare, describe_weight
from kvsnap.inspection.diff.answers import FieldDifference, LogitsDifference, OtherDifference, Same
from kvsnap.layout import Layer, Snapshot, Tensor
from kvsnap.results import numbers
from kvsnap.runs import common_length

__all__ = ["fields_of", "logits_of", "others_of", "same_model"]

_SHOWN = 80
_BEFORE = 20
"""Characters that are shown before the first one that differs."""
_MODEL = ("architecture", "config", "weights", "adapters", "quantisation")
"""Fields of an identity that tell models apart; the rest tells runs apart."""


# -- identity --------------------------------------------------------------------------------------------------------


def fields_of(a: Snapshot, b: Snapshot) -> tuple[FieldDifference, ...]:
    """Return the fields of both identities; the weights as one, which names how many differ and the first."""
    checks = compare(a.identity, b.identity).fields
    weights = [c for c in checks if c.name.partition(":")[0] == "weights"]
    made, seen = [], False
    for check in checks:
        if check not in weights:
            made.append(FieldDifference(
                name=check.name, verdict=check.verdict, level=check.level, a=check.saved, b=check.found
            ))  # fmt: skip
        elif not seen:
            seen = True
            made.append(_weights(a, b, weights))
    return tuple(made)


def _weights(a: Snapshot, b: Snapshot, checks: Sequence[FieldCheck]) -> FieldDifference:
    counts = [f"{len(side.identity.weights)} tensors" for side in (a, b)]
    first = checks[0]
    if first.verdict == "differ":
        named = next((w.name for w in a.identity.weights if describe_weight(w.name) in first.name), "")
        what = f", {len(checks):,} differ, first {describe_weight(named) if named else first.name}"
        counts = [f"{counts[0]}{what}: {first.saved}", f"{counts[1]}: {first.found}"]
    return FieldDifference(name="weights", verdict=first.verdict, level=first.level, a=counts[0], b=counts[1])


def same_model(fields: Iterable[FieldDifference]) -> bool | None:
    """Tell whether both are of one model: False where a field says otherwise, None where the weights are not known."""
    told = {"weights": "unknown"}
    for field in fields:
        root = field.name.partition(".")[0].partition(":")[0]
        if root in _MODEL:
            if field.verdict == "differ":
                return False
            told[root] = field.verdict
    return True if told["weights"] == "match" else None


# -- logits ----------------------------------------------------------------------------------------------------------


def logits_of(a: Snapshot, b: Snapshot) -> LogitsDifference | None:
    """Compare the stored logits; None where one side has none, or another number of them."""
    if a.logits is None or b.logits is None or a.logits.shape != b.logits.shape or not a.logits.nbytes:
        return None
    left, right = (_wide(t.values().reshape(-1)) for t in (a.logits, b.logits))
    with np.errstate(invalid="ignore"):
        d = np.abs(left - right)
    finite = d[np.isfinite(d)]
    p, q = _log_softmax(left), _log_softmax(right)
    return LogitsDifference(
        n_values=left.size, n_different=_n_different(a.logits, b.logits), kl_ab=_divergence(p, q),
        kl_ba=_divergence(q, p), top1_a=_top(left), top1_b=_top(right), max_abs=float(finite.max(initial=0.0)),
    )  # fmt: skip


def _wide(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    with np.errstate(invalid="ignore"):  # a NaN of any bits is one
        return np.asarray(values, np.float32 if values.dtype.itemsize < 4 else values.dtype).astype(np.float64)


def _n_different(a: Tensor, b: Tensor) -> int:
    left, right = (np.ascontiguousarray(t.values()).reshape(-1) for t in (a, b))
    if left.dtype != right.dtype:
        left, right = _wide(left), _wide(right)
    bits = np.dtype(f"u{left.dtype.itemsize}")
    return int((left.view(bits) != right.view(bits)).sum())


def _log_softmax(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64] | None:
    top = values.max()
    if np.isnan(values).any() or not np.isfinite(top):
        return None
    shifted = values - top
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def _divergence(p: npt.NDArray[np.float64] | None, q: npt.NDArray[np.float64] | None) -> float | None:
    """Return KL(p || q) in nats of log probabilities; infinite where q rules out what p does not."""
    if p is None or q is None:
        return None
    used = p > -np.inf
    return max(0.0, float((np.exp(p[used]) * (p[used] - q[used])).sum()))


def _top(values: npt.NDArray[np.float64]) -> int:
    return int(np.argmax(np.where(np.isnan(values), -np.inf, values)))


# -- the rest --------------------------------------------------------------------------------------------------------


def others_of(a: Snapshot, b: Snapshot, n_rows: int, layers: Sequence[int] | None = None) -> list[OtherDifference]:
    """Compare what is beside keys and values; of rows the first `n_rows`, which have the same input.

    What neither side holds is left out; of what both hold the same there is one entry. Ids and positions are told by
    the alignment.
    """
    made = [
        _values("counts", _counts(a), _counts(b)),
        _values("tokens", *(f"{len(s.tokens)} ids" if s.tokens else None for s in (a, b)))
        if bool(a.tokens) != bool(b.tokens)
        else None,
        _values("runs", [asdict(r) for r in a.runs] or None, [asdict(r) for r in b.runs] or None),
        *_samplers(a, b),
        _values("text", a.text, b.text),
        _values("messages", *(None if s.messages is None else list(s.messages) for s in (a, b))),
        *_metadata(a, b),
        _values("encoder input", *(None if s.encoder_input is None else str(s.encoder_input) for s in (a, b))),
        _tensor("logits", a.logits, b.logits, n_rows),
        _tensor("draft", a.draft, b.draft, n_rows),
        *_layouts(a, b, layers),
        *_tensors(a, b, n_rows, layers),
    ]
    return [one for one in made if one is not None]


def _samplers(a: Snapshot, b: Snapshot) -> Iterator[OtherDifference | None]:
    """Compare settings, and random numbers where either side draws any: under greedy ones they decide nothing."""
    settings = [None if s.sampler is None else asdict(s.sampler.settings) for s in (a, b)]
    if all(s.sampler is None or s.sampler.settings.greedy for s in (a, b)):
        yield _values("sampler", *(told and {k: v for k, v in told.items() if k != "seed"} for told in settings))
        return
    yield _values("sampler", *settings)
    yield _values("random state", *(None if s.sampler is None else asdict(s.sampler.random) for s in (a, b)))


def _counts(s: Snapshot) -> dict[str, int]:
    return {"n_rows": s.n_rows, "n_pending": s.n_pending, "token_offset": s.token_offset, "row_start": s.row_start}


def _values(name: str, a: Any, b: Any) -> OtherDifference | None:
    if a is None and b is None:
        return None
    if a is None or b is None:
        verdict: Same = "only in b" if a is None else "only in a"
    else:
        verdict = "equal" if a == b else "differ"
    if verdict == "equal":
        return OtherDifference(name=name, verdict=verdict)
    if isinstance(a, dict) and isinstance(b, dict):  # only what differs
        names = [key for key in {**a, **b} if a.get(key) != b.get(key)]
        a, b = ({key: side[key] for key in names if key in side} for side in (a, b))
    texts = [_text(value) for value in (a, b)]
    start = 0 if None in (a, b) or max(map(len, texts)) <= _SHOWN else max(0, common_length(*texts) - _BEFORE)
    return OtherDifference(name=name, verdict=verdict, a=_cut(texts[0], start), b=_cut(texts[1], start))


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _cut(text: str, start: int) -> str:
    """Return a text from a character on, which is where two of them begin to differ or a little before."""
    told = f"...{text[start:]}" if start else text
    return told if len(told) <= _SHOWN else f"{told[: _SHOWN - 3]}..."


def _metadata(a: Snapshot, b: Snapshot) -> Iterator[OtherDifference | None]:
    if a.metadata and dict(a.metadata) == dict(b.metadata):
        yield OtherDifference(name="metadata", verdict="equal")
        return
    for name in {**a.metadata, **b.metadata}:
        yield _values(f"metadata {name}", a.metadata.get(name), b.metadata.get(name))


def _tensor(name: str, a: Tensor | None, b: Tensor | None, n_rows: int) -> OtherDifference | None:
    """Compare two tensors by their bits; of what grows the rows that both hold, as far as their input is the same."""
    if a is None or b is None:
        return _values(name, *(None if t is None else f"{t.spec.dtype}{list(t.shape)}" for t in (a, b)))
    if a.spec.grows and b.spec.grows and a.spec.tokens_per_row == b.spec.tokens_per_row:
        start = max(a.start, b.start)
        stop = min(a.start + a.n_rows, b.start + b.n_rows, n_rows // a.spec.tokens_per_row)
        if start >= stop:
            return None
        a, b = a.rows(start, stop), b.rows(start, stop)
    shapes = [f"{t.spec.dtype}{list(t.shape)}" for t in (a, b)]
    if shapes[0] != shapes[1]:
        return OtherDifference(name=name, verdict="differ", a=shapes[0], b=shapes[1])
    count = _n_different(a, b)
    if not count:
        return OtherDifference(name=name, verdict="equal")
    return OtherDifference(name=name, verdict="differ", a=f"{count:,} of {a.values().size:,} values differ", b="")


_HELD = ("positions", "code", "scale", "residual", "zero", "other", "overlap")


def _pairs(a: Snapshot, b: Snapshot, layers: Sequence[int] | None) -> Iterator[tuple[Layer, Layer]]:
    right = {layer.index: layer for layer in b.layers}
    for layer in a.layers:
        if layer.index in right and (layers is None or layer.index in layers):
            yield layer, right[layer.index]


def _tensors(a: Snapshot, b: Snapshot, n_rows: int, layers: Sequence[int] | None) -> Iterator[OtherDifference]:
    """Compare the tensors of layers that are no vectors of tokens, those of one role together."""
    found: dict[str, dict[str, list[int]]] = {}
    for left, right in _pairs(a, b, layers):
        if left.quantisation != right.quantisation:
            continue  # told as how the layers are kept; the keys and values that codes stand for are compared
        sides = [{t.name: t for t in layer.tensors if _is_held(t)} for layer in (left, right)]
        if len(sides[0]) == len(sides[1]) and set(sides[0]) != set(sides[1]):  # other names of the same
            sides = [{f"{t.role} {i}": t for i, t in enumerate(side.values())} for side in sides]
        for name in {**sides[0], **sides[1]}:
            one, other = sides[0].get(name), sides[1].get(name)
            told = _tensor(name, one, other, n_rows)
            role = (one or other or left.tensors[0]).role
            if told is not None:
                found.setdefault(role, {}).setdefault(told.verdict, []).append(left.index)
    for role, verdicts in found.items():
        differing: Mapping[str, list[int]] = {v: where for v, where in verdicts.items() if v != "equal"}
        for verdict, where in (differing or verdicts).items():
            told_a = f"layers {numbers(where)}" if verdict != "equal" else ""
            yield OtherDifference(
                name=f"{role} tensors",
                verdict=verdict,  # type: ignore[arg-type] # the keys are verdicts
                a=told_a,
                of_cache=True,
            )


def _is_held(tensor: Tensor) -> bool:
    return tensor.role in _HELD or tensor.spec.dtype in ("bool", "uint8") or "int" in tensor.spec.dtype


def _layouts(a: Snapshot, b: Snapshot, layers: Sequence[int] | None) -> Iterator[OtherDifference | None]:
    """Compare how layers are kept: kind, dtype, codes, window, rotation. What one side does not know is `unknown`."""
    names = ("kind", "shares", "quantisation", "num_query_heads", "dtype", "window", "rope", "pairing")
    found: dict[tuple[str, str, str], list[int]] = {}
    for left, right in _pairs(a, b, layers):
        sides = [_layout(layer) for layer in (left, right)]
        for name in names:
            values = sides[0][name], sides[1][name]
            if values[0] != values[1]:
                found.setdefault((name, *values), []).append(left.index)
    for (name, one, other), where in found.items():
        unknown = name in ("rope", "pairing", "num_query_heads") and "unknown" in (one, other)
        yield OtherDifference(
            name=f"{name} of layers {numbers(where)}", verdict="unknown" if unknown else "differ", a=one, b=other,
            of_cache=True,
        )  # fmt: skip


def _layout(layer: Layer) -> dict[str, str]:
    keys = layer.tensor("k") or layer.tensor("latent") or layer.tensor("residual")
    spec = None if keys is None else keys.spec
    return {
        "kind": layer.kind,
        "shares": "none" if layer.shares is None else str(layer.shares),
        "quantisation": layer.quantisation or "none",
        "num_query_heads": str(layer.num_query_heads or "unknown"),
        "dtype": "none" if spec is None else spec.dtype,
        "window": "none" if spec is None or not spec.window else str(spec.window),
        "rope": "unknown" if spec is None else spec.rope,
        "pairing": ("unknown" if spec is None else spec.pairing) or "unknown",
    }

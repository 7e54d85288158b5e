"""Identity: all that must match for a cache to be usable, and how two identities compare.

A cache is only meaningful for the weights, the configuration, the tokenizer and the adapters that produced it. Each
field compares to *match*, *differ* or *unknown* (foreign files know little). docs/identity.md lists the fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvsnap.errors import CompatibilityError, ContextError, FormatError, InputError

__all__ = [
    "AdapterDigest", "Compatibility", "FieldCheck", "Identity", "WeightDigest", "compare", "describe_weight",
    "flatten_config", "quantisation_text",
]  # fmt: skip

Verdict = Literal["match", "differ", "unknown"]
Level = Literal["fatal", "exactness", "advice"]

_LAYER = re.compile(r"^(?:(.*)\.)?(?:layers|h|blocks|block|layer)\.(\d+)\.(.+)$")
# Parts of a name that stand around every layer and tell none from another.
_AROUND = frozenset({"model", "transformer", "language_model", "gpt_neox", "backbone"})
_SHOWN = 80
_ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class WeightDigest:
    """One parameter or buffer as loaded: its name, dtype name, shape and XXH3-128 of its little-endian bytes (hex)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} {self.digest[:12]}"


@dataclass(frozen=True, slots=True)
class AdapterDigest:
    """One adapter: its name, XXH3-128 over its tensors and settings (hex) and its scale as text.

    The name is told and decides nothing: the same bytes under another name are the same adapter.
    """

    name: str
    digest: str
    scale: str

    def __str__(self) -> str:
        return f"{self.name} {self.digest[:12]} x{self.scale}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a cache was computed with. An empty value means *unknown*.

    `config` and `runtime` are sorted pairs of dotted name and canonical JSON text. `runtime` (engine version,
    attention kernel, device, threads) does not decide whether a cache is usable, only whether
    bits are promised to agree. `quantisation` is of the weights, `cache_quantisation` of the cache: "none", or
    canonical JSON (`quantisation_text`). `adapters` stand in the order in which they are applied.
    """

    architecture: str = ""
    config: tuple[tuple[str, str], ...] = ()
    weights: tuple[WeightDigest, ...] = ()
    cache_dtype: str = ""
    quantisation: str = ""
    cache_quantisation: str = ""
    tokenizer: str = ""
    adapters: tuple[AdapterDigest, ...] | None = None
    chat_template: str = ""
    engine: str = ""
    runtime: tuple[tuple[str, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data, the schema of docs/spec/file.md section 5."""
        return {
            "architecture": self.architecture,
            "config": dict(self.config),
            "weights": [[w.name, w.dtype, list(w.shape), w.digest] for w in self.weights],
            "cache_dtype": self.cache_dtype,
            "quantisation": self.quantisation,
            # Newer than the first files: left out where it is unknown, so that those are written as ever.
            **({"cache_quantisation": self.cache_quantisation} if self.cache_quantisation else {}),
            "tokenizer": self.tokenizer,
            "adapters": None if self.adapters is None else [[a.name, a.digest, a.scale] for a in self.adapters],
            "chat_template": self.chat_template,
            "engine": self.engine,
            "runtime": dict(self.runtime),
        }

    @staticmethod
    def from_dict(data: object) -> Identity:
        """Parse what `to_dict` made. Raise `FormatError` naming the first field that has another type."""
        table = _typed(data, dict, "identity")
        weights = []
        for row in _typed(table.get("weights", []), list, "weights"):
            name, dtype, shape, digest = _row(row, 4, "weights")
            dims = tuple(_typed(d, int, "weights shape") for d in _typed(shape, list, "weights shape"))
            name, dtype, digest = (_typed(value, str, "weights") for value in (name, dtype, digest))
            weights.append(WeightDigest(name, dtype, dims, digest))
        adapters: tuple[AdapterDigest, ...] | None = None
        if table.get("adapters") is not None:
            rows = [_row(row, 3, "adapters") for row in _typed(table["adapters"], list, "adapters")]
            adapters = tuple(AdapterDigest(*(_typed(v, str, "adapters") for v in row)) for row in rows)
        text = {
            name: _typed(table.get(name, ""), str, name)
            for name in (
                "architecture", "cache_dtype", "quantisation", "cache_quantisation", "tokenizer", "chat_template",
                "engine",
            )
        }  # fmt: skip
        return Identity(
            config=_pairs(table.get("config", {}), "config"),
            weights=tuple(weights),
            adapters=adapters,
            runtime=_pairs(table.get("runtime", {}), "runtime"),
            **text,
        )


def _typed(value: Any, kind: type, field: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise FormatError(
            f"identity field {field!r} has the wrong type", expected=kind.__name__, found=type(value).__name__
        )
    return value


def _row(value: Any, length: int, field: str) -> list[Any]:
    row: list[Any] = _typed(value, list, field)
    if len(row) != length:
        raise FormatError(f"identity field {field!r} has a row of the wrong length", expected=length, found=len(row))
    return row


def _pairs(value: Any, field: str) -> tuple[tuple[str, str], ...]:
    table = _typed(value, dict, field)
    return tuple(sorted((str(k), _typed(v, str, field)) for k, v in table.items()))


def flatten_config(config: Mapping[str, Any], skip: Iterable[str] = ()) -> tuple[tuple[str, str], ...]:
    """Flatten nested settings into sorted (dotted name, canonical JSON) pairs, leaving out the names in `skip`."""
    omitted = frozenset(skip)
    pairs: dict[str, str] = {}

    def visit(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for key, inner in value.items():
                if str(key) not in omitted:
                    visit(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            pairs[prefix] = json.dumps(value, sort_keys=True, default=str)

    visit("", config)
    return tuple(sorted(pairs.items()))


def quantisation_text(settings: Mapping[str, Any] | None) -> str:
    """Return how something is quantised as the text of an identity: canonical JSON, or `none`.

    For a cache the settings are `kind` (the backend), `bits`, `group`, `axis_key`, `axis_value`, `residual`, and
    whatever else decides the codes: `rotation`, `seed`.
    """
    return "none" if settings is None else json.dumps(settings, sort_keys=True, separators=(",", ":"), default=str)


def describe_weight(name: str) -> str:
    """Shorten a parameter name for people: `model.layers.0.self_attn.q_proj.weight` becomes `layer 0 q_proj`."""
    found = _LAYER.search(name)
    if found is None:
        return name.removesuffix(".weight").removeprefix("model.")
    around = [part for part in (found[1] or "").split(".") if part and part not in _AROUND]
    inner = found[3].removesuffix(".weight")
    # The part of the layer that a projection belongs to says nothing more; deeper names are kept.
    shown = inner if inner.endswith("bias") else inner.partition(".")[2] or inner
    return " ".join([*around, "layer", found[2], shown])


@dataclass(frozen=True, slots=True)
class FieldCheck:
    """One compared field: its name, the verdict, what it decides (`level`), and both values as short text."""

    name: str
    verdict: Verdict
    level: Level
    saved: str
    found: str

    def __str__(self) -> str:
        if self.verdict == "match":
            return f"{self.name}: match"
        if self.verdict == "unknown":
            return f"{self.name}: unknown (saved {self.saved or 'unknown'}, found {self.found or 'unknown'})"
        field, _, part = self.name.partition(": ")
        return f"{field} differ: {part + ', ' if part else ''}saved {self.saved}, found {self.found}"


@dataclass(frozen=True, slots=True)
class Compatibility:
    """The report of `check`: every field with its verdict, and the context rule.

    `needed` is the number of token positions that the snapshot and the draft reserve take, `limit` what the model
    holds (None: not known). `accepted` are the field names that the caller took responsibility for.
    """

    fields: tuple[FieldCheck, ...]
    needed: int = 0
    limit: int | None = None
    accepted: tuple[str, ...] = ()

    def _is_accepted(self, name: str) -> bool:
        # "weights: layer 0 q_proj" is accepted by "weights", "weights.layer 0" and "weights.layer 0 q_proj".
        plain = name.replace(": ", ".", 1)
        return any(plain == a or plain.startswith((f"{a}.", f"{a} ")) for a in self.accepted)

    @property
    def refusals(self) -> tuple[FieldCheck, ...]:
        """The fields that forbid a restore: fatal ones that differ, and unknown weights, unless accepted by name."""
        return tuple(
            f
            for f in self.fields
            if f.level == "fatal"
            and (f.verdict == "differ" or (f.verdict == "unknown" and f.name == "weights"))
            and not self._is_accepted(f.name)
        )

    @property
    def to_accept(self) -> tuple[str, ...]:
        """The field names that `accept=` would have to name for this restore to go ahead."""
        return tuple(dict.fromkeys(f.name.split(":", 1)[0].split(".", 1)[0] for f in self.refusals))

    @property
    def context_fits(self) -> bool:
        return self.limit is None or self.needed <= self.limit

    @property
    def ok(self) -> bool:
        """True when a restore would go ahead."""
        return not self.refusals and self.context_fits

    @property
    def exact(self) -> bool:
        """True when every field that decides bits is known and matches, so that the continuation is bit-identical."""
        if not self.ok or any(f.verdict == "differ" and f.level != "advice" for f in self.fields):
            return False
        return all(f.verdict == "match" for f in self.fields if f.name in _MUST_BE_KNOWN)

    def raise_if_refused(self) -> None:
        """Raise `CompatibilityError` (with this report) or `ContextError` (both numbers) when `ok` is False."""
        bad = self.refusals
        if bad:
            text = "; ".join(str(f) for f in bad[:4]) + (f"; and {len(bad) - 4} more" if len(bad) > 4 else "")
            names = ", ".join(repr(name) for name in self.to_accept)
            raise CompatibilityError(
                f"the snapshot is not for this model: {text}. To take all of it on: accept=[{names}]", report=self
            )
        if not self.context_fits:
            raise ContextError(
                f"the snapshot needs {self.needed} positions, the context of this model holds {self.limit}: cut "
                "it (truncate), or start anew"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {
            "ok": self.ok,
            "exact": self.exact,
            "needed": self.needed,
            "limit": self.limit,
            "accepted": list(self.accepted),
            "fields": [
                {"name": f.name, "verdict": f.verdict, "level": f.level, "saved": f.saved, "found": f.found}
                for f in self.fields
            ],
        }

    def __str__(self) -> str:
        rows = [str(f) for f in self.fields]
        rows.append(f"context: {self.needed} of {'unknown' if self.limit is None else self.limit} positions needed")
        return "\n".join(rows)


_MUST_BE_KNOWN = frozenset({"architecture", "weights", "dtype", "engine"})


def compare(
    saved: Identity,
    found: Identity,
    *,
    accept: Sequence[str] = (),
    needed: int = 0,
    limit: int | None = None,
    shard: str = "",
) -> Compatibility:
    """Compare what a snapshot was made with against what an engine is, field by field.

    `accept` names fields whose difference the caller takes on: `weights`, `dtype`, `adapters`, ..., one setting
    (`config.rope_parameters.factor`, `quantisation.bits`) or some of the weights (`weights.layer 0`). Raise
    `InputError` for a name that is no field. `shard` says which part of a whole was saved; an engine is taken to be for
    the whole.
    """
    fields = [
        *(
            [FieldCheck("shard", "differ", "fatal", shard, "an engine for the whole (join the shards)")]
            if shard
            else []
        ),
        # What explains most comes first: another dtype or configuration changes the digest of every weight too.
        _text("architecture", saved.architecture, found.architecture),
        _text("dtype", saved.cache_dtype, found.cache_dtype),
        *_config(saved, found),
        *_quantisation("quantisation", saved.quantisation, found.quantisation),
        *_quantisation("cache_quantisation", saved.cache_quantisation, found.cache_quantisation),
        _text("tokenizer", saved.tokenizer, found.tokenizer),
        _adapters(saved, found),
        _text("engine", saved.engine, found.engine),
        *_weights(saved, found),
        *(_text(f"runtime.{n}", a, b, "exactness") for n, a, b in _joined(saved.runtime, found.runtime)),
        _text("chat_template", saved.chat_template, found.chat_template, "advice"),
    ]
    roots = {"config", "runtime", "shard"} | {f.name.split(":", 1)[0].split(".", 1)[0] for f in fields}
    names = roots | {f.name for f in fields}
    for name in accept:
        if name not in names and not name.startswith(("config.", "weights.", "quantisation.", "cache_quantisation.")):
            raise InputError(
                f"accept names {name!r}, which is no field of an identity",
                expected=f"one of {', '.join(sorted(roots))}",
            )
    return Compatibility(tuple(fields), needed, limit, tuple(accept))


def _text(name: str, saved: str, found: str, level: Level = "fatal") -> FieldCheck:
    verdict: Verdict = "unknown" if not saved or not found else "match" if saved == found else "differ"
    return FieldCheck(name, verdict, level, *_shown(saved, found))


def _shown(saved: str, found: str) -> tuple[str, str]:
    """Cut two texts to what people read; where they agree for long, from shortly before they part."""
    if max(len(saved), len(found)) <= _SHOWN:
        return saved, found
    same = next((i for i, (a, b) in enumerate(zip(saved, found, strict=False)) if a != b), min(len(saved), len(found)))
    start = same - _SHOWN // 4 if saved != found and same > _SHOWN // 2 else 0
    mark = "..." if start else ""
    return mark + saved[start : start + _SHOWN], mark + found[start : start + _SHOWN]


def _joined(saved: Sequence[tuple[str, str]], found: Sequence[tuple[str, str]]) -> list[tuple[str, str, str]]:
    left, right = dict(saved), dict(found)
    return [(name, left.get(name, ""), right.get(name, "")) for name in sorted(left.keys() | right.keys())]


def _one_sided(check: FieldCheck) -> FieldCheck:
    return FieldCheck(check.name, "differ", check.level, check.saved or _ABSENT, check.found or _ABSENT)


def _version(identity: Identity) -> str:
    """The version of the engine: what the runtime says under the name of the engine."""
    return dict(identity.runtime).get(identity.engine, "") if identity.engine else ""


def _config(saved: Identity, found: Identity) -> list[FieldCheck]:
    # Settings that only one side knows come from another engine version that renamed or added a default: the digests
    # of the weights and of the rope frequencies, and every setting both know, still have to agree. Where the versions
    # are the same there is no such excuse, and none where one side has a table of settings in the place of a value.
    same_version = _version(saved) == _version(found) != ""
    sides = [(names, {len(name) for name in names}) for names in (dict(saved.config), dict(found.config))]
    # What chooses among kernels was among the settings once, and is a part of the runtime since.
    kernels = {k for side in (saved, found) for k in _table(dict(side.runtime).get("kernels", ""))}
    checks = []
    for name, a, b in _joined(saved.config, found.config):
        if name in kernels and not (a and b):
            continue
        check = _text(f"config.{name}", a, b)
        unknown = check.verdict == "unknown" and (a or b) != "null"
        if unknown and (same_version or _overlaps(name, *sides[bool(a)])):
            check = _one_sided(check)
        checks.append(check)
    differing = [c for c in checks if c.verdict == "differ"]
    if differing:
        return differing
    if not saved.config or not found.config:
        told = (f"{len(side.config)} settings" for side in (saved, found))
        return [FieldCheck("config", "unknown", "fatal", *told)]
    shared = sum(1 for c in checks if c.verdict == "match")
    return [FieldCheck("config", "match", "fatal", f"{shared} settings", f"{shared} settings")]


def _overlaps(name: str, others: Mapping[str, str], lengths: set[int]) -> bool:
    """Tell whether a setting is part of what the other side has as one value; `lengths` are those of its names."""
    return any(mark == "." and i in lengths and name[:i] in others for i, mark in enumerate(name))


def _quantisation(name: str, saved: str, found: str) -> list[FieldCheck]:
    """Compare two texts of `quantisation_text`: setting by setting where both are quantised."""
    whole = _text(name, saved, found)
    try:
        tables = [flatten_config(table) for table in (_table(saved), _table(found)) if table]
    except RecursionError:  # a file may say anything
        return [whole]
    if whole.verdict != "differ" or len(tables) < 2:
        return [whole]
    checks = [_text(f"{name}.{setting}", a, b) for setting, a, b in _joined(*tables)]
    differing = [_one_sided(c) for c in checks if c.verdict != "match"]
    return differing or [FieldCheck(name, "match", "fatal", whole.saved, whole.found)]


def _table(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _weights(saved: Identity, found: Identity) -> list[FieldCheck]:
    if not saved.weights or not found.weights:
        return [
            FieldCheck("weights", "unknown", "fatal", f"{len(saved.weights)} tensors", f"{len(found.weights)} tensors")
        ]
    left, right = {w.name: w for w in saved.weights}, {w.name: w for w in found.weights}
    differing = []
    for name in [*left, *(n for n in right if n not in left)]:
        a, b = left.get(name), right.get(name)
        if a != b:
            what = f"weights: {describe_weight(name)}"
            differing.append(FieldCheck(what, "differ", "fatal", str(a or _ABSENT), str(b or _ABSENT)))
    total = f"{len(left)} tensors"
    return differing or [FieldCheck("weights", "match", "fatal", total, total)]


def _adapters(saved: Identity, found: Identity) -> FieldCheck:
    def show(adapters: tuple[AdapterDigest, ...] | None) -> str:
        return "" if adapters is None else ", ".join(str(a) for a in adapters) or "none"

    def content(adapters: tuple[AdapterDigest, ...] | None) -> list[tuple[str, str]]:
        return [(a.digest, a.scale) for a in adapters or ()]

    verdict: Verdict = "match" if content(saved.adapters) == content(found.adapters) else "differ"
    if saved.adapters is None or found.adapters is None:
        verdict = "unknown"
    return FieldCheck("adapters", verdict, "fatal", *_shown(show(saved.adapters), show(found.adapters)))

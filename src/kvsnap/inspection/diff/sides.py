"""The two sides of a comparison: opened, described, how they grow, and what is said of them in the end."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence

from kvsnap import formats
from kvsnap.errors import InputError
from kvsnap.formats import native
from kvsnap.formats.native.assemble import snapshot_of
from kvsnap.formats.native.fork import at_commit
from kvsnap.inspection.diff.answers import (
    Alignment,
    FieldDifference,
    GrowthDifference,
    HeadDifference,
    LayerDifference,
    LengthDifference,
    NotCompared,
    OtherDifference,
    Side,
    Verdict,
)
from kvsnap.inspection.growth.answers import LENGTHS, LayerGrowth, kind_of
from kvsnap.inspection.growth.growing import layers_of
from kvsnap.inspection.summary import load_as, summarise
from kvsnap.layout import Snapshot
from kvsnap.results import numbers

__all__ = ["growth_of", "opened", "verdict_of"]


def opened(source: Snapshot | str | os.PathLike[str], key: bytes | None, commit: int | None) -> tuple[Snapshot, Side]:
    """Return a snapshot and what it is from. Raise as `load` does; `MissingError` for a commit that is not there."""
    if isinstance(source, Snapshot):
        if commit is not None or key is not None:
            raise InputError("a snapshot in memory has no commits and needs no key")
        return source, _side(source)
    path, found = os.fspath(source), formats.format_of(source)
    if commit is None:
        snapshot = load_as(found, path, key)
    elif found.name == native.NAME:
        snapshot = snapshot_of(at_commit(native.NativeFile.open(path, key=key), commit))
    else:
        raise InputError(f"{found.name} files have no commits", path=path, found=commit)
    summary = summarise(path, key=key)
    encodings = {name: stored.stored for name, stored in summary.stored.items()} if commit is None else {}
    return snapshot, _side(snapshot, path, found.name, commit, summary.file_bytes, encodings)


def _side(
    s: Snapshot, path: str | None = None, name: str = "", commit: int | None = None, file_bytes: int | None = None,
    encodings: dict[str, int] | None = None,
) -> Side:  # fmt: skip
    first = next((t for t in s.tensors() if t.spec.grows), None) or next(s.tensors(), None)
    return Side(
        path=path, format=name or str(s.source.get("format", "")), commit=commit, architecture=s.architecture,
        dtype="" if first is None else first.spec.dtype, n_tokens=len(s.tokens), n_rows=s.n_rows,
        row_start=s.row_start, num_layers=s.num_layers, num_heads=s.num_heads, head_dim=s.head_dim,
        layers=dict(Counter(layer.kind for layer in s.layers)), nbytes=s.nbytes,
        bytes_per_token=sum(layer.per_token(s.n_rows) for layer in _rules(s, None)), file_bytes=file_bytes,
        encodings=encodings or {}, bound=s.bound,
    )  # fmt: skip


Rules = tuple[LayerGrowth, ...]


def growth_of(
    a: Snapshot, b: Snapshot, layers: Sequence[int] | None
) -> tuple[tuple[GrowthDifference, ...], tuple[LengthDifference, ...], tuple[Rules, Rules]]:
    """Return what the tensors of each kind take on both sides, now and at other lengths, and the rules of that."""
    sides = [_kinds(s, layers) for s in (a, b)]
    made = []
    for kind in {**sides[0], **sides[1]}:
        left, right = (side.get(kind, (frozenset[int](), 0.0, 0)) for side in sides)
        made.append(GrowthDifference(
            kind=kind, layers_a=len(left[0]), layers_b=len(right[0]), per_token_a=left[1], per_token_b=right[1],
            nbytes_a=left[2], nbytes_b=right[2],
        ))  # fmt: skip
    rules = _rules(a, layers), _rules(b, layers)
    lengths = sorted({*LENGTHS, a.n_rows, b.n_rows} - {0})
    sizes = [[sum(layer.nbytes(n) for layer in side) for side in rules] for n in lengths]
    told = (LengthDifference(n_tokens=n, nbytes_a=x, nbytes_b=y) for n, (x, y) in zip(lengths, sizes, strict=True))
    return tuple(made), tuple(told), rules


def _rules(s: Snapshot, layers: Sequence[int] | None) -> Rules:
    return layers_of(layer for layer in s.layers if layers is None or layer.index in layers)


def _kinds(s: Snapshot, layers: Sequence[int] | None) -> dict[str, tuple[frozenset[int], float, int]]:
    """Return by kind of tensor the layers that have it, the bytes that one more token adds, and those held."""
    found: dict[str, tuple[frozenset[int], float, int]] = {}

    def add(kind: str, layer: int, per_token: float, nbytes: int) -> None:
        where, more, held = found.get(kind, (frozenset(), 0.0, 0))
        found[kind] = where | {layer}, more + per_token, held + nbytes

    for rule in _rules(s, layers):
        for grown in rule.tensors:
            add(grown.kind, rule.index, grown.per_token(s.n_rows), 0)
    for layer in s.layers:
        if layers is None or layer.index in layers:
            for tensor in layer.tensors:
                add(kind_of(tensor.spec), layer.index, 0.0, tensor.nbytes)
    return found


# -- what is said ----------------------------------------------------------------------------------------------------


def verdict_of(
    aligned: Alignment, layers: Sequence[LayerDifference], heads: Sequence[HeadDifference],
    others: Sequence[OtherDifference], fields: Sequence[FieldDifference], left_out: Sequence[NotCompared], *,
    other_shape: bool, all_rows: bool, only: Sequence[int] | None = None,
) -> tuple[Verdict, tuple[str, ...]]:  # fmt: skip
    """Return the verdict, and what to say of it in sentences."""
    differing = [layer for layer in layers if layer.n_different]
    beside = [o.name for o in others if o.verdict not in ("equal", "unknown")]
    beside += [f.name for f in fields if f.verdict == "differ"]
    says = [aligned.sentence(), *aligned.notes, *_of_values(layers, heads, differing, all_rows=all_rows)]
    if only is not None:
        says.append(f"only layers {numbers(only)} were compared")
    if beside:
        says.append(f"beside the cache differ: {', '.join(beside)}")
    verdict: Verdict
    if other_shape:
        verdict = "geometry"
    elif aligned.relation not in ("same", "unknown"):
        verdict = "tokens"
    elif differing:
        verdict = "bound" if all(layer.within_bound for layer in differing) else "values"
    else:
        verdict = "besides" if beside or left_out else "identical"
    return verdict, tuple(says)


def _by_role(layers: Sequence[LayerDifference]) -> str:
    """Return the relative error of each role over all of its layers, from what is known of each of them."""
    sums: dict[str, tuple[float, float]] = {}
    for layer in layers:
        a2 = layer.rms_a**2 * (layer.n_values - max(layer.nonfinite_a, layer.nonfinite_b))
        error = layer.relative_error or 0.0
        d2, total = sums.get(layer.role, (0.0, 0.0))
        sums[layer.role] = d2 + (error**2 * a2 if a2 else error), total + a2
    shares = {role: math.sqrt(d2 / a2) if a2 else math.inf if d2 else 0.0 for role, (d2, a2) in sums.items()}
    return ", ".join(f"{role} {share:.3g}" for role, share in shares.items())


def _of_values(
    layers: Sequence[LayerDifference], heads: Sequence[HeadDifference], differing: Sequence[LayerDifference], *,
    all_rows: bool,
) -> list[str]:  # fmt: skip
    compared = [layer for layer in layers if layer.n_different is not None]
    if not compared:
        return ["no values were compared"]
    n_values = sum(layer.n_values for layer in compared)
    inputs = "" if not all_rows else ", rows of other inputs among them"
    if not differing:
        return [f"all {n_values:,} values that were compared are the same bits{inputs}"]
    n_different = sum(layer.n_different or 0 for layer in compared)
    made = [f"{n_different:,} of {n_values:,} values differ{inputs}"]
    worst = max(heads, key=lambda h: h.max_abs)
    if worst.max_abs:
        largest = max(layer.relative_error or 0.0 for layer in compared)
        made.append(f"largest error {worst.max_abs:.4g} at layer {worst.layer} {worst.role} head {worst.head} row "
                    f"{worst.row:,}; relative error up to {largest:.3g} in a layer")  # fmt: skip
        made.append(f"relative error over all layers: {_by_role(compared)}")
    else:
        made.append("all of them are the same numbers in other bits")
    odd = sum(head.n_nonfinite_differ for head in heads)
    if odd:
        made.append(f"{odd:,} values are NaN or infinite on one side and not the same on the other")
    outside = sorted({layer.layer for layer in differing if layer.within_bound is False})
    if outside:
        made.append(f"values of layers {numbers(outside)} are beyond the bound of what storing does")
    elif all(layer.within_bound for layer in differing):
        made.append(f"all within the bound of what storing does, {max(layer.bound for layer in differing):.4g}")
    return made

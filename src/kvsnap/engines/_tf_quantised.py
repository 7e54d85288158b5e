"""Layers that keep keys and values as codes: what each holds, copied out as it is and built again as it was.

quanto and hqq quantise whole tensors, and do it again with all that is there whenever the rows behind have grown long
enough; fp8 adds codes under a scale that its first pass set. Nothing is ever computed from codes in here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvsnap.engines._tf_parts import Part
from kvsnap.errors import CompatibilityError, UnsupportedError
from kvsnap.quantised import Quantisation
from kvsnap.tensors import Layer, Pairing, RopeState

__all__ = [
    "KEPT", "check_sizes", "cut", "is_quantised", "parts_of", "read", "refuse_rows", "rows", "settings_of", "write",
]  # fmt: skip

Live = tuple[tuple[str, Any], ...]

KEPT = (
    "keys", "values", "cumulative_length", "is_initialized", "_quantized_keys", "_quantized_values",
    "_pending_beam_idx",
)  # fmt: skip
"""What a pass changes. Nothing is written over in place."""

_KINDS = {"QuantoQuantizedLayer": "quanto", "HQQQuantizedLayer": "hqq", "Fp8QuantizedLayer": "fp8"}
_HQQ = {
    "nbits", "group_size", "shape", "scale", "zero", "axis", "packing", "unpack_view_dtype", "view_as_float",
    "compute_dtype",
}  # fmt: skip
"""What the records of hqq say; one that says more is refused."""


def is_quantised(layer: Any) -> bool:
    """Tell whether a cache layer keeps codes."""
    return type(layer).__name__ in _KINDS


def settings_of(layer: Any) -> Quantisation:
    """Return how a layer is set up."""
    kind = _KINDS[type(layer).__name__]
    if kind == "fp8":
        if str(layer.fp8_dtype) != "torch.float8_e4m3fn":
            raise UnsupportedError("fp8 codes of another dtype", expected="float8_e4m3fn", found=layer.fp8_dtype)
        return Quantisation(kind)
    return Quantisation(
        kind, int(layer.nbits), int(layer.q_group_size), int(layer.axis_key), int(layer.axis_value),
        int(layer.residual_length),
    )  # fmt: skip


def parts_of(
    layer: Any, count: int | None, widths: tuple[int | None, int | None], rope: RopeState, pairing: Pairing
) -> tuple[Part, ...]:
    """Return what a layer of `count` heads keeps: of each role first what belongs to the keys, then to the values."""
    how = settings_of(layer)
    parts = []
    for role in ("residual", "code", "scale") if how.kind == "fp8" else ("residual", "code", "scale", "zero"):
        for of_values, (letter, width) in enumerate(zip("kv", widths, strict=True)):
            name = f"{letter}_{role}"
            rotated = not of_values and role in ("residual", "code")
            turned: tuple[RopeState, Pairing] = (rope, pairing) if rotated else ("none", "")
            rows_axes = (("head", "row", "dim"), (count, 0, width))
            if role == "residual":
                part = Part(role, *rows_axes, "replaced", rope=turned[0], pairing=turned[1], name=name)
            elif how.kind == "fp8" and role == "code":
                part = Part(role, *rows_axes, dtype=how.dtype, rope=turned[0], pairing=turned[1], name=name)
            elif how.kind == "fp8":
                part = Part(role, ("one",), (1,), "replaced", dtype="float32", name=name)
            else:
                by_rows = how.by_rows(bool(of_values))
                across = how.sizes(bool(of_values), 0)[1][int(by_rows)] if role == "code" else 1
                # The number of groups is what grows.
                sizes, axes = ((0, across), ("row", "group")) if by_rows else ((across, 0), ("group", "row"))
                dtype = how.dtype if role == "code" else ""
                part = Part(role, axes, sizes, "replaced", dtype=dtype, rope=turned[0], pairing=turned[1], name=name)
            parts.append(part)
    return tuple(parts)


# -- out of a layer ------------------------------------------------------------------------------------------------


def rows(layer: Any) -> int:
    """Return the number of positions that a layer has seen."""
    return int(layer.cumulative_length) if layer.is_initialized else 0


def read(layer: Any) -> Live:
    """Return what a layer holds `[1, ...]` with its roles, in the order of the parts; () while it holds nothing.

    Raise `UnsupportedError` for what cannot be told apart or built again.
    """
    n_rows = rows(layer)
    if not n_rows:
        return ()
    how = settings_of(layer)
    _refuse_reordered(layer)
    found = [_quantised(layer, how, bool(of_values)) for of_values in range(2)]
    residual = []
    for one, kept in zip(found, (layer.keys, layer.values), strict=True):
        batch, count, n_codes, width = one.shape
        some = kept if kept.ndim == 4 else kept.new_empty((batch, count, 0, width))
        if n_codes + some.shape[-2] != n_rows:
            raise UnsupportedError(
                "a quantised layer does not hold as many rows as it counts",
                expected=n_rows, found=f"{n_codes} as codes, {some.shape[-2]} as they are",
            )  # fmt: skip
        residual.append(("residual", some))
    own = ("code", "scale") if how.kind == "fp8" else ("code", "scale", "zero")
    return (*residual, *((role, getattr(one, role)) for role in own for one in found))


@dataclass(frozen=True, slots=True)
class _Quantised:
    """Codes, scale and zero `[1, ...]` of the keys or of the values, and the shape of what they stand for."""

    code: Any
    scale: Any
    zero: Any
    shape: tuple[int, ...]


def _refuse_reordered(layer: Any) -> None:
    waiting = getattr(layer, "_pending_beam_idx", None)
    if waiting is not None and waiting.tolist() != [0]:
        raise UnsupportedError(
            "a quantised layer has been reordered, and does it to its codes at the next pass only: evaluate one first",
            expected="nothing that waits (_pending_beam_idx)", found=waiting.tolist(),
        )  # fmt: skip


def _quantised(layer: Any, how: Quantisation, of_values: bool) -> _Quantised:
    held = layer._quantized_values if of_values else layer._quantized_keys
    if how.kind == "fp8":
        codes, scale = held
        return _Quantised(codes, scale.reshape(1, 1).expand(codes.shape[0], 1), None, tuple(codes.shape))
    found = (_hqq_read if how.kind == "hqq" else _quanto_read)(layer, how, of_values, held)
    if found.shape[0] != 1:
        raise UnsupportedError(
            f"{how.kind} quantises the {found.shape[0]} sequences of a batch together, which cannot be taken apart",
            expected="a batch of 1", found=found.shape[0],
        )  # fmt: skip
    n_values = found.shape[1] * found.shape[2] * found.shape[3]
    _, codes, scales = how.sizes(of_values, n_values)
    shapes = [tuple(t.shape[1:]) for t in (found.code, found.scale, found.zero)]
    if shapes != [codes, scales, scales] or str(found.code.dtype) != f"torch.{how.dtype}":
        raise UnsupportedError(
            f"{how.kind} keeps its codes in another shape than is known here",
            expected=f"{how.dtype}{list(codes)} and {list(scales)}", found=f"{found.code.dtype}{shapes}",
        )  # fmt: skip
    return found


def _refuse_record(what: str, expected: Any, found: Any) -> None:
    if expected != found:
        raise UnsupportedError(f"{what} is not known here", expected=expected, found=found)


def _hqq_read(layer: Any, how: Quantisation, of_values: bool, held: Any) -> _Quantised:
    codes, meta = held
    _refuse_record("what hqq says of its codes", sorted(_HQQ), sorted(meta))
    known = _hqq_meta(layer, how, of_values, meta["shape"], meta["scale"], meta["zero"])
    for name in _HQQ - {"shape", "scale", "zero"}:
        _refuse_record(f"the {name} of the codes of hqq", known[name], meta[name])
    return _Quantised(codes[None], meta["scale"][None], meta["zero"][None], tuple(meta["shape"]))


def _hqq_meta(layer: Any, how: Quantisation, of_values: bool, shape: Any, scale: Any, zero: Any) -> dict[str, Any]:
    packing = layer.quantizer.bit_to_packing[how.bits]
    return {
        "nbits": how.bits, "group_size": how.group, "shape": shape, "scale": scale, "zero": zero,
        "axis": how.axis_value if of_values else how.axis_key, "packing": packing,
        "unpack_view_dtype": layer.quantizer.unpack_view_dtype[packing], "view_as_float": False,
        "compute_dtype": layer.keys.dtype,
    }  # fmt: skip


def _quanto_read(layer: Any, how: Quantisation, of_values: bool, held: Any) -> _Quantised:
    _refuse_record("the class of the codes of quanto", "WeightQBitsTensor", type(held).__name__)
    plain = how.sizes(of_values, held.numel())[0]
    known = {
        "qtype": layer.qtype, "axis": how.axis_value if of_values else how.axis_key, "group": how.group,
        "strides": _strides(held.shape), "packed": (how.bits, plain, (plain[1], 1)),
    }  # fmt: skip
    data = held._data
    found = {
        "qtype": held._qtype, "axis": held._axis, "group": held._group_size, "strides": tuple(held.stride()),
        "packed": (data._bits, tuple(data.shape), tuple(data.stride())),
    }  # fmt: skip
    for name, value in known.items():
        _refuse_record(f"{name} of the codes of quanto", value, found[name])
    return _Quantised(data._data[None], held._scale[None], held._shift[None], tuple(held.shape))


def _strides(shape: Any) -> tuple[int, ...]:
    _, count, n_rows, width = shape
    return (count * n_rows * width, n_rows * width, width, 1)


# -- into a layer --------------------------------------------------------------------------------------------------


def check_sizes(layer: Layer, parts: tuple[Part, ...], n_rows: int) -> None:
    """Raise `CompatibilityError` unless the tensors of a stored layer fit each other and `n_rows` positions."""
    how, where = Quantisation.of(layer.quantisation), f"layer {layer.index}"
    found = {part.role: [t for t in layer.tensors if t.role == part.role] for part in parts}
    compared: list[tuple[str, Any, Any]] = []
    for of_values, residual in enumerate(found["residual"]):
        count, _, width = residual.shape
        n_codes = n_rows - residual.n_rows
        most = n_rows - min(n_rows, 1) if how.kind != "fp8" else 0
        compared.append(("rows that are no codes", f"at most {most}", f"at most {max(most, residual.n_rows)}"))
        if how.kind == "fp8":
            continue
        _, codes, scales = how.sizes(bool(of_values), count * n_codes * width if n_rows else 0)
        for role, shape in (("code", codes), ("scale", scales), ("zero", scales)):
            compared.append((f"{role} for {n_codes} rows", list(shape), list(found[role][of_values].shape)))
    for what, wanted, value in compared:
        if wanted != value:
            raise CompatibilityError(f"{where}: {what} differs", expected=wanted, found=value)


def refuse_rows(layers: Sequence[Layer]) -> None:
    """Raise `UnsupportedError` for layers whose codes cannot be put into several rows of a batch."""
    for layer in layers:
        kind = Quantisation.of(layer.quantisation).kind if layer.quantisation else "fp8"
        if kind != "fp8":
            raise UnsupportedError(
                f"layer {layer.index}: {kind} quantises the rows of a batch together, so one is not put into several",
                expected="1 row", found=kind,
            )  # fmt: skip


def write(layer: Any, live: Live, n_rows: int) -> None:
    """Make such tensors the content of an empty layer; codes are not copied."""
    if not n_rows:
        return
    import torch
    from transformers.cache_utils import DynamicLayer

    how = settings_of(layer)
    by_role: dict[str, list[Any]] = {}
    for role, tensor in live:
        by_role.setdefault(role, []).append(tensor)
    residual = by_role["residual"]
    nothing = [torch.tensor([], dtype=t.dtype, device=t.device) for t in residual]
    # Releases before 5.0 initialise from the keys alone. That of a quantised layer may quantise; its base does not.
    wanted = DynamicLayer.lazy_initialization.__code__.co_argcount - 1
    DynamicLayer.lazy_initialization(layer, *nothing[:wanted])
    layer.keys, layer.values = (
        kept if kept.shape[-2] else empty for kept, empty in zip(residual, nothing, strict=True)
    )
    made = []
    for place, kept in enumerate(residual):
        code, scale = by_role["code"][place], by_role["scale"][place]
        if how.kind == "fp8":
            made.append((code, scale[0].reshape(())))  # the rows of a batch share one
            continue
        shape = torch.Size((1, kept.shape[1], n_rows - kept.shape[-2], kept.shape[-1]))
        build = _hqq_write if how.kind == "hqq" else _quanto_write
        made.append(build(layer, how, bool(place), code[0], scale[0], by_role["zero"][place][0], shape))
    layer._quantized_keys, layer._quantized_values = made
    layer.cumulative_length = n_rows


def _hqq_write(layer: Any, how: Quantisation, of_values: bool, code: Any, scale: Any, zero: Any, shape: Any) -> Any:
    return code, _hqq_meta(layer, how, of_values, shape, scale, zero)


def _quanto_write(layer: Any, how: Quantisation, of_values: bool, code: Any, scale: Any, zero: Any, shape: Any) -> Any:
    from optimum.quanto.tensor.packed import PackedTensor
    from optimum.quanto.tensor.weights.qbits import WeightQBitsTensor

    plain = how.sizes(of_values, shape.numel())[0]
    packed = PackedTensor(code, how.bits, type(shape)(plain), (plain[1], 1))
    axis = how.axis_value if of_values else how.axis_key
    return WeightQBitsTensor(layer.qtype, axis, how.group, shape, _strides(shape), packed, scale, zero)


def cut(layer: Any, n_rows: int) -> None:
    """Drop the positions behind `n_rows`: those that are not codes yet, or all."""
    seen = rows(layer)
    if n_rows >= seen:
        return
    if n_rows == 0:
        layer.keys = layer.values = layer._quantized_keys = layer._quantized_values = None
        layer.is_initialized, layer.cumulative_length = False, 0
        if hasattr(layer, "_pending_beam_idx"):
            layer._pending_beam_idx = None
        return
    first = seen - (layer.keys.shape[-2] if layer.keys.ndim == 4 else 0)
    if n_rows < first or settings_of(layer).kind == "fp8":
        reach = f"0 or {seen}" if first == seen else f"0 or {first} to {seen}"
        raise UnsupportedError(
            f"a {type(layer).__name__} cannot go back to {n_rows} positions: what is behind them is in its codes",
            expected=reach, found=n_rows,
        )  # fmt: skip
    for name in ("keys", "values"):
        kept = getattr(layer, name)[..., : n_rows - first, :]
        setattr(layer, name, kept if n_rows > first else kept.new_empty((0,)))
    layer.cumulative_length = n_rows

"""What a model must agree with to use a `.coli_kv` file, and what of a snapshot fits into one.

docs/formats/colikv.md sections 2, 5 and 9.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvsnap.errors import InputError, UnsupportedError
from kvsnap.layout import Layer, Snapshot, Tensor

__all__ = ["UNASSIGNED", "Geometry", "check_index_layers", "found_in", "limits_of", "vocabulary_of"]

UNASSIGNED = "index_rows"
"""Name of the tensor that holds index rows whose layers are not known."""

# Far above any model; a header that says more would make one object per layer before a byte of it is read.
MAX_LAYERS = 1 << 12
MAX_WIDTH = 1 << 20
MAX_INT = (1 << 31) - 1
# Types whose every value is a float32 too.
_EXACT = {"float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What a model must agree with: the numbers of the header, and which layers own index rows.

    `index_layers` are layer numbers in order; None when it is not known which they are (`index_count` then says how
    many). `index_count` may be given without an index width: buffers of a model that does not use them. `has_draft`
    tells that the model has a draft (MTP) layer, whose rows are never stored; it is not part of the file.
    """

    n_layers: int
    kv_lora: int
    qk_rope: int
    vocab: int
    index_width: int = 0
    index_layers: tuple[int, ...] | None = None
    index_count: int = 0
    has_draft: bool = False

    def __post_init__(self) -> None:
        if self.index_layers is not None:
            chosen = check_index_layers(self.index_layers, self.n_layers)
            object.__setattr__(self, "index_layers", chosen)
            if self.index_count not in {0, len(chosen)}:
                raise InputError("index_count and index_layers differ", expected=len(chosen), found=self.index_count)
            object.__setattr__(self, "index_count", len(chosen))
        numbers = (self.n_layers, self.kv_lora, self.qk_rope, self.index_width, self.index_count, self.vocab)
        for name, _, value, low, high in limits_of(numbers):
            if not low <= value <= high:
                raise InputError(f"geometry: {name} out of range", expected=f"{low} to {high}", found=value)

    @staticmethod
    def of(snapshot: Snapshot, vocab: int | None = None) -> Geometry:
        """Return the geometry of the model that a snapshot is of: one from a file, or `engine.capture()`.

        A capture of an engine that has seen nothing will do. The size of the vocabulary is that of the file or the
        configuration, else of the logits; `vocab` is needed where none of them is there, and wins. Reads no tensor
        bytes. Raise `UnsupportedError` naming a layer that a `.coli_kv` file has no place for, `InputError` when the
        vocabulary is not known.
        """
        known = vocab if vocab is not None else vocabulary_of(snapshot)
        if known is None:
            raise InputError("the vocabulary size of the model is not known: give vocab")
        return found_in(snapshot).geometry(known)

    @property
    def index_rows(self) -> int:
        """Index rows in one record: none without an index width, whatever the count says."""
        return self.index_count if self.index_width > 0 else 0

    @property
    def index_owners(self) -> tuple[int, ...] | None:
        """The layers whose index rows are stored, or None where that is not known."""
        if not self.index_rows:
            return ()
        if self.index_layers is None and self.index_count == self.n_layers:
            return tuple(range(self.n_layers))
        return self.index_layers


def check_index_layers(layers: Sequence[int], n_layers: int) -> tuple[int, ...]:
    """Return the layer numbers as a tuple; raise `InputError` unless they ascend within the model."""
    chosen = tuple(int(layer) for layer in layers)
    if list(chosen) != sorted(set(chosen)) or (chosen and not 0 <= chosen[0] <= chosen[-1] < n_layers):
        expected = f"ascending layer numbers from 0 to {n_layers - 1}"
        raise InputError("index_layers are not layers of this model", expected=expected, found=list(chosen))
    return chosen


def limits_of(numbers: Sequence[int]) -> tuple[tuple[str, int, int, int, int], ...]:
    """Name, offset in the header, value, lowest and highest allowed value of each of the six numbers."""
    n_layers, kv_lora, qk_rope, index_width, index_count, vocab = numbers
    return (
        ("n_layers", 8, n_layers, 1, MAX_LAYERS),
        ("kv_lora", 12, kv_lora, 1, MAX_WIDTH),
        ("qk_rope", 16, qk_rope, 0, MAX_WIDTH),
        ("index width", 20, index_width, 0, MAX_WIDTH),
        ("index layer count", 24, index_count, 0, n_layers if index_width else MAX_INT),
        ("vocabulary size", 28, vocab, 0, MAX_INT),
    )


# -- what of a snapshot fits ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """The tensors of a snapshot that a record has a place for: a latent and a rope row per layer, and index rows.

    An index row is a tensor, or one place of the tensor that holds those without a layer; `owners` is then None.
    """

    pairs: tuple[tuple[Tensor, Tensor | None], ...]
    index: tuple[tuple[Tensor | None, int | None], ...]
    owners: tuple[int, ...] | None
    index_width: int
    index_count: int

    def geometry(self, vocab: int) -> Geometry:
        """Return the numbers of the header."""
        latent, rope = self.pairs[0]
        return Geometry(
            n_layers=len(self.pairs), kv_lora=_width(latent), qk_rope=_width(rope), vocab=vocab,
            index_width=self.index_width, index_layers=self.owners, index_count=self.index_count,
        )  # fmt: skip


def found_in(snapshot: Snapshot) -> Found:
    """Sort the tensors of a snapshot; raise `UnsupportedError` naming the layer that does not fit."""
    if not snapshot.layers:
        raise UnsupportedError("a .coli_kv file holds rows of at least one layer; this snapshot has none")
    pairs = [_latent_pair(snapshot, layer) for layer in snapshot.layers]
    widths = (_width(pairs[0][0]), _width(pairs[0][1]))
    for layer, (latent, rope) in zip(snapshot.layers, pairs, strict=True):
        if (_width(latent), _width(rope)) != widths:
            raise UnsupportedError(
                f"layer {layer.index}: all layers of a .coli_kv file have rows of the same widths",
                expected=f"latent {widths[0]}, rope {widths[1]}", found=f"latent {_width(latent)}, rope {_width(rope)}",
            )  # fmt: skip
    owners, index, index_width, index_count = _index(snapshot)
    return Found(tuple(pairs), tuple(index), owners, index_width, index_count)


def _latent_pair(snapshot: Snapshot, layer: Layer) -> tuple[Tensor, Tensor | None]:
    pair: tuple[Tensor | None, Tensor | None] = (layer.tensor("latent"), layer.tensor("rope"))
    if layer.kind == "attention" and layer.num_heads == 1 and layer.shares is None:
        # One head: keys and values as two rows. A file of another format may have no values at all.
        values = layer.tensor("v")
        pair = (layer.tensor("k"), None if values is None or (values.n_rows == 0 < snapshot.n_rows) else values)
    latent, rope = pair
    if latent is None or layer.shares is not None:
        raise UnsupportedError(
            f"layer {layer.index} ({layer.kind}) has no latent rows of its own; a .coli_kv file holds nothing else",
            expected="latent", found=layer.kind,
        )  # fmt: skip
    _require_rows(snapshot, layer, latent)
    if rope is not None:
        _require_rows(snapshot, layer, rope)
    return latent, rope


def _require_rows(snapshot: Snapshot, layer: Layer, tensor: Tensor) -> None:
    spec = tensor.spec
    others = [s for axis, s in enumerate(spec.shape) if axis not in {spec.row_axis, len(spec.shape) - 1}]
    if spec.growth != "grow" or spec.tokens_per_row != 1 or any(s != 1 for s in others) or spec.row_axis < 0:
        raise UnsupportedError(f"layer {layer.index}: {tensor.name} is not one row for each token", found=spec.growth)
    if spec.row_axis == len(spec.shape) - 1:
        raise UnsupportedError(f"layer {layer.index}: {tensor.name} has its rows along the last axis")
    if spec.dtype not in _EXACT:
        raise UnsupportedError(f"layer {layer.index}: {tensor.name} is no float32 row", found=spec.dtype)
    if tensor.start + tensor.n_rows != snapshot.n_rows or tensor.start > snapshot.row_start:
        raise UnsupportedError(
            f"layer {layer.index}: {tensor.name} does not hold a row for each token", expected=snapshot.n_rows,
            found=f"rows {tensor.start} to {tensor.start + tensor.n_rows}",
        )  # fmt: skip


def _width(tensor: Tensor | None) -> int:
    return 0 if tensor is None else int(tensor.spec.shape[-1])


def _index(
    snapshot: Snapshot,
) -> tuple[tuple[int, ...] | None, list[tuple[Tensor | None, int | None]], int, int]:
    """Owners, tensors, width and count of the index rows."""
    loose = next((t for t in snapshot.tensors() if t.name == UNASSIGNED and t.role == "other"), None)
    if loose is not None:
        count = int(loose.spec.shape[1])
        return None, [(loose, place) for place in range(count)], _width(loose), count
    own = [(layer, t) for layer in snapshot.layers if (t := layer.tensor("index")) is not None]
    if not own:
        stated = snapshot.source.get("header", {}) if snapshot.source.get("format") == "colikv" else {}
        return None, [], 0, int(stated.get("index_layer_count", 0)) if stated.get("index_width") == 0 else 0
    width = _width(own[0][1])
    for layer, tensor in own:
        _require_rows(snapshot, layer, tensor)
        if _width(tensor) != width:
            found = _width(tensor)
            raise UnsupportedError(f"layer {layer.index}: index rows differ in width", expected=width, found=found)
    return tuple(layer.index for layer, _ in own), [(t, None) for _, t in own], width, len(own)


def vocabulary_of(snapshot: Snapshot) -> int | None:
    """Return the size of the vocabulary as the file or the configuration states it, or that of the logits, or None."""
    if snapshot.source.get("format") == "colikv":
        return int(snapshot.source["header"]["vocab"])
    stated = {name.rsplit(".", 1)[-1]: value for name, value in snapshot.identity.config}
    if stated.get("vocab_size", "").isdigit():
        return int(stated["vocab_size"])
    return int(snapshot.logits.spec.shape[-1]) if snapshot.logits is not None else None

"""The layers of a cache as one list, also where the cache keeps them otherwise.

An `EncoderDecoderCache` is two caches: the rows of the decoder, and the keys and values of what the encoder made. A
`MiniMaxCache` keeps its states in a list of its own. Here each of their layers is one object, as in any other cache.
"""

from __future__ import annotations

from functools import cache as remembered
from typing import Any

from kvsnap.engines._tf_kinds import LayerKind, Live
from kvsnap.errors import UnsupportedError

__all__ = ["CrossLayer", "MixedLayer", "crossed", "drop_layers", "layer_at", "layers_of", "mixed"]

_CROSSED = ("transformers.cache_utils", "EncoderDecoderCache")
_MIXED = ("transformers.models.minimax.modeling_minimax", "MiniMaxCache")


def layers_of(cache: Any) -> list[Any]:
    """Return the layers of a cache; raise `UnsupportedError` for an encoder-decoder cache of other caches."""
    kind = _kind(cache)
    if kind == _MIXED:
        return [MixedLayer(cache, index) for index in range(max(len(cache.layers), len(cache.linear_cache)))]
    if kind != _CROSSED:
        return list(cache.layers)
    own, cross = _inner(cache)
    layers = [CrossLayer(cache, index) for index in range(max(len(own), len(cross)))]
    # transformers counts the layers of some encoders for those of the decoder, and leaves the rest empty.
    filled = [index for index, layer in enumerate(layers) if layer.holds_something]
    return layers[: filled[-1] + 1] if filled else layers


def layer_at(cache: Any, index: int) -> Any:
    """Return one layer of a cache; a cache that makes its layers as they come makes those up to `index`."""
    kind = _kind(cache)
    if kind == _MIXED:
        return MixedLayer(cache, index)
    if kind == _CROSSED:
        return CrossLayer(cache, index)
    return _made(cache, index)


def drop_layers(cache: Any, count: int) -> None:
    """Take away the layers behind the first `count`."""
    kind = _kind(cache)
    if kind == _CROSSED:
        for layers in _inner(cache):
            del layers[count:]
        for index in [index for index in cache.is_updated if index >= count]:
            del cache.is_updated[index]
        return
    if kind == _MIXED:
        del cache.linear_cache[count:]
    del cache.layers[count:]


def _kind(cache: Any) -> tuple[str, str]:
    return type(cache).__module__, type(cache).__name__


def _inner(cache: Any) -> tuple[list[Any], list[Any]]:
    pair = cache.self_attention_cache, cache.cross_attention_cache
    for one in pair:
        if _kind(one) != ("transformers.cache_utils", "DynamicCache"):
            raise UnsupportedError(
                f"an EncoderDecoderCache of a {type(one).__name__} is not supported",
                expected="DynamicCache", found=type(one).__name__,
            )  # fmt: skip
    return pair[0].layers, pair[1].layers


def _found(cache: Any, index: int) -> Any:
    """Return a layer of a cache, or an empty one where it does not have it yet; the cache stays as it is."""
    return cache.layers[index] if index < len(cache.layers) else cache.layer_class_to_replicate()


def _made(cache: Any, index: int) -> Any:
    while len(cache.layers) <= index:
        cache.layers.append(cache.layer_class_to_replicate())
    return cache.layers[index]


# -- encoder-decoders ----------------------------------------------------------------------------------------------


class CrossLayer:
    """One layer of an `EncoderDecoderCache`: the layer with the rows of the decoder, `own`, and the one beside it.

    The other one holds keys and values of the encoder's output, which are there once for all rows. transformers uses
    them only where its note `is_updated` says that they are there. Attributes of `own` are those of this object too.
    """

    _OF_ITS_OWN = ("cross_keys", "cross_values", "cross_initialized", "is_updated")

    def __init__(self, cache: Any, index: int) -> None:
        self.__dict__.update(_cache=cache, _index=index)

    @property
    def own(self) -> Any:
        return _found(self._cache.self_attention_cache, self._index)

    @property
    def cross(self) -> Any:
        return _found(self._cache.cross_attention_cache, self._index)

    @property
    def holds_something(self) -> bool:
        return bool(self.own.is_initialized or self.cross.is_initialized)

    @property
    def is_filled(self) -> bool:
        """True when the keys and values of the encoder's output are there, and would be used."""
        return bool(self._cache.is_updated.get(self._index)) and self.cross.is_initialized

    def __getattr__(self, name: str) -> Any:
        if name == "is_updated":
            return self._cache.is_updated.get(self._index)
        of_cross = name.removeprefix("cross_")
        if of_cross != name:
            return getattr(self.cross, "is_initialized" if of_cross == "initialized" else of_cross)
        return getattr(self.own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "is_updated":
            if value is None:
                self._cache.is_updated.pop(self._index, None)
            else:
                self._cache.is_updated[self._index] = value
        elif name in self._OF_ITS_OWN:
            of_cross = name.removeprefix("cross_")
            setattr(self.cross, "is_initialized" if of_cross == "initialized" else of_cross, value)
        else:
            setattr(self.own, name, value)

    def make(self) -> tuple[Any, Any]:
        """Return both layers, made where the caches do not have them yet."""
        pair = self._cache.self_attention_cache, self._cache.cross_attention_cache
        return _made(pair[0], self._index), _made(pair[1], self._index)


@remembered
def crossed(kind: LayerKind, plain: LayerKind) -> LayerKind:
    """Return how a layer is handled whose `own` layer is of a kind, and the other of the kind `plain`."""

    def read(layer: CrossLayer) -> Live:
        own = kind.read(layer.own)
        if not layer.is_filled:
            return own
        (_, keys), (_, values) = plain.read(layer.cross)
        none = (("k", keys[:, :, :0]), ("v", values[:, :, :0]))
        return (*(own or none), ("cross_k", keys), ("cross_v", values))

    def write(layer: CrossLayer, live: Live, n_rows: int) -> None:
        own, cross = layer.make()
        kind.write(own, live[:2], n_rows)
        plain.write(cross, live[2:], 1)
        layer.is_updated = True

    def fixed(layer: CrossLayer) -> tuple[Any, ...]:
        return tuple(tensor for _, tensor in plain.read(layer.cross)) if layer.is_filled else ()

    drop = kind.drop
    return LayerKind(
        read, write, lambda layer: kind.rows(layer.own), lambda layer, n_rows: kind.cut(layer.own, n_rows),
        None if drop is None else lambda layer, n_rows: drop(layer.own, n_rows),
        (*kind.kept, *CrossLayer._OF_ITS_OWN), kind.copied, fixed,
    )  # fmt: skip


# -- MiniMax -------------------------------------------------------------------------------------------------------


class MixedLayer:
    """One layer of a `MiniMaxCache`: either a layer of keys and values, `own`, or a `state` in the list beside them."""

    def __init__(self, cache: Any, index: int) -> None:
        self._cache = cache
        self._index = index

    @property
    def own(self) -> Any:
        return _found(self._cache, self._index)

    def make(self) -> Any:
        """Return the layer of keys and values, made where the cache does not have it yet."""
        return _made(self._cache, self._index)

    @property
    def state(self) -> Any:
        """The state `[batch, head, key, value]`, which every pass makes anew; None where there is none."""
        states = self._cache.linear_cache
        found = states[self._index] if self._index < len(states) else None
        return found if hasattr(found, "shape") else None

    @state.setter
    def state(self, value: Any) -> None:
        states = self._cache.linear_cache
        if value is not None:
            self._cache.set_linear_cache(self._index, value)
        elif self._index < len(states):
            states[self._index] = []


@remembered
def mixed(plain: LayerKind) -> LayerKind:
    """Return how a layer is handled that is of the kind `plain`, or a state."""

    def read(layer: MixedLayer) -> Live:
        return plain.read(layer.own) if layer.state is None else (("recurrent", layer.state),)

    def write(layer: MixedLayer, live: Live, n_rows: int) -> None:
        if live[0][0] == "recurrent":
            layer.state = live[0][1]
        else:
            plain.write(layer.make(), live, n_rows)

    def rows(layer: MixedLayer) -> int | None:
        return plain.rows(layer.own) if layer.state is None else None

    def cut(layer: MixedLayer, n_rows: int) -> None:
        if layer.state is not None:
            raise UnsupportedError(f"a MiniMaxCache cannot go back to {n_rows} positions: its states are made anew")
        plain.cut(layer.own, n_rows)

    drop = plain.drop
    return LayerKind(
        read, write, rows, cut, None if drop is None else lambda layer, n_rows: drop(layer.own, n_rows), ("state",)
    )

"""Where a transformers model computes its attention, and how to listen there.

The modules of attention hand queries, keys, values and the mask to one function, which is chosen by name: from
`ALL_ATTENTION_FUNCTIONS` or, for `eager`, from the names of the module's own file. For the time of one pass that
function is replaced by one that calls it, passes its answer on, and tells what it was given. Nothing in the model is
touched. Calls by other models, and in other threads, go through unheard.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvsnap.engines._tf_model import Model
from kvsnap.errors import UnsupportedError

__all__ = ["Call", "Place", "listening", "places_of"]

_TABLE = "ALL_ATTENTION_FUNCTIONS"
_EAGER = "eager_attention_forward"
_CROSS = ("encoder_attn", "EncDecAttention", "crossattention", "cross_attn", "encoder_decoder_attention")
"""What the attention of a decoder to its encoder is called."""
_KEEPS_NO_KEYS = {"recurrent": "it keeps a recurrent state, and has no keys", "none": "it has no attention"}


@dataclass(frozen=True, slots=True)
class Place:
    """One module of attention: the number of its layer, and the names of the file that its forward is written in."""

    module: Any
    index: int
    cross: bool
    names: dict[str, Any]

    @property
    def implementation(self) -> str:
        """Name of the implementation that is chosen now."""
        return str(self.module.config._attn_implementation)

    @property
    def eager(self) -> Callable[..., Any] | None:
        """The function that computes the weights in the open, None where its file has none."""
        found = self.names.get(_EAGER)
        return getattr(found, "told_of", found)


@dataclass(frozen=True, slots=True)
class Call:
    """What the function was given in one call: tensors `[1, heads, rows, dim]`, and what it returned."""

    place: Place
    query: Any
    key: Any
    value: Any
    mask: Any
    options: Mapping[str, Any]
    returned: Any


def places_of(model: Model) -> tuple[Place, ...]:
    """Return the modules of attention of a model, self-attention before cross-attention, by layer.

    Raise `UnsupportedError` naming a model that has none, or one that computes attention where it cannot be heard.
    """
    family = model.config.model_type
    inside = model.module.get_decoder() if model.encodes else model.module
    found: dict[tuple[bool, int], Place] = {}
    for name, part in inside.named_modules():
        forward = inspect.unwrap(type(part).forward)
        code = getattr(forward, "__code__", None)
        if code is None or _TABLE not in code.co_names:
            continue
        index = getattr(part, "layer_idx", None)
        if not isinstance(index, int) or index < 0:
            raise UnsupportedError(f"{family}: {name} serves several layers, so its attention is of no one layer")
        place = Place(part, index, name.rpartition(".")[2] in _CROSS, forward.__globals__)
        if (place.cross, index) in found:
            raise UnsupportedError(f"{family}: layer {index} computes attention in two modules, {name} the second")
        found[place.cross, index] = place
    _check_covered(model, family, found)
    return tuple(found[key] for key in sorted(found))


def _check_covered(model: Model, family: str, found: Mapping[tuple[bool, int], Place]) -> None:
    kept = [(i, part) for i, geometry in enumerate(model.geometry) for part in geometry.parts]
    grouped = next((i for i, part in kept if part.tokens_per_row != 1), None)
    if grouped is not None:
        raise UnsupportedError(
            f"{family}: layer {grouped} attends to rows that stand for several positions, which is not supported"
        )
    wanted = [i for i, geometry in enumerate(model.geometry) if geometry.kind not in _KEEPS_NO_KEYS]
    if not wanted and not found:
        raise UnsupportedError(f"{family} has no attention: its layers keep recurrent states")
    unheard = [i for i in wanted if (False, i) not in found or (model.encodes and (True, i) not in found)]
    if unheard:
        raise UnsupportedError(
            f"{family}: layer {unheard[0]} does not attend through transformers' attention functions, so its queries "
            "cannot be seen"
        )


# -- the replaced functions ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Replaced:
    """An entry of a dictionary that stands for another: what was there, and who needs it replaced."""

    entries: dict[str, Any]
    name: str
    was: Any
    new: Any
    users: set[object] = field(default_factory=set)


_lock = threading.Lock()
_replaced: dict[tuple[int, str], _Replaced] = {}
_heard: dict[tuple[int, int], Callable[..., None]] = {}
_ABSENT = object()


def _telling(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def telling(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, *rest: Any, **options: Any
    ) -> Any:
        returned = function(module, query, key, value, attention_mask, *rest, **options)
        hear = _heard.get((threading.get_ident(), id(module)))
        if hear is not None:
            hear(query, key, value, attention_mask, options, returned)
        return returned

    telling.told_of = function  # type: ignore[attr-defined] # what weights are computed with must not tell again
    return telling


def _replace(entries: dict[str, Any], name: str, function: Callable[..., Any], user: object) -> None:
    with _lock:
        entry = _replaced.get((id(entries), name))
        if entry is None:
            entry = _Replaced(entries, name, entries.get(name, _ABSENT), _telling(function), {user})
            _replaced[id(entries), name] = entry
        entry.users.add(user)
        entries[name] = entry.new


def _put_back(user: object) -> None:
    with _lock:
        for key, entry in list(_replaced.items()):
            entry.users.discard(user)
            if entry.users:
                continue
            if entry.entries.get(entry.name) is entry.new:  # else someone has put something else there meanwhile
                if entry.was is _ABSENT:
                    del entry.entries[entry.name]
                else:
                    entry.entries[entry.name] = entry.was
            del _replaced[key]


@contextmanager
def listening(places: Sequence[Place], hear: Callable[[Call], None]) -> Iterator[None]:
    """Tell `hear` of every call that one of these modules makes in this thread, until the context is left."""
    thread, user = threading.get_ident(), object()
    before = {(thread, id(place.module)): _heard.get((thread, id(place.module))) for place in places}
    try:
        for place in places:
            _heard[thread, id(place.module)] = functools.partial(_pass_on, hear, place)
            for entries, name, function in _entries_of(place):
                _replace(entries, name, function, user)
        yield
    finally:
        _put_back(user)
        for key, was in before.items():
            if was is None:
                _heard.pop(key, None)
            else:
                _heard[key] = was


def _pass_on(hear: Callable[[Call], None], place: Place, *told: Any) -> None:
    hear(Call(place, *told))


def _entries_of(place: Place) -> Iterator[tuple[dict[str, Any], str, Callable[..., Any]]]:
    """Yield the dictionaries that the function in use is found in, with the function."""
    if place.eager is not None:
        yield place.names, _EAGER, place.eager
    table, name = place.names[_TABLE], place.implementation
    if name in table:
        # What is registered for all stays as it is; entries of this one object go before them.
        function = table[name]
        yield table._local_mapping, name, getattr(function, "told_of", function)

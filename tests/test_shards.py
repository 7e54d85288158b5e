"""Shards: a snapshot divided by heads and joined again, bit for bit; whatever does not belong together is refused.

Each refusal has its control: the same shards, put right, are joined.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsnap
from kvsnap.cli import run
from kvsnap.errors import (
    CompatibilityError,
    DamagedError,
    FormatError,
    InputError,
    KvsnapError,
    LossError,
    UnsupportedError,
)
from kvsnap.layout import Layer, PositionRun, Snapshot, Tensor, numpy_dtype
from kvsnap.session import Session
from spec_file import LAYOUT, Minimal, SpecReader
from synthetic import SAMPLER, rows, same, snapshot, spec

TOKENS = tuple(range(3, 15))


def plain(**fields: Any) -> Snapshot:
    values: dict[str, Any] = {"heads": 4, "layers": 2, "n_pending": 1, "sampler": SAMPLER, "text": "some text"}
    return snapshot(TOKENS, **(values | fields))


def numbers(shape: tuple[int, ...], seed: int) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


def mixed(n_rows: int = 12, held: int = 7) -> Snapshot:
    """Every kind of layer: heads on other axes, windows with more rows than needed, latent, index, hybrid, cross."""
    made = snapshot(TOKENS[:n_rows], heads=4, layers=1, sampler=SAMPLER)
    behind = spec(10, 1, "k", 2, 6, "bfloat16", axes=("row", "head", "dim"), shape=(0, 2, 6), row_axis=0)
    window = {"growth": "window", "window": 4}
    start = max(0, n_rows - held)
    rows_held = n_rows - start

    def tensor(s: Any, seed: int, n: int = n_rows, first: int = 0) -> Tensor:
        if s.growth == "window":
            return Tensor(s, rows(TOKENS, first, first + n, seed, 4, 3, "float32"), start=first)
        values = numbers(s.shape_with(n), seed)
        return Tensor(s, values.astype(numpy_dtype(s.dtype)), start=first)

    flat = {"axes": ("row", "dim"), "row_axis": 0}
    layers = [
        Layer(index=1, kind="attention", num_query_heads=16,
              tensors=(tensor(behind, 1), tensor(replace(behind, id=11, name="layer1.v", role="v"), 2))),
        Layer(index=2, kind="attention", num_query_heads=16, tensors=(
            tensor(spec(20, 2, "k", 4, 3, "float32", **window), 3, rows_held, start),
            tensor(spec(21, 2, "v", 4, 3, "float32", **window), 4, rows_held, start))),
        Layer(index=3, kind="latent", num_query_heads=16, tensors=(
            tensor(spec(30, 3, "latent", 0, 0, "float32", shape=(0, 5), **flat), 5),
            tensor(spec(31, 3, "rope", 0, 0, "float32", shape=(0, 2), **flat), 6),
            tensor(spec(32, 3, "index", 0, 0, "float32", shape=(0, 3), **flat), 7))),
        Layer(index=4, kind="hybrid", tensors=(
            tensor(spec(40, 4, "recurrent", 8, 3, "float32", axes=("head", "dim", "state"), shape=(8, 3, 3),
                        growth="replaced", row_axis=-1), 8),
            tensor(spec(41, 4, "conv", 0, 0, "float32", axes=("channel", "dim"), shape=(6, 3), growth="replaced",
                        row_axis=-1), 9))),
        Layer(index=5, kind="cross", num_query_heads=16, tensors=(
            tensor(spec(50, 5, "cross_k", 4, 3, "float32", growth="static"), 10, 5),
            tensor(spec(51, 5, "cross_v", 4, 3, "float32", growth="static"), 11, 5))),
        Layer(index=6, kind="attention", num_query_heads=16, shares=0, tensors=()),
    ]  # fmt: skip
    return replace(made, layers=(replace(made.layers[0], num_query_heads=16), *layers))


def through_file(shards: tuple[Snapshot, ...], **options: Any) -> list[Snapshot]:
    return [kvsnap.loads(kvsnap.dumps(s, **options)) for s in shards]


# -- there and back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_join_is_the_inverse_of_split(n: int, dtype: str) -> None:
    made = plain(dtype=dtype)
    shards = kvsnap.split(made, n)
    assert len(shards) == n
    assert same(kvsnap.join(shards), made) == []
    for format_ in ("native", "safetensors"):
        read = through_file(shards, format=format_)
        assert [s.shard for s in read] == [s.shard for s in shards]
        assert [same(a, b) for a, b in zip(read, shards, strict=True)] == [[]] * n
        assert same(kvsnap.join(read), made) == []
    assert kvsnap.join(shards).shard is None


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("n_rows", [1, 3, 4, 12])
def test_every_kind_of_layer(n: int, n_rows: int) -> None:
    made = mixed(n_rows)
    shards = through_file(kvsnap.split(made, n))
    assert same(kvsnap.join(shards), made) == []
    for i, shard in enumerate(shards):
        k, v = shard.layers[1].tensors
        first = i * 2 // n  # two heads: one each for 2 ranks, else one for several neighbours
        whole = made.layers[1].tensors
        assert k.array.tobytes() == whole[0].array[:, first : first + 1].tobytes()
        assert v.array.tobytes() == whole[1].array[:, first : first + 1].tobytes()
        assert [x.num_query_heads for x in shard.layers] == [16 // n, 16 // n, 16 // n, 16 // n, 0, 16 // n, 16 // n]
        latent = zip(shard.layers[3].tensors, made.layers[3].tensors, strict=True)
        assert all(a.array.tobytes() == b.array.tobytes() for a, b in latent)
        recurrent, conv = shard.layers[4].tensors
        assert recurrent.array.tobytes() == made.layers[4].tensors[0].array[i * 8 // n : (i + 1) * 8 // n].tobytes()
        assert conv.array.tobytes() == made.layers[4].tensors[1].array.tobytes()


def test_heads_are_neighbours_and_views() -> None:
    made = plain(n_pending=0)
    first, second = kvsnap.split(made, 2)
    whole = made.layers[0].tensors[0].array
    assert np.shares_memory(first.layers[0].tensors[0].array, whole)
    assert first.layers[0].tensors[0].array.tobytes() == whole[:2].tobytes()
    assert second.layers[0].tensors[0].array.tobytes() == whole[2:].tobytes()
    assert (second.num_heads, second.num_query_heads, second.tokens) == (2, 4, made.tokens)
    assert second.logits is made.logits
    assert second.sampler == made.sampler
    assert second.identity == made.identity
    assert str(second.shard) == "shard 1 of 2"


def test_an_empty_snapshot_and_one_without_logits() -> None:
    for made in (snapshot((), heads=4), snapshot((5,), heads=4, n_pending=1), snapshot(TOKENS, heads=4, vocab=0)):
        assert same(kvsnap.join(through_file(kvsnap.split(made, 2))), made) == []


def test_a_bound_stays_and_a_whole_that_is_not_exact_is_joined() -> None:
    made = kvsnap.loads(kvsnap.dumps(plain(), codec="q8"))
    assert made.bound > 0
    joined = kvsnap.join(through_file(kvsnap.split(made, 2)))
    assert same(joined, made) == []
    assert joined.bound == made.bound


@pytest.mark.parametrize("n", [0, 1, -2, 65_537])
def test_a_number_of_ranks_that_is_none(n: int) -> None:
    with pytest.raises(InputError, match="2 shards or more"):
        kvsnap.split(plain(), n)


def test_what_cannot_be_split_is_refused_with_both_numbers() -> None:
    with pytest.raises(UnsupportedError, match=r"layer 0: the 4 heads of layer0.k cannot be shared out to 3 ranks"):
        kvsnap.split(three := replace(plain(), layers=tuple(replace(x, num_query_heads=9) for x in plain().layers)), 3)
    with pytest.raises(UnsupportedError, match="layer 0: 9 query heads cannot be shared out to 2 ranks"):
        kvsnap.split(three, 2)
    with pytest.raises(UnsupportedError, match=r"3 heads .* to 2 ranks"):
        kvsnap.split(plain(heads=3), 2)
    with pytest.raises(InputError, match="partial capture"):
        kvsnap.split(plain(start=3), 2)
    with pytest.raises(InputError, match="only a whole snapshot is split"):
        kvsnap.split(kvsnap.split(plain(), 2)[0], 2)
    layer = plain().layers[0]
    more = Tensor(replace(layer.tensors[0].spec, id=77), layer.tensors[0].array)
    ragged = replace(plain(), layers=(replace(layer, tensors=(*layer.tensors, more)),))
    with pytest.raises(UnsupportedError, match="layer 0: the heads of k stand in 2 tensors"):
        kvsnap.split(ragged, 2)


# -- what does not belong together ---------------------------------------------------------------------------------


def other_value(s: Snapshot) -> Snapshot:
    """The same snapshot, one bit of one value apart."""
    t = s.layers[1].tensors[1]
    values = t.array.copy()
    values.reshape(-1).view(np.uint8)[-1] ^= 1
    layer = replace(s.layers[1], tensors=(s.layers[1].tensors[0], Tensor(t.spec, values)))
    return replace(s, layers=(s.layers[0], layer))


WRONG: dict[str, tuple[Callable[[Snapshot], list[Snapshot]], type[KvsnapError], str]] = {
    "swapped": (lambda s: [*reversed(kvsnap.split(s, 2))], InputError,
                "position 0 holds another shard.*found shard 1 of 2"),
    "swapped of four": (lambda s: [kvsnap.split(s, 4)[i] for i in (0, 2, 1, 3)], InputError,
                        "position 1 holds another shard; expected shard 1 of 4, found shard 2 of 4"),
    "missing": (lambda s: [kvsnap.split(s, 2)[0]], InputError, "shard 1 of 2 is missing; expected 2 shards, found 1"),
    "first missing": (lambda s: [kvsnap.split(s, 2)[1]], InputError, "shard 0 of 2 is missing"),
    "twice": (lambda s: [kvsnap.split(s, 2)[0]] * 2, InputError,
              "shard 0 of 2 is there twice; found positions 0 and 1"),
    "one too many": (lambda s: [*kvsnap.split(s, 2), kvsnap.split(s, 2)[1]], InputError, "there twice"),
    "another count": (lambda s: [kvsnap.split(s, 2)[0], kvsnap.split(s, 4)[1]], InputError,
                      "position 1 is a shard of another count; expected one of 2, found shard 1 of 4"),
    "none": (lambda _: [], InputError, "no shards were given"),
    "a whole": (lambda s: [kvsnap.split(s, 2)[0], s], InputError, "position 1 is no shard"),
    "of another length": (lambda s: [kvsnap.split(s, 2)[0], kvsnap.split(s.truncate(8), 2)[1]], InputError,
                          "position 1: number of tokens differs.*expected 12, found 8"),
    "of other tokens": (lambda s: [kvsnap.split(s, 2)[0], kvsnap.split(replace(s, tokens=(9, *s.tokens[1:])), 2)[1]],
                        InputError, "position 1: token 0 differs.*expected 3, found 9"),
    "one bit apart": (lambda s: [kvsnap.split(s, 2)[0], kvsnap.split(other_value(s), 2)[1]], InputError,
                      "position 1: shard 1 of 2 is a shard of another snapshot"),
    "another dtype": (lambda s: [kvsnap.split(s, 2)[0], kvsnap.split(plain(dtype="bfloat16"), 2)[1]], InputError,
                      "position 1: dtype of layer0.k differs.*expected float32, found bfloat16"),
    "another width": (lambda s: [kvsnap.split(s, 2)[0], kvsnap.split(plain(dim=6), 2)[1]], InputError,
                      r"position 1: shape of layer0.k differs"),
    "other heads": (lambda s: [kvsnap.split(s, 2)[0], kvsnap.split(plain(heads=2), 2)[1]], InputError,
                    "position 1: kinds of layers differs"),
    "other layers": (lambda s: [kvsnap.split(s, 2)[0], kvsnap.split(plain(layers=1), 2)[1]], InputError,
                     "position 1: number of layers differs.*expected 2, found 1"),
    "other positions": (lambda s: [kvsnap.split(s, 2)[0], kvsnap.split(
        replace(s, positions=(PositionRun(1, 11),)), 2)[1]], InputError, "position 1: positions differs"),
    "another model": (lambda s: [kvsnap.split(s, 2)[0], kvsnap.split(replace(s, identity=replace(
        s.identity, tokenizer="00")), 2)[1]], InputError, "position 1: identity differs"),
    "another sampler": (lambda s: [kvsnap.split(s, 2)[0], kvsnap.split(replace(s, sampler=None), 2)[1]], InputError,
                        "position 1: sampler differs"),
    "cut since": (lambda s: [x.truncate(8) for x in kvsnap.split(s, 2)], InputError,
                  "position 0: shard 0 of 2 was cut or added to since"),
    "a value changed since": (lambda s: [kvsnap.split(s, 2)[0], other_value(kvsnap.split(s, 2)[1])], DamagedError,
                              "position 1: shard 1 of 2 is not what was split"),
    "a copy changed since": (lambda s: [*kvsnap.split(s, 4)[:3], other_value(kvsnap.split(s, 4)[3])], DamagedError,
                             "position 3: shard 3 of 4 is not what was split"),
    "a repeated head changed since": (lambda s: [*kvsnap.split(s, 8)[:7], other_value(kvsnap.split(s, 8)[7])],
                                      DamagedError, "position 7: layer1.v is not what position 6 has"),
    "stored with loss": (lambda s: through_file(kvsnap.split(s, 2), codec="q8"), DamagedError,
                         "position 0: shard 0 of 2 is not what was split; its values may be off by up to"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_belong_together_is_refused(name: str) -> None:
    make, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        kvsnap.join(make(plain()))


@pytest.mark.parametrize("role", ["latent", "index", "conv", "logits"])
def test_a_copy_that_differs_is_found_and_named(role: str) -> None:
    made = mixed()
    shards = [*kvsnap.split(made, 2)]
    kvsnap.join(shards)  # the control

    def changed(t: Tensor) -> Tensor:
        values = t.array.copy()
        values.reshape(-1)[-1] += 1
        return Tensor(t.spec, values) if t.role == role else t

    s = shards[1]
    layers = tuple(replace(x, tensors=tuple(map(changed, x.tensors))) for x in s.layers)
    shards[1] = replace(s, layers=layers, logits=changed(s.logits) if s.logits else None)
    with pytest.raises(DamagedError, match=rf"position 1: \S*{role} is not what position 0 has"):
        kvsnap.join(shards)


def test_metadata_of_one_shard_is_not_that_of_the_whole() -> None:
    made = plain(metadata={"title": "t"})
    first, second = kvsnap.split(made, 2)
    second = replace(second, metadata={"title": "t", "rank": "1"})
    assert kvsnap.join([first, second]).metadata == {"title": "t"}


# -- files and sessions --------------------------------------------------------------------------------------------


def test_a_reader_made_from_the_spec_reads_a_shard_and_checks_its_digest() -> None:
    made = mixed()
    for i, shard in enumerate(kvsnap.split(made, 4)):
        reader = SpecReader(kvsnap.dumps(shard))
        found = reader.content()
        assert (found["shard"]["index"], found["shard"]["count"]) == (i, 4)
        assert found["tensors"]["layer4.recurrent"].tobytes() == shard.layers[4].tensors[0].array.tobytes()
        layout = reader.json("layout", LAYOUT)
        assert sorted(layout) == ["architecture", "shard"]  # what does not know of shards finds no tensors, and refuses
    changed = other_value(kvsnap.split(plain(), 2)[1])
    with pytest.raises(ValueError, match="digest of the shard"):
        SpecReader(kvsnap.dumps(changed)).content()


def test_a_file_made_from_the_spec_is_read_as_a_shard() -> None:
    m = Minimal()
    m.as_shard()
    found = kvsnap.loads(m.build())
    assert str(found.shard) == "shard 0 of 2"
    assert found.shard is not None
    assert found.shard.parts == ()
    assert SpecReader(m.build()).content()["shard"] == {"index": 0, "count": 2, "heads": [[0, 4], [1, 4]]}


BAD: dict[str, Callable[[Minimal], Any]] = {
    "index beyond": lambda m: m.as_shard(index=2),
    "index below": lambda m: m.as_shard(index=-1),
    "count of one": lambda m: m.as_shard(count=1),
    "count without end": lambda m: m.as_shard(count=2**62),
    "index as text": lambda m: m.as_shard(index="0"),
    "no heads": lambda m: m.as_shard(heads=None),
    "heads not named": lambda m: m.as_shard(heads=[[0, 4]]),
    "heads named twice": lambda m: m.as_shard(heads=[[0, 4], [1, 4], [1, 4]]),
    "heads of no tensor": lambda m: m.as_shard(heads=[[0, 4], [1, 4], [7, 4]]),
    "heads of logits": lambda m: m.as_shard(heads=[[0, 4], [1, 4], [9, 2]]),
    "other heads": lambda m: m.as_shard(heads=[[0, 4], [1, 8]]),
    "odd heads": lambda m: m.as_shard(heads=[[0, 4], [1, 3]]),
    "heads not pairs": lambda m: m.as_shard(heads=[[0, 4], [1, 4, 2]]),
    "heads below 0": lambda m: m.as_shard(heads=[[0, 4], [1, -4]]),
    "not an object": lambda m: m.layout.update(shard=5),
    "null": lambda m: m.layout.update(shard=None),
    "beside tensors": lambda m: m.layout.update(tensors=m.as_shard()["tensors"]),
    "too few digests": lambda m: (m.as_shard(), m.state.update(meta=b'{"shard":{"parts":["%s"],"starts":[]}}')),
    "digests of other digits": lambda m: (
        m.as_shard(), m.state.update(meta=json.dumps({"shard": {"parts": ["X" * 32] * 2, "starts": []}}).encode())),
    "no starts": lambda m: (
        m.as_shard(), m.state.update(meta=json.dumps({"shard": {"parts": ["0" * 32] * 2}}).encode())),
    "starts below 0": lambda m: (
        m.as_shard(),
        m.state.update(meta=json.dumps({"shard": {"parts": ["0" * 32] * 2, "starts": [[0, -1]]}}).encode())),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_description_that_does_not_add_up_is_refused(name: str) -> None:
    m = Minimal()
    BAD[name](m)
    with pytest.raises(FormatError, match="shard"):
        kvsnap.loads(m.build())


def test_the_turns_of_a_session_are_all_of_one_shard(tmp_path: Path) -> None:
    turns = [mixed(5), mixed(9), mixed(12)]
    static = turns[0].layers[5]  # static: what the first turn brought
    turns = [replace(t, layers=(*t.layers[:5], static, *t.layers[6:])) for t in turns]
    turns = [agreeing(turns, t) for t in turns]
    paths = [tmp_path / f"{i}.kvsnap" for i in range(2)]
    sessions = [Session.open(path) for path in paths]
    for turn in turns:
        for session, shard in zip(sessions, kvsnap.split(turn, 2), strict=True):
            session.append(shard)
        assert same(windows_cut(kvsnap.join([s.load() for s in sessions]), turn), turn) == []
    for wrong in (kvsnap.split(turns[2], 2)[1], turns[2], kvsnap.split(turns[2], 4)[0]):
        before = paths[0].read_bytes()
        with pytest.raises(CompatibilityError, match="all of one shard; expected shard 0 of 2"):
            sessions[0].append(wrong)
        assert paths[0].read_bytes() == before
    with Session.open(tmp_path / "whole.kvsnap") as whole:
        whole.append(turns[0])
        with pytest.raises(CompatibilityError, match="expected a whole snapshot, found shard 0 of 2"):
            whole.append(kvsnap.split(turns[1], 2)[0])
    for session in sessions:
        session.close()
    for path in paths:
        assert kvsnap.verify(path).ok


def agreeing(turns: list[Snapshot], turn: Snapshot) -> Snapshot:
    """The rows of the last turn, as far as this one goes: a history whose turns agree."""
    last = turns[-1]

    def cut(t: Tensor, mine: Tensor) -> Tensor:
        if t.spec.growth == "grow":
            return t.rows(0, mine.start + mine.n_rows)
        return mine

    layers = tuple(
        replace(x, tensors=tuple(cut(a, b) for a, b in zip(y.tensors, x.tensors, strict=True)))
        for x, y in zip(turn.layers, last.layers, strict=True)
    )
    return replace(turn, layers=layers)


def windows_cut(found: Snapshot, like: Snapshot) -> Snapshot:
    starts = {t.spec.id: t.start for t in like.tensors()}
    assert {t.spec.id: t.start for t in found.tensors()} == starts  # no row beyond those that were split
    return found


def test_a_cut_shard_proves_its_place_again_at_the_end_of_a_turn(tmp_path: Path) -> None:
    turns = [plain(n_pending=0, text=None).truncate(n) for n in (4, 9)] + [plain(n_pending=0, text=None)]
    sessions = [Session.open(tmp_path / f"{i}.kvsnap") for i in range(2)]
    for turn in turns:
        for session, shard in zip(sessions, kvsnap.split(turn, 2), strict=True):
            session.append(shard)
    assert same(kvsnap.join([s.load() for s in sessions]), turns[2]) == []
    for session in sessions:
        session.truncate(9)
    assert same(kvsnap.join([s.load() for s in sessions]), turns[1]) == []
    sessions[0].rewind(4)
    with pytest.raises(InputError, match="position 1: number of tokens differs"):
        kvsnap.join([s.load() for s in sessions])
    for session in sessions:
        session.truncate(7)
    loaded = [s.load() for s in sessions]
    assert [str(s.shard) for s in loaded] == ["shard 0 of 2", "shard 1 of 2"]
    with pytest.raises(InputError, match="position 0: shard 0 of 2 was cut or added to since"):
        kvsnap.join(loaded)
    for i, session in enumerate(sessions):
        session.rewind(3)
        session.compact()
        session.fork(tmp_path / f"fork{i}.kvsnap")
        session.close()
        kvsnap.repair(tmp_path / f"fork{i}.kvsnap", tmp_path / f"mended{i}.kvsnap")
    for name in ("", "fork", "mended"):
        assert same(kvsnap.join([kvsnap.load(tmp_path / f"{name}{i}.kvsnap") for i in range(2)]), turns[1]) == []


def test_forks_in_a_library_are_of_the_same_shard(tmp_path: Path) -> None:
    turns = [plain(n_pending=0, text=None).truncate(9), plain(n_pending=0, text=None)]
    with kvsnap.Library(tmp_path / "library") as library:
        for i in range(2):
            with library.open(f"rank{i}") as session:
                session.append(kvsnap.split(turns[0], 2)[i])
            library.fork(f"rank{i}", f"fork{i}")
            with library.open(f"fork{i}") as session:
                session.append(kvsnap.split(turns[1], 2)[i])
                with pytest.raises(CompatibilityError, match="all of one shard"):
                    session.append(kvsnap.split(turns[1], 2)[1 - i])
        for name, turn in (("rank", turns[0]), ("fork", turns[1])):
            shards = [kvsnap.load(library.session_path(f"{name}{i}")) for i in range(2)]
            assert same(kvsnap.join(shards), turn) == []


def test_an_encrypted_shard(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    key, made = bytes(range(32)), plain()
    shards = [kvsnap.loads(kvsnap.dumps(s, key=key), key=key) for s in kvsnap.split(made, 2)]
    assert same(kvsnap.join(shards), made) == []


@pytest.mark.parametrize("format_", ["mlxkv", "colikv"])
def test_a_format_without_a_place_for_it_tells_the_loss(format_: str, tmp_path: Path) -> None:
    shard = kvsnap.split(plain(sampler=None), 2)[0]
    if format_ == "colikv":
        rows = mixed().layers[3].tensors[:2]
        specs = [replace(t.spec, id=i, layer=0, rope="unknown", pairing="") for i, t in enumerate(rows)]
        tensors = tuple(Tensor(s, t.array) for s, t in zip(specs, rows, strict=True))
        whole = snapshot(TOKENS, layers=0, vocab=0)
        layers = (Layer(index=0, kind="latent", tensors=tensors, num_query_heads=4),)
        shard = kvsnap.split(replace(whole, layers=layers), 2)[0]
    report = kvsnap.save(shard, tmp_path / "x", format=format_, **({"vocab": 99} if format_ == "colikv" else {}))
    assert [x.what for x in report.losses if "shard 0 of 2" in x.detail] == ["shard"]
    kvsnap.save(shard, tmp_path / "y")
    with pytest.raises(LossError, match="that this is shard 0 of 2 is left out"):
        kvsnap.convert(tmp_path / "y", tmp_path / "z", format=format_, **({"vocab": 99} if format_ == "colikv" else {}))


# -- into an engine ------------------------------------------------------------------------------------------------


@pytest.mark.engine
def test_a_shard_is_not_restored_as_if_it_were_whole() -> None:
    pytest.importorskip("torch")
    from tiny_models import tiny_llama

    engine = kvsnap.connect(tiny_llama())
    list(kvsnap.generate(engine, list(b"A small model"), max_tokens=3))
    made = kvsnap.capture(engine, settle=True)
    shard = kvsnap.split(made, 2)[1]
    with pytest.raises(CompatibilityError, match=r"shard differ: saved shard 1 of 2.*accept=\['shard'\]"):
        kvsnap.restore(shard, engine)
    report = kvsnap.check(shard, engine)
    assert (report.ok, report.to_accept) == (False, ("shard",))
    with pytest.raises(CompatibilityError, match="layer 0 k: shape differs"):
        kvsnap.restore(shard, engine, accept=("shard",))  # this engine is no rank
    assert engine.tokens == made.tokens
    assert kvsnap.restore(kvsnap.join(kvsnap.split(made, 2)), engine).exact
    rank = kvsnap.connect(tiny_llama(num_attention_heads=2, num_key_value_heads=1))
    done = kvsnap.restore(shard, rank, accept=("shard", "weights", "config"))
    assert not done.exact
    assert any("shard 1 of 2" in note for note in done.notes)
    found = kvsnap.capture(rank)
    assert [t.array.tobytes() for t in found.tensors()] == [t.array.tobytes() for t in shard.tensors()]


@pytest.mark.engine
def test_a_latent_shard_looks_like_the_whole_and_is_still_refused() -> None:
    pytest.importorskip("torch")
    from tiny_models import tiny_llama

    engine = kvsnap.connect(tiny_llama())
    empty = kvsnap.capture(engine)
    latent = mixed().layers[3]
    whole = replace(empty, layers=(replace(latent, index=0),), tokens=TOKENS, n_rows=12, token_offset=12)
    shard = kvsnap.split(whole, 2)[0]
    assert [t.spec for t in shard.tensors()] == [t.spec for t in whole.tensors()]
    with pytest.raises(CompatibilityError, match="shard 0 of 2"):
        kvsnap.restore(shard, engine)


# -- on the command line -------------------------------------------------------------------------------------------


def call(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, Any, str]:
    code = run([str(a) for a in args])
    out, err = capsys.readouterr()
    return code, json.loads(out) if "--json" in args else out, err


def test_split_and_join_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, file = plain(), tmp_path / "story.kvsnap"
    kvsnap.save(made, file)
    code, data, _ = call(capsys, "split", file, "-n", 2, "--json")
    names = [tmp_path / f"story.shard-{i}-of-2.kvsnap" for i in range(2)]
    assert code == 0
    assert [(s["index"], s["path"]) for s in data["shards"]] == [(0, str(names[0])), (1, str(names[1]))]
    assert [s["nbytes"] for s in data["shards"]] == [n.stat().st_size for n in names]
    out = tmp_path / "again.kvsnap"
    assert call(capsys, "join", *names, "-o", out)[0] == 0
    assert same(kvsnap.load(out), made) == []
    assert call(capsys, "info", names[1], "--json")[1]["shard"] == {"index": 1, "count": 2}
    assert "shard 1 of 2" in call(capsys, "info", names[1])[1]
    assert "shard" not in call(capsys, "info", file)[1]
    assert call(capsys, "info", file, "--json")[1]["shard"] is None
    assert call(capsys, "verify", *names)[0] == 0

    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert call(capsys, "split", file, "-n", 2)[0] == 2  # they are there
    assert call(capsys, "join", *names, "-o", out)[0] == 2
    assert call(capsys, "split", file, "-n", 1)[0] == 2
    new = tmp_path / "new.kvsnap"
    for wrong, said in (
        (names[::-1], "position 0 holds another shard"),
        (names[:1], "shard 1 of 2 is missing"),
        ((names[0], names[0]), "there twice"),
        ((names[0], file), "position 1 is no shard"),
    ):
        code, data, _ = call(capsys, "join", *wrong, "-o", new, "--json")
        assert (code, data["error"]["kind"]) == (2, "input")
        assert said in data["error"]["message"]
    assert call(capsys, "split", file, "-n", 3)[0] == 12
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert call(capsys, "split", file, "-n", 4, "-o", tmp_path / "gone")[0] == 3
    (tmp_path / "ranks").mkdir()
    assert call(capsys, "split", file, "-n", 4, "-o", tmp_path / "ranks")[0] == 0
    assert len(list((tmp_path / "ranks").iterdir())) == 4
    assert call(capsys, "join", *names, "-o", out, "--overwrite")[0] == 0


def test_a_byte_of_a_shard_flipped_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / f"{i}.kvsnap" for i in range(2)]
    for path, shard in zip(paths, kvsnap.split(plain(), 2), strict=True):
        kvsnap.save(shard, path)
    at = paths[1].read_bytes().index(kvsnap.split(plain(), 2)[1].layers[1].tensors[1].array.tobytes()[:64])
    content = bytearray(paths[1].read_bytes())
    content[at] ^= 4
    paths[1].write_bytes(content)
    code, data, _ = call(capsys, "join", *paths, "-o", tmp_path / "out", "--json")
    assert (code, data["error"]["kind"]) == (6, "damaged")
    assert not (tmp_path / "out").exists()


def test_codes_are_not_split_by_heads() -> None:
    whole = plain()
    coded = replace(whole, layers=(replace(whole.layers[0], quantisation='{"bits":4}'), *whole.layers[1:]))
    with pytest.raises(UnsupportedError, match="layer 0: its keys and values are codes"):
        kvsnap.split(coded, 2)
    assert len(kvsnap.split(whole, 2)) == 2

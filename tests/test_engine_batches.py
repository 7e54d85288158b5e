"""Rows out of padded batches, and one snapshot in several rows: each goes on alone as the run without a batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvsnap  # noqa: E402 - after the extras are known to be there
from family_models import FAMILIES, build, known  # noqa: E402
from kvsnap import inspection  # noqa: E402
from kvsnap.engines._tf_layers import KINDS as LAYERS  # noqa: E402
from kvsnap.engines.transformers import TransformersEngine  # noqa: E402
from kvsnap.errors import InputError, UnsupportedError  # noqa: E402
from kvsnap.layout import Snapshot  # noqa: E402
from latent_models import TOP_K, latent_model  # noqa: E402
from latent_runs import bits, ids_of  # noqa: E402
from test_engine_layers import MODELS  # noqa: E402
from tiny_models import tiny_model  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.newest]

PROMPTS = ([7, 8, 9], [1, 2, 3, 4, 5, 6, 11], [21, 22, 23, 24, 25])
WIDTH, STEPS, ROUNDING = 7, 6, 1e-4
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "window of 4": ("mistral", {"sliding_window": 4}),
    "convolution": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "positions": (
        "bamba",
        {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1},
    ),
}
LATENT = {"latent": "deepseek_v3", "index": "deepseek_v32"}
STATES = ("recurrent", "hybrid", "convolution", "positions")
KINDS = (*MODELS, *MORE, *LATENT)
_models: dict[str, Any] = {}


def model_of(kind: str) -> Any:
    if kind not in _models:
        try:
            if kind in LATENT:
                _models[kind] = latent_model(LATENT[kind])
            else:
                family, changes = {**MODELS, **MORE}[kind]
                _models[kind] = tiny_model(family, 3, **changes)
            TransformersEngine(_models[kind])
        except (ValueError, KeyError, UnsupportedError) as error:
            pytest.skip(f"transformers {transformers.__version__}: {error}")
    return _models[kind]


def generated(engine: TransformersEngine, cache: str, ids: Any, **options: Any) -> Any:
    try:
        return engine.model.generate(
            ids, pad_token_id=0, return_dict_in_generate=True, **{engine._model.cache_keyword: engine.cache}, **options
        )
    except KeyError as error:
        if cache != "static":
            raise
        pytest.skip(f"transformers {transformers.__version__} has no mask for it in a static cache: {error}")


def padded(side: str = "left") -> tuple[Any, Any]:
    """The prompts as a rectangle with padding on one side, and their mask."""
    ids, mask = [], []
    for prompt in PROMPTS:
        fill = [0] * (WIDTH - len(prompt))
        ids.append(fill + prompt if side == "left" else prompt + fill)
        mask.append([0] * len(fill) + [1] * len(prompt) if side == "left" else [1] * len(prompt) + [0] * len(fill))
    return torch.tensor(ids), torch.tensor(mask)


def evaluated(cache: Any, columns: int) -> dict[str, int]:
    counts = any(hasattr(layer, "keys") for layer in cache.layers)
    return {} if counts else {"evaluated": columns}


def batch(kind: str, cache: str = "dynamic") -> tuple[TransformersEngine, Any]:
    """An engine with the batch that generate made of the prompts, and what generate returned."""
    model = model_of(kind)
    options = {"max_cache_len": 40} if cache == "static" else None
    engine = TransformersEngine(model, cache=cache, cache_options=options)
    ids, mask = padded()
    out = generated(engine, cache, ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False)
    engine.adopt(engine.cache, out.sequences, attention_mask=mask, **evaluated(engine.cache, WIDTH + STEPS - 1))
    return engine, out


def alone(kind: str, row: int) -> TransformersEngine:
    engine = TransformersEngine(model_of(kind))
    engine.prefill(PROMPTS[row])
    ids_of(engine, STEPS)
    return engine


def close(found: Snapshot, expected: Snapshot) -> float:
    """The greatest difference of any value, as a part of the greatest value of its tensor."""
    worst = 0.0
    for a, b in zip(found.tensors(), expected.tensors(), strict=True):
        assert (a.name, a.shape, a.start, a.spec.growth) == (b.name, b.shape, b.start, b.spec.growth)
        x, y = np.asarray(a.array, np.float64), np.asarray(b.array, np.float64)
        if x.size:
            worst = max(worst, float(np.abs(x - y).max() / np.abs(y).max()))
    return worst


@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_goes_on_alone_as_the_run_without_a_batch(kind: str, row: int, tmp_path: Any) -> None:
    engine, out = batch(kind)
    reference = alone(kind, row)
    kvsnap.save(engine.capture(row=row), tmp_path / "row.kvsnap")
    snapshot = kvsnap.load(tmp_path / "row.kvsnap")
    assert snapshot.tokens == (*PROMPTS[row], *out.sequences[row, WIDTH:].tolist())
    assert (snapshot.n_rows, snapshot.n_pending, snapshot.token_offset) == (
        len(PROMPTS[row]) + STEPS - 1, 1, len(PROMPTS[row]) + STEPS - 1,
    )  # fmt: skip
    if kind == "index" and snapshot.n_rows > TOP_K:
        return  # which of equal scores is picked depends on where they stand
    assert snapshot.tokens == reference.tokens
    assert close(snapshot, reference.capture()) < ROUNDING
    other = TransformersEngine(model_of(kind))
    kvsnap.restore(snapshot, other)
    assert ids_of(other, 8) == ids_of(reference, 8)
    other.settle()
    reference.settle()
    a, b = other.capture().logits, reference.capture().logits
    assert a is not None
    assert b is not None
    assert np.abs(a.array - b.array).max() < ROUNDING * np.abs(b.array).max()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", KINDS)
def test_cells_are_copied_bit_for_bit_and_those_of_padding_never(kind: str, cache: str) -> None:
    try:
        engine, _ = batch(kind, cache)
    except UnsupportedError as error:
        pytest.skip(str(error))
    columns = WIDTH + STEPS - 1
    for row, prompt in enumerate(PROMPTS):
        junk = WIDTH - len(prompt)
        before = bits(engine.capture(row=row))
        for layer in engine.cache.layers:
            if getattr(layer, "keys", None) is None:
                continue
            used = min(columns, layer.max_cache_len) if cache == "static" else layer.keys.shape[2]
            hidden = columns - used  # columns that left the window
            for tensor in (layer.keys, layer.values):
                tensor.data[row, :, : max(0, junk - hidden)] = float("nan")
            if getattr(layer, "indexer_keys", None) is not None:
                layer.indexer_keys.data[row, :junk] = float("nan")
        snapshot = engine.capture(row=row)
        assert inspection.non_finite(snapshot) == ()
        assert bits(snapshot) == before
        for made, layer in zip(snapshot.layers, engine.cache.layers, strict=True):
            if getattr(layer, "keys", None) is None:
                continue
            keys = layer.keys[row, :, : min(columns, layer.max_cache_len)] if cache == "static" else layer.keys[row]
            tensor = made.tensor("k") or made.tensor("latent")
            assert tensor is not None
            cells = keys[:, keys.shape[1] - tensor.n_rows :]
            assert torch.equal(torch.tensor(tensor.array), cells[0] if tensor.role == "latent" else cells)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_on_the_right_is_left_out_or_refused_by_name(kind: str) -> None:
    model = model_of(kind)
    engine = TransformersEngine(model)
    ids, mask = padded("right")
    cache = engine.cache
    with torch.no_grad():
        model(ids, attention_mask=mask, use_cache=True, **{engine._model.cache_keyword: cache})
    engine.adopt(cache, ids, attention_mask=mask, **evaluated(cache, WIDTH))
    for row, prompt in enumerate(PROMPTS):
        full = len(prompt) == WIDTH
        refused = not full and (kind in STATES or kind == "window of 4")
        if refused:
            what = "padding behind its last token" if kind in STATES else "padding took their place in the window"
            with pytest.raises(UnsupportedError, match=rf"layer \d: \w+ (has|holds).*{what}"):
                engine.capture(row=row)
            continue
        snapshot = engine.capture(row=row)
        assert snapshot.tokens == tuple(prompt)
        reference, other = TransformersEngine(model), TransformersEngine(model)
        reference.prefill(prompt)
        if full and (kind in STATES or kind == "window of 4"):
            # Without logits a state, or a window that moved, goes on with ids to come only.
            assert close(snapshot, reference.capture()) < ROUNDING
            with pytest.raises(UnsupportedError):
                other.install(snapshot)
            other.install(snapshot, prefix=True)
            with pytest.raises(UnsupportedError, match="there are no logits, and the last row cannot"):
                other.step()
            for one in (other, reference):
                one.prefill([3])
            assert ids_of(other, 6) == ids_of(reference, 6)
            continue
        other.install(snapshot)
        if kind != "index":
            assert ids_of(other, 6) == ids_of(reference, 6)


def test_rows_behind_padding_on_the_right_are_refused_without_their_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("full")
    ids, mask = padded("right")
    engine = TransformersEngine(model)
    out = generated(engine, "dynamic", ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False)
    engine.adopt(engine.cache, out.sequences, attention_mask=mask)
    for row, prompt in enumerate(PROMPTS):
        if len(prompt) == WIDTH:
            assert engine.capture(row=row).n_rows == WIDTH + STEPS - 1
            continue
        with pytest.raises(UnsupportedError, match="goes on at column 7 behind padding, at positions that are not"):
            engine.capture(row=row)
    # Control: generate counted them from 1 on, so these are not the rows of their positions.
    monkeypatch.setattr("kvsnap.engines._tf_capture.refuse_gap", lambda _: None)
    snapshot = engine.capture(row=0)
    other = TransformersEngine(model)
    other.prefill(snapshot.tokens[:-1])
    assert close(snapshot, replace(other.capture(), logits=None)) > 1e-2


def test_rows_behind_padding_on_the_right_are_captured_with_their_positions() -> None:
    model = model_of("full")
    ids, mask = padded("right")
    more = torch.tensor([[30, 3], [31, 4], [32, 5]])
    places = torch.tensor([[*range(WIDTH), len(prompt), len(prompt) + 1] for prompt in PROMPTS])
    engine = TransformersEngine(model)
    cache, whole = engine.cache, torch.cat([mask, torch.ones_like(more)], 1)
    with torch.no_grad():
        for first, stop, new in ((0, WIDTH, ids), (WIDTH, WIDTH + 2, more)):
            model(
                new, attention_mask=whole[:, :stop], position_ids=places[:, first:stop], use_cache=True,
                **{engine._model.cache_keyword: cache},
            )  # fmt: skip
    engine.adopt(cache, torch.cat([ids, more], 1), attention_mask=whole, position_ids=places)
    for row, prompt in enumerate(PROMPTS):
        snapshot = engine.capture(row=row)
        reference, other = TransformersEngine(model), TransformersEngine(model)
        reference.prefill(prompt)
        reference.prefill(more[row, :1].tolist())
        assert (snapshot.n_rows, snapshot.n_pending) == (len(prompt) + 1, 1)  # the last one is evaluated again
        assert close(snapshot, replace(reference.capture(), logits=None)) < ROUNDING
        reference.prefill(more[row, 1:].tolist())
        other.install(snapshot)
        assert ids_of(other, 6) == ids_of(reference, 6)


def test_padding_in_a_batch_of_minimax_is_refused_by_name() -> None:
    if not known(FAMILIES["minimax"]):
        pytest.skip(f"transformers {transformers.__version__} does not have it")
    model = build("minimax")
    engine = TransformersEngine(model)
    ids, mask = padded()
    out = generated(engine, "dynamic", ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False)
    engine.adopt(engine.cache, out.sequences, attention_mask=mask)
    for row in (0, 2):
        with pytest.raises(UnsupportedError, match="minimax does not keep padding on the left out of its states"):
            engine.capture(row=row)
    snapshot, other = engine.capture(row=1), TransformersEngine(model)
    other.install(snapshot)
    assert len(ids_of(other, 6)) == 6


@pytest.mark.parametrize("kind", ["full", "window", "recurrent", "hybrid"])
def test_what_was_filled_in_behind_the_end_is_left_out_or_refused(kind: str) -> None:
    model = model_of(kind)
    ids, mask = padded()
    plain = model.generate(ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False, pad_token_id=0)
    first = plain[:, WIDTH:].tolist()
    end = next(t for t in first[0][1:4] if t not in first[1] and t not in first[2] and t != first[0][0])
    engine = TransformersEngine(model)
    engine._ends = frozenset([end])
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False, pad_token_id=0, eos_token_id=end,
        return_dict_in_generate=True, **{engine._model.cache_keyword: engine.cache},
    )  # fmt: skip
    engine.adopt(engine.cache, out.sequences, attention_mask=mask, **evaluated(engine.cache, WIDTH + STEPS - 1))
    assert engine.capture(row=1).tokens == (*PROMPTS[1], *first[1])
    if kind != "full":
        with pytest.raises(UnsupportedError, match=r"padding (behind its last token|took their place in the window)"):
            engine.capture(row=0)
        return
    snapshot = engine.capture(row=0)
    said = first[0][: first[0].index(end) + 1]
    assert snapshot.tokens == (*PROMPTS[0], *said)
    reference, other = TransformersEngine(model), TransformersEngine(model)
    reference.prefill(PROMPTS[0])
    ids_of(reference, len(said))
    other.install(snapshot)
    assert ids_of(other, 6) == ids_of(reference, 6)


@pytest.mark.parametrize("kind", STATES)
def test_a_state_that_has_taken_up_padding_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(kind)
    forward = model.forward

    def careless(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("attention_mask", None)
        return forward(*args, **kwargs)

    engine, _ = batch(kind)
    engine.capture(row=0)
    monkeypatch.setattr(model, "forward", careless)
    engine._model.masks_padding.clear()
    with pytest.raises(UnsupportedError, match="does not keep padding on the left out of its states"):
        engine.capture(row=0)
    engine.capture(row=1)  # the one without padding


def states_of(layer: Any) -> list[Any]:
    live = LAYERS[type(layer).__name__].read(layer)
    return [tensor for role, tensor in live if role in ("conv", "recurrent")]


def apart(cache: Any, reference: TransformersEngine, prompt: list[int]) -> float:
    """How far the states of a padded sequence are from those of the sequence alone."""
    reference.prefill(prompt)
    ids_of(reference, STEPS)
    found, alone = ([s for x in one.layers for s in states_of(x)] for one in (cache, reference.cache))
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, alone, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_sequence_of_its_own_loses_its_padding(kind: str) -> None:
    model, prompt = model_of(kind), PROMPTS[2]
    engine, reference = TransformersEngine(model), TransformersEngine(model)
    ids, mask = padded()
    out = model.generate(
        ids[2:], attention_mask=mask[2:], max_new_tokens=STEPS, do_sample=False, return_dict_in_generate=True,
        pad_token_id=0, **{engine._model.cache_keyword: engine.cache},
    )  # fmt: skip
    counts = evaluated(engine.cache, WIDTH + STEPS - 1)
    try:
        engine.adopt(engine.cache, out.sequences, attention_mask=mask[2:], **counts)
    except UnsupportedError as error:  # before 5.24 nothing is masked in a batch of one
        if kind not in STATES or "does not keep padding on the left out of its states" not in str(error):
            raise
        assert apart(out[engine._model.cache_keyword], reference, prompt) > ROUNDING
        return
    assert engine.n_rows == len(prompt) + STEPS - 1
    reference.prefill(prompt)
    ids_of(reference, STEPS)
    if kind != "index":
        assert close(engine.capture(), reference.capture()) < ROUNDING
        assert ids_of(engine, 8) == ids_of(reference, 8)


# -- one snapshot in several rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_snapshot_in_several_rows_goes_on_in_each_and_each_alone(kind: str, cache: str) -> None:
    model = model_of(kind)
    options = {"max_cache_len": 64} if cache == "static" else None
    try:
        engine = TransformersEngine(model, cache=cache, cache_options=options)
    except UnsupportedError as error:
        pytest.skip(str(error))
    engine.prefill([5, 17, 42, 99, 3, 4, 8, 15, 16, 23])
    ids_of(engine, 3)
    snapshot = engine.capture()
    expected = bits(snapshot)
    kvsnap.restore(snapshot, engine, rows=3)
    assert engine.rows == 3
    assert [bits(engine.capture(row=row)) for row in range(3)] == [expected] * 3
    with pytest.raises(UnsupportedError, match="a batch of 3 sequences"):
        engine.step()
    for layer in engine.cache.layers:  # no row is in the memory of another one
        for name in ("keys", "values", "indexer_keys"):
            tensor = getattr(layer, name, None)
            assert tensor is None or (tensor.shape[0] == 3 and tensor.stride(0) > 0)

    given = torch.tensor([snapshot.tokens] * 3)
    mask = torch.ones_like(given)
    torch.manual_seed(5)
    out = generated(
        engine, cache, given, attention_mask=mask, do_sample=True, temperature=3.0, top_k=0, max_new_tokens=5
    )
    said = out.sequences[:, given.shape[1] :].tolist()
    assert len({tuple(row) for row in said}) == 3
    engine.adopt(
        engine.cache, out.sequences, attention_mask=mask, **evaluated(engine.cache, out.sequences.shape[1] - 1)
    )
    for row in range(3):
        one = engine.capture(row=row)
        assert one.tokens == (*snapshot.tokens, *said[row])
        other = TransformersEngine(model)
        other.install(one)
        reference = TransformersEngine(model)
        reference.install(snapshot)
        reference.settle()
        for token in said[row]:
            reference.prefill([token])
        if kind != "index":
            other.settle()
            assert close(other.capture(), reference.capture()) < ROUNDING
            assert ids_of(other, 6) == ids_of(reference, 6)
    assert bits(snapshot) == expected


@pytest.mark.parametrize("rows", [0, -1])
def test_a_batch_of_no_rows_is_refused(rows: int) -> None:
    engine = TransformersEngine(model_of("full"))
    engine.prefill([1, 2, 3])
    with pytest.raises(InputError, match="one row or more"):
        engine.install(engine.capture(), rows=rows)
    assert engine.n_rows == 3

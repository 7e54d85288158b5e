"""Speculative decoding: whatever a draft proposes, the tokens are those of the model alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvsnap  # noqa: E402 - after the extras are known to be there
from family_models import FAMILIES, build, known  # noqa: E402
from kvsnap.engines.models import load_model  # noqa: E402
from kvsnap.engines.transformers import TransformersEngine  # noqa: E402
from kvsnap.errors import CompatibilityError, ContextError, InputError, UnsupportedError  # noqa: E402
from kvsnap.speculation import Lookup, follow  # noqa: E402
from latent_runs import bits, ids_of  # noqa: E402
from test_engine_static import KINDS, make  # noqa: E402
from tiny_models import CONTEXT, PROMPT, ByteTokenizer, tiny_llama, tiny_model, tiny_qwen3  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.newest, pytest.mark.usefixtures("one_thread")]

CHECKED = tuple(kind for kind in KINDS if kind != "index")
IDS = [(11 * i * i + 5) % 251 for i in range(12)]
SAMPLER = kvsnap.Sampler(temperature=0.8, top_k=40, top_p=0.95, repetition_penalty=1.1, seed=11)


class Oracle:
    """A draft that knows what comes, and is wrong at every `wrong`-th place."""

    passes = 0

    def __init__(self, ids: tuple[int, ...], wrong: int = 0) -> None:
        self.ids, self.wrong = ids, wrong

    def propose(self, tokens: tuple[int, ...], most: int, sampler: Any) -> tuple[int, ...]:
        found = self.ids[len(tokens) : len(tokens) + most]
        return tuple(
            (i + 1) % 251 if self.wrong and (len(tokens) + at) % self.wrong == 0 else i for at, i in enumerate(found)
        )


def told(engine: TransformersEngine, draft: Any, n: int, n_draft: int = 4) -> kvsnap.Speculation:
    return kvsnap.Speculation(engine, draft, n, n_draft, stop_at_end=True)


def parted_at_an_edge(control: TransformersEngine, found: list[int], wanted: list[int]) -> bool:
    """Whether ids are others than wanted, from a place on where rounding of the logits decides between the two.

    A pass over several ids rounds otherwise than single steps, and how depends on the processor; a choice on the edge
    between two tokens may then be the other one. `control` stands before the first of them.
    """
    if found == wanted:
        return False
    at = next(i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)
    for _ in range(at):
        control.step()
    control.settle()
    logits = control.capture().logits.array
    noise, near = np.random.default_rng(0), set()
    for _ in range(400):
        moved = logits + noise.normal(0, 2e-5, logits.shape)
        near.add(kvsnap.sampling.choose(moved, control.tokens, control.sampler)[0])
    assert {found[at], wanted[at]} <= near, f"token {at} is {found[at]}, not {wanted[at]}, and not by rounding"
    return True


def test_another_token_is_no_rounding() -> None:
    control = make_begun("full")
    wanted = list(ids_of(make_begun("full"), 6))
    assert not parted_at_an_edge(control, wanted, wanted)
    with pytest.raises(AssertionError, match="not by rounding"):
        parted_at_an_edge(control, [*wanted[:3], (wanted[3] + 1) % 251, *wanted[4:]], wanted)


def make_begun(kind: str, cache: str = "dynamic", sampler: Any = SAMPLER) -> TransformersEngine:
    engine = make(kind, cache)
    engine.prefill(IDS)
    engine.sampler = kvsnap.sampling.start(sampler)
    return engine


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", CHECKED)
@pytest.mark.parametrize("sampler", [kvsnap.Sampler(seed=1), SAMPLER], ids=["greedy", "sampled"])
@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_the_tokens_are_those_of_the_model_alone(kind: str, cache: str, sampler: Any, wrong: int) -> None:
    engine, control = make_begun(kind, cache, sampler), make_begun(kind, cache, sampler)
    wanted = ids_of(control, 40)
    run = told(engine, Oracle(control.tokens, wrong), 40)
    if parted_at_an_edge(make_begun(kind, cache, sampler), [token.id for token in run], list(wanted)):
        return
    assert (engine.tokens, engine.sampler) == (control.tokens, control.sampler)
    assert run.done.tokens == 40
    assert run.done.acceptance == 1.0 if wrong == 0 else run.done.acceptance < 1.0
    if wrong == 0:
        assert run.done.passes <= 9
    engine.settle()
    control.settle()
    assert engine.n_rows == control.n_rows
    for a, b in zip(engine.capture().tensors(), control.capture().tensors(), strict=True):
        assert a.start == b.start
        np.testing.assert_allclose(a.array.astype(np.float64), b.array.astype(np.float64), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", CHECKED)
@pytest.mark.parametrize("wrong", [0, 3])
def test_leaving_at_any_token_leaves_just_what_was_handed_out(kind: str, cache: str, wrong: int) -> None:
    control = make(kind, cache)
    control.prefill(IDS)
    wanted = ids_of(control, 14)
    for n in (1, 2, 4, 5, 6, 13):
        engine = make(kind, cache)
        engine.prefill(IDS)
        run = told(engine, Oracle(control.tokens, wrong), 14)
        for _, token in zip(range(n), run, strict=False):
            assert engine.tokens[-1] == token.id
            assert engine.n_rows + engine.n_pending == len(engine.tokens)
        snapshot = engine.capture()
        assert snapshot.tokens == engine.tokens == (*IDS, *wanted[:n])
        assert snapshot.generated == tuple(wanted[:n])
        again = make(kind, cache)
        again.install(snapshot)
        assert bits(again.capture()) == bits(snapshot)
        # The iterator, the engine and the one that was restored all go on with the same.
        rest = ids_of(again, 14 - n)
        assert list(rest) == list(wanted[n:])
        assert [token.id for token in run] == list(wanted[n:])
        assert engine.tokens == again.tokens


@pytest.mark.parametrize("kind", CHECKED)
def test_what_was_saved_in_the_middle_of_a_pass_goes_on_bit_for_bit(kind: str, tmp_path: Any) -> None:
    engine = make(kind, "dynamic")
    engine.prefill(IDS)
    control = make(kind, "dynamic")
    control.prefill(IDS)
    ids_of(control, 20)
    for _, _token in zip(range(7), told(engine, Oracle(control.tokens, 4), 20), strict=False):
        pass
    kvsnap.save(kvsnap.capture(engine), tmp_path / "a.kvsnap")
    other = make(kind, "dynamic")
    done = kvsnap.restore(kvsnap.load(tmp_path / "a.kvsnap"), other)
    assert not done.exact
    assert any("together" in note for note in done.notes)
    assert ids_of(engine, 10) == ids_of(other, 10)
    engine.settle()
    other.settle()
    assert bits(engine.capture()) == bits(other.capture())
    assert engine.capture().logits.array.tobytes() == other.capture().logits.array.tobytes()


def test_rows_that_were_checked_are_labelled_and_others_are_not() -> None:
    engine, control = make("full", "dynamic"), make("full", "dynamic")
    for one in (engine, control):
        one.prefill(IDS)
    ids_of(control, 20)
    for _ in told(engine, Oracle(control.tokens), 12):
        pass
    assert "speculated" not in control.capture().metadata
    assert engine.capture().metadata["speculated"] == f"rows {len(IDS)} to {engine.n_rows - 1}"
    ids_of(engine, 5)
    assert "speculated" in engine.capture(start=engine.n_rows - 6).metadata
    assert "speculated" not in engine.capture(start=engine.n_rows - 4).metadata
    engine.rewind(len(IDS) + 1)
    assert engine.capture().metadata["speculated"] == f"rows {len(IDS)} to {len(IDS)}"
    engine.rewind(len(IDS))
    assert "speculated" not in engine.capture().metadata
    # What a snapshot says of its rows stays true of them, and is not lost to what comes after.
    again = make("full", "dynamic")
    again.install(control.capture())
    for _ in told(again, Oracle((*control.tokens, *IDS)), 4):
        pass
    assert again.capture().metadata["speculated"].startswith(f"rows {control.n_rows} to ")
    other = make("full", "dynamic")
    other.install(again.capture())
    ids_of(other, 3)
    assert other.capture().metadata == again.capture().metadata
    # A run without any proposal makes single steps, and is exact.
    for _ in told(engine, Oracle(()), 12):
        pass
    assert "speculated" not in engine.capture().metadata


@pytest.mark.parametrize("kind", CHECKED)
@pytest.mark.parametrize("draft_kind", CHECKED)
@pytest.mark.parametrize("sampler", [kvsnap.Sampler(seed=1), SAMPLER], ids=["greedy", "sampled"])
def test_a_draft_model_follows_whatever_its_layers_are(kind: str, draft_kind: str, sampler: Any) -> None:
    engine, control, draft = make(kind, "dynamic"), make(kind, "dynamic"), make(draft_kind, "dynamic")
    wanted = [token.id for token in kvsnap.generate(control, IDS, max_tokens=24, sampler=sampler)]
    run = kvsnap.speculate(engine, draft, IDS, max_tokens=24, sampler=sampler)
    if parted_at_an_edge(make_begun(kind, "dynamic", sampler), [token.id for token in run], wanted):
        return
    assert draft.tokens == engine.tokens[: len(draft.tokens)]
    if kind == draft_kind and kind != "recurrent":
        assert run.done.acceptance > 0.8
    # Turn two, after the draft fell behind: it evaluates what it has not seen, and nothing twice.
    more = [3, 1, 4, 1, 5]
    before, held = draft.evaluated, draft.n_rows
    wanted = [token.id for token in kvsnap.generate(control, more, max_tokens=8)]
    run = kvsnap.speculate(engine, draft, more, max_tokens=8)
    assert next(run).id == wanted[0]
    assert draft.evaluated - before <= len(engine.tokens) - held + 4
    assert [token.id for token in run] == wanted[1:]


def test_the_passes_of_the_model_are_counted_and_fewer() -> None:
    engine, draft = make("full", "dynamic"), make("full", "dynamic")
    engine.prefill(IDS)
    before = engine.forwards
    run = kvsnap.speculate(engine, draft, max_tokens=40)
    assert len(list(run)) == 40
    assert run.done.passes == engine.forwards - before == 8
    assert (run.done.proposed, run.done.accepted, run.done.saved) == (32, 32, 32)
    assert run.done.to_dict()["acceptance"] == 1.0


def test_lookup_proposes_what_followed_before() -> None:
    lookup, state = Lookup(), kvsnap.sampling.start()
    assert lookup.propose((1, 2, 3, 4, 5, 1, 2, 3), 2, state) == (4, 5)
    assert lookup.propose((9, 2, 3, 7, 1, 2, 3, 8, 2, 3), 4, state) == (8, 2, 3)
    assert lookup.propose((1, 2, 3, 4), 4, state) == ()
    assert lookup.propose((), 4, state) == lookup.propose((5,), 4, state) == ()
    engine, control = make("full", "dynamic"), make("full", "dynamic")
    prompt = IDS * 4
    wanted = [token.id for token in kvsnap.generate(control, prompt, max_tokens=30)]
    run = kvsnap.speculate(engine, "lookup", prompt, max_tokens=30)
    assert [token.id for token in run] == wanted


def test_a_draft_of_another_history_is_cut_to_what_is_the_same() -> None:
    draft = make("full", "dynamic")
    draft.prefill([*IDS, 1, 2, 3])
    evaluated = draft.evaluated
    follow(draft, (*IDS, 7))
    assert draft.tokens == (*IDS, 7)
    assert draft.evaluated - evaluated == 1
    follow(draft, tuple(IDS))
    assert draft.tokens == tuple(IDS)
    follow(draft, (9, 9))
    assert (draft.tokens, draft.n_rows) == ((9, 9), 2)


def test_near_the_end_of_the_context_fewer_are_proposed_and_then_both_numbers_are_named() -> None:
    engine = TransformersEngine(tiny_llama(max_position_embeddings=24))
    control = TransformersEngine(tiny_llama(max_position_embeddings=24))
    draft = TransformersEngine(tiny_llama(max_position_embeddings=24))
    wanted: list[int] = []
    got: list[int] = []
    with pytest.raises(ContextError):
        wanted.extend(token.id for token in kvsnap.generate(control, IDS, max_tokens=40))
    run = kvsnap.speculate(engine, draft, IDS, max_tokens=40)
    with pytest.raises(ContextError, match=r"25 positions.*holds 24"):
        got.extend(token.id for token in run)
    assert got == wanted
    assert engine.tokens == control.tokens
    assert len(got) == 12


def test_a_draft_with_a_shorter_context_proposes_as_long_as_it_can() -> None:
    engine, control = TransformersEngine(tiny_llama()), TransformersEngine(tiny_llama())
    draft = TransformersEngine(tiny_llama(max_position_embeddings=24))
    wanted = [token.id for token in kvsnap.generate(control, IDS, max_tokens=40)]
    run = kvsnap.speculate(engine, draft, IDS, max_tokens=40)
    assert [token.id for token in run] == wanted
    assert 8 <= run.done.accepted <= 12


def test_the_end_of_the_text_stops_and_what_was_proposed_behind_it_is_dropped() -> None:
    control = TransformersEngine(tiny_llama())
    plain = [token.id for token in kvsnap.generate(control, IDS, max_tokens=20)]
    end = plain[6]
    model = tiny_llama(eos_token_id=end)
    engine, draft = TransformersEngine(model), TransformersEngine(model)
    run = kvsnap.speculate(engine, draft, IDS, max_tokens=20)
    tokens = list(run)
    assert [token.id for token in tokens] == plain[: plain.index(end) + 1]
    assert tokens[-1].end
    assert engine.tokens[-1] == end
    assert engine.capture().n_pending == 1


def test_sampled_tokens_follow_the_distribution_of_the_model() -> None:
    engine, draft = make("full", "dynamic"), TransformersEngine(tiny_qwen3())
    engine.prefill(IDS)
    state = engine.capture()
    scores = state.logits.array.astype(np.float64) / 3.0
    wanted = np.exp(scores - scores.max())
    wanted /= wanted.sum()
    tops = np.argsort(-wanted)[:10]
    n = 400
    first, proposals = np.zeros(len(wanted)), np.zeros(len(wanted))
    for seed in range(n):
        engine.install(state)
        run = kvsnap.speculate(engine, draft, max_tokens=2, sampler=kvsnap.Sampler(temperature=3.0, seed=seed))
        first[next(run).id] += 1
        with draft.ahead():
            draft.sampler = kvsnap.sampling.start(kvsnap.Sampler(temperature=3.0, seed=seed))
            proposals[draft.step().id] += 1

    def distance(counts: Any) -> float:
        expected = np.append(wanted[tops], 1 - wanted[tops].sum()) * n
        found = np.append(counts[tops], n - counts[tops].sum())
        return float(((found - expected) ** 2 / expected).sum())

    # chi-square with 10 degrees of freedom: 29.6 is passed once in a thousand.
    assert distance(first) < 29.6
    assert distance(proposals) > 29.6  # taking what is proposed would be noticed


def test_what_cannot_be_a_draft_is_refused_before_anything_changes() -> None:
    engine = make("full", "dynamic")
    engine.prefill(IDS)
    before = bits(engine.capture())
    with pytest.raises(InputError, match="the engine itself"):
        kvsnap.speculate(engine, engine, [1], max_tokens=3)
    with pytest.raises(InputError, match="'lookup'"):
        kvsnap.speculate(engine, "mtp", [1], max_tokens=3)  # type: ignore[arg-type]
    small = TransformersEngine(tiny_llama(vocab_size=200))
    with pytest.raises(CompatibilityError, match="another vocabulary"):
        kvsnap.speculate(engine, small, [1], max_tokens=3)

    class Other(ByteTokenizer):
        def get_vocab(self) -> dict[str, int]:
            return {f"<{255 - value:02x}>": value for value in range(self.vocab_size)}

    one = TransformersEngine(tiny_llama(), ByteTokenizer())
    with pytest.raises(CompatibilityError, match="another tokenizer"):
        kvsnap.speculate(one, TransformersEngine(tiny_llama(), Other()), PROMPT, max_tokens=3)
    for name in ("max_tokens", "n_draft"):
        with pytest.raises(InputError, match=name):
            kvsnap.speculate(engine, "lookup", [1], **{"max_tokens": 3, name: 0})
    assert (engine.tokens, bits(engine.capture())) == (tuple(IDS), before)


def test_models_that_cannot_check_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="index"):
        kvsnap.speculate(make("index", "dynamic"), "lookup", IDS, max_tokens=3)
    with pytest.raises(UnsupportedError, match="one id at a time"):
        kvsnap.speculate(
            TransformersEngine(tiny_model("mamba", 3, attention="eager", state_size=8)), "lookup", IDS, max_tokens=3
        )
    pytest.importorskip("hqq")
    quantised = TransformersEngine(tiny_llama(), cache="quantised", cache_options={"backend": "hqq"})
    quantised.prefill(IDS)
    before = bits(quantised.capture())
    with pytest.raises(UnsupportedError, match="layer 0 is quantised"):
        kvsnap.speculate(quantised, "lookup", IDS, max_tokens=3)
    assert bits(quantised.capture()) == before


@pytest.mark.parametrize("kind", CHECKED)
def test_an_interrupted_check_changes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(kind, "dynamic")
    engine.prefill(IDS)
    engine.step()
    before, tokens = bits(engine.capture()), engine.tokens
    model, forward = type(engine._model), type(engine._model).evaluate

    def interrupted(*args: Any, **options: Any) -> Any:
        forward(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.verify([1, 2, 3])
    monkeypatch.undo()
    assert (bits(engine.capture()), engine.tokens, engine.take()) == (before, tokens, None)
    with pytest.raises(InputError, match="outside the vocabulary"):
        engine.verify([256])
    with pytest.raises(ContextError):
        engine.verify([1] * CONTEXT)
    assert (bits(engine.capture()), engine.tokens) == (before, tokens)


@pytest.mark.parametrize("kind", CHECKED)
def test_what_is_not_taken_is_dropped_by_any_other_call(kind: str) -> None:
    engine, control = make(kind, "dynamic"), make(kind, "dynamic")
    for one in (engine, control):
        one.prefill(IDS)
    wanted = control.step().id
    engine.verify([wanted, 1, 2])
    engine.settle()
    assert engine.take() is None
    assert engine.tokens == tuple(IDS)
    assert engine.step().id == wanted
    engine.verify([1, 2])
    engine.reset()
    assert (engine.take(), engine.tokens) == (None, ())
    engine.prefill(IDS)
    assert engine.step().id == wanted


def test_a_cut_keeps_what_is_said_of_the_rows_before_it() -> None:
    source, engine = make("full", "dynamic"), make("full", "dynamic")
    source.prefill(IDS)
    snapshot = source.capture()
    engine.install(dataclasses.replace(snapshot, metadata={"accepted": "weights differ"}))
    engine.rewind(4)
    assert engine.capture().metadata == {"accepted": "weights differ"}
    engine.prefill([1, 2])
    assert engine.capture(start=4).metadata == {}


@pytest.mark.smollm2
def test_smollm2_says_the_same_with_any_draft() -> None:
    loaded = load_model("smollm2", dtype="float32")
    prompt = (
        "def area(w, h):\n    return w * h\n\ndef volume(w, h, d):\n    return w * h * d\n\nOnce more:\n\ndef area("
    )
    control = TransformersEngine(loaded.model, loaded.tokenizer)
    wanted = [token.id for token in kvsnap.generate(control, prompt, max_tokens=32, stop_at_end=False)]
    vocab = loaded.model.config.vocab_size
    for draft in ("lookup", TransformersEngine(tiny_llama(vocab_size=vocab))):
        engine = TransformersEngine(loaded.model, loaded.tokenizer)
        run = kvsnap.speculate(engine, draft, prompt, max_tokens=32, stop_at_end=False)
        assert [token.id for token in run] == wanted
        assert run.done.passes < 32 if draft == "lookup" else run.done.acceptance < 0.2


@pytest.mark.parametrize("name", ["zamba2", "nemotron_h"])
def test_a_limit_on_time_steps_that_single_steps_do_not_have_is_refused(name: str) -> None:
    engine = TransformersEngine(family(name))
    with pytest.raises(UnsupportedError, match="limits its time steps"):
        kvsnap.speculate(engine, "lookup", IDS, max_tokens=3)
    assert engine.tokens == ()


@pytest.mark.parametrize("name", ["mamba2", "gemma3n", "gpt_oss", "deepseek_v3", "mixtral", "lfm2"])
def test_other_families_say_the_same(name: str) -> None:
    model, ids = family(name), [3, 7, 11, 19, 5, 8, 2, 9, 12, 4]
    engine, control = TransformersEngine(model), TransformersEngine(model)
    wanted = [token.id for token in kvsnap.generate(control, ids, max_tokens=20, sampler=SAMPLER, stop_at_end=False)]
    engine.prefill(ids)
    engine.sampler = kvsnap.sampling.start(SAMPLER)
    assert [token.id for token in told(engine, Oracle(control.tokens, 3), 20)] == wanted


def family(name: str) -> Any:
    if not known(FAMILIES[name]):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return build(name)

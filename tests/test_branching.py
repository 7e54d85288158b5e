"""Branches of one live sequence: each goes on as it would alone, and none touches another."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")


import kvsnap
from encdec_models import encdec_model, input_of
from kvsnap.errors import InputError, UnsupportedError
from test_engine_static import make

pytestmark = [pytest.mark.engine, pytest.mark.newest, pytest.mark.usefixtures("one_thread")]

PROMPT = [(7 * i * i + 3 * i + 5) % 251 for i in range(20)]
ASKED = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14], [15]]
HOT = kvsnap.Sampler(temperature=1.2, seed=4)
KINDS = ("full", "window", "window and full", "recurrent", "hybrid")


def begun(kind: str, cache: str = "dynamic") -> Any:
    engine = make(kind, cache)
    list(kvsnap.generate(engine, PROMPT, max_tokens=4, sampler=HOT))
    return engine


def ran(engine: Any, prompt: Any, count: int = 6) -> tuple[list[int], bytes]:
    ids = [t.id for t in kvsnap.generate(engine, prompt, max_tokens=count)]
    engine.settle()
    return ids, state(engine)


def state(engine: Any) -> bytes:
    """Every bit of the cache and the logits."""
    return b"".join(t.array.tobytes() for t in kvsnap.capture(engine).tensors())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_each_branch_goes_on_as_it_would_alone(kind: str, cache: str) -> None:
    alone = []
    for prompt in ASKED:
        engine = begun(kind, cache)
        engine.settle()
        alone.append(ran(engine, prompt))
    engine = begun(kind, cache)
    engine.settle()
    before, forwards = state(engine), engine.forwards
    with kvsnap.branch(engine, len(ASKED)) as branches:
        # by turns, a token each, so that what one leaves behind would show in the next
        streams = [one.generate(prompt, max_tokens=6) for one, prompt in zip(branches, ASKED, strict=True)]
        ids: list[list[int]] = [[] for _ in streams]
        for _ in range(6):
            for place, stream in enumerate(streams):
                ids[place].append(next(stream).id)
        for one, found, (wanted, bits) in zip(branches, ids, alone, strict=True):
            assert found == wanted
            one.use().settle()
            assert state(one.use()) == bits
        assert engine.forwards - forwards == len(ASKED) * 7, "the prompt was evaluated again"
        assert len({tuple(line) for line in ids}) > 1
    assert state(engine) == before


def test_five_branches_with_the_same_prompt_are_equal_and_another_random_state_is_not() -> None:
    engine = begun("full")
    with kvsnap.branch(engine, 6) as branches:
        found = [ran(one.use(), [3, 4]) for one in branches[:5]]
        assert found.count(found[0]) == 5
        other = [t.id for t in branches[5].generate([3, 4], max_tokens=6, sampler=kvsnap.Sampler(temperature=1.2))]
    assert other != found[0][0]


def test_a_branch_that_shared_its_cache_with_a_sibling_would_be_noticed() -> None:
    engine = begun("full", "static")
    with kvsnap.branch(engine, 2) as branches:
        one, two = branches
        one.prefill([1, 2])
        two.prefill([1, 2])
        wanted = state(one.use())
        two.use().cache.layers[0].keys[:, :, 3] += 1
        assert state(one.use()) == wanted
        one.use().cache.layers[0].keys[:, :, 3] += 1
        assert state(one.use()) != wanted


def test_tokens_and_counts_of_a_branch_that_is_not_live() -> None:
    engine = begun("full")
    start = engine.tokens
    with kvsnap.branch(engine, 2) as branches:
        one, two = branches
        assert (one.tokens, two.n_rows, branches.live) == (start, len(start), None)
        one.prefill([1])
        assert (branches.live, one.is_live) == (one, True)
        two.prefill([2, 3])
        assert (one.tokens, one.n_rows) == ((*start, 1), len(start) + 1)
        assert (two.tokens, engine.tokens) == ((*start, 2, 3),) * 2
        late = branches.add()
        assert (late.tokens, len(branches), late.number) == (start, 3, 2)
        assert one.capture(settle=True).tokens == one.tokens
    assert engine.tokens == start
    with pytest.raises(InputError, match="closed"):
        one.prefill([4])
    branches.close()


def test_switching_makes_no_copy_and_reads_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = begun("full")
    branches = kvsnap.branch(engine, 2)
    for one in branches:
        one.use()

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("not needed to switch")

    for name in ("install", "capture", "identity"):
        monkeypatch.setattr(type(engine), name, refuse)
    kept = branches[0].use().cache
    branches[1].use()
    assert branches[0].use().cache is kept


def test_a_branch_that_finds_no_memory_leaves_the_engine_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = begun("full")
    branches = kvsnap.branch(engine, 2)
    branches[0].prefill([1])
    before = state(engine)

    def full(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(type(engine), "install", full)
        with pytest.raises(MemoryError):
            branches[1].prefill([2])
    assert branches.live is branches[0]
    assert state(engine) == before
    branches[1].prefill([2])
    assert branches[0].tokens != branches[1].tokens


def test_a_state_is_taken_up_once_and_in_its_own_engine() -> None:
    engine, other = begun("full"), begun("full")
    aside = engine.set_aside()
    assert engine.tokens == ()
    with pytest.raises(InputError, match="another engine"):
        other.take_up(aside)
    engine.take_up(aside)
    with pytest.raises(InputError, match="already"):
        engine.take_up(aside)


def test_what_cannot_be_branched_is_refused() -> None:
    engine = make("full", "dynamic")
    with pytest.raises(InputError, match="no tokens"):
        kvsnap.branch(engine, 2)
    engine.prefill(PROMPT)
    with pytest.raises(InputError, match="1 or more, found 0"):
        kvsnap.branch(engine, 0)
    engine.install(kvsnap.capture(engine), rows=2)
    with pytest.raises(UnsupportedError, match="batch of 2"):
        kvsnap.branch(engine, 2)


def test_branches_of_an_encoder_decoder_keep_its_input() -> None:
    engine = kvsnap.connect(encdec_model("t5"))
    engine.encode(**input_of("t5"))
    engine.prefill([1, 20, 21])
    alone = [ran(engine, [30], 3)[0]]
    engine.rewind(3)
    with kvsnap.branch(engine, 2) as branches:
        assert [[t.id for t in one.generate([30], max_tokens=3)] for one in branches] == alone * 2
        assert branches[1].use().encoded is not None

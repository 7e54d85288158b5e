"""Choosing a token: random numbers from the published algorithm, each filter against a plain reference, and replay."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsnap import sampling
from kvsnap.errors import FormatError, InputError
from kvsnap.layout import RandomState, Sampler, SamplerState

SPEC = Path(__file__).parent.parent / "docs" / "spec" / "file.md"
MASK = 2**64 - 1


def philox4x64(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x64-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011)."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        p0, p1 = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (p1 >> 64) ^ c1 ^ k0, p1 & MASK, (p0 >> 64) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return c0, c1, c2, c3


def test_the_reference_is_philox() -> None:
    # The known answers that the authors publish with Random123 (kat_vectors, philox4x64 10).
    assert philox4x64((0, 0), (0, 0, 0, 0)) == (
        0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B,
    )  # fmt: skip
    assert philox4x64((MASK, MASK), (MASK, MASK, MASK, MASK)) == (
        0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0,
    )  # fmt: skip


@given(st.integers(0, MASK), st.integers(0, 2**63 - 2) | st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_a_number_is_what_section_9_says(seed: int, i: int) -> None:
    word = philox4x64((seed, 0), (i + 1, 0, 0, 0))[0]
    number, after = sampling.uniform(RandomState(seed, i))
    assert number == (word >> 11) * 2.0**-53
    assert 0 <= number < 1
    assert after == RandomState(seed, i + 1)


def test_the_words_in_the_spec_are_right() -> None:
    found = re.search(r"first words for seed 7 are ([^.]*)\.", SPEC.read_text())
    assert found
    words = [int(word, 16) for word in re.findall(r"`([0-9a-f]{16})`", found[1])]
    assert words == [philox4x64((7, 0), (i + 1, 0, 0, 0))[0] for i in range(3)]


def test_numbers_are_uniform_and_independent_of_each_other() -> None:
    state, found = RandomState(5), []
    for _ in range(20_000):
        number, state = sampling.uniform(state)
        found.append(number)
    counts = np.histogram(found, bins=20, range=(0, 1))[0]
    assert ((counts - 1000.0) ** 2 / 1000).sum() < 60  # chi squared, 19 degrees of freedom: p below 1e-5
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.03


def test_another_algorithm_is_refused() -> None:
    with pytest.raises(FormatError, match="philox4x64"):
        sampling.uniform(RandomState(1, 0, "mt19937"))


# -- the filters ----------------------------------------------------------------------------------------------


def reference(logits: Any, history: Any, s: Sampler) -> dict[int, float]:
    """Candidates and their probabilities, one step after the other, without cleverness."""
    scores = [float(np.float32(x)) for x in logits]
    for token in set(history):
        scores[token] = (
            scores[token] / s.repetition_penalty if scores[token] > 0 else scores[token] * s.repetition_penalty
        )
    if s.temperature == 0:
        return {scores.index(max(scores)): 1.0}
    top = max(scores)
    scores = [(x - top) / s.temperature for x in scores]
    ids = list(range(len(scores)))
    if 0 < s.top_k < len(scores):
        least = sorted(scores, reverse=True)[s.top_k - 1]
        ids = [i for i in ids if scores[i] >= least]
    weight = {i: math.exp(scores[i]) for i in ids}
    if s.top_p < 1:
        total, before, kept = sum(weight.values()), 0.0, []
        for i in sorted(ids, key=lambda i: (-weight[i], i)):
            if before >= s.top_p * total:
                break
            kept.append(i)
            before += weight[i]
        weight = {i: weight[i] for i in sorted(kept)}
    if s.min_p > 0:
        most = max(weight.values())
        weight = {i: w for i, w in weight.items() if w >= s.min_p * most}
    total = sum(weight.values())
    return {i: w / total for i, w in weight.items() if w}


def pick(logits: Any, history: Any, s: Sampler, number: float, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sampling, "uniform", lambda state: (number, state))
    return sampling.choose(np.asarray(logits, np.float32), history, sampling.start(s))[0]


SETTINGS = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 5.0},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_k above the vocabulary": {"temperature": 1.0, "top_k": 10_000},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "top_p of nearly nothing": {"temperature": 1.0, "top_p": 1e-12},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "penalty": {"temperature": 1.0, "repetition_penalty": 1.7},
    "reward": {"temperature": 1.0, "repetition_penalty": 0.5},
    "all": {"temperature": 0.9, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1},
    "greedy with a penalty": {"repetition_penalty": 3.0},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_filters_against_a_plain_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s = Sampler(**SETTINGS[name], seed=1)
    rng = np.random.default_rng(len(name))
    changed = 0
    for _ in range(60):
        logits = rng.normal(0, 3, 30).astype(np.float32)
        logits[rng.integers(30)] = -np.inf
        history = rng.integers(0, 30, 8).tolist()
        expected = reference(logits, history, s)
        changed += len(expected) < 29
        edges = np.cumsum(list(expected.values()))
        ids = list(expected)
        # In the middle of each candidate's stretch of [0, 1), so that rounding at the edges does not matter.
        for i, (low, high) in enumerate(zip([0.0, *edges[:-1]], edges, strict=True)):
            if high - low > 1e-9:
                assert pick(logits, history, s, (low + high) / 2, monkeypatch) == ids[i]
        for number in (0.0, 1 - 2**-53):
            assert pick(logits, history, s, number, monkeypatch) in expected
    assert changed or not {"top_k", "top_p", "min_p"} & {k for k, v in SETTINGS[name].items() if v != 10_000}


def test_greedy_takes_the_first_of_equal_maxima_and_draws_nothing() -> None:
    state = sampling.start(Sampler(seed=3))
    for dtype in (np.float32, np.float16, np.float64, ml_dtypes.bfloat16):
        token, logprob, after = sampling.choose(np.array([1, 5, 5, 2], dtype), (), state)
        assert token == 1
        assert after == state
        assert logprob == pytest.approx(5 - math.log(math.e + 2 * math.e**5 + math.e**2), abs=1e-12)


def test_the_log_probability_is_that_of_the_untouched_logits() -> None:
    logits = np.array([0.0, 1.0, 2.0], np.float32)
    s = Sampler(temperature=0.1, top_k=1, repetition_penalty=9.0, seed=1)
    token, logprob, _ = sampling.choose(logits, (2,), sampling.start(s))
    assert token == 1
    assert logprob == pytest.approx(1 - math.log(1 + math.e + math.e**2), abs=1e-12)


def test_the_distribution_is_the_softmax() -> None:
    logits = np.array([0.0, 1.0, 2.0, -1.0], np.float32)
    weights = np.exp(logits / 0.8)
    state, counts = sampling.start(Sampler(temperature=0.8, seed=11)), np.zeros(4)
    for _ in range(20_000):
        token, _, state = sampling.choose(logits, (), state)
        counts[token] += 1
    expected = 20_000 * weights / weights.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 28  # 3 degrees of freedom: p below 1e-5
    uniform = np.full(4, 5000.0)
    assert ((counts - uniform) ** 2 / uniform).sum() > 28  # the control


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-30, 1e300])
def test_temperatures_at_the_edge_of_floats(temperature: float) -> None:
    logits = np.array([3.0, 88.0, -7.0, 88.0], np.float32)
    for seed in range(20):
        token = sampling.choose(logits, (), sampling.start(Sampler(temperature=temperature, seed=seed)))[0]
        assert token in ({1, 3} if temperature < 1 else {0, 1, 2, 3})


# -- the state ----------------------------------------------------------------------------------------------


def walk(state: SamplerState, n: int, rng_seed: int = 2) -> tuple[list[int], SamplerState]:
    """n tokens from logits that depend on the tokens so far, as those of a model do."""
    history: list[int] = []
    for _ in range(n):
        seed = sum((i + 1) * t for i, t in enumerate(history)) + rng_seed
        logits = np.random.default_rng(seed).normal(0, 1, 50).astype(np.float32)
        token, _, state = sampling.choose(logits, history, state)
        history.append(token)
    return history, state


def test_the_state_decides_and_settings_alone_do_not() -> None:
    settings_ = Sampler(temperature=1.0, seed=9)
    whole, end = walk(sampling.start(settings_), 12)
    assert walk(sampling.start(settings_), 12) == (whole, end)
    assert end.random == RandomState(9, 12)
    # The next number with the state restored, and without it: the second is that of the first token again.
    logits = np.zeros(1000, np.float32)
    restored = sampling.choose(logits, (), end)[0]
    assert sampling.choose(logits, (), replace(end, random=RandomState(9, 12)))[0] == restored
    assert sampling.choose(logits, (), sampling.start(settings_))[0] != restored  # the control
    assert sampling.choose(logits, (), replace(end, random=RandomState(8, 12)))[0] != restored


def test_a_penalty_on_ids_outside_the_vocabulary_is_refused() -> None:
    logits = np.zeros(4, np.float32)
    for bad in (-1, 4):
        with pytest.raises(InputError, match="outside the vocabulary"):
            sampling.choose(logits, (1, bad), sampling.start(Sampler(repetition_penalty=2.0)))
        assert sampling.choose(logits, (1, bad), sampling.start(Sampler()))[0] == 0  # nothing looks at the history


def test_without_a_seed_one_is_taken_and_recorded() -> None:
    a, b = sampling.start(Sampler(temperature=1.0)), sampling.start(Sampler(temperature=1.0))
    assert a.random.seed != b.random.seed
    assert a.settings.seed is None
    assert walk(a, 5) == walk(a, 5)


@pytest.mark.parametrize("logits", [[1.0, math.nan], [math.inf, 1.0], [-math.inf, -math.inf], [], [[1.0]]], ids=repr)
def test_logits_that_decide_nothing_are_refused(logits: Any) -> None:
    with pytest.raises(InputError, match="finite"):
        sampling.choose(np.array(logits, np.float32), (), sampling.start(Sampler()))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}, {"temperature": "1"},
        {"temperature": True}, {"temperature": 10**400}, {"top_k": -1}, {"top_k": 1.5}, {"top_k": None},
        {"top_k": 2**40}, {"top_p": 0}, {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": 1.1}, {"repetition_penalty": 0},
        {"repetition_penalty": math.inf}, {"seed": -1}, {"seed": 2**64}, {"seed": 0.5}, {"seed": "7"},
    ],
    ids=repr,
)  # fmt: skip
def test_settings_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    name = next(iter(fields))
    with pytest.raises(InputError, match=name):
        Sampler(**fields)


def test_settings_of_numpy_are_taken_as_numbers() -> None:
    s = Sampler(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint64(2**64 - 1))  # type: ignore[arg-type]
    assert (type(s.temperature), type(s.top_k), type(s.seed)) == (float, int, int)
    assert s == Sampler(temperature=0.5, top_k=3, seed=2**64 - 1)
    assert Sampler(temperature=1).temperature == 1.0

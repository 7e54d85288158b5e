"""Assisted generation of transformers on a cache of the engine: what is given to it, and what is handed back."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvsnap  # noqa: E402 - after the extras are known to be there
from kvsnap.engines.transformers import TransformersEngine  # noqa: E402
from kvsnap.errors import InputError  # noqa: E402
from latent_runs import bits, ids_of  # noqa: E402
from test_engine_static import make  # noqa: E402
from tiny_models import tiny_qwen3  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.newest, pytest.mark.usefixtures("one_thread")]

IDS = [(11 * i * i + 5) % 251 for i in range(12)]
NEW = 12
NEVER = 251
"""An end token that never comes: the look-up of older releases needs one."""
KINDS = ("full", "window", "window and full")
GIVEN = inspect.signature(transformers.GenerationMixin.prepare_inputs_for_generation).parameters
EVALUATES_ALL = "next_sequence_length" in GIVEN
"""Whether the first pass takes all ids that are given, whatever the cache holds; older releases count what is there."""


def assisted(engine: TransformersEngine, how: str, ids: Any, **options: Any) -> Any:
    """The user's own call; skipped where this release refuses it for the layers."""
    given = {"assistant_model": tiny_qwen3()} if how == "assistant" else {"prompt_lookup_num_tokens": 4}
    try:
        return engine.model.generate(
            ids, past_key_values=engine.cache, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True,
            eos_token_id=NEVER, **given, **options,
        )  # fmt: skip
    except ValueError as error:
        if "Cannot `crop`" not in str(error):
            raise
        pytest.skip(f"transformers {transformers.__version__}: {error}")


def cache_of(out: Any) -> Any:
    found = getattr(out, "cache", None)
    return out.past_key_values if found is None else found


def plain(kind: str) -> list[int]:
    control = make(kind, "dynamic")
    control.prefill(IDS)
    return list(ids_of(control, NEW + 10))


def goes_on(engine: TransformersEngine, kind: str, wanted: list[int], tmp_path: Path) -> None:
    """What was adopted is captured, saved, restored and goes on, with the ids of plain decoding."""
    assert engine.tokens == (*IDS, *wanted[:NEW])
    assert (engine.n_rows, engine.n_pending) == (len(IDS) + NEW - 1, 1)
    kvsnap.save(kvsnap.capture(engine), tmp_path / "a.kvsnap")
    other = make(kind, "dynamic")
    done = kvsnap.restore(kvsnap.load(tmp_path / "a.kvsnap"), other)
    assert not done.exact
    assert any("together with proposals" in note for note in done.notes)
    assert bits(other.capture()) == bits(engine.capture())
    assert list(ids_of(engine, 10)) == list(ids_of(other, 10)) == wanted[NEW:]


@pytest.mark.parametrize("how", ["assistant", "lookup"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_from_an_empty_cache_is_taken_over(kind: str, how: str, tmp_path: Path) -> None:
    wanted, engine = plain(kind), make(kind, "dynamic")
    ids = torch.tensor([IDS])
    out = assisted(engine, how, ids, attention_mask=torch.ones_like(ids))
    assert out.sequences[0].tolist() == [*IDS, *wanted[:NEW]]
    engine.adopt(cache_of(out), out.sequences, prompt=len(IDS), together=True)
    goes_on(engine, kind, wanted, tmp_path)


@pytest.mark.parametrize("how", ["assistant", "lookup"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_cache_is_given_what_it_has_not_seen_and_a_mask_of_all(kind: str, how: str, tmp_path: Path) -> None:
    wanted, source, engine = plain(kind), make(kind, "dynamic"), make(kind, "dynamic")
    source.prefill(IDS[:-1])
    kvsnap.save(kvsnap.capture(source), tmp_path / "before.kvsnap")
    kvsnap.restore(kvsnap.load(tmp_path / "before.kvsnap"), engine)
    known = torch.tensor([IDS[:-1]])[:, : None if EVALUATES_ALL else 0]
    given = torch.tensor([IDS])[:, known.shape[1] :]
    out = assisted(engine, how, given, attention_mask=torch.ones(1, len(IDS), dtype=torch.long))
    sequence = torch.cat((known, out.sequences), 1)
    engine.adopt(cache_of(out), sequence, prompt=len(IDS), together=True)
    goes_on(engine, kind, wanted, tmp_path)


@pytest.mark.skipif(not EVALUATES_ALL, reason=f"transformers {transformers.__version__} counts what is there")
@pytest.mark.parametrize("how", ["assistant", "lookup"])
def test_all_ids_on_a_filled_cache_are_evaluated_twice_which_adopt_notices(how: str) -> None:
    engine = make("full", "dynamic")
    engine.prefill(IDS[:-1])
    ids = torch.tensor([IDS])
    out = assisted(engine, how, ids, attention_mask=torch.ones_like(ids))
    assert out.sequences[0].tolist() != [*IDS, *plain("full")[:NEW]]
    with pytest.raises(InputError, match="do not fit the cache"):
        engine.adopt(cache_of(out), out.sequences, prompt=len(IDS), together=True)


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_layers_with_states_are_refused_by_transformers_and_the_engine_is_as_before(kind: str) -> None:
    engine = make(kind, "dynamic")
    engine.prefill(IDS)
    before = bits(engine.capture())
    with pytest.raises(ValueError, match="stateful"):
        assisted(engine, "lookup", torch.tensor([IDS[-1:]]))
    assert bits(engine.capture()) == before


def test_a_run_that_was_not_assisted_is_exact() -> None:
    engine = make("full", "dynamic")
    ids = torch.tensor([IDS])
    out = engine.model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=engine.cache, max_new_tokens=NEW, do_sample=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    engine.adopt(cache_of(out), out.sequences, prompt=len(IDS))
    assert kvsnap.restore(engine.capture(), make("full", "dynamic")).exact

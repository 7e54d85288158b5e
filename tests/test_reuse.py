"""The longest stored beginning of a prompt: what is reused, what is evaluated, and the counts of both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvsnap  # noqa: E402 - after the extras are known to be there
from kvsnap.engines.transformers import TransformersEngine  # noqa: E402
from kvsnap.errors import CompatibilityError, ContextError, InputError  # noqa: E402
from latent_runs import bits, ids_of  # noqa: E402
from test_engine_static import make  # noqa: E402
from tiny_models import tiny_llama  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.newest]

TURNS = ([5, 17, 42, 99, 3, 4, 8, 15, 16, 23], [1, 2, 3, 4])
NEW = [201, 202, 203]
STATES = ("recurrent", "hybrid")
KINDS = ("full", "window", "window and full", "index", *STATES)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def stored(kind: str, tmp_path: Any) -> Iterator[tuple[kvsnap.Session, list[int]]]:
    """A session of two turns, each with all evaluated at its end, and the lengths at which they end."""
    engine, ends = make(kind, "dynamic"), []
    with kvsnap.Session.open(tmp_path / "two.kvsnap") as session:
        for turn in TURNS:
            engine.prefill(turn)
            ids_of(engine, 3)
            engine.settle()
            session.append(engine.capture(start=session.n_rows))
            ends.append(len(engine.tokens))
        yield session, ends


def logits(engine: TransformersEngine) -> bytes:
    found = engine.capture().logits
    assert found is not None
    return found.array.tobytes()


def counted(engine: TransformersEngine, source: Any, ids: Any, **options: Any) -> tuple[kvsnap.Restored, int]:
    """Reuse, and compare the numbers with what the forward of the model was given."""
    model, given = engine.model, []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, args: given.append(args[0].shape[1]))
    done = kvsnap.reuse(source, engine, ids, **options)
    hook.remove()
    assert sum(given) == done.recomputed == len(ids) - done.reused
    assert engine.tokens == tuple(ids)
    assert (engine.n_rows, engine.n_pending) == (len(ids), 0)
    return done, len(given)


def test_b04_saved_and_three_more(kind: str, stored: Any) -> None:
    session, (_, total) = stored
    ids = [*session.tokens, *NEW]
    for source in (session, session.load()):
        engine, control = make(kind, "dynamic"), make(kind, "dynamic")
        done, passes = counted(engine, source, ids)
        assert (done.reused, done.recomputed, passes, done.exact) == (total, 3, 1, True)
        control.install(session.load())
        control.prefill(NEW)
        assert logits(engine) == logits(control)
        assert ids_of(engine, 5) == ids_of(control, 5)


def test_b04_saved_less_two_and_three_more(kind: str, stored: Any) -> None:
    session, (first, total) = stored
    ids = [*session.tokens[: total - 2], *NEW]
    engine, control = make(kind, "dynamic"), make(kind, "dynamic")
    done, passes = counted(engine, session, ids)
    # Rows of the session are there for every window, states where a turn ended.
    nearest = first if kind in STATES else total - 2
    assert (done.reused, done.recomputed, passes) == (nearest, len(ids) - nearest, 1)
    assert done.exact == (kind in STATES)
    control.install(session.load(nearest), prefix=True)
    control.prefill(ids[nearest:])
    made = logits(engine)
    assert made == logits(control)
    assert ids_of(engine, 5) == ids_of(control, 5)
    # The run that did the same in one go, evaluated from nothing.
    fresh = make(kind, "dynamic")
    fresh.prefill(TURNS[0])
    for token in session.tokens[len(TURNS[0]) : first]:
        fresh.prefill([token])
    if nearest == first:
        fresh.prefill(ids[first:])
        assert logits(fresh) == made


def test_b04_what_cannot_be_reused_raises_or_is_told(kind: str, stored: Any) -> None:
    session, _ = stored
    engine = make(kind, "dynamic")
    engine.prefill([9, 9, 9])
    before = bits(engine.capture())
    for ids, same in (([250, 251], 0), ([*TURNS[0][:4], 250], 4)):
        snapshot = session.load()
        # The first turn was longer than the window, which did not hold its first rows any more.
        reached = same if kind in ("full", "index") else 0
        if not reached:
            with pytest.raises(InputError, match=rf"{same} begin what is stored, and 0 of them can be reused"):
                kvsnap.reuse(session, engine, ids)
            assert bits(engine.capture()) == before
        done, _ = counted(make(kind, "dynamic"), session, ids, min_reuse=0)
        assert done.reused == reached
        assert any("nothing could be reused" in note for note in done.notes) == (not reached)
        with pytest.raises(InputError, match="min_reuse: 5 or more"):
            kvsnap.reuse(snapshot, engine, ids, min_reuse=5)
        assert bits(engine.capture()) == before


def test_b09_a_full_hit_without_a_new_id_makes_no_pass(kind: str, stored: Any) -> None:
    session, ends = stored
    for end in ends:
        ids = session.tokens[:end]
        engine, control = make(kind, "dynamic"), make(kind, "dynamic")
        done, passes = counted(engine, session, ids)
        assert (done.reused, done.recomputed, passes, done.exact) == (end, 0, 0, True)
        control.install(session.load(end))
        forwards = engine.forwards
        assert engine.step().id == control.step().id
        assert engine.forwards == forwards
        assert ids_of(engine, 5) == ids_of(control, 5)


def test_b09_a_full_hit_inside_of_a_turn_evaluates_what_its_logits_need(kind: str, stored: Any) -> None:
    session, (first, total) = stored
    ids = session.tokens[: total - 1]
    done, _ = counted(make(kind, "dynamic"), session, ids)
    nearest = first if kind in STATES else total - 2
    assert (done.reused, done.recomputed) == (nearest, total - 1 - nearest)
    assert not done.exact or kind in STATES


@pytest.mark.parametrize("length", range(18))
def test_every_length_of_a_session_is_what_truncate_leaves(kind: str, stored: Any, length: int, tmp_path: Any) -> None:
    session, (first, total) = stored
    if length > total:
        return
    reach = session.reach(length)
    if not reach.reached:
        with pytest.raises(kvsnap.KvsnapError, match=f"nearest reachable length is {reach.n_tokens}"):
            session.load(length)
        return
    loaded = session.load(length)
    session.fork(tmp_path / "fork.kvsnap", n_tokens=length)
    forked = kvsnap.load(tmp_path / "fork.kvsnap")
    assert bits(loaded) == bits(forked)
    assert (loaded.tokens, loaded.n_rows, loaded.n_pending, loaded.token_offset, loaded.positions) == (
        forked.tokens, forked.n_rows, forked.n_pending, forked.token_offset, forked.positions,
    )  # fmt: skip
    assert (loaded.logits is None) == (forked.logits is None) == (length not in (first, total))
    assert session.n_tokens == total


# -- errors -----------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_before_anything_changed() -> None:
    model = tiny_llama(3)
    engine = TransformersEngine(model)
    engine.prefill([5, 17, 42])
    snapshot = engine.capture()
    other = TransformersEngine(tiny_llama(4))
    other.prefill([1, 2])
    before = bits(other.capture())
    with pytest.raises(CompatibilityError, match="weights"):
        kvsnap.reuse(snapshot, other, [5, 17, 42, 1])
    same = TransformersEngine(model)
    with pytest.raises(ContextError, match=r"513.*512|512.*513"):
        kvsnap.reuse(snapshot, same, [5, 17, 42, *[1] * 510])
    for ids in ([], [5, 256], [5, -1]):
        with pytest.raises(InputError):
            kvsnap.reuse(snapshot, same, ids)
    with pytest.raises(InputError, match="a snapshot or a session"):
        kvsnap.reuse("file.kvsnap", same, [5])  # type: ignore[arg-type] # on purpose
    assert same.tokens == ()
    assert bits(other.capture()) == before


def test_pending_ids_are_evaluated_with_what_follows() -> None:
    engine = make("full", "dynamic")
    engine.prefill([5, 17, 42])
    token = engine.step().id
    snapshot = engine.capture()
    assert snapshot.n_pending == 1
    done, passes = counted(make("full", "dynamic"), snapshot, [5, 17, 42, token])
    assert (done.reused, done.recomputed, passes, done.exact) == (3, 1, 1, True)
    done, passes = counted(make("full", "dynamic"), snapshot, [5, 17, 42, token, 7, 8])
    assert (done.reused, done.recomputed, passes) == (3, 3, 1)


def test_a_count_that_is_not_true_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make("full", "dynamic")
    engine.prefill([5, 17, 42])
    snapshot = engine.capture()
    other = make("full", "dynamic")
    install = other.install

    def careless(*args: Any, **kwargs: Any) -> Any:
        kwargs["prefix"] = False
        return install(*args, **kwargs)

    monkeypatch.setattr(other, "install", careless)
    with pytest.raises(AssertionError):
        counted(other, snapshot.truncate(2), [5, 17, 9])

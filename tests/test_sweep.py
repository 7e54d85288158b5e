"""Many samplers from one snapshot: exact one by one, faster and labelled in one pass, and what is printed of it."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

import kvsnap
from encdec_models import encdec_model, input_of
from kvsnap import sampling
from kvsnap.cli import run
from kvsnap.cli._sweep import print_csv
from kvsnap.errors import ContextError, InputError, UnsupportedError
from kvsnap.sweeping import Continuation
from test_engine_static import make
from tiny_models import PROMPT, ByteTokenizer, save_tiny, tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]

SAMPLERS = [
    kvsnap.Sampler(),
    kvsnap.Sampler(temperature=0.8, seed=1),
    kvsnap.Sampler(temperature=1.3, top_k=20, seed=2),
    kvsnap.Sampler(temperature=0.9, top_p=0.8, repetition_penalty=1.3, seed=3),
    kvsnap.Sampler(temperature=1.0, min_p=0.1, seed=4),
]


def tiny(**changes: Any) -> Any:
    return kvsnap.connect(tiny_llama(**changes), ByteTokenizer())


def stored(engine: Any, *, settle: bool = True) -> kvsnap.Snapshot:
    list(kvsnap.generate(engine, list(PROMPT.encode()), max_tokens=3))
    return kvsnap.capture(engine, settle=settle)


def alone(engine: Any, snapshot: kvsnap.Snapshot, settings: kvsnap.Sampler, count: int) -> list[kvsnap.Token]:
    engine.reset()
    kvsnap.restore(snapshot, engine)
    return list(kvsnap.generate(engine, max_tokens=count, sampler=settings))


@pytest.mark.newest
@pytest.mark.parametrize("kind", ["full", "window", "window and full", "recurrent", "hybrid"])
def test_one_by_one_each_gives_what_it_gives_alone(kind: str) -> None:
    engine = make(kind, "dynamic")
    snapshot = stored(engine)
    found = kvsnap.sweep(snapshot, engine, SAMPLERS, max_tokens=12)
    for settings, one in zip(SAMPLERS, found, strict=True):
        wanted = alone(make(kind, "dynamic"), snapshot, settings, 12)
        assert (one.tokens, one.logprobs) == (tuple(t.id for t in wanted), tuple(t.logprob for t in wanted))
        assert (one.sampler, one.exact, one.rows, one.forwards) == (settings, True, 1, 11)
    assert engine.tokens == snapshot.tokens


@pytest.mark.newest
@pytest.mark.parametrize("kind", ["full", "window", "window and full", "recurrent", "hybrid"])
@pytest.mark.parametrize("settle", [True, False])
def test_in_one_pass_rows_are_what_they_are_alone_but_for_the_last_bits(kind: str, settle: bool) -> None:
    engine = make(kind, "dynamic")
    snapshot = stored(engine, settle=settle)
    found = kvsnap.sweep(snapshot, engine, SAMPLERS, max_tokens=10, batch=4)
    assert [(one.rows, one.exact) for one in found] == [(4, False)] * 4 + [(1, True)]
    assert [one.forwards for one in found] == [9 + (not settle)] * 5
    first = sampling.start(SAMPLERS[0])
    assert first.settings.greedy
    for settings, one in zip(SAMPLERS, found, strict=True):
        wanted = alone(make(kind, "dynamic"), snapshot, settings, 10)
        for token, number, logprob in zip(wanted, one.tokens, one.logprobs, strict=True):
            assert number == token.id, "these weights and seeds leave no choice to the last bits"
            assert logprob == pytest.approx(token.logprob, abs=1e-3)
    assert len({one.tokens for one in found}) == len(SAMPLERS), "else a mixed-up row would not be noticed"
    assert engine.tokens == snapshot.tokens
    assert engine.rows == 1
    assert kvsnap.capture(engine).n_rows == snapshot.n_rows


def test_a_pass_of_several_rows_is_not_exact_which_is_why_it_is_said() -> None:
    engine = tiny()
    snapshot = stored(engine)
    single, together = (kvsnap.sweep(snapshot, engine, SAMPLERS[:4], max_tokens=10, batch=n) for n in (1, 4))
    assert [one.logprobs for one in single] != [one.logprobs for one in together]


@pytest.mark.parametrize("batch", [1, 3])
def test_rows_end_at_different_lengths(batch: int) -> None:
    plain = tiny()
    snapshot = stored(plain)
    lines = [c.tokens for c in kvsnap.sweep(snapshot, plain, SAMPLERS[:3], max_tokens=24)]
    end = next(i for i in lines[1] if i not in lines[0][:8] and lines[1].index(i) > 2)
    engine = tiny(eos_token_id=end)
    snapshot = stored(engine)
    found = kvsnap.sweep(snapshot, engine, SAMPLERS[:3], max_tokens=24, batch=batch, accept=["config"])
    for line, one in zip(lines, found, strict=True):
        wanted = line[: line.index(end) + 1] if end in line else line
        assert one.tokens == wanted
        assert one.stop == ("end" if end in line else "length")
        assert one.forwards == len(wanted) - 1
    assert len({len(one.tokens) for one in found}) > 1


@pytest.mark.parametrize("batch", [1, 3])
def test_a_full_context_ends_each(batch: int) -> None:
    engine = tiny(max_position_embeddings=len(PROMPT) + 10)
    snapshot = stored(engine)
    found = kvsnap.sweep(snapshot, engine, SAMPLERS[:3], max_tokens=50, batch=batch)
    assert [(one.stop, len(one.tokens)) for one in found] == [("context", 7)] * 3
    full = tiny(max_position_embeddings=len(PROMPT) + 3)
    snapshot = stored(full)
    with pytest.raises(ContextError, match=str(len(PROMPT) + 3)):
        kvsnap.sweep(snapshot, full, SAMPLERS[:3], max_tokens=5, batch=batch)
    assert full.tokens == snapshot.tokens
    assert full.rows == 1


def test_a_seed_that_was_drawn_is_told_and_gives_the_same_again() -> None:
    engine = tiny()
    snapshot = stored(engine)
    for batch in (1, 2):
        first = kvsnap.sweep(snapshot, engine, [kvsnap.Sampler(temperature=2.0)] * 2, max_tokens=8, batch=batch)
        assert first[0].tokens != first[1].tokens
        again = kvsnap.sweep(snapshot, engine, [one.sampler for one in first], max_tokens=8, batch=batch)
        assert [one.tokens for one in again] == [one.tokens for one in first]


@pytest.mark.newest
def test_what_cannot_be_put_into_several_rows_is_refused_by_name() -> None:
    engine = kvsnap.connect(encdec_model("t5"))
    engine.encode(**input_of("t5"))
    engine.prefill([1, 20, 21])
    snapshot = kvsnap.capture(engine)
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        kvsnap.sweep(snapshot, engine, SAMPLERS[:2], max_tokens=3, batch=2)
    assert engine.tokens == snapshot.tokens
    assert len(kvsnap.sweep(snapshot, engine, SAMPLERS[:2], max_tokens=3)) == 2


def test_wrong_numbers_are_refused_before_anything_changes() -> None:
    engine = tiny()
    snapshot = stored(engine)
    before = engine.forwards
    for options in ({"batch": 0}, {"max_tokens": 0}):
        with pytest.raises(InputError, match="1 or more, found 0"):
            kvsnap.sweep(snapshot, engine, SAMPLERS, **options)
    engine.install(snapshot, rows=2)
    with pytest.raises(InputError, match="one sampler for each row"):
        engine.step_rows([None])
    with pytest.raises(UnsupportedError, match="a batch of 2"):
        engine.step()
    assert engine.forwards == before


def test_rows_of_different_lengths_are_not_stepped_together() -> None:
    engine = tiny()
    ids = torch.tensor([[0, 0, 5, 6], [1, 2, 3, 4]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    done = engine.model.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False, pad_token_id=0,
                                 return_dict_in_generate=True)  # fmt: skip
    engine.adopt(done.past_key_values, done.sequences, attention_mask=mask)
    with pytest.raises(UnsupportedError, match="equal length"):
        engine.step_rows([sampling.start(s) for s in SAMPLERS[:2]])


def test_a_pass_that_fails_leaves_the_batch_as_it_was() -> None:
    engine = tiny()
    snapshot = stored(engine)
    engine.install(snapshot, rows=2)
    states = [sampling.start(s) for s in SAMPLERS[1:3]]
    for _ in range(2):
        chosen = engine.step_rows(states)
        states = [after for _, after in chosen]
    wanted = [token.id for token, _ in engine.step_rows(states)]
    engine.install(snapshot, rows=2)
    states = [sampling.start(s) for s in SAMPLERS[1:3]]
    states = [after for _, after in engine.step_rows(states)]

    def fail(*_: Any) -> None:
        raise RuntimeError("the device went away")

    hook = engine.model.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="went away"):
        engine.step_rows(states)
    hook.remove()
    states = [after for _, after in engine.step_rows(states)]
    assert [token.id for token, _ in engine.step_rows(states)] == wanted
    assert kvsnap.capture(engine, row=1).tokens[-1] == wanted[1]


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> tuple[str, str]:
    model, path = str(save_tiny(tmp_path / "model")), str(tmp_path / "x.kvsnap")
    assert run(["generate", "hello", "--model", model, "--max-tokens", "3", "--save", path]) == 0
    return path, model


TEXTS = ("temperature=1.5,top_k=40,seed=3", "greedy", "temperature=2,min_p=0.01")


def test_csv_holds_every_setting_and_any_text(saved: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    args = ["sweep", saved[0], "--max-tokens", "40", *(word for text in TEXTS for word in ("--sampler", text))]
    capsys.readouterr()
    assert run([*args, "--csv"]) == 0
    out = capsys.readouterr().out.replace("\0", "")  # which the csv module of Python 3.10 does not read
    rows = list(csv.DictReader(io.StringIO(out, newline="")))
    assert [row["sampler"] for row in rows] == list(TEXTS), "the order is not kept"
    assert (rows[0]["temperature"], rows[0]["top_k"], rows[0]["seed"]) == ("1.5", "40", "3")
    assert rows[1]["seed"] == ""
    drawn = int(rows[2]["seed"])
    args[args.index(TEXTS[2])] = f"{TEXTS[2]},seed={drawn}"
    assert run([*args, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["continuations"]
    for row, one in zip(rows, data, strict=True):
        assert row["text"] == one["text"].replace("\0", "")
        assert (int(row["n_tokens"]), row["stop"]) == (len(one["tokens"]), one["stop"])
        assert float(row["sum_logprob"]) == pytest.approx(sum(one["logprobs"]), abs=1e-4)
        assert float(row["mean_logprob"]) == pytest.approx(one["sum_logprob"] / len(one["tokens"]), abs=1e-4)
        assert (row["exact"], row["rows"]) == ("True", "1")


@pytest.mark.parametrize("text", ['one, "two"', "one\r\ntwo\n\n", "one\rtwo", '"'])
def test_text_is_quoted_where_it_has_to_be(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_csv(['a,"b"'], [Continuation(kvsnap.Sampler(), (5, 6), text, (-0.5, -1.25), 1)])
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out, newline=""))
    assert (row["sampler"], row["text"], row["sum_logprob"]) == ('a,"b"', text, "-1.7500")


def test_a_batch_is_called_not_exact(saved: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    args = ["sweep", saved[0], "--max-tokens", "6", *(word for text in TEXTS for word in ("--sampler", text))]
    capsys.readouterr()
    assert run([*args, "--batch", "2"]) == 0
    shown = capsys.readouterr()
    assert "not exact" in shown.err
    assert "(seed " in shown.out
    assert run([*args, "--batch", "2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["continuations"]
    assert [(one["rows"], one["exact"]) for one in data] == [(2, False), (2, False), (1, True)]
    assert run(args) == 0
    assert "not exact" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--sampler", "temperature=-1"], "temperature is out of range"),
        (["--sampler", "seed=1,seed=2"], "given twice"),
        (["--sampler", "greedy", "--batch", "0"], "1 or more, found 0"),
        (["--sampler", "greedy", "--csv", "--json"], "exclude each other"),
    ],
)
def test_bad_settings_are_told_before_a_model_is_loaded(
    args: list[str], why: str, saved: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run(["sweep", saved[0], *args, "--model", "nowhere"]) == 2
    shown = capsys.readouterr()
    assert why in shown.err + shown.out


def test_settings_that_do_nothing_are_warned_of(saved: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run(["sweep", saved[0], "--sampler", "top_k=5,seed=1", "--max-tokens", "1"]) == 0
    assert "warning: top_k=5,seed=1: top-k, seed do nothing without temperature" in capsys.readouterr().err

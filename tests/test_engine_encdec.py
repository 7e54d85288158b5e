"""Encoder-decoders: encoded once, exact in a new process without the encoder, and never of another input.

As a script, `test_engine_encdec.py DIRECTORY` is that new process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvsnap  # noqa: E402 - after the extras are known to be there
from encdec_models import FAMILIES, encdec_model, input_of  # noqa: E402
from kvsnap import sampling  # noqa: E402
from kvsnap.engines._tf_views import layers_of  # noqa: E402
from kvsnap.engines.transformers import TransformersEngine  # noqa: E402
from kvsnap.errors import CompatibilityError, InputError, UnsupportedError  # noqa: E402
from kvsnap.layout import EncoderInput, Sampler, Snapshot, Tensor  # noqa: E402
from latent_runs import bits  # noqa: E402
from tiny_models import tiny_llama  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.newest]

ROOT = Path(__file__).resolve().parent.parent
EXACT = ("t5", "whisper", "bart", "t5gemma")
LENGTHS = (1, 5, 40)
PROMPT = [1, *range(20, 100)]
AFTER = 12


def make(family: str, dtype: str = "float32", **changes: Any) -> TransformersEngine:
    """A fresh engine; its model counts the calls of the encoder as `encodings`, of the decoder as `passes`."""
    model = encdec_model(family, dtype, **changes)
    model.encodings = model.passes = 0

    def count(name: str) -> Any:
        return lambda *_: setattr(model, name, getattr(model, name) + 1)

    model.get_encoder().register_forward_pre_hook(count("encodings"))
    model.get_decoder().register_forward_pre_hook(count("passes"))
    engine = TransformersEngine(model)
    engine.sampler = sampling.start(Sampler(temperature=1.5, seed=5))
    return engine


def begun(family: str, dtype: str = "float32", length: int = 5, steps: int = 3, seed: int = 0) -> TransformersEngine:
    engine = make(family, dtype)
    engine.encode(**input_of(family, seed))
    engine.prefill(PROMPT[:length])
    for _ in range(steps):
        engine.step()
    return engine


def go_on(engine: TransformersEngine, count: int = AFTER) -> tuple[list[int], bytes]:
    """Ids, and the bytes of all logits that they were chosen from."""
    ids, rows = [], []
    for _ in range(count):
        engine.settle()
        logits = engine._live.lines[0].logits
        assert logits is not None
        rows.append(logits.tobytes())
        ids.append(engine.step().id)
    return ids, b"".join(rows)


def restored(family: str, snapshot: Snapshot, dtype: str = "float32") -> TransformersEngine:
    engine = make(family, dtype)
    engine.install(snapshot)
    return engine


# -- a new process -------------------------------------------------------------------------------------------------


def test_a_new_process_goes_on_bit_for_bit_and_encodes_nothing(tmp_path: Path) -> None:
    expected = {}
    for family in EXACT:
        for dtype in ("float32", "bfloat16"):
            for length in LENGTHS:
                engine = begun(family, dtype, length)
                name = f"{family}-{dtype}-{length}"
                kvsnap.save(engine.capture(), tmp_path / f"{name}.kvsnap")
                expected[name] = go_on(engine)
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == expected.keys()
    for name, (ids, logits) in expected.items():
        assert found[name]["ids"] == ids, name
        assert bytes.fromhex(found[name]["logits"]) == logits, name
        assert found[name]["encodings"] == 0
        assert found[name]["passes"] == AFTER
        assert len(set(ids)) >= 5, "what is chosen must vary"


def resume_all(directory: Path) -> None:
    found = {}
    for file in sorted(directory.glob("*.kvsnap")):
        family, dtype, _ = file.stem.rsplit("-", 2)
        engine = restored(family, kvsnap.load(file), dtype)
        ids, logits = go_on(engine)
        model = engine.model
        found[file.stem] = {
            "ids": ids, "logits": logits.hex(), "encodings": model.encodings, "passes": model.passes,
        }  # fmt: skip
    (directory / "found.json").write_text(json.dumps(found))


# -- every family --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_goes_on_as_the_model_itself_does(family: str) -> None:
    try:
        engine = make(family)
    except ValueError as error:
        pytest.skip(f"transformers {transformers.__version__}: {error}")
    given = input_of(family)
    engine.encode(**given)
    assert (engine.model.encodings, engine.model.passes, engine.forwards) == (1, 1, 2)
    engine.prefill(PROMPT[:5])
    snapshot = engine.capture()
    ids, logits = go_on(engine)
    other = restored(family, snapshot)
    assert go_on(other) == (ids, logits)
    assert other.model.encodings == 0

    # The model alone, with its encoder, without any cache.
    with torch.no_grad():
        whole = engine.model(**given, decoder_input_ids=torch.tensor([list(engine.tokens[:-1])])).logits[0]
    width = whole.shape[-1]
    ours = np.frombuffer(logits, np.float32).reshape(-1, width)
    assert np.allclose(ours, whole[-len(ours) :].numpy(), atol=1e-3)


def test_families_that_are_not_known_are_refused_by_name() -> None:
    settings = {
        "hidden_size": 32, "num_encoder_layers": 1, "num_decoder_layers": 1, "num_encoder_attention_heads": 2,
        "num_decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 256,
    }  # fmt: skip
    config = transformers.ProphetNetConfig(**settings)
    with pytest.raises(UnsupportedError, match="prophetnet is an encoder-decoder whose decoder may keep more"):
        TransformersEngine(transformers.ProphetNetForConditionalGeneration(config).eval())


def test_a_decoder_that_reads_the_output_of_the_encoder_is_noticed() -> None:
    engine = begun("t5")
    before = bits(engine.capture())

    def read(_: Any, args: Any, kwargs: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state + kwargs["encoder_hidden_states"].mean()
        return output

    engine.model.get_decoder().register_forward_hook(read, with_kwargs=True)
    with pytest.raises(UnsupportedError, match="its decoder reads the output of the encoder"):
        engine.step()
    assert bits(engine.capture()) == before


# -- what was encoded ----------------------------------------------------------------------------------------------


def test_without_an_input_nothing_is_evaluated() -> None:
    engine = make("t5")
    for change in (lambda: engine.prefill([1]), lambda: engine.warm([1])):
        with pytest.raises(InputError, match="nothing is encoded yet"):
            change()
    assert (engine.tokens, engine.model.passes, engine.encoded) == ((), 0, None)
    assert engine.capture().encoder_input is None
    with pytest.raises(UnsupportedError, match="llama has no encoder"):
        TransformersEngine(tiny_llama(3)).encode([1, 2])


@pytest.mark.parametrize("family", ["t5", "whisper"])
def test_a_file_and_a_session_tell_what_was_encoded(family: str, tmp_path: Path) -> None:
    engine = begun(family)
    kvsnap.save(engine.capture(), tmp_path / "a.kvsnap")
    with kvsnap.Session.open(tmp_path / "s.kvsnap") as session:
        session.append(engine.capture())
        loaded = session.load()
    ids = tuple(input_of(family).get("input_ids", torch.zeros(1, 0)).flatten().long().tolist())
    for snapshot in (kvsnap.load(tmp_path / "a.kvsnap"), loaded):
        assert isinstance(snapshot.encoder_input, EncoderInput)
        assert snapshot.encoder_input.tokens == ids
        other = restored(family, snapshot)
        assert other.encoded == engine.encoded
        assert other.holds(**input_of(family))
        assert not other.holds(**input_of(family, seed=1))
        assert other.model.encodings == 0


def test_an_input_that_is_encoded_is_kept_by_a_reset_and_by_cutting_to_nothing() -> None:
    engine = begun("t5")
    expected = engine.tokens
    start = engine.capture().truncate(0)
    engine.reset()
    engine.sampler = sampling.start(Sampler(temperature=1.5, seed=5))
    empty = engine.capture()
    for one in (engine, restored("t5", start), restored("t5", empty)):
        assert (one.tokens, one.n_rows) == ((), 0)
        one.sampler = sampling.start(Sampler(temperature=1.5, seed=5))
        one.prefill(PROMPT[:5])
        for _ in range(3):
            one.step()
        assert one.tokens == expected
    assert engine.model.encodings == 1
    engine.warm(expected)
    assert engine.encoded is not None
    assert engine.model.encodings == 1


def test_what_is_no_single_input_is_refused() -> None:
    engine = begun("t5")
    before = bits(engine.capture()), engine.encoded
    ids = torch.tensor([[5, 6, 7, 0]])
    for inputs, kind, message in (
        ({"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 0]])}, UnsupportedError, "masks padding"),
        ({"input_ids": ids.repeat(2, 1)}, InputError, "must be one sequence"),
        ({"input_ids": torch.tensor([[5, 256]])}, InputError, "inside the vocabulary"),
        ({"input_features": torch.zeros(1, 4, 4)}, InputError, "takes no input_features"),
        ({"decoder_input_ids": ids}, InputError, "takes no decoder_input_ids"),
        ({"attention_mask": torch.ones(1, 4)}, InputError, "nothing to encode"),
        ({}, InputError, "nothing to encode"),
    ):
        with pytest.raises(kind, match=message):
            engine.encode(**inputs)
    assert (bits(engine.capture()), engine.encoded) == before
    engine.encode(input_ids=ids, attention_mask=torch.ones_like(ids))
    assert engine.holds([5, 6, 7, 0])


# -- failures and changes from outside -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["t5", "t5gemma", "whisper"])
def test_a_failed_pass_leaves_nothing_behind_also_the_first(family: str) -> None:
    engine, control = begun(family), begun(family)
    for change in (engine.step, lambda: engine.prefill([1, 2, 3]), lambda: engine.encode(**input_of(family, 1))):
        before = bits(engine.capture()), engine.encoded, engine.tokens
        hook = engine.model.get_decoder().register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            change()
        hook.remove()
        assert (bits(engine.capture()), engine.encoded, engine.tokens) == before
    fresh = make(family)
    hook = fresh.model.get_decoder().register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fresh.encode(**input_of(family))
    hook.remove()
    assert fresh.encoded is None
    assert not any(layer.is_filled for layer in layers_of(fresh.cache))
    assert go_on(engine) == go_on(control)


def test_undo_empties_what_a_first_pass_filled() -> None:
    from kvsnap.engines._tf_layers import Undo

    model = encdec_model("t5gemma")
    engine = TransformersEngine(model)
    cache = engine._model.fresh_cache()
    undo = Undo(cache)
    with torch.no_grad():
        outputs = model.get_encoder()(**input_of("t5gemma"))
        engine._model._pass(cache, (1,), 0, None, outputs)
    assert all(layer.is_filled for layer in layers_of(cache))
    undo.put_back()
    assert not any(layer.holds_something or layer.is_filled for layer in layers_of(cache))
    assert not any(cache.is_updated.values())


def test_a_cross_tensor_that_was_changed_outside_is_noticed() -> None:
    engine = begun("t5")
    with torch.no_grad():
        engine.cache.cross_attention_cache.layers[1].keys.zero_()
    with pytest.raises(InputError, match="changed outside the engine"):
        engine.step()


# -- negative controls ---------------------------------------------------------------------------------------------


def changed(snapshot: Snapshot, role: str, change: Any) -> Snapshot:
    layer = snapshot.layers[1]
    tensors = tuple(Tensor(t.spec, change(np.array(t.array))) if t.role == role else t for t in layer.tensors)
    return replace(
        snapshot,
        layers=tuple(replace(entry, tensors=tensors) if entry is layer else entry for entry in snapshot.layers),
    )


def one_row_zeroed(rows: Any) -> Any:
    rows[:, 3] = 0
    return rows


@pytest.mark.parametrize("role", ["cross_k", "cross_v", "k", "v"])
@pytest.mark.parametrize("family", ["t5", "whisper"])
def test_one_row_less_is_seen(family: str, role: str) -> None:
    engine = begun(family)
    snapshot = engine.capture()
    expected = go_on(engine)
    assert go_on(restored(family, changed(snapshot, role, lambda rows: rows))) == expected
    assert go_on(restored(family, changed(snapshot, role, one_row_zeroed)))[1] != expected[1]


@pytest.mark.parametrize("family", ["t5", "whisper"])
def test_the_cross_tensors_of_another_input_are_seen(family: str) -> None:
    engine, other = begun(family), begun(family, seed=1)
    snapshot, foreign = engine.capture(), other.capture()
    expected = go_on(engine)
    mixed = tuple(
        replace(a, tensors=tuple(x if "cross" in x.role else t for t, x in zip(a.tensors, b.tensors, strict=True)))
        for a, b in zip(snapshot.layers, foreign.layers, strict=True)
    )
    assert go_on(restored(family, replace(snapshot, layers=mixed)))[1] != expected[1]


def test_what_is_not_noted_as_encoded_is_not_used() -> None:
    engine = begun("t5")
    cache = engine.cache
    cache.is_updated[1] = False
    with pytest.raises(InputError, match="changed outside the engine"):
        engine.step()
    with pytest.raises(InputError, match="different inputs"):
        engine.adopt(cache, [engine.tokens])


def test_layers_of_unequal_inputs_are_refused() -> None:
    engine = begun("t5")
    snapshot = engine.capture()
    for change in (lambda rows: np.ascontiguousarray(rows[:, :-1]), lambda rows: np.ascontiguousarray(rows[:, :0])):
        with pytest.raises(CompatibilityError, match="layer 1 cross_k: another number of rows of the input"):
            engine.install(changed(snapshot, "cross_k", change))
    assert bits(engine.capture()) == bits(snapshot)


# -- sessions, generate --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["t5", "whisper"])
def test_a_session_holds_the_input_once_and_takes_no_other(family: str, tmp_path: Path) -> None:
    engine = make(family)
    engine.encode(**input_of(family))
    sizes = []
    with kvsnap.Session.open(tmp_path / "s.kvsnap") as session:
        for turn in range(4):
            engine.prefill(PROMPT[1 + turn : 4 + turn])
            engine.step()
            before = session.nbytes
            session.append(engine.capture(start=session.n_rows))
            sizes.append(session.nbytes - before)
        encoded = sum(t.nbytes for t in engine.capture().tensors() if t.role.startswith("cross"))
        assert max(sizes[1:]) < sizes[0] - encoded * 0.9
        loaded = session.load()
        assert bits(loaded) == bits(engine.capture())
        assert go_on(restored(family, loaded)) == go_on(engine)

        other = make(family)
        other.encode(**input_of(family, seed=1))
        other.prefill(session.tokens)
        with pytest.raises(InputError, match="another input of the encoder than"):
            session.append(other.capture())
        same = make(family)
        same.encode(**input_of(family))
        same.prefill(session.tokens)
        session.append(same.capture())  # the control

        session.truncate(5)
        cut = restored(family, session.load())
        assert (cut.n_rows, cut.n_pending) == (4, 1)  # without logits the last row is evaluated again
        assert cut.holds(**input_of(family))
        cut.step()
        session.reset()
        empty = restored(family, session.load())
        assert (empty.n_rows, empty.encoded) == (0, None)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_cache_of_generate_is_taken_over(family: str, tmp_path: Path) -> None:
    changes = {"num_decoder_layers": 2} if family == "t5" else {}
    engine = make(family, **changes)
    given = input_of(family)
    out = engine.model.generate(
        **given, attention_mask=torch.ones_like(given["input_ids"]), max_new_tokens=10, do_sample=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    cache = getattr(out, "cache", None)
    cache = out.past_key_values if cache is None else cache
    engine.adopt(cache, out.sequences, prompt=1, encoded=given)
    engine.sampler = sampling.start(Sampler())
    assert engine.holds(**given)
    kvsnap.save(engine.capture(), tmp_path / "a.kvsnap")
    rest = go_on(engine)
    other = make(family, **changes)
    other.install(kvsnap.load(tmp_path / "a.kvsnap"))
    assert go_on(other) == rest

    # The same ids by the engine itself.
    own = make(family, **changes)
    own.sampler = sampling.start(Sampler())
    own.encode(**given)
    own.prefill(out.sequences[0, :1].tolist())
    assert [own.step().id for _ in range(10)] == out.sequences[0, 1:].tolist()
    own.adopt(cache, engine.tokens)
    assert own.encoded == EncoderInput()


def test_batches_are_refused() -> None:
    engine = make("t5", num_decoder_layers=2)
    ids = input_of("t5")["input_ids"].repeat(2, 1)
    out = engine.model.generate(input_ids=ids, max_new_tokens=4, return_dict_in_generate=True)
    cache = getattr(out, "cache", None)
    cache = out.past_key_values if cache is None else cache
    with pytest.raises(UnsupportedError, match="a batch of an encoder-decoder"):
        engine.adopt(cache, out.sequences, attention_mask=torch.ones_like(out.sequences))
    with pytest.raises(kvsnap.KvsnapError, match="cache") as refused:
        TransformersEngine(engine.model, cache="static")
    assert "static" in str(refused.value)


if __name__ == "__main__":
    resume_all(Path(sys.argv[1]))


def test_what_is_stored_of_another_input_is_not_reused() -> None:
    engine = begun("t5", seed=0)
    stored = engine.capture()
    engine.encode(**input_of("t5", 1))
    with pytest.raises(InputError, match="of another input of the encoder"):
        kvsnap.reuse(stored, engine, [*stored.tokens, 7])
    assert engine.holds(**input_of("t5", 1))
    engine.encode(**input_of("t5", 0))
    assert kvsnap.reuse(stored, engine, [*stored.tokens, 7]).reused == stored.n_rows

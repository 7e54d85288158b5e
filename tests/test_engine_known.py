"""Weights that are read once, for as long as torch counts no change of them."""

from __future__ import annotations

from typing import Any

import pytest

import kvsnap
from kvsnap.errors import CompatibilityError, InputError

torch = pytest.importorskip("torch")

from kvsnap.engines import _tf_identity  # noqa: E402 - after the extras are known to be there
from kvsnap.identity import Identity  # noqa: E402
from tiny_models import tiny_llama, tiny_qwen3  # noqa: E402

pytestmark = pytest.mark.engine


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the weights that were read since it was last emptied."""
    names: list[str] = []
    digest_of = _tf_identity.digest_of

    def counting(name: str, tensor: Any) -> Any:
        names.append(name)
        return digest_of(name, tensor)

    monkeypatch.setattr(_tf_identity, "digest_of", counting)
    return names


def digests(identity: Identity) -> dict[str, str]:
    return {weight.name: weight.digest for weight in identity.weights}


def test_always_reads_all_of_them_each_time(read: list[str]) -> None:
    engine = kvsnap.connect(tiny_llama())
    engine.identity()
    count = len(read)
    engine.identity()
    assert len(read) == 2 * count > 20


def test_what_did_not_change_is_read_once_and_says_the_same(read: list[str]) -> None:
    model = tiny_qwen3()
    engine = kvsnap.connect(model, digest="changed")
    first = engine.identity()
    assert read
    read.clear()
    engine.prefill([1, 2, 3])
    engine.step()
    assert kvsnap.capture(engine).identity == first
    assert engine.identity() == kvsnap.connect(model).identity()
    assert len(read) == len(set(read))  # those of the other engine


def test_a_weight_that_was_changed_is_read_again_and_no_other(read: list[str]) -> None:
    model = tiny_llama()
    engine = kvsnap.connect(model, digest="changed")
    before = digests(engine.identity())
    read.clear()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] += 1e-3
    after = digests(engine.identity())
    assert [name for name in after if after[name] != before[name]] == read
    assert len(read) == 1
    read.clear()
    model.model.layers[1].self_attn.q_proj.weight = torch.nn.Parameter(
        model.model.layers[1].self_attn.q_proj.weight.detach().clone() * 2
    )
    changed = digests(engine.identity())
    assert [name for name in changed if changed[name] != after[name]] == read
    read.clear()
    model.to(torch.float16)
    assert digests(engine.identity()).keys() == before.keys()
    assert len(read) == len(before)


def test_a_changed_model_is_refused_all_the_same() -> None:
    model = tiny_llama()
    engine = kvsnap.connect(model, digest="changed")
    engine.prefill([1, 2, 3])
    snapshot = kvsnap.capture(engine)
    assert kvsnap.restore(snapshot, engine).exact
    with torch.no_grad():
        model.lm_head.weight[3] *= 1.001
    with pytest.raises(CompatibilityError, match="lm_head"):
        kvsnap.restore(snapshot, engine)


def test_a_tensor_in_the_place_of_one_that_is_gone_is_read(read: list[str]) -> None:
    model = tiny_llama()
    engine = kvsnap.connect(model, digest="changed")
    for scale in range(2, 12):
        before = digests(engine.identity())
        layer = model.model.layers[0].mlp.up_proj
        values = layer.weight.detach().numpy().copy()
        layer.weight = None
        layer.weight = torch.nn.Parameter(torch.from_numpy(values * scale))
        assert digests(engine.identity()) != before


def test_what_is_written_past_torch_is_not_seen_as_the_page_says(read: list[str]) -> None:
    model = tiny_llama()
    engine, careful = kvsnap.connect(model, digest="changed"), kvsnap.connect(model)
    before = engine.identity()
    model.lm_head.weight.data.mul_(2)
    assert engine.identity() == before
    assert careful.identity() != before


def test_tensors_that_count_no_changes_are_read_each_time(read: list[str]) -> None:
    with torch.inference_mode():
        model = tiny_llama()
    engine = kvsnap.connect(model, digest="changed")
    engine.identity()
    count = len(read)
    engine.identity()
    assert len(read) > count


def test_another_word_is_refused() -> None:
    with pytest.raises(InputError, match="always or changed"):
        kvsnap.connect(tiny_llama(), digest="never")

"""What an encoding costs the model: the figures against arithmetic of their own, and what must be noticed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import kvsnap  # noqa: E402 - after the extras are known to be there
from kvsnap.layout import Snapshot, Tensor  # noqa: E402
from tiny_models import PROMPT, ByteTokenizer, tiny_llama  # noqa: E402

pytestmark = pytest.mark.engine

TEXT = list(b" The text behind it is judged, place by place.")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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

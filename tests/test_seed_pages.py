"""The two published pages that kvsnap set out to make true, sentence by sentence: go-mlx's KV snapshots and colibri's
KV cache persistence. One test per claim, on tiny real models; what stands on the disk is read by a few lines of struct
here, not by kvsnap.

Claims that are not about files or state, and are not made here:

| page | claim | why not here |
|---|---|---|
| go-mlx | `inference.AttentionInspector`: K vectors from the live model, no snapshot | attention probe: not yet |
| go-mlx | diff KV growth between two model variants | growth and diff: not yet |
| go-mlx | state bundles | only named there, as a plan |
| colibri | on a mismatch the engine ignores the file and starts over | `Conversation`: not yet; `ColiFile` shows it |
|         | | on the file: test_another_model_s_file_is_ignored_in_the_mode_of_the_original |
| colibri | a conversation that is too long for the context starts over | the same |
"""

from __future__ import annotations

import itertools
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvsnap  # noqa: E402 - after the extras are known to be there
from kvsnap import files  # noqa: E402
from kvsnap.errors import CompatibilityError, ContextError, DamagedError  # noqa: E402
from kvsnap.formats import colikv  # noqa: E402
from kvsnap.formats.colikv import ColiFile, Geometry  # noqa: E402
from latent_models import INDEX, KNOWN, LATENT, LAYERS, ROPE, keeps_latent, latent_model  # noqa: E402
from tiny_models import PROMPT, tiny_llama, tiny_qwen3  # noqa: E402

if TYPE_CHECKING:
    from typing_extensions import Self

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]

IDS = list(PROMPT.encode())
ROOT = Path(__file__).resolve().parent.parent


def say(engine: Any, count: int, prompt: Any = "", **options: Any) -> list[int]:
    return [token.id for token in kvsnap.generate(engine, prompt, max_tokens=count, **options)]


def say_with_logits(engine: Any, count: int) -> tuple[list[int], list[bytes]]:
    """Ids, and the bytes of the logits that each was chosen from."""
    ids, logits = [], []
    for _ in range(count):
        ids += say(engine, 1)
        engine.settle()
        logits.append(kvsnap.capture(engine).logits.array.tobytes())
    return ids, logits


# ---------------------------------------------------------------------------------------------------------------------
# The page of go-mlx, "KV Snapshots - Save & Restore Generation State"
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def running() -> Any:
    """A model in the middle of a generation: a prompt, ten tokens, the last of them evaluated."""
    engine = kvsnap.connect(tiny_llama())
    say(engine, 10, IDS)
    engine.settle()
    return engine


@pytest.fixture
def story(running: Any, tmp_path: Path) -> Path:
    path = tmp_path / "story.kv"
    kvsnap.capture(running).save(path, format="mlxkv")
    return path


class Words:
    """Reads the fields of an MLXKV001 file of version 3 one after the other, as the page and no code of ours says."""

    def __init__(self, data: bytes, order: str = "<") -> None:
        self.data, self.at, self.order = data, 0, order

    def take(self, count: int) -> bytes:
        assert self.at + count <= len(self.data)
        self.at += count
        return self.data[self.at - count : self.at]

    def u32(self) -> int:
        return struct.unpack(f"{self.order}I", self.take(4))[0]

    def array(self, dtype: str, count: int) -> Any:
        kind = np.dtype(dtype).newbyteorder(self.order)
        return np.frombuffer(self.take(count * kind.itemsize), kind)

    def tensor(self) -> dict[str, Any]:
        selector, count = self.u32(), self.u32()
        if selector == 0:
            return {"selector": 0, "values": self.array("f4", count)}
        assert selector == 1
        scale = self.array("f4", 1)[0]
        return {"selector": 1, "scale": scale, "codes": self.array("i1", count)}


def parsed(data: bytes, order: str = "<") -> dict[str, Any]:
    """All fields of a version 3 file."""
    w = Words(data, order)
    found: dict[str, Any] = {"magic": w.take(8), "version": w.u32(), "architecture": w.take(w.u32()).decode()}
    for name in ("layers", "heads", "seq_len", "head_dim", "query_heads", "offset"):
        found[name] = w.u32()
    found["tokens"] = w.array("i4", w.u32()).tolist()
    found["generated"] = w.array("i4", w.u32()).tolist()
    found["entries"] = []
    for _ in range(w.u32()):
        layer, cache, heads = w.u32(), w.u32(), w.u32()
        pairs = [(w.tensor(), w.tensor()) for _ in range(heads)]
        found["entries"].append({"layer": layer, "cache": cache, "heads": pairs})
    found["logit_shape"] = w.array("i4", w.u32()).tolist()
    found["logits"] = w.array("f4", w.u32())
    found["left"] = len(data) - w.at
    return found


def live_rows(engine: Any, layer: int, role: str) -> Any:
    """The tensor in the cache of transformers, not through a capture: `[heads, rows, dim]`."""
    return getattr(engine.cache.layers[layer], role)[0].detach().numpy()


def test_a_snapshot_holds_cache_logits_offset_and_history(running: Any, story: Path) -> None:
    """A portable, self-contained binary capture of a model's K/V cache, the most recent logits, the token offset, and
    the generated-token history.
    """
    found = parsed(story.read_bytes())
    assert found["left"] == 0
    for number, entry in enumerate(found["entries"]):
        keys, values = live_rows(running, number, "keys"), live_rows(running, number, "values")
        for head, (k, v) in enumerate(entry["heads"]):
            assert k["values"].tobytes() == keys[head].tobytes()
            assert v["values"].tobytes() == values[head].tobytes()
    ids = torch.tensor([running.tokens])
    with torch.no_grad():
        again = tiny_llama()(ids).logits[0, -1].numpy()
    assert np.allclose(found["logits"], again, atol=1e-4), "the logits of the last token"
    assert not np.allclose(found["logits"], tiny_llama()(ids[:, :-1]).logits[0, -1].detach().numpy(), atol=1e-2)
    assert found["offset"] == len(IDS) + 10
    assert found["generated"] == list(running.tokens[len(IDS) :])
    assert found["tokens"] == list(running.tokens)


def test_a_long_generation_resumes_in_another_process(story: Path, running: Any) -> None:
    """Resume a long generation across processes (interrupt + restart later)."""
    code = (
        "import sys, torch, kvsnap; torch.set_num_threads(1); from tiny_models import tiny_llama\n"
        "e = kvsnap.connect(tiny_llama()); kvsnap.restore(kvsnap.load(sys.argv[1]), e, accept=['weights'])\n"
        "print(*[t.id for t in kvsnap.generate(e, max_tokens=16)])"
    )
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", code, str(story)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    expected = say(running, 16)
    assert len(set(expected)) >= 5
    assert [int(i) for i in done.stdout.split()] == expected


def test_samplers_are_tried_without_a_new_prefill(story: Path, running: Any) -> None:
    """Try multiple sampler settings against the same KV state without re-prefilling."""
    engine = kvsnap.connect(tiny_llama())
    settings = [kvsnap.Sampler(), *(kvsnap.Sampler(temperature=1.3, top_k=30, seed=s) for s in (1, 2, 3))]
    runs = kvsnap.sweep(kvsnap.load(story), engine, settings, max_tokens=6, accept=["weights"])
    assert engine.forwards == 4 * 5, "six tokens are five passes of one token each: the first comes from the logits"
    assert len({run.tokens for run in runs}) >= 3
    assert list(runs[0].tokens) == say(running, 6)


def test_keys_are_those_after_rope(story: Path) -> None:
    """Inspect post-RoPE K vectors per layer per head for attention analysis."""
    snapshot, model = kvsnap.load(story), tiny_llama()
    attention = model.model.layers[0].self_attn
    ids = torch.tensor([snapshot.tokens])
    with torch.no_grad():
        hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
        before = attention.k_proj(hidden).view(1, len(snapshot.tokens), 2, 16).transpose(1, 2)
        cos, sin = model.model.rotary_emb(hidden, torch.arange(len(snapshot.tokens))[None])
        half = torch.cat((-before[..., 8:], before[..., :8]), -1)
        after = before * cos[:, None] + half * sin[:, None]
    for head in range(2):
        k = snapshot.head(0, head).k
        assert np.allclose(k, after[0, head].numpy(), atol=1e-5)
        assert not np.allclose(k[1:], before[0, head, 1:].numpy(), atol=1e-2)


def test_the_default_is_lossless_float32(running: Any, story: Path) -> None:
    """Default: lossless Float32 encoding."""
    heads = [pair for entry in parsed(story.read_bytes())["entries"] for pair in entry["heads"]]
    assert {t["selector"] for pair in heads for t in pair} == {0}
    loaded = kvsnap.load(story)
    assert loaded.bound == 0
    for layer in range(3):
        for role, name in (("k", "keys"), ("v", "values")):
            assert loaded.layers[layer].tensor(role).array.tobytes() == live_rows(running, layer, name).tobytes()


def test_q8_is_symmetric_int8_with_a_scale_per_tensor_and_four_times_smaller(running: Any, tmp_path: Path) -> None:
    """KVSnapshotEncodingQ8 stores symmetric int8 + per-tensor scale, ~4x smaller."""
    say(running, 6, [i % 256 for i in range(7, 407)])
    snapshot = kvsnap.capture(running, settle=True)
    plain = snapshot.save(tmp_path / "story.kv", format="mlxkv")
    small = snapshot.save(tmp_path / "story.q8.kv", format="mlxkv", codec="q8")
    assert 3.8 < plain.nbytes / small.nbytes < 4.0
    assert not small.exact
    assert small.bound > 0
    found = parsed((tmp_path / "story.q8.kv").read_bytes())
    for number, entry in enumerate(found["entries"]):
        for head, pair in enumerate(entry["heads"]):
            for tensor, name in zip(pair, ("keys", "values"), strict=True):
                source = live_rows(running, number, name)[head]
                assert tensor["selector"] == 1
                assert tensor["scale"] == np.float32(np.abs(source).max()) / np.float32(127)
                assert tensor["codes"].min() >= -127
                assert np.abs(tensor["codes"].astype(int)).max() == 127
                error = np.abs(tensor["codes"] * tensor["scale"] - source.ravel()).max()
                assert 0 < error <= tensor["scale"] * 0.5001
    assert len({float(t["scale"]) for e in found["entries"] for p in e["heads"] for t in p}) > 6


def test_generation_after_a_q8_restore_is_approximate(running: Any, tmp_path: Path) -> None:
    """Generation is approximate after restore but usually indistinguishable in practice for short continuations."""
    kvsnap.capture(running).save(tmp_path / "story.q8.kv", format="mlxkv", codec="q8")
    other, exact = kvsnap.connect(tiny_llama()), say_with_logits(running, 3)
    done = kvsnap.restore(kvsnap.load(tmp_path / "story.q8.kv"), other, accept=["weights"])
    assert not done.exact
    ids, logits = say_with_logits(other, 3)
    assert ids[0] == exact[0][0], "logits are stored as float32: the first token is the same"
    assert logits != exact[1]
    a, b = (np.frombuffer(x, np.float32) for x in (logits[0], exact[1][0]))
    assert np.abs(a - b).max() < 0.1 * (b.max() - b.min())


def test_fields_of_a_loaded_snapshot(story: Path) -> None:
    """snap.Architecture, NumLayers, NumHeads, HeadDim, SeqLen, TokenOffset, len(snap.Generated)."""
    snapshot = kvsnap.load(story)
    assert snapshot.architecture == "llama"
    assert (snapshot.num_layers, snapshot.num_heads, snapshot.head_dim, snapshot.num_query_heads) == (3, 2, 16, 4)
    assert (snapshot.seq_len, snapshot.token_offset, len(snapshot.generated)) == (len(IDS) + 10, len(IDS) + 10, 10)


def test_each_head_has_k_and_v_of_head_dim_times_seq_len(story: Path, running: Any) -> None:
    """`h.K` and `h.V` are []float32 of length HeadDim * SeqLen; `ok` is false where there is no such head."""
    snapshot = kvsnap.load(story)
    for layer in range(snapshot.num_layers):
        for head in range(snapshot.num_heads):
            found = snapshot.head(layer, head)
            assert found is not None
            for values, name in ((found.k, "keys"), (found.v, "values")):
                assert values.dtype == np.float32
                assert values.ravel().shape == (snapshot.head_dim * snapshot.seq_len,)
                assert np.array_equal(values, live_rows(running, layer, name)[head])
        assert snapshot.head(layer, snapshot.num_heads) is None


def test_warm_from_tokens_then_continue_from_the_offset(story: Path, running: Any) -> None:
    """Re-prefill from the snapshot's tokens [...] then continue decode from TokenOffset; bit-identical [ids] for
    deterministic samplers.
    """
    snapshot, engine = kvsnap.load(story), kvsnap.connect(tiny_llama())
    done = kvsnap.warm_from_tokens(engine, snapshot.tokens)
    assert (done.reused, done.recomputed, done.exact) == (0, snapshot.token_offset, False)
    assert engine.n_rows == snapshot.token_offset
    expected = say(running, 24)
    assert len(set(expected)) >= 5
    assert say(engine, 24) == expected
    shorter = kvsnap.connect(tiny_llama())
    kvsnap.warm_from_tokens(shorter, snapshot.tokens[1:])
    assert say(shorter, 24) != expected, "another history says something else"


def test_warming_takes_both_lists_of_a_file_that_keeps_them_apart(running: Any, story: Path) -> None:
    """WarmFromTokens(append(snap.Tokens, snap.Generated...)): a file whose tokens are the prompt only."""
    found = parsed(story.read_bytes())
    raw = story.read_bytes()
    at = raw.index(struct.pack(f"<I{len(found['tokens'])}i", len(found["tokens"]), *found["tokens"]))
    prompt = struct.pack(f"<I{len(IDS)}i", len(IDS), *IDS)
    apart = raw[:at] + prompt + raw[at + 4 + 4 * len(found["tokens"]) :]
    snapshot = kvsnap.loads(apart)
    assert snapshot.tokens == running.tokens
    assert snapshot.generated == running.tokens[len(IDS) :]
    engine = kvsnap.connect(tiny_llama())
    kvsnap.warm_from_tokens(engine, snapshot.tokens)
    assert say(engine, 8) == say(running, 8)


@pytest.mark.parametrize("format", ["mlxkv", "native"])
def test_a_restore_is_exact_to_the_bit(running: Any, tmp_path: Path, format: str) -> None:
    """Exact-bit KV restore is on the roadmap: here it is. Own files know the weights; go-mlx's do not."""
    kvsnap.capture(running).save(tmp_path / "story", format=format)
    engine = kvsnap.connect(tiny_llama())
    done = kvsnap.restore(kvsnap.load(tmp_path / "story"), engine, accept=["weights"] if format == "mlxkv" else [])
    assert done.exact == (format == "native"), "without a digest of the weights nobody can promise it"
    assert done.recomputed == 0
    assert engine.forwards == 0
    assert say_with_logits(engine, 12) == say_with_logits(running, 12)


def test_a_changed_bit_of_a_key_changes_the_logits(running: Any, story: Path) -> None:
    """The control of the test above: what it compares does depend on what was stored."""
    keys = kvsnap.load(story).layers[0].tensor("k").array[0]
    raw = bytearray(story.read_bytes())
    at = raw.index(keys.tobytes())
    raw[at + 2] ^= 0x40
    engine = kvsnap.connect(tiny_llama())
    kvsnap.restore(kvsnap.loads(bytes(raw)), engine, accept=["weights"])
    assert say_with_logits(engine, 12)[1] != say_with_logits(running, 12)[1]


def test_the_format_table(running: Any, story: Path) -> None:
    """Magic MLXKV001, version 3, encoding Float32 (default) or Q8."""
    found = parsed(story.read_bytes())
    assert (found["magic"], found["version"]) == (b"MLXKV001", 3)
    q8 = kvsnap.dumps(kvsnap.capture(running), format="mlxkv", codec="q8")
    assert (q8[:8], parsed(q8)["version"]) == (b"MLXKV001", 3)


@pytest.mark.parametrize("codec", ["float32", "q8"])
def test_marshal_and_unmarshal_are_a_round_trip(running: Any, codec: str) -> None:
    """MarshalBinary/UnmarshalBinary round-trip."""
    data = kvsnap.dumps(kvsnap.capture(running), format="mlxkv", codec=codec)
    again = kvsnap.loads(data)
    assert kvsnap.dumps(again, format="mlxkv") == data
    assert kvsnap.dumps(again, format="mlxkv", codec=codec) == data


def test_the_big_endian_dialect_of_the_page(running: Any) -> None:
    """Binary, big-endian length prefixes: on request; go-mlx itself writes little-endian, and so does the default."""
    snapshot = kvsnap.capture(running)
    big = kvsnap.dumps(snapshot, format="mlxkv", byte_order="big")
    assert struct.unpack_from(">2I", big, 8) == (3, len("llama"))
    little, swapped = parsed(kvsnap.dumps(snapshot, format="mlxkv")), parsed(big, ">")
    assert little["tokens"] == swapped["tokens"]
    assert np.array_equal(little["logits"], swapped["logits"])
    assert np.array_equal(little["entries"][2]["heads"][1][0]["values"], swapped["entries"][2]["heads"][1][0]["values"])
    assert kvsnap.loads(big).source["byte_order"] == "big"


def test_the_file_describes_itself(story: Path) -> None:
    """The architecture name, head/layer counts, head dimension, and number of query heads are all stored."""
    found = parsed(story.read_bytes())
    numbers = ("layers", "heads", "seq_len", "head_dim", "query_heads")
    assert [found[name] for name in numbers] == [3, 2, len(IDS) + 10, 16, 4]
    assert found["architecture"] == "llama"
    summary = kvsnap.inspect(story)
    assert (summary.architecture, summary.num_layers, summary.num_heads) == ("llama", 3, 2)
    assert (summary.head_dim, summary.num_query_heads) == (16, 4)


OTHERS: dict[str, Any] = {
    "architecture": tiny_qwen3,
    "layers": lambda: tiny_llama(num_hidden_layers=2),
    "heads": lambda: tiny_llama(num_key_value_heads=4),
    "head dim": lambda: tiny_llama(head_dim=8),
    "query heads": lambda: tiny_llama(num_attention_heads=8),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_loader_can_validate_against_the_model(story: Path, name: str) -> None:
    """So loaders can validate against the model they're being applied to."""
    engine = kvsnap.connect(OTHERS[name]())
    before = say(engine, 4, IDS[:5])
    reference = kvsnap.connect(OTHERS[name]())
    assert say(reference, 4, IDS[:5]) == before
    with pytest.raises(CompatibilityError):
        kvsnap.restore(kvsnap.load(story), engine, accept=["weights"])
    assert say(engine, 6) == say(reference, 6), "the refusal changed nothing"
    kvsnap.restore(kvsnap.load(story), kvsnap.connect(tiny_llama()), accept=["weights"])


# ---------------------------------------------------------------------------------------------------------------------
# The page of colibri, "KV Cache Persistence"
# ---------------------------------------------------------------------------------------------------------------------

LATENT_ROWS = "deepseek_v3" in KNOWN and keeps_latent(latent_model("deepseek_v3"))
needs_latent = pytest.mark.skipif(not LATENT_ROWS, reason=f"transformers {transformers.__version__}: no latent rows")
PLAIN = Geometry(n_layers=LAYERS, kv_lora=LATENT, qk_rope=ROPE, vocab=256)
SPARSE = Geometry(n_layers=LAYERS, kv_lora=LATENT, qk_rope=ROPE, vocab=256, index_width=INDEX, index_layers=(0, 2))
RECORD = 4 + LAYERS * 4 * (LATENT + ROPE)


def header(path: Path) -> tuple[Any, ...]:
    """Magic and the eight words of the page's table."""
    return struct.unpack("<8s8i", path.read_bytes()[:40])


def turn(engine: Any, file: ColiFile, prompt: list[int], count: int = 5) -> list[int]:
    """One turn of a conversation, appended: the prompt, an answer, every id of it evaluated."""
    ids = say(engine, count, prompt)
    engine.settle()
    file.append_snapshot(engine.capture(start=file.n_records))
    return ids


@pytest.fixture
def coli(tmp_path: Path) -> tuple[Any, Path]:
    """An engine and the file of its first turn."""
    engine, path = kvsnap.connect(latent_model("deepseek_v3")), tmp_path / ".coli_kv"
    with ColiFile.open(path, PLAIN, create=True) as file:
        turn(engine, file, IDS[:9])
    return engine, path


def made(path: Path, count: int, geometry: Geometry = PLAIN, start: int = 0) -> None:
    """Append `count` records whose rows follow from their place; no model."""
    with ColiFile.open(path, geometry, create=True) as file:
        place = np.arange(start, start + count, dtype=np.float32)[:, None]
        latent = [place + 100 * layer + np.zeros(geometry.kv_lora, np.float32) for layer in range(geometry.n_layers)]
        rope = [-place - layer + np.zeros(geometry.qk_rope, np.float32) for layer in range(geometry.n_layers)]
        owners = geometry.index_owners or ()
        index = [place * 7 + layer + np.zeros(geometry.index_width, np.float32) for layer in owners]
        file.append([(start + i) % 256 for i in range(count)], latent, rope, index or None)


@needs_latent
def test_a_conversation_reopens_warm_without_a_new_prefill(coli: tuple[Any, Path]) -> None:
    """Conversations reopen in a "warm" state; the engine avoids the need for a full re-prefill of the prompt."""
    engine, path = coli
    other = kvsnap.connect(latent_model("deepseek_v3"))
    done = kvsnap.restore(kvsnap.load(path), other, accept=["weights"])
    assert (done.reused, done.recomputed) == (13, 1), "the file has no logits: one pass of one token"
    expected = say(engine, 10)
    assert len(set(expected)) >= 4
    assert say(other, 10) == expected
    assert other.forwards == 10


@needs_latent
@pytest.mark.parametrize("family", ["deepseek_v3", "glm_moe_dsa-shared"])
def test_a_session_is_byte_identical_to_an_uninterrupted_one(tmp_path: Path, family: str) -> None:
    """Ensuring the session is byte-identical to an uninterrupted state: ids, logits, and the file itself."""
    if family.split("-", maxsplit=1)[0] not in KNOWN:
        pytest.skip(f"transformers {transformers.__version__} does not know {family}")
    geometry = PLAIN if family == "deepseek_v3" else SPARSE
    one, broken = tmp_path / "uninterrupted", tmp_path / "interrupted"
    engine = kvsnap.connect(latent_model(family))
    with ColiFile.open(one, geometry, create=True) as file:
        expected = [turn(engine, file, IDS[at : at + 6]) for at in (0, 6, 12)]
    found = []
    for at in (0, 6, 12):
        fresh = kvsnap.connect(latent_model(family))
        with ColiFile.open(broken, geometry, create=True) as file:
            if file.n_records:
                kvsnap.restore(file.load(), fresh, accept=["weights"])
            found.append(turn(fresh, file, IDS[at : at + 6]))
    assert found == expected
    assert broken.read_bytes() == one.read_bytes()
    assert say_with_logits(fresh, 6) == say_with_logits(engine, 6)


@needs_latent
def test_a_changed_row_is_no_longer_identical(coli: tuple[Any, Path]) -> None:
    """The control of the tests above."""
    engine, path = coli
    raw = bytearray(path.read_bytes())
    raw[40 + 3 * RECORD + 4 + 2] ^= 0x40
    path.write_bytes(raw)
    other = kvsnap.connect(latent_model("deepseek_v3"))
    kvsnap.restore(kvsnap.load(path), other, accept=["weights"])
    assert say_with_logits(other, 6)[1] != say_with_logits(engine, 6)[1]


def test_the_header_field_by_field(tmp_path: Path) -> None:
    """The table of the page: magic in bytes 0-7, then eight int32: n_layers, kv_lora, qk_rope, index_hd, nic, vocab,
    nrec, padding 0.
    """
    made(tmp_path / "plain", 5)
    assert header(tmp_path / "plain") == (b"COLIKV1\0", LAYERS, LATENT, ROPE, 0, 0, 256, 5, 0)
    made(tmp_path / "sparse", 3, SPARSE)
    assert header(tmp_path / "sparse") == (b"COLIKV1\0", LAYERS, LATENT, ROPE, INDEX, 2, 256, 3, 0)


@needs_latent
def test_a_record_holds_the_id_and_the_rows_of_all_layers(tmp_path: Path) -> None:
    """Token ID (4-byte integer), Lc (KV LoRA data for each layer), Rc (QK RoPE data for each layer), Ic (optional)."""
    if "glm_moe_dsa" not in KNOWN:
        pytest.skip("the family is not known")
    engine, path = kvsnap.connect(latent_model("glm_moe_dsa-shared")), tmp_path / ".coli_kv"
    with ColiFile.open(path, SPARSE, create=True) as file:
        turn(engine, file, IDS[:7])
    raw, size = path.read_bytes(), RECORD + 2 * 4 * INDEX
    assert len(raw) == 40 + 12 * size
    for number in range(12):
        record = raw[40 + number * size :][:size]
        assert struct.unpack_from("<i", record)[0] == engine.tokens[number]
        at = 4
        for layer in engine.cache.layers:
            for rows in (layer.keys, layer.values):
                row = rows[0, 0, number].numpy().tobytes()
                assert record[at : at + len(row)] == row
                at += len(row)
        for owner in (0, 2):
            row = engine.cache.layers[owner].indexer_keys[0, ..., number, :].numpy().tobytes()
            assert record[at : at + len(row)] == row
            at += len(row)
        assert at == size


@needs_latent
def test_every_turn_is_appended_and_nothing_before_it_is_written_again(coli: tuple[Any, Path]) -> None:
    """The engine appends compressed MLA KV-cache data incrementally after every turn."""
    engine, path = coli
    before = path.read_bytes()
    with ColiFile.open(path, PLAIN) as file, Seen() as seen:
        turn(engine, file, IDS[9:12])
    after = path.read_bytes()
    assert len(after) - len(before) == 8 * RECORD
    assert after[40 : len(before)] == before[40:]
    assert [(offset, length) for offset, length in seen.writes] == [(len(before), 8 * RECORD), (32, 4)]


class Seen:
    """What is written to files inside a `with` block, as the operating system is told."""

    def __init__(self) -> None:
        self.writes: list[tuple[int, int]] = []
        self.order: list[str] = []

    def record(self, operation: str, path: str, offset: int, data: bytes) -> None:
        self.order.append(operation)
        if operation == "write":
            self.writes.append((offset, len(data)))

    def __enter__(self) -> Self:
        files.recorder = self
        return self

    def __exit__(self, *_: object) -> None:
        files.recorder = None


def test_open_creates_a_valid_header_or_opens_what_is_there(tmp_path: Path) -> None:
    """kv_disk_open: opens the .coli_kv file in read/write binary mode or creates it with a valid header."""
    path = tmp_path / ".coli_kv"
    ColiFile.open(path, PLAIN, create=True).close()
    assert header(path) == (b"COLIKV1\0", LAYERS, LATENT, ROPE, 0, 0, 256, 0, 0)
    assert path.stat().st_size == 40
    made(path, 4)
    with ColiFile.open(path, PLAIN, create=True) as file:
        assert file.n_records == 4


def test_append_writes_at_the_end_and_updates_the_count(tmp_path: Path) -> None:
    """kv_disk_append: writes new token KV data to the end of the file and updates the record count."""
    path = tmp_path / ".coli_kv"
    made(path, 4)
    old = path.read_bytes()
    with Seen() as seen:
        made(path, 2, start=4)
    assert header(path)[7] == 6
    assert path.read_bytes()[40:].startswith(old[40:])
    assert struct.unpack_from("<i", path.read_bytes(), 40 + 5 * RECORD)[0] == 5
    assert seen.writes[-1] == (32, 4)
    assert seen.order == ["write", "sync", "write", "sync"], "rows reach the disk before the count does"


def test_load_validates_reads_and_resumes(tmp_path: Path) -> None:
    """kv_disk_load: validates the header, reads records into memory, and resumes the conversation state."""
    path = tmp_path / ".coli_kv"
    made(path, 6, SPARSE)
    with ColiFile.open(path, SPARSE) as file:
        snapshot, rows = file.load(), file.rows()
    assert snapshot.tokens == tuple(range(6))
    assert (snapshot.n_rows, snapshot.token_offset, snapshot.num_layers) == (6, 6, LAYERS)
    assert np.array_equal(snapshot.layers[2].tensor("latent").array[5], np.full(LATENT, 205, np.float32))
    assert np.array_equal(snapshot.layers[1].tensor("rope").array[4], np.full(ROPE, -5, np.float32))
    assert snapshot.layers[1].tensor("index") is None
    assert np.array_equal(rows.index[1][3], np.full(INDEX, 23, np.float32))
    path.write_bytes(b"COLIKW1" + path.read_bytes()[7:])
    with pytest.raises(kvsnap.KvsnapError):
        ColiFile.open(path, SPARSE)


def test_truncate_shortens_and_updates_the_header(tmp_path: Path) -> None:
    """kv_disk_truncate: reduces the file record count and updates the header, resetting or shortening the cache."""
    path = tmp_path / ".coli_kv"
    made(path, 6)
    old = path.read_bytes()
    with ColiFile.open(path, PLAIN) as file:
        file.truncate(2)
        assert file.load().tokens == (0, 1)
    assert header(path)[7] == 2
    assert path.read_bytes()[:32] + path.read_bytes()[36:] == old[:32] + old[36:], "nothing but the count"
    made(path, 1, start=9)
    assert colikv.load(path, geometry=PLAIN).tokens == (0, 1, 9)


def test_reset_is_a_count_of_zero(tmp_path: Path) -> None:
    """kv_disk_reset: resets the disk cache by truncating the record count to zero."""
    path = tmp_path / ".coli_kv"
    made(path, 6)
    with ColiFile.open(path, PLAIN) as file:
        file.reset()
        assert (file.n_records, file.load().tokens) == (0, ())
    assert header(path) == (b"COLIKV1\0", LAYERS, LATENT, ROPE, 0, 0, 256, 0, 0)


def test_rows_are_batched_before_they_are_written(tmp_path: Path) -> None:
    """A temporary disk buffer stages writes, batching tensor copies before performing fwrite operations."""
    path = tmp_path / ".coli_kv"
    with Seen() as seen:
        made(path, 500)
    rows = [length for offset, length in seen.writes if offset >= 40]
    assert sum(rows) == 500 * RECORD
    assert len(rows) <= 4, "500 records of 3 layers are 3,500 pieces"


OTHER_GEOMETRY = [
    ("n_layers", "layers", 4), ("kv_lora", "latent width", 16), ("qk_rope", "rope width", 4),
    ("index_width", "index width", 8), ("index_layers", "index layers", (0,)), ("vocab", "vocabulary", 257),
]  # fmt: skip


def changed(field: str, value: Any) -> Geometry:
    fields = {"n_layers": LAYERS, "kv_lora": LATENT, "qk_rope": ROPE, "vocab": 256, "index_width": INDEX}
    return Geometry(**{**fields, "index_layers": (0, 2), field: value})


@pytest.mark.parametrize(("field", "name", "value"), OTHER_GEOMETRY)
def test_the_header_is_compared_with_the_model(tmp_path: Path, field: str, name: str, value: Any) -> None:
    """During kv_disk_load, the engine compares the file header against the current Cfg parameters."""
    path = tmp_path / ".coli_kv"
    made(path, 3, SPARSE)
    raw = path.read_bytes()
    with pytest.raises(CompatibilityError, match=f"{name}: file .*, model "):
        ColiFile.open(path, changed(field, value))
    with pytest.raises(CompatibilityError, match=f"{name}: file .*, model "):
        colikv.load(path, geometry=changed(field, value))
    assert path.read_bytes() == raw
    assert colikv.load(path, geometry=SPARSE).n_rows == 3


@pytest.mark.parametrize(("field", "name", "value"), OTHER_GEOMETRY)
def test_another_model_s_file_is_ignored_in_the_mode_of_the_original(
    tmp_path: Path, field: str, name: str, value: Any
) -> None:
    """If a mismatch [...] occurs, the engine ignores the file to prevent state corruption."""
    path = tmp_path / ".coli_kv"
    made(path, 3, SPARSE)
    raw = path.read_bytes()
    with ColiFile.open(path, changed(field, value), mode="original-latest") as file:
        assert (file.outcome, file.n_records, file.load().tokens) == ("other-model-or-version", 0, ())
    assert path.read_bytes() == raw


@needs_latent
@pytest.mark.parametrize(("name", "changes"), [("layers", {"num_hidden_layers": 4}), ("latent", {"kv_lora_rank": 16}),
                                               ("rope", {"qk_rope_head_dim": 4, "head_dim": 4}),
                                               ("vocab", {"vocab_size": 300})])  # fmt: skip
def test_a_live_model_of_other_dimensions_refuses_the_file(
    coli: tuple[Any, Path], name: str, changes: dict[str, Any]
) -> None:
    """The same check when a file is restored into a model."""
    other = kvsnap.connect(latent_model("deepseek_v3", **changes))
    with pytest.raises(CompatibilityError):
        kvsnap.restore(kvsnap.load(coli[1]), other, accept=["weights"])
    assert other.tokens == ()


@pytest.mark.parametrize("draft", [0, 4])
def test_the_context_minus_a_draft_buffer_is_the_limit(tmp_path: Path, draft: int) -> None:
    """The engine will not load if the token count (nrec) exceeds the available context minus a draft buffer."""
    path, context = tmp_path / ".coli_kv", 40
    limit = context - 8 - draft
    made(path, limit - 1)
    with ColiFile.open(path, PLAIN, context=context, draft_reserve=draft) as file:
        assert file.load().n_rows == limit - 1
    made(path, 1, start=limit - 1)
    with ColiFile.open(path, PLAIN, context=context, draft_reserve=draft) as file:
        with pytest.raises(ContextError) as caught:
            file.load()
        assert str(limit) in str(caught.value)
        assert file.n_records == limit, "refused, not thrown away"


@needs_latent
def test_a_live_model_has_the_same_limit(coli: tuple[Any, Path]) -> None:
    """14 records: a context of 23 is enough (14 < 23 - 8), one of 22 is not."""
    for context, fits in ((23, True), (22, False)):
        other = kvsnap.connect(latent_model("deepseek_v3", max_position_embeddings=context))
        if fits:
            kvsnap.restore(kvsnap.load(coli[1]), other, accept=["weights"])
        else:
            with pytest.raises(ContextError):
                kvsnap.restore(kvsnap.load(coli[1]), other, accept=["weights"])
    other = kvsnap.connect(latent_model("deepseek_v3", max_position_embeddings=23))
    with pytest.raises(ContextError):
        kvsnap.restore(kvsnap.load(coli[1]), other, accept=["weights"], draft_reserve=1)


def test_draft_rows_start_empty_after_a_load(tmp_path: Path) -> None:
    """When Multi-Token Prediction (MTP) is used, loading a KV cache resets kv_start to ensure draft verification."""
    path = tmp_path / ".coli_kv"
    with_draft = Geometry(n_layers=LAYERS, kv_lora=LATENT, qk_rope=ROPE, vocab=256, has_draft=True)
    made(path, 4, with_draft)
    assert header(path)[1] == LAYERS, "a draft layer is not counted"
    assert path.stat().st_size == 40 + 4 * RECORD
    with ColiFile.open(path, with_draft) as file:
        snapshot = file.load()
        assert file.draft_empty
    assert snapshot.source["draft_rows"] == "empty"
    assert not any(t.role.startswith("draft") for t in snapshot.tensors())


WRITER = """
import sys, numpy as np
from kvsnap.formats.colikv import ColiFile, Geometry
geometry = Geometry(n_layers=3, kv_lora=32, qk_rope=8, vocab=256)
with ColiFile.open(sys.argv[1], geometry, create=True) as file:
    print("ready", flush=True)
    while True:
        n = file.n_records
        at = np.arange(n, n + 7, dtype=np.float32)[:, None]
        file.append((np.arange(n, n + 7) % 256).tolist(), [at + np.zeros(32, np.float32)] * 3,
                    [at + np.zeros(8, np.float32)] * 3)
        print(file.n_records, flush=True)
"""


@pytest.mark.parametrize("turns", [1, 3, 8, 20])
def test_a_killed_writer_leaves_whole_turns(tmp_path: Path, turns: int) -> None:
    """KV Cache Persistence provides crash-safe, incremental storage. (Power cuts: test_colikv.py, test_a_crash_...)"""
    path = tmp_path / ".coli_kv"
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert process.stdout is not None
    told = [line.strip() for line in itertools.islice(process.stdout, turns + 1)]
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    snapshot = colikv.load(path, geometry=PLAIN)
    n = snapshot.n_rows
    assert n % 7 == 0
    assert n >= int(told[-1]), "what was reported as written is there"
    assert snapshot.tokens == tuple(i % 256 for i in range(n))
    for layer in snapshot.layers:
        assert np.array_equal(layer.tensor("latent").array[:, 0], np.arange(n, dtype=np.float32))
    made(path, 2, start=n)
    assert colikv.load(path, geometry=PLAIN).n_rows == n + 2


def test_a_file_cut_anywhere_keeps_the_records_that_are_whole(tmp_path: Path) -> None:
    """What a crash of the machine may leave: never a part of a record, never an error for a torn tail."""
    path = tmp_path / ".coli_kv"
    made(path, 3)
    raw = path.read_bytes()
    for length in range(40, len(raw) + 1, 13):
        path.write_bytes(raw[:length])
        assert colikv.load(path, geometry=PLAIN).n_rows == (length - 40) // RECORD
    path.write_bytes(raw[:39])
    with pytest.raises(DamagedError):
        colikv.load(path, geometry=PLAIN)

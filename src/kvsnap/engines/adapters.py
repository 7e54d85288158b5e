"""Put an adapter that PEFT wrote around a loaded model. Only from a directory, and never from a pickle."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

from kvsnap.engines.gguf import first_line
from kvsnap.errors import DamagedError, ExtraMissingError, FormatError, MissingError, StorageError, UnsupportedError

__all__ = ["check_adapter", "put_around"]

_SETTINGS, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def check_adapter(directory: str | os.PathLike[str]) -> Path:
    """Return the directory of an adapter, looked at without loading anything.

    Raise `MissingError` (no directory, no settings, no weights in safetensors), `FormatError` (settings that are no
    JSON object), `StorageError`.
    """
    path = Path(directory).expanduser()
    if not path.is_dir():
        raise MissingError("no such directory of an adapter", path=path)
    for name in (_SETTINGS, _WEIGHTS):
        if not (path / name).is_file():
            raise MissingError("not an adapter that PEFT wrote with safetensors", path=path, expected=name)
    try:
        settings = json.loads((path / _SETTINGS).read_bytes())
    except ValueError as error:
        raise FormatError(f"not JSON: {error}", path=path / _SETTINGS) from error
    except OSError as error:
        raise StorageError(f"cannot be read: {error.strerror}", errno=error.errno, path=path / _SETTINGS) from error
    if not isinstance(settings, dict) or not isinstance(settings.get("peft_type"), str):
        raise FormatError("the settings of an adapter are a JSON object with peft_type", path=path / _SETTINGS)
    return path


def put_around(model: Any, directory: Path) -> Any:
    """Return the model with the adapter around it, in eval mode.

    Raise `ExtraMissingError` without PEFT, `DamagedError` (cut off, or tensors are missing), `UnsupportedError` (not
    for this model, or what PEFT cannot load).
    """
    try:
        import peft
    except ImportError:
        raise ExtraMissingError("an adapter needs PEFT: pip install 'kvsnap[adapters]'") from None
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(directory / _WEIGHTS), "pt") as file:
            stored = set(file.keys())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT warns of missing tensors and goes on; here that is an error
            wrapped = peft.PeftModel.from_pretrained(model, str(directory), is_trainable=False)
            wanted = set(peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False))
    except SafetensorError as error:
        raise DamagedError(f"the adapter cannot be read: {first_line(error)}", path=directory / _WEIGHTS) from error
    except (ValueError, TypeError, KeyError, RuntimeError, AttributeError, OSError) as error:
        raise UnsupportedError(f"PEFT cannot put it around this model: {first_line(error)}", path=directory) from error
    missing, spare = sorted(wanted - stored), sorted(n for n in stored - wanted if "lora_" in n)
    if missing or not stored:
        first = missing[0] if missing else "all"
        raise DamagedError(f"{len(missing)} tensors of the adapter are missing, the first is {first}", path=directory)
    if spare:
        raise UnsupportedError(
            f"{len(spare)} tensors of the adapter have no place in this model, the first is {spare[0]}", path=directory
        )
    return wrapped.eval()

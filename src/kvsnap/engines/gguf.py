"""Convert a GGUF file once into a Hugging Face directory, and keep transformers quiet while it works."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import os
import shutil
import struct
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import platformdirs
import xxhash

from kvsnap.errors import DamagedError, ExtraMissingError, StorageError, UnsupportedError

Progress: TypeAlias = Callable[[int, int, str], None]
"""Called as `progress(done, total, text)`: `done` never falls, and reaches `total` when all went well."""

_INSTALL = "pip install 'kvsnap[transformers]'"
_MARKER = "kvsnap.json"
_REVISION = 2
"""Raised whenever the conversion gives something else for the same file, so that what an older one made is not used.

2: the special tokens and the start token are those that the file declares.
"""
# Byte-pair vocabularies that llama.cpp gives a start token where the file does not say.
_STARTED = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")
_ABANDONED_SECONDS = 24 * 3600.0
_SAMPLE = "Hello, world: 12345 = <|im_start|>user\n\n  naïve façade don't 漢字 🙂"

# What the readers of gguf and transformers raise on bytes that make no sense to them.
NONSENSE = (ValueError, LookupError, TypeError, OverflowError, MemoryError, RuntimeError, AttributeError, struct.error)

# Quieting touches settings of the whole process, so only one load at a time may hold them.
_quiet_lock = threading.RLock()


def converted(gguf: Path, cache_directory: str | os.PathLike[str] | None, progress: Progress | None) -> Path:
    """Return the directory that `gguf` was converted to, converting it if that was never finished."""
    report = progress or _unheard
    target = conversions(cache_directory) / _conversion_key(gguf)
    if _complete(target):
        return target
    for module in ("gguf", "accelerate"):
        require(module)
    report(0, 100, f"reading {gguf.name}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _drop_abandoned(target)
        # Next to its target, so that the rename is atomic; a conversion that dies is never found under the name.
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise StorageError(f"no room for converted models: {error.strerror}", errno=error.errno, path=target) from error
    try:
        _convert(gguf, work, report)
        (work / _MARKER).write_text(json.dumps(_origin(gguf), indent=1) + "\n", encoding="utf-8")
        _publish(work, target)
    except OSError as error:
        message = f"the converted model cannot be written: {error.strerror or first_line(error)}"
        raise StorageError(message, errno=error.errno, path=target) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    report(100, 100, f"{gguf.name} is converted")
    return target


def conversion_of(gguf: Path) -> Path | None:
    """Return the directory that `gguf` was converted to; None where that was never done or never finished."""
    target = conversions() / _conversion_key(gguf)
    return target if _complete(target) else None


def _unheard(done: int, total: int, text: str, /) -> None:
    del done, total, text


def _convert(gguf: Path, work: Path, report: Progress) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": gguf.name, "trust_remote_code": False}
    try:
        with (
            quiet(),
            TokenizerErrors(gguf),
            _counted(lambda part: report(40 + int(20 * part), 100, "decoding the weights")),
        ):
            model, info = AutoModelForCausalLM.from_pretrained(
                str(gguf.parent), dtype="float32", output_loading_info=True, **where
            )
            report(65, 100, "reading the tokenizer")
            tokenizer = _as_declared(AutoTokenizer.from_pretrained(str(gguf.parent), **where), gguf)
    except DamagedError:
        raise
    except ImportError as error:
        # Some releases try a slow tokenizer when the fast one fails, and then miss a package that would not help.
        raise UnsupportedError("transformers cannot read its tokenizer", path=gguf) from error
    except NONSENSE as error:
        if "not supported" in str(error):
            raise UnsupportedError(f"transformers cannot convert it: {first_line(error)}", path=gguf) from error
        raise DamagedError(f"the GGUF file cannot be read: {first_line(error)}", path=gguf) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise DamagedError(f"{len(missing)} weights are missing, the first is {missing[0]}", path=gguf)
    # They are plain float32 now, but transformers refuses to save what it calls quantized.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    report(80, 100, "writing the converted model")
    with quiet():
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)
        reloaded = AutoTokenizer.from_pretrained(str(work), trust_remote_code=False)
    report(95, 100, "checking the tokenizer")
    if reloaded.encode(_SAMPLE) != tokenizer.encode(_SAMPLE):
        raise UnsupportedError("its tokenizer does not survive the conversion", path=gguf)


def _as_declared(tokenizer: Any, gguf: Path) -> Any:
    """Give the tokenizer the special tokens that the file declares.

    Many releases of transformers (4.57, 5.0 and 5.12, not 5.24) put their own in their place, or a start token
    in front of every text.
    """
    from gguf import GGUFReader
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf).fields

    def declared(key: str) -> Any:
        field = fields.get(f"tokenizer.ggml.{key}")
        return None if field is None else field.contents()

    core = tokenizer.backend_tokenizer
    starts = declared("add_bos_token")
    if starts is None:
        starts = declared("pre") in _STARTED
    if declared("model") == "gpt2" and not starts and not declared("add_eos_token"):
        from tokenizers.processors import ByteLevel

        core.post_processor = ByteLevel(trim_offsets=False)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {name: declared(f"{key}_token_id") for name, key in names.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=tokenizer.chat_template,
        clean_up_tokenization_spaces=False,
        **{name: core.id_to_token(token) for name, token in special.items() if token is not None},
    )


def _publish(work: Path, target: Path) -> None:
    for path in (*work.iterdir(), work):
        _sync(path)
    if target.is_dir() and not _complete(target):
        shutil.rmtree(target)
    try:
        work.rename(target)
    except OSError:
        if not _complete(target):
            raise  # else another process was first, and its directory holds the same
        return
    _sync(target.parent)


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no directory
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _complete(target: Path) -> bool:
    return all((target / name).is_file() for name in (_MARKER, "config.json")) and any(target.glob("*.safetensors"))


def _drop_abandoned(target: Path) -> None:
    for path in target.parent.glob(f".{target.name}.*"):
        try:
            abandoned = time.time() - path.stat().st_mtime > _ABANDONED_SECONDS
        except FileNotFoundError:
            continue  # its owner has just finished
        if abandoned:
            shutil.rmtree(path, ignore_errors=True)


def _conversion_key(gguf: Path) -> str:
    """Name a conversion by the content it is made of and by what makes it.

    Each major version of transformers writes configurations that another reads differently (4 ignores where 5 puts the
    rope base), and so may each revision of this module.
    """
    digest = xxhash.xxh3_128()
    try:
        with gguf.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise StorageError(f"cannot be read: {error.strerror}", errno=error.errno, path=gguf) from error
    major = importlib.metadata.version("transformers").split(".")[0]
    return f"{digest.hexdigest()}-t{major}-r{_REVISION}"


def _origin(gguf: Path) -> dict[str, str]:
    versions = {"transformers": importlib.metadata.version("transformers"), "revision": str(_REVISION)}
    return {"converted_from": gguf.name, **versions}


def conversions(cache_directory: str | os.PathLike[str] | None = None) -> Path:
    """Return the directory that holds the converted models: in `cache_directory`, $KVSNAP_CACHE or the user's cache."""
    chosen = cache_directory if cache_directory is not None else os.environ.get("KVSNAP_CACHE")
    root = Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("kvsnap"))
    return root / "models"


def require(module: str) -> Any:
    """Import `module`, or raise ExtraMissingError with the line to type."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ExtraMissingError(f"running a model needs {module}: {_INSTALL}") from error


def first_line(error: BaseException) -> str:
    """The first line of the error's text, or its class where it has none."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


# -- keeping transformers quiet ------------------------------------------------------------------------------


class TokenizerErrors:
    """Turn what the tokenizers library raises inside a `with` block into DamagedError for the file at `path`.

    It raises bare Exception, and panics with a class that derives from BaseException and has no importable name.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and (kind is Exception or type(error).__name__ == "PanicException"):
            raise DamagedError(f"its tokenizer makes no sense: {first_line(error)}", path=self.path) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers and the hub from printing, then put every setting back."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging as settings

    hub_log = logging.getLogger("huggingface_hub")
    with _quiet_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verbosity, bars, hub_bars = (
            settings.get_verbosity(),
            settings.is_progress_bar_enabled(),
            not are_progress_bars_disabled(),
        )
        level = hub_log.level
        settings.set_verbosity_error()
        settings.disable_progress_bar()
        hub_log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            settings.set_verbosity(verbosity)
            if bars:
                settings.enable_progress_bar()
            (enable_progress_bars if hub_bars else disable_progress_bars)()
            hub_log.setLevel(level)


@contextmanager
def _counted(report: Callable[[float], None]) -> Iterator[None]:
    """Let `report` (a part from 0 to 1) take the place of the progress bar that transformers draws over a GGUF."""
    from transformers import modeling_gguf_pytorch_utils as reader

    def count(items: Iterable[Any], **_: Any) -> Iterator[Any]:
        items = list(items)
        for done, item in enumerate(items):
            report(done / len(items))
            yield item

    with _quiet_lock:
        original = reader.tqdm
        reader.tqdm = count
        try:
            yield
        finally:
            reader.tqdm = original

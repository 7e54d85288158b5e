"""Options for a model and a sampler, and a live engine from them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import click

from kvsnap import sampling
from kvsnap.api import connect
from kvsnap.cli._output import progress, remark, waiting
from kvsnap.errors import CompatibilityError, InputError, KvsnapError
from kvsnap.identity import Identity
from kvsnap.layout import Sampler, SamplerState
from kvsnap.protocols import Engine

__all__ = [
    "EMBEDDED", "ChosenModel", "RefusedModelError", "adapter_option", "choose_model",
    "error_text", "hash_once_option", "idle_settings", "model_options",
    "open_decoder", "open_engine", "open_tokenizer", "parse_sampler", "recorded_decoder", "refusing", "sampler_changes",
    "sampler_options", "sampler_state",
]  # fmt: skip

Function = TypeVar("Function", bound=Callable[..., Any])
_DTYPES = ("float32", "bfloat16", "float16")
_ATTENTION = ("sdpa", "eager")
EMBEDDED = "smollm2"
_ADAPTER = "kvsnap.adapter"
_HASH_ONCE = "kvsnap.hash-once"


def model_options(function: Function) -> Function:
    """Add --model, --dtype and --attention."""
    for option in (
        click.option(
            "--attention", type=click.Choice(_ATTENTION), help="Attention kernel; bits agree only under the same one."
        ),
        click.option(
            "--dtype", type=click.Choice(_DTYPES), help="Cast the weights; default: as in FILE, else as stored."
        ),
        click.option(
            "--model",
            metavar="NAME",
            help="A model directory, a GGUF file, smollm2 (embedded), or a name on the hub.  "
            "[default: the one that FILE, if any, was made with, else smollm2]",
        ),
    ):
        function = option(function)
    return function


def adapter_option(function: Function) -> Function:
    """Add --adapter, which `open_engine` looks up."""

    def keep(context: click.Context, _: click.Parameter, value: str | None) -> None:
        context.meta[_ADAPTER] = value

    return click.option(
        "--adapter", metavar="DIR", expose_value=False, callback=keep,
        help="Put an adapter that PEFT wrote (LoRA and its relatives) around the model.",
    )(function)  # fmt: skip


def hash_once_option(function: Function) -> Function:
    """Add --hash-once, which `open_engine` looks up."""

    def keep(context: click.Context, _: click.Parameter, value: bool) -> None:
        context.meta[_HASH_ONCE] = value

    return click.option(
        "--hash-once", is_flag=True, expose_value=False, callback=keep,
        help="Hash the weights once, not at every turn. A file of the model that is overwritten meanwhile is not seen.",
    )(function)  # fmt: skip


def sampler_options(function: Function) -> Function:
    """Add the settings of the sampler; the command gets those given as one dict, `sampler`."""
    options = (
        ("--temperature", float, "0 (default) takes the most probable token."),
        ("--top-k", int, "Choose among the K most probable tokens."),
        ("--top-p", float, "Choose among the most probable tokens that make up P."),
        ("--min-p", float, "Leave out tokens below P times the best."),
        ("--repetition-penalty", float, "Above 1: tokens seen before become less probable."),
        ("--seed", int, "Start of the random numbers; default: drawn, and kept in the file."),
    )
    names = [flag[2:].replace("-", "_") for flag, _, _ in options]

    @functools.wraps(function)
    def gathered(**given: Any) -> Any:
        chosen = {name: given.pop(name) for name in names}
        given["sampler"] = {name: value for name, value in chosen.items() if value is not None}
        Sampler(**given["sampler"])  # out of range is said before a model is loaded
        return function(**given)

    decorated: Any = gathered
    for flag, kind, text in reversed(options):
        decorated = click.option(flag, type=kind, help=text)(decorated)
    return decorated  # type: ignore[no-any-return] # click keeps the function


def parse_sampler(text: str) -> Sampler:
    """Return the sampler of `temperature=0.7,seed=1` or `greedy`. Raise `InputError` naming what is wrong."""
    return Sampler(**sampler_changes(text))


def sampler_changes(text: str) -> dict[str, Any]:
    """Return the settings named in a text as `parse_sampler` reads it, and no others; raise as it does."""
    if text.strip() == "greedy":
        return {f.name: f.default for f in fields(Sampler)}
    known = {f.name: int if f.name in ("top_k", "seed") else float for f in fields(Sampler)}
    settings: dict[str, Any] = {}
    for item in text.split(","):
        name, sign, value = item.partition("=")
        name = name.strip().replace("-", "_")
        if not sign or name not in known:
            raise InputError(
                "not a sampler setting",
                expected=f"NAME=VALUE with NAME one of {', '.join(known)}",
                found=item or "nothing",
            )  # fmt: skip
        if name in settings:
            raise InputError("a sampler setting is given twice", expected=f"{name} once", found=text)
        try:
            settings[name] = known[name](value)
        except ValueError:
            raise InputError(f"sampler setting {name} is no number", found=value) from None
    return settings


def sampler_state(saved: SamplerState | None, changes: dict[str, Any]) -> SamplerState | None:
    """Return what to continue with: the saved settings with `changes`; the saved random numbers unless a seed is given.

    None: nothing was asked for, so what the file says stays.
    """
    if not changes:
        return None
    settings = replace(saved.settings if saved else Sampler(), **changes)
    if saved is None or "seed" in changes:
        return sampling.start(settings)
    return SamplerState(settings, saved.random)


def idle_settings(given: Mapping[str, Any], effective: Sampler) -> list[str]:
    """Return a warning where settings were given that do nothing, because the most probable token is always taken."""
    idle = [f"--{n.replace('_', '-')}" for n in ("top_k", "top_p", "min_p", "seed") if n in given]
    if not idle or not effective.greedy or "temperature" in given:
        return []
    does = "does" if len(idle) == 1 else "do"
    return [f"{', '.join(idle)} {does} nothing without --temperature: the most probable token is always taken"]


# -- which model ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """The model that a command takes, and why: `given`, `recorded` in the file, or the `default`."""

    name: str
    why: str

    @property
    def recorded(self) -> str:
        """The name for a file's metadata: a path is made absolute, so that it holds in any directory."""
        local = self.name != EMBEDDED and os.path.exists(os.path.expanduser(self.name))
        return os.path.abspath(os.path.expanduser(self.name)) if local else self.name

    def __str__(self) -> str:
        told = {"given": self.name, "recorded": f"{self.name}, which the file names"}
        return told.get(self.why, f"{self.name}, the default; name another one with --model")


def choose_model(given: str | None, metadata: Mapping[str, str]) -> ChosenModel:
    """Return the model that was asked for, else the one that the file names where it is still there, else smollm2.

    A name on the hub that a file gives is not followed: files come from others, and opening one asks no network.
    """
    if given is not None:
        return ChosenModel(given, "given")
    name = metadata.get("model", "")
    if name == EMBEDDED or (os.path.isabs(name) and os.path.exists(name)):
        return ChosenModel(name, "recorded")
    return ChosenModel(EMBEDDED, "default")


class RefusedModelError(CompatibilityError):
    """The model that a command chose is not the one of the file."""

    def __init__(self, error: CompatibilityError, chosen: ChosenModel, hint: str = "", *, turns: bool = False) -> None:
        super().__init__(error.message, report=error.report, path=error.path, offset=error.offset,
                         expected=error.expected, found=error.found)  # fmt: skip
        self.chosen = chosen
        self.hint = hint
        self.turns = turns


@contextmanager
def refusing(chosen: ChosenModel, hint: str = "", *, turns: bool = False) -> Iterator[ChosenModel]:
    """Yield the chosen model, and name it in a refusal, with what else can be done.

    With `turns` a session would be gone on with, which takes those of one model only.
    """
    try:
        yield chosen
    except CompatibilityError as error:
        raise RefusedModelError(error, chosen, hint, turns=turns) from error


def error_text(error: KvsnapError) -> str:
    """Return an error as one line: of a refused model the first differences, and what would take them on."""
    chosen = f" (compared with {error.chosen})" if isinstance(error, RefusedModelError) else ""
    hint = f"; {error.hint}" if isinstance(error, RefusedModelError) and error.hint else ""
    report = error.report if isinstance(error, CompatibilityError) else None
    if report is None or not report.refusals:
        return f"{error}{chosen}{hint}"
    bad = report.refusals
    where = "" if error.path is None else f"{error.path}: "
    more = f"; and {len(bad) - 2} more" if len(bad) > 2 else ""
    text = "; ".join(str(f) for f in bad[:2])
    accept = " ".join(f"--accept {name}" for name in report.to_accept)
    what = f"To take it on nevertheless: {accept}"
    if isinstance(error, RefusedModelError) and error.turns and any(f.verdict == "differ" for f in bad):
        what = "A session takes turns of one model only"
    return f"{where}the snapshot is not for this model{chosen}: {text}{more}. {what}{hint}"


def open_tokenizer(model: str) -> Any:
    """Load the tokenizer of a model, not its weights."""
    _set_quiet()
    from kvsnap.engines.gguf import conversions
    from kvsnap.engines.models import load_tokenizer

    with waiting(f"loading the tokenizer of {model}") as stop, progress(f"loading {model}") as report:
        return load_tokenizer(model, progress=_conversion(model, conversions(), stop, report))


def open_decoder(model: str) -> Callable[[Sequence[int]], str]:
    """Return what turns ids into text, from the tokenizer of a model; its weights are not loaded."""
    return _decoder_of(open_tokenizer(model))


def _decoder_of(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    decode = tokenizer.decode
    return lambda ids: str(decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def recorded_decoder(
    name: str, metadata: Mapping[str, str], identity: Identity
) -> Callable[[Sequence[int]], str] | None:
    """Return what turns ids of the file `name` into text, from the tokenizer of the model that the file itself names.

    Only a local model that is still there and holds the very tokenizer is asked, and nothing is converted or fetched;
    else None, and a remark where another tokenizer is there.
    """
    chosen = choose_model(None, metadata)
    if chosen.why != "recorded" or not identity.tokenizer:
        return None
    from kvsnap.engines.decoding import digest_of, stored_decoder

    try:
        found = stored_decoder(chosen.name)
        if found is None:
            return None
        decode, digest = found
        if digest == identity.tokenizer:
            return decode
        tokenizer = open_tokenizer(chosen.name)  # some families are read in another way than their file says
        if digest_of(tokenizer) == identity.tokenizer:
            return _decoder_of(tokenizer)
    except (KvsnapError, OSError):
        return None  # nobody asked for this model: ids are shown
    remark(f"{name}: {chosen.name} has another tokenizer now: token ids are shown")
    return None


def _set_quiet() -> None:
    """Ask transformers for silence; to be done before it is imported, since it reads these once."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _conversion(
    model: str, where: object, stop: Callable[[], None], report: Callable[..., None]
) -> Callable[[int, int, str], None]:
    """Return what is told of a conversion: that it happens, and how far it is."""

    def told(done: int, total: int, text: str) -> None:
        if not done:
            stop()  # a conversion: the bar takes over
            what = "the embedded SmolLM2 once, about half a minute" if model == EMBEDDED else f"{model} once"
            remark(f"converting {what}; kept in {where}")
        report(done, total, text)

    return told


def open_engine(
    model: str, dtype: str | None, attention: str | None, identity: Identity | None = None, *, adapted: bool = True
) -> Engine:
    """Load a model, with the adapter of --adapter around it if `adapted`, and connect it.

    What is not asked for is taken from the identity of a file, where it says so; an adapter never is.
    """
    _set_quiet()
    from kvsnap.engines.gguf import conversions
    from kvsnap.engines.models import load_model

    if identity is not None:
        saved = dict(identity.runtime).get("attention", "").strip('"')
        dtype = dtype or (identity.cache_dtype if identity.cache_dtype in _DTYPES else None)
        attention = attention or (saved if saved in _ATTENTION else None)
    with waiting(f"loading {model}") as stop, progress(f"loading {model}") as report:
        told = _conversion(model, conversions(), stop, report)
        context = click.get_current_context(silent=True)
        adapter = context.meta.get(_ADAPTER) if adapted and context is not None else None
        loaded = load_model(model, dtype=dtype, attention=attention, adapter=adapter, progress=told)
    if loaded.tokenizer is None:
        remark(f"kvsnap: {model} has no tokenizer: it takes token ids (--prompt-ids) and shows them")
    once = context is not None and context.meta.get(_HASH_ONCE)
    return connect(loaded.model, loaded.tokenizer, digest="changed" if once else "always")

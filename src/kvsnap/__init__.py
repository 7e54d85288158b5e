"""kvsnap: a save file for the live state of a language model."""

from kvsnap.api import (
    Continuation,
    LossReport,
    Restored,
    capture,
    check,
    connect,
    convert,
    dumps,
    generate,
    inspect,
    load,
    loads,
    restore,
    save,
    sweep,
    verify,
    warm_from_tokens,
)
from kvsnap.errors import KvsnapError
from kvsnap.identity import Compatibility, Identity
from kvsnap.layout import Head, Layer, Sampler, Snapshot, Tensor
from kvsnap.protocols import Engine, Token
from kvsnap.session import Session

__version__ = "0.1.0"

__all__ = [
    "Compatibility",
    "Continuation",
    "Engine",
    "Head",
    "Identity",
    "KvsnapError",
    "Layer",
    "LossReport",
    "Restored",
    "Sampler",
    "Session",
    "Snapshot",
    "Tensor",
    "Token",
    "__version__",
    "capture",
    "check",
    "connect",
    "convert",
    "dumps",
    "generate",
    "inspect",
    "load",
    "loads",
    "restore",
    "save",
    "sweep",
    "verify",
    "warm_from_tokens",
]

"""Turns ids into text with the tokenizer file of a local model, without torch and transformers.

transformers imports torch to read a tokenizer: some seconds, where the file itself takes a third of one. Whether both
are the same is not taken on trust: the digest is over the same text as that of an identity. It is another one for
families whose tokenizer transformers builds in its own way, though ids mean the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from kvsnap.engines._tf_identity import digest_of_rust
from kvsnap.engines._tf_identity import tokenizer_digest as digest_of
from kvsnap.engines.gguf import TokenizerErrors, conversion_of, require
from kvsnap.engines.models import resolve

__all__ = ["digest_of", "stored_decoder"]

Decode = Callable[[Sequence[int]], str]


def stored_decoder(name: str | os.PathLike[str]) -> tuple[Decode, str] | None:
    """Return what turns ids into text, special tokens too, and the digest of the tokenizer as an identity holds it.

    It is read from the `tokenizer.json` of a model directory, or of what a GGUF was converted to. None for a model
    without such a file, a GGUF that was not converted yet, and a name on the hub: nothing is converted or fetched.
    Raise as `resolve` does, `ExtraMissingError` without tokenizers, `DamagedError` for a file that makes no sense.
    """
    source = resolve(name)
    path = source.path
    if source.kind == "gguf" and path is not None:
        path = conversion_of(path)
    file = None if path is None else path / "tokenizer.json"
    if file is None or not file.is_file():
        return None
    return _read(file)


def _read(file: Path) -> tuple[Decode, str]:
    require("tokenizers")
    from tokenizers import Tokenizer

    with TokenizerErrors(file):
        made = Tokenizer.from_file(str(file))
        digest = digest_of_rust(made.to_str())

    def decode(ids: Sequence[int]) -> str:
        return str(made.decode([i for i in ids if 0 <= i < 2**32], skip_special_tokens=False))

    return decode, digest

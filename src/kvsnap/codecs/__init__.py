"""How the bytes of a part are stored: one file per codec, found here by number or by name (docs/codecs.md)."""

from __future__ import annotations

from collections.abc import Mapping

from kvsnap.codecs.exact import Exact
from kvsnap.codecs.q8 import Q8
from kvsnap.errors import InputError, UnsupportedError, VersionError
from kvsnap.protocols import Codec
from kvsnap.tensors import TensorSpec

__all__ = ["CODECS", "EXACT", "Q8_PLAIN", "RESERVED", "codec_for", "codec_of_id", "codec_of_name"]

EXACT = Exact()
Q8_PLAIN = Q8()

CODECS: Mapping[int, Exact | Q8] = {EXACT.id: EXACT, Q8_PLAIN.id: Q8_PLAIN}
"""Every codec of this release by its number on disk. Numbers are append-only."""
RESERVED: Mapping[int, str] = {2: "lossless", 4: "q8 in zstd"}
"""Numbers that are given away but have no codec in this release."""


def codec_of_id(number: int) -> Codec:
    """Return the codec with this number on disk.

    Raise `UnsupportedError` for a reserved number, `VersionError` for one that only a newer release can know.
    """
    if number in CODECS:
        return CODECS[number]
    known = ", ".join(f"{n} {codec.name}" for n, codec in CODECS.items())
    if number in RESERVED:
        raise UnsupportedError(
            f"codec {number} ({RESERVED[number]}) is reserved, but this release does not have it",
            expected=known,
            found=number,
        )
    raise VersionError("codec number is not known; a newer release may know it", expected=known, found=number)


def codec_of_name(name: str) -> Exact | Q8:
    """Return the codec of this name; raise `InputError` listing the names for another one."""
    for codec in CODECS.values():
        if codec.name == name:
            return codec
    raise InputError("no such codec", expected=", ".join(codec.name for codec in CODECS.values()), found=name)


def codec_for(name: str, spec: TensorSpec) -> Codec:
    """Return the codec for this tensor when `name` was asked for: that codec, or `exact` where it does not apply.

    Raise `InputError` for an unknown name.
    """
    codec = codec_of_name(name)
    return codec if codec.applies(spec) else EXACT

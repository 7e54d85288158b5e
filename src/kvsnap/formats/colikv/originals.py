"""What the published readers make of a file: docs/formats/colikv.md section 5."""

from __future__ import annotations

import struct

from kvsnap.formats.colikv.geometry import Geometry
from kvsnap.formats.colikv.header import HEADER_SIZE, Header
from kvsnap.formats.colikv.rows import Encoding

__all__ = ["MODES", "original_outcome"]

MODES = ("safe", "original-v1", "original-latest")
_MAGICS = {b"COLIKV1\0": Encoding("float32"), b"COLIKV2\0": Encoding("fp8"), b"COLIKV3\0": None}


def original_outcome(
    mode: str, head: bytes, size: int, geometry: Geometry, encoding: Encoding | None, limit: int | None
) -> str:
    """Return what the first (`original-v1`) or latest reader says of a file.

    `ok`, `other-model-or-version`, `needs-fp8-mode`, `codec-or-bits-differ`, `nothing-to-load` or `exceeds-context`.
    `encoding` is how that reader was started, `limit` its context less 8 and the draft reserve.
    """
    wanted = encoding or Encoding("float32")
    magic = head[:8]
    if len(head) < HEADER_SIZE or magic not in _MAGICS or (mode == "original-v1" and magic != b"COLIKV1\0"):
        return "other-model-or-version"
    *numbers, count, word = struct.unpack_from("<8i", head, 8)
    g = geometry
    if numbers != [g.n_layers, g.kv_lora, g.qk_rope, g.index_width, g.index_count, g.vocab]:
        return "other-model-or-version"
    stored = _MAGICS[magic]
    if stored is None:
        if wanted.version != 3 or word != wanted.tag:
            return "codec-or-bits-differ"
        stored = wanted
    elif stored.name == "fp8" and wanted.name != "fp8":
        return "needs-fp8-mode"
    if count < 1:
        return "nothing-to-load"
    if limit is not None and count >= limit:
        return "exceeds-context"
    header = Header(magic, geometry, stored, count, word, "colibri", size)
    return "ok" if header.n_usable else "nothing-to-load"

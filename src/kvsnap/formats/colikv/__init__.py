"""`.coli_kv` conversation files of the colibri engine and its forks: docs/formats/colikv.md.

`ColiFile` works in place on a real file; `load`, `loads` and `FORMAT` turn files into snapshots and back.
"""

from __future__ import annotations

from kvsnap.formats.colikv.deepseek import DeepSeekFile, DeepSeekLayer, ratio_checksum, read_deepseek
from kvsnap.formats.colikv.file import ColiFile, ColiRows
from kvsnap.formats.colikv.format import FORMAT, ColikvFormat, dumps, load, loads
from kvsnap.formats.colikv.geometry import Geometry
from kvsnap.formats.colikv.header import Header, encoding_of
from kvsnap.formats.colikv.reading import assign_index_layers, assign_like, has_loose_rows
from kvsnap.formats.colikv.rows import Encoding

__all__ = [
    "FORMAT", "ColiFile", "ColiRows", "ColikvFormat", "DeepSeekFile", "DeepSeekLayer", "Encoding", "Geometry", "Header",
    "assign_index_layers", "assign_like", "dumps", "encoding_of", "has_loose_rows", "load", "loads", "ratio_checksum",
    "read_deepseek",
]  # fmt: skip

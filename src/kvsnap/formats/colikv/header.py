"""The header of a `.coli_kv` file: what it says, which dialect it is, and what a model must agree with.

docs/formats/colikv.md sections 2, 5 and 6. Every number is checked before it is used to compute a size.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvsnap.errors import CompatibilityError, DamagedError, FormatError, InputError, UnsupportedError, VersionError
from kvsnap.formats.colikv.geometry import Geometry, limits_of
from kvsnap.formats.colikv.rows import Encoding, rotates
from kvsnap.identity import Compatibility, FieldCheck

__all__ = ["HEADER_SIZE", "Header", "encoding_of", "is_colikv", "parse_header"]

HEADER_SIZE = 40
COUNT_AT = 32
DEEPSEEK_MAGIC = b"COLIDV41"
_MAGIC = {b"COLIKV1\0": 1, b"COLIKV2\0": 2, b"COLIKV3\0": 3}
_SYNTARA = b"SYNTARAK"
_WORDS = struct.Struct("<8s8i")

MAX_RECORDS = 1 << 22


@dataclass(frozen=True, slots=True)
class Header:
    """One parsed header and what follows from it and the size of the file.

    `count` is the record count as the file states it, `word` the last word; `size` the size of the file. `dialect` is
    `colibri`, `watermark` or `syntara`.
    """

    magic: bytes
    geometry: Geometry
    encoding: Encoding
    count: int
    word: int
    dialect: str
    size: int

    @property
    def record_size(self) -> int:
        """Bytes of one record."""
        g = self.geometry
        rows = self.encoding.row_size(g.kv_lora) + self.encoding.row_size(g.qk_rope)
        return 4 + g.n_layers * rows + g.index_rows * g.index_width * 4

    @property
    def n_physical(self) -> int:
        """Whole records in the file, counted or not."""
        return max(0, self.size - HEADER_SIZE) // self.record_size

    @property
    def n_leftover(self) -> int:
        """Bytes behind the last whole record."""
        return max(0, self.size - HEADER_SIZE) % self.record_size

    @property
    def n_usable(self) -> int:
        """Records that are counted and whole; in the watermark dialect, those of complete turns."""
        counted = min(self.count, self.word) if self.dialect == "watermark" else self.count
        return max(0, min(counted, self.n_physical))

    @property
    def is_lossy_width(self) -> bool:
        """True when a packed encoding stores zeros for a width that it cannot rotate."""
        widths = (self.geometry.kv_lora, self.geometry.qk_rope)
        return self.encoding.version == 3 and not all(rotates(width) for width in widths)

    def pack(self) -> bytes:
        """Return the 40 bytes."""
        g = self.geometry
        numbers = (g.n_layers, g.kv_lora, g.qk_rope, g.index_width, g.index_count, g.vocab, self.count, self.word)
        return _WORDS.pack(self.magic, *numbers)

    def offset(self, record: int) -> int:
        """Return where a record begins."""
        return HEADER_SIZE + record * self.record_size

    def compare(self, geometry: Geometry) -> Compatibility:
        """Compare the numbers of the file with those of a model, field by field, as colibri does."""
        mine, g = self.geometry, geometry
        pairs = (
            ("layers", mine.n_layers, g.n_layers),
            ("latent width", mine.kv_lora, g.kv_lora),
            ("rope width", mine.qk_rope, g.qk_rope),
            ("index width", mine.index_width, g.index_width),
            ("index layers", mine.index_count, g.index_count),
            ("vocabulary", mine.vocab, g.vocab),
        )
        return Compatibility(
            tuple(FieldCheck(n, "match" if a == b else "differ", "fatal", str(a), str(b)) for n, a, b in pairs)
        )

    def require(self, geometry: Geometry, path: str | None = None) -> None:
        """Raise `CompatibilityError` naming every number that differs from the model's."""
        report = self.compare(geometry)
        if report.refusals:
            named = "; ".join(f"{f.name}: file {f.saved}, model {f.found}" for f in report.refusals)
            raise CompatibilityError(f"the file is of another model: {named}", report=report, path=path)


def encoding_of(name: str | None, bits: int | None = None) -> Encoding:
    """Return the encoding of that name, with its bits checked. Raise `InputError` for anything else."""
    if name in {None, "float32", "fp8"}:
        encoding, allowed = Encoding(name or "float32"), range(1)
    elif name == "int4":
        encoding, allowed = Encoding("int4", bits or 4), range(4, 5)
    elif name == "polar":
        encoding, allowed = Encoding("polar", bits or 4), range(1, 9)
    else:
        raise InputError("no such codec for a .coli_kv file", expected="float32, fp8, int4 or polar", found=name)
    if encoding.bits not in allowed or (bits and encoding.bits != bits):
        raise InputError(
            f"codec {encoding.name} does not have this width", expected=f"{list(allowed)} bits", found=bits
        )
    return encoding


def new_header(geometry: Geometry, encoding: Encoding) -> Header:
    """Return the header of an empty file. Raise `UnsupportedError` for widths that the encoding cannot hold."""
    if geometry.index_rows and geometry.index_layers is None and geometry.index_count != geometry.n_layers:
        raise InputError("which layers own index rows must be known to write them: give index_layers")
    magic = next(m for m, version in _MAGIC.items() if version == encoding.version)
    header = Header(magic, geometry, encoding, 0, encoding.tag, "colibri", HEADER_SIZE)
    if header.is_lossy_width:
        raise UnsupportedError(
            f"{encoding} cannot hold rows of these widths: only powers of two up to 2048 are rotated",
            found=f"latent {geometry.kv_lora}, rope {geometry.qk_rope}",
        )
    return header


def is_colikv(head: bytes) -> bool:
    """Tell from the first bytes whether this is a `.coli_kv` file of any kind, also one that is only recognised."""
    return head[:8] in _MAGIC or head[:8] in {_SYNTARA, DEEPSEEK_MAGIC}


def parse_header(head: bytes, size: int, *, path: str | None = None, dialect: str | None = None) -> Header:
    """Parse the first 40 bytes of a file of `size` bytes.

    `dialect` (`fp8` or `watermark`) decides where magic `COLIKV2` and the size fit both. Raise `FormatError`,
    `VersionError` (an unknown version or encoding), `DamagedError` (cut off inside the header), `UnsupportedError`.
    """
    if len(head) < 8 or not is_colikv(head):
        if head[:6] == b"COLIKV" and head[7:8] in {b"", b"\0"} and len(head) >= 7:
            raise VersionError("an unknown version of COLIKV", path=path, offset=0, expected="1 to 3", found=head[6:7])
        raise FormatError("not a .coli_kv file", path=path, offset=0, expected="magic COLIKV", found=bytes(head[:8]))
    if head[:8] == DEEPSEEK_MAGIC:
        raise UnsupportedError("a DeepSeek V4 file (COLIDV41) has another layout", path=path, offset=0)
    if len(head) < HEADER_SIZE:
        raise DamagedError(
            "the file ends inside its header", path=path, offset=len(head), expected=f"{HEADER_SIZE} bytes", found=size
        )
    magic, n_layers, kv_lora, qk_rope, index_width, index_count, vocab, count, word = _WORDS.unpack(head[:HEADER_SIZE])
    numbers = (n_layers, kv_lora, qk_rope, index_width, index_count, vocab)
    geometry = _geometry(numbers, path)
    header = _meant(Header(magic, geometry, Encoding("float32"), count, word, "colibri", size), path, dialect)
    if header.n_usable > MAX_RECORDS:
        raise UnsupportedError(
            "more records than any context has", path=path, offset=COUNT_AT, expected=f"at most {MAX_RECORDS}",
            found=header.n_usable,
        )  # fmt: skip
    return header


def _meant(plain: Header, path: str | None, dialect: str | None) -> Header:
    """Return the header with the encoding and dialect that magic, last word and size tell."""
    if plain.magic == _SYNTARA:
        return replace(plain, encoding=_by_word(plain.word, path), dialect="syntara")
    version = _MAGIC[plain.magic]
    if version == 1:
        return plain
    if version == 3:
        return replace(plain, encoding=_packed(plain.word, path))
    fp8, turns = replace(plain, encoding=Encoding("fp8")), replace(plain, dialect="watermark")
    return {"fp8": fp8, "watermark": turns}[dialect or _version_2(fp8, turns, path)]


def _geometry(numbers: Sequence[int], path: str | None) -> Geometry:
    for name, offset, value, low, high in limits_of(numbers):
        if not low <= value <= high:
            expected = f"{low} to {high}"
            raise FormatError(f"header: {name} out of range", path=path, offset=offset, expected=expected, found=value)
    n_layers, kv_lora, qk_rope, index_width, index_count, vocab = numbers
    return Geometry(
        n_layers=n_layers, kv_lora=kv_lora, qk_rope=qk_rope, vocab=vocab, index_width=index_width,
        index_count=index_count,
    )  # fmt: skip


def _packed(word: int, path: str | None) -> Encoding:
    codec, bits = word >> 8, word & 255
    if codec == 1 and bits == 4:
        return Encoding("int4", 4)
    if codec == 0 and 1 <= bits <= 8:
        return Encoding("polar", bits)
    expected = "codec 1 with 4 bits, or codec 0 with 1 to 8"
    raise VersionError("an unknown packed encoding", path=path, offset=36, expected=expected, found=word)


def _by_word(word: int, path: str | None) -> Encoding:
    return Encoding(("float32", "fp8")[word]) if word in {0, 1} else _packed(word, path)


def _version_2(fp8: Header, plain: Header, path: str | None) -> str:
    """Tell the two meanings of COLIKV2 apart, by the size and the last word."""
    if fp8.size <= HEADER_SIZE or fp8.count < 1:
        return "fp8" if fp8.word == 1 else "watermark"
    if fp8.word == 1 and plain.n_physical < plain.count:  # as float32 it would be cut off
        return "fp8"
    fits_fp8, fits_plain = fp8.n_leftover == 0, plain.n_leftover == 0
    if fits_fp8 != fits_plain:
        return "fp8" if fits_fp8 else "watermark"
    if fp8.word != 1:
        return "watermark" if 0 <= fp8.word <= fp8.count else "fp8"
    raise InputError(
        "this COLIKV2 file may be fp8, or float32 with a turn count: the size does not tell", path=path, offset=36,
        expected="dialect='fp8' or dialect='watermark'", found=f"{fp8.size} bytes, word 36 is 1",
    )  # fmt: skip

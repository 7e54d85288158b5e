"""Checking an encrypted `.kvsnap` file without its key: every checksum of what is stored. Spec section 20."""

from __future__ import annotations

import os

from kvsnap.errors import DamagedError, FormatError
from kvsnap.files import Reader
from kvsnap.formats.native.vault import check_key_record, read_key_info, read_stretch, stretches_of
from kvsnap.formats.native.verify import Damage, VerifyReport
from kvsnap.protocols import Progress
from kvsnap.records import (
    FOOTER_SIZE,
    HEADER_SIZE,
    RECORD_SIZE,
    WITH_PARTS,
    FileHeader,
    Kind,
    ReadAt,
    RecordHeader,
    find_end,
    parse_footer,
    read_header,
    read_record,
    record_end,
    scan,
)

__all__ = ["verify_closed"]

_NOTE = "encrypted ({}), and checked without the key: damage shows, tampering and what is inside do not"


def verify_closed(path: str | os.PathLike[str], progress: Progress | None = None) -> VerifyReport:
    """Check every stored byte of an encrypted file against its checksum. Damage is reported, not raised.

    What is inside cannot be seen: `opened` is False, `n_parts` counts sealed pieces, `n_tokens` is 0. Raise
    `DamagedError`, `FormatError` or `VersionError` where there is no header, KEY or footer to start from.
    """
    with Reader(path) as reader:
        return _verify(reader, progress)


def _verify(reader: ReadAt, progress: Progress | None) -> VerifyReport:
    header = read_header(reader)
    info, _ = read_key_info(reader, header)
    end = find_end(reader, header)
    damages: list[Damage] = []
    n_records = n_pieces = 0
    offset = HEADER_SIZE
    try:
        for place, record in scan(reader, header, end.footer.file_length):
            offset = place
            n_records += 1
            n_pieces += _check(reader, header, place, record, damages)
            if progress is not None:
                progress(record_end(place, record), end.footer.file_length)
    except (DamagedError, FormatError) as error:
        damages.append(Damage(error.message, error.offset or offset, live=True))
    return VerifyReport(
        path=reader.path, format="native", n_bytes=reader.size, n_records=n_records, n_parts=n_pieces, n_commits=1,
        n_tokens=0, damages=tuple(damages), notes=(_NOTE.format(info),), encryption=info.cipher, opened=False,
    )  # fmt: skip


def _check(reader: ReadAt, header: FileHeader, offset: int, record: RecordHeader, damages: list[Damage]) -> int:
    """Check one record; return the number of its sealed pieces."""

    def found(what: str, place: int) -> None:
        damages.append(Damage(what, place, live=True))

    pieces = 0
    try:
        read_record(reader, header, offset)
        if record.kind == Kind.KEY:
            check_key_record(reader, header, offset)
        else:
            body = stretches_of(record, offset, reader.path)
            pieces = 1 + (body.count if record.kind in WITH_PARTS else 0)
            for number in range(1, pieces):
                try:
                    read_stretch(reader, header.salt, body, number)
                except DamagedError as error:
                    found(error.message, error.offset or offset)
    except (DamagedError, FormatError) as error:
        found(error.message, error.offset or offset)
    end, behind = offset + RECORD_SIZE + record.length, record_end(offset, record)
    if any(reader.read_at(end, min(behind, reader.size) - end)):
        found("padding is not zero", end)
    if record.kind == Kind.COMMIT:
        raw = reader.read_at(behind, FOOTER_SIZE) if behind + FOOTER_SIZE <= reader.size else b""
        if not raw or parse_footer(raw, header.salt, behind) is None:
            found("no footer behind a COMMIT", behind)
    return pieces

"""The frame of a `.kvsnap` file in text: `python -m kvsnap.formats.native.listing FILE`. Spec section 18."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from kvsnap.errors import KvsnapError
from kvsnap.files import Reader
from kvsnap.records import (
    FOOTER_SIZE,
    HEADER_SIZE,
    SESSION,
    Kind,
    ReadAt,
    find_end,
    parse_footer,
    read_header,
    record_end,
    scan,
)

__all__ = ["lines", "main"]


def lines(reader: ReadAt) -> Iterator[str]:
    """Yield the file header in hex, then a line for each record and footer up to the published end.

    Reads headers only. Raise as `read_header`, `find_end` and `scan` do.
    """
    header = read_header(reader)
    end = find_end(reader, header)
    raw = reader.read_at(0, HEADER_SIZE)
    for at in range(0, HEADER_SIZE, 16):
        row = raw[at : at + 16]
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        yield f"{at:8}  {row[:8].hex(' ')}  {row[8:].hex(' ')}  |{shown}|"
    use = "session" if header.use == SESSION else "snapshot"
    yield f"version {header.major}.{header.minor}, {use}, file id {header.file_id.hex()}, salt {header.salt:016x}"
    yield ""
    yield f"{'offset':>8}  {'record':<8}  {'seq':>4}  {'commit':>6}  {'payload':>8}  {'table':>8}  table checksum"
    stop = end.footer.file_length
    for offset, record in scan(reader, header, stop):
        yield (
            f"{offset:8}  {record.name:<8}  {record.sequence:4}  {record.commit:6}  {record.length:8}  "
            f"{record.table_length:8}  {record.table_checksum:016x}"
        )
        if record.kind == Kind.COMMIT:
            place = record_end(offset, record)
            footer = parse_footer(reader.read_at(place, FOOTER_SIZE), header.salt, place)
            found = "damaged" if footer is None else f"COMMIT at {footer.commit_offset}, digest {footer.digest.hex()}"
            yield f"{place:8}  {'footer':<8}  {found}"
    yield f"{stop:8}  end" + (f", then {end.dropped} bytes that were never published" if end.dropped else "")
    yield from end.notes


def main(arguments: list[str]) -> int:
    """Print the listing of the file named; return the exit code."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m kvsnap.formats.native.listing FILE\n")
        return 2
    try:
        with Reader(arguments[0]) as reader:
            for line in lines(reader):
                sys.stdout.write(line + "\n")
    except KvsnapError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

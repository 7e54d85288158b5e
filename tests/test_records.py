"""The frame: headers bound to file and place, and the search for the published end. Spec sections 2, 3, 11 and 12."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsnap.errors import DamagedError, FormatError, VersionError
from kvsnap.formats import native
from kvsnap.formats.native import BytesReader
from kvsnap.records import (
    FOOTER_SIZE,
    HEADER_SIZE,
    SESSION,
    SNAPSHOT,
    FileHeader,
    Footer,
    Kind,
    RecordHeader,
    align64,
    find_end,
    parse_footer,
    parse_record_header,
    read_header,
    read_record,
    scan,
)
from spec_file import FOOTER_MAGIC, NOTE, SpecWriter, h64, up
from synthetic import snapshot

U64 = st.integers(0, 2**64 - 1)


class CountingReader(BytesReader):
    """Counts what is read of it."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.n = 0

    def read_at(self, offset: int, length: int) -> bytes:
        self.n += length
        return super().read_at(offset, length)


def session(n_commits: int, *, use: int = SESSION, payload: int = 0) -> tuple[SpecWriter, list[int]]:
    """A file of so many commits, each after a NOTE of that length; and where each commit ends."""
    w, ends, at, digest = SpecWriter(use), [], 0, bytes(16)
    for number in range(1, n_commits + 1):
        if payload:
            w.record(NOTE, bytes(payload), commit=number)
        at = w.commit({"number": number, "previous": at, "previous_digest": digest, "operation": 3, "flags": 1}, [])
        digest = w.digest_of(at)
        ends.append(len(w.data))
    return w, ends


@given(st.integers(0, 2**40))
def test_align64(n: int) -> None:
    assert align64(n) == up(n)


@given(st.binary(min_size=16, max_size=16), U64, st.integers(-(2**63), 2**63 - 1), st.sampled_from([SNAPSHOT, SESSION]))
def test_a_file_header_survives(file_id: bytes, salt: int, created: int, use: int) -> None:
    header = FileHeader(use, file_id, salt, created)
    assert len(header.pack()) == HEADER_SIZE
    assert read_header(BytesReader(header.pack())) == header


def test_a_file_header_cut_off_or_of_something_else() -> None:
    raw = FileHeader(SESSION, bytes(16), 1, 2).pack()
    for n in range(1, HEADER_SIZE):
        with pytest.raises(DamagedError, match="cut off inside its header"):
            read_header(BytesReader(raw[:n]))
    for strange in (b"", b"GGUF", b"\x89PNG\r\n\x1a\n" + bytes(200)):
        with pytest.raises(FormatError, match=r"not a \.kvsnap file"):
            read_header(BytesReader(strange))
    newer = FileHeader(SESSION, bytes(16), 1, 2, major=3, minor=4).pack()
    with pytest.raises(VersionError, match=r"expected 1\.x, found 3\.4"):
        read_header(BytesReader(newer))
    assert read_header(BytesReader(FileHeader(SESSION, bytes(16), 1, 2, minor=9, optional=5).pack())).minor == 9
    with pytest.raises(VersionError, match="features"):
        read_header(BytesReader(FileHeader(SESSION, bytes(16), 1, 2, required=1 << 40).pack()))
    with pytest.raises(VersionError, match="features"):  # "unknown features" comes before what they may have changed
        read_header(BytesReader(FileHeader(SESSION, bytes(16), 1, 2, required=1 << 40 | 1).pack()))


@given(U64, st.integers(0, 2**40), st.integers(0, 2**62), U64, U64)
def test_a_record_header_holds_in_its_file_and_place_only(
    salt: int, offset: int, length: int, commit: int, checksum: int
) -> None:
    header = RecordHeader(Kind.SPAN, 7, length, commit, length // 2, checksum)
    raw = header.pack(salt, offset)
    assert parse_record_header(raw, salt, offset, None) == header
    for other_salt, other_offset in ((salt ^ 1, offset), (salt, offset + 64)):
        with pytest.raises(DamagedError, match="checksum"):
            parse_record_header(raw, other_salt, other_offset, None)
    footer = Footer(offset, commit, offset + FOOTER_SIZE, bytes(16))
    raw = footer.pack(salt, offset)
    assert parse_footer(raw, salt, offset) == footer
    assert parse_footer(raw, salt ^ 1, offset) is None
    assert parse_footer(raw, salt, offset + 64) is None


def test_the_end_is_found_in_the_last_64_kib() -> None:
    w, ends = session(300, payload=10_000)
    reader = CountingReader(bytes(w.data))
    header = read_header(reader)
    end = find_end(reader, header)
    assert (end.footer.commit, end.dropped, end.notes) == (300, 0, ())
    assert reader.n < 70_000 < len(w.data)
    assert end.footer.file_length == ends[-1]


@pytest.mark.parametrize("torn", [1, 63, 64, 65, 4096, 65_535, 65_536, 300_000, 17_000_000])
def test_the_end_is_found_behind_any_torn_tail(torn: int) -> None:
    w, ends = session(3)
    for tail in (bytes(torn), b"KVEND\r\n\x1a" * (torn // 8) + bytes(torn % 8)):
        reader = BytesReader(bytes(w.data) + tail)
        end = find_end(reader, read_header(reader))
        assert (end.footer.commit, end.footer.file_length, end.dropped) == (3, ends[-1], torn)


def test_a_torn_commit_is_stepped_back_over_and_told() -> None:
    w, ends = session(3)
    for at in range(ends[1], ends[2]):
        data = bytearray(w.data)
        data[at] ^= 4
        reader = BytesReader(bytes(data))
        end = find_end(reader, read_header(reader))
        assert end.footer.commit == 2
        assert end.dropped == ends[2] - ends[1]
        assert bool(end.notes) == (at < ends[2] - 64)  # a footer that is none is a torn tail, no published commit
    data[ends[0] - 300 : ends[1]] = bytes(ends[1] - ends[0] + 300)
    data[150] ^= 1
    with pytest.raises(DamagedError, match="no published commit"):
        find_end(BytesReader(bytes(data)), read_header(BytesReader(bytes(data))))


def test_a_snapshot_ends_in_its_only_footer() -> None:
    w, ends = session(1, use=SNAPSHOT)
    reader = BytesReader(bytes(w.data))
    assert find_end(reader, read_header(reader)).footer.commit == 1
    for tail in (b"\0", bytes(64), bytes(100_000)):
        reader = BytesReader(bytes(w.data) + tail)
        with pytest.raises(DamagedError):
            find_end(reader, read_header(reader))
    for at in range(128, ends[0]):
        data = bytearray(w.data)
        data[at] ^= 1
        with pytest.raises((DamagedError, FormatError)):
            find_end(BytesReader(bytes(data)), read_header(reader))


def test_footers_copied_from_elsewhere_are_not_taken_for_the_end() -> None:
    w, ends = session(2)
    old = bytes(w.data[ends[0] - 64 : ends[0]])
    for tail in (old, bytes(64) + old, bytes(w.data[ends[0] : ends[1]])):
        reader = BytesReader(bytes(w.data) + tail)
        end = find_end(reader, read_header(reader))
        assert (end.footer.commit, end.dropped) == (2, len(tail))


def test_the_search_reads_nothing_twice_however_many_footers_lie() -> None:
    """500 commits that claim to lie inside one another, each with a valid footer behind it, around 1 MB."""
    w = SpecWriter(2)
    w.commit({"flags": 1}, [])
    n, first, filler = 500, len(w.data), 1 << 20
    for i in range(n):
        at = first + 64 * i
        w.data += w.header(at, Kind.COMMIT, 64 * n + filler - 64, 64 * n + filler - 64, 0, commit=2)
    w.data += bytes(filler)
    for i in range(n):
        place = len(w.data)
        raw = FOOTER_MAGIC + b"".join(v.to_bytes(8, "little") for v in (first + 64 * i, 2, place + 64)) + bytes(24)
        w.data += raw + h64(raw, w.salt + place).to_bytes(8, "little")
    reader = CountingReader(bytes(w.data))
    end = find_end(reader, read_header(reader))
    assert end.footer.commit == 1
    assert reader.n < 4 * len(w.data)


def test_scan_steps_over_every_record_and_stops_at_damage() -> None:
    data = native.dumps(snapshot(range(5), metadata={"a": "b"}))
    reader = BytesReader(data)
    header = read_header(reader)
    found = list(scan(reader, header, len(data)))
    assert [r.kind for _, r in found] == [1, 2, 3, 4, 5, 7]
    assert [r.sequence for _, r in found] == list(range(6))
    assert [r.name for _, r in found][:2] == ["IDENTITY", "LAYOUT"]
    bad = bytearray(data)
    bad[found[2][0] + 20] ^= 1
    seen: list[Any] = []
    with pytest.raises(DamagedError, match="header does not fit") as caught:
        seen.extend(scan(BytesReader(bytes(bad)), header, len(data)))
    assert caught.value.offset == found[2][0]


def test_a_record_is_read_only_where_it_fits() -> None:
    w = SpecWriter(2)
    at = w.record(NOTE, b"abc")
    w.commit({"flags": 1}, [])
    reader = BytesReader(bytes(w.data))
    header = read_header(reader)
    assert read_record(reader, header, at, kind=Kind.NOTE)[1] == b"abc"
    with pytest.raises(DamagedError, match="expected LAYOUT, found NOTE"):
        read_record(reader, header, at, kind=Kind.LAYOUT)
    with pytest.raises(FormatError, match="larger than allowed"):
        read_record(reader, header, at, limit=2)
    for offset in (0, 64, at + 1, len(w.data), 2**63, len(w.data) - 32):
        with pytest.raises(DamagedError, match="outside the file"):
            read_record(reader, header, offset)

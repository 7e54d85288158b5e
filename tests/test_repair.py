"""Repairing damaged files: what can be proven is kept bit for bit, what cannot is said, and never anything else."""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsnap
from kvsnap.errors import DamagedError, FormatError, InputError, KvsnapError, MissingError, UnsupportedError
from kvsnap.files import Reader
from kvsnap.formats.native import NativeFile, relist, salvage
from kvsnap.formats.native.assemble import snapshot_of
from kvsnap.formats.native.base import session_file_name
from kvsnap.formats.native.fork import at_commit, fork_file
from kvsnap.formats.native.survey import Survey
from kvsnap.formats.native.turns import walk
from kvsnap.identity import Identity
from kvsnap.layout import PositionRun, Snapshot
from kvsnap.records import HEADER_SIZE, RECORD_SIZE, Kind, read_record_header, record_end
from kvsnap.session import Session
from synthetic import DATA, SAMPLER, same, snapshot, snapshot_of_kinds, tiny, tiny_bytes
from test_native_hostile import CASES, two_turns

IDS = tuple(range(21, 81))
TURN_1, TURN_2 = 3, 6


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about power cuts, and thousands of files are written."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)


class Case:
    """A whole file, damaged copies of it, and what comes of repairing them."""

    def __init__(self, directory: Path, raw: bytes) -> None:
        self.raw = raw
        self.whole, self.source, self.out = (directory / f"{n}.kvsnap" for n in ("whole", "damaged", "out"))
        self.whole.write_bytes(raw)
        with Reader(self.whole) as reader:
            self.file = NativeFile(reader, mapped=False)
            self.records = [(p, k, n) for p, k, n in Survey(reader, self.file.header)]
        self.file = NativeFile.open(self.whole, mapped=False)
        self._states: dict[int, Snapshot] = {}

    def place(self, kind: int, number: int = 0) -> int:
        """Offset of the record of this kind; `number` counts them, from the end when below 0."""
        return [p for p, k, _ in self.records if k == kind][number]

    def part(self, kind: int, number: int, part: int) -> int:
        """Offset of the stored bytes of a part."""
        place = self.place(kind, number)
        table, payload, _ = self.file.table_at(place, kind)
        return payload + table.parts[part].offset

    def repair(self, data: bytes, **options: Any) -> kvsnap.RepairReport:
        self.source.write_bytes(data)
        self.out.unlink(missing_ok=True)
        try:
            report = kvsnap.repair(self.source, self.out, **options)
        except KvsnapError:
            assert not self.out.exists()
            assert not list(self.out.parent.glob(".kvsnap-*"))
            raise
        finally:
            assert self.source.read_bytes() == data, "the damaged file was changed"
        assert report.nbytes == self.out.stat().st_size
        assert report.complete == (not report.lost)
        return report

    def flipped(self, *places: int, **options: Any) -> kvsnap.RepairReport:
        data = bytearray(self.raw)
        for place in places:
            data[place] ^= 0x41
        return self.repair(bytes(data), **options)

    def state(self, n_tokens: int) -> Snapshot:
        """The original after its first tokens, as a truncate gives them."""
        if n_tokens not in self._states:
            copy = self.whole.with_name(f"upto-{n_tokens}.kvsnap")
            copy.write_bytes(self.raw)
            with Session.open(copy) as session:
                session.truncate(n_tokens)
                self._states[n_tokens] = session.load()
        return self._states[n_tokens]

    def check(self, report: kvsnap.RepairReport) -> None:
        """What was kept is a prefix of the original, bit for bit; what is not there was said."""
        made = kvsnap.load(self.out)
        assert (report.n_tokens, report.n_rows) == (len(made.tokens), made.n_rows)
        whole = kvsnap.load(self.whole)
        differing = same(made, whole)
        if report.complete:
            assert differing == []
            return
        expected = self.state(report.n_tokens) if report.n_tokens != len(whole.tokens) else whole
        said = " ".join(str(d) for d in report.lost)
        left = set(same(made, expected))
        allowed = {"metadata"} if report.n_tokens != len(whole.tokens) or "NOTE" in said else set()
        allowed |= {"identity"} if "IDENTITY" in said else set()
        if "STATE" in said and made.logits is None:
            assert same(replace(made, sampler=None), replace(expected, logits=None, sampler=None)) in (
                [], *([name] for name in allowed),
            )  # fmt: skip
        else:
            assert left <= allowed


def build(path: Path) -> bytes:
    """A session with a lossy turn, a cut inside it, notes and a second identity."""
    with Session.open(path) as session:
        session.append(snapshot(IDS[:3], n_pending=1, n_prompt=2, text="one", sampler=SAMPLER, metadata={"a": "1"}))
        session.append(snapshot(IDS[:6], n_pending=1, n_prompt=2, text="one two"), codec="q8")
        session.append(snapshot(IDS[:9], start=5, n_prompt=2, text="one two three", metadata={"a": "2"}))
    return path.read_bytes()


def build_long(path: Path, n: int = 40) -> bytes:
    """A session with several INDEX records, and cuts."""
    with Session.open(path) as session:
        for i in range(n):
            count = session.n_tokens + 1 + i % 2
            session.append(snapshot((*session.tokens, *IDS[: count - session.n_tokens]), heads=1, dim=2, vocab=2))
            if i == n // 3:
                session.truncate(session.n_tokens - 2)
            if i == n // 4:
                session.reset()
    return path.read_bytes()


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path, build(tmp_path / "made.kvsnap"))


@pytest.fixture
def golden(tmp_path: Path) -> Case:
    return Case(tmp_path, (DATA / "tiny_session.kvsnap").read_bytes())


@pytest.fixture
def long(tmp_path: Path) -> Case:
    return Case(tmp_path, build_long(tmp_path / "made.kvsnap", 90))


# -- a file that is whole --------------------------------------------------------------------------------------------


def test_a_whole_file_gives_the_whole_history(case: Case) -> None:
    report = case.repair(case.raw)
    assert report.complete
    assert report.lost == ()
    assert report.notes == ()
    assert report.n_turns == 3
    case.check(report)
    with Session.open(case.out) as session:
        assert [(t.n_tokens, t.complete) for t in session.history] == [(3, True), (6, True), (9, True)]
        session.truncate(3)
        assert same(session.load(), replace(case.state(3), metadata={"a": "2"})) == []


def test_the_new_file_goes_on_as_the_old_one_would(case: Case) -> None:
    case.flipped(case.place(Kind.COMMIT, 1))
    with Session.open(case.out) as session:
        session.append(snapshot(IDS[:12], start=9, n_prompt=2, text="one two three four"))
        assert session.load().text == "one two three four"
    assert kvsnap.verify(case.out).ok


@pytest.mark.parametrize("place", [None, 20, 3000])
def test_an_encrypted_snapshot_is_refused_by_name(tmp_path: Path, place: int | None) -> None:
    pytest.importorskip("cryptography")
    raw = bytearray(kvsnap.dumps(tiny(), key=bytes(32)))
    if place is not None:
        raw[place] ^= 1
    (tmp_path / "a").write_bytes(raw)
    with pytest.raises(UnsupportedError, match="encrypted"):
        kvsnap.repair(tmp_path / "a", tmp_path / "b")


def test_a_snapshot_stays_a_snapshot(tmp_path: Path) -> None:
    case = Case(tmp_path, tiny_bytes())
    report = case.repair(case.raw)
    assert report.complete
    assert same(kvsnap.load(case.out), kvsnap.load(case.whole)) == []
    assert kvsnap.inspect(case.out).use == "snapshot"
    assert report.file_id != kvsnap.inspect(case.whole).file_id


def test_the_name_must_be_free_and_not_that_of_the_source(case: Case) -> None:
    case.source.write_bytes(case.raw)
    case.out.write_bytes(b"mine")
    for target in (case.out, case.source):
        with pytest.raises(InputError, match="writes a new one"):
            kvsnap.repair(case.source, target)
    assert case.out.read_bytes() == b"mine"
    assert case.source.read_bytes() == case.raw
    with pytest.raises(MissingError):
        kvsnap.repair(case.source.with_name("gone"), case.source.with_name("new"))


def test_a_file_of_another_format_is_refused(case: Case) -> None:
    for data in (b"", b"MLXKV001" + bytes(500), b"x" * 5000):
        with pytest.raises((FormatError, DamagedError)):
            case.repair(data)


# -- the end of the file -----------------------------------------------------------------------------------------------


def test_a_damaged_last_footer_costs_nothing(case: Case) -> None:
    report = case.flipped(len(case.raw) - 60)
    assert report.complete
    assert "no valid footer" in report.notes[0]
    case.check(report)


def test_a_damaged_last_commit_gives_the_one_before(case: Case) -> None:
    report = case.flipped(case.place(Kind.COMMIT, -1) + RECORD_SIZE + 40)
    assert not report.complete
    assert report.n_tokens == 6
    assert "was published, but cannot be read" in report.lost[0].what
    case.check(report)


def test_a_torn_tail_is_dropped_and_said(case: Case) -> None:
    report = case.repair(case.raw[: case.place(Kind.COMMIT, -1)])
    assert report.complete
    assert report.n_tokens == 6
    assert any("not part of the history" in note for note in report.notes)


@pytest.mark.exhaustive
def test_every_length_gives_a_published_state_or_a_refusal(golden: Case) -> None:
    known = {}
    file = golden.file
    for commit, offset in walk(file.commit, file.end.footer.commit_offset, file.header, file.reader):
        known[commit.n_tokens, commit.n_rows] = snapshot_of(at_commit(file, commit.number))
        assert offset
    seen = set()
    for length in range(0, len(golden.raw), 3):
        try:
            report = golden.repair(golden.raw[:length])
        except KvsnapError:
            continue
        made = kvsnap.load(golden.out)
        assert same(made, known[len(made.tokens), made.n_rows]) == [], length
        assert report.complete
        seen.add(len(made.tokens))
    assert seen == {0, 3, 5, 6}


# -- every byte --------------------------------------------------------------------------------------------------------


def all_flips(case: Case, places: range, **options: Any) -> dict[str, int]:
    counts = {"complete": 0, "prefix": 0, "refused": 0}
    for place in places:
        try:
            report = case.flipped(place, **options)
        except KvsnapError:
            counts["refused"] += 1
            continue
        assert report.lost or report.notes, f"nothing was said of byte {place}"
        case.check(report)
        counts["complete" if report.complete else "prefix"] += 1
    return counts


@pytest.mark.exhaustive
def test_every_byte_flipped_gives_a_prefix_or_a_refusal(golden: Case) -> None:
    counts = all_flips(golden, range(len(golden.raw)))
    assert min(counts.values()) > 500, counts


@pytest.mark.exhaustive
def test_flips_in_a_session_with_notes(case: Case) -> None:
    counts = all_flips(case, range(0, len(case.raw), 7))
    assert min(counts.values()) > 30, counts


@pytest.mark.exhaustive
def test_flips_in_a_session_with_indexes(long: Case) -> None:
    counts = all_flips(long, range(3, len(long.raw), 1601))
    assert min(counts["complete"], counts["prefix"]) > 10, counts


def test_flips_in_a_snapshot(tmp_path: Path) -> None:
    case = Case(tmp_path, tiny_bytes())
    for place in range(0, len(case.raw), 7):
        try:
            report = case.flipped(place)
        except KvsnapError:
            continue
        made = kvsnap.load(case.out)
        said = " ".join(str(d) for d in report.lost)
        parts = {"NOTE": {"metadata"}, "IDENTITY": {"identity"}, "STATE": {"sampler", "tensors"}}
        allowed = set().union(*(names for word, names in parts.items() if word in said))
        assert set(same(made, kvsnap.load(case.whole))) <= allowed, place
        assert report.lost or report.notes


# -- one kind of damage each -------------------------------------------------------------------------------------------


def test_a_damaged_index_is_made_anew_from_the_commits(long: Case) -> None:
    assert len([k for _, k, _ in long.records if k == Kind.INDEX]) > 1
    live = long.file.commit.index
    for place in (live + 3, live + RECORD_SIZE + 1, live + RECORD_SIZE + 64 + 20):
        report = long.flipped(place)
        assert report.complete
        assert any("made anew from the commits" in note for note in report.notes)
        long.check(report)


def test_every_index_and_some_commits_damaged(long: Case) -> None:
    places = [p + RECORD_SIZE + 8 for p, k, _ in long.records if k == Kind.INDEX]
    report = long.flipped(*places)
    assert report.complete
    long.check(report)
    middle = [p + RECORD_SIZE + 50 for p, k, _ in long.records if k == Kind.COMMIT][50:70:3]
    report = long.flipped(*places, *middle)
    assert report.complete
    long.check(report)


def test_rewinds_are_followed_when_every_index_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "made.kvsnap"
    build_long(path, 60)
    with Session.open(path) as session:
        late, early = session.n_commits, 45
        session.rewind(early)
        for _ in range(40):
            session.append(snapshot((*session.tokens, 7), heads=1, dim=2, vocab=2))
        session.rewind(late)
        session.append(snapshot((*session.tokens, 8), heads=1, dim=2, vocab=2))
    case = Case(tmp_path, path.read_bytes())
    places = [p + RECORD_SIZE + 8 for p, k, _ in case.records if k == Kind.INDEX]
    assert len(places) == 2
    report = case.flipped(*places)
    assert report.complete
    case.check(report)


def test_many_rewinds_are_followed_when_every_index_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "made.kvsnap"
    build_long(path, 40)
    with Session.open(path) as session:
        places = [session.n_commits]
        ids = session.tokens
        session.truncate(10)
        for i in range(40):
            session.append(snapshot((*ids[:10], *range(90, 91 + i)), heads=1, dim=2, vocab=2))
        places.append(session.n_commits)
        for i in range(60):  # each may go to one that went to one that went back
            session.rewind(places[i % 2])
    case = Case(tmp_path, path.read_bytes())
    report = case.flipped(*(p + RECORD_SIZE + 8 for p, k, _ in case.records if k == Kind.INDEX))
    assert report.complete
    case.check(report)


def test_of_two_turns_with_the_same_ids_a_rewind_means_one(tmp_path: Path) -> None:
    """The digest of a list says nothing of the values: the STATE that a COMMIT names does."""
    path = tmp_path / "made.kvsnap"
    made = [snapshot(tuple(range(1, n + 2)), heads=1, dim=32, vocab=2) for n in range(1, 41)]
    with Session.open(path) as session:
        for codec in ("exact", "q8"):
            session.reset()
            for turn in made:
                session.append(turn, codec=codec)
        session.rewind(42)  # the last one of the exact turns
        assert session.history[41].n_tokens == 41
        expected = session.load()
        assert same(expected, made[-1]) == []
    case = Case(tmp_path, path.read_bytes())
    report = case.flipped(*(p + RECORD_SIZE + 8 for p, k, _ in case.records if k == Kind.INDEX))
    assert report.complete
    assert same(kvsnap.load(report.out), made[-1]) == []


def test_a_damaged_index_with_a_lost_span_falls_back_and_says_so(long: Case) -> None:
    """Without the INDEX a span that cannot be read also takes the list of what follows."""
    index = long.file.commit.index
    span = long.file.entries[3].span
    report = long.flipped(index + RECORD_SIZE + 80, span + RECORD_SIZE + 64)
    assert not report.complete
    assert report.lost
    long.check(report)


def test_a_damaged_middle_commit_costs_only_what_is_known_of_turns(case: Case) -> None:
    report = case.flipped(case.place(Kind.COMMIT, 1) + RECORD_SIZE + 40)
    assert report.complete
    assert any("what is known of turns before commit" in note for note in report.notes)
    case.check(report)


@pytest.mark.parametrize("where", ["header", "table", "part"])
def test_a_damaged_span_keeps_the_turns_before_it(case: Case, where: str) -> None:
    span = case.place(Kind.SPAN, 1)
    place = {"header": span + 9, "table": span + RECORD_SIZE + 65, "part": case.part(Kind.SPAN, 1, 1)}[where]
    report = case.flipped(place)
    assert (report.n_tokens, report.n_turns, report.complete) == (3, 1, False)
    assert report.lost[0].tokens == (3, 9)
    assert report.lost[0].tensor == ("layer0.v" if where == "part" else "")
    whole = 6 if where == "part" else 3
    assert f"{whole} of their 6 tokens are whole as ids" in " ".join(report.notes)
    case.check(report)
    data = report.to_dict()
    assert data["lost"][0]["tokens"] == (3, 9)
    assert data["complete"] is False


def test_ids_behind_the_damage_can_be_kept(case: Case) -> None:
    report = case.flipped(case.part(Kind.SPAN, 1, 0), keep_tokens=True)
    assert (report.n_tokens, report.n_rows, report.n_pending, report.complete) == (9, 2, 7, False)
    assert any("not evaluated" in note for note in report.notes)
    made, before = kvsnap.load(case.out), case.state(3)
    whole = kvsnap.load(case.whole)
    assert (made.tokens, made.runs, made.text) == (whole.tokens, whole.runs, "one two three")
    assert made.n_pending == 7
    assert made.logits is None
    assert made.token_offset == before.token_offset
    assert [t.array.tobytes() for t in made.tensors()] == [t.array.tobytes() for t in before.tensors()]
    with Session.open(case.out) as session:
        session.append(snapshot(IDS[:9], start=2, n_prompt=2, text="one two three"))
        assert session.load().n_pending == 0
        session.truncate(3)
        assert same(session.load(), replace(before, metadata={"a": "2"})) == []


def test_ids_end_where_a_table_is_damaged(case: Case) -> None:
    places = (case.part(Kind.SPAN, 1, 0), case.place(Kind.SPAN, 2) + RECORD_SIZE + 65)
    report = case.flipped(*places, keep_tokens=True)
    assert (report.n_tokens, report.n_rows, report.n_pending) == (6, 2, 4)
    assert kvsnap.load(case.out).text == "one two"


def test_a_damaged_snapshot_keeps_its_ids_only_when_asked(tmp_path: Path) -> None:
    case = Case(tmp_path, tiny_bytes())
    place = case.part(Kind.SPAN, 0, 2)
    with pytest.raises(DamagedError, match=r"layer1\.k .* nothing with rows can be kept.*--tokens"):
        case.flipped(place)
    report = case.flipped(place, keep_tokens=True)
    made, whole = kvsnap.load(case.out), kvsnap.load(case.whole)
    assert (made.tokens, made.runs, made.text, made.n_rows) == (whole.tokens, whole.runs, whole.text, 0)
    assert made.n_pending == len(whole.tokens)
    assert made.identity == whole.identity
    assert report.lost[0].tensor == "layer1.k"
    assert kvsnap.inspect(case.out).use == "snapshot"
    with pytest.raises(DamagedError, match="nothing with rows can be kept") as caught:
        case.flipped(case.place(Kind.SPAN) + RECORD_SIZE + 64, keep_tokens=True)
    assert "--tokens" not in str(caught.value)


def test_a_damaged_state_costs_logits_and_sampler_only(case: Case) -> None:
    report = case.flipped(case.place(Kind.STATE, -1) + RECORD_SIZE)
    assert report.n_tokens == 9
    assert not report.complete
    assert report.lost[0].what.startswith("STATE behind token 9")
    made = kvsnap.load(case.out)
    assert made.logits is None
    assert made.sampler is None
    report = case.flipped(case.part(Kind.STATE, 0, 0))
    assert report.n_tokens == 9
    assert report.lost[0].tensor == "logits"
    assert "token 3" in report.lost[0].what
    assert same(kvsnap.load(case.out), kvsnap.load(case.whole)) == []


def test_rows_without_their_recurrent_state_are_given_up(tmp_path: Path) -> None:
    with Session.open(tmp_path / "made.kvsnap") as session:
        session.append(snapshot(IDS[:3], recurrent=True))
        session.append(snapshot(IDS[:6], recurrent=True))
    case = Case(tmp_path, (tmp_path / "made.kvsnap").read_bytes())
    place = case.part(Kind.STATE, 1, 0)
    report = case.flipped(place)
    assert report.n_tokens == 3
    assert report.lost[0].tensor == "layer0.recurrent"
    assert report.lost[0].tokens == (3, 6)
    case.check(report)
    report = case.flipped(place, keep_tokens=True)
    assert (report.n_tokens, report.n_rows, report.n_pending) == (6, 3, 3)


@pytest.mark.parametrize("n_rows", [8, 9])  # what is left of the last group of 4 has no row at 8
def test_ids_behind_the_damage_follow_what_the_layers_have_that_is_replaced(tmp_path: Path, n_rows: int) -> None:
    ids, kinds = tuple(range(10, 30)), ["grow", "recurrent", "buffer"]
    first = snapshot_of_kinds(ids[: n_rows + 1], kinds, n_pending=1, sampler=SAMPLER)
    with Session.open(tmp_path / "made.kvsnap") as session:
        session.append(first)
        session.append(snapshot_of_kinds(ids, kinds, start=n_rows, sampler=SAMPLER))
    case = Case(tmp_path, (tmp_path / "made.kvsnap").read_bytes())
    report = case.flipped(case.part(Kind.SPAN, 1, 0), keep_tokens=True)
    assert (report.n_tokens, report.n_rows, report.n_pending) == (20, n_rows, 20 - n_rows)
    expected = {t.name: t.array.tobytes() for t in first.tensors()}
    with Session.open(case.out) as session:
        made = session.load()
        assert {t.name: t.array.tobytes() for t in made.tensors()} == expected
        assert made.logits is None
        assert made.sampler is None
        session.append(snapshot_of_kinds((*ids, 7), kinds, start=n_rows))
        assert session.reach(20).reached
        session.truncate(20)
        assert {t.name: t.array.tobytes() for t in session.load().tensors()} == expected


def test_ids_behind_the_damage_go_on_at_the_position_that_comes_next(tmp_path: Path) -> None:
    with Session.open(tmp_path / "made.kvsnap") as session:
        session.append(replace(snapshot(IDS[:4], n_pending=1), token_offset=100))
        positions = (PositionRun(0, 3), PositionRun(100, 3))
        session.append(replace(snapshot(IDS[:6], start=3), positions=positions, token_offset=103))
    case = Case(tmp_path, (tmp_path / "made.kvsnap").read_bytes())
    case.flipped(case.part(Kind.SPAN, 1, 0), keep_tokens=True)
    with Session.open(case.out) as session:
        assert session.load().token_offset == 100
        session.truncate(5)
        assert session.load().token_offset == 100
        session.append(replace(snapshot((*IDS[:5], 8), start=3), positions=positions, token_offset=103))
        session.truncate(5)
        assert session.load().token_offset == 100


def test_a_damaged_note_is_dropped(case: Case) -> None:
    report = case.flipped(case.place(Kind.NOTE, -1) + RECORD_SIZE + 3)
    assert report.n_tokens == 9
    assert report.lost[0].what.startswith("NOTE")
    assert kvsnap.load(case.out).metadata == {}
    case.check(report)


def test_a_damaged_identity_is_unknown(case: Case) -> None:
    report = case.flipped(case.place(Kind.IDENTITY) + RECORD_SIZE + 30)
    assert not report.complete
    assert "--accept weights" in report.lost[0].what
    assert kvsnap.load(case.out).identity == Identity()
    case.check(report)


def two_identities(path: Path) -> Case:
    """Turns 1 and 2 of known weights, turn 3 of unknown ones."""
    with Session.open(path / "made.kvsnap") as session:
        session.append(snapshot(IDS[:3]))
        session.append(snapshot(IDS[:6]))
        session.append(replace(snapshot(IDS[:9]), identity=replace(snapshot(IDS[:1]).identity, weights=())))
    return Case(path, (path / "made.kvsnap").read_bytes())


def test_an_earlier_identity_is_not_taken_for_later_turns(tmp_path: Path) -> None:
    case = two_identities(tmp_path)
    report = case.flipped(case.place(Kind.IDENTITY, 1) + RECORD_SIZE + 30)
    assert report.n_tokens == 9
    assert kvsnap.load(case.out).identity == Identity()
    report = case.flipped(case.place(Kind.IDENTITY, 1) + RECORD_SIZE + 30, case.part(Kind.SPAN, 2, 0))
    assert report.n_tokens == 6
    assert kvsnap.load(case.out).identity == snapshot(IDS[:1]).identity
    assert any("takes its place" in note for note in report.notes)


def test_a_damaged_layout_is_named(case: Case) -> None:
    for place in (case.place(Kind.LAYOUT) + 8, case.place(Kind.LAYOUT) + RECORD_SIZE + 30):
        with pytest.raises(DamagedError, match="LAYOUT is damaged"):
            case.flipped(place)


def test_another_layout_of_the_same_history_takes_its_place(tmp_path: Path) -> None:
    with Session.open(tmp_path / "made.kvsnap") as session:
        session.append(snapshot(IDS[:2], dtype="float16", vocab=4))
        session.reset()
        session.append(snapshot(IDS[:3], dtype="bfloat16", vocab=0))
        session.append(snapshot(IDS[:6], dtype="bfloat16"))
    case = Case(tmp_path, (tmp_path / "made.kvsnap").read_bytes())
    assert len([k for _, k, _ in case.records if k == Kind.LAYOUT]) == 3
    second, third = case.place(Kind.LAYOUT, 1) + RECORD_SIZE + 9, case.place(Kind.LAYOUT, 2) + RECORD_SIZE + 9
    report = case.flipped(third)
    assert report.n_tokens == 6
    assert any("takes its place" in note for note in report.notes)
    assert "STATE behind token 6" in report.lost[0].what  # the older one knows no logits
    made, whole = kvsnap.load(case.out), kvsnap.load(case.whole)
    assert same(made, replace(whole, logits=None)) == []
    # The first one fits by its sizes, but is of the history before the reset: its dtype would be wrong.
    with pytest.raises(DamagedError, match="LAYOUT is damaged"):
        case.flipped(second, third)


def test_the_header_is_proven_by_the_records(case: Case) -> None:
    for place in range(HEADER_SIZE):
        report = case.flipped(place)
        assert report.complete, place
        assert "header is damaged" in report.notes[0]
        case.check(report)
    zeroed = bytes(56) + case.raw[56:64] + bytes(64) + case.raw[128:]
    report = case.repair(zeroed)
    assert report.complete
    assert same(kvsnap.load(case.out), kvsnap.load(case.whole)) == []
    with pytest.raises(DamagedError, match="no record proves its salt"):
        case.flipped(57, 60)


def test_a_whole_header_of_a_newer_version_is_refused(case: Case) -> None:
    header = replace(case.file.header, required=1 << 40).pack()
    with pytest.raises(FormatError, match="features that this release does not know"):
        case.repair(header + case.raw[HEADER_SIZE:])


def test_damage_outside_of_the_history_is_only_a_note(golden: Case) -> None:
    with Session.open(golden.whole) as session:
        session.reset()
        session.append(snapshot(IDS[:2]))
    case = Case(golden.whole.parent, golden.whole.read_bytes())
    report = case.flipped(case.part(Kind.SPAN, 0, 0))
    assert report.complete
    assert "costs nothing" in report.notes[0]
    assert same(kvsnap.load(case.out), kvsnap.load(case.whole)) == []


def test_damaged_padding_is_only_a_note(case: Case) -> None:
    place = case.place(Kind.SPAN, 2)
    table, payload, _ = case.file.table_at(place, Kind.SPAN)
    end = payload + table.payload_length
    if end % 64 == 0:
        part = table.parts[0]
        end = payload + part.offset + part.stored
    identity = case.place(Kind.IDENTITY)
    stop = record_end(identity, read_record_header(case.file.reader, case.file.header, identity))
    report = case.flipped(end if end % 64 else stop - 1)
    assert report.complete
    assert "padding is not zero" in " ".join(report.notes)
    case.check(report)


# -- forks -------------------------------------------------------------------------------------------------------------


def forked(path: Path) -> tuple[Path, Path]:
    """A parent of two turns, a fork of it with one more."""
    made = path / "made.kvsnap"
    with Session.open(made) as session:
        session.append(snapshot(IDS[:3]))
        session.append(snapshot(IDS[:6]))
        name = session._journal.header.file_id
    parent = made.rename(path / session_file_name(name))
    child = Path(fork_file(str(parent)).path)
    with Session.open(child) as session:
        session.append(snapshot(IDS[:9]))
    return parent, child


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x41
    path.write_bytes(data)


def place_of(path: Path, kind: int, number: int) -> int:
    with Reader(path) as reader:
        return Survey(reader, NativeFile(reader, mapped=False).header).of_kind(kind)[number]


def test_a_fork_becomes_a_file_of_its_own(tmp_path: Path) -> None:
    parent, child = forked(tmp_path)
    whole, out = kvsnap.load(child), tmp_path / "out.kvsnap"
    report = kvsnap.repair(child, out)
    assert report.complete
    assert report.n_turns == 3
    expected = replace(whole)
    assert same(kvsnap.load(out), expected) == []
    parent.unlink()
    assert same(kvsnap.load(out), snapshot(IDS[:9])) == []
    assert kvsnap.verify(out).ok


@pytest.mark.parametrize(("kind", "number", "behind", "n_tokens"), [
    (Kind.SPAN, 1, RECORD_SIZE + 64, 3), (Kind.SPAN, 1, 5, 3), (Kind.IDENTITY, 0, RECORD_SIZE + 20, 9), (0, 0, 60, 9),
    (0, 0, 10, 9),
])  # fmt: skip
def test_a_fork_of_a_damaged_parent_keeps_what_can_be_read(
    tmp_path: Path, kind: int, number: int, behind: int, n_tokens: int
) -> None:
    parent, child = forked(tmp_path)
    flip(parent, (place_of(parent, kind, number) if kind else 0) + behind)
    report = kvsnap.repair(child, tmp_path / "out.kvsnap")
    assert report.n_tokens == n_tokens
    assert report.complete == (not kind)
    assert not kind or report.lost[0].path in (str(parent), None)
    made, expected = kvsnap.load(tmp_path / "out.kvsnap"), snapshot(IDS[:n_tokens])
    assert set(same(made, expected)) <= ({"identity"} if kind == Kind.IDENTITY else set())


def test_a_fork_with_a_damaged_header_is_still_a_fork(tmp_path: Path) -> None:
    _, child = forked(tmp_path)
    for place in (3, 8, 16, 33, 57, 125):
        data = child.read_bytes()
        flip(child, place)
        report = kvsnap.repair(child, tmp_path / f"out{place}.kvsnap")
        assert report.complete
        assert same(kvsnap.load(report.out), snapshot(IDS[:9])) == []
        child.write_bytes(data)


def test_a_fork_without_its_parent_is_a_clear_error(tmp_path: Path) -> None:
    parent, child = forked(tmp_path)
    parent.unlink()
    for keep in (False, True):
        with pytest.raises(MissingError, match="is a fork, and the file that its history starts in"):
            kvsnap.repair(child, tmp_path / "out.kvsnap", keep_tokens=keep)
    assert not (tmp_path / "out.kvsnap").exists()


def test_a_fork_that_keeps_nothing_of_its_parent_needs_none(tmp_path: Path) -> None:
    parent, child = forked(tmp_path)
    with Session.open(child) as session:
        session.reset()
        session.append(snapshot(IDS[10:14], dtype="float16", identity=replace(snapshot(IDS[:1]).identity, runtime=())))
    parent.unlink()
    report = kvsnap.repair(child, tmp_path / "out.kvsnap")
    assert report.n_tokens == 4
    assert any("nothing of it is kept" in note for note in report.notes)
    assert kvsnap.load(report.out).tokens == IDS[10:14]


# -- hostile files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [b"", b"KVR1", b"KVEND\r\n\x1a"])
def test_garbage_takes_little(tmp_path: Path, pattern: bytes) -> None:
    """Where each 64 bytes look like a record or a footer, each is looked at once."""
    body = np.random.default_rng(5).integers(0, 256, 8 << 20, np.uint8).reshape(-1, 64)
    if pattern:
        body[:, : len(pattern)] = np.frombuffer(pattern, np.uint8)
    whole = build(tmp_path / "made.kvsnap")
    source = tmp_path / "source.kvsnap"
    source.write_bytes(whole[:HEADER_SIZE] + body.tobytes())
    reads = 0

    class Counting(Reader):
        def read_at(self, offset: int, length: int) -> bytes:
            nonlocal reads
            reads += length
            return super().read_at(offset, length)

    with Counting(source) as reader:
        survey = Survey(reader, NativeFile.open(tmp_path / "made.kvsnap").header)
        assert list(survey) == []
        assert reads < 4 * source.stat().st_size
    with pytest.raises(DamagedError, match="no commit can be read"):
        kvsnap.repair(source, tmp_path / "out.kvsnap")
    source.write_bytes(whole + body.tobytes())
    report = kvsnap.repair(source, tmp_path / "out.kvsnap")
    assert report.complete
    assert report.n_tokens == 9


def test_spans_that_overlap_are_not_copied_twice(tmp_path: Path) -> None:
    """Each entry of a hostile list would be copied, so that a small file made a large one."""
    made, _ = CASES["spans_inside_one_another"]
    source = tmp_path / "source.kvsnap"
    source.write_bytes(made())
    try:
        report = kvsnap.repair(source, tmp_path / "out.kvsnap")
    except KvsnapError:
        return
    assert not report.complete
    assert report.nbytes < 2 * source.stat().st_size


@pytest.mark.parametrize("name", sorted(CASES))
def test_files_that_break_a_rule_give_a_refusal_or_a_file_that_verifies(tmp_path: Path, name: str) -> None:
    made = CASES[name][0]()
    source, out = tmp_path / "source.kvsnap", tmp_path / "out.kvsnap"
    for data, keep in product([made] if isinstance(made, bytes) else made[:3], (False, True)):
        source.write_bytes(data)
        out.unlink(missing_ok=True)
        try:
            kvsnap.repair(source, out, keep_tokens=keep)
        except KvsnapError:
            assert not out.exists()
        else:
            assert kvsnap.verify(out).damages == ()


@pytest.mark.parametrize("state", [{}, {"meta": b'{"sampler":{},"random":{}}'}, {"row_start": 2}])
def test_an_earlier_state_that_breaks_a_rule_is_not_copied(tmp_path: Path, state: dict[str, Any]) -> None:
    """Its checksums fit, and it is no part of the current history: verify is content, and does not look into it."""
    source, out = tmp_path / "source.kvsnap", tmp_path / "out.kvsnap"
    source.write_bytes(two_turns(**state))
    assert kvsnap.verify(source).damages == ()
    report = kvsnap.repair(source, out)
    assert [damage.what.split(",")[0] for damage in report.lost] == (["STATE behind token 3"] if state else [])
    assert same(kvsnap.load(out), kvsnap.load(source)) == []
    with Session.open(out) as session:
        session.truncate(3)
        assert (session.load().logits is None) == bool(state)


# -- controls: without a check other data would come through -----------------------------------------------------------


def test_without_the_digest_of_a_list_a_wrong_one_would_come_through(
    long: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the replay: a commit that is not seen makes another list, which the digest refuses."""
    cut = next(p for p, k, n in long.records if k == Kind.COMMIT and long_operation(long, p) == 2)
    index = long.file.commit.index + RECORD_SIZE + 70
    report = long.flipped(index, cut + RECORD_SIZE + 40)
    assert report.complete
    long.check(report)
    monkeypatch.setattr(relist._Relisting, "_fits", lambda self, commit: bool(self.top))
    monkeypatch.setattr(relist._Relisting, "_cut", lambda self, n_tokens, n_rows: None)
    monkeypatch.setattr(relist._Relisting, "_direct", lambda self, commit: False)
    report = long.flipped(index, cut + RECORD_SIZE + 40)
    with pytest.raises(AssertionError):  # turns that were cut off came back
        long.check(report)


def long_operation(case: Case, place: int) -> int:
    return int(struct.unpack_from("<H", case.raw, place + RECORD_SIZE + 32)[0])


def test_without_the_check_of_parts_the_repair_ends_in_an_error(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the parts: what the search lets through, copying refuses, and no file appears."""
    monkeypatch.setattr(salvage._Looking, "_check_part", staticmethod(lambda source, part: None))
    with pytest.raises(DamagedError, match=r"layer0\.k"):
        case.flipped(case.part(Kind.SPAN, 1, 0))

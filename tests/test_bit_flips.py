"""A bit that changed in a file of megabytes is found, wherever it is: told when it is read, or named by verify.

A map of each file, made from the page of the format alone, says what every byte is. Of ten thousand random bits most
hit values: then the tensor is read again, and the record is verified again, in the open file; what was not hit needs no
new look, and hundreds of full looks show that they agree. Hits on the frame always get the full look.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvsnap import files
from kvsnap.errors import DamagedError, FormatError, KvsnapError, VersionError
from kvsnap.formats import native
from kvsnap.formats.native import BytesReader, NativeFile, VerifyReport, verify_file
from kvsnap.formats.native import verify as verifying
from kvsnap.formats.native.assemble import snapshot_of
from kvsnap.formats.native.sources import PartSource
from kvsnap.layout import Snapshot, Tensor
from kvsnap.session import Session
from spec_file import COMMIT, INDEX, SPAN, STATE, SpecReader
from synthetic import SAMPLER, same, snapshot

pytestmark = pytest.mark.exhaustive

HITS, CROSS_CHECKED = 10_000, 200
SHAPE: dict[str, Any] = {"layers": 2, "heads": 4, "dim": 64, "vocab": 257, "dtype": "float16"}
TOKENS = tuple(i * 7919 % 50_000 for i in range(2000))
NAMES = {1: "IDENTITY", 2: "LAYOUT", 3: "SPAN", 4: "STATE", 5: "NOTE", 6: "INDEX", 7: "COMMIT"}


# -- the map ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Region:
    """Bytes `[start, stop)` of one meaning. `record` is the offset of the record they belong to, 0 for the header."""

    start: int
    stop: int
    what: str  # header, record, table, part, padding, footer
    record: int = 0
    kind: int = 0
    live: bool = True
    tensor: str = ""
    rows: tuple[int, int] = (0, 0)
    tokens: tuple[int, int] | None = None


def regions_of(data: bytes) -> list[Region]:
    """Say what every byte of a whole file is."""
    spec = SpecReader(data)
    names = {t["id"]: t["name"] for t in spec.json("layout", 2)["tensors"]}
    live, tokens, first = {spec.commit_at}, {}, 0
    live |= {spec.commit[n] for n in ("identity", "layout", "state", "note", "index")}
    for entry in spec.entries():
        live.add(entry["span"])
        tokens[entry["span"]] = (first, first + entry["n_tokens"])
        first += entry["n_tokens"]
    out = [Region(0, 128, "header")]
    for record in spec.records():
        at, kind, payload = record["at"], record["kind"], record["at"] + 64
        common: dict[str, Any] = {"record": at, "kind": kind, "live": at in live, "tokens": tokens.get(at)}
        out.append(Region(at, payload, "record", **common))
        out.append(Region(payload, payload + record["table"], "table", **common))
        for part in spec.table(at, kind)["parts"] if kind in {SPAN, STATE} else []:
            start = payload + part["offset"]
            out.append(Region(out[-1].stop, start, "padding", **common))
            known = {"tensor": names[part["tensor"]], "rows": (part["row_start"], part["row_start"] + part["n_rows"])}
            out.append(Region(start, start + part["stored"], "part", **common, **known))
        out.append(Region(out[-1].stop, record["end"], "padding", **common))
        if kind == COMMIT:
            out.append(Region(record["end"], record["end"] + 64, "footer", **common))
    out = [r for r in out if r.stop > r.start]
    assert [r.start for r in out] == [0, *(r.stop for r in out[:-1])], "no byte is left out"
    assert out[-1].stop == len(data)
    return out


# -- the files ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A good file, its map, what it holds, and what it held one commit before (None: nothing to go back to)."""

    data: bytes
    regions: list[Region]
    good: Snapshot
    before: Snapshot | None

    def region_at(self, offset: int) -> Region:
        return self.regions[bisect_right([r.start for r in self.regions], offset) - 1]


def sealed() -> Case:
    made = snapshot(TOKENS[:1600], n_pending=1, sampler=SAMPLER, text="word " * 500, metadata={"a": "b"}, **SHAPE)
    data = native.dumps(made)
    return Case(data, regions_of(data), made, None)


def session(directory: Any) -> Case:
    """Forty turns with an INDEX, a lossy one, one that was cut, one that is gone, and a STATE for each."""
    path = directory / "a.kvsnap"
    with Session.open(path) as made:
        for turn in range(1, 37):
            said: dict[str, Any] = {"text": "word " * turn, "sampler": SAMPLER}
            one = snapshot(TOKENS[: 40 * turn], n_pending=1, start=made.n_rows, **said, **SHAPE)
            made.append(one, codec="q8" if turn == 7 else None)
        made.append(snapshot((*TOKENS[:1440], 1, 2, 3), n_pending=1, start=made.n_rows, **SHAPE))
        made.truncate(1440)
        made.append(snapshot(TOKENS[:1500], start=made.n_rows, metadata={"a": "b"}, **SHAPE))
        made.truncate(1470)
        made.append(snapshot(TOKENS[:1501], start=made.n_rows, **SHAPE))
        before = read_all(made.load())
        made.append(snapshot(TOKENS[:1540], start=made.n_rows, sampler=SAMPLER, **SHAPE))
        good = read_all(made.load())
    data = path.read_bytes()
    assert SpecReader(data).commit["index"]
    return Case(data, regions_of(data), good, before)


def read_all(found: Snapshot) -> Snapshot:
    for tensor in tensors_of(found):
        assert tensor.array is not None
    return found


def tensors_of(found: Snapshot) -> list[Tensor]:
    return [*found.tensors(), *([found.logits] if found.logits is not None else [])]


@pytest.fixture(scope="module", params=["snapshot", "session"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.system, "sync", lambda *_a, **_k: None)
        made = sealed() if request.param == "snapshot" else session(tmp_path_factory.mktemp("session"))
    assert len(made.data) > 2_500_000
    return made


@contextmanager
def flipped(buffer: bytearray, offset: int, bit: int) -> Iterator[None]:
    buffer[offset] ^= 1 << bit
    try:
        yield
    finally:
        buffer[offset] ^= 1 << bit


# -- the full look --------------------------------------------------------------------------------------------------


def verified(buffer: bytearray) -> VerifyReport | KvsnapError:
    try:
        return verify_file(NativeFile(BytesReader(buffer)))
    except KvsnapError as error:
        return error


def full_look(case: Case, buffer: bytearray, region: Region) -> str:
    """Read everything and verify everything, and hold it against what the map says; return what became of the bit."""
    report = verified(buffer)
    try:
        file = NativeFile(BytesReader(buffer))
        loaded = read_all(snapshot_of(file))
    except KvsnapError as error:
        assert region.live, region
        check_error(case, region, error)
        if isinstance(report, VerifyReport):
            assert not report.ok
            assert any(names(damage, region) for damage in report.damages), (region, report.damages)
        return "refused"
    assert isinstance(report, VerifyReport)
    if same(loaded, case.good):
        assert case.before is not None
        assert not same(loaded, case.before), "neither what was saved nor what was saved before"
        assert region.record == SpecReader(case.data).commit_at, region
        assert file.end.dropped == len(case.data) - file.end.footer.file_length > 0
        assert region.what == "footer" or "cannot be read" in file.end.notes[0]
        assert set(file.end.notes) < set(report.notes), "verify tells it too, and the bytes behind the end"
        return "the commit before, reported"
    if not region.live:
        assert report.ok
        assert report.damages, region
        assert not any(d.live for d in report.damages)
        assert any(names(damage, region) for damage in report.damages), (region, report.damages)
        return "not live, named"
    assert region.what == "padding", region
    assert not report.ok
    assert any(names(damage, region) for damage in report.damages), (region, report.damages)
    return "padding, named"


def check_error(case: Case, region: Region, error: KvsnapError) -> None:
    """An error is of the right kind and says where."""
    assert isinstance(error, (DamagedError, FormatError))
    if region.what == "header" or (case.before is None and region.record == SpecReader(case.data).commit_at):
        return  # there is no file, or no commit: nothing else can be told
    assert not isinstance(error, VersionError)
    assert error.offset is not None
    if region.what == "part":
        what = f"{region.tensor} rows [{region.rows[0]}, {region.rows[1]})" if region.tensor != "logits" else "logits"
        assert error.message == f"{what} does not fit its checksum"
        assert error.offset == region.start
    else:
        assert error.offset in {region.record, region.record + 64}, (region, str(error))


def names(damage: Any, region: Region) -> bool:
    """Whether a damage that verify tells is the one in this region."""
    if damage.live != region.live:
        return False
    if region.what == "part":
        right = damage.offset == region.start and (damage.tensor == region.tensor or not region.live)
        return right and damage.tokens == region.tokens
    if region.what == "padding":
        return damage.offset == region.start and damage.what == "padding is not zero"
    if region.what == "footer":
        return damage.offset in {region.record, region.start}
    if region.what == "record" or region.kind == INDEX:
        return damage.offset in {region.record, region.record + 64}
    return damage.offset == region.start and damage.tokens == region.tokens and NAMES[region.kind] in damage.what


# -- the quick look: values that are hit while the file is open ------------------------------------------------------


class OpenFile:
    """A file that is open over bytes that may change: frame and tables were read when they were good."""

    def __init__(self, buffer: bytearray) -> None:
        self.file = NativeFile(BytesReader(buffer))
        self.tensors = {t.name: t for t in tensors_of(snapshot_of(self.file))}

    def look(self, region: Region) -> str:
        if region.live:
            with pytest.raises(DamagedError) as caught:
                self.tensors[region.tensor].values()
            what = region.tensor if region.tensor == "logits" else f"{region.tensor} rows [{region.rows[0]}, "
            assert caught.value.message.startswith(what)
            assert caught.value.offset == region.start
        self.verify(region)
        return "refused" if region.live else "not live, named"

    def verify(self, region: Region) -> None:
        walk = verifying._Walk(self.file, None)
        verifying._live_records(self.file, walk)
        verifying._guarded(walk, region.record)
        (damage,) = walk.damages
        assert names(damage, region), (damage, region)


def test_ten_thousand_random_bits(case: Case) -> None:
    dice, buffer = random.Random(10_000), bytearray(case.data)
    quick, outcomes, hit = OpenFile(buffer), Counter[str](), Counter[str]()
    checked = set(dice.sample(range(HITS), CROSS_CHECKED))
    for number in range(HITS):
        offset, bit = dice.randrange(len(buffer)), dice.randrange(8)
        region = case.region_at(offset)
        with flipped(buffer, offset, bit):
            if region.what == "part":
                outcome = quick.look(region)
                if number in checked:
                    assert full_look(case, buffer, region) == outcome
            else:
                outcome = full_look(case, buffer, region)
        hit[region.what] += 1
        outcomes[outcome] += 1
    print(f"{dict(hit)}: {dict(outcomes)}")
    assert outcomes.total() == HITS
    assert hit["part"] > HITS * 0.9
    assert len(hit) >= (3 if case.before is None else 4)
    assert bytes(buffer) == case.data
    assert not same(read_all(snapshot_of(NativeFile(BytesReader(buffer)))), case.good)


def forced(case: Case, dice: random.Random) -> Iterator[tuple[int, int]]:
    """Hits on everything that random hits miss: header, end of the file, and something of each record."""
    end = next(r for r in case.regions if r.record == SpecReader(case.data).commit_at)
    last = range(end.stop, len(case.data) - 64, 5)
    for offset in [*range(128), *range(end.start, end.stop), *last, *range(len(case.data) - 64, len(case.data))]:
        yield offset, offset % 8
    few = case.before is not None  # a session has hundreds of records: of most a few bits must do
    for number, region in enumerate(case.regions):
        if not region.record or region.record == end.record:
            continue
        n = {"record": 2, "table": 1, "footer": 1, "padding": 1, "part": 0 if few else 10}[region.what]
        for _ in range(10 * n if region.kind == INDEX or not few else n):
            yield dice.randrange(region.start, region.stop), dice.randrange(8)
        if not few or region.kind == INDEX or number % 5 == 0:
            yield region.start, 0
            yield region.stop - 1, 7


def test_hits_on_header_records_tables_index_padding_commit_and_footer(case: Case) -> None:
    dice, buffer = random.Random(1), bytearray(case.data)
    outcomes: Counter[tuple[str, str]] = Counter()
    for offset, bit in forced(case, dice):
        region = case.region_at(offset)
        with flipped(buffer, offset, bit):
            outcomes[region.what, full_look(case, buffer, region)] += 1
    print({f"{what}: {outcome}": n for (what, outcome), n in sorted(outcomes.items())})
    assert outcomes["header", "refused"] == 128
    assert outcomes["record", "refused"] > 20
    assert outcomes["table", "refused"] > 20
    assert outcomes["padding", "padding, named"] > 5
    if case.before is None:
        assert outcomes["footer", "refused"] >= 64
    else:
        assert outcomes["footer", "the commit before, reported"] == 64
        assert outcomes["record", "the commit before, reported"] == 64
        assert outcomes["table", "the commit before, reported"] > 100
        for what in ("record", "table", "footer", "padding"):
            assert outcomes[what, "not live, named"] > 5


# -- controls -----------------------------------------------------------------------------------------------------


def test_the_map_and_the_looks_can_fail(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = bytearray(case.data)
    with pytest.raises(AssertionError):
        full_look(case, buffer, case.regions[0])  # nothing is flipped, so nothing can be refused
    part = next(r for r in case.regions if r.what == "part" and r.live)
    quick = OpenFile(buffer)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        quick.look(part)
    with flipped(buffer, part.start, 3):
        for wrong in (
            replace(part, tensor="layer1.v"),
            replace(part, live=False),
            replace(part, start=part.start + 64),
        ):
            with pytest.raises((AssertionError, pytest.fail.Exception)):
                full_look(case, buffer, wrong)
        # Without the comparison of checksums the bit would be handed out as data, and the looks say so.
        monkeypatch.setattr(PartSource, "stored", unchecked)
        monkeypatch.setattr(PartSource, "read_into", PartSource._decode)
        with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
            quick.look(part)
        with pytest.raises(AssertionError):
            full_look(case, buffer, part)


def unchecked(source: PartSource) -> memoryview:
    return memoryview(source.file.read_at(source.offset, source.part.stored))


def test_damage_in_an_older_commit_is_no_loss_to_the_current_history(tmp_path: Path) -> None:
    path = tmp_path / "a.kvsnap"
    with Session.open(path) as made:
        for n in (3, 6, 9):
            made.append(snapshot(TOKENS[:n]))
    buffer = bytearray(path.read_bytes())
    previous = SpecReader(bytes(buffer)).commit["previous"]
    with flipped(buffer, previous + 64 + 40, 1):
        report = verified(buffer)
    assert isinstance(report, VerifyReport)
    assert report.ok
    assert [(d.offset, d.live) for d in report.damages] == [(previous + 64, False), (previous, False)]
    assert "the previous COMMIT is damaged" in report.damages[1].what

"""The messages of a chat in a file: what each turn adds, what is known after every change, what is refused.

Files are read a second time by the reader made from the spec alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvsnap
from kvsnap import Session
from kvsnap.cli import run
from kvsnap.errors import FormatError, InputError
from kvsnap.files import write_whole
from kvsnap.formats import colikv, mlxkv
from kvsnap.formats.native import said
from kvsnap.layout import Snapshot
from kvsnap.library import Library
from spec_file import SPAN, Minimal, SpecReader
from synthetic import MESSAGES, same, snapshot

TOKENS = tuple(range(1, 41))
ASK = {"role": "user", "content": "what is a cache?"}
SAY = {"role": "assistant", "content": "what was kept – for later"}
MORE = {"role": "user", "content": [{"type": "text", "text": "more"}], "name": "Zoë"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "z": 1, "a": {"y": 2, "b": 3.5}}]}
CHAT = (ASK, SAY, MORE, CALL)
"""Messages of the turns that end at 5, 10, 15 and 20 tokens."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "talk.kvsnap"


def turn(n_tokens: int, messages: Sequence[Any] | None, **fields: Any) -> Snapshot:
    given = None if messages is None else tuple(messages)
    return snapshot(TOKENS[:n_tokens], messages=given, text="x" * n_tokens, **fields)


def talk(path: Path, turns: int = 4) -> Session:
    session = Session.open(path)
    for i in range(turns):
        session.append(turn(5 * (i + 1), CHAT[: i + 1]))
    return session


def by_spec(path: Path) -> Any:
    return SpecReader(path.read_bytes(), path.parent).content()["messages"]


def metas(path: Path) -> list[dict[str, Any]]:
    reader = SpecReader(path.read_bytes(), path.parent)
    return [of.table(entry["span"], SPAN)["meta"] for of, entry in reader.live()]


def check(path: Path, expected: Sequence[Any] | None) -> None:
    """The same messages by the session, by a load of the file, by its summary, and by the reader of the spec."""
    known = None if expected is None else list(expected)
    with Session.open(path, readonly=True) as session:
        found = session.messages
        assert (None if found is None else list(found)) == known
        whole = session.load().messages
        assert (None if whole is None else list(whole)) == known
    assert by_spec(path) == known
    assert kvsnap.inspect(path).n_messages == (None if known is None else len(known))


# -- what a turn adds ----------------------------------------------------------------------------------------------


def test_each_turn_writes_the_messages_that_are_new(path: Path) -> None:
    talk(path).close()
    assert [meta["messages"] for meta in metas(path)] == [[m] for m in CHAT]
    assert not any("messages_after" in meta for meta in metas(path))
    check(path, CHAT)


def test_a_turn_is_no_longer_for_all_the_messages_before_it(path: Path) -> None:
    long = [{"role": "user", "content": "x" * 10_000}] * 30
    with Session.open(path) as session:
        session.append(turn(5, long))
        written = session.append(turn(10, [*long, SAY])).nbytes
        assert written < 5_000
        assert len(json.dumps(long)) > 60 * written


def test_a_message_that_changed_takes_the_place_of_the_one_before(path: Path) -> None:
    longer = {**SAY, "content": "what was kept – for later, and more"}
    with talk(path, 2) as session:
        session.append(turn(12, (ASK, longer)))
        assert session.messages == (ASK, longer)
    assert metas(path)[-1]["messages"] == [longer]
    assert metas(path)[-1]["messages_after"] == 1
    check(path, (ASK, longer))


def test_a_list_that_became_shorter_is_shorter_in_the_file(path: Path) -> None:
    with talk(path, 3) as session:
        session.append(turn(20, (ASK,)))
    assert (metas(path)[-1]["messages"], metas(path)[-1]["messages_after"]) == ([], 1)
    check(path, (ASK,))


def test_a_turn_that_says_nothing_of_messages_leaves_them(path: Path) -> None:
    with talk(path, 2) as session:
        session.append(turn(15, None))
        assert session.messages == CHAT[:2]
        session.append(turn(20, CHAT[:2]))
        session.append(turn(25, CHAT[:3]))
    assert ["messages" in meta for meta in metas(path)] == [True, True, False, False, True]
    check(path, CHAT[:3])


def test_a_history_that_never_spoke_of_messages_does_not_know_them(path: Path) -> None:
    with Session.open(path) as session:
        assert session.messages is None
        session.append(turn(5, None))
        assert (session.messages, session.message_ends) == (None, ())
        check(path, None)
        session.append(turn(10, ()))
        assert (session.messages, session.message_ends) == ((), ((10, 0),))
    check(path, ())


def test_files_of_before_have_no_messages() -> None:
    for name in ("tiny.kvsnap", "tiny_session.kvsnap"):
        assert kvsnap.load(Path(__file__).parent / "data" / name).messages is None


def test_the_golden_file_with_messages_opens_for_ever() -> None:
    golden = Path(__file__).parent / "data" / "tiny_messages.kvsnap"
    check(golden, MESSAGES)
    with Session.open(golden, readonly=True) as session:
        assert session.tokens == (31, 32, 33, 35, 37, 38)
        assert session.message_ends == ((2, 1), (6, 3))
    assert [(m.get("messages"), m.get("messages_after")) for m in metas(golden)] == [
        ([MESSAGES[0]], None), ([MESSAGES[1]], None), ([MESSAGES[1]], 1), ([*MESSAGES[1:]], 1),
    ]  # fmt: skip


def test_the_order_of_members_stays_as_it_was_given(path: Path) -> None:
    talk(path).close()
    with Session.open(path) as session:
        found = session.load().messages
        assert found is not None
        assert json.dumps(found) == json.dumps(CHAT)
        assert json.dumps(found, sort_keys=True) != json.dumps(CHAT)  # else the line above could not fail
        turned = dict(reversed(CALL.items()))
        session.append(turn(25, (*CHAT[:3], turned)))
    assert json.dumps(metas(path)[-1]["messages"]) == json.dumps([turned])


def test_a_number_of_another_kind_is_another_message(path: Path) -> None:
    with Session.open(path) as session:
        session.append(turn(5, [{"role": "user", "n": 1}]))
        for i, value in enumerate((1.0, True, None), 2):
            session.append(turn(5 * i, [{"role": "user", "n": value}]))
            assert repr(session.messages) == repr(({"role": "user", "n": value},))


def test_what_a_caller_does_to_messages_afterwards_changes_nothing(path: Path) -> None:
    mine: dict[str, Any] = {"role": "user", "content": ["a"]}
    with Session.open(path) as session:
        session.append(turn(5, [mine]))
        mine["content"].append("b")
        handed = session.messages
        assert handed == ({"role": "user", "content": ["a"]},)
        handed[0]["content"].append("c")
        assert session.messages == ({"role": "user", "content": ["a"]},)
        session.append(turn(10, [mine]))
        assert session.messages == ({"role": "user", "content": ["a", "b"]},)
    check(path, [{"role": "user", "content": ["a", "b"]}])


# -- going back ------------------------------------------------------------------------------------------------------


def test_at_the_end_of_a_turn_its_messages_come_back(path: Path) -> None:
    with talk(path) as session:
        for n in (15, 10, 5):
            session.truncate(n)
            assert session.messages == CHAT[: n // 5]
            check(path, CHAT[: n // 5])
        session.truncate(0)
        assert session.messages is None
        check(path, None)
        assert session.rewind(5) == 20
        assert session.messages == CHAT
    check(path, CHAT)


def test_inside_a_turn_they_are_not_known_and_the_next_turn_makes_them_known(path: Path) -> None:
    with talk(path, 3) as session:
        assert session.load(12).messages is None
        session.truncate(12)
        assert session.messages is None
        check(path, None)
        session.append(turn(14, None))
        check(path, None)
        session.append(turn(18, CHAT))
        assert session.messages == CHAT
    assert metas(path)[-1]["messages_after"] == 2  # what came before the cut turn is not written again
    check(path, CHAT)


def test_inside_a_turn_that_changed_a_message_only_those_before_it_are_known(path: Path) -> None:
    with talk(path, 2) as session:
        session.append(turn(15, (ASK, {**SAY, "content": "another"}, MORE)))
        session.truncate(12)
        session.append(turn(20, CHAT[:2]))
    assert metas(path)[-1]["messages_after"] == 1
    check(path, CHAT[:2])


def test_a_cut_of_a_turn_that_said_nothing_loses_nothing(path: Path) -> None:
    with talk(path, 2) as session:
        session.append(turn(15, None))
        session.truncate(12)
        assert session.messages == CHAT[:2]
    check(path, CHAT[:2])


def test_message_ends_tell_where_each_turn_ended(path: Path) -> None:
    with talk(path) as session:
        ends = ((5, 1), (10, 2), (15, 3), (20, 4))
        assert session.message_ends == ends
        session.append(turn(22, None))
        assert session.message_ends == (*ends, (22, 4))
        session.truncate(13)
        assert session.message_ends == ends[:2]  # behind the cut turn they are not known
        session.append(turn(16, CHAT[:3]))
        assert session.message_ends == (*ends[:2], (16, 3))
        again = session.message_ends
    with Session.open(path) as session:
        assert session.message_ends == again


# -- copies, forks, repair -------------------------------------------------------------------------------------------


def test_compact_and_a_copy_keep_the_messages(path: Path, tmp_path: Path) -> None:
    with talk(path) as session:
        session.fork(tmp_path / "copy.kvsnap")
        session.fork(tmp_path / "short.kvsnap", n_tokens=10)
        session.truncate(15)
        ends = session.message_ends
        session.compact()
        assert (session.messages, session.message_ends) == (CHAT[:3], ends)
    check(path, CHAT[:3])
    check(tmp_path / "copy.kvsnap", CHAT)
    check(tmp_path / "short.kvsnap", CHAT[:2])


def test_what_a_cut_made_unknown_stays_unknown_when_it_is_compacted(path: Path) -> None:
    with talk(path, 3) as session:
        session.truncate(12)
        session.compact()
        assert (metas(path)[-1]["messages"], b"more" in path.read_bytes()) == (None, False)
        assert (session.messages, session.message_ends) == (None, ((5, 1), (10, 2)))
        check(path, None)
        session.append(turn(18, CHAT))
    assert metas(path)[-1]["messages_after"] == 2
    check(path, CHAT)


def test_a_fork_has_the_messages_of_its_parent_and_goes_on_from_them(tmp_path: Path) -> None:
    with Library(tmp_path) as library:
        with library.open("trunk") as trunk:
            for i in range(3):
                trunk.append(turn(5 * (i + 1), CHAT[: i + 1]))
        library.fork("trunk", "branch", n_tokens=10)
        with library.open("branch") as branch:
            assert (branch.messages, branch.message_ends) == (CHAT[:2], ((5, 1), (10, 2)))
            other = {"role": "user", "content": "other"}
            branch.append(turn(15, (*CHAT[:2], other)))
            assert branch.message_ends == ((5, 1), (10, 2), (15, 3))
            where = Path(branch.path)
            assert [len(meta["messages"]) for meta in metas(where)] == [1, 1, 1]
            branch.truncate(7)
            assert branch.messages is None
            branch.append(turn(9, CHAT[:2]))
            check(where, CHAT[:2])
            branch.compact()
            check(Path(branch.path), CHAT[:2])
        with library.open("trunk") as trunk:
            assert trunk.messages == CHAT[:3]


def test_repair_keeps_the_messages_of_what_it_keeps(path: Path, tmp_path: Path) -> None:
    talk(path).close()
    data = bytearray(path.read_bytes())
    reader = SpecReader(bytes(data))
    last = reader.live()[-1][1]
    part = reader.table(last["span"], SPAN)["parts"][0]
    data[last["span"] + 64 + part["offset"]] ^= 1
    path.write_bytes(data)
    kvsnap.repair(path, tmp_path / "rows.kvsnap")
    check(tmp_path / "rows.kvsnap", CHAT[:3])
    kvsnap.repair(path, tmp_path / "ids.kvsnap", keep_tokens=True)
    check(tmp_path / "ids.kvsnap", CHAT)
    assert metas(tmp_path / "ids.kvsnap")[-1]["messages"] == [CALL]


def test_repair_does_not_make_messages_known_that_were_not(path: Path, tmp_path: Path) -> None:
    with talk(path, 3) as session:
        session.truncate(12)
        session.append(turn(14, None))
    data = bytearray(path.read_bytes())
    reader = SpecReader(bytes(data))
    cut = reader.live()[-2][1]
    part = reader.table(cut["span"], SPAN)["parts"][0]
    data[cut["span"] + 64 + part["offset"]] ^= 1
    path.write_bytes(data)
    kvsnap.repair(path, tmp_path / "ids.kvsnap", keep_tokens=True)
    check(tmp_path / "ids.kvsnap", None)
    assert (metas(tmp_path / "ids.kvsnap")[-1]["messages"], kvsnap.load(tmp_path / "ids.kvsnap").tokens) == (
        None, TOKENS[:14],
    )  # fmt: skip


# -- snapshots and formats -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("messages", [None, (), CHAT])
@pytest.mark.parametrize("format", ["native", "safetensors"])
def test_a_snapshot_comes_back_with_its_messages(path: Path, messages: Any, format: str) -> None:
    saved = turn(20, messages)
    assert not kvsnap.save(saved, path, format=format).losses
    found = kvsnap.load(path)
    assert not same(found, saved)
    assert json.dumps(found.messages) == json.dumps(messages)
    assert kvsnap.inspect(path).n_messages == (None if messages is None else len(messages))


def test_an_encrypted_snapshot_has_its_messages_sealed(path: Path) -> None:
    key = bytes(range(32))
    kvsnap.save(turn(20, CHAT), path, key=key)
    assert kvsnap.load(path, key=key).messages == CHAT
    assert b"what is a cache" not in path.read_bytes()
    kvsnap.save(turn(20, CHAT), path)
    assert b"what is a cache" in path.read_bytes()


@pytest.mark.parametrize("target", [mlxkv.FORMAT, colikv.FORMAT], ids=["mlxkv", "colikv"])
def test_formats_without_messages_say_so(target: Any) -> None:
    told = [loss.what for loss in target.losses(turn(20, CHAT, heads=1, vocab=64))]
    quiet = [loss.what for loss in target.losses(turn(20, None, heads=1, vocab=64))]
    assert (told.count("messages"), quiet.count("messages")) == (1, 0)


def test_shards_carry_the_messages_and_have_to_agree_on_them() -> None:
    parts = kvsnap.split(turn(20, CHAT), 2)
    assert [part.messages for part in parts] == [CHAT, CHAT]
    assert kvsnap.join(parts).messages == CHAT
    with pytest.raises(InputError, match="messages differs"):
        kvsnap.join((parts[0], replace(parts[1], messages=CHAT[:1])))


def test_a_cut_of_a_snapshot_keeps_messages_only_when_nothing_is_cut() -> None:
    whole = turn(20, CHAT)
    assert whole.truncate(20).messages == CHAT
    assert whole.truncate(19).messages is None


# -- commands ----------------------------------------------------------------------------------------------------------


def kv(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str]:
    capsys.readouterr()
    code = run([str(a) for a in args])
    out, err = capsys.readouterr()
    return code, out or err


def test_cat_and_info_tell_the_messages(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kvsnap.save(turn(20, CHAT), path)
    code, out = kv(capsys, "cat", path, "--messages")
    assert code == 0
    assert out.splitlines()[:2] == ["user: what is a cache?", "assistant: what was kept – for later"]
    assert out.splitlines()[2:] == ['user: [{"type": "text", "text": "more"}]', "assistant: null"]
    assert json.loads(kv(capsys, "cat", path, "--json")[1])["messages"] == list(CHAT)
    assert json.loads(kv(capsys, "info", path, "--json")[1])["n_messages"] == 4
    assert ["messages", "4"] in [line.split() for line in kv(capsys, "info", path)[1].splitlines()]


def test_cat_says_where_messages_are_not_known(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kvsnap.save(turn(20, None), path)
    code, out = kv(capsys, "cat", path, "--messages")
    assert (code, "messages are not known" in out) == (InputError.exit_code, True)
    assert json.loads(kv(capsys, "cat", path, "--json")[1])["messages"] is None
    assert not any(line.split()[:1] == ["messages"] for line in kv(capsys, "info", path)[1].splitlines())
    assert kv(capsys, "cat", path, "--messages", "--tokens")[0] == 2


# -- what is refused -------------------------------------------------------------------------------------------------


def nested(depth: int) -> Any:
    """A message of so many levels."""
    value: Any = "deep"
    for _ in range(depth - 1):
        value = [value]
    return {"role": "user", "content": value}


BAD: dict[str, Any] = {
    "no object": "hello",
    "no role": {"content": "a"},
    "a role that is no text": {"role": 1},
    "not a number": {"role": "user", "content": float("nan")},
    "infinity": {"role": "user", "content": [float("inf")]},
    "a number beyond doubles": {"role": "user", "content": 10**400},
    "a member that is no text": {"role": "user", "content": {1: "a"}},
    "a member that is None": {"role": "user", "content": {None: "a"}},
    "bytes": {"role": "user", "content": b"a"},
    "a set": {"role": "user", "content": {"a"}},
    "half a character": {"role": "user", "content": "\ud800"},
    "too deep": nested(65),
}


@pytest.mark.parametrize("message", BAD.values(), ids=BAD.keys())
def test_what_is_no_message_is_refused_by_its_number_and_nothing_is_written(path: Path, message: Any) -> None:
    with talk(path, 1) as session:
        before = path.read_bytes()
        with pytest.raises(InputError, match="message 1 "):
            session.append(turn(10, (ASK, message)))
        assert path.read_bytes() == before
        session.append(turn(10, (ASK, nested(64))))
        assert session.messages == (ASK, nested(64))


HOSTILE: dict[str, tuple[str, str]] = {
    "no list": ('{"messages":7}', "messages"),
    "an object": ('{"messages":{"role":"user"}}', "messages"),
    "a text": ('{"messages":"user"}', "messages"),
    "no object": ('{"messages":[7]}', r"messages\[0\]"),
    "null inside": ('{"messages":[{"role":"user"},null]}', r"messages\[1\]"),
    "no role": ('{"messages":[{"content":"a"}]}', "role"),
    "a role that is no text": ('{"messages":[{"role":["user"]}]}', "role"),
    "after below zero": ('{"messages":[],"messages_after":-1}', "messages_after"),
    "after that is no number": ('{"messages":[],"messages_after":"1"}', "messages_after"),
    "after that is true": ('{"messages":null,"messages_after":true}', "messages_after"),
    "half a number after": ('{"messages":[],"messages_after":0.5}', "messages_after"),
    "a number that is infinite": ('{"messages":[{"role":"user","n":1e999}]}', "number"),
    "a number beyond doubles": ('{"messages":[{"role":"user","n":1' + "0" * 400 + "}]}", "number"),
    "NaN": ('{"messages":[{"role":"user","n":NaN}]}', "JSON"),
    "a member twice": ('{"messages":[{"role":"user","role":"user"}]}', "JSON"),
    "too deep": (json.dumps({"messages": [nested(65)]}), "levels|itself"),
    "far too deep": ('{"messages":[{"role":"user","n":' + "[" * 100_000 + "]" * 100_000 + "}]}", "JSON|itself"),
    "half a character": ('{"messages":[{"role":"user","content":"\\ud800"}]}', "JSON"),
}


@pytest.mark.parametrize(("meta", "named"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_meta_is_refused_by_the_field(path: Path, meta: str, named: str) -> None:
    m = Minimal()
    m.span["meta"] = meta.encode()
    path.write_bytes(m.build())
    with pytest.raises(FormatError, match=named):
        kvsnap.load(path)
    with pytest.raises(FormatError, match=named):
        kvsnap.inspect(path)


GOOD: dict[str, tuple[str, Any]] = {
    "absent": ("{}", None),
    "null": ('{"messages":null}', None),
    "an empty list": ('{"messages":[]}', ()),
    "more than there is stays": ('{"messages":[{"role":"user"}],"messages_after":1}', None),
    "unknown members": ('{"messages":[{"role":"user","more":{}}],"other":[[1]]}', ({"role": "user", "more": {}},)),
    "after without messages": ('{"messages_after":-5}', None),
    "as deep as it may be": (json.dumps({"messages": [nested(64)]}), (nested(64),)),
}


@pytest.mark.parametrize(("meta", "expected"), GOOD.values(), ids=GOOD.keys())
def test_what_the_spec_allows_is_read(path: Path, meta: str, expected: Any) -> None:
    m = Minimal()
    m.span["meta"] = meta.encode()
    path.write_bytes(m.build())
    assert kvsnap.load(path).messages == expected
    assert by_spec(path) == (None if expected is None else list(expected))


def test_a_span_with_too_many_messages_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(said, "MAX_MESSAGES", 3)
    with Session.open(path) as session:
        with pytest.raises(InputError, match="too many messages"):
            session.append(turn(5, CHAT))
        session.append(turn(5, CHAT[:3]))
    monkeypatch.setattr(said, "MAX_MESSAGES", 2)
    with pytest.raises(FormatError, match="messages"):
        kvsnap.load(path)
    monkeypatch.setattr(said, "MAX_JSON", 40)
    with pytest.raises(FormatError, match="too long"):
        kvsnap.load(path)


@pytest.mark.parametrize("messages", [7, {"role": "user"}, [{"content": "a"}], "user"])
def test_messages_of_safetensors_are_checked_too(path: Path, messages: Any) -> None:
    kvsnap.save(turn(5, ()), path, format="safetensors")
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    about = json.loads(header["__metadata__"]["kvsnap"])
    about["messages"] = messages
    header["__metadata__"]["kvsnap"] = json.dumps(about)
    raw = json.dumps(header).encode()
    write_whole(path, len(raw).to_bytes(8, "little") + raw + data[8 + length :])
    with pytest.raises(FormatError, match="messages"):
        kvsnap.load(path)


# -- many changes at random ------------------------------------------------------------------------------------------

Turns = tuple[tuple[int, Any, bool, Any], ...]
"""Of each turn where it ends, the messages known there, whether it spoke of them, and those known before it."""


def behind(turns: Turns, ids: tuple[int, ...], given: Any) -> Turns:
    before = turns[-1][1] if turns else None
    return (*turns, (len(ids), before if given is None else given, given is not None and given != before, before))


def cut(turns: Turns, n: int) -> Turns:
    kept = tuple(t for t in turns if t[0] <= n)
    if len(kept) < len(turns) and (kept[-1][0] if kept else 0) < n:
        _, _, spoke, before = turns[len(kept)]
        kept = (*kept, (n, None if spoke else before, spoke, before))
    return kept


def some_messages(chance: random.Random, known: Any) -> Any:
    """Nothing, none, the same ones, one more, others."""
    kind, base = chance.randrange(5), list(known or [])
    more = {"role": "user", "content": chance.randrange(9)}
    return (None, [], base, [*base, more], [*base[: chance.randrange(3)], SAY])[kind]


@pytest.mark.parametrize("seed", range(20))
def test_after_any_changes_the_messages_are_those_of_a_list(path: Path, seed: int) -> None:
    chance = random.Random(seed)
    turns: Turns = ()
    ids: tuple[int, ...] = ()
    past: dict[int, tuple[Turns, tuple[int, ...]]] = {}
    with Session.open(path) as session:
        for _ in range(30):
            step = chance.choice(("append", "append", "append", "instead", "cut", "rewind", "compact"))
            if step in ("append", "instead"):
                after = chance.randrange(len(ids) + 1) if step == "instead" else None
                turns, ids = cut(turns, len(ids) if after is None else after), ids[:after]
                given = some_messages(chance, turns[-1][1] if turns else None)
                ids = (*ids, *(chance.randrange(1, 50) for _ in range(chance.randrange(1, 6))))
                made = snapshot(ids, messages=None if given is None else tuple(given))
                session.append(made, after=after)
                turns = behind(turns, ids, given)
            elif step == "cut":
                n = chance.randrange(len(ids) + 1)
                session.truncate(n)
                turns, ids = cut(turns, n), ids[:n]
            elif step == "rewind" and past:
                number = chance.choice(list(past))
                session.rewind(number)
                turns, ids = past[number]
            elif step == "compact":
                session.compact()
                past = {}
            expected = turns[-1][1] if turns else None
            found = session.messages
            assert (None if found is None else list(found)) == expected
            assert session.message_ends == tuple((n, len(known)) for n, known, _, _ in turns if known is not None)
            assert by_spec(path) == expected
            past[session.n_commits] = turns, ids
    check(path, turns[-1][1] if turns else None)

"""Forks and encrypted files that break one rule of docs/spec/file.md, 19 and 20, each, with checksums that fit.

A case is a function that gives the files of one directory: `a` is read, the others lie beside it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

from spec_file import BASE, KEY, SPAN, Minimal, SpecWriter, h128, up

Files = dict[str, bytes]
CASES: dict[str, tuple[Callable[[], Files], str]] = {}
USER_KEY = bytes(range(32))
FORK_ID = bytes(range(100, 116))
_BASE = [
    "parent", "commit", "offset", "digest", "kept", "n_tokens", "n_rows", "history", "depth", "reserved",
]  # fmt: skip


class Forked:
    """A fork of a session with one turn, and a turn of its own. Change a member, then `build`."""

    def __init__(self) -> None:
        self.parent = Minimal(2)
        self.parent.commit["flags"] = 1
        self.header: dict[str, Any] = {"required": 2, "file_id": FORK_ID}
        self.base: dict[str, Any] = {}
        self.base_of_second: dict[str, Any] | None = None
        self.raw_base: bytes | None = None
        self.first: dict[str, Any] = {}
        self.second: dict[str, Any] = {}
        self.span: dict[str, Any] = {}
        self.entry: dict[str, Any] = {}
        self.with_parent = True
        self.without_turn = False

    def build(self) -> Files:
        pw = self.parent.writer()
        at = self.parent.places["commit"]
        ids = self.parent.span["ids"]
        history = h128(bytes(16) + struct.pack(f"<{len(ids)}i", *ids) + struct.pack("<Q", 3))
        base: dict[str, Any] = {
            "parent": bytes(pw.data[40:56]), "commit": 1, "offset": at, "digest": pw.digest_of(at), "kept": 1,
            "n_tokens": 3, "n_rows": 3, "history": history, "depth": 1, "reserved": bytes(36),
        } | self.base  # fmt: skip
        w = SpecWriter(2, salt=99, header=self.header)
        place = w.record(BASE, pack_base(base) if self.raw_base is None else self.raw_base)
        counts = {"n_tokens": base["n_tokens"], "n_rows": base["n_rows"], "token_offset": 3, "digest": base["history"]}
        first = w.commit({"operation": 4, "flags": 1, "base": place} | counts | self.first, [])
        if not self.without_turn:
            self._turn(w, first, place, base)
        files = {"a": bytes(w.data)}
        if self.with_parent:
            files[f"{bytes(pw.data[40:56]).hex()}.kvsnap"] = bytes(pw.data)
        return files

    def _turn(self, w: SpecWriter, first: int, place: int, base: dict[str, Any]) -> None:
        n_tokens, n_rows = base["n_tokens"], base["n_rows"]
        data = {"n_rows": 1, "row_start": n_rows, "data": self.parent.k[:, :1].tobytes()}
        span = w.table(SPAN, {
            "row_start": n_rows, "n_rows": 1, "token_start": n_tokens, "ids": [8], "runs": [(0, 1)],
            "positions": [(3, 1)], "parts": [{"tensor": 0} | data, {"tensor": 1} | data],
        } | self.span, commit=2)  # fmt: skip
        digest = h128(base["history"] + struct.pack("<iQ", 8, 1))
        entry = {
            "span": span, "n_tokens": 1, "row_start": n_rows, "n_rows": 1, "state": 0, "check": w.check_of(span),
            "digest": digest,
        } | self.entry  # fmt: skip
        if self.base_of_second is not None:
            place = w.record(BASE, pack_base(base | self.base_of_second), commit=2)
        w.commit(
            {
                "number": 2, "previous": first, "previous_digest": w.digest_of(first), "operation": 1, "flags": 1,
                "n_tokens": n_tokens + 1, "n_rows": n_rows + 1, "token_offset": 4, "base": place, "digest": digest,
            } | self.second, [entry],
        )  # fmt: skip


def pack_base(base: dict[str, Any]) -> bytes:
    return struct.pack("<16sQQ16sQQQ16sI36s", *(base[name] for name in _BASE))


def fork(expected: str) -> Callable[[Callable[[Forked], Any]], Callable[[Forked], Any]]:
    """Register a change of a fork, and the error class that must come of it; "verify": only verify finds it."""

    def add(change: Callable[[Forked], Any]) -> Callable[[Forked], Any]:
        def make() -> Files:
            f = Forked()
            made = change(f)
            files: Files = f.build() if made is None else made
            return files

        CASES[f"fork_{change.__name__}"] = (make, expected)
        return change

    return add


# -- section 19


@fork("")
def good(f: Forked) -> Any:
    pass


@fork("")
def good_without_a_turn_of_its_own(f: Forked) -> Any:
    f.without_turn = True


def of_base(name: str, expected: str, **fields: Any) -> None:
    def change(f: Forked) -> None:
        f.base |= fields

    change.__name__ = f"base_{name}"
    fork(expected)(change)


of_base("reserved_set", "FormatError", reserved=bytes(35) + b"\1")
of_base("depth_0", "FormatError", depth=0)
of_base("depth_65", "FormatError", depth=65)
of_base("depth_of_a_fork_of_a_fork", "DamagedError", depth=2)
of_base("commit_0", "FormatError", commit=0)
of_base("another_commit", "DamagedError", commit=2)
of_base("offset_unaligned", "FormatError", offset=129)
of_base("offset_of_another_record", "DamagedError", offset=128)
of_base("offset_behind_the_parent", "DamagedError", offset=2**61)
of_base("offset_beyond_63_bits", "DamagedError", offset=2**64 - 64)
of_base("another_digest", "DamagedError", digest=b"\1" * 16)
of_base("keeps_more_entries", "DamagedError", kept=2)
of_base("keeps_2_to_63_entries", "FormatError", kept=2**63)
of_base("keeps_nothing_but_tokens", "FormatError", kept=0)
of_base("keeps_more_rows", "DamagedError", n_rows=4, n_tokens=4)
of_base("keeps_2_to_63_tokens", "FormatError", n_tokens=2**63)
of_base("keeps_another_history", "DamagedError", history=b"\1" * 16)
of_base("cut_with_another_history", "DamagedError", n_tokens=2, n_rows=2)
of_base("parent_that_is_not_there", "MissingError", parent=bytes(16))
of_base("parent_is_the_file_itself", "MissingError", parent=FORK_ID)


@fork("DamagedError")
def base_keeps_more_tokens(f: Forked) -> Any:
    f.base["n_tokens"] = 4
    f.first["n_pending"] = f.second["n_pending"] = 1


@fork("FormatError")
def base_too_short(f: Forked) -> Any:
    f.raw_base = bytes(127)


@fork("FormatError")
def base_too_long(f: Forked) -> Any:
    f.raw_base = bytes(192)


@fork("FormatError")
def base_in_a_file_that_is_no_fork(f: Forked) -> Any:
    f.header["required"] = 0


@fork("FormatError")
def commit_without_base(f: Forked) -> Any:
    f.second["base"] = 0


@fork("verify")
def first_commit_without_base(f: Forked) -> Any:
    f.first["base"] = 0


@fork("verify")
def first_commit_that_forks_nothing(f: Forked) -> Any:
    f.first["operation"] = 1


@fork("verify")
def two_bases_of_two_commits(f: Forked) -> Any:
    f.without_turn = False
    f.base_of_second = {}
    whole = f.build()
    f.base = {"commit": 2}
    other = f.build()
    # The first BASE of `other`, behind it all of `whole`: the last commit is right, the first is of another origin.
    return whole | {"a": spliced(whole["a"], other["a"])}


def spliced(whole: bytes, other: bytes) -> bytes:
    """The file `whole` with the first BASE of `other`, and what depends on the bytes of its commits put right."""
    w = SpecWriter(2, salt=99, header={"required": 2, "file_id": FORK_ID})
    w.record(BASE, other[192:320])
    first = 320
    w.sequence = 1
    w.data += whole[first : first + 320]
    w.sequence = 2
    w.data += whole[len(w.data) :]
    return bytes(w.data)


@fork("MissingError")
def parent_gone(f: Forked) -> Any:
    f.with_parent = False


@fork("DamagedError")
def parent_of_another_id(f: Forked) -> Any:
    files = f.build()
    f.parent.header["file_id"] = b"\7" * 16
    return files | {f"{bytes(range(16)).hex()}.kvsnap": f.parent.build()}


@fork("DamagedError")
def parent_that_was_written_anew(f: Forked) -> Any:
    files = f.build()
    f.parent.commit["time"] = 1
    return files | {f"{bytes(range(16)).hex()}.kvsnap": f.parent.build()}


@fork("FormatError")
def parent_that_is_no_file_of_ours(f: Forked) -> Any:
    return f.build() | {f"{bytes(range(16)).hex()}.kvsnap": b"no snapshot" * 64}


@fork("FormatError")
def entry_that_does_not_follow_what_is_kept(f: Forked) -> Any:
    f.entry["row_start"] = 0


@fork("FormatError")
def span_of_another_token(f: Forked) -> Any:
    f.span["token_start"] = 0


@fork("FormatError")
def counts_without_those_of_the_parent(f: Forked) -> Any:
    f.second |= {"n_tokens": 1, "n_rows": 1}


@fork("FormatError")
def state_of_a_fork_that_adds_nothing(f: Forked) -> Any:
    f.without_turn = True
    f.first["state"] = 128


@fork("VersionError")
def encrypted_fork(f: Forked) -> Any:
    f.header["required"] = 3


# -- section 20


def with_key(
    about: Any = None, *, flags: int = 1, sequence: int = 0, commit: int = 1, use: int = 1, rest: bool = True
) -> Files:
    """A good encrypted file, whose KEY is another one."""
    whole = Minimal(key=USER_KEY).build()
    (length,) = struct.unpack_from("<Q", whole, 144)
    good = json.loads(whole[192 : 192 + length])
    payload = about if isinstance(about, bytes) else json.dumps(good | (about or {})).encode()
    w = SpecWriter(use, header={"required": 1})
    w.sequence = sequence
    w.record(KEY, payload, flags=flags, commit=commit)
    return {"a": bytes(w.data) + (whole[up(192 + length) :] if rest else b"")}


def key(name: str, expected: str, about: Any = None, **options: Any) -> None:
    CASES[f"key_{name}"] = (lambda: with_key(about, **options), expected)


key("good", "")
key("another_cipher", "VersionError", {"cipher": "aes-128-gcm"})
key("cipher_a_number", "FormatError", {"cipher": 7})
key("salt_in_capitals", "FormatError", {"salt": "AB" * 32})
key("salt_too_short", "FormatError", {"salt": "ab" * 31})
key("salt_too_long", "FormatError", {"salt": "ab" * 33})
key("salt_with_a_line_feed", "FormatError", {"salt": "ab" * 32 + "\n"})
key("salt_null", "FormatError", {"salt": None})
key("check_too_short", "FormatError", {"check": "ab" * 15})
key("check_a_list", "FormatError", {"check": ["ab"] * 16})
key("another_check", "KeyNeededError", {"check": "ab" * 16})
key("another_salt", "KeyNeededError", {"salt": "ab" * 32})
key("label_a_number", "FormatError", {"label": 7})
key("of_more_than_65536_bytes", "FormatError", {"label": "x" * 65_536})
key("a_list", "FormatError", b"[]")
key("empty", "FormatError", b"")
key("deeply_nested", "FormatError", b'{"cipher":' * 5000 + b"1" + b"}" * 5000)
key("not_critical", "FormatError", flags=0)
key("of_a_later_sequence", "FormatError", sequence=1)
key("of_another_commit", "FormatError", commit=2)
key("of_a_session", "VersionError", use=2)
key("and_nothing_else", "DamagedError", rest=False)


def _second_key() -> Files:
    m = Minimal(key=USER_KEY)
    m.before = [(KEY, b"{}", {"flags": 1})]
    return {"a": m.build()}


CASES["key_twice"] = (_second_key, "verify")

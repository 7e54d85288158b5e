"""Encrypted snapshots: what is in the file, who can read it, and what happens to one that somebody changed."""

from __future__ import annotations

import base64
import json
import os
import struct
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import kvsnap
import synthetic
from kvsnap import crypto
from kvsnap.errors import (
    DamagedError,
    ExtraMissingError,
    FormatError,
    InputError,
    KeyNeededError,
    KvsnapError,
    MissingError,
    TamperedError,
    UnsupportedError,
    VersionError,
)
from kvsnap.formats import native
from kvsnap.formats.native import sealed
from kvsnap.formats.native.listing import lines
from kvsnap.layout import Snapshot, Tensor, numpy_dtype
from kvsnap.session import Session
from spec_file import COMMIT, IDENTITY, KEY, LAYOUT, NOTE, SPAN, STATE, STRETCH, Minimal, SpecReader, h64, h128, up
from synthetic import DATA, same, snapshot
from test_native import DTYPES, SHAPES, check_against_spec, make
from test_native_hostile import CASES, CHANGES

OURS, OTHER = synthetic.KEY, bytes(range(1, 33))


def wide(tokens: int = 1500) -> Snapshot:
    """A snapshot whose rows take several stretches of a body."""
    return snapshot(range(1, tokens + 1), layers=2, heads=4, dim=64)


@pytest.fixture(scope="module")
def large() -> bytes:
    return kvsnap.dumps(wide(), key=OURS)


# -- round trips ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cipher", crypto.CIPHERS)
@pytest.mark.parametrize("name", SHAPES)
def test_what_comes_back_is_what_was_saved(name: str, cipher: str, tmp_path: Path) -> None:
    made, path = make(name), tmp_path / "a"
    report = made.save(path, key=OURS, cipher=cipher)
    data = path.read_bytes()
    assert report.nbytes == len(data)
    assert path.stat().st_mode & 0o777 == 0o600
    check_against_spec(data, made, OURS)
    for mmap in (True, False):
        loaded = kvsnap.load(path, key=OURS, mmap=mmap)
        assert same(loaded, made) == []
        assert all(not t.array.flags.writeable for t in loaded.tensors())
    assert same(kvsnap.loads(bytearray(data), key=OURS), made) == []
    assert kvsnap.verify(path, key=OURS).ok
    assert kvsnap.verify(path).ok
    assert json.loads(SpecReader(data, key=OURS).record(128, KEY)["payload"])["cipher"] == cipher


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bit_by_bit(dtype: str) -> None:
    made = snapshot(range(6), dtype=dtype)
    bits = np.frombuffer(np.random.default_rng(3).bytes(made.layers[0].tensors[0].nbytes), numpy_dtype(dtype))
    tensors = list(made.layers[0].tensors)
    tensors[0] = Tensor(tensors[0].spec, bits.reshape(tensors[0].shape))
    made = replace(made, layers=(replace(made.layers[0], tensors=tuple(tensors)),))
    data = kvsnap.dumps(made, key=OURS)
    check_against_spec(data, made, OURS)
    assert same(kvsnap.loads(data, key=OURS), made) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_q8_is_the_same_encrypted_or_not(dtype: str) -> None:
    made = snapshot(range(7), dtype=dtype, heads=3, dim=5)
    plain = kvsnap.loads(kvsnap.dumps(made, codec="q8"))
    found = kvsnap.loads(kvsnap.dumps(made, codec="q8", key=OURS), key=OURS)
    assert same(found, plain) == []
    assert found.bound > 0
    assert same(found, made) != []  # the control


@pytest.mark.parametrize("n", [0, 1, 99, 100, 101, 200, 1000])
def test_bodies_of_any_length_fit_their_stretches(n: int) -> None:
    made = snapshot(range(1, n + 2), layers=3, heads=3, dim=1, dtype="int8", vocab=7)
    with mock.patch.object(sealed, "STRETCH", 100):
        data = kvsnap.dumps(made, key=OURS)
        assert same(kvsnap.loads(data, key=OURS), made) == []
    with mock.patch("spec_file.STRETCH", 100):
        check_against_spec(data, made, OURS)
        body = len(SpecReader(data, key=OURS).record(SpecReader(data, key=OURS).entries()[0]["span"])["payload"])
    assert n < 99 or body > 500


def test_a_large_body_has_several_stretches(large: bytes) -> None:
    check_against_spec(large, wide(), OURS)
    record = SpecReader(large, key=OURS).record(SpecReader(large, key=OURS).entries()[0]["span"])
    assert len(record["stored"]) - len(record["payload"]) == 28 + 36 * up(len(record["payload"]), STRETCH) // STRETCH


def test_parts_are_read_alone_in_any_order_and_by_several_threads(large: bytes) -> None:
    loaded, made = kvsnap.loads(large, key=OURS), wide()
    pairs = list(zip(loaded.tensors(), made.tensors(), strict=True))[::-1] * 4

    def read(pair: tuple[Tensor, Tensor]) -> bool:
        out = np.empty(pair[0].shape, pair[0].array.dtype)
        pair[0].read_into(out)
        return out.tobytes() == pair[1].array.tobytes()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, pairs))


def test_we_read_what_a_writer_made_from_the_spec_writes() -> None:
    for cipher in crypto.CIPHERS:
        loaded = kvsnap.loads(Minimal(key=OURS, cipher=cipher).build(), key=OURS)
        assert (loaded.tokens, loaded.architecture, loaded.text) == ((5, 6, 7), "tiny", "abc")
    m = Minimal(key=OURS)
    m.index = {}
    m.before = [(77, b"of a later version", {})]
    assert kvsnap.loads(m.build(), key=OURS).tokens == (5, 6, 7)


def test_the_golden_file_is_read_for_ever() -> None:
    data = (DATA / "tiny_encrypted.kvsnap").read_bytes()
    assert same(kvsnap.loads(data, key=OURS), synthetic.tiny()) == []
    check_against_spec(data, synthetic.tiny(), OURS)
    assert data == synthetic.tiny_encrypted_bytes()


def test_the_size_formula_of_section_20(large: bytes) -> None:
    for made, data in ((wide(), large), (synthetic.tiny(), kvsnap.dumps(synthetic.tiny(), key=OURS))):
        plain, reader = SpecReader(kvsnap.dumps(made)), SpecReader(data, key=OURS)
        about, *rest = reader.records()
        size = 128 + 64 + up(len(about["payload"])) + 64
        for a, b in zip(plain.records(), rest, strict=True):
            body = len(a["payload"]) - a["table"]
            size += 64 + up(len(a["payload"]) + 28 + 36 * (up(body, STRETCH) // STRETCH))
            assert (a["kind"], len(a["payload"])) == (b["kind"], len(b["payload"]))
        assert size == len(data)


def test_convert_encrypts_decrypts_and_changes_keys(tmp_path: Path) -> None:
    a, b, c, d = (tmp_path / n for n in "abcd")
    synthetic.tiny().save(a)
    kvsnap.convert(a, b, out_key=OURS, label="first")
    kvsnap.convert(b, c, key=OURS, out_key=OTHER, cipher="chacha20-poly1305")
    kvsnap.convert(b, b, key=OURS, out_key=OTHER)  # in place
    kvsnap.convert(c, d, key=OTHER)
    assert same(kvsnap.load(d), synthetic.tiny()) == []
    for path in (b, c):
        assert same(kvsnap.load(path, key=OTHER), synthetic.tiny()) == []
        with pytest.raises(KeyNeededError):
            kvsnap.load(path, key=OURS)
    with pytest.raises(InputError, match="a key was given, but safetensors"):
        kvsnap.convert(d, a, format="safetensors", out_key=OURS, allow_loss=True)
    kvsnap.convert(c, tmp_path / "e", format="safetensors", key=OTHER, allow_loss=True)
    with pytest.raises(InputError, match="safetensors files are not encrypted"):
        kvsnap.load(tmp_path / "e", key=OURS)


def test_inspect_tells_cipher_and_label(tmp_path: Path) -> None:
    synthetic.tiny().save(tmp_path / "a", key=OURS, label="work")
    found = kvsnap.inspect(tmp_path / "a", key=OURS)
    assert (found.encryption, found.key_label, found.n_tokens) == ("aes-256-gcm", "work", 6)
    assert found.to_dict()["encryption"] == "aes-256-gcm"
    with pytest.raises(KeyNeededError, match='key "work"') as caught:
        kvsnap.inspect(tmp_path / "a")
    assert caught.value.path == str(tmp_path / "a")


def test_a_label_cannot_write_on_the_terminal(tmp_path: Path) -> None:
    synthetic.tiny().save(tmp_path / "a", key=OURS, label="a\x1b[2J\n\u202eb" + "x" * 500)
    assert kvsnap.inspect(tmp_path / "a", key=OURS).key_label.startswith("a\x1b")
    with pytest.raises(KeyNeededError) as caught:
        kvsnap.load(tmp_path / "a")
    shown = str(caught.value)
    assert 'key "a?[2J??bxxx' in shown
    assert shown.isprintable()
    assert len(shown) < 300


# -- what shows ----------------------------------------------------------------------------------------------


def test_nothing_of_the_content_is_in_clear() -> None:
    made = replace(synthetic.tiny(), text="a text that nobody should read", metadata={"title": "mine alone"})
    plain, data = kvsnap.dumps(made), kvsnap.dumps(made, key=OURS, label="label in clear")
    secrets = [b"a text that nobody", b"title", b"mine alone", b"synthetic", b"layer0.k", b"rope_theta", b"q_proj",
               b"philox", b"weights", b"float32", np.arange(11, 15, dtype="<i4").tobytes()]  # fmt: skip
    secrets += [SpecReader(plain).commit["digest"]]
    for tensor in (*made.tensors(), made.logits):
        assert tensor is not None
        raw = tensor.array.tobytes()
        secrets += [raw[i : i + 8] for i in range(0, len(raw), 8)]
    assert all(secret in plain for secret in secrets)  # the control
    assert [secret for secret in secrets if secret in data] == []
    assert b"label in clear" in data
    assert OURS not in data


def pieces(data: bytes) -> list[tuple[int, int]]:
    """Begin and end of every sealed piece, by the frame alone."""
    found, at = [], 128
    while at < len(data):
        kind = data[at + 4]
        length, table = struct.unpack_from("<Q8xQ", data, at + 16)
        if kind != KEY:
            found.append((at + 64, at + 64 + table))
            place = at + 64 + table
            while place < at + 64 + length:
                stop = min(place + 8 + STRETCH + 28, at + 64 + length)
                found.append((place + 8, stop))
                place = stop
        at = up(at + 64 + length) + (64 if kind == COMMIT else 0)
    return found


def test_two_saves_share_neither_nonce_nor_ciphertext(large: bytes) -> None:
    again = kvsnap.dumps(wide(), key=OURS)
    both = [(data, place) for data in (large, again) for place in pieces(data)]
    assert len(both) > 20
    assert len({data[begin : begin + 12] for data, (begin, _) in both}) == len(both)
    first, second = (kvsnap.dumps(synthetic.tiny(), key=OURS) for _ in range(2))

    def windows(data: bytes) -> set[bytes]:
        return {data[i : i + 8] for begin, end in pieces(data) for i in range(begin, end - 8)}

    assert not windows(first) & windows(second)
    with synthetic.fixed():  # the control: what it would be with random numbers that are not
        assert kvsnap.dumps(synthetic.tiny(), key=OURS) == kvsnap.dumps(synthetic.tiny(), key=OURS)


def test_the_listing_shows_the_frame_only() -> None:
    shown = "\n".join(lines(native.BytesReader(kvsnap.dumps(synthetic.tiny(), key=OURS))))
    assert "KEY" in shown
    assert "synthetic" not in shown


# -- keys ----------------------------------------------------------------------------------------------------


def test_a_missing_or_wrong_key_is_told_as_such(tmp_path: Path) -> None:
    path = tmp_path / "a"
    synthetic.tiny().save(path, key=OURS)
    for key in (None, OTHER, bytes(32)):
        for call in (kvsnap.load, kvsnap.inspect):
            with pytest.raises(KeyNeededError) as caught:
                call(path, key=key)
            assert (caught.value.kind, caught.value.exit_code, caught.value.path) == ("key", 16, str(path))
        with pytest.raises(KeyNeededError):
            kvsnap.loads(path.read_bytes(), key=key)
    with pytest.raises(KeyNeededError):
        kvsnap.verify(path, key=OTHER)


@pytest.mark.parametrize("key", [b"", bytes(16), bytes(31), bytes(33), "0" * 64, 5])
def test_a_key_that_is_not_32_bytes_is_refused_and_not_shown(key: Any, tmp_path: Path) -> None:
    synthetic.tiny().save(tmp_path / "a", key=OURS)
    calls: list[Callable[[], Any]] = [
        lambda: kvsnap.load(tmp_path / "a", key=key),
        lambda: kvsnap.dumps(synthetic.tiny(), key=key),
        lambda: kvsnap.save(synthetic.tiny(), tmp_path / "b", key=key),
    ]
    for call in calls:
        with pytest.raises(InputError) as caught:
            call()
        assert "0000" not in str(caught.value)
    assert repr(OURS) not in repr(native.Lock(OURS))
    assert not (tmp_path / "b").exists()


def test_a_key_to_a_file_that_is_not_encrypted_is_refused(tmp_path: Path) -> None:
    """Else whoever can write there could put a file of his own in place of an encrypted one."""
    plain = tmp_path / "a"
    synthetic.tiny().save(plain)
    for call in (kvsnap.load, kvsnap.inspect, kvsnap.verify):
        with pytest.raises(InputError, match="not encrypted"):
            call(plain, key=OURS)
    with pytest.raises(InputError, match="not encrypted"):
        kvsnap.loads(plain.read_bytes(), key=OURS)


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    made = synthetic.tiny()
    with pytest.raises(InputError, match="no such cipher"):
        kvsnap.dumps(made, key=OURS, cipher="rot13")
    for options in ({"cipher": "aes-256-gcm"}, {"label": "x"}):
        with pytest.raises(InputError, match="needs a key"):
            kvsnap.save(made, tmp_path / "a", **options)
    with pytest.raises(InputError, match="safetensors"):
        kvsnap.save(made, tmp_path / "a", format="safetensors", key=OURS)
    with pytest.raises(InputError, match="label"):
        kvsnap.dumps(made, key=OURS, label="x" * 70_000)
    assert list(tmp_path.iterdir()) == []


def test_sessions_are_not_encrypted_yet(tmp_path: Path) -> None:
    synthetic.tiny().save(tmp_path / "a", key=OURS)
    for readonly in (False, True):
        with pytest.raises(UnsupportedError, match="sessions cannot be encrypted"):
            Session.open(tmp_path / "a", readonly=readonly)
    assert kvsnap.verify(tmp_path / "a", key=OURS).ok
    session = Minimal(use=2, key=OURS).build()
    with pytest.raises(VersionError, match="encrypted session"):
        kvsnap.loads(session, key=OURS)
    (tmp_path / "b").write_bytes(session)
    with pytest.raises(InputError, match="session"):  # nor is one of a later release replaced
        synthetic.tiny().save(tmp_path / "b")


@pytest.mark.parametrize("form", ["raw", "hex", "HEX", "base64", "url", "bare"])
def test_a_key_file_may_be_raw_hex_or_base64(form: str, tmp_path: Path) -> None:
    key = bytes([251, 255, *range(30)])
    text = {
        "raw": key, "hex": key.hex().encode() + b"\n", "HEX": b" " + key.hex().upper().encode(),
        "base64": base64.b64encode(key) + b"\r\n", "url": base64.urlsafe_b64encode(key),
        "bare": base64.b64encode(key).rstrip(b"="),
    }[form]  # fmt: skip
    path = tmp_path / "key"
    path.write_bytes(text)
    assert crypto.read_key(path) == key
    command = [sys.executable, "-c", "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())", str(path)]
    assert crypto.key_from_command(command) == key
    assert crypto.key_from_environment({"KVSNAP_KEY_FILE": str(path)}) == key
    if form != "raw":
        assert crypto.key_from_environment({"KVSNAP_KEY": text.decode()}) == key


@pytest.mark.parametrize(
    "data",
    [b"", b"hunter2\n", b"ab" * 31, b"ab" * 33, bytes(31), bytes(33), b"correct horse battery staple, ok",
     b"0123456789abcdef" * 2, base64.b64encode(bytes(31)), base64.b64encode(b"\xfe" * 48), b"\xff" * 5000],
)  # fmt: skip
def test_what_is_no_key_is_refused_and_not_shown(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(data)
    with pytest.raises(InputError) as caught:
        crypto.read_key(path)
    assert caught.value.path == str(path)
    told = str(caught.value.to_dict()).replace(str(path), "")
    assert not data or data.decode("latin-1").strip()[:6] not in told


def test_where_keys_come_from_is_checked(tmp_path: Path) -> None:
    assert crypto.key_from_environment({}) is None
    with pytest.raises(MissingError):
        crypto.read_key(tmp_path / "none")
    with pytest.raises(InputError, match="directory"):
        crypto.read_key(tmp_path)
    with pytest.raises(InputError, match="both set"):
        crypto.key_from_environment({"KVSNAP_KEY": "a", "KVSNAP_KEY_FILE": "b"})
    with pytest.raises(MissingError):
        crypto.key_from_command("no-such-program-at-all x")
    with pytest.raises(InputError, match="exit code 3"):
        crypto.key_from_command([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(InputError, match="no key"):
        crypto.key_from_command([sys.executable, "-c", "print('nothing')"])
    with pytest.raises(InputError, match="empty"):
        crypto.key_from_command(" ")
    path = tmp_path / "key"
    path.write_bytes(OURS)
    path.chmod(0o600)
    assert not crypto.is_exposed(path)
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        assert crypto.is_exposed(path)
    assert crypto.new_key() != crypto.new_key()


def test_without_the_extra_one_line_says_what_to_install(tmp_path: Path) -> None:
    synthetic.tiny().save(tmp_path / "a", key=OURS)
    synthetic.tiny().save(tmp_path / "b")
    gone = {name: None for name in sys.modules if name.split(".")[0] == "cryptography"} | {"cryptography": None}
    with mock.patch.dict(sys.modules, gone):
        calls: list[Callable[[], Any]] = [
            lambda: kvsnap.load(tmp_path / "a", key=OURS),
            lambda: synthetic.tiny().save(tmp_path / "c", key=OURS),
            crypto.check_installed,
        ]
        for call in calls:
            with pytest.raises(ExtraMissingError, match=r"pip install 'kvsnap\[crypto\]'") as caught:
                call()
            assert caught.value.exit_code == 11
        assert not (tmp_path / "c").exists()
        assert kvsnap.verify(tmp_path / "a").ok  # from outside
        assert same(kvsnap.load(tmp_path / "b"), synthetic.tiny()) == []
        with pytest.raises(KeyNeededError):
            kvsnap.load(tmp_path / "a")


# -- damage --------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_every_flipped_byte_is_damage_not_tampering(tmp_path: Path) -> None:
    """Reading everything finds it, or the byte is padding that is never read, and `verify` finds that."""
    data, good = kvsnap.dumps(synthetic.tiny(), key=OURS, label="x"), synthetic.tiny()
    path = tmp_path / "a"
    outcomes = {"refused": 0, "padding": 0}
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 1 << (at % 8)
        refused = True
        try:
            found = same(kvsnap.loads(bytes(bad), key=OURS), good)
        except TamperedError:
            pytest.fail(f"byte {at} was called tampering")
        except (DamagedError, FormatError):
            outcomes["refused"] += 1
        else:
            assert found == [], at
            assert data[at] == 0, at
            outcomes["padding"] += 1
            refused = False
        if at % 5 == 0 or not refused:
            path.write_bytes(bad)
            assert not verdict(path, None), at
            assert not verdict(path, OURS), at
    assert min(outcomes.values()) > 100, outcomes


def verdict(path: Path, key: bytes | None) -> bool:
    """Whether `verify` finds the file whole; a file that it cannot even start with is not."""
    try:
        return kvsnap.verify(path, key=key).ok
    except (DamagedError, FormatError):
        return False


def test_a_file_cut_off_anywhere_is_an_error(tmp_path: Path) -> None:
    data = kvsnap.dumps(synthetic.tiny(), key=OURS)
    for length in range(0, len(data), 37):
        with pytest.raises((DamagedError, FormatError, InputError)) as caught:
            kvsnap.loads(data[:length], key=OURS)
        assert not isinstance(caught.value, TamperedError)
        (tmp_path / "a").write_bytes(data[:length])
        assert not verdict(tmp_path / "a", None)


def test_damage_in_a_body_is_told_with_and_without_the_key(large: bytes, tmp_path: Path) -> None:
    path, bad = tmp_path / "a", bytearray(large)
    begin, _ = body(large)[-1]  # all of it is of one tensor
    bad[begin + 1000] ^= 4
    path.write_bytes(bad)
    (damage,) = kvsnap.verify(path).damages
    assert (damage.offset, damage.live, damage.tampered) == (begin - 8, True, False)
    closed = kvsnap.verify(path)
    assert (closed.opened, closed.encryption, closed.n_tokens) == (False, "aes-256-gcm", 0)
    assert "without the key" in closed.notes[0]
    opened = kvsnap.verify(path, key=OURS)
    assert opened.opened
    assert not opened.ok
    assert not opened.tampered
    assert {(d.tensor, d.tokens) for d in opened.damages} == {("layer1.v", (0, 1500))}
    loaded = kvsnap.load(path, key=OURS)
    assert loaded.layers[0].tensors[0].array.tobytes() == wide().layers[0].tensors[0].array.tobytes()
    with pytest.raises(DamagedError, match=r"layer1\.v rows \[0, 1500\)") as caught:
        _ = loaded.layers[1].tensors[1].array
    assert not isinstance(caught.value, TamperedError)


# -- somebody who knows the format, but not the key ----------------------------------------------------------


class Forger:
    """Changes an encrypted file and makes every unkeyed checksum fit again."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)
        self.salt = struct.unpack_from("<Q", data, 56)[0]

    def records(self) -> dict[int, int]:
        """Offset of each record, by kind."""
        found, at = {}, 128
        while at < len(self.data):
            found[self.data[at + 4]] = at
            at = self.end(at) + (64 if self.data[at + 4] == COMMIT else 0)
        return found

    def end(self, at: int) -> int:
        return up(at + 64 + struct.unpack_from("<Q", self.data, at + 16)[0])

    def payload(self, kind: int) -> tuple[int, int]:
        at = self.records()[kind]
        return at + 64, at + 64 + int(struct.unpack_from("<Q", self.data, at + 16)[0])

    def sums(self) -> Forger:
        """Mend file header, record headers, pieces, COMMIT digest and footer, in this order."""
        d = self.data
        struct.pack_into("<Q", d, 120, h64(bytes(d[:120])))
        self.salt = struct.unpack_from("<Q", d, 56)[0]
        for begin, end in pieces(bytes(d)):
            if d[begin - 64 : begin - 60] != b"KVR1":
                struct.pack_into("<Q", d, begin - 8, h64(bytes(d[begin:end]), self.salt + begin - 8))
        for at in self.records().values():
            table = struct.unpack_from("<Q", d, at + 32)[0]
            struct.pack_into("<Q", d, at + 40, h64(bytes(d[at + 64 : at + 64 + table])))
            struct.pack_into("<Q", d, at + 56, h64(bytes(d[at : at + 56]), self.salt + at))
        at = self.records()[COMMIT]
        foot = self.end(at)
        d[foot + 32 : foot + 48] = h128(bytes(d[at : at + 64 + struct.unpack_from("<Q", d, at + 16)[0]]))
        struct.pack_into("<Q", d, foot + 56, h64(bytes(d[foot : foot + 56]), self.salt + foot))
        return self

    def key_info(self, **changes: Any) -> Forger:
        """Change members of KEY; the payload keeps its length (blanks are added, or room taken from the padding)."""
        at = self.records()[KEY]
        length = struct.unpack_from("<Q", self.data, at + 16)[0]
        text = json.dumps(json.loads(self.data[at + 64 : at + 64 + length]) | changes, separators=(",", ":")).encode()
        assert up(len(text)) == up(length)
        self.data[at + 64 : self.end(at)] = text.ljust(up(length), b"\0")
        struct.pack_into("<Q", self.data, at + 16, len(text))
        struct.pack_into("<Q", self.data, at + 32, len(text))
        return self.sums()


def test_the_forger_forges_well(large: bytes) -> None:
    assert Forger(large).sums().data == large
    bad = Forger(large)
    bad.data[pieces(large)[3][0] + 50] ^= 1
    assert bad.sums().data != large


def read_all(data: bytes, key: bytes = OURS) -> None:
    loaded = kvsnap.loads(bytes(data), key=key)
    for tensor in (*loaded.tensors(), loaded.logits):
        if tensor is not None:
            _ = tensor.array


def swapped_pieces(large: bytes) -> Forger:
    f, (_, (a, b), (c, d)) = Forger(large), body(large)[:3]
    assert b - a == d - c
    f.data[a:b], f.data[c:d] = f.data[c:d], f.data[a:b]
    return f.sums()


def body(data: bytes) -> list[tuple[int, int]]:
    """The pieces of the SPAN's body."""
    begin, end = Forger(data).payload(SPAN)
    return [p for p in pieces(data) if begin < p[0] < end]


def piece_of_another_save(large: bytes) -> Forger:
    f, other = Forger(large), kvsnap.dumps(wide(), key=OURS)
    begin, end = body(large)[1]
    assert (begin, end) == body(other)[1]
    f.data[begin:end] = other[begin:end]
    return f.sums()


def record_of_another_save(kind: int) -> Callable[[bytes], Forger]:
    def forge(large: bytes) -> Forger:
        f, other = Forger(large), kvsnap.dumps(wide(), key=OURS)
        begin, end = f.payload(kind)
        f.data[begin:end] = other[begin:end]
        return f.sums()

    return forge


def changed_byte(kind: int) -> Callable[[bytes], Forger]:
    def forge(large: bytes) -> Forger:
        f = Forger(large)
        f.data[f.payload(kind)[0] + 20] ^= 1
        return f.sums()

    return forge


def changed_body_byte(large: bytes) -> Forger:
    f = Forger(large)
    f.data[body(large)[2][0] + 77] ^= 1
    return f.sums()


def body_cut_short(large: bytes) -> Forger:
    """The last stretch is dropped, and nothing else moves."""
    f = Forger(large)
    at, last = f.records()[SPAN], body(large)[-1]
    struct.pack_into("<Q", f.data, at + 16, last[0] - 8 - at - 64)
    struct.pack_into("<Q", f.data, at + 56, h64(bytes(f.data[at : at + 56]), f.salt + at))
    return f


def header_field(offset: int, value: bytes) -> Callable[[bytes], Forger]:
    def forge(large: bytes) -> Forger:
        f = Forger(large)
        f.data[offset : offset + len(value)] = value
        return f.sums()

    return forge


def record_field(kind: int, offset: int, value: bytes) -> Callable[[bytes], Forger]:
    def forge(large: bytes) -> Forger:
        f = Forger(large)
        at = f.records()[kind] + offset
        assert f.data[at : at + len(value)] != value
        f.data[at : at + len(value)] = value
        return f.sums()

    return forge


def key_of_another_save(large: bytes) -> Forger:
    other = Forger(kvsnap.dumps(wide(), key=OURS))
    begin, end = other.payload(KEY)
    return Forger(large).key_info(**json.loads(other.data[begin:end]))


U64 = struct.Struct("<Q").pack
TAMPERED: dict[str, Callable[[bytes], Forger]] = {
    "two pieces swapped": swapped_pieces,
    "a piece of another save": piece_of_another_save,
    "IDENTITY of another save": record_of_another_save(IDENTITY),
    "SPAN of another save": record_of_another_save(SPAN),
    "STATE of another save": record_of_another_save(STATE),
    "COMMIT of another save": record_of_another_save(COMMIT),
    "a bit of IDENTITY": changed_byte(IDENTITY),
    "a bit of LAYOUT": changed_byte(LAYOUT),
    "a bit of the table of SPAN": changed_byte(SPAN),
    "a bit of STATE": changed_byte(STATE),
    "a bit of COMMIT": changed_byte(COMMIT),
    "a bit of a body": changed_body_byte,
    "a body cut short": body_cut_short,
    "time of creation": header_field(64, U64(5)),
    "minor version": header_field(10, b"\1"),
    "an optional feature": header_field(24, U64(1)),
    "salt of the file": header_field(56, U64(5)),
    "sequence of SPAN": record_field(SPAN, 8, U64(9)),
    "commit number of STATE": record_field(STATE, 24, U64(9)),
    "LAYOUT critical": record_field(LAYOUT, 5, b"\1"),
    "label": lambda large: Forger(large).key_info(label="y"),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_what_was_tampered_with_is_refused(name: str, large: bytes, tmp_path: Path) -> None:
    bad = TAMPERED[name](large).data
    assert bad != large
    with pytest.raises(TamperedError) as caught:
        read_all(bad)
    assert (caught.value.kind, caught.value.exit_code) == ("tampered", 17)
    assert caught.value.offset is not None
    (tmp_path / "a").write_bytes(bad)
    try:
        report = kvsnap.verify(tmp_path / "a", key=OURS)
    except TamperedError:  # of COMMIT: there is nothing to start from
        assert "COMMIT" in name or caught.value.offset == Forger(large).records()[COMMIT] + 64
    else:
        assert report.tampered
        assert not report.ok
    if name != "a body cut short":  # where a gap is left in the frame
        assert kvsnap.verify(tmp_path / "a").ok  # all unkeyed checksums fit: that is what the key is for


OTHER_ERRORS: dict[str, tuple[Callable[[bytes], Forger], type[KvsnapError]]] = {
    "file id": (header_field(40, bytes(16)), KeyNeededError),
    "check": (lambda large: Forger(large).key_info(check="0" * 32), KeyNeededError),
    "salt of KEY": (lambda large: Forger(large).key_info(salt="0" * 64), KeyNeededError),
    "KEY of another save": (key_of_another_save, KeyNeededError),
    "cipher": (lambda large: Forger(large).key_info(cipher="chacha20-poly1305"), KeyNeededError),
    "unknown cipher": (lambda large: Forger(large).key_info(cipher="rot13"), VersionError),
    "salt too short": (lambda large: Forger(large).key_info(salt="0" * 62), FormatError),
    "check in capitals": (lambda large: Forger(large).key_info(check="A" * 32), FormatError),
    "label no text": (lambda large: Forger(large).key_info(label=5), FormatError),
    "no longer encrypted": (header_field(16, U64(0)), InputError),
    "a session": (header_field(32, b"\2"), VersionError),
    "KEY not critical": (record_field(KEY, 5, b"\0"), FormatError),
    "KEY of another kind": (record_field(KEY, 4, b"\5"), DamagedError),
    "sequence of KEY": (record_field(KEY, 8, U64(9)), FormatError),
    "commit number of KEY": (record_field(KEY, 24, U64(9)), FormatError),
    "table length of IDENTITY": (record_field(IDENTITY, 32, U64(20)), FormatError),
}


@pytest.mark.parametrize("name", OTHER_ERRORS)
def test_what_was_changed_otherwise_is_refused(name: str, large: bytes) -> None:
    forge, error = OTHER_ERRORS[name]
    with pytest.raises(error):
        read_all(forge(large).data)


def test_lengths_that_no_sealed_record_has_are_refused(large: bytes) -> None:
    at, last = Forger(large).records()[SPAN], body(large)[-1]
    for left in (1, 8, 35, 36):  # a last stretch that holds nothing
        f = Forger(large)
        struct.pack_into("<Q", f.data, at + 16, last[0] - 8 + left - at - 64)
        struct.pack_into("<Q", f.data, at + 56, h64(bytes(f.data[at : at + 56]), f.salt + at))
        with pytest.raises(FormatError, match="not those of a sealed record"):
            read_all(f.data)


def test_a_file_whose_encryption_was_denied_gives_nothing(large: bytes, tmp_path: Path) -> None:
    """Without a key it is not taken for a plain one either."""
    bad = header_field(16, U64(0))(large).data
    with pytest.raises(FormatError):
        kvsnap.loads(bytes(bad))
    with pytest.raises(KvsnapError):
        kvsnap.loads(kvsnap.dumps(synthetic.tiny(), key=OURS)[:1000], key=OURS)


def test_a_plain_file_has_no_key_record(tmp_path: Path) -> None:
    m = Minimal()
    m.before = [(KEY, b"{}", {"flags": 1})]
    (tmp_path / "a").write_bytes(m.build())
    report = kvsnap.verify(tmp_path / "a")
    assert "KEY stands where none may be" in str([*report.damages])
    m = Minimal(key=OURS)
    m.before = [(NOTE, b'{"metadata":{}}', {}), (KEY, b"{}", {"flags": 1})]
    (tmp_path / "a").write_bytes(m.build())
    for key in (OURS, None):
        assert "KEY stands where none may be" in str([*kvsnap.verify(tmp_path / "a", key=key).damages])


@pytest.mark.parametrize("name", CHANGES)
def test_the_owner_of_the_key_is_not_trusted_either(name: str, tmp_path: Path) -> None:
    """What a writer did wrong before it sealed the bytes is refused as in a plain file, and is no tampering."""
    m = Minimal(key=OURS)
    if CHANGES[name](m) is not None:
        return  # a file that is not made from the one at hand
    (tmp_path / "a").write_bytes(m.build())
    expected = CASES[name][1]
    error: KvsnapError | None = None
    try:
        read_all((tmp_path / "a").read_bytes())
        report = kvsnap.verify(tmp_path / "a", key=OURS)
        assert not report.tampered
    except KvsnapError as caught:
        error = caught
    bases = [c.__name__ for c in type(error).__mro__] if error else []
    assert bool(expected) == (error is not None or not report.ok), bases
    assert not isinstance(error, TamperedError)
    if error is not None:
        assert expected in bases, error


def test_padding_inside_a_body_is_checked_by_verify(tmp_path: Path) -> None:
    for padding, ok in ((b"\0", True), (b"\1", False)):
        m = Minimal(key=OURS)
        m.span["part_padding"] = padding  # sealed, so only the owner of the key can have written it
        (tmp_path / "a").write_bytes(m.build())
        report = kvsnap.verify(tmp_path / "a", key=OURS)
        assert (report.ok, "padding is not zero" in str(report.damages)) == (ok, not ok)
        assert not report.tampered


# -- negative controls: what the bindings are for ------------------------------------------------------------


def loose(**fixed: Any) -> Any:
    """Encryption whose associated data leaves something out."""
    real = sealed.Seal.data

    def data(self: sealed.Seal, record: Any, offset: int, piece: int) -> bytes:
        seal = replace(self, context=bytes(32)) if "context" in fixed else self
        return real(seal, replace(record, **{k: v for k, v in fixed.items() if k in {"sequence", "commit"}}),
                    fixed.get("offset", offset), fixed.get("piece", piece))  # fmt: skip

    return mock.patch.object(sealed.Seal, "data", data)


def test_without_the_context_a_changed_header_would_pass() -> None:
    for name in ("time of creation", "minor version", "label"):
        with loose(context=0):
            read_all(TAMPERED[name](kvsnap.dumps(wide(10), key=OURS)).data)
        with pytest.raises(TamperedError):
            read_all(TAMPERED[name](kvsnap.dumps(wide(10), key=OURS)).data)


def test_without_its_commit_number_a_changed_record_would_pass() -> None:
    with loose(commit=0):
        read_all(TAMPERED["commit number of STATE"](kvsnap.dumps(wide(10), key=OURS)).data)


def test_without_their_numbers_swapped_pieces_would_not_be_tampering() -> None:
    with loose(piece=1):
        bad = swapped_pieces(kvsnap.dumps(wide(), key=OURS)).data
        with pytest.raises(DamagedError) as caught:
            read_all(bad)  # only the unkeyed checksum of a part, which is sealed, is left
        assert not isinstance(caught.value, TamperedError)


def test_one_subkey_for_all_files_would_let_pieces_move_between_them() -> None:
    real = crypto.box_of

    def same_for_all(key: bytes, **options: Any) -> Any:
        return real(key, **options | {"salt": bytes(32), "file_id": bytes(16)})

    with mock.patch.object(crypto, "box_of", same_for_all), loose(context=0):
        read_all(record_of_another_save(IDENTITY)(kvsnap.dumps(wide(1500), key=OURS)).data)


def test_nonces_are_drawn_by_the_operating_system() -> None:
    drawn: list[int] = []
    real = os.urandom

    def urandom(n: int) -> bytes:
        drawn.append(n)
        return real(n)

    with mock.patch.object(os, "urandom", urandom):
        data = kvsnap.dumps(synthetic.tiny(), key=OURS)
    assert drawn.count(12) == len(pieces(data))
    assert drawn.count(32) == 1


@pytest.mark.parametrize("name", ["a\0b", "half \ud800"])
def test_a_key_file_of_an_impossible_name_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="not a path"):
        crypto.read_key(name)

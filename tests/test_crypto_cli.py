"""Keys on the command line: where they come from, what is encrypted, and what every command says of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import kvsnap
from kvsnap import crypto
from kvsnap.session import Session
from synthetic import same, snapshot
from test_cli import Call, digest, kv  # noqa: F401 # a fixture
from test_crypto import OTHER, OURS, Forger, changed_byte

TEXT = "a text that nobody should read"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with an encrypted file, a plain one, a session, and the keys `ours` and `other`."""
    monkeypatch.chdir(tmp_path)
    for name in (crypto.ENVIRONMENT, crypto.ENVIRONMENT_FILE):
        monkeypatch.delenv(name, raising=False)
    for name, key in (("ours", OURS), ("other", OTHER)):
        Path(name).write_text(key.hex() + "\n")
        Path(name).chmod(0o600)
    made = snapshot((11, 12, 13, 14), layers=2, n_prompt=3, text=TEXT, metadata={"title": "mine"})
    made.save("locked.kvsnap", key=OURS, label="work")
    made.save("plain.kvsnap")
    with Session.open("session.kvsnap") as session:
        session.append(made)
    return tmp_path


def is_plain(path: str) -> bool:
    return TEXT.encode() in Path(path).read_bytes()


READING: list[list[str]] = [
    ["info", "locked.kvsnap"],
    ["cat", "locked.kvsnap"],
    ["head", "locked.kvsnap", "0", "0"],
    ["truncate", "locked.kvsnap", "2", "-o", "new.kvsnap"],
    ["convert", "locked.kvsnap", "new.kvsnap"],
]


@pytest.mark.parametrize("args", READING, ids=lambda args: args[0])
def test_each_way_to_give_a_key_reads(kv: Call, args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    refused = kv(*args, "--json")
    assert refused.code == refused.data["error"]["exit_code"] == 16
    assert refused.data["error"]["kind"] == "key"
    assert 'key "work"' in refused.data["error"]["message"]
    assert not Path("new.kvsnap").exists()
    assert kv(*args, "--key-file", "other").code == 16
    shows = f"{sys.executable} -c \"print(open('ours').read())\""
    for given in (["--key-file", "ours"], ["--key-command", shows]):
        assert kv(*args, *given).code == 0
        Path("new.kvsnap").unlink(missing_ok=True)
    for name, value in ((crypto.ENVIRONMENT, OURS.hex()), (crypto.ENVIRONMENT_FILE, "ours")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert kv(*args).code == 0
            Path("new.kvsnap").unlink(missing_ok=True)
    monkeypatch.setenv(crypto.ENVIRONMENT_FILE, "gone")
    assert kv(*args, "--key-file", "ours").code == 0  # what is named comes before the environment
    plain = [a.replace("locked", "plain") for a in args]
    Path("new.kvsnap").unlink(missing_ok=True)
    refused = kv(*plain, "--key-file", "ours")
    assert refused.code == 2
    assert "not encrypted" in refused.err
    assert kv(*plain).code == 0  # the key of the environment is an offer: a file that is not there is not looked for


def test_nothing_that_is_printed_shows_a_key(kv: Call) -> None:  # noqa: F811
    Path("bad").write_text("5" + OURS.hex())
    for args in (["info", "locked.kvsnap", "--key-file", "bad"], ["info", "locked.kvsnap", "--key-file", "ours"],
                 ["info", "locked.kvsnap", "--key-command", "cat bad"], ["keygen", "new"]):  # fmt: skip
        for more in ([], ["--json"]):
            done = kv(*args, *more)
            shown = done.out + done.err
            assert OURS.hex()[:16] not in shown
            if Path("new").exists():
                assert Path("new").read_text()[:16] not in shown
                Path("new").unlink()


def test_what_is_written_is_encrypted_with_encrypt_only(kv: Call) -> None:  # noqa: F811
    key = ("--key-file", "ours")
    cases: list[tuple[list[str], bool]] = [
        (["convert", "plain.kvsnap", "new.kvsnap", "--encrypt", *key], False),
        (["convert", "locked.kvsnap", "new.kvsnap", "--encrypt", *key], False),
        (["convert", "locked.kvsnap", "new.kvsnap", *key], True),
        (["convert", "plain.kvsnap", "new.kvsnap"], True),
        (["truncate", "locked.kvsnap", "4", "-o", "new.kvsnap", "--encrypt", *key], False),
        (["truncate", "plain.kvsnap", "4", "-o", "new.kvsnap", "--encrypt", *key], False),
        (["truncate", "session.kvsnap", "4", "-o", "new.kvsnap", "--encrypt", *key], False),
        (["truncate", "locked.kvsnap", "4", "-o", "new.kvsnap", *key], True),
    ]
    for args, plain in cases:
        done = kv(*args)
        assert done.code == 0, done.err
        assert is_plain("new.kvsnap") == plain, args
        assert ("will not be (--encrypt)" in done.err) == (plain and "locked.kvsnap" in args)
        found = kvsnap.load("new.kvsnap", key=None if plain else OURS)
        assert same(found, kvsnap.load("plain.kvsnap")) == []
        Path("new.kvsnap").unlink()


def test_convert_changes_the_key_cipher_and_label(kv: Call) -> None:  # noqa: F811
    done = kv("convert", "locked.kvsnap", "new.kvsnap", "--key-file", "ours", "--encrypt", "--new-key-file", "other",
              "--cipher", "chacha20-poly1305", "--key-label", "new one")  # fmt: skip
    assert done.code == 0
    shown = kv("info", "new.kvsnap", "--key-file", "other")
    assert 'chacha20-poly1305, key "new one"' in shown.out
    assert kv("info", "new.kvsnap", "--key-file", "other", "--json").data["key_label"] == "new one"
    assert kv("info", "new.kvsnap", "--key-file", "ours").code == 16
    # With a key for each side, the one of SOURCE is demanded of it.
    args = ["convert", "plain.kvsnap", "more.kvsnap", "--key-file", "ours", "--encrypt", "--new-key-file", "other"]
    refused = kv(*args)
    assert (refused.code, "not encrypted" in refused.err) == (2, True)
    assert not Path("more.kvsnap").exists()


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["convert", "plain.kvsnap", "new", "--encrypt"], 2, "--encrypt needs a key"),
        (["convert", "plain.kvsnap", "new", "--encrypt", "--key-file", "gone"], 3, "no such key file"),
        (["convert", "plain.kvsnap", "new", "--encrypt", "--key-file", "plain.kvsnap"], 2, "is no key"),
        (["convert", "plain.kvsnap", "new", "--encrypt", "--key-file", "ours", "--key-command", "x"], 2, "exclude"),
        (["convert", "plain.kvsnap", "new", "--new-key-file", "ours"], 2, "without --encrypt"),
        (["convert", "plain.kvsnap", "new", "--cipher", "aes-256-gcm"], 2, "without --encrypt"),
        (["convert", "plain.kvsnap", "new", "--key-label", "x"], 2, "without --encrypt"),
        (["convert", "plain.kvsnap", "new", "--encrypt", "--key-file", "ours", "--format", "safetensors"], 2,
         "safetensors files are not encrypted"),
        (["convert", "plain.kvsnap", "new", "--encrypt", "--key-command", "no-such-program"], 3, "no such program"),
        (["truncate", "plain.kvsnap", "2", "--encrypt", "--key-file", "ours"], 2, "--encrypt needs -o"),
        (["truncate", "session.kvsnap", "2", "--key-file", "ours"], 2, "sessions are not encrypted"),
        (["truncate", "locked.kvsnap", "2"], 2, "-o NEW"),
        (["reset", "locked.kvsnap"], 2, "a sealed snapshot is never changed"),
        (["log", "locked.kvsnap"], 12, "sessions cannot be encrypted yet"),
        (["fork", "locked.kvsnap", "new.kvsnap"], 12, "sessions cannot be encrypted yet"),
        (["compact", "locked.kvsnap"], 12, "sessions cannot be encrypted yet"),
        (["rewind", "locked.kvsnap", "1"], 2, "a sealed snapshot is never changed"),
        (["generate", "x", "--save", "new", "--encrypt"], 2, "--encrypt needs a key"),
        (["generate", "x", "--encrypt", "--key-file", "ours"], 2, "--encrypt needs --save"),
        (["generate", "x", "--save", "new", "--key-file", "ours"], 2, "without --encrypt"),
        (["generate", "x", "--session", "new", "--encrypt", "--key-file", "ours"], 12, "sessions cannot be encrypted"),
        (["generate", "x", "--session", "locked.kvsnap"], 2, "a sealed snapshot takes no further turn"),
        (["resume", "locked.kvsnap", "--append"], 2, "a sealed snapshot takes no further turn"),
        (["resume", "session.kvsnap", "--append", "--key-file", "ours"], 2, "sessions are not encrypted"),
        (["resume", "session.kvsnap", "--append", "--encrypt", "--key-file", "ours"], 12, "cannot be encrypted"),
        (["resume", "locked.kvsnap"], 16, "its key is needed"),
        (["resume", "locked.kvsnap", "--key-file", "other"], 16, "not the key"),
        (["check", "locked.kvsnap"], 16, "its key is needed"),
        (["sweep", "locked.kvsnap", "--sampler", "greedy"], 16, "its key is needed"),
        (["keygen", "ours"], 2, "a file of this name"),
        (["keygen", "gone/x"], 3, "no such directory"),
    ],
)  # fmt: skip
def test_what_is_asked_wrongly_is_refused_before_the_work(
    kv: Call, place: Path, args: list[str], code: int, says: str, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    def loaded(*_: object) -> None:
        raise AssertionError("a model was loaded")

    for module in ("_run", "_model"):
        monkeypatch.setattr(f"kvsnap.cli.{module}.open_engine", loaded)
    before = {p.name: digest(p) for p in place.iterdir()}
    done = kv(*args)
    assert (done.code, done.out) == (code, "")
    assert says in done.err
    assert kv(*args, "--json").data["error"]["exit_code"] == code
    assert {p.name: digest(p) for p in place.iterdir()} == before


def test_without_the_extra_a_model_is_not_even_loaded(kv: Call, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    for name in [n for n in sys.modules if n.split(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    done = kv("generate", "x", "--save", "new", "--encrypt", "--key-file", "ours")
    assert (done.code, done.err) == (11, "kvsnap: encryption needs an extra: pip install 'kvsnap[crypto]'\n")


def test_verify_tells_whole_damaged_and_tampered_apart(kv: Call) -> None:  # noqa: F811
    key = ("--key-file", "ours")
    data = Path("locked.kvsnap").read_bytes()
    assert kv("verify", "locked.kvsnap", *key).out.startswith("locked.kvsnap: whole, ")
    outside = kv("verify", "locked.kvsnap", "plain.kvsnap")
    assert outside.code == 0
    assert "locked.kvsnap: whole from outside" in outside.out
    assert "tampering" in outside.out
    bad = bytearray(data)
    bad[Forger(data).payload(2)[0] + 20] ^= 1
    Path("damaged.kvsnap").write_bytes(bad)
    Path("tampered.kvsnap").write_bytes(changed_byte(2)(data).data)
    for name, without, inside in (("damaged", 6, 6), ("tampered", 0, 17)):
        assert kv("verify", f"{name}.kvsnap").code == without
        done = kv("verify", f"{name}.kvsnap", *key)
        assert done.code == inside
        assert done.out.startswith(f"{name}.kvsnap: {name.upper()}")
        told = kv("verify", f"{name}.kvsnap", *key, "--json").data["files"][0]
        assert (told["ok"], told["tampered"], told["encryption"]) == (False, name == "tampered", "aes-256-gcm")
    assert kv("info", "tampered.kvsnap", *key).code == 17
    assert kv("verify", "locked.kvsnap", "--key-file", "other").code == 16


def test_keygen_writes_a_key_for_its_owner_alone(kv: Call) -> None:  # noqa: F811
    assert kv("keygen", "a").code == 0
    assert kv("keygen", "b", "--json").data == {"path": "b", "bits": 256}
    assert crypto.read_key("a") != crypto.read_key("b")
    assert Path("a").stat().st_mode & 0o777 == 0o600
    done = kv("convert", "plain.kvsnap", "new.kvsnap", "--encrypt", "--key-file", "a")
    assert (done.code, done.err) == (0, "")
    for mode, warned in ((0o644, True), (0o600, False)):
        Path("a").chmod(mode)
        assert ("others can read" in kv("info", "new.kvsnap", "--key-file", "a").err) == warned


@pytest.fixture
def model(place: Path) -> str:
    pytest.importorskip("torch")
    from tiny_models import save_tiny

    return str(save_tiny(place / "model"))


@pytest.mark.engine
def test_generate_and_resume_go_on_from_an_encrypted_file(kv: Call, model: str) -> None:  # noqa: F811
    def js(*args: object) -> Any:
        done = kv(*args, "--model", model, "--json")
        assert done.code == 0, done.err
        return json.loads(done.out)

    key = ("--key-file", "ours")
    whole = js("generate", "hello there", "--max-tokens", 12)
    first = js("generate", "hello there", "--max-tokens", 5, "--save", "x.kvsnap", "--encrypt", *key)
    assert b"hello" not in Path("x.kvsnap").read_bytes()
    rest = js("resume", "x.kvsnap", "--max-tokens", 7, "--save", "y.kvsnap", "--encrypt", *key)
    assert first["tokens"] + rest["tokens"] == whole["tokens"]
    assert rest["restored"]["exact"]
    assert b"hello" not in Path("y.kvsnap").read_bytes()
    assert js("check", "x.kvsnap", *key)["ok"]
    assert (
        js("sweep", "x.kvsnap", "--sampler", "greedy", "--max-tokens", 7, *key)["continuations"][0]["tokens"]
        == (rest["tokens"])
    )
    assert kv("resume", "x.kvsnap", "--model", model, "--max-tokens", 1, "--save", "z.kvsnap", *key).code == 0
    assert b"hello" in Path("z.kvsnap").read_bytes()  # the control: without --encrypt

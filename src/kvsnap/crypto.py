"""Keys, and the cipher of one encrypted file: docs/spec/file.md section 20. Needs the extra `kvsnap[crypto]`.

A key is 32 random bytes. It comes from a file, a command or the environment, never from a command line, and no message
shows any of it. Nothing here knows records; `kvsnap.formats.native.sealed` does.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
import re
import shlex
import stat
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from kvsnap.errors import ExtraMissingError, InputError, KeyNeededError, MissingError, StorageError, TamperedError

__all__ = [
    "CIPHERS",
    "KEY_SIZE",
    "Box",
    "box_of",
    "check_fits",
    "check_installed",
    "check_key",
    "check_usable",
    "is_exposed",
    "key_from_command",
    "key_from_environment",
    "new_key",
    "parse_key",
    "read_key",
]

CIPHERS = ("aes-256-gcm", "chacha20-poly1305")
"""Names of the ciphers, the default first."""
KEY_SIZE, NONCE_SIZE, TAG_SIZE, CHECK_SIZE, SALT_SIZE = 32, 12, 16, 16, 32
OVERHEAD = NONCE_SIZE + TAG_SIZE
"""Bytes that sealing adds."""
ENVIRONMENT, ENVIRONMENT_FILE = "KVSNAP_KEY", "KVSNAP_KEY_FILE"

_INFO = b"kvsnap-file-key-1:"
_MOST = 4096
_EXPECTED = "32 raw bytes, 64 hex digits, or base64 of 32 bytes"


# -- keys --------------------------------------------------------------------------------------------------


def new_key() -> bytes:
    """Return 32 random bytes from the operating system."""
    return os.urandom(KEY_SIZE)


def check_key(key: Any) -> bytes:
    """Return the key as bytes. Raise `InputError` for anything but 32 bytes; the message does not show it."""
    if not isinstance(key, (bytes, bytearray, memoryview)):
        raise InputError("a key is 32 bytes (kvsnap.crypto.read_key reads a file)", found=type(key).__name__)
    raw = bytes(key)
    if len(raw) != KEY_SIZE:
        raise InputError("a key of another length", expected="32 bytes", found=f"{len(raw)} bytes")
    return raw


def check_usable(key: Any, cipher: str | None) -> bytes:
    """Return the key as bytes. Raise `InputError` as `check_key` does, and for a cipher that there is not."""
    if cipher is not None and cipher not in CIPHERS:
        raise InputError("no such cipher", expected=", ".join(CIPHERS), found=cipher)
    return check_key(key)


def parse_key(data: bytes, *, source: str = "the key", raw: bool = True) -> bytes:
    """Return the key in `data`: 32 raw bytes (unless `raw` is false), 64 hex digits, or base64 of 32 bytes.

    White space around hex and base64 is left out. Raise `InputError` naming the length that was found, never the
    content. 32 printable characters are refused too: that is a password, or a key of half the length in hex.
    """
    text = data.strip(b" \t\r\n")
    if re.fullmatch(rb"[0-9a-fA-F]{64}", text):
        return bytes.fromhex(text.decode())
    if len(data) == KEY_SIZE and raw:
        if all(32 <= byte < 127 for byte in data):
            raise InputError(f"{source} is text, not random bytes", expected=_EXPECTED, found="32 characters")
        return data
    if re.fullmatch(rb"[A-Za-z0-9+/_-]{43}=?", text):
        try:
            return base64.b64decode(text.rstrip(b"=").replace(b"-", b"+").replace(b"_", b"/") + b"=", validate=True)
        except binascii.Error:  # pragma: no cover # 43 characters of the alphabet always decode
            pass
    raise InputError(f"{source} is no key", expected=_EXPECTED, found=f"{len(data)} bytes that are none of these")


def read_key(path: str | os.PathLike[str]) -> bytes:
    """Return the key in a file (see `parse_key`). Raise `MissingError`, `InputError` or `StorageError`."""
    name = os.fspath(path)
    try:
        os.fsencode(name)
        if "\0" in name:
            raise ValueError("a NUL")
    except ValueError as error:  # half of a surrogate pair is one, too
        raise InputError("not a path", found=repr(name)) from error
    try:
        with open(name, "rb") as file:
            data = file.read(_MOST + 1)
    except FileNotFoundError:
        raise MissingError("no such key file", path=name) from None
    except IsADirectoryError:
        raise InputError("a key file is needed, this is a directory", path=name) from None
    except OSError as error:
        raise StorageError(f"the key file cannot be read: {error.strerror}", errno=error.errno, path=name) from error
    try:
        return parse_key(data, source="the key file")
    except InputError as error:
        error.path = name
        raise


def is_exposed(path: str | os.PathLike[str]) -> bool:
    """Tell whether others than the owner may read or write this key file."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return os.name == "posix" and stat.S_ISREG(mode) and bool(mode & 0o077)


def key_from_environment(environment: Mapping[str, str] | None = None) -> bytes | None:
    """Return the key that `KVSNAP_KEY` (hex or base64) holds or `KVSNAP_KEY_FILE` names; None when neither is set.

    Raise `InputError` when both are set or the key is none, and as `read_key` does.
    """
    known = os.environ if environment is None else environment
    text, path = known.get(ENVIRONMENT), known.get(ENVIRONMENT_FILE)
    if text and path:
        raise InputError(f"{ENVIRONMENT} and {ENVIRONMENT_FILE} are both set; keep one of them")
    if path:
        return read_key(path)
    return parse_key(os.fsencode(text), source=ENVIRONMENT, raw=False) if text else None


def key_from_command(command: str | Sequence[str]) -> bytes:
    """Run a command (a list, or text that is split as a shell would, without a shell) and return the key it prints.

    Its stdin and stderr are those of this process, so it may ask. Raise `MissingError` when there is no such program,
    `InputError` when it fails or prints no key.
    """
    words = shlex.split(command) if isinstance(command, str) else list(command)
    if not words:
        raise InputError("the key command is empty")
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, check=False)  # noqa: S603 # the user's own command
    except FileNotFoundError:
        raise MissingError("no such program for the key", path=words[0]) from None
    except OSError as error:
        raise StorageError(f"the key command cannot be run: {error.strerror}", errno=error.errno) from error
    if done.returncode:
        raise InputError("the key command failed", expected="exit code 0", found=f"exit code {done.returncode}")
    return parse_key(done.stdout, source="what the key command printed")


# -- one file ----------------------------------------------------------------------------------------------


class Box:
    """Seals and unseals pieces under the key of one file. May be used by several threads."""

    def __init__(self, aead: Any, wrong: type[Exception]) -> None:
        self._aead, self._wrong = aead, wrong

    def seal(self, plain: Any, associated: bytes) -> bytes:
        """Return nonce, ciphertext and tag of these bytes: 28 more. Each call draws a nonce of its own."""
        nonce = os.urandom(NONCE_SIZE)
        return nonce + bytes(self._aead.encrypt(nonce, plain, associated))

    def unseal(self, sealed: Any, associated: bytes) -> bytes:
        """Return the plain bytes. Raise `TamperedError` unless they were sealed with this associated data."""
        view = memoryview(sealed)
        if len(view) >= OVERHEAD:
            try:
                return bytes(self._aead.decrypt(bytes(view[:NONCE_SIZE]), view[NONCE_SIZE:], associated))
            except self._wrong:
                pass
        raise TamperedError("sealed bytes are whole, but are not those that were sealed here with this key")


def check_installed() -> None:
    """Raise `ExtraMissingError` without the extra, before work is done whose result could not be written."""
    box_of(bytes(KEY_SIZE), cipher=CIPHERS[0], salt=bytes(SALT_SIZE), file_id=bytes(16))


def box_of(key: bytes, *, cipher: str, salt: bytes, file_id: bytes) -> tuple[Box, bytes]:
    """Return the box of a file, and the 16 bytes that tell its key from others.

    Raise `InputError` for another cipher or a key that is not 32 bytes, `ExtraMissingError` without the extra.
    """
    raw = check_usable(key, cipher)
    try:
        from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError as error:
        raise ExtraMissingError("encryption needs an extra: pip install 'kvsnap[crypto]'") from error
    info = _INFO + cipher.encode() + b":" + file_id
    made = HKDF(algorithm=SHA256(), length=KEY_SIZE + CHECK_SIZE, salt=salt, info=info).derive(raw)
    try:
        aead = AESGCM(made[:KEY_SIZE]) if cipher == CIPHERS[0] else ChaCha20Poly1305(made[:KEY_SIZE])
    except UnsupportedAlgorithm as error:
        raise InputError(f"this build of cryptography has no {cipher}", expected="another cipher") from error
    return Box(aead, InvalidTag), made[KEY_SIZE:]


def check_fits(found: bytes, stored: bytes) -> None:
    """Raise `KeyNeededError` unless both check values are the same."""
    if not hmac.compare_digest(found, stored):
        raise KeyNeededError("this is not the key of the file (or its cipher, salt, check or file id was changed)")

"""Options for keys, which are never themselves on the command line; and the command that makes one: keygen."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import click

from kvsnap import crypto
from kvsnap.cli._output import emit, examples, json_option, remark
from kvsnap.cli._paths import check_new
from kvsnap.errors import InputError, UnsupportedError
from kvsnap.files import write_whole
from kvsnap.formats.native import is_encrypted

__all__ = ["COMMANDS", "Keys", "key_options"]

Function = TypeVar("Function", bound=Callable[..., Any])
_SOURCES = f"--key-file, --key-command, {crypto.ENVIRONMENT_FILE} or {crypto.ENVIRONMENT}"


@dataclass
class Keys:
    """Where the keys of one command come from. Nothing is read before it is needed, and then once.

    A key named on the command line is demanded of the file that is read: one that is not encrypted is refused. Two are
    offers, taken where they are needed: that of the environment, and one that is named for `--encrypt` as well.
    """

    key_file: str | None = None
    key_command: str | None = None
    encrypt: bool = False
    cipher: str | None = None
    key_label: str | None = None
    new_key_file: str | None = None
    new_key_command: str | None = None
    _known: dict[str, bytes | None] = field(default_factory=dict)

    def _fetch(self, name: str, file: str | None, command: str | None) -> bytes | None:
        if file is not None and command is not None:
            raise click.UsageError(f"--{name}-file and --{name}-command exclude each other")
        if name not in self._known:
            if file is not None:
                self._known[name] = _read(file)
            else:
                self._known[name] = None if command is None else crypto.key_from_command(command)
        return self._known[name]

    @property
    def _given(self) -> bytes | None:
        return self._fetch("key", self.key_file, self.key_command)

    def _offered(self) -> bytes | None:
        if "environment" not in self._known:
            file = os.environ.get(crypto.ENVIRONMENT_FILE)
            if file and crypto.is_exposed(file):
                _warn(file)
            self._known["environment"] = crypto.key_from_environment()
        return self._known["environment"]

    def of(self, path: str) -> bytes | None:
        """Return the key to read this file with; None where it needs none."""
        given = self._given
        needed = os.path.isfile(path) and is_encrypted(path)
        if given is None:
            return self._offered() if needed else None
        for_both = self.encrypt and self.new_key_file is None and self.new_key_command is None
        return None if for_both and not needed else given

    def check(self, *, target: str | None, option: str, source: str | None = None, session: bool = False) -> None:
        """Check what is to be written before any work is done: that there is a key, the extra, and no session.

        Without `--encrypt` a `source` that is encrypted gets a remark when it is to be written in clear.
        """
        if session and self.encrypt:
            raise UnsupportedError("sessions cannot be encrypted yet: --encrypt goes with a sealed snapshot alone")
        if self.encrypt and target is None:
            raise click.UsageError(f"--encrypt needs {option}: it tells how a snapshot is written")
        if self.encrypt:
            crypto.check_installed()
            self._out()
            return
        asked = {"--cipher": self.cipher, "--key-label": self.key_label, "--new-key-file": self.new_key_file,
                 "--new-key-command": self.new_key_command}  # fmt: skip
        if source is None:
            asked |= {"--key-file": self.key_file, "--key-command": self.key_command}
        stray = [name for name, value in asked.items() if value is not None]
        if stray:
            raise click.UsageError(f"{', '.join(stray)}: without --encrypt nothing is encrypted")
        if source is not None and target is not None and os.path.isfile(source) and is_encrypted(source):
            remark(f"note: {source} is encrypted, {target} will not be (--encrypt)")

    def refuse(self, path: str) -> None:
        """Raise `InputError` when a key was named for a session."""
        if (self.key_file or self.key_command) is not None:
            raise InputError("sessions are not encrypted: a key is of no use here", path=path)

    def _out(self) -> bytes:
        key = self._fetch("new-key", self.new_key_file, self.new_key_command) or self._given or self._offered()
        if key is None:
            raise InputError(f"--encrypt needs a key: {_SOURCES}")
        return key

    def saving(self) -> dict[str, Any]:
        """Return what `kvsnap.save` is told: nothing without `--encrypt`."""
        return {"key": self._out(), "cipher": self.cipher, "label": self.key_label} if self.encrypt else {}


def _read(path: str) -> bytes:
    key = crypto.read_key(path)
    if crypto.is_exposed(path):
        _warn(path)
    return key


def _warn(path: str) -> None:
    remark(f"warning: others can read or write the key file {path}; chmod 600 keeps it yours")


_READING = (
    ("--key-file", "key_file", "FILE", "Key of an encrypted FILE: 32 raw bytes, 64 hex digits, or base64."),
    ("--key-command", "key_command", "CMD", "Run CMD (no shell) and take the key that it prints."),
)
_WRITING = (("--key-label", "key_label", "TEXT", "With --encrypt: says in clear which key is meant."),)
_CHANGING = (
    ("--new-key-file", "new_key_file", "FILE", "With --encrypt: the key of TARGET, where it is another one."),
    ("--new-key-command", "new_key_command", "CMD", "The same, printed by a command."),
)


def key_options(*, writes: bool = False, changes: bool = False) -> Callable[[Function], Function]:
    """Add the options for keys to a command, which gets them as one `Keys`, `keys`.

    `writes`: it can write a snapshot, so there is --encrypt too. `changes`: the new file may have a key of its own.
    """
    texts = [*_READING, *(_WRITING if writes else ()), *(_CHANGING if changes else ())]
    names = [name for _, name, _, _ in texts] + (["encrypt", "cipher"] if writes else [])

    def add(function: Function) -> Function:
        @functools.wraps(function)
        def gathered(**given: Any) -> Any:
            return function(**{k: v for k, v in given.items() if k not in names},
                            keys=Keys(**{name: given[name] for name in names}))  # fmt: skip

        decorated: Any = gathered
        if writes:
            cipher = click.Choice(crypto.CIPHERS)
            decorated = click.option("--cipher", type=cipher, help="With --encrypt.  [default: aes-256-gcm]")(decorated)
        for flag, name, metavar, text in reversed(texts):
            decorated = click.option(flag, name, metavar=metavar, help=text)(decorated)
        if writes:
            told = f"Encrypt what is written; the key is that of {_SOURCES}."
            decorated = click.option("--encrypt", is_flag=True, help=told)(decorated)
        return decorated  # type: ignore[no-any-return] # click keeps the function

    return add


@click.command()
@click.argument("file")
@json_option
@examples(
    "kvsnap keygen ~/.kvsnap-key",
    'kvsnap generate "Once upon a time" --save story.kvsnap --encrypt --key-file ~/.kvsnap-key',
)
def keygen(file: str, as_json: bool) -> None:
    """Write a new random key to FILE (64 hex digits, readable by you alone). A file that is there is never replaced.

    Whoever has the key can read what was encrypted with it; without it nobody can, you included. Keep a copy apart.
    """
    check_new(file)
    write_whole(file, [crypto.new_key().hex().encode() + b"\n"], new=True)
    if as_json:
        emit({"path": file, "bits": 8 * crypto.KEY_SIZE})
    else:
        print(f"{file}: a new key of {8 * crypto.KEY_SIZE} bits; without it nothing encrypted with it can be read")


COMMANDS = (keygen,)

"""Commands on the bytes of a file, none of which needs a model: verify, repair."""

from __future__ import annotations

import click

import kvsnap
from kvsnap.cli._keys import Keys, key_options
from kvsnap.cli._names import library_option, named, no_name
from kvsnap.cli._output import CheckFailed, count, emit, examples, json_option, progress, remark, size
from kvsnap.errors import DamagedError, KvsnapError, TamperedError
from kvsnap.formats.native import VerifyReport

__all__ = ["COMMANDS"]

# -- verify --------------------------------------------------------------------------------------------------


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", callback=named)
@key_options()
@library_option
@json_option
@examples(
    "kvsnap verify *.kvsnap",
)
def verify(files: tuple[str, ...], keys: Keys, as_json: bool) -> None:
    """Check every byte of each FILE against its checksum. Changes nothing.

    Each damaged place is named with its tensor and the tokens that it takes. Exit code 0 when all is whole, 6 when
    something live is damaged, 17 when somebody changed an encrypted file; a file that cannot be checked at all gives
    its own code. Without its key an encrypted file is checked from outside: damage shows, tampering does not.
    """
    results, code = [], 0
    for file in files:
        try:
            with progress(f"verifying {file}") as report:
                found = kvsnap.verify(file, progress=report, key=keys.of(file))
        except KvsnapError as error:
            results.append({"path": file, "ok": False, "error": error.to_dict()})
            code = code or error.exit_code
            if not as_json:
                remark(f"kvsnap: {error}")
            continue
        results.append(found.to_dict())
        code = code or (0 if found.ok else TamperedError.exit_code if found.tampered else DamagedError.exit_code)
        if as_json:
            continue
        print(f"{file}: {_verdict(found)}")
        for damage in found.damages:
            print(f"  {damage}")
        for note in found.notes:
            print(f"  note: {note}")
    if as_json:
        emit({"ok": code == 0, "files": results})
    if code:
        raise CheckFailed(code)


# -- repair --------------------------------------------------------------------------------------------------


@click.command()
@click.argument("file", callback=named)
@click.option(
    "-o", "--output", metavar="NEW", required=True, callback=no_name,
    help="Name of the new file; nothing may be there yet.",
)  # fmt: skip
@click.option("--tokens", "keep_tokens", is_flag=True, help="Keep the ids behind the damage, to be evaluated again.")
@library_option
@json_option
@examples(
    "kvsnap repair chat.kvsnap -o mended.kvsnap",
    "kvsnap repair chat.kvsnap -o mended.kvsnap --tokens",
)
def repair(file: str, output: str, keep_tokens: bool, as_json: bool) -> None:
    """Write what can be proven of a damaged FILE to a new one. FILE itself is never changed.

    Kept is the longest run of turns from the start of which every byte is as it was written. Exit code 0 when
    everything is there, 1 when something was lost, which is named; the code of the error when nothing can be kept.
    """
    with progress(f"repairing {file}") as report:
        done = kvsnap.repair(file, output, keep_tokens=keep_tokens, progress=report)
    if as_json:
        emit(done.to_dict())
    else:
        verdict = "complete" if done.complete else "NOT COMPLETE"
        pending = f", {done.n_pending:,} of them not evaluated" if done.n_pending else ""
        print(f"{output}: {verdict}, {size(done.nbytes)}, {count(done.n_turns, 'turn')}, "
              f"{count(done.n_tokens, 'token')}{pending}")  # fmt: skip
        for damage in done.lost:
            print(f"  lost: {damage}")
        for note in done.notes:
            print(f"  note: {note}")
    if not done.complete:
        raise CheckFailed(1)


def _verdict(found: VerifyReport) -> str:
    verdict = "whole" if found.ok else "TAMPERED" if found.tampered else "DAMAGED"
    if not found.opened:
        return f"{verdict} from outside, {size(found.n_bytes)}, {count(found.n_parts, 'sealed piece')}"
    inside = (count(found.n_parts, "part"), count(found.n_commits, "commit"), count(found.n_tokens, "token"))
    return ", ".join((verdict, size(found.n_bytes), *inside))


COMMANDS = (verify, repair)

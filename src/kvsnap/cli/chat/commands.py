"""What can be typed in place of a message: a colon, a word, and what it needs."""

from __future__ import annotations

import difflib
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields

from kvsnap.cli._model import idle_settings, sampler_changes
from kvsnap.cli._names import Named, library_path, open_existing
from kvsnap.cli._output import count, seconds, size
from kvsnap.cli.chat.answering import figures
from kvsnap.cli.chat.page import excerpt
from kvsnap.cli.chat.room import Room, exists, file_of
from kvsnap.conversation import Message, Stream
from kvsnap.errors import InputError, KvsnapError, MissingError
from kvsnap.layout import Sampler

__all__ = [
    "COMMANDS", "Command", "Reply", "command_of", "half_done", "last_exchange", "opening", "run_command", "said",
    "sessions",
]  # fmt: skip

_WORD = re.compile(r":([A-Za-z?]+)(?:\s+(.*))?", re.DOTALL)
_CHARACTERS = 100
"""Characters of a message in a list."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a command answers with.

    `lines` are to be shown; `begin` starts an answer that is to be shown then; `draft` is put where the next message is
    typed; `leave` ends the chat; `opened` tells that another conversation is open now.
    """

    lines: tuple[str, ...] = ()
    begin: Callable[[], Stream] | None = None
    draft: str = ""
    leave: bool = False
    opened: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """One command: what it takes, what it does in a few words, and the function that does it."""

    takes: str
    does: str
    run: Callable[[Room, str], Reply]


def command_of(text: str) -> tuple[str, str] | None:
    """Return the word and the rest of a command; None for a message. `::` starts a message with one colon."""
    found = _WORD.fullmatch(text.strip())
    return None if found is None else (found.group(1).lower(), (found.group(2) or "").strip())


def said(text: str) -> str:
    """Return the message that was typed, without the colon that kept it from being a command."""
    return text[1:] if text.startswith("::") else text


def run_command(room: Room, word: str, argument: str) -> Reply:
    """Do what a command says. Raise `InputError` for one that there is not, naming what may be meant."""
    word = _SHORT.get(word, word)
    command = COMMANDS.get(word)
    if command is None:
        near = [n for n in COMMANDS if n.startswith(word)] or difflib.get_close_matches(word, COMMANDS, n=1, cutoff=0.7)
        meant = f"did you mean :{near[0]}? " if near else ""
        raise InputError(
            f"there is no command :{word}; {meant}:help lists all. A message that starts so is typed ::{word}"
        )
    if argument and not command.takes:
        raise InputError(f":{word} stands alone", found=excerpt(argument, 60))
    if not argument and command.takes and not command.takes.startswith("["):
        raise InputError(f":{word} needs more: :{word} {command.takes}")
    return command.run(room, argument)


# -- going on and back ---------------------------------------------------------------------------------------------


def _continue(room: Room, _: str) -> Reply:
    return Reply(begin=room.go_on)


def _again(room: Room, _: str) -> Reply:
    if not any(m["role"] == "user" for m in room.messages):
        raise InputError("there is no message to answer again")
    note = "the most probable token is always taken, so the answer will be the same: :set temperature=0.7"
    return Reply((note,) if room.conversation.sampler.greedy else (), room.again)


def _drop(room: Room, _: str) -> Reply:
    if room.conversation.complete or not room.messages:
        raise InputError("the last answer is complete; :rewind takes it back all the same")
    draft = room.rewind(1)
    return Reply((f"dropped; {_now(room)}",), draft=draft)


def _rewind(room: Room, argument: str) -> Reply:
    if argument and not re.fullmatch(r"[0-9]{1,9}", argument):
        raise InputError(":rewind goes back by a number of turns", expected="1 or more", found=excerpt(argument, 20))
    turns = int(argument or 1)
    draft = room.rewind(turns)
    return Reply((f"back by {count(turns, 'turn')}; {_now(room)}",), draft=draft if turns else "")


def _reset(room: Room, _: str) -> Reply:
    room.reset()
    commit = room.session.n_commits - 1
    back = f"kvsnap rewind {room.name} {commit}" if commit else ""
    return Reply((f"all is forgotten{f' (outside of the chat, {back} brings it back)' if back else ''}",))


def _now(room: Room) -> str:
    turns = sum(m["role"] == "user" for m in room.messages)
    if not room.conversation.n_tokens:
        return "nothing is left"
    return f"{count(turns, 'message')} of yours and {count(room.conversation.n_tokens, 'token')} are left"


def _system(room: Room, argument: str) -> Reply:
    if not argument:
        return Reply((room.system or "there is no system message; :system TEXT sets one, :system none takes it away",))
    room.set_system("" if argument == "none" else argument)
    again = "from the next turn on; the messages behind it are evaluated again then" if room.messages else ""
    return Reply((f"the system message is {'none' if argument == 'none' else 'this'} {again}".rstrip(),))


def _set(room: Room, argument: str) -> Reply:
    conversation, options = room.conversation, room.options
    if argument:
        settings, limit = [], options.max_tokens
        for item in re.split(r"[,\s]+", re.sub(r"\s*=\s*", "=", argument.strip(" ,"))):
            name, _, value = item.partition("=")
            if name.replace("-", "_") != "max_tokens":
                settings.append(item)
            elif value == "none":
                limit = None
            elif re.fullmatch(r"[0-9]{1,9}", value) and int(value):
                limit = int(value)
            else:
                raise InputError("max_tokens is too small", expected="1 or more, or none", found=value)
        if settings:
            changes = sampler_changes(",".join(settings))
            conversation.change_sampler(**changes)
            told = tuple(w.replace("--", "") for w in idle_settings(changes, conversation.sampler))
        else:
            told = ()
        options.max_tokens = limit
        return Reply((_settings(room), *told))
    return Reply((_settings(room),))


def _settings(room: Room) -> str:
    sampler, limit = room.conversation.sampler, room.options.max_tokens
    given = [f"{f.name}={getattr(sampler, f.name)}" for f in fields(Sampler) if getattr(sampler, f.name) != f.default]
    chosen = ", ".join(given) or "greedy: the most probable token is always taken"
    return f"{chosen}; max_tokens={'none' if limit is None else limit}"


# -- sessions ------------------------------------------------------------------------------------------------------


def sessions() -> tuple[str, ...]:
    """Return the names of the library; none where there is no library or it cannot be read now."""
    with suppress(KvsnapError), open_existing() as library:
        return tuple(entry.name for entry in library.list())
    return ()


def _sessions(room: Room, _: str) -> Reply:
    if not os.path.isdir(library_path()):
        return Reply(("there is no library yet: this session is a file",))
    with open_existing() as library:
        entries = sorted(library.list(), key=lambda e: e.last_use_ns, reverse=True)
    lines = []
    for entry in entries:
        here = "*" if entry.name == getattr(room.file, "name", None) else " "
        state = entry.state if entry.state != "ok" else "" if entry.complete else "cut off"
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_use_ns / 1e9)) if entry.last_use_ns else ""
        lines.append(
            f"{here} @{entry.name:<24} {entry.n_tokens:>9,} tokens {size(entry.own_bytes):>9}  {when:<16}  {state}"
        )
    return Reply(tuple(line.rstrip() for line in lines) or ("the library is empty",))


def _fork(room: Room, argument: str) -> Reply:
    made = room.fork(argument)
    return Reply((f"{made} holds what is here; this chat stays in {room.name}, :open {made} goes there",))


def _open(room: Room, argument: str) -> Reply:
    file = _known(argument)
    if isinstance(file, Named) and isinstance(room.file, Named) and file.name == room.file.name:
        raise InputError(f"{room.name} is open already")
    if not isinstance(file, Named) and os.path.exists(file) and os.path.samefile(file, room.session.path):
        raise InputError(f"{file} is open already")
    room.open(file)
    return Reply(opened=True)


def _known(argument: str) -> str:
    """Return the file of a session that is there; `MissingError` names one that may be meant."""
    file = file_of(argument)
    if exists(file):
        return file
    near = difflib.get_close_matches(argument.removeprefix("@"), sessions(), n=1)
    meant = f"did you mean @{near[0]}? " if near else ""
    raise MissingError(
        f"there is no session {argument}; {meant}:sessions lists them, :new NAME makes one, :fork NAME "
        "one that starts here"
    )


def _new(room: Room, argument: str) -> Reply:
    file = file_of(argument)
    if exists(file):
        raise InputError(f"there is a session {argument} already: :open {argument} goes there")
    room.open(file)
    return Reply(opened=True)


def _save(room: Room, argument: str) -> Reply:
    if argument:
        report = room.save_to(os.path.expanduser(argument))
        what = f"{count(report.n_tokens, 'token')}, {size(report.nbytes)}"
        return Reply((f"saved {argument}: {what}, a sealed snapshot (kvsnap resume {argument})",))
    written = room.conversation.save()
    stored = f"all {count(room.session.n_tokens, 'token')} are stored in {room.name}: {size(room.session.nbytes)}"
    return Reply((f"{stored}, {size(written)} of them now" if written else stored,))


def _info(room: Room, _: str) -> Reply:
    conversation, session, options = room.conversation, room.session, room.options
    limit = conversation.engine.context_limit
    room_left = "" if limit is None else f" of {limit:,} ({max(0, limit - conversation.n_tokens):,} left)"
    rows = [
        ("session", f"{room.name}{'' if room.name == session.path else f' ({session.path})'}"),
        ("model", room.model),
        ("tokens", f"{conversation.n_tokens:,}{room_left}"),
        ("messages", "not known" if conversation.messages is None else f"{len(room.messages)}"),
        ("file", f"{size(session.nbytes)}, {count(session.n_commits, 'commit')}"),
        ("system", excerpt(room.system, _CHARACTERS) or "none"),
        ("sampler", _settings(room)),
        ("stored", f"at the end of a turn{f', and every {options.every} tokens' if options.every else ''}"),
    ]
    if conversation.preface:
        rows.append(("text", f"{count(conversation.preface, 'token')} before the first message"))
    if conversation.unsaved:
        rows.append(("not stored", f"{count(conversation.unsaved, 'token')}: :save tries again"))
    back = conversation.restored
    if back is not None:
        rows.append(("restored", f"{back.reused:,} reused, {back.recomputed:,} recomputed, {_exact(room)}"))
    return Reply(tuple(f"{name:<11} {value}" for name, value in rows))


def _exact(room: Room) -> str:
    back = room.conversation.restored
    if back is None:
        return ""
    return "exact" if back.exact else f"not exact{f': {back.notes[0]}' if back.notes else ''}"


def _history(room: Room, _: str) -> Reply:
    if half_done(room) and not room.messages:
        return Reply((half_done(room),))
    asked = [place for place, m in enumerate(room.messages) if m["role"] == "user"]
    lines = []
    for place, message in enumerate(room.messages):
        back = f":rewind {sum(a >= place for a in asked)}" if message["role"] == "user" else ""
        lines.append(f"{back:<11} {message['role']:<9} {excerpt(str(message.get('content') or ''), _CHARACTERS)}")
    if lines and not room.conversation.complete:
        lines.append(f"{'':<11} {'':<9} (cut off)" if room.messages[-1]["role"] != "user" else "(no answer yet)")
    return Reply(tuple(lines) or ("nothing was said yet",))


def _why(room: Room, _: str) -> Reply:
    turn = room.conversation.last
    if turn is None:
        return Reply(("no turn was taken since the chat was opened",))
    lines = [
        f"{count(turn.prompt_tokens, 'token')} before the answer, {turn.new:,} of them new",
        ", ".join(figures(turn)),
    ]
    lines.append("nothing was evaluated again" if turn.why is None else str(turn.why))
    return Reply((*lines, *turn.notes))


def _quit(_room: Room, _: str) -> Reply:
    return Reply(leave=True)


def _help(_room: Room, _: str) -> Reply:
    width = max(len(f":{n} {c.takes}") for n, c in COMMANDS.items())
    lines = [f"{f':{name} {command.takes}':<{width}}  {command.does}" for name, command in COMMANDS.items()]
    return Reply((*lines, "", *_KEYS))


_KEYS = (
    "A message that starts with a colon is typed with two. Enter sends; Alt-Enter (or Esc, Enter) and a backslash",
    "at the end start a further line. Ctrl-C stops an answer, or clears the line; Ctrl-D leaves. All is stored.",
)
_SHORT = {"q": "quit", "exit": "quit", "h": "help"} | {"?": "help"}
COMMANDS: dict[str, Command] = {
    "help": Command("", "this list", _help),
    "continue": Command("", "go on with an answer that was cut off", _continue),
    "drop": Command("", "take back an answer that was cut off, and its message", _drop),
    "again": Command("", "answer the last message once more", _again),
    "rewind": Command("[N]", "go back by N turns (1)", _rewind),
    "reset": Command("", "forget all messages", _reset),
    "history": Command("", "the messages so far", _history),
    "why": Command("", "what the last turn cost, and why something was evaluated again", _why),
    "info": Command("", "session, model, tokens, settings", _info),
    "set": Command("[NAME=VALUE ...]", "change the sampler: temperature=0.7 top_p=0.9, greedy, max_tokens=200", _set),
    "system": Command("[TEXT]", "show or change the system message", _system),
    "sessions": Command("", "the sessions of the library", _sessions),
    "open": Command("NAME", "go to another session", _open),
    "new": Command("NAME", "start another session", _new),
    "fork": Command("NAME", "make another session that starts with what is here, and stay", _fork),
    "save": Command("[FILE]", "tell what is stored; with FILE write a sealed snapshot", _save),
    "quit": Command("", "leave", _quit),
}


# -- what is told when a session is opened -------------------------------------------------------------------------


def opening(room: Room) -> list[str]:
    """Return what is there, in a few sentences: tokens, how they came back, what is half done."""
    conversation = room.conversation
    limit, back = conversation.engine.context_limit, conversation.restored
    head = f"{room.name} with {room.model}"
    if not conversation.n_tokens:
        told = [f"{head}: a new conversation"]
    else:
        of = "" if limit is None else f" of {limit:,}"
        how = "" if back is None else f", restored in {seconds(back.install_s + back.identity_s)}"
        again = f", {back.recomputed:,} evaluated again" if back is not None and back.recomputed else ""
        told = [f"{head}: {conversation.n_tokens:,}{of} tokens are warm{how}{again}"]
        if back is not None and not back.exact:
            told.append(_exact(room))
    told.extend(f"note: {note}" for note in room.notes)
    return told


def last_exchange(room: Room) -> tuple[Message, ...]:
    """Return the last message of the user and what follows it."""
    messages = room.messages
    start = next((p for p in range(len(messages) - 1, -1, -1) if messages[p]["role"] == "user"), len(messages))
    return messages[start:]


def half_done(room: Room) -> str:
    """Return a sentence for what is half done in a conversation; an empty text where nothing is."""
    conversation = room.conversation
    if conversation.messages is None and conversation.preface < conversation.n_tokens:
        return "it is not known which messages this session holds: it was cut inside of a turn; :reset starts anew"
    if conversation.complete or not room.messages:
        return ""
    if room.messages[-1]["role"] == "user":
        return "this message has no answer yet: :continue generates it, :drop takes the message back"
    way = "" if _is_full(room) else ":continue goes on, "
    return f"this answer was cut off{_reason(room.stop)}: {way}:drop takes it back"


def _is_full(room: Room) -> bool:
    limit = room.conversation.engine.context_limit
    return room.stop == "context" and limit is not None and room.conversation.n_tokens >= limit


def _reason(stop: str) -> str:
    return {
        "length": " by the limit of tokens",
        "context": " because the context was full",
        "unfinished": " when its run was killed",
    }.get(stop, "")

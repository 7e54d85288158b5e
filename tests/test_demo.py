"""The command line and the demo with a real engine, on tiny models."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
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
    return place


@pytest.fixture
def kv(capsys: pytest.CaptureFixture[str], models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def call(*args: object, model: str = "a") -> tuple[int, str, str]:
        capsys.readouterr()
        code = run([*map(str, args), "--model", str(models / model)])
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
        assert [t.complete for t in session.history] == [True, True, True]


@pytest.mark.parametrize("where", ["--save", "--session"])
def test_an_interrupted_run_is_saved(kv: Any, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = kvsnap.generate

    def interrupted(*args: Any, **options: Any) -> Iterator[Any]:
        stream = whole(*args, **options)
        for _ in range(3):
            yield next(stream)
        raise KeyboardInterrupt

    monkeypatch.setattr(kvsnap, "generate", interrupted)
    code, _, err = kv("generate", "hello", "--max-tokens", 20, where, "x.kvsnap")
    assert code == 130
    assert "interrupted" in err
    assert len(kvsnap.load("x.kvsnap").tokens) == 8
    with Session.open("x.kvsnap", readonly=True, create=False) as session:
        assert session.complete == (where == "--save")


def test_an_empty_session_takes_its_first_turn(kv: Any) -> None:
    Session.open("s.kvsnap").close()
    data = js(kv("resume", "s.kvsnap", "--append", "--prompt", "hi", "--max-tokens", 2, "--json"))
    assert data["restored"] is None
    assert len(kvsnap.load("s.kvsnap").tokens) == 4


# -- refusals --------------------------------------------------------------------------------------------------------


def test_another_model_is_refused_and_the_file_stays(kv: Any) -> None:
    kv("generate", "hello", "--max-tokens", 3, "--session", "s.kvsnap")
    before = Path("s.kvsnap").read_bytes()
    code, out, err = kv("resume", "s.kvsnap", "--append", model="b")
    assert (code, out) == (7, "")
    assert "weights differ: lm_head, saved float32[256, 64]" in err
    assert "--accept weights" in err
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
    assert lines[0] == "sampler,n_tokens,mean_logprob,forwards,text"
    assert lines[1].startswith("greedy,5,")
    assert "greedy" in kv(*args)[1]


def test_cat_cuts_the_text_with_a_tokenizer(kv: Any) -> None:
    kv("generate", "hello", "--max-tokens", 3, "--save", "x.kvsnap")
    assert kv("cat", "x.kvsnap", "--prompt-only")[1] == "hello\n"
    assert kv("cat", "x.kvsnap", "--generated-only")[1] != "hello\n"


# -- the demo --------------------------------------------------------------------------------------------------------


def test_the_demo_holds_every_claim(kv: Any, models: Path) -> None:
    data = js(kv("demo", "--tokens", 60, "--half", 6, "--output", "out", "--json"))
    assert data["ok"] is True
    assert [s["number"] for s in data["steps"]] == [1, 2, 3, 4, 5, 6]
    assert sum(len(s["checks"]) for s in data["steps"]) >= 20
    went = data["steps"][1]["facts"]
    assert went["first_forwards"] == 0
    assert len(went["digests"]) == 5
    assert went["greedy_ids"] == went["transformers_ids"]
    assert len(set(went["greedy_ids"])) > 1
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
    assert Path("out/session.kvsnap").stat().st_size == before


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
    assert "class=bad" in Path("out/report.html").read_text(encoding="utf-8")


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


def test_without_matplotlib_the_page_comes_without_pictures(kv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert list(js(kv("demo", "--tokens", 40, "--half", 4, "--output", "out", "--json"))["report"]) == ["report"]
    assert "<svg" not in Path("out/report.html").read_text(encoding="utf-8")


def test_the_text_of_the_demo_is_in_the_package() -> None:
    from kvsnap.cli.demo import _text

    assert 7_000 < len(_text()) < 12_000
    assert _text().startswith("What a language model remembers")

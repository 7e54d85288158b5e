"""`kvsnap quality`: a table for people, JSON and CSV for programs, an exit code for scripts."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import kvsnap  # noqa: E402 - after the extras are known to be there
from kvsnap.cli import run  # noqa: E402
from kvsnap.engines.models import load_model  # noqa: E402
from kvsnap.errors import CompatibilityError, InputError, MissingError  # noqa: E402
from kvsnap.inspection.quality.answers import Effect, Quality  # noqa: E402
from report_pages import draw_only, page_of  # noqa: E402
from tiny_models import PROMPT, save_tiny  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.newest]

Call = Callable[..., tuple[int, str, str]]
TEXT = "The text behind it is judged, place by place, and then it is over."


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("quality")
    loaded = load_model(str(save_tiny(directory / "model")))
    engine = kvsnap.connect(loaded.model, loaded.tokenizer)
    list(kvsnap.generate(engine, PROMPT * 3, max_tokens=2))
    snapshot = kvsnap.capture(engine)
    snapshot.save(directory / "a.kvsnap")
    snapshot.save(directory / "b.kvsnap", codec="q8")
    (directory / "text.txt").write_text(TEXT, encoding="utf-8")
    return directory


@pytest.fixture
def kv(capsys: pytest.CaptureFixture[str], place: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.chdir(place)

    def call(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run(["quality", *map(str, args), "--model", str(place / "model")])
        return (code, *capsys.readouterr())

    return call


def test_a_line_for_each_encoding_beside_the_yardsticks(kv: Call) -> None:
    code, out, err = kv("a.kvsnap", "b.kvsnap", "--codec", "exact", "--text-file", "text.txt")
    assert code == 0
    assert out.startswith("llama: 66 places of the text given, behind 85 tokens of a.kvsnap (")
    rows = {line.split("  ")[0].strip(): line.split() for line in out.splitlines() if line.strip()}
    assert rows["codec exact"][-1] == "identical"
    assert rows["b.kvsnap"][-1] in ("near-lossless", "good", "noticeable")
    assert "whole model in bfloat16" in out
    assert "up to 0.001 indistinguishable, up to 0.003 near-lossless" in out
    assert "note: 66 places are few" in err


def test_json_says_what_python_says(kv: Call, place: Path) -> None:
    code, out, _ = kv("a.kvsnap", "b.kvsnap", "--codec", "q8", "--text", TEXT, "--json")
    data = json.loads(out)
    loaded = load_model(str(place / "model"))
    found = kvsnap.quality(place / "a.kvsnap", place / "b.kvsnap", kvsnap.connect(loaded.model, loaded.tokenizer),
                           continuation=TEXT)  # fmt: skip
    assert code == 0
    assert (data["path"], data["n"], data["source"]) == ("a.kvsnap", found.n, "given")
    assert data["others"][0]["kl_mean"] == found.others[0].kl_mean == data["others"][1]["kl_mean"]
    assert [one["name"] for one in data["others"]] == ["b.kvsnap", "codec q8"]
    assert data["others"][0]["stored_bytes"] == (place / "b.kvsnap").stat().st_size
    assert data["nlls"] == found.nlls.tolist()


def test_csv(kv: Call) -> None:
    code, out, _ = kv("a.kvsnap", "b.kvsnap", "--text", TEXT, "--csv")
    (row,) = csv.DictReader(io.StringIO(out))
    assert code == 0
    assert (row["name"], row["n"], row["n_bad"]) == ("b.kvsnap", "66", "0")
    code, out, _ = kv("a.kvsnap", "b.kvsnap", "--text", TEXT, "--places")
    places = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert len(places) == 66
    assert float(row["kl_mean"]) == pytest.approx(sum(float(p["kl_1"]) for p in places) / 66)
    assert [int(p["target"]) for p in places] == list(TEXT.encode())


def test_an_exit_code_for_scripts(kv: Call) -> None:
    options = ("a.kvsnap", "--codec", "q8", "--last", 40)
    kl = json.loads(kv(*options, "--json")[1])["others"][0]["kl_mean"]
    assert kv(*options, "--fail-above", kl)[0] == 0
    code, out, _ = kv(*options, "--fail-above", kl * 0.99)
    assert code == 1
    assert "39 places of the history itself" in out


def test_a_text_that_the_model_makes(kv: Call) -> None:
    code, out, err = kv("a.kvsnap", "--codec", "exact", "--n-tokens", 12)
    assert code == 0
    assert "12 places that the model generates itself" in out
    assert "note: the text is the model's own" in err


def test_a_cache_that_gives_no_numbers(kv: Call, place: Path) -> None:
    snapshot = kvsnap.load(place / "a.kvsnap")
    first = snapshot.layers[0]
    values = np.array(first.tensors[0].array)
    values[0, 2, 3] = np.inf
    tensors = (kvsnap.Tensor(first.tensors[0].spec, values), *first.tensors[1:])
    replace(snapshot, layers=(replace(first, tensors=tensors), *snapshot.layers[1:])).save(place / "bad.kvsnap")
    code, out, err = kv("a.kvsnap", "bad.kvsnap", "--text", TEXT, "--fail-above", 100)
    assert code == 1
    assert "left out" in out
    assert "broken" in out
    assert "note: bad.kvsnap: it holds values that are no numbers: layer 0" in err
    code, out, _ = kv("a.kvsnap", "bad.kvsnap", "--text", TEXT, "--csv")
    (row,) = csv.DictReader(io.StringIO(out))
    assert (code, row["kl_mean"], row["n"], row["n_bad"]) == (0, "", "0", "66")
    data = json.loads(kv("a.kvsnap", "bad.kvsnap", "--text", TEXT, "--json")[1])
    assert (data["others"][0]["kl_mean"], data["others"][0]["kl"][0]) == (None, "nan")


def test_a_session_and_ids(kv: Call, place: Path) -> None:
    with kvsnap.Session.open(place / "s.kvsnap") as session:
        session.append(kvsnap.load(place / "a.kvsnap"))
    code, out, _ = kv("s.kvsnap", "a.kvsnap", "--text-ids", "1 2 3 4", "--json")
    data = json.loads(out)
    assert code == 0
    assert (data["stored_bytes"], data["others"][0]["verdict"]) == (None, "identical")
    assert data["targets"] == [1, 2, 3, 4]


def test_what_is_refused(kv: Call, place: Path) -> None:
    for args, words in (
        (("a.kvsnap",), "give another file"),
        (("a.kvsnap", "--codec", "q8", "--last", 3, "--text", "x"), "exclude each other"),
        (("a.kvsnap", "--codec", "q8", "--text", "x", "--text-ids", "1"), "give one text"),
        (("a.kvsnap", "--codec", "q8", "--csv", "--places"), "exclude each other"),
        (("a.kvsnap", "--codec", "q9"), "q9"),
    ):
        code, _, err = kv(*args)
        assert code == 2
        assert words in err
    assert kv("a.kvsnap", "--codec", "q8", "--fail-above", -1)[0] == InputError.exit_code
    code, _, err = kv("a.kvsnap", "--codec", "q8", "--text-file", "gone.txt")
    assert (code, "no such text file" in err) == (MissingError.exit_code, True)
    other = save_tiny(place / "other", seed=5)
    assert run(["quality", "a.kvsnap", "--codec", "q8", "--model", str(other)]) == CompatibilityError.exit_code


def test_a_page_with_the_figures_of_the_answer(kv: Call, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "q.html"
    asked = ("a.kvsnap", "b.kvsnap", "--rounded", "float16", "--text-file", "text.txt", "--n-tokens", "24")
    code, out, err = kv(*asked, "-o", page, "--json", "--figures", tmp_path / "pictures")
    found = json.loads(out)
    assert code == 0
    assert "q.html: " in err
    names = {"quality-kl", "quality-by-place", "quality-mean-so-far", "quality-agreement", "quality-perplexity"}
    assert {p.stem for p in (tmp_path / "pictures").iterdir()} == names
    made = page_of(page)
    lines = made.figure("quality-by-place")["rows"]
    means = made.figure("quality-mean-so-far")["rows"]
    assert len(lines) == len(means) == 2
    for effect, line, mean in zip(found["others"], lines, means, strict=True):
        told = [float((line["lead"] + m[4]).rsplit(": ", 1)[1].split()[0]) for m in line["marks"]]
        kl = np.array(effect["kl"], dtype=float)
        assert np.allclose(told, kl[kl > 0], rtol=1e-3, atol=0)
        assert not np.allclose(told, np.roll(kl[kl > 0], 1), rtol=1e-3, atol=0)  # a place off by one would be noticed
        last = float((mean["lead"] + mean["marks"][-1][4]).rsplit(": ", 1)[1].split()[0])
        assert last == pytest.approx(effect["kl_mean"], rel=1e-3)
    bars = [row["lead"] for row in made.figure("quality-kl")["rows"]]
    assert [bar.split(":")[0] for bar in bars] == ["b.kvsnap", "rounded to float16"]
    assert TEXT[:20] in made.text
    assert all(f"{effect['name']}: {effect['verdict']}. Mean KL" in made.text for effect in found["others"])


def test_a_page_without_text_and_ids(kv: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    draw_only(monkeypatch)
    asked = ("a.kvsnap", "--codec", "q8", "--text-file", "text.txt", "--n-tokens", "24", "-o", tmp_path / "q.html")
    assert kv(*asked)[0] == 0
    assert TEXT[:20] in page_of(tmp_path / "q.html").said()
    assert kv(*asked, "--no-text", "--overwrite")[0] == 0
    assert TEXT[:20] not in page_of(tmp_path / "q.html").said()
    assert kv(*asked)[0] == 2  # it is there


def test_places_where_another_token_is_chosen_are_told_without_ids() -> None:
    """What `effect_of` found is said with ids or texts, and on a page without text with neither."""
    pytest.importorskip("matplotlib")
    from kvsnap.reports.judging import cards_of_quality

    found = quality_of(differs_at=2, expected=91234, found=95555)
    for with_text in (True, False):
        said = str([card.blocks for card in cards_of_quality(found, with_text=with_text)])
        assert "place 3, behind row 12" in said
        assert ("95555 in place of 91234" in said) == with_text
        assert ("95555" in said) == with_text
        assert ("the secret text" in said) == with_text
    broken = quality_of(verdict="broken", kl_mean=None, top1=None, top5=None, perplexity=None, n=0, n_bad=4,
                        kl=np.full(4, np.nan))  # fmt: skip
    assert [card.title for card in cards_of_quality(broken, with_text=False)] == [
        "What it costs the model",
        "Perplexity",
    ]


def quality_of(**fields: Any) -> Quality:
    """An answer about one encoding over four places."""
    kl = np.array([1e-4, 2e-4, 5e-3, np.nan])
    effect = Effect(
        name="codec q8", codec="q8", stored_bytes=10, bound=0.1, n=3, n_bad=1, kl_mean=float(np.nanmean(kl)),
        kl_se=1e-3, kl_median=2e-4, kl_p99=5e-3, kl_max=5e-3, top1=2 / 3, top5=0.9, nll=1.0, perplexity=math.e,
        nll_change=0.1, nll_change_se=0.1, perplexity_change=0.1, logit_error=0.1, verdict="near-lossless",
        differs_at=None, expected=None, found=None, expected_text=None, found_text=None, notes=(), kl=kl,
        agrees=np.array([True, True, False, False]), nlls=np.ones(4),
    )  # fmt: skip
    ids = np.arange(4)
    return Quality(
        reference="s", architecture="a", stored_bytes=None, bound=0.0, n_history=10, n=4, n_bad=0, source="given",
        text="the secret text", nll=1.0, perplexity=2.7, others=(replace(effect, **fields),), notes=(), ids=ids,
        targets=ids + 91234, nlls=np.ones(4),
    )  # fmt: skip

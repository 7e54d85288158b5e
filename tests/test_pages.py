"""Reports in a real browser: nothing asked for, nothing blank, values by pointer and by keyboard, everyone can read it.

Needs playwright and a Chromium (on PATH, or KVSNAP_CHROMIUM). Without them these tests are skipped; with
KVSNAP_REQUIRE_BROWSER=1, as `make test-pages` sets it, they fail.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from report_pages import hostile, page_of
from synthetic import snapshot

REQUIRED = os.environ.get("KVSNAP_REQUIRE_BROWSER") == "1"
CHROMIUM = os.environ.get("KVSNAP_CHROMIUM") or next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
MISSING = [
    what for what, there in (
        ("playwright", find_spec("playwright")), ("matplotlib", find_spec("matplotlib")),
        ("a Chromium", CHROMIUM),
    ) if not there
]  # fmt: skip
if MISSING and REQUIRED:
    raise RuntimeError(f"needed here, and missing: {', '.join(MISSING)}")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(MISSING), reason=f"missing: {', '.join(MISSING)}"),
]

if not MISSING:
    from PIL import Image
    from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

    import kvsnap
    from kvsnap.session import Session


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def taken() -> Any:
    return snapshot(range(1, 40), layers=3, heads=2, dim=8, text="It was a dark night.", metadata={"title": "night"})


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, taken: Any) -> Path:
    """A page about a session and a coarser copy of it."""
    place = tmp_path_factory.mktemp("pages")
    with Session.open(place / "chat.kvsnap") as session:
        session.append(snapshot(range(1, 20), layers=3, heads=2, dim=8))
        session.append(taken)
    kvsnap.save(taken, place / "q8.kvsnap", codec="q8")
    kvsnap.report([place / "chat.kvsnap", place / "q8.kvsnap"], place / "r.html")
    return place / "r.html"


class Watched:
    """A page in the browser, with all that it said and asked for."""

    def __init__(self, context: BrowserContext, path: Path) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page: Page = context.new_page()
        self.page.on("console", lambda m: self.said.append(f"{m.type}: {m.text}"))
        self.page.on("pageerror", lambda e: self.said.append(f"error: {e}"))
        self.page.on("dialog", lambda d: (self.said.append(f"dialog: {d.message}"), d.dismiss()))
        self.page.on("request", lambda r: self.asked.append(r.url))
        self.page.goto(path.as_uri())

    def check(self, path: Path) -> None:
        assert self.said == []
        assert self.asked in ([path.as_uri()], [path.as_uri(), "data:,"])


@pytest.fixture
def opened(browser: Browser, report: Path) -> Iterator[Page]:
    with browser.new_context(viewport={"width": 1200, "height": 900}) as context:
        watched = Watched(context, report)
        yield watched.page
        watched.check(report)


def colours(shot: bytes | Image.Image) -> int:
    """The number of colours of which there is more than a pixel or two."""
    image = Image.open(io.BytesIO(shot)) if isinstance(shot, bytes) else shot
    found = image.convert("RGB").getcolors(1 << 24)
    assert found is not None
    return sum(1 for n, _ in found if n > 2)


def plot_of(page: Page, name: str) -> Any:
    return page.locator(f'figure[data-name="{name}"] .plot').first


def center_of(page: Page, name: str, box: list[float]) -> tuple[float, float]:
    """Where the middle of a box of the picture is in the window."""
    place = plot_of(page, name).locator("svg").evaluate(
        "(svg, b) => { svg.scrollIntoView({block: 'center', behavior: 'instant'}); const m = svg.getScreenCTM();"
        " const p = new DOMPoint(b[0] + b[2] / 2, b[1] + b[3] / 2).matrixTransform(m); return [p.x, p.y]; }",
        box,
    )  # fmt: skip
    return place[0], place[1]


def cell_of(grid: dict[str, Any], row: int, column: int) -> list[float]:
    left, top, width, height = grid["box"]
    w, h = width / len(grid["columns"]), height / len(grid["rows"])
    return [left + column * w, top + row * h, w, h]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_picture_is_there_and_not_blank(browser: Browser, report: Path, scheme: Any) -> None:
    with browser.new_context(viewport={"width": 1200, "height": 900}, color_scheme=scheme) as context:
        watched = Watched(context, report)
        page = watched.page
        plots = page.locator(".plot")
        assert plots.count() == len(page_of(report).data) > 20
        page.locator(".plot svg").last.evaluate("(svg) => svg.replaceChildren()")  # the negative control
        boxes = page.evaluate(
            "[...document.querySelectorAll('.plot')].map((p) => { const b = p.getBoundingClientRect();"
            " return [b.left + scrollX, b.top + scrollY, b.right + scrollX, b.bottom + scrollY]; })"
        )
        whole = Image.open(io.BytesIO(page.screenshot(full_page=True)))
        found = []
        for left, top, right, bottom in boxes:
            assert right - left > 300
            assert bottom - top > 60
            found.append(colours(whole.crop((round(left), round(top), round(right), round(bottom)))))
        assert min(found[:-1]) > 8
        assert found[-1] == 1
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground)[:3])) > 384) == (scheme == "light")
        watched.check(report)


def test_a_page_that_asks_for_something_is_noticed(browser: Browser, tmp_path: Path) -> None:
    """The negative control of `Watched`."""
    bad = tmp_path / "bad.html"
    bad.write_text('<img src="other.png"><script>console.warn("x")</script>', encoding="utf-8")
    with browser.new_context() as context:
        watched = Watched(context, bad)
        assert len(watched.asked) == 2
        assert any("x" in text for text in watched.said)


def test_the_pointer_tells_the_value_of_the_cell_under_it(opened: Page, report: Path, taken: Any) -> None:
    grid = page_of(report).figure("mean-norm-k")
    for layer, head in ((0, 0), (2, 1), (1, 0)):
        opened.mouse.move(*center_of(opened, "mean-norm-k", cell_of(grid, head, layer)))
        said = opened.locator(".tip").inner_text()
        rows = taken.layers[layer].tensor("k").array[head].astype(np.float64)
        place, value = said.split(": ")
        assert place == f"head {head}, layer {layer}"
        assert float(value) == pytest.approx(np.linalg.norm(rows, axis=-1).mean(), rel=1e-3)
    opened.mouse.move(2, 2)
    assert not opened.locator(".tip").is_visible()


def test_the_cell_that_is_pointed_at_has_the_colour_of_its_value(opened: Page, report: Path) -> None:
    """The picture and what the pointer is told are one: the brightest cell is that of the largest value."""
    grid = page_of(report).figure("mean-norm-v")
    values = np.array(grid["values"], dtype=float).reshape(len(grid["rows"]), -1)
    light = np.zeros_like(values)
    for row, column in np.ndindex(values.shape):
        x, y = center_of(opened, "mean-norm-v", cell_of(grid, row, column))
        shot = opened.screenshot(clip={"x": x, "y": y, "width": 1, "height": 1})
        pixel = Image.open(io.BytesIO(shot)).convert("L").getpixel((0, 0))
        assert isinstance(pixel, int)
        light[row, column] = pixel
    assert np.array_equal(np.argsort(values.ravel()), np.argsort(light.ravel()))


def test_lines_and_tokens_tell_their_values(opened: Page, report: Path) -> None:
    for name in ("growth", "tokens-k-0", "turns", "distributions"):
        row = page_of(report).figure(name)["rows"][0]
        mark = row["marks"][len(row["marks"]) // 2]
        opened.mouse.move(*center_of(opened, name, mark[:4]))
        assert opened.locator(".tip").inner_text() == re.sub(r"\s+", " ", row["lead"] + mark[4]).strip()


def test_arrow_keys_walk_a_picture_and_are_read_out(opened: Page, report: Path) -> None:
    grid = page_of(report).figure("mean-norm-k")
    plot = plot_of(opened, "mean-norm-k")
    plot.focus()
    live = opened.locator("#live")

    def cell(row: int, column: int) -> str:
        value = grid["values"][row * len(grid["columns"]) + column]
        return f"head {row}, layer {column}: {value:,.4g}"

    for key, row, column in (
        ("ArrowRight", 0, 0), ("ArrowRight", 0, 1), ("ArrowDown", 1, 1), ("ArrowDown", 1, 1), ("End", 1, 2),
        ("Home", 1, 0), ("ArrowUp", 0, 0), ("ArrowLeft", 0, 0), ("Control+End", 1, 2), ("PageUp", 1, 0),
    ):  # fmt: skip
        opened.keyboard.press(key)
        assert live.inner_text() == cell(row, column), key
        assert opened.locator(".tip").inner_text() == live.inner_text()
    assert plot.locator(".cursor").first.is_visible()
    x, y = center_of(opened, "mean-norm-k", cell_of(grid, 1, 0))
    outline = plot.locator(".cursor").first.bounding_box()
    assert outline is not None
    assert outline["x"] < x < outline["x"] + outline["width"]
    assert outline["y"] < y < outline["y"] + outline["height"]
    opened.keyboard.press("Escape")
    assert not opened.locator(".tip").is_visible()
    assert not plot.locator(".cursor").first.is_visible()
    assert live.inner_text() == ""


def test_tab_goes_through_the_page_in_order_and_out_of_it(opened: Page) -> None:
    opened.keyboard.press("Tab")
    assert opened.evaluate("document.activeElement.className") == "skip"
    places, n = [], opened.locator("a, button, summary, [tabindex='0']").count()
    for _ in range(n + 5):
        state = opened.evaluate(
            "(() => { const e = document.activeElement; if (e === document.body) return null;"
            " const s = getComputedStyle(e); return [[...document.querySelectorAll('*')].indexOf(e),"
            " s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) > 0]; })()"
        )
        if state is None:
            break
        places.append(state[0])
        assert state[1], "what has the focus can be seen"
        opened.keyboard.press("Tab")
    else:
        pytest.fail("the focus never left the page")
    assert places == sorted(set(places))
    assert len(places) >= opened.locator(".plot").count()


def test_the_button_changes_light_and_dark_by_keyboard(opened: Page) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    before = opened.evaluate(ground)
    opened.locator(".theme").focus()
    opened.keyboard.press("Enter")
    assert opened.evaluate(ground) != before
    assert opened.locator(".theme").inner_text() == "Light page"
    opened.keyboard.press("Space")
    assert opened.evaluate(ground) == before


def test_paper_is_white_with_dark_letters_whatever_the_screen_is(opened: Page) -> None:
    opened.evaluate("document.documentElement.dataset.theme = 'dark'")  # as the button does
    opened.emulate_media(media="print")
    ink, card = opened.evaluate(
        "[getComputedStyle(document.querySelector('h1')).color, "
        "getComputedStyle(document.querySelector('.card')).backgroundColor]"
    )
    opened.emulate_media(media="screen")
    opened.evaluate("delete document.documentElement.dataset.theme")
    assert sum(map(int, re.findall(r"\d+", ink)[:3])) < 200
    assert sum(map(int, re.findall(r"\d+", card)[:3])) == 3 * 255


def test_the_page_is_whole_without_scripts(browser: Browser, report: Path, taken: Any) -> None:
    with browser.new_context(java_script_enabled=False) as context:
        watched = Watched(context, report)
        page = watched.page
        assert not page.locator(".theme").is_visible()
        figure = page.locator('figure[data-name="mean-norm-k"]').first
        assert figure.locator(".plot").get_attribute("role") == "img"
        assert colours(figure.locator(".plot").screenshot()) > 8
        figure.locator("summary").click()
        cells = figure.locator("tbody tr").nth(1).locator("td").all_inner_texts()
        rows = taken.layers[2].tensor("k").array[1].astype(np.float64)
        assert float(cells[-1]) == pytest.approx(np.linalg.norm(rows, axis=-1).mean(), rel=1e-3)
        assert "It was a dark night." in page.locator("main").inner_text()
        watched.check(report)


@pytest.mark.parametrize("width", [320, 360, 768])
def test_a_narrow_window_scrolls_in_one_direction_only(browser: Browser, report: Path, width: int) -> None:
    with browser.new_context(viewport={"width": width, "height": 640}) as context:
        page = Watched(context, report).page
        page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_touch_shows_the_value(browser: Browser, report: Path) -> None:
    grid = page_of(report).figure("mean-norm-k")
    with browser.new_context(viewport={"width": 400, "height": 800}, has_touch=True) as context:
        page = Watched(context, report).page
        page.touchscreen.tap(*center_of(page, "mean-norm-k", cell_of(grid, 0, 0)))
        assert page.locator(".tip").inner_text().startswith("head 0, layer 0: ")


def test_motion_is_left_out_for_whom_it_disturbs(browser: Browser, report: Path) -> None:
    found = {}
    for wish in ("reduce", "no-preference"):
        with browser.new_context(reduced_motion=wish) as context:  # type: ignore[arg-type]
            page = Watched(context, report).page
            found[wish] = page.evaluate("getComputedStyle(document.documentElement).scrollBehavior")
    assert found == {"reduce": "auto", "no-preference": "smooth"}


def test_what_a_hostile_file_says_does_nothing(browser: Browser, tmp_path: Path) -> None:
    hostile(str(tmp_path / "s.kvsnap"))
    evil = '"><script>window.owned = 1</script><svg onload="window.owned=1"><style>body{display:none}</style>'
    kvsnap.report(tmp_path / "s.kvsnap", tmp_path / "r.html", names=[evil], title=evil, detokenize=lambda ids: evil)
    with browser.new_context() as context:
        watched = Watched(context, tmp_path / "r.html")
        page = watched.page
        assert page.evaluate("window.owned") is None
        assert page.locator("h1").inner_text().endswith("</style>")
        mark = page_of(tmp_path / "r.html").figure("tokens-k-0")["rows"][0]
        page.mouse.move(*center_of(page, "tokens-k-0", mark["marks"][0][:4]))
        assert "<script>" in page.locator(".tip").inner_text()
        assert page.locator("script:not([type])").count() == 1
        watched.check(tmp_path / "r.html")


def test_the_policy_stops_what_gets_past_the_escaping(browser: Browser, report: Path, tmp_path: Path) -> None:
    """The second wall: the same page with a script, a style and an image smuggled in."""
    text = report.read_text(encoding="utf-8")
    bad = tmp_path / "bad.html"
    smuggled = (
        '<script>window.owned=1</script><p style="color:red" onclick="x()">x</p><img src="https://example.org/x.png">'
    )
    bad.write_text(text.replace("</main>", f"{smuggled}</main>"), encoding="utf-8")
    with browser.new_context() as context:
        watched = Watched(context, bad)
        assert watched.page.evaluate("window.owned") is None
        assert sum("Content Security Policy" in said for said in watched.said) >= 3
        assert not [url for url in watched.asked if url.startswith("https") and "blocked" not in url] or any(
            "example.org" in said for said in watched.said
        )


def _axe() -> str | None:
    found = find_spec("axe_playwright_python")
    places = list(found.submodule_search_locations or ()) if found else []
    script = Path(places[0]) / "axe.min.js" if places else None
    return script.read_text(encoding="utf-8") if script and script.is_file() else None


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser: Browser, report: Path, scheme: Any) -> None:
    script = _axe()
    if script is None:
        if REQUIRED:
            pytest.fail("axe-playwright-python is needed here")
        pytest.skip("axe-playwright-python is not installed")
    with browser.new_context(color_scheme=scheme) as context:
        page = Watched(context, report).page
        page.evaluate("[...document.querySelectorAll('details')].slice(0, 8).forEach((d) => { d.open = true; })")
        page.evaluate(script)
        # What has no colour is the same in the dark.
        rules = ", runOnly: {type: 'rule', values: ['color-contrast', 'document-title']}" if scheme == "dark" else ""
        ask = f"axe.run(document, {{resultTypes: ['violations'], elementRef: false{rules}}})"
        found = page.evaluate(f"{ask}.then((r) => r.violations.map((v) => [v.id, v.nodes.length, v.nodes[0].html]))")
        assert found == []
        page.evaluate("document.querySelector('.quiet').style.color = 'rgb(200, 200, 200)'; document.title = ''")
        again = page.evaluate(f"{ask}.then((r) => r.violations.map((v) => v.id))")
        assert "document-title" in again  # what is wrong would be found


def test_a_library_in_the_browser(browser: Browser, tmp_path: Path) -> None:
    with kvsnap.Library(tmp_path / "lib") as library:
        with library.open("rivers") as session:
            session.append(snapshot(range(1, 30)))
        library.fork("rivers", "bridges", n_tokens=11)
        kvsnap.report_library(library, tmp_path / "r.html")
    with browser.new_context() as context:
        watched = Watched(context, tmp_path / "r.html")
        plot_of(watched.page, "forks").focus()
        watched.page.keyboard.press("ArrowDown")
        watched.page.keyboard.press("ArrowDown")
        assert watched.page.locator("#live").inner_text().startswith("bridges: ")
        assert colours(plot_of(watched.page, "forks").screenshot()) > 8
        watched.check(tmp_path / "r.html")


def test_a_cursor_that_leaves_the_window_is_scrolled_to(browser: Browser, report: Path) -> None:
    with browser.new_context(viewport={"width": 360, "height": 400}) as context:
        page = Watched(context, report).page
        plot = plot_of(page, "similarity-k")
        plot.focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Control+End")
        box, tip = plot.locator(".cursor").first.bounding_box(), page.locator(".tip").bounding_box()
        assert box is not None
        assert tip is not None
        for found in (box, tip):
            assert 0 <= found["x"] + found["width"] <= 361
            assert 0 <= found["y"] + found["height"] <= 401

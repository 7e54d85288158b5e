"""The docs are true: each Python block runs, each relative link leads somewhere.

Blocks marked ```python run in the order of the page, in one process per page, in an empty directory. A block whose
first line is the comment `# not run` is only compiled. As a script, `test_docs.py PAGE` runs the blocks of one page.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,}|~{3,})(?P<language>[\w-]*)")
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(\s*<?(?P<target>[^\s)>]+)>?(?:\s+\"[^\"]*\")?\s*\)")


class Block(NamedTuple):
    line: int
    language: str
    text: str

    @property
    def is_run(self) -> bool:
        return not self.text.lstrip().startswith("# not run")


def split(page: str) -> tuple[list[Block], str]:
    """The fenced blocks of a page, and the rest of it (same number of lines, blocks left blank)."""
    blocks: list[Block] = []
    prose: list[str] = []
    opened: re.Match[str] | None = None
    start, body = 0, []
    for number, line in enumerate(page.splitlines(), 1):
        if opened is None:
            opened = FENCE.match(line)
            start, body = number + 1, []
            prose.append("" if opened else line)
        elif line.strip().startswith(opened["marks"]) and not line.strip().strip("`~"):
            blocks.append(Block(start, opened["language"], "\n".join(body) + "\n"))
            opened = None
            prose.append("")
        else:
            body.append(line.removeprefix(opened["indent"]))
            prose.append("")
    if opened is not None:
        raise ValueError(f"the block of line {start - 1} is never closed")
    return blocks, "\n".join(prose)


def python_blocks(page: str) -> list[Block]:
    return [b for b in split(page)[0] if b.language == "python"]


def compile_block(block: Block, name: str) -> object:
    # Padded, so that an error names the line of the page.
    return compile("\n" * (block.line - 1) + block.text, name, "exec")


def run_page(page: str, name: str) -> int:
    """Run the blocks of a page in one namespace; return how many ran."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    n_run = 0
    for block in python_blocks(page):
        code = compile_block(block, name)
        if block.is_run:
            exec(code, namespace)  # type: ignore[call-overload] # noqa: S102 # running the docs is the purpose
            n_run += 1
    return n_run


def anchors(page: str) -> set[str]:
    """The fragments that a page's headings make, as code hosts spell them."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6}\s+(.+?)\s*#*$", split(page)[1], re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number = 0
        while (name := slug if number == 0 else f"{slug}-{number}") in found:
            number += 1
        found.add(name)
    return found


def dead_links(page: str, path: Path) -> Iterator[str]:
    prose = re.sub(r"`[^`\n]*`", "", split(page)[1])
    for match in LINK.finditer(prose):
        target = unquote(match["target"])
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        line = prose.count("\n", 0, match.start()) + 1
        name, _, fragment = target.partition("#")
        goal = (path.parent / name).resolve() if name else path
        if not goal.exists():
            yield f"{path.name}:{line}: {target} does not exist"
        elif fragment and goal.suffix == ".md" and goal.is_file():
            text = page if goal == path else goal.read_text(encoding="utf-8")
            if fragment not in anchors(text):
                yield f"{path.name}:{line}: {target}: no such heading"


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_links_lead_somewhere(path: Path) -> None:
    assert list(dead_links(path.read_text(encoding="utf-8"), path)) == []


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_blocks_compile(path: Path) -> None:
    for block in python_blocks(path.read_text(encoding="utf-8")):
        compile_block(block, page_id(path))


# What other pages show of a model does not depend on the release of transformers, or needs the newest (engines.md).
EVERYWHERE = ("README.md", "api.md", "sessions.md", "conversations.md")
RUN = [pytest.param(p, id=page_id(p), marks=[] if p.name in EVERYWHERE else [pytest.mark.newest]) for p in PAGES]


@pytest.mark.engine
@pytest.mark.parametrize("path", RUN)
def test_blocks_run(path: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, __file__, str(path)], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_failing_block_is_reported_with_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, __file__, str(page)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "page.md" in done.stderr
    assert "line 8" in done.stderr


def test_blocks_share_names_and_not_run_is_only_compiled() -> None:
    page = (
        "```python\nx = 1\n```\n~~~python\nassert x == 1\n~~~\n"
        "```python\n# not run\n1 / 0\n```\n```sh\nnot python\n```\n"
    )
    assert run_page(page, "page") == 2
    with pytest.raises(SyntaxError):
        run_page("```python\n# not run\nx = = 1\n```\n", "page")
    with pytest.raises(ValueError, match="never closed"):
        run_page("```python\nx = 1\n", "page")


def test_dead_links_are_reported(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A heading, here\n", encoding="utf-8")
    page = (
        "[a](there.md) [b](https://example.org/x) [c](there.md#a-heading-here)\n"
        "[d](gone.md) `[not](a-link.md)`\n```\n[nor](this.md)\n```\n[e](there.md#gone) ![f](gone.png)\n[g](#gone)\n"
    )
    found = list(dead_links(page, tmp_path / "page.md"))
    assert [f.split(": ")[0] for f in found] == ["page.md:2", "page.md:6", "page.md:6", "page.md:7"]
    assert "gone.md" in found[0]
    assert "no such heading" in found[1]


if __name__ == "__main__":
    source = Path(sys.argv[1])
    print(f"{source.name}: {run_page(source.read_text(encoding='utf-8'), source.name)} blocks ran")

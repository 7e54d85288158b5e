"""`import kvsnap` in fresh processes, beside an interpreter that imports nothing and one that imports numpy.

numpy and the rest come with the first name that is used.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import common
from common import Figure, Work, interleave, ms

CODE = {
    "an interpreter alone": "pass",
    "import numpy": "import numpy",
    "import numpy, ml_dtypes, xxhash": "import numpy, ml_dtypes, xxhash, dataclasses, json",
    "import kvsnap": "import kvsnap",
    "import kvsnap, and the first name used": "import kvsnap; kvsnap.load",
}


def process(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], env=common.environment(), check=True)


def measure(rounds: int) -> list[Figure]:
    process("import kvsnap, sys; kvsnap.load; assert 'torch' not in sys.modules and 'transformers' not in sys.modules")
    times = interleave({name: Work(lambda code=code: process(code)) for name, code in CODE.items()}, rounds)
    empty = ms(times["an interpreter alone"])
    out = [Figure("an interpreter alone, from start to end", f"{empty:.0f} ms")]
    for name in list(CODE)[1:]:
        own = ms(times[name]) - empty
        ours = name == "import kvsnap"
        told = f"{ms(times[name]):.0f} ms from start to end"
        out.append(Figure(name, f"{own:.0f} ms", told, "< 200 ms" if ours else "", own < 200 if ours else None))
    return out


def main() -> None:
    options: argparse.Namespace = common.parser(__doc__).parse_args()
    rounds = 2 if options.small else options.rounds or 31
    common.run(options, lambda _: measure(rounds), "ml_dtypes")


if __name__ == "__main__":
    main()

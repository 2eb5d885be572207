"""Run a benchmark by its name, or list them all.

A benchmark is a module in this directory whose `main(argv)` measures, reports and returns an exit
code; the first line of its docstring tells what it measures.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent


def benchmarks() -> dict[str, str]:
    """The benchmarks and what each measures; none is imported for that."""
    found = {}
    for path in sorted(HERE.glob("*.py")):
        if not path.stem.startswith("_"):
            told = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
            found[path.stem] = told.partition("\n")[0]
    return found


def main(argv: Sequence[str]) -> int:
    """Run the benchmark that `argv` begins with; its exit code is ours."""
    known = benchmarks()
    if not argv or argv[0] in {"-h", "--help"}:
        print("usage: ./run bench NAME [--quick] [--json]\n")
        width = max(map(len, known), default=0)
        for name, told in known.items():
            print(f"  {name:{width}}  {told}")
        return 0
    name, *rest = argv
    if name not in known:
        print(f"bench: no benchmark {name!r}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    run = importlib.import_module(f"bench.{name}").main
    return int(run(rest))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

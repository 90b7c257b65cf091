"""All that measures, by name.

    python -m tests.benchmarks                  # policies x models x targets
    python -m tests.benchmarks --list           # what else there is
    python -m tests.benchmarks dominance --models gpt2 --targets v5e

Every module here with a `main` is one; `NAME --help` shows its options. Results that
are kept stand in `tests/benchmarks/results/`.
"""

from __future__ import annotations

import ast
import difflib
import pkgutil
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
DEFAULT = "policies"
PARTS = ("gpu_case",)
"""Modules that others start."""


def benchmarks() -> dict[str, str]:
    """Every benchmark's name, and the first line of what it says of itself."""
    names = (module.name for module in pkgutil.iter_modules([str(FOLDER)]))
    found = {}
    for name in names:
        if name.startswith("_") or name in PARTS:
            continue
        source = ast.parse((FOLDER / f"{name}.py").read_text())
        functions = (
            one.name for one in source.body if isinstance(one, ast.FunctionDef)
        )
        if "main" in functions:
            found[name] = (ast.get_docstring(source) or "").partition("\n")[0]
    return found


def main() -> None:
    """Runs the benchmark that is named, with the arguments after its name."""
    known = benchmarks()
    name, *rest = sys.argv[1:] or [DEFAULT]
    if name == "--list":
        for one, about in known.items():
            print(f"{one:22} {about}")
        return
    if name in ("-h", "--help"):
        print(__doc__)
        return
    if name.startswith("-"):
        name, rest = DEFAULT, [name, *rest]
    if name not in known:
        near = difflib.get_close_matches(name, known)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise SystemExit(f"no benchmark {name!r}.{hint} Known: {', '.join(known)}.")
    sys.argv = [f"tests.benchmarks.{name}", *rest]
    runpy.run_module(f"tests.benchmarks.{name}", run_name="__main__")


if __name__ == "__main__":
    main()

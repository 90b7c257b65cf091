"""Cells of a table that take minutes each: a file that a stopped run goes on from."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from remat._compare._comparison import versions
from remat._files import write_text

RESULTS = Path(__file__).parent / "results"


def fill(
    path: Path,
    cells: Iterable[dict[str, Any]],
    measure: Callable[[dict[str, Any]], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Measures the cells that a file does not have, writing it after each.

    Args:
        path: the file; made if it is not there.
        cells: what identifies each cell.
        measure: figures of a cell.

    Returns:
        All cells of the file, old and new, each with its figures.
    """
    found = json.loads(path.read_text())["cells"] if path.exists() else []
    for cell in cells:
        if any(cell.items() <= known.items() for known in found):
            continue
        try:
            figures = measure(cell)
        except Exception as error:  # one cell that cannot be, beside many that can
            figures = {"error": str(error).partition("\n")[0]}
        found.append({**cell, **figures})
        print(found[-1], flush=True)
        data = {"versions": dict(versions()), "cells": found}
        write_text(path, json.dumps(data, indent=1) + "\n")
    return found


def markdown(header: list[str], rows: Iterable[list[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def gib(n_bytes: int | None) -> str:
    """Bytes as a column of GiB shows them."""
    return "–" if n_bytes is None else f"{n_bytes / 2**30:.1f}"

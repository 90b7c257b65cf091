"""Cells of a table that take minutes each: a file that a stopped run goes on from."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from remat._compare._comparison import versions
from remat._files import write_text

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[2] / "docs"


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


def publish(name: str, table: str, page: str) -> None:
    """Writes a table as a result, and between its marks on a page of the docs."""
    (RESULTS / f"{name}.md").write_text(table)
    path = DOCS / page
    path.write_text(shown_on(path.read_text(), name, table))


def shown_on(text: str, name: str, table: str) -> str:
    """A page's text with a table between `<!-- NAME -->` and `<!-- end NAME -->`."""
    before, mark, rest = text.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end {name} -->")
    assert mark and end, f"the page has no place for {name}"
    return f"{before}{mark}\n{table}\n{end}{after}"


def markdown(header: list[str], rows: Iterable[list[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def gib(n_bytes: int | None) -> str:
    """Bytes as a column of GiB shows them."""
    return "–" if n_bytes is None else f"{n_bytes / 2**30:.1f}"

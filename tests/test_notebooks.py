"""The notebooks run, are kept clean, and say the same where they say the same."""

import itertools
import re
import tomllib
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"][
    "Source"
]

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@every_notebook
def test_notebook_runs(path, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    shown = "".join(
        output.get("text", "") + str(output.get("data", ""))
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )
    assert "GiB" in shown or "MiB" in shown


@every_notebook
def test_notebook_is_kept_clean(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert 8 <= len(notebook.cells) <= 30
    assert all(len(cell.source.splitlines()) <= 20 for cell in code)
    assert not any(cell.outputs or cell.execution_count for cell in code)


@every_notebook
def test_notebook_has_its_frame(path):
    first, install, *_, last = nbformat.read(path, as_version=4).cells
    in_colab = SOURCE.replace("github.com", "colab.research.google.com/github")
    assert first.source.startswith("[![Open in Colab]")
    assert f"({in_colab}/blob/main/notebooks/{path.name})" in first.source
    assert "\n# " in first.source
    assert "After this notebook you can" in first.source
    assert f"git+{SOURCE}" in install.source
    assert "## What to try next" in last.source


def test_there_is_one_install_cell():
    installs = {nbformat.read(path, as_version=4).cells[1].source for path in NOTEBOOKS}
    assert len(installs) == 1


@every_notebook
def test_links_between_notebooks_lead_somewhere(path):
    for cell in nbformat.read(path, as_version=4).cells:
        for link in re.findall(r"\]\((\w+\.ipynb)\)", cell.source):
            assert (path.parent / link).exists(), link


@every_notebook
def test_prose_stands_before_code(path):
    kinds = [cell.cell_type for cell in nbformat.read(path, as_version=4).cells]
    runs = [(kind, len(list(of))) for kind, of in itertools.groupby(kinds)]
    assert all(n <= 3 for kind, n in runs if kind == "code")
    assert all(n == 1 for kind, n in runs if kind == "markdown")

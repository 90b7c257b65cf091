import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_on_disk_is_installed():
    places = {"remat": "remat", "policies": "remat.policies", "models": "remat.models"}
    found = set()
    for folder, name in places.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            if any(part.is_symlink() for part in init.parents):
                continue
            inside = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join((name, *inside)))
    assert found == set(SETTINGS["tool"]["setuptools"]["packages"])


def test_import_stays_light_and_leaves_the_environment_alone():
    code = (
        "import os, sys; before = dict(os.environ); import remat; "
        "changed = set(before.items()) ^ set(os.environ.items()); "
        # jax itself sets these two when it is imported.
        "jaxs = {'TF_CPP_MIN_LOG_LEVEL', 'KMP_INIT_AT_FORK'}; "
        "changed = {k for k, _ in changed} - jaxs; "
        "heavy = {'flax', 'plotly', 'rich', 'typer'} & set(sys.modules); "
        "print(sorted(changed), sorted(heavy))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "[] []"


@pytest.mark.slow
def test_the_wheel_works_beside_folders_of_the_same_names(tmp_path):
    run = lambda *args, **kw: subprocess.run(args, check=True, **kw)  # noqa: E731
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    run(sys.executable, "-m", "venv", "--system-site-packages", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--ignore-installed", wheel)
    work = tmp_path / "work"
    for folder in ("models", "policies"):
        (work / folder).mkdir(parents=True)
        (work / folder / "__init__.py").write_text("mine = True")
    code = (
        "import models, policies, remat, remat.models, remat.policies; "
        "assert models.mine and policies.mine; "
        "assert 'site-packages' in remat.policies.__file__"
    )
    run(python, "-c", code, cwd=work)

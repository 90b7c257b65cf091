"""The examples in the docstrings, and what importing the policies brings in."""

import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest

from remat import policies

MODULES = ["remat.policies"] + [
    f"remat.policies.{module.name}"
    for module in pkgutil.iter_modules(policies.__path__)
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_every_maker_has_an_example_or_is_jaxs():
    for name, make in policies.makers().items():
        if not make.__module__.endswith("_jax_names"):
            assert ">>>" in (make.__doc__ or ""), name


def test_import_brings_in_jax_alone():
    code = (
        "import sys, remat.policies; "
        "print([m for m in ('flax', 'rich', 'plotly', 'typer') if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"

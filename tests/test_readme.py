"""What the README says is what the library does: every command and snippet of it."""

import contextlib
import importlib.metadata
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import typer
import yaml
from flax import linen as nn

import remat
from remat._cli._examples import EXAMPLES
from remat.cli import app
from tests.benchmarks import __main__ as benchmarks
from tests.benchmarks import readme
from tests.helpers import stable_id

TEXT = readme.README.read_text()
PROJECT = tomllib.loads((readme.ROOT / "pyproject.toml").read_text())
DOCUMENTS = (
    *("README.md", "CONTRIBUTING.md"),
    *("docs/how_it_works.md", "docs/sharding.md", "docs/report_schema.md"),
    *("docs/training.md", "docs/ci.md"),
)


def written_commands(text: str) -> list[str]:
    """Lines of shell blocks and indented blocks, and commands within sentences."""
    fenced = re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL)
    blocks = "\n".join(b for kind, b in fenced if kind in ("", "sh", "bash", "yaml"))
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    indented = re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE)
    lines = [*blocks.splitlines(), *inline, *indented]
    parts = (part.strip() for line in lines for part in line.split("&&"))
    known = ("remat ", "pip ", "pytest", "python -m ")
    return list(dict.fromkeys(part for part in parts if part.startswith(known)))


COMMANDS = [
    (name, command)
    for name in DOCUMENTS
    for command in written_commands((readme.ROOT / name).read_text())
]
GROUP: Any = typer.main.get_command(app)
CLI = (sys.executable, "-c", "from remat.cli import main; main()")
OURS = [c for c in readme.block(TEXT, "commands").splitlines() if c]


def parse(command: str) -> None:
    """Raises where the command line is none of ours."""
    program, *args = shlex.split(command, comments=True)
    if program == "remat":
        parse_remat(args)
    elif program == "pip":
        for extra in re.findall(r"\[([\w,]+)\]", command):
            assert extra in PROJECT["project"]["optional-dependencies"], command
    elif program == "pytest":
        known = [
            m.split(":")[0] for m in PROJECT["tool"]["pytest"]["ini_options"]["markers"]
        ]
        assert "-m" not in args or args[args.index("-m") + 1] in known, command
    else:
        assert args[1].startswith("tests.benchmarks"), command
        names = [args[1].removeprefix("tests.benchmarks").lstrip("."), *args[2:3]]
        named = {name for name in names if name and name[0] != "-"}
        assert named <= set(benchmarks.benchmarks()), command


def parse_remat(args: list[str]) -> None:
    if args in (["--help"], []):
        return
    context = GROUP.make_context("remat", list(args))
    name, command, rest = GROUP.resolve_command(context, args)
    try:
        command.make_context(name, rest, parent=context)
    except Exception as error:
        # A sentence may name a command without its arguments, an option without its.
        if type(error).__name__ not in ("MissingParameter", "BadOptionUsage"):
            raise


@pytest.mark.parametrize(("document", "command"), COMMANDS, ids=stable_id)
def test_commands_can_be_parsed(document, command):
    parse(command)


def test_commands_are_found():
    found = [command for name, command in COMMANDS if name == "README.md"]
    assert set(OURS) <= set(found)
    assert "remat compare gpt2 --target v5e" in found
    assert any(
        command.startswith("python -m tests.benchmarks.gpu") for command in found
    )
    with pytest.raises(Exception, match=r"(?i)no such option"):
        parse("remat compare gpt2 --tarket v5e")


@pytest.mark.parametrize("command", sorted(EXAMPLES))
def test_help_ends_with_examples(command):
    for line in EXAMPLES[command]:
        parse(line)
    assert EXAMPLES[command][0] in GROUP.commands[command].epilog


def test_every_command_has_examples():
    assert set(EXAMPLES) == set(GROUP.commands)


def test_the_example_prints_what_the_readme_shows():
    printed = readme.output_of(TEXT)
    shown = readme.block(TEXT, "output")
    figures = re.compile(r"'(\w+)': '(\d+) MiB'")
    expected, given = dict(figures.findall(shown)), dict(figures.findall(printed))
    assert list(expected) == list(given) == ["none", "save_dots", "nothing"]
    if importlib.metadata.version("jax") >= "0.12":
        for policy, size in expected.items():
            assert int(given[policy]) == pytest.approx(int(size), rel=0.05)


def test_the_snippet_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_snippet(readme.block(TEXT, "snippet").replace('"h100"', '"cpu"'))


@pytest.mark.slow
def test_the_snippet_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_snippet(readme.block(TEXT, "snippet"))


def run_snippet(code: str) -> None:
    """Runs it with a block, a loss and a scan's body of the reader's."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(x)

    def layer(x, w):
        return jnp.tanh(jnp.sin(x @ w) @ w)

    def loss(w, x):
        return jax.checkpoint(layer)(jax.checkpoint(layer)(x, w), w).sum()

    def deep(ws, x):
        return jax.lax.scan(lambda h, w: (layer(h, w), None), x, ws)[0].sum()

    shape = jax.ShapeDtypeStruct((64, 64), "float32")
    names = {
        **{"jax": jax, "jnp": jnp, "nn": nn, "remat": remat, "Block": Block},
        **{"loss": loss, "args": (shape, shape), "deep": deep},
        **{"body": lambda c, x: (jnp.sin(c * x), c), "h": 1.0, "xs": jnp.ones(16)},
    }
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, "README.md", "exec"), names)
    assert jax.eval_shape(names["step"], shape, shape)[1].shape == shape.shape
    assert names["ys"].shape == (16,)
    stacked = jax.ShapeDtypeStruct((4, 64, 64), "float32")
    assert [r.times for r in remat.find_regions(names["deep"], stacked, shape)] == [4]


@pytest.mark.slow
def test_the_commands_run_one_after_the_other(tmp_path):
    readme.unpack(TEXT, tmp_path)
    for command in OURS:
        done = subprocess.run(
            [*CLI, *shlex.split(command)[1:]],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(readme.ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    assert {"report.html", "plan.json"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.slow
def test_the_test_of_a_users_own_passes(tmp_path):
    readme.unpack(TEXT, tmp_path)
    readme.unpack((readme.ROOT / "docs/ci.md").read_text(), tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{readme.ROOT}{os.pathsep}{tmp_path}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_workflow_is_one():
    text = (readme.ROOT / "docs/ci.md").read_text()
    (source,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    steps = yaml.safe_load(source)["jobs"]["plan"]["steps"]
    install, check = steps[-1]["run"].splitlines()
    assert check in OURS
    assert PROJECT["project"]["urls"]["Source"] in install


def test_labels_are_spread():
    assert readme.spread([10, 12, 90], 14, 300) == [10, 24, 90]
    assert readme.spread([280, 290, 295], 14, 300) == [272, 286, 300]


def test_the_tables_are_what_the_results_say():
    assert readme.quick(TEXT) == TEXT


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    path = readme.ROOT / name
    prose = re.sub(r"```.*?```|`[^`\n]+`", "", path.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", prose):
        assert (path.parent / link).exists(), link

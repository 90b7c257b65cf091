"""The command, run as a user runs it: in processes of its own."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

MINE = """
    import jax, jax.numpy as jnp
    def layer(x, w): return x + jnp.tanh(jnp.sin(x @ w[0]) @ w[1])
    def loss(ws, x):
        for w in ws: x = jax.checkpoint(layer)(x, w)
        return (x ** 2).mean()
    def make(batch=64):
        s = jax.ShapeDtypeStruct
        return loss, (s((3, 2, 16, 16), jnp.float32), s((batch, 16), jnp.float32))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    (folder / "mine.py").write_text(textwrap.dedent(MINE))
    command = [sys.executable, "-c", "from remat.cli import main; main()"]
    # As a fresh shell has it: without what the tests set for themselves.
    noise = ("JAX_", "TPU_", "XLA_", "TF_", "ALLOW_MULTIPLE")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(noise)}

    def run(*args, cwd=folder):
        return subprocess.run(
            [*command, *args], cwd=cwd, env=clean, capture_output=True, text=True
        )

    return run


def test_compare_writes_a_table_and_json_and_no_noise(run, tmp_path):
    path = tmp_path / "c.json"
    done = run(
        *("compare", "mine:make", "--target", "h100", "--no-optimizer"),
        *("--policies", "none,nothing,save_names(absent)", "--json", str(path)),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "mine:make on h100" in done.stdout and "nothing" in done.stdout
    data = json.loads(path.read_text())
    assert [row["policy"] for row in data["rows"]] == ["none", "nothing"]
    assert len(data["skipped"]) == 1
    assert data["options"]["optimizer"] is False


def test_fit_finds_the_largest_batch(run, tmp_path):
    path = tmp_path / "f.json"
    done = run(
        *("fit", "mine:make", "--target", "cpu", "--max", "batch"),
        *("--policies", "nothing", "--budget", "1MiB", "--json", str(path)),
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(path.read_text())["rows"]
    assert row["peak_bytes"] <= 2**20 and row["largest"] > 64


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (("compare", "gpt3", "--target", "v5e"), "gpt2"),
        (("compare", "gpt2-tiny", "--policies", "save_dotz"), "save_dots"),
        (("compare", "gpt2-tiny", "--json", "/nonexistent/x.json"), "/nonexistent"),
        (("fit", "gpt2-tiny", "--max", "width"), "batch or seq"),
    ],
)
def test_wrong_input_is_one_clear_line(run, args, match):
    done = run(*args)
    assert done.returncode == 2
    assert match in done.stderr
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


def test_lists(run):
    done = run("targets")
    assert done.returncode == 0 and done.stderr == ""
    assert "v5e" in done.stdout and "h100" in done.stdout
    done = run("policies", "save_dots")
    assert done.returncode == 0 and "saves" in done.stdout


@pytest.mark.slow
def test_regions_are_made_first(run, tmp_path):
    (tmp_path / "plain.py").write_text(
        textwrap.dedent(MINE).replace("jax.checkpoint(layer)(x, w)", SCOPED)
    )
    done = run(
        *("compare", "plain:make", "--target", "cpu", "--no-optimizer"),
        *("--policies", "none,nothing", "--regions", "layer"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "nothing" in done.stdout


SCOPED = "jax.named_scope('layer')(layer)(x, w)"


def test_a_compiler_that_ends_the_process_is_heard():
    code = "import os\nfrom remat._cli._frame import command\n"
    code += "with command('cpu', False):\n    os.abort()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGABRT
    assert "Aborted" in done.stderr

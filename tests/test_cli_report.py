"""`remat report`, run as a user runs it."""

import json
import subprocess
import sys

import pytest

from tests.hlo_programs import donated, proto_of, stacked

MINE = """
import jax, jax.numpy as jnp
def layer(x, w): return x + jnp.tanh(jnp.sin(x @ w[0]) @ w[1])
def loss(ws, x):
    for w in ws: x = jax.checkpoint(layer, prevent_cse=False)(x, w)
    return (x ** 2).mean()
def make():
    s = jax.ShapeDtypeStruct
    return loss, (s((3, 2, 64, 64), jnp.float32), s((2048, 64), jnp.float32))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("report")
    (path / "mine.py").write_text(MINE)
    for name, program in (("a", stacked), ("b", donated)):
        file = path / f"{name}.after_optimizations.hlo.pb"
        file.write_bytes(proto_of(program("cpu")))
    return path


def run(folder, *args):
    command = [sys.executable, "-c", "from remat.cli import main; main()", "report"]
    return subprocess.run([*command, *args], cwd=folder, capture_output=True, text=True)


def test_a_dump_is_shown_and_written(folder):
    files = ["--json", "r.json", "--html", "r.html", "--pprof", "r.pb.gz"]
    dumps = [
        "a.after_optimizations.hlo.pb",
        "--against",
        "b.after_optimizations.hlo.pb",
    ]
    done = run(folder, *dumps, *files)
    assert done.returncode == 0, done.stderr
    assert "jit_stacked_loss on cpu" in done.stdout and "wrote r.html" in done.stdout
    data = json.loads((folder / "r.json").read_text())
    assert data["diff"]["after"]["peak_bytes"] == data["peak_bytes"]
    assert "What changed" in (folder / "r.html").read_text()
    assert (folder / "r.pb.gz").read_bytes()[:2] == b"\x1f\x8b"


def test_a_model_is_compiled_and_explained(folder):
    done = run(folder, "mine:make", "--target", "cpu", "--no-optimizer")
    assert done.returncode == 0, done.stderr
    assert "XLA removed the recompute" in done.stdout
    assert "Set prevent_cse=True" in done.stdout


def test_a_missing_file_is_one_clear_line(folder):
    done = run(folder, "absent.hlo.pb")
    assert done.returncode == 2
    assert done.stderr == "error: no such file or folder: absent.hlo.pb\n"

"""Code generation for GPUs, also with the machine's CUDA toolkit out of sight."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import remat
from remat._compile._compile import compile_lowered
from remat._compile._lower import lower
from remat._targets import _plugins

COMPILE = """
import jax, jax.numpy as jnp, remat
from remat._compile._compile import compile_lowered
from remat._compile._lower import lower
t = remat.target({name!r})
x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
fn = jax.grad(lambda x: jnp.tanh(jnp.tanh(x @ x) @ x).sum())
program = compile_lowered(lower(fn, (x,), {{}}, t), t)
assert program.hlo_proto and program.exact
print(program.stats is not None, (program.codegen_error or "")[:60])
"""
TOOLKITS = [path for path in Path("/usr/local").glob("cuda*") if path.is_dir()]


def without(paths: list[Path], name: str) -> str:
    """What COMPILE prints in a process that sees nothing under `paths`."""
    if not shutil.which("unshare"):
        pytest.skip("no unshare on this machine")
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("unshare -m is not permitted here")
    hide = "; ".join(f"mount -t tmpfs none {path.resolve()}" for path in paths)
    script = f'{hide or "true"}; exec {sys.executable} -c "$PROGRAM"'
    program = COMPILE.format(name=name)
    # No ptxas but the wheel's: the machine's is on the path.
    env = {**os.environ, "PROGRAM": program, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", script], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wheel() -> list[Path]:
    import importlib.util

    found = importlib.util.find_spec("nvidia.cuda_nvcc")
    assert found is not None and found.submodule_search_locations is not None
    return [Path(found.submodule_search_locations[0])]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h100", "v100"])
def test_compiles_without_a_cuda_toolkit(name):
    assert without(TOOLKITS, name) == "True"


@pytest.mark.slow
def test_buffers_are_there_where_code_generation_fails():
    said = without([*TOOLKITS, *wheel()], "h100")
    assert said.startswith("False UNAVAILABLE: No PTX compilation provider")


IN_A_PLAIN_PROCESS = """
import jax, jax.numpy as jnp, remat
from remat._compile._compile import compile_lowered
from remat._compile._lower import lower
t = remat.target("t4")

def program(fn, *shapes):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return compile_lowered(lower(fn, args, {}, t), t)

# A kernel of JAX's own, and a program of which XLA would say that it is too large.
assert program(lambda x: jnp.linalg.qr(x)[0], (64, 64)).codegen_error is None
large = program(lambda x, w: jnp.tanh(x @ w) @ w, (1 << 21, 4096), (4096, 4096))
assert large.stats.argument_bytes > t.memory_bytes
"""


def test_in_a_plain_process():
    prepared = {*_plugins._PROCESS_ENVIRONMENT, "XLA_FLAGS"}
    env = {k: v for k, v in os.environ.items() if k not in prepared}
    command = [sys.executable, "-c", IN_A_PLAIN_PROCESS]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    said_by_import = ("cudart_stub", "before absl::InitializeLog")
    lines = done.stderr.splitlines()
    assert [line for line in lines if not any(s in line for s in said_by_import)] == []


@pytest.mark.parametrize("name", ["v100", "t4", "b200"])
def test_a_toolkit_of_another_age_does_not_matter(monkeypatch, name):
    for path in TOOLKITS:
        monkeypatch.setenv("CUDA_ROOT", str(path))
    square = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    target = remat.target(name)
    lowered = lower(lambda w, x: jnp.tanh(x @ w).sum(), (square, square), {}, target)
    program = compile_lowered(lowered, target)
    assert program.stats is not None and program.codegen_error is None

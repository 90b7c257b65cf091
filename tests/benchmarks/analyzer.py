"""Time and memory of reading and reporting large compiled programs.

    python -m tests.benchmarks.analyzer

Makes two XLA dumps, of some 10 MB and some 100 MB: AdamW steps of unrolled layers, each
under `jax.checkpoint`, the large one of 80 layers and 7 microbatches. XLA writes the
dump before it generates code, so the compile is ended there. Each dump is then read
and reported in a process of its own. Prints a table and writes it to
`tests/benchmarks/results/analyzer.json`.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "analyzer.json"
SIZES = {"10 MB": (56, 1), "100 MB": (80, 7)}
"""Layers and microbatches of each program."""
D, B, T = 256, 2, 128


def step_of(n_layers, n_microbatches):
    """The training step and the shapes of its arguments."""
    import jax
    import jax.numpy as jnp
    import optax

    def norm(x, scale):
        x32 = x.astype(jnp.float32)
        centred = x32 - x32.mean(-1, keepdims=True)
        variance = (centred**2).mean(-1, keepdims=True)
        return (centred * jax.lax.rsqrt(variance + 1e-6) * scale).astype(x.dtype)

    def block(h, p):
        qkv = (norm(h, p["norm_1"]) @ p["qkv"]).reshape(B, T, 3, 4, D // 4)
        q, k, v = (qkv[:, :, i] for i in range(3))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / 8
        scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e9)
        weights = jax.nn.softmax(scores).astype(h.dtype)
        h += jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(B, T, D) @ p["out"]
        return h + jax.nn.gelu(norm(h, p["norm_2"]) @ p["wi"] + p["b"]) @ p["wo"]

    def loss(layers, x):
        for i, p in enumerate(layers):
            with jax.named_scope(f"layer_{i}"):
                x = jax.checkpoint(block)(x, p)
        return (x.astype(jnp.float32) ** 2).mean()

    def shape(*dimensions, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dimensions, dtype)

    layer = {
        "norm_1": shape(D, dtype=jnp.float32),
        "norm_2": shape(D, dtype=jnp.float32),
        "qkv": shape(D, 3 * D),
        "out": shape(D, D),
        "wi": shape(D, 4 * D),
        "b": shape(4 * D),
        "wo": shape(4 * D, D),
    }
    optimizer = optax.adamw(1e-3)

    def step(layers, state, x):
        total = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), layers)
        for i in range(n_microbatches):
            with jax.named_scope(f"microbatch_{i}"):
                total = jax.tree.map(jnp.add, total, jax.grad(loss)(layers, x[i]))
        updates, state = optimizer.update(total, state, layers)
        return optax.apply_updates(layers, updates), state

    layers = [layer] * n_layers
    state = jax.eval_shape(optimizer.init, layers)
    return step, (layers, state, shape(n_microbatches, B, T, D))


def compile_step(n_layers, n_microbatches):
    """Compiles for this machine's CPU; XLA's flags say where to dump."""
    import jax

    step, args = step_of(n_layers, n_microbatches)
    jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()


def dump(folder, n_layers, n_microbatches):
    """The dump of a program, and the seconds until it was written."""
    flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_proto"
    flags += " --xla_dump_hlo_module_re=jit_step"
    command = f"compile_step({n_layers}, {n_microbatches})"
    start = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-c", f"from {__spec__.name} import *; {command}"],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
    )
    try:
        while child.poll() is None and not _whole(folder):
            time.sleep(1)
    finally:
        child.kill()
        child.wait()
    path = _whole(folder)
    assert path is not None, "the compile left no dump"
    return path, time.perf_counter() - start


def _whole(folder):
    """The dump with the buffer assignment, once it is written to its end."""
    from remat._compile._dump import has_buffer_assignment

    for file in Path(folder).glob("*after_optimizations.hlo.pb"):
        size = file.stat().st_size
        time.sleep(1)
        if size and size == file.stat().st_size:
            return file if has_buffer_assignment(file.read_bytes()) else None
    return None


def report(path):
    """Reads and reports a dump; prints what it took as JSON."""
    import remat

    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    made = remat.report_from_dump(path, target="cpu")
    wall_s = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    figures = {
        "wall_s": round(wall_s, 2),
        "cpu_s": round(after.ru_utime - before.ru_utime, 2),
        "process_peak_mb": round(after.ru_maxrss * 1024 / 1e6),
        "n_buffers": len(made.buffers),
        "html_mb": round(len(made.to_html()) / 1e6, 2),
    }
    print(json.dumps(figures))


def measure(name):
    """Makes the dump of one size and reports it in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path, made_s = dump(folder, *SIZES[name])
        print(f"{name}: dumped in {made_s:.0f} s", file=sys.stderr)
        command = f"from {__spec__.name} import *; report({str(path)!r})"
        done = subprocess.run(
            [sys.executable, "-c", command], check=True, capture_output=True, text=True
        )
        layers, microbatches = SIZES[name]
        return {
            "layers": layers,
            "microbatches": microbatches,
            "proto_mb": round(path.stat().st_size / 1e6, 1),
            **json.loads(done.stdout.splitlines()[-1]),
        }


def main():
    parser = argparse.ArgumentParser(description="Time of large reports.")
    parser.add_argument("--only", choices=SIZES, help="one of the sizes")
    only = parser.parse_args().only
    found = {name: measure(name) for name in SIZES if only in (None, name)}
    columns = list(next(iter(found.values())))
    print("| program | " + " | ".join(columns) + " |")
    print("|---|" + "---:|" * len(columns))
    for name, row in found.items():
        print(f"| {name} | " + " | ".join(f"{row[c]:,}" for c in columns) + " |")
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({**known, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

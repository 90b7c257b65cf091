"""The planner's choices for one Llama-like block, beside PyTorch's partitioner.

PyTorch 2.13's min-cut partitioner with its knapsack (`activation_memory_budget`, dp and
ilp solvers agree) was run on the same block: d 1024, 16 heads, batch 4, T 1024, bf16,
RMSNorm, attention with explicit softmax, SwiGLU of 4 d; its forward pass takes 154.6
GFLOP in matrix products. Bytes are all that the backward pass holds for the block, its
input and the parameters not counted.

    python -m tests.benchmarks.pytorch_partitioner
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from remat._compare._comparison import versions
from remat._plan._graph import Graph, build_graph
from remat._plan._prices import least_flops
from remat._plan._solve import Choice, Solver
from remat._regions._with_policy import find_regions
from remat._targets._target import target

FILE = Path(__file__).parent / "results" / "pytorch_partitioner.json"
TORCH = "2.13"
PYTORCH = {18: 111.7, 38: 94.5, 58: 77.3, 68: 68.7, 108: 34.4, 136: 8.6, 264: 0.0}
"""MiB saved to GFLOP recomputed, as PyTorch chooses."""
B, T, D, H, F = 4, 1024, 1024, 16, 4096


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + 1e-6)).astype(x.dtype) * scale


def block(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """One decoder layer, [B, T, D] to [B, T, D]."""
    y = rms_norm(x, params["attention_norm"])
    q, k, v = ((y @ params[n]).reshape(B, T, H, D // H) for n in ("wq", "wk", "wv"))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (D // H) ** -0.5
    causal = jnp.tril(jnp.ones((T, T), bool))
    scores = jnp.where(causal, scores.astype(jnp.float32), -jnp.inf)
    probs = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    context = jnp.einsum("bhqk,bkhd->bqhd", probs, v).reshape(B, T, D)
    x = x + context @ params["wo"]
    y = rms_norm(x, params["mlp_norm"])
    return x + (jax.nn.silu(y @ params["gate"]) * (y @ params["up"])) @ params["down"]


def arguments() -> tuple[dict[str, Any], Any]:
    """Shapes of the block's parameters and input."""
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("wq", "wk", "wv", "wo"), (D, D))
    shapes |= dict(gate=(D, F), up=(D, F), down=(F, D))
    shapes |= dict(attention_norm=(D,), mlp_norm=(D,))
    params = {n: jax.ShapeDtypeStruct(s, jnp.bfloat16) for n, s in shapes.items()}
    return params, jax.ShapeDtypeStruct((B, T, D), jnp.bfloat16)


def block_graph() -> Graph:
    """The block's graph, with times of an H100."""
    (region,) = find_regions(jax.checkpoint(block), *arguments())
    return build_graph(region.jaxpr, target("h100"))


def compare(graph: Graph) -> dict[int, Choice]:
    """Our choice at each number of MiB that PyTorch's curve has a point at."""
    solver = Solver(graph, least_flops())
    return {mib: solver.solve(mib * 2**20) for mib in PYTORCH}


def measure() -> dict[str, Any]:
    """Both choices at each budget, as the file holds them."""
    graph = block_graph()
    rows = [
        {
            "budget_mib": mib,
            "pytorch_gflop": PYTORCH[mib],
            "kept_mib": round(choice.bytes / 2**20, 1),
            "gflop": round(choice.recompute_matmul_flops / 1e9, 1),
        }
        for mib, choice in compare(graph).items()
    ]
    return {
        "schema": "remat.benchmark.pytorch_partitioner/1",
        "command": "python -m tests.benchmarks pytorch_partitioner",
        "versions": {**versions(), "torch": TORCH},
        "forward_gflop": round(graph.forward_matmul_flops / 1e9, 1),
        "rows": rows,
    }


def markdown(found: Mapping[str, Any]) -> str:
    """The table, with what it is of."""
    of = found["versions"]
    lines = [
        "# PyTorch's partitioner and this planner on one block",
        "",
        f"GFLOP of matrix products recomputed, of {found['forward_gflop']} in a "
        f"forward pass, where so many MiB may be kept. torch {of['torch']}, jax "
        f"{of['jax']}; `{found['command']}`.",
        "",
        "| may keep | PyTorch recomputes | `remat` recomputes | and keeps |",
        "|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['budget_mib']} MiB | {row['pytorch_gflop']} | {row['gflop']} "
        f"| {row['kept_mib']} MiB |"
        for row in found["rows"]
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes both files and prints the table."""
    found = measure()
    FILE.write_text(json.dumps(found, indent=1) + "\n")
    FILE.with_suffix(".md").write_text(markdown(found))
    print(markdown(found))


if __name__ == "__main__":
    main()

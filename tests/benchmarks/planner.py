"""How long the planner takes, compiles apart: `python -m tests.benchmarks.planner`.

GPT-2's region, a region of more than 5,000 equations, and a model of 80 unrolled
layers: find the regions, build the graph, solve it; for the 80 layers also trace and
lower the step under the choices found, as the closed loop does before each compile.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import remat
from remat._compare._measure import Setup, prepare
from remat._compare._step import build_step
from remat._plan._apply import apply_treatments, table_of
from remat._plan._graph import build_graph
from remat._plan._kinds import by_layer, find_kinds, same, solve_all
from remat._plan._prices import least_recompute
from remat._plan._solve import Solver
from remat._regions._with_policy import find_regions

TARGET = "h100"


def timed(what: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a function and prints its seconds of wall and of processor time."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = fn(*args, **kwargs)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"  {what:34} {wall:7.2f} s   {cpu:7.2f} s of processor", flush=True)
    return result


def region(loss: Callable[..., Any], *args: Any) -> None:
    """One region: its graph, and choices at three budgets."""
    first = timed("find the region", find_regions, loss, *args)[0]
    device = remat.target(TARGET)
    graph = timed("build its graph", build_graph, first.jaxpr, device)
    print(
        f"  {first.n_equations} equations traced, {len(graph.equations)} in the graph"
    )
    solver = timed("presolve", Solver, graph, least_recompute(device))
    size = sum(value.bytes for value in graph.values if value.id)
    for share in (0.1, 0.3, 0.6):
        timed(f"solve at {share:.0%} of all bytes", solver.solve, int(share * size))


def long_region(n_steps: int) -> Callable[..., Any]:
    """A region of some seven equations a step."""

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        for i in range(n_steps):
            x = jnp.tanh(x @ w[i % 8]) + jnp.sin(x) * x
        return x

    return jax.checkpoint(body)


def unrolled(loss: Callable[..., Any], *args: Any) -> None:
    """All that a plan does for many layers between two compiles."""
    device = remat.target(TARGET)
    regions = timed("find the regions", find_regions, loss, *args)
    kinds, _ = timed("kinds", find_kinds, regions, [], device, allow_offload=True)
    print(f"  {len(regions)} regions of {len(kinds)} kinds")
    most = same(kinds, lambda kind: kind.everything).bytes
    for share in (0.1, 0.3, 0.6):
        found = timed(f"solve at {share:.0%}", solve_all, kinds, int(share * most))
    chosen = by_layer(kinds, found).items()
    tables = {index: list(map(table_of, choices)) for index, choices in chosen}
    planned = apply_treatments(loss, lambda regions, layers: tables)
    setup = Setup(target=device, make_step=lambda fn: build_step(fn, args))
    timed("trace and lower the step", prepare, planned, setup)


def main() -> None:
    print(f"for {TARGET}; wall and processor time")
    gpt2 = remat.models.build("gpt2")
    print("GPT-2")
    region(gpt2.loss, *gpt2.args)
    print("a long region")
    x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    w = jax.ShapeDtypeStruct((8, 512, 512), jnp.float32)
    region(long_region(1000), x, w)
    print("80 unrolled layers of Llama")
    llama = remat.models.build("llama-tiny", scan_layers=False, n_layers=80)
    unrolled(llama.loss, *llama.args)


if __name__ == "__main__":
    from remat._targets._target import quiet_environment

    quiet_environment()
    main()

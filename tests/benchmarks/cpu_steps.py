"""Real step times on this CPU against no remat, beside the arithmetic predicted.

    python -m tests.benchmarks.cpu_steps [--model gpt2-tiny] [--rounds 20]

All steps run in one process, one after the other in every round, so that what else the
machine does falls on all alike; figures are medians over rounds of the ratio to `none`
in the same round. The prediction is FLOPs under the policy over FLOPs without; a CPU
takes its own time for what moves memory, so only the order should agree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax

import remat
from remat import models
from remat._compare._comparison import versions
from tests.benchmarks.policies import RESULTS

FILE = RESULTS / "cpu_steps.json"
POLICIES = ("none", "save_dots", "save_dots_no_batch", "save_out_proj", "nothing")
SHAPE: dict[str, Any] = {"n_layers": 6, "d_model": 256, "batch": 4, "seq": 256}
"""Large enough that products of matrices take the time, small enough for seconds."""


def steps(built: models.Built) -> dict[str, Callable[[], None]]:
    """A compiled step for each policy, as a function that runs it and waits."""
    optimizer = optax.adamw(1e-3)
    params = built.init(jax.random.key(0))
    batch = {
        name: jax.random.randint(jax.random.key(1), shape.shape, 0, 256)
        for name, shape in built.args[1].items()
    }
    state = optimizer.init(params)

    def runner(policy: str) -> Callable[[], None]:
        loss = remat.with_policy(built.loss, policy)
        step = jax.jit(models.train_step(loss, optimizer))
        compiled = step.lower(params, state, batch).compile()

        def run() -> None:
            jax.block_until_ready(compiled(params, state, batch))

        return run

    return {policy: runner(policy) for policy in POLICIES}


def ratios(runs: dict[str, Callable[[], None]], n_rounds: int) -> dict[str, float]:
    """The median over rounds of each step's time to that of `none`."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for run in runs.values():
        run()
    for number in range(n_rounds):
        start = number % len(names)
        times = {name: _timed(runs[name]) for name in names[start:] + names[:start]}
        for name, seconds in times.items():
            found[name].append(seconds / times["none"])
    return {name: statistics.median(many) for name, many in found.items()}


def _timed(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def predicted(built: models.Built) -> dict[str, float]:
    """FLOPs of a step under each policy to those without remat."""
    table = remat.compare(
        built.loss,
        *built.args,
        policies=POLICIES,
        target="cpu",
        optimizer=optax.adamw(1e-3),
    )
    return {row.policy: row.flops / table["none"].flops for row in table.rows}


def measure(model: str, shape: dict[str, Any], n_rounds: int) -> dict[str, Any]:
    """Ratios measured and predicted."""
    built = models.build(model, **shape)
    flops = predicted(built)
    times = ratios(steps(built), n_rounds)
    return {
        "schema": "remat.benchmark.cpu_steps/1",
        "command": "python -m tests.benchmarks cpu_steps",
        "versions": dict(versions()),
        "model": model,
        "shape": shape,
        "rounds": n_rounds,
        "rows": [
            {"policy": name, "time_ratio": times[name], "flops_ratio": flops[name]}
            for name in POLICIES
        ],
    }


def main() -> None:
    """Writes the file and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt2-tiny")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, default=FILE)
    given = parser.parse_args()
    found = measure(given.model, SHAPE, given.rounds)
    given.json.parent.mkdir(exist_ok=True)
    given.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{'policy':22} {'time':>6} {'FLOPs':>6}  (against none)")
    for row in found["rows"]:
        print(f"{row['policy']:22} {row['time_ratio']:6.3f} {row['flops_ratio']:6.3f}")


if __name__ == "__main__":
    main()

"""One process of the GPU benchmark: predict a model for a card, or measure one case.

Each case has a process of its own: the allocator's peak is then of one program, and
one that runs out of memory ends itself alone. `tests.benchmarks.gpu` starts them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

ALWAYS_STEPS = 5
MOST_STEPS = 200
LINK_BYTES = 2**28

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"batch": 8, "seq": 1024}),
    "llama": (
        "llama-3.2-1b",
        {"batch": 4, "seq": 2048, "n_layers": 4, "vocab_size": 32768},
    ),
    "gpt2-tiny": ("gpt2-tiny", {}),
    "llama-tiny": ("llama-tiny", {}),
}
"""What a model is called here: its preset, and what of it is changed."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One model under one policy, or under a plan's file."""

    model: str
    policy: str
    """A name, or "plan" and a number for the plan in the same folder."""


def built_model(name: str) -> Any:
    """The model with its loss and shapes."""
    from remat import models

    preset, options = MODELS[name]
    return models.build(preset, **options)


# Predicting, with no use of the card


def predict(model: str, target: str, policies: list[str], out: Path) -> None:
    """Writes the compile-only figures of policies, then plans at their budgets.

    What is known is written after each part, so that a process that is stopped leaves
    what it had.
    """
    from remat._targets._target import quiet_environment

    if target != "cpu":
        quiet_environment()
    import optax

    import remat

    os.nice(5)  # what measures on the card goes first
    built = built_model(model)
    step: dict[str, Any] = {
        "target": target,
        "optimizer": optax.adamw(1e-4),
        "model": model,
    }
    named = [name for name in policies if not name.startswith("plan")]
    # Plans are between these two, so the others can come later.
    ends = [name for name in named if name in ("nothing", "none")] or named
    others = [name for name in named if name not in ends]
    rows: dict[str, Any] = {}
    budgets: dict[str, int] = {}
    for asked, plan in ((ends, "plan1"), (others, "plan2")):
        if asked:
            table = remat.compare(
                built.loss, *built.args, policies=asked, exact=True, **step
            )
            rows |= {row.policy: _predicted(row) for row in table.rows}
            write(out, {"rows": rows, "budgets": budgets})
        budget = _budgets(rows, remat.target(target).available_bytes).get(plan)
        if plan not in policies or budget is None:
            continue
        try:
            made = remat.plan(built.loss, *built.args, budget=budget, **step)
        except remat.PlanError as error:
            print(f"no plan for {budget}: {error}", flush=True)
            continue
        made.save(out.with_name(f"{model}-{plan}.json"), overwrite=True)
        rows[plan], budgets[plan] = _predicted(made), budget
        write(out, {"rows": rows, "budgets": budgets})


def _predicted(row: Any) -> dict[str, Any]:
    fields = ("peak_bytes", "host_bytes", "recompute_flops", "estimated_step_s")
    return {name: _known(getattr(row, name)) for name in fields}


def _known(figure: float | None) -> float | None:
    return None if figure is None or math.isnan(figure) else figure


def _budgets(rows: dict[str, Any], available_bytes: int) -> dict[str, int]:
    """Half and a fifth of the way from the least peak to the most that the card has."""
    peaks = [row["peak_bytes"] for row in rows.values()]
    least, most = min(peaks), min(max(peaks), available_bytes)
    room = most - least
    return {"plan1": least + room // 2, "plan2": least + room // 5} if room > 0 else {}


# Measuring


def measure(case: Case, folder: Path, seconds: float) -> dict[str, Any]:
    """Runs one case on the attached device; with no seconds, compiles it alone."""
    import jax
    import optax

    import remat
    from remat import models

    built = built_model(case.model)
    plan = folder / f"{case.model}-{case.policy}.json"
    if plan.exists():
        loss = remat.Plan.load(plan).apply(built.loss)
    else:
        loss = remat.with_policy(built.loss, case.policy)
    optimizer = optax.adamw(1e-4)
    step = jax.jit(models.train_step(loss, optimizer), donate_argnums=(0, 1))
    params, batch = built.args
    state = jax.eval_shape(optimizer.init, params)
    started = time.perf_counter()
    compiled = step.lower(params, state, batch).compile()
    found = {
        "compile_s": time.perf_counter() - started,
        **_memory_analysis(compiled),
        "peak_before_bytes": _allocated(),
    }
    if seconds:
        found |= _run(compiled, built, optimizer, seconds)
        found |= _link_bandwidth() if found["host_bytes"] else {}
    return found


def _memory_analysis(compiled: Any) -> dict[str, int]:
    stats = compiled.memory_analysis()
    return {
        "argument_bytes": stats.argument_size_in_bytes,
        "output_bytes": stats.output_size_in_bytes,
        "alias_bytes": stats.alias_size_in_bytes,
        "temp_bytes": stats.temp_size_in_bytes,
        "host_bytes": stats.host_temp_size_in_bytes,
        "analysis_peak_bytes": stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes,
    }


def _allocated() -> int | None:
    """The allocator's peak so far; a CPU has none."""
    import jax

    stats = jax.devices()[0].memory_stats()
    return stats and stats["peak_bytes_in_use"]


def _run(compiled: Any, built: Any, optimizer: Any, seconds: float) -> dict[str, Any]:
    """Steps one after the other, the first of them warm-up."""
    import jax

    params = jax.jit(built.init)(jax.random.key(0))
    state = jax.jit(optimizer.init)(params)
    batch = {
        name: jax.random.randint(jax.random.key(1), shape.shape, 0, 256)
        for name, shape in built.args[1].items()
    }
    before = _allocated()
    times: list[float] = []
    value = jax.numpy.zeros(())
    deadline = time.perf_counter() + seconds
    while len(times) < 2 * ALWAYS_STEPS or (
        time.perf_counter() < deadline and len(times) < MOST_STEPS
    ):
        started = time.perf_counter()
        params, state, value = compiled(params, state, batch)
        value.block_until_ready()
        times.append(time.perf_counter() - started)
    warm = sorted(times[ALWAYS_STEPS:])
    return {
        "loss": _known(float(value)),
        "peak_before_bytes": before,
        "measured_peak_bytes": _allocated(),
        "step_s": statistics.median(warm),
        "step_spread_s": warm[len(warm) * 3 // 4] - warm[len(warm) // 4],
        "n_steps": len(warm),
    }


def _link_bandwidth() -> dict[str, float]:
    """Bytes a second to the host's pinned memory and back, alone on the link."""
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0]
    near = jax.sharding.SingleDeviceSharding(device)
    far = near.with_memory_kind("pinned_host")
    x = jax.device_put(jnp.ones(LINK_BYTES // 4, jnp.float32), near)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        away = jax.device_put(x, far).block_until_ready()
        jax.device_put(away, near).block_until_ready()
        times.append(time.perf_counter() - started)
    return {"link_bytes_per_s": 2 * LINK_BYTES / min(times)}


# The process


def write(path: Path, data: Any) -> None:
    """Replaces a file in one step, so that no reader sees half of it."""
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(partial, path)


def device() -> dict[str, Any]:
    """What is attached, and the versions of what takes part."""
    import jax

    from remat._compare._comparison import versions

    first = jax.devices()[0]
    stats = first.memory_stats() or {}
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "limit_bytes": stats.get("bytes_limit"),
        "versions": dict(versions()),
    }


def main() -> None:
    """Does one part and writes one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("device", "predict", "measure"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model")
    parser.add_argument("--target")
    parser.add_argument("--policies", default="")
    parser.add_argument("--seconds", type=float, default=0.0)
    given = parser.parse_args()
    if given.part == "device":
        write(given.out, device())
    elif given.part == "predict":
        policies = given.policies.split(",")
        predict(given.model, given.target, policies, given.out)
    else:
        case = Case(model=given.model, policy=given.policies)
        try:
            found = measure(case, given.out.parent, given.seconds)
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            found = {"out_of_memory": str(error).partition("\n")[0]}
        write(given.out, found)


if __name__ == "__main__":
    main()

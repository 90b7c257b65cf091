"""Plans held against every named policy: `python -m tests.benchmarks.dominance`.

For each model and target the named policies are compiled; each compiled peak is the
budget of a plan, and the plan's compiled figures stand beside the policy's. Takes
minutes a row: name models and targets to choose.

    python -m tests.benchmarks.dominance --models gpt2 --targets v5e,h100 --json d.json
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import optax

import remat
from remat import models
from remat._compare._compare import DEFAULT_POLICIES
from remat._compare._comparison import Row
from remat._sizes import format_bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Duel:
    """One named policy, and the plan with its peak for a budget."""

    model: str
    target: str
    policy: str
    policy_peak_bytes: int
    plan_peak_bytes: int | None
    """None where no plan fits."""
    policy_recompute_flops: int
    plan_recompute_flops: int | None
    policy_step_s: float | None
    plan_step_s: float | None
    n_compiles: int | None

    @property
    def holds(self) -> bool:
        """Whether the plan is no worse in memory, recompute and estimated time."""
        if self.plan_peak_bytes is None or self.plan_recompute_flops is None:
            return False
        return (
            self.plan_peak_bytes <= self.policy_peak_bytes
            and self.plan_recompute_flops <= self.policy_recompute_flops
            and (self.plan_step_s or 0.0) <= (self.policy_step_s or 0.0) * (1 + 1e-3)
        )


def duels(model: str, target: str) -> Iterator[Duel]:
    """One duel for each compiled peak among the named policies."""
    built = models.build(model)
    options: dict[str, Any] = {"target": target, "optimizer": optax.adamw(1e-3)}
    table = remat.compare(
        built.loss, *built.args, policies=DEFAULT_POLICIES, exact=True, **options
    )
    for row in {row.peak_bytes: row for row in table.rows}.values():
        yield _duel(built, model, target, row, options)


def _duel(
    built: Any, model: str, target: str, row: Row, options: dict[str, Any]
) -> Duel:
    try:
        plan = remat.plan(built.loss, *built.args, budget=row.peak_bytes, **options)
    except remat.PlanError:
        plan = None
    return Duel(
        model=model,
        target=target,
        policy=row.policy,
        policy_peak_bytes=row.peak_bytes,
        plan_peak_bytes=plan and plan.peak_bytes,
        policy_recompute_flops=row.recompute_flops,
        plan_recompute_flops=plan and plan.recompute_flops,
        policy_step_s=row.estimated_step_s,
        plan_step_s=plan and plan.estimated_step_s,
        n_compiles=plan and plan.n_compiles,
    )


def _line(duel: Duel) -> str:
    ours = "–" if duel.plan_peak_bytes is None else format_bytes(duel.plan_peak_bytes)
    flops = duel.plan_recompute_flops
    return (
        f"{duel.model:10} {duel.target:10} {duel.policy:24} "
        f"{format_bytes(duel.policy_peak_bytes):>10} {ours:>10}  "
        f"{duel.policy_recompute_flops / 1e9:9.1f} "
        f"{'–' if flops is None else f'{flops / 1e9:.1f}':>9}  "
        f"{'holds' if duel.holds else 'does not hold'}"
    )


def main() -> None:
    """Prints a line for each duel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="gpt2")
    parser.add_argument("--targets", default="v5e,h100")
    parser.add_argument("--json")
    given = parser.parse_args()
    found = []
    for model in given.models.split(","):
        for target in given.targets.split(","):
            for duel in duels(model, target):
                print(_line(duel), flush=True)
                found.append(duel)
    print(f"{sum(duel.holds for duel in found)} of {len(found)} hold")
    if given.json:
        data = [{**dataclasses.asdict(d), "holds": d.holds} for d in found]
        with open(given.json, "w") as file:
            json.dump(data, file, indent=2)


if __name__ == "__main__":
    from remat._targets._target import quiet_environment

    quiet_environment()
    main()

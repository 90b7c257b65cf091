"""Plans held against every named policy: `python -m tests.benchmarks.dominance`.

For each model and target every named policy is compiled, and at most ten points of the
planner's frontier: the ends, and choices that the model takes for better than policies.
Then each policy is held against the points by compiled figures alone: peak, FLOPs
computed twice, estimated time of a step. What no point beats is itself a candidate of
the planner, so a plan there equals it. With `--plans`, the closed
loop also makes a plan for each policy, with that policy's peak for a budget.

Takes hours for all. Each finished compile is written to `results/dominance/` at once,
and a run goes on where the last one ended.

    python -m tests.benchmarks.dominance --models gpt2 --targets h100,v5e --plans
    python -m tests.benchmarks.dominance --table   # only the Markdown, from results
"""

import argparse
import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import optax

import remat
from remat._compare._measure import forward_flops, prepare
from remat._files import write_text
from remat._plan._choose import Allotment
from remat._plan._kinds import by_kind_sum, estimated_s, faster, solve_all
from remat._plan._meter import Candidate, Measured
from remat._plan._named import Named, named_candidates
from remat._plan._opened import Opened, open_loss
from remat._regions._with_policy import with_policy
from tests.benchmarks.dominance_table import compiled, markdown

RESULTS = Path(__file__).parent / "results" / "dominance"
TABLE = RESULTS.parent / "dominance.md"
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2-xl": {},
    "llama-3.2-1b": {},
    "vit-b16-1024": {},
    "mixtral-8x7b": {"n_layers": 4},
}
"""Presets, and how they differ from them: four of Mixtral's layers fit a device."""
TARGETS = ("v5e", "v5p", "v6e", "a100-80gb", "h100")
MAX_POINTS = 10
"""Compiled points of a frontier, its two ends included."""


class Cell:
    """One model on one target: its results so far, and what makes the rest."""

    def __init__(self, model: str, target: str) -> None:
        self.path = RESULTS / f"{model}-{target}.json"
        self.data: dict[str, Any] = {"model": model, "target": target}
        if self.path.exists():
            self.data = json.loads(self.path.read_text())
        for part in ("named", "points", "plans"):
            self.data.setdefault(part, {})
        self.built = remat.models.build(model, **MODELS[model])
        self.options = {"target": target, "optimizer": optax.adamw(1e-3)}
        self.opened = self._open()
        unwrapped = with_policy(self.built.loss, "none")
        setup = self.opened.meter.setup
        self.base_flops = prepare(unwrapped, setup).flops
        self.data["forward_flops"] = forward_flops(unwrapped, setup)

    def _open(self) -> Opened:
        return open_loss(
            self.built.loss,
            self.built.args,
            {},
            step=None,
            has_aux=False,
            argnums=0,
            compiler_options=None,
            allow_offload=True,
            say=lambda line: print("   ", line, flush=True),
            **self.options,
        )

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, json.dumps(self.data, indent=1) + "\n")

    def compile(self, part: str, label: str, allotment: Allotment) -> None:
        """Compile one choice, if that was not done before."""
        if label in self.data[part]:
            return
        candidate = Candidate(label=label, allotment=allotment, removes=label == "none")
        try:
            (found,) = self.opened.meter.full((candidate, None))
            self.data[part][label] = self._figures(found)
        except remat.CompileError as error:
            failed = str(error).partition("\n")[0][:200]
            self.data[part][label] = {"failed": failed}
        self.save()

    def _figures(self, found: Measured) -> dict[str, Any]:
        allotment = found.candidate.allotment
        return {
            "peak_bytes": found.peak_bytes,
            "recompute_flops": found.flops - self.base_flops,
            "estimated_step_s": found.report.estimated_step_s,
            "host_bytes": found.report.host_bytes,
            "fits": found.report.fits,
            "kept_bytes": allotment.bytes,
        }

    def named(self) -> list[Named]:
        """The named policies, those last whose offload hides behind compute."""
        kinds = self.opened.kinds
        room = sum(kind.host_bytes * kind.n_copies * kind.times for kind in kinds)
        found = named_candidates(kinds)
        fitting = [named for named in found if named.allotment.host_bytes <= room]
        return sorted(fitting, key=lambda named: named.allotment.host_bytes)

    def compile_named(self) -> None:
        for named in self.named():
            self.compile("named", named.names[0], named.allotment)
            self.data["named"][named.names[0]]["also"] = named.names[1:]
        self.save()

    def compile_points(self) -> None:
        """The ends, and up to eight choices that are better than policies."""
        by_name = {named.names[0]: named.allotment for named in self.named()}
        for name in ("nothing", "none"):
            self.data["points"][name] = self.data["named"][name]
        for name in cover(by_name, self._improved, MAX_POINTS - 2):
            found = faster(self.opened.kinds, by_name[name])
            self.compile("points", name, found)

        self._fill_gaps()

    def _fill_gaps(self) -> None:
        """Points between those furthest apart, where layers are split."""
        points = self.data["points"]
        while len(points) < MAX_POINTS:
            kept = sorted(one["kept_bytes"] for one in compiled(points).values())
            low, high = max(
                itertools.pairwise(kept), key=lambda pair: pair[1] - pair[0]
            )
            found = solve_all(self.opened.kinds, (low + high) // 2)
            label = f"{found.bytes >> 20} MiB kept"
            if found.bytes in kept or label in points:
                return
            self.compile("points", label, found)

    def _improved(self, name: str, allotments: Mapping[str, Allotment]) -> set[str]:
        """The policies that what is faster than one of them beats, by the model."""
        found = self._modelled(faster(self.opened.kinds, allotments[name]))
        return {
            other
            for other, given in allotments.items()
            if all(a <= b for a, b in zip(found, self._modelled(given), strict=True))
            and any(
                a < (1 - 1e-3) * b
                for a, b in zip(found, self._modelled(given), strict=True)
            )
        }

    def _modelled(self, allotment: Allotment) -> tuple[float, float, float]:
        kinds = self.opened.kinds
        flops = by_kind_sum(kinds, allotment, "recompute_flops")
        return allotment.bytes, flops, estimated_s(kinds, allotment)

    def make_plans(self) -> None:
        """The closed loop for each policy, its peak for a budget."""
        for name, figures in self.data["named"].items():
            if name in self.data["plans"] or not figures.get("fits"):
                continue
            plan = remat.plan(
                self.built.loss,
                *self.built.args,
                budget=figures["peak_bytes"],
                **self.options,
            )
            self.data["plans"][name] = {
                "peak_bytes": plan.peak_bytes,
                "recompute_flops": plan.recompute_flops,
                "estimated_step_s": plan.estimated_step_s,
                "origin": plan.origin,
                "n_compiles": plan.n_compiles,
                "first_prediction_error": plan.first_prediction_error,
                "trials": [dataclasses.asdict(trial) for trial in plan.trials],
            }
            print("   ", name, self.data["plans"][name]["origin"], flush=True)
            self.save()


def cover(
    allotments: Mapping[str, Allotment],
    improved: Callable[[str, Mapping[str, Allotment]], set[str]],
    n: int,
) -> list[str]:
    """So many policies whose faster choices beat the most others, greedily."""
    beaten = {name: improved(name, allotments) for name in allotments}
    taken: list[str] = []
    left = set().union(*beaten.values())
    while left and len(taken) < n:
        best = max(beaten, key=lambda name: len(beaten[name] & left))
        taken.append(best)
        left -= beaten[best]
    return taken


def main() -> None:
    """Goes on with what is missing, then writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--table", action="store_true", help="compile nothing")
    given = parser.parse_args()
    for model in [] if given.table else given.models.split(","):
        for target in given.targets.split(","):
            print(model, target, flush=True)
            cell = Cell(model, target)
            cell.compile_named()
            cell.compile_points()
            if given.plans:
                cell.make_plans()
    cells = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    write_text(TABLE, markdown(cells))
    print(TABLE)


if __name__ == "__main__":
    from remat._targets._target import quiet_environment

    quiet_environment()
    main()

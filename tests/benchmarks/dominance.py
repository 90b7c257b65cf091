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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optax

import remat
from remat._compare._measure import forward_flops, prepare
from remat._files import write_text
from remat._plan._choose import Allotment
from remat._plan._kinds import by_kind_sum, estimated_s, faster, solve_all
from remat._plan._meter import Candidate, Measured
from remat._plan._modelled import Modelled
from remat._plan._named import Named, named_candidates
from remat._plan._opened import Opened, open_loss
from remat._plan._pool import Pool
from remat._regions._with_policy import with_policy
from tests.benchmarks.dominance_table import champion, compiled, markdown

RESULTS = Path(__file__).parent / "results" / "dominance"
TABLE = RESULTS.parent / "dominance.md"
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2-xl": {},
    "llama-3.2-1b": {},
    "vit-b16-1024": {},
    "mixtral-8x7b": {
        "n_layers": 4,
        "d_model": 1024,
        "d_mlp": 3584,
        "n_heads": 16,
        "n_kv_heads": 4,
        "seq": 2048,
        "batch": 2,
    },
}
"""Presets, and how they differ from them: of Mixtral, what one device holds."""
TARGETS = ("v5e", "v5p", "v6e", "a100-80gb", "h100")
FSDP: dict[str, Any] = {"mesh": "fsdp=4"}
ON_TPU: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("gpt2-xl", "v5e"): ("v5e:2x2", {**FSDP, "batch": 4}),
    ("gpt2-xl", "v6e"): ("v6e:2x2", {**FSDP, "batch": 8}),
    ("gpt2-xl", "v5p"): ("v5p", {"batch": 4}),
    ("llama-3.2-1b", "v5e"): ("v5e:2x2", {**FSDP, "batch": 4, "seq": 1024}),
    ("llama-3.2-1b", "v6e"): ("v6e", {"batch": 2, "seq": 1024}),
    ("llama-3.2-1b", "v5p"): ("v5p", {"batch": 4, "seq": 2048}),
    ("vit-b16-1024", "v5e"): ("v5e", {"batch": 1}),
    ("vit-b16-1024", "v6e"): ("v6e", {"batch": 1}),
    ("vit-b16-1024", "v5p"): ("v5p", {"batch": 4}),
}
"""Where a TPU has no room for a preset (its compiler refuses what does not fit, and
gives no figures): the devices, and the sizes that most policies fit with."""
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
        place, sizes = ON_TPU.get((model, target), (target, {}))
        sizes = {**MODELS[model], **sizes}
        self.built = remat.models.build(
            model, target=place if "mesh" in sizes else None, **sizes
        )
        self.data["place"], self.data["sizes"] = place, sizes
        self.options = {"target": place, "optimizer": optax.adamw(1e-3)}
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
        points, named = self.data["points"], compiled(self.data["named"])
        for name in ("nothing", "none"):
            points[name] = self.data["named"][name]
        by_name = {one.names[0]: one.allotment for one in self.named()}
        unbeaten = {
            name: by_name[name]
            for name, policy in named.items()
            if champion(points, policy) is policy
        }
        found = self._candidates(by_name)
        beats = {label: self._beaten(one, unbeaten) for label, one in found.items()}
        for label in cover(beats, MAX_POINTS - len(points)):
            self.compile("points", label, found[label])
        self._fill_gaps()

    def _candidates(self, by_name: Mapping[str, Allotment]) -> dict[str, Allotment]:
        """For each policy, what is faster, and what recomputes less."""
        kinds = self.opened.kinds
        pool = Pool(kinds, tuple(by_name.values()))
        found = {}
        for name, given in by_name.items():
            found[name] = faster(kinds, given)
            mix = pool.mix(given.bytes, Modelled.of(kinds, given))
            if mix is not None:
                found[f"{name}, less"] = mix
        return found

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

    def _beaten(
        self, found: Allotment, allotments: Mapping[str, Allotment]
    ) -> set[str]:
        """The policies that a choice beats, by the model."""
        ours = self._modelled(found)
        return {
            name
            for name, given in allotments.items()
            if all(a <= b for a, b in zip(ours, self._modelled(given), strict=True))
            and any(
                a < (1 - 1e-3) * b
                for a, b in zip(ours, self._modelled(given), strict=True)
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


def cover(beats: Mapping[str, set[str]], n: int) -> list[str]:
    """So many choices that beat the most policies together, greedily."""
    taken: list[str] = []
    left = set().union(*beats.values())
    while left and len(taken) < n:
        best = max(beats, key=lambda label: len(beats[label] & left))
        taken.append(best)
        left -= beats[best]
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

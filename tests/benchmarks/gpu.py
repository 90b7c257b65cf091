"""Predicted against measured on one NVIDIA card, in at most eight minutes.

    pip install -e ".[targets]" "jax[cuda12]"
    python -m tests.benchmarks.gpu --out DIR
    python -m tests.benchmarks.gpu --out DIR --dry-run    # on a CPU, without timings

For each model and policy, and for plans at two budgets: the compile-only prediction for
this card, made without using it; what `memory_analysis` says on it; the allocator's
peak; the median time of a step; and how much of an offload hides behind the compute.
Prints as it goes, and `DIR/gpu.json` holds all that is known after each case, so that a
run that is cut short is of use. What the time did not suffice for is listed as
`skipped`, most telling cases first. Works with jax 0.10 to 0.12.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu_case import write
from tests.benchmarks.gpu_child import Child, Clock
from tests.benchmarks.gpu_summary import summary, summary_lines

POLICIES = (
    *("plan1", "nothing", "save_dots_no_batch", "none", "plan2", "save_dots"),
    *("offload_dots_no_batch", "minimal_with_context", "save_qkv_proj", "offload_dots"),
)
"""In the order they are measured in; a plan as soon as there is one."""
SECONDS = 450.0
"""For all of it."""
STEPS_SECONDS = 4.0
"""Steps of one case."""
CASE_SHARE = 0.2
"""Of the time, at most, for one case; one that hangs shall not cost the others."""
DEVICE_SECONDS = 60.0
"""For jax to find the card."""
PREDICT_SHARE = 0.6
"""Of the time, at most, for predictions."""
STARTS_WITH = 25.0
"""Seconds that must be left for a case to be started."""

MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
"""What JAX may take of the card."""

Case = tuple[str, str]
"""A model and a policy."""


@contextlib.contextmanager
def predicting(
    models: list[str], policies: list[str], target: str, out: Path
) -> Iterator[dict[str, Child]]:
    """A process for each model that predicts it, without the card, while others run."""
    hidden = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", **MEMORY}
    args = ("--target", target, "--policies", ",".join(policies))
    children = {
        model: Child.start(
            "predict", out / f"{model}-predicted.json", hidden, "--model", model, *args
        )
        for model in models
    }
    try:
        yield children
    finally:
        for child in children.values():
            child.stop()


def case_environment(out: Path) -> dict[str, str]:
    """Variables of a case: most of the card, and gemms tuned once for all cases."""
    cache = out / "autotune"
    cache.mkdir(exist_ok=True)
    return {
        **MEMORY,
        "XLA_FLAGS": f"--xla_gpu_per_fusion_autotune_cache_dir={cache.resolve()}",
    }


def measured(
    cases: list[Case],
    predictions: Mapping[str, Child],
    out: Path,
    clock: Clock,
    seconds: float,
) -> Iterator[tuple[dict[str, Any], list[Case]]]:
    """The row of each case as it is known, and the cases that still wait.

    Named policies are measured while plans are being made.
    """
    environment = case_environment(out)
    waiting = list(cases)
    told: set[str] = set()
    while waiting and clock.left > STARTS_WITH:
        for model, child in predictions.items():
            if clock.used > PREDICT_SHARE * clock.seconds:
                child.stop()
            if model not in told and not child.runs:
                told.add(model)
                rows = child.found().get("rows", child.found())
                clock.say(f"{model}: predicted {', '.join(rows)}")
        case = next((one for one in waiting if _is_ready(one, predictions)), None)
        if case is None:
            if not any(child.runs for child in predictions.values()):
                return
            time.sleep(1.0)
            continue
        waiting.remove(case)
        model, policy = case
        args = ("--model", model, "--policies", policy, "--seconds", str(seconds))
        path = out / f"{model}-{policy}-measured.json"
        beside = [one for one, child in predictions.items() if child.runs]
        row = Child.start("measure", path, environment, *args).wait(
            min(clock.left, CASE_SHARE * clock.seconds)
        )
        # Compiles beside a case take cores from it, not the card.
        yield {"model": model, "policy": policy, "beside": beside, **row}, waiting


def _is_ready(case: Case, predictions: Mapping[str, Child]) -> bool:
    model, policy = case
    if not policy.startswith("plan"):
        return True
    return policy in predictions[model].found().get("rows", ())


def _line(row: Mapping[str, Any]) -> str:
    name = f"{row['model']} {row['policy']}"
    for end in ("failed", "out_of_memory"):
        if end in row:
            return f"{name}: {end.replace('_', ' ')}: {row[end][:200]}"
    mib = [f"{row['analysis_peak_bytes'] / 2**20:,.0f} MiB analysed"]
    if row["predicted"]:
        mib.insert(0, f"{row['predicted']['peak_bytes'] / 2**20:,.0f} MiB predicted")
    if row.get("measured_peak_bytes"):
        mib.append(f"{row['measured_peak_bytes'] / 2**20:,.0f} MiB measured")
    if row.get("step_s"):
        mib.append(f"{1e3 * row['step_s']:.1f} ms a step")
    return f"{name}: {', '.join(mib)}"


def run(
    out: Path,
    *,
    models: list[str],
    policies: list[str],
    seconds: float,
    dry_run: bool,
) -> dict[str, Any]:
    """All of the benchmark; returns what it writes."""
    out.mkdir(parents=True, exist_ok=True)
    clock = Clock(seconds)
    device = Child.start("device", out / "device.json", {}).wait(DEVICE_SECONDS)
    clock.say(f"device: {device}")
    if "failed" in device:
        raise SystemExit(f"jax finds no device: {device['failed']}")
    if device["platform"] != "gpu" and not dry_run:
        raise SystemExit(
            f"wanted an NVIDIA GPU, but jax finds {device['kind']}; "
            "install jax[cuda12], or pass --dry-run to skip the timings"
        )
    target = device["kind"] if device["platform"] == "gpu" else "cpu"
    rows: list[dict[str, Any]] = []
    cases = [(model, policy) for policy in policies for model in models]
    with predicting(models, policies, target, out) as predictions:

        def so_far(waiting: list[Case]) -> dict[str, Any]:
            known = {model: child.found() for model, child in predictions.items()}
            found = _found(rows, known, waiting)
            found |= {"device": device, "dry_run": dry_run, "seconds": clock.used}
            write(out / "gpu.json", found)
            return found

        found = so_far(cases)
        per_case = 0.0 if dry_run else STEPS_SECONDS
        for row, waiting in measured(cases, predictions, out, clock, per_case):
            rows.append(row)
            found = so_far(waiting)
            clock.say(_line(found["rows"][-1]))
        # A case that was measured may have been predicted since.
        measured_now = {(row["model"], row["policy"]) for row in rows}
        found = so_far([case for case in cases if case not in measured_now])
    for line in summary_lines(found["summary"]):
        clock.say(line)
    clock.say(f"wrote {out / 'gpu.json'}")
    return found


def _found(
    rows: list[dict[str, Any]], known: Mapping[str, Any], waiting: list[Case]
) -> dict[str, Any]:
    def predicted(row: Mapping[str, Any]) -> Any:
        return known[row["model"]].get("rows", {}).get(row["policy"])

    found = {
        "schema": "remat.gpu_benchmark/1",
        "rows": [{**row, "predicted": predicted(row)} for row in rows],
        "skipped": [" ".join(case) for case in waiting],
        "unpredicted": {m: p["failed"] for m, p in known.items() if "failed" in p},
        "budgets": {m: p.get("budgets", {}) for m, p in known.items()},
    }
    return {**found, "summary": summary(found)}


def main() -> None:
    """Reads the options and runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--dry-run", action="store_true", help="no steps are run")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all of it")
    parser.add_argument("--models", help="of gpt2, llama, gpt2-tiny, llama-tiny")
    parser.add_argument("--policies", default=",".join(POLICIES))
    given = parser.parse_args()
    default = "gpt2-tiny,llama-tiny" if given.dry_run else "gpt2,llama"
    models: str = given.models or default
    run(
        given.out,
        models=models.split(","),
        policies=given.policies.split(","),
        seconds=given.seconds,
        dry_run=given.dry_run,
    )


if __name__ == "__main__":
    main()
